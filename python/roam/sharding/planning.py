"""`roam.parallelize`: a sharding for a training step, found in one process and certified."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from roam._core import Plan
from roam.errors import CaptureError, PlanError, RoamError
from roam.memory_limit import MemoryLimit
from roam.report.folding import folded
from roam.report.table import format_bytes
from roam.runtime.compile import Step
from roam.runtime.strategy import Options
from roam.sharding.check import Difference, first_difference
from roam.sharding.costs import Costs
from roam.sharding.division import (
    DATA,
    TENSOR,
    Division,
    divisions_of,
    part_of,
    replica_collectives,
    spread_replicas,
    units_of,
)
from roam.sharding.nodes import Bans, Node, nodes_of, placements_of
from roam.sharding.ranks import meshed, of_all_ranks
from roam.sharding.replicas import why_not
from roam.sharding.result import Seconds, Sharding
from roam.sharding.rules import Rules
from roam.sharding.search import Choice, Problem
from roam.sharding.styles import Style, apply_styles, styles_of
from roam.sharding.trace import Trace, traced, traced_until
from roam.sharding.twin import (
    Twin,
    has_fakes,
    optimizer_on,
    state_bytes_of,
    twin_of,
)
from roam.torch_compat.patches import REAL_OPTIMIZER, replaced
from roam.tracing.fakes.fake_mode import quiet_fakes

WORK = 20_000_000
"""How many entries of cost matrices a search looks at, if the caller does not say."""
_MOST_TRIES = 12
"""How often another choice is searched for after one that does not run on a rank or takes too much
memory.
"""
_SIZES = (
    "write sizes that are split as -1, as in x.view(batch, length, -1, width), or take them from "
    "x.shape"
)


def parallelize(
    train_step: Callable[..., Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *batch: Any,
    mesh: int | Sequence[int] | Any,
    data: int | None = None,
    memory: int | str | None = None,
    costs: Costs | None = None,
    work: int = WORK,
) -> Sharding:
    """Finds how to split a model over the ranks of a mesh so that a training step takes the least
    time by a cost model, and certifies how much memory each rank needs.

    Runs the user's function on fake tensors only. The model, the optimizer and the batch stay as
    they are; under `with roam.fake():` they need no memory either, but then the certified memory
    lacks what kernels take for themselves. Otherwise kernels that may take memory for themselves
    are tried on zeros. One process is enough, for a mesh of any size.

    Args:
        train_step: your function, called as ``train_step(model, optimizer, *batch)``. It has one
            backward pass.
        model: a model with plain parameters, of which no part is distributed yet.
        optimizer: an optimizer over the model's parameters.
        batch: the other arguments of the step: all samples of a step, as one process would train
            on them. Replicas get equal parts of it, along the first dimension.
        mesh: the number of ranks, the numbers along each dimension, or a `DeviceMesh`. If there are
            several dimensions, the first ones may be of replicas.
        data: how many replicas of the model train on parts of the batch, and average their
            gradients. If None, the fastest number; more than one only if roam finds that the
            replicas compute what one process does.
        memory: the most that a rank's step may take in all, in bytes or as text such as
            ``"20GiB"``; no limit if None.
        costs: constants of the cost model.
        work: how long to search at most, in entries of cost matrices.

    Raises:
        CaptureError: the step cannot be traced, or no choice that was found runs on a rank
            (``sharding``).
        PlanError: no sharding was found within the memory (``sharding_memory``).
        ValueError: the mesh or the memory is not valid, or the mesh cannot be divided into so many
            replicas.
    """
    limit_bytes = None if memory is None else MemoryLimit.of(memory).amount_bytes()
    planning = Planning(
        train_step, model, optimizer, batch, mesh=mesh, data=data, costs=costs, work=work
    )
    return planning.within(limit_bytes)


def _mesh(mesh: Any, model: torch.nn.Module) -> tuple[tuple[int, ...], str]:
    """The mesh's shape, and the kind of its devices."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    shape = (mesh,) if isinstance(mesh, int) else tuple(getattr(mesh, "shape", mesh))
    if not shape or any(not isinstance(size, int) or size < 1 for size in shape):
        raise ValueError(f"a mesh needs at least one rank along each dimension, not {mesh!r}")
    device = getattr(mesh, "device_type", device)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "PyTorch makes no mesh of CUDA devices on a machine that has none; make the model and "
            'the batch on the CPU, or under `roam.fake("cpu")`'
        )
    return shape, device


