"""What the user's or a library's code raises reaches the caller as it is, from the plain step and
from a compiled one. A step whose message asks for values runs beside its plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roam
from newer import IS_NEW, needs_2_15

pytestmark = pytest.mark.usefixtures("one_thread")


class Own(Exception):
    """The user's."""


def train(net: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def before(net, optimizer, x):
    raise Own("before")


def after(net, optimizer, x):
    train(net, optimizer, x)
    raise Own("after")


def with_a_cause(net, optimizer, x):
    try:
        return {}["missing"]
    except KeyError as error:
        raise Own("no such key") from error


def with_a_number(net, optimizer, x):
    raise Own(f"the sum is {x.sum().item():.3f}")


def with_a_number_by_percent(net, optimizer, x):
    raise Own("the sum is %s" % x.sum().item())  # noqa: UP031


def with_a_number_by_format(net, optimizer, x):
    raise Own("the sum is {:.3f}".format(x.sum().item()))  # noqa: UP032


def with_a_number_as_it_is(net, optimizer, x):
    raise Own(x.sum().item(), float(x[0, 0]), int(x[0, 0]), bool(x[0, 0] > 0))


def with_a_tensor(net, optimizer, x):
    raise Own(f"the batch is {x}")


def with_an_array(net, optimizer, x):
    raise Own(x.numpy().shape, x.tolist())


def with_a_loss(net, optimizer, x):
    raise Own(f"the loss is {train(net, optimizer, x).item()}")


def if_the_loss_is_high(net, optimizer, x):
    loss = net(x).square().mean()
    if loss.item() > -1:
        raise Own(f"the loss is {loss.item()}, {loss}")


def asserted(net, optimizer, x):
    assert x.shape[0] == 7, f"{x.shape[0]} rows, {x.sum().item()}"


def by_a_function(net, optimizer, x):
    def fail(value: float) -> None:
        raise Own(f"{value:.3f}")

    fail(x.sum().item())


def in_a_hook(net, optimizer, x):
    def hook(gradient):
        raise Own(f"{gradient.sum().item():.3f}")

    out = net(x)
    out.register_hook(hook)
    out.sum().backward()


def of_a_library(net, optimizer, x):
    torch.distributions.Normal(net(x), net(x) - 100, validate_args=True).rsample()


STEPS = [value for value in list(globals().values()) if getattr(value, "__module__", "") == __name__ and callable(value) and value not in (Own, train)]  # fmt: skip


def raised(call: Callable[..., Any], *args: Any) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - compared with another
        call(*args)
    return caught.value


@pytest.mark.auto
@needs_2_15
@pytest.mark.parametrize("step", STEPS)
def test_an_exception_of_ones_own_reaches_the_caller(step: Any) -> None:
    def state() -> tuple[Any, ...]:
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        return net, torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(3, 4)

    mine, theirs = state(), state()
    compiled = roam.compile(step)
    for _ in range(2):
        plain, planned = raised(step, *mine), raised(compiled, *theirs)
        assert type(planned) is type(plain)
        assert planned.args == plain.args
        assert type(planned.__cause__) is type(plain.__cause__)
        assert all(map(torch.equal, mine[0].parameters(), theirs[0].parameters()))
    found = roam.compare(step, *state())
    assert found.outcome in ("undecided", "refused")
    if found.outcome == "refused":
        assert found.error.code == "value_reached_python"
    else:
        assert type(found.error) is type(plain)


def test_what_raises_only_for_some_values_is_compared_as_it_is() -> None:
    def looked_up(x: torch.Tensor) -> int:
        return {1: 2}[x.sum().item()]

    assert isinstance(roam.compare(looked_up, torch.ones(3)).error, KeyError)


@pytest.mark.parametrize("python", ["idle", "auto"])
def test_a_message_that_the_step_handles_itself(python: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            raise Own(f"{x.sum().item()}")
        except Own:
            return x * 2

    compiled, x = roam.compile(step, python=python), torch.ones(3)
    if python == "idle" or not IS_NEW:
        with pytest.raises(roam.CaptureError) as refusal:
            compiled(x)
        assert refusal.value.code == "value_reached_python"
    else:
        for _ in range(4):
            assert torch.equal(compiled(x), x * 2)


def test_a_shape_error_that_the_step_catches_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """PyTorch logs what a fake kernel raises, with a traceback."""
    net = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            out = net(x) @ x
        except RuntimeError:
            out = net(x)
        loss = out.sum()
        loss.backward()
        return loss

    roam.compile(step)(torch.randn(3, 4))
    assert not [record for record in caplog.records if record.name.startswith("torch")]
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled
