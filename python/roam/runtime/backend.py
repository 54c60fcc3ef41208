"""``torch.compile(model, backend="roam")``: PyTorch's forward and backward graphs, each run by a
plan.

Dynamo and AOTAutograd cut a model into graphs of aten calls, separate ones for forward and
backward; the optimizer is not in them. Each graph is planned on its own: what is saved for the
backward pass leaves the forward graph and enters the backward graph. So less can be planned than in
the whole step that `roam.compile` captures: an update cannot follow its gradient directly, and a
backward operator cannot write into a saved activation.

A graph is planned once for each combination of shapes and strides of its arguments and of how they
share memory, at the first call that brings it. If Dynamo says that sizes follow from symbols, one
plan holds for a range of them, as in `roam.compile` (`roam.runtime.graph_ranges`). A graph that
cannot be planned exactly runs as it is, and a warning says why.

With a memory limit, forward and backward of one graph are cut and planned so that both keep within
the limit, and a graph that cannot be planned is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from functorch.compile import get_aot_graph_name, min_cut_rematerialization_partition
from torch.fx import GraphModule

from roam.distributed.agreement import announce, begin, leave
from roam.distributed.collectives import is_launch, settle
from roam.errors import CaptureError, ExecutionError
from roam.kernels.table import is_proven
from roam.memory_limit import MemoryLimit
from roam.program.collectives import sequences
from roam.report.progress import Progress
from roam.runtime.executor import Executor
from roam.runtime.graph_ranges import recorded_range
from roam.runtime.log import logger
from roam.runtime.partition import Partition
from roam.runtime.pool import Pool
from roam.runtime.ranges import at_largest, limit_to_kernels, with_room
from roam.runtime.strategy import MAX_PLANS, Choice, Options, choose
from roam.state.argument_sizes import ArgumentSizes, Larger, lies
from roam.state.equality import MISSING, Misfit
from roam.state.sizes import OneLength
from roam.switch import is_disabled
from roam.torch_compat.private import (
    aot_autograd,
    boxed,
    c_pointer,
    dispatch_modes,
    is_any_autocast_enabled,
    run_unplanned,
    tracing_context,
)
from roam.tracing.frontends.aot import record_graph
from roam.tracing.frontends.compiled_blocks import with_compiled_blocks
from roam.tracing.frontends.graph_sizes import has_symbols
from roam.tracing.numbers.rng import watched
from roam.tracing.step import Variant

_PLANNED_DEVICES = ("cpu", "cuda")
_TRIES = 3
"""How often a plan for a range of sizes is looked for, for one graph."""

Boxed = Callable[[list[Any]], Any]
"""A graph to call: it empties the list of its arguments, so that they can die during the call."""


def backend(
    module: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend ``roam`` of ``torch.compile``.

    Args:
        module, example_inputs: what Dynamo gives a backend.
        options: the ``options`` of ``torch.compile``. `time_limit_s`, `pool`, `poison` and
            `max_plans` are as for `roam.compile`. Each graph has up to `max_plans` plans; its other
            calls run without a plan. There is a pool only if it is asked for, since it would stay
            allocated while the other graphs and the optimizer run. `memory` is as for
            `roam.compile`, for each graph with its backward pass: their arguments, parameters
            included, what is kept between them, and what they make. A share counts from what both
            take without recomputation. With `memory`, calls that cannot be planned raise an error,
            and shapes have to be numbers (``dynamic=False``). `kernels` is as for `roam.compile`:
            with ``"inductor"``, the repeated blocks of each graph run kernels that Inductor has
            compiled, and a block that cannot be compiled raises an error.

    Raises:
        ValueError: an option is not valid.
    """
    given = dict(options or {})
    max_plans = given.pop("max_plans", MAX_PLANS)
    limit = given.pop("memory", None)
    unknown = given.keys() - {"time_limit_s", "pool", "poison", "kernels"}
    if unknown:
        raise ValueError(
            f"the backend has no option {sorted(unknown)[0]!r}; it has kernels, max_plans, memory, "
            "poison, pool and time_limit_s"
        )
    if type(max_plans) is not int or max_plans < 1:
        raise ValueError(f"max_plans must be a whole number of at least 1, not {max_plans!r}")
    chosen = Options(**{"pool": False, **given})
    if chosen.kernels not in ("eager", "inductor"):
        raise ValueError(f"kernels must be 'eager' or 'inductor', not {chosen.kernels!r}")
    compiles_blocks = chosen.kernels == "inductor"
    partition = None
    if limit is not None:
        has_pool = chosen.pool is not False
        partition = Partition(MemoryLimit.of(limit), pool=has_pool, compiles_blocks=compiles_blocks)
    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=partial(
            _compile_graph,
            phase="forward",
            options=chosen,
            max_plans=max_plans,
            partition=partition,
        ),
        bw_compiler=partial(
            _compile_graph,
            phase="backward",
            options=chosen,
            max_plans=max_plans,
            partition=partition,
        ),
        # What the backend aot_eager does, whose results these are bit for bit.
        partition_fn=partition or min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(module, example_inputs)
    return compiled


