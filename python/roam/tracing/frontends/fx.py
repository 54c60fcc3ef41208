"""`fx` graphs: an `fx.GraphModule` becomes the planner's graph, and is put into the order of a
plan.

For other people's pipelines, such as those built on `make_fx` or AOTAutograd, in which planning is
one pass of many.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from roam._core import Graph, GraphBuilder, Plan, verify
from roam.distributed.collectives import is_launch, wait
from roam.errors import CaptureError, PlanError
from roam.kernels.calls import placed_calls
from roam.kernels.workspace import releases, workspaces
from roam.program.ir import Program, Ref, Result
from roam.program.links import links_of, times_ns
from roam.program.lower import device_of, kinds_of
from roam.program.random_states import with_states
from roam.program.repeatable import Repeat, repeats
from roam.program.replay import generator_state, replayed
from roam.torch_compat.private import disable_current_modes, pytree
from roam.tracing.fake_kernels.cache import FakeKernels
from roam.tracing.fakes.fake_mode import StandIns, new_mode
from roam.tracing.frontends.aot import GraphInput, NodePlaces, entering, replay
from roam.tracing.recording.recorder import Recorder

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def graph_of(module: Any, *, random_states: bool = False) -> Graph:
    """The planner's graph of an `fx.GraphModule`: one operator for each node that calls a kernel.

    Args:
        module: nodes are placeholders, attributes and calls of operators, as `make_fx` and
            AOTAutograd produce them, and placeholders have a tensor or number in ``meta["val"]``.
            Shapes are numbers. Nothing is computed.
        random_states: whether states of PyTorch's random generators are read, one more operator
            each, so that random tensors may be made again.

    Returns:
        A graph in which placeholders and attributes are persistent, and results leave the step.

    Raises:
        CaptureError: a node is none of these, or cannot be planned exactly.
        TypeError: `module` is not an `fx.GraphModule`.
    """
    return Lowered.of(module, random_states=random_states).graph


def apply(plan: Plan, module: Any) -> Any:
    """The same module with its nodes in a plan's order, so that values are freed as the plan says.

    The module's code drops each value after its last use, so its peak is that of the plan's order
    if memory does not fragment. The plan's pool is not used: kernels get their memory from
    PyTorch's allocator.

    If operators run again, their nodes are copied. Random operators draw again from a state of
    their generator, which a node before them reads.

    Args:
        plan: a plan for one stream of the graph that `graph_of` makes of the module.
        module: is changed, and recompiled.

    Raises:
        PlanError: the plan is not one of this module's.
    """
    lowered = Lowered.of(module)
    if lowered.graph.digest != plan.graph_digest:
        lowered = Lowered.of(module, random_states=True)
    verify(lowered.graph, plan)
    if len(set(plan.streams.tolist())) > 1:
        raise PlanError(
            "a module's nodes run on one stream, and the plan has several; plan with streams=1",
            code="streams",
        )
    nodes = module.graph
    lowered = lowered.reading()
    if plan.recomputation is not None:
        lowered = lowered.expanded([int(number) for number in plan.recomputation["sequence"]])
    for node in lowered.in_order(plan.order.tolist()):
        nodes.output_node().prepend(node)
    for read in lowered.states.values():
        if not read.users:  # what was drawn from there is drawn once
            nodes.erase_node(read)
    nodes.lint()
    module.recompile()
    return module


@dataclass(frozen=True, slots=True)
class Lowered:
    """A module's nodes and the graph of those that call kernels."""

    nodes: list[Node]
    """All but the output, in program order."""
    operators: list[Node]
    """The node of each operator, by the operator's number. A node that draws from a state that is
    read before it is here twice, first for the reading, until there are nodes for the reading (see
    `reading`).
    """
    graph: Graph
    devices: dict[Node, torch.device]
    """By node that draws and may be replayed, the device on which it draws."""
    states: dict[Node, Node]
    """By node that draws and may be replayed, the node that reads the state."""
    program: Program
    saved_bytes: int = 0
    """The most that a compiled region may free of its arguments while it runs. The graph does not
    contain this saving.
    """

    @classmethod
    def of(
        cls,
        module: Any,
        *,
        random_states: bool = False,
        dying: Collection[str] = (),
        asks_kernels: bool = False,
        later: tuple[Collection[Node], Collection[Node]] = ((), ()),
        pool: bool = True,
    ) -> Lowered:
        """Reads a module.

        Args:
            module: see `graph_of`.
            random_states: see `graph_of`.
            dying: names of the placeholders that nothing holds after their last use.
            asks_kernels: whether to run kernels on zeros, for what they allocate for themselves.
            later: placeholders that are given only when the nodes beside them have run.
            pool: whether what is made and dies in the module lies in a pool.

        Raises:
            CaptureError: see `graph_of`.
        """
        if not isinstance(module, GraphModule):
            raise TypeError(
                f"expected a roam.Graph or a torch.fx.GraphModule, not a {type(module).__name__}"
            )
        program, spans = _record(module, dying)
        device = device_of(program)
        taken = workspaces(program, placed_calls(program, device), device) if asks_kernels else None
        freed = releases(program, device, taken or {}) if asks_kernels else {}
        saved = (one.saved_bytes for of_call in freed.values() for one in of_call)
        nodes = [node for node in module.graph.nodes if node.op != "output"]
        drawing = _drawing(program, spans) if random_states else {}
        launched = _launched(program, spans)
        operators = [
            node
            for node, span in spans.items()
            if span or node in launched
            for _ in range(1 + (node in drawing))
        ]
        devices = {node: draw.device for node, draw in drawing.items()}
        name = type(module).__name__
        graph = _lower(program, spans, launched, drawing, name, taken or {}, later, pool)
        return cls(nodes, operators, graph, devices, {}, program, max(saved, default=0))

    def reading(self) -> Lowered:
        """The same, with one node more before each node that may be replayed: it reads the
        state.
        """
        nodes: list[Node] = []
        operators = list(self.operators)
        states: dict[Node, Node] = {}
        for node in self.nodes:
            if node in self.devices:
                with node.graph.inserting_before(node):
                    states[node] = node.graph.call_function(generator_state, (self.devices[node],))
                operators[operators.index(node)] = states[node]
                nodes.append(states[node])
            nodes.append(node)
        return Lowered(nodes, operators, self.graph, self.devices, states, self.program)

    def expanded(self, sequence: list[int]) -> Lowered:
        """The nodes, in which each extra run is a copy of a node. A copy uses the latest runs
        before it.
        """
        graph = self.nodes[0].graph
        latest: dict[Node, Node] = {}
        copies: list[Node] = []
        numbered = set(self.operators)

        def copied(node: Node) -> Node:
            with graph.inserting_before(graph.output_node()):
                copy = graph.node_copy(node, used)
            if node in self.states:
                operator: Any = node.target
                copy.args = (operator, self.devices[node], *copy.args)
                copy.kwargs = {**copy.kwargs, "state": self.states[node]}
                copy.target = replayed
            copies.append(copy)
            return copy

        def used(node: Node) -> Node:
            known = latest.get(node, node)
            is_current = node in numbered or known.all_input_nodes == [
                used(given) for given in node.all_input_nodes
            ]
            if not is_current:
                known = latest[node] = copied(node)
            return known

        runs: list[Node] = []
        given: dict[Node, Any] = {}
        for number in sequence:
            node = self.operators[number]
            if node in given:
                latest[node] = copied(node)
                runs.append(latest[node])
            else:
                given[node] = map_arg((node.args, node.kwargs), used)
                runs.append(node)
        for node, (args, kwargs) in given.items():
            node.args, node.kwargs = args, kwargs
        nodes = [*self.nodes, *copies]
        return Lowered(nodes, runs, self.graph, self.devices, self.states, self.program)

    def in_order(self, order: list[int]) -> Iterator[Node]:
        """All nodes; those that call no kernel come as soon as they can, and hold no memory of
        their own.
        """
        numbered = set(self.operators)
        waits = {node: len(node.all_input_nodes) for node in self.nodes}
        done: set[Node] = set()

        def settled(first: Node) -> Iterator[Node]:
            ready = deque([first])
            while ready:
                node = ready.popleft()
                done.add(node)
                yield node
                for user in node.users:
                    if user in waits:
                        waits[user] -= 1
                        if not waits[user] and user not in numbered:
                            ready.append(user)

        for node in self.nodes:
            if not node.all_input_nodes and node not in numbered:
                yield from settled(node)
        for number in order:
            yield from settled(self.operators[number])


