"""What capture reads off meta kernels is what a fake mode says of the same operators."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from test_real_layouts import EVERY, LAYOUTS, _backward
from torch.utils._python_dispatch import TorchDispatchMode

from operators import op_db
from roam.tracing.fake_kernels import meta_kernels as module
from roam.tracing.fake_kernels.cache import _remembered, tensors_in
from roam.tracing.fake_kernels.meta_kernels import SHOWN, on_meta
from roam.tracing.fakes.fake_mode import new_mode

aten = torch.ops.aten


def _meant(results: Any) -> Any:
    """Results without the strides of dimensions that have one element, or none, which say
    nothing."""

    def meant(item: Any) -> Any:
        if not hasattr(item, "stride"):
            return item
        strides = [
            None if size == 1 or 0 in item.shape else step
            for size, step in zip(item.shape, item.stride, strict=True)
        ]
        return replace(item, stride=strides)

    return replace(results, items=list(map(meant, results.items)))


HALVES = {"native_layer_norm", "nn.functional.batch_norm", "nn.functional.layer_norm", "softmax"}
"""What is held in half precision too, unless all is."""


class Held(TorchDispatchMode):
    """Holds both against each other at every call of an operator that is read off meta kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.calls: set[tuple[Any, str]] = set()
        self.differing: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if module._is_shown(func):
            self._hold(func, args, kwargs)
        return func(*args, **kwargs)

    def _hold(self, func: Any, args: Any, kwargs: Any) -> None:
        metadata = pytree.tree_map_only(
            torch.Tensor, lambda t: (t.shape, t.stride(), t.dtype), (args, kwargs)
        )
        if (func, repr(metadata)) in self.calls:
            return
        self.calls.add((func, repr(metadata)))
        mode = new_mode()
        mode.cache_enabled = False
        entered = pytree.tree_map_only(
            torch.Tensor, lambda t: mode.from_tensor(t.detach()), (args, kwargs)
        )
        tensors = tensors_in(entered)
        shown = on_meta(func, *entered, tensors)
        if shown is NotImplemented:
            return
        self.seen.add(module._plain_name(func))
        with mode:
            told = func(*entered[0], **entered[1])
        ours, theirs = (
            _remembered(shown, tensors, tensors[0].fake_device),
            _remembered(told, tensors),
        )
        if ours is None or theirs is None or _meant(ours) != _meant(theirs):
            given = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors]
            self.differing.append(f"{func} of {given}: {ours} for {theirs}")


NAMED = {
    *SHOWN,
    *(f"nn.functional.{name}" for name in (
        "batch_norm", "cross_entropy", "elu", "embedding", "gelu", "hardtanh", "layer_norm", "leaky_relu", "linear", "nll_loss", "relu",
        "scaled_dot_product_attention", "silu", "softmax", "threshold",
    )),
    *("__getitem__", "linalg.vector_norm", "log_softmax", "matmul", "max", "min", "narrow", "softmax", "std", "softplus"),
}  # fmt: skip
OPERATORS = [op for op in op_db if op.name in NAMED]
IS_ALL = EVERY == 1
MOST_SAMPLES = 20 if IS_ALL else 1


def _hold_all(held: Held, op: Any, dtype: torch.dtype) -> None:
    is_trained = op.supports_autograd and dtype.is_floating_point
    samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=is_trained), 40))
    for sample in samples[:: -(-len(samples) // MOST_SAMPLES) or 1]:
        for layout in LAYOUTS.values() if IS_ALL else (LAYOUTS["contiguous"], LAYOUTS["reversed"]):
            for function in (op.op, op.get_inplace()):

                def laid(value: Any, layout: Any = layout, function: Any = function) -> Any:
                    if value.layout is not torch.strided or value.numel() > 1000:
                        return value
                    made = layout(value.detach())
                    return (
                        made if function is not op.op else made.requires_grad_(value.requires_grad)
                    )

                input, args, kwargs = pytree.tree_map_only(
                    torch.Tensor, laid, (sample.input, sample.args, sample.kwargs)
                )
                try:
                    with held:
                        _backward(function(input, *args, **kwargs))
                except (RuntimeError, IndexError, TypeError, ValueError):
                    continue  # eager PyTorch does not take it in this form or layout


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_meta_kernels_say_what_the_fake_mode_says() -> None:
    held = Held()
    for op in OPERATORS:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            if dtype in op.dtypes and (dtype is torch.float32 or IS_ALL or op.name in HALVES):
                _hold_all(held, op, dtype)
    assert not held.differing
    x = torch.randn(2, 3)
    with held:
        (
            aten.alias.default(x),
            aten.zero_.default(x),
            aten.fill_.Scalar(x, 1),
            aten.copy_.default(x, x.double()),
        )
        aten.silu_backward.default(x, x)
        (
            aten.bitwise_and.Tensor(x > 0, x < 0),
            aten.bitwise_or.Tensor(x > 0, x < 0),
            aten.bitwise_not.default(x > 0),
        )
    assert not held.differing
    assert held.seen == SHOWN


def test_what_hangs_on_the_device_is_left_to_the_fake_mode() -> None:
    with new_mode():
        x, halves = torch.empty(2, 3), torch.empty(2, 3, dtype=torch.bfloat16)
        weight = torch.empty(3, dtype=torch.bfloat16)
    args = halves, [3], weight, weight, 1e-5
    assert (
        on_meta(aten.native_layer_norm.default, args, {}, [halves, weight, weight])
        is NotImplemented
    )
    assert on_meta(aten.clone.default, (x,), {"device": torch.device("cpu")}, [x]) is NotImplemented
    assert on_meta(aten.mm.default, (x, x), {}, [x, x]) is NotImplemented  # which it refuses
    assert on_meta(aten.nonzero.default, (x,), {}, [x]) is NotImplemented
    made = on_meta(aten.mul.Tensor, (x, 2), {}, [x])
    assert made.device.type == "meta"
    assert made.shape == x.shape
