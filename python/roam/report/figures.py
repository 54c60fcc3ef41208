"""A plan's figures under the names of its attributes, and where in the user's program its peak
lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roam.report.lifetimes import Starts, Steps, lifetimes, live_bytes_of

if TYPE_CHECKING:
    from roam._core import Graph, Plan

_ATTRIBUTES = (
    "program_order_peak_bytes",
    "peak_bytes",
    "pool_bytes",
    "pool_peak_bytes",
    "outside_bytes",
    "persistent_bytes",
    "total_bytes",
    "lower_bound_bytes",
    "total_lower_bound_bytes",
    "bound_route",
    "gap",
    "fragmentation",
    "status",
    "estimate",
    "makespan_s",
    "serial_s",
    "critical_path_s",
)


@dataclass(frozen=True)
class Place:
    """The operator at whose start the most bytes are live, and the user's line that it comes from,
    if known.
    """

    step: int
    live_bytes: int
    operator: str
    phase: str
    module: str
    file: str
    line: int

    def __str__(self) -> str:
        """One line for people: kernel, phase, module, file and line."""
        parts = [
            self.operator,
            self.phase,
            self.module,
            f"{self.file}:{self.line}" if self.file else "",
        ]
        return ", ".join(part for part in parts if part)


def live_bytes(graph: Graph, plan: Plan, starts: Starts | None = None) -> Steps:
    """Live bytes per start of an operator, int64 [operators]: on one stream per step of the plan's
    order. A reused input is counted once with its output.

    Args:
        graph: the graph that the plan is for.
        plan: a valid plan of it without recomputation, see `Plan.expanded`.
        starts: when the operators run, where it is known already.
    """
    if plan.settings["streams"] > 1:
        starts = Starts.of(graph, plan) if starts is None else starts
        return live_bytes_of(graph, starts, lifetimes(graph, starts, plan.reuse))
    live = graph.live_bytes(plan.order).copy()
    if len(plan.reuse):
        step_of = {operator: step for step, operator in enumerate(plan.order.tolist())}
        for _, output in plan.reuse:
            live[step_of[graph.creator(output)]] -= graph.tensor_counted_bytes[output]
    return live


def peak_place(graph: Graph, plan: Plan, starts: Starts | None = None) -> Place | None:
    """The first start of an operator at which the live bytes of a valid plan are the peak; ``None``
    for a graph without operators.

    Args:
        graph: the graph that the plan is for.
        plan: a valid plan of it.
        starts: when the operators run, where it is known already.
    """
    if graph.num_operators == 0:
        return None
    graph, plan = plan.expanded(graph)
    starts = Starts.of(graph, plan) if starts is None else starts
    live = live_bytes(graph, plan, starts)
    step = int(live.argmax())
    operator = graph.operator(int(starts.order[step]))
    return Place(
        step,
        int(live[step]),
        operator.name,
        operator.phase,
        operator.module,
        operator.file,
        operator.line,
    )


def plan_figures(plan: Plan) -> dict[str, Any]:
    """The plan's attributes by name (bytes, fractions, seconds; not rounded).

    What needs the graph is None: see :func:`figures`.
    """
    result: dict[str, Any] = {name: getattr(plan, name) for name in _ATTRIBUTES}
    again = plan.recomputation
    result["saved_by_order_bytes"] = result["saved_by_reuse_bytes"] = None
    result["memory_limit_bytes"] = plan.settings.get("memory_limit_bytes")
    result["recomputation"] = result["cuts"] = None
    if again is not None:
        runs = len(again["sequence"]) - len(set(again["sequence"]))
        del again["sequence"]
        result["recomputation"] = {"runs": runs, **again}
    result["streams"] = plan.settings["streams"]
    result["stream_model"] = plan.settings["stream_model"]
    result["syncs"] = len(plan.syncs)
    result["exact"] = dict(plan.exact)
    result["timings_s"] = dict(plan.timings_s)
    result["operators"] = result["tensors"] = None
    return result


def figures(graph: Graph, plan: Plan) -> dict[str, Any]:
    """The plan's attributes by name, and what they are made of.

    ``saved_by_order_bytes`` and ``saved_by_reuse_bytes`` add up to program order's peak less the
    plan's; they are ``None`` for several streams and with recomputation, where they cannot be told
    apart.
    """
    result = plan_figures(plan)
    if plan.settings["streams"] == 1 and plan.recomputation is None:
        ordered = int(graph.live_bytes(plan.order).max(initial=0))
        result["saved_by_order_bytes"] = plan.program_order_peak_bytes - ordered
        result["saved_by_reuse_bytes"] = ordered - plan.peak_bytes
    if result["recomputation"] is not None:
        given = sum(operator.time_ns > 0 for operator in graph.operators)
        modelled = int((graph.times_ns > 0).sum()) - given
        result["recomputation"] |= {"timed_operators": given, "modelled_operators": modelled}
    result["operators"] = graph.num_operators
    result["tensors"] = graph.num_tensors
    return result
