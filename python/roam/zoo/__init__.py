"""Training steps to plan: known architectures from their configurations, never their weights.

    >>> import roam.zoo
    >>> "gpt2-xl" in roam.zoo.names()
    True

Importing this package imports neither torch nor the libraries that the models come from;
:func:`build` does.
"""

from roam.zoo.catalog import (
    DTYPES,
    OPTIMIZERS,
    Entry,
    ZooError,
    ZooStep,
    build,
    capture,
    capture_rank,
    check,
    entries,
    entry,
    names,
)

__all__ = [
    "DTYPES",
    "OPTIMIZERS",
    "Entry",
    "ZooError",
    "ZooStep",
    "build",
    "capture",
    "capture_rank",
    "check",
    "entries",
    "entry",
    "names",
]
