"""One measurement of `roam bench scale`, in a process of its own so that its memory can be
measured. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import roam
from roam import layout
from roam._core import synthetic_buffers, synthetic_step

Figures = dict[str, Any]
Problem = TypeVar("Problem")
Solution = TypeVar("Solution")


def measure_step(folder: Path, family: str, operators: int) -> Figures:
    """Plan a made-up step: seconds of every stage, memory, and how good the plan is."""
    figures: Figures = {}
    graph, plan = _stages(
        figures,
        folder / "problem",
        build=lambda: synthetic_step(family, operators),
        plan=lambda graph: roam.optimize(graph, exact="off"),
        verify=roam.verify,
        save=lambda graph, plan, path: graph.save(path),
        load=lambda path: roam.Graph.load(path, max_bytes=1 << 40),
    )
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


def measure_layout(folder: Path, style: str, count: int, work: int) -> Figures:
    """Pack made-up buffers: seconds, memory, and how good the packing is."""
    figures: Figures = {}
    buffers, packing = _stages(
        figures,
        folder / "problem",
        build=lambda: synthetic_buffers(style, count),
        plan=lambda buffers: layout.pack(buffers, work=work),
        verify=layout.verify,
        save=lambda buffers, packing, path: buffers.write_csv(path, packing),
        load=layout.Buffers.read_csv,
    )
    return {
        "buffers": len(buffers),
        **figures,
        "gap": packing.gap,
        "status": packing.status,
        "method": packing.method,
        "digest": buffers.digest,
    }


def _stages(
    figures: Figures,
    path: Path,
    *,
    build: Callable[[], Problem],
    plan: Callable[[Problem], Solution],
    verify: Callable[[Problem, Solution], None],
    save: Callable[[Problem, Solution, Path], None],
    load: Callable[[Path], object],
) -> tuple[Problem, Solution]:
    """Go through all stages; their seconds go into ``figures``, and the most memory until it was
    planned.
    """
    with _timed(figures, "build"):
        problem = build()
    busy = time.process_time()
    with _timed(figures, "plan"):
        solution = plan(problem)
    figures["plan_cpu_s"] = time.process_time() - busy
    figures["peak_rss_bytes"] = peak_rss_bytes()
    with _timed(figures, "verify"):
        verify(problem, solution)
    with _timed(figures, "save"):
        save(problem, solution, path)
    with _timed(figures, "load"):
        load(path)
    return problem, solution


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
    """Measure what the arguments name: ``FOLDER step FAMILY OPERATORS`` or ``FOLDER layout STYLE
    COUNT WORK``; files go into the folder.
    """
    folder, what, name, *numbers = arguments
    figures = _MEASURES[what](Path(folder), name, *map(int, numbers))
    sys.stdout.write(json.dumps(figures, allow_nan=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
