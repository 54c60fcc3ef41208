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
from roam.tracing.fake_kernels import shape_rules
from roam.tracing.fake_kernels.cache import _remembered, tensors_in
from roam.tracing.fake_kernels.meta_kernels import SHOWN, on_meta
from roam.tracing.fake_kernels.shape_rules import by_rule
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


def test_rules_say_what_the_fake_mode_and_real_kernels_say() -> None:
    x, y, column, row = (
        torch.randn(2, 3, 4),
        torch.randn(2, 3, 4),
        torch.randn(5, 3),
        torch.randn(3, 4),
    )
    weight, bias = torch.randn(4), torch.randn(4)
    out, mean, rstd = aten.native_layer_norm(x, [4], weight, bias, 1e-5)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        *((func, (x, y)) for func in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)),
        *((func, (x, y)) for func in (aten.tanh_backward.default, aten.sigmoid_backward.default)),
        *((func, (x.abs(),)) for func in (aten.neg.default, aten.exp.default, aten.tanh.default, aten.sigmoid.default)),
        *((func, (x.abs(),)) for func in (aten.relu.default, aten.sqrt.default, aten.rsqrt.default)),
        *((aten.mul.Scalar, (x, 2)), (aten.mul.Tensor, (torch.randn(()), torch.randn(())))),
        *((aten.mm.default, (column, row)), (aten.mm.default, (row.t(), column.t())), (aten.mm.default, (row[:1].t(), row[:1]))),
        *((aten.addmm.default, (weight, column, row)), (aten.bmm.default, (x, y.transpose(1, 2)))),
        *((aten.native_layer_norm.default, (x, [4], weight, bias, 1e-5)), (aten.native_layer_norm.default, (x, [3, 4], None, None, 0.1))),
        (aten.native_layer_norm_backward.default, (y, x, [4], mean, rstd, weight, bias, [True, True, True])),
        *((func, (x, -1, False)) for func in (aten._softmax.default, aten._log_softmax.default)),
        *((aten._safe_softmax.default, (x, 1)), (aten._safe_softmax.default, (x, 2, None))),
        *((func, (y, x.softmax(1), 1, x.dtype)) for func in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)),
    ]  # fmt: skip
    assert {func for func, _ in calls} == shape_rules._RULES.keys()

    def metadata(result: Any) -> Any:
        made = result if isinstance(result, tuple) else (result,)
        return [
            (t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes())
            for t in made
        ]

    for func, args in calls:
        for dtype in (torch.float32, torch.float64):
            real = pytree.tree_map_only(torch.Tensor, lambda t, dtype=dtype: t.to(dtype), args)
            real = pytree.tree_map_only(torch.dtype, lambda _, dtype=dtype: dtype, real)
            mode = new_mode()
            fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, real)
            ruled = by_rule(func, fakes, {}, tensors_in(fakes))
            assert ruled is not None, func
            with mode:
                assert metadata(ruled) == metadata(func(*fakes)), func
            assert metadata(ruled) == metadata(func(*real)), func
            assert isinstance(ruled, tuple) == isinstance(func(*real), tuple)


def test_rules_leave_alone_what_is_in_doubt() -> None:
    x, weight = torch.randn(2, 3), torch.randn(3)
    doubtful: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.add.Tensor, (x, weight), {}), (aten.add.Tensor, (x, x), {"alpha": 2}), (aten.add.Tensor, (x, x.double()), {}),
        (aten.add.Tensor, (x.t(), x.t()), {}), (aten.add.Tensor, (x[:0], x[:0]), {}), (aten.mul.Tensor, (x.int(), x.int()), {}),
        (aten.mul.Tensor, (x, 2j), {}), (aten.mul.Tensor, (torch.empty_strided((1, 3), (7, 1)), torch.randn(1, 3)), {}),
        (aten.mm.default, (x, x), {}), (aten.mm.default, (x, weight), {}), (aten.addmm.default, (weight[:1], x, x.t()), {}),
        (aten.bmm.default, (x[None], x[None]), {}), (aten.native_layer_norm.default, (x, [2], None, None, 1e-5), {}),
        (aten.native_layer_norm.default, (x, [3], weight[:2], None, 1e-5), {}), (aten.native_layer_norm.default, (x.t(), [2], None, None, 1e-5), {}),
        (aten.native_layer_norm_backward.default, (x, x, [3], x[:, :1], x[:, :1], weight, weight, [True, True, False]), {}),
        (aten.native_layer_norm_backward.default, (x, x, [3], weight, weight, None, None, [True, True, True]), {}),
        (aten._softmax.default, (x, 2, False), {}), (aten._softmax.default, (x.t(), 0, False), {}), (aten._softmax.default, (x[0, 0], 0, False), {}),
        (aten._softmax.default, (x, 1, True), {}), (aten._safe_softmax.default, (x, 1, torch.float64), {}),
        (aten._softmax_backward_data.default, (x, x, 1, torch.float16), {}), (aten._softmax_backward_data.default, (x.t(), x.t(), 1, x.dtype), {}),
    ]  # fmt: skip
    for func, args, kwargs in doubtful:
        assert by_rule(func, args, kwargs, tensors_in(args)) is None, (func, args)
