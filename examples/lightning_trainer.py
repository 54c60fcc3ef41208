"""Train a small module with `lightning.Trainer`, eagerly and by plans, and compare all bits."""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import nn

import roam.integrations.lightning


class Classifier(lightning.LightningModule):
    """Four layers, and a loss that is logged."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))
        ]
        self.net = nn.Sequential(*layers, nn.Linear(64, 8))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        """Keeps the loss."""
        self.losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(steps: int, by_plan: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The losses and the final parameters."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randint(8, (512,)))
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
    module = Classifier()
    if by_plan:
        step = roam.integrations.lightning.compile(module)  # the only line that differs
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", precision="bf16-mixed", gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    if by_plan:
        print(step.memory())
    return module.losses, [parameter.detach() for parameter in module.parameters()]


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
