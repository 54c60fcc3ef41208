"""Records the run of a plan as one CUDA graph, and replays it: the device gets the whole step at
once, and Python launches no kernels one by one.

A graph works on the addresses that it was recorded with. Parameters and optimizer state keep
theirs; tensors of the batch are copied into tensors of the graph's own, if they are dense and share
no memory, and what leaves the step is copied out. If a number changes that the step reads, such as
a learning rate that is a float, or if another tensor has moved, the graph is recorded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from roam.distributed.collectives import is_launch
from roam.errors import ExecutionError
from roam.program.bits import copied
from roam.program.ir import Call, Program, has_no_gaps
from roam.program.operators import ATTENTION, is_region
from roam.program.replay import Replay, generator_state
from roam.runtime.bindings import Outgoing
from roam.runtime.log import logger
from roam.state.references import ArgumentReference
from roam.torch_compat.private import pytree

Run = Callable[[list[Any]], Outgoing]
_MOST_CHANGES = 8
"""After so many runs in a row whose numbers or addresses were new, runs go without a graph."""
_ENOUGH_ALIKE = 3
"""After so many runs without a graph whose numbers and addresses were the same, it is recorded."""


class RecordingFailed(Exception):
    """A run cannot be recorded; what was raised is its cause."""


class Recorder(Protocol):
    """What a graph needs of a device."""

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Runs `run` without executing its kernels. Gives what it returned, and a function that
        executes them, as often as it is called.
        """


class OnCuda:
    """Records by PyTorch's CUDA graphs.

    Args:
        device: where the step runs.
        generators: the generators that calls draw from. PyTorch sees to the devices' own.
    """

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator]) -> None:
        self._device = device
        own = list(map(id, torch.cuda.default_generators))
        self._generators = [
            one for one in generators if one.device.type == "cuda" and id(one) not in own
        ]

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        with torch.cuda.device(self._device):
            before, own = torch.cuda.current_stream(), torch.cuda.Stream()
            try:
                # Other threads, such as those of a data loader, go on using the device.
                with torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"):
                    made = run()
            finally:  # where it fails, PyTorch may stay on its own stream
                torch.cuda.set_stream(before)
        return made, graph.replay


@dataclass(slots=True)
class _Recorded:
    key: tuple[Any, ...]
    """Numbers and addresses that the graph was recorded with."""
    copied: list[torch.Tensor]
    """The graph's own tensors for inputs that are copied, in the order of `CudaGraph._copied`."""
    returned: dict[int, int]
    """For each input that the step returns: its identity, and its place among the inputs."""
    outgoing: Outgoing
    replay: Callable[[], None]


class CudaGraph:
    """The runs of one plan after its checked one: the first in the ordinary way, later ones by a
    graph.

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
        self._has_run = False
        self._changes = 0
        """How many runs in a row, up to the last, had another key than the one before."""
        self._alike = 0
        self._last_key: tuple[Any, ...] | None = None
        places = {slot: place for place, slot in enumerate(input_slots)}
        self._copied = [
            place
            for place, (reference, slot) in enumerate(program.referenced)
            if isinstance(reference, ArgumentReference) and _is_copied(program, slot)
        ]
        self._fixed = sorted(set(places.values()) - set(self._copied))
        written = program.written()
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
        if not self._has_run:
            # Libraries make their handles and choose their algorithms in an ordinary run.
            self._has_run = True
            return run(inputs)
        key = self._key(inputs)
        is_new = self._last_key is not None and key != self._last_key
        self._alike = 0 if is_new else self._alike + 1
        if is_new:
            self._changes += 1
        elif self._recorded is not None or self._alike >= _ENOUGH_ALIKE:
            self._changes = 0
        self._last_key = key
        if self._changes >= _MOST_CHANGES:
            if self._recorded is not None:
                self._recorded = None
                logger.warning(
                    "numbers that the step reads, or addresses of its tensors, were new in %d calls "
                    "in a row, so it runs without a CUDA graph until they stay the same; make a "
                    "learning rate that changes a tensor (docs/how-to/cuda-graph.md)",
                    self._changes,
                )
            return run(inputs)
        if self._recorded is None or self._recorded.key != key:
            self._recorded = None  # its memory is free for the next
            self._recorded = self._record(run, inputs, key)
        else:
            for place, own in zip(self._copied, self._recorded.copied, strict=True):
                own.copy_(inputs[place])
        self._recorded.replay()
        written = [inputs[place] for place in self._written]
        torch.autograd.graph.increment_version([one for one in written if not one.is_inference()])
        # The next run overwrites what leaves this one, except for the caller's own tensors.
        known = {tensor: inputs[place] for tensor, place in self._recorded.returned.items()}
        outgoing: Outgoing = copied(self._recorded.outgoing, known)
        inputs.clear()
        return outgoing

    def forget(self) -> None:
        """Frees the graph and its memory; the next run records it again."""
        self._recorded = self._last_key = None
        self._changes = 0

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
        leaving = set(map(id, pytree.tree_leaves(outgoing)))
        returned = {
            id(value): place
            for place, value in enumerate(given)
            if isinstance(value, torch.Tensor) and id(value) in leaving
        }
        return _Recorded(key, [given[place] for place in self._copied], returned, outgoing, replay)


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
    devices = {meta.device for meta in program.slots if meta is not None}
    if len({one for one in devices if one.type == "cuda"}) > 1:
        raise _refusal(
            "a CUDA graph is of one device, and the step uses several; leave cuda_graph= out"
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
    changed = program.written()
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


_ON_DEVICE = (
    "make tensors before the step or with device=, and take an optimizer that keeps its state on the "
    "device (capturable=True or fused=True; SGD needs neither)"
)
_RANDOM = (
    "pass preserve_rng_state=False to torch.utils.checkpoint, or train without dropout in what it "
    "runs again"
)


def _why_not(program: Program, call: Call) -> tuple[str, str] | None:
    """Why a call cannot be recorded, and what to change; None if it can."""
    if call.is_check:
        return "the step's code checks a value", "check it after the step"
    if call.skip_if is not None:
        return "it is left out by a value of the device", "train without a gradient scaler"
    is_state = call.target is generator_state or "rng_state" in call.name
    if is_state or isinstance(call.target, Replay):
        return "it reads or sets a generator's state", _RANDOM
    if is_launch(call.target):
        return "it is a collective", "train in one process"
    if call.random and is_region(call.target):
        return "it is compiled and draws random numbers", "leave the block uncompiled"
    read = [program.slots[slot] for slot in call.refs()]
    made = [program.slots[slot] for slot in call.outputs if slot is not None]
    if None in made and any(meta is not None for meta in read):
        return "it reads a value of a tensor", f"read values after the step, or {_ON_DEVICE}"
    devices = {
        meta.device.type
        for meta in (*read, *made)
        if meta is not None and not _is_seed(program, meta)
    }
    if "cpu" not in devices:
        return None
    if devices == {"cpu"}:
        return "it runs on the CPU", _ON_DEVICE
    if any(meta is not None and meta.device.type == "cpu" for meta in made):
        return "it copies from the device to the CPU", "move results there after the step"
    return "it copies from the CPU to the device", "make or move the tensor there before the step"


def _is_seed(program: Program, meta: Any) -> bool:
    """Whether a tensor is what attention keeps for its random numbers, which lies on the device
    where a graph is recorded.
    """
    creator = program.storages[meta.storage].creator
    return creator >= 0 and program.calls[creator].target in ATTENTION


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
    return not others and has_no_gaps(meta.shape, meta.stride)
