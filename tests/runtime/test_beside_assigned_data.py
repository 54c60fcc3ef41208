"""Steps beside their plans that give tensors other data (`p.data = y`)."""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import pytest
import test_python_beside as harness
import torch
import torch.nn.functional as F
from test_python_beside import State, Step, are_same, same_bits
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import roam
from roam.runtime.beside.placeholders import WeakStorage, is_possible

pytestmark = pytest.mark.skipif(not is_possible(), reason="it needs PyTorch 2.15")

STEPS: dict[str, harness.Make] = {}
kind = harness.kinds(STEPS)


@kind
def sharpness_aware() -> tuple[State, Step]:
    s = State(torch.optim.SGD, momentum=0.9)
    old: dict[int, torch.Tensor] = {}
    s.log.append(old)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = s.loss(x, y)
        loss.backward()
        parameters = list(s.model.parameters())
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm() for p in parameters]))  # type: ignore[union-attr]
            for index, p in enumerate(parameters):
                old[index] = p.data.clone()
                p.add_(p.grad * (0.05 / (norm + 1e-12)))  # type: ignore[operator]
        s.loss(x, y).backward()
        for index, p in enumerate(parameters):
            p.data = old[index]  # which the next call finds kept beside the parameter
        s.optimizer.step()
        s.log.append(loss.item())
        return loss

    return s, step


@kind
def momentum_encoder() -> tuple[State, Step]:
    s = State()
    key = s.key = copy.deepcopy(s.model)  # type: ignore[attr-defined]

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.no_grad():
            for q, k in zip(s.model.parameters(), key.parameters(), strict=True):
                k.data = k.data * 0.99 + q.data * 0.01
            keys = key(x)
        loss = s.update(s.loss(x, y) + (s.model(x) - keys).square().mean())
        s.log.append(loss.item())
        return loss

    return s, step


@kind
def averages_swapped_in() -> tuple[State, Step]:
    s = State(torch.optim.Adam)
    average = s.average = {n: p.data.clone() for n, p in s.model.named_parameters()}  # type: ignore[attr-defined]

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.log.append(s.update(s.loss(x, y)).item())
        backup = {}
        for name, p in s.model.named_parameters():
            average[name] = (0.1 * p.data + 0.9 * average[name]).clone()
            backup[name] = p.data
            p.data = average[name]
        with torch.no_grad():
            out = s.model(x)
            s.log.append(out.sum().item())
        for name, p in s.model.named_parameters():
            p.data = backup[name]
        return out

    return s, step


@kind
def exchanged_data() -> tuple[State, Step]:
    s = State()
    other = s.other = copy.deepcopy(s.model)  # type: ignore[attr-defined]

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.log.append(s.update(s.loss(x, y)).item())
        for p, q in zip(s.model.parameters(), other.parameters(), strict=True):
            p.data, q.data = q.data, p.data
        return s.model(x)

    return s, step


@kind
def merged_adapters() -> tuple[State, Step]:
    s = State(torch.optim.AdamW)
    down, up = torch.randn(2, 8), torch.full((16, 2), 0.1)
    s.log.append((down, up))

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        weight = s.model[0].weight
        delta = (up @ down) * 0.5
        weight.data = weight.data + delta
        s.log.append(F.cross_entropy(s.model(x), y).item())
        weight.data = weight.data - delta
        loss = s.update(s.loss(x, y))
        up.data = up.data - 0.1 * weight.grad @ down.t()
        return loss

    return s, step


@kind
def balanced_losses() -> tuple[State, Step]:
    s = State()
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weights], lr=0.02)
    s.log += [weights, optimizer]

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.optimizer.zero_grad()
        out = s.model(x)
        losses = torch.stack([F.cross_entropy(out, y), out.square().mean()])
        (weights * losses).sum().backward()
        optimizer.step()
        s.optimizer.step()
        weights.data = weights.data * (2.0 / weights.data.sum())
        s.log.append(losses.sum().item())
        return losses.detach()

    return s, step


@kind
def evolution() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.no_grad():
            center = parameters_to_vector(s.model.parameters())
            change = torch.zeros_like(center)
            for _ in range(2):
                noise = torch.randn_like(center)
                vector_to_parameters(center + 0.05 * noise, s.model.parameters())
                change += F.cross_entropy(s.model(x), y).item() * noise
            vector_to_parameters(center - 0.01 * change, s.model.parameters())
            return s.model(x)

    return s, step


@kind
def free_perturbations() -> tuple[State, Step]:
    s = State()
    delta = torch.zeros(12, 8, requires_grad=True)
    s.log.append(delta)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        for _ in range(2):
            delta.grad = None
            loss = s.loss(x + delta, y)
            loss.backward()
            delta.data = delta.data + 0.1 * delta.grad.sign()  # type: ignore[attr-defined]
            delta.data = torch.clamp(delta.data, -0.3, 0.3)
            s.optimizer.step()
        s.log.append(loss.item())
        return loss

    return s, step


@kind
def two_with_one_memory() -> tuple[State, Step]:
    s = State()
    one, other = s.model[3].bias, s.model[0].bias

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        other.data = one.data
        s.log.append(s.update(s.loss(x, y)).item())
        with torch.no_grad():
            one.add_(1e-3)
            s.log.append((other * 2).sum().item())
        one.data = one.data.clone()
        return one * 1, other * 1

    return s, step


@kind
def views_of_old_data() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        p = s.model[0].weight
        rows, turned = p.data[1:3], p.detach().t()
        s.log.append(s.update(s.loss(x, y)).item())
        p.data = p.data * 0.5
        rows.mul_(1.01)
        s.log.append((rows, turned, turned.sum().item()))
        return p * 1

    return s, step


