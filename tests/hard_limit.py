"""Trains a GPT-2 in a process that the system gives no more memory than its budget.

`python tests/hard_limit.py bytes|eager|planned|limited SAMPLES STEPS [BUDGET_BYTES]` prints, as
JSON, the losses and what the process took, or what the step takes eagerly. `planned` and `limited`
compile the step for the budget. With `limited`, and with a budget for `eager`, the data segments of
the process may grow by the budget and by `OWN_BYTES`, from where they are when a step of the same
network has been captured, planned and run on four samples.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import roam

LAYERS, WIDTH, TOKENS, WORDS = 3, 64, 64, 256

OWN_BYTES = 2**25
"""For what capture and planning themselves leave behind: by how much the allocator's free memory is
scattered then depends on timing."""


def built() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=4, vocab_size=WORDS, n_positions=TOKENS,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: Any, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def batch(samples: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(WORDS, (samples, TOKENS), generator=generator)


def losses(step: Callable[..., torch.Tensor], samples: int, steps: int) -> list[float]:
    model, optimizer = built()
    generator = torch.Generator().manual_seed(1)
    return [step(model, optimizer, batch(samples, generator)).item() for _ in range(steps)]


def eager_bytes(samples: int) -> int:
    """What the step takes in eager PyTorch's order, by plan."""
    step = roam.compile(train_step)
    step.plan(*built(), torch.zeros(samples, TOKENS, dtype=torch.int64))
    (captured,) = step._captures
    return max(runner.choice.eager_bytes for runner in captured.runners)


def held_bytes() -> int:
    """What the data segments of the process take."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return int(found["VmData"].split()[0]) * 1024


def limit(budget_bytes: int) -> int:
    """The process may grow by the budget, and what capture and planning leave behind, alone."""
    # What the process loads for once: libraries, threads, what capture and planning are made of.
    losses(roam.compile(train_step, memory="90%"), 4, 2)
    gc.collect()
    before = held_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (before + budget_bytes + OWN_BYTES,) * 2)
    return before


def main(how: str, samples: int, steps: int, budget_bytes: int | None = None) -> dict[str, Any]:
    if how == "bytes":
        return {"eager_bytes": eager_bytes(samples)}
    before = held_bytes()
    if how == "limited" or (how == "eager" and budget_bytes is not None):
        assert budget_bytes is not None
        before = limit(budget_bytes)
    if how == "eager":
        return {"losses": losses(train_step, samples, steps)}
    step = roam.compile(train_step, memory=budget_bytes)
    found = losses(step, samples, steps)
    memory = step.memory()
    return {
        "losses": found,
        "planned_bytes": memory.run_bytes,
        "extra_runs": memory.extra_runs,
        "grown_bytes": held_bytes() - before,
    }


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
