"""An optimizer of your own (Lion), in ordinary PyTorch: nothing in it has to know of roam."""

import torch
from torch import nn

import roam


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675)."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(p.grad, momentum, first).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - second)


def train(by_plan: bool) -> list[float]:
    """The losses of some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=0.1)

    def train_step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    if by_plan:
        train_step = roam.compile(train_step)

    losses = []
    for _ in range(8):
        x, y = torch.randn(32, 64), torch.randint(10, (32,))
        losses.append(train_step(x, y).item())
    return losses


if __name__ == "__main__":
    eager, planned = train(by_plan=False), train(by_plan=True)
    print("eager  ", *(f"{loss:.6f}" for loss in eager))
    print("by plan", *(f"{loss:.6f}" for loss in planned))
    assert eager == planned
