"""Gradients that plans free and eager PyTorch keeps: no later step silently does without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import roam
from training import assert_same_bits, tensors_and_numbers

functional = torch.nn.functional
Script = Callable[[Callable[..., Any]], Iterator[Any]]


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w + self.b).square().mean()

    def by_hand(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        """Sets the gradients of the parameters with these names."""
        loss = self(x)
        parameters = [getattr(self, name) for name in names]
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter.grad = gradient
        return loss.detach()


def left(model: Pair, *others: Any) -> list[Any]:
    return [model.state_dict(), *others]


def updates(
    update: Callable[[Pair, torch.optim.Optimizer, torch.Tensor, int], Any], *calls: int
) -> Script:
    """Steps of one function, which get a number beside the batch."""

    def script(wrap: Callable[..., Any]) -> Iterator[Any]:
        model = Pair()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        step = wrap(lambda x, number: update(model, optimizer, x, number))
        for number in calls:
            yield step(torch.rand(5, 4) * (number or 1), number), left(model)

    return script


def _backward(model: Pair, x: torch.Tensor) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


def _some_by_hand(model: Pair, optimizer: Any, x: Any, number: int) -> Any:
    loss = model.by_hand(x, *(["w", "b"] if number == 1 else ["b"]))
    optimizer.step()
    return loss


def _some_by_values(model: Pair, optimizer: Any, x: Any, number: int) -> Any:
    loss = model.by_hand(x, "b")
    if x.sum() > 0:
        model.by_hand(x, "w")
    optimizer.step()
    return loss


def _resets_at_times(model: Pair, optimizer: Any, x: Any, number: int) -> Any:
    if number == 1:
        optimizer.zero_grad()
    loss = _backward(model, x)
    optimizer.step()
    return loss


def _updates_by_hand(model: Pair, optimizer: Any, x: Any, number: int) -> Any:
    loss = model(x)
    if number == 1:
        model.zero_grad()
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    return loss.detach()


def _tries(model: Pair, optimizer: Any, x: Any, number: int) -> Any:
    model.by_hand(x, "b")
    try:
        row = functional.embedding((x[0, :1] * 0 + number).long(), torch.ones(2, 12))
        model.w.grad = row.view(4, 3) * x.sum()
    except IndexError:
        pass
    optimizer.step()
    return model(x).detach()


def two_functions(wrap: Callable[..., Any]) -> Iterator[Any]:
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def whole(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        return adding(x)

    def adding(x: torch.Tensor) -> torch.Tensor:
        loss = _backward(model, x)
        optimizer.step()
        return loss

    first, second = wrap(whole), wrap(adding)
    for _ in range(2):
        yield first(torch.rand(5, 4)), second(torch.rand(5, 4)), left(model)


def adding_to_what_is_freed(wrap: Callable[..., Any]) -> Iterator[Any]:
    """One step updates, another adds gradients, and a third updates by the sum."""
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def whole(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = _backward(model, x)
        optimizer.step()
        return loss

    first, second, third = wrap(whole), wrap(lambda x: _backward(model, x)), wrap(optimizer.step)
    for _ in range(2):
        yield first(torch.rand(5, 4)), second(torch.rand(5, 4)), third(), left(model)


def replaced(wrap: Callable[..., Any], *, is_plain: bool) -> Iterator[Any]:
    """The caller puts another tensor in a parameter's place, and the optimizer has the old one."""
    model = Pair()
    old = model.w
    if is_plain:
        del model.w
        model.w = old = torch.randn(4, 3, requires_grad=True)
    optimizer = torch.optim.Adam([model.w, model.b], lr=0.1)

    @wrap
    def step(x: torch.Tensor) -> torch.Tensor:
        if is_plain:
            loss = model.by_hand(x, "w", "b")
        else:
            model.zero_grad()
            loss = _backward(model, x)
        optimizer.step()
        return loss

    for number in range(5):
        if number == 3:
            new = torch.zeros(4, 3, requires_grad=True)
            model.w = new if is_plain else torch.nn.Parameter(new)
        yield step(torch.rand(5, 4)), left(model, model.w, old)


def frozen(wrap: Callable[..., Any]) -> Iterator[Any]:
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @wrap
    def step(x: torch.Tensor) -> torch.Tensor:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = None
        loss = _backward(model, x)
        optimizer.step()
        return loss

    for number in range(5):
        model.w.requires_grad_(number < 3)
        yield step(torch.rand(5, 4)), left(model)


