"""Whatever the layout of their arguments: results lie in memory as capture says, by fake kernels or
by the real ones that it asks."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import roam
from newer import needs_2_15
from operators import op_db
from roam.program.ir import Ref, TensorMeta
from roam.tracing.fake_kernels import cache as fake_cache
from roam.tracing.fake_kernels.cache import FakeKernels, tensors_in
from roam.tracing.fake_kernels.meta_corrections import bytes_at_least, without_masked
from roam.tracing.fakes.fake_mode import new_mode
from training import assert_same_bits, tensors_and_numbers

functional = torch.nn.functional
EVERY = int(os.environ.get("ROAM_SWEEP_EVERY", "30"))
"""One of so many of PyTorch's own samples of operators is run; `make sweep` runs all."""
# Results of other layouts, and views that say that they are none, are capture's to treat.
APART = {torch.ops.aten._unsafe_view, torch.ops.aten.unsafe_split, torch.ops.aten._to_sparse}


class Sweep(TorchDispatchMode):
    """Holds what capture makes of each call against what the real kernel makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = FakeKernels(asks=True)
        self.differing: list[str] = []
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        is_plain = all(
            type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided
            for t in tensors
        )
        if not tensors or not is_plain or func.is_view or func._overloadpacket in APART:
            return func(*args, **kwargs)
        try:
            expected = self._captured(func, args, kwargs)
        except Exception:  # noqa: BLE001 - capture refuses it
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self.calls += 1
        for place, (told, real) in enumerate(zip(_listed(expected), _listed(result), strict=True)):
            if isinstance(real, torch.Tensor) and not any(real is tensor for tensor in tensors):
                size_bytes = max(
                    told.untyped_storage().nbytes(), bytes_at_least(func, tensors, place, told)
                )
                if (_laid(told), size_bytes) != (_laid(real), real.untyped_storage().nbytes()):
                    given = [(tuple(tensor.shape), tensor.stride()) for tensor in tensors]
                    self.differing.append(f"{func} of {given}: {_laid(told)} for {_laid(real)}")
        return result

    def _captured(self, func: Any, args: Any, kwargs: Any) -> Any:
        mode, slots = new_mode(), list[Any]()

        def entered(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            slots.append(mode.from_tensor(value.detach()))
            return slots[-1]

        given = pytree.tree_map(entered, (args, kwargs))
        numbers = itertools.count()
        recorded = pytree.tree_map(
            lambda v: Ref(next(numbers)) if isinstance(v, torch.Tensor) else v, given
        )
        signatures = [self.kernels.signature(_meta(fake), fake) for fake in slots]
        with mode:
            result = self.kernels.run(func, given, tensors_in(given), recorded, signatures)
        return without_masked(func, *given, result)


def _meta(fake: Any) -> TensorMeta:
    return TensorMeta(
        tuple(fake.shape), fake.stride(), fake.storage_offset(), fake.dtype, fake.fake_device, 0
    )


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _laid(tensor: torch.Tensor) -> tuple[Any, ...]:
    large = [
        (size, stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size != 1
    ]
    return (
        tuple(tensor.shape),
        tensor.dtype,
        (large, tensor.storage_offset()) if tensor.numel() else None,
    )


def _reversed(tensor: torch.Tensor) -> torch.Tensor:
    dims = tuple(range(tensor.dim()))[::-1]
    return tensor.permute(dims).contiguous().permute(dims)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "reversed": _reversed,
    "channels_last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() > 2 else t,
    "gaps": lambda t: torch.stack([t, t], -1)[..., 0] if t.dim() else t,
    "expanded": lambda t: t[:1].expand(t.shape) if t.dim() and len(t) else t,
}


def _mixtures(sample: Any) -> Iterator[Any]:
    """A sample's arguments with all tensors in each layout, and with the first or the others in
    it."""
    for layout, which in itertools.product(LAYOUTS.values(), ("all", "first", "others")):
        number = itertools.count()

        def laid(value: Any, layout: Any = layout, which: str = which, number: Any = number) -> Any:
            if (
                not isinstance(value, torch.Tensor)
                or value.layout is not torch.strided
                or value.numel() > 10_000
            ):
                return value
            is_first = next(number) == 0
            if (which == "first") != is_first and which != "all":
                return value
            return layout(value.detach()).requires_grad_(value.requires_grad)

        yield pytree.tree_map(laid, (sample.input, sample.args, sample.kwargs))


def _swept(op: Any, sweep: Sweep, most: int) -> None:
    samples = list(
        itertools.islice(
            op.sample_inputs(
                torch.get_default_device().type, torch.float32, requires_grad=op.supports_autograd
            ),
            60,
        )
    )
    for sample in samples[:: max(1, len(samples) // most)]:
        for input, args, kwargs in _mixtures(sample):
            try:
                with sweep:
                    _backward(op(input, *args, **kwargs))
            except (RuntimeError, IndexError, TypeError, ValueError):
                continue  # eager PyTorch does not take it in this layout


def _backward(result: Any) -> None:
    results = [
        t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if results:
        for ones in (
            [torch.ones_like(t) for t in results],
            [torch.ones((), dtype=t.dtype).expand(t.shape) for t in results],
        ):
            torch.autograd.backward(results, ones, retain_graph=True)


SWEPT = [op for op in op_db if torch.float32 in op.dtypes and "jiterator" not in op.name]
DIFFERING = [
    *(
        "nn.functional.mse_loss",
        "nn.functional.huber_loss",
        "nn.functional.smooth_l1_loss",
        "xlogy",
        "copysign",
    ),
    *(
        "nn.functional.binary_cross_entropy",
        "nn.functional.batch_norm",
        "native_batch_norm",
        "nn.functional.logsigmoid",
    ),
    *(
        "nn.functional.glu",
        "logaddexp",
        "select_scatter",
        "nn.functional.channel_shuffle",
        "nn.functional.embedding_bag",
    ),
    *(
        "nn.functional.conv2d",
        "nn.functional.conv_transpose2d",
        "nn.functional.linear",
        "baddbmm",
        "log_softmax",
    ),
    *("nn.functional.layer_norm", "nn.functional.unfold"),
]


class TestSweep:
    """PyTorch's samples of its operators, forward and backward."""

    @pytest.mark.sweep
    @pytest.mark.filterwarnings("ignore")
    def test_over_all_operators(self, one_thread: None) -> None:
        sweep = Sweep()
        for op in SWEPT[::EVERY]:
            _swept(op, sweep, most=2 if EVERY > 1 else 6)
        assert sweep.calls > 200
        assert not sweep.differing

    @pytest.mark.sweep
    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("name", DIFFERING)
    def test_where_fake_kernels_lay_out_otherwise_or_are_trusted(
        self, name: str, one_thread: None
    ) -> None:
        sweep = Sweep()
        for op in (op for op in SWEPT if op.name == name):
            _swept(op, sweep, most=3)
        assert sweep.calls > 20
        assert not sweep.differing


