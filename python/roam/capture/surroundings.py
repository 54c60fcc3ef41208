"""What surrounds a step: PyTorch's switches, modes, and the hooks that belong to no module or optimizer of the step's.

Guards compare all of it at every call. What a capture could not bring into a plan is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from roam.errors import CaptureError

_MODULE_HOOKS: Final = tuple(
    hooks
    for name, hooks in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
)
_optimizer = sys.modules["torch.optim.optimizer"]
_OPTIMIZER_HOOKS: Final = (_optimizer._global_optimizer_pre_hooks, _optimizer._global_optimizer_post_hooks)


def _attention_kernels() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()
    )  # fmt: skip


def _kernel_libraries() -> tuple[Any, ...]:
    c, einsum = torch._C, torch.backends.opt_einsum
    return (
        c._get_mkldnn_enabled(), c._get_mkldnn_deterministic(), c._get_onednn_allow_tf32(), c._get_nnpack_enabled(),
        c._get_cudnn_enabled(), c._get_cudnn_benchmark(), c._get_cudnn_deterministic(), c._get_cudnn_allow_tf32(),
        einsum.enabled, einsum.strategy, torch.backends.mha.get_fastpath_enabled(),
    )  # fmt: skip


def _deterministic() -> tuple[bool, ...]:
    c = torch._C
    return (
        c._get_deterministic_algorithms(), c._get_deterministic_algorithms_warn_only(),
        c._get_deterministic_fill_uninitialized_memory(),
    )  # fmt: skip


def _function_modes() -> tuple[Any, ...]:
    if not torch._C._len_torch_function_stack():
        return ()
    modes = _get_current_function_mode_stack()
    # Each block that sets a device has an object of its own.
    return tuple((DeviceContext, mode.device) if type(mode) is DeviceContext else mode for mode in modes)


def _dispatch_modes() -> tuple[Any, ...]:
    if not torch._C._len_torch_dispatch_stack():
        return ()
    return tuple(mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, FakeTensorMode))


def _hooks(tables: tuple[dict[Any, Any], ...]) -> Callable[[], tuple[Any, ...]]:
    return lambda: tuple(chain.from_iterable(hooks.values() for hooks in tables))


def _saved_tensor_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


AMBIENT: Final[tuple[tuple[str, Callable[[], Any]], ...]] = (
    ("gradient mode", torch.is_grad_enabled),
    ("inference mode", torch.is_inference_mode_enabled),
    ("autocast on cpu", lambda: torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")),
    ("autocast on cuda", lambda: torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")),
    ("autocast cache", torch.is_autocast_cache_enabled),
    ("default dtype", torch.get_default_dtype),
    ("default device", torch.get_default_device),
    ("function modes", _function_modes),
    ("dispatch modes", _dispatch_modes),
    ("function transforms", torch._C._functorch.peek_interpreter_stack),
    ("choice of attention kernels", _attention_kernels),
    ("choice of kernel libraries", _kernel_libraries),
    ("hooks on all modules", _hooks(_MODULE_HOOKS)),
    ("hooks on all optimizers", _hooks(_OPTIMIZER_HOOKS)),
    ("hooks on saved tensors", _saved_tensor_hooks),
    ("anomaly detection", lambda: torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()),
    ("deterministic mode", _deterministic),
    ("float32 matmul precision", torch.get_float32_matmul_precision),
)
"""Switches of PyTorch's, and code that it runs around operators, on which hangs what a step computes: how to read each."""


def surrounding_code() -> Iterator[tuple[str, Any]]:
    """(path, object) of the user's code that PyTorch runs in every step: guarded with all that it reaches."""
    for name, read in (("module", _hooks(_MODULE_HOOKS)), ("optimizer", _hooks(_OPTIMIZER_HOOKS))):
        for number, hook in enumerate(read()):
            yield f"hook on every {name} ({number})", hook
    for hook in _saved_tensor_hooks() or ():
        yield "hook on saved tensors", hook
    for mode in _function_modes():
        if not isinstance(mode, tuple):
            yield f"{type(mode).__name__} around the step", mode


def check_surroundings() -> None:
    """Refuses to capture under what no plan could do again."""
    for mode in _dispatch_modes():
        name = type(mode).__qualname__
        raise CaptureError(
            f"Enter {name} inside of the step: a plan calls other kernels than the step's operators, and a dispatch mode "
            "around the call would see those",
            code="dispatch_mode",
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise CaptureError(
            "Call the step outside of torch.func and torch.vmap; it may use them itself", code="function_transform"
        )
    if torch.is_anomaly_check_nan_enabled() and torch.is_anomaly_enabled():
        raise CaptureError(ANOMALY, code="anomaly_detection")


ANOMALY: Final = (
    "Call the step's own function under torch.autograd.detect_anomaly, or pass it check_nan=False: whether a gradient is nan "
    "is known only when the step runs"
)
