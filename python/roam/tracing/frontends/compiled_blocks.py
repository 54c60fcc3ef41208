"""Compiles the repeated blocks of a graph of AOTAutograd's by Inductor.

Each node is marked with the module that it comes from, in backward graphs too. Nodes of a block
that can run one after another become one call of a compiled region. Equal pieces share their
kernels.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from roam.errors import CaptureError
from roam.kernels.workspace import settings
from roam.torch_compat.private import OpOverload, compiled_graph, disable_current_modes, schema_of
from roam.tracing.compiled.region_operators import Region, Unknown, region_of
from roam.tracing.fakes.fake_mode import StandIns, new_mode
from roam.tracing.frontends.aot import filled

_ITEM = re.compile(r"^(.+)[.\[](\d+)\]?$")
"""The path of a module in a list of modules."""
_LEAST_KERNELS = 2
"""A piece with fewer is left as it is: there is nothing to fuse."""

_compiled: dict[object, Any] = {}
"""Graphs of Inductor's, by the text of the piece and the metadata of what it is given."""


def with_compiled_blocks(module: GraphModule, args: Sequence[Any]) -> GraphModule:
    """The graph with its repeated blocks compiled; the same graph if it has none.

    A repeated block is a call of a module that has children and is one of at least two of its class
    in a list of modules. If blocks are nested, the outermost is taken.

    Args:
        module: functional aten calls, save for the copies into changed arguments at its end.
        args: a call's arguments, real or fake. Pieces are compiled for their shapes and strides.

    Raises:
        CaptureError: a piece cannot be compiled (code ``compiled_region``).
    """
    block_of = _blocks(module)
    if not block_of:
        return module
    made = Graph()
    copies: dict[Node, Any] = {}
    values: dict[Node, Any] = {}
    with torch.inference_mode(False), torch.no_grad(), disable_current_modes():
        stand_ins = StandIns(new_mode())
        remaining = iter(args)
        for node in module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                copies[node] = made.node_copy(node)
                value = (
                    next(remaining) if node.op == "placeholder" else getattr(module, node.target)
                )
                values[node] = stand_ins.of(value, node.name)
        for piece in _pieces(module, block_of):
            if piece[0] in block_of and _is_worth_it(piece, values):
                _add_compiled(made, piece, copies, values, stand_ins)
                continue
            for node in piece:
                copies[node] = made.node_copy(node, copies.__getitem__)
                _run(node, values, stand_ins)
    output = module.graph.output_node()
    made.output(map_arg(output.args[0], copies.__getitem__)).meta.update(output.meta)
    return GraphModule(module, made)


def _blocks(module: GraphModule) -> dict[Node, Hashable]:
    """For each node of a repeated block, the call of a block that it is part of."""
    stacks = {node: _stack(node) for node in module.graph.nodes if _is_usable(node)}
    found: dict[object, set[str]] = {}
    with_children: set[object] = set()
    for stack in stacks.values():
        for place, (_, path, kind) in enumerate(stack):
            item = _ITEM.match(path)
            if item is not None:
                found.setdefault((item[1], kind), set()).add(path)
                if place + 1 < len(stack):
                    with_children.add((item[1], kind))
    repeated = {
        path
        for name, paths in found.items()
        if len(paths) > 1 and name in with_children
        for path in paths
    }
    given_nodes = module.graph.find_nodes(op="placeholder")
    is_backward = any("tangents" in str(node.target) for node in given_nodes)
    block_of: dict[Node, Hashable] = {}
    for node, stack in stacks.items():
        calls = [call for call, path, _ in stack if path in repeated]
        givers = [given for given in node.all_input_nodes if given in stacks]
        if node.target is operator.getitem:
            calls = [block_of[given] for given in givers if given in block_of]
        elif is_backward and node.target is torch.ops.aten.add.Tensor and not stack:
            # Autograd's sum of the gradients of a value that a block uses twice.
            calls = [block_of[given] for given in reversed(givers) if given in block_of]
        if calls:
            block_of[node] = calls[0]
    return block_of


def _stack(node: Node) -> list[tuple[Hashable, str, object]]:
    """The modules that a node comes from, outermost first: which call, the path, the class."""
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [(call, path, kind) for call, (path, kind) in modules.items()]


def _is_usable(node: Node) -> bool:
    """Whether Inductor may have a node: one of PyTorch's own operators that changes nothing."""
    is_number = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
    if node.op != "call_function" or is_number:
        return False
    target = node.target
    is_aten = isinstance(target, OpOverload) and target.namespace == "aten"
    return target is operator.getitem or (is_aten and not _changes(node))


