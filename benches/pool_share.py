"""How much of what a step makes lies in the static pool, for models of the zoo with AdamW.

    python benches/pool_share.py                                          # minutes; up to 4 GiB
    python benches/pool_share.py --fake llama-1b:1:512 vit_b_16:4         # without running a
    kernel, so without what kernels take

Each step is captured and planned as by `roam.compile`; nothing of it is run but kernels that may
take memory for themselves.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

import roam
from roam import zoo
from roam.report.table import columns
from roam.runtime.strategy import Choice, choose
from roam.tracing.step import capture_step

STEPS = (
    "bert-tiny:2:64",
    "bert-tiny:8:128",
    "bert-base:1:512",
    "gpt2:1:512",
    "vit_b_16:4",
    "resnet18:4",
)


def chosen(step: str, *, fake: bool) -> Choice:
    """How ``name:batch`` or ``name:batch:tokens`` runs."""
    name, batch, *tokens = step.split(":")
    with roam.fake("cpu") if fake else nullcontext():
        built = zoo.build(name, batch=int(batch), seq=int(tokens[0]) if tokens else None)
    captured = capture_step(built.train_step, (built.model, built.optimizer, *built.batch), {})
    return choose([captured.steady], pool=None, time_limit_s=None, is_real=not fake)[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", default=STEPS, metavar="NAME:BATCH[:TOKENS]")
    parser.add_argument("--fake", action="store_true", help="on fake tensors")
    arguments = parser.parse_args()
    rows = [("step", "made MiB", "in the pool", "total MiB", "without a pool", "how")]
    for step in arguments.steps:
        sys.stderr.write(f"{step}\n")
        choice = chosen(step, fake=arguments.fake)
        totals = dict(choice.totals)
        how = next(
            name
            for name, size in totals.items()
            if size == choice.total_bytes and (name != "allocator") is choice.uses_pool
        )
        share = choice.pooled_bytes / choice.made_bytes
        sizes = [
            f"{size / 2**20:,.2f}"
            for size in (choice.made_bytes, choice.total_bytes, totals["allocator"])
        ]
        rows.append((step, sizes[0], f"{share:.1%}", *sizes[1:], how))
    print(columns(rows, right=(1, 2, 3, 4)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
