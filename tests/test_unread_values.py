"""Plain values among the arguments, such as names of files: a step that hands them around without
looking at them needs no plan for each, and a step that looks at them in any way has one."""

from __future__ import annotations

import collections
import copy
import ctypes
import dataclasses
import decimal
import enum
import functools
import itertools
import json
import math
import operator
import pathlib
import pickle
import random
import re
import struct
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

import roam
from newer import needs_2_15
from roam.capture.tracing.unread_values import StandIns, unread
from training import assert_same_bits, tensors_and_numbers

KEPT: deque[Any] = deque(maxlen=1)
Use = Callable[[Any], Any]


@functools.singledispatch
def sizes_of(value: Any) -> int:
    return 0


@sizes_of.register
def _(value: str) -> int:
    return len(value)


class Choice(enum.Enum):
    FIRST = 1
    SECOND = 2


@functools.lru_cache
def cached(value: Any) -> int:
    return hash(value) % 3


def swallowed(read: Callable[[Any], Any]) -> Use:
    """What a step gets that catches whatever a function raises."""

    def use(value: Any) -> Any:
        try:
            return read(value)
        except Exception:  # noqa: BLE001 - as a step may
            return 0

    return use


def in_thread(name: Any) -> int:
    found: list[int] = []
    read = swallowed(lambda name: found.append(ord(name)))
    thread = threading.Thread(target=read, args=(name,))
    thread.start()
    thread.join()
    return sum(found)


POOL = ThreadPoolExecutor(1)
WEIGHT = torch.linspace(-1, 1, 6)
HOLDER = SimpleNamespace(x=1, xx=2, xxx=3)
NAMES = ["xx", "xxx", "x", "xxxxx", "xxxx"]
DEFAULT = SimpleNamespace(name="".join(["unset"]))
DEFAULT_NAME = DEFAULT.name
READ_NAMES: dict[str, Use] = {
    "length": lambda name: len(name),
    "equality": lambda name: int(name == "xx"),
    "equality the other way round": lambda name: int("xx" == name),  # noqa: SIM300
    "identity": lambda name: 1 if name is DEFAULT_NAME else 0,
    "identity with an attribute": lambda name: 1 if name is not DEFAULT.name else 0,
    "identity the other way round": lambda name: 1 if DEFAULT_NAME is name else 0,
    "identity of elements": lambda name: int(any(name is other for other in NAMES[:1])),
    "identity with one of two": lambda name: (
        1 if name is (DEFAULT_NAME if WEIGHT is not None else None) else 0
    ),
    "identity in code without a file": eval("lambda name: 1 if name is DEFAULT_NAME else 0"),
    "identity as a function": lambda name: int(operator.is_(name, DEFAULT_NAME)),
    "comparison as a method": lambda name: 1 if DEFAULT_NAME.__eq__(name) is True else 0,
    "thread": in_thread,
    "pool": lambda name: POOL.submit(swallowed(ord), name).result(),
    "order": lambda name: int(name < "xxx"),
    "key": lambda name: {"xx": 2, "xxx": 3}.get(name, 0),
    "entry": lambda name: swallowed(lambda name: ["xx", "xxx"].index(name))(name),
    "element of a set": lambda name: int(name in {"xx", "xxxx"}),
    "format": lambda name: len(f"{name}"),
    "percent": lambda name: len("%s" % name),  # noqa: UP031
    "str": lambda name: len(str(name)),
    "repr": lambda name: len(repr(name)),
    "sum": lambda name: len(name + "a"),
    "sum from the left": lambda name: len("a" + name),
    "multiple": lambda name: len(2 * name),
    "join": lambda name: len("".join([name, "a"])),
    "slice": lambda name: len(name[1:]),
    "iteration": lambda name: sum(1 for _ in name),
    "contains": lambda name: int("xx" in name),
    "is contained": lambda name: int(name in "xxx"),
    "method": lambda name: int(name.endswith("xx")),
    "truth": lambda name: 2 if name[1:] else 1,
    "pattern": lambda name: re.match("x*", name).end(),
    "attribute or 0": lambda name: swallowed(lambda name: getattr(HOLDER, name))(name),
    "keyword": lambda name: (lambda **given: len(next(iter(given))))(**{name: 1}),
    "code point": lambda name: swallowed(lambda name: ord(name))(name),
    "pattern or 0": lambda name: swallowed(lambda name: re.match("x*", name).end())(name),
    "dispatch": lambda name: sizes_of(name),
    "json": lambda name: len(json.dumps([name])),
    "json or 0": lambda name: swallowed(lambda name: len(json.dumps([name])))(name),
    "pickle": lambda name: len(pickle.dumps(name)),
    "deepcopy": lambda name: len(copy.deepcopy([name])[0]),
    "sorted": lambda name: sorted([name, "xxx"]).index("xxx"),
    "array": lambda name: int(np.array([name]).dtype.itemsize),
    "counter": lambda name: Counter([name])["xx"],
    "encoded": lambda name: len(name.encode()),
    "bytes": lambda name: swallowed(lambda name: len(bytes(name, "utf8")))(name),
    "int": lambda name: swallowed(lambda name: int(name, 36) % 7)(name),
    "decimal": lambda name: swallowed(decimal.Decimal)(name),
    "path or 0": lambda name: swallowed(lambda name: pathlib.Path(name).suffix)(name),
    "replacement": lambda name: swallowed(lambda name: "a".replace("a", name))(name),
    "format of a field": lambda name: "{}".format(name),  # noqa: UP032
    "module": lambda name: swallowed(lambda name: torch.nn.Module().get_submodule(name))(name),
    "operator": lambda name: swallowed(lambda name: torch.einsum(name, WEIGHT))(name),
    "device": lambda name: swallowed(torch.device)(name),
    "mode": lambda name: swallowed(
        lambda name: torch.nn.functional.interpolate(WEIGHT[None, None], 3, mode=name)
    )(name),
    "size": lambda name: sys.getsizeof(name),
    "match": lambda name: _matched(name),
    "struct": lambda name: swallowed(lambda name: struct.unpack("2s", name)[0])(name),
}


def _matched(name: Any) -> int:
    match name:
        case "xx":
            return 2
        case str():
            return 1
    return 0


NUMBERS = [2, 3, 0, 1, 4]
READ_NUMBERS: dict[str, Use] = {
    "sum": lambda number: number + 1,
    "factor": lambda number: WEIGHT * number,
    "factor from the left": lambda number: number * WEIGHT,
    "argument": lambda number: torch.mul(WEIGHT, number),
    "keyword": lambda number: torch.add(WEIGHT, WEIGHT, alpha=number),
    "slice": lambda number: WEIGHT[:number],
    "index": lambda number: WEIGHT[number],
    "entry": lambda number: list(range(9))[number],
    "range": lambda number: len(range(number)),
    "shape": lambda number: WEIGHT.expand(number, 6),
    "tensor": lambda number: torch.tensor(number, dtype=torch.float32),
    "tensor of many": lambda number: torch.tensor([1.0, number]),
    "full": lambda number: torch.full((2,), number, dtype=torch.float32),
    "zeros": lambda number: torch.zeros(number) + 1,
    "comparison of a tensor": lambda number: number < WEIGHT,
    "truth": lambda number: 3 if number else 1,
    "branch": lambda number: 1 if number > 2 else 0,
    "float": lambda number: float(number),
    "maximum": lambda number: max(2, number),
    "power": lambda number: 2**number,
    "array": lambda number: int(np.asarray([number]).sum()),
    "dtype of an array": lambda number: np.array([number]).dtype,
    "array of floats": lambda number: float(np.array([number], dtype=np.float32)[0]),
    "round": lambda number: round(number),
    "where": lambda number: torch.where(WEIGHT > 0, WEIGHT, number),
    "masked_fill": lambda number: WEIGHT.masked_fill(WEIGHT > 0, number),
    "clamp": lambda number: WEIGHT.clamp(max=number),
    "pad": lambda number: torch.nn.functional.pad(WEIGHT, (0, number)),
    "repeat": lambda number: WEIGHT.repeat(number),
    "index of a tuple": lambda number: WEIGHT[None][0, number],
    "index of a list": lambda number: WEIGHT[[number]],
    "dimension": lambda number: swallowed(lambda number: WEIGHT.sum(number))(number),
    "arange": lambda number: torch.arange(number),
    "random": lambda number: random.Random(number).random(),
    "random of NumPy's": lambda number: np.random.default_rng(number).random(),
    "root": lambda number: math.sqrt(number),
    "decimal or 0": lambda number: swallowed(lambda number: decimal.Decimal(number) > 2)(number),
    "islice": lambda number: [*itertools.islice("abcdef", number)],
    "queue": lambda number: collections.deque("abc", maxlen=number),
    "cache": lambda number: cached(number),
    "member": lambda number: swallowed(Choice)(number),
    "seed": lambda number: torch.Generator().manual_seed(number).initial_seed(),
    "threads": lambda number: swallowed(lambda number: torch.set_num_threads(-number))(number),
    "bytes": lambda number: bytes(number),
    "digits": lambda number: f"{number:03d}",
    "sleep": lambda number: swallowed(lambda number: len([None] * number))(number),
}
BYTES = [b"xx", b"xxx", b"x", b"xxxxx", b"xxxx"]
READ_BYTES: dict[str, Use] = {
    "decode": lambda key: key.decode(),
    "buffer": lambda key: torch.frombuffer(bytearray(key), dtype=torch.uint8),
    "view": lambda key: swallowed(lambda key: len(memoryview(key)))(key),
    "struct": lambda key: swallowed(lambda key: struct.unpack("2s", key)[0])(key),
    "struct of one byte": lambda key: swallowed(lambda key: struct.pack("c", key)[0])(key),
    "character": lambda key: swallowed(lambda key: ctypes.c_char(key).value[0])(key),
    "join": lambda key: b"".join([key]),
    "from bytes": lambda key: swallowed(lambda key: int.from_bytes(key, "big"))(key),
    "array": lambda key: np.frombuffer(key, np.uint8).sum(),
}
READ = {
    f"{kind}: {name}": (use, values)
    for kind, uses, values in (
        ("text", READ_NAMES, NAMES),
        ("number", READ_NUMBERS, NUMBERS),
        ("bytes", READ_BYTES, BYTES),
    )
    for name, use in uses.items()
}


