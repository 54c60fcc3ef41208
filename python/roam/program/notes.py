"""Notes for people on a captured step, kept with its graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from roam.program.ir import Program, Source
from roam.state.guards import Guards

aten = torch.ops.aten

_SHOWN = 3
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar})
_COPIES = frozenset({aten.clone.default, aten._to_copy.default})


def notes_on(program: Program, guards: Guards) -> list[tuple[str, str]]:
    """What is compared and computed at every call, and what was split, as pairs (topic, text)."""
    values, tensors, switches = guards.sizes()
    notes = [
        (
            "guarded",
            f"{values:,} values in Python, metadata of {tensors:,} tensors and of the arguments, {switches} switches of PyTorch",
        )
    ]
    if program.decisions:
        kept = {reference.path for reference, *_ in program.decisions}
        notes.append(("compared", f"{len(kept):,} live numbers with constants, at every call"))
    if program.computed_guards:
        places = [guard.source for guard, _ in program.computed_guards]
        notes.append(("computed guards", f"{len(places):,} at every call: {_shown(places)}"))
    if program.split:
        calls, parts = (sum(numbers) for numbers in zip(*program.split.values(), strict=True))
        notes.append(
            ("split", f"{calls:,} multi-tensor calls into {parts:,}: {_shown(list(program.split))}")
        )
    notes.extend(_waste(program))
    if program.guessed:
        notes.append(
            (
                "guessed",
                f"how {len(program.guessed):,} kernels lay out their results: {_shown(program.guessed)}",
            )
        )
    return notes


def _waste(program: Program) -> list[tuple[str, str]]:
    """What the user's forward pass calculates for nothing, and no plan may leave out: a product
    with zero is NaN where the other factor is not finite, and a copy may be of another layout.
    """
    readers: dict[int, set[int]] = defaultdict(set)
    for index, call in enumerate(program.calls):
        made = {program.storage_of(slot) for slot in call.outputs if slot is not None}
        for storage in {program.storage_of(slot) for slot in call.refs()} - made:
            readers[storage].add(index)
    kept = program.leaving()
    zeros: list[Source] = []
    copies: list[Source] = []
    for call in program.calls:
        if call.phase not in ("forward", "loss") or not call.outputs:
            continue
        if call.target in _PRODUCTS and any(_is_zero(argument) for argument in call.args):
            zeros.append(call.source)
        if call.target in _COPIES and call.outputs[0] is not None:
            storage = program.storage_of(call.outputs[0])
            read_by = [program.calls[index] for index in readers[storage]]
            if storage not in kept and len(read_by) == 1 and read_by[0].target in _COPIES:
                copies.append(call.source)
    found = []
    if zeros:
        found.append(("times zero", f"{len(zeros):,} products with 0: {_shown(zeros)}"))
    if copies:
        note = f"{len(copies):,} copies that only another copy reads: {_shown(copies)}"
        found.append(("copied twice", note))
    return found


def _is_zero(argument: object) -> bool:
    return type(argument) in (int, float) and argument == 0


def _shown(items: Sequence[str | Source]) -> str:
    texts = list(dict.fromkeys(map(str, items)))
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
