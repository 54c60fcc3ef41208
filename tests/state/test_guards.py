"""Guards notice every change of the state that a step reaches; a snapshot undoes it."""

from __future__ import annotations

import ctypes
import enum
import functools
import importlib
import logging
import mmap
import multiprocessing
import queue
import random
import string
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import roam
from roam.state.discovery import reach_of
from roam.state.equality import same
from roam.state.guards import ArgGuard, Guards
from roam.state.namespaces import SlotsSpace
from roam.state.snapshot import Snapshot
from roam.state.step_call import StepCall

ALPHA = 0.5
LIMITS = {"low": [1, 2], "high": None}
SHARED = torch.ones(3)
UNUSED = 1
FLAG: Any = None


class Explosive:
    """An object that must never be compared, hashed or shown."""

    def __init__(self) -> None:
        self.value = 1

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def __hash__(self) -> int:
        raise AssertionError("hashed")

    def __repr__(self) -> str:
        raise AssertionError("shown")

    def __bool__(self) -> bool:
        raise AssertionError("tested")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")


class Net(torch.nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)])
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x)) * self.scale * factor()


def slots_of(reach: Any, kind: str) -> list[Any]:
    return [slot for slot in reach.slots if slot.kind == kind]


def loose(reach: Any) -> list[Any]:
    """Places of tensors that no module, optimizer or argument holds too."""
    owned = {id(slot.tensor) for slot in reach.slots if slot.kind != "loose"}
    return [slot for slot in slots_of(reach, "loose") if id(slot.tensor) not in owned]


def factor() -> float:
    return ALPHA


def plain_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def parts() -> tuple[Net, torch.optim.Optimizer, torch.Tensor]:
    model = Net()
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False),
        torch.ones(3, 4),
    )


