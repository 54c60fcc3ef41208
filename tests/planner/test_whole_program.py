"""The whole graph as one integer program, after MODeL: against hand-worked cases, brute force and
the planner."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings

import roam
from reference import Reference
from roam_bench.paper import paper_graph
from roam_bench.whole_program import WholeProgram, linear, whole_program
from roam_bench.whole_program.early import early_updates
from roam_bench.whole_program.linear import ONE, ZERO, Program, Sum
from roam_bench.whole_program.order import OrderProgram
from roam_bench.whole_program.problem import Problem, Streams
from roam_bench.whole_program.start import lescea, start
from strategies import graphs

SOLVERS = ("cbc", "highs")


def two_branches() -> roam.Graph:
    """`a` makes A (100 bytes) and `b` turns it into 10 bytes; `c` and `d` do so again; `e` takes
    both and returns 5. Program order: a, c, b, d, e."""
    builder = roam.GraphBuilder(alignment_bytes=1)
    big = [builder.tensor(name, 100) for name in "AC"]
    small = [builder.tensor(name, 10) for name in "BD"]
    result = builder.tensor("E", 5, residency="leaves")
    builder.operator("a", creates=[big[0]])
    builder.operator("c", creates=[big[1]])
    builder.operator("b", reads=[big[0]], creates=[small[0]])
    builder.operator("d", reads=[big[1]], creates=[small[1]])
    builder.operator("e", reads=small, creates=[result])
    return builder.build()


def early_small_one() -> roam.Graph:
    """`p` makes 10 bytes that only `q` needs, at the end; `u` makes 50 and `v` turns them into 1,
    which `q` reads too. Program order: p, u, v, q."""
    builder = roam.GraphBuilder(alignment_bytes=1)
    p, u, v = (builder.tensor(name, size) for name, size in (("P", 10), ("U", 50), ("V", 1)))
    builder.operator("p", creates=[p])
    builder.operator("u", creates=[u])
    builder.operator("v", reads=[u], creates=[v])
    builder.operator("q", reads=[p, v])
    return builder.build()


def narrow_layout() -> roam.Graph:
    """A chain of four: D (3 bytes) at the first three steps, B (2) at the last two, A and C (2
    each) at the last."""
    builder = roam.GraphBuilder(alignment_bytes=1)
    a, b, c, d = (
        builder.tensor(name, size) for name, size in (("A", 2), ("B", 2), ("C", 2), ("D", 3))
    )
    builder.operator("0", creates=[d])
    builder.operator("1", reads=[d])
    builder.operator("2", reads=[d], creates=[b])
    builder.operator("3", reads=[b], creates=[a, c])
    builder.control(1, 2)
    return builder.build()


def check(graph: roam.Graph, found: WholeProgram) -> None:
    """The order and the layout are what they say, by code that shares nothing with the programs."""
    assert found.order is not None
    assert found.steps is not None
    assert found.peak_bytes is not None
    live = graph.live_bytes(found.order)  # an error unless the graph permits the order
    most = int(live.max(initial=0))
    assert most == found.peak_bytes or (
        len(set(found.steps)) < len(found.steps) and most <= found.peak_bytes
    )
    assert found.ordering.bound_bytes <= found.peak_bytes <= found.ordering.start_bytes
    assert found.offsets is not None
    in_pool = [
        tensor.id
        for tensor in graph.tensors
        if tensor.residency == "step_local" and tensor.counted_bytes > 0
    ]
    assert sorted(found.offsets) == in_pool
    lives = {tensor: lifetime(graph, tensor, found.steps) for tensor in in_pool}
    sizes = graph.tensor_counted_bytes
    for one, other in itertools.combinations(in_pool, 2):
        if lives[one] & lives[other]:
            low, high = sorted((one, other), key=found.offsets.__getitem__)
            assert found.offsets[low] + sizes[low] <= found.offsets[high]
    for tensor in in_pool:
        assert (
            found.offsets[tensor] % max(graph.alignment_bytes, graph.tensor(tensor).alignment_bytes)
            == 0
        )
    assert found.pool_bytes == max(
        (found.offsets[tensor] + sizes[tensor] for tensor in in_pool), default=0
    )


def lifetime(graph: roam.Graph, tensor: int, steps: list[int]) -> set[int]:
    """The steps at which a step-local tensor is alive, straight from the definition."""
    creator = graph.creator(tensor)
    assert creator is not None
    touched = [steps[creator], *(steps[user] for user in graph.users(tensor))]
    return set(range(min(touched), max(touched) + 1))


def live_at(graph: roam.Graph, reference: Reference, steps: list[int], step: int) -> int:
    """Bytes in use at a step at which several operators may run, straight from the definition."""
    total = 0
    for tensor in graph.tensors:
        if tensor.residency == "persistent":
            continue
        creator = graph.creator(tensor.id)
        begin = 0 if creator is None else steps[creator]
        last = max((steps[user] for user in graph.users(tensor.id)), default=begin)
        if begin <= step and (step <= last or tensor.residency == "leaves"):
            total += reference.bytes[tensor.id]
    return total + sum(reference.workspaces[one] for one, its in enumerate(steps) if its == step)


def least_peak_in_steps(graph: roam.Graph, count: int) -> int:
    """The least peak over all ways to put the operators on so many steps."""
    reference = Reference(graph)
    peaks = []
    for steps in itertools.product(range(count), repeat=graph.num_operators):
        if min(steps, default=0) > 0:
            continue
        pairs = itertools.product(range(graph.num_operators), repeat=2)
        if all(
            steps[one] < steps[other] for one, other in pairs if reference.before[other] >> one & 1
        ):
            peaks.append(
                max(
                    (live_at(graph, reference, list(steps), step) for step in range(count)),
                    default=0,
                )
            )
    return min(peaks)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_order_of_two_branches(solver: linear.Solver) -> None:
    # Program order has both A and C at c: 200, and 210 at b. One branch after the other: a 100, b
    # 110, c 10 + 100, d 10 + 100 + 10 = 120, e 10 + 10 + 5. Nothing is below 120: whichever of b
    # and d runs last finds the other's 10 bytes beside its own 110.
    found = whole_program(two_branches(), solver)
    check(two_branches(), found)
    assert (found.status, found.peak_bytes, found.ordering.bound_bytes) == ("optimal", 120, 120)
    # b and d alone need 110, so this was for the solver to prove.
    assert Problem(two_branches(), 1).floor_bytes() == 110
    assert found.ordering.columns > 0


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_order_that_no_greedy_rule_finds(solver: linear.Solver) -> None:
    # LESCEA, like program order, takes p first, because 10 is less than 50: then u needs 60 and v
    # 61. With u and v first it is 50, 51, 11, 11.
    found = whole_program(early_small_one(), solver)
    check(early_small_one(), found)
    assert (found.status, found.ordering.start_bytes, found.peak_bytes) == ("optimal", 61, 51)


def test_an_order_to_start_from() -> None:
    # u, v, p, q, which meets what v alone needs.
    found = whole_program(early_small_one(), start=[1, 2, 0, 3])
    assert (found.order, found.peak_bytes, found.ordering.columns) == ([1, 2, 0, 3], 51, 0)
    # One that is worse is left alone: c before b gives 210, LESCEA's 120.
    assert whole_program(two_branches(), start=range(5)).ordering.start_bytes == 120
    with pytest.raises(roam.PlanError):
        whole_program(early_small_one(), start=[3, 2, 1, 0])


@pytest.mark.parametrize("solver", SOLVERS)
def test_operators_of_one_step_coexist(solver: linear.Solver) -> None:
    # The longest chain is a, b, e: three steps of it, and ceil(3 * 1.01) = 4 steps in all. So a and
    # b may run at steps 0 and 1, c and d at 1 and 2, e at 3. At step 1 A is still there (b reads
    # it) and C is made: 100 + 10 + 100 = 210. With b at 2, A lives there too, and C with it or
    # before it; with all of a, c at 0 it is 200, and at step 1, if b runs and d not yet, 100 + 10 +
    # 100; if both run, 220. The other way is a and c at 0, nothing at 1, which moves the same to
    # step 2. So 210 is the least: a 0, b 1, c 1, d 2.
    found = whole_program(two_branches(), solver, streams=None)
    check(two_branches(), found)
    assert (found.status, found.peak_bytes) == ("optimal", 210)
    assert found.steps is not None
    assert max(found.steps) <= 3


def test_spans_of_two_branches() -> None:
    # One stream: nothing before a, c; 4 operators after neither. a: b, e follow, so at most step 5
    # - 1 - 2 = 2; b: a before, e after; e: all before.
    one = Problem(two_branches(), 1)
    assert (one.steps, one.first, one.last) == (5, [0, 0, 1, 1, 4], [2, 2, 3, 3, 4])
    # Several streams: by the longest chains, on four steps.
    several = Problem(two_branches(), None)
    assert (several.steps, several.first, several.last) == (4, [0, 0, 1, 1, 2], [1, 1, 2, 2, 3])


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_layout_that_no_greedy_rule_finds(solver: linear.Solver) -> None:
    # By any rank D 0..3 is first, then B above it at 3..5, then A at 0..2: for C there is only 2..3
    # below B, so it goes to 5..7. Of nested lives D is the longest, and none lies within it: the
    # same result. At the last step A, B and C take 6, and 6 is enough: D 0..3, B 4..6, A 0..2, C
    # 2..4.
    graph = narrow_layout()
    found = whole_program(graph, solver)
    check(graph, found)
    assert found.addresses is not None
    assert found.ordering.columns == 0
    assert (found.addresses.status, found.addresses.start_bytes, found.pool_bytes) == (
        "optimal",
        7,
        6,
    )
    # Five unknowns (four addresses, the pool), and who lies below among D and B, A and B, A and C,
    # B and C.
    assert (found.addresses.columns, found.addresses.rows) == (5 + 4, 4 + 2 * 4)


def test_nested_lives_are_placed_first() -> None:
    # With no room for the 9 columns, D is placed at the bottom, alone: four pairs are left, which
    # are still too many.
    found = whole_program(narrow_layout(), max_columns=8)
    assert found.addresses is not None
    assert (found.addresses.status, found.offsets, found.pool_bytes) == ("too_large", None, None)
    assert found.peak_bytes == 6


def test_lescea_takes_what_leaves_least() -> None:
    # a or c first: both need 100 and leave it, a is first by program. Then b (needs 110, above the
    # peak of 100, as c with 200), the lesser. Now c (10 + 100) fits under 110, and so on: 120 at d.
    graph = two_branches()
    order = lescea(Problem(graph, 1))
    assert [graph.operator(operator).name for operator in order] == ["a", "b", "c", "d", "e"]
    assert max(graph.live_bytes(order)) == 120


def test_updates_run_before_what_is_beyond_them() -> None:
    # forward -> loss -> back1 -> back0; `update` reads back1's gradient and changes the parameter.
    # Levels: 0, 1, 2, 3 and 3. The makers behind update are back1; back0 follows it, but at
    # update's level, so not beyond. Their makers' followers: none. With one more operator behind
    # back0 (level 4) that is it.
    builder = roam.GraphBuilder(alignment_bytes=1)
    weight = builder.tensor("w", 8, residency="persistent", kind="parameter")
    x, loss, gradient, more, last = (
        builder.tensor(name, 8) for name in ("x", "loss", "g1", "g0", "end")
    )
    builder.operator("forward", reads=[weight], creates=[x])
    builder.operator("loss", reads=[x], creates=[loss])
    back = builder.operator("back1", reads=[loss], creates=[gradient])
    builder.operator("back0", reads=[gradient], creates=[more])
    update = builder.operator("update", reads=[gradient], mutates=[weight])
    end = builder.operator("end", reads=[more], creates=[last])
    graph = builder.build()
    assert early_updates(graph) == [(update, end)]
    assert back in graph.predecessors(update)
    problem = Problem(graph, None, early_updates(graph))
    assert problem.steps == Problem(graph, None).steps
    assert problem.last[update] == problem.last[end] - 1


@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=12, deadline=None)
@given(graph=graphs(max_operators=8))
def test_one_stream_against_all_orders(solver: linear.Solver, graph: roam.Graph) -> None:
    found = whole_program(graph, solver)
    check(graph, found)
    assert found.status == "optimal"
    assert found.peak_bytes == Reference(graph).least_peak()
    assert found.addresses is not None
    assert found.addresses.status == "optimal"


@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=12, deadline=None)
@given(graph=graphs(max_operators=5))
def test_several_streams_against_all_schedules(solver: linear.Solver, graph: roam.Graph) -> None:
    found = whole_program(graph, solver, streams=None)
    check(graph, found)
    assert found.status == "optimal"
    assert found.peak_bytes == least_peak_in_steps(graph, Problem(graph, None).steps)


@pytest.mark.parametrize("streams", [1, None])
@settings(max_examples=100, deadline=None)
@given(graph=graphs(max_operators=9))
def test_starts_and_floors_are_sound(streams: Streams, graph: roam.Graph) -> None:
    problem = Problem(graph, streams, early_updates(graph))
    steps = start(problem)
    assert problem.keeps(steps)
    assert problem.floor_bytes() <= problem.peak_bytes(steps)
    stated = OrderProgram(problem, steps, problem.floor_bytes(), problem.peak_bytes(steps))
    assert stated.program.admits(stated.program.start)
    assert stated.schedule(stated.program.start) == steps


@settings(max_examples=30, deadline=None)
@given(graph=graphs(min_operators=1, max_operators=7))
def test_the_floor_is_below_every_order(graph: roam.Graph) -> None:
    assert Problem(graph, 1).floor_bytes() <= Reference(graph).least_peak()


def test_the_published_figures_of_alexnet() -> None:
    # MODeL with its early updates, by Gurobi, in the ROAM paper's table: 812.77 MiB for the order,
    # 812.80 with the layout.
    graph = paper_graph("alexnet", 1)
    found = whole_program(graph, "highs", streams=None, early_updates=True)
    check(graph, found)
    assert found.status == "optimal"
    assert found.peak_bytes is not None
    assert found.pool_bytes is not None
    assert found.outside_bytes is not None
    order, total = (
        graph.persistent_bytes + size
        for size in (found.peak_bytes, found.pool_bytes + found.outside_bytes)
    )
    assert order / 2**20 == pytest.approx(812.77, rel=1e-3)
    assert total / 2**20 == pytest.approx(812.80, rel=1e-3)
    # Not to be explained by the start, nor by a graph without a choice.
    assert found.ordering.start_bytes > found.peak_bytes
    assert max(graph.live_bytes(lescea(Problem(graph, 1)))) < found.peak_bytes


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_search_that_has_no_time_proves_nothing(solver: linear.Solver) -> None:
    found = whole_program(paper_graph("alexnet", 1), solver, 0.01, streams=None)
    assert found.status == "no_solution"
    assert found.ordering.bound_bytes < found.ordering.start_bytes


def test_too_large_is_not_attempted() -> None:
    # Spans of 2, 2, 2, 2 and 0 steps between first and last, and the peak.
    found = whole_program(two_branches(), max_columns=8)
    assert (found.status, found.ordering.columns, found.order, found.offsets) == (
        "too_large",
        9,
        None,
        None,
    )
    assert whole_program(two_branches(), max_columns=20).status == "optimal"


def test_nothing_to_do() -> None:
    found = whole_program(roam.GraphBuilder().build())
    assert (found.status, found.order, found.offsets, found.peak_bytes) == ("optimal", [], {}, 0)


def test_a_program_says_what_it_admits() -> None:
    program = Program()
    x, y = (program.column(0, 3, 0, integer=True) for _ in "xy")
    terms = Sum(-3)
    for value, factor in ((x, 1), (y, 2), (ZERO, 5), (ONE, -1)):
        terms.add(value, factor)
    program.row(terms, "=")  # x + 2 y = 4
    assert program.admits([2, 1])
    assert program.admits([0, 2])
    assert not program.admits([3, 1])
    assert not program.admits([4, 0])


def test_a_solver_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "highspy.py").write_text("raise ImportError('not here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(roam.SolverUnavailable, match="not here"):
        whole_program(two_branches(), "highs")


def test_a_solver_that_breaks_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "highspy.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = whole_program(two_branches(), "highs")
    check(two_branches(), found)
    assert (found.status, found.peak_bytes) == ("failed", 120)
    assert "exit code 7" in found.ordering.reason


def test_a_solver_that_does_not_look_at_the_clock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "highspy.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(linear, "_GRACE_S", 1.0)
    found = whole_program(two_branches(), "highs", time_limit_s=0.5)
    assert (found.status, found.peak_bytes, found.ordering.bound_bytes) == ("no_solution", 120, 110)


def test_interrupts_end_the_solver(tmp_path: Path) -> None:
    (tmp_path / "highspy.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    script = "import test_whole_program as t; t.whole_program(t.two_branches(), 'highs')"
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=dict(os.environ, PYTHONPATH=path),
        stderr=subprocess.PIPE,
        text=True,
    )
    number = tmp_path / "pid"
    while not number.exists() or not number.read_text():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_enters_is_there_when_the_first_operator_runs(solver: linear.Solver) -> None:
    # Three steps for a chain of two. If nothing ran at the first one, what enters and is not used
    # would meet none of what is made.
    builder = roam.GraphBuilder(alignment_bytes=1)
    made = builder.tensor("made", 4)
    builder.tensor("unused", 3, residency="enters")
    builder.operator("make", creates=[made])
    builder.operator("use", reads=[made])
    builder.operator("other")
    graph = builder.build()
    found = whole_program(graph, solver, streams=None)
    check(graph, found)
    assert Problem(graph, None).steps == 3
    assert not Problem(graph, None).keeps([1, 2, 1])
    # The third operator has no need of memory and runs first.
    assert (found.status, found.peak_bytes, found.steps) == ("optimal", 4, [1, 2, 0])
