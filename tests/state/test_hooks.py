"""Hooks on modules and on gradients: each is called as eagerly, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from steps import Block, images, recomputing_step, refused, same_by_plan, squares_step, train

functional = torch.nn.functional


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
                lambda module, args, kwargs, result: result * 0.5,
                with_kwargs=True,
                always_call=True,
            )

        same_with_hooks(attach)

    def test_before_and_after_backward(self) -> None:
        def attach(model):
            model.first.register_full_backward_hook(lambda module, grad_input, grad_output: None)
            model.second.register_full_backward_hook(
                lambda module, grad_input, grad_output: tuple(g * 0.5 for g in grad_input)
            )
            model.second.register_full_backward_pre_hook(
                lambda module, grad_output: (grad_output[0] * 3,)
            )

        same_with_hooks(attach)

    def test_that_look_at_a_value_are_refused(self) -> None:
        model = Block()
        model.register_full_backward_hook(
            lambda module, grad_input, grad_output: hash(grad_output[0].norm().item())
        )
        step = recomputing_step()[0]
        error = refused(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6))
        assert error.code == "value_reached_python"

    def test_that_collect_are_refused(self) -> None:
        model, seen = Block(), []
        model.first.register_forward_hook(
            lambda module, args, result: seen.insert(0, result.detach())
        )
        step = recomputing_step()[0]
        assert (
            refused(
                step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6)
            ).code
            == "moved"
        )
        assert not seen


class TestHooksOnGradients:
    def test_that_give_another_gradient(self) -> None:
        def attach(model):
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            model.first.weight.register_hook(lambda gradient: gradient * 2)

        same_with_hooks(attach)

    def test_of_a_library_that_close_over_a_tensor(self) -> None:
        library: dict[str, Any] = {"__name__": "peft.masks"}
        exec("def masking(mask):\n    return lambda gradient: gradient * mask", library)

        def script(wrap):
            model = Block()
            mask = torch.rand_like(model.first.weight)
            model.first.weight.register_hook(library["masking"](mask))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = wrap(squares_step(model, optimizer))

            x, y, z = images(3)
            returned = [step(x), step(y)]
            mask.mul_(2)
            return [*returned, step(z), model.state_dict()]

        same_by_plan(script)

    def test_that_are_taken_off_again(self) -> None:
        def script(wrap):
            model = Block()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scale = [2.0]
            handle = model.first.weight.register_hook(lambda gradient: gradient * scale[0])
            step = wrap(squares_step(model, optimizer))

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
            return [
                returned,
                model.state_dict(),
                [optimizer.state_dict() for optimizer in optimizers.values()],
            ]

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
        updates = [
            operator
            for operator in graph.operators
            if operator.phase == "update" and operator.mutates
        ]
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
        nodes = [
            parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            for parameter in model.parameters()
        ]
        model.nodes = nodes
        for node in nodes:
            node.register_hook(lambda *_: None)
        step = recomputing_step()[0]
        error = refused(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6))
        assert error.code == "autograd_node"

    def test_change_a_plan_that_was_made_without_them(self) -> None:
        model = Block()
        compiled = roam.compile(recomputing_step()[0], on_change="raise")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled(model, optimizer, torch.randn(4, 6))
        model.first.weight.register_hook(lambda gradient: gradient)
        with pytest.raises(roam.ExecutionError, match="hook"):
            compiled(model, optimizer, torch.randn(4, 6))
