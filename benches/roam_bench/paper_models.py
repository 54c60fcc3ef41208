"""The training steps whose figures Shu et al. published (arXiv 2310.19295), as near as the figures
themselves allow to tell.

All train with Adam (rate 0.1, weight decay 1e-4). Images are 3x224x224 and labels zero. Language
models are bare transformers that see zeros, 4 tokens (RoBERTa, without its pooler) or 1024 (GPT-2
XL) a sample, and no dropout; the sum of the last hidden states stands for a loss.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

import roam
from roam.zoo import ZooStep

_CLASSES = 1000
_ROBERTA_TOKENS = 4
_GPT2_TOKENS = 1024


def capture(model: str, batch: int) -> roam.Graph:
    """The first step of one of the published rows, as PyTorch runs it on the CPU.

    Args:
        model: as in the published table.
        batch: samples.
    """
    with roam.fake("cpu"):
        step = _language(model, batch) if model in _LANGUAGE else _images(model, batch)
    return roam.capture(step.train_step, step.model, step.optimizer, *step.batch, step="first")


def _adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        model.parameters(), lr=0.1, weight_decay=1e-4, foreach=False, fused=False
    )


def _train_images(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def _train_text(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(tokens).last_hidden_state.sum()
    loss.backward()
    optimizer.step()
    return loss


def _images(name: str, batch: int) -> ZooStep:
    from roam.zoo.vision import build

    model, _, (images, labels) = build(function=name, size=224, options={}, batch=batch)
    for module in model.modules():
        attention = getattr(module, "self_attention", None)
        if isinstance(attention, torch.nn.MultiheadAttention):
            module.self_attention = CopyingAttention(attention)
    model.train()
    return ZooStep(_train_images, model, _adam(model), (images, torch.zeros_like(labels)))


class CopyingAttention(torch.nn.Module):
    """`torch.nn.MultiheadAttention` by the kernels of the PyTorch releases before 2.0: queries,
    keys and values are copied out of their common projection, which dies, and scores and weights
    are tensors.

    Takes and gives [batch, tokens, width]; the second result is what callers of the original expect
    there.
    """

    def __init__(self, original: torch.nn.MultiheadAttention) -> None:
        super().__init__()
        self.original = original

    def forward(
        self, query: torch.Tensor, *others: torch.Tensor, need_weights: bool = False
    ) -> tuple[Any, None]:
        """Self-attention: ``others`` are ``query`` again."""
        heads = self.original.num_heads
        batch, tokens, width = query.shape
        projected = F.linear(
            query.transpose(0, 1), self.original.in_proj_weight, self.original.in_proj_bias
        )
        q, k, v = (
            part.contiguous().view(tokens, batch * heads, width // heads).transpose(0, 1)
            for part in projected.chunk(3, dim=-1)
        )
        weights = torch.bmm(q / math.sqrt(width // heads), k.transpose(1, 2)).softmax(dim=-1)
        mixed = torch.bmm(weights, v).transpose(0, 1).contiguous().view(tokens * batch, width)
        out = F.linear(mixed, self.original.out_proj.weight, self.original.out_proj.bias)
        return out.view(tokens, batch, width).transpose(0, 1), None


def _roberta() -> torch.nn.Module:
    import transformers

    config = transformers.RobertaConfig(
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
        attn_implementation="eager",
        use_cache=False,
    )
    model: torch.nn.Module = transformers.RobertaModel(config, add_pooling_layer=False)
    return model


def _gpt2_xl() -> torch.nn.Module:
    import transformers

    config = transformers.GPT2Config(
        n_embd=1600, n_layer=48, n_head=25, attn_implementation="eager", use_cache=False
    )
    model: torch.nn.Module = transformers.GPT2Model(config)
    return model


_LANGUAGE = {"roberta-base": (_roberta, _ROBERTA_TOKENS), "gpt2-xl": (_gpt2_xl, _GPT2_TOKENS)}


def _language(name: str, batch: int) -> ZooStep:
    make, tokens = _LANGUAGE[name]
    model = make().eval()
    return ZooStep(
        _train_text, model, _adam(model), (torch.zeros(batch, tokens, dtype=torch.long),)
    )
