"""Tensors where no other can be put: in tuples, where what holds those gets another one, and in
sets, where they are refused."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from newer import needs_2_15
from steps import both, inputs

pytestmark = pytest.mark.usefixtures("one_thread")
Pair = namedtuple("Pair", "weight others")


def trained(make: Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]) -> None:
    """Trains a linear layer, with an extra loss that `make` makes for it, eagerly and by plan."""

    def script(wrap: Any) -> Any:
        net = torch.nn.Linear(6, 3)
        weights = list(net.parameters())
        optimizer = torch.optim.Adam(weights)
        extra = make(net)

        @wrap
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean() + extra(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        returned = [step(x) for x in inputs(4)]
        assert all(map(lambda one, other: one is other, weights, net.parameters()))
        return returned, net.state_dict()

    both(script)


def penalty(weights: Any) -> torch.Tensor:
    return sum((weight * weight).sum() for weight in weights)


class TestParameters:
    def test_in_a_tuple_of_a_closure(self) -> None:
        def make(net):
            weights = tuple(net.parameters())
            return lambda x: penalty(weights)

        trained(make)

    def test_in_tuples_in_tuples_and_lists(self) -> None:
        def make(net):
            held = Pair(net.weight, [net.bias, (torch.ones(2), "text")])

            def extra(x):
                assert type(held) is Pair
                return penalty((held.weight, held.others[0])) + held.others[1][0].sum()

            return extra

        trained(make)

    def test_in_defaults(self) -> None:
        def make(net):
            def extra(x, weights=tuple(net.parameters()), *, more=(net.weight, torch.ones(2))):  # noqa: B008
                return penalty(weights) + more[0].sum() + more[1].sum()

            return extra

        trained(make)

    def test_in_arguments_of_a_partial(self) -> None:
        def make(net):
            def extra(weight, pair, x, more=None):
                return weight.square().sum() + pair[0].sum() + more[0].sum()

            made = functools.partial(
                extra, net.weight, (torch.ones(3), net.bias), more=(torch.ones(2),)
            )
            return lambda x: made(x)

        trained(make)

    def test_in_an_attribute_of_a_class(self) -> None:
        def make(net):
            class Holder:
                weights = (net.weight, torch.ones(2))

                def __call__(self, x):
                    return penalty(self.weights)

            return Holder()

        trained(make)

    @pytest.mark.auto
    @needs_2_15
    @pytest.mark.parametrize("kind", [frozenset, set])
    def test_in_sets_are_read_beside_the_plan(self, kind: type) -> None:
        def make(net):
            weights, others = kind(net.parameters()), kind([torch.ones(3)])

            def extra(x):
                assert net.weight in weights
                assert len(weights) == 2
                return penalty(weights) + sum(other.sum() for other in others)

            return extra

        trained(make)

    def test_that_nothing_else_holds(self) -> None:
        def script(wrap):
            weights = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(6))
            optimizer = torch.optim.Adam(weights)

            @wrap
            def step(x):
                loss = ((x * weights[0]).tanh() * weights[1]).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                return loss

            return [step(x) for x in inputs(4)], weights

        both(script)


@pytest.mark.parametrize("kind", [frozenset, set])
def test_a_set_of_tensors_is_refused_where_the_step_reads_it(kind: type) -> None:
    class Kept:
        pass

    net, kept = torch.nn.Linear(6, 3), Kept()
    kept.weights = kind(net.parameters())

    def step(x: torch.Tensor, reads: bool) -> torch.Tensor:
        return net(x).sum() + (penalty(kept.weights) if reads else 0)

    roam.capture(step, torch.ones(2, 6), False)
    with pytest.raises(roam.CaptureError) as refusal:
        roam.capture(step, torch.ones(2, 6), True)
    assert refusal.value.code == "wrapped_place"


class TestTuplesThatTheStepReplaces:
    def test_the_state_of_a_recurrent_layer(self) -> None:
        def script(wrap):
            class Holder:
                def __init__(self):
                    self.layer = torch.nn.LSTM(6, 4)
                    self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
                    self.state = None

                def step(self, x):
                    out, state = self.layer(x[:, None], self.state)
                    self.state = tuple(value.detach() for value in state)
                    loss = out.square().mean()
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    return loss

            holder = Holder()
            step = wrap(holder.step)
            returned = []
            for index, x in enumerate(inputs(7)):
                if index == 4:
                    holder.state = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)
                returned += [step(x), list(holder.state)]
            if isinstance(step, roam.runtime.Step):
                assert len(step._captures) == 1
            return returned

        both(script)

    def test_one_takes_the_place_of_another(self) -> None:
        def script(wrap):
            net, kept = (
                torch.nn.Linear(6, 3),
                {"before": (torch.zeros(3),), "now": (torch.ones(3), 1)},
            )

            @wrap
            def step(x):
                out = net(x).detach().mean(0) + kept["before"][0] + kept["now"][0] * 2
                kept["before"] = (kept["now"][0],)
                kept["now"] = (out, 1)
                return out

            return [(step(x), kept["before"], kept["now"]) for x in inputs(4)]

        both(script)

    def test_in_one_of_two_places(self) -> None:
        def script(wrap):
            net, one = torch.nn.Linear(6, 3), (torch.ones(3),)
            kept = {"a": one, "b": one}

            @wrap
            def step(x):
                out = net(x).detach().mean(0) + kept["a"][0] + kept["b"][0] * 2
                kept["a"] = (out,)
                return out

            return [(step(x), kept["a"], kept["b"]) for x in inputs(4)]

        both(script)

    def test_one_for_two_places_is_refused(self) -> None:
        net, kept = torch.nn.Linear(6, 3), {"a": (torch.ones(3),), "b": (torch.ones(3),)}

        def step(x):
            kept["a"] = kept["b"] = (
                net(x).detach().mean(0) + kept["a"][0] * (2 if kept["a"] is kept["b"] else 1),
            )
            return kept["a"][0]

        with pytest.raises(roam.CaptureError, match="a tuple of its own") as refusal:
            roam.compile(step)(inputs(1)[0])
        assert refusal.value.code == "moved"

    def test_of_other_lengths_are_planned_anew(self) -> None:
        def script(wrap):
            net, kept = torch.nn.Linear(6, 3), {"history": (torch.ones(3),)}
            step = wrap(lambda x: (net(x) * sum(kept["history"])).sum())
            returned = []
            for index, x in enumerate(inputs(4)):
                kept["history"] = (torch.ones(3) * index,) * (1 + index // 2)
                returned.append(step(x))
            return returned

        both(script)
