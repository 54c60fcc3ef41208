"""Trains networks whose parameters and optimizer state take three times their budget, in a process
that the system gives no more memory than the budget, and `OWN_BYTES`.

`python tests/hard_paging.py eager|paged gpt2|llama FOLDER FIRST LAST [LIMITED]` trains from one
step to another, with AdamW, clipping, two batches a step and a schedule. It resumes from the
checkpoint in the folder unless it begins at 0, and saves one there. It prints, as JSON, the losses,
a digest of parameters and state, and for `paged` what the plan says and what a further step was
measured to take. With one more argument the data segments of the process may grow no further;
shared maps of files do not count.
"""

from __future__ import annotations

import gc
import hashlib
import json
import mmap
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils import _pytree as pytree

import hard_limit
import roam

WIDTH, LAYERS, TOKENS, WORDS, STEPS = 768, 3, 32, 512, 20
OWN_BYTES = 2**25
"""For what capture and planning themselves leave behind: as in `hard_limit`."""
Made = tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def gpt2(width: int) -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=width, n_head=4, vocab_size=WORDS, n_positions=TOKENS,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(width: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=width, intermediate_size=8 * width // 3,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=WORDS,
        max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


NETWORKS: dict[str, Callable[[int], torch.nn.Module]] = {"gpt2": gpt2, "llama": llama}


def built(name: str, width: int = WIDTH) -> Made:
    torch.manual_seed(0)
    model = NETWORKS[name](width).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, STEPS + 1)


def train_step(model: Any, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    total = torch.zeros(())
    for part in tokens.chunk(2):
        loss = model(input_ids=part, labels=part).loss / 2
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def batch(number: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(number))


def trained(step: Callable[..., torch.Tensor], made: Made, numbers: range) -> list[float]:
    model, optimizer, schedule = made
    losses = []
    for number in numbers:
        losses.append(step(model, optimizer, batch(number)).item())
        schedule.step()
    return losses


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(one.nbytes for one in model.parameters())


def tensors(made: Made) -> Iterator[torch.Tensor]:
    yield from made[0].parameters()
    yield from (value for state in made[1].state.values() for value in state.values())


def resume(made: Made, path: Path) -> None:
    """State that is large stays a map of the checkpoint until the first step moves it; a private
    map would count as memory of the process.
    """
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        *states, random_state = torch.load(path, mmap=True)
    states = pytree.tree_map_only(
        torch.Tensor, lambda one: one if one.nbytes > 2**20 else one.clone(), states
    )
    for one, state in zip(made, states, strict=True):
        one.load_state_dict(state)
    torch.set_rng_state(random_state.clone())  # of dropout


def limit(name: str, budget_bytes: int) -> None:
    """The process may grow by the budget, and by what capture and planning leave behind, alone."""
    # What the process loads for once: libraries, threads, what capture and planning are made of.
    small = built(name, WIDTH // 8)
    with tempfile.TemporaryDirectory() as folder:
        memory = int(1.5 * parameter_bytes(small[0]))
        trained(roam.compile(train_step, memory=memory, offload=folder), small, range(2))
    del small
    # A library of kernels keeps a buffer as large as the largest product needs: MKL up to 16 MiB.
    for wide in (WIDTH, 8 * WIDTH // 3, 4 * WIDTH):
        inputs = torch.ones(TOKENS, WIDTH, requires_grad=True)
        torch.nn.Sequential(torch.nn.Linear(WIDTH, wide), torch.nn.Linear(wide, WIDTH))(
            inputs
        ).sum().backward()
    del inputs
    gc.collect()
    most_bytes = hard_limit.held_bytes() + budget_bytes + OWN_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))


def main(how: str, name: str, folder: str, first: str, last: str, *limited: str) -> dict[str, Any]:
    checkpoint = Path(folder) / f"{name}-{how}.pt"
    with torch.device("meta"):
        budget_bytes = parameter_bytes(NETWORKS[name](WIDTH))  # AdamW's state takes twice as much
    if limited:
        limit(name, budget_bytes)
    step: Any = train_step
    if how == "paged":
        step = roam.compile(step, memory=budget_bytes, offload=folder)
    made = built(name)
    if int(first):
        resume(made, checkpoint)
    found: dict[str, Any] = {"losses": trained(step, made, range(int(first), int(last)))}
    torch.save([*(one.state_dict() for one in made), torch.get_rng_state()], checkpoint)
    digest = hashlib.sha256()
    for one in tensors(made):
        digest.update(one.detach().numpy().data)
    found["digest"] = digest.hexdigest()
    if how == "paged":
        step.measured(*made[:2], batch(int(last)))
        memory = step.memory()
        found |= {
            "persistent_bytes": sum(one.nbytes for one in tensors(made)),
            "budget_bytes": budget_bytes,
            "planned_bytes": memory.run_bytes,
            "measured_bytes": memory.measured_bytes,
        }
    return found


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(json.dumps(main(*sys.argv[1:])))
