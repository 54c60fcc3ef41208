"""Scripts of ranks, run by tests in their own process."""

import sys

import pytest
import torch

from roam.runtime.pool import Pool


def alone(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    """Lets what is a script with these arguments run in this process, as one rank of one."""
    monkeypatch.setattr(sys, "argv", list(argv))
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # All compiled steps of a process share one pool; other tests may have needed a larger one.
    Pool.of(torch.device("cpu")).release()
