"""A step within a memory budget: operators run again where order and layout need more, and the
losses stay eager's, dropout included.
"""

import torch
from torch import nn

import roam


def train(by_plan: bool) -> list[float]:
    """The losses of some steps."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    if by_plan:
        train_step = roam.compile(train_step, memory="60%")

    losses = []
    for _ in range(5):
        x, y = torch.randn(512, 64), torch.randint(10, (512,))
        losses.append(train_step(x, y).item())
    if by_plan:
        print(train_step.memory())
    return losses


if __name__ == "__main__":
    eager, planned = train(by_plan=False), train(by_plan=True)
    print("eager  ", *(f"{loss:.6f}" for loss in eager))
    print("by plan", *(f"{loss:.6f}" for loss in planned))
    assert eager == planned
