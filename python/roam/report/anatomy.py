"""What a planned step's memory is made of: computed once, shown on a page, in a terminal and in a
notebook.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from roam._core import verify
from roam.report.figures import Place, figures, live_bytes, peak_place
from roam.report.folding import folded
from roam.report.lifetimes import Lifetimes, Starts, Steps, lifetimes
from roam.report.table import fact_rows, figure_rows
from roam.report.tables import Amount, Cell, Count, Table

if TYPE_CHECKING:
    from roam._core import Graph, Plan

WORKSPACE = "workspace"
"""The kind of what an operator takes for itself while it runs."""
KINDS = ("activation", "gradient", "temporary", "output", "input", "buffer", "parameter", "optimizer_state", WORKSPACE)  # fmt: skip
"""Kinds of memory, in the order in which tables and keys show them."""
_MOST_HOLDINGS = 30
"""Lines of the table of the peak; the rest is one line."""
_ROUTES = {
    "floor": "In every order, this operator needs what it reads and makes, or all that enters "
    "or leaves the step is alive together.",
    "cut": "By a minimum cut: while this operator runs, every order has at least these bytes alive.",
    "probe": "By a series of minimum cuts, the last of them at this operator.",
    "first": (
        "By minimum cuts at several operators, of which one runs before the others in every order."
    ),
    "exhaustive": "By a search over all orders.",
    "integer_program": "By an integer program that CBC solved.",
}


@dataclass(frozen=True, slots=True)
class Curve:
    """Live bytes over the starts of the operators, persistent tensors left out.

    Attributes:
        name: the name of the order or the plan.
        live_bytes: int64 [operators].
        phases: the phase of the operator that starts.
    """

    name: str
    live_bytes: Steps
    phases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Holding:
    """Tensors that are alive at the peak, and alike except for the numbers of their layers.

    Attributes:
        kind: the kind of the tensors, or ``workspace``.
        phase: the phase of the operators that make them; empty if they exist before the step.
        module: the module of these operators, with a star for each layer's number.
        operator: the operator that makes them; the tensor's own name if none does.
        file: the user's file.
        line: the line in `file`; 0 if unknown.
        modules: how many modules are folded into this line.
        tensors: how many tensors there are.
        size_bytes: counted bytes of all of them.
    """

    kind: str
    phase: str
    module: str
    operator: str
    file: str
    line: int
    modules: int
    tensors: int
    size_bytes: int

    @property
    def source(self) -> str:
        """The user's line as ``file:line``; empty if unknown."""
        return f"{self.file}:{self.line}" if self.file else ""


@dataclass(frozen=True)
class Planned:
    """A step with its plan.

    Attributes:
        as_written: the graph in which every operator runs once, in eager PyTorch's order.
        graph: the graph whose operators and tensors the plan numbers; another one if operators run
            again.
        plan: a valid plan of `graph`.
        values: its figures, see :func:`roam.report.figures`.
        runs_again: whether operators run more than once.
        dtypes: by tensor of `graph`, the dtype in which the step's code first has it; empty if
            this is not known.
    """

    as_written: Graph
    graph: Graph
    plan: Plan
    values: Mapping[str, Any]
    runs_again: bool = False
    dtypes: Sequence[str] = ()

    @classmethod
    def of(cls, graph: Graph, plan: Plan) -> Planned:
        """A graph and a plan of it, with or without recomputation, verified.

        Raises:
            PlanError: the plan is invalid.
        """
        verify(graph, plan)
        values = {**figures(graph, plan), "verified": True}
        return cls(graph, *plan.expanded(graph), values, plan.recomputation is not None)

    @property
    def is_parallel(self) -> bool:
        """Whether the plan is for several streams."""
        return self.plan.settings["streams"] > 1

    @cached_property
    def starts(self) -> Starts:
        """When each operator of `graph` runs by the plan."""
        return Starts.of(self.graph, self.plan)

    @cached_property
    def lives(self) -> Lifetimes:
        """When each tensor of `graph` is alive."""
        return lifetimes(self.graph, self.starts, self.plan.reuse)

    @cached_property
    def curve(self) -> Curve:
        """Live bytes by the plan."""
        name = "plan with recomputation" if self.runs_again else "plan"
        live = live_bytes(self.graph, self.plan, self.starts)
        return _curve(name, self.graph, self.starts.order, live)

    @cached_property
    def program_curve(self) -> Curve:
        """Live bytes in eager PyTorch's order."""
        order = self.as_written.program_order
        return _curve("program order", self.as_written, order, self.as_written.live_bytes())

    @cached_property
    def place(self) -> Place | None:
        """Where the plan's peak is."""
        return peak_place(self.graph, self.plan, self.starts)

    @cached_property
    def holdings(self) -> tuple[Holding, ...]:
        """What is alive at the plan's peak, the largest first; it adds up to the peak."""
        if self.place is None:
            return ()
        return _holdings(self.graph, self.starts, self.lives, self.place.step)

    @cached_property
    def program_holdings(self) -> tuple[Holding, ...]:
        """The same at the peak of eager PyTorch's order."""
        if not self.as_written.num_operators:
            return ()
        step = int(self.program_curve.live_bytes.argmax())
        starts = Starts.one_by_one(self.as_written.program_order)
        return _holdings(self.as_written, starts, lifetimes(self.as_written, starts), step)