def _compile_graph(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    phase: str,
    options: Options,
    max_plans: int,
    partition: Partition | None,
) -> Boxed:
    """A compiler for AOTAutograd."""
    if partition is not None:
        options = replace(options, memory=partition.limits[phase])
    dying = _saved_alone() if phase == "backward" else ()
    graph = PlannedGraph(
        module, get_aot_graph_name(), phase=phase, dying=dying, options=options, max_plans=max_plans
    )

    def run(args: list[Any]) -> Any:
        return graph.run(args)

    return boxed(run)


def _saved_alone() -> Collection[int]:
    """Places of the backward graph's arguments that nobody but autograd holds: it lets go of them
    when it calls the graph.
    """
    context = tracing_context()
    metadata = None if context is None else context.fw_metadata
    return frozenset(getattr(metadata, "bw_donated_idxs", None) or ())


class PlannedGraph:
    """One graph of AOTAutograd's with its plans, one for each kind of arguments."""

    def __init__(
        self,
        module: GraphModule,
        name: str,
        *,
        phase: str,
        dying: Collection[int],
        options: Options,
        max_plans: int = MAX_PLANS,
    ) -> None:
        self._module = module
        self._name = name
        self._phase = phase
        self._dying = dying
        self._options = options
        self._max_plans = max_plans
        self._run_unplanned: Boxed = run_unplanned(module, [])
        self._plans: dict[object, _Planned | None] = {}
        """By `_signature`; None if there is no plan."""
        self._ranges: list[_Planned] = []
        """Plans for ranges of sizes, the latest last."""
        self._tries = _TRIES
        """How often a range may still be looked for."""
        if options.memory is not None or options.kernels != "eager" or not has_symbols(module):
            self._tries = 0
        self._lock = threading.Lock()

    def run(self, args: list[Any]) -> Any:
        """The graph's results; the list is emptied."""
        if is_disabled():
            return self._run_unplanned(args)
        signature = None if _is_watched() else _signature(args)
        if signature is None:
            if self._options.memory is not None:
                raise CaptureError(
                    f"{self._name} was called with a tensor subclass, in autocast or in a dispatch mode. "
                    "Such a call has no plan, and may take more than its limit. Enter autocast "
                    "inside of what is compiled, or leave memory= out",
                    code="memory_unplanned",
                )
            return self._run_unplanned(args)
        planned = self._found(signature, args)
        if planned is MISSING:
            with self._lock:
                if self._options.memory is not None and len(self._plans) == self._max_plans:
                    self._plans.pop(next(iter(self._plans)))  # every call has a plan then
                planned = self._found(signature, args)
                if planned is MISSING and (
                    self._larger(signature, args) is not None or not self._is_full()
                ):
                    return self._first_run(signature, args)
        if not isinstance(planned, _Planned):
            return self._run_unplanned(args)
        try:
            return planned.run(args)
        except ExecutionError as error:
            # There is no memory for the pool, and nothing has been changed.
            is_joined = planned.joins_processes and error.code != "out_of_memory"
            if self._options.memory is not None or is_joined or not args:
                raise
            logger.warning("%s runs without a plan this time: %s", self._name, error)
            return self._run_unplanned(args)

    def _is_full(self) -> bool:
        return len(self._plans) + len(self._ranges) >= self._max_plans

    def _found(self, signature: tuple[Any, ...], args: list[Any]) -> Any:
        """The plan for a call; None if it is to run without, and `MISSING` if there is none."""
        if signature in self._plans:
            return self._plans[signature]
        return next((one for one in self._ranges if one.failure(signature, args) is None), MISSING)

    def _larger(
        self, signature: tuple[Any, ...], args: list[Any]
    ) -> tuple[int, tuple[int, ...]] | None:
        """The place of a plan for a range that would hold for a call if it were made for larger
        sizes, and these; None if there is none.
        """
        for place, planned in enumerate(self._ranges):
            failure = planned.failure(signature, args)
            if isinstance(failure, Larger):
                return place, failure.values
        return None

    def _first_run(self, signature: tuple[Any, ...], args: list[Any]) -> Any:
        """Plans, and runs with every result checked. If anything goes wrong it is undone, and the
        graph runs as it is.
        """
        planned, larger = None, self._larger(signature, args)
        try:
            with Progress(f"planning {self._name}", only_live=True):
                planned = self._plan(signature, args, larger)
            results = planned.run_checked(args)
        except Exception as error:
            # Unplanned it might take more, or launch collectives once more than other ranks.
            is_strict = self._options.memory is not None or self._options.kernels == "inductor"
            if is_strict or (planned and planned.joins_processes):
                raise
            results, planned = self._run_unplanned(args), None
            logger.warning("%s runs without a plan: %s", self._name, error)
        was_full = self._is_full()
        if planned is None or planned.sizes is None:
            self._plans[signature] = planned
        elif larger is not None:
            self._ranges[larger[0]] = planned
        else:
            self._ranges.append(planned)
        if self._is_full() and not was_full and not self._ranges:
            logger.warning(
                '%s has been planned for %d kinds of arguments; others run without a plan. Pad '
                'inputs to a few shapes, or allow more plans by options={"max_plans": ...}',
                self._name, self._max_plans,
            )  # fmt: skip
        args.clear()
        return results

    def _plan(
        self,
        signature: tuple[Any, ...],
        args: list[Any],
        larger: tuple[int, tuple[int, ...]] | None,
    ) -> _Planned:
        """A plan for a range of sizes that the call's are in, if one is found; or for these alone.

        Args:
            larger: as of `_larger`.
        """
        earlier = [
            planned.choice
            for planned in (*self._plans.values(), *self._ranges)
            if planned is not None
        ]
        record = partial(record_graph, self._module, phase=self._phase, dying=self._dying)
        if self._tries or larger is not None:
            try:
                if larger is not None:
                    place, values = larger
                    known = self._ranges[place]
                    assert known.sizes is not None, "it holds for a range"
                    recorded, sizes = known.recorded, known.sizes
                else:
                    self._tries -= 1
                    before = self._ranges[-1].layouts if self._ranges else {}
                    program, sizes = recorded_range(self._module, args, before, record)
                    recorded = Variant(program, self._name, as_written=program)
                    values = sizes.values(args)
                room = with_room(sizes, values, is_cpu=recorded.device.type == "cpu")
                sizes = sizes.up_to(room, has_room=True)
                return self._planned(recorded, earlier, signature, args, sizes)
            except (OneLength, CaptureError) as error:
                logger.debug("%s is planned for one kind of arguments: %s", self._name, error)
        module = self._module
        if self._options.kernels == "inductor":
            module = with_compiled_blocks(module, args)
            if module is self._module:
                logger.warning(
                    "%s has no repeated blocks, and runs eager kernels; leave kernels='inductor' "
                    "out, or remove the graph break that cuts the blocks",
                    self._name,
                )
            record = partial(record_graph, module, phase=self._phase, dying=self._dying)
        program = record(args)
        variant = Variant(program, self._name, as_written=program)
        return self._planned(variant, earlier, signature, args)

    def _planned(
        self,
        variant: Variant,
        earlier: Sequence[Choice],
        signature: tuple[Any, ...],
        args: list[Any],
        sizes: ArgumentSizes | None = None,
    ) -> _Planned:
        if variant.device.type not in _PLANNED_DEVICES:
            raise CaptureError(
                f"tensors on {variant.device} are not planned; use the CPU or CUDA", code="device"
            )
        made = _Planned(variant, self._options, earlier=earlier, sizes=sizes)
        if sizes is not None:
            made.kind = _without_sizes(signature, sizes.layouts)
            made.layouts = {place: lies(args[place]) for place in sizes.layouts}
        return made


