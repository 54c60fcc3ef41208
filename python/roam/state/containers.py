"""The spaces of containers: dictionaries, lists, tuples, sets, buffers of bytes, arrays."""

from __future__ import annotations

import operator
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, cast

import torch

from roam.state.equality import MISSING
from roam.state.spaces import Items, NamedSpace, Place, Space


class MappingSpace(Space):
    """A dictionary of any kind: a user's, an object's attributes, a module's parameters."""

    __slots__ = ()

    def items(self) -> Items:
        kind = OrderedDict if issubclass(type(self.holder), OrderedDict) else dict
        return list(kind.items(self.holder))

    def put(self, items: Items) -> None:
        kind = OrderedDict if issubclass(type(self.holder), OrderedDict) else dict
        kind.clear(self.holder)
        for key, value in items:
            kind.__setitem__(self.holder, key, value)

    def get(self, key: Any) -> Any:
        return dict.get(self.holder, key, MISSING)

    def set(self, key: Any, value: Any) -> None:
        (OrderedDict if issubclass(type(self.holder), OrderedDict) else dict).__setitem__(
            self.holder, key, value
        )


class RecurrentSpace(MappingSpace):
    """The attributes of a recurrent layer of PyTorch's. The layer also keeps its weights in a list,
    and makes this list anew if it finds another weight than when it made the list.
    """

    __slots__ = ()
    CACHES: Final = ("_flat_weights", "_flat_weight_refs")

    def set(self, key: Any, value: Any) -> None:
        super().set(key, value)
        names = self.holder["_flat_weights_names"]
        if key in names:
            self.holder["_flat_weights"][names.index(key)] = value

    def is_live(self, key: Any, old: Any, value: Any) -> bool:
        return key in self.CACHES and type(old) is type(value) is list


class ProxySpace(Space):
    """What a read-only view of a dictionary shows. The dictionary is a space of its own where the
    step can write to it.
    """

    __slots__ = ()

    def items(self) -> Items:
        return list(self.holder.items())

    def put(self, items: Items) -> None:
        pass


class BytesSpace(Space):
    """A `bytearray`, or an array of Python's own."""

    __slots__ = ()

    def items(self) -> Items:
        return [("", memoryview(self.holder).tobytes())]

    def put(self, items: Items) -> None:
        held, holder = items[0][1], cast(Any, self.holder)
        is_array = issubclass(type(holder), array)
        holder[:] = array(holder.typecode, held) if is_array else held

    def label(self, key: Any) -> str:
        return self.path


class TensorKeyedSpace(MappingSpace):
    """A dictionary with tensors for keys, such as one that holds an optimizer for each parameter.

    During capture its keys are fakes: what is kept under a tensor is then found under its fake. A
    tensor and its fake have the same hash, so a look-up by one of them would compare its values
    with the other's.
    """

    __slots__ = ("_fakes",)

    def __init__(self, holder: dict[Any, Any], path: str) -> None:
        places = {id(key): place for place, key in enumerate(holder)}
        super().__init__(
            holder, path, label=lambda _, key: f"{path}[key {places.get(id(key), '...')}]"
        )
        self._fakes: dict[int, Any] = {}

    def exchange(self, fake: Callable[[Any], Any]) -> None:
        """Puts the fake of each tensor in its place among the keys, until `put` puts tensors there
        again.
        """
        items = self.items()
        fakes = {id(key): fake(key) for key, _ in items if issubclass(type(key), torch.Tensor)}
        self.put([(fakes.get(id(key), key), value) for key, value in items])
        self._fakes = fakes

    def put(self, items: Items) -> None:
        super().put(items)
        self._fakes = {}

    def get(self, key: Any) -> Any:
        return super().get(self._fakes.get(id(key), key))

    def set(self, key: Any, value: Any) -> None:
        super().set(self._fakes.get(id(key), key), value)


class SequenceSpace(Space):
    """A list, a deque, or (read only) a tuple."""

    __slots__ = ()

    @property
    def is_immutable(self) -> bool:
        return issubclass(type(self.holder), tuple)

    def _kind(self) -> Any:
        return next(kind for kind in (list, deque, tuple) if issubclass(type(self.holder), kind))

    def items(self) -> Items:
        return list(enumerate(self._kind().__iter__(self.holder)))

    def put(self, items: Items) -> None:
        kind = self._kind()
        if kind is tuple:
            return
        kind.clear(self.holder)
        kind.extend(self.holder, [value for _, value in items])

    def get(self, key: Any) -> Any:
        return self.holder[key] if 0 <= key < len(self.holder) else MISSING

    def set(self, key: Any, value: Any) -> None:
        if self._kind() is tuple:
            super().set(key, value)
        self._kind().__setitem__(self.holder, key, value)


