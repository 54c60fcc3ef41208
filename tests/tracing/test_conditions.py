"""Checks in a step's code: assertions and validations of what the step computes, as eager PyTorch
makes them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import roam
from newer import needs_2_15
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
distributions = torch.distributions
Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` switches the validation of distributions off for the rest of a process."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", __debug__)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.Dropout(0.25),
        torch.nn.Linear(8, 4),
    )


def make_step(loss_of: Loss) -> Callable[..., Any]:
    def step(net, optimizer, x):
        optimizer.zero_grad()
        loss = loss_of(net, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def train(
    loss_of: Loss, wrap: Callable[..., Any], batches: list[torch.Tensor]
) -> tuple[list[Any], list[Any]]:
    """What the steps gave or raised, and what they left behind."""
    torch.manual_seed(0)
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    step = wrap(make_step(loss_of))
    outcomes: list[Any] = []
    for x in batches:
        try:
            outcomes.append(step(net, optimizer, x))
        except (AssertionError, ValueError, SystemExit, FloatingPointError) as error:
            gradients = [parameter.grad for parameter in net.parameters()]
            outcomes += [type(error).__name__, str(error), str(gradients), torch.get_rng_state()]
            outcomes += [value.clone() for value in net.state_dict().values()]
    return outcomes, tensors_and_numbers(
        [net.state_dict(), optimizer.state_dict(), torch.get_rng_state()]
    )


def batches(poisoned: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(5, 6, generator=generator) for _ in range(5)]
    if poisoned is not None:
        made[poisoned][2, 3] = math.nan
    return made


def plain_loss(net, x):
    return net(x).square().mean()


def asserted(net, x):
    loss = plain_loss(net, x)
    assert not torch.isnan(loss), f"no number: {loss}"
    return loss


def raised(net, x):
    out = net(x)
    if torch.isnan(out).any() or not (torch.isfinite(out).all() and out.abs().amax() < 1e9):
        raise ValueError("the outputs are no numbers")
    return out.square().mean()


def left(net, x):
    loss = plain_loss(net, x)
    if not math.isfinite(loss.item()):
        print("stopping")
        sys.exit(1)
    return loss


def by_numpy(net, x):
    loss = plain_loss(net, x)
    if numpy.isnan(loss.item()):
        raise FloatingPointError
    return loss


def is_bad(loss):
    return torch.isnan(loss).any().item() or torch.isinf(loss).any().item()


def by_helper(net, x):
    loss = plain_loss(net, x)
    if is_bad(loss):
        raise ValueError
    return loss


def passed(net, x):
    loss = plain_loss(net, x)
    if loss < 1e9:
        loss = loss * 2
    else:
        raise ValueError
    return loss


def of_all(net, x):
    loss = plain_loss(net, x)
    torch._assert(torch.isfinite(loss), "no number")
    assert torch.allclose(loss, loss)
    assert torch.equal(loss, loss.clone())
    return loss


def of_every(net, x):
    loss = plain_loss(net, x)
    if not all(torch.isfinite(parameter).all() for parameter in net.parameters()):
        raise ValueError
    if any(torch.isnan(parameter).any() for parameter in net.parameters()):
        raise ValueError
    return loss


def as_told(net, x, check=True):
    loss = plain_loss(net, x)
    if check and torch.logical_or(loss.isnan(), loss.isinf()):
        raise ValueError
    if check and not loss < 1e9:
        raise ValueError
    return loss


def gaussian(net, x):
    mean, spread = net(x).chunk(2, dim=1)
    posterior = distributions.Normal(mean, torch.nn.functional.softplus(spread))
    divergence = distributions.kl_divergence(posterior, distributions.Normal(0.0, 1.0)).sum()
    return divergence - distributions.Normal(posterior.rsample(), 1.0).log_prob(x[:, :2]).sum()


def categorical(net, x):
    policy = distributions.Categorical(logits=net(x))
    return -(policy.log_prob(policy.sample()) * 2 + policy.entropy()).mean()


def dirichlet(net, x):
    return -distributions.Dirichlet(net(x).exp()).log_prob(torch.full((5, 4), 0.25)).mean()


LOSSES = [
    asserted,
    raised,
    left,
    by_numpy,
    by_helper,
    as_told,
    passed,
    of_all,
    gaussian,
    categorical,
    dirichlet,
]


@pytest.mark.parametrize("loss_of", LOSSES)
def test_checks_that_pass_are_made_by_plan(loss_of: Loss) -> None:
    compiled: list[Any] = []

    def wrap(step: Any) -> Any:
        compiled.append(roam.compile(step, poison=True))
        return compiled[0]

    for eager, ours in zip(
        train(loss_of, lambda step: step, batches()), train(loss_of, wrap, batches()), strict=True
    ):
        assert_same_bits(eager, ours)
    assert len(compiled[0].plans) == 2


@pytest.mark.parametrize("poisoned", [0, 3])
@pytest.mark.parametrize("loss_of", [*LOSSES[:6], *LOSSES[7:]])
def test_a_check_that_fails_raises_what_eager_raises_and_leaves_what_eager_leaves(
    loss_of: Loss, poisoned: int
) -> None:
    for eager, ours in zip(
        *(train(loss_of, wrap, batches(poisoned)) for wrap in (lambda step: step, roam.compile)),
        strict=True,
    ):
        assert len(eager) >= 5
        assert_same_bits(eager, ours)


def test_a_failed_check_that_the_step_catches_itself_runs_the_steps_other_way() -> None:
    def caught(net, x):
        try:
            return asserted(net, x)
        except AssertionError:
            return net(x.nan_to_num()).square().mean() * 0.5

    for eager, ours in zip(
        *(train(caught, wrap, batches(2)) for wrap in (lambda step: step, roam.compile)),
        strict=True,
    ):
        assert_same_bits(eager, ours)


def test_nothing_is_updated_before_a_check_that_comes_first() -> None:
    torch.manual_seed(0)
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    step = roam.compile(make_step(asserted))
    for x in batches()[:2]:
        step(net, optimizer, x)
    for runner in step._captures[0].runners:
        program = runner._program
        order = [int(index) for index in runner.plan.order]
        (check,) = (index for index, call in enumerate(program.calls) if call.is_check)
        there = {program.storage_of(slot) for _, slot in program.referenced}
        later = {
            index
            for index, call in enumerate(program.calls)
            if index > check and any(program.storage_of(slot) in there for slot in call.mutates)
        }
        assert len(later) >= len(list(net.parameters()))
        assert not later & set(order[: order.index(check)])


def test_a_check_that_fails_after_an_update_says_what_was_updated() -> None:
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @roam.compile
    def step(x):
        optimizer.zero_grad()
        net(x).mean().backward()
        optimizer.step()
        assert torch.isfinite(net.weight).all()

    step(torch.ones(3, 4))
    with pytest.raises(roam.ExecutionError, match=r"Already updated.*weight") as caught:
        step(torch.full((3, 4), math.inf))
    assert caught.value.code == "torn"
    with pytest.raises(roam.ExecutionError, match=r"load .* again"):
        step(torch.ones(3, 4))


def test_asynchronous_assertions_come_before_updates_too() -> None:
    def loss_of(net, x):
        loss = plain_loss(net, x)
        torch._assert_async(torch.isfinite(loss))
        return loss

    torch.manual_seed(0)
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    step = roam.compile(make_step(loss_of))
    step(net, optimizer, batches()[0])
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(RuntimeError, match="single nonzero"):
        step(net, optimizer, batches(0)[0])
    assert_same_bits(before, [parameter.detach() for parameter in net.parameters()])


def doubled(net, x):
    loss = plain_loss(net, x)
    return loss * 2 if loss > 0.5 else loss


def either(net, x):
    loss = plain_loss(net, x)
    if loss > 0.5:
        loss = loss * 2
    return loss


def one_of(net, x):
    loss = plain_loss(net, x)
    assert loss > 0.5 or loss < 0.1
    return loss


def validated(net, x):
    covariance = torch.cov(net(x).T) + torch.eye(4)
    return -distributions.MultivariateNormal(torch.zeros(4), covariance).log_prob(x[:, :4]).mean()


ASKED_BESIDE = [of_every, doubled, either, one_of]


@pytest.mark.parametrize("loss_of", ASKED_BESIDE)
def test_questions_that_are_no_checks_are_refused(loss_of: Loss) -> None:
    with pytest.raises(roam.CaptureError) as caught:
        train(loss_of, roam.compile, batches())
    assert caught.value.code == "value_reached_python"


@pytest.mark.auto
@needs_2_15
@pytest.mark.parametrize(
    ("loss_of", "poisoned"),
    [*((asked, 2) for asked in ASKED_BESIDE), (one_of, None), (validated, None)],
)
def test_questions_that_are_no_checks_are_answered_as_eagerly(
    loss_of: Loss, poisoned: int | None
) -> None:
    for eager, ours in zip(
        *(train(loss_of, wrap, batches(poisoned)) for wrap in (lambda step: step, roam.compile)),
        strict=True,
    ):
        assert_same_bits(eager, ours)


def left_out(net, optimizer, loss):
    loss.backward()
    if torch.isfinite(loss):
        optimizer.step()


def left_early(net, optimizer, loss):
    if not math.isfinite(loss.item()):
        return
    loss.backward()
    optimizer.step()


def left_for_its_gradient(net, optimizer, loss):
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if torch.isnan(norm) or norm.isinf():
        optimizer.zero_grad()
    else:
        optimizer.step()


def raised_for_its_gradient(net, optimizer, loss):
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()


@pytest.mark.auto
@needs_2_15
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(
    "update", [left_out, left_early, left_for_its_gradient, raised_for_its_gradient]
)
def test_updates_that_are_left_out_where_numbers_are_not_finite(
    update: Callable[..., None], to_none: bool
) -> None:
    def train(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(4, 6),
            torch.nn.BatchNorm1d(6),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(6, 1),
        )
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=to_none)
            loss = net(x).square().mean()
            update(net, optimizer, loss)
            return loss.detach()

        compiled, losses = wrap(step), []
        for place in range(7):
            x = torch.randn(5, 4)
            x[0, 0] = math.inf if place in (0, 3, 4) else x[0, 0]
            try:
                losses.append(compiled(x))
            except RuntimeError as error:
                losses.append(str(error))
        if compiled is not step:
            assert compiled.runs_beside == (update is not raised_for_its_gradient)
        return tensors_and_numbers(
            losses, net.state_dict(), optimizer.state_dict(), torch.get_rng_state()
        )

    assert_same_bits(train(lambda step: step), train(roam.compile))


@pytest.mark.parametrize("reads", [False, True])
def test_gradients_that_are_set_to_zero_first_need_no_copies(reads: bool) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(5, 4)).sum().backward()
    gradients = [parameter.grad for parameter in net.parameters()]

    @roam.compile
    def step(x):
        before = gradients[0].sum() if reads else 0.0
        optimizer.zero_grad(set_to_none=False)
        loss = net(x).square().mean()
        if not torch.isfinite(loss):
            raise ValueError("the loss is not finite")
        loss.backward()
        if gradients[0].abs().max() > 1e30:
            raise ValueError("the gradient is too large")
        optimizer.step()
        return loss.detach(), before

    step(torch.ones(5, 4))
    (captured,) = step._captures
    (runner,) = captured.runners
    names = [storage.name for storage in runner._program.storages]
    copied = [name for name in names if name.startswith("copy of ")]
    assert len(copied) == reads, copied
    kept = [gradient.clone() for gradient in gradients]
    with pytest.raises(ValueError, match="is not finite"):
        step(torch.full((5, 4), math.inf))
    # As eager PyTorch leaves them: set to zero, when the loss is looked at.
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)
    assert all(
        one is parameter.grad for one, parameter in zip(gradients, net.parameters(), strict=True)
    )
    assert any(gradient.any() for gradient in kept)