def places_unread(use: Use, value: Any) -> Collection[int]:
    """Whether a use counts as one that does not read, although its results are not compared."""

    def trace(stand_ins: StandIns) -> list[Any]:
        use(*stand_ins.put([value]))
        return []

    return unread({0: value}, trace, lambda one, other: True)


@pytest.mark.parametrize(("use", "values"), READ.values(), ids=READ)
def test_what_reads_a_value_is_noticed_with_any_value(use: Use, values: list[Any]) -> None:
    for value in values:
        assert not places_unread(use, value)


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str


HANDED_ROUND: dict[str, Use] = {
    "nothing": lambda value: None,
    "isinstance": lambda value: isinstance(value, (str, torch.Tensor, Mapping)),
    "is_tensor": lambda value: torch.is_tensor(value),
    "moves what it can": lambda value: {
        name: held.to("cpu") if hasattr(held, "to") else held
        for name, held in {"name": value, "x": WEIGHT}.items()
    },
    "or leaves it": lambda value: swallowed(lambda value: value.to("cpu"))(value),
    "tree": lambda value: tree_map(lambda leaf: leaf, {"names": [value, value]}),
    "containers": lambda value: [
        (value,),
        {"name": value},
        [value] * 2,
        *zip([value], [1], strict=True),
    ],
    "is None": lambda value: 1 if value is None else 0,
    "object": lambda value: Sample(WEIGHT, value),
    "namespace": lambda value: SimpleNamespace(name=value).name,
    "keywords": lambda value: (lambda **given: given)(name=value),
    "partial": lambda value: functools.partial(lambda value: 0, value)(),
    "copy of the containers": lambda value: copy.copy([value]),
    "class": lambda value: value.__class__ is str,
    "identity": lambda value: (value is WEIGHT, value is Choice.FIRST, (value is None) is True),
    "identity of classes": lambda value: value.__class__ is WEIGHT.__class__,
}


@pytest.mark.parametrize("use", HANDED_ROUND.values(), ids=HANDED_ROUND)
@pytest.mark.parametrize("value", ["a.png", 12, b"key"])
def test_what_hands_a_value_round_does_not_read_it(use: Use, value: Any) -> None:
    assert [*places_unread(use, value)] == [0]


