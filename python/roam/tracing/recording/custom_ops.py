"""Custom operators of the user or of a library, registered with `torch.library` or in C++.

They are recorded by their schemas, like PyTorch's own operators. Operators whose behaviour a schema
cannot describe are refused here. If a schema is wrong, the first run finds it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from roam.program.operators import is_foreign
from roam.state.trace_context import TraceContext
from roam.torch_compat.private import (
    FakeTensor,
    OpOverload,
    function_transform,
    has_kernel_for,
    is_by_custom_op,
    schema_of,
)
from roam.tracing.fake_kernels.cache import tensors_in

_ONLY_MARKS = frozenset({"profiler", "prim"})
"""Operators that compute nothing: marks in a profile, questions about metadata."""
_WRAPPERS = (
    *("CompositeImplicitAutograd", "Autograd", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView"),
    *("AutocastCPU", "AutocastCUDA", "BackendSelect", "Functionalize", "Conjugate"),
    *("FuncTorchBatched", "PreDispatch", "Negative", "ZeroTensor"),
)
"""Dispatch keys of what runs before an operator is recorded, and may calculate with its numbers."""
_DEVICE, _GROUP = "_get_object_coll_device", "_new_group_with_tag"
_OF_OBJECTS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


def collective_stand_ins(trace: TraceContext) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(holder, name, function) for each collective that begins with something other than its
    operator.
    """

    def refusing(name: str) -> Callable[..., Any]:
        return lambda *_, **__: trace.refuse_collective(f"torch.distributed.{name}")

    for module in map(sys.modules.get, ("torch.distributed", "torch.distributed.distributed_c10d")):
        for name in _OF_OBJECTS:
            if hasattr(module, name):
                yield module, name, refusing(name)
    if (c10d := sys.modules.get("torch.distributed.distributed_c10d")) is not None:
        # The user may hold the function itself, imported by name.
        if (plain := getattr(c10d, _DEVICE, None)) is not None:
            yield c10d, _DEVICE, functools.partial(_device_of_objects, trace, plain)
        if hasattr(c10d, _GROUP):
            yield c10d, _GROUP, functools.partial(_refuse_group, trace)
    if (works := sys.modules.get("torch._C._distributed_c10d")) is not None:
        for name in ("get_future", "result"):
            yield works.Work, name, functools.partial(_refuse_results, trace, name)


def _refuse_results(trace: TraceContext, name: str, *_: Any) -> None:
    trace.refuse(
        "the handle of a recorded collective holds no results; call wait() on it, and use the "
        "tensor that the collective has written to",
        code="collective", op=f"torch.distributed.Work.{name}",
    )  # fmt: skip


def _device_of_objects(
    trace: TraceContext, plain: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Refuses a collective of objects, each of which asks first where its tensors go."""
    caller = sys._getframe(2).f_code.co_name  # behind the wrapper of this stand-in
    if caller in _OF_OBJECTS:
        trace.refuse_collective(f"torch.distributed.{caller}")
    return plain(*args, **kwargs)


def _refuse_group(trace: TraceContext, *_: Any, **__: Any) -> None:
    trace.refuse(
        "the step makes a process group, which every call would do again; make it before the step",
        code="collective", op="torch.distributed.new_group",
    )  # fmt: skip


def hands_on(func: OpOverload, is_integer: bool, args: Any, kwargs: Any) -> bool:
    """Whether a live number among an operator's arguments gets from the call to the record, and to
    the real kernel, as it is. An integer may decide shapes, so only operators without results get
    one.
    """
    tensors = tensors_in((args, kwargs))
    if (
        not is_foreign(func)
        or function_transform() is not None
        or (is_integer and schema_of(func).returns)
        or any(type(tensor) not in (FakeTensor, torch.nn.Parameter) for tensor in tensors)
    ):
        return False
    if is_by_custom_op(func):
        return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    return not any(has_kernel_for(func.name(), key) for key in _WRAPPERS)


def is_mark(func: OpOverload) -> bool:
    """Whether an operator computes nothing."""
    return func.namespace in _ONLY_MARKS


@functools.cache
def refusal(func: OpOverload) -> str | None:
    """Why an operator of others cannot be captured; None if it can."""
    if not is_foreign(func):
        return None
    schema = schema_of(func)
    results = [str(result.type) for result in schema.returns]
    if results != ["List[Tensor]"] and not {"Tensor", "Optional[Tensor]"}.issuperset(results):
        return (
            "it returns something else than tensors, which a plan would keep as it was at "
            "capture; let it return tensors"
        )
    if not results and not any(argument.is_write for argument in schema.arguments):
        return (
            "it returns nothing and changes no argument, so no plan can know what it does; declare "
            "what it changes, or call it outside of the step"
        )
    return None
