"""What to write instead of code that needs the very value of a number of the step."""

from __future__ import annotations

import ast
import sys
from types import FrameType
from typing import Final

from roam.capture.tracing.conditions import expression_at
from roam.own_code import is_own_file
from roam.state.live_scalars import LOOK_UP
from roam.torch_compat.private import pytree

_ARGUMENT: Final = "or calculate the number outside of the step and pass it as an argument, of which each value gets a plan of its own"
_MASK: Final = (
    "keep the size fixed and mask what is beyond, as in torch.where(torch.arange(len(x)) < k, x, 0)"
)
_FORMULA: Final = (
    "write what it calculates by operators on tensors, where a number may change, such as torch.where(x.abs() <= d, "
    "0.5 * x * x, d * (x.abs() - 0.5 * d)) for huber_loss"
)


def reason(origin: str, remedy: str, *, is_integer: bool, in_cpp: bool) -> str:
    """Who asks for a number from `origin` now, as far as the source shows (from Python 3.11 on),
    and what to write.

    Args:
        origin: what has made the number.
        remedy: what else can be done.
        is_integer: whether it is no float.
        in_cpp: whether an index or code in C++ asks.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        is_own_file(file := frame.f_code.co_filename) or file == pytree.__file__
    ):
        frame = frame.f_back
    node = expression_at(frame) if in_cpp and frame is not None else None
    kept = "and a plan would keep the number of the capture"
    if isinstance(node, ast.Subscript):
        if any(isinstance(part, ast.Slice) for part in ast.walk(node.slice)):
            return f"a slice takes the number from {origin} as a bound, {kept}; {_MASK}, {_ARGUMENT}; otherwise {remedy}"
        return (
            f"an index is made of the number from {origin}, {kept}; for a tensor k without dimensions, write v[k.view(1)]; "
            f"{LOOK_UP}; {_ARGUMENT}; otherwise {remedy}"
        )
    called = node.func if isinstance(node, ast.Call) else ast.Name("float")
    name = called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)
    if name not in ("float", "int"):
        kind, form = ("an integer", _MASK) if is_integer else ("a C++ float", _FORMULA)
        return (
            f"{name}() takes the number from {origin} as {kind}, {kept}; {form}; {_ARGUMENT}; "
            f"otherwise {remedy}"
        )
    return (
        f"Python needs the number from {origin} itself here, as text that is kept, a size and an index do, {kept}; if you only "
        "calculate with it, leave out what asks for it, and write x.item() for float(x); to show it, write "
        f'print(f"{{x.item():.3f}}"), with the f-string in the call; if it is a size, {_MASK}, {_ARGUMENT}; {LOOK_UP}; '
        f"otherwise {remedy}"
    )
