"""Guards: whether a step's Python state is still what capture saw.

A captured step depends on the Python values that it met: which branch was taken, the probability of
a dropout, the number of layers in a list. `Guards` notices, in well under a millisecond, if such a
value has changed. `ArgGuard` does so for the arguments of a call, where new tensors of the same
kind are fine.

Plain values are compared by exact type and value, floats by their bits; containers by their
entries; everything else by identity. Tensors that are not parameters are compared by their
metadata, so that the user may replace them. Not guarded, because a compiled step reads them anew at
every call: learning rates, optimizer state, loss scales, gradients.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from typing import Any, Final, Literal

import torch

from roam.state.argument_sizes import OFFSET, ArgumentSizes, Change, lies, may_have_symbols, parted
from roam.state.arguments import Taken, Taker, argument_path
from roam.state.autograd_hooks import (
    NodeHooks,
    held_by_reducers,
    hooks_registered,
    leaves_of,
)
from roam.state.code_guards import Reliance
from roam.state.containers import (
    ArraySpace,
    FrozenSpace,
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
    is_numpy_array,
    is_plain,
    pattern,
    same,
    same_elements,
    show,
)
from roam.state.global_state import AMBIENT
from roam.state.metadata import Table, gradient_of, metadata_change, metadata_of, storages_of
from roam.state.namespaces import CellSpace, FunctionSpace, NamesSpace
from roam.state.nests import containers_in, pattern_of
from roam.state.reach import Reach
from roam.state.sizes import Symbols
from roam.state.spaces import Items, Space, are_identical, is_under
from roam.state.step_call import StepCall
from roam.state.value_stand_ins import is_left_by_tokenizer
from roam.torch_compat.private import FakeTensor, dict_versions

# Holders that many quick comparisons may go through at once: exact types, whose iteration runs
# nobody's code.
_QUICK_HOLDERS: Final = frozenset({dict, OrderedDict, defaultdict, list, deque})


_CONTENTS: Final = operator.attrgetter("cell_contents")
_PARTS: Final = operator.attrgetter(*FunctionSpace.KEYS)


@dataclass(frozen=True, slots=True)
class _OfClass:
    """Stands for a plain value among the arguments of which only the class counts: the step does
    not read it, or reads it anew at every call.
    """

    kind: type


class _AnyTensor:
    """Stands for a tensor that may be replaced; its metadata is checked separately."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Stands for a tuple with such tensors, which another tuple may replace."""

    kind: type
    entries: Items

    @classmethod
    def of(cls, value: Any, expect: Callable[[Any], Any] = lambda entry: entry) -> _Form:
        """The form of a value."""
        return cls(type(value), [(key, expect(part)) for key, part in entries_of(value)])


def _expected(value: Any) -> Any:
    """What to expect where a value is now."""
    if issubclass(type(value), torch.Tensor):
        return value if _is_fixed(value) else _AnyTensor
    if issubclass(type(value), tuple):
        form = _Form.of(value, _expected)
        if any(_may_change(entry) for _, entry in form.entries):
            return form
    return value


def _may_change(expected: Any) -> bool:
    return expected is _AnyTensor or type(expected) is _Form


def _is_as_expected(expected: Any, value: Any) -> bool:
    """Whether a value, or what another check expects, is as expected."""
    if expected is _AnyTensor:
        return value is _AnyTensor or issubclass(type(value), torch.Tensor)
    if type(expected) is _Form:
        if type(value) is not _Form:
            if type(value) is not expected.kind:
                return False
            value = _Form.of(value)
        return (
            value.kind is expected.kind
            and len(value.entries) == len(expected.entries)
            and all(
                same(key, other) and _is_as_expected(entry, part)
                for (key, entry), (other, part) in zip(expected.entries, value.entries, strict=True)
            )
        )
    return same(expected, value)