def _record(module: GraphModule, dying: Collection[str]) -> tuple[Program, dict[Node, range]]:
    places = NodePlaces(_phase)
    recorder = Recorder(places, [], FakeKernels())
    values: dict[Node, Any] = {}
    with torch.inference_mode(False), torch.no_grad(), disable_current_modes():
        stand_ins = StandIns(new_mode())
        for index, node in enumerate(module.graph.nodes):
            if node.op == "placeholder":
                if "val" not in node.meta:
                    raise CaptureError(
                        f"{node.name} has no example value in meta['val']; trace the module with "
                        "make_fx(..., tracing_mode='fake')",
                        code="fx_metadata",
                    )
                value = values[node] = stand_ins.of(node.meta["val"], node.name)
                kind = "activation" if node.name in dying else "input"
            elif node.op == "get_attr":
                attribute: Any = functools.reduce(getattr, str(node.target).split("."), module)
                value = values[node] = stand_ins.of(attribute, str(node.target))
                kind = "parameter" if isinstance(attribute, torch.nn.Parameter) else "buffer"
            elif node.op in ("call_function", "output"):
                continue
            else:
                raise CaptureError(
                    f"{node.name} is a {node.op} node; trace the module with make_fx first, so that it calls operators",
                    code="fx_node",
                )
            if isinstance(value, torch.Tensor) and recorder.slot_of(value) is None:
                recorder.add_referenced(GraphInput(index, node.name, kind), value, node.name)  # type: ignore[arg-type]
        spans = replay(module, stand_ins.mode, recorder, places, values)
    program = recorder.program
    results = pytree.tree_leaves(module.graph.output_node().args[0])
    returned = [values[item] for item in results if isinstance(item, Node)]
    leaves = [
        Ref(recorder.leaving(value, "the result"))
        for value in returned
        if isinstance(value, torch.Tensor)
    ]
    program.result = Result(leaves)
    last_used = {reference.index for reference, _ in program.referenced if reference.path in dying}
    program.entering = entering(program, last_used)
    return program, spans


