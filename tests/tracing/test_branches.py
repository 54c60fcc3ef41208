"""Branches on values that a step computes: refused by a plan alone, and eager PyTorch's bits beside
plans, one for each way.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from newer import needs_2_15
from roam.tracing.recording import recorder
from roam.tracing.stand_ins.function_stand_ins import is_tracing
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 8


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6),
        torch.nn.BatchNorm1d(6),
        torch.nn.Dropout(0.2),
        torch.nn.Tanh(),
        torch.nn.Linear(6, 2),
    )


def batches(count: int = STEPS) -> list[torch.Tensor]:
    """Large and small ones by turns."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(5, 4, generator=generator) * (3.0 if place % 3 else 0.3)
        for place in range(count)
    ]


class Own(torch.optim.Optimizer):
    """An optimizer of a user's, which updates one parameter after another."""

    def __init__(self, parameters: Any, update: Callable[..., None]) -> None:
        super().__init__(parameters, {"lr": 0.05, "beta": 0.9})
        self.update = update

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                self.update(p, p.grad, state["average"], group["lr"], group["beta"])


def of_gradient(p, grad, average, lr, beta):
    average.mul_(beta).add_(grad, alpha=1 - beta)
    if grad.norm() > 0.15:
        grad = grad / grad.norm()
    p.sub_(average + 0.1 * grad, alpha=lr)


def of_weight_and_gradient(p, grad, average, lr, beta):
    average.mul_(beta).add_(grad, alpha=1 - beta)
    perturb = average * 2
    if p.dim() > 1:
        for view in (lambda x: x.reshape(x.size(0), -1), lambda x: x.reshape(1, -1)):
            angle = torch.nn.functional.cosine_similarity(view(grad), view(p), dim=1).abs_()
            if angle.max() < 1.7 / math.sqrt(view(p).size(1)):
                perturb -= p * (p * perturb).sum()
                break
    p.add_(perturb, alpha=-lr)


def of_average(p, grad, average, lr, beta):
    """What the answer is made of is updated before it."""
    average.mul_(beta).add_(grad, alpha=1 - beta)
    if average.norm() > 0.05 and p.norm() > 0:
        average.mul_(0.5)
    p.sub_(average, alpha=lr)


def of_updated_weight(p, grad, average, lr, beta):
    average.lerp_(grad, 1 - beta)
    p.sub_(average, alpha=lr)
    norm = p.norm().item()
    if norm > 1.0:
        p.mul_(1.0 / norm)


def of_number(p, grad, average, lr, beta):
    average.lerp_(grad, 1 - beta)
    size = grad.abs().mean().item()
    p.sub_(average * (0.3 if size > 1.2 * lr else 1.0 + size), alpha=lr)


def left_out(p, grad, average, lr, beta):
    if (grad.abs() > 0.25).any():
        return
    average.lerp_(grad, 1 - beta)
    p.sub_(average, alpha=lr)


def of_truth(p, grad, average, lr, beta):
    if (grad.abs() > 0.2).sum():
        grad = grad.clamp(-0.2, 0.2)
    p.sub_(grad, alpha=lr)


UPDATES = [
    of_gradient,
    of_weight_and_gradient,
    of_average,
    of_updated_weight,
    of_number,
    left_out,
    of_truth,
]


def train(
    wrap: Callable[[Any], Any], make_step: Callable[..., Any], xs: list[torch.Tensor], **kinds: Any
) -> list[Any]:
    torch.manual_seed(0)
    net = network()
    step = wrap(make_step(net, **kinds))
    left: list[Any] = []
    for x in xs:
        result = step(x)
        left += tensors_and_numbers(result, net.state_dict(), torch.get_rng_state())
    return left


