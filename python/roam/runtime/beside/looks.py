"""Where Python looks at the memory of tensors, and at random generators, without an operator."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numpy
import torch

from roam.runtime.beside.placeholders import note_known
from roam.runtime.beside.recording import tensors_in
from roam.state.code_guards import TOLD_BY
from roam.torch_compat.patches import KERNEL_SWITCHES, replaced
from roam.torch_compat.private import (
    FROM_STANCE,
    TENSOR_DATA,
    C,
    disable_current_modes,
    dispatch_modes,
    frame_evaluation,
    is_wrapped,
    storage_of,
)

_LOOKS = (
    "__repr__", "__str__", "__format__", "numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "storage",
    "untyped_storage", "_typed_storage", "__reduce_ex__", "__deepcopy__",
)  # fmt: skip
_GIVING = frozenset(
    {"numpy", "__array__", "__dlpack__", "storage", "untyped_storage", "_typed_storage"}
)
"""Those after which Python has the memory."""
_GENERATORS = ("get_rng_state", "set_rng_state", "manual_seed", "seed", "initial_seed")
_DATA_PTR = torch.Tensor.data_ptr
_CUDA_GENERATORS = (*_GENERATORS, "manual_seed_all", "seed_all")


_READING = (
    (torch, "tensor_split", 1), (torch.Tensor, "tensor_split", 1), (torch, "to_dlpack", 0), (torch.utils.dlpack, "to_dlpack", 0),
)  # fmt: skip
"""Functions that read the memory of an argument by themselves, with its place."""


class Looked(Protocol):
    """Is told of each look."""

    is_busy: bool
    """Whether what runs now is no Python of the step's."""

    def settle(self, tensor: torch.Tensor | None) -> None:
        """Python looks at a tensor's memory, or at random generators (None)."""

    def threaded(self) -> None:
        """Python is about to give another thread something to do."""

    def assigned(self, tensor: torch.Tensor) -> None:
        """A tensor is about to get other data."""

    def unseen(self, what: str, code: str) -> None:
        """Python is about to do what cannot be followed."""

    def switching(self) -> None:
        """How kernels compute is about to be changed."""

    def drawn(self) -> None:
        """Python has looked at random generators, or set them."""

    def exposed(self, tensor: torch.Tensor, by: Any) -> None:
        """Python has got a tensor's memory, and has it for as long as it has `by`."""

    def aliased(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """`x.data` has been asked for."""


def _chooses(variable: Any) -> bool:
    """Whether libraries may choose kernels by an environment variable."""
    return os.fsdecode(variable).startswith(TOLD_BY)


@contextmanager
def looking(one: Any) -> Iterator[None]:
    """In the block, a `Looked`, which may be a dispatch mode, is told of this thread's looks before
    anything is seen.
    """
    thread, depth = threading.get_ident(), 0

    def is_ours() -> bool:
        return (
            depth == 0
            and not one.is_busy
            and (threading.get_ident() == thread or any(mode is one for mode in dispatch_modes()))
        )

    def telling(
        original: Callable[..., Any], *, of_tensor: bool, gives_memory: bool = False
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def look(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if not is_ours():
                return original(*args, **kwargs)
            depth += 1
            try:
                if of_tensor and is_wrapped(args[0]):
                    one.unseen(
                        "it looks at a tensor inside of a function transform", "refused_operator"
                    )
                if original is _DATA_PTR:
                    one.unseen(
                        "it asks for a tensor's address; compare tensors with `is`", "address"
                    )
                with disable_current_modes():
                    one.settle(args[0] if of_tensor else None)
                    if gives_memory and storage_of(args[0]).resizable():
                        note_known(storage_of(args[0]))
                    result = original(*args, **kwargs)
                    if not of_tensor:
                        one.drawn()
                    if gives_memory:
                        one.exposed(args[0], result if type(result) is numpy.ndarray else None)
                    return result
            finally:
                depth -= 1

        return look

    def making(
        original: Callable[..., Any], place: int, *, is_whole: bool = False
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            if is_ours():
                data = args[place : place + 1]
                is_list = bool(data) and type(data[0]) in (list, tuple)
                with disable_current_modes():
                    for tensor in tensors_in(data) if is_list or is_whole else ():
                        one.settle(tensor)
            return original(*args, **kwargs)

        return make

    def announced(
        original: Callable[..., Any],
        tell: Callable[[], None],
        by: Callable[..., bool] = lambda *_: True,
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if is_ours() and by(*args[:1]):
                with disable_current_modes():
                    tell()
            return original(*args, **kwargs)

        return function

    def data(tensor: torch.Tensor) -> torch.Tensor:
        alias: torch.Tensor = TENSOR_DATA.__get__(tensor)
        if is_ours():
            one.aliased(tensor, alias)
        return alias

    def assign(tensor: torch.Tensor, data: Any) -> None:
        if is_ours():
            with disable_current_modes():
                one.assigned(tensor)
        TENSOR_DATA.__set__(tensor, data)

    def compiling() -> None:
        one.unseen(
            "it calls what torch.compile has compiled, whose kernels nothing sees; leave torch.compile out",
            "compiled_call",
        )

    patches: list[Any] = [
        (
            torch.Tensor,
            name,
            telling(getattr(torch.Tensor, name), of_tensor=True, gives_memory=name in _GIVING),
        )
        for name in _LOOKS
    ]
    patches.append((torch.Tensor, "data", property(data, assign)))
    for modules, names in (
        ((torch, torch.random), _GENERATORS),
        ((torch.cuda, torch.cuda.random), _CUDA_GENERATORS),
    ):
        for name in names:
            look = telling(getattr(modules[1], name), of_tensor=False)
            patches += [(module, name, look) for module in modules if hasattr(module, name)]
    patches += [
        (C, name, announced(getattr(C, name), one.switching))
        for name in KERNEL_SWITCHES
        if hasattr(C, name)
    ]
    if evaluation := frame_evaluation():
        begins = announced(vars(evaluation)[FROM_STANCE], compiling, by=callable)
        patches.append((evaluation, FROM_STANCE, begins))
    for name in ("putenv", "unsetenv"):  # which os.environ calls too
        patches.append((os, name, announced(getattr(os, name), one.switching, by=_chooses)))
    for name in ("set_num_threads", "set_flush_denormal"):
        patches.append((torch, name, announced(getattr(torch, name), one.switching)))
    prop = torch.backends.ContextProp
    patches.append((prop, "__set__", announced(prop.__set__, one.switching)))
    for name in ("tensor", "as_tensor", "asarray"):  # which read numbers out of tensors in lists
        patches.append((torch, name, making(getattr(torch, name), 0)))
    patches.append((torch.Tensor, "new_tensor", making(torch.Tensor.new_tensor, 1)))
    for reading, name, place in _READING:
        patches.append((reading, name, making(getattr(reading, name), place, is_whole=True)))
    for holder, name in ((threading.Thread, "start"), (ThreadPoolExecutor, "submit")):
        patches.append((holder, name, announced(getattr(holder, name), one.threaded)))
    with replaced(patches):
        yield
