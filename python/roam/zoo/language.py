"""Language models of transformers, from configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

_ARCHITECTURES = {
    "bert": (transformers.BertConfig, transformers.BertForMaskedLM),
    "roberta": (transformers.RobertaConfig, transformers.RobertaForMaskedLM),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mamba": (transformers.MambaConfig, transformers.MambaForCausalLM),
}


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """Train once on tokens [batch, seq] with labels of the same shape; returns the mean
    cross-entropy, a scalar.

    A causal model is given its own tokens as labels and shifts them itself.
    """
    optimizer.zero_grad()
    loss: torch.Tensor = model(input_ids=tokens, labels=labels).loss
    loss.backward()
    optimizer.step()
    return loss


def build(
    *, architecture: str, config: dict[str, Any], batch: int, seq: int
) -> tuple[torch.nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """Make the architecture with its published settings, except for those in ``config``."""
    make_config, make_model = _ARCHITECTURES[architecture]
    settings = make_config(**config)
    # A training step keeps no keys and values for later tokens; they would be outputs of the model.
    settings.use_cache = False
    model = make_model(settings)
    if architecture == "gpt2":
        # GPT2LMHeadModel's own name does not tell the library which loss it takes; without this it
        # warns.
        model.loss_type = "ForCausalLM"
    tokens = torch.randint(settings.vocab_size, (batch, seq))
    # What a masked model must fill in is drawn apart from what it sees.
    masked = architecture in ("bert", "roberta")
    labels = torch.randint(settings.vocab_size, (batch, seq)) if masked else tokens
    return model, train_step, (tokens, labels)
