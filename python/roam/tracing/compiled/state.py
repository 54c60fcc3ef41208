"""The state, apart from the arguments of the call, that Dynamo assumes when it compiles a function
that a step calls. The function is compiled before the step, so this checks that the state is the
same there.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch

from roam.torch_compat.private import is_of_dynamo

State = list[tuple[str, Any, str, object]]
"""For each value: a name for messages, what holds it, its name there, and its `_outline`."""


def state_of(
    modules: list[tuple[str, torch.nn.Module]], function: FunctionType, *, closed_over: bool
) -> State:
    """What Dynamo may take for granted when it compiles a function: plain values and containers, in
    attributes of modules, in what the function names, in what it closes over where that is asked
    for, and in attributes of the objects that are there.
    """
    places: list[tuple[str, Any, str]] = [
        (f"{type(module).__name__}.{name}", holder, name)
        for _, module in modules
        for holder in [_attributes(module)]
        for name in list(holder)
        if name not in _OF_ALL_MODULES
    ]
    code = function.__code__
    if closed_over:
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        places += [(name, cell, name) for name, cell in cells]
    places += [(name, function.__globals__, name) for name in code.co_names]
    named = [(name, _held(holder, key)) for name, holder, key in places]
    objects = {id(value): (name, value) for name, value in named if _is_object(value)}
    places += [
        (f"{name}.{attribute}", holder, attribute)
        for name, one in objects.values()
        for holder in [_attributes(one)]
        for attribute in list(holder)
    ]
    state = [(name, holder, key, _outline(_held(holder, key))) for name, holder, key in places]
    return [entry for entry in state if entry[3] is not _OTHER]


def _attributes(value: object) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    return found


def _is_object(value: object) -> bool:
    """Whether a value is an object with attributes that is neither module, tensor, nor code, nor of
    the standard library, such as a logger, which notes what was logged.
    """
    kinds = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, type, FunctionType, ModuleType)
    library = str(type(value).__module__)
    if isinstance(value, kinds) or is_of_dynamo(library):
        return False
    if library.partition(".")[0] in sys.stdlib_module_names and library != "types":
        return False
    try:
        return type(_attributes(value)) is dict
    except AttributeError:
        return False


_OTHER = object()
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_OF_ALL_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}
_MOST_ITEMS, _DEEPEST = 1000, 4


def _outline(value: object, depth: int = 0) -> object:
    """What is compared of a value: plain ones, and containers by what is plain in them."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind not in (*_CONTAINERS, tuple):
        return _OTHER
    items: list[Any] = list(value.items()) if isinstance(value, dict) else list(value)  # type: ignore[call-overload]
    if depth == _DEEPEST or len(items) > _MOST_ITEMS:
        return kind, len(items)
    if kind is set:
        items = [len(items), *sorted(repr(item) for item in items if type(item) in _PLAIN)]
    return kind, *(_outline(item, depth + 1) for item in items)


def _held(holder: Any, name: str) -> Any:
    try:
        return holder.cell_contents if type(holder) is CellType else holder.get(name)
    except ValueError:  # an empty cell
        return None


def changes_of(state: State, *, in_trace: bool = False) -> Iterator[tuple[str, Any, Any]]:
    """(name, what it is now, what it was) for each value that has changed.

    In a trace, values that have become of another type, such as numbers that are recorded, are left
    out.
    """
    for name, holder, key, then in state:
        now = _outline(_held(holder, key))
        if now is not then and (not in_trace or type(now) is type(then)) and now != then:
            yield name, now, then
