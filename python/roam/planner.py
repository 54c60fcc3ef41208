"""The planner's surface, completed by what needs the rest of the package: FX graphs and reports.

`roam._core` knows neither torch nor reports. What needs them is here: :func:`optimize`, and methods
that are attached to the classes of `roam._core` when `roam` is imported. Each loads what it needs
when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from roam import _core
from roam._core import Graph, Plan

if TYPE_CHECKING:
    import os

    from torch.fx import GraphModule


def optimize(
    graph: Graph | GraphModule,
    streams: int = 1,
    reuse: bool = True,
    time_limit_s: float | None = None,
    exact: Literal["off", "auto", "required"] | str = "auto",
    progress: Callable[[str, float], Any] | None = None,
    *,
    speed: float | None = None,
    stream_model: Literal["happens_before", "time_step"] | str = "happens_before",
    enough_bytes: int = 0,
    worth_bytes: int = 0,
    memory_limit_bytes: int | None = None,
) -> Plan:
    """Finds an execution order and a memory layout that use little memory, and proves how little is
    possible.

    The same graph and settings give the same plan on any number of threads, unless the time limit
    ends the search. No plan's total is above the laid-out total of program order. Other Python
    threads run meanwhile. Ctrl-C ends the search with :class:`roam.PlanningInterrupted`, a
    ``KeyboardInterrupt`` that holds the best plan so far.

    Args:
        graph: what to plan: a graph, or a `torch.fx.GraphModule` (see `Graph.from_fx`).
        streams: how many operators may run at once, from 1 to 64.
        reuse: whether an output may take the memory of an input that dies, if the graph permits it.
        time_limit_s: wall-clock limit in seconds; at its end the best plan so far is returned, with
            status ``timed_out``. No limit if None.
        exact: whether CBC solves integer programs, in processes of their own, if that can lower the
            total or raise the bound: ``auto`` (if CBC can be used; the plan says so if not),
            ``required`` (an error if CBC cannot be used, or fails on every program) or ``off``.
        progress: a function that is called on the calling thread with the stage that begins and the
            share of the work done, in [0, 1]. An exception that it raises ends planning and is
            raised here.
        speed: with several streams, how many times as fast as one stream the plan must be, by the
            cost model (docs/reference/formats.md). Of the plans that are so fast, and whose
            total is at most the laid-out total of program order, the one with the smallest total
            is returned. If None, a plan is fast enough if it is at most five percent slower than
            the fastest such plan.
        stream_model: ``happens_before``, whose plans are safe under every timing, or ``time_step``,
            the model of the published work, for comparison: its plans cannot be run.
        enough_bytes: the search ends once the total of a plan is no larger than this, in bytes with
            the persistent tensors.
        worth_bytes: the search ends once it is proved that no plan's total is smaller than the best
            one so far by this many bytes or more.
        memory_limit_bytes: the most that the plan may take in all, persistent tensors included. If
            order and layout need more, operators that the graph marks as repeatable run again; the
            plan's `recomputation` tells which, and how long that takes.

    Raises:
        PlanError: the graph cannot be planned as asked. Code ``speed_target``: no plan was found
            that is as fast as asked for and takes no more bytes than program order. Code
            ``memory_floor``: it is proved that no plan keeps within the memory limit. Code
            ``memory_limit_not_found``: no such plan was found.
        PlanningInterrupted: Ctrl-C; its ``plan`` is the best so far. A second Ctrl-C is a plain
            ``KeyboardInterrupt``.
        ValueError: an argument is not valid.
    """
    # What is neither is not worth loading torch for: the planner refuses it.
    if not isinstance(graph, Graph) and hasattr(graph, "recompile"):
        graph = Graph.from_fx(graph, random_states=memory_limit_bytes is not None)
    return _core.optimize(
        graph,  # type: ignore[arg-type]
        streams,
        reuse,
        time_limit_s,
        exact,
        progress,
        speed=speed,
        stream_model=stream_model,
        enough_bytes=enough_bytes,
        worth_bytes=worth_bytes,
        memory_limit_bytes=memory_limit_bytes,
    )


def _summary(self: Graph) -> str:
    """What the graph is made of, for people.

    Operators by phase, bytes by kind, what keeps its order, and at which barrier gradients wait for
    each other.
    """
    from roam.report import summary

    return summary(self)


def _from_fx(cls: type[Graph], module: GraphModule, *, random_states: bool = False) -> Graph:
    """The graph of a `torch.fx.GraphModule`, one operator for each node that calls a kernel.

    Placeholders and attributes are persistent, and results leave the step. Nothing is computed.

    Args:
        module: of nodes that call operators.
        random_states: whether states of random generators are read, so that random tensors may be
            made again: for plans within a memory limit.

    Raises:
        CaptureError: a node that cannot be planned exactly, or metadata that are missing or
            symbolic.
    """
    from roam.tracing.frontends.fx import graph_of

    return graph_of(module, random_states=random_states)


def _apply(self: Plan, module: GraphModule) -> GraphModule:
    """The same `torch.fx.GraphModule` with its nodes in this plan's order, recompiled.

    It drops each value after its last use. The pool is not applied: kernels get their memory from
    PyTorch's allocator.

    Raises:
        PlanError: the plan is not one of this module's, or is for several streams.
    """
    from roam.tracing.frontends.fx import apply

    return apply(self, module)  # type: ignore[no-any-return]


def _report(
    self: Plan, graph: Graph, path: str | os.PathLike[str], *, limits: Iterable[int | str] = ()
) -> None:
    """Writes one HTML page that explains the plan, and that needs no network.

    It shows live bytes over the step, what is alive at the peak, the map of the pool, and what sets
    the bound. It needs ``pip install 'roam-torch[report]'``.

    Args:
        graph: the graph that the plan is for.
        path: of the page.
        limits: memory limits to plan as well, as in ``memory=`` of `roam.compile`: the page lists
            what the step takes within each, and how much time operators that run again cost.

    Raises:
        PlanError: the plan is invalid; or there are limits, and it is for several streams (code
            ``invalid_memory_limit``).
        RoamError: Bokeh is not installed (code ``report_unavailable``).
        ValueError: a limit means nothing.
        OSError: the page cannot be written.
    """
    from roam.memory_limit import MemoryLimit
    from roam.report.anatomy import Anatomy, Planned
    from roam.report.changes import within, without_recomputation
    from roam.report.page import write_page

    planned = Planned.of(graph, self)
    changes = [within(graph, self, MemoryLimit.of(limit)) for limit in limits]
    plain = without_recomputation(graph, self)
    write_page(Anatomy(graph.name or "step", planned, plain, changes=changes), path)


def _export(self: Plan, graph: Graph, path: str | os.PathLike[str]) -> None:
    """Writes the plan in the format of another tool.

    Args:
        graph: the graph that the plan is for.
        path: of the file. Its ending names the format: ``.pickle`` for PyTorch's memory viewer,
            ``.json`` or ``.json.gz`` for Perfetto and ``chrome://tracing``, ``.dot`` for Graphviz.

    Raises:
        PlanError: the plan is invalid.
        ValueError: no format has that ending.
        OSError: the file cannot be written.
    """
    from roam.report.anatomy import Planned
    from roam.report.export import write_export

    write_export(Planned.of(graph, self), path)


def _plan_summary(self: Plan, graph: Graph) -> str:
    """The plan's figures for people; where operators run again also, per module, which activations
    are kept and which are made again, with identical layers as one.

    Args:
        graph: the graph that the plan is for.

    Raises:
        PlanError: the plan is invalid.
    """
    import io

    from roam.report.figures import figures
    from roam.report.remade import remade_table
    from roam.report.table import plan_table
    from roam.report.tables import print_tables

    _core.verify(graph, self)
    text = plan_table(graph.name or "step", {**figures(graph, self), "verified": True}, None)
    if self.recomputation is None:
        return text
    out = io.StringIO()
    print_tables([remade_table(graph, self.recomputation)], out)
    return f"{text}\n{out.getvalue()}"


def _fits(self: Plan, memory: int | str) -> bool:
    """Whether the plan's total is within an amount of memory.

    The total has the step's tensors: leave room for what else the device holds.

    Args:
        memory: bytes, or text such as ``"24GiB"``.

    Raises:
        ValueError: it is no amount of bytes.
    """
    from roam.memory_limit import MemoryLimit

    return self.total_bytes <= MemoryLimit.of(memory).amount_bytes()


def _repr_html(self: Plan) -> str:
    """The plan's figures as a table, for notebooks."""
    from roam.report.anatomy import overview
    from roam.report.figures import plan_figures
    from roam.report.tables import as_html

    return as_html(overview(plan_figures(self)))


def _attach(owner: type, name: str, method: Callable[..., Any], *, to_class: bool = False) -> None:
    """Makes the function a method of a class of `roam._core`, whose stub declares it."""
    method.__name__, method.__qualname__ = name, f"{owner.__name__}.{name}"
    setattr(owner, name, classmethod(method) if to_class else method)


_attach(Graph, "summary", _summary)
_attach(Graph, "from_fx", _from_fx, to_class=True)
_attach(Plan, "apply", _apply)
_attach(Plan, "report", _report)
_attach(Plan, "export", _export)
_attach(Plan, "summary", _plan_summary)
_attach(Plan, "fits", _fits)
_attach(Plan, "_repr_html_", _repr_html)
