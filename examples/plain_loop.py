"""A training loop, eagerly and by plan: one line differs, and no bit of the losses."""

import torch
from torch import nn

import roam


def train(by_plan: bool) -> list[float]:
    """The losses of some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    def train_step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    if by_plan:
        train_step = roam.compile(train_step)

    losses = []
    for _ in range(10):
        x, y = torch.randn(32, 64), torch.randint(10, (32,))
        losses.append(train_step(x, y).item())
        scheduler.step()
    return losses


if __name__ == "__main__":
    eager, planned = train(by_plan=False), train(by_plan=True)
    print("eager  ", *(f"{loss:.6f}" for loss in eager))
    print("by plan", *(f"{loss:.6f}" for loss in planned))
    assert eager == planned
