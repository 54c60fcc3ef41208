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
from roam.state.argument_sizes import Layout
from roam.state.nests import mapped
from roam.torch_compat.private import (
    FakeTensorMode,
    OpOverload,
    c_pointer,
    disable_current_modes,
    pytree,
)
from roam.tracing.compiled.region_operators import Region
from roam.tracing.fake_kernels.cache import FakeKernels
from roam.tracing.fake_kernels.sized import SizedKernels, recorded_number
from roam.tracing.fake_kernels.tensors import Maker
from roam.tracing.fakes.fake_mode import quiet_fakes
from roam.tracing.recording.recorder import Recorder
from roam.tracing.source_location import shown_path

aten = torch.ops.aten
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_ROOT = re.compile(r"^\w+\['\w+'\]\.?")
"""What Dynamo puts before a module's path."""
_METADATA: dict[Any, Callable[..., Any]] = {
    aten.sym_size.int: lambda tensor, dim: tensor.shape[dim],
    aten.sym_stride.int: lambda tensor, dim: tensor.stride()[dim],
    aten.sym_numel.default: lambda tensor: tensor.numel(),
    aten.sym_storage_offset.default: lambda tensor: tensor.storage_offset(),
}
"""Operators that ask for sizes, each with what gives them."""


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A tensor among a graph's arguments, by its place."""

    index: int
    path: str
    kind: str


def record_graph(
    graph: GraphModule,
    args: Sequence[Any],
    *,
    phase: str,
    dying: Collection[int] = (),
    sized: SizedKernels | None = None,
    layouts: Mapping[int, Layout] | None = None,
) -> Program:
    """The program of a graph for arguments like these. Kernels are run only on zeros, to find how
    they lay out their results.

    Args:
        graph: functional aten calls, save for the copies into changed arguments at its end.
        args: a call's arguments. Shapes, strides and numbers are taken from them, and which of them
            share memory.
        phase: ``"forward"`` or ``"backward"``.
        dying: places of the arguments that nothing holds after their last use.
        sized: makes what follows from the symbols of sizes; None if all sizes are numbers.
        layouts: how some of the arguments are to lie, by their places, instead of as they do.

    Raises:
        OneLength: the graph needs the value of a size itself.
        CaptureError: what cannot be recorded exactly.
    """
    places = NodePlaces(lambda _: phase)
    kernels = FakeKernels(asks=True)
    recorder = Recorder(places, [], kernels, sized=sized)
    values: dict[Node, Any] = {}
    with torch.inference_mode(False), torch.no_grad(), disable_current_modes(), quiet_fakes():
        mode = FakeTensorMode()
        if sized is not None:
            sized.enter(kernels, mode)
        inputs = _Inputs(mode, sized, layouts or {})
        remaining = iter(enumerate(args))
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                index, value = next(remaining)
                values[node] = inputs.given(index, value)
                if isinstance(value, torch.Tensor):
                    reference = GraphInput(index, node.name, _kind(index, value, dying))
                    recorder.add_referenced(reference, values[node], reference.path)
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


class _Inputs:
    """What stands for a graph's arguments while it is recorded.

    Args:
        mode: the mode of fakes.
        sized, layouts: as of `record_graph`.
    """

    def __init__(
        self, mode: FakeTensorMode, sized: SizedKernels | None, layouts: Mapping[int, Layout]
    ) -> None:
        self._mode, self._sized, self._layouts = mode, sized, layouts
        self._maker = Maker()
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Those of arguments that are to lie otherwise, by the storages that these have."""

    def given(self, place: int, value: Any) -> Any:
        """What stands for the argument at a place."""
        if not isinstance(value, torch.Tensor):
            if place in self._layouts:
                return self._layouts[place].shape[0]
            return value if self._sized is None else self._sized.numbers.get(place, value)
        if place in self._layouts:
            return self._resized(value, self._layouts[place])
        fake = self._mode.from_tensor(value.detach(), static_shapes=True)
        return fake if self._sized is None else self._sized.argument(value, fake)

    def _resized(self, value: torch.Tensor, layout: Layout) -> Any:
        storage = self._storages.setdefault(
            c_pointer(value.untyped_storage()),
            torch.UntypedStorage(layout.size_bytes, device="meta"),
        )
        meta = torch.empty(0, dtype=value.dtype, device="meta")
        meta.set_(storage, layout.offset, layout.shape, layout.stride)
        return self._maker.make(self._mode, meta, value.device)


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
    if target in _METADATA:
        return _METADATA[target](*args)
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
    if isinstance(value, torch.Tensor):
        return Ref(recorder.leaving(value, "the graph's result"))
    number = recorded_number(value)
    return value if number is None else number


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