class Guards:
    """A flat list of checks over the state that a step reaches.

    The usual case, nothing changed, is decided by a few passes over all containers at once that
    compare sizes and the identities of keys and values. Only where those differ is a container
    looked at entry by entry. Objects, modules and parameters that the guards compare by identity
    are kept alive by them; tensors that may be replaced are not.

    Args:
        reach: the state, as it is now.
        ignore: paths that may change, each with everything beneath it, such as ``"self.history"``.
        reliance: what else the step relies on, settled.
    """

    def __init__(
        self,
        reach: Reach,
        ignore: Collection[str] = (),
        reliance: Reliance | None = None,
    ) -> None:
        ignored = tuple(ignore)
        checks = [
            _SpaceCheck(place.space, ignored)
            for place in reach.places
            if place.guarded
            and not place.space.is_immutable
            and not is_under(place.space.path, ignored)
        ]
        self._bulk = _Bulk([check for check in checks if check.is_quick])
        self._single = [check for check in checks if not check.is_quick]
        self._functions = _Functions(self._single)
        self._fixed: list[tuple[str, torch.Tensor, tuple[Any, ...]]] = []
        self._replaceable: list[tuple[str, Space, Any, tuple[Any, ...]]] = []
        seen: set[int] = set()
        for slot in reach.slots:
            if slot.kind in ("argument", "state") or is_under(slot.path, ignored):
                continue
            if _is_fixed(slot.tensor) or (slot.kind == "group" and type(slot.key) is int):
                if id(slot.tensor) not in seen:
                    seen.add(id(slot.tensor))
                    self._fixed.append((slot.path, slot.tensor, metadata_of(slot.tensor)))
            else:
                self._replaceable.append(
                    (slot.path, slot.space, slot.key, metadata_of(slot.tensor))
                )
        self._fixed_tensors = [tensor for _, tensor, _ in self._fixed]
        tensors = [*self._fixed_tensors, *self._values_now()]
        self._table = Table(tensors)
        self._registered = -1  # nobody has looked for hooks
        # Another tensor in a place may have none, as fake ones have none.
        self._have_addresses = not self._replaceable and all(
            type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout is torch.strided
            for one in tensors
        )
        self._addresses: list[int] | None = None
        self._storages = storages_of(tensors)
        self._aliasing = pattern(self._storages)
        # Only tensors that share memory can be one and the same.
        counts = Counter(self._aliasing)
        self._sharing = [place for place, first in enumerate(self._aliasing) if counts[first] > 1]
        self._identities = self._identities_among(tensors)
        self._optimizers = [optimizer for _, optimizer in reach.optimizers]
        self._shared_groups = self._group_pattern()
        self.storage_indices = _first_places(self._storages)
        """The storages of all guarded tensors, as they were when `failure` last found nothing, each
        with the place of its first tensor in a fixed order."""
        self._ambient = [(name, read, read()) for name, read in AMBIENT]
        self._nodes = NodeHooks(
            leaves_of(slot for slot in reach.slots if slot.kind != "argument"),
            held_by_reducers(reach) | reach.held_elsewhere.keys(),
        )
        self._objects = [
            (path, value) for path, value in reach.objects if not is_under(path, ignored)
        ]
        self._shapes = self._shapes_now()
        self._exchangeable = [
            place.space
            for place in reach.places
            if isinstance(place.space, FrozenSpace)
            and place.space.places
            and _may_change(_expected(place.space.now()))
            and not is_under(place.space.path, ignored)
        ]
        """Containers in whose place others may be from call to call."""
        self._growing = [growing.container for growing in reach.growing]
        held = [
            *(value for _, value in self._objects),
            *(getattr(check.space, "holder", None) for check in self._checks()),
            *self._growing,
        ]
        self._object_places = {id(value): place for place, value in enumerate(held)}
        self._reliance = Reliance().settled(reach) if reliance is None else reliance

    def failure(self) -> Misfit | None:
        """None while everything is as it was, else the first difference: its path, the old value
        and the new one.
        """
        for name, read, expected in self._ambient:
            if read() != expected:
                return changed(f"PyTorch's {name}", show(expected), show(read()))
        return (
            self._object_failure()
            or self._bulk.failure()
            or self._single_failure()
            or self._sharing_failure()
            or self._tensor_failure()
            or self._nodes.failure()
            or self._reliance.failure()
        )

    def sizes(self) -> tuple[int, int, int]:
        """How many Python values, tensors (by their metadata), and switches of PyTorch are
        compared.
        """
        values = sum(
            not issubclass(type(value), torch.Tensor)
            for check in self._checks()
            for _, value in check.expected
        )
        return values, len(self._fixed) + len(self._replaceable), len(self._ambient)

    def object_place_of(self, value: object) -> int:
        """The place of an object or container among all guarded ones, in a fixed order, or -1."""
        return self._object_places.get(id(value), -1)

    def place_of(self, tensor: torch.Tensor) -> int:
        """The place of a tensor among all guarded ones, in a fixed order, or -1."""
        tensors = [*self._fixed_tensors, *self._values_now()]
        return next((place for place, one in enumerate(tensors) if one is tensor), -1)

    def stands_for(self, other: Guards) -> bool:
        """Whether these compare the same holders and tensors with the same values as other guards,
        and at least as much of everything else.
        """
        checks, others = self._checks(), other._checks()
        return (
            are_all(_SpaceCheck.expects_the_same, checks, others)
            and are_all(operator.is_, self._fixed_tensors, other._fixed_tensors)
            and [old for *_, old in self._fixed] == [new for *_, new in other._fixed]
            and len(self._replaceable) == len(other._replaceable)
            and all(
                one.holder is two.holder and same(key, other_key) and old == new
                for (_, one, key, old), (_, two, other_key, new) in zip(
                    self._replaceable, other._replaceable, strict=True
                )
            )
            and self._aliasing == other._aliasing
            and self._identities == other._identities
            and self._shared_groups == other._shared_groups
            and are_all(operator.is_, self._shapes, other._shapes)
            and are_all(operator.is_, self._growing, other._growing)
            and self._nodes.watches_the_same(other._nodes)
            and self._reliance.covers(other._reliance)
            and all(same(old, new) for (*_, old), (*_, new) in zip(self._ambient, other._ambient, strict=True))
        )  # fmt: skip

    def _values_now(self) -> list[Any]:
        """What is in the places of tensors that may be replaced."""
        return [space.get(key) for _, space, key, _ in self._replaceable]

    def _checks(self) -> list[_SpaceCheck]:
        return [*self._bulk.checks, *self._bulk.named, *self._single]

    def _shapes_now(self) -> list[Any]:
        """The class and the dictionary of each object, which both may be exchanged."""
        values = [value for _, value in self._objects]
        return [*map(type, values), *map(object.__getattribute__, values, repeat("__dict__"))]

    def _object_failure(self) -> Misfit | None:
        now = self._shapes_now()
        if all(map(operator.is_, now, self._shapes)):
            return None
        for (path, _), kind, expected in zip(self._objects, now, self._shapes, strict=False):
            if kind is not expected:
                return changed(f"the class of {path}", show(expected), show(kind))
        return Misfit("an object that the step reads has another __dict__ than before")

    def _single_failure(self) -> Misfit | None:
        are_as_before = self._functions.are_as_before()
        for check in self._functions.others if are_as_before else self._single:
            reason = check.failure()
            if reason is not None:
                return reason
        if not are_as_before:
            self._functions.leave_out_changed()
        return None

    def _sharing_failure(self) -> Misfit | None:
        """Whether the same places as before hold one and the same container."""
        held: dict[int, FrozenSpace] = {}
        for space in self._exchangeable:
            if not space.is_in_all_places():
                paths = [holder.label(key) for holder, key in space.places]
                return Misfit(f"{' and '.join(paths)} do not hold the same {space.kind} as before")
            other = held.setdefault(id(space.now()), space)
            if other is not space:
                return Misfit(f"{other.path} and {space.path} hold the same {space.kind} now")
        return None

    def _tensor_failure(self) -> Misfit | None:
        if len(self._optimizers) > 1 and self._group_pattern() != self._shared_groups:
            return Misfit("the optimizers do not share groups as before")
        values = self._values_now()
        tensors = [*self._fixed_tensors, *values]
        are_tensors = all(issubclass(type(value), torch.Tensor) for value in values)
        registered = hooks_registered()
        are_unhooked = not values and registered == self._registered
        if not (are_tensors and self._table.fits(tensors, are_unhooked=are_unhooked)):
            failure = self._metadata_failure()
            if failure is not None:
                return failure
        self._registered = registered
        addresses = list(map(torch.Tensor.data_ptr, tensors)) if self._have_addresses else None
        if addresses is None or addresses != self._addresses:
            storages = storages_of(tensors)
            if storages != self._storages:
                if pattern(storages) != self._aliasing:
                    return Misfit("the tensors that the step reaches do not share memory as before")
                self._storages = storages
                self.storage_indices = _first_places(storages)
            self._addresses = addresses
        if self._sharing and self._identities_among(tensors) != self._identities:
            return Misfit(
                "places that the step reaches do not hold one and the same tensor as before"
            )
        return None

    def _identities_among(self, tensors: list[Any]) -> list[int]:
        """Which of the tensors that share memory are one and the same."""
        return pattern([id(tensors[place]) for place in self._sharing])

    def _metadata_failure(self) -> Misfit | None:
        for path, tensor, expected in self._fixed:
            if metadata_of(tensor) != expected:
                return metadata_change(path, expected, metadata_of(tensor))
        for path, space, key, expected in self._replaceable:
            value = space.get(key)
            if not issubclass(type(value), torch.Tensor):
                return changed(path, "a tensor", show(value))
            if metadata_of(value) != expected:
                return metadata_change(path, expected, metadata_of(value))
        return None

    def _group_pattern(self) -> list[int]:
        """Which optimizers have groups in common, as an optimizer that wraps another has."""
        return pattern(
            [id(group) for optimizer in self._optimizers for group in optimizer.param_groups]
        )