def guards_of(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Guards:
    guards = Guards(reach_of(step, args, kwargs))
    assert guards.failure() is None
    return guards


def assert_failure(guards: Guards, *texts: str) -> None:
    reason = guards.failure()
    assert reason is not None
    for text in texts:
        assert text in reason
    assert guards.failure() == reason, "a failure stays one"


# -- what the walk finds
# -------------------------------------------------------------------------------------------------


def test_reach_lists_what_a_step_uses_with_readable_paths() -> None:
    model, optimizer, x = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    generator = torch.Generator()
    history = [torch.zeros(1)]

    def step(model: Net, optimizer: torch.optim.Optimizer, *batch: Any) -> None:
        scheduler.step()
        scaler.update()
        history[0] += SHARED.sum() + torch.rand(1, generator=generator)

    reach = reach_of(step, (model, optimizer, {"x": x}))
    assert [path for path, _ in reach.modules] == [
        "model", "model.blocks", "model.dropout", "model.head", "model.blocks[0]", "model.blocks[1]"
    ]  # fmt: skip
    assert reach.optimizers == [("optimizer", optimizer)]
    assert reach.schedulers == [("closure scheduler", scheduler)]
    assert reach.scalers == [("closure scaler", scaler)]
    assert reach.generators == [("closure generator", generator)]
    assert {slot.path for slot in slots_of(reach, "parameter")} == {f"model.{name}" for name in (
        "blocks[0].weight", "blocks[0].bias", "blocks[1].weight", "blocks[1].bias", "head.weight", "head.bias")}  # fmt: skip
    assert len(slots_of(reach, "buffer")) == 3
    assert {slot.path for slot in loose(reach)} == {"closure history[0]", "global SHARED"}
    assert [slot.path for slot in reach.slots if slot.kind == "argument"] == ["batch[0]['x']"]


def test_slots_read_and_write_their_place() -> None:
    holder = types.SimpleNamespace(
        mask=torch.ones(2), parts=[torch.ones(3)], fixed=(torch.ones(4),)
    )
    reach = reach_of(lambda: holder)
    slots = {slot.path: slot for slot in loose(reach)}
    for path, read in {
        "closure holder.mask": lambda: holder.mask,
        "closure holder.parts[0]": lambda: holder.parts[0],
    }.items():
        new = torch.zeros(1)
        slots[path].space.set(slots[path].key, new)
        assert read() is slots[path].space.get(slots[path].key) is new
    slot = slots["closure holder.fixed[0]"]
    slot.space.set(slot.key, new)
    assert holder.fixed[0] is slot.space.get(slot.key) is new


def test_reach_gives_the_same_order_every_time() -> None:
    model, optimizer, x = parts()

    def paths() -> list[str]:
        reach = reach_of(plain_step, (model, optimizer, x))
        return [place.space.path for place in reach.places] + [slot.path for slot in reach.slots]

    assert paths() == paths()


def test_tied_weights_are_found_at_each_of_their_places() -> None:
    model = torch.nn.ModuleDict(
        {"wte": torch.nn.Embedding(5, 4), "head": torch.nn.Linear(4, 5, bias=False)}
    )
    model["head"].weight = model["wte"].weight
    slots = slots_of(reach_of(lambda: model), "parameter")
    assert [slot.path for slot in slots] == [
        "closure model.wte.weight",
        "closure model.head.weight",
    ]
    assert slots[0].tensor is slots[1].tensor


def test_cycles_and_deep_nesting_end() -> None:
    ring: list[Any] = []
    ring.append({"back": ring})
    deep: list[Any] = [1]
    for _ in range(5000):
        deep = [deep]
    node = types.SimpleNamespace()
    node.self = node
    guards = guards_of(lambda: (ring, deep, node))
    ring[0]["new"] = 1
    assert_failure(guards, "closure ring[0]['new']", "from nothing to 1")


@pytest.mark.parametrize("name", ["filelock", "fsspec", "jinja2", "networkx", "sympy"])
def test_code_that_pytorch_requires_is_not_entered(name: str) -> None:
    """`sympy` alone has 10,000 functions, and lies behind what many libraries import."""
    library = importlib.import_module(name)
    functions = [value for value in vars(library).values() if callable(value)]

    def step() -> None:
        for function in functions:
            function()

    assert functions
    assert [names["__name__"] for names in reach_of(step).code.values()] == [__name__]


def test_libraries_are_not_entered() -> None:
    def step() -> Any:
        return torch.nn.functional.relu, np.float64, torch.optim, functools.reduce

    reach = reach_of(step)
    held = "the function itself and its globals, its attributes, and those of relu"
    assert len(reach.places) == 4, held


def test_iterators_are_listed() -> None:
    batches = iter([1, 2])
    numbers = (n for n in range(3))
    assert [path for path, _ in reach_of(lambda: (batches, numbers)).iterators] == [
        "closure batches",
        "closure numbers",
    ]


# -- changes that must be seen
# ---------------------------------------------------------------------------------------------


def _train_flag(model: Net, _: Any) -> None:
    model.eval()


def _new_group(model: Net, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def _hook(model: Net, _: Any) -> None:
    model.head.register_forward_hook(lambda *_: None)


def _tie(model: Net, optimizer: Any) -> None:
    model.head.bias.data = model.blocks[1].bias.data[:2]


MODEL_CHANGES: dict[str, tuple[Callable[[Net, Any], object], list[str]]] = {
    "dropout": (lambda m, o: setattr(m.dropout, "p", 0.2), ["model.dropout.p", "0.1", "0.2"]),
    "eval": (_train_flag, ["model.training", "True", "False"]),
    "eval of one": (lambda m, o: m.blocks[1].eval(), ["model.blocks[1].training"]),
    "frozen": (
        lambda m, o: m.head.weight.requires_grad_(False),
        ["requires_grad of model.head.weight"],
    ),
    "submodule": (lambda m, o: setattr(m, "head", torch.nn.Linear(4, 2)), ["model.head"]),
    "shape": (
        lambda m, o: setattr(m.head.weight, "data", torch.ones(3, 4)),
        ["shape of model.head.weight"],
    ),
    "dtype": (lambda m, o: m.head.double(), ["model.head.weight", "torch.float64"]),
    "strides": (
        lambda m, o: setattr(m.head.weight, "data", torch.ones(4, 2).t()),
        ["strides of model.head.weight"],
    ),
    "parameter": (lambda m, o: setattr(m.head, "bias", None), ["model.head.bias"]),
    "new parameter": (
        lambda m, o: m.register_parameter("extra", torch.nn.Parameter(torch.ones(1))),
        ["model.extra"],
    ),
    "new buffer": (lambda m, o: m.register_buffer("extra", torch.ones(1)), ["model.extra"]),
    "buffer's shape": (
        lambda m, o: setattr(m.blocks[1], "running_mean", torch.ones(5)),
        ["blocks[1].running_mean"],
    ),
    "new child": (lambda m, o: m.blocks.append(torch.nn.ReLU()), ["model.blocks[2]", "nothing"]),
    "new attribute": (lambda m, o: setattr(m, "extra", 1), ["model.extra", "nothing to 1"]),
    "patched forward": (lambda m, o: setattr(m.head, "forward", abs), ["model.head.forward"]),
    "hook": (_hook, ["model.head._forward_hooks"]),
    "pre-hook": (
        lambda m, o: m.register_forward_pre_hook(lambda *_: None),
        ["model._forward_pre_hooks"],
    ),
    "backward hook": (
        lambda m, o: m.head.register_full_backward_hook(lambda *_: None),
        ["model.head"],
    ),
    "tensor hook": (
        lambda m, o: m.head.weight.register_hook(lambda g: g),
        ["gradient hooks of model.head.weight"],
    ),
    "accumulation hook": (
        lambda m, o: m.head.weight.register_post_accumulate_grad_hook(lambda p: None),
        ["gradient hooks of model.head.weight"],
    ),
    "shared memory": (_tie, ["share memory"]),
    "momentum": (
        lambda m, o: o.param_groups[0].update(momentum=1),
        ["param_groups[0]['momentum']", "0.9", "1"],
    ),
    "nesterov": (
        lambda m, o: o.param_groups[0].update(nesterov=True),
        ["param_groups[0]['nesterov']"],
    ),
    "new group": (_new_group, ["optimizer.param_groups changed from 1 to 2"]),
    "new group key": (lambda m, o: o.param_groups[0].update(extra=1), ["param_groups[0]['extra']"]),
    "fewer parameters": (
        lambda m, o: o.param_groups[0]["params"].pop(),
        ["param_groups[0]['params']"],
    ),
    "rate as tensor": (
        lambda m, o: o.param_groups[0].update(lr=torch.tensor(0.1)),
        ["['lr']", "0.1", "a tensor"],
    ),
    "step hook": (
        lambda m, o: o.register_step_post_hook(lambda *_: None),
        ["optimizer._optimizer_step_post_hooks"],
    ),
    "patched step": (lambda m, o: setattr(o, "step", abs), ["optimizer.step"]),
}


@pytest.mark.parametrize("change", MODEL_CHANGES)
def test_changes_of_model_and_optimizer_are_seen(change: str) -> None:
    model, optimizer, x = parts()
    guards = guards_of(plain_step, model, optimizer, x)
    act, texts = MODEL_CHANGES[change]
    act(model, optimizer)
    assert_failure(guards, *texts)


def test_live_numbers_may_change() -> None:
    model, optimizer, x = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> Any:
        return model, optimizer, scaler

    guards = guards_of(step)
    plain_step(model, optimizer, x)  # makes state and gradients, writes to parameters and buffers
    assert guards.failure() is None
    scheduler.step()
    scaler.scale(torch.ones(1))
    scaler.update(2.0)
    optimizer.param_groups[0]["lr"] = 7
    optimizer.zero_grad()
    assert guards.failure() is None


def test_loading_a_state_dict_changes_nothing_that_is_guarded() -> None:
    model, optimizer, x = parts()
    plain_step(model, optimizer, x)
    guards = guards_of(plain_step, model, optimizer, x)
    optimizer.load_state_dict(optimizer.state_dict())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    assert guards.failure() is None
    other = optimizer.state_dict()
    other["param_groups"][0]["weight_decay"] = 0.5
    optimizer.load_state_dict(other)
    assert_failure(guards, "optimizer.param_groups[0]['weight_decay']", "0.5")


def test_a_buffer_may_be_another_tensor_of_its_kind() -> None:
    model, optimizer, x = parts()
    guards = guards_of(plain_step, model, optimizer, x)
    model.blocks[1].running_mean = torch.ones(4)
    assert guards.failure() is None
    model.blocks[1].running_mean = model.blocks[1].running_var
    assert_failure(guards, "share memory")


def test_globals_that_the_step_names_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> Any:
        return factor(), LIMITS

    guards = guards_of(step)
    monkeypatch.setitem(globals(), "UNUSED", 2)
    assert guards.failure() is None
    monkeypatch.setitem(LIMITS, "high", 3)
    assert_failure(guards, "global LIMITS['high'] changed from None to 3")
    monkeypatch.undo()
    assert guards.failure() is None
    monkeypatch.setitem(globals(), "ALPHA", 0.25)
    assert_failure(guards, "global ALPHA changed from 0.5 to 0.25")
    monkeypatch.undo()
    monkeypatch.setitem(globals(), "factor", lambda: 1.0)
    assert_failure(guards, "global factor")


def test_what_forward_names_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, x = parts()
    guards = guards_of(plain_step, model, optimizer, x)
    monkeypatch.setitem(globals(), "ALPHA", 0.75)
    assert_failure(guards, "global ALPHA")
    monkeypatch.undo()
    monkeypatch.setattr(Net, "scale", 3.0)
    assert_failure(guards, "Net.scale changed from 2.0 to 3.0")
    monkeypatch.undo()
    monkeypatch.setattr(Net, "forward", lambda self, x: x)
    assert_failure(guards, "Net.forward")


def test_names_of_the_users_modules_are_guarded() -> None:
    settings = types.ModuleType("my_settings")
    settings.rate, settings.other = 0.5, 1  # type: ignore[attr-defined]
    space: dict[str, Any] = {"settings": settings, "__name__": "my_script"}
    exec("def step(x):\n    return x * settings.rate", space)
    guards = guards_of(space["step"])
    settings.other = 2  # type: ignore[attr-defined]
    assert guards.failure() is None
    settings.rate = 0.6  # type: ignore[attr-defined]
    assert_failure(guards, "global settings.rate changed from 0.5 to 0.6")


def test_closures_are_guarded() -> None:
    rate, items, nothing = 0.5, [1, 2], None

    def inner() -> Any:
        return rate

    def step() -> Any:
        return inner(), items, nothing

    guards = guards_of(step)
    items.append(3)
    assert_failure(guards, "closure items changed from 2 to 3 entries")
    items.pop()
    assert guards.failure() is None
    items[0] = 5
    assert_failure(guards, "closure items[0] changed from 1 to 5")
    items[0] = 1
    rate = 0.6
    assert_failure(guards, "closure rate of", "from 0.5 to 0.6")
    rate = float("0.5")
    assert guards.failure() is None, "an equal value that is another object"
    nothing = 1
    assert_failure(guards, "closure nothing changed from None to 1")


def test_a_set_whose_hashes_meet_is_put_back() -> None:
    numbers = {
        8,
        0,
    }  # In a table of eight both want the same place, so the order is that of insertion.
    assert list(numbers) == [8, 0]

    def step() -> set[int]:
        return numbers

    snapshot = Snapshot(reach_of(step))
    numbers.clear()
    numbers.update([0, 8])
    assert list(numbers) == [0, 8]
    assert snapshot.moved() == []
    numbers.add(1)
    assert snapshot.moved() == ["closure numbers holds other elements than before"]
    snapshot.restore()
    assert numbers == {0, 8}
    assert snapshot.moved() == []


def test_unset_variables_are_guarded() -> None:
    def step() -> Any:
        return later, MISSING_GLOBAL  # type: ignore[name-defined]  # noqa: F821

    guards = guards_of(step)
    later = 3
    assert_failure(guards, "closure later changed from nothing to 3")


class Trainer:
    def __init__(self) -> None:
        self.model, self.optimizer, _ = parts()
        self.clip = 1.0
        self.history: list[float] = []
        self.batch = [torch.ones(2)]

    def step(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        return self._loss(x) * self.clip * scale

    def _loss(self, x: torch.Tensor) -> Any:
        return self.model(x)


def test_bound_methods_are_guarded() -> None:
    trainer = Trainer()
    guards = guards_of(trainer.step, torch.ones(1))
    trainer.clip = 2.0
    assert_failure(guards, "self.clip changed from 1.0 to 2.0")
    trainer.clip = 1.0
    trainer.model.dropout.p = 0.3
    assert_failure(guards, "self.model.dropout.p")
    trainer.model.dropout.p = 0.1
    trainer.history.append(0.1)
    assert_failure(guards, "self.history")


def test_paths_can_be_ignored() -> None:
    trainer = Trainer()
    guards = Guards(
        reach_of(trainer.step, (torch.ones(1),)), ignore=["self.history", "self.batch", "self.clip"]
    )
    trainer.history.append(0.1)
    trainer.batch = [torch.ones(3)]
    trainer.clip = 3.0
    assert guards.failure() is None
    trainer.model.dropout.p = 0.3
    assert_failure(guards, "self.model.dropout.p")


def test_partials_and_defaults_are_guarded() -> None:
    options, keyword = {"deep": [1]}, [0]

    def step(model: Any, options: Any = options, *, key: Any = keyword) -> Any:
        return model

    extra = [2]
    guards = guards_of(functools.partial(step, extra, key=3), torch.ones(1))
    extra.append(3)
    assert_failure(guards, "partial.args[0]")
    extra.pop()
    options["deep"].append(2)
    assert_failure(guards, "default options['deep']")
    options["deep"].pop()
    keyword.append(1)
    assert_failure(guards, "default key")
    keyword.pop()
    assert guards.failure() is None
    step.__defaults__ = (None,)
    assert_failure(guards, "__defaults__")


def test_callable_objects_are_guarded() -> None:
    class Step:
        def __init__(self) -> None:
            self.rate = 1

        def __call__(self, x: Any) -> Any:
            return factor()

    step = Step()
    guards = guards_of(step, torch.ones(1))
    step.rate = 2
    assert_failure(guards, "train_step.rate")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


Pair = namedtuple("Pair", "left right")


@dataclass
class Config:
    colour: Colour = Colour.RED
    sizes: list[int] = field(default_factory=lambda: [1, 2])


class Slotted:
    __slots__ = ("kept", "unset")

    def __init__(self) -> None:
        self.kept = 1


def _objects() -> dict[str, Any]:
    return {
        "config": Config(),
        "slotted": Slotted(),
        "ordered": OrderedDict(a=1, b=2),
        "default": defaultdict(list, a=[1]),
        "queue": deque([1, 2]),
        "set": {1, "two", 3.0},
        "pair": Pair([1], 2),
        "array": np.arange(6.0).reshape(2, 3),
        "method": Config().sizes.append,
        "object": Explosive(),
        "space": types.SimpleNamespace(a=types.SimpleNamespace(b=1)),
    }


OBJECT_CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "dataclass enum": (lambda o: setattr(o["config"], "colour", Colour.BLUE), "['config'].colour"),
    "dataclass list": (lambda o: o["config"].sizes.append(1), "['config'].sizes"),
    "slot": (lambda o: setattr(o["slotted"], "kept", 2), "['slotted'].kept"),
    "unset slot": (lambda o: setattr(o["slotted"], "unset", 2), "['slotted'].unset"),
    "order": (lambda o: o["ordered"].move_to_end("a"), "changed"),
    "missing key": (lambda o: o["default"]["b"], "['default']['b']"),
    "nested list": (lambda o: o["default"]["a"].append(1), "['default']['a']"),
    "deque": (lambda o: o["queue"].rotate(), "['queue'][0]"),
    "set element": (lambda o: o["set"].add(4), "['set']"),
    "set type": (lambda o: (o["set"].remove(1), o["set"].add(True)), "['set']"),
    "in a tuple": (lambda o: o["pair"].left.append(1), "['pair'][0]"),
    "array": (lambda o: o["array"].fill(1), "['array']"),
    "array shape": (lambda o: o["array"].resize((3, 2), refcheck=False), "['array']"),
    "opaque object": (lambda o: o["object"].__dict__.update(value=2), "['object'].value"),
    "replaced object": (lambda o: o.update(object=Explosive()), "['object']"),
    "nested namespace": (lambda o: setattr(o["space"].a, "b", 2), "['space'].a.b"),
    "new key": (lambda o: o.update(new=1), "objects['new']"),
    "removed key": (lambda o: o.pop("config"), "objects['config']"),
    "int for float": (lambda o: o.update(pair=Pair(o["pair"].left, 2.0)), "['pair']"),
}


@pytest.mark.parametrize("change", OBJECT_CHANGES)
def test_changes_of_objects_are_seen_and_undone(change: str) -> None:
    objects = _objects()

    def step() -> Any:
        return objects

    reach = reach_of(step)
    guards, snapshot = Guards(reach), Snapshot(reach)
    assert guards.failure() is None
    assert snapshot.moved() == []
    act, text = OBJECT_CHANGES[change]
    act(objects)
    assert_failure(guards, text)
    assert any(text in reason for reason in snapshot.moved())
    if change != "array shape":
        snapshot.restore()
        assert guards.failure() is None
        assert snapshot.moved() == []


def test_contents_that_move_between_neighbours_are_seen() -> None:
    shared = object()
    first, second = [shared], []
    guards = guards_of(lambda: (first, second))
    second.append(first.pop())
    assert_failure(guards, "closure first changed from 1 to 0")


def test_values_are_compared_by_bits_and_exact_type() -> None:
    nan = float("nan")
    assert same(nan, float("nan"))
    assert not same(0.0, -0.0)
    assert not same(1, True)
    assert not same(1, 1.0)
    assert same((1, (nan,)), (1, (float("nan"),)))
    assert not same((0.0,), (-0.0,))
    assert not same(complex(0, 0.0), complex(0, -0.0))
    assert not same(np.float32(1), np.float64(1))
    assert same(np.float32(nan), np.float32(nan))
    assert same(torch.device("cpu"), torch.device("cpu"))
    assert not same(frozenset({1}), frozenset({True}))
    assert same(frozenset({1, 2.5}), frozenset({2.5, 1}))
    assert not same([1], [1])
    assert not same(Explosive(), Explosive())


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers(),
    lambda children: st.tuples(children, children) | st.frozensets(children, max_size=3),
    max_leaves=6,
)


@given(PLAIN, PLAIN)
def test_equal_plain_values_are_those_that_print_alike(left: Any, right: Any) -> None:
    def text(value: Any) -> str:
        if isinstance(value, frozenset):
            return "{" + ", ".join(sorted(map(text, value))) + "}"
        return "(" + ", ".join(map(text, value)) + ")" if isinstance(value, tuple) else repr(value)

    def has_nan(value: Any) -> bool:
        return "nan" in text(value)  # nan has many bit patterns that print alike

    if not has_nan(left) and not has_nan(right):
        assert same(left, right) == (text(left) == text(right))
    assert same(left, left)


def test_equal_values_in_new_objects_pass() -> None:
    model, optimizer, x = parts()
    guards = guards_of(plain_step, model, optimizer, x)
    model.dropout.p = float("0.1")
    model.dropout.extra_state = 1
    assert_failure(guards, "model.dropout.extra_state")
    del model.dropout.extra_state
    for _ in range(3):
        assert guards.failure() is None
    model.dropout.p = 0.2
    assert_failure(guards, "model.dropout.p changed from 0.1 to 0.2")


def test_functions_behind_descriptors_and_caches_are_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Schedule:
        @property
        def a(self) -> float:
            return ALPHA

        @functools.cached_property
        def b(self) -> Any:
            return LIMITS

        @staticmethod
        def c() -> Any:
            return SHARED

    @functools.lru_cache
    def flagged() -> Any:
        return FLAG

    schedule = Schedule()
    reach = reach_of(lambda: (schedule, flagged))
    assert [slot.path for slot in loose(reach)] == ["global SHARED"]
    guards = Guards(reach)
    for name in ("ALPHA", "LIMITS", "FLAG"):
        monkeypatch.setitem(globals(), name, 0)
        assert_failure(guards, f"global {name}")
        monkeypatch.undo()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_switches_of_pytorch_are_guarded() -> None:
    model, optimizer, x = parts()
    guards = guards_of(plain_step, model, optimizer, x)
    with torch.no_grad():
        assert_failure(guards, "gradient mode")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_failure(guards, "autocast on cpu changed from False to torch.bfloat16")
    with torch.autograd.detect_anomaly(check_nan=False):
        assert_failure(guards, "anomaly detection")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert_failure(guards, f"number of threads changed from {threads} to {threads + 1}")
    torch.set_num_threads(threads)
    assert guards.failure() is None


def _shared_number() -> Any:
    return multiprocessing.Value("d", 1.0)


def _template() -> Any:
    return string.Template("$a")


def _logger(name: str) -> Any:
    logger = logging.getLogger(name)
    logger.setLevel("NOTSET")
    return logger


OPAQUE: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "event": (threading.Event, threading.Event.set),
    "semaphore": (threading.Semaphore, threading.Semaphore.release),
    "logger": (lambda: _logger("a.step"), lambda logger: logger.setLevel("DEBUG")),
    "logger's parent": (
        lambda: _logger("a.step") and _logger("a.step.of"),
        lambda logger: logger.parent.setLevel("ERROR"),
    ),
    "queue": (queue.SimpleQueue, lambda held: held.put(1)),
    "shared number": (_shared_number, lambda number: setattr(number, "value", 2.0)),
    "number of C": (lambda: ctypes.c_double(1.0), lambda number: setattr(number, "value", 2.0)),
    "array of C": (lambda: (ctypes.c_int * 2)(1, 2), lambda array: array.__setitem__(0, 3)),
    "memory map": (lambda: mmap.mmap(-1, 16), lambda memory: memory.__setitem__(0, 3)),
    "template": (_template, lambda template: setattr(template, "template", "$b")),
    "exception": (lambda: ValueError(1.0), lambda error: setattr(error, "args", (2.0,))),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_objects_whose_state_is_in_no_container_are_asked(name: str) -> None:
    make, change = OPAQUE[name]
    held = make()
    guards = guards_of(lambda: held)
    assert guards.failure() is None
    change(held)
    assert_failure(guards, "the state of closure held changed from")


def test_large_memory_is_not_read_before_the_step_looks_at_it() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.net = torch.nn.Linear(2, 2)
            self.data = mmap.mmap(-1, 1 << 25)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).sum()

    trainer = Trainer()
    step = roam.compile(trainer.step)
    step(torch.ones(1, 2))
    trainer.data[0] = 1
    step(torch.ones(1, 2))
    assert len(step.plans) == 1


