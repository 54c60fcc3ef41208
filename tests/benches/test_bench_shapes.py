"""`roam bench shapes`: one plan for many sizes beside eager PyTorch, and the table of both."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torchvision")
pytest.importorskip("rich")

from roam_bench import shapes, shapes_zoo
from roam_bench.architectures import architectures


@pytest.mark.parametrize("name", shapes.FAMILIES)
def test_batches_differ_in_size_and_stay_the_same(name: str) -> None:
    _, batch_of = shapes.FAMILIES[name]
    seen = [{key: value.shape for key, value in batch_of(place, 1).items()} for place in range(4)]
    assert len({str(one) for one in seen}) > 1
    for place in range(4):
        assert all(
            value.equal(batch_of(place, 1)[key]) for key, value in batch_of(place, 1).items()
        )
    padded = [size for value in batch_of(0, 32).values() for size in value.shape]
    assert any(size % 32 == 0 for size in padded)


def test_a_row_of_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_WIDTH", 16)
    monkeypatch.setattr(shapes, "_LAYERS", 1)
    rows = []
    for way in ("eager", "roam", "roam, padded to 64"):
        made = shapes.measured("GPT-2", way, 4)
        rows.append({"family": "GPT-2", "way": way, **made})
    eager, planned, padded = rows
    assert eager["captures"] is None
    assert planned["captures"] == 2
    assert planned["digest"] == eager["digest"] != padded["digest"]
    text = shapes.rows_table({"rows": rows}).markdown()
    assert "equal" in text
    assert "different" not in text


def test_architectures_take_other_sizes() -> None:
    known: dict[str, Any] = {one.name: one for one in architectures()}
    assert list(shapes_zoo._changes(known["resnet18"])) == ["batch", "image"]
    row = shapes_zoo._try(known["Bert"], "length")
    assert row == {"outcome": "one plan", "captures": 2, "reason": ""}
