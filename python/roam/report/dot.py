"""A step as a Graphviz graph: one node for all operators of a phase in identical layers."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from roam.report.folding import folded
from roam.report.table import format_bytes

if TYPE_CHECKING:
    from roam._core import Operator
    from roam.report.anatomy import Planned

_Node = tuple[str, str]


def dot(planned: Planned) -> str:
    """The graph as it was captured, in the language DOT. Edges carry the bytes that go along them:
    a tensor counts once for each node that uses it.
    """
    graph = planned.as_written
    modules: defaultdict[_Node, set[str]] = defaultdict(set)
    operators, made, passed = Counter[_Node](), Counter[_Node](), Counter[tuple[_Node, _Node]]()
    for operator in graph.operators:
        node = _node(operator)
        modules[node].add(operator.module)
        operators[node] += 1
    for tensor in graph.tensors:
        creator = graph.creator(tensor.id)
        if creator is None:
            continue
        source = _node(graph.operator(creator))
        made[source] += tensor.counted_bytes
        for target in {_node(graph.operator(user)) for user in graph.users(tensor.id)} - {source}:
            passed[source, target] += tensor.counted_bytes
    names = {node: f"n{number}" for number, node in enumerate(sorted(operators))}
    return "\n".join(_lines(graph.name, names, modules, operators, made, passed)) + "\n"


def _node(operator: Operator) -> _Node:
    return operator.phase, folded(operator.module)


def _lines(
    name: str,
    names: dict[_Node, str],
    modules: dict[_Node, set[str]],
    operators: Counter[_Node],
    made: Counter[_Node],
    passed: Counter[tuple[_Node, _Node]],
) -> Iterator[str]:
    yield f"digraph {_quoted(name)} {{"
    yield '  node [shape=box, fontname="sans-serif"];'
    yield '  edge [fontname="sans-serif"];'
    for number, phase in enumerate(sorted({phase for phase, _ in names})):
        yield f"  subgraph cluster_{number} {{"
        yield f"    label={_quoted(phase)};"
        for node, short in names.items():
            if node[0] == phase:
                layers = len(modules[node])
                title = (node[1] or "no module") + (f" ({layers:,} layers)" if layers > 1 else "")
                text = f"{title}\n{operators[node]:,} operators, {format_bytes(made[node])} made"
                yield f"    {short} [label={_quoted(text)}];"
        yield "  }"
    for (source, target), size_bytes in sorted(passed.items()):
        label = _quoted(format_bytes(size_bytes))
        yield f"  {names[source]} -> {names[target]} [label={label}, tooltip={_quoted(f'{size_bytes} bytes')}];"
    yield "}"


def _quoted(text: str) -> str:
    """A string of DOT. Backslashes in it would be escapes of labels."""
    return json.dumps(text.replace("\\", "/"), ensure_ascii=False)
