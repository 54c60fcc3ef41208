"""Executes a program in a plan's order, out of the ordinary allocator.

The order is compiled once to straight-line Python, one line a call: values are local variables, and a line ends by
forgetting those whose memory dies there. Nothing is interpreted per operator. The first run of a plan goes through
`run_checked` instead, which compares every result with what capture said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from roam.capture.program import Call, Program, Ref, TensorMeta, refs, substitute
from roam.errors import ExecutionError

_FILE = "<roam plan>"


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a run stopped."""

    step: int
    """Place in the plan's order of the call that raised."""
    call: Call


class Executor:
    """One program in one order. Reentrant; holds no tensors but the program's literals."""

    def __init__(self, program: Program, order: Sequence[int]) -> None:
        self.program = program
        self.order = [int(index) for index in order]
        self._frees = _frees(program, self.order)
        self._run = self._compile()

    def run(self, inputs: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """The values of the result's leaves, of the rebinds, and of the schedulers' arguments.

        Args:
            inputs: values of `Program.owned`, then of `Program.constants`, in their order.
        """
        outgoing: tuple[Any, list[Any], list[Any]] = self._run(inputs)
        return outgoing

    def run_checked(self, inputs: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """As `run`, comparing shape, strides, dtype, device and storage of every result with the program.

        Raises:
            ExecutionError: where a kernel does on real tensors what it did not do on fake ones.
        """
        program = self.program
        check = _Check(program)
        values: dict[int, Any] = dict(zip(self._input_slots(), inputs, strict=True))
        for slot, value in values.items():
            check.input(slot, value)
        for step, index in enumerate(self.order):
            call = program.calls[index]
            try:
                check.before(call, values)
                call.run(values)
                check.after(index, call, values)
            except BaseException as error:
                error._roam_failure = Failure(step, call)  # type: ignore[attr-defined]
                raise
            for slot in self._frees[step]:
                values.pop(slot, None)
        return self._outgoing(lambda ref: values[ref.slot])

    def failure(self, error: BaseException) -> Failure | None:
        """Which call an exception from `run` or `run_checked` comes from; None if from none."""
        known: Failure | None = getattr(error, "_roam_failure", None)
        if known is not None:
            return known
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == _FILE:
                step = trace.tb_lineno - _FIRST_LINE
                if 0 <= step < len(self.order):
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

    def _compile(self) -> Any:
        names = _Names()
        inputs = "".join(f"v{slot}, " for slot in self._input_slots())
        lines = [
            "def run(inputs):",
            f"    ({inputs}) = inputs" if inputs else "    pass",
            *(self._line(step, index, names) for step, index in enumerate(self.order)),
        ]
        leaves, rebinds, after = self._outgoing(lambda ref: _Name(f"v{ref.slot}"))
        lines.append(f"    return ({names.show(leaves)}, {names.show(rebinds)}, {names.show(after)})")
        exec(compile("\n".join(lines), _FILE, "exec"), names.values)
        return names.values["run"]

    def _line(self, step: int, index: int, names: _Names) -> str:
        call = self.program.calls[index]
        args = [names.show(substitute(arg, lambda ref: _Name(f"v{ref.slot}"))) for arg in call.args]
        args += [
            f"{key}={names.show(substitute(arg, lambda ref: _Name(f'v{ref.slot}')))}"
            for key, arg in call.kwargs.items()
        ]
        line = f"{names.constant(call.target)}({', '.join(args)})"
        if any(slot is not None for slot in call.outputs):
            targets = ", ".join("_" if slot is None else f"v{slot}" for slot in call.outputs)
            line = f"({targets},) = {line}" if call.returns_sequence else f"{targets} = {line}"
        frees = "".join(f"v{slot} = " for slot in self._frees[step])
        return f"    {line}; {frees}None" if frees else f"    {line}"


_FIRST_LINE = 3
"""Line of the first call in the compiled text."""


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


def _frees(program: Program, order: list[int]) -> list[list[int]]:
    """Per step, the slots to forget after it: all views of the storages whose last use it is."""
    outgoing = set(refs(program.result[0])) | {slot for _, slot in program.rebinds}
    outgoing.update(slot for host_call in program.after for slot in refs(host_call.arguments))
    kept = {_storage(program, slot) for slot in outgoing}
    kept.update(number for number, storage in enumerate(program.storages) if storage.creator < 0)
    last: dict[int, int] = {}
    views: dict[int, dict[int, None]] = {}
    for step, index in enumerate(order):
        call = program.calls[index]
        for slot in (*call.refs(), *(slot for slot in call.outputs if slot is not None)):
            storage = _storage(program, slot)
            if storage >= 0 and storage not in kept:
                last[storage] = step
                views.setdefault(storage, {})[slot] = None
    frees: list[list[int]] = [[] for _ in order]
    for storage, step in last.items():
        frees[step].extend(views[storage])
    return frees


def _storage(program: Program, slot: int) -> int:
    meta = program.slots[slot]
    return -1 if meta is None else meta.storage


class _Check:
    """Holds a first run against the program: nothing may differ from what was captured under fake tensors."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._storages: dict[int, int] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._generator: torch.Tensor | None = None

    def input(self, slot: int, value: Any) -> None:
        meta = self._program.slots[slot]
        if meta is not None:
            self._storages[meta.storage] = value.untyped_storage()._cdata

    def before(self, call: Call, values: dict[int, Any]) -> None:
        changed = {_storage(self._program, slot) for slot in call.mutates}
        self._versions = [
            (values[slot], values[slot]._version)
            for slot in call.refs()
            if self._program.slots[slot] is not None
            and _storage(self._program, slot) not in changed
            and not values[slot].is_inference()  # those have no version
        ]
        self._generator = None if call.random else torch.get_rng_state()

    def after(self, index: int, call: Call, values: dict[int, Any]) -> None:
        for tensor, version in self._versions:
            if tensor._version != version:
                self._differs(call, "it wrote to an argument that its schema does not name")
        if self._generator is not None and not torch.equal(self._generator, torch.get_rng_state()):
            self._differs(call, "it drew random numbers and does not say so")
        for slot in call.outputs:
            meta = self._program.slots[slot] if slot is not None else None
            if meta is None:
                continue
            value = values[slot]  # type: ignore[index]
            for what, expected, actual in _metadata(meta, value):
                if expected != actual:
                    self._differs(call, f"its result's {what} is {actual}, and was {expected} at capture")
            storage = value.untyped_storage()
            if meta.storage in self._storages and self._program.storages[meta.storage].creator != index:
                if self._storages[meta.storage] != storage._cdata:
                    self._differs(call, "its result is a copy, and was a view at capture")
                continue
            if storage.nbytes() != self._program.storages[meta.storage].size_bytes:
                size = self._program.storages[meta.storage].size_bytes
                self._differs(call, f"its result takes {storage.nbytes()} bytes, and took {size} at capture")
            if any(storage._cdata == argument.untyped_storage()._cdata for argument in _argument_tensors(call, values)):
                self._differs(call, "its result is a view, and had memory of its own at capture")
            self._storages[meta.storage] = storage._cdata

    def _differs(self, call: Call, what: str) -> None:
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
