"""Operators of a user's own and of other libraries: eager's bits, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision

import roam
from steps import Block, images, refused, same_by_plan, train
from training import assert_same_bits

functional = torch.nn.functional


@torch.library.custom_op("roam_layers::cube", mutates_args=())
def cube(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() ** 3) * scale


@cube.register_fake
def _(x, scale):
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, gradient: (gradient * 3 * ctx.saved_tensors[0].square() * ctx.scale, None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(inputs[0]),
        setattr(ctx, "scale", inputs[1]),
    )[0],
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


@torch.library.custom_op(
    "roam_layers::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
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
    """Does something of its own around the operator, which the operator must not do once more at
    run time."""

    @staticmethod
    def forward(ctx, x):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.roam_layers.doubled(x + 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


_library.impl("doubled", _Doubled.apply, "Autograd")


@torch.library.custom_op("roam_layers::update_", mutates_args={"p", "average"})
def update_(
    p: torch.Tensor,
    grad: torch.Tensor,
    average: torch.Tensor,
    lr: float,
    betas: list[float],
    step: int,
) -> None:
    average.lerp_(grad, 1 - betas[0])
    p.sub_(average * (lr / (1 - betas[0] ** step)))


@torch.library.custom_op("roam_layers::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@torch.library.custom_op("roam_layers::cut", mutates_args=())
def cut(x: torch.Tensor, share: float) -> torch.Tensor:
    return x.flatten()[: max(1, int(share * 4))].clone()


@torch.library.custom_op("roam_layers::first", mutates_args=())
def first(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.flatten()[:count].clone()


update_.register_fake(lambda *_: None)
scaled.register_fake(lambda x, factor: torch.empty_like(x))
cut.register_fake(lambda x, share: x.new_empty(max(1, int(share * 4))))
first.register_fake(lambda x, count: x.new_empty(count))


def _update_defined(p, grad, average, lr, step, *, beta):
    average.lerp_(grad, 1 - beta)
    p.sub_(average * (lr / (1 - beta**step)))


_ARGUMENTS = (
    "(Tensor(a!) p, Tensor g, Tensor(b!) average, float lr, int step, *, float? beta) -> ()"
)
for _name, _keys in (
    ("defined_", ("CPU",)),
    ("explicit_", ("CompositeExplicitAutograd",)),
    ("composite_", ("CompositeImplicitAutograd",)),
    ("wrapped_", ("CPU", "Autograd")),
):
    _library.define(f"{_name}{_ARGUMENTS}")
    for _key in _keys:
        _library.impl(_name, _update_defined, _key)
    if _keys[0] != "CompositeImplicitAutograd":
        torch.library.register_fake(f"roam_layers::{_name}", lambda *_, **__: None, lib=_library)


class OfOperator(torch.optim.Optimizer):
    """An optimizer whose update is one operator of its library."""

    def __init__(self, parameters: Any, update: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.99)})
        self.update = update

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, average=torch.zeros_like(p))
                state["step"] += 1
                self.update(p, p.grad, state["average"], group, state["step"])


def by_custom_op(p, grad, average, group, step):
    update_(p, grad, average, group["lr"], [*group["betas"]], step)


def by_packet(p, grad, average, group, step):
    torch.ops.roam_layers.defined_(p, grad, average, group["lr"], step, beta=group["betas"][0])


def by_overload(p, grad, average, group, step):
    torch.ops.roam_layers.explicit_.default(
        p, grad, average, group["lr"] * 2, step + 1, beta=group["betas"][0]
    )


def with_result(p, grad, average, group, step):
    average.copy_(scaled(grad, group["lr"] / step))
    p.sub_(average)


def with_a_tensors_number(p, grad, average, group, step):
    p.sub_(scaled(grad, grad.norm().item()))


def with_a_tensor_as_number(p, grad, average, group, step):
    p.sub_(scaled(grad, grad.norm()))


def by_composite(p, grad, average, group, step):
    torch.ops.roam_layers.composite_(p, grad, average, group["lr"], step, beta=0.9)


def by_wrapped(p, grad, average, group, step):
    torch.ops.roam_layers.wrapped_(p, grad, average, group["lr"], step, beta=0.9)


def whose_number_decides(p, grad, average, group, step):
    p.sub_(cut(grad, group["lr"]).sum())


def whose_integer_decides(p, grad, average, group, step):
    p.sub_(first(grad, step).sum())


def in_vmap(p, grad, average, group, step):
    p.sub_(torch.vmap(lambda g: scaled(g, group["lr"]))(grad))


class TestOptimizersOfOperators:
    """Rates and counters are given to operators of others, and change at every call."""

    def trained(self, update: Any, wrap: Any, calls: int = 6) -> Any:
        torch.manual_seed(0)
        model = Block()
        optimizer = OfOperator(model.parameters(), update)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        planned, losses = wrap(step), []
        for x in images(calls):
            optimizer.param_groups[0]["lr"] *= 0.8
            losses.append(planned(x))
        self.planned = planned
        return losses, list(model.parameters()), [*optimizer.state.values()]

    @pytest.mark.parametrize(
        "update", [by_custom_op, by_packet, by_overload, with_result, with_a_tensors_number]
    )
    def test_one_plan_has_eagers_bits(self, update: Any) -> None:
        expected = self.trained(update, lambda step: step)
        assert_same_bits(expected, self.trained(update, roam.compile))
        assert len(self.planned.plans) <= 2

    @pytest.mark.parametrize(
        "update",
        [by_composite, by_wrapped, whose_number_decides, whose_integer_decides, in_vmap],
    )
    def test_where_the_number_would_not_arrive_as_it_is_the_step_is_refused(
        self, update: Any
    ) -> None:
        with pytest.raises(roam.CaptureError) as caught:
            self.trained(update, roam.compile)
        assert caught.value.code == "value_reached_python"

    def test_a_tensor_where_the_operator_takes_a_number_is_named(self) -> None:
        with pytest.raises(
            roam.CaptureError, match=r"roam_layers::scaled gets .* factor"
        ) as caught:
            self.trained(with_a_tensor_as_number, roam.compile)
        assert caught.value.code == "value_reached_python"
        assert caught.value.operator == "roam_layers.scaled"


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
        assert "test_custom_operators.py" in str(error)

    @pytest.mark.parametrize(
        ("operator", "reason"),
        [(secretly_noisy, "drew random numbers"), (secretly_changing, "wrote to an argument")],
    )
    def test_whose_schema_lies_are_found_out_by_the_first_run(
        self, operator: Any, reason: str
    ) -> None:
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


def test_a_custom_operator_leaves_the_pool_free_to_grow() -> None:
    """It may hand its arguments to NumPy, after which their memory could neither grow nor be given
    back."""
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


_widened: list[int] = []


@torch.library.custom_op("tests::widened", mutates_args=())
def _widen(codes: torch.Tensor, is_steady: bool) -> torch.Tensor:
    _widened.append(0)
    return codes.to(torch.float32) * (0.01 if is_steady else 0.01 * len(_widened))


_widen.register_fake(lambda codes, is_steady: codes.new_empty(codes.shape, dtype=torch.float32))


def _narrow(is_steady: bool) -> tuple[Any, Any, Any]:
    """A step on frozen weights of whole numbers, which it makes wide for each product."""
    torch.manual_seed(0)
    codes = [torch.randint(-9, 9, (128, 128), dtype=torch.int8) for _ in range(6)]
    shift = torch.nn.Parameter(torch.zeros(128))

    def step(x: torch.Tensor) -> torch.Tensor:
        h = x + shift
        for one in codes:
            h = torch.tanh(torch.nn.functional.linear(h, _widen(one, is_steady)))
        loss = h.square().mean()
        loss.backward()
        with torch.no_grad():
            shift.sub_(shift.grad)
        shift.grad = None
        return loss

    return step, shift, torch.randn(4, 128)


def test_a_pure_operator_of_others_runs_again_under_a_limit() -> None:
    step, shift, x = _narrow(is_steady=True)
    other, planned_shift, _ = _narrow(is_steady=True)
    free = roam.compile(_narrow(is_steady=True)[0])
    free(x)
    inside = free.memory().total_bytes - free.memory().persistent_bytes
    planned = roam.compile(other, memory=free.memory().persistent_bytes + inside // 2)
    for _ in range(3):
        assert torch.equal(step(x), planned(x))
    assert torch.equal(shift, planned_shift)
    assert planned.memory().extra_runs > 0


def test_an_operator_of_others_that_makes_other_bits_is_found() -> None:
    free = roam.compile(_narrow(is_steady=True)[0])
    step, shift, x = _narrow(is_steady=False)
    free(x)
    inside = free.memory().total_bytes - free.memory().persistent_bytes
    with pytest.raises(roam.ExecutionError, match="made other bits") as error:
        roam.compile(step, memory=free.memory().persistent_bytes + inside // 2)(x)
    assert error.value.code == "differs_from_capture"
    assert not shift.any()


def test_equal_operators_of_others_all_run() -> None:
    codes = torch.ones(4, dtype=torch.int8)
    planned = roam.compile(lambda: _widen(codes, False) + _widen(codes, False))
    planned()
    before = len(_widened)
    expected = 0.01 * (before + 1) + codes.float() * (0.01 * (before + 2))
    assert torch.allclose(planned(), expected)
    assert len(_widened) == before + 2
