"""Steps whose random tensors are made again have eager's bits: losses, parameters, optimizer state
and the generator's state after every step."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import roam
from replays import all_again, at_random, planning
from roam.program.lower import Lowering
from roam.program.replay import Replay
from roam.runtime import strategy
from training import assert_same_bits, tensors_and_numbers

functional = nn.functional
WIDTH, ROWS = 32, 1024


class Blocks(nn.Module):
    """Linear layers with something random after each."""

    def __init__(self, random: Callable[..., Tensor], *given: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.random, self.given = random, given

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.random(torch.tanh(layer(x)), *self.given)
        return x


class Checkpointed(Blocks):
    """The same, each layer recomputed by the user's own checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(functional.dropout)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:

            def block(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return self.random(torch.tanh(layer(x)), 0.2)

            x = checkpoint(block, x.requires_grad_(), use_reentrant=self.reentrant)
        return x


class Attention(nn.Module):
    """Masks of the attention's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x.view(4, -1, WIDTH)
            parts = [
                part.view(4, -1, 2, WIDTH // 2).transpose(1, 2) for part in layer(x).chunk(3, -1)
            ]
            x = functional.scaled_dot_product_attention(*parts, dropout_p=0.1)
            x = x.transpose(1, 2).reshape(4, -1, WIDTH)
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=3, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.view(-1, 8, WIDTH))[0]


class Variational(nn.Module):
    """The reparameterization trick."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, logarithm = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logarithm)
        penalty = (mean.square() + logarithm.exp() - 1 - logarithm).mean()
        return torch.relu(self.decoder(z)) + penalty


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.2, batch_first=True)
    return nn.Sequential(nn.Unflatten(0, (4, -1)), nn.TransformerEncoder(layer, 2))


class Alone(nn.Module):
    """Attention as a module of its own, whose weights are dropped and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 4, WIDTH)
        return self.attention(x, x, x, need_weights=True)[0]


def of_channels(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """Something random that drops whole channels, of which there are many."""

    def random(x: Tensor) -> Tensor:
        return function(x.view(-1, WIDTH, 1, 1).expand(-1, -1, 2, 2), 0.2).sum((2, 3))

    return random


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return functional.dropout(x, 0.3)


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        y = x * torch.rand_like(x)
    return functional.dropout(y, 0.3)


def noisy(x: Tensor) -> Tensor:
    """Draws that leave one of a pair of normal numbers for the next."""
    extra = torch.randn(3)
    return x * torch.rand(x.shape) + torch.randn(x.shape) + extra.sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "dropout": (lambda: Blocks(functional.dropout, 0.2), {"aten.bernoulli_.float"}),
    "dropout in place": (
        lambda: Blocks(lambda x: functional.dropout(x * 1, 0.2, inplace=True)),
        {"aten.bernoulli_.float"},
    ),
    "dropout2d": (lambda: Blocks(of_channels(functional.dropout2d)), {"aten.bernoulli_.float"}),
    "feature alpha dropout": (
        lambda: Blocks(of_channels(lambda x, p: functional.feature_alpha_dropout(x, p, True))),
        {"aten.bernoulli_.float"},
    ),
    "alpha dropout": (
        lambda: Blocks(lambda x: functional.alpha_dropout(x, 0.2, True)), {"aten.bernoulli_.float"},
    ),
    "gumbel softmax": (lambda: Blocks(functional.gumbel_softmax), {"aten.exponential_.default"}),
    "noise": (lambda: Blocks(noisy), {"aten.rand.default", "aten.randn.default"}),
    "stochastic depth": (
        lambda: Blocks(
            lambda x: torchvision.ops.stochastic_depth(
                x.view(-1, 1), 0.3, "row"
            ).view_as(x)
        ),
        {"aten.bernoulli_.float"},
    ),
    "rrelu": (
        lambda: Blocks(lambda x: functional.dropout(functional.rrelu(x, training=True), 0.1)),
        {"aten.bernoulli_.float"},
    ),
    "native dropout": (
        lambda: Blocks(lambda x: torch.native_dropout(x, 0.2, True)[0]),
        {"aten.native_dropout.default"},
    ),
    "reseeding": (lambda: Blocks(seeded), {"aten.bernoulli_.float"}),
    "forked": (lambda: Blocks(forked), {"aten.bernoulli_.float", "aten.rand_like.default"}),
    "checkpoint": (lambda: Checkpointed(False), {"aten.bernoulli_.float"}),
    "reentrant checkpoint": (lambda: Checkpointed(True), {"aten.bernoulli_.float"}),
    "attention": (Attention, {"aten.bernoulli_.float"}),
    "multihead attention": (Alone, {"aten.bernoulli_.float"}),
    "transformer": (transformer, {"aten.bernoulli_.float"}),
    "lstm": (Recurrent, {"aten.bernoulli_.float"}),
    "variational": (Variational, {"aten.randn_like.default"}),
}  # fmt: skip


def training(model: nn.Module, wrap: Callable[[Any], Any]) -> list[Any]:
    """Five steps with AdamW and clipping; all that they leave after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(5)

    @wrap
    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    left: list[Any] = []
    for _ in range(5):
        loss = step(model, optimizer, torch.randn(ROWS, WIDTH, generator=generator))
        states = loss, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()
        left += tensors_and_numbers(states)
    return left


