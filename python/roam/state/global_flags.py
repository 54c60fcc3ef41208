"""PyTorch's own switches around a capture: a step may change them while it runs, and has to change
them back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from roam.state.equality import same, show
from roam.state.global_state import AMBIENT
from roam.torch_compat.private import (
    deterministic_switches,
    float32_precisions,
    kernel_library_switches,
    set_fill_uninitialized,
    set_float32_precisions,
    set_grad_enabled,
    set_kernel_libraries,
)


def _set_autocast(device: str) -> Callable[[Any], None]:
    def write(value: Any) -> None:
        torch.set_autocast_enabled(device, value is not False)
        if value is not False:
            torch.set_autocast_dtype(device, value)

    return write


def _set_deterministic(found: tuple[bool, ...]) -> None:
    is_on, only_warns, fills = found
    torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
    set_fill_uninitialized(fills)


def _set_libraries(found: tuple[Any, ...]) -> None:
    set_kernel_libraries(found[: len(kernel_library_switches())])


def _set_matmul_precision(found: str | None) -> None:
    if found is not None:  # else the newer switches tell
        torch.set_float32_matmul_precision(found)


_WRITE: dict[str, Callable[[Any], Any]] = {
    "gradient mode": set_grad_enabled,
    "autocast on cpu": _set_autocast("cpu"),
    "autocast on cuda": _set_autocast("cuda"),
    "autocast cache": torch.set_autocast_cache_enabled,
    "choice of kernel libraries": _set_libraries,
    "default dtype": torch.set_default_dtype,
    "default device": torch.set_default_device,
    "deterministic mode": _set_deterministic,
    "float32 matmul precision": _set_matmul_precision,
    "float32 precision on the CPU": functools.partial(set_float32_precisions, "mkldnn"),
    "float32 precision on CUDA": functools.partial(set_float32_precisions, "cuda"),
    "number of threads": torch.set_num_threads,
}
"""How to set each switch that functions set. The others are set by blocks, and get their old values
back when such a block ends.
"""


_ASKED_BY_KERNELS: tuple[tuple[str, tuple[str, ...], Callable[[], Any]], ...] = (
    ("deterministic mode", ("cpu", "cuda"), deterministic_switches),
    ("number of threads", ("cpu",), torch.get_num_threads),
    ("use of mkldnn and NNPACK", ("cpu",), lambda: kernel_library_switches()[:4]),
    ("use of cuDNN", ("cudnn",), lambda: kernel_library_switches()[4:]),
    ("float32 precision on the CPU", ("cpu",), lambda: float32_precisions("mkldnn")),
    ("float32 matmul precision on CUDA", ("cuda",), lambda: float32_precisions("cuda")[:1]),
    ("float32 precision of cuDNN", ("cudnn",), lambda: float32_precisions("cuda")[1:]),
)
"""(name, which kernels ask, how to read it). The other switches choose between operators, which are
recorded.
"""


def kernel_switches() -> tuple[Any, ...]:
    """The switches that kernels ask while they run, as they are now."""
    return tuple([read() for *_, read in _ASKED_BY_KERNELS])


class KernelSwitches:
    """The same, to be compared with what they become."""

    def __init__(self) -> None:
        self._found = kernel_switches()

    def moved(self, name: str, tensors: Iterable[torch.Tensor]) -> str | None:
        """None if all switches that an operator's kernel may ask are as they were, else the first
        that is not.

        Args:
            name: the operator.
            tensors: its arguments.
        """
        found = kernel_switches()
        if found == self._found:
            return None
        kinds = {tensor.device.type for tensor in tensors} or {"cpu"}
        if "cuda" in kinds and ("conv" in name or "rnn" in name):
            kinds.add("cudnn")
        for (what, asking, _), old, new in zip(_ASKED_BY_KERNELS, self._found, found, strict=True):
            if old != new and not kinds.isdisjoint(asking):
                return f"PyTorch's {what} changed from {show(old)} to {show(new)}"
        return None


class Switches:
    """All switches as they are now."""

    def __init__(self) -> None:
        self._found = [(name, read, read()) for name, read in AMBIENT]
        self._nesting = _autocast_nesting()

    def moved(self) -> str | None:
        """None while all switches are as they were, else the first that is not."""
        for name, read, found in self._found:
            if not same(found, read()):
                return f"PyTorch's {name} changed from {show(found)} to {show(read())}"
        return None

    def restore(self) -> None:
        """Puts back the switches that functions set."""
        for name, read, found in self._found:
            if name in _WRITE and not same(found, read()):
                _WRITE[name](found)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        if self._nesting == 0:
            torch.clear_autocast_cache()  # it may hold casts of fake weights


def _autocast_nesting() -> int:
    """How many blocks of autocast are open; the outermost one clears its cache of casts at its
    end.
    """
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
