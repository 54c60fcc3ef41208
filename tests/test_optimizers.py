"""Every optimizer of PyTorch in every form: eager's bits, or a refusal that gives the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

import roam
from training import assert_same_bits, tensors_and_numbers

functional = torch.nn.functional
STEPS = 20
INFOS: dict[str, OptimizerInfo] = {info.name: info for info in optim_db}
REFUSED = ("LBFGS", "SparseAdam", "RAdam", "ASGD", "Adafactor")


class Net(torch.nn.Module):
    """Dropout, batch norm and tied weights."""

    def __init__(self, *, of_matrices: bool = False) -> None:
        """`of_matrices`: whether all parameters are matrices, which is all that Muon takes."""
        super().__init__()
        self.first = torch.nn.Linear(6, 8, bias=not of_matrices)
        self.middle = torch.nn.Linear(8, 8, bias=False)
        self.norm = torch.nn.BatchNorm1d(8, affine=not of_matrices)
        self.drop = torch.nn.Dropout(0.25)
        self.last = torch.nn.Linear(8, 8, bias=False)
        self.last.weight = self.middle.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.middle(torch.relu(self.first(x)))))))


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


def outcome(
    make: Make,
    wrap: Callable[[Any], Any],
    steps: int,
    between: Callable[[Any, int], None],
    *,
    of_matrices: bool = False,
) -> tuple[Any, list[Any]]:
    """The step, and all that some training returns and leaves behind."""
    torch.manual_seed(0)
    model = Net(of_matrices=of_matrices)
    optimizer = make(model)
    step = wrap(train_step)
    generator = torch.Generator().manual_seed(7)
    losses = []
    for place in range(steps):
        x, y = torch.randn(5, 6, generator=generator), torch.randint(0, 8, (5,), generator=generator)
        losses.append(step(model, optimizer, x, y))
        between(optimizer, place)
    return step, tensors_and_numbers(losses, model.state_dict(), optimizer.state_dict(), torch.get_rng_state())


def check(
    make: Make, *, steps: int = STEPS, between: Callable[[Any, int], None] = lambda *_: None, of_matrices: bool = False
) -> roam.runtime.compile.Step:
    """Trains by eager steps and by compiled ones, which must be the same; the compiled step."""
    _, eager = outcome(make, lambda step: step, steps, between, of_matrices=of_matrices)
    step, planned = outcome(make, roam.compile, steps, between, of_matrices=of_matrices)
    assert_same_bits(eager, planned)
    return step


def forms(info: OptimizerInfo) -> list[str]:
    """The forms that an optimizer has on the CPU."""
    found = ["foreach"] if "foreach" in info.supported_impls else []
    return ["single", *found, *(["fused"] if "cpu" in info.supports_fused_on else [])]


def options(info: OptimizerInfo, form: str) -> list[dict[str, Any]]:
    """PyTorch's own list of options to test."""
    chosen = {form: True} if form != "single" else {"foreach": False} if "foreach" in info.supported_impls else {}
    every = [given.kwargs for given in info.optim_inputs_func("cpu")]
    return [{**given, **chosen} for given in every if not isinstance(given.get("lr"), torch.Tensor)]


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name in INFOS if name not in REFUSED for form in forms(INFOS[name])]
)
def test_every_optimizer_with_every_option(name: str, form: str) -> None:
    info = INFOS[name]
    for given in options(info, form):
        check(lambda model, given=given: info.optim_cls(model.parameters(), **given), of_matrices=name == "Muon")


