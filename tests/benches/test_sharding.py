"""`roam bench iopddl`: strategies for operators. The search itself is tested in Rust against all
choices of small problems.
"""

from __future__ import annotations

import gzip
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from roam import cli
from roam._core import ShardingProblem
from roam.errors import FormatError

FORBIDDEN = 10**18
AGREE = [0, FORBIDDEN, FORBIDDEN, FORBIDDEN, 0, FORBIDDEN, FORBIDDEN, FORBIDDEN, 0]


def layers(count: int, limit_bytes: int) -> dict[str, Any]:
    """Two operators a layer that have to be split alike; how costs more the more is saved."""
    nodes = 2 * count
    return {
        "name": "layers",
        "nodes": {
            "intervals": [[number, nodes] for number in range(nodes)],
            "costs": [[0, 4, 9] if number % 2 else [1, 2, 3] for number in range(nodes)],
            "usages": [[8, 4, 2] for _ in range(nodes)],
        },
        "edges": {
            "nodes": [[number, number + 1] for number in range(nodes - 1)],
            "costs": [
                AGREE if number % 2 == 0 else [0, 1, 1, 1, 0, 1, 1, 1, 0]
                for number in range(nodes - 1)
            ],
        },
        "usage_limit": limit_bytes,
    }


def written(path: Path, problem: dict[str, Any]) -> Path:
    path.write_bytes(gzip.compress(json.dumps({"problem": problem}).encode()))
    return path


def least(problem: ShardingProblem) -> int:
    found = [problem.evaluate(choice) for choice in product(range(3), repeat=problem.nodes)]
    limit = problem.limit_bytes
    assert limit is not None
    return min(cost for cost, taken in found if cost is not None and taken <= limit)


@pytest.mark.parametrize("limit_bytes", [16, 30, 40, 64])
def test_a_choice_is_the_cheapest_within_the_limit(tmp_path: Path, limit_bytes: int) -> None:
    problem = ShardingProblem.read(written(tmp_path / "layers.json.gz", layers(4, limit_bytes)))
    found = problem.solve(work=2_000_000)
    assert (problem.nodes, problem.edges) == (8, 7)
    assert found.nodes <= 4
    assert found.choice is not None
    assert found.bound == found.cost == problem.evaluate(found.choice)[0] == least(problem)


def test_what_is_impossible_is_proved(tmp_path: Path) -> None:
    problem = ShardingProblem.read(written(tmp_path / "layers.json", layers(4, 15)))
    found = problem.solve(work=2_000_000)
    assert (found.choice, found.cost, found.bound) == (None, None, None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "layers.json.gz", layers(4, 40))
    output = ["--work", "1000000", "--output", str(tmp_path / "out"), "--json"]
    assert cli.main(["bench", "iopddl", str(path), *output]) == cli.EXIT_OK
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["cost"] == least(ShardingProblem.read(path))
    assert row["peak_bytes"] <= row["limit_bytes"] == 40
    assert (row["best"], row["above"]) == (None, None)


@pytest.mark.parametrize("text", [b"", b"{}", b'{"problem": {"nodes": 3}}', b"\x1f\x8bnot gzip"])
def test_another_file_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(text)
    with pytest.raises((FormatError, OSError)):
        ShardingProblem.read(path)
    assert cli.main(["bench", "iopddl", str(path), "--output", str(tmp_path)]) != cli.EXIT_OK


def test_a_choice_of_another_length_is_refused(tmp_path: Path) -> None:
    problem = ShardingProblem.read(written(tmp_path / "layers.json.gz", layers(1, 40)))
    for choice in ([0], [0, 3], [0, 0, 0]):
        with pytest.raises(ValueError, match="one strategy for each node"):
            problem.evaluate(choice)
