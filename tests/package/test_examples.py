"""The short examples run as they stand: eagerly and by plan, with the same bits."""

from __future__ import annotations

import ast
import json
import linecache
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import forked
import roam

FOLDER = Path(__file__).parents[2] / "examples"
NEEDS = {"lora.py": "peft"}
LIBRARIES = {
    "accelerate_loop.py": ["accelerate"],
    "lightning_trainer.py": ["lightning"],
    "lora_sft.py": ["datasets", "peft", "trl"],
    "transformers_trainer.py": ["accelerate"],
}
"""Examples with trainers of libraries, each in a process of its own, and what they need."""
PROCESSES = {
    **dict.fromkeys(
        ("tensor_parallel.py", "fully_shard.py", "ddp.py"),
        "8 losses and all parameters: equal bit for bit",
    ),
    "parallelize.py": "8 losses: equal bit for bit, and as of one process",
}
"""Examples of two processes, and what each of them says."""
EXAMPLES = sorted(
    {path.name for path in FOLDER.glob("*.py")} - {"train_gpt2.py", *PROCESSES, *LIBRARIES}
)


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


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # an import of a library may warn
@pytest.mark.parametrize("name", LIBRARIES)
def test_an_example_of_a_library_is_short_and_its_bits_are_eagers(
    name: str, tmp_path: Path
) -> None:
    for library in LIBRARIES[name]:
        pytest.importorskip(library)
    script = FOLDER / name
    lines = script.read_text().splitlines()
    assert len(lines) <= 80
    assert sum("# the only line that differs" in line for line in lines) == 1
    ran = forked.python(str(script), "--steps", "4", folder=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 losses and all parameters: equal bit for bit" in ran.stdout


def environments(world: int, port: int) -> list[dict[str, str]]:
    """What `torchrun` sets for ranks of one machine, whose store listens at a port."""
    numbers = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    common = {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return [
        {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(world)
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROCESSES)
def test_two_processes_train_with_eagers_bits(name: str, tmp_path: Path) -> None:
    script = FOLDER / name
    assert len(script.read_text().splitlines()) <= 80
    if name == "ddp.py":  # the others do without the launcher, which takes long
        launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        ran = subprocess.run(
            [sys.executable, *launched, str(script)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        ranks = [ran]
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = forked.together(
            [[str(script)]] * 2, environments(2, store.port), folder=tmp_path, timeout_s=240
        )
    assert all(rank.returncode == 0 for rank in ranks), [
        rank.stdout + rank.stderr for rank in ranks
    ]
    printed = "".join(rank.stdout for rank in ranks)
    for rank in range(2):
        assert f"rank {rank}: {PROCESSES[name]}" in printed


def test_the_cells_of_the_notebook_run(capsys: pytest.CaptureFixture[str]) -> None:
    notebook: dict[str, Any] = json.loads((FOLDER / "train_by_plan.ipynb").read_text())
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            name, text = f"cell-{number}", "".join(cell["source"])
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
            exec(compile(text, name, "exec"), namespace)
    assert len(namespace["losses"]) == 5
    assert "limit" in capsys.readouterr().out
