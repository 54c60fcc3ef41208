"""Compiled functions in a step, with a PyTorch that does not show what it has compiled: they are
refused before Dynamo looks at the step's fake tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roam


@pytest.fixture(autouse=True)
def _unseen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (
        "torch_compat.private",
        "tracing.compiled.regions",
        "tracing.stand_ins.fake_state",
        "tracing.stand_ins.function_stand_ins",
    ):
        found = importlib.import_module(f"roam.{module}")
        monkeypatch.setattr(found, "frame_evaluation", lambda: None)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Steps:
    """A step on a layer that dropout follows, and the same step with a compiled function in it."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.compiled = torch.compile(self.plain, **options)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.net(x)).square().mean()

    def step(self, function: Any, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = function(x)
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.mark.filterwarnings("ignore")  # of PyTorch about its own code
@pytest.mark.parametrize("is_compiled_before", [False, True])
@pytest.mark.parametrize("options", [{"backend": "eager"}, {"backend": "eager", "dynamic": True}])
def test_a_refusal_leaves_the_process_as_it_was(
    options: dict[str, Any], is_compiled_before: bool
) -> None:
    my, x = Steps(**options), torch.ones(2, 4)
    if is_compiled_before:
        my.compiled(x)

    @roam.compile
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return my.step(my.compiled, x)

    with pytest.raises(roam.CaptureError, match="call the plain function") as caught:
        compiled(x)
    assert caught.value.code == "compiled_function"

    @roam.compile
    def plain(x: torch.Tensor) -> torch.Tensor:
        return my.step(my.plain, x)

    other = Steps(backend="eager")
    other.net.load_state_dict(my.net.state_dict())
    torch.manual_seed(1)
    found = [plain(x) for _ in range(3)]
    torch.manual_seed(1)
    assert torch.equal(
        torch.stack(found), torch.stack([other.step(other.plain, x) for _ in range(3)])
    )
    assert my.compiled(x).requires_grad


def test_what_is_told_not_to_be_compiled_is_part_of_the_step() -> None:
    my, x = Steps(backend="eager"), torch.ones(2, 4)

    @roam.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return my.step(my.compiled, x)

    with torch.compiler.set_stance("force_eager"):
        assert step(x).shape == ()
