"""One measurement of `roam bench scale`, in a process of its own so that its memory can be told. Prints one JSON object."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import roam
from roam import layout
from roam._core import synthetic_buffers, synthetic_step

Figures = dict[str, Any]


def measure_step(family: str, operators: int) -> Figures:
    """Plan a made-up step: seconds of every stage, memory, and how good the plan is."""
    figures: Figures = {}
    with _timed(figures, "build"):
        graph = synthetic_step(family, operators)
    busy = time.process_time()
    with _timed(figures, "plan"):
        plan = roam.optimize(graph, exact="off")
    figures["plan_cpu_s"] = time.process_time() - busy
    figures["peak_rss_bytes"] = peak_rss_bytes()
    with _timed(figures, "verify"):
        roam.verify(graph, plan)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "graph.json")
        with _timed(figures, "save"):
            graph.save(path)
        with _timed(figures, "load"):
            roam.Graph.load(path, max_bytes=1 << 40)
    return {
        "operators": graph.num_operators,
        "tensors": graph.num_tensors,
        **figures,
        "gap": plan.gap,
        "fragmentation": plan.fragmentation,
        "status": plan.status,
        **{f"stage_{stage}_s": seconds for stage, seconds in plan.timings_s.items()},
        "digest": graph.digest,
    }


def measure_layout(style: str, count: int, work: int) -> Figures:
    """Pack made-up buffers: seconds, memory, and how good the packing is."""
    figures: Figures = {}
    with _timed(figures, "build"):
        buffers = synthetic_buffers(style, count)
    busy = time.process_time()
    with _timed(figures, "plan"):
        packing = layout.pack(buffers, work=work)
    figures["plan_cpu_s"] = time.process_time() - busy
    figures["peak_rss_bytes"] = peak_rss_bytes()
    with _timed(figures, "verify"):
        layout.verify(buffers, packing)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "buffers.csv")
        with _timed(figures, "save"):
            buffers.write_csv(path, packing)
        with _timed(figures, "load"):
            layout.Buffers.read_csv(path)
    return {
        "buffers": len(buffers),
        **figures,
        "gap": packing.gap,
        "status": packing.status,
        "method": packing.method,
        "digest": buffers.digest,
    }


def peak_rss_bytes() -> int | None:
    """Most memory that this process has held; ``None`` where the system does not say.

    Not from `getrusage`, which counts what the process that started this one held.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


@contextmanager
def _timed(figures: Figures, stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    figures[f"{stage}_s"] = time.perf_counter() - start


_MEASURES: dict[str, Callable[..., Figures]] = {"step": measure_step, "layout": measure_layout}


def main(arguments: list[str]) -> None:
    """Measure what the arguments name: ``step FAMILY OPERATORS`` or ``layout STYLE COUNT WORK``."""
    what, name, *numbers = arguments
    figures = _MEASURES[what](name, *map(int, numbers))
    sys.stdout.write(json.dumps(figures, allow_nan=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