def _phase(node: Node | None) -> str:
    """The phase of a node, as far as tracers tell it: `make_fx` and AOTAutograd mark what
    autograd's engine ran.
    """
    if node is None:
        return "forward"
    is_backward = (
        node.meta.get("autograd_backward") or node.meta.get("partitioner_tag") == "is_backward"
    )
    return "backward" if is_backward else "forward"


@dataclass(frozen=True, slots=True)
class _Drawing:
    """How a node draws that may be replayed."""

    repeat: Repeat
    device: torch.device
    state_bytes: int


def _drawing(program: Program, spans: dict[Node, range]) -> dict[Node, _Drawing]:
    """Nodes that make one random call of a device's own generator, and may be replayed."""
    found = with_states(program)
    if found is None:
        return {}
    again = repeats(found.program)
    places = {number: place for place, number in enumerate(found.calls)}
    drawing = {}
    for node, span in spans.items():
        if len(span) != 1:
            continue
        place = places[span[0]]
        repeat, state = again[place], found.program.calls[place].state
        if repeat is None or state is None:
            continue
        (source,) = found.program.calls[place - 1].args
        if isinstance(source, torch.device):
            size_bytes = found.program.storages[found.program.storage_of(state)].size_bytes
            drawing[node] = _Drawing(repeat, source, size_bytes)
    return drawing