class _SpaceCheck:
    """The expected contents of one space."""

    __slots__ = ("expected", "ignored", "is_quick", "space")

    def __init__(self, space: Space, ignored: tuple[str, ...]) -> None:
        self.space = space
        self.ignored = ignored
        self.expected: Items = []
        self.rebase()
        if isinstance(space, SetSpace):
            self.is_quick = type(space.holder) is set and not self.expected
        else:
            # Tensors that are replaced at every step would fail the quick comparison at every step.
            self.is_quick = (
                isinstance(space, (MappingSpace, NamesSpace, SequenceSpace))
                and type(space.holder) in _QUICK_HOLDERS
                and not any(_may_change(value) for _, value in self.expected)
                and not (
                    ignored and any(is_under(space.label(key), ignored) for key, _ in self.expected)
                )
            )

    def rebase(self) -> None:
        """Expect what is there now."""
        self.expected = [(key, _expected(value)) for key, value in self.space.items()]

    def failure(self) -> Misfit | None:
        space, items = self.space, self.space.items()
        if isinstance(space, SetSpace):
            if same_elements([key for key, _ in self.expected], [key for key, _ in items]):
                return None
            return Misfit(f"{space.path} holds other elements than before, or in another order")
        for (key, value), (old, expected) in zip(items, self.expected, strict=False):
            if not same(old, key):
                break
            if not self._is_same(key, expected, value):
                found = changed(space.label(key), _show(expected), show(value))
                found.may_recur = type(value) is type(expected) in (list, dict, int, float)
                return found
        else:
            if len(items) == len(self.expected):
                return None
        found = self._key_change(items)
        found.may_recur = True
        return found

    def expects_the_same(self, other: _SpaceCheck) -> bool:
        """Whether another check compares the same holder with the same contents, except for what
        either lets change.
        """
        return (
            type(self.space) is type(other.space)
            and self.space.holder is other.space.holder
            and self.ignored == other.ignored
            and len(self.expected) == len(other.expected)
            and all(
                same(key, other_key)
                and self._is_same(key, value, other_value)
                and other._is_same(key, other_value, value)
                for (key, value), (other_key, other_value) in zip(
                    self.expected, other.expected, strict=True
                )
            )
        )

    def _is_same(self, key: Any, expected: Any, value: Any) -> bool:
        if _is_as_expected(expected, value):
            return True
        if self.space.is_live(key, expected, value):
            return True
        return bool(self.ignored) and is_under(self.space.label(key), self.ignored)

    def _key_change(self, items: Items) -> Misfit:
        space = self.space
        if isinstance(space, SequenceSpace):
            return changed(space.path, str(len(self.expected)), f"{len(items)} entries")
        for key, value in items:
            if not any(same(old, key) for old, _ in self.expected):
                return Misfit(changed(space.label(key), "nothing", show(value)), space.path)
        for old, expected in self.expected:
            if not any(same(old, key) for key, _ in items):
                return Misfit(changed(space.label(old), _show(expected), "nothing"), space.path)
        return Misfit(f"the entries of {space.path} changed their order")


