"""What a call by a plan takes the host beside its kernels: guards, look-ups, and what it leaves.

    python benches/host.py [layers ...]

A GPT-2 of the given numbers of layers, narrow and with a small vocabulary, trains with AdamW and
clipping; 12 layers have the 148 parameters of GPT-2 small. `subtracted` is a call's processor time
without the plan's generated code, whose kernels leave little of the caches to the rest. `left out`
is that of calls whose generated code does nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import transformers

import roam

_CALLS = 200


def made(layers: int) -> tuple[Any, torch.Tensor, int]:
    """A compiled step that has run, its batch, and how many parameters it updates."""
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=48, n_head=2, vocab_size=200, n_positions=64
    )
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    step, batch = roam.compile(train_step, python="idle"), torch.randint(200, (1, 16))
    for _ in range(5):
        step(batch)
    return step, batch, len(list(model.parameters()))


def spent_us(step: Any, batch: torch.Tensor, *, runs_kernels: bool) -> list[float]:
    """For each call, the processor time outside of the plan's generated code, in microseconds."""
    generated = step._last._executor.generated
    run, inside_ns = generated.run, 0
    outgoing: list[Any] = []

    def timed(inputs: list[Any]) -> Any:
        nonlocal inside_ns
        start = time.thread_time_ns()
        if runs_kernels or not outgoing:
            outgoing[:] = [run(inputs)]
        inputs.clear()
        result, given = outgoing[0]
        inside_ns = time.thread_time_ns() - start
        return list(result), list(given)

    generated.run = timed
    found = []
    try:
        for _ in range(_CALLS):
            start = time.thread_time_ns()
            loss = step(batch)  # kept until the next one, as in a training loop
            found.append((time.thread_time_ns() - start - inside_ns) / 1e3)
    finally:
        generated.run = run
    assert loss.numel() == 1
    return sorted(found)


def main(sizes: list[int]) -> None:
    torch.set_num_threads(1)
    for layers in sizes:
        step, batch, parameters = made(layers)
        for name, runs_kernels in (("left out", False), ("subtracted", True)):
            found = spent_us(step, batch, runs_kernels=runs_kernels)
            print(
                f"{parameters} parameters, kernels {name}: median {statistics.median(found):.0f} us, least {found[0]:.0f} us"
            )


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or [6, 12, 24])
