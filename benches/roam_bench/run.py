"""One way to run every benchmark: a table that grows while it runs, then files and a plot."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roam_bench.results import BenchError, Record, Results, Row, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table as RichTable


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table, for terminals and documents alike."""

    title: str
    text: Callable[[Row], str]
    right: bool = True


def number(name: str, form: str, unit: float = 1) -> Callable[[Row], str]:
    """The text of a column: an entry of the row in a unit; nothing where the row has none."""
    return lambda row: "" if row.get(name) is None else form.format(row[name] / unit)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under titles."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]

    def without(self, *titles: str) -> Table:
        """The table less the columns of these titles.

        Raises:
            ValueError: there is no such column.
        """
        if unknown := set(titles) - {column.title for column in self.columns}:
            raise ValueError(f"{self.title} has no column {', '.join(sorted(unknown))}")
        kept = [column for column in self.columns if column.title not in titles]
        return replace(self, columns=kept)

    def markdown(self) -> str:
        """The table as a document has it, without its title."""
        lines = [
            "| " + " | ".join(column.title for column in self.columns) + " |",
            "|" + "|".join("---:" if column.right else "---" for column in self.columns) + "|",
        ]
        lines += [
            "| " + " | ".join(column.text(row) for column in self.columns) + " |"
            for row in self.rows
        ]
        return "\n".join(lines)

    def rich(self, last: int | None = None) -> RichTable:
        """The table as a terminal shows it; only the last rows if a number is given."""
        from rich.box import SIMPLE
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, box=SIMPLE, title_justify="left")
        for column in self.columns:
            table.add_column(column.title, justify="right" if column.right else "left")
        for row in self.rows if last is None else self.rows[-last:]:
            table.add_row(*(column.text(row) for column in self.columns))
        return table


def across(
    title: str,
    rows: Sequence[Row],
    down: Mapping[str, Callable[[Row], str]],
    to_column: Callable[[Row], str | None],
    cell: Callable[[Row], str],
) -> Table:
    """A table with a line for each of the texts by `down`, and a column for each by `to_column`;
    what has None there is left out.
    """
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        if (name := to_column(row)) is not None:
            lines.setdefault(tuple(text(row) for text in down.values()), {})[name] = cell(row)
    columns = [
        Column(one, lambda line, one=one: line[one], right=False)  # type: ignore[misc]
        for one in (*down, *dict.fromkeys(name for line in lines.values() for name in line))
    ]
    empty = dict.fromkeys((column.title for column in columns), "")
    made = [
        {**empty, **dict(zip(down, texts, strict=True)), **line} for texts, line in lines.items()
    ]
    return Table(title, columns, made)


@dataclass(frozen=True)
class Benchmark:
    """What to measure and how to show it."""

    name: str
    settings: Mapping[str, Any]
    tasks: Sequence[Task]
    columns: Sequence[Column]
    """Of the table of rows that grows while it runs."""
    summary: Callable[[Record], Iterable[Table | str]] = field(default=lambda record: ())
    """What is printed at the end, after the table of rows."""
    plot: Callable[[Record, Figure], None] | None = None
    exit_code: Callable[[Record], int] = field(default=lambda record: 0)


_FILE_WIDTH = 240
"""Columns of text where there is no terminal that says how many it has."""


def require(*modules: str) -> None:
    """Fail with a hint where a library that benchmarks need is missing.

    Raises:
        BenchError: it is.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchError(
            f"benchmarks need {', '.join(missing)}: pip install ./benches in a clone of roam's repository"
        )


def check_named(asked: Iterable[str], known: Iterable[str], option: str = "--only") -> None:
    """Fail where a name was asked for that does not exist, or whose library is not installed.

    Raises:
        BenchError: one was.
    """
    names = list(dict.fromkeys(known))
    missing = [name for name in asked if name not in names]
    if missing:
        raise BenchError(
            f"{option} {missing[0]}: it is none of {', '.join(names) or 'what is installed'}"
        )


def run(benchmark: Benchmark, folder: Path, *, fresh: bool = False, quiet: bool = False) -> Record:
    """Run a benchmark and write its files.

    Args:
        benchmark: what to measure.
        folder: where files go, and where a run that was stopped is looked for.
        fresh: forget what such a run has done.
        quiet: write nothing on standard output; progress and complaints go to standard error in any
            case.

    Raises:
        BenchError: there is nothing to do, or the folder's rows cannot be read.
    """
    if not benchmark.tasks:
        raise BenchError(
            f"{benchmark.name}: there is nothing to do; the library may be missing, or the largest size too small"
        )
    results = Results(folder, benchmark.name, benchmark.settings, fresh=fresh)
    _run_shown(benchmark, results, quiet)
    files = results.finish()
    if benchmark.plot is not None:
        files += draw(results.record, benchmark.plot, folder)
    if not quiet:
        show(benchmark, results.record, files)
    return results.record


def _run_shown(benchmark: Benchmark, results: Results, quiet: bool) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if results.resumed:
        console.print(
            f"roam: going on with a run that was stopped; {results.resumed} rows are done"
        )
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console,
    )  # fmt: skip
    bar = progress.add_task(benchmark.name, total=len(benchmark.tasks))
    rows: list[Row] = []

    def picture() -> Group:
        last = max(3, console.height - 8)
        return Group(Table("", benchmark.columns, rows).rich(last), progress)

    live = Live(
        picture(), console=console, refresh_per_second=2, transient=True, redirect_stdout=False
    )
    # Elsewhere than on a terminal, which can take lines back, each row is a line.
    shown = live if console.is_terminal else progress
    with shown:
        for task, row in zip(benchmark.tasks, results.run(benchmark.tasks), strict=True):
            rows.append(row)
            progress.update(
                bar, advance=1, description=" ".join(str(value) for value in task.key.values())
            )
            if console.is_terminal:
                live.update(picture())
            elif not quiet:
                print("  ".join(column.text(row) for column in benchmark.columns), flush=True)  # noqa: T201


def show(benchmark: Benchmark, record: Record, files: Iterable[Path]) -> None:
    """Print the table of all rows, the summary, and where the files are."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    parts = [Table(benchmark.name, benchmark.columns, record["rows"]), *benchmark.summary(record)]
    for part in parts:
        console.print(part.rich() if isinstance(part, Table) else part + "\n", highlight=False)
    console.print("written: " + ", ".join(str(path) for path in files), highlight=False)


def draw(record: Record, plot: Callable[[Record, Figure], None], folder: Path) -> list[Path]:
    """Draw a record as SVG and PNG; both say what it was made under. The same record gives the same
    files.
    """
    import json

    import matplotlib

    style = {
        "svg.hashsalt": "roam",
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(style):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        plot(record, figure)
        about = json.dumps(
            {name: record[name] for name in ("bench", "started", "versions", "machine", "settings")}
        )
        files = [folder / f"{record['bench']}.svg", folder / f"{record['bench']}.png"]
        figure.savefig(files[0], metadata={"Date": None, "Description": about})
        figure.savefig(files[1], dpi=200, metadata={"Description": about})
    return files
