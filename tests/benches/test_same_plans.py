"""benches/same_plans.py tells a changed plan from an unchanged one, and not by where roam's own
lines stand."""

from __future__ import annotations

from pathlib import Path

import pytest
import same_plans

import roam


def step(line: int, size_bytes: int = 64, file: str = "roam/zoo/models.py") -> roam.Graph:
    builder = roam.GraphBuilder(name="step", alignment_bytes=1)
    entered = builder.tensor("x", 64, kind="input", residency="enters")
    made = builder.tensor("y", size_bytes)
    builder.operator("first", reads=[entered], creates=[made], file=file, line=line)
    builder.operator(
        "second", reads=[made], creates=[builder.tensor("z", 64)], file=file, line=line + 1
    )
    return builder.build()


@pytest.mark.parametrize(
    "file", ["roam/zoo/models.py", "roam_bench/suite.py", "/a/clone/benches/roam_bench/suite.py"]
)
def test_only_the_users_lines_count_in_a_graph(file: str) -> None:
    assert same_plans.graph_digest(step(1)) == same_plans.graph_digest(step(7, file=file))
    assert same_plans.graph_digest(step(1, file="mine.py")) != same_plans.graph_digest(
        step(7, file="mine.py")
    )


def test_a_plan_is_the_same_whatever_its_graph_is_called() -> None:
    one, moved, larger = step(1), step(7), step(1, size_bytes=128)
    assert one.digest != moved.digest
    plans = [same_plans.plan_digest(roam.optimize(graph)) for graph in (one, moved, larger)]
    assert plans[0] == plans[1] != plans[2]


def test_what_differs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_plans, "HERE", tmp_path / "benches")
    (tmp_path / "benches").mkdir()
    step(1).save(tmp_path / "benches" / "one.json.gz")
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert same_plans.main(["record", str(before)]) == 0
    step(1, size_bytes=128).save(tmp_path / "benches" / "one.json.gz")
    step(1).save(tmp_path / "benches" / "two.json.gz")
    assert same_plans.main(["record", str(after)]) == 0
    capsys.readouterr()
    assert same_plans.main(["compare", str(before), str(before)]) == 0
    assert capsys.readouterr().out == f"{1 + len(same_plans.SETTINGS)} the same, 0 not\n"
    assert same_plans.main(["compare", str(before), str(after)]) == 1
    printed = capsys.readouterr().out
    assert "graphs: one.json.gz: differs\n" in printed
    assert "plans: one.json.gz, no reuse: differs\n" in printed
    assert "plans: two.json.gz, reuse: only after\n" in printed


def test_a_kept_graph_is_not_captured_again(tmp_path: Path) -> None:
    graph = step(1)
    assert same_plans.kept(tmp_path, "suite/one", lambda: graph) == graph
    assert same_plans.kept(tmp_path, "suite/one", lambda: pytest.fail("captured again")) == graph
