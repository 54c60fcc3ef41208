"""Records a graph of AOTAutograd's: a forward or backward graph of aten calls becomes a
`Program`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from roam.errors import CaptureError
from roam.program.ir import Program, Ref, Result, Source, refs
from roam.state.nests import mapped
from roam.torch_compat.private import FakeTensorMode, OpOverload, disable_current_modes, pytree
from roam.tracing.compiled.region_operators import Region
from roam.tracing.fake_kernels.cache import FakeKernels
from roam.tracing.recording.recorder import Recorder
from roam.tracing.source_location import shown_path

_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_ROOT = re.compile(r"^\w+\['\w+'\]\.?")
"""What Dynamo puts before a module's path."""


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A tensor among a graph's arguments, by its place."""

    index: int
    path: str
    kind: str


def record_graph(
    graph: GraphModule, args: Sequence[Any], *, phase: str, dying: Collection[int] = ()
) -> Program:
    """The program of a graph for arguments like these. Kernels are run only on zeros, to find how
    they lay out their results.

    Args:
        graph: functional aten calls, save for the copies into changed arguments at its end.
        args: a call's arguments. Shapes, strides and numbers are taken from them, and which of them
            share memory.
        phase: ``"forward"`` or ``"backward"``.
        dying: places of the arguments that nothing holds after their last use.

    Raises:
        CaptureError: what cannot be recorded exactly.
    """
    places = NodePlaces(lambda _: phase)
    recorder = Recorder(places, [], FakeKernels(asks=True))
    values: dict[Node, Any] = {}
    with torch.inference_mode(False), torch.no_grad(), disable_current_modes():
        mode = FakeTensorMode()
        remaining = iter(enumerate(args))
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                index, value = next(remaining)
                values[node] = _input(
                    recorder, mode, GraphInput(index, node.name, _kind(index, value, dying)), value
                )
            elif node.op == "get_attr":
                values[node] = _constant(recorder, mode, node, getattr(graph, node.target))
        replay(graph, mode, recorder, places, values)
    program = recorder.program
    results: Any = graph.graph.output_node().args[0]
    program.result = Result([_result(recorder, item, values) for item in results])
    program.entering = entering(program, dying)
    return program


class NodePlaces:
    """Phase and source of the node that runs."""

    def __init__(self, phase_of: Callable[[Node | None], str]) -> None:
        self._phase_of = phase_of
        self.node: Node | None = None

    def here(self) -> tuple[str, Source]:
        return self._phase_of(self.node), Source() if self.node is None else _source(self.node.meta)


def replay(
    graph: GraphModule,
    mode: FakeTensorMode,
    recorder: Recorder,
    places: NodePlaces,
    values: dict[Node, Any],
) -> dict[Node, range]:
    """Runs a graph's functions on fake tensors, for the recorder to see.

    Args:
        graph, mode, recorder, places: what to run, and who sees it.
        values: the values of the nodes that are no functions. Those of all other nodes are added.

    Returns:
        Which of the recorder's calls each node makes: often one, none where it only takes a result
        apart.
    """
    spans: dict[Node, range] = {}
    with mode, recorder:
        for node in graph.graph.nodes:
            if node.op == "call_function":
                places.node = node
                begin = len(recorder.program.calls)
                values[node] = _call(node, values)
                spans[node] = range(begin, len(recorder.program.calls))
    return spans


def _source(meta: Mapping[str, Any]) -> Source:
    frames = _FRAME.findall(meta.get("stack_trace") or "")
    modules = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    module = _ROOT.sub("", [path for path, _ in modules.values()][-1]) if modules else ""
    file, line = frames[-1] if frames else ("", 0)
    return Source(module, shown_path(file), int(line))


def _kind(index: int, value: Any, dying: Collection[int]) -> str:
    if index in dying:
        return "activation"
    return "parameter" if isinstance(value, torch.nn.Parameter) else "input"


def _input(recorder: Recorder, mode: FakeTensorMode, reference: GraphInput, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    fake = mode.from_tensor(value.detach(), static_shapes=True)
    recorder.add_referenced(reference, fake, reference.path)
    return fake


def _constant(recorder: Recorder, mode: FakeTensorMode, node: Node, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise CaptureError(
            f"{node.name} is a {type(value).__name__}, and constants of a graph can only be "
            "tensors; move it out of the compiled function",
            code="foreign_operator",
        )
    fake = mode.from_tensor(value.detach(), static_shapes=True)
    recorder.add_constant(fake, value)
    return fake


def _call(node: Node, values: Mapping[Node, Any]) -> Any:
    """Runs a node on fake tensors; the recorder sees what it calls."""
    target: Any = node.target
    args, kwargs = filled((node.args, node.kwargs), values)
    is_aten = isinstance(target, (OpOverload, Region)) or target is operator.getitem
    if not is_aten and any(
        isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))
    ):
        name = getattr(target, "__name__", str(target))
        raise CaptureError(
            f"{name} at {_source(node.meta)} is not a registered operator, so a graph that calls "
            "it cannot be planned; call it outside of the compiled function",
            code="foreign_operator",
            operator=name,
        )
    return target(*args, **kwargs)


def filled(nest: Any, values: Mapping[Node, Any]) -> Any:
    """The nest with every node replaced, made of plain lists, tuples and dictionaries."""
    return mapped(lambda leaf: values[leaf] if isinstance(leaf, Node) else leaf, nest)


def _result(recorder: Recorder, item: Any, values: Mapping[Node, Any]) -> Any:
    value = values[item] if isinstance(item, Node) else item
    return (
        Ref(recorder.leaving(value, "the graph's result"))
        if isinstance(value, torch.Tensor)
        else value
    )


def entering(program: Program, dying: Collection[int]) -> set[int]:
    """Storages of dying arguments that are no other argument's and no result's."""
    kept = {program.storage_of(slot) for slot in refs(program.result.leaves)}
    kept.update(
        program.storage_of(slot)
        for reference, slot in program.referenced
        if reference.index not in dying
    )
    return {
        program.storage_of(slot)
        for reference, slot in program.referenced
        if reference.index in dying
    } - kept
