"""Snapshot: everything that a step reaches, kept so that tracing can run the user's function and
restore everything afterwards.

A snapshot keeps the contents of every container and object, but no copies of the values in them.
Tensors' values are not copied: a tensor's version counter shows whether it was written to.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from roam.state.cached_results import forget_others, keys_of, tensors_in
from roam.state.containers import ArraySpace, MappingSpace, SequenceSpace, SetSpace, entries_of
from roam.state.equality import MISSING, is_plain, same, show
from roam.state.live_scalars import LiveFloat, LiveInt
from roam.state.namespaces import AttributesSpace
from roam.state.optimizer_spaces import OptimizerSpace
from roam.state.reach import Place, Reach
from roam.state.spaces import Items, Space
from roam.torch_compat.private import FakeTensor, disable_current_modes, local_of, version_of

DRAWN = "was drawn from"
"""Ends the reason that tells of a random generator."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An entry of a dictionary, or an attribute, that was given another value: a plain one, or a
    tensor made of constants.
    """

    space: Space
    key: Any
    old: Any
    """What was there before, or `MISSING`."""
    value: Any
    """The plain value, or how to make the tensor."""
    slot: int | None = None
    """The tensor's slot in the program that was traced."""

    def apply(self) -> None:
        """Gives it the new value; a tensor is made where there is none yet."""
        if self.slot is None:
            self.space.set(self.key, self.value)
        elif self.is_pending():
            self.space.set(self.key, self.value())

    def is_pending(self) -> bool:
        """Whether it has the old value."""
        return same(self.old, self.space.get(self.key))

    def undo(self) -> None:
        """Gives it the old value."""
        if self.old is MISSING and type(self.space) is MappingSpace:
            self.space.put(
                [(key, value) for key, value in self.space.items() if not same(key, self.key)]
            )
        else:
            self.space.set(self.key, self.old)


@contextmanager
def applied(settings: Sequence[Setting]) -> Iterator[None]:
    """A context in which the new values are in place. When it ends, the old ones come back."""
    for setting in settings:
        setting.apply()
    try:
        yield
    finally:
        for setting in settings:
            setting.undo()


Made = Callable[[Any], tuple[int, Callable[[], Any]] | None]
"""Takes a tensor that a trace has made, and returns its slot and a function that makes it for real;
None if it depends on more than constants.
"""