class _Bulk:
    """Many space checks in a few passes.

    Most state is in dictionaries. Each has a version that every change moves; so one whose version
    is that of the last comparison holds the same under the same keys, in the same order.
    """

    def __init__(self, checks: list[_SpaceCheck]) -> None:
        self.named = [check for check in checks if isinstance(check.space, NamesSpace)]
        self._namespaces = [check.space.holder for check in self.named for _ in check.expected]
        self._names = [name for check in self.named for name, _ in check.expected]
        self.checks = [check for check in checks if not isinstance(check.space, NamesSpace)]
        # Most tables of a module are empty, and stay so.
        self._empty = [check.space.holder for check in self.checks if not check.expected]
        filled = [check for check in self.checks if check.expected]
        self._versioned = [check for check in filled if _has_version(check.space.holder)]
        self._dictionaries: list[Any] = [check.space.holder for check in self._versioned]
        self._versions = [-1] * len(self._dictionaries)
        self._others = [check for check in filled if not _has_version(check.space.holder)]
        self._holders: list[Any] = [check.space.holder for check in self._others]
        # Views show the dictionary of now, however often it changes.
        self._values = [
            holder.values() if isinstance(holder, dict) else holder for holder in self._holders
        ]
        self._keyed = [holder for holder in self._holders if isinstance(holder, dict)]
        self._expect()

    def _expect(self) -> None:
        self._sizes = [len(check.expected) for check in self._others]
        self._expected = [value for check in self._others for _, value in check.expected]
        self._keys = [
            key
            for check in self._others
            if isinstance(check.space, MappingSpace)
            for key, _ in check.expected
        ]
        self._expected_named = [value for check in self.named for _, value in check.expected]

    def failure(self) -> Misfit | None:
        versions = dict_versions(self._dictionaries)  # before their contents are looked at
        if versions != self._versions:
            moved = map(operator.ne, versions, self._versions)
            if (reason := _first_failure(compress(self._versioned, moved))) is not None:
                return reason
            self._versions = versions
        if (
            not any(self._empty)
            and list(map(len, self._holders)) == self._sizes
            and all(map(operator.is_, chain.from_iterable(self._values), self._expected))
            and all(map(operator.is_, chain.from_iterable(self._keyed), self._keys))
            and all(
                map(
                    operator.is_,
                    map(dict.get, self._namespaces, self._names, repeat(MISSING)),
                    self._expected_named,
                )
            )
        ):
            return None
        if (reason := _first_failure((*self.checks, *self.named))) is not None:
            return reason
        self._expect()
        return None


