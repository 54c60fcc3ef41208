"""Train with accelerate's loop, eagerly and by plans, and compare all bits."""

from __future__ import annotations

import argparse
import itertools

import accelerate
import torch
from torch import nn

import roam


def train(steps: int, by_plan: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The losses and the final parameters."""
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2
    )
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randint(8, (512,)))
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with accelerator.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = roam.compile(train_step) if by_plan else train_step  # the only line that differs
    losses = []
    for x, y in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps):
        with accelerator.accumulate(model):
            losses.append(step(x, y).item())
            scheduler.step()
    if by_plan:
        print(step.memory())
    return losses, [parameter.detach() for parameter in model.parameters()]


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
