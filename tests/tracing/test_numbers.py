"""Numbers that a step keeps in Python: counters, running sums and averages are live, whoever holds
them."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_hostile import train

import roam
from newer import needs_2_15
from steps import batches
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
functional = torch.nn.functional

Body = Callable[[Any, torch.Tensor, torch.Tensor], Any]
STEPS = 6
RATES = torch.tensor([0.1, 0.2, 0.05, 0.3, 0.01, 0.02, 0.4], dtype=torch.float64)


class Meter:
    total = 0


class Named:
    pass


first, second = Named(), Named()


class Lamb(torch.optim.Optimizer):
    """Counts its steps in its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "beta": 0.9})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            correction = 1 - group["beta"] ** group["step"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                state["average"].lerp_(p.grad, 1 - group["beta"])
                p.add_(state["average"] / correction, alpha=-group["lr"])


def make() -> Any:
    torch.manual_seed(0)
    Meter.total = 0
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.25), torch.nn.Linear(8, 3))
    my = SimpleNamespace(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    my.steps, my.seen, my.loss, my.average, my.sums, my.lamb = (
        0,
        0,
        0.0,
        None,
        [0.0, 0],
        Lamb(net.parameters()),
    )
    my.flag, my.named = False, {first: 0, second: "abc"}
    for group in my.lamb.param_groups:
        group["step"] = 0
    return my


def count(my, x, y):
    my.steps += 1
    my.seen += x.shape[0]
    return train(my, x, y)


def warm_up(my, x, y):
    my.steps += 1
    return train(my, x, y, my.steps / 10)


def count_in_a_class(my, x, y):
    Meter.total += 1
    return train(my, x, y, 1.0 / Meter.total)


def sum_of_losses(my, x, y):
    loss = train(my, x, y)
    my.loss += loss.item()
    my.sums[0] += loss.item() * 2
    my.sums[1] += 1
    return my.loss / my.sums[1]


def moving_average(my, x, y):
    loss = train(my, x, y)
    my.average = loss.item() if my.average is None else 0.9 * my.average + 0.1 * loss.item()
    return loss


def every_third(my, x, y):
    my.steps += 1
    loss = functional.cross_entropy(my.net(x), y)
    loss.backward()
    if my.steps % 3 == 0:
        my.optimizer.step()
        my.optimizer.zero_grad()
    return loss


def freeze_after_three(my, x, y):
    my.steps += 1
    return train(my, x, y, 1.0 if my.steps <= 3 else 0.1)


def count_in_groups(my, x, y):
    my.lamb.zero_grad()
    loss = functional.cross_entropy(my.net(x), y)
    loss.backward()
    my.lamb.step()
    return loss


def odd_steps_by_bits(my, x, y):
    my.steps += 1
    my.seen = (my.seen << 1 | my.steps & 1) ^ 5 & ~my.steps >> 1
    return train(my, x, y, 2.0 if my.steps & 1 else 1.0)


def powers_of_two(my, x, y):
    my.steps += 1
    return train(my, x, y, 0.5 if not my.steps & (my.steps - 1) else 1.0)


def epochs_and_steps(my, x, y):
    my.steps += 1
    epoch, step = divmod(my.steps, 4)
    my.loss, my.sums[0] = divmod(my.loss + 1.75, 0.5)
    my.seen, _ = divmod(100, my.steps)
    return train(my, x, y, 1.0 / (epoch + step + 1))


def whole_numbers(my, x, y):
    my.loss += 0.5
    return train(my, x, y, 1.0 if my.loss.is_integer() else 0.5)


def compared_with_none(my, x, y):
    my.steps += 1
    is_set = my.steps != None and my.loss != "none" and my.steps not in (None, ())  # noqa: E711
    return train(my, x, y, 1.0 if is_set else 0.5)


def fade_the_momentum(my, x, y):
    my.optimizer.param_groups[0]["momentum"] *= 0.5
    return train(my, x, y)


def start_over(my, x, y):
    my.steps = 0 if my.steps == 2 else my.steps + 1
    return train(my, x, y, my.steps + 1)


def sometimes_none(my, x, y):
    my.steps += 1
    loss = train(my, x, y)
    my.average = None if my.steps % 3 == 0 else loss.item()
    return loss


def set_to_the_size(my, x, y):
    my.seen = x.shape[0]
    return train(my, x, y)


def everything(my: Any) -> list[Any]:
    numbers = [
        my.steps,
        my.seen,
        my.loss,
        my.average,
        my.sums,
        Meter.total,
        my.lamb.param_groups[0]["step"],
    ]
    return tensors_and_numbers(
        numbers,
        my.net.state_dict(),
        my.optimizer.state_dict(),
        my.lamb.state_dict(),
        torch.get_rng_state(),
    )


def outcome(
    wrap: Callable[[Any], Any], body: Body, change: Callable[[Any, int], None]
) -> tuple[list[Any], int]:
    """What the steps return and leave, after each of them, and how often they were captured."""
    my = make()
    step = wrap(lambda x, y: body(my, x, y))
    seen: list[Any] = []
    for index, (x, y) in enumerate(batches(STEPS)):
        change(my, index)
        seen += [*tensors_and_numbers(step(x, y)), *everything(my)]
    return seen, len(getattr(step, "_captures", []))


def right_of_numpys_numbers(my, x, y):
    my.steps += 1
    weight = np.float64(0.3)
    loss = train(my, x, y, weight**my.steps + weight / my.steps)
    my.loss += weight * loss.item() + weight // my.steps - weight % my.steps
    return weight - loss.item()


def compared_with_numpys_numbers(my, x, y):
    my.steps += 1
    is_late = np.float64(3) <= my.steps
    assert isinstance(is_late, np.bool_)
    return train(my, x, y, 0.5 if is_late else 1.0)


def by_functions_of_numpys(my, x, y):
    my.steps += 1
    rate = 0.05 * (1 + np.cos(np.pi * my.steps / STEPS)) / np.sqrt(my.steps)
    my.optimizer.param_groups[0]["lr"] = rate * np.exp(-0.5 * rate)
    return train(my, x, y), rate


def sums_of_numpys(my, x, y):
    my.steps += 1
    loss = train(my, x, y)
    my.loss = np.float64(0.9) * my.loss + np.sqrt(loss.item())
    my.is_high, my.is_low = my.loss > 1e9, loss.item() < np.float64(-1e9)
    tensors = torch.tensor(my.loss), torch.tensor([1.0, my.loss]), loss.detach() * my.loss
    plain = round(my.loss), torch.tensor(np.sqrt(my.loss))
    return loss, my.loss, my.is_high, my.is_low, tensors, plain


def by_functions_of_pythons(my, x, y):
    my.steps += 1
    angle = math.atan2(my.steps, 3) + math.asin(1 / my.steps) + math.fmod(my.steps, 0.7)
    return train(my, x, y, math.erf(angle) * math.fabs(math.sinh(-angle)))


def in_new_tensors(my, x, y):
    my.steps += 1
    rate = 1 / my.steps
    weights = torch.tensor([rate, 2 * rate, my.steps, 1], dtype=torch.bfloat16).float()
    table = torch.tensor([[my.steps, 1], [2, 3]]), x.new_tensor((rate, 0.5)), torch.tensor([rate])
    loss = train(my, x, y, torch.as_tensor([0.5, rate]).sum())
    weights = weights, torch.stack([torch.tensor(1.0), torch.tensor(rate)])
    norms = [p.grad.norm() for p in my.net.parameters() if p.grad is not None]
    sums = torch.tensor([x.sum(), y.sum(), 1, rate]), torch.tensor([[y.sum()], [y.max()]])
    return loss, weights, table, torch.tensor([loss.item(), rate]), torch.tensor(norms).norm(), sums


def looked_up_in_tensors(my, x, y):
    """As the refusal of an index says."""
    for group in my.optimizer.param_groups:
        group["lr"] = RATES[torch.tensor([my.steps])].item()
    loss = train(my, x, y)
    position = my.steps % 3
    ring = torch.zeros(4, 6)
    ring[torch.tensor([position])] = x[0]
    ring[torch.arange(2) + position] += x[1:3]
    my.steps += 1
    return loss, ring, ring[torch.tensor([position])][0]


def draws_by_them(my, x, y):
    my.steps += 1
    noise = torch.empty_like(x).normal_(0.0, 1 / my.steps)
    shift = torch.empty_like(x).uniform_(-0.1 * my.steps, 0.1 * my.steps)
    kept = torch.empty_like(x).bernoulli_(p=my.steps / 10)
    others = (
        torch.normal(0.0, 1 / my.steps, (3,)),
        torch.normal(x, 1 / my.steps),
        torch.bernoulli(x, my.steps / 10) + x.bernoulli(my.steps / 10),
        torch.empty_like(x).geometric_(my.steps / 10),
    )
    loss = train(my, x * kept + noise + shift, y)
    return loss, torch.nn.init.normal_(noise, std=my.steps), others


def drops_out_by_them(my, x, y):
    rate = max(0.0, 0.5 - my.steps / 8)
    my.steps += 1
    masked = functional.dropout(functional.dropout(x.t(), rate).t() + 0, rate, inplace=True)
    return train(my, functional.dropout(masked, rate, training=False), y), masked


def raised_to_whole_powers(my, x, y):
    my.steps += 1
    my.seen = my.steps**2 + (-my.steps) ** 3
    weight = my.steps**0 * 0.1
    return train(my, x, y, weight + pow(my.steps, 2) / 100)


def cuts_at_a_share(my, x, y):
    my.steps += 1
    share = 1 - 0.9**my.steps
    small = x.quantile(share, dim=1, keepdim=True)
    return train(my, x * (x > torch.quantile(x, q=share)) + small, y), torch.nanquantile(x, share)


def looks_at_the_type(my, x, y):
    my.steps += 1
    return train(my, x, y, 1.0 if type(my.steps) is int else 0.5)


def check(body: Body, change: Callable[[Any, int], None], captures: int) -> None:
    eager, _ = outcome(lambda step: step, body, change)
    planned, made = outcome(lambda step: roam.compile(step, poison=True), body, change)
    assert_same_bits(eager, planned)
    assert made == captures


@pytest.mark.parametrize(
    ("body", "captures"),
    [
        (count, 1), (warm_up, 1), (count_in_a_class, 1), (sum_of_losses, 1), (count_in_groups, 1), (set_to_the_size, 1),
        (moving_average, 2),  # there is none at first
        # Gradients are there or not, updated or not, and the optimizer has state or not.
        (every_third, 4),
        (odd_steps_by_bits, 2), (powers_of_two, 2), (epochs_and_steps, 1), (whole_numbers, 2),
        (compared_with_none, 1), (looks_at_the_type, 1),
        (by_functions_of_pythons, 1), (in_new_tensors, 1), (looked_up_in_tensors, 1),
        (right_of_numpys_numbers, 2),  # the sum is a float of Python's at first
        (raised_to_whole_powers, 1),
        (freeze_after_three, 2), (sometimes_none, 3), (start_over, 2), (fade_the_momentum, 1),
    ],
)  # fmt: skip
def test_numbers_are_live(body: Body, captures: int) -> None:
    check(body, lambda my, index: None, captures)


@pytest.mark.auto
@needs_2_15
@pytest.mark.parametrize(
    "body",
    [
        sums_of_numpys,
        compared_with_numpys_numbers,
        by_functions_of_numpys,
        cuts_at_a_share,
    ],
)
def test_numbers_that_numpy_calculates_with_are_pythons_beside_a_plan(body: Body) -> None:
    check(body, lambda my, index: None, 0)


def jump(my: Any, index: int) -> None:
    if index == 3:
        my.steps = 20


def lower_the_sum(my: Any, index: int) -> None:
    if index == 3:
        my.loss = -1.5


def other_kind(my: Any, index: int) -> None:
    if index == 3:
        my.steps = 0.5


def to_a_tensor(my: Any, index: int) -> None:
    if index == 3:
        my.loss = torch.tensor(my.loss)


def to_another_number(my: Any, index: int) -> None:
    if index == 3:
        my.steps = True


def take_away(my: Any, index: int) -> None:
    if index == 3:
        my.average = None


@pytest.mark.parametrize(
    ("body", "change", "captures"),
    [
        (warm_up, jump, 1),
        (sum_of_losses, lower_the_sum, 1),
        (warm_up, other_kind, 2),
        (moving_average, take_away, 2),
    ],
)
def test_numbers_may_be_set_between_steps(
    body: Body, change: Callable[[Any, int], None], captures: int
) -> None:
    check(body, change, captures)


def perplexity(my, x, y):
    loss = functional.cross_entropy(my.net(x), y)
    try:
        my.average = math.exp(loss.item() * my.bound.item())
    except OverflowError:
        my.average = math.inf
    my.optimizer.zero_grad()
    loss.backward()
    my.optimizer.step()
    return loss


def share_of_what_was_counted(my, x, y):
    loss = functional.cross_entropy(my.net(x), y) * (1.0 / (y < my.bound).sum().item())
    my.optimizer.zero_grad()
    loss.backward()
    my.optimizer.step()
    return loss


@pytest.mark.parametrize(("body", "bounds"), [
    (perplexity, [1, 1, 10_000, 1, 10_000, 1]), (share_of_what_was_counted, [3, 3, 0, 3, 0, 3]),
])  # fmt: skip
def test_arithmetic_that_raises_is_left_to_the_step_itself(body: Body, bounds: list[int]) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        my = make()
        step = wrap(lambda x, y: body(my, x, y))
        seen: list[Any] = []
        for (x, y), bound in zip(batches(STEPS), bounds, strict=True):
            my.bound = torch.tensor(bound)
            try:
                seen += tensors_and_numbers(step(x, y))
            except ZeroDivisionError as error:
                seen.append(str(error))
            seen += everything(my)
        return seen

    step: Any = None

    def compiled(function: Any) -> Any:
        nonlocal step
        step = roam.compile(function, poison=True)
        return step

    assert_same_bits(run(lambda function: function), run(compiled))
    assert step.plans


class ByShare(torch.optim.SGD):
    """Divides each rate by the sum of the rates so far, which is 0 until one of them is not."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["total"] += group["lr"]
            try:
                share = group["lr"] / group["total"]
            except ZeroDivisionError:
                share = 0.0
            for p in group["params"]:
                p.add_(p.grad, alpha=-share)


@pytest.mark.parametrize("pool", [False, True])
def test_arithmetic_on_older_numbers_comes_before_what_the_forward_pass_changes(pool: bool) -> None:
    """As in `RAdamScheduleFree` of the package `schedulefree`."""

    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
        )
        optimizer = ByShare(net.parameters(), lr=0.0)
        optimizer.param_groups[0]["total"] = 0.0

        def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            return loss

        step, seen = wrap(train_step), []
        for index, (x, y) in enumerate(batches(STEPS)):
            optimizer.param_groups[0]["lr"] = 0.1 if index >= 2 else 0.0
            seen += tensors_and_numbers(step(x, y), net.state_dict(), optimizer.state_dict())
        return seen

    eager = run(lambda step: step)
    assert_same_bits(eager, run(lambda step: roam.compile(step, pool=pool, poison=pool)))


def becomes_text(my, x, y):
    my.steps = f"step {my.steps + 1}"
    return train(my, x, y)


def shows_it(my, x, y):
    my.steps += 1
    my.text = f"step {my.steps}"
    return train(my, x, y)


def counts_at_the_head_of_a_list(my, x, y):
    my.sums.insert(0, my.steps)
    return train(my, x, y)


def longer_and_longer(my, x, y):
    my.steps += 1
    return train(my, x, y) + my.net(x)[: my.steps].mean()


def with_numpy(my, x, y):
    my.steps += 1
    return train(my, x, y, (np.int32(2**30) * my.steps) / 2.0**30)


def mean_with_numpy(my, x, y):
    my.loss += train(my, x, y).item()
    my.average = np.mean([my.loss, 1.0])


def right_of_an_array(my, x, y):
    return (np.ones(2) * train(my, x, y).item()).sum()


def right_of_numpys_own_numbers(my, x, y):
    return np.float32(0.5) * train(my, x, y).item()


def by_a_function_of_numpys(my, x, y):
    return np.multiply.outer(np.float64(0.5), train(my, x, y).item())


def catches_the_refusal(my, x, y):
    my.steps += 1
    factor = 1.0
    with contextlib.suppress(Exception):
        factor = [0.1, 0.2, 0.3, 0.4][my.steps]
    return train(my, x, y, factor)


def asks_before_it_sets(my, x, y):
    my.steps += 1
    factor = 2.0 if my.steps > my.seen else 1.0
    my.seen = 100
    return train(my, x, y, factor)


def counts_a_flag(my, x, y):
    my.flag += 1
    return train(my, x, y)


def two_of_one_name(my, x, y):
    my.named[first] += 1
    return train(my, x, y, len(my.named[second]))


def state_of_no_parameter(my, x, y):
    state = my.lamb.state
    state["all"] = {"steps": state["all"]["steps"] + 1 if "all" in state else 1}
    return train(my, x, y)


@pytest.mark.parametrize(
    "body",
    [
        draws_by_them, drops_out_by_them, becomes_text, shows_it, counts_at_the_head_of_a_list, longer_and_longer, with_numpy,
        mean_with_numpy, right_of_an_array, right_of_numpys_own_numbers, by_a_function_of_numpys, catches_the_refusal, two_of_one_name, state_of_no_parameter,
    ],
)  # fmt: skip
def test_what_else_a_step_does_with_them_is_refused(body: Body) -> None:
    my = make()
    before = everything(my)
    x, y = batches(1)[0]
    with pytest.raises(roam.CaptureError):
        roam.compile(lambda x, y: body(my, x, y)).plan(x, y)
    assert_same_bits(before, everything(my))


@needs_2_15
@pytest.mark.parametrize("body", [draws_by_them, drops_out_by_them])
def test_chance_by_them_runs_beside_a_plan(body: Body) -> None:
    eager, _ = outcome(lambda step: step, body, lambda my, number: None)
    beside, _ = outcome(
        functools.partial(roam.compile, python="auto"), body, lambda my, number: None
    )
    assert_same_bits(eager, beside)


def by_a_list(my, x, y):
    my.steps += 1
    return train(my, x, y, RATES.tolist()[my.steps - 1])


def by_a_row(my, x, y):
    my.steps += 1
    return train(my, x, y, RATES[my.steps - 1])


def by_an_array(my, x, y):
    my.steps += 1
    return train(my, x, y, RATES_OF_NUMPY[my.steps - 1])


RATES_OF_NUMPY = RATES.numpy().copy()


@pytest.mark.parametrize("body", [by_a_list, by_a_row, by_an_array])
def test_an_index_is_refused_with_what_to_write(body: Body) -> None:
    my = make()
    with pytest.raises(roam.CaptureError, match=r"rates\[torch\.tensor\(\[i\]\)\]\.item\(\)"):
        roam.compile(lambda x, y: body(my, x, y))(*batches(1)[0])


@pytest.mark.parametrize(("body", "captures"), [(asks_before_it_sets, 2), (counts_a_flag, 1)])
def test_what_the_first_step_alone_does_with_them_is_done_by_it(body: Body, captures: int) -> None:
    check(body, lambda my, index: None, captures)
