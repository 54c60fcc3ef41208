"""A plan in Chrome's trace format, which https://ui.perfetto.dev and ``chrome://tracing`` open.

Source of the format: "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from roam.report.anatomy import Planned
from roam.report.lifetimes import Starts, Steps

if TYPE_CHECKING:
    from roam._core import Graph

_PLAN, _PROGRAM = 1, 2
"""Numbers of the two tracks, which the viewers call processes."""


def chrome_trace(planned: Planned) -> dict[str, Any]:
    """The plan and eager PyTorch's order: operators, on a thread for each stream, and live bytes as
    a counter.

    Times are those of the graph: measured, or else by the cost model.
    """
    program, plan = planned.as_written, planned.plan
    one_by_one = Starts.one_by_one(program.program_order)
    times_ns = _serial_ns(planned.graph, plan.order)
    if planned.is_parallel:
        times_ns = plan.times_ns(planned.graph)
    events = [
        *_track(
            _PLAN, "plan", planned.graph, planned.starts, times_ns, planned.curve.live_bytes,
            plan.streams,
        ),
        *_track(
            _PROGRAM, "program order", program, one_by_one,
            _serial_ns(program, program.program_order), planned.program_curve.live_bytes,
        ),
    ]  # fmt: skip
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"graph": planned.as_written.digest, "total_bytes": plan.total_bytes},
    }


def _serial_ns(graph: Graph, order: Steps) -> tuple[Steps, Steps]:
    """Start and end of each operator if they run one after another."""
    spans = graph.times_ns
    end = np.empty_like(spans)
    end[order] = np.cumsum(spans[order])
    return end - spans, end


def _track(
    process: int,
    name: str,
    graph: Graph,
    starts: Starts,
    times_ns: tuple[Steps, Steps],
    live: Steps,
    streams: Steps | None = None,
) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}}  # fmt: skip
    threads = np.zeros(graph.num_operators, dtype=np.int64) if streams is None else streams
    many = int(threads.max(initial=0)) > 0
    for thread in np.unique(threads).tolist():
        named = {"name": f"stream {thread}" if many else "operators"}
        yield {"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": named}
    operators, before = graph.operators, -1
    for step, number in enumerate(starts.order.tolist()):
        operator = operators[number]
        start_ns, end_ns = (int(times[number]) for times in times_ns)
        args = {
            "step": step,
            "live_bytes": int(live[step]),
            "module": operator.module,
            "line": f"{operator.file}:{operator.line}" if operator.file else "",
        }
        yield {
            "name": operator.name, "cat": operator.phase, "ph": "X", "pid": process,
            "tid": int(threads[number]), "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000,
            "args": args,
        }  # fmt: skip
        if live[step] != before:
            before = live[step]
            counted = {"bytes": int(before)}
            yield {"name": "live", "ph": "C", "pid": process, "tid": 0, "ts": start_ns / 1000, "args": counted}  # fmt: skip
