"""`roam bench families`: models taken by a rule, their first and later steps, and what could not be
planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("timm")
pytest.importorskip("transformers")

import timm
import torch

from roam.cli import main
from roam_bench import families
from roam_bench.results import read_json

pytestmark = pytest.mark.filterwarnings("ignore")


def test_one_model_of_every_timm_module_and_many_of_transformers() -> None:
    offered = list(families.families())
    names = [name for _, name, _ in offered]
    assert len(set(names)) == len(names)
    assert sum(library == "timm" for library, _, _ in offered) == len(timm.list_modules())
    assert sum(library == "transformers" for library, _, _ in offered) >= 30


def test_steps_of_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "families", "--only", "vgg11", "--output", str(tmp_path)]) == 0
    capsys.readouterr()
    record = read_json(tmp_path / "families.json")
    first, steady = record["rows"]
    assert (first["step"], steady["step"]) == ("first", "steady")
    assert first["operators"] > steady["operators"], "the first step makes the optimizer's state"
    for row in record["rows"]:
        assert row["outcome"] == "planned"
        assert 0 < row["bound_bytes"] <= row["total_bytes"]
        # The gap is a share of what lives in the step alone, the total has parameters and state
        # besides.
        assert row["gap"] >= row["total_bytes"] / row["bound_bytes"] - 1
    table = families.steps_table(record).markdown()
    assert "| first | 1 |" in table
    assert "| steady | 1 |" in table


def test_what_cannot_be_planned_is_a_row() -> None:
    def refused() -> tuple[torch.nn.Module, dict[str, Any]]:
        class Chooses(torch.nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return sum(super(Chooses, self).forward(x) for _ in range(int(self.weight.sum())))

        return Chooses(2, 2), {"x": torch.randn(2, 2)}

    def failed() -> tuple[torch.nn.Module, dict[str, Any]]:
        raise KeyError("image_size")

    rows = [families.measure(make, "steady") for make in (refused, failed)]
    assert [row["outcome"] for row in rows] == ["refused", "failed"]
    assert rows[0]["reason"].startswith("CaptureError: ")
    assert rows[1]["reason"] == "KeyError: 'image_size'"
    listed = [{"library": "timm", "model": "a", "step": "steady", **row} for row in rows]
    record: Any = {
        "rows": [
            *listed,
            {
                **listed[0],
                "outcome": "planned",
                "operators": 9,
                "total_bytes": 103,
                "bound_bytes": 100,
                "gap": 0.03,
                "plan_s": 0.1,
                "program_order_bytes": 206,
            },
        ]
    }
    assert "| timm | 3 | 1 | 1 | 1 |" in families.libraries_table(record).markdown()
    assert (
        families.gaps_table(record)
        .markdown()
        .endswith("| timm | a | steady | 9 | 103 B | 50.0% | 3.00% | 0.10 |")
    )
