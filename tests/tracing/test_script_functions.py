"""TorchScript functions in a step: refused where they compute, harmless elsewhere."""

from __future__ import annotations

import pytest
import torch

from steps import images, refused, same_by_plan, train

functional = torch.nn.functional


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
class TestScriptFunctions:
    """TorchScript runs a function by other kernels once it has seen a few calls, so that no capture
    shows what it will run."""

    def test_that_compute(self) -> None:
        class Gated(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.gate = torch.nn.Linear(6, 6), torch.jit.script(gated)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.gate(self.linear(x))

        error = refused(lambda x, model: model(x).sum().backward(), torch.randn(4, 6), Gated())
        assert error.code == "script_function"
        assert "PYTORCH_JIT=0" in str(error)
        assert (
            torch.jit.script(gated)(torch.ones(2)).sum() > 0
        )  # outside of a capture they are as ever

    def test_on_positions(self) -> None:
        positions = torch.jit.script(shifted)

        def loss_of(model, x):
            return model(x)[:, positions(torch.arange(3), x)].square().mean()

        same_by_plan(lambda wrap: train(torch.nn.Linear(6, 6), wrap, images(), loss_of))


def gated(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * torch.tanh(x)


def shifted(positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return (positions + 1) % like.size(-1)
