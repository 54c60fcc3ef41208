"""What a recording knows of values: live numbers, and what Python code may ask of a tensor."""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch.nn.utils.rnn import PackedSequence

from roam.own_code import is_own_file
from roam.program.checks import check, holds
from roam.program.ir import Call, ComputedGuard, Program, Ref, Source, ref_to
from roam.state.equality import MISSING, is_numpy_float
from roam.state.global_state import ANOMALY
from roam.state.live_scalars import LOOK_UP, MATH, ROUNDING, LiveNode, is_of_numpy, nearest
from roam.state.references import ArgumentReference, OptimizerReference
from roam.state.sizes import expressions_in
from roam.state.trace_context import TraceContext
from roam.torch_compat.private import (
    DisableAutocast,
    DisableTorchFunction,
    c_pointer,
    called_overloads,
    disable_current_modes,
    pytree,
)
from roam.tracing.cuda_estimate import absent
from roam.tracing.fake_kernels.cache import LIVE_FLOAT, LIVE_INT, FakeKernels
from roam.tracing.fake_kernels.sized import recorded_number
from roam.tracing.numbers.conditions import passing_answer
from roam.tracing.numbers.dynamic_shapes import Decided, contents_of, shape_refusal
from roam.tracing.numbers.rng import Watch
from roam.tracing.numbers.scalar_guards import (
    CHANCE,
    MayAsk,
    Slices,
    may_be_asked,
    may_be_fixed,
    may_decide,
)
from roam.tracing.recording.custom_ops import hands_on, is_mark
from roam.tracing.recording.recorded_slots import Places, Slots

aten = torch.ops.aten

_GIVE_FLOATS = {operator.truediv, float, *MATH.values()}
_GIVE_INTEGERS = {int, nearest, *ROUNDING}
_GIVE_PYTHONS = {float, *MATH.values(), *_GIVE_INTEGERS}
"""Functions that never give a `numpy.float64`, whatever they are given."""
_STAYS = (
    "use a form that stays on tensors, such as torch.where, or return the value from the step and look at it outside; pass "
    f"validate_args=False to a distribution; if chance decides, {CHANCE}"
)
"""What to do about a value that Python must not see."""
_ASKED = -2
"""The slot of a computed guard's answer that is no value of the step's."""


def _nothing(reference: Any, program: Program, slot: int) -> bool:
    return False


