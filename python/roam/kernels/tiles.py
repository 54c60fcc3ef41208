"""Finds out whether operators that run tile by tile give the very bits of the whole.

A library chooses how it multiplies by the sizes of what it gets, so nothing is assumed: each cut is
tried, on tensors of the step's own shapes, strides and dtypes, against the calls that it replaces.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from roam.kernels.kept import recall, retain
from roam.kernels.workspace import kernels_alone, settings, signature_of
from roam.program.bits import differ
from roam.program.ir import Call, Program, Ref, substitute
from roam.program.tile_works import add_product, rows_at
from roam.program.tiles import blocks_of, part_of
from roam.program.tiling import SUMS, VIEWS, Member, Part, Tile, Tiled, makers_of, summed, tiled

_KIND, _BLOCKS_KIND = "cuts", "blocks"
_ROUNDS = 2
_MOST_ATTEMPTS = 32
_KEPT = 8
"""What a trial has made is kept for the next way to cut if it takes less than this part of the
room."""
_FILLED = 0.5
"""The part of the room that what the original calls make fills at most, if it can be made in
stages."""
_FEW = 64
"""Denormal elements of a tensor: arithmetic with these takes a hundred times longer."""
_learned: dict[object, int] = {}
_THIN = 1 << 21
"""Elements of a factor of a product whose blocks are looked for."""
_one_at_a_time = threading.Lock()


def other_blocks(program: Program, gone: Collection[int], device: torch.device) -> set[Part]:
    """Blocks in which products of what is gone do not get the whole's bits.

    Blocks are looked for in a product with few rows, which is quick. What that finds is but a
    proposal: whether the blocks that are left are right is tried on the real shapes.
    """
    asked: dict[object, list[int]] = {}
    calls = program.calls
    for index, call in enumerate(calls):
        if summed(program, call) and any(program.storage_of(slot) in gone for slot in call.refs()):
            asked.setdefault((signature_of(program, call), settings()), []).append(index)
    with _one_at_a_time:
        unknown = asked.keys() - _learned.keys()
        _learned.update(recall(_BLOCKS_KIND, unknown, device))
        with kernels_alone(device.type):
            learned = {
                key: _exact_blocks(program, calls[asked[key][0]], device)
                for key in asked
                if key not in _learned
            }
        _learned.update(learned)
        retain(_BLOCKS_KIND, learned, device)
    return {
        (calls[index].outputs[0], None, block)  # type: ignore[misc]
        for key, indices in asked.items()
        for index in indices
        for place, block in enumerate(blocks_of(summed(program, calls[index])))
        if not _learned[key] >> place & 1
    }


def _exact_blocks(program: Program, call: Call, device: torch.device) -> int:
    """A bit for each of `blocks_of`: whether a product in such blocks has the whole's bits."""
    size = summed(program, call)
    dim, other = SUMS[call.target]
    rows = max(_THIN // size, 1)
    factors = []
    generator = torch.Generator(device).manual_seed(0)
    for place, ref in enumerate(call.args):
        meta = program.slots[ref.slot]
        assert meta is not None
        shape = list(meta.shape)
        if place == 0:
            shape[dim - 1] = min(shape[dim - 1], rows)
        if len(shape) == 3:
            shape[0] = min(shape[0], 2)
        order = sorted(range(len(shape)), key=lambda one, meta=meta: -meta.stride[one])  # type: ignore[misc]
        made = torch.empty_permuted(shape, order, dtype=meta.dtype, device=device)
        made.normal_(generator=generator)
        _make_hostile(made, generator)
        factors.append(made)
    left, right = factors
    whole = torch.matmul(left, right)
    total = torch.empty_like(whole)
    found = 0
    for place, block in enumerate(blocks_of(size)):
        for start in range(0, size, block):
            length = min(block, size - start)
            parts = left.narrow(dim, start, length), right.narrow(other, start, length)
            add_product(total, start == 0, *parts)
        found |= (not differ([total], [whole])) << place
    return found


class Cutter:
    """Cuts some tensors of a program, by cuts and blocks that give the same bits.

    Where there is no room for all that the original calls make, they are tried in stages. Nothing
    is tried for which a stage of one call takes more than `room_bytes`; what was tried before needs
    no room.

    Attributes:
        refused: what is known to have other bits.
    """

    def __init__(
        self,
        program: Program,
        gone: Collection[int],
        device: torch.device,
        room_bytes: int | None = None,
    ) -> None:
        self._program, self._gone, self._device = program, gone, device
        self._room_bytes = room_bytes
        self._trial: _Trial | None = None
        self._lacked_memory = False
        self._passed: set[tuple[int, object]] = set()
        """Rounds in which calls of a kind have been found exact."""
        self.refused = other_blocks(program, gone, device)

    def ways(self, part_bytes: int) -> Iterator[Tiled]:
        """As `tiled`, without what is known to have other bits: another way each time that
        `is_exact` has refused one.
        """
        for _ in range(_MOST_ATTEMPTS):
            if self._lacked_memory:
                break
            found = tiled(self._program, self._gone, part_bytes, self.refused)
            if found is None:
                break
            keys = _keys(found)
            with _one_at_a_time:
                unknown = {key for key in keys if key not in _learned}
                _learned.update(recall(_KIND, unknown, self._device))
            if self._refuse(found, keys):
                continue
            is_known = self._room_bytes is None or all(key in _learned for key in keys)
            if not is_known and _trial_bytes(found) > self._room_bytes:  # type: ignore[operator]
                break
            yield found
        self._trial = None

    def is_exact(self, found: Tiled) -> bool:
        """Whether all calls that run tile by tile give the whole's bits. What is not known is
        tried, until one does not. What there is no memory to try is not cut, and stays unknown.
        """
        keys = _keys(found)
        if any(key not in _learned for key in keys):
            with _one_at_a_time, kernels_alone(self._device.type), torch.random.fork_rng(()):
                try:
                    learned = self._tried(found, keys)
                except RuntimeError as error:
                    if not _lacks_memory(error):
                        raise
                    self._trial, self._lacked_memory = None, True
                    return False
                _learned.update(learned)
                retain(_KIND, learned, self._device)
            held_bytes = 0 if self._trial is None else self._trial.held_bytes
            if self._room_bytes is not None and held_bytes * _KEPT > self._room_bytes:
                self._trial = None  # the next way is planned first, which needs room too
        return not self._refuse(found, keys)

    def _refuse(self, found: Tiled, keys: Sequence[object]) -> bool:
        """Notes what has other bits; whether anything has."""
        wrong = {
            _part(tile, _learned[key] - 1)
            for tile, key in zip(found.tiles, keys, strict=True)
            if _learned.get(key, 0)
        }
        self.refused |= wrong
        return bool(wrong)

    def _tried(self, found: Tiled, keys: Sequence[object]) -> dict[object, int]:
        """What is wrong in the first call that is not exact; that all are, if there is none.

        Rounds are tried one after the other. What the original calls make in the last one is kept,
        for another way to cut the same tensors.
        """
        if self._trial is not None and self._trial.found.gone != found.gone:
            self._trial = None
        first = 0 if self._trial is None else self._trial.turn
        for turn in (*range(first, _ROUNDS), *range(first)):
            if self._trial is None or self._trial.turn != turn:
                self._trial = None  # before there is another
                self._trial = _Trial(found, self._device, turn, self._room_bytes)
            self._trial.begin(found)
            passed = {key for before, key in self._passed if before == turn}
            for place in _asked(found, keys, passed):
                wrong = self._trial.wrong(found.tiles[place])
                if wrong is not None:
                    return {keys[place]: wrong + 1}
                self._passed.add((turn, keys[place]))
        self._trial = None
        return {key: 0 for key in keys if key not in _learned}


def _lacks_memory(error: Exception) -> bool:
    """Whether an error says that memory could not be allocated: PyTorch's class for that is raised
    for devices alone.
    """
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _keys(found: Tiled) -> list[object]:
    return [_key(found, tile) for tile in found.tiles]


def _asked(found: Tiled, keys: Sequence[object], passed: Collection[object]) -> list[int]:
    """The first call of each kind about which nothing is known and that has not `passed`, and those
    that make what it reads and the original program has not.
    """
    makers = {
        slot: place
        for place, tile in enumerate(found.tiles)
        for member in tile.made
        for slot in found.made_of(member.slot)
    }
    firsts: dict[object, int] = {}
    for place, key in enumerate(keys):
        firsts.setdefault(key, place)
    waiting = [place for key, place in firsts.items() if key not in _learned and key not in passed]
    asked: set[int] = set()
    while waiting:
        place = waiting.pop()
        if place not in asked:
            asked.add(place)
            read = found.tiles[place].call.refs()
            waiting += [makers[slot] for slot in read if slot >= len(found.source.slots)]
    return sorted(asked)


def _part(tile: Tile, number: int) -> Part:
    """What a number of `_Trial.wrong` stands for."""
    if number in tile.parts:
        return (*tile.parts[number], tile.body.length)
    places = {
        made.number: member for made, member in zip(tile.body.results, tile.made, strict=True)
    }
    changed = zip(tile.body.changed, tile.changed, strict=True)
    places.update((own, member) for (_, own), member in changed)
    member = places.get(number, tile.members[0])
    length = tile.body.block if member.cut is None else tile.body.length
    return member.slot, member.cut, length


def _key(found: Tiled, tile: Tile) -> object:
    """All that decides about the bits of a call that runs tile by tile, and of those that it
    replaces.
    """
    calls = {index: None for member in tile.members for index in _needed(found, member)}
    whole = tuple(signature_of(found.source, found.source.calls[index]) for index in calls)
    return tile.call.args[1], whole, settings()


def _needed(found: Tiled, member: Member) -> list[int]:
    """Calls of the original program that make something, in order, from what exists whole."""
    source, makers = found.source, makers_of(found.source)
    needed: set[int] = set()
    waiting = [member.position]
    while waiting:
        index = waiting.pop()
        if index in needed:
            continue
        needed.add(index)
        for slot in source.calls[index].refs():
            meta = source.slots[slot]
            if meta is not None and meta.storage in found.gone:
                waiting.append(makers[slot])
    return sorted(needed)


def _trial_bytes(found: Tiled) -> int:
    """About the most that exists at once while cuts are tried in stages of one call, with what is
    read and made.
    """
    most = max((_stages(found, tile.members, 0)[1] for tile in found.tiles), default=0)
    return most + _read_bytes(found)


def _read_bytes(found: Tiled) -> int:
    """What all tiles read."""
    metas = (found.slots[slot] for tile in found.tiles for slot in tile.call.refs())
    return sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in metas if meta is not None)


