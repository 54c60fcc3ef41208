"""Corrects fake kernels whose results are known to differ from the real ones'; the first real run
of a step finds those that are not known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from roam.kernels.recurrent import ASKED, asked
from roam.program.operators import ATTENTION
from roam.torch_compat.private import (
    FakeTensor,
    current_node,
    disable_current_modes,
    function_transform,
    packet_of,
    schema_of,
    strides_together,
    suggest_memory_format,
)
from roam.tracing.fake_kernels.real_layouts import generator_kept

aten = torch.ops.aten

# Losses whose kernels write the unreduced loss into the result's storage first and never give the
# rest of it back.
_REDUCED_LOSSES = {
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
}
_BAGS = {aten._embedding_bag.default, aten._embedding_bag_forward_only.default}
# Nodes of autograd that spread a gradient over equal elements: on real tensors they ask for a value
# on the way.
_SPREAD_EVENLY = {"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"}
_SELECTS_MASKED = {"MaskedFillBackward0", "MaskedFillBackward1"}
# Nodes of autograd that look for zeros among real values, and divide by them where there are none.
# Fakes always go the other way, over cumulative products, which gives other bits. Of `cumprod` this
# is met only where a second backward pass is recorded (`composite_gradients`).
_LOOKS_FOR_ZEROS = {"ProdBackward0", "ProdBackward1", "CumprodBackward0"}
# Kernels of the CPU that make their result as large as their argument and then give it its shape.
_UNFOLDED = {aten.im2col.default, aten.col2im.default}
_RUNS = {aten.unique_consecutive.default}
_OVERSIZED = _REDUCED_LOSSES | _BAGS | _UNFOLDED | _RUNS


def as_real(func: Any, args: Any, result: Any) -> Any:
    """The results as the real kernel lays them out, where the fake one is known not to."""
    if func in ASKED:
        return tuple(
            None
            if real is None
            else torch.empty_strided(
                real.shape, real.stride(), dtype=real.dtype, device=real.device
            )
            for real in asked(func, args)
        )
    correct = _CORRECTIONS.get(func)
    return result if correct is None else correct(args, result)


def _batch_norm(args: Any, result: Any) -> Any:
    if args[0].device.type != "cpu":
        return result
    output, *statistics = result
    is_plain = args[0].is_contiguous()
    output = _in_format(
        output, torch.contiguous_format if is_plain else suggest_memory_format(args[0])
    )
    is_mixed = any(t is not None and t.dtype is not args[0].dtype for t in args[1:5])
    if is_mixed and args[5]:
        statistics = [statistic.float() for statistic in statistics]
    return output, *statistics


def _batch_norm_backward(args: Any, result: Any) -> Any:
    if args[0].device.type != "cpu" or result[0] is None:
        return result
    formats = [suggest_memory_format(tensor) for tensor in args[:2]]
    is_plain = formats[0] is formats[1] and args[0].is_contiguous() and args[1].is_contiguous()
    return _in_format(result[0], torch.contiguous_format if is_plain else formats[1]), *result[1:]


def _layer_norm(args: Any, result: Any) -> Any:
    if args[0].device.type != "cpu" or args[2] is None or args[2].dtype is args[0].dtype:
        return result
    output, *statistics = result
    return output, *(statistic.to(args[2].dtype) for statistic in statistics)


def _layer_norm_backward(args: Any, result: Any) -> Any:
    if args[0].device.type != "cpu" or result[0] is None:
        return result
    return result[0].contiguous(), *result[1:]


def _loss_backward(args: Any, result: Any) -> Any:
    """The gradient has its input's dtype, also where the targets have another."""
    return result if args[1].device.type != "cpu" else result.to(args[1].dtype)


def _multilabel_margin_loss(args: Any, result: Any) -> Any:
    return (result[0].new_empty(()), result[1]) if args[0].dim() < 2 and args[2] == 0 else result


def _bags(args: Any, result: Any) -> Any:
    """PyTorch adds up rows of bfloat16, too, in its quick way, which makes no list of the bags."""
    defaults = (False, 0, False, None, False, -1)
    given = (*args, *defaults[len(args) - 3 :])
    weight, mode, scale, padding = given[0], given[4], given[6], given[8]
    is_quick = (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and mode == 0
        and weight.stride(1) == 1
        and padding < 0
        and (scale is None or scale.stride(0) == 1)
    )
    return (result[0], result[1].new_empty(0), *result[2:]) if is_quick else result


def _window(args: Any, result: Any) -> Any:
    """A periodic window is a longer window without its last element."""
    is_periodic = len(args) < 2 or args[1]
    return result.new_empty(len(result) + 1)[:-1] if is_periodic and len(result) > 1 else result


def _index(args: Any, result: Any) -> Any:
    """The order of the dimensions in memory follows the tensor and the indices, as in an
    elementwise operator of these; fake kernels look at the tensor alone.
    """
    tensor, indices = args
    given = {at: index for at, index in enumerate(indices) if index is not None}
    if any(index.dtype in (torch.bool, torch.uint8) for index in given.values()):
        return result
    first, count = min(given), len(given)
    if max(given) - first >= count:  # the dimensions that are indexed come first
        others = [at for at in range(tensor.dim()) if at not in given]
        tensor, first = tensor.permute(*given, *others), 0
    spread = torch.broadcast_tensors(*given.values())
    between, rest = spread[0].dim(), tensor.dim() - first - count
    strides = [*tensor.stride()[:first], *[0] * between, *tensor.stride()[first + count :]]
    parts = [torch.empty_strided(result.shape, strides, device="meta")]
    parts += [
        index.reshape([1] * first + [*index.shape] + [1] * rest).expand(result.shape)
        for index in spread
    ]
    made = strides_together(*parts)
    return result if made == result.stride() else result.new_empty_strided(result.shape, made)


