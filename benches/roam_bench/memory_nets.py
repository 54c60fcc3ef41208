"""The networks of `roam bench memory`: each in a large size, which is planned on fake tensors, and
in a small one that trains on a CPU within seconds. In both, activations are most of the peak.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

import roam
from roam.tracing.step import Variant, capture_variant
from roam.zoo import ZooStep
from roam.zoo.optimizers import make_optimizer

CLIP_NORM = 1.0
"""To which small nets' gradients are clipped."""
_SEED = 0


@dataclass(frozen=True, slots=True, eq=False)
class Net:
    """One network.

    Attributes:
        name: in tables, and of the files of graphs.
        kind: what it is an example of.
        family: the module of `roam.zoo` that builds it.
        arguments: what its `build` takes for the large size.
        small: what it takes instead or besides for the small one.
        blocks: paths of the lists of modules that `torch.utils.checkpoint` runs again one by one.
        is_chain: whether the modules of each list run one after another, on one tensor.
    """

    name: str
    kind: Literal["convolutional", "transformer", "recurrent", "state space", "experts", "searched"]
    family: str
    arguments: Mapping[str, Any]
    small: Mapping[str, Any]
    blocks: tuple[str, ...] = ()
    is_chain: bool = True


def _image(function: str, *, small_batch: int = 8, **small_options: Any) -> dict[str, Any]:
    return {
        "family": "vision",
        "arguments": {"function": function, "size": 224, "options": {}, "batch": 32},
        "small": {"size": 64, "batch": small_batch, "options": small_options},
    }


def _text(architecture: str, small: Mapping[str, Any], **config: Any) -> dict[str, Any]:
    arguments = {"architecture": architecture, "config": config, "batch": 8, "seq": 512}
    return {
        "family": "language",
        "arguments": arguments,
        "small": {"config": {**config, **small}, "batch": 4, "seq": 128},
    }


_SMALL_TEXT = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4}
_SMALL_HEADS = {"num_attention_heads": 4, "intermediate_size": 512}

NETS = (
    Net("resnet50", "convolutional", **_image("resnet50", small_batch=24, width_per_group=16), blocks=("layer1", "layer2", "layer3", "layer4")),
    Net("mobilenet_v2", "convolutional", **_image("mobilenet_v2", small_batch=12), blocks=("features",)),
    Net("densenet121", "convolutional", **_image("densenet121"), blocks=("features",)),
    Net(
        "unet",
        "convolutional",
        "unet",
        {"batch": 8},
        {"batch": 1, "width": 8},
        blocks=("down", "merge"),
        is_chain=False,
    ),
    Net(
        "gpt2",
        "transformer",
        **_text(
            "gpt2",
            {"vocab_size": 512, "n_embd": 128, "n_layer": 4, "n_head": 4, "bos_token_id": None,
             "eos_token_id": None},
        ),
        blocks=("transformer.h",),
    ),
    Net(
        "bert-base",
        "transformer",
        **_text("bert", _SMALL_TEXT | _SMALL_HEADS),
        blocks=("bert.encoder.layer",),
    ),
    Net(
        "vit_b_16",
        "transformer",
        "vision",
        {"function": "vit_b_16", "size": 224, "options": {}, "batch": 32},
        {
            "function": "VisionTransformer",
            "size": 64,
            "batch": 8,
            "options": {
                "image_size": 64, "patch_size": 8, "num_layers": 4, "num_heads": 4, "hidden_dim": 128,
                "mlp_dim": 512, "dropout": 0.1,
            },
        },
        blocks=("encoder.layers",),
    ),
    Net(
        "llama",
        "transformer",
        **_text(
            "llama",
            _SMALL_TEXT | _SMALL_HEADS | {"num_key_value_heads": 2},
            vocab_size=16000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
            num_attention_heads=12, num_key_value_heads=4,
        ),
        blocks=("model.layers",),
    ),
    Net(
        "lstm",
        "recurrent",
        "recurrent",
        {"batch": 256, "seq": 35, "vocabulary": 1000},
        {"batch": 32, "seq": 24, "vocabulary": 128, "width": 64},
    ),
    Net(
        "mamba",
        "state space",
        "language",
        {
            "architecture": "mamba",
            "config": {"vocab_size": 8192, "hidden_size": 384, "num_hidden_layers": 8},
            "batch": 16,
            "seq": 64,
        },
        {
            "config": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 5},
            "batch": 4,
            "seq": 12,
        },
        blocks=("backbone.layers",),
    ),
    Net(
        "moe",
        "experts",
        "moe",
        {"batch": 8, "seq": 512},
        {"batch": 4, "seq": 64, "vocabulary": 512, "width": 128, "layers": 4, "heads": 4, "experts": 4},
        blocks=("blocks",),
        is_chain=False,
    ),
    Net("randwire", "searched", "wired", {"batch": 32}, {"batch": 6, "width": 16, "nodes": 12}, blocks=("features",)),
)  # fmt: skip

LARGE = tuple(
    Net(
        f"gpt2-xl, {layers} layers",
        "transformer",
        **_text("gpt2", {"n_layer": 2}, n_embd=1600, n_head=25, n_layer=layers),
        blocks=("transformer.h",),
    )
    for layers in (48, 263)
)
"""GPT-2 XL, and as many of its layers as make about 100,000 operators."""


def build(net: Net, *, small: bool = False) -> ZooStep:
    """A net, its optimizer (AdamW) and its step, on random data of a fixed seed.

    In the small size gradients are clipped by their global norm before each update.
    """
    torch.manual_seed(_SEED)
    family = importlib.import_module(f"roam.zoo.{net.family}")
    arguments = {**net.arguments, **net.small} if small else net.arguments
    model, train_step, batch = family.build(**arguments)
    model.train()
    optimizer = make_optimizer("adamw", model, CLIP_NORM if small else None)
    return ZooStep(train_step, model, optimizer, batch)


def capture(net: Net, *, small: bool = False) -> roam.Graph:
    """The graph of a later step, for limits; nothing is allocated."""
    return captured(net, small=small).graph_with_states


def captured(net: Net, *, small: bool = False) -> Variant:
    """The same, with the program that the graph is of."""
    with roam.fake():
        made = build(net, small=small)
    return capture_variant(made.train_step, (made.model, made.optimizer, *made.batch), {})