class Snapshot:
    """The state that `reach` found, as it is now.

    Kept are the contents and order of every holder; ``.grad``, ``requires_grad`` and the version of
    every tensor; the state of Python's, NumPy's and PyTorch's default random generators, CUDA's
    where CUDA is in use, and of every generator that the step reaches. What iterators have handed
    out cannot be kept (`Reach.iterators`).
    """

    def __init__(self, reach: Reach) -> None:
        # An optimizer's hyper-parameters are a view of holders that are kept in their own right.
        places = [place for place in reach.places if not place.space.is_immutable]
        self._renewed = reach.renewed
        self._paths = {
            id(place.space.holder): place.space.path
            for place in places
            if isinstance(place.space, (MappingSpace, SequenceSpace))
        }
        self._holders = [(place, place.space.items()) for place in places]
        tensors = {id(slot.tensor): (slot.path, slot.tensor) for slot in reversed(reach.slots)}
        self._tensors = [_TensorState(path, tensor) for path, tensor in reversed(tensors.values())]
        self._caches = [
            (path, cache, cache.cache_info().misses, keys_of(cache)) for path, cache in reach.caches
        ]
        self._sources = random_sources(reach)
        with disable_current_modes():
            self._drawn = [read() for _, read, _ in self._sources]

    def moved(self) -> list[str]:
        """What changed since, other than live state: guarded Python values, parameters and other
        tensors written to or changed in kind, random generators drawn from. Empty if nothing did.
        """
        reasons = [
            reason
            for place, items in self._holders
            if place.guarded
            for reason in self._changes(place, items)
        ]
        reasons += [reason for state in self._tensors for reason in state.changes()]
        reasons += [
            f"{path} keeps another result with tensors"
            for path, cache, misses, _ in self._caches
            if cache.cache_info().misses != misses
            and any(isinstance(tensor, FakeTensor) for tensor in tensors_in(cache))
        ]
        with disable_current_modes():
            for (name, read, _), drawn in zip(self._sources, self._drawn, strict=True):
                if not _is_same_state(read(), drawn):
                    reasons.append(f"{name} {DRAWN}")
        return reasons

    def stir(self) -> None:
        """Moves Python's and NumPy's random generators on. A step that draws a number and puts the
        state back then draws another number in its next trace.
        """
        for place, (_, _, write) in enumerate(self._sources):
            state = _moved_on(self._drawn[place])
            if state is not None:
                write(state)
                self._drawn[place] = state

    def settings(self, made: Made) -> list[Setting] | None:
        """The changes of which `moved` tells, as settings. None unless all of them are entries of
        dictionaries, or attributes, that now hold other plain values, or tensors where none were.
        """
        found: list[Setting] = []
        reasons = 0
        for place, items in self._holders:
            if not place.guarded or not (changes := self._changes(place, items)):
                continue
            reasons += len(changes)
            if type(place.space) in (MappingSpace, AttributesSpace):
                found += [
                    setting
                    for key, value in place.space.items()
                    if (setting := _setting(place.space, key, _entry(items, key), value, made))
                    is not None
                ]
        storages = [setting.value.storage for setting in found if setting.slot is not None]
        is_apart = len(storages) == len(set(storages))  # each is made by itself
        return found if is_apart and len(found) == reasons == len(self.moved()) else None

    def numbers(self) -> set[str]:
        """Among the changes of which `moved` tells: paths of the numbers that others have replaced,
        such as counters and running sums.
        """
        found = set()
        for place, items in self._holders:
            if (
                place.guarded
                and type(place.space).set is not Space.set
                and self._changes(place, items)
            ):
                found |= {
                    place.space.label(key)
                    for key, old in items
                    if key != OptimizerSpace.COUNT
                    and not same(old, value := place.space.get(key))
                    and _is_number_after(old, value)
                }
        return found

    def renewed(self) -> set[str]:
        """Among the changes of which `moved` tells: paths of the lists and dictionaries that others
        have replaced, which differ from them only by tensors.
        """
        found: list[Any] = []
        for place, items in self._holders:
            if place.guarded and self._changes(place, items):
                for key, old in items:
                    others: list[Any] = []
                    if _has_other_tensors(old, place.space.get(key), others.append):
                        found += others
        return {self._paths[id(other)] for other in found if id(other) in self._paths}

    def _changes(self, place: Place, items: Items) -> list[str]:
        return _changes(place, items, self._renewed)

    def restore(self) -> None:
        """Put everything back: the same holders with the old contents in the old order. Values of
        tensors are not touched.

        Raises:
            Exception: whatever a holder raised that refuses its old contents; everything else is
                put back all the same.
        """
        failures: list[Exception] = []
        for place, items in self._holders:
            if isinstance(place.space, OptimizerSpace) or _is_untouched(place.space, items):
                continue
            try:
                place.space.put(items)
            except Exception as error:  # noqa: BLE001 - raised again once the rest is back
                failures.append(error)
        for state in self._tensors:
            state.restore()
        for _, cache, misses, keys in self._caches:
            if cache.cache_info().misses != misses:
                forget_others(cache, keys)  # it may hold results made of fake tensors
        with disable_current_modes():
            for (_, read, write), drawn in zip(self._sources, self._drawn, strict=True):
                if not _is_same_state(read(), drawn):
                    write(drawn)
        if failures:
            raise failures[0]


def _entry(items: Items, key: Any) -> Any:
    return next((value for other, value in items if same(other, key)), MISSING)


def _setting(space: Space, key: Any, old: Any, value: Any, made: Made) -> Setting | None:
    if type(key) not in (str, int) or not (old is MISSING or is_plain(old)) or same(old, value):
        return None
    if is_plain(value):
        return Setting(space, key, old, value)
    making = made(value) if isinstance(value, FakeTensor) else None
    return None if making is None else Setting(space, key, old, making[1], making[0])


class _TensorState:
    """What is kept of one tensor."""

    __slots__ = ("data", "grad", "path", "requires_grad", "tensor", "version")

    def __init__(self, path: str, tensor: torch.Tensor) -> None:
        self.path = path
        self.tensor = tensor
        self.requires_grad = tensor.requires_grad
        self.grad = _gradient(tensor)
        self.version = _version(tensor)
        # If the user's tensors are fakes, the step is traced on these themselves; fakes of roam's
        # take the place of real tensors only.
        self.data = tensor.detach() if isinstance(tensor, FakeTensor) else None

    def has_other_gradient(self) -> bool:
        return _gradient(self.tensor) is not self.grad

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
        if self.has_other_gradient():
            self.tensor.grad = self.grad
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)
        if self.data is not None:
            self.tensor.data = self.data


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    # Asking a tensor that is no leaf for its gradient warns.
    return tensor.grad if tensor.is_leaf else None


def _version(tensor: torch.Tensor) -> int:
    # A fake tensor has no values that could be written to.
    is_fake = isinstance(local_of(tensor), FakeTensor)
    return 0 if is_fake or tensor.is_inference() else version_of(tensor)


