"""Real training steps in several ways on one device, side by side: their memory, their speed and
their bits.

    python benches/training.py --output training.json     # on the GPU; without one it says so
    python benches/training.py --device cpu --threads 1 --output cpu.json

| way | what runs |
|---|---|
| `eager` | PyTorch; the others are compared with it |
| `eager-again` | the same in another process: whether eager PyTorch gives its own bits again |
| `eager-expandable` | with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` |
| `in-backward` | an optimizer per parameter, stepped by a hook when the gradient is complete |
| `torch-compile` | the model through `torch.compile` |
| `torch-compile-50%`, `-25%` | the same with that `activation_memory_budget` |
| `roam` | `roam.compile`, which chooses whether to use a pool |
| `roam-pool`, `roam-no-pool` | the same with `pool=True` and `pool=False` |
| `roam-inductor` | the same with `kernels="inductor"`, which has the bits of compiled kernels |
| `roam-cuda-graph` | the same with `cuda_graph=True` |
| `roam-streams` | the same with `streams=2` |
| `roam-75%`, `roam-50%`, `roam-25%` | the same with `memory=` that share of what it takes without |
| `roam-host-50%`, `-33%` | the same with `offload="host"`, too |
| `checkpoint` | every block by `torch.utils.checkpoint` |

"x eager" is the speed where each step waits for the device before and after, "unwaited" that of
steps in a row between which nothing waits.

Each row runs in a process of its own: its peaks and its allocator are its own, and if it dies the
others go on. Rows that do not fit into ``--minutes`` any more are listed as not run. Exits with 1
if a roam row failed, or gave other bits where eager PyTorch gives its own again; what roam refuses,
and what runs out of memory, is a row like any other.

Needs torch and roam. Models of roam's zoo (`zoo/NAME`) need the libraries that they come from, and
are skipped without.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import roam
from roam.report.table import columns

ROOT = Path(__file__).resolve().parent.parent
CHILD = Path(__file__).with_name("training_way.py")
DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("foreach=False", "default", "fused")
"""AdamW's forms. PyTorch's default is ``foreach=False`` on the CPU and ``foreach=True`` on CUDA."""
WAYS = (
    "eager", "eager-again", "roam", "roam-cuda-graph", "roam-pool", "roam-no-pool", "in-backward", "eager-expandable",
    "torch-compile", "roam-inductor", "roam-streams", "roam-75%", "roam-50%", "roam-25%", "checkpoint",
    "torch-compile-50%", "torch-compile-25%", "roam-host-50%", "roam-host-33%",
)  # fmt: skip
_MAIN = ("eager", "eager-again", "roam")
OURS = tuple(way for way in WAYS if way.startswith("roam"))
ON_CUDA = (
    "eager-expandable", "roam-cuda-graph", "roam-streams", "roam-host-50%", "roam-host-33%",
)  # fmt: skip
"""Ways that there are on CUDA alone."""
COMPILED = ("roam-inductor",)
"""Ours whose bits are not those of eager PyTorch."""
MODELS = {
    "cuda": ("gpt2", "resnet50", "gpt2-xl", "gpt2-medium", "gpt2-large"),
    "cpu": ("gpt2-4-layers", "resnet18", "resnet50"),
}
BATCH = {"cuda": {"gpt2": 4, "resnet": 64}, "cpu": {"gpt2": 1, "resnet": 4}}
SEQ = {"cuda": 1024, "cpu": 256}
IMAGE = 224
PARAMETERS = {
    "gpt2": 124.4e6, "gpt2-medium": 354.8e6, "gpt2-large": 774.0e6, "gpt2-xl": 1557.6e6, "resnet50": 25.6e6,
}  # fmt: skip
_LEAST_S = 10.0
"""No row is started with less time left."""


def wanted(arguments: argparse.Namespace, machine: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, what tells most first, since the time may be up before the last."""
    device = arguments.device
    models = arguments.models or MODELS[device]
    optimizers = arguments.optimizers or (OPTIMIZERS if device == "cuda" else OPTIMIZERS[:1])
    rows = []
    for optimizer, dtype, model, way in itertools.product(
        optimizers, arguments.dtypes or DTYPES, models, arguments.ways or WAYS
    ):
        is_other_form = not arguments.optimizers and optimizer != OPTIMIZERS[0]
        # Other forms of the optimizer need not be tried on everything.
        is_graph = way == "roam-cuda-graph" and optimizer == "fused"
        is_main = way in _MAIN or is_graph
        if is_other_form and not (model == models[0] and dtype == DTYPES[0] and is_main):
            continue
        if way == "roam-cuda-graph" and not (is_graph or arguments.ways):
            continue  # other forms of AdamW count their steps on the CPU
        if way in ON_CUDA and device == "cpu":
            continue
        row = {"model": model, "dtype": dtype, "optimizer": optimizer, "way": way, "device": device}
        family = "gpt2" if model.startswith("gpt2") else "resnet"
        row |= {
            "batch": arguments.batch or BATCH[device][family],
            "seq": arguments.seq or SEQ[device],
            "image": arguments.image or IMAGE,
            "steps": arguments.steps,
        }
        row["status"] = _too_large(row, machine)
        rows.append(row)
    return sorted(rows, key=lambda row: _less_telling(row, models))