def test_functions_by_type_are_guarded() -> None:
    @functools.singledispatch
    def scale(value: object) -> float:
        return 1.0

    guards = guards_of(lambda: scale(2.0))
    scale.register(float)(lambda value: 3.0)
    assert guards.failure() is not None


def test_defaults_of_an_optimizer_are_guarded() -> None:
    model, optimizer, x = parts()
    guards = guards_of(plain_step, model, optimizer, x)
    optimizer.defaults["lr"] = 5.0
    assert_failure(guards, "optimizer.defaults['lr'] changed from")


def test_replaceable_tensors_are_not_kept_alive() -> None:
    holder = types.SimpleNamespace(last=torch.ones(3))
    gone = weakref.ref(holder.last)
    guards = guards_of(lambda: holder)
    holder.last = torch.zeros(3)
    assert gone() is None
    assert guards.failure() is None
    holder.last = torch.zeros(4)
    assert_failure(
        guards, "the shape of closure holder.last changed from torch.Size([3]) to torch.Size([4])"
    )
    holder.last = 1.0
    assert_failure(guards, "closure holder.last changed from a tensor to 1.0")


# -- arguments
# -------------------------------------------------------------------------------------------------


def test_new_tensors_of_the_same_kind_fit() -> None:
    model, _, x = parts()
    guard = ArgGuard((model, {"x": x, "n": [1, (x.double(), None)]}), {"flag": True})
    args = (model, {"x": torch.zeros(3, 4), "n": [1, (torch.zeros(3, 4).double(), None)]})
    assert guard.failure(StepCall(args, {"flag": True})) is None
    assert "args[1]['n'][0] changed from 1 to 2" in str(
        guard.failure(StepCall((model, {"x": x, "n": [2, (x.double(), None)]}), {"flag": True}))
    )
    assert "flag changed from True to False" in str(guard.failure(StepCall(args, {"flag": False})))
    assert "structure" in str(guard.failure(StepCall(args, {})))
    assert "structure" in str(guard.failure(StepCall((model, {"x": x}), {"flag": True})))
    assert "args[0]" in str(guard.failure(StepCall((Net(), *args[1:]), {"flag": True})))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (torch.ones(4, 3), "shape"),
        (torch.ones(3, 4, dtype=torch.float64), "dtype"),
        (torch.ones(4, 3).t(), "strides"),
        (torch.ones(3, 4, requires_grad=True), "requires_grad"),
        (torch.ones(3, 4, device="meta"), "device"),
        (torch.ones(4, 4)[1:], "storage offset"),
        (1.0, "from a tensor to 1.0"),
        (None, "None"),
    ],
)
def test_tensors_of_another_kind_do_not_fit(other: Any, text: str) -> None:
    reason = ArgGuard((torch.ones(3, 4),), {}).failure(StepCall((other,), {}))
    assert reason is not None
    assert "args[0]" in reason
    assert text in reason