def _has_version(holder: Any) -> bool:
    return isinstance(holder, dict) and not isinstance(holder, OrderedDict)


def _first_failure(checks: Iterable[_SpaceCheck]) -> Misfit | None:
    """Compares spaces entry by entry. Those that hold other objects which are the same for a step
    are expected to hold these from now on.
    """
    for check in checks:
        if not are_identical(check.space.items(), check.expected):
            reason = check.failure()
            if reason is not None:
                return reason
            check.rebase()
    return None


class _Functions:
    """Checks of functions and of variables that functions close over, in a few passes. A step that
    reaches the code of a large library has tens of thousands of them.

    Args:
        checks: these and others.

    Attributes:
        others: the checks that the passes leave out.
    """

    def __init__(self, checks: list[_SpaceCheck]) -> None:
        self._all = checks
        self._known = {
            id(check)
            for check in checks
            if type(check.space) in (CellSpace, FunctionSpace)
            and not check.ignored
            and not any(value is MISSING or _may_change(value) for _, value in check.expected)
        }
        self._arrange()

    def _arrange(self) -> None:
        known = [check for check in self._all if id(check) in self._known]
        cells = [check for check in known if type(check.space) is CellSpace]
        functions = [check for check in known if type(check.space) is FunctionSpace]
        self._cells = [check.space.holder for check in cells]
        self._functions = [check.space.holder for check in functions]
        self._expected = [value for check in cells + functions for _, value in check.expected]
        self.others = [check for check in self._all if id(check) not in self._known]

    def are_as_before(self) -> bool:
        """Whether all hold the very objects that they held."""
        try:
            contents = list(map(_CONTENTS, self._cells))
        except ValueError:  # a variable has no value any more
            return False
        parts = chain(contents, chain.from_iterable(map(_PARTS, self._functions)))
        return all(map(operator.is_, parts, self._expected))

    def leave_out_changed(self) -> None:
        """After a comparison one by one has found no difference that counts: leaves out what holds
        other objects than before, such as a number that the step changes.
        """
        self._known -= {
            id(check)
            for check in self._all
            if id(check) in self._known and not are_identical(check.space.items(), check.expected)
        }
        self._arrange()


