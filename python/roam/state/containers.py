"""Spaces: the places in which a program keeps its values.

A space is one mutable thing that holds values under keys: a dictionary, a list, a set, a closure
cell, some names of a module, the attributes of an object, an optimizer's parameter groups. The walk
over a step's state (`reach`) finds them, the guards (`guards`) compare their contents, and the
snapshot (`snapshot`) puts contents back. Contents are read and written through the base types' own
methods, so that nothing of the user's runs.
"""

from __future__ import annotations

import functools
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, Final

import torch

from roam.errors import CaptureError
from roam.state.equality import MISSING, same, show

Items = list[tuple[Any, Any]]
Place = tuple["Space", Any]
"""A space and a key in it."""

# Entries of a group that are live numbers even as integers; of the others floats are.
RATE_KEYS: Final = frozenset({"lr", "initial_lr", "swa_lr"})
# What torch itself writes while an optimizer is used; `_opt_called` is how a scheduler notices that
# a step was taken.
LIVE_OPTIMIZER_KEYS: Final = frozenset(
    {"state", "param_groups", "_opt_called", "_step_count", "_need_device_dtype_check_for_fused"}
)


class Space:
    """One mutable holder of values.

    Attributes:
        path: how a reader would write it, such as ``model.h[0].attn.dropout``.
    """

    __slots__ = ("_label", "path")

    def __init__(self, path: str, label: Callable[[Any], str] | None = None) -> None:
        self.path = path
        self._label = label

    def items(self) -> Items:
        """The keys and values of now, in order."""
        raise NotImplementedError

    def put(self, items: Items) -> None:
        """Make these the contents again, in this order, in the same holder."""
        raise NotImplementedError

    def get(self, key: Any) -> Any:
        """The value under `key`, or `MISSING`."""
        return next((value for other, value in self.items() if same(other, key)), MISSING)

    def set(self, key: Any, value: Any) -> None:
        """Put one value under a key that is there already.

        Raises:
            CaptureError: if the holder is immutable.
        """
        raise CaptureError(
            f"{self.label(key)} cannot be replaced where it is; keep it in a list or as an attribute",
            code="wrapped_place",
        )

    @property
    def is_immutable(self) -> bool:
        """Whether the contents can never change."""
        return False

    @property
    def takes_others(self) -> bool:
        """Whether other values can be put under its keys."""
        return not self.is_immutable and type(self).set is not Space.set

    def is_live(self, key: Any, old: Any, value: Any) -> bool:
        """Whether the value under `key` may change so from step to step without harm."""
        return False

    def label(self, key: Any) -> str:
        """How a reader would write the value under `key`."""
        return self._label(key) if self._label else f"{self.path}[{show(key)}]"


def is_under(path: str, prefixes: Iterable[str]) -> bool:
    """Whether a path is one of these, or leads on from it."""
    return any(
        path == prefix or (path.startswith(prefix) and path[len(prefix)] in ".[{ ")
        for prefix in prefixes
    )


