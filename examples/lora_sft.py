"""Fine-tune a LoRA of a tiny Llama with TRL's SFTTrainer, eagerly and by plans, and compare all
bits. Model, tokenizer, and texts are made here, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile

import datasets
import peft
import tokenizers
import torch
import transformers
import trl

import roam.integrations.transformers

WORDS = ["<pad>", "<eos>", "<unk>", "the", "a", "cat", "dog", "sees", "hears", "likes"]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token for each word."""
    numbers = {word: number for number, word in enumerate(WORDS)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def train(steps: int, by_plan: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The losses in the logs and the final parameters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    texts = [f"the {WORDS[5 + i % 2]} {WORDS[7 + i % 3]} a cat" for i in range(32)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=transformers.LlamaForCausalLM(config),
            args=trl.SFTConfig(
                folder, max_steps=steps, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
                disable_tqdm=True, report_to=[], use_cpu=True, bf16=False,
            ),
            train_dataset=datasets.Dataset.from_dict({"text": texts}),
            processing_class=make_tokenizer(),
            peft_config=peft.LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM"),
        )  # fmt: skip
        if by_plan:
            step = roam.integrations.transformers.compile(trainer)  # the only line that differs
        trainer.train()
    if by_plan:
        print(step.memory())
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, [parameter.detach() for parameter in trainer.model.parameters()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    (eager, parameters), (planned, others) = train(steps, False), train(steps, True)
    same = eager == planned and all(map(torch.equal, parameters, others))
    print(
        f"{len(planned)} losses and all parameters: {'equal bit for bit' if same else 'DIFFERENT'}"
    )
    raise SystemExit(not same)
