"""The command ``roam bench``: which benchmarks there are and what each takes. Imports a benchmark
only to run it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from roam.arguments import mesh_shape, positive_integer, seconds
from roam.interrupts import interrupts_count

if TYPE_CHECKING:
    from roam_bench.run import Benchmark

_OUTPUT = "roam-bench"
_MODELS = ("torch", "torchvision", "transformers")
"""What the zoo's models need."""
_Command = Callable[..., argparse.ArgumentParser]
"""Makes the parser of a benchmark of its name, what it does, and the packages it needs."""
_LIBRARIES = ("torchvision", "transformers", "timm", "diffusers")


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Give the parser of ``roam bench`` a command per benchmark."""
    commands = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)

    def command(name: str, summary: str, *needs: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        made.set_defaults(run=_run, module=f"roam_bench.{name.replace('-', '_')}", needs=needs)
        _outputs(made)
        return made

    for add in (
        _zoo,
        _scripts,
        _paper,
        _suite,
        _families,
        _first_call,
        _shapes,
        _tiles,
        _pages,
        _compiled,
        _ranks,
        _memory,
        _layout,
        _iopddl,
        _parallelize,
        _scale,
    ):
        add(command)


def _outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object, the contents of the JSON file",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(_OUTPUT),
        metavar="DIR",
        help="folder for the results; a benchmark that was stopped continues from those it "
        f"finds there (default {_OUTPUT})",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start again instead of continuing a benchmark that was stopped",
    )


def _zoo(command: _Command) -> None:
    made = command(
        "zoo",
        "train small versions of known architectures by a plan and eagerly, and compare bits",
        "torch",
    )
    _only(made, "architecture")
    made.add_argument(
        "--library",
        action="append",
        default=[],
        choices=_LIBRARIES,
        help="only this library's architectures; may be given several times (default all that are "
        "installed)",
    )


def _scripts(command: _Command) -> None:
    made = command(
        "scripts",
        "run training scripts by a plan and eagerly, and compare everything that they change",
        "torch",
    )
    _only(made, "script")
    made.add_argument(
        "--family",
        action="append",
        default=[],
        metavar="NAME",
        help="only this family; may be given several times",
    )
    made.add_argument(
        "--time-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds for each script (default %(default)s)",
    )


def _paper(command: _Command) -> None:
    made = command(
        "paper",
        "compare roam's plans and every baseline with the figures that Shu et al. published",
        *_MODELS,
    )
    _only(made, "model")
    made.add_argument(
        "--whole-program",
        type=seconds,
        default=60.0,
        metavar="S",
        help="time limit in seconds for each integer program of a whole graph, on the rows that "
        "are small enough; 0 leaves them out (default 60)",
    )


def _suite(command: _Command) -> None:
    made = command(
        "suite",
        "plan the steps of the models that 'roam zoo' lists, and compare their memory with "
        "PyTorch's",
        *_MODELS,
    )
    _only(made, "model")
    made.add_argument(
        "--batch",
        type=positive_integer,
        action="append",
        default=[],
        metavar="N",
        help="only this batch size (default 1 and 32)",
    )
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default cpu)")

    made.add_argument(
        "--step", choices=("first", "steady"), default="steady", help="(default steady)"
    )
    made.add_argument(
        "--graphs", type=Path, metavar="DIR", help="write every captured graph to this folder"
    )


def _families(command: _Command) -> None:
    made = command(
        "families",
        "plan models of timm and transformers that a rule chooses, and compare them with the "
        "lower bound",
        "torch",
    )
    _only(made, "model")
    made.add_argument(
        "--library",
        action="append",
        default=[],
        choices=("timm", "transformers"),
        help="only this library's models; may be given several times (default all that are "
        "installed)",
    )


def _first_call(command: _Command) -> None:
    made = command(
        "first-call", "measure what takes the time in the first call of a compiled step", *_MODELS
    )
    _only(made, "step")


def _shapes(command: _Command) -> None:
    made = command(
        "shapes",
        "train models on batches of another size at nearly every step, by one plan and in other ways",
        *_MODELS,
    )
    _only(made, "family of models, or architecture")
    _count(made, "--steps", 300, "how many steps")
    made.add_argument(
        "--ways",
        nargs="+",
        metavar="WAY",
        help="these ways to train alone, such as 'eager' and 'roam'",
    )
    made.add_argument(
        "--architectures",
        action="store_true",
        help="instead the architectures of 'roam bench zoo', and whether one plan holds for more sizes "
        "than those that were captured",
    )


def _tiles(command: _Command) -> None:
    made = command(
        "tiles",
        "train language models whose logits never exist whole, within budgets, and in other ways",
        *_MODELS,
    )
    _only(made, "family of models")
    made.add_argument(
        "--dtypes",
        nargs="+",
        metavar="DTYPE",
        help="these dtypes alone: float32, bfloat16",
    )
    made.add_argument(
        "--ways",
        nargs="+",
        default=[],
        metavar="WAY",
        help="these ways alone, such as eager, roam, 'roam, 10%%'",
    )


def _pages(command: _Command) -> None:
    made = command(
        "pages",
        "train networks within half of what their parameters and optimizer state take, in files",
        *_MODELS,
    )
    _only(made, "network")


def _compiled(command: _Command) -> None:
    made = command(
        "compiled",
        "train networks whose blocks torch.compile has compiled, by plan and in an ordinary loop",
        *_MODELS,
    )
    _only(made, "net")
    _count(made, "--steps", 20, "how many steps")


def _ranks(command: _Command) -> None:
    made = command(
        "ranks",
        "train networks on several gloo processes with DDP and fully_shard, by plan and eagerly",
        *_MODELS,
    )
    _only(made, "net")
    _count(made, "--ranks", 2, "how many processes")
    _count(
        made, "--steps", 20, "how many steps of each kind, of which the first three are not timed"
    )


def _memory(command: _Command) -> None:
    made = command(
        "memory",
        "plan and train networks within memory budgets, and compare what that costs",
        *_MODELS,
    )
    _only(made, "net")
    made.add_argument(
        "--part",
        choices=(
            "planned",
            "trained",
            "offload",
            "others",
            "pytorch",
            "checkmate",
            "prototypes",
            "large",
            "tiles",
        ),
        default="planned",
        help="planned: plans of large steps; trained: small steps that are trained by plan; offload: the "
        "same, with and without tensors in a file; others: "
        "small steps that are trained in other ways; pytorch: budgets of torch.compile beside plans "
        "within the same memory; checkmate: Checkmate's programs on small steps beside plans; prototypes: "
        "plans of large steps within the memory that two prototypes took; large: plans of up to 100,000 "
        "operators; tiles: plans of large steps whose operators may run tile by tile (default planned)",
    )
    made.add_argument(
        "--pairs",
        type=int,
        default=30,
        metavar="N",
        help="time N pairs of steps, with and without recomputation in turns; 0 times none "
        "(default %(default)s)",
    )


def _layout(command: _Command) -> None:
    made = command(
        "layout", "pack layout files in MiniMalloc's format, and compare pools with their bounds"
    )
    made.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a CSV file in MiniMalloc's format"
    )
    _work(made, 20_000_000_000, "file")
    made.add_argument(
        "--time-limit",
        type=seconds,
        metavar="S",
        help="stop each search after S seconds with its best packing so far",
    )
    made.add_argument(
        "--target",
        type=positive_integer,
        metavar="BYTES",
        help="stop each search once its pool is no larger than that",
    )
    made.add_argument(
        "--packed", type=Path, metavar="DIR", help="write each packing to a CSV file in this folder"
    )


def _iopddl(command: _Command) -> None:
    made = command(
        "iopddl",
        "choose strategies for the problems of the contest on intra-operator parallelism, and compare costs "
        "with their bounds",
    )
    made.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a problem in the contest's format"
    )
    _count(
        made,
        "--work",
        10_000_000_000,
        "look at no more than N entries of cost matrices for each problem",
    )
    made.add_argument(
        "--time-limit",
        type=seconds,
        metavar="S",
        help="stop each search after S seconds, reading included, with its best choice so far",
    )


def _parallelize(command: _Command) -> None:
    made = command(
        "parallelize",
        "find shardings of architectures with a shipped tensor-parallel plan, and compare their costs",
        "torch",
        "transformers",
    )
    _only(made, "architecture")
    made.add_argument(
        "--mesh",
        type=mesh_shape,
        action="append",
        default=[],
        metavar="N",
        help="only a mesh of N ranks, or of 2x4: 2 replicas of 4 ranks; may be given several times "
        "(default 2, 4, 8 and 2x4)",
    )
    _count(made, "--layers", 4, "how many layers the models have")
    made.add_argument(
        "--depths",
        action="store_true",
        help="instead one architecture on 8 ranks, with 12 to 96 layers, and how long that takes",
    )
    made.add_argument(
        "--programs",
        action="store_true",
        help="instead a few architectures on 8 ranks, and an integer program of each problem, solved "
        "by HiGHS and by CBC",
    )
    made.add_argument(
        "--trained",
        action="store_true",
        help="instead train two small networks on 2 and 4 gloo processes, and compare losses and "
        "memory with those of one process and with what was certified",
    )


def _scale(command: _Command) -> None:
    made = command(
        "scale", "plan generated steps and layouts of growing size, and measure time and memory"
    )
    _count(made, "--largest", 1_000_000, "the largest number of operators or buffers")
    made.add_argument("--what", choices=("steps", "layouts"), help="only these (default both)")
    _only(made, "family of steps or style of layouts")
    _work(made, 200_000_000, "layout")


def _count(parser: argparse.ArgumentParser, option: str, default: int, what: str) -> None:
    parser.add_argument(
        option,
        type=positive_integer,
        default=default,
        metavar="N",
        help=f"{what} (default %(default)s)",
    )


def _work(parser: argparse.ArgumentParser, default: int, what: str) -> None:
    _count(parser, "--work", default, f"limit the search to N comparisons for each {what}")


def _only(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help=f"only this {what}; may be given several times",
    )


def _run(arguments: argparse.Namespace) -> int:
    from roam_bench.run import require, run

    require("rich", "matplotlib", *arguments.needs)
    os.environ["ROAM_CACHE"] = "0"  # planning is measured, not what an earlier run has left
    with interrupts_count():
        make: Callable[[argparse.Namespace], Benchmark] = import_module(arguments.module).benchmark
        benchmark = make(arguments)
    record = run(benchmark, arguments.output, fresh=arguments.fresh, quiet=arguments.json)
    if arguments.json:
        sys.stdout.write(json.dumps(record, allow_nan=False) + "\n")
        sys.stdout.flush()
    return benchmark.exit_code(record)
