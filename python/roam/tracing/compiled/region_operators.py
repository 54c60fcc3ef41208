"""Operators that stand for compiled regions: graphs that Inductor has compiled, one operator each.

A compiled graph takes a list of inputs and returns a list of results. Some results are inputs or
views of inputs, several may share memory, and nothing says which inputs it changes. So the graph is
run once on zeros. Then an operator is registered that returns each piece of memory that the graph
makes once, and names the inputs that it changes. All other results are made from these by views.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roam.kernels.workspace import is_state
from roam.program.bits import with_bits
from roam.program.operators import REGION, OnList, add_region
from roam.torch_compat.private import BelowAutograd, OpOverload, c_pointer
from roam.tracing.fake_kernels.cache import reach
from roam.tracing.fake_kernels.real_layouts import on_zeros

_library = torch.library.Library("roam", "FRAGMENT")
_INPUTS = re.compile(r"^\s*(.+?),? = args$", re.MULTILINE)
_REUSED = re.compile(r"= (?:reinterpret_tensor\()?(\w+)\b.*?; del \1  # reuse")
_IDS = re.compile(r"^# AOT ID: .*$", re.MULTILINE)
"""What differs in the texts of equal graphs."""


_MOST_ARGUMENTS = 64
"""How many arguments PyTorch lets an operator have."""

Run = Callable[[list[Any]], Any]


class Unknown(Exception):
    """A compiled graph does what nobody can tell from outside."""


@dataclass(frozen=True, slots=True)
class _View:
    """A result that lies in the memory of an input, or in what the operator makes."""

    of_input: bool
    place: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_whole: bool
    """Whether it is the very tensor that lies there."""
    is_conj: bool
    is_neg: bool
    """Whether it stands for the conjugate, or the negative, of what lies there."""


@dataclass(frozen=True, slots=True)
class _Lists:
    """How an operator with more inputs than it may have arguments gets them: those that it leaves
    as they are, those that it changes, and numbers, in a list each.
    """

    places: tuple[list[int], list[int], list[int]]

    def packed(self, inputs: Sequence[Any]) -> list[Any]:
        return [[inputs[place] for place in places] for places in self.places]

    def unpacked(self, arguments: list[Any]) -> list[Any]:
        """The inputs in order; empties the lists, so that nothing else holds them."""
        inputs: list[Any] = [None] * sum(map(len, self.places))
        for places, values in zip(self.places, arguments, strict=True):
            for place, value in zip(places, values, strict=True):
                inputs[place] = value
            values.clear()
        arguments.clear()
        return inputs


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A compiled graph for inputs of certain metadata. It can be called by a node of `torch.fx`."""

    operator: OpOverload
    lists: _Lists | None
    results: tuple[Any, ...]
    """Per result a `_View`, or a value that is no tensor."""

    @property
    def __name__(self) -> str:
        return str(self.operator.name())

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """The graph's results, by calls of operators."""
        made = self.operator(*(inputs if self.lists is None else self.lists.packed(inputs)))
        made = made if isinstance(made, (tuple, list)) else [] if made is None else [made]

        def result(view: Any) -> Any:
            if type(view) is not _View:
                return view
            base = (inputs if view.of_input else made)[view.place]
            if not view.is_whole:
                base = torch.as_strided(base, view.shape, view.stride, view.offset)
            return with_bits(base, view.is_conj, view.is_neg)

        return list(map(result, self.results))


@dataclass(frozen=True, slots=True)
class _Base:
    """Memory that the operator makes: that of a result, as it is or as one row."""

    result: int
    size: int | None
    """How many elements the row has; None for the result itself."""

    def of(self, results: Sequence[Any]) -> torch.Tensor:
        tensor: torch.Tensor = results[self.result]
        if self.size is None:
            # The same memory, without a conjugate or negative that is not computed yet.
            return with_bits(tensor, tensor.is_conj(), tensor.is_neg())
        row = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return row.set_(tensor.untyped_storage(), 0, (self.size,), (1,))


