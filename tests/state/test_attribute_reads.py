"""What a step has read is guarded, whichever way it was read; what it has not read costs no
plan."""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import gc
import importlib
import inspect
import io
import json
import operator
import pickle
import queue
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import pytest
import torch

import roam
from roam.state.attribute_reads import Reads, is_watchable
from steps import batches
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
functional = torch.nn.functional
SCALE: dict[str, Any] = {"value": 2.0}
COUNTS: list[int] = []
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE")
TEXT = "{0.scale}"
STEPS, CHANGED = 5, 3


class Named(NamedTuple):
    scale: float


class Color(enum.Enum):
    RED = 1.0
    BLUE = 3.0


class Doubling:
    """A descriptor that keeps its value under another name."""

    def __get__(self, holder: Any, reference: Any = None) -> Any:
        return holder.hidden * 2


class Base:
    inherited = 2.0
    shadowed = 2.0
    __slots__ = ("__dict__", "slot")


@runtime_checkable
class HasLater(Protocol):
    later: Any


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    other: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 2.0
    other: int = 0


class OtherConfig:
    pass


class OwnList(list):
    def scaled(self) -> float:
        return sum(self) * SCALE["value"]


class AttrDict(dict):
    __getattr__ = dict.__getitem__


class Lazy:
    """Finds attributes in a store, as configurations do."""

    def __init__(self, **values: Any) -> None:
        self._store = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_store"][name]
        except KeyError:
            raise AttributeError(name) from None


class Borg:
    shared: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.__dict__ = self.shared


class Own:
    """Reads its attributes itself."""

    def __init__(self) -> None:
        self.scale = 2.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class Collection:
    def __init__(self) -> None:
        self.items = [1.0, 2.0]

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, value: object) -> bool:
        return value in self.items

    def __iter__(self) -> Iterator[float]:
        return iter(self.items)

    def __getitem__(self, place: int) -> float:
        return self.items[place]

    def __bool__(self) -> bool:
        return self.items[0] > 1

    def __eq__(self, other: object) -> bool:
        return bool(self.items[0] == other)

    __hash__ = None  # type: ignore[assignment]


