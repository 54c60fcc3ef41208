"""Executes a program by a plan, out of a static pool or of the ordinary allocator.

The first run of a plan goes through `Executor.run_checked`, call by call, and compares every result
with what capture said; later ones run the plan's text.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import isgenerator
from types import TracebackType
from typing import Any

import torch

from roam._core import Plan
from roam.errors import ExecutionError
from roam.kernels.calls import Placed
from roam.kernels.workspace import learning
from roam.program import resized
from roam.program.barrier import is_barrier
from roam.program.bits import differ
from roam.program.chunks import aligned
from roam.program.copies import settle
from roam.program.ir import Call, Program, substitute
from roam.program.operators import UNINITIALIZED
from roam.program.pages import Fetch, Keep, Pages
from roam.program.tier import Load, Tier
from roam.runtime.bindings import POISON, Bindings, Outgoing
from roam.runtime.codegen import GeneratedSource, Watcher
from roam.runtime.cuda_graph import CudaGraph, Recorder, RecordingFailed
from roam.runtime.first_run import Check
from roam.runtime.lengths import Generated, Lengths
from roam.runtime.pool import Pool
from roam.runtime.streams import Streams

aten = torch.ops.aten
_NEVER_FAIL = {
    aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.zero_.default, aten.fill_.Scalar,
    aten.copy_.default,
}  # fmt: skip
"""Operators that raise nothing where shapes and dtypes are those of the capture."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a run stopped."""

    step: int
    """Place in the plan's order of the call that raised."""
    call: Call


