"""What the processor is called."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """As Linux calls it; elsewhere as Python does, or the kind of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
