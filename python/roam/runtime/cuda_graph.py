"""Records the run of a plan as one CUDA graph, and replays it: the device gets the whole step at
once, and Python's time for it is gone.

A graph works on the addresses that it was recorded with. Parameters and optimizer state keep
theirs; the arguments of a call are copied into tensors of the graph's own, and what leaves the step
is copied out. If a number changes that kernels were given, such as a learning rate that is a float,
or if a tensor has moved, the graph is recorded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from roam.distributed.collectives import is_launch
from roam.errors import ExecutionError
from roam.program.ir import Call, Program, extents, is_dense
from roam.program.operators import is_region
from roam.program.replay import Replay, generator_state
from roam.state.references import ArgumentReference
from roam.torch_compat.private import c_pointer

Outgoing = tuple[Any, list[Any], list[Any], list[Any]]
"""What `Bindings.outgoing` says."""
Run = Callable[[list[Any]], Outgoing]
_MOST_RECORDED = 8
"""How often a graph may be recorded in consecutive runs before the step runs without it."""


class RecordingFailed(Exception):
    """A run cannot be recorded; what was raised is its cause."""


class Recorder(Protocol):
    """What a graph needs of a device."""

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What `run` returns, which has not happened yet, and a function that makes it happen, as
        often as it is called.
        """


