"""Processes that are copies of one that has imported what most of them need: they start at once,
where new ones import for seconds. Tests of imports and of what roam itself starts do without it.
"""

from __future__ import annotations

import gc
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CONTEXT = get_context("forkserver")
"""Makes such processes. The one that they are copies of is started with the first of them, and ends
with this process."""
CONTEXT.set_forkserver_preload([
    "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel", "torchvision", "transformers", "pytest", "roam.sharding",
    "roam.runtime.compile", "roam.runtime.memory_profiler",
])  # fmt: skip


def python(
    *arguments: str,
    folder: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    timeout_s: float = 300,
) -> subprocess.CompletedProcess[str]:
    """What ``python SCRIPT ...`` or ``python -c CODE`` printed, and how it ended.

    Args:
        arguments: what follows ``python``.
        folder: where it runs; None: here.
        environment: its variables.
        timeout_s: when it is killed.
    """
    return together([arguments], [environment], folder=folder, timeout_s=timeout_s)[0]


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """In place of `subprocess.run`, for what roam starts itself where a test does not ask how it
    begins.
    """
    assert command[0] == sys.executable
    return python(*command[1:], environment=options["env"], timeout_s=options["timeout"])


def together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    *,
    folder: Path | None = None,
    timeout_s: float = 300,
) -> list[subprocess.CompletedProcess[str]]:
    """The same of several that run at once, each with variables of its own."""
    place = str(folder or Path.cwd())
    with TemporaryDirectory() as name:
        outputs = [
            (str(Path(name, f"{n}.out")), str(Path(name, f"{n}.err"))) for n in range(len(commands))
        ]
        processes = [
            CONTEXT.Process(target=_run, args=(list(command), place, dict(variables), *files))
            for command, variables, files in zip(commands, environments, outputs, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
            process.kill()
            process.join()
        return [
            subprocess.CompletedProcess(
                list(command), process.exitcode, *(Path(file).read_text() for file in files)
            )
            for command, process, files in zip(commands, processes, outputs, strict=True)
        ]


def _run(
    arguments: list[str], folder: str, environment: dict[str, str], output: str, errors: str
) -> None:
    """In the new process."""
    for stream, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)
    os.chdir(folder)
    adopt(environment)
    first, *rest = arguments
    if first == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(code, "<string>", "exec"), vars(main))
        return
    sys.argv = [first, *rest]
    sys.path.insert(0, str(Path(first).parent))
    runpy.run_path(first, run_name="__main__")


def adopt(environment: dict[str, str]) -> None:
    """In the new process: the environment variables of the process that asked for it, which may be
    others than when the process that is copied began. What was copied is hidden from the garbage
    collector, which would look at a million objects at each measurement of memory.
    """
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()
    from roam.runtime import memory_profiler  # here: it imports torch

    memory_profiler.all_objects = gc.get_objects  # does not show them again
