"""What one step does on fakes: values, operators, and calls of modules, with what they were given
and returned. Strategies are chosen for these; nothing here knows of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from roam.errors import CaptureError
from roam.sharding.twin import Twin
from roam.state.discovery import reach_of
from roam.state.snapshot import Snapshot
from roam.torch_compat.private import (
    DataDependentOutputException,
    TorchDispatchMode,
    base_name,
    c_pointer,
    graph_task,
    is_dtensor,
    pytree,
    schema_of,
)
from roam.tracing.fake_kernels.cache import tensors_in
from roam.tracing.recording.kernel_facts import written_by


@dataclass(frozen=True, slots=True)
class Reference:
    """Stands for a value in an operator's arguments."""

    value: int


@dataclass(slots=True)
class Value:
    """A tensor that an operator made, or that was there before the step.

    `creator` is the number of an operator, or -1.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    creator: int
    is_differentiable: bool = False
    """Whether a gradient flows back through it."""
    parameter: str | None = None

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class Operator:
    """One call of a kernel in the forward pass."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    """Every tensor argument, in the order of the arguments."""
    outputs: tuple[int | None, ...]
    """Values, None for a result that is no tensor."""
    call: int
    """The innermost call of a module around it; -1 outside of all."""
    flops: int
    time: int
    """Its place among all operators of the step."""
    is_random: bool
    mutates: bool


@dataclass(slots=True)
class ModuleCall:
    """One call of a module."""

    path: str
    module: torch.nn.Module
    parent: int
    """Number of the call around it; -1 if there is none."""
    given: list[tuple[str | int, int]] = field(default_factory=list)
    """Tensors that the call was given: position or name, and the value."""
    positional: int = 0
    returned: list[int] = field(default_factory=list)
    is_single: bool = False
    """Whether it returned one tensor and nothing else."""
    first_operator: int = 0
    last_operator: int = 0
    """The operators from `first_operator` up to and without `last_operator` belong to the call or
    to calls within it.
    """


@dataclass(slots=True)
class Trace:
    """One step."""

    values: list[Value]
    operators: list[Operator]
    """Those of the forward pass."""
    calls: list[ModuleCall]
    last_use: dict[int, int]
    """Per storage, the time of the last operator of the step that touches it."""
    storage_bytes: dict[int, int]
    end: int
    """How many operators the forward and the backward pass have."""
    reads: dict[int, list[int]] = field(default_factory=dict)
    """Per call of a module, the values of which its own code asks for the shape, in order."""
    collectives: list[tuple[str, int]] = field(default_factory=list)
    """Kind and bytes of the whole tensor, as `Collective` has them, forward and backward."""
    innermost: int = -1
    """The call of a module in which the forward pass ended; -1 outside of all."""
    loss: int = -1
    """The value on which the step calls `backward`; -1 if it asks for gradients otherwise."""
    late_change: str = ""
    """An operator that changes state, after the backward pass, by what is computed from samples."""


def traced(train_step: Callable[..., Any], twin: Twin) -> Trace:
    """One step up to the optimizer's update.

    Raises:
        CaptureError: the step has no backward pass, asks for a tensor's value before it, or raises.
    """
    trace, error = traced_until(train_step, twin)
    if isinstance(error, DataDependentOutputException):
        raise CaptureError(
            f"the step asks for a tensor's value before its backward pass ({error}); leave that "
            "out of the step that is parallelized",
            code="value_reached_python",
        ) from error
    if error is not None:
        raise CaptureError(
            f"the step raised {type(error).__name__} when it was run on fake tensors: {error}",
            code="step_raised",
        ) from error
    if trace.end == (trace.operators[-1].time + 1 if trace.operators else 0):
        raise CaptureError(
            "the step has no backward pass, so there is nothing to parallelize; call "
            "loss.backward() in it",
            code="no_backward",
        )
    return trace


def traced_until(train_step: Callable[..., Any], twin: Twin) -> tuple[Trace, Exception | None]:
    """One step up to the optimizer's update, or up to what its forward pass raises. What it changes
    besides the twin, such as counters, lists and schedulers, is put back.
    """
    tracer = _Tracer(twin.model)
    before = Snapshot(reach_of(train_step))
    optimizer = twin.optimizer
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    raised: Exception | None = None
    try:
        with ExitStack() as stack:
            stack.enter_context(twin.mode)
            stack.enter_context(tracer.hooks())
            stack.enter_context(tracer)
            stack.enter_context(_Reads(tracer))
            train_step(twin.model, optimizer, *twin.batch)
    except Exception as error:  # noqa: BLE001 - the caller says what it means
        # Only what the forward pass raises counts.
        raised = None if tracer.has_gone_back else error
    finally:
        del optimizer.step
        before.restore()
    return tracer.trace(), raised


class _Reads(TorchFunctionMode):
    """Notes the tensors whose shapes, and whose gradients, the step asks for."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _SHAPE_READS:
            self._tracer.note_read(args[0])
        elif func is torch.Tensor.backward:
            self._tracer.note_loss(args[0])
        return func(*args, **(kwargs or {}))


_SHAPE_READS = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.numel,
    torch.Tensor.__len__,
}


