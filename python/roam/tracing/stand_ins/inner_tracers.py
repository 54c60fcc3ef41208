"""Refuses tracers of PyTorch's that a step calls: `make_fx`, `torch.func.linearize`,
`torch.export.export`, `torch.jit.trace`, AOTAutograd, capture of CUDA graphs.

Such a tracer makes a graph of the operators that it sees. Under the recorder it sees other
operators or none, keeps fake tensors, or takes what depends on arguments for constants. All of them
go through a few entries, which are refused here. (A graph that is made without tensors, as by
`torch.fx.symbolic_trace`, is no problem.)
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final

from roam.errors import CaptureError
from roam.torch_compat.patches import Replacement
from roam.torch_compat.private import TRACER_ENTRIES
from roam.tracing.recording.recorder import NOT_RECORDED, Recorder
from roam.tracing.source_location import is_torch_file, is_user_code

_TAKE_FUNCTIONS: Final = "torch._higher_order_ops."
_TRACERS: Final = (
    *("torch._functorch.aot_autograd.", "torch._functorch._aot_autograd.", "torch.export."),
    *("torch._export.", "torch.onnx.", "torch.jit._trace.", "torch._dynamo.eval_frame.inner"),
)
"""Functions that make graphs of the operators they see."""
_CALL_TRACERS: Final = ("torch._functorch.", "torch._inductor.")
_AROUND: Final = ("torch._dynamo.", "torch._compile")
"""Modules that wrap functions of others."""


def tracer_stand_ins(recorder: Recorder) -> Iterator[Replacement]:
    """(holder, name, function) for each entry."""

    def refusing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            name = _called()
            if name.startswith(_TAKE_FUNCTIONS):  # the recorder refuses these operators by name
                return plain(*args, **kwargs)
            recorder.refuse(_reason(name), code="inner_tracer")

        return entered

    for holder, name in TRACER_ENTRIES:
        yield holder, name, refusing(getattr(holder, name))


def refusal_of_tracer(error: Exception, line: str) -> CaptureError | None:
    """The refusal of a tracer, or of an operator that takes functions, that has failed on the
    tensors of capture before it came to one of the entries; None if an error has another cause.
    """
    names = [
        f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if is_torch_file(frame.f_code.co_filename)
    ]
    if any(name.startswith(_TRACERS) for name in names):
        name = next(name for name in names if name.startswith((*_TRACERS, *_CALL_TRACERS)))
        return CaptureError(f"{line}: {_reason(name)}", code="inner_tracer", source=line)
    taking = [name for name in names if name.startswith(_TAKE_FUNCTIONS)]
    if taking and getattr(error, "code", "") == "unknown_tensor":
        return CaptureError(
            f"{taking[0]} at {line}: {NOT_RECORDED}", code="refused_operator",
            operator=taking[0], source=line,
        )  # fmt: skip
    return None


def _reason(name: str) -> str:
    return (
        f"the step calls a tracer of PyTorch's ({name}), whose graph would be made of the tensors "
        "of capture; trace outside of the step and call the traced function in it, or call the "
        "plain function (torch.func.jvp in place of linearize)"
    )


def _called() -> str:
    """The function of PyTorch's that the user's code has called."""
    frame: Any = sys._getframe(1)
    found = "a tracer"
    while frame is not None and not is_user_code(frame.f_code):
        if is_torch_file(frame.f_code.co_filename):
            module = str(frame.f_globals.get("__name__"))
            if not module.startswith(_AROUND):
                found = f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return found
