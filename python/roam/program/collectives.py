"""What a program must be like to launch collectives: every rank launches the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterable

from roam.distributed.agreement import ANY_SIZE, Sequences
from roam.distributed.collectives import is_collective, is_launch
from roam.errors import CaptureError
from roam.program.ir import Program
from roam.state.sizes import follows


def sequences(program: Program, order: Iterable[int]) -> Sequences:
    """The collectives that a program launches in each group, which other ranks have to launch too.

    Args:
        program: the calls.
        order: their numbers, as they run.
    """
    found: Sequences = {}
    for call in map(program.calls.__getitem__, order):
        if not is_launch(call.target):
            continue
        outputs, inputs = call.args
        # Ranks may exchange parts of different sizes.
        sizes = () if call.target.kind == "alltoall_base_" else (*outputs, *inputs)
        metas = [program.slots[ref.slot] for ref in sizes]
        tensors = ", ".join(
            f"{ANY_SIZE if follows(meta.shape) else math.prod(meta.shape)} x {str(meta.dtype).removeprefix('torch.')}"
            for meta in metas
            if meta is not None
        )
        root = f" root {call.target.root}" if call.target.root >= 0 else ""
        what = f"{call.target.kind} {call.target.reduction.lower()}{root} of [{tensors}]"
        found.setdefault(call.target.group, []).append([what, str(call.source)])
    return found


def check_sequence(program: Program) -> None:
    """Refuses a program that launches collectives in some runs and not in others.

    If a branch goes another way than in the plan, the run starts again by the step's own function.
    It would launch collectives again that it has launched already, while other ranks go on.

    Raises:
        CaptureError: it branches on a value, or a scaler may skip a collective (code
            ``collective_branch``).
    """
    if not program.launches():
        return
    for call in program.calls:
        if (call.is_check and not call.is_data_check) or (
            is_collective(call.target) and call.skip_if is not None
        ):
            what = "branches on a value" if call.is_check else "may skip a collective"
            raise CaptureError(
                f"{call.name} at {call.source}: the step calls collectives, and {what} here; one "
                "rank could decide differently from another, and launch other collectives; use a "
                "form that stays on tensors, such as torch.where, or do it outside of the step",
                code="collective_branch",
                operator=call.name,
                source=str(call.source),
            )
