"""The recorder: a dispatch mode that writes down every operator of a step run on fake tensors."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NoReturn

import torch

from roam.distributed.collectives import Launch
from roam.errors import CaptureError
from roam.interrupts import deliver_interrupts
from roam.kernels.recurrent import as_run
from roam.program.ir import Call, Ref, Source
from roam.program.operators import is_foreign
from roam.state.equality import MISSING
from roam.state.global_flags import KernelSwitches
from roam.state.live_scalars import FixedNode, LiveFloat, LiveInt, LiveNode
from roam.state.nests import PLAIN, leaves_of, mapped
from roam.state.references import ArgumentReference, StateReference
from roam.torch_compat.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    HigherOrderOperator,
    TorchDispatchMode,
    UnsupportedOperatorException,
    base_name,
    c_pointer,
    disable_current_modes,
    is_wrapper_subclass,
    is_zero_derivative,
    pytree,
    run_composite,
    schema_of,
)
from roam.tracing.cuda_estimate import absent
from roam.tracing.distributed import collectives, dtensors, fully_shard
from roam.tracing.fake_kernels.cache import FakeKernels, tensors_in
from roam.tracing.fake_kernels.meta_corrections import (
    bytes_at_least,
    is_spread,
    looks_for_zeros,
    selects_masked,
    without_masked,
)
from roam.tracing.fake_kernels.sized import SizedKernels, layout_of, recorded_number
from roam.tracing.numbers.dynamic_shapes import decided
from roam.tracing.numbers.rng import Watch, forget_idle_states
from roam.tracing.recording import custom_ops, multi_tensor
from roam.tracing.recording.composite_spectra import AS_FOR_REAL
from roam.tracing.recording.kernel_facts import (
    ANSWERS,
    HIDDEN_ALIAS,
    REFUSED,
    KernelFacts,
    facts_of,
    resizes_to_same,
    written_by,
)
from roam.tracing.recording.recorded_slots import Places
from roam.tracing.recording.recorded_values import Values

_logger = logging.getLogger("roam")
aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_LITERALS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
"""Operators that take in a tensor that is written out in code. The second one is found in graphs of
compilers.
"""
_identity = id  # while a step is traced, what its code calls by this name asks whose code it is

_runs_itself = functools.cache(is_wrapper_subclass)
"""Whether tensors of a class run operators by others on plain tensors: wrappers, distributed ones,
and results of collectives that may not have been waited for."""
_SET_UNSEEN = (
    "the step seeds a random generator or sets its state by a method of the generator, which "
    "capture cannot see; use torch.manual_seed, torch.set_rng_state or torch.random.fork_rng"
)
NOT_RECORDED = (
    "it takes functions, and which operators they run cannot be recorded; use Python's own if and "
    "loops, or torch.where"
)
"""Why operators of higher order are refused."""
_TOLD_FIRST = 20_000
_TOLD_ALOUD = 8 * _TOLD_FIRST
"""From how many operators on a recording says how far it is, and says it as a warning."""
_LIVE_STAND_IN = 0.5
"""Kernels on fake tensors see this in place of a live number; neither shapes nor dtypes depend on
it."""
_LIVE_STAND_INS = (_LIVE_STAND_IN, -3.0, 1e-4)
"""If a kernel of others gives the same on fake tensors for each of these, its results do not depend
on the number."""


class Recorder(Values, TorchDispatchMode):
    """Records one run of a step into `program`. Use as a context manager inside the fake mode."""

    def __init__(
        self,
        frames: Places,
        real_arguments: list[Any],
        kernels: FakeKernels,
        watch: Watch | None = None,
        number_of: Callable[[Any], Any] = lambda _: MISSING,
        has_code: bool = False,
        sized: SizedKernels | None = None,
    ) -> None:
        """A recording of nothing yet.

        Args:
            frames: tells where operators come from.
            real_arguments: the call's flattened arguments as the user gave them.
            kernels: remembers across recordings what kernels make of fake tensors.
            watch: over random generators.
            number_of: the number that a reference's tensor is where a plan begins.
            has_code: whether code asks for values, whose checks a run may make; a graph that others
                made has none.
            sized: what kernels make of tensors whose sizes follow from symbols; None if there are
                no such tensors.
        """
        TorchDispatchMode.__init__(self)
        self._sized_kernels = sized
        self.supports_higher_order_operators = True  # they get here, to be refused
        Values.__init__(self, frames, real_arguments, kernels, watch, number_of, has_code)
        self._switches = KernelSwitches()
        self._told_next = _TOLD_FIRST

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while a step is recorded, and to say so at every operator takes a
        # tenth of the time.
        return False

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
        if self._handed:
            args, kwargs = self._taken(func, args, kwargs or {})
        if isinstance(func, HigherOrderOperator):
            self.refuse(
                NOT_RECORDED,
                code="refused_operator", op=str(func), source=self.frames.here()[1],
            )  # fmt: skip
        if any(kind is not FakeTensor and _runs_itself(kind) for kind in types):
            return NotImplemented  # its own dispatch calls operators on the parts
        kwargs = kwargs or {}
        if self._fills_empty and func is aten.empty.memory_format:
            with disable_current_modes():
                return func(*args, **kwargs)
        if self._twins:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs))
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
            if resizes_to_same(func, args, kwargs):
                return args[0]
            self.refuse(reason, code="refused_operator", op=str(func), source=source)
        if facts_of(func).is_composite:
            # Autograd, which takes it apart elsewhere, is left out on tensors of inference.
            with self:
                if func in AS_FOR_REAL:
                    return AS_FOR_REAL[func](*args, **kwargs)
                return run_composite(func, *args, is_implicit=True, **kwargs)
        if func in _LITERALS and not isinstance(args[0], FakeTensor):
            return self._literal(args[0], phase, source)
        if multi_tensor.is_multi_tensor(func):
            return self._multi_tensor(func, args, kwargs)
        return self._call(func, args, kwargs, phase, source)

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
                "the gradient of prod, and of cumprod with create_graph=True, is computed in one of two ways, "
                "depending on whether an element is zero, and a plan has only one; multiply the elements one by one, or use "
                "x.log().sum().exp() for positive ones",
                code="data_dependent", op=str(func), source=source,
            )  # fmt: skip
        if selects_masked(func):
            self.refuse(
                "PyTorch computes the gradient of the value that masked_fill fills in by other "
                "kernels for real tensors than for fake ones; write torch.where(mask, value, x)",
                code="hidden_branch", op="aten.masked_fill.Tensor", source=source,
            )  # fmt: skip
        if func is aten.mul.Scalar and is_zero_derivative(args[0]):
            self.refuse_zero_derivative(str(func), source)  # its kernel cannot write in memory
        args, kwargs = self._with_fixed_sizes(facts, args, kwargs)
        call.args, call.kwargs = self._recorded(args, call), self._recorded(kwargs, call)
        if call.random:
            self._draw(call, (*args, *kwargs.values()))
        given = args, kwargs
        slots = self.program.slots
        if None in [slots[slot] for slot in call.refs()]:
            self._refuse_deciding_numbers(func, args, kwargs, source)
            given = mapped(_without_live_number, given)
        tensors = tensors_in(given)
        if facts.computes and (moved := self._switches.moved(func.name(), tensors)) is not None:
            self.refuse(
                f"the step runs it while {moved}, and a plan runs all operators with what is set around the call; set it "
                "around the call of the step",
                code="moved", op=str(func), source=source,
            )  # fmt: skip
        sized = self._sized_kernels
        if sized is not None and not sized.concerns(given, tensors):
            sized = None
        shape, value = decided(func, args, kwargs) if facts.may_be_decided else None, None
        if sized is not None and (
            shape is not None
            or (facts.reshapes_in_place and self._reference_of(tensors[0]) is not None)
        ):
            sized.symbols.refuse(f"{func} is given a size that changes")
        try:
            if sized is not None and facts.reshapes_in_place:
                recorded = call.args, call.kwargs
                result = sized.reshape(
                    func, _view_of(func), given, tensors, recorded, self._sized_signatures
                )
            elif shape is None:
                kernels: Any = sized or self._kernels
                with nullcontext() if facts.computes else _inference_left(tensors):
                    result = kernels.run(
                        func,
                        given,
                        tensors,
                        (call.args, call.kwargs),
                        self._signatures if sized is None else self._sized_signatures,
                    )
            else:
                result, value = self._decided(shape, call)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.refuse_shape(str(func), source)
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
                "its fake kernel (torch.library.register_fake) fails; correct it: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}",
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
            call, without_masked(func, args, kwargs, result) if facts.is_masked else result, tensors
        )
        if value is None:
            return result
        place, known = value
        return (*result[:place], self._real(result[place], known), *result[place + 1 :])

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
        if index >= self._told_next:
            self._tell(index, call.source)
        outputs: list[int | None] = []
        for position, item in enumerate(flat):
            if _identity(item) in arguments or not isinstance(item, torch.Tensor):
                outputs.append(None)
                continue
            if layout_of(item) is None and any(not isinstance(size, int) for size in item.shape):
                self.refuse_shape(call.name, call.source)
            if item.layout is not torch.strided:
                self.refuse(
                    f"its result has layout {item.layout}, and only strided tensors are captured; "
                    "use dense tensors", code="layout",
                    op=call.name, source=call.source,
                )  # fmt: skip
            size_bytes = bytes_at_least(call.target, tensors, position, item)
            size_bytes = recorded_number(size_bytes) or size_bytes
            slot = self._add_tensor(
                item, creator=index, name=f"{base_name(call.target)}_{index}", at_least=size_bytes
            )
            self._check_aliasing(call, position, slot, argument_storages)
            outputs.append(slot)
        call.outputs = tuple(outputs)
        call.returns_sequence = is_sequence
        self.program.calls.append(call)

    def _tell(self, count: int, source: Source) -> None:
        """Says how far the recording is, each time that it has doubled."""
        self._told_next = 2 * count
        level = logging.WARNING if count >= _TOLD_ALOUD else logging.INFO
        text = "capturing the step: %d operators recorded so far, the last at %s"
        if _logger.isEnabledFor(level):
            # What is given to `_logger.log` meanwhile would count as a message of the step's.
            told = count, str(source)
            _logger.handle(_logger.makeRecord(_logger.name, level, __file__, 0, text, told, None))

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

    # -- operators that are recorded in a way of their own

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

    def generator_call(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        result: torch.Tensor | None = None,
    ) -> None:
        """Records what a Python function does to a random generator, in the sequence of the random
        operators.
        """
        index = len(self.program.calls)
        name = f"{function.__name__}_{index}"
        output = None if result is None else self._add_tensor(result, creator=index, name=name)
        references = self.references(arguments, function.__name__)
        self._add_call(function, references, output, self.frames.here(), random=True)

    def _draw(self, call: Call, arguments: tuple[Any, ...]) -> None:
        """Has the watch draw instead of a random operator."""
        if self._watch is None:
            return
        if not self._watch.is_intact():
            self.refuse(_SET_UNSEEN, code="generator_state", source=call.source)
        self._watch.draw(arguments)

    def _spread(self, mask: Any, gradient: Any) -> Any:
        """A gradient spread over equal elements as real tensors have it."""
        if torch.is_grad_enabled() and gradient.requires_grad:
            self.refuse(
                "PyTorch computes the gradient of this gradient by other kernels for real "
                "tensors than for fake ones; reduce by dimensions instead of over all elements, "
                "as in x.amax()",
                code="hidden_branch",
            )
        with self:
            return aten.masked_fill_.Tensor(
                aten.new_zeros.default(gradient, mask.shape), mask, gradient
            )

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
        self.literals.append((real, slot, source))
        self._add_call(aten.clone.default, (Ref(constant),), slot, (phase, source))
        # The fake mode remembers the literal's value and would answer `.item()` with it.
        fake.constant = None
        return fake

    # -- arguments

    def _with_fixed_sizes(self, facts: KernelFacts, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with plain numbers for the live ones that decide a shape; refused where a
        plan cannot hold for one value.
        """
        if not any(map(_is_live, leaves_of((args, kwargs)))):
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
        ) or (
            is_foreign(func)
            and len(schema_of(func).returns) > 0
            and len({_shown(func, args, kwargs, number) for number in _LIVE_STAND_INS}) > 1
        )
        if is_deciding:
            self.refuse(
                "a number that changes from call to call decides which kernels run; pass a constant instead, or "
                "to pow a tensor, as in x.pow(torch.tensor(p))", code="value_reached_python",
                op=str(func), source=source,
            )  # fmt: skip

    def _mutated(self, func: Any, args: Any, kwargs: Any, call: Call) -> tuple[int, ...]:
        changed = tensors_in(written_by(func, args, kwargs))
        slots = tuple(dict.fromkeys(self._slot_of_argument(t, func, call.source) for t in changed))
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

    def _reference_of(self, tensor: Any) -> StateReference | ArgumentReference | None:
        """Where a tensor lies, if it exists before the step."""
        slot = self.slot_of(tensor)
        return next(
            (one for one, referenced in self.program.referenced if referenced == slot), None
        )

    def _reshape_in_place(self, call: Call, tensor: Any) -> None:
        """A tensor that changes its own shape (`x.unsqueeze_(0)`) is another view under the same
        name from here on.
        """
        if self._reference_of(tensor) is not None:
            self.refuse(
                "it changes in place the shape of a tensor that exists before the step; use the "
                "form that returns a view",
                code="inplace_view", op=call.name, source=call.source,
            )  # fmt: skip
        call.target = _view_of(call.target)
        name = base_name(call.target)
        call.outputs = (self._add_tensor(tensor, creator=len(self.program.calls), name=name),)
        self.program.calls.append(call)

    # -- the end

    def finish(self) -> None:
        """Checks what only the whole recording shows.

        Raises:
            CaptureError: also one that the user's code has caught, since eager PyTorch would not
                have run the code after it.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._handed:
            self._refuse_handed("")
        with disable_current_modes():
            if any(not value.equal(copy) for value, _, copy in self._twins.values()):
                self._refuse_change("a change that capture cannot see", Source())
        if self._watch is not None and not self._watch.is_intact():
            raise CaptureError(_SET_UNSEEN, code="generator_state")
        self.program.guessed = sorted(map(str, self._kernels.guessed))
        forget_idle_states(self.program)


def _inference_left(tensors: list[Any]) -> AbstractContextManager[Any]:
    """A block in which views of ordinary tensors are made, which are no tensors of inference, even
    under `torch.inference_mode`.
    """
    if not torch.is_inference_mode_enabled() or all(tensor.is_inference() for tensor in tensors):
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """What `is_set_to` says of real tensors: of fake ones, PyTorch's own answer is no."""
    pointers = [c_pointer(tensor.untyped_storage()) for tensor in (one, other)]
    return pointers[0] == pointers[1] and (
        (one.shape, one.stride(), one.storage_offset())
        == (other.shape, other.stride(), other.storage_offset())
    )


