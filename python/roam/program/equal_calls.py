"""Runs equal operators once: those that read the same values and may run again.

The first result then lives until the last use of all, so a plan may take more than without: the
planner tries both (`roam.runtime.strategy`).
"""

from __future__ import annotations

from collections.abc import Hashable

from roam.program.ir import Call, Program
from roam.program.value_numbers import without_equal


def merged(program: Program) -> Program:
    """The program with each of equal operators run once; itself if no two are equal.

    What the forward pass makes is not kept for the backward pass, which makes it again where the
    user's `torch.utils.checkpoint` says so.
    """
    if not _may_have_equal(program):
        return program
    found = without_equal(program, _stage, _stage)
    return program if found is None else found[0]


def _stage(call: Call) -> Hashable:
    """Within which part of the step the results of a call are made once; None if they are not:
    constants are cheap, and would live long.
    """
    if not call.refs():
        return None
    return "forward" if call.phase in ("forward", "loss") else call.phase


def _may_have_equal(program: Program) -> bool:
    """Whether two calls that make memory for the step itself have the same operator and operands:
    without such there are no equal calls at all. This is quick, and nearly no step has them.
    """
    seen: set[Hashable] = set()
    leaving = program.leaving()
    for index, call in enumerate(program.calls):
        made = {program.storage_of(slot) for slot in call.outputs if slot is not None} - leaving
        if all(storage < 0 or program.storages[storage].creator != index for storage in made):
            continue
        stage = _stage(call)
        if stage is None or call.random:
            continue
        # Equal values may be read through several views, so that slots say less than storages.
        key = (call.target, stage, *map(program.storage_of, call.refs()))
        if key in seen:
            return True
        seen.add(key)
    return False
