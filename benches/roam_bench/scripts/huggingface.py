"""transformers, accelerate, peft and diffusers, as in their examples, with and without Trainer."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional
_SMALL: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _tokens(length: int = 12, batch: int = 2) -> Any:
    return torch.randint(3, 99, (batch, length))


def _gpt2() -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=99,
        n_layer=2,
        n_embd=32,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def _train(wrap: Wrap, model: Any, batches: Any, schedule: str = "linear") -> Any:
    """The loop that most examples share."""
    import transformers

    no_decay = ["bias", "LayerNorm.weight"]
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for n, p in named if not any(nd in n for nd in no_decay)],
                "weight_decay": 0.1,
            },
            {
                "params": [p for n, p in named if any(nd in n for nd in no_decay)],
                "weight_decay": 0.0,
            },
        ],
        lr=5e-4,
    )
    lr_scheduler = transformers.get_scheduler(
        schedule, optimizer=optimizer, num_warmup_steps=1, num_training_steps=6
    )
    model.train()

    @wrap
    def train_step(batch: Any) -> Any:
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        return loss.detach().float()

    return [train_step(batch) for batch in batches], model, optimizer, lr_scheduler


@script("transformers examples: run_clm_no_trainer", "transformers")
def run_clm(wrap: Wrap) -> Any:
    return _train(
        wrap,
        _gpt2(),
        [
            {
                "input_ids": (t := _tokens()),
                "attention_mask": torch.ones_like(t),
                "labels": t.clone(),
            }
            for _ in range(4)
        ],
    )


@script(
    "transformers examples: run_mlm_no_trainer (BERT, masking outside, padding in the batch)",
    "transformers",
)
def run_mlm(wrap: Wrap) -> Any:
    import transformers

    def batch() -> Any:
        ids = _tokens()
        labels = torch.where(torch.rand(ids.shape) < 0.15, ids, -100)
        mask = torch.ones_like(ids)
        mask[1, -3:] = 0
        return {
            "input_ids": ids.masked_fill(labels != -100, 3),
            "attention_mask": mask,
            "labels": labels,
        }

    return _train(
        wrap,
        transformers.BertForMaskedLM(transformers.BertConfig(**_SMALL)),
        [batch() for _ in range(4)],
        "cosine",
    )


@script("transformers examples: token classification", "transformers")
def token_classification(wrap: Wrap) -> Any:
    import transformers

    model = transformers.DistilBertForTokenClassification(
        transformers.DistilBertConfig(
            vocab_size=99,
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=64,
            max_position_embeddings=64,
            num_labels=5,
        )
    )
    batches = [
        {
            "input_ids": (t := _tokens()),
            "attention_mask": torch.ones_like(t),
            "labels": torch.randint(0, 5, t.shape),
        }
        for _ in range(4)
    ]
    return _train(wrap, model, batches)


@script(
    "transformers examples: text classification (GLUE), a batch of another length at the end",
    "transformers",
)
def text_classification(wrap: Wrap) -> Any:
    import transformers

    model = transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**_SMALL, num_labels=3)
    )
    batches = [
        {
            "input_ids": (t := _tokens(n)),
            "attention_mask": torch.ones_like(t),
            "labels": torch.randint(0, 3, (2,)),
        }
        for n in (12, 12, 12, 9)
    ]
    return _train(wrap, model, batches)


@script("transformers examples: translation (T5, labels with -100)", "transformers")
def t5_translation(wrap: Wrap) -> Any:
    import transformers

    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=99,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )
    batches = [
        {"input_ids": _tokens(), "labels": _tokens(8).masked_fill(torch.rand(2, 8) < 0.2, -100)}
        for _ in range(4)
    ]
    return _train(wrap, model, batches)


@script("transformers examples: image classification (ViT)", "transformers")
def vit_classification(wrap: Wrap) -> Any:
    import transformers

    small = {k: v for k, v in _SMALL.items() if k.startswith(("hidden", "num", "inter"))}
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**small, image_size=16, patch_size=4, num_labels=3)
    )
    return _train(
        wrap,
        model,
        [
            {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(0, 3, (2,))}
            for _ in range(4)
        ],
    )


@script("transformers examples: contrastive image and text (CLIP)", "transformers")
def clip_pretraining(wrap: Wrap) -> Any:
    import transformers

    model = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**_SMALL, "projection_dim": 16},
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 16,
                "patch_size": 8,
            },
            projection_dim=16,
        )
    )

    def batch() -> Any:
        ids = _tokens()
        ids[:, -1] = 2
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.randn(2, 3, 16, 16),
            "return_loss": True,
        }

    return _train(wrap, model, [batch() for _ in range(4)])


@script("transformers examples: speech recognition, sequence to sequence (Whisper)", "transformers")
def whisper(wrap: Wrap) -> Any:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=99, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=10, max_target_positions=32, decoder_start_token_id=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    return _train(
        wrap,
        model,
        [{"input_features": torch.randn(2, 8, 20), "labels": _tokens(6)} for _ in range(4)],
    )


@script("transformers examples: speech recognition, CTC (Wav2Vec2)", "transformers")
def wav2vec2_ctc(wrap: Wrap) -> Any:
    import transformers

    config = transformers.Wav2Vec2Config(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=(16, 16), conv_stride=(5, 4),
        conv_kernel=(10, 8), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, apply_spec_augment=False, layerdrop=0.0,
        ctc_loss_reduction="mean", pad_token_id=0, num_feat_extract_layers=2,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config)
    return _train(
        wrap,
        model,
        [
            {"input_values": torch.randn(2, 600), "labels": torch.randint(1, 20, (2, 5))}
            for _ in range(3)
        ],
    )


@script("transformers examples: semantic segmentation (SegFormer)", "transformers")
def segformer(wrap: Wrap) -> Any:
    import transformers

    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2], decoder_hidden_size=16,
        patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[2, 2], num_labels=4,
    )  # fmt: skip
    model = transformers.SegformerForSemanticSegmentation(config)
    return _train(
        wrap,
        model,
        [
            {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(0, 4, (2, 16, 16))}
            for _ in range(3)
        ],
    )


@script("transformers: Trainer, its training_step wrapped", "transformers", "accelerate")
def hf_trainer(wrap: Wrap) -> Any:
    import transformers

    model = _gpt2()
    data = [{"input_ids": (t := _tokens()[0]), "labels": t} for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder, max_steps=4, per_device_train_batch_size=2, report_to=[], save_strategy="no", disable_tqdm=True,
            logging_strategy="no", use_cpu=True, max_grad_norm=1.0,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
        trainer.training_step = wrap(trainer.training_step)
        trainer.train()
    return model, trainer.optimizer


@script(
    "accelerate: the loop of the quick tour (prepare, backward, clip_grad_norm_)",
    "accelerate",
    "transformers",
)
def accelerate_loop(wrap: Wrap) -> Any:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    dataset = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(0, 3, (16,)))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    @wrap
    def train_step(inputs: Any, targets: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss

    return [train_step(inputs, targets) for inputs, targets in loader], model, optimizer, scheduler


@script("accelerate: gradient accumulation (accumulate)", "accelerate", "transformers")
def accelerate_accumulation(wrap: Wrap) -> Any:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(0, 3, (16,))), batch_size=4
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    @wrap
    def train_step(inputs: Any, targets: Any) -> Any:
        with accelerator.accumulate(model):
            loss = functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return [train_step(inputs, targets) for inputs, targets in loader], model, optimizer


@script("peft: LoRA of a causal model", "peft", "transformers")
def peft_lora(wrap: Wrap) -> Any:
    import peft

    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        lora_dropout=0.1,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
    )
    model = peft.get_peft_model(_gpt2(), config)
    return _train(
        wrap, model, [{"input_ids": (t := _tokens()), "labels": t.clone()} for _ in range(4)]
    )


@script("diffusers: unconditional image generation (UNet2D, DDPM scheduler, EMAModel)", "diffusers")
def diffusers_unconditional(wrap: Wrap) -> Any:
    import diffusers
    from diffusers.optimization import get_cosine_schedule_with_warmup
    from diffusers.training_utils import EMAModel

    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    noise_scheduler = diffusers.DDPMScheduler(num_train_timesteps=50)
    ema = EMAModel(model.parameters(), decay=0.99, use_ema_warmup=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 1, 10)

    @wrap
    def train_step(clean: Any) -> Any:
        noise = torch.randn(clean.shape)
        timesteps = torch.randint(0, 50, (len(clean),), dtype=torch.int64)
        noisy = noise_scheduler.add_noise(clean, noise, timesteps)
        loss = functional.mse_loss(model(noisy, timesteps, return_dict=False)[0], noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        return loss

    history = []
    for _ in range(3):
        history.append(train_step(torch.randn(2, 3, 8, 8)))
        ema.step(model.parameters())
    return history, model, ema.shadow_params, optimizer, lr_scheduler


@script(
    "diffusers: text to image (frozen text encoder and autoencoder, conditional UNet)",
    "diffusers",
    "transformers",
)
def diffusers_text_to_image(wrap: Wrap) -> Any:
    import diffusers
    import transformers

    text_encoder = (
        transformers.CLIPTextModel(transformers.CLIPTextConfig(**_SMALL))
        .requires_grad_(False)
        .eval()
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, sample_size=16
    ).requires_grad_(False)
    unet = _conditional_unet()
    noise_scheduler = diffusers.DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)

    @wrap
    def train_step(pixels: Any, ids: Any) -> Any:
        latents = vae.encode(pixels).latent_dist.sample() * 0.18215
        noise = torch.randn_like(latents)
        timesteps = torch.randint(
            0, noise_scheduler.config.num_train_timesteps, (len(latents),)
        ).long()
        noisy = noise_scheduler.add_noise(latents, noise, timesteps)
        states = text_encoder(ids, return_dict=False)[0]
        if noise_scheduler.config.prediction_type == "epsilon":
            target = noise
        else:
            target = noise_scheduler.get_velocity(latents, noise, timesteps)
        loss = functional.mse_loss(
            unet(noisy, timesteps, states, return_dict=False)[0].float(),
            target.float(),
            reduction="mean",
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return [train_step(torch.randn(2, 3, 16, 16), _tokens(7)) for _ in range(3)], unet, optimizer


def _conditional_unet() -> Any:
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
        cross_attention_dim=32, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


@script("diffusers: ControlNet", "diffusers")
def diffusers_controlnet(wrap: Wrap) -> Any:
    import diffusers

    unet = _conditional_unet().requires_grad_(False)
    controlnet = diffusers.ControlNetModel.from_unet(
        unet, conditioning_embedding_out_channels=(8, 16)
    ).requires_grad_(True)
    noise_scheduler = diffusers.DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(controlnet.parameters(), lr=1e-3)

    @wrap
    def train_step(latents: Any, states: Any, image: Any) -> Any:
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, 50, (len(latents),)).long()
        noisy = noise_scheduler.add_noise(latents, noise, timesteps)
        down, mid = controlnet(
            noisy, timesteps, encoder_hidden_states=states, controlnet_cond=image, return_dict=False
        )
        found = unet(
            noisy,
            timesteps,
            encoder_hidden_states=states,
            down_block_additional_residuals=down,
            mid_block_additional_residual=mid,
            return_dict=False,
        )[0]
        loss = functional.mse_loss(found, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    history = [
        train_step(torch.randn(2, 4, 8, 8), torch.randn(2, 7, 32), torch.randn(2, 3, 16, 16))
        for _ in range(3)
    ]
    return history, controlnet, optimizer


@script(
    "trl: supervised fine-tuning written out, with packed sequences and completion masks",
    "transformers",
)
def completion_only(wrap: Wrap) -> Any:
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL, num_key_value_heads=2))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def batch() -> Any:
        ids = _tokens(16)
        labels = ids.masked_fill(torch.arange(16)[None] < 6, -100)
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": torch.cat([torch.arange(9), torch.arange(7)])[None].expand(2, -1),
        }

    return _train(wrap, model, [batch() for _ in range(3)])
