"""Which kernels can write into memory that a plan chose.

A planned result is a strided view into a pool. For every functional overload the schemas and
dispatch keys of the running PyTorch say how its result could get there (`candidate`);
`kernels.json`, which ``benches/kernel_table.py`` writes, says for which layouts and dtypes tests
found that way to be exact; `placement` returns what both allow. Operators that are not in the file
allocate their results themselves.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from roam.kernels import rows, substitutes
from roam.program.ir import TensorMeta, extents, is_dense
from roam.program.tiles import TILES, run_into
from roam.torch_compat.overloads import (
    in_place_overload,
    is_native,
    out_overload,
    out_overloads,
    signature,
)
from roam.torch_compat.private import OpOverload, schema_of

Way = Literal["direct", "substitute", "copy_in"]
Kernel = Callable[..., Any]

TABLE = Path(__file__).with_name("kernels.json")


@dataclass(frozen=True, slots=True)
class Placement:
    """How the results of a functional overload get to where the plan wants them.

    Attributes:
        way: ``direct``: by the overload's own `out=` kernel; ``substitute``: by another kernel that
            gives the same bits; ``copy_in``: it computes into memory of its own, from where it may
            be copied.
        kernel: called as ``kernel(outs, *args, **kwargs)`` with the functional overload's own
            arguments; None for ``copy_in``.
        name: what the kernel calls.
        overload: the `out=` overload that the kernel calls with the same arguments, if that is all
            it does.
        out_names: the overload's arguments for the results, in the results' order.
        cleared: for each value of `dtypes_of`, the values of `layouts_of` for which tests found the
            kernel exact.
        in_place: for each value of `dtypes_of`, (argument, result): results that may take the
            memory of this argument if it dies in the call and has their dtype, shape and strides.
        dropped: keyword arguments that the overload does not take.
        not_if: the name of a boolean argument. If it is set, the kernel does not apply.
        rows: for kernels that go by rows (see `roam.kernels.rows`), a function that tells how many
            rows a call has, from its tensors or their metadata.
        reason: why nothing better is done.
    """

    way: Way
    kernel: Kernel | None = None
    name: str = ""
    overload: OpOverload | None = None
    out_names: tuple[str, ...] = ()
    cleared: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    in_place: Mapping[str, frozenset[tuple[str, int]]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    dropped: frozenset[str] = frozenset()
    not_if: str = ""
    rows: Callable[..., int] | None = None
    reason: str = ""
    is_tried: bool = False
    """Whether the very call is tried when a plan is made, whatever its layouts and dtypes."""

    def clears(
        self,
        inputs: Iterable[torch.Tensor | TensorMeta],
        outputs: Iterable[torch.Tensor | TensorMeta],
    ) -> bool:
        """Whether tests cleared the kernel for tensors of these layouts and dtypes."""
        inputs, outputs = list(inputs), list(outputs)
        return self.is_tried or layouts_of(inputs, outputs) in self.cleared.get(
            dtypes_of(inputs, outputs), ()
        )

    def cleared_in_place(
        self,
        inputs: Iterable[torch.Tensor | TensorMeta],
        outputs: Iterable[torch.Tensor | TensorMeta],
    ) -> list[tuple[str, int]]:
        """`in_place` for tensors of these dtypes."""
        return sorted(self.in_place.get(dtypes_of(inputs, outputs), ()))

    def call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[Any]
    ) -> tuple[Kernel, tuple[Any, ...], dict[str, Any]]:
        """The function, arguments and keyword arguments that write a functional call's results into
        `outs`.
        """
        assert self.kernel is not None, "something that can write there"
        if self.overload is None:
            return self.kernel, (tuple(outs), *args), dict(kwargs)
        kept = {name: value for name, value in kwargs.items() if name not in self.dropped}
        return self.overload, tuple(args), {**kept, **dict(zip(self.out_names, outs, strict=True))}

    def applies(self, target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the kernel covers these arguments, of which only plain ones are looked at."""
        return self.way != "copy_in" and not (
            self.not_if and named(target, args, kwargs)[self.not_if]
        )

    def splits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a kernel that goes by rows finds some to go by."""
        return self.rows is not None and self.rows(*args, **kwargs) > 1


def placement(target: Any, device: str) -> Placement:
    """The way that the running PyTorch offers and that tests cleared; ``copy_in`` if there is none.

    What was tested with another PyTorch, or on the CPU for a device without tests of its own, is
    taken as a proposal: see `is_proven`. Memory is then given to pointwise results alone, whose
    kernels read an element before they write it.
    """
    if not isinstance(target, OpOverload):
        return Placement("copy_in", reason="it computes no tensor")
    if target is TILES:
        return Placement("substitute", run_into, "tiles", is_tried=True)
    return _placement(target, device)


@functools.cache
def _placement(target: OpOverload, device: str) -> Placement:
    found = candidate(target, device)
    if found.way == "copy_in":
        return found
    entry = _tested(device)["kernels"].get(target.name())
    if entry is None or entry["kernel"] != found.name:
        return Placement("copy_in", reason="not tested")
    if not entry["cleared"]:
        return Placement(
            "copy_in", reason=f"refused by tests: {next(iter(entry['refused'].values()))}"
        )
    cleared, in_place = _by_dtypes(entry["cleared"]), _by_dtypes(entry["in_place"])
    if device not in _table() and torch.Tag.pointwise not in target.tags:
        in_place = {}
    pairs = {
        dtypes: frozenset((argument, result) for argument, result in found)
        for dtypes, found in in_place.items()
    }
    return replace(
        found,
        cleared=MappingProxyType(
            {dtypes: frozenset(layouts) for dtypes, layouts in cleared.items()}
        ),
        in_place=MappingProxyType(pairs),
    )


def _by_dtypes(joined: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {dtypes: values for several, values in joined.items() for dtypes in several.split()}


def is_proven(device: str) -> bool:
    """Whether the table was established with the PyTorch that is running, on this type of device,
    and for CUDA on one of the same compute capability.

    If not, whoever uses a placement has to compare its results with the ordinary call's.
    """
    table = _table().get(device)
    if table is None or table["torch"] != torch.__version__.partition("+")[0]:
        return False
    return device != "cuda" or table["capability"] == capability()


def capability() -> list[int] | None:
    """The compute capability of the CUDA device; None if there is none."""
    return list(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def _tested(device: str) -> dict[str, Any]:
    """What is known of a device's kernels, or of the CPU's."""
    known: dict[str, Any] = _table().get(device) or _table().get("cpu") or {"kernels": {}}
    return known


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return table


@functools.cache
def candidate(target: OpOverload, device: str) -> Placement:
    """The way that schemas and dispatch keys offer; nothing is cleared."""
    reason = _not_functional(target)
    if reason:
        return Placement("copy_in", reason=reason)
    if (equal := substitutes.EQUAL.get(target.name())) and (
        equal.rows is None or device == rows.DEVICE
    ):
        return Placement(
            "substitute", equal.kernel, equal.name, not_if=equal.not_if, rows=equal.rows
        )
    direct, reason = _direct(target, device)
    if direct is not None:
        return direct
    wrapped = _taking_numbers(target, device)
    if wrapped is not None:
        return wrapped
    partner = in_place_overload(target, device)
    if partner is not None:
        kernel = functools.partial(substitutes.copy_then, partner)
        return Placement("substitute", kernel, f"copy_, {partner.name()}")
    return Placement("copy_in", reason=reason)


def _not_functional(target: OpOverload) -> str:
    schema = schema_of(target)
    if any(argument.alias_info is not None for argument in schema.arguments):
        return "it changes or views an argument"
    if not schema.returns or any(str(result.type) != "Tensor" for result in schema.returns):
        return "its results are not all tensors"
    return ""


def _direct(target: OpOverload, device: str) -> tuple[Placement | None, str]:
    """The overload of the same arguments that takes one tensor more for each result, if it has a
    kernel of its own.
    """
    found, reason = out_overload(target, device)
    if found is None:
        return None, reason
    overload, names, dropped = found
    kernel = functools.partial(_call_out, overload, names, dropped)
    return Placement("direct", kernel, overload.name(), overload, names, dropped=dropped), ""


def _taking_numbers(target: OpOverload, device: str) -> Placement | None:
    """The `out=` overload that has a tensor where this one has a number, which it takes as well."""
    wanted = [(name, "Tensor" if name == "other" else kind) for name, kind in signature(target)]
    for overload, names, taken in out_overloads(target):
        if taken == wanted and is_native(overload, device):
            kernel = functools.partial(_call_out, overload, names, frozenset())
            return Placement("substitute", kernel, overload.name(), overload, names)
    return None


def _call_out(
    overload: OpOverload, names: tuple[str, ...], dropped: frozenset[str], outs: Sequence[torch.Tensor],
    *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    kept = {name: value for name, value in kwargs.items() if name not in dropped}
    overload(*args, **kept, **dict(zip(names, outs, strict=True)))


def named(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, defaults included."""
    parameters = schema_of(target).arguments
    values = {item.name: item.default_value for item in parameters}
    values.update(zip((item.name for item in parameters), args, strict=False))
    return {**values, **kwargs}


