"""Other ways to train in less memory, with which `roam bench memory` compares roam: eager PyTorch,
`torch.utils.checkpoint` for each block and for segments, and the budget of `torch.compile`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from roam.torch_compat.private import keeping_activations
from roam_bench.memory_nets import Net

_Step = Callable[..., Any]
_BUDGETS = (0.75, 0.5, 0.25, 0.0)


@dataclass(frozen=True, slots=True)
class Way:
    """One way of running a step.

    Attributes:
        name: in tables.
        run: makes, of a net, its train step and its model, the step as it runs in this way.
        share: what was asked for, in the way's own terms.
        applies: whether a net can be trained so.
        context: in which it is made and runs.
    """

    name: str
    run: Callable[[Net, _Step, torch.nn.Module], _Step]
    share: float = 1.0
    applies: Callable[[Net], bool] = lambda net: True
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


class _Segment(torch.nn.Module):
    """Blocks that run again together in the backward pass."""

    def __init__(self, blocks: list[torch.nn.Module]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, features: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the blocks make of the features, one after another, each with the same further
        arguments.
        """
        return checkpoint(self._all, features, *args, use_reentrant=False, **kwargs)

    def _all(self, features: Any, *args: Any, **kwargs: Any) -> Any:
        for block in self.blocks:
            features = block(features, *args, **kwargs)
        return features


def _checkpointed(
    count: Callable[[int], int], net: Net, train_step: _Step, model: torch.nn.Module
) -> _Step:
    """The step on a model whose lists of blocks are cut into segments, whose length depends on the
    number of blocks.
    """
    lists: list[Any] = [model.get_submodule(path) for path in net.blocks]
    length = count(sum(map(len, lists)))
    for blocks in lists:
        modules = list(blocks)
        del blocks[:]
        for start in range(0, len(modules), length):
            blocks.append(_Segment(modules[start : start + length]))
    return train_step


def compiled(train_step: _Step, model: torch.nn.Module) -> _Step:
    """The step with the model's forward and backward pass compiled, but no kernels generated."""
    model_compiled = torch.compile(model, backend="aot_eager_decomp_partition")

    def step(_: torch.nn.Module, *args: Any) -> Any:
        return train_step(model_compiled, *args)

    return step


def budget(share: float) -> AbstractContextManager[Any]:
    """What is compiled inside keeps this share of its activations."""
    torch.compiler.reset()
    kept: AbstractContextManager[Any] = keeping_activations(share)
    return kept


def _eagerly(net: Net, train_step: _Step, model: torch.nn.Module) -> _Step:
    return train_step


def _one(count: int) -> int:
    return 1


def _root(count: int) -> int:
    """Chen et al., "Training deep nets with sublinear memory cost" (arXiv 1604.06174)."""
    return math.ceil(math.sqrt(count))


OTHERS = (
    Way("eager", _eagerly),
    Way("checkpoint each block", partial(_checkpointed, _one), 0.0, lambda net: bool(net.blocks)),
    Way(
        "checkpoint segments",
        partial(_checkpointed, _root),
        0.0,
        lambda net: bool(net.blocks) and net.is_chain,
    ),
    *(
        Way(
            f"torch.compile, budget {share:g}",
            lambda _, train_step, model: compiled(train_step, model),
            share,
            lambda net: net.kind == "transformer",
            partial(budget, share),
        )
        for share in (1.0, *_BUDGETS)
    ),
)
"""Ways beside roam's, as far as they apply."""


def timed_share(plain: Callable[[], Any], other: Callable[[], Any], pairs: int) -> float:
    """How much more time of the processor a step takes, as a share: the median of pairs in turns.
    Each timed step comes after one of its own kind, which leaves caches and memory as it needs
    them. What else the machine does counts little so.
    """

    def taken(step: Callable[[], Any]) -> float:
        step()
        start = time.process_time()
        step()
        return time.process_time() - start

    seconds = [(taken(plain), taken(other)) for _ in range(pairs)]
    return statistics.median(longer / one for one, longer in seconds) - 1
