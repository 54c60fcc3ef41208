"""Operators whose results' shapes depend on values: boolean indices, `nonzero`, `unique`, packed
sequences, CTC loss.

The computation that decides a shape (how many elements a mask selects, how long the longest target
is) is cut out of the recording as a computed guard (`roam.tracing.numbers.scalar_guards`). A plan
holds for one answer. It runs the operator itself, on memory of the size for this answer. Every call
computes the guard again, from the values that the tensors have then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from roam.torch_compat.private import disable_current_modes, schema_of

aten = torch.ops.aten
_MASKS = {torch.bool, torch.uint8}
Answer = Any
"""A number, or a tuple of what is compared by value."""
_MASKED: Final = "torch.where with three arguments, masked_fill, or a product with the mask"
_FIXED: Final = {
    "bincount": "torch.bincount(x, minlength=n), where n is the number of bins",
    "linalg_lstsq": "torch.linalg.pinv(a) @ b, or torch.linalg.qr",
    "nonzero": f"{_MASKED}; or torch.nonzero_static(x, size=n), where n is at least the number of places",
    "repeat_interleave": "repeat_interleave(..., output_size=n), where n is the sum of all repeats",
    **dict.fromkeys(
        ("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
        "torch.sort, and a comparison of each element with the next",
    ),
}
"""What gives a result of a fixed shape instead, by the names of operators."""


@dataclass(frozen=True, slots=True)
class Decided:
    """What decides the shapes of a call's results."""

    ask: Callable[..., Answer]
    """Tells the answer from the real values of `operands`."""
    operands: tuple[Any, ...]
    make: Callable[[Answer], Any]
    """The call's results, as fakes."""
    value: Callable[[Answer], tuple[int, torch.Tensor]] | None = None
    """Place and value of a result that the answer holds whole, if there is one."""
    usual: tuple[Callable[[Callable[..., Any]], torch.Tensor], Answer] | None = None
    """A function that computes a condition by the caller of kernels that it is given, and the
    answer if the condition holds. Runs of the step check the condition, so the answer need not be
    known before the step."""


def shape_refusal(operator: str) -> str:
    """Why an operator is refused whose result has an unknown shape, and what to use instead."""
    instead = _FIXED.get(operator.split(".")[1], _MASKED)
    return (
        "the shape of its result depends on floating-point data or on what the step computes; use "
        f"a form with a fixed shape: {instead}. Integer and boolean tensors that exist before the "
        "step, among its arguments or in buffers, may decide shapes"
    )


def may_be_decided(func: Any) -> bool:
    """Whether there is a rule for an operator."""
    return func in _RULES


def decided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decided | None:
    """How values decide what a call gives; None if they do not, or if this is not known of the
    operator.
    """
    rule = _RULES.get(func)
    return None if rule is None else rule(func, *_bound(func, args, kwargs))


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments, in the order of the schema."""
    rest = schema_of(func).arguments[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]


def _by_all(func: Any, *operands: Any) -> Decided | None:
    """All arguments decide: the kernel itself is asked."""
    return Decided(
        layouts_of, (func, *operands), functools.partial(_of_layouts, _device_of(operands))
    )


def _device_of(operands: Sequence[Any]) -> torch.device:
    return next(operand.device for operand in operands if isinstance(operand, torch.Tensor))


def _by_counts(func: Any, x: Any, weights: Any, minlength: int) -> Decided | None:
    """The number of bins is `minlength`, unless an element is larger."""
    rule = _by_all(func, x, weights, minlength)
    if rule is None or type(minlength) is not int or minlength <= 0:
        return rule

    def are_small(call: Callable[..., Any]) -> torch.Tensor:
        return call(aten.all.default, call(aten.lt.Scalar, x, minlength))  # type: ignore[no-any-return]

    with disable_current_modes():
        one = torch.zeros(1, dtype=torch.int64)
        weight = None if weights is None else torch.zeros(1, dtype=weights.dtype)
        answer = layouts_of(func, one, weight, minlength)
    return replace(rule, usual=(are_small, answer))


def layouts_of(func: Any, *operands: Any) -> Answer:
    """Shape, strides and dtype of each of a kernel's results."""
    given = list(zip(schema_of(func).arguments, operands, strict=True))
    args = [value for argument, value in given if not argument.kwarg_only]
    kwargs = {argument.name: value for argument, value in given if argument.kwarg_only}
    result = func(*args, **kwargs)
    results = result if isinstance(result, tuple) else (result,)
    layouts = tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in results)
    return isinstance(result, tuple), layouts


