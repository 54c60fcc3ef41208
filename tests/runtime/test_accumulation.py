"""Gradients accumulated in a step and across calls: a compiled step leaves in `.grad` what eager
PyTorch would use from there."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from steps import batches
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
functional = torch.nn.functional
Wrap = Callable[..., Any]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.25), torch.nn.Linear(8, 3))


def loss_of(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(net(x), y)


def both(script: Callable[[Wrap], list[Any]], **options: Any) -> None:
    """What a script returns has the same bits with eager steps and with compiled ones."""
    outcomes = []
    for wrap in (lambda step: step, functools.partial(roam.compile, poison=True, **options)):
        torch.manual_seed(0)
        outcomes.append(tensors_and_numbers(script(wrap), torch.get_rng_state()))
    assert_same_bits(*outcomes)


def states(*parts: Any) -> list[Any]:
    return tensors_and_numbers([part.state_dict() for part in parts])


def gradients(*nets: torch.nn.Module) -> list[Any]:
    return tensors_and_numbers([parameter.grad for net in nets for parameter in net.parameters()])


@pytest.fixture(params=OPTIMIZERS)
def make_optimizer(request: pytest.FixtureRequest) -> Callable[[Any], torch.optim.Optimizer]:
    return OPTIMIZERS[request.param]


@pytest.fixture(params=[True, False], ids=["to None", "to zero"])
def set_to_none(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class TestInsideOneStep:
    def test_micro_batches(self, make_optimizer: Any, set_to_none: bool) -> None:
        def script(wrap):
            net = network()
            optimizer = make_optimizer(net.parameters())

            @wrap
            def step(micro):
                optimizer.zero_grad(set_to_none=set_to_none)
                total = torch.zeros(())
                for x, y in micro:
                    loss = loss_of(net, x, y) / len(micro)
                    loss.backward()
                    total = total + loss.detach()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                optimizer.step()
                return total

            data = batches(20)
            return [[step(data[i : i + 4]), states(net, optimizer)] for i in range(0, 20, 4)]

        both(script)

    def test_a_last_step_of_fewer_micro_batches_is_captured_once(self) -> None:
        captures = []

        def script(wrap):
            net = network()
            optimizer = torch.optim.AdamW(net.parameters())

            @wrap
            def step(micro):
                for x, y in micro:
                    loss_of(net, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()

            seen = []
            for _ in range(3):
                for count in (3, 3, 1):
                    step(batches(count))
                    seen.append(states(net, optimizer))
            captures.append(len(getattr(step, "_captures", [])))
            return seen

        both(script)
        assert captures == [0, 2]


class TestAcrossCalls:
    def test_a_flag_that_says_when_to_update(self, make_optimizer: Any, set_to_none: bool) -> None:
        def script(wrap):
            net = network()
            optimizer = make_optimizer(net.parameters())

            @wrap
            def step(x, y, update):
                loss = loss_of(net, x, y)
                loss.backward()
                if update:
                    torch.nn.utils.clip_grad_value_(net.parameters(), 0.05)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
                return loss

            return [
                [step(x, y, index % 3 == 2), states(net, optimizer), gradients(net)]
                for index, (x, y) in enumerate(batches(14))
            ]

        both(script)

    def test_two_functions_on_one_model(self, make_optimizer: Any, set_to_none: bool) -> None:
        def script(wrap):
            net = network()
            optimizer = make_optimizer(net.parameters())

            @wrap
            def accumulate(x, y):
                loss = loss_of(net, x, y)
                loss.backward()
                return loss

            @wrap
            def update(x, y):
                loss = accumulate(x, y)
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
                return loss

            return [
                [
                    (update if index % 3 == 2 else accumulate)(x, y),
                    states(net, optimizer),
                    gradients(net),
                ]
                for index, (x, y) in enumerate(batches(12))
            ]

        both(script)

    @pytest.mark.parametrize("updates_by_plan", [True, False])
    def test_gradients_that_the_step_itself_does_not_use(
        self, make_optimizer: Any, set_to_none: bool, updates_by_plan: bool
    ) -> None:
        """A function that zeroes gradients and makes new ones leaves them for whoever updates."""

        def script(wrap):
            net = network()
            optimizer = make_optimizer(net.parameters())

            @wrap
            def begin(x, y):
                optimizer.zero_grad(set_to_none=set_to_none)
                loss = loss_of(net, x, y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                return loss

            def update():
                optimizer.step()

            finish = wrap(update) if updates_by_plan else update
            seen = []
            for x, y in batches(6):
                seen += [begin(x, y), gradients(net)]
                finish()
                seen.append(states(net, optimizer))
            return seen

        both(script)

    def test_clipped_parameters_do_not_use_gradients_up(self) -> None:
        def script(wrap):
            net = network()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

            @wrap
            def step(x, y):
                optimizer.zero_grad()
                loss_of(net, x, y).backward()
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.clamp_(-0.2, 0.2)

            seen = []
            for x, y in batches(4):
                step(x, y)
                seen += [states(net), gradients(net)]
                optimizer.step()
            return seen

        both(script)

    def test_gradients_that_flow_into_another_model(self) -> None:
        """Of two models that train against each other, one's gradients from the other's loss stay
        until it is zeroed."""

        def script(wrap):
            maker, judge = torch.nn.Linear(4, 6), network()
            optimizers = [torch.optim.AdamW(net.parameters()) for net in (maker, judge)]

            @wrap
            def step(noise, x, y):
                optimizers[1].zero_grad()
                (loss_of(judge, x, y) - judge(maker(noise).detach()).square().mean()).backward()
                optimizers[1].step()
                optimizers[0].zero_grad()
                loss = judge(maker(noise)).square().mean()
                loss.backward()
                optimizers[0].step()
                return loss

            return [
                [step(x[:, :4], x, y), states(maker, judge, *optimizers), gradients(judge)]
                for x, y in batches(6)
            ]

        both(script)

    def test_what_an_optimizer_used_is_gone(self) -> None:
        net = network()
        optimizer = torch.optim.AdamW(net.parameters())

        @roam.compile
        def step(x, y):
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            return net[0].weight.grad.norm()

        for x, y in batches(3):
            step(x, y)
            assert gradients(net) == [None] * 4


def test_several_models_and_optimizers_with_kept_gradients() -> None:
    def script(wrap):
        nets = network(), network()
        first = torch.optim.AdamW(nets[0].parameters())
        second = torch.optim.SGD([*nets[1].parameters(), nets[0][0].bias], lr=0.1, momentum=0.9)

        @wrap
        def step(x, y):
            nets[0].zero_grad()
            second.zero_grad()
            losses = [loss_of(net, x, y) for net in nets]
            sum(losses).backward()
            first.step()
            second.step()
            return losses

        return [[step(x, y), states(*nets, first, second), gradients(*nets)] for x, y in batches(5)]

    both(script, keep_grads=True)


@pytest.mark.parametrize("clip", ["norm", "value", "2-norm of one", "infinity norm"])
def test_clipping(clip: str) -> None:
    def script(wrap):
        net = network()
        optimizer = torch.optim.AdamW(net.parameters())

        @wrap
        def step(x, y):
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            norm = None
            if clip == "value":
                torch.nn.utils.clip_grad_value_(net.parameters(), 0.02)
            elif clip == "2-norm of one":
                norm = torch.nn.utils.clip_grad_norm_(net[0].weight, 0.01)
            else:
                norm = torch.nn.utils.clip_grad_norm_(
                    net.parameters(), 0.1, float("inf") if "inf" in clip else 2.0
                )
            optimizer.step()
            return norm

        return [[step(x, y), states(net, optimizer)] for x, y in batches(5)]

    both(script)


class TestShapes:
    def test_a_last_partial_batch_and_two_lengths_cost_one_capture_each(self) -> None:
        captures = []

        def script(wrap):
            net = torch.nn.Sequential(torch.nn.Embedding(7, 6), torch.nn.Flatten(0, 1), network())
            optimizer = torch.optim.AdamW(net.parameters())

            @wrap
            def step(tokens):
                optimizer.zero_grad()
                loss = functional.cross_entropy(net(tokens), tokens.flatten() % 3)
                loss.backward()
                optimizer.step()
                return loss

            generator, seen = torch.Generator(torch.get_default_device()).manual_seed(5), []
            for _ in range(3):
                for shape in ((4, 5), (4, 9), (4, 5), (3, 5)):
                    seen += [
                        step(torch.randint(7, shape, generator=generator)),
                        states(net, optimizer),
                    ]
            captures.append(len(getattr(step, "_captures", [])))
            return seen

        both(script)
        assert captures == [0, 3]

    def test_shapes_that_never_repeat_are_warned_of_and_stay_right(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def script(wrap):
            net = network()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

            @wrap
            def step(x, y):
                optimizer.zero_grad()
                loss = loss_of(net, x, y)
                loss.backward()
                optimizer.step()
                return loss

            return [[step(*batches(1, size)[0]), states(net, optimizer)] for size in range(2, 13)]

        with caplog.at_level(logging.WARNING, logger="roam"):
            both(script, max_plans=8, sizes=False)
        warned = [
            record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
        ]
        assert len(warned) == 1
        assert "plans for 8 kinds of calls" in warned[0]
        assert "pad it to a few lengths" in warned[0]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_update_by_itself_may_use_up_gradients_that_it_has_scaled(kind: Any) -> None:
    """When it has run there are none, so it cannot be traced twice in a row."""

    def backward(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss

    def update(optimizer: torch.optim.Optimizer) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()

    plans = []

    def script(wrap: Wrap) -> list[Any]:
        net = torch.nn.Linear(4, 3)
        optimizer = kind(net.parameters(), lr=0.1)
        run, updated, found = wrap(backward), wrap(update), []
        for number in range(5):
            found.append(run(net, torch.full((2, 4), float(number))))
            updated(optimizer)
            found += [parameter.grad for parameter in net.parameters()]
        plans.append(len(getattr(updated, "plans", ())))
        return [*found, *states(net, optimizer)]

    both(script)
    assert plans == [0, 1 if kind is torch.optim.SGD else 2]


def test_an_update_that_cannot_be_traced_twice_must_do_the_same_in_each_trace() -> None:
    net = torch.nn.Linear(4, 3)

    def update() -> None:
        for parameter in net.parameters():
            parameter.grad.mul_(int.from_bytes(os.urandom(4), "big") * 1e-9)
            parameter.grad = None

    net(torch.ones(2, 4)).sum().backward()
    with pytest.raises(roam.CaptureError, match="NoneType") as error:
        roam.compile(update)()
    assert error.value.code == "step_raised"
