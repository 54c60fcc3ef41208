"""Runs the tests of other libraries eagerly and with their training steps compiled by roam.

`python benches/upstream.py FOLDER` takes a folder in which the libraries' source distributions or
repositories are unpacked (`pip download --no-binary :all: --no-deps --no-build-isolation NAME`),
and runs the suites of `SUITES` that it finds there. Transformers, Lightning and TRL leave the tests
that train out of their source distributions: then unpack the repository at the tag of the installed
version. The plugin beside this file (`upstream_plugin.py`) says what is compiled.

Each test that passes eagerly runs again by plan. It then passes, or is *refused* (roam raised an
error with a code), or *fails* otherwise, or is *different*: it passes, but weights, optimizer state
or logged values have other bits than after two eager runs that agree. The rows go to
docs/benchmarks/upstream.json, and every refusal, failure and difference to a file of its own in
FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from roam_bench.results import Record, Row, machine, read_json, versions, write_json
from roam_bench.run import Column, Table

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "docs" / "benchmarks" / "upstream.json"
SUITES: dict[str, tuple[str, str, list[str]]] = {
    "transformers": ("transformers", "transformers-*", ["tests/trainer"]),
    "lightning": ("lightning", "*lightning-*", ["tests/tests_pytorch"]),
    "timm": ("timm", "timm-*", ["tests/test_optim.py"]),
    "peft": (
        "peft",
        "peft-*",
        ["tests/test_custom_models.py", "-k", "only_params_are_updated or disable_adapters"],
    ),
    "accelerate": (
        "accelerate",
        "accelerate-*",
        ["tests/test_accelerator.py", "tests/test_state_checkpointing.py"],
    ),
}
"""By name: the distribution, the folder's pattern, and what pytest is told. A suite that has no
such files there is left out."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--every", type=int, default=1, help="run one test in so many")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    for name in arguments.only:
        distribution, pattern, asked = SUITES[name]
        found = [path for path in folder.glob(pattern) if (path / asked[0]).exists()]
        if not found:
            print(f"{name}: no {pattern}/{asked[0]} in {folder}")
            continue
        run = _Runs(
            found[0], folder / f"upstream-{name}", asked, arguments.timeout, arguments.every
        )
        _save(run.row(name, version(distribution)))
        print(run.report())
    return 0


class _Runs:
    """The runs of one suite."""

    def __init__(
        self, where: Path, records: Path, asked: list[str], timeout_s: int, every: int
    ) -> None:
        self.where, self.records, self.asked = where, records, asked
        self.timeout_s, self.every = timeout_s, every
        self.eager: dict[str, Row] = {}
        self.planned: dict[str, Row] = {}

    def row(self, name: str, installed: str) -> Row:
        self.eager = self._run("eager", None)
        passed = [test for test, line in self.eager.items() if line["outcome"] == "passed"]
        self.planned = self._run("plan", passed)
        doubtful = [test for test in passed if self._has_other_trace(test)]
        again = self._run("again", doubtful) if doubtful else {}
        for test in doubtful:
            if again.get(test, {}).get("trace") == self.eager[test]["trace"]:
                self.planned[test]["outcome"] = "different"
        outcomes = Counter(self.outcome(test) for test in passed)
        codes = Counter(
            line["code"] for test, line in self.planned.items() if self.outcome(test) == "refused"
        )
        return {
            "suite": name,
            "version": installed,
            "asked": " ".join(self.asked),
            "every": self.every,
            "tests": len(self.eager),
            "eager": len(passed),
            "passed": outcomes["passed"],
            "trained": sum(
                bool(line["calls"]) and self.outcome(test) == "passed"
                for test, line in self.planned.items()
            ),
            "refused": outcomes["refused"],
            "failed": outcomes["failed"],
            "different": outcomes["different"],
            "codes": ", ".join(f"{code} {count}" for code, count in codes.most_common()),
        }

    def outcome(self, test: str) -> str:
        line = self.planned.get(test)
        if line is None:  # the process died, or the test did not end
            return "failed"
        if line["outcome"] == "failed" and line["code"]:
            return "refused"
        return str(line["outcome"])

    def report(self) -> str:
        """What did not pass by plan."""
        lines = [
            f"{outcome:9} {test}\n          {line.get('refusal') or line.get('error', 'no result')}"
            for test in self.eager
            if self.eager[test]["outcome"] == "passed"
            and (outcome := self.outcome(test)) != "passed"
            for line in (self.planned.get(test, {}),)
        ]
        text = "\n".join(lines)
        self.records.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
        return text

    def _has_other_trace(self, test: str) -> bool:
        line = self.planned.get(test)
        return (
            line is not None
            and line["outcome"] == "passed"
            and line["trace"] != self.eager[test]["trace"]
        )

    def _run(self, mode: str, tests: list[str] | None) -> dict[str, Row]:
        record = self.records.with_suffix(f".{mode}.jsonl")
        record.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "UPSTREAM_MODE": "plan" if mode == "plan" else "eager",
            "UPSTREAM_RECORD": str(record),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT / "benches"), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        if tests is None:
            environment["UPSTREAM_EVERY"] = str(self.every)
        else:
            only = self.records.with_suffix(".only")
            only.write_text("\n".join(tests), encoding="utf-8")
            environment["UPSTREAM_ONLY"] = str(only)
        command = [
            sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "upstream_plugin",
            "-p", "no:cacheprovider", f"--timeout={self.timeout_s}", *self.asked,
        ]  # fmt: skip
        with self.records.with_suffix(f".{mode}.log").open("w", encoding="utf-8") as log:
            subprocess.run(
                command, cwd=self.where, env=environment, stdout=log, stderr=log, check=False
            )
        if not record.exists():
            return {}
        lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
        return {line["test"]: line for line in lines}


def _save(row: Row) -> None:
    rows = read_json(RESULT)["rows"] if RESULT.exists() else []
    rows = [other for other in rows if other["suite"] != row["suite"]] + [row]
    record = {
        "bench": "upstream",
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "settings": {},
        "rows": sorted(rows, key=lambda row: list(SUITES).index(row["suite"])),
    }
    write_json(record, RESULT)


def _asked(row: Row) -> str:
    names = " ".join(Path(part).stem for part in row["asked"].split())
    return names if row["every"] == 1 else f"{names}: one in {row['every']}"


def rows_table(record: Record) -> Table:
    """The table of docs/benchmarks/index.md."""

    def plain(key: str) -> Callable[[Row], str]:
        return lambda row: str(row[key]) or "-"

    return Table(
        "Other libraries' tests",
        [
            Column("tests of", lambda row: f"{row['suite']} {row['version']}", right=False),
            Column("of the tests", _asked, right=False),
            Column("pass eagerly", plain("eager")),
            Column("pass by plan", plain("passed")),
            Column("... in which steps ran by plan", plain("trained")),
            Column("refused", plain("refused")),
            Column("fail", plain("failed")),
            Column("different", plain("different")),
            Column("codes of the refusals", plain("codes"), right=False),
        ],
        record["rows"],
    )


if __name__ == "__main__":
    raise SystemExit(main())
