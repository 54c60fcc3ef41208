"""A run finds its inputs where the user's objects hold them, and notices if they share memory in
another way than at capture, however few it looks at."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from roam.program.ir import Program, TensorMeta
from roam.runtime.inputs import Inputs
from roam.state.containers import MappingSpace
from roam.state.equality import MISSING
from roam.state.references import (
    ArgumentReference,
    OptimizerReference,
    PlaceReference,
)

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
        found = inputs.read(values[KEPT:])
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

    assert all(one is other for one, other in zip(inputs.read([]), expected(), strict=True))
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(one is other for one, other in zip(inputs.read([]), expected(), strict=True))
    del optimizer.state[net.bias]
    found = inputs.read([])
    assert found[0] is MISSING
    assert all(one is other for one, other in zip(found, expected(), strict=True))
