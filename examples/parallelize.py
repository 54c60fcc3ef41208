"""Two processes train together as `roam.parallelize` found: they share the parts of one replica, or
each has a replica and a part of the batch.

torchrun --nproc-per-node 2 examples/parallelize.py
"""

import torch
import torch.distributed as dist
from torch import nn

import roam


def made() -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    """The same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, [torch.randn(512, 256) for _ in range(8)]


def train_step(model, optimizer, x):
    """Train once."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x.flip(1))
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(sharding, step) -> list[float]:
    """The losses of this rank's steps."""
    model, optimizer, batches = made()
    if sharding is None:
        return [step(model, optimizer, x).item() for x in batches]
    sharding.apply(model, optimizer)
    losses = torch.stack([step(model, optimizer, *sharding.part(x)).clone() for x in batches])
    dist.all_reduce(losses)  # a rank's loss is that of its replica
    return (losses / dist.get_world_size()).tolist()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model, optimizer, batches = made()
    sharding = roam.parallelize(
        train_step, model, optimizer, batches[0], mesh=dist.get_world_size(), memory="14MiB"
    )
    if dist.get_rank() == 0:
        print(sharding)
    alone = train(None, train_step)
    eager, planned = train(sharding, train_step), train(sharding, roam.compile(train_step))
    assert eager == planned
    torch.testing.assert_close(torch.tensor(planned), torch.tensor(alone))
    print(
        f"rank {dist.get_rank()}: {len(planned)} losses: equal bit for bit, and as of one process"
    )
    dist.destroy_process_group()
