"""Files that a step opens: refused, since a plan's run would neither read nor write them."""

from __future__ import annotations

import codecs
import configparser
import glob
import gzip
import linecache
import lzma
import os
import shutil
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import roam

READERS: dict[str, Callable[[Path], Any]] = {
    "open": lambda path: open(path).read(),
    "pathlib": lambda path: path.read_text(),
    "numpy": lambda path: np.load(path, allow_pickle=True),
    "torch": lambda path: torch.load(path),
    "gzip": lambda path: gzip.open(path).read(),
    "lzma": lambda path: lzma.open(path).read(),
    "zipfile": lambda path: zipfile.ZipFile(path).namelist(),
    "codecs": lambda path: codecs.open(path).read(),
    "configparser": lambda path: configparser.ConfigParser().read(path),
}
WRITERS: dict[str, Callable[[Path], Any]] = {
    "open": lambda path: open(path, "a").write("x"),
    "pathlib": lambda path: path.write_text("x"),
    "numpy": lambda path: np.savetxt(path, np.ones(2)),
    "shutil": lambda path: shutil.copyfile(path, path.with_name("copy")),
}
CASES = [*READERS.values(), *WRITERS.values()]


@pytest.mark.parametrize("use", CASES, ids=[*READERS, *(f"{name} to write" for name in WRITERS)])
def test_a_step_that_opens_a_file_is_refused(use: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "file"
    weight = torch.nn.Parameter(torch.ones(2))

    def step() -> torch.Tensor:
        weight.square().sum().backward()
        use(path)
        return weight.grad + 0

    with pytest.raises(
        roam.CaptureError, match=r"(opens|asks the file system for) '.*file'.*argument"
    ) as caught:
        roam.compile(step)()
    assert caught.value.code == "file"
    assert caught.value.source.startswith(__file__)
    assert weight.grad is None
    assert not path.exists()


ASKING: dict[str, Callable[[Path], Any]] = {
    "exists": lambda path: os.path.exists(path),
    "lexists": lambda path: os.path.lexists(path),
    "isfile": lambda path: os.path.isfile(path),
    "getmtime": lambda path: os.path.exists(path) and os.path.getmtime(path),
    "access": lambda path: os.access(path, os.R_OK),
    "listdir": lambda path: os.listdir(path.parent),
    "scandir": lambda path: list(os.scandir(path.parent)),
    "walk": lambda path: list(os.walk(path.parent)),
    "glob": lambda path: glob.glob(f"{path}*"),
    "Path.exists": lambda path: path.exists(),
    "Path.is_dir": lambda path: path.is_dir(),
    "Path.glob": lambda path: list(path.parent.glob("*")),
    "Path.iterdir": lambda path: list(path.parent.iterdir()),
}
CHANGING: dict[str, Callable[[Path], Any]] = {
    "makedirs": lambda path: os.makedirs(path, exist_ok=True),
    "remove": lambda path: os.remove(path.parent / "kept"),
    "replace": lambda path: os.replace(path.parent / "kept", path),
    "Path.mkdir": lambda path: path.mkdir(),
    "Path.touch": lambda path: path.touch(),
    "Path.unlink": lambda path: (path.parent / "kept").unlink(),
    "rmtree": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("use", [*ASKING.values(), *CHANGING.values()], ids=[*ASKING, *CHANGING])
def test_a_step_that_asks_the_file_system_or_changes_it_is_refused(
    use: Callable[[Path], Any], tmp_path: Path
) -> None:
    (tmp_path / "kept").write_text("")

    def step() -> torch.Tensor:
        return torch.ones(2) * (2 if use(tmp_path / "file") else 1)

    with pytest.raises(roam.CaptureError, match=r"pass what the step has to know") as caught:
        roam.compile(step)()
    assert caught.value.code == "file"
    assert caught.value.source.startswith(__file__)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_libraries_may_ask_the_file_system() -> None:
    @roam.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        linecache.checkcache(__file__)
        return x * 2

    for _ in range(2):
        assert step(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_file_in_a_branch_is_refused_when_the_branch_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "spikes"

    @roam.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 3.0:
            path.write_text("a spike")
        return x * 2

    for _ in range(3):
        step(torch.ones(2))
    with pytest.raises(roam.CaptureError) as caught:
        step(torch.full((2,), 9.0))
    assert caught.value.code == "file"


def test_other_threads_open_files_while_a_step_is_captured(tmp_path: Path) -> None:
    """As those of loaders do."""
    path = tmp_path / "data"
    path.write_text("text")
    begun, ended, captured = threading.Event(), threading.Event(), threading.Event()
    read: list[str] = []

    def load() -> None:
        while not captured.is_set():  # a capture runs the step again, with both events as before
            if begun.is_set() and not ended.is_set():
                read.append(path.read_text())
                ended.set()
            captured.wait(0.001)

    thread = threading.Thread(target=load)
    thread.start()

    @roam.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        ended.wait(30)
        return x * 2

    try:
        step(torch.ones(2))
    finally:
        captured.set()
        thread.join()
    assert set(read) == {"text"}


def test_a_module_that_the_step_imports_may_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "VERSION").write_text("2")
    (tmp_path / "reads_its_version.py").write_text(
        "from pathlib import Path\nFACTOR = int((Path(__file__).parent / 'VERSION').read_text())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    @roam.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        import reads_its_version  # type: ignore[import-not-found]

        return x * reads_its_version.FACTOR

    for _ in range(2):
        assert step(torch.ones(2)).tolist() == [2.0, 2.0]
