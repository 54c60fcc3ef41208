"""The zoo: published sizes, batches as asked, steps that train, and refusals."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import roam
from roam import zoo
from roam.zoo.moe import CAPACITY_FACTOR, TOP, Experts
from roam.zoo.recurrent import LongShortTerm
from roam.zoo.wired import NEIGHBOURS, small_world

# As published with the architectures: torchvision's weight metadata, the models' own cards. Tied
# weights count once.
PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg11": 132_863_336,
    "vgg16": 138_357_544,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "mnasnet0_5": 2_218_512,
    "mobilenet_v2": 3_504_872,
    "efficientnet_b0": 5_288_548,
    "darts": 4_718_752,
    "vit_b_16": 86_567_656,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "roberta-base": 124_697_433,
    "llama-1b": 1_235_814_400,
}
PAPER = {
    "alexnet",
    "vgg11",
    "mnasnet0_5",
    "mobilenet_v2",
    "efficientnet_b0",
    "vit_b_16",
    "roberta-base",
    "gpt2-xl",
}
TINY = ("bert-tiny", "gpt2-tiny", "llama-tiny", "moe-tiny", "lstm-tiny")


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_papers_models_are_there() -> None:
    assert set(zoo.names()) >= PAPER
    assert len(set(zoo.names())) == len(zoo.names())


def test_importing_the_zoo_loads_no_framework() -> None:
    code = "import sys, roam.zoo; print(sorted({'torch', 'torchvision', 'transformers', 'mip'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.sweep
@pytest.mark.parametrize("name", zoo.names())
def test_every_model_makes_one_step_without_memory(name: str) -> None:
    with roam.fake("cpu"):
        made = zoo.build(name, batch=2)
        loss = made.train_step(made.model, made.optimizer, *made.batch)
    assert made.model.training
    assert all(
        isinstance(tensor, FakeTensor) for tensor in (*made.model.parameters(), *made.batch, loss)
    )
    assert loss.shape == ()
    assert all(tensor.shape[0] == 2 for tensor in made.batch)
    assert all(
        parameter.grad is not None
        for parameter in made.model.parameters()
        if parameter.requires_grad
    )
    assert all(group["foreach"] is False for group in made.optimizer.param_groups)
    assert all(group.get("fused") is False for group in made.optimizer.param_groups)
    if name in PARAMETERS:
        assert count(made.model) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["resnet18", *TINY])
def test_bfloat16(name: str) -> None:
    with roam.fake("cpu"):
        made = zoo.build(name, dtype="bfloat16")
    floats = [
        tensor for tensor in (*made.model.parameters(), *made.batch) if tensor.is_floating_point()
    ]
    assert {tensor.dtype for tensor in floats} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", TINY)
def test_sequence_length(name: str) -> None:
    with roam.fake("cpu"):
        made = zoo.build(name, batch=3, seq=7)
    assert all(tensor.shape == (3, 7) for tensor in made.batch)


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", zoo.OPTIMIZERS)
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_learn_their_batch(name: str, optimizer: str) -> None:
    torch.manual_seed(0)
    made = zoo.build(name, batch=2, seq=16, optimizer=optimizer)
    # Plain descent at the zoo's rate is slow; dropout makes single losses noisy.
    for group in made.optimizer.param_groups:
        group["lr"] *= 10 if optimizer == "sgd" else 1
    losses = [made.train_step(made.model, made.optimizer, *made.batch).item() for _ in range(30)]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_gradients_are_clipped_before_the_update() -> None:
    torch.manual_seed(0)
    made = zoo.build("lstm-tiny", batch=2, seq=8, optimizer="sgd", clip=0.1)
    norms = []
    made.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.nn.utils.get_total_norm([p.grad for p in made.model.parameters()]))
    )  # fmt: skip
    made.train_step(made.model, made.optimizer, *made.batch)
    assert norms[0].item() == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("tokens", [1, 5, 24])
def test_experts_equal_a_loop_over_tokens(tokens: int) -> None:
    torch.manual_seed(tokens)
    experts, width = 4, 8
    layer = Experts(width, experts)
    features = torch.randn(1, tokens, width) + 0.5
    with torch.no_grad():
        layer.router.weight[0] = 1.0  # Most tokens want the first expert, more than it takes.
    result, balance = layer(features)

    shares = layer.router(features[0]).softmax(dim=-1)
    gates, chosen = shares.topk(TOP, dim=-1)
    gates = gates / gates.sum(dim=-1, keepdim=True)
    capacity = max(1, int(CAPACITY_FACTOR * TOP * tokens / experts))
    seated = [0] * experts
    expected = torch.zeros(tokens, width)
    for choice in range(TOP):
        for token in range(tokens):
            expert = int(chosen[token, choice])
            if seated[expert] < capacity:
                hidden = torch.nn.functional.gelu(features[0, token] @ layer.widen[expert])
                expected[token] += gates[token, choice] * (hidden @ layer.narrow[expert])
            seated[expert] += 1
    torch.testing.assert_close(result[0], expected)

    load = torch.bincount(chosen[:, 0], minlength=experts) / tokens
    torch.testing.assert_close(balance, experts * (load * shares.mean(dim=0)).sum())
    if tokens == 24:
        assert max(seated) > capacity  # Some tokens were dropped.


@pytest.mark.parametrize("seed", range(20))
def test_random_wirings_are_acyclic_and_keep_their_links(seed: int) -> None:
    before = small_world(32, random.Random(seed))
    assert sum(len(links) for links in before) == 32 * NEIGHBOURS // 2
    assert all(source < node for node, links in enumerate(before) for source in links)
    assert all(len(set(links)) == len(links) for links in before)
    assert (
        before == small_world(32, random.Random(seed)) != small_world(32, random.Random(seed + 1))
    )


def test_written_out_cells_equal_torchs_lstm() -> None:
    torch.manual_seed(0)
    cell = LongShortTerm(8)
    reference = torch.nn.LSTMCell(8, 8)
    with torch.no_grad():
        # PyTorch has the gates in the same sequence: in, forget, cell, out.
        reference.weight_ih.copy_(cell.from_input.weight)
        reference.bias_ih.copy_(cell.from_input.bias)
        reference.weight_hh.copy_(cell.from_state.weight)
        reference.bias_hh.copy_(cell.from_state.bias)
    features, hidden, memory = torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(
        cell(features, hidden, memory), reference(features, (hidden, memory))
    )


@pytest.mark.parametrize("name", ["randwire-tiny", "darts-tiny"])
def test_irregular_networks_train_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    made = zoo.build(name, batch=2, optimizer="sgd")
    before = [parameter.detach().clone() for parameter in made.model.parameters()]
    assert made.train_step(made.model, made.optimizer, *made.batch).isfinite()
    # The loss of a batch-normalized network does not depend on some scales at first.
    moved = [not torch.equal(*both) for both in zip(before, made.model.parameters(), strict=True)]
    assert sum(moved) > 0.9 * len(moved)
    assert all(parameter.grad is not None for parameter in made.model.parameters())


def test_initial_values_of_real_models_stay_truncated() -> None:
    made = zoo.build("vit_b_16")
    weight = made.model.conv_proj.weight
    assert isinstance(weight, torch.nn.Parameter)
    assert 0 < weight.abs().max() <= 2
    assert weight.std() > 0
    assert torch.nn.init.trunc_normal_(torch.empty(4096)).abs().max() <= 2


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("gpt3", {}, "no model 'gpt3'"),
        ("alexnet", {"seq": 12}, "no sequence length"),
        ("gpt2-xl", {"seq": 1025}, "2 to 1024 tokens, not 1025"),
        ("gpt2", {"seq": 1}, "2 to 1024 tokens, not 1"),
        ("gpt2", {"batch": 0}, "at least 1, not 0"),
        ("gpt2", {"batch": 9 * 10**18}, "at most 1099511627776, not 9000000000000000000"),
        ("gpt2", {"dtype": "float64"}, "float32, bfloat16"),
        ("gpt2", {"optimizer": "lion"}, "not 'lion'"),
        ("gpt2", {"clip": 0.0}, "above 0, not 0.0"),
    ],
)
def test_impossible_settings_are_refused(
    name: str, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(zoo.ZooError, match=words):
        zoo.build(name, **settings)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(zoo.ZooError, match=r"gpt2-tiny needs transformers.*roam-torch\[zoo\]"):
        zoo.build("gpt2-tiny")


def test_the_default_dtype_survives_a_failure() -> None:
    with pytest.raises(RuntimeError, match="nonsense"):
        zoo.build("moe-tiny", dtype="bfloat16", device="nonsense")
    assert torch.get_default_dtype() == torch.float32
