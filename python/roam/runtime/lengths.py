"""Runs one plan at any sizes that it holds for.

Order, offsets and text are those of the plan's own, the largest sizes: blocks that do not overlap
do not overlap when they shrink in place. What differs from one size to the next is a table of
constants of the text: sizes, and views of the pool. What a recording says of a kernel's result is
checked by the first run at each size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NoReturn

import torch

from roam._core import Plan
from roam.errors import ExecutionError
from roam.program.ir import TensorMeta
from roam.program.resized import expressions_of
from roam.runtime.bindings import Bindings
from roam.runtime.codegen import GeneratedSource, Run, Watcher
from roam.state.sizes import Evaluator, expressions_in

_MOST = 32
"""How many tables are kept."""


@dataclass(frozen=True, slots=True)
class Generated:
    """A text at some sizes; see `GeneratedSource`."""

    run: Run
    code: CodeType
    steps: list[int]


@dataclass(frozen=True, slots=True)
class _Text:
    """A text, with what differs from size to size: the names of constants and views, and what makes
    the former and the latter's layouts, in this order, of the expressions' values.
    """

    source: GeneratedSource
    constants: list[str]
    views: list[tuple[str, TensorMeta]]
    nests: Callable[[list[Any]], list[Any]]


class Lengths:
    """The text of one plan at several sizes.

    Args:
        bindings: bound, of the program at the largest sizes; its numbers have their expressions.
        plan: the plan.
        symbols: the names of the symbols.
        watcher: is told of every call.
    """

    def __init__(
        self,
        bindings: Bindings,
        plan: Plan,
        symbols: Sequence[str],
        watcher: Watcher | None = None,
    ) -> None:
        self._bindings, self._plan, self._symbols = bindings, plan, symbols
        self._evaluator = Evaluator(expressions_of(bindings.program), symbols)
        self._sizes_bytes: list[tuple[int, Any]] = [
            (place, storage.size_bytes)
            for place, storage in enumerate(bindings.program.storages)
            if any(expressions_in(storage.size_bytes))
        ]
        sized_views = {
            id(view): (view, meta)
            for slot, view in bindings.views.items()
            if (meta := bindings.program.slots[slot]) is not None
            and any(expressions_in((meta.shape, meta.stride, meta.offset)))
        }
        self._sized_views = list(sized_views.values())
        self._used: list[int] = []
        """The places of the symbols on which a text depends. Where arguments begin is not among
        them, as a rule."""
        self._checked = self._text(None, checks=True)
        self._passed: set[tuple[int, ...]] = set()
        self._leaves_out = any(
            call.skip_if is not None
            and any(
                meta is not None and any(expressions_in(meta.shape))
                for slot in call.outputs
                if slot is not None
                for meta in (bindings.program.slots[slot],)
            )
            for call in bindings.program.calls
        )
        self._tables: OrderedDict[tuple[int, ...], Generated] = OrderedDict()
        self.watch(watcher)

    def watch(self, watcher: Watcher | None) -> None:
        """From now on the watcher is told of every call."""
        self._unchecked = self._text(watcher)
        self.source = self._unchecked.source
        self._watcher = watcher
        self._tables.clear()

    def at(self, values: tuple[int, ...]) -> Generated:
        """The text at these sizes. It checks what kernels give until a run at these sizes has
        `passed`. To be called while the pool is held.
        """
        key = self._key(values)
        known = self._tables.get(key)
        if known is not None:
            self._tables.move_to_end(key)
            return known
        if key not in self._passed and self._watcher is None:
            return self._table(self._checked, values)
        made = self._tables[key] = self._table(self._unchecked, values)
        if len(self._tables) > _MOST:
            self._tables.popitem(last=False)
        return made

    def has_passed(self, values: tuple[int, ...]) -> bool:
        """Whether a run at these sizes checks nothing any more."""
        return self._key(values) in self._passed

    def passed(self, values: tuple[int, ...]) -> None:
        """Notes that a run at these sizes has come to its end, so later ones check nothing. Where
        a run may leave calls out, nobody knows which it has checked.
        """
        if not self._leaves_out and self._watcher is None:
            self._passed.add(self._key(values))

    def _key(self, values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([values[place] for place in self._used])

    def _text(self, watcher: Watcher | None, *, checks: bool = False) -> _Text:
        source = GeneratedSource(
            self._bindings, self._plan, None, watcher, checks=self._differs if checks else None
        )
        constants = source.symbolic()
        views = {
            name: meta
            for view, meta in self._sized_views
            if (name := source.name_of(view)) is not None
        }
        nests = [
            *constants.values(),
            *((meta.shape, meta.stride, meta.offset) for meta in views.values()),
        ]
        atoms = set().union(*(one.atoms() for one in expressions_in(nests)))
        used = {atom.args[0] for atom in atoms}
        self._used = [
            place for place, name in enumerate(self._symbols) if place in self._used or name in used
        ]
        return _Text(
            source,
            list(constants),
            list(views.items()),
            self._evaluator.nests(nests),
        )

    def _table(self, text: _Text, values: tuple[int, ...]) -> Generated:
        known, places = self._evaluator.values(*values), self._evaluator.places
        for storage, size_bytes in self._sizes_bytes:
            if known[places[size_bytes.expression]] > size_bytes:
                raise ExecutionError(
                    f"{self._bindings.program.storages[storage].name} takes more memory at sizes {values} than at larger "
                    "ones, for which the plan is made; please report it",
                    code="differs_from_capture",
                )
        pool, offsets = self._bindings.pool, self._bindings.offsets
        made = text.nests(known)
        others = dict(zip(text.constants, made, strict=False))  # views come after these
        with torch.inference_mode(False):
            for (name, meta), (shape, stride, offset) in zip(
                text.views, made[len(text.constants) :], strict=True
            ):
                assert pool is not None, "there are views"
                start_bytes = offsets[meta.storage] + offset * meta.dtype.itemsize
                others[name] = pool.view(meta.dtype, start_bytes, shape, stride)
        source = text.source
        return Generated(source.with_constants(others), source.code, source.steps)

    def _differs(self, index: int) -> NoReturn:
        call = self._bindings.program.calls[index]
        raise ExecutionError(
            f"{call.name} at {call.source}: its result has another shape, or lies in another way, than the capture says for "
            "these sizes; the plan cannot be trusted; please report it",
            code="differs_from_capture", operator=call.name, source=str(call.source),
        )  # fmt: skip
