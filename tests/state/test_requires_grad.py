"""What autograd sees after a step by plan: `requires_grad`, leaves, gradients and histories are as
in eager PyTorch, or the step is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import roam
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
functional = torch.nn.functional
nn = torch.nn
Made = tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]], list[Any]]
"""A step, the arguments of each call, and what outlives the step."""


def images(_: int) -> tuple[Any, ...]:
    return (torch.rand(4, 6),)


def attack() -> Made:
    """The fast gradient sign method, as the tutorial has it."""
    net = nn.Linear(6, 2)

    def step(image: torch.Tensor) -> torch.Tensor:
        image.requires_grad = True
        loss = functional.cross_entropy(net(image), torch.ones(4, dtype=torch.int64))
        net.zero_grad()
        loss.backward()
        return torch.clamp(image + 0.1 * image.grad.sign(), 0, 1)

    return step, images, [net]


def attacked_again() -> Made:
    """The same images at every call: their gradients accumulate."""
    net, image = nn.Linear(6, 2), torch.rand(4, 6)

    def step(image: torch.Tensor) -> None:
        image.requires_grad_()
        net(image).square().sum().backward()

    return step, lambda _: (image,), [net]


def penalty() -> Made:
    net = nn.Linear(6, 1)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)

    def step(image: torch.Tensor) -> torch.Tensor:
        image.requires_grad_()
        (gradient,) = torch.autograd.grad(net(image).tanh().sum(), image, create_graph=True)
        loss = (gradient.norm(2, dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        image.requires_grad_(False)
        return loss

    return step, images, [net]


def leaves() -> Made:
    """Parameters that are mere arguments, and inputs of which one is not used."""
    weights = [torch.randn(6, 2, requires_grad=True), torch.randn(2, requires_grad=True)]

    def step(weights: list[torch.Tensor], x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        loss = (x @ weights[0] + weights[1]).square().sum()
        loss.backward()
        with torch.no_grad():
            for weight in weights:
                weight -= 0.01 * weight.grad
                weight.grad = None
        return loss

    return (
        step,
        lambda _: (
            weights,
            torch.randn(4, 6, requires_grad=True),
            torch.randn(3, requires_grad=True),
        ),
        [],
    )


def with_gradients_or_not() -> Made:
    def call(number: int) -> tuple[Any, ...]:
        x = torch.randn(4, 6, requires_grad=True)
        x.grad = torch.ones(4, 6) if number % 2 else None
        return (x,)

    def step(x: torch.Tensor) -> torch.Tensor:
        (x * 3).sum().backward()
        seen = x.grad.clone()
        x.grad.zero_()
        return seen

    return step, call, []


def dropped() -> Made:
    image = torch.randn(4, 6, requires_grad=True)
    image.grad = torch.ones(4, 6)

    def step(x: torch.Tensor) -> torch.Tensor:
        before, x.grad = x.grad, None
        return before * 2 if before is not None else x * 2

    return step, lambda _: (image,), []


def one_parameter() -> Made:
    weight = nn.Parameter(torch.randn(6))

    def step(weight: torch.Tensor, x: torch.Tensor) -> None:
        (weight * x).sum().square().backward()

    return step, lambda _: (weight, torch.randn(4, 6)), []


def same_twice() -> Made:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        (x * y).sum().backward()

    def call(_: int) -> tuple[Any, ...]:
        x = torch.randn(3, requires_grad=True)
        return x, x

    return step, call, []


def adversaries(*, restored: bool = False) -> Made:
    """A generator's step has the discriminator not require gradients, and may leave it so."""
    judge, maker = nn.Linear(6, 1), nn.Linear(6, 6)
    optimizers = [torch.optim.Adam(net.parameters(), 0.1) for net in (judge, maker)]

    def step(real: torch.Tensor) -> None:
        for parameter in judge.parameters():
            parameter.requires_grad = True
        optimizers[0].zero_grad()
        (judge(maker(real).detach()) - judge(real)).mean().backward()
        optimizers[0].step()
        for parameter in judge.parameters():
            parameter.requires_grad = False
        optimizers[1].zero_grad()
        (-judge(maker(real))).mean().backward()
        optimizers[1].step()
        judge.requires_grad_(restored)

    return step, images, [judge, maker]


