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
    capture_variant,
    check,
    entries,
    entry,
    names,
)
from roam.zoo.sharding import Sharding, ShardingError, capture_rank

__all__ = [
    "DTYPES",
    "OPTIMIZERS",
    "Entry",
    "Sharding",
    "ShardingError",
    "ZooError",
    "ZooStep",
    "build",
    "capture",
    "capture_rank",
    "capture_variant",
    "check",
    "entries",
    "entry",
    "names",
]
