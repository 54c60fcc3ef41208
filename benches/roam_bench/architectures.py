"""Architectures of well-known libraries in sizes that train in seconds, from configurations;
nothing is downloaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from roam.torch_compat.private import pytree

functional = torch.nn.functional
Sample = tuple[torch.nn.Module, dict[str, Any]]
"""A model and the keyword arguments of its `forward`."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture."""

    library: str
    name: str
    make: Callable[[], Sample]


def architectures() -> Iterator[Architecture]:
    """Those of the libraries that are installed: torchvision, transformers, timm, diffusers."""
    for library, made in (
        ("torchvision", _torchvision), ("transformers", _transformers), ("timm", _timm), ("diffusers", _diffusers)
    ):  # fmt: skip
        if importlib.util.find_spec(library) is not None:
            for name, make in made().items():
                yield Architecture(library, name, make)


def loss_of(output: Any) -> torch.Tensor:
    """What to train on: the model's own loss where it has one, else the mean square of all it
    returns that has a gradient.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.sum()
    leaves = [leaf for leaf in pytree.tree_leaves(_plain(output)) if isinstance(leaf, torch.Tensor)]
    terms = [
        leaf.float().square().mean()
        for leaf in leaves
        if leaf.requires_grad and leaf.is_floating_point()
    ]
    return torch.stack(terms).sum()


def _plain(output: Any) -> Any:
    """Libraries' output classes are dictionaries by another name."""
    to_tuple = getattr(output, "to_tuple", None)
    return to_tuple() if to_tuple is not None else output


def _images(size: int, *shape: int) -> torch.Tensor:
    return torch.randn(2, 3, *shape, size, size)


_IMAGE_SIZES = {"inception_v3": 96, "alexnet": 80, "squeezenet1_1": 80, "vit_b_16": 32}
_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": False},
    "inception_v3": {
        "init_weights": False,
        "aux_logits": False,
    },  # its other head needs images of 299
}
_CLASSIFIERS = [
    "alexnet",
    "vgg11",
    "vgg11_bn",
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "densenet121",
    "squeezenet1_1",
    "googlenet",
    "inception_v3",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "convnext_tiny",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "swin_t",
    "swin_v2_t",
]


def _torchvision() -> dict[str, Callable[[], Sample]]:
    import torchvision

    models = torchvision.models

    def classifier(name: str) -> Sample:
        size = _IMAGE_SIZES.get(name, 64)
        options = _OPTIONS.get(name, {})
        return getattr(models, name)(num_classes=7, **options), {"x": _images(size)}

    def vit() -> Sample:
        model = models.VisionTransformer(
            image_size=32,
            patch_size=8,
            num_layers=2,
            num_heads=4,
            hidden_dim=32,
            mlp_dim=64,
            dropout=0.1,
            num_classes=7,
        )
        return model, {"x": _images(32)}

    def maxvit() -> Sample:
        model = models.maxvit.MaxVit(
            input_size=(64, 64),
            stem_channels=16,
            partition_size=4,
            block_channels=[16, 32],
            block_layers=[1, 1],
            head_dim=8,
            stochastic_depth_prob=0.2,
            num_classes=7,
        )
        return model, {"x": _images(64)}

    def segmentation(name: str) -> Sample:
        model = getattr(models.segmentation, name)(num_classes=5, weights_backbone=None)
        return model, {"input" if name.startswith("lraspp") else "x": _images(64)}

    def video(name: str) -> Sample:
        return getattr(models.video, name)(num_classes=5), {"x": _images(32, 8)}

    found: dict[str, Callable[[], Sample]] = {
        name: partial(classifier, name) for name in _CLASSIFIERS
    }
    found |= {"vit": vit, "maxvit": maxvit}
    for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        found[name] = partial(segmentation, name)
    for name in ("r3d_18", "mc3_18", "r2plus1d_18"):
        found[name] = partial(video, name)
    return found


