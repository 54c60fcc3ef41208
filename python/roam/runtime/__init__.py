"""Runtime: runs the captured step in its plan's order on the user's own tensors."""

from __future__ import annotations

from roam.runtime.comparison import Comparison, compare
from roam.runtime.compile import Step, compile
from roam.runtime.fitting import Fit, fit
from roam.runtime.memory_report import StepMemory

__all__ = ["Comparison", "Fit", "Step", "StepMemory", "compare", "compile", "fit"]