class MappingSpace(Space):
    """A dictionary of any kind: a user's, an object's attributes, a module's parameters."""

    __slots__ = ("holder",)

    def __init__(self, holder: dict[Any, Any], path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.holder = holder

    def items(self) -> Items:
        kind = OrderedDict if isinstance(self.holder, OrderedDict) else dict
        return list(kind.items(self.holder))

    def put(self, items: Items) -> None:
        kind = OrderedDict if isinstance(self.holder, OrderedDict) else dict
        kind.clear(self.holder)
        for key, value in items:
            kind.__setitem__(self.holder, key, value)

    def get(self, key: Any) -> Any:
        return dict.get(self.holder, key, MISSING)

    def set(self, key: Any, value: Any) -> None:
        (OrderedDict if isinstance(self.holder, OrderedDict) else dict).__setitem__(
            self.holder, key, value
        )


class RecurrentSpace(MappingSpace):
    """The attributes of a recurrent layer of PyTorch's. It keeps its weights in a list beside them,
    which it makes anew where it finds another weight than when it made the list.
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

    __slots__ = ("holder",)

    def __init__(self, holder: types.MappingProxyType[Any, Any], path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.holder = holder

    def items(self) -> Items:
        return list(self.holder.items())

    def put(self, items: Items) -> None:
        pass


class VariableSpace(Space):
    """A context variable, as the thread of the step finds it."""

    __slots__ = ("holder",)

    def __init__(self, holder: ContextVar[Any], path: str) -> None:
        super().__init__(path)
        self.holder = holder

    def items(self) -> Items:
        return [("", self.holder.get(MISSING))]

    def put(self, items: Items) -> None:
        if items[0][1] is not MISSING:
            self.holder.set(items[0][1])

    def set(self, key: Any, value: Any) -> None:
        self.put([(key, value)])

    def label(self, key: Any) -> str:
        return f"{self.path}.get()"


class BytesSpace(Space):
    """A `bytearray`, or an array of Python's own."""

    __slots__ = ("holder",)

    def __init__(self, holder: bytearray | array[Any], path: str) -> None:
        super().__init__(path)
        self.holder = holder

    def items(self) -> Items:
        return [("", bytes(self.holder))]

    def put(self, items: Items) -> None:
        held: Any = items[0][1]
        self.holder[:] = (
            held if isinstance(self.holder, bytearray) else array(self.holder.typecode, held)
        )

    def label(self, key: Any) -> str:
        return self.path


class TensorKeyedSpace(MappingSpace):
    """A dictionary with tensors for keys, such as one that holds an optimizer for each parameter.

    During capture its keys are fakes: what is kept under a tensor is then found under its fake. The
    two have one hash, so that a look-up by the other would compare their values.
    """

    __slots__ = ("_fakes",)

    def __init__(self, holder: dict[Any, Any], path: str) -> None:
        places = {id(key): place for place, key in enumerate(holder)}
        super().__init__(
            holder, path, label=lambda key: f"{path}[key {places.get(id(key), '...')}]"
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

    __slots__ = ("holder",)

    def __init__(
        self, holder: list[Any] | deque[Any] | tuple[Any, ...], path: str, **options: Any
    ) -> None:
        super().__init__(path, **options)
        self.holder = holder

    @property
    def is_immutable(self) -> bool:
        return isinstance(self.holder, tuple)

    def _kind(self) -> Any:
        return next(kind for kind in (list, deque, tuple) if isinstance(self.holder, kind))

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
    """A tuple or a frozen set. Another entry of it is another tuple, put where this one is held."""

    __slots__ = ("holder", "places")

    def __init__(
        self,
        holder: Any,
        path: str,
        places: list[Place],
        **options: Any,
    ) -> None:
        """`places`: all that hold it; more may come."""
        super().__init__(path, **options)
        self.holder = holder
        self.places = places

    @property
    def is_immutable(self) -> bool:
        return True

    @property
    def takes_others(self) -> bool:
        return bool(self.places) and all(space.takes_others for space, _ in self.places)

    @property
    def kind(self) -> str:
        """What to call it."""
        kinds = (tuple, frozenset, list, dict)
        return next(kind.__name__ for kind in kinds if isinstance(self.holder, kind))

    def now(self) -> Any:
        """What is in its place."""
        return self.places[0][0].get(self.places[0][1]) if self.places else self.holder

    def is_in_all_places(self) -> bool:
        """Whether all places hold one and the same, as they did when it was found."""
        now = self.now()
        return all(space.get(key) is now for space, key in self.places)

    def items(self) -> Items:
        now = self.now()
        kind = next((kind for kind in (tuple, frozenset) if isinstance(now, kind)), None)
        return [] if kind is None else list(enumerate(kind.__iter__(now)))

    def put(self, items: Items) -> None:
        pass

    def get(self, key: Any) -> Any:
        now = self.now()
        if isinstance(now, tuple):
            return tuple.__getitem__(now, key) if 0 <= key < tuple.__len__(now) else MISSING
        return super().get(key)

    def set(self, key: Any, value: Any) -> None:
        if not self.takes_others:
            super().set(key, value)
        entries = [value if place == key else entry for place, entry in self.items()]
        kind = type(self.now())
        new = (tuple if issubclass(kind, tuple) else frozenset).__new__(kind, entries)
        for space, name in self.places:
            space.set(name, new)


class RenewedSpace(FrozenSpace):
    """A list or dictionary in whose place the step puts another of the same form."""

    __slots__ = ()

    def items(self) -> Items:
        return entries_of(self.now())

    def get(self, key: Any) -> Any:
        return dict(self.items()).get(key, MISSING)

    def set(self, key: Any, value: Any) -> None:
        if not self.takes_others:
            Space.set(self, key, value)
        new = self.now().copy()
        new[key] = value
        for space, name in self.places:
            space.set(name, new)


def entries_of(container: list[Any] | dict[Any, Any]) -> Items:
    """The entries of a list or dictionary, each with its index or key; nothing of anything else."""
    if type(container) is list:
        return list(enumerate(container))
    return list(container.items()) if type(container) is dict else []


class PartialSpace(Space):
    """The positional arguments of a `functools.partial`."""

    __slots__ = ("holder",)

    def __init__(self, holder: functools.partial[Any], path: str) -> None:
        super().__init__(path)
        self.holder = holder

    def items(self) -> Items:
        return [("args", self.holder.args)]

    def put(self, items: Items) -> None:
        self.set(*items[0])

    def set(self, key: Any, value: Any) -> None:
        if value is not self.holder.args:
            held: Any = self.holder
            held.__setstate__((held.func, value, held.keywords, held.__dict__))

    def label(self, key: Any) -> str:
        return f"{self.path}.args"


class SetSpace(Space):
    """A set; its elements are their own keys, also while others take their places until `put`."""

    __slots__ = ("_others", "holder")

    def __init__(self, holder: set[Any], path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.holder = holder
        self._others: dict[int, Any] = {}

    def items(self) -> Items:
        return [(element, element) for element in set.__iter__(self.holder)]

    def put(self, items: Items) -> None:
        set.clear(self.holder)
        set.update(self.holder, [element for element, _ in items])
        self._others = {}

    def get(self, key: Any) -> Any:
        wanted = self._others.get(id(key), key)
        return next(
            (element for element in set.__iter__(self.holder) if element is wanted), MISSING
        )

    def set(self, key: Any, value: Any) -> None:
        wanted = self._others.get(id(key), key)
        elements = [
            value if element is wanted else element for element in set.__iter__(self.holder)
        ]
        set.clear(self.holder)
        set.update(self.holder, elements)
        self._others[id(key)] = value


class CellSpace(Space):
    """A variable that a function closes over."""

    __slots__ = ("holder", "name")

    def __init__(self, holder: types.CellType, name: str, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.holder = holder
        self.name = name

    def items(self) -> Items:
        try:
            return [(self.name, self.holder.cell_contents)]
        except ValueError:  # the variable has no value yet
            return [(self.name, MISSING)]

    def put(self, items: Items) -> None:
        self.set(*items[0])

    def set(self, key: Any, value: Any) -> None:
        if value is not MISSING:
            self.holder.cell_contents = value
        elif self.items()[0][1] is not MISSING:
            del self.holder.cell_contents

    def label(self, key: Any) -> str:
        return self.path


class NamesSpace(Space):
    """Some names of a namespace: the globals that a function uses."""

    __slots__ = ("holder", "names")

    def __init__(
        self, holder: dict[str, Any], names: Iterable[str], path: str, **options: Any
    ) -> None:
        super().__init__(path, **options)
        self.holder = holder
        self.names = tuple(names)

    def items(self) -> Items:
        return [(name, dict.get(self.holder, name, MISSING)) for name in self.names]

    def get(self, key: Any) -> Any:
        return dict.get(self.holder, key, MISSING)

    def put(self, items: Items) -> None:
        for name, value in items:
            self.set(name, value)

    def set(self, key: Any, value: Any) -> None:
        if value is MISSING:
            dict.pop(self.holder, key, None)
        else:
            dict.__setitem__(self.holder, key, value)


class AttributesSpace(NamesSpace):
    """The attributes in an object's ``__dict__`` that the step looks at, there or not."""

    __slots__ = ()


def slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    """The ``__slots__`` of a class and of those that it is derived from, by name."""
    return {
        name: slot
        for base in reversed(kind.__mro__)
        for name, slot in vars(base).items()
        if type(slot) is types.MemberDescriptorType
    }


class SlotsSpace(Space):
    """The attributes that an object keeps in ``__slots__``."""

    __slots__ = ("_slots", "holder")

    def __init__(
        self,
        holder: object,
        slots: dict[str, types.MemberDescriptorType],
        path: str,
        **options: Any,
    ) -> None:
        super().__init__(path, **options)
        self.holder = holder
        self._slots = slots

    def items(self) -> Items:
        return [(name, self._read(slot)) for name, slot in self._slots.items()]

    def _read(self, slot: types.MemberDescriptorType) -> Any:
        try:
            return slot.__get__(self.holder, type(self.holder))
        except AttributeError:
            return MISSING

    def put(self, items: Items) -> None:
        for name, value in items:
            self.set(name, value)

    def set(self, key: Any, value: Any) -> None:
        slot = self._slots[key]
        if value is not MISSING:
            try:
                slot.__set__(self.holder, value)
            except AttributeError:  # a read-only member of a type written in C
                if self._read(slot) != value:
                    raise
        elif self._read(slot) is not MISSING:
            slot.__delete__(self.holder)


class FunctionSpace(Space):
    """What a function object holds besides its closure: its code and its defaults."""

    __slots__ = ("holder",)
    KEYS: Final = ("__code__", "__defaults__", "__kwdefaults__")

    def __init__(self, holder: types.FunctionType, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.holder = holder

    def items(self) -> Items:
        return [(key, getattr(self.holder, key)) for key in self.KEYS]

    def put(self, items: Items) -> None:
        for key, value in items:
            setattr(self.holder, key, value)

    def label(self, key: Any) -> str:
        return f"{self.path}.{key}"


class DefaultsSpace(Space):
    """The defaults of a function's arguments, by position. Their tuple is an entry of the
    function's own space, which guards and snapshots look at.
    """

    __slots__ = ("holder",)

    def __init__(self, holder: types.FunctionType, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.holder = holder

    @property
    def is_immutable(self) -> bool:
        return True

    @property
    def takes_others(self) -> bool:
        return True

    def items(self) -> Items:
        return list(enumerate(self.holder.__defaults__ or ()))

    def set(self, key: Any, value: Any) -> None:
        defaults = self.holder.__defaults__ or ()
        self.holder.__defaults__ = (*defaults[:key], value, *defaults[key + 1 :])


class ClassSpace(Space):
    """The attributes of a class."""

    __slots__ = ("holder",)

    def __init__(self, holder: type, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.holder = holder

    def items(self) -> Items:
        # Dunder entries that are no functions are the interpreter's book-keeping, some of it made
        # when first asked for.
        return [
            (key, value)
            for key, value in type.__dict__["__dict__"].__get__(self.holder).items()
            if not (key.startswith("__") and key.endswith("__"))
            or type(value) is types.FunctionType
        ]

    def put(self, items: Items) -> None:
        kept = dict(items)
        for key, value in self.items():
            if key not in kept:
                type.__delattr__(self.holder, key)
            elif kept[key] is not value:
                type.__setattr__(self.holder, key, kept[key])
        present = dict(self.items())
        for key, value in items:
            if key not in present:
                type.__setattr__(self.holder, key, value)

    def set(self, key: Any, value: Any) -> None:
        type.__setattr__(self.holder, key, value)


class ArraySpace(Space):
    """The shape, dtype and bytes of a NumPy array."""

    __slots__ = ("holder",)

    def __init__(self, holder: Any, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.holder = holder

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

    def label(self, key: Any) -> str:
        return f"{self.path}.{key}"


class ReadSpace(Space):
    """What can be asked of an object whose state is in no container: an event, a logger."""

    __slots__ = ("_read", "holder")

    def __init__(self, holder: Any, path: str, read: Callable[[Any], Any]) -> None:
        """`read`: what is asked; it gives a plain value, or a tuple that is compared as one."""
        super().__init__(path)
        self.holder = holder
        self._read = read

    def items(self) -> Items:
        return [("", self._read(self.holder))]

    def put(self, items: Items) -> None:
        """Nothing: a step that changes such an object is refused."""

    def label(self, key: Any) -> str:
        return f"the state of {self.path}"


class OptimizerSpace(Space):
    """An optimizer's hyper-parameters as the step sees them: through the optimizer, whichever
    objects hold them now.

    ``load_state_dict`` replaces the list of groups and each group's dictionary; equal contents are
    the same hyper- parameters. Keys are attribute names, ``param_groups`` (the number of groups)
    and pairs of a group's number and an entry's name; one of the tensors in an entry is found under
    both and its place there.
    """

    __slots__ = ("holder",)
    COUNT: Final = "param_groups"

    def __init__(self, holder: torch.optim.Optimizer, path: str) -> None:
        super().__init__(path)
        self.holder = holder

    def items(self) -> Items:
        attributes: dict[str, Any] = self.holder.__dict__
        items: Items = [
            (key, value) for key, value in attributes.items() if key not in LIVE_OPTIMIZER_KEYS
        ]
        groups = attributes["param_groups"]
        items.append((self.COUNT, len(groups)))
        for number, group in enumerate(groups):
            for key in sorted(group):
                value = group[key]
                items.append(((number, key), tuple(value) if type(value) is list else value))
        return items

    def get(self, key: Any) -> Any:
        if type(key) is tuple:
            entry = self.holder.param_groups[key[0]].get(key[1], MISSING)
            return entry if len(key) == 2 else entry[key[2]]
        return (
            len(self.holder.param_groups)
            if key == self.COUNT
            else self.holder.__dict__.get(key, MISSING)
        )

    def set(self, key: Any, value: Any) -> None:
        if type(key) is tuple:
            group = self.holder.param_groups[key[0]]
            if len(key) == 3:
                entry = group[key[1]]
                value = type(entry)([*entry[: key[2]], value, *entry[key[2] + 1 :]])
            group[key[1]] = value
        else:
            self.holder.__dict__[key] = value

    def is_live(self, key: Any, old: Any, value: Any) -> bool:
        if type(key) is not tuple:
            return False
        if type(old) is tuple and type(value) is tuple:
            return len(old) == len(value) and all(
                same(one, other) or _are_live(key[1], one, other)
                for one, other in zip(old, value, strict=True)
            )
        return _are_live(key[1], old, value)

    def label(self, key: Any) -> str:
        if type(key) is tuple:
            return f"{self.path}.param_groups[{key[0]}]" + "".join(
                f"[{part!r}]" for part in key[1:]
            )
        return f"{self.path}.{key}"


def is_live_number(key: str, value: object) -> bool:
    """Whether an entry of an optimizer's group, or a part of one, is a number that a schedule may
    change from call to call.

    Integers are counts and switches, but for a learning rate.
    """
    return isinstance(value, float) or (type(value) is int and key in RATE_KEYS)


def _are_live(key: str, old: object, value: object) -> bool:
    """Whether both are live numbers, or tensors, whose metadata is compared apart."""
    if isinstance(old, torch.Tensor):
        return isinstance(value, torch.Tensor)
    return is_live_number(key, old) and is_live_number(key, value)


class ScalerSpace(Space):
    """A gradient scaler's settings, and whether it is as `update` leaves it. Its dictionary is a
    space of its own, so `put` has nothing to do.
    """

    __slots__ = ("holder",)
    SETTINGS: Final = ("_enabled", "_growth_factor", "_backoff_factor", "_growth_interval")
    INITIAL: Final = ("_init_scale", "_init_growth_tracker")

    def __init__(self, holder: torch.amp.GradScaler, path: str) -> None:
        super().__init__(path, label=lambda key: f"{path}.{key}")
        self.holder = holder

    def items(self) -> Items:
        attributes = self.holder.__dict__
        items: Items = [
            (key, attributes.get(key, MISSING)) for key in (*self.SETTINGS, *self.INITIAL)
        ]
        items.append(
            (
                "_per_optimizer_states",
                "as update() leaves it" if is_updated(self.holder) else "in use",
            )
        )
        return items

    def put(self, items: Items) -> None:
        pass

    def is_live(self, key: Any, old: Any, value: Any) -> bool:
        # Once there is a scale, nobody looks at the first one.
        return key in self.INITIAL and self.holder.__dict__.get("_scale") is not None


def is_updated(scaler: torch.amp.GradScaler) -> bool:
    """Whether a gradient scaler has worked on no optimizer since its last `update`."""
    states: Any = scaler.__dict__.get("_per_optimizer_states", {})
    return all(
        state["stage"].name == "READY" and not state["found_inf_per_device"]
        for state in states.values()
    )
