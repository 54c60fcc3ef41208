"""How the ranks of a mesh are divided: into replicas, each of which trains on a part of the batch,
and into ranks that share the parts of one replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roam.sharding.costs import Collective, Costs, Kind, Link
from roam.sharding.trace import Value
from roam.torch_compat.private import pytree, replicate
from roam.tracing.compiled.repeated_blocks import repeated_blocks

DATA, TENSOR = "data", "tensor"
"""Names of the two dimensions of every mesh that a step is spread over."""


@dataclass(frozen=True, slots=True)
class Division:
    """One way to divide ranks: rank `i` is in replica ``i // tensor``.

    Attributes:
        data: replicas of the model.
        tensor: ranks that share the parts of each replica.
        is_sharded: whether parameters, gradients and the optimizer's state are sharded over the
            replicas (`fully_shard`); if not, each replica has them whole.
        data_link: what connects the replicas.
        tensor_link: what connects the ranks of a replica.
    """

    data: int
    tensor: int
    is_sharded: bool
    data_link: Link
    tensor_link: Link

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the mesh."""
        return self.data, self.tensor

    def __str__(self) -> str:
        if self.data == 1:
            return f"{self.tensor} ranks"
        kept = "fully sharded over replicas" if self.is_sharded else "whole in every replica"
        of = f" of {self.tensor} ranks each" if self.tensor > 1 else ""
        return f"{self.data * self.tensor} ranks: {self.data} replicas{of}, parameters {kept}"

    def collective_kinds(self, *, is_trained: bool, is_root: bool) -> tuple[Kind, ...]:
        """What replicas do together in a step for the parameters of one unit."""
        if self.data == 1:
            return ()
        if not self.is_sharded:
            return ("all_reduce",) if is_trained else ()
        # The root's parameters stay gathered from the forward to the backward pass.
        gathers: tuple[Kind, ...] = ("all_gather",) if is_root else ("all_gather", "all_gather")
        return (*gathers, "reduce_scatter") if is_trained else gathers

    def padded_bytes(self, value: Value, placement: int) -> int:
        """Bytes of what a rank has of a parameter in a collective of its unit: `fully_shard` splits
        the first dimension, in parts of one length.
        """
        shape = list(value.shape)
        if placement >= 0:
            shape[placement] //= self.tensor
        if self.is_sharded and shape:
            shape[0] = -(-shape[0] // self.data) * self.data
        return math.prod(shape) * value.dtype.itemsize


def divisions_of(shape: Sequence[int], costs: Costs, data: int | None = None) -> list[Division]:
    """All ways to divide the ranks of a mesh. A mesh of one dimension is divided into any equal
    groups. In a mesh of several dimensions, the first ones are of replicas, and the others of the
    ranks of a replica.

    Args:
        shape: of the mesh.
        costs: with the links along its dimensions.
        data: how many replicas; None for any.

    Raises:
        ValueError: the ranks cannot be divided into so many replicas.
    """
    world = math.prod(shape)
    if len(shape) == 1:
        places = {count: 1 for count in range(1, world + 1) if world % count == 0}
    else:
        places = {math.prod(shape[:place]): place for place in range(len(shape) + 1)}
    if data is not None:
        if data not in places:
            known = ", ".join(map(str, places))
            raise ValueError(
                f"the ranks of this mesh can be divided into {known} replicas, not into {data}"
            )
        places = {data: places[data]}
    links = [costs.link_of(dimension) for dimension in range(len(shape))]
    found = []
    for count, place in places.items():
        outer = links[:place] or links[:1]
        inner = links if len(shape) == 1 else links[place:] or links[-1:]
        for is_sharded in (False, True) if count > 1 else (False,):
            found.append(
                Division(count, world // count, is_sharded, _slowest(outer), _slowest(inner))
            )
    return found


def _slowest(links: Sequence[Link]) -> Link:
    return Link(
        max(link.latency_ns for link in links),
        min(link.bytes_per_ns for link in links),
        all(link.exchanges for link in links),
    )


# -- units


def units_of(model: torch.nn.Module) -> tuple[str, ...]:
    """Paths of the modules whose parameters replicas gather and reduce together: repeated blocks;
    the model itself takes all others.
    """
    paths = {module: path for path, module in model.named_modules()}
    return tuple(paths[block] for block in repeated_blocks([model]))


def unit_of(name: str, units: Iterable[str]) -> str:
    """The unit of a parameter; empty for the model itself."""
    return next((unit for unit in units if name.startswith(f"{unit}.")), "")


def spread_replicas(
    model: torch.nn.Module, mesh: Any, units: Iterable[str], *, is_sharded: bool
) -> None:
    """Makes replicas train together, along a mesh of one dimension: gradients are averaged, and
    parameters are sharded or whole.
    """
    from torch.distributed.fsdp import fully_shard

    spread = fully_shard if is_sharded else replicate
    for unit in units:
        spread(model.get_submodule(unit), mesh=mesh)
    spread(model, mesh=mesh)


# -- batches


def rows_of(batch: tuple[Any, ...]) -> int | None:
    """How many samples a batch has: the length of its first tensor; None if it has none."""
    tensors = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    return next((len(tensor) for tensor in tensors if tensor.ndim), None)


def part_of(batch: tuple[Any, ...], replicas: int, replica: int) -> tuple[Any, ...]:
    """One replica's part of a batch: equal parts of all tensors that are as long as the first one,
    and everything else whole.

    Raises:
        ValueError: the number of samples is not a multiple of the number of replicas, or there is
            no such replica.
    """
    rows = rows_of(batch)
    if replicas == 1:
        return batch
    if not 0 <= replica < replicas:
        raise ValueError(f"there is no replica {replica} of {replicas}; pass replica=")
    if rows is None or rows % replicas:
        raise ValueError(
            f"a batch of {rows or 0} samples has no equal parts for {replicas} replicas"
        )
    length = rows // replicas

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or len(tensor) != rows:
            return tensor
        return tensor[replica * length : (replica + 1) * length].clone()

    return pytree.tree_map_only(torch.Tensor, part, batch)  # type: ignore[no-any-return]


def replica_collectives(
    division: Division, units: Sequence[str], parameters: Iterable[tuple[str, Value, int]]
) -> list[tuple[str, Collective]]:
    """What replicas do together in a step: the path of the unit, and the collective.

    Args:
        division: of the ranks.
        units: paths.
        parameters: name, value, and placement among the ranks of a replica.
    """
    padded: dict[str, list[tuple[int, bool]]] = {}
    for name, value, placement in parameters:
        entry = division.padded_bytes(value, placement), value.is_differentiable
        padded.setdefault(unit_of(name, units), []).append(entry)
    found = []
    for unit, sizes in padded.items():
        is_trained = any(trained for _, trained in sizes)
        for kind in division.collective_kinds(is_trained=is_trained, is_root=not unit):
            is_gathered = kind == "all_gather"
            size = sum(size for size, trained in sizes if trained or is_gathered)
            found.append((unit, Collective(kind, size)))
    return found
