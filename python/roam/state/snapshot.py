"""Snapshot: everything that a step reaches, kept so that tracing can run the user's function and
restore everything afterwards.

A snapshot keeps the contents of every container and object, but no copies of the values in them.
Tensors' values are not copied: a tensor's version counter shows whether it was written to.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Final

import torch

from roam.state.cached_results import forget_others, keys_of
from roam.state.containers import (
    ArraySpace,
    MappingSpace,
    SequenceSpace,
    SetSpace,
    entries_of,
)
from roam.state.equality import (
    MISSING,
    Misfit,
    are_all,
    changed,
    is_numpy_float,
    is_plain,
    same,
    show,
)
from roam.state.growing_lists import has_grown
from roam.state.live_scalars import LiveFloat, LiveInt
from roam.state.metadata import gradient_of
from roam.state.namespaces import AttributesSpace, ClassNamesSpace
from roam.state.nests import alike
from roam.state.optimizer_spaces import OptimizerSpace
from roam.state.policies import Policies, Policy
from roam.state.reach import Place, Reach
from roam.state.settings import Setting
from roam.state.spaces import Items, Space, are_identical
from roam.torch_compat.private import FakeTensor, disable_current_modes, local_of, version_of

DRAWN = "was drawn from"
"""Ends the reason that tells of a random generator."""


class Snapshot:
    """The state that `reach` found, as it is now.

    Kept are the contents and order of every holder; ``.grad``, ``requires_grad`` and the version of
    every tensor; the state of Python's, NumPy's and PyTorch's default random generators, CUDA's
    where CUDA is in use, and of every generator that the step reaches. What iterators have handed
    out cannot be kept (`Reach.iterators`).

    With `leaves_others`, what other threads write meanwhile is left as it is: to what the step does
    not look at, and to attributes that the step does not set. It has to look at them as `Reads`
    notes.
    """

    def __init__(self, reach: Reach, *, leaves_others: bool = False) -> None:
        # Alone, the step is the one that writes, also where `Reads` does not see it.
        self._reach = reach if leaves_others and len(sys._current_frames()) > 1 else None
        # An optimizer's hyper-parameters are a view of holders that are kept in their own right.
        places = [place for place in reach.places if not place.space.is_immutable]
        self._holders = [(place, place.space.items()) for place in places]
        tensors = {id(slot.tensor): (slot.path, slot.tensor) for slot in reversed(reach.slots)}
        self._tensors = [_TensorState(path, tensor) for path, tensor in reversed(tensors.values())]
        self._caches = [
            (cache, cache.cache_info().misses, keys_of(cache)) for _, cache in reach.caches
        ]
        self._sources = random_sources(reach)
        self._held = [None] * (len(self._sources) - len(reach.random_sources)) + [
            id(source) for _, source in reach.random_sources
        ]
        with disable_current_modes():
            self._drawn = [read() for _, read, _ in self._sources]

    def moved(self) -> list[str]:
        """What changed since, other than live state: guarded Python values, parameters and other
        tensors written to or changed in kind, random generators drawn from. Empty if nothing did.
        """
        reasons = [reason for _, _, changes in self._changed() for reason in changes]
        reasons += [reason for state in self._tensors for reason in state.changes()]
        with disable_current_modes():
            for number in self._own_sources():
                name, read, _ = self._sources[number]
                if not is_same_state(read(), self._drawn[number]):
                    reasons.append(f"{name} {DRAWN}")
        return reasons

    def stir(self) -> None:
        """Moves Python's and NumPy's random generators on. A step that draws a number and puts the
        state back then draws another number in its next trace.
        """
        for number in self._own_sources():
            state = _moved_on(self._drawn[number])
            if state is not None:
                self._sources[number][2](state)
                self._drawn[number] = state

    def settings(self) -> list[Setting]:
        """The changes of which `moved` tells, as settings. None are there unless all of them are
        entries of dictionaries, or attributes, that now hold other plain values.
        """
        found: list[Setting] = []
        for place, items, _ in self._changed():
            space = place.space
            if type(space) not in (MappingSpace, AttributesSpace, ClassNamesSpace):
                return []
            before = {_stand_in(key): value for key, value in items}
            for key, value in space.items():
                old = before.get(_stand_in(key), MISSING)
                if (
                    type(key) in (str, int)
                    and (old is MISSING or is_plain(old))
                    and is_plain(value)
                    and not same(old, value)
                ):
                    found.append(Setting(space, key, old, value))
        return found if len(found) == len(self.moved()) else []

    def following(self) -> dict[Policy, set[str]]:
        """The policies under which plans follow changes of which `moved` tells, each with the paths
        of those places: of lists that have got more at their end; of numbers that others
        have replaced, such as counters and running sums.
        """
        grown = {
            place.space.path
            for place, items in self._own_holders()
            if place.guarded
            and type(place.space) is SequenceSpace
            and has_grown(place.space.holder, [value for _, value in items])
        }
        numbers = set()
        for place, items, _ in self._changed():
            may_be_set = type(place.space).set is not Space.set
            for key, old in items:
                value = place.space.get(key)
                if (
                    may_be_set
                    and key != OptimizerSpace.COUNT
                    and not same(old, value)
                    and _is_number_after(old, value)
                ):
                    numbers.add(place.space.label(key))
        return {Policy.COUNTED: numbers, Policy.APPENDED: grown}

    def lasting(self, policies: Policies) -> list[str]:
        """The changes that `moved` gives, without those that a plan can follow once it knows of
        them: numbers that are not followed yet.
        """
        followed = policies.below(Policy.COUNTED, self.following()[Policy.COUNTED])
        return [reason for reason in self.moved() if place_of(reason) not in followed]

    def _changed(self) -> Iterator[tuple[Place, Items, list[str]]]:
        """What the guarded holders that have changed held, each with what `moved` says of it."""
        for place, items in self._own_holders():
            if place.guarded and (changes := _changes(place, items)):
                yield place, items, changes

    def _looked_at(self) -> set[int] | None:
        """Identities of the values that the step can have got at; None if they may be all."""
        if self._reach is None or self._reach.reads.everything:
            return None
        return self._reach.looked_at()

    def _own_sources(self) -> list[int]:
        """Numbers of the random generators that the step can have got at."""
        looked_at = self._looked_at()
        return [
            number
            for number, held in enumerate(self._held)
            if looked_at is None or held is None or held in looked_at
        ]

    def _own_holders(self, fakes: Iterable[tuple[Any, Any]] = ()) -> Iterator[tuple[Place, Items]]:
        """What every holder held, but for what others have changed: of that, what it holds now.

        Args:
            fakes: tensors, each with what capture has put in its place.
        """
        looked_at = self._looked_at()
        if self._reach is None or looked_at is None:
            yield from self._holders
            return
        tensors = {id(fake): tensor for tensor, fake in fakes}
        for place, items in self._holders:
            if place.value is not None and place.value not in looked_at:
                now = place.space.items() if tensors else []
                if any(_holds_fake(value, tensors) for _, value in now):
                    yield place, _with_tensors(place.space, now, items, tensors)
            elif place.owner is not None and not _is_untouched(place.space, items):
                yield place, self._own_attributes(place, place.owner, items)
            else:
                yield place, items

    def _own_attributes(self, place: Place, owner: int, items: Items) -> Items:
        assert self._reach is not None
        now, reads = place.space.items(), self._reach.reads
        before, after = dict(items), dict(now)
        own: Items = []
        for name in {**before, **after}:
            old, new = before.get(name, MISSING), after.get(name, MISSING)
            if (
                old is new
                or _holds_stand_in(new, set())
                or reads.may_have_changed(owner, name, is_new=old is MISSING)
            ):
                own.append((name, old))
                continue
            own.append((name, new))
            if reads.has((owner, name)) and not same(old, new):
                reads.disturbed.append(place.space.label(name))
        if type(place.space) is MappingSpace:
            own = [(name, value) for name, value in own if value is not MISSING]
        return own

    def restore(self, fakes: Iterable[tuple[Any, Any]] = ()) -> None:
        """Put everything back: the same holders with the old contents in the old order. Values of
        tensors are not touched.

        Args:
            fakes: tensors, each with what capture has put in its place.

        Raises:
            Exception: whatever a holder raised that refuses its old contents; everything else is
                put back all the same.
        """
        failures: list[Exception] = []
        for place, items in self._own_holders(fakes):
            if isinstance(place.space, OptimizerSpace) or _is_untouched(place.space, items):
                continue
            try:
                _put(place.space, items)
            except Exception as error:  # noqa: BLE001 - raised again once the rest is back
                failures.append(error)
        for state in self._tensors:
            state.restore()
        for cache, misses, keys in self._caches:
            if cache.cache_info().misses != misses:
                forget_others(cache, keys)  # it may hold results made of fake tensors
        with disable_current_modes():
            for number in self._own_sources():
                _, read, write = self._sources[number]
                if not is_same_state(read(), self._drawn[number]):
                    write(self._drawn[number])
        if failures:
            raise failures[0]


_LIVE: Final = (LiveFloat, LiveInt)
_STAND_INS: Final = (FakeTensor, *_LIVE)
"""What only capture puts in the place of another value."""


def _holds_stand_in(value: Any, seen: set[int]) -> bool:
    """Whether a value is such a stand-in, or was made by capture to hold one."""
    kind = type(value)
    if issubclass(kind, _STAND_INS):
        return True
    if issubclass(kind, weakref.ref):
        return issubclass(type(weakref.ref.__call__(value)), _STAND_INS)
    if id(value) in seen:
        return False
    seen.add(id(value))
    parts = _frozen_parts(value) or [part for _, part in entries_of(value)]
    return any(_holds_stand_in(part, seen) for part in parts)


def _frozen_parts(value: Any) -> list[Any] | None:
    """What a tuple or frozen set holds, or a weak reference leads to; None for anything else."""
    if issubclass(type(value), weakref.ref):
        return [weakref.ref.__call__(value)]
    base: Any = next((base for base in (tuple, frozenset) if issubclass(type(value), base)), None)
    return None if base is None else list(base.__iter__(value))


def _put(space: Space, items: Items) -> None:
    """Gives a space these contents: only the values that differ, where the keys are the same."""
    now = space.items()
    if (
        type(space) not in (MappingSpace, SequenceSpace)
        or len(now) != len(items)
        or any(key is not other for (key, _), (other, _) in zip(now, items, strict=True))
    ):
        space.put(items)
        return
    for (key, old), (_, value) in zip(now, items, strict=True):
        if value is not old:
            space.set(key, value)


def _holds_fake(value: Any, tensors: Collection[int]) -> bool:
    parts = _frozen_parts(value)
    if parts is None:
        return id(value) in tensors
    return any(_holds_fake(part, tensors) for part in parts)


def _with_tensors(space: Space, now: Items, before: Items, tensors: dict[int, Any]) -> Items:
    """What a space holds now, with tensors in the place of their fakes."""

    def real(place: int, value: Any) -> Any:
        if not _holds_fake(value, tensors):
            return value
        likely = (old for _, old in before[place : place + 1])
        others = (old for _, old in before)  # for a queue from which others have taken something
        return next(
            (old for old in chain(likely, others) if _stands_for(value, old, tensors)), value
        )

    values = [real(place, value) for place, (_, value) in enumerate(now)]
    return [(key, value) for (key, _), value in zip(now, values, strict=True)]


def _stands_for(value: Any, old: Any, tensors: dict[int, Any]) -> bool:
    """Whether capture has put a value, with fakes, in the place of another."""
    if value is old or tensors.get(id(value)) is old:
        return True
    parts, others = _frozen_parts(value), _frozen_parts(old)
    if type(value) is not type(old) or parts is None or others is None:
        return False
    return are_all(partial(_stands_for, tensors=tensors), parts, others)


def _entry(items: Items, key: Any) -> Any:
    return next((value for other, value in items if same(other, key)), MISSING)


class _TensorState:
    """What is kept of one tensor."""

    __slots__ = ("data", "grad", "path", "requires_grad", "tensor", "version")

    def __init__(self, path: str, tensor: torch.Tensor) -> None:
        self.path = path
        self.tensor = tensor
        self.requires_grad = tensor.requires_grad
        self.grad = gradient_of(tensor)
        self.version = _version(tensor)
        # If the user's tensors are fakes, the step is traced on these themselves; fakes of roam's
        # take the place of real tensors only.
        self.data = tensor.detach() if issubclass(type(tensor), FakeTensor) else None

    def changes(self) -> list[str]:
        reasons = []
        if self.tensor.requires_grad != self.requires_grad:
            reasons.append(
                f"the requires_grad of {self.path} changed from {self.requires_grad} to {self.tensor.requires_grad}"
            )
        if _version(self.tensor) != self.version:
            reasons.append(f"{self.path} was written to")
        return reasons

    def restore(self) -> None:
        if gradient_of(self.tensor) is not self.grad:
            self.tensor.grad = self.grad
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)
        if self.data is not None:
            self.tensor.data = self.data


def _version(tensor: torch.Tensor) -> int:
    # A fake tensor has no values that could be written to.
    is_fake = isinstance(local_of(tensor), FakeTensor)
    return 0 if is_fake or tensor.is_inference() else version_of(tensor)


def _is_number_after(old: Any, value: Any) -> bool:
    """Whether a step put a number in the place of a number, or a number that it calculated in the
    place of None.
    """
    return isinstance(value, _LIVE) if old is None else _is_number(old) and _is_number(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or isinstance(value, _LIVE) or is_numpy_float(value)


def _is_untouched(space: Space, items: Items) -> bool:
    now = space.items()
    if isinstance(space, ArraySpace):
        return all(same(old, value) for (_, value), (_, old) in zip(now, items, strict=True))
    if isinstance(space, SetSpace):
        # Elements that are put back may come in another order where their hashes meet.
        return {id(element) for element, _ in now} == {id(element) for element, _ in items}
    return are_identical(now, items)


def _changes(place: Place, items: Items) -> list[str]:
    """Readable differences between what a space held and what it holds."""
    space = place.space
    if _is_untouched(space, items):
        return []
    now = space.items()
    if isinstance(space, SetSpace):
        return [Misfit(f"{space.path} holds other elements than before", space.path)]
    if isinstance(space, SequenceSpace) and len(now) != len(items):
        return [changed(space.path, f"{len(items)}", f"{len(now)} entries")]
    before = {_stand_in(key): (key, value) for key, value in items}
    after = {_stand_in(key): (key, value) for key, value in now}
    reasons = []
    for stand_in in before | after:
        key, old = before.get(stand_in, (None, MISSING))
        key, value = after.get(stand_in, (key, MISSING))
        if place.guarded and _differ_by_tensors(old, value):
            continue  # the user may put another tensor in a tensor's place
        if not same(old, value) and not (place.guarded and space.is_live(key, old, value)):
            reasons.append(_difference(space.label(key), old, value))
    if not reasons and list(before) != list(after):
        reasons.append(f"the entries of {space.path} changed their order")
    return reasons


def _difference(path: str, old: Any, value: Any) -> str:
    if type(old) is type(value) and type(old) in (list, dict):
        kind = type(old).__name__
        found = Misfit(
            f"{path} is another {kind} than before; change the same {kind} (clear() empties it), or keep a tuple there; "
            "if it is a library's cache, delete it at the end of the step",
            path,
        )
        found.may_recur = True
        return found
    return changed(path, show(old), show(value))


def place_of(reason: str) -> str:
    """What has changed, of one of the reasons that `Snapshot.moved` gives."""
    return reason.place if isinstance(reason, Misfit) else reason


def _differ_by_tensors(old: Any, value: Any) -> bool:
    """Whether two values are equal but for tensors, also in tuples."""
    if issubclass(type(old), torch.Tensor):
        return issubclass(type(value), torch.Tensor)
    if type(old) is not type(value) or old is value or not issubclass(type(old), tuple):
        return same(old, value)
    return are_all(_differ_by_tensors, _frozen_parts(old), _frozen_parts(value))


def _stand_in(key: Any) -> Any:
    """A key that may be hashed and compared in place of one that may not."""
    if type(key) is tuple:
        return tuple(map(_stand_in, key))
    return (type(key), key) if type(key) in (str, int) else id(key)


_DRAWS: Final = 1_000
Source = tuple[str, Callable[[], Any], Callable[[Any], object]]


def random_sources(reach: Reach) -> list[Source]:
    """Every random generator in question: its name, and how to read and write its state."""
    sources: list[Source] = [
        ("Python's random generator", random.getstate, random.setstate),
        ("PyTorch's default generator", torch.get_rng_state, torch.set_rng_state),
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        sources.append(
            ("NumPy's default generator", numpy.random.get_state, numpy.random.set_state)
        )
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        sources.append(
            (
                "CUDA's default generators",
                torch.cuda.get_rng_state_all,
                torch.cuda.set_rng_state_all,
            )
        )
    sources += [
        (path, generator.get_state, generator.set_state) for path, generator in reach.generators
    ]
    return sources + [source_of(path, source) for path, source in reach.random_sources]


def source_of(path: str, source: Any) -> Source:
    """The same of a ``random.Random`` or a generator of NumPy's."""
    if isinstance(source, random.Random):
        return path, source.getstate, source.setstate
    bits = source.bit_generator if hasattr(source, "bit_generator") else source._bit_generator
    return path, partial(getattr, bits, "state"), partial(setattr, bits, "state")


def _moved_on(state: Any) -> Any:
    """The state of a generator of Python's or NumPy's after some draws; None for any other."""
    numpy = sys.modules.get("numpy")
    if type(state) is dict and numpy is not None:
        bits = getattr(numpy.random, state["bit_generator"])()
        bits.state = state
        bits.random_raw(_DRAWS)
        return bits.state
    if type(state) is not tuple:
        return None
    if type(state[0]) is int:
        source = random.Random()
        source.setstate(state)
        source.getrandbits(32 * _DRAWS)
        return source.getstate()
    twin = numpy.random.RandomState()  # type: ignore[union-attr]
    twin.set_state(state)
    twin.random_sample(_DRAWS)
    return twin.get_state()


def is_same_state(state: Any, other: Any) -> bool:
    """Whether two states of a random generator are equal."""
    return alike(state, other, _is_same_part)


def _is_same_part(part: Any, other: Any) -> bool:
    if isinstance(part, torch.Tensor):
        return torch.equal(part, other)
    equal = part == other
    return bool(equal.all() if type(part).__module__ == "numpy" else equal)
