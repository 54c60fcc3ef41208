"""Fake tensors: shapes, strides and storages without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from roam.capture import absent
from roam.errors import CaptureError


def new_mode() -> FakeTensorMode:
    """A fake mode as capture wants it: without symbolic shapes, so that every size is a number."""
    return FakeTensorMode(shape_env=None, static_shapes=True)


@contextmanager
def fake(device: str = "cpu") -> Iterator[None]:
    """Builds models without memory: tensors made inside have sizes and no data.

    Such a model can be given to `roam.capture`; it cannot be run.

    Args:
        device: where the tensors would be, ``"cpu"`` or ``"cuda"``.

    On a machine without a CUDA device, what is captured for ``"cuda"`` is an estimate, and says so (`Graph.estimate`).

    Raises:
        CaptureError: for ``"cuda"`` with a PyTorch that was not built for it.

    Example:
        >>> import torch, roam
        >>> with roam.fake():
        ...     model = torch.nn.Linear(10_000, 10_000)
    """
    is_absent = absent.is_absent(torch.device(device))
    if is_absent:
        absent.prepare()
    with new_mode(), torch.device(device), absent.as_if_present() if is_absent else nullcontext():
        yield


def mode_of(tensors: list[torch.Tensor]) -> FakeTensorMode:
    """The mode that the tensors' fakes belong to, or a new one where all are real.

    Raises:
        CaptureError: where they come from different modes, or from one with symbolic shapes.
    """
    modes = {id(t.fake_mode): t.fake_mode for t in tensors if isinstance(t, FakeTensor)}
    if not modes:
        return new_mode()
    if len(modes) > 1:
        raise CaptureError(
            "the step's fake tensors come from different fake modes; build model and batch in one `with roam.fake():`",
            code="fake_modes",
        )  # fmt: skip
    (mode,) = modes.values()
    return mode
