"""Capture: a user's training step, run on fake tensors, becomes a program and the planner's graph
of it.

state.discovery (what the step can get at) -> tracing.fake_state (fakes in place) -> tracing.tracer,
recorder (a program) -> program.passes -> program.lower (graph)
"""

from __future__ import annotations

from roam.capture.step import CapturedStep, Variant, capture, capture_step
from roam.capture.tracing.fake_mode import fake

__all__ = ["CapturedStep", "Variant", "capture", "capture_step", "fake"]
