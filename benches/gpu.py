"""Runs what only a GPU can show, in parts of at most ten minutes, so that nothing has to be decided
while one waits.

    python benches/gpu.py OUTPUT_FOLDER [PART ...]

| part | what it writes |
|---|---|
| `tests` | what `make gpu-test` prints |
| `speed` | GPT-2 and ResNet-50 eagerly, by `torch.compile` and in our ways, float32 and bfloat16 |
| `optimizers` | GPT-2 with AdamW's fused and default forms, without the compiled ways |
| `large` | GPT-2 medium and XL, llama-1b and ViT-B/16 in bfloat16 |
| `traces` | profiles of a step of GPT-2 and ResNet-50: eager, by plan, as a CUDA graph |
| `budgets` | 75, 50 and 25 % beside checkpointing and `activation_memory_budget` |
| `host` | GPT-2 and its medium at batch 1 in 50 and 33 %, parameters and state with the host |
| `estimates` | plans of the zoo's models with the device and without it: do they agree? |

A part that fails or takes longer does not keep the others from running; `parts.json` says how each
ended. Without a GPU the parts run on the CPU with `--small`, on models that take seconds, to show
that they work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
_LIMIT_S = 590
_OURS = ("eager", "eager-again", "torch-compile", "roam", "roam-inductor", "roam-cuda-graph")
_BUDGETS = (
    "eager", "roam", "roam-75%", "roam-50%", "roam-25%", "checkpoint",
    "torch-compile", "torch-compile-50%", "torch-compile-25%",
)  # fmt: skip
_ESTIMATED = ("resnet50", "vit_b_16", "bert-base", "gpt2", "llama-1b", "lstm", "moe")


def training(
    folder: Path, small: bool, name: str, models: Sequence[str], *options: str
) -> list[str]:
    """The command of `training.py` for some models; findings go into the folder."""
    where = ["--minutes", "9", "--models", *models]
    if small:
        where = ["--device", "cpu", "--models", "gpt2-tiny", "--batch", "2", "--seq", "16"]
        where += ["--timed-s", "0", "--threads", "1"]
    file = str(folder / f"{name}.json")
    return [sys.executable, str(HERE / "training.py"), *where, *options, "--output", file]


def run(command: Sequence[str], log: Path, **environment: str) -> str:
    """Runs a command, its output into a file; how it ended."""
    with log.open("w") as output:
        try:
            ended = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=_LIMIT_S, check=False,
                env=os.environ | environment, cwd=HERE.parent,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"stopped after {_LIMIT_S} s"
    return f"exit code {ended.returncode}"


def tests(folder: Path, small: bool) -> str:
    """The tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-rs", "-q", "tests/runs/test_gpu.py"]
    return run([*command, *["-x"] * small], folder / "tests.txt")


def trained(name: str, models: Sequence[str], *options: str) -> Callable[[Path, bool], str]:
    """A part that trains models in several ways."""

    def part(folder: Path, small: bool) -> str:
        traces = ["--traces", str(folder)] if name == "traces" else []
        return run(training(folder, small, name, models, *options, *traces), folder / f"{name}.txt")

    return part


def estimates(folder: Path, small: bool) -> str:
    """The zoo's models for CUDA, with what the device answers and without it."""
    found = {}
    for model in ("gpt2-tiny", "lstm-tiny") if small else _ESTIMATED:
        for dtype in ("float32", "bfloat16"):
            graphs = []
            for hidden in ({}, {"CUDA_VISIBLE_DEVICES": ""}):
                graph = folder / f"estimate-{len(graphs)}.json"
                command = [sys.executable, "-m", "roam", "plan", model, "--device", "cuda"]
                command += ["--dtype", dtype, "--json", "--save-graph", str(graph)]
                log = folder / "estimates.txt"
                ended = run(command, log, **hidden)
                if ended == "exit code 0":
                    figures = json.loads(log.read_text().splitlines()[-1])
                    graphs.append((graph.read_bytes(), figures))
                graph.unlink(missing_ok=True)
            if len(graphs) < 2:
                found[f"{model}, {dtype}"] = {"status": ended}
                continue
            (known, with_device), (guessed, without) = graphs
            found[f"{model}, {dtype}"] = {
                "same_graph": known == guessed, "with_device": with_device, "without": without,
            }  # fmt: skip
            (folder / "estimates.json").write_text(json.dumps(found, indent=1) + "\n")
    return "exit code 0" if all("status" not in entry for entry in found.values()) else "failed"


PARTS: dict[str, Callable[[Path, bool], str]] = {
    "tests": tests,
    "speed": trained("speed", ("gpt2", "resnet50"), "--optimizers", "fused", "--ways", *_OURS),
    "traces": trained(
        "traces", ("gpt2", "resnet50"), "--optimizers", "fused", "--dtypes", "bfloat16",
        "--ways", "eager", "roam", "roam-cuda-graph",
    ),
    "budgets": trained(
        "budgets", ("gpt2", "gpt2-medium"), "--optimizers", "fused", "--dtypes", "bfloat16",
        "--ways", *_BUDGETS,
    ),
    "large": trained(
        "large", ("gpt2-medium", "gpt2-xl", "zoo/llama-1b", "zoo/vit_b_16"), "--optimizers",
        "fused", "--dtypes", "bfloat16", "--ways", *_OURS,
    ),
    "optimizers": trained(
        "optimizers", ("gpt2",), "--optimizers", "default", "foreach=False",
        "--ways", "eager", "eager-again", "roam",
    ),
    "host": trained(
        "host", ("gpt2", "gpt2-medium"), "--optimizers", "fused", "--batch", "1", "--deterministic",
        "--ways", "eager", "eager-again", "roam", "roam-host-50%", "roam-host-33%",
    ),
    "estimates": estimates,
}  # fmt: skip
"""In the order in which they run: what is asked first, first."""


def main() -> int:
    """Runs parts, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="OUTPUT_FOLDER")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="on the CPU, models for seconds")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ends = {}
    for name in arguments.parts or PARTS:
        start = time.perf_counter()
        ends[name] = {"ended": PARTS[name](folder, arguments.small)}
        ends[name]["seconds"] = f"{time.perf_counter() - start:.0f}"
        print(f"{name}: {ends[name]['ended']}, {ends[name]['seconds']} s", flush=True)
        (folder / "parts.json").write_text(json.dumps(ends, indent=1) + "\n")
    return int(any(end["ended"] != "exit code 0" for end in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
