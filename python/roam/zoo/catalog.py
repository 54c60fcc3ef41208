"""The list of the zoo's models, and how one becomes a training step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from roam.errors import RoamError

if TYPE_CHECKING:
    import torch

    from roam._core import Graph
    from roam.tracing.step import Variant

DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum")
DEFAULT_SEQ = 512
_MOST_SAMPLES = 2**40
"""The bytes of so many samples can be counted with 63 bits."""


class ZooError(RoamError, ValueError):
    """A model, a size or an optimizer that the zoo does not have, or a library that it needs and
    cannot import.
    """


@dataclass(frozen=True)
class ZooStep:
    """One training step, ready for ``roam.capture(step.train_step, step.model, step.optimizer,
    *step.batch)``.
    """

    train_step: Callable[..., torch.Tensor]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    ``family`` names the module of this package that builds it, ``max_seq`` is its longest sequence
    in tokens (``None`` if the model sees images), ``arguments`` are what that module's ``build`` is
    given to make this model of the family.
    """

    name: str
    summary: str
    family: str
    requires: str | None = None
    max_seq: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def default_seq(self) -> int | None:
        """Tokens of a sequence if the caller names no number."""
        return None if self.max_seq is None else min(DEFAULT_SEQ, self.max_seq)


def _image(name: str, function: str, summary: str, size: int = 224, **options: Any) -> Entry:
    arguments = {"function": function, "size": size, "options": options}
    return Entry(name, f"{summary}, 3x{size}x{size}", "vision", "torchvision", None, arguments)


def _text(name: str, architecture: str, summary: str, max_seq: int, **config: Any) -> Entry:
    return Entry(
        name,
        summary,
        "language",
        "transformers",
        max_seq,
        {"architecture": architecture, "config": config},
    )


_TINY_WIRED = {"width": 8, "nodes": 8}
_TINY_CELLS = {"width": 4, "cells": 3}
_TINY_RECURRENT = {"vocabulary": 512, "width": 32}

