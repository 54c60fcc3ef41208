"""``roam plan --tiles``: a plan within a limit in which operators may run tile by tile."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from roam import PlanningInterrupted, zoo
from roam.arguments import UsageError
from roam.processor import processor_name

if TYPE_CHECKING:
    from roam.commands.subject import Subject
    from roam.memory_limit import MemoryLimit
    from roam.report.anatomy import Planned


def check(arguments: argparse.Namespace) -> None:
    """Refuses what tiles do not go with.

    Raises:
        UsageError: it names the options.
    """
    if arguments.memory is None:
        raise UsageError("--tiles: operators are cut to keep within a limit; add --memory")
    if arguments.model not in zoo.names():
        raise UsageError("--tiles: a graph file does not have the operators, only what they take")
    if arguments.device == "cuda":
        raise UsageError("--tiles: operators are cut on the CPU alone; leave --device cuda out")
    others = {
        "--world": arguments.world is not None,
        "--streams": arguments.streams > 1,
        "--memory-curve": arguments.memory_curve,
        "--no-reuse": arguments.no_reuse,
        "--exact required": arguments.exact == "required",
    }
    if given := [name for name, is_given in others.items() if is_given]:
        raise UsageError(f"--tiles: not with {', '.join(given)}")


def planned(
    subject: Subject, memory: MemoryLimit, time_limit_s: float | None
) -> tuple[Planned, str]:
    """A plan of a model of the zoo by `choose_with_tiles`, and what of it runs tile by tile.

    Raises:
        PlanError: there is no plan within the limit, or none was found.
    """
    import torch

    from roam.runtime.planned import choose_with_tiles, planned_by

    assert subject.variant is not None, "it is a model of the zoo"
    try:
        choice = choose_with_tiles(subject.variant, memory, time_limit_s)
    except PlanningInterrupted:  # what it has found is no plan of the whole step
        raise KeyboardInterrupt from None
    found = planned_by(choice)
    if choice.cuts is None:
        return found, "no operator is cut into tiles: the limit is kept without"
    return found, (
        f"{choice.cuts}\nTiles of these lengths have the bits of whole operators on this machine, where "
        f"they were tried ({processor_name()}, {torch.get_num_threads()} threads, PyTorch "
        f"{torch.__version__}); elsewhere roam.compile tries them anew"
    )
