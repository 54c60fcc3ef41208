"""How fast the planner's benchmarks are here, next to another commit: names what became slower, and
exits with 1 if anything did.

    python benches/compare.py main
    python benches/compare.py HEAD~5 --filter gpt2-xl/optimize --quick

The other commit is checked out into a temporary worktree, which is always removed. Both sides are
built, then run by turns (base, new, new, base, ...), so that a machine that grows slower or faster
meanwhile does so for both.

A benchmark's ratio is new / base: the geometric mean over the rounds of the ratio of criterion's
medians. Its interval (95 %) counts the standard errors that criterion gives and how much the rounds
differ. It is a regression where the whole interval is above 1 + threshold, an improvement where it
is below 1 / (1 + threshold).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

SIDES = ("base", "new")
#: Of a normal distribution, 95 % lie within so many standard deviations.
DEVIATIONS = 1.96
#: What the benchmarks read: where it differs, so may the work.
INSTANCES = ("benches/*.json.gz", "benches/layout/*.csv", "rust/roam-core/benches")


@dataclass(frozen=True)
class Estimate:
    """Seconds of one run of a benchmark."""

    median_s: float
    error_s: float
    """Standard error of the median."""


@dataclass(frozen=True)
class Comparison:
    """One benchmark on both sides."""

    name: str
    base_s: float
    new_s: float
    ratio: float
    lower: float
    upper: float

    def verdict(self, threshold: float) -> str:
        """``regression``, ``improvement`` or empty."""
        if self.lower > 1 + threshold:
            return "regression"
        return "improvement" if self.upper < 1 / (1 + threshold) else ""


def read(home: Path, side: str) -> dict[str, list[Estimate]]:
    """What criterion saved under its home of all rounds of a side, by benchmark."""
    found: dict[str, list[tuple[int, Estimate]]] = {}
    for path in home.glob(f"**/{side}-*/estimates.json"):
        median = json.loads(path.read_text())["median"]
        name = json.loads((path.parent / "benchmark.json").read_text())["full_id"]
        estimate = Estimate(median["point_estimate"] * 1e-9, median["standard_error"] * 1e-9)
        found.setdefault(name, []).append(
            (int(path.parent.name.removeprefix(f"{side}-")), estimate)
        )
    return {
        name: [estimate for _, estimate in sorted(rounds, key=lambda one: one[0])]
        for name, rounds in found.items()
    }


def compare(name: str, base: Sequence[Estimate], new: Sequence[Estimate]) -> Comparison:
    """The ratio of a benchmark's rounds, paired, with its interval."""
    pairs = list(zip(base, new, strict=True))
    logs = [math.log(after.median_s / before.median_s) for before, after in pairs]
    within = (
        sum((one.error_s / one.median_s) ** 2 for pair in pairs for one in pair) / len(pairs) ** 2
    )
    between = statistics.variance(logs) / len(logs) if len(logs) > 1 else 0.0
    middle, reach = statistics.fmean(logs), DEVIATIONS * math.sqrt(within + between)
    medians = (statistics.fmean(one.median_s for one in side) for side in (base, new))
    return Comparison(
        name, *medians, math.exp(middle), math.exp(middle - reach), math.exp(middle + reach)
    )


def report(home: Path, threshold: float, console: Console) -> int:
    """Print the table of what is under criterion's home; how many benchmarks became slower."""
    base, new = (read(home, side) for side in SIDES)
    compared = [compare(name, base[name], new[name]) for name in sorted(base.keys() & new.keys())]
    table = Table(
        "benchmark", *SIDES, "ratio", "95 % interval", "", title=f"{len(compared)} benchmarks"
    )
    for column in table.columns[1:5]:
        column.justify = "right"
    styles = {"regression": "red", "improvement": "green"}
    for one in compared:
        verdict = one.verdict(threshold)
        interval = f"{one.lower:.3f} to {one.upper:.3f}"
        row = (
            one.name,
            seconds(one.base_s),
            seconds(one.new_s),
            f"{one.ratio:.3f}",
            interval,
            verdict,
        )
        table.add_row(*row, style=styles.get(verdict))
    console.print(table)
    for side, names in (("base", base.keys() - new.keys()), ("new", new.keys() - base.keys())):
        for name in sorted(names):
            console.print(f"only {side} has {name}", markup=False)
    for verdict in styles:
        found = [one for one in compared if one.verdict(threshold) == verdict]
        for one in sorted(found, key=lambda one: -abs(math.log(one.ratio))):
            console.print(f"{verdict}: {one.name}, {one.ratio:.3f} times", markup=False)
    return sum(one.verdict(threshold) == "regression" for one in compared)


