"""Graphs that other tools made: planned, and put into the plan's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import roam
from roam.program.replay import generator_state, replayed
from roam.runtime.memory_profiler import measure_peak
from training import assert_same_bits, tensors_and_numbers

functional = torch.nn.functional


def momentum_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A whole training step on tensors that are handed in: dropout, a deep net, momentum in
    place."""
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(4)
        for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1))
    ]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(64, 7))
    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}
    momenta = [torch.zeros_like(parameter) for parameter in parameters.values()]
    batch = torch.randn(512, 64), torch.randint(0, 7, (512,))

    def step(parameters: dict[str, Any], momenta: list[Any], images: Any, labels: Any) -> Any:
        leaves = {
            name: parameter.detach().requires_grad_() for name, parameter in parameters.items()
        }
        loss = functional.cross_entropy(torch.func.functional_call(net, leaves, (images,)), labels)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        for parameter, momentum, gradient in zip(
            parameters.values(), momenta, gradients, strict=True
        ):
            momentum.mul_(0.9).add_(gradient)
            parameter.sub_(momentum, alpha=0.1)
        return {"loss": loss.detach()}

    return step, (parameters, momenta, *batch)


def outcome(module: GraphModule, args: tuple[Any, ...]) -> list[Any]:
    """Results, arguments and random state after three runs on copies of the arguments."""
    torch.manual_seed(1)
    args = torch.utils._pytree.tree_map(torch.clone, args)
    with torch.no_grad():
        results = [module(*args) for _ in range(3)]
    return tensors_and_numbers(results, args, torch.get_rng_state())


def test_a_whole_step_takes_the_order_of_its_plan() -> None:
    step, args = momentum_step()
    module = make_fx(step, tracing_mode="fake")(*args)
    before, names = outcome(module, args), [node.name for node in module.graph.nodes]
    graph = roam.Graph.from_fx(module)
    plan = roam.optimize(graph)
    roam.verify(graph, plan)
    assert plan.peak_bytes < plan.program_order_peak_bytes
    with torch.no_grad():
        peak_bytes = measure_peak(lambda: module(*args), device="cpu").peak_bytes
        assert plan.apply(module) is module
        assert measure_peak(lambda: module(*args), device="cpu").peak_bytes < peak_bytes
    assert sorted(names) == sorted(node.name for node in module.graph.nodes)
    assert names != [node.name for node in module.graph.nodes]
    # What has been put into order is another graph, whose own order is as good as the plan's.
    again = roam.optimize(module)
    assert again.program_order_peak_bytes <= plan.peak_bytes
    step, args = momentum_step()
    assert_same_bits(before, outcome(module, args))


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_nodes_run_again_where_a_limit_asks_for_it(share: float) -> None:
    step, args = momentum_step()
    module = make_fx(step, tracing_mode="fake")(*args)
    before, nodes = outcome(module, args), len(module.graph.nodes)
    plain = roam.optimize(module)
    local_bytes = plain.total_bytes - plain.persistent_bytes
    limit_bytes = plain.persistent_bytes + int(share * local_bytes)
    plan = roam.optimize(module, memory_limit_bytes=limit_bytes)
    assert plan.total_bytes <= limit_bytes
    assert plan.recomputation is not None
    with torch.no_grad():
        plan.apply(module)
        peak_bytes = measure_peak(lambda: module(*args), device="cpu").peak_bytes
    assert peak_bytes <= plan.total_bytes - plan.persistent_bytes
    assert len(module.graph.nodes) > nodes
    step, args = momentum_step()
    assert_same_bits(before, outcome(module, args))


def native(x: torch.Tensor, rate: float) -> torch.Tensor:
    return torch.native_dropout(x, rate, True)[0]


@pytest.mark.parametrize(("drop", "percent"), [(functional.dropout, 50), (native, 65)])
def test_random_nodes_draw_again_what_they_drew(drop: Callable[..., Any], percent: int) -> None:
    weights = [torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) for _ in range(6)]

    def step(weights: list[torch.Tensor], x: torch.Tensor) -> Any:
        leaves = [weight.detach().requires_grad_() for weight in weights]
        for leaf in leaves:
            x = drop(torch.tanh(x @ leaf), 0.2)
        loss = x.square().mean()
        return loss, torch.autograd.grad(loss, leaves)

    args = weights, torch.ones(512, 64)
    module = make_fx(step, tracing_mode="fake")(*args)
    before = outcome(module, args)
    plain = roam.optimize(module)
    local_bytes = plain.total_bytes - plain.persistent_bytes
    limit_bytes = plain.persistent_bytes + local_bytes * percent // 100
    plan = roam.optimize(module, memory_limit_bytes=limit_bytes)
    plan.apply(module)
    replays = [node for node in module.graph.nodes if node.target is replayed]
    read = [node for node in module.graph.nodes if node.target is generator_state]
    assert replays
    assert {node.kwargs["state"] for node in replays} == set(read)
    assert_same_bits(before, outcome(module, args))