class _Planned:
    """A graph's program with its plan.

    Args:
        variant: the program.
        options: how it is planned.
        earlier: other plans of the same graph.
        sizes: for which sizes the plan is to hold; None: for those of the program alone.

    Raises:
        OneLength: no plan for these sizes is found.
    """

    def __init__(
        self,
        variant: Variant,
        options: Options,
        *,
        earlier: Sequence[Choice] = (),
        sizes: ArgumentSizes | None = None,
    ) -> None:
        self.recorded, self.sizes = variant, sizes
        self.kind: tuple[Any, ...] = ()
        """What `_without_sizes` says of the arguments that it was made for."""
        self.layouts: dict[int, Any] = {}
        """How the arguments with such sizes lay in the call that it was made for."""
        self._lock = threading.RLock()
        (choice,) = choose(
            [variant if sizes is None else at_largest(variant, sizes)],
            pool=options.pool,
            time_limit_s=options.time_limit_s,
            earlier=earlier,
            memory=options.memory,
            undoes=True,
        )
        if sizes is not None:
            limit_to_kernels(sizes, variant.device, [choice])
        self.choice = choice
        logger.info("%s: %s", variant.name, choice)
        program = choice.program
        self._device = variant.device
        self._places = [reference.index for reference, _ in program.referenced]
        written = program.written()
        self._changed = [
            reference.index
            for reference, slot in program.referenced
            if program.storage_of(slot) in written
        ]
        self._constants = [tensor for tensor, _ in program.constants]
        self._frees = bool(program.entering)
        """Whether arguments may die during a run: then no run can be repeated."""
        self._sequences = sequences(program, choice.plan.order.tolist())
        # Apart from what they gather again, ranks launch the same by a plan as without one. On what
        # they gather again they have to agree.
        again = () if choice.recomputation is None else choice.recomputation.calls
        self._is_to_agree = any(is_launch(program.calls[index].target) for index in again)
        if self._sequences:
            announce()
        self._executor = Executor(
            program,
            choice.placed,
            choice.plan,
            pool=Pool.of(variant.device) if choice.uses_pool else None,
            poison=options.poison,
            proven=is_proven(variant.device.type),
            symbols=() if sizes is None else sizes.symbols.names,
        )

    def failure(self, signature: tuple[Any, ...], args: list[Any]) -> Misfit | None:
        """Why a plan for a range of sizes does not hold for a call; None if it does."""
        assert self.sizes is not None, "it holds for a range"
        if _without_sizes(signature, self.sizes.layouts) != self.kind:
            return Misfit("the arguments differ in more than sizes")
        return self.sizes.failure(args)

    @property
    def joins_processes(self) -> bool:
        """Whether its runs launch collectives."""
        return bool(self._sequences)

    @contextmanager
    def _joined(self, *, is_first: bool = False) -> Iterator[None]:
        """Around a run: if it fails, other ranks that wait for its collectives get to know."""
        if not self._sequences:
            yield
            return
        try:
            begin(self._sequences, is_new=is_first and self._is_to_agree)
            yield
        except BaseException as error:
            leave(self._sequences, str(error) or type(error).__name__)
            settle()  # until then, collectives under way use memory of the run's
            raise

    @contextmanager
    def _at(self, args: list[Any]) -> Iterator[None]:
        """Around a run: it has the sizes of these arguments."""
        if self.sizes is None:
            yield
            return
        values = self.sizes.values(args)
        with self._lock:
            self._executor.at(values)
            try:
                yield
            except ExecutionError as error:
                if error.code == "differs_from_capture":
                    self.sizes.excluded.add(values)
                raise

    def run(self, args: list[Any]) -> Any:
        """The graph's results; the list is emptied, unless nothing has been changed and an error is
        raised.

        Raises:
            ExecutionError: where there is no memory for the pool, and nothing has been changed; or
                where the graph launches collectives, and other ranks launch others or have left; or
                where a plan for many sizes turns out not to hold for those of the call.
        """
        inputs = self._inputs(args)
        with torch.no_grad(), self._at(args), self._executor.held(), self._joined():
            changed = [args[place] for place in self._changed]
            if self._executor.has_passed() or self._frees:
                args.clear()
                changed.clear()
                results, *_ = self._executor.run(inputs)
            else:
                with _undone_on_failure(changed, self._device):
                    results, *_ = self._executor.run(inputs)
                args.clear()
        return results

    def run_checked(self, args: list[Any]) -> Any:
        """The same for the first time, comparing every result with the program. A failure leaves
        all as it was.
        """
        changed = [args[place] for place in self._changed]
        with (
            torch.no_grad(),
            watched,
            _undone_on_failure(changed, self._device),
            self._at(args),
            self._executor.held(),
            self._joined(is_first=True),
        ):
            results, *_ = self._executor.run_checked(self._inputs(args))
        return results

    def _inputs(self, args: list[Any]) -> list[Any]:
        return [args[place] for place in self._places] + self._constants


