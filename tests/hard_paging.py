"""Trains a GPT-2 whose parameters and optimizer state take three times its budget, in a process
that the system gives no more memory than the budget, and `hard_limit.OWN_BYTES`.

`python tests/hard_paging.py eager|paged STEPS [LIMITED]` prints, as JSON, the losses, a digest of
parameters and state, and for `paged` what the plan says. With a third argument the data segments of
the process may grow no further; maps of files do not count.
"""

from __future__ import annotations

import gc
import hashlib
import json
import resource
import sys
import tempfile
from typing import Any

import torch
import transformers

import hard_limit
import roam

hard_limit.LAYERS, hard_limit.WIDTH, hard_limit.TOKENS, hard_limit.WORDS = 4, 256, 32, 512


def limit(budget_bytes: int) -> None:
    """The process may grow by the budget, and what capture and planning leave behind, alone."""
    hard_limit.losses(roam.compile(hard_limit.train_step), 1, 2)
    gc.collect()
    most_bytes = hard_limit.held_bytes() + budget_bytes + hard_limit.OWN_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))


def main(how: str, steps: int, is_limited: bool) -> dict[str, Any]:
    parameters = sum(one.nbytes for one in hard_limit.built()[0].parameters())
    budget_bytes = parameters  # AdamW's state takes two times as much
    if is_limited:
        limit(budget_bytes)
    with tempfile.TemporaryDirectory() as folder:
        step: Any = hard_limit.train_step
        if how == "paged":
            step = roam.compile(step, memory=budget_bytes, offload=folder)
        made, generator = hard_limit.built(), torch.Generator().manual_seed(1)
        losses = [step(*made, hard_limit.batch(1, generator)).item() for _ in range(steps)]
    digest = hashlib.sha256()
    for one in (*made[0].parameters(), *(v for s in made[1].state.values() for v in s.values())):
        digest.update(one.detach().numpy().tobytes())
    found: dict[str, Any] = {"losses": losses, "digest": digest.hexdigest()}
    if how == "paged":
        memory = step.memory()
        found |= {
            "persistent_bytes": 3 * parameters,
            "budget_bytes": budget_bytes,
            "planned_bytes": memory.run_bytes,
        }
    return found


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3)))