class Executor:
    """One program by one plan.

    Args:
        program: the program.
        placed: per call, what `placed_calls` says of it.
        plan: a plan of the program's graph.
        streams: the device's streams, if the plan is for several. The first run uses one, in launch
            order, which is one of the timings that the plan allows.
        pool: where the plan's offsets are; None: every tensor comes from the ordinary allocator,
            and only the plan's order and reuse count.
        poison: whether to fill every range of the pool as soon as its tensor dies, so that a later
            read of it shows.
        proven: whether tests have established, with this very PyTorch, that the placed kernels give
            the ordinary bits. If not, the first run compares them, and an operator whose results
            differ is run in the ordinary way from then on.
        shrinks: a pool, which the plan need not use, and the most bytes that it may have while this
            plan runs. If other steps have made it larger, its memory is freed first.
        tier: where tensors are offloaded, and what it has to hold; None if none is offloaded.
        pages: where tensors lie before and after the step; None if none does.
        recorder: what records runs as a CUDA graph; None: they are not.
        symbols: what the sizes of the program follow from. It is planned for the largest, and `at`
            says which the next run has.
    """

    def __init__(
        self,
        program: Program,
        placed: Sequence[Placed | None],
        plan: Plan,
        *,
        pool: Pool | None = None,
        streams: Streams | None = None,
        poison: bool = False,
        proven: bool = True,
        shrinks: tuple[Pool, int] | None = None,
        tier: tuple[Tier, int] | None = None,
        pages: Pages | None = None,
        recorder: Recorder | None = None,
        symbols: Sequence[str] = (),
    ) -> None:
        self.program = program
        self.bindings = Bindings(program, placed, plan, pool=pool, poison=poison)
        self.is_checked = False
        """Whether a checked run has left out no call, and so has checked all of them."""
        self._generated: GeneratedSource | None = None
        self._plan = plan
        self._streams = streams
        self._proven = proven
        self._shrinks = shrinks
        self._tier = tier
        self._pages = pages
        self._kept_bytes = sum(
            aligned(program.storages[program.storage_of(call.outputs[0])].size_bytes)  # type: ignore[arg-type, misc]
            for call in program.calls
            if isinstance(call.target, Keep)
        )
        self._watcher: Watcher | None = None
        self._symbols = symbols
        self._lengths: Lengths | None = None
        self.sizes: tuple[int, ...] = ()
        """Of the next run: the values of `symbols`."""
        self.news: list[Call] = []
        """Calls of others' kernels that take memory of their own, as the first run has shown."""
        self._ran: GeneratedSource | Generated | None = None
        """What the last run executed."""
        self._graph = None
        if recorder is not None:
            address = (lambda: 0) if pool is None else (lambda: pool.address)
            self._graph = CudaGraph(program, self.bindings.input_slots(), recorder, address)

    def watch(self, watcher: Watcher | None) -> None:
        """From now on the watcher is told of each call; None: no more."""
        self._watcher = watcher
        if self._lengths is not None:
            self._lengths.watch(watcher)
            self._generated = self._lengths.source
        else:
            self._generated = None

    def at(self, sizes: tuple[int, ...]) -> None:
        """The next runs have these sizes: the values of `symbols`."""
        self.sizes = sizes

    def has_passed(self) -> bool:
        """Whether the next run checks nothing, since one at its sizes has come to its end."""
        return self._lengths is None or self._lengths.has_passed(self.sizes)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around a run: keeps the pool, if there is one, with as many bytes as the plan needs, and
        likewise the tier; see `Pool.held` and `Tier.held`.
        """
        with ExitStack() as stack:
            pool, most_bytes = self._shrinks or (self.bindings.pool, None)
            if pool is not None:
                stack.enter_context(pool.held(self.bindings.pool_bytes, most_bytes))
            if self._pages is not None:
                stack.enter_context(self._pages.held(self._kept_bytes))
            if self._tier is not None:
                tier, size_bytes = self._tier
                stack.enter_context(tier.held(size_bytes))
            stack.callback(settle)
            yield

    def run(self, inputs: list[Any]) -> Outgoing:
        """What `Bindings.outgoing` says; None for what was left out.

        `run_checked` comes first; both run inside `held`.

        Args:
            inputs: values of `Program.referenced`, then of `Program.constants`, in their order.
                The list is emptied, so that what nothing else holds is gone after its last use.
        """
        assert self.generated is not None, "the first run is checked"
        self._ran = self.generated if self._lengths is None else self._lengths.at(self.sizes)
        if self._graph is not None and self._watcher is None:
            try:
                return self._graph.run(self.generated.run, inputs)
            except RecordingFailed as error:
                raise self._unrecordable(error.__cause__ or error) from error.__cause__
        with nullcontext() if self._streams is None else self._streams.entered():
            outgoing = self._ran.run(inputs)
        if self._lengths is not None:
            self._lengths.passed(self.sizes)
        return outgoing

    def forget_graph(self) -> None:
        """Frees the CUDA graph, if there is one, and its memory."""
        if self._graph is not None:
            self._graph.forget()

    def _unrecordable(self, error: BaseException) -> ExecutionError:
        """What to raise where a run could not be recorded."""
        failure = self.failure(error)
        where = "" if failure is None else f"{failure.call.name} at {failure.call.source}: "
        return ExecutionError(
            f"the step cannot be recorded as a CUDA graph: {where}{error}. Nothing has been "
            "updated by this call; leave cuda_graph= out",
            code="cuda_graph",
            operator=None if failure is None else failure.call.name,
            source=None if failure is None else str(failure.call.source),
        )

    def run_checked(self, inputs: list[Any]) -> Outgoing:
        """As `run`, comparing shape, strides, dtype, device and storage of every result with the
        program.

        Raises:
            ExecutionError: a kernel does something on real tensors that it did not do on fake ones.
        """
        if self._symbols:
            return self._run_resized(inputs)
        outgoing, self.is_checked = self._run_by_calls(inputs)
        return outgoing

    @property
    def generated(self) -> GeneratedSource | None:
        """What later runs execute; None before the checked run. It is made when it is first asked
        for, since the plan of a first step seldom runs again.
        """
        if self._generated is None and self.is_checked:
            self._generated = GeneratedSource(
                self.bindings, self._plan, self._streams, self._watcher
            )
        return self._generated

    def parts(self, inputs: list[Any]) -> Generator[list[Any], list[Any], Outgoing]:
        """As `run`, for a program with barriers; the first run is checked. At each barrier it gives
        the values of the barrier's arguments, and waits for what is to stand in their place,
        followed by the inputs that the barrier brings.
        """
        if self.generated is not None:
            self._ran = self.generated
            outgoing: Any = self.generated.run(inputs)
            result: Outgoing = (yield from outgoing) if isgenerator(outgoing) else outgoing
            return result
        result, _ = yield from self._by_calls(inputs)
        self.is_checked = True
        return result

    def _run_by_calls(self, inputs: list[Any]) -> tuple[Outgoing, bool]:
        """What a checked run gives, and whether it has left out no call."""
        calls = self._by_calls(inputs)
        try:
            while True:
                next(calls)
        except StopIteration as end:
            result: tuple[Outgoing, bool] = end.value
            return result

    def _by_calls(
        self, inputs: list[Any]
    ) -> Generator[list[Any], list[Any], tuple[Outgoing, bool]]:
        """The same, call by call; see `parts`."""
        bindings = self.bindings
        check = Check(self.program)
        bindings.bind()
        values: dict[int, Any] = {
            **bindings.views,
            **dict(zip(bindings.input_slots(), inputs, strict=True)),
        }
        inputs.clear()
        for slot in bindings.input_slots():
            check.note(slot, values[slot])
        if bindings.poison:
            bindings.range(None).fill_(POISON)
        is_complete = True
        for step, index in enumerate(bindings.order):
            call = self.program.calls[index]
            if is_barrier(call.target):
                slots = [*(ref.slot for ref in call.args), *call.outputs]
                gets = yield [values[ref.slot] for ref in call.args]
                for slot, value in zip(slots, gets, strict=True):
                    if slot not in bindings.views:
                        values[slot] = value
                        check.note(slot, value)
                gets.clear()  # so that what dies in the calls to come is freed
                value = None
                check.forget_generator()  # Python may have drawn, or set its state
                self._forget(step, index, values)
                continue
            try:
                if call.skip_if is None or not values[call.skip_if]:
                    self._run_one(index, call, values, check)
                    if self._watcher is not None:
                        self._watcher.note(
                            index, [values[slot] for slot in self._watcher.slots(index)]
                        )
                else:
                    is_complete = False
            except BaseException as error:
                error._roam_failure = Failure(step, call)  # type: ignore[attr-defined]
                raise
            self._forget(step, index, values)
        values.update((slot, None) for slot in bindings.perhaps_missing() if slot not in values)
        return bindings.outgoing(lambda ref: values[ref.slot]), is_complete

    def _run_resized(self, inputs: list[Any]) -> Outgoing:
        """The first run, of the program at its sizes, in the places that it has by the plan."""
        bindings = self.bindings
        program = resized.at(self.program, dict(zip(self._symbols, self.sizes, strict=True)))
        first = Executor(
            program,
            bindings.placed,
            self._plan,
            pool=bindings.pool,
            poison=bindings.poison,
            proven=self._proven,
        )
        first.watch(self._watcher)
        outgoing, self.is_checked = first._run_by_calls(inputs)
        bindings.refused |= first.bindings.refused
        if self.is_checked:
            bindings.bind()
            self._lengths = Lengths(bindings, self._plan, self._symbols, self._watcher)
            self._generated = self._lengths.source
        return outgoing

    def _forget(self, step: int, index: int, values: dict[int, Any]) -> None:
        """Lets go of what dies at a step."""
        for storage, slots in self.bindings.dying[step].items():
            if storage not in self.bindings.offsets:
                for slot in slots:
                    values.pop(slot, None)
            elif self.bindings.is_poisoned(storage, index):
                self.bindings.range(storage).fill_(POISON)

    def _run_one(self, index: int, call: Call, values: dict[int, Any], check: Check) -> None:
        way = self.bindings.way(index)
        check.before(
            call,
            values,
            {self.bindings.taken.get(storage, -1) for storage in self.bindings.made(index)},
        )
        if way == "write":
            self._write(index, call, values, check)
            return
        held = {
            slot: self.bindings.views[slot] for slot in call.outputs if slot in self.bindings.views
        }
        if way == "view" and call.target is torch.ops.aten.as_strided.default:
            return  # its offset counts from the start of a storage, which here is the pool's
        with learning(self.program, call, self.news):
            call.run(values)
        check.after(index, call, values, held)
        for slot, place in held.items():
            if way == "copy_in":
                place.copy_(values[slot])
            values[slot] = place

    def _write(self, index: int, call: Call, values: dict[int, Any], check: Check) -> None:
        """Runs a call by its placed kernel, and sees to it that the results are where they were
        wanted.
        """
        outs = []
        for slot in call.outputs:
            old = self.bindings.donor(index, slot)  # type: ignore[arg-type]
            if slot not in self.bindings.views:
                values[slot] = self.bindings.empty(slot) if old is None else values[old]  # type: ignore[index, arg-type]
                check.note(slot, values[slot])  # type: ignore[index, arg-type]
            outs.append(values[slot])  # type: ignore[index]
        places = [(out.data_ptr(), out.shape, out.stride()) for out in outs]
        args, kwargs = (
            substitute(item, lambda ref: values[ref.slot]) for item in (call.args, call.kwargs)
        )
        expected = None if self._proven else self._as_ever(call, args, kwargs)
        function, args, kwargs = self.bindings.placement(index).call(args, kwargs, outs)
        function(*args, **kwargs)
        if [(out.data_ptr(), out.shape, out.stride()) for out in outs] != places:
            check.differs(call, "its kernel did not keep the memory that it was given")
        check.unchanged(call)
        if expected is not None and differ(outs, expected):
            self.bindings.refused.add(index)
            for out, result in zip(outs, expected, strict=True):
                out.copy_(result)

    def _as_ever(self, call: Call, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...] | None:
        """What the call returns in the ordinary way. Random generators are put back."""
        if isinstance(call.target, (Fetch, Load)) or call.target.name() in UNINITIALIZED:
            return None
        devices = {
            meta.device
            for slot in call.outputs
            if slot is not None and (meta := self.program.slots[slot])
        }
        given = [
            (value, value.get_state())
            for value in (*args, *kwargs.values())
            if isinstance(value, torch.Generator)
        ]
        with torch.random.fork_rng(
            [device for device in devices if device.type == "cuda"],
            enabled=call.random and not given,
        ):
            result = call.target(*args, **kwargs)
        for generator, state in given:
            generator.set_state(state)
        return tuple(result) if call.returns_sequence else (result,)

    def failure(self, error: BaseException) -> Failure | None:
        """Which call an exception from `run` or `run_checked` comes from; None if from none."""
        known: Failure | None = getattr(error, "_roam_failure", None)
        if known is not None:
            return known
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            if self._ran is not None and trace.tb_frame.f_code is self._ran.code:
                step = self._ran.steps[trace.tb_lineno or 0]
                if step >= 0:
                    return Failure(step, self.program.calls[self.bindings.order[step]])
            trace = trace.tb_next
        return None

    def changed_before(self, failure: Failure) -> list[str]:
        """Paths of the references that the calls up to and with the failing one write to."""
        storage_of = self.program.storage_of
        references = {
            storage_of(slot): reference.path for reference, slot in self._referenced_tensors()
        }
        changed: dict[str, None] = {}
        for index in self.bindings.order[: failure.step + 1]:
            for slot in self.program.calls[index].mutates:
                path = references.get(self.program.slots[slot].storage)  # type: ignore[union-attr]
                if path is not None:
                    changed[path] = None
        return list(changed)

    def missing_before(self, failure: Failure) -> list[Call] | None:
        """Calls that write to tensors from before the step, and that eager PyTorch, in which this
        call fails too, has run by then, while the plan has not. None if running these would not
        leave those tensors and the random generators as eager PyTorch does.

        Whether another call that has not run yet would fail first, nobody knows. So between it and
        the failing one no call may write to such a tensor or draw a number.
        """
        program, done = self.program, set(self.bindings.order[: failure.step])
        failed = self.bindings.order[failure.step]
        given = {slot for _, slot in self._referenced_tensors()}
        there = set(map(program.storage_of, given))
        lasting = {
            index
            for index, call in enumerate(program.calls)
            if call.random or not there.isdisjoint(map(program.storage_of, call.mutates))
        }
        if failed in lasting or any(index > failed for index in done & lasting):
            return None
        missing = [index for index in range(failed) if index in lasting - done]
        unsure = next(
            (
                index
                for index in range(failed)
                if index not in done and index not in lasting and not _is_view(program, index)
            ),
            failed,
        )
        if any(unsure < index < failed for index in lasting):
            return None
        calls = [program.calls[index] for index in missing]
        are_sure = all(
            call.target in _NEVER_FAIL and given.issuperset(call.refs()) for call in calls
        )
        return calls if are_sure else None

    def _referenced_tensors(self) -> list[tuple[Any, int]]:
        return [
            (reference, slot)
            for reference, slot in self.program.referenced
            if self.program.slots[slot] is not None
        ]


def _is_view(program: Program, index: int) -> bool:
    """Whether a call does nothing but make views, which depends on shapes alone."""
    call = program.calls[index]
    return not call.mutates and all(
        slot is not None
        and program.slots[slot] is not None
        and program.storages[program.storage_of(slot)].creator != index
        for slot in call.outputs
    )
