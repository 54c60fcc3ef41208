"""Compiled regions: functions and modules inside of the step that the user has given to
`torch.compile`.

A trace cannot compile: Dynamo would look at fakes and stand-ins. So the first trace runs each such
function as it is written, which also tells what it reads, and notes how it was called. When the
user's objects are back in place, each is compiled for real tensors of the same metadata, and
nothing is run: Dynamo's code for the call is kept, the one in its cache if there is one. The next
trace runs that code. It calls the graphs that Inductor has compiled, forward and backward through
AOTAutograd's own function, and each such call is recorded as one operator.

Where a graph breaks, that code calls functions that are compiled by themselves: the one for the
rest, and those that Dynamo could not look into. Where Dynamo has given a function up, all functions
that it calls are. The trace notes these calls like the first one, and the next trace knows their
code: one more trace for each break that follows another, or lies inside of another.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from types import CellType, CodeType, FrameType, FunctionType, MethodType
from typing import Any, NoReturn, Protocol

import torch

from roam.errors import CaptureError
from roam.garbage import referrers
from roam.own_code import is_own_file
from roam.program.ir import Source
from roam.state.equality import same, show
from roam.state.global_state import AMBIENT
from roam.state.live_scalars import is_live, node_of
from roam.state.nests import with_made_opened
from roam.state.policies import Retrace
from roam.state.wrappers import Form, Whole, is_wrapper, parts_of
from roam.torch_compat.patches import replaced
from roam.torch_compat.private import (
    CALLS,
    FROM_STANCE,
    IS_COMPILING,
    IS_NESTED,
    FakeTensor,
    as_written,
    backward_compiler,
    compile_options,
    compiled_codes,
    disable_current_modes,
    frame_evaluation,
    has_tensors,
    has_variable_sizes,
    inductor_graph,
    innermost_backend,
    is_looked_at,
    is_precompiled,
    leaves_callee,
    look_at_frames,
    put_in_place,
    pytree,
    shard_groups,
    take_from_place,
    unseen_calls,
)
from roam.tracing.compiled.arguments import Arguments, Reals
from roam.tracing.compiled.code import Code, CompiledCall, Settings, UsedCode, cell_in
from roam.tracing.compiled.compilation import Compiler, Wanted, refused_call
from roam.tracing.compiled.frames import STAND_IN, Frame, function_of, spread, stand_in_for
from roam.tracing.compiled.guarded_values import Guarded, changes_since
from roam.tracing.compiled.region_operators import Unknown, region_of

_MOST_ROUNDS = 8
"""How often a capture compiles calls of functions that it has compiled before."""
_MOST_BREAKS = 100
"""How often at most a capture compiles what the trace before has met."""
_RESUMED = "torch_dynamo_resume_in_"
"""How the names of functions begin that Dynamo makes for what follows a graph break."""
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPTIMIZERS = os.path.join(_TORCH, "optim", "")
_TAKE_FUNCTIONS = os.path.join(_TORCH, "_higher_order_ops", "")
"""Where PyTorch compiles the functions that operators such as `torch.cond` take. These operators
are refused when they are recorded.
"""
_OF_EACH_CALL = frozenset(
    {
        "gradient mode",
        "autocast on cpu",
        "autocast on cuda",
        "autocast cache",
        "hooks on saved tensors",
    }
)
"""The switches that are part of a call (`Settings`), or change nothing that is compiled."""
_BELOW = (
    os.path.join(_TORCH, "_subclasses", ""),
    os.path.join(_TORCH, "utils", "_python_dispatch.py"),
)
"""Files of functions that run only because a step is traced."""


class Refuses(Protocol):
    """Refuses what the step does now."""

    def __call__(self, message: str, *, code: str, source: Source | None = None) -> NoReturn: ...


def _fixed(value: Any) -> Any:
    """A number that is live, but seldom changes, such as a weight decay, as the plain number for
    which torch.compile compiles; anything else as it is.
    """
    node = node_of(value) if is_live(value) else None
    known = None if node is None else node.trace.fixed_value(node.slot)
    return value if known is None else known


def _apart(tensor: Any) -> Any:
    """A wrapper without a gradient taken apart; any other tensor as it is."""
    is_apart = is_wrapper(tensor) and not tensor.requires_grad
    return Whole(Form.of(tensor).kept(), parts_of(tensor)) if is_apart else tensor


@dataclass(slots=True)
class Regions:
    """The compiled functions that one step calls.

    Attributes:
        around: a block around each compilation.
    """

    around: Callable[[], AbstractContextManager[None]] = nullcontext
    _compiler: Compiler = field(default_factory=Compiler)
    _known: dict[object, tuple[Code, Guarded] | None] = field(default_factory=dict)
    """The code of each call, and what it depends on; None for a call that runs as it is written."""
    _used: dict[object, tuple[CompiledCall, Code]] = field(default_factory=dict)
    _calls: dict[object, Wanted] = field(default_factory=dict)
    """All calls that traces have met."""
    _wanted: dict[object, Wanted] = field(default_factory=dict)
    """Those that the last trace has met, and whose code is to be found."""
    _kept: list[Any] = field(default_factory=list)
    _made: list[tuple[Any, Any]] = field(default_factory=list)
    """Each function that `torch.compile` was given, with the other arguments."""
    _cells: list[tuple[CellType, Any]] = field(default_factory=list)
    _callers: list[_Called] = field(default_factory=list)
    _looked_at: dict[int, tuple[CodeType, CodeType, CodeType]] = field(default_factory=dict)
    """By identity the code of functions that Dynamo may look at, each with what stands in its
    place, and a copy that nobody looks at."""
    _own: dict[int, CodeType] = field(default_factory=dict)
    """By identity those copies, and what Dynamo has made."""
    _in_place: dict[int, CodeType] = field(default_factory=dict)
    """By identity the code of functions in whose place something stands now."""
    _thread: int = 0
    _is_watched: bool = False
    """Whether Dynamo was there when the trace began."""
    _lacks: bool = False
    """Whether the trace has met functions in whose place nothing stood."""
    _refuse: Refuses | None = None
    _here: Callable[[], Source] = Source
    _reals: Reals = field(default_factory=lambda: Reals([]))
    _modules: list[tuple[str, torch.nn.Module]] = field(default_factory=list)
    _held: frozenset[int] = frozenset()
    _rounds: int = 0
    _breaks: int = 0
    _compiled_codes: set[int] = field(default_factory=set)
    _order: list[object] = field(default_factory=list)
    """The keys of the calls that the trace has met, in order."""
    _made_anew: set[object] = field(default_factory=set)
    """The keys of those that nobody had compiled before the capture."""
    _depth: int = 0
    _outside: Callable[[], AbstractContextManager[None]] = nullcontext
    _watch_numbers: Callable[[Callable[[int], None] | None], int] = lambda _: 0
    _numbers: list[Any] = field(default_factory=list)
    _is_real: bool = True
    _switches: list[tuple[str, Callable[[], Any], Any]] = field(default_factory=list)
    """PyTorch's switches when the step began: the name of each, what reads it, and what it was."""

    def start(self) -> None:
        """Before a capture: the code of each call is looked for anew, since what it depends on may
        have changed.
        """
        self._known.clear()
        self._wanted.clear()
        self._calls.clear()
        self._used.clear()
        self._kept.clear()
        self._rounds = self._breaks = 0
        self._compiled_codes.clear()
        self._made_anew.clear()

    @property
    def compiled(self) -> int:
        """How many calls were compiled."""
        return self._compiler.count

    # -- while a step is traced

    def begin(
        self,
        refuse: Refuses,
        here: Callable[[], Source],
        fakes: list[tuple[Any, Any]],
        modules: list[tuple[str, torch.nn.Module]],
        held: frozenset[int],
        outside: Callable[[], AbstractContextManager[None]],
        watch_numbers: Callable[[Callable[[int], None] | None], int],
        numbers: list[Any],
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
            watch_numbers: makes a function be called with the slot of each live number that the
                step uses; None ends this. Returns the number of slots so far.
            numbers: references to numbers that the step changes and keeps.
            is_real: whether the step is of real tensors.
        """
        self._refuse, self._here, self._modules, self._depth = refuse, here, modules, 0
        self._reals = Reals(fakes)
        self._held, self._outside, self._is_real = held, outside, is_real
        self._watch_numbers, self._numbers = watch_numbers, numbers
        self._thread, self._lacks = threading.get_ident(), False
        self._order.clear()
        self._is_watched = _is_dynamo_there()
        if frame_evaluation() is not None:
            for code in compiled_codes():
                self._look_at(code)
            for code, _, _ in list(self._looked_at.values()):
                self._put_in_place(code)

    def run_begins(self) -> None:
        """When all is in place for a trace, and the step's function is about to run."""
        self._switches = [
            (name, read, read()) for name, read in AMBIENT if name not in _OF_EACH_CALL
        ]

    def stand_ins(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """(holder, name, function) for what runs compiled code."""
        evaluation, graph = frame_evaluation(), inductor_graph()
        if evaluation is not None:
            plain = getattr(evaluation, IS_NESTED)

            def is_eager() -> bool:
                return self._meet(sys._getframe(2)) or bool(plain())

            yield evaluation, IS_NESTED, is_eager
        if (unseen := unseen_calls()) is not None:
            plain_set = getattr(*unseen)

            def set_frames(callback: Any) -> Any:
                self._refuse_unseen(sys._getframe(2), unseen[0])
                return plain_set(callback)

            yield *unseen, set_frames
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
        while self._in_place:
            take_from_place(self._in_place.popitem()[1])
        self._callers.clear()
        for cell, content in self._cells:
            cell.cell_contents = content
        self._cells.clear()
        self._reals = Reals([])
        self._modules, self._numbers, self._switches = [], [], []
        self._refuse, self._watch_numbers = None, lambda _: 0

    def check_failure(self) -> None:
        """After a trace that failed.

        Raises:
            Retrace: if Dynamo was first imported in this trace, which therefore saw nothing
                of what `torch.compile` did in it.
        """
        if not self._is_watched and _is_dynamo_there():
            raise Retrace(first=self.compile)

    def check(self) -> None:
        """After a trace that ended.

        Raises:
            Retrace: if something has to be compiled first.
        """
        if self._wanted or self._lacks:
            raise Retrace(first=self.compile)

    def _meet(self, frame: FrameType) -> bool:
        """Whether a frame is that of a function of `torch.compile`'s that is about to run what it
        has compiled; if so, something is put in the place of what it calls.
        """
        if frame.f_code.co_name != "compile_wrapper":
            return False
        held = frame.f_locals
        if isinstance(held["fn"], _Called):
            return True
        wrappers = _wrappers_of(frame)
        if not wrappers:
            self._refused(
                "the function inside of it cannot be found; call the plain function",
                code="compiled_function",
            )
        for wrapper in wrappers:
            cell = cell_in(wrapper, "fn")
            self._cells.append((cell, held["fn"]))
            cell.cell_contents = _Called(self, wrapper, held["fn"], held["callback"])
        return True

    def _refuse_unseen(self, frame: FrameType, evaluation: Any) -> None:
        """Refuses what a frame is about to run if it is that of a function of `torch.compile`'s, of
        a PyTorch that does not show what it has compiled.
        """
        if frame.f_code.co_name == "compile_wrapper" and callable(
            getattr(evaluation, FROM_STANCE)(frame.f_locals["callback"])
        ):
            self._refused(
                "this version of PyTorch does not show what it runs; call the plain function, compile "
                "the step by torch.compile alone, or install a newer PyTorch",
                code="compiled_function",
            )

    def called(self, called: _Called, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a compiled function by the step."""
        evaluation = frame_evaluation()
        assert evaluation is not None, "it was met"
        code = _written(called.function)
        is_on = callable(getattr(evaluation, FROM_STANCE)(called.callback))
        if not is_on:
            return called.function(*args, **kwargs)
        if code is not None and code.co_filename.startswith(_TAKE_FUNCTIONS):
            look_at_frames(None)
            return called.function(*args, **kwargs)
        if self._depth:  # inside of another one, which is compiled with it
            return self._looking(called.function, args, kwargs)
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
        if code is not None:
            if code.co_filename.startswith(_OPTIMIZERS):
                self._refuse_optimizer()
            self._look_at(code)
            self._put_in_place(code)
        self._callers.append(called)
        try:
            return self._looking(called.function, args, kwargs)
        finally:
            self._callers.pop()

    def outside(self, run: Callable[..., Any], what: str, remedy: str) -> Callable[..., Any]:
        """Stands in for what must not run between the parts of a function whose graph breaks.

        Args:
            run: does it.
            what: for the error.
            remedy: what the user can do.
        """

        def run_outside(*args: Any, **kwargs: Any) -> Any:
            if self._callers and not self._depth:
                self._refused(f"its graph breaks at {what}; {remedy}", code="compiled_graph_break")
            return run(*args, **kwargs)

        return run_outside

    # -- functions that compiled ones call

    def _look(self, frame: Any, *_: Any) -> Any:
        """Answers how a function runs in whose place nothing stands."""
        code = frame.f_code
        file = code.co_filename
        if id(code) in self._own or file == STAND_IN:
            return as_written(inside=True)
        if is_own_file(file) or file.startswith(_BELOW):
            return as_written(inside=False)
        if id(code) in self._compiler.given_up or not is_looked_at(frame):
            return as_written(inside=True)
        if not has_tensors(frame):
            if not self._depth:
                self._give_up(code)
            return as_written(inside=True)
        self._look_at(code)
        if not self._depth:
            self._lacks = True
        return as_written(inside=bool(self._depth))

    def _look_at(self, code: CodeType) -> None:
        """From the next trace on, puts something in the place of a function."""
        if id(code) not in self._looked_at and id(code) not in self._own:
            copy = code.replace()
            self._own[id(copy)] = copy
            self._looked_at[id(code)] = code, stand_in_for(code, self.met), copy

    def _put_in_place(self, code: CodeType) -> None:
        if id(code) in self._in_place:
            return
        if is_precompiled(code):
            raise CaptureError(
                f"{code.co_name} is loaded as a precompiled function, which cannot be captured; call the plain function",
                code="compiled_region",
            )
        put_in_place(code, self._looked_at[id(code)][1], self._is_ours)
        self._in_place[id(code)] = code

    def _is_ours(self, _: Any) -> bool:
        return threading.get_ident() == self._thread and bool(self._callers)

    def _give_up(self, code: CodeType) -> None:
        self._compiler.given_up[id(code)] = code
        if self._has_code(code):
            self._refused(_by_turns(code), code="compiled_region")

    def met(self, frame: Frame) -> Any:
        """The result of a call of a function by compiled code. Nothing is looked at meanwhile."""
        code = frame.code
        copy = self._looked_at[id(code)][2]
        view = frame.view
        if self._depth or id(code) in self._compiler.given_up or not is_looked_at(view):
            return self._run(frame, copy)
        if frame.caller is not None and leaves_callee(frame.caller):
            return self._run(frame, copy)
        if not has_tensors(view):
            self._give_up(code)
            return self._run(frame, copy)
        if code.co_filename.startswith(_OPTIMIZERS):
            self._refuse_optimizer()
        called = self._callers[-1]
        part = _part(code, called)
        self._check_switches()
        frame = replace(frame, given=tuple(map(_fixed, frame.given)))
        # What others close over may be new in each call, and is part of the call.
        contents = frame.contents if part else []
        leaves, spec = pytree.tree_flatten(
            with_made_opened(
                (frame.given, contents),
                lambda value: id(value) in self._held,
                lambda _: False,
                apart=_apart,
            )
        )
        if any(isinstance(one, torch.optim.Optimizer) for one in [*frame.contents, *leaves]):
            self._refuse_optimizer()
        arguments = Arguments.of(
            leaves, self._reals, functools.partial(self._cannot_be_given, part)
        )
        settings = Settings.now()
        live = tuple(one.path for one in self._numbers if is_live(one.get()))
        cells = () if part else tuple(map(id, frame.cells))
        function = self._number_of(called), id(code), cells
        key = function, arguments.key(), str(spec), settings, live
        self._order.append(key)
        if key in self._known:
            known = self._known[key]
            if known is None:
                return self._run(frame, copy)
            found, guarded = known
            self._check_guarded(guarded, view)
            self._used[key] = self._calls[key].call, found
            return self._run(frame, found.code)
        if key not in self._wanted:
            self._kept += (called.wrapper, code, frame.cells, arguments)
            call = CompiledCall(
                called.wrapper,
                code,
                frame.names,
                None if part else frame.cells,
                arguments,
                spec,
                settings,
                shard_groups([module for _, module in self._modules]),
            )
            self._calls[key] = self._wanted[key] = Wanted(call, self._line(called), part)
        self._depth += 1
        before = self._watch_numbers(lambda slot: self._refuse_number() if slot < before else None)
        try:
            # The function takes its branches for compilers, and what these read matters.
            with replaced([(torch.compiler, IS_COMPILING, True)]):
                return self._run(frame, copy)
        finally:
            self._watch_numbers(None)
            self._depth -= 1

    def _number_of(self, called: _Called) -> int:
        """The number of a function of `torch.compile`'s. Functions that it makes of one function
        with equal arguments have the same: they share what Dynamo has compiled.
        """
        made = called.function, compile_options(called.wrapper)
        for number, (function, options) in enumerate(self._made):
            if function is made[0] and options == made[1]:
                return number
        self._made.append(made)
        return len(self._made) - 1

    def _check_guarded(self, guarded: Guarded, view: Any) -> None:
        """Refuses a call where something has changed that Dynamo's code for it depends on."""
        for changed in changes_since(guarded, view):
            self._refused(
                f"before this call the step has changed {changed}, but torch.compile compiles the function for what was there before "
                "the step. Change it before the step, as model.train() does, or pass it to the function as an argument",
                code="compiled_call",
            )  # fmt: skip

    def _check_switches(self) -> None:
        """Refuses a call under other switches of PyTorch's than those that the function would be
        compiled under, which are those around the step.
        """
        for name, read, before in self._switches:
            if not same(before, now := read()):
                self._refused(
                    f"before this call the step has changed PyTorch's {name} from {show(before)} to {show(now)}, but torch.compile would "
                    "compile the function for the former. Change it before the step, or inside of the compiled function",
                    code="compiled_call",
                )  # fmt: skip

    def _run(self, frame: Frame, code: CodeType) -> Any:
        """The result of a call by other code, while the functions that it calls are looked at."""
        return self._looking(function_of(code, frame), *spread(frame.code, frame.given))

    def _looking(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a call, while the functions that it calls are looked at."""
        look_at_frames(self._look)
        try:
            return function(*args, **kwargs)
        finally:
            look_at_frames(None)

    def _refuse_number(self) -> None:
        self._refused(
            "the function uses a Python number that the step changes, and would be compiled for one value of it. Keep the number in a tensor, such as "
            "a buffer, or change it outside of the step",
            code="compiled_call",
        )  # fmt: skip

    def _refuse_optimizer(self) -> NoReturn:
        self._refused(
            "its graph breaks in an optimizer. Do not give an optimizer's step or the whole step to torch.compile: roam plans both "
            "as they are",
            code="compiled_graph_break",
        )  # fmt: skip

    def _line(self, called: _Called) -> Source:
        """The user's line that calls a compiled function; where the step itself is that function,
        the line where it begins.
        """
        here = self._here()
        code = _written(called.function)
        if here.file or code is None:
            return here
        return Source(file=code.co_filename, line=code.co_firstlineno)

    def used(self) -> UsedCode:
        """After a capture: the code that its traces ran."""
        return UsedCode(list(self._used.values()))

    def _is_on_cuda(self, arguments: Any) -> bool:
        """Whether arguments, or tensors from before the step, are on CUDA."""
        leaves = pytree.tree_leaves(arguments)
        fakes = (leaf.fake_device for leaf in leaves if isinstance(leaf, FakeTensor))
        reals = (real.device for real in self._reals)
        return any(device.type == "cuda" for device in chain(fakes, reals))

    def _cannot_be_given(self, part: str, kind: str, remedy: str) -> NoReturn:
        if not part:
            self._refused(f"it is given a {kind}; {remedy}", code="compiled_call")
        self._refused(
            f"its graph breaks, and {part} is given a {kind}, which cannot be recorded; remove the break, or let no such object live "
            "across it",
            code="compiled_graph_break",
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
        line = self._line(self._callers[-1]) if self._callers else self._here()
        self._refuse(
            f"the step calls a function or module that torch.compile has compiled, and {what}",
            code=code,
            source=line if line.file else None,
        )

    # -- between traces

    def compile(self) -> None:
        """Compiles what the trace has met, with the user's objects in place; nothing is run.

        Raises:
            CaptureError: this gives no code that can be recorded.
        """
        wanted, self._wanted = self._wanted, {}
        codes = {id(one.call.code) for one in wanted.values()}
        self._breaks += 1
        if codes <= self._compiled_codes:
            self._rounds += 1
        self._compiled_codes |= codes
        for key, one in wanted.items():
            if self._rounds > _MOST_ROUNDS and one.part:
                raise refused_call(
                    one,
                    f"its graph breaks, and {one.part} is given a function or module that every step makes anew; make it outside "
                    "of the step, or remove the break",
                    code="compiled_graph_break",
                )
            if self._rounds > _MOST_ROUNDS:
                raise refused_call(
                    one,
                    "every step makes it anew; call torch.compile once, outside of the step",
                    code="compiled_call",
                )
            if self._breaks > _MOST_BREAKS:
                raise refused_call(
                    one,
                    f"its graph breaks more than {_MOST_BREAKS} times in a row; remove breaks, or compile smaller parts",
                    code="compiled_graph_break",
                )
            compiled = self.compiled
            with self.around():
                known = self._known[key] = self._compiler.code_for(one)
            if self.compiled > compiled:
                self._check_order(key, one)
                self._made_anew.add(key)
            if known is None:
                if id(one.call.code) in self._compiler.given_up and self._has_code(one.call.code):
                    raise refused_call(one, _by_turns(one.call.code), code="compiled_region")
                continue
            found, _ = known
            self._own[id(found.code)] = found.code
            for resumed in _resumed(found):
                self._look_at(resumed)
            if self.compiled > compiled and has_variable_sizes(found.guard_manager):
                # It is not known yet which sizes of its results vary, and later calls are given
                # these.
                self._rounds -= 1
                break

    def _check_order(self, key: object, wanted: Wanted) -> None:
        """Refuses a step in which a later call of the same function was compiled before this one:
        what Dynamo makes of a call depends on those that it has compiled.
        """
        code = wanted.call.code
        later = self._order[self._order.index(key) :]
        if any(one in self._made_anew and self._calls[one].call.code is code for one in later):
            error = refused_call(
                wanted,
                f"its graph breaks, and {code.co_name} is compiled for several kinds of calls, in an order that only the eager step "
                "knows; run the step once without roam before",
                code="compiled_graph_break",
            )  # fmt: skip
            error.settles = True
            raise error

    def _has_code(self, code: CodeType) -> bool:
        """Whether Dynamo has made something of a function for this step."""
        return any(one is not None and one[0].original is code for one in self._known.values())


def _part(code: CodeType, called: _Called) -> str:
    """Which part of the function that a step calls some code is, in words; empty for the whole
    function.
    """
    if code is _written(called.function):
        return ""
    line = f"{code.co_filename}:{code.co_firstlineno}"
    if code.co_name.startswith(_RESUMED):
        name = code.co_name.removeprefix(_RESUMED).rpartition("_at_")[0]
        return f"what follows the break in {name} at {line}"
    return f"{code.co_name} at {line}, which is compiled by itself,"


def _by_turns(code: CodeType) -> str:
    return (
        f"whether it runs {code.co_name} compiled depends on which of its calls comes first; give it tensors in all calls, or "
        "compile it by itself"
    )


def _resumed(code: Code) -> Iterator[CodeType]:
    """The functions for what follows a graph break that compiled code calls."""
    for name in code.code.co_names:
        function = code.names.get(name)
        if type(function) is FunctionType and function.__code__.co_name.startswith(_RESUMED):
            yield function.__code__
    for constant in code.code.co_consts:
        if isinstance(constant, CodeType) and constant.co_name.startswith(_RESUMED):
            yield constant


@dataclass(frozen=True, slots=True)
class _Called:
    """Stands in a function of `torch.compile`'s for what it calls."""

    regions: Regions
    wrapper: FunctionType
    function: Callable[..., Any]
    callback: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.regions.called(self, args, kwargs)


_wrappers: weakref.WeakSet[FunctionType] = weakref.WeakSet()
"""Functions of `torch.compile`'s that were met, and all others that had the same code then."""


def _is_dynamo_there() -> bool:
    """Whether something may have been compiled in this process."""
    return frame_evaluation() is not None or unseen_calls() is not None


def _wrappers_of(frame: FrameType) -> list[FunctionType]:
    """The function that a frame runs, and what cannot be told from it: those with the same code
    that close over the same.
    """
    code, held = frame.f_code, frame.f_locals

    def runs(function: FunctionType) -> bool:
        return function.__code__ is code and all(
            cell_in(function, name).cell_contents is held[name]
            for name in ("fn", "callback", "self")
        )

    if not any(map(runs, _wrappers)):
        # The collector looks through all objects of the process.
        _wrappers.update(one for one in referrers(code) if type(one) is FunctionType)
    return [function for function in _wrappers if runs(function)]


def _written(function: Callable[..., Any]) -> CodeType | None:
    """The code of the user's function that a call of this one runs first."""
    if type(function) is MethodType and function.__func__ in CALLS:
        function = getattr(function.__self__, "forward", function)
    function = getattr(function, "__func__", function)
    return function.__code__ if type(function) is FunctionType else None
