"""Identical layers of a model as one line."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\[\d+\]|(?<=\.)\d+(?=\.|$)")


def folded(module: str) -> str:
    """A module's path with a star for the number of each layer: ``h[3].mlp`` is ``h[*].mlp``."""
    return _NUMBER.sub(lambda found: "[*]" if found[0].startswith("[") else "*", module)
