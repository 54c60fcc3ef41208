"""What the planner's constants are worth: plans with each a quarter and four times as large.

    python benches/constants.py build target/constants
    python benches/constants.py measure target/constants GRAPHS RESULTS.json
    python benches/constants.py show RESULTS.json

`build` copies the sources, turns each constant of `CONSTANTS` into a function that reads it from
the environment, and builds the bindings. `measure` plans every graph in the folder `GRAPHS`
(`same_plans.py record --suite --paper --graphs GRAPHS` fills one) and packs the layout instances of
benches/, once with each setting: in a process of its own, on one thread, timed by its processor
time. A run that was stopped goes on where it was. `show` prints what changed, a line each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORE = Path("rust", "roam-core", "src")
FACTORS = (0.25, 4)
VARIABLE = "ROAM_CONSTANT"
#: A setting that takes so many times as long is given up.
MOST_TIMES = 5
#: Layout instances are packed with so much work: the searches run, and seconds are enough.
PACKING_WORK = 20_000_000
#: Per file the constants that trade time for bytes. Others are facts (sizes, versions, sentinels)
#: or part of a published method. Those of recompute/ are left out: these plans have no memory
#: limit.
CONSTANTS: Mapping[str, Sequence[str]] = {
    "bound/bounds.rs": (
        "FEWEST_CUTS", "INSPECT_WORK", "ALL_CUTS_WORK", "ALL_PROBES_WORK", "FALLING_WORK", "JOINT_WORK",
    ),
    "bound/cut.rs": ("WORK_PER_CUT", "MOST_CHOICES"),
    "bound/first_of_set.rs": ("MOST_IN_FIRST_SET", "FIRST_OF_SET_WORK", "MOST_IN_VAIN"),
    "bound/probe.rs": ("MOST_PROBES", "MOST_JOINT", "PROBE_WORK", "MOST_UNDER_LIMIT"),
    "layout/puzzles/arrange.rs": ("SOLID_SHARE", "GREEDY_SHARE", "MOST_MOVES", "PER_SPAN", "PER_PIECE", "MOST_FRUITLESS"),
    "layout/puzzles/solid.rs": ("PART_FOR_CORES", "PART_FOR_ANNEALING"),
    "layout/packers/weighted.rs": ("NEAREST",),
    "layout/portfolio.rs": ("CORE_WORK",),
    "layout/puzzles/anneal.rs": ("MOST_WORDS", "MOST_PAIRS", "HEAT", "COLDEST", "CHANGES", "DEEPEST", "NEAR"),
    "layout/search/beam.rs": ("BLOCKS_PER_STAGE", "MOST_STAGES"),
    "layout/search/escalate.rs": (
        "WIDEST", "FIRST_BUDGET", "MOST_FRUITLESS", "WHOLE_SHARE", "NORMAL_WORK", "NORMAL_SHARE",
        "MANY", "BEGIN", "MOST_PAIRS",
    ),
    "layout/search/joined.rs": ("MOST_COMPARED", "FEWER"),
    "layout/search/normal.rs": ("MOST_STATES",),
    "layout/work.rs": ("WORK", "FEW_BLOCKS", "SHARE"),
    "optimize.rs": ("SMALL", "MOST_LAID_OUT", "NEAR", "MOST_FITTED", "SEARCH_WORK", "LEAST_SEARCH", "MOST_FINISHED"),
    "order/chain.rs": ("WORK", "MOST_ROUNDS"),
    "order/exact.rs": ("FIRST_ATTEMPT", "GROWTH"),
    "order/peaks.rs": ("WORK", "MOST_OPERATORS"),
    "order/portfolio.rs": (
        "SPLIT", "MOST_OTHERS", "MOST_FITTED", "MOST_CHAINED", "MOST_LIMITS", "MOST_SEARCHES", "MOST_NEEDIEST",
    ),
    "order/refine.rs": ("MOST_SPLITS", "MOST_STAGES", "MOST_PROBED", "WORK"),
    "order/updates.rs": ("MOST_ASKED",),
    "problem.rs": ("LARGE", "LARGE_SHARE"),
    "small.rs": ("MOST_STATES", "WORK", "PER_ORDER", "MOST_PAIRS"),
    "tolerance.rs": ("WORTHWHILE",),
    "update_phase.rs": ("LONGEST_UPDATE",),
}  # fmt: skip
#: (module, name): those that other files use.
USED_ELSEWHERE = (
    ("chain", "WORK"),
    ("probe", "MOST_UNDER_LIMIT"),
    ("update_phase", "LONGEST_UPDATE"),
    ("work", "SHARE"),
)
_READ = """
/// A constant as the environment has it.
pub(crate) fn constant(name: &str, value: f64) -> f64 {
    let set = std::env::var("ROAM_CONSTANT").unwrap_or_default();
    set.strip_prefix(name).and_then(|rest| rest.strip_prefix('=')?.parse().ok()).unwrap_or(value)
}
"""


def called(text: str, name: str) -> str:
    """A source file with the constant's uses as calls."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not re.match(r"\s*(//|use |(pub(\(\w+\))? )?const )", line):
            lines[number] = re.sub(rf"(?<!\w){name}\b", f"{name}()", line)
    return "\n".join(lines) + "\n"


