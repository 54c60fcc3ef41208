"""Lowers a recorded program to the planner's graph: call `i` becomes operator `i`."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol

import torch
from torch.utils.flop_counter import flop_registry

from roam._core import Graph, GraphBuilder
from roam.distributed.collectives import is_collective, is_launch
from roam.program.barrier import barrier, barriers
from roam.program.diff import has_same_structure
from roam.program.early_checks import needed_by
from roam.program.effects import Assemble, rebound
from roam.program.expand import expand
from roam.program.ir import TRANSFERS, Call, Program, Ref, substitute
from roam.program.links import links_of, times_ns
from roam.program.offload import Offer, offers, with_offers
from roam.program.operators import is_ours, is_region
from roam.program.overlap import overlapped, with_overlap
from roam.program.pages import Arrived, Fetch, Keep, Left, Pages, Put
from roam.program.paging import Page, pages_of, with_pages
from roam.program.random_states import with_states
from roam.program.releases import Release
from roam.program.repeatable import Repeat, repeats
from roam.program.tier import Load, Store, Tier
from roam.program.user_checkpoints import undone


class WritesResults(Protocol):
    """What the planner has to know about a call whose kernel can write its results to planned
    places.
    """

    @property
    def in_place(self) -> tuple[tuple[int, int], ...]:
        """(slot of an argument, slot of a result): if it dies in the call, the argument may give
        its memory to the result.
        """

    @property
    def workspace_bytes(self) -> int:
        """What the kernel takes while it runs."""

    @property
    def by_rows(self) -> bool:
        """Whether it computes its results piece by piece and copies the pieces. A plan chooses
        whether it does.
        """

    def renamed(self, names: Mapping[int | None, int | None]) -> WritesResults:
        """The same for a run of the call on other slots."""


class TimesCopies(Protocol):
    """What the planner has to know about the way to files and back."""

    def time_ns(self, size_bytes: int, *, is_read: bool) -> int:
        """Nanoseconds to read or write so many bytes, at least 1."""


_HANDLE_BYTES = 1
"""What a tensor in a file counts."""
Residency = Literal["persistent", "enters", "leaves", "unpooled", "step_local"]


@dataclass(frozen=True, slots=True)
class _Operator:
    """What one call is in every graph of its program."""

    name: str
    reads: list[int]
    mutates: list[int]
    creates: list[int]
    waits: list[int]
    """Calls that it comes after and shares no memory with."""
    flops: int


@dataclass(frozen=True, slots=True)
class _Offered:
    """What `Lowering.offering` was asked for."""

    lowering: Lowering
    chosen: Sequence[Offer]
    tier: Tier
    placed: Callable[[Call], WritesResults]
    time_ns: Callable[[int], int]


class Lowering:
    """A program, ready to become graphs that differ in where its results lie.

    A storage becomes a tensor, whatever number of views it has. A view or a live number has no
    memory of its own: its operator creates nothing, and a control edge leads from it to each
    operator that uses it.

    Args:
        program: the program.
        placed: per call, what `placed_calls` says of it.
        name: the graphs' name.
        device: the graphs' device.
        workspaces: per call, the bytes that its kernel takes beyond its results while it runs,
            where that is known.
        releases: per call, what it frees while it runs.
        notes: what to tell people about the graphs.
        estimate: what the graphs may be wrong about; empty if they are exact.
        like: an earlier program, lowered. If this program is the same one for other sizes,
            everything that does not depend on sizes is taken from there.
    """

    def __init__(
        self,
        program: Program,
        placed: Sequence[WritesResults | None],
        *,
        name: str,
        device: str,
        workspaces: Mapping[int, int] | None = None,
        releases: Mapping[int, Sequence[Release]] | None = None,
        notes: Sequence[tuple[str, str]] = (),
        estimate: str = "",
        like: Lowering | None = None,
    ) -> None:
        self.program = program
        self.placed = placed
        self._name, self._device, self._notes, self._estimate = name, device, notes, estimate
        self.kernel_bytes = workspaces or {}
        self._releases = releases or {}
        self._times: dict[int, int] = dict(times_ns(program))
        self.timed_calls = 0
        """How many calls have a time that was measured."""
        self._offered: _Offered | None = None
        self.offloaded_bytes = 0
        """What a tier has to hold of the tensors that are offloaded."""
        self.numbers: Sequence[int] = ()
        """For each call, its number in the program that calls which move tensors were put into; -1
        for one of these.
        """
        self.paged: Pages | None = None
        """The files that tensors lie in before and after the step; None if none does."""
        self.unpaged: Lowering | None = None
        """What calls that read and write files were put into; None if there are none, or if others
        were put in afterwards."""
        self._sequence: Sequence[int] = range(len(program.calls))
        self._is_again: Sequence[bool] = [False] * len(program.calls)
        self._sizes = [
            _HANDLE_BYTES if storage.is_paged else storage.size_bytes
            for storage in program.storages
        ]
        self.repeats: list[Repeat | None]
        self.operators: list[_Operator]
        self._leaving: set[int]
        self._kinds: list[str]
        self._controls: list[tuple[int, int]]
        self._given_away: set[int]
        if like is not None and has_same_structure(like.program, program):
            self._take(like)
        else:
            self._find()

    def _find(self) -> None:
        """Finds everything that does not depend on sizes."""
        program = self.program
        self.repeats = repeats(program)
        self.operators = list(_operators(program))
        self._leaving = program.leaving()
        self._kinds = kinds_of(program, self._leaving)
        self._controls = [
            *_waiting_updates(program),
            *_first_checks(program),
            *_first_raising(program),
            *barriers(program),
        ]
        # A function that is none of PyTorch's operators may do what it likes with the memory of a
        # tensor that it gets: hand it to NumPy, after which it cannot be resized, or read from the
        # start of the storage instead of the tensor's, as `torch.set_rng_state` does.
        self._given_away = {
            program.storage_of(slot)
            for call in program.calls
            if not (
                is_ours(call.target)
                or is_collective(call.target)
                or call.is_check
                or call.target is barrier
                or isinstance(call.target, TRANSFERS)
            )
            for slot in call.refs()
        }

    def _take(self, like: Lowering) -> None:
        """Takes everything that does not depend on sizes from a program of the same structure."""
        program = self.program
        self.repeats = repeats(program, (like.program, like.repeats))
        flops = (flops_of(program, call) for call in program.calls)
        self.operators = [
            known if number == known.flops else replace(known, flops=number)
            for known, number in zip(like.operators, flops, strict=True)
        ]
        self._leaving, self._kinds = like._leaving, like._kinds
        self._controls, self._given_away = like._controls, like._given_away

    def timed(self, times_ns: Mapping[int, int], measured: Container[int]) -> Lowering:
        """The same with nanoseconds that calls take.

        Args:
            times_ns: per call; the cost model tells those of others.
            measured: the calls whose times were measured.
        """
        result = copy.copy(self)
        result._times = dict(times_ns)
        result.timed_calls = sum(index in measured for index in times_ns)
        others = [self.operators[index].name for index in times_ns if index not in measured]
        names = ", ".join(f"{name} ({count})" for name, count in Counter(others).most_common())
        told = f"of {result.timed_calls:,} operators measured, rounded"
        told += f"; of {len(others):,} modelled, scaled to those: {names}" if others else ""
        result._notes = [*self._notes, ("times", told)]
        return result

    def with_states(self) -> Lowering:
        """The same program with the states of generators read, so that random tensors may be made
        again; itself if there is nothing to read.

        A kernel that writes where a plan wants can draw only from the generator itself, so calls
        that may be replayed do not use such kernels.
        """
        found = with_states(self.program)
        if found is None:
            return self
        calls = found.program.calls
        placed = [
            None if number < 0 or call.state is not None else self.placed[number]
            for number, call in zip(found.calls, calls, strict=True)
        ]
        return self._changed(found.program, found.calls, placed)

    def undone(
        self, placed: Callable[[Program], Sequence[WritesResults | None]]
    ) -> Lowering | None:
        """The same step without the user's own recomputation; None if it has none that can be
        left out.

        Args:
            placed: per call of another program, what `placed_calls` says of it.
        """
        found = undone(self.program)
        if found is None:
            return None
        return self._changed(found.program, found.calls, placed(found.program))

    def offers(self, device: torch.device, excluded: Iterable[int]) -> list[Offer]:
        """Tensors that may be offloaded.

        Args:
            device: whose tensors.
            excluded: storages that may not lie elsewhere than where their call puts them.
        """
        return offers(self.program, self._kinds, device, self._given_away.union(excluded))

    def offering(
        self,
        chosen: Sequence[Offer],
        tier: Tier,
        placed: Callable[[Call], WritesResults],
        time_ns: Callable[[int], int],
    ) -> Lowering:
        """The same program with tensors stored in a tier, to be loaded where a plan wants.

        Args:
            chosen: some of its `offers`.
            tier: where they are stored.
            placed: how a call that loads writes its result.
            time_ns: nanoseconds that it takes to store and load so many bytes: the time of a load.
        """
        found = with_offers(self.program, chosen, tier)
        result = self._with_more(found.program, found.calls, placed)
        result._offered = _Offered(self, chosen, tier, placed, time_ns)
        result.offloaded_bytes = found.size_bytes
        result._times |= dict.fromkeys(result.stores, 1)
        result._times |= {load: time_ns(result.made_bytes(load)) for load in result.loads}
        return result

    def pages(self, device: torch.device, excluded: Iterable[int]) -> list[Page]:
        """Tensors that may lie in files before and after the step.

        Args:
            device: whose tensors.
            excluded: storages that may not lie elsewhere than where they are.
        """
        return pages_of(self.program, self._kinds, device, self._given_away.union(excluded))

    def paging(
        self,
        chosen: Iterable[tuple[Page, Collection[int]]],
        pages: Pages,
        placed: Callable[[Call], WritesResults],
        link: TimesCopies,
    ) -> Lowering:
        """The same program with tensors in files before and after the step.

        Args:
            chosen: some of its `pages`, each with the uses after which it is not in memory.
            pages: where they are.
            placed: how a call that reads a tensor writes its result.
            link: how long reading and writing takes.
        """
        found = with_pages(self.program, chosen, pages)
        result = self._with_more(found.program, found.calls, placed)
        result.paged, result.unpaged = pages, self
        result._times |= {
            index: link.time_ns(
                result.moved_bytes(index),
                is_read=isinstance(result.program.calls[index].target, Fetch),
            )
            for index in result.moves
        }
        return result

    def overlapping(
        self, room: Sequence[int], placed: Callable[[Call], WritesResults], taken: float
    ) -> Lowering:
        """The same program, in its order, with tensors in files read and written beside the other
        calls.

        Args:
            room: for each call, how many bytes may be used while it runs beyond those that are.
            placed: how a call that reads a tensor writes its result.
            taken: the share of a copy's time by which it and what runs beside it delay each other.
        """
        call_ns = self.graph(pool=False).times_ns.tolist()
        moves = set(self.moves)
        copy_ns = [one if index in moves else 0 for index, one in enumerate(call_ns)]
        found = with_overlap(self.program, overlapped(self.program, call_ns, copy_ns, room))
        result = self._with_more(found.program, found.calls, placed)
        # A copy and the calls beside it are slowed down alike, so that they end in the same order
        # as if they were not. A copy for which the step waits slows nothing down.
        delays_ns = {index: copy_ns[found.calls[index]] * taken for index in result.moves}
        delays_ns |= {index: ns * (1 - taken) for index, ns in found.stalls_ns.items()}
        result._times |= {index: max(round(ns), 1) for index, ns in delays_ns.items()}
        return result

    def _with_more(
        self, program: Program, calls: Sequence[int], placed: Callable[[Call], WritesResults]
    ) -> Lowering:
        """The lowering of a program that has this one's calls and others, which move tensors.

        Args:
            program: that program.
            calls: for each call of that program, its number in this one; -1 if it is new.
            placed: how a call that reads a tensor writes its result.
        """
        is_read = [
            isinstance(call.target, Fetch) or (number < 0 and isinstance(call.target, Load))
            for number, call in zip(calls, program.calls, strict=True)
        ]
        ways = [
            placed(call)
            if reads
            else None
            if number < 0
            else _placed(self.placed[number], self.program.calls[number], call)
            for number, call, reads in zip(calls, program.calls, is_read, strict=True)
        ]
        result = self._changed(program, calls, ways)
        result.timed_calls, result.numbers = self.timed_calls, calls
        result._times = {
            place: self._times[number]
            for place, number in enumerate(calls)
            if number in self._times
        }
        return result

    @property
    def moves(self) -> list[int]:
        """Numbers of the calls that read tensors from files and write them there, or begin to."""
        return self.with_target(Fetch, Put, Keep)

    @property
    def moved_s(self) -> float:
        """Seconds that the step waits for reading and writing of files, as it is known here."""
        return sum(self._times[index] for index in (*self.moves, *self.waits)) / 1e9

    @property
    def waits(self) -> list[int]:
        """Numbers of the calls that wait until tensors are read from files or written there."""
        return self.with_target(Arrived, Left)

    def moved_bytes(self, index: int) -> int:
        """Bytes that a call reads from a file or writes there."""
        call = self.program.calls[index]
        slot: Any = call.outputs[0] if isinstance(call.target, Fetch) else call.args[0].slot
        return self.program.storages[self.program.storage_of(slot)].size_bytes

    def sees_the_same(self, sequence: Sequence[int], storages: Collection[int]) -> bool:
        """Whether each run of a call sees some storages, none of which is made again, as its calls
        in their order do: changed by the same calls.

        Args:
            sequence: numbers of the calls in the order of their runs.
            storages: these storages.
        """
        writers: dict[int, list[int]] = {number: [] for number in storages}
        for index, operator in enumerate(self.operators):
            for number in {*operator.creates, *operator.mutates} & writers.keys():
                writers[number].append(index)
        runs = Counter(sequence)
        if any(runs[index] > 1 for some in writers.values() for index in some):
            return False
        done = dict.fromkeys(writers, 0)
        for index in sequence:
            call = self.program.calls[index]
            for number in (
                set(map(self.program.storage_of, (*call.refs(), *call.made()))) & writers.keys()
            ):
                if done[number] != bisect_left(writers[number], index):
                    return False
            operator = self.operators[index]
            for number in {*operator.creates, *operator.mutates} & writers.keys():
                done[number] += 1
        return True

    def without_offers(self, loads: Collection[int]) -> tuple[Lowering, dict[int, int]]:
        """The same without the tensors that some of its `loads` load. Also returns, for each call
        that remains, its number in the result, by its number here.
        """
        offered = self._offered
        assert offered is not None, "it has loads"
        chosen = [
            offer
            for offer, index in zip(offered.chosen, self.loads, strict=True)
            if index not in loads
        ]
        result = offered.lowering.offering(chosen, offered.tier, offered.placed, offered.time_ns)
        pairs = zip(self.stores, self.loads, strict=True)
        dropped = {index for pair in pairs if pair[1] in loads for index in pair}
        left = (index for index in range(len(self.program.calls)) if index not in dropped)
        return result, {index: number for number, index in enumerate(left)}

    def made_bytes(self, index: int) -> int:
        """Bytes of what a call makes."""
        return sum(self._sizes[number] for number in self.operators[index].creates)

    def live_bytes(self, but: Collection[int] = frozenset()) -> list[int]:
        """For each call in program order, what is there while it runs, without some storages.

        Args:
            but: these storages.
        """
        count = len(self.operators)
        storages = self.program.storages
        ends = [count - 1 if number in self._leaving else storage.creator for number, storage in enumerate(storages)]  # fmt: skip
        for index, operator in enumerate(self.operators):
            for number in (*operator.reads, *operator.mutates):
                ends[number] = max(ends[number], index)
        last = list(ends)
        for index in range(count):
            given: set[int] = set()
            for old, new in self._reuse(index, ()):
                is_free = last[old] == index and storages[old].creator >= 0 and old not in but
                if is_free and new not in given and new not in but and ends[old] == index:
                    given.add(new)
                    ends[old] = index - 1  # the memory is the same
        changes = [0] * (count + 1)
        for number, storage in enumerate(storages):
            if number not in but:
                changes[max(storage.creator, 0)] += self._sizes[number]
                changes[(count - 1 if storage.creator < 0 else ends[number]) + 1] -= self._sizes[number]  # fmt: skip
        taken = self.workspaces(None, self.residencies(None, False))
        return [live + own for live, own in zip(accumulate(changes[:-1]), taken, strict=True)]

    @property
    def stores(self) -> list[int]:
        """Numbers of the calls that store tensors in a tier."""
        return self.with_target(Store)

    @property
    def loads(self) -> list[int]:
        """Numbers of the calls that load them, or hand them on in their first run."""
        return self.with_target(Load)

    def with_target(self, *targets: type) -> list[int]:
        """Numbers of the calls that have targets of these classes."""
        calls = enumerate(self.program.calls)
        return [index for index, call in calls if isinstance(call.target, targets)]

    def _changed(
        self,
        program: Program,
        calls: Sequence[int],
        placed: Sequence[WritesResults | None],
    ) -> Lowering:
        """The lowering of a program that was made of this one's.

        Args:
            program: that program.
            calls: for each call of that program, its number in this one; below 0 if this one does
                not have it.
            placed: for each call of that program, what `placed_calls` says of it.
        """
        result = Lowering(
            program,
            placed,
            name=self._name,
            device=self._device,
            workspaces={
                place: self.kernel_bytes[number]
                for place, number in enumerate(calls)
                if number in self.kernel_bytes
            },
            notes=self._notes,
            estimate=self._estimate,
        )
        result._sequence = [number if number < 0 else self._sequence[number] for number in calls]
        result.paged = self.paged
        return result

    @property
    def frees(self) -> bool:
        """Whether a call frees arguments while it runs."""
        return bool(self._releases)

    @property
    def most_saved_bytes(self) -> int:
        """The most that a call saves by freeing arguments while it runs."""
        saved = (one.saved_bytes for some in self._releases.values() for one in some)
        return max(saved, default=0)

    def holding(self) -> Lowering:
        """The same program in which no call frees its arguments while it runs: if calls run again,
        the call that was the last to use a tensor need not be the last any more.
        """
        result = copy.copy(self)
        result._releases = {}
        return result

    def left_out(self, program: Program) -> set[int]:
        """Numbers of the calls that the original program has and this one does not."""
        return set(range(len(program.calls))) - set(self._sequence)

    def expanded(self, sequence: Sequence[int]) -> Lowering:
        """The same program by a sequence, in which calls run more than once: its graphs are
        `Graph.expanded` of this one's.

        Whatever is known of a call or a storage holds for each run or instance of it.
        """
        expanded = expand(self.program, self.repeats, sequence)
        program, storage_of = expanded.program, expanded.storage_of
        result = copy.copy(self)
        result.program = program
        result._sequence, result._is_again = expanded.sequence, expanded.is_again
        result.placed = [
            _placed(self.placed[index], self._call_of(index, is_again), call)
            for index, is_again, call in zip(
                sequence, expanded.is_again, program.calls, strict=True
            )
        ]
        result.kernel_bytes = {
            place: self.kernel_bytes[index]
            for place, index in enumerate(sequence)
            if index in self.kernel_bytes
        }
        result._times = {
            place: self._times[index]
            for place, index in enumerate(sequence)
            if index in self._times
        }
        result._sizes = [self._sizes[number] for number in storage_of]
        result._kinds = [self._kinds[number] for number in storage_of]
        result._given_away = {
            number for number, of in enumerate(storage_of) if of in self._given_away
        }
        result._controls = list(expanded.latest(self._controls))
        result.operators = [
            replace(operator, name=self.operators[index].name, flops=self.operators[index].flops)
            for index, operator in zip(sequence, _operators(program), strict=True)
        ]
        result.repeats = [
            _repeat_of(repeat, is_again, operator, storage_of)
            for repeat, is_again, operator in zip(
                map(self.repeats.__getitem__, sequence),
                expanded.is_again,
                result.operators,
                strict=True,
            )
        ]
        return result

    def _call_of(self, index: int, is_again: bool) -> Call:
        """The call that a run makes."""
        repeat = self.repeats[index]
        return repeat.call if is_again and repeat is not None else self.program.calls[index]

    @property
    def extra_runs(self) -> int:
        """How many calls run again, views and loads from a tier not counted."""
        return sum(
            is_again
            and bool(operator.creates or operator.mutates)
            and not isinstance(call.target, (Fetch, Load))
            for is_again, operator, call in zip(
                self._is_again, self.operators, self.program.calls, strict=True
            )
        )

    @property
    def extra_calls(self) -> frozenset[int]:
        """Numbers of the calls that run again, views included."""
        return frozenset(index for index, is_again in enumerate(self._is_again) if is_again)

    def places(self, calls: Container[int]) -> frozenset[int]:
        """The numbers that calls of the original program have in this one."""
        return frozenset(place for place, index in enumerate(self._sequence) if index in calls)

    def graph(
        self,
        *,
        copied_in: Container[int] | None = None,
        pool: bool = True,
        order: Sequence[int] | None = None,
        in_place: bool = True,
    ) -> Graph:
        """One graph. Its first tensors are the program's storages. Further tensors, each a part of
        one of these, stand for what regions free while they run.

        Args:
            copied_in: calls that compute into memory of their own and whose results are then copied
                into the pool; the results of other calls whose kernels cannot write there
                are unpooled. None: as if every kernel could.
            pool: whether there is a pool. If not, all that is made and dies in the step is
                unpooled.
            order: numbers of the calls, in an order in which they may run. The graph then allows no
                other order.
            in_place: whether kernels may write results over arguments.
        """
        program = self.program
        rank = None if order is None else {number: place for place, number in enumerate(order)}
        builder = GraphBuilder(self._name, device=self._device)
        if self._estimate:
            builder.estimate(self._estimate)
        for topic, text in self._notes:
            builder.note(topic, text)
        residencies = self.residencies(copied_in, pool)
        parts = self._parts(residencies)
        for storage, size_bytes, kind, residency in zip(
            program.storages, parts.sizes, self._kinds, residencies, strict=True
        ):
            builder.tensor(storage.name, size_bytes, kind=kind, residency=residency)
        for number, size_bytes in parts.of:
            name, kind = program.storages[number].name + PART, self._kinds[number]
            builder.tensor(name, size_bytes, kind=kind, residency=residencies[number])
        links = links_of(program)
        for index, (call, operator) in enumerate(zip(program.calls, self.operators, strict=True)):
            source = call.source
            copied = self._copied(index, copied_in, residencies)
            pairs = self._reuse(index, copied) if in_place else []
            # A storage from which parts have been taken is smaller than storages that it was equal
            # to.
            pairs = [
                (old, new)
                for old, new in pairs
                if residencies[old] == residencies[new] and parts.sizes[old] == parts.sizes[new]
            ]
            repeat = self.repeats[index]
            builder.operator(
                operator.name,
                reads=[*operator.reads, *parts.reads.get(index, ())],
                creates=[*operator.creates, *parts.creates.get(index, ())],
                mutates=operator.mutates,
                workspace_bytes=self._workspace_bytes(index, copied, residencies),
                reuse=[*pairs, *parts.pairs.get(index, ())],
                phase=call.phase,
                sequence=None if self._is_again[index] else _sequence(call, repeat),
                module=source.module,
                file=source.file,
                line=source.line,
                flops=operator.flops,
                time_ns=self._times.get(index),
                position=None if rank is None else rank[index],
                repeatable=repeat is not None,
                first_only=None if repeat is None else repeat.first_only,
                link=links.get(index),
            )
            for maker in operator.waits:
                builder.control(maker, index)
        for before, after in (*self._controls, *pairwise(order or ())):
            builder.control(before, after)
        return builder.build()

    def residencies(self, copied_in: Container[int] | None, pool: bool) -> list[Residency]:
        """Where each storage lies; see `graph`."""
        program, placed = self.program, self.placed
        residencies: list[Residency] = []
        for number, storage in enumerate(program.storages):
            if storage.creator < 0:
                residencies.append("persistent" if program.persists(number) else "enters")
            elif number in self._leaving:
                residencies.append("leaves")
            elif (
                pool
                and not storage.is_paged
                and number not in self._given_away
                and (
                    copied_in is None
                    or _is_written(placed[storage.creator])
                    or storage.creator in copied_in
                )
            ):
                residencies.append("step_local")
            else:
                residencies.append("unpooled")
        return residencies

    def workspaces(
        self, copied_in: Container[int] | None, residencies: Sequence[Residency]
    ) -> list[int]:
        """Per call, what it takes beyond its results while it runs, copies that are made of them
        included.
        """
        calls = range(len(self.operators))
        return [
            self._workspace_bytes(index, self._copied(index, copied_in, residencies), residencies)
            for index in calls
        ]

    def _copied(
        self, index: int, copied_in: Container[int] | None, residencies: Sequence[Residency]
    ) -> list[int]:
        """What a call makes that is copied into the pool."""
        if copied_in is None or index not in copied_in:
            return []
        return [
            number
            for number in self.operators[index].creates
            if residencies[number] == "step_local"
        ]

    def _workspace_bytes(
        self, index: int, copied: Sequence[int], residencies: Sequence[Residency]
    ) -> int:
        at = self._run_as(index, copied)
        if at is None and not copied and index not in self.kernel_bytes:
            return 0
        own = sum(self._sizes[number] for number in copied) if at is None else at.workspace_bytes
        kernel_bytes = self.kernel_bytes.get(index, 0)
        release = self._release(index, residencies)
        return own + max(kernel_bytes - (0 if release is None else release.saved_bytes), 0)

    def _release(self, index: int, residencies: Sequence[Residency]) -> Release | None:
        """What a call frees while it runs, if none of it lies in the pool."""
        for release in self._releases.get(index, ()):
            if all(residencies[number] == "unpooled" for number in release.storages):
                return release
        return None

    def _parts(self, residencies: Sequence[Residency]) -> _Parts:
        """What calls save by freeing arguments, beyond the bytes that their kernels take for
        themselves. It is expressed by parts: parts of the results take the memory of parts of the
        arguments.
        """
        parts = _Parts(self._sizes)
        alignment_bytes = GraphBuilder(device=self._device).build().alignment_bytes
        paired = {
            self.program.storage_of(slot)
            for at in (self.placed if self._releases else ())
            if at is not None
            for pair in at.in_place
            for slot in pair
        }
        for index in self._releases:
            release = self._release(index, residencies)
            if release is None:
                continue
            operator, sizes = self.operators[index], parts.sizes
            left_bytes = release.saved_bytes - self.kernel_bytes.get(index, 0)
            old = [number for number in release.storages if number in operator.reads]
            new = [one for one in operator.creates if residencies[one] in ("unpooled", "leaves")]
            while left_bytes >= alignment_bytes:
                # A storage that is in another pair stays whole if possible.
                large = [one for one in old if sizes[one] >= alignment_bytes]
                giver = max(large, key=lambda one: (one not in paired, sizes[one]), default=None)
                taker = max(new, key=lambda one: sizes[one], default=None)
                if giver is None or taker is None:
                    break
                size_bytes = min(left_bytes, sizes[giver], sizes[taker])
                size_bytes -= size_bytes % alignment_bytes
                if not size_bytes:
                    break
                parts.add(index, giver, taker, size_bytes)
                left_bytes -= size_bytes
        parts.find_readers(self.operators, [one.creator for one in self.program.storages])
        return parts

    def _run_as(self, index: int, copied: Sequence[int]) -> WritesResults | None:
        """How a call's kernel writes where the plan wants; None if it runs in the ordinary way."""
        at = self.placed[index]
        return None if at is not None and at.by_rows and not copied else at

    def _reuse(self, index: int, copied: Sequence[int]) -> list[tuple[int, int]]:
        """(storage read, storage made): which results may take an argument's memory if that dies in
        the call.
        """
        at = self._run_as(index, copied)
        if at is not None:
            # A tensor that is passed twice is one argument's memory.
            storage_of = self.program.storage_of
            return list(
                dict.fromkeys((storage_of(old), storage_of(new)) for old, new in at.in_place)
            )
        if not copied:
            return []
        # When a result is copied to its place, the arguments have been used.
        size, reads = self._sizes, self.operators[index].reads
        return [(old, new) for old in reads for new in copied if size[old] == size[new] > 0]


