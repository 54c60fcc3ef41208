"""Which code is roam's own: where its files lie and what its modules are called.

Capture reads Python's stack, tracebacks and the modules of functions and classes. It has to skip
roam's own frames to find the user's line, and roam's own functions and classes, which hold no state
of the user's. Nothing else depends on where a file of roam is.

The training steps of `roam.zoo` are written as a user would write them, and count as the user's.
"""

from __future__ import annotations

import os
from typing import Final, TypeVar

_PACKAGE: Final = __name__.partition(".")[0]
_FOLDER: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FOLDER_AS_USERS: Final = _FOLDER + "zoo" + os.sep
_MODULES_AS_USERS: Final = f"{_PACKAGE}.zoo"
_Kind = TypeVar("_Kind", bound=type)

_compiled_steps: Final[list[type]] = []


def is_own_file(file: str) -> bool:
    """Whether a file is roam's, and no training step of `roam.zoo`."""
    return file.startswith(_FOLDER) and not file.startswith(_FOLDER_AS_USERS)


def is_own_module(name: str) -> bool:
    """Whether a module's dotted name is one of roam's, and none of `roam.zoo`."""
    return _is_in(name, _PACKAGE) and not _is_in(name, _MODULES_AS_USERS)


def shown_file(file: str) -> str:
    """A file's path; of a file of roam's, from the package on, the same on every machine."""
    return file.removeprefix(os.path.dirname(_FOLDER.rstrip(os.sep)) + os.sep)


def compiled_step(kind: _Kind) -> _Kind:
    """Class decorator: objects of this class are compiled steps, which keep the user's function in
    `__wrapped__`.
    """
    _compiled_steps.append(kind)
    return kind


def is_compiled_step(kind: type) -> bool:
    """Whether objects of a class are compiled steps. Compared by identity: no code of a metaclass
    runs.
    """
    return any(kind is known for known in _compiled_steps)


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")
