"""The rules by which operators are cut into tiles: a program runs call by call, as it was recorded
and with tiles, and has to change and return the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import roam
from roam.kernels.tiles import Cutter
from roam.program import tiling
from roam.program.bits import differ
from roam.program.ir import Program
from roam.program.tile_works import Step, is_outside, places_at
from roam.program.tiles import SLICED, refs_of
from roam.program.tiling import Tile, Tiled, candidates, out_of_place, tiled, with_sources
from roam.runtime.strategy import _Chooser

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
aten = torch.ops.aten
TOKENS, WIDTH, WORDS = 96, 24, 500


class _Captured(Exception):
    pass


def exactly_tiled(program: Program, gone: set[int], part_bytes: int) -> Tiled | None:
    """The first way to cut some tensors that is exact."""
    cutter = Cutter(program, gone, torch.device("cpu"))
    return next((found for found in cutter.ways(part_bytes) if cutter.is_exact(found)), None)


def captured(
    monkeypatch: pytest.MonkeyPatch, step: Callable[..., Any], inputs: Iterable[Tensor]
) -> Program:
    """The program of a step that has run before."""
    found: list[Program] = []

    def spy(self: _Chooser, *_: Any) -> None:
        found.append(self._variant.program)
        raise _Captured

    step(*inputs)
    compiled = roam.compile(step)
    with monkeypatch.context() as patched:
        patched.setattr(_Chooser, "choose", spy)
        with pytest.raises(_Captured):
            compiled(*inputs)
    return out_of_place(found[0])


VALUES = (float("inf"), float("-inf"), 1e-40, -0.0, 1e30, float("nan"))


def values_of(
    program: Program, extents: dict[int, tuple[int, int]], hostile: int
) -> dict[int, Any]:
    """Random values of what a program reads, so many of `VALUES` among them."""
    generator = torch.Generator().manual_seed(hostile)
    found: dict[int, Any] = {slot: tensor.clone() for tensor, slot in program.constants}
    for reference, slot in program.referenced:
        meta = program.slots[slot]
        if meta is None:
            found[slot] = reference.get()
            continue
        made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
        if not meta.dtype.is_floating_point:
            made.random_(*extents.get(slot, (0, 2)), generator=generator)
        elif not meta.shape:
            made.fill_(3)  # how many steps there were
        else:
            made.normal_(generator=generator)
            count = made.numel() // 64
            places = torch.randperm(made.numel(), generator=generator)[:count]
            if hostile:
                values = torch.tensor(VALUES[:hostile], dtype=meta.dtype)
                made.put_(places, values.repeat(count // hostile + 1)[:count])
        found[slot] = made
    return found


def ran(program: Program, given: dict[int, Any]) -> list[Tensor]:
    """What a program changes and returns, of copies of what it reads."""
    values = {
        slot: value.clone() if isinstance(value, Tensor) else value for slot, value in given.items()
    }
    for call in program.calls:
        if call.skip_if is None or not values[call.skip_if]:
            call.run(values)
    read = [values[slot] for _, slot in program.referenced]
    return [
        one
        for one in (*read, *(values[slot] for slot in program.outgoing()))
        if isinstance(one, Tensor)
    ]


def has_same_bits(found: Tiled, hostile: int) -> bool:
    """Whether the program with tiles makes what the original one does. Of a NaN its sign and
    payload are left out: kernels take these from any of their arguments.
    """
    program, source = found.program, found.source
    given = values_of(source, found.extents, hostile)
    names = {repr(reference): slot for reference, slot in source.referenced}
    same = {slot: given[names[repr(reference)]] for reference, slot in program.referenced}
    same |= {slot: tensor.clone() for tensor, slot in program.constants}
    assert len(program.referenced) == len(source.referenced)
    pairs = zip(ran(source, given), ran(program, same), strict=True)
    return not any(
        differ([torch.where(one.isnan(), 0, one)], [torch.where(other.isnan(), 0, other)])
        or bool((one.isnan() != other.isnan()).any())
        for one, other in pairs
    )


class Experts(nn.Module):
    """Each token has the weights of an expert of its own, as `batched_mm` of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 2 * WIDTH, WIDTH))
        self.choice = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        of = self.choice(x).argmax(-1)
        made = torch.bmm(self.weights[of], x.unsqueeze(-1)).squeeze(-1)
        return made[:, :WIDTH] * made[:, WIDTH:].sigmoid()


