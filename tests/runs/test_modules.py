"""PyTorch's own modules and losses, in any layout and precision: each trains bit by bit, or is
refused."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import roam
from newer import needs_2_15
from steps import Block, Script, images, refused, same_by_plan, train
from sweeps import EVERY
from training import assert_same_bits, tensors_and_numbers

functional = torch.nn.functional


LAYOUTS: dict[str, Callable[..., torch.Tensor]] = {
    "contiguous": torch.rand,
    "channels last": lambda *shape: torch.rand(shape).to(memory_format=torch.channels_last),
    "batch inside": lambda n, c, *sizes: torch.rand(c, n, *sizes).transpose(0, 1),
    "columns first": lambda n, c, h, w: torch.rand(n, c, w, h).transpose(2, 3),
    "expanded": lambda n, c, h, w: torch.rand(n, c, 1, 1).expand(n, c, h, w),
}


class Laid(torch.nn.Module):
    """A batch norm of an input in one layout, whose output's gradient comes in another."""

    def __init__(self, weight: torch.Tensor, *, training: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.norm = torch.nn.BatchNorm2d(8).train(training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.weight) * x).sum()


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [(5, 6), (1, 1)], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["evaluated", "trained"])
@pytest.mark.parametrize("inside", [name for name in LAYOUTS if name != "expanded"])
def test_batch_norm_of_any_layout(inside: str, training: bool, sizes: tuple[int, ...]) -> None:
    def script(wrap: Callable[[Any], Any]) -> list[Any]:
        models = [Laid(LAYOUTS[inside](2, 8, *sizes), training=training) for _ in LAYOUTS]
        batches = [layout(2, 8, *sizes) for layout in LAYOUTS.values()]
        return [
            train(model, wrap, [x, x], Laid.forward)
            for model, x in zip(models, batches, strict=True)
        ]

    same_by_plan(script)


class TestCumulativeAverages:
    """Statistics with `momentum=None`: their factor, 1 / batches so far, is another at each call,
    and a number."""

    def layers(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4, momentum=None), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8, momentum=None),
        )  # fmt: skip

    @pytest.mark.auto
    @needs_2_15
    @pytest.mark.parametrize("form", ["plain", "checkpointed", "autocast", "frozen"])
    def test_are_calculated_beside_the_plan(self, form: str) -> None:
        """Also where their number is set back, as `reset_running_stats` does."""
        outcomes = []
        for wrap in (lambda step: step, roam.compile):
            torch.manual_seed(0)
            model = self.layers()
            if form == "frozen":
                model[1].eval()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)

            def run(x, model=model, form=form):
                if form == "checkpointed":
                    return torch.utils.checkpoint.checkpoint_sequential(
                        model, 2, x, use_reentrant=False
                    )
                with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
                    return model(x)

            def train_step(x, model=model, optimizer=optimizer, run=run):
                optimizer.zero_grad()
                loss = run(x).float().exp().mean()
                loss.backward()
                optimizer.step()
                return loss

            step = wrap(train_step)
            losses = []
            for index, x in enumerate(images(8, 4, 3, 6, 6)):
                if index == 5:
                    model[5].reset_running_stats()
                losses.append(step(x))
            outcomes.append(tensors_and_numbers(losses, model.state_dict()))
        assert_same_bits(*outcomes)
        assert step.runs_beside

    def test_are_refused(self) -> None:
        step = roam.compile(self.layers())
        with pytest.raises(roam.CaptureError) as caught:
            step(torch.ones(4, 3, 6, 6))
        assert caught.value.code == "value_reached_python"

    @pytest.mark.auto
    @needs_2_15
    def test_a_factor_of_the_users_own(self) -> None:
        def script(wrap):
            class Averaging(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.mean, self.variance = torch.zeros(4), torch.ones(4)
                    self.scale = torch.nn.Parameter(torch.ones(4))
                    self.count = 0

                def forward(self, x):
                    self.count += 1
                    return functional.batch_norm(
                        x, self.mean, self.variance, self.scale, None, True, 2 / (self.count + 1)
                    )

            model = Averaging()
            losses = train(model, wrap, images(5, 3, 4), lambda model, x: model(x).exp().mean())
            return [losses, model.mean, model.variance]

        same_by_plan(script)


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "padded": {"padding_idx": 2},
    "renormed": {"max_norm": 0.5},
    "by_frequency": {"scale_grad_by_freq": True},
}


