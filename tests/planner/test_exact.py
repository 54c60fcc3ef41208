"""The exact tier: integer programs by CBC in processes of their own, which may be missing, hang or
die."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings

import roam
import roam.exact
from reference import Reference
from roam._core import compare_routes
from strategies import graphs

INSTANCES = Path(__file__).parents[2] / "benches" / "exact"
HANG = "import time\ntime.sleep(1000)\n"


def hard_graph() -> roam.Graph:
    """A graph on which the planner's own search gives up."""
    return roam.Graph.load(INSTANCES / "irregular-100-open.json.gz")


class Watched(roam.exact.Child):
    """Keeps all processes that were started."""

    started: list[Watched]

    def __init__(self, question: bytes) -> None:
        super().__init__(question)
        self.number = self.pid
        self.started.append(self)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """All processes that planning starts."""
    started: list[Watched] = []
    monkeypatch.setattr(Watched, "started", started, raising=False)
    monkeypatch.setattr(roam.exact, "Child", Watched)
    return started


def replace_mip(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Let python-mip be something else in the processes that are started."""
    (folder / "mip.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))


def is_running(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@settings(max_examples=12, deadline=None)
@given(graph=graphs(min_operators=2, max_operators=8))
def test_both_exact_routes_find_the_lowest_peak_and_prove_it(graph: roam.Graph) -> None:
    for reuse in (False, True):
        routes = compare_routes(graph, reuse)
        least = Reference(graph, reuse=reuse).least_peak()
        assert routes is not None
        assert routes["search"] == routes["search_bound"] == least
        # No program is solved for a gap of one in a thousand.
        assert routes["programs_bound"] <= least <= routes["programs"]
        assert routes["programs"] - routes["programs_bound"] <= routes["programs"] // 1000
        assert (routes["report"]["failed"], routes["report"]["timed_out"]) == (0, 0)


def test_cbc_is_asked_where_the_search_gives_up(children: list[Watched]) -> None:
    graph = hard_graph()
    without = roam.optimize(graph, exact="off")
    plan = roam.optimize(graph)
    roam.verify(graph, plan)
    assert without.gap > 0
    assert plan.total_bytes <= without.total_bytes
    assert plan.total_lower_bound_bytes >= without.total_lower_bound_bytes
    assert plan.exact["status"] == "used"
    assert plan.exact["programs"] == len(children) > 0
    assert not any(is_running(child.number) for child in children)


def test_the_search_alone_goes_below_what_cbc_found() -> None:
    # With programs 27,904 bytes were found once, and less was not excluded.
    plan = roam.optimize(roam.Graph.load(INSTANCES / "irregular-100.json.gz"), exact="off")
    assert plan.total_bytes == plan.total_lower_bound_bytes == 27_328


@pytest.mark.parametrize(
    ("name", "total"), [("aligned-16", 5504), ("aligned-24", 4288), ("aligned-24-wide", 5824)]
)
def test_small_layouts_of_mixed_alignments_need_no_programs(name: str, total: int) -> None:
    plan = roam.optimize(roam.Graph.load(INSTANCES / f"{name}.json.gz"), exact="off")
    assert plan.total_bytes == total


def many_aligned() -> roam.Graph:
    """One order, and more tensors of mixed alignments than complete search takes."""
    random, steps = Random(85), 30
    builder = roam.GraphBuilder(alignment_bytes=64)
    creates: list[list[int]] = [[] for _ in range(steps)]
    reads: list[list[int]] = [[] for _ in range(steps)]
    for first, length in [(random.randrange(steps), random.randrange(8)) for _ in range(70)]:
        tensor = builder.tensor(
            "", 64 * random.randrange(1, 7), alignment_bytes=random.choice([64, 128, 512])
        )
        creates[first].append(tensor)
        if first < (last := min(steps - 1, first + length)):
            reads[last].append(tensor)
    for step in range(steps):
        builder.operator("", reads=reads[step], creates=creates[step])
        if step > 0:
            builder.control(step - 1, step)
    return builder.build()


def test_cbc_closes_gaps_of_layouts(children: list[Watched]) -> None:
    graph = many_aligned()
    without = roam.optimize(graph, exact="off")
    plan = roam.optimize(graph)
    roam.verify(graph, plan)
    assert plan.total_bytes < without.total_bytes
    assert plan.pool_bytes < without.pool_bytes
    assert plan.exact["gains"] > 0
    assert plan.exact["programs"] == len(children)
    assert any(candidate.layout == "integer_program" for candidate in plan.candidates)
    # What is proved of one order's layouts is no bound for other orders.
    assert plan.total_lower_bound_bytes == without.total_lower_bound_bytes
    assert not any(is_running(child.number) for child in children)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["aligned-24-wide", "irregular-100-open"])
def test_the_same_plan_every_time(name: str) -> None:
    graph = roam.Graph.load(INSTANCES / f"{name}.json.gz")
    plans = {roam.optimize(graph).to_json() for _ in range(2)}
    assert len(plans) == 1


def test_nothing_is_started_for_nothing(children: list[Watched]) -> None:
    builder = roam.GraphBuilder()
    x = builder.tensor("x", 64, residency="enters")
    builder.operator("f", reads=[x], creates=[builder.tensor("y", 64, residency="leaves")])
    plan = roam.optimize(builder.build())
    assert (plan.status, plan.exact["status"]) == ("optimal", "not_needed")
    assert roam.optimize(hard_graph(), exact="off").exact["status"] == "off"
    assert children == []


@pytest.mark.sweep
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSEGV], ids=["killed", "crashed"])
def test_a_process_that_dies_costs_its_answer_alone(
    kill: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, children: list[Watched]
) -> None:
    # It hangs, so that it is certain to be at work when it dies.
    replace_mip(monkeypatch, tmp_path, HANG)

    class Dying(Watched):
        def poll(self) -> bytes | None:
            assert self.pid is not None
            with contextlib.suppress(ProcessLookupError):  # It has died already.
                os.kill(self.pid, kill)
            return super().poll()

    monkeypatch.setattr(roam.exact, "Child", Dying)
    graph = hard_graph()
    plan = roam.optimize(graph, time_limit_s=60)
    roam.verify(graph, plan)
    assert plan.status == "feasible"
    assert plan.exact["status"] == "no_answer"
    assert plan.exact["failed"] == plan.exact["programs"] == len(children) > 0
    assert plan.exact["reason"] == f"the solver's process was killed by signal {kill.value}"
    with pytest.raises(roam.SolverUnavailable, match=f"killed by signal {kill.value}") as caught:
        roam.optimize(graph, exact="required", time_limit_s=60)
    assert caught.value.code == "solver_failed"
    assert plan.peak_bytes == roam.optimize(graph, exact="off").peak_bytes


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('no such thing')", "ImportError: no such thing"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("raise RuntimeError('broken')", "RuntimeError: broken"),
    ],
    ids=["absent", "depends on what is absent", "broken"],
)
def test_without_mip_the_plan_says_so(
    source: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replace_mip(monkeypatch, tmp_path, source)
    graph = hard_graph()
    plan = roam.optimize(graph)
    roam.verify(graph, plan)
    assert plan.exact["status"] == "unavailable"
    assert reason in str(plan.exact["reason"])
    with pytest.raises(roam.SolverUnavailable, match="required") as caught:
        roam.optimize(graph, exact="required")
    assert caught.value.code == "solver_unavailable"


def test_an_interpreter_that_cannot_be_started_is_no_solver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for executable in ("", str(tmp_path / "absent")):
        monkeypatch.setattr(sys, "executable", executable)
        assert roam.optimize(hard_graph()).exact["status"] == "unavailable"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "answer", ["", "{}", '{"solved": {"values": [1], "bound": 1e300}}', "\\xff", "[" * 100_000]
)
def test_answers_that_make_no_sense_cost_nothing(
    answer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "child.py"
    script.write_text(f"print({answer!r}, flush=True)\n")
    monkeypatch.setattr("roam.exact.bridge._SCRIPT", script)
    graph = hard_graph()
    plan = roam.optimize(graph)
    assert plan.exact["gains"] == 0
    assert plan.exact["failed"] == plan.exact["programs"]
    assert plan.peak_bytes == roam.optimize(graph, exact="off").peak_bytes


def test_a_process_that_hangs_is_killed_at_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, children: list[Watched]
) -> None:
    replace_mip(monkeypatch, tmp_path, HANG)
    graph = hard_graph()
    plan = roam.optimize(graph, time_limit_s=5)
    roam.verify(graph, plan)
    assert plan.status == "timed_out"
    # Those for which there was no core were never started.
    assert plan.exact["timed_out"] >= len(children) > 0
    assert not any(is_running(child.number) for child in children)


# Runs in a process of its own, plans the graph with a solver that hangs, and says which processes
# it has started.
PLANNER = """
import sys
sys.path.insert(0, sys.argv[2])
import roam, roam.exact

class Child(roam.exact.bridge.Child):
    def __init__(self, question):
        super().__init__(question)
        print(self.pid, flush=True)

roam.exact.Child = Child
roam.optimize(roam.Graph.load(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "end",
    [lambda p: p.send_signal(signal.SIGINT), lambda p: p.kill()],
    ids=["interrupted", "killed"],
)
def test_no_process_outlives_its_planner(
    end: Callable[[subprocess.Popen[str]], None], tmp_path: Path
) -> None:
    (tmp_path / "mip.py").write_text(HANG)
    arguments = [
        sys.executable,
        "-c",
        PLANNER,
        str(INSTANCES / "irregular-100-open.json.gz"),
        str(tmp_path),
    ]
    # A shell in the background may have told its children to ignore Ctrl-C.
    restored = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=restored
    ) as planner:
        assert planner.stdout is not None
        child = int(planner.stdout.readline())
        assert is_running(child)
        end(planner)
        _, errors = planner.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)
    if planner.returncode != -signal.SIGKILL:
        assert "PlanningInterrupted" in errors


def test_planning_loads_no_solver_into_this_process() -> None:
    code = (
        "import sys, roam; plan = roam.optimize(roam.Graph.load(sys.argv[1])); "
        "print(plan.exact['status'], 'mip' in sys.modules)"
    )
    path = str(INSTANCES / "irregular-100-open.json.gz")
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["used", "False"]