@dataclass(frozen=True, slots=True)
class Change:
    """What a step takes with one setting changed, by a plan of that step.

    Attributes:
        name: what is changed.
        planned: the figures of the plan; None if there is none.
        error: why there is none.
    """

    name: str
    planned: Mapping[str, Any] | None
    error: str = ""


@dataclass(frozen=True)
class Anatomy:
    """All that a report says.

    Attributes:
        title: what was planned.
        planned: the step and its plan.
        plain: the plan without recomputation, if operators of `planned` run again.
        first: the first step and its plan, if it differs from later ones.
        changes: what the user could change.
        traffic: phase, kind, and bytes of what the step reads from files and writes there.
    """

    title: str
    planned: Planned
    plain: Planned | None = None
    first: Planned | None = None
    changes: Sequence[Change] = ()
    traffic: Sequence[tuple[str, str, int, int]] = ()

    @property
    def curves(self) -> tuple[Curve, ...]:
        """The curves of program order, of the plan without recomputation if there is one, and of
        the plan.
        """
        plain = () if self.plain is None else (self.plain.curve,)
        return (self.planned.program_curve, *plain, self.planned.curve)

    def tables(self) -> list[Table]:
        """All tables, in the order in which they are read."""
        planned = self.planned
        tables = [
            overview(planned.values),
            facts(planned),
            kinds(planned),
            *([dtypes(planned)] if planned.dtypes else []),
            holdings(planned),
            bound(planned),
        ]
        if self.traffic:
            tables.append(moved(self.traffic))
        if self.first is not None:
            tables.append(steps(self.first, planned))
        if self.changes:
            tables.append(changes(self.changes, planned))
        return tables


def moved(traffic: Iterable[tuple[str, str, int, int]]) -> Table:
    """What a step reads from files and writes there, by phase and kind."""
    rows = [
        (phase, kind.replace("_", " "), Amount(read_bytes), Amount(written_bytes))
        for phase, kind, read_bytes, written_bytes in traffic
    ]
    return Table(
        "What is moved to files and back", ("phase", "kind", "read", "written"), tuple(rows)
    )


def overview(values: Mapping[str, Any]) -> Table:
    """What a plan costs, by its figures."""
    rows: list[tuple[Cell, ...]] = [
        (label, Amount(size_bytes, name), note)
        for label, name, size_bytes, note in figure_rows(values)
    ]
    return Table("Memory of the step", ("", "bytes", ""), tuple(rows))


def facts(planned: Planned) -> Table:
    """What there is to say of the plan apart from bytes."""
    return Table("About the plan", ("", ""), tuple(fact_rows(planned.values, planned.place)))


