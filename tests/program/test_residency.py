"""When tensors are in memory: choices keep within the room, and bounds hold against all choices."""

from __future__ import annotations

import itertools
import random

import pytest

from roam.program.residency import Way, choose


def ways(generator: random.Random, size_bytes: int, moments: int) -> list[Way]:
    """A tensor with two uses, in memory all the time, between them, or at each of them."""
    one, other = sorted(generator.sample(range(moments), 2))
    return [
        Way(0, ((0, moments - 1),)),
        Way(2 * size_bytes, ((one, other),)),
        Way(3 * size_bytes, ((one, one), (other, other))),
    ]


def fits(sizes: list[int], chosen: list[Way], room: list[int]) -> bool:
    return all(
        sum(size for size, way in zip(sizes, chosen, strict=True) if way.is_at(moment)) <= there
        for moment, there in enumerate(room)
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_choice_fits_and_no_choice_moves_less_than_the_bound(seed: int) -> None:
    generator = random.Random(seed)
    sizes = [generator.randint(1, 9) for _ in range(6)]
    some = [ways(generator, size, 8) for size in sizes]
    room = [generator.randint(sum(sizes) // 2, sum(sizes)) for _ in range(8)]
    all_moved = [
        sum(way.moved_bytes for way in chosen)
        for chosen in itertools.product(*some)
        if fits(sizes, list(chosen), room)
    ]
    found = choose(sizes, some, room)
    if not all_moved:
        assert found.most_over_bytes > 0
        return
    assert found.least_bytes <= min(all_moved)
    if not found.most_over_bytes:
        chosen = [one[number] for one, number in zip(some, found.ways, strict=True)]
        assert fits(sizes, chosen, room)
        assert found.moved_bytes == sum(way.moved_bytes for way in chosen) >= min(all_moved)


def test_many_equal_tensors_move_what_has_to_be_moved() -> None:
    """Half of them have no room between their uses."""
    count, moments = 40, 80
    some = [
        [
            Way(0, ((0, moments - 1),)),
            Way(2, ((one, moments - 1 - one),)),
            Way(3, ((one, one), (moments - 1 - one, moments - 1 - one))),
        ]
        for one in range(count)
    ]
    found = choose([1] * count, some, [count // 2] * moments)
    assert not found.most_over_bytes
    assert found.least_bytes <= found.moved_bytes <= 1.1 * found.least_bytes
