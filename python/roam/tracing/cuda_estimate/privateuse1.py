"""A backend of PyTorch's that has no device and does nothing: see `absent.py`."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch

from roam.torch_compat.private import (
    backend_classes,
    backend_name,
    private_use_type,
    register_backend,
)

_NAME: Final = "absent"


_HooksBase: Any
_GuardBase: Any
_HooksBase, _GuardBase = backend_classes()


class _Hooks(_HooksBase):  # type: ignore[misc]
    def is_available(self) -> bool:
        return False

    def is_built(self) -> bool:
        return False

    def has_primary_context(self, device_index: int) -> bool:
        return False


class _Guard(_GuardBase):  # type: ignore[misc]
    def type_(self) -> Any:
        return private_use_type()


# PyTorch keeps no reference to them.
_HOOKS, _GUARD = _Hooks(), _Guard()


def is_free() -> bool:
    """Whether no backend has taken the one place that PyTorch has for others' backends."""
    return bool(backend_name() == "privateuseone")


def register() -> None:
    """Takes that place for good."""
    torch.utils.rename_privateuse1_backend(_NAME)
    register_backend(_NAME, _module(), _HOOKS, _GUARD)


def _module() -> ModuleType:
    module = ModuleType(f"torch.{_NAME}")
    answers = {
        "is_available": False,
        "is_initialized": False,
        "device_count": 0,
        "current_device": 0,
        "_is_in_bad_fork": False,
        "manual_seed_all": None,
    }
    for name, answer in answers.items():
        setattr(module, name, lambda *_, answer=answer: answer)
    return module
