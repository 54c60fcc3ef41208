"""Training-memory planning for PyTorch.

A training step (forward, loss, backward, optimizer update) becomes one :class:`Graph`;
:func:`optimize` finds a :class:`Plan` for it, an execution order and a memory layout, together with
a lower bound that proves how good it is; :func:`verify` checks a plan on its own; :func:`compile`
runs the real step by it, and :func:`compare` says whether that gives the bits of eager PyTorch.
:func:`parallelize` splits a model over several devices. Buffers without a graph are packed by
:mod:`roam.layout`.

Importing this package loads neither torch nor a solver. :func:`capture`, :func:`compile`,
:func:`compare`, :func:`fit`, :func:`parallelize` and :func:`fake` load torch when they are first
looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roam._core import (
    Candidate,
    Graph,
    GraphBuilder,
    Operator,
    Plan,
    Tensor,
    __version__,
    baseline,
    verify,
)
from roam.errors import (
    CaptureError,
    ExecutionError,
    FormatError,
    GraphError,
    LayoutError,
    PackingInterrupted,
    PlanError,
    PlanningInterrupted,
    RoamError,
    SolverUnavailable,
)
from roam.planner import optimize
from roam.switch import disabled

if TYPE_CHECKING:
    from roam.runtime.comparison import compare
    from roam.runtime.compile import compile
    from roam.runtime.fitting import fit
    from roam.sharding import parallelize
    from roam.tracing import capture, fake

__all__ = [
    "Candidate",
    "CaptureError",
    "ExecutionError",
    "FormatError",
    "Graph",
    "GraphBuilder",
    "GraphError",
    "LayoutError",
    "Operator",
    "PackingInterrupted",
    "Plan",
    "PlanError",
    "PlanningInterrupted",
    "RoamError",
    "SolverUnavailable",
    "Tensor",
    "__version__",
    "baseline",
    "capture",
    "compare",
    "compile",
    "disabled",
    "fake",
    "fit",
    "optimize",
    "parallelize",
    "verify",
]

# Public names that need torch, and the module each comes from.
_LAZY = {
    "capture": "roam.tracing",
    "fake": "roam.tracing",
    "compare": "roam.runtime",
    "compile": "roam.runtime",
    "fit": "roam.runtime",
    "parallelize": "roam.sharding",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
