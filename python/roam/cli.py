"""The command ``roam``. What it prints and its exit codes are documented in
docs/reference/cli.md.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import roam
from roam import zoo
from roam.arguments import UsageError, memory_limit, positive_integer, positive_number
from roam.commands import export as export_command
from roam.commands import fit as fit_command
from roam.commands import parallelize as parallelize_command
from roam.commands import report as report_command
from roam.commands import tiles as tiles_command
from roam.commands.subject import add_sharding, add_subject, subject_of
from roam.disk_cache import disk_cache
from roam.errors import CaptureError, FormatError, GraphError, PlanError, RoamError, continued
from roam.report import Progress, figures, peak_place, plan_table
from roam.report.anatomy import Planned, bound, holdings, kinds
from roam.report.page import ReportUnavailable
from roam.report.remade import remade_table
from roam.report.table import columns, curve_table
from roam.report.tables import print_tables

if TYPE_CHECKING:
    from roam._core import Graph, Plan
    from roam.program.ir import Program
    from roam.report.communication import Communication

EXIT_OK = 0
EXIT_INVALID_PLAN = 1
EXIT_BAD_INPUT = 2
EXIT_CAPTURE_REFUSED = 3
EXIT_INTERNAL = 4
EXIT_INTERRUPTED = 130

_EXIT_CODES = """\
exit codes:
  0    done
  1    the plan is invalid
  2    wrong usage, or a file, model or setting that cannot be used
  3    the training step cannot be captured
  4    an error of roam itself
  5    a step gave other bits by its plan than eagerly
  130  interrupted