class ArgGuard:
    """Whether a call's arguments fit a captured step: the same structure, tensors of the same
    metadata that share memory, or are one and the same, in the same way, equal plain values, the
    same models, optimizers and other objects. Tensors themselves may be new at every call.

    Args:
        args: the positional arguments of the captured call.
        kwargs: its keyword arguments.
        guards: the state's guards; where given, an argument that shares memory with a parameter,
            buffer or loose tensor must do so again, and no other may.
        live: places among the flattened arguments of floats and integers that the step reads anew
            at every call.
        received: places of the tensors that are the call's own, with their gradients, and in no
            other place of the step's.
        taker: takes the arguments apart.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        guards: Guards | None = None,
        live: Collection[int] = (),
        received: Collection[int] = (),
        taker: Taker | None = None,
    ) -> None:
        self._guards = guards
        self.taker = Taker() if taker is None else taker
        taken = self.taker.take(args, kwargs)
        self._spec = taken.spec
        self._keys = _keys_in(taken.plain_spec)
        self._leaves = [
            (
                path,
                _OfClass(type(value))
                if index in live or is_left_by_tokenizer(value)
                else _leaf(value, index in received),
            )
            for index, (path, value) in enumerate(
                zip(taken.paths(argument_path, args, kwargs), taken.leaves, strict=True)
            )
        ]
        self._aliasing = self._alias(taken.leaves)
        self._held = self._held_by_state(taken, (args, kwargs))
        self.sizes: ArgumentSizes | None = None
        """Which sizes of the arguments may be others than at capture."""

    def __str__(self) -> str:
        """The tensors among the arguments, and the plain values."""
        shown = [
            f"{path} {self._shape(place, expected)}"
            for place, (path, expected) in enumerate(self._leaves)
            if isinstance(expected, _Leaf) or is_plain(expected)
        ]
        return ", ".join(shown) or "no tensors"

    def _shape(self, place: int, expected: Any) -> str:
        """A shape or a plain value as people read it, with ranges of sizes."""
        is_tensor, sizes = isinstance(expected, _Leaf), self.sizes
        shape = tuple(expected.metadata[2]) if is_tensor else (expected,)
        if sizes is None or place not in sizes.dims:
            return str(shape) if is_tensor else show(expected)
        ends = zip(sizes.least, sizes.largest(), strict=True)
        bounds = dict(zip(sizes.symbols.symbols.values(), ends, strict=True))
        shown = list(map(str, shape))
        for dim, size in sizes.dims[place].items():
            symbol, more = parted(size)
            if dim != OFFSET:
                least, most = bounds[symbol]
                shown[dim] = f"{least + more}..{most + more}"
        if not is_tensor:
            return shown[0]
        return f"({', '.join(shown)}{',' if len(shown) == 1 else ''})"

    def described(self) -> list[tuple[str, Literal["tensor", "value", "object"]]]:
        """How a reader would write each of the flattened arguments, and what it is: a tensor, a
        value that is compared, or an object that has to be the same.
        """
        return [
            (
                path,
                "tensor"
                if isinstance(expected, _Leaf)
                else "value"
                if type(expected) is _OfClass or is_plain(expected)
                else "object",
            )
            for path, expected in self._leaves
        ]

    def failure(self, call: StepCall) -> Misfit | None:
        """None if the plan of the captured call fits this one too, else the first difference. The
        state's guards have to be asked first: what they noted tells whether an argument shares
        memory with the state.
        """
        taken = call.taken(self.taker)
        leaves = taken.leaves
        if taken.spec != self._spec or (
            self._keys and not same(self._keys, _keys_in(taken.plain_spec))
        ):
            return Misfit("the arguments have another structure than before")
        sized = () if self.sizes is None else self.sizes.dims
        for place, ((path, expected), value) in enumerate(zip(self._leaves, leaves, strict=True)):
            if isinstance(expected, _Leaf):
                if not issubclass(type(value), torch.Tensor):
                    return changed(path, "a tensor", show(value))
                if metadata_of(value) != expected.metadata and not (
                    place in sized and expected.is_resized(value)
                ):
                    return metadata_change(path, expected.metadata, metadata_of(value))
                if expected.is_received and _gradient(value) != expected.gradient:
                    return Misfit(
                        f"{path} has a gradient and had none before, or the other way round, or a "
                        "gradient of another kind"
                    )
            elif type(expected) is _OfClass:
                if type(value) is not expected.kind:
                    return changed(path, f"a value of class {expected.kind.__name__}", show(value))
            elif not same(expected, _leaf(value)) and not (place in sized and type(value) is int):
                return changed(path, show(expected), show(value))
        if self._held_by_state(taken, (call.args, call.kwargs)) != self._held:
            return Misfit(
                "other arguments than before are one and the same object, or the step's state "
                "holds others of them"
            )
        if self._alias(leaves) != self._aliasing:
            return Misfit(
                "the arguments do not share memory, with one another or with the step's "
                "state, or are not the same tensors, as before"
            )
        return None if self.sizes is None else self.sizes.failure(leaves)

    def places_named(self, name: str) -> list[int]:
        """The places of the tensors that a user calls so: by their paths, or the last key of
        these.
        """
        return [
            place
            for place, (path, expected) in enumerate(self._leaves)
            if isinstance(expected, _Leaf)
            and (path == name or path.endswith((f"[{name!r}]", f".{name}")))
        ]

    def size(self, place: int, dim: int) -> int:
        """A dimension of one of the flattened arguments at capture, as `Layout.size` has it."""
        expected: Any = self._leaves[place][1]
        return expected if type(expected) is int else int(expected.layout.size(dim))

    def numbers(self, call: StepCall, may_follow: Callable[[str], bool]) -> list[int]:
        """The places of whole numbers among a call's flattened arguments that were others in the
        captured call, or follow from symbols there.

        Args:
            may_follow: whether the number at a path may follow from a symbol.
        """
        taken, sized = call.taken(self.taker), () if self.sizes is None else self.sizes.dims
        if taken.spec != self._spec:
            return []
        found = []
        for place in taken.outer:
            (path, before), now = self._leaves[place], taken.leaves[place]
            if type(before) is type(now) is int and (
                place in sized
                or (before != now and min(before, now) >= Symbols.LEAST and may_follow(path))
            ):
                found.append(place)
        return found

    def changes(self, call: StepCall, numbers: Collection[int] = ()) -> dict[int, Change]:
        """Those of a call's flattened arguments that lie otherwise than the captured call's, or may
        do so, and those that share memory with them. Empty if anything else of the arguments'
        metadata differs, nothing does, or a size may be no symbol.

        Args:
            numbers: places of whole numbers that are to follow from symbols.
        """
        taken = call.taken(self.taker)
        if taken.spec != self._spec or self._alias(taken.leaves) != self._aliasing:
            return {}
        tensors = [
            (place, expected, value)
            for place, ((_, expected), value) in enumerate(
                zip(self._leaves, taken.leaves, strict=True)
            )
            if isinstance(expected, _Leaf)
        ]
        found, storages, has_changed = dict[int, Change](), set[tuple[int, int]](), False
        for place in numbers:
            before, now = self._leaves[place][1], taken.leaves[place]
            has_changed = has_changed or before != now
            if now < Symbols.LEAST:
                return {}
        memory = list(zip(*self._aliasing[:2], strict=True))
        for (place, expected, value), storage in zip(tensors, memory, strict=True):
            if not issubclass(type(value), torch.Tensor):
                return {}
            is_same = metadata_of(value) == expected.metadata
            has_changed = has_changed or not is_same
            if is_same and (self.sizes is None or place not in self.sizes.layouts):
                continue
            if not expected.is_resized(value) or any(
                before != now and now < Symbols.LEAST
                for before, now in zip(expected.metadata[2], value.shape, strict=True)
            ):
                return {}
            storages.add(storage)
        for (place, expected, value), storage in zip(tensors, memory, strict=True):
            if has_changed and storage in storages:
                now = lies(value)
                # Who plans for fakes of several sizes asks what each of them takes.
                is_fake = isinstance(value, FakeTensor)
                if storage[1] >= 0 or is_fake or not may_have_symbols(value) or now is None:
                    return {}
                found[place] = Change(expected.layout, now, value.itemsize)
        for place in numbers if has_changed else ():
            number: Any = self._leaves[place][1]
            now = lies(taken.leaves[place])
            assert now is not None, "it is a number"
            found[place] = Change(lies(number), now, 1)
        return found

    def path_of(self, place: int) -> str:
        """How a reader would write one of the flattened arguments."""
        return self._leaves[place][0]

    def sharing(self, place: int, leaves: Sequence[Any]) -> dict[int, Change]:
        """One of the captured call's flattened arguments and those that share memory with it."""
        tensors = [
            at for at, (_, expected) in enumerate(self._leaves) if isinstance(expected, _Leaf)
        ]
        storages = dict(zip(tensors, self._aliasing[0], strict=True))
        return {
            at: Change(None, now, leaves[at].itemsize)
            for at in tensors
            if storages[at] == storages[place] and (now := lies(leaves[at])) is not None
        }

    def _held_by_state(self, taken: Taken, arguments: Any) -> tuple[list[int], list[int]]:
        """Which of the objects and containers that are taken apart the state holds too, and where,
        and which of the containers are one and the same: the step may ask whether two of them are.
        """
        containers = containers_in(arguments, taken.closed)
        found = [
            *chain.from_iterable(parts.objects for parts in taken.objects.values()),
            *containers,
        ]
        pattern = pattern_of(found)
        if self._guards is None:
            return [], pattern
        return list(map(self._guards.object_place_of, found)), pattern

    def _alias(self, leaves: list[Any]) -> tuple[list[int], ...]:
        """Which tensors share memory with one another or with the state, and which of those are one
        and the same.
        """
        tensors = [leaf for leaf in leaves if issubclass(type(leaf), torch.Tensor)]
        storages = storages_of(tensors)
        owned = self._guards.storage_indices if self._guards else {}
        owners = [owned.get(storage, -1) for storage in storages]
        same_tensors = pattern(list(map(id, tensors))) if len(set(storages)) < len(storages) else []
        held = [
            self._guards.place_of(tensor)
            for tensor, owner in zip(tensors, owners, strict=True)
            if self._guards and owner >= 0
        ]
        encodings = pattern([id(leaf) for leaf in leaves if is_left_by_tokenizer(leaf)])
        return pattern(storages), owners, same_tensors, held, encodings


