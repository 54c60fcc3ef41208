"""Steps in which operators run again: the values are the step's own whatever runs again, limits are
kept or refused with figures, and every corruption of such a plan is caught."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import roam
from roam.memory_limit import MemoryLimit
from strategies import graphs


@st.composite
def repeatable_graphs(draw: st.DrawFn, *, max_operators: int = 9) -> roam.Graph:
    """Graphs whose operators may run again, for the most part; some leave out a tensor then."""
    graph = draw(graphs(min_operators=2, max_operators=max_operators))
    values = json.loads(graph.to_json())
    values["version"] = 2
    persistent = {
        number
        for number, tensor in enumerate(values["tensors"])
        if tensor["residency"] == "persistent"
    }
    for operator in values["operators"]:
        if operator.get("sequence") == "collective" or draw(st.integers(0, 5)) == 0:
            continue
        operator["repeatable"] = True
        # What is changed for good must be left out by further runs, or they are none of the step's.
        if first_only := [tensor for tensor in operator.get("mutates", ()) if tensor in persistent]:
            operator["first_only"] = first_only
        if draw(st.booleans()):
            operator["time_ns"] = draw(st.integers(1, 9))
    return roam.Graph.from_json(json.dumps(values).encode())


def outcome(graph: roam.Graph, plan: roam.Plan | None = None, names: Any = None) -> dict[int, Any]:
    """What the step leaves in the tensors that outlive it, as terms.

    Tensors in the pool are kept by the byte, so that who writes where another one still lives
    changes its value.

    Args:
        graph: the step, or the graph of a sequence.
        plan: in whose order and at whose offsets; program order, each tensor by itself, where None.
        names: per operator which of the step's own it is; itself where None.
    """
    tensors = graph.tensors
    order = [int(operator) for operator in (graph.program_order if plan is None else plan.order)]
    offsets = [-1] * len(tensors) if plan is None else [int(offset) for offset in plan.offsets]
    memory: dict[tuple[int, int], Any] = {}

    def cells(number: int) -> list[tuple[int, int]]:
        if offsets[number] < 0 or not tensors[number].size_bytes:
            return [(number, 0)]
        first = offsets[number] // graph.alignment_bytes
        count = -(-tensors[number].counted_bytes // graph.alignment_bytes)
        return [(-1, first + index) for index in range(count)]

    def read(number: int) -> Any:
        found = [memory.get(cell) for cell in cells(number)]
        return found[0] if len(set(found)) == 1 else ("mixed", tuple(found))

    def write(number: int, value: Any) -> None:
        for cell in cells(number):
            memory[cell] = value

    for tensor in tensors:
        if graph.creator(tensor.id) is None:
            write(tensor.id, ("given", tensor.id))
    for number in order:
        operator = graph.operator(number)
        name = number if names is None else int(names[number])
        touched = sorted({*operator.reads, *operator.mutates})
        kept = [tensor for tensor in touched if tensor not in operator.first_only]
        inputs = hash((name, tuple(sorted(map(str, map(read, kept))))))
        inputs_of_all = hash((name, tuple(sorted(map(str, map(read, touched))))))
        for place, tensor in enumerate(operator.creates):
            write(tensor, (inputs, place))
        for place, tensor in enumerate(t for t in operator.mutates if t not in operator.first_only):
            write(tensor, (inputs, "changed", place))
        for tensor in operator.first_only:
            if tensor in operator.mutates:
                write(tensor, (inputs_of_all, "first"))
    return {
        tensor.id: read(tensor.id)
        for tensor in tensors
        if tensor.residency in ("persistent", "leaves")
    }


def with_runs_again(draw: st.DrawFn, graph: roam.Graph) -> list[int]:
    """A sequence of the graph with extra runs, as many as are found to be valid."""
    sequence = [int(number) for number in graph.program_order]
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(1, len(sequence)))
        again = sorted(draw(st.sets(st.sampled_from(sequence[:place]), min_size=1, max_size=3)))
        again.sort(key=sequence.index)
        longer = sequence[:place] + again + sequence[place:]
        try:
            graph.expanded(longer)
        except roam.PlanError:
            continue
        sequence = longer
    return sequence


def planned(graph: roam.Graph, sequence: list[int]) -> dict[str, Any]:
    """The file of a plan with these runs."""
    plain, expanded = roam.optimize(graph), graph.expanded(sequence)
    plan = roam.optimize(expanded, exact="off")
    values: dict[str, Any] = json.loads(plan.to_json())
    values["version"] = 3
    values["graph_digest"] = graph.digest
    values["program_order_peak_bytes"] = plain.program_order_peak_bytes
    step_ns = sum(operator.time_ns for operator in graph.operators)
    values["recomputation"] = {
        "sequence": sequence,
        "extra_ns": sum(operator.time_ns for operator in expanded.operators) - step_ns,
        "step_ns": step_ns,
        "least_extra_ns": 0,
        "floor_bytes": 0,
        "plain_total_bytes": plain.total_bytes,
    }
    return values


def loaded(values: dict[str, Any]) -> roam.Plan:
    return roam.Plan.from_json(json.dumps(values).encode())


def timed(graph: roam.Graph) -> roam.Graph:
    """The graph with a time for every operator, so that no model is needed to add them up."""
    values = json.loads(graph.to_json())
    values["version"] = 2
    for number, operator in enumerate(values["operators"]):
        is_free = not operator.get("creates") and not operator.get("mutates")
        operator["time_ns"] = 0 if is_free else number + 1
    return roam.Graph.from_json(json.dumps(values).encode())


@st.composite
def plans(draw: st.DrawFn) -> tuple[roam.Graph, dict[str, Any]]:
    """A graph and the file of a plan of it in which something runs again."""
    graph = timed(draw(repeatable_graphs()))
    sequence = with_runs_again(draw, graph)
    assume(len(sequence) > graph.num_operators)
    values = planned(graph, sequence)
    # A plan is never worse than program order; runs for nothing may be.
    try:
        roam.verify(graph, loaded(values))
    except roam.PlanError as error:
        assume(error.code == "worse_than_program_order")
        assume(False)
    return graph, values


class TestValues:
    @given(plans())
    def test_what_outlives_the_step_is_what_it_would_be(
        self, made: tuple[roam.Graph, dict[str, Any]]
    ) -> None:
        graph, values = made
        expanded, plan = loaded(values).expanded(graph)
        roam.verify(expanded, plan)
        found = outcome(expanded, plan, values["recomputation"]["sequence"])
        assert found == outcome(graph)

    @given(plans())
    def test_a_plan_survives_its_file(self, made: tuple[roam.Graph, dict[str, Any]]) -> None:
        plan = loaded(made[1])
        again = roam.Plan.from_json(plan.to_json())
        assert again == plan
        assert again.recomputation is not None
        assert again.recomputation["sequence"].tolist() == made[1]["recomputation"]["sequence"]


def _shift(values: dict[str, Any]) -> None:
    values["recomputation"]["extra_ns"] += 1


def _promise(values: dict[str, Any]) -> None:
    values["recomputation"]["least_extra_ns"] = values["recomputation"]["extra_ns"] + 1


def _raise_floor(values: dict[str, Any]) -> None:
    values["recomputation"]["floor_bytes"] = values["total_bytes"] + 1


def _forget(values: dict[str, Any]) -> None:
    del values["recomputation"]


def _limit(values: dict[str, Any]) -> None:
    values["settings"]["memory_limit_bytes"] = max(values["total_bytes"] - 1, 0)


def _shorten(values: dict[str, Any]) -> None:
    values["recomputation"]["sequence"].pop()


class TestCorruptions:
    @pytest.mark.parametrize("corrupt", [_shift, _promise, _raise_floor, _forget, _limit, _shorten])
    @given(made=plans())
    def test_a_false_claim_is_refused(
        self, corrupt: Callable[[dict[str, Any]], None], made: tuple[roam.Graph, dict[str, Any]]
    ) -> None:
        graph, values = made
        if corrupt is _limit:
            assume(values["total_bytes"] > 0)
        corrupt(values)
        with pytest.raises(roam.PlanError):
            roam.verify(graph, loaded(values))

    @given(made=plans(), data=st.data())
    def test_other_runs_are_refused_or_make_the_same_values(
        self, made: tuple[roam.Graph, dict[str, Any]], data: st.DataObject
    ) -> None:
        """Swaps two runs, in the sequence or in the order, or replaces one."""
        graph, values = made
        runs = data.draw(st.sampled_from([values["recomputation"]["sequence"], values["order"]]))
        first, second = (data.draw(st.integers(0, len(runs) - 1)) for _ in range(2))
        if data.draw(st.booleans()):
            runs[first], runs[second] = runs[second], runs[first]
        else:
            runs[first] = data.draw(st.integers(0, graph.num_operators))
        plan = loaded(values)
        try:
            roam.verify(graph, plan)
        except roam.PlanError:
            return
        expanded, plan = plan.expanded(graph)
        found = outcome(expanded, plan, values["recomputation"]["sequence"])
        assert found == outcome(graph)


class TestLimits:
    @given(graph=repeatable_graphs(max_operators=12), percent=st.integers(40, 100))
    def test_a_limit_is_kept_or_refused(self, graph: roam.Graph, percent: int) -> None:
        graph = timed(graph)
        plain = roam.optimize(graph)
        local = plain.total_bytes - plain.persistent_bytes
        limit = plain.persistent_bytes + local * percent // 100
        try:
            plan = roam.optimize(graph, memory_limit_bytes=limit)
        except roam.PlanError as error:
            refusal = error
        else:
            refusal = None
        if refusal is not None:
            assert refusal.code in ("memory_floor", "memory_limit_not_found"), refusal
            assert str(limit) in str(refusal)
            return
        assert plan.total_bytes <= limit
        roam.verify(graph, plan)
        expanded, step = plan.expanded(graph)
        names = None if plan.recomputation is None else plan.recomputation["sequence"]
        assert outcome(expanded, step, names) == outcome(graph)

    def test_a_step_that_fits_runs_everything_once(self) -> None:
        graph = chain(6)
        plain = roam.optimize(graph)
        plan = roam.optimize(graph, memory_limit_bytes=plain.total_bytes)
        assert plan.recomputation is None
        assert plan.total_bytes == plain.total_bytes

    def test_a_chain_of_saved_activations_is_remade(self) -> None:
        graph = chain(16)
        plain = roam.optimize(graph)
        plan = roam.optimize(graph, memory_limit_bytes=plain.total_bytes * 6 // 10)
        again = plan.recomputation
        assert again is not None
        assert plan.total_bytes <= plain.total_bytes * 6 // 10
        assert 0 < again["least_extra_s"] <= again["extra_s"]
        assert again["floor_bytes"] <= plan.total_bytes
        assert again["plain_total_bytes"] == plain.total_bytes
        begin, end = plan.times_ns(graph)
        order = plan.order
        assert len(begin) == len(again["sequence"]) > graph.num_operators
        assert begin[order[1:]].tolist() == end[order[:-1]].tolist()
        assert end[order[-1]] == round((again["step_s"] + again["extra_s"]) * 1e9)

    @pytest.mark.parametrize(
        "settings", [{"memory_limit_bytes": 2**64 - 1}, {"time_limit_s": 0.1 + 0.2}]
    )
    def test_limits_are_read_as_they_were_written(self, settings: dict[str, Any]) -> None:
        plan = roam.optimize(chain(2), **settings)
        assert roam.Plan.from_json(plan.to_json()) == plan
        assert plan.settings.items() >= settings.items()

    def test_a_limit_below_the_floor_names_the_floor(self) -> None:
        with pytest.raises(roam.PlanError, match="at least") as caught:
            roam.optimize(chain(8), memory_limit_bytes=1)
        assert caught.value.code == "memory_floor"

    def test_several_streams_have_no_limit(self) -> None:
        with pytest.raises(roam.PlanError) as caught:
            roam.optimize(chain(4), streams=2, memory_limit_bytes=10**6)
        assert caught.value.code == "invalid_memory_limit"


def dropping(layers: int) -> roam.Graph:
    """Layers whose masks are drawn from states of a generator, and used again in the backward pass.

    Operators 3 i, 3 i + 1 and 3 i + 2 read the state, draw the mask and apply it; tensors are the
    input, and the state, the mask and the output of each layer.
    """
    builder = roam.GraphBuilder("dropping")
    last = builder.tensor("x", 6400, kind="input", residency="persistent")
    masks = []
    for layer in range(layers):
        state = builder.tensor(f"state{layer}", 640)
        mask = builder.tensor(f"mask{layer}", 6400)
        out = builder.tensor(f"h{layer}", 6400)
        builder.operator("state", creates=[state], sequence="random", time_ns=1)
        builder.operator(
            "draw", reads=[state], creates=[mask], sequence="random", repeatable=True, time_ns=50
        )
        builder.operator("drop", reads=[last, mask], creates=[out], repeatable=True, time_ns=20)
        masks.append(mask)
        last = out
    for layer in reversed(range(layers)):
        below = builder.tensor(f"g{layer}", 6400)
        builder.operator(
            "back", reads=[last, masks[layer]], creates=[below], phase="backward", time_ns=20
        )
        last = below
    sink = builder.tensor("loss", 64, residency="leaves")
    builder.operator("end", reads=[last], creates=[sink], phase="backward", time_ns=1)
    return builder.build()


class TestRandomOperators:
    """What draws again needs the state that it drew from at first, as long as it may be needed."""

    LAYERS = 8

    def planned(self) -> tuple[roam.Graph, dict[str, Any]]:
        graph = dropping(self.LAYERS)
        plain = roam.optimize(graph)
        plan = roam.optimize(graph, memory_limit_bytes=plain.total_bytes * 6 // 10)
        values = json.loads(plan.to_json())
        sequence = values["recomputation"]["sequence"]
        again = [number for number in set(sequence) if sequence.count(number) > 1]
        assert again
        assert {graph.operator(number).name for number in again} <= {"draw", "drop"}
        assert any(graph.operator(number).name == "draw" for number in again)
        return graph, values

    def refused(self, graph: roam.Graph, values: dict[str, Any]) -> str:
        with pytest.raises(roam.PlanError) as caught:
            roam.verify(graph, loaded(values))
        return str(caught.value.code)

    def drawn_again(self, graph: roam.Graph, values: dict[str, Any]) -> tuple[int, int]:
        """An operator that draws again, and the place in the sequence of its second run."""
        sequence = values["recomputation"]["sequence"]
        seen: set[int] = set()
        for place, number in enumerate(sequence):
            if number in seen and graph.operator(number).name == "draw":
                return number, place
            seen.add(number)
        raise AssertionError

    def test_further_runs_have_no_place_among_those_that_draw(self) -> None:
        graph, values = self.planned()
        expanded, plan = loaded(values).expanded(graph)
        drawing = [op for op in expanded.operators if op.sequence == "random"]
        assert len(drawing) == 2 * self.LAYERS
        sequence = values["recomputation"]["sequence"]
        assert outcome(expanded, plan, sequence) == outcome(graph)

    def test_drawing_before_the_state_is_read_is_refused(self) -> None:
        graph, values = self.planned()
        number, place = self.drawn_again(graph, values)
        sequence = values["recomputation"]["sequence"]
        sequence.pop(place)
        sequence.insert(sequence.index(number - 1), number)
        assert self.refused(graph, values) == "sequence_other_value"

    def test_drawing_in_another_order_at_first_is_refused(self) -> None:
        graph, values = self.planned()
        sequence = values["recomputation"]["sequence"]
        first = sequence.index(1)
        sequence.pop(first)
        sequence.insert(sequence.index(3) + 1, 1)  # after the state of the next layer
        assert self.refused(graph, values) in ("sequence_too_early", "sequence_other_value")

    def test_reading_a_state_again_is_refused(self) -> None:
        graph, values = self.planned()
        number, place = self.drawn_again(graph, values)
        values["recomputation"]["sequence"].insert(place, number - 1)
        assert self.refused(graph, values) == "sequence_not_repeatable"

    def test_a_state_whose_memory_another_tensor_takes_is_refused(self) -> None:
        graph, values = self.planned()
        number, _ = self.drawn_again(graph, values)
        state = graph.operator(number).creates[0] - 1
        assert graph.tensor(state).name.startswith("state")
        expanded, plan = loaded(values).expanded(graph)
        order = [int(run) for run in plan.order]
        users = [place for place, run in enumerate(order) if state in expanded.operator(run).reads]
        assert len(users) > 1
        overwritten = 0
        for place in range(users[0] + 1, users[-1]):
            for made in expanded.operator(order[place]).creates:
                corrupted = json.loads(json.dumps(values))
                corrupted["offsets"][made] = corrupted["offsets"][state]
                assert self.refused(graph, corrupted)
                overwritten += 1
        assert overwritten > 3


def gathering(layers: int) -> roam.Graph:
    """Layers whose weights are gathered of the parts of several ranks, and used again in the
    backward pass.

    Operators 4 i to 4 i + 3 make the memory of a weight, launch its all-gather, wait, and use it.
    """
    builder = roam.GraphBuilder("gathering")
    last = builder.tensor("x", 640, kind="input", residency="persistent")
    weights = []
    for layer in range(layers):
        part = builder.tensor(f"part{layer}", 1600, kind="parameter", residency="persistent")
        whole = builder.tensor(f"whole{layer}", 6400)
        out = builder.tensor(f"h{layer}", 640)
        builder.operator("empty", creates=[whole], repeatable=True, time_ns=1)
        launch = builder.operator(
            "launch", reads=[part], mutates=[whole], sequence="collective", repeatable=True,
            phase="collective", time_ns=100,
        )  # fmt: skip
        wait = builder.operator(
            "wait", reads=[part], mutates=[whole], repeatable=True, phase="collective", time_ns=1
        )
        builder.control(launch, wait)
        builder.operator("use", reads=[last, whole], creates=[out], repeatable=True, time_ns=20)
        weights.append(whole)
        last = out
    for layer in reversed(range(layers)):
        below = builder.tensor(f"g{layer}", 640)
        builder.operator("back", reads=[last, weights[layer]], creates=[below], phase="backward", time_ns=20)  # fmt: skip
        last = below
    sink = builder.tensor("loss", 64, residency="leaves")
    builder.operator("end", reads=[last], creates=[sink], phase="backward", time_ns=1)
    return builder.build()


class TestGathers:
    """An all-gather runs again as a launch and a wait, at the price of both."""

    LAYERS = 8

    @pytest.mark.parametrize("percent", [30, 50, 70, 90])
    def test_weights_are_gathered_again_at_their_price(self, percent: int) -> None:
        graph = gathering(self.LAYERS)
        plain = roam.optimize(graph)
        local = plain.total_bytes - plain.persistent_bytes
        limit = plain.persistent_bytes + local * percent // 100
        plan = roam.optimize(graph, memory_limit_bytes=limit)
        roam.verify(graph, plan)
        assert plan.total_bytes <= limit
        again = plan.recomputation
        assert again is not None
        names = Counter(graph.operator(number).name for number in again["sequence"])
        extra = names["launch"] - self.LAYERS
        assert names["launch"] == names["wait"] == names["empty"]
        # Each weight that is dropped once has to be gathered once more.
        assert extra == math.ceil((self.LAYERS * 6400 + 1280 - local * percent / 100) / 6400)
        assert again["extra_s"] == pytest.approx(extra * 102e-9)

    def test_a_launch_for_which_nothing_waits_is_refused(self) -> None:
        graph = gathering(2)
        order = graph.program_order.tolist()
        good = [*order[:8], 0, 1, 2, *order[8:]]
        roam.verify(graph, loaded(planned(graph, good)))
        bad = [0, 1, 0, *order[1:]]
        values = planned(graph, bad)
        with pytest.raises(roam.PlanError) as caught:
            roam.verify(graph, loaded(values))
        assert caught.value.code == "launch_not_waited"

    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_half_a_gather_is_refused(self, number: int) -> None:
        """What is launched again is waited for again, in memory that is made for it."""
        graph = gathering(2)
        order = graph.program_order.tolist()
        again = [one for one in (0, 1, 2) if one != number]
        with pytest.raises(roam.PlanError):
            roam.verify(graph, loaded(planned(graph, [*order[:8], *again, *order[8:]])))


def chain(layers: int) -> roam.Graph:
    """Layers whose outputs the backward pass needs, last one first."""
    builder = roam.GraphBuilder("chain")
    weight = builder.tensor("w", 64, kind="parameter", residency="persistent")
    made = [builder.tensor("x", 6400, kind="input", residency="persistent")]
    for layer in range(layers):
        made.append(builder.tensor(f"h{layer}", 6400, kind="activation"))
        builder.operator(
            "layer", reads=[weight, made[-2]], creates=[made[-1]], repeatable=True, time_ns=100
        )
    gradient = made[-1]
    for layer in reversed(range(layers)):
        below = builder.tensor(f"g{layer}", 6400)
        reads = list(dict.fromkeys([gradient, made[layer]]))
        builder.operator("back", reads=reads, creates=[below], phase="backward", time_ns=200)
        gradient = below
    builder.operator("update", reads=[gradient], mutates=[weight], phase="update", time_ns=10)
    return builder.build()


class TestMemoryLimit:
    @pytest.mark.parametrize(
        ("value", "size_bytes"),
        [(5, 5), ("12GiB", 12 * 2**30), (" 1.5 kB ", 1500), ("800 mb", 8 * 10**8), ("7B", 7)],
    )
    def test_bytes(self, value: int | str, size_bytes: int) -> None:
        assert MemoryLimit.of(value).in_bytes(0) == size_bytes

    def test_shares_and_devices(self) -> None:
        assert MemoryLimit.of("60%").in_bytes(1000) == 600
        with pytest.raises(ValueError, match="a device whose memory"):
            MemoryLimit.of("auto").in_bytes(1000)

    @pytest.mark.parametrize(
        "value", ["", "12", "12 Gi", "-1GiB", "0%", 0, -5, True, 1.5, "1e400GiB", 2**63, None]
    )
    def test_nonsense(self, value: Any) -> None:
        with pytest.raises(ValueError, match="memory"):
            MemoryLimit.of(value)