_SMALL: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_CAUSAL: dict[str, dict[str, Any]] = {
    "GPT2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64},
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "GPTJ": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "GPTNeoX": {},
    "GPTBigCode": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64},
    "Llama": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 16},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "Gemma": {"num_key_value_heads": 2, "head_dim": 8},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 8},
    "Phi": {},
    "Phi3": {"num_key_value_heads": 2},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Falcon": {},
    "StableLm": {"num_key_value_heads": 2},
    "Cohere": {"num_key_value_heads": 2},
    "Olmo": {"num_key_value_heads": 2},
    "Starcoder2": {"num_key_value_heads": 2},
    "Granite": {"num_key_value_heads": 2},
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "Mamba": {"state_size": 8},
    "CTRL": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "dff": 64},
    "Olmo2": {"num_key_value_heads": 2},
    "Glm": {"num_key_value_heads": 2, "head_dim": 8},
    "Nemotron": {"num_key_value_heads": 2},
    "Cohere2": {"num_key_value_heads": 2},
    "Qwen2Moe": {"num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32},
    "Persimmon": {},
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "expand": 2, "chunk_size": 8},
    "RecurrentGemma": {"num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 16},
    "Gemma3": {
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "SmolLM3": {"num_key_value_heads": 2},
    "Olmo3": {"num_key_value_heads": 2, "sliding_window": 16},
    "Qwen3Moe": {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "GptOss": {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "Lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "FalconH1": {"num_key_value_heads": 2, "head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "Ernie4_5": {"num_key_value_heads": 2, "head_dim": 8},
    "Exaone4": {"num_key_value_heads": 2, "sliding_window": 16, "sliding_window_pattern": 2},
    "Glm4": {"num_key_value_heads": 2, "head_dim": 8},
    "Helium": {"num_key_value_heads": 2, "head_dim": 8},
    "Arcee": {"num_key_value_heads": 2},
    "SeedOss": {"num_key_value_heads": 2, "head_dim": 8},
    "Apertus": {"num_key_value_heads": 2},
    "Ministral": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16},
    "BitNet": {"num_key_value_heads": 2},
    "ModernBertDecoder": {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 16},
    "DeepseekV3": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
    "BioGpt": {},
    "XGLM": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
}  # fmt: skip
_MASKED: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "Albert": {"embedding_size": 16},
    "Electra": {"embedding_size": 16},
    "Deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "MobileBert": {
        "embedding_size": 32,
        "intra_bottleneck_size": 32,
        "num_feedforward_networks": 2,
        "true_hidden_size": 32,
    },
    "MPNet": {},
    "Camembert": {},
    "ConvBert": {"embedding_size": 16, "head_ratio": 2, "conv_kernel_size": 3},
    "FNet": {},
    "SqueezeBert": {"embedding_size": 32},
    "RoFormer": {},
    "Ernie": {},
    "MegatronBert": {},
    "LayoutLM": {},
    "Nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 16},
    "Longformer": {"attention_window": 8},
    "BigBird": {"block_size": 4},
    "NomicBert": {},
    "EuroBert": {"num_key_value_heads": 4},
    "ModernBert": {"global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
}
_SEQ2SEQ: dict[str, dict[str, Any]] = {
    "T5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "Bart": {},
    "Pegasus": {},
    "Marian": {},
    "MBart": {},
    "BlenderbotSmall": {},
    "Blenderbot": {},
    "PLBart": {},
    "LED": {
        "attention_window": 8,
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    },
    "UMT5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
}
_ENCODER_DECODER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 1,
}  # fmt: skip
_TRANSFORMER = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_PICTURES: dict[str, dict[str, Any]] = {
    "ViT": {},
    "DeiT": {},
    "Dinov2": {},
    "Beit": {},
    "Swin": {
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
        "patch_size": 4,
    },
    "ConvNext": {
        "hidden_sizes": [8, 16, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_stages": 4,
        "patch_size": 4,
    },
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "MobileViT": {
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 24, 32, 32, 32],
        "num_attention_heads": 2,
    },
    "ViTMSN": {},
    "Data2VecVision": {},
    "ConvNextV2": {
        "hidden_sizes": [8, 16, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_stages": 4,
        "patch_size": 4,
    },
    "RegNet": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16, 16, 16],
        "depths": [1, 1, 1, 1],
        "groups_width": 8,
    },
    "PoolFormer": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
}


def _transformers() -> dict[str, Callable[[], Sample]]:
    import transformers

    def model_of(name: str, head: str, config: dict[str, Any]) -> torch.nn.Module:
        named = {"Gemma3": "Gemma3Text"}.get(name, name)  # the other is of images, too
        settings = getattr(transformers, f"{named}Config")(**config)
        settings.use_cache = False
        model: torch.nn.Module = getattr(transformers, f"{name}{head}")(settings)
        return model

    def text(name: str, head: str, config: dict[str, Any]) -> Sample:
        tokens = torch.randint(3, 99, (2, 16))
        return model_of(name, head, {**_SMALL, **config}), {"input_ids": tokens, "labels": tokens}

    def pictures(name: str, config: dict[str, Any]) -> Sample:
        sizes = {"image_size": 32, "patch_size": 8, "num_labels": 7}
        small = (
            {key: _SMALL[key] for key in _TRANSFORMER}
            if "depths" not in config and name != "MobileViT"
            else {}
        )
        model = model_of(name, "ForImageClassification", {**small, **sizes, **config})
        return model, {"pixel_values": _images(32), "labels": torch.tensor([1, 4])}

    def clip() -> Sample:
        vision = {"image_size": 32, "patch_size": 8, **_SMALL}
        model = transformers.CLIPModel(
            transformers.CLIPConfig(text_config=_SMALL, vision_config=vision, projection_dim=16)
        )
        return model, {
            "input_ids": torch.randint(3, 99, (2, 16)),
            "pixel_values": _images(32),
            "return_loss": True,
        }

    def whisper() -> Sample:
        config = {
            **_ENCODER_DECODER,
            **_SMALL,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
        }
        model = model_of("Whisper", "ForConditionalGeneration", config)
        return model, {
            "input_features": torch.randn(2, 8, 32),
            "labels": torch.randint(3, 99, (2, 8)),
        }

    def wav2vec2() -> Sample:
        convolutions = {
            "conv_dim": (16, 16),
            "conv_stride": (5, 4),
            "conv_kernel": (10, 8),
            "num_feat_extract_layers": 2,
        }
        config = {
            **_SMALL,
            **convolutions,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        }
        model = model_of("Wav2Vec2", "ForSequenceClassification", {**config, "mask_time_prob": 0.0})
        return model, {"input_values": torch.randn(2, 800), "labels": torch.tensor([0, 1])}

    found: dict[str, Callable[[], Sample]] = {}
    for name, config in _CAUSAL.items():
        head = {"GPT2": "LMHeadModel", "CTRL": "LMHeadModel"}.get(name, "ForCausalLM")
        found[name] = partial(text, name, head, config)
    found |= {name: partial(text, name, "ForMaskedLM", config) for name, config in _MASKED.items()}
    for name, config in _SEQ2SEQ.items():
        head = "MTModel" if name == "Marian" else "ForConditionalGeneration"
        found[name] = partial(text, name, head, {**_ENCODER_DECODER, **config})
    found |= {name: partial(pictures, name, config) for name, config in _PICTURES.items()}
    return found | {"CLIP": clip, "Whisper": whisper, "Wav2Vec2": wav2vec2}


