"""Runs the user's function beside a plan: each operator is compared with the script, and its kernel
runs by the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from roam.capture.tracing.kernel_facts import facts_of
from roam.errors import ExecutionError
from roam.interrupts import interrupts_wait
from roam.program.ir import Ref
from roam.runtime.beside.placeholders import WeakStorage, fill, fill_at, own, placeholder, tensor_in
from roam.runtime.beside.recording import  Entry, Given, Made, at_path, is_passed, meta_of
from roam.runtime.beside.script import Script, is_same
from roam.runtime.executor import Executor
from roam.torch_compat.private import TorchDispatchMode, disable_current_modes, storage_of, storage_pointer, version_of

_Tensor = torch.Tensor


class Matched(TorchDispatchMode):
    """One call of the user's function beside a plan.

    Attributes:
        left: why the call has left the script; empty while it follows it. Then everything that it
            has issued has run, and the rest of it runs as it is.
    """

    def __init__(
        self,
        script: Script,
        executor: Executor,
        inputs: list[int],
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Begins a call.

        Args:
            inputs: the script's slots of the executor's inputs, in their order.
            around: what kernels run in.
        """
        super().__init__()
        self.left = ""
        self.is_over = False
        self.is_busy = False
        self._script, self._entries, self._executor = script, script.entries, executor
        self._inputs, self._around = inputs, around
        self.may_leave = True
        self.failure: BaseException | None = None
        """Why a kernel of the plan, or the plan itself, has failed."""
        self.torn: list[tuple[torch.Tensor, int]] = []
        """What was changed before a kernel failed, with the versions."""
        self._at = 0
        self._start = 0
        """The first entry that the plan has not run yet."""
        self._barrier = 0
        self._ids: dict[int, int] = {}
        self._weak: dict[int, weakref.ref[torch.Tensor]] = {}
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
        self._lent: set[int] = set()
        """Storages that the executor holds too, since the last barrier."""
        self._aliases: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        """Tensors that no operator has made, with the numbers of their storages."""
        self._parts: Generator[list[Any], list[Any], Any] | None = None
        self._drawn: torch.Tensor | None = None

    # -- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.left:
            if self.failure is not None:
                raise self.failure
            return func(*args, **kwargs)
        at = self._at
        entry = self._entries[at] if at < len(self._entries) else None
        if (entry is None or entry.func is not func) and is_passed(func):
            return func(*args, **kwargs)
        if entry is None or entry.func is not func or not self._matches(at, entry, args, kwargs):
            self.leave(f"{func} comes where " + (f"{entry.func} came" if entry is not None else "the step ended"))
            return func(*args, **kwargs)
        script = self._script
        if entry.kind == "now":
            moment = script.moments.get(at)
            if moment is not None and not self._pass(at):
                return func(*args, **kwargs)
            self._at = at + 1
            return func(*args, **kwargs)
        self._at = at + 1
        if script.runs[at] or entry.kind == "view":
            result = func(*args, **kwargs)
            self._note(entry, result, at)
            return result
        if not entry.results:
            return None if entry.sequence is None else entry.sequence()
        made = [
            self._placeholder(one.slot)
            if type(one) is Made
            else at_path(one.path, args, kwargs)
            if type(one) is Given
            else one
            for one in entry.results
        ]
        return made[0] if entry.sequence is None else entry.sequence(made)

    def _note(self, entry: Entry, result: Any, at: int) -> None:
        """Registers what an operator that has run returned."""
        flat = (result,) if entry.sequence is None else result
        if len(flat) != len(entry.results):
            self.leave(f"{entry.func} returns another number of tensors")
            return
        for item, one in zip(flat, entry.results, strict=True):
            if type(one) is Made:
                storage = self._script.slots[one.slot].storage  # type: ignore[union-attr]
                if storage not in self._places:
                    self._meet(storage, storage_of(item))
                self._tag(one.slot, item)
                if one.slot in self._script.inputs:
                    meta = self._script.slots[one.slot]
                    assert meta is not None
                    self._bound[one.slot] = tensor_in(storage_of(item), meta)  # nobody else holds the item

    def _placeholder(self, slot: int) -> torch.Tensor:
        meta = self._script.slots[slot]
        assert meta is not None
        tensor = placeholder(meta, self._script.size_bytes[meta.storage])
        self._meet(meta.storage, storage_of(tensor))
        self._tag(slot, tensor)
        return tensor

    def _meet(self, number: int, storage: torch.UntypedStorage) -> None:
        pointer = self._pointers[number] = storage_pointer(storage)
        self._outside[pointer] = number
        self._places[number] = WeakStorage(storage)

    def _tag(self, slot: int, tensor: torch.Tensor) -> None:
        self._ids[id(tensor)] = slot
        self._weak[slot] = weakref.ref(tensor)

    def _matches(self, at: int, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        leaf = -1
        live, numbers = self._script.live, self._bound

        def same(value: Any, expected: Any) -> bool:
            nonlocal leaf
            leaf += 1
            kind = type(expected)
            if kind is Ref:
                return isinstance(value, _Tensor) and self._is_at(expected.slot, value)
            if kind is tuple or kind is list:
                return type(value) is kind and len(value) == len(expected) and all(map(same, value, expected))
            slot = live.get((at, leaf))
            if slot is not None:
                if type(value) is not kind:
                    return False
                numbers[slot] = value
                return True
            return is_same(value, expected)

        if len(args) != len(entry.args) or len(kwargs) != len(entry.kwargs):
            return False
        for value, expected in zip(args, entry.args, strict=True):
            if not same(value, expected):
                return False
        for (key, value), (name, expected) in zip(kwargs.items(), entry.kwargs.items(), strict=True):
            leaf += 1
            if key != name or not same(value, expected):
                return False
        return entry.dtype is None or entry.dtype is torch.get_default_dtype()

    def _is_at(self, slot: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the one of a slot; one that is met for the first time becomes it."""
        known = self._weak.get(slot)
        pointer = storage_pointer(storage_of(tensor))
        meta = self._script.slots[slot]
        assert meta is not None
        if known is not None:
            return known() is tensor and self._pointers[meta.storage] == pointer
        number = self._outside.get(pointer)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return False
        if number is None:
            if meta.storage in self._pointers or meta.storage in self._script.made:
                return False
            self._meet(meta.storage, storage_of(tensor))
        elif number != meta.storage:
            return False
        if storage_of(tensor).nbytes() != self._script.size_bytes[meta.storage]:
            return False
        if meta_of(tensor, meta.storage) != meta:
            return False
        self._tag(slot, tensor)
        if slot in self._script.inputs:
            self._bound[slot] = tensor
        return True

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """Around what is no Python of the step's."""
        self.is_busy = True
        try:
            with interrupts_wait(), disable_current_modes(), self._around():
                yield
        finally:
            self.is_busy = False

    # -- the plan

    def settle(self, tensor: torch.Tensor | None) -> None:
        """Python looks at a tensor's memory, or at random generators (None)."""
        if self.left or self.is_over:
            return
        args: tuple[Any, ...] = ()
        if tensor is not None:
            number = self._outside.get(storage_pointer(storage_of(tensor)))
            if number is None:
                return
            args = (number,)
        at = self._at
        entry = self._entries[at] if at < len(self._entries) else None
        with disable_current_modes():
            if entry is None or entry.kind != "settle" or entry.args != args:
                self.leave("the step looks at values where it did not")
            elif at not in self._script.moments or self._pass(at):
                self._at = at + 1

    def assigned(self, tensor: torch.Tensor) -> None:
        """A tensor gets other data."""
        self.leave("the step gives a tensor other data")

    def aliased(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """A tensor with the memory of another one has been made without an operator."""
        number = self._outside.get(storage_pointer(storage_of(tensor)))
        if number is not None:
            self._aliases.append((number, weakref.ref(alias)))

    def finish(self) -> None:
        """The function has returned: runs the rest by the plan."""
        if self.failure is not None:  # which the step's own code has caught
            raise self.failure
        if self.left:
            return
        if self._at != len(self._entries):
            self.leave("the step ended before its end")
            return
        if extra := self._alive() - self._script.barriers[-1].alive:
            self.leave(f"Python holds {len(extra)} tensors at its end that it did not hold")
            return
        outgoing = self._advance([], is_end=True)
        for slot, value in zip(self._script.barriers[-1].held, outgoing, strict=True):
            self._put(slot, value)
        self.is_over = True

    def _pass(self, at: int) -> bool:
        """Runs the plan to a barrier, which Python has reached. False if the call leaves there."""
        moment = self._script.barriers[self._script.moments[at]]
        if extra := self._alive() - moment.alive:
            self.leave(f"Python holds {len(extra)} tensors that it did not hold")
            return False
        values = self._advance([])
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

    _gets: list[Any] | None = None

    def _advance(self, gets: list[Any], *, is_end: bool = False) -> list[Any]:
        """Runs the plan to the next barrier, or to its end."""
        script = self._script
        with self._kernels():
            try:
                if self._parts is None:
                    inputs = [self._bound[slot] for slot in self._inputs]
                    self._parts = self._executor.parts(inputs)
                    values = next(self._parts)
                else:
                    moment = script.barriers[self._barrier - 1]
                    sent = (self._gets or []) + [self._bound[slot] for slot in moment.brings]
                    self._gets = None
                    values = self._parts.send(sent)
            except StopIteration as end:
                assert is_end, "the plan has a part for each barrier"
                values = end.value[0]
            except BaseException as error:
                raise self._failed(error) from error
            self._barrier += 1
        return values  # type: ignore[no-any-return]

    def _failed(self, error: BaseException) -> BaseException:
        """What to raise where a kernel has failed. Python is further on than in eager PyTorch, so
        nothing else runs of this call.
        """
        self.left = "a kernel failed"
        failure = self._executor.failure(error)
        slots, program = self._script.slots, self._executor.program
        numbers = {slot: outside.slot for outside, slot in program.referenced}
        stores = {program.storage_of(slot): slot for slot in numbers}
        order = self._executor.bindings.order
        done = order if failure is None else order[: failure.step + 1]
        for index in done:
            for slot in program.calls[index].mutates:
                given = stores.get(program.storage_of(slot))
                if given is not None and numbers[given] in self._bound:
                    tensor = self._bound[numbers[given]]
                    self.torn.append((tensor, version_of(tensor)))
        where = "" if failure is None else f"{failure.call.name} at {failure.call.source}: "
        after = "some state has been updated, and the rest has not" if self.torn else "no state has been updated"
        self.failure = ExecutionError(
            f"{where}a kernel failed: {error}. The step's own code has gone on to where it asked for a value, or to its "
            f"end; {after}",
            code="torn" if self.torn else "failed",
            operator="" if failure is None else failure.call.name,
            source="" if failure is None else str(failure.call.source),
        )
        return self.failure

    def _put(self, slot: int, value: torch.Tensor) -> None:
        """Gives a placeholder's storage the memory of what a kernel has made."""
        meta = self._script.slots[slot]
        assert meta is not None
        number = meta.storage
        if self._places[number].expired():
            return
        place, storage = self._places[number].get(), storage_of(value)
        if storage_pointer(place) == storage_pointer(storage):
            return
        pool = self._executor.bindings.pool
        if pool is not None and pool.owns(storage):
            offset = value.storage_offset() - meta.offset
            fill_at(place, storage.data_ptr() + offset * meta.dtype.itemsize)
            self._in_pool.add(number)
        else:
            fill(place, storage)
            self._in_pool.discard(number)

    def _alive(self) -> frozenset[int]:
        """The storages that the call has made, and that Python holds."""
        slots, made, lent = self._script.slots, self._script.made, self._lent
        alive = {
            number
            for number, place in self._places.items()
            if number in made and number not in lent and not place.expired()
        }
        if lent:
            tagged = ((slots[slot].storage, one) for slot, one in self._weak.items())  # type: ignore[union-attr]
            alive.update(
                number for number, one in (*tagged, *self._aliases) if number in lent and one() is not None
            )
        return frozenset(alive)

    # -- another way

    def leave(self, why: str) -> None:
        """The call goes another way from here on: runs what it has issued, as it was issued, and
        lets the rest run as it is.
        """
        if self.left or self.is_over:
            return
        self.left = why
        if not self.may_leave:
            self.failure = ExecutionError(
                f"the step goes another way than its plan, and on_change='raise' keeps it from going on: {why}; what it "
                "has done in Python stays",
                code="no_plan_fits",
            )
            raise self.failure
        with self._kernels():
            if self._parts is not None:
                self._parts.close()
            self._run_issued()

    def raised(self, error: BaseException) -> None:
        """The step's own code has raised: as in eager PyTorch, what came before has run."""
        self.may_leave = True
        self.leave(f"it raised {type(error).__name__}")

    def _run_issued(self) -> None:
        script = self._script
        slots = script.slots
        issued = range(self._start, self._at)
        values: dict[int, Any] = {}
        last: dict[int, int] = {}
        for index in issued:
            for slot in _slots(self._entries[index]):
                last[slots[slot].storage] = index  # type: ignore[union-attr]
        alive = self._alive()
        held: dict[int, torch.UntypedStorage] = {}

        def value(slot: int) -> Any:
            if slot in values:
                return values[slot]
            if slot in self._bound:
                return self._bound[slot]
            meta = slots[slot]
            assert meta is not None
            storage = held.get(meta.storage)
            return tensor_in(self._places[meta.storage].get() if storage is None else storage, meta)

        for index in issued:
            entry = self._entries[index]
            if script.runs[index]:
                continue
            args, kwargs = self._decoded(index, entry, value)
            result = entry.func(*args, **kwargs)
            flat = (result,) if entry.sequence is None else result
            for item, one in zip(flat, entry.results, strict=True):
                if type(one) is Made:
                    values[one.slot] = item
                    number = slots[one.slot].storage  # type: ignore[union-attr]
                    if entry.kind == "kernel" and number not in held:
                        held[number] = storage_of(item)
            for number in [one for one in held if last.get(one, -1) <= index and one not in alive]:
                del held[number]
                for slot in [s for s in values if slots[s].storage == number]:  # type: ignore[union-attr]
                    del values[slot]
        values.clear()
        for number, storage in held.items():
            fill(self._places[number].get(), storage)
        self._bound.clear()

    def _decoded(self, at: int, entry: Entry, value: Callable[[int], Any]) -> tuple[Any, dict[str, Any]]:
        leaf = -1
        live = self._script.live

        def real(item: Any) -> Any:
            nonlocal leaf
            leaf += 1
            if type(item) is Ref:
                return value(item.slot)
            if type(item) in (tuple, list):
                return type(item)(map(real, item))
            slot = live.get((at, leaf))
            return item if slot is None else self._bound[slot]

        args = tuple(map(real, entry.args))
        kwargs = {}
        for key, item in entry.kwargs.items():
            leaf += 1
            kwargs[key] = real(item)
        return args, kwargs

    def release(self) -> None:
        """The call is over: what Python still holds in the pool gets memory of its own."""
        for number in self._in_pool:
            if not self._places[number].expired():
                own(self._places[number].get())
        if self._parts is not None:
            self._parts.close()


def _slots(entry: Entry) -> Iterator[int]:
    from roam.runtime.beside.recording import refs

    yield from refs(entry.args)
    yield from refs(entry.kwargs)
    for one in entry.results:
        if type(one) is Made:
            yield one.slot
