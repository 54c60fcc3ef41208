"""Whether training scripts, written as their documentation has them, keep eager PyTorch's bits:
`roam bench scripts`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from functools import partial

from roam_bench.outcomes import exit_code, outcomes_line, outcomes_table
from roam_bench.results import BenchError, Record, Row, Task
from roam_bench.run import Benchmark, Column, Table, check_named
from roam_bench.scripts.registry import FAMILIES, Script, scripts

_OUTCOMES = ("equal", "refused", "different", "crashed")

_COLUMNS = (
    Column("family", lambda row: row["family"], right=False),
    Column("script", lambda row: row["name"], right=False),
    Column("outcome", lambda row: row["outcome"], right=False),
    Column("plans", lambda row: str(row["plans"])),
    Column("operators", lambda row: f"{row['operators']:,}"),
    Column("seconds", lambda row: f"{row['wall_s']:.1f}"),
    Column("reason", lambda row: " ".join(filter(None, (row["code"], row["reason"]))), right=False),
)


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """Every script whose libraries are installed, or those named."""
    offered = [one for one in scripts() if not arguments.family or one.family in arguments.family]
    check_named(arguments.only, (one.name for one in offered))
    chosen = [one for one in offered if not arguments.only or one.name in arguments.only]
    chosen = [one for one in chosen if all(importlib.util.find_spec(name) for name in one.needs)]
    tasks = [
        Task(
            {"family": one.family, "name": one.name, "after": one.after},
            partial(try_script, one, arguments.time_limit),
        )
        for one in chosen
    ]
    settings = {
        "families": arguments.family,
        "only": arguments.only,
        "time_limit_s": arguments.time_limit,
    }
    return Benchmark(
        "scripts",
        settings,
        tasks,
        _COLUMNS,
        summary=lambda record: [
            families_table(record),
            outcomes_line(record, "scripts"),
        ],
        exit_code=exit_code,
    )


def families_table(record: Record) -> Table:
    """How many scripts of each family came to what."""
    return outcomes_table(record, "Scripts", "family", "scripts", _OUTCOMES)


def totals(record: Record) -> str:
    """The same of all families."""
    families = {row["family"] for row in record["rows"]}
    return f"{outcomes_line(record, f'scripts of {len(families)} families')}."


def try_script(script: Script, time_limit_s: float) -> Row:
    """Run one script in a process of its own, which may crash or hang; see `child.outcome`."""
    row: Row = {
        "outcome": "timed out",
        "code": "",
        "reason": f"after {time_limit_s:g} s",
        "plans": 0,
        "operators": 0,
    }
    command = [sys.executable, "-m", "roam_bench.scripts.child", script.name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=time_limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return row
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return row | {
            "outcome": "crashed",
            "reason": f"the process ended with {done.returncode}: {last[:300]}",
        }
    try:
        found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise BenchError(f"{script.name} printed no result") from None
    return found


__all__ = ["FAMILIES", "benchmark"]