def unfrozen() -> Made:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    net[0].requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)

    def step(x: torch.Tensor, is_late: bool) -> None:
        if is_late:
            net[0].requires_grad_(True)
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    return step, lambda number: (torch.randn(4, 6), number >= 2), [net]


def by_turns() -> Made:
    net = nn.Linear(6, 1)

    def step(x: torch.Tensor) -> None:
        net.weight.requires_grad = not net.weight.requires_grad
        net(x).sum().backward()

    return step, images, [net]


def buffer() -> Made:
    net = nn.Linear(6, 1)
    net.register_buffer("shift", torch.zeros(6))

    def step(x: torch.Tensor) -> None:
        net.shift.requires_grad_()
        net(x + net.shift).sum().backward()

    return step, images, [net]


def results() -> Made:
    net = nn.Linear(6, 1)

    def step(x: torch.Tensor) -> Any:
        out = net(x)
        loss = out.square().mean()
        loss.backward()
        leaf = torch.zeros(3, requires_grad=True)
        return {
            "loss": loss,
            "out": out,
            "detached": out.detach(),
            "weight": net.weight,
            "x": x,
            "again": loss,
            "leaf": leaf,
        }

    return step, images, [net]


def views_of_parameters() -> Made:
    """They have the parameter's memory, which the optimizer updates after they are made."""
    net = nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        views = net.weight.view(-1), net.weight[0], net.weight.detach()
        net(x).square().mean().backward()
        optimizer.step()
        return views

    return step, images, [net]


def kept() -> Made:
    """What a step keeps has the history of the eager step, as far as anyone can see."""
    net = nn.Linear(6, 1)
    net.register_buffer("last", torch.zeros(4, 1))
    net.register_buffer("total", torch.zeros(()))

    def step(x: torch.Tensor) -> torch.Tensor:
        net.last = net(x)
        loss = net.last.square().mean()
        net.total = net.total + loss
        loss.backward()
        return net.total

    return step, images, [net]


def gradients_of_gradients() -> Made:
    net = nn.Linear(6, 1)

    def step(x: torch.Tensor) -> None:
        net(x.requires_grad_()).tanh().sum().backward(create_graph=True)

    return step, images, [net]


STEPS: dict[str, Callable[[], Made]] = {
    "attack": attack,
    "attacked again": attacked_again,
    "penalty": penalty,
    "leaves": leaves,
    "with gradients or not": with_gradients_or_not,
    "dropped": dropped,
    "one parameter": one_parameter,
    "same twice": same_twice,
    "adversaries": adversaries,
    "adversaries, restored": functools.partial(adversaries, restored=True),
    "unfrozen": unfrozen,
    "by turns": by_turns,
    "buffer": buffer,
    "results": results,
    "views of parameters": views_of_parameters,
    "kept": kept,
    "gradients of gradients": gradients_of_gradients,
}


def seen(tensor: torch.Tensor) -> list[Any]:
    """What autograd sees of a tensor."""
    gradient = tensor.grad if tensor.is_leaf else None
    found = [
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.grad_fn is not None,
        gradient is not None,
        gradient,
    ]
    return found if gradient is None else [*found, gradient.requires_grad, gradient.is_leaf]


def after_steps(make: Callable[[], Made], wrap: Callable[..., Any]) -> list[Any]:
    torch.manual_seed(0)
    step, arguments, nets = make()
    step = wrap(step)
    found: list[Any] = []
    for number in range(4):
        args = arguments(number)
        result = step(*args)
        kept = [tensor for net in nets for tensor in (*net.parameters(), *net.buffers())]
        tensors = [
            leaf
            for leaf in pytree.tree_leaves((result, args, kept))
            if isinstance(leaf, torch.Tensor)
        ]
        found += tensors_and_numbers(tensors, [seen(tensor) for tensor in tensors])
        found += [list(map(id, tensors)).index(id(tensor)) for tensor in tensors]
    return found


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("name", STEPS)
def test_autograd_sees_what_it_sees_eagerly(name: str) -> None:
    eager = after_steps(STEPS[name], lambda step: step)
    compiled = functools.partial(roam.compile, poison=True, pool=True, keep_grads=True)
    assert_same_bits(eager, after_steps(STEPS[name], compiled))


