"""Compiled regions: functions and modules inside of the step that the user has given to
`torch.compile`.

A trace cannot compile: Dynamo would look at fakes and stand-ins. So the first trace runs each such
function as it is written, which also tells what it reads, and notes how it was called. When the
user's objects are back in place, each is compiled for real tensors of the same metadata, and
nothing is run: Dynamo's code for the call is kept, the one in its cache if there is one. The next
trace runs that code. It calls the graphs that Inductor has compiled, forward and backward through
AOTAutograd's own function, and each such call is recorded as one operator.
"""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from types import CellType, FrameType, FunctionType, MethodType
from typing import Any, NoReturn, Protocol

import torch

from roam.capture.tracing.compiled_code import (
    Code,
    CompiledCall,
    Found,
    GivenTensor,
    MadeCode,
    Settings,
    UsedCode,
    first_code,
    newest_first,
)
from roam.capture.tracing.compiled_state import State, changes_of, state_of
from roam.capture.tracing.region_operators import Unknown, region_of
from roam.errors import CaptureError
from roam.garbage import referrers
from roam.program.ir import Source
from roam.state.equality import is_plain
from roam.state.made_objects import opened
from roam.torch_compat.patches import replaced
from roam.torch_compat.private import (
    CALLS,
    DYNAMIC_INDICES,
    FROM_STANCE,
    IS_COMPILING,
    IS_NESTED,
    FakeTensor,
    backward_compiler,
    compiled_entries,
    disable_current_modes,
    frame_evaluation,
    has_module_hooks,
    has_variable_sizes,
    inductor_graph,
    innermost_backend,
    is_graph_break,
    is_resumed,
    may_compile,
    pytree,
    whole_graphs,
)

_MOST_ROUNDS = 8
"""How often a capture compiles what the trace before has met."""
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


class Refuses(Protocol):
    """Refuses what the step does now."""

    def __call__(self, message: str, *, code: str, source: Source | None = None) -> NoReturn: ...


class CompileRegions(Exception):
    """A trace has met compiled functions whose code is not known yet."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A call of a compiled function, to be compiled."""

    call: CompiledCall
    state: State
    source: Source


