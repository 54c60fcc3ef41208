"""`roam bench pages`: networks within half of what persists, and the table of them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")

from roam_bench import pages


def test_a_row_and_its_table() -> None:
    row = {"net": "lora", **pages.measured("lora")}
    assert row["bits"] == "equal"
    assert row["total_bytes"] <= row["limit_bytes"] <= row["persistent_bytes"] / 2
    assert row["least_moved_bytes"] <= row["moved_bytes"] <= 1.2 * row["least_moved_bytes"]
    table = pages.rows_table({"rows": [row]})
    assert table.columns[0].text(table.rows[0]) == "lora"
    assert all(isinstance(column.text(row), str) for column in table.columns)


@pytest.mark.parametrize("name", pages.NETS)
def test_each_network_takes_words(name: str) -> None:
    import torch

    step, _, _ = pages._made(name)
    assert torch.isfinite(step(torch.full((1, 8), 5)))