_TIMM = [
    "resnet10t",
    "mobilenetv3_small_050",
    "efficientnet_lite0",
    "tf_efficientnetv2_b0",
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "mixer_s32_224",
    "convnext_atto",
    "convnextv2_atto",
    "regnetx_002",
    "ghostnet_050",
    "lcnet_035",
    "edgenext_xx_small",
    "poolformerv2_s12",
    "efficientformer_l1",
    "levit_128s",
    "xcit_nano_12_p16_224",
    "coat_tiny",
    "cait_xxs24_224",
    "nfnet_l0",
    "skresnet18",
    "seresnext26d_32x4d",
    "dla34",
    "hrnet_w18_small",
    "selecsls42b",
    "mobileone_s0",
    "repvgg_a0",
    "rexnet_100",
    "fbnetc_100",
    "spnasnet_100",
    "tinynet_e",
    "mobilevit_xxs",
    "mobilevitv2_050",
    "pit_ti_224",
    "crossvit_tiny_240",
    "convit_tiny",
    "visformer_tiny",
    "nest_tiny",
    "gmixer_24_224",
    "resmlp_12_224",
    "fastvit_t8",
    "repvit_m0_9",
    "efficientvit_b0",
    "efficientvit_m0",
    "inception_next_atto",
    "starnet_s1",
    "mambaout_femto",
    "halonet26t",
    "botnet26t_256",
    "lambda_resnet26t",
    "gcresnext26ts",
    "maxvit_rmlp_pico_rw_256",
    "coatnet_pico_rw_224",
    "hgnetv2_b0",
    "ese_vovnet19b_dw",
    "pvt_v2_b0",
    "tiny_vit_5m_224",
    "mvitv2_tiny",
    "hiera_tiny_224",
    "eva02_tiny_patch14_224",
]


def _timm() -> dict[str, Callable[[], Sample]]:
    timm: Any = importlib.import_module("timm")

    def make(name: str) -> Sample:
        model = timm.create_model(name, pretrained=False, num_classes=7)
        return model, {"x": _images(model.default_cfg["input_size"][-1])}

    return {name: partial(make, name) for name in _TIMM}


def _diffusers() -> dict[str, Callable[[], Sample]]:
    diffusers: Any = importlib.import_module("diffusers")

    def unet() -> Sample:
        model = diffusers.UNet2DModel(
            sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
        )  # fmt: skip
        return model, {"sample": _images(16), "timestep": torch.tensor([3, 7])}

    def conditional() -> Sample:
        model = diffusers.UNet2DConditionModel(
            sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
            in_channels=4, out_channels=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
        )  # fmt: skip
        inputs = {"timestep": torch.tensor([3, 7]), "encoder_hidden_states": torch.randn(2, 5, 16)}
        return model, {"sample": torch.randn(2, 4, 16, 16), **inputs}

    def autoencoder() -> Sample:
        model = diffusers.AutoencoderKL(
            block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4, sample_size=16,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        )  # fmt: skip
        return model, {"sample": _images(16)}

    def dit() -> Sample:
        model = diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
            norm_num_groups=4,
        )  # fmt: skip
        inputs = {"timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])}
        return model, {"hidden_states": torch.randn(2, 4, 8, 8), **inputs}

    return {
        "UNet2D": unet,
        "UNet2DCondition": conditional,
        "AutoencoderKL": autoencoder,
        "DiT": dit,
    }
