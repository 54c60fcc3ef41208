"""Finds out whether operators that run tile by tile give the very bits of the whole.

A library chooses how it multiplies by the sizes of what it gets, so nothing is assumed: each cut is
tried, on tensors of the step's own shapes, strides and dtypes, against the calls that it replaces.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from roam.kernels.kept import recall, retain
from roam.kernels.workspace import kernels_alone, settings, signature_of
from roam.program.bits import differ
from roam.program.ir import Call, Program, substitute
from roam.program.tiles import Cut
from roam.program.tiling import VIEWS, Member, Tile, Tiled, tiled

_KIND = "tiles"
_ROUNDS = 2
_MOST_ATTEMPTS = 16
_learned: dict[object, int] = {}
_one_at_a_time = threading.Lock()


def exactly_tiled(
    program: Program, gone: Collection[int], part_bytes: int, device: torch.device
) -> Tiled | None:
    """As `tiled`, with nothing but cuts that have been tried and give the same bits."""
    refused: set[tuple[int, Cut, int]] = set()
    for _ in range(_MOST_ATTEMPTS):
        found = tiled(program, gone, part_bytes, refused)
        if found is None:
            return None
        wrong = _wrong(found, device)
        if not wrong:
            return found
        refused |= wrong
    return None


def _wrong(found: Tiled, device: torch.device) -> set[tuple[int, Cut, int]]:
    """(slot, cut, length) of results that have other bits."""
    wrong: set[tuple[int, Cut, int]] = set()
    with _one_at_a_time:
        keys = [_key(found, tile) for tile in found.tiles]
        _learned.update(recall(_KIND, {key for key in keys if key not in _learned}, device))
        if any(key not in _learned for key in keys):
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
        """A bit for each result of a call that is not the whole's."""
        try:
            made = self._run(tile.call, self.values)
            wrong = 0
            for place, member in enumerate(tile.members):
                if not self._is_equal(member, made[place]):
                    wrong |= 1 << place
        except (RuntimeError, IndexError, ValueError, TypeError):
            return (1 << len(tile.members)) - 1
        for member, value in zip(tile.members, made, strict=True):
            self.values[member.slot] = value
        return wrong

    def _is_equal(self, member: Member, made: Tensor) -> bool:
        source = self.found.source
        call = source.calls[member.position]
        loss = self.found.losses.get(member.slot)
        if member.slot not in call.outputs and loss is None:
            return True  # statistics, which show in what is made of them
        expected = self._whole(member)
        if loss is None:
            return not differ([made], [expected[call.outputs.index(member.slot)]])
        return not differ(self._run(loss, {**self.values, member.slot: made}), expected)

    def _whole(self, member: Member) -> list[Tensor]:
        """What the original calls make."""
        source = self.found.source
        needed = _needed(self.found, member)
        last = {slot: index for index in needed for slot in source.calls[index].refs()}
        values: dict[int, Any] = {}
        result: list[Tensor] = []
        for index in needed:
            call = source.calls[index]
            result = self._run(call, values)
            values.update(
                (slot, value)
                for slot, value in zip(call.outputs, result, strict=True)
                if slot is not None and last.get(slot, -1) > index
            )
            for slot in call.refs():
                if last[slot] == index:
                    values.pop(slot, None)
        return result

    def _run(self, call: Call, values: dict[int, Any]) -> list[Tensor]:
        def value(slot: int) -> Any:
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

        args = substitute(call.args, lambda ref: value(ref.slot))
        kwargs = substitute(call.kwargs, lambda ref: value(ref.slot))
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
