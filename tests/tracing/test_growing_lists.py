"""Lists of a step's state to which the step only adds, by calls of their `append`."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import operator
import statistics
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roam
from newer import needs_2_15

Step = Callable[..., Any]
Built = tuple[Step, Any]
_CALLS = 6


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    return model, torch.optim.AdamW(model.parameters())


def _trained(build: Callable[[Callable[..., torch.Tensor]], Built]) -> Callable[[], Built]:
    """A builder of a step from one that is given what trains a model for one batch."""

    def built() -> Built:
        model, optimizer = _model()

        def train(x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * scale
            loss.backward()
            optimizer.step()
            return loss

        train.model = model  # type: ignore[attr-defined]
        return build(train)

    return built


def _batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(number + 10)
    return torch.randn(3, 4), torch.randn(3, 1)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            torch.equal(one, other)
            and one.requires_grad == other.requires_grad
            and (one.grad_fn is None) == (other.grad_fn is None)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_equal, one.values(), other.values()))
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _check(build: Callable[[], Built], plans: int = 2, **options: Any) -> tuple[Any, Any]:
    """Runs a step by plans and another one eagerly, and compares what they return and log."""
    (planned, log), (eager, expected) = build(), build()
    step = roam.compile(planned, **options)
    for number in range(_CALLS):
        batch = _batch(number)
        assert _equal(step(*batch), eager(*batch))
        assert _equal(log, expected), number
        if number > 1:
            assert len(step.plans) == plans
    return step, log


def _refused(build: Callable[[], Built], code: str = "moved") -> None:
    planned, log = build()
    before = copy.deepcopy(log)
    with pytest.raises(roam.CaptureError) as refusal:
        roam.compile(planned)(*_batch(0))
    assert refusal.value.code == code
    assert _equal(log, before)


def _append(train: Step) -> Built:
    losses: list[float] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        losses.append(loss.item())
        return loss

    return step, losses


def _attribute(train: Step) -> Built:
    class Trainer:
        def __init__(self) -> None:
            self.history: list[Any] = []

        def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = train(x, y)
            self.history.append(loss.detach())
            self.history.append([1, "epoch"])
            return loss

    trainer = Trainer()
    return trainer.step, trainer.history


def _logged(train: Step, holder: Any) -> Built:
    """A step that appends to an attribute of an object or class."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        holder.history.append(loss.item())
        return loss

    return step, holder.history


def _slot(train: Step) -> Built:
    class Trainer:
        __slots__ = ("history",)

    trainer = Trainer()
    trainer.history = []
    return _logged(train, trainer)


def _class_attribute(train: Step) -> Built:
    class Log:
        history: list[float] = []  # noqa: RUF012 - as users write it

    return _logged(train, Log)


def _entry(train: Step) -> Built:
    log: dict[str, Any] = {"double": [], "loss": []}

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        log["loss"].append((loss.item(), {"loss": loss.detach()}))
        for key in ("double",):
            log[key].append(2 * loss.item())
        return loss

    return step, log


