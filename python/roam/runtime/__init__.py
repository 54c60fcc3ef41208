"""Runtime: runs the captured step in its plan's order on the user's own tensors."""

from __future__ import annotations

from roam.runtime.compile import Step, compile

__all__ = ["Step", "compile"]