def test_what_keeps_a_value_counts_as_reading_it() -> None:
    assert not places_unread(KEPT.append, "a.png")
    KEPT.clear()


def test_values_that_are_read_do_not_hide_others() -> None:
    values = {0: "a", 1: "b", 3: 4}

    def trace(stand_ins: StandIns) -> str:
        name, _, _, number = stand_ins.put(["a", "b", torch.ones(2), 4])
        return "".join([name]) * number  # a function written in C, which asks the first nothing

    assert not unread(values, trace, operator.eq)

    def trace_of_dunders(stand_ins: StandIns) -> str:
        name, _, _, number = stand_ins.put(["a", "b", torch.ones(2), 4])
        return (name + "c") * number

    assert {*unread(values, trace_of_dunders, operator.eq)} == {1}


def test_nothing_is_sure_in_a_debugger() -> None:
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        assert not places_unread(lambda value: None, "a.png")
    finally:
        sys.settrace(before)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 6))
        self.last: Any = None

    def forward(self, batch: Any) -> torch.Tensor:
        return (self.weight * batch["x"]).square().sum()


def setting() -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def compared(
    make: Callable[[Net, torch.optim.Optimizer], Callable[[Any], Any]],
    batches: Callable[[], list[Any]],
    **options: Any,
) -> Any:
    """Runs a step eagerly and compiled on the same batches, compares results and state, and
    returns the compiled step."""
    left = []
    for wrap in (lambda step: step, functools.partial(roam.compile, **options)):
        net, optimizer = setting()
        step = wrap(make(net, optimizer))
        results = [tensors_and_numbers(step(batch)) for batch in batches()]
        left.append([*results, tensors_and_numbers((vars(net), optimizer.state_dict()))])
    for one, other in zip(*left, strict=True):
        assert_same_bits(one, other)
    return step


def batches(count: int = 5, size: int = 6) -> list[Any]:
    return [
        {
            "x": torch.full((size,), place + 0.5),
            "names": [f"{place}{row}.png" for row in range(3)],
            "info": {"number": place, "key": str(place).encode()},
        }
        for place in range(count)
    ]


