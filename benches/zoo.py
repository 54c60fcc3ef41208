"""Plan the zoo: every model at batch 1 and 32, first and steady step, and what each plan costs and proves.

    python benches/zoo.py --graphs /tmp/graphs --out /tmp/zoo.jsonl
    python benches/zoo.py --graphs /tmp/graphs --out /tmp/zoo.jsonl --again   # plan anew from the saved graphs

One line of JSON per plan goes to ``--out``; what is there already is not done again. Graphs are saved, so that
planning can be repeated without capturing. At the end a table of all lines, the largest gaps first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import roam
from roam import zoo
from roam.report import figures
from roam.report.table import columns

KEYS = ("model", "batch", "step", "optimizer")


def measure(graph: roam.Graph) -> dict[str, Any]:
    """Plan once; the plan's figures and the seconds it took."""
    start = time.perf_counter()
    plan = roam.optimize(graph)
    values = {"operators": graph.num_operators, "plan_s": time.perf_counter() - start, **figures(graph, plan)}
    first = plan.candidates[0]
    # The same as one figure: bytes of program order, laid out, without reuse.
    values["program_order"] = {"peak_bytes": first.peak_bytes, "pool_bytes": first.pool_bytes}
    values["timings_s"] = plan.timings_s
    return values


def table(lines: list[dict[str, Any]]) -> str:
    """The largest gaps first."""
    head = (*KEYS, "operators", "gap %", "fragmentation %", "peak / program", "plan s", "status")
    rows = [
        (
            *(str(line[key]) for key in KEYS),
            str(line["operators"]),
            f"{100 * line['gap']:.3f}",
            f"{100 * line['fragmentation']:.4f}",
            f"{line['peak_bytes'] / max(1, line['program_order_peak_bytes']):.4f}",
            f"{line['plan_s']:.2f}",
            line["status"],
        )
        for line in sorted(lines, key=lambda line: (-line["gap"], *(line[key] for key in KEYS)))
    ]
    return columns([head, *rows])


def main() -> None:
    """Run what is asked for and not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, required=True, help="folder of captured graphs; made if missing")
    parser.add_argument("--out", type=Path, required=True, help="file of results, one JSON object a line")
    parser.add_argument("--models", nargs="*", default=[n for n in zoo.names() if not n.endswith("-tiny")])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32])
    parser.add_argument("--steps", nargs="*", default=["steady", "first"])
    parser.add_argument("--optimizers", nargs="*", default=["adamw", "sgd"])
    parser.add_argument("--again", action="store_true", help="forget the results, not the graphs")
    arguments = parser.parse_args()
    arguments.graphs.mkdir(parents=True, exist_ok=True)
    if arguments.again:
        arguments.out.unlink(missing_ok=True)
    lines = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    done = {tuple(line[key] for key in KEYS) for line in lines}
    wanted = itertools.product(arguments.optimizers, arguments.steps, arguments.batches, arguments.models)
    for optimizer, step, batch, model in wanted:
        key = (model, batch, step, optimizer)
        # Without momentum there is no state to make.
        if key in done or (optimizer == "sgd" and step == "first"):
            continue
        path = arguments.graphs / f"{model}-{batch}-{step}-{optimizer}.json.gz"
        if not path.exists():
            zoo.capture(model, batch=batch, step=step, optimizer=optimizer).save(path)
        line = {**dict(zip(KEYS, key, strict=True)), **measure(roam.Graph.load(path))}
        lines.append(line)
        with arguments.out.open("a") as out:
            out.write(json.dumps(line) + "\n")
        sys.stderr.write(f"{' '.join(map(str, key))}: gap {100 * line['gap']:.3f} %, {line['plan_s']:.2f} s\n")
    sys.stdout.write(table(lines) + "\n")


if __name__ == "__main__":
    main()
