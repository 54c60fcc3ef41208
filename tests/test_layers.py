"""What people train with: layers, hooks, recomputation, operators of their own. Each step by a plan gives eager's bits, or is refused."""

from __future__ import annotations

import collections
import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import roam
from training import assert_same_bits, tensors_and_numbers

functional = torch.nn.functional
Script = Callable[[Callable[[Any], Any]], list[Any]]


def same_by_plan(script: Script) -> None:
    """Runs a user's script with eager steps, and out of a pool in which what is dead is overwritten."""
    outcomes = []
    for wrap in (lambda step: step, functools.partial(roam.compile, pool=True, poison=True)):
        torch.manual_seed(0)
        outcomes.append(tensors_and_numbers(script(wrap), torch.get_rng_state()))
    assert_same_bits(*outcomes)


def images(count: int = 3, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape or (4, 6), generator=generator) for _ in range(count)]


def train(
    model: torch.nn.Module,
    wrap: Callable[[Any], Any],
    batches: list[Any],
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor] = lambda model, x: model(x).square().mean(),
) -> list[Any]:
    """A few steps of the commonest kind."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @wrap
    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss

    returned = [step(model, optimizer, x) for x in batches]
    return [returned, model.state_dict(), optimizer.state_dict()]


def refused(step: Callable[..., Any], *args: Any) -> roam.CaptureError:
    with pytest.raises(roam.CaptureError) as caught:
        roam.capture(step, *args)
    return caught.value


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.drop = torch.nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.drop(torch.relu(self.first(self.drop(x)))))


class Recomputing(torch.nn.Module):
    def __init__(self, *, preserve: bool = True, reentrant: bool = False, is_nested: bool = False) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.enter, self.drop = torch.nn.Linear(6, 6), torch.nn.Dropout(0.3)
        self.is_nested = is_nested
        self.checkpoint = functools.partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=preserve)

    def pair(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.checkpoint(self.blocks[1], self.blocks[0](x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.enter(x))
        if self.is_nested:
            return self.drop(self.checkpoint(self.pair, x))
        for block in self.blocks:
            x = self.checkpoint(block, x)
        return self.drop(x)


class TestRecomputation:
    """The recomputed mask is the mask of the forward pass, and the generator ends where eager leaves it."""

    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("preserve", [True, False])
    def test_with_dropout(self, reentrant: bool, preserve: bool) -> None:
        same_by_plan(lambda wrap: train(Recomputing(preserve=preserve, reentrant=reentrant), wrap, images()))

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_within_recomputation(self, reentrant: bool) -> None:
        same_by_plan(lambda wrap: train(Recomputing(reentrant=reentrant, is_nested=True), wrap, images()))

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_of_a_sequence(self, reentrant: bool) -> None:
        def loss_of(model, x):
            x = checkpoint_sequential(model[1:], 2, model[0](x), use_reentrant=reentrant)
            return x.square().mean()

        same_by_plan(lambda wrap: train(torch.nn.Sequential(*[Block() for _ in range(5)]), wrap, images(), loss_of))

    def test_runs_the_block_twice(self) -> None:
        graph = roam.capture(*_recomputing_step())
        draws = [operator.name for operator in graph.operators if operator.sequence == "random"]
        assert draws.count("aten.bernoulli_.float") == 2 + 2 * 3 * 2
        assert draws.count("torch.random.get_rng_state") == draws.count("torch.random.set_rng_state") // 2 * 2

    def test_keeps_states_out_of_the_pool(self) -> None:
        """PyTorch reads a generator's state from where its storage begins."""
        step, *arguments = _recomputing_step()
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
                    x = x + checkpoint(lambda x, layer=layer: functional.dropout(layer(x)), x, use_reentrant=False)
                return x

        same_by_plan(lambda wrap: train(Wide(), wrap, images(3, 8, 48)))

    def test_without_draws_keeps_no_state(self) -> None:
        step, model, *rest = _recomputing_step()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        graph = roam.capture(step, model, *rest)
        assert not [operator.name for operator in graph.operators if "rng_state" in operator.name]


def _recomputing_step() -> tuple[Any, ...]:
    def step(model, optimizer, x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    model = Recomputing()
    return step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6)


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
            generator = torch.Generator().manual_seed(5)

            def loss_of(model, x):
                return (model(x) + torch.randn(4, 6, generator=generator)).square().mean()

            return [*train(Block(), wrap, images(), loss_of), generator.get_state()]

        same_by_plan(script)

    @pytest.mark.parametrize("act", ["seed", "round_trip", "make", "default", "read_seed", "random_seed"])
    def test_is_refused_where_it_cannot_be_seen(self, act: str) -> None:
        held = torch.Generator().manual_seed(0)

        def step(model, optimizer, x):
            generator = held
            if act == "seed":
                generator.manual_seed(0)
            elif act == "round_trip":
                state = generator.get_state()
                torch.rand(3, generator=generator)
                generator.set_state(state)
            elif act == "make":
                generator = torch.Generator().manual_seed(0)
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
        x, state = torch.randn(4, 6), torch.get_rng_state()
        with pytest.raises(roam.ExecutionError, match="Nothing had been updated yet"):
            compiled(x, torch.full((4,), 9))
        assert state.equal(torch.get_rng_state())


def same_with_hooks(attach: Callable[[torch.nn.Module], Any]) -> None:
    """Trains a block to which hooks were attached."""

    def script(wrap):
        model = Block()
        attach(model)
        return train(model, wrap, images())

    same_by_plan(script)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
