"""Modules and steps drawn at random: by their plan they give eager's bits, or are refused.

`make fuzz` runs two thousand; ROAM_FUZZ_EXAMPLES says how many.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import roam
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
functional = torch.nn.functional
ROWS, COLUMNS = 4, 6
_STEPS = 3


class Net(torch.nn.Module):
    """Runs a list of instructions on tensors of shape [ROWS, COLUMNS]."""

    def __init__(self, instructions: list[Instruction], *, tied: bool) -> None:
        super().__init__()
        self.instructions = instructions
        self.first = torch.nn.Linear(COLUMNS, COLUMNS)
        self.second = torch.nn.Linear(COLUMNS, COLUMNS)
        if tied:
            self.second.weight = self.first.weight
        self.embedding = torch.nn.Embedding(5, COLUMNS, padding_idx=1)
        self.norm = torch.nn.BatchNorm1d(COLUMNS)
        self.scale = torch.nn.Parameter(torch.rand(COLUMNS))
        self.unused = torch.nn.Parameter(torch.rand(3))
        self.register_buffer("average", torch.zeros(COLUMNS))

    def forward(self, x: Any) -> Any:
        values = [x, self.first(x)]
        for instruction in self.instructions:
            one = values[instruction.one % len(values)]
            other = values[instruction.other % len(values)]
            made = OPERATIONS[instruction.name](self, one, other)
            if made is not None:
                values.append(made)
        return values


@dataclass(frozen=True)
class Instruction:
    """An operation on two of the values that there are so far, counted from the end and around."""

    name: str
    one: int
    other: int


def _in_place(change: Callable[[Any, Any], Any]) -> Callable[[Net, Any, Any], Any]:
    def operation(_: Net, one: Any, other: Any) -> Any:
        copied = one * 1.0
        change(copied, other)
        return copied

    return operation


def _average(net: Net, one: Any, _: Any) -> None:
    with torch.no_grad():
        net.average.lerp_(one.detach().mean(0), 0.1)


def _decay_row(net: Net, _: Any, __: Any) -> None:
    """In place on a view of a parameter."""
    with torch.no_grad():
        net.scale[1:3].mul_(0.99)


def _hooked(_: Net, one: Any, __: Any) -> Any:
    made = one * 1.5
    if made.requires_grad:
        made.register_hook(lambda gradient: gradient * 0.5)
    return made


OPERATIONS: dict[str, Callable[[Net, Any, Any], Any]] = {
    "linear": lambda net, one, _: net.second(one),
    "scale": lambda net, one, _: one * net.scale,
    "norm": lambda net, one, _: net.norm(one),
    "embedding": lambda net, one, _: one + net.embedding((one.detach() > 0).long().sum(1) % 5),
    "average": _average,
    "decay_row": _decay_row,
    "hooked": _hooked,
    "checkpoint": lambda net, one, _: checkpoint(
        lambda x: functional.dropout(net.second(x), 0.3).relu(), one, use_reentrant=False
    ),
    "add": lambda _, one, other: one + other,
    "subtract": lambda _, one, other: torch.sub(one, other, alpha=0.5),
    "multiply": lambda _, one, other: one * other,
    "divide": lambda _, one, other: one / (other.abs() + 1.0),
    "where": lambda _, one, other: torch.where(one > 0, one, other),
    "maximum": lambda _, one, other: torch.maximum(one, other),
    "lerp": lambda _, one, other: torch.lerp(one, other, 0.3),
    "product": lambda _, one, other: one @ one.t() @ other,
    "relu": lambda _, one, __: one.relu(),
    "tanh": lambda _, one, __: one.tanh(),
    "gelu": lambda _, one, __: functional.gelu(one),
    "silu": lambda _, one, __: functional.silu(one),
    "square": lambda _, one, __: one.square(),
    "softmax": lambda _, one, __: one.softmax(1),
    "layer_norm": lambda _, one, __: functional.layer_norm(one, (COLUMNS,)),
    "dropout": lambda _, one, __: functional.dropout(one, 0.4),
    "noise": lambda _, one, __: one + torch.randn_like(one),
    "sum": lambda _, one, __: one.sum(0, keepdim=True).expand(ROWS, COLUMNS),
    "cumulate": lambda _, one, __: one.cumsum(1),
    "sort": lambda _, one, __: one.sort(1).values,
    "flip": lambda _, one, __: one.flip(0),
    "reshape": lambda _, one, __: one.reshape(COLUMNS, ROWS).reshape(ROWS, COLUMNS),
    "turned": lambda _, one, __: one.t().contiguous().t(),
    "halves": lambda _, one, __: torch.cat([one[:, 3:], one[:, :3]], 1),
    "chunks": lambda _, one, other: torch.cat([one.chunk(2, 1)[0], other.chunk(2, 1)[1]], 1),
    "first_row": lambda _, one, __: one[:1].expand(ROWS, COLUMNS),
    "gather": lambda _, one, other: one.gather(1, other.detach().argsort(1)),
    "detach": lambda _, one, __: one.detach(),
    "alias": lambda _, one, __: one.view(one.shape) if one.is_contiguous() else one,
    "double": lambda _, one, __: one.double().sin().float(),
    "half": lambda _, one, __: (one.bfloat16() * 2).float(),
    "add_": _in_place(lambda one, other: one.add_(other)),
    "relu_": _in_place(lambda one, _: one.relu_()),
    "fill_row_": _in_place(lambda one, _: one[1].fill_(0.5)),
    "add_to_column_": _in_place(lambda one, other: one[:, 2].add_(other[:, 0])),
    "copy_": _in_place(lambda one, other: one[:2].copy_(other[2:])),
    "masked_fill_": _in_place(lambda one, other: one.masked_fill_(other > 0, 0.25)),
    "reckless_add_": lambda _, one, other: one.add_(other) if one.grad_fn is not None else None,
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, nesterov=True, foreach=True
    ),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "adam_fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(
        parameters, lr=0.01, centered=True, foreach=True
    ),
}

instructions = st.lists(
    st.builds(
        Instruction, st.sampled_from(sorted(OPERATIONS)), st.integers(-4, -1), st.integers(-6, -1)
    ),
    min_size=1,
    max_size=12,
)


def train_step(net: Any, optimizer: Any, x: Any, *, parts: int, clips: bool) -> Any:
    optimizer.zero_grad()
    outputs = []
    for part in x.chunk(parts, 0):
        values = net(part)
        loss = sum(value.square().mean() for value in values[2:]) + values[1].mean()
        loss.backward()
        outputs.append(loss.detach())
    if clips:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    return outputs, values[-1].detach()


def outcome(
    step: Callable[..., Any], net: Net, optimizer: str, options: dict[str, Any]
) -> list[Any]:
    """All that a user can look at after each of a few steps."""
    made = OPTIMIZERS[optimizer](net.parameters())
    torch.manual_seed(7)
    seen = []
    for _ in range(_STEPS):
        x = torch.randn(ROWS * options["parts"], COLUMNS)
        seen += tensors_and_numbers(
            step(net, made, x, **options), net.state_dict(), made.state_dict()["state"]
        )
    return [*seen, torch.get_rng_state()]


@settings(max_examples=int(os.environ.get("ROAM_FUZZ_EXAMPLES", "25")), deadline=None)
@given(
    program=instructions,
    tied=st.booleans(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    parts=st.sampled_from([1, 2]),
    clips=st.booleans(),
    pool=st.sampled_from([None, False, True]),
)
def test_equal_or_refused(
    program: list[Instruction],
    tied: bool,
    optimizer: str,
    parts: int,
    clips: bool,
    pool: bool | None,
) -> None:
    torch.manual_seed(3)
    net = Net(program, tied=tied)
    options = {"parts": parts, "clips": clips}
    try:
        expected = outcome(train_step, copy.deepcopy(net), optimizer, options)
    except RuntimeError:
        assume(False)  # eager PyTorch refuses it: autograd needs what was overwritten
    try:
        found = outcome(
            roam.compile(train_step, pool=pool, poison=pool is True), net, optimizer, options
        )
    except roam.CaptureError as refusal:
        event(f"refused: {refusal.code}")
        return
    event("equal")
    assert_same_bits(expected, found)