def test_shared_memory_among_arguments_is_guarded() -> None:
    x, y = torch.ones(4), torch.ones(4)
    apart, together = ArgGuard((x, y), {}), ArgGuard((x, x), {})
    assert apart.failure(StepCall((y, x), {})) is None
    assert together.failure(StepCall((y, y), {})) is None
    assert "share memory" in str(apart.failure(StepCall((x, x), {})))
    assert "share memory" in str(together.failure(StepCall((x, y), {})))


def test_shared_memory_with_the_models_state_is_guarded() -> None:
    model, optimizer, x = parts()
    guards = guards_of(plain_step, model, optimizer, x)
    mean, var = model.blocks[1].running_mean, model.blocks[1].running_var
    apart, aliased = ArgGuard((torch.ones(4),), {}, guards), ArgGuard((mean,), {}, guards)
    assert apart.failure(StepCall((torch.zeros(4),), {})) is None
    assert "state" in str(apart.failure(StepCall((mean,), {})))
    assert aliased.failure(StepCall((mean,), {})) is None
    assert "the same tensors" in str(aliased.failure(StepCall((mean.view(4),), {})))
    assert "state" in str(aliased.failure(StepCall((var,), {})))


def test_live_floats_among_the_arguments_may_change() -> None:
    guard = ArgGuard((torch.ones(1), 0.5), {"k": 0.5}, live=[1])
    assert guard.failure(StepCall((torch.ones(1), 0.7), {"k": 0.5})) is None
    assert "args[1]" in str(guard.failure(StepCall((torch.ones(1), 1), {"k": 0.5})))
    assert "k changed" in str(guard.failure(StepCall((torch.ones(1), 0.7), {"k": 0.6})))


