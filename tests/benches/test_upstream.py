"""The plugin that runs other libraries' tests (benches/upstream_plugin.py) makes functions of the
loops that train, and of no others, without changing what they do."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

import pytest
import torch
import upstream_plugin
from upstream_plugin import _Loops, trace


def rewritten(source: str) -> str:
    module = ast.parse(textwrap.dedent(source))
    return ast.unparse(ast.fix_missing_locations(_Loops().visit(module)))


def result(source: str) -> Any:
    """What `train` gives."""
    space: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(source), space)
    torch.manual_seed(0)
    return space["train"]()


TRAINS = """
def train():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    total, seen, before = 0.0, [], float("inf")
    for epoch in range(2):
        for i, x in enumerate(torch.ones(3, 2, 3)):
            scale = i + 1
            optimizer.zero_grad()
            loss = (model(x * scale)).square().sum()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            assert loss.item() < before or i
            seen.append(loss.item())
    return total.item(), seen, scale, i
"""


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_loop_does_what_it_did(monkeypatch: pytest.MonkeyPatch, is_planned: bool) -> None:
    monkeypatch.setattr(upstream_plugin, "IS_PLANNED", is_planned)
    source = rewritten(TRAINS)
    assert "_Body" in source
    assert result(source) == result(TRAINS)


def test_what_follows_the_update_stays_outside() -> None:
    source = rewritten(TRAINS)
    body = source[source.index("def __upstream_body") : source.index("__import__")]
    assert "backward" in body
    assert "item" not in body
    assert "scale = " not in body


CLOSURE = "for _ in range(3):\n        optimizer.step(closure)"
LEFT = [
    "for x in xs:\n        model(x).backward()",
    "for x in xs:\n        scheduler.step()\n        model(x).backward()",
    "for x in xs:\n        model(x).backward()\n        if x: break\n        optimizer.step()",
    "for x in xs:\n        loss = super().loss(x)\n        loss.backward()\n        optimizer.step()",
]


@pytest.mark.parametrize("loop", LEFT)
def test_other_loops_stay(loop: str) -> None:
    assert "_Body" not in rewritten(f"def train(xs):\n    {loop}")


def test_a_closure_is_a_step() -> None:
    assert "_Body" in rewritten(f"def train(optimizer, closure):\n    {CLOSURE}")


BY_HAND = """
def train():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, kept = torch.optim.SGD([weight], 0.1, momentum=0.9), []
    for i in range(3):
        weight.grad = torch.full((3,), float(i))
        optimizer.step()
        kept.append((weight.tolist(), weight.grad.tolist()))
    return kept
"""


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_step_on_gradients_set_by_hand_keeps_them(
    monkeypatch: pytest.MonkeyPatch, is_planned: bool
) -> None:
    monkeypatch.setattr(upstream_plugin, "IS_PLANNED", is_planned)
    source = rewritten(BY_HAND)
    body = source[source.index("def __upstream_body") : source.index("__import__")]
    assert "step" in body
    assert "grad" not in body
    assert result(source) == result(BY_HAND)


def test_a_trace_tells_bits_apart() -> None:
    upstream_plugin.seen.trace.clear()
    for value in (torch.zeros(2), torch.zeros(2), -torch.zeros(2), {"loss": 1.0}, {"loss": 2.0}):
        trace(value)
    first, second, *others = upstream_plugin.seen.trace
    assert first == second
    assert len({first, *others}) == 4