def trains(
    net: Net, optimizer: torch.optim.Optimizer, factor: Callable[[Any], Any] = lambda batch: 1
) -> Callable[[Any], Any]:
    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = net({name: held for name, held in batch.items() if held is not None}) * factor(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_names_in_a_batch_need_no_plan_for_each() -> None:
    assert len(compared(trains, batches)._captures) == 2


@pytest.mark.parametrize("on_change", ["raise", "eager"])
def test_one_capture_is_enough_where_no_more_are_allowed(on_change: Any) -> None:
    assert len(compared(trains, batches, on_change=on_change)._captures) == 1


@pytest.mark.parametrize("held", [str, lambda name: [name], lambda name: {"first": name}])
def test_names_in_objects_need_no_plan_for_each(held: Callable[[str], Any]) -> None:
    def make(net: Net, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
        step = trains(net, optimizer)
        return lambda sample: step({"x": sample.x, "name": sample.name})

    def samples() -> list[Any]:
        return [Sample(batch["x"], held(batch["names"][0])) for batch in batches(8)]

    assert len(compared(make, samples)._captures) <= 4


def test_a_value_that_only_some_shapes_read() -> None:
    def factor(batch: Any) -> int:
        return hash(batch["info"]["number"]) if batch["x"].shape[0] == 1 else 1

    def mixed() -> list[Any]:
        return [*batches(3), *batches(3, 1), *batches(4)[2:], *batches(5, 1)]

    step = compared(functools.partial(trains, factor=factor), mixed)
    assert len(step._captures) == 2 + 5


@pytest.mark.parametrize(
    "factor",
    [
        lambda batch: len(batch["names"][0]) if type(batch["names"][0]) is str else 0,
        lambda batch: 2 if type(batch["info"]["number"]) is int and batch["info"]["number"] == 3 else 1,
    ],
)  # fmt: skip
def test_a_step_that_asks_for_the_type(factor: Callable[[Any], Any]) -> None:
    compared(functools.partial(trains, factor=factor), batches)


@pytest.mark.parametrize(
    "is_default",
    [lambda name: name is DEFAULT_NAME, lambda name: id(name) == id(DEFAULT_NAME)],
    ids=["is", "id"],
)
def test_a_name_that_another_one_stands_for(is_default: Callable[[Any], bool]) -> None:
    def named() -> list[Any]:
        names = ["a.png", "b.png", DEFAULT_NAME, "c.png", DEFAULT_NAME]
        return [batch | {"names": name} for batch, name in zip(batches(), names, strict=True)]

    compared(functools.partial(trains, factor=lambda batch: 1 + is_default(batch["names"])), named)


def test_names_that_the_backward_pass_reads() -> None:
    def make(net: Net, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
        def factor(batch: Any) -> torch.Tensor:
            x = net.weight.sum()
            x.register_hook(lambda gradient: gradient * (2 + int(batch["names"][0][0])))
            return x

        return trains(net, optimizer, factor)

    assert len(compared(make, batches)._captures) == 5


def test_names_that_are_returned() -> None:
    def make(net: Net, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
        step = trains(net, optimizer)
        return lambda batch: {"loss": step(batch), "names": batch["names"]}

    compared(make, batches)


HANDED_ON: dict[str, Callable[[dict[str, Any], Any, list[Any]], Any]] = {
    "returned": lambda batch, loss, kept: {"id": batch["names"][0], "loss": loss},
    "returned twice": lambda batch, loss, kept: [batch["names"][1], (loss, batch["names"][1])],
    "returned alone": lambda batch, loss, kept: batch["info"]["key"],
    "returned with others": lambda batch, loss, kept: list(batch["names"]),
    "kept in a list": lambda batch, loss, kept: kept.extend(batch["names"]),
    "kept with the loss": lambda batch, loss, kept: kept.append((loss, batch["names"][2])),
    "put in the batch": lambda batch, loss, kept: batch.update(first=batch["names"][0], loss=loss),
    "moved in the batch": lambda batch, loss, kept: batch.update(first=batch["names"].pop()),
}  # fmt: skip


@pytest.mark.parametrize("hand_on", HANDED_ON.values(), ids=HANDED_ON)
@pytest.mark.parametrize("options", [{}, {"on_change": "raise"}], ids=["replan", "raise"])
def test_names_that_are_handed_on_need_no_plan_for_each(
    hand_on: Callable[..., Any], options: dict[str, Any]
) -> None:
    def run(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
        net, optimizer = setting()
        plain, kept, given = trains(net, optimizer), list[Any](), batches()
        names = [name for batch in given for name in (*batch["names"], batch["info"]["key"])]
        step = wrap(lambda batch: hand_on(batch, plain({"x": batch["x"]}), kept))
        left = [step(batch) for batch in given], kept, given
        for leaf in tree_leaves(left):
            assert type(leaf) not in (str, bytes) or any(leaf is name for name in names)
        return step, (left, net.weight)

    (leaves, spec), (step, planned) = (
        tree_flatten(run(lambda step: step)[1]),
        run(functools.partial(roam.compile, **options)),
    )
    others, other_spec = tree_flatten(planned)
    assert spec == other_spec
    for one, other in zip(leaves, others, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert len(step._captures) == (1 if options else 2)


def test_names_that_are_returned_and_read() -> None:
    def make(net: Net, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
        step = trains(net, optimizer)
        return lambda batch: {"loss": step(batch), "name": batch["names"][0].upper()}

    assert len(compared(make, batches)._captures) == 5


def test_names_that_the_step_keeps() -> None:
    def make(net: Net, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
        step = trains(net, optimizer)

        def keeping(batch: Any) -> Any:
            net.last = batch["names"][0]
            return step(batch)

        return keeping

    compared(make, batches)


def test_names_beside_a_branch_on_a_value() -> None:
    def make(net: Net, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
        step = trains(net, optimizer)

        def branching(batch: Any) -> Any:
            loss = step(batch)
            return loss if loss > 3 else loss * 2

        return branching

    step = compared(make, lambda: batches(9))
    assert 0 < len(step._captures) <= 6


@needs_2_15
def test_a_compiled_region_beside_names() -> None:
    def make(net: Net, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
        forward = torch.compile(lambda x: (net.weight * x).square().sum(), backend="eager")

        def step(batch: Any) -> Any:
            optimizer.zero_grad()
            loss = forward(batch["x"])
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    compared(make, lambda: batches(3))