def _keys_in(spec: Any) -> tuple[Any, ...]:
    """The keys of dictionaries in a structure that are no text: 1, 1.0, and True are equal."""
    context = spec.context if isinstance(spec.context, list) else []
    # That of a `defaultdict` is its factory and the list of its keys.
    keys = chain.from_iterable(part if isinstance(part, list) else [part] for part in context)
    inner = (key for child in spec.children() for key in _keys_in(child))
    return (*(key for key in keys if type(key) is not str), *inner)


class _Leaf:
    """What is expected of a tensor among the arguments."""

    __slots__ = ("gradient", "is_received", "layout", "metadata")

    def __init__(self, tensor: torch.Tensor, is_received: bool) -> None:
        self.metadata = metadata_of(tensor)
        self.layout = lies(tensor)
        self.gradient = _gradient(tensor)
        self.is_received = is_received

    def is_resized(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has these metadata except for sizes, strides and where it begins."""
        before, now = self.metadata, metadata_of(tensor)
        return len(before[2]) == len(now[2]) and (*before[:2], *before[5:]) == (*now[:2], *now[5:])


def _gradient(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    gradient = gradient_of(tensor)
    return None if gradient is None else metadata_of(gradient)


def _leaf(value: Any, is_received: bool = False) -> Any:
    """What to expect of an argument: an array's contents would be frozen into the step, so they
    count as a plain value.
    """
    if issubclass(type(value), torch.Tensor):
        return _Leaf(value, is_received)
    if is_numpy_array(value) and not value.dtype.hasobject:
        return tuple(ArraySpace(value, "").items())
    return value


def _is_fixed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is itself part of what was captured: gradients are accumulated in it,
    optimizers hold it.
    """
    return issubclass(type(tensor), torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)


def _first_places(storages: list[int]) -> dict[int, int]:
    """Each storage with its first place."""
    return {storage: len(storages) - 1 - place for place, storage in enumerate(reversed(storages))}


def _show(expected: Any) -> str:
    if type(expected) is _Form:
        return f"({', '.join(_show(entry) for _, entry in expected.entries)})"
    return "a tensor" if expected is _AnyTensor else show(expected)
