"""What the tests of libraries' trainers share: what a run leaves behind, and a measured budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils import _pytree as pytree

from roam.runtime import Step
from training import tensors_and_numbers

TIMES = ("runtime", "per_second")


def leaves(*values: Any) -> list[Any]:
    """As `tensors_and_numbers`, with the random state and NumPy's arrays as tensors."""
    values = pytree.tree_map_only(np.ndarray, torch.from_numpy, (values, torch.get_rng_state()))
    return tensors_and_numbers(values)


def without_times(logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in log.items() if not any(word in name for word in TIMES)}
        for log in logs
    ]


def files(folder: Path) -> dict[str, Any]:
    """What the tensors' files in a folder hold, by path."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            found[name] = load_file(path)
        elif path.suffix in (".pt", ".pth", ".ckpt", ".bin") and path.name != "training_args.bin":
            found[name] = torch.load(path, weights_only=False)
    assert found
    return found


class Measured:
    """Measures every step of the compiled steps that run meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0

        def measured(step: Step, *args: Any, **kwargs: Any) -> Any:
            result = step.measured(*args, **kwargs)
            memory = step.memory()
            assert memory.measured_bytes <= memory.limit_bytes, memory
            self.steps += 1
            return result

        monkeypatch.setattr(Step, "__call__", measured)
