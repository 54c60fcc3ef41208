"""The tensor-parallel plans in the configurations of transformers, as choices of options."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from roam.sharding.nodes import Node, Option
from roam.sharding.rules import SPREAD, WHOLE

_KINDS = {
    "colwise": "column",
    "colwise_gather_output": "column",
    "embedding_colwise": "column",
    "rowwise": "row",
    "rowwise_split_input": "row",
    "embedding_rowwise": "row",
    "replicated_with_grad_allreduce": "sequence",
}
"""Styles of transformers that the styles of PyTorch can stand for."""
_WHOLE_RESULT = {
    "colwise_gather_output",
    "embedding_colwise",
    "rowwise",
    "rowwise_split_input",
    "embedding_rowwise",
}


def shipped_plan(model: Any) -> dict[str, str]:
    """A model's plan: pattern of modules' paths to style."""
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        plans = [getattr(module, "_tp_plan", None)]
        config = getattr(module, "config", None)
        is_base = getattr(module, "base_model", None) is module
        plans += [getattr(config, "base_model_tp_plan", None)] if is_base else []
        for plan in plans:
            for path, style in (plan or {}).items():
                found.setdefault(f"{prefix}.{path}" if prefix else path, style)
    return found


def left_out(plan: dict[str, str]) -> list[str]:
    """Styles of a plan that no style of PyTorch can stand for."""
    return sorted({style for style in plan.values() if style not in _KINDS})


def allowed_by(model: Any, plan: dict[str, str]) -> Callable[[Node, Option], bool]:
    """Which options a plan allows: its own for the modules that it names, and whole ones for all
    others. Tables whose weight is that of a head which the plan splits are split like it.
    """
    patterns = [
        (re.compile(re.escape(path).replace(r"\*", r"[^.]+")), style)
        for path, style in plan.items()
        if style in _KINDS
    ]
    known: dict[str, str | None] = {}
    shared: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            shared.setdefault(id(parameter), []).append(path)

    def style_of(path: str) -> str | None:
        if path not in known:
            known[path] = next((style for one, style in patterns if one.fullmatch(path)), None)
        return known[path]

    for paths in shared.values():
        if any((style_of(path) or "").startswith("colwise") for path in paths):
            for path in paths:
                known[path] = style_of(path) or "embedding_rowwise"

    def is_allowed(node: Node, option: Option) -> bool:
        if node.what == "entry":
            return option.inputs == option.outputs
        if node.what != "style":
            return True
        style = style_of(node.path)
        if style is None:
            # A module with parameters between split ones, such as an activation, works on parts.
            return option.kind == "plain" or (option.kind == "sequence" and option.inputs[0] >= 0)
        if option.kind != _KINDS[style] or option.inputs[0] == SPREAD:
            return False
        if style in _WHOLE_RESULT and option.outputs[0] != WHOLE:
            return False
        if style == "colwise":
            return option.inputs[0] == WHOLE and option.outputs[0] >= 0 and not _leaves(option)
        is_split = style in ("rowwise_split_input", "embedding_rowwise") or style.startswith(
            "colwise"
        )
        if style.startswith(("replicated", "embedding")):
            return True
        return (option.inputs[0] == WHOLE) == is_split

    return is_allowed


def _leaves(option: Option) -> bool:
    return any(one.kind in ("all_gather", "all_to_all") for one in option.collectives)


def whole(node: Node, option: Option) -> bool:
    """Allows whole operators and plain modules only."""
    return option.kind == "plain" and (node.what != "entry" or option.inputs == option.outputs)
