"""Steps that numerical code writes by hand: solvers, samplers, second derivatives, and numbers that
branches change. A plan leaves what eager PyTorch leaves, with batches of one length or of several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from newer import needs_2_15
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
functional, linalg = torch.nn.functional, torch.linalg
Built = tuple[Callable[..., Any], Any]
LENGTHS = (8, 8, 6, 10, 7, 8)


def _equilibrium() -> Built:
    """The backward pass of a fixed point, solved in a hook."""
    inner, outer = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam([*inner.parameters(), *outer.parameters()])

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        z = torch.zeros_like(x)
        with torch.no_grad():
            for turn in range(12):  # noqa: B007
                after = torch.tanh(0.3 * inner(z) + outer(x))
                if (after - z).norm() < 1e-2:
                    break
                z = after
        z = torch.tanh(0.3 * inner(z) + outer(x))
        start = z.detach().requires_grad_()
        again = torch.tanh(0.3 * inner(start) + outer(x))

        def solve(gradient: torch.Tensor) -> torch.Tensor:
            found = gradient
            for _ in range(4):
                (pulled,) = torch.autograd.grad(again, start, found, retain_graph=True)
                found = pulled + gradient
            return found

        z.register_hook(solve)
        loss = z.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), turn

    return step, (inner, outer, optimizer)


def _adjoint() -> Built:
    """A function whose backward pass runs autograd backwards in time."""
    field = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    weights = tuple(field.parameters())

    class Solve(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor, *_: Any) -> torch.Tensor:
            for _ in range(3):
                y = y + 0.3 * field(y)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, adjoint: torch.Tensor) -> Any:  # type: ignore[override]
            (y,) = ctx.saved_tensors
            sums = [torch.zeros_like(weight) for weight in weights]
            for _ in range(3):
                with torch.enable_grad():
                    now = y.detach().requires_grad_()
                    slope = field(now)
                pulled, *parts = torch.autograd.grad(slope, (now, *weights), adjoint)
                y, adjoint = y - 0.3 * slope.detach(), adjoint + 0.3 * pulled
                sums = [one + 0.3 * part for one, part in zip(sums, parts, strict=True)]
            return (adjoint, *sums)

    optimizer = torch.optim.Adam(weights)

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = Solve.apply(x, *weights).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, (field, optimizer)


def _factors() -> Built:
    """Curvature from hooks, inverted at every second call."""
    model, kept, seen = torch.nn.Linear(4, 3), {"calls": 0, "a": torch.eye(4)}, {}
    model.register_forward_pre_hook(lambda _, inputs: seen.update(a=inputs[0].detach()))

    def step(x: torch.Tensor) -> Any:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        kept["a"] = 0.9 * kept["a"] + 0.1 * seen["a"].T @ seen["a"] / len(x)
        if kept["calls"] % 2 == 0:
            kept["inverse"] = linalg.inv(kept["a"] + 0.1 * torch.eye(4))
        kept["calls"] += 1
        with torch.no_grad():
            model.weight.sub_(0.1 * model.weight.grad @ kept["inverse"])  # type: ignore[operator]
        seen.clear()
        return loss.detach()

    return step, (model, kept)


def _sampler() -> Built:
    """Hamiltonian steps whose size follows what was accepted."""
    place, accepted, sizes = torch.zeros(4), torch.zeros((), dtype=torch.long), [0.1]

    def energy(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * q @ q + functional.softplus(-(x @ q)).sum()

    def step(x: torch.Tensor) -> Any:
        momentum = torch.randn(4)
        q, p = place.clone(), momentum - sizes[0] / 2 * torch.func.grad(energy)(place, x)
        for turn in range(3):
            q = q + sizes[0] * p
            p = p - sizes[0] * torch.func.grad(energy)(q, x) * (1 if turn < 2 else 0.5)
        change = energy(place, x) + 0.5 * momentum @ momentum - energy(q, x) - 0.5 * p @ p
        taken = torch.rand(()).log() < change
        place.copy_(torch.where(taken, q, place))
        accepted.add_(taken)
        sizes[0] = sizes[0] * (1.1 if taken else 0.9)
        return change

    return step, (place, accepted, sizes)


def _damped() -> Built:
    """Least squares by Levenberg and Marquardt."""
    weights, kept = torch.tensor([1.0, 0.5]), {"damping": 1e-2}

    def residual(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return w[0] * torch.exp(-w[1] * x[:, 0].abs()) - x[:, 1]

    def step(x: torch.Tensor) -> Any:
        r = residual(weights, x)
        jacobian = torch.func.jacfwd(residual)(weights, x)
        normal = jacobian.T @ jacobian + kept["damping"] * torch.eye(2)
        moved = weights - linalg.solve(normal, jacobian.T @ r)
        if residual(moved, x).square().sum() < r.square().sum():
            weights.copy_(moved)
            kept["damping"] *= 0.5
        else:
            kept["damping"] *= 3
        return r.square().sum()

    return step, (weights, kept)


def _balanced() -> Built:
    """Weights of losses, learned from second derivatives, with gradients set by hand."""
    base, heads = torch.nn.Linear(4, 4), torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in "ab")
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([*base.parameters(), *heads.parameters(), weights])
    kept: dict[str, Any] = {}

    def step(x: torch.Tensor) -> Any:
        losses = torch.stack([head(base(x).tanh()).square().mean() for head in heads])
        if "first" not in kept:
            kept["first"] = losses.detach()
        optimizer.zero_grad()
        (weights.detach() * losses).sum().backward(retain_graph=True)
        norms = torch.stack(
            [
                torch.autograd.grad(weights[i] * losses[i], base.weight, create_graph=True)[
                    0
                ].norm()
                for i in range(2)
            ]
        )
        pace = (losses / kept["first"]).detach()
        aim = (norms.mean() * (pace / pace.mean()) ** 1.5).detach()
        weights.grad = torch.autograd.grad((norms - aim).abs().sum(), weights)[0]
        optimizer.step()
        weights.data = weights.data * 2 / weights.data.sum()
        return losses.detach()

    return step, (base, heads, weights, optimizer, kept)


def _frozen_statistics() -> Built:
    """Running moments in double precision that end after enough rows."""

    class Normal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
            self.is_frozen = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.is_frozen:
                with torch.no_grad():
                    self.rows += len(x)
                    self.mean += (x.double().mean(0) - self.mean) * len(x) / self.rows
                    if self.rows > 30:
                        self.is_frozen = True
            return (x - self.mean).float()

    normal, model = Normal(), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(normal(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), normal.is_frozen

    return step, (normal, model, optimizer)


STEPS = (_adjoint, _factors, _sampler, _damped, _balanced, _frozen_statistics)


BESIDE = (_equilibrium,)
"""Those that decide by values how long they run."""


def leaves(build: Callable[[], Built], *, sizes: bool, planned: bool) -> list[Any]:
    torch.manual_seed(0)
    step, state = build()
    run = roam.compile(step, sizes=sizes) if planned else step
    seen = []
    for number, length in enumerate(LENGTHS):
        torch.manual_seed(100 + number)
        result = run(torch.randn(length if sizes else 8, 4))
        held = [part.state_dict() if hasattr(part, "state_dict") else part for part in state]
        seen += tensors_and_numbers([result, held, torch.get_rng_state()])
    assert not planned or run.plans
    return seen


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("sizes", [False, True])
@pytest.mark.parametrize("build", STEPS)
def test_a_plan_leaves_what_eager_leaves(build: Callable[[], Built], sizes: bool) -> None:
    assert_same_bits(
        leaves(build, sizes=sizes, planned=False), leaves(build, sizes=sizes, planned=True)
    )


@pytest.mark.auto
@needs_2_15
@pytest.mark.parametrize("build", BESIDE)
def test_a_step_beside_plans_leaves_what_eager_leaves(build: Callable[[], Built]) -> None:
    assert_same_bits(
        leaves(build, sizes=False, planned=False), leaves(build, sizes=False, planned=True)
    )
