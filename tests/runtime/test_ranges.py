"""One plan for many sizes: what changes from batch to batch is a range, and every size has eager's
bits.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import roam
from roam.program.resized import at
from roam.tracing.fake_kernels import cache, real_layouts
from steps import assert_same_bits, tensors_and_numbers


class Reader(nn.Module):
    """Embeds, attends, and reads; small, with every kind of size in it."""

    def __init__(self, positions: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.places = nn.Embedding(positions, 16)
        self.register_buffer("numbers", torch.arange(positions)[None])
        self.project = nn.Linear(16, 48)
        self.out = nn.Linear(16, 50)
        self.norm = nn.LayerNorm(16)
        self.dropout = dropout

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        batch, length = ids.shape
        x = self.embed(ids) + self.places(self.numbers[:, :length])
        q, k, v = self.project(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        x = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm(x.transpose(1, 2).reshape(batch, length, 16))
        return self.out(functional.dropout(x, self.dropout, self.training))


def reading(
    net: Any, optimizer: Any, loss_of: Callable[..., Any] | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        if loss_of is None:
            loss = functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
        else:
            loss = loss_of(net, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def ids_of(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 50, shape, generator=generator)


def run_both(
    shapes: list[tuple[int, ...]],
    loss_of: Callable[..., Any] | None = None,
    make: Callable[[], nn.Module] = Reader,
    **options: Any,
) -> Any:
    """Trains eagerly and by plan on batches of these shapes; the compiled step."""
    outcomes, step = [], None
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = make()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        function: Any = reading(net, optimizer, loss_of)
        if is_planned:
            function = step = roam.compile(function, **{"sizes": True, **options})
        losses = [function(ids_of(*shape)) for shape in shapes]
        outcomes.append(tensors_and_numbers(losses, net.state_dict(), optimizer.state_dict()))
    assert_same_bits(*outcomes)
    return step


def lengths(*all_of: int) -> list[tuple[int, int]]:
    return [(2, length) for length in all_of]


def sizes_of(step: Any) -> list[Any]:
    return [one.step.arguments.sizes for one in step._captures]


def test_any_order_of_lengths_needs_two_captures() -> None:
    order = [5, 9, 6, 7, 9, 17, 8, 5, 12, 16, 3, 2]
    random.Random(0).shuffle(order)
    step = run_both(lengths(*order))
    assert len(step._captures) == 2
    assert [sizes is None for sizes in sizes_of(step)] == [False, True]


@pytest.mark.parametrize("memory", [None, "1MiB"])
def test_rising_lengths_are_planned_anew_without_another_capture(memory: str | None) -> None:
    step = run_both(lengths(*range(4, 40)), memory=memory)
    assert len(step._captures) == 2
    assert step._captures[0].step.arguments.sizes.largest()[0] >= 39


def dropping() -> nn.Module:
    blocks = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Dropout(0.1), nn.GELU())]
    return nn.Sequential(nn.Embedding(50, 16), *blocks, nn.Linear(16, 50))


@pytest.mark.parametrize("share", [None, 0.85])
def test_within_a_limit_not_every_new_largest_size_is_planned_anew(
    share: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """There is room for more where the limit allows it, with extra runs if need be."""
    memory: Any = "85%"
    if share is not None:
        net = dropping()
        plain = roam.compile(reading(net, torch.optim.AdamW(net.parameters())))
        memory = int(share * plain.plan(ids_of(2, 116)).total_bytes)
    caplog.set_level(logging.INFO, "roam.replans")
    step = run_both(lengths(*range(40, 120, 4)), make=dropping, memory=memory)
    assert len(step._captures) == 2
    anew = [one for one in caplog.messages if "for larger arguments" in one]
    assert 0 < len(anew) <= 7  # of twenty lengths
    runner = step._captures[0].runners[-1]
    assert runner.choice.recomputation is not None
    assert runner.choice.total_bytes <= runner.choice.memory_limit_bytes
    roam._core.verify(runner.choice.graph, runner.plan)


def test_sizes_that_change_at_once_have_room_for_larger_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "roam.replans")
    step = run_both(lengths(30, 20, 50, 12, 58), make=lambda: Reader(positions=256))
    assert len(step._captures) == 2
    assert not any("for larger arguments" in one for one in caplog.messages)


@pytest.mark.parametrize("options", [{"pool": False}, {"poison": True}, {"keep_grads": True}])
def test_all_ways_of_running_hold_for_ranges(options: dict[str, Any]) -> None:
    assert len(run_both(lengths(8, 5, 9, 12, 5, 9, 14), **options)._captures) == 2


def test_a_table_of_positions_says_how_large_sizes_may_be() -> None:
    step = run_both(lengths(30, 20, 40, 64))
    assert step._known.traces == 3  # two of the first batch, one for all lengths
    assert len(step._captures) == 2


ORDERS = {
    "rising": [5, *range(6, 48, 3)],
    "falling": list(range(47, 4, -5)),
    "random": random.Random(1).sample(range(5, 48), 10),
    "longest last": [*random.Random(2).sample(range(5, 20), 6), 47],
}


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
def test_the_pool_grows_at_most_twice(order: list[int], is_given: bool) -> None:
    net = Reader()
    step = roam.compile(
        reading(net, torch.optim.SGD(net.parameters(), lr=0.1)),
        sizes={"ids": {1: 47}} if is_given else True,
        pool=True,
    )
    pools = []
    for length in order:
        step(ids_of(2, length))
        pools.append(max(plan.pool_bytes for plan in step.kept().plans))
    assert len(set(pools)) - 1 <= (0 if is_given else 2)
    assert len(step.kept().plans) == (1 if is_given else 2)


def test_the_pool_grows_at_most_twice_for_lengths_of_two_arguments() -> None:
    net = Reader()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(ids).mean((0, 1)) @ net(others).mean((0, 1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = roam.compile(train, pool=True)
    pools = []
    for length in range(5, 37, 2):
        step(ids_of(2, length), ids_of(2, 41 - length))
        pools.append(max(plan.pool_bytes for plan in step.kept().plans))
    assert len(set(pools)) <= 3


def test_lengths_of_two_arguments_are_planned_for_together() -> None:
    net = Reader()
    step = roam.compile(lambda ids, others: (net(ids).mean() * net(others).mean()).detach())
    for one, other in ((17, 9), (8, 5), (11, 10)):
        step(ids_of(2, one), ids_of(2, other))
    assert len(step._captures) == 2
    assert len(sizes_of(step)[0].corners) == 1


def test_sizes_that_are_equal_where_they_are_planned_for_may_differ() -> None:
    """There is room for 79 of each: 38 and 37 are doubled, up to the next prime."""
    outcomes, step = [], None
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = Reader(positions=128)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

        def train(
            one: torch.Tensor, other: torch.Tensor, net: Any = net, optimizer: Any = optimizer
        ) -> Any:
            optimizer.zero_grad()
            total = torch.arange(one.shape[1]).sum() - torch.arange(other.shape[1]).sum()
            loss = (net(one).mean() - net(other).var()) * total
            loss.backward()
            optimizer.step()
            return loss.detach()

        function: Any = train
        if is_planned:
            function = step = roam.compile(train)
        losses = [
            function(ids_of(5, one), ids_of(5, other))
            for one, other in ((35, 21), (38, 37), (30, 36), (9, 9))
        ]
        outcomes.append(tensors_and_numbers(losses, net.state_dict(), optimizer.state_dict()))
    assert_same_bits(*outcomes)
    assert step is not None
    assert sizes_of(step)[0].largest() == (79, 79)


@pytest.mark.parametrize("limit_bytes", [5 << 20, 4 << 20])
def test_tiles_of_one_size_run_at_no_other(limit_bytes: int) -> None:
    """The gradient of a mean is divided by how many elements there are, and the logits are cut."""
    outcomes, step = [], None
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4000))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

        def train(x: torch.Tensor, net: Any = net, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = net(x).tanh().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        function: Any = train
        if is_planned:
            function = step = roam.compile(train, memory=limit_bytes)
        generator = torch.Generator().manual_seed(1)
        losses = [function(torch.randn(rows, 16, generator=generator)) for rows in (40, 90, 60, 33)]
        outcomes.append(tensors_and_numbers(losses, net.state_dict(), optimizer.state_dict()))
    assert_same_bits(*outcomes)
    assert step is not None
    cut = [any(runner.choice.cuts for runner in one.runners) for one in step._captures]
    assert any(cut)
    assert not any(sizes and is_cut for sizes, is_cut in zip(sizes_of(step), cut, strict=True))


def test_a_plan_for_given_sizes_that_needs_tiles_is_refused() -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4000))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).tanh().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = roam.compile(train, sizes={"x": {0: 90}}, memory=4 << 20)
    with pytest.raises(roam.PlanError, match="with sizes=False each size has a plan of its own"):
        step(torch.randn(40, 16))
    assert not optimizer.state
    step = roam.compile(train, sizes=False, memory=4 << 20)
    step(torch.randn(90, 16))
    assert step._captures[0].runners[-1].choice.cuts


def test_two_sizes_change_apart() -> None:
    step = run_both([(4, 8), (3, 11), (4, 9), (2, 11), (3, 8), (4, 16)])
    assert len(step._captures) == 2
    assert len(sizes_of(step)[0].symbols.names) == 2


def test_a_size_that_changes_later_joins_the_others() -> None:
    step = run_both([(4, 8), (4, 11), (4, 9), (3, 10), (2, 12), (4, 16), (3, 7)])
    assert len(step._captures) == 3


def test_batches_of_so_many_tokens_are_planned_for_no_more_than_twice_as_many() -> None:
    shapes = [(4, 12), (8, 6), (12, 4), (2, 24), (5, 9), (3, 16), (24, 2), (2, 24), (12, 4)]
    step = run_both(shapes)
    assert len(step._captures) == 2
    corners = sizes_of(step)[0].corners
    assert len(corners) > 1
    assert max(map(math.prod, corners)) <= 2.5 * 48  # some of it for prime numbers


def test_smaller_batches_need_no_room() -> None:
    step = run_both([(4, 8), (4, 8), (3, 8), (4, 8), (2, 8), (4, 8)])
    assert len(step._captures) == 2
    of_full, of_range = (
        captured
        for captured in sorted(step._captures, key=lambda one: one.step.arguments.sizes is not None)
    )
    assert of_range.step.arguments.sizes.corners == ((4,),)
    assert of_range.runners[-1].choice.total_bytes == of_full.runners[-1].choice.total_bytes


def test_the_length_of_a_tensor_is_a_size() -> None:
    """`len(x)` makes plain numbers only, and so the code has another function by this name."""

    def loss_of(net: Any, ids: torch.Tensor) -> torch.Tensor:
        hidden = net(ids).mean(1)
        return functional.cross_entropy(hidden, torch.arange(len(ids))) / len(hidden)

    step = run_both([(4, 9), (6, 5), (3, 12), (5, 7), (7, 8)], loss_of)
    assert len(step._captures) == 2


def test_a_product_of_three_sizes_is_found() -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        return nn.Sequential(nn.Embedding(50, 16), layer, nn.Linear(16, 50))

    step = run_both([(4, 8), (3, 11), (4, 9), (5, 7)], make=make)
    assert len(step._captures) == 2


def test_sizes_may_be_returned_and_counted() -> None:
    outcomes = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = Reader()
        net.tokens = 0
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        train = reading(net, optimizer)

        def step(ids: torch.Tensor, net: Any = net, train: Any = train) -> Any:
            net.tokens += 2 * ids.numel()
            loss, scores = train(ids), net(ids)
            shown = scores.detach()
            views = [shown.argmax(-1), shown[:, ::2], shown.transpose(0, 1), ids[:, 1:]]
            return loss, scores, views, ids.shape[1], [ids.numel() / ids.shape[0]]

        function: Any = roam.compile(step) if is_planned else step
        results = [function(ids_of(2, length)) for length in (8, 11, 9, 8, 15, 40, 9)]
        outcomes.append(tensors_and_numbers(results, net.tokens, net.state_dict()))
    assert_same_bits(*outcomes)
    assert len(function._captures) == 2


def test_a_later_size_of_a_range_takes_one_trace() -> None:
    net = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    step: Any = roam.compile(reading(net, torch.optim.AdamW(net.parameters())))
    step(ids_of(2, 8))
    before = step._known.traces
    step(ids_of(2, 11))
    step(ids_of(2, 9))
    assert step._known.traces == before + 1


def test_micro_batches_of_changing_lengths_take_few_traces() -> None:
    """The optimizer's state is there from the second update on, and gradients from the second
    micro-batch on, which changes neither what a micro-batch does nor what the last one does.
    """
    outcomes, step = [], None
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = Reader()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

        def train(
            ids: torch.Tensor, is_last: bool, net: Any = net, optimizer: Any = optimizer
        ) -> Any:
            loss = functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        function: Any = train
        if is_planned:
            function = step = roam.compile(train, keep_grads=True)
        losses = [
            function(ids_of(2, length), place % 2 == 1)
            for place, length in enumerate((9, 14, 11, 8, 16, 7, 10, 13, 9, 12))
        ]
        outcomes.append(tensors_and_numbers(losses, net.state_dict(), optimizer.state_dict()))
    assert_same_bits(*outcomes)
    assert step is not None
    assert len(step._captures) == 4
    assert step._known.traces <= 3 + 6 + 2 + 2


def test_a_mode_that_the_step_sets_may_be_another_before_it() -> None:
    """As after an evaluation, from which a trainer's step puts the model back."""
    net = Reader()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def loss_of(net: Any, ids: torch.Tensor) -> torch.Tensor:
        net.train()
        return functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())

    step: Any = roam.compile(reading(net, optimizer, loss_of))
    for place, length in enumerate((9, 14, 11, 8, 16, 7, 10, 13, 9, 12, 15)):
        if place % 3 == 0:
            net.eval()
        step(ids_of(2, length))
    assert [sizes is None for sizes in sizes_of(step)].count(False) == 2
    assert len(step._captures) == 3


