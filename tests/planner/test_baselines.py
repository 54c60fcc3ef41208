"""Orders and layouts that the planner is compared with: by PyTorch's own functions where there are
any, else worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import roam
from roam._core import baseline_order, caching_allocator_bytes, synthetic_step
from strategies import graphs

inductor = pytest.importorskip("torch._inductor.memory")

INDUCTOR = {
    "inductor_lpmf": "topological_sort_lpmf",
    "inductor_bfs": "topological_sort_bfs",
    "inductor_dfs": "topological_sort_dfs",
}
LAYOUTS = ["executorch", "tvm_size", "tvm_conflicts", "tvm_hill_climb", "xla"]
ALLOCATORS = ["caching_allocator", "caching_allocator_expandable"]
MIB = 1 << 20


class _Buffer(SimpleNamespace):
    """A tensor as Inductor's functions see it."""

    __hash__ = object.__hash__

    def get_name(self) -> str:
        return str(self.name)


class _Node(SimpleNamespace):
    """An operator as Inductor's functions see it."""

    __hash__ = object.__hash__

    def get_outputs(self) -> list[_Buffer]:
        return list(self.outputs)

    def get_buffer_names(self) -> list[str]:
        return [self.name]


def as_inductor_sees(
    graph: roam.Graph,
) -> tuple[list[_Node], dict[str, _Buffer], dict[str, _Buffer], set[str]]:
    """The scheduler's nodes in program order, what they make, what enters the step, and the names
    of what leaves it."""
    positions = graph.positions
    nodes = [_Node(name=f"op{at}", outputs=[]) for at in range(graph.num_operators)]
    made, entering, leaving = {}, {}, set()
    buffers: dict[int, _Buffer] = {}
    for tensor in graph.tensors:
        users = [nodes[at] for at in sorted(positions[user] for user in graph.users(tensor.id))]
        if tensor.residency == "persistent" or (tensor.residency == "enters" and not users):
            continue
        size = tensor.counted_bytes
        planning = inductor.MemoryPlanningInfoForBuffer(
            size_alloc=0 if tensor.residency == "enters" else size,
            size_free=size,
            succ_nodes=inductor.OrderedSet(users),
            succ_nodes_for_ordering=inductor.OrderedSet(users),
        )
        buffer = buffers[tensor.id] = _Buffer(name=f"buf{tensor.id}", mpi_buffer=planning)
        (entering if tensor.residency == "enters" else made)[buffer.name] = buffer
        if tensor.residency == "leaves":
            leaving.add(buffer.name)
    for operator in graph.operators:
        node = nodes[operator.position]
        before = [nodes[positions[other]] for other in graph.predecessors(operator.id)]
        used = dict.fromkeys([*operator.reads, *operator.mutates])
        node.outputs = [buffers[tensor] for tensor in operator.creates]
        node.unmet_dependencies = [SimpleNamespace(name=other.name) for other in before]
        node.mpi_node = inductor.MemoryPlanningInfoForNode(
            index=operator.position,
            size=sum(buffer.mpi_buffer.size_alloc for buffer in node.outputs),
            pred_buffers=inductor.OrderedSet(
                buffers[tensor] for tensor in used if tensor in buffers
            ),
            pred_nodes=inductor.OrderedSet(before),
            succ_nodes=inductor.OrderedSet(
                nodes[positions[other]] for other in graph.successors(operator.id)
            ),
        )
    return nodes, made, entering, leaving


@pytest.mark.parametrize("order", INDUCTOR)
@given(graph=graphs(max_operators=14))
@settings(max_examples=150)
def test_orders_are_those_of_inductors_own_functions(order: str, graph: roam.Graph) -> None:
    theirs: Any = getattr(inductor, INDUCTOR[order], None)
    if theirs is None or not hasattr(inductor, "MemoryPlanningInfoForNode"):
        pytest.skip("this PyTorch has no such function")
    nodes, made, entering, leaving = as_inductor_sees(graph)
    sequence = theirs(nodes, entering, made, leaving) if order == "inductor_lpmf" else theirs(nodes)
    program = graph.program_order
    assert baseline_order(graph, order).tolist() == [
        program[node.mpi_node.index] for node in sequence
    ]


