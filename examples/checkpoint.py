"""Checkpoint and resume: a run that is interrupted and goes on by plan ends with the losses of one
eager run without a break.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import roam


def train(by_plan: bool, path: Path, start: int, end: int) -> list[float]:
    """The losses of the steps from `start` to before `end`; the checkpoint at `path` is loaded
    where the run goes on, and saved at the end.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if start:
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])

    def train_step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    if by_plan:
        train_step = roam.compile(train_step)

    losses = []
    for _ in range(start, end):
        x, y = torch.randn(32, 64), torch.randint(10, (32,))
        losses.append(train_step(x, y).item())
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**saved, "random": torch.get_rng_state()}, path)
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        eager = train(False, path, 0, 8)
        planned = train(True, path, 0, 5) + train(True, path, 5, 8)
    print("eager, in one run   ", *(f"{loss:.6f}" for loss in eager))
    print("by plan, in two runs", *(f"{loss:.6f}" for loss in planned))
    assert eager == planned
