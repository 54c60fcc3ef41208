"""What a plan within a memory limit keeps for the backward pass, and what it makes again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roam.report.folding import folded
from roam.report.tables import Amount, Count, Table

if TYPE_CHECKING:
    from roam._core import Graph

_ELSEWHERE = "in no module"


@dataclass(slots=True)
class Remade:
    """What becomes of a module's activations. Identical layers are taken together.

    Attributes:
        module: its path, with a star for the number of each layer.
        modules: how many modules these are.
        kept_bytes: activations that are made once.
        remade_bytes: activations that are made again.
        runs: how many extra runs of operators there are, views not counted.
        extra_ns: nanoseconds that these take by plan.
    """

    module: str
    modules: int = 0
    kept_bytes: int = 0
    remade_bytes: int = 0
    runs: int = 0
    extra_ns: int = 0


def remade(graph: Graph, sequence: Sequence[int]) -> list[Remade]:
    """What becomes of the activations of each module, the one with the most bytes made again first.

    Args:
        graph: the graph, in which each operator runs once.
        sequence: the operators in the order of their runs.
    """
    runs = Counter(map(int, sequence))
    times = graph.times_ns
    found: dict[str, Remade] = {}
    paths: dict[str, set[str]] = {}
    for number, operator in enumerate(graph.operators):
        extra = runs[number] - 1
        made_bytes = sum(
            tensor.counted_bytes
            for tensor in map(graph.tensor, operator.creates)
            if tensor.kind == "activation"
        )
        is_run = extra > 0 and bool(operator.creates or operator.mutates)
        if not made_bytes and not is_run:
            continue
        module = folded(operator.module) or _ELSEWHERE
        entry = found.setdefault(module, Remade(module))
        paths.setdefault(module, set()).add(operator.module)
        entry.modules = len(paths[module])
        if extra:
            entry.remade_bytes += made_bytes
            entry.runs += extra * is_run
            entry.extra_ns += extra * int(times[number])
        else:
            entry.kept_bytes += made_bytes
    return sorted(found.values(), key=lambda one: (-one.remade_bytes, -one.kept_bytes))


def remade_table(graph: Graph, recomputation: Mapping[str, object]) -> Table:
    """The same as a table, of a plan's `recomputation`."""
    rows = tuple(
        (
            f"{one.modules:,} x {one.module}" if one.modules > 1 else one.module,
            Amount(one.kept_bytes),
            Amount(one.remade_bytes),
            Count(one.runs),
            f"{one.extra_ns / 1e6:.2f} ms",
        )
        for one in remade(graph, recomputation["sequence"])  # type: ignore[arg-type]
    )
    return Table(
        "Activations that are kept and made again",
        ("module", "kept", "made again", "extra runs", "time"),
        rows,
        "What the forward pass makes for the backward pass, at the module that makes it; time by plan.",
    )
