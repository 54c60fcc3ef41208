"""LSTM layers by oneDNN, whose kernel works, and rounds, differently if gradients are enabled.

A plan runs without autograd, so a layer that is trained gets an operator of its own, which enables
gradients while the kernel runs. The kernel leaves a workspace for the backward pass. Only the
kernel itself, and no fake kernel, knows the size of this workspace, so the kernel is run to find
it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roam.torch_compat.private import BelowAutograd, OpOverload, disable_current_modes, schema_of

_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
ASKED = frozenset({_LAYER, torch.ops.aten.mkldnn_rnn_layer_backward.default})
"""Operators of whose results only their kernel knows the sizes."""

_library = torch.library.Library("roam", "FRAGMENT")
_library.define(
    f"lstm_layer_in_training{str(schema_of(_LAYER)).removeprefix(schema_of(_LAYER).name)}"
)


def _in_training(*args: Any) -> tuple[Tensor, ...]:
    with BelowAutograd(), torch.enable_grad():
        return _LAYER(*args)  # type: ignore[no-any-return]


_library.impl("lstm_layer_in_training", _in_training, "CompositeExplicitAutograd")
_IN_TRAINING = torch.ops.roam.lstm_layer_in_training.default


def as_run(func: OpOverload) -> OpOverload:
    """The operator by which a plan runs what is dispatched now."""
    return _IN_TRAINING if func is _LAYER and torch.is_grad_enabled() else func


def asked(func: OpOverload, args: tuple[Any, ...]) -> list[Tensor | None]:
    """What the kernel returns for arguments like these that are all zeros. This takes the memory of
    one layer, for a moment.
    """
    with disable_current_modes():
        return list(
            func(*(_zeros(value) if isinstance(value, Tensor) else value for value in args))
        )


def _zeros(like: Tensor) -> Tensor:
    return torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device=like.device
    ).zero_()
