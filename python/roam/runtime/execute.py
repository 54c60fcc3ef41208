"""Executes a program by a plan, out of a static pool or of the ordinary allocator.

A plan is compiled once to straight-line Python: values outside the pool are local variables, and a line ends by
forgetting those whose memory dies there; a tensor in the pool is one view that is made once, so that views of it need no call at all. Nothing is interpreted
per operator. The first run of a plan goes through `run_checked` instead, which compares every result with what capture said.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
from torch._ops import OpOverload

from roam._core import Plan
from roam.errors import ExecutionError
from roam.kernels.calls import Placed
from roam.kernels.substitutes import UNINITIALIZED
from roam.kernels.trial import differ
from roam.program import Call, Program, Ref, TensorMeta, substitute
from roam.runtime.lanes import Lanes
from roam.runtime.pool import Pool

_FILE = "<roam plan>"
_POISON = 0xFF  # not a number in floating point, and no valid bool

Way = Literal["view", "write", "land", "call"]
"""How a call is run: not at all, since its results are views of the pool that exist; by a kernel that writes where it is told; as
ever, with its results copied into the pool; as ever."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a run stopped."""

    step: int
    """Place in the plan's order of the call that raised."""
    call: Call


class Executor:
    """One program by one plan.

    Args:
        program: the program.
        placed: per call, what `placed_calls` says of it.
        plan: a plan of the program's graph.
        lanes: the device's streams, where the plan is for several. The first run uses one, in launch order, which is one of the
            timings that the plan allows.
        pool: where the plan's offsets are; None: every tensor comes from the ordinary allocator, and only the plan's order and
            reuse count.
        poison: whether to fill every range of the pool as soon as its tensor dies, so that whoever still reads it is found out.
        proven: whether tests have established, with this very PyTorch, that the placed kernels give the ordinary bits. If not, the
            first run compares them, and what differs is run as ever from then on.
    """

    def __init__(
        self,
        program: Program,
        placed: Sequence[Placed | None],
        plan: Plan,
        *,
        pool: Pool | None = None,
        lanes: Lanes | None = None,
        poison: bool = False,
        proven: bool = True,
    ) -> None:
        self.program = program
        self.order = [int(index) for index in plan.order]
        self.pool = pool
        self.lanes = lanes
        self._lane = [int(stream) for stream in plan.streams]
        self._recorded: dict[int, list[int]] = {}
        self._awaited: dict[int, list[int]] = {}
        for event, (before, after) in enumerate(plan.syncs):
            self._recorded.setdefault(before, []).append(event)
            self._awaited.setdefault(after, []).append(event)
        self._placed = placed
        self._pool_bytes = plan.pool_bytes if pool is not None else 0
        self._offsets = (
            {} if pool is None else {at: int(offset) for at, offset in enumerate(plan.offsets) if offset >= 0}
        )
        self._taken = {new: old for old, new in plan.reuse}
        self._poison = poison and pool is not None
        self._proven = proven
        self._refused: set[int] = set()
        self._dying = _dying(program, self.order)
        self._bound: dict[int, torch.Tensor] = {}
        self.text = ""
        """What runs, in Python; there after the first run."""
        self._steps: list[int] = []
        """Per line of the text the step that it belongs to, or -1."""
        self._run: Any = None

    def run(self, inputs: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """The values of the result's leaves, of the rebinds, and of the schedulers' arguments.

        `run_checked` comes first; where there is a pool, it must be held.

        Args:
            inputs: values of `Program.owned`, then of `Program.constants`, in their order. The list is emptied, so that what
                nobody else holds is gone after its last use.
        """
        with nullcontext() if self.lanes is None else self.lanes.entered():
            outgoing: tuple[Any, list[Any], list[Any]] = self._run(inputs)
        return outgoing

    def run_checked(self, inputs: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """As `run`, comparing shape, strides, dtype, device and storage of every result with the program.

        Raises:
            ExecutionError: where a kernel does on real tensors what it did not do on fake ones.
        """
        program = self.program
        check = _Check(program)
        self._bind()
        values: dict[int, Any] = {**self._bound, **dict(zip(self._input_slots(), inputs, strict=True))}
        inputs.clear()
        for slot in self._input_slots():
            check.note(slot, values[slot])
        if self._poison:
            self._range(None).fill_(_POISON)
        for step, index in enumerate(self.order):
            call = program.calls[index]
            try:
                self._run_one(index, call, values, check)
            except BaseException as error:
                error._roam_failure = Failure(step, call)  # type: ignore[attr-defined]
                raise
            for storage, slots in self._dying[step].items():
                if storage not in self._offsets:
                    for slot in slots:
                        values.pop(slot, None)
                elif self._is_poisoned(storage, index):
                    self._range(storage).fill_(_POISON)
        self._run = self._compile()
        return self._outgoing(lambda ref: values[ref.slot])

    def _run_one(self, index: int, call: Call, values: dict[int, Any], check: _Check) -> None:
        way = self._way(index)
        check.before(call, values, {self._taken.get(storage, -1) for storage in self._made(index)})
        if way == "write":
            self._write(index, call, values, check)
            return
        held = {slot: self._bound[slot] for slot in call.outputs if slot in self._bound}
        if way == "view" and call.target is torch.ops.aten.as_strided.default:
            return  # it counts from where the storage begins, which is another one
        call.run(values)
        check.after(index, call, values, held)
        for slot, place in held.items():
            if way == "land":
                place.copy_(values[slot])
            values[slot] = place

    def _write(self, index: int, call: Call, values: dict[int, Any], check: _Check) -> None:
        """Runs a call by its placed kernel, and sees to it that the results are where they were wanted."""
        outs = []
        for slot in call.outputs:
            old = self._donor(index, slot)  # type: ignore[arg-type]
            if slot not in self._bound:
                values[slot] = self._empty(slot) if old is None else values[old]  # type: ignore[index, arg-type]
                check.note(slot, values[slot])  # type: ignore[index, arg-type]
            outs.append(values[slot])  # type: ignore[index]
        places = [(out.data_ptr(), out.shape, out.stride()) for out in outs]
        args, kwargs = (substitute(item, lambda ref: values[ref.slot]) for item in (call.args, call.kwargs))
        expected = None if self._proven else self._as_ever(call, args, kwargs)
        function, args, kwargs = self._placement(index).call(args, kwargs, outs)
        function(*args, **kwargs)
        if [(out.data_ptr(), out.shape, out.stride()) for out in outs] != places:
            check.differs(call, "its kernel did not keep the memory that it was given")
        check.unchanged(call)
        if expected is not None and differ(outs, expected):
            self._refused.add(index)
            for out, result in zip(outs, expected, strict=True):
                out.copy_(result)

    def _as_ever(self, call: Call, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
        """What the call returns by itself, the random generator put back."""
        if call.target.name() in UNINITIALIZED:
            return None
        devices = {meta.device for slot in call.outputs if slot is not None and (meta := self.program.slots[slot])}
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"], enabled=call.random):
            result = call.target(*args, **kwargs)
        return tuple(result) if call.returns_sequence else (result,)

    def failure(self, error: BaseException) -> Failure | None:
        """Which call an exception from `run` or `run_checked` comes from; None if from none."""
        known: Failure | None = getattr(error, "_roam_failure", None)
        if known is not None:
            return known
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == _FILE and trace.tb_lineno is not None:
                step = self._steps[min(trace.tb_lineno, len(self._steps) - 1)]
                if step >= 0:
                    return Failure(step, self.program.calls[self.order[step]])
            trace = trace.tb_next
        return None

    def changed_before(self, failure: Failure) -> list[str]:
        """Paths of the owners that the calls up to and with the failing one write to."""
        owners = {self.program.slots[slot].storage: owner.path for owner, slot in self._owned_tensors()}  # type: ignore[union-attr]
        changed: dict[str, None] = {}
        for index in self.order[: failure.step + 1]:
            for slot in self.program.calls[index].mutates:
                path = owners.get(self.program.slots[slot].storage)  # type: ignore[union-attr]
                if path is not None:
                    changed[path] = None
        return list(changed)

    def _owned_tensors(self) -> list[tuple[Any, int]]:
        return [(owner, slot) for owner, slot in self.program.owned if self.program.slots[slot] is not None]

    def _input_slots(self) -> list[int]:
        return [slot for _, slot in self.program.owned] + [slot for _, slot in self.program.constants]

    def _outgoing(self, value: Any) -> tuple[Any, list[Any], list[Any]]:
        leaves, _ = self.program.result
        return (
            substitute(leaves, value),
            [value(Ref(slot)) for _, slot in self.program.rebinds],
            [substitute(host_call.arguments, value) for host_call in self.program.after],
        )

    def _way(self, index: int) -> Way:
        call = self.program.calls[index]
        pooled = [slot for slot in call.outputs if slot is not None and self.program.storage_of(slot) in self._offsets]
        makes = self._made(index)
        if pooled and not makes and not call.mutates and len(pooled) == len(call.outputs):
            return "view"
        makes_pooled = any(storage in self._offsets for storage in makes)
        is_written = makes_pooled or any(storage in self._taken for storage in makes)
        if is_written and self._placed[index] is not None and index not in self._refused:
            return "write"
        return "land" if makes_pooled else "call"

    def _made(self, index: int) -> list[int]:
        """Storages that a call makes."""
        made = [self.program.storage_of(slot) for slot in self.program.calls[index].outputs if slot is not None]
        return [storage for storage in made if storage >= 0 and self.program.storages[storage].creator == index]

    def _placement(self, index: int) -> Any:
        placed = self._placed[index]
        assert placed is not None, "a call that is written"
        return placed.placement

    def _donor(self, index: int, slot: int) -> int | None:
        """The argument's slot whose memory a result takes."""
        old, placed = self._taken.get(self.program.storage_of(slot)), self._placed[index]
        pairs = () if placed is None else placed.in_place
        return next((item for item, new in pairs if new == slot and self.program.storage_of(item) == old), None)

    def _empty(self, slot: int) -> torch.Tensor:
        meta = self.program.slots[slot]
        assert meta is not None, "a tensor"
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)

    def _bind(self) -> None:
        """Makes a view for every tensor in the pool."""
        if self.pool is None or self._bound:
            return
        with torch.inference_mode(False):  # what is made in that mode cannot be written to outside of it
            for slot, meta in enumerate(self.program.slots):
                if meta is not None and meta.storage in self._offsets:
                    self._bound[slot] = self.pool.tensor(meta, self._offsets[meta.storage])

    def _range(self, storage: int | None) -> torch.Tensor:
        """The bytes of a tensor in the pool, or of all of the plan's."""
        assert self.pool is not None, "a plan with a pool"
        if storage is None:
            return self.pool.range(0, self._pool_bytes)
        return self.pool.range(self._offsets[storage], self.program.storages[storage].size_bytes)

    def _is_poisoned(self, storage: int, index: int) -> bool:
        """Whether to poison a tensor that dies at a call: not if a result has its memory."""
        return self._poison and all(self._taken.get(made) != storage for made in self._made(index))

    def _compile(self) -> Any:
        names = _Names()
        inputs = "".join(f"v{slot}, " for slot in self._input_slots())
        lines = ["def run(inputs):", f"    ({inputs}) = inputs" if inputs else "    pass", "    inputs.clear()"]
        steps = [-1] * (len(lines) + 1)  # lines are counted from 1
        if self._poison:
            lines.append(f"    {names.constant(self._range(None))}.fill_({_POISON})")
            steps.append(-1)
        for step, index in enumerate(self.order):
            added = [*self._before(step, index, names), *self._lines(index, names), *self._after(index, names)]
            added += self._forget(step, index, names)
            lines += [f"    {line}" for line in added]
            steps += [step] * len(added)
        leaves, rebinds, after = self._outgoing(self._name)
        for slot in sorted(self.program.outgoing()) if self.lanes is not None else ():
            storage = self.program.storage_of(slot)
            creator = self.program.storages[storage].creator if storage >= 0 else -1
            if creator >= 0 and self._lane[creator] != 0:
                lines.append(f"    {names.constant(self.lanes)}.keep(v{slot}, 0)")
                steps.append(-1)
        lines.append(f"    return ({names.show(leaves)}, {names.show(rebinds)}, {names.show(after)})")
        self._steps = [*steps, -1]
        self.text = "\n".join(lines)
        exec(compile(self.text, _FILE, "exec"), names.values)
        return names.values["run"]

    def _name(self, ref: Ref) -> Any:
        """What stands for a slot's value in the text: the view of the pool itself, or a local variable."""
        return self._bound.get(ref.slot, _Name(f"v{ref.slot}"))

    def _lines(self, index: int, names: _Names) -> Iterator[str]:
        """One call."""
        call, way = self.program.calls[index], self._way(index)
        if way == "view":
            return
        function: Any = call.target
        args, kwargs = (substitute(item, self._name) for item in (call.args, call.kwargs))
        if way == "write":
            for slot in call.outputs:
                assert slot is not None, "a placed call returns tensors"
                if slot not in self._bound:
                    yield self._line_for_result(index, slot, names)
            outs = [self._name(Ref(slot)) for slot in call.outputs if slot is not None]
            function, args, kwargs = self._placement(index).call(args, kwargs, outs)
            yield _line(function, args, kwargs, names)
            return
        line = _line(function, args, kwargs, names)
        copied = [slot for slot in call.outputs if slot in self._bound] if way == "land" else []
        if any(slot is not None for slot in call.outputs):
            is_kept = [slot is not None and (slot in copied or slot not in self._bound) for slot in call.outputs]
            targets = ", ".join(f"v{slot}" if kept else "_" for slot, kept in zip(call.outputs, is_kept, strict=True))
            line = f"({targets},) = {line}" if call.returns_sequence else f"{targets} = {line}"
        yield line
        for slot in copied:
            yield f"{names.constant(self._bound[slot])}.copy_(v{slot}); v{slot} = None"

    def _line_for_result(self, index: int, slot: int, names: _Names) -> str:
        """Memory from the allocator for a written result: an argument's that dies, or new."""
        old = self._donor(index, slot)
        if old is not None:
            return f"v{slot} = v{old}"
        meta = self.program.slots[slot]
        assert meta is not None, "a tensor"
        kwargs = {"dtype": meta.dtype, "device": meta.device}
        return f"v{slot} = {_line(torch.empty_strided, (meta.shape, meta.stride), kwargs, names)}"

    def _before(self, step: int, index: int, names: _Names) -> Iterator[str]:
        """Goes to a call's stream and has it wait for what the plan says."""
        if self.lanes is None:
            return
        if self._lane[index] != (self._lane[self.order[step - 1]] if step else 0):
            yield f"{names.constant(self.lanes)}.switch({self._lane[index]})"
        for event in self._awaited.get(index, ()):
            yield f"{names.constant(self.lanes)}.wait({event})"

    def _after(self, index: int, names: _Names) -> Iterator[str]:
        """Lets other streams know that a call is done, and the allocator which streams use its memory."""
        if self.lanes is None:
            return
        for event in self._recorded.get(index, ()):
            yield f"{names.constant(self.lanes)}.record({event})"
        for slot in dict.fromkeys(self.program.calls[index].refs()):
            storage = self.program.storage_of(slot)
            if storage < 0 or storage in self._offsets or self.program.storages[storage].creator < 0:
                continue
            if self._lane[self.program.storages[storage].creator] != self._lane[index]:
                yield f"{names.constant(self.lanes)}.keep(v{slot}, {self._lane[index]})"

    def _forget(self, step: int, index: int, names: _Names) -> Iterator[str]:
        """What dies at a step."""
        dying = self._dying[step]
        variables = [f"v{slot}" for storage, slots in dying.items() if storage not in self._offsets for slot in slots]
        if variables:
            yield f"{' = '.join(variables)} = None"
        for storage in dying:
            if storage in self._offsets and self._is_poisoned(storage, index):
                yield f"{names.constant(self._range(storage))}.fill_({_POISON})"


def _line(function: Any, args: Any, kwargs: Any, names: _Names) -> str:
    if isinstance(function, OpOverload):
        function = function._op
    shown = [names.show(arg) for arg in args] + [f"{key}={names.show(arg)}" for key, arg in kwargs.items()]
    return f"{names.constant(function)}({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class _Name:
    """A variable's name among the arguments to show."""

    text: str


class _Names:
    """Globals of the compiled text: kernels and constants that have no exact literal."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def constant(self, value: Any) -> str:
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"c{len(self._known)}"
            self.values[name] = value
        return name

    def show(self, value: Any) -> str:
        if isinstance(value, _Name):
            return value.text
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if type(value) is list:
            return f"[{', '.join(map(self.show, value))}]"
        if type(value) is tuple:
            return f"({''.join(f'{self.show(item)}, ' for item in value)})"
        if type(value) is dict:
            return f"{{{', '.join(f'{key!r}: {self.show(item)}' for key, item in value.items())}}}"
        return self.constant(value)


def _dying(program: Program, order: list[int]) -> list[dict[int, list[int]]]:
    """Per step, the storages whose last use it is, each with the slots of all its views."""
    kept = program.leaving()
    kept.update(filter(program.persists, range(len(program.storages))))
    last: dict[int, int] = {}
    views: dict[int, dict[int, None]] = {}
    for step, index in enumerate(order):
        call = program.calls[index]
        for slot in (*call.refs(), *(slot for slot in call.outputs if slot is not None)):
            storage = program.storage_of(slot)
            if storage >= 0 and storage not in kept:
                last[storage] = step
                views.setdefault(storage, {})[slot] = None
    dying: list[dict[int, list[int]]] = [{} for _ in order]
    for storage, step in last.items():
        dying[step][storage] = list(views[storage])
    return dying


class _Check:
    """Holds a first run against the program: nothing may differ from what was captured under fake tensors."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._storages: dict[int, int] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._generator: torch.Tensor | None = None

    def note(self, slot: int, value: Any) -> None:
        """Notes the storage of a value that is not checked itself."""
        meta = self._program.slots[slot]
        if meta is not None:
            self._storages[meta.storage] = value.untyped_storage()._cdata

    def before(self, call: Call, values: dict[int, Any], changed: Collection[int]) -> None:
        """Notes the state that a call may not change: all arguments but those it mutates and the storages `changed`."""
        changed = {*changed, *(self._program.storage_of(slot) for slot in call.mutates)}
        self._versions = [
            (values[slot], values[slot]._version)
            for slot in call.refs()
            if self._program.slots[slot] is not None
            and self._program.storage_of(slot) not in changed
            and not values[slot].is_inference()  # those have no version
        ]
        self._generator = None if call.random else torch.get_rng_state()

    def unchanged(self, call: Call) -> None:
        """Compares what the call may not change with what was noted before it."""
        for tensor, version in self._versions:
            if tensor._version != version:
                self.differs(call, "it wrote to an argument that its schema does not name")
        if self._generator is not None and not torch.equal(self._generator, torch.get_rng_state()):
            self.differs(call, "it drew random numbers and does not say so")

    def after(self, index: int, call: Call, values: dict[int, Any], bound: dict[int, torch.Tensor]) -> None:
        """Compares the results; views of the pool with those that are `bound`."""
        self.unchanged(call)
        made = {meta.storage for slot in bound if (meta := self._program.slots[slot]) is not None}
        made = {storage for storage in made if self._program.storages[storage].creator == index}
        for slot in call.outputs:
            meta = self._program.slots[slot] if slot is not None else None
            if slot is None or meta is None:
                continue
            value = values[slot]
            if slot in bound and meta.storage not in made:
                if value.numel() and _place(value) != _place(bound[slot]):
                    self.differs(call, "its result is not the view that it was at capture")
                continue
            for what, expected, actual in _metadata(meta, value):
                if expected != actual:
                    self.differs(call, f"its result's {what} is {actual}, and was {expected} at capture")
            storage = value.untyped_storage()
            if meta.storage in self._storages and self._program.storages[meta.storage].creator != index:
                if self._storages[meta.storage] != storage._cdata:
                    self.differs(call, "its result is a copy, and was a view at capture")
                continue
            if storage.nbytes() != self._program.storages[meta.storage].size_bytes:
                size = self._program.storages[meta.storage].size_bytes
                self.differs(call, f"its result takes {storage.nbytes()} bytes, and took {size} at capture")
            if any(storage._cdata == argument.untyped_storage()._cdata for argument in _argument_tensors(call, values)):
                self.differs(call, "its result is a view, and had memory of its own at capture")
            self._storages[meta.storage] = storage._cdata

    def differs(self, call: Call, what: str) -> NoReturn:
        """Refuses to go on."""
        raise ExecutionError(
            f"{call.name} at {call.source}: {what}; the plan cannot be trusted",
            code="differs_from_capture", operator=call.name, source=str(call.source),
        )  # fmt: skip


def _argument_tensors(call: Call, values: dict[int, Any]) -> list[torch.Tensor]:
    return [values[slot] for slot in call.refs() if isinstance(values.get(slot), torch.Tensor)]


def _metadata(meta: TensorMeta, value: torch.Tensor) -> list[tuple[str, Any, Any]]:
    compared = [
        ("shape", meta.shape, tuple(value.shape)),
        ("dtype", meta.dtype, value.dtype),
        ("device", meta.device.type, value.device.type),
    ]
    if value.numel():
        # A dimension of one element has no meaningful stride.
        large = [dimension for dimension, size in enumerate(meta.shape) if size != 1]
        strides = tuple(meta.stride[d] for d in large if d < value.dim())
        compared.append(("strides", strides, tuple(value.stride(d) for d in large if d < value.dim())))
        compared.append(("storage offset", meta.offset, value.storage_offset()))
    return compared


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype, list[tuple[int, int]]]:
    """Where its elements are."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.data_ptr(), tensor.dtype, [(size, stride) for size, stride in extents if size != 1]
