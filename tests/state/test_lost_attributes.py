"""Attributes that containers have beside their entries: PyTorch's pytree, which takes arguments and
results apart, loses them, so such containers are refused.
"""

from __future__ import annotations

import typing
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import SequenceClassifierOutput

import roam
from newer import needs_2_15


class Pair(namedtuple("Parts", ("x", "y"))):
    scale = 1.0


def output(x: torch.Tensor) -> Any:
    return SequenceClassifierOutput(logits=x, loss=x.sum())


def ordered(x: torch.Tensor) -> Any:
    return OrderedDict(logits=x, loss=x.sum())


def pair(x: torch.Tensor) -> Any:
    return Pair(x, x.sum())


def with_attribute(kind: Callable[[torch.Tensor], Any], name: str, value: Any) -> Any:
    def make(x: torch.Tensor) -> Any:
        made = kind(x)
        setattr(made, name, value)
        return made

    return make


ATTRIBUTES = [
    with_attribute(output, "extra", torch.ones(())),
    with_attribute(output, "scale", 2.0),
    with_attribute(output, "loss", None),  # the entry keeps its value
    with_attribute(ordered, "scale", 2.0),
    with_attribute(pair, "scale", 2.0),
]


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(roam.CaptureError) as caught:
        call()
    assert caught.value.code == "container_attribute"
    return str(caught.value)


@pytest.mark.parametrize("make", ATTRIBUTES)
def test_of_what_the_step_returns(make: Callable[[torch.Tensor], Any]) -> None:
    step = roam.compile(lambda x: {"outputs": [make(x * 2)]})
    refused(lambda: step(torch.ones(3)))


@pytest.mark.parametrize("puts", [False, True])
def test_of_what_holds_a_list_of_the_callers(puts: bool) -> None:
    """It is put together of other entries once more."""

    def step(batch: dict[str, Any], x: torch.Tensor) -> Any:
        outputs = OrderedDict(x=x * 2, names=batch["names"])
        outputs.extra = 1.0  # type: ignore[attr-defined]
        if not puts:
            return [outputs]
        batch["outputs"] = outputs
        return None

    batch: dict[str, Any] = {"names": ["a"]}
    refused(lambda: roam.compile(step)(batch, torch.ones(3)))
    assert list(batch) == ["names"]


@pytest.mark.parametrize("make", ATTRIBUTES)
def test_of_an_argument(make: Callable[[torch.Tensor], Any]) -> None:
    step = roam.compile(lambda batch, factor: batch["outputs"][0][0] * factor)
    refused(lambda: step({"outputs": [make(torch.ones(3))]}, 2.0))


@pytest.mark.parametrize("kind", [output, ordered, pair])
def test_of_an_argument_to_which_the_step_gives_it(kind: Callable[[torch.Tensor], Any]) -> None:
    def step(batch: Any, x: torch.Tensor) -> torch.Tensor:
        batch.scale = 2.0
        return x * batch.scale

    batch = kind(torch.ones(3))
    assert "args[0] has the attribute 'scale'" in refused(
        lambda: roam.compile(step)(batch, torch.ones(3))
    )
    assert "scale" not in vars(batch)


@pytest.mark.auto
@needs_2_15
def test_an_argument_to_which_the_step_gives_it_beside_a_plan() -> None:
    def step(batch: Any, x: torch.Tensor) -> torch.Tensor:
        batch.scale = getattr(batch, "scale", 1.0) + 1
        return x * batch.scale

    batch, compiled = output(torch.ones(3)), roam.compile(step)
    assert [compiled(batch, torch.ones(3))[0].item() for _ in range(4)] == [2, 3, 4, 5]
    assert compiled.plans


def test_of_an_argument_of_a_later_call() -> None:
    """A plan would go on with what the class says."""
    step = roam.compile(lambda batch: batch.x * batch.scale)
    for _ in range(3):
        assert torch.equal(step(pair(torch.ones(3))), torch.ones(3))
    batch = pair(torch.ones(3))
    batch.scale = 2.0
    refused(lambda: step(batch))


def test_of_a_class_that_cannot_be_made_of_its_entries() -> None:
    def step(x: torch.Tensor) -> Any:
        outputs = output(x * 2)
        outputs["extra"] = x
        return outputs

    assert "unexpected keyword argument 'extra'" in refused(
        lambda: roam.compile(step)(torch.ones(3))
    )


def noted_by_typing(x: torch.Tensor) -> Any:
    return typing.OrderedDict(logits=x, loss=x.sum())


@pytest.mark.parametrize("kind", [output, ordered, pair, noted_by_typing])
def test_that_are_the_entries_are_no_matter(kind: Callable[[torch.Tensor], Any]) -> None:
    def step(batch: Any) -> Any:
        return kind(next(iter(batch.values() if isinstance(batch, dict) else batch)) * 2)

    compiled = roam.compile(step)
    for _ in range(3):
        expected, found = step(kind(torch.ones(3))), compiled(kind(torch.ones(3)))
        assert type(expected) is type(found)
        assert [*vars(found)] == [name for name in vars(expected) if name != "__orig_class__"]
        first = 0 if kind is pair else "logits"
        assert torch.equal(expected[first], found[first])