def _attention(args: Any, result: Any, *, func: Any) -> Any:
    """Kernels of attention keep a seed and an offset, with which their backward pass draws dropout
    again. Some keep them on the CPU; fake kernels put them where the query is.
    """
    query, (dropout_at, places) = args[0], ATTENTION[func]
    if query.device.type != "cuda":
        return result
    draws = len(args) > dropout_at and args[dropout_at] > 0
    devices = _SEED_DEVICES.get(func)
    if torch.cuda.is_available():
        devices = _seed_devices(func, draws, query.dtype, query.device)
    made = list(result)
    for place, kind in zip(places, devices or (), strict=False):
        if made[place] is not None and kind != made[place].device.type:
            made[place] = torch.empty(made[place].shape, dtype=made[place].dtype, device=kind)
    return tuple(made)


_SEED_DEVICES = {aten._scaled_dot_product_efficient_attention.default: ("cpu", "cpu")}
"""The devices of seed and offset on a machine without a GPU, for operators that do not keep them
where the query is."""


@functools.cache
def _seed_devices(
    func: Any, draws: bool, dtype: torch.dtype, device: torch.device
) -> tuple[str, str]:
    """The types of the devices on which a kernel of attention leaves its seed and offset, as a
    small call of it tells. The states of random generators are restored.
    """
    dropout_at, (seed, offset) = ATTENTION[func]
    rest: list[Any] = [None, True] if dropout_at == 5 else []
    with disable_current_modes(), torch.no_grad():
        query = torch.zeros(1, 1, 64, 64, dtype=dtype, device=device)
        with generator_kept([query]):
            found = func(query, query, query, *rest, 0.5 if draws else 0.0)
    return found[seed].device.type, found[offset].device.type


_CORRECTIONS: dict[Any, Callable[[Any, Any], Any]] = {
    **{func: functools.partial(_attention, func=func) for func in ATTENTION},
    **{
        getattr(getattr(aten, f"{name}_window"), overload): _window
        for name in ("bartlett", "blackman", "hamming", "hann", "kaiser")
        for overload in getattr(aten, f"{name}_window").overloads()
        if not overload.endswith("out")
    },
    **dict.fromkeys(_BAGS, _bags),
    aten.index.Tensor: _index,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.mse_loss_backward.default: _loss_backward,
    aten.smooth_l1_loss_backward.default: _loss_backward,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
}


def _in_format(fake: Any, memory_format: torch.memory_format) -> Any:
    """A fake tensor with the strides of a memory format: the given one, or another if its strides
    differ.
    """
    like = torch.empty(
        fake.shape, dtype=fake.dtype, device=fake.fake_device, memory_format=memory_format
    )
    return fake if fake.stride() == like.stride() else like


def without_masked(func: Any, args: Any, kwargs: Any, results: Any) -> Any:
    """The results that an `output_mask` asks for; fake kernels make the others too, real ones need
    not.
    """
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == "output_mask":
            mask = args[position] if position < len(args) else kwargs.get("output_mask")
            if mask is not None and len(mask) == len(results):
                return [
                    result if wanted else None for wanted, result in zip(mask, results, strict=True)
                ]
    return results


def bytes_at_least(func: Any, tensors: Sequence[Any], position: int, result: Any) -> Any:
    """Bytes of the storage of a result for which a kernel takes more than it then fills; 0 for any
    other.
    """
    if func not in _OVERSIZED:
        return 0
    if func in _REDUCED_LOSSES:  # in the result's dtype, where the two differ
        losses = math.prod(torch.broadcast_shapes(tensors[0].shape, tensors[1].shape))
        return losses * int(result.element_size())
    if tensors[0].device.type != "cpu":
        return 0
    item_bytes = int(tensors[0].element_size())
    if func in _UNFOLDED:
        return tensors[0].numel() * item_bytes
    if func in _RUNS:  # it has room for as many runs as elements
        return int(tensors[0].numel()) * int(result.element_size()) if result.numel() else 0
    if position == 1 and result.numel():
        return (int(result.numel()) + 1) * int(
            result.element_size()
        )  # it counts one past the last bag
    return 0


def _device_of(tensor: Any) -> torch.device:
    # `device` of a fake would be dispatched like an operator.
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def is_spread(func: Any, args: Any) -> bool:
    """Whether a call is the last of a gradient that autograd spreads over equal elements: on the
    CPU, real tensors are filled where the mask is, and only fakes are multiplied with it, which
    gives other signs of zero.
    """
    if (
        func is not aten.mul.Tensor
        or args[0].dtype is not torch.bool
        or _device_of(args[0]).type != "cpu"
    ):
        return False
    node: Any = current_node()
    is_transformed = function_transform() is not None  # then real tensors are multiplied, too
    return node is not None and node.name() in _SPREAD_EVENLY and not is_transformed


def selects_masked(func: Any) -> bool:
    """Whether a call is part of the gradient of the value that `masked_fill` fills in: real
    gradients are selected by the mask and then added up, and fake ones are set to zero elsewhere,
    which adds them up in another order.
    """
    node: Any = current_node() if packet_of(func) is aten.where else None
    return node is not None and node.name() in _SELECTS_MASKED and function_transform() is None


def looks_for_zeros(func: Any) -> bool:
    """Whether a call is part of a gradient that autograd computes in another way for real tensors
    without zeros.
    """
    node: Any = current_node() if func is aten.cumprod.default else None
    return node is not None and node.name() in _LOOKS_FOR_ZEROS
