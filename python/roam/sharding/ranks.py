"""Ranks of a mesh without processes: PyTorch's "fake" process group takes their place if there is
no real one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from roam.errors import CaptureError
from roam.torch_compat.private import disable_current_modes, fake_store


@contextmanager
def one_of(world: int, rank: int = 0) -> Iterator[None]:
    """A "fake" process group in which this process is one rank, and the other ranks do not exist.
    Its collectives do nothing.
    """
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def meshed(shape: Sequence[int], names: Sequence[str], device: str) -> Iterator[Any]:
    """A mesh of this shape: of the processes of the process group, or, without one, of fake ranks,
    of which this process is the first.

    Raises:
        CaptureError: there are processes, and not as many as the mesh has ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    world = math.prod(shape)
    if dist.is_initialized():
        if dist.get_world_size() != world:
            raise CaptureError(
                f"the mesh has {world} ranks, and the process group has {dist.get_world_size()}; "
                "pass a mesh of as many ranks, or plan before the group is made",
                code="mesh_size",
            )
        yield init_device_mesh(device, tuple(shape), mesh_dim_names=tuple(names))
        return
    with one_of(world):
        yield init_device_mesh(device, tuple(shape), mesh_dim_names=tuple(names))


def of_all_ranks(value: Any) -> list[Any]:
    """What each rank has found, in the order of ranks; this process's value alone without a process
    group, or in a "fake" one. All ranks must call it.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    with disable_current_modes():
        dist.all_gather_object(found, value)
    return found
