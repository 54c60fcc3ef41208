"""Capture: a user's training step, run on fake tensors, becomes a program and the planner's graph
of it.

state.discovery (what the step can get at) -> stand_ins.fake_state (fakes in place) -> tracer,
recording.recorder (a program) -> program.passes -> program.lower (graph)
"""

from __future__ import annotations

from roam.tracing.fakes.fake_mode import fake
from roam.tracing.step import CapturedStep, Variant, capture, capture_step

__all__ = ["CapturedStep", "Variant", "capture", "capture_step", "fake"]
