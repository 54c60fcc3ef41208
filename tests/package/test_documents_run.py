"""Every code block of the documents runs, and prints what the document says it prints.

A page's blocks run one after another in one namespace and one empty folder: ``python`` blocks as
they are, the ``roam`` commands of ``console`` blocks by the command's own function. A ``text``
block right after one of them is what it prints. A block that cannot run follows ``<!-- not run:
reason -->``; what it names has to exist all the same.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import re
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt

import roam
from newer import needs_2_15
from roam import cli, layout

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
REASON = re.compile(r"<!-- not run: (.+?) -->\s*", re.DOTALL)
# Kernels' workspaces and the profiler's events are those of the PyTorch that the documents were
# written with.
PINNED_TORCH = next(
    line.partition("==")[2].split()[0]
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.startswith("torch==")
)


pytestmark = pytest.mark.auto

OF_NEWER = ("before-renting.md", "parallelize.md", "follow-one-step.md")
"""Pages that shard parameters by `fully_shard`, which is captured with PyTorch 2.15, or print what
a trace with it records."""


@dataclass(frozen=True)
class Block:
    """A fenced block: what it is written in, its text, its line in the page, why it is not run, and
    what it prints."""

    language: str
    text: str
    line: int
    reason: str | None
    output: str | None


def blocks(path: Path) -> list[Block]:
    tokens = MarkdownIt("commonmark").parse(path.read_text(encoding="utf-8"))
    found = []
    for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
        if token.type not in ("fence", "code_block"):
            continue
        reason = (
            REASON.fullmatch(before.content)
            if before is not None and before.type == "html_block"
            else None
        )
        follows = (
            after is not None
            and after.type == "fence"
            and after.info == "text"
            and token.info != "text"
        )
        found.append(
            Block(
                token.info if token.type == "fence" else "indented",
                token.content,
                token.map[0] + 1,
                " ".join(reason[1].split()) if reason else None,
                after.content if follows else None,
            )
        )
    return found


def commands(block: Block) -> list[list[str]]:
    """The commands of a ``console`` block; the lines between them are what they print."""
    return [
        shlex.split(line[2:], comments=True)
        for line in block.text.splitlines()
        if line.startswith("$ ")
    ]


def _ran(path: Path, block: Block, namespace: dict[str, Any]) -> str:
    """What a block prints."""
    printed = io.StringIO()
    levels = {one: one.level for one in map(logging.getLogger, ("roam", "roam.replans"))}
    with contextlib.redirect_stdout(printed), contextlib.ExitStack() as after:
        for logger, level in levels.items():
            after.callback(logger.setLevel, level)  # a guide turns the log on
        if block.language == "python":
            # One file for all of a page's blocks: roam reads a step's source, and errors name file
            # and line.
            before = namespace.setdefault("__source__", "")
            namespace["__source__"] = source = before + block.text
            linecache.cache["train.py"] = (
                len(source),
                None,
                source.splitlines(keepends=True),
                "train.py",
            )
            exec(compile("\n" * before.count("\n") + block.text, "train.py", "exec"), namespace)
        else:
            for command in commands(block):
                assert command[0] == "roam", (
                    f"{path.name}:{block.line}: {command[0]} needs <!-- not run: reason -->"
                )
                assert cli.main(command[1:]) == 0
    return printed.getvalue()


def _comparable(text: str) -> list[str]:
    """Lines without what differs from run to run: seconds, and with another PyTorch all figures."""
    text = re.sub(r"\d+\.\d+( ?(ms|s)\b)", r"#\1", text)
    if torch.__version__.split("+")[0] != PINNED_TORCH:
        text = re.sub(r"[\d,.]+( [KMGT]?i?B\b)?", "#", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def _pages() -> Iterator[Path]:
    for path in PAGES:
        if any(
            block.language in ("python", "console") and block.reason is None
            for block in blocks(path)
        ):
            yield path


@pytest.fixture
def one_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `torchrun` sets for one process, for pages whose blocks are run by each of several."""
    surroundings = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=needs_2_15) if path.name in OF_NEWER else path for path in _pages()],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_blocks_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if path.name == "libraries.md":  # trainers of libraries warn of what is not roam's
        for library in ("accelerate", "lightning"):
            pytest.importorskip(library)
        warnings.simplefilter("ignore")
    if path.name in ("fully-shard.md", "tensor-parallel.md"):
        request.getfixturevalue("one_of_torchrun")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROAM_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.delenv("ROAM_CACHE")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    for block in blocks(path):
        if block.language not in ("python", "console") or block.reason is not None:
            continue
        try:
            printed = _ran(path, block, namespace)
        except roam.CaptureError as error:
            if error.code != "no_device":
                raise
            pytest.skip(str(error))
        if block.output is not None:
            assert _comparable(printed) == _comparable(block.output), f"{path.name}:{block.line}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_say_what_they_are(path: Path, tmp_path: Path) -> None:
    """In a language that is run, looked at by another test, or no code; and what is not run names
    what exists."""
    for block in blocks(path):
        if block.language == "csv":
            (tmp_path / "buffers.csv").write_text(block.text)
            assert len(layout.Buffers.read_csv(tmp_path / "buffers.csv")) > 0
        assert re.fullmatch(r"python|console|json|csv|text|\{[\w-]+\}.*", block.language), block
        if block.reason is None:
            continue
        print(f"not run: {path.relative_to(ROOT)}:{block.line}: {block.reason}")
        if block.language == "python":
            compile(block.text, str(path), "exec")
        for command in commands(block) if block.language == "console" else ():
            while re.fullmatch(r"\w+=.*", command[0]):
                command = command[1:]
            match command:
                case ["roam", *arguments]:
                    cli._parser().parse_args(arguments)
                case ["make", target, *_]:
                    assert re.search(
                        rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE
                    ), command
                case ["python", script, *_] if script.endswith(".py"):
                    assert (ROOT / script).exists(), command