class Values(Slots):
    """Also records arithmetic with numbers, and answers what Python asks where a plan can hold for
    the answer.
    """

    def __init__(
        self,
        frames: Places,
        real_arguments: list[Any],
        kernels: FakeKernels,
        watch: Watch | None,
        number_of: Callable[[Any], Any],
        has_code: bool,
    ) -> None:
        super().__init__(frames, real_arguments, kernels, watch)
        self.is_over = False
        self._given: dict[int, tuple[Any, float]] = {}
        self._plain: dict[str, Any] = {}
        self._calculated: dict[Any, Any] = {}
        self._has_code = has_code
        self._handed: dict[float, Any] = {}
        """Plain numbers that stand for live ones on their way to an operator of others."""
        self._slices = Slices(self.program)
        self._number_of = number_of
        self._fills_empty = False
        """Whether C++ code that makes an uninitialized tensor writes to it, too."""
        self._lacks_cuda = not torch.cuda.is_available()

    def close(self) -> None:
        super().close()
        self.is_over = True
        self._calculated.clear()  # live numbers, which know the recorder

    # -- numbers

    def add_live(self, reference: Any, origin: str) -> Any:
        """A live float that its reference holds; nothing that it decides is answered. Or a live
        integer, of which conditions become computed guards.
        """
        live = self._live(reference.kind == "integer", origin)
        self.program.referenced.append((reference, live.node.slot))
        return live

    def add_number(self, reference: Any, value: float) -> Any:
        """A live number that its reference holds; whether it is an integer must not change.
        Comparisons are answered by its present value, and noted.
        """
        live = self._live(type(value) is int, reference.path)
        live.node.is_numpys = is_numpy_float(value)
        self.program.referenced.append((reference, live.node.slot))
        self._given[live.node.slot] = reference, value
        is_kind = is_integer if type(value) is int else is_float
        self.decided(live.node.slot, is_numpy_float if is_numpy_float(value) else is_kind, ())
        return live

    def decided(
        self, slot: int, function: Callable[..., bool], others: tuple[float, ...]
    ) -> bool | None:
        """The outcome of a comparison of a given number with constants, which the program then
        assumes; None for any other number.
        """
        self.use_number(slot)
        if slot not in self._given:
            return None
        reference, value = self._given[slot]
        decision = (reference, function, others, bool(function(value, *others)))
        if decision not in self.program.decisions:
            self.program.decisions.append(decision)
        return decision[-1]

    def add_plain(self, reference: Any, value: float) -> float:
        """A number that its reference holds and keeps as it is: the trace shows what the step does
        with plain numbers.
        """
        self._plain[reference.path] = value
        return value

    def is_as_given(self, reference: Any) -> bool:
        """Whether a reference of a given number still holds it."""
        if reference.path in self._plain:
            return reference.get() is self._plain[reference.path]
        node = getattr(reference.get(), "node", None)
        return (
            isinstance(node, LiveNode)
            and node.slot in self._given
            and self._given[node.slot][0] is reference
        )

    def scalar_call(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """Records Python arithmetic on live numbers."""
        phase, source = self.frames.here()
        gives_integer = function not in _GIVE_FLOATS
        arguments = []
        for operand in operands:
            if isinstance(operand, (float, torch.SymFloat)) and function not in _GIVE_INTEGERS:
                gives_integer = False
            if not isinstance(operand, (torch.SymFloat, torch.SymInt)):
                arguments.append(operand)
            elif (slot := self.slot_of(operand)) is not None:
                arguments.append(ref_to(slot))
            elif (size := recorded_number(operand)) is not None:
                arguments.append(size)
            else:
                self.refuse(
                    "the step was given a symbolic number of another tracer, such as "
                    "torch.compile; call it with plain numbers, outside of other tracers",
                    code="foreign_symbol",
                    source=source,
                )
        # Equal arithmetic, such as each parameter's `1 - lr * weight_decay`, is done once.
        form = (
            function,
            *(argument if isinstance(argument, Ref) else repr(argument) for argument in arguments),
            *expressions_in(arguments),  # equal sizes may part
        )
        if form in self._calculated:
            return self._calculated[form]
        if (
            gives_integer
            and function is operator.pow
            # With an exponent that is known not to be negative, the result is an integer.
            and not (type(operands[1]) is int and operands[1] >= 0)
        ):
            self.refuse(
                "an integer is raised to an integer power that is negative or changes from call "
                "to call, which may give an int or a float; write the exponent as a float",
                code="live_power",
                source=source,
            )
        live = self._live(gives_integer, f"arithmetic at {source}")
        live.node.is_numpys = function not in _GIVE_PYTHONS and any(map(is_of_numpy, operands))
        self._add_call(function, tuple(arguments), live.node.slot, (phase, source))
        self._calculated[form] = live
        return live

    def handed_on(self, number: Any) -> Any:
        """A plain number for code in C++ that asks for a live number's value to hand it on to an
        operator of others; None if it asks for another purpose.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_own_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return None
        found = called_overloads(frame.f_code, frame.f_locals.__getitem__)
        is_integer = number.node.is_int()
        given = (frame.f_locals.get("args"), frame.f_locals.get("kwargs"))
        if not found or not all(hands_on(func, is_integer, *given) for func in found):
            return None
        slot = number.node.slot
        # No two numbers have the same, and no code has written one of these.
        carrier = -(2**61) - slot if is_integer else math.ldexp(1.0 + slot / 2**30, -901)
        self._handed[carrier] = number
        return carrier

    def _taken(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """An operator's arguments with the numbers that have been handed on to it."""
        if is_mark(func):
            return args, kwargs
        taken = set()

        def number(value: Any) -> Any:
            if type(value) not in (int, float) or value not in self._handed:
                return value
            taken.add(value)
            return self._handed[value]

        args, kwargs = pytree.tree_map(number, (args, kwargs))
        if len(taken) < len(self._handed):
            self._refuse_handed(str(func))
        self._handed.clear()
        return args, kwargs

    def _refuse_handed(self, operator: str) -> NoReturn:
        self.refuse(
            "a number that changes from call to call is given to an operator that does not get it as it is; pass a tensor, or a "
            "constant",
            code="value_reached_python", op=operator,
        )  # fmt: skip

    def forget_arithmetic(self) -> None:
        """Does later arithmetic again, whatever has been calculated before: that may be left out of
        a run.
        """
        self._calculated.clear()

    def _live(self, is_integer: bool, origin: str) -> Any:
        slot = len(self.program.slots)
        self.program.slots.append(None)
        self._refs.append(ref_to(slot))
        self._signatures.append(LIVE_INT if is_integer else LIVE_FLOAT)
        self._sized_signatures.append(self._signatures[-1])
        node = LiveNode(cast(TraceContext, self), slot, is_integer, origin)
        return node.number()

    # -- what Python asks

    def branch(self, function: Callable[..., bool], operands: tuple[Any, ...]) -> bool | None:
        """The answer of a comparison, asked for again at every call; None if nobody can say."""
        slot = self.scalar_call(function, operands).node.slot
        known = self.known_value(slot, may_be_asked)
        return self._checked(slot, *self.frames.here()) if known is None else known

    def _item(self, func: Any, tensor: Any) -> Any:
        phase, source = self.frames.here()
        if (
            torch.is_anomaly_enabled()
            and torch.is_anomaly_check_nan_enabled()
            and phase == "backward"
        ):
            self.refuse(ANOMALY, code="anomaly_detection", source=source)
        slot = self._slot_of_argument(tensor, func, source)
        meta = self.program.slots[slot]
        assert meta is not None
        if meta.dtype is torch.bool:
            return self._known_answer(slot, func, phase, source)
        if meta.dtype.is_complex:
            known = self.known_value(slot, _nothing)
            return self._refuse_value(slot, func, source) if known is None else known
        is_integer = not meta.dtype.is_floating_point
        # `torch.div(x.size(0), 2, rounding_mode="trunc")` as a size, which C++ wants to know.
        if is_integer and (known := self.known_value(slot)) is not None:
            return known
        live = self._live(is_integer, f".item() at {source}")
        self._add_call(func, (Ref(slot),), live.node.slot, (phase, source))
        return live

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """What a kernel says that compares tensors."""
        phase, source = self.frames.here()
        call = Call(func, (), {}, (), False, phase, source)
        call.args, call.kwargs = self._recorded(args, call), self._recorded(kwargs, call)
        live = self._live(True, f"{func} at {source}")
        call.outputs = (live.node.slot,)
        self.program.calls.append(call)
        if func is aten.allclose.default and phase == "backward":
            # The gradient of `linalg.svd` asks, in C++, and raises an error where it is not so.
            self._add_check(live.node.slot, True, phase, source, holds)
            return True
        return self._known_answer(live.node.slot, func, phase, source)

    def _known_answer(self, slot: int, func: Any, phase: str, source: Source) -> bool:
        """A yes or no that Python asks for, known beforehand or taken for granted."""
        known = self.known_value(slot, may_be_asked)
        if known is None:
            known = self._checked(slot, phase, source)
        return self._refuse_value(slot, func, source) if known is None else bool(known)

    def _checked(self, slot: int, phase: str, source: Source) -> bool | None:
        """The answer with which a check in the step's code passes, which a plan takes for granted
        and a run checks; None if the code goes on with either answer.
        """
        answer = passing_answer() if self._has_code else None
        if answer is not None:
            self._add_check(slot, answer, phase, source)
        return answer

    def _add_check(
        self, slot: int, answer: bool, phase: str, source: Source, by: Callable[..., None] = check
    ) -> None:
        """Has runs check a value."""
        self._add_call(by, (Ref(slot), answer), None, (phase, source), is_check=True)

    def refuse_asked(self, slot: int, origin: str) -> NoReturn:
        """Refuses code that needs the value of a number from `origin`."""
        self.refuse(
            f"Python needs the number from {origin} itself here, as an index, a slice, a size, a C++ float or text that is kept, "
            "and a plan would keep the number of the capture; write x.item() for float(x) where you only calculate; for an index "
            "v[k.view(1)]; for a size torch.where(torch.arange(len(x)) < k, x, 0); for a function that takes a float its formula "
            'by operators; to show it print(f"{x.item():.3f}"); or calculate the number outside of the step and pass it as an '
            f"argument, of which each value gets a plan of its own; {LOOK_UP}; otherwise {_STAYS}",
            code="value_reached_python",
        )

    def _refuse_value(self, slot: int, func: Any, source: Source) -> NoReturn:
        self.refuse(
            "Python uses the value of a tensor here, and a plan would keep the outcome of the "
            f"capture; {_STAYS}",
            code="value_reached_python", op=str(func), source=source,
        )  # fmt: skip

    # -- what is known beforehand

    def known_value(self, slot: int, may_ask: MayAsk = _nothing) -> Any:
        """The Python value of a slot that depends on nothing but constants written in the step;
        None for any other.

        Library code asks such questions of tensors that it has just made (`torch.arange(n)`), and
        the answer never changes. The calls behind the slot are run for real.

        Args:
            slot: the value.
            may_ask: whether it may depend on what a reference holds before the step too: the call's
                real arguments (`attention_mask.all()`), numbers that are there. The answer is then
                asked for again at every call, and another one means another plan.
        """
        return self._answered(self._guard(slot, may_ask))

    def fixed_value(self, slot: int) -> Any:
        """The Python value of a number that a plan may hold on to; None for any other."""
        self.use_number(slot)
        return self.known_value(slot, may_be_fixed)

    def made_number(self, slot: int) -> Callable[[], Any] | None:
        """Calculates the number that this step would leave in a slot; None if it depends on
        anything but numbers.
        """
        guard = self._guard(slot, may_be_asked)
        return None if guard is None else functools.partial(self._asked, guard)

    def _guard(self, slot: int, may_ask: MayAsk, asked: Call | None = None) -> ComputedGuard | None:
        references = {number: reference for reference, number in self.program.referenced}
        _, source = self.frames.here()
        return self._slices.guard(slot, references, may_ask, source, asked)

    def _answered(self, guard: ComputedGuard | None) -> Any:
        """A guard's answer, for which the program then holds; None if there is none."""
        if guard is None:
            return None
        try:
            answer = self._asked(guard)
        except Exception as error:
            # The step's code may catch it, as it does in eager PyTorch.
            if guard.inputs:
                self._slices.add(guard, type(error))
            raise
        if guard.inputs and answer is not None:
            self._slices.add(guard, answer)
        elif any(
            self._number_of(reference) is MISSING
            for reference in guard.uses[0]
            if isinstance(reference, OptimizerReference)
        ):
            self.refuse(
                "a condition depends on a number that the previous step makes from weights or data; "
                "call the compiled step, which captures the second step after the first has run",
                code="unknown_state",
            )
        return answer

    def _asked(self, guard: ComputedGuard) -> Any:
        """A guard's answer for what is there where a plan begins."""

        def value(slot: int, reference: Any) -> Any:
            if isinstance(reference, ArgumentReference):
                return reference.find(self._real_arguments)
            return self._given[slot][1] if slot in self._given else self._number_of(reference)

        on_device = absent.OnCpu() if self._lacks_cuda else nullcontext()
        with disable_current_modes(), DisableAutocast(), DisableTorchFunction(), on_device:
            return guard.ask(list(map(value, guard.inputs, guard.uses[0])))

    # -- shapes that values decide

    def refuse_shape(self, operator: str, source: Source) -> NoReturn:
        """Refuses an operator if nobody can know its result's shape before the step runs."""
        self.refuse(shape_refusal(operator), code="data_dependent", op=operator, source=source)

    def _decided(self, shape: Decided, call: Call) -> tuple[Any, Any]:
        """The results of a call whose shapes values decide, and the place and value of one of them,
        or None.
        """
        operands = self._recorded(shape.operands, call)
        asked = Call(shape.ask, operands, {}, (_ASKED,), False, call.phase, call.source)
        is_ours = self._watch is not None  # nobody asks again for a graph that others made
        answer = self._answered(self._guard(_ASKED, may_decide, asked)) if is_ours else None
        if answer is None and self._has_code and shape.usual is not None:
            condition, answer = shape.usual
            flag: Any = condition(
                lambda func, *args: self._call(func, args, {}, call.phase, call.source)  # type: ignore[attr-defined]
            )
            slot = self._slot_of_argument(flag, call.target, call.source)
            self._add_check(slot, True, call.phase, call.source, holds)
        if answer is None:
            self.refuse_shape(call.name, call.source)
        with disable_current_modes():
            value = None if shape.value is None else shape.value(answer)
        return shape.make(answer), value

    def with_values(self, packed: PackedSequence) -> PackedSequence:
        """A packed sequence from before the step, with real batch sizes, for which the program then
        holds.
        """
        sizes = packed.batch_sizes
        where = self.frames.here()
        slot = self._slot_of_argument(sizes, contents_of, where[1])
        asked = Call(contents_of, (Ref(slot),), {}, (_ASKED,), False, *where)
        answer = self._answered(self._guard(_ASKED, may_decide, asked))
        return (
            packed
            if answer is None
            else packed._replace(batch_sizes=self._real(sizes, torch.tensor(answer)))
        )

    def padded(self, pad: Callable[..., Any], *packed: Any) -> Any:
        """The result of padding a packed sequence. C++ code writes the lengths into memory, which
        has to be real.
        """
        self._fills_empty = True
        try:
            padded, lengths = pad(*packed)
        finally:
            self._fills_empty = False
        return padded, aten.lift_fresh.default(lengths)

    def _real(self, fake: Any, value: torch.Tensor) -> torch.Tensor:
        """A real tensor for the step instead of a fake, for code in C++ that looks at its
        values.
        """
        slot = self.slot_of(fake)
        assert slot is not None
        with disable_current_modes():
            copy = value.clone()
        value._roam_slot = self, slot  # type: ignore[attr-defined]
        self._storage_numbers[c_pointer(value.untyped_storage())] = self.program.storage_of(slot)
        self._twins[id(value)] = value, fake, copy
        self._slices.held.append((copy, slot))
        return value


def is_integer(number: object) -> bool:
    """Whether a number is a Python integer."""
    return type(number) is int


def is_float(number: object) -> bool:
    """Whether a number is a Python float."""
    return type(number) is float
