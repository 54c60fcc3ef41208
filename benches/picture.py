"""Draws the README's picture: the live bytes of a whole training step in program order and by its
plan.

    python benches/picture.py

captures and plans llama-1b, which allocates none of its weights, and writes docs/picture.svg.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt

import roam
from roam import zoo
from roam.report.figures import live_bytes

ROOT = Path(__file__).resolve().parent.parent
# Columns of the picture. Of the steps in one the most live bytes are drawn, so that the peak is in
# it.
COLUMNS = 250


def drawn(live: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return np.array([part.max() for part in np.array_split(live, COLUMNS)]) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-1b", help="a model of `roam zoo`")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "picture.svg")
    arguments = parser.parse_args()

    graph = zoo.capture(arguments.model)
    plan = roam.optimize(graph)
    program, planned = drawn(graph.live_bytes()), drawn(live_bytes(graph, plan))
    share = np.linspace(0, 100, COLUMNS)

    mpl.use("svg")
    # Text stays text, which is light and can be searched; equal data give an equal file.
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "roam",
            "font.family": "sans-serif",
            "font.size": 10,
        }
    )
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.0), layout="constrained")
    axes.fill_between(share, program, color="#c9ccd1", label="eager PyTorch's order")
    axes.fill_between(share, planned, color="#2b6cb0", label="roam's plan")
    axes.axhline(
        plan.lower_bound_bytes / 2**30, color="#c53030", linewidth=1, label="lower bound, proved"
    )
    axes.set(
        xlim=(0, 100),
        ylim=(0, None),
        xlabel="operators run, %",
        ylabel="live bytes inside the step, GiB",
    )
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(arguments.output, metadata={"Date": None})
    print(f"written: {arguments.output}, {arguments.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
