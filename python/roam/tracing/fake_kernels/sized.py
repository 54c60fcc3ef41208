"""Fake tensors whose sizes follow from symbols, and what kernels make of them.

Each has a twin, a fake tensor of the call's own sizes. Kernels are run on twins, as in any other
capture, and once more at a few other values of the symbols, from which the expressions of their
results follow. Python and PyTorch's own code see the symbols, so what they decide by a size is a
condition of the recording. What an expression says of a kernel's result is checked again when a run
meets a size for the first time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from roam.kernels.recurrent import ASKED
from roam.state.argument_sizes import Layout
from roam.state.sizes import Expression, Narrowed, Symbols, Unclear, number, replaced
from roam.torch_compat.private import (
    BelowAutograd,
    DisableTorchDispatch,
    FakeTensor,
    FakeTensorMode,
    c_pointer,
    disable_fake_tensor_cache,
    enable_python_dispatcher,
)
from roam.tracing.fake_kernels import cache
from roam.tracing.fake_kernels.real_layouts import is_sure
from roam.tracing.fake_kernels.tensors import Maker

aten = torch.ops.aten
_DIVIDING = {
    aten.convolution.default, aten.max_pool2d_with_indices.default, aten.avg_pool2d.default,
    aten._adaptive_avg_pool2d.default, aten.im2col.default, aten.unfold.default, aten.slice.Tensor,
    aten.constant_pad_nd.default,
}  # fmt: skip
"""Kernels whose results' sizes may be quotients of those of their arguments."""
_MOST_PLACE = 2
"""Where the largest sizes stand among the points; the call's and the smallest come before."""
_BY_VALUES = {torch.Tag.inplace_view, torch.Tag.data_dependent_output}
_SIZED = (torch.SymInt, torch.SymFloat, torch.SymBool)


def layout_of(tensor: Any) -> Layout | None:
    """The layout of a tensor whose sizes, or whose storage's, follow from symbols; None for any
    other.
    """
    found: Layout | None = getattr(tensor, "_roam_layout", None)
    return found


def recorded_number(value: Any) -> Any:
    """What a program has for a number that follows from symbols; None for anything else."""
    node = getattr(value, "node", None) if type(value) in _SIZED else None
    return number(node) if isinstance(node, Expression) else None


@dataclass(frozen=True, slots=True)
class _Results:
    items: list[tuple[Any, Layout | None]]
    """Each as `cache` describes it for the call's sizes, and its layout if that is symbolic."""
    container: type | None


