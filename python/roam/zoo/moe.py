"""A decoder with a mixture of experts, all of whose shapes are known before the step runs.

Routing follows Lepikhin et al., "GShard" (ICLR 2021), algorithm 1: each token goes to its ``TOP``
best experts, each expert takes at most ``capacity`` tokens, and what exceeds that is dropped (the
residual connection carries it on). Dispatch and combination are products with a [tokens, experts,
capacity] tensor, so no shape depends on the data. The loss that balances the experts is that of
Fedus, Zoph and Shazeer, "Switch Transformers" (JMLR 2022), equation 4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

TOP = 2
CAPACITY_FACTOR = 1.25
BALANCE_WEIGHT = 0.01


class Attention(nn.Module):
    """Causal self-attention on [batch, seq, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """See the class."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.project(features).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return result


class Dense(nn.Module):
    """The usual feed-forward layer on [batch, seq, width]; its balance loss is zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the class."""
        return self.layers(features), features.new_zeros(())


class Experts(nn.Module):
    """``experts`` feed-forward layers on [batch, seq, width], and the loss that balances them."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(width, experts, bias=False)
        self.widen = nn.Parameter(torch.randn(experts, width, 4 * width) * 0.02)
        self.narrow = nn.Parameter(torch.randn(experts, 4 * width, width) * 0.02)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the class."""
        tokens = features.flatten(0, 1)
        capacity = max(1, int(CAPACITY_FACTOR * TOP * tokens.shape[0] / self.experts))
        shares = self.router(tokens).softmax(dim=-1)
        gates, chosen = shares.topk(TOP, dim=-1)
        gates = gates / gates.sum(dim=-1, keepdim=True)

        # Every first choice is placed before any second one: rows are (choice, token).
        numbers = torch.arange(self.experts, device=tokens.device)
        wanted = chosen.t().reshape(-1, 1) == numbers
        place = ((wanted.cumsum(dim=0) - 1) * wanted).sum(dim=-1)
        slots = torch.arange(capacity, device=tokens.device)
        # A place beyond the capacity equals no slot: the token is dropped.
        seats = wanted.unsqueeze(-1) & (place.unsqueeze(-1) == slots).unsqueeze(1)
        seats = seats.unflatten(0, (TOP, -1)).to(tokens.dtype)

        inbox = torch.einsum("tec,td->ecd", seats.sum(dim=0), tokens)
        outbox = torch.bmm(F.gelu(torch.bmm(inbox, self.widen)), self.narrow)
        weighted = torch.einsum("ktec,tk->tec", seats, gates)
        result = torch.einsum("tec,ecd->td", weighted, outbox)

        load = (chosen[:, :1] == numbers).to(shares.dtype).mean(dim=0)
        balance = self.experts * (load * shares.mean(dim=0)).sum()
        return result.view_as(features), balance


class Block(nn.Module):
    """Attention, then ``feed``, each behind a normalization and beside a residual connection."""

    def __init__(self, width: int, heads: int, feed: nn.Module) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.before_feed = nn.LayerNorm(width)
        self.feed = feed

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the class."""
        features = features + self.attention(self.before_attention(features))
        change, balance = self.feed(self.before_feed(features))
        return features + change, balance


class MixtureOfExperts(nn.Module):
    """Tokens [batch, seq] to scores [batch, seq, vocabulary] and the sum of the experts' balance
    losses.
    """

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, experts: int, max_seq: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(max_seq, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, Experts(width, experts) if layer % 2 else Dense(width))
            for layer in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, vocabulary, bias=False)
        self.score.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the class."""
        features = self.tokens(tokens) + self.places(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        total = features.new_zeros(())
        for block in self.blocks:
            features, balance = block(features)
            total = total + balance
        return self.score(self.norm(features)), total


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> torch.Tensor:
    """Train once on tokens [batch, seq]; returns the cross-entropy of the next token plus the
    weighted balance loss.
    """
    optimizer.zero_grad()
    scores, balance = model(tokens)
    loss: torch.Tensor = F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss = loss + BALANCE_WEIGHT * balance
    loss.backward()
    optimizer.step()
    return loss


def build(
    *,
    batch: int,
    seq: int,
    vocabulary: int = 32000,
    width: int = 768,
    layers: int = 12,
    heads: int = 12,
    experts: int = 8,
) -> tuple[nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """Make a model of GPT-2's width and depth by default, with experts in every second layer."""
    model = MixtureOfExperts(vocabulary, width, layers, heads, experts, max_seq=1024)
    return model, train_step, (torch.randint(vocabulary, (batch, seq)),)
