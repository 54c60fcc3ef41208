"""Refuses tracers of PyTorch's that a step calls: `make_fx`, `torch.func.linearize`,
`torch.export.export`, `torch.jit.trace`, AOTAutograd, capture of CUDA graphs.

Such a tracer makes a graph of the operators that it sees. Under the recorder it sees other
operators or none, keeps fake tensors, or takes what depends on arguments for constants. All of them
go through a few entries, which are refused here. (A graph that is made without tensors, as by
`torch.fx.symbolic_trace`, is no problem.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from roam.torch_compat.patches import Replacement
from roam.torch_compat.private import TRACER_ENTRIES
from roam.tracing.recording.recorder import Recorder
from roam.tracing.source_location import is_torch_file, is_user_code

_TAKE_FUNCTIONS: Final = "torch._higher_order_ops."
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
