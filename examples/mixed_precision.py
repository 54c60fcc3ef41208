"""Mixed precision with accumulation, clipping and an average of the weights (EMA): all of it is in
the step, eagerly and by plan.
"""

import torch
from torch import nn

import roam

PARTS = 2
"""Parts of a batch whose gradients are added up before an update."""


def train(by_plan: bool) -> list[float]:
    """The losses of some steps, and sums of the averaged weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 10))
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")

    def train_step(x, y):
        optimizer.zero_grad()
        total = 0.0
        for part, labels in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(part), labels) / PARTS
            scaler.scale(loss).backward()
            total = total + loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
        return total

    if by_plan:
        train_step = roam.compile(train_step)

    losses = []
    for _ in range(6):
        x, y = torch.randn(32, 64), torch.randint(10, (32,))
        losses.append(train_step(x, y).item())
    return losses + [weight.double().sum().item() for weight in average.parameters()]


if __name__ == "__main__":
    eager, planned = train(by_plan=False), train(by_plan=True)
    print("eager  ", *(f"{loss:.6f}" for loss in eager[:6]))
    print("by plan", *(f"{loss:.6f}" for loss in planned[:6]))
    assert eager == planned
