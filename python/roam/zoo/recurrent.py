"""A recurrent language model, unrolled: after Zaremba, Sutskever and Vinyals, "Recurrent Neural
Network Regularization" (arXiv 1409.2329), the medium model. Its LSTM cells (Hochreiter and
Schmidhuber, 1997) are written out, so that the step consists of many small operators, one cell
after another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

DROPOUT = 0.5


class LongShortTerm(nn.Module):
    """One step of a layer: an input and two states, all [batch, width], to the two next states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.from_input = nn.Linear(width, 4 * width)
        self.from_state = nn.Linear(width, 4 * width)

    def forward(
        self, features: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the class."""
        admit, forget, change, emit = (self.from_input(features) + self.from_state(hidden)).chunk(
            4, dim=1
        )
        cell = forget.sigmoid() * cell + admit.sigmoid() * change.tanh()
        return emit.sigmoid() * cell.tanh(), cell


class Recurrent(nn.Module):
    """Tokens [batch, seq] to scores [batch, seq, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LongShortTerm(width) for _ in range(layers))
        self.score = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """See the class."""
        embedded = F.dropout(self.tokens(tokens), DROPOUT, self.training)
        zeros = embedded.new_zeros(embedded.shape[0], embedded.shape[2])
        states = [(zeros, zeros) for _ in self.layers]
        outputs = []
        for features in embedded.unbind(1):
            for number, layer in enumerate(self.layers):
                states[number] = layer(features, *states[number])
                features = F.dropout(states[number][0], DROPOUT, self.training)
            outputs.append(features)
        scores: torch.Tensor = self.score(torch.stack(outputs, dim=1))
        return scores


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> torch.Tensor:
    """Train once on tokens [batch, seq]; returns the mean cross-entropy of the next token."""
    optimizer.zero_grad()
    scores = model(tokens)
    loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss


def build(
    *, batch: int, seq: int, vocabulary: int = 10000, width: int = 650, layers: int = 2
) -> tuple[nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """Make the published medium model (two layers of 650 units, 10 000 words) by default."""
    return (
        Recurrent(vocabulary, width, layers),
        train_step,
        (torch.randint(vocabulary, (batch, seq)),),
    )