def test_arrays_among_the_arguments_count_by_content() -> None:
    array = np.arange(3.0)
    guard = ArgGuard((array,), {})
    assert guard.failure(StepCall((array.copy(),), {})) is None
    array[0] = 7
    assert guard.failure(StepCall((array,), {})) is not None


# -- snapshots
# -------------------------------------------------------------------------------------------------


def test_a_real_step_is_undone_but_for_values() -> None:
    model, optimizer, x = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    batch = {"x": x, "labels": [1]}

    def step(model: Net, optimizer: Any, batch: dict[str, Any]) -> None:
        plain_step(model, optimizer, batch.pop("x"))
        batch["labels"].append(2)
        batch["new"] = 1
        scheduler.step()

    reach = reach_of(step, (model, optimizer, batch))
    snapshot = Snapshot(reach)
    order = list(batch)
    step(model, optimizer, batch)
    assert any("model.head.weight was written to" in reason for reason in snapshot.moved())
    assert any(
        "model.blocks[1].num_batches_tracked was written to" in reason
        for reason in snapshot.moved()
    )
    assert scheduler.last_epoch == 1
    assert optimizer.param_groups[0]["lr"] < 0.1
    assert optimizer.state
    assert model.head.weight.grad is not None
    snapshot.restore()
    assert list(batch) == order
    assert batch["x"] is x
    assert batch["labels"] == [1]
    assert not optimizer.state
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", sorted(OPAQUE.keys() - {"queue"}))
def test_objects_whose_state_is_in_no_container_are_put_back(name: str) -> None:
    make, change = OPAQUE[name]
    held = make()
    snapshot = Snapshot(reach_of(lambda: held, ()))
    guards = guards_of(lambda: held)
    change(held)
    assert snapshot.moved()
    assert guards.failure() is not None
    snapshot.restore()
    assert not snapshot.moved()
    assert guards.failure() is None