def kinds(planned: Planned) -> Table:
    """What is alive at both peaks, by kind, and what persists."""
    before, after, always = Counter[str](), Counter[str](), Counter[str]()
    for held, counter in ((planned.program_holdings, before), (planned.holdings, after)):
        for holding in held:
            counter[holding.kind] += holding.size_bytes
    for tensor in planned.as_written.tensors:
        if tensor.residency == "persistent":
            always[tensor.kind] += tensor.counted_bytes
    rows = [
        (kind.replace("_", " "), Amount(always[kind]), Amount(before[kind]), Amount(after[kind]))
        for kind in KINDS
        if kind in always or kind in before or kind in after
    ]
    total = (
        Amount(always.total(), "persistent_bytes"),
        Amount(before.total(), "program_order_peak_bytes"),
        Amount(after.total(), "peak_bytes"),
    )
    headings = ("kind", "persistent", "peak in program order", "peak by the plan")
    return Table("What fills it, by kind", headings, (*rows, ("sum", *total)))


def dtypes(planned: Planned) -> Table:
    """What persists, and what is alive at the plan's peak, by dtype."""
    always, peak = Counter[str](), Counter[str]()
    alive = set() if planned.place is None else set(planned.lives.alive_at(planned.place.step))
    for tensor in planned.graph.tensors:
        if tensor.residency == "persistent":
            always[planned.dtypes[tensor.id]] += tensor.counted_bytes
        elif tensor.id in alive:
            peak[planned.dtypes[tensor.id]] += tensor.counted_bytes
    if planned.place is not None:
        peak[WORKSPACE] = planned.place.live_bytes - peak.total()
    shown = [name for name, size_bytes in (always + peak).most_common() if size_bytes]
    rows = [(name, Amount(always[name]), Amount(peak[name])) for name in shown]
    total = ("sum", Amount(always.total()), Amount(peak.total()))
    headings = ("dtype", "persistent", "peak by the plan")
    return Table("What fills it, by dtype", headings, (*rows, total))


def holdings(planned: Planned) -> Table:
    """What is alive at the plan's peak, by where it comes from."""
    shown, rest = planned.holdings[:_MOST_HOLDINGS], planned.holdings[_MOST_HOLDINGS:]
    rows: list[tuple[Cell, ...]] = [
        (
            Amount(holding.size_bytes),
            Count(holding.tensors),
            holding.kind.replace("_", " "),
            holding.phase,
            holding.module + (f" ({holding.modules:,} layers)" if holding.modules > 1 else ""),
            holding.operator,
            holding.source,
        )
        for holding in shown
    ]
    if rest:
        size_bytes = sum(holding.size_bytes for holding in rest)
        tensors = sum(holding.tensors for holding in rest)
        name = f"{len(rest):,} more lines"
        rows.append((Amount(size_bytes), Count(tensors), name, "", "", "", ""))
    place, note = planned.place, ""
    if place is not None:
        times = "time steps" if planned.plan.time_steps is not None else "the cost model"
        when = f"start {place.step:,} by {times}" if planned.is_parallel else f"step {place.step:,}"
        note = f"The peak is at {when}: {place}."
    headings = ("bytes", "tensors", "kind", "phase", "module", "made by", "line")
    return Table("What is alive at the plan's peak", headings, tuple(rows), note)


def bound(planned: Planned) -> Table:
    """What sets the lower bound."""
    graph, plan = planned.graph, planned.plan
    rows: list[tuple[Cell, ...]] = [
        (
            "lower bound of the peak",
            Amount(plan.lower_bound_bytes, "lower_bound_bytes"),
            _ROUTES[plan.bound_route],
        )
    ]
    if plan.bound_operator is not None:
        operator = graph.operator(plan.bound_operator)
        source = f"{operator.file}:{operator.line}" if operator.file else ""
        parts = (operator.name, operator.phase, operator.module, source)
        touched = {*operator.reads, *operator.creates, *operator.mutates}
        own_bytes = int(graph.workspaces_bytes[operator.id]) + sum(
            int(graph.tensor_counted_bytes[tensor])
            for tensor in touched
            if graph.tensor(tensor).residency != "persistent"
        )
        what = "what it reads, changes, makes and takes for itself, except what persists"
        rows.append((", ".join(filter(None, parts)), Amount(own_bytes), what))
    above = plan.peak_bytes - plan.lower_bound_bytes
    rows.append(("above the bound", Amount(above), "bytes of the plan's peak above the bound"))
    return Table("What sets the bound", ("", "bytes", ""), tuple(rows))