def replayed(step: roam.Step) -> Counter[str]:
    """The random operators that run again in a step's latest plan."""
    program = step._captures[0].runners[-1].choice.program
    return Counter(call.name for call in program.calls if isinstance(call.target, Replay))


@functools.cache
def eager(name: str) -> list[Any]:
    return by(name, lambda step: step)


def by(name: str, wrap: Callable[[Any], Any]) -> list[Any]:
    torch.manual_seed(0)
    return training(MODELS[name][0](), wrap)


@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
def test_random_tensors_that_are_made_again_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MODELS[name][1] <= set(compared(name, True, all_again, monkeypatch))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["dropout", "noise", "forked", "checkpoint", "attention"])
def test_so_are_those_that_are_made_again_often(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = functools.partial(at_random, seed=4, share=0.2)
    assert max(compared(name, False, sequence, monkeypatch).values()) > 1


def compared(
    name: str,
    pool: bool,
    sequence_of: Callable[[Lowering], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> Counter[str]:
    """What runs again in a step by a sequence, which has been found to have eager's bits."""
    used = planning(monkeypatch, sequence_of)
    steps: list[roam.Step] = []

    def wrap(step: Any) -> Any:
        steps.append(roam.compile(step, pool=pool, poison=pool, memory=1))
        return steps[-1]

    assert_same_bits(eager(name), by(name, wrap))
    assert used
    return replayed(steps[0])


LIMITS = {
    "dropout": 55, "dropout2d": 65, "gumbel softmax": 65, "noise": 80, "native dropout": 80, "checkpoint": 80,
    "attention": 45, "lstm": 45, "variational": 79,
}  # fmt: skip
"""Per cent of what the step takes without recomputation: so little that random tensors have to be
made again."""


@pytest.mark.sweep
@pytest.mark.parametrize("name", LIMITS)
def test_a_budget_is_kept_by_making_random_tensors_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By the cost model alone, so that the plan is the same on every machine.
    monkeypatch.setattr(strategy, "times", lambda *_, **__: {})
    steps: list[roam.Step] = []

    def wrap(step: Any) -> Any:
        steps.append(roam.compile(step, memory=f"{LIMITS[name]}%"))
        return steps[-1]

    assert_same_bits(eager(name), by(name, wrap))
    assert replayed(steps[0]).keys() & MODELS[name][1]
    memory = steps[0].memory()
    assert memory.limit_bytes is not None
    assert memory.total_bytes <= memory.limit_bytes


def test_generators_of_the_users_own_are_replayed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    planning(monkeypatch, all_again)
    outcomes = []
    steps: list[roam.Step] = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]

        def step(model, optimizer, one, other, x):
            optimizer.zero_grad()
            for layer in model:
                x = torch.tanh(layer(x))
                x = x * torch.empty_like(x).bernoulli_(0.7, generator=one)
                x = x + torch.empty_like(x).normal_(generator=other) * x
                x = functional.dropout(x, 0.1)
            loss = x.square().mean()
            loss.backward()
            optimizer.step()
            return loss

        if is_planned:
            steps.append(roam.compile(step, memory=1))
        left: list[Any] = []
        for _ in range(4):
            run = steps[0] if is_planned else step
            loss = run(model, optimizer, *generators, torch.ones(ROWS, WIDTH))
            states = [generator.get_state() for generator in (*generators, torch.default_generator)]
            left += tensors_and_numbers(loss, model.state_dict(), states)
        outcomes.append(left)
    assert_same_bits(*outcomes)
    assert replayed(steps[0]) == {"aten.bernoulli_.float": 8, "aten.normal_.default": 4}


def gpt2() -> tuple[nn.Module, Tensor]:
    """With dropout of 0.1 everywhere, which is its default."""
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=97, n_positions=64, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(0, 97, (8, 64), generator=torch.Generator().manual_seed(3))
    return transformers.GPT2LMHeadModel(config).train(), tokens


def test_gpt2_with_every_mask_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    planning(monkeypatch, all_again)
    outcomes = []
    steps: list[roam.Step] = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model, tokens = gpt2()
        optimizer = torch.optim.AdamW(model.parameters())

        def step(model, optimizer, tokens):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        if is_planned:
            steps.append(roam.compile(step, memory=1))
        left: list[Any] = []
        for _ in range(5):
            loss = (steps[0] if is_planned else step)(model, optimizer, tokens)
            states = model.state_dict(), optimizer.state_dict(), torch.get_rng_state()
            left += tensors_and_numbers(loss, states)
        outcomes.append(left)
    assert_same_bits(*outcomes)
    assert replayed(steps[0]) == {"aten.bernoulli_.float": 7}  # embeddings, and 3 a layer
    steps[0].measured(model, optimizer, tokens)
    memory = steps[0].memory()
    assert memory.measured_bytes == pytest.approx(memory.total_bytes, rel=0.01)