def _changes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _is_kernel(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and not node.target.is_view


def _is_worth_it(piece: list[Node], values: dict[Node, Any]) -> bool:
    """Whether there is something to fuse, of tensors that the piece is given."""
    given = [one for node in piece for one in node.all_input_nodes]
    return sum(map(_is_kernel, piece)) >= _LEAST_KERNELS and any(
        isinstance(values.get(one), torch.Tensor) for one in given
    )


def _pieces(module: GraphModule, block_of: dict[Node, Hashable]) -> Iterator[list[Node]]:
    """The functions of a graph, in an order in which those of one block follow each other as far as
    they can. Functions of a block that follow each other come as one list. A function that changes
    an argument stays where it is.
    """
    stretch: list[Node] = []
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if _changes(node):
            yield from _sorted(stretch, block_of)
            yield [node]
            stretch = []
        else:
            stretch.append(node)
    yield from _sorted(stretch, block_of)


def _sorted(nodes: list[Node], block_of: dict[Node, Hashable]) -> Iterator[list[Node]]:
    place = {node: number for number, node in enumerate(nodes)}
    waits = {node: sum(given in place for given in node.all_input_nodes) for node in nodes}
    ready = [number for number, node in enumerate(nodes) if not waits[node]]
    of_block: dict[Hashable, list[int]] = {}
    for number in ready:
        of_block.setdefault(block_of.get(nodes[number]), []).append(number)
    done: set[int] = set()
    while ready:
        first = heappop(ready)
        if first in done:
            continue
        block = block_of.get(nodes[first])
        piece: list[Node] = []
        queue = of_block[block] if block is not None else [first]
        while queue:
            number = heappop(queue)
            done.add(number)
            piece.append(nodes[number])
            for user in nodes[number].users:
                if user in waits:
                    waits[user] -= 1
                    if not waits[user]:
                        heappush(ready, place[user])
                        heappush(of_block.setdefault(block_of.get(user), []), place[user])
        yield piece


def _run(node: Node, values: dict[Node, Any], stand_ins: StandIns) -> None:
    args, kwargs = filled((node.args, node.kwargs), values)
    function: Any = node.target
    with stand_ins.mode:
        values[node] = function(*args, **kwargs)


def _add_compiled(
    made: Graph,
    piece: list[Node],
    copies: dict[Node, Any],
    values: dict[Node, Any],
    stand_ins: StandIns,
) -> None:
    """Adds one call for the nodes of a piece, and what takes its results apart."""
    inside = set(piece)
    given = dict.fromkeys(
        one for node in piece for one in node.all_input_nodes if one not in inside
    )
    tensors = [one for one in given if isinstance(values[one], torch.Tensor)]
    results = [
        node
        for node in piece
        if any(user not in inside for user in node.users) and not _is_taken_apart(node)
    ]
    alone = Graph()
    inner: dict[Node, Any] = {one: values[one] for one in given}
    inner |= {one: alone.placeholder(f"a{number}") for number, one in enumerate(tensors)}
    for node in piece:
        args, kwargs = map_arg((node.args, node.kwargs), inner.__getitem__)
        inner[node] = alone.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    alone.output([inner[node] for node in results])
    fakes = [values[one] for one in tensors]
    region = _region(GraphModule({}, alone), fakes, piece[0])
    with stand_ins.mode:
        outcomes = region(fakes)
    call = made.call_function(region, ([copies[one] for one in tensors],))
    call.meta.update({key: piece[0].meta[key] for key in _KEPT if key in piece[0].meta})
    for number, (node, value) in enumerate(zip(results, outcomes, strict=True)):
        copies[node] = made.call_function(operator.getitem, (call, number))
        copies[node].meta.update(call.meta)
        values[node] = value


_KEPT = (
    "nn_module_stack", "fwd_nn_module_stack", "stack_trace", "autograd_backward", "partitioner_tag",
)  # fmt: skip
"""What is known of a node that tells its source and phase."""


def _is_taken_apart(node: Node) -> bool:
    """Whether a node has several results: others use these one by one."""
    return any(user.target is operator.getitem for user in node.users)


def _region(alone: GraphModule, fakes: list[Any], first: Node) -> Region:
    metas = [(tuple(one.shape), one.stride(), one.dtype, one.device) for one in fakes]
    key = alone.code, repr(metas), settings()
    try:
        if key not in _compiled:
            _compiled[key] = compiled_graph(alone, fakes)
        return region_of(_compiled[key], _compiled[key], fakes)
    except Unknown as unknown:
        reason = str(unknown)
    except Exception as error:  # noqa: BLE001 - whatever compilers raise
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    path = _stack(first)[-1][1] if _stack(first) else first.name
    raise CaptureError(
        f"Inductor cannot compile the block with {path}: {reason}; leave kernels='inductor' out",
        code="compiled_region",
        operator=first.name,
    )
