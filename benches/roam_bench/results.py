"""Results of benchmarks as files. Each row is saved as soon as it is made, so that a run that was
stopped continues there. At the end there are one CSV and one JSON file, with versions, machine and
settings.

A record, which is what the JSON file holds, has the keys ``bench``, ``started`` (UTC, ISO 8601),
``versions``, ``machine``, ``settings`` and ``rows``; a row has the fields of its :class:`Task` key,
what the task returned, ``wall_s`` and ``load``.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import roam
from roam.arguments import UsageError
from roam.interrupts import interrupts_count
from roam.processor import processor_name

Row = dict[str, Any]
Record = dict[str, Any]

_PLACE = str(Path(__file__).parents[1]) + os.sep
_HEAD = {"bench", "started", "versions", "machine", "settings"}
_LIBRARIES = (
    "torch",
    "torchvision",
    "transformers",
    "timm",
    "diffusers",
    "mip",
    "highspy",
    "numpy",
)


class BenchError(UsageError, ValueError):
    """A benchmark that cannot be run as asked, or a file that is no result of one."""


@dataclass(frozen=True, slots=True)
class Task:
    """What makes one row."""

    key: Mapping[str, str | int]
    """Tells the row from all others of the benchmark."""
    work: Callable[[], Mapping[str, Any]]
    """Makes the rest of the row: values that JSON has."""


@functools.cache
def build_digest() -> str:
    """SHA-256 over roam and this package, by which results of one build are told from those of
    another.
    """
    digest = hashlib.sha256()
    for folder in (Path(roam.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".so", ".pyd", ".json", ".csv"):
                digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """What the results depend on, as far as it is installed."""
    found = {"roam": roam.__version__, "build": build_digest(), "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """What seconds depend on; nothing by which the machine could be found."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": processor_name(),
        "cores": usable,
    }


