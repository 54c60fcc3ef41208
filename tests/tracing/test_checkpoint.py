"""torch.utils.checkpoint inside a step, and the generators that it draws from: eager's bits, or a
refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import roam
from steps import Block, Recomputing, images, recomputing_step, refused, same_by_plan, train

functional = torch.nn.functional


class TestRecomputation:
    """The recomputed mask is the mask of the forward pass, and the generator ends where eager
    leaves it."""

    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("preserve", [True, False])
    def test_with_dropout(self, reentrant: bool, preserve: bool) -> None:
        same_by_plan(
            lambda wrap: train(Recomputing(preserve=preserve, reentrant=reentrant), wrap, images())
        )

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_within_recomputation(self, reentrant: bool) -> None:
        same_by_plan(
            lambda wrap: train(Recomputing(reentrant=reentrant, is_nested=True), wrap, images())
        )

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_of_a_sequence(self, reentrant: bool) -> None:
        def loss_of(model, x):
            x = checkpoint_sequential(model[1:], 2, model[0](x), use_reentrant=reentrant)
            return x.square().mean()

        same_by_plan(
            lambda wrap: train(
                torch.nn.Sequential(*[Block() for _ in range(5)]), wrap, images(), loss_of
            )
        )

    def test_runs_the_block_twice(self) -> None:
        graph = roam.capture(*recomputing_step())
        draws = [operator.name for operator in graph.operators if operator.sequence == "random"]
        assert draws.count("aten.bernoulli_.float") == 2 + 2 * 3 * 2
        assert (
            draws.count("torch.random.get_rng_state")
            == draws.count("torch.random.set_rng_state") // 2 * 2
        )

    def test_keeps_states_out_of_the_pool(self) -> None:
        """PyTorch reads a generator's state from where its storage begins."""
        step, *arguments = recomputing_step()
        graph = roam.capture(step, *arguments)
        states = [tensor for tensor in graph.tensors if tensor.name.startswith("get_rng_state")]
        assert len(states) == 6
        assert {tensor.residency for tensor in states} == {"unpooled"}

        class Wide(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = torch.nn.ModuleList(torch.nn.Linear(48, 48) for _ in range(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    x = x + checkpoint(
                        lambda x, layer=layer: functional.dropout(layer(x)), x, use_reentrant=False
                    )
                return x

        same_by_plan(lambda wrap: train(Wide(), wrap, images(3, 8, 48)))

    def test_without_draws_keeps_no_state(self) -> None:
        step, model, *rest = recomputing_step()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        graph = roam.capture(step, model, *rest)
        assert not [operator.name for operator in graph.operators if "rng_state" in operator.name]


class TestGeneratorState:
    """What a step does to PyTorch's generators it does again in every run."""

    def check(self, loss_of: Any) -> None:
        same_by_plan(lambda wrap: train(Block(), wrap, images(), loss_of))

    def test_forked(self) -> None:
        def loss_of(model, x):
            with torch.random.fork_rng():
                noise = torch.randn(4, 6)
            return (model(x) + noise).square().mean()

        self.check(loss_of)

    def test_forked_and_seeded(self) -> None:
        def loss_of(model, x):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                noise = torch.randn(4, 6)
            return (model(x) + noise).square().mean()

        self.check(loss_of)

    def test_seeded_for_good(self) -> None:
        def loss_of(model, x):
            torch.manual_seed(11)
            return model(x).square().mean()

        self.check(loss_of)

    def test_set_to_what_was_read_before_the_step(self) -> None:
        state = torch.get_rng_state()

        def loss_of(model, x):
            torch.set_rng_state(state)
            return model(x).square().mean()

        self.check(loss_of)

    def test_set_although_nothing_is_drawn(self) -> None:
        state = torch.get_rng_state()

        def loss_of(model, x):
            torch.set_rng_state(state)
            return model.first(x).square().mean()

        self.check(loss_of)

    def test_of_a_generator_of_the_users_own(self) -> None:
        def script(wrap):
            generator = torch.Generator(torch.get_default_device()).manual_seed(5)

            def loss_of(model, x):
                return (model(x) + torch.randn(4, 6, generator=generator)).square().mean()

            return [*train(Block(), wrap, images(), loss_of), generator.get_state()]

        same_by_plan(script)

    @pytest.mark.parametrize(
        "act", ["seed", "round_trip", "make", "default", "read_seed", "random_seed"]
    )
    def test_is_refused_where_it_cannot_be_seen(self, act: str) -> None:
        held = torch.Generator(torch.get_default_device()).manual_seed(0)

        def step(model, optimizer, x):
            generator = held
            if act == "seed":
                generator.manual_seed(0)
            elif act == "round_trip":
                state = generator.get_state()
                torch.rand(3, generator=generator)
                generator.set_state(state)
            elif act == "make":
                generator = torch.Generator(torch.get_default_device()).manual_seed(0)
            elif act == "default":
                torch.default_generator.manual_seed(0)
            elif act == "read_seed":
                torch.manual_seed(torch.initial_seed() + 1)
            else:
                torch.seed()
            loss = (model(x) * torch.rand(6, generator=generator)).sum()
            loss.backward()
            optimizer.step()
            return loss

        model, x = torch.nn.Linear(6, 6), torch.randn(4, 6)
        before = torch.get_rng_state(), held.get_state()
        error = refused(step, model, torch.optim.SGD(model.parameters(), lr=0.1), x)
        assert error.code == "generator_state"
        assert before[0].equal(torch.get_rng_state())
        assert before[1].equal(held.get_state())

    def test_is_put_back_by_a_step_that_failed_before_it_changed_anything(self) -> None:
        model = Recomputing(reentrant=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        table = torch.nn.Parameter(torch.ones(3, 6))

        def step(x, index):
            optimizer.zero_grad()
            loss = (model(x) + functional.embedding(index, table)).square().mean()
            loss.backward()
            optimizer.step()

        compiled = roam.compile(step)
        compiled(torch.randn(4, 6), torch.zeros(4, dtype=torch.int64))
        x, wrong, state = torch.randn(4, 6), torch.full((4,), 9), torch.get_rng_state()
        with pytest.raises(IndexError):
            step(x, wrong)
        drawn = torch.get_rng_state()
        torch.set_rng_state(state)
        with pytest.raises(IndexError):  # from the step's own function, after the run's draws
            compiled(x, wrong)
        assert drawn.equal(torch.get_rng_state())
