"""Finds everything that a training step can reach, by one walk that runs none of the user's code.

The walk starts at the user's function and its arguments and goes through closures, bound objects,
partials, the globals that code names, classes, containers, modules and optimizers. Library packages
are not entered: their functions and classes are assumed to stay as they are. Of modules that the
user wrote, only the names that the user's functions use are followed.
"""

from __future__ import annotations

import builtins
import contextvars
import copyreg
import enum
import functools
import inspect
import random
import sys
import threading
import types
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, Final, get_args

import torch
from torch.utils.weak import WeakIdKeyDictionary

from roam.errors import CaptureError
from roam.own_code import is_compiled_step
from roam.state.arguments import flatten_with_paths, parts_of
from roam.state.attribute_reads import CONSTRUCTORS, Edge, Reads
from roam.state.classes import (
    dictionary_of,
    member_of,
    module_of,
    mro_of,
    qualname_of,
    takes_attributes,
)
from roam.state.containers import (
    ArraySpace,
    BytesSpace,
    FactorySpace,
    FrozenSpace,
    MappingSpace,
    ObjectArraySpace,
    ProxySpace,
    RecurrentSpace,
    SequenceSpace,
    SetSpace,
    TensorKeyedSpace,
)
from roam.state.equality import MISSING, attributes_of, is_numpy_array, is_plain, members_in
from roam.state.global_state import surrounding_code
from roam.state.growing_lists import Growing, may_find, only_appends
from roam.state.library_code import (
    asked_names,
    imports_of,
    is_added_builtin,
    is_library,
    is_library_code,
    is_opaque,
    is_pytorchs,
    is_reporter,
    is_watcher,
    names_of,
    texts_of,
)
from roam.state.namespaces import (
    AttributesSpace,
    CellSpace,
    ClassNamesSpace,
    ClassSpace,
    DefaultsSpace,
    FunctionSpace,
    NamesSpace,
    PartialSpace,
    SlotsSpace,
    VariableSpace,
    slots_of,
)
from roam.state.nests import is_user_dict, may_be_opened, visit
from roam.state.opaque_state import ReadSpace, read_bytes_of, reader_of
from roam.state.optimizer_spaces import OptimizerSpace, ScalerSpace
from roam.state.policies import Policy, Retrace
from roam.state.reach import Place, Reach, Slot, TensorKind
from roam.state.spaces import Space, child
from roam.state.wrappers import inner, is_wrapper
from roam.torch_compat.private import (
    COMMON_TENSORS,
    HOOKS,
    OPERATORS,
    FakeTensor,
    is_of_dynamo,
    pytree,
    remade_attributes,
)

# Methods that no step runs on an object that it has been given ready-made.
_NOT_IN_STEP: Final = frozenset({*CONSTRUCTORS, "__init_subclass__", "__del__", "extra_repr"})
_SCHEDULERS: Final = (
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
)
_ENTERED: Final = (
    torch.autocast, torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode
)  # fmt: skip
"""Contexts of PyTorch's that a script may make once and enter in every step."""
_DESCRIPTORS: Final = (
    property,
    staticmethod,
    classmethod,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
)
_WHILE_ENTERED: Final = frozenset(
    {"prev", "prev_cache_enabled", "prev_fastdtype", "_inference_mode_context"}
)
"""Attributes that only these contexts use, while they are entered."""
_DICTIONARIES: Final = (dict, defaultdict)
"""Classes of what may hold lists that grow."""
_MOST_SPACES: Final = 1_000_000
# An attribute that holds more than this is left out until the step looks at it: data sets, replay
# buffers.
_MOST_UNREAD: Final = 50_000
_MOST_UNREAD_BYTES: Final = 1 << 24

_REPLACED: Final = (
    type, types.ModuleType, torch.nn.RNNBase, torch.optim.Optimizer, torch.amp.GradScaler
)  # fmt: skip
_KEYS: Final[type] = type({}.keys())
_VALUES: Final[type] = type({}.values())
_ITEMS: Final[type] = type({}.items())
_RANKS: Final = {kind: rank for rank, kind in enumerate(get_args(TensorKind))}


def _element(path: str, key: Any) -> str:
    return f"{path}{{...}}"


def reach_of(
    train_step: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    reads: Reads | None = None,
    opened: Collection[int] = (),
    closed: Collection[int] = (),
    growing: Collection[str] = (),
) -> Reach:
    """What ``train_step(*args, **kwargs)`` can reach.

    Args:
        train_step: the user's function.
        args: the positional arguments of the call.
        kwargs: its keyword arguments.
        reads: what is known of the attributes that the function looks at; without it, all
            attributes count as looked at.
        opened: identities of the arguments that are taken apart (`arguments.Taker`).
        closed: identities of the containers among the arguments that are not taken apart.
        growing: paths of the lists to which the step only adds.

    Raises:
        CaptureError: if the function reaches so much that guarding it would cost more than the
            step.
    """
    reads = Reads(everything=True) if reads is None else reads
    while True:
        reach = Reach(reads)
        walk = _Walk(reach, opened, closed, growing)
        try:
            walk.run(train_step, args, kwargs or {})
            reach.shared = walk.shared()
            walk.note_growing()
            break
        except _LeftOut:
            pass
        finally:
            vars(walk).clear()  # PyTorch's own walk over the arguments keeps it, in a cycle
    # If several places hold one tensor, its name in a module says most.
    reach.slots.sort(key=lambda slot: _RANKS[slot.kind])
    return reach


class _LeftOut(Exception):
    """The walk has met something to leave out, and begins again."""