def _fixed(kind: type[LiveNode | FixedNode], number: Any) -> Any:
    """The value of a number for which a plan holds, and of a live number if its node is of `kind`;
    any other number as it is.
    """
    node = getattr(number, "node", None)
    return node._value() if isinstance(node, (kind, FixedNode)) else number


_LIFELESS = PLAIN | {FakeTensor}
"""Types of arguments that hold no live number."""


def _is_live(leaf: Any) -> bool:
    return type(leaf) is not FakeTensor and isinstance(leaf, (torch.SymFloat, torch.SymInt))


def _without_live_number(leaf: Any) -> Any:
    """An argument as kernels on fake tensors take it."""
    if not _is_live(leaf):
        return leaf
    return 1 if isinstance(leaf, torch.SymInt) else _LIVE_STAND_IN


def _shown(func: Any, args: Any, kwargs: Any, number: float) -> Any:
    """What can be seen of the results of a kernel on fake tensors with a number in the place of
    each live one; unlike anything else where it raises.
    """

    def plain(value: Any) -> Any:
        return number if isinstance(value, torch.SymFloat) else value

    try:
        results = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))
    except Exception:  # noqa: BLE001 - the kernel is others' code
        return object()
    flat = results if isinstance(results, (tuple, list)) else [results]
    return tuple(
        (tuple(item.shape), item.stride(), item.storage_offset(), item.dtype, item.device)
        for item in flat
        if isinstance(item, torch.Tensor)
    )


@functools.cache
def _view_of(func: Any) -> Any:
    """The operator that returns as a view what another makes of its argument itself."""
    packet = getattr(aten, base_name(func).removesuffix("_"))
    wanted = [(argument.name, str(argument.type)) for argument in schema_of(func).arguments]
    overloads = (getattr(packet, name) for name in packet.overloads())
    return next(
        o for o in overloads if wanted == [(a.name, str(a.type)) for a in schema_of(o).arguments]
    )
