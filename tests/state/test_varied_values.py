"""Plain values among the arguments that differ from call to call, such as names of files: a plan
alone has one for each, and Python runs beside one plan for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from newer import needs_2_15
from training import assert_same_bits, tensors_and_numbers

Factor = Callable[[dict[str, Any], torch.nn.Module], Any]


def batches(names: str = "abcdefgh") -> list[Any]:
    return [
        {
            "x": torch.full((6,), ord(name) / 100),
            "names": [f"{name}{row}.png" for row in range(3)],
            "info": {"key": name.encode(), "rate": ord(name) / 200},
        }
        for name in names
    ]


def run(wrap: Callable[..., Any], factor: Factor, given: list[Any]) -> tuple[Any, Any]:
    """A step, and what its calls leave."""
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    @wrap
    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        found = factor(batch, net)
        loss = net(batch["x"]).square().sum() * (found if isinstance(found, int) else 1)
        loss.backward()
        optimizer.step()
        return loss.detach(), found

    results = [step(batch) for batch in given]
    kept = getattr(net, "last", None)
    return step, tensors_and_numbers((results, kept, net.state_dict(), optimizer.state_dict()))


def keeps(batch: Any, net: Any) -> None:
    net.last = batch["names"][0]


USES: dict[str, Factor] = {
    "unread": lambda batch, net: 1,
    "read": lambda batch, net: len(batch["names"][0]) + int(batch["names"][0] > "d0"),
    "key": lambda batch, net: len(batch["info"]["key"].decode()),
    "rate of dropout": lambda batch, net: torch.nn.functional.dropout(
        batch["x"], batch["info"]["rate"]
    ),
    "returned": lambda batch, net: batch["names"][0],
    "kept": keeps,
}


@needs_2_15
@pytest.mark.parametrize("options", [{}, {"memory": "100%"}], ids=str)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_third_value_runs_beside_a_plan(use: Factor, options: dict[str, Any]) -> None:
    _, expected = run(lambda step: step, use, batches())
    step, left = run(lambda step: roam.compile(step, python="auto", **options), use, batches())
    assert_same_bits(left, expected)
    assert step._beside is not None
    assert step._beside._why.code == "varied_argument"
    assert len(step._captures) == 2


@pytest.mark.parametrize("python", ["auto", "idle"])
def test_values_that_come_again_have_their_plans(python: Any) -> None:
    _, expected = run(lambda step: step, USES["read"], batches("abbabab"))
    step, left = run(
        lambda step: roam.compile(step, python=python), USES["read"], batches("abbabab")
    )
    assert_same_bits(left, expected)
    assert step._beside is None
    assert len(step._captures) == 2


def test_an_idle_step_has_a_plan_for_each() -> None:
    step, left = run(
        lambda step: roam.compile(step, python="idle"), USES["returned"], batches("abcd")
    )
    assert_same_bits(left, run(lambda step: step, USES["returned"], batches("abcd"))[1])
    assert len(step._captures) == 4
