"""`roam bench scripts` tells what came of a script: equal only where it is, and every other end by
its name."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from roam.runtime.beside.placeholders import is_possible
from roam_bench import scripts
from roam_bench.outcomes import EXIT_DIFFERENT
from roam_bench.run import run
from roam_bench.scripts import child, registry

pytestmark = pytest.mark.usefixtures("one_thread")


def make(change: Any = None) -> Any:
    """A script; `change` is run on the loss in the step."""

    def body(wrap: Any) -> Any:
        net = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        @wrap
        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss = loss if change is None else change(loss)
            loss.backward()
            optimizer.step()
            return loss

        return [step(torch.randn(3, 4)).item() for _ in range(3)], net, optimizer

    return body


def raising(loss: Any) -> Any:
    raise ValueError("no such data")


def deciding(loss: Any) -> Any:
    return loss * hash(loss.item())


def test_equal() -> None:
    row = child.outcome(make())
    assert (row["outcome"], row["reason"], row["plans"]) == ("equal", "", 2), row
    assert row["operators"] > 5


def test_refused_with_the_code() -> None:
    row = child.outcome(make(deciding))
    assert (row["outcome"], row["code"]) == ("refused", "value_reached_python")


@pytest.mark.auto
@pytest.mark.skipif(not is_possible(), reason="it needs PyTorch 2.15")
def test_equal_beside_no_plan_where_no_two_calls_are_alike() -> None:
    def body(wrap: Any) -> Any:
        calls: list[int] = []

        def more(loss: Any) -> Any:
            calls.append(1)
            for _ in calls:
                loss = loss * (1.5 if loss.item() else 1.0)
            return loss

        return make(more)(wrap)

    row = child.outcome(body)
    assert (row["outcome"], row["plans"]) == ("equal", 0), row
    assert "no two calls" in row["reason"]


def test_broken_where_eager_fails_too() -> None:
    row = child.outcome(make(raising))
    assert row["outcome"] == "broken"
    assert "no such data" in row["reason"]


def test_different_with_the_path() -> None:
    def body(wrap: Any) -> Any:
        loss, net, optimizer = make()(wrap)
        is_planned = hasattr(wrap(lambda: None), "plans")
        return loss, net, optimizer, torch.tensor([1.0, 2.0 + is_planned])

    row = child.outcome(body)
    assert row["outcome"] == "different"
    assert row["reason"].startswith("[0][3]")


def test_crashed_where_it_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("param_groups")

    monkeypatch.setattr(importlib.import_module("roam.runtime.compile"), "capture_step", failing)
    row = child.outcome(make())
    assert row["outcome"] == "crashed"
    assert "KeyError" in row["reason"]


def test_nothing_planned_is_not_equal() -> None:
    row = child.outcome(lambda wrap: [1.0, wrap(lambda: None) is None])
    assert row["outcome"] == "crashed"


def test_the_process_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    script = registry.Script("basics", "no_such_script", "", (), make())
    assert scripts.try_script(script, 120.0)["outcome"] == "crashed"
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(Exception, match="no result"):
        scripts.try_script(script, 120.0)
    assert scripts.try_script(script, 0.0)["outcome"] == "timed out"


def test_every_script_has_a_name_of_its_own_and_says_what_it_follows() -> None:
    found = list(registry.scripts())
    assert len(found) >= 60
    assert len({one.name for one in found}) == len(found)
    assert {one.family for one in found} == set(registry.FAMILIES)
    assert all(one.after for one in found)


def test_the_command_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = argparse.Namespace(family=[], only=["polynomial"], time_limit=240.0)
    record = run(scripts.benchmark(asked), tmp_path)
    (row,) = record["rows"]
    assert row["outcome"] == "equal", row
    assert "polynomial" in (tmp_path / "scripts.csv").read_text()
    assert "1 scripts: 1 equal" in capsys.readouterr().out
    assert scripts.benchmark(asked).exit_code({"rows": [row]}) == 0
    assert (
        scripts.benchmark(asked).exit_code({"rows": [{**row, "outcome": "different"}]})
        == EXIT_DIFFERENT
    )
