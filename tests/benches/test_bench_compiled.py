"""`roam bench compiled`: what it measures of one small network."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest

pytest.importorskip("rich")

import torch

from roam_bench import compiled

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's compilers warn of what they do


@pytest.mark.long
def test_one_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def small() -> object:
        block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        model = torch.nn.Sequential(block, torch.nn.Linear(8, 100))
        batch = partial(torch.randn, 4, 8), partial(torch.randint, 100, (4,))
        return model, [block], lambda: tuple(make() for make in batch), compiled.image_loss

    monkeypatch.setitem(compiled._MAKES, "vit", small)
    row: dict[str, object] = {"net": "vit"}
    for what in ("loop", "plan", "both", "half"):
        monkeypatch.setattr(sys, "argv", ["compiled", "vit", "2", what])
        compiled.main()
        row |= json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["is_equal"]
    assert row["blocks"] == 1
    assert row["measured_bytes"] == pytest.approx(row["planned_bytes"], rel=0.01)
    assert "equal" in compiled.rows_table({"rows": [row]}).markdown()
    assert row["half"] in ("equal", "refuted")
    assert row["limit_bytes"] < row["plain_bytes"]  # type: ignore[operator]
    assert "budget" in compiled.half_table({"rows": [row]}).markdown()
