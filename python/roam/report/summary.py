"""What a graph is made of, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roam.report.table import columns, estimate_rows, format_bytes

if TYPE_CHECKING:
    from roam._core import Graph

_PHASES = ("forward", "loss", "backward", "update", "collective")
_WHERE = {
    "persistent": "persistent",
    "step_local": "in the pool",
    "unpooled": "unpooled",
    "enters": "enters",
    "leaves": "leaves",
}
_CANDIDATES = 8
"""Operators that are looked at as barriers: those of the update that read the most tensors."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """An operator that no update can pass: it needs something from every gradient, and every
    gradient is needed after it.
    """

    operator: int
    gradients: int
    held_bytes: int
    """Bytes of gradients that are live while it runs, in every order."""


def summary(graph: Graph) -> str:
    """Operators by phase, bytes by kind, what must keep its order, and what an update must wait
    for. Bytes are counted ones.
    """
    lines = [
        f"{graph.name} on {graph.device}: {graph.num_operators:,} operators, {graph.num_tensors:,} tensors",
        "",
    ]
    lines += [columns(_operators(graph), right=(1,)), "", columns(_tensors(graph), right=(1, 3))]
    facts = list(_facts(graph))
    return "\n".join([*lines, *(["", columns(facts)] if facts else [])]) + "\n"


def _operators(graph: Graph) -> Iterator[tuple[str, ...]]:
    counts = Counter[str](operator.phase for operator in graph.operators)
    for phase in _PHASES:
        if counts[phase]:
            yield phase, f"{counts[phase]:,}", "operators"


def _tensors(graph: Graph) -> Iterator[tuple[str, ...]]:
    numbers, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for tensor in graph.tensors:
        numbers[tensor.kind, tensor.residency] += 1
        sizes[tensor.kind, tensor.residency] += tensor.counted_bytes
    for (kind, residency), size_bytes in sizes.most_common():
        count = numbers[kind, residency]
        yield (
            kind.replace("_", " "),
            f"{count:,}",
            "tensors",
            format_bytes(size_bytes),
            _WHERE[residency],
        )


def _facts(graph: Graph) -> Iterator[tuple[str, ...]]:
    yield from estimate_rows(graph.estimate)
    if graph.accounting:
        yield "accounting", f"{graph.accounting}: not what a real step needs"
    yield from graph.notes
    operators = graph.operators
    for sequence, what in (("random", "random numbers"), ("collective", "collectives")):
        count = sum(operator.sequence == sequence for operator in operators)
        if count:
            yield what, f"{count:,} operators keep their program order"
    live = sum(operator.name == "aten._local_scalar_dense.default" for operator in operators)
    arithmetic = sum(operator.name.startswith("float.") for operator in operators)
    if live or arithmetic:
        yield (
            "live numbers",
            f"{live:,} read from tensors, {arithmetic:,} calculations in Python, at every step",
        )
    for region, (name, _, _) in enumerate(graph.regions):
        yield (
            "conditional",
            f"{name}: {sum(operator.region == region for operator in operators):,} operators",
        )
    barrier = find_barrier(graph)
    if barrier is None:
        yield "barrier", "none: each gradient can die as soon as its update ran"
    else:
        operator = graph.operator(barrier.operator)
        place = f" at {operator.file}:{operator.line}" if operator.file else ""
        held = f"holds {barrier.gradients:,} gradients, {format_bytes(barrier.held_bytes)}, until all are there"
        yield "barrier", f"{operator.name}{place} {held}"


def find_barrier(graph: Graph) -> Barrier | None:
    """The operator at which the most bytes of gradients must be live, if these are of two gradients
    or more.

    A clip by the global norm is one: the norm needs all gradients, and scales all of them. So is a
    loss scaler's check whether any of them is infinite.
    """
    gradients = [
        tensor
        for tensor in graph.tensors
        if tensor.kind == "gradient" and tensor.residency != "persistent"
    ]
    updates = [operator for operator in graph.operators if operator.phase == "update"]
    updates.sort(key=lambda operator: (-len(operator.reads), operator.position))
    found: Barrier | None = None
    for operator in (operator.id for operator in updates[:_CANDIDATES]):
        before = _reached(operator, graph.predecessors)
        after = _reached(operator, graph.successors)
        held = [
            tensor.counted_bytes
            for tensor in gradients
            if graph.creator(tensor.id) in before and not after.isdisjoint(graph.users(tensor.id))
        ]
        if len(held) > 1 and (found is None or sum(held) > found.held_bytes):
            found = Barrier(operator, len(held), sum(held))
    return found


def _reached(start: int, following: Callable[[int], tuple[int, ...]]) -> set[int]:
    reached: set[int] = set()
    waiting = [start]
    while waiting:
        for operator in following(waiting.pop()):
            if operator not in reached:
                reached.add(operator)
                waiting.append(operator)
    return reached