@dataclass(slots=True)
class _Replica:
    """The step of a replica on its part of the batch, and what has been found not to run on its
    ranks.
    """

    batch: tuple[Any, ...]
    trace: Trace
    rules: Rules
    bans: Bans = field(default_factory=Bans)
    differences: list[Difference] = field(default_factory=list)


@dataclass(slots=True)
class Found:
    """The cheapest choice for one division of the ranks, not certified yet."""

    division: Division
    replica: _Replica
    limit_bytes: int | None
    """How many bytes the search lets results take at most."""
    bans: Bans = field(default_factory=Bans)
    """What was forbidden when the choice was found."""
    nodes: list[Node] = field(default_factory=list)
    choice: Choice | None = None
    bound_ns: int = 0
    """A lower bound of the time of all choices, in nanoseconds."""
    launched_ns: int = 0
    """The part of this time that collectives of replicas take even if they carry nothing."""
    runs: bool = False
    """Whether it has been found to run on a rank."""
    tries: int = 0

    @property
    def trace(self) -> Trace:
        """The trace of a replica's step in one process."""
        return self.replica.trace

    @property
    def chosen(self) -> Choice:
        """The choice, which must have been found."""
        assert self.choice is not None
        return self.choice

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Where earlier choices did not run on a rank."""
        return tuple(self.replica.differences)

    @property
    def styles(self) -> dict[str, Style]:
        """The styles of the choice, by the paths of modules."""
        return styles_of(self.trace, self.nodes, self.chosen.options)


class Planning:
    """Finds choices for one step on one mesh."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: tuple[Any, ...],
        *,
        mesh: int | Sequence[int] | Any,
        data: int | None = None,
        is_sharded: bool | None = None,
        costs: Costs | None = None,
        work: int = WORK,
    ) -> None:
        """The arguments are those of `parallelize`; `is_sharded` says whether parameters are
        sharded over replicas. If it is None, the cheaper way is taken.

        Raises:
            ValueError: the mesh is not valid, or cannot be divided into so many replicas.
        """
        self._train_step, self._model, self._optimizer = train_step, model, optimizer
        self._batch, self._costs, self._work = batch, costs or Costs(), work
        self.shape, self._device = _mesh(mesh, model)
        self._divisions = [
            one
            for one in divisions_of(self.shape, self._costs, data)
            if is_sharded in (None, one.is_sharded)
        ]
        self._is_told = data is not None
        self._units = units_of(model)
        self._state_bytes = state_bytes_of(optimizer)
        self._is_real = not has_fakes(model, batch)
        self._replicas: dict[int, _Replica | None] = {}
        self._meshes: dict[tuple[int, int], Any] = {}
        """Meshes of real processes, by shape. They are kept, since making one makes process
        groups.
        """
        self.seconds = Seconds()
        self.left_out: dict[str, str] = {}
        """Divisions that were not possible, and why."""
        self._errors: list[RoamError] = []

    def find(self, limit_bytes: int | None = None) -> Found | None:
        """The cheapest choice that runs on a rank, or None if there is none within the limit.

        Raises:
            CaptureError: the step cannot be traced, or none of the choices runs.
            ValueError: the batch has no parts for the replicas that were asked for.
        """
        best = self._cheapest(self.candidates(limit_bytes))
        if best is None and self._errors:
            raise self._errors[-1]
        return best

    def within(self, limit_bytes: int | None) -> Sharding:
        """A sharding whose certified memory is within a limit.

        Raises:
            CaptureError, ValueError: as from `find`.
            PlanError: none was found (``sharding_memory``).
        """
        candidates, least = self.candidates(limit_bytes), None
        while (best := self._cheapest(candidates)) is not None:
            start = time.perf_counter()
            try:
                plan, total_bytes = self._certified(best)
            except RoamError as error:
                self._leave_out(candidates, best, error)
                continue
            finally:
                self.seconds.certify += time.perf_counter() - start
            if limit_bytes is None or total_bytes <= limit_bytes:
                return self._sharding(best, candidates, plan, total_bytes)
            least = min(least or total_bytes, total_bytes)
            best.tries += 1
            if best.tries == _MOST_TRIES:
                best.choice = None
                continue
            # The search counts gradients as alive all the time, and knows no order or layout.
            assert best.limit_bytes is not None
            lowered = best.chosen.peak_bytes * limit_bytes // total_bytes
            best.limit_bytes = min(best.limit_bytes - 1, lowered)
            self._search(best)
        if least is None and self._errors:
            raise self._errors[-1]
        raise PlanError(
            f"no sharding over {math.prod(self.shape)} ranks was found within "
            f"{format_bytes(limit_bytes or 0)} a rank"
            + ("" if least is None else f"; the least that was found is {format_bytes(least)}")
            + "; take more ranks, a smaller batch, or an optimizer with less state",
            code="sharding_memory",
        )

    def candidates(self, limit_bytes: int | None = None) -> list[Found]:
        """The cheapest choice for each division of the ranks, whether it runs on a rank or not.
        Divisions without a choice within the limit are left out.

        Raises:
            CaptureError: the step cannot be traced.
            ValueError: the batch has no parts for the replicas that were asked for.
        """
        found = []
        for division in self._divisions:
            replica = self._replica(division)
            if replica is not None:
                found.append(Found(division, replica, limit_bytes))
                self._search(found[-1])
        return [one for one in found if one.choice is not None]

    def _sharding(
        self, best: Found, candidates: Sequence[Found], plan: Plan, total_bytes: int
    ) -> Sharding:
        bound = min(one.bound_ns for one in candidates)
        choice = replace(best.chosen, bound_ns=min(bound, best.chosen.ns))
        return Sharding(
            self.shape, best.division, best.styles, self._units, best.trace, tuple(best.nodes),
            choice, plan, total_bytes, self._costs, self.seconds, dict(self.left_out), self._is_real,
        )  # fmt: skip

    def _cheapest(self, candidates: list[Found]) -> Found | None:
        """The cheapest of the candidates that runs on a rank."""
        while True:
            open_ones = [one for one in candidates if one.choice is not None]
            if not open_ones:
                return None
            best = min(open_ones, key=lambda one: one.chosen.ns)
            replica = best.replica
            if best.bans is not replica.bans:
                self._search(best)
                continue
            if best.runs:
                return best
            start = time.perf_counter()
            difference = self._difference(best) if best.division.tensor > 1 else None
            self.seconds.check += time.perf_counter() - start
            if difference is None:
                best.runs = True
                return best
            replica.differences.append(difference)
            try:
                replica.bans = _more_bans(best, difference, len(replica.differences))
            except CaptureError as error:
                for one in open_ones:
                    if one.replica is replica:
                        self._leave_out(candidates, one, error)

    def _leave_out(self, candidates: list[Found], candidate: Found, error: RoamError) -> None:
        candidates.remove(candidate)
        self.left_out[str(candidate.division)] = str(error)
        self._errors.append(error)

    def _search(self, candidate: Found) -> None:
        """Finds the cheapest choice for a candidate's division that nothing forbids so far."""
        replica, division = candidate.replica, candidate.division
        start = time.perf_counter()
        link = division.tensor_link
        link = replace(link, exchanges=link.exchanges and self._device != "cpu")
        candidate.bans, candidate.runs = replica.bans, False
        candidate.nodes = nodes_of(
            replica.trace,
            replica.rules,
            self._costs,
            replace(division, tensor_link=link),
            folded,
            state_bytes=self._state_bytes,
            units=self._units,
            bans=replica.bans,
        ).nodes
        problem = Problem(candidate.nodes, limit_bytes=candidate.limit_bytes)
        searching = time.perf_counter()
        choice = problem.search(self._work)
        self.seconds.rules += searching - start
        self.seconds.search += time.perf_counter() - searching
        if choice is not None:
            # The same for all choices.
            placed = placements_of(replica.trace, candidate.nodes, choice.options)
            count = len(replica_collectives(division, self._units, placed))
            launched_ns = candidate.launched_ns = count * division.data_link.latency_ns
            choice = replace(
                choice, ns=choice.ns + launched_ns, bound_ns=choice.bound_ns + launched_ns
            )
            if candidate.tries == 0:
                candidate.bound_ns = choice.bound_ns
        candidate.choice = choice

    def _replica(self, division: Division) -> _Replica | None:
        """The step of a replica; None if it is not known to compute what one process computes."""
        count = division.data
        if count not in self._replicas:
            start = time.perf_counter()
            try:
                self._replicas[count] = self._traced(division)
            except (CaptureError, ValueError) as error:
                if count == 1 or self._is_told:
                    raise
                self._replicas[count] = None
                self.left_out[f"{count} replicas"] = str(error)
            self.seconds.trace += time.perf_counter() - start
        return self._replicas[count]

    def _traced(self, division: Division) -> _Replica:
        count = division.data
        batch = part_of(self._batch, count, 0)
        twin, used = twin_of(self._model, self._optimizer, batch), []
        own = self._optimizer, "step", lambda *_, **__: used.append(True)
        with replaced([own], of=REAL_OPTIMIZER):
            trace = traced(self._train_step, twin)
        if used:
            raise CaptureError(
                "the step updates by an optimizer that is not its argument; take model and optimizer "
                "from the arguments of the step, since each rank has others",
                code="optimizer",
            )
        if count > 1 and not self._is_told:
            whole = self._replicas[1]
            assert whole is not None
            reason = why_not(whole.trace, trace, Rules(whole.trace, count))
            if reason:
                raise CaptureError(reason, code="sharding")
        return _Replica(batch, trace, Rules(trace, division.tensor))

    @contextmanager
    def _meshed(self, division: Division) -> Iterator[Any]:
        if division.shape in self._meshes:
            yield self._meshes[division.shape]
            return
        has_processes = torch.distributed.is_initialized()
        with meshed(division.shape, (DATA, TENSOR), self._device) as mesh:
            if has_processes:
                self._meshes[division.shape] = mesh
            yield mesh

    def _rank(self, styles: dict[str, Style], mesh: Any, batch: tuple[Any, ...]) -> Twin:
        """The twin that one rank of a replica trains."""
        twin = twin_of(self._model, self._optimizer, batch)
        with twin.mode:
            return _renewed(twin, lambda model: apply_styles(model, mesh, styles, source_rank=None))

    def rank_trace(self, found: Found) -> Trace:
        """The trace of the step on the first rank of a replica.

        Raises:
            CaptureError: its forward pass raises.
        """
        with self._meshed(found.division) as mesh:
            rank = self._rank(found.styles, mesh[TENSOR], found.replica.batch)
            return traced(self._train_step, rank)

    def _difference(self, found: Found) -> Difference | None:
        """Where the first rank of a replica does not do what was chosen."""
        with self._meshed(found.division) as mesh, quiet_fakes():
            twin = self._rank(found.styles, mesh[TENSOR], found.replica.batch)
            rank, raised = traced_until(self._train_step, twin)
        size = found.division.tensor
        return first_difference(found.trace, found.nodes, found.chosen.options, rank, raised, size)

    def _certified(self, found: Found) -> tuple[Plan, int]:
        """The plan of this rank's step, and the most bytes that a step takes on a rank. Ranks may
        have parts of different sizes, and must decide alike.

        Raises:
            RoamError: a rank has no plan.
        """
        plan, failure = None, None
        try:
            plan = self._plan(found)
        except RoamError as error:
            failure = error
        told = (plan.total_bytes, "", "") if plan else (0, str(failure), failure and failure.code)
        ranks = of_all_ranks(told)
        if failure is not None:
            raise failure
        for rank, (_, message, code) in enumerate(ranks):
            if message:
                raise CaptureError(f"on rank {rank}: {message}", code=code)
        assert plan is not None
        return plan, max(total_bytes for total_bytes, _, _ in ranks)

    def _plan(self, found: Found) -> Plan:
        """The plan of a rank's step.

        Raises:
            RoamError: there is none.
        """
        division = found.division
        with self._meshed(division) as mesh:
            rank = self._rank(found.styles, mesh[TENSOR], found.replica.batch)
            if division.data > 1:
                # Without the fakes' mode: meshes are of real tensors.
                rank = _renewed(rank, partial(self._spread, mesh[DATA], division))
            step = Step(self._train_step, options=Options(tries_kernels=self._is_real))
            with warnings.catch_warnings():
                # PyTorch says it again when the user's own step runs.
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
                step.plan(rank.model, rank.optimizer, *rank.batch)
        # The first step makes the optimizer's state, all later ones have it.
        return max((plan for _, plan in step.plans), key=lambda plan: plan.total_bytes)

    def _spread(self, mesh: Any, division: Division, model: torch.nn.Module) -> None:
        spread_replicas(model, mesh, self._units, is_sharded=division.is_sharded)


