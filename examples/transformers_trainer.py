"""Train a tiny GPT-2 with `transformers.Trainer`, eagerly and by plans, and compare all bits."""

from __future__ import annotations

import argparse
import tempfile

import torch
import transformers

import roam.integrations.transformers


def train(steps: int, by_plan: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The losses in the logs and the final parameters."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=99, n_layer=2, n_embd=32, n_head=4, use_cache=False, bos_token_id=1, eos_token_id=2
    )  # fmt: skip
    rows = torch.randint(3, 99, (64, 32))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=steps, gradient_accumulation_steps=2, logging_steps=1, save_strategy="no",
            disable_tqdm=True, report_to=[], use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=transformers.GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        )
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
