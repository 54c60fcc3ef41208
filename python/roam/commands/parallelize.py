"""``roam parallelize``: how to spread a model over the ranks of a mesh."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import roam
from roam import zoo
from roam.arguments import UsageError, memory_limit, mesh_shape, positive_integer
from roam.commands.subject import add_capture, settings_of
from roam.interrupts import interrupts_count
from roam.report import Progress

if TYPE_CHECKING:
    from roam.sharding import Sharding


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``roam parallelize``."""
    parser.add_argument("model", metavar="MODEL", help="a name that 'roam zoo' lists")
    parser.add_argument(
        "--mesh",
        type=mesh_shape,
        metavar="N",
        required=True,
        help="how many ranks, or how many along each dimension, such as 2x4",
    )
    parser.add_argument(
        "--data",
        type=positive_integer,
        metavar="N",
        help="how many replicas train on equal parts of the batch (default: what is cheapest)",
    )
    parser.add_argument(
        "--memory",
        type=memory_limit,
        metavar="LIMIT",
        help="the most that a rank's step may take in all: bytes, or an amount such as 20GiB "
        "(default: no limit)",
    )
    add_capture(parser, has_step=False)


def run(arguments: argparse.Namespace) -> Sharding:
    """Finds a sharding."""
    settings = settings_of(arguments)
    del settings["step"]
    device = settings.pop("device")
    zoo.check(arguments.model, **settings)  # before torch is imported, which takes its time
    try:
        limit = None if arguments.memory is None else arguments.memory.amount_bytes()
    except ValueError as error:
        raise UsageError(str(error)) from None
    with Progress(f"finding a sharding of {arguments.model}"), interrupts_count():
        with roam.fake(device):
            made = zoo.build(arguments.model, device=device, **settings)
        try:
            return roam.parallelize(
                made.train_step,
                made.model,
                made.optimizer,
                *made.batch,
                mesh=arguments.mesh,
                data=arguments.data,
                memory=limit,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None


def as_json(arguments: argparse.Namespace, sharding: Sharding) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {"model": arguments.model, **sharding.figures()}
