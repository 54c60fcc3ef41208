"""What surrounds a step: PyTorch's switches, modes, and the hooks that belong to no module or
optimizer of the step's.

Guards compare all of it at every call. What a capture could not bring into a plan is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final

import torch

from roam.errors import CaptureError
from roam.torch_compat.private import (
    DeviceContext,
    FakeTensorMode,
    count_dispatch_modes,
    count_function_modes,
    deterministic_switches,
    dispatch_modes,
    distributed_switches,
    float32_precisions,
    function_modes,
    function_transform,
    hooks_on_all_modules,
    hooks_on_all_optimizers,
    kernel_library_switches,
    matmul_precision,
    saved_tensor_hooks,
)

_MODULE_HOOKS: Final = hooks_on_all_modules()
_OPTIMIZER_HOOKS: Final = hooks_on_all_optimizers()


def _attention_kernels() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()
    )  # fmt: skip


def _kernel_libraries() -> tuple[Any, ...]:
    einsum = torch.backends.opt_einsum
    fast_path = torch.backends.mha.get_fastpath_enabled()
    return (*kernel_library_switches(), einsum.enabled, einsum.strategy, fast_path)


def _function_modes() -> tuple[Any, ...]:
    if not count_function_modes():
        return ()
    modes = function_modes()
    # Each block that sets a device has an object of its own.
    return tuple(
        (DeviceContext, mode.device) if type(mode) is DeviceContext else mode for mode in modes
    )


def _dispatch_modes() -> tuple[Any, ...]:
    if not count_dispatch_modes():
        return ()
    return tuple(mode for mode in dispatch_modes() if not isinstance(mode, FakeTensorMode))


def _hooks(tables: tuple[dict[Any, Any], ...]) -> Callable[[], tuple[Any, ...]]:
    return lambda: tuple(chain.from_iterable(hooks.values() for hooks in tables))


AMBIENT: Final[tuple[tuple[str, Callable[[], Any]], ...]] = (
    ("gradient mode", torch.is_grad_enabled),
    ("inference mode", torch.is_inference_mode_enabled),
    (
        "autocast on cpu",
        lambda: torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
    ),
    (
        "autocast on cuda",
        lambda: torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    ),
    ("autocast cache", torch.is_autocast_cache_enabled),
    ("default dtype", torch.get_default_dtype),
    ("default device", torch.get_default_device),
    ("function modes", _function_modes),
    ("dispatch modes", _dispatch_modes),
    ("function transforms", function_transform),
    ("choice of attention kernels", _attention_kernels),
    ("choice of kernel libraries", _kernel_libraries),
    ("hooks on all modules", _hooks(_MODULE_HOOKS)),
    ("hooks on all optimizers", _hooks(_OPTIMIZER_HOOKS)),
    ("hooks on saved tensors", saved_tensor_hooks),
    (
        "anomaly detection",
        lambda: torch.is_anomaly_enabled() and (True, torch.is_anomaly_check_nan_enabled()),
    ),
    ("deterministic mode", deterministic_switches),
    ("float32 matmul precision", matmul_precision),
    ("float32 precision on the CPU", lambda: float32_precisions("mkldnn")),
    ("float32 precision on CUDA", lambda: float32_precisions("cuda")),
    ("number of threads", torch.get_num_threads),
    ("handling of distributed tensors", distributed_switches),
)
"""PyTorch's switches, and code that it runs around operators. What a step computes depends on them.
Each comes with a function that reads it.
"""


def surrounding_code() -> Iterator[tuple[str, Any]]:
    """(path, object) of the user's code that PyTorch runs in every step: guarded with all that it
    reaches.
    """
    for name, read in (("module", _hooks(_MODULE_HOOKS)), ("optimizer", _hooks(_OPTIMIZER_HOOKS))):
        for number, hook in enumerate(read()):
            yield f"hook on every {name} ({number})", hook
    for hook in saved_tensor_hooks() or ():
        yield "hook on saved tensors", hook
    for mode in _function_modes():
        if not isinstance(mode, tuple):
            yield f"{type(mode).__name__} around the step", mode


def check_surroundings() -> None:
    """Refuses to capture if something surrounds the call that no plan could reproduce."""
    for mode in _dispatch_modes():
        name = type(mode).__qualname__
        raise CaptureError(
            f"{name} is active around the call, and would see a plan's kernels instead of the "
            "step's operators; enter it inside of the step",
            code="dispatch_mode",
        )
    if function_transform() is not None:
        raise CaptureError(
            "the step is called inside of torch.vmap or a transform of torch.func; call it "
            "outside of them (the step may use them itself)",
            code="function_transform",
        )
    if torch.is_anomaly_check_nan_enabled() and torch.is_anomaly_enabled():
        raise CaptureError(ANOMALY, code="anomaly_detection")


ANOMALY: Final = (
    "torch.autograd.detect_anomaly checks gradients for nan, which are known only when the step "
    "runs; call your own function under it, or pass it check_nan=False"
)
