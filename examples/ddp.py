"""Two processes train together, eagerly and by plan, with the same bits on each.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import roam


def train(by_plan: bool) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of this rank's steps, and the parameters after them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(parts):
        optimizer.zero_grad()
        with model.no_sync():  # gradients add up, and are reduced with the last part's
            for x, y in parts[:-1]:
                nn.functional.cross_entropy(model(x), y).backward()
        x, y = parts[-1]
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    if by_plan:
        train_step = roam.compile(train_step)

    torch.manual_seed(dist.get_rank())  # each rank has batches of its own
    losses = []
    for _ in range(8):
        parts = [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(3)]
        losses.append(train_step(parts).item())
    return losses, [parameter.detach() for parameter in model.parameters()]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    (eager, expected), (planned, found) = train(by_plan=False), train(by_plan=True)
    assert eager == planned
    assert all(map(torch.equal, expected, found))
    print(f"rank {dist.get_rank()}: {len(planned)} losses and all parameters: equal bit for bit")
    dist.destroy_process_group()