class Attention(nn.Module):
    """Attention with a bias of positions, written out or by PyTorch."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bias = nn.Embedding(8, 2)
        self.is_fused = is_fused

    def forward(self, x: Tensor) -> Any:
        q, k, v = (
            one(x).unflatten(-1, (2, -1)).transpose(0, 1)[None] for one in (self.q, self.k, self.v)
        )
        place = torch.arange(len(x))
        bias = self.bias((place[None] - place[:, None]).clamp(0, 7)).permute(2, 0, 1)[None]
        mask = torch.zeros(1, 2, len(x), len(x))
        if self.is_fused:
            made = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            made = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias + mask)
        return made.transpose(1, 2).flatten(-2)[0]


class Stacked(nn.Module):
    """Two views of the words, stacked and joined."""

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([x, x.square()], dim=1)
        return both.sum(1) + torch.cat([x[:, 1:], x[:, :1]], 1)


class Embedded(nn.Module):
    """Rows of a table that are read again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDTH, padding_idx=0)

    def forward(self, x: Tensor) -> Any:
        return x * self.table(torch.arange(len(x)) % 40)


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Identity,
    "experts": Experts,
    "written attention": lambda: Attention(is_fused=False),
    "fused attention": lambda: Attention(is_fused=True),
    "stack and cat": Stacked,
    "embedding": Embedded,
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": torch.optim.AdamW,
    "Adam, amsgrad": lambda some: torch.optim.Adam(some, amsgrad=True, weight_decay=0.1),
    "RMSprop": torch.optim.RMSprop,
    "momentum": lambda some: torch.optim.SGD(some, lr=0.1, momentum=0.9, nesterov=True),
}