def _stages(
    found: Tiled, members: Sequence[Member], room_bytes: float
) -> tuple[list[tuple[list[int], set[int]]], int]:
    """The original calls that make something, in stages: as many at a time as there is room for
    what they make and what later ones read; and the most bytes that exist at once.

    Returns:
        For each stage its calls, and the storages that are needed after it.
    """
    source = found.source
    calls = sorted({index for member in members for index in _needed(found, member)})
    last = {
        source.storage_of(slot): index for index in calls for slot in source.calls[index].refs()
    }
    stages: list[tuple[list[int], set[int]]] = []
    alive: set[int] = set()
    most = 0

    def size_bytes(numbers: Collection[int]) -> int:
        return sum(source.storages[number].size_bytes for number in numbers)

    for index in calls:
        made = {source.storage_of(slot) for slot in source.calls[index].outputs if slot is not None}
        made.discard(-1)
        if stages and size_bytes(alive | made) > room_bytes:
            alive = {one for one in alive if one not in found.gone or last.get(one, -1) >= index}
            stages[-1][1].update(alive)
            stages.append(([], set()))
        elif not stages:
            stages.append(([], set()))
        alive |= made
        most = max(most, size_bytes(alive))
        stages[-1][0].append(index)
    return stages, most


class _DifferentError(Exception):
    """A part is not the whole's.

    Attributes:
        number: of the value.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Trial:
    """One round of values. What the original calls make of them is kept, for all tiles that are
    tried.
    """

    def __init__(
        self, found: Tiled, device: torch.device, turn: int, room_bytes: int | None
    ) -> None:
        self.found, self.device, self.turn = found, device, turn
        self.room_bytes = math.inf if room_bytes is None else room_bytes * _FILLED
        self.values: dict[int, Any] = {}
        self.whole: dict[int, Any] = {}
        self.after: dict[int, Tensor] = {}
        """What the original calls change tensors to, by calls."""
        self.makers = makers_of(found.source)
        self.generator = torch.Generator(device).manual_seed(turn)
        self._made: dict[object, list[Tensor]] = {}

    def begin(self, found: Tiled) -> None:
        """Tries another way to cut the same tensors."""
        self.found = found
        self.members = {member.slot: member for tile in found.tiles for member in tile.made}
        new = [slot for slot in self.values if slot >= len(found.source.slots)]
        for slot in new:
            del self.values[slot]

    def wrong(self, tile: Tile) -> int | None:
        """The number of the first value that is not the whole's part; None if all are.

        All parts count of which results are made: other values might show in a result what does
        not with these.
        """
        key = tile.call.args[1], tuple(tile.call.refs())
        if key not in self._made:
            given, _, numbers = tile.call.args
            inputs = [self.value(ref.slot) for ref in (*given, *numbers)]
            outs: list[Tensor] = []
            for _ in self._staged(tile.members):
                outs.clear()
                number = self._compared(tile, inputs, outs)
                if number is not None:
                    return number
            number = self._other_results(tile, outs)
            if number is not None:
                return number
            self._made[key] = [
                value
                for member, value in zip(tile.made, outs[: len(tile.made)], strict=True)
                if member.slot not in self.makers
            ]
        new = (member.slot for member in tile.made if member.slot not in self.makers)
        for slot, value in zip(new, self._made[key], strict=True):
            self._noted(slot, value)
        return None

    def _compared(self, tile: Tile, inputs: Sequence[Any], outs: list[Tensor]) -> int | None:
        """Runs all tiles, whose results become `outs`, and compares parts with what there is now.

        Returns:
            As `wrong`.
        """
        whole, body = self.whole, tile.body

        def compare(number: int, value: Any, start: int, length: int) -> None:
            slot, cut = tile.parts.get(number, (-1, (0, 0)))
            if slot in whole and differ([part_of(whole[slot], cut, start, length)], [value]):
                raise _DifferentError(number)

        own = list(inputs)
        for place, _ in body.changed:
            own[place] = own[place].clone()
        outs += body.outs(self.device)
        try:
            body.run(own, outs, compare)
        except _DifferentError as error:
            return error.number
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if _lacks_memory(error):
                raise
            return body.results[0].number if body.results else body.changed[0][1]
        for (place, number), member in zip(body.changed, tile.changed, strict=True):
            after = self.after.get(member.position)
            if after is not None and differ([own[place]], [after]):
                return number
        return None

    def _other_results(self, tile: Tile, outs: Sequence[Tensor]) -> int | None:
        """The number of the first result that is not the whole's; None if all are."""
        whole = self.whole
        values = outs[: len(tile.made)]  # without scratch memory
        for member, made, value in zip(tile.made, tile.body.results, values, strict=True):
            slots, found = self._noted(member.slot, value)
            if any(
                slot in whole and differ([own], [whole[slot]])
                for slot, own in zip(slots, found, strict=True)
            ):
                return made.number
        return None

    def _noted(self, slot: int, value: Tensor) -> tuple[Sequence[int | None], list[Tensor]]:
        """(slots, tensors) that calls make of what tiles have made. Of these and of what is made on
        the way, this round's values are those of which the original program has none.
        """
        slots: Sequence[int | None] = (slot,)
        found = [value]
        for call in (*self.found.later.get(slot, ()), None):
            made = zip(slots, found, strict=True)
            new = {one: tensor for one, tensor in made if one not in self.makers}
            self.values.update(new)  # type: ignore[arg-type]
            if call is not None:
                slots, found = call.outputs, self._run(call)
        return slots, found

    @property
    def held_bytes(self) -> int:
        """What the original calls have made that is still there."""
        slots = self.found.source.slots
        numbers = {meta.storage for slot in self.whole if (meta := slots[slot]) is not None}
        return sum(self.found.source.storages[number].size_bytes for number in numbers)

    def _staged(self, members: Sequence[Member]) -> Iterator[None]:
        """Runs the original calls, and stops after each stage with what it has made in `whole`. If
        there are several, nothing is kept of them but what exists in the program with tiles.
        Statistics of rows are not among it: they show in what is made of them.
        """
        source, gone = self.found.source, self.found.gone
        stages, most_bytes = _stages(self.found, members, self.room_bytes)
        every = list(itertools.chain(*(calls for calls, _ in stages)))
        for slot in itertools.chain(*(source.calls[index].refs() for index in every)):
            if source.storage_of(slot) not in gone and self.makers.get(slot) not in every:
                self.value(slot)  # it may take stages of its own
        if most_bytes + self.held_bytes > self.room_bytes:
            self._keep(())
        for calls, needed in stages:
            for index in calls:
                call = source.calls[index]
                if call.mutates:
                    if index not in self.after:
                        changed: int = call.args[0].slot
                        self.after[index] = self.value(changed).clone()
                        self._run(call, {changed: self.after[index]})
                    continue
                if all(slot is None or slot in self.whole for slot in call.outputs):
                    continue
                made = zip(call.outputs, self._run(call), strict=True)
                self.whole.update((slot, value) for slot, value in made if slot is not None)
            yield
            if len(stages) > 1:
                self._keep(needed)

    def _keep(self, needed: Collection[int]) -> None:
        """Keeps of what never exists whole these storages alone."""
        source, gone = self.found.source, self.found.gone
        for slot in list(self.whole):
            number = source.storage_of(slot)
            if number in gone and number not in needed:
                del self.whole[slot]

    def value(self, slot: int) -> Any:
        """The value of a slot: what the original calls make, or one of this round's."""
        if slot in self.whole:
            return self.whole[slot]
        if self.found.slots[slot] is None:  # a number, which tiles give to kernels as the whole
            return 0.5 + self.turn
        if slot not in self.values:
            index = self.makers.get(slot)
            view = None if index is None else self.found.source.calls[index]
            if view is not None and slot in self.members:
                for _ in self._staged([self.members[slot]]):
                    pass
                return self.whole[slot]
            if view is not None and view.target in VIEWS:
                made = zip(view.outputs, self._run(view), strict=True)
                self.values.update((one, tensor) for one, tensor in made if one is not None)
            else:
                self.values[slot] = self._value(slot)
        return self.values[slot]

    def _run(self, call: Call, others: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        """What a call makes, of `others` in place of values."""
        known = others or {}

        def value(ref: Ref) -> Any:
            return known[ref.slot] if ref.slot in known else self.value(ref.slot)

        args, kwargs = substitute(call.args, value), substitute(call.kwargs, value)
        if call.target is torch.ops.aten.embedding.default:
            # Indices that are made of this round's values may be none: tiles read others there.
            args = (args[0], rows_at(args[1], args[0].shape[0]), *args[2:])
        made = call.function(*args, **kwargs)
        return list(made) if call.returns_sequence or isinstance(made, (tuple, list)) else [made]

    def _value(self, slot: int) -> Tensor:
        """Values of a tensor, of which elements may lie in one place, as those of a view that
        repeats them.
        """
        meta = self.found.slots[slot]
        assert meta is not None
        once = [
            min(size, 1) if step == 0 else size
            for size, step in zip(meta.shape, meta.stride, strict=True)
        ]
        made = torch.empty_strided(once, meta.stride, dtype=meta.dtype, device=self.device)
        return self._filled(slot, made).expand(meta.shape)

    def _filled(self, slot: int, made: Tensor) -> Tensor:
        """Values of the kinds that kernels treat apart: ordinary ones, zeros, denormal and large
        ones; labels and indices of all sizes, some of them ignored.
        """
        meta = self.found.slots[slot]
        assert meta is not None
        if meta.dtype == torch.bool:
            return made.random_(0, 2, generator=self.generator)
        if not (meta.dtype.is_floating_point or meta.dtype.is_complex):
            first, end = self.found.extents.get(slot, (0, 2))
            made.random_(first, end, generator=self.generator)
            if slot in self.found.extents and self.turn:
                made.view(-1)[::5] = self._ignored(slot)
            return made
        made.normal_(generator=self.generator)
        if made.dim() == 0:
            return made.abs_().add_(1)
        if made.dim() >= 2:
            made.mul_(1 / made.shape[-1] ** 0.5)
            if self.turn:
                _make_hostile(made, self.generator)
        return made

    def _ignored(self, slot: int) -> int:
        for call in self.found.source.calls:
            if call.name.startswith("aten.nll_loss") and slot in call.refs():
                return int(call.args[-1] if "forward" in call.name else call.args[5])
        return self.found.extents[slot][0]


def _make_hostile(made: Tensor, generator: torch.Generator) -> None:
    """Large, zero and denormal rows among ordinary ones, a row whose softmax has denormal
    elements, and some more denormal elements: few, since they take long.
    """
    rows = made.movedim(max(range(made.dim() - 1), key=lambda dim: made.shape[dim]), 0)
    whole = made.shape[-1] ** 0.5
    rows[::7] *= 1e3 * whole
    rows[2::7] = 0
    if len(rows) > 4:
        rows[3] *= 16 * whole
        rows[4] *= 1e-39
    places = torch.randint(made.numel(), (_FEW,), generator=generator, device=made.device)
    made.put_(places, made.new_full((_FEW,), 1e-40))
