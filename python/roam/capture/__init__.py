"""Capture: a user's training step, run on fake tensors, becomes a program and the planner's graph of it.

reach (what the step can get at) -> world (fakes in place) -> trace (record) -> rewrite -> lower (graph)
"""

from __future__ import annotations

from roam.capture.fake import fake
from roam.capture.step import CapturedStep, Variant, capture, capture_step

__all__ = ["CapturedStep", "Variant", "capture", "capture_step", "fake"]
