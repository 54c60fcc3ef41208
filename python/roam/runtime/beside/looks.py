"""Where Python looks at the memory of tensors, and at random generators, without an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def looking(settle: Callable[[torch.Tensor | None], None]) -> Iterator[None]:
    yield
