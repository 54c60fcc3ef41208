"""What a step takes within a memory limit, planned for a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from roam._core import optimize, verify
from roam.errors import PlanError
from roam.memory_limit import MemoryLimit
from roam.report.anatomy import Change, Planned
from roam.report.figures import figures
from roam.report.table import format_bytes

if TYPE_CHECKING:
    from roam._core import Graph, Plan


def replanned(graph: Graph, like: Plan, memory_limit_bytes: int | None = None) -> Plan:
    """A verified plan with the settings of another, except for the memory limit and a required
    speed.

    Raises:
        PlanError: no plan keeps within the limit, or none was found; or the limit is for several
            streams (code ``invalid_memory_limit``).
    """
    settings = like.settings
    plan = optimize(
        graph,
        streams=settings["streams"],
        reuse=settings["reuse"],
        exact=settings["exact"],
        time_limit_s=settings["time_limit_s"],
        stream_model=settings["stream_model"],
        memory_limit_bytes=memory_limit_bytes,
    )
    verify(graph, plan)
    return plan


def without_recomputation(graph: Graph, plan: Plan) -> Planned | None:
    """The plan of the same graph in which every operator runs once; None if `plan` is that."""
    return None if plan.recomputation is None else Planned.of(graph, replanned(graph, plan))


def within(graph: Graph, plan: Plan, limit: MemoryLimit) -> Change:
    """What the step takes within a limit. A share is one of the plan without recomputation."""
    again = plan.recomputation
    plain_bytes = plan.total_bytes if again is None else again["plain_total_bytes"]
    limit_bytes = limit.in_bytes(plain_bytes)
    return tried(
        f"memory limit {format_bytes(limit_bytes)}",
        lambda: figures(graph, replanned(graph, plan, limit_bytes)),
    )


def tried(name: str, planned: Callable[[], Mapping[str, Any]]) -> Change:
    """The figures of a plan within a limit, which `planned` makes, or why there is no such plan."""
    try:
        return Change(name, planned())
    except PlanError as error:
        if error.code == "memory_floor":
            return Change(name, None, "no plan takes so little")
        if error.code == "memory_limit_not_found":
            return Change(name, None, "no plan was found that takes so little")
        raise
