"""The cost of other ways to split a model, by the same cost model: Megatron's plan, made by a
rule, and an integer program in which all layers choose apart.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from roam.sharding.nodes import Node
from roam.sharding.planning import WORK
from roam.sharding.search import Problem, is_whole
from roam.sharding.trace import Trace
from roam_bench.results import Record, Row
from roam_bench.run import Column, Table
from roam_bench.whole_program.linear import Program, Solver, Sum, solve

SOLVERS: tuple[Solver, ...] = ("highs", "cbc")
_TIME_LIMIT_S, _THREADS = 120, 2


# -- Megatron's plan


def megatron_plan(trace: Trace, model: Any) -> dict[str, str] | None:
    """Paths of modules to styles of transformers, as Megatron splits a transformer: in each module
    that has linear layers, the last ones by rows, those that feed them by columns, and earlier ones
    not at all; the table of words and the head by words.

    Args:
        trace: of a step of the model.
        model: one of transformers.

    Returns:
        The plan; None if no linear layer feeds another, or the model has no table and head.
    """
    nothing: frozenset[str] = frozenset()
    feeds: dict[str, set[str]] = {}
    made_of: dict[int, frozenset[str]] = {}
    """Per value, the linear layers whose results it is made of with no such layer in between."""
    for operator in trace.operators:
        layers = nothing.union(*(made_of.get(slot, nothing) for slot in operator.inputs))
        call = trace.calls[operator.call] if operator.call >= 0 else None
        if call is not None and isinstance(call.module, torch.nn.Linear):
            for layer in layers - {call.path}:
                if _parent(layer) == _parent(call.path):
                    feeds.setdefault(layer, set()).add(call.path)
            layers = frozenset((call.path,))
        made_of.update((slot, layers) for slot in operator.outputs if slot is not None)
    rows = set[str]().union(*feeds.values()) - feeds.keys()
    plan = dict.fromkeys(rows, "rowwise")
    plan |= {layer: "colwise" for layer, fed in feeds.items() if fed <= rows}
    paths = {module: path for path, module in model.named_modules()}
    try:
        table = paths[model.get_input_embeddings()]
        head = paths[model.get_output_embeddings()]
    except (KeyError, NotImplementedError):
        return None
    return {**plan, table: "embedding_rowwise", head: "colwise_gather_output"} if plan else None


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


# -- the integer program


def program_of(nodes: Sequence[Node]) -> Program:
    """The choice of an option for each node as an integer program: a column for every option of
    every node, in order; its start is the choice in which every rank does all.
    """
    program = Program()
    columns = []
    for node in nodes:
        own = [
            program.column(0, 1, int(is_whole(option)), integer=True, cost=option.ns)
            for option in node.options
        ]
        columns.append(own)
        _equal(program, own, [], constant=1)
    for node, own in zip(nodes, columns, strict=True):
        for place, source in enumerate(node.sources):
            if source is None:
                continue
            first, output = source
            given = [option.outputs[output] for option in nodes[first].options]
            taken = [option.inputs[place] for option in node.options]
            for state in {*given, *taken}:
                _equal(
                    program,
                    [at for at, one in zip(columns[first], given, strict=True) if one == state],
                    [at for at, one in zip(own, taken, strict=True) if one == state],
                )
    return program


def _equal(program: Program, some: Sequence[int], others: Sequence[int], constant: int = 0) -> None:
    """Demands that the sum of some columns is that of others and a constant."""
    terms = Sum(-constant)
    for column in some:
        terms.add(column, 1)
    for column in others:
        terms.add(column, -1)
    program.row(terms, "=")


def measure(nodes: Sequence[Node], solver: Solver) -> Row:
    """Solve one problem by the search, and by the integer program.

    Returns:
        ``nodes``; ``ns`` and ``search_s`` of the search with its bound; ``columns`` and ``rows`` of
        the program, ``program_s`` of solving it in a process of its own, ``program_ns`` (the best
        choice that it found, None if it found none), ``program_bound_ns``, and ``is_finished``.
    """
    start = time.perf_counter()
    choice = Problem(nodes).search(WORK)
    search_s = time.perf_counter() - start
    assert choice is not None
    program = program_of(nodes)
    start = time.perf_counter()
    answer = solve(program, solver, _TIME_LIMIT_S, _THREADS)
    program_s = time.perf_counter() - start
    program_ns = None
    if answer.values is not None:
        values = [round(value) for value in answer.values]
        if program.admits(values):
            program_ns = sum(map(int.__mul__, program.cost, values))
    return {
        "nodes": len(nodes),
        "ns": choice.ns,
        "bound_ns": choice.bound_ns,
        "search_s": search_s,
        "columns": len(program.cost),
        "rows": len(program.ends),
        "program_s": program_s,
        "program_ns": program_ns,
        "program_bound_ns": answer.bound,
        "is_finished": answer.finished,
    }


def programs_table(record: Record) -> Table:
    """Every problem and solver."""
    return Table("Beside an integer program", COLUMNS, record["rows"])


COLUMNS = (
    Column("architecture", lambda row: row["architecture"], right=False),
    Column("layers", lambda row: str(row["layers"])),
    Column("nodes", lambda row: f"{row['nodes']:,}"),
    Column("found, ms", lambda row: f"{row['ns'] / 1e6:,.3f}"),
    Column("search and bound, s", lambda row: f"{row['search_s']:.3f}"),
    Column("columns", lambda row: f"{row['columns']:,}"),
    Column("solver", lambda row: row["solver"], right=False),
    Column(
        "its best, ms",
        lambda row: "-" if row["program_ns"] is None else f"{row['program_ns'] / 1e6:,.3f}",
    ),
    Column("proved least", lambda row: "yes" if row["is_finished"] else "no", right=False),
    Column("seconds", lambda row: f"{row['program_s']:.1f}"),
)
