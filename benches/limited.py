"""Trains a GPT-2 within a third of what its step takes eagerly, in a process that the system gives
no more: `python benches/limited.py [--samples 256] [--steps 100]`.

Four processes train the same network on the same batches (`tests/hard_limit.py`, one thread):
eagerly, by a plan within the budget, by the same plan while the system lets the process grow by the
budget and `OWN_BYTES` alone, and eagerly under this limit. Prints what each took, and whether its
losses are those of the first. Exits with 1 where a planned run fails or has other losses. Linux
only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHILD = Path(__file__).resolve().parent.parent / "tests" / "hard_limit.py"
# One arena, and no memory of more than 256 KiB kept for later: how much more glibc takes than it is
# asked for is not of the budget.
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**18)}


def ran(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A process of `CHILD` with these arguments, when it has ended."""
    command = [sys.executable, "-W", "ignore", str(CHILD), *map(str, arguments)]
    environment = os.environ | _MALLOC | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def run(*arguments: object) -> dict[str, Any]:
    """What a process told, with its seconds; `failure` where it failed."""
    start = time.perf_counter()
    done = ran(*arguments)
    told: dict[str, Any] = {"seconds": time.perf_counter() - start}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return told | {"failure": last or f"exit code {done.returncode}"}
    return told | json.loads(done.stdout.splitlines()[-1])


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=256, help="sequences in a batch")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run")
    arguments = parser.parse_args()
    samples, steps = arguments.samples, arguments.steps
    eager_bytes = run("bytes", samples, steps)["eager_bytes"]
    budget = eager_bytes // 3
    print(f"{steps} steps of {samples} samples; eagerly {_mib(eager_bytes)}, budget {_mib(budget)}")
    eager = run("eager", samples, steps)
    ways = {
        "eager": eager,
        "planned": run("planned", samples, steps, budget),
        "planned, limited": run("limited", samples, steps, budget),
        "eager, limited": run("eager", samples, steps, budget),
    }
    has_failed = False
    for name, told in ways.items():
        row = f"{name:17} {told['seconds']:7.1f} s"
        if "failure" in told:
            row += f"  failed: {told['failure'][:120]}"
        else:
            equal = told["losses"] == eager.get("losses")
            row += f"  losses {'equal' if equal else 'DIFFERENT'}, last {told['losses'][-1]:.6f}"
            has_failed |= not equal
        if "planned_bytes" in told:
            row += f"; planned {_mib(told['planned_bytes'])}, {told['extra_runs']} extra runs"
            row += f"; grown by {_mib(told['grown_bytes'])} at the end"
        print(row)
        has_failed |= name.startswith("planned") and "failure" in told
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