def test_other_sizes_and_gradients_take_plans_of_their_own() -> None:
    net = nn.Linear(6, 2)

    @roam.compile
    def step(image: torch.Tensor) -> torch.Tensor:
        image.requires_grad_()
        net(image).tanh().sum().backward()
        return image.grad * 2

    for rows in (2, 3, 2, 3):
        image = torch.rand(rows, 6)
        doubled = step(image)
        assert_same_bits([image.grad * 2], [doubled])
    assert len(step.kept().plans) == 2


def test_a_later_step_is_not_planned_anew_where_flags_are_put_back() -> None:
    make, images_of, _ = adversaries(restored=True)
    step = roam.compile(make)
    for number in range(4):
        step(*images_of(number))
    assert len(step.kept().plans) == 1


class TestHistories:
    def test_a_backward_pass_through_a_result_is_refused(self) -> None:
        net, other = nn.Linear(6, 1), nn.Parameter(torch.ones(()))
        step = roam.compile(lambda x: net(x).mean())
        loss = step(torch.randn(4, 6)) + other  # without a history this would leave the net out
        with pytest.raises(roam.ExecutionError, match=r"detach what it leaves") as caught:
            loss.backward()
        assert caught.value.code == "step_is_over"

    @pytest.mark.parametrize("kept", [False, True])
    def test_a_gradient_of_what_a_result_was_made_of_is_refused(self, kept: bool) -> None:
        """Also where there is another way to it, on which a gradient would be found, but not all of
        it."""
        weights, held = [nn.Parameter(torch.ones(3)) for _ in range(2)], _held(torch.zeros(3))
        x, outer = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True) * 2

        def make(x: torch.Tensor, outer: torch.Tensor) -> Any:
            made = (weights[0] * x).square().sum(), (weights[1] * outer).square().sum()
            if not kept:
                return made
            held.value = [made[0]]
            held.other = made[1]
            return None

        def results(function: Callable[..., Any]) -> Any:
            made = function(x, outer)
            return (held.value[0], held.other) if kept else made

        eager, planned = results(make), results(roam.compile(make))
        for place, one in enumerate((weights[0], weights[1], x, outer)):
            sums = [made + one.sum() for made in (*eager, *planned)]
            assert (
                torch.autograd.grad(sums[place % 2], one, retain_graph=True)[0].tolist()
                != [1.0] * 3
            )
            gradients = [
                torch.autograd.grad(sums[1 - place % 2 + offset], one)[0] for offset in (0, 2)
            ]
            assert_same_bits(gradients[:1], gradients[1:])
            with pytest.raises(roam.ExecutionError) as caught:
                torch.autograd.grad(sums[2 + place % 2], one)
            assert caught.value.code == "step_is_over"

    def test_a_gradient_of_what_required_one_in_the_step_alone(self) -> None:
        net, image = nn.Linear(6, 1), torch.rand(4, 6)

        def step(image: torch.Tensor) -> torch.Tensor:
            image.requires_grad_()
            loss = net(image).square().sum()
            image.requires_grad_(False)
            net.requires_grad_(False)
            return loss

        loss = roam.compile(step)(image)
        assert loss.requires_grad
        for tensor in (image, net.weight):
            assert not tensor.requires_grad
            tensor.requires_grad_()
            with pytest.raises(roam.ExecutionError) as caught:
                torch.autograd.grad(loss + tensor.sum(), tensor)
            assert caught.value.code == "step_is_over"

    def test_results_are_changed_in_place_as_eagerly(self) -> None:
        net = nn.Linear(6, 1)
        step = roam.compile(lambda x: net(x).mean())
        x = torch.randn(4, 6)
        loss, expected = step(x), net(x).mean()
        loss /= 3
        assert_same_bits([loss.detach()], [(expected / 3).detach()])
        with pytest.raises(RuntimeError, match="requires grad"):
            loss.numpy()

    def test_a_result_with_a_history_is_refused_by_the_next_step(self) -> None:
        """As eagerly the gradient would flow on to the first."""
        first, second = nn.Linear(6, 6), nn.Linear(6, 1)
        one, two = roam.compile(first.forward), roam.compile(lambda h: second(h).sum().backward())
        h = one(torch.randn(4, 6))
        with pytest.raises(roam.CaptureError) as caught:
            two(h)
        assert caught.value.code == "outer_history"
        two(h.detach())

    def test_losses_added_up_over_calls_are_refused_where_they_go_backward(self) -> None:
        weight, held = nn.Parameter(torch.ones(3)), _held(torch.zeros(()))

        @roam.compile
        def step(x: torch.Tensor, is_last: bool) -> None:
            held.value = held.value + (weight * x).sum().square()
            if is_last:
                held.value.backward()
                held.value = torch.zeros(())

        step(torch.ones(3), False)
        assert held.value.requires_grad
        with pytest.raises(roam.CaptureError, match=r"detach closure held\.value here") as caught:
            step(torch.ones(3), True)
        assert caught.value.code == "outer_history"
        assert weight.grad is None
        with pytest.raises(roam.ExecutionError) as raised:
            held.value.backward()
        assert raised.value.code == "step_is_over"


