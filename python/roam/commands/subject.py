"""What a command is about: a model of the zoo, which is captured, or a graph file."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roam import Graph, Plan, optimize, zoo
from roam.arguments import UsageError, positive_integer, positive_number
from roam.interrupts import interrupts_count
from roam.report import Progress
from roam.report.anatomy import Planned
from roam.zoo.sharding import WAYS, Sharding, ShardingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roam.program.ir import Program
    from roam.tracing.step import Variant

GRAPH_SUFFIXES = (".json", ".json.gz")
CAPTURE_DEFAULTS: dict[str, Any] = {
    "batch": 1,
    "seq": None,
    "dtype": "float32",
    "optimizer": "adamw",
    "clip": None,
    "step": "steady",
    "device": "cpu",
}


@dataclass(frozen=True)
class Subject:
    """A graph to plan.

    Attributes:
        graph: the step.
        title: what it is, for people.
        settings: how it was captured: the keys of `CAPTURE_DEFAULTS`. None, except for the device,
            where a file does not say.
        capture_s: seconds that capture took; None for a file.
        sharding: which of several ranks it is; None for a step of one process.
        program: the captured step; None if `sharding` is.
        variant: the captured step of one process; None for a file.
    """

    graph: Graph
    title: str
    settings: Mapping[str, Any]
    capture_s: float | None
    sharding: Sharding | None = None
    program: Program | None = None
    variant: Variant | None = None


def add_subject(parser: argparse.ArgumentParser, *, has_step: bool = True) -> None:
    """Adds the argument that names a model or a graph, and the options of capture."""
    parser.add_argument(
        "model",
        metavar="MODEL_OR_GRAPH",
        help="a name that 'roam zoo' lists, or a .json or .json.gz file",
    )
    add_capture(parser, has_step=has_step)


def add_capture(parser: argparse.ArgumentParser, *, has_step: bool) -> None:
    """Adds the options of capture."""
    capture = parser.add_argument_group(
        "capture", "for models that 'roam zoo' lists; a graph file has been captured already"
    )
    # None tells an option that was not given from one that repeats its default.
    capture.add_argument("--batch", type=positive_integer, metavar="N", help="samples (default 1)")
    capture.add_argument(
        "--seq",
        type=positive_integer,
        metavar="N",
        help="tokens per sample (default: 512, or the most that the model takes)",
    )
    capture.add_argument(
        "--dtype", choices=zoo.DTYPES, help="number format of the model (default float32)"
    )
    capture.add_argument(
        "--optimizer",
        choices=zoo.OPTIMIZERS,
        help="the optimizer that is part of the step (default adamw)",
    )
    capture.add_argument(
        "--clip",
        type=positive_number,
        metavar="NORM",
        help="clip gradients by the norm of all of them (default: they are not clipped)",
    )
    if has_step:
        capture.add_argument(
            "--step",
            choices=("first", "steady"),
            help="first: the step that creates the optimizer's state; steady: any later one "
            "(default steady)",
        )
    capture.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="the device to plan for; without a CUDA device cuda is an estimate (default cpu)",
    )


def add_sharding(parser: argparse.ArgumentParser) -> None:
    """Adds the options that make a step one of a rank among several."""
    ranks = parser.add_argument_group(
        "several ranks", "for models that 'roam zoo' lists; this process plans without the others"
    )
    ranks.add_argument(
        "--world",
        type=positive_integer,
        metavar="N",
        help="plan one of N ranks that train together",
    )
    ranks.add_argument(
        "--shard",
        choices=WAYS,
        help="how: ddp, gradients are reduced in buckets; fsdp, fully_shard of each block and of the "
        "rest; tp, tensor parallelism by the plan that transformers ships; fsdp+tp, both",
    )
    ranks.add_argument(
        "--rank", type=int, metavar="R", help="which rank (default 0, whose parts are the largest)"
    )
    ranks.add_argument(
        "--tp",
        type=positive_integer,
        metavar="N",
        help="with fsdp+tp, how many ranks share the parts of each layer (default 8, or all)",
    )
    ranks.add_argument(
        "--machine-ranks",
        type=positive_integer,
        metavar="N",
        help="how many ranks share a machine (default 8)",
    )
    ranks.add_argument(
        "--near",
        type=positive_number,
        metavar="GB/S",
        help="the rate at which a rank sends to others on its machine (default 240)",
    )
    ranks.add_argument(
        "--far",
        type=positive_number,
        metavar="GB/S",
        help="the rate at which a rank sends to other machines (default 20)",
    )


def sharding_of(arguments: argparse.Namespace) -> Sharding | None:
    """What the options of :func:`add_sharding` say; None if none was given.

    Raises:
        UsageError: they make no sense together.
    """
    names = ("world", "shard", "rank", "tp", "machine_ranks", "near", "far")
    given = {name: getattr(arguments, name, None) for name in names}
    if all(value is None for value in given.values()):
        return None
    if given["world"] is None or given["shard"] is None:
        raise UsageError("--world and --shard: a rank's plan needs both")
    try:
        return Sharding(given["shard"], given["world"], given["rank"] or 0, given["tp"])
    except ShardingError as error:
        raise UsageError(str(error)) from error


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of capture that were given, or else their defaults."""
    given = {name: getattr(arguments, name, None) for name in CAPTURE_DEFAULTS}
    return {
        name: default if given[name] is None else given[name]
        for name, default in CAPTURE_DEFAULTS.items()
    }