TURNED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "elements": lambda x, index: x.flatten()[index.t()],
    "rows": lambda x, index: x[index.t()],
    "columns": lambda x, index: x[:, index.t()],
    "apart": lambda x, index: x.view(6, 2, 3)[index.t(), :, index.t() % 3],
    "with another index": lambda x, index: x[index.t(), torch.arange(3)[:, None]],
}


@pytest.mark.parametrize("select", TURNED.values(), ids=TURNED)
def test_of_what_a_transposed_index_selects(
    select: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    weight, index = torch.nn.Parameter(torch.randn(6, 6)), torch.randint(6, (4, 3))

    def step(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        selected = select(weight * 2, index)
        selected.square().sum().backward()
        return selected.detach(), selected.detach() + 1

    for one, other in zip(roam.compile(step)(index), step(index), strict=True):
        assert_same_bits(one, other)
        assert one.stride() == other.stride()


def permuted(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 3, 1)


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": functional.mse_loss,
    "mse, unreduced": lambda x, y: functional.mse_loss(permuted(x), permuted(y).contiguous(), reduction="none"),
    "smooth l1": lambda x, y: functional.smooth_l1_loss(permuted(x), permuted(y).contiguous()),
    "huber": lambda x, y: functional.huber_loss(permuted(x), permuted(y).contiguous(), delta=0.3),
    "cross entropy": lambda x, y: functional.binary_cross_entropy(permuted(x.sigmoid()), permuted(y).contiguous(), reduction="none"),
    "a slice": lambda x, y: functional.smooth_l1_loss(permuted(x)[..., :2], permuted(y).contiguous()[..., :2], reduction="none"),
    "hinge": lambda x, y: functional.soft_margin_loss(permuted(x), y.round().permute(0, 2, 3, 1).contiguous()),
    "mixtures": lambda x, y: torch.logaddexp(permuted(x), permuted(y).contiguous()[0, :1]) + torch.xlogy(y, x.abs() + 1).sum(),
    "padded": lambda x, y: functional.pad(x, (1, 1, 1, 1), mode="reflect") * functional.pad(y, (1, 1, 1, 1), mode="replicate"),
    "resized": lambda x, y: functional.interpolate(x, scale_factor=2, mode="bilinear") - functional.interpolate(y, (16, 16), mode="nearest"),
    "pooled": lambda x, y: functional.adaptive_avg_pool2d(x, 3) * functional.max_pool2d(y, 3, 2),
    "sampled": lambda x, y: functional.grid_sample(x, permuted(y)[..., :2].tanh(), align_corners=False),
    "shuffled": lambda x, y: functional.pixel_shuffle(functional.channel_shuffle(x, 2), 2) + functional.pixel_unshuffle(y, 2).mean(),
    "unfolded": lambda x, y: functional.fold(functional.unfold(x, 3, padding=1), (8, 8), 3, padding=1) * y,
    "normed": lambda x, y: functional.layer_norm(permuted(x), (4,)) * functional.instance_norm(y).movedim(1, -1),
    "distances": lambda x, y: torch.cdist(x.flatten(2).transpose(1, 2), y.flatten(2).transpose(1, 2)),
    "mse of other targets": lambda x, y: functional.mse_loss(x.bfloat16(), y) + functional.smooth_l1_loss(x.half(), y),
    "attention": lambda x, y: functional.scaled_dot_product_attention(permuted(x), permuted(y), permuted(x)),
}  # fmt: skip


class TestSteps:
    """Losses of a channels-last model's result, which is not laid out as its targets are."""

    @pytest.mark.parametrize(
        "name",
        [
            # An older PyTorch runs no backward pass of these, eagerly neither.
            pytest.param(name, marks=needs_2_15) if name == "mse of other targets" else name
            for name in LOSSES
        ],
    )
    @pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
    def test_by_plan(self, name: str, memory_format: torch.memory_format) -> None:
        def script(wrap: Callable[..., Any]) -> list[Any]:
            model = torch.nn.Conv2d(3, 4, 3, padding=1).to(memory_format=memory_format)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

            @wrap
            def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                loss = LOSSES[name](model(x.to(memory_format=memory_format)), y).square().sum()
                loss.backward()
                optimizer.step()
                return loss

            batches = [(torch.randn(2, 3, 8, 8), torch.rand(2, 4, 8, 8)) for _ in range(2)]
            return [[step(*batch) for batch in batches], model.state_dict(), optimizer.state_dict()]

        outcomes = []
        for wrap in (lambda step: step, functools.partial(roam.compile, pool=True, poison=True)):
            torch.manual_seed(0)
            outcomes.append(tensors_and_numbers(script(wrap)))
        assert_same_bits(*outcomes)

    def test_windows_and_constants_that_are_no_numbers(self) -> None:
        """The kernel of a periodic window makes one element more than it returns, and NaN is not
        equal to itself."""

        def script(wrap: Callable[..., Any]) -> list[Any]:
            weight = torch.nn.Parameter(torch.randn(6))

            @wrap
            def step(x: torch.Tensor) -> Any:
                weight.grad = None
                for window in (
                    torch.hann_window,
                    torch.hamming_window,
                    torch.bartlett_window,
                    torch.kaiser_window,
                ):
                    x = x * window(6) + window(6, periodic=False).flip(0)
                x = (
                    torch.where(x > 0.1, x * weight, float("nan"))
                    * torch.tensor([1.0, float("nan")])[:1]
                )
                x.nansum().backward()
                return x.detach(), weight.grad, float("nan")

            return [step(torch.randn(3, 6)) for _ in range(3)]

        outcomes = []
        for wrap in (lambda step: step, roam.compile, functools.partial(roam.compile, pool=False)):
            torch.manual_seed(0)
            outcomes.append(tensors_and_numbers(script(wrap)))
        assert_same_bits(*outcomes[:2])
        assert_same_bits(*outcomes[1:])

    def test_asks_each_kernel_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []
        ask = fake_cache.on_zeros
        monkeypatch.setattr(
            fake_cache, "on_zeros", lambda func, *rest: (asked.append(func), ask(func, *rest))[1]
        )
        monkeypatch.setattr(fake_cache, "_asked", {})
        x, y = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), torch.rand(2, 4, 8, 8)
        model = torch.nn.Conv2d(3, 4, 3, padding=1)

        def step(x, y):
            functional.mse_loss(model(x), y).backward()

        roam.compile(step)(x, y)
        assert asked.count(torch.ops.aten.mse_loss_backward.default) == 1
        asked.clear()
        roam.compile(lambda x, y: step(x, y))(x, y)
        assert not asked

    def test_capture_alone_runs_no_kernel_and_says_so(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fake_cache, "_asked", {})
        monkeypatch.setattr(fake_cache, "on_zeros", None)
        model = torch.nn.Conv2d(3, 4, 3, padding=1)
        x, y = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), torch.rand(2, 4, 8, 8)

        def step(x, y):
            functional.mse_loss(model(x), y).backward()

        notes = dict(roam.capture(step, x, y).notes)
        assert "aten.mse_loss_backward.default" in notes["guessed"]
        assert "guessed" not in dict(roam.capture(step, torch.randn(2, 3, 8, 8), y).notes)

    def test_of_an_operator_of_ones_own_with_a_wrong_fake_kernel(self) -> None:
        @torch.library.custom_op("roam_layouts::turned", mutates_args=())
        def turned(x: torch.Tensor) -> torch.Tensor:
            return x.t().contiguous().t()

        turned.register_fake(torch.empty_like)

        @roam.compile
        def step(x):
            return turned(x) * 2

        with pytest.raises(roam.ExecutionError, match="register_fake") as caught:
            step(torch.randn(3, 4))
        assert caught.value.code == "differs_from_capture"