class TestHooksOnModules:
    def test_before_and_after_forward(self) -> None:
        def attach(model):
            model.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
            model.register_forward_hook(lambda module, args, result: result + args[0])
            model.second.register_forward_hook(
                lambda module, args, kwargs, result: result * 0.5, with_kwargs=True, always_call=True
            )

        same_with_hooks(attach)

    def test_before_and_after_backward(self) -> None:
        def attach(model):
            model.first.register_full_backward_hook(lambda module, grad_input, grad_output: None)
            model.second.register_full_backward_hook(
                lambda module, grad_input, grad_output: tuple(g * 0.5 for g in grad_input)
            )
            model.second.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 3,))

        same_with_hooks(attach)

    def test_that_look_at_a_value_are_refused(self) -> None:
        model = Block()
        model.register_full_backward_hook(lambda module, grad_input, grad_output: print(grad_output[0].norm().item()))
        step = _recomputing_step()[0]
        error = refused(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6))
        assert error.code == "value_reached_python"

    def test_that_collect_are_refused(self) -> None:
        model, seen = Block(), []
        model.first.register_forward_hook(lambda module, args, result: seen.append(result.detach()))
        step = _recomputing_step()[0]
        assert refused(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6)).code == "moved"
        assert not seen


class TestHooksOnGradients:
    def test_that_give_another_gradient(self) -> None:
        def attach(model):
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            model.first.weight.register_hook(lambda gradient: gradient * 2)

        same_with_hooks(attach)

    def test_that_are_taken_off_again(self) -> None:
        def script(wrap):
            model = Block()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scale = [2.0]
            handle = model.first.weight.register_hook(lambda gradient: gradient * scale[0])

            @wrap
            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss

            x, y, *rest = images(5)
            returned = [step(x), step(y)]
            scale[0] = 7.0
            returned.append(step(rest[0]))
            handle.remove()
            returned.append(step(rest[1]))
            model.first.weight.register_hook(lambda gradient: gradient * 5)
            return [*returned, step(rest[2]), model.state_dict()]

        same_by_plan(script)

    def test_after_accumulation(self) -> None:
        def halve(parameter):
            parameter.grad.mul_(0.5)

        def attach(model):
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(halve)

        same_with_hooks(attach)

    def test_with_an_optimizer_for_each_parameter(self) -> None:
        def script(wrap):
            model = torch.nn.Sequential(*[Block() for _ in range(3)])
            optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

            def update(parameter: torch.nn.Parameter) -> None:
                optimizers[parameter].step()
                optimizers[parameter].zero_grad()

            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(update)

            @wrap
            def step(x):
                loss = model(x).square().mean()
                loss.backward()
                return loss

            returned = []
            for index, x in enumerate(images(5)):
                returned.append(step(x))
                for optimizer in optimizers.values():
                    optimizer.param_groups[0]["lr"] = 0.01 / (index + 1)
            return [returned, model.state_dict(), [optimizer.state_dict() for optimizer in optimizers.values()]]

        same_by_plan(script)

    def test_an_optimizer_in_the_backward_pass_is_an_update(self) -> None:
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(8)])
        optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

        def update(parameter: torch.nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)

        def step(x):
            model(x).square().mean().backward()

        graph = roam.capture(step, torch.randn(4, 64))
        phases = [operator.phase for operator in graph.operators]
        updates = [operator for operator in graph.operators if operator.phase == "update" and operator.mutates]
        assert [operator.name for operator in updates] == ["aten.add_.Tensor"] * 8
        assert phases.index("update") < len(phases) - 1 - phases[::-1].index("backward")
        plan = roam.optimize(graph)
        assert plan.program_order_peak_bytes < 3 * 64 * 64 * 4  # one gradient at a time

    def test_inside_the_step(self) -> None:
        def loss_of(model, x):
            hidden = model.first(x)
            hidden.retain_grad()
            hidden.register_hook(lambda gradient: gradient * 3)
            handle = model.second.weight.register_hook(lambda gradient: gradient.sign())
            loss = model.second(hidden).square().mean()
            loss.backward()
            handle.remove()
            return loss + hidden.grad.abs().sum()

        def script(wrap):
            model = Block()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            @wrap
            def step(x):
                optimizer.zero_grad()
                loss = loss_of(model, x)
                optimizer.step()
                return loss

            return [[step(x) for x in images()], model.state_dict()]

        same_by_plan(script)

    def test_on_saved_tensors(self) -> None:
        def loss_of(model, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
                return model(x).square().mean()

        same_by_plan(lambda wrap: train(Block(), wrap, images(), loss_of))

    def test_on_several_gradients_at_once(self) -> None:
        def loss_of(model, x):
            hidden = model.first(x)
            other = model.second(x)
            handle = torch.autograd.graph.register_multi_grad_hook(
                (hidden, other), lambda gradients: gradients[0].mul_(2)
            )
            loss = (hidden * other).mean()
            del handle
            return loss

        same_by_plan(lambda wrap: train(Block(), wrap, images(), loss_of))

    def test_left_behind_by_the_step_are_refused(self) -> None:
        model = Block()

        def step(model, optimizer, x):
            model.first.weight.register_hook(lambda gradient: gradient * 2)
            model(x).square().mean().backward()
            optimizer.step()

        error = refused(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6))
        assert error.code == "moved"
        assert not model.first.weight._backward_hooks

    def test_on_nodes_are_refused(self) -> None:
        model = Block()
        nodes = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in model.parameters()]
        model.nodes = nodes
        for node in nodes:
            node.register_hook(lambda *_: None)
        step = _recomputing_step()[0]
        error = refused(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6))
        assert error.code == "autograd_node"

    def test_change_a_plan_that_was_made_without_them(self) -> None:
        model = Block()
        compiled = roam.compile(_recomputing_step()[0], on_change="raise")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled(model, optimizer, torch.randn(4, 6))
        model.first.weight.register_hook(lambda gradient: gradient)
        with pytest.raises(roam.ExecutionError, match="hook"):
            compiled(model, optimizer, torch.randn(4, 6))


