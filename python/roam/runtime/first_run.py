"""Compares the first run of a plan, call by call, with what capture said."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import torch

from roam.errors import ExecutionError
from roam.kernels.calls import Placed
from roam.kernels.table import is_proven
from roam.program.bits import differ
from roam.program.expand import AGAIN
from roam.program.ir import Call, Program, TensorMeta
from roam.program.operators import is_foreign, is_region
from roam.program.replay import Replay, cpu_state
from roam.runtime.divergence import digest
from roam.torch_compat.private import OpOverload, c_pointer, version_of


def extra_bytes(program: Program, placed: Sequence[Placed | None], device: torch.device) -> int:
    """The most that a first run allocates on the device beyond what the plan says: copies of what
    kernels of other libraries may not change, ordinary results with which those of placed kernels
    are compared if their equality is not established, and the state of the CPU's random generator.
    """
    is_compared = not is_proven(device.type)
    slots = (
        (*call.refs(), *(call.outputs if _made_again(program, call) else ()))
        if _is_distrusted(call)
        else call.outputs
        if is_compared and at
        else ()
        for call, at in zip(program.calls, placed, strict=True)
    )
    copied = (
        {program.storage_of(slot) for slot in of_call if slot is not None} - {-1}
        for of_call in slots
    )
    copies_bytes = max(
        (sum(program.storages[one].size_bytes for one in storages) for storages in copied),
        default=0,
    )
    return copies_bytes + generator_bytes(device)


def copied_bytes(program: Program) -> int:
    """What copies of all arguments that a program changes take, from which a failed first run is
    undone in the backend of ``torch.compile``.
    """
    changed = program.written()
    metas = [program.slots[slot] for _, slot in program.referenced]
    return sum(
        math.prod(meta.shape) * meta.dtype.itemsize
        for meta in metas
        if meta is not None and meta.storage in changed
    )


def generator_bytes(device: torch.device) -> int:
    """What the state of the CPU's random generator takes of the device's memory."""
    return torch.get_rng_state().nbytes if device.type == "cpu" else 0


class Check:
    """Holds a first run against the program: nothing may differ from what was captured under fake
    tensors.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._storages: dict[int, int] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._contents: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._generator: bytes | None = None
        self._marks: dict[tuple[str, int], bytes] = {}
        """Of what kernels of others make and that is made again, by the names of its memory and
        its place among the results."""

    def note(self, slot: int, value: Any) -> None:
        """Notes the storage of a value that is not checked itself."""
        meta = self._program.slots[slot]
        if meta is not None:
            self._storages[meta.storage] = c_pointer(value.untyped_storage())

    def forget_generator(self) -> None:
        """Something else than a call may have changed the random generator's state."""
        self._generator = None

    def before(self, call: Call, values: dict[int, Any], changed: Collection[int]) -> None:
        """Notes the state that a call may not change: all arguments but those it mutates and the
        storages `changed`.
        """
        changed = {*changed, *(self._program.storage_of(slot) for slot in call.mutates)}
        self._versions = [
            (values[slot], version_of(values[slot]))
            for slot in call.refs()
            if self._program.slots[slot] is not None
            and self._program.storage_of(slot) not in changed
            and not values[slot].is_inference()  # those have no version
        ]
        # A kernel of another library may write without changing version counters.
        kept = (
            {tensor.data_ptr(): tensor for tensor, _ in self._versions}
            if _is_distrusted(call)
            else {}
        )
        self._contents = [(tensor, tensor.clone()) for tensor in kept.values()]
        if call.random:
            self._generator = None
        elif self._generator is None:  # else the call before has left it as it was
            self._generator = cpu_state()

    def unchanged(self, call: Call) -> None:
        """Compares what the call may not change with what was noted before it."""
        for tensor, version in self._versions:
            if version_of(tensor) != version:
                self.differs(call, "it wrote to an argument that its schema does not name")
        if any(differ([tensor], [content]) for tensor, content in self._contents):
            self.differs(call, "it wrote to an argument that its schema does not name")
        # Others are Python's arithmetic, which draws nothing.
        is_kernel = isinstance(call.target, (OpOverload, Replay))
        if is_kernel and self._generator is not None and self._generator != cpu_state():
            self.differs(call, "it drew random numbers and does not say so")

    def after(
        self, index: int, call: Call, values: dict[int, Any], bound: dict[int, torch.Tensor]
    ) -> None:
        """Compares the results with what was captured, and views of the pool with those in
        `bound`.
        """
        self.unchanged(call)
        self._contents = []
        if _made_again(self._program, call):
            self._compare(call, values)
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
            if not _is_as_captured(meta, value):
                for what, expected, actual in _metadata(meta, value):
                    if expected != actual:
                        self.differs(
                            call, f"its result's {what} is {actual}, and was {expected} at capture"
                        )
            storage = value.untyped_storage()
            if (
                meta.storage in self._storages
                and self._program.storages[meta.storage].creator != index
            ):
                if self._storages[meta.storage] != c_pointer(storage):
                    self.differs(call, "its result is a copy, and was a view at capture")
                continue
            if storage.nbytes() != self._program.storages[meta.storage].size_bytes:
                size = self._program.storages[meta.storage].size_bytes
                self.differs(
                    call, f"its result takes {storage.nbytes()} bytes, and took {size} at capture"
                )
            if any(
                c_pointer(storage) == c_pointer(argument.untyped_storage())
                for argument in _argument_tensors(call, values)
            ):
                self.differs(call, "its result is a view, and had memory of its own at capture")
            self._storages[meta.storage] = c_pointer(storage)

    def _compare(self, call: Call, values: dict[int, Any]) -> None:
        """Compares what a kernel of others makes, in each of its runs, with what it made first."""
        for slot in call.outputs:
            if slot is None or self._program.storage_of(slot) < 0:
                continue
            name = self._program.storages[self._program.storage_of(slot)].name.removesuffix(AGAIN)
            mark = digest(values[slot])
            if self._marks.setdefault((name, call.outputs.index(slot)), mark) != mark:
                raise ExecutionError(
                    f"{call.name} at {call.source} made other bits when it ran again, as the plan has it do to keep to memory=; "
                    "register it with the tag torch.Tag.nondeterministic_seeded, so that its results are kept",
                    code="differs_from_capture", operator=call.name, source=str(call.source),
                )  # fmt: skip

    def differs(self, call: Call, what: str) -> NoReturn:
        """Refuses to go on."""
        remedy = (
            "let its fake kernel (`register_fake`) say what the real one does"
            if is_foreign(call.target)
            else "please report it"
        )
        raise ExecutionError(
            f"{call.name} at {call.source}: {what}; the plan cannot be trusted; {remedy}",
            code="differs_from_capture", operator=call.name, source=str(call.source),
        )  # fmt: skip