_COMMUNICATES = ("c10d_functional", "ops.c10d", "ops.symm_mem")
"""What is in the text of a graph that communicates. Ranks have to launch collectives in one order,
and in a region a plan would not see them.
"""
_regions: dict[object, tuple[Any, Region]] = {}
"""By text and inputs, each with the graph that it runs."""
_numbers = itertools.count()


def region_of(graph: Any, run: Run, inputs: Sequence[Any]) -> Region:
    """The operator for a compiled graph.

    Args:
        graph: as Inductor has made it.
        run: runs it, on a list of inputs, which it empties.
        inputs: fake tensors and numbers.

    Raises:
        Unknown: this cannot be found out.
    """
    text = _IDS.sub("", graph.source_code or "")
    if not text:
        raise Unknown("it has no text to look at")
    if any(one in text for one in _COMMUNICATES):
        raise Unknown("it launches collectives")
    # Tensors that are part of the graph are no part of its text.
    own = id(graph) if graph.constants or graph.torchbind_constants else None
    key = text, own, repr(_described(inputs))
    if key not in _regions:
        _regions[key] = graph, _registered(graph, run, inputs, key)
    return _regions[key][1]


def _described(inputs: Sequence[Any]) -> list[object]:
    storages: dict[int, int] = {}

    def described(value: Any) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        shared = storages.setdefault(c_pointer(value.untyped_storage()), len(storages))
        fake: Any = value
        layout = tuple(fake.shape), fake.stride(), fake.storage_offset()
        return *layout, fake.dtype, fake.fake_device, shared

    return list(map(described, inputs))


def _registered(
    graph: Any, run: Run, inputs: Sequence[Any], key: tuple[str, int | None, str]
) -> Region:
    for value in inputs:
        if not isinstance(value, torch.Tensor) and type(value) is not int:
            raise Unknown(f"an input is a {type(value).__name__}")
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    places = [place for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    if not tensors:
        raise Unknown("it takes no tensor")
    found = on_zeros(
        lambda *args: _ran(run, args), (tuple(inputs), {}), tensors, lambda ran, zeros: _looked_at(ran[0], ran[1], zeros, places)
    )  # fmt: skip
    if found is None:
        raise Unknown("it does not run on zeros")
    bases, results, metas, draws = found
    changed = set(graph.mutated_input_idxs) | _reused(graph, len(inputs))
    number = "" if key[1] is None else f"_{next(_numbers)}_{key[1]:x}"
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16] + number
    lists = None
    if len(inputs) > _MOST_ARGUMENTS:
        kept = [place for place in places if place not in changed]
        numbers = [place for place, value in enumerate(inputs) if type(value) is int]
        lists = _Lists((kept, sorted(changed), numbers))
        arguments = "Tensor[] kept, Tensor(a!)[] changed, int[] numbers"
    else:
        arguments = ", ".join(
            f"int a{place}" if type(value) is int else f"Tensor(a{place}!) a{place}" if place in changed else f"Tensor a{place}"
            for place, value in enumerate(inputs)
        )  # fmt: skip
    returns = ", ".join("Tensor" for _ in bases)
    short = f"{REGION.partition('::')[2]}{name}"
    tags = (torch.Tag.nondeterministic_seeded,) if draws else ()
    _library.define(
        f"{short}({arguments}) -> {returns if len(bases) == 1 else f'({returns})'}", tags=tags
    )
    kernel = _kernel(run, bases, tuple(changed), lists)
    _library.impl(short, lambda *args: kernel(list(args)), "CompositeExplicitAutograd")
    _library.impl(short, _on_meta(metas), "Meta")
    operator = getattr(torch.ops.roam, short).default
    add_region(operator, kernel)
    return Region(operator, lists, results)


