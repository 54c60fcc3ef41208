"""What a rank's step waits for other ranks, by its plan and the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roam._core import Graph, Plan
from roam.program.ir import Program
from roam.program.links import Links, Transfer, transfers
from roam.report.tables import Amount, Count, Table, as_html, as_text

_NAMES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
}


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of one kind in groups of one size.

    Attributes:
        kind: what they do.
        ranks: how many ranks take part.
        is_near: whether these are on one machine.
        count: how many there are in a step.
        size_bytes: bytes of all results, or of all that is reduced.
        time_s: seconds that they take.
        exposed_s: seconds of these in which the rank waits for them and computes nothing.
    """

    kind: str
    ranks: int
    is_near: bool
    count: int
    size_bytes: int
    time_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Communication:
    """How long a step of one rank waits for others, by the cost model.

    A rank computes one operator after the other. At the same time, the collectives of each process
    group go over the links one after the other. A wait for a collective lasts until the collective
    has ended.

    Attributes:
        links: the model of the links.
        collectives: what is exchanged; empty if nothing is.
        compute_s: seconds of all operators that are no collectives.
        time_s: seconds of all collectives.
        exposed_s: seconds in which the rank waits, in the plan's order.
        least_exposed_s: in no order of these operators does the rank wait less.
    """

    links: Links
    collectives: tuple[Collectives, ...]
    compute_s: float
    time_s: float
    exposed_s: float
    least_exposed_s: float

    @classmethod
    def of(
        cls, program: Program, graph: Graph, plan: Plan, links: Links | None = None
    ) -> Communication:
        """The communication of a plan.

        Args:
            program: the calls; call i is operator i of the graph.
            graph: the graph that the plan is for; operators may run more than once.
            plan: a plan for one stream.
            links: the model of the links; None for the defaults of `Links`.

        Raises:
            ValueError: the plan is for several streams.
        """
        if plan.settings["streams"] > 1:
            raise ValueError(
                "exposed communication is computed for plans of one stream only; plan with "
                "streams=1"
            )
        links = Links() if links is None else links
        found = list(transfers(program))
        taken = {one.launch: links.time_ns(one.kind, one.group, one.size_bytes) for one in found}
        is_part = {one.launch for one in found} | {one.wait for one in found}
        times = [
            0 if number in is_part else int(time_ns)
            for number, time_ns in enumerate(graph.times_ns)
        ]
        exposed, compute_ns, total_ns = simulated(found, taken, times, plan.order.tolist())
        least = max(least_ns(graph, found, taken, times) - compute_ns, 0)
        by_kind: dict[tuple[str, int, bool], list[Transfer]] = {}
        for one in found:
            name = _NAMES.get(one.kind, one.kind)
            by_kind.setdefault((name, one.group.size, links.is_near(one.group)), []).append(one)
        runs = exposed.counts
        rows = [
            Collectives(
                *key,
                sum(runs[one.launch] for one in alike),
                sum(runs[one.launch] * one.size_bytes for one in alike),
                sum(runs[one.launch] * taken[one.launch] for one in alike) / 1e9,
                sum(exposed.ns[one.launch] for one in alike) / 1e9,
            )
            for key, alike in by_kind.items()
        ]
        return cls(
            links,
            tuple(rows),
            compute_ns / 1e9,
            total_ns / 1e9,
            sum(exposed.ns.values()) / 1e9,
            least / 1e9,
        )

    def table(self) -> Table:
        """The figures, a kind a line."""
        rows = [
            (
                one.kind,
                Count(one.ranks),
                "on one machine" if one.is_near else "on several machines",
                Count(one.count),
                Amount(one.size_bytes),
                _ms(one.time_s),
                _ms(one.exposed_s),
            )
            for one in self.collectives
        ]
        links = self.links
        return Table(
            "Communication, by the cost model",
            ("collective", "ranks", "", "in a step", "bytes", "takes", "exposed"),
            tuple(rows),
            f"The rank computes for {_ms(self.compute_s)}, and waits for {_ms(self.exposed_s)} of the "
            f"{_ms(self.time_s)} of communication. No order of its operators has it wait for less than "
            f"{_ms(self.least_exposed_s)}. Links: {links.machine_ranks} ranks on a machine with "
            f"{links.near_bytes_per_ns:g} GB/s each, {links.far_bytes_per_ns:g} GB/s to other machines.",
        )

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return asdict(self)

    def __str__(self) -> str:
        return as_text(self.table())

    def _repr_html_(self) -> str:
        return as_html(self.table())


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


@dataclass(frozen=True, slots=True)
class Exposed:
    """How often each launch runs, and how many nanoseconds its waits last, by the launches'
    numbers.
    """

    counts: dict[int, int]
    ns: dict[int, int]


def simulated(
    found: Sequence[Transfer],
    taken: Mapping[int, int],
    times: Sequence[int],
    order: Sequence[int],
) -> tuple[Exposed, int, int]:
    """How long waits last in an order, and nanoseconds of computing and of communication."""
    launches = {one.launch: one for one in found}
    waits = {one.wait: one for one in found}
    exposed = Exposed(dict.fromkeys(launches, 0), dict.fromkeys(launches, 0))
    free: dict[Any, int] = {}
    ends: dict[int, int] = {}
    now = compute_ns = total_ns = 0
    for number in order:
        if (launch := launches.get(number)) is not None:
            ends[number] = max(now, free.get(launch.group, 0)) + taken[number]
            free[launch.group] = ends[number]
            exposed.counts[number] += 1
            total_ns += taken[number]
        elif (waited := waits.get(number)) is not None:
            lasts = max(ends[waited.launch] - now, 0)
            exposed.ns[waited.launch] += lasts
            now += lasts
        else:
            now += times[number]
            compute_ns += times[number]
    return exposed, compute_ns, total_ns


def least_ns(
    graph: Graph, found: Sequence[Transfer], taken: Mapping[int, int], times: Sequence[int]
) -> int:
    """Nanoseconds that a step takes at least: as long as its longest chain of operators that wait
    for each other, and as the collectives of each group.
    """
    launch_of = {one.wait: one.launch for one in found}
    ends = [0] * len(times)
    for number in graph.program_order.tolist():
        launch = launch_of.get(number, -1)
        ready = 0
        for before in graph.predecessors(number):
            ready = max(ready, ends[before] + (taken[before] if before == launch else 0))
        ends[number] = ready + times[number]
    by_group: dict[Any, int] = {}
    for one in found:
        by_group[one.group] = by_group.get(one.group, 0) + taken[one.launch]
    return max([0, *ends, *by_group.values()])


__all__ = ["Collectives", "Communication", "least_ns", "simulated"]
