"""The comparison of two commits' benchmarks, on made-up measurements and with a made-up cargo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import compare
import durations
import pytest
from rich.console import Console

SCRIPT = Path(__file__).parents[2] / "benches" / "compare.py"

# Writes what criterion would: `twice` takes twice as long where the file `slow` exists, `same`
# never.
CARGO = """#!{python}
import json, os, pathlib, sys, time
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([os.getcwd(), sys.argv[1:], os.environ["CARGO_TARGET_DIR"]]) + "\\n")
if "--no-run" in sys.argv:
    sys.exit()
if "HANG" in os.environ:
    time.sleep(1000)
if os.path.exists("broken"):
    sys.exit(3)
saved = sys.argv[sys.argv.index("--save-baseline") + 1]
for name, nanoseconds in (("twice", 2000.0 if os.path.exists("slow") else 1000.0), ("same", 50.0)):
    folder = pathlib.Path(os.environ["CRITERION_HOME"]) / name / saved
    folder.mkdir(parents=True)
    (folder / "benchmark.json").write_text(json.dumps({{"full_id": "group/" + name}}))
    (folder / "estimates.json").write_text(json.dumps({{"median": {{"point_estimate": nanoseconds, "standard_error": 1.0}}}}))
"""


def save(home: Path, name: str, side: str, number: int, median_ns: float, error_ns: float) -> None:
    """What criterion saves of one run, as far as it is read."""
    folder = home / name.replace("/", "_") / f"{side}-{number}"
    folder.mkdir(parents=True)
    (folder / "benchmark.json").write_text(json.dumps({"full_id": name}))
    median = {"point_estimate": median_ns, "standard_error": error_ns}
    (folder / "estimates.json").write_text(json.dumps({"median": median, "mean": {}}))


def test_one_round_by_hand(tmp_path: Path) -> None:
    # 1000 and 1200 ns, errors 1 % each: the ratio's logarithm is off by sqrt(0.01^2 + 0.01^2) =
    # 0.014142, and 1.96 of that is 0.027719.
    save(tmp_path, "a/b", "base", 1, 1000, 10)
    save(tmp_path, "a/b", "new", 1, 1200, 12)
    one = compare.compare(
        "a/b", compare.read(tmp_path, "base")["a/b"], compare.read(tmp_path, "new")["a/b"]
    )
    assert (one.base_s, one.new_s, one.ratio) == pytest.approx((1e-6, 1.2e-6, 1.2))
    assert (one.lower, one.upper) == pytest.approx((1.2 * 0.972662, 1.2 * 1.028107), rel=1e-5)
    assert one.verdict(0.05) == "regression"
    assert one.verdict(0.18) == ""


def test_rounds_that_differ_widen_the_interval(tmp_path: Path) -> None:
    # Ratios 1.1 and 1.3 without errors of their own: logarithms 0.095310 and 0.262364, mean
    # 0.178837 (1.195826), variance 0.013953, of the mean 0.006977, root 0.083527; 1.96 of it is
    # 0.163713: from 1.015247 to 1.408518.
    for number, (base, new) in enumerate(((1000, 1100), (2000, 2600)), start=9):
        save(tmp_path, "a", "base", number, base, 0)
        save(tmp_path, "a", "new", number, new, 0)
    one = compare.compare(
        "a", compare.read(tmp_path, "base")["a"], compare.read(tmp_path, "new")["a"]
    )
    assert (one.ratio, one.lower, one.upper) == pytest.approx(
        (1.195826, 1.015247, 1.408518), rel=1e-4
    )
    assert one.verdict(0.05) == ""
    assert one.verdict(0.01) == "regression"


def test_the_report_names_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, base, new in (
        ("slower", 100, 150),
        ("faster", 100, 50),
        ("same", 100, 101),
        ("unsure", 100, 150),
    ):
        save(tmp_path, name, "base", 1, base, 40 if name == "unsure" else 0.1)
        save(tmp_path, name, "new", 1, new, 0.1)
    save(tmp_path, "gone", "base", 1, 5, 1)
    save(tmp_path, "added", "new", 1, 5, 1)
    assert compare.report(tmp_path, 0.05, Console(width=120)) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "only base has gone" in lines
    assert "only new has added" in lines
    assert [line for line in lines if line.startswith(("regression:", "improvement:"))] == [
        "regression: slower, 1.500 times", "improvement: faster, 0.500 times",
    ]  # fmt: skip
    assert compare.report(tmp_path, 0.6, Console(width=120)) == 0


def test_durations() -> None:
    assert [compare.seconds(value) for value in (1.234, 0.0456, 7.8e-6, 9.1e-10)] == [
        "1.23 s", "45.6 ms", "7.8 us", "0.91 ns",
    ]  # fmt: skip


def test_durations_of_tests_have_their_nodes_names(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Those of tests/durations.json, by which `make quick` and `make test` choose."""
    report = tmp_path / "tests.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.benches.test_bench" name="test_one[a]" time="0.25"/>
        <testcase classname="tests.benches.test_bench" name="test_one[b]" time="0.5"/>
        <testcase classname="tests.benches.test_bench.TestMore.TestEven" name="test_two" time="1"/>
        </testsuite></testsuites>"""
    )
    assert durations.read(report) == {
        "tests/benches/test_bench.py::test_one": 0.75,
        "tests/benches/test_bench.py::TestMore::TestEven::test_two": 1,
    }
    assert request.node.nodeid.startswith("tests/benches/test_bench_compare.py::")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, and a cargo that measures nothing."""
    folder, tools = tmp_path / "repository", tmp_path / "tools"
    folder.mkdir()
    tools.mkdir()
    (tools / "cargo").write_text(CARGO.format(python=sys.executable))
    (tools / "cargo").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tools), os.environ["PATH"]]))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("CARGO_TARGET_DIR", raising=False)
    git(folder, "init", "--quiet")
    (folder / "benches").mkdir()
    (folder / "benches" / "one.json.gz").write_text("first")
    (folder / ".gitignore").write_text("target\n")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=x", "-c", "user.email=x@y", "commit", "--quiet", "-m", "first")
    return folder


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def script(repository: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "HEAD", *options]
    return subprocess.Popen(
        command, cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def worktrees(repository: Path) -> int:
    return git(repository, "worktree", "list").count("\n")


def test_a_commit_against_itself(repository: Path, tmp_path: Path) -> None:
    process = script(repository, "--filter", "o/same", "--quick", "--rounds", "2")
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "2 benchmarks" in printed
    assert "regression" not in printed
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    # Both are built, each for itself; then they run by turns.
    assert [Path(folder) == repository for folder, _, _ in calls] == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]
    assert {Path(target) for _, _, target in calls} == {
        repository / "target",
        repository / "target/bench-compare/base",
    }
    assert [words[words.index("--save-baseline") + 1] for _, words, _ in calls[2:]] == [
        "base-1", "new-1", "new-2", "base-2",
    ]  # fmt: skip
    assert all(words[-1] == "o/same" for _, words, _ in calls[2:])
    assert worktrees(repository) == 1


def test_a_slower_working_tree_fails(repository: Path) -> None:
    (repository / "slow").touch()
    (repository / "benches" / "one.json.gz").write_text("second")
    process = script(repository)
    printed, errors = process.communicate()
    assert process.returncode == 1, errors
    assert "regression: group/twice, 2.000 times" in printed
    assert "differs between the two, so the work may: benches/one.json.gz" in printed
    assert "group/same" in printed
    assert worktrees(repository) == 1


def test_a_failure_leaves_nothing_behind(repository: Path) -> None:
    (repository / "broken").touch()
    process = script(repository)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert "cargo" in errors
    assert worktrees(repository) == 1


def test_a_commit_that_does_not_exist(repository: Path) -> None:
    process = subprocess.run(
        [sys.executable, str(SCRIPT), "nowhere"], cwd=repository, capture_output=True, check=False
    )
    assert process.returncode == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_removes_the_worktree(
    repository: Path, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANG", "1")
    process = script(repository)
    calls = tmp_path / "calls"
    while not calls.exists() or calls.read_text().count("\n") < 3:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    assert worktrees(repository) == 2
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert worktrees(repository) == 1
    assert not list(tmp_path.glob("bench-compare-*"))