def _less_telling(row: dict[str, Any], models: Sequence[str]) -> int:
    """0 for the rows that tell most: the first two models in float32, run by eager PyTorch and by
    roam.
    """
    return (
        (row["way"] not in _MAIN) + (row["model"] not in models[:2]) + (row["dtype"] != DTYPES[0])
    )


def _too_large(row: dict[str, Any], machine: dict[str, Any]) -> str:
    """Parameters, gradients and AdamW's two moments must leave room for activations."""
    least = PARAMETERS.get(row["model"], 0.0) * (4 if row["dtype"] == "float32" else 2) * 4
    have = machine.get("device_bytes")
    if have is None or least <= 0.6 * have:
        return ""
    return f"skipped: needs {least / 2**30:.0f} GiB before activations, and the device has {have / 2**30:.0f} GiB"


def run_all(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Runs rows one after another until the time is up; each is complete when it is given out."""
    end = time.monotonic() + 60 * arguments.minutes
    seconds: dict[tuple[str, ...], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for place, row in enumerate(rows):
            reference = Path(folder) / f"{_file_name(row)}.pt"
            left = end - time.monotonic()
            likely = max(_LEAST_S, seconds.get(_group(row), 0.0))
            if not row["status"] and left < likely:
                row["status"] = f"not run: {max(left, 0):.0f} s were left"
            if not row["status"]:
                start = time.monotonic()
                row |= run_one(row, reference, min(arguments.limit, left), arguments)
                row["seconds"] = time.monotonic() - start
                seconds[_group(row)] = max(seconds.get(_group(row), 0.0), row["seconds"])
            if not any(_group(later) == _group(row) for later in rows[place + 1 :]):
                reference.unlink(missing_ok=True)
            yield row


def run_one(
    row: dict[str, Any], reference: Path, limit_s: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One row in a process of its own; its findings, with a status whatever happened."""
    reply = reference.with_name("reply.json")
    reply.unlink(missing_ok=True)
    request = {name: value for name, value in row.items() if name != "status"} | {
        "seed": arguments.seed,
        "timed_s": arguments.timed_s,
        "threads": arguments.threads,
        "deterministic": arguments.deterministic,
        "reference": str(reference),
        "traces": str(arguments.traces) if arguments.traces else None,
    }
    command = [sys.executable, str(CHILD), json.dumps(request), str(reply)]
    is_late = False
    # Not a pipe: compilers that the process started would keep that open.
    with reference.with_name("errors.txt").open("w+", errors="replace") as errors:
        child = subprocess.Popen(
            command, env=_surroundings(row["way"], arguments.deterministic), start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        errors.seek(0)
        said = " ".join(errors.read()[-300:].split())
    values: dict[str, Any] = (
        json.loads(reply.read_text()) if reply.exists() else {"status": "died", "phase": "import"}
    )
    if is_late:
        values["status"] = f"timed out: after {limit_s:.0f} s, {values['phase']}"
    elif values["status"] == "died":
        how = (
            f"signal {-child.returncode}"
            if child.returncode < 0
            else f"exit code {child.returncode}"
        )
        values["status"] = f"died: {how}, {values['phase']}" + (f": {said}" if said else "")
    return values


def _surroundings(way: str, deterministic: bool) -> dict[str, str]:
    values = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    # The profiler that measures the CPU's memory would say that it starts and ends.
    values |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if way == "eager-expandable":
        values["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if deterministic:
        values["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return values


def _group(row: dict[str, Any]) -> tuple[str, ...]:
    """Rows that share a reference."""
    return row["model"], row["dtype"], row["optimizer"]


def _file_name(row: dict[str, Any]) -> str:
    return "-".join(_group(row)).replace("/", "-")


def describe() -> dict[str, Any]:
    """The machine, from a process of its own: this one touches no device."""
    environment = _surroundings("", deterministic=False)
    command = [sys.executable, str(CHILD), "describe"]
    finished = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    values: dict[str, Any] = json.loads(finished.stdout)
    return values | {"python": platform.python_version(), "machine": platform.machine()}


def commit() -> str | None:
    """The checkout's commit, where there is one and git to ask."""
    try:
        finished = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.strip()


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with our rows."""
    stable = {
        _group(row) for row in rows if row["way"] == "eager-again" and row.get("bits") == "equal"
    }
    wrong = []
    for row in rows:
        name = f"{' '.join(_group(row))} {row['way']}"
        if row["way"] in OURS and row["status"].startswith(("failed", "died")):
            wrong.append(f"{name}: {row['status']}")
        elif (
            row["way"] in OURS
            and row["way"] not in COMPILED
            and row.get("bits") == "differ"
            and _group(row) in stable
        ):
            wrong.append(
                f"{name}: other bits than eager PyTorch, by up to {row['largest_difference']:.3g}"
            )
    return wrong


def table(rows: list[dict[str, Any]]) -> str:
    """All rows, those of one model, dtype and optimizer together."""
    parts = []
    for group in dict.fromkeys(map(_group, rows)):
        of_group = [row for row in rows if _group(row) == group]
        eager = next((row for row in of_group if row["way"] == "eager"), {})
        again = next((row for row in of_group if row["way"] == "eager-again"), {})
        first = of_group[0]
        size = first["seq"] if group[0].startswith("gpt2") else first["image"]
        sizes = (
            f"batch {first['batch']}, {'seq' if group[0].startswith('gpt2') else 'pixels'} {size}"
        )
        head = (
            "way", "peak MiB", "reserved MiB", "of eager", "planned MiB", "meas./plan",
            "steps/s", "x eager", "unwaited", "host us/op", "+us/op", "first s", "bits, status",
        )  # fmt: skip
        lines = [head, *(_line(row, eager, again.get("bits"), len(head)) for row in of_group)]
        parts.append(
            f"{', '.join(group)}, {sizes}\n\n{columns(lines, right=tuple(range(1, len(head) - 1)))}\n"
        )
        parts.extend(
            _shares(row["shares"], row["uses_pool"]) for row in of_group if "shares" in row
        )
    return "\n".join(parts)


def _line(
    row: dict[str, Any], eager: dict[str, Any], again: str | None, cells: int
) -> tuple[str, ...]:
    memory, speed = row.get("memory"), row.get("speed", {})
    if memory is None:
        return row["way"], *[""] * (cells - 2), row["status"]
    peak = memory["allocated_bytes"]
    base = eager.get("memory", {}).get("allocated_bytes")
    bits = row.get("bits", "reference" if row["way"] == "eager" else "")
    if bits == "differ":
        bits = f"differ by {row['largest_difference']:.2g}" + (
            ", as eager's own do" if again == "differ" else ""
        )
    if row["status"] != "ok":
        bits = f"{bits} {row['status']}".strip()
    return (
        row["way"],
        _mib(peak),
        _mib(memory.get("reserved_bytes")),
        _number(peak / base if base else None, "{:.1%}"),
        _mib(row.get("planned_bytes")),
        _number(row.get("measured_share_of_planned"), "{:.4f}"),
        _number(speed.get("steps_per_s"), "{:.3g}"),
        _number(speed.get("speed_of_eager"), "{:.3f}"),
        _number(speed.get("unwaited_speed_of_eager"), "{:.3f}"),
        _number(speed.get("host_us_per_operator"), "{:.1f}"),
        _number(speed.get("more_us_per_operator"), "{:+.1f}"),
        _number(row.get("first_call_s"), "{:.1f}"),
        bits,
    )


def _shares(totals: dict[str, int], uses_pool: bool) -> str:
    """Where the saving comes from; in all of them a gradient dies when its update is done, in eager
    PyTorch at the next step.
    """
    program = totals["program_order"]
    names = {
        "program_order": "program order",
        "planned_order": "planned order",
        "planned_order_and_reuse": "planned order with reuse",
        "joined_calls": "the same with pairs of calls as one",
        "what_runs": "what runs, with its pool" if uses_pool else "what runs, without a pool",
    }
    rows = [
        (f"  {said}", _mib(totals[name]), f"{totals[name] / program:.1%}")
        for name, said in names.items()
    ]
    return columns([("  totals by plan", "MiB", "of program order"), *rows], right=(1, 2)) + "\n"


def _mib(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / 2**20:,.1f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def parse(options: Sequence[str] | None = None) -> argparse.Namespace:
    """The settings; of the command line where no options are given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default cuda)")
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", help="of training_models.py, or zoo/NAME"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY")
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, metavar="DTYPE", help="of the model's weights"
    )
    parser.add_argument(
        "--optimizers", nargs="+", choices=OPTIMIZERS, metavar="FORM", help="AdamW's forms"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="samples")
    parser.add_argument("--seq", type=int, metavar="N", help="tokens in a sequence")
    parser.add_argument("--image", type=int, metavar="N", help="pixels on a side")
    parser.add_argument(
        "--steps", type=int, default=5, metavar="K", help="steps that are compared (default 5)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--minutes", type=float, default=8.0, metavar="M", help="time for all rows (default 8)"
    )
    parser.add_argument(
        "--limit", type=float, default=150.0, metavar="S", help="seconds for one row (default 150)"
    )
    parser.add_argument(
        "--timed-s", type=float, default=5.0, metavar="S", help="seconds of timed steps (default 5)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="PyTorch's threads on the CPU")
    parser.add_argument(
        "--deterministic", action="store_true", help="PyTorch's deterministic kernels only"
    )
    parser.add_argument(
        "--commit", metavar="HASH", help="what was installed (default: the checkout's commit)"
    )
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER", help="profile a step of each row into this folder"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to write all findings as JSON"
    )
    arguments = parser.parse_args(options)
    if arguments.steps < 3:
        parser.error("--steps must be at least 3: two come before the steady ones")
    return arguments


def main() -> int:
    """Runs what is asked for, prints tables, and returns the exit code."""
    arguments = parse()
    machine = describe()
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["benches/training.py", *sys.argv[1:]]),
        "commit": arguments.commit or commit(),
        "device": arguments.device,
        **machine,
        "threads": arguments.threads or machine["threads"],
        "status": "done",
        "wrong": [],
        "rows": [],
    }
    if arguments.device == "cuda" and not machine["cuda_available"]:
        report["status"] = "skipped"
        print(
            "skipped: this machine has no CUDA device that PyTorch can use; --device cpu runs the same on the CPU"
        )
    else:
        where = (
            machine.get("device_name")
            if arguments.device == "cuda"
            else f"CPU, {machine['machine']}"
        )
        versions = f"torch {machine['torch']}, Python {machine['python']}, roam {roam.__version__}"
        print(f"{report['date']}, {where}, {versions}, commit {report['commit']}\n", flush=True)
        for row in run_all(wanted(arguments, machine), arguments):
            report["rows"].append(row)
            print(
                f"{' '.join(_group(row))} {row['way']}: {row['status']}",
                file=sys.stderr,
                flush=True,
            )
            _save(report, arguments.output)
        report["wrong"] = judge(report["rows"])
        print(table(report["rows"]))
        print(
            "\n".join(f"WRONG: {line}" for line in report["wrong"])
            or "nothing wrong with roam's rows"
        )
    _save(report, arguments.output)
    return 1 if report["wrong"] else 0


def _save(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
