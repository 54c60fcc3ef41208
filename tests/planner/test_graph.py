"""Building graphs: what is refused and how, and what is derived."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given

import roam
from reference import Reference
from strategies import graphs, renumbered

Fault = Callable[[roam.GraphBuilder], object]


def chain() -> roam.GraphBuilder:
    """x -> first -> h -> second -> y, and a parameter w; tensors 0 to 3, operators 0 and 1."""
    builder = roam.GraphBuilder("chain")
    builder.tensor("x", 100, kind="input", residency="enters")
    builder.tensor("h", 200, kind="activation")
    builder.tensor("y", 200, kind="output")
    builder.tensor("w", 64, kind="parameter", residency="persistent")
    builder.operator("first", reads=[0, 3], creates=[1], file="train.py", line=7)
    builder.operator("second", reads=[1], creates=[2], file="train.py", line=8)
    return builder


def _cycle(builder: roam.GraphBuilder) -> None:
    loop = [builder.tensor("p", 1), builder.tensor("q", 1)]
    builder.operator("bad", reads=[loop[0]], creates=[loop[1]], file="bad.py", line=9)
    builder.operator("worse", reads=[loop[1]], creates=[loop[0]], file="bad.py", line=10)


def _control_cycle(builder: roam.GraphBuilder) -> None:
    builder.operator("bad", reads=[2], file="bad.py", line=9)
    builder.control(2, 0)


def _bad(**arguments: object) -> Fault:
    """One more operator, at fault by these arguments."""

    def add(builder: roam.GraphBuilder) -> None:
        builder.operator("bad", file="bad.py", line=9, **arguments)  # type: ignore[arg-type]

    return add


def _bad_control(before: int, after: int) -> Fault:
    return lambda builder: builder.control(before, after)


def _tensor_then_bad(
    *, size_bytes: int = 200, residency: str = "step_local", **arguments: object
) -> Fault:
    """Tensor 4, and an operator that is at fault by what it does with it."""

    def add(builder: roam.GraphBuilder) -> None:
        builder.tensor("new", size_bytes, residency=residency)
        _bad(**arguments)(builder)

    return add


def _region(name: str, predicate: int, parent: int | None = None) -> Fault:
    return lambda builder: builder.region(name, predicate, parent)


def _region_cycle(builder: roam.GraphBuilder) -> None:
    builder.region("outer", 0)
    builder.region("left", 0, parent=2)
    builder.region("right", 0, parent=1)


# code of the error, name of the operator it names (None: no operator is at fault), and how to
# provoke it
FAULTS: list[tuple[str, str | None, Fault]] = [
    ("cycle", "bad", _cycle),
    ("cycle", "first", _control_cycle),
    ("unknown_tensor", "bad", _bad(reads=[99])),
    ("unknown_tensor", "bad", _bad(creates=[99])),
    ("unknown_tensor", "bad", _bad(mutates=[99])),
    ("unknown_tensor", "bad", _bad(reads=[1], reuse=[(1, 99)])),
    ("unknown_region", "bad", _bad(region=0)),
    ("unknown_operator", "first", _bad_control(0, 99)),
    ("unknown_operator", None, _bad_control(98, 99)),
    ("out_of_range", None, lambda builder: builder.tensor("t", -1)),
    ("out_of_range", None, lambda builder: builder.tensor("t", 2**63)),
    ("out_of_range", None, lambda builder: builder.tensor("t", 10**30)),
    ("out_of_range", None, lambda builder: builder.tensor("t", 1, alignment_bytes=-1)),
    ("out_of_range", "bad", _bad(workspace_bytes=-1)),
    ("out_of_range", "bad", _bad(workspace_bytes=2**64)),
    ("out_of_range", "bad", _bad(reads=[-1])),
    ("out_of_range", "bad", _bad(reads=[2**32])),
    ("out_of_range", "bad", _bad(reuse=[(0, -1)])),
    ("out_of_range", "bad", _bad(position=2**32)),
    ("out_of_range", "bad", _bad(region=-1)),
    ("out_of_range", None, _bad_control(-1, 0)),
    ("out_of_range", None, _region("r", -1)),
    ("unknown_name", None, lambda builder: builder.tensor("t", 1, kind="weight")),
    ("unknown_name", None, lambda builder: builder.tensor("t", 1, residency="somewhere")),
    ("unknown_name", "bad", _bad(phase="sideways")),
    ("unknown_name", "bad", _bad(sequence="fibonacci")),
    (
        "total_too_large",
        None,
        lambda builder: [builder.tensor("huge", 2**62, residency="enters") for _ in range(2)],
    ),
    (
        "total_too_large",
        None,
        lambda builder: builder.tensor("huge", 2**63 - 1, residency="enters"),
    ),
    ("total_too_large", "bad", _bad(workspace_bytes=2**63 - 1)),
    ("created_twice", "bad", _bad(creates=[1])),
    ("never_created", "bad", _tensor_then_bad(reads=[4])),
    ("never_created", None, lambda builder: builder.tensor("orphan", 1, residency="leaves")),
    ("created_though_present", "bad", _bad(creates=[0])),
    ("created_though_present", "bad", _bad(creates=[3])),
    ("position_out_of_range", "bad", _bad(position=3)),
    ("position_taken", "bad", _bad(position=1)),
    ("creates_and_mutates", "bad", _tensor_then_bad(creates=[4], mutates=[4])),
    ("reads_own_output", "bad", _tensor_then_bad(creates=[4], reads=[4])),
    ("doubled", "bad", _bad(reads=[1, 1])),
    ("doubled", "bad", _bad(mutates=[1, 1])),
    ("doubled", "bad", _tensor_then_bad(creates=[4, 4])),
    ("reuse_input_not_read", "bad", _tensor_then_bad(creates=[4], reuse=[(2, 4)])),
    (
        "reuse_input_mutated",
        "bad",
        _tensor_then_bad(reads=[2], mutates=[2], creates=[4], reuse=[(2, 4)]),
    ),
    ("reuse_output_not_created", "bad", _tensor_then_bad(reads=[2], creates=[4], reuse=[(2, 1)])),
    (
        "reuse_not_step_local",
        "bad",
        _tensor_then_bad(size_bytes=100, reads=[0], creates=[4], reuse=[(0, 4)]),
    ),
    (
        "reuse_not_step_local",
        "bad",
        _tensor_then_bad(residency="leaves", reads=[2], creates=[4], reuse=[(2, 4)]),
    ),
    (
        "reuse_not_step_local",
        "bad",
        _tensor_then_bad(residency="unpooled", reads=[2], creates=[4], reuse=[(2, 4)]),
    ),
    (
        "reuse_sizes_differ",
        "bad",
        _tensor_then_bad(size_bytes=600, reads=[2], creates=[4], reuse=[(2, 4)]),
    ),
    ("reuse_doubled", "bad", _tensor_then_bad(reads=[2], creates=[4], reuse=[(2, 4), (2, 4)])),
    (
        "alignment",
        None,
        lambda builder: builder.tensor("t", 1, residency="enters", alignment_bytes=48),
    ),
    (
        "alignment",
        None,
        lambda builder: builder.tensor("t", 1, residency="enters", alignment_bytes=2**31),
    ),
    ("control_self", "first", _bad_control(0, 0)),
    ("region_predicate", None, _region("r", 99)),
    ("region_parent", None, _region("r", 0, parent=5)),
    ("region_cycle", None, _region_cycle),
    ("region_cycle", None, _region("r", 0, parent=0)),
]


@pytest.mark.parametrize(
    ("code", "operator", "fault"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_faults_are_refused_by_name(code: str, operator: str | None, fault: Fault) -> None:
    def build() -> None:
        builder = chain()
        fault(builder)
        builder.build()

    with pytest.raises(roam.GraphError) as caught:
        build()
    error = caught.value
    assert (error.code, error.operator) == (code, operator)
    if operator is not None:
        # The message itself names the operator, its place and the user's line.
        assert error.source in {"bad.py:9", "train.py:7"}
        for part in (f"`{operator}`", f"position {error.position}", f"({error.source})"):
            assert part in str(error)
    assert isinstance(error, ValueError)
    assert isinstance(error, roam.RoamError)


def test_uses_before_creation_are_refused() -> None:
    for role, code in [("reads", "read_before_write"), ("mutates", "mutated_before_write")]:
        builder = roam.GraphBuilder()
        made = builder.tensor("made", 8)
        builder.operator("early", position=0, file="train.py", line=3, **{role: [made]})  # type: ignore[arg-type]
        builder.operator("maker", position=1, creates=[made])
        with pytest.raises(
            roam.GraphError, match="before operator `maker` at position 1 creates it"
        ) as caught:
            builder.build()
        assert (caught.value.code, caught.value.operator, caught.value.source) == (
            code,
            "early",
            "train.py:3",
        )


def test_control_edges_against_program_order_are_told_from_cycles() -> None:
    builder = roam.GraphBuilder()
    for name in "ab":
        builder.operator(name)
    builder.control(1, 0)
    with pytest.raises(roam.GraphError) as caught:
        builder.build()
    assert (caught.value.code, caught.value.operator) == ("control_against_program_order", "a")


def test_a_cycle_is_listed() -> None:
    builder = chain()
    builder.operator("third", reads=[2])
    builder.control(2, 1)
    with pytest.raises(
        roam.GraphError, match=r"operator `second` at .* -> operator `third` at"
    ) as caught:
        builder.build()
    assert caught.value.code == "cycle"
    assert "first" not in str(caught.value)


def test_a_long_cycle_is_found_without_recursion() -> None:
    builder = roam.GraphBuilder()
    length = 50_000
    for position in range(length):
        builder.operator("o")
        if position:
            builder.control(position - 1, position)
    builder.control(length - 1, 0)
    with pytest.raises(roam.GraphError, match=f"{length} operators in all"):
        builder.build()


@pytest.mark.parametrize("alignment_bytes", [0, 3, 2**31])
def test_the_graphs_alignment_is_checked(alignment_bytes: int) -> None:
    with pytest.raises(roam.GraphError) as caught:
        roam.GraphBuilder(alignment_bytes=alignment_bytes).build()
    assert caught.value.code == "alignment"


def test_alignment_follows_the_device() -> None:
    assert [
        roam.GraphBuilder("", device).build().alignment_bytes for device in ("cpu", "cpu:0", "cuda")
    ] == [
        64,
        64,
        512,
    ]


def test_what_is_no_number_is_a_type_error() -> None:
    builder = chain()
    for call in (
        lambda: builder.tensor("t", "12"),  # type: ignore[arg-type]
        lambda: builder.tensor("t", 1.5),  # type: ignore[arg-type]
        lambda: builder.operator("o", reads=["x"]),  # type: ignore[list-item]
        lambda: builder.operator("o", reads=1),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError):
            call()


def test_nothing_is_a_graph() -> None:
    graph = roam.GraphBuilder().build()
    assert (graph.num_operators, graph.num_tensors, graph.persistent_bytes) == (0, 0, 0)
    assert graph.live_bytes().size == 0
    roam.verify(graph, roam.optimize(graph))


def test_a_graph_shows_what_was_built() -> None:
    builder = chain()
    builder.tensor("z", 256, residency="leaves", alignment_bytes=128)
    builder.region("if", 0)
    builder.operator(
        "third",
        reads=[2],
        creates=[4],
        workspace_bytes=10,
        phase="update",
        sequence="random",
        region=0,
        module="layer.1",
        file="train.py",
    )
    builder.control(0, 2)
    graph = builder.build()

    assert (
        repr(graph)
        == 'Graph(name="chain", device="cpu", operators=3, tensors=5, persistent_bytes=64)'
    )
    assert [operator.name for operator in graph.operators] == ["first", "second", "third"]
    third = graph.operator(2)
    assert third == graph.operators[-1] == graph.operator(-1)
    assert third != graph.operator(0)
    assert len({*graph.operators, *graph.tensors, third}) == 8
    shown = (
        third.id,
        third.position,
        third.phase,
        third.sequence,
        third.region,
        third.module,
        third.file,
        third.line,
    )
    assert shown == (2, 2, "update", "random", 0, "layer.1", "train.py", 0)
    assert (third.reads, third.creates, third.mutates, third.reuse) == ((2,), (4,), (), ())
    assert third.workspace_bytes == 10
    assert (
        repr(third)
        == 'Operator(2 "third", position=2, phase=update, reads=[2], creates=[4], mutates=[])'
    )
    weight = graph.tensor(3)
    assert (weight.id, weight.name, weight.size_bytes, weight.kind) == (3, "w", 64, "parameter")
    assert (weight.residency, weight.alignment_bytes, weight.counted_bytes) == ("persistent", 0, 64)
    assert repr(weight) == 'Tensor(3 "w", size_bytes=64, kind=parameter, residency=persistent)'
    assert graph.regions == (("if", 0, None),)
    assert graph.control == ((0, 2),)
    assert [graph.creator(tensor) for tensor in range(5)] == [None, 0, 1, None, 2]
    assert graph.users(1) == (1,)
    assert graph.predecessors(2) == (0, 1)
    assert graph.successors(0) == (1, 2)
    assert graph.tensor_sizes_bytes.tolist() == [100, 200, 200, 64, 256]
    assert graph.tensor_counted_bytes.tolist() == [128, 256, 256, 64, 256]
    assert graph.workspaces_bytes.tolist() == [0, 0, 64]
    assert [time_ns > 0 for time_ns in graph.times_ns.tolist()] == [True, True, True]
    assert graph.positions.tolist() == graph.program_order.tolist() == [0, 1, 2]
    assert graph.live_bytes().tolist() == [128 + 256, 256 + 256, 256 + 256 + 64]


def test_arrays_are_read_only_and_of_64_bits() -> None:
    graph = chain().build()
    for values in (
        graph.tensor_sizes_bytes,
        graph.positions,
        graph.program_order,
        graph.live_bytes(),
    ):
        assert values.dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1


@pytest.mark.parametrize("number", [3, -3, 2**40])
def test_numbers_out_of_range_are_index_errors(number: int) -> None:
    graph = chain().build()
    with pytest.raises(IndexError):
        graph.operator(number)


def test_live_bytes_refuses_what_is_no_order() -> None:
    graph = chain().build()
    for order in ([1, 0], [0], [0, 0], [0, 7]):
        with pytest.raises(roam.PlanError):
            graph.live_bytes(order)


def test_the_builder_may_go_on() -> None:
    builder = chain()
    small = builder.build()
    builder.operator("third", reads=[2])
    assert (small.num_operators, builder.build().num_operators) == (2, 3)
    assert repr(builder) == 'GraphBuilder(name="chain", device="cpu", operators=3, tensors=4)'


def test_readers_of_one_value_wait_for_its_writer_and_hold_back_the_next() -> None:
    builder = roam.GraphBuilder()
    weight = builder.tensor("w", 8, residency="persistent")
    for name in ("read a", "read b"):
        builder.operator(name, reads=[weight])
    builder.operator("write", reads=[weight], mutates=[weight])
    builder.operator("read c", reads=[weight])
    builder.operator("overwrite", mutates=[weight])
    graph = builder.build()
    assert [graph.predecessors(operator) for operator in range(5)] == [(), (), (0, 1), (2,), (3,)]


def test_constraints_grow_with_accesses_not_with_their_square() -> None:
    builder = roam.GraphBuilder()
    weight = builder.tensor("w", 8, residency="persistent")
    rounds, readers = 40, 50
    for _ in range(rounds):
        for _ in range(readers):
            builder.operator("read", reads=[weight])
        builder.operator("write", mutates=[weight])
    graph = builder.build()
    edges = sum(len(graph.predecessors(operator)) for operator in range(graph.num_operators))
    assert edges <= 2 * rounds * (readers + 1)


def closure(before: list[set[int]], order: list[int]) -> list[set[int]]:
    """All that must run before each operator, directly or not."""
    full: list[set[int]] = [set() for _ in before]
    for operator in order:
        for earlier in before[operator]:
            full[operator] |= {earlier} | full[earlier]
    return full


@given(graphs())
def test_constraints_are_those_of_the_definition(graph: roam.Graph) -> None:
    count = graph.num_operators
    order = graph.program_order.tolist()
    derived = [set(graph.predecessors(operator)) for operator in range(count)]
    masks = Reference(graph).before
    defined = [
        {earlier for earlier in range(count) if masks[operator] >> earlier & 1}
        for operator in range(count)
    ]
    assert closure(derived, order) == closure(defined, order)
    assert all(
        operator in graph.successors(earlier)
        for operator in range(count)
        for earlier in derived[operator]
    )
    assert sum(len(graph.successors(operator)) for operator in range(count)) == sum(
        map(len, derived)
    )
    positions = graph.positions
    for operator in range(count):
        places = [positions[earlier] for earlier in graph.predecessors(operator)]
        assert places == sorted(set(places))
        assert all(place < positions[operator] for place in places)
    for tensor in range(graph.num_tensors):
        users = [o.id for o in graph.operators if tensor in (*o.reads, *o.mutates)]
        assert graph.users(tensor) == tuple(sorted(users, key=lambda user: positions[user]))


@given(graphs())
def test_live_bytes_are_those_of_the_definition(graph: roam.Graph) -> None:
    order = graph.program_order.tolist()
    assert graph.live_bytes().tolist() == Reference(graph).profile(order)


@given(graphs(max_operators=6))
def test_equality_is_of_contents(graph: roam.Graph) -> None:
    same = renumbered(graph, range(graph.num_operators), range(graph.num_tensors))
    assert same == graph
    assert hash(same) == hash(graph)
    assert same.digest == graph.digest
    assert pickle.loads(pickle.dumps(graph)) == graph
    renamed = renumbered(
        graph, range(graph.num_operators), range(graph.num_tensors), lambda name: name + "'"
    )
    assert renamed != graph
    assert renamed.digest != graph.digest
