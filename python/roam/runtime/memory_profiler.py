"""Measured memory: the peak of a piece of work from the allocator's own event stream.

On the CPU every allocation and release that PyTorch's allocator makes is seen through
`torch.profiler`, those inside kernels included, each with its address and the operator that it
happened in. Sizes are the bytes that were asked for; nothing is sampled and nothing is rounded. On
CUDA the allocator's own counters give the peak.

What the profiler does not see is the release of a block that was made while no profiler was
watching. Make such blocks inside `observed()`, or let `warmup` runs make them: then their release
counts. Whether any was missed is part of the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch

from roam.errors import RoamError
from roam.garbage import all_objects
from roam.state.autograd_hooks import in_group
from roam.torch_compat.private import (
    DisableTorchFunction,
    c_pointer,
    has_kernel,
    has_kernel_for,
    local_of,
)

_START: Final = "roam.measure.start"
_END: Final = "roam.measure.end"


class MeasurementError(RoamError):
    """A measurement could not be made, or could not be trusted."""


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation.

    Attributes:
        size_bytes: the bytes asked for.
        operator: the innermost operator that made it, as the profiler names it; empty outside of
            any.
        made_at: its place among the events of the measurement.
        freed_at: the place of its release, or None if it was alive at the end.
        is_workspace: whether it lived and died inside a single call of one operator: memory that a
            kernel takes for itself.
    """

    size_bytes: int
    operator: str
    made_at: int
    freed_at: int | None
    is_workspace: bool


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """The memory that one piece of work used. Byte counts are relative to its start unless stated
    otherwise.

    Attributes:
        device: ``cpu`` or ``cuda``.
        peak_bytes: the most that was allocated at once, above what was allocated at the start.
        peak_without_workspace_bytes: the same without the memory that kernels took for themselves;
            None on CUDA.
        peak_workspace_bytes: the most of such memory at once; None on CUDA.
        end_bytes: what was left allocated at the end; negative if more was released than allocated.
        start_bytes: the bytes known to be allocated at the start. On the CPU: those made under
            `observed()` or since.
        unseen_freed_bytes: bytes of tensors that were allocated before the profiler watched and
            died during the work; the true peak is lower than `peak_bytes` by at most this. If 0,
            the measurement is exact. None on CUDA, whose counters miss nothing.
        peak_at: the place among the events at which the peak was first reached; -1 if nothing
            exceeded the start.
        events: how many allocations and releases there were.
        blocks: every allocation of the work, in order; empty on CUDA.
        value: what the measured callable returned. It is not compared.
        group_bytes: how much lower the peak would be if process groups allocated nothing for
            themselves while they work: gloo copies what it reduces. 0 on CUDA, where this cannot be
            measured.
    """

    device: str
    peak_bytes: int
    peak_without_workspace_bytes: int | None
    peak_workspace_bytes: int | None
    end_bytes: int
    start_bytes: int
    unseen_freed_bytes: int | None
    peak_at: int
    events: int
    blocks: tuple[Block, ...] = field(repr=False)
    value: Any = field(default=None, compare=False, repr=False)
    group_bytes: int = 0

    @property
    def peak_total_bytes(self) -> int:
        """The most that was allocated at once, what was known to be allocated at the start
        included.
        """
        return self.start_bytes + self.peak_bytes

    @property
    def unfreed(self) -> tuple[Block, ...]:
        """Blocks made by the work and still alive at its end, largest first."""
        return _largest_first(block for block in self.blocks if block.freed_at is None)

    @property
    def at_peak(self) -> tuple[Block, ...]:
        """Blocks made by the work and alive when it first reached its peak, largest first."""
        return _largest_first(
            block
            for block in self.blocks
            if block.made_at <= self.peak_at
            and (block.freed_at is None or block.freed_at > self.peak_at)
        )

    @property
    def workspaces(self) -> tuple[Block, ...]:
        """Blocks that kernels took for themselves, largest first."""
        return _largest_first(block for block in self.blocks if block.is_workspace)

    def to_json(self) -> dict[str, Any]:
        """The trace as plain values, `value` too; `from_json` is the way back."""
        return {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.name != "blocks"
        } | {"blocks": [dataclasses.astuple(block) for block in self.blocks]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> MemoryTrace:
        """The trace that `to_json` wrote."""
        return cls(**{**values, "blocks": tuple(Block(*block) for block in values["blocks"])})


def measure_peak(
    fn: Callable[..., Any], *args: Any, warmup: int = 0, device: str = "cpu"
) -> MemoryTrace:
    """Run ``fn(*args)`` and measure how much memory it needed.

    Args:
        fn: the work.
        args: its arguments.
        warmup: how often to run it before the measurement, so that memory that it keeps from run to
            run is already allocated and known.
        device: ``cpu`` or ``cuda``.

    Raises:
        MeasurementError: the profiler's record contradicts itself, or the device is neither ``cpu``
            nor ``cuda``.
    """
    if device == "cuda":
        return _measure_cuda(functools.partial(fn, *args), warmup)
    if device != "cpu":
        raise MeasurementError(
            f"memory is measured on cpu and cuda, not on {device}", code="device"
        )
    if warmup:
        with observed():
            for _ in range(warmup):
                fn(*args)
    return _measure_cpu(functools.partial(fn, *args))


@contextlib.contextmanager
def observed() -> Iterator[None]:
    """Record the allocations that are made in the block, so that later measurements on the CPU
    count their release.
    """
    with _profiler():
        yield


@contextlib.contextmanager
def _profiler() -> Iterator[Any]:
    made = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            # PyTorch 2.11 says that it forgets the profiler's earlier cycles; there are none.
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            stack.enter_context(made)
        yield made


def _measure_cpu(work: Callable[[], Any]) -> MemoryTrace:
    gc.collect()
    before = _storages()
    with _profiler() as profiler:
        _mark(_START)
        value = work()
        _mark(_END)
    stream = _Stream(profiler.profiler.kineto_results.experimental_event_tree())
    gone = sum(
        size
        for address, size, storage in before
        if storage.expired() and (address, size) not in stream.freed_before
    )
    return stream.trace(value, gone)


def _mark(name: str) -> None:
    # The allocator's own total stands in every event, so a mark is an allocation of a known size.
    with torch.profiler.record_function(name):
        torch.empty(1, dtype=torch.uint8)


_APART = 64
"""How many places apart, in order of time, two events may be that the allocator has counted one
after the other.
"""
_OF_GROUP = "c10d::"
"""How the names of operators begin that process groups call for themselves."""


@dataclass(frozen=True, slots=True)
class _Event:
    """An allocation (or, with a negative size, a release) by the call of a kernel."""

    size_bytes: int
    address: int
    total_bytes: int
    call: int | None
    operator: str


class _Stream:
    """The allocator's events between the two marks."""

    def __init__(self, roots: list[Any]) -> None:
        events, self.start_bytes = _between_marks(roots)
        self._events = _as_counted(events, self.start_bytes)
        self.blocks: list[Block] = []
        self.freed_before: set[tuple[int, int]] = set()
        self._pair()

    def _pair(self) -> None:
        """Find the release of every block."""
        open_blocks: dict[int, int] = {}
        made: dict[int, tuple[int, _Event]] = {}
        for place, event in enumerate(self._events):
            if event.size_bytes >= 0:
                open_blocks[event.address] = len(self.blocks)
                made[event.address] = place, event
                self.blocks.append(Block(event.size_bytes, event.operator, place, None, False))
            elif event.address in open_blocks:
                _, maker = made.pop(event.address)
                index = open_blocks.pop(event.address)
                is_workspace = maker.call is not None and maker.call == event.call
                self.blocks[index] = dataclasses.replace(
                    self.blocks[index], freed_at=place, is_workspace=is_workspace
                )
            else:
                self.freed_before.add((event.address, -event.size_bytes))

    def trace(self, value: Any, unseen_freed_bytes: int) -> MemoryTrace:
        workspace_at = dict.fromkeys(
            place
            for block in self.blocks
            if block.is_workspace
            for place in (block.made_at, block.freed_at)
        )
        of_group_at: dict[int, int] = {}
        for block in self.blocks:
            if block.operator.startswith(_OF_GROUP):
                of_group_at[block.made_at] = block.size_bytes
                if block.freed_at is not None:
                    of_group_at[block.freed_at] = -block.size_bytes
        live = workspace = of_group = 0
        peak, peak_at, peak_without, peak_workspace, peak_beside = 0, -1, 0, 0, 0
        for place, event in enumerate(self._events):
            live += event.size_bytes
            if place in workspace_at:
                workspace += event.size_bytes
            if live > peak:
                peak, peak_at = live, place
            of_group += of_group_at.get(place, 0)
            peak_without = max(peak_without, live - workspace)
            peak_beside = max(peak_beside, live - of_group)
            peak_workspace = max(peak_workspace, workspace)
        return MemoryTrace(
            device="cpu",
            peak_bytes=peak,
            peak_without_workspace_bytes=peak_without,
            peak_workspace_bytes=peak_workspace,
            end_bytes=live,
            start_bytes=self.start_bytes,
            unseen_freed_bytes=unseen_freed_bytes,
            peak_at=peak_at,
            events=len(self._events),
            blocks=tuple(self.blocks),
            value=value,
            group_bytes=peak - peak_beside,
        )


def _between_marks(roots: list[Any]) -> tuple[list[_Event], int]:
    """The CPU allocator's events between the marks, in order of time, and the bytes allocated at
    the start.
    """
    found: list[tuple[int, int, _Event]] = []
    marks: dict[str, tuple[int, int]] = {}
    calls = 0
    own_threads = {root.start_tid for root in roots if root.name in (_START, _END)}
    # Depth first. Each node comes with the kernel call that it is inside of, and that kernel's
    # name.
    stack: list[tuple[Any, int | None, str, str]] = [
        (root, None, "", "") for root in reversed(roots)
    ]
    while stack:
        node, call, operator, mark = stack.pop()
        kind = node.tag.name
        if kind == "Allocation":
            fields = node.extra_fields
            if fields.device.type == "cpu":
                # gloo's threads call kernels of their own.
                is_of_group = bool(own_threads) and node.start_tid not in own_threads and in_group()
                maker = f"{_OF_GROUP}{operator}" if is_of_group else operator
                event = _Event(fields.alloc_size, fields.ptr, fields.total_allocated, call, maker)
                if mark:
                    if event.size_bytes > 0:
                        marks[mark] = node.start_time_ns, event.total_bytes - event.size_bytes
                else:
                    found.append((node.start_time_ns, len(found), event))
            continue
        if kind == "TorchOp" and call is None:
            operator = node.name
            if operator in (_START, _END):
                mark = operator
            elif _is_kernel(operator):
                calls, call = calls + 1, calls
        stack.extend((child, call, operator, mark) for child in reversed(node.children))
    if _START not in marks or _END not in marks:
        raise MeasurementError(
            "the profiler recorded no allocator events, as when another profiler runs; stop the other "
            "one",
            code="no_events",
        )
    start, start_bytes = marks[_START]
    end, _ = marks[_END]
    return [
        event for time, _, event in sorted(found, key=lambda item: item[:2]) if start < time < end
    ], start_bytes


def _as_counted(events: list[_Event], start_bytes: int) -> list[_Event]:
    """The events in the order in which the allocator has counted them.

    Args:
        events: in order of time. The allocator counts an event first and the profiler reads the
            clock afterwards, so events of several threads may have changed places.
        start_bytes: what was allocated before the first of them.

    Raises:
        MeasurementError: the counts of the allocator and of the events differ.
    """
    found: list[_Event] = []
    total = start_bytes
    waiting: list[_Event] = []
    later = iter(events)
    while True:
        waiting += islice(later, _APART - len(waiting))
        if not waiting:
            return found
        following = (
            place
            for place, event in enumerate(waiting)
            if total + event.size_bytes == event.total_bytes
        )
        place = next(following, None)
        if place is None:
            event = waiting[0]
            raise MeasurementError(
                "memory was released by a thread that the profiler does not watch: "
                f"{event.total_bytes} bytes allocated, {total + event.size_bytes} accounted for. "
                "Measure while no other thread uses tensors",
                code="other_thread",
            )
        total = waiting[place].total_bytes
        found.append(waiting.pop(place))


@functools.cache
def _is_kernel(name: str) -> bool:
    """Whether a profiled name is an operator with kernels of its own, not one that is made of other
    operators.
    """
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None) if base.isidentifier() else None
    if packet is None:
        return False
    names = [
        f"{name}.{overload}" if overload != "default" else name for overload in packet.overloads()
    ]
    return any(
        has_kernel(overload) and not has_kernel_for(overload, "CompositeImplicitAutograd")
        for overload in names
        if not overload.endswith("out")
    )


