"""Metadata of many tensors compared at once, and what optimizers, gradients and scalers hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roam.state.discovery import reach_of
from roam.state.metadata import Table, metadata_of
from roam.state.references import (
    GradientReference,
    OptimizerReference,
    PlaceReference,
    optimizer_references,
)
from roam.state.state_guard import StateGuard


class Weight(nn.Parameter):
    """A parameter of another class."""


def _with_attribute(tensor: Any) -> Any:
    tensor.note = 1
    return tensor


def _with_hook(tensor: Any, register: str) -> Any:
    tensor.requires_grad_()
    getattr(tensor, register)(lambda *_: None)
    return tensor


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 4)


def _retaining() -> torch.Tensor:
    tensor = torch.zeros(4, 4, requires_grad=True) * 2
    tensor.retain_grad()
    return tensor


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.zeros(4, 4),
    "dtype": lambda: torch.zeros(4, 4, dtype=torch.float64),
    "complex": lambda: torch.zeros(4, 4, dtype=torch.complex64),
    "conjugate": lambda: torch.zeros(4, 4, dtype=torch.complex64).conj(),
    "negative": lambda: torch._neg_view(torch.zeros(4, 4)),
    "shape": lambda: torch.zeros(4, 5),
    "strides": lambda: torch.zeros(4, 4).t(),
    "offset": lambda: torch.zeros(5, 4)[1:],
    "device": lambda: torch.zeros(4, 4, device="meta"),
    "layout": lambda: torch.zeros(4, 4).to_sparse(),
    "requires_grad": lambda: torch.zeros(4, 4, requires_grad=True),
    "no leaf": lambda: torch.zeros(4, 4, requires_grad=True) * 2,
    "retains_grad": _retaining,
    "inference": _inference,
    "attribute": lambda: _with_attribute(torch.zeros(4, 4)),
    "parameter": lambda: nn.Parameter(torch.zeros(4, 4)),
    "class": lambda: Weight(torch.zeros(4, 4)),
    "hook": lambda: _with_hook(torch.zeros(4, 4), "register_hook"),
    "late hook": lambda: _with_hook(torch.zeros(4, 4), "register_post_accumulate_grad_hook"),
}


@pytest.mark.parametrize("one", KINDS)
def test_a_table_tells_apart_what_metadata_does(one: str) -> None:
    table = Table([torch.zeros(2), KINDS[one]()])
    for make in KINDS.values():
        tensor = make()
        is_same = metadata_of(tensor) == metadata_of(KINDS[one]())
        # A table never says of tensors that are not strided that they fit.
        expected = is_same and tensor.layout is torch.strided
        assert table.fits([torch.zeros(2), tensor]) is expected
        assert not table.fits([torch.zeros(3), tensor])


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def _guard(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateGuard:
    """Guards the state as it is, and the gradient of the first parameter."""
    reach = reach_of(lambda: (model, optimizer), (), {})
    parameters = [
        PlaceReference(slot.space, slot.key, slot.path, "parameter", tied=False)
        for slot in reach.slots
        if slot.kind == "parameter"
    ]
    references: list[OptimizerReference | GradientReference] = [
        GradientReference(parameters[0], f"{parameters[0].path}.grad"),
        *optimizer_references(reach, parameters),
    ]
    return StateGuard((reference, _kind(reference.get())) for reference in references)


def _failure(guard: StateGuard) -> str | None:
    return guard.failure([reference.get() for reference, _ in guard._expected], [])


def _kind(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.stride(), None


def _grown(state: dict[str, Any]) -> None:
    state["exp_avg"] = torch.zeros(7, 4)


def _halved(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"].half()


def _moved(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"].to("meta")


def _turned(state: dict[str, Any]) -> None:
    state["exp_avg"] = torch.empty(state["exp_avg"].shape[::-1]).t()


def _sparse(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"].to_sparse()


def _number(state: dict[str, Any]) -> None:
    state["exp_avg"] = 0.0


def _gone(state: dict[str, Any]) -> None:
    del state["exp_avg"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_grown, "another shape"),
        (_halved, "another shape"),
        (_moved, "another shape"),
        (_turned, "another shape"),
        (_sparse, "another shape"),
        (_number, "changed from a tensor to 0.0"),
        (_gone, "does not exist yet"),
    ],
)
def test_state_of_another_kind_is_named(change: Callable[[Any], None], text: str) -> None:
    model, optimizer = _trained()
    guard = _guard(model, optimizer)
    assert _failure(guard) is None
    change(optimizer.state[model[1].weight])  # type: ignore[index]
    failure = _failure(guard)
    assert failure is not None
    assert text in failure
    assert "['exp_avg']" in failure


def test_all_of_a_parameters_state_may_be_gone() -> None:
    model, optimizer = _trained()
    guard = _guard(model, optimizer)
    del optimizer.state[model[1].weight]  # type: ignore[index]
    assert "does not exist yet" in str(_failure(guard))


def test_a_gradient_that_is_gone_is_named() -> None:
    model, optimizer = _trained()
    guard = _guard(model, optimizer)
    model[0].weight.grad = None  # type: ignore[index]
    assert str(_failure(guard)).endswith("weight.grad does not exist yet")


def test_state_that_is_loaded_fits() -> None:
    model, optimizer = _trained()
    guard = _guard(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert _failure(guard) is None


def test_one_guard_stands_for_another_of_the_same_places_and_kinds() -> None:
    model, optimizer = _trained()
    guard = _guard(model, optimizer)
    assert guard.stands_for(_guard(model, optimizer))
    assert not guard.stands_for(_guard(*_trained()))
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(9)  # type: ignore[index]
    assert not guard.stands_for(_guard(model, optimizer))
