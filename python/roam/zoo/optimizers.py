"""The zoo's optimizers, each in single-tensor form: one parameter's update after another."""

from __future__ import annotations

import torch


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make an unmodified ``torch.optim`` optimizer over all of the model's parameters."""
    parameters = model.parameters()
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3, foreach=False, fused=False)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=1e-3, foreach=False, fused=False)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, foreach=False, fused=False)
    if name == "sgd-momentum":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=False, fused=False)
    raise ValueError(f"no optimizer {name!r}")