class Compiled:
    """`roam.compile` that keeps the steps that it made."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.steps: list[Any] = []

    def __call__(self, function: Any) -> Any:
        self.steps.append(roam.compile(function, **self.options))
        return self.steps[-1]


def by_optimizer(
    net: torch.nn.Module, update: Callable[..., None], to_none: bool = True, adds: bool = False
) -> Callable[..., Any]:
    optimizer = Own(net.parameters(), update)

    def step(x):
        if not adds:
            optimizer.zero_grad(set_to_none=to_none)
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), [optimizer.state[p]["average"].clone() for p in net.parameters()]

    return step


@pytest.mark.auto
@needs_2_15
@pytest.mark.sweep
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("update", UPDATES)
def test_optimizers_that_branch_on_values_give_eagers_bits(
    update: Callable[..., None], to_none: bool
) -> None:
    compiled = Compiled(poison=True)
    kinds = {"update": update, "to_none": to_none}
    assert_same_bits(
        *(train(wrap, by_optimizer, batches(), **kinds) for wrap in (lambda step: step, compiled))
    )
    assert compiled.steps[0].runs_beside


def adam_and_loss(
    net: torch.nn.Module,
) -> tuple[torch.optim.Optimizer, Callable[[torch.Tensor], torch.Tensor]]:
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss.detach()

    return torch.optim.Adam(net.parameters(), lr=0.02), loss_of


def clipping(net):
    optimizer, loss_of = adam_and_loss(net)

    def step(x):
        optimizer.zero_grad()
        loss = loss_of(x)
        norm = torch.sqrt(sum(p.grad.square().sum() for p in net.parameters()))
        if norm > 0.5:
            for p in net.parameters():
                p.grad.mul_(0.5 / norm)
        optimizer.step()
        return loss, norm

    return step


def parameters_left_out(net):
    def step(x):
        net.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                if torch.isnan(p.grad).any():
                    continue
                p -= 0.02 * p.grad
        return loss.detach()

    return step


def ascent_first(net):
    optimizer, loss_of = adam_and_loss(net)

    def step(x):
        optimizer.zero_grad()
        loss_of(x)
        with torch.no_grad():
            steps = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in net.parameters()]
            for p, away in zip(net.parameters(), steps, strict=True):
                p.add_(away)
        optimizer.zero_grad()
        loss = loss_of(x)
        with torch.no_grad():
            for p, away in zip(net.parameters(), steps, strict=True):
                p.sub_(away)
        if loss > 0.2:
            optimizer.step()
        return loss

    return step


def best_kept(net):
    optimizer, loss_of = adam_and_loss(net)
    best, kept = torch.full((), math.inf), [p.detach().clone() for p in net.parameters()]

    def step(x):
        optimizer.zero_grad()
        loss = loss_of(x)
        optimizer.step()
        with torch.no_grad():
            if loss < best:
                best.copy_(loss)
                for old, p in zip(kept, net.parameters(), strict=True):
                    old.copy_(p)
        return loss, best.clone(), [old.clone() for old in kept]

    return step


def accumulating(net):
    optimizer, loss_of = adam_and_loss(net)

    def step(x):
        loss = loss_of(x)
        if net[0].weight.grad.norm() > 0.3:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss, net[0].weight.grad.clone()

    return step


def by_chance(net):
    optimizer, loss_of = adam_and_loss(net)

    def step(x):
        optimizer.zero_grad()
        if torch.rand(()) < 0.5:
            x = x + 0.1 * torch.randn_like(x)
        loss = loss_of(x)
        optimizer.step()
        return loss

    return step


def in_a_loop(net):
    optimizer, loss_of = adam_and_loss(net)

    def step(x):
        optimizer.zero_grad()
        count = 0
        while net[0].weight.abs().max() * x.abs().max() > 1.0 and count < 3:
            x, count = x * 0.5, count + 1
        loss = loss_of(x)
        optimizer.step()
        return loss, count

    return step


def with_a_scaler(net):
    optimizer, _ = adam_and_loss(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)

    def step(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if torch.nn.utils.clip_grad_norm_(net.parameters(), 100.0) > 0.5:
            for p in net.parameters():
                p.grad.div_(2)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def the_other_way_raises(net):
    """On the way that a plan is for, the table has too few rows for the other answer's index."""
    optimizer, _ = adam_and_loss(net)
    table = torch.ones(3)

    def step(x):
        optimizer.zero_grad()
        row = x.nan_to_num().abs().amax().long().reshape(1)
        if row > 2:
            row = row * 0
        loss = (net(x).square().mean() * table[row]).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


STEPS_OF_USERS = [
    clipping, parameters_left_out, ascent_first, best_kept, accumulating, by_chance, in_a_loop, with_a_scaler,
    the_other_way_raises,
]  # fmt: skip
ON_RESULTS = STEPS_OF_USERS[:-1]
"""Those that do not decide by the batch alone, for which a plan has a computed guard."""


@pytest.mark.auto
@needs_2_15
@pytest.mark.parametrize("make_step", STEPS_OF_USERS)
def test_steps_that_branch_on_values_give_eagers_bits(make_step: Callable[..., Any]) -> None:
    xs = batches(10)
    xs[6][0, 0] = math.nan
    compiled = Compiled()
    assert_same_bits(*(train(wrap, make_step, xs) for wrap in (lambda step: step, compiled)))
    assert compiled.steps[0].runs_beside == (make_step in ON_RESULTS)


@pytest.mark.parametrize("make_step", ON_RESULTS)
def test_they_are_refused_where_python_is_to_be_idle(make_step: Callable[..., Any]) -> None:
    with pytest.raises(roam.CaptureError, match="value") as caught:
        train(roam.compile, make_step, batches(2))
    assert caught.value.code in ("value_reached_python", "scaler")
    assert "test_branches.py" in str(caught.value.source)


@pytest.mark.auto
@needs_2_15
def test_both_ways_of_a_branch_have_plans() -> None:
    torch.manual_seed(0)
    planned = roam.compile(clipping(torch.nn.Linear(4, 2, bias=False)))
    small, large = batches()[0] * 0.01, batches()[1] * 3
    for x in [*[small] * 3, *[large] * 3, small, large]:
        planned(x)
    assert planned.runs_beside
    assert len(planned.plans) == 2


