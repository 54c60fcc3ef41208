"""Records a call that has no plan, or has left it.

Within a limit its operators compute nothing until Python asks for a value, or the call ends. What
has been issued by then is one program, a *segment*. It is planned like any other, so that the limit
holds. What Python holds after a segment is not kept where the limit has no room for it: the next
segment makes it again. Without a limit operators run where they stand.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from roam.errors import CaptureError, ExecutionError, PlanError
from roam.interrupts import interrupts_wait
from roam.program.ir import Call, Ref, TensorMeta, refs, substitute
from roam.program.operators import is_foreign
from roam.program.random_states import EXACT
from roam.program.repeatable import is_exact
from roam.program.replay import generator_state, state_bytes
from roam.runtime.beside.draws import Draws
from roam.runtime.beside.placeholders import (
    GONE,
    UNREAD,
    WeakStorage,
    empty,
    fill,
    is_exposed,
    is_unread,
    note_known,
    note_sharing,
    own,
    placeholder,
    tensor_in,
)
from roam.runtime.beside.planned import Planned, kernel_failed, kernels_alone
from roam.runtime.beside.recording import (
    Entry,
    Made,
    Recorder,
    Recording,
    Seen,
    at_path,
    path_to,
    tensors_in,
)
from roam.runtime.beside.script import (
    BOUNDS,
    SMALL_BYTES,
    Script,
    is_in_range,
    leaf_at,
    numbers_of,
    script_of,
    slots_of,
)
from roam.torch_compat.private import (
    TENSOR_DATA,
    FakeTensor,
    allow_access,
    disable_current_modes,
    forbid_access,
    schema_of,
    storage_of,
    storage_pointer,
    storage_uses,
    version_of,
)
from roam.tracing.fake_kernels.cache import FakeKernels, Remembered
from roam.tracing.fake_kernels.meta_corrections import bytes_at_least, without_masked
from roam.tracing.fake_kernels.tensors import Maker
from roam.tracing.fakes.fake_mode import new_mode, quiet_fakes
from roam.tracing.recording.kernel_facts import facts_of
from roam.tracing.source_location import Frames, calls_unseen


class Plan(Protocol):
    """Plans a segment."""

    def __call__(
        self,
        script: Script,
        other_bytes: int,
        so_far: Callable[[], Script] | None,
        *,
        is_last: bool,
    ) -> Planned:
        """A plan within the limit.

        Args:
            script: the segment's.
            other_bytes: what the step has in memory that the segment does not use.
            so_far: makes the script of all that the call has issued, where the segment is less.
            is_last: whether nothing that takes less is tried.

        Raises:
            PlanError: there is none, or none was found.
        """


class Begun(NamedTuple):
    """How far a call has come that has followed a script.

    Attributes:
        recording: what it has done.
        runs: for each entry, whether it has run where it stands.
        start: the first entry that the plan has not run.
        parts: how many parts of the plan have run.
        tensors: for each slot, its tensor.
        numbers: of storages, by their pointers.
        storages: by their numbers.
        filled: those that the plan has made.
        pooled: those whose memory is the pool's.
        held: what waiting kernels use that has memory, by the numbers of storages.
        forbidden: storages that nothing may look at.
        exposed: as `Lazy` has them.
        assigned: as `Lazy` has them.
    """

    recording: Recording
    runs: Sequence[bool]
    start: int
    parts: int
    tensors: Sequence[weakref.ref[torch.Tensor] | None]
    numbers: dict[int, int]
    storages: dict[int, WeakStorage]
    filled: set[int]
    pooled: set[int]
    held: dict[int, torch.Tensor]
    forbidden: set[int]
    exposed: list[tuple[int, weakref.ref[Any] | None]]
    assigned: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor | None]]


class Lazy(Recorder):
    """Records one call, and runs it segment by segment."""

    def __init__(
        self,
        frames: Frames,
        plan: Plan | None,
        remembered: Remembered,
        persistent: Callable[[], dict[int, WeakStorage]],
        *,
        stops: bool,
    ) -> None:
        """Begins a call.

        Args:
            plan: plans a segment; None if operators need not wait.
            remembered: what fake kernels have given in earlier calls.
            persistent: gives the storages, by their pointers, that what the call has not done yet
                is likely to use.
        """
        super().__init__(frames, stops=stops)
        self._persistent = persistent
        self._known: dict[int, WeakStorage] | None = None
        self._plan = plan
        self._kernels = FakeKernels(asks=True, remembered=remembered)
        self._mode, self._maker = new_mode(), Maker()
        self._fakes: dict[int, FakeTensor] = {}
        """For each slot that an operator was given, what fake kernels are given."""
        self._signatures: dict[int, int] = {}
        self._metas: dict[int, Any] = {}
        """For each storage, the one of its fakes."""
        self._waiting: list[int] = []
        """The entries that have not run."""
        self._is_waiting = False
        """Whether a kernel is among them."""
        self._at_once: set[int] = set()
        """Entries of small operators that ran where they stand."""
        self._segments = 0
        self._filled: set[int] = set()
        """Storages that the call has made and that have memory."""
        self._new: set[int] = set()
        """Storages that waiting kernels make."""
        self._used: set[int] = set()
        """Storages that waiting kernels read or write to."""
        self._dirty: set[int] = set()
        """Storages that they make or write to."""
        self._draws = False
        self._held: dict[int, torch.Tensor] = {}
        """Of storages that have memory and for which kernels wait: a tensor in each."""
        self._behind: set[int] = set()
        """Storages of which those are made, at some remove, that Python holds and that have no
        memory."""
        self._written: dict[int, list[int]] = {}
        """For each storage, the entries that have written to it."""
        self._states: dict[int, torch.Tensor] = {}
        """For each entry that has drawn random numbers and may do so again: the state for it."""
        self._exposed: list[tuple[int, weakref.ref[Any] | None]] = []
        """Storages whose memory Python has got, with what it has got it by."""
        self._forbidden: set[int] = set()
        self._assigned: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = {}
        """Tensors that have got other data, with what they had before they got data that is still
        to be computed."""
        self._way = ""
        """What has become of the last operator."""
        self._runs_now = plan is None
        """Whether all that comes runs where it stands."""
        self._default = torch.get_default_dtype()
        """That with which operators wait."""
        self._first_again = 0
        """Operators before this one ran with other kernels than those that would run now."""
        self._is_issuing = False
        """Whether the last entry has no results yet."""
        self._is_over = False

    def follow(self, begun: Begun) -> None:
        """Goes on with a call that has followed a script so far."""
        self.recording = begun.recording
        storages, slots = self.recording.storages, self.recording.slots
        count = len(storages)
        gone = WeakStorage(torch.UntypedStorage(0))
        self._storages = [begun.storages.get(number, gone) for number in range(count)]
        self._living = {number for number, seen in enumerate(storages) if seen.creator >= 0}
        self._numbers = {one: number for one, number in begun.numbers.items() if number < count}
        self._weak = [one or GONE for one in begun.tensors[: len(slots)]]
        self._ids = {
            id(tensor): slot
            for slot, known in enumerate(self._weak)
            if (tensor := known()) is not None
        }
        self._parameters = set(self.recording.parameters)
        self._forbidden = {number for number in begun.forbidden if number < count}
        self._held, self._segments = begun.held, begun.parts
        self._exposed, self._assigned = begun.exposed, begun.assigned
        self._filled = {number for number in begun.filled if number < count}
        for index, entry in enumerate(self.recording.entries):
            new = {number for number in self._of(entry) if storages[number].creator == index}
            written = {slots[slot].storage for slot in entry.writes}
            if entry.kind not in ("kernel", "view") or begun.runs[index]:
                self._filled |= new
                if entry.kind == "kernel":
                    self._at_once.add(index)
            elif index >= begun.start:
                self._waiting.append(index)
                if entry.kind == "kernel":
                    self._is_waiting = True
                    self._new |= new
                    self._used |= self._of(entry)
                    self._dirty |= new | written
                    self._draws = self._draws or facts_of(entry.func).is_random
                    continue
            if any(storages[number].creator < 0 for number in written):
                self._has_written = True
        if self._plan is not None:
            assert not begun.pooled, "plans within a limit hand out nothing that lies in the pool"
            return
        for number in begun.pooled:
            if not self._storages[number].expired():
                own(self._storages[number].get())
                note_known(self._storages[number].get())
        self._runs_now = False
        self.now()

    # -- operators

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self.failure is None and is_unread(
            sys.exc_info()[1]
        ):  # which the step's own code has caught
            self.failure = ExecutionError(UNREAD, code="unread")
        if self.failure is not None:
            raise self.failure
        return super().__torch_dispatch__(func, types, args, kwargs)

    def fail(self, message: str, code: str, func: Any = None, *, is_unseen: bool = False) -> None:
        """As for all recordings; what has been issued runs, if the call goes on."""
        try:
            super().fail(message, code, func, is_unseen=is_unseen)
        finally:
            if self.stopped is None:
                self.now()

    def unsettled(self, failed: CaptureError) -> None:
        """As for all recordings; what has been issued runs."""
        super().unsettled(failed)
        self.now()

    def now(self) -> None:
        """From here on operators run where they stand."""
        if not self._runs_now:
            self.advance(is_end=True)
            self._runs_now = True

    def _run(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._is_issuing = True
        try:
            return self._issue(entry, args, kwargs)
        finally:
            self._is_issuing = False

    def _issue(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._way = "now"
        func, facts = entry.func, facts_of(entry.func)
        if self._runs_now:
            return super()._run(entry, args, kwargs)
        if torch.get_default_dtype() is not self._default:  # by which some operators compute
            self.switching()
            self._default = torch.get_default_dtype()
        if entry.kind == "now":
            return self._value(entry, args, kwargs)
        if facts.reshapes_in_place or not facts.computes:
            self._way = "view"
            return func(*args, **kwargs)
        if not self._has_own_memory(entry):
            return self._alone(entry, args, kwargs)
        fakes = self._on_fakes(entry)
        if fakes is NotImplemented:
            return self._alone(entry, args, kwargs)
        if self._is_small(entry, fakes):
            self._way = "at once"
            self._allow(self._stores(entry))
            return super()._run(entry, args, kwargs)
        if not self._is_in_range(entry, args):
            return self._alone(entry, args, kwargs)
        self._way = "waits"
        tensors = (*tensors_in(args), *tensors_in(kwargs.values()))
        for slot, tensor in zip(_given(entry), tensors, strict=True):
            self._wait_with(slot, tensor, slot in entry.writes)
        self._draws = self._draws or facts.is_random
        return self._placeholders(entry, fakes, args, kwargs)

    def _returned(self, entry: Entry) -> None:
        """Notes what is to be done with an operator whose results have been noted."""
        index = len(self.recording.entries) - 1
        made = {
            self.recording.slots[one.slot].storage for one in entry.results if type(one) is Made
        }
        new = {one for one in made if self.recording.storages[one].creator == index}
        if self._way in ("waits", "view"):
            self._waiting.append(index)
        if self._way == "waits":
            self._is_waiting = True
            self._new |= new
            self._used |= new
            self._dirty |= new
            return
        self._filled |= new
        if self._way == "at once":
            self._at_once.add(index)

    def _of(self, entry: Entry) -> set[int]:
        """The storages that an operator is given, and those that it makes."""
        return {self.recording.slots[slot].storage for slot in slots_of(entry)}

    def _stores(self, entry: Entry) -> set[int]:
        """The storages that an operator is given."""
        return {self.recording.slots[slot].storage for slot in _given(entry)}

    def _value(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        """What an operator returns that gives Python a value, when it can."""
        stores = self._stores(entry)
        written = self._written_by(entry)
        if (
            (stores & self._dirty or written & (self._used | self._behind))
            or (self._draws and is_foreign(entry.func))
            or self._lacking(stores)
        ):
            self.advance(stores, written)
        self._allow(stores)
        return super()._run(entry, args, kwargs)

    def _alone(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        """What an operator returns that runs where it stands."""
        stores = self._stores(entry)
        self.advance(stores, self._written_by(entry))
        self._allow(stores)
        return super()._run(entry, args, kwargs)

    def _written_by(self, entry: Entry) -> set[int]:
        """The storages that an operator changes. One of others may change all that it is given."""
        if is_foreign(entry.func):
            return self._stores(entry)
        return {self.recording.slots[slot].storage for slot in entry.writes}

    def _has_own_memory(self, entry: Entry) -> bool:
        """Whether nobody but PyTorch has the memory of what an operator uses: then it may wait."""
        self._exposed = [one for one in self._exposed if one[1] is None or one[1]() is not None]
        stores = self._stores(entry)
        if any(number in stores for number, _ in self._exposed):
            return False
        return not any(
            self.recording.storages[number].creator < 0 and self._is_others(number)
            for number in stores
        )

    def _is_small(self, entry: Entry, fakes: Any) -> bool:
        """Whether an operator is as small as those that run where they stand, and can."""
        slots, storages = self.recording.slots, self.recording.storages
        stores, written = self._stores(entry), self._written_by(entry)
        return (
            not facts_of(entry.func).is_random
            and not stores & self._dirty
            and not written & (self._used | self._behind)
            and all(
                storages[slots[slot].storage].size_bytes <= SMALL_BYTES
                and slots[slot].device.type == "cpu"
                for slot in _given(entry)
            )
            and all(
                one.untyped_storage().nbytes() <= SMALL_BYTES and one.device.type == "cpu"
                for one in _flat(fakes)
                if isinstance(one, torch.Tensor)
            )
            and not self._lacking(stores)
        )

    def _is_in_range(self, entry: Entry, args: Any) -> bool:
        """Whether an operator fails for none of its indices, as far as these are there."""
        bound = BOUNDS.get(entry.func)
        if bound is None or len(entry.args) <= bound[0]:
            return True
        indices = entry.args[bound[0]]
        if type(indices) is not Ref:
            return True
        meta = self.recording.slots[indices.slot]
        if (
            meta.device.type != "cpu"
            or meta.storage in self._dirty
            or self._lacking({meta.storage})
        ):
            return True
        with self._kernels_run():
            self._allow({meta.storage})
            return is_in_range(entry.func, bound, args)

    # -- fake kernels

    def _on_fakes(self, entry: Entry) -> Any:
        """What an operator returns on fake tensors; NotImplemented if that is not known."""
        if any(
            self.recording.slots[slot].is_conj or self.recording.slots[slot].is_neg
            for slot in _given(entry)
        ):
            return NotImplemented
        with self._kernels_run(), quiet_fakes():
            given = [self._fake(slot) for slot in _given(entry)]
            args, kwargs = (
                substitute(value, lambda ref: self._fakes[ref.slot])
                for value in (entry.args, entry.kwargs)
            )
            try:
                with self._mode if not given else nullcontext():
                    result = self._kernels.run(
                        entry.func,
                        (args, kwargs),
                        given,
                        (entry.args, entry.kwargs),
                        self._signatures,
                    )
            except Exception:  # noqa: BLE001 - then the real kernel says what is wrong
                return NotImplemented
        stores = {storage_pointer(storage_of(one)) for one in given}
        for one in _flat(result):
            if isinstance(one, (tuple, list)):
                return NotImplemented
            if not isinstance(one, torch.Tensor) or any(one is fake for fake in given):
                continue
            if (
                one.layout is not torch.strided
                or one.is_conj()
                or one.is_neg()
                or storage_pointer(storage_of(one)) in stores
            ):
                return NotImplemented
        return result

    def _new_storage(self, tensor: torch.Tensor, creator: int, name: str) -> int:
        if creator < 0:
            try:
                storage_of(tensor).data_ptr()
            except RuntimeError:
                self.failure = ExecutionError(
                    "it uses what an earlier call was to compute, which has failed; load the model's and the optimizer's state "
                    "again, or make them anew",
                    code="torn",
                )
                raise self.failure from None
        return super()._new_storage(tensor, creator, name)

    def _fake(self, slot: int) -> FakeTensor:
        known = self._fakes.get(slot)
        if known is None:
            meta = self.recording.slots[slot]
            storage = self._metas.get(meta.storage)
            if storage is None:
                size_bytes = self.recording.storages[meta.storage].size_bytes
                storage = torch.UntypedStorage(size_bytes, device="meta")
                self._metas[meta.storage] = storage
            tensor = torch.empty(0, dtype=meta.dtype, device="meta")
            tensor.set_(storage, meta.offset, meta.shape, meta.stride)
            known = self._fakes[slot] = self._maker.make(self._mode, tensor, meta.device)
            self._signatures[slot] = self._kernels.signature(meta, known)
        return known

    def _placeholders(self, entry: Entry, fakes: Any, args: Any, kwargs: Any) -> Any:
        """Tensors without memory like fake ones; arguments stand for their fakes."""
        fake_args, fake_kwargs = (
            substitute(value, lambda ref: self._fakes[ref.slot])
            for value in (entry.args, entry.kwargs)
        )
        given = [*tensors_in(args), *tensors_in(kwargs.values())]
        storages: dict[int, torch.UntypedStorage] = {}

        def real(position: int, one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            path = path_to(one, fake_args, fake_kwargs)
            if path is not None:
                return at_path(path, args, kwargs)
            storage = storage_of(one)
            meta = TensorMeta(
                tuple(one.shape), one.stride(), int(one.storage_offset()), one.dtype, one.device, -1
            )
            known = storages.get(storage_pointer(storage))
            if known is not None:
                return tensor_in(known, meta)
            size_bytes = max(storage.nbytes(), bytes_at_least(entry.func, given, position, one))
            made, storages[storage_pointer(storage)] = placeholder(meta, size_bytes)
            return made

        with self._kernels_run():
            flat = _flat(fakes)
            if facts_of(entry.func).is_masked:
                flat = without_masked(entry.func, args, kwargs, flat)
            made = [real(position, one) for position, one in enumerate(flat)]
        return type(fakes)(made) if isinstance(fakes, (tuple, list)) else made[0]

    def _wait_with(self, slot: int, tensor: torch.Tensor, is_written: bool) -> None:
        """A kernel waits that uses a tensor."""
        number = self.recording.slots[slot].storage
        self._used.add(number)
        if is_written:
            self._dirty.add(number)
        seen = self.recording.storages[number]
        if number in self._new or number in self._held:
            pass
        elif seen.creator < 0 or number in self._filled:
            self._held[number] = TENSOR_DATA.__get__(tensor)
        if (
            (seen.creator < 0 or (number in self._filled and is_written))
            and number not in self._forbidden
            and (seen.size_bytes > SMALL_BYTES or is_written)
        ):
            self._forbidden.add(number)
            forbid_access(storage_pointer(storage_of(tensor)), UNREAD)

    def _allow(self, numbers: Collection[int]) -> None:
        """Lets Python look at memory."""
        for number in self._forbidden.intersection(numbers):
            if not self._storages[number].expired():
                allow_access(storage_pointer(self._storages[number].get()))
            self._forbidden.discard(number)

    @contextmanager
    def _kernels_run(self) -> Iterator[None]:
        """Around what is no Python of the step's."""
        was, self.is_busy = self.is_busy, True
        try:
            with interrupts_wait(), disable_current_modes(), kernels_alone(("cpu", "cuda")):
                yield
        finally:
            self.is_busy = was

    # -- what Python does

    def settle(self, tensor: torch.Tensor | None) -> None:
        """Python looks at a tensor's memory, or at random generators (None)."""
        if self.stopped is None and self.recording.failed is None:
            super().settle(tensor)
        if tensor is None:
            if self._draws:
                self.advance()
            return
        number = self._numbers.get(storage_pointer(storage_of(tensor)))
        if number is None:
            return
        if number in self._used or number in self._behind or self._lacking({number}):
            self.advance({number}, {number})
        self._allow({number})

    def threaded(self) -> None:
        """Python is about to give another thread something to do."""
        self.now()

    def switching(self) -> None:
        """How kernels compute is about to be changed: what is not kept cannot be made later."""
        self.advance(self._alive())
        self._first_again = len(self.recording.entries) - self._is_issuing

    def exposed(self, tensor: torch.Tensor, by: Any) -> None:
        """Python has got a tensor's memory; it may write to it for as long as it has `by`."""
        number = self._numbers.get(storage_pointer(storage_of(tensor)))
        if number is not None:
            self._exposed.append((number, weakref.ref(by) if by is not None else None))

    def aliased(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """A tensor with the memory of another one has been made without an operator."""
        if not storage_of(tensor).resizable():
            note_sharing(tensor, alias)

    def assigned(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """A tensor gets the data of another one; kernels that wait have the old data."""
        super().assigned(tensor, data)
        note_sharing(tensor, data)
        ref = weakref.ref(tensor)
        number = self._numbers.get(storage_pointer(storage_of(data)))
        _, before = self._assigned.get(id(tensor), (ref, None))
        mine = self._numbers.get(storage_pointer(storage_of(tensor)))
        if before is None and number in self._new and mine not in self._new:
            before = TENSOR_DATA.__get__(tensor)
        self._assigned[id(tensor)] = ref, before

    def raised(self, error: BaseException) -> None:
        """The step's own code has raised: as in eager PyTorch, what came before runs."""
        self.advance(is_end=True)

    def unread(self) -> None:
        """A read of memory that no kernel has written to yet has failed in the step's own code."""
        self.failure = self.failure or ExecutionError(UNREAD, code="unread")

    def finish(self) -> None:
        """The function has returned: runs the rest.

        Raises:
            ExecutionError: a kernel has failed, or nothing within the limit was found for it after
                other kernels had changed something.
            PlanError: nothing within the limit was found, and nothing has been changed.
        """
        failure = self.failure or self.stopped
        if failure is not None:  # which the step's own code has caught
            raise failure
        self._is_over = True
        self.advance(is_end=True)

    def release(self) -> None:
        """The call is over."""
        self._allow(set(self._forbidden))
        if self.failure is not None:
            for ref, before in self._assigned.values():
                tensor = ref()
                if tensor is None or before is None:
                    continue
                try:
                    storage_of(tensor).data_ptr()
                except RuntimeError:
                    TENSOR_DATA.__set__(tensor, before)
        self._held.clear()

    # -- segments

    def _lacking(self, numbers: Iterable[int]) -> set[int]:
        """Those of the storages that a segment has made and not kept."""
        storages, there = self.recording.storages, self._filled | self._new
        return {one for one in numbers if storages[one].creator >= 0 and one not in there}

    def _alive(self) -> frozenset[int]:
        alive, held = super()._alive(), self._held
        ours = {
            number
            for number in alive & held.keys()
            if storage_uses(storage_pointer(storage_of(held[number]))) < 2
        }
        return alive - ours

    def advance(
        self, asked: Collection[int] = (), written: Collection[int] = (), *, is_end: bool = False
    ) -> None:
        """Runs what has been issued, and makes what is asked for, and what is not kept and made of
        storages that are about to be written to.
        """
        if self.failure is not None or self._runs_now:
            return
        alive = self._alive()
        lacking = self._lacking(alive | self._used | set(asked))
        wanted = lacking & (alive if is_end else set(asked))
        wanted |= self._made_of(lacking & alive, set(written))
        if not self._is_waiting and not wanted:
            return
        with self._kernels_run(), calls_unseen(), self._as_issued():
            wanted |= lacking & (self._used | self._made_of(lacking & alive, self._dirty))
            try:
                if self._plan is None:
                    self._run_issued()
                else:
                    self._segment(alive, wanted, set(asked), is_end=is_end)
            except PlanError as error:
                self.failure = error
                if self._has_written:
                    self.torn = [(one, version_of(one)) for one in self._changed()]
                raise
        self._segments += 1
        self._waiting.clear()
        self._is_waiting = self._draws = False
        for numbers in (self._new, self._used, self._dirty):
            numbers.clear()

    @contextmanager
    def _as_issued(self) -> Iterator[None]:
        """The default dtype is that with which operators were issued."""
        now = torch.get_default_dtype()
        torch.set_default_dtype(self._default)
        try:
            yield
        finally:
            torch.set_default_dtype(now)

    def _segment(
        self, alive: frozenset[int], wanted: set[int], asked: set[int], *, is_end: bool
    ) -> None:
        """Runs what waits and what makes the storages `wanted`, and keeps what Python holds. If the
        limit has no room for that, it keeps only what nothing can make again, as long as the call
        goes on, and lets what earlier segments have kept be made again.
        """
        storages, slots = self.recording.storages, self.recording.slots
        there, again = self._made_again(now=True) - asked, self._made_again(now=False) - asked
        ways: list[tuple[list[int], set[int], set[int], set[int]]] = []
        """In which entries run, and which storages are made, kept and freed."""
        for keeps, frees in ((True, False), (False, False), (False, True)):
            freed = there & self._filled if frees else set()
            needs = wanted | freed & (
                self._used | self._made_of(freed, self._dirty) | (alive if is_end else set())
            )
            index = self._entries(needs, freed)
            runs = set(index)
            made = {number for number, seen in enumerate(storages) if seen.creator in runs}
            kept = {
                number
                for number in made & alive
                if number in self._dirty or number not in self._filled - freed
            }
            if not keeps and not is_end:
                kept -= again
            if not ways or freed or kept != ways[-1][2]:
                ways.append((index, made, kept, freed))
        for index, made, kept, freed in ways:
            is_last = freed is ways[-1][3]
            try:
                planned, draws = self._planned(index, kept, freed, is_end=is_end, is_last=is_last)
            except PlanError as error:
                if is_last or not error.code.startswith("memory_"):
                    raise
                continue
            lacking = (self._lacking(alive) | (freed | made) & alive) - kept
            self._allow(set(self._forbidden))
            behind = self._sources(lacking - (self._filled - freed))
            held = {
                number: self._held[number]
                if number in self._held
                else tensor_in(self._storages[number].get(), slots[slot])
                for number, slot in behind.items()
                if storages[number].creator < 0
            }
            for number in freed:
                self._free(number)
            self._execute(planned, draws)
            self._held, self._behind = held, set(behind)
            return

    def _entries(self, needs: set[int], freed: set[int]) -> list[int]:
        """The entries of a segment: those that wait, and those that make what is needed."""
        recording = self.recording
        there = {
            number
            for number in self._filled - freed - self._written.keys()
            if not self._storages[number].expired() or number in self._held
        } | self._new
        found = {
            index
            for index in self._waiting
            if recording.entries[index].kind == "kernel"
            or self._stores(recording.entries[index]) <= self._used
        }
        left, seen = set(needs), set(needs)
        while left:
            for index in self._history(left.pop()):
                found.add(index)
                used = self._of(recording.entries[index])
                more = {one for one in used if recording.storages[one].creator >= 0} - there - seen
                seen |= more
                left |= more
        return sorted(found)

    def _history(self, number: int) -> list[int]:
        """The entries that make a storage what it is."""
        return [self.recording.storages[number].creator, *self._written.get(number, ())]

    def _made_of(self, numbers: Collection[int], written: set[int]) -> set[int]:
        """Those of the storages that are made, at some remove, of what is written to, or by an
        operator of which another result is.
        """
        if not numbers or not written:
            return set()
        users, found, left = self._users(), set[int](), list(written)
        while left:
            number = left.pop()
            for index in users.get(number, ()):
                new = self._made_by(index) - found - {number}
                found |= new
                left += (one for one in new if self.recording.storages[one].creator >= 0)
        return found.intersection(numbers)

    def _users(self) -> dict[int, list[int]]:
        """For each storage, the entries that use, make or change it."""
        users: dict[int, list[int]] = {}
        for index, entry in enumerate(self.recording.entries):
            if entry.kind != "settle":
                for number in self._of(entry):
                    users.setdefault(number, []).append(index)
        return users

    def _made_by(self, index: int) -> set[int]:
        """The storages that an entry makes or writes to."""
        entry, slots = self.recording.entries[index], self.recording.slots
        made = {slots[one.slot].storage for one in entry.results if type(one) is Made}
        return {one for one in made if self.recording.storages[one].creator == index} | {
            slots[slot].storage for slot in entry.writes
        }

    def _sources(self, numbers: Collection[int]) -> dict[int, int]:
        """The storages that these are made of, at some remove, each with a slot."""
        recording = self.recording
        found: dict[int, int] = {}
        left = set(numbers)
        while left:
            history = self._history(left.pop())
            for slot in (one for at in history for one in _given(recording.entries[at])):
                number = recording.slots[slot].storage
                if number not in found:
                    found[number] = slot
                    if recording.storages[number].creator >= 0:
                        left.add(number)
        return found

    def _made_again(self, *, now: bool) -> set[int]:
        """The storages that can be made again: by exact kernels, of what can be made again itself
        or comes from outside and has not changed since it was used.

        Args:
            now: whether they are to be made before what waits changes anything; if not, after all
                that has been issued.
        """
        recording = self.recording
        waits = set(self._waiting) if now else set()
        changed: dict[int, int] = {}
        """For each storage that something may have changed, the last entry that has."""
        self._written = {}
        always = {number for number, _ in self._exposed}
        for index, entry in enumerate(recording.entries):
            written = {recording.slots[slot].storage for slot in entry.writes}
            for number in written:
                self._written.setdefault(number, []).append(index)
            if index in waits:
                continue
            if entry.kind == "settle":
                written = set(entry.args)
            elif is_foreign(entry.func):
                written = self._stores(entry)
            if entry.kind != "kernel":
                always.update(one for one in written if recording.storages[one].creator >= 0)
            changed.update(dict.fromkeys(written, index))
        made = {number for number, one in enumerate(recording.storages) if one.creator >= 0}
        again = made - always
        known: dict[int, bool] = dict.fromkeys(waits, True)

        def may_run(index: int) -> bool:
            if index not in known:
                known[index] = self._runs_again(index) and all(
                    changed.get(one, -1) < index and one not in always and self._is_there(one)
                    for one in self._of(recording.entries[index])
                    if recording.storages[one].creator < 0
                )
            return known[index]

        users = self._users()
        stuck = {
            index
            for index in range(len(recording.entries))
            if self._made_by(index) & made and not may_run(index)
        }
        lost = [*always, *(one for index in stuck for one in self._made_by(index) & made)]
        while lost:
            number = lost.pop()
            again.discard(number)
            for index in users.get(number, ()):
                if index not in waits and index not in stuck:
                    stuck.add(index)
                    lost += self._made_by(index) & again
        return again

    def _runs_again(self, index: int) -> bool:
        """Whether an entry makes the same bits from the same tensors."""
        entry = self.recording.entries[index]
        if entry.kind != "kernel" or index in self._at_once or index < self._first_again:
            return False
        call = Call(entry.func, entry.args, entry.kwargs, (), False, "", entry.source)
        if self._is_drawn_again(index):
            call.state = -1
        return is_exact(call, [self.recording.slots[slot] for slot in slots_of(entry)])

    def _is_drawn_again(self, index: int) -> bool:
        """Whether an entry draws random numbers that can be drawn again from a state."""
        entry = self.recording.entries[index]
        if not self._is_drawing(index) or index in self._states:
            return index in self._states
        device, made_bytes = self._drawn(entry)
        state = state_bytes(device)
        return (
            index in self._waiting
            and schema_of(entry.func).name in EXACT
            and state is not None
            and state < made_bytes
        )

    def _is_drawing(self, index: int) -> bool:
        """Whether an entry draws random numbers. Attention does so only if it has dropout."""
        entry = self.recording.entries[index]
        call = Call(entry.func, entry.args, entry.kwargs, (), False, "", entry.source)
        return facts_of(entry.func).is_random and not is_exact(call, ())

    def _drawn(self, entry: Entry) -> tuple[torch.device, int]:
        """Where a random operator makes or fills tensors, and their bytes."""
        slots = [*(one.slot for one in entry.results if type(one) is Made), *entry.writes]
        metas = [self.recording.slots[slot] for slot in slots]
        numbers = {meta.storage for meta in metas}
        made_bytes = sum(self.recording.storages[number].size_bytes for number in numbers)
        return metas[0].device, made_bytes

    def _is_others(self, number: int) -> bool:
        """Whether others than PyTorch may have the memory of a storage from outside."""
        held = self._held.get(number)
        storage = self._storages[number].get() if held is None else storage_of(held)
        pointer = storage_pointer(storage)
        if self._numbers.get(pointer) != number:
            return True  # what is held is a copy
        if number in self._forbidden:  # PyTorch crashes where it is asked whether that is shared
            allow_access(pointer)
        try:
            return is_exposed(storage, holds=held is not None)
        finally:
            if number in self._forbidden:
                forbid_access(pointer, UNREAD)

    def _is_there(self, number: int) -> bool:
        """Whether a storage from outside will be what it is as long as the call says nothing."""
        is_known = number in self._held or not self._storages[number].expired()
        return is_known and not self._is_others(number)

    def _planned(
        self, index: list[int], kept: set[int], freed: set[int], *, is_end: bool, is_last: bool
    ) -> tuple[Planned, Draws]:
        """A plan of these entries that keeps these storages."""
        recording, plan = self.recording, self._plan
        assert plan is not None, "only then calls run in segments"
        if self._is_over and not self._segments and recording.failed is None:
            whole = self._whole(index, kept)
            if whole is not None:
                other_bytes = self._other_bytes(whole, freed)
                self.planned = plan(whole, other_bytes, None, is_last=is_last)
                return self.planned, Draws()
        number_of = {at: number for number, at in enumerate(index)}
        entries = [recording.entries[at] for at in index]
        used = set().union(*map(self._of, entries))
        part = Recording(
            entries=entries,
            slots=recording.slots,
            storages=[
                Seen(seen.size_bytes, number_of.get(seen.creator, -1), seen.name)
                if number in used
                else Seen(0, -1, seen.name)
                for number, seen in enumerate(recording.storages)
            ],
            parameters=frozenset(self._parameters),
        )
        alive = [*[frozenset[int]()] * len(index), frozenset(kept)]
        script = script_of(part, alive, set(), holds_all=True, runs_small=False)
        draws = Draws()
        for place, at in enumerate(index):
            if self._is_drawing(at):
                device, _ = self._drawn(recording.entries[at])
                is_again: bool | None = at not in self._waiting
                if not is_again and (is_end or not self._is_drawn_again(at)):
                    is_again = None
                draws.add(at, script.calls[place], device, is_again)
        draws.put_into(script)
        other_bytes = self._other_bytes(script, freed)
        planned = plan(
            script, other_bytes, self._so_far if self._segments else None, is_last=is_last
        )
        return planned, draws

    def _so_far(self) -> Script:
        """The script of all that the call has issued."""
        recording = self.recording
        entries = recording.entries[: len(recording.entries) - self._is_issuing]
        part = Recording(entries, recording.slots, recording.storages, recording.met)
        alive = [*(entry.alive for entry in entries), self._alive()]
        return script_of(part, alive, set(), holds_all=True)

    def _whole(self, index: list[int], kept: set[int]) -> Script | None:
        """The script of all of the call; None if the call has not run as that would."""
        recording = self.recording
        kernels = {at for at, entry in enumerate(recording.entries) if entry.kind == "kernel"}
        if kernels - self._at_once != kernels & set(index):
            return None
        recording.parameters = frozenset(self._parameters)
        alive = [*(entry.alive for entry in recording.entries), frozenset(kept)]
        script = script_of(recording, alive, numbers_of(recording), holds_all=True)
        is_alike = len(script.barriers) == 1 and all(
            script.runs[at] is (at in self._at_once) for at in kernels
        )
        return script if is_alike else None

    def _other_bytes(self, script: Script, freed: set[int]) -> int:
        """What the step has in memory that a segment does not use."""
        slots = (slot for _, slot in script.program.referenced)
        used = {meta.storage for slot in slots if (meta := script.slots[slot]) is not None}
        here = sum(
            seen.size_bytes
            for number, seen in enumerate(self.recording.storages)
            if number not in used | freed
            and (seen.creator < 0 or number in self._filled)
            and not self._storages[number].expired()
        )
        if self._known is None:
            self._known = {} if self._is_over and not self._segments else self._persistent()
        elsewhere = sum(
            storage.get().nbytes()
            for pointer, storage in self._known.items()
            if pointer not in self._numbers and not storage.expired()
        )
        return here + elsewhere + sum(state.nbytes for state in self._states.values())

    def left(self) -> dict[int, WeakStorage]:
        """The storages, by their pointers, that the call has used or made, and that are there when
        it has ended.
        """
        return {
            pointer: self._storages[number]
            for pointer, number in self._numbers.items()
            if not self._storages[number].expired()
        }

    def _execute(self, planned: Planned, draws: Draws) -> None:
        """Runs a segment, and gives placeholders their memory."""
        script, entries = planned.script, self.recording.entries
        live = {slot: leaf_at(entries, place) for place, slot in script.live.items()}
        live.update((slot, self._states[at]) for slot, at in draws.given.items())
        live.update((slot, generator_state(device)) for slot, device in draws.put_back.items())

        def value(slot: int) -> Any:
            if slot in live:
                return live[slot]
            meta = script.slots[slot]
            assert meta is not None, "a tensor"
            held = self._held.get(meta.storage)
            storage = self._storages[meta.storage].get() if held is None else storage_of(held)
            return tensor_in(storage, meta)

        with planned.executor.held():
            inputs = [value(slot) for slot in planned.inputs]
            self._held = {}
            try:
                next(planned.executor.parts(inputs))
            except StopIteration as end:
                outgoing = end.value[0]
            except BaseException as error:
                self._tear(planned.changed_before(error))
                self.failure = planned.failed(error, is_torn=bool(self.torn))
                raise self.failure from error
            else:
                raise AssertionError("a segment has no barrier")
            kept = script.barriers[-1].held
            self._states.update(zip(draws.read, outgoing[len(kept) :], strict=True))
            for slot, result in zip(kept, outgoing, strict=False):
                number = script.storage_of(slot)
                self._filled.add(number)
                if self._storages[number].expired():
                    continue
                place, storage = self._storages[number].get(), storage_of(result)
                if storage_pointer(place) != storage_pointer(storage):
                    fill(place, storage)
                    note_known(place)
        self._has_written = self._has_written or any(
            self.recording.storages[number].creator < 0 for number in script.written
        )

    def _run_issued(self) -> None:
        """Runs what waits as it was issued."""
        recording = self.recording
        entries = {
            at: entry for at in self._waiting if (entry := recording.entries[at]).kind == "kernel"
        }
        last = {number: at for at, entry in entries.items() for number in self._of(entry)}
        alive, held, self._held = self._alive(), self._held, {}
        made: dict[int, torch.UntypedStorage] = {}
        self._allow(set(self._forbidden))

        def value(ref: Ref) -> torch.Tensor:
            meta = recording.slots[ref.slot]
            number = meta.storage
            if number in made:
                return tensor_in(made[number], meta)
            known = held.get(number)
            return tensor_in(
                self._storages[number].get() if known is None else storage_of(known), meta
            )

        def outside(entry: Entry) -> list[int]:
            return [
                slot
                for slot in entry.writes
                if recording.storages[recording.slots[slot].storage].creator < 0
            ]

        for at, entry in entries.items():
            try:
                result = entry.func(
                    *substitute(entry.args, value), **substitute(entry.kwargs, value)
                )
            except Exception as error:
                self._tear(outside(entry))
                self.failure = kernel_failed(
                    error, str(entry.func), str(entry.source), is_torn=bool(self.torn)
                )
                raise self.failure from error
            self._has_written = self._has_written or bool(outside(entry))
            for item, one in zip(_flat(result), entry.results, strict=True):
                if type(one) is Made:
                    made.setdefault(recording.slots[one.slot].storage, storage_of(item))
            result = item = None
            for number in self._of(entry):
                if last[number] == at:
                    held.pop(number, None)
                    if number not in alive:
                        made.pop(number, None)
        for number, storage in made.items():
            self._filled.add(number)
            fill(self._storages[number].get(), storage)
            note_known(self._storages[number].get())

    def _free(self, number: int) -> None:
        """Frees the memory of a storage that can be made again."""
        self._held.pop(number, None)
        self._filled.discard(number)
        if not self._storages[number].expired():
            empty(self._storages[number].get())

    def _tear(self, changed: Iterable[int]) -> None:
        """Notes what has been changed before a kernel failed, the slots `changed` among it."""
        slots = self.recording.slots
        written = {slots[slot].storage for slot in changed}
        tensors = [*self._tensors_in(written), *(self._changed() if self._has_written else ())]
        self.torn = [(tensor, version_of(tensor)) for tensor in tensors]

    def _changed(self) -> list[torch.Tensor]:
        """The tensors from outside that the call has changed, or is about to."""
        recording = self.recording
        written = {
            recording.slots[slot].storage for entry in recording.entries for slot in entry.writes
        }
        return self._tensors_in({one for one in written if recording.storages[one].creator < 0})

    def _tensors_in(self, numbers: set[int]) -> list[torch.Tensor]:
        """The tensors that lie in these storages, as far as they were met."""
        slots = self.recording.slots
        return [
            tensor
            for slot, known in enumerate(self._weak)
            if slots[slot].storage in numbers and (tensor := known()) is not None
        ]


def _given(entry: Entry) -> list[int]:
    """The slots that an operator is given."""
    return [*refs(entry.args), *refs(entry.kwargs)]


def _flat(result: Any) -> Any:
    return result if isinstance(result, (tuple, list)) else (result,)
