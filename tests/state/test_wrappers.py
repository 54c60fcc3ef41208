"""Tensors whose classes PyTorch's protocol takes apart, as of a library that roam knows nothing of:
their inner tensors are planned, and their own dispatch runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roam

aten = torch.ops.aten


class Scaled(torch.Tensor):
    """Whole numbers times a scale and a gain."""

    codes: torch.Tensor
    scale: torch.Tensor
    gain: Any

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, scale: torch.Tensor, gain: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=scale.dtype, device=codes.device
        )

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, gain: Any) -> None:
        self.codes, self.scale, self.gain = codes, scale, gain

    def __repr__(self) -> str:  # type: ignore[override]
        return "Scaled"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"gain": self.gain}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"], context["gain"])

    @classmethod
    def of(cls, x: torch.Tensor, gain: Any = 2.0) -> Any:
        scale = x.abs().amax().clamp_min(1e-6) / 127
        return cls((x / scale / float(gain)).round().to(torch.int8), scale, gain)

    def wide(self) -> torch.Tensor:
        return self.codes.to(self.scale.dtype) * (self.scale * float(self.gain))

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        one = args[0]
        if func is aten.copy_.default and isinstance(one, cls):
            other = args[1] if isinstance(args[1], cls) else cls.of(args[1], one.gain)
            one.codes.copy_(other.codes)
            one.scale.copy_(other.scale)
            return one
        if func in (aten.detach.default, aten.clone.default):
            return cls(func(one.codes), func(one.scale), one.gain)
        if func is aten.add_.Tensor and isinstance(one, cls):
            return one.copy_(one.wide() + kwargs.get("alpha", 1) * args[1])

        def wide(value: Any) -> Any:
            return value.wide() if isinstance(value, cls) else value

        return func(*map(wide, args), **kwargs)


class Linear(nn.Module):
    """A frozen or a trained scaled weight, a scaled buffer, and an adapter."""

    def __init__(self, inputs: int, outputs: int, *, is_trained: bool) -> None:
        super().__init__()
        weight = Scaled.of(torch.randn(outputs, inputs) / inputs**0.5)
        self.weight = nn.Parameter(weight, requires_grad=is_trained)
        self.register_buffer("shift", Scaled.of(torch.randn(outputs), 1.0))
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.linear(x, self.weight) + self.up(self.down(x)) + self.shift


class Momentum(torch.optim.Optimizer):
    """Its state is scaled, and made in the first step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = Scaled.of(torch.zeros_like(parameter.grad))
                momentum = state["momentum"].wide() * 0.9 + parameter.grad
                state["momentum"].copy_(momentum)
                parameter.add_(momentum, alpha=-group["lr"])


Step = Callable[..., Any]


