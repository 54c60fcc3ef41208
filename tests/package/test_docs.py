"""The documents: links and paths lead somewhere, tables name what exists. Their code runs in
test_documents_run.py."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import document
import pytest

import roam
from roam import cli
from roam.state.global_state import AMBIENT

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    missing = [
        link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()
    ]
    assert not missing


PLACE = re.compile(r"`([\w/.-]+\.(?:pyi?|rs|json))(?::([\w.]+))?`")
"""A file, and what it defines: `state/guards.py:Guards.failure`."""


def _file(path: str) -> Path:
    """A path without a root lies in the package, or in the planner."""
    roots = ("python/roam", "rust/roam-core/src", "")
    return next((ROOT / root / path for root in roots if (ROOT / root / path).exists()), Path(path))


def _defines(path: str, name: str) -> bool:
    text = _file(path).read_text()
    if path.endswith(".rs"):
        return re.search(rf"\b(?:fn|struct|enum|trait|type|const) {name}\b", text) is not None
    body: list[ast.stmt] = ast.parse(text).body
    for part in name.split("."):
        found = [one for one in body if part in _names(one)]
        if not found:
            return False
        body = getattr(found[-1], "body", [])
    return True


def _names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Assign):
        return [ast.unparse(target) for target in statement.targets]
    if isinstance(statement, ast.AnnAssign):
        return [ast.unparse(statement.target)]
    return [getattr(statement, "name", "")]


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/explanation/extending.md"])
def test_places_in_the_code_exist(page: str) -> None:
    found = PLACE.findall(re.sub(r"^\| `roam.*", "", (ROOT / page).read_text(), flags=re.MULTILINE))
    assert sum(bool(name) for _, name in found) > 10
    missing = [path for path, _ in found if not _file(path).exists()]
    missing += [f"{path}:{name}" for path, name in found if name and not _defines(path, name)]
    assert missing == []


def test_each_room_begins_at_a_file_of_its_own() -> None:
    rows = re.findall(
        r"^\| (`roam[^|]*) \|[^|]*\| ([^|]*) \|$",
        (ROOT / "docs/architecture.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) > 10
    for rooms, files in rows:
        folders = [
            ROOT / "python" / room.replace(".", "/") for room in re.findall(r"`([\w.]+)`", rooms)
        ]
        for name in re.findall(r"`([\w/.]+\.pyi?)`", files):
            folders_and_above = [*folders, *(folder.parent for folder in folders)]
            assert any((folder / name).exists() for folder in folders_and_above), (rooms, name)


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
