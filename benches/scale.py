"""How planning grows with the step: plans made-up steps of 1 000 to 1 000 000 operators, writes a CSV and a plot.

Needs a Rust toolchain and matplotlib (`pip install 'roam-torch[bench]'`). Every size is planned in a process of its own,
so that its memory can be told.

    python benches/scale.py --output docs/benchmarks
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
# The same figures give the same file.
matplotlib.rcParams["svg.hashsalt"] = "roam"
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("deep", "wide", "branching")
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
COLUMNS = (
    "family",
    "operators",
    "tensors",
    "plan_s",
    "plan_cpu_s",
    "peak_rss_bytes",
    "gap",
    "fragmentation",
    "graph_digest",
)


def measure(family: str, size: int) -> dict[str, Any]:
    """Figures of one plan, from a process of its own."""
    command = ["cargo", "run", "--release", "--locked", "--quiet", "--example", "scale", "--", family, str(size)]
    finished = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(finished.stdout)
    return figures


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds and memory against operators, all axes logarithmic, with a straight line to compare with."""
    figure, (time, memory) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for colour, family in zip(("C0", "C1", "C2"), FAMILIES, strict=True):
        of_family = [row for row in rows if row["family"] == family]
        operators = [row["operators"] for row in of_family]
        time.plot(operators, [row["plan_s"] for row in of_family], color=colour, marker="o", label=family)
        busy = [row["plan_cpu_s"] for row in of_family]
        time.plot(operators, busy, color=colour, linestyle="--", label=f"{family}, processor")
        memory.plot(operators, [row["peak_rss_bytes"] / 2**20 for row in of_family], marker="o", label=family)
    ends = [min(row["operators"] for row in rows), max(row["operators"] for row in rows)]
    slowest = max(rows, key=lambda row: row["plan_s"])
    linear = [slowest["plan_s"] * end / slowest["operators"] for end in ends]
    time.plot(ends, linear, color="grey", linestyle=":", label="linear")
    for axes, label in ((time, "planning, seconds"), (memory, "most memory of the process, MiB")):
        axes.set(xscale="log", yscale="log", xlabel="operators", ylabel=label)
        axes.grid(visible=True, alpha=0.3)
    time.legend(fontsize="small", loc="upper left")
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(), help="folder for scale.csv and scale.svg")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="most operators (default %(default)s)")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for family in FAMILIES:
        for size in SIZES:
            if size <= arguments.largest:
                rows.append(measure(family, size))
                print(*(f"{name}={rows[-1][name]}" for name in COLUMNS[:-1]), flush=True)
    with (arguments.output / "scale.csv").open("w", newline="") as file:
        file.write(f"# {platform.machine()}, {platform.system()}, Python {platform.python_version()}\n")
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    plot(rows, arguments.output / "scale.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
