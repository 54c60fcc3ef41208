"""The recorder: a dispatch mode that writes down every operator of a step run on fake tensors."""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch.nn.utils.rnn import PackedSequence

from roam.capture.cuda_estimate import absent
from roam.capture.tracing import (
    collectives,
    custom_ops,
    dtensors,
    fully_shard,
    multi_tensor,
)
from roam.capture.tracing.branch_answers import Replay
from roam.capture.tracing.conditions import passing_answer
from roam.capture.tracing.dynamic_shapes import Decided, contents_of, decided
from roam.capture.tracing.fake_cache import LIVE_FLOAT, LIVE_INT, PLAIN, FakeKernels, tensors_in
from roam.capture.tracing.fake_identity import own_attributes
from roam.capture.tracing.gradient_history import nodes_behind
from roam.capture.tracing.kernel_facts import (
    ANSWERS,
    HIDDEN_ALIAS,
    HIDDEN_MUTATION,
    REFUSED,
    KernelFacts,
    facts_of,
)
from roam.capture.tracing.meta_corrections import (
    bytes_at_least,
    is_spread,
    looks_for_zeros,
    without_masked,
)
from roam.capture.tracing.rng import Watch, forget_idle_states
from roam.capture.tracing.scalar_guards import (
    CHANCE,
    Slices,
    add_guard,
    may_be_asked,
    may_be_fixed,
    may_be_tabled,
    may_decide,
)
from roam.capture.tracing.source_location import is_run_by
from roam.distributed.collectives import Launch
from roam.errors import CaptureError
from roam.interrupts import deliver_interrupts
from roam.kernels.recurrent import as_run
from roam.program.checks import check
from roam.program.ir import (
    Call,
    ComputedGuard,
    Joined,
    Program,
    Ref,
    Source,
    Storage,
    TensorMeta,
    assign_data,
    ref_to,
)
from roam.program.operators import is_foreign
from roam.state.equality import MISSING
from roam.state.global_state import ANOMALY
from roam.state.live_scalars import MATH, FixedNode, LiveFloat, LiveInt, LiveNode
from roam.state.references import ArgumentReference, OptimizerReference
from roam.torch_compat.private import (
    TENSOR_DATA,
    DataDependentOutputException,
    DisableAutocast,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    UnsupportedOperatorException,
    base_name,
    c_pointer,
    disable_current_modes,
    holds_mask,
    is_dtensor,
    layout_of,
    local_of,
    pytree,
    schema_of,
    storage_pointer,
)

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_LITERALS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
"""What takes in a tensor that is written out in code; the second in graphs of compilers."""
_identity = id  # while a step is traced, what its code calls by this name asks whose code it is

_BY_DATA = (
    "the shape of its result depends on floating-point data or on what the step computes; use a "
    "form with a fixed shape: torch.where with three arguments, masked_fill, or a product with "
    "the mask. Integer and boolean tensors that are there before the step, among its arguments or "
    "in buffers, may decide shapes"
)
_REPLACED = (
    "the tensor was given other data where capture could not see it; write p.data = x in Python, "
    "or p.data.copy_(x)"
)
_SET_UNSEEN = (
    "the step seeds a random generator or sets its state by a method of the generator, which "
    "capture cannot see; use torch.manual_seed, torch.set_rng_state or torch.random.fork_rng"
)
_GIVE_FLOATS = {operator.truediv, float, *MATH.values()}
_DISTRIBUTIONS = os.path.dirname(torch.distributions.__file__) + os.sep
UNKNOWN = -1
"""The slot of a number that nobody can know during the step."""
_ASKED = -2
"""The slot of a computed guard's answer that is no value of the step's."""
_LIVE_STAND_IN = 0.5
"""Kernels on fake tensors see this in place of a live number; neither shapes nor dtypes depend on
it."""


MayAsk = Callable[[Any, Program, int], bool]
"""Whether a computed guard may look at what a reference holds in a slot."""


def _nothing(reference: Any, program: Program, slot: int) -> bool:
    return False


class Places(Protocol):
    """Knows where the operator that is being dispatched now comes from."""

    def here(self) -> tuple[str, Source]:
        """Its phase and source."""


@dataclass(frozen=True, slots=True)
class Table:
    """Makes a tensor that hangs on constants and buffers alone; where those are fake, it is a
    fake.
    """

    guard: ComputedGuard
    fake: Any
    storage: int

    def __call__(self) -> Any:
        made = self.guard.value([reference.get() for reference in self.guard.uses[0]])
        return self.fake if made is None else made