_ENTRIES = (
    _image("alexnet", "alexnet", "AlexNet"),
    _image("vgg11", "vgg11", "VGG-11"),
    _image("vgg16", "vgg16", "VGG-16"),
    _image("resnet18", "resnet18", "ResNet-18"),
    _image("resnet50", "resnet50", "ResNet-50"),
    _image("mnasnet0_5", "mnasnet0_5", "MNASNet 0.5"),
    _image("mobilenet_v2", "mobilenet_v2", "MobileNetV2"),
    _image("efficientnet_b0", "efficientnet_b0", "EfficientNet-B0"),
    # The auxiliary head normalizes over one value per channel at batch 1, which PyTorch refuses to
    # train.
    _image(
        "inception_v3",
        "inception_v3",
        "Inception v3 without its auxiliary head",
        299,
        aux_logits=False,
        init_weights=True,
    ),
    _image("vit_b_16", "vit_b_16", "ViT-B/16"),
    Entry("unet", "U-Net for segmentation, 3x224x224, 31 M parameters", "unet"),
    Entry("randwire", "Randomly wired network, 3x224x224, three stages of 32 nodes", "wired"),
    Entry("darts", "Network of searched cells (DARTS V2), 3x224x224", "cells"),
    _text("bert-base", "bert", "BERT base, masked language model", 512),
    _text(
        "roberta-base",
        "roberta",
        "RoBERTa base, masked language model",
        512,
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
    ),
    _text("gpt2", "gpt2", "GPT-2 small, causal language model", 1024),
    _text(
        "gpt2-medium",
        "gpt2",
        "GPT-2 medium, causal language model",
        1024,
        n_embd=1024,
        n_layer=24,
        n_head=16,
    ),
    _text(
        "gpt2-large",
        "gpt2",
        "GPT-2 large, causal language model",
        1024,
        n_embd=1280,
        n_layer=36,
        n_head=20,
    ),
    _text(
        "gpt2-xl",
        "gpt2",
        "GPT-2 XL, causal language model",
        1024,
        n_embd=1600,
        n_layer=48,
        n_head=25,
    ),
    _text(
        "llama-1b",
        "llama",
        "Llama-like decoder, 1.2 B parameters, grouped queries",
        8192,
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    Entry("lstm", "Unrolled LSTM of 2 layers and 650 units, language model", "recurrent", None, 35),
    Entry(
        "moe",
        "Decoder with 8 experts in every second layer, top 2 with a fixed capacity",
        "moe",
        None,
        1024,
    ),
    Entry(
        "randwire-tiny",
        "Randomly wired network of 8 nodes a stage, for tests",
        "wired",
        arguments=_TINY_WIRED,
    ),
    Entry("darts-tiny", "Network of 3 searched cells, for tests", "cells", arguments=_TINY_CELLS),
    Entry(
        "lstm-tiny", "Unrolled LSTM of 2 layers, for tests", "recurrent", None, 24, _TINY_RECURRENT
    ),
    _text(
        "bert-tiny",
        "bert",
        "BERT of 2 layers, for tests",
        128,
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=128,
    ),
    _text(
        "gpt2-tiny",
        "gpt2",
        "GPT-2 of 2 layers, for tests",
        128,
        vocab_size=512,
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=128,
        bos_token_id=None,
        eos_token_id=None,
    ),
    _text(
        "llama-tiny",
        "llama",
        "Llama-like decoder of 2 layers, for tests",
        128,
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    ),
    Entry(
        "moe-tiny",
        "Mixture of experts of 2 layers, for tests",
        "moe",
        None,
        128,
        {"vocabulary": 512, "width": 64, "layers": 2, "heads": 2, "experts": 4},
    ),
)

_BY_NAME: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def names() -> tuple[str, ...]:
    """Names that :func:`build` takes."""
    return tuple(_BY_NAME)


def entry(name: str) -> Entry:
    """One model of the zoo.

    Raises:
        ZooError: there is none of that name.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ZooError(f"the zoo has no model {name!r}; it has {', '.join(_BY_NAME)}") from None


def entries() -> tuple[Entry, ...]:
    """What the zoo has, in the order of :func:`names`."""
    return _ENTRIES


def check(
    name: str,
    *,
    batch: int,
    seq: int | None,
    dtype: str,
    optimizer: str,
    clip: float | None = None,
) -> dict[str, int]:
    """Check what :func:`build` is asked for, without importing torch; returns the sizes of the
    model's batch.

    Raises:
        ZooError: unknown or impossible settings.
    """
    chosen = entry(name)
    if batch < 1:
        raise ZooError(f"batch must be at least 1, not {batch}")
    if batch > _MOST_SAMPLES:
        raise ZooError(f"batch must be at most {_MOST_SAMPLES}, not {batch}")
    if dtype not in DTYPES:
        raise ZooError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if optimizer not in OPTIMIZERS:
        raise ZooError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, not {optimizer!r}")
    if clip is not None and not clip > 0:
        raise ZooError(f"clip must be above 0, not {clip}")
    sizes = {"batch": batch}
    if chosen.max_seq is None:
        if seq is not None:
            raise ZooError(f"{name} sees images and has no sequence length")
    else:
        sizes["seq"] = min(DEFAULT_SEQ, chosen.max_seq) if seq is None else seq
        # A causal loss compares each token with the one before it.
        if not 2 <= sizes["seq"] <= chosen.max_seq:
            raise ZooError(
                f"{name} takes sequences of 2 to {chosen.max_seq} tokens, not {sizes['seq']}"
            )
    return sizes


def capture(
    name: str,
    *,
    step: Literal["first", "steady"] = "steady",
    device: str = "cpu",
    random_states: bool = False,
    **settings: Any,
) -> Graph:
    """Build a model on fake tensors and capture one training step of it; nothing is allocated.

    Args:
        name: one of :func:`names`.
        step: ``first``, which makes the optimizer's state, or ``steady``.
        device: where the step would run.
        random_states: as for :func:`roam.capture`.
        settings: the other arguments of :func:`build`.

    Raises:
        ZooError: as from :func:`build`.
        CaptureError: the step cannot be captured.
    """
    import roam

    made = _fake(name, device, settings)
    objects = made.model, made.optimizer, *made.batch
    return roam.capture(made.train_step, *objects, step=step, random_states=random_states)


def capture_variant(
    name: str, *, step: Literal["first", "steady"] = "steady", device: str = "cpu", **settings: Any
) -> Variant:
    """As :func:`capture`, with the program that the graph is of."""
    from roam.tracing.step import capture_variant

    made = _fake(name, device, settings)
    return capture_variant(made.train_step, (made.model, made.optimizer, *made.batch), {}, step)


def _fake(name: str, device: str, settings: Mapping[str, Any]) -> ZooStep:
    import roam

    with roam.fake(device):
        return build(name, device=device, **settings)


def build(
    name: str,
    *,
    batch: int = 1,
    seq: int | None = None,
    dtype: str = "float32",
    optimizer: str = "adamw",
    clip: float | None = None,
    device: str = "cpu",
    spread: Callable[[Any, Any], tuple[Any, Any]] | None = None,
) -> ZooStep:
    """Build a model in training mode, its optimizer, one batch of random data and the step that
    trains it.

    Everything is made under whatever mode is active: inside ``with roam.fake(device):`` nothing is
    allocated.

    Args:
        name: one of :func:`names`.
        batch: samples in the batch.
        seq: tokens in a sequence; the smaller of 512 and the model's longest if ``None``. Text
            models only.
        dtype: ``float32`` or ``bfloat16``, of parameters, buffers and images.
        optimizer: ``adamw``, ``adam``, ``sgd`` (without momentum) or ``sgd-momentum``, in
            single-tensor form.
        clip: the most that the norm of all gradients together may have; if ``None``, gradients are
            not clipped.
        device: where the tensors are made.
        spread: a function that takes the model and the step, and returns them as one rank of
            several has them.

    Raises:
        ZooError: unknown or impossible settings, or the model's library is not installed.
    """
    sizes = check(name, batch=batch, seq=seq, dtype=dtype, optimizer=optimizer, clip=clip)
    chosen = entry(name)
    if chosen.requires is not None:
        try:
            importlib.import_module(chosen.requires)
        except ImportError as error:
            raise ZooError(
                f"{name} needs {chosen.requires}, which cannot be imported ({error}); pip install 'roam-torch[zoo]'"
            ) from error

    import torch

    from roam.zoo.optimizers import make_optimizer

    family = importlib.import_module(f"roam.zoo.{chosen.family}")
    # Under fake tensors a finished module cannot be converted (``Module.to`` swaps parameters), so
    # it is made in its dtype.
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model, train_step, data = family.build(**chosen.arguments, **sizes)
    finally:
        torch.set_default_dtype(before)
    model.train()
    if spread is not None:
        model, train_step = spread(model, train_step)
    return ZooStep(train_step, model, make_optimizer(optimizer, model, clip), data)