def adjustable(text: str, file: str, names: Sequence[str]) -> str:
    """A source file with its constants as functions of the same name."""
    for name in names:
        one = re.compile(rf"^((?:pub(?:\(\w+\))? )?)const {name}: (\w+) = (.*);$", re.MULTILINE)
        if one.search(text) is None:
            raise SystemExit(f"{file} has no constant {name}; correct CONSTANTS")
        text = called(text, name)
        made = (
            rf"#[allow(non_snake_case)] \1fn {name}() -> \2 {{ static SET: std::sync::OnceLock<\2> = "
            rf"std::sync::OnceLock::new(); *SET.get_or_init(|| "
            rf'crate::constant("{file}:{name}", (\3) as f64) as \2) }}'
        )
        text = one.sub(made, text)
    return text


def value_of(file: str, name: str) -> int:
    """A constant's value in the sources."""
    text = (ROOT / CORE / file).read_text()
    found = re.search(rf"const {name}: \w+ = (.*);", text)
    assert found is not None, (file, name)
    return int(eval(found[1].replace("_", ""), {}))  # our own source, such as 1 << 20


def build(folder: Path) -> None:
    """Builds the planner with constants that can be set, beside a copy of the Python package."""
    shutil.rmtree(folder / "source", ignore_errors=True)
    shutil.copytree(ROOT / "rust", folder / "source" / "rust")
    for name in ("Cargo.toml", "Cargo.lock", "clippy.toml"):
        shutil.copy(ROOT / name, folder / "source")
    core = folder / "source" / CORE
    for file, names in CONSTANTS.items():
        path = core / file
        path.write_text(adjustable(path.read_text(), file, names))
    # Constants that other files use.
    for path in core.rglob("*.rs"):
        text = path.read_text()
        for module, name in USED_ELSEWHERE:
            if re.search(rf"^use .*\b{module}::.*\b{name}\b", text, re.MULTILINE):
                text = called(text, name)
            else:
                text = re.sub(rf"\b{module}::{name}\b", f"{module}::{name}()", text)
        path.write_text(text)
    lib = core / "lib.rs"
    lib.write_text(lib.read_text() + _READ)
    environment = {"PYO3_BUILD_EXTENSION_MODULE": "1", "PYO3_PYTHON": sys.executable}
    subprocess.run(
        ["cargo", "build", "--quiet", "--release", "--locked", "-p", "roam-py"],
        cwd=folder / "source",
        env={**os.environ, **environment},
        check=True,
    )
    shutil.copytree(ROOT / "python" / "roam", folder / "roam", dirs_exist_ok=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", folder / "source" / "target"))
    (folder / "roam" / "_core.abi3.so").unlink(missing_ok=True)
    shutil.copy(target / "release" / "lib_core.so", folder / "roam" / "_core.abi3.so")


def settings() -> Iterator[tuple[str, float, int]]:
    """Each constant with each factor, and the value that comes of it."""
    for factor in FACTORS:
        for file, names in CONSTANTS.items():
            for name in names:
                yield f"{file}:{name}", factor, max(1, round(value_of(file, name) * factor))


def plans(graphs: Mapping[str, Any], packings: Mapping[str, Any]) -> dict[str, Any]:
    """What is planned now: per name (bytes, lower bound), and seconds of CPU time."""
    import roam
    from roam import layout

    found: dict[str, Any] = {}
    start = time.process_time()
    for name, graph in graphs.items():
        plan = roam.optimize(graph)
        found[name] = (
            plan.total_bytes - plan.persistent_bytes,
            plan.total_lower_bound_bytes - plan.persistent_bytes,
        )
    planned = time.process_time()
    for name, requests in packings.items():
        packing = layout.pack(requests, work=PACKING_WORK)
        found[name] = (packing.pool_bytes, packing.lower_bound_bytes)
    return {"found": found, "plan_s": planned - start, "pack_s": time.process_time() - planned}


def apart(
    setting: str, graphs: Mapping[str, Any], packings: Mapping[str, Any], limit_s: int
) -> dict[str, Any] | None:
    """The same in a process of its own, which reads the constant when it first needs it; None where
    that takes more CPU time.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ[VARIABLE] = setting
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        with os.fdopen(write, "w") as pipe:
            json.dump(plans(graphs, packings), pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else None  # type: ignore[no-any-return]


def compared(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """How another run's plans differ from the base's."""
    changes = {
        name: other["found"][name][0] / total - 1
        for name, (total, _) in base["found"].items()
        if total and other["found"][name][0] != total
    }
    proved = [
        sum(total == bound for total, bound in run["found"].values()) for run in (base, other)
    ]
    return {
        "larger": sum(change > 0 for change in changes.values()),
        "smaller": sum(change < 0 for change in changes.values()),
        "worst": max(0.0, *changes.values()) if changes else 0.0,
        "best": min(0.0, *changes.values()) if changes else 0.0,
        "bounds": sum(
            other["found"][name][1] != bound for name, (_, bound) in base["found"].items()
        ),
        "proved": proved[1] - proved[0],
        "plan_time": other["plan_s"] / base["plan_s"],
        "pack_time": other["pack_s"] / base["pack_s"],
    }


def measure(folder: Path, graphs_folder: Path, results: Path) -> None:
    """Plans with each setting; continues where an earlier run was stopped."""
    sys.path.insert(0, str(folder))
    os.environ["RAYON_NUM_THREADS"] = "1"
    import roam
    from roam import layout

    graphs = {
        path.relative_to(graphs_folder).as_posix(): roam.Graph.load(path)
        for path in sorted(graphs_folder.rglob("*.json.gz"))
    }
    packings = {
        path.name: layout.Buffers.read_csv(path)
        for path in sorted((ROOT / "benches" / "layout").glob("*.csv"))
    }
    record: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    if not record:
        base = apart("", graphs, packings, 3600)
        assert base is not None
        record = {"graphs": len(graphs), "packings": len(packings), "base": base, "rows": []}
    base = record["base"]
    limit_s = MOST_TIMES * (round(base["plan_s"] + base["pack_s"]) + 1)
    done = {(row["constant"], row["factor"]) for row in record["rows"]}
    for constant, factor, value in settings():
        if (constant, factor) not in done:
            other = apart(f"{constant}={value}", graphs, packings, limit_s)
            row = {"constant": constant, "factor": factor, "value": value}
            row |= {"is_too_slow": True} if other is None else compared(base, other)
            record["rows"].append(row)
            results.write_text(json.dumps(record, indent=1) + "\n")
            print(line(row), flush=True)


def line(row: Mapping[str, Any]) -> str:
    """What one setting changed."""
    name = f"{row['constant']} x {row['factor']:g} = {row['value']:,}"
    if row.get("is_too_slow"):
        return f"{name}: more than {MOST_TIMES} times the CPU time"
    return (
        f"{name}: {row['larger']} larger (at most {row['worst']:+.2%}), {row['smaller']} smaller "
        f"(at most {row['best']:+.2%}), {row['bounds']} other bounds, {row['proved']:+d} proved, "
        f"CPU time x {row['plan_time']:.2f} (packings {row['pack_time']:.2f})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="build a planner whose constants can be set")
    building.add_argument("folder", type=Path)
    measuring = commands.add_parser("measure", help="plan with each constant changed")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("graphs", type=Path)
    measuring.add_argument("results", type=Path)
    showing = commands.add_parser("show", help="print what each setting changed")
    showing.add_argument("results", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.folder)
    elif arguments.command == "measure":
        measure(arguments.folder, arguments.graphs, arguments.results)
    else:
        for row in json.loads(arguments.results.read_text())["rows"]:
            print(line(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
