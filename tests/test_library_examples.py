"""The examples with trainers of libraries, and the notebook, run as they are."""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
LIBRARIES = {
    "accelerate_loop": ["accelerate"],
    "lightning_trainer": ["lightning"],
    "lora_sft": ["datasets", "peft", "trl"],
    "transformers_trainer": ["accelerate"],
}


@pytest.mark.filterwarnings("ignore")  # an import of a library may warn
@pytest.mark.parametrize("name", LIBRARIES)
def test_an_example_is_short_and_its_bits_are_eagers(name: str, tmp_path: Path) -> None:
    for library in LIBRARIES[name]:
        pytest.importorskip(library)
    script = EXAMPLES / f"{name}.py"
    lines = script.read_text().splitlines()
    assert len(lines) <= 80
    assert sum("# the only line that differs" in line for line in lines) == 1
    ran = subprocess.run(
        [sys.executable, str(script), "--steps", "4"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 losses and all parameters: equal bit for bit" in ran.stdout


def test_the_cells_of_the_notebook_run(capsys: pytest.CaptureFixture[str]) -> None:
    notebook: dict[str, Any] = json.loads((EXAMPLES / "train_by_plan.ipynb").read_text())
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            name, text = f"cell-{number}", "".join(cell["source"])
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
            exec(compile(text, name, "exec"), namespace)
    assert len(namespace["losses"]) == 5
    assert "limit" in capsys.readouterr().out
