"""Trains one block of a Llama on a long context within a budget that only tiles can keep: `python
benches/long_context.py [--tokens 8192] [--heads 4] [--memory 225MiB]`.

The block (width 512) has attention that is written out, with scores of tokens by tokens for each
head, and a gated MLP; AdamW updates it. Prints what plans of whole operators take at least; trains
it by a plan within the budget, by default a third of that, and eagerly, each in a process of its
own; and prints what each took, and whether all losses and parameters are equal. Exits with 1 where
they are not, or the budget is not kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import roam
from roam.memory_limit import MemoryLimit
from roam.report.table import format_bytes
from roam.runtime.memory_profiler import measure_peak, observed

WIDTH, HIDDEN, STEPS = 512, 1408, 3
WAYS = ("eager", "planned")


def made(tokens: int, heads: int) -> Any:
    """The block, and its step."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=heads, intermediate_size=HIDDEN, max_position_embeddings=tokens,
        use_cache=False, attn_implementation="eager", pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    block = transformers.LlamaModel(config)
    block.embed_tokens = None  # it is given what tokens are embedded as
    optimizer = torch.optim.AdamW(block.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(block(inputs_embeds=x).last_hidden_state, y)
        loss.backward()
        optimizer.step()
        return loss

    return block, step


def least_of_whole_operators(tokens: int, heads: int) -> int:
    """What plans of whole operators take at least, whatever runs again."""
    with roam.fake():
        _, step = made(tokens, heads)
        batch = torch.randn(1, tokens, WIDTH), torch.randn(1, tokens, WIDTH)
    graph = roam.capture(step, *batch)
    try:
        found = roam.optimize(graph, memory_limit_bytes=graph.persistent_bytes + 1)
    except roam.PlanError as error:
        if error.least_bytes is None:
            raise
        return error.least_bytes
    return found.total_bytes


def trained(way: str, tokens: int, heads: int, limit_bytes: int) -> dict[str, Any]:
    """Trains in one way: a digest of all losses and parameters; the most bytes that a step has
    beside what is there before it; seconds of the processor for the first call and for a later one;
    by plan, what is cut.
    """
    block, step = made(tokens, heads)
    compiled = roam.compile(step, memory=limit_bytes) if way == "planned" else None
    train: Callable[..., Tensor] = step if compiled is None else compiled
    generator = torch.Generator().manual_seed(1)
    digest, seconds = hashlib.sha256(), []
    for _ in range(STEPS):
        # Each in memory of its own: of views of one tensor, all of it counts as the batch.
        batch = [torch.randn(1, tokens, WIDTH, generator=generator) for _ in range(2)]
        start = time.process_time()
        loss = train(*batch)
        seconds.append(time.process_time() - start)
        digest.update(loss.detach().numpy().tobytes())
    for parameter in block.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    told = {"digest": digest.hexdigest(), "first_s": seconds[0], "step_s": seconds[-1]}
    if compiled is None:
        with observed():  # what a step keeps for the next one
            step(*batch)
        block.zero_grad()
        return told | {"inside_bytes": measure_peak(step, *batch).peak_bytes}
    compiled.measured(*batch)
    memory = compiled.memory()
    assert memory.measured_bytes is not None, "it has just been measured"
    return told | {
        "inside_bytes": memory.measured_bytes - memory.persistent_bytes,
        "total_bytes": max(memory.total_bytes, memory.measured_bytes),
        "extra_runs": memory.extra_runs,
        "cuts": str(memory.cuts),
    }


def run(way: str, tokens: int, heads: int, limit_bytes: int) -> dict[str, Any]:
    """The same, in a process of its own."""
    command = [
        sys.executable, "-W", "ignore", __file__, "--way", way, "--tokens", str(tokens), "--heads", str(heads),
        "--memory", str(limit_bytes),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"failure": done.returncode}
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--memory", help="the budget: bytes, or an amount with a unit")
    parser.add_argument("--way", choices=WAYS, help="train in this process, in this way alone")
    arguments = parser.parse_args()
    tokens, heads = arguments.tokens, arguments.heads
    if arguments.way is not None:
        print(json.dumps(trained(arguments.way, tokens, heads, int(arguments.memory))))
        return 0
    least_bytes = least_of_whole_operators(tokens, heads)
    limit_bytes = least_bytes // 3
    if arguments.memory is not None:
        limit_bytes = MemoryLimit.of(arguments.memory).amount_bytes()
    print(
        f"{tokens:,} tokens, {heads} heads: whole operators take {format_bytes(least_bytes)} at least"
    )
    print(f"budget {format_bytes(limit_bytes)}, {limit_bytes / least_bytes:.1%} of that")
    ways = {way: run(way, tokens, heads, limit_bytes) for way in reversed(WAYS)}
    for way, told in ways.items():
        if "failure" in told:
            print(f"{way:8} failed")
            continue
        print(
            f"{way:8} {format_bytes(told['inside_bytes'])} in a step; "
            f"first call {told['first_s']:.1f} s, a step {told['step_s']:.1f} s of the processor"
        )
        if way == "planned":
            print(
                f"         {format_bytes(told['total_bytes'])} in all by plan, {told['extra_runs']} extra runs\n{told['cuts']}"
            )
    digests = {told.get("digest") for told in ways.values()}
    is_equal = len(digests) == 1 and None not in digests
    print(f"losses and parameters {'equal' if is_equal else 'DIFFERENT'}")
    is_kept = ways["planned"].get("total_bytes", limit_bytes + 1) <= limit_bytes
    return int(not (is_equal and is_kept))


if __name__ == "__main__":
    sys.exit(main())