class Recorder(TorchDispatchMode):
    """Records one run of a step into `program`. Use as a context manager inside the fake mode."""

    def __init__(
        self,
        frames: Places,
        real_arguments: list[Any],
        kernels: FakeKernels,
        watch: Watch | None = None,
        number_of: Callable[[Any], Any] = lambda _: MISSING,
        results: Mapping[int, tuple[torch.Tensor, Any]] | None = None,
        answers: Replay | None = None,
    ) -> None:
        """A recording of nothing yet.

        Args:
            frames: tells where operators come from.
            real_arguments: the call's flattened arguments as the user gave them.
            kernels: remembers across recordings what kernels make of fake tensors.
            watch: over random generators.
            number_of: the number that a reference's tensor is where a plan begins.
            results: by identity, real tensors that the step may come by as they are, each with its
                fake.
            answers: what to take for granted where the step's code goes on either way; None: it is
                refused there.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = Program()
        self.frames = frames
        self._real_arguments = real_arguments
        self._kernels = kernels
        self._refs: list[Ref] = []
        self._signatures: list[int] = []
        self._storage_numbers: dict[int, int] = {}
        self._kept: list[
            Any
        ] = []  # Storages stay alive, so that none's address is given out twice.
        self._tagged: dict[int, tuple[FakeTensor, int]] = {}
        self._ends: dict[Any, int] = {}
        """Per node of autograd's that stands for a history from before the step, the slot of its
        tensor."""
        self._assigned: dict[int, tuple[str, Source]] = {}
        self.assignments = 0
        """How often tensors have been given other data so far."""
        self._given: dict[int, tuple[Any, float]] = {}
        self._plain: dict[str, Any] = {}
        self._calculated: dict[Any, Any] = {}
        self._answers = answers
        self._seen: dict[int, float] = {}
        """Per slot of a number, what a watched run saw of it."""
        self._watch = watch
        self._slices = Slices(self.program)
        self._reshaped: dict[int, tuple[ArgumentReference, int, FakeTensor]] = {}
        self._number_of = number_of
        self._results = {} if results is None else results
        self._held: list[Any] = []
        self._bases: dict[int, Ref | None] = {}
        """Per storage, by its pointer, of which the memory has been given back: what has all of the
        memory that was taken again; None while none is."""
        self._joined: dict[int, tuple[Any, Joined]] = {}
        """By identity, distributed tensors with what stands for them in the program."""
        self._refusal: CaptureError | None = None
        self._twins: dict[int, tuple[torch.Tensor, Any, torch.Tensor]] = {}
        """By identity, real tensors that the step was given in the place of fakes: with the fake
        and a copy."""
        self._forms: dict[str, ComputedGuard] = {}
        self._fills_empty = False
        """Whether C++ code that makes an uninitialized tensor writes to it, too."""
        self._lacks_cuda = not torch.cuda.is_available()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while a step is recorded, and to say so at every operator takes a
        # tenth of the time.
        return False

    # -- values that exist before the step

    def add_referenced(self, reference: Any, tensor: FakeTensor, name: str) -> int:
        """Registers a tensor that its reference holds before the step; the slot it gets."""
        slot = self._add_tensor(local_of(tensor), creator=-1, name=name)
        # Only these are kept: a reference to any other would change how autograd accumulates
        # gradients.
        self._tagged[id(tensor)] = tensor, slot
        if tensor.grad_fn is not None:
            self._ends[tensor.grad_fn] = slot
        self.program.referenced.append((reference, slot))
        if is_dtensor(tensor):
            self._joined[id(tensor)] = tensor, Joined(layout_of(tensor), reference)
            self.program.given_layouts[reference.path] = layout_of(tensor)
        return slot

    def add_constant(self, tensor: FakeTensor, real: torch.Tensor) -> int:
        """Registers a tensor that the program itself holds; the slot it gets."""
        slot = self._add_tensor(tensor, creator=-1, name=f"constant_{len(self.program.constants)}")
        self.program.constants.append((real, slot))
        return slot

    def add_live(self, reference: Any, origin: str) -> Any:
        """A live float that its reference holds; nothing that it decides is answered."""
        live = self._live(False, origin)
        self.program.referenced.append((reference, live.node.slot))
        self._seen[live.node.slot] = self._real_arguments[reference.index]
        return live

    def add_number(self, reference: Any, value: float) -> Any:
        """A live number that its reference holds, integer or not for as long as the plan is used.
        Comparisons are answered by its value of now, and noted.
        """
        live = self._live(type(value) is int, reference.path)
        self.program.referenced.append((reference, live.node.slot))
        self._given[live.node.slot] = reference, value
        self._seen[live.node.slot] = value
        self.decided(live.node.slot, is_integer if type(value) is int else is_float, ())
        return live

    def decided(
        self, slot: int, function: Callable[..., bool], others: tuple[float, ...]
    ) -> bool | None:
        """What a comparison of a given number with constants says, as the program then takes for
        granted; None for any other number.
        """
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

    def is_original(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one from before the step."""
        return id(tensor) in self._tagged

    def history_of(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """The references of the tensors from before the step to which a backward pass from a tensor
        would come.
        """
        found = {
            self._ends.get(node, self.slot_of(getattr(node, "variable", None)) if is_last else None)
            for node, is_last in nodes_behind(tensor)
        }
        return tuple(reference for reference, slot in self.program.referenced if slot in found)

    def given(self) -> list[tuple[FakeTensor, int]]:
        """(tensor, slot): the tensors from before the step."""
        return list(self._tagged.values())

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

    def is_unknown(self, value: Any) -> bool:
        """Whether nobody can know a number during the step."""
        node = getattr(value, "node", None)
        return isinstance(node, LiveNode) and node.slot == UNKNOWN

    def slot_of(self, value: Any) -> int | None:
        """The slot of a tensor or live number of this recording; None for anything else."""
        if self._results:
            value = self._stand_in(value)
        if isinstance(value, torch.Tensor):
            tag = getattr(local_of(value), "_roam_slot", None)
            return int(tag[1]) if tag is not None and tag[0] is self else None
        node = (
            getattr(value, "node", None)
            if isinstance(value, (torch.SymFloat, torch.SymInt))
            else None
        )
        if not isinstance(node, LiveNode) or node.trace is not self:
            return None
        if node.slot == UNKNOWN:
            self.refuse(
                f"{node.origin} is not known until the step has run; use it outside of the step",
                code="unknown_number",
            )
        return node.slot

    def _stand_in(self, value: Any) -> Any:
        """The fake for a real tensor that the step has come by, which is then a constant; any other
        value as it is.
        """
        if _identity(value) not in self._results:
            return value
        real, fake = self._results[_identity(value)]
        is_known = getattr(fake, "_roam_slot", (None,))[0] is self
        number = self._storage_numbers.get(c_pointer(fake.untyped_storage()))
        if not is_known and all(
            number != self.program.storage_of(slot) for _, slot in self.program.referenced
        ):
            self.add_constant(fake, real)
            self._held.append(fake)
        return fake

    def _with_stand_ins(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._with_stand_ins, value))
        if isinstance(value, dict):
            return {key: self._with_stand_ins(item) for key, item in value.items()}
        return self._stand_in(value)

    def close(self) -> None:
        """Takes the marks off the tensors again, and gives arguments the shapes that they had."""
        for _, slot, fake in self._reshaped.values():
            meta = self.program.slots[slot]
            assert meta is not None
            fake.as_strided_(meta.shape, meta.stride, meta.offset)
        self._reshaped.clear()
        given = (local_of(tensor) for tensor, _ in self._tagged.values())
        for tensor in (*self._held, *given):
            if getattr(tensor, "_roam_slot", (None,))[0] is self:
                del tensor._roam_slot
        self._tagged.clear()
        self._ends.clear()
        self._twins.clear()
        self._held.clear()
        self._joined.clear()
        self._calculated.clear()  # live numbers, which know the recorder
        self._watch = (
            None  # it holds generators' states, and a recorder lives until its cycles are found
        )

    # -- assigned data

    def assign(self, tensor: Any, data: Any) -> None:
        """What `tensor.data = data` does: other data under the same name, history and version
        counter.
        """
        slot = self.slot_of(tensor)
        if slot is None or not isinstance(data, torch.Tensor):
            TENSOR_DATA.__set__(tensor, data)
            return
        if tensor.device != data.device:
            self.refuse(
                "the step gives a tensor data on another device; move the tensor outside of the "
                "step",
                code="storage_replaced",
            )
        alias = (
            data.detach()
        )  # shares the data's memory, and is nothing that could be given other data itself
        self._assigned[id(tensor)] = phase, source = self.frames.here()
        self.assignments += 1
        tensor._roam_slot = (self, self._slot_of_argument(alias, "Tensor.data", source))
        TENSOR_DATA.__set__(tensor, alias)

    def note_assigned(self) -> None:
        """Records, as the last of all, which tensors from before the step are left with other
        data.
        """
        for tensor, slot in self._tagged.values():
            data = self.slot_of(tensor)
            is_reshaped = id(tensor) in self._reshaped and id(tensor) not in self._assigned
            if data is None or self.program.slots[data] == self.program.slots[slot] or is_reshaped:
                continue
            phase, source = self._assigned[id(tensor)]
            call = Call(
                assign_data,
                (Ref(slot), Ref(data)),
                {},
                (None,),
                False,
                phase,
                source,
                mutates=(slot,),
            )
            self.program.calls.append(call)

    # -- recording

    def refuse(
        self, message: str, *, code: str, op: str = "", source: Source | None = None
    ) -> NoReturn:
        """Raises the typed error that names operator and user line."""
        if source is None:
            _, source = self.frames.here()
        where = f"{op} at {source}" if op else str(source)
        message = message.replace(f" at {source}", "")  # which `where` says already
        error = CaptureError(f"{where}: {message}", code=code, operator=op, source=str(source))
        self._refusal = self._refusal or error
        raise error

    def refuse_collective(self, name: str) -> NoReturn:
        """Refuses what brings processes together."""
        self.refuse(
            "a plan cannot launch this operation of torch.distributed; use all_reduce, broadcast, or "
            "another one that plans launch (docs/how-to/distributed.md), or call it outside of the "
            "step: between two compiled functions, one for the backward pass, whose gradients stay "
            "in .grad, and one for the update",
            code="collective", op=name,
        )  # fmt: skip

    def add_collective(self, target: Launch, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Records a collective's launch, and its wait."""
        _, source = self.frames.here()
        written, read = (
            [self._slot_of_argument(tensor, target.kind, source) for tensor in tensors]
            for tensors in (outputs, inputs)
        )
        pending = self._live(True, f"{target.kind} at {source}").node.slot
        self.program.calls += collectives.calls_of(
            self.program, target, written, read, pending, source
        )

    def scalar_call(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """Records Python arithmetic on live numbers."""
        phase, source = self.frames.here()
        gives_integer = function not in _GIVE_FLOATS
        arguments = []
        for operand in operands:
            if isinstance(operand, (float, torch.SymFloat)):
                gives_integer = False
            if not isinstance(operand, (torch.SymFloat, torch.SymInt)):
                arguments.append(operand)
            elif (slot := self.slot_of(operand)) is not None:
                arguments.append(ref_to(slot))
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
        )
        if form in self._calculated:
            return self._calculated[form]
        if gives_integer and function is operator.pow:
            self.refuse(
                "an integer that changes from call to call is raised to an integer power, which "
                "may give an int or a float; write the exponent as a float",
                code="live_power",
                source=source,
            )
        live = self._live(gives_integer, f"arithmetic at {source}")
        self.program.calls.append(
            Call(function, tuple(arguments), {}, (live.node.slot,), False, phase, source)
        )
        self._calculated[form] = live
        if all(
            not isinstance(argument, Ref) or argument.slot in self._seen for argument in arguments
        ):
            values = [
                self._seen[item.slot] if isinstance(item, Ref) else item for item in arguments
            ]
            with suppress(ArithmeticError, ValueError, TypeError):
                self._seen[live.node.slot] = function(*values)
        return live

    def forget_arithmetic(self) -> None:
        """Does later arithmetic again, whatever has been calculated before: that may be left out of
        a run.
        """
        self._calculated.clear()

    def unknown(self, origin: str) -> Any:
        """A number that nobody can know during the step; any use of it is refused."""
        return LiveFloat(LiveNode(self, UNKNOWN, False, origin))

    def references(self, value: Any, user: str) -> Any:
        """The nest with a `Ref` for every tensor and live number."""
        if is_dtensor(value):
            self.refuse(
                f"{user} is given a DTensor; give it value.to_local(), or a number",
                code="dtensor",
            )
        if isinstance(value, (torch.Tensor, torch.SymFloat, torch.SymInt)):
            slot = self.slot_of(value)
            if slot is None:
                self.refuse(
                    f"{user} is given a tensor that capture could not find; pass it to the step as "
                    "an argument, or keep it in a module, a list or an attribute that the step's "
                    "function can reach",
                    code="unknown_tensor",
                )
            return Ref(slot)
        if isinstance(value, (tuple, list)):
            items = [self.references(item, user) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self.references(item, user) for key, item in value.items()}
        return value

    def generator_call(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        result: torch.Tensor | None = None,
    ) -> None:
        """Records what a Python function does to a random generator, in the sequence of the random
        operators.
        """
        phase, source = self.frames.here()
        index = len(self.program.calls)
        name = f"{function.__name__}_{index}"
        output = None if result is None else self._add_tensor(result, creator=index, name=name)
        references = self.references(arguments, function.__name__)
        self.program.calls.append(
            Call(function, references, {}, (output,), False, phase, source, random=True)
        )

    def _draw(self, call: Call, arguments: tuple[Any, ...]) -> None:
        """Has the watch draw in the place of a random operator."""
        if self._watch is None:
            return
        if not self._watch.is_intact():
            self.refuse(_SET_UNSEEN, code="generator_state", source=call.source)
        self._watch.draw(arguments)

    def _generator(self, generator: torch.Generator, call: Call) -> torch.Generator:
        known = generator if self._watch is None else self._watch.known(generator)
        if known is None:
            self.refuse(
                "it draws from a generator that capture could not find, or that the step itself "
                "makes; make generators outside of the step, and pass them to it",
                code="generator_state", op=call.name, source=call.source,
            )  # fmt: skip
        return known

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE and isinstance(
            args[0], FakeTensor
        ):  # autograd's engine asks more often than it computes
            device = args[0].fake_device
            is_hidden = (
                self._lacks_cuda
                and device.type == "cuda"
                and absent.asked_by_engine(sys._getframe(1))
            )
            return absent.NOWHERE if is_hidden else device
        if any(kind is not FakeTensor and _runs_itself(kind) for kind in types):
            return NotImplemented  # its own dispatch calls operators on the parts
        kwargs = kwargs or {}
        if self._fills_empty and func is aten.empty.memory_format:
            with disable_current_modes():
                return func(*args, **kwargs)
        if self._twins:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        if self._results:
            args, kwargs = self._with_stand_ins(args), self._with_stand_ins(kwargs)
        if self._lacks_cuda and "device" in kwargs and absent.asked_by_engine(sys._getframe(1)):
            if absent.is_no_move(func, args, kwargs):
                return args[0]
            kwargs = absent.on_device(kwargs)
        if not facts_of(func).is_plain:
            return self._dispatched(func, args, kwargs)
        if func is not aten.detach.default:  # that is called from where no exception may pass
            deliver_interrupts()
        return self._call(func, args, kwargs, *self.frames.here())

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What comes of an operator that may have to be refused, or is recorded in a way of its
        own.
        """
        if custom_ops.is_mark(func):
            return func(*args, **kwargs)
        if func.namespace == "fsdp":
            return fully_shard.record(self, func, args, kwargs)
        if collectives.is_collective(func):
            deliver_interrupts()
            return collectives.record(self, func, args, kwargs)
        if (reason := custom_ops.refusal(func)) is not None:
            self.refuse(reason, code="foreign_operator", op=str(func))
        deliver_interrupts()
        if func is aten._local_scalar_dense.default:
            return self._item(func, args[0])
        if func in ANSWERS:
            return self._answer(func, args, kwargs)
        if func is aten.is_set_to.default:
            return _is_same_memory(*args)
        phase, source = self.frames.here()
        if (reason := REFUSED.get(schema_of(func).name)) is not None:
            self.refuse(reason, code="refused_operator", op=str(func), source=source)
        if func in _LITERALS and not isinstance(args[0], FakeTensor):
            return self._literal(args[0], phase, source)
        if multi_tensor.is_multi_tensor(func):
            return self._multi_tensor(func, args, kwargs)
        return self._call(func, args, kwargs, phase, source)

    def _multi_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if multi_tensor.runs_by_loop(args):
            before = len(self.program.calls)
            with self:
                result = multi_tensor.looped(func, args, kwargs)
            self.note_split(base_name(func), len(self.program.calls) - before)
            return result
        phase, source = self.frames.here()
        if not multi_tensor.splits(args):
            return self._call(func, args, kwargs, phase, source)
        results = [
            self._call(func, *part, phase, source) for part in multi_tensor.parts(args, kwargs)
        ]
        self.note_split(base_name(func), len(results))
        return (
            [tensor for result in results for tensor in result] if schema_of(func).returns else None
        )

    def note_split(self, name: str, parts: int) -> None:
        """Notes that a call for many tensors was recorded as so many calls."""
        calls, others = self.program.split.get(name, (0, 0))
        self.program.split[name] = calls + 1, others + parts

    def effect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records a call that only changes its arguments, without running it on them."""
        args, kwargs = dtensors.parts_of_update(self, str(func), args, kwargs)
        phase, source = self.frames.here()
        call = Call(func, (), {}, (None,), False, phase, source)
        call.args, call.kwargs = self._recorded(args, call), self._recorded(kwargs, call)
        call.mutates = self._mutated(func, args, kwargs, call)
        self.program.calls.append(call)

    def _call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], phase: str, source: Source
    ) -> Any:
        """Runs an operator on fake tensors and records it."""
        facts = facts_of(func)
        call = Call(func, (), {}, (), False, phase, source, random=facts.is_random)
        if is_spread(func, args):
            return self._spread(*args)
        if looks_for_zeros(func):
            self.refuse(
                "the gradient of prod, and of cumprod with create_graph=True, is computed in another way "
                "where no element is zero, and a plan holds for one; multiply the elements one by one, or use "
                "x.log().sum().exp() for positive ones",
                code="data_dependent", op=str(func), source=source,
            )  # fmt: skip
        args, kwargs = self._with_fixed_sizes(facts, args, kwargs)
        call.args, call.kwargs = (
            self._recorded(args, call),
            self._recorded(kwargs, call) if kwargs else {},
        )
        if call.random:
            self._draw(call, (*args, *kwargs.values()))
        given = args, kwargs
        slots = self.program.slots
        if None in [slots[slot] for slot in call.refs()]:
            self._refuse_deciding_numbers(func, args, kwargs, source)
            given = _without_live_numbers(args), _without_live_numbers(kwargs)
        tensors = tensors_in(given)
        shape, value = decided(func, args, kwargs) if facts.may_be_decided else None, None
        try:
            if shape is None:
                result = self._kernels.run(
                    func, given, tensors, (call.args, call.kwargs), self._signatures
                )
            else:
                result, value = self._decided(shape, call)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.refuse(_BY_DATA, code="data_dependent", op=str(func), source=source)
        except UnsupportedOperatorException:
            self.refuse(
                "it has no fake kernel; register one with torch.library.register_fake",
                code="no_fake_kernel",
                op=str(func),
                source=source,
            )
        except Exception as error:
            if not is_foreign(func):
                raise
            self.refuse(
                f"its fake kernel (torch.library.register_fake) gives no result; correct it: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
                code="no_fake_kernel", op=str(func), source=source,
            )  # fmt: skip
        if facts.reshapes_in_place:
            self._reshape_in_place(call, result)
            return result
        call.target = as_run(func)
        if not tensors and facts.takes_dtype and kwargs.get("dtype") is None:
            # Then it takes what the step may have set.
            call.kwargs = {**call.kwargs, "dtype": result.dtype}
        if facts.mutates:
            call.mutates = self._mutated(func, args, kwargs, call)
        call.is_check = facts.is_check
        self._record(
            call, without_masked(call, args, kwargs, result) if facts.is_masked else result, tensors
        )
        if value is None:
            return result
        place, known = value
        return (*result[:place], self._real(result[place], known), *result[place + 1 :])

    def _decided(self, shape: Decided, call: Call) -> tuple[Any, Any]:
        """The results of a call whose shapes values decide, and the place and value of one of them,
        or None.
        """
        asked = Call(
            shape.ask,
            self._recorded(shape.operands, call),
            {},
            (_ASKED,),
            False,
            call.phase,
            call.source,
        )
        is_ours = self._watch is not None  # nobody asks again for a graph that others made
        answer = self._answered(self._guard(_ASKED, may_decide, asked)) if is_ours else None
        if answer is None:
            self.refuse(_BY_DATA, code="data_dependent", op=call.name, source=call.source)
        with disable_current_modes():
            value = None if shape.value is None else shape.value(answer)
        return shape.make(answer), value

    def with_values(self, packed: PackedSequence) -> PackedSequence:
        """A packed sequence from before the step, with real batch sizes, for which the program then
        holds.
        """
        sizes = packed.batch_sizes
        phase, source = self.frames.here()
        asked = Call(
            contents_of,
            (Ref(self._slot_of_argument(sizes, contents_of, source)),),
            {},
            (_ASKED,),
            False,
            phase,
            source,
        )
        answer = self._answered(self._guard(_ASKED, may_decide, asked))
        return (
            packed
            if answer is None
            else packed._replace(batch_sizes=self._real(sizes, torch.tensor(answer)))
        )

    def _real(self, fake: Any, value: torch.Tensor) -> torch.Tensor:
        """A real tensor for the step in the place of a fake, for code in C++ that looks at its
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

    def padded(self, pad: Callable[..., Any], *packed: Any) -> Any:
        """What padding a packed sequence gives: code in C++ that writes the lengths into memory,
        which has to be real.
        """
        self._fills_empty = True
        try:
            padded, lengths = pad(*packed)
        finally:
            self._fills_empty = False
        return padded, aten.lift_fresh.default(lengths)

    def _fake(self, value: Any) -> Any:
        """The fake of a real tensor that the recorder has given out; anything else as it is."""
        return self._twins[id(value)][1] if id(value) in self._twins else value

    def _spread(self, mask: Any, gradient: Any) -> Any:
        """A gradient spread over equal elements as real tensors have it."""
        if torch.is_grad_enabled() and gradient.requires_grad:
            self.refuse(
                "the gradient of this gradient is made of other kernels on real tensors than on "
                "fake ones; reduce by dimensions instead of over all elements, as in x.amax()",
                code="hidden_branch",
            )
        with self:
            return aten.masked_fill_.Tensor(
                aten.new_zeros.default(gradient, mask.shape), mask, gradient
            )

    def _with_fixed_sizes(self, facts: KernelFacts, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with plain numbers for the live ones that decide a shape; refused where a
        plan cannot hold for one value.
        """
        if not (_holds_live(args) or (kwargs and _holds_live(kwargs))):
            return args, kwargs

        def fixed(name: str, value: Any) -> Any:
            if type(value) in _LIFELESS:
                return value
            kind = LiveNode if name in facts.sizes else FixedNode
            if type(value) in (LiveFloat, LiveInt):
                return _fixed(kind, value)
            return pytree.tree_map(functools.partial(_fixed, kind), value)

        return (
            tuple([fixed(name, value) for name, value in zip(facts.names, args, strict=False)]),
            {name: fixed(name, value) for name, value in kwargs.items()},
        )

    def _refuse_deciding_numbers(self, func: Any, args: Any, kwargs: Any, source: Source) -> None:
        """Refuses live numbers that decide which kernels the backward pass is made of, or what an
        operator of others gives.
        """
        is_deciding = (
            func is aten.pow.Tensor_Scalar and torch.is_grad_enabled() and args[0].requires_grad
        ) or (is_foreign(func) and len(schema_of(func).returns) > 0)
        if is_deciding:
            self.refuse(
                "a number that changes from call to call decides which kernels run; pass a "
                "constant instead", code="value_reached_python",
                op=str(func), source=source,
            )  # fmt: skip

    def _record(self, call: Call, result: Any, tensors: list[Any]) -> None:
        """Appends the call with its results, unless it only answers a question about metadata."""
        # `isinstance` asks a fake for its class, in Python, wherever it is none of these.
        is_sequence = type(result) is not FakeTensor and isinstance(result, (tuple, list))
        flat = result if is_sequence else (result,)
        facts = facts_of(call.target)
        if facts.are_declared and not any(isinstance(item, torch.Tensor) for item in flat):
            return
        arguments = set(map(_identity, tensors))
        argument_storages = set(map(self.program.storage_of, call.refs()))
        index = len(self.program.calls)
        outputs: list[int | None] = []
        for position, item in enumerate(flat):
            if _identity(item) in arguments or not isinstance(item, torch.Tensor):
                outputs.append(None)
                continue
            if any(not isinstance(size, int) for size in item.shape):
                self.refuse(_BY_DATA, code="data_dependent", op=call.name, source=call.source)
            if item.layout is not torch.strided:
                self.refuse(
                    f"its result has layout {item.layout}, and only strided tensors are captured; "
                    "use dense tensors", code="layout",
                    op=call.name, source=call.source,
                )  # fmt: skip
            size_bytes = bytes_at_least(call.target, tensors, position, item)
            slot = self._add_tensor(
                item, creator=index, name=f"{base_name(call.target)}_{index}", at_least=size_bytes
            )
            self._check_aliasing(call, position, slot, argument_storages)
            outputs.append(slot)
        call.outputs = tuple(outputs)
        call.returns_sequence = is_sequence
        self.program.calls.append(call)

    def _check_aliasing(
        self, call: Call, position: int, slot: int, argument_storages: set[int]
    ) -> None:
        """Storage identity and schema must agree on what is a view."""
        meta = self.program.slots[slot]
        assert meta is not None
        shares, declared = meta.storage in argument_storages, facts_of(call.target).are_declared
        if (
            shares
            and not declared[min(position, len(declared) - 1)]
            and call.target not in HIDDEN_ALIAS
        ):
            self.refuse(
                "its result shares memory with an argument, and its schema does not say so; "
                "correct the schema, or return a copy",
                code="hidden_alias", op=call.name, source=call.source,
            )  # fmt: skip
        # A declared alias that shares nothing is a copy: `aten.reshape` and its kin may do either.

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
        seen = None if self._answers is None else self._answers.value()
        if meta.dtype is torch.bool:
            return self._known_answer(slot, func, phase, source, seen)
        if meta.dtype.is_complex:
            known = self.known_value(slot, _nothing)
            return self._refuse_value(slot, func, source) if known is None else known
        is_integer = not meta.dtype.is_floating_point
        # `torch.div(x.size(0), 2, rounding_mode="trunc")` as a size, which C++ wants to know.
        if is_integer and (known := self.known_value(slot)) is not None:
            return known
        live = self._live(is_integer, f".item() at {source}")
        if seen is not None:
            self._seen[live.node.slot] = seen
        self.program.calls.append(
            Call(func, (Ref(slot),), {}, (live.node.slot,), False, phase, source)
        )
        return live

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """What a kernel says that compares tensors."""
        phase, source = self.frames.here()
        call = Call(func, (), {}, (), False, phase, source)
        call.args, call.kwargs = self._recorded(args, call), self._recorded(kwargs, call)
        live = self._live(True, f"{func} at {source}")
        call.outputs = (live.node.slot,)
        self.program.calls.append(call)
        seen = None if self._answers is None else self._answers.value()
        return self._known_answer(live.node.slot, func, phase, source, seen)

    def _known_answer(self, slot: int, func: Any, phase: str, source: Source, seen: Any) -> bool:
        """A yes or no that Python asks for, known beforehand or taken for granted; `seen` by a
        watched run.
        """
        known = self.known_value(slot, may_be_asked)
        if known is None:
            known = self._checked(slot, phase, source, seen)
        return self._refuse_value(slot, func, source) if known is None else bool(known)

    def remedy(self, slot: int) -> str:
        """What to do about a value that Python must not see."""
        if is_run_by(_DISTRIBUTIONS):
            return "pass validate_args=False to the distribution"
        if self._slices.is_drawn(slot):
            return CHANCE
        return "use a form that stays on tensors, such as torch.where, or return the value from the step and look at it there"

    def _refuse_value(self, slot: int, func: Any, source: Source) -> NoReturn:
        self.refuse(
            "the value of a tensor decides something in Python here, and a plan would keep what "
            f"it decided at capture; {self.remedy(slot)}",
            code="value_reached_python", op=str(func), source=source,
        )  # fmt: skip

    def _literal(self, real: torch.Tensor, phase: str, source: Source) -> Any:
        """A tensor written out in the user's code: kept as a constant, copied fresh at every
        run.
        """
        fake = aten.lift_fresh.default(real)
        number = len(self.program.constants)
        constant = self._new_slot(fake, self._new_storage(fake, -1, f"literal_{number}"))
        with disable_current_modes():
            self.program.constants.append((real.detach().clone(), constant))
        index = len(self.program.calls)
        slot = self._add_tensor(fake, creator=index, name=f"tensor_{index}")
        self.program.calls.append(
            Call(aten.clone.default, (Ref(constant),), {}, (slot,), False, phase, source)
        )
        # The fake mode remembers the literal's value and would answer `.item()` with it.
        fake.constant = None
        return fake

    def _mutated(self, func: Any, args: Any, kwargs: Any, call: Call) -> tuple[int, ...]:
        changed: list[Any] = []
        for position, name in facts_of(func).written:
            changed.append(args[position] if position < len(args) else kwargs.get(name))
        hidden = HIDDEN_MUTATION.get(func)
        if hidden is not None and args[hidden[1]]:
            changed.extend(args[position] for position in hidden[0])
        slots = tuple(
            dict.fromkeys(self._slot_of_argument(t, func, call.source) for t in tensors_in(changed))
        )
        if not self._twins:
            return slots
        known = {self.program.storage_of(twin._roam_slot[1]) for _, twin, _ in self._twins.values()}
        if known and not known.isdisjoint(map(self.program.storage_of, slots)):
            self._refuse_change(func, call.source)
        return slots

    def _refuse_change(self, func: Any, source: Source) -> NoReturn:
        self.refuse(
            "the step changes the batch sizes of a packed sequence, and a plan holds for these "
            "sizes only; change a copy (.clone())",
            code="refused_operator", op=str(func), source=source,
        )  # fmt: skip

    def _reshape_in_place(self, call: Call, tensor: Any) -> None:
        """A tensor that changes its own shape (`x.unsqueeze_(0)`) is another view under the same
        name from here on.
        """
        slot = self.slot_of(tensor)
        reference = next(
            (reference for reference, referenced in self.program.referenced if referenced == slot),
            None,
        )
        if (
            isinstance(reference, ArgumentReference)
            and reference.kind == "input"
            and slot is not None
        ):
            self._reshaped[id(tensor)] = reference, slot, tensor
        elif reference is not None:
            self.refuse(
                "it changes the shape of a tensor in place that is there before the step and is "
                "no argument, so every step would find another shape; use the form that returns a "
                "view",
                code="inplace_view", op=call.name, source=call.source,
            )  # fmt: skip
        name = base_name(call.target).removesuffix("_")
        call.target = _with_arguments_of(call.target, getattr(aten, name))
        call.outputs = (self._add_tensor(tensor, creator=len(self.program.calls), name=name),)
        self.program.calls.append(call)

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

    def _answered(self, guard: ComputedGuard | None) -> Any:
        """A guard's answer, for which the program then holds; None where there is none."""
        if guard is None:
            return None
        answer = self._asked(guard)
        if guard.inputs and answer is not None:
            add_guard(self.program, self._forms, guard, answer)
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

    def fixed_value(self, slot: int) -> Any:
        """The Python value of a number that a plan may hold on to; None for any other."""
        return self.known_value(slot, may_be_fixed)

    def made_number(self, slot: int) -> Callable[[], Any] | None:
        """Calculates the number that this very step would leave in a slot; None where it hangs on
        more than numbers.
        """
        guard = self._guard(slot, may_be_asked)
        return None if guard is None else functools.partial(self._asked, guard)

    def made_tensor(self, tensor: Any) -> tuple[int, Table] | None:
        """The slot of a tensor that this step has made of constants and buffers alone, and how to
        make it for real; None for others.
        """
        slot = self.slot_of(tensor)
        if slot is None or tensor.requires_grad or not self._is_intact(tensor, slot):
            return None
        guard = self._guard(slot, may_be_tabled)
        return (
            None if guard is None else (slot, Table(guard, tensor, self.program.storage_of(slot)))
        )

    def branch(self, function: Callable[..., bool], operands: tuple[Any, ...]) -> bool | None:
        """The answer of a comparison, asked for again at every call; None where nobody can say."""
        slot = self.scalar_call(function, operands).node.slot
        known = self.known_value(slot, may_be_asked)
        return (
            self._checked(slot, *self.frames.here(), self._seen.get(slot))
            if known is None
            else known
        )

    def _checked(self, slot: int, phase: str, source: Source, seen: Any) -> bool | None:
        """The answer that a plan takes for granted and a run checks: the one with which a check in
        the step's code passes, else what a watched run has `seen`; None where there is none.
        """
        if self._answers is None:  # a graph that others made has no code that asks
            return None
        answer = passing_answer()
        is_branch = answer is None
        if is_branch:
            answer = self._answers.answer(None if seen is None else bool(seen))
        if answer is not None:
            self.program.calls.append(
                Call(
                    check,
                    (Ref(slot), answer),
                    {},
                    (None,),
                    False,
                    phase,
                    source,
                    is_check=True,
                    is_branch=is_branch,
                )
            )
        return answer

    def _guard(self, slot: int, may_ask: MayAsk, asked: Call | None = None) -> ComputedGuard | None:
        references = {number: reference for reference, number in self.program.referenced}
        _, source = self.frames.here()
        return self._slices.guard(
            slot,
            references,
            lambda reference, number: may_ask(reference, self.program, number),
            source,
            asked,
        )

    def _asked(self, guard: ComputedGuard) -> Any:
        """A guard's answer for what is there where a plan begins."""

        def value(slot: int, reference: Any) -> Any:
            if isinstance(reference, ArgumentReference):
                return reference.find(self._real_arguments)
            return self._given[slot][1] if slot in self._given else self._number_of(reference)

        on_device = absent.OnCpu() if self._lacks_cuda else nullcontext()
        with disable_current_modes(), DisableAutocast(), DisableTorchFunction(), on_device:
            return guard.ask(list(map(value, guard.inputs, guard.uses[0])))

    # -- arguments and slots

    def _recorded(self, value: Any, call: Call) -> Any:
        """The nest of arguments with slots for tensors and live numbers."""
        if type(value) in PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._refs[self._slot_of_argument(value, call.target, call.source)]
        if isinstance(value, (torch.SymFloat, torch.SymInt)):
            slot = self.slot_of(value)
            if slot is None:
                self.refuse(
                    "the step was given a symbolic number of another tracer, such as "
                    "torch.compile; call it with plain numbers, outside of other tracers", code="foreign_symbol",
                    op=str(call.target), source=call.source,
                )  # fmt: skip
            return self._refs[slot]
        if isinstance(value, torch.Generator):
            return self._generator(value, call)
        if isinstance(value, (tuple, list)):
            items = [self._recorded(item, call) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self._recorded(item, call) for key, item in value.items()}
        return value

    # -- memory that is given back and taken again

    def add_alias(self, tensor: Any, of: Any) -> None:
        """Records that a tensor is a view of another, or of memory that it has."""
        phase, source = self.frames.here()
        self._alias(tensor, Ref(self._slot_of_argument(of, "view", source)), phase, source)

    def _alias(self, tensor: Any, base: Ref, phase: str, source: Source) -> int:
        index = len(self.program.calls)
        slot = self._add_tensor(tensor, creator=index, name=f"as_strided_{index}")
        layout = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        self.program.calls.append(
            Call(aten.as_strided.default, (base, *layout), {}, (slot,), False, phase, source)
        )
        return slot

    def give_memory_back(self, tensor: Any) -> None:
        """A tensor's memory is given back, of which it has all: whatever lies there is lost."""
        pointer = storage_pointer(tensor.untyped_storage())
        if self._storage_numbers.pop(pointer, None) is not None:
            self._bases[pointer] = None

    def take_memory(self, tensor: Any) -> None:
        """A tensor that has given its memory back takes other memory; so do all views of it."""
        pointer = storage_pointer(tensor.untyped_storage())
        if self._bases.get(pointer, MISSING) is not None:
            return  # it has its memory
        phase, source = self.frames.here()
        index = len(self.program.calls)
        slot = self._add_tensor(tensor, creator=index, name=f"empty_{index}")
        self._bases[pointer] = self._refs[slot]
        options = {"dtype": tensor.dtype, "device": tensor.fake_device}
        self.program.calls.append(
            Call(
                aten.empty.memory_format,
                (list(tensor.shape),),
                options,
                (slot,),
                False,
                phase,
                source,
            )
        )

    def _renew(self, tensor: Any, slot: int) -> int:
        """The slot of a tensor, also where its memory has been given back and taken again."""
        if not self._bases:
            return slot
        pointer = storage_pointer(tensor.untyped_storage())
        base, meta = self._bases.get(pointer), self.program.slots[slot]
        if base is None or meta is None or meta.storage == self._storage_numbers[pointer]:
            return slot
        return self._alias(tensor, base, *self.frames.here())

    def _slot_of_argument(self, tensor: Any, target: Any, source: Source) -> int:
        slot = self.slot_of(tensor)
        if slot is not None and self._bases:
            slot = self._renew(local_of(tensor), slot)
        if slot is None:
            shape = tuple(tensor.shape)
            self.refuse(
                f"it uses a tensor of shape {shape} that capture could not find; pass it to the "
                "step as an argument, or keep it in a module, a list or an attribute that the "
                "step's function can reach",
                code="unknown_tensor", op=str(target), source=source,
            )  # fmt: skip
        if not self._is_intact(tensor, slot):
            self.refuse(_REPLACED, code="storage_replaced", op=str(target), source=source)
        return slot

    def leaving(self, tensor: Any, place: str) -> int:
        """The slot of a tensor that is at `place` after the step; one from before the step is
        itself, whatever its data is.
        """
        tensor = self._fake(self._stand_in(tensor))
        slot = self.slot_of(tensor)
        if slot is None:
            raise CaptureError(
                f"the step puts a tensor at {place} that capture could not find; pass it to the "
                "step as an argument, or keep it in a module, a list or an attribute that the "
                "step's function can reach",
                code="unknown_tensor",
            )
        if not self._is_intact(local_of(tensor), slot):
            raise CaptureError(f"{place}: {_REPLACED}", code="storage_replaced")
        if self.is_original(tensor):
            return self._tagged[id(tensor)][1]
        for name in own_attributes(tensor):
            raise CaptureError(
                f"the step sets the attribute {name!r} of the tensor at {place}, which a captured "
                "step would not do; keep what it says in a dictionary",
                code="tensor_attribute",
            )
        return slot

    def joined(self, tensor: Any, place: str) -> Joined | None:
        """What a run puts together at `place` after the step for a distributed tensor; None for any
        other.
        """
        if not is_dtensor(tensor):
            return None
        if id(tensor) not in self._joined:
            layout = layout_of(tensor)
            if holds_mask(layout):
                raise CaptureError(
                    f"the step leaves at {place} a DTensor whose placement holds a mask, as a lookup in "
                    "a spread table gives it; redistribute it in the step",
                    code="dtensor",
                )
            self._joined[id(tensor)] = tensor, Joined(layout)
        return self._joined[id(tensor)][1]

    def note_joined(self, place: str | int, tensor: Any) -> None:
        """Notes of what is left at a place that it is a distributed tensor, if it is."""
        made = self.joined(tensor, place if isinstance(place, str) else "the step's result")
        if made is not None:
            self.program.left_layouts[place] = made

    def _is_intact(self, tensor: Any, slot: int) -> bool:
        """Whether a tensor is still what its slot says; `.data = ...` makes it another behind the
        dispatcher's back.
        """
        meta = self.program.slots[slot]
        assert meta is not None
        return (
            self._storage_numbers.get(storage_pointer(tensor.untyped_storage())) == meta.storage
            and tensor.shape == meta.shape
            and tensor.stride() == meta.stride
            and tensor.storage_offset() == meta.offset
        )

    def _live(self, is_integer: bool, origin: str) -> Any:
        slot = len(self.program.slots)
        self.program.slots.append(None)
        self._refs.append(ref_to(slot))
        self._signatures.append(LIVE_INT if is_integer else LIVE_FLOAT)
        node = LiveNode(self, slot, is_integer, origin)
        return (LiveInt if is_integer else LiveFloat)(node)

    def _add_tensor(self, tensor: Any, *, creator: int, name: str, at_least: int = 0) -> int:
        storage = tensor.untyped_storage()
        number = self._storage_numbers.get(storage_pointer(storage))
        if number is None:
            number = self._new_storage(tensor, creator, name, at_least)
            self._storage_numbers[storage_pointer(storage)] = number
            self._kept.append(storage)
        slot = self._new_slot(tensor, number)
        tensor._roam_slot = (self, slot)
        return slot

    def _new_storage(self, tensor: Any, creator: int, name: str, at_least: int = 0) -> int:
        self.program.storages.append(
            Storage(max(tensor.untyped_storage().nbytes(), at_least), creator, name)
        )
        return len(self.program.storages) - 1

    def _new_slot(self, tensor: Any, storage: int) -> int:
        meta = TensorMeta(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.fake_device,  # `device` would be dispatched like an operator
            storage,
        )
        self.program.slots.append(meta)
        self._refs.append(ref_to(len(self._refs)))
        self._signatures.append(self._kernels.signature(meta, tensor))
        return len(self.program.slots) - 1

    def finish(self) -> None:
        """Checks what only the whole recording shows.

        Raises:
            CaptureError: also one that the user's code has caught: eager PyTorch would not have
                gone the way that followed.
        """
        if self._refusal is not None:
            raise self._refusal
        with disable_current_modes():
            if any(not value.equal(copy) for value, _, copy in self._twins.values()):
                self._refuse_change("a change that capture cannot see", Source())
        if self._watch is not None and not self._watch.is_intact():
            raise CaptureError(_SET_UNSEEN, code="generator_state")
        for reference, slot, tensor in self._reshaped.values():
            if id(tensor) in self._assigned:
                continue
            meta = self.program.slots[slot]
            assert meta is not None
            now = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
            if now != (meta.shape, meta.stride, meta.offset):
                self.program.reshaped.append((reference, now))
        self.program.guessed = sorted(map(str, self._kernels.guessed))
        forget_idle_states(self.program)


