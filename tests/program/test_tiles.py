"""Operators that run tile by tile: the bits, the memory, and what is never cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import roam
from roam.kernels import tiles
from roam.kernels.tiles import Cutter
from roam.program import tiling
from roam.program.bits import differ
from roam.program.ir import Program, Ref, TensorMeta
from roam.program.tile_places import with_places
from roam.program.tile_works import add_product, add_rows, pieces
from roam.program.tiles import Body, Held, Length, Made, Work, part_of, refs_of, run_work
from roam.program.tiling import Tiled, candidates, out_of_place, tiled
from roam.runtime import strategy
from roam.runtime.memory_profiler import measure_peak
from roam.runtime.strategy import _Chooser

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES, WIDTH, ROWS = 2048, 64, 512


def exactly_tiled(
    program: Program, gone: set[int], part_bytes: int, room_bytes: int | None = None
) -> Tiled | None:
    """The first way to cut some tensors that is exact."""
    cutter = Cutter(program, gone, torch.device("cpu"), room_bytes)
    return next((found for found in cutter.ways(part_bytes) if cutter.is_exact(found)), None)


class Model(nn.Module):
    """A language model without a body."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        return self.head(hidden + self.down(functional.gelu(self.up(hidden))))  # type: ignore[no-any-return]


Loss = Callable[[Tensor, Tensor], Any]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels)


def softcapped(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(30 * torch.tanh(logits.float() / 30), labels)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="sum") / len(labels)


def of_each(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="none").mean()


def with_accuracy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, label_smoothing=0.1)


def distilled(logits: Tensor, labels: Tensor) -> Tensor:
    scores = functional.log_softmax(logits.float(), -1)
    teacher = (labels[:, None] % 7 == torch.arange(CLASSES)[None] % 7) / 300
    return -(scores * teacher).sum(-1).mean()