def _storages() -> list[tuple[int, int, Any]]:
    """Address, size and a weak reference of every CPU storage that Python can see."""
    from torch.multiprocessing.reductions import StorageWeakRef

    # There may be a million objects, of which `issubclass` takes longer, and some classes have no
    # hash.
    kinds = set(map(id, _with_subclasses(torch.Tensor)))
    tensors = [item for item in all_objects() if id(type(item)) in kinds]
    found: dict[int, tuple[int, int, Any]] = {}
    with DisableTorchFunction():  # no code of the user's subclasses, nor of lazy parameters, runs
        tensors += [grad for grad in map(_gradient_of, tensors) if grad is not None]
        for tensor in map(local_of, tensors):
            try:
                storage = tensor.untyped_storage()
                if storage.device.type == "cpu" and storage.nbytes():
                    at = storage.data_ptr()
                    found[c_pointer(storage)] = (at, storage.nbytes(), StorageWeakRef(storage))
            except (NotImplementedError, RuntimeError):
                continue  # sparse tensors and the like have none of their own
    return list(found.values())


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:  # a view of which PyTorch refuses to tell how it was made
        return None


def _with_subclasses(kind: type) -> list[type]:
    found = [kind]
    for one in found:
        found += type.__subclasses__(one)
    return found


def _largest_first(blocks: Any) -> tuple[Block, ...]:
    return tuple(sorted(blocks, key=lambda block: (-block.size_bytes, block.made_at)))


