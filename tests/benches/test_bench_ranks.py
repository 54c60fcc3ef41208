"""`roam bench ranks`: what one rank measures of a small network."""

from __future__ import annotations

import json
from functools import partial

import pytest

pytest.importorskip("rich")

import torch

from newer import needs_2_15
from one_rank import alone
from roam_bench import ranks
from roam_bench.compiled import image_loss

pytestmark = pytest.mark.filterwarnings("ignore")  # gloo warns of the machine's name


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=needs_2_15) if way == "fully-shard" else way for way in ranks.WAYS],
)
def test_one_network(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(name: str) -> object:
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 9))
        batch = partial(torch.randn, 4, 8), partial(torch.randint, 9, (4,))
        return model, [model[0]], lambda: tuple(make() for make in batch), image_loss

    monkeypatch.setattr(ranks, "_made", small)
    alone(monkeypatch, "ranks", "resnet18", way, "5")
    ranks.main()
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["is_equal"]
    assert row["ranks"] == 1
    # A run looks at the state of PyTorch's generator, which takes five thousand bytes.
    assert row["measured_bytes"] - row["group_bytes"] <= row["planned_bytes"] + 5100
    table = ranks.rows_table({"rows": [{"net": "resnet18", "way": way, **row}]})
    assert "equal" in table.markdown()
