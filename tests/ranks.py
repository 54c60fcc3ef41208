"""Processes that train together in a test: each runs the same functions, one after the other.

A process that does not answer in time is killed with the others, so no test hangs.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forked import CONTEXT, adopt

ANSWER_S = 120
"""How long a function may take on a machine that does other work; few take more than five."""
GROUP_S = 60
"""How long a collective waits for other ranks before the process group gives up."""


class RankFailed(AssertionError):
    """A function raised on a rank, or the rank is gone."""


class Ranks:
    """So many processes in one gloo group."""

    def __init__(self, world: int, folder: Path, group_s: float = GROUP_S) -> None:
        self.world = world
        self._folder, self._group_s = folder, group_s
        self.start_processes()

    def start_processes(self) -> None:
        """Starts the processes, which form a group."""
        world, folder, group_s = self.world, self._folder, self._group_s
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        store = folder / f"store-{time.monotonic_ns()}"
        for rank in range(world):
            own, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve,
                args=(rank, world, str(store), theirs, group_s, dict(os.environ)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(own)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Has every rank call ``function(rank, world, *args)``, a function of a module."""
        for pipe in self._pipes:
            pipe.send((function, args))

    def answers(self, timeout_s: float = ANSWER_S) -> list[tuple[str, Any]]:
        """Per rank ("returned", value), ("raised", text), or ("gone", "") where it is."""
        found: list[tuple[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(deadline - time.monotonic(), 0)):
                    self.kill()
                    raise RankFailed(f"rank {rank} has not answered in {timeout_s:.0f} s")
                found.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                found.append(("gone", ""))
        return found

    def answers_after_the_first(self, timeout_s: float) -> list[tuple[str, Any]]:
        """The same, with a limit that begins when the first of them has answered or is gone."""
        wait(self._pipes, ANSWER_S)
        return self.answers(timeout_s)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What a function returned on every rank.

        Raises:
            RankFailed: one raised, or has not answered.
        """
        self.start(function, *args)
        answers = self.answers()
        for rank, (how, value) in enumerate(answers):
            if how != "returned":
                self.kill()
                raise RankFailed(f"rank {rank} {how}: {value}")
        return [value for _, value in answers]

    def is_alive(self) -> bool:
        """Whether all are there."""
        return all(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        """Ends all of them."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join(10)


def alive(world: int, folder: Path) -> Iterator[Ranks]:
    """What a fixture of a module yields: processes that are ended after its last test."""
    ranks = Ranks(world, folder)
    yield ranks
    ranks.kill()


def revived(ranks: Ranks) -> Ranks:
    """The same processes, or new ones where one has ended."""
    if not ranks.is_alive():
        ranks.kill()
        ranks.start_processes()
    return ranks


def _serve(
    rank: int,
    world: int,
    store: str,
    pipe: Connection,
    group_s: float,
    environment: dict[str, str],
) -> None:
    adopt(environment)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=group_s),
    )
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            answer = "returned", function(rank, world, *args)
        except BaseException as error:  # noqa: BLE001 - the test says what it thinks of it
            trace = "".join(traceback.format_exception(error)[-6:])
            answer = "raised", (type(error).__name__, getattr(error, "code", ""), trace)
        pipe.send(answer)
