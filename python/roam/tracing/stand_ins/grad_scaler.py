"""Gradient scalers: an optimizer's step that is skipped if a gradient is not finite.

Whether it is skipped is known only when all gradients exist, too late to undo anything. So the step
is captured as if the optimizer's step ran, and each of its calls depends on one number of the step,
`Call.skip_if`: a run skips these calls if that number is not zero. A plan that is valid with these
calls is valid without them: their results are not made, and nothing else uses them, which is
checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from roam.errors import CaptureError
from roam.program.effects import SetPlain, Skip, rebound
from roam.program.ir import Program, refs
from roam.state.equality import is_plain
from roam.state.optimizer_spaces import LIVE_OPTIMIZER_KEYS, is_updated
from roam.state.references import OptimizerReference
from roam.torch_compat.private import scaler_start
from roam.tracing.recording.recorder import Recorder
from roam.tracing.stand_ins.fake_state import FakeState

_METHODS = ("scale", "unscale_", "_unscale_grads_", "step", "_maybe_opt_step", "update")


def check_scaler(scaler: Any, path: str) -> None:
    """Refuses a scaler of another class than PyTorch's, or one that has not ended its last step by
    `update`.
    """
    plain = torch.amp.GradScaler
    if any(getattr(type(scaler), name) is not getattr(plain, name) for name in _METHODS):
        raise CaptureError(
            f"{path} is a {type(scaler).__name__}; only PyTorch's own GradScaler is captured",
            code="scaler",
        )
    if not is_updated(scaler):
        raise CaptureError(
            f"{path} has unscaled gradients or stepped an optimizer since its last update(); a captured step has to begin "
            f"after {path}.update()",
            code="scaler",
        )


def check_updated(fake_state: FakeState) -> None:
    """Refuses a step that ends in the middle of a scaler's work."""
    for path, scaler in fake_state.reach.scalers:
        if not is_updated(scaler):
            raise CaptureError(
                f"the step uses {path} and does not end with {path}.update(); call it inside the step",
                code="scaler",
            )


def scaler_stand_ins(
    fake_state: FakeState, recorder: Recorder
) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(class, name of a method, what stands in for it during a trace)."""
    plain = torch.amp.GradScaler
    plain_step, plain_start = plain.step, scaler_start()

    def start(scaler: Any, device: torch.device) -> None:
        if all(scaler is not known for _, known in fake_state.reach.scalers):
            recorder.refuse(
                "the step uses a gradient scaler that capture could not find; pass it to the step "
                "as an argument",
                code="scaler",
            )
        plain_start(scaler, device)

    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled() and getattr(optimizer, "_step_supports_amp_scaling", False):
            recorder.refuse(
                f"{type(optimizer).__name__} applies the scaler's scale itself, which is not "
                "captured; pass fused=False",
                code="scaler",
            )
        return plain_step(scaler, optimizer, *args, **kwargs)

    def maybe_step(
        _: Any, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        found = sum(number.item() for number in state["found_inf_per_device"].values())
        with _skippable(fake_state, recorder, optimizer, found):
            if optimizer.step(*args, **kwargs) is not None:
                recorder.refuse(
                    "an optimizer's step that a gradient scaler may skip returns a result, which "
                    "does not exist after a skipped step; let it return nothing",
                    code="scaler",
                )

    yield plain, "_lazy_init_scale_growth_tracker", start
    yield plain, "step", step
    yield plain, "_maybe_opt_step", maybe_step


@contextmanager
def _skippable(
    fake_state: FakeState, recorder: Recorder, optimizer: Any, found: Any
) -> Iterator[None]:
    """What is recorded meanwhile is left out where `found` is not zero."""
    slot = recorder.slot_of(found)
    assert slot is not None, "a number of the step"
    calls, effects = recorder.program.calls, recorder.program.effects
    first, held = len(calls), _held(fake_state, optimizer)
    before = len(effects), recorder.assignments
    yield
    if (len(effects), recorder.assignments) != before or _held(fake_state, optimizer) != held:
        recorder.refuse(
            "an optimizer's step that a gradient scaler may skip sets a number "
            "outside of its state, or replaces a gradient, parameter or buffer; do that "
            "outside of the optimizer's step",
            code="scaler",
        )
    for call in calls[first:]:
        call.skip_if = slot
    recorder.forget_arithmetic()
    effects.append(Skip(optimizer, slot))


def _held(fake_state: FakeState, optimizer: Any) -> list[tuple[str, int]]:
    """What all references hold except for optimizer state, and the optimizer's own plain values."""
    held = [
        (reference.path, id(reference.get()))
        for reference in (*fake_state.references(), *fake_state.numbers)
        if not isinstance(reference, OptimizerReference)
    ]
    own = [vars(optimizer), *optimizer.param_groups]
    plain = [(key, id(value)) for values in own for key, value in values.items() if is_plain(value)]
    return held + [(key, value) for key, value in plain if key not in LIVE_OPTIMIZER_KEYS]


def check_skippable(program: Program) -> None:
    """Refuses uses of what does not exist if an optimizer's step is left out."""
    skip_if: dict[int, int] = {}
    for call in program.calls:
        if any(skip_if.get(slot, call.skip_if) != call.skip_if for slot in call.refs()):
            raise _escapes(f"{call.name} at {call.source} uses", call.name, str(call.source))
        if call.skip_if is not None:
            skip_if.update((slot, call.skip_if) for slot in call.outputs if slot is not None)
    if any(slot in skip_if for slot in refs(program.result.leaves)):
        raise _escapes("the step returns")
    steps: dict[int, list[int]] = {}
    for skip in program.of(Skip):
        steps.setdefault(id(skip.optimizer), []).append(skip.slot)
    for reference, slot in rebound(program):
        expected = (
            steps.get(id(reference.optimizer), [None])
            if isinstance(reference, OptimizerReference)
            else [None]
        )
        if expected != [skip_if.get(slot)]:
            raise _escapes(f"{reference.path} is given")
    for plain in program.of(SetPlain):
        reference = plain.reference
        if isinstance(reference, OptimizerReference) and id(reference.optimizer) in steps:
            raise _escapes(f"{reference.path} is given")


def _escapes(what: str, operator: str = "", source: str = "") -> CaptureError:
    return CaptureError(
        f"{what} a value that an optimizer's step makes, and the value does not exist if a "
        "gradient scaler skips that step; use it only inside of the optimizer's step",
        code="scaler", operator=operator, source=source,
    )  # fmt: skip
