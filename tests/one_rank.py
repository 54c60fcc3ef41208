"""Scripts of ranks, run by tests in their own process."""

import sys

import pytest


def alone(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    """Lets what is a script with these arguments run in this process, as one rank of one."""
    monkeypatch.setattr(sys, "argv", list(argv))
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
