"""Copies of a model, its optimizer and a batch on fake tensors, which are traced and split while
the user's own objects stay as they are.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from roam.errors import CaptureError
from roam.state.discovery import reach_of
from roam.torch_compat.private import (
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    hooks_on_all_optimizers,
    is_dtensor,
    pytree,
)
from roam.tracing.fakes.fake_mode import mode_of


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
        CaptureError: a parameter is distributed already, the model or the optimizer cannot be
            copied, or a hook of the optimizer is not about the copy.
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
    _refuse_hooks(optimizer, {id(tensor): name for name, tensor in named})
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
    """A copy of the optimizer with its hooks and without state, on other parameters. `new` holds
    these, and what else takes the place of objects that attributes hold, by the identities of the
    optimizer's own.

    Raises:
        CaptureError: an attribute cannot be copied.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo = {**new, id(optimizer): twin}
    for name, value in vars(optimizer).items():
        if name in _HOOKS:
            vars(twin)[name] = value.copy()
        elif isinstance(value, torch.optim.Optimizer):  # one that this one wraps
            vars(twin)[name] = optimizer_on(value, new)
        elif name not in _OWN:
            try:
                vars(twin)[name] = copy.deepcopy(value, memo)
            except Exception as error:
                raise CaptureError(
                    f"the optimizer cannot be copied to be planned, because of its attribute {name} "
                    f"({error}); give it a __deepcopy__ that works, or keep it elsewhere",
                    code="model_copy",
                ) from error
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [new.get(id(parameter), parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return twin


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OWN = ("state", "param_groups", "step")
"""Attributes that are not copied. A scheduler puts a `step` there that is the real optimizer's."""


def _hooks_of(optimizer: torch.optim.Optimizer) -> Iterator[dict[int, Any]]:
    """The tables of hooks on an optimizer, and on those that it wraps."""
    for name, value in vars(optimizer).items():
        if name in _HOOKS:
            yield value
        elif isinstance(value, torch.optim.Optimizer):
            yield from _hooks_of(value)


def _refuse_hooks(optimizer: torch.optim.Optimizer, named: dict[int, str]) -> None:
    """Refuses hooks that reach parameters or buffers in another way than through the optimizer that
    they are called with: they would work on the real ones.

    Args:
        named: names of parameters and buffers, by their identities.

    Raises:
        CaptureError: there is such a hook.
    """
    tables = [*_hooks_of(optimizer), *hooks_on_all_optimizers()]
    for hook in (hook for table in tables for hook in table.values()):
        held = [slot for slot in reach_of(hook).slots if id(slot.tensor) in named]
        if held:
            raise CaptureError(
                f"a hook of the optimizer's step reaches {named[id(held[0].tensor)]} of the model, "
                f"as {held[0].path}, so it would not work on the parts of a rank; let it take "
                "parameters from the optimizer that it is called with (optimizer.param_groups), or "
                "do in the step what it does",
                code="optimizer",
            )


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

    Raises:
        CaptureError: the optimizer cannot be copied, or its step on a small parameter raises.
    """
    group = {
        key: value
        for key, value in optimizer.param_groups[0].items()
        if key not in ("params", "lr")
    }
    if "capturable" in group:
        group["capturable"] = False  # that is for CUDA, and keeps the same state
    with disable_current_modes():
        parameter = torch.nn.Parameter(torch.zeros(64, 64))
        parameter.grad = torch.zeros_like(parameter)
        held = [one for one_group in optimizer.param_groups for one in one_group["params"]]
        small = optimizer_on(optimizer, {id(one): parameter for one in held})
        for hooks in _hooks_of(small):
            hooks.clear()
        small.param_groups = [{**group, "lr": 0.0, "params": [parameter]}]
        try:
            small.step()
        except Exception as error:
            raise CaptureError(
                "a step of the optimizer on one parameter of 64 x 64 raised "
                f"{type(error).__name__}: {error}; use an optimizer whose step() needs no "
                "arguments, and does the same for each parameter",
                code="optimizer",
            ) from error
        kept = [
            leaf
            for leaf in pytree.tree_leaves(dict(small.state[parameter]))
            if isinstance(leaf, torch.Tensor) and leaf.numel() > 1
        ]
    return sum(leaf.nbytes for leaf in kept) / parameter.nbytes
