"""What recording has to know of a kernel, looked up once for each.

Most of it is read from the kernel's schema. The tables here add what schemas leave out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from roam.program.checks import DATA_CHECKS
from roam.program.operators import is_ours
from roam.torch_compat.private import has_kernel_for, packet_of, schema_of
from roam.tracing.numbers.dynamic_shapes import may_be_decided
from roam.tracing.recording import multi_tensor

aten = torch.ops.aten
_identity = id  # while a step is traced, what its code calls by this name asks whose code it is

# Kernels that change arguments although their schema does not say so: argument positions, and the
# position of the flag that makes them do it; None if they always do.
HIDDEN_MUTATION: dict[Any, tuple[tuple[int, ...], int | None]] = {
    aten.batch_norm_gather_stats.default: ((3, 4), None),
    aten.batch_norm_gather_stats_with_counts.default: ((3, 4), None),
    aten.batch_norm_update_stats.default: ((1, 2), None),
    aten.native_batch_norm.default: ((3, 4), 5),
    aten.cudnn_batch_norm.default: ((3, 4), 5),
    aten.miopen_batch_norm.default: ((3, 4), 5),
}
# Kernels whose result shares the argument's storage although their schema does not say so.
HIDDEN_ALIAS = {
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.lift_fresh.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}
# Kernels whose result's shape depends on the values of their numbers.
_SHAPED_BY_NUMBERS = {aten.arange, aten.range}
# Kernels whose result is a Python bool.
ANSWERS = {aten.equal.default, aten.allclose.default}
# Kernels that are not recorded, or in a way of their own.
_OF_THEIR_OWN = {
    aten._local_scalar_dense.default, aten.lift_fresh.default, aten.lift_fresh_copy.default,
    aten.is_set_to.default, *ANSWERS
}  # fmt: skip
# Composite kernels that a run calls whole, since they look at values.
_KEPT_WHOLE = {aten.cumprod_backward.default}
_NESTED = (
    "it makes a nested tensor, which has no sizes that a plan could hold for; use padded tensors, "
    "and pass enable_nested_tensor=False to nn.TransformerEncoder"
)
_QUANTIZED = (
    "it makes a quantized tensor, which plans do not support; use "
    "torch.fake_quantize_per_tensor_affine, or integers with a scale"
)
_RESIZED = (
    "it changes the size of a tensor's storage; use a form that returns a new tensor, or, if a "
    "module does so in its first call only, call the module once before the step"
)
# Kernels that give a tensor another storage or size under the same name, or that make nested or
# quantized ones.
REFUSED = {
    "aten::_nested_from_padded": _NESTED,
    "aten::_nested_tensor_from_mask": _NESTED,
    "aten::_nested_tensor_from_mask_left_aligned": _NESTED,
    "aten::_nested_tensor_from_tensor_list": _NESTED,
    "aten::_nested_view_from_buffer": _NESTED,
    "aten::_nested_view_from_jagged": _NESTED,
    "aten::quantize_per_channel": _QUANTIZED,
    "aten::quantize_per_tensor": _QUANTIZED,
    "aten::quantize_per_tensor_dynamic": _QUANTIZED,
    "aten::set_": "it gives a tensor another storage; assign the data instead, as in x.data = y",
    "aten::resize_": _RESIZED,
    "aten::resize_as_": _RESIZED,
}


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What recording asks of a kernel at each of its calls."""

    func: Any
    is_plain: bool
    """Whether it is recorded in the way of most, with nothing to refuse beforehand."""
    is_composite: bool
    """Whether it is taken apart before it is recorded: it has no kernel for any device."""
    is_random: bool
    is_check: bool
    is_masked: bool
    """Whether it makes the results that a mask asks for."""
    reshapes_in_place: bool
    takes_dtype: bool
    mutates: bool
    """Whether it may change an argument."""
    computes: bool
    """Whether it does more than to make views."""
    may_be_decided: bool
    """Whether values may decide the shape of its results."""
    written: list[tuple[int, str]]
    """Position and name of the arguments that it changes by its schema."""
    names: list[str]
    """The names of its arguments."""
    sizes: frozenset[str]
    """Names of the arguments that decide shapes: integers by the schema (sizes, dimensions,
    positions, counts) where there are results, and what a range is made of.
    """
    are_declared: list[bool]
    """For each result, whether the schema says that it is a view or an argument."""

    @classmethod
    def of(cls, func: Any) -> KernelFacts:
        """The facts of a kernel."""
        schema = schema_of(func)
        arguments = schema.arguments
        written = [
            (position, argument.name)
            for position, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        mutates = bool(written) or func in HIDDEN_MUTATION
        are_declared = [result.alias_info is not None for result in schema.returns]
        has_shapes = is_ours(func) or len(schema.returns) > 0
        makes_range = packet_of(func) in _SHAPED_BY_NUMBERS
        is_composite = (
            func.namespace == "aten"
            and func not in _KEPT_WHOLE
            and has_kernel_for(func.name(), "CompositeImplicitAutograd")
            and not any(has_kernel_for(func.name(), device) for device in ("CPU", "CUDA"))
        )
        return cls(
            func,
            is_plain=is_ours(func)
            and not is_composite
            and schema.name not in REFUSED
            and func not in _OF_THEIR_OWN
            and not multi_tensor.is_multi_tensor(func),
            is_composite=is_composite,
            is_random=torch.Tag.nondeterministic_seeded in func.tags,
            is_check=func in DATA_CHECKS,
            is_masked=any(argument.name == "output_mask" for argument in arguments),
            reshapes_in_place=torch.Tag.inplace_view in func.tags,
            takes_dtype=any(
                argument.kwarg_only and argument.name == "dtype" for argument in arguments
            ),
            mutates=mutates,
            computes=mutates or (not all(are_declared) and func not in HIDDEN_ALIAS),
            may_be_decided=may_be_decided(func),
            written=written,
            names=[argument.name for argument in arguments],
            sizes=frozenset(
                a.name for a in arguments if makes_range or (has_shapes and "int" in str(a.type))
            ),
            are_declared=are_declared,
        )


def resizes_to_same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call gives a tensor the size, or the memory, that it has, which changes nothing."""
    if kwargs or len(args) != 2:
        return False
    if func is aten.set_.source_Tensor:
        return args[0] is args[1]
    if func is aten.resize_as_.default:
        return bool(args[0].shape == args[1].shape)
    return (
        func is aten.resize_.default
        and all(type(size) is int for size in args[1])
        and tuple(args[0].shape) == tuple(args[1])
    )


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a kernel changes in one call."""
    written = [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in facts_of(func).written
    ]
    hidden = HIDDEN_MUTATION.get(func)
    if hidden is not None and (hidden[1] is None or args[hidden[1]]):
        written.extend(args[position] for position in hidden[0])
    return written


_known: dict[int, KernelFacts] = {}
"""By the kernel's identity, which is found faster than its hash. The entry keeps the kernel
alive.
"""


def facts_of(func: Any) -> KernelFacts:
    """What is known of a kernel."""
    facts = _known.get(_identity(func))
    if facts is None:
        facts = _known[_identity(func)] = KernelFacts.of(func)
    return facts
