"""Where the time of a step's first call goes, and how long extra runs of operators take."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Stage:
    """What one stage has taken.

    Attributes:
        wall_s: seconds that passed.
        cpu_s: seconds of all threads of the process on a processor.
        count: how many times it did its work: traces, kernels, plans, runs.
        from_disk: how many times it took what an earlier process had left on disk.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    count: int = 0
    from_disk: int = 0


@dataclass(slots=True)
class Timings:
    """Where the time of a call that captured a step went.

    Attributes:
        capture: running the user's function on fake tensors; counts traces.
        compile: compiling regions of the step by `torch.compile`; counts the calls that were
            compiled.
        kernels: measuring what kernels take for themselves; counts the kernels that were run.
        plan: choosing how the step runs, the first one and the later ones; counts the plans that
            were made.
        first_run: the first run of the plan, which checks every operator; counts 1 when it has
            begun.
    """

    capture: Stage = field(default_factory=Stage)
    compile: Stage = field(default_factory=Stage)
    kernels: Stage = field(default_factory=Stage)
    plan: Stage = field(default_factory=Stage)
    first_run: Stage = field(default_factory=Stage)
    _current: Stage | None = None
    _since: tuple[float, float] = (0.0, 0.0)

    @contextmanager
    def running(self, stage: Stage) -> Iterator[None]:
        """Adds the time of what is done inside to a stage, and not to the stage around it."""
        outer = self._current
        self._charge()
        self._current = stage
        try:
            yield
        finally:
            self._charge()
            self._current = outer

    def _charge(self) -> None:
        now = time.perf_counter(), time.process_time()
        if self._current is not None:
            self._current.wall_s += now[0] - self._since[0]
            self._current.cpu_s += now[1] - self._since[1]
        self._since = now

    @property
    def doing(self) -> str:
        """What is being done with the step before it runs, in words."""
        words = {
            id(self.capture): "capturing", id(self.compile): "compiling regions of", id(self.kernels): "trying kernels of", id(self.plan): "planning",
        }  # fmt: skip
        return words.get(id(self._current), "preparing")

    @property
    def total_s(self) -> float:
        """Seconds that have passed in all stages so far."""
        stages = self.capture, self.compile, self.kernels, self.plan, self.first_run
        return sum(stage.wall_s for stage in stages)

    def __str__(self) -> str:
        """One line."""
        stages = (
            ("capture", self.capture, "traces"), ("compilation", self.compile, "regions"), ("kernels", self.kernels, "tried"), ("planning", self.plan, "plans"),
            ("first run", self.first_run, ""),
        )  # fmt: skip
        shown = [
            f"{name} {stage.wall_s:.2f} s"
            + (
                f" ({stage.count} {unit if stage.count != 1 else unit.removesuffix('s')}"
                if unit
                else ""
            )
            + (f", {stage.from_disk} from disk" if stage.from_disk else "")
            + (")" if unit else "")
            for name, stage, unit in stages
            if stage is not self.compile or stage.count
        ]
        return f"{self.total_s:.2f} s: " + ", ".join(shown)


__all__ = ["Stage", "Timings"]


class Stopwatch:
    """Times the calls of a run on the CPU, where a call is over when it returns.

    Args:
        again: numbers of the calls that a step without a limit does not have.
        transfers: those of these calls that store or load offloaded tensors.

    Attributes:
        extra_s: seconds that the calls of `again` have taken.
        transfers_s: seconds of `transfers` alone.
        step_s: seconds of the others, without the first call, whose beginning nobody sees.
    """

    def __init__(self, again: Collection[int], transfers: Collection[int] = ()) -> None:
        self.extra_s = 0.0
        self.transfers_s = 0.0
        self.step_s = 0.0
        self._again = again
        self._transfers = transfers
        self._last: float | None = None

    def slots(self, index: int) -> list[int]:
        """No value of a call is looked at."""
        return []

    def note(self, index: int, values: Iterable[torch.Tensor]) -> None:
        """To be called as soon as a call has run."""
        now = time.perf_counter()
        if self._last is not None:
            if index in self._again:
                self.extra_s += now - self._last
                self.transfers_s += (now - self._last) * (index in self._transfers)
            else:
                self.step_s += now - self._last
        self._last = now