def _lower(
    program: Program,
    spans: dict[Node, range],
    launched: Mapping[Node, Node],
    drawing: dict[Node, _Drawing],
    name: str,
    taken: Mapping[int, int],
    later: tuple[Collection[Node], Collection[Node]],
    pool: bool,
) -> Graph:
    device = device_of(program)
    builder = GraphBuilder(name, device.type)
    operators: dict[Node, int] = {}
    number = 0
    for node in (node for node, span in spans.items() if span or node in launched):
        operators[node] = number + (node in drawing)
        number = operators[node] + 1
    # The recorder notes a wait with its launch.
    waited = {spans[launch][-1]: operators[wait] for wait, launch in launched.items()}
    reference = {
        index: waited.get(index, number)
        for node, number in operators.items()
        for index in spans[node]
    }
    made: dict[int, list[int]] = {number: [] for number in operators.values()}
    used_by: dict[int, set[int]] = {}
    for index, call in enumerate(program.calls):
        for slot in call.refs():
            used_by.setdefault(program.storage_of(slot), set()).add(reference[index])
    leaving = program.leaving()
    tensors: dict[int, int] = {}
    inner_bytes = dict.fromkeys(operators.values(), 0)
    for number, (storage, kind) in enumerate(
        zip(program.storages, kinds_of(program, program.leaving()), strict=True)
    ):
        maker = reference.get(storage.creator)
        if maker is not None and _is_inner(number, maker, used_by, leaving):
            inner_bytes[maker] += storage.size_bytes
            continue
        if maker is None:
            residency = "enters" if number in program.entering else "persistent"
        else:
            inner = "step_local" if pool else "unpooled"
            residency = "leaves" if number in leaving else inner
        tensors[number] = builder.tensor(
            storage.name, storage.size_bytes, kind=kind, residency=residency
        )
        if maker is not None:
            made[maker].append(tensors[number])
    late, ahead = later
    first = _makers(operators, ahead, _waits(operators, spans, {}))
    waits = _waits(operators, spans, dict.fromkeys(late, first))
    again = repeats(program)
    times, links = times_ns(program), links_of(program)
    for node, draw in drawing.items():
        again[spans[node][0]] = draw.repeat
    for node, number in operators.items():
        span = spans[node]
        if node in launched:
            span = spans[launched[node]][-1:]
        elif node in launched.values():
            span = span[:-1]
        calls = [program.calls[index] for index in span]
        is_repeatable = all(
            (repeat := again[index]) is not None and not repeat.first_only for index in span
        )
        touched = {program.storage_of(slot) for call in calls for slot in call.refs()}
        mutated = program.written(calls)
        creates = made[number]
        changed = [
            tensors[s] for s in sorted(mutated & tensors.keys()) if tensors[s] not in creates
        ]
        reads = [
            tensors[s]
            for s in sorted((touched - mutated) & tensors.keys())
            if tensors[s] not in creates
        ]
        source = calls[0].source
        if node in drawing:
            state = builder.tensor(f"state of {calls[0].name}", drawing[node].state_bytes)
            builder.operator(
                "roam.generator_state",
                creates=[state],
                phase=calls[0].phase,
                sequence="random",
                module=source.module,
                file=source.file,
                line=source.line,
            )
            reads.append(state)
        is_drawing = any(call.random for call in calls) and (not is_repeatable or node in drawing)
        is_launching = is_launch(calls[-1].target)
        builder.operator(
            calls[0].name if len(calls) == 1 else str(node.target),
            reads=reads,
            creates=creates,
            mutates=changed,
            workspace_bytes=inner_bytes[number]
            + max((taken.get(index, 0) for index in span), default=0),
            time_ns=times.get(span[-1]),
            phase=calls[-1].phase,
            sequence="random" if is_drawing else "collective" if is_launching else None,
            link=links.get(span[-1]),
            module=source.module,
            file=source.file,
            line=source.line,
            repeatable=is_repeatable,
        )
        for before in waits[node]:
            builder.control(before, number)
    return builder.build()


def _launched(program: Program, spans: Mapping[Node, range]) -> dict[Node, Node]:
    """By the node that waits for a collective, the one that launches it.

    Raises:
        CaptureError: something else than a wait uses what a collective writes (code
            ``collective``).
    """
    found: dict[Node, Node] = {}
    for node, span in spans.items():
        if not (span and program.calls[span[-1]].target is wait):
            continue
        waits = [user for user in node.users if user.target is _WAIT]
        if not waits or len(waits) < len(node.users):
            others = [user.name for user in node.users if user.target is not _WAIT]
            call = program.calls[span[-2]]
            raise CaptureError(
                f"{node.name} at {call.source} launches a collective whose result "
                f"{f'{others[0]} uses before it is' if others else 'is never'} waited for; call "
                "torch.ops._c10d_functional.wait_tensor on it first",
                code="collective",
                operator=call.name,
                source=str(call.source),
            )
        found[next(user for user in spans if user in waits)] = node
    return found


def _is_inner(storage: int, maker: int, used_by: dict[int, set[int]], leaving: set[int]) -> bool:
    """Whether a node uses a storage for itself alone: another of its calls does, and no other
    node.
    """
    return storage not in leaving and used_by.get(storage) == {maker}


def _waits(
    operators: Mapping[Node, int], nodes: Iterable[Node], given: Mapping[Node, list[int]]
) -> dict[Node, list[int]]:
    """For each node the operators that it waits for.

    Args:
        operators, nodes: the number of each node that is an operator; nodes in program order.
        given: the operators that placeholders wait for.
    """
    waits = dict(given)
    for node in nodes:
        waits[node] = _makers(operators, node.all_input_nodes, waits)
    return waits


def _makers(
    operators: Mapping[Node, int], values: Iterable[Node], waits: Mapping[Node, list[int]]
) -> list[int]:
    """The operators that make values, be it through nodes that call no kernel."""
    found: dict[int, None] = {}
    for value in values:
        made = [operators[value]] if value in operators else waits.get(value, ())
        found.update(dict.fromkeys(made))
    return list(found)