def _of_layouts(device: torch.device, answer: Answer) -> Any:
    is_tuple, layouts = answer
    made = tuple(
        torch.empty_strided(shape, strides, dtype=dtype, device=device)
        for shape, strides, dtype in layouts
    )
    return made if is_tuple else made[0]


def _by_repeats(func: Any, repeats: Any, output_size: int | None) -> Decided | None:
    return _by_all(func, repeats, output_size) if output_size is None else None


def _by_masks(func: Any, tensor: Any, indices: Sequence[Any]) -> Decided | None:
    masks = tuple(index for index in indices if index is not None and index.dtype in _MASKS)
    if not masks or any(mask.dim() == 0 for mask in masks):
        return None

    def make(counts: Answer) -> Any:
        """Each mask does what one list of positions for each of its dimensions does."""
        remaining, positions = iter(counts), []
        for index in indices:
            if index is None or index.dtype not in _MASKS:
                positions.append(index)
            else:
                found = torch.empty(next(remaining), dtype=torch.int64, device=index.device)
                positions += [found] * index.dim()
        return func(tensor, positions)

    return Decided(counts_of, masks, make)


def counts_of(*masks: Any) -> Answer:
    """How many elements each mask selects."""
    return tuple(int(aten.count_nonzero.default(mask)) for mask in masks)


def _by_mask(func: Any, tensor: Any, mask: Any) -> Decided | None:
    repeats = torch.broadcast_shapes(tensor.shape, mask.shape).numel() // max(mask.numel(), 1)
    return Decided(counts_of, (mask,), lambda counts: tensor.new_empty(counts[0] * repeats))


def _by_lengths(func: Any, data: Any, lengths: Any, batch_first: bool) -> Decided | None:
    batch, steps = data.shape[:2] if batch_first else (data.shape[1], data.shape[0])

    def make(sizes: Answer) -> Any:
        return data.new_empty((sum(sizes), *data.shape[2:])), torch.empty(
            len(sizes), dtype=torch.int64, device="cpu"
        )

    return Decided(
        batch_sizes_of,
        (lengths, batch, steps),
        make,
        lambda sizes: (1, torch.tensor(sizes, dtype=torch.int64, device="cpu")),
    )


def batch_sizes_of(lengths: Any, batch: int, steps: int) -> Answer:
    """How many of the sequences reach each step; raises what packing them raises."""
    nothing = torch.zeros((batch, steps, 1), device="cpu")
    return tuple(aten._pack_padded_sequence.default(nothing, lengths, True)[1].tolist())


def contents_of(sizes: Any) -> Answer:
    """All of a tensor's numbers."""
    return tuple(sizes.tolist())


def _by_longest(
    func: Any, log_probs: Any, targets: Any, inputs: Any, lengths: Any, *_: Any
) -> Decided | None:
    if (
        log_probs.device.type != "cpu"
    ):  # elsewhere other kernels may run, which depend on the values too
        return None
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1

    def make(longest: Answer) -> Any:
        return log_probs.new_empty(batch), log_probs.new_empty(
            (batch, log_probs.shape[0], 2 * longest + 1)
        )

    return Decided(longest_of, (lengths,), make)


def longest_of(lengths: Any) -> Answer:
    """The largest of some lengths; 0 of none."""
    return max(lengths.tolist(), default=0)


_RULES: dict[Any, Callable[..., Decided | None]] = {
    **dict.fromkeys(
        (
            aten.nonzero.default,
            aten._unique.default,
            aten._unique2.default,
            aten.unique_dim.default,
            aten.unique_consecutive.default,
            aten.unique_dim_consecutive.default,
        ),
        _by_all,
    ),
    aten.bincount.default: _by_counts,
    aten.repeat_interleave.Tensor: _by_repeats,
    aten.index.Tensor: _by_masks,
    aten.masked_select.default: _by_mask,
    aten._pack_padded_sequence.default: _by_lengths,
    aten._ctc_loss.Tensor: _by_longest,
}