class OnCuda:
    """Records by PyTorch's CUDA graphs.

    Args:
        generators: the generators, besides the device's own, that calls are given.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = [one for one in generators if one.device.type == "cuda"]

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        # Other threads, such as those of a data loader, go on using the device.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made = run()
        return made, graph.replay


@dataclass(slots=True)
class _Recorded:
    key: tuple[Any, ...]
    """Numbers and addresses that the graph was recorded with."""
    given: list[Any]
    """The inputs that it works on."""
    outgoing: Outgoing
    replay: Callable[[], None]


class CudaGraph:
    """The runs of one plan, from the second ordinary one on by a graph.

    Args:
        program: the program; `refuse_graph` has let it pass.
        input_slots: slots of a run's inputs, in their order.
        recorder: records on the device.
        address: where the pool is now; 0 without one.
    """

    def __init__(
        self,
        program: Program,
        input_slots: Sequence[int],
        recorder: Recorder,
        address: Callable[[], int] = lambda: 0,
    ) -> None:
        self._recorder, self._address = recorder, address
        self._recorded: _Recorded | None = None
        self._in_a_row = 0
        self._has_run = False
        places = {slot: place for place, slot in enumerate(input_slots)}
        self._copied = [
            place
            for place, (reference, slot) in enumerate(program.referenced)
            if isinstance(reference, ArgumentReference) and _is_copied(program, slot)
        ]
        self._fixed = sorted(set(places.values()) - set(self._copied))
        written = {program.storage_of(slot) for call in program.calls for slot in call.mutates}
        self._written = [
            place
            for slot, place in places.items()
            if program.slots[slot] is not None and program.storage_of(slot) in written
        ]

    def run(self, run: Run, inputs: list[Any]) -> Outgoing:
        """As `GeneratedSource.run`.

        Raises:
            RecordingFailed: the run cannot be recorded. Nothing has been changed.
        """
        if not self._has_run or self._in_a_row > _MOST_RECORDED:
            # Libraries make their handles and choose their algorithms in an ordinary run.
            self._has_run = True
            return run(inputs)
        key = self._key(inputs)
        recorded = self._recorded
        if recorded is None or recorded.key != key:
            self._in_a_row += 1
            self._recorded = None  # its memory is free for the next
            recorded = self._recorded = self._record(run, inputs, key)
        else:
            self._in_a_row = 0
            for place in self._copied:
                recorded.given[place].copy_(inputs[place])
        recorded.replay()
        written = [inputs[place] for place in self._written]
        torch.autograd.graph.increment_version([one for one in written if not one.is_inference()])
        outgoing = self._copies(recorded, inputs)
        inputs.clear()
        return outgoing

    def forget(self) -> None:
        """Frees the graph and its memory; the next run records it again."""
        self._recorded = None

    def _key(self, inputs: list[Any]) -> tuple[Any, ...]:
        return self._address(), *[_told(inputs[place]) for place in self._fixed]

    def _record(self, run: Run, inputs: list[Any], key: tuple[Any, ...]) -> _Recorded:
        given = list(inputs)
        for place in self._copied:
            value = inputs[place]
            given[place] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            ).copy_(value)
        try:
            outgoing, replay = self._recorder.record(lambda: run(list(given)))
        except Exception as error:
            raise RecordingFailed from error
        return _Recorded(key, given, outgoing, replay)

    def _copies(self, recorded: _Recorded, inputs: list[Any]) -> Outgoing:
        """What leaves a run: copies of what the next one overwrites, which share memory as the
        originals do, and the caller's own tensors where these leave again.
        """
        made = {id(value): inputs[place] for place, value in enumerate(recorded.given)}
        storages: dict[int, torch.UntypedStorage] = {}

        def copy(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(copy, value))
            if isinstance(value, dict):
                return {name: copy(item) for name, item in value.items()}
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in made:
                storage = value.untyped_storage()
                if c_pointer(storage) not in storages:
                    storages[c_pointer(storage)] = storage.clone()
                made[id(value)] = torch.empty(0, dtype=value.dtype, device=value.device).set_(
                    storages[c_pointer(storage)],
                    value.storage_offset(),
                    value.shape,
                    value.stride(),
                )
            return made[id(value)]

        return copy(recorded.outgoing)  # type: ignore[no-any-return]


def _told(value: Any) -> object:
    """A tensor's address, or all that tells a number from another: -0.0 from 0.0, and 1 from
    1.0.
    """
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return type(value), value.hex() if isinstance(value, float) else value


def refuse_graph(program: Program, device: torch.device) -> None:
    """Refuses what a CUDA graph cannot hold.

    Raises:
        ExecutionError: it says which operator, where, and what to change (code ``cuda_graph``).
    """
    if device.type != "cuda":
        raise _refusal(
            f"a CUDA graph needs CUDA, and the step runs on {device.type}; leave cuda_graph= out"
        )
    for call in program.calls:
        if (why := _why_not(program, call)) is not None:
            reason, remedy = why
            raise _refusal(
                f"{call.name} at {call.source} cannot be part of a CUDA graph: {reason}; {remedy}, "
                "or leave cuda_graph= out",
                call,
            )
    if program.assigned():
        raise _refusal("the step assigns to x.data; use x.copy_(...), or leave cuda_graph= out")
    changed = {program.storage_of(slot) for call in program.calls for slot in call.mutates}
    leaving = program.outgoing()
    inputs = {slot: reference for reference, slot in program.referenced}
    storages = {program.storage_of(slot) for slot in inputs} | {
        program.storage_of(slot) for _, slot in program.constants
    }
    for reference, slot in program.referenced:
        if isinstance(reference, ArgumentReference) and program.storage_of(slot) in changed:
            raise _refusal(
                f"the step changes its argument {reference.path}, of which a CUDA graph has a copy; "
                "change a copy of it, or leave cuda_graph= out"
            )
    constants = {slot for _, slot in program.constants}
    for slot in leaving:
        if (
            slot not in inputs
            and slot not in constants
            and program.storage_of(slot) in storages - {-1}
        ):
            raise _refusal(
                "the step returns or keeps a view of a tensor from before it; return a copy "
                "(x.clone()), or leave cuda_graph= out"
            )


_TO_DEVICE = "move the batch to the device before the step"
_CAPTURABLE = (
    "let the optimizer keep its state on the device (capturable=True or fused=True, or "
    "PyTorch's SGD), and read values after the step"
)


def _why_not(program: Program, call: Call) -> tuple[str, str] | None:
    """Why a call cannot be recorded, and what to change; None if it can."""
    if call.is_check or call.is_branch:
        return "the step's code decides by a value", "decide by torch.where"
    if call.skip_if is not None:
        return "it is left out by a value of the device", "train without a gradient scaler"
    if call.target is generator_state or isinstance(call.target, Replay):
        return (
            "it reads a generator's state",
            "leave memory= out, or train without dropout in what runs again",
        )
    if is_launch(call.target):
        return "it is a collective", "train in one process"
    if call.random and is_region(call.target):
        return "it is compiled and draws random numbers", "leave the block uncompiled"
    metas = [program.slots[slot] for slot in (*call.refs(), *call.outputs) if slot is not None]
    makes = [program.slots[slot] for slot in call.outputs if slot is not None]
    if None in makes and any(program.slots[slot] is not None for slot in call.refs()):
        return "it reads a value of a tensor", _CAPTURABLE
    devices = {
        meta.device.type for meta in metas if meta is not None and not _is_seed(program, meta)
    }
    if "cpu" in devices:
        is_copy = "cuda" in devices
        return (
            "it runs on the CPU" if not is_copy else "it copies between the CPU and the device",
            (_TO_DEVICE if is_copy else _CAPTURABLE),
        )
    return None


def _is_seed(program: Program, meta: Any) -> bool:
    """Whether a tensor is what attention keeps for its random numbers, which lies on the device
    where a graph is recorded.
    """
    creator = program.storages[meta.storage].creator
    return creator >= 0 and "attention" in program.calls[creator].name


def _refusal(message: str, call: Call | None = None) -> ExecutionError:
    if call is None:
        return ExecutionError(message, code="cuda_graph")
    return ExecutionError(message, code="cuda_graph", operator=call.name, source=str(call.source))


def _is_copied(program: Program, slot: int) -> bool:
    """Whether an argument is copied into a tensor of the graph's own: a tensor without gaps whose
    memory no other input has.
    """
    meta = program.slots[slot]
    if meta is None:
        return False
    others = [
        other
        for _, other in (*program.referenced, *program.constants)
        if other != slot and program.storage_of(other) == meta.storage
    ]
    return not others and is_dense(sorted(extents(meta.shape, meta.stride)))
