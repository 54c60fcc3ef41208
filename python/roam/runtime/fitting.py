"""Will it fit: the largest batch, sequence or whatever a step is made of that keeps within a memory
limit, found by planning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from roam._core import Graph, Plan, optimize
from roam.errors import CaptureError, PlanError
from roam.garbage import collections_wait
from roam.kernels.transfers import block_ns
from roam.memory_limit import MemoryLimit
from roam.program.chunks import HOST, Folder
from roam.program.tier import Tier
from roam.report.anatomy import overview
from roam.report.figures import plan_figures
from roam.report.table import format_bytes
from roam.report.tables import Amount, Cell, Count, Table, as_html, as_text
from roam.runtime.memory_report import StepMemory
from roam.runtime.ranges import Ranges, given_sizes
from roam.runtime.strategy import Options, choose
from roam.state.step_call import StepCall
from roam.tracing.fakes.fake_mode import fake
from roam.tracing.step import CapturedStep, Known, capture_step

MOST = 2**20
"""The largest size that is tried unless the caller says otherwise."""
_REFUSED = ("memory_floor", "memory_limit_not_found")
_Sizes = Mapping[str, Mapping[Any, int]]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a step moves to a folder's files, or to the host, and back.

    Attributes:
        folder: the folder, or `host`.
        read_bytes, written_bytes: parameters, state and gradients.
        offloaded_bytes: activations, which are written once and read at least once.
        extra_s: seconds that the step takes beyond one without a limit, by times of kernels and
            speeds of the folder's disk that are measured on this machine, with what runs again; by
            the model of the device and of its link with the host.
        step_s: seconds of the step without a limit, by the same times.
    """

    folder: str
    read_bytes: int
    written_bytes: int
    offloaded_bytes: int
    extra_s: float
    step_s: float

    @classmethod
    def of(cls, memory: StepMemory, folder: Path | Literal["host"]) -> Traffic:
        """Of a step by its plan."""
        return cls(
            str(folder),
            sum(memory.read_bytes.values()),
            sum(memory.written_bytes.values()),
            memory.offloaded_bytes,
            memory.extra_s,
            memory.step_s,
        )

    def __str__(self) -> str:
        share = self.extra_s / max(self.step_s, 1e-9)
        stored = (
            f" and {format_bytes(self.offloaded_bytes)} of activations are stored"
            if self.offloaded_bytes
            else ""
        )
        where = "the host's memory" if self.folder == HOST else f"files in {self.folder}"
        return (
            f"with {where}, of which a step reads {format_bytes(self.read_bytes)} and to which it "
            f"writes {format_bytes(self.written_bytes)}{stored}, for {share:.1%} more time by the model"
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """One size that was planned.

    Attributes:
        size: the size.
        fits: whether the first step and later ones keep within the limit by their plans.
        total_bytes: the larger total of the plans; None if no plan within the limit was found.
        is_proved: if it does not fit, whether it is proved that no plan of these operators fits.
        traffic: what is moved to files and back; None if nothing is.
    """

    size: int
    fits: bool
    total_bytes: int | None
    is_proved: bool = False
    traffic: Traffic | None = None

    def __str__(self) -> str:
        if self.fits:
            return "fits" if self.traffic is None else f"fits, {self.traffic}"
        return "no plan can" if self.is_proved else "no plan was found"


@dataclass(frozen=True)
class Fit:
    """The largest size that keeps within a memory limit.

    Attributes:
        size: the largest size that fits; 0 if not even the smallest fits.
        memory_bytes: the limit.
        recompute: whether operators may run again.
        plan: the plan at that size of the step that takes more memory, the first or a later one.
            None if nothing fits.
        trials: every size that was planned, the smallest first. Sizes between them were not
            planned: a larger size is assumed to take no less memory.
    """

    size: int
    memory_bytes: int
    recompute: bool
    plan: Plan | None
    trials: tuple[Trial, ...]

    @property
    def next(self) -> Trial | None:
        """The next size, which does not fit; None if the largest that may be tried fits."""
        return next((trial for trial in self.trials if not trial.fits), None)

    def tables(self) -> list[Table]:
        """The answer, and the memory of the plan."""
        how = "with recomputation" if self.recompute else "without recomputation"
        rows: list[tuple[Cell, ...]] = [
            (
                Count(trial.size),
                "" if trial.total_bytes is None else Amount(trial.total_bytes),
                str(trial),
            )
            for trial in self.trials
        ]
        title = (
            f"Within {format_bytes(self.memory_bytes)}, {how}: the largest found is {self.size:,}"
        )
        tried = Table(title, ("size", "total", ""), tuple(rows))
        return [tried] if self.plan is None else [tried, overview(plan_figures(self.plan))]

    def __str__(self) -> str:
        """The tables as text."""
        return "\n".join(map(as_text, self.tables()))

    def _repr_html_(self) -> str:
        """The tables for notebooks."""
        return "".join(map(as_html, self.tables()))


def fit(
    train_step: Callable[..., Any],
    make_inputs: Callable[[int], Sequence[Any]],
    *,
    memory: int | str,
    recompute: bool = False,
    device: str = "cpu",
    most: int = MOST,
    offload: str | Path | None = None,
    sizes: _Sizes | Callable[[int], _Sizes] | None = None,
) -> Fit:
    """Finds the largest batch, or other size, with which a training step keeps within a memory
    limit.

    Sizes are planned, as by `roam.capture` and `roam.optimize`, until one fits and the next
    larger one does not. Nothing is allocated or computed. A size fits if both the first step, which
    makes the optimizer's state, and later steps fit. A larger size is assumed to take no less
    memory.

    Args:
        train_step: the user's function.
        make_inputs: takes a size of at least 1, and returns what `train_step` is called with: a
            tuple or a list. It is called inside `roam.fake(device)`, so that tensors made in it
            take no memory. It makes the model and the optimizer too, unless these are real.
        memory: the limit for all that a step takes: bytes, or text such as ``"24GiB"``.
        recompute: whether operators may run again if order and layout alone need more.
        device: where the step would run, ``"cpu"`` or ``"cuda"``.
        most: the largest size that is tried.
        offload: a folder for tensors that may lie in files, as for `roam.compile`; operators may
            run again then, too. `Trial.traffic` says what a step moves there, and what that takes:
            the speed of the disk is measured, and kernels are timed on zeros. On CUDA ``"host"``,
            where nothing is measured.
        sizes: how large batches get at a size, as for `roam.compile`, or a function of the size
            that says so: then all of these batches have to fit, whichever `make_inputs` makes. So
            the size may be a number of tokens of batches that are long or wide.

    Raises:
        CaptureError: the step cannot be captured exactly; or one plan does not hold for all of
            `sizes` (``value_reached_python``), or they do not fit what `make_inputs` makes
            (``argument``).
        ExecutionError: the folder cannot be used.
        ValueError: the limit is not an amount of bytes, or `sizes` is no such mapping, or is given
            beside `offload`.

    Example:
        >>> def make_inputs(batch):
        ...     model = torch.nn.Linear(4096, 4096)
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     return model, optimizer, torch.randn(batch, 4096)
        >>> roam.fit(train_step, make_inputs, memory="24GiB").size
    """

    def graphs_at(size: int) -> list[Graph]:
        with fake(device):
            inputs = make_inputs(size)
        of_size = sizes(size) if callable(sizes) else sizes
        return graphs_of(train_step, inputs, random_states=recompute, sizes=of_size)

    limit_bytes = MemoryLimit.of(memory).amount_bytes()
    if offload is not None and sizes is not None:
        raise ValueError(
            "with offload= there is a plan for each size, and sizes= asks for one of all; leave out one of them, or make the "
            "largest batch in make_inputs"
        )
    if offload is None:
        return largest(graphs_at, limit_bytes, recompute=recompute, most=most)

    def captured_at(size: int) -> CapturedStep:
        with fake(device):
            inputs = make_inputs(size)
        return captured_of(train_step, inputs)

    return largest_in_files(captured_at, limit_bytes, offload, most=most)


def graphs_of(
    train_step: Callable[..., Any],
    args: Sequence[Any],
    *,
    random_states: bool = False,
    sizes: _Sizes | None = None,
) -> list[Graph]:
    """The graphs of the first step, if there is one, and of later ones.

    Args:
        train_step: the user's function.
        args: what it would be called with.
        random_states: as for `roam.capture`.
        sizes: how large the arguments get, as for `roam.compile`; None for their own sizes.

    Raises:
        CaptureError: the step cannot be captured exactly, has no steady step, or goes another way
            at some of these sizes.
    """
    return graphs_in(captured_of(train_step, args, sizes), random_states=random_states)


def graphs_in(captured: CapturedStep, *, random_states: bool = False) -> list[Graph]:
    """The same of a step that has been captured."""
    with collections_wait():
        return [
            variant.graph_with_states if random_states else variant.graph
            for variant in (captured.first, captured.steady)
            if variant is not None
        ]


def captured_of(
    train_step: Callable[..., Any], args: Sequence[Any], sizes: _Sizes | None = None
) -> CapturedStep:
    """A step that can be planned before it has run."""
    capture = partial(capture_step, train_step, tuple(args), {}, known=Known())
    reason = ""
    with collections_wait():
        if sizes is None:
            captured = capture()
        else:
            ranges = Ranges(Options(sizes=given_sizes(sizes)), train_step)
            captured, reason = ranges.as_given(capture, StepCall(tuple(args), {}))
    if reason:
        raise CaptureError(
            f"one plan does not hold for the sizes that sizes= says, {sizes}: {reason}. Leave sizes= out, and make the "
            "largest batch in make_inputs",
            code="value_reached_python",
        )
    if captured.steady is None:
        assert captured.first is not None, "one of them is there"
        raise captured.first.program.unsettled or CaptureError(
            "there is no steady step to plan before the first step has run; call the compiled step "
            "once",
            code="unsettled",
        )
    return captured


def largest(
    graphs_at: Callable[[int], Sequence[Graph]],
    limit_bytes: int,
    *,
    recompute: bool,
    least: int = 1,
    most: int = MOST,
) -> Fit:
    """The largest size of which every step keeps within a limit.

    The search is by false position: totals are nearly linear in the size. If that does not halve
    the open interval, or if totals tell nothing because operators run again, it is by bisection.

    Args:
        graphs_at: the steps of a size.
        limit_bytes: the limit for all that a step takes.
        recompute: whether operators may run again.
        least, most: the smallest and the largest size that may be tried.
    """

    def tried(size: int) -> tuple[Trial, Plan | None]:
        return _tried(size, graphs_at(size), limit_bytes, recompute)

    return _largest(tried, limit_bytes, recompute=recompute, least=least, most=most)


def largest_in_files(
    captured_at: Callable[[int], CapturedStep],
    limit_bytes: int,
    offload: str | Path,
    *,
    least: int = 1,
    most: int = MOST,
) -> Fit:
    """The same with tensors that may lie in files of the folder `offload`, or with the host.

    Raises:
        ExecutionError: the folder cannot be used.
    """
    where: Path | Literal["host"] = HOST if offload == HOST else Path(offload).absolute()
    if isinstance(where, Path):
        block_ns(Tier.of(Folder(where)), limit_bytes)

    def tried(size: int) -> tuple[Trial, Plan | None]:
        return _tried_in_files(size, captured_at(size), limit_bytes, where)

    return _largest(tried, limit_bytes, recompute=True, least=least, most=most)


def _largest(
    tried: Callable[[int], tuple[Trial, Plan | None]],
    limit_bytes: int,
    *,
    recompute: bool,
    least: int,
    most: int,
) -> Fit:
    """The same, of sizes that `tried` plans."""
    trials: dict[int, Trial] = {}
    plans: dict[int, Plan] = {}

    def fits(size: int) -> bool:
        trials[size], found = tried(size)
        if found is not None:
            plans[size] = found
        return trials[size].fits

    low, high = least - 1, most + 1  # all up to `low` fit, nothing from `high` on is known to
    guess, bisects = least, False
    while high - low > 1:
        open_before = high - low
        if fits(guess):
            low = guess
        else:
            high = guess
        bisects = recompute or (not bisects and 2 * (high - low) > open_before and high <= most)
        guess = _guess(trials, low, high, least, most, bisects, limit_bytes)
    ordered = tuple(trials[size] for size in sorted(trials))
    size = max((trial.size for trial in ordered if trial.fits), default=0)
    return Fit(size, limit_bytes, recompute, plans.get(size), ordered)


def _guess(
    trials: dict[int, Trial],
    low: int,
    high: int,
    least: int,
    most: int,
    bisects: bool,
    limit_bytes: int,
) -> int:
    """The next size to try, between `low` and `high`."""
    known = sorted(
        (trial.size, trial.total_bytes)
        for trial in trials.values()
        if trial.total_bytes is not None
    )
    if high > most and (bisects or len(known) < 2):
        guess = 2 * max(low, least)
    elif bisects or len(known) < 2:
        guess = (low + high) // 2
    else:
        below = [point for point in known if point[0] <= low][-2:]
        above = [point for point in known if point[0] >= high][:1]
        (one, one_bytes), (other, other_bytes) = (below + above)[-2:]
        slope = max((other_bytes - one_bytes) / (other - one), 1.0)
        guess = one + int(max(limit_bytes - one_bytes, 0) / slope)
    return min(max(guess, low + 1), high - 1)


def _tried(
    size: int, graphs: Sequence[Graph], limit_bytes: int, recompute: bool
) -> tuple[Trial, Plan | None]:
    """Whether all steps of a size fit, and if so, the plan that takes the most."""
    found = []
    for graph in graphs:
        try:
            plan = optimize(graph, memory_limit_bytes=limit_bytes if recompute else None)
        except PlanError as error:
            if error.code not in _REFUSED:
                raise
            return Trial(size, False, None, error.code == "memory_floor"), None
        found.append(plan)
    plan = max(found, key=lambda plan: plan.total_bytes)
    if plan.total_bytes <= limit_bytes:
        return Trial(size, True, plan.total_bytes), plan
    is_proved = any(plan.total_lower_bound_bytes > limit_bytes for plan in found)
    return Trial(size, False, plan.total_bytes, is_proved), None


def _tried_in_files(
    size: int, captured: CapturedStep, limit_bytes: int, where: Path | Literal["host"]
) -> tuple[Trial, Plan | None]:
    """The same with tensors that may lie in files, or with the host."""
    variants = [one for one in (captured.first, captured.steady) if one is not None]
    try:
        choices = choose(
            variants,
            pool=None,
            time_limit_s=None,
            is_real=False,
            is_timed=where != HOST,  # the device may not be there
            memory=MemoryLimit(size_bytes=limit_bytes),
            offload=where,
            effort="runs",  # what else would be enough is not asked
        )
    except PlanError as error:
        if error.code not in _REFUSED:
            raise
        return Trial(size, False, None), None
    total_bytes = max(one.total_bytes for one in choices)
    traffic = Traffic.of(StepMemory.planned(choices[-1]), where)
    is_moved = traffic.read_bytes + traffic.written_bytes + traffic.offloaded_bytes > 0
    trial = Trial(size, True, total_bytes, traffic=traffic if is_moved else None)
    return trial, max((one.plan for one in choices), key=lambda plan: plan.total_bytes)
