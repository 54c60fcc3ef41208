"""Whether real architectures train by a plan with the bits of eager PyTorch: `roam bench zoo`."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roam.bench.architectures import Architecture, architectures, loss_of
from roam.errors import RoamError
from roam.kernels.trial import differ
from roam.runtime import compile as compile_step

_STEPS = 3
_SEED = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one architecture."""

    library: str
    name: str
    outcome: str
    """``equal``, ``different``, ``refused``, or ``failed``: it does not train under eager PyTorch either, or roam broke."""
    reason: str
    operators: int | None
    program_order_peak_bytes: int | None
    peak_bytes: int | None
    seconds: float


def run(libraries: Sequence[str] = (), names: Sequence[str] = ()) -> Iterator[Trial]:
    """One trial after the other, of the libraries that are installed.

    Args:
        libraries, names: only these; all where empty.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own, about configurations as small as these
        for architecture in architectures():
            if (not libraries or architecture.library in libraries) and (not names or architecture.name in names):
                yield try_architecture(architecture)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> torch.Tensor:
    """One step as a user writes it."""
    optimizer.zero_grad()
    loss = loss_of(model(**inputs))
    loss.backward()
    optimizer.step()
    return loss.detach()


def try_architecture(architecture: Architecture) -> Trial:
    """Trains an architecture from the same start eagerly and by its plan, and compares all that a user can look at."""
    start = time.perf_counter()
    operators = program_order_bytes = peak_bytes = None
    outcome, reason = "failed", ""
    try:
        torch.manual_seed(_SEED)
        model, inputs = architecture.make()
        model.train()
        expected = _outcome(train_step, copy.deepcopy(model), inputs)
        step = compile_step(train_step)
        found = _outcome(step, model, inputs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plan = step.plan(model, optimizer, inputs)
        peak_bytes, program_order_bytes, operators = plan.peak_bytes, plan.program_order_peak_bytes, len(plan.order)
        outcome, reason = _compared(expected, found)
    except RoamError as error:
        outcome, reason = "refused", f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - one architecture's failure is a row, and the others go on
        reason = f"{type(error).__name__}: {error}"
    took = time.perf_counter() - start
    return Trial(
        architecture.library, architecture.name, outcome, reason, operators, program_order_bytes, peak_bytes, took
    )


def _outcome(step: Callable[..., Any], model: torch.nn.Module, inputs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Losses, and parameters, buffers, optimizer state and random state after the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(_SEED)
    losses = [step(model, optimizer, inputs) for _ in range(_STEPS)]
    left = {
        "loss": losses, "model": dict(model.named_parameters()) | dict(model.named_buffers()),
        "optimizer": optimizer.state_dict()["state"], "random state": torch.get_rng_state(),
    }  # fmt: skip
    leaves, _ = pytree.tree_flatten_with_path(left)
    return [(pytree.keystr(path), leaf) for path, leaf in leaves]


def _compared(expected: list[tuple[str, Any]], found: list[tuple[str, Any]]) -> tuple[str, str]:
    if [path for path, _ in expected] != [path for path, _ in found]:
        return "different", "other tensors exist after the steps"
    for (path, one), (_, other) in zip(expected, found, strict=True):
        if not _same_bits(one, other):
            return "different", path
    return "equal", ""


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and one == other
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return not differ([one], [other])