def load_average() -> float | None:
    """How many processes of the whole machine ran or waited to, on average over the last minute;
    ``None`` where the system does not say.
    """
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def row_of_process(what: str, module: str, *arguments: object, **environment: str) -> Row:
    """The row that a module prints as the last line of its output, a JSON object, when it runs as a
    program in a process of its own.

    Args:
        what: the row's name, for the error.
        module: its name.
        arguments: of the program.
        environment: variables that differ from this process's.

    Raises:
        BenchError: the process failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BenchError(f"{what}: {last}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def row_of_failure(error: Exception) -> Row:
    """The row of a way that failed: the first line of its error, shortened, as its note."""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return {"note": f"{type(error).__name__}: {first}"[:160]}


def bytes_of(tensor: Any) -> bytes:
    """The elements of a tensor on the CPU, byte for byte."""
    import torch

    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def _placeless(value: Any) -> Any:
    """A row in which files of this package are named from the package on, the same on every
    machine. Roam's errors name a user's file in full, and a benchmark's step is a user's.
    """
    if isinstance(value, str):
        return value.replace(_PLACE, "")
    if isinstance(value, Mapping):
        return {name: _placeless(one) for name, one in value.items()}
    return [_placeless(one) for one in value] if isinstance(value, (list, tuple)) else value


class Results:
    """The record of one benchmark in a folder, begun or gone on with.

    Args:
        folder: where the files go; made if missing.
        bench: the benchmark's name, which the files have too.
        settings: what was asked for. Rows of a run of the same settings, versions and machine are
            kept.
        fresh: forget rows that are there.
    """

    def __init__(
        self, folder: Path, bench: str, settings: Mapping[str, Any], *, fresh: bool = False
    ) -> None:
        self._folder = folder
        self._rows_path = folder / f"{bench}.rows.jsonl"
        started = datetime.now(timezone.utc).replace(microsecond=0).isoformat()
        self.record: Record = {
            "bench": bench,
            "started": started,
            "versions": versions(),
            "machine": machine(),
            "settings": dict(settings),
            "rows": [],
        }
        folder.mkdir(parents=True, exist_ok=True)
        before = None if fresh else _read_rows(self._rows_path)
        if before is not None and all(
            before[name] == self.record[name] for name in ("versions", "machine", "settings")
        ):
            self.record = before
        self._rewrite()
        self.resumed = len(self.rows)
        """How many rows there were already."""

    @property
    def rows(self) -> list[Row]:
        """Those so far, in the sequence in which they were made."""
        rows: list[Row] = self.record["rows"]
        return rows

    def run(self, tasks: Sequence[Task]) -> Iterator[Row]:
        """Do what is not done yet, and keep each row before the next is begun. Gives every task's
        row, old or new.
        """
        for task in tasks:
            row = self.find(task.key)
            if row is None:
                load, start = load_average(), time.perf_counter()
                with interrupts_count():
                    row = {**task.key, **_placeless(task.work())}
                row |= {"wall_s": time.perf_counter() - start, "load": load}
                self._keep(row)
            yield row

    def find(self, key: Mapping[str, Any]) -> Row | None:
        """The row of that key, if there is one."""
        return next(
            (
                row
                for row in self.rows
                if all(row.get(name) == value for name, value in key.items())
            ),
            None,
        )

    def finish(self) -> list[Path]:
        """Write the CSV and the JSON file; what kept the rows meanwhile goes."""
        name = self.record["bench"]
        files = [self._folder / f"{name}.csv", self._folder / f"{name}.json"]
        write_csv(self.record, files[0])
        write_json(self.record, files[1])
        self._rows_path.unlink(missing_ok=True)
        return files

    def _keep(self, row: Row) -> None:
        line = json.dumps(row, allow_nan=False)
        with self._rows_path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.rows.append(row)

    def _rewrite(self) -> None:
        """The head and all rows, so that half a line that an end in the middle of writing left is
        gone.
        """
        head = {name: value for name, value in self.record.items() if name != "rows"}
        lines = [json.dumps(line, allow_nan=False) + "\n" for line in (head, *self.rows)]
        # What was kept must not be lost half-way.
        anew = self._rows_path.with_suffix(".new")
        anew.write_text("".join(lines), encoding="utf-8")
        anew.replace(self._rows_path)


def _read_rows(path: Path) -> Record | None:
    """A record that was begun; ``None`` where there is none. A last line that was not finished does
    not count.
    """
    try:
        head, *lines = path.read_text(encoding="utf-8").split("\n")[:-1] or [""]
        record, rows = json.loads(head), [json.loads(line) for line in lines]
    except FileNotFoundError:
        return None
    except ValueError:
        record, rows = None, []
    if not (
        isinstance(record, dict)
        and record.keys() >= _HEAD
        and all(isinstance(row, dict) for row in rows)
    ):
        raise BenchError(f"{path}: this file has no rows of a benchmark; --fresh starts without it")
    return {**record, "rows": rows}


def write_json(record: Record, path: Path) -> None:
    """Write a record: a line each for what it was made under and for each row, so that changes can
    be read.
    """
    head = {name: value for name, value in record.items() if name != "rows"}
    fields = [
        f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)},\n"
        for name, value in head.items()
    ]
    rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in record["rows"])
    path.write_text("{\n" + "".join(fields) + ' "rows": [\n' + rows + "\n ]\n}\n", encoding="utf-8")


def read_json(path: Path) -> Record:
    """Read what :func:`write_json` wrote.

    Raises:
        BenchError: the file is no record.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError(f"{path}: not the result of a benchmark ({error})") from None
    if not isinstance(record, dict) or not _HEAD | {"rows"} <= record.keys():
        raise BenchError(f"{path}: not the result of a benchmark")
    return record


def write_csv(record: Record, path: Path) -> None:
    """Write a record's rows; what they were made under is in comments above them."""
    names = list(dict.fromkeys(name for row in record["rows"] for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        for name in ("bench", "started", "versions", "machine", "settings"):
            file.write(f"# {name}: {json.dumps(record.get(name))}\n")
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(record["rows"])