class SizedKernels:
    """What kernels make of fake tensors whose sizes follow from symbols, in one capture.

    Args:
        symbols: the symbols.
        arguments: by identity, the tensors among the step's arguments that lie as symbols say: the
            tensor, and how it lies.
        numbers: by their places among the flattened arguments, whole numbers that follow from
            symbols.
    """

    def __init__(
        self,
        symbols: Symbols,
        arguments: dict[int, tuple[torch.Tensor, Layout]],
        numbers: Mapping[int, Expression],
    ) -> None:
        self.symbols = symbols
        self._arguments = arguments
        self.numbers = {place: _symbolic(number) for place, number in numbers.items()}
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Those of arguments' fakes, by the storages of their twins."""
        self._results: dict[Any, _Results] = {}
        self._maker = Maker()
        self._kernels: cache.FakeKernels
        self._mode: FakeTensorMode

    def enter(self, kernels: cache.FakeKernels, mode: FakeTensorMode) -> None:
        """Before a trace in a fake mode."""
        self._kernels, self._mode = kernels, mode
        self._storages.clear()

    def forget_fakes(self) -> None:
        """Lets go of the fake tensors' mode, after a trace."""
        self._maker.forget()

    def argument(self, tensor: torch.Tensor, twin: FakeTensor) -> FakeTensor:
        """The fake of an argument; its twin if none of its sizes follows from a symbol."""
        known = self._arguments.get(id(tensor))
        if known is None:
            return twin
        layout, symbols = known[1], self.symbols
        strides, elements = symbols.strides(layout.shape)
        size_bytes = elements.mul(symbols.constant(tensor.itemsize))
        pointer = c_pointer(twin.untyped_storage())
        storage = self._storages.get(pointer)
        if storage is None and Layout(
            layout.shape, tuple(strides), symbols.constant(0), size_bytes
        ) != layout.mapped(symbols.of):
            storage = self._empty(layout)
        made = self._outer(twin, layout, None, storage)
        self._storages[pointer] = made.untyped_storage()
        if tensor.requires_grad:
            made.requires_grad = True
        return made

    def _empty(self, layout: Layout) -> torch.UntypedStorage:
        """A storage of so many bytes."""
        return torch.empty(
            _symbolic(layout.size_bytes), dtype=torch.uint8, device="meta"
        ).untyped_storage()

    def concerns(self, given: Any, tensors: Iterable[Any]) -> bool:
        """Whether sizes of a kernel's arguments, or numbers among them, follow from symbols."""
        return any(layout_of(tensor) is not None for tensor in tensors) or _holds_sizes(given)

    def run(
        self, func: Any, given: Any, tensors: list[Any], recorded: Any, signatures: Sequence[Any]
    ) -> Any:
        """The results of a kernel; see `FakeKernels.run`. `signatures` also tell expressions
        apart.
        """
        told = replaced(recorded, operator.attrgetter("expression"))  # equal sizes may part
        key = func, cache.key_of(told, signatures), torch.get_default_dtype()
        known = self._results.get(key)
        if known is None:
            known = self._results[key] = self._learned(func, given, tensors)
        made: list[Any] = []
        twins = [_twin(tensor) for tensor in tensors]
        with DisableTorchDispatch():
            for item, layout in known.items:
                if item is None:
                    made.append(None)
                    continue
                if type(item) is cache.Given:
                    made.append(tensors[item.place])
                    continue
                twin = item.again(self._maker, self._mode, twins)
                base = None if item.base is None else tensors[item.base]
                made.append(twin if layout is None else self._outer(twin, layout, base))
        return made[0] if known.container is None else known.container(made)

    def reshape(
        self,
        func: Any,
        view: Any,
        given: Any,
        tensors: list[Any],
        recorded: Any,
        signatures: Sequence[Any],
    ) -> Any:
        """A tensor of which a kernel has changed how it lies; see `run`. `view` is the kernel that
        returns the same as a view.
        """
        (tensor,) = tensors
        seen = self.run(view, given, tensors, recorded, signatures)
        twin, layout = _twin(tensor), layout_of(seen)
        assert layout is not None, "so are the layouts of all views of it"
        args, kwargs = _concrete(given, 0, iter([twin]))
        self._kernels.run_once(func, args, kwargs, [twin])
        with DisableTorchDispatch(), BelowAutograd():
            tensor.as_strided_(*_symbolic_layout(layout))
        tensor._roam_layout = layout
        return tensor

    def _learned(self, func: Any, given: Any, tensors: list[Any]) -> _Results:
        """Asks a kernel for its results at all points, and finds the expressions that they
        follow.
        """
        if func in ASKED or not _BY_VALUES.isdisjoint(func.tags):
            self._refuse(
                f"{func} is given a size that changes, and how its result depends on it is not known"
            )
        while True:
            try:
                return self._results_of(func, given, tensors)
            except Narrowed:
                pass
            except Unclear as unclear:
                self.symbols.add_point(unclear.point)

    def _results_of(self, func: Any, given: Any, tensors: list[Any]) -> _Results:
        known = self._like_an_argument(func, given, tensors)
        if known is not None:
            return known
        found = self._at_points(func, given, tensors)
        first = found[0]
        if any(
            one.container is not first.container or len(one.items) != len(first.items)
            for one in found
        ):
            if func is aten.split.Tensor:
                _count_of_parts(*given[0])
            self.symbols.narrow_to_conditions()
            self._refuse(f"{func} gives other results for other sizes")
        self._note_products([tensor for tensor in map(layout_of, tensors) if tensor is not None])
        if func in _DIVIDING:
            self._note_computed(func, given)
        items = []
        for place, item in enumerate(first.items):
            alike = [one.items[place] for one in found]
            items.append((item, self._layout(func, given, alike, tensors)))
        return _Results(items, first.container)

    def _like_an_argument(self, func: Any, given: Any, tensors: list[Any]) -> _Results | None:
        """The result of a pointwise kernel that is as large as one of its arguments, and both
        without gaps, at the call's sizes and at both ends of the range: then it is so everywhere.
        None if it is not.
        """
        if torch.Tag.pointwise not in func.tags:
            return None
        symbols = self.symbols
        layouts = [layout for layout in map(layout_of, tensors) if layout is not None]
        found = [
            self._at(place, func, given, tensors, asks=place < _MOST_PLACE)[0]
            for place in range(_MOST_PLACE + 1)
        ]
        first = found[0]
        if first.container is not None or any(len(one.items) != 1 for one in found):
            return None
        (item,) = first.items
        if type(item) is cache.Given and all(one.items[0] == item for one in found):
            return _Results([(item, None)], None)
        if type(item) is not cache.Made:
            return None
        self._note_products(layouts)
        for layout in layouts:
            strides, elements = symbols.strides(layout.shape)
            if list(map(symbols.of, layout.stride)) != strides:
                continue
            size_bytes = elements.mul(symbols.constant(item.dtype.itemsize))
            made = Layout(layout.shape, layout.stride, 0, _plain(size_bytes))
            if all(_lies_as(one.items[0], made.at(place), item) for place, one in enumerate(found)):
                return _Results([(item, made)], None)
        return None

    def _note_products(self, layouts: list[Layout]) -> None:
        """Strides and bytes are products of sizes, and sizes of results products of pairs."""
        known: dict[Expression, None] = {}
        for layout in layouts:
            self.symbols.strides(layout.shape)
            known.update((size, None) for size in layout.shape if isinstance(size, Expression))
        for one in known:
            for other in known:
                one.add(other)
                one.mul(other)

    def _note_computed(self, func: Any, given: Any) -> None:
        """Notes the sizes of a kernel's results by PyTorch's own arithmetic on symbols."""
        args, kwargs = given
        try:
            with disable_fake_tensor_cache(self._mode), enable_python_dispatcher():
                results = func(*args, **kwargs)
        except Exception:  # noqa: BLE001 - then no expression is found
            return
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor):
                self.symbols.strides(result.shape)

    def _layout(self, func: Any, given: Any, alike: list[Any], tensors: list[Any]) -> Layout | None:
        """The layout of a result, from what it is at each point."""
        first = alike[0]
        if any(_kind_of(one) != _kind_of(first) for one in alike):
            self._refuse(f"{func} gives other results for other sizes")
        if type(first) is not cache.Made:
            return None
        base = None if first.base is None else layout_of(tensors[first.base])
        shape = tuple(
            self._number(func, given, [one.shape[dim] for one in alike])
            for dim in range(len(first.shape))
        )
        _, elements = self.symbols.strides(shape)
        elements.mul(self.symbols.constant(first.dtype.itemsize))
        stride = tuple(
            self._number(func, given, [one.stride[dim] for one in alike])
            for dim in range(len(first.shape))
        )
        offset = self._number(func, given, [one.offset for one in alike])
        if base is not None:
            size_bytes = base.size_bytes
        elif first.base is not None:
            size_bytes = tensors[first.base].untyped_storage().nbytes()
        else:
            size_bytes = self._number(func, given, [one.bytes() for one in alike])
        layout = Layout(shape, stride, offset, size_bytes)
        is_symbolic = base is not None or any(
            isinstance(one, Expression) for one in (*shape, *stride, offset, size_bytes)
        )
        return layout if is_symbolic else None

    def _number(self, func: Any, given: Any, values: list[int]) -> Any:
        found = self.symbols.with_values(tuple(values))
        if found is None:
            self._note_computed(func, given)
            found = self.symbols.with_values(tuple(values))
        if found is None:
            self.symbols.raise_least(
                f"no expression is found for a size of the result of {func}: {values}",
                tuple(values),
            )
        return _plain(found)

    def _at_points(self, func: Any, given: Any, tensors: list[Any]) -> list[cache.Results]:
        """What a kernel gives at each of the points. Where sizes are larger than those of the call,
        the real kernel could take long and much memory, and is asked only if it lays out a result
        in another way than the fake one at some other point.
        """
        points = self.symbols.points
        call = points[0].values()
        large = [any(map(operator.gt, point.values(), call)) for point in points]
        found: dict[int, cache.Results] = {}
        asks = False
        for place in sorted(range(len(points)), key=large.__getitem__):
            found[place], differs = self._at(
                place, func, given, tensors, asks=asks or not large[place]
            )
            asks = asks or differs
        return [found[place] for place in range(len(points))]

    def _at(
        self, place: int, func: Any, given: Any, tensors: list[Any], *, asks: bool
    ) -> tuple[cache.Results, bool]:
        """What a kernel gives at one of the points, and whether that is other than what the fake
        kernel says.
        """
        at_point = self._tensors_at(place, tensors)
        remaining = iter(at_point)
        args, kwargs = _concrete(given, place, remaining)
        try:
            result, found = self._kernels.run_once(func, args, kwargs, at_point)
        except Exception:
            if place == 0:
                raise
            self.symbols.raise_least(
                f"{func} does not take smaller sizes",
                fails=lambda place: self._fails(place, func, given, tensors),
            )
        if found is None:
            found = cache.described(result, at_point)
        if found is None:
            self._refuse(f"what {func} gives for other sizes is not known")
        if asks and at_point and not is_sure(func, at_point):
            layouts = [
                (tuple(one.shape), one.stride(), one.storage_offset(), one.dtype, one.device, one.untyped_storage().nbytes())
                for one in at_point
            ]  # fmt: skip
            remaining = iter(layouts)
            key = (
                func,
                cache.key_of(_concrete(given, place, remaining), []),
                torch.get_default_dtype(),
            )
            real = self._kernels.real(key, (args, kwargs), at_point, found)
            if real is not None and real.items != found.items:
                return real, True
        return found, False

    def _fails(self, place: int, func: Any, given: Any, tensors: list[Any]) -> bool:
        """Whether a kernel does not run at one of the points."""
        at_point = self._tensors_at(place, tensors)
        args, kwargs = _concrete(given, place, iter(at_point))
        try:
            self._kernels.run_once(func, args, kwargs, at_point)
        except Exception:  # noqa: BLE001 - whatever the kernel raises
            return True
        return False

    def _tensors_at(self, place: int, tensors: list[Any]) -> list[Any]:
        """Tensors of the sizes at one of the points, which share memory as the arguments do."""
        if place == 0:
            return [_twin(tensor) for tensor in tensors]
        storages = {
            c_pointer(tensor.untyped_storage()): tensor.untyped_storage()
            for tensor in tensors
            if layout_of(tensor) is None
        }
        made = []
        with DisableTorchDispatch():
            for tensor in tensors:
                layout = layout_of(tensor)
                if layout is None:
                    made.append(tensor)
                    continue
                now = layout.at(place)
                pointer = c_pointer(_twin(tensor).untyped_storage())
                if pointer not in storages:
                    storages[pointer] = torch.UntypedStorage(now.size_bytes, device="meta")
                meta = torch.empty(0, dtype=tensor.dtype, device="meta")
                meta.set_(storages[pointer], now.offset, now.shape, now.stride)
                made.append(self._maker.make(self._mode, meta, tensor.fake_device))
        return made

    def _outer(
        self,
        twin: FakeTensor,
        layout: Layout,
        base: Any,
        storage: torch.UntypedStorage | None = None,
    ) -> FakeTensor:
        """The fake tensor that the step sees. It lies in the storage of `base`, or in `storage`."""
        shape, stride, offset = _symbolic_layout(layout)
        with DisableTorchDispatch(), BelowAutograd():
            whole = None if base is None else getattr(base, "_roam_meta", None)
            if whole is not None and whole.dtype is twin.dtype:
                meta = torch.as_strided(whole, shape, stride, offset)
            elif base is None and storage is None and layout.offset == 0:
                meta = torch.empty_strided(shape, stride, dtype=twin.dtype, device="meta")
            else:
                if base is not None:
                    storage = base.untyped_storage()
                meta = torch.empty(0, dtype=twin.dtype, device="meta")
                self.symbols.note_extent(*layout[:3], twin.dtype.itemsize, layout.size_bytes)
                meta.set_(
                    self._empty(layout) if storage is None else storage, offset, shape, stride
                )
            made = self._maker.make(self._mode, meta, twin.fake_device)
        made._roam_layout = layout  # type: ignore[attr-defined]
        made._roam_twin = twin  # type: ignore[attr-defined]
        made._roam_meta = meta  # type: ignore[attr-defined]
        return made

    def _refuse(self, reason: str) -> NoReturn:
        self.symbols.refuse(reason)