"""

_SETTING_CODES = (
    "invalid_streams",
    "invalid_speed",
    "speed_target",
    "unknown_method",
    "invalid_memory_limit",
    "memory_floor",
    "memory_limit_not_found",
    "sharding_memory",
)
"""Codes of errors that say that no plan can be made as asked."""
_NO_BENCHMARKS = (
    "benchmarks are a package of their own, roam-bench, which is not installed; "
    "pip install ./benches in a clone of roam's repository"
)
_ANY_LIMIT = 2**40
"""More bytes than any graph takes by which options are checked."""
_CURVE = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)
"""Shares of the step-local total at which recomputation is tried."""
_OF_LIMITS = ("memory_floor", "memory_limit_not_found")


class BenchmarksUnavailable(UsageError):
    """The package of the benchmarks is not installed."""


def _baseline_name(text: str) -> tuple[str, str]:
    order, layout = text.split(",")
    return order.strip(), layout.strip()


# argparse names the type in its complaint.
_baseline_name.__name__ = "ORDER,LAYOUT"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roam",
        description="Plan the memory of PyTorch training steps.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"roam {roam.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], summary: str
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=_EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run)
        made.add_argument(
            "--json",
            action="store_true",
            help="print one JSON object; bytes and seconds, not rounded",
        )
        return made

    plan = command(
        "plan",
        _plan,
        "plan a model that 'roam zoo' lists or a graph file, verify the plan and print its figures",
    )
    add_subject(plan)
    plan.add_argument(
        "--no-reuse",
        action="store_true",
        help="let no operator write its result into the memory "
        "of an input that nothing needs any more",
    )
    plan.add_argument(
        "--exact",
        choices=("off", "auto", "required"),
        default="auto",
        help="solve integer programs with CBC where they may help: auto, if CBC can be used; "
        "required, or else fail (default auto)",
    )
    plan.add_argument(
        "--time-limit",
        type=positive_number,
        metavar="S",
        help="stop planning after S seconds with the best plan so far",
    )
    plan.add_argument(
        "--memory",
        type=memory_limit,
        metavar="LIMIT",
        help="the most that the plan may take in all: bytes, an amount such as 6GiB, or a share such "
        "as 60%% of the total without recomputation; where order and layout need more, operators "
        "run again",
    )
    plan.add_argument(
        "--tiles",
        action="store_true",
        help="within --memory, let operators of a model of the zoo also run tile by tile, as steps "
        "on the CPU do; kernels are tried on this machine, which takes minutes",
    )
    plan.add_argument(
        "--memory-curve",
        action="store_true",
        help="print what recomputation costs at 100, 90, ... 40, 35, ... 10 percent of the step-local total",
    )
    add_sharding(plan)
    streams = plan.add_argument_group("streams")
    streams.add_argument(
        "--streams",
        type=positive_integer,
        default=1,
        metavar="N",
        help="run up to N operators at once (default 1)",
    )
    streams.add_argument(
        "--speed",
        type=positive_number,
        metavar="X",
        help="find the least memory at X times the speed of one stream (default: at most 5%% "
        "slower than the fastest plan whose total is at most the laid-out total of program order)",
    )
    streams.add_argument(
        "--stream-model",
        choices=("happens_before", "time_step"),
        default="happens_before",
        help="happens_before: safe under every timing; time_step: as in the literature, for "
        "comparison only (default happens_before)",
    )
    plan.add_argument(
        "--baseline",
        action="append",
        default=[],
        type=_baseline_name,
        metavar="ORDER,LAYOUT",
        help="also print the total of another method, for example lescea,skyline; may be given "
        "several times",
    )
    plan.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also print a summary of the graph, what is alive at the peak, and what sets the "
        "bound",
    )
    plan.add_argument(
        "--save-graph", metavar="PATH", help="write the graph; compressed if PATH ends in .gz"
    )
    plan.add_argument(
        "--save-plan", metavar="PATH", help="write the plan; compressed if PATH ends in .gz"
    )

    verify = command("verify", _verify, "check a plan against its graph")
    verify.add_argument("graph", metavar="GRAPH")
    verify.add_argument("plan", metavar="PLAN")

    report_command.add_options(
        command("report", _report, "explain a plan on one HTML page that needs no network")
    )

    fit_command.add_options(
        command("fit", _fit, "find the largest batch or sequence of a model that fits into memory")
    )

    parallelize_command.add_options(
        command("parallelize", _parallelize, "find how to split a model over several devices")
    )

    export_command.add_options(
        command("export", _export, "write a plan for memory viewers, trace viewers and Graphviz")
    )

    command("zoo", _zoo, "list the models that 'roam plan' knows by name")

    kept = command("cache", _cache, "list what compiled steps have kept on disk, or remove it")
    kept.add_argument("--clear", action="store_true", help="remove all of it")

    _add_benchmarks(
        commands.add_parser(
            "bench",
            help="run a benchmark: plans against published figures and other planners, and more",
        )
    )
    return parser


def _add_benchmarks(parser: argparse.ArgumentParser) -> None:
    """Benchmarks are a package of their own, which may not be installed."""
    if importlib.util.find_spec("roam_bench") is not None:
        from roam_bench.command import add_commands

        add_commands(parser)
    else:
        parser.description = _NO_BENCHMARKS[0].upper() + _NO_BENCHMARKS[1:] + "."
        parser.add_argument("asked", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        parser.set_defaults(run=_no_benchmarks)


def _no_benchmarks(arguments: argparse.Namespace) -> int:
    raise BenchmarksUnavailable(_NO_BENCHMARKS, code="benchmarks_unavailable")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _write_json(values: dict[str, Any]) -> None:
    _write(json.dumps(values, allow_nan=False) + "\n")


def _peak_rss_bytes() -> int | None:
    """Most memory this process has held, as the system counts it; ``None`` where the system does
    not say.
    """
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _plan(arguments: argparse.Namespace) -> int:
    is_limited = arguments.memory is not None or arguments.memory_curve
    if arguments.world is not None and arguments.streams > 1:
        raise UsageError("--streams: a rank's plan is for one stream; leave it or --world out")
    _check_options(arguments, is_limited=is_limited)
    if arguments.tiles:
        tiles_command.check(arguments)
    subject = subject_of(arguments, is_limited=is_limited)
    graph = subject.graph
    values: dict[str, Any] = {"model": arguments.model, **subject.settings}
    values["capture_s"] = subject.capture_s
    start = time.perf_counter()
    code = EXIT_OK

    planned = partial(_planned, arguments, graph)
    by_tiles: Planned | None = None
    cut = ""
    try:
        with Progress(f"planning {graph.num_operators:,} operators"):
            if arguments.tiles:
                by_tiles, cut = tiles_command.planned(
                    subject, arguments.memory, arguments.time_limit
                )
                graph, plan = by_tiles.graph, by_tiles.plan
            elif arguments.memory is None:
                plan = planned(None)
            elif arguments.memory.share is None:
                plan = planned(arguments.memory.in_bytes(0))
            else:
                plan = planned(arguments.memory.in_bytes(planned(None).total_bytes))
    except roam.PlanningInterrupted as interrupted:
        _complain("interrupted: this is the best plan so far")
        plan, code = interrupted.plan, EXIT_INTERRUPTED
    except roam.PlanError as error:
        if error.code not in _OF_LIMITS or arguments.tiles:
            raise
        raise continued(
            error,
            "This holds for whole operators: on the CPU, a step that runs may also cut operators "
            "into tiles; --tiles tries that for a model of the zoo",
        ) from None
    values["plan_s"] = time.perf_counter() - start
    start = time.perf_counter()
    roam.verify(graph, plan)
    values["verify_s"] = time.perf_counter() - start
    values["verified"] = True

    if arguments.save_graph is not None:
        graph.save(arguments.save_graph)
    if arguments.save_plan is not None:
        plan.save(arguments.save_plan)
    values |= figures(graph, plan) if by_tiles is None else by_tiles.values
    if arguments.memory_curve:
        values["memory_curve"] = _memory_curve(graph, plan, planned)
    values["baselines"] = [
        _baseline(graph, *names, reuse=not arguments.no_reuse) for names in arguments.baseline
    ]
    place = peak_place(graph, plan)
    communication = None
    if subject.program is not None and subject.sharding is not None:
        communication = _communication(arguments, subject.program, graph, plan)
        values["sharding"] = {**vars(subject.sharding), "tp_ranks": subject.sharding.inner}
        values["communication"] = communication.as_json()
    if arguments.json:
        values["peak_operator"] = None if place is None else vars(place)
        values["peak_rss_bytes"] = _peak_rss_bytes()
        _write_json(values)
    else:
        _write(
            (graph.summary() + "\n" if arguments.verbose else "")
            + plan_table(subject.title, values, place)
        )
        if arguments.verbose:
            planned_step = by_tiles or Planned.of(graph, plan)
            _write("\n")
            print_tables([kinds(planned_step), holdings(planned_step), bound(planned_step)])
        if communication is not None and subject.sharding is not None:
            _write("\n")
            print_tables([communication.table()])
            _write(subject.sharding.note)
        if cut:
            _write(f"\n{cut}\n")
        if plan.recomputation is not None:
            _write("\n")
            print_tables([remade_table(graph, plan.recomputation)])
        if arguments.memory_curve:
            _write("\n" + curve_table(values["memory_curve"]) + "\n")
    return code


def _planned(arguments: argparse.Namespace, graph: Graph, memory_limit_bytes: int | None) -> Plan:
    return roam.optimize(
        graph,
        streams=arguments.streams,
        reuse=not arguments.no_reuse,
        exact=arguments.exact,
        time_limit_s=arguments.time_limit,
        speed=arguments.speed,
        stream_model=arguments.stream_model,
        memory_limit_bytes=memory_limit_bytes,
    )


def _check_options(arguments: argparse.Namespace, *, is_limited: bool) -> None:
    """Raises the errors that options of `roam plan` cause whatever the graph is. The capture that
    follows may take minutes.
    """
    builder = roam.GraphBuilder()
    builder.operator("any")
    graph = builder.build()
    try:
        _planned(arguments, graph, _ANY_LIMIT if is_limited else None)
    except roam.PlanError as error:
        if error.code != "speed_target":  # which depends on the graph
            raise
    for names in arguments.baseline:
        roam.baseline(graph, *names)
    for path in filter(None, (arguments.save_graph, arguments.save_plan)):
        if not Path(path).parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _communication(
    arguments: argparse.Namespace, program: Program, graph: Graph, plan: Plan
) -> Communication:
    """What a rank's plan waits for others."""
    from roam.program.links import Links
    from roam.report.communication import Communication

    asked = {
        "machine_ranks": arguments.machine_ranks,
        "near_bytes_per_ns": arguments.near,
        "far_bytes_per_ns": arguments.far,
    }
    links = Links(**{name: value for name, value in asked.items() if value is not None})
    return Communication.of(program, graph, plan, links)


