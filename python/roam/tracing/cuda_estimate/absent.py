"""CUDA on a machine that has none: what PyTorch asks of a device while a step is captured, answered
without one.

For most operators PyTorch chooses the CUDA kernels by the tensors' device type alone, so fake CUDA
tensors are enough: fused dropout, cuDNN's batch norm, multi-tensor optimizers. Two parts of PyTorch
ask the device itself. Autograd's engine looks for the device's streams before it starts; here the
engine alone is told that tensors have no device, and that the accelerator of the process is one
that does nothing. Attention chooses its kernel by the device's compute capability; here it gets a
kernel that every device of 8.0 or later can run (`sdpa.py`).
"""

from __future__ import annotations

import os
from types import FrameType
from typing import Any, Final

import torch

from roam.errors import CaptureError
from roam.torch_compat.patches import Replacement
from roam.torch_compat.private import ENGINE_CODE, TorchDispatchMode
from roam.tracing.cuda_estimate import sdpa

ESTIMATE: Final = (
    "captured without a CUDA device, as for one of compute capability 8: flash attention in float16 and bfloat16, "
    "memory-efficient attention in float32. Not counted: what cuDNN, cuBLAS and attention take for themselves while they run, "
    "and what cuDNN's batch norm keeps for its gradient"
)
"""What the figures of such a capture may be wrong about."""

NOWHERE: Final = torch.device("meta")
"""What the engine is told of tensors on an absent device."""
_FOLDER = os.path.dirname(torch.__file__)
_WRAPPERS = tuple(
    os.path.join(_FOLDER, *path) for path in (("_compile.py",), ("_dynamo", "eval_frame.py"))
)
"""Files of functions that stand between PyTorch's C++ and a dispatch mode."""


def is_absent(device: torch.device) -> bool:
    """Whether a device is one of CUDA's, and the machine has none."""
    return device.type == "cuda" and not torch.cuda.is_available()


def estimate_of(device: torch.device) -> str:
    """What a capture for a device may be wrong about; empty if it is exact."""
    return ESTIMATE if is_absent(device) else ""


def prepare() -> None:
    """Makes backward passes of fake CUDA tensors possible in this process, which has no CUDA
    device. It cannot be undone.

    Autograd's engine asks the process's accelerator for its streams. In a PyTorch that was built
    for CUDA the accelerator is CUDA, and there is no device to ask. A backend from outside of
    PyTorch takes precedence over it, so one that does nothing is registered.

    Raises:
        CaptureError: this PyTorch does not permit it.
    """
    if _kept:
        return
    if torch.version.cuda is None:
        raise CaptureError(
            "no CUDA device on this machine, and this PyTorch was built without CUDA, so it cannot tell what CUDA would do; "
            'install a PyTorch that was built for CUDA, or capture with roam.fake("cpu")',
            code="no_device",
        )
    try:
        from roam.tracing.cuda_estimate import privateuse1
    except AttributeError as error:
        raise CaptureError(
            f"no CUDA device on this machine, and PyTorch {torch.__version__} does not permit a plan for CUDA without one; "
            'capture with roam.fake("cpu"), or install a newer PyTorch',
            code="no_device",
        ) from error
    if privateuse1.is_free():
        privateuse1.register()
    _kept.append(sdpa.register())


_kept: list[torch.library.Library] = []
"""What has to live as long as the process."""


PRESENT: Final[tuple[Replacement, ...]] = (
    (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
    (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
)
"""Makes autocast and gradient scalers for CUDA work, which otherwise turn themselves off without a
device.
"""


def asked_by_engine(frame: FrameType | None) -> bool:
    """Whether C++ code of autograd's engine, with no Python code of anyone's in between, has called
    a frame.
    """
    while frame is not None and frame.f_code.co_filename in _WRAPPERS:
        frame = frame.f_back
    return frame is None or frame.f_code is ENGINE_CODE


def is_no_move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the engine moves a gradient to where it is already. The engine does so since it
    compares the device that it is told now with the one that it was told before.
    """
    if func is not torch.ops.aten._to_copy.default:
        return False
    tensor, device = args[0], kwargs["device"]
    return (
        tensor.fake_device.type == "cuda"
        and device in (None, NOWHERE, tensor.fake_device)
        and kwargs.get("dtype") in (None, tensor.dtype)
        and kwargs.get("memory_format") in (None, torch.preserve_format)
    )


def on_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator that makes a tensor where the engine was told that another one
    is.
    """
    return {**kwargs, "device": torch.device("cuda:0")} if kwargs["device"] == NOWHERE else kwargs


class OnCpu(TorchDispatchMode):
    """Runs on the CPU what would run on an absent device: operators on a few numbers, whose values
    are asked for.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        return func(
            *args, **(kwargs if device is None else {**kwargs, "device": torch.device("cpu")})
        )
