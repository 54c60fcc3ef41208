"""Under a memory budget, plans choose what runs again in the user's own `torch.utils.checkpoint`
regions, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import roam
from newer import needs_2_15
from roam.program.ir import Program
from roam.program.user_checkpoints import undone
from roam.tracing.step import capture_step
from training import assert_same_bits, tensors_and_numbers

functional = torch.nn.functional


class Block(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16) if kind == "statistics" else torch.nn.LayerNorm(16)
        self.enter, self.leave = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.relu = torch.nn.ReLU(inplace=kind == "in place")
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.drop(self.leave(self.relu(self.enter(self.norm(x)))))
        return x + y


class Net(torch.nn.Module):
    def __init__(self, kind: str, *, reentrant: bool) -> None:
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(16, 16), torch.nn.Linear(16, 3)
        self.blocks = torch.nn.ModuleList(Block(kind) for _ in range(4))
        self.drop, self.reentrant = torch.nn.Dropout(0.1), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.enter(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        y: torch.Tensor = self.leave(self.drop(x))
        return y


def train_step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def made(kind: str, reentrant: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Net(kind, reentrant=reentrant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.randn(128, 16), torch.randint(0, 3, (128,))


def trained(kind: str, reentrant: bool, step: Callable[..., Any]) -> list[Any]:
    model, optimizer, x, y = made(kind, reentrant)
    losses = [step(model, optimizer, x * scale, y) for scale in range(1, 5)]
    found = [losses, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]
    return tensors_and_numbers(found)


KINDS = ["apart", "in place", "statistics"]
CASES = [*product(KINDS, [False, True])]


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "reentrant"), CASES)
def test_what_he_marked_is_kept_where_the_budget_allows_it(kind: str, reentrant: bool) -> None:
    own, chosen = (
        roam.compile(train_step, memory="1GiB", keep_checkpoints=keep) for keep in (True, False)
    )
    eager = trained(kind, reentrant, train_step)
    assert_same_bits(eager, trained(kind, reentrant, own))
    assert_same_bits(eager, trained(kind, reentrant, chosen))
    calls, fewer = (
        len(step._captures[0].runners[-1].choice.program.calls) for step in (own, chosen)
    )
    if kind == "statistics":  # a batch norm that runs again counts its batch twice
        assert calls == fewer
    else:
        assert fewer <= calls - 4 * 8
        assert own.memory().total_bytes < chosen.memory().total_bytes
    objects = made(kind, reentrant)
    for _ in range(2):  # the run that checks a plan takes more
        chosen(*objects)
    chosen.measured(*objects)
    memory = chosen.memory()
    assert memory.measured_bytes == pytest.approx(memory.total_bytes, rel=0.01)


# Without a table of its kernels, the checks of a plan's first run take a part of such a budget.
@needs_2_15
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "reentrant", "pool"),
    [
        *((*case, None) for case in CASES),
        # With statistics nothing is chosen in the regions, and no plan with a pool is so small.
        *((*case, True) for case in CASES if case[0] != "statistics"),
    ],
)
def test_a_budget_chooses_within_regions(kind: str, reentrant: bool, pool: bool | None) -> None:
    """One below what his own regions take."""
    own = roam.compile(train_step, keep_checkpoints=True, memory="100%", pool=pool)
    trained(kind, reentrant, own)
    plan = own.memory()
    local_bytes = plan.total_bytes - plan.persistent_bytes
    share = 0.98 if pool else 0.95  # with a pool, less is found on some processors
    budget_bytes = plan.persistent_bytes + int(share * local_bytes)
    step = roam.compile(train_step, memory=budget_bytes, pool=pool)
    assert_same_bits(trained(kind, reentrant, train_step), trained(kind, reentrant, step))
    objects = made(kind, reentrant)
    step(*objects)
    step.measured(*objects)
    memory = step.memory()
    assert memory.extra_runs > 0
    assert memory.measured_bytes is not None
    assert memory.measured_bytes <= budget_bytes


def program_of(step: Callable[..., Any], *arguments: Any) -> Program:
    captured = capture_step(step, arguments, {}).steady
    assert captured is not None
    return captured.program


@pytest.mark.parametrize("reentrant", [False, True])
def test_nothing_is_left_of_regions_that_are_kept(reentrant: bool) -> None:
    found = undone(program_of(train_step, *made("in place", reentrant)))
    assert found is not None
    calls = [found.program.calls[index] for index in range(len(found.calls))]
    names = [call.name for call in calls]
    assert not [name for name in names if "rng_state" in name]
    assert names.count("aten.bernoulli_.float") == 2 + 4
    assert names.count("aten.native_layer_norm.default") == 4


def test_a_step_without_regions_stays_as_it_is() -> None:
    model, optimizer = torch.nn.Linear(4, 4), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = (model(x).relu() + torch.zeros(4)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    assert undone(program_of(step, model, optimizer, torch.randn(2, 4))) is None


class Drawing(torch.autograd.Function):
    """Draws in the backward pass what the forward pass drew, or something else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: str) -> torch.Tensor:
        ctx.state, ctx.before = state, torch.get_rng_state()
        noise = torch.randn_like(x)
        ctx.middle = torch.get_rng_state()
        ctx.save_for_backward(x)
        return x + noise

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        now = torch.get_rng_state()
        if ctx.state == "same":
            torch.set_rng_state(ctx.before)
        elif ctx.state == "later":
            torch.set_rng_state(ctx.middle)
        noise = torch.randn_like(x)
        if ctx.state != "none":
            torch.set_rng_state(now)
        return gradient * noise, None


