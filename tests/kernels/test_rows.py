"""Attention by samples: eager's bits out of the pool, and nothing by samples where bits could come
to depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchvision

import roam
from roam import zoo
from roam.kernels import calls
from roam.kernels.table import placement
from roam.runtime.strategy import Choice, choose
from roam.tracing.step import capture_step
from training import Training, assert_same_bits, plain_step, run

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def projected(samples: int, heads: int, tokens: int, width: int, **options: Any) -> torch.Tensor:
    """Heads side by side, as projections make them."""
    return torch.randn(samples, tokens, heads, width, **options).transpose(1, 2)


def by_rows(target: Any, args: Any, kwargs: Any, results: Any) -> list[torch.Tensor]:
    found = placement(target, "cpu")
    assert found.clears(
        [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)], results
    )
    assert found.splits(args, kwargs)
    outs = [torch.empty_strided(item.shape, item.stride(), dtype=item.dtype) for item in results]
    function, call_args, call_kwargs = found.call(args, kwargs, outs)
    function(*call_args, **call_kwargs)
    return outs


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("form", ["plain", "causal", "masked"])
@pytest.mark.parametrize("sizes", [(4, 3, 197, 64), (5, 2, 33, 32), (2, 4, 256, 16), (9, 2, 64, 8)])
def test_the_bits_are_those_of_the_whole(sizes: tuple[int, ...], form: str) -> None:
    torch.manual_seed(0)
    samples, _, tokens, _ = sizes
    query, key, value, grad = (projected(*sizes) for _ in range(4))
    kwargs = {"attn_mask": torch.randn(samples, 1, tokens, tokens)} if form == "masked" else {}
    args = (query, key, value, 0.0, form == "causal")
    results = list(ATTENTION(*args, **kwargs))
    assert_same_bits(by_rows(ATTENTION, args, kwargs, results), results)
    args = (grad, query, key, value, *results, 0.0, form == "causal")
    grads = list(BACKWARD(*args, **kwargs))
    assert_same_bits(by_rows(BACKWARD, args, kwargs, grads), grads)


@pytest.mark.parametrize(
    "query",
    [
        projected(4, 3, 64, 16, dtype=torch.bfloat16),  # products chosen by the batch's size
        projected(4, 1, 64, 16),  # a product that may use several threads itself
        projected(4, 3, 17, 16),  # scratchpads that begin within a cache line
        projected(1, 3, 64, 16),
        torch.randn(4, 3, 16, 64).transpose(2, 3),
    ],
)
def test_what_could_depend_on_the_cut_is_not_cut(query: torch.Tensor) -> None:
    assert not placement(ATTENTION, "cpu").splits((query, query, query), {})


def test_gradients_whose_samples_share_cache_lines_are_not_cut() -> None:
    query = projected(4, 3, 33, 7)
    results = ATTENTION(query, query, query)
    assert placement(ATTENTION, "cpu").splits((query, query, query), {})
    args = (query, query, query, query, *results, 0.0, False)
    assert not placement(BACKWARD, "cpu").splits(args, {})


def vit(samples: int = 6, pixels: int = 48, width: int = 64) -> Training:
    model = torchvision.models.VisionTransformer(
        image_size=pixels,
        patch_size=8,
        num_layers=3,
        num_heads=4,
        hidden_dim=width,
        mlp_dim=4 * width,
        num_classes=7,
    ).train()

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        images = torch.randn(samples, 3, pixels, pixels, generator=generator)
        return images, torch.randint(0, 7, (samples,), generator=generator)

    return Training(plain_step, (model, torch.optim.AdamW(model.parameters(), lr=1e-3)), batch)


def bert() -> Training:
    built = zoo.build("bert-tiny", batch=2, seq=64)
    return Training(built.train_step, (built.model, built.optimizer), lambda generator: built.batch)


def bert_without_dropout() -> Training:
    """Its attention is what the kernel knows."""
    built = zoo.build("bert-tiny", batch=6, seq=40)
    for module in built.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return Training(built.train_step, (built.model, built.optimizer), lambda generator: built.batch)


@pytest.mark.sweep
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("worth", [1, 1 << 40])
@pytest.mark.parametrize("make", [vit, bert_without_dropout])
def test_twenty_steps_have_eager_s_bits(
    make: Callable[[], Training], worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "WORTH_BYTES", worth)
    steps: list[Any] = []

    def wrap(step: Any) -> Any:
        steps.append(roam.compile(step, pool=True, poison=True))
        return steps[-1]

    eager, _ = run(make, 20)
    planned, _ = run(make, 20, wrap)
    assert_same_bits(eager, planned)
    executor = steps[0]._last._executor
    cut = [
        index
        for index, placed in enumerate(executor.bindings.placed)
        if placed is not None and placed.by_rows
    ]
    assert bool(cut) is (worth == 1)
    ways = {executor.bindings.way(index) for index in cut}
    assert not cut or "write" in ways


def test_a_plan_without_a_pool_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "WORTH_BYTES", 1)
    training = vit()
    variant = capture_step(
        training.step, (*training.objects, *training.batch(torch.Generator())), {}
    ).steady
    assert any(placed is not None and placed.by_rows for placed in variant.placed)
    (choice,) = choose([variant], pool=False, time_limit_s=None)
    targets = [call.target for call in choice.program.calls]
    for index, placed in enumerate(choice.placed):
        if placed is not None and placed.by_rows:
            assert targets[index] in (ATTENTION, BACKWARD)
            creates = choice.graph.operators[index].creates
            assert not any(new in creates for _, new in choice.plan.reuse)


def choice_of(training: Training, pool: bool | None) -> Choice:
    arguments = (*training.objects, *training.batch(torch.Generator().manual_seed(0)))
    return choose(
        [capture_step(training.step, arguments, {}).steady], pool=pool, time_limit_s=None
    )[0]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("make", [lambda: vit(8, 96, 96), bert])
def test_nearly_all_of_a_transformer_s_step_lies_in_the_pool(make: Callable[[], Training]) -> None:
    choice = choice_of(make(), None)
    assert choice.uses_pool
    assert choice.pooled_bytes >= 0.95 * choice.made_bytes
    # The room is not bought with memory: of the plans that were tried it is next to the least.
    totals = dict(choice.totals)
    assert choice.total_bytes <= 1.001 * min(
        size for name, size in totals.items() if name != "allocator"
    )


def test_pieces_take_less_than_copies_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for worth in (1, 1 << 40):
        monkeypatch.setattr(calls, "WORTH_BYTES", worth)
        training = vit()
        variant = capture_step(
            training.step, (*training.objects, *training.batch(torch.Generator())), {}
        ).steady
        sizes = calls.copyable_calls(variant.program, variant.placed, variant.device)
        taken.append(
            [
                size
                for index, size in sizes.items()
                if variant.program.calls[index].target is BACKWARD
            ]
        )
    pieces, whole = taken
    assert pieces
    assert all(
        3 * piece == part for piece, part in zip(pieces, whole, strict=True)
    )  # of 6 samples two