@kind
def arrays_of_old_data() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        p = s.model[0].weight
        array = p.detach().numpy()
        s.log.append(s.update(s.loss(x, y)).item())
        p.data = p.data * 0.5
        array[0] += 1
        s.log.append(float(array.sum()))
        return p * 1

    return s, step


@kind
def other_shapes_and_dtypes() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        p = s.model[0].weight
        p.data = p.data.double()
        s.log.append(p.sum().item())
        p.data = p.data.float().t().contiguous().t()
        s.log.append(s.update(s.loss(x, y)).item())
        p.data = p.data.contiguous()
        inner = x * 2
        inner.data = inner.data.view(8, 12)[1:3]
        bits = x * 3
        bits.data = bits.data.view(torch.int32)
        return inner + 1, bits + 1

    return s, step


@kind
def data_in_the_graph() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.optimizer.zero_grad()
        hidden = s.model[0](x)
        squared = hidden * hidden
        hidden.data = hidden.data * 2  # which the gradient of the square sees
        out = s.model[1:](squared)
        s.model[4].weight.data = s.model[4].weight.data * 0.9
        s.log.append(s.update(F.cross_entropy(out, y)).item())
        return hidden, squared

    return s, step


@kind
def data_of_optimizer_state() -> tuple[State, Step]:
    s = State(torch.optim.Adam)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = s.update(s.loss(x, y))
        for p in s.model.parameters():
            state = s.optimizer.state[p]
            state["exp_avg"].data = state["exp_avg"] * 0.5
            p.data = p.data - 0.01 * state["exp_avg"]
        s.log.append(loss.item())
        return loss

    return s, step


@kind
def data_in_some_calls() -> tuple[State, Step]:
    s = State(torch.optim.SGD, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.count += 1
        if s.count % 3 == 0:
            for p in s.model.parameters():
                p.data = p.data * 0.9
        s.log.append(s.update(s.loss(x, y)).item())
        if s.count == 5:
            for p in s.model.parameters():
                p.data = p.data + 0
            return 1 / 0
        return None

    return s, step


LEAVING = {"arrays_of_old_data", "data_in_some_calls"}
"""Steps that leave their plan in some calls."""


def ran(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    monkeypatch.setattr(harness, "CALLS", 8)
    monkeypatch.setitem(harness.STEPS, name, STEPS[name])
    return harness.ran(name, **options)[0]


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_data_are_as_in_eager_pytorch(
    name: str, pooled: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    expected = ran(name, monkeypatch)
    with caplog.at_level(logging.INFO, logger="roam"):
        options: dict[str, Any] = {"pool": True, "poison": True} if pooled else {}
        found = ran(name, monkeypatch, python="beside", **options)
    assert are_same(expected, found)
    assert ("another way" in caplog.text) is (name in LEAVING)


def sharp() -> tuple[torch.nn.Module, Any]:
    """A deep network whose weights a step moves, and puts back."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    log: list[float] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        old = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = p.data + 0.05 * p.grad  # type: ignore[operator]
        optimizer.zero_grad()
        loss = model(x).square().mean()
        log.append(loss.item())
        loss.backward()
        for p, before in zip(model.parameters(), old, strict=True):
            p.data = before
        optimizer.step()
        for p in model.parameters():
            p.data = p.data * 0.999
        return loss.detach()

    return model, step


def test_a_budget_holds_where_parameters_get_other_data() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(256, 64, generator=generator) for _ in range(7)]
    model, step = sharp()
    expected = [step(x) for x in inputs]
    planned, step = sharp()
    compiled = roam.compile(step, python="beside", memory="80%")
    found = [*map(compiled, inputs[:-1]), compiled.measured(inputs[-1])]
    assert all(map(same_bits, expected, found))
    assert all(map(same_bits, model.parameters(), planned.parameters()))
    memory = compiled.memory()
    assert memory.extra_runs > 0
    assert memory.total_bytes <= memory.limit_bytes


def test_old_data_are_freed() -> None:
    p, q = (torch.nn.Parameter(torch.randn(32)) for _ in range(2))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (p * x).sum() + (q * x).sum()
        if x.shape[0] == 32:
            p.data = p.data * 0.5
        return loss

    compiled = roam.compile(step, python="beside")
    for rows in (1, 1, 1, 1, 32, 32, 32, 32):
        held = WeakStorage(p.untyped_storage())
        compiled(torch.ones(rows))
        gc.collect()
        assert held.expired() is (rows == 32)


def failing() -> tuple[torch.nn.Parameter, Step]:
    table, scale = torch.nn.Embedding(4, 8), torch.nn.Parameter(torch.ones(8))

    def step(ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        scale.data = scale.data * 2
        return (table(ids + 0) * scale).sum()  # type: ignore[no-any-return]

    return scale, step


@pytest.mark.parametrize("raises", [False, True])
def test_a_parameter_keeps_its_data_where_what_it_was_to_get_is_not_computed(raises: bool) -> None:
    scale, step = failing()
    seen: list[int] = []

    def called(ids: torch.Tensor, other: torch.Tensor) -> Any:
        result = step(ids, other)
        seen.append(1)
        return result * 2 if raises and len(seen) == 5 else result

    compiled = roam.compile(called, python="beside", on_change="raise" if raises else "replan")
    ids, other = torch.tensor([1, 2]), torch.zeros(1)
    for _ in range(4):
        compiled(ids, other)
    with pytest.raises(roam.ExecutionError) as caught:
        compiled(ids if raises else torch.tensor([1, 9]), other)
    assert caught.value.code == ("no_plan_fits" if raises else "failed")
    assert scale.tolist() == [16.0] * 8
    compiled(ids, other)
    assert scale.tolist() == [32.0] * 8