def _is_number_after(old: Any, value: Any) -> bool:
    """Whether a step put a number in the place of a number, or a number that it calculated in the
    place of None.
    """
    return (
        isinstance(value, (LiveFloat, LiveInt))
        if old is None
        else _is_number(old) and _is_number(value)
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or isinstance(value, (LiveFloat, LiveInt))


def _is_untouched(space: Space, items: Items) -> bool:
    now = space.items()
    if isinstance(space, ArraySpace):
        return all(same(old, value) for (_, value), (_, old) in zip(now, items, strict=True))
    if isinstance(space, SetSpace):
        # Elements that are put back may come in another order where their hashes meet.
        return {id(element) for element, _ in now} == {id(element) for element, _ in items}
    return len(now) == len(items) and all(
        key is old_key and value is old
        for (key, value), (old_key, old) in zip(now, items, strict=True)
    )


def _changes(place: Place, items: Items, renewed: Collection[int]) -> list[str]:
    """Readable differences between what a space held and what it holds.

    Args:
        renewed: identities of the lists and dictionaries in whose place others may be.
    """
    space = place.space
    if _is_untouched(space, items):
        return []
    now = space.items()
    if isinstance(space, SetSpace):
        return [f"{space.path} holds other elements than before"]
    if isinstance(space, SequenceSpace) and len(now) != len(items):
        return [f"{space.path} changed from {len(items)} to {len(now)} entries"]
    before = {_stand_in(key): (key, value) for key, value in items}
    after = {_stand_in(key): (key, value) for key, value in now}
    reasons = []
    for stand_in in before | after:
        key, old = before.get(stand_in, (None, MISSING))
        key, value = after.get(stand_in, (key, MISSING))
        others: list[Any] = []
        if (
            place.guarded
            and _has_other_tensors(old, value, others.append)
            and all(id(other) in renewed for other in others)
        ):
            continue  # the user may put another tensor in a tensor's place
        if not same(old, value) and not (place.guarded and space.is_live(key, old, value)):
            reasons.append(_difference(space.label(key), old, value))
    if not reasons and list(before) != list(after):
        reasons.append(f"the entries of {space.path} changed their order")
    return reasons


def _difference(path: str, old: Any, value: Any) -> str:
    if type(old) is type(value) and type(old) in (list, dict):
        kind = type(old).__name__
        return f"{path} is another {kind} than before; keep a tuple there, or assign the entries of the same {kind}"
    return f"{path} changed from {show(old)} to {show(value)}"


def _has_other_tensors(old: Any, value: Any, renewed: Callable[[Any], None]) -> bool:
    """Whether two values are equal except for tensors, also for tensors in tuples, lists and
    dictionaries. `renewed` is called with each list or dictionary that holds tensors and in whose
    place there is another one.
    """
    if issubclass(type(old), torch.Tensor):
        return issubclass(type(value), torch.Tensor)
    if type(old) is not type(value) or old is value:
        return same(old, value)
    if type(old) in (list, dict):
        before, after = entries_of(old), entries_of(value)
        if not any(map(_holds_tensor, before)):
            return False
        renewed(old)
    elif issubclass(type(old), tuple):
        before, after = list(enumerate(tuple.__iter__(old))), list(enumerate(tuple.__iter__(value)))
    else:
        return same(old, value)
    return len(before) == len(after) and all(
        same(key, other) and _has_other_tensors(one, two, renewed)
        for (key, one), (other, two) in zip(before, after, strict=True)
    )


def _holds_tensor(item: tuple[Any, Any]) -> bool:
    """Whether the value of an item is a tensor or holds one, in tuples, lists or dictionaries."""
    value = item[1]
    if issubclass(type(value), tuple):
        return any(map(_holds_tensor, enumerate(tuple.__iter__(value))))
    return issubclass(type(value), torch.Tensor) or any(map(_holds_tensor, entries_of(value)))


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
    for path, source in reach.random_sources:
        if isinstance(source, random.Random):
            sources.append((path, source.getstate, source.setstate))
        else:
            bits = (
                source.bit_generator if hasattr(source, "bit_generator") else source._bit_generator
            )
            sources.append(
                (
                    path,
                    functools.partial(getattr, bits, "state"),
                    functools.partial(setattr, bits, "state"),
                )
            )
    return sources


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


def _is_same_state(state: Any, other: Any) -> bool:
    """Whether two states of a random generator are equal."""
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict):
        return all(_is_same_state(state[key], other[key]) for key in state)
    if isinstance(state, (list, tuple)):
        return all(map(_is_same_state, state, other))
    if type(state).__module__ == "numpy":
        return bool((state == other).all())
    return bool(state == other)
