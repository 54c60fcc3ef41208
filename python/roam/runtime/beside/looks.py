"""Where Python looks at the memory of tensors, and at random generators, without an operator."""

from __future__ import annotations

import functools
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy
import torch

from roam.own_code import is_own_file
from roam.runtime.beside.placeholders import is_unread, note_known
from roam.runtime.beside.recording import tensors_in
from roam.state.code_guards import TOLD_BY
from roam.torch_compat.patches import KERNEL_SWITCHES, Listed, Replacement, replaced
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
_ADDRESS = "data_ptr"
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

    def assigned(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """A tensor is about to get the data of another one."""

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

    def unread(self) -> None:
        """A read of memory that no kernel has written to yet has failed in the step's own code."""


def _chooses(variable: Any) -> bool:
    """Whether libraries may choose kernels by an environment variable."""
    return os.fsdecode(variable).startswith(TOLD_BY)


class _Listener:
    """Who is told by the functions that stand in the places of PyTorch's.

    Attributes:
        one: the `Looked`, which may be a dispatch mode; None if nobody is told.
    """

    def __init__(self) -> None:
        self.one: Any = None
        self._thread, self._depth = 0, 0

    @contextmanager
    def listening(self, one: Any) -> Iterator[None]:
        """In the block, this one is told of what this thread does."""
        self.one, self._thread, self._depth = one, threading.get_ident(), 0
        try:
            yield
        finally:
            self.one = None

    def is_asked(self) -> bool:
        """Whether what runs now is the step's own."""
        one = self.one
        return (
            self._depth == 0
            and one is not None
            and not one.is_busy
            and (
                threading.get_ident() == self._thread
                or any(mode is one for mode in dispatch_modes())
            )
        )

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """In the block, nobody is told of anything."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def telling(
        self, original: Callable[..., Any], *, of_tensor: bool, gives_memory: bool = False
    ) -> Callable[..., Any]:
        """A function that tells of a look, and looks."""

        @functools.wraps(original)
        def look(*args: Any, **kwargs: Any) -> Any:
            if not self.is_asked():
                return original(*args, **kwargs)
            one = self.one
            with self.left_alone():
                if of_tensor and is_wrapped(args[0]):
                    one.unseen(
                        "it looks at a tensor inside of a function transform", "refused_operator"
                    )
                if original.__name__ == _ADDRESS:
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

        return look

    def making(
        self, original: Callable[..., Any], place: int, *, is_whole: bool = False
    ) -> Callable[..., Any]:
        """A function that tells of the tensors that it reads by itself, among the argument at this
        place: those in a list, or all.
        """

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            if self.is_asked():
                data = args[place : place + 1]
                is_list = bool(data) and type(data[0]) in (list, tuple)
                with disable_current_modes():
                    for tensor in tensors_in(data) if is_list or is_whole else ():
                        self.one.settle(tensor)
            return original(*args, **kwargs)

        return make

    def announced(
        self,
        original: Callable[..., Any],
        tell: Callable[[Any], None],
        by: Callable[..., bool] = lambda *_: True,
    ) -> Callable[..., Any]:
        """A function that tells of a call, if its first argument is such."""

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if self.is_asked() and by(*args[:1]):
                with disable_current_modes():
                    tell(self.one)
            return original(*args, **kwargs)

        return function

    def data(self, tensor: torch.Tensor) -> torch.Tensor:
        """`x.data`."""
        alias: torch.Tensor = TENSOR_DATA.__get__(tensor)
        if self.is_asked():
            self.one.aliased(tensor, alias)
        return alias

    def assign(self, tensor: torch.Tensor, data: Any) -> None:
        """`x.data = y`."""
        if self.is_asked() and isinstance(data, torch.Tensor):
            with disable_current_modes():
                if is_wrapped(tensor) or is_wrapped(data):
                    self.one.unseen(
                        "it gives a tensor other data inside of a function transform",
                        "refused_operator",
                    )
                else:
                    self.one.assigned(tensor, data)
        TENSOR_DATA.__set__(tensor, data)

    def patches(self) -> list[Replacement]:
        """What is put in the places of what is there now."""
        telling, announced, making = self.telling, self.announced, self.making
        patches: list[Replacement] = [
            (
                torch.Tensor,
                name,
                telling(getattr(torch.Tensor, name), of_tensor=True, gives_memory=name in _GIVING),
            )
            for name in _LOOKS
        ]
        patches.append((torch.Tensor, "data", property(self.data, self.assign)))
        for modules, names in (
            ((torch, torch.random), _GENERATORS),
            ((torch.cuda, torch.cuda.random), _CUDA_GENERATORS),
        ):
            for name in names:
                look = telling(getattr(modules[1], name), of_tensor=False)
                patches += [(module, name, look) for module in modules if hasattr(module, name)]
        patches += [
            (C, name, announced(getattr(C, name), _switching))
            for name in KERNEL_SWITCHES
            if hasattr(C, name)
        ]
        if evaluation := frame_evaluation():
            begins = announced(vars(evaluation)[FROM_STANCE], _compiling, by=callable)
            patches.append((evaluation, FROM_STANCE, begins))
        for name in ("putenv", "unsetenv"):  # which os.environ calls too
            patches.append((os, name, announced(getattr(os, name), _switching, by=_chooses)))
        for name in ("set_num_threads", "set_flush_denormal"):
            patches.append((torch, name, announced(getattr(torch, name), _switching)))
        prop = torch.backends.ContextProp
        patches.append((prop, "__set__", announced(prop.__set__, _switching)))
        for name in (
            "tensor",
            "as_tensor",
            "asarray",
        ):  # which read numbers out of tensors in lists
            patches.append((torch, name, making(getattr(torch, name), 0)))
        patches.append((torch.Tensor, "new_tensor", making(torch.Tensor.new_tensor, 1)))
        for reading, name, place in _READING:
            patches.append((reading, name, making(getattr(reading, name), place, is_whole=True)))
        for holder, name in ((threading.Thread, "start"), (ThreadPoolExecutor, "submit")):
            patches.append((holder, name, announced(getattr(holder, name), _threaded)))
        return patches


def _switching(one: Looked) -> None:
    one.switching()


def _threaded(one: Looked) -> None:
    one.threaded()


def _compiling(one: Looked) -> None:
    one.unseen(
        "it calls what torch.compile has compiled, whose kernels nothing sees; leave torch.compile out",
        "compiled_call",
    )


class _Kept(NamedTuple):
    """Functions that stood in the places of others, to be put there again."""

    listener: _Listener
    patches: Listed
    originals: list[Any]
    """What was in their places."""
    has_evaluation: bool
    """Whether Dynamo's way to evaluate frames was there, which PyTorch imports late."""

    @classmethod
    def made(cls) -> _Kept:
        listener = _Listener()
        patches = Listed(listener.patches())
        return cls(listener, patches, _now(patches), frame_evaluation() is not None)

    def fits(self) -> bool:
        """Whether nothing stands there now, and what is there is what was."""
        return (
            self.listener.one is None
            and self.has_evaluation is (frame_evaluation() is not None)
            and all(map(operator.is_, _now(self.patches), self.originals))
        )


def _now(patches: list[Replacement]) -> list[Any]:
    """What is in the places of patches."""
    return [getattr(holder, name, None) for holder, name, _ in patches]


_kept: list[_Kept] = []
"""What the last call has put in place, since to make it takes longer than to put it there."""


@contextmanager
def looking(one: Any) -> Iterator[None]:
    """In the block, a `Looked`, which may be a dispatch mode, is told of this thread's looks before
    anything is seen.
    """
    kept = _kept.pop() if _kept else None  # no other thread has it meanwhile
    if kept is None or not kept.fits():
        kept = _Kept.made()
    try:
        with kept.listener.listening(one), replaced(kept.patches):
            yield
    finally:
        _kept[:] = [kept]


@contextmanager
def failures_seen(one: Looked) -> Iterator[None]:
    """In the block, reads that fail since no kernel has written there yet are told of, whoever
    catches the error. Each call of a function takes time for that; nothing is seen where a debugger
    or the like traces this thread.
    """
    if sys.gettrace() is not None:
        yield
        return

    def see(frame: FrameType, event: str, arg: Any) -> Any:
        if is_own_file(frame.f_code.co_filename):
            return None
        frame.f_trace_lines = False
        if event == "exception" and not one.is_busy and is_unread(arg[1]):
            one.unread()
        return see

    sys.settrace(see)
    try:
        yield
    finally:
        sys.settrace(None)
