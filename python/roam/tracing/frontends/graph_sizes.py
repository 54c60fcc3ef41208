"""Which sizes of a graph's arguments follow from which symbols, as Dynamo says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from roam.state.argument_sizes import ArgumentSizes, Change, Layout, lies
from roam.state.sizes import Expression, OneLength, Symbols
from roam.torch_compat.private import c_pointer

_REACH = 8
"""A recording is to hold for sizes up to this multiple of those of the call."""
_FUNCTIONS = {"FloorDiv": Expression.floordiv, "Mod": Expression.mod, "PythonMod": Expression.mod}
"""Functions of SymPy's that Dynamo uses, by their names."""


def has_symbols(graph: GraphModule) -> bool:
    """Whether any of its arguments has a size that Dynamo takes for a symbol."""
    return any(any(_symbolic(node.meta.get("val"))) for node in _placeholders(graph))


def sizes_of(
    graph: GraphModule, args: Sequence[Any], before: Mapping[int, Layout]
) -> ArgumentSizes:
    """What a graph's arguments are at all sizes that it is for, as far as one knows.

    Args:
        graph: one of AOTAutograd's, whose arguments have their fakes beside them.
        args: a call's arguments.
        before: how arguments lay in an earlier call, by their places.

    Raises:
        OneLength: that is not known.
    """
    said = [node.meta.get("val") for node in _placeholders(graph)]
    values: dict[str, int] = {}
    for value, argument in zip(said, args, strict=True):
        for size, now in zip(_sizes(value), _sizes(argument), strict=True):
            expression = _expression(size)
            if expression is not None and expression.is_Symbol:
                values.setdefault(str(expression), int(now))
    if not values or min(values.values()) < Symbols.LEAST:
        raise OneLength("no symbol is the size of an argument, or one is less than 2")
    symbols = Symbols(values, {name: _REACH * value for name, value in values.items()})
    dims: dict[int, dict[int, Expression]] = {}
    of_place: dict[int, dict[int, Expression]] = {}
    storages = set[int]()
    for place, (value, argument) in enumerate(zip(said, args, strict=True)):
        found = {
            dim: _read(expression, symbols)
            for dim, size in enumerate(_sizes(value))
            if (expression := _expression(size)) is not None
        }
        if not found:
            continue
        if [one.value for one in found.values()] != [_sizes(argument)[dim] for dim in found]:
            raise OneLength("a size is not what Dynamo says")
        of_place[place] = found
        alone = {dim: one for dim, one in found.items() if one.op == "symbol"}
        if alone:
            dims[place] = alone
        if isinstance(argument, torch.Tensor):
            storages.add(c_pointer(argument.untyped_storage()))
    layouts: dict[int, Layout] = {}
    for place, argument in enumerate(args):
        is_tensor = isinstance(argument, torch.Tensor)
        if place in of_place or (is_tensor and c_pointer(argument.untyped_storage()) in storages):
            now = lies(argument)
            assert now is not None, "it has a signature"
            change = Change(before.get(place), now, argument.itemsize if is_tensor else 1)
            layouts[place] = change.layout(symbols, of_place.get(place, {}))
    return ArgumentSizes(symbols, dims, layouts)


def _placeholders(graph: GraphModule) -> Iterator[Any]:
    return (node for node in graph.graph.nodes if node.op == "placeholder")


def _sizes(value: Any) -> Sequence[Any]:
    """The sizes of a tensor; a whole number is as a tensor of that size."""
    if isinstance(value, torch.Tensor):
        return value.shape
    return (value,) if isinstance(value, (int, torch.SymInt)) else ()


def _symbolic(value: Any) -> Iterator[bool]:
    return (_expression(size) is not None for size in _sizes(value))


def _expression(size: Any) -> Any:
    """What a size is in SymPy; None if it is a number."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    return None if expression.is_number else expression


def _read(expression: Any, symbols: Symbols) -> Expression:
    """An expression of SymPy's.

    Raises:
        OneLength: it is none of the kinds that are known.
    """
    if expression.is_Integer:
        return symbols.constant(int(expression))
    if expression.is_Symbol and str(expression) in symbols.symbols:
        return symbols.symbols[str(expression)]
    args = [_read(arg, symbols) for arg in expression.args]
    if expression.is_Add or expression.is_Mul:
        found, *others = args
        for other in others:
            found = found.add(other) if expression.is_Add else found.mul(other)
        return found
    if expression.is_Pow or (function := _FUNCTIONS.get(type(expression).__name__)) is None:
        if expression.is_Pow and expression.args[1].is_Integer and 0 < expression.args[1] <= 4:
            return args[0].pow(args[1])
        raise OneLength(f"Dynamo gives a size that is {expression}")
    return function(*args)
