"""A backend of PyTorch's that has no device and does nothing: see `absent.py`."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch

_NAME: Final = "absent"


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return False

    def is_built(self) -> bool:
        return False

    def has_primary_context(self, device_index: int) -> bool:
        return False


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


# PyTorch keeps no reference to them.
_HOOKS, _GUARD = _Hooks(), _Guard()


def is_free() -> bool:
    """Whether no backend has taken the one place that PyTorch has for others' backends."""
    return bool(torch._C._get_privateuse1_backend_name() == "privateuseone")


def register() -> None:
    """Takes that place for good."""
    torch.utils.rename_privateuse1_backend(_NAME)
    torch._register_device_module(_NAME, _module())
    torch._C._acc.register_python_privateuseone_hook(_HOOKS)
    torch._C._acc.register_python_privateuseone_device_guard(_GUARD)


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
