"""Operators that run tile by tile: the bits, the memory, and what is never cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import roam
from roam.kernels import tiles as trial
from roam.program import tiles
from roam.program.tiles import TILES, Body
from roam.program.tiling import candidates, tiled

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES, WIDTH, ROWS = 2048, 64, 512


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


LOSSES: list[Loss] = [cross_entropy, softcapped, summed, of_each, with_accuracy]


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


@pytest.mark.sweep
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_logits_never_exist_whole(loss: Loss, dtype: torch.dtype, tied: bool) -> None:
    (eager, eager_step), (planned, step) = (made(loss, dtype, tied=tied) for _ in range(2))
    logits_bytes = ROWS * CLASSES * 4
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
    assert memory.cuts and "tiles" in str(memory)
    assert memory.measured_bytes <= memory.total_bytes <= memory.limit_bytes


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)
