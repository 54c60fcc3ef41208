"""Autograd functions and parametrizations of a user's own train bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations

from steps import Block, images, same_by_plan, train

functional = torch.nn.functional


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.clamp(min=0) * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0] > 0) * ctx.scale, None


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Symmetric(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


PARAMETRIZATIONS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "cayley": functools.partial(parametrizations.orthogonal, orthogonal_map="cayley"),
    "householder": functools.partial(parametrizations.orthogonal, orthogonal_map="householder"),
    "hooked_spectral_norm": torch.nn.utils.spectral_norm,
    "own": lambda module: torch.nn.utils.parametrize.register_parametrization(
        module, "weight", Symmetric()
    ),
}


class TestFunctionsOfTheUsersOwn:
    @pytest.mark.parametrize("in_place", [True, False])
    def test_with_a_gradient(self, in_place: bool) -> None:
        def loss_of(model, x):
            result = model(x)
            return (
                (DoubledInPlace.apply(result * 1) if in_place else Clipped.apply(result, 3.0))
                .square()
                .mean()
            )

        same_by_plan(lambda wrap: train(Block(), wrap, images(), loss_of))

    @pytest.mark.parametrize("name", PARAMETRIZATIONS)
    def test_that_parametrize_a_weight(self, name: str) -> None:
        def script(wrap):
            model = Block()
            PARAMETRIZATIONS[name](model.first)
            return train(model, wrap, images())

        same_by_plan(script)

    def test_that_parametrize_a_weight_once_for_many_uses(self) -> None:
        def loss_of(model, x):
            with torch.nn.utils.parametrize.cached():
                return (model(x) + model(x * 2)).square().mean()

        def script(wrap):
            model = Block()
            parametrizations.weight_norm(model.first)
            return train(model, wrap, images(), loss_of)

        same_by_plan(script)
