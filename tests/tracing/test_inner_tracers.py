"""Tracers of PyTorch's that a step calls: equal to eager, or refused by name. Nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, aot_module, memory_efficient_fusion, nop
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._higher_order_ops import scan
from torch.fx.experimental.proxy_tensor import make_fx

import roam
from training import assert_same_bits

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of what is deprecated
]

functional = torch.nn.functional


def wave(z: torch.Tensor) -> torch.Tensor:
    return z.sin() * z


class Scaled(torch.nn.Module):
    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(w.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).tanh()


Loss = Callable[[Any, Any], Any]


def train(loss: Loss, wrap: Callable[[Any], Any]) -> list[Any]:
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SGD([w], lr=0.1)

    @wrap
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(w, x)
        value.backward()
        optimizer.step()
        return value.detach()

    generator = torch.Generator().manual_seed(1)
    return [*(step(torch.rand(3, generator=generator)) for _ in range(3)), w.detach()]


def same(step: Any) -> Any:
    return step


TRACED: dict[str, Loss] = {
    "make_fx": lambda w, x: make_fx(lambda z: (w * z).sin())(torch.zeros(3))(x).sum() + w.sum(),
    "make_fx of the batch": lambda w, x: make_fx(wave)(x)(w * x).sum(),
    "make_fx, fakes": lambda w, x: make_fx(wave, tracing_mode="fake")(x)(w * x).sum(),
    "make_fx, symbols": lambda w, x: make_fx(wave, tracing_mode="symbolic")(x)(w * x).sum(),
    "make_fx before autograd": lambda w, x: make_fx(wave, pre_dispatch=True)(x)(w * x).sum(),
    "make_fx of a derivative": lambda w, x: (
        w * make_fx(torch.func.grad(lambda z: wave(z).sum()))(x)(x)
    ).sum(),
    "linearize": lambda w, x: (w * torch.func.linearize(torch.sin, x)[1](x)).sum(),
    "linearize a derivative": lambda w, x: (
        w
        * torch.func.linearize(
            torch.func.grad(lambda z: (z * x).tanh().square().sum()), w.detach()
        )[1](w.detach())
    ).sum(),
    "export": lambda w, x: torch.export.export(Scaled(w), (x,)).module()(w * x).sum(),
    "draft_export": lambda w, x: torch.export.draft_export(Scaled(w), (x,)).module()(w * x).sum(),
    "Dynamo's export": lambda w, x: torch._dynamo.export(wave)(x)[0](w * x).sum(),
    "aot_function": lambda w, x: aot_function(wave, nop)(w * x).sum(),
    "aot_function of the batch": lambda w, x: (w * aot_function(wave, nop)(x)).sum(),
    "aot_module": lambda w, x: aot_module(Scaled(w), nop)(w * x).sum(),
    "aot_export_joint_simple": lambda w, x: (
        w.sum() * aot_export_joint_simple(lambda z: [wave(z)], [x], trace_joint=False)(x)[0].sum()
    ),
    "memory_efficient_fusion": lambda w, x: memory_efficient_fusion(wave)(w * x).sum(),
    "jit.trace": lambda w, x: torch.jit.trace(wave, (x,), check_trace=False)(w * x).sum(),
    "jit.trace_module": lambda w, x: torch.jit.trace_module(Scaled(w), {"forward": (x,)})(
        w * x
    ).sum(),
    "jit._get_trace_graph": lambda w, x: (
        torch.jit._get_trace_graph(Scaled(w), (x,))[1].sum() + (w * x).sum()
    ),
}
OTHERWISE: dict[str, tuple[str, Loss]] = {
    "export by Dynamo": (
        "inner_tracer",
        lambda w, x: torch.export.export(Scaled(w), (x,), strict=True).module()(w * x).sum(),
    ),
    "scan": (
        "refused_operator",
        lambda w, x: scan(lambda sums, z: (sums + z, sums * z), x.sum(), w * x)[1].sum(),
    ),
    "jit.script": ("script_function", lambda w, x: torch.jit.script(wave)(w * x).sum()),
    "cond": (
        "refused_operator",
        lambda w, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (w * x,)).sum(),
    ),
}
EXACT: dict[str, Loss] = {
    "symbolic_trace": lambda w, x: torch.fx.symbolic_trace(wave)(w * x).sum(),
    "symbolic_trace of a module": lambda w, x: torch.fx.symbolic_trace(Scaled(w))(w * x).sum(),
    "Interpreter": lambda w, x: (
        torch.fx.Interpreter(torch.fx.symbolic_trace(wave)).run(w * x).sum()
    ),
    "functionalize": lambda w, x: torch.func.functionalize(lambda z: z.clone().add_(1))(
        w * x
    ).sum(),
    "jvp": lambda w, x: torch.func.jvp(wave, (w * x,), (x,))[1].sum(),
    "jacrev": lambda w, x: torch.func.jacrev(wave)(w * x).sum(),
    "torch.compile": lambda w, x: torch.compile(wave, backend="eager")(w * x).sum(),
    "disable": lambda w, x: torch.compiler.disable(wave)(w * x).sum(),
    "fork": lambda w, x: torch.jit.wait(torch.jit.fork(wave, w * x)).sum(),
}


@pytest.mark.parametrize("loss", TRACED.values(), ids=TRACED)
def test_a_tracer_is_refused_by_name(loss: Loss) -> None:
    before = train(loss, same)
    with pytest.raises(roam.CaptureError, match=r"test_inner_tracers\.py:\d+.*tracer") as caught:
        train(loss, roam.compile)
    assert caught.value.code == "inner_tracer"
    assert_same_bits(before, train(loss, same))


@pytest.mark.parametrize(("code", "loss"), OTHERWISE.values(), ids=OTHERWISE)
def test_others_are_refused(code: str, loss: Loss) -> None:
    with pytest.raises(roam.CaptureError) as caught:
        train(loss, roam.compile)
    assert caught.value.code == code


@pytest.mark.parametrize("loss", EXACT.values(), ids=EXACT)
def test_what_makes_no_graph_of_tensors_is_exact(loss: Loss) -> None:
    assert_same_bits(train(loss, same), train(loss, roam.compile))


def test_a_function_traced_outside_runs() -> None:
    traced = make_fx(wave)(torch.ones(3))

    def loss(w: Any, x: Any) -> Any:
        return traced(w * x).sum()

    assert_same_bits(train(loss, same), train(loss, roam.compile))


def squares_of(derivative: Callable[[Any], Any], function: Any) -> Loss:
    """The squares of what `torch.vmap` of a derivative of a function of one row gives."""
    return lambda w, x: (
        torch.vmap(derivative(lambda row: function(row * w).sum()))(torch.stack([x, -x]))
        .square()
        .sum()
    )


@pytest.mark.parametrize(
    ("forward", "reverse"),
    [
        (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))),
        (torch.func.jacfwd, torch.func.jacrev),
    ],
    ids=["hessian", "jacfwd"],
)
@pytest.mark.parametrize("function", [torch.tanh, torch.sin, torch.exp, functional.elu])
def test_a_zero_tangent_is_refused_and_the_remedy_works(
    forward: Any, reverse: Any, function: Any
) -> None:
    with pytest.raises(roam.CaptureError, match=r"jacrev\(torch\.func\.jacrev\(f\)\)") as caught:
        train(squares_of(forward, function), roam.compile)
    assert caught.value.code == "forward_mode"
    remedy = squares_of(reverse, function)
    assert_same_bits(train(remedy, same), train(remedy, roam.compile))