def test_optimizer_state_keyed_by_tensors_is_restored_in_order() -> None:
    model, optimizer, x = parts()
    plain_step(model, optimizer, x)
    reach = reach_of(plain_step, (model, optimizer, x))
    snapshot = Snapshot(reach)
    before = [(key, entry, list(entry.items())) for key, entry in optimizer.state.items()]
    gradients = [parameter.grad for parameter in model.parameters()]

    first = before[0][0]
    entry = optimizer.state.pop(first)
    optimizer.state[first] = entry
    entry["momentum_buffer"] = torch.zeros(1)
    entry["extra"] = 1
    optimizer.state[torch.nn.Parameter(torch.ones(1))] = {}
    model.zero_grad()
    snapshot.restore()

    after = [(key, entry, list(entry.items())) for key, entry in optimizer.state.items()]
    assert type(optimizer.state) is defaultdict
    assert len(after) == len(before)
    for (key, entry, items), (old_key, old_entry, old_items) in zip(after, before, strict=True):
        assert key is old_key
        assert entry is old_entry
        assert [(name, id(value)) for name, value in items] == [
            (name, id(value)) for name, value in old_items
        ]
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_model_surgery_is_undone() -> None:
    model, optimizer, x = parts()
    reach = reach_of(plain_step, (model, optimizer, x))
    guards, snapshot = Guards(reach), Snapshot(reach)
    names = [name for name, _ in model.named_modules()]
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.head = torch.nn.Linear(4, 2)
    model.blocks[1].running_mean = torch.ones(4)
    model.register_buffer("extra", torch.ones(1))
    del model.blocks[0].bias
    model.head.register_forward_hook(lambda *_: None)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    optimizer.param_groups[0]["nesterov"] = True
    moved = snapshot.moved()
    assert any("model.training changed from True to False" in reason for reason in moved)
    assert any("optimizer.param_groups[0]['nesterov']" in reason for reason in moved)
    snapshot.restore()
    assert snapshot.moved() == []
    assert guards.failure() is None
    assert [name for name, _ in model.named_modules()] == names
    assert len(optimizer.param_groups) == 1


