"""Processes share the layers of a model, eagerly and by plan, with the same bits on each: half of
the training before a checkpoint, and half from it.

torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import roam


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose first layer's rows, and second layer's columns, are spread over the ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model, optimizer, x, y):
    """One step; all ranks call it with the same batch."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def train(step, model, optimizer, numbers: range) -> list[float]:
    """The losses, which are the same on all ranks: they see the same batches."""
    losses = []
    for number in numbers:
        torch.manual_seed(number)
        x, y = torch.randn(16, 64), torch.randint(10, (16,))
        losses.append(step(model, optimizer, x, y).item())
    return losses


def train_and_resume(step, folder: str) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of all steps, and this rank's parts of the parameters after them."""
    model, optimizer = make(seed=0)
    losses = train(step, model, optimizer, range(4))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)

    model, optimizer = make(seed=1)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    losses += train(step, model, optimizer, range(4, 8))
    return losses, [parameter.to_local() for parameter in model.parameters()]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    names = [tempfile.mkdtemp(), tempfile.mkdtemp()]
    dist.broadcast_object_list(names)  # all ranks write into the first one's folders
    eager, expected = train_and_resume(train_step, names[0])
    planned, found = train_and_resume(roam.compile(train_step), names[1])
    assert eager == planned
    assert all(map(torch.equal, expected, found))
    print(f"rank {dist.get_rank()}: {len(planned)} losses and all parameters: equal bit for bit")
    dist.destroy_process_group()
