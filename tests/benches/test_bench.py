"""How benchmarks keep, go on with, write and draw what they measure."""

from __future__ import annotations

import contextlib
import csv
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import roam
from roam_bench import results
from roam_bench.results import BenchError, Record, Results, Task
from roam_bench.run import Benchmark, Column, Table, across, run


class Work:
    """Squares numbers, notes which, and fails at one."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.done: list[int] = []
        self.fails_at = fails_at

    def square(self, number: int) -> Mapping[str, Any]:
        if number == self.fails_at:
            raise KeyboardInterrupt
        self.done.append(number)
        return {"square": number**2, "odd": None if number % 2 else ""}

    def tasks(self) -> list[Task]:
        return [
            Task({"number": number}, lambda number=number: self.square(number))
            for number in range(5)
        ]


COLUMNS = [
    Column("number", lambda row: str(row["number"])),
    Column("square", lambda row: f"{row['square']:,}"),
]


def benchmark(work: Work, **settings: Any) -> Benchmark:
    def plot(record: Record, figure: Any) -> None:
        figure.set_size_inches(3, 2)
        figure.subplots().plot([row["square"] for row in record["rows"]])

    return Benchmark("squares", settings, work.tasks(), COLUMNS, plot=plot)


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Work(fails_at=3), Work()
    with pytest.raises(KeyboardInterrupt):
        run(benchmark(first), tmp_path)
    with (tmp_path / "squares.rows.jsonl").open("a") as file:
        file.write('{"number": 3, "squ')  # an end in the middle of a line
    record = run(benchmark(second), tmp_path)
    assert (first.done, second.done) == ([0, 1, 2], [3, 4])
    assert [row["square"] for row in record["rows"]] == [0, 1, 4, 9, 16]
    assert "3 rows are done" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"squares.{e}" for e in ("csv", "json", "png", "svg")
    ]


def test_an_interrupt_that_a_library_swallows_ends_the_run(tmp_path: Path) -> None:
    work = Work()

    def swallow() -> Mapping[str, Any]:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return work.square(9)

    tasks = [
        *work.tasks(),
        Task({"number": 9}, swallow),
        Task({"number": 10}, lambda: work.square(10)),
    ]
    with pytest.raises(KeyboardInterrupt):
        run(Benchmark("squares", {}, tasks, COLUMNS), tmp_path)
    assert work.done == [0, 1, 2, 3, 4, 9]
    assert Results(tmp_path, "squares", {}).resumed == 5


@pytest.mark.parametrize("how", ["settings", "fresh", "build"])
def test_rows_made_otherwise_are_not_mixed_in(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(benchmark(Work(fails_at=3), limit=1), tmp_path)
    if how == "build":
        monkeypatch.setattr(results, "build_digest", lambda: "another")
    work = Work()
    run(benchmark(work, limit=2 if how == "settings" else 1), tmp_path, fresh=how == "fresh")
    assert work.done == [0, 1, 2, 3, 4]


def test_files_say_under_what_they_were_made(tmp_path: Path) -> None:
    record = run(benchmark(Work(), limit=1.5), tmp_path, quiet=True)
    assert results.read_json(tmp_path / "squares.json") == record
    assert record["settings"] == {"limit": 1.5}
    assert {"roam", "build", "python", "torch"} <= record["versions"].keys()
    assert record["machine"].keys() == {"system", "architecture", "processor", "cores"}
    lines = (tmp_path / "squares.csv").read_text().splitlines()
    comments = [line for line in lines if line.startswith("# ")]
    assert json.loads(comments[2].removeprefix("# versions: ")) == record["versions"]
    rows = list(csv.DictReader(lines[len(comments) :]))
    assert [row["square"] for row in rows] == ["0", "1", "4", "9", "16"]
    assert record["versions"]["build"] in (tmp_path / "squares.svg").read_text()
    assert record["versions"]["build"].encode() in (tmp_path / "squares.png").read_bytes()


def test_rows_name_files_of_the_package_from_the_package_on(tmp_path: Path) -> None:
    file = results.__file__
    task = Task({"number": 1}, lambda: {"reason": f"at {file}:3", "parts": [{"file": file}]})
    (row,) = Results(tmp_path, "files", {}).run([task])
    name = "roam_bench/results.py"
    assert (row["reason"], row["parts"]) == (f"at {name}:3", [{"file": name}])


def test_the_digest_of_the_build_is_also_of_the_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tmp_path / "roam_bench" / "results.py"
    ours.parent.mkdir()
    ours.write_text("1")
    monkeypatch.setattr(results, "__file__", str(ours))
    before = results.build_digest.__wrapped__()
    ours.write_text("2")
    assert results.build_digest.__wrapped__() != before


def test_the_package_has_the_version_of_roam() -> None:
    text = (Path(__file__).parents[2] / "benches" / "pyproject.toml").read_text()
    assert f'version = "{roam.__version__}"' in text
    assert f'"roam-torch[zoo]=={roam.__version__}"' in text


def test_the_same_record_draws_the_same_picture(tmp_path: Path) -> None:
    from roam_bench.run import draw

    record = run(benchmark(Work()), tmp_path, quiet=True)
    before = [(tmp_path / name).read_bytes() for name in ("squares.svg", "squares.png")]
    plot = benchmark(Work()).plot
    assert plot is not None
    assert [path.read_bytes() for path in draw(record, plot, tmp_path)] == before


def test_tables_for_documents() -> None:
    table = Table(
        "",
        [Column("name", lambda row: row["name"], right=False), COLUMNS[1]],
        [{"name": "a", "square": 1234}],
    )
    assert table.markdown() == "| name | square |\n|---|---:|\n| a | 1,234 |"


def test_tables_for_documents_across_and_without_columns() -> None:
    rows = [
        {"net": "a", "way": "eager", "s": 1},
        {"net": "a", "way": "roam", "s": 2},
        {"net": "b", "way": "roam", "s": 3},
        {"net": "b", "way": "failed", "s": 4},
    ]
    table = across(
        "Ways",
        rows,
        {"net": lambda row: row["net"]},
        lambda row: None if row["way"] == "failed" else row["way"],
        lambda row: str(row["s"]),
    )
    assert table.markdown().splitlines()[::2] == ["| net | eager | roam |", "| a | 1 | 2 |"]
    assert table.markdown().endswith("| b |  | 3 |")
    assert table.without("eager").markdown().endswith("| b | 3 |")
    with pytest.raises(ValueError, match="no column speed"):
        table.without("speed")


@pytest.mark.parametrize("text", ["no json", "[]", '{"rows": []}'])
def test_what_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "squares.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"squares\.json: not the result"):
        results.read_json(path)


@pytest.mark.parametrize("text", [b"mine\nand mine\n", b"[1]\n", b'"x"\n', b"{}\n", b"\xff\n"])
def test_rows_that_cannot_be_read_are_not_lost(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "squares.rows.jsonl"
    path.write_bytes(text)
    with pytest.raises(BenchError, match="--fresh"):
        Results(tmp_path, "squares", {})
    assert path.read_bytes() == text


def test_nothing_to_do_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="nothing to do"):
        run(Benchmark("empty", {}, [], COLUMNS), tmp_path)