def test_random_generators_are_noticed_and_put_back() -> None:
    own, torch_own, numpy_own = random.Random(1), torch.Generator(), np.random.default_rng(1)
    legacy = np.random.RandomState(1)

    def step() -> list[Any]:
        return [
            random.random(),
            np.random.random(),
            torch.rand(1).item(),
            own.random(),
            torch.rand(1, generator=torch_own).item(),
            numpy_own.random(),
            legacy.random(),
        ]

    snapshot = Snapshot(reach_of(step))
    assert snapshot.moved() == []
    drawn = step()
    assert len(snapshot.moved()) == 7
    assert "Python's random generator was drawn from" in snapshot.moved()
    assert "closure own was drawn from" in snapshot.moved()
    snapshot.restore()
    assert snapshot.moved() == []
    assert step() == drawn


def test_names_made_by_the_step_are_removed() -> None:
    space: dict[str, Any] = {"__name__": "my_script", "count": 0}
    exec("def step():\n    global count, made\n    count += 1\n    made = 1", space)
    snapshot = Snapshot(reach_of(space["step"]))
    space["step"]()
    assert snapshot.moved() == [
        "global count changed from 0 to 1",
        "global made changed from nothing to 1",
    ]
    snapshot.restore()
    assert space["count"] == 0
    assert "made" not in space