class FrozenSpace(Space):
    """A tuple or a frozen set. To change an entry of a tuple, another one with the new entry is put
    in all places that hold this one.
    """

    __slots__ = ("places",)

    def __init__(self, holder: Any, path: str, places: list[Place], **options: Any) -> None:
        """`places`: all places that hold it; more may come."""
        super().__init__(holder, path, **options)
        self.places = places

    @property
    def is_immutable(self) -> bool:
        return True

    @property
    def takes_others(self) -> bool:
        return (
            self.kind == "tuple"
            and bool(self.places)
            and all(space.takes_others for space, _ in self.places)
        )

    @property
    def kind(self) -> str:
        """What to call it."""
        return "tuple" if issubclass(type(self.holder), tuple) else "frozenset"

    def now(self) -> Any:
        """What is in its place."""
        return self.places[0][0].get(self.places[0][1]) if self.places else self.holder

    def is_in_all_places(self) -> bool:
        """Whether all places hold one and the same object, as they did when it was found."""
        now = self.now()
        return all(space.get(key) is now for space, key in self.places)

    def items(self) -> Items:
        now = self.now()
        kind = next((kind for kind in (tuple, frozenset) if issubclass(type(now), kind)), None)
        return [] if kind is None else list(enumerate(kind.__iter__(now)))

    def put(self, items: Items) -> None:
        pass

    def get(self, key: Any) -> Any:
        now = self.now()
        if issubclass(type(now), tuple):
            return tuple.__getitem__(now, key) if 0 <= key < tuple.__len__(now) else MISSING
        return super().get(key)

    def set(self, key: Any, value: Any) -> None:
        if not self.takes_others:
            super().set(key, value)
        entries = [value if place == key else entry for place, entry in self.items()]
        new = tuple.__new__(type(self.now()), entries)
        for space, name in self.places:
            space.set(name, new)


def entries_of(container: Any) -> Items:
    """The entries of a list, tuple or dictionary, each with its index or key; nothing of anything
    else.
    """
    if type(container) is list:
        return list(enumerate(container))
    if issubclass(type(container), tuple):
        return list(enumerate(tuple.__iter__(container)))
    return list(container.items()) if type(container) is dict else []


_MOST_MOVED: Final = 64
"""How many elements of a set are tried as the last one, to give the set back its order."""


class SetSpace(Space):
    """A set. Its elements are their own keys."""

    __slots__ = ()

    def items(self) -> Items:
        return [(element, element) for element in set.__iter__(self.holder)]

    def put(self, items: Items) -> None:
        """Gives the set these elements, and as far as possible in this order. An element that finds
        its slot taken goes to another one, so it may have to be added last.
        """
        elements = [element for element, _ in items]
        kept = set(map(id, elements))
        for element in list(set.__iter__(self.holder)):
            if id(element) not in kept:
                set.discard(self.holder, element)
        if all(map(operator.is_, set.__iter__(self.holder), elements)) and len(kept) == set.__len__(
            self.holder
        ):
            return  # as after a mere addition
        for moved in (None, *range(min(len(elements) - 1, _MOST_MOVED))):
            order = elements if moved is None else [*elements, elements[moved]]
            set.clear(self.holder)
            set.update(self.holder, [element for n, element in enumerate(order) if n != moved])
            if all(map(operator.is_, set.__iter__(self.holder), elements)):
                return


class FactorySpace(NamedSpace):
    """What a `defaultdict` calls for an entry that is not there."""

    __slots__ = ()

    def items(self) -> Items:
        return [("default_factory", self.holder.default_factory)]

    def put(self, items: Items) -> None:
        self.holder.default_factory = items[0][1]


class ObjectArraySpace(Space):
    """The elements of a NumPy array of Python objects."""

    __slots__ = ()

    def items(self) -> Items:
        return [("shape", self.holder.shape), *enumerate(self.holder.flat)]

    def put(self, items: Items) -> None:
        for place, element in items[1:]:
            self.set(place, element)

    def get(self, key: Any) -> Any:
        return self.holder.shape if key == "shape" else self.holder.flat[key]

    def set(self, key: Any, value: Any) -> None:
        if self.holder.flat[key] is not value:
            place = sys.modules["numpy"].unravel_index(key, self.holder.shape)
            self.holder[place] = value


def memory_of(array: Any) -> range:
    """The addresses of the bytes that a NumPy array lies in."""
    start, end = array.__array_interface__["data"][0], array.itemsize
    for count, stride in zip(array.shape, array.strides, strict=True):
        start += min(0, (count - 1) * stride)
        end += abs((count - 1) * stride)
    return range(start, start + end if array.size else start)


class ArraySpace(NamedSpace):
    """The shape, dtype and bytes of a NumPy array."""

    __slots__ = ()

    def items(self) -> Items:
        return [
            ("dtype", str(self.holder.dtype)),
            ("shape", self.holder.shape),
            ("values", self.holder.tobytes()),
        ]

    def put(self, items: Items) -> None:
        import numpy as np

        values = dict(items)["values"]
        if self.holder.tobytes() != values:
            self.holder[...] = np.frombuffer(values, self.holder.dtype).reshape(self.holder.shape)