def _memory_curve(graph: Graph, plan: Plan, planned: Callable[[int], Plan]) -> list[dict[str, Any]]:
    """What recomputation costs at shares of the step-local total of the plan without it."""
    again = plan.recomputation
    plain_bytes = plan.total_bytes if again is None else again["plain_total_bytes"]
    rows = []
    for share in _CURVE:
        limit = plan.persistent_bytes + int((plain_bytes - plan.persistent_bytes) * share)
        row: dict[str, Any] = {"share": share, "memory_limit_bytes": limit, "total_bytes": None}
        row |= {"recomputation": None, "error": None}
        try:
            with Progress(f"planning within {share:.0%}"):
                found = planned(limit)
            roam.verify(graph, found)
            made = figures(graph, found)
            row |= {name: made[name] for name in ("total_bytes", "recomputation")}
        except PlanError as error:
            if error.code not in _OF_LIMITS:
                raise
            is_proved = error.code == "memory_floor"
            row["error"] = "none of whole operators" if is_proved else "none was found"
        rows.append(row)
    return rows


def _baseline(graph: Graph, order: str, layout: str, *, reuse: bool) -> dict[str, Any]:
    found = roam.baseline(graph, order, layout, reuse=reuse)
    names = ("order", "layout", "peak_bytes", "pool_bytes", "outside_bytes")
    return {name: getattr(found, name) for name in names}


