"""The zoo's optimizers, each in single-tensor form: one parameter's update after another."""

from __future__ import annotations

import torch


def make_optimizer(
    name: str, model: torch.nn.Module, clip: float | None = None
) -> torch.optim.Optimizer:
    """Make an unmodified ``torch.optim`` optimizer over all of the model's parameters, before whose
    step gradients are clipped by the norm of all of them.
    """
    optimizer = _made(name, list(model.parameters()))
    if clip is not None:
        limit = clip

        def clipped(optimizer: torch.optim.Optimizer, *_: object) -> None:
            groups = optimizer.param_groups
            parameters = [parameter for group in groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, limit)

        optimizer.register_step_pre_hook(clipped)
    return optimizer


def _made(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3, foreach=False, fused=False)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=1e-3, foreach=False, fused=False)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, foreach=False, fused=False)
    if name == "sgd-momentum":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=False, fused=False)
    raise ValueError(f"no optimizer {name!r}")