class _Walk:
    """One breadth-first walk. Guarded state goes first: what both guarded and live state hold is
    guarded.
    """

    def __init__(
        self,
        reach: Reach,
        opened: Collection[int],
        closed: Collection[int],
        growing: Collection[str] = (),
    ) -> None:
        self.reach = reach
        self.opened = opened
        self.closed = closed
        self.growing = growing
        self.grown: list[tuple[str, Any]] = []  # those of them that have been met
        self.unplaced: set[int] = set()  # lists and dictionaries that are held otherwise
        self.holding: defaultdict[int, list[tuple[Space, Any, Edge | None]]] = defaultdict(
            list
        )  # places of lists and dictionaries, and by which reads the step gets there
        self.seen: dict[int, object] = {}  # keeps what it names alive, so that no id is used twice
        self.given: dict[int, object] = {}  # the containers among the arguments
        self.asks_seeds = False  # whether code names a generator's `initial_seed`
        self.made: set[int] = set()  # classes of which the step may make objects
        self.guarded: deque[_Item] = deque()
        self.optimizers: deque[_Item] = deque()  # after the modules whose parameters they name
        self.live: deque[_Item] = deque()
        self.is_guarding = True
        self.root_globals: object = None
        self.reads = reach.reads
        self.edge: Edge | None = None  # the last attribute on the way to what is being entered
        self.holder: int | None = None  # the value that is being entered (`Reach.links`)
        self.needed: Edge | None = None  # what the step looks at to get from there to the next one
        self.weights: Counter[Edge] = Counter()  # how many values are behind an edge
        self.held: defaultdict[str, list[_Item]] = defaultdict(
            list
        )  # methods that nothing has named so far
        self.held_modules: list[_Item] = []
        self.by_name: dict[int, tuple[Any, str, set[str], bool]] = {}
        """What is entered by name: the holder of attributes, its path, the names so far, and
        whether it is a module of the user's."""
        self.asked: set[str] = set()  # names that code sets, or of which it asks whether they are
        self.named_then = (0, 0, 0)
        self.named: set[str] = set()  # attributes that code names
        self.is_held = True
        self.frozen: defaultdict[int, list[tuple[Space, Any]]] = defaultdict(
            list
        )  # places of tuples and frozen sets
        self.classes: set[int] = set()  # those whose attributes have been entered
        self.slots: dict[type, dict[str, types.MemberDescriptorType]] = {}

    def run(
        self, train_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.reads.begin()
        self._arguments(train_step, args, kwargs)
        self._root(train_step)
        for path, value in chain(surrounding_code(), self.reads.functions):
            self._enqueue(value, path)
        while self.guarded or self.optimizers or self._enter_modules() or self.live:
            self.is_guarding = bool(self.guarded or self.optimizers)
            if not self.guarded and self.optimizers:
                value, path, self.edge = self.optimizers.popleft()
                self.holder = None
                self._optimizer(value, path)
                continue
            value, path, self.edge = (self.guarded or self.live).popleft()
            self._visit(value, path)
            if len(self.reach.places) > _MOST_SPACES:
                raise CaptureError(
                    f"the step reaches more than {_MOST_SPACES} objects (at {path}), which are too "
                    "many to guard; let it reach fewer objects: keep data sets and loaders out of its "
                    "arguments, and of what its function reads",
                    code="reach",
                )

        self.holder = None
        if self.asks_seeds:
            for path, generator in self.reach.generators:
                self._place(ReadSpace(generator, path, torch.Generator.initial_seed, None), True)

    def shared(self) -> list[Any]:
        """The lists, dictionaries, and the like among the arguments that guarded state holds
        too.
        """
        held = {id(place.space.holder) for place in self.reach.places if place.guarded}  # fmt: skip
        return [
            node
            for node in self.given.values()
            if not issubclass(type(node), tuple)
            and not held.isdisjoint(
                {id(node), id(attributes_of(node) if is_user_dict(node) else node)}
            )
        ]

    def note_growing(self) -> None:
        """Notes the lists that grow.

        Raises:
            Retrace: the step may do more with one of them than to add to it.
        """
        if not self.grown:
            return
        is_blind = any(may_find(code, names) for code, names in self.reach.code.items())
        entered = {id(place.space.holder) for place in self.reach.places}
        others: list[str] = []
        for path, container in self.grown:
            if is_blind or id(container) in entered or not self._only_adds(path, container):
                others.append(path)
                continue
            self.reach.growing.append(Growing(path, container))
            self._place(SequenceSpace(container, path), guarded=False)
        if others:
            raise Retrace({Policy.FIXED: others})

    def _only_adds(self, path: str, container: Any, *, is_held: bool = False) -> bool:
        """Whether code takes a list out of all its places only to append to it, as far as can be
        told before it runs; `is_held`: the same of a dictionary that has the list as an entry.
        """
        places = self.holding[id(container)]
        known = (self.unplaced, self.given, self.closed)
        return (
            bool(places)
            and not any(id(container) in others for others in known)
            and all(self._adds_at(path, *place, is_held=is_held) for place in places)
        )

    def _adds_at(
        self, path: str, space: Space, key: Any, edge: Edge | None, *, is_held: bool
    ) -> bool:
        code: list[types.CodeType] = []
        if edge is not None:  # seen where the step reads the attribute
            if edge[0] is None or self.reads.is_whole(edge[0]):
                return False
            self.reads.appended.setdefault(edge, (is_held, set()))[1].add(path)
            return self.reads.appended[edge][0] is is_held
        if type(space) is NamesSpace:
            code = [one for one, names in self.reach.code.items() if names is space.holder]
        elif type(space) is CellSpace:
            key, cells = space.name, self.reach.cells.items()
            code = [one for one, held in cells if any(cell is space.holder for cell in held)]
        elif type(space) is MappingSpace and type(space.holder) in _DICTIONARIES and not is_held:
            return self._only_adds(path, space.holder, is_held=True)
        return bool(code) and all(only_appends(one, key, is_held=is_held) for one in code)

    def _weigh(self, count: int, most: int = _MOST_UNREAD) -> None:
        """Leaves out an attribute that holds too much to be entered before the step has looked at
        it.
        """
        if self.edge is not None:
            self.weights[self.edge] += -(-count * _MOST_UNREAD // most)
            if self.weights[self.edge] > _MOST_UNREAD and self.reads.defer(self.edge):
                raise _LeftOut

    # -- roots

    def _arguments(
        self, train_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for name, value in _bind(train_step, args, kwargs):
            self._argument(value, name)

    def _argument(self, argument: Any, name: str) -> None:
        """Enter an argument. Containers that `torch.utils._pytree` knows are new at every call: a
        snapshot restores them, but guards look at their leaves only, through `ArgGuard`. If the
        step holds such a container at another place too, it is guarded there.
        """

        def restore_later(node: Any) -> bool:
            if id(node) in self.closed:
                return True
            is_opened = may_be_opened(node)
            if (pytree.tree_is_leaf(node) and not is_opened) or id(node) in self.given:
                return False
            self.given[id(node)] = node
            if is_opened:
                self._place(MappingSpace(attributes_of(node), name, label=child), guarded=False)
            elif issubclass(type(node), (dict, list, deque)):
                space = MappingSpace if issubclass(type(node), dict) else SequenceSpace
                self._place(space(node, name), guarded=False)
            if issubclass(type(node), defaultdict) and node.default_factory is not None:
                self._enqueue(node.default_factory, f"{name}.default_factory")
            self._class_of(node)
            return False

        visit(argument, restore_later)
        leaves, _ = flatten_with_paths(argument, closed=self.closed)
        self.edge = None
        for keys, leaf in leaves:
            path = name + pytree.keystr(keys)
            parts = parts_of(leaf, path) if id(leaf) in self.opened else None
            if parts is None:
                self._given(leaf, path)
                continue
            for space in parts.spaces:
                self._place(space, guarded=False)
            for value, where in zip(parts.values(), parts.paths(), strict=True):
                self._given(value, where)
            for part in parts.objects:
                self._class_of(part)

    def _given(self, value: Any, path: str) -> None:
        if issubclass(type(value), torch.Tensor):
            self._slot(Slot(path, value, SequenceSpace((value,), path), 0, "argument"))
        else:
            self._enqueue(value, path)

    def _root(self, step: Any) -> None:
        """Enter the user's function, whichever package it is from."""
        if isinstance(step, functools.partial):
            self._is_new(step)
            self._partial(step, "partial", self._root)
        elif isinstance(step, types.MethodType):
            self._is_new(step)
            self._enqueue(step.__self__, "self")
            self._root(step.__func__)
        elif isinstance(step, types.FunctionType):
            self.root_globals = step.__globals__
            if self._is_new(step):
                self._function(step, step.__name__, is_root=True)
        else:
            self._enqueue(step, "train_step")

    # -- the walk

    def _is_new(self, value: object) -> bool:
        if id(value) in self.seen:
            return False
        self.seen[id(value)] = value
        return True

    def _place(self, space: Space, guarded: bool | None = None, owner: int | None = None) -> None:
        is_guarded = self.is_guarding if guarded is None else guarded
        self.reach.places.append(
            Place(space, is_guarded, self.holder, None if self.holder is None else owner)
        )

    def _link(self, value: object) -> None:
        """Notes that what is being entered holds a value."""
        if self.holder is None:
            self.reach.roots.add(id(value))
        else:
            self.reach.links[self.holder].append((id(value), self.needed))

    @contextmanager
    def _in(self, part: object) -> Iterator[None]:
        """What is entered in this context is part of a value that several others may hold; with
        None, of what the step may get at in ways that are not known.
        """
        outer = self.holder, self.needed
        self.holder, self.needed = None if part is None else id(part), None
        try:
            yield
        finally:
            self.holder, self.needed = outer

    def _enqueue(self, value: Any, path: str, place: tuple[Space, Any] | None = None) -> None:
        if value is MISSING:
            return
        for member in members_in(value):
            self._class_of_kind(type(member))
            self._dictionary(member, path)
        if not is_plain(value):
            if issubclass(type(value), type):
                self._constructors(value)
            if self.growing and type(value) in (list, *_DICTIONARIES):
                if place is None:
                    self.unplaced.add(id(value))
                else:
                    self.holding[id(value)].append((*place, self.needed))
            if place is not None and issubclass(type(value), (tuple, frozenset)):
                self.frozen[id(value)].append(place)
            self._link(value)
            (self.guarded if self.is_guarding else self.live).append((value, path, self.edge))

    def _slot(self, slot: Slot) -> None:
        self.reach.slots.append(slot)
        self.reach.edges.setdefault(slot.path, self.edge)

    def _fill(
        self,
        space: Space,
        kind: TensorKind = "loose",
        guarded: bool | None = None,
        owner: int | None = None,
        all_noted: bool = True,
    ) -> None:
        """Record a space, its tensors, and what is to be entered from it. `owner`: the key of the
        object whose attributes these are, if its reads are noted; `all_noted`: without exception.
        """
        self._place(space, guarded, owner if all_noted else None)
        items = space.items()
        self._weigh(len(items))
        outer, needed = self.edge, self.needed
        self.needed = None
        for key, value in items:
            if owner is not None:
                self.edge = (owner, key)
                self.needed = self.edge if all_noted else None
                if self.reads.is_deferred(self.edge):
                    continue
            if issubclass(type(value), torch.Tensor):
                self._tensor(value, space, key, kind)
            elif isinstance(space, RecurrentSpace) and key in space.CACHES:
                self._place(SequenceSpace(value, space.label(key)), guarded=False)
            else:
                self._enqueue(value, space.label(key), (space, key))
        self.edge, self.needed = outer, needed

    def _tensor(self, value: torch.Tensor, space: Space, key: Any, kind: TensorKind) -> None:
        """Record a tensor, and the attributes and hooks that were put on it."""
        self._slot(Slot(space.label(key), value, space, key, kind))
        with self._in(None):
            attributes = value.__dict__
            if type(value) not in COMMON_TENSORS:
                self._class_of_kind(type(value))
            if is_wrapper(value):
                names = sorted(attributes.keys() - dict(inner(value)).keys())
                if self._is_new(attributes):
                    self._fill(AttributesSpace(attributes, names, space.label(key), label=child))
            elif (
                attributes and not issubclass(type(value), FakeTensor) and self._is_new(attributes)
            ):
                self._fill(MappingSpace(attributes, space.label(key), label=child))
            self._hooks(value, space.label(key))

    def _hooks(self, tensor: torch.Tensor, path: str) -> None:
        """Enter the hooks on a tensor's gradient."""
        for name in HOOKS:
            hooks = getattr(tensor, name)
            if hooks and self._is_new(hooks):
                self._fill(MappingSpace(hooks, f"{path}.{name}"))

    def _list(self, found: list[tuple[str, Any]], value: Any, path: str) -> None:
        found.append((path, value))
        self.reach.edges.setdefault(path, self.edge)

    def _visit(self, value: Any, path: str) -> None:
        kind = type(value)
        if kind is dict and self.reads.takes_whole(id(value)):
            raise _LeftOut
        if not self._is_new(value):
            return
        self.holder = None if _is_replaced(value) else id(value)
        self.reach.has_reporters |= is_reporter(value)
        if kind is list and path in self.growing:
            self.grown.append((path, value))
        elif issubclass(kind, torch.nn.Module):
            self._module(value, path)
        elif issubclass(kind, torch.optim.Optimizer) and _holds_groups(value):
            self.optimizers.append((value, path, self.edge))
        elif issubclass(kind, torch.amp.GradScaler):
            self._list(self.reach.scalers, value, path)
            self._place(ScalerSpace(value, path), guarded=True)
            attributes = attributes_of(value)
            own = (name for name in attributes if name.startswith("_"))
            self._by_name(value, path).update(own)
            self._fill_live(MappingSpace(attributes, path, label=child), "state")
        elif issubclass(kind, torch.Generator):
            self._list(self.reach.generators, value, path)
        elif issubclass(kind, random.Random) or _is_numpy_generator(kind):
            self._list(self.reach.random_sources, value, path)
            self._attributes(value, path)
            self._class_of_kind(kind)
        elif kind is types.FunctionType:
            if not is_library_code(value.__code__, value.__globals__):
                self._function(value, path)
            elif is_of_dynamo(value.__module__ or "") or is_of_dynamo(
                value.__globals__.get("__name__", "")
            ):
                # What it closes over is the compiler, which changes whenever it compiles.
                self._enqueue(attributes_of(value).get("__wrapped__"), path)
                self._by_name(value, path)
            else:  # a library's decorator, or hook, around a function of the user's
                if is_pytorchs(value.__globals__):
                    # PyTorch keeps notes on its own functions, such as what its compiler runs.
                    self._by_name(value, path)
                else:
                    self._dictionary(value, path)
                for part in _closed_over(value):
                    self._enqueue(part, path)
                self._tensors_closed_over(value)
        elif kind is types.MethodType:
            self._enqueue(value.__self__, f"{path}.__self__")
            self._enqueue(value.__func__, path)
        elif issubclass(kind, functools.partial):
            self._partial(value, path, lambda function: self._enqueue(function, f"{path}.func"))
        elif issubclass(kind, type):
            self._class(value, path)
        elif issubclass(kind, dict):
            has_tensors = _holds_tensors(dict.__iter__(value))
            self._fill((TensorKeyedSpace if has_tensors else MappingSpace)(value, path))
            for key in dict.__iter__(value):
                if not issubclass(type(key), torch.Tensor):
                    self._enqueue(key, f"{path}.keys()")
            if issubclass(kind, defaultdict):
                self._fill(FactorySpace(value, path))
            self._attributes(value, path)
            self._class_of_kind(kind)
        elif issubclass(
            kind, (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
        ):
            self._enqueue(value.data, path)
        elif issubclass(kind, WeakIdKeyDictionary):
            if _holds_tensors(value.keys()):  # it iterates over nothing else
                raise CaptureError(
                    f"{path} has tensors as keys, compared by identity, and the fake tensors of "
                    "capture have other identities; keep it in an ordinary dictionary",
                    code="identity",
                )
        elif issubclass(kind, (list, deque, tuple, frozenset, set)):
            self._fill(self._container(value, path))
            self._attributes(value, path)
            self._class_of_kind(kind)
        elif is_numpy_array(value):
            self._weigh(value.nbytes, _MOST_UNREAD_BYTES)
            if value.dtype.hasobject:
                self._fill(ObjectArraySpace(value, path))
            else:
                self._place(ArraySpace(value, path))
            self._attributes(value, path)
            self._class_of_kind(kind)
        elif issubclass(kind, types.ModuleType):
            self.held_modules.append((value, path, self.edge))
        elif kind is types.CodeType:
            pass
        elif issubclass(kind, (bytearray, array)):
            self._place(BytesSpace(value, path))
            self._dictionary(value, path)
        elif kind is memoryview:
            with suppress(ValueError):  # one that has been released
                self._enqueue(value.obj, f"{path}.obj")
        elif kind is types.CellType:
            self._fill(CellSpace(value, "cell_contents", f"{path}.cell_contents"))
        elif kind is contextvars.ContextVar:
            self._fill(VariableSpace(value, path))
        elif kind in (_KEYS, _VALUES, _ITEMS):
            self._enqueue(value.mapping, f"{path}.mapping")
        elif issubclass(kind, threading.local):
            self._fill(MappingSpace(value.__dict__, path, label=child))
            self._class_of_kind(kind)
        elif issubclass(kind, (types.BuiltinFunctionType, types.MethodWrapperType)):
            self._enqueue(value.__self__, f"{path}.__self__")
        elif issubclass(kind, weakref.ref):
            held = weakref.ref.__call__(value)
            if not issubclass(type(held), torch.Tensor):
                self._enqueue(held, f"{path}()")
            self._dictionary(value, path)
        elif kind in weakref.ProxyTypes:
            with suppress(ReferenceError):
                self._enqueue(value.__init__.__self__, path)
        elif issubclass(kind, _DESCRIPTORS):
            self._descriptor(value, path)
        elif kind is functools._lru_cache_wrapper:
            self._list(self.reach.caches, value, path)
            self._enqueue(value.__wrapped__, path)
            self._dictionary(value, path)
        elif is_compiled_step(kind):
            # A compiled step inside of another is the user's function.
            self._enqueue(value.__wrapped__, path)
            self._by_name(value, path)
        elif kind in (types.MappingProxyType, contextvars.Context):
            self._fill(ProxySpace(value, path))
        elif _is_iterator(kind):
            self._list(self.reach.iterators, value, path)
        # PyTorch asks a class for its name here, which a metaclass may answer by code of its own.
        elif type(kind) is type and issubclass(kind, torch.autograd.graph.Node):
            if self.reads.defer(self.edge):
                raise _LeftOut
            raise CaptureError(
                f"{path} is a node of autograd's graph (grad_fn) from before the step; put hooks "
                "on tensors, not on nodes",
                code="autograd_node",
            )
        else:
            if issubclass(kind, OPERATORS):  # which look things up when these are needed
                self._by_name(value, path).update(attributes_of(value))
                return
            if issubclass(kind, _SCHEDULERS):
                self._list(self.reach.schedulers, value, path)
            if (asking := reader_of(value)) is not None:
                self._weigh(read_bytes_of(value, asking[0]), _MOST_UNREAD_BYTES)
                self._place(ReadSpace(value, path, *asking))
            if not is_opaque(kind):
                self._attributes(value, path)
                self._class_of(value)
            elif type(attributes_of(value)) is dict and not is_watcher(kind):
                self._by_name(value, path)

    def _container(self, value: Any, path: str) -> Space:
        if issubclass(type(value), (list, deque)):
            return SequenceSpace(value, path)
        if issubclass(type(value), set):
            return SetSpace(value, path, label=_element)
        label = None if issubclass(type(value), tuple) else _element
        return FrozenSpace(value, path, self.frozen[id(value)], label=label)

    def _module(self, module: torch.nn.Module, path: str) -> None:
        self._list(self.reach.modules, module, path)
        holders = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "loose"}
        attributes = object.__getattribute__(module, "__dict__")
        key = self.reads.key_of(module, attributes)
        names = self.reads.names_of(key)
        for name, kind in holders.items():
            holder = attributes.get(name)
            if not issubclass(type(holder), dict):
                continue
            self._link(holder)
            if not self._is_new(holder):
                continue
            space = MappingSpace(holder, path, label=child)
            with self._in(None if self.holder is None else holder):
                if name != "_modules" or key is None or self.reads.has((key, name)):
                    self._fill(space, kind)  # type: ignore[arg-type]
                else:
                    self._children(space, key, names)
        if self.is_guarding:
            self.reach.objects.append((path, module))
        if issubclass(type(module), torch.nn.RNNBase):
            self._fill(RecurrentSpace(attributes, path, label=child), owner=key)
        else:
            if (remade := remade_attributes(module)) and names is None:
                names = attributes.keys() - remade
            self._names(attributes, path, key, None if names is None else names | holders.keys())
        self._class_of(module)

    def _children(self, space: Space, key: int, names: set[str] | None) -> None:
        """Enter the submodules of a module whose reads are noted: those that the step has asked
        for, or all of them before its trace.
        """
        self._place(space)
        outer = self.edge
        for name, module in space.items():
            self.edge = self.needed = (key, name)
            if (names is None or name in names) and not self.reads.is_deferred(self.edge):
                self._enqueue(module, space.label(name))
        self.edge, self.needed = outer, None

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        """Guard hyper-parameters through the optimizer, and keep every holder for the snapshot."""
        self._list(self.reach.optimizers, optimizer, path)
        seen = OptimizerSpace(optimizer, path)
        self._place(seen, guarded=True)
        attributes = optimizer.__dict__
        held = MappingSpace(attributes, path, label=child)
        self._place(held, guarded=False)
        for name, value in attributes.items():
            if name == "defaults" and not any(map(torch.is_tensor, value.values())):
                # `load_state_dict` adds entries, so only those of now are guarded. If there are
                # tensors among the defaults, the groups hold them.
                where = f"{path}.defaults"
                self._fill(NamesSpace(value, sorted(value), where))
            elif name not in ("state", "param_groups", "defaults"):
                self._enqueue(value, f"{path}.{name}", (held, name))
        groups = f"{path}.param_groups"
        self._place(SequenceSpace(optimizer.param_groups, groups), guarded=False)
        paths = {
            id(slot.tensor): slot.path
            for slot in reversed(self.reach.slots)
            if slot.kind == "parameter"
        }
        for number, group in enumerate(optimizer.param_groups):
            where = f"{groups}[{number}]"
            self._place(MappingSpace(group, where), guarded=False)
            for key, value in group.items():
                if issubclass(type(value), torch.Tensor):
                    self._tensor(value, seen, (number, key), "group")
                elif key != "params" and type(value) in (tuple, list) and _holds_tensors(value):
                    for index, part in enumerate(value):
                        if issubclass(type(part), torch.Tensor):
                            self._tensor(part, seen, (number, key, index), "group")
                else:
                    self._enqueue(value, seen.label((number, key)))
            parameters = f"{where}['params']"
            if isinstance(group["params"], list) and self._is_new(group["params"]):
                self._fill(SequenceSpace(group["params"], parameters), "group", guarded=False)
        self._state(optimizer.state, f"{path}.state", paths)
        if type(optimizer).__module__ and not is_library(type(optimizer).__module__):
            self._enqueue(type(optimizer), type(optimizer).__qualname__)

    def _state(self, state: dict[Any, Any], path: str, paths: dict[int, str]) -> None:
        space = MappingSpace(
            state, path, label=lambda path, key: f"{path}[{paths.get(id(key), '...')}]"
        )
        self._place(space, guarded=False)
        # What belongs to no parameter may not change from step to step.
        others = [key for key in state if not issubclass(type(key), torch.Tensor)]
        if others:
            self._fill(NamesSpace(state, others, path))
        for key, entry in state.items():
            if not issubclass(type(key), torch.Tensor):
                continue
            if issubclass(type(entry), dict) and self._is_new(entry):
                nested = [
                    (name, value) for name, value in entry.items() if type(value) in (list, dict)
                ]
                for name, value in nested:
                    self._link(value)
                    self.guarded.append((value, f"{space.label(key)}[{name!r}]", self.edge))
                self._fill_live(MappingSpace(entry, space.label(key)), "state")

    def _fill_live(self, space: Space, kind: TensorKind) -> None:
        was, self.is_guarding = self.is_guarding, False
        self._fill(space, kind)
        self.is_guarding = was

    def _partial(
        self, value: functools.partial[Any], path: str, enter: Callable[[Any], None]
    ) -> None:
        self._fill(PartialSpace(value, path))
        self._fill(MappingSpace(value.keywords, f"{path}.keywords"))
        self._dictionary(value, path)
        enter(value.func)

    def _function(self, function: types.FunctionType, path: str, is_root: bool = False) -> None:
        of = "" if is_root else f" of {function.__qualname__}"
        self._place(FunctionSpace(function, path))
        self.reach.code[function.__code__] = function.__globals__
        self.reach.cells[function.__code__] = function.__closure__ or ()
        code, defaults = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        if not is_plain(defaults):
            self._fill(
                DefaultsSpace(function, path, label=lambda _, index: f"default {names[index]}{of}")
            )
        if function.__kwdefaults__:
            self._fill(
                MappingSpace(
                    function.__kwdefaults__, path, label=lambda _, name: f"default {name}{of}"
                )
            )
        for space in _cells(function, of):
            self._link(space.holder)
            if self._is_new(space.holder):
                with self._in(None if self.holder is None else space.holder):
                    self._fill(space)
        self._dictionary(function, path)
        self._globals(function)

    def _dictionary(self, value: object, path: str) -> None:
        """Enter the attributes of an object whose reads cannot be noted, such as a function: all of
        them, also if there are none yet.
        """
        attributes = attributes_of(value)
        if type(attributes) is dict and self._is_new(attributes):
            with self._in(None):
                self._fill(MappingSpace(attributes, path, label=child))

    def _tensors_closed_over(self, function: types.FunctionType) -> None:
        """A library's hook may close over a tensor, such as a mask for a gradient."""
        for space in _cells(function, f" of {function.__qualname__}"):
            if _holds_tensors(held for _, held in space.items()) and self._is_new(space.holder):
                self._fill(space)

    def _globals(self, function: types.FunctionType) -> None:
        names, attributes = names_of(function.__code__)
        self.asks_seeds = self.asks_seeds or "initial_seed" in attributes
        is_used = self.edge is None or self.reads.is_narrow  # the rest may be unused
        if is_used and self.reads.gives_up(function.__name__, attributes):
            raise _LeftOut
        self.is_held = self.is_held and not self.reads.takes_by_computed_name(
            function.__name__, {*names, *attributes}
        )
        self._release(attributes if self.is_held else list(self.held))
        holder = function.__globals__
        texts = texts_of(function.__code__)
        attributes |= texts
        self.named |= attributes
        self.asked |= asked_names(function.__code__)
        if "globals" in names:
            names = (*dict.fromkeys((*names, *sorted(texts))),)
        if names:
            prefix = "" if holder is self.root_globals else f"{holder.get('__name__')}."
            self._fill(
                NamesSpace(
                    holder,
                    names,
                    f"global {prefix}",
                    label=lambda _, name: f"global {prefix}{name}",
                )
            )
        for name in names:
            self._user_module(holder.get(name), f"global {name}", attributes)
        imports = dict(imports_of(function.__code__, holder.get("__package__")))
        # A module that the step imports first stays imported.
        known = [name for name in imports if name in sys.modules]
        if known:
            self._fill(NamesSpace(sys.modules, known, "sys.modules"))
        for name in known:
            self._user_module(sys.modules[name], name, attributes | imports[name])
        added = [name for name in names if name not in holder and is_added_builtin(name)]
        if added:
            self._fill(NamesSpace(vars(builtins), added, "builtins", label=child))

    def _enter_modules(self) -> bool:
        """Enters modules that the user wrote, and that his objects hold, by the names that his code
        could take from them. At last also by the names that other functions' code has, since a
        function may be given a module: if they are not there, or hold plain values.
        """
        held, self.held_modules = self.held_modules, []
        self.is_guarding = True
        self.holder = None
        for module, path, self.edge in held:
            self._user_module(module, path, frozenset(self.named))
        if not (self.guarded or self.optimizers):
            self._enter_by_name()
        return bool(self.guarded or self.optimizers)

    def _enter_by_name(self) -> None:
        """Enters what is not entered as a whole: libraries' modules, classes and objects by the
        names that the user's code sets, or whose absence it is prepared for; the user's modules
        also by other names that a function may use which is given one, if they are not there or
        hold plain values.
        """
        known = len(self.named), len(self.asked), len(self.by_name)
        if known == self.named_then:
            return
        self.named_then = known
        self.edge = None
        for holder, path, entered, is_users in list(self.by_name.values()):
            is_class = issubclass(type(holder), type)
            held = dictionary_of(holder) if is_class else attributes_of(holder)
            names = sorted(self.asked - entered)
            if is_users:
                plain = (name for name in self.named - entered if is_plain(held.get(name)))
                names = sorted({*names, *plain})
            entered.update(names)
            if names and is_class:
                self._fill(ClassNamesSpace(holder, names, path, label=child))
            elif names:
                self._fill(AttributesSpace(held, names, path, label=child))

    def _by_name(self, holder: Any, path: str, *, is_users: bool = False) -> set[str]:
        """Has attributes entered by name. Returns the names by which they have been so far."""
        return self.by_name.setdefault(id(holder), (holder, path, set(), is_users))[2]

    def _user_module(self, module: Any, path: str, attributes: frozenset[str]) -> None:
        """Enter a module that the user wrote, and such modules in it, by the names that his code
        could take from them.
        """
        waiting, entered = deque([(module, path)]), set[int]()
        while waiting:
            module, path = waiting.popleft()
            if not issubclass(type(module), types.ModuleType) or id(module) in entered:
                continue
            entered.add(id(module))
            held = attributes_of(module)
            taken = [(held[name], f"{path}.{name}") for name in sorted(attributes & held.keys())]
            with self._in(None):
                if is_library(held.get("__name__")):
                    self._names_of_library(module, path, taken)
                else:
                    self._names_of_module(module, path, attributes)
            waiting += taken

    def _names_of_library(
        self, module: types.ModuleType, path: str, taken: list[tuple[Any, str]]
    ) -> None:
        """Enter what the user's code may set of a library's module, and of functions and classes
        that it takes from there, each with its path.
        """
        self._by_name(module, path)
        for value, where in taken:
            if type(value) is types.FunctionType:
                self._dictionary(value, where)
            elif issubclass(type(value), type) and takes_attributes(value):
                self._by_name(value, where)

    def _names_of_module(
        self, module: types.ModuleType, path: str, attributes: frozenset[str]
    ) -> None:
        """Enter these names of a module, there or not."""
        held = attributes_of(module)
        if not attributes <= held.keys():
            self._enqueue(held.get("__getattr__"), f"{path}.__getattr__")
        entered = self._by_name(module, path, is_users=True)
        if names := sorted(attributes - entered):
            entered.update(names)
            self._fill(AttributesSpace(held, names, path, label=child))

    def _class_of_kind(self, kind: type) -> None:
        """Enter the class of an object, whose methods the step may call."""
        if not is_library(module_of(kind)):
            queue = self.guarded if self.is_guarding else self.live
            queue.append((kind, qualname_of(kind), self.edge))

    def _constructors(self, kind: type) -> None:
        """Enter what runs if the step makes an object of a class that it names."""
        for base in mro_of(kind):
            if is_library(module_of(base)) or id(base) in self.made:
                continue
            self.made.add(id(base))
            for name in CONSTRUCTORS:
                part = dictionary_of(base).get(name)
                if part is not None:
                    with self._in(None):
                        self._enqueue(part, f"{qualname_of(base)}.{name}")

    def _class_of(self, value: Any) -> None:
        """Enter an object's class. If the reads of the object are noted, a method is entered only
        once some code names it.
        """
        kind = type(value)
        if not self.reads.is_noted(value):
            self._class_of_kind(kind)
            return
        for base in mro_of(kind):
            if not is_library(module_of(base)) and id(base) not in self.classes:
                self._class_space(base, qualname_of(base), is_held=True)

    def _class(self, value: type, path: str) -> None:
        """Enter a class of the user's, and those it is derived from: its attributes, and what its
        methods name.
        """
        if is_library(module_of(value)):
            if takes_attributes(value):
                self._by_name(value, path)
            return
        self._class_of_kind(type(value))
        self._class_space(value, path)
        for base in mro_of(value)[1:]:
            if not is_library(module_of(base)):
                self._enqueue(base, qualname_of(base))

    def _class_space(self, base: type, path: str, is_held: bool = False) -> None:
        with self._in(None):  # what a class holds, its objects get at in many ways
            self._entries_of_class(base, path, is_held)

    def _entries_of_class(self, base: type, path: str, is_held: bool) -> None:
        space = ClassSpace(base, path, label=child)
        if id(base) not in self.classes:
            self.classes.add(id(base))
            self._place(space)
        if issubclass(base, enum.Enum):
            for name, member in dictionary_of(base)["_member_map_"].items():
                self._dictionary(member, space.label(name))
        outer = self.edge
        for name, item in space.items():
            if name in _NOT_IN_STEP:
                continue
            if issubclass(type(item), torch.Tensor):
                self._slot(Slot(space.label(name), item, space, name, "loose"))
                continue
            is_method = is_held and (
                type(item) is types.FunctionType
                or issubclass(type(item), (property, staticmethod, classmethod))
            )
            self.edge = (None, name) if is_method else outer
            if not is_method or name in self.named or self.reads.has((None, name)):
                self._enqueue(item, space.label(name), (space, name))
            elif self.reads.is_narrow and self.is_held:
                self._link(item)
                self.held[name].append((item, space.label(name), self.edge))
            elif not self.reads.is_deferred((None, name)):
                self._enqueue(item, space.label(name), (space, name))
        self.edge = outer
        if (reduce := copyreg.dispatch_table.get(base)) is not None:
            self._enqueue(reduce, f"what copies a {path}")

    def _release(self, names: Iterable[str]) -> None:
        """Enters the methods that code names."""
        self.named.update(names)
        for name in [name for name in names if name in self.held]:
            self.guarded.extend(self.held.pop(name))

    def _descriptor(self, value: Any, path: str) -> None:
        """Enter the functions behind a property or a method that is not an ordinary one."""
        self._dictionary(value, path)  # with the `func` of those that are written in Python
        for name in ("fget", "fset", "fdel", "__func__"):
            self._enqueue(member_of(value, name), path)

    def _attributes(self, value: object, path: str) -> None:
        """Enter an object through its ``__dict__`` and ``__slots__``."""
        attributes = attributes_of(value)
        if issubclass(type(value), _ENTERED):
            self._by_name(value, path).update(attributes, _WHILE_ENTERED)
            between = [name for name in attributes if name not in _WHILE_ENTERED]
            self._fill(NamesSpace(attributes, between, path, label=child))
            return
        if module_of(type(value)) in ("builtins", "collections") and not attributes:
            # The class cannot change, and nobody gives attributes to the dozen in each module.
            if type(value) is not OrderedDict:
                self._dictionary(value, path)
            return
        has_dictionary = type(attributes) is dict
        slots = self.slots.get(type(value))
        if slots is None:
            slots = self.slots[type(value)] = {
                name: slot
                for name, slot in slots_of(type(value)).items()
                if not is_library(slot.__objclass__.__module__)
            }
        if not has_dictionary and not slots:
            return
        key = self.reads.key_of(value, attributes if has_dictionary else None)
        names = self.reads.names_of(key)
        if has_dictionary and self.is_guarding:
            self.reach.objects.append((path, value))
        if has_dictionary:
            self._link(attributes)
            if self._is_new(attributes):
                with self._in(None if self.holder is None else attributes):
                    self._names(attributes, path, key, names)
        unnoted = _slots_of_super(type(value)) if slots else frozenset()
        if slots and names is not None:
            names |= unnoted
            self._overwritten(
                SlotsSpace(value, slots, path, label=child), key, slots.keys() - names,
                all_noted=not unnoted,
            )  # fmt: skip
            slots = {name: slot for name, slot in slots.items() if name in names}
        if slots:
            space = SlotsSpace(value, slots, path, label=child)
            self._fill(space, owner=key, all_noted=not unnoted)

    def _names(
        self, attributes: dict[str, Any], path: str, key: int | None, names: set[str] | None
    ) -> None:
        """Enter an object's ``__dict__``: all of it, or these names."""
        whole = MappingSpace(attributes, path, label=child)
        if names is None:
            self._fill(whole, owner=key)
        else:
            self._overwritten(whole, key, None)
            self._fill(AttributesSpace(attributes, sorted(names), path, label=child), owner=key)

    def _overwritten(
        self,
        space: Space,
        key: int | None,
        names: Collection[str] | None,
        *,
        all_noted: bool = True,
    ) -> None:
        """Notes which attributes of an object the step sets before it looks at them. The snapshot
        keeps the contents of the whole space.
        """
        self._place(space, guarded=False, owner=key if all_noted else None)
        for name in self.reads.overwritten(key):
            if names is None or name in names:
                assert key is not None, "its reads are noted"
                self.reach.overwritten.append((space, name, key))


def _is_replaced(value: Any) -> bool:
    """Whether capture does more to a value than put fakes in the places of tensors, or a class, of
    whose objects there may be more than the walk has met.
    """
    kind = type(value)
    return issubclass(kind, _REPLACED) or (
        issubclass(kind, dict) and _holds_tensors(dict.__iter__(value))
    )


def _slots_of_super(kind: type) -> frozenset[str]:
    """The attributes that methods with `super()` name. `super()` may read slots of these names, and
    such reads are not noted.
    """
    methods = [
        method
        for base in mro_of(kind)
        for method in dictionary_of(base).values()
        if type(method) is types.FunctionType
    ]
    named = [names_of(method.__code__) for method in methods]
    return frozenset().union(*(attributes for names, attributes in named if "super" in names))


_Item = tuple[Any, str, Edge | None]


def _bind(
    train_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The arguments of a call under the names that the function gives them."""
    try:
        signature = inspect.signature(train_step)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        yield from ((f"args[{position}]", value) for position, value in enumerate(args))
        yield from kwargs.items()
        return
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((f"{name}[{position}]", item) for position, item in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


def _cells(function: types.FunctionType, of: str) -> Iterator[CellSpace]:
    """The variables that a function closes over."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return (CellSpace(cell, name, f"closure {name}{of}") for name, cell in cells)


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    """The functions that a function closes over."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            held = cell.cell_contents
            if issubclass(type(held), (types.FunctionType, types.MethodType, functools.partial)):
                yield held


def _holds_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer holds groups and state itself; one that wraps another, such as
    accelerate's, passes on what is asked of it.
    """
    return "param_groups" in vars(optimizer)


def _is_iterator(kind: type) -> bool:
    """Whether objects of this class hand out values one by one and forget them."""
    if kind in (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType):
        return True
    is_builtin = module_of(kind) in ("builtins", "itertools", "_io", "collections")
    return is_builtin and "__next__" in dictionary_of(kind) and not issubclass(kind, OrderedDict)


def _holds_tensors(values: Iterable[object]) -> bool:
    return any(issubclass(type(value), torch.Tensor) for value in values)


def _is_numpy_generator(kind: type) -> bool:
    numpys = getattr(sys.modules.get("numpy"), "random", None)
    return numpys is not None and issubclass(kind, (numpys.Generator, numpys.RandomState))
