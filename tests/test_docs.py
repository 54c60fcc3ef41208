"""The documents: links and paths lead somewhere, tables name what exists. Their code runs in
test_documents_run.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import document
import pytest

import roam
from roam import cli
from roam.state.global_state import AMBIENT

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    missing = [
        link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()
    ]
    assert not missing


def test_the_architecture_table_names_what_exists() -> None:
    rows = [
        line.split("|")
        for line in (ROOT / "docs/architecture.md").read_text().splitlines()
        if line.count("|") == 5
    ]
    assert len(rows) > 10
    missing = []
    for _, _, _, modules, tests, _ in rows[2:]:
        for cell in (modules, tests):
            folder = Path()
            for name in re.findall(r"`([\w/.-]+(?:/|\.rs|\.pyi?))`", cell):
                # A bare name stands beside the one before it.
                path = Path(name) if "/" in name.rstrip("/") else folder / name
                folder = path if name.endswith("/") else path.parent
                if not (ROOT / path).exists():
                    missing.append(str(path))
    assert not missing


@pytest.mark.parametrize("path", document.documents(), ids=lambda path: path.name)
def test_tables_are_those_of_the_committed_results(path: Path) -> None:
    text = path.read_text()
    assert text == document.rendered(text), "python benches/document.py writes them"


def test_every_key_and_option_is_documented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs/reference/cli.md").read_text()
    path = str(tmp_path / "graph.json")
    roam.GraphBuilder().build().save(path)
    assert cli.main(["plan", path, "--json"]) == 0
    keys = json.loads(capsys.readouterr().out).keys()
    assert [key for key in keys if f"`{key}`" not in text] == []
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert len(options) > 8
    assert [option for option in sorted(options) if f"`{option}" not in text] == []


def test_everything_around_a_step_that_is_compared_is_documented() -> None:
    text = (ROOT / "docs/explanation/guards.md").read_text()
    assert [name for name, _ in AMBIENT if name not in text] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_the_text_exist(document: Path) -> None:
    """Of sources, tests and benchmarks; the changelog speaks of former ones."""
    if document.name == "CHANGELOG.md":
        return
    named = re.findall(
        r"(?<![\w/])(?:python/roam|rust/roam-\w+|tests|benches|examples)/[\w./-]*\w",
        document.read_text(),
    )
    assert [path for path in sorted(set(named)) if not (ROOT / path).exists()] == []
