"""``roam report``: a plan explained on one page."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from roam import Plan, zoo
from roam.arguments import memory_limit
from roam.commands.subject import Subject, add_subject, captured, planned_subject
from roam.errors import CaptureError
from roam.memory_limit import MemoryLimit
from roam.report import Progress, figures
from roam.report.anatomy import Anatomy, Change, Planned
from roam.report.changes import replanned, within, without_recomputation
from roam.report.page import write_page

_SHARES = ("80%", "60%")
"""Of the plan's total: memory limits that are tried."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``roam report``."""
    add_subject(parser, has_step=False)
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="a plan of the graph file")
    parser.add_argument(
        "--output", metavar="PATH", default="report.html", help="the page (default report.html)"
    )
    parser.add_argument(
        "--memory",
        type=memory_limit,
        metavar="LIMIT",
        help="the most that the plan may take in all, as for 'roam plan'",
    )
    parser.add_argument(
        "--no-changes",
        action="store_true",
        help="do not plan what batch, sequence, dtype, optimizer, clipping and memory limits would "
        "change",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Makes the page; returns what ``--json`` prints."""
    start = time.perf_counter()
    is_limited = arguments.memory is not None or not arguments.no_changes
    subject, plan, planned = planned_subject(arguments, is_limited=is_limited)
    plain = without_recomputation(subject.graph, plan)
    changes: list[Change] = []
    if not arguments.no_changes:
        changes = list(_changes(arguments.model, subject, plan))
    anatomy = Anatomy(
        subject.title,
        planned,
        plain,
        _first(arguments.model, subject, plan, random_states=is_limited),
        changes,
    )
    write_page(anatomy, arguments.output)
    return {
        "output": arguments.output,
        "seconds": time.perf_counter() - start,
        "changes": [
            {"name": change.name, "error": change.error or None, "planned": change.planned}
            for change in changes
        ],
        **anatomy.planned.values,
    }


def _first(name: str, subject: Subject, plan: Plan, *, random_states: bool) -> Planned | None:
    """The first step of a model of the zoo; None if there is none, or nobody knows."""
    if subject.capture_s is None:
        return None
    try:
        first = captured(
            name, {**subject.settings, "step": "first"}, random_states=random_states
        ).graph
    except CaptureError as error:
        if error.code != "no_first_step":
            raise
        return None
    return Planned.of(first, replanned(first, plan))


def _changes(name: str, subject: Subject, plan: Plan) -> Iterator[Change]:
    """Other settings of a model of the zoo, and memory limits, each planned."""
    for label, setting in [] if subject.capture_s is None else _settings(name, subject):
        graph = captured(name, {**subject.settings, **setting}, random_states=True).graph
        with Progress(f"planning {label}"):
            yield Change(label, figures(graph, replanned(graph, plan)))
    for share in () if plan.settings["streams"] > 1 else _SHARES:
        with Progress(f"planning within {share}"):
            yield within(subject.graph, plan, MemoryLimit.of(share))


def _settings(name: str, subject: Subject) -> Iterator[tuple[str, dict[str, Any]]]:
    settings = subject.settings
    batch, seq = settings["batch"], settings["seq"]
    sizes = [2 * batch, *([batch // 2] if batch > 1 else [])]
    yield from ((f"batch {size}", {"batch": size}) for size in sizes)
    if seq is not None:
        most = zoo.entry(name).max_seq
        yield from (
            (f"seq {size}", {"seq": size}) for size in (2 * seq, seq // 2) if 2 <= size <= most
        )
    for setting, allowed in (("dtype", zoo.DTYPES), ("optimizer", zoo.OPTIMIZERS)):
        yield from ((other, {setting: other}) for other in allowed if other != settings[setting])
    if settings["clip"] is None:
        yield "gradients clipped by their norm", {"clip": 1.0}
    else:
        yield "gradients not clipped", {"clip": None}
