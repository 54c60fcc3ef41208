"""`roam bench shapes`: every length is captured once, and what it reports is of that."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")

from roam.cli import main
from roam_bench import shapes


def test_every_length_comes_and_the_order_stays_the_same() -> None:
    order = shapes._order(24, 200)
    assert len(order) == 200
    assert sorted(set(order)) == list(range(16, 16 + 4 * 24, 4))
    assert order == shapes._order(24, 200)


def test_one_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["shapes", "1", "3", "8"])
    shapes.main()
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["captures"] == 3
    assert row["is_equal"]
    stages = [row[f"later_{stage}_cpu_s"] for stage in ("capture", "kernels", "plan", "first_run")]
    assert all(seconds >= 0 for seconds in stages)
    assert 0 < row["later_capture_cpu_s"] < row["first_capture_cpu_s"]
    record = {"rows": [{"layers": 1, **row}]}
    assert "3 of 3 lengths" in shapes.rows_table(record).markdown()  # type: ignore[arg-type]


def test_steps_have_to_be_more_than_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["bench", "shapes", "--lengths", "4", "--steps", "4", "--output", str(tmp_path)]) != 0
    )
    assert "--steps 4" in capsys.readouterr().err
