"""Copies of a model, its optimizer and a batch on fake tensors, which are traced and split while
the user's own objects stay as they are.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from roam.capture.tracing.fake_mode import mode_of
from roam.errors import CaptureError
from roam.torch_compat.private import (
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    is_dtensor,
    pytree,
)


@dataclass(frozen=True, slots=True)
class Twin:
    """Fakes of what a step is called with."""

    mode: FakeTensorMode
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Any, ...]


def twin_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, ...]
) -> Twin:
    """Fakes of all parameters, buffers, and tensors of the batch; the optimizer has no state.

    Raises:
        CaptureError: a parameter is distributed already, or the model cannot be copied.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if is_dtensor(tensor):
            raise CaptureError(
                f"{name} is a DTensor already; give roam.parallelize the model before any part "
                "of it is distributed",
                code="dtensor",
            )
    given = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    mode = mode_of([*(tensor for _, tensor in named), *given])
    memo: dict[int, Any] = {id(tensor): _fake(mode, tensor) for _, tensor in named}
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"the model cannot be copied to be planned ({error}); build it inside of "
            "`with roam.fake():`",
            code="model_copy",
        ) from error
    batch = pytree.tree_map_only(torch.Tensor, lambda tensor: _fake(mode, tensor), batch)
    return Twin(mode, twin, optimizer_on(optimizer, memo), batch)


def optimizer_on(optimizer: torch.optim.Optimizer, new: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy of the optimizer without state, on other parameters. `new` holds them by the
    identities of the optimizer's own parameters.
    """
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [new.get(id(parameter), parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return twin


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Block in which PyTorch does not log what fake kernels raise."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def has_fakes(model: torch.nn.Module, batch: tuple[Any, ...]) -> bool:
    """Whether a parameter, a buffer or a tensor of the batch is a fake already."""
    tensors = (*model.parameters(), *model.buffers(), *pytree.tree_leaves(batch))
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> Any:
    with mode:
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def state_bytes_of(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of state that the optimizer keeps for each byte of a parameter, found by a step on a
    small one.
    """
    group = {
        key: value
        for key, value in optimizer.param_groups[0].items()
        if key not in ("params", "lr")
    }
    with disable_current_modes():
        parameter = torch.nn.Parameter(torch.zeros(64, 64))
        parameter.grad = torch.zeros_like(parameter)
        small = optimizer_on(optimizer, {})
        small.param_groups = [{**group, "lr": 0.0, "params": [parameter]}]
        small.step()
        kept = [
            leaf
            for leaf in pytree.tree_leaves(dict(small.state[parameter]))
            if isinstance(leaf, torch.Tensor) and leaf.numel() > 1
        ]
    return sum(leaf.nbytes for leaf in kept) / parameter.nbytes