def as_they_are(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.arange(CLASSES) % 5 / 4 + 0.3
    return functional.cross_entropy(logits, labels, weight=weight.to(logits.dtype))


def weighted_each(logits: Tensor, labels: Tensor) -> Tensor:
    weight = (torch.arange(CLASSES) % 5 / 4 + 0.3).to(logits.dtype)
    losses = [
        functional.cross_entropy(logits, labels, weight=weight, reduction=reduction)
        for reduction in ("none", "sum")
    ]
    return losses[0].mean() + losses[1] / 1000


def with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return as_they_are(logits, labels) + 1e-2 * (logits.logsumexp(-1) ** 2).mean()


def with_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    logits = logits.float()
    scores = logits.log_softmax(-1)
    entropy = -(scores.exp() * scores).sum(-1).mean()
    best, place = scores.detach().max(-1)
    is_near = (logits.detach().topk(5, -1).indices == labels[:, None]).any(-1)
    loss = as_they_are(logits, labels) - 0.01 * entropy
    return loss, best.mean(), (place == labels).float().mean(), is_near.float().mean()


def of_preferences(logits: Tensor, labels: Tensor) -> Tensor:
    """Half of the rows are preferred to the other half."""
    logits, labels = logits.unflatten(0, (2, -1)), labels.unflatten(0, (2, -1))
    index = labels.clamp(0).unsqueeze(2)
    scores = torch.gather(logits.log_softmax(-1), 2, index).squeeze(2)
    better, worse = (scores * (labels != -100)).sum(-1)
    return -functional.logsigmoid(0.1 * (better - worse))


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    scores = logits.log_softmax(-1).gather(1, labels.clamp(0)[:, None]).squeeze(1)
    return -((1 - scores.exp()) ** 2 * scores).mean()


def of_texts(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Four texts."""
    return logits.unflatten(0, (4, -1)), labels.unflatten(0, (4, -1))


def without_last(logits: Tensor, labels: Tensor) -> Tensor:
    logits, labels = of_texts(logits, labels)
    return as_they_are(logits[..., :-1, :].reshape(-1, CLASSES), labels[:, 1:].flatten())


def of_answers(logits: Tensor, labels: Tensor) -> Tensor:
    logits, labels = of_texts(logits, labels)
    answers = logits[1:, 50:-1].contiguous().float().view(-1, CLASSES)
    return functional.cross_entropy(answers, labels[1:, 51:].flatten())


def every_third(logits: Tensor, labels: Tensor) -> Tensor:
    logits, labels = of_texts(logits, labels)
    some = logits[:, 2:][:, ::3].reshape(-1, CLASSES)
    return as_they_are(some, labels[:, 1:-1][:, ::3].flatten()) + logits.logsumexp(-1).mean()


def every_other(logits: Tensor, labels: Tensor) -> Tensor:
    logits, labels = of_texts(logits, labels)
    return as_they_are(logits[:, 1::2].reshape(-1, CLASSES), labels[:, ::2].flatten())


def of_shifted_preferences(logits: Tensor, labels: Tensor) -> Tensor:
    logits, labels = of_texts(logits, labels)
    scores = logits[:, :-1].log_softmax(-1)
    better, worse = scores.gather(2, labels[:, 1:, None].clamp(0)).squeeze(2).sum(1).view(2, -1)
    return -functional.logsigmoid(0.01 * (better - worse)).mean()


SLICED: list[Loss] = [
    without_last, of_answers, every_third, every_other, of_shifted_preferences,
]  # fmt: skip
UPCAST: list[Loss] = [
    cross_entropy, softcapped, summed, of_each, with_accuracy, smoothed, distilled, with_entropy,
]  # fmt: skip
LOSSES: list[Loss] = [
    *UPCAST,
    as_they_are, weighted, weighted_each, with_z_loss, of_preferences, focal, *SLICED,
]  # fmt: skip


def made(
    loss: Loss, dtype: torch.dtype = torch.float32, *, tied: bool = False
) -> tuple[Model, Callable[..., Any]]:
    torch.manual_seed(0)
    model = Model(tied=tied).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(tokens: Tensor, labels: Tensor) -> Any:
        optimizer.zero_grad()
        result = loss(model(tokens), labels)
        (result[0] if isinstance(result, tuple) else result).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return result

    return model, step


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        tokens, labels = torch.randint(CLASSES, (2, ROWS), generator=generator)
        labels[::9] = -100
        found.append((tokens, labels))
    return found


def test_indices_are_refused_as_by_the_whole() -> None:
    """An index that is none ends the step with eager's error, before anything is changed."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return -logits.log_softmax(-1).gather(1, labels[:, None]).mean()

    (tokens, labels), (other, _) = batches(2)
    labels.clamp_(0)
    (_, eager_step), (planned, step) = (made(loss) for _ in range(2))
    weights_bytes = sum(parameter.nbytes for parameter in planned.parameters())
    compiled = roam.compile(step, memory=4 * weights_bytes + ROWS * CLASSES * 2)
    compiled(tokens, labels)
    assert compiled.memory().cuts is not None
    before = [parameter.clone() for parameter in planned.parameters()]
    for wrong in (CLASSES, -1):
        labels = labels.clone()
        labels[3] = wrong
        with pytest.raises((IndexError, RuntimeError)) as expected:
            eager_step(other, labels)
        with pytest.raises(expected.type) as found:
            compiled(other, labels)
        assert str(expected.value) in str(found.value)
        assert all(map(torch.equal, planned.parameters(), before))


@pytest.mark.sweep
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_logits_never_exist_whole(loss: Loss, dtype: torch.dtype, tied: bool) -> None:
    (eager, eager_step), (planned, step) = (made(loss, dtype, tied=tied) for _ in range(2))
    logits_bytes = ROWS * CLASSES * (4 if loss in UPCAST else dtype.itemsize)
    weights_bytes = sum(parameter.nbytes for parameter in planned.parameters())
    # With momentum and gradients. The embedding's gradient is apart from the head's.
    compiled = roam.compile(step, memory=4 * weights_bytes + logits_bytes // 2)
    for turn, batch in enumerate(batches(4)):
        expected, result = (
            eager_step(*batch),
            (compiled.measured if turn == 3 else compiled)(*batch),
        )
        assert all(map(torch.equal, _listed(result), _listed(expected)))
    assert all(map(torch.equal, planned.parameters(), eager.parameters()))
    memory = compiled.memory()
    assert memory.cuts is not None
    assert "tiles" in str(memory)
    assert memory.limit_bytes is not None
    assert memory.measured_bytes is not None
    assert memory.measured_bytes <= memory.total_bytes <= memory.limit_bytes


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


class Attention(nn.Module):
    """A block with attention that is written out, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        scores = (q @ k.transpose(-1, -2) / 6).masked_fill(
            torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1), float("-inf")
        )
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def block() -> tuple[nn.Module, Callable[..., Any]]:
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, step


BLOCK_BYTES = 4_500_000
"""Without tiles, 5,588,160 bytes are needed: scores of two heads take 2 MiB each time."""


def test_scores_and_hidden_units_never_exist_whole() -> None:
    """Attention by heads, or finer by queries and by keys; an MLP by tokens and by hidden units."""
    (eager, eager_step), (planned, step) = block(), block()
    # Each in memory of its own: of views of one tensor, all of it counts as the batch.
    batches = [torch.randn(2, 1, ROWS, WIDTH) for _ in range(4)]
    compiled = roam.compile(step, memory=BLOCK_BYTES)
    for turn, batch in enumerate(batches):
        expected, result = (
            eager_step(*batch),
            (compiled.measured if turn == 3 else compiled)(*batch),
        )
        assert torch.equal(expected, result)
    assert all(map(torch.equal, planned.parameters(), eager.parameters()))
    memory = compiled.memory()
    assert memory.cuts is not None
    assert memory.measured_bytes is not None
    assert memory.measured_bytes <= memory.total_bytes <= BLOCK_BYTES


def captured(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> Program:
    """The program of a later call of a step."""
    found: list[Program] = []
    choose = _Chooser.choose

    def spy(self: _Chooser, *args: Any) -> None:
        found.append(self._variant.program)
        choose(self, *args)

    monkeypatch.setattr(_Chooser, "choose", spy)
    roam.compile(make()[1])(*inputs)
    return found[0]


def logits_of(program: Program) -> set[int]:
    """Everything as large as the logits."""
    sizes = candidates(program)
    return {number for number, size in sizes.items() if size == max(sizes.values())}


SMALL_ROOM = 15 * ROWS * CLASSES
"""Bytes: three tensors of the size of logits, and most of a fourth one."""


@pytest.mark.parametrize(
    ("lengths", "room_bytes"),
    [({64}, None), ({64, 128}, None), (set(range(1, ROWS)), None), ({64}, SMALL_ROOM)],
    ids=["one", "two", "all", "one, in stages"],
)
def test_what_gets_other_bits_is_not_cut(
    lengths: set[int], room_bytes: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows of a product that are made so many at a time get other last bits in this test."""
    monkeypatch.setenv("ROAM_CACHE_DIR", str(tmp_path))
    program = captured(monkeypatch, partial(made, cross_entropy), batches(1)[0])

    def faulty(left: Tensor, right: Tensor) -> Tensor:
        product = torch.mm(left, right)
        if left.shape[0] in lengths and right.shape[1] == CLASSES:
            product[-1, -1] = torch.nextafter(product[-1, -1], torch.tensor(torch.inf))
        return product

    faulty.__qualname__ += (
        f"{len(lengths)} {room_bytes}"  # what was found out of one is not known of others
    )
    rule = tiling.RULES[torch.ops.aten.mm.default]

    def faulty_rule(builder: tiling.Builder, call: Any, place: int, cut: tuple[int, int]) -> int:
        number = rule(builder, call, place, cut)
        builder._works[-1] = replace(builder._works[-1], target=faulty)
        return number

    monkeypatch.setitem(tiling.RULES, torch.ops.aten.mm.default, faulty_rule)
    gone = logits_of(program)
    found = exactly_tiled(program, gone, ROWS * CLASSES * 4 // 8, room_bytes)
    assert found is not None
    logits = next(
        call.outputs[0]
        for call in found.source.calls
        if call.name == "aten.mm.default" and found.slots[call.outputs[0]].shape == (ROWS, CLASSES)  # type: ignore[index, union-attr]
    )
    used = {tile.body.length for tile in found.tiles if (logits, (0, 0)) in tile.parts.values()}
    assert used.isdisjoint(lengths)
    assert bool(used) == (len(lengths) < 10)


@pytest.fixture
def knows_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What other tests have found out is not known."""
    monkeypatch.setenv("ROAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiles, "_learned", {})


@pytest.mark.usefixtures("knows_nothing")
def test_trials_take_the_room_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none for all that is compared, it is compared in stages, and found exact."""
    program = captured(monkeypatch, partial(made, cross_entropy), batches(1)[0])
    gone, part_bytes = logits_of(program), ROWS * CLASSES * 4 // 8
    ways: list[Tiled | None] = []

    def tries(room_bytes: int | None) -> None:
        ways.append(exactly_tiled(program, gone, part_bytes, room_bytes))

    needed_bytes = measure_peak(tries, SMALL_ROOM).peak_bytes
    assert needed_bytes < SMALL_ROOM
    monkeypatch.setenv("ROAM_CACHE", "0")
    monkeypatch.setattr(tiles, "_learned", {})
    tries(SMALL_ROOM // 3)
    assert ways[1] is None
    assert measure_peak(tries, None).peak_bytes > needed_bytes
    bodies = [{tile.call.args[1] for tile in way.tiles} for way in ways if way is not None]
    assert len(bodies) == 2
    assert bodies[0] == bodies[1]


@pytest.mark.usefixtures("knows_nothing")
def test_what_has_passed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it makes what another one reads."""
    batch = torch.randn(2, 1, ROWS, WIDTH)
    program = out_of_place(captured(monkeypatch, block, (*batch,)))
    sizes = candidates(program)
    gone = {number for number, size in sizes.items() if size >= 4 * 4 * ROWS * WIDTH}
    found = tiled(program, gone, max(sizes.values()) // 8)
    assert found is not None
    keys = tiles._keys(found)
    assert len(set(keys)) == len(keys) > 2
    assert tiles._asked(found, keys, ()) == list(range(len(keys)))
    own = len(program.slots)
    for place, tile in enumerate(found.tiles):
        others = [other for other in found.tiles if other is not tile]
        read = {slot for other in others for slot in other.call.refs() if slot >= own}
        is_asked = any(member.slot in read for member in tile.made)
        assert (place in tiles._asked(found, keys, {keys[place]})) == is_asked


@pytest.mark.parametrize("memory", [BLOCK_BYTES, BLOCK_BYTES // 3])
def test_tensors_are_small_beside_what_a_budget_leaves(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden units, which are small beside the scores, are cut too if they are not small beside
    that.
    """
    monkeypatch.setattr(strategy, "_SMALL", 2)
    cut: list[int] = []

    def spy(_: _Chooser, program: Program, gone: set[int], *__: Any) -> list[Any]:
        sizes = candidates(program)
        cut.append(min(sizes[number] for number in gone))
        return []

    monkeypatch.setattr(_Chooser, "_parts", spy)
    with pytest.raises(roam.PlanError):
        roam.compile(block()[1], memory=memory)(*torch.randn(2, 1, ROWS, WIDTH))
    hidden_bytes = 4 * ROWS * 4 * WIDTH
    assert (hidden_bytes in cut) == (memory < BLOCK_BYTES)


@pytest.mark.parametrize("way", ["once", "again"])
def test_one_size_of_tiles_that_saves_nothing_does_not_end_the_search(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in a row do, whether operators run once or again."""
    chooser = _Chooser.__new__(_Chooser)
    chooser._untried = None
    most = 512
    needed = {2: 100, 4: 104, 8: 60, 16: 60, 32: 60, 64: 10}

    def parts_of(_: Any, __: Any, part_bytes: int, ___: Any) -> int:
        return most // part_bytes

    def total_of(_: _Chooser, parts: int) -> tuple[Any, None]:
        return SimpleNamespace(total_bytes=needed[parts], checks_bytes=0), None

    def least_of(_: _Chooser, *args: Any) -> int:
        return needed[parts_of(*args)]

    monkeypatch.setattr(strategy, "tiled", parts_of)
    monkeypatch.setattr(_Chooser, "_way_by_tiles", total_of)
    monkeypatch.setattr(_Chooser, "_least_with", least_of)
    program: Any = None
    for limit, found in ((70, (60, 8)), (20, (60, 8)), (101, (100, 2))):
        if way == "once":
            assert chooser._parts(program, set(), most, limit, ())[-1] == found
        else:
            assert chooser._least_by_parts(program, set(), most, 2, limit, ()) == found


@pytest.mark.usefixtures("knows_nothing")
@pytest.mark.parametrize(
    "target",
    [torch.ops.aten._log_softmax.default, torch.ops.aten._log_softmax_backward_data.default],
    ids=str,
)
def test_every_stage_is_compared(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operator makes of rows has other last bits in this test, early or late in what is
    tried.
    """
    program = captured(monkeypatch, partial(made, cross_entropy), batches(1)[0])

    def faulty(*args: Any) -> Tensor:
        result: Tensor = target(*args)
        result[-1, -1] = torch.nextafter(result[-1, -1], torch.tensor(torch.inf))
        return result

    rule = tiling.RULES[target]

    def faulty_rule(builder: tiling.Builder, call: Any, place: int, cut: tuple[int, int]) -> int:
        number = rule(builder, call, place, cut)
        if builder._works[-1].target is target:
            builder._works[-1] = replace(builder._works[-1], target=faulty)
        return number

    monkeypatch.setitem(tiling.RULES, target, faulty_rule)
    found = exactly_tiled(program, logits_of(program), ROWS * CLASSES * 4 // 8, SMALL_ROOM)
    bodies = [] if found is None else [tile.body for tile in found.tiles]
    assert faulty not in [work.target for body in bodies for work in body.works]


def blocks_of(found: Tiled) -> set[int]:
    """Elements of the blocks that are added to totals."""
    return {
        tile.body.block
        for tile in found.tiles
        if any(made.cut is None for made in tile.body.results)
    }


@pytest.mark.parametrize("is_each", [False, True], ids=["one", "all"])
def test_blocks_that_get_other_bits_are_not_added(
    is_each: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What adds blocks of some lengths gets other last bits in this test, but not where it is
    looked for blocks.
    """
    monkeypatch.setenv("ROAM_CACHE_DIR", str(tmp_path))
    program = captured(monkeypatch, partial(made, cross_entropy), batches(1)[0])
    gone, part_bytes = logits_of(program), ROWS * CLASSES * 4 // 4
    ordinary = exactly_tiled(program, gone, part_bytes)
    assert ordinary is not None
    lengths = set(range(1, ROWS)) if is_each else blocks_of(ordinary)
    if not lengths:
        pytest.skip("this library's products have no blocks of a length that is tried")

    def faulty(total: Tensor, is_first: bool, left: Tensor, right: Tensor) -> None:
        add_product(total, is_first, left, right)
        if left.shape[1] in lengths:
            total[-1, -1] = torch.nextafter(total[-1, -1], torch.tensor(torch.inf))

    faulty.__qualname__ += str(is_each)
    monkeypatch.setattr(tiling, "add_product", faulty)
    found = exactly_tiled(program, gone, part_bytes)
    assert found is not None
    assert blocks_of(found).isdisjoint(lengths)
    assert not (is_each and blocks_of(found))


@pytest.mark.parametrize("parts", [4, 16], ids=["rows alone", "rows and classes"])
def test_each_part_is_written_once(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of every result are all of it, each block is added once, and what is read of it is
    read after the call.
    """
    program = captured(monkeypatch, partial(made, cross_entropy), batches(1)[0])
    found = tiled(program, logits_of(program), ROWS * CLASSES * 4 // parts)
    assert found is not None
    assert len(found.tiles) == (1 if parts == 4 else 2)
    assert bool(blocks_of(found)) == (parts == 4)
    for tile in found.tiles:
        body = tile.body
        for place, result in enumerate(body.results):
            if result.cut is None:
                adding = [work for work in body.closing if work.adds_to == place]
                assert len(adding) == 1
                assert sum(length for _, length in body.blocks()) == body.size
                continue
            whole = torch.zeros(result.shape)
            for start, length in body.intervals():
                part_of(whole, result.cut, start, length).add_(1)
            assert bool((whole == 1).all())
    there: set[int] = {slot for _, slot in (*found.program.referenced, *found.program.constants)}
    for call in found.program.calls:
        assert there.issuperset(call.refs())
        there.update(slot for slot in call.outputs if slot is not None)


@pytest.mark.parametrize("fault", ["twice", "never", "read"])
def test_a_total_is_added_to_once_and_not_read(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body in which it is otherwise is none."""
    program = captured(monkeypatch, partial(made, cross_entropy), batches(1)[0])
    found = tiled(program, logits_of(program), ROWS * CLASSES * 4 // 4)
    assert found is not None
    body = next(
        tile.body for tile in found.tiles if any(made.cut is None for made in tile.body.results)
    )
    adding = body.closing[-1]
    assert adding.adds_to is not None
    reading = replace(adding, args=(Ref(adding.makes[0]),), makes=(99,), adds_to=None)  # type: ignore[arg-type]
    closing = {
        "twice": (*body.closing, adding),
        "never": body.closing[:-1],
        "read": (*body.closing, reading),
    }
    with pytest.raises(AssertionError):
        replace(body, closing=closing[fault])


def test_a_lack_of_memory_is_no_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What could not be tried is not cut, and is tried again by the next one who asks."""
    monkeypatch.setenv("ROAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiles, "_learned", {})
    program = captured(monkeypatch, partial(made, cross_entropy), batches(1)[0])
    gone, part_bytes = logits_of(program), ROWS * CLASSES * 4 // 4

    def lacking(self: Body, *_: Any) -> None:
        torch.empty(2**50)

    with monkeypatch.context() as patched:
        patched.setattr(Body, "run", lacking)
        assert exactly_tiled(program, gone, part_bytes) is None
    assert exactly_tiled(program, gone, part_bytes) is not None


def test_an_operator_writes_over_the_wider_of_two_dtypes() -> None:
    """The same bits, without a copy of the narrower one."""
    wide, narrow = torch.randn(512, 512), torch.randn(512, 512).bfloat16()
    work = Work(torch.ops.aten.add.Tensor, (Ref(0), Ref(1)), {}, (2,), over=0)
    body = Body(
        512, 512, ((0, 0), (0, 0)), (work,), (Made(2, (0, 0), (512, 512), (512, 1), wide.dtype),), 0, 512
    )  # fmt: skip
    expected, out = wide + narrow, torch.empty(512, 512)
    taken = measure_peak(body.run, [wide, narrow], [out]).peak_bytes
    assert torch.equal(out, expected)
    assert taken < wide.nbytes // 2


def test_scores_are_made_once_for_the_loss_and_their_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One body makes both, and the gradient of the weight in blocks, and holds no more than one
    block of the scores' size and two tiles of it at once.
    """
    program = captured(monkeypatch, partial(made, cross_entropy), batches(1)[0])
    others = {
        (slot, None, block)
        for slot in range(len(program.slots))
        for block in range(ROWS)
        if block != 192
    }
    found = tiled(program, logits_of(program), ROWS * CLASSES * 4 // 4, others)
    assert found is not None
    assert len(found.tiles) == 1
    assert blocks_of(found) == {192}
    by_rows = [tile for tile in found.tiles if tile.body.size == ROWS]
    (tile,) = by_rows
    names = [str(work.target) for work in tile.body.works]
    assert names.count("aten._log_softmax.default") == 1
    assert names.count("aten._log_softmax_backward_data.default") == 1
    inputs = [
        torch.zeros(meta.shape, dtype=meta.dtype)
        for meta in (found.slots[slot] for slot in tile.call.refs())
        if meta is not None
    ]
    outs = tile.body.outs(torch.device("cpu"))
    row_bytes = CLASSES * 4
    assert tile.body.length == 32
    assert tile.body.scratch_bytes < (192 + 2.2 * 32) * row_bytes
    assert measure_peak(tile.body.run, inputs, outs).peak_bytes < 0.3 * 32 * row_bytes


def test_some_blocks_take_as_much_memory_as_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call takes is found out from the first two blocks and the last one, which get what all
    of them give.
    """
    program = captured(monkeypatch, partial(made, cross_entropy), batches(1)[0])
    for parts in (8, 32):
        found = tiled(program, logits_of(program), ROWS * CLASSES * 4 // parts)
        assert found is not None
        for tile in found.tiles:
            body = tile.body
            metas = [found.slots[slot] for slot in tile.call.refs()]
            inputs = [torch.ones(meta.shape).to(meta.dtype) for meta in metas if meta is not None]
            whole, some = (body.outs(torch.device("cpu")) for _ in range(2))
            all_bytes = measure_peak(body.run, inputs, whole).peak_bytes
            some_bytes = measure_peak(body.run_some, inputs, some).peak_bytes
            assert some_bytes == all_bytes
            done = list(body.blocks() if body.closing else body.intervals())
            run = dict.fromkeys((*done[:2], done[-1]))
            share = sum(length for _, length in run) / body.size
            assert body.run_some(inputs, some) * share == pytest.approx(1)
            del whole[len(body.results) :], some[len(body.results) :]  # scratch memory
            for one, expected, result in zip(body.results, whole, some, strict=True):
                cut = one.cut
                for start, length in run if cut is not None else ():
                    assert cut is not None
                    there, here = (part_of(own, cut, start, length) for own in (expected, result))
                    assert torch.equal(there, here)


@pytest.mark.parametrize("parts", [4, 16])
@pytest.mark.parametrize("loss", [cross_entropy, distilled, with_entropy, weighted_each])
def test_values_that_share_memory_are_not_needed_at_one_time(
    monkeypatch: pytest.MonkeyPatch, loss: Loss, parts: int
) -> None:
    """Nothing changes a value, in memory that others have before and after it, as long as it is
    needed; with all values in memory of their own a body gives the same bits, and takes no less.
    """
    program = captured(monkeypatch, partial(made, loss), batches(1)[0])
    large = {number for number, size in candidates(program).items() if size >= ROWS * WIDTH * 4}
    refused = {
        (slot, None, block)
        for slot in range(len(program.slots))
        for block in range(ROWS)
        if block != 192
    }
    holds = 0
    for gone, others in (
        (logits_of(program), frozenset()),
        (logits_of(program), refused),
        (large, frozenset()),
        (large, refused),
    ):
        found = tiled(program, gone, ROWS * CLASSES * 4 // parts, others)
        if found is None:
            continue
        assert any(tile.body.scratch_bytes for tile in found.tiles)
        generator = torch.Generator().manual_seed(parts)
        for body, call in ((tile.body, tile.call) for tile in found.tiles):
            holds += bool(body.held) and body.block > body.length
            inputs: list[Tensor] = []
            for meta in (found.slots[slot] for slot in call.refs()):
                assert meta is not None
                one = torch.empty(meta.shape, dtype=meta.dtype)
                is_float = meta.dtype.is_floating_point
                inputs.append(one.normal_(generator=generator) if is_float else one.zero_())
            own = replace(body, scratch_bytes=0, places=(), closing_places=())
            results = []
            for one, seen in ((own, None), (body, unchanged(body))):
                given, outs = [value.clone() for value in inputs], one.outs(torch.device("cpu"))
                for out in outs:
                    out.view(-1).view(torch.uint8).fill_(255)
                one.run(given, outs, seen)
                results.append([*outs[: len(body.results)], *given])
            assert not differ(*results)
            room = measure_peak(own.run, inputs, own.outs(torch.device("cpu"))).peak_bytes
            assert body.scratch_bytes <= room
    assert holds or parts > 4 or loss is not cross_entropy


def unchanged(body: Body) -> Callable[[int, Tensor, int, int], None]:
    """Sees to it that values are what they were when they were made, as long as they are needed: by
    later works, until all of a tile are done, or until a block is.
    """
    makers = {number: at for at, work in enumerate(body.works) for number in work.makes}
    last = dict(makers)
    for at, work in enumerate(body.works):
        last.update(dict.fromkeys(refs_of((work.args, work.kwargs)), at))
    last.update(dict.fromkeys((made.number for made in body.results), len(body.works)))
    held = {one.number for one in body.held}
    there: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def see(number: int, value: Tensor, start: int, length: int) -> None:
        block = start // body.block
        for key, (one, kept) in list(there.items()):
            before, since = key
            is_kept = before in held and since // body.block == block
            if is_kept or (since == start and last[before] > makers[number]):
                assert not differ([one], [kept]), f"{before} is not what it was at {number}"
            else:
                del there[key]
        there[number, start] = value, value.clone()

    return see


def held_body(length: int) -> tuple[Body, TensorMeta]:
    """Blocks of 64 rows, of which a large value and a small one are held: `total` has the product
    of both, and each is read by way of a view.
    """
    size = (192, CLASSES)
    closing = (
        Work(torch.ops.aten.reshape.default, (Ref(1), [Length(), CLASSES]), {}, (3,)),
        Work(torch.ops.aten.permute.default, (Ref(2), [1, 0]), {}, (4,)),
        Work(add_product, (Ref(4), Ref(3)), {}, (5,), adds_to=0),
    )
    body = Body(
        size=size[0],
        length=length,
        inputs=((0, 0),),
        works=(
            Work(torch.ops.aten.mul.Tensor, (Ref(0), 2), {}, (1,)),
            Work(torch.ops.aten.amax.default, (Ref(1), [1], True), {}, (2,)),
        ),
        results=(Made(5, None, (1, CLASSES), (CLASSES, 1), torch.float32),),
        flops=0,
        block=64,
        held=(
            Held(1, 0, (Length(), CLASSES), torch.float32),
            Held(2, 0, (Length(), 1), torch.float32),
        ),
        closing=closing,
    )
    return body, TensorMeta(size, (CLASSES, 1), 0, torch.float32, torch.device("cpu"), 0)


def test_a_place_with_gaps_is_written_whatever_the_dtypes() -> None:
    """What is held of a tile may lie so: kernels go through pieces of contiguous tensors alone."""
    wide, half = torch.randn(4, 8), torch.randn(4, 8).bfloat16()
    place = torch.full((4, 16), torch.nan)
    values = [wide, half, None]
    work = Work(torch.ops.aten.mul.Tensor, (Ref(0), Ref(1)), {}, (2,))
    run_work(work, values, 0, 4, {2: place[:, :8]})
    assert values[2] is not None
    assert not differ([place[:, :8], values[2]], [wide * half] * 2)
    assert place[:, 8:].isnan().all()


@pytest.mark.parametrize("rows", [3, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_rows_are_added_as_the_whole_is(rows: int, dtype: torch.dtype) -> None:
    """A block's rows come in pieces, none of which has fewer rows than the total: each piece is
    added to a copy of that.
    """
    grad, indices = torch.randn(4096, 96).to(dtype), torch.randint(rows, (4096,))
    whole = torch.ops.aten.embedding_dense_backward(grad, indices, rows, 1, False)
    total = torch.empty(rows, 96, dtype=dtype)
    for first in (True, False):
        half = slice(0, 1500) if first else slice(1500, None)
        add_rows(total, first, grad[half], indices[half].to(torch.int32), 1)
    assert not differ([total], [whole])
    sizes = [one.stop - one.start for one in pieces(grad, least=rows)]
    assert min(sizes) >= rows


@pytest.mark.parametrize("length", [16, 48, 64])
def test_large_and_small_values_are_held_together(length: int) -> None:
    """The small one comes from the allocator. A view of what is held takes no memory, also where
    the only tile of a block has made it.
    """
    body, meta = held_body(length)
    placed = with_places(body, [meta])
    block_bytes = 64 * CLASSES * 4
    tile_bytes = 0 if length == 64 else length * CLASSES * 4
    assert block_bytes <= placed.scratch_bytes <= block_bytes + tile_bytes
    given = torch.randn(meta.shape)
    results = []
    for one in (body, placed):
        outs = one.outs(torch.device("cpu"))
        one.run([given], outs)
        results.append(outs[:1])
    assert not differ(*results)


@pytest.mark.parametrize(("limit_bytes", "first"), [(60, 2), (45, 4), (35, 8), (20, 16)])
def test_the_fewest_parts_that_keep_within_a_limit_are_tried_first(
    limit_bytes: int, first: int
) -> None:
    least = {2: 50, 4: 40, 8: 30, 16: 20}

    def least_with(program: object, gone: object, part_bytes: int, refused: object) -> int:
        return least[1024 // part_bytes]

    chooser: Any = SimpleNamespace(_least_with=least_with)
    totals = [(90, 2), (80, 4), (70, 8), (20, 16)]
    program: Any = None
    found = _Chooser._reaching(chooser, program, set(), 1024, totals, limit_bytes, ())
    assert [parts for _, parts in found] == [one for one in least if one >= first]
    assert all(size <= limit_bytes for size, parts in found if parts in (first, 16))


def test_equal_calls_are_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two micro-batches are cut alike."""
    monkeypatch.setenv("ROAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiles, "_learned", {})

    def accumulating() -> tuple[Model, Callable[..., Any]]:
        model, _ = made(cross_entropy)

        def step(*batches: Tensor) -> None:
            model.zero_grad()
            for tokens, labels in zip(batches[::2], batches[1::2], strict=True):
                cross_entropy(model(tokens), labels).backward()

        return model, step

    first, second = batches(2)
    program = captured(monkeypatch, accumulating, (*first, *second))
    tried: list[tuple[int, str]] = []
    wrong = tiles._Trial.wrong

    def spy(self: tiles._Trial, tile: Any) -> int | None:
        tried.append((self.turn, tile.call.args[1]))
        return wrong(self, tile)

    monkeypatch.setattr(tiles._Trial, "wrong", spy)
    found = exactly_tiled(program, logits_of(program), ROWS * CLASSES * 4 // 32)
    assert found is not None
    bodies = {tile.call.args[1] for tile in found.tiles}
    assert len(found.tiles) == 2 * len(bodies)
    of_found = [one for one in tried if one[1] in bodies]
    assert len(of_found) == len(set(of_found)) == tiles._ROUNDS * len(bodies)


def test_labels_are_refused_as_by_the_whole() -> None:
    """A label that is none ends the step with eager's error, before anything is changed."""
    tokens, labels = batches(1)[0]
    labels[3] = CLASSES
    (_, eager_step), (planned, step) = (made(cross_entropy) for _ in range(2))
    weights_bytes = sum(parameter.nbytes for parameter in planned.parameters())
    compiled = roam.compile(step, memory=4 * weights_bytes + ROWS * CLASSES * 2)
    compiled(*batches(1)[0])
    before = [parameter.clone() for parameter in planned.parameters()]
    with pytest.raises(IndexError) as expected:
        eager_step(tokens, labels)
    with pytest.raises(IndexError) as found:
        compiled(tokens, labels)
    assert str(expected.value) in str(found.value)
    assert all(map(torch.equal, planned.parameters(), before))
