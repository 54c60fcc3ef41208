"""``roam export``: a plan in the formats of other tools."""

from __future__ import annotations

import argparse
from typing import Any

from roam.arguments import UsageError, memory_limit
from roam.commands.subject import add_subject, planned_subject
from roam.report.export import check_format, write_export


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``roam export``."""
    add_subject(parser)
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="a plan of the graph file")
    parser.add_argument(
        "--output",
        metavar="PATH",
        action="append",
        required=True,
        help="what to write: .pickle for PyTorch's memory viewer, .json or .json.gz for Perfetto "
        "and chrome://tracing, .dot for Graphviz; may be given several times",
    )
    parser.add_argument(
        "--memory",
        type=memory_limit,
        metavar="LIMIT",
        help="the most that the plan may take in all, as for 'roam plan'",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes the files; returns what ``--json`` prints."""
    try:
        for path in arguments.output:
            check_format(path)
    except ValueError as error:
        raise UsageError(str(error)) from None
    _, _, planned = planned_subject(arguments, is_limited=arguments.memory is not None)
    for path in arguments.output:
        write_export(planned, path)
    return {"output": arguments.output, **planned.values}