class TestEmbeddings:
    @staticmethod
    def script(kind: str, options: dict[str, Any]) -> Script:
        def script(wrap):
            generator = torch.Generator().manual_seed(1)
            batches = [torch.randint(0, 10, (3, 4), generator=generator) for _ in range(3)]
            return train(getattr(torch.nn, kind)(10, 6, **options), wrap, batches)

        return script

    @pytest.mark.parametrize("form", EMBEDDINGS)
    def test_train(self, form: str) -> None:
        same_by_plan(self.script("Embedding", EMBEDDINGS[form]))

    @pytest.mark.parametrize("mode", ["sum", "mean", "max"])
    def test_in_bags(self, mode: str) -> None:
        same_by_plan(self.script("EmbeddingBag", {"mode": mode}))

    @pytest.mark.parametrize("form", EMBEDDINGS)
    def test_in_bags_of_all_forms(self, form: str) -> None:
        same_by_plan(self.script("EmbeddingBag", EMBEDDINGS[form]))

    @pytest.mark.parametrize("is_scaled", [True, False])
    @pytest.mark.parametrize("padding", [None, 1])
    def test_bags_in_bfloat16(self, padding: int | None, is_scaled: bool) -> None:
        def step(bags, indices, offsets, scale):
            loss = bags(indices, offsets, scale if is_scaled else None).float().square().sum()
            loss.backward()
            return loss

        bags = torch.nn.EmbeddingBag(9, 4, mode="sum", padding_idx=padding).bfloat16()
        indices, scale = torch.tensor([1, 5, 1, 8]), torch.rand(4).bfloat16()
        assert roam.compare(step, bags, indices, torch.tensor([0, 2]), scale).equal

    @pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
    def test_with_sparse_gradients_are_refused(self, kind: str) -> None:
        with pytest.raises(roam.CaptureError, match="sparse") as caught:
            self.script(kind, {"sparse": True})(roam.compile)
        assert caught.value.code == "layout"


