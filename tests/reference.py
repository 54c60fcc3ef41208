"""The memory model once more, in plain Python and straight from its definition: slow, and shares
nothing with Rust."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations

import roam


def _round_up(size_bytes: int, unit: int) -> int:
    return -(-size_bytes // unit) * unit


class Reference:
    """What a graph means: who must run before whom, what is alive when, and the least peak there
    is."""

    def __init__(self, graph: roam.Graph, *, reuse: bool = False) -> None:
        self.graph = graph
        self.reuse = reuse
        self.everything = (1 << graph.num_operators) - 1
        #: Per operator the operators that must run before it, as bits; not all of them direct.
        self.before = self._constraints()
        unit = graph.alignment_bytes
        #: Counted bytes per tensor and per operator's workspace.
        self.bytes = [
            _round_up(tensor.size_bytes, max(unit, tensor.alignment_bytes))
            for tensor in graph.tensors
        ]
        self.workspaces = [
            _round_up(operator.workspace_bytes, unit) for operator in graph.operators
        ]
        #: Per tensor who reads or mutates it, and who makes it, as bits.
        self.users = [0] * graph.num_tensors
        self.creators = [0] * graph.num_tensors
        for operator in graph.operators:
            for tensor in (*operator.reads, *operator.mutates):
                self.users[tensor] |= 1 << operator.id
            for tensor in operator.creates:
                self.creators[tensor] |= 1 << operator.id

    def _constraints(self) -> list[int]:
        graph = self.graph
        before = [0] * graph.num_operators
        operators = graph.operators

        def demand(first: roam.Operator, second: roam.Operator) -> None:
            before[second.id] |= 1 << first.id

        for first in operators:
            for second in operators:
                if first.position >= second.position:
                    continue
                written = {*first.creates, *first.mutates}
                rewritten = {*second.creates, *second.mutates}
                accessed = {*first.reads, *written}
                accessed_later = {*second.reads, *rewritten}
                same_sequence = first.sequence is not None and first.sequence == second.sequence
                if written & accessed_later or accessed & rewritten or same_sequence:
                    demand(first, second)
        for earlier, later in graph.control:
            demand(operators[earlier], operators[later])
        return before

    def alive(self, done: int, operator: int) -> set[int]:
        """Tensors (persistent ones aside) that exist while `operator` runs after the operators in
        `done`."""
        found = set()
        for tensor in self.graph.tensors:
            users, creators = self.users[tensor.id], self.creators[tensor.id]
            still_used = bool(users & ~done)
            match tensor.residency:
                case "enters":
                    exists = still_used or (not users and done == 0)
                case "leaves" | "step_local" | "unpooled":
                    stays = tensor.residency == "leaves"
                    exists = creators == 1 << operator or bool(
                        creators & done and (stays or still_used)
                    )
                case _:
                    exists = False
            if exists:
                found.add(tensor.id)
        return found

    def live_bytes(self, done: int, operator: int) -> int:
        """Bytes in use while `operator` runs after the operators in `done`, the best reuse there
        taken."""
        return sum(self._live_parts(done, operator))

    def _live_parts(self, done: int, operator: int) -> tuple[int, int]:
        """The same, apart: step-local tensors, and everything else."""
        alive = self.alive(done, operator)
        pool = {tensor for tensor in alive if self.graph.tensor(tensor).residency == "step_local"}
        in_pool, outside = (
            sum(self.bytes[tensor] for tensor in part) for part in (pool, alive - pool)
        )
        if self.reuse:
            in_pool -= self._saved(done, operator, "step_local")
            outside -= self._saved(done, operator, "unpooled")
        return in_pool, outside + self.workspaces[operator]

    def _saved(self, done: int, operator: int, residency: str) -> int:
        after = done | 1 << operator
        permitted = self.graph.operator(operator).reuse
        possible = [
            (source, target)
            for source, target in permitted
            if not self.users[source] & ~after and self.graph.tensor(source).residency == residency
        ]
        best = 0
        for count in range(1, len(possible) + 1):
            for pairs in combinations(possible, count):
                sources, targets = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
                if len(sources) == len(targets) == count:
                    best = max(best, sum(self.bytes[target] for target in targets))
        return best

    def profile(self, order: Iterable[int]) -> list[int]:
        """Live bytes at every step of an order."""
        done, live = 0, []
        for operator in order:
            live.append(self.live_bytes(done, operator))
            done |= 1 << operator
        return live

    def permits(self, order: Sequence[int]) -> bool:
        """Whether the order is a permutation that keeps all constraints."""
        done = 0
        for operator in order:
            if self.before[operator] & ~done or done >> operator & 1:
                return False
            done |= 1 << operator
        return done == self.everything

    def least_peak(self) -> int:
        """The least peak over all orders that the graph permits.

        What is live at a step depends on which operators ran before, not on their order; so of the
        orders that share a beginning set only the best beginning matters, and every order is
        weighed.
        """

        @cache
        def least(done: int) -> int:
            if done == self.everything:
                return 0
            peaks = []
            for operator in range(self.graph.num_operators):
                if not done >> operator & 1 and not self.before[operator] & ~done:
                    peaks.append(max(self.live_bytes(done, operator), least(done | 1 << operator)))
            return min(peaks)

        return least(0)

    def least_total(self) -> int:
        """The least sum of the two peaks, of step-local tensors and of everything else, over all
        orders.

        As :meth:`least_peak`, but of the endings of an order all are kept whose pair of peaks no
        other undercuts.
        """

        @cache
        def least(done: int) -> frozenset[tuple[int, int]]:
            if done == self.everything:
                return frozenset({(0, 0)})
            found = set()
            for operator in range(self.graph.num_operators):
                if not done >> operator & 1 and not self.before[operator] & ~done:
                    pool, outside = self._live_parts(done, operator)
                    found |= {
                        (max(pool, p), max(outside, o)) for p, o in least(done | 1 << operator)
                    }
            return frozenset(
                one
                for one in found
                if not any(p <= one[0] and o <= one[1] for p, o in found - {one})
            )

        return min(map(sum, least(0)))

    def takes(self, total: int) -> bool:
        """Whether some order and some layout of its step-local tensors take at most `total` bytes
        beside the persistent ones. Without reuse.

        Some smallest layout has every tensor at 0 or right above another, rounded up to its own
        alignment; they are placed from the lowest offset up.
        """
        assert not self.reuse
        graph = self.graph
        step_local = {t.id for t in graph.tensors if t.residency == "step_local"}

        def fits(meets: dict[int, set[int]], limit: int) -> bool:
            def place(offsets: dict[int, int]) -> bool:
                if len(offsets) == len(meets):
                    return True
                last = max(offsets.values(), default=0)
                for tensor in meets.keys() - offsets.keys():
                    unit = max(graph.alignment_bytes, graph.tensor(tensor).alignment_bytes)
                    ends = [offsets[o] + self.bytes[o] for o in meets[tensor] & offsets.keys()]
                    offset = _round_up(max(ends, default=0), unit)
                    is_next = last <= offset <= limit - self.bytes[tensor]
                    if is_next and place({**offsets, tensor: offset}):
                        return True
                return False

            return place({})

        def walk(done: int, outside: int, meets: dict[int, set[int]]) -> bool:
            if done == self.everything:
                return fits(meets, total - outside)
            for operator in range(graph.num_operators):
                if done >> operator & 1 or self.before[operator] & ~done:
                    continue
                pool, beside = self._live_parts(done, operator)
                alive = self.alive(done, operator) & step_local
                now = {
                    t: meets.get(t, set()) | (alive - {t} if t in alive else set())
                    for t in {*meets, *alive}
                }
                most = max(outside, beside)
                if pool + most <= total and walk(done | 1 << operator, most, now):
                    return True
            return False

        return total >= 0 and walk(0, 0, {})