def train(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.mse_loss(model(Scaled.of(x, 1.0) + 0), y)  # one that the step makes
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def made(*, is_trained: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = Linear(8, 12, is_trained=is_trained), nn.GELU(), Linear(12, 4, is_trained=is_trained)
    model = nn.Sequential(*layers)
    return model, Momentum([one for one in model.parameters() if one.requires_grad])


def batches(count: int = 3) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def plain(value: Any) -> list[torch.Tensor]:
    """All plain tensors in a nest."""
    if isinstance(value, Scaled):
        return [value.codes.clone(), value.scale.clone(), torch.tensor(float(value.gain))]
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    parts = value.values() if isinstance(value, dict) else value
    return [one for part in parts for one in plain(part)] if isinstance(value, dict | list) else []


def state_of(model: Any, optimizer: Any) -> list[torch.Tensor]:
    return plain([model.state_dict(), list(optimizer.state.values())])


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("is_trained", [False, True])
def test_weights_state_and_what_a_step_makes(is_trained: bool) -> None:
    eager, planned = made(is_trained=is_trained), made(is_trained=is_trained)
    step = roam.compile(train)
    for x, y in batches():
        assert torch.equal(train(*eager, x, y), step(*planned, x, y))
        assert same(state_of(*eager), state_of(*planned))
    assert all(type(one["momentum"]) is Scaled for one in planned[1].state.values())
    for x, y in batches(1):
        step.measured(*planned, x, y)
    measured = step.memory().measured_bytes  # without what the pool's addresses are rounded by
    assert measured is not None
    assert 0.9 * step.memory().total_bytes <= measured <= step.memory().total_bytes
    assert len(step.plans) == 2  # of the first step and of later ones


def test_a_comparison_looks_at_inner_tensors() -> None:
    model, optimizer = made()
    ((x, y),) = batches(1)
    assert roam.compare(train, model, optimizer, x, y).outcome == "equal"


def test_another_context_needs_another_plan() -> None:
    eager, planned = made(), made()
    step = roam.compile(train)
    for number, (x, y) in enumerate(batches(4)):
        if number == 2:
            for model, _ in (eager, planned):
                model[0].shift.gain = 3.0
        assert torch.equal(train(*eager, x, y), step(*planned, x, y))
    assert same(state_of(*eager), state_of(*planned))


def test_loaded_state_needs_no_other_plan() -> None:
    eager, planned = made(), made()
    step = roam.compile(train)
    for number, (x, y) in enumerate(batches(4)):
        if number == 2:
            count = len(step.plans)
            for _, optimizer in (eager, planned):
                held = copy.copy(optimizer.state)
                for parameter, entry in held.items():
                    momentum = Scaled.of(entry["momentum"].wide() * 0.5)
                    optimizer.state[parameter] = {"momentum": momentum}
        assert torch.equal(train(*eager, x, y), step(*planned, x, y))
    assert same(state_of(*eager), state_of(*planned))
    assert len(step.plans) == count


def test_state_of_another_context_needs_another_plan() -> None:
    eager, planned = made(), made()
    step = roam.compile(train)
    for number, (x, y) in enumerate(batches(4)):
        if number == 2:
            for _, optimizer in (eager, planned):
                for entry in optimizer.state.values():
                    entry["momentum"].gain = 1.0
        assert torch.equal(train(*eager, x, y), step(*planned, x, y))
    assert same(state_of(*eager), state_of(*planned))


def test_arguments_and_results() -> None:
    def step(x: Any, y: torch.Tensor) -> Any:
        x.add_(y)
        return {"twice": Scaled.of(x.wide() * 2, 5.0), "sum": (x + y).sum()}

    y = torch.randn(4)
    one, other = Scaled.of(torch.ones(4)), Scaled.of(torch.ones(4))
    planned = roam.compile(step)
    for _ in range(3):
        left, right = step(one, y), planned(other, y)
        assert [type(value) for value in right.values()] == [Scaled, torch.Tensor]
        assert same(plain([left, one]), plain([right, other]))
    third = Scaled.of(torch.ones(4), 7.0)
    assert same(plain(step(copy.deepcopy(third), y)), plain(planned(third, y)))


def test_a_place_gets_another_wrapper_and_another_inner_tensor() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", Scaled.of(torch.ones(4)))
            self.register_buffer("other", Scaled.of(torch.ones(4)))

    def step(holder: Any, x: torch.Tensor) -> torch.Tensor:
        result = holder.average + holder.other + x
        holder.average = Scaled.of(holder.average.wide() + x)
        holder.other.scale = holder.other.scale * 2
        return result

    eager, planned = Holder(), Holder()
    compiled = roam.compile(step)
    for x, _ in batches():
        assert torch.equal(step(eager, x[0, :4]), compiled(planned, x[0, :4]))
        assert same(plain(eager.state_dict()), plain(planned.state_dict()))


def test_inner_tensors_may_be_shared() -> None:
    def build() -> Any:
        base = Scaled.of(torch.arange(4.0))
        return [base, Scaled(base.codes, base.scale, 3.0), base.scale]

    def step(held: Any, x: torch.Tensor) -> torch.Tensor:
        result = held[0] + held[1] * held[2]
        held[0].add_(x)
        return result + held[1]

    eager, planned = build(), build()
    compiled = roam.compile(step)
    for x, _ in batches():
        assert torch.equal(step(eager, x[0, :4]), compiled(planned, x[0, :4]))
        assert same(plain(eager), plain(planned))


class ByIdentity:
    def __float__(self) -> float:
        return 2.0

    def __deepcopy__(self, memo: Any) -> Any:
        return ByIdentity()


def _data(held: Any, x: torch.Tensor) -> Any:
    held.data = Scaled.of(x)
    return x + 1


def _keeps_argument(held: list[Any], x: torch.Tensor) -> Any:
    held[0] = Scaled(x, x.sum(), 1.0)
    return x + 1


def _with_history(held: list[Any], x: torch.Tensor) -> Any:
    held[0] = Scaled.of(x).requires_grad_()
    return x + 1


def _other_in_place(held: Any, x: torch.Tensor) -> Any:
    held.gain = 4.0
    return x + held


@pytest.mark.parametrize(
    ("step", "held", "text"),
    [
        (_data, lambda: Scaled.of(torch.ones(4)), "another Scaled in place"),
        (_keeps_argument, lambda: [Scaled.of(torch.ones(4))], "memory of the step's arguments"),
        (_with_history, lambda: [Scaled.of(torch.ones(4))], "requires a gradient"),
        (_other_in_place, lambda: Scaled.of(torch.ones(4)), "another Scaled in place"),
        (torch.add, lambda: Scaled.of(torch.ones(4), ByIdentity()), "does not equal a copy"),
    ],
)
def test_refused(step: Step, held: Callable[[], Any], text: str) -> None:
    made = held()
    with pytest.raises(roam.CaptureError) as error:
        roam.compile(lambda x, held=made: step(held, x))(torch.ones(4))
    assert error.value.code in ("subclass", "parameter_replaced")
    assert text in str(error.value)


def test_a_number_that_changes_may_not_be_in_a_context() -> None:
    class Noted(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            (group,) = self.param_groups
            (parameter,) = group["params"]
            self.state[parameter]["last"] = Scaled(
                parameter.grad, parameter.grad.sum(), group["lr"]
            )

    parameter = nn.Parameter(torch.ones(4))
    optimizer = Noted([parameter], {"lr": 0.1})

    def step() -> None:
        parameter.sum().backward()
        optimizer.step()

    with pytest.raises(roam.CaptureError, match="keeps a number in its context") as error:
        roam.compile(step)()
    assert error.value.code == "subclass"


# -- functions that torch.compile has compiled


def _decayed(state: Any, gradient: torch.Tensor, rate: float) -> torch.Tensor:
    wide = state.wide() * rate + gradient
    state.copy_(wide)
    return wide.sqrt()


@pytest.mark.long
def test_a_compiled_function_that_every_step_makes_anew() -> None:
    def step(state: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.compile(_decayed, fullgraph=True, dynamic=False)(state, x * x, 0.5)

    eager, planned = Scaled.of(torch.ones(64)), Scaled.of(torch.ones(64))
    compiled = roam.compile(lambda x: step(planned, x))
    for number in range(3):
        x = torch.linspace(0, 1 + number, 64)
        assert torch.equal(step(eager, x), compiled(x))
        assert same(plain([eager]), plain([planned]))


# -- classes that are plain to operators


class Meaning:
    """What the numbers of a weight mean."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


class Coded(nn.Parameter):
    """A parameter with its meaning beside it."""

    meaning: Meaning

    def __new__(cls, data: torch.Tensor, meaning: Meaning) -> Any:
        made: Any = torch.Tensor._make_subclass(cls, data, False)
        made.meaning = meaning
        return made

    @property
    def scale(self) -> torch.Tensor:
        return self.meaning.scale

    def wide(self) -> torch.Tensor:
        return self.detach().to(torch.float32) * self.scale

    def cpu(self) -> Any:  # type: ignore[override]
        return Coded(super().cpu(), self.meaning)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.chunk else result


class Decoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        codes = torch.arange(-16, 16, dtype=torch.int8).reshape(4, 8)
        self.weight = Coded(codes, Meaning(torch.tensor(0.1)))
        self.adapter = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, Coded)
        assert hasattr(self.weight, "scale")
        assert not hasattr(self.adapter.weight, "scale")
        shift = torch.chunk(self.weight, 2)
        return nn.functional.linear(x, self.weight.wide()) + self.adapter(x) + len(shift)


def test_a_parameter_with_its_meaning_beside_it() -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def build() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = Decoding()
        return model, torch.optim.AdamW(model.adapter.parameters())

    eager, planned = build(), build()
    compiled = roam.compile(step)
    for number, (x, _) in enumerate(batches(4)):
        if number == 2:
            for model, _ in (eager, planned):
                model.weight.meaning.scale.mul_(2)
        if number == 3:
            for model, _ in (eager, planned):
                model.weight.meaning = Meaning(torch.tensor(0.3))
        assert torch.equal(step(*eager, x), compiled(*planned, x))
    assert same(plain(eager[0].state_dict()), plain(planned[0].state_dict()))


def test_a_method_that_a_class_overrides_is_refused() -> None:
    model = Decoding()
    with pytest.raises(roam.CaptureError, match="which this class has for itself") as error:
        roam.compile(lambda x: x + model.weight.cpu().meaning.scale)(torch.ones(2))
    assert error.value.code == "subclass"
