"""Finds out whether operators that run tile by tile give the very bits of the whole.

A library chooses how it multiplies by the sizes of what it gets, so nothing is assumed: each cut is
tried, on tensors of the step's own shapes, strides and dtypes, against the calls that it replaces.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from roam.kernels.kept import recall, retain
from roam.kernels.workspace import kernels_alone, settings, signature_of
from roam.program.bits import differ
from roam.program.ir import Call, Program, substitute
from roam.program.tiles import Cut, part_of
from roam.program.tiling import VIEWS, Member, Tile, Tiled, tiled

_KIND = "tiles"
_ROUNDS = 2
_MOST_ATTEMPTS = 16
_learned: dict[object, int] = {}
_one_at_a_time = threading.Lock()


def exactly_tiled(
    program: Program,
    gone: Collection[int],
    part_bytes: int,
    device: torch.device,
    room_bytes: int | None = None,
) -> Tiled | None:
    """As `tiled`, with nothing but cuts that have been tried and give the same bits.

    Nothing is tried for which the whole takes more than `room_bytes`; what was tried before needs
    no room.
    """
    refused: set[tuple[int, Cut, int]] = set()
    for _ in range(_MOST_ATTEMPTS):
        found = tiled(program, gone, part_bytes, refused)
        if found is None:
            return None
        wrong = _wrong(found, device, room_bytes)
        if wrong is None:
            return None
        if not wrong:
            return found
        refused |= wrong
    return None


def _wrong(
    found: Tiled, device: torch.device, room_bytes: int | None
) -> set[tuple[int, Cut, int]] | None:
    """(slot, cut, length) of results that have other bits; None if there is no room to try."""
    wrong: set[tuple[int, Cut, int]] = set()
    with _one_at_a_time:
        keys = [_key(found, tile) for tile in found.tiles]
        _learned.update(recall(_KIND, {key for key in keys if key not in _learned}, device))
        if any(key not in _learned for key in keys):
            if room_bytes is not None and _trial_bytes(found) > room_bytes:
                return None
            learned: dict[object, int] = {}
            with kernels_alone(device.type), torch.random.fork_rng(()):
                for turn in range(_ROUNDS):
                    trial = _Trial(found, device, turn)
                    for key, tile in zip(keys, found.tiles, strict=True):
                        learned[key] = learned.get(key, 0) | trial.wrong(tile)
            _learned.update(learned)
            retain(_KIND, learned, device)
        for key, tile in zip(keys, found.tiles, strict=True):
            for place, member in enumerate(tile.members):
                if _learned[key] >> place & 1:
                    wrong.add((member.slot, member.cut, tile.body.length))
    return wrong


def _key(found: Tiled, tile: Tile) -> object:
    """All that decides about the bits of a call that runs tile by tile, and of those that it
    replaces.
    """
    calls = {index: None for member in tile.members for index in _needed(found, member)}
    whole = tuple(signature_of(found.source, found.source.calls[index]) for index in calls)
    return tile.call.args[1], whole, settings()


def _needed(found: Tiled, member: Member) -> list[int]:
    """Calls of the original program that make something, in order, from what exists whole."""
    source, makers = found.source, _makers(found.source)
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
    """About the most that exists at once while cuts are tried: all that one call replaces, and what
    is read and made.
    """
    source = found.source
    most = read = 0
    for tile in found.tiles:
        indices = {index for member in tile.members for index in _needed(found, member)}
        made = {
            source.storage_of(slot)
            for index in indices
            for slot in source.calls[index].outputs
            if slot is not None
        }
        most = max(most, sum(source.storages[number].size_bytes for number in made if number >= 0))
        metas = {slot: found.slots[slot] for slot in tile.call.refs()}
        read += sum(
            math.prod(meta.shape) * meta.dtype.itemsize
            for meta in metas.values()
            if meta is not None
        )
    return most + read


def _makers(program: Program) -> dict[int, int]:
    return {
        slot: index
        for index, call in enumerate(program.calls)
        for slot in call.outputs
        if slot is not None
    }


class _Trial:
    """One round of values."""

    def __init__(self, found: Tiled, device: torch.device, turn: int) -> None:
        self.found, self.device, self.turn = found, device, turn
        self.values: dict[int, Any] = {}
        self.makers = _makers(found.source)
        self.generator = torch.Generator(device).manual_seed(turn)

    def wrong(self, tile: Tile) -> int:
        """A bit for each result of a call that is not the whole's. If one of the parts differs that
        they are made of, all count as wrong: other values might show it.
        """
        every = (1 << len(tile.members)) - 1
        whole = self._whole(tile)
        differing: set[int] = set()

        def compare(number: int, value: Any, start: int, length: int) -> None:
            slot, cut = tile.parts.get(number, (-1, (0, 0)))
            if slot in whole and differ([part_of(whole[slot], cut, start, length)], [value]):
                differing.add(number)

        inputs = [self.value(slot, {}) for slot in tile.call.refs()]
        outs = [
            torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device=self.device)
            for made in tile.body.results
        ]
        try:
            tile.body.run(inputs, outs, compare)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return every
        for member, value in zip(tile.members, outs, strict=True):
            self.values[member.slot] = value
        if differing:
            return every
        wrong = 0
        for place, member in enumerate(tile.members):
            loss = self.found.losses.get(member.slot)
            if loss is not None:
                original = self.found.source.calls[member.position].outputs
                expected = [whole[slot] for slot in original if slot is not None]
                wrong |= differ(self._run(loss, {}), expected) << place
            elif member.slot in whole:
                wrong |= differ([outs[place]], [whole[member.slot]]) << place
        return wrong

    def _whole(self, tile: Tile) -> dict[int, Any]:
        """What the original calls make, by slots. Statistics of rows are not among it: they show in
        what is made of them.
        """
        source = self.found.source
        values: dict[int, Any] = {}
        for index in sorted(
            {one for member in tile.members for one in _needed(self.found, member)}
        ):
            call = source.calls[index]
            made = zip(call.outputs, self._run(call, values), strict=True)
            values.update((slot, value) for slot, value in made if slot is not None)
        return values

    def value(self, slot: int, values: dict[int, Any]) -> Any:
        """The value of a slot, among those given or one of this round's."""
        if slot in values:
            return values[slot]
        if slot not in self.values:
            index = self.makers.get(slot)
            view = None if index is None else self.found.source.calls[index]
            if view is not None and view.target in VIEWS:
                made = zip(view.outputs, self._run(view, values), strict=True)
                self.values.update((one, tensor) for one, tensor in made if one is not None)
            else:
                self.values[slot] = self._value(slot)
        return self.values[slot]

    def _run(self, call: Call, values: dict[int, Any]) -> list[Tensor]:
        args = substitute(call.args, lambda ref: self.value(ref.slot, values))
        kwargs = substitute(call.kwargs, lambda ref: self.value(ref.slot, values))
        made = call.function(*args, **kwargs)
        return list(made) if call.returns_sequence or isinstance(made, (tuple, list)) else [made]

    def _value(self, slot: int) -> Tensor:
        """Values of the kinds that kernels treat apart: ordinary ones, zeros, denormal and large
        ones; labels and indices of all sizes, some of them ignored.
        """
        meta = self.found.slots[slot]
        assert meta is not None
        made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=self.device)
        if meta.dtype == torch.bool:
            return made.random_(0, 2, generator=self.generator)
        if not (meta.dtype.is_floating_point or meta.dtype.is_complex):
            first, end = self.found.extents.get(slot, (0, 2))
            made.random_(first, end, generator=self.generator)
            if slot in self.found.extents and self.turn:
                made.view(-1)[::5] = self._ignored(slot)
            return made
        made.normal_(generator=self.generator)
        if made.dim() >= 2:
            made.mul_(1 / made.shape[-1] ** 0.5 if self.turn == 0 else 1)
            if self.turn:
                made[::7] *= 1e3
                made[1::97] *= 1e-41  # few: they take long
                made[2::7] = 0
        elif made.dim() == 0:
            made.abs_().add_(1)
        return made

    def _ignored(self, slot: int) -> int:
        for call in self.found.source.calls:
            if call.name.startswith("aten.nll_loss") and slot in call.refs():
                return int(call.args[-1] if "forward" in call.name else call.args[5])
        return self.found.extents[slot][0]
