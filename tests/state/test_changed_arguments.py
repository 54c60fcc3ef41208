"""Steps that change lists and dictionaries among their arguments, as `batch.pop("labels")` does:
beside their plans as eagerly; a plan alone is refused.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BatchEncoding
from transformers.utils import ModelOutput

import roam
from newer import needs_2_15


class Pair(NamedTuple):
    one: Any
    other: Any


def batch(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(4, 8, generator=generator) for _ in range(2))
    return {
        "x": x,
        "labels": torch.arange(4) % 3,
        "names": ["a", "b"],
        "weight": 0.5 + seed,
        "more": OrderedDict(y=y, parts=[x, y, y[:2]], counts=defaultdict(int, n=2)),
        "output": Output(one=[y]),
        "queue": deque([{"x": x}]),
        "numbers": {1: y},
    }


@dataclass
class Output(ModelOutput):
    one: Any = None


class Task:
    """A model with its optimizer; `step` does with each batch what `change` says."""

    def __init__(self, change: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(8, 3)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.change = change

    def step(self, batch: Any) -> Any:
        self.optimizer.zero_grad()
        result = self.change(self.net, batch)
        loss = self.net(batch.get("x", torch.ones(4, 8))).square().mean()
        loss.backward()
        self.optimizer.step()
        return result, loss.detach()


def pops(net: Any, batch: Any) -> Any:
    return F.cross_entropy(net(batch.pop("x")), batch.pop("labels")).detach()


def deletes_and_clears(net: Any, batch: Any) -> None:
    del batch["labels"]
    batch["more"]["parts"].clear()
    batch["more"].popitem(last=False)


def moves_to_a_device(net: Any, batch: Any) -> None:
    for key in batch:
        if isinstance(batch[key], torch.Tensor):
            batch[key] = batch[key].to("cpu")
    batch["x"] = batch["x"].to(torch.float64).float()


def keeps_outputs(net: Any, batch: Any) -> Any:
    batch["logits"] = net(batch["x"])
    batch["detached"] = batch["logits"].detach()
    batch["weight"] = batch["weight"] * 2
    return batch["logits"]


def changes_lists(net: Any, batch: Any) -> None:
    parts = batch["more"]["parts"]
    parts.append(net(parts[0]).detach())
    parts.insert(0, parts.pop())
    parts.reverse()
    batch["names"][0] = "c"
    batch["names"] += ["d"]


def sets_again_what_is_there(net: Any, batch: Any) -> None:
    batch["x"] = batch["x"]
    batch["names"] = batch["names"]


def changes_the_order(net: Any, batch: Any) -> None:
    batch["x"] = batch.pop("x")
    batch["more"].move_to_end("y")


def asks_a_dictionary_with_defaults(net: Any, batch: Any) -> int:
    batch["more"]["counts"]["n"] += 1
    return batch["more"]["counts"]["m"]  # type: ignore[no-any-return]


def puts_an_equal_key(net: Any, batch: Any) -> None:
    batch["more"]["counts"][1] = batch["x"]
    batch["numbers"][True] = batch["numbers"].pop(1)


def puts_new_containers(net: Any, batch: Any) -> None:
    batch["new"] = {"pair": Pair(batch["x"] * 2, [batch["labels"], "text"]), "net": net.weight}
    batch.setdefault("kept", []).append(batch["new"]["pair"].one)


def puts_containers_elsewhere(net: Any, batch: Any) -> Any:
    batch["parts"] = batch["more"].pop("parts")
    batch["twice"] = batch["parts"]
    return batch["more"]


def returns_the_batch(net: Any, batch: Any) -> Any:
    batch["loss"] = net(batch["x"]).mean().detach()
    return Pair(batch, {"names": batch["names"]})


def returns_it_unchanged(net: Any, batch: Any) -> Any:
    return [batch, batch["more"]["parts"]]


def returns_it_in_other_containers(net: Any, batch: Any) -> Any:
    return deque([batch["names"]], maxlen=3), Output(one=batch["more"]["parts"])


def returns_other_containers(net: Any, batch: Any) -> Any:
    batch["output"].one.append(batch["x"] * 2)
    return batch["output"], [batch["queue"]], batch["output"].one


CHANGES = [
    pops,
    deletes_and_clears,
    moves_to_a_device,
    keeps_outputs,
    changes_lists,
    sets_again_what_is_there,
    changes_the_order,
    asks_a_dictionary_with_defaults,
    puts_an_equal_key,
    puts_new_containers,
    puts_containers_elsewhere,
    returns_the_batch,
    returns_it_unchanged,
    returns_it_in_other_containers,
    returns_other_containers,
]


def described(value: Any, names: dict[int, str], path: str = "made") -> Any:
    """Classes, keys, bits, and which objects are one and the same, by the paths at which `names`
    met them first.
    """
    name = names.setdefault(id(value), path)
    if isinstance(value, torch.Tensor):
        return name, str(value.dtype), value.requires_grad, value.tolist()
    if isinstance(value, UserDict):
        return name, type(value), described(vars(value), names, path)
    if isinstance(value, dict):
        parts = [
            (repr(key), described(part, names, f"{path}.{key}")) for key, part in value.items()
        ]
        return name, type(value), parts
    if isinstance(value, (list, deque)):
        return name, type(value), [described(part, names, f"{path}[]") for part in value]
    if isinstance(value, tuple):
        return type(value), [described(part, names, f"{path}[]") for part in value]
    return value


def left_by(run: Callable[..., Any], numbers: range, kind: Any = dict) -> list[Any]:
    found = []
    for number in numbers:
        given = batch(number)
        if kind is not dict:
            given = kind(given | {"more": UserDict(given["more"])})
        names: dict[int, str] = {}
        described(given, names, "given")
        more = given["more"]
        before = [given, *given.values(), *more.values(), *more["parts"]]  # so that ids are theirs
        result = run(given)
        found.append([described(value, names) for value in (given, result)])
        del before
    return found


@needs_2_15
@pytest.mark.auto
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((dict, change) for change in CHANGES),
        *(
            (kind, change)
            for kind in (UserDict, BatchEncoding)
            for change in (pops, returns_the_batch)
        ),
    ],
)
def test_arguments_and_results_are_eagers(kind: Any, change: Callable[..., Any]) -> None:
    eager, task = Task(change), Task(change)
    step = roam.compile(task.step)
    assert left_by(step, range(5), kind) == left_by(eager.step, range(5), kind)
    assert step.runs_beside is (change is not sets_again_what_is_there)
    for one, other in zip(task.net.parameters(), eager.net.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
@pytest.mark.parametrize("change", [one for one in CHANGES if one is not sets_again_what_is_there])
def test_a_plan_alone_is_refused_and_changes_nothing(kind: Any, change: Callable[..., Any]) -> None:
    given = kind(batch(0))
    names: dict[int, str] = {}
    before = described(given, names, "given")
    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(Task(change).step)(given)
    assert caught.value.code in ("moved", "result")
    assert described(given, names, "given") == before


@needs_2_15
@pytest.mark.auto
def test_metrics_that_every_call_is_given_again() -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        net, metrics = nn.Linear(8, 3), dict[str, Any]()

        def step(x: torch.Tensor, metrics: dict[str, Any], net: nn.Module = net) -> None:
            loss = net(x).square().mean()
            loss.backward()
            metrics["sum"] = metrics.get("sum", 0.0) + loss.detach()
            metrics["last"] = loss.detach()

        run: Any = roam.compile(step) if compiles else step
        for number in range(5):
            run(batch(number)["x"], metrics)
        found.append({name: value.tolist() for name, value in metrics.items()})
    assert found[0] == found[1]


def compares(one: Any, other: Any) -> Any:
    return one is other, [one["x"] is other["x"]]


def changes_one(one: Any, other: Any) -> Any:
    labels = one.pop("labels")
    other["seen"] = len(one)
    return one is other, "labels" in other, labels


def changes_parts(one: Any, other: Any) -> Any:
    one["more"]["y"] = one["x"] * 2
    other["queue"][0]["z"] = other["more"]["y"] + 1
    return one["more"] is other["more"], one["queue"] is other["queue"]


@needs_2_15
@pytest.mark.auto
@pytest.mark.parametrize("make", [dict, UserDict, lambda given: ({"pair": [given]}, 1)[0]])
@pytest.mark.parametrize("change", [compares, changes_one, changes_parts])
def test_one_dictionary_in_two_places_is_one_in_the_step(
    change: Callable[..., Any], make: Callable[..., Any]
) -> None:
    def trained(compiles: bool) -> Any:
        net = nn.Linear(8, 3)
        nn.init.ones_(net.weight), nn.init.ones_(net.bias)

        def step(one: Any, other: Any) -> Any:
            one, other = (value["pair"][0] if "pair" in value else value for value in (one, other))
            found = change(one, other)
            (net(one["x"]).sum() + net(other["x"]).sum()).backward()
            return found

        run, found = roam.compile(step) if compiles else step, []
        for number in range(8):
            one = make(batch(number))
            other = one if number % 2 else make(batch(number + 1))
            if number % 4 == 2:
                inner = [value["pair"][0] if "pair" in value else value for value in (one, other)]
                inner[1]["more"], inner[1]["x"] = inner[0]["more"], inner[0]["x"]
            found += [run(one, other), repr(one), repr(other), net.weight.grad.tolist()]
        return repr(found)

    assert trained(True) == trained(False)


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def test_a_dictionary_that_an_object_among_the_arguments_holds_too_is_one() -> None:
    net = nn.Linear(8, 3)

    def step(given: Any, holder: Any) -> Any:
        net(holder.held["x"]).sum().backward()
        return holder.held is given

    compiled = roam.compile(step)
    for number in range(8):
        given = batch(number)
        is_same = number % 3 == 2
        assert compiled(given, Holder(given if is_same else batch(number))) is is_same


def changes_it(own: Any, given: Any) -> Any:
    given["rate"] *= 0.9
    given["count"] += 1
    return own["rate"] * own["count"]


def changes_its_own(own: Any, given: Any) -> Any:
    own["rate"] *= 0.9
    return given["rate"]


def removes_and_returns_the_others(own: Any, given: Any) -> Any:
    given["new"] = given["parts"][-1] * 2
    return given.pop("new") + own["parts"][0]


def asks_whether_they_are_one(own: Any, given: Any) -> Any:
    return given is own, given["parts"] is own["parts"]


def puts_a_tensor(own: Any, given: Any) -> Any:
    own["last"] = given["parts"][0] + own["last"]
    return given["last"]


@needs_2_15
@pytest.mark.auto
@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        changes_it,
        changes_its_own,
        removes_and_returns_the_others,
        asks_whether_they_are_one,
        puts_a_tensor,
    ],
)
def test_a_dictionary_of_the_steps_state_is_the_one_that_the_step_is_given(
    change: Callable[..., Any], is_late: bool, kind: Any
) -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(8, 3)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        own, other = (
            kind(rate=0.5, count=1, last=torch.ones(3), parts=[torch.ones(3)]) for _ in range(2)
        )

        def step(x: Any, given: Any, net: Any = net, own: Any = own, optimizer: Any = optimizer) -> Any:  # fmt: skip
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return change(own, given), loss.detach()

        run: Any = roam.compile(step) if compiles else step
        results = []
        for number in range(6):
            given = other if (number < 2 if is_late else number == 4) else own
            results.append(described(run(batch(number)["x"], given), {}))
        results.append([described(dict(one), {}) for one in (own, other)])
        results.append([parameter.tolist() for parameter in net.parameters()])
        found.append(results)
    assert found[0] == found[1]


@needs_2_15
@pytest.mark.auto
@pytest.mark.parametrize("where", [lambda one: deque([one]), lambda one: Output(one=one)])
def test_a_list_that_is_in_another_kind_of_container_too_is_one_in_the_step(where: Any) -> None:
    net = nn.Linear(8, 3)

    def step(numbers: Any, other: Any) -> Any:
        numbers.pop()
        inner = other.one if isinstance(other, Output) else other[0]
        loss = net(torch.ones(2, 8)).sum() * len(inner)
        loss.backward()
        return len(inner), inner is numbers

    numbers, compiled = [1, 2, 3], roam.compile(step)
    assert compiled(numbers, where(numbers)) == (2, True)
    assert compiled(numbers, where([4])) == (1, False)
    assert compiled(numbers, where(numbers)) == (0, True)
    assert numbers == []


@needs_2_15
@pytest.mark.auto
def test_what_a_dictionary_calls_for_a_missing_entry_is_guarded() -> None:
    def asks(net: Any, batch: Any) -> Any:
        found = batch["more"]["new"]
        del batch["more"]["new"]
        return found

    rate = {"value": 1.0}

    def default() -> float:
        return rate["value"]

    step = roam.compile(Task(asks).step)
    for value in (1.0, 2.0, 3.0):
        rate["value"] = value
        assert step({"more": defaultdict(default)})[0] == value


@pytest.mark.parametrize("kind", [deque, set])
def test_other_containers_are_refused(kind: Any) -> None:
    net = nn.Linear(8, 3)

    def step(x: Any, numbers: Any) -> Any:
        numbers.pop()
        net(x).sum().backward()

    numbers = kind([1, 2, 3])
    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(step)(torch.ones(2, 8), numbers)
    assert caught.value.code == "moved"
    assert len(numbers) == 3


@needs_2_15
@pytest.mark.auto
def test_a_step_that_raises_leaves_what_eager_pytorch_leaves() -> None:
    def check(net: Any, batch: Any) -> None:
        batch.pop("labels")
        if batch["x"].sum() > 1e3:
            raise ValueError("too large")

    found = []
    for compiles in (False, True):
        task = Task(check)
        run = roam.compile(task.step) if compiles else task.step
        for number in range(3):
            run(batch(number))
        given = batch(0)
        given["x"] += 1e3
        with pytest.raises(ValueError, match="too large"):
            run(given)
        found.append(list(given))
    assert found[0] == found[1]


@needs_2_15
@pytest.mark.auto
@pytest.mark.parametrize("change", [pops, returns_the_batch, changes_lists])
def test_compare_gives_each_run_a_batch_of_its_own(change: Callable[..., Any]) -> None:
    given = batch(0)
    keys = list(given), list(given["names"])
    comparison = roam.compare(Task(change).step, given)
    assert comparison.equal, comparison
    assert (list(given), list(given["names"])) == keys