def made(
    middle: str, optimizer: str, dtype: torch.dtype, *, tied: bool
) -> tuple[Callable[..., Any], list[Tensor]]:
    """A step of two batches with clipping, and these."""
    torch.manual_seed(0)
    words, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    if tied:
        head.weight = words.weight
    model = nn.Sequential(words, MIDDLES[middle](), head).to(dtype)
    if middle == "fused attention":
        model[1].bias.requires_grad_(False)
    updates = OPTIMIZERS[optimizer](model.parameters())

    def step(*batches: Tensor) -> None:
        updates.zero_grad()
        for tokens, labels in zip(batches[::2], batches[1::2], strict=True):
            functional.cross_entropy(model(tokens).float(), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        updates.step()

    return step, [torch.randint(WORDS, (TOKENS,)) for _ in range(4)]


CASES = [
    ("nothing", "AdamW", torch.float32, True),
    ("experts", "AdamW", torch.float32, False),
    ("written attention", "momentum", torch.float32, True),
    ("fused attention", "RMSprop", torch.float32, False),
    ("stack and cat", "Adam, amsgrad", torch.float32, True),
    ("embedding", "AdamW", torch.bfloat16, False),
    ("experts", "RMSprop", torch.bfloat16, True),
    ("written attention", "AdamW", torch.bfloat16, False),
]


@pytest.mark.sweep
@pytest.mark.parametrize("parts", [2, 16])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: ", ".join(map(str, case)).replace("torch.", "")
)
def test_tiles_change_and_return_the_same(
    case: tuple[str, str, torch.dtype, bool], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is larger than a few rows never exists whole."""
    middle, optimizer, dtype, tied = case
    program = captured(monkeypatch, *made(middle, optimizer, dtype, tied=tied))
    sizes = candidates(program)
    for least_bytes in (WORDS * WIDTH, 256):
        gone = {number for number, size in sizes.items() if size >= least_bytes}
        found = exactly_tiled(program, gone, max(sizes.values()) // parts)
        assert found is not None
        assert any(one.body.changed for one in found.tiles)
        for hostile in (0, 4, 6):
            assert has_same_bits(found, hostile)


def targets_of(tile: Tile, program: Program) -> set[Any]:
    """The operators that make what a call makes tile by tile."""
    return {program.calls[member.position].target for member in tile.members}


def gone_names(found: Tiled) -> set[str]:
    """The operators that make what never exists whole."""
    source = found.source
    return {source.calls[source.storages[number].creator].name for number in found.gone}


@pytest.mark.parametrize(
    ("middle", "names"),
    [
        ("nothing", {"aten.embedding_dense_backward.default", "aten.sqrt.default"}),
        ("experts", {"aten.index.Tensor", "aten.bmm.default"}),
        ("written attention", {"aten._safe_softmax.default", "aten.embedding.default"}),
        ("fused attention", {"aten.zeros.default"}),
        ("stack and cat", {"aten.stack.default", "aten.cat.default"}),
    ],
)
def test_what_never_exists_whole(
    middle: str, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = captured(monkeypatch, *made(middle, "AdamW", torch.float32, tied=False))
    sizes = candidates(program)
    gone = {number for number, size in sizes.items() if size >= TOKENS * WIDTH * 4}
    found = tiled(program, gone, max(sizes.values()) // 8)
    assert found is not None
    assert names <= gone_names(found)
    changing = {
        found.source.calls[one.position].name for tile in found.tiles for one in tile.changed
    }
    assert "aten.addcdiv_.default" in changing


def test_an_update_that_gets_other_bits_is_not_cut(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What updates a part of a parameter gets other last bits in this test."""
    monkeypatch.setenv("ROAM_CACHE_DIR", str(tmp_path))
    program = captured(monkeypatch, *made("nothing", "AdamW", torch.float32, tied=True))
    sizes = candidates(program)
    gone = {number for number, size in sizes.items() if size >= WORDS * WIDTH * 4}
    part_bytes = max(sizes.values()) // 8
    ordinary = exactly_tiled(program, gone, part_bytes)
    assert ordinary is not None
    assert any(one.body.changed for one in ordinary.tiles)

    def faulty(changed: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target(changed, *args, **kwargs)
        if changed.numel() != WORDS * WIDTH:
            changed.view(-1)[-1] = torch.nextafter(changed.view(-1)[-1], torch.tensor(torch.inf))
        return changed

    target = torch.ops.aten.addcdiv_.default
    changing = tiling.Builder.changing

    def faulty_changing(self: tiling.Builder, call: Any, cut: tuple[int, int]) -> int:
        number = changing(self, call=call, cut=cut)
        if call.target is target:
            self._works[-1] = replace(self._works[-1], target=faulty)
        return number

    monkeypatch.setattr(tiling.Builder, "changing", faulty_changing)
    found = exactly_tiled(program, gone, part_bytes)
    assert found is not None
    changed = {
        found.source.calls[one.position].target for tile in found.tiles for one in tile.changed
    }
    assert target not in changed


def test_what_is_changed_is_read_by_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body in which it is otherwise is none."""
    program = captured(monkeypatch, *made("nothing", "AdamW", torch.float32, tied=True))
    sizes = candidates(program)
    gone = {number for number, size in sizes.items() if size >= WORDS * WIDTH * 4}
    found = tiled(program, gone, max(sizes.values()) // 8)
    assert found is not None
    body = next(tile.body for tile in found.tiles if tile.body.changed)
    ((place, _),) = body.changed
    (work,) = (one for one in body.works if place in refs_of([one.args]))
    for works in (
        (*body.works, work),
        (*body.works, replace(work, args=(work.args[1], *work.args), makes=(99,))),
    ):
        with pytest.raises((AssertionError, ValueError)):
            replace(body, works=works)
    inputs = [None if at == place else cut for at, cut in enumerate(body.inputs)]
    with pytest.raises(AssertionError):
        replace(body, inputs=tuple(inputs))


def test_scores_of_one_sample_and_one_head_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dimensions of one element do not keep views of transposed tensors from being cut."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def step(x: Tensor) -> None:
        layers.zero_grad()
        q, k, v = (layer(x).unflatten(-1, (1, -1)).transpose(1, 2) for layer in layers)
        ((q @ k.transpose(-1, -2)).softmax(-1) @ v).square().mean().backward()

    program = captured(monkeypatch, step, [torch.randn(1, TOKENS, WIDTH)])
    scores = {n for n, size in candidates(program).items() if size == TOKENS * TOKENS * 4}
    found = exactly_tiled(program, scores, TOKENS * TOKENS)
    assert found is not None
    assert found.gone == scores


def test_changes_are_made_out_of_place_where_they_make_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Integers too, as the buckets of T5's positions; not what would have another dtype."""
    table = nn.Embedding(TOKENS, WIDTH)

    def step(x: Tensor) -> None:
        table.zero_grad()
        places = x.argsort(-1)
        places = places * 2
        places += x.argsort(-1, descending=True)
        chosen = x * 2
        chosen.logical_and_(x)
        (table(places.clamp(0, TOKENS - 1)) * chosen[..., None]).sum().backward()

    program = captured(monkeypatch, step, [torch.randn(4, TOKENS)])
    names = [call.name for call in program.calls]
    assert "aten.add.Tensor" in names
    assert "aten.add_.Tensor" not in names
    assert "aten.logical_and_.default" in names


def test_positions_of_written_attention_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the size of the scores exists whole, not even the indices of their bias: its
    gradient is summed in blocks of queries, and the keys' and values' are made by keys.
    """
    torch.manual_seed(0)
    attention = Attention(is_fused=False)
    updates = torch.optim.SGD(attention.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        attention(x).square().mean().backward()
        updates.step()
        updates.zero_grad()

    program = captured(monkeypatch, step, [torch.randn(TOKENS, WIDTH)])
    sizes = candidates(program)
    large = 2 * TOKENS * TOKENS * 4
    gone = {number for number, size in sizes.items() if size >= large}
    for number, storage in enumerate(program.storages):
        is_large = storage.creator >= 0 and storage.size_bytes >= large
        assert is_large == (number in gone)
    found = exactly_tiled(program, gone, large // 4)
    assert found is not None
    left = {program.calls[program.storages[number].creator].name for number in gone - found.gone}
    assert not left
    sums = [tile for tile in found.tiles if any(made.cut is None for made in tile.body.results)]
    assert [tile.body.size for tile in sums] == [TOKENS]
    # One call makes the indices, and keeps them as bytes for all others.
    making = [
        tile
        for tile in found.tiles
        if any(work.target is aten.clamp.default for work in tile.body.works)
    ]
    assert len(making) == 1
    assert torch.uint8 in {made.dtype for made in making[0].body.results}
    for hostile in (0, 4, 6):
        assert has_same_bits(found, hostile)
    # Where the indices exist whole, all is cut by heads, which share what is made again.
    indices = next(
        n for n in gone if program.calls[program.storages[n].creator].name == "aten.clamp.default"
    )
    kept = exactly_tiled(program, gone - {indices}, large // 2)
    assert kept is not None
    assert kept.cost < found.cost
    products = [tile for tile in kept.tiles if aten.bmm.default in targets_of(tile, program)]
    assert {tile.body.size for tile in products} == {2}
    assert has_same_bits(kept, 4)


@pytest.mark.parametrize("rows", [8, 255, 256])
@pytest.mark.parametrize("wrong", [1000.0, -1000.0])
def test_indices_that_never_exist_whole_are_refused(
    wrong: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the whole, by the least and the largest of each row, whether they go into bytes or
    not.
    """
    table = nn.Embedding(rows, 2)
    updates = torch.optim.SGD(table.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        table((x * rows).long()).sum((1, 2)).square().sum().backward()
        updates.step()
        updates.zero_grad()

    x = torch.rand(TOKENS, TOKENS)
    program = captured(monkeypatch, step, [x])
    gone = {n for n, size in candidates(program).items() if size >= TOKENS * TOKENS * 4}
    found = exactly_tiled(program, gone, TOKENS * TOKENS * 4 // 8)
    assert found is not None
    assert found.gone == gone
    results = [made for tile in found.tiles for made in tile.body.results]
    assert any(made.cut is None for made in results)
    assert any(made.dtype == torch.uint8 for made in results) == (rows < 256)
    assert has_same_bits_of(found, x)
    x[5, 7] = wrong
    errors = []
    for one in (found.source, found.program):
        with pytest.raises(IndexError) as error:
            ran(one, given_of(one, x))
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_what_is_gone_takes_what_it_is_made_of_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller tensors of which only that is made, element by element."""
    table = nn.Embedding(8, 2)

    def step(x: Tensor) -> None:
        table.zero_grad()
        halves, others = x.to(torch.bfloat16), x.sum(1, keepdim=True)
        table((halves.float() * 4 + others * 0).long()).sum().backward()

    program = captured(monkeypatch, step, [torch.rand(TOKENS, TOKENS)])
    sizes = candidates(program)
    gone = {n for n, size in sizes.items() if size >= TOKENS * TOKENS * 8}
    found = with_sources(program, gone, sizes)
    names = [program.calls[program.storages[n].creator].name for n in sorted(found - gone)]
    assert sorted(names) == ["aten._to_copy.default"] * 2 + ["aten.add.Tensor", "aten.mul.Tensor"]


def given_of(program: Program, x: Tensor) -> dict[int, Any]:
    """What a program reads: where it is of the shape of `x`, that."""
    found: dict[int, Any] = {slot: tensor for tensor, slot in program.constants}
    for reference, slot in program.referenced:
        meta = program.slots[slot]
        is_x = meta is not None and meta.shape == x.shape
        found[slot] = x if is_x else reference.get()
        if isinstance(found[slot], Tensor):
            found[slot] = found[slot].detach()
    return found


def has_same_bits_of(found: Tiled, x: Tensor) -> bool:
    return not differ(*(ran(one, given_of(one, x)) for one in (found.source, found.program)))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_elements_are_found_along_the_axis_of_a_slice(data: st.DataObject) -> None:
    """As PyTorch slices a dimension of three, and as it makes the gradient of that."""
    outer, whole, behind = (data.draw(st.integers(1, most)) for most in (3, 9, 3))
    first = data.draw(st.integers(0, whole - 1))
    stride = data.draw(st.integers(1, 3))
    count = data.draw(st.integers(1, (whole - first - 1) // stride + 1))
    end = first + (count - 1) * stride + 1
    tensor = torch.arange(outer * whole * behind, dtype=torch.float32).add_(1)
    shape = outer, whole, behind
    part = tensor.view(shape)[:, first:end:stride]
    step = Step(behind, whole, count, first, stride, to_part=False)
    start = data.draw(st.integers(0, part.numel() - 1))
    length = data.draw(st.integers(1, part.numel() - start))
    device = tensor.device
    places = places_at(start, length, (step,), device)
    assert torch.equal(tensor[places], part.flatten()[start : start + length])
    back = replace(step, to_part=True)
    gradient = aten.slice_backward(part, shape, 1, first, end, stride).flatten()
    places = places_at(0, len(tensor), (back,), device)
    found = part.flatten()[places].masked_fill(is_outside(0, len(tensor), (back,), device), 0)
    assert torch.equal(found, gradient)
    there = places_at(0, part.numel(), (step, back), device)
    assert torch.equal(there, torch.arange(part.numel()))
    sliced = [1, behind, whole, count, first, stride]
    made = SLICED(tensor.view(1, -1, 1), [1, part.numel(), 1], sliced)
    assert torch.equal(made.flatten(), part.flatten())