def test_a_run_that_raises_teaches_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(2))

    def step(x):
        y = weight * x
        if y.sum() > 0 or y.min() < -1:
            raise ValueError("no such data")
        return y.sum() * 2

    planned = roam.compile(step)
    for x in (torch.ones(2), torch.ones(2), -torch.ones(2) / 2, -torch.ones(2) / 2):
        for function in (step, planned):
            if x.sum() > 0:
                with pytest.raises(ValueError, match="no such data"):
                    function(x)
            else:
                assert function(x).item() == -2


def halved_while(y):
    while y > 0.1:
        y = y * 0.5
    return y


def halved_until(y):
    while True:
        y = y * 0.5
        if not bool(y > 0.1):
            break
    return y


def halved_by_flag(y):
    is_done = False
    while not is_done:
        y = y * 0.5
        is_done = bool(y <= 0.1)
    return y


def halved_at_most(y):
    for _ in range(100):
        y = y * 0.5
        if y <= 0.1:
            return y
    return y


def halved_by_generator(y):
    def halves(y):
        while y > 0.1:
            y = y * 0.5
            yield y

    *_, y = halves(y)
    return y


LOOPS = [halved_while, halved_until, halved_by_flag, halved_at_most, halved_by_generator]


def of_loop(halved: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[], int]]:
    """A step with a loop that values end, and how many turns of it fakes have made."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    turns = 0

    def half(y):
        nonlocal turns
        turns += is_tracing()
        return y

    class Counted(torch.nn.Module):
        def forward(self, y):
            return halved(half(y))

    counted = Counted()

    def step(x, scale):
        optimizer.zero_grad()
        y = counted(model(x).square().mean().detach() * 0 + scale)
        loss = model(x).square().mean() * y
        loss.backward()
        optimizer.step()
        return loss.detach(), y

    return step, lambda: turns


@pytest.mark.auto
@needs_2_15
@pytest.mark.parametrize("halved", LOOPS)
def test_loops_that_values_end_run_beside_plans(halved: Callable[..., Any]) -> None:
    def run(wrap: Callable[..., Any]) -> list[Any]:
        step, _ = of_loop(halved)
        run_step = wrap(step)
        return [run_step(torch.ones(2, 3) * n, torch.tensor(1.0)) for n in range(1, 5)]

    compiled = Compiled()
    assert_same_bits(run(lambda step: step), run(compiled))
    assert compiled.steps[0].runs_beside
    assert compiled.steps[0].plans


@pytest.mark.parametrize("halved", LOOPS)
def test_where_python_is_to_be_idle_no_turn_follows_the_first_question(
    halved: Callable[..., Any],
) -> None:
    step, turns = of_loop(halved)
    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(step)(torch.ones(2, 3), torch.tensor(1e20))
    assert caught.value.code == "value_reached_python"
    assert turns() <= 2


def test_long_recordings_say_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "_TOLD_FIRST", 8)
    monkeypatch.setattr(recorder, "_TOLD_ALOUD", 16)

    def step(x):
        for _ in range(40):
            x = x * 2
        return x

    with caplog.at_level(logging.INFO, logger="roam"):
        roam.capture(step, torch.ones(2))
    told = [record for record in caplog.records if "recorded so far" in record.getMessage()]
    assert {(record.levelname, record.args[0]) for record in told} == {  # type: ignore[index]
        ("INFO", 8),
        ("WARNING", 16),
        ("WARNING", 32),
    }
    assert "test_branches.py" in told[0].getMessage()


@pytest.mark.auto
@needs_2_15
@pytest.mark.parametrize("steps", [1, 3])
def test_a_comparison_runs_beside_plans(steps: int) -> None:
    torch.manual_seed(0)
    net = network()
    optimizer, loss_of = adam_and_loss(net)

    def step(x):
        optimizer.zero_grad()
        loss = loss_of(x)
        if loss > 0:
            net[0].weight.grad.mul_(0.5)
        optimizer.step()
        return loss

    found = roam.compare(step, batches()[0], steps=steps)
    assert found.equal, found


@pytest.mark.auto
@needs_2_15
def test_steps_that_wait_for_each_other_run_side_by_side() -> None:
    """The first call of a step that branches is recorded while its own function runs, in which it
    may wait for what another thread does."""
    meet, failures = threading.Barrier(2), list[BaseException]()

    def trains() -> None:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            if not is_tracing():
                meet.wait(20)
            loss = (weight * x).sum()
            loss.backward()
            if loss > 1:
                optimizer.step()
            return loss

        try:
            roam.compile(step)(torch.ones(3))
        except BaseException as failure:  # noqa: BLE001
            failures.append(failure)

    threads = [threading.Thread(target=trains) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not any(hasattr(one, "__wrapped__") for one in (torch.Tensor.item, torch.tensor))
