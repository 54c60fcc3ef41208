"""Runs one script eagerly and by plan, in a process of its own, and compares all that it leaves.
Prints one JSON object.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import roam
from roam.errors import CaptureError
from roam.program.bits import differ
from roam.runtime import Step
from roam.torch_compat.private import pytree
from roam_bench.results import Row
from roam_bench.scripts.registry import Body, Wrap, scripts

_SEED = 0


def outcome(body: Body) -> Row:
    """What came of one script.

    Returns:
        ``outcome``: ``equal``; ``different``; ``refused`` by a `roam.CaptureError`; ``crashed``,
            where anything else was raised; ``broken``, where the script fails eagerly too; with
            ``code``, ``reason``, ``plans`` (how many were made) and ``operators`` (of the largest).
    """
    row: Row = {"outcome": "equal", "code": "", "reason": "", "plans": 0, "operators": 0}
    try:
        _left(body, lambda step: step)  # the libraries' imports draw random numbers too
        expected = _left(body, lambda step: step)
    except Exception as error:  # noqa: BLE001 - a row tells of it
        return row | {"outcome": "broken", "reason": _told(error)}
    steps: list[Step] = []

    def compiled(step: Callable[..., Any]) -> Step:
        steps.append(roam.compile(step))
        return steps[-1]

    try:
        found = _left(body, compiled)
        path = _first_different(expected, found)
        if path is not None:
            row |= {"outcome": "different", "reason": path}
    except CaptureError as error:
        row |= {"outcome": "refused", "code": error.code, "reason": str(error)}
    except Exception as error:  # noqa: BLE001 - a row tells of it
        row |= {"outcome": "crashed", "code": getattr(error, "code", ""), "reason": _told(error)}
    plans = [plan for step in steps for _, plan in step.plans]
    row |= {"plans": len(plans), "operators": max((len(plan.order) for plan in plans), default=0)}
    if row["outcome"] == "equal" and not plans:
        if all(step.runs_beside for step in steps):
            row |= {"reason": "no two calls run the same operators, so none has a plan"}
        else:
            row |= {"outcome": "crashed", "reason": "no step was run by a plan"}
    return row


def _left(body: Body, wrap: Wrap) -> list[tuple[str, Any]]:
    """Every value that a script leaves, with its path, and the states of the random generators."""
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the libraries' own, about configurations as small as these
        left = pytree.tree_map(_plain, body(wrap))
    left = [
        left,
        torch.get_rng_state(),
        random.getstate(),
        [np.asarray(part).tobytes() for part in np.random.get_state()],
    ]
    leaves, _ = pytree.tree_flatten_with_path(left)
    return [(pytree.keystr(path), leaf) for path, leaf in leaves]


def _plain(thing: Any) -> Any:
    """A module, an optimizer and the like as the state that it would save."""
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def _first_different(expected: list[tuple[str, Any]], found: list[tuple[str, Any]]) -> str | None:
    if [path for path, _ in expected] != [path for path, _ in found]:
        other = {path for path, _ in expected} ^ {path for path, _ in found}
        return f"{min(other)} is not in both"
    for (path, one), (_, other) in zip(expected, found, strict=True):
        if not _has_same_bits(one, other):
            return f"{path}: {_shown(one)} eagerly, {_shown(other)} by plan"
    return None


def _has_same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and (
            repr(one) == repr(other) if isinstance(one, float) else bool(one == other)
        )
    return (
        isinstance(other, torch.Tensor)
        and (one.dtype, one.shape) == (other.dtype, other.shape)
        and not differ([one], [other])
    )


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return f"a tensor {tuple(value.shape)} with sum {value.sum().item()!r}"
    return repr(value.item() if isinstance(value, torch.Tensor) else value)


def _told(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:300]} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"


def main(name: str) -> None:
    """Run the script of that name."""
    torch.set_num_threads(1)
    body = next(one.body for one in scripts() if one.name == name)
    sys.stdout.write(json.dumps(outcome(body), allow_nan=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