def _renewed(twin: Twin, change: Callable[[torch.nn.Module], object]) -> Twin:
    """A twin whose model was changed, with an optimizer over the parameters that it has now."""
    before = dict(twin.model.named_parameters(remove_duplicate=False))
    change(twin.model)
    after = dict(twin.model.named_parameters(remove_duplicate=False))
    new: dict[int, Any] = {id(module): module for module in twin.model.modules()}
    new |= {id(parameter): after[name] for name, parameter in before.items()}
    return replace(twin, optimizer=optimizer_on(twin.optimizer, new))


def _more_bans(found: Found, difference: Difference, tries: int) -> Bans:
    """Forbids what is likely to have made a module fail: parts of a value whose shape its code
    reads, or, if there is no such value, all parts between its operators.

    Raises:
        CaptureError: all of this is forbidden already, or too many choices were tried.
    """
    bans, trace, path = found.bans, found.trace, folded(difference.path)
    states: dict[int, set[int]] = {}
    for node, option in zip(found.nodes, found.chosen.options, strict=True):
        if node.what == "operator":
            made = [slot for slot in node.subject.outputs if slot is not None]
        elif node.what == "style":
            made = trace.calls[node.subject].returned[:1]
        else:
            made = [node.value]
        for slot, state in zip(made, option.outputs, strict=False):
            states.setdefault(slot, set()).add(state)
    reads = trace.reads.items() if tries < _MOST_TRIES else ()
    for call, values in reads:
        if ("" if call < 0 else folded(trace.calls[call].path)) != path:
            continue
        for place, slot in enumerate(values):
            split = {(path, place, state) for state in states.get(slot, ()) if state >= 0}
            if not split <= bans.values:
                # Only the first value that is read and split is forbidden: one more at each try.
                return replace(bans, values=bans.values | split)
    if path not in bans.modules and tries < _MOST_TRIES:
        return replace(bans, modules=bans.modules | {path})
    raise CaptureError(
        "no sharding was found that works: on a rank, the code of "
        f"{difference.path or 'the step'} does not run on parts: {difference.message}; {_SIZES}",
        code="sharding",
    )
