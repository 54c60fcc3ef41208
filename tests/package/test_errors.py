"""Every error code has a meaning in roam.error_codes, and every refusal of a step has a
test."""

from __future__ import annotations

import ast
import copy
import ctypes
import functools
import re
import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import roam
import roam.errors
from newer import needs_2_15
from roam.error_codes import MEANINGS
from roam.runtime import memory_profiler

_ROOT = Path(__file__).parents[2]
_CLASSES = (
    "CaptureError",
    "ExecutionError",
    "PlanError",
    "GraphError",
    "FormatError",
    "LayoutError",
)
_RAISERS = {
    *_CLASSES,
    "SolverUnavailable",
    "MeasurementError",
    "ReportUnavailable",
    "BenchmarksUnavailable",
}


# -- codes in the sources and on the page


@functools.cache
def _calls() -> list[tuple[str, str, ast.Call]]:
    """File and line, name of the function, and the call: every call in the package."""
    found = []
    for path in sorted((_ROOT / "python/roam").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                found.append((f"{path.relative_to(_ROOT)}:{node.lineno}", name, node))
    return found


def _code(name: str, call: ast.Call) -> ast.expr | None:
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "code"), None)
    return call.args[1] if given is None and "refuse" in name and len(call.args) > 1 else given


def _texts(code: ast.expr | None) -> set[str]:
    return (
        {part.value for part in ast.walk(code) if isinstance(part, ast.Constant)} if code else set()
    )


def _python_codes() -> set[str]:
    found = set()
    for _, name, call in _calls():
        if name in _RAISERS or "refuse" in name or name == "Misfit":
            found |= {text for text in _texts(_code(name, call)) if isinstance(text, str)}
    return found


def _rust_codes() -> set[str]:
    found: set[str] = set()
    for path in sorted((_ROOT / "rust").rglob("*.rs")):
        text = path.read_text()
        for body in re.findall(r"pub(?:\([a-z]+\))? fn code\(&self\).*?\n    }\n", text, re.DOTALL):
            found.update(re.findall(r'=> "([a-z_]+)"', body))
        found.update(re.findall(r'Fault \{ class: [^}]*code: "([a-z_]+)"', text))
        found.update(re.findall(r'refuse\([^;]*?, "([a-z_]+)"\)', text))
    return found


def _listed_alone() -> dict[str, list[str]]:
    """Per heading of the page, the codes that it lists without a meaning."""
    page = (_ROOT / "docs/reference/errors.md").read_text()
    alone = {}
    for section in re.split("^## ", page, flags=re.MULTILINE)[1:]:
        listed = re.search(r"^Codes: (.*?)\.$", section, re.MULTILINE | re.DOTALL)
        heading = section.partition("\n")[0]
        alone[heading] = re.findall("`([a-z_]+)`", listed[1]) if listed else []
        assert alone[heading] == sorted(set(alone[heading])), heading
        assert (f"<!-- list: codes {heading} -->" in section) == (heading in MEANINGS), heading
    return alone


def _documented_codes() -> set[str]:
    return {code for codes in (*MEANINGS.values(), *_listed_alone().values()) for code in codes}


def test_the_page_has_every_code_and_no_other() -> None:
    assert _documented_codes() == _python_codes() | _rust_codes()
    assert MEANINGS.keys() <= _listed_alone().keys()


def test_every_code_says_what_it_means() -> None:
    for heading, rows in MEANINGS.items():
        assert hasattr(roam.errors, heading) or hasattr(memory_profiler, heading), heading
        assert list(rows) == sorted(rows), heading
        assert [code for code, meaning in rows.items() if not meaning.endswith((".", ".)"))] == []


def test_the_page_on_what_holds_names_codes_that_exist() -> None:
    """What stands alone in brackets there is a code."""
    text = (_ROOT / "docs/explanation/guards.md").read_text()
    named = set(re.findall(r"\(`([a-z_]+)`[;)]", text)) - {"getattr"}
    assert len(named) > 25
    assert named <= _documented_codes()