def _deque(train: Step) -> Built:
    recent: deque[float] = deque(maxlen=3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        recent.append(loss.item())
        recent.append(2.0)
        return loss

    return step, recent


def _extend(train: Step) -> Built:
    norms: list[float] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal norms
        loss = train(x, y)
        norms.extend(p.grad.norm().item() for p in train.model.parameters())  # type: ignore[attr-defined]
        norms.extend((1, 2))
        norms += [loss.item()]
        return loss

    return step, norms


def _helper(train: Step) -> Built:
    losses: list[float] = []

    def log(into: list[float], value: float) -> None:
        if type(into) is list and isinstance(into, list) and isinstance(into, Sequence):
            into.append(value)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        log(losses, loss.item())
        return loss

    return step, losses


def _hooks(train: Step) -> Built:
    norms: list[torch.Tensor] = []
    train.model[0].register_forward_hook(lambda *parts: norms.append(parts[-1].detach().mean()))  # type: ignore[attr-defined]
    train.model[0].weight.register_hook(lambda gradient: norms.append(gradient.norm()))  # type: ignore[attr-defined]
    return (lambda x, y: train(x, y)), norms


def _module(train: Step) -> Built:
    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.history.append(x.item())
            self.history.append(x.detach())
            return x

    module = Logging()
    return (lambda x, y: module(train(x, y))), module.history


def _two_places(train: Step) -> Built:
    losses: list[float] = []
    log = {"loss": losses}

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        losses.append(loss.item())
        log["loss"].append(3.0)
        return loss

    return step, (losses, log)


def _counted(train: Step) -> Built:
    log: list[Any] = []
    state = {"steps": 0}

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        state["steps"] += 1
        log.append((state["steps"], loss.item()))
        return loss

    return step, (log, state)


def _with_history(train: Step) -> Built:
    log: list[Any] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        log.append(loss)
        log.append(x[0])
        return loss

    return step, log


@pytest.mark.parametrize(
    "build",
    [
        _append, _attribute, _slot, _entry, _hooks, _module, _two_places, _counted, _with_history
    ],
)  # fmt: skip
def test_a_step_that_only_adds_to_a_list_runs_by_one_plan(build: Callable[[Step], Built]) -> None:
    _check(_trained(build))


OTHERWISE = [_class_attribute, _deque, _extend, _helper]


@pytest.mark.parametrize("build", OTHERWISE)
def test_a_list_to_which_the_step_adds_otherwise_is_refused(build: Callable[[Step], Built]) -> None:
    _refused(_trained(build))


@pytest.mark.auto
@needs_2_15
@pytest.mark.parametrize("build", OTHERWISE)
def test_a_list_to_which_the_step_adds_otherwise_runs_beside(
    build: Callable[[Step], Built],
) -> None:
    (planned, log), (eager, expected) = _trained(build)(), _trained(build)()
    step = roam.compile(planned)
    for number in range(_CALLS):
        assert _equal(step(*_batch(number)), eager(*_batch(number)))
        assert _equal(log, expected), number
    assert step.runs_beside
    assert step.plans


def test_entries_that_a_step_makes_in_a_default_dictionary() -> None:
    def build(train: Step) -> Built:
        log: defaultdict[str, list[float]] = defaultdict(list)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = train(x, y)
            log["loss"].append(loss.item())
            return loss

        return step, log

    _check(_trained(build), plans=1)  # the first call runs by itself, and makes the list


def test_a_list_beside_entries_that_the_first_step_makes() -> None:
    def build(train: Step) -> Built:
        scalars: dict[str, list[Any]] = defaultdict(list)
        queue: list[Any] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = train(x, y)
            scalars["loss"].append(loss.item())
            queue.append(("loss", {"value": loss.item()}))
            return loss

        return step, [scalars, queue]

    _check(_trained(build), plans=1)


def test_of_a_librarys_model_that_imports_its_parts_late() -> None:
    """The library's code names `sys.modules`, and the step's own calls `model.modules()`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=11,
    )
    model = transformers.BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters())
    losses: list[float] = []

    def train(words: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = model(input_ids=words, labels=labels).loss / len(list(model.modules()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    step = roam.compile(train)
    for _ in range(3):
        step(torch.arange(10).view(2, 5), torch.tensor([0, 1]))
    assert len(losses) == len(set(losses)) == 3
    assert len(step.plans) == 2


def test_within_a_memory_limit() -> None:
    def build() -> Built:
        torch.manual_seed(0)
        layers = [part for _ in range(6) for part in (nn.Linear(16, 16), nn.Tanh())]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())
        log: list[Any] = []

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            log.append(loss.item())
            log.append(loss.detach())
            return loss

        return step, log

    (planned, log), (eager, expected) = build(), build()
    step = roam.compile(planned, memory="85%")
    for number in range(_CALLS):
        torch.manual_seed(number)
        x = torch.randn(2048, 16)
        assert torch.equal(step(x), eager(x))
        assert _equal(log, expected)
    assert len(step.plans) == 2


def _fifth(values: Any) -> bool:
    try:
        return values[4] > 0
    except IndexError:
        return False


def _is_long(values: Any) -> bool:
    match values:
        case [_, _, _, _, *_]:
            return True
    return False


def _catches(values: Any) -> bool:
    try:
        return list.__len__(values) > 4
    except TypeError:
        return False


def _stacks(values: Any) -> bool:
    try:
        torch.stack(values)
    except (TypeError, RuntimeError):
        return len(values) > 4
    return True


_READS: dict[str, Callable[[Any], Any]] = {
    "len": lambda values: len(values) > 4,
    "truth": lambda values: not values,
    "index": _fifth,
    "slice": lambda values: values[4:] != [],
    "in": lambda values: 7.0 in values,
    "equal": lambda values: values == [0.25] * 5,
    "mean": lambda values: statistics.mean(values) > 1,
    "numpy": lambda values: np.asarray([values]).size > 4,
    "sum": lambda values: sum(values) > 1,
    "any": lambda values: any(value > 1 for value in values),
    "text": lambda values: len(f"{values}") > 20,
    "json": lambda values: len(json.dumps({"a": values})) > 30,
    "copy": lambda values: len(copy.copy(values)) > 4,
    "pytree": lambda values: len(torch.utils._pytree.tree_leaves({"a": {"b": values}})) > 4,
    "match": _is_long,
    "caught": _catches,
    "stack": _stacks,
    "tensor": lambda values: torch.tensor(values).numel() > 4,
    "method": lambda values: values.__len__() > 4,
    "count": lambda values: values.count(0.25) > 4,
    "doubled": lambda values: values.extend(values),
    "cleared": lambda values: values.clear() if len(values) > 4 else None,
    "added": lambda values: len(values + [1]) > 5,  # noqa: RUF005 - it is the point
    "unpacked": lambda values: len([*values]) > 4,
    "reversed": lambda values: next(reversed(values)) > 4,
    "class": lambda values: type(values) is list and len(values) > 4,
}


def _reader(name: str) -> Callable[[Step], Built]:
    def build(train: Step) -> Built:
        values: list[float] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            values.append(0.25)
            return train(x, y, 2.0 if _READS[name](values) else 1.0)

        return step, values

    return build


@pytest.mark.sweep
@pytest.mark.parametrize("name", _READS)
def test_a_step_that_reads_the_list_is_refused(name: str) -> None:
    _refused(_trained(_reader(name)))


@needs_2_15
@pytest.mark.sweep
@pytest.mark.parametrize("name", _READS)
def test_a_step_that_reads_the_list_runs_beside_a_plan(name: str) -> None:
    built = _trained(_reader(name))
    (planned, log), (eager, expected) = built(), built()
    step = roam.compile(planned, python="auto")
    for number in range(8):
        assert torch.equal(step(*_batch(number)), eager(*_batch(number)))
        assert _equal(log, expected)


def _kept(train: Step) -> Built:
    losses: list[float] = []
    kept: dict[str, Any] = {}

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        losses.append(loss.item())
        kept["losses"] = losses
        return loss

    return step, (losses, kept)


def _in_tuple(train: Step) -> Built:
    logs: tuple[list[float], ...] = ([],)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        logs[0].append(loss.item())
        return loss

    return step, logs


def _in_list(train: Step) -> Built:
    logs: list[list[float]] = [[]]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        logs[0].append(loss.item())
        return loss

    return step, logs


def _in_another(train: Step) -> Built:
    losses: list[float] = []
    other: list[Any] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses.append(1.0)
        other.append(losses)
        return train(x, y)

    return step, (losses, other)


def _one_twice(train: Step) -> Built:
    log: list[Any] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        entry = {"loss": loss.item()}
        log.append(entry)
        log.append(entry)
        return loss

    return step, log


def _thread(train: Step) -> Built:
    log: list[float] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=log.append, args=(1.0,))
        thread.start()
        thread.join()
        return train(x, y)

    return step, log


def _left(train: Step) -> Built:
    log: deque[float] = deque(maxlen=3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        log.appendleft(1.0)
        return train(x, y)

    return step, log


class _Holder:
    def __init__(self) -> None:
        self.values: list[float] = []
        self.table: dict[str, list[float]] = {"values": []}
        self.names = ["values"]

    def held(self) -> list[float]:
        return self.values

    @property
    def seen(self) -> list[float]:
        return self.values

    def first(self) -> Any:
        for name in self.names:
            yield getattr(self, name)


@dataclasses.dataclass
class _Record:
    values: list[float] = dataclasses.field(default_factory=list)


_ways: dict[str, Callable[[Any], Any]] = {
    "method": lambda my: my.held(),
    "property": lambda my: my.seen,
    "computed": lambda my: getattr(my, "".join(["val", "ues"])),
    "generator": lambda my: next(my.first()),
    "getter": lambda my: operator.attrgetter(my.names[0])(my),
    "vars": lambda my: vars(my)["values"],
    "dictionary": lambda my: my.__dict__["values"],
    "past": lambda my: object.__getattribute__(my, "values"),
    "copied": lambda my: copy.copy(my).values,
    "table": lambda my: my.table["values"],
    "of the table": lambda my: next(iter(my.table.values())),
    "got": lambda my: my.table.get("values"),
    "items": lambda my: [entry for _, entry in my.table.items()][0],  # noqa: RUF015
    "starred": lambda my: dict(**my.table)["values"],
    "another name": lambda my: (values := my.values) and values,
    "walrus": lambda my: values if (values := my.values) else [],
    "referents": lambda my: next(one for one in gc.get_referents(vars(my)) if type(one) is list),
    "bound": lambda my: my.values.append.__self__,
    "closure": lambda my: _closing(my.values).__closure__[0].cell_contents,
}


def _closing(values: list[float]) -> Any:
    return lambda: values


@pytest.mark.sweep
@pytest.mark.parametrize("is_in_table", [False, True])
@pytest.mark.parametrize("way", _ways)
def test_a_list_is_seen_to_be_read_however_the_step_comes_by_it(
    way: str, is_in_table: bool
) -> None:
    def build(train: Step) -> Built:
        my = _Holder()
        if is_in_table:
            my.table["values"] = my.values

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            my.values.append(0.25)
            my.table["values"].append(0.5)
            return train(x, y, 2.0 if len(_ways[way](my)) > 4 else 1.0)

        return step, my.values

    (planned, log), (eager, expected) = _trained(build)(), _trained(build)()
    step = roam.compile(planned)
    try:
        for number in range(_CALLS):
            assert torch.equal(step(*_batch(number)), eager(*_batch(number))), number
            assert log == expected
    except roam.CaptureError:
        assert log == expected


def test_fields_of_a_data_class_are_read_by_a_library() -> None:
    def build(train: Step) -> Built:
        record = _Record()

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            record.values.append(0.25)
            return train(x, y, 2.0 if len(dataclasses.asdict(record)["values"]) > 3 else 1.0)

        return step, record.values

    _refused(_trained(build))


LOSSES: list[float] = []


def _by_computed_name(train: Step) -> Built:
    LOSSES.clear()
    name = "".join(["LOS", "SES"])
    kept = {"losses": LOSSES}

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept["losses"].append(1.0)
        return train(x, y, 2.0 if len(globals()[name]) > 3 else 1.0)

    return step, kept


def _among_locals(train: Step) -> Built:
    losses = [1.5]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses.append(1.0)
        return train(x, y, locals()["losses"][0])

    return step, losses


@pytest.mark.parametrize(
    "build",
    [
        _by_computed_name,
        _among_locals,
        _kept,
        _in_tuple,
        _in_list,
        _in_another,
        _one_twice,
        _thread,
        _left,
    ],
)
def test_a_list_that_ends_up_elsewhere_or_changes_otherwise_is_refused(
    build: Callable[[Step], Built],
) -> None:
    _refused(_trained(build))


def test_a_list_that_is_returned_is_refused() -> None:
    def build(train: Step) -> Built:
        losses: list[float] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            losses.append(train(x, y).item())
            return losses

        return step, losses

    _refused(_trained(build), "result")


def test_tensors_in_the_list_are_those_of_the_state_the_arguments_and_the_result() -> None:
    def build(train: Step) -> Built:
        log: list[Any] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = train(x, y).detach()
            log.append(train.model[0].weight)  # type: ignore[attr-defined]
            log.append(loss)
            log.append(loss.reshape(1))
            log.append(x)
            return loss

        return step, (log, train.model)  # type: ignore[attr-defined]

    planned, (log, model) = _trained(build)()
    step = roam.compile(planned)
    for number in range(3):
        x, y = _batch(number)
        loss = step(x, y)
        weight, own, view, given = log[-4:]
        assert weight is model[0].weight
        assert own is loss
        assert view.data_ptr() == loss.data_ptr()
        assert given is x
    assert len({entry.data_ptr() for entry in log[1::4]}) == 3


@needs_2_15
@pytest.mark.auto
def test_an_argument_that_is_added_is_the_call_s_own() -> None:
    model, optimizer = _model()
    seen: list[Any] = []

    def planned(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        seen.append(batch)
        return loss

    step = roam.compile(planned)
    for number in range(3):
        batch = dict(zip("xy", _batch(number), strict=True))
        step(batch)
        assert seen[-1] is batch


def test_what_is_done_to_the_list_between_calls() -> None:
    planned, losses = _trained(_append)()
    eager, expected = _trained(_append)()
    step = roam.compile(planned)
    for number in range(_CALLS):
        batch = _batch(number)
        assert torch.equal(step(*batch), eager(*batch))
        assert losses == expected
        assert sum(losses) == sum(expected)
        if number == 3:
            losses.clear()
            expected.clear()
        if number == 4:
            losses.insert(0, 5.0)
            expected.insert(0, 5.0)
    assert len(step.plans) == 2


def test_a_list_in_whose_place_the_user_puts_another() -> None:
    def build(train: Step) -> Built:
        log: dict[str, list[float]] = {"loss": []}

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = train(x, y)
            log["loss"].append(loss.item())
            return loss

        return step, log

    (planned, log), (eager, expected) = _trained(build)(), _trained(build)()
    step = roam.compile(planned)
    for number in range(_CALLS):
        batch, held = _batch(number), log["loss"]
        step(*batch)
        eager(*batch)
        assert log == expected
        assert log["loss"] is held
        if number == 2:
            log["loss"], expected["loss"] = [], []


def test_two_compiled_steps_share_a_list() -> None:
    losses: list[float] = []
    steps = []
    for _ in range(2):
        model, optimizer = _model()

        def step(
            x: torch.Tensor,
            y: torch.Tensor,
            model: nn.Module = model,
            optimizer: Any = optimizer,
        ) -> None:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        steps.append(roam.compile(step))
    for number in range(3):
        for one in steps:
            one(*_batch(number))
    assert len(losses) == 6
    assert losses[::2] == losses[1::2]
    assert all(len(one.plans) == 2 for one in steps)


@pytest.mark.auto
@needs_2_15
def test_each_branch_adds_its_own() -> None:
    def build(train: Step) -> Built:
        low: list[float] = []
        high: list[float] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = train(x, y)
            if loss < 1.0:
                low.append(loss.item())
            else:
                high.append([loss.item(), 2.0])
            return loss

        return step, (low, high)

    (planned, log), (eager, expected) = _trained(build)(), _trained(build)()
    step = roam.compile(planned)
    for number in range(12):
        batch = _batch(number)
        assert torch.equal(step(*batch), eager(*batch))
        assert _equal(log, expected)
    assert log[0]
    assert log[1]


def test_a_step_that_raises_leaves_what_eager_leaves() -> None:
    def build(train: Step) -> Built:
        losses: list[float] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            mean = x.mean()
            losses.append(mean.item())
            if not torch.isfinite(mean):
                raise ValueError("not finite")
            return train(x, y)

        return step, losses

    (planned, losses), (eager, expected) = _trained(build)(), _trained(build)()
    step = roam.compile(planned)
    for number in range(_CALLS):
        x, y = _batch(number)
        if number == 4:
            x[0] = float("inf")
        for one in (step, eager):
            try:
                one(x, y)
            except ValueError:
                assert number >= 4
        assert repr(losses) == repr(expected)


def test_the_list_of_the_state_is_an_argument_of_one_call() -> None:
    def build(train: Step) -> Built:
        losses: list[float] = []

        def step(x: torch.Tensor, y: torch.Tensor, other: list[float]) -> torch.Tensor:
            losses.append(1.0)
            return train(x, y, 2.0 if other else 1.0)

        return step, losses

    (planned, losses), (eager, expected) = _trained(build)(), _trained(build)()
    step = roam.compile(planned)
    for number in range(3):
        assert torch.equal(step(*_batch(number), []), eager(*_batch(number), []))
    del losses[:], expected[:]
    try:
        found = step(*_batch(5), losses)
    except roam.RoamError:
        return
    assert torch.equal(found, eager(*_batch(5), expected))
    assert losses == expected


def test_compare_finds_no_difference() -> None:
    planned, losses = _trained(_append)()
    comparison = roam.compare(planned, *_batch(0))
    assert comparison.outcome == "equal", comparison
    assert losses == []