def _measure_cuda(work: Callable[[], Any], warmup: int) -> MemoryTrace:
    for _ in range(warmup):
        work()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    value = work()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    start = before["allocated_bytes.all.current"]
    counters = ("allocation.all.allocated", "allocation.all.freed")
    return MemoryTrace(
        device="cuda",
        peak_bytes=after["allocated_bytes.all.peak"] - start,
        peak_without_workspace_bytes=None,
        peak_workspace_bytes=None,
        end_bytes=after["allocated_bytes.all.current"] - start,
        start_bytes=start,
        unseen_freed_bytes=None,
        peak_at=-1,
        events=sum(after[name] - before[name] for name in counters),
        blocks=(),
        value=value,
    )


def measure_in_child(
    build: str | Callable[..., Callable[[], Any]],
    kwargs: dict[str, Any] | None = None,
    *,
    warmup: int = 0,
    device: str = "cpu",
    timeout_s: float = 600.0,
    env: dict[str, str] | None = None,
) -> MemoryTrace:
    """Measure in a new Python process, in which nothing else has used the allocator.

    Args:
        build: a module-level function, or ``"package.module:function"``. The child calls it with
            `kwargs`, with memory observed; it returns the work, a callable without arguments, whose
            own result must be a JSON value: it comes back as the trace's `value`.
        kwargs: JSON values.
        warmup: how often the child runs the work before it measures.
        device: ``cpu`` or ``cuda``.
        timeout_s: seconds after which the child is killed.
        env: environment variables of the child in addition to those of this process.

    Raises:
        MeasurementError: if the child fails (with its traceback), dies, or does not finish in time.
    """
    request = {"build": _spec(build), "kwargs": kwargs or {}, "warmup": warmup, "device": device}
    with tempfile.TemporaryDirectory() as folder:
        reply = Path(folder) / "reply.json"
        command = [
            sys.executable,
            "-c",
            f"from {__name__} import _serve; _serve()",
            json.dumps(request),
            str(reply),
        ]
        surroundings = {
            "KINETO_LOG_LEVEL": "99",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **(env or {}),
        }
        try:
            child = subprocess.run(
                command,
                env=surroundings,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise MeasurementError(
                f"{request['build']} did not finish within {timeout_s} s; pass a larger timeout_s",
                code="timeout",
            ) from None
        if not reply.exists():
            tail = child.stderr.strip()[-2000:]
            raise MeasurementError(
                f"the measuring process ended with status {child.returncode}: {tail}",
                code="child_died",
            )
        answer = json.loads(reply.read_text())
    if "error" in answer:
        raise MeasurementError(
            f"{request['build']} failed in the measuring process:\n{answer['error']}",
            code="child_failed",
        )
    return MemoryTrace.from_json(answer["trace"])


def _spec(build: str | Callable[..., Any]) -> str:
    if isinstance(build, str):
        if build.count(":") != 1:
            raise MeasurementError(
                f"{build!r} is not of the form 'package.module:function'", code="build"
            )
        return build
    spec = f"{build.__module__}:{build.__qualname__}"
    if "<" in spec or build.__module__ == "__main__":
        raise MeasurementError(
            f"{spec} cannot be found by another process; it must be a function of an importable module",
            code="build",
        )
    return spec


def _serve() -> None:
    """The child's side of `measure_in_child`."""
    import traceback

    request, reply = json.loads(sys.argv[1]), Path(sys.argv[2])
    try:
        module, _, name = request["build"].partition(":")
        build: Any = importlib.import_module(module)
        for part in name.split("."):
            build = getattr(build, part)
        with observed():
            work = build(**request["kwargs"])
        trace = measure_peak(work, warmup=request["warmup"], device=request["device"])
        answer = json.dumps({"trace": trace.to_json()})
    except Exception:  # noqa: BLE001 - whatever it is, the parent is told
        answer = json.dumps({"error": traceback.format_exc()})
    # Renamed into place, so that a process that dies while it writes leaves no half answer.
    partial = reply.with_suffix(".part")
    partial.write_text(answer)
    partial.rename(reply)