class Trainer(Base):
    """What a user keeps on his trainer, and how his step reads it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Dropout(0.25), torch.nn.Linear(8, 3)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scale = self.hidden = self.slot = 2.0
        self.config, self.frozen, self.slotted = Config(), Frozen(), Slotted()
        self.options = argparse.Namespace(scale=2.0)
        self.space = SimpleNamespace(scale=2.0)
        self.table: dict[str, Any] = {"scale": 2.0, "other": 1.0}
        self.proxy = MappingProxyType(self.table)
        self.attr_dict, self.lazy, self.borg, self.own = (
            AttrDict(scale=2.0),
            Lazy(scale=2.0),
            Borg(),
            Own(),
        )
        self.borg.scale = 2.0
        self.losses: list[Any] = [1.0, 2.0]
        self.names = {"a", "b"}
        self.collection = Collection()
        self.named, self.color = Named(2.0), Color.RED
        self.reference = weakref.ref(self.config)
        self.partial = functools.partial(operator.mul, 2.0)
        self.mode = "train"
        self.alias = self.config
        self.ordered = collections.OrderedDict(a=1.0, b=2.0)
        self.last_batch: Any = None
        self.step_count = 0
        self.get, self.look = self.table.get, self.table.__getitem__
        self.view, self.local, self.context = (
            self.table.values(),
            threading.local(),
            contextvars.copy_context(),
        )
        self.local.table = self.table
        self.weak = weakref.WeakValueDictionary(config=self.config)
        self.numbers, self.bytes, self.queue = (
            array.array("d", [2.0]),
            bytearray(b"\x02"),
            queue.Queue[float](),
        )
        self.memory = memoryview(self.numbers)
        self.own_list, self.module = OwnList([1.0]), types.ModuleType("settings")
        self.module.scale = 2.0  # type: ignore[attr-defined]
        VARIABLE.set(self.table)
        self.cached  # noqa: B018

    doubled = Doubling()

    @property
    def tripled(self) -> float:
        return self.hidden * 3

    @functools.cached_property
    def cached(self) -> float:
        return self.hidden * 4

    @contextlib.contextmanager
    def scaled(self) -> Iterator[float]:
        yield self.scale

    @functools.singledispatchmethod
    def dispatched(self, value: Any) -> float:
        return self.scale

    @classmethod
    def of_class(cls) -> float:
        return cls.inherited

    def method(self) -> float:
        return self.scale

    def super_slot(self) -> Any:
        return super().slot

    def uses_global(self) -> float:
        return SCALE["value"]

    def default(self, table: Any = SCALE) -> Any:
        return table["value"]

    def train(self, x: torch.Tensor, y: torch.Tensor, factor: Any) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(x), y) * factor
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def matched(value: Any) -> Any:
    match value:
        case Config(scale=2.0):
            return 1.0
        case Config(scale):
            return scale
    raise AssertionError


def in_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def in_a_pool(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def setter(name: str, value: Any = 3.0) -> Callable[[Any], None]:
    return lambda my: setattr(my, name, value)


def in_config(my: Trainer) -> None:
    my.config.scale = 3.0


def in_slotted(my: Trainer) -> None:
    my.slotted.scale = 3.0


def reorder(my: Trainer) -> None:
    my.table["scale"] = my.table.pop("scale")


def reorder_attributes(my: Trainer) -> None:
    my.config.__dict__["scale"] = my.config.__dict__.pop("scale")


Read, Change = Callable[[Any], Any], Callable[[Any], Any]
change_scale, change_hidden = setter("scale"), setter("hidden")
WAYS: dict[str, tuple[Read, Change]] = {
    "attribute": (lambda my: my.scale, change_scale),
    "computed name": (lambda my: getattr(my, "sca" + "le"), change_scale),
    "default of getattr": (lambda my: getattr(my, "later", 1.0), setter("later")),
    "hasattr": (lambda my: 1.0 if hasattr(my, "later") else 2.0, setter("later")),
    "missing, caught": (lambda my: missing(my), setter("later")),
    "protocol": (lambda my: 1.0 if isinstance(my, HasLater) else 2.0, setter("later")),
    "vars": (lambda my: vars(my)["scale"], change_scale),
    "dict": (lambda my: my.__dict__["scale"], change_scale),
    "dict, new name": (lambda my: len(my.__dict__), setter("later")),
    "dir": (lambda my: len(dir(my)), setter("later")),
    "method": (lambda my: my.method(), change_scale),
    "property": (lambda my: my.tripled, change_hidden),
    "descriptor": (lambda my: my.doubled, change_hidden),
    "cached property": (lambda my: my.cached, setter("cached")),
    "slot": (lambda my: my.slot, setter("slot")),
    "slot of super": (lambda my: my.super_slot(), setter("slot")),
    "slot's descriptor": (lambda my: Base.slot.__get__(my), setter("slot")),
    "object's own way": (lambda my: object.__getattribute__(my, "scale"), change_scale),
    "getattr_static": (lambda my: inspect.getattr_static(my, "scale"), change_scale),
    "getmembers": (lambda my: dict(inspect.getmembers(my, lambda v: isinstance(v, float)))["scale"], change_scale),
    "attrgetter": (lambda my: operator.attrgetter("config.scale")(my), in_config),
    "methodcaller": (lambda my: operator.methodcaller("method")(my), change_scale),
    "format": (lambda my: float(TEXT.format(my)), change_scale),
    "f-string": (lambda my: float(f"{my.scale}"), change_scale),
    "match": (lambda my: matched(my.config), in_config),
    "context manager": (lambda my: entered(my), change_scale),
    "single dispatch": (lambda my: my.dispatched(1), change_scale),
    "generator": (lambda my: sum(value for value in (my.scale, my.hidden)), change_scale),
    "sorted by attribute": (lambda my: sorted([my.config, Config(2.5)], key=operator.attrgetter("scale"))[0].scale, in_config),
    "dataclass": (lambda my: my.config.scale, in_config),
    "asdict": (lambda my: dataclasses.asdict(my.config)["scale"], in_config),
    "astuple": (lambda my: dataclasses.astuple(my.config)[0], in_config),
    "replace": (lambda my: dataclasses.replace(my.config, other=1).scale, in_config),
    "dataclass's ==": (lambda my: 1.0 if my.config == Config() else 2.0, in_config),
    "dataclass's repr": (lambda my: float(len(repr(my.config))), lambda my: setattr(my.config, "scale", 3.25)),
    "frozen dataclass": (lambda my: my.frozen.scale, setter("frozen", Frozen(3.0))),
    "changed frozen dataclass": (lambda my: my.frozen.scale, lambda my: object.__setattr__(my.frozen, "scale", 3.0)),
    "slotted dataclass": (lambda my: my.slotted.scale, in_slotted),
    "copy": (lambda my: copy.copy(my.config).scale, in_config),
    "copy of slots": (lambda my: copy.copy(my.slotted).scale, in_slotted),
    "deepcopy": (lambda my: copy.deepcopy(my.config).scale, in_config),
    "pickle": (lambda my: pickle.loads(pickle.dumps(my.config)).scale, in_config),
    "python's pickle": (lambda my: pickle.loads(pickle._dumps(my.config)).scale, in_config),  # type: ignore[attr-defined]
    "getstate": (lambda my: getattr(my.config, "__getstate__", lambda: vars(my.config))()["scale"], in_config),
    "json": (lambda my: json.loads(json.dumps(my.config, default=vars))["scale"], in_config),
    "order of attributes": (lambda my: next(iter(vars(my.config).values())), reorder_attributes),
    "namespace": (lambda my: my.options.scale, lambda my: setattr(my.options, "scale", 3.0)),
    "in a namespace": (lambda my: 1.0 if "later" in my.options else 2.0, lambda my: setattr(my.options, "later", 3.0)),
    "simple namespace": (lambda my: my.space.scale, lambda my: setattr(my.space, "scale", 3.0)),
    "dictionary": (lambda my: my.table["scale"], lambda my: my.table.update(scale=3.0)),
    "order of a dictionary": (lambda my: next(iter(my.table.values())), reorder),
    "in a dictionary": (lambda my: 1.0 if "later" in my.table else 2.0, lambda my: my.table.update(later=1)),
    "proxy": (lambda my: my.proxy["scale"], lambda my: my.table.update(scale=3.0)),
    "ordered dictionary": (lambda my: next(iter(my.ordered.values())), lambda my: my.ordered.move_to_end("a")),
    "dictionary with attributes": (lambda my: my.attr_dict.scale, lambda my: my.attr_dict.update(scale=3.0)),
    "lazy": (lambda my: my.lazy.scale, lambda my: my.lazy._store.update(scale=3.0)),
    "lazy, missing": (lambda my: getattr(my.lazy, "later", 2.0), lambda my: my.lazy._store.update(later=3.0)),
    "lazy, no longer": (lambda my: my.lazy.scale, lambda my: setattr(my.lazy, "scale", 3.0)),
    "shared dictionary": (lambda my: my.borg.scale, lambda my: setattr(Borg(), "scale", 3.0)),
    "another of a shared dictionary": (lambda my: my.borg and Borg().scale, lambda my: setattr(my.borg, "scale", 3.0)),
    "own way of reading": (lambda my: my.own.scale, lambda my: setattr(my.own, "scale", 3.0)),
    "length of a list": (lambda my: float(len(my.losses)), lambda my: my.losses.append(1.0)),
    "entry of a list": (lambda my: my.losses[-1], lambda my: my.losses.__setitem__(1, 3.0)),
    "set": (lambda my: 1.0 if "c" in my.names else 2.0, lambda my: my.names.add("c")),
    "len": (lambda my: float(len(my.collection)), lambda my: my.collection.items.append(3.0)),
    "contains": (lambda my: 2.0 if 3.0 in my.collection else 1.0, lambda my: my.collection.items.append(3.0)),
    "iter": (lambda my: sum(my.collection), lambda my: my.collection.items.append(3.0)),
    "getitem": (lambda my: my.collection[0], lambda my: my.collection.items.__setitem__(0, 3.0)),
    "bool": (lambda my: 2.0 if my.collection else 1.0, lambda my: my.collection.items.__setitem__(0, 3.0)),
    "eq": (lambda my: 2.0 if my.collection == 3.0 else 1.0, lambda my: my.collection.items.__setitem__(0, 3.0)),
    "named tuple": (lambda my: my.named.scale, setter("named", Named(3.0))),
    "enumeration": (lambda my: my.color.value, setter("color", Color.BLUE)),
    "weak reference": (lambda my: my.reference().scale, in_config),
    "view of a dictionary": (lambda my: next(iter(my.view)), lambda my: my.table.update(scale=3.0)),
    "thread's own": (lambda my: my.local.table["scale"], lambda my: my.table.update(scale=3.0)),
    "context variable": (lambda my: VARIABLE.get()["scale"], lambda my: my.table.update(scale=3.0)),
    "another in a context variable": (lambda my: VARIABLE.get()["scale"], lambda my: VARIABLE.set({"scale": 3.0})),
    "weak dictionary": (lambda my: my.weak["config"].scale, in_config),
    "array": (lambda my: my.numbers[0], lambda my: my.numbers.__setitem__(0, 3.0)),
    "memory of an array": (lambda my: my.memory[0], lambda my: my.numbers.__setitem__(0, 3.0)),
    "bytes": (lambda my: float(my.bytes[0]), lambda my: my.bytes.append(1) or my.bytes.__setitem__(0, 3)),
    "queue": (lambda my: float(my.queue.qsize()), lambda my: my.queue.put(1.0)),
    "module as a value": (lambda my: my.module.scale, lambda my: setattr(my.module, "scale", 3.0)),
    "method of a list of one's own": (lambda my: my.own_list.scaled(), lambda my: SCALE.update(value=3.0)),
    "class of an object": (
        lambda my: 1.0 if isinstance(my.config, Config) else 2.0, lambda my: setattr(my.config, "__class__", OtherConfig),
    ),
    "another dictionary": (lambda my: my.config.scale, lambda my: setattr(my.config, "__dict__", {"scale": 3.0})),
    "bound method of a dictionary": (lambda my: my.get("scale"), lambda my: my.table.update(scale=3.0)),
    "bound operator of a dictionary": (lambda my: my.look("scale"), lambda my: my.table.update(scale=3.0)),
    "alias": (lambda my: my.alias.scale, in_config),
    "partial": (lambda my: my.partial(1.0), setter("partial", functools.partial(operator.mul, 3.0))),
    "method on the object": (lambda my: my.method(), setter("method", lambda: 3.0)),
    "class attribute": (lambda my: my.inherited, lambda my: setattr(Base, "inherited", 3.0)),
    "class attribute, by class": (lambda my: type(my).inherited, lambda my: setattr(Base, "inherited", 3.0)),
    "class method": (lambda my: my.of_class(), lambda my: setattr(Base, "inherited", 3.0)),
    "shadowed class attribute": (lambda my: my.shadowed, setter("shadowed")),
    "shadowed in a class between": (lambda my: my.shadowed, lambda my: setattr(Trainer, "shadowed", 3.0)),
    "global of a method": (lambda my: my.uses_global(), lambda my: SCALE.update(value=3.0)),
    "global of a method by name": (lambda my: getattr(my, "uses_" + "global")(), lambda my: SCALE.update(value=3.0)),
    "global of a method of the class": (
        lambda my: getattr(type(my), "uses_" + "global")(my), lambda my: SCALE.update(value=3.0),
    ),
    "default of a method": (lambda my: my.default(), lambda my: SCALE.update(value=3.0)),
    "in a thread": (lambda my: in_a_thread(lambda: my.scale), change_scale),
    "in a pool": (lambda my: in_a_pool(lambda: my.scale), change_scale),
    "module's attribute": (lambda my: 2.0 if my.model[1].training else 1.0, lambda my: my.model[1].eval()),
    "evaluated": (lambda my: eval("my.scale", {"my": my}), change_scale),
    "executed": (lambda my: executed(my), change_scale),
}  # fmt: skip


def missing(my: Any) -> float:
    try:
        return my.later  # type: ignore[no-any-return]
    except AttributeError:
        return 1.0


def entered(my: Any) -> float:
    with my.scaled() as scale:
        return scale  # type: ignore[no-any-return]


def executed(my: Any) -> Any:
    names = {"my": my}
    exec("value = my.scale", names)
    return names["value"]


def outcome(
    wrap: Callable[[Any], Any],
    make: Callable[[], Any],
    read: Read,
    change: Change,
    index: int = CHANGED,
) -> tuple[list[Any], Any]:
    """What the steps return and leave, where `change` comes between two of them; and the step."""
    SCALE["value"], Base.inherited, Base.shared = 2.0, 2.0, {}  # type: ignore[attr-defined]
    Trainer.__dict__.get("shadowed") and delattr(Trainer, "shadowed")
    torch.manual_seed(0)
    my = make()
    step = wrap(lambda x, y: my.train(x, y, read(my)))
    seen: list[Any] = []
    for place, (x, y) in enumerate(batches(STEPS)):
        if place == index:
            change(my)
        seen += [
            *tensors_and_numbers(step(x, y)),
            *tensors_and_numbers(my.model.state_dict(), torch.get_rng_state()),
        ]
    return seen, step


def check(read: Read, change: Change, captures: int, make: Callable[[], Any] = Trainer) -> None:
    eager, _ = outcome(lambda step: step, make, read, change)
    planned, step = outcome(roam.compile, make, read, change)
    assert_same_bits(eager, planned)
    assert len(step._captures) == captures


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_what_is_read_is_guarded(way: str) -> None:
    read, change = WAYS[way]
    check(read, change, 2)


# -- what is not read
# -------------------------------------------------------------------------------------------------


class Loop(Trainer):
    """Keeps books outside of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.global_step, self.best, self.started, self.metrics = (
            0,
            float("inf"),
            time.time(),
            dict[Any, Any](),
        )
        self.state = Config()
        self.log = io.StringIO()
        data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
        self.loader = torch.utils.data.DataLoader(data, batch_size=5)
        self.batches = iter(self.loader)
        self.generator = (number for number in range(3))
        self.history: list[Any] = []
        self.outputs: Any = None

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.train(x, y, self.scale)

    def rebuild(self) -> None:
        object.__setattr__(self, "mode", "rebuilt")

    def fit(self) -> None:
        COUNTS.append(len(self.history))
        SCALE["seen"] = COUNTS[-1]