def test_no_error_is_without_a_code() -> None:
    without = [
        where for where, name, call in _calls() if name in _RAISERS and _code(name, call) is None
    ]
    assert without == []


# -- a step for every code


class _My:
    """What a step has at hand: a model, its optimizer, a batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.batch = torch.ones(2, 4)
        self.kept: Any = None
        self.count = 0

    def step(
        self, between: Callable[[_My, torch.Tensor], Any] = lambda my, loss: None
    ) -> Callable[..., Any]:
        """A training step that calls `between` before the update."""

        def step(batch: torch.Tensor, *others: Any) -> Any:
            self.optimizer.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            result = between(self, loss)
            self.optimizer.step()
            return result

        return step


_OPERATORS = torch.library.Library("roam_test_errors", "DEF")
_OPERATORS.define("number(Tensor x) -> int")
_OPERATORS.define("bare(Tensor x) -> Tensor")
_OPERATORS.define("same(Tensor x) -> Tensor")
_OPERATORS.impl("number", lambda x: 1, "CompositeExplicitAutograd")
_OPERATORS.impl("bare", lambda x: x.clone(), "CPU")
_OPERATORS.impl("same", lambda x: x.view(-1), "CompositeExplicitAutograd")


class _Odd(torch.optim.SGD):
    """Keeps in its state what `odd` gives."""

    def __init__(self, model: nn.Module, odd: Callable[[], Any]) -> None:
        super().__init__(model.parameters(), 0.1)
        self.odd = odd

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["odd"] = self.odd()


def _between(action: Callable[[_My, torch.Tensor], Any]) -> Callable[[], Any]:
    """Captures a step with something between backward and update."""

    def capture() -> Any:
        my = _My()
        return roam.capture(my.step(action), my.batch)

    return capture


def _given(prepare: Callable[[_My], Any]) -> Callable[[], Any]:
    """Captures an ordinary step after something was done; where that gives a tensor, it is the
    batch."""

    def capture() -> Any:
        my = _My()
        batch = prepare(my)
        return roam.capture(
            my.step(lambda my, loss: my.kept is None), my.batch if batch is None else batch
        )

    return capture


def _elsewhere(does: Callable[[], object]) -> None:
    thread = threading.Thread(target=does)
    thread.start()
    thread.join()


def _replace(my: _My, name: str, value: Any) -> None:
    setattr(my, name, value)


def _assign(holder: Any, name: str, value: Any) -> None:
    setattr(holder, name, value)


def _fx(change: Callable[[torch.fx.GraphModule], Any], mode: str = "fake") -> Callable[[], Any]:
    def plan() -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        module = make_fx(lambda x: x.sin().cos(), tracing_mode=mode)(torch.randn(8))
        return roam.Graph.from_fx(change(module) or module)

    return plan


def _without_values(module: torch.fx.GraphModule) -> None:
    for node in module.graph.nodes:
        node.meta.clear()


def _calling_a_method(module: torch.fx.GraphModule) -> None:
    node = next(node for node in module.graph.nodes if node.op == "call_function")
    node.op, node.target = "call_method", "sin"


def _updated(after: Callable[[_My], Any]) -> Callable[[], Any]:
    """Captures a step with something after the update."""

    def capture() -> Any:
        my = _My()
        step = my.step()

        def longer(batch: torch.Tensor) -> None:
            step(batch)
            after(my)

        return roam.capture(longer, my.batch)

    return capture


def _raise_the_count(my: _My, loss: torch.Tensor) -> None:
    my.count += 1
    my.optimizer.param_groups[0]["lr"] = 2**my.count * 0.1


def _two_fake_modes() -> Any:
    with roam.fake("cpu"):
        my = _My()
    with roam.fake("cpu"):
        batch = torch.ones(2, 4)
    return roam.capture(my.step(), batch)


def _first_step_of_a_trained_model() -> Any:
    my = _My()
    my.step()(my.batch)
    return roam.capture(my.step(), my.batch, step="first")


def _autocast_around() -> Any:
    my = _My()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return roam.capture(my.step(), my.batch)


def _counting() -> Any:
    my, calls = _My(), []
    return roam.capture(my.step(lambda my, loss: calls.append(len(calls))), my.batch)


def _alternating() -> Any:
    my = _My()
    turns = iter(range(10))

    class Turn:
        def __len__(self) -> int:
            return next(turns)

    return roam.capture(
        my.step(lambda my, loss: [my.x.sin() for _ in range(len(Turn()))]), my.batch
    )


def _compiled_function(*arguments: Any, plain: Any = torch.sin, **options: Any) -> Any:
    """A step that calls a compiled function with its loss, and with more arguments."""
    my = _My()
    compiled = torch.compile(plain, **{"backend": "eager", **options})
    my.kept = lambda loss: compiled(loss, *arguments)
    torch.compiler.reset()
    try:
        return roam.capture(my.step(lambda my, loss: my.kept(loss)), my.batch)
    finally:
        torch.compiler.reset()


def _compiled_too_often() -> Any:
    with torch._dynamo.config.patch(recompile_limit=1):
        my = _My()
        compiled = torch.compile(lambda loss, number: loss * number, backend="eager", dynamic=False)
        my.kept = lambda loss: compiled(loss, 2) + compiled(loss, 3)
        torch.compiler.reset()
        try:
            return roam.capture(my.step(lambda my, loss: my.kept(loss)), my.batch)
        finally:
            torch.compiler.reset()


def _by_another_pytorch(act: Callable[[], Any]) -> Any:
    """With a PyTorch that does not let anybody look at what it has compiled."""
    with (
        mock.patch("roam.tracing.stand_ins.fake_state.frame_evaluation", lambda: None),
        mock.patch("roam.tracing.compiled.regions.frame_evaluation", lambda: None),
        mock.patch("roam.torch_compat.private.frame_evaluation", lambda: None),
    ):
        return act()


def _failing_backend(*_: Any) -> Any:
    raise ValueError("no kernels today")


def _with_a_break(loss: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return loss.sin()


class _Tuples(_Odd):
    """Keeps a tuple in its state from the start."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, lambda: 1)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = (torch.ones(1),)