def _probabilities(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(4, 3, generator=generator)


def _labels(*labels: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.tensor(labels)


LOSSES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[torch.Generator], torch.Tensor]]] = {
    "ignored": (functional.cross_entropy, _labels(-100, 1, 2, 0)),
    "all_ignored": (functional.cross_entropy, _labels(-100, -100, -100, -100)),
    "smoothed": (
        lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1, ignore_index=1),
        _labels(0, 1, 2, 1),
    ),
    "smoothed_and_weighted": (
        lambda x, y: functional.cross_entropy(
            x,
            y,
            label_smoothing=0.1,
            weight=torch.tensor([1.0, 2, 3]),
            ignore_index=1,
            reduction="sum",
        ),
        _labels(0, 1, 2, 1),
    ),
    "of_probabilities": (functional.cross_entropy, _probabilities),
    "unreduced": (
        lambda x, y: functional.cross_entropy(x, y, reduction="none").mean(),
        _labels(0, 1, 2, 1),
    ),
    "likelihood": (
        lambda x, y: functional.nll_loss(x.log_softmax(-1), y, ignore_index=0),
        _labels(0, 1, 2, 1),
    ),
    "divergence": (
        lambda x, y: functional.kl_div(x.log_softmax(-1), y, reduction="batchmean"),
        _probabilities,
    ),
    "binary": (
        lambda x, y: functional.binary_cross_entropy_with_logits(
            x, y, pos_weight=torch.ones(3) * 2
        ),
        _probabilities,
    ),
    "margins": (functional.multi_margin_loss, _labels(0, 1, 2, 1)),
    "huber": (functional.huber_loss, _probabilities),
    "gumbel": (
        lambda x, y: (functional.gumbel_softmax(x, hard=True) * x * y).sum(),
        _probabilities,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_train(name: str) -> None:
    loss, target = LOSSES[name]

    def script(wrap):
        generator = torch.Generator().manual_seed(1)
        batches = [(torch.randn(4, 6, generator=generator), target(generator)) for _ in range(3)]
        return train(
            torch.nn.Linear(6, 3),
            wrap,
            batches,
            lambda model, batch: loss(model(batch[0]), batch[1]),
        )

    same_by_plan(script)


class TestBranchesThatFakesHide:
    """PyTorch asks some tensors for values inside a composite operator, and fakes go another
    way."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", ["max", "min", "median", "nanmedian"])
    def test_of_a_gradient_spread_over_equal_elements(self, name: str, dtype: torch.dtype) -> None:
        def loss_of(model, x):
            out = model(x).to(dtype)
            ties = torch.stack([out, out]).transpose(0, 2)
            return (-getattr(ties, name)() - getattr(out.relu(), name)() + out.sum() * 0.1).float()

        same_by_plan(lambda wrap: train(Block(), wrap, images(), loss_of))

    def test_of_the_zeros_around_a_gradient(self) -> None:
        def step(x):
            x = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(-x.max(), x)
            return gradient

        compiled = roam.compile(step)
        for x in (torch.randn(3, 4), torch.full((3, 4), math.nan), torch.zeros(3, 4)):
            for step_of in (step, compiled):
                assert not torch.signbit(step_of(x)[step_of(x) == 0]).any()
            assert torch.equal(step(x).nan_to_num(), compiled(x).nan_to_num())

    def test_not_of_its_own_gradient(self) -> None:
        def step(model, x):
            (gradient,) = torch.autograd.grad(
                model(x).max().square(), next(iter(model.parameters())), create_graph=True
            )
            gradient.square().sum().backward()

        error = refused(step, Block(), torch.randn(4, 6))
        assert error.code == "hidden_branch"
        assert "amax" in str(error)

    def test_but_not_where_there_is_no_gradient(self) -> None:
        same_by_plan(
            lambda wrap: train(
                Block(), wrap, images(), lambda model, x: model(x / x.max()).square().mean()
            )
        )

    def test_of_what_fills_a_mask(self) -> None:
        def step(model, x, mask, value):
            loss = model(x).masked_fill(mask, value).square().sum()
            loss.backward()
            return loss

        def by_where(model, x, mask, value):
            loss = torch.where(mask, value, model(x)).square().sum()
            loss.backward()
            return loss

        mask, value = torch.rand(4, 6) > 0.5, torch.nn.Parameter(torch.tensor(0.3))
        error = refused(step, Block(), torch.randn(4, 6), mask, value)
        assert error.code == "hidden_branch"
        assert "torch.where" in str(error)
        for function, filled in ((step, value.detach()), (by_where, value)):
            assert roam.compare(function, Block(), torch.randn(4, 6), mask, filled).equal

    @pytest.mark.parametrize("is_module", [True, False])
    def test_of_a_mean_over_weights_of_targets(self, is_module: bool) -> None:
        weight = torch.rand(6)

        def step(model, x, y):
            if is_module:
                loss = torch.nn.CrossEntropyLoss(weight, label_smoothing=0.1)(model(x), y)
            else:
                loss = functional.cross_entropy(model(x), y, weight, label_smoothing=0.1)
            loss.backward()
            return loss

        assert (
            refused(step, Block(), torch.randn(4, 6), torch.tensor([0, 1, -100, 5])).code
            == "hidden_branch"
        )
        step = roam.compile(step)
        model, x = Block().eval(), torch.randn(4, 6)
        expected = functional.cross_entropy(model(x), torch.arange(4), weight, label_smoothing=0.1)
        assert torch.equal(step(model, x, torch.arange(4)), expected)
        with pytest.raises(roam.CaptureError, match="reduction='sum'"):
            step(model, x, torch.tensor([0, 1, -100, 5]))


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        parts = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.enter(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(*parts, **options)


ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "dropped": {"dropout_p": 0.3},
    "masked": {"attn_mask": torch.ones(5, 5).tril().bool()},
    "biased": {"attn_mask": torch.linspace(-1, 1, 25).view(5, 5)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ATTENTIONS)
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_trains(backend: SDPBackend, form: str, dtype: torch.dtype) -> None:
    if form == "dropped" and backend is SDPBackend.FLASH_ATTENTION:
        pytest.skip("it has no dropout on the CPU")

    def loss_of(model, x):
        with sdpa_kernel(backend):
            return model(x, **ATTENTIONS[form]).float().square().mean()

    same_by_plan(
        lambda wrap: train(
            Attention().to(dtype), wrap, [x.to(dtype) for x in images(3, 2, 5, 8)], loss_of
        )
    )


class Convolving(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.relu(self.norm(self.first(x))).mean((2, 3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_pure", [True, False])
def test_low_precision_trains(dtype: torch.dtype, is_pure: bool) -> None:
    def loss_of(model, x):
        with torch.autocast("cpu", dtype, enabled=not is_pure):
            return model(x).float().square().mean()

    def script(wrap):
        batches = images(3, 2, 3, 6, 6)
        if is_pure:
            return train(Convolving().to(dtype), wrap, [x.to(dtype) for x in batches], loss_of)
        return train(Convolving(), wrap, batches, loss_of)

    same_by_plan(script)


_MOST_INPUTS = 2
_REFUSED_MODULES = {"nn.GaussianNLLLoss": "value_reached_python"}
"""Modules some of whose inputs are refused, by which code. What is not here trains bit by bit."""


def _module_cases() -> list[Any]:
    """(module, mode, sample) of PyTorch's own database of modules: a few samples of each."""
    cases = []
    for info in module_db:
        for is_training in (True, False) if info.train_and_eval_differ else (True,):
            torch.manual_seed(0)
            samples = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=False, training=is_training
            )
            samples = [sample for sample in samples if sample.forward_input is not None]
            step = max(1, len(samples) // _MOST_INPUTS)
            cases += [(info, is_training, sample) for sample in samples[::step]]
    return cases


def _train_module(
    wrap: Callable[[Any], Any], info: Any, is_training: bool, sample: Any
) -> list[Any]:
    """Three steps of SGD; the inputs are scaled by a parameter of their own, so that each module
    has a gradient."""
    torch.manual_seed(0)
    module = info.module_cls(
        *sample.constructor_input.args, **sample.constructor_input.kwargs
    ).train(is_training)
    scale = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*module.parameters(), scale], lr=0.01, momentum=0.9)

    @wrap
    def step(module, optimizer, args, kwargs):
        optimizer.zero_grad()
        args = pytree.tree_map_only(
            torch.Tensor, lambda x: x * scale if x.is_floating_point() else x, args
        )
        results = [
            x for x in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(x, torch.Tensor)
        ]
        results = [
            x.abs() if x.is_complex() else x
            for x in results
            if x.is_floating_point() or x.is_complex()
        ]
        loss = torch.stack([result.square().sum() for result in results]).sum()
        loss.backward()
        optimizer.step()
        return loss

    copied = functools.partial(pytree.tree_map_only, torch.Tensor, lambda x: x.detach().clone())
    args, kwargs = copied(sample.forward_input.args), copied(sample.forward_input.kwargs)
    losses = [step(module, optimizer, args, kwargs) for _ in range(3)]
    return tensors_and_numbers(
        losses, module.state_dict(), scale, optimizer.state_dict(), torch.get_rng_state()
    )


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_every_module_of_pytorchs_trains_or_is_refused() -> None:
    counts: collections.Counter[str] = collections.Counter()
    refusals = set()
    for case in itertools.islice(_module_cases(), 0, None, EVERY):
        try:
            eager = _train_module(lambda step: step, *case)
        except (RuntimeError, ValueError):
            counts["not run by eager PyTorch"] += 1
            continue
        try:
            planned = _train_module(functools.partial(roam.compile, pool=True, poison=True), *case)
        except roam.CaptureError as error:
            counts[f"refused: {error.code}"] += 1
            refusals.add((case[0].name, error.code))
            continue
        assert_same_bits(eager, planned)
        counts["bit for bit"] += 1
    print(dict(counts), sorted(refusals))
    lazy = {
        (info.name, "uninitialized_parameter")
        for info in module_db
        if info.name.startswith("nn.Lazy")
    }
    assert refusals <= lazy | set(_REFUSED_MODULES.items())
    assert counts["bit for bit"] >= 270 // EVERY


@pytest.mark.parametrize("stride", [1, 3])
def test_patches_are_taken_apart_and_put_together(stride: int) -> None:
    """These kernels keep as much memory as the larger side needs, whatever their result fills."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.rand(1, 2, 9, 9))

        def forward(self, x: Any) -> Any:
            patches = functional.unfold(x * self.scale, 3, stride=stride)
            return functional.fold(patches.tanh(), (9, 9), 3, stride=stride)

    def script(wrap: Any) -> Any:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        @wrap
        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return [[step(torch.randn(2, 2, 9, 9)) for _ in range(3)], net.state_dict()]

    same_by_plan(script)