@given(graphs(max_operators=12), st.booleans())
@settings(max_examples=60)
def test_baselines_take_at_least_what_is_live(graph: roam.Graph, reuse: bool) -> None:
    for order in ["program", *INDUCTOR]:
        ids = baseline_order(graph, order, reuse=reuse)
        live = graph.live_bytes(ids)  # Refuses what is no order of the graph.
        for layout in LAYOUTS:
            needs = roam.baseline(graph, order, layout, reuse=reuse)
            assert (needs.order, needs.layout) == (order, layout)
            assert needs.pool_bytes + needs.outside_bytes >= needs.peak_bytes
        for layout in ALLOCATORS:
            needs = roam.baseline(graph, order, layout, reuse=reuse)
            assert needs.pool_bytes >= needs.peak_bytes
            assert needs.outside_bytes == 0
            assert needs.pool_bytes % (2 * MIB) == 0
        if not reuse:
            assert needs.peak_bytes == max(live, default=0)


def step(sizes_mib: list[tuple[float, int, int]]) -> roam.Graph:
    """A step of tensors of (MiB, first operator, last operator)."""
    builder = roam.GraphBuilder()
    tensors = [
        builder.tensor(f"t{at}", int(size * MIB)) for at, (size, _, _) in enumerate(sizes_mib)
    ]
    for now in range(1 + max(last for _, _, last in sizes_mib)):
        lives = list(zip(tensors, sizes_mib, strict=True))
        builder.operator(
            f"op{now}",
            reads=[tensor for tensor, (_, first, last) in lives if first < now <= last],
            creates=[tensor for tensor, (_, first, _) in lives if first == now],
        )
    return builder.build()


@pytest.mark.parametrize(
    ("layout", "pool_mib"),
    [
        # 4 over steps 0 and 1, 3 over 1 and 2, 2 over 2 and 3. By size each lies on what it meets:
        # 0, 4 and 7.
        ("tvm_size", 9),
        # 3 meets two and goes first; 4 and 2 lie on it.
        ("tvm_conflicts", 7),
        # 2 fits below 3, where 4 was.
        ("tvm_hill_climb", 7),
        ("xla", 7),
        # 4 is an object, 3 meets it: another; 2 finds the first one idle.
        ("executorch", 7),
        # All in one segment, or in one page.
        ("caching_allocator", 20),
        ("caching_allocator_expandable", 20),
    ],
)
def test_layouts_follow_their_rules(layout: str, pool_mib: int) -> None:
    graph = step([(4, 0, 1), (3, 1, 2), (2, 2, 3)])
    assert roam.baseline(graph, "program", layout).pool_bytes == pool_mib * MIB


def test_the_tree_takes_a_node_limit() -> None:
    graph = synthetic_step("deep", 1000)

    def pool_bytes(layout: str) -> int:
        found = roam.baseline(graph, "program", layout)
        assert found.layout == layout
        return found.pool_bytes

    # No leaf has more blocks than there are tensors, and larger leaves are laid out better here.
    assert pool_bytes("tree:4000") == pool_bytes("tree:1000000") < pool_bytes("tree:4")


@pytest.mark.parametrize(
    "layout", ["tree:0", "tree:", "tree:-1", "tree:many", "tree:2.5", "size:4"]
)
def test_no_other_layout_has_a_number(layout: str) -> None:
    with pytest.raises(roam.PlanError, match=f'no layout "{layout}"') as refused:
        roam.baseline(step([(4, 0, 1)]), "program", layout)
    assert refused.value.code == "unknown_method"


def test_eager_pytorch_reserves_more_than_is_live() -> None:
    # 12 MiB, then 14, then 11 beside 2: segments of 12 and 14, and then 11 of the 12, which leave 1
    # MiB unused, and 2 of the 14, of which 12 are split off. A static pool takes 26 - the two that
    # meet first - and no more.
    graph = step([(12, 0, 1), (14, 1, 2), (11, 2, 3), (2, 3, 4)])
    eager = roam.baseline(graph, "program", "caching_allocator", reuse=False)
    assert (eager.peak_bytes, eager.pool_bytes) == (26 * MIB, 26 * MIB)
    # With 1 byte more than the 12 have, the 11 need a segment of their own.
    graph = step([(12, 0, 1), (14, 1, 2), (12 + 1 / MIB, 2, 3), (2, 3, 4)])
    eager = roam.baseline(graph, "program", "caching_allocator", reuse=False)
    assert eager.pool_bytes == 40 * MIB