def count(my: Loop, loss: Any) -> None:
    my.global_step += 1
    my.state.other += 1
    my.best, my.started = min(my.best, loss.item()), time.time()


def keep(my: Loop, loss: Any) -> None:
    my.losses.append(loss.item())
    my.history.append(loss)
    my.metrics[len(my.history)] = loss.item()
    my.last = loss


def keep_with_history(my: Loop, loss: Any) -> None:
    my.outputs = my.model(torch.ones(1, 6))  # with its gradient history
    my.history.append((my.outputs, torch.ones(2).to_sparse()))


def keep_batch(my: Loop, loss: Any) -> None:
    my.last_batch = (torch.ones(3), loss)


def log(my: Loop, loss: Any) -> None:
    my.log.write(f"{loss}")
    next(my.batches)


def new_parts(my: Loop, loss: Any) -> None:
    my.ema = copy.deepcopy(my.model)
    my.other = torch.optim.LBFGS(my.ema.parameters())
    my.compiled = torch.compile(torch.nn.Linear(2, 2))


def fit(my: Loop, loss: Any) -> None:
    my.fit()


@pytest.mark.parametrize("book", [count, keep, keep_with_history, keep_batch, log, new_parts, fit])
@pytest.mark.parametrize("late", [False, True])
def test_books_that_the_step_does_not_read_cost_no_plan(
    book: Callable[[Loop, Any], None], late: bool
) -> None:
    """`late`: they are there when the step is captured."""
    outcomes = []
    for wrap in (lambda step: step, roam.compile):
        torch.manual_seed(0)
        my = Loop()
        if late:
            book(my, torch.ones(()))
        step, seen = wrap(my.step), []
        for x, y in batches(4):
            loss = step(x, y)
            book(my, loss)
            seen += tensors_and_numbers(loss, my.model.state_dict())
        outcomes.append(seen)
    assert_same_bits(*outcomes)
    assert len(step._captures) == 1