class TestDictionariesWithTensorsForKeys:
    def test_are_looked_up_and_written_to(self) -> None:
        def script(wrap):
            model = Block()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            averages = {p: p.detach().clone() for p in model.parameters()}
            frozen = {model.first.bias: 0.0}

            @wrap
            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                for parameter in model.parameters():
                    if parameter in frozen:
                        parameter.grad.zero_()
                optimizer.step()
                with torch.no_grad():
                    for parameter, average in averages.items():
                        averages[parameter] = torch.lerp(average, parameter, 0.1)
                return loss

            return [[step(x) for x in images()], model.state_dict(), list(averages.values())]

        same_by_plan(script)

    def test_under_keys_without_a_text(self) -> None:
        def script(wrap):
            model = Block()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            seen = {module: torch.zeros(()) for module in (model.first, model.second)}

            @wrap
            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                seen[model.first] = seen[model.first] + loss.detach()
                return loss

            return [[step(x) for x in images()], list(seen.values())]

        same_by_plan(script)

    def test_a_frozen_set_of_parameters(self) -> None:
        def script(wrap):
            model = Block()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            skipped = frozenset([model.first.bias])

            @wrap
            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                for parameter in model.parameters():
                    if parameter in skipped:
                        parameter.grad = None
                optimizer.step()
                return loss

            return [[step(x) for x in images()], list(model.parameters())]

        same_by_plan(script)


LAYOUTS: dict[str, Callable[..., torch.Tensor]] = {
    "contiguous": torch.rand,
    "channels last": lambda *shape: torch.rand(shape).to(memory_format=torch.channels_last),
    "batch inside": lambda n, c, *sizes: torch.rand(c, n, *sizes).transpose(0, 1),
    "columns first": lambda n, c, h, w: torch.rand(n, c, w, h).transpose(2, 3),
    "expanded": lambda n, c, h, w: torch.rand(n, c, 1, 1).expand(n, c, h, w),
}


class Laid(torch.nn.Module):
    """A batch norm of an input in one layout, whose output's gradient comes in another."""

    def __init__(self, weight: torch.Tensor, *, training: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.norm = torch.nn.BatchNorm2d(8).train(training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.weight) * x).sum()


@pytest.mark.parametrize("sizes", [(5, 6), (1, 1)], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["evaluated", "trained"])
@pytest.mark.parametrize("inside", [name for name in LAYOUTS if name != "expanded"])
def test_batch_norm_of_any_layout(inside: str, training: bool, sizes: tuple[int, ...]) -> None:
    def script(wrap: Callable[[Any], Any]) -> list[Any]:
        models = [Laid(LAYOUTS[inside](2, 8, *sizes), training=training) for _ in LAYOUTS]
        batches = [layout(2, 8, *sizes) for layout in LAYOUTS.values()]
        return [train(model, wrap, [x, x], Laid.forward) for model, x in zip(models, batches, strict=True)]

    same_by_plan(script)


def sequences(count: int = 3) -> list[torch.Tensor]:
    return images(count, 3, 2, 4)