class TestSplitUpdates:
    """Multi-tensor and fused updates cost no more than updates one by one."""

    def wide(self) -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(12)))

    def peak(self, kind: Any, **given: Any) -> tuple[int, roam.Graph]:
        model = self.wide()
        optimizer = kind(model.parameters(), lr=0.1, **given)
        x, y = torch.randn(2, 64), torch.randint(0, 64, (2,))
        graph = roam.capture(train_step, model, optimizer, x, y)
        plan = roam.optimize(graph)
        roam.verify(graph, plan)
        return plan.peak_bytes, graph

    @pytest.mark.parametrize("form", ["foreach", "fused"])
    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
    def test_each_gradient_dies_with_its_own_update(self, kind: Any, form: str) -> None:
        peak, _ = self.peak(kind, **{form: True})
        assert peak <= self.peak(kind, foreach=False)[0]
        assert peak < 12 * 64 * 64 * 4  # less than all gradients

    def test_a_list_is_as_many_calls_as_tensors(self) -> None:
        names = [operator.name for operator in self.peak(torch.optim.AdamW, fused=True)[1].operators]
        assert names.count("aten._fused_adamw_.default") == 12
        names = [operator.name for operator in self.peak(torch.optim.AdamW, foreach=True)[1].operators]
        assert names.count("aten.addcdiv_.default") == 12
        assert not any("_foreach_" in name for name in names)

    def test_lists_that_autograd_goes_through(self) -> None:
        def script(wrap: Callable[[Any], Any]) -> list[Any]:
            torch.manual_seed(0)
            weights = [torch.nn.Parameter(torch.randn(3, 4)) for _ in range(3)]
            optimizer = torch.optim.SGD(weights, lr=0.1)

            def step(x: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                doubled = torch._foreach_mul(weights, [2.0, 3.0, 0.5])
                torch._foreach_add_(doubled, torch._foreach_norm(weights))
                loss = sum((x @ weight).square().mean() for weight in doubled)
                loss.backward()
                optimizer.step()
                return loss

            compiled = wrap(step)
            return tensors_and_numbers([compiled(torch.randn(2, 3)) for _ in range(4)], weights)

        assert_same_bits(script(lambda step: step), script(roam.compile))


class TestAccelerators:
    """What is recorded for CUDA, from the fakes of gradients that a backward pass would have left there."""

    def names(self, make: Any, *, strides: tuple[int, int] = (4, 1)) -> list[str]:
        with FakeTensorMode():
            weights = [torch.nn.Parameter(torch.empty(3, 4, device="cuda")) for _ in range(5)]
            weights.append(torch.nn.Parameter(torch.empty_strided((3, 4), strides, device="cuda")))
            for weight in weights:
                weight.grad = torch.empty(3, 4, device="cuda")
        optimizer = make(weights)

        def step() -> None:
            optimizer.step()

        return [operator.name for operator in roam.capture(step).operators]

    def test_the_form_that_pytorch_would_choose(self) -> None:
        names = self.names(torch.optim.AdamW)
        assert names.count("aten._foreach_addcdiv_.ScalarList") == 6
        assert names.count("aten.add_.Tensor") == 6  # step counts are on the CPU

    def test_a_list_that_goes_the_slow_way_as_a_whole(self) -> None:
        names = self.names(torch.optim.AdamW, strides=(1, 3))
        assert names.count("aten._foreach_lerp_.Scalar") == 1  # state as the weight lies, its gradient otherwise
        assert names.count("aten._foreach_addcdiv_.ScalarList") == 6

    def test_fused(self) -> None:
        assert self.names(lambda p: torch.optim.AdamW(p, fused=True)).count("aten._fused_adamw_.default") == 6

    def test_capturable(self) -> None:
        names = self.names(lambda p: torch.optim.AdamW(p, capturable=True))
        assert names.count("aten._foreach_addcdiv_.Scalar") == 6


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda parameters: torch.optim.LBFGS(parameters), "as often as the loss says"),
            (lambda parameters: torch.optim.SparseAdam(list(parameters)), "sparse gradients"),
            (lambda parameters: torch.optim.Adam(parameters, differentiable=True), "autograd"),
            (lambda parameters: torch.optim.Adam(parameters, capturable=True), "supported devices"),
        ],
    )
    def test_what_is_not_captured(self, make: Any, reason: str) -> None:
        model = Net()
        optimizer = make(model.parameters())
        with pytest.raises(roam.CaptureError, match=reason):
            roam.capture(train_step, model, optimizer, torch.randn(5, 6), torch.randint(0, 8, (5,)))

    def test_a_loss_scale_inside_of_a_fused_update(self) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(model, optimizer, x, y):
            optimizer.grad_scale = torch.ones(())
            train_step(model, optimizer, x, y)
            del optimizer.grad_scale

        with pytest.raises(roam.CaptureError, match="loss scale"):
            roam.capture(step, model, optimizer, torch.randn(5, 6), torch.randint(0, 8, (5,)))