def _is_distrusted(call: Call) -> bool:
    """Whether a call runs code that others wrote, or compiled: it may write without changing
    version counters.
    """
    return is_foreign(call.target) or is_region(call.target)


def _made_again(program: Program, call: Call) -> bool:
    """Whether a call of a kernel of others is, or has, a further run."""
    if not is_foreign(call.target):
        return False
    names = {storage.name for storage in program.storages if storage.name.endswith(AGAIN)}
    held = [slot for slot in call.outputs if slot is not None and program.storage_of(slot) >= 0]
    made = {program.storages[program.storage_of(slot)].name for slot in held}
    return any(name.removesuffix(AGAIN) + AGAIN in names for name in made)


def _argument_tensors(call: Call, values: dict[int, Any]) -> list[torch.Tensor]:
    return [values[slot] for slot in call.refs() if isinstance(values.get(slot), torch.Tensor)]


def _is_as_captured(meta: TensorMeta, value: torch.Tensor) -> bool:
    """Whether shape, strides, offset, dtype, and device are the same, even strides that have no
    meaning.
    """
    layout = value.shape, value.stride(), value.storage_offset(), value.dtype
    return (
        layout == (meta.shape, meta.stride, meta.offset, meta.dtype)
        and value.device.type == meta.device.type
    )


def _metadata(meta: TensorMeta, value: torch.Tensor) -> list[tuple[str, Any, Any]]:
    compared = [
        ("shape", meta.shape, tuple(value.shape)),
        ("dtype", meta.dtype, value.dtype),
        ("device", meta.device.type, value.device.type),
    ]
    if value.numel():
        compared.append(
            ("strides", steps(meta.shape, meta.stride), steps(meta.shape, value.stride()))
        )
        compared.append(("storage offset", meta.offset, value.storage_offset()))
    return compared


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor's elements are."""
    shape, large = tensor.shape, [size for size in tensor.shape if size != 1]
    return tensor.data_ptr(), tensor.dtype, large, steps(shape, tensor.stride())


def steps(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor that mean anything: not those of dimensions of one element."""
    return tuple(step for size, step in zip(shape, stride, strict=False) if size != 1)


def lies(tensor: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor lie as with these strides."""
    return tensor.numel() < 2 or steps(tensor.shape, stride) == steps(tensor.shape, tensor.stride())
