"""The slots of a recording: where each tensor of the step is in the program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, cast

import torch

from roam.errors import CaptureError
from roam.program.ir import (
    Call,
    Joined,
    Program,
    Ref,
    Source,
    Storage,
    TensorMeta,
    assign_data,
    ref_to,
)
from roam.state.equality import MISSING
from roam.state.live_scalars import node_of
from roam.state.nests import mapped
from roam.state.references import part_references
from roam.state.trace_context import TraceContext
from roam.state.wrappers import checked_form, is_wrapper, parts_of
from roam.torch_compat.private import (
    TENSOR_DATA,
    FakeTensor,
    holds_mask,
    is_dtensor,
    layout_of,
    local_of,
    storage_pointer,
)
from roam.tracing.fake_kernels.cache import FakeKernels
from roam.tracing.fake_kernels.sized import layout_of as sized_layout_of
from roam.tracing.fake_kernels.sized import recorded_number, signature
from roam.tracing.fakes.fake_identity import own_attributes
from roam.tracing.fakes.gradient_history import nodes_behind
from roam.tracing.numbers.rng import Watch

aten = torch.ops.aten
_identity = id  # while a step is traced, what its code calls by this name asks whose code it is

_REPLACED = (
    "the tensor was given other data where capture could not see it; write p.data = x in Python, "
    "or p.data.copy_(x)"
)


class Places(Protocol):
    """Knows where the operator that is being dispatched now comes from."""

    def here(self) -> tuple[str, Source]:
        """The operator's phase and source."""


def _unknown(tensor: Any) -> str:
    """What a message says of a tensor that has no slot."""
    if isinstance(tensor, FakeTensor):
        return (
            "was made where capture does not see it; let the step run all operators in one thread"
        )
    return (
        "capture could not find; pass it to the step as an argument, or keep it in a module, a list "
        "or an attribute that the step's function can reach"
    )


Where = tuple[str, Source]
"""The phase and the source of a call."""


