"""What proves that copies beside a step are safe refuses those that are not: each call that begins
or waits for a copy is moved, and bytes that are being copied are given to others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roam
from roam.program.ir import Program
from roam.program.pages import Arrived, Fetch, Keep, Left, Put
from roam.program.transit import Places, check
from roam.runtime import strategy

WIDTH = 64
Checked = tuple[Program, Program, tuple[int, ...], list[int], Places]


def train_step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """What is checked for the second call of a step: a real program, with a pool."""
    found: list[Any] = []

    def noted(*given: Any) -> None:
        found.append(given)
        check(*given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(strategy, "check", noted)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        limit = sum(one.nbytes for one in model.parameters())
        step = roam.compile(
            train_step, memory=limit, offload=Path(tmp_path_factory.mktemp("tier")), pool=True
        )
        for _ in range(2):
            step(model, optimizer, torch.ones(4, WIDTH))
    return found[-1]  # type: ignore[no-any-return]


def places(checked: Checked, *targets: type) -> Iterator[int]:
    """Where in the order calls with these targets stand."""
    _, after, _, order, _ = checked
    yield from (at for at, index in enumerate(order) if isinstance(after.calls[index].target, targets))  # fmt: skip


def refused(checked: Checked, order: list[int], lies: Places | None = None) -> bool:
    before, after, numbers, _, known = checked
    try:
        check(before, after, numbers, order, lies or known)
    except roam.PlanError as error:
        return error.code == "self_check"
    return False


def moved(order: list[int], at: int, to: int) -> list[int]:
    """The order with one call elsewhere."""
    rest = order[:at] + order[at + 1 :]
    return [*rest[:to], order[at], *rest[to:]]


def test_the_plan_passes_and_has_copies_of_all_kinds(checked: Checked) -> None:
    assert not refused(checked, checked[3])
    for target in (Fetch, Put, Keep, Arrived, Left):
        assert list(places(checked, target))


def test_nothing_is_used_before_it_has_arrived(checked: Checked) -> None:
    _, after, _, order, _ = checked
    for at in places(checked, Arrived):
        storage = after.storage_of(after.calls[order[at]].args[0].slot)
        use = next(
            place
            for place in range(at + 1, len(order))
            if storage in map(after.storage_of, after.calls[order[place]].refs())
        )
        assert refused(checked, moved(order, at, use))


def test_each_copy_is_waited_for(checked: Checked) -> None:
    order = checked[3]
    for at in places(checked, Arrived, Left):
        assert refused(checked, order[:at] + order[at + 1 :])


def test_all_copies_are_made_in_one_order(checked: Checked) -> None:
    """A call that copied by itself would overtake those that have begun."""
    before, after, numbers, order, lies = checked
    for at in places(checked, Fetch, Put):
        call = after.calls[order[at]]
        slot: Any = call.outputs[0] if isinstance(call.target, Fetch) else call.args[0].slot
        calls = list(after.calls)
        calls[order[at]] = replace(call, target=replace(call.target, is_beside=False))
        wait = next(
            place
            for place in places(checked, Arrived, Left)
            if place > at and after.calls[order[place]].args[0].slot == slot
        )
        alone = before, replace(after, calls=calls), numbers, order, lies
        assert refused(alone, order[:wait] + order[wait + 1 :])


def test_nothing_is_read_from_a_file_before_it_is_written_there(checked: Checked) -> None:
    _, after, _, order, _ = checked
    count = 0
    for at in places(checked, Fetch):
        file = after.storage_of(after.calls[order[at]].args[0].slot)
        written = [
            place
            for place in places(checked, Put)
            if place < at and after.storage_of(after.calls[order[place]].mutates[0]) == file
        ]
        if written:
            count += 1
            assert refused(checked, moved(order, at, written[-1]))
    kept = {after.calls[order[at]].outputs[0] for at in places(checked, Keep)}
    assert count or kept


def test_nothing_changes_what_has_not_left(checked: Checked) -> None:
    """A write begins before the last change."""
    _, after, _, order, _ = checked
    count = 0
    for at in places(checked, Put):
        slot = after.calls[order[at]].args[0].slot
        storage = after.storage_of(slot)
        changes = [
            place
            for place in range(at)
            if storage in map(after.storage_of, after.calls[order[place]].mutates)
        ]
        if changes:
            count += 1
            assert refused(checked, moved(order, at, changes[-1]))
    assert count


def test_bytes_that_are_being_copied_are_nobody_elses(checked: Checked) -> None:
    """What is made during a copy is put where the copy goes."""
    _, after, _, order, known = checked
    count = 0
    for at in places(checked, Fetch, Put, Keep):
        call = after.calls[order[at]]
        slot: Any = call.outputs[0] if isinstance(call.target, Fetch) else call.args[0].slot
        storage = after.storage_of(slot)
        end = next(
            place
            for place in places(checked, Arrived, Left)
            if place > at and after.storage_of(after.calls[order[place]].args[0].slot) == storage
        )
        others = [
            number
            for number, one in enumerate(after.storages)
            if one.creator in order[at + 1 : end] and number in known.offsets
        ]
        if storage in known.offsets and others:
            count += 1
            offsets = {**known.offsets, others[0]: known.offsets[storage]}
            assert refused(checked, order, replace(known, offsets=offsets))
    assert count
