"""Compares the programs that two traces recorded."""

from __future__ import annotations

from typing import Any

import torch

from roam.capture.values import same
from roam.program import Call, Program, Ref


def difference(first: Program, second: Program) -> str | None:
    """None where two traces are the same program, else the first thing that differs, for the user to read."""
    for one, other in zip(first.calls, second.calls, strict=False):
        if one != other:
            return f"{one.name} at {one.source} became {other.name} at {other.source}"
    if len(first.calls) != len(second.calls):
        longer = max(first.calls, second.calls, key=len)
        call = longer[min(len(first.calls), len(second.calls))]
        return f"{call.name} at {call.source} ran in one trace and not in the other"
    for what, one_value, other_value in (
        ("tensors", first.slots, second.slots),
        ("storages", _blocks(first), _blocks(second)),
        ("owners", _paths(first.owned), _paths(second.owned)),
        ("state left behind", _paths(first.rebinds), _paths(second.rebinds)),
        ("plain optimizer state", _plain(first), _plain(second)),
        ("results", first.result, second.result),
        ("schedulers", [h.path for h in first.after], [h.path for h in second.after]),
    ):
        if one_value != other_value:
            return f"the {what} differ"
    if not _same_constants(first.constants, second.constants):
        return "a tensor written out in the step's code has other values"
    return None


def asks_the_same(first: Program, second: Program) -> bool:
    """Whether two programs take the same for granted of numbers, and ask the same questions."""
    return _asked(first) == _asked(second)


def _asked(program: Program) -> tuple[list[Any], list[Any]]:
    return (
        [(owner.path, function, constants, answer) for owner, function, constants, answer in program.decisions],
        [(question.calls, question.inputs, question.slot, answer) for question, answer in program.questions],
    )


def agrees(live: Program, plain: Program) -> bool:
    """Whether a trace with live numbers runs the kernels of one with plain numbers, on the same values but for those.

    Code that asks for the very type of a number (`type(x) is float`) may take another way with a live one.
    """
    kernels, others = (
        [call for call in program.calls if isinstance(call.target, torch._ops.OpOverload)] for program in (live, plain)
    )
    if len(kernels) != len(others):
        return False
    literals = set()
    for one, other in zip(kernels, others, strict=True):
        if _makes_tensor_of_number(live, one) and (slot := _literal(plain, other)) is not None:
            literals.add(slot)
        elif one.target is not other.target or not _fits(live, (one.args, one.kwargs), (other.args, other.kwargs)):
            return False
    constants = [constant for constant in plain.constants if constant[1] not in literals]
    return _fits(live, live.result[0], plain.result[0]) and _same_constants(live.constants, constants)


def _makes_tensor_of_number(program: Program, call: Call) -> bool:
    """Whether a call is `torch.tensor(x)` of a live number."""
    return call.target is torch.ops.aten.full.default and any(program.slots[slot] is None for slot in call.refs())


def _literal(program: Program, call: Call) -> int | None:
    """The constant of which a call is `torch.tensor(x)` of a plain number."""
    slots = {slot for tensor, slot in program.constants if not tensor.shape}
    return next(iter(slots & set(call.refs())), None) if call.target is torch.ops.aten.clone.default else None


def _fits(program: Program, value: Any, plain: Any) -> bool:
    if isinstance(value, Ref):
        return isinstance(plain, Ref) or (program.slots[value.slot] is None and type(plain) in (int, float))
    if type(value) is not type(plain):
        return False
    if isinstance(value, (tuple, list)):
        return len(value) == len(plain) and all(_fits(program, *pair) for pair in zip(value, plain, strict=True))
    if isinstance(value, dict):
        return value.keys() == plain.keys() and all(_fits(program, value[key], plain[key]) for key in value)
    return same(value, plain)


def _same_constants(first: list[tuple[torch.Tensor, int]], second: list[tuple[torch.Tensor, int]]) -> bool:
    return len(first) == len(second) and all(
        one.dtype == other.dtype and torch.equal(one, other) for (one, _), (other, _) in zip(first, second, strict=True)
    )


def _paths(bindings: list[tuple[Any, int]]) -> list[tuple[str, int]]:
    return [(owner.path, slot) for owner, slot in bindings]


def _plain(program: Program) -> list[tuple[str, Any]]:
    return [(owner.path, value) for owner, value in program.plain_state]


def _blocks(program: Program) -> list[tuple[int, int]]:
    """Storages without their names, which count the calls that were recorded before."""
    return [(storage.size_bytes, storage.creator) for storage in program.storages]
