"""What is live at the peak of an order: `python benches/peak.py vgg11 32 eager_updates`, a row of
the paper's table or a graph file, and an order.

It prints the kinds of tensors, the largest tensors with the steps that they live through, and what
PyTorch's caching allocator reserves: the last tensors for which it asks the device for more, and
how much is free by then, in pieces that are too small. The order is one that `roam.baseline` knows,
or `roam`. What enters the step is in the peak, but not in the list.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import roam
from roam._core import baseline_order, caching_allocator_bytes
from roam.report.lifetimes import Starts, Steps, lifetimes
from roam_bench.paper import paper_graph

MIB = 2**20


def order_by(graph: roam.Graph, name: str) -> Steps:
    """The operators as they run."""
    if name == "roam":
        return roam.optimize(graph, reuse=False).order
    return baseline_order(graph, name, reuse=False)


def is_made(graph: roam.Graph, tensor: int) -> bool:
    """Whether an operator makes it, and it counts."""
    found = graph.tensor(tensor)
    is_counted = found.residency != "persistent" and found.counted_bytes > 0
    return is_counted and graph.creator(tensor) is not None


def kind(graph: roam.Graph, tensor: int) -> str:
    """What a tensor is for."""
    found, creator = graph.tensor(tensor), graph.creator(tensor)
    phase = "" if creator is None else graph.operator(creator).phase
    is_updated_by = any(graph.operator(user).phase == "update" for user in graph.users(tensor))
    return (
        "gradient of a weight"
        if phase == "backward" and is_updated_by
        else f"{found.kind}, {phase}"
    )


def at_the_peak(graph: roam.Graph, order: Steps, most: int) -> Iterator[str]:
    """What is live then, by kind, and the largest tensors."""
    live = graph.live_bytes(order)
    peak = int(live.argmax())
    operator = graph.operator(order[peak])
    yield f"peak at step {peak} of {len(order)}, {operator.name} {operator.module}: {live[peak] / MIB:,.2f} MiB, and {graph.persistent_bytes / MIB:,.2f} persistent"
    lives = lifetimes(graph, Starts.one_by_one(order))
    alive = [tensor for tensor in lives.alive_at(peak) if is_made(graph, tensor)]
    sizes: Counter[str] = Counter()
    for tensor in alive:
        sizes[kind(graph, tensor)] += graph.tensor(tensor).counted_bytes
    for name, size in sizes.most_common():
        yield f"{size / MIB:12,.2f}  {name}"
    for tensor in sorted(alive, key=lambda tensor: -graph.tensor(tensor).counted_bytes)[:most]:
        found, creator = graph.tensor(tensor), graph.creator(tensor)
        module = "" if creator is None else graph.operator(creator).module
        yield f"{found.counted_bytes / MIB:12,.2f}  {found.name} {module} ({kind(graph, tensor)}), steps {lives.starts[tensor]} to {lives.ends[tensor] - 1}"


def in_the_allocator(
    graph: roam.Graph, order: Steps, most: int, *, expandable: bool
) -> Iterator[str]:
    """What the first of the steps reserves, and the last tensors that it reserves more for."""
    ends = lifetimes(graph, Starts.one_by_one(order)).ends
    events: list[tuple[int, int | None]] = []
    for step, operator in enumerate(order.tolist()):
        made = [one for one in graph.operator(operator).creates if is_made(graph, one)]
        dead = [one for one in np.flatnonzero(ends == step + 1).tolist() if is_made(graph, one)]
        events += [(tensor, graph.tensor(tensor).counted_bytes) for tensor in made]
        events += [(tensor, None) for tensor in dead]
    reserved = caching_allocator_bytes(events, expandable=expandable).tolist()
    yield f"reserved {max(reserved, default=0) / MIB:,.2f} MiB{' in expandable segments' if expandable else ''}"
    in_use, before, grown = 0, 0, []
    for (tensor, size), now in zip(events, reserved, strict=True):
        if now > before:
            found = graph.tensor(tensor)
            grown.append(
                f"{(now - before) / MIB:12,.2f}  for {found.name} ({found.counted_bytes / MIB:,.2f}), {(before - in_use) / MIB:,.2f} being free"
            )
        in_use += (
            graph.tensor(tensor).counted_bytes
            if size is not None
            else -graph.tensor(tensor).counted_bytes
        )
        before = now
    yield from grown[-most:]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="of the paper's table, or a graph file")
    parser.add_argument("batch", type=int, nargs="?", default=1)
    parser.add_argument("order", nargs="?", default="program")
    parser.add_argument("--most", type=int, default=6, help="how many tensors to name")
    chosen = parser.parse_args(arguments)
    graph = (
        roam.Graph.load(chosen.model)
        if Path(chosen.model).exists()
        else paper_graph(chosen.model, chosen.batch)
    )
    order = order_by(graph, chosen.order)
    for line in at_the_peak(graph, order, chosen.most):
        print(line)
    for expandable in (False, True):
        for line in in_the_allocator(graph, order, chosen.most, expandable=expandable):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