def steps(first: Planned, steady: Planned) -> Table:
    """Where the first step and later ones differ."""
    labels = {name: label for label, name, _, _ in figure_rows(steady.values)}
    names = ("persistent_bytes", "pool_bytes", "outside_bytes", "total_bytes", "peak_bytes", "program_order_peak_bytes")  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (labels[name], Amount(first.values[name], f"first.{name}"), Amount(steady.values[name]))
        for name in names
    ]
    rows += [
        (name, Count(first.values[name]), Count(steady.values[name]))
        for name in ("operators", "tensors")
    ]
    larger = max(first.values["total_bytes"], steady.values["total_bytes"])
    rows.append(("a run needs", "", Amount(larger)))
    note = (
        "The first step makes the optimizer's state, which later ones find in place. A run needs "
        "the larger total."
    )
    return Table("The first step and later ones", ("", "first step", "later steps"), tuple(rows), note)  # fmt: skip


def changes(listed: Sequence[Change], planned: Planned) -> Table:
    """What the step takes after changes, each planned."""
    total_bytes = planned.values["total_bytes"]

    def row(change: Change) -> tuple[Cell, ...]:
        if change.planned is None:
            return f"{change.name}: {change.error}", "", "", ""
        values = change.planned
        again = values["recomputation"]
        extra = f"{again['extra_s'] / again['step_s']:.1%}" if again and again["step_s"] else ""
        difference = f"{values['total_bytes'] / total_bytes - 1:+.1%}" if total_bytes else ""
        total = Amount(values["total_bytes"])
        return change.name, total, difference, extra

    headings = ("change", "total", "compared with this plan", "extra time")
    note = "Each line is a plan of the changed step. Extra time is that of operators that run again, as measured or by the cost model."
    return Table("What you could change", headings, tuple(map(row, listed)), note)


def _curve(name: str, graph: Graph, order: Steps, live: Steps) -> Curve:
    operators = graph.operators
    return Curve(name, live, tuple(operators[number].phase for number in order.tolist()))


def _holdings(graph: Graph, starts: Starts, lives: Lifetimes, at: int) -> tuple[Holding, ...]:
    """What is alive at a start, as lines that fold layers, the largest first."""
    modules: defaultdict[tuple[Any, ...], set[str]] = defaultdict(set)
    counts, sizes = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    for key, module, size_bytes in _alive(graph, starts, lives, at):
        modules[key].add(module)
        counts[key] += 1
        sizes[key] += size_bytes
    made = []
    for key, size_bytes in sizes.items():
        kind, phase, module, operator, file, line = key
        folds = len(modules[key] - {""})
        made.append(
            Holding(kind, phase, module, operator, file, line, folds, counts[key], size_bytes)
        )
    return tuple(sorted(made, key=lambda one: (-one.size_bytes, one.module, one.operator)))


def _alive(
    graph: Graph, starts: Starts, lives: Lifetimes, at: int
) -> Iterator[tuple[tuple[Any, ...], str, int]]:
    """What a tensor's line has in common, its module, and its bytes."""
    for number in lives.alive_at(at):
        tensor, creator = graph.tensor(number), graph.creator(number)
        if tensor.residency == "persistent" or not tensor.counted_bytes:
            continue
        if creator is None:
            key: tuple[Any, ...] = (tensor.kind, "", "", folded(tensor.name), "", 0)
            yield key, "", tensor.counted_bytes
            continue
        maker = graph.operator(creator)
        place = (maker.name, maker.file, maker.line)
        yield (tensor.kind, maker.phase, folded(maker.module), *place), maker.module, tensor.counted_bytes  # fmt: skip
    running = starts.order[: at + 1][starts.done[: at + 1] > at]
    for number in running[graph.workspaces_bytes[running] > 0].tolist():
        operator = graph.operator(number)
        place = (operator.name, operator.file, operator.line)
        key = (WORKSPACE, operator.phase, folded(operator.module), *place)
        yield key, operator.module, int(graph.workspaces_bytes[number])


def run_lengths(values: Sequence[Any] | Steps) -> Iterator[tuple[Any, int, int]]:
    """Each run of equal values, as (value, first index, index after the last)."""
    array = np.asarray(values)
    if not len(array):
        return
    borders = np.flatnonzero(array[1:] != array[:-1]) + 1
    for start, end in zip([0, *borders.tolist()], [*borders.tolist(), len(array)], strict=True):
        yield array[start].item(), start, end
