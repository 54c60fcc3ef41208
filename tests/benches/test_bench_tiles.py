"""`roam bench tiles`: language models whose logits never exist whole, and the table of them."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")

from roam_bench import tiles
from roam_bench.results import BenchError, Row, row_of_process
from roam_bench.run import run


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """A Llama that trains in a moment."""
    make = tiles._of_transformers("Llama", 2048, num_key_value_heads=2)
    monkeypatch.setattr(tiles, "_TOKENS", 256)
    monkeypatch.setattr(tiles, "FAMILIES", {"Llama": make})
    monkeypatch.setattr(tiles, "WAYS", (*tiles.WAYS[:5], "roam, least"))


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_a_row_of_each_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command's rows, each made in this process, and the table of them."""

    def here(what: str, module: str, *arguments: str) -> Row:
        assert (what, module) == (", ".join(arguments), tiles.__name__)
        return tiles.measured(*arguments)

    monkeypatch.setattr(tiles, "row_of_process", here)
    asked = Namespace(only=["Llama"], dtypes=["float32"], ways=[])
    record = run(tiles.benchmark(asked), tmp_path)
    assert [row["way"] for row in record["rows"]] == list(tiles.WAYS)
    rows = {row["way"]: row for row in record["rows"]}
    assert not any(row["note"] for row in rows.values())
    for way in ("checkpoint", "roam", "roam, 50%", "roam, least"):
        assert rows[way]["digest"] == rows["eager"]["digest"]
    half = rows["roam, 50%"]
    assert half["inside_bytes"] <= half["limit_bytes"] < rows["roam"]["inside_bytes"]
    least = rows["roam, least"]
    assert least["tiles_floor_bytes"] <= least["limit_bytes"] <= least["floor_bytes"]
    assert least["tiles"]
    (table,) = tiles.benchmark(asked).summary(record)
    assert "| equal |" in table.markdown()  # type: ignore[union-attr]
    written = json.loads((tmp_path / "tiles.json").read_text())
    assert len(written["rows"]) == len(tiles.WAYS)


def test_what_cannot_be_run_is_told() -> None:
    """A family that is not known ends the command, and one that fails has the reason in its row."""
    with pytest.raises(BenchError, match="it is none of Llama, Mixtral"):
        tiles.benchmark(Namespace(only=["Lama"], dtypes=None, ways=[]))
    row = row_of_process("a row", tiles.__name__, "Lama", "float32", "eager")
    assert "Lama" in json.dumps(row)
