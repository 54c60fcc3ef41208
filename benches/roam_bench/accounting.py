"""Accountings: rules by which the tensors of a graph are counted, if these are not the rules of a
real step. A graph names its rules (`Graph.accounting`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence

import roam

PAPER = "paper"


def paper(
    graph: roam.Graph, *, state_at_updates: bool = True, copies_may_wait: bool = True
) -> roam.Graph:
    """The same step as Shu et al. (arXiv 2310.19295) count it.

    Of a captured *first* step: parameters are a constant; optimizer state is made by the step and
    dies in it; inputs are made by an operator at its beginning, and they and the loss die at their
    last use; buffers, workspace, reuse and alignment do not count. Operators that neither make nor
    change a tensor (views, arithmetic with Python numbers) are left out, and what had to wait for
    one waits for what came before it. A copy that autograd takes of what an in-place ``hardtanh_``
    (ReLU6) is about to overwrite may also be taken afterwards, since the derivative can be told
    from the result: this is the only way in which the published MobileNetV2 figures are possible.

    Args:
        graph: a captured first step.
        state_at_updates: whether program order makes a parameter's optimizer state right before its
            update; else where the optimizer makes it, all before the first update.
        copies_may_wait: whether that holds for copies before an in-place ReLU6; else they are taken
            where autograd takes them.
    """
    builder = roam.GraphBuilder(graph.name, graph.device, 1)
    builder.accounting(PAPER)
    inputs = []
    for tensor in graph.tensors:
        is_input = tensor.kind == "input" and graph.creator(tensor.id) is None
        is_constant = tensor.kind == "parameter" or not (
            is_input or graph.creator(tensor.id) is not None
        )
        counted = not (tensor.kind == "buffer" or (is_input and not graph.users(tensor.id)))
        builder.tensor(
            tensor.name,
            tensor.size_bytes if counted else 0,
            kind=tensor.kind,
            residency="persistent" if is_constant else "step_local",
        )
        if is_input:
            inputs.append(tensor.id)
    builder.operator("input", creates=inputs, position=0)
    captured = _program_order(graph, state_at_updates, copies_may_wait)
    order = [operator for operator in captured if _does_something(graph, operator)]
    _add_operators(builder, graph, order, first_position=1)
    return builder.build()


def in_order(graph: roam.Graph, order: Sequence[int], *, fixed: bool = False) -> roam.Graph:
    """The same step, under the paper's accounting, with another program order.

    Args:
        graph: what :func:`paper` gives.
        order: its operators.
        fixed: whether no other order is permitted.
    """
    builder = roam.GraphBuilder(graph.name, graph.device, graph.alignment_bytes)
    builder.accounting(graph.accounting)
    for tensor in graph.tensors:
        builder.tensor(tensor.name, tensor.size_bytes, kind=tensor.kind, residency=tensor.residency)
    _add_operators(builder, graph, order)
    if fixed:
        for before, after in itertools.pairwise(order):
            builder.control(before, after)
    return builder.build()


def _add_operators(
    builder: roam.GraphBuilder, graph: roam.Graph, order: Sequence[int], first_position: int = 0
) -> None:
    """These operators in this program order, without what the paper does not count: workspace and
    reuse.
    """
    position_of = {operator: position for position, operator in enumerate(order, first_position)}
    number_of = {}
    for old in sorted(order):
        operator = graph.operator(old)
        number_of[old] = builder.operator(
            operator.name,
            phase=operator.phase,
            position=position_of[old],
            reads=operator.reads,
            creates=operator.creates,
            mutates=operator.mutates,
            sequence=operator.sequence,
            module=operator.module,
            file=operator.file,
            line=operator.line,
        )
    for before, after in _control(graph, number_of):
        builder.control(number_of[before], number_of[after])


def _does_something(graph: roam.Graph, operator: int) -> bool:
    """Whether it makes or changes a tensor, or keeps its place for another reason (random
    numbers).
    """
    found = graph.operator(operator)
    return bool(found.creates or found.mutates or found.sequence)


def _control(graph: roam.Graph, kept: Container[int]) -> Iterator[tuple[int, int]]:
    """The edges of control among the operators that are kept. An operator that is left out passes
    its constraints on.
    """
    for before, after in graph.control:
        if before in kept and after in kept:
            yield before, after
    stands_for: dict[int, set[int]] = {}
    for operator in graph.program_order.tolist():
        left_out = [before for before in graph.predecessors(operator) if before not in kept]
        passed_on = set().union(*(stands_for[before] for before in left_out))
        if operator in kept:
            yield from (
                (before, operator)
                for before in sorted(passed_on.difference(graph.predecessors(operator)))
            )
        else:
            stands_for[operator] = passed_on.union(
                set(graph.predecessors(operator)).difference(left_out)
            )


def _program_order(graph: roam.Graph, state_at_updates: bool, copies_may_wait: bool) -> list[int]:
    order: list[int] = graph.program_order.tolist()
    if state_at_updates:
        order = _with_late_state(graph, order)
    if not copies_may_wait:
        return order
    place = {operator: at for at, operator in enumerate(order)}
    for tensor in graph.tensors:
        copy, write = _copy_and_write(graph, tensor.id)
        if copy is not None and write is not None and place[write] == place[copy] + 1:
            place[copy], place[write] = place[write], place[copy]
    return sorted(order, key=place.__getitem__)


def _with_late_state(graph: roam.Graph, order: list[int]) -> list[int]:
    """Operators that only make optimizer state go right before the first user of what they make."""
    before: dict[int, list[int]] = defaultdict(list)
    moved = set()
    for tensor in graph.tensors:
        creator, users = graph.creator(tensor.id), graph.users(tensor.id)
        if (
            tensor.kind == "optimizer_state"
            and creator is not None
            and users
            and _is_free_to_move(graph, creator)
        ):
            before[users[0]].append(creator)
            moved.add(creator)
    return [
        one for operator in order if operator not in moved for one in (*before[operator], operator)
    ]


def _is_free_to_move(graph: roam.Graph, operator: int) -> bool:
    """Whether it reads nothing, or only the shape of a parameter (``zeros_like``), and changes
    nothing.
    """
    reads = graph.operator(operator).reads
    return not graph.operator(operator).mutates and all(
        graph.tensor(tensor).kind == "parameter" for tensor in reads
    )


def _copy_and_write(graph: roam.Graph, tensor: int) -> tuple[int | None, int | None]:
    """The operator that copies a tensor and the ``hardtanh_`` that then overwrites it, where there
    are such.
    """
    users = graph.users(tensor)
    names = [graph.operator(user).name for user in users]
    write = next((at for at, name in enumerate(names) if name.startswith("aten.hardtanh_.")), 0)
    if write and names[write - 1].startswith("aten.clone."):
        return users[write - 1], users[write]
    return None, None
