"""A plan in Chrome's trace format, which https://ui.perfetto.dev and ``chrome://tracing`` open.

Source of the format: "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from roam.report.anatomy import Planned

if TYPE_CHECKING:
    from roam._core import Graph
    from roam.report.lifetimes import Steps

_PLAN, _PROGRAM = 1, 2
"""Numbers of the two tracks, which the viewers call processes."""


def chrome_trace(planned: Planned) -> dict[str, Any]:
    """The plan's order and eager PyTorch's order: operators, and live bytes as a counter.

    Times are those of the graph: measured, or else by the model of time.
    """
    program = planned.as_written
    events = [
        *_track(_PLAN, "plan", planned.graph, planned.plan.order, planned.curve.live_bytes),
        *_track(
            _PROGRAM, "program order", program, program.program_order,
            planned.program_curve.live_bytes,
        ),
    ]  # fmt: skip
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"graph": planned.as_written.digest, "total_bytes": planned.plan.total_bytes},
    }


def _track(
    process: int, name: str, graph: Graph, order: Steps, live: Steps
) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"name": "thread_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": "operators"}}  # fmt: skip
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}}  # fmt: skip
    spans_ns = graph.times_ns[order]
    ends_ns = np.cumsum(spans_ns)
    operators, before = graph.operators, -1
    for step, number in enumerate(order.tolist()):
        operator = operators[number]
        span_ns = int(spans_ns[step])
        start_us = (int(ends_ns[step]) - span_ns) / 1000
        args = {
            "step": step,
            "live_bytes": int(live[step]),
            "module": operator.module,
            "line": f"{operator.file}:{operator.line}" if operator.file else "",
        }
        yield {
            "name": operator.name, "cat": operator.phase, "ph": "X", "pid": process, "tid": 0,
            "ts": start_us, "dur": span_ns / 1000, "args": args,
        }  # fmt: skip
        if live[step] != before:
            before = live[step]
            counted = {"bytes": int(before)}
            yield {"name": "live", "ph": "C", "pid": process, "tid": 0, "ts": start_us, "args": counted}  # fmt: skip
