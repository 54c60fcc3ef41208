"""Code that `torch.compile` has made of functions, and which of it a call would run now.

roam lets Dynamo make code without running it, so this code is not in Dynamo's cache. A look-up
searches the cache and this code together, as Dynamo would search a cache that contained both.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType
from typing import Any, NoReturn

import torch

from roam.state.equality import Misfit
from roam.torch_compat.patches import replaced
from roam.torch_compat.private import (
    FROM_STANCE,
    compiled_entries,
    disable_current_modes,
    frame_evaluation,
    innermost_backend,
    is_forgotten,
    pytree,
    whole_parameters,
)
from roam.tracing.compiled.arguments import Arguments
from roam.tracing.compiled.frames import Frame, cell_of, function_of, spread

_DEVICES = ("cpu", "cuda")


class Found(BaseException):
    """The code of a compiled function is found."""


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """What Dynamo has made of a function for one kind of call; with the attributes of an entry of
    its cache.
    """

    original: CodeType
    code: CodeType
    names: dict[str, Any]
    """The globals that the code runs in."""
    guard_manager: Any
    backend: Any
    earlier: tuple[CodeType, ...] = ()
    """What Dynamo's cache had for the function when this was made."""
    number: int = field(default_factory=itertools.count().__next__)
    """Its number among all that were made, in order."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a compiled graph depends on, apart from the arguments."""

    gradients: bool
    autocasts: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @classmethod
    def now(cls) -> Settings:
        return cls(
            torch.is_grad_enabled(),
            tuple([(one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in _DEVICES]),
            torch.is_autocast_cache_enabled(),
        )  # fmt: skip

    def enter(self, stack: ExitStack) -> None:
        stack.enter_context(torch.set_grad_enabled(self.gradients))
        for device, enabled, dtype in self.autocasts:
            if enabled != torch.is_autocast_enabled(device) or enabled:
                stack.enter_context(
                    torch.autocast(device, dtype, enabled=enabled, cache_enabled=self.cache)
                )


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A call of a function that `torch.compile` compiles: because the user has asked for it, or
    because another compiled function calls it.

    Attributes:
        wrapper: the function of `torch.compile`'s that is called.
        code: the code of the function that is called, inside of what the wrapper calls.
        names: its globals.
        cells: the cells of the variables that it closes over, if they are from before the step;
            else None.
        arguments: what its arguments and its other free variables hold.
        spec: how arguments and free variables are made of the leaves.
        settings: what else the compiled graph depends on.
        sharded: the groups of the step's parameters that `fully_shard` gathers together.
    """

    wrapper: FunctionType
    code: CodeType
    names: dict[str, Any]
    cells: tuple[CellType, ...] | None
    arguments: Arguments
    spec: Any
    settings: Settings
    sharded: list[Any]

    @contextmanager
    def again(self) -> Iterator[Frame]:
        """The call with real tensors of the same metadata; not begun."""
        with disable_current_modes(), torch.inference_mode(False), ExitStack() as stack:
            stack.enter_context(whole_parameters(self.sharded, self.arguments.modules()))
            given, contents = pytree.tree_unflatten(self.arguments.made(), self.spec)
            self.settings.enter(stack)
            cells = tuple(map(cell_of, contents)) if self.cells is None else self.cells
            yield Frame(self.code, self.names, given, cells)

    def ask(self, callback: Callable[[Any], Any]) -> None:
        """Calls the function by its wrapper, with another callback for frames in the place of the
        wrapper's own. `callback` makes it from that one, and it raises `Found`.
        """
        evaluation = frame_evaluation()
        assert evaluation is not None, "a compiled function was met"

        def stand_in(own: Any) -> Any:
            if not callable(own):
                return own
            try:
                return callback(own)
            except BaseException as error:  # noqa: BLE001 - raised below, whatever it is
                # By now the wrapper has changed Dynamo's settings, and it puts them back only if
                # the function that it calls raises.
                called.cell_contents = functools.partial(_raise, error)
                return None

        with (
            self.again() as frame,
            replaced([(evaluation, FROM_STANCE, stand_in)]),
            calling(self.wrapper, function_of(frame.code, frame)) as called,
            suppress(Found),
        ):
            args, kwargs = spread(frame.code, frame.given)
            self.wrapper(*args, **kwargs)

    def found(self, backend: Any) -> CodeType | None:
        """The code that would run the call now; None if there is none yet."""
        with self.again() as frame:
            entry = first_code(frame.view, backend)
            return None if entry is None else entry.code


def _raise(error: BaseException, *_: Any, **__: Any) -> NoReturn:
    raise error


@contextmanager
def calling(wrapper: FunctionType, function: Callable[..., Any]) -> Iterator[CellType]:
    """A block in which a function of `torch.compile`'s calls this one, or what is put in the cell
    instead.
    """
    cell = cell_in(wrapper, "fn")
    before = cell.cell_contents
    cell.cell_contents = function
    try:
        yield cell
    finally:
        cell.cell_contents = before


def cell_in(function: FunctionType, name: str) -> CellType:
    """The cell of a variable that a function closes over."""
    assert function.__closure__ is not None, "a function of torch.compile's"
    return function.__closure__[function.__code__.co_freevars.index(name)]


@dataclass(slots=True)
class UsedCode:
    """The compiled code that a captured step runs."""

    calls: list[tuple[CompiledCall, Code]]
    _known: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        # If a function was compiled for two calls of the step, later steps may run the newer code
        # for the first call too.
        now = self._now()
        self._known = now if len(now) == len(self._originals()) else frozenset()

    def failure(self) -> Misfit | None:
        """None while `torch.compile` would run the same code, else what is new.

        Dynamo takes the newest code that fits a call. So code for all sizes, which it makes when it
        meets a second one, is run for the first one, too.
        """
        for _, code in self.calls:
            if is_forgotten(code.code):
                return Misfit(f"torch.compile was reset, and compiles {code.original.co_name} anew")
        now = self._now()
        if now <= self._known:
            return None
        for call, code in self.calls:
            found = call.found(code.backend)
            if found is not None and found is not code.code:
                return Misfit(
                    f"torch.compile has compiled {code.original.co_name} again, for this call too"
                )
        self._known = now
        return None

    def _now(self) -> frozenset[int]:
        entries = [one for original in self._originals() for one in newest_first(original)]
        return frozenset([id(one.code) for one in entries])

    def _originals(self) -> list[CodeType]:
        return list({id(code.original): code.original for _, code in self.calls}.values())


class MadeCode:
    """What Dynamo has made for one step."""

    def __init__(self) -> None:
        self.codes: list[Code] = []
        _alive.add(self)


_alive: weakref.WeakSet[MadeCode] = weakref.WeakSet()


def newest_first(original: CodeType) -> list[Any]:
    """The entries of Dynamo's cache for a function, and the `Code` of all steps, which the cache
    does not have; in the order in which a cache with all of them would look at them, except that a
    use of a `Code` makes it no newer.
    """
    entries: list[Any] = list(compiled_entries(original))
    codes = [
        one for made in _alive for one in made.codes
        if one.original is original and not is_forgotten(one.code)
    ]  # fmt: skip
    for code in sorted(codes, key=lambda one: one.number):
        older = (
            place
            for place, entry in enumerate(entries)
            if type(entry) is Code or any(entry.code is one for one in code.earlier)
        )
        entries.insert(next(older, len(entries)), code)
    return entries


def first_code(frame: Any, backend: Any) -> Any:
    """The first entry of `newest_first` that fits a call; None if none does."""
    for entry in newest_first(frame.f_code):
        if innermost_backend(entry.backend) == backend and entry.guard_manager.check(
            frame.f_locals
        ):
            return entry
    return None