@dataclass(slots=True)
class Regions:
    """The compiled functions that one step calls.

    Attributes:
        compiled: how many calls were compiled.
        around: a block around each compilation.
    """

    compiled: int = 0
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    _made: MadeCode = field(default_factory=MadeCode)
    _known: dict[object, Code] = field(default_factory=dict)
    _used: dict[object, tuple[CompiledCall, Code]] = field(default_factory=dict)
    _calls: dict[object, CompiledCall] = field(default_factory=dict)
    _states: dict[object, State] = field(default_factory=dict)
    _wanted: dict[object, _Wanted] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)
    _cells: list[tuple[CellType, Any]] = field(default_factory=list)
    _refuse: Refuses | None = None
    _here: Callable[[], Source] = Source
    _reals: dict[int, tuple[Any, torch.Tensor]] = field(default_factory=dict)
    _modules: list[tuple[str, torch.nn.Module]] = field(default_factory=list)
    _held: frozenset[int] = frozenset()
    _rounds: int = 0
    _depth: int = 0
    _outside: Callable[[], AbstractContextManager[None]] = nullcontext
    _is_real: bool = True

    def start(self) -> None:
        """Before a capture: the code of each call is looked for anew, since what it depends on may
        have changed.
        """
        self._known.clear()
        self._wanted.clear()
        self._calls.clear()
        self._states.clear()
        self._used.clear()
        self._kept.clear()
        self._rounds = 0

    # -- while a step is traced

    def begin(
        self,
        refuse: Refuses,
        here: Callable[[], Source],
        fakes: list[tuple[Any, Any]],
        modules: list[tuple[str, torch.nn.Module]],
        held: frozenset[int],
        outside: Callable[[], AbstractContextManager[None]],
        *,
        is_real: bool,
    ) -> None:
        """Before a trace.

        Args:
            refuse: refuses what the step does now.
            here: the line of the user's that runs now.
            fakes: every real tensor from before the step, with its fake.
            modules: those that the step can reach.
            held: identities of the objects and containers that are from before the step.
            outside: a block that is no part of the trace.
            is_real: whether the step is of real tensors.
        """
        self._refuse, self._here, self._modules, self._depth = refuse, here, modules, 0
        self._reals = {id(fake): (fake, real) for real, fake in fakes}
        self._held, self._outside, self._is_real = held, outside, is_real

    def stand_ins(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """(holder, name, function) for what runs compiled code."""
        evaluation, graph = frame_evaluation(), inductor_graph()
        if evaluation is not None:
            plain = getattr(evaluation, IS_NESTED)

            def is_eager() -> bool:
                return self._meet(sys._getframe(2)) or bool(plain())

            yield evaluation, IS_NESTED, is_eager
        if graph is not None:
            plain_call = graph.__call__

            def run_graph(graph: Any, inputs: list[Any]) -> Any:
                return self._run_graph(graph, functools.partial(plain_call, graph), inputs)

            yield graph, "__call__", run_graph
        compiler = backward_compiler()
        if compiler is not None:
            plain_compile = compiler.get_or_compile

            def compile_backward(*args: Any, **kwargs: Any) -> Any:
                # A backward graph is compiled when it first runs. That looks at nothing of the
                # step's: the graph was made with the forward one.
                with self._outside(), disable_current_modes():
                    return plain_compile(*args, **kwargs)

            yield compiler, "get_or_compile", compile_backward

    def end(self) -> None:
        """After a trace, whether it ended or failed."""
        for cell, content in self._cells:
            cell.cell_contents = content
        self._cells.clear()
        self._reals = {}
        self._modules = []
        self._refuse = None

    def check(self) -> None:
        """After a trace that ended.

        Raises:
            CompileRegions: if something has to be compiled first.
        """
        if self._wanted:
            raise CompileRegions

    def _meet(self, frame: FrameType) -> bool:
        """Whether a frame is that of a function of `torch.compile`'s that is about to run what it
        has compiled; then this stands in for what it calls.
        """
        if frame.f_code.co_name != "compile_wrapper":
            return False
        held = frame.f_locals
        if isinstance(held["fn"], _Called):
            return True
        wrapper = _wrapper_of(frame)
        if wrapper is None:
            self._refused(
                "the function inside of it cannot be found; call the plain function",
                code="compiled_function",
            )
        cell = _cell(wrapper, "fn")
        self._cells.append((cell, held["fn"]))
        cell.cell_contents = _Called(self, wrapper, held["fn"], held["callback"])
        return True

    def called(self, called: _Called, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a compiled function by the step."""
        evaluation = frame_evaluation()
        assert evaluation is not None, "it was met"
        is_on = callable(getattr(evaluation, FROM_STANCE)(called.callback))
        if self._depth or not is_on:  # inside of another one, which is compiled with it
            return called.function(*args, **kwargs)
        config = getattr(innermost_backend(called.callback), "config", {})
        # mode="max-autotune" asks for CUDA graphs too, and gets none on the CPU.
        if config.get("triton.cudagraphs") and (
            not config.get("max_autotune") or self._is_on_cuda((args, kwargs))
        ):
            self._refused(
                "it is compiled with CUDA graphs (mode='reduce-overhead', or triton.cudagraphs), which keep memory of their own "
                "that no plan can share; compile it without, for example with mode='max-autotune-no-cudagraphs'",
                code="compiled_cudagraphs",
            )  # fmt: skip
        leaves, spec = pytree.tree_flatten(
            opened((args, kwargs), lambda value: id(value) in self._held, lambda _: False)
        )
        places = {id(leaf): place for place, leaf in reversed(list(enumerate(leaves)))}
        described = [self._described(leaf, places[id(leaf)]) for leaf in leaves]
        settings = Settings.now()
        key = id(called.wrapper), tuple(map(_key, described)), str(spec), settings
        found = self._known.get(key)
        if found is not None and not any(changes_of(self._states[key], in_trace=True)):
            self._used[key] = self._calls[key], found
            return _function(called.function, found)(*args, **kwargs)
        if key not in self._wanted:
            self._kept += (called.wrapper, described)
            known = (self._reals[id(leaf)][1] for leaf in leaves if id(leaf) in self._reals)
            reals = {id(real): weakref.ref(real) for real in known}
            self._calls[key] = CompiledCall(called.wrapper, described, reals, spec, settings)
            self._states[key] = state_of(self._modules, called.function)
            self._wanted[key] = _Wanted(self._calls[key], self._states[key], self._line(called))
        self._depth += 1
        try:
            # Compilers take the branches for them, and what these read matters.
            with replaced([(torch.compiler, IS_COMPILING, True)]):
                return called.function(*args, **kwargs)
        finally:
            self._depth -= 1

    def _line(self, called: _Called) -> Source:
        """The user's line that calls a compiled function; where the step itself is that function,
        the line where it begins.
        """
        here = self._here()
        function = getattr(called.function, "__func__", called.function)
        if here.file or type(function) is not FunctionType:
            return here
        code = function.__code__
        return Source(file=code.co_filename, line=code.co_firstlineno)

    def used(self) -> UsedCode:
        """After a capture: the code that its traces ran."""
        return UsedCode(list(self._used.values()))

    def _is_on_cuda(self, arguments: Any) -> bool:
        """Whether arguments, or tensors from before the step, are on CUDA."""
        leaves = pytree.tree_leaves(arguments)
        fakes = (leaf.fake_device for leaf in leaves if isinstance(leaf, FakeTensor))
        reals = (real.device for _, real in self._reals.values())
        return any(device.type == "cuda" for device in chain(fakes, reals))

    def _described(self, leaf: Any, place: int) -> Any:
        """An argument without fakes."""
        if isinstance(leaf, torch.Tensor):
            known = self._reals.get(id(leaf))
            if type(leaf) is not FakeTensor and not isinstance(leaf, torch.nn.Parameter):
                self._refused(
                    "it is given a tensor subclass; give it plain tensors", code="compiled_call"
                )
            fake: Any = leaf
            return GivenTensor(
                tuple(leaf.shape),
                leaf.stride(),
                leaf.dtype,
                fake.fake_device,
                leaf.requires_grad,
                leaf.is_leaf,
                None if known is None else id(known[1]),
                place,
                frozenset(getattr(leaf, DYNAMIC_INDICES, ())),
            )
        if isinstance(leaf, (torch.nn.Module, FunctionType, MethodType, type)) or is_plain(leaf):
            return leaf
        name = type(leaf).__name__
        self._refused(
            f"it is given a {name}; give it tensors, plain numbers, the containers that torch.utils._pytree knows, and objects that "
            "the step makes of these",
            code="compiled_call",
        )  # fmt: skip

    def _run_graph(self, graph: Any, run: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        """A graph of Inductor's, called in a trace."""
        given = list(inputs)
        inputs.clear()
        if not self._is_real:
            self._refused(
                "it cannot be recorded in a step of fake tensors; capture the step with real tensors, or call "
                "the plain function",
                code="compiled_region",
            )  # fmt: skip
        try:
            with self._outside():
                region = region_of(graph, run, given)
        except Unknown as unknown:
            self._refused(
                f"a graph that Inductor has compiled cannot be recorded: {unknown}; call the plain function",
                code="compiled_region",
            )
        return region(given)

    def _refused(self, what: str, *, code: str) -> NoReturn:
        assert self._refuse is not None, "in a trace"
        self._refuse(
            f"the step calls a function or module that torch.compile has compiled, and {what}",
            code=code,
        )

    # -- between traces

    def compile(self) -> None:
        """Compiles what the trace has met, with the user's objects in place; nothing is run.

        Raises:
            CaptureError: where that gives no code that can be recorded.
        """
        self._rounds += 1
        wanted, self._wanted = self._wanted, {}
        for key, one in wanted.items():
            if self._rounds > _MOST_ROUNDS:
                _refuse(
                    one,
                    "every step makes it anew; call torch.compile once, outside of the step",
                    code="compiled_call",
                )
            compiled = self.compiled
            with self.around():
                self._known[key] = self._compiled(one)
            if self.compiled > compiled and has_variable_sizes(self._known[key].guard_manager):
                # What it returns is not known to vary yet, and later calls are given that.
                self._rounds -= 1
                break

    def _compiled(self, wanted: _Wanted) -> Code:
        for name, now, then in changes_of(wanted.state):
            what = f"set {name} to {then!r} by then; it would be compiled for {now!r}, the value before the step"
            if isinstance(then, tuple):
                what = f"changed {name} by then; it would be compiled for what was there before the step"
            _refuse(
                wanted,
                f"the step has {what}; set such attributes before the step, as model.train() does",
                code="compiled_call",
            )
        found: list[Code] = []
        try:
            with whole_graphs():
                wanted.call.again(lambda callback: self._asking(callback, found))
        except _LimitReached as limit:
            _refuse(
                wanted,
                f"torch.compile has compiled {limit} for {limit.count} kinds of calls, as many as it is allowed to, and runs all "
                "others without compiling; raise torch._dynamo.config.recompile_limit before the first call, or make equal "
                "in all blocks what differs between them",
                code="compiled_too_often",
            )
        except CaptureError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever compilers raise
            if is_graph_break(error):
                _refuse(
                    wanted,
                    f"its graph breaks at {_last_line(error)}: {_first_line(error)}; remove the break, or compile the parts before "
                    "and after it; of an optimizer's step, and of the whole step, call the plain function: it is planned too",
                    code="compiled_graph_break",
                )
            _refuse(
                wanted,
                f"compiling it raised {type(error).__name__}: {_first_line(error)}; call the plain function",
                code="compiled_region",
            )
        if not found:
            _refuse(
                wanted,
                "torch.compile compiles nothing of it; call the plain function",
                code="compiled_region",
            )
        (code,) = found
        return code

    def _asking(self, callback: Any, found: list[Code]) -> Any:
        """A callback for frames that finds or compiles the code of the first that has any, and does
        not run it. Compiled again, a function may get other kernels: Dynamo remembers the sizes
        that it has met, and takes those that change for variables.
        """
        backend = innermost_backend(callback)

        def compiled(frame: Any, *others: Any, **named: Any) -> Any:
            original = frame.f_code
            entry = first_code(frame, backend)
            if type(entry) is Code:
                found.append(entry)
                raise Found
            if entry is not None and not is_resumed(entry.code):
                found.append(
                    Code(original, entry.code, frame.f_globals, entry.guard_manager, backend)
                )
                raise Found
            entries = newest_first(original)
            if not may_compile(frame, entries, callback):
                raise _LimitReached(original.co_name, len(entries))
            earlier = tuple([one.code for one in compiled_entries(original)])
            result = callback(frame, *others, **named)
            if result.guarded_code is None:
                return result
            self.compiled += 1
            made = result.guarded_code
            code = Code(original, made.code, frame.f_globals, made.guard_manager, backend, earlier)
            found.append(code)
            self._made.codes.append(code)
            raise Found

        return compiled


class _LimitReached(Exception):
    """Dynamo compiles a function no more."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name)
        self.count = count


@dataclass(frozen=True, slots=True)
class _Called:
    """Stands in a function of `torch.compile`'s for what it calls."""

    regions: Regions
    wrapper: FunctionType
    function: Callable[..., Any]
    callback: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.regions.called(self, args, kwargs)


def _wrapper_of(frame: FrameType) -> FunctionType | None:
    """The function that a frame runs: the one with the same code that closes over the same."""
    held = frame.f_locals
    for function in referrers(frame.f_code):
        if type(function) is FunctionType and function.__code__ is frame.f_code:
            names = ("fn", "callback", "self")
            if all(_cell(function, name).cell_contents is held[name] for name in names):
                return function
    return None


def _cell(function: FunctionType, name: str) -> CellType:
    assert function.__closure__ is not None, "a function of torch.compile's"
    return function.__closure__[function.__code__.co_freevars.index(name)]


def _function(function: Callable[..., Any], found: Code) -> Callable[..., Any]:
    """The compiled function for one that is called with the same arguments."""
    if type(function) is MethodType and function.__func__ in CALLS:
        module: Any = function.__self__
        if has_module_hooks(module):
            raise CaptureError(
                f"{type(module).__name__} is compiled by torch.compile and has hooks, and the two cannot be captured "
                "together; remove the hooks, or compile the modules inside of it",
                code="compiled_call",
            )
        function = module.forward
    plain = function.__func__ if type(function) is MethodType else function
    if type(plain) is not FunctionType or plain.__code__ is not found.original:
        raise CaptureError(
            f"torch.compile compiles another function inside of {getattr(function, '__qualname__', function)}, which "
            "cannot be captured; compile that function itself",
            code="compiled_region",
        )
    made = FunctionType(
        found.code, found.names, plain.__name__, plain.__defaults__, plain.__closure__
    )
    made.__kwdefaults__ = plain.__kwdefaults__
    return made.__get__(function.__self__) if type(function) is MethodType else made


def _key(described: Any) -> object:
    if type(described) is GivenTensor:
        return described
    return type(described), repr(described) if is_plain(described) else id(described)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _last_line(error: Exception) -> str:
    """The line of the user's that a compiler names last."""
    lines = _LINE.findall(str(error))
    return "{}:{}".format(*lines[-1]) if lines else "unknown line"


def _refuse(wanted: _Wanted, what: str, *, code: str) -> NoReturn:
    raise CaptureError(
        f"{wanted.source}: the step calls a function or module that torch.compile has compiled, and {what}",
        code=code, source=str(wanted.source),
    )  # fmt: skip