def dtypes_of(
    inputs: Iterable[torch.Tensor | TensorMeta], outputs: Iterable[torch.Tensor | TensorMeta]
) -> str:
    """The dtypes of a call's tensors as one word, such as ``bool+float32``."""
    return "+".join(
        sorted({_dtype_name(dtype) for dtype in {tensor.dtype for tensor in (*inputs, *outputs)}})
    )


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layouts_of(
    inputs: Iterable[torch.Tensor | TensorMeta], outputs: Iterable[torch.Tensor | TensorMeta]
) -> str:
    """The layouts of a call's tensors as one word, such as ``CE>C``: see `layout`."""
    return ">".join(
        "".join(sorted({layout(tensor) for tensor in tensors})) for tensors in (inputs, outputs)
    )


def layout(tensor: torch.Tensor | TensorMeta) -> str:
    """The layout of a tensor as a letter.

    ``C``: contiguous; ``L``: dense, channels last; ``P``: dense, dimensions in another order;
    ``S``: with gaps between elements; ``E``: expanded or otherwise overlapping. Where elements
    start in the storage does not matter.
    """
    strides = tensor.stride() if isinstance(tensor, torch.Tensor) else tensor.stride
    return _layout(tuple(tensor.shape), strides)


@functools.lru_cache(4096)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    dimensions = extents(shape, strides)
    if any(size == 0 for _, size in dimensions) or is_dense(dimensions[::-1]):
        return "C"
    if is_dense(sorted(dimensions)):
        last = [1, *range(len(strides) - 1, 1, -1), 0]
        channels_last = [(strides[d], shape[d]) for d in last if shape[d] != 1]
        return "L" if len(strides) in (4, 5) and is_dense(channels_last) else "P"
    reach = 0
    for stride, size in sorted(dimensions):
        if stride <= reach:
            return "E"
        reach += stride * (size - 1)
    return "S"