def _sequence(call: Call, repeat: Repeat | None) -> Literal["random", "collective"] | None:
    """The sequence in which a call has a place."""
    if is_launch(call.target):
        return "collective"
    return "random" if _draws(call, repeat) else None


PART = " (part)"
"""Added to the names of parts of storages."""


class _Parts:
    """Parts of storages that are tensors of their own in a graph.

    Attributes:
        sizes: for each storage, the bytes that are left of it.
        of: for each part, its storage and its bytes.
        pairs: for each call, pairs (part of an argument, part of a result) that share memory, by
            their numbers in the graph.
        reads, creates: for each call, the numbers of the parts that it reads and creates.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.of: list[tuple[int, int]] = []
        self.pairs: dict[int, list[tuple[int, int]]] = {}
        self.reads: dict[int, list[int]] = {}
        self.creates: dict[int, list[int]] = {}

    def add(self, index: int, giver: int, taker: int, size_bytes: int) -> None:
        """Notes that at a call a part of one storage gives its memory to a part of another."""
        first = len(self.sizes) + len(self.of)
        self.of += ((giver, size_bytes), (taker, size_bytes))
        self.sizes[giver] -= size_bytes
        self.sizes[taker] -= size_bytes
        self.pairs.setdefault(index, []).append((first, first + 1))

    def find_readers(self, operators: Sequence[_Operator], creators: Sequence[int]) -> None:
        """Finds where parts are made and read: a part is made where its storage is made, and read
        where its storage is used.
        """
        numbers: dict[int, list[int]] = {}
        for place, (storage, _) in enumerate(self.of):
            number = len(self.sizes) + place
            numbers.setdefault(storage, []).append(number)
            self.creates.setdefault(creators[storage], []).append(number)
        for index, operator in enumerate(operators) if numbers else ():
            for storage in (*operator.reads, *operator.mutates):
                if storage in numbers:
                    self.reads.setdefault(index, []).extend(numbers[storage])


def _draws(call: Call, repeat: Repeat | None) -> bool:
    """Whether a call has a place among those that draw random numbers. One that is exact without
    its generator's state draws none.
    """
    return call.random and (repeat is None or call.state is not None)


def _repeat_of(
    repeat: Repeat | None, is_again: bool, operator: _Operator, storage_of: Sequence[int]
) -> Repeat | None:
    """How a run of a call runs again. For the first run, `first_only` has the instances of the
    storages that this run touches; for a further run it is empty.
    """
    if repeat is None or not (repeat.first_only or is_again):
        return repeat
    touched = {storage_of[number]: number for number in (*operator.reads, *operator.mutates)}
    first_only = () if is_again else tuple(touched[number] for number in repeat.first_only)
    return replace(repeat, first_only=first_only)


def _placed(at: WritesResults | None, call: Call, run: Call) -> WritesResults | None:
    """What is known of a call, for one of its runs."""
    if at is None:
        return None
    return at.renamed(
        dict(zip((*call.refs(), *call.outputs), (*run.refs(), *run.outputs), strict=True))
    )


def _operators(program: Program) -> Iterator[_Operator]:
    creates: list[list[int]] = [[] for _ in program.calls]
    for number, storage in enumerate(program.storages):
        if storage.creator >= 0:
            creates[storage.creator].append(number)
    storages = [-1 if meta is None else meta.storage for meta in program.slots]
    makers: dict[int, int] = {}
    spent = _spent(program, creates)
    for index, call in enumerate(program.calls):
        used = call.refs()
        mutated = dict.fromkeys(
            [number for slot in call.mutates if (number := storages[slot]) not in spent[index]]
        )
        touched = dict.fromkeys([storages[slot] for slot in used if storages[slot] >= 0])
        yield _Operator(
            call.name,
            reads=[number for number in touched if number not in mutated],
            mutates=list(mutated),
            creates=creates[index],
            waits=list(dict.fromkeys([makers[slot] for slot in used if slot in makers])),
            flops=flops_of(program, call),
        )
        for slot in call.outputs:
            if slot is not None and storages[slot] not in creates[index]:
                makers[slot] = index


def _spent(program: Program, creates: Sequence[Sequence[int]]) -> list[set[int]]:
    """For each call, the storages that it alone uses, and that it changes: when a region has used
    what was saved for it, it may take the memory of that.

    Nobody sees such a change, so for a plan the call only reads them, and what makes them may run
    again. The call itself runs once, since it changes something.
    """
    spent: list[set[int]] = [set() for _ in program.calls]
    changes = [
        index for index, call in enumerate(program.calls) if call.mutates and is_region(call.target)
    ]
    if not changes:
        return spent
    leaving = program.leaving()
    users: dict[int, list[int]] = {}
    for index, call in enumerate(program.calls):
        if not creates[index] and not call.mutates and _is_view(program, call):
            continue
        for number in {program.storage_of(slot) for slot in call.refs()}:
            users.setdefault(number, []).append(index)
    for index in changes:
        for number in map(program.storage_of, program.calls[index].mutates):
            is_made = number >= 0 and program.storages[number].creator >= 0
            if is_made and number not in leaving and users[number] == [index]:
                spent[index].add(number)
    return spent


def _is_view(program: Program, call: Call) -> bool:
    """Whether all that a call gives lies in what it is given."""
    given = {program.storage_of(slot) for slot in call.refs()}
    made = [program.storage_of(slot) for slot in call.outputs if slot is not None]
    return bool(made) and -1 not in made and given.issuperset(made)


def flops_of(program: Program, call: Call) -> int:
    """Floating-point operations by PyTorch's own formulas; 0 if there is none, as for pointwise
    operators.
    """
    formula = formula_of(call.target)
    if formula is None:
        return 0

    def shape(slot: int | None) -> tuple[int, ...] | None:
        meta = None if slot is None else program.slots[slot]
        return None if meta is None else meta.shape

    def shape_of(ref: Ref) -> tuple[int, ...] | None:
        return shape(ref.slot)

    shapes = tuple(shape(slot) for slot in call.outputs)
    made = shapes if call.returns_sequence else shapes[0]
    try:
        return int(
            formula(
                *substitute(call.args, shape_of), **substitute(call.kwargs, shape_of), out_val=made
            )
        )
    except AssertionError:  # a form of the kernel that the formula does not know
        return 0


def formula_of(target: Any) -> Any:
    """PyTorch's own formula for an operator's floating-point operations; None if there is none."""
    return flop_registry.get(getattr(target, "overloadpacket", None))


def _waiting_updates(program: Program) -> Iterator[tuple[int, int]]:
    """(call, later call): no update starts before the backward pass does, so that a failure in the
    forward pass leaves them all undone.

    This costs no memory: what an update needs and frees, its gradient, comes later still.
    """
    begins = next(
        (index for index, call in enumerate(program.calls) if call.phase == "backward"), None
    )
    if begins is None:
        return
    persistent = {number for number, storage in enumerate(program.storages) if storage.creator < 0}
    for index in range(begins + 1, len(program.calls)):
        call = program.calls[index]
        if call.phase == "update" and any(
            program.storage_of(slot) in persistent for slot in call.mutates
        ):
            yield begins, index


def _first_checks(program: Program) -> Iterator[tuple[int, int]]:
    """(call, later call): nothing that exists before the step is changed before a check that comes
    first in the program; checks keep their order.
    """
    check = -1
    for index, call in enumerate(program.calls):
        changed = map(program.storage_of, call.mutates)
        if check >= 0 and (
            call.is_check or any(program.storages[number].creator < 0 for number in changed)
        ):
            yield check, index
        if call.is_check:
            check = index


def _first_raising(program: Program) -> Iterator[tuple[int, int]]:
    """(call, later call): nothing that exists before the step is changed before a kernel that
    raises an error for some data, and comes first in the program. Most changes depend on such
    kernels anyway, which look up and compare in the forward pass.
    """
    raising = [index for index, call in enumerate(program.calls) if program.may_raise(call)]
    if not raising:
        return
    bits = {index: 1 << place for place, index in enumerate(raising)}
    after: list[int] = []  # per call, the bits of those that it comes after anyway
    begun = 0
    for index, (call, needs) in enumerate(zip(program.calls, needed_by(program), strict=True)):
        passed = 0
        for needed in needs:
            passed |= after[needed]
        changed = map(program.storage_of, call.mutates)
        waits = any(program.storages[number].creator < 0 for number in changed)
        if waits and (missing := begun & ~passed):
            yield from ((one, index) for one, bit in bits.items() if bit & missing)
            passed = begun
        begun |= (own := bits.get(index, 0))
        after.append(passed | own)


def _is_written(placed: WritesResults | None) -> bool:
    """Whether a kernel writes where a plan wants it, without a copy."""
    return placed is not None and not placed.by_rows


def kinds_of(program: Program, leaving: Iterable[int]) -> list[str]:
    """The kind of each storage; `leaving` are those that the step makes and that outlive it."""
    kinds = ["temporary"] * len(program.storages)
    backward = [call for call in program.calls if call.phase == "backward"]
    used_in_backward = {program.storage_of(slot) for call in backward for slot in call.refs()}
    for number, storage in enumerate(program.storages):
        is_used = storage.creator >= 0 and number in used_in_backward
        if is_used and program.calls[storage.creator].phase in ("forward", "loss"):
            kinds[number] = "activation"
    for call in program.calls:
        if call.phase == "update":
            for slot in call.refs():
                number = program.storage_of(slot)
                creator = program.storages[number].creator if number >= 0 else -1
                if creator >= 0 and program.calls[creator].phase == "backward":
                    kinds[number] = "gradient"
    for number in leaving:
        kinds[number] = "output"
    for reference, slot in rebound(program):
        if program.slots[slot] is not None:
            kinds[program.storage_of(slot)] = reference.kind
    for one in program.of(Assemble):
        for slot in one.slots:
            kinds[program.storage_of(slot)] = one.reference.kind
    referenced = {
        slot: reference.kind
        for reference, slot in program.referenced
        if program.slots[slot] is not None
    }
    for tensor, data in program.assigned():
        kinds[program.storage_of(data)] = referenced[tensor]
    for slot, kind in referenced.items():
        kinds[program.storage_of(slot)] = kind
    for _, slot in program.constants:
        kinds[program.storage_of(slot)] = "buffer"
    for call in program.calls:
        if isinstance(call.target, (Fetch, Keep)):
            made, of = (program.storage_of(slot) for slot in (call.outputs[0], call.args[0].slot))  # type: ignore[arg-type]
            if made not in leaving:
                kinds[made] = kinds[of]
    return kinds


def moved_bytes(program: Program, *targets: type) -> dict[str, int]:
    """By kind, the bytes of all tensors that calls with targets of these classes read from files or
    write there.
    """
    moved = Counter[str]()
    for call, kind, size_bytes in _moved(program):
        if isinstance(call.target, targets):
            moved[kind] += size_bytes
    return dict(moved)


def traffic(program: Program) -> list[tuple[str, str, int, int]]:
    """Phase, kind, and bytes of what is read from files and of what is written there, in the order
    in which they come first.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for call, kind, size_bytes in _moved(program):
        both = found.setdefault((call.phase, kind), [0, 0])
        both[not isinstance(call.target, Fetch)] += size_bytes
    return [(*key, *both) for key, both in found.items()]  # type: ignore[misc]


def _moved(program: Program) -> Iterator[tuple[Call, str, int]]:
    """Each call that reads a tensor from a file or writes it there, with its kind and its bytes."""
    kinds = kinds_of(program, program.leaving())
    for call in program.calls:
        if isinstance(call.target, (Fetch, Put, Keep)):
            paged = call.args[0] if isinstance(call.target, Fetch) else call.args[-1]
            slot = call.outputs[0] if isinstance(call.target, Keep) else paged.slot
            number = program.storage_of(slot)  # type: ignore[arg-type]
            yield call, kinds[number], program.storages[number].size_bytes


def device_of(program: Program) -> torch.device:
    """The device that most of the step's bytes are on."""
    sizes: dict[torch.device, int] = {}
    seen: set[int] = set()
    for meta in program.slots:
        if meta is not None and meta.storage not in seen:
            seen.add(meta.storage)
            sizes[meta.device] = (
                sizes.get(meta.device, 0) + program.storages[meta.storage].size_bytes
            )
    return max(sizes, key=lambda device: sizes[device]) if sizes else torch.device("cpu")