def _parted(my: _My, loss: torch.Tensor) -> None:
    my.first = my.first + loss.detach()


def _parting() -> Any:
    my = _My()
    my.first = my.second = torch.zeros(())
    return roam.capture(my.step(lambda my, loss: (my.second, _parted(my, loss))), my.batch)


def _behind_a_view() -> Any:
    my = _My()
    my.kept = types.MappingProxyType({"mask": torch.ones(4)})
    return roam.capture(my.step(lambda my, loss: my.kept["mask"].sin()), my.batch)


def _hidden(value: Any) -> Callable[[], Any]:
    """What gives a value back without holding it in any way that Python shows."""
    address = id(value)
    return lambda: ctypes.cast(address, ctypes.py_object).value


def _from_elsewhere() -> Any:
    my, tensor = _My(), torch.ones(())
    found = _hidden(tensor)
    graph = roam.capture(my.step(lambda my, loss: loss * found()), my.batch)
    return graph, tensor


def _symbol_of_another_tracer(my: _My, loss: torch.Tensor) -> Any:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return loss * ShapeEnv().create_unbacked_symfloat()


def _unlike_itself() -> Any:
    my, turns = _My(), [iter(range(100))]
    found = _hidden(turns[0])
    graph = roam.capture(
        my.step(lambda my, loss: loss.sin() if next(found()) % 2 else loss.cos()), my.batch
    )
    return graph, turns