_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class _Tracer(TorchDispatchMode):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._values: list[Value] = []
        self._tensors: list[torch.Tensor] = []
        """The tensor of each value, kept so that no identity is given out twice."""
        self._known: dict[int, int] = {}
        self._operators: list[Operator] = []
        self._calls: list[ModuleCall] = []
        self._stack: list[int] = []
        self._storages: dict[int, tuple[int, Any]] = {}
        self._last_use: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._time = 0
        self._reads: dict[int, list[int]] = {}
        self._collectives: list[tuple[str, int]] = []
        self._is_in_hooks = False
        """Whether other hooks before a module's forward pass, such as those of styles, are running
        now.
        """
        self.has_gone_back = False
        self._loss = -1
        self._state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._late: set[int] = set()
        """Tensors that the step itself computes after the backward pass from its samples."""
        self._late_change = ""

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Notes calls of all modules."""
        handles = []
        for path, module in self._model.named_modules():
            handles.append(
                module.register_forward_pre_hook(self._begin(path), with_kwargs=True, prepend=True)
            )
            handles.append(module.register_forward_pre_hook(self._begun))
            handles.append(module.register_forward_hook(self._end, always_call=False))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, path: str) -> Callable[..., None]:
        def begin(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if self.has_gone_back:
                return
            call = ModuleCall(path, module, self._stack[-1] if self._stack else -1)
            call.positional = len(args)
            call.first_operator = len(self._operators)
            for name, value in (*enumerate(args), *kwargs.items()):
                if isinstance(value, torch.Tensor) and not is_dtensor(value):
                    call.given.append((name, self._value(value)))
            self._stack.append(len(self._calls))
            self._calls.append(call)
            self._is_in_hooks = True

        return begin

    def _begun(self, module: torch.nn.Module, args: Any) -> None:
        self._is_in_hooks = False

    def note_read(self, tensor: Any) -> None:
        """The innermost module asks for a tensor's shape."""
        number = self._known.get(id(tensor))
        if number is not None and not self.has_gone_back and not self._is_in_hooks:
            values = self._reads.setdefault(self._stack[-1] if self._stack else -1, [])
            if number not in values:
                values.append(number)

    def note_loss(self, tensor: Any) -> None:
        """The step asks for the gradients of a tensor."""
        self._loss = self._known.get(id(tensor), -1)

    def _end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.has_gone_back or not self._stack:
            return
        call = self._calls[self._stack.pop()]
        call.last_operator = len(self._operators)
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        call.returned = [self._value(leaf) for leaf in leaves if not is_dtensor(leaf)]
        call.is_single = isinstance(output, torch.Tensor)

    def _storage(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        pointer = c_pointer(storage)
        if pointer not in self._storages:
            self._storages[pointer] = len(self._storages), storage
            self._bytes[len(self._storages) - 1] = storage.nbytes()
        return self._storages[pointer][0]

    def _value(self, tensor: torch.Tensor) -> int:
        number = self._known.get(id(tensor))
        return self._add(tensor, -1) if number is None else number

    def _add(self, tensor: torch.Tensor, creator: int) -> int:
        number = self._known[id(tensor)] = len(self._values)
        self._tensors.append(tensor)
        self._values.append(
            Value(
                tuple(tensor.shape),
                tensor.stride(),
                tensor.dtype,
                self._storage(tensor),
                creator,
                parameter=self._names.get(id(tensor)),
            )
        )
        return number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        if any(map(is_dtensor, given)):
            return NotImplemented
        result = func(*args, **kwargs)
        if func.namespace in ("prim", "profiler"):
            return result  # asks for a device, or only marks a profiler's range
        if graph_task() != -1:
            self.has_gone_back = True
        if func.namespace == "_c10d_functional" and (kind := _COLLECTIVES.get(base_name(func))):
            sizes = [tensor.nbytes for tensor in (*given, result)]
            self._collectives.append((kind, max(sizes)))
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        time, self._time = self._time, self._time + 1
        for tensor in (*given, *made):
            self._last_use[self._storage(tensor)] = time
        if self.has_gone_back:
            # Kept, so that no storage's address is given out twice.
            self._tensors += made
            if graph_task() == -1:
                self._note_late(func, given, made, written_by(func, args, kwargs))
            return result
        number = len(self._operators)
        inputs = tuple(self._value(tensor) for tensor in given)

        def reference(tensor: torch.Tensor) -> Reference:
            return Reference(self._value(tensor))

        noted_args, noted_kwargs = pytree.tree_map_only(torch.Tensor, reference, (args, kwargs))
        leaves = list(result) if isinstance(result, (tuple, list)) else [result]
        outputs = tuple(
            self._add(leaf, number) if isinstance(leaf, torch.Tensor) else None for leaf in leaves
        )
        if self._is_in_hooks:
            return result
        count = flop_registry.get(getattr(func, "overloadpacket", None))
        self._operators.append(
            Operator(
                func,
                noted_args,
                noted_kwargs,
                inputs,
                outputs,
                self._stack[-1] if self._stack else -1,
                0 if count is None else int(count(*args, **kwargs, out_val=result)),
                time,
                torch.Tag.nondeterministic_seeded in func.tags,
                schema_of(func).is_mutable,
            )
        )
        return result

    def _note_late(
        self, func: Any, given: list[torch.Tensor], made: list[torch.Tensor], written: list[Any]
    ) -> None:
        """An operator of the step's own code runs after the backward pass."""
        is_of_samples = {
            id(tensor)
            for tensor in given
            if id(tensor) in self._late
            or (id(tensor) in self._known and id(tensor) not in self._state)
        }
        if is_of_samples:
            self._late.update(map(id, made))
            if not is_of_samples.issuperset(map(id, tensors_in(written))):
                self._late_change = str(func)

    def trace(self) -> Trace:
        for value, tensor in zip(self._values, self._tensors, strict=False):
            value.is_differentiable = tensor.requires_grad
        return Trace(
            self._values,
            self._operators,
            self._calls,
            self._last_use,
            self._bytes,
            self._time,
            self._reads,
            self._collectives,
            self._stack[-1] if self._stack else -1,
            self._loss,
            self._late_change,
        )