class _Held:
    value: Any = None


def _held(value: Any) -> _Held:
    held = _Held()
    held.value = value
    return held


def _hook(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return x


WEIGHT = nn.Parameter(torch.ones(3))
REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "a leaf in the place of another": (
        lambda held, x: setattr(held, "value", (held.value + x).detach().requires_grad_()),
        "parameter_replaced",
    ),
    "a parameter in the place of a tensor": (
        lambda held, x: setattr(held, "value", nn.Parameter(x * 2, requires_grad=False)),
        "parameter_replaced",
    ),
    "a tensor in exchange for another": (
        lambda held, x: torch.utils.swap_tensors(held.value, x * 2),
        "parameter_replaced",
    ),
    "a history written in place": (lambda held, x: held.value.mul_(WEIGHT), "outer_history"),
    "a history written into an argument": (lambda held, x: x.mul_(WEIGHT), "outer_history"),
    "a gradient that is a leaf": (
        lambda held, x: setattr(WEIGHT, "grad", torch.zeros(3, requires_grad=True)),
        "parameter_replaced",
    ),
    "a parameter as a result": (lambda held, x: nn.Parameter(x * 2), "result"),
    "a result with a gradient": (
        lambda held, x: _with_gradient((x * 2).detach().requires_grad_()),
        "result",
    ),
    "a hook that stays on an argument": (
        lambda held, x: _hook(x.requires_grad_()).sum().backward(),
        "moved",
    ),
    "a hook that stays on a parameter": (
        lambda held, x: (_hook(WEIGHT) * x).sum().backward(),
        "moved",
    ),
    "an attribute of an argument": (lambda held, x: setattr(x, "tag", "seen"), "tensor_attribute"),
    "an attribute of a parameter": (
        lambda held, x: setattr(WEIGHT, "tag", "seen"),
        "tensor_attribute",
    ),
    "an attribute of a result": (lambda held, x: _tagged(x * 2), "tensor_attribute"),
    "an attribute of a tensor that is kept": (
        lambda held, x: setattr(held, "value", _tagged(x * 2)),
        "tensor_attribute",
    ),
}


def _with_gradient(leaf: torch.Tensor) -> torch.Tensor:
    (leaf * 3).sum().backward()
    return leaf


def _tagged(tensor: torch.Tensor) -> torch.Tensor:
    tensor.tag = "seen"  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_plan_would_not_leave_is_refused(name: str) -> None:
    hostile, code = REFUSED[name]
    held, x = _held(torch.zeros(3)), torch.ones(3)

    def step(x: torch.Tensor) -> Any:
        held.value.mul_(WEIGHT.detach() + 1)
        return hostile(held, x)

    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(step)(x)
    assert caught.value.code == code, str(caught.value)
    for tensor, flag in ((x, False), (WEIGHT, True)):
        assert (vars(tensor), tensor.requires_grad, tensor.grad, tensor._backward_hooks) == (
            {},
            flag,
            None,
            None,
        )