def test_a_method_of_the_class_is_bound_like_any_other() -> None:
    class Compiled(Loop):
        @roam.compile
        def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.train(x, y, self.scale)

    my = Compiled()
    for x, y in batches(3):
        count(my, my.step(x, y))
    assert len(Compiled.__dict__["step"]._captures) == 1


def test_a_method_that_saves_by_a_library_costs_nothing() -> None:
    """PyYAML's code reads attributes past the methods that note it."""
    pytest.importorskip("yaml")

    class Net(torch.nn.Linear):
        kept: list[torch.Tensor]

        def save(self) -> str:
            import yaml

            return str(yaml.dump({"size": self.in_features}))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = []
            return super().forward(getattr(self, "shift")(x))  # noqa: B009

        def shift(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    net = Net(4, 3)
    step = roam.compile(lambda x: net(x).sum())
    for x in [torch.randn(2, 4) for _ in range(3)]:
        assert_same_bits([net(x).sum().detach()], [step(x).detach()])
    assert len(step.plans) == 1


def test_a_large_data_set_is_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    reach = importlib.import_module("roam.state.discovery")
    monkeypatch.setattr(reach, "_MOST_UNREAD", 2000)
    monkeypatch.setattr(reach, "_MOST_SPACES", 3000)
    my = Loop()
    my.history = [{"x": [index]} for index in range(4000)]
    my.metrics = {"data": [{"x": torch.ones(1)} for _ in range(3000)]}
    step = roam.compile(my.step)
    for x, y in batches(2):
        step(x, y)
    my.history.pop()
    step(x, y)
    assert len(step._captures) == 1
    my.scale = 3.0
    step(x, y)
    assert len(step._captures) == 2
    reading = roam.compile(lambda x, y: my.train(x, y, len(my.history[0])))
    with pytest.raises(roam.CaptureError, match="more than 3000 objects") as caught:
        reading(x, y)
    assert caught.value.code == "reach"


def reads_an_iterator(my: Loop) -> Any:
    return next(my.generator)


def reads_the_loader(my: Loop) -> Any:
    return next(my.batches)[0].mean()


def reads_a_kept_gradient(my: Loop) -> Any:
    return my.outputs.grad.mean()


def swallows(my: Loop) -> Any:
    with contextlib.suppress(Exception):
        return next(my.generator)
    return 1.0


@pytest.mark.parametrize(
    ("read", "code"),
    [(reads_an_iterator, "iterator"), (reads_the_loader, "iterator"), (reads_a_kept_gradient, "outer_history"), (swallows, "iterator")],
)  # fmt: skip
def test_what_cannot_be_captured_is_refused_once_it_is_read(read: Read, code: str) -> None:
    my = Loop()
    my.outputs = my.model(torch.ones(1, 6))
    my.outputs.retain_grad()
    my.outputs.sum().backward()
    ((x, y),) = batches(1)
    with pytest.raises(roam.CaptureError) as refusal:
        roam.compile(lambda x, y: my.train(x, y, read(my)))(x, y)
    assert refusal.value.code == code
    assert refusal.value.path is not None
    assert next(my.generator) == 0
    assert "__getattribute__" not in vars(Loop)


def sets_a_mode(my: Any) -> float:
    my.mode = "train"
    return 2.0


def sets_a_mode_in_c(my: Any) -> float:
    setattr(my.config, "other", 1)  # noqa: B010
    object.__setattr__(my, "mode", "train")
    return 2.0


def counts(my: Any) -> float:
    my.step_count += 1
    return 1.0 / my.step_count


@pytest.mark.parametrize(
    ("read", "change", "look"),
    [
        (sets_a_mode, setter("mode", "eval"), lambda my: my.mode),
        (sets_a_mode_in_c, setter("mode", "eval"), lambda my: my.mode),
        (counts, setter("step_count", 7), lambda my: my.step_count),
    ],
)
def test_what_is_set_is_set_again(read: Read, change: Change, look: Read) -> None:
    left = []
    for wrap in (lambda step: step, roam.compile):
        my = Trainer()
        outcomes = outcome(wrap, lambda my=my: my, read, change)[0]  # type: ignore[misc]
        left.append((look(my), outcomes))
    assert left[0][0] == left[1][0]
    assert_same_bits(left[0][1], left[1][1])


def test_tensors_behind_what_is_not_read_may_be_those_that_are() -> None:
    """The plan looks a tensor up where the step has read it, not where else it lies."""

    class Twice(Trainer):
        def __init__(self) -> None:
            self.a_copy = self.weights = torch.ones(3)
            super().__init__()
            self.first_model = self.model
            self.zz_model = self.model

    def swap(my: Any) -> None:
        my.a_copy = torch.zeros(3)
        my.first_model = None

    check(lambda my: my.weights.sum() / 2, swap, 1, Twice)

    def swap_what_is_read(my: Any) -> None:
        my.weights = torch.full((3,), 2.0)

    check(lambda my: my.weights.sum() / 2, swap_what_is_read, 1, Twice)


def test_reads_of_all_traces_count() -> None:
    """Only the steady step reads the second value."""

    class Adam(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = torch.optim.Adam(self.model.parameters())  # type: ignore[assignment]

    def read(my: Any) -> float:
        return my.scale if my.optimizer.state else 1.0  # type: ignore[no-any-return]

    check(read, change_scale, 2, Adam)


# -- modules of the user's
# -------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.calls, self.last = torch.nn.Linear(6, 3), 1.0, 0, None
        self.metric = Metric()
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale * self.mask


class Metric(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.count = 0


class WithBlock(Trainer):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = Block()  # type: ignore[assignment]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


def unread_of_a_module(my: Any) -> None:
    my.model.calls += 1
    my.model.last = torch.ones(2)
    my.model.metric.seen.append(1.0)
    my.model.metric.count += 1


MODULE_CHANGES: dict[str, tuple[Read, Change, int]] = {
    "unread": (lambda my: 1.0, unread_of_a_module, 1),
    "attribute": (lambda my: 1.0, lambda my: setattr(my.model, "scale", 2.0), 2),
    "buffer": (lambda my: 1.0, lambda my: setattr(my.model, "mask", torch.zeros(3)), 1),
    "buffer's shape": (lambda my: 1.0, lambda my: setattr(my.model, "mask", torch.zeros(1)), 2),
    "child": (lambda my: 1.0, lambda my: setattr(my.model, "linear", torch.nn.Sequential(my.model.linear, torch.nn.Tanh())), 2),
    "patched": (lambda my: 1.0, lambda my: setattr(my.model, "forward", lambda x: my.model.linear(x)), 2),
    "hook": (lambda my: 1.0, lambda my: my.model.register_forward_hook(lambda m, i, o: o * 2), 2),
    "shadowed child": (lambda my: 1.0, lambda my: my.model.__dict__.update(linear=torch.nn.Linear(6, 3, dtype=torch.float32)), 2),
    "dict": (lambda my: my.model.__dict__["calls"] + 1.0, lambda my: setattr(my.model, "calls", 2), 2),
    "state_dict": (lambda my: float(len(my.model.state_dict())), lambda my: my.model.register_buffer("b", torch.ones(1)), 2),
    "modules": (lambda my: float(len(list(my.model.modules()))), lambda my: my.model.add_module("m", Metric()), 2),
    "children's attributes": (
        lambda my: sum(getattr(m, "count", 0) + 1.0 for m in my.model.modules()),
        lambda my: setattr(my.model.metric, "count", 2), 2,
    ),
    "by get_submodule": (
        lambda my: my.model.get_submodule("metric").count + 1.0, lambda my: setattr(my.model.metric, "count", 2), 2,
    ),
    "missing": (lambda my: getattr(my.model, "later", 1.0), lambda my: setattr(my.model, "later", 2.0), 2),
    "missing, a buffer later": (
        lambda my: getattr(my.model, "later", 1.0), lambda my: my.model.register_buffer("later", torch.tensor(2.0)), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULE_CHANGES)
def test_modules_of_the_users(name: str) -> None:
    read, change, captures = MODULE_CHANGES[name]
    check(read, change, captures, WithBlock)


# -- leaving no mark
# -------------------------------------------------------------------------------------------------


def test_classes_are_as_before_after_ctrl_c() -> None:
    my = Trainer()
    before = {kind: dict(vars(kind)) for kind in (Trainer, Base, Config)}

    def read(my: Any) -> float:
        assert "__getattribute__" in vars(Trainer)
        raise KeyboardInterrupt

    ((x, y),) = batches(1)
    with pytest.raises(KeyboardInterrupt):
        roam.compile(lambda x, y: my.train(x, y, read(my)))(x, y)
    assert {kind: dict(vars(kind)) for kind in before} == before
    assert Trainer.__getattribute__ is object.__getattribute__


def test_other_threads_neither_count_nor_fail() -> None:
    my, stop, failures = Trainer(), threading.Event(), list[BaseException]()
    my.generator = (number for number in range(3))

    def watch() -> None:
        while not stop.wait(0.0005):
            try:
                assert my.step_count >= 0
                assert my.generator is not None
            except BaseException as failure:  # noqa: BLE001
                failures.append(failure)

    thread = threading.Thread(target=watch)
    thread.start()
    step = roam.compile(lambda x, y: my.train(x, y, my.scale))
    for x, y in batches(3):
        step(x, y)
        my.step_count += 1
    stop.set()
    thread.join()
    assert not failures
    assert len(step._captures) == 1


def test_attributes_read_by_a_dictionary_that_somebody_keeps_are_guarded() -> None:
    my, x = Trainer(), torch.ones(3)
    my.factor = "2"
    zipped = vars(my)  # found after the object
    step = roam.compile(lambda x: x * float(zipped["factor"]) * my.scale)
    for factor in ("2", "3", "2"):
        my.factor = factor
        assert torch.equal(step(x), x * float(factor) * my.scale)


def test_what_can_be_watched() -> None:
    assert is_watchable(Trainer)
    assert is_watchable(Block)
    assert is_watchable(Slotted)
    for kind in (Own, Frozen, SimpleNamespace, torch.nn.Linear, dict, int, type):
        assert not is_watchable(kind), kind
    assert Reads(everything=True).key_of(Trainer(), {}) is None
    gc.collect()