def seconds(value: float) -> str:
    """A duration with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


@contextmanager
def checked_out(repository: Path, commit: str) -> Iterator[Path]:
    """A worktree of a commit, gone afterwards; another Ctrl-C does not stop its removal."""
    with tempfile.TemporaryDirectory(prefix="bench-compare-") as folder:
        worktree = Path(folder) / "base"
        try:
            run(
                ["git", "worktree", "add", "--quiet", "--detach", str(worktree), commit], repository
            )
            yield worktree
        finally:
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(worktree)], cwd=repository, check=False
            )
            signal.signal(signal.SIGINT, handler)


def run(command: Sequence[str], folder: Path, **environment: str) -> None:
    """Run a command that must succeed; its output goes to standard error, so that standard output
    is the table's.
    """
    subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, stdout=sys.stderr, check=True
    )


def output(command: Sequence[str], folder: Path) -> str:
    return subprocess.run(
        command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def measure(repository: Path, arguments: argparse.Namespace, home: Path, target: Path) -> None:
    """Let both sides run by turns, and save what criterion measures under its home."""
    bench = ["cargo", "bench", "--locked", "--bench", "*"]
    options = [
        "--noplot",
        "--warm-up-time",
        str(arguments.warm_up_s),
        "--measurement-time",
        str(arguments.measurement_s),
    ]
    options += (
        [] if arguments.sample_size is None else ["--sample-size", str(arguments.sample_size)]
    )
    options += [] if arguments.filter is None else [arguments.filter]
    with checked_out(repository, arguments.base) as worktree:
        sides = [(worktree, str(target / "bench-compare" / "base")), (repository, str(target))]
        for folder, built in sides:
            run([*bench, "--no-run"], folder, CARGO_TARGET_DIR=built)
        for number in range(1, arguments.rounds + 1):
            turns = list(zip(SIDES, sides, strict=True))
            for side, (folder, built) in turns if number % 2 else reversed(turns):
                saved = ["--save-baseline", f"{side}-{number}"]
                run(
                    [*bench, "--", *saved, *options],
                    folder,
                    CARGO_TARGET_DIR=built,
                    CRITERION_HOME=str(home),
                )


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument(
        "--filter", help="only benchmarks whose names match this regular expression"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.05,
        help="slower by more than this is a regression (default %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="how often each side runs (default %(default)s)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="half a second a benchmark and round, after a fifth to warm up",
    )
    parser.add_argument(
        "--measurement-s",
        type=float,
        help="seconds to measure a benchmark in a round (default 5, quick 0.5)",
    )
    parser.add_argument(
        "--warm-up-s", type=float, help="seconds before that (default 3, quick 0.2)"
    )
    parser.add_argument(
        "--sample-size", type=int, help="samples, for benchmarks that do not set their own"
    )
    arguments = parser.parse_args(words)
    if arguments.threshold < 0 or arguments.rounds < 1:
        parser.error("the threshold must be at least 0, and there must be a round")
    if arguments.measurement_s is None:
        arguments.measurement_s = 0.5 if arguments.quick else 5.0
    if arguments.warm_up_s is None:
        arguments.warm_up_s = 0.2 if arguments.quick else 3.0
    return arguments


def stop(number: int, frame: FrameType | None) -> None:
    """Let a request to end run what tidies up."""
    raise SystemExit(128 + number)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    signal.signal(signal.SIGTERM, stop)
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        repository = Path(output(["git", "rev-parse", "--show-toplevel"], Path.cwd()))
        commit = output(
            ["git", "rev-parse", "--verify", f"{arguments.base}^{{commit}}"], repository
        )
        target = Path(os.environ.get("CARGO_TARGET_DIR", repository / "target")).absolute()
        home = target / "bench-compare" / "criterion"
        shutil.rmtree(home, ignore_errors=True)
        measure(repository, arguments, home, target)
        changed = output(
            ["git", "diff", "--name-only", commit, "--", *INSTANCES], repository
        ).splitlines()
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    regressions = report(home, arguments.threshold, console)
    for path in changed:
        console.print(f"differs between the two, so the work may: {path}", markup=False)
    return 1 if regressions else 0


if __name__ == "__main__":
    sys.exit(main())
