"""A plan as a memory snapshot of PyTorch, as https://pytorch.org/memory_viz and
``torch/cuda/_memory_viz.py`` read it.

The format is that of ``torch.cuda.memory._snapshot``: segments with the blocks that are there at
the end, and the trace of events that led to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roam._core import Buffers, pack
from roam.report.anatomy import WORKSPACE, Planned

if TYPE_CHECKING:
    from roam._core import Operator

_PERSISTENT = 1 << 40
_POOL = 2 << 40
_UNPOOLED = 3 << 40
"""Addresses at which segments begin. No device has them."""
_WORK = 2_000_000
"""Comparisons that placing unpooled tensors may take: a fraction of a second."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A piece of memory that is used from step `start` to before step `end`. If it stays, `end` is
    after the last step. On several streams a step is the start of an operator.
    """

    address: int
    size_bytes: int
    start: int
    end: int
    category: str
    frames: list[dict[str, Any]]


def snapshot(planned: Planned) -> dict[str, Any]:
    """One step by the plan. What persists is there from the start, and has no events.

    Each step of the plan is a microsecond, on several streams each start of an operator by the
    cost model; a tensor is freed before the step after its last use begins. Operators'
    workspaces are allocated like tensors.
    """
    graph, steps = planned.graph, planned.graph.num_operators
    device = 0
    frames = [_frames(operator) for operator in graph.operators]
    persistent, address = [], _PERSISTENT
    for tensor in graph.tensors:
        if tensor.residency == "persistent" and tensor.counted_bytes:
            named = [{"name": tensor.name, "filename": "", "line": 0}]
            block = _Block(address, tensor.counted_bytes, 0, steps + 1, tensor.kind, named)
            persistent.append(block)
            address += tensor.counted_bytes
    pooled: list[_Block] = []
    unpooled: list[_Block] = []
    for tensor in graph.tensors:
        number = tensor.id
        start, end = int(planned.lives.starts[number]), int(planned.lives.ends[number])
        if tensor.residency == "persistent" or not tensor.counted_bytes or start == end:
            continue
        end += tensor.residency == "leaves"
        creator = graph.creator(number)
        made_by = (
            [{"name": tensor.name, "filename": "", "line": 0}]
            if creator is None
            else frames[creator]
        )
        offset = int(planned.plan.offsets[number])
        block = _Block(max(offset, 0), tensor.counted_bytes, start, end, tensor.kind, made_by)
        (pooled if offset >= 0 else unpooled).append(block)
    starts = planned.starts
    for step, (number, done) in enumerate(
        zip(starts.order.tolist(), starts.done.tolist(), strict=True)
    ):
        if size_bytes := int(graph.workspaces_bytes[number]):
            unpooled.append(_Block(0, size_bytes, step, done, WORKSPACE, frames[number]))
    unpooled, unpooled_bytes = _placed(unpooled)
    segments = [
        _segment(device, _PERSISTENT, address - _PERSISTENT, persistent, steps),
        _segment(device, _POOL, planned.plan.pool_bytes, _moved(pooled, _POOL), steps),
        _segment(device, _UNPOOLED, unpooled_bytes, _moved(unpooled, _UNPOOLED), steps),
    ]
    blocks = [*_moved(pooled, _POOL), *_moved(unpooled, _UNPOOLED)]
    return {
        "segments": [segment for segment in segments if segment["total_size"]],
        "device_traces": [list(_events(blocks, steps))],
        "external_annotations": [],
        "allocator_settings": {},
    }


def _frames(operator: Operator) -> list[dict[str, Any]]:
    """The operator, and the user's line in the module that it is called from."""
    called = {"name": operator.name, "filename": operator.phase, "line": operator.position}
    place = {"name": operator.module, "filename": operator.file, "line": operator.line}
    return [called, place] if operator.file or operator.module else [called]


def _placed(blocks: list[_Block]) -> tuple[list[_Block], int]:
    """Blocks at addresses that no two have at once, from 0, and the bytes that they take."""
    if not blocks:
        return [], 0
    packing = pack(
        Buffers(
            lower=[block.start for block in blocks],
            upper=[block.end for block in blocks],
            size_bytes=[block.size_bytes for block in blocks],
        ),
        work=_WORK,
    )
    placed = [
        _Block(address, block.size_bytes, block.start, block.end, block.category, block.frames)
        for block, address in zip(blocks, packing.offsets.tolist(), strict=True)
    ]
    return placed, packing.pool_bytes


def _moved(blocks: list[_Block], base: int) -> list[_Block]:
    return [
        _Block(base + one.address, one.size_bytes, one.start, one.end, one.category, one.frames)
        for one in blocks
    ]


def _segment(
    device: int, address: int, total_bytes: int, blocks: list[_Block], steps: int
) -> dict[str, Any]:
    """A segment with the blocks that are there at the end of the step."""
    left = sorted((one for one in blocks if one.end > steps), key=lambda one: one.address)
    parts, at = [], address
    for block in left:
        if block.address > at:
            parts.append(_inactive(at, block.address - at))
        parts.append(
            {
                "address": block.address,
                "size": block.size_bytes,
                "requested_size": block.size_bytes,
                "state": "active_allocated",
                "frames": block.frames,
            }
        )
        at = block.address + block.size_bytes
    if at < address + total_bytes:
        parts.append(_inactive(at, address + total_bytes - at))
    used = sum(block.size_bytes for block in left)
    return {
        "device": device,
        "address": address,
        "total_size": total_bytes,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": parts,
    }


def _inactive(address: int, size_bytes: int) -> dict[str, Any]:
    return {
        "address": address,
        "size": size_bytes,
        "requested_size": 0,
        "state": "inactive",
        "frames": [],
    }


def _events(blocks: list[_Block], steps: int) -> Iterator[dict[str, Any]]:
    """Allocations and frees by time. Where a step begins, frees come first."""
    by_step: list[tuple[list[_Block], list[_Block]]] = [([], []) for _ in range(steps + 1)]
    for block in blocks:
        by_step[block.start][1].append(block)
        if block.end <= steps:
            by_step[block.end][0].append(block)
    for step, (freed, made) in enumerate(by_step):
        for block in freed:
            yield _event("free_requested", block, step)
            yield _event("free_completed", block, step)
        for block in made:
            yield _event("alloc", block, step) | {"category": block.category}


def _event(action: str, block: _Block, step: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": block.address,
        "size": block.size_bytes,
        "stream": 0,
        "time_us": step,
        "frames": block.frames,
    }