def test_closure_variables_are_put_back() -> None:
    count = 0

    def step() -> None:
        nonlocal count, late
        count += 1
        late = 1

    snapshot = Snapshot(reach_of(step))
    late = 2
    snapshot.restore()
    assert step.__closure__ is not None
    with pytest.raises(ValueError, match="empty"):
        step.__closure__[1].cell_contents  # noqa: B018
    step()
    assert (count, late) == (1, 1)
    assert len(snapshot.moved()) == 2
    snapshot.restore()
    assert count == 0


@given(
    st.lists(
        st.sampled_from(["append", "pop", "clear", "key", "drop", "swap", "grow", "flag"]),
        max_size=8,
    )
)
def test_any_sequence_of_changes_is_undone(acts: list[str]) -> None:
    items: list[Any] = [1, [2], {"a": 3}]
    table: dict[str, Any] = {"x": items, "y": {"z": 1.5}, "w": {1, 2}}

    def picture(value: Any) -> Any:
        inner: Iterator[Any] = iter(())
        if isinstance(value, dict):
            inner = ((key, picture(item)) for key, item in value.items())
        elif isinstance(value, (list, set)):
            inner = (picture(item) for item in value)
        else:
            return value
        return id(value), list(inner)

    before = picture(table)
    reach = reach_of(lambda: table)
    guards, snapshot = Guards(reach), Snapshot(reach)
    for act in acts:
        {
            "append": lambda: items.append(0),
            "pop": lambda: items and items.pop(),
            "clear": items.clear,
            "key": lambda: table.setdefault("new", []),
            "drop": lambda: table.pop("y", None),
            "swap": lambda: table.update(x=table.pop("x")),
            "grow": lambda: table["w"].add(len(table["w"]) + 5),
            "flag": lambda: table.get("y", {}).update(z=-0.0),
        }[act]()
    changed = picture(table) != before
    assert (guards.failure() is not None) == changed
    assert bool(snapshot.moved()) == changed
    snapshot.restore()
    assert picture(table) == before
    assert guards.failure() is None


def test_guards_are_cheap() -> None:
    """Per module they make few calls, of functions in Python and in C; each takes about 1 us."""
    model = torch.nn.ModuleList([Net() for _ in range(25)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    guards = guards_of(plain_step, model, optimizer, torch.ones(1))
    modules = len(reach_of(plain_step, (model, optimizer, torch.ones(1))).modules)
    assert modules > 150
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        assert guards.failure() is None
    finally:
        sys.setprofile(None)
    assert calls < 20 * modules


def test_a_bound_method_made_anew_needs_no_new_plan() -> None:
    class Scale:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def apply(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    class Holder:
        def __init__(self) -> None:
            self.scale, self.other = Scale(2.0), Scale(3.0)
            self.function = self.scale.apply

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.function(x)

    holder, x = Holder(), torch.ones(3)
    step = roam.compile(holder.step)
    for _ in range(3):
        holder.function = holder.scale.apply
        assert torch.equal(step(x), x * 2)
    assert len(step.plans) == 1
    holder.function = holder.other.apply
    assert torch.equal(step(x), x * 3)
    assert len(step.plans) == 2


def test_read_only_members_of_types_in_c_are_left_alone() -> None:
    held = SlotsSpace(functools.partial(print), {"func": vars(functools.partial)["func"]}, "held")
    held.put(held.items())
    with pytest.raises(AttributeError):
        held.set("func", repr)
