"""Runs the user's function beside a plan: each operator is compared with the script, and its kernel
runs by the plan.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from roam.errors import CaptureError, ExecutionError
from roam.interrupts import interrupts_wait
from roam.program.ir import TensorMeta
from roam.program.operators import is_foreign
from roam.program.replay import cpu_state
from roam.runtime.beside.lazy import Begun, Lazy
from roam.runtime.beside.placeholders import (
    GONE,
    UNREAD,
    WeakStorage,
    fill,
    is_exposed,
    is_unread,
    note_known,
    note_sharing,
    own,
    placeholder,
    tensor_in,
)
from roam.runtime.beside.planned import Planned, kernels_alone, let_go_of_old_data
from roam.runtime.beside.recording import (
    Entry,
    Given,
    Made,
    at_path,
    is_passed,
    is_plain,
    meta_of,
)
from roam.runtime.beside.script import (
    GIVE,
    MAKE,
    NOW,
    NUMBER,
    RUN,
    SAME,
    TENSOR,
    Expected,
    Moment,
    Script,
    begun,
    common,
    is_in_range,
    is_same,
    leaf_at,
    slots_of,
)
from roam.torch_compat.private import (
    TENSOR_DATA,
    HiddenMode,
    allow_access,
    disable_current_modes,
    forbid_access,
    storage_at,
    storage_of,
    storage_pointer,
    version_of,
)
from roam.tracing.recording.kernel_facts import facts_of
from roam.tracing.source_location import Frames


class Matched(HiddenMode):
    """One call of the user's function beside a plan.

    Attributes:
        left: why the call has left the script; empty while it follows it.
    """

    def __init__(
        self,
        planned: Planned,
        others: Sequence[Planned],
        enter: Callable[[Planned | None], None],
        lazy: Callable[[], Lazy],
    ) -> None:
        """Begins a call.

        Args:
            others: other ways that calls of this kind go. The call goes over to one of them where
                it goes as that does, as long as no kernel has run.
            enter: is called with the plan that a call goes over to, or with None where it leaves.
            lazy: makes what goes on with a call that leaves.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = ""
        self.is_over = False
        self.lazy: Lazy | None = None
        """What has gone on with the call since it left."""
        self._make_lazy = lazy
        self._is_busy = False
        script = planned.script
        self._drawn: bytes | None = None
        """The random generator's state when Python was last seen to have to do with it. It is no
        tensor, which would count as the step's memory."""
        self._tried: set[tuple[int, int]] = set()
        """Plans that the call has followed up to a place where they did not go on as it did."""
        self._copies: dict[int, torch.UntypedStorage] = {}
        """By their numbers, what storages had in them whose memory others have too."""
        self._others, self._enter = others, enter
        self._take(planned)
        self.may_leave = True
        self.failure: Exception | None = None
        """Why a kernel of the plan, or the plan itself, has failed."""
        self.torn: list[tuple[torch.Tensor, int]] = []
        """What was changed before a kernel failed, with the versions."""
        self._at = 0
        self._start = 0
        """The first entry that the plan has not run yet."""
        self._barrier = 0
        self._weak: list[weakref.ref[torch.Tensor] | None] = [None] * len(script.slots)
        """For each slot, its tensor."""
        self._bound: dict[int, Any] = {}
        """Values from outside, by their slots, for as long as the plan needs them."""
        self._outside: dict[int, int] = {}
        """Numbers of storages, by their pointers, of those that are not placeholders."""
        self._places: dict[int, WeakStorage] = {}
        """The storages met, by their numbers. Autograd adds in place where nothing else holds a
        storage, so none is held."""
        self._pointers: dict[int, int] = {}
        """Pointers of the storages met, by their numbers."""
        self._in_pool: set[int] = set()
        self._filled: set[int] = set()
        """Storages of placeholders that have memory."""
        self._gets: list[Any] = []
        """What the executor gets at the last barrier."""
        self._lent: set[int] = set()
        """Storages that the executor holds too, since the last barrier."""
        self._misfit = ""
        self._exposed: list[tuple[int, weakref.ref[Any] | None]] = []
        """Numbers of storages whose memory Python has got, with what it has got it by."""
        self._forbidden: set[int] = set()
        """Storages from outside that kernels wait for, so that nothing may look at them."""
        self._aliases: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        """Tensors that no operator has made, with the numbers of their storages."""
        self._shared: dict[int, bool] = {}
        """By the numbers of storages from outside, whether others had their memory too, when they
        were met."""
        self._assigned: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = {}
        """Tensors that have got other data, by their identities, with what they had before they got
        data that is still to be computed."""
        self._parts: Generator[list[Any], list[Any], Any] | None = None

    def _take(self, planned: Planned) -> None:
        """Follows this plan's script."""
        self.planned = planned
        self._script, self._executor = planned.script, planned.executor
        self._entries, self._steps = planned.script.entries, planned.script.steps
        self._inputs = planned.inputs
        if self._drawn is None and any(planned.script.draws):
            self._drawn = cpu_state()

    def _goes_over(self, is_next: Callable[[Expected], bool]) -> bool:
        """Whether the call goes over to another plan, whose script has begun as this one has, and
        in which the next operator is as expected.
        """
        if self._barrier:
            return False
        mine, at = self._script, self._at
        for other in self._others:
            script = other.script
            if other is self.planned or len(script.steps) <= at or not is_next(script.steps[at]):
                continue
            if (at, id(other)) in self._tried:
                continue
            if common(mine, script) < at:
                continue
            bound = _rebound(mine, script, at, self._bound, self._weak)
            if bound is None:
                continue
            self._tried.add((at, id(self.planned)))
            self._bound = bound
            self._weak = [
                *self._weak[: len(script.slots)],
                *[None] * (len(script.slots) - len(self._weak)),
            ]
            self._take(other)
            self._enter(other)
            return True
        return False

    @property
    def is_busy(self) -> bool:
        """Whether what runs now is no Python of the step's."""
        return self._is_busy or (self.lazy is not None and self.lazy.is_busy)

    # -- operators

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self.left:
            if self.failure is not None:
                raise self.failure
            return self._go_on(func, args, kwargs or {})
        step = self._steps[self._at]
        if step.func is not func:
            return self._other(func, args, kwargs or {})
        # The loop is written out: this is most of what a call takes beside its kernels.
        weak = self._weak
        for value, (code, expected) in zip(args, step.args, strict=False):
            if code == 0:
                known = weak[expected]
                if known is not None and known() is value is not None:
                    continue
                if not self._is_new(expected, value):
                    return self._other(func, args, kwargs or {})
            elif not (code == 1 and value is expected) and not self._is_like(value, code, expected):
                return self._other(func, args, kwargs or {})
        if len(args) != len(step.args) or (
            (kwargs or step.names) and not self._are_like(kwargs or {}, step)
        ):
            return self._other(func, args, kwargs or {})
        if (self._exposed and self._is_exposed(step.entry)) or (
            self._copies and self._is_rewritten(step.entry)
        ):
            return self._other(func, args, kwargs or {})
        does = step.does
        if does == RUN:
            self._at += 1
            result = func(*args, **kwargs) if kwargs else func(*args)
            script, slot = self._script, step.slot
            if slot >= 0 and slot not in script.inputs and script.storage_of(slot) in self._places:
                weak[slot] = weakref.ref(result)
            else:
                self._note(step.entry, result)
            return result
        if does == NOW:
            moment = self._script.moments.get(self._at)
            if moment is None:
                self._allow(step.entry)
            elif not self._pass(self._at):
                return self._go_on(func, args, kwargs or {})
            self._at += 1
            result = func(*args, **(kwargs or {}))
            if is_foreign(func):
                self.drawn()
            return result
        if step.bound is not None and not self._is_in_range(step, args):
            self.leave("an index is out of range")
            return self._go_on(func, args, kwargs or {})
        self._at += 1
        for number in step.guarded:
            if number not in self._forbidden and number not in self._copies:
                self._forbidden.add(number)
                forbid_access(self._pointers[number], UNREAD)
        if does == MAKE:
            return self._placeholder(step.slot)
        if does == GIVE:
            return args[0]
        entry = step.entry
        if not entry.results:
            return None if entry.sequence is None else entry.sequence()
        made = [
            self._placeholder(one.slot)
            if type(one) is Made
            else at_path(one.path, args, kwargs or {})
            if type(one) is Given
            else one
            for one in entry.results
        ]
        return made[0] if entry.sequence is None else entry.sequence(made)

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator that is not the one that is expected."""
        if not is_passed(func):
            if self._goes_over(
                lambda step: step.func is func and step is not self._steps[self._at]
            ):
                return self.__torch_dispatch__(func, (), args, kwargs)
            entry = self._steps[self._at].entry
            came = (
                "the step ended"
                if entry.args == ("end",)
                else f"{entry.func} came, at {entry.source}"
            )
            self.leave(self._misfit or f"{func} comes where {came}")
        return self._go_on(func, args, kwargs)

    def _go_on(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator returns in a call that has left, or that no plan has."""
        if self.lazy is not None:
            return self.lazy.__torch_dispatch__(func, (), args, kwargs)
        return func(*args, **kwargs)

    def _is_in_range(self, step: Expected, args: Any) -> bool:
        """Whether an operator fails for none of its indices. One that does is to fail where it
        stands, as in eager PyTorch.
        """
        assert step.bound is not None
        with self._kernels():
            self._allow(step.entry)  # what an earlier kernel waits for too
            return is_in_range(step.func, step.bound, args)

    def _allow(self, entry: Entry | None = None) -> None:
        """Lets Python look at memory that no kernel waits for any more; of an entry's arguments
        alone, if it is given.
        """
        numbers = self._forbidden
        if entry is not None:
            slots = self._script.slots
            numbers = {slots[slot].storage for slot in slots_of(entry)} & numbers  # type: ignore[union-attr]
        for number in numbers:
            allow_access(self._pointers[number])
        self._forbidden = self._forbidden - numbers

    def _note(self, entry: Entry, result: Any) -> None:
        """Registers what an operator that has run returned."""
        flat = (result,) if entry.sequence is None else result
        if len(flat) != len(entry.results):
            self.leave(f"{entry.func} returns another number of tensors")
            return
        for item, one in zip(flat, entry.results, strict=True):
            if type(one) is Made:
                storage = self._script.storage_of(one.slot)
                if storage not in self._places:
                    self._meet(storage, storage_of(item))
                self._weak[one.slot] = weakref.ref(item)
                if one.slot in self._script.inputs:
                    meta = self._script.slots[one.slot]
                    assert meta is not None
                    self._bound[one.slot] = tensor_in(
                        self._copies.get(storage, storage_of(item)), meta
                    )  # nobody else holds the item

    def _placeholder(self, slot: int) -> torch.Tensor:
        meta = self._script.slots[slot]
        assert meta is not None
        number = meta.storage
        tensor, storage = placeholder(meta, self._script.size_bytes[number])
        self._meet(number, storage)
        self._weak[slot] = weakref.ref(tensor)
        return tensor

    def _meet(self, number: int, storage: torch.UntypedStorage) -> None:
        pointer = self._pointers[number] = storage_pointer(storage)
        self._outside[pointer] = number
        self._places[number] = WeakStorage(storage)

    def _is_like(self, value: Any, code: int, expected: Any) -> bool:
        """Whether an argument is as a pattern says."""
        if code == TENSOR:
            known = self._weak[expected]
            return (known is not None and known() is value is not None) or self._is_new(
                expected, value
            )
        if code == SAME:
            return is_same(value, expected)
        if code == NUMBER:
            slot, kind = expected
            self._bound[slot] = value
            return type(value) is kind
        kind, items = expected
        return (
            type(value) is kind
            and len(value) == len(items)
            and all(self._is_like(one, *item) for one, item in zip(value, items, strict=True))
        )

    def _are_like(self, kwargs: dict[str, Any], step: Expected) -> bool:
        """Whether arguments by name are as expected."""
        return (
            tuple(kwargs) == step.names
            and all(
                self._is_like(value, *pattern)
                for value, pattern in zip(kwargs.values(), step.values, strict=True)
            )
            and (step.entry.dtype is None or step.entry.dtype is torch.get_default_dtype())
        )

    def _is_new(self, slot: int, tensor: Any) -> bool:
        """Whether a tensor that is met for the first time is the one of a slot, and becomes it."""
        if self._weak[slot] is not None or not isinstance(tensor, torch.Tensor):
            return False
        storage = storage_of(tensor)
        pointer = storage_pointer(storage)
        meta = self._script.slots[slot]
        assert meta is not None
        number = self._outside.get(pointer)
        last = self.planned.outside.get(slot)
        if (
            last is not None
            and last[0]() is tensor
            and last[1] == pointer
            and storage.resizable()
            and tensor.shape == meta.shape
            and tensor.stride() == meta.stride
            and tensor.storage_offset() == meta.offset
            and tensor.dtype is meta.dtype
            and (number == meta.storage if meta.storage in self._pointers else number is None)
        ):  # it was here in an earlier call, too
            if number is None:
                self._pointers[meta.storage] = pointer
                self._outside[pointer] = meta.storage
                self._places[meta.storage] = last[2]
            self._weak[slot] = last[0]
            if slot in self._script.inputs:
                if last[3] is None:
                    last[3] = TENSOR_DATA.__get__(tensor)
                self._bound[slot] = last[3]
            return True
        if last is not None:
            last[3] = None  # which would count among those that hold the storage
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return False
        if number is None:
            if meta.storage in self._pointers or meta.storage in self._script.made:
                return False
            self._meet(meta.storage, storage)
        elif number != meta.storage:
            return False
        if storage_of(tensor).nbytes() != self._script.size_bytes[meta.storage]:
            return False
        if meta_of(tensor, meta.storage) != meta:
            return False
        self._weak[slot] = weakref.ref(tensor)
        if meta.storage not in self._script.made and id(tensor) not in self._assigned:
            self.planned.outside[slot] = [
                self._weak[slot],
                pointer,
                self._places[meta.storage],
                None,
            ]
        if slot in self._script.inputs:
            # The kernels' writes are not to count twice, so they get a tensor that counts its own.
            if meta.device.type == "cpu" and meta.storage not in self._shared:
                self._shared[meta.storage] = is_exposed(storage_of(tensor))
            self._bound[slot] = TENSOR_DATA.__get__(tensor)
            if self._shared.get(meta.storage):
                if meta.storage in self._script.written:
                    self._misfit = (
                        "it writes to a tensor whose memory NumPy, or another library, has too"
                    )
                    return False
                if meta.storage not in self._copies:
                    self._copies[meta.storage] = storage_of(tensor).clone()
                self._bound[slot] = tensor_in(self._copies[meta.storage], meta)
        return True

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """Around what is no Python of the step's."""
        self._is_busy = True
        try:
            with interrupts_wait(), disable_current_modes(), kernels_alone(self.planned.devices):
                yield
        finally:
            self._is_busy = False

    # -- the plan

    def threaded(self) -> None:
        """Python is about to give another thread something to do."""
        self.leave("it starts a thread, whose operators nothing sees")
        if self.lazy is not None:
            self.lazy.threaded()

    def settle(self, tensor: torch.Tensor | None) -> None:
        """Python looks at a tensor's memory, or at random generators (None)."""
        if self.lazy is not None:
            self.lazy.settle(tensor)
        if self.left or self.is_over:
            return
        args: tuple[int, ...] = ()
        if tensor is not None:
            number = self._outside.get(storage_pointer(storage_of(tensor)))
            if number is None:
                return
            args = (number,)
        at = self._at
        entry = self._entries[at] if at < len(self._entries) else None
        with disable_current_modes():
            if (
                entry is None or entry.kind != "settle" or entry.args != args
            ) and not self._goes_over(
                lambda step: step.entry.kind == "settle" and step.entry.args == args
            ):
                self.leave("the step looks at values where it did not")
                if self.lazy is not None:
                    self.lazy.settle(tensor)
            elif at in self._script.moments and not self._pass(at):
                if self.lazy is not None:
                    self.lazy.settle(tensor)
            else:
                for number in self._forbidden.intersection(args):
                    allow_access(self._pointers[number])
                    self._forbidden = self._forbidden - {number}
                self._at = at + 1

    def assigned(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """A tensor gets the data of another one. It is another tensor from here on, whose slot is
        the next one of the recording; kernels that have been issued have the old data.
        """
        is_followed = is_plain(tensor) and is_plain(data)
        if not is_followed:
            self.leave("the step gives a tensor other data, and one of the two is no plain tensor")
        if self.lazy is not None:
            self.lazy.assigned(tensor, data)
            return
        if is_followed:
            note_sharing(tensor, data)
        if self.left or self.is_over:
            return
        ref = weakref.ref(tensor)  # the one of all slots of the tensor's
        for slot in [slot for slot, one in enumerate(self._weak) if one is ref]:
            self._weak[slot] = GONE
        number = self._outside.get(storage_pointer(storage_of(data)))
        self._aliases = [one for one in self._aliases if one[1] is not ref]
        if number is not None:
            self._aliases.append((number, ref))
        _, before = self._assigned.get(id(tensor), (ref, None))
        made = self._script.made
        if (
            before is None
            and number in made
            and number not in self._filled
            and self._outside.get(storage_pointer(storage_of(tensor))) not in made
        ):
            before = TENSOR_DATA.__get__(tensor)
        self._assigned[id(tensor)] = ref, before

    def unseen(self, what: str, code: str) -> None:
        """Python is about to do what cannot be followed."""
        if not self.left:
            self.may_leave = True
            self.leave(what)
        if self.lazy is not None:
            self.lazy.fail(what, code)
        if code != "refused_operator":
            source = str(Frames({}, {}).here()[1])
            self.failure = ExecutionError(
                f"{source}: {what}. No call that was recorded has done so; what this one has done so far stays",
                code=code,
                source=source,
            )
            raise self.failure

    def unsettled(self, failed: CaptureError) -> None:
        """Nothing of this call is to be repeated; a later one may be."""
        self.leave(str(failed))
        if self.lazy is not None:
            self.lazy.unsettled(failed)

    def switching(self) -> None:
        """How kernels compute is about to be changed."""
        self.leave("the step changes how kernels compute")
        if self.lazy is not None:
            self.lazy.switching()

    def drawn(self) -> None:
        """Python has read or set the state of random generators."""
        if self._drawn is not None:
            self._drawn = cpu_state()

    def exposed(self, tensor: torch.Tensor, by: Any) -> None:
        """Python has got a tensor's memory; it may write to it for as long as it has `by`."""
        if self.lazy is not None:
            self.lazy.exposed(tensor, by)
            return
        number = self._outside.get(storage_pointer(storage_of(tensor)))
        if number is not None:
            self._exposed.append((number, weakref.ref(by) if by is not None else None))

    def _is_exposed(self, entry: Entry) -> bool:
        """Whether Python may write to what an entry's kernel uses, before that runs."""
        slots = self._script.slots
        self._exposed = [one for one in self._exposed if one[1] is None or one[1]() is not None]
        used = {slots[slot].storage for slot in slots_of(entry)}  # type: ignore[union-attr]
        if any(number in used for number, _ in self._exposed):
            self._misfit = (
                "it computes with a tensor whose memory Python has got, as by x.numpy(), and keeps"
            )
        return bool(self._misfit)

    def _is_rewritten(self, entry: Entry) -> bool:
        """Whether others have written to what an entry uses, since the call used it first."""
        slots = self._script.slots
        used = {slots[slot].storage for slot in slots_of(entry)}  # type: ignore[union-attr]
        for number in used & self._copies.keys():
            now, then = (
                torch.empty(0, dtype=torch.uint8).set_(storage)
                for storage in (self._places[number].get(), self._copies[number])
            )
            if not torch.equal(now, then):
                self._misfit = (
                    "NumPy, or another library, has written to a tensor that the step uses"
                )
        return bool(self._misfit)

    def aliased(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """A tensor with the memory of another one has been made without an operator."""
        if self.lazy is not None:
            self.lazy.aliased(tensor, alias)
            return
        number = self._outside.get(storage_pointer(storage_of(tensor)))
        if number is not None:
            self._aliases.append((number, weakref.ref(alias)))
        if not storage_of(tensor).resizable():
            note_sharing(tensor, alias)

    def unread(self) -> None:
        """A read of memory that no kernel has written to yet has failed in the step's own code."""
        if self.lazy is not None:
            self.lazy.unread()
        elif self.failure is None:
            self.left = self.left or "it reads a tensor unseen"
            self.failure = ExecutionError(UNREAD, code="unread")

    def finish(self) -> None:
        """The function has returned: runs the rest by the plan."""
        if self.failure is not None:  # which the step's own code has caught
            raise self.failure
        if not self.left:
            self._end()
        if self.lazy is not None:
            self.lazy.finish()

    def _end(self) -> None:
        """Runs the rest of a call that has followed its script."""
        if self._at != len(self._entries) and not self._goes_over(
            lambda step: step.entry.args == ("end",)
        ):
            self.leave("the step ended before its end")
            return
        if extra := self._unkept(self._script.barriers[-1]):
            self.leave(f"Python holds {len(extra)} tensors at its end that it did not hold")
            return
        outgoing = self._advance(is_end=True)
        for slot, value in zip(self._script.barriers[-1].held, outgoing, strict=True):
            self._put(slot, value)
        self.is_over = True

    def _pass(self, at: int) -> bool:
        """Runs the plan to a barrier, which Python has reached. False if the call leaves there."""
        moment = self._script.barriers[self._script.moments[at]]
        if extra := self._unkept(moment):
            self.leave(f"Python holds {len(extra)} tensors that it did not hold")
            return False
        values = self._advance()
        seen: set[int] = set()
        gets: list[Any] = []
        for slot, value in zip(moment.held, values, strict=True):
            meta = self._script.slots[slot]
            assert meta is not None
            if meta.storage not in seen:
                seen.add(meta.storage)
                self._put(slot, value)
            place = self._places[meta.storage]
            if place.expired():
                gets.append(value)
            else:
                self._lent.add(meta.storage)
                gets.append(tensor_in(place.get(), meta))
        del values
        self._start = at + 1
        self._gets = gets
        return True

    def _unkept(self, moment: Moment) -> frozenset[int]:
        """The storages that Python holds, and that the plan does not keep from here on. Where there
        is no limit, those that have their values keep them in memory of their own, as what threads
        of a collective let go of a little later than in other calls.
        """
        extra = self._alive() - moment.alive
        if not extra <= self._filled or self.planned.choice.memory_limit_bytes is not None:
            return extra
        script = self._script
        written = {
            script.storage_of(slot)
            for entry, runs in zip(
                self._entries[self._start : self._at], script.runs[self._start :], strict=False
            )
            for slot in entry.writes
            if not runs
        }
        if extra & written:
            return extra
        with self._kernels():
            for number in extra & self._in_pool:
                own(self._places[number].get())
                note_known(self._places[number].get())
        self._in_pool -= extra
        return frozenset()

    def _advance(self, *, is_end: bool = False) -> list[Any]:
        """Runs the plan to the next barrier, or to its end."""
        script = self._script
        with self._kernels():
            self._allow()
            if script.draws[self._barrier]:
                self._check_generator()
            try:
                if self._parts is None:
                    inputs = [self._bound[slot] for slot in self._inputs]
                    self._parts = self._executor.parts(inputs)
                    values = next(self._parts)
                else:
                    moment = script.barriers[self._barrier - 1]
                    self._gets += [self._bound[slot] for slot in moment.brings]
                    values = self._parts.send(self._gets)  # which empties the list
            except StopIteration as end:
                assert is_end, "the plan has a part for each barrier"
                values = end.value[0]
            except BaseException as error:
                raise self._failed(error) from error
            self._barrier += 1
            self.drawn()
        return values

    def _check_generator(self) -> None:
        """Raises an error if the state of the random generator has changed unseen."""
        if self._drawn != cpu_state():
            self.left = "a generator was seeded"
            self.failure = ExecutionError(
                "the step seeds a random generator or sets its state in a way that roam cannot see, between operators "
                "that draw from it; call torch.manual_seed or torch.set_rng_state by these names",
                code="generator_state",
            )
            raise self.failure

    def _failed(self, error: BaseException) -> BaseException:
        """What to raise where a kernel has failed. Python is further on than in eager PyTorch, so
        nothing else runs of this call.
        """
        self.left = "a kernel failed"
        for slot in self.planned.changed_before(error):
            if slot in self._bound:
                known = (self._weak[slot] or GONE)()
                changed = [known] if known is not None else self._with_other_data()
                self.torn += [(tensor, version_of(tensor)) for tensor in changed]
        for tensor in self._with_other_data():
            if self._outside.get(storage_pointer(storage_of(tensor))) in self._filled:
                self.torn.append((tensor, version_of(tensor)))
        self.failure = self.planned.failed(error, is_torn=bool(self.torn))
        return self.failure

    def _with_other_data(self) -> list[torch.Tensor]:
        """The tensors that have got other data in this call."""
        return [one for ref, _ in self._assigned.values() if (one := ref()) is not None]

    def _put(self, slot: int, value: torch.Tensor) -> None:
        """Gives a placeholder's storage the memory of what a kernel has made."""
        meta = self._script.slots[slot]
        assert meta is not None
        number = meta.storage
        if self._places[number].expired():
            return
        place, storage = self._places[number].get(), storage_of(value)
        self._filled.add(number)
        if storage_pointer(place) == storage_pointer(storage):
            return
        memory = self._memory(meta, value)
        fill(place, memory)
        if memory is storage:
            note_known(place)
            self._in_pool.discard(number)
        else:
            self._in_pool.add(number)

    def _memory(self, meta: TensorMeta, value: torch.Tensor) -> torch.UntypedStorage:
        """What a value lies in: its storage, or the part of the pool that stands for it."""
        storage, pool = storage_of(value), self._executor.bindings.pool
        if pool is None or not pool.owns(storage):
            return storage
        offset = value.storage_offset() - meta.offset
        address = storage.data_ptr() + int(offset) * meta.dtype.itemsize
        memory: torch.UntypedStorage = storage_at(
            address, meta.device, self._script.size_bytes[meta.storage]
        )
        return memory

    def _alive(self) -> frozenset[int]:
        """The storages that the call has made, and that Python holds."""
        slots, made, lent = self._script.slots, self._script.made, self._lent
        alive = {
            number
            for number, place in self._places.items()
            if number in made and number not in lent and not place.expired()
        }
        if lent:
            tagged = (
                (slots[slot].storage, one)  # type: ignore[union-attr]
                for slot, one in enumerate(self._weak)
                if one is not None
            )
            alive.update(
                number
                for number, one in (*tagged, *self._aliases)
                if number in lent and one() is not None
            )
        return frozenset(alive)

    # -- another way

    def leave(self, why: str) -> None:
        """The call goes another way from here on, as it does where it has no plan."""
        if self.left or self.is_over:
            return
        self.left = why
        if is_unread(sys.exc_info()[1]):  # which the step's own code has caught
            self.failure = ExecutionError(UNREAD, code="unread")
            raise self.failure
        if not self.may_leave:
            self.failure = ExecutionError(
                f"the step goes another way than its plan, and on_change='raise' keeps it from going on: {why}; what it "
                "has done in Python stays",
                code="no_plan_fits",
            )
            raise self.failure
        with self._kernels():
            self._hand_over()

    def _hand_over(self) -> None:
        """Something else goes on with the call, with what waits, and what of it has memory."""
        if any(
            facts_of(entry.func).is_random
            for entry in self._entries[self._start : self._at]
            if entry.kind == "kernel"
        ):
            self._check_generator()
        self.lazy = self._make_lazy()
        begun = self._begun()
        if self._parts is not None:
            self._parts.close()
        self._gets, self._bound = [], {}
        self.lazy.follow(begun)
        self._enter(None)

    def raised(self, error: BaseException) -> None:
        """The step's own code has raised: as in eager PyTorch, what came before has run."""
        self.may_leave = True
        self.leave(f"it raised {type(error).__name__}")
        if self.lazy is not None:
            self.lazy.raised(error)

    def _begun(self) -> Begun:
        """How far the call has come."""
        script, start = self._script, self._start
        slots = script.slots
        held: dict[int, torch.Tensor] = {}
        for index in range(start, self._at):
            entry = self._entries[index]
            if script.runs[index] or entry.kind != "kernel":
                continue
            for slot in slots_of(entry):
                meta = slots[slot]
                assert meta is not None
                number = meta.storage
                if number in held:
                    continue
                if slot in self._bound:
                    held[number] = self._bound[slot]
                elif script.creators[number] >= start:
                    continue
                elif number in self._filled and not self._places[number].expired():
                    held[number] = tensor_in(self._places[number].get(), meta)
        return Begun(
            begun(script, self._at, self._bound), script.runs, start, self._barrier, self._weak, self._outside, self._places,
            self._filled, self._in_pool, held, self._forbidden, self._exposed, self._assigned,
        )  # fmt: skip

    def release(self) -> None:
        """The call is over: what Python still holds in the pool gets memory of its own."""
        if self.lazy is not None:
            self.lazy.release()
            self.torn += self.lazy.torn
            self.failure = self.failure or self.lazy.failure
            return
        self._allow()
        if self.failure is not None:
            self._put_back()
        for number in self._in_pool:
            if not self._places[number].expired():
                own(self._places[number].get())
                note_known(self._places[number].get())
        if self._parts is not None:
            self._parts.close()
        if self._assigned:
            let_go_of_old_data()

    def _put_back(self) -> None:
        """Gives tensors from before the call their old data, where a kernel that has not run was to
        make what they have got.
        """
        for ref, before in self._assigned.values():
            tensor = ref()
            if tensor is None or before is None:
                continue
            try:
                storage_of(tensor).data_ptr()
            except RuntimeError:
                TENSOR_DATA.__set__(tensor, before)


def _rebound(
    mine: Script, other: Script, at: int, bound: dict[int, Any], weak: Sequence[Any]
) -> dict[int, Any] | None:
    """The values from outside, for another script that has begun in the same way; None if one of
    them is another one there, or is gone.
    """
    numbers = {place: bound[slot] for place, slot in mine.live.items() if place[0] < at}
    for place, value in numbers.items():
        if place not in other.live and not is_same(value, leaf_at(other.entries, place)):
            return None
    new = {}
    for place, slot in other.live.items():
        if place[0] < at:
            new[slot] = numbers.get(place, leaf_at(mine.entries, place))
    for slot, known in enumerate(weak):
        if known is None or slot not in other.inputs or other.slots[slot] is None:
            continue
        value = bound.get(slot)
        if value is None:
            tensor = known()
            meta = other.slots[slot]
            assert meta is not None
            if tensor is None or meta_of(tensor, meta.storage) != meta:
                return None
            value = TENSOR_DATA.__get__(tensor)
        new[slot] = value
    return new
