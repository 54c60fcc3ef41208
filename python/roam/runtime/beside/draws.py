"""Random numbers of a segment that a later one draws again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from roam.program.ir import Call, Result, ref_to
from roam.program.random_states import add_state, inserted, reading, setting
from roam.program.replay import state_bytes
from roam.runtime.beside.script import Outside, Script


@dataclass(slots=True)
class Draws:
    """The random operators of a segment, and the states of their generators.

    Attributes:
        given: for each slot of a state that the segment gets: the entry that draws from it again.
        put_back: likewise the slots of states that generators have before the segment, and after
            what is drawn again.
        read: the entries before which states are read. These are the segment's last results, in
            this order.
    """

    given: dict[int, int] = field(default_factory=dict)
    put_back: dict[int, torch.device] = field(default_factory=dict)
    read: list[int] = field(default_factory=list)
    _all: list[tuple[int, int, torch.device, bool | None]] = field(default_factory=list)

    def add(self, entry: int, call: int, device: torch.device, is_again: bool | None) -> None:
        """One more random operator, in their order.

        Args:
            entry, call: its number in the recording, and in the segment's program.
            is_again: whether it draws what it has drawn before, or what may be drawn again; None if
                neither.
        """
        self._all.append((entry, call, device, is_again))

    def put_into(self, script: Script) -> None:
        """Has a script's program read states, and draw from others."""
        if all(is_again is None for _, _, _, is_again in self._all):
            return
        program = script.program
        slots, storages = list(program.slots), list(program.storages)
        referenced, leaves = list(program.referenced), list(program.result.leaves)
        before: dict[int, list[Call]] = {}

        def state(device: torch.device) -> int:
            name = f"state {len(slots)} of a generator"
            return add_state(slots, storages, state_bytes(device) or 0, name)

        def sets(index: int, device: torch.device) -> int:
            slot = state(device)
            referenced.append((Outside(slot, f"state {slot}", "buffer"), slot))
            function, rest = setting(device)
            like = program.calls[min(index, len(program.calls) - 1)]
            call = Call(
                function, (ref_to(slot), *rest), {}, (None,), False, like.phase, like.source
            )
            call.random = True
            before.setdefault(index, []).append(call)
            return slot

        changed: dict[torch.device, int] = {}
        """The generators that are put back, each with the call before which this is done."""
        for entry, index, device, is_again in self._all:
            if is_again:
                self.given[sets(index, device)] = entry
                changed[device] = len(program.calls)
            elif changed.get(device) == len(program.calls):
                changed[device] = index
        for device, index in changed.items():
            self.put_back[sets(index, device)] = device
        for entry, index, device, is_again in self._all:
            if is_again is False:
                function, rest = reading(device)
                slot, like = state(device), program.calls[index]
                call = Call(function, rest, {}, (slot,), False, like.phase, like.source)
                call.random = True
                before.setdefault(index, []).append(call)
                leaves.append(ref_to(slot))
                self.read.append(entry)
        script.program = inserted(
            replace(
                program,
                slots=slots,
                storages=storages,
                referenced=referenced,
                result=Result(leaves=leaves),
            ),
            before,
        )
        script.slots = slots