def captured(
    name: str,
    settings: Mapping[str, Any],
    *,
    random_states: bool = False,
    sharding: Sharding | None = None,
) -> Subject:
    """A step of a model of the zoo.

    Args:
        name: the model's.
        settings: those of :data:`CAPTURE_DEFAULTS`.
        random_states: as for :func:`roam.capture`.
        sharding: which of several ranks it is; None for a step of one process.

    Raises:
        ZooError: unknown or impossible settings.
        CaptureError: the step cannot be captured.
    """
    start = time.perf_counter()
    settings = dict(settings)
    step, device = settings.pop("step"), settings.pop("device")
    # Before torch is imported, which takes its time.
    sizes = zoo.check(name, **settings)
    program: Program | None = None
    alone: Variant | None = None
    with Progress(f"capturing {name}"), interrupts_count():
        if sharding is None:
            alone = zoo.capture_variant(name, step=step, device=device, **settings)
            graph = alone.graph_with_states if random_states else alone.graph
        else:
            variant = zoo.capture_rank(name, sharding, step=step, device=device, **settings)
            lowering = variant.lowering()
            lowering = lowering.with_states() if random_states else lowering
            program, graph = lowering.program, lowering.graph()
    used = {**settings, "seq": sizes.get("seq"), "step": step, "device": device}
    seq = f"seq {used['seq']}" if used["seq"] else ""
    details = [f"batch {used['batch']}", seq, used["dtype"], used["optimizer"]]
    clip = "" if used["clip"] is None else f"clipped at {used['clip']:g}"
    details += [
        clip,
        f"{used['step']} step",
        used["device"],
        "" if sharding is None else str(sharding),
    ]
    title = f"{name} ({', '.join(filter(None, details))})"
    return Subject(graph, title, used, time.perf_counter() - start, sharding, program, alone)


def subject_of(arguments: argparse.Namespace, *, is_limited: bool) -> Subject:
    """What the arguments of :func:`add_subject` name; where plans have memory limits, random
    tensors of models may be made again.

    Raises:
        UsageError: neither a model nor a graph file, or options of capture with a graph file.
        FormatError, GraphError, OSError: as from `Graph.load`.
        ZooError, CaptureError: as from :func:`captured`.
    """
    name, sharding = arguments.model, sharding_of(arguments)
    if name in zoo.names():
        return captured(name, settings_of(arguments), random_states=is_limited, sharding=sharding)
    if not name.endswith(GRAPH_SUFFIXES):
        raise UsageError(
            f"{name!r} is neither a model that 'roam zoo' lists nor a file ending in .json or .json.gz"
        )
    options = (*CAPTURE_DEFAULTS, "world", "shard")
    given = [f"--{option}" for option in options if getattr(arguments, option, None) is not None]
    if given:
        raise UsageError(
            f"{', '.join(given)}: only for models that 'roam zoo' lists; {name} has been "
            "captured already"
        )
    with Progress(f"reading {name}"):
        graph = Graph.load(name)
    settings = {**dict.fromkeys(CAPTURE_DEFAULTS), "device": graph.device}
    return Subject(graph, name, settings, None)


def planned_subject(
    arguments: argparse.Namespace, *, is_limited: bool
) -> tuple[Subject, Plan, Planned]:
    """What the arguments name, and its plan: that of the file `plan`, or a new one within `memory`.

    Raises:
        UsageError: a plan without its graph file, or with a limit; as from :func:`subject_of`.
        PlanError: the plan is invalid, or none keeps within the limit.
    """
    if arguments.plan is not None and (arguments.model in zoo.names() or arguments.memory):
        raise UsageError("PLAN: only with a graph file, and without --memory")
    subject, limit = subject_of(arguments, is_limited=is_limited), arguments.memory
    with Progress(f"planning {subject.graph.num_operators:,} operators"):
        if arguments.plan is not None:
            plan = Plan.load(arguments.plan)
        elif limit is None:
            plan = optimize(subject.graph)
        else:
            plain_bytes = 0 if limit.share is None else optimize(subject.graph).total_bytes
            plan = optimize(subject.graph, memory_limit_bytes=limit.in_bytes(plain_bytes))
        return subject, plan, Planned.of(subject.graph, plan)
