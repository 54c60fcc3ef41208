"""Joint graphs of AOTAutograd, which contain forward and backward pass. A plan of the whole graph
says which values the forward pass leaves to the backward pass, and which the backward pass makes
again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from roam._core import Graph, Plan
from roam.errors import CaptureError
from roam.torch_compat.private import is_input_mutation
from roam.tracing.frontends.fx import Lowered


class Joint:
    """A joint graph, and the planner's graph of it.

    Attributes:
        graph: forward and backward as one step.

    Args:
        module: what AOTAutograd gives a partitioner. Shapes are numbers.
        forward_outputs: how many of its results are the forward pass's.
        pool: whether what is made and dies in a pass lies in a pool.

    Raises:
        CaptureError: it cannot be planned exactly.
    """

    def __init__(self, module: GraphModule, forward_outputs: int, *, pool: bool = True) -> None:
        module.graph.eliminate_dead_code()
        output = module.graph.output_node()
        results: Any = output.args[0]
        if any(map(is_input_mutation, (output.meta.get("desc") or ())[:forward_outputs])):
            raise CaptureError(
                "the graph changes an argument after its forward pass, and operators that run "
                "again in the backward pass would read the changed value; change a copy, or leave "
                "memory= out",
                code="memory_changed_argument",
            )
        self._results = [item for item in results[:forward_outputs] if isinstance(item, Node)]
        late = [node for node in module.graph.find_nodes(op="placeholder") if _is_late(node)]
        self._lowered = Lowered.of(
            module, asks_kernels=True, later=(late, self._results), pool=pool
        )
        self.graph: Graph = self._lowered.graph
        self._given = {
            node for node in self._lowered.nodes if node.op == "placeholder" and not _is_late(node)
        }
        self._backward: set[Node] = set()
        changed: set[Node] = set()
        for node in self._lowered.nodes:
            is_late = node.op == "placeholder" and _is_late(node)
            if is_late or not self._backward.isdisjoint(node.all_input_nodes):
                self._backward.add(node)
            if node.target is torch.ops.aten.copy_.default:
                changed.add(node.args[0])  # type: ignore[arg-type]
        self._reads_changed = set(changed)
        """What is changed at the end of the forward pass, and what reads it, views included."""
        for node in self._lowered.nodes:
            if not changed.isdisjoint(node.all_input_nodes):
                self._reads_changed.add(node)

    def mark(self, plan: Plan) -> None:
        """Tells a partitioner of PyTorch, by a plan of `graph`, which values the backward pass is
        given, and which it makes again. What the user's own `torch.utils.checkpoint` marks there is
        the plan's to decide. An operator that may not run again is one whose results are given.
        """
        operators = self._lowered.operators
        number_of = {node: number for number, node in enumerate(operators)}
        repeatable = [operator.repeatable for operator in self.graph.operators]
        saved = self._read_later(plan)
        for node in self._lowered.nodes:
            if node in self._backward or node.op == "placeholder":
                continue
            maker = node
            while maker not in number_of and maker.op == "call_function":
                maker = maker.all_input_nodes[0]
            number = number_of.get(maker)
            is_once = maker in self._reads_changed or (
                number is not None and not repeatable[number]
            )
            for key in ("recompute", "ac_graph_id"):
                node.meta.pop(key, None)
            if isinstance(node.meta.get("val"), torch.Tensor) and (is_once or node in saved):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif not is_once:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def _read_later(self, plan: Plan) -> set[Node]:
        """Values of the forward pass that the backward pass reads as the forward pass left them.

        The forward pass ends with the last operator that its results need.
        """
        operators = self._lowered.operators
        again = plan.recomputation
        sequence = (
            plan.order.tolist() if again is None else [int(number) for number in again["sequence"]]
        )
        needed = _needed(self._results)
        first: dict[int, int] = {}
        for place, number in enumerate(sequence):
            first.setdefault(number, place)
        end = max(
            (first[number] for number, node in enumerate(operators) if node in needed), default=-1
        )
        latest: dict[Node, bool] = {}
        """Per operator that has run: whether its latest run was in the forward pass."""
        saved: set[Node] = set()

        def read(node: Node) -> None:
            if node in self._backward or node.op == "placeholder":
                return
            if node in latest:
                if latest[node]:
                    saved.add(node)
                return
            for given in node.all_input_nodes:  # it calls no kernel: a part of a result, say
                read(given)
            if not saved.isdisjoint(node.all_input_nodes):
                saved.add(node)

        for place, number in enumerate(sequence):
            node = operators[number]
            is_late = place > end or node in self._backward
            if is_late:
                for given in node.all_input_nodes:
                    read(given)
            latest[node] = not is_late
        return saved


def _is_late(node: Node) -> bool:
    """Whether an argument is one of the backward pass's, a gradient of a result."""
    return "tangents" in str(node.target)


def _needed(nodes: list[Node]) -> set[Node]:
    """The nodes and all that they are made of."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def held_bytes(forward: GraphModule, backward: GraphModule, forward_outputs: int) -> int:
    """Bytes of what is alive during the backward pass and is not one of its arguments: the forward
    pass's other arguments, and its results.
    """
    outputs: Any = forward.graph.output_node().args[0]
    given = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    held = [
        node
        for node in (*forward.graph.find_nodes(op="placeholder"), *outputs[:forward_outputs])
        if isinstance(node, Node) and node.name not in given
    ]
    tensors = [node.meta.get("val") for node in dict.fromkeys(held)]
    return sum(
        tensor.untyped_storage().nbytes() for tensor in tensors if isinstance(tensor, torch.Tensor)
    )