def test_a_weak_reference_to_the_tensor_itself_may_be_noted_again() -> None:
    """As Pyro notes it on each parameter that has no constraint."""
    outcomes = []
    for wrap in (lambda step: step, roam.compile):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        noted: list[Any] = [weakref.ref(weight) for weight in weights]
        for weight, reference in zip(weights, noted, strict=True):
            weight.own = reference  # type: ignore[attr-defined]

        @wrap
        def step(x: torch.Tensor, weights: Any = weights) -> torch.Tensor:
            for weight in weights:
                weight.own = weakref.ref(weight)
            loss = sum(((weight.own() * x).square().sum() for weight in weights), x.sum())
            loss.backward()
            with torch.no_grad():
                for weight in weights:
                    weight.own().sub_(0.1 * weight.grad)
                    weight.grad = None
            return loss.detach()

        outcomes.append(tensors_and_numbers([step(torch.rand(3)) for _ in range(3)], weights))
        assert [weight.own for weight in weights] == noted  # type: ignore[attr-defined]
    assert_same_bits(*outcomes)


@pytest.mark.parametrize("to", ["itself", "another"])
def test_a_weak_reference_on_a_tensor_leads_to_what_stands_for_the_other(to: str) -> None:
    outcomes = []
    for wrap in (lambda step: step, roam.compile):
        torch.manual_seed(0)
        weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))
        noted = weight if to == "itself" else other
        weight.own = weakref.ref(noted)  # type: ignore[attr-defined]

        @wrap
        def step(x: torch.Tensor, weight: Any = weight, noted: Any = noted) -> torch.Tensor:
            loss = (weight.own() * x + weight).sum()
            loss = loss * 3 if weight.own() is noted else loss
            loss.backward()
            with torch.no_grad():
                weight.sub_(0.1 * weight.grad)
            weight.grad = noted.grad = None
            return loss.detach()

        outcomes.append(tensors_and_numbers([step(torch.rand(3)) for _ in range(3)], weight, other))
    assert_same_bits(*outcomes)


def test_a_new_weak_reference_to_another_tensor_is_refused() -> None:
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    weight.own = noted = weakref.ref(weight)  # type: ignore[attr-defined]

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.own = weakref.ref(other)  # type: ignore[attr-defined]
        return (weight + other + x).sum()

    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(step)(torch.ones(3))
    assert caught.value.code == "tensor_attribute"
    assert weight.own is noted  # type: ignore[attr-defined]


def test_an_argument_with_hooks_is_refused() -> None:
    step = roam.compile(lambda x: (x * 2).sum().backward())
    step(torch.ones(3, requires_grad=True))
    with pytest.raises(roam.CaptureError, match=r"register them in the step") as caught:
        step(_hook(torch.ones(3, requires_grad=True)))
    assert caught.value.code == "argument_gradient"


def test_attributes_that_are_there_before_are_no_matter() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.tag = "seen"  # type: ignore[attr-defined]

    @roam.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        weight.tag = "seen"  # type: ignore[attr-defined]
        return x * weight

    assert step(torch.ones(3)).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_the_dtype_of_gradients_may_change_between_steps(dtype: torch.dtype | None) -> None:
    """By default gradients of micro-batches are added up in the weights' dtype."""

    def script(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Linear(6, 3, dtype=torch.bfloat16)

        @wrap
        def step(x: torch.Tensor) -> list[torch.Tensor]:
            for part in x.chunk(4):
                (net(part).float().square().mean() * 3.3).backward()
            gradients = [p.grad.float() for p in net.parameters()]
            net.zero_grad()
            return gradients

        returned = []
        for call in range(4):
            if call == 2:
                for parameter in net.parameters():
                    parameter.grad_dtype = dtype
            returned.append(step(torch.randn(8, 6, dtype=torch.bfloat16)))
        return tensors_and_numbers(returned)

    assert_same_bits(script(lambda step: step), script(roam.compile))


def test_a_step_that_sets_the_dtype_of_gradients_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    @roam.compile
    def step() -> None:
        weight.grad_dtype = torch.float32
        weight.square().sum().backward()

    with pytest.raises(roam.CaptureError, match=r"sets grad_dtype of .*weight") as caught:
        step()
    assert caught.value.code == "moved"
    assert weight.grad_dtype is torch.bfloat16
    weight.grad_dtype = torch.float32
    step()


def test_capture_leaves_fakes_as_they_were() -> None:
    with roam.fake("cpu"):
        net, x = nn.Linear(3, 1), torch.randn(2, 3)

    def step(x: torch.Tensor) -> None:
        net(x.requires_grad_()).sum().backward()
        net.requires_grad_(False)

    roam.capture(step, x)
    assert (x.requires_grad, x.grad) == (False, None)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