class Recurrent(torch.nn.Module):
    """A recurrent layer of any kind between two linear ones."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(4, 4)
        self.layer = getattr(torch.nn, kind)(4, 6, **options)
        width = options.get("proj_size", 0) or 6
        self.leave = torch.nn.Linear(width * (2 if options.get("bidirectional") else 1), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result, state = self.layer(self.enter(x))
        last = state[0] if isinstance(state, tuple) else state
        return self.leave(result).square() + last.mean()


RECURRENT_FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layers_with_dropout": {"num_layers": 3, "dropout": 0.3},
    "bidirectional": {"bidirectional": True, "num_layers": 2},
    "batch_first": {"batch_first": True},
    "without_bias": {"bias": False},
    "double": {"dtype": torch.float64},
}


class TestRecurrentLayers:
    @pytest.mark.parametrize("form", RECURRENT_FORMS)
    @pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
    def test_train(self, kind: str, form: str) -> None:
        options = RECURRENT_FORMS[form]
        dtype = options.get("dtype", torch.float32)
        batches = [x.to(dtype) for x in sequences()]
        same_by_plan(lambda wrap: train(Recurrent(kind, **options).to(dtype), wrap, batches))

    @pytest.mark.filterwarnings("ignore:LSTM with projections")
    def test_with_projections(self) -> None:
        same_by_plan(lambda wrap: train(Recurrent("LSTM", proj_size=3), wrap, sequences()))

    def test_with_rectifiers(self) -> None:
        same_by_plan(lambda wrap: train(Recurrent("RNN", nonlinearity="relu"), wrap, sequences()))

    @pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
    @pytest.mark.parametrize("is_packed_before", [True, False])
    def test_on_packed_sequences(self, kind: str, is_packed_before: bool) -> None:
        """How many rows a packed batch has at each step is data."""

        def script(wrap):
            torch.manual_seed(0)
            model = getattr(torch.nn, kind)(4, 6)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            pack = torch.nn.utils.rnn.pack_padded_sequence

            @wrap
            def step(x, lengths):
                optimizer.zero_grad()
                result, _ = model(x if is_packed_before else pack(x, lengths))
                loss = result.data.square().mean()
                loss.backward()
                optimizer.step()
                return loss

            losses = []
            for lengths in ([5, 4, 2], [5, 5, 1], [5, 4, 2]):
                x = torch.randn(5, 3, 4)
                losses.append(step(pack(x, lengths) if is_packed_before else x, torch.tensor(lengths)))
            return tensors_and_numbers(losses, model.state_dict())

        same_by_plan(script)

    @pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
    def test_with_a_state_that_is_carried_from_batch_to_batch(self, kind: str) -> None:
        def script(wrap):
            model = Recurrent(kind)
            optimizer = torch.optim.AdamW(model.parameters())
            state = torch.zeros(1, 2, 6)
            state = (state, state.clone()) if kind == "LSTM" else state

            @wrap
            def step(model, optimizer, x, state):
                optimizer.zero_grad()
                result, state = model.layer(model.enter(x), state)
                loss = model.leave(result).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                return loss, tuple(s.detach() for s in state) if kind == "LSTM" else state.detach()

            losses = []
            for x in sequences(4):
                loss, state = step(model, optimizer, x, state)
                losses.append(loss)
            return [losses, state, model.state_dict(), optimizer.state_dict()]

        same_by_plan(script)

    def test_that_teach_without_gradients(self) -> None:
        """oneDNN runs another kernel then, in training mode too."""

        def script(wrap):
            teacher = Recurrent("LSTM")

            def loss_of(model, x):
                with torch.no_grad():
                    target = teacher(x)
                return (model(x) - target).square().mean()

            return train(Recurrent("LSTM"), wrap, sequences(), loss_of)

        same_by_plan(script)

    def test_that_are_frozen(self) -> None:
        def script(wrap):
            model = Recurrent("LSTM")
            model.layer.requires_grad_(False)
            return train(model, wrap, sequences())

        same_by_plan(script)

    def test_in_evaluation_mode(self) -> None:
        same_by_plan(lambda wrap: train(Recurrent("LSTM", num_layers=2, dropout=0.5).eval(), wrap, sequences()))

    def test_under_autocast(self) -> None:
        def loss_of(model, x):
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float().square().mean()

        same_by_plan(lambda wrap: train(Recurrent("LSTM"), wrap, sequences(), loss_of))

    @pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
    def test_cells(self, kind: str) -> None:
        def loss_of(cell, x):
            state, losses = None, []
            for item in x:
                state = cell(item, state)
                losses.append((state[0] if kind == "LSTMCell" else state).square().mean())
            return torch.stack(losses).sum()

        same_by_plan(lambda wrap: train(getattr(torch.nn, kind)(4, 6), wrap, sequences(), loss_of))

    def test_of_the_size_that_people_train(self) -> None:
        def script(wrap):
            model = torch.nn.LSTM(32, 64, num_layers=2, dropout=0.2, batch_first=True)
            return train(model, wrap, images(2, 8, 35, 32), lambda model, x: model(x)[0].square().mean())

        same_by_plan(script)


@torch.library.custom_op("roam_layers::cube", mutates_args=())
def cube(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() ** 3) * scale


@cube.register_fake
def _(x, scale):
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, gradient: (gradient * 3 * ctx.saved_tensors[0].square() * ctx.scale, None),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(inputs[0]), setattr(ctx, "scale", inputs[1]))[0],
)


@torch.library.custom_op("roam_layers::decay_", mutates_args={"x"})
def decay_(x: torch.Tensor, rate: float) -> None:
    x.mul_(1 - rate)


@torch.library.custom_op("roam_layers::both_halves", mutates_args=())
def both_halves(x: torch.Tensor) -> list[torch.Tensor]:
    return [half.clone() for half in x.chunk(2)]


@both_halves.register_fake
def _(x):
    return [torch.empty_like(half) for half in x.chunk(2)]


@torch.library.custom_op("roam_layers::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("roam_layers::secretly_noisy", mutates_args=())
def secretly_noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("roam_layers::secretly_changing", mutates_args=())
def secretly_changing(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


@torch.library.custom_op("roam_layers::largest", mutates_args=())
def largest(x: torch.Tensor) -> float:
    return float(x.max())


@torch.library.custom_op("roam_layers::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("roam_layers::show", mutates_args=())
def show(x: torch.Tensor) -> None:
    print(x)


for _made in (noisy, secretly_noisy, secretly_changing):
    _made.register_fake(torch.empty_like)
largest.register_fake(lambda x: 0.0)
show.register_fake(lambda x: None)

_library = torch.library.Library("roam_layers", "FRAGMENT")
_library.define("doubled(Tensor x) -> Tensor")
_library.define("lying(Tensor x) -> Tensor")
_library.define("rows(Tensor(a) x, int count) -> Tensor(a)")
for _key in ("CPU", "Meta"):
    _library.impl("doubled", lambda x: x * 2, _key)
    _library.impl("lying", lambda x: x.view(-1) if x.is_meta else x.reshape(-1), _key)
    _library.impl("rows", lambda x, count: x[:count], _key)


class _Doubled(torch.autograd.Function):
    """Does something of its own around the operator, which the operator must not do once more at run time."""

    @staticmethod
    def forward(ctx, x):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.roam_layers.doubled(x + 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


_library.impl("doubled", _Doubled.apply, "Autograd")


class TestOperatorsOfOthers:
    def check(self, loss_of: Any) -> None:
        same_by_plan(lambda wrap: train(Block(), wrap, images(), loss_of))

    def test_with_a_gradient(self) -> None:
        self.check(lambda model, x: cube(model(x), 0.5).mean())

    def test_that_change_an_argument(self) -> None:
        def loss_of(model, x):
            loss = model(x).square().mean()
            decay_(model.first.weight.detach(), 0.1)
            return loss + model.second(x).mean()

        self.check(loss_of)

    def test_that_return_a_list(self) -> None:
        def loss_of(model, x):
            first, second = both_halves(model(x).detach())
            return (model.first(first) * second).mean()

        self.check(loss_of)

    def test_that_draw_and_say_so(self) -> None:
        self.check(lambda model, x: model.second(noisy(model.drop(x))).square().mean())

    def test_whose_autograd_kernel_does_more(self) -> None:
        self.check(lambda model, x: torch.ops.roam_layers.doubled(model(x)).square().mean())

    def test_that_return_a_view(self) -> None:
        self.check(lambda model, x: model(torch.ops.roam_layers.rows(x * 2, 2)).square().mean())

    @pytest.mark.parametrize(
        ("operator", "code"),
        [
            (largest, "foreign_operator"),
            (show, "foreign_operator"),
            (torch.ops.roam_layers.lying, "hidden_alias"),
            (without_fake, "no_fake_kernel"),
        ],
    )
    def test_that_a_plan_cannot_run_are_refused(self, operator: Any, code: str) -> None:
        def step(model, x):
            result = model(x)
            with torch.no_grad():
                other = operator(result)
            result.mean().backward()
            return other

        error = refused(step, Block(), torch.randn(4, 6))
        assert error.code == code
        assert "test_layers.py" in str(error)

    @pytest.mark.parametrize(
        ("operator", "reason"), [(secretly_noisy, "drew random numbers"), (secretly_changing, "wrote to an argument")]
    )
    def test_whose_schema_lies_are_found_out_by_the_first_run(self, operator: Any, reason: str) -> None:
        def step(model, x):
            model(operator(x * 2)).mean().backward()

        with pytest.raises(roam.ExecutionError, match=reason):
            roam.compile(step)(Block(), torch.randn(4, 6))

    def test_with_a_live_number_that_could_decide_are_refused(self) -> None:
        def step(model, optimizer, x):
            cube(model(x), optimizer.param_groups[0]["lr"]).mean().backward()
            optimizer.step()

        model = Block()
        error = refused(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6))
        assert error.code == "value_reached_python"

    def test_of_torchvision(self) -> None:
        boxes = torch.tensor([[0, 0.0, 0.0, 5.0, 5.0], [1, 1.0, 1.0, 6.0, 7.0]])

        def loss_of(model, x):
            features = model[0](x)
            pooled = torchvision.ops.roi_align(features, boxes, output_size=3)
            offset = model[1](features)
            shifted = torchvision.ops.deform_conv2d(features, offset, model[2].weight, padding=1)
            dropped = torchvision.ops.stochastic_depth(shifted, 0.4, "row")
            return pooled.square().mean() + dropped.square().mean()

        def script(wrap):
            layers = [
                torch.nn.Conv2d(3, 4, 3, padding=1),
                torch.nn.Conv2d(4, 18, 3, padding=1),
                torch.nn.Conv2d(4, 2, 3),
            ]
            return train(torch.nn.Sequential(*layers), wrap, images(3, 2, 3, 8, 8), loss_of)

        same_by_plan(script)

    def test_of_torchvision_whose_shape_is_data_are_refused(self) -> None:
        def step(model, x):
            boxes = model(x)[:, :4]
            kept = torchvision.ops.nms(boxes, boxes[:, 0], 0.5)
            boxes[kept].mean().backward()

        assert refused(step, Block(), torch.rand(4, 6)).code == "no_fake_kernel"


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.clamp(min=0) * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0] > 0) * ctx.scale, None


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Symmetric(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


PARAMETRIZATIONS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "cayley": functools.partial(parametrizations.orthogonal, orthogonal_map="cayley"),
    "householder": functools.partial(parametrizations.orthogonal, orthogonal_map="householder"),
    "hooked_spectral_norm": torch.nn.utils.spectral_norm,
    "own": lambda module: torch.nn.utils.parametrize.register_parametrization(module, "weight", Symmetric()),
}


class TestFunctionsOfTheUsersOwn:
    @pytest.mark.parametrize("in_place", [True, False])
    def test_with_a_gradient(self, in_place: bool) -> None:
        def loss_of(model, x):
            result = model(x)
            return (DoubledInPlace.apply(result * 1) if in_place else Clipped.apply(result, 3.0)).square().mean()

        same_by_plan(lambda wrap: train(Block(), wrap, images(), loss_of))

    @pytest.mark.parametrize("name", PARAMETRIZATIONS)
    def test_that_parametrize_a_weight(self, name: str) -> None:
        def script(wrap):
            model = Block()
            PARAMETRIZATIONS[name](model.first)
            return train(model, wrap, images())

        same_by_plan(script)

    def test_that_parametrize_a_weight_once_for_many_uses(self) -> None:
        def loss_of(model, x):
            with torch.nn.utils.parametrize.cached():
                return (model(x) + model(x * 2)).square().mean()

        def script(wrap):
            model = Block()
            parametrizations.weight_norm(model.first)
            return train(model, wrap, images(), loss_of)

        same_by_plan(script)


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "padded": {"padding_idx": 2},
    "renormed": {"max_norm": 0.5},
    "by_frequency": {"scale_grad_by_freq": True},
}


class TestEmbeddings:
    @staticmethod
    def script(kind: str, options: dict[str, Any]) -> Script:
        def script(wrap):
            generator = torch.Generator().manual_seed(1)
            batches = [torch.randint(0, 10, (3, 4), generator=generator) for _ in range(3)]
            return train(getattr(torch.nn, kind)(10, 6, **options), wrap, batches)

        return script

    @pytest.mark.parametrize("form", EMBEDDINGS)
    def test_train(self, form: str) -> None:
        same_by_plan(self.script("Embedding", EMBEDDINGS[form]))

    @pytest.mark.parametrize("mode", ["sum", "mean", "max"])
    def test_in_bags(self, mode: str) -> None:
        same_by_plan(self.script("EmbeddingBag", {"mode": mode}))

    @pytest.mark.parametrize("form", EMBEDDINGS)
    def test_in_bags_of_all_forms(self, form: str) -> None:
        same_by_plan(self.script("EmbeddingBag", EMBEDDINGS[form]))

    @pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
    def test_with_sparse_gradients_are_refused(self, kind: str) -> None:
        with pytest.raises(roam.CaptureError, match="sparse") as caught:
            self.script(kind, {"sparse": True})(roam.compile)
        assert caught.value.code == "layout"


def _probabilities(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(4, 3, generator=generator)


def _labels(*labels: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.tensor(labels)


LOSSES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[torch.Generator], torch.Tensor]]] = {
    "ignored": (functional.cross_entropy, _labels(-100, 1, 2, 0)),
    "all_ignored": (functional.cross_entropy, _labels(-100, -100, -100, -100)),
    "smoothed": (lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1, ignore_index=1), _labels(0, 1, 2, 1)),
    "smoothed_and_weighted": (
        lambda x, y: functional.cross_entropy(
            x, y, label_smoothing=0.1, weight=torch.tensor([1.0, 2, 3]), ignore_index=1, reduction="sum"
        ),
        _labels(0, 1, 2, 1),
    ),
    "of_probabilities": (functional.cross_entropy, _probabilities),
    "unreduced": (lambda x, y: functional.cross_entropy(x, y, reduction="none").mean(), _labels(0, 1, 2, 1)),
    "likelihood": (lambda x, y: functional.nll_loss(x.log_softmax(-1), y, ignore_index=0), _labels(0, 1, 2, 1)),
    "divergence": (
        lambda x, y: functional.kl_div(x.log_softmax(-1), y, reduction="batchmean"),
        _probabilities,
    ),
    "binary": (
        lambda x, y: functional.binary_cross_entropy_with_logits(x, y, pos_weight=torch.ones(3) * 2),
        _probabilities,
    ),
    "margins": (functional.multi_margin_loss, _labels(0, 1, 2, 1)),
    "huber": (functional.huber_loss, _probabilities),
    "gumbel": (lambda x, y: (functional.gumbel_softmax(x, hard=True) * x * y).sum(), _probabilities),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_train(name: str) -> None:
    loss, target = LOSSES[name]

    def script(wrap):
        generator = torch.Generator().manual_seed(1)
        batches = [(torch.randn(4, 6, generator=generator), target(generator)) for _ in range(3)]
        return train(torch.nn.Linear(6, 3), wrap, batches, lambda model, batch: loss(model(batch[0]), batch[1]))

    same_by_plan(script)


class TestBranchesThatFakesHide:
    """PyTorch asks some tensors for values inside a composite operator, and fakes go another way."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", ["max", "min", "median", "nanmedian"])
    def test_of_a_gradient_spread_over_equal_elements(self, name: str, dtype: torch.dtype) -> None:
        def loss_of(model, x):
            out = model(x).to(dtype)
            ties = torch.stack([out, out]).transpose(0, 2)
            return (-getattr(ties, name)() - getattr(out.relu(), name)() + out.sum() * 0.1).float()

        same_by_plan(lambda wrap: train(Block(), wrap, images(), loss_of))

    def test_of_the_zeros_around_a_gradient(self) -> None:
        def step(x):
            x = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(-x.max(), x)
            return gradient

        compiled = roam.compile(step)
        for x in (torch.randn(3, 4), torch.full((3, 4), math.nan), torch.zeros(3, 4)):
            for step_of in (step, compiled):
                assert not torch.signbit(step_of(x)[step_of(x) == 0]).any()
            assert torch.equal(step(x).nan_to_num(), compiled(x).nan_to_num())

    def test_not_of_its_own_gradient(self) -> None:
        def step(model, x):
            (gradient,) = torch.autograd.grad(
                model(x).max().square(), next(iter(model.parameters())), create_graph=True
            )
            gradient.square().sum().backward()

        error = refused(step, Block(), torch.randn(4, 6))
        assert error.code == "hidden_branch"
        assert "amax" in str(error)

    def test_but_not_where_there_is_no_gradient(self) -> None:
        same_by_plan(lambda wrap: train(Block(), wrap, images(), lambda model, x: model(x / x.max()).square().mean()))

    @pytest.mark.parametrize("is_module", [True, False])
    def test_of_a_mean_over_weights_of_targets(self, is_module: bool) -> None:
        weight = torch.rand(6)

        def step(model, x, y):
            if is_module:
                loss = torch.nn.CrossEntropyLoss(weight, label_smoothing=0.1)(model(x), y)
            else:
                loss = functional.cross_entropy(model(x), y, weight, label_smoothing=0.1)
            loss.backward()
            return loss

        assert refused(step, Block(), torch.randn(4, 6), torch.tensor([0, 1, -100, 5])).code == "hidden_branch"
        step = roam.compile(step)
        model, x = Block().eval(), torch.randn(4, 6)
        expected = functional.cross_entropy(model(x), torch.arange(4), weight, label_smoothing=0.1)
        assert torch.equal(step(model, x, torch.arange(4)), expected)
        with pytest.raises(roam.CaptureError, match="reduction='sum'"):
            step(model, x, torch.tensor([0, 1, -100, 5]))


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        parts = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.enter(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(*parts, **options)


ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "dropped": {"dropout_p": 0.3},
    "masked": {"attn_mask": torch.ones(5, 5).tril().bool()},
    "biased": {"attn_mask": torch.linspace(-1, 1, 25).view(5, 5)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ATTENTIONS)
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_trains(backend: SDPBackend, form: str, dtype: torch.dtype) -> None:
    if form == "dropped" and backend is SDPBackend.FLASH_ATTENTION:
        pytest.skip("it has no dropout on the CPU")

    def loss_of(model, x):
        with sdpa_kernel(backend):
            return model(x, **ATTENTIONS[form]).float().square().mean()

    same_by_plan(lambda wrap: train(Attention().to(dtype), wrap, [x.to(dtype) for x in images(3, 2, 5, 8)], loss_of))


class Convolving(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.relu(self.norm(self.first(x))).mean((2, 3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_pure", [True, False])
def test_low_precision_trains(dtype: torch.dtype, is_pure: bool) -> None:
    def loss_of(model, x):
        with torch.autocast("cpu", dtype, enabled=not is_pure):
            return model(x).float().square().mean()

    def script(wrap):
        batches = images(3, 2, 3, 6, 6)
        if is_pure:
            return train(Convolving().to(dtype), wrap, [x.to(dtype) for x in batches], loss_of)
        return train(Convolving(), wrap, batches, loss_of)

    same_by_plan(script)


_MOST_INPUTS = 2
_REFUSED_MODULES = {"nn.GaussianNLLLoss": "value_reached_python"}
"""Modules some of whose inputs are refused, by which code. What is not here trains bit by bit."""


def _module_cases() -> list[Any]:
    """(module, mode, sample) of PyTorch's own database of modules: a few samples of each."""
    cases = []
    for info in module_db:
        for is_training in (True, False) if info.train_and_eval_differ else (True,):
            torch.manual_seed(0)
            samples = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=False, training=is_training
            )
            samples = [sample for sample in samples if sample.forward_input is not None]
            step = max(1, len(samples) // _MOST_INPUTS)
            cases += [(info, is_training, sample) for sample in samples[::step]]
    return cases


def _train_module(wrap: Callable[[Any], Any], info: Any, is_training: bool, sample: Any) -> list[Any]:
    """Three steps of SGD; the inputs are scaled by a parameter of their own, so that each module has a gradient."""
    torch.manual_seed(0)
    module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(is_training)
    scale = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*module.parameters(), scale], lr=0.01, momentum=0.9)

    @wrap
    def step(module, optimizer, args, kwargs):
        optimizer.zero_grad()
        args = pytree.tree_map_only(torch.Tensor, lambda x: x * scale if x.is_floating_point() else x, args)
        results = [x for x in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(x, torch.Tensor)]
        results = [x.abs() if x.is_complex() else x for x in results if x.is_floating_point() or x.is_complex()]
        loss = torch.stack([result.square().sum() for result in results]).sum()
        loss.backward()
        optimizer.step()
        return loss

    copied = functools.partial(pytree.tree_map_only, torch.Tensor, lambda x: x.detach().clone())
    args, kwargs = copied(sample.forward_input.args), copied(sample.forward_input.kwargs)
    losses = [step(module, optimizer, args, kwargs) for _ in range(3)]
    return tensors_and_numbers(losses, module.state_dict(), scale, optimizer.state_dict(), torch.get_rng_state())


@pytest.mark.filterwarnings("ignore")
def test_every_module_of_pytorchs_trains_or_is_refused() -> None:
    counts: collections.Counter[str] = collections.Counter()
    refusals = set()
    for case in _module_cases():
        try:
            eager = _train_module(lambda step: step, *case)
        except (RuntimeError, ValueError):
            counts["not run by eager PyTorch"] += 1
            continue
        try:
            planned = _train_module(functools.partial(roam.compile, pool=True, poison=True), *case)
        except roam.CaptureError as error:
            counts[f"refused: {error.code}"] += 1
            refusals.add((case[0].name, error.code))
            continue
        assert_same_bits(eager, planned)
        counts["bit for bit"] += 1
    print(dict(counts), sorted(refusals))
    lazy = {(info.name, "uninitialized_parameter") for info in module_db if info.name.startswith("nn.Lazy")}
    assert refusals <= lazy | set(_REFUSED_MODULES.items())
    assert counts["bit for bit"] >= 270


class TestStepsAsPeopleWriteThem:
    def test_a_bound_method_that_closes_over_its_parts(self) -> None:
        def script(wrap):
            class Trainer:
                def __init__(self) -> None:
                    self.model = Block()
                    self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

                def step(self, x):
                    self.optimizer.zero_grad()
                    result = self.model(x)
                    loss = result.square().mean()
                    loss.backward()
                    self.optimizer.step()
                    return {"loss": loss.detach(), "largest": result.detach().abs().amax(), "rows": len(result)}

            trainer = Trainer()
            step = wrap(trainer.step)
            return [[step(x) for x in images()], trainer.model.state_dict()]

        same_by_plan(script)

    def test_a_module_that_is_compiled_is_refused(self) -> None:
        step = _recomputing_step()[0]
        model = torch.compile(Block(), backend="eager")
        error = refused(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6))
        assert error.code == "compiled_module"

    def test_freezing_from_step_to_step(self) -> None:
        def script(wrap):
            model = Block()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

            @wrap
            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss

            losses = []
            for index, x in enumerate(images(5)):
                model.first.requires_grad_(index % 2 == 0)
                losses.append(step(x))
            return [losses, model.state_dict(), optimizer.state_dict()]

        same_by_plan(script)

    def test_two_players(self) -> None:
        def script(wrap):
            generator, critic = Block(), torch.nn.Linear(6, 1)
            optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (generator, critic)]

            @wrap
            def step(real):
                fake = generator(torch.randn_like(real))
                optimizers[1].zero_grad()
                critic_loss = functional.softplus(critic(fake.detach())).mean()
                critic_loss = critic_loss + functional.softplus(-critic(real)).mean()
                critic_loss.backward()
                optimizers[1].step()
                optimizers[0].zero_grad()
                loss = functional.softplus(-critic(fake)).mean()
                loss.backward()
                optimizers[0].step()
                return loss.detach(), critic_loss.detach()

            losses = [step(x) for x in images(4)]
            return [losses, generator.state_dict(), critic.state_dict(), [o.state_dict() for o in optimizers]]

        same_by_plan(script)

    def test_averages_of_the_weights(self) -> None:
        def script(wrap):
            model = Block()
            teacher = copy.deepcopy(model).requires_grad_(False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            @wrap
            def step(x):
                optimizer.zero_grad()
                with torch.no_grad():
                    target = teacher(x)
                loss = functional.mse_loss(model(x), target + 1)
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for average, weight in zip(teacher.parameters(), model.parameters(), strict=True):
                        average.lerp_(weight, 0.1)
                return loss

            return [[step(x) for x in images(4)], model.state_dict(), teacher.state_dict()]

        same_by_plan(script)

    @pytest.mark.parametrize("decay", [None, 0.9])
    def test_averages_by_pytorchs_own_class(self, decay: float | None) -> None:
        def script(wrap):
            model = Block()
            average = None if decay is None else torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
            averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            @wrap
            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                averaged.update_parameters(model)
                return loss

            return [[step(x) for x in images(4)], model.state_dict(), averaged.state_dict()]

        same_by_plan(script)


@pytest.mark.parametrize("stride", [1, 3])
def test_patches_are_taken_apart_and_put_together(stride: int) -> None:
    """These kernels keep as much memory as the larger side needs, whatever their result fills."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.rand(1, 2, 9, 9))

        def forward(self, x: Any) -> Any:
            patches = functional.unfold(x * self.scale, 3, stride=stride)
            return functional.fold(patches.tanh(), (9, 9), 3, stride=stride)

    def script(wrap: Any) -> Any:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        @wrap
        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return [[step(torch.randn(2, 2, 9, 9)) for _ in range(3)], net.state_dict()]

    same_by_plan(script)


def test_a_custom_operator_leaves_the_pool_free_to_grow() -> None:
    """It may hand its arguments to NumPy, after which their memory could neither grow nor be given back."""
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = cube(model(x).tanh() * 1.5, 0.5).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = roam.compile(step, pool=True)
    for rows in (8, 64, 512):
        compiled(torch.randn(rows, 16))
        compiled.release()


class TestDefaults:
    """Tensors among the defaults of a function are its own, like what it closes over."""

    def test_that_the_step_uses_and_that_nobody_touches(self) -> None:
        def script(wrap):
            weight = torch.nn.Parameter(torch.randn(3))
            optimizer = torch.optim.SGD([weight], lr=0.1)

            def scaled(x, counted=torch.zeros(()), scale=torch.tensor(2.0), *, shift=torch.ones(3)):  # noqa: B008
                counted += 1
                return x * scale * counted + shift

            def unused(x, scale=torch.tensor(3.0)):  # noqa: B008
                return x * scale

            @wrap
            def step(x, functions=(scaled, unused)):
                optimizer.zero_grad()
                loss = functions[0](x * weight).square().mean()
                loss.backward()
                optimizer.step()
                return loss

            losses = []
            for index in range(4):
                if index == 2:
                    scaled.__defaults__[1].fill_(0.5)
                losses.append(step(torch.randn(3)))
            return [losses, weight.data, *scaled.__defaults__]

        same_by_plan(script)

    def test_of_another_function_are_found(self) -> None:
        def scaled(x, scale=torch.tensor(2.0)):  # noqa: B008
            return x * scale

        step = roam.compile(lambda x: scaled(x), on_change="raise")
        before = scaled.__defaults__
        step(torch.ones(2))
        assert scaled.__defaults__ is before
        scaled.__defaults__ = (torch.tensor(3.0),)
        assert step(torch.ones(2)).tolist() == [3.0, 3.0]
        scaled.__defaults__ = (3.0,)
        with pytest.raises(roam.ExecutionError, match="__defaults__"):
            step(torch.ones(2))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
class TestScriptFunctions:
    """TorchScript runs a function by other kernels once it has seen a few calls, so that no capture shows what it will run."""

    def test_that_compute(self) -> None:
        class Gated(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.gate = torch.nn.Linear(6, 6), torch.jit.script(gated)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.gate(self.linear(x))

        error = refused(lambda x, model: model(x).sum().backward(), torch.randn(4, 6), Gated())
        assert error.code == "script_function"
        assert "PYTORCH_JIT=0" in str(error)
        assert torch.jit.script(gated)(torch.ones(2)).sum() > 0  # outside of a capture they are as ever

    def test_on_positions(self) -> None:
        positions = torch.jit.script(shifted)

        def loss_of(model, x):
            return model(x)[:, positions(torch.arange(3), x)].square().mean()

        same_by_plan(lambda wrap: train(torch.nn.Linear(6, 6), wrap, images(), loss_of))


def gated(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * torch.tanh(x)


def shifted(positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return (positions + 1) % like.size(-1)
