"""The one hypothesis strategy for graphs, shared by all tests.

It draws training steps with everything that orders operators or moves bytes: mutation, aliasing
(views as operators with control edges), reuse permissions, control edges, sequences, workspaces,
every residency and zero-size tensors. Numbers are shuffled against program positions, so that a
rule that looks at numbers shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

import roam

PHASES = ["forward", "loss", "backward", "update", "collective"]
# Few sizes, so that equal ones (which reuse needs) are common; 0 is a size like any other.
SIZES = [0, 1, 7, 64, 100, 128, 200, 256, 1000]


@dataclass
class _Draft:
    """What one operator of the drawn step will be."""

    reads: list[int] = field(default_factory=list)
    creates: list[int] = field(default_factory=list)
    mutates: list[int] = field(default_factory=list)
    reuse: list[tuple[int, int]] = field(default_factory=list)
    waits_for: set[int] = field(default_factory=set)


@st.composite
def graphs(draw: st.DrawFn, *, min_operators: int = 0, max_operators: int = 9) -> roam.Graph:
    """Draws a valid graph of `min_operators` to `max_operators` operators."""
    # (size, residency, alignment) of every tensor.
    tensors: list[tuple[int, str, int]] = []
    # What an operator may use: a tensor and the view's operator through which it is used, or None.
    operands: list[tuple[int, int | None]] = []
    for residency in draw(
        st.lists(st.sampled_from(["enters", "persistent"]), min_size=1, max_size=3)
    ):
        operands.append((len(tensors), None))
        tensors.append((draw(st.sampled_from(SIZES)), residency, 0))

    drafts: list[_Draft] = []
    for number in range(draw(st.integers(min_operators, max_operators))):
        draft = _Draft()
        drafts.append(draft)
        # Prefer what was made last: training steps are deep, and short lives make orders matter.
        recent = operands[-6:]
        used = draw(
            st.lists(st.sampled_from(recent), max_size=3, unique_by=lambda operand: operand[0])
        )
        for tensor, view in used:
            if view is not None:
                draft.waits_for.add(view)
            if draw(st.integers(0, 5)) == 0:
                draft.mutates.append(tensor)
                if draw(st.booleans()):
                    draft.reads.append(tensor)
            else:
                draft.reads.append(tensor)
        if draft.reads and not draft.mutates and draw(st.integers(0, 4)) == 0:
            operands.append((draft.reads[0], number))  # A view: it makes no tensor.
            continue
        for _ in range(draw(st.integers(0, 2))):
            sizes = [tensors[tensor][0] for tensor in draft.reads] or SIZES
            size = draw(st.sampled_from(sizes if draw(st.booleans()) else SIZES))
            residency = draw(st.sampled_from(["step_local"] * 4 + ["unpooled", "leaves"]))
            created = len(tensors)
            draft.creates.append(created)
            tensors.append((size, residency, draw(st.sampled_from([0, 0, 0, 128]))))
            operands.append((created, None))
    alignment = draw(st.sampled_from([1, 16, 64]))

    def counted(tensor: int) -> int:
        size, _, own = tensors[tensor]
        unit = max(alignment, own)
        return -(-size // unit) * unit

    for draft in drafts:
        for source in draft.reads:
            for target in draft.creates:
                local = tensors[source][1] == tensors[target][1] and tensors[source][1] in (
                    "step_local",
                    "unpooled",
                )
                if (
                    local
                    and source not in draft.mutates
                    and counted(source) == counted(target)
                    and draw(st.booleans())
                ):
                    draft.reuse.append((source, target))
    for number, draft in enumerate(drafts):
        if number and draw(st.integers(0, 5)) == 0:
            draft.waits_for.add(draw(st.integers(0, number - 1)))

    operator_numbers = draw(st.permutations(range(len(drafts))))
    tensor_numbers = draw(st.permutations(range(len(tensors))))
    builder = roam.GraphBuilder("drawn", alignment_bytes=alignment)
    for tensor in _inverse(tensor_numbers):
        size, residency, own = tensors[tensor]
        builder.tensor(f"t{tensor}", size, residency=residency, alignment_bytes=own)

    def renamed(listed: Sequence[int]) -> list[int]:
        return [tensor_numbers[tensor] for tensor in listed]

    for position in _inverse(operator_numbers):
        draft = drafts[position]
        builder.operator(
            f"op{position}",
            position=position,
            reads=renamed(draft.reads),
            creates=renamed(draft.creates),
            mutates=renamed(draft.mutates),
            reuse=[
                (tensor_numbers[source], tensor_numbers[target]) for source, target in draft.reuse
            ],
            workspace_bytes=draw(st.sampled_from([0, 0, 0, 50, 300])),
            phase=draw(st.sampled_from(PHASES)),
            sequence=draw(st.sampled_from([None, None, None, "random", "collective"])),
            module=draw(st.sampled_from(["", "layer.0"])),
            file="train.py",
            line=position + 1,
        )
    for position, draft in enumerate(drafts):
        for earlier in draft.waits_for:
            builder.control(operator_numbers[earlier], operator_numbers[position])
    return builder.build()


def _inverse(permutation: Sequence[int]) -> list[int]:
    """Where each value stands: the old numbers in the order of the new ones."""
    return sorted(range(len(permutation)), key=permutation.__getitem__)


def renumbered(
    graph: roam.Graph,
    operator_numbers: Sequence[int],
    tensor_numbers: Sequence[int],
    rename: Callable[[str], str] = lambda name: name,
) -> roam.Graph:
    """The same step under other numbers and names; program positions stay.

    Args:
        operator_numbers: the new number of every operator, a permutation.
        tensor_numbers: the new number of every tensor, a permutation.
        rename: the new name for a name.
    """
    builder = roam.GraphBuilder(rename(graph.name), graph.device, graph.alignment_bytes)
    for old in _inverse(tensor_numbers):
        tensor = graph.tensor(old)
        builder.tensor(
            rename(tensor.name),
            tensor.size_bytes,
            kind=tensor.kind,
            residency=tensor.residency,
            alignment_bytes=tensor.alignment_bytes,
        )
    for old in _inverse(operator_numbers):
        operator = graph.operator(old)
        builder.operator(
            rename(operator.name),
            position=operator.position,
            reads=[tensor_numbers[tensor] for tensor in operator.reads],
            creates=[tensor_numbers[tensor] for tensor in operator.creates],
            mutates=[tensor_numbers[tensor] for tensor in operator.mutates],
            reuse=[
                (tensor_numbers[source], tensor_numbers[target])
                for source, target in operator.reuse
            ],
            workspace_bytes=operator.workspace_bytes,
            phase=operator.phase,
            sequence=operator.sequence,
            module=rename(operator.module),
            file=rename(operator.file),
            line=operator.line,
        )
    for before, after in graph.control:
        builder.control(operator_numbers[before], operator_numbers[after])
    return builder.build()