def _count_of_parts(tensor: Any, size: Any, dim: int = 0) -> int:
    """Into how many parts of a size a tensor is split, on which the recording relies."""
    return int((tensor.shape[dim] + size - 1) // size)


def signature(layout: Layout, plain: int) -> tuple[Any, ...]:
    """A key for all that a kernel can see of a fake tensor, at any value of the symbols."""
    return (plain, *layout.numbers())


def _lies_as(made: Any, layout: Layout, like: Any) -> bool:
    """Whether a result is new, of the kind of another one, and lies in this way."""
    return (
        type(made) is type(like) is cache.Made
        and made.base is None
        and (made.dtype, made.device) == (like.dtype, like.device)
        and Layout(made.shape, made.stride, made.offset, made.bytes()) == layout
    )


def _kind_of(item: Any) -> Any:
    """What is the same of a result for all sizes."""
    if type(item) is not cache.Made:
        return item
    return item.dtype, item.device, item.base, len(item.shape)


def _twin(tensor: Any) -> Any:
    return getattr(tensor, "_roam_twin", tensor)


def _symbolic(value: Any) -> Any:
    node: Any = value
    return torch.SymInt(node) if isinstance(value, Expression) else value


def _symbolic_layout(layout: Layout) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """Shape, stride and offset as PyTorch takes them."""
    shape, stride, offset, _ = layout.mapped(_symbolic)
    return shape, stride, offset


def _plain(expression: Expression) -> Any:
    return expression.args[0] if expression.op == "constant" else expression


def _holds_sizes(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_holds_sizes, value))
    if isinstance(value, dict):
        return any(map(_holds_sizes, value.values()))
    return type(value) in _SIZED and isinstance(value.node, Expression)


def _concrete(value: Any, place: int, tensors: Iterator[Any]) -> Any:
    """Arguments at one of the points; `tensors` take the places of tensors."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        items = [_concrete(item, place, tensors) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _concrete(item, place, tensors) for key, item in value.items()}
    if type(value) in _SIZED and isinstance(value.node, Expression):
        return value.node.values[place]
    return value
