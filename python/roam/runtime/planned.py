"""The plans behind a compiled step's way of running, for reports."""

from __future__ import annotations

from dataclasses import asdict

from roam._core import Plan, optimize
from roam.memory_limit import MemoryLimit
from roam.program.lower import PART
from roam.report.anatomy import Planned
from roam.report.figures import figures
from roam.runtime.available import available_bytes
from roam.runtime.strategy import Choice, choose, ordered_as
from roam.tracing.step import Variant


def choose_with_tiles(
    variant: Variant, memory: MemoryLimit, time_limit_s: float | None = None
) -> Choice:
    """How a step of fake tensors would run within a limit if real ones stood in their places: with
    what kernels take for themselves and with tiles, which are tried on this machine. Times are
    those of the cost model.

    Raises:
        PlanError: there is no plan within the limit, or none was found.
    """
    (choice,) = choose(
        [variant],
        pool=None,
        time_limit_s=time_limit_s,
        memory=memory,
        is_timed=False,
        room_bytes=available_bytes(variant.device, 0),
    )
    return choice


def planned_by(choice: Choice) -> Planned:
    """The plan of a choice, with the step as it was captured."""
    written, again, plan = choice.eager_graph, choice.recomputation, _bounded(choice)
    values = {
        **figures(choice.graph, plan),
        "verified": True,
        "program_order_peak_bytes": int(written.live_bytes().max(initial=0)),
        # Not given, since the plan is of another graph: in it, pairs of calls may be one, and
        # results may be copied into the pool.
        "saved_by_order_bytes": None,
        "saved_by_reuse_bytes": None,
        "memory_limit_bytes": choice.memory_limit_bytes,
    }
    if choice.cuts is not None:
        values["cuts"] = asdict(choice.cuts)
    if again is not None:
        values["recomputation"] = {
            "runs": again.runs,
            "extra_s": again.extra_s,
            "step_s": again.step_s,
            "least_extra_s": again.least_extra_s,
            "floor_bytes": again.floor_bytes,
            "offloaded_bytes": 0 if again.offloaded is None else again.offloaded.stored_bytes,
            "plain_total_bytes": min(size_bytes for _, size_bytes in choice.totals[:-1]),
            "timed_operators": again.timed_calls,
            "modelled_operators": again.modelled_calls,
        }
    return Planned(written, choice.graph, plan, values, again is not None, _dtypes(choice))


def _dtypes(choice: Choice) -> list[str]:
    """Of each tensor of a choice's graph, the dtype in which the step's code first has it."""
    storages = choice.program.storages
    found: dict[int, str] = {}
    for meta in choice.program.slots:
        if meta is not None:
            found.setdefault(meta.storage, str(meta.dtype).removeprefix("torch."))
    named = {storages[number].name: dtype for number, dtype in found.items()}
    return [
        found.get(tensor.id) or named.get(tensor.name.removesuffix(PART), "unknown")
        for tensor in choice.graph.tensors
    ]


def _bounded(choice: Choice) -> Plan:
    """The plan of a choice with the best bound that there is: a search that found a plan that is
    good enough to run may have ended before it found its best bound.
    """
    plan = choice.plan
    if plan.status == "optimal" or plan.settings["streams"] > 1 or choice.recomputation is not None:
        return plan
    limit_s = plan.settings["time_limit_s"]
    searched = optimize(choice.graph, exact="off", time_limit_s=limit_s)
    if searched.total_lower_bound_bytes <= plan.total_lower_bound_bytes:
        return plan
    return ordered_as(plan, searched, choice.graph) or plan


def plain_of(choice: Choice) -> Planned | None:
    """A plan of the step as it was captured, if operators of the choice run again; None if not."""
    if choice.recomputation is None:
        return None
    return Planned.of(choice.eager_graph, optimize(choice.eager_graph))
