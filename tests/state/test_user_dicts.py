"""Arguments that derive from `collections.UserDict`, as the batches of transformers do."""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from transformers import BatchEncoding, BatchFeature

import roam
from newer import needs_2_15
from roam.state.arguments import Taker, argument_path


class Noted(UserDict):  # type: ignore[type-arg]
    """A batch with attributes of its own."""

    def __init__(self, data: Any, scale: float = 0.5) -> None:
        super().__init__(data)
        self.scale = scale
        self.seen: list[Any] = []

    def scaled(self) -> Any:
        return self["x"] * self.scale


class Closing(UserDict):  # type: ignore[type-arg]
    def __del__(self) -> None:
        pass


def entries(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(64, 8, generator=generator), "labels": torch.arange(64) % 3}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = F.gelu(torch.tanh(layer(x)))
        return self.last(x)


class Task:
    """Trains a model; `change` takes the loss, and does something to the batch."""

    def __init__(self, change: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.change = change

    def step(self, batch: Any) -> Any:
        self.optimizer.zero_grad()
        loss, result = self.change(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach(), result


def pops(model: Any, batch: Any) -> Any:
    labels = batch.pop("labels")
    return F.cross_entropy(model(**batch), labels), None


def moves(model: Any, batch: Any) -> Any:
    batch = BatchEncoding.to(batch, "cpu")
    return F.cross_entropy(model(batch.data["x"]), batch["labels"]), batch


def sets_attributes(model: Any, batch: Any) -> Any:
    batch.scale = 2.0
    batch.last = batch["x"] * 2
    return model(batch["x"]).square().mean(), None


def deletes_its_data(model: Any, batch: Any) -> Any:
    x = batch["x"]
    batch.data = {"y": x + 1}
    return model(x).square().mean(), list(batch)


def makes_others(model: Any, batch: Any) -> Any:
    batch["more"] = UserDict(y=batch["x"] + 1)
    return model(batch["more"]["y"]).square().mean(), type(batch)({"z": batch["x"] * 2})


def exchanges(model: Any, batch: Any) -> Any:
    inner, batch["inner"] = batch["inner"], {"pair": (batch["inner"], 1)}
    inner["x"] = batch["x"] + inner["x"]
    return model(inner["x"]).square().mean(), [inner]


def described(value: Any, names: dict[int, int]) -> Any:
    name = names.setdefault(id(value), len(names))
    if isinstance(value, torch.Tensor):
        return name, value.requires_grad, value.tolist()
    if isinstance(value, UserDict):
        return name, type(value), described(vars(value), names)
    if isinstance(value, dict):
        return [(key, described(part, names)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [described(part, names) for part in value]
    return 0 if isinstance(value, tokenizers.Encoding) else value


def trained(
    change: Callable[..., Any], make: Any, compiles: bool, most: int = 2, **options: Any
) -> Any:
    task = Task(change)
    step = roam.compile(task.step, **options) if compiles else task.step
    found = []
    for number in range(5):
        given = make(number)
        data = given.data
        texts = given.__dict__.get("_encodings")
        result = step(given)
        found.append(described([given, data, result], {}))
        assert given.__dict__.get("_encodings") is texts
    if compiles:
        assert len(step.plans) <= most
    return found, [parameter.tolist() for parameter in task.model.parameters()]


CASES = {
    "pops": (pops, lambda number: BatchEncoding(entries(number))),
    "pops a feature": (pops, lambda number: BatchFeature(entries(number))),
    "moves": (moves, lambda number: BatchEncoding(entries(number))),
    "attributes": (sets_attributes, lambda number: Noted(entries(number))),
    "data": (deletes_its_data, lambda number: UserDict(entries(number))),
    "others": (makes_others, lambda number: UserDict(entries(number))),
    "exchanges": (
        exchanges,
        lambda number: UserDict(entries(number), inner=UserDict(entries(number + 9))),
    ),
}


@needs_2_15
@pytest.mark.auto
@pytest.mark.sweep
@pytest.mark.parametrize("memory", [None, "85%"])
@pytest.mark.parametrize("case", CASES)
def test_steps_leave_what_eager_pytorch_leaves(case: str, memory: str | None) -> None:
    change, make = CASES[case]
    assert trained(change, make, True, memory=memory) == trained(change, make, False)


def tokenized() -> Callable[[int], Any]:
    """Makes batches as a fast tokenizer does."""
    words = list("abcdef")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: place for place, word in enumerate(words)}, "a")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()

    def make(number: int) -> Any:
        texts = [" ".join(words[(number + k) % 6] for k in (0, place, 2)) for place in range(64)]
        return BatchEncoding(entries(number), tokenizer.encode_batch(texts))

    return make


def looks_at_none(model: Any, batch: Any) -> Any:
    labels = batch.pop("labels")
    return F.cross_entropy(model(batch["x"]), labels), (batch, batch.is_fast, batch.encodings)


def looks_at_an_encoding(model: Any, batch: Any) -> Any:
    return model(batch["x"]).square().mean() * (batch.encodings[0].ids[0] + 1), None


def asks_whether_two_are_one(model: Any, batch: Any) -> Any:
    factor = 2 if batch.encodings[0] is batch.encodings[1] else 3
    return model(batch["x"]).square().mean() * factor, None


def asks_for_its_class(model: Any, batch: Any) -> Any:
    factor = 2 if type(batch.encodings[0]) is tokenizers.Encoding else 3
    return model(batch["x"]).square().mean() * factor, None


@needs_2_15
@pytest.mark.auto
@pytest.mark.parametrize("change", [looks_at_none, asks_for_its_class])
def test_texts_that_the_step_does_not_look_at_need_no_plans(change: Callable[..., Any]) -> None:
    expected = trained(change, tokenized(), False)
    assert trained(change, tokenized(), True, most=3) == expected


def test_whether_two_texts_are_one() -> None:
    change = asks_whether_two_are_one
    assert trained(change, tokenized(), True, most=3) == trained(change, tokenized(), False)


def test_texts_that_the_step_looks_at_are_refused() -> None:
    with pytest.raises(roam.CaptureError, match="a tokenizer has left") as caught:
        trained(looks_at_an_encoding, tokenized(), True)
    assert caught.value.code == "value_reached_python"


@needs_2_15
@pytest.mark.auto
def test_pytree_still_takes_them_for_leaves() -> None:
    trained(pops, CASES["pops"][1], True)
    for given in (UserDict(a=1), BatchEncoding({"a": 1})):
        assert pytree.tree_leaves(given) == [given]


def test_attributes_and_methods_are_guarded() -> None:
    def scales(model: Any, batch: Any) -> Any:
        return model(batch.scaled()).square().mean(), [len(batch.seen), type(batch).__name__]

    class Other(Noted):
        def scaled(self) -> Any:
            return self["x"] - self.scale

    eager, task = Task(scales), Task(scales)
    step = roam.compile(task.step)
    for number in range(8):
        makes: list[Callable[[], Any]] = [
            lambda: Noted(entries(0)),
            lambda: Noted(entries(1), 0.25),
            lambda: Other(entries(2)),
            lambda: Noted(entries(3)),
        ]
        one, other = makes[number % 4](), makes[number % 4]()
        for given in (one, other):
            given.seen += [1] * (number // 4)
        assert described(step(one), {}) == described(eager.step(other), {})
        assert vars(one).keys() == vars(other).keys()


def test_what_a_message_calls_their_parts() -> None:
    args, kwargs = (Noted(entries(0)),), {"batch": UserDict(n=UserDict(m=1))}
    paths = Taker().take(args, kwargs).paths(argument_path, args, kwargs)
    assert paths == ["args[0]['x']", "args[0]['labels']", "args[0].scale", "batch['n']['m']"]


@pytest.mark.parametrize("kind", [Closing, UserDict])
def test_those_that_are_more_than_their_attributes_are_still_read(kind: Any) -> None:
    def reads(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["labels"]), None

    eager, task = Task(reads), Task(reads)
    step = roam.compile(task.step)
    for number in range(4):
        given = kind(entries(number))
        watched = weakref.ref(given)
        assert torch.equal(step(given)[0], eager.step(kind(entries(number)))[0])
        assert watched() is given


def test_one_that_holds_itself_is_not_taken_apart() -> None:
    def reads(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["self"]["x"]), batch["labels"]), None

    eager, task = Task(reads), Task(reads)
    step = roam.compile(task.step)
    for number in range(3):
        given = UserDict(entries(number))
        given["self"] = given
        assert torch.equal(step(given)[0], eager.step(given)[0])


@needs_2_15
@pytest.mark.auto
def test_one_in_two_places_is_one_in_the_step() -> None:
    model = Model()

    def step(one: Any, other: Any) -> Any:
        loss = model(one.pop("x")).sum()
        loss.backward()
        inner = other.get("inner", other)
        return "x" in inner, inner is one, inner.data is one.data

    compiled = roam.compile(step)
    assert compiled(UserDict(entries(0)), UserDict(entries(1))) == (True, False, False)
    for _ in range(2):
        given = UserDict(entries(2))
        assert compiled(given, given) == (False, True, True)
        given = UserDict(entries(2))
        assert compiled(given, {"inner": given}) == (False, True, True)
        given, other = UserDict(entries(2)), UserDict()
        other.data = given.data
        assert compiled(given, other) == (False, False, True)
        assert "x" not in given


@needs_2_15
@pytest.mark.auto
def test_a_step_that_raises_leaves_what_eager_pytorch_leaves() -> None:
    def checks(model: Any, batch: Any) -> Any:
        batch.pop("labels")
        if batch["x"].sum() > 1e3:
            raise ValueError("too large")
        return model(batch["x"]).sum(), None

    step = roam.compile(Task(checks).step)
    for number in range(3):
        step(BatchEncoding(entries(number)))
    given = BatchEncoding(entries(0))
    given["x"] += 1e3
    with pytest.raises(ValueError, match="too large"):
        step(given)
    assert list(given) == ["x"]


def test_a_batch_that_an_object_holds_afterwards_is_refused() -> None:
    class Holder:
        def __init__(self, batch: Any) -> None:
            self.batch = batch

    def holds(model: Any, batch: Any) -> Any:
        return model(batch["x"]).sum(), Holder(batch)

    def holds_its_data(model: Any, batch: Any) -> Any:
        return model(batch["x"]).sum(), Holder(batch.data)

    for change in (holds, holds_its_data):
        with pytest.raises(roam.CaptureError) as caught:
            roam.compile(Task(change).step)(UserDict(entries(0)))
        assert caught.value.code == "result"


@needs_2_15
@pytest.mark.auto
@pytest.mark.parametrize("change", [pops, moves])
def test_compare_gives_each_run_a_batch_of_its_own(change: Callable[..., Any]) -> None:
    given = BatchEncoding(entries(0))
    comparison = roam.compare(Task(change).step, given)
    assert comparison.equal, comparison
    assert list(given) == ["x", "labels"]
