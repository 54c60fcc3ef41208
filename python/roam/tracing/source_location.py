"""Reads phase, module path and user line of an operator from the Python stack.

The stack is walked once per operator, from the inside out, up to the frame that called the user's
step. What a code object means is decided once and remembered.
"""

from __future__ import annotations

import dis
import functools
import itertools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any, Final

import torch

from roam.own_code import is_own_file, shown_file
from roam.program.ir import Source
from roam.torch_compat.private import current_node, next_sequence_number, sequence_number

_TORCH = os.path.dirname(torch.__file__) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_UPDATE_FILES = (_TORCH + "optim" + os.sep, os.path.join(_TORCH, "nn", "utils", "clip_grad.py"))
_SCALER_FILE = os.path.join(_TORCH, "amp", "grad_scaler.py")
_SCALER_UPDATES = ("unscale_", "step", "update")
_AUTOGRAD_FILES = tuple(
    os.path.join(_TORCH, "autograd", name) for name in ("__init__.py", "graph.py")
)
_LOSS_NAMES = ("loss", "cross_entropy", "nll", "kl_div")

# Bits of what a code object is.
_USER, _MODULE, _BACKWARD, _UPDATE, _LOSS, _OURS, _NUMPYS, _TRIES = 1, 2, 4, 8, 16, 32, 64, 128


def _classify(code: CodeType) -> int:
    file, name = code.co_filename, code.co_name
    bits = 0
    if file.startswith(_TORCH):
        if file.startswith(_UPDATE_FILES) or (file == _SCALER_FILE and name in _SCALER_UPDATES):
            bits |= _UPDATE
        if name in ("backward", "_engine_run_backward") and file.startswith(_AUTOGRAD_FILES):
            bits |= _BACKWARD
    elif is_own_file(file):
        bits |= _OURS
    elif not file.startswith("<") and not is_standard(file):
        bits |= _USER
        if shown_path(file).startswith("numpy" + os.sep):
            bits |= _NUMPYS  # which no message should name in place of its caller
        if _tried(code):
            bits |= _TRIES
    if name == "forward" and code.co_argcount and code.co_varnames[0] == "self":
        bits |= _MODULE
    lowered = name.lower()
    if any(part in lowered for part in _LOSS_NAMES) or file.endswith(
        os.path.join("modules", "loss.py")
    ):
        bits |= _LOSS
    return bits


@functools.lru_cache(maxsize=1024)
def _tried(code: CodeType) -> list[tuple[int, int]]:
    """The ranges of a function's instructions that are in a `try`, by their first offset and the
    offset after them. Blocks of `with` count as if they let errors through, except where the
    function names `suppress` (of contextlib).
    """
    suppresses = "suppress" in code.co_names or "suppress" in code.co_freevars
    if sys.version_info < (3, 11):
        trying = ("SETUP_FINALLY", "SETUP_WITH" if suppresses else "")
        is_trying = any(one.opname in trying for one in dis.get_instructions(code))
        return [(0, len(code.co_code))] if is_trying else []
    if not code.co_exceptiontable:
        return []
    names = {one.offset: one.opname for one in dis.get_instructions(code)}
    after = dict(itertools.pairwise(names))
    bytecode: Any = dis.Bytecode(code)  # whose entries older versions do not have
    entries = bytecode.exception_entries

    def is_handled(at: int) -> bool:
        """Whether a handler is met by an error that is raised at this offset."""
        target = next((one.target for one in entries if one.start <= at < one.end), None)
        if target is None:
            return False
        is_handler = names[target] == "PUSH_EXC_INFO"  # not what tidies up after a handler
        if is_handler and (suppresses or names[after[target]] != "WITH_EXCEPT_START"):
            return True
        return target > at and is_handled(target)  # the block around it

    return [(entry.start, entry.end) for entry in entries if is_handled(entry.start)]


_bits: Final[dict[int, tuple[int, CodeType]]] = {}
"""What code is, by its identity: the hash of code is that of all that is in it, made anew each
time. It is kept, and so is its identity."""
_identity = id  # while a step is traced, its code gets another function for it


def _bits_of(code: CodeType) -> int:
    known = _bits.get(_identity(code))
    if known is None:
        known = _bits[_identity(code)] = _classify(code), code
    return known[0]


def is_user_code(code: CodeType) -> bool:
    """Whether code is neither PyTorch's, nor the standard library's, nor roam's own."""
    return bool(_bits_of(code) & _USER)


