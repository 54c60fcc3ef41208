"""A run finds its inputs where the user's objects hold them, and notices if they share memory in
another way than at capture, however few it looks at."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import roam
from roam.program.ir import Call, Program, Source, TensorMeta
from roam.runtime.inputs import Inputs
from roam.state.arguments import Taker
from roam.state.containers import MappingSpace
from roam.state.equality import MISSING
from roam.state.references import (
    ArgumentReference,
    OptimizerReference,
    PlaceReference,
)
from roam.state.state_lookup import StateLookup
from training import assert_same_bits

KEPT, GIVEN = 4, 3


def program(sharing: list[int], holder: dict[str, Any]) -> Program:
    """One whose inputs are entries of a dictionary, then arguments; `sharing` has the storages."""
    space = MappingSpace(holder, "held")
    made = Program()
    for place, storage in enumerate(sharing):
        reference = (
            PlaceReference(space, f"t{place}", f"held['t{place}']", "parameter", tied=False)
            if place < KEPT
            else ArgumentReference(place - KEPT, f"x{place - KEPT}")
        )
        made.slots.append(TensorMeta((4,), (1,), 0, torch.float32, torch.device("cpu"), storage))
        made.referenced.append((reference, place))
    return made


def pattern(storages: list[int]) -> list[int]:
    return [storages.index(storage) for storage in storages]


def storages_of(low: int, high: int, count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(low, high), min_size=count, max_size=count)


at_capture = st.builds(list.__add__, storages_of(0, 3, KEPT), storages_of(3, 6, GIVEN))
"""Arguments mostly apart from the rest."""
arrangements = storages_of(0, 6, KEPT + GIVEN)


@given(at_capture, st.lists(st.tuples(arrangements, st.booleans()), min_size=1, max_size=6))
def test_other_sharing_is_noticed(captured: list[int], calls: list[tuple[list[int], bool]]) -> None:
    """At every call, arguments, and sometimes all inputs, come to lie in other storages."""
    holder: dict[str, Any] = {}
    inputs = Inputs(program(captured, holder))
    storages = [torch.zeros(16) for _ in range(7)]
    now = list(captured)
    for arrangement, moves_all in [(captured, True), *calls]:
        now = arrangement if moves_all else [*now[:KEPT], *arrangement[KEPT:]]
        values = [storages[one][place : place + 4] for place, one in enumerate(now)]
        holder.update({f"t{place}": value for place, value in enumerate(values[:KEPT])})
        found, _ = inputs.read(values[KEPT:])
        assert all(one is other for one, other in zip(found, values, strict=True))
        for _ in range(2):  # the second time with fewer looks
            assert inputs.share_as_captured(found) == (pattern(now) == pattern(captured))


def test_memory_that_an_argument_shares_with_a_parameter_in_its_middle() -> None:
    holder: dict[str, Any] = {}
    inputs = Inputs(program([0, 1, 2, 3, 4, 5, 6], holder))
    whole = torch.zeros(64)
    apart = [torch.zeros(4) for _ in range(KEPT + GIVEN)]
    apart[0] = whole[32:36]
    assert inputs.share_as_captured(apart)
    assert inputs.share_as_captured(apart)
    assert not inputs.share_as_captured([*apart[:KEPT], whole[:4], *apart[KEPT + 1 :]])


def changing(places: list[int], holder: dict[str, Any]) -> Inputs:
    """Of a program whose inputs are all apart, and which writes to some of them."""
    made = program(list(range(KEPT + GIVEN)), holder)
    made.calls.append(
        Call(torch.ops.aten.zero_.default, (), {}, (), False, "forward", Source(), tuple(places))
    )
    return Inputs(made)


@given(
    storages_of(0, 24, KEPT + GIVEN), storages_of(1, 6, KEPT + GIVEN), st.sets(st.integers(0, 6))
)
def test_storages_that_lie_over_each_other(
    starts: list[int], sizes: list[int], changed: set[int]
) -> None:
    buffer = np.zeros(32, dtype=np.float32)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    pairs = {
        (one, other)
        for one, other in combinations(range(KEPT + GIVEN), 2)
        if starts[one] < ends[other] and starts[other] < ends[one]
    }
    pairs = {pair for pair in pairs if not changed.isdisjoint(pair)}
    over = [torch.from_numpy(buffer[start:end]) for start, end in zip(starts, ends, strict=True)]
    apart = [torch.zeros(4) for _ in over]
    inputs = changing(sorted(changed), {})
    assert inputs.share_as_captured(over) is (not pairs)
    found = inputs.overlap(over)
    assert (found is None) is (not pairs)
    assert found is None or tuple(sorted(found)) in pairs
    assert inputs.share_as_captured(apart)
    # From here on fewer are looked at.
    mixed = [*apart[:KEPT], *over[KEPT:]]
    assert inputs.share_as_captured(mixed) is all(pair[0] < KEPT for pair in pairs)
    later = changing(sorted(changed), {})
    if later.share_as_captured([*over[:KEPT], *apart[KEPT:]]):
        assert later.share_as_captured(over) is (not pairs)


def test_two_tensors_of_one_array_are_refused_if_the_step_writes_to_them() -> None:
    def step(a: torch.Tensor, b: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        q = p * 2
        v = p * q.sum()
        a.add_(v.abs().mean())
        return (q * b).sum()

    array, p = np.ones((16, 1), dtype=np.float32), torch.randn(16, 64)
    a, b = torch.from_numpy(array), torch.from_numpy(array)
    with pytest.raises(roam.ExecutionError, match="same memory") as e:
        roam.compile(step)(a, b, p)
    assert e.value.code == "sharing"
    assert (array == 1).all()
    outcomes = []
    for wrap in (lambda step: step, roam.compile):
        a = torch.ones(16, 1)
        compiled = wrap(step)
        outcomes.append([compiled(a, a, p) for _ in range(2)] + [a])
    assert_same_bits(*outcomes)
    reads = roam.compile(lambda a, b: (a * b).sum())
    assert reads(torch.from_numpy(array), torch.from_numpy(array)) == 16


def test_what_is_no_tensor_any_more_is_noticed() -> None:
    holder: dict[str, Any] = {}
    inputs = Inputs(program([0, 1, 2, 3, 4, 5, 6], holder))
    tensors = [torch.zeros(4) for _ in range(KEPT + GIVEN)]
    assert inputs.share_as_captured(tensors)
    assert not inputs.share_as_captured([MISSING, *tensors[1:]])
    assert not inputs.share_as_captured([*tensors[:-1], 1.0])


def test_optimizer_state_is_found_anew_and_may_be_missing() -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    space = MappingSpace(net._parameters, "net")  # type: ignore[arg-type]
    made = Program()
    for place, (name, key) in enumerate(
        [("bias", "exp_avg"), ("weight", "exp_avg_sq"), ("weight", "exp_avg")]
    ):
        parameter = PlaceReference(space, name, f"net.{name}", "parameter", tied=False)
        made.slots.append(TensorMeta((2,), (1,), 0, torch.float32, torch.device("cpu"), place))
        made.referenced.append((OptimizerReference(optimizer, parameter, key, key), place))
    inputs = Inputs(made)

    def expected() -> list[Any]:
        return [reference.get() for reference, _ in made.referenced]

    assert all(one is other for one, other in zip(inputs.read([])[0], expected(), strict=True))
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(one is other for one, other in zip(inputs.read([])[0], expected(), strict=True))
    del optimizer.state[net.bias]
    found = inputs.read([])[0]
    assert found[0] is MISSING
    assert all(one is other for one, other in zip(found, expected(), strict=True))


def test_a_call_is_taken_apart_and_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = roam.compile(step)
    for _ in range(3):
        compiled(torch.ones(1, 2))
    done: list[str] = []
    for kind, name in [(Taker, "take"), (StateLookup, "of_parameters")]:
        method = getattr(kind, name)

        def noted(self: Any, *args: Any, method: Any = method) -> Any:
            done.append(method.__name__)
            return method(self, *args)

        monkeypatch.setattr(kind, name, noted)
    compiled(torch.ones(1, 2))
    assert sorted(done) == ["of_parameters", "take"]


class Keeper:
    """Keeps an argument of each step for the next one."""

    def __init__(self, keep: Any) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Linear(8, 3)
        self.net.register_buffer("last", torch.ones(4, 8))
        self.optimizer = torch.optim.AdamW(self.net.parameters())  # whose first step differs
        self.last = torch.ones(4, 8)
        self.parts = [torch.ones(3, 8)]
        self.keep = keep

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        result: torch.Tensor = self.keep(self, x)
        self.net(result).square().mean().backward()
        self.optimizer.step()
        return result


def keeps(self: Any, x: torch.Tensor) -> torch.Tensor:
    y, self.last = x + self.last, x
    return y


def keeps_detached(self: Any, x: torch.Tensor) -> torch.Tensor:
    y, self.last = x + self.last, x.detach()
    return y


def keeps_in_a_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    y, self.net.last = x + self.net.last, x
    return y


def keeps_a_part_too(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x + self.last
    self.last.mul_(2)
    y[1:] += self.parts[0]
    self.last, self.parts[0] = x, x[1:]
    return y


@pytest.mark.sweep
@pytest.mark.parametrize("keep", [keeps, keeps_detached, keeps_in_a_buffer, keeps_a_part_too])
@pytest.mark.parametrize("given", ["others", "the same", "in turns"])
def test_an_argument_that_the_step_keeps_is_another_one_in_the_next_call(
    keep: Any, given: str
) -> None:
    found = []
    for compiles in (False, True):
        task = Keeper(keep)
        run = roam.compile(task.step) if compiles else task.step
        held = [torch.full((4, 8), float(number)) for number in range(5)]
        orders = {"others": [0, 1, 2, 3, 4], "the same": [0] * 5, "in turns": [0, 1, 0, 1, 1]}
        results = [run(held[place]).clone() for place in orders[given]]
        found.append([*results, *held, task.last, task.net.last, *task.net.parameters()])
    assert all(map(torch.equal, *found))