@contextmanager
def _undone_on_failure(tensors: list[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Gives tensors and random generators their old values again if what is done inside fails."""
    copies = [tensor.clone() for tensor in tensors]
    generator = torch.get_rng_state()
    device_generator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    except BaseException:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
        torch.set_rng_state(generator)
        if device_generator is not None:
            torch.cuda.set_rng_state(device_generator, device)
        raise


def _is_watched() -> bool:
    """Whether somebody looks at the very operators that run, or changes them: a dispatch mode, or
    autocast.
    """
    modes = dispatch_modes()
    return any(not mode.ignore_compile_internals() for mode in modes) or is_any_autocast_enabled()


def _without_sizes(signature: tuple[Any, ...], places: Container[int]) -> tuple[Any, ...]:
    """A signature without the sizes and strides of the arguments at these places."""
    return tuple(
        entry
        if place not in places
        else entry[2:]
        if isinstance(entry[0], torch.Size)
        else entry[0]
        for place, entry in enumerate(signature)
    )


def _signature(args: list[Any]) -> tuple[Any, ...] | None:
    """All that a plan depends on; None if an argument is not a plain tensor or number."""
    storages: dict[int, int] = {}
    signature: list[Any] = []
    for value in args:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            if (
                kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
                or value.layout is not torch.strided
            ):
                return None
            shared = storages.setdefault(c_pointer(value.untyped_storage()), len(storages))
            signature.append((value.shape, value.stride(), value.dtype, value.device, shared))
        elif kind is float:
            signature.append(value.hex())  # zeros have a sign
        elif kind is int or kind is bool or value is None:
            signature.append((kind, value))
        else:
            return None
    return tuple(signature)