class Slots:
    """What a recording knows of the tensors of its step, and of how they stand in `program`."""

    def __init__(
        self,
        frames: Places,
        real_arguments: list[Any],
        kernels: FakeKernels,
        watch: Watch | None,
    ) -> None:
        self.program = Program()
        self.literals: list[tuple[torch.Tensor, int, Source]] = []
        """(tensor, slot, line) of each literal of the user's code."""
        self.frames = frames
        self._real_arguments = real_arguments
        self._kernels = kernels
        self._refs: list[Ref] = []
        self._signatures: list[int] = []
        self._sized_signatures: list[Any] = []
        """For each slot, what `_signatures` says, or a key that also tells expressions of sizes
        apart."""
        self._storage_numbers: dict[int, int] = {}
        self._kept: list[
            Any
        ] = []  # Storages stay alive, so that none's address is given out twice.
        self._tagged: dict[int, tuple[FakeTensor, int]] = {}
        self._ends: dict[Any, int] = {}
        """For each node of autograd's that stands for a history from before the step, the slot of
        its tensor.
        """
        self._assigned: dict[int, tuple[str, Source]] = {}
        self.assignments = 0
        """How often tensors have been given other data so far."""
        self._watch = watch
        self._bases: dict[int, Ref | None] = {}
        """For each storage whose memory has been given back, by its pointer: the slot that has all
        of the memory that was taken instead; None while none has been taken.
        """
        self._joined: dict[int, tuple[Any, Joined]] = {}
        """By identity, distributed tensors and wrappers with what stands for them in the program.
        """
        self.wholes: dict[int, tuple[Any, Any, list[tuple[Any, Any]]]] = {}
        """By identity, wrappers from before the step, each with its reference, and with a reference
        for each of its inner tensors."""
        self._refusal: CaptureError | None = None
        self._on_number: Callable[[int], None] | None = None
        self._twins: dict[int, tuple[torch.Tensor, Any, torch.Tensor]] = {}
        """By identity, real tensors that the step was given instead of fakes: with the fake
        and a copy."""

    def add_given(self, reference: Any, tensor: Any) -> None:
        """Registers a tensor that its reference holds before the step: of a wrapper, its inner
        tensors.
        """
        if not is_wrapper(tensor):
            self.add_referenced(reference, tensor, reference.path)
            return
        form = checked_form(tensor, reference.path)
        parts = list(zip(part_references(reference, tensor), parts_of(tensor), strict=True))
        self.wholes[id(tensor)] = tensor, reference, parts
        self._joined[id(tensor)] = tensor, Joined(form, reference)
        self.program.given_layouts[reference.path] = form
        self.program.wholes.append((reference, form))
        for part_reference, part in parts:
            self.add_referenced(part_reference, part, part_reference.path)

    def add_referenced(self, reference: Any, tensor: FakeTensor, name: str) -> int:
        """Registers a tensor that its reference holds before the step. Returns its slot."""
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
        """Registers a tensor that the program itself holds. Returns its slot."""
        slot = self._add_tensor(tensor, creator=-1, name=f"constant_{len(self.program.constants)}")
        self.program.constants.append((real, slot))
        return slot

    def is_original(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one from before the step."""
        return id(tensor) in self._tagged or id(tensor) in self.wholes

    def history_of(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """The references of the tensors from before the step to which a backward pass from a tensor
        would come.
        """
        nodes = list(nodes_behind(tensor))
        variables = [getattr(node, "variable", None) for node, is_last in nodes if is_last]
        found = {self._ends.get(node) for node, _ in nodes} | set(map(self.slot_of, variables))
        wholes = [self.wholes[id(one)][1] for one in variables if id(one) in self.wholes]
        return (
            *(reference for reference, slot in self.program.referenced if slot in found),
            *wholes,
        )

    def given(self) -> list[tuple[Any, Any]]:
        """(tensor, reference): the tensors from before the step, wrappers among them."""
        references = {slot: reference for reference, slot in self.program.referenced}
        return [
            *((tensor, references[slot]) for tensor, slot in self._tagged.values()),
            *((tensor, reference) for tensor, reference, _ in self.wholes.values()),
        ]

    def slot_of(self, value: Any) -> int | None:
        """The slot of a tensor or live number of this recording; None for anything else."""
        if issubclass(type(value), torch.Tensor):
            tag = getattr(local_of(value), "_roam_slot", None)
            return int(tag[1]) if tag is not None and tag[0] is self else None
        node = node_of(value)
        if node is None or node.trace is not cast(TraceContext, self):
            return None
        self.use_number(node.slot)
        return node.slot

    def watch_numbers(self, notice: Callable[[int], None] | None) -> int:
        """From now on calls `notice` with the slot of each live number that the step uses; None
        ends this.

        Returns:
            How many slots there are so far.
        """
        self._on_number = notice
        return len(self.program.slots)

    def use_number(self, slot: int) -> None:
        """Tells the function that `watch_numbers` was given that the step uses a live number."""
        if self._on_number is not None:
            self._on_number(slot)

    def _fake(self, value: Any) -> Any:
        """The fake of a real tensor that the recorder has given out; anything else as it is."""
        return self._twins[id(value)][1] if id(value) in self._twins else value

    def close(self) -> None:
        """Takes the marks off the tensors again."""
        given = (local_of(tensor) for tensor, _ in self._tagged.values())
        for tensor in given:
            if getattr(tensor, "_roam_slot", (None,))[0] is self:
                del tensor._roam_slot
        self._tagged.clear()
        self._ends.clear()
        self._twins.clear()
        self._joined.clear()
        self.wholes.clear()
        self._watch = (
            None  # it holds generators' states, and a recorder lives until its cycles are found
        )

    # -- assigned data

    def assign(self, tensor: Any, data: Any) -> None:
        """What `tensor.data = data` does: other data under the same name, history and version
        counter.
        """
        slot = self.slot_of(tensor)
        if is_wrapper(data):
            self.refuse(
                f"the step gives a tensor a {type(data).__name__} as its data (x.data = ...), which has none of its "
                "own; write into the tensor under torch.no_grad(), as in x.copy_(...)",
                code="subclass",
            )  # fmt: skip
        if slot is None or not isinstance(data, torch.Tensor):
            TENSOR_DATA.__set__(tensor, data)
            return
        if tensor.device != data.device:
            self.refuse(
                "the step gives a tensor data on another device; move the tensor outside of the "
                "step",
                code="storage_replaced",
            )
        if torch.is_inference_mode_enabled():
            self.refuse(
                "the step gives a tensor other data under torch.inference_mode(); use "
                "torch.no_grad() there",
                code="storage_replaced",
            )
        alias = data.detach()  # shares the data's memory, and cannot itself be given other data
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
            if data is None or self.program.slots[data] == self.program.slots[slot]:
                continue
            where = self._assigned[id(tensor)]
            self._add_call(assign_data, (Ref(slot), Ref(data)), None, where, mutates=(slot,))

    # -- refusals

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

    def refuse_zero_derivative(self, op: str, source: Source) -> NoReturn:
        """Refuses what gets a derivative that PyTorch knows to be zero, and never makes."""
        self.refuse(
            "it is given a derivative that is zero everywhere, of forward-mode automatic differentiation (jvp, jacfwd, "
            "and hessian, which is jacfwd of jacrev), which a plan cannot run here; use reverse mode: "
            "torch.func.jacrev(f) for jacfwd(f), and torch.func.jacrev(torch.func.jacrev(f)) for hessian(f)",
            code="forward_mode", op=op, source=source,
        )  # fmt: skip

    # -- arguments

    def references(self, value: Any, user: str) -> Any:
        """The nest with a `Ref` for every tensor and live number."""

        def reference(leaf: Any) -> Any:
            if is_dtensor(leaf):
                self.refuse(
                    f"{user} is given a DTensor; give it value.to_local(), or a number",
                    code="dtensor",
                )
            if not isinstance(leaf, (torch.Tensor, torch.SymFloat, torch.SymInt)):
                return leaf
            slot = self.slot_of(leaf)
            if slot is None:
                self.refuse(
                    f"{user} is given a tensor that {_unknown(leaf)}", code="unknown_tensor"
                )
            return Ref(slot)

        return mapped(reference, value)

    def _recorded(self, nest: Any, call: Call) -> Any:
        """The nest of arguments with slots for tensors and live numbers."""
        return mapped(functools.partial(self._recorded_leaf, call), nest)

    def _recorded_leaf(self, call: Call, value: Any) -> Any:
        if issubclass(type(value), torch.Tensor):
            return self._refs[self._slot_of_argument(value, call.target, call.source)]
        if isinstance(value, (torch.SymFloat, torch.SymInt, torch.SymBool)):
            if (size := recorded_number(value)) is not None:
                return size
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
        return value

    def _generator(self, generator: torch.Generator, call: Call) -> torch.Generator:
        known = generator if self._watch is None else self._watch.known(generator)
        if known is None:
            self.refuse(
                "it draws from a generator that capture could not find, or that the step itself "
                "makes; make generators outside of the step, and pass them to it",
                code="generator_state", op=call.name, source=call.source,
            )  # fmt: skip
        return known

    def _slot_of_argument(self, tensor: Any, target: Any, source: Source) -> int:
        slot = self.slot_of(tensor)
        if slot is not None and self._bases:
            slot = self._renew(local_of(tensor), slot)
        if slot is None:
            shape = tuple(tensor.shape)
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
                self.refuse(
                    f"it is given a {type(tensor).__name__}, a class of tensors that the step itself makes, whose operators capture "
                    "cannot record; use plain tensors in the step, or turn off the option that makes them",
                    code="subclass", op=str(target), source=source,
                )  # fmt: skip
            if tensor.device.type == "meta" and any(
                call.target is aten._efficientzerotensor.default for call in self.program.calls
            ):
                self.refuse_zero_derivative(str(target), source)
            self.refuse(
                f"it uses a tensor of shape {shape} that {_unknown(tensor)}",
                code="unknown_tensor", op=str(target), source=source,
            )  # fmt: skip
        if not self._is_intact(tensor, slot):
            self.refuse(_REPLACED, code="storage_replaced", op=str(target), source=source)
        return slot

    # -- memory that is given back and taken again

    def add_alias(self, tensor: Any, of: Any) -> None:
        """Records that a tensor is a view of another, or of memory that it has."""
        where = self.frames.here()
        self._alias(tensor, Ref(self._slot_of_argument(of, "view", where[1])), where)

    def _alias(self, tensor: Any, base: Ref, where: Where) -> int:
        index = len(self.program.calls)
        slot = self._add_tensor(tensor, creator=index, name=f"as_strided_{index}")
        layout = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        self._add_call(aten.as_strided.default, (base, *layout), slot, where)
        return slot

    def give_memory_back(self, tensor: Any) -> None:
        """A tensor that has all of its storage's memory gives it back: whatever lies there is
        lost.
        """
        pointer = storage_pointer(tensor.untyped_storage())
        if self._storage_numbers.pop(pointer, None) is not None:
            self._bases[pointer] = None

    def take_memory(self, tensor: Any) -> None:
        """A tensor that has given its memory back takes other memory; so do all views of it."""
        pointer = storage_pointer(tensor.untyped_storage())
        if self._bases.get(pointer, MISSING) is not None:
            return  # it has its memory
        index = len(self.program.calls)
        slot = self._add_tensor(tensor, creator=index, name=f"empty_{index}")
        self._bases[pointer] = self._refs[slot]
        options = {"dtype": tensor.dtype, "device": tensor.fake_device}
        shape = (list(tensor.shape),)
        self._add_call(aten.empty.memory_format, shape, slot, self.frames.here(), options)

    def _renew(self, tensor: Any, slot: int) -> int:
        """The slot of a tensor, also where its memory has been given back and taken again."""
        if not self._bases:
            return slot
        pointer = storage_pointer(tensor.untyped_storage())
        base, meta = self._bases.get(pointer), self.program.slots[slot]
        if base is None or meta is None or meta.storage == self._storage_numbers[pointer]:
            return slot
        return self._alias(tensor, base, self.frames.here())

    # -- what the step leaves

    def leaving(self, tensor: Any, place: str) -> int:
        """The slot of a tensor that is at `place` after the step; one from before the step is
        itself, whatever its data is.
        """
        tensor = self._fake(tensor)
        slot = self.slot_of(tensor)
        if slot is None:
            raise CaptureError(
                f"the step puts a tensor at {place} that {_unknown(tensor)}", code="unknown_tensor"
            )
        if not self._is_intact(local_of(tensor), slot):
            raise CaptureError(f"{place}: {_REPLACED}", code="storage_replaced")
        if self.is_original(tensor):
            return self._tagged[id(tensor)][1]
        for name in own_attributes(tensor):
            raise CaptureError(
                f"the step sets the attribute {name!r} of the tensor at {place}, which a "
                "plan cannot repeat; keep its value in a dictionary",
                code="tensor_attribute",
            )
        return slot

    def joined(self, tensor: Any, place: str) -> Joined | None:
        """What a run puts together at `place` after the step for a distributed tensor, or a
        wrapper; None for any other.
        """
        if id(tensor) in self._joined:
            return self._joined[id(tensor)][1]
        if is_wrapper(tensor):
            if tensor.requires_grad:
                raise CaptureError(
                    f"the step leaves at {place} a {type(tensor).__name__} that requires a gradient; detach it",
                    code="subclass",
                )  # fmt: skip
            made = Joined(checked_form(tensor, place))
        elif is_dtensor(tensor):
            made = Joined(layout_of(tensor))
            if holds_mask(made.layout):
                raise CaptureError(
                    f"the step leaves at {place} a DTensor whose placement holds a mask, like the "
                    "result of an embedding whose rows are split; redistribute it in the step",
                    code="dtensor",
                )
        else:
            return None
        self._joined[id(tensor)] = tensor, made
        return made

    def _is_intact(self, tensor: Any, slot: int) -> bool:
        """Whether a tensor is still what its slot says; `.data = ...` makes it another behind the
        dispatcher's back.
        """
        meta = self.program.slots[slot]
        assert meta is not None
        number = self._storage_numbers.get(storage_pointer(tensor.untyped_storage()))
        if (layout := sized_layout_of(tensor)) is not None:
            return number == meta.storage and len(tensor.shape) == len(layout.shape)
        return (
            number == meta.storage
            and tensor.shape == meta.shape
            and tensor.stride() == meta.stride
            and tensor.storage_offset() == meta.offset
        )

    # -- new slots

    def _add_call(
        self,
        target: Any,
        args: Any,
        output: int | None,
        where: Where,
        kwargs: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Records a call with one result, or with none; `more`: what else `Call` takes."""
        self.program.calls.append(
            Call(target, args, kwargs or {}, (output,), False, *where, **more)
        )

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
        layout = sized_layout_of(tensor)
        size_bytes = (
            tensor.untyped_storage().nbytes() if layout is None else layout.recorded().size_bytes
        )
        self.program.storages.append(
            Storage(size_bytes if size_bytes >= at_least else at_least, creator, name)
        )
        return len(self.program.storages) - 1

    def _new_slot(self, tensor: Any, storage: int) -> int:
        layout = sized_layout_of(tensor)
        if layout is None:
            shape, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        else:
            shape, stride, offset, _ = layout.recorded()
        meta = TensorMeta(
            shape,
            stride,
            offset,
            tensor.dtype,
            tensor.fake_device,  # `device` would be dispatched like an operator
            storage,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        self.program.slots.append(meta)
        self._refs.append(ref_to(len(self._refs)))
        self._signatures.append(
            self._kernels.signature(meta, getattr(tensor, "_roam_twin", tensor))
        )
        self._sized_signatures.append(
            self._signatures[-1] if layout is None else signature(layout, self._signatures[-1])
        )
        return len(self.program.slots) - 1
