"""A plan in the formats of other tools: PyTorch's memory viewer, trace viewers, Graphviz."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from roam.report.chrome_trace import chrome_trace
from roam.report.dot import dot
from roam.report.snapshot import snapshot

if TYPE_CHECKING:
    import os

    from roam.report.anatomy import Planned

_PICKLE_PROTOCOL = 4
"""PyTorch's viewer, a page in JavaScript, reads no newer one."""


def _snapshot(planned: Planned) -> bytes:
    return pickle.dumps(snapshot(planned), protocol=_PICKLE_PROTOCOL)


def _trace(planned: Planned) -> bytes:
    return json.dumps(chrome_trace(planned), allow_nan=False).encode()


def _packed_trace(planned: Planned) -> bytes:
    return gzip.compress(_trace(planned), mtime=0)


def _dot(planned: Planned) -> bytes:
    return dot(planned).encode()


FORMATS: dict[str, Callable[[Planned], bytes]] = {
    ".pickle": _snapshot,
    ".json": _trace,
    ".json.gz": _packed_trace,
    ".dot": _dot,
}
"""How a path ends, and what is written then."""


def check_format(path: str | os.PathLike[str]) -> str:
    """The ending of a path, by which the format is chosen.

    Raises:
        ValueError: there is no format for it.
    """
    for suffix in FORMATS:
        if str(path).endswith(suffix):
            return suffix
    raise ValueError(
        f"{path}: the path has to end in .pickle (PyTorch's memory viewer), .json or .json.gz (Chrome's "
        "trace format) or .dot (Graphviz)"
    )


def write_export(planned: Planned, path: str | os.PathLike[str]) -> None:
    """Writes the plan in the format that the path's ending names.

    Raises:
        ValueError: there is no format for the ending.
        OSError: the file cannot be written.
    """
    Path(path).write_bytes(FORMATS[check_format(path)](planned))
