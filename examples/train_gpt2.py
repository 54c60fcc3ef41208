"""Train a small GPT-2 twice, by eager PyTorch and by a roam plan, and compare every loss bit for
bit.

The text is this repository's own documentation and licence, one token for each byte, so nothing is
downloaded. Model, dropout, AdamW and the cosine schedule are what one would write without roam; the
only difference is `roam.compile`. Norm clipping would work too, but it needs every gradient at
once, so no gradient could be freed early.

Exits with 1 if any loss or any final parameter differs in any bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Memory is measured by PyTorch's profiler, which would report its own start and end among the
# results.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import transformers

import roam
from roam.report import format_bytes
from roam.runtime import Step, StepMemory

REPOSITORY = Path(__file__).resolve().parent.parent
VOCABULARY = 256
SEQ = 64
BATCH = 2


def read_text() -> torch.Tensor:
    """All of the repository's documentation as bytes, int64 [characters]."""
    files = [
        *sorted(REPOSITORY.glob("*.md")),
        *sorted(REPOSITORY.glob("docs/**/*.md")),
        REPOSITORY / "LICENSE",
    ]
    return torch.tensor(list(b"\n".join(file.read_bytes() for file in files)))


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> torch.Tensor:
    """One step of training on tokens [batch, seq]; returns the loss, a scalar."""
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss


@dataclasses.dataclass(frozen=True)
class Run:
    """What one way of training gave."""

    losses: list[float]
    parameters: list[torch.Tensor]
    memory: StepMemory
    seconds_per_step: float


def train(step: Callable[..., torch.Tensor], compiled: Step, text: torch.Tensor, steps: int) -> Run:
    """Train a new model for ``steps`` steps; the same seeds, so the same model, batches and
    dropout, at every call.

    The last two steps' memory is measured; the time of a step is the median of those before, so
    capture is left out.
    """
    measured = compiled.measured if step is compiled else compiled.measured_eagerly
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQ,
        n_embd=384,
        n_layer=4,
        n_head=6,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    draw = torch.Generator().manual_seed(1)

    losses: list[float] = []
    seconds: list[float] = []
    for number in range(1, steps + 1):
        starts = torch.randint(len(text) - SEQ, (BATCH,), generator=draw)
        tokens = torch.stack([text[start : start + SEQ] for start in starts.tolist()])
        if number > steps - 2:
            # Twice, since the gradients that an eager step leaves are seen to die if they were seen
            # to be made.
            loss = measured(model, optimizer, tokens)
        else:
            start_s = time.perf_counter()
            loss = step(model, optimizer, tokens)
            seconds.append(time.perf_counter() - start_s)
        losses.append(loss.item())
        scheduler.step()
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return Run(losses, parameters, compiled.memory(), statistics.median(seconds))


def is_same(one: Run, other: Run) -> bool:
    """Whether two runs had the same losses and parameters, in each bit."""
    return one.losses == other.losses and all(map(torch.equal, one.parameters, other.parameters))


def main() -> int:
    """Train both ways, print the comparison, and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT-2 by eager PyTorch and by a roam plan."
    )
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="at least 5 (default 20)"
    )
    steps = parser.parse_args().steps
    if steps < 5:
        parser.error("--steps must be at least 5")

    text = read_text()
    print(f"text: {len(text):,} bytes; batches of {BATCH} x {SEQ} tokens; {steps} steps")
    compiled = roam.compile(train_step)
    eager = train(train_step, compiled, text, steps)
    planned = train(compiled, compiled, text, steps)

    print(f"\n{'step':>4}  {'eager loss':>20}  {'loss by plan':>20}")
    for number, (one, other) in enumerate(zip(eager.losses, planned.losses, strict=True), start=1):
        print(
            f"{number:>4}  {one!r:>20}  {other!r:>20}  {'equal' if one == other else 'DIFFERENT'}"
        )

    of_eager, of_plan = eager.memory, planned.memory
    rows = (
        (
            "eager",
            of_eager.program_order_bytes,
            of_eager.eager_measured_bytes,
            of_eager.eager_workspace_bytes,
            eager,
        ),
        ("by plan", of_plan.total_bytes, of_plan.measured_bytes, of_plan.workspace_bytes, planned),
    )
    print(
        f"\n{'memory of a step':<18}  {'planned':>12}  {'measured':>12}  {'in kernels':>12}  {'s per step':>10}"
    )
    for name, *sizes, run in rows:
        shown = "  ".join(f"{format_bytes(size or 0):>12}" for size in sizes)
        print(f"{name:<18}  {shown}  {run.seconds_per_step:>10.3f}")
    print(
        "(planned, of eager: the total in program order; measured: the most allocated at once in a step;\n"
        "in kernels: the part of it that kernels allocated for themselves)"
    )

    plan = dict(compiled.plans)[train_step.__name__]
    print(f"\nthe plan is {plan.gap:.2%} above the lower bound of pool + unpooled")

    same = is_same(eager, planned)
    print(f"losses and final parameters: {'equal bit for bit' if same else 'DIFFERENT'}")
    if not same:
        # Products by MKL need not repeat their bits from run to run.
        again = train(train_step, compiled, text, steps)
        print(f"eager PyTorch, run again: {'equal' if is_same(eager, again) else 'DIFFERENT'}")
        print(f"... beside the plan: {'equal' if is_same(planned, again) else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
