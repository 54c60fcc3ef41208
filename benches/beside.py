"""What it costs the host to run a step's Python beside its plan, per operator and call.

    python benches/beside.py [layers]

The step has many small operators, so that their kernels take little of it. `python` is what the
step's own Python and autograd take under a dispatch mode that does nothing: what PyTorch takes to
call Python for an operator is in it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import roam


class Nothing(TorchDispatchMode):
    """Runs each operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Count(Nothing):
    """Counts operators."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def seconds(run: Callable[[], Any], times: int = 30) -> float:
    taken = []
    for _ in range(times):
        start = time.thread_time()
        run()
        taken.append(time.thread_time() - start)
    return min(taken)


def cost(kind: Any, layers: int) -> tuple[int, float, float, float]:
    """How many operators a step has, and the seconds that it takes eagerly, under a dispatch mode
    that does nothing, and beside its plan.
    """
    weights = [torch.nn.Parameter(torch.randn(4, 4) * 0.1) for _ in range(layers)]
    optimizer = kind(weights, lr=0.01)
    log: list[float] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        hidden = x
        for weight in weights:
            hidden = torch.tanh(hidden @ weight) + x
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        log.append(loss.item())
        return loss

    x = torch.randn(4, 4)
    for _ in range(3):
        step(x)
    with Count() as count:
        step(x)

    def under_a_mode() -> None:
        with Nothing():
            step(x)

    eager_s, python_s = seconds(lambda: step(x)), seconds(under_a_mode)
    compiled = roam.compile(step, python="beside")
    for _ in range(5):
        compiled(x)
    return count.number, eager_s, python_s, seconds(lambda: compiled(x))


def main(layers: int) -> None:
    torch.set_num_threads(1)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        found = []
        for size in (layers // 4, layers):
            number, eager_s, python_s, beside_s = cost(kind, size)
            found.append((number, beside_s - python_s))
            print(
                f"{kind.__name__}: {number} operators; eager {eager_s * 1e3:.2f} ms, python {python_s * 1e3:.2f} ms, beside "
                f"{beside_s * 1e3:.2f} ms"
            )
        (few, few_s), (many, many_s) = found
        each_s = (many_s - few_s) / (many - few)
        print(
            f"{kind.__name__}: {each_s * 1e6:.1f} us per operator, and {(few_s - few * each_s) * 1e3:.2f} ms per call"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