def _verify(arguments: argparse.Namespace) -> int:
    graph = roam.Graph.load(arguments.graph)
    plan = roam.Plan.load(arguments.plan)
    files = {"graph": arguments.graph, "plan": arguments.plan}
    try:
        roam.verify(graph, plan)
    except PlanError as error:
        if not arguments.json:
            raise
        _write_json(
            {**files, "valid": False, "code": getattr(error, "code", None), "error": str(error)}
        )
        return EXIT_INVALID_PLAN
    if arguments.json:
        _write_json({**files, "valid": True, "code": None, "error": None})
    else:
        _write(f"valid: {arguments.plan} is a plan of {arguments.graph}\n")
    return EXIT_OK


def _report(arguments: argparse.Namespace) -> int:
    values = report_command.run(arguments)
    if arguments.json:
        _write_json(values)
    else:
        _write(f"written: {values['output']}\n")
    return EXIT_OK


def _export(arguments: argparse.Namespace) -> int:
    values = export_command.run(arguments)
    if arguments.json:
        _write_json(values)
    else:
        _write("".join(f"written: {path}\n" for path in values["output"]))
    return EXIT_OK


def _fit(arguments: argparse.Namespace) -> int:
    found = fit_command.run(arguments)
    if arguments.json:
        _write_json(fit_command.as_json(arguments, found))
    else:
        for fit in found:
            print_tables(fit.tables())
    return EXIT_OK


def _parallelize(arguments: argparse.Namespace) -> int:
    sharding = parallelize_command.run(arguments)
    if arguments.json:
        _write_json(parallelize_command.as_json(arguments, sharding))
    else:
        _write(f"{sharding}\n")
    return EXIT_OK


def _zoo(arguments: argparse.Namespace) -> int:
    entries = zoo.entries()
    if arguments.json:
        fields = ("name", "summary", "requires", "default_seq", "max_seq")
        _write_json(
            {"models": [{name: getattr(entry, name) for name in fields} for entry in entries]}
        )
    else:
        _write(columns((entry.name, entry.summary) for entry in entries) + "\n")
    return EXIT_OK


def _cache(arguments: argparse.Namespace) -> int:
    cache = disk_cache()
    if cache is None:
        raise UsageError("the cache is off: ROAM_CACHE is 0, or there is no folder for it")
    usage = cache.clear() if arguments.clear else cache.usage()
    if arguments.json:
        values = {"folder": str(cache.folder), "cleared": arguments.clear, **vars(usage)}
        _write_json({**values, "most_bytes": cache.most_bytes})
        return EXIT_OK
    rows = [("folder", str(cache.folder))]
    rows += [(f"entries: {kind}", f"{count:,}") for kind, count in usage.entries.items()]
    size = f"{usage.size_bytes:,} bytes"
    rows.append(
        ("removed", size) if arguments.clear else ("size", f"{size} of {cache.most_bytes:,}")
    )
    _write(columns(rows) + "\n")
    return EXIT_OK


def _complain(message: str) -> None:
    sys.stderr.write(f"roam: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (the process's own arguments if ``None``) and return its exit
    code.
    """
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more at exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _complain("the output was closed before all of it was written")
        return EXIT_BAD_INPUT
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        _complain(f"{where}{error.strerror or error}")
        return EXIT_BAD_INPUT
    except (
        GraphError,
        FormatError,
        zoo.ZooError,
        UsageError,
        ReportUnavailable,
    ) as error:
        _complain(str(error))
        return EXIT_BAD_INPUT
    except CaptureError as error:
        if error.code == "no_device":
            _complain(str(error))
            return EXIT_BAD_INPUT
        _complain(f"cannot capture this step: {error}")
        return EXIT_CAPTURE_REFUSED
    except PlanError as error:
        if error.code in _SETTING_CODES:
            _complain(str(error))
            return EXIT_BAD_INPUT
        _complain(f"invalid plan: {error}")
        return EXIT_INVALID_PLAN
    except RoamError as error:
        _complain(str(error))
        return EXIT_INTERNAL
    except Exception:  # noqa: BLE001 - the last line of defence of a program, and it hides nothing
        traceback.print_exc()
        _complain("an error of roam itself; please report it with the lines above")
        return EXIT_INTERNAL