@pytest.mark.parametrize(("state", "draws"), [("same", 1), ("later", 2), ("none", 2)])
def test_draws_are_one_where_the_state_is(state: str, draws: int) -> None:
    def step(weight, x):
        weight.grad = None
        loss = (Drawing.apply(weight * x, state) * torch.rand_like(x)).sum()
        loss.backward()
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.1)
        return loss + torch.rand(())

    weight, x = torch.ones(2000, requires_grad=True), torch.randn(2000)
    program = program_of(step, weight, x)
    found = undone(program)
    names = [call.name for call in (program if found is None else found.program).calls]
    assert names.count("aten.randn_like.default") == draws
    outcomes = []
    for wrap in (lambda step: step, functools.partial(roam.compile, memory="1GiB")):
        torch.manual_seed(0)
        weight = torch.ones(2000, requires_grad=True)
        run = wrap(step)
        losses = [run(weight, x).detach() for _ in range(3)]
        outcomes.append(tensors_and_numbers([losses, weight.detach(), torch.get_rng_state()]))
    assert_same_bits(*outcomes)


class Attending(torch.nn.Module):
    """Attention without dropout, which draws nothing, and then dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.enter(x).view(2, 16, 2, 8).transpose(1, 2)
        y = functional.scaled_dot_product_attention(heads, heads, heads)
        y = functional.dropout(y.transpose(1, 2).reshape(2, 16, 16), 0.3)
        return y.tanh() * y


@pytest.mark.parametrize("preserve", [False, True])
def test_attention_without_dropout_leaves_the_state_as_it_is(preserve: bool) -> None:
    def step(blocks, optimizer, x):
        optimizer.zero_grad()
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=preserve)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    outcomes = []
    for wrap in (lambda step: step, functools.partial(roam.compile, memory="64MiB")):
        torch.manual_seed(0)
        blocks = torch.nn.ModuleList([Attending(), Attending()])
        optimizer, x = torch.optim.SGD(blocks.parameters(), lr=0.1), torch.randn(2, 16, 16)
        run = wrap(step)
        losses = [run(blocks, optimizer, x) for _ in range(3)]
        outcomes.append(tensors_and_numbers([losses, blocks.state_dict(), torch.get_rng_state()]))
    assert_same_bits(*outcomes)
    found = undone(program_of(step, blocks, optimizer, x))
    assert found is not None
    drawn = [call for call in found.program.calls if "bernoulli" in call.name]
    assert len(drawn) == (2 if preserve else 4)


def test_a_value_that_has_changed_since_is_made_again() -> None:
    """The region reads a buffer that the step changes between its runs."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))
            self.register_buffer("scale", torch.ones(8))

        def region(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).exp() * self.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.region, x, use_reentrant=True)
            with torch.no_grad():
                self.scale.mul_(1.25)
            return y

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    outcomes = []
    for wrap in (lambda step: step, functools.partial(roam.compile, memory="1GiB")):
        torch.manual_seed(0)
        model = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run, x = wrap(step), torch.randn(4, 8, requires_grad=True)
        losses = [run(model, optimizer, x).detach() for _ in range(3)]
        outcomes.append(tensors_and_numbers([losses, model.state_dict(), x.grad]))
    assert_same_bits(*outcomes)
