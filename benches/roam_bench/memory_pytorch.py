"""The step of https://github.com/pytorch/pytorch/issues/197838, whose peak does not fall with the
budget of `torch.compile`: a small Llama, forward and backward pass.

Recomputation is counted in floating-point operations: those of the whole step, less those of the
same step without recomputation. The formulas are those of `torch.utils.flop_counter`, which has
none for pointwise operators. A planned step cannot run inside of a counter, so its graph is counted
by the same formulas, extra runs included. A plan repeats operators that take little time. To make a
plan that repeats few floating-point operations, the planner is given their numbers as times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import torch

import roam
from roam.program.ir import Program
from roam.program.lower import flops_of, formula_of
from roam.runtime import strategy
from roam.runtime.memory_profiler import measure_peak, observed
from roam.torch_compat.private import TorchDispatchMode
from roam_bench.memory_others import budget, compiled, timed_share

_SEED = 0
BATCH, TOKENS = 2, 256
_CONFIG = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
BUDGETS = (1.0, 0.5, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0)


def _made() -> tuple[torch.nn.Module, torch.Tensor]:
    import transformers

    torch.manual_seed(_SEED)
    config = transformers.LlamaConfig(**_CONFIG, use_cache=False)
    return transformers.LlamaForCausalLM(config), torch.randint(1000, (BATCH, TOKENS))


def step(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Forward and backward pass on tokens [batch, seq]; leaves gradients, and returns the loss."""
    model.zero_grad()
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


@dataclass(frozen=True, slots=True)
class Point:
    """One way of running the step.

    Attributes:
        local_bytes: the most that is allocated at once beside parameters and batch.
        flops: floating-point operations of a step.
        timed_share: how much longer it takes than an eager step; None if that is not measured.
    """

    local_bytes: int
    flops: int
    timed_share: float | None


class _Counter(TorchDispatchMode):
    """Counts floating-point operations, also those of compiled code. Inside of PyTorch's own
    counter the function that was compiled runs instead.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (formula := formula_of(func)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


@cache
def by_pytorch(share: float, pairs: int) -> Point:
    """With the budget of `torch.compile`."""
    model, tokens = _made()
    with budget(share):
        run = compiled(step, model)
        run(model, tokens)
        with observed():
            run(model, tokens)
        model.zero_grad()
        local_bytes = measure_peak(run, model, tokens).peak_bytes
        with _Counter() as counter:
            run(model, tokens)
        again = partial(run, model, tokens)
        timed = timed_share(partial(step, model, tokens), again, pairs) if pairs else None
        return Point(local_bytes, counter.flops, timed)


def _operations(
    program: Program, _: object, calls: Iterable[int], *__: Any, **___: Any
) -> dict[int, int]:
    """In the place of measured nanoseconds: one for each operation, and one for the call."""
    return {index: 1 + flops_of(program, program.calls[index]) for index in calls}


@contextmanager
def _operations_as_times() -> Iterator[None]:
    with mock.patch.object(strategy, "times", _operations):
        yield


def by_roam(local_bytes: int | None, pairs: int, *, fewest_operations: bool = False) -> Point:
    """By a plan within so many bytes beside parameters and batch; without recomputation where that
    is None. With `fewest_operations`, a plan that repeats few operations; else one of little time.

    Raises:
        PlanError: there is no such plan, or none was found.
    """
    model, tokens = _made()
    plain = roam.compile(step)
    plain(model, tokens)
    limit_bytes = None
    if local_bytes is not None:
        limit_bytes = plain.memory().persistent_bytes + local_bytes
    planned = roam.compile(step, memory=limit_bytes)
    with _operations_as_times() if fewest_operations else nullcontext():
        for _ in range(2):
            planned(model, tokens)
    again = partial(planned, model, tokens)
    timed = timed_share(partial(step, model, tokens), again, pairs) if pairs else None
    planned.measured(model, tokens)
    memory = planned.memory()
    assert memory.measured_bytes is not None
    graph = planned._captures[0].runners[-1].choice.graph
    flops = sum(operator.flops for operator in graph.operators)
    return Point(memory.measured_bytes - memory.persistent_bytes, flops, timed)
