"""``roam fit``: the largest batch or sequence of a model that keeps within a memory limit."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import roam
from roam import Graph, zoo
from roam.arguments import UsageError, memory_limit, positive_integer
from roam.commands.subject import add_capture, settings_of
from roam.interrupts import interrupts_count
from roam.report import Progress
from roam.report.figures import plan_figures

if TYPE_CHECKING:
    from roam.tracing.step import CapturedStep


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``roam fit``."""
    parser.add_argument("model", metavar="MODEL", help="a name that 'roam zoo' lists")
    parser.add_argument(
        "--memory",
        type=memory_limit,
        metavar="LIMIT",
        required=True,
        help="the most that a step may take in all: bytes, or an amount such as 24GiB",
    )
    parser.add_argument(
        "--largest",
        choices=("batch", "seq"),
        default="batch",
        help="what to make as large as possible (default batch)",
    )
    parser.add_argument(
        "--most", type=positive_integer, metavar="N", help="the largest size to try"
    )
    parser.add_argument(
        "--no-recompute",
        action="store_true",
        help="do not also find the largest size with operators that run again",
    )
    parser.add_argument(
        "--offload",
        metavar="FOLDER",
        help="a folder for files of parameters, state and activations, or `host` for the host's memory "
        "on CUDA: find the largest size with these too; the speed of a disk is measured",
    )
    add_capture(parser, has_step=False)


def run(arguments: argparse.Namespace) -> list[Any]:
    """Finds the largest size without recomputation, and then with it, and with files if there is a
    folder for them.
    """
    settings = settings_of(arguments)
    del settings["step"]
    device = settings.pop("device")
    limit_bytes = arguments.memory.size_bytes
    if limit_bytes is None:
        raise UsageError("--memory: give an amount of bytes here, not a share of a total")
    if arguments.offload and arguments.no_recompute:
        raise UsageError("--offload: with files operators may run again; leave --no-recompute out")
    if arguments.offload and (arguments.offload == "host") != (device == "cuda"):
        raise UsageError("--offload: name a folder on the CPU, and with --device cuda `host`")
    zoo.check(arguments.model, **settings)
    least, most = 1, arguments.most
    if arguments.largest == "seq":
        longest = zoo.entry(arguments.model).max_seq
        if longest is None:
            raise zoo.ZooError(f"{arguments.model} sees images and has no sequence length")
        least, most = 2, min(longest, most or longest)

    from roam.runtime.fitting import MOST, captured_of, graphs_in, largest, largest_in_files

    def made_at(size: int) -> tuple[Any, tuple[Any, ...]]:
        with interrupts_count(), roam.fake(device):
            made = zoo.build(
                arguments.model, device=device, **{**settings, arguments.largest: size}
            )
        return made.train_step, (made.model, made.optimizer, *made.batch)

    @lru_cache(maxsize=1)
    def captured_at(size: int) -> CapturedStep:
        return captured_of(*made_at(size))

    def graphs_at(size: int, *, recompute: bool) -> list[Graph]:
        return graphs_in(captured_at(size), random_states=recompute)

    found = []
    is_alone = arguments.no_recompute or arguments.offload
    for recompute in (False, True)[: 1 if is_alone else 2]:
        how = "with" if recompute else "without"
        with Progress(f"finding the largest {arguments.largest} {how} recomputation"):
            found.append(
                largest(
                    partial(graphs_at, recompute=recompute),
                    limit_bytes,
                    recompute=recompute,
                    least=least,
                    most=most or MOST,
                )
            )
    if arguments.offload:
        with Progress(f"finding the largest {arguments.largest} with files"):
            found.append(
                largest_in_files(
                    captured_at,
                    limit_bytes,
                    arguments.offload,
                    least=least,
                    most=most or MOST,
                )
            )
    return found


def as_json(arguments: argparse.Namespace, found: list[Any]) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "model": arguments.model,
        "largest": arguments.largest,
        "fits": [
            {
                "recompute": fit.recompute,
                "size": fit.size,
                "memory_bytes": fit.memory_bytes,
                "plan": None if fit.plan is None else plan_figures(fit.plan),
                "trials": [asdict(trial) for trial in fit.trials],
            }
            for fit in found
        ],
    }