def test_the_end_of_a_table_limits_the_range() -> None:
    def make() -> Reader:
        return Reader(positions=20)

    step = run_both(lengths(6, 9, 20, 7, 13), make=make)
    assert len(step._captures) == 2
    assert list(sizes_of(step)[0].symbols.most.values()) == [20]
    with pytest.raises(Exception, match="size"):  # as eagerly
        step(ids_of(2, 21))


def window(net: Any, ids: torch.Tensor) -> torch.Tensor:
    scores = net(ids)[:, -10:]
    return functional.cross_entropy(scores.flatten(0, 1), ids[:, -10:].flatten())


def branch(net: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    return loss * 2 if ids.shape[1] > 10 else loss


def halves(net: Any, ids: torch.Tensor) -> torch.Tensor:
    middle = ids.shape[1] // 2
    scores = net(ids)
    left = functional.cross_entropy(scores[:, :middle].flatten(0, 1), ids[:, :middle].flatten())
    return left + scores[:, middle:].square().mean() / ids.shape[1] ** 0.5


def parity(net: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    return loss if ids.shape[1] % 2 else loss / 3


def least(net: Any, ids: torch.Tensor) -> torch.Tensor:
    count = min(ids.shape[1], 9)
    return functional.cross_entropy(net(ids)[:, :count].flatten(0, 1), ids[:, :count].flatten())


def over_time(net: Any, ids: torch.Tensor) -> torch.Tensor:
    scores = net(ids)
    losses = [functional.cross_entropy(scores[:, t], ids[:, t]) for t in range(ids.shape[1])]
    return torch.stack(losses).mean()


def by_type(net: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    return loss / 7 if isinstance(ids.shape[1], int) else loss


def by_exact_type(net: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    return loss / 7 if type(ids.shape[1]) is int else loss


def by_table(net: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    return loss * {8: 2.0, 11: 3.0}.get(ids.shape[1], 1.0)


def by_text(net: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    return loss * len(f"{ids.shape[1]}")


def swallowing(net: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    try:
        return loss * float(len("x" * ids.shape[1]))
    except Exception:  # noqa: BLE001 - of those whose code swallows everything
        return loss


def chunks(net: Any, ids: torch.Tensor) -> torch.Tensor:
    parts = zip(net(ids).split(4, 1), ids.split(4, 1), strict=True)
    return torch.stack(
        [functional.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in parts]
    ).sum()


def numbers(net: Any, ids: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(ids.shape[1]) / ids.numel() + ids.shape[1]
    losses = functional.cross_entropy(net(ids).transpose(1, 2), ids, reduction="none")
    return (losses * weights).sum() / (ids.shape[0] * ids.shape[1])


def padded(net: Any, ids: torch.Tensor) -> torch.Tensor:
    wide = functional.pad(ids, (0, 3))
    return functional.cross_entropy(net(wide).flatten(0, 1), wide.flatten())


def rounded_up(net: Any, ids: torch.Tensor) -> torch.Tensor:
    wide = functional.pad(ids, (0, -ids.shape[1] % 4))
    return functional.cross_entropy(net(wide).flatten(0, 1), wide.flatten())


def masked(net: Any, ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    scores = (net(ids) @ net(ids).transpose(1, 2)).masked_fill(~mask, 0.0)
    return scores.var() + functional.mse_loss(scores, torch.zeros_like(scores))


def shares(net: Any, ids: torch.Tensor) -> torch.Tensor:
    scores, length = net(ids), ids.shape[1]
    parts = scores[:, : math.trunc(0.5 * length)].mean() + scores[:, : round(0.75 * length)].var()
    return parts + scores[:, : math.ceil(0.3 * length)].square().mean()


def functions_of_numbers(net: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()) / (1.0 * ids.shape[1])
    decay = math.exp(-ids.shape[1] / 50) + math.pow(ids.shape[1], 0.3)
    return loss * decay * math.log(ids.shape[1], 2) / math.sqrt(ids.numel())


def normed(net: Any, ids: torch.Tensor) -> torch.Tensor:
    scores = nn.functional.rms_norm(net(ids), (50,))  # C++ makes a text of the sizes
    mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
    return functional.cross_entropy(scores.flatten(0, 1), ids.flatten()) + mask.exp().mean()


def reshaped_in_place(net: Any, ids: torch.Tensor) -> torch.Tensor:
    scores = net(ids)
    wide = scores.sin().unsqueeze_(1).transpose_(0, 2)
    flat = (scores * 2).detach_().swapaxes_(0, 1).squeeze_()
    part = (scores * 3).as_strided_((ids.shape[1] // 2, 7), (50, 1), 11)
    return wide.square().mean() + (flat * scores.transpose(0, 1)).mean() + part.mean()


def pooled_to_one_pixel(net: Any, ids: torch.Tensor) -> torch.Tensor:
    images = net(ids).transpose(1, 2)[..., None].contiguous(memory_format=torch.channels_last)
    pooled = functional.adaptive_avg_pool2d(images, 1)  # it lays the result out anew, in place
    return functional.layer_norm(pooled.permute(0, 2, 3, 1), (50,)).square().var()


def in_padded_chunks(net: Any, ids: torch.Tensor) -> torch.Tensor:
    wide = functional.pad(net(ids), (0, 0, 0, (4 - ids.shape[1] % 4) % 4))
    sums = wide.reshape(ids.shape[0], -1, 4, 50).permute(0, 3, 1, 2).cumsum(-1)
    return torch.cat([torch.zeros_like(sums[:, :, :1]), sums], 2).square().mean()


HABITS = [
    window, branch, halves, parity, least, over_time, by_type, by_exact_type, by_table, by_text, swallowing, chunks,
    numbers, padded, rounded_up, masked, shares, functions_of_numbers, normed, reshaped_in_place, pooled_to_one_pixel,
    in_padded_chunks,
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("loss_of", HABITS, ids=lambda one: one.__name__)
def test_what_code_does_with_sizes_has_eagers_bits(loss_of: Callable[..., Any]) -> None:
    run_both(lengths(8, 11, 9, 12, 8, 10, 7, 13, 16, 11, 4, 33, 40), loss_of)


@pytest.mark.parametrize(
    "loss_of",
    [
        halves, numbers, padded, masked, shares, functions_of_numbers, normed, reshaped_in_place, pooled_to_one_pixel,
    ],
    ids=lambda one: one.__name__,
)  # fmt: skip
def test_arithmetic_on_sizes_needs_no_other_plan(loss_of: Callable[..., Any]) -> None:
    assert len(run_both(lengths(8, 11, 9, 12, 8, 10, 7, 13), loss_of)._captures) == 2


def test_padded_chunks_of_texts_need_no_other_plan() -> None:
    assert len(run_both(lengths(8, 11, 9, 12, 8, 10, 13, 40), in_padded_chunks)._captures) == 2


def in_halves(net: Any, ids: torch.Tensor) -> torch.Tensor:
    left, right = net(ids).chunk(2, 1)
    return left.softmax(1).square().mean() + right.var()


def by_eights(net: Any, ids: torch.Tensor) -> torch.Tensor:
    wide = functional.pad(net(ids), (0, 0, 0, -ids.shape[1] % 8))
    losses = [
        wide[:, 8 * place : 8 * place + 8].softmax(1).square().mean()
        for place in range(wide.shape[1] // 8)
    ]
    return torch.stack(losses).sum() + sum(part.square().mean() for part in wide.split(8, 1))


def test_a_number_that_is_the_same_for_all_sizes_needs_no_other_plan() -> None:
    assert len(run_both(lengths(8, 11, 9, 12, 10, 7, 13), in_halves)._captures) == 2


def test_each_number_of_chunks_has_one_plan() -> None:
    step = run_both(lengths(18, 20, 23, 17, 30, 27, 25, 19, 31, 24, 29), by_eights)
    assert len(step._captures) <= 1 + 2
    assert step._known.traces <= 2 + 3 + 3


def odd_numbers(net: Any, ids: torch.Tensor) -> torch.Tensor:
    length = ids.shape[1]
    sign = (-1) ** length if length / 2 < math.inf else math.inf
    return functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()) * sign


def times_a_condition(net: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    return loss * (ids.shape[1] > 10)


def test_a_condition_on_sizes_as_a_number_has_eagers_bits() -> None:
    run_both(lengths(8, 12, 9, 10, 11), times_a_condition)


def divided_by_a_float(net: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    return loss * (ids.shape[1] // 0.9)  # at 9 sizes 9.0, and 9 / 0.9 is 10.0


def rest_of_a_float(net: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    return loss * (1 + ids.shape[1] % 0.3)


def test_the_rest_of_a_division_by_a_float_has_eagers_bits() -> None:
    run_both(lengths(8, 11, 9, 18, 13), rest_of_a_float)


def test_a_quotient_that_is_rounded_up_has_eagers_bits() -> None:
    run_both(lengths(8, 11, 9, 18, 13), divided_by_a_float)


def test_powers_of_negative_numbers_and_infinity_have_eagers_bits() -> None:
    assert len(run_both(lengths(8, 12, 9, 10, 11), odd_numbers)._captures) == 2


@pytest.mark.parametrize("loss_of", [branch, least], ids=lambda one: one.__name__)
def test_a_condition_on_a_size_splits_the_range(loss_of: Callable[..., Any]) -> None:
    step = run_both(lengths(14, 12, 20, 13, 4, 5, 7, 15, 6), loss_of)
    assert [sizes is None for sizes in sizes_of(step)].count(False) == 2
    assert len(step._captures) == 3


def kept_text(net: Any, ids: torch.Tensor) -> torch.Tensor:
    texts: list[str] = []
    note(ids.dim() == 2, f"{ids.shape[1]}", texts)
    return functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()) * len(texts[0])


def note(_: bool, text: str, texts: list[str]) -> None:
    texts.append(text)


def test_a_text_that_the_step_keeps_has_a_plan_for_each_size() -> None:
    assert all(sizes is None for sizes in sizes_of(run_both(lengths(8, 11, 9, 12), kept_text)))


def test_a_capture_for_many_sizes_is_one_trace() -> None:
    net = Reader(positions=128)
    step: Any = roam.compile(reading(net, torch.optim.SGD(net.parameters(), lr=0.1)), sizes=True)
    step(ids_of(2, 8))
    step(ids_of(2, 11))
    assert sizes_of(step)[0] is not None
    assert step.timings.capture.count == 1


def test_kernels_are_not_run_on_larger_tensors_than_the_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest = []

    def zeros(tensors: Any) -> Any:
        largest.extend(max(tensor.shape, default=0) for tensor in tensors)
        return made(tensors)

    made = real_layouts._zeros
    monkeypatch.setattr(real_layouts, "_zeros", zeros)
    monkeypatch.setattr(cache, "_asked", {})
    assert len(run_both(lengths(40, 61, 50))._captures) == 2
    assert largest
    assert max(largest) <= 2 * 61


def test_a_size_that_python_needs_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "roam"):
        step = run_both(lengths(5, 6, 7), over_time)
    assert all(sizes is None for sizes in sizes_of(step))
    assert any("one plan does not hold" in message for message in caplog.messages)


def convolved() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def halved_often() -> nn.Module:
    blocks = [
        (nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(), nn.MaxPool2d(2))
        for inner, outer in ((3, 4), (4, 8), (8, 16), (16, 16))
    ]
    layers = [layer for block in blocks for layer in block]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


@pytest.mark.parametrize(
    ("make", "sizes"),
    [(convolved, (12, 17, 14, 15, 20, 13, 16)), (halved_often, (81, 49, 39, 62, 111, 64, 95, 33))],
    ids=["convolved", "halved often"],
)
def test_convolutions_follow_the_size_of_images(
    make: Callable[[], nn.Module], sizes: tuple[int, ...]
) -> None:
    outcomes, step = [], None
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def train(
            images: torch.Tensor, net: nn.Module = net, optimizer: Any = optimizer
        ) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(images).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        function: Any = train
        if is_planned:
            function = step = roam.compile(train, sizes=True)
        losses = [
            function(torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(size)))
            for size in sizes
        ]
        outcomes.append(tensors_and_numbers(losses, net.state_dict(), optimizer.state_dict()))
    assert_same_bits(*outcomes)
    assert step is not None
    assert len(step._captures) == 2


def test_a_kernel_that_refuses_small_sizes_narrows_its_own_size_in_one_trace() -> None:
    """A batch of 2 or 3 does not say how short texts may be."""

    def loss_of(net: Any, ids: torch.Tensor) -> torch.Tensor:
        made = net(ids).transpose(1, 2)[:, :, None]
        for _ in range(3):  # a text of fewer than 8 is refused by one of them
            made = functional.max_pool2d(made, (1, 2))
        return made.square().mean()

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))

    step = run_both([(3, 20), (2, 21), (3, 30), (2, 17), (3, 40)], loss_of, make)
    assert len(step._captures) == 2
    (sizes,) = (sizes for sizes in sizes_of(step) if sizes is not None)
    assert min(sizes.least) == 2
    assert max(sizes.least) >= 8
    assert step._known.traces == 3  # two of the first batch, one for all sizes


def test_the_text_of_a_first_step_is_never_made() -> None:
    step = run_both(lengths(8, 8, 8))
    first, later = step._captures[0].runners
    assert first._executor._generated is None
    assert later._executor._generated is not None


def test_a_size_is_checked_until_a_run_has_come_to_its_end() -> None:
    net = Reader()
    step: Any = roam.compile(reading(net, torch.optim.SGD(net.parameters(), lr=0.1)), sizes=True)
    for length in (8, 11, 9):
        step(ids_of(2, length))
    (runner,) = step._captures[0].runners
    lengths_of = runner._executor._lengths
    with pytest.raises(IndexError):
        step(torch.full((2, 12), 1_000))
    assert (12,) not in lengths_of._passed
    step(ids_of(2, 12))
    assert (12,) in lengths_of._passed


def shifted(length: int, _: int) -> tuple[torch.Tensor, ...]:
    ids = ids_of(2, length)
    return ids[:, :-1], ids[:, 1:]


def whole_and_shifted(length: int, _: int) -> tuple[torch.Tensor, ...]:
    ids = ids_of(2, length)
    return ids[:, :-1].contiguous(), ids[:, 1:]


def cut_from_longer(length: int, _: int) -> tuple[torch.Tensor, ...]:
    ids = ids_of(2, 99)
    return ids[:, :length], ids[:, length : 2 * length]


def transposed(length: int, _: int) -> tuple[torch.Tensor, ...]:
    return ids_of(length, 2).t(), ids_of(length + 1, 2)[1:].t()


def every_second(length: int, _: int) -> tuple[torch.Tensor, ...]:
    return ids_of(2, 2 * length)[:, ::2], ids_of(1, length).expand(2, length)


def one_text(length: int, turn: int) -> tuple[torch.Tensor, ...]:
    ids, start = ids_of(500), 60 * turn
    return tuple(ids[at : at + length].view(1, -1) for at in (start, start + 1))


def last_of_longer(length: int, _: int) -> tuple[torch.Tensor, ...]:
    return ids_of(2, 64)[:, -length:], ids_of(2, length)


PARTS = [shifted, whole_and_shifted, cut_from_longer, transposed, every_second, one_text, last_of_longer]  # fmt: skip


def train_on_parts(
    calls: list[tuple[torch.Tensor, ...]],
) -> Any:
    """Trains eagerly and by plan; the compiled step."""
    outcomes, step = [], None
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = Reader()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

        def train(*args: Any, net: Any = net, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = loss_of_parts(net, *args)
            loss.backward()
            optimizer.step()
            return loss.detach(), [args[0][1:], args[-1].t(), args[-1].storage_offset()]

        function: Any = train
        if is_planned:
            function = step = roam.compile(train)
        results = [function(*args) for args in calls]
        outcomes.append(tensors_and_numbers(results, net.state_dict()))
    assert_same_bits(*outcomes)
    return step


def loss_of_parts(net: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(net(ids).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("parts", PARTS, ids=lambda one: one.__name__)
def test_arguments_may_be_parts_of_other_tensors(parts: Callable[..., Any]) -> None:
    step = train_on_parts([parts(length, turn) for turn, length in enumerate((9, 14, 11, 9, 20))])
    assert len(step._captures) == 2


def test_the_rows_of_a_data_set_have_one_plan_wherever_they_begin() -> None:
    ids, labels = ids_of(48, 9), ids_of(50, 9)[2:]
    step = train_on_parts([(ids[at : at + 4], labels[at : at + 4]) for at in range(0, 48, 4)])
    assert len(step._captures) == 2


def test_a_step_may_go_another_way_where_an_argument_begins_later() -> None:
    def loss_of(net: Any, ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of_parts(net, ids, ids)
        return loss * 2 if ids.storage_offset() > 100 else loss

    ids = ids_of(48, 9)
    outcomes = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = Reader()
        function: Any = reading(net, torch.optim.AdamW(net.parameters(), lr=0.01), loss_of)
        if is_planned:
            function = roam.compile(function)
        losses = [function(ids[at : at + 4]) for at in (0, 4, 8, 20, 24, 28, 12, 16)]
        outcomes.append(tensors_and_numbers(losses, net.state_dict()))
    assert_same_bits(*outcomes)
    assert len(function._captures) == 3


def test_a_step_that_writes_to_parts_of_a_tensor_has_a_plan_for_each_size() -> None:
    outcomes = []
    for is_planned in (False, True):
        net = nn.Linear(4, 4)
        nn.init.ones_(net.weight), nn.init.ones_(net.bias)

        def step(one: torch.Tensor, other: torch.Tensor, net: Any = net) -> torch.Tensor:
            net.zero_grad()
            one.mul_(2)
            loss = (net(one) * other).square().mean()
            loss.backward()
            return loss.detach()

        function: Any = roam.compile(step) if is_planned else step
        wholes = [torch.randn(length, 4, generator=torch.Generator().manual_seed(length)) for length in (8, 11, 9, 12)]  # fmt: skip
        losses = [function(whole[:-1], whole[1:]) for whole in wholes]
        outcomes.append(tensors_and_numbers(losses, wholes, net.weight.grad))
    assert_same_bits(*outcomes)
    assert all(sizes is None for sizes in sizes_of(function))


class Packed(nn.Module):
    """Attends within each of the texts that follow one another in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(50, 16), nn.Linear(16, 48)
        self.out = nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
        places = torch.arange(longest)
        mask = places < (ends[1:] - ends[:-1])[:, None]
        index = (ends[:-1, None] + places).clamp(max=ids.shape[0] - 1)
        q, k, v = self.project(self.embed(ids))[index].chunk(3, -1)
        x = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        scores: torch.Tensor = self.out(x * mask[..., None])
        return scores


def by_longest(net: Packed, batch: dict[str, Any]) -> torch.Tensor:
    return net(batch["ids"], batch["ends"], batch["longest"]).square().mean()


def by_longest_itself(net: Packed, batch: dict[str, Any]) -> torch.Tensor:
    losses = [net.out(net.embed(batch["ids"][:1])).mean() for _ in range(batch["longest"])]
    return by_longest(net, batch) + sum(losses)


def by_longest_if_even(net: Packed, batch: dict[str, Any]) -> torch.Tensor:
    loss = by_longest(net, batch)
    return loss * 2 if batch["longest"] % 2 else loss / batch["longest"]


def not_by_longest(net: Packed, batch: dict[str, Any]) -> torch.Tensor:
    return net.out(net.embed(batch["ids"])).square().mean() / batch["longest"]


TEXTS = [(16, 3, 11), (11, 4, 9), (14, 20, 6), (20, 9, 9), (12, 12, 12), (7, 9, 8), (18, 3, 3)]
OF_ONE_TOTAL = [(16, 4, 10), (11, 9, 10), (14, 12, 4), (20, 5, 5), (12, 9, 9), (25, 3, 2)]


class TestNumbers:
    """Whole numbers among the arguments that say how long texts are."""

    def run(self, loss_of: Callable[..., Any], texts: list[tuple[int, ...]], **options: Any) -> Any:
        outcomes, step = [], None
        for is_planned in (False, True):
            torch.manual_seed(0)
            net = Packed()
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

            def train(batch: Any, net: Any = net, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = loss_of(net, batch)
                loss.backward()
                optimizer.step()
                return loss.detach()

            function: Any = train
            if is_planned:
                function = step = roam.compile(train, **options)
            losses = [
                function(
                    {
                        "ids": ids_of(sum(lengths)),
                        "ends": torch.tensor([0, *lengths]).cumsum(0),
                        "longest": max(lengths),
                    }
                )
                for lengths in texts
            ]
            outcomes.append(tensors_and_numbers(losses, net.state_dict(), optimizer.state_dict()))
        assert_same_bits(*outcomes)
        return step

    def test_one_plan_holds_for_all(self) -> None:
        step = self.run(by_longest, TEXTS, python="idle")
        assert len(step._captures) == 2
        assert "args[0]['longest'] 2.." in str(step.kept())

    def test_they_may_change_alone(self) -> None:
        """The second value shows that it changes, and the third what it follows from."""
        assert len(self.run(by_longest, OF_ONE_TOTAL, python="idle")._captures) == 3

    def test_a_condition_splits_the_range(self) -> None:
        assert len(self.run(by_longest_if_even, TEXTS, python="idle")._captures) == 3

    def test_one_of_which_only_its_value_is_used_makes_no_range(self) -> None:
        step = self.run(not_by_longest, TEXTS, python="idle")
        assert len(step._captures) == 2
        (sizes,) = (sizes for sizes in sizes_of(step) if sizes is not None)
        assert len(sizes.symbols.names) == 1

    @pytest.mark.auto
    def test_one_whose_value_python_needs_makes_the_step_run_beside_plans(self) -> None:
        assert self.run(by_longest_itself, TEXTS).runs_beside


class TestGiven:
    def test_one_plan_from_the_first_call_on(self) -> None:
        step = run_both(lengths(9, 5, 24, 7, 24), sizes={"args[0]": {1: 24}})
        assert len(step._captures) == 1
        assert sizes_of(step)[0].corners == ((24,),)

    def test_the_plan_is_told_before_the_first_step(self) -> None:
        net = Reader()
        optimizer = torch.optim.AdamW(net.parameters())
        step = roam.compile(reading(net, optimizer), sizes={"args[0]": {1: 40}})
        other = roam.compile(reading(net, optimizer))
        assert step.plan(ids_of(2, 8)).total_bytes == other.plan(ids_of(2, 40)).total_bytes

    @pytest.mark.parametrize("is_part", [False, True])
    @pytest.mark.parametrize("more", [{}, {"elements": 48}], ids=str)
    def test_fakes_have_the_plan_of_real_tensors(self, is_part: bool, more: Any) -> None:
        net = Reader()
        optimizer = torch.optim.AdamW(net.parameters())
        train = reading(net, optimizer)

        def masked(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return train(batch["ids"][:, : batch["mask"].shape[1]])

        def planned(sizes: Any, *, is_fake: bool) -> tuple[int, Any]:
            with roam.fake() if is_fake else nullcontext():
                ids, mask = ids_of(5, 9), torch.ones(5, 9 - is_part)
            batch = {"ids": ids[:, :-1] if is_part else ids, "mask": mask}
            step = roam.compile(masked, sizes=sizes)
            return step.plan(batch).total_bytes, sizes_of(step)[0]

        sizes = {"ids": {0: 12, 1: 24, **more}}
        (total, of_fakes), (real_total, of_real) = (
            planned(sizes, is_fake=True), planned(sizes, is_fake=False)
        )  # fmt: skip
        assert of_fakes.corners == of_real.corners
        assert of_fakes.least == of_real.least
        # What kernels allocate for themselves is measured of real tensors, at the largest sizes.
        assert total <= real_total if more else total == real_total
        if not more:
            assert total > 1.2 * planned(True, is_fake=True)[0]

    def test_fakes_of_several_sizes_have_a_plan_for_each(self) -> None:
        net = Reader()
        train = reading(net, torch.optim.SGD(net.parameters(), lr=0.1))
        step = roam.compile(train)
        for length in (9, 20, 7):
            with roam.fake():
                ids = ids_of(2, length)
            assert step.plan(ids).total_bytes == roam.compile(train).plan(ids).total_bytes
        assert len(step.kept().plans) == 3

    def test_an_argument_may_be_named_as_the_function_does(self) -> None:
        step = run_both(lengths(9, 5, 24), sizes={"ids": {1: 24}})
        assert len(step._captures) == 1

    def test_a_limit_is_kept_at_all_sizes_or_refused_before_the_first(self) -> None:
        make, sizes = dropping, {"ids": {1: 200}}
        unlimited = run_both(lengths(9, 200), make=make, sizes=sizes).memory().total_bytes
        limit_bytes = int(0.8 * unlimited)
        step = run_both(lengths(9, 5, 200, 7), make=make, sizes=sizes, memory=limit_bytes)
        assert len(step._captures) == 1
        assert step.memory().total_bytes <= limit_bytes
        net = make()
        optimizer = torch.optim.AdamW(net.parameters())
        step = roam.compile(reading(net, optimizer), sizes={"ids": {1: 800}}, memory=limit_bytes)
        with pytest.raises(roam.PlanError) as caught:
            step(ids_of(2, 9))
        assert caught.value.code.startswith("memory_")
        assert not optimizer.state

    def test_batches_of_so_many_tokens_have_one_plan(self) -> None:
        """As a sampler by tokens makes them."""
        sizes = {"ids": {0: 12, 1: 24, "elements": 48}}
        shapes = [(5, 9), (2, 24), (12, 4), (6, 8), (3, 16), (12, 3), (2, 20), (4, 12)]
        step = run_both(shapes, sizes=sizes)
        assert len(step._captures) == 1
        corners = sizes_of(step)[0].corners
        assert max(map(math.prod, corners)) == 48
        assert all(
            any(batch <= wide and length <= long for wide, long in corners)
            for batch in range(2, 13)
            for length in range(2, 25)
            if batch * length <= 48
        )
        names = sizes_of(step)[0].symbols.names
        for corner in corners:
            for runner in step._captures[0].runners:
                check_plan(runner.choice, dict(zip(names, corner, strict=True)))

    def test_a_bound_on_elements_takes_less_than_both_sizes_at_their_largest(self) -> None:
        net = Reader()
        train = reading(net, torch.optim.SGD(net.parameters(), lr=0.1))
        totals = [
            roam.compile(train, sizes={"ids": {0: 12, 1: 24, **more}})
            .plan(ids_of(5, 9))
            .total_bytes
            for more in ({"elements": 48}, {})
        ]
        assert totals[0] < totals[1]

    def test_other_arguments_of_the_same_size_follow(self) -> None:
        net = Reader()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def train(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            optimizer.zero_grad()
            scores = net(batch["input_ids"]).flatten(0, 1)
            loss = functional.cross_entropy(scores, batch["labels"].flatten())
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = roam.compile(train, sizes={"input_ids": {0: 4, 1: 24}})
        for shape in ((2, 9), (4, 24), (3, 5)):
            step({"input_ids": ids_of(*shape), "labels": ids_of(*shape)})
        assert len(step._captures) == 1

    def test_longer_ones_have_other_plans(self) -> None:
        assert len(run_both(lengths(9, 5, 24, 25, 26), sizes={"args[0]": {1: 24}})._captures) >= 2

    @pytest.mark.parametrize(
        "sizes",
        [
            {"args[0]": {1: 4}},
            {"args[0]": {2: 40}},
            {"others": {1: 40}},
            {"ids": {1: 40, "elements": 15}},
        ],
        ids=str,
    )
    def test_what_does_not_fit_the_call_is_refused(self, sizes: Any) -> None:
        net = Reader()
        step = roam.compile(reading(net, torch.optim.SGD(net.parameters(), lr=0.1)), sizes=sizes)
        with pytest.raises(roam.CaptureError, match="sizes="):
            step(ids_of(2, 8))

    @pytest.mark.parametrize(
        "sizes",
        [{"ids": 4}, {"args[0]": {1: 1}}, 5, {"ids": {-1: 4}}, {"ids": {"elements": 8}}],
        ids=str,
    )
    def test_what_is_no_mapping_is_refused(self, sizes: Any) -> None:
        with pytest.raises(ValueError, match="sizes must be"):
            roam.compile(lambda: None, sizes=sizes)

    def test_each_size_may_have_its_plan(self) -> None:
        assert len(run_both(lengths(5, 6, 7), sizes=False)._captures) == 3


def check_plan(choice: Any, sizes: dict[str, int]) -> None:
    """No two tensors share bytes while both are alive, at these sizes of the plan of a range."""
    program = at(choice.program, sizes)
    offsets = choice.plan.offsets.tolist()
    place = {index: turn for turn, index in enumerate(choice.plan.order.tolist())}
    lives: dict[int, tuple[int, int]] = {}
    for index, call in enumerate(program.calls):
        for slot in (*call.refs(), *(slot for slot in call.outputs if slot is not None)):
            storage = program.storage_of(slot)
            if storage >= 0 and offsets[storage] >= 0:
                first, last = lives.get(storage, (place[index], place[index]))
                lives[storage] = min(first, place[index]), max(last, place[index])
    taken = {new: old for old, new in choice.plan.reuse}
    blocks = [
        (offsets[storage], offsets[storage] + program.storages[storage].size_bytes, *life, storage)
        for storage, life in lives.items()
    ]
    for one, (start, end, first, last, storage) in enumerate(blocks):
        assert end <= choice.plan.pool_bytes
        for other_start, other_end, other_first, other_last, other in blocks[one + 1 :]:
            is_apart = end <= other_start or other_end <= start
            is_later = last < other_first or other_last < first
            assert is_apart or is_later or other in taken or storage in taken


def test_the_plan_of_a_range_is_one_of_every_length() -> None:
    captured = run_both(lengths(9, 14, 11))._captures[0]
    (runner,) = captured.runners
    names = captured.step.arguments.sizes.symbols.names
    for length in range(2, 28):
        check_plan(runner.choice, dict.fromkeys(names, length))


def _attended(net: Any, x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1])
    scores = x @ x.transpose(1, 2) / math.sqrt(x.shape[1])
    return scores.masked_fill(places[:, None] < places, -1e9).softmax(-1) @ x


PIECES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "linear": lambda net, x: functional.gelu(net.project(x)[..., :16]),
    "norm": lambda net, x: net.norm(x),
    "attention": lambda net, x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "written attention": _attended,
    "sums over the length": lambda net, x: x.cumsum(1) / x.shape[1],
    "centred": lambda net, x: x - x.mean(1, keepdim=True),
    "shifted": lambda net, x: functional.pad(x, (0, 0, 1, 0))[:, :-1] + x,
    "turned": lambda net, x: torch.cat([x[:, 1:], x[:, :1]], 1) * 0.5,
    "flattened": lambda net, x: net.norm(x.reshape(-1, 16)).view(x.shape) + x,
    "half of it": lambda net, x: x + x[:, : x.shape[1] // 2].sum(1, keepdim=True),
    "every second": lambda net, x: x + x[:, ::2].mean(1, keepdim=True),
    "scaled by the length": lambda net, x: x * (x.shape[1] / 7 + x.shape[0]),
    "dropout": lambda net, x: functional.dropout(x, 0.2, net.training),
    "products": lambda net, x: torch.einsum("bld,bmd->blm", x, x).tanh().sum(2, keepdim=True) + x,
    "largest": lambda net, x: x + x.amax(1, keepdim=True),
    "transposed": lambda net, x: x.transpose(1, 2).contiguous().transpose(1, 2) + 1,
    "convolved": lambda net, x: functional.conv1d(
        x.transpose(1, 2), net.out.weight[:16, :, None], padding=0
    ).transpose(1, 2),
}


@settings(max_examples=6)
@given(
    st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=5),
    st.lists(st.tuples(st.sampled_from([2, 2, 3]), st.integers(2, 24)), min_size=4, max_size=8),
)
def test_random_programs_have_one_plan_for_a_range(
    names: list[str], shapes: list[tuple[int, int]]
) -> None:
    def loss_of(net: Any, ids: torch.Tensor) -> torch.Tensor:
        x = net.embed(ids)
        for name in names:
            x = PIECES[name](net, x)
        return functional.cross_entropy(net.out(x).flatten(0, 1), ids.flatten())

    for captured in run_both(shapes, loss_of)._captures:
        if (sizes := captured.step.arguments.sizes) is None:
            continue
        for shape in shapes:
            values = sizes.values([torch.empty(shape)])
            if sizes.symbols.hold(values) and any(
                all(size <= most for size, most in zip(values, corner, strict=True))
                for corner in sizes.corners
            ):
                for runner in captured.runners:
                    check_plan(runner.choice, dict(zip(sizes.symbols.names, values, strict=True)))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(8))
def test_mixtures_of_lengths_and_modes(seed: int) -> None:
    draw = random.Random(seed)
    outcomes = []
    calls = [(draw.randint(1, 4), draw.randint(1, 20), draw.random() < 0.3) for _ in range(14)]
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = Reader()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        function: Any = reading(net, optimizer)
        if is_planned:
            function = roam.compile(function, sizes=True)
        losses = []
        for batch, length, is_evaluated in calls:
            net.train(not is_evaluated)
            losses.append(function(ids_of(batch, length)))
        outcomes.append(tensors_and_numbers(losses, net.state_dict(), optimizer.state_dict()))
    assert_same_bits(*outcomes)