def _ran(run: Run, inputs: Sequence[Any]) -> tuple[list[Any], bool]:
    """A graph's results, and whether it draws random numbers."""
    for value in inputs:
        if isinstance(value, torch.Tensor) and is_state(value.shape, value.dtype, value.device):
            value.copy_(torch.get_rng_state())
    before = _generators(inputs)
    results = list(run(list(inputs)))
    after = _generators(inputs)
    return results, any(not one.equal(two) for one, two in zip(before, after, strict=True))


def _generators(inputs: Sequence[Any]) -> list[torch.Tensor]:
    generators = [torch.default_generator]
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs):
        generators += torch.cuda.default_generators
    return [generator.get_state() for generator in generators]


def _looked_at(
    results: list[Any], draws: bool, zeros: list[torch.Tensor], places: list[int]
) -> tuple[list[_Base], tuple[Any, ...], list[Any], bool]:
    """What it makes, how its results lie there, the metadata of what it makes, and whether it
    draws.
    """
    given = {
        c_pointer(zero.untyped_storage()): place for zero, place in zip(zeros, places, strict=True)
    }
    of_place = dict(zip(places, zeros, strict=True))
    made: dict[int, list[int]] = {}
    for number, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            storage = c_pointer(result.untyped_storage())
            if storage not in given:
                made.setdefault(storage, []).append(number)
    bases, metas = [], []
    for numbers in made.values():
        tensor = results[numbers[0]]
        nbytes = tensor.untyped_storage().nbytes()
        is_alone = all(_meta(results[number]) == _meta(tensor) for number in numbers)
        extent = reach(tensor.shape, tensor.stride()) * tensor.element_size()
        is_whole = tensor.storage_offset() == 0 and extent == nbytes
        if any(results[number].dtype != tensor.dtype for number in numbers):
            raise Unknown("two of its results share memory and have different dtypes")
        base = _Base(numbers[0], None if is_alone and is_whole else nbytes // tensor.element_size())
        bases.append(base)
        metas.append(_meta(base.of(results)))

    def result_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = c_pointer(value.untyped_storage())
        layout = tuple(value.shape), value.stride(), int(value.storage_offset())
        bits = value.is_conj(), value.is_neg()
        if storage in given:
            place = next((p for p, zero in of_place.items() if zero is value), given[storage])
            if value.dtype != of_place[place].dtype:
                raise Unknown("a result is an input's memory in another dtype")
            return _View(True, place, *layout, of_place[place] is value, *bits)
        place = list(made).index(storage)
        return _View(False, place, *layout, bases[place].size is None, *bits)

    return bases, tuple(map(result_of, results)), metas, draws


def _meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset()


def _reused(graph: Any, count: int) -> set[int]:
    """The inputs whose memory the graph takes for something else when it has used them: tensors
    that are kept for the backward pass alone.
    """
    found = _INPUTS.search(graph.source_code)
    names = [] if found is None else found.group(1).split(", ")
    if len(names) != count:
        raise Unknown("its text does not name its inputs")
    reused = set(_REUSED.findall(graph.source_code))
    return {place for place, name in enumerate(names) if name in reused}


def _kernel(run: Run, bases: list[_Base], changed: tuple[int, ...], lists: _Lists | None) -> OnList:
    def kernel(arguments: list[Any]) -> Any:
        inputs = arguments if lists is None else lists.unpacked(arguments)
        # Before it runs, since what it changes may be freed inside of it.
        for place in changed:
            torch.autograd.graph.increment_version(inputs[place])
        with BelowAutograd():
            results = run(inputs)
        made = tuple([base.of(results) for base in bases])
        return made[0] if len(made) == 1 else made or None

    return kernel


def _on_meta(metas: list[Any]) -> Callable[..., Any]:
    def run(*_: Any) -> Any:
        made = tuple(
            [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype, _ in metas]
        )  # fmt: skip
        return made[0] if len(made) == 1 else made or None

    return run