def test_a_limit_that_is_kept_anyway_leaves_the_nodes_alone() -> None:
    step, args = momentum_step()
    module = make_fx(step, tracing_mode="fake")(*args)
    names = sorted(node.name for node in module.graph.nodes)
    limit_bytes = 2 * roam.optimize(module).total_bytes
    roam.optimize(module, memory_limit_bytes=limit_bytes).apply(module)
    assert sorted(node.name for node in module.graph.nodes) == names


def test_a_node_that_calls_several_kernels_is_one_operator() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
    batch = (torch.randn(16, 8),)
    module = make_fx(net, pre_dispatch=True)(*batch)
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    graph = roam.Graph.from_fx(module)
    linear = next(operator for operator in graph.operators if "linear" in operator.name)
    assert linear.name == "aten.linear.default"
    assert len(graph.operators) <= len(calls)
    kinds = {tensor.kind for tensor in graph.tensors if tensor.residency == "persistent"}
    assert kinds == {"parameter", "buffer", "input"}
    state = tensors_and_numbers(net.state_dict())
    expected = tensors_and_numbers(module(*batch), net.state_dict())
    for tensor, value in zip(net.state_dict().values(), state, strict=True):
        tensor.copy_(value)
    roam.optimize(module).apply(module)
    assert_same_bits(expected, tensors_and_numbers(module(*batch), net.state_dict()))


def test_views_and_their_storage_are_one_tensor() -> None:
    def transposed_sum(x: Any) -> Any:
        turned = x.exp().t()
        turned[0].add_(1.0)
        return turned.sum(0), turned

    x = torch.randn(32, 16)
    module = make_fx(transposed_sum, tracing_mode="fake")(x)
    graph = roam.Graph.from_fx(module)
    made = [tensor for tensor in graph.tensors if tensor.residency != "persistent"]
    assert sorted(tensor.size_bytes for tensor in made) == [32 * 4, 32 * 16 * 4]
    assert all(tensor.residency == "leaves" for tensor in made)
    expected = transposed_sum(x)
    assert_same_bits(
        tensors_and_numbers(expected), tensors_and_numbers(roam.optimize(module).apply(module)(x))
    )


def test_backward_nodes_are_told_from_forward_ones() -> None:
    def gradient(x: Any) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.sin().sum(), x)

    module = make_fx(gradient, tracing_mode="fake")(torch.randn(8))
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default):
        node.meta["autograd_backward"] = True  # as AOTAutograd marks what autograd's engine runs
    graph = roam.Graph.from_fx(module)
    assert {operator.name: operator.phase for operator in graph.operators}[
        "aten.cos.default"
    ] == "backward"


class Unlowered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def test_what_cannot_be_planned_is_refused() -> None:
    module = symbolic_trace(Unlowered())
    with pytest.raises(roam.CaptureError, match="example value"):
        roam.optimize(module)
    next(iter(module.graph.nodes)).meta["val"] = torch.randn(2, 3)
    with pytest.raises(roam.CaptureError, match="call_module node; trace the module with make_fx"):
        roam.optimize(module)
    symbolic = make_fx(lambda x: x + x, tracing_mode="symbolic")(torch.randn(4, 5))
    with pytest.raises(roam.CaptureError, match="symbolic"):
        roam.optimize(symbolic)
    with pytest.raises(TypeError, match=r"torch\.fx\.GraphModule, not a Linear"):
        roam.Graph.from_fx(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="Graph"):
        roam.optimize(object())  # type: ignore[arg-type]


def test_a_plan_of_another_module_is_refused() -> None:
    one, other = (
        make_fx(function, tracing_mode="fake")(torch.randn(4))
        for function in (torch.sin, torch.cos)
    )
    with pytest.raises(roam.PlanError) as refusal:
        roam.optimize(one).apply(other)
    assert refusal.value.code == "graph_digest"