def is_written_by_user(code: CodeType) -> bool:
    """Whether code is the user's, also if no file has it, as in a terminal or in `exec`."""
    file = code.co_filename
    return is_user_code(code) or (file.startswith("<") and not file.startswith("<frozen"))


def is_standard(file: str) -> bool:
    """Whether a file is one of the standard library's."""
    return file.startswith(_STANDARD) and "-packages" + os.sep not in file


class Frames:
    """One capture's view of the stack."""

    def __init__(self, module_names: dict[int, str], code: dict[CodeType, dict[str, Any]]) -> None:
        """A view of nothing yet.

        Args:
            module_names: dotted path by id of each module that the step can reach.
            code: gets all code that runs around operators, each with its globals.
        """
        self._code = code
        self._module_names = module_names
        self._bits: dict[int, int] = {}
        """Of code whose globals are noted, by its identity."""
        self._forward_sources: dict[int, Source] = {}
        self.root: CodeType | None = None
        """The code of the function that calls the step; the walk ends there."""

    def here(self) -> tuple[str, Source]:
        """Phase and source of the operator that is being dispatched now."""
        frame: FrameType | None = sys._getframe(1)
        bits_seen = 0
        user: FrameType | None = None
        new: list[FrameType] = []
        module, is_tried = "", False
        while frame is not None and frame.f_code is not self.root:
            code = frame.f_code
            bits = self._bits.get(_identity(code))
            if bits is None:
                bits = self._bits[_identity(code)] = _bits_of(code)
                new.append(frame)
            if bits & _OURS:
                new.clear()  # what capture calls is no part of the step
            elif bits:
                if frame.f_back is not None and frame.f_back.f_code is self.root:
                    bits &= ~_LOSS  # the step itself is not its loss, whatever the user calls it
                if bits_seen & (_BACKWARD | _UPDATE):
                    bits &= ~(
                        _BACKWARD | _UPDATE
                    )  # an optimizer in a gradient hook, a backward pass in a closure: the inner one
                bits_seen |= bits
                if bits & _TRIES and not is_tried:
                    at = frame.f_lasti
                    is_tried = any(start <= at < end for start, end in _tried(frame.f_code))
                if bits & _USER and not bits & _NUMPYS and user is None:
                    user = frame
                if bits & _MODULE and not module:
                    module = self._module_names.get(id(frame.f_locals.get("self")), "")
            frame = frame.f_back
        for seen in new:
            if frame is None:  # outside of the step
                del self._bits[_identity(seen.f_code)]
            else:
                self._code.setdefault(seen.f_code, seen.f_globals)
        source = (
            Source(module, shown_path(user.f_code.co_filename), user.f_lineno, is_tried)
            if user is not None
            else Source(is_tried=is_tried)
        )
        if bits_seen & _BACKWARD:
            node: Any = current_node()  # None between the nodes, whatever the stub says
            made_by = None if node is None else self.made_by(node)
            if made_by is None or made_by.is_tried is is_tried:
                return "backward", made_by or source
            return "backward", replace(made_by, is_tried=is_tried)
        if bits_seen & _UPDATE:
            return "update", source
        if torch.is_grad_enabled():
            # The autograd node of this operator, if it has one, was numbered just before the kernel
            # was reached.
            self._forward_sources.setdefault(next_sequence_number() - 1, source)
        return ("loss" if bits_seen & _LOSS else "forward"), source

    def made_by(self, node: Any) -> Source | None:
        """Where the operator of one of autograd's nodes was run; None if it was not in the
        step.
        """
        return self._forward_sources.get(sequence_number(node))


@contextmanager
def calls_seen(see: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """In the block, a function is told of each call and return in this thread, as
    `sys.setprofile` has it, and the profiler that is there already is told after it. Where that is
    written in C, as cProfile, nothing else can be told.
    """
    before: Any = sys.getprofile()
    if before is not None and not callable(before):
        yield
        return

    def hook(frame: FrameType, event: Any, arg: Any) -> None:
        see(frame, event, arg)
        if before is not None:
            before(frame, event, arg)

    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def calls_unseen() -> Iterator[None]:
    """In the block, nobody is told of calls in this thread."""
    before: Any = sys.getprofile()
    if not callable(before):
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(before)


def is_torch_file(file: str) -> bool:
    """Whether a file is PyTorch's."""
    return file.startswith(_TORCH)


@functools.cache
def shown_path(file: str) -> str:
    """The user's own files in full; an installed package's from the package on, the same on every
    machine.
    """
    for folder in ("site-packages", "dist-packages"):
        before, separator, after = file.rpartition(os.sep + folder + os.sep)
        if separator:
            return after
    return shown_file(file)
