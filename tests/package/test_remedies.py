"""Refusals of numbers that code needs as they are name who asks, and what they tell to write runs
by plan with eager PyTorch's bits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import roam
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
functional = torch.nn.functional
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def leaves(loss_of: Loss, wrap: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @wrap
    def step(x: torch.Tensor) -> Any:
        loss = loss_of(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    results = [step(torch.randn(8, 4)) for _ in range(4)]
    return tensors_and_numbers([results, model.state_dict(), torch.get_rng_state()])


def place(y: torch.Tensor) -> torch.Tensor:
    return (y > 0).sum() % 4


TABLE = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64)
SCALES = TABLE.tolist()
REFUSED: dict[str, tuple[str, Loss, Loss]] = {
    "huber": (
        r"its formula by operators",
        lambda y, x: functional.huber_loss(y, x, delta=y.abs().mean().item()),
        lambda y, x: torch.where(
            (y - x).abs() <= (d := y.abs().mean().item()),
            0.5 * (y - x).square(),
            d * ((y - x).abs() - 0.5 * d),
        ).mean(),
    ),
    "scalar index": (
        r"for an index v\[k\.view\(1\)\]",
        lambda y, _: (y[place(y)]).sum(),
        lambda y, _: (y[place(y).view(1)]).sum(),
    ),
    "list": (
        r"rates\[torch.tensor",
        lambda y, _: y.square().sum() * SCALES[place(y).item()],  # type: ignore[index]
        lambda y, _: y.square().sum() * TABLE[torch.tensor([place(y).item()])].item(),
    ),
    "slice": (
        r"torch.where\(torch.arange",
        lambda y, _: y[: place(y).item() + 1].sum(),  # type: ignore[misc]
        lambda y, _: torch.where(torch.arange(len(y))[:, None] < place(y).item() + 1, y, 0.0).sum(),
    ),
    "size": (
        r"for a size torch.where",
        lambda y, _: y[torch.randint(8, (place(y).item() + 1,))].sum(),  # type: ignore[arg-type]
        lambda y, _: torch.where(
            (torch.arange(4) < place(y) + 1)[:, None], y[torch.randint(8, (4,))], 0.0
        ).sum(),
    ),
    "conversion": (
        r"for a size torch.where",
        lambda y, _: y.topk(int(place(y)) + 1, dim=0).values.sum(),
        lambda y, _: torch.where(
            torch.arange(4)[:, None] < place(y) + 1, y.topk(4, dim=0).values, 0.0
        ).sum(),
    ),
    "power": (
        r"to pow a tensor",
        lambda y, _: (y.abs() + 1).pow(y.mean().item()).sum(),
        lambda y, _: (y.abs() + 1).pow(torch.tensor(y.mean().item())).sum(),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_who_asks_is_named_and_what_to_write_runs(name: str) -> None:
    match, refused, written = REFUSED[name]
    with pytest.raises(roam.CaptureError, match=match) as caught:
        leaves(refused, roam.compile)
    assert caught.value.code == "value_reached_python"
    assert caught.value.source is not None
    step: list[roam.Step] = []

    def compiled(function: Any) -> Any:
        step.append(roam.compile(function))
        return step[0]

    assert_same_bits(leaves(written, lambda step: step), leaves(written, compiled))
    assert len(step[0].plans) > 0


def test_a_number_from_outside_has_a_plan_for_each_value() -> None:
    def results(wrap: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)

        @wrap
        def step(x: torch.Tensor, delta: float, size: int) -> Any:
            model.zero_grad()
            loss = functional.huber_loss(model(x[:size]), x[:size], delta=delta)
            loss.backward()
            return loss.detach(), *(p.grad for p in model.parameters())

        calls = [(0.5, 3), (1.0, 3), (0.5, 3), (1.0, 4)]
        return tensors_and_numbers([step(torch.randn(8, 4), *call) for call in calls])

    assert_same_bits(results(lambda step: step), results(roam.compile))


def _put_head(state: Any, _: Any) -> None:
    state.head = torch.nn.Linear(4, 4)


def _put_layer(state: Any, _: Any) -> None:
    state.net[1] = torch.nn.GELU()


def _add_group(state: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": list(state.head.parameters()), "lr": 0.05})


@pytest.mark.parametrize("change", [_put_head, _put_layer, _add_group])
def test_what_a_plan_cannot_change_is_changed_between_two_calls(
    change: Callable[[Any, Any], None],
) -> None:
    def results(wrap: Callable[..., Any], *, inside: bool) -> Any:
        torch.manual_seed(0)
        state = SimpleNamespace(calls=0, head=torch.nn.Linear(4, 4))
        state.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        optimizer = torch.optim.SGD(state.net.parameters(), lr=0.1)

        @wrap
        def step(x: torch.Tensor) -> Any:
            state.calls += 1
            if inside and state.calls == 3:
                change(state, optimizer)
            loss = state.head(state.net(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = []
        for call in range(5):
            if call == 2 and not inside:
                change(state, optimizer)
            losses.append(step(torch.randn(8, 4)))
        return tensors_and_numbers([losses, state.head.state_dict(), state.net.state_dict()])

    if change is _add_group:  # a call that does so runs as it is
        assert_same_bits(
            results(lambda step: step, inside=True), results(roam.compile, inside=True)
        )
    else:
        with pytest.raises(
            roam.CaptureError, match="outside of the step, between two calls"
        ) as caught:
            results(roam.compile, inside=True)
        assert caught.value.code == "moved"
    assert_same_bits(results(lambda step: step, inside=False), results(roam.compile, inside=False))
