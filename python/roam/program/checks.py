"""Checks and branches in a run: the step's code asks about a value that the step computes, and the
plan assumes one answer.

Only a run can find the answer. So a run computes it as early as it can. If it is not the assumed
answer, the run restores what it has written, and the user's own function runs instead. A wrong
guess costs time, but changes no bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class CheckFailed(Exception):
    """A check of the step's code does not pass."""


def check(
    value: Any, expected: bool, copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
) -> None:
    """Raises `CheckFailed` if a value is not what the plan assumes, with the copies by which the
    run's changes can be undone.

    Args:
        value: what the code asks about.
        expected: its truth.
        copies: what has been written to, each with a copy from before.
    """
    if bool(value) is not expected:
        for tensor, copy in copies:
            tensor.copy_(copy)
        raise CheckFailed("a branch or check of the step has another outcome than in the plan")