class Reference:
    """The caching allocator once more, as plainly as can be: every segment a list of pieces from
    its bottom up."""

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        # Segments of the small and of the large pool in the sequence of their making; a piece is
        # [bytes, id or None].
        self.segments: dict[bool, list[list[list[Any]]]] = {True: [], False: []}

    def reserved(self) -> int:
        return sum(
            size for segments in self.segments.values() for pieces in segments for size, _ in pieces
        )

    def alloc(self, name: int, size: int) -> None:
        size = -(-size // 512) * 512
        small = size <= MIB
        segments = self.segments[small]
        fitting = [
            (self.expandable and at == len(pieces) - 1, piece[0], number, at)
            for number, pieces in enumerate(segments)
            for at, piece in enumerate(pieces)
            if piece[1] is None and piece[0] >= size
        ]
        if not fitting:
            self.grow(segments, small, size)
            fitting = [(False, segments[-1][-1][0], len(segments) - 1, len(segments[-1]) - 1)]
        _, _, number, at = min(fitting)
        rest = segments[number][at][0] - size
        kept = rest >= 512 if small or self.expandable else rest > MIB
        segments[number][at : at + 1] = (
            [[size, name], [rest, None]] if kept else [[size + rest, name]]
        )

    def grow(self, segments: list[list[list[Any]]], small: bool, size: int) -> None:
        page = 2 * MIB if small else 20 * MIB
        if not self.expandable:
            segments.append([[page if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB, None]])
            return
        segments[:] = segments or [[]]
        if not segments[0] or segments[0][-1][1] is not None:
            segments[0].append([0, None])
        missing = size - segments[0][-1][0]
        segments[0][-1][0] += -(-missing // page) * page

    def free(self, name: int) -> None:
        for pieces in (*self.segments[True], *self.segments[False]):
            for piece in pieces:
                if piece[1] == name:
                    piece[1] = None
            merged: list[list[Any]] = []
            for piece in pieces:
                if merged and merged[-1][1] is None and piece[1] is None:
                    merged[-1][0] += piece[0]
                else:
                    merged.append(piece)
            pieces[:] = merged


@given(st.data(), st.booleans())
@settings(max_examples=100)
def test_the_allocator_does_what_a_plain_one_does(data: st.DataObject, expandable: bool) -> None:
    reference = Reference(expandable)
    sizes = st.one_of(
        st.integers(1, 3 * MIB),
        st.integers(1, 40 * MIB),
        st.sampled_from([MIB, MIB + 1, 5 * MIB, 10 * MIB]),
    )
    events: list[tuple[int, int | None]] = []
    reserved, alive = [], []
    for name in range(data.draw(st.integers(1, 60))):
        if alive and data.draw(st.booleans()):
            gone = alive.pop(data.draw(st.integers(0, len(alive) - 1)))
            reference.free(gone)
            events.append((gone, None))
        else:
            size = data.draw(sizes)
            reference.alloc(name, size)
            alive.append(name)
            events.append((name, size))
        reserved.append(reference.reserved())
    assert caching_allocator_bytes(events, expandable=expandable).tolist() == reserved


def test_a_recorded_sequence_can_be_replayed() -> None:
    # 1 byte: a segment of 2 MiB. 2 MiB: one of 20, or a page. 30 MiB: their own, or, 18 being free,
    # a page more.
    events = [(7, 1), (8, 2 * MIB), (9, 30 * MIB), (8, None), (8, 0)]
    assert caching_allocator_bytes(events).tolist() == [
        2 * MIB,
        22 * MIB,
        52 * MIB,
        52 * MIB,
        52 * MIB,
    ]
    expandable = caching_allocator_bytes(events, expandable=True)
    assert expandable.tolist() == [2 * MIB, 22 * MIB, 42 * MIB, 42 * MIB, 42 * MIB]
    assert expandable.dtype == np.int64
    for impossible in ([(1, 5), (1, 5)], [(1, None)], [(1, 2**63)]):
        with pytest.raises(ValueError, match="allocation 1"):
            caching_allocator_bytes(impossible)


def test_an_order_is_asked_for_by_a_known_name() -> None:
    with pytest.raises(roam.PlanError, match='there is no order "best", only program, ') as caught:
        baseline_order(step([(1, 0, 1)]), "best")
    assert caught.value.code == "unknown_method"
