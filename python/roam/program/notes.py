"""Notes for people on a captured step, kept with its graph."""

from __future__ import annotations

from collections.abc import Sequence

from roam.program.ir import Program, Source
from roam.state.guards import Guards

_SHOWN = 3


def notes_on(program: Program, guards: Guards, *, guessed: bool = False) -> list[tuple[str, str]]:
    """What is compared and computed at every call, and what was split, as pairs (topic, text).

    `guessed`: whether answers to branches had to be guessed.
    """
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
    if program.answers:
        places = [call.source for call in program.calls if call.is_branch]
        note = f"{len(places):,} answers to branches on values, by each run before it changes anything: {_shown(places)}"
        notes.append(("checked", note))
        if guessed:
            notes.append(
                (
                    "guessed answers",
                    "that conditions on values are false; no call has shown their outcomes yet",
                )
            )
    if program.split:
        calls, parts = (sum(numbers) for numbers in zip(*program.split.values(), strict=True))
        notes.append(
            ("split", f"{calls:,} multi-tensor calls into {parts:,}: {_shown(list(program.split))}")
        )
    if program.guessed:
        notes.append(
            (
                "guessed",
                f"how {len(program.guessed):,} kernels lay out their results: {_shown(program.guessed)}",
            )
        )
    return notes


def _shown(items: Sequence[str | Source]) -> str:
    texts = list(dict.fromkeys(map(str, items)))
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
