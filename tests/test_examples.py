"""The short examples run as they stand: eagerly and by plan, with the same bits."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

import roam

FOLDER = Path(__file__).parent.parent / "examples"
NEEDS = {"lora.py": "peft"}
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "train_gpt2.py")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers, when peft calls it
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_by_plan_with_eagers_bits(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    steps: list[roam.Step] = []
    compiled = roam.compile

    def noted(*args: Any, **options: Any) -> Any:
        steps.append(compiled(*args, **options))
        return steps[-1]

    monkeypatch.setattr(roam, "compile", noted)
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    shown = [line for line in capsys.readouterr().out.splitlines() if "." in line]
    eager, planned = (
        [word for word in line.split() if word.replace(".", "").isdigit()] for line in shown[-2:]
    )
    assert eager == planned
    assert len(eager) >= 5
    assert steps
    for step in steps:
        assert step.memory().total_bytes > 0, "the last call ran by a plan"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_roam_changes_few_lines_of_it(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert len(text.splitlines()) <= 80
    lines = {
        node.lineno
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Import) and node.names[0].name == "roam")
        or (isinstance(node, ast.Name) and node.id == "roam")
    }
    assert 2 <= len(lines) <= 3
