"""Trains a GPT-2 whose parameters, gradients and AdamW's state take more than there is memory:
`python benches/large.py gpt2-xl --memory 12GiB --folder FOLDER [--steps 3] [--tokens 64]`.

Each step's time, and the bytes that it read from the files in the folder and wrote there, beside
what the plan says; and at the end the most that the process had in its data segments beyond what it
had when PyTorch and roam were loaded. `--eager` trains the same steps eagerly too, in a process of
its own, and compares losses and parameters. Exits with 1 where bits or traffic differ, or more was
taken than planned. Linux only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import roam
from roam import zoo

_GIB = 2**30
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**18)}


class _Traffic:
    """Counts what is read from files and written there by the calls that tiers use."""

    def __init__(self) -> None:
        self.read_bytes = self.written_bytes = 0
        preadv, pwrite = os.preadv, os.pwrite

        def reading(*args: Any) -> int:
            done = preadv(*args)
            self.read_bytes += done
            return done

        def writing(*args: Any) -> int:
            done = pwrite(*args)
            self.written_bytes += done
            return done

        os.preadv, os.pwrite = reading, writing

    def taken(self) -> tuple[int, int]:
        """(read, written) since it was asked last."""
        found = self.read_bytes, self.written_bytes
        self.read_bytes = self.written_bytes = 0
        return found


class _Peak(threading.Thread):
    """Looks ten times a second at what the data segments of the process take."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.most_bytes = self._bytes()
        self.start()

    @staticmethod
    def _bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return int(found["VmData"].split()[0]) * 1024

    def run(self) -> None:
        while True:
            self.most_bytes = max(self.most_bytes, self._bytes())
            time.sleep(0.1)


def _batch(number: int, like: torch.Tensor, words: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(words, like.shape, generator=generator)


def trained(arguments: argparse.Namespace, *, is_eager: bool) -> dict[str, Any]:
    """Trains, and prints each step. The network is made in place, and nothing of it twice."""
    torch.manual_seed(0)
    peak = _Peak()
    made = zoo.build(arguments.model, batch=1, seq=arguments.tokens)
    words = made.model.config.vocab_size
    traffic = _Traffic()
    step: Any = made.train_step
    if not is_eager:
        step = roam.compile(step, memory=arguments.memory, offload=arguments.folder)
    losses, faults = [], []
    for number in range(arguments.steps):
        tokens = _batch(number, made.batch[0], words)
        traffic.taken()
        start, own = time.perf_counter(), time.process_time()
        losses.append(step(made.model, made.optimizer, tokens, tokens).item())
        seconds, own = time.perf_counter() - start, time.process_time() - own
        told = f"step {number}: loss {losses[-1]:.6f}, {seconds:.1f} s, {own:.1f} s of processors"
        if not is_eager:
            read, written = traffic.taken()
            memory = step.memory()
            planned = sum(memory.read_bytes.values()), sum(memory.written_bytes.values())
            planned_s = memory.step_s + memory.extra_s
            told += (
                f" (planned {planned_s:.1f} s); read {read / _GIB:.2f}, written {written / _GIB:.2f} GiB "
                f"(planned {planned[0] / _GIB:.2f}, {planned[1] / _GIB:.2f}, at least "
                f"{memory.least_moved_bytes / _GIB:.2f} in all)"
            )
            # Planning measures the disk, and moves parameters to it, in the calls that plan.
            if number >= 2 and (read, written) != planned and not memory.offloaded_tensors:
                faults.append(f"step {number} moved other bytes than planned")
        sys.stderr.write(told + "\n")
    digest = hashlib.sha256()
    for one in made.model.parameters():
        digest.update(one.detach().numpy().data)
    found: dict[str, Any] = {"losses": losses, "digest": digest.hexdigest(), "faults": faults}
    grown_bytes = peak.most_bytes - peak.start_bytes
    told = f"grown by {grown_bytes / _GIB:.2f} GiB at most"
    if not is_eager:
        memory = step.memory()
        told += (
            f", planned {memory.run_bytes / _GIB:.2f}, limit {memory.limit_bytes / _GIB:.2f}, "
            f"eagerly {memory.program_order_bytes / _GIB:.2f}; {memory.extra_runs} extra runs"
        )
    sys.stderr.write(told + "\n")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a language model that `roam zoo` lists")
    parser.add_argument("--memory", required=True, help="the most that a step may take")
    parser.add_argument("--folder", help="where the files are made (default: that of temporaries)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--eager", action="store_true", help="train eagerly too, and compare")
    parser.add_argument("--child", choices=("eager", "planned"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.folder = arguments.folder or tempfile.gettempdir()
    transformers.logging.set_verbosity_error()
    if arguments.child:
        print(json.dumps(trained(arguments, is_eager=arguments.child == "eager")))
        return 0
    told = []
    for how in ("planned", "eager")[: 1 + arguments.eager]:
        sys.stderr.write(f"{how}:\n")
        command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--child", how]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | _MALLOC
        )
        told.append(json.loads(done.stdout.splitlines()[-1]))
    faults = told[0].pop("faults")
    if arguments.eager:
        is_equal = all(told[0][key] == told[1][key] for key in ("losses", "digest"))
        faults += [] if is_equal else ["bits differ from eager PyTorch's"]
        print("bits:", "equal" if is_equal else "different")
    print("\n".join(faults) or "as planned")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
