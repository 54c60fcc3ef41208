"""`roam.parallelize`: a sharding for a training step, found in one process and certified."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from roam._core import Plan
from roam.errors import CaptureError, PlanError
from roam.memory_limit import MemoryLimit
from roam.report.folding import folded
from roam.report.table import format_bytes
from roam.runtime import compile as compile_step
from roam.sharding.check import Difference, first_difference
from roam.sharding.costs import Costs
from roam.sharding.nodes import Bans, Node, nodes_of
from roam.sharding.ranks import meshed
from roam.sharding.result import Seconds, Sharding
from roam.sharding.rules import Rules
from roam.sharding.search import Choice, search
from roam.sharding.styles import Style, apply_styles, styles_of
from roam.sharding.trace import Trace, traced, traced_until
from roam.sharding.twin import Twin, optimizer_on, quiet_fakes, state_bytes_of, twin_of

WORK = 20_000_000
"""Entries of cost matrices that a search looks at, unless told otherwise."""
_MOST_TRIES = 12
"""How often a choice is found anew, after one that does not run or takes too much."""
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
    memory: int | str | None = None,
    costs: Costs | None = None,
    work: int = WORK,
) -> Sharding:
    """Finds how to split a model over the ranks of a mesh so that a training step takes the least
    time by a model of time, and certifies how much memory each rank needs.

    Runs the user's function on fake tensors only. The model, the optimizer and the batch stay as
    they are; under `with roam.fake():` they need no memory either. One process is enough, for a
    mesh of any size.

    Args:
        train_step: called as ``train_step(model, optimizer, *batch)``, with one backward pass.
        model: with plain parameters; nothing of it is distributed yet.
        optimizer: over its parameters.
        batch: what else the step is given, the same on every rank.
        mesh: how many ranks, or a `DeviceMesh` of one dimension.
        memory: the most that a rank's step may take in all, in bytes or as text such as
            ``"20GiB"``; no limit if None.
        costs: constants of the model of time.
        work: how long to search at most, in entries of cost matrices.

    Raises:
        CaptureError: the step cannot be traced, or no choice that was found runs on a rank
            (``sharding``).
        PlanError: no sharding was found within the memory (``sharding_memory``).
        ValueError: the mesh is not one of one dimension, or the memory is no amount of bytes.
    """
    limit_bytes = None if memory is None else MemoryLimit.of(memory).amount_bytes()
    planning = Planning(train_step, model, optimizer, batch, mesh=mesh, costs=costs, work=work)
    return planning.within(limit_bytes)


def _mesh(mesh: Any, model: torch.nn.Module) -> tuple[tuple[int, ...], tuple[str, ...], str]:
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if isinstance(mesh, int):
        mesh = (mesh,)
    names = getattr(mesh, "mesh_dim_names", None)
    shape = tuple(getattr(mesh, "shape", mesh))
    if len(shape) != 1 or any(not isinstance(size, int) or size < 1 for size in shape):
        raise ValueError(f"a mesh has one dimension of one rank or more, not {mesh!r}")
    return shape, tuple(names or ("tensor",)), getattr(mesh, "device_type", device)


@dataclass(frozen=True, slots=True)
class Found:
    """A choice that runs on a rank, not certified yet."""

    trace: Trace
    nodes: list[Node]
    choice: Choice
    styles: dict[str, Style]
    differences: tuple[Difference, ...]
    """Where the choices before it did not run on a rank."""


class Planning:
    """Finds choices for one step on one mesh dimension."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: tuple[Any, ...],
        *,
        mesh: int | Sequence[int] | Any,
        costs: Costs | None = None,
        work: int = WORK,
    ) -> None:
        """The arguments are those of `parallelize`.

        Raises:
            ValueError: the mesh is none.
        """
        self._train_step, self._model, self._optimizer = train_step, model, optimizer
        self._batch, self._costs, self._work = batch, costs or Costs(), work
        self.shape, self.names, self._device = _mesh(mesh, model)
        self.seconds = Seconds()
        self._traced: tuple[Trace, Rules] | None = None

    def find(self, limit_bytes: int | None = None) -> Found | None:
        """The cheapest choice that runs on a rank, or None where there is none within the limit.

        Raises:
            CaptureError: the step cannot be traced, or none of the choices runs.
        """
        trace, rules = self._trace()
        bans = Bans()
        differences: list[Difference] = []
        for _ in range(_MOST_TRIES):
            start = time.perf_counter()
            nodes = self._nodes(trace, rules, bans)
            searching = time.perf_counter()
            choice = search(nodes, limit_bytes=limit_bytes, work=self._work)
            self.seconds.rules += searching - start
            self.seconds.search += time.perf_counter() - searching
            if choice is None:
                return None
            start = time.perf_counter()
            styles = styles_of(trace, nodes, choice.options)
            difference = self._difference(trace, nodes, choice, styles)
            self.seconds.check += time.perf_counter() - start
            if difference is None:
                return Found(trace, nodes, choice, styles, tuple(differences))
            differences.append(difference)
            bans = _more_bans(bans, trace, nodes, choice, difference)
        last = differences[-1]
        raise CaptureError(
            f"no sharding was found that runs: on a rank, the code of {last.path or 'the step'} does "
            f"not run on parts: {last.message}; {_SIZES}",
            code="sharding",
        )

    def within(self, limit_bytes: int | None) -> Sharding:
        """A choice whose certified memory keeps to a limit.

        Raises:
            CaptureError: as from `find`.
            PlanError: none was found (``sharding_memory``).
        """
        limit, least = limit_bytes, None
        for _ in range(_MOST_TRIES):
            found = self.find(limit)
            if found is None:
                break
            start = time.perf_counter()
            plan = self._plan(found.styles)
            self.seconds.certify += time.perf_counter() - start
            if limit_bytes is None or plan.total_bytes <= limit_bytes:
                return Sharding(
                    self.shape, self.names, found.styles, found.trace, tuple(found.nodes),
                    found.choice, plan, self._costs, self.seconds,
                )  # fmt: skip
            least = min(least or plan.total_bytes, plan.total_bytes)
            # The search counts gradients as alive all the time, and knows no order or layout.
            assert limit is not None
            limit = min(limit - 1, found.choice.peak_bytes * limit_bytes // plan.total_bytes)
        raise PlanError(
            f"no sharding over {self.shape[0]} ranks was found within "
            f"{format_bytes(limit_bytes or 0)} a rank"
            + ("" if least is None else f"; the least that was found is {format_bytes(least)}")
            + "; take more ranks, a smaller batch, or an optimizer with less state",
            code="sharding_memory",
        )

    def _trace(self) -> tuple[Trace, Rules]:
        if self._traced is None:
            start = time.perf_counter()
            trace = traced(self._train_step, twin_of(self._model, self._optimizer, self._batch))
            self._traced = trace, Rules(trace, self.shape[0])
            self.seconds.trace += time.perf_counter() - start
        return self._traced

    def _nodes(self, trace: Trace, rules: Rules, bans: Bans) -> list[Node]:
        link = self._costs.link_of(0)
        return nodes_of(
            trace,
            rules,
            self._costs,
            replace(link, exchanges=link.exchanges and self._device != "cpu"),
            folded,
            state_bytes=state_bytes_of(self._optimizer),
            bans=bans,
        ).nodes

    def _rank(self, styles: dict[str, Style], mesh: Any) -> Twin:
        """What a rank has."""
        twin = twin_of(self._model, self._optimizer, self._batch)
        before = dict(twin.model.named_parameters(remove_duplicate=False))
        with twin.mode:
            apply_styles(twin.model, mesh, styles, source_rank=None)
        after = dict(twin.model.named_parameters(remove_duplicate=False))
        new = {id(parameter): after[name] for name, parameter in before.items()}
        return replace(twin, optimizer=optimizer_on(twin.optimizer, new))

    def rank_trace(self, styles: dict[str, Style]) -> Trace:
        """What the first rank does with these styles.

        Raises:
            CaptureError: its forward pass raises.
        """
        with meshed(self.shape, self.names, self._device) as mesh:
            return traced(self._train_step, self._rank(styles, mesh))

    def _difference(
        self, trace: Trace, nodes: Sequence[Node], choice: Choice, styles: dict[str, Style]
    ) -> Difference | None:
        with meshed(self.shape, self.names, self._device) as mesh, quiet_fakes():
            rank, raised = traced_until(self._train_step, self._rank(styles, mesh))
        return first_difference(trace, nodes, choice.options, rank, raised, self.shape[0])

    def _plan(self, styles: dict[str, Style]) -> Plan:
        with meshed(self.shape, self.names, self._device) as mesh:
            rank = self._rank(styles, mesh)
            step = compile_step(self._train_step)
            step.plan(rank.model, rank.optimizer, *rank.batch)
        # The first step makes the optimizer's state, all later ones have it.
        return max((plan for _, plan in step.plans), key=lambda plan: plan.total_bytes)


def _more_bans(
    bans: Bans, trace: Trace, nodes: Sequence[Node], choice: Choice, difference: Difference
) -> Bans:
    """Forbids what a module cannot have run on: parts of a value whose shape its code reads, or
    else all parts between its operators.

    Raises:
        CaptureError: that is forbidden already.
    """
    path = folded(difference.path)
    states: dict[int, set[int]] = {}
    for node, option in zip(nodes, choice.options, strict=True):
        if node.what == "operator":
            made = [slot for slot in node.subject.outputs if slot is not None]
        elif node.what == "style":
            made = trace.calls[node.subject].returned[:1]
        else:
            made = [node.value]
        for slot, state in zip(made, option.outputs, strict=False):
            states.setdefault(slot, set()).add(state)
    for call, values in trace.reads.items():
        if ("" if call < 0 else folded(trace.calls[call].path)) != path:
            continue
        for place, slot in enumerate(values):
            found = {(path, place, state) for state in states.get(slot, ()) if state >= 0}
            if not found <= bans.values:
                # The first that is read and split: one more each time.
                return replace(bans, values=bans.values | found)
    if path not in bans.modules:
        return replace(bans, modules=bans.modules | {path})
    raise CaptureError(
        f"on a rank, the code of {difference.path or 'the step'} does not run on parts: "
        f"{difference.message}; {_SIZES}",
        code="sharding",
    )