@functools.cache
def _runs_itself(kind: type) -> bool:
    """Whether tensors of a class run operators by others on plain tensors: distributed ones, and
    results of collectives that may not have been waited for.
    """
    return (kind.__module__, kind.__name__) in (
        ("torch.distributed.tensor", "DTensor"),
        ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
    )


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """What `is_set_to` says of real tensors: of fake ones, PyTorch's own answer is no."""
    pointers = [c_pointer(tensor.untyped_storage()) for tensor in (one, other)]
    return pointers[0] == pointers[1] and (
        (one.shape, one.stride(), one.storage_offset())
        == (other.shape, other.stride(), other.storage_offset())
    )


def is_integer(number: object) -> bool:
    """Whether it is one of Python's integers."""
    return type(number) is int


def is_float(number: object) -> bool:
    """Whether it is one of Python's floats."""
    return type(number) is float


def _fixed(kind: type[LiveNode | FixedNode], number: Any) -> Any:
    """The value of a number that a plan holds for; of a live one too where that is of the kind."""
    node = getattr(number, "node", None)
    return node._value() if isinstance(node, (kind, FixedNode)) else number


_LIFELESS = PLAIN | {FakeTensor}
"""Types of arguments that hold no live number."""


def _holds_live(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds_live(item) for item in value if type(item) not in _LIFELESS)
    if isinstance(value, dict):
        return _holds_live(list(value.values()))
    return isinstance(value, (torch.SymFloat, torch.SymInt))


def _without_live_numbers(value: Any) -> Any:
    """The nest as kernels on fake tensors take it."""
    if type(value) in _LIFELESS:
        return value
    if isinstance(value, torch.SymInt):
        return 1
    if isinstance(value, torch.SymFloat):
        return _LIVE_STAND_IN
    if isinstance(value, (tuple, list)):
        items = map(_without_live_numbers, value)
        return list(items) if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _without_live_numbers(item) for key, item in value.items()}
    return value


def _with_arguments_of(func: Any, packet: Any) -> Any:
    """The overload that takes the same arguments."""
    wanted = [(argument.name, str(argument.type)) for argument in schema_of(func).arguments]
    overloads = (getattr(packet, name) for name in packet.overloads())
    return next(
        o for o in overloads if wanted == [(a.name, str(a.type)) for a in schema_of(o).arguments]
    )
