"""Whether a change left every plan as it was, byte for byte.

    python benches/same_plans.py record before.json      # at one commit
    python benches/same_plans.py record after.json       # at the other, with its planner built
    python benches/same_plans.py compare before.json after.json

`record` plans the instance graphs of benches/ by several settings, packs the layout instances, and
writes a SHA-256 of each graph, plan and packing. With `--suite` it also captures the models of
`roam bench suite`, with `--paper` the rows of the paper's table, both by the tree at hand. With
`--graphs FOLDER` it keeps what it captured there, and captures nothing that is there already: then
two planners plan the same graphs, whatever became of capture.

`compare` names what differs and what only one record has, and then exits with 1.

A plan's digest leaves out `graph_digest`, and a graph's the `source` of operators that stands in
roam's own files: it moves with every line that is added above it. A changed graph is named once, as
a graph; its plans are compared all the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import roam
import roam.layout
from roam import zoo
from roam_bench import suite
from roam_bench.paper import paper_graph, published

HERE = Path(__file__).parent
#: Whether a graph's `source` is a file of roam's own, or of its benchmarks.
OWN_FILE = re.compile(r"roam/|(.*/)?roam_bench/")
#: What each graph is planned by. Two streams take the longer way through most of the planner.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "reuse": {},
    "no reuse": {"reuse": False},
    "two streams": {"streams": 2, "stream_model": "time_step", "speed": 1.0},
}
# : A hundredth of what `pack` may spend: every search behind the greedy packers runs, and seconds
# are enough.
PACKING_WORK = 20_000_000
Record = dict[str, dict[str, str]]
Captures = dict[str, Callable[[], roam.Graph]]


def digest(data: object) -> str:
    """SHA-256 of the value's JSON."""
    return hashlib.sha256(json.dumps(data, separators=(",", ":")).encode()).hexdigest()


def graph_digest(graph: roam.Graph) -> str:
    """Of all but the places in roam's own files."""
    data = json.loads(graph.to_json())
    for operator in data["operators"]:
        if OWN_FILE.match((operator.get("source") or {}).get("file", "")):
            del operator["source"]
    return digest(data)


def plan_digest(plan: roam.Plan) -> str:
    """Of all but the name of its graph."""
    data = json.loads(plan.to_json())
    del data["graph_digest"]
    return digest(data)


def instances() -> Captures:
    """The instances that the tree keeps."""
    paths = sorted([*HERE.glob("*.json.gz"), *HERE.glob("exact/*.json.gz")])
    return {path.relative_to(HERE).as_posix(): partial(roam.Graph.load, path) for path in paths}


def suite_graphs() -> Captures:
    """Steady steps of the models that `roam bench suite` plans."""
    models = [name for name in zoo.names() if not name.endswith("-tiny")]
    return {
        f"suite/{model}-{batch}-{optimizer}": partial(
            zoo.capture, model, batch=batch, optimizer=optimizer, step="steady", device="cpu"
        )
        for model, batch, optimizer in product(models, suite.BATCHES, suite.OPTIMIZERS)
    }


def paper_graphs() -> Captures:
    """The rows of the paper's table."""
    return {
        f"paper/{row['model']}-{row['batch']}": partial(paper_graph, row["model"], row["batch"])
        for row in published()
    }


def kept(folder: Path, name: str, capture: Callable[[], roam.Graph]) -> roam.Graph:
    """The graph as the folder has it; captured, and written there, where it is not."""
    path = folder / f"{name}.json.gz"
    if path.exists():
        return roam.Graph.load(path)
    graph = capture()
    path.parent.mkdir(parents=True, exist_ok=True)
    graph.save(path)
    return graph


def record(captures: Captures) -> Record:
    """What is found now."""
    found: Record = {"graphs": {}, "plans": {}, "packings": {}}
    for name, capture in captures.items():
        start = time.perf_counter()
        graph = capture()
        found["graphs"][name] = graph_digest(graph)
        for label, settings in SETTINGS.items():
            found["plans"][f"{name}, {label}"] = plan_digest(roam.optimize(graph, **settings))
        sys.stderr.write(f"{name}: {time.perf_counter() - start:.1f} s\n")
    for path in sorted(HERE.glob("layout/*.csv")):
        packing = roam.layout.pack(roam.layout.Buffers.read_csv(path), work=PACKING_WORK)
        found["packings"][path.name] = digest([packing.offsets.tolist(), packing.pool_bytes])
    return found


def differences(before: Record, after: Record) -> Iterator[str]:
    """What differs, one line each."""
    for what in sorted(before.keys() | after.keys()):
        old, new = before.get(what, {}), after.get(what, {})
        for name in sorted(old.keys() | new.keys()):
            if name not in new:
                yield f"{what}: {name}: only before"
            elif name not in old:
                yield f"{what}: {name}: only after"
            elif old[name] != new[name]:
                yield f"{what}: {name}: differs"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    recording = modes.add_parser("record", help="plan, and write what came of it")
    recording.add_argument("output", type=Path)
    recording.add_argument(
        "--suite", action="store_true", help="also the models of `roam bench suite` (hours)"
    )
    recording.add_argument(
        "--paper", action="store_true", help="also the rows of the paper's table"
    )
    recording.add_argument(
        "--graphs",
        type=Path,
        metavar="FOLDER",
        help="keep what is captured, and take it from there",
    )
    comparing = modes.add_parser("compare", help="name what differs between two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.mode == "record":
        captured = (suite_graphs() if chosen.suite else {}) | (
            paper_graphs() if chosen.paper else {}
        )
        if chosen.graphs is not None:
            captured = {
                name: partial(kept, chosen.graphs, name, capture)
                for name, capture in captured.items()
            }
        found = record(instances() | captured)
        chosen.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    before, after = (
        json.loads(path.read_text(encoding="utf-8")) for path in (chosen.before, chosen.after)
    )
    lines = list(differences(before, after))
    for line in lines:
        print(line)
    same = sum(
        before[what].get(name) == value
        for what in after
        if what in before
        for name, value in after[what].items()
    )
    print(f"{same} the same, {len(lines)} not")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