class _Asking(torch.optim.SGD):
    """Goes by a number that the step before made from weights."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "norm" in state and state["norm"] > 1:
                parameter.data.mul_(0.5)
            state["norm"] = parameter.detach().norm()


class _Halving(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _noted(my: _My) -> Any:
    batch: Any = OrderedDict(x=torch.ones(2, 4))
    batch.note = 1
    return batch


def _hooked(tensor: torch.Tensor) -> torch.Tensor:
    tensor.register_hook(lambda gradient: gradient * 2)
    return tensor


def _in_a_dispatch_mode() -> Any:
    my = _My()
    with _Halving():
        return roam.capture(my.step(), my.batch)


def _recurrent_elsewhere() -> Any:
    my = _My()
    my.model = nn.Sequential(nn.LSTM(4, 4, device="meta"))
    return roam.capture(my.step(), my.batch)


REFUSED: dict[str, Callable[[], Any]] = {
    "address": _between(lambda my, loss: loss.data_ptr()),
    "argument": lambda: roam.capture(_My().step(), torch.ones(2, 4), step="last"),  # type: ignore[arg-type]
    "argument_gradient": _given(lambda my: _hooked(torch.ones(2, 4, requires_grad=True))),
    "autocast_cache": _autocast_around,
    "autograd_node": _given(lambda my: _replace(my, "kept", my.model[0].weight.sum().grad_fn)),
    "compiled_call": lambda: _compiled_function(object(), plain=lambda loss, _: loss.sin()),
    "compiled_cudagraphs": lambda: _compiled_function(backend="inductor", mode="reduce-overhead"),
    "compiled_function": lambda: _by_another_pytorch(_compiled_function),
    "compiled_graph_break": lambda: _compiled_function(plain=_with_a_break, fullgraph=True),
    "compiled_module": lambda: _by_another_pytorch(
        _given(lambda my: _replace(my, "model", torch.compile(my.model)))
    ),
    "compiled_region": lambda: _compiled_function(backend=_failing_backend),
    "compiled_too_often": _compiled_too_often,
    "container_attribute": _given(_noted),
    "data_dependent": _between(lambda my, loss: my.batch[my.batch > 0]),
    "dispatch_mode": _in_a_dispatch_mode,
    "fake_modes": _two_fake_modes,
    "foreign_symbol": _between(_symbol_of_another_tracer),
    "foreign_operator": _between(lambda my, loss: torch.ops.roam_test_errors.number(loss)),
    "fx_metadata": _fx(_without_values),
    "fx_node": _fx(_calling_a_method),
    "fx_symbolic": _fx(lambda module: None, "symbolic"),
    "generator_state": _between(lambda my, loss: torch.initial_seed()),
    "hidden_alias": _between(lambda my, loss: torch.ops.roam_test_errors.same(my.batch)),
    "inplace_view": _between(lambda my, loss: my.batch.unsqueeze_(0)),
    "iterator": _given(lambda my: _replace(my, "kept", iter([1, 2]))),
    "layout": _given(lambda my: torch.ones(2, 4).to_sparse()),
    "live_power": _between(_raise_the_count),
    "moved": _counting,
    "nested_state": _given(lambda my: _replace(my, "optimizer", _Tuples(my.model))),
    "no_fake_kernel": _between(lambda my, loss: torch.ops.roam_test_errors.bare(loss)),
    "no_first_step": _first_step_of_a_trained_model,
    "optimizer": _given(
        lambda my: _replace(my, "optimizer", torch.optim.LBFGS(my.model.parameters()))
    ),
    "optimizer_form": _given(
        lambda my: _replace(
            my, "optimizer", torch.optim.SGD(my.model.parameters(), 0.1, differentiable=True)
        )
    ),
    "optimizer_state": _given(lambda my: _replace(my, "optimizer", _Odd(my.model, object))),
    "outer_history": _given(lambda my: my.model[0](torch.ones(2, 4))),
    "owner_removed": _between(lambda my, loss: delattr(my.model[1], "bias")),
    "parameter_replaced": _between(
        lambda my, loss: _assign(my.model[1], "bias", nn.Parameter(torch.zeros(1)))
    ),
    "pickled": _between(lambda my, loss: copy.copy(my.batch)),
    "rate": _updated(lambda my: my.optimizer.param_groups[0].update(lr="fast")),
    "recurrent_layer": _recurrent_elsewhere,
    "refused_operator": _between(lambda my, loss: my.batch.resize_(4)),
    "result": _between(lambda my, loss: object()),
    "scaler": _between(lambda my, loss: torch.amp.GradScaler("cpu").scale(loss)),
    "script_module": _given(lambda my: _replace(my, "model", torch.jit.script(my.model))),
    "step_raised": _between(lambda my, loss: 1 / 0),
    "storage_replaced": _between(
        lambda my, loss: (
            torch._C.TensorBase.data.__set__(my.batch, torch.zeros(2, 4)) or my.batch.sin()
        )
    ),
    "subclass": _given(lambda my: torch.ones(2, 4).as_subclass(type("Own", (torch.Tensor,), {}))),
    "tensor_attribute": _given(lambda my: _assign(my.batch, "noted", torch.ones(1))),
    "thread": _between(lambda my, loss: _elsewhere(lambda: my.batch.add_(1))),
    "uninitialized_parameter": _given(lambda my: _replace(my, "model", nn.LazyLinear(1))),
    "unknown_state": _given(
        lambda my: _replace(my, "optimizer", _Asking(my.model.parameters(), 0.1))
    ),
    "unknown_tensor": _from_elsewhere,
    "unsettled": _parting,
    "unstable": _unlike_itself,
    "value_reached_python": _between(lambda my, loss: hash(loss.item()) and loss.sin()),
    "wrapped_place": _behind_a_view,
}
"""What is refused, by its code."""
OF_COMPILED_REGIONS = {
    "compiled_call", "compiled_cudagraphs", "compiled_graph_break", "compiled_region", "compiled_too_often",
}  # fmt: skip


def test_every_refusal_has_a_test() -> None:
    lines = [
        line
        for path in (_ROOT / "tests").rglob("test_*.py")
        for line in path.read_text().splitlines()
    ]
    asserted = {
        text
        for line in lines
        if "code" in line or "refused" in line
        for text in re.findall(r'"([a-z_]+)"', line)
    }
    assert sorted(_python_codes() - REFUSED.keys() - asserted) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, marks=needs_2_15) if code in OF_COMPILED_REGIONS else code
        for code in REFUSED
    ],
)
def test_a_refusal_has_its_code_and_names_the_remedy_first(code: str) -> None:
    with pytest.raises(roam.CaptureError) as caught:
        REFUSED[code]()
    assert caught.value.code == code, str(caught.value)


@pytest.mark.parametrize(
    "product",
    [
        lambda x: x.prod(),
        lambda x: x.prod(1).sum(),
        lambda x: torch.autograd.grad(x.cumprod(0).sum(), x, create_graph=True)[0].sum(),
    ],
)
def test_gradients_that_go_by_zeros_are_refused(product: Callable[[Any], Any]) -> None:
    my = _My()
    with pytest.raises(roam.CaptureError, match="gradient of prod") as caught:
        roam.capture(my.step(lambda my, loss: product(my.model[0].weight).backward()), my.batch)
    assert caught.value.code == "data_dependent"


def test_another_leaf_that_requires_a_gradient_is_refused() -> None:
    class Attack:
        pass

    attack: Any = Attack()
    attack.delta = torch.zeros(3, requires_grad=True)

    def step(weight: torch.Tensor) -> torch.Tensor:
        loss = (attack.delta * weight).square().sum()
        (gradient,) = torch.autograd.grad(loss, attack.delta)
        attack.delta = (attack.delta - gradient).detach().requires_grad_()
        return loss

    with pytest.raises(roam.CaptureError, match=r"requires a gradient") as caught:
        roam.compile(step)(torch.ones(3))
    assert caught.value.code == "parameter_replaced"