USES: dict[str, Script] = {
    "resets at times": updates(_resets_at_times, 1, 1, 0, 1, 0),
    "some by hand": updates(_some_by_hand, 1, 1, 0, 1, 0),
    "some by hand, fewer first": updates(_some_by_hand, 0, 0, 1, 1, 0),
    "some by values": updates(_some_by_values, 1, 1, -1, -1, 1, -1),
    "updates by hand": updates(_updates_by_hand, 1, 1, 0, 1, 0),
    "tries": updates(_tries, 1, 1, 9, 1, 9),
    "two functions": two_functions,
    "adds to what is freed": adding_to_what_is_freed,
    "replaced parameter": partial(replaced, is_plain=False),
    "replaced tensor": partial(replaced, is_plain=True),
    "frozen": frozen,
}


def run(script: Script, wrap: Callable[..., Any]) -> list[Any]:
    torch.manual_seed(0)
    return [part for parts in script(wrap) for part in tensors_and_numbers(parts)]


@pytest.mark.parametrize("name", USES)
def test_a_step_that_uses_a_freed_gradient_is_refused(name: str) -> None:
    script, done = USES[name], list[Any]()

    def noted(wrap: Callable[..., Any]) -> Iterator[Any]:
        for parts in script(wrap):
            done.append(tensors_and_numbers(parts))
            yield parts

    with pytest.raises(roam.RoamError, match="keep_grads=True") as caught:
        run(noted, roam.compile)
    assert caught.value.code == "freed_gradient"
    steps = [part for parts in done for part in parts]
    assert_same_bits(run(script, lambda step: step)[: len(steps)], steps)


@pytest.mark.parametrize("name", USES)
def test_keep_grads_is_the_remedy(name: str) -> None:
    eager = run(USES[name], lambda step: step)
    assert_same_bits(eager, run(USES[name], partial(roam.compile, keep_grads=True)))


def tasks(wrap: Callable[..., Any]) -> Iterator[Any]:
    """Heads of which each step trains one; all gradients are reset."""
    body = torch.nn.Parameter(torch.randn(4, 4))
    heads = [torch.nn.Parameter(torch.randn(4)) for _ in range(2)]
    optimizer = torch.optim.Adam([body, *heads], lr=0.1)

    @wrap
    def step(x: torch.Tensor, task: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x @ body @ heads[task]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for task in (0, 1, 0, 1, 1, 0):
        yield step(torch.rand(5, 4), task), [body, *heads]


def adversaries(wrap: Callable[..., Any]) -> Iterator[Any]:
    """Each step leaves gradients of the other's parameters, which nobody uses."""
    one, other = torch.nn.Linear(3, 1), torch.nn.Linear(2, 3)
    optimizers = [torch.optim.Adam(module.parameters()) for module in (one, other)]

    @wrap
    def train_one(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        optimizers[0].zero_grad()
        loss = functional.softplus(-one(x)).mean() + functional.softplus(one(other(z))).mean()
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    @wrap
    def train_other(z: torch.Tensor) -> torch.Tensor:
        optimizers[1].zero_grad()
        loss = functional.softplus(-one(other(z))).mean()
        loss.backward()
        optimizers[1].step()
        return loss.detach()

    for _ in range(4):
        yield train_one(torch.rand(6, 3), torch.rand(6, 2)), train_other(torch.rand(6, 2))
        yield one.state_dict(), other.state_dict()


def evaluated_first(wrap: Callable[..., Any]) -> Iterator[Any]:
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = wrap(lambda x: _resets_at_times(model, optimizer, x, 1))
    score = wrap(torch.no_grad()(lambda x: model(x)))
    for _ in range(3):
        yield score(torch.rand(5, 4)), step(torch.rand(5, 4)), left(model)


def failed_before_a_reset(wrap: Callable[..., Any]) -> Iterator[Any]:
    """The step's own function runs in the plan's place, and resets what was freed."""
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @wrap
    def step(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        try:
            scale = functional.embedding(index, torch.ones(3, 1)).sum()
        except IndexError:
            scale = 2.0
        optimizer.zero_grad()
        loss = model(x) * scale
        loss.backward()
        optimizer.step()
        return loss.detach()

    for index in (1, 1, 9, 2, 9):
        yield step(torch.rand(5, 4), torch.tensor([index])), left(model)


RESETS = [tasks, adversaries, evaluated_first, failed_before_a_reset]


@pytest.mark.parametrize("script", RESETS, ids=lambda script: script.__name__)
def test_steps_that_do_not_use_freed_gradients_run(script: Script) -> None:
    assert_same_bits(run(script, lambda step: step), run(script, roam.compile))
