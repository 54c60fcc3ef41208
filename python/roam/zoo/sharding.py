"""Models of the zoo as one rank of many trains them, in one process: PyTorch's "fake" process group
stands for the others.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from roam.zoo.catalog import ZooError, build

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from roam.tracing import Variant

WAYS = ("ddp", "fsdp", "tp", "fsdp+tp")
NODE_RANKS = 8
"""Ranks that share a machine, and so its fast links."""
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 2**20, 25 * 2**20
"""The sizes of the first and of all later buckets, as `DistributedDataParallel` has them by
default.
"""


class ShardingError(ZooError):
    """A model cannot be sharded as it was asked for."""


@dataclass(frozen=True)
class Sharding:
    """How a model is spread, and which rank is looked at.

    Attributes:
        way: one of `WAYS`. ``ddp``: every rank has the whole model, and gradients are reduced in
            buckets; ``fsdp``: `fully_shard` of each repeated block and of the rest; ``tp``: tensor
            parallelism, by the plan that transformers ships with the architecture; ``fsdp+tp``:
            tensor parallelism within groups of `tp_ranks` neighbours, and `fully_shard` across the
            groups.
        world: how many ranks there are.
        rank: one of them.
        tp_ranks: how many ranks share the parts of one layer with ``fsdp+tp``. If None, at most
            `NODE_RANKS` do. For other ways it must be None.
    """

    way: str
    world: int
    rank: int = 0
    tp_ranks: int | None = None

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ShardingError(f"a model is sharded by one of {', '.join(WAYS)}, not {self.way!r}")
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise ShardingError(f"there is no rank {self.rank} of {self.world}")
        if self.tp_ranks is not None and self.way != "fsdp+tp":
            raise ShardingError(
                "how many ranks share the parts of a layer can be chosen with 'fsdp+tp' only"
            )
        if self.world % self.inner:
            raise ShardingError(
                f"{self.world} ranks cannot be divided into groups of {self.inner} that share the parts of a layer"
            )

    @property
    def inner(self) -> int:
        """How many ranks share the parts of one layer."""
        if self.way == "fsdp+tp":
            return min(NODE_RANKS, self.world) if self.tp_ranks is None else self.tp_ranks
        return self.world if self.way == "tp" else 1

    def __str__(self) -> str:
        inner = f", {self.inner} for each layer" if self.way == "fsdp+tp" else ""
        return f"{self.way} on {self.world} ranks{inner}, rank {self.rank}"

    @property
    def note(self) -> str:
        """What the figures of a plan do not contain; empty if they contain everything."""
        if self.way != "ddp":
            return ""
        return (
            "The module itself is planned, with reductions as DistributedDataParallel has them. The "
            "wrapper's own\nbuckets, as large as all gradients, are not counted: they are freed "
            "while plans run.\n"
        )


@contextmanager
def one_process(sharding: Sharding) -> Iterator[DeviceMesh]:
    """A process group in which this process is one rank and the other ranks do not exist; gives a
    mesh of shape [world / inner, inner]. Its collectives do nothing, so it is for captures alone.

    Raises:
        ShardingError: this process is in a group already.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from roam.sharding.ranks import one_of

    if dist.is_initialized():
        raise ShardingError(
            "this process is in a process group already; plan ranks in a process of its own"
        )
    with one_of(sharding.world, sharding.rank):
        shape = sharding.world // sharding.inner, sharding.inner
        yield init_device_mesh("cpu", shape, mesh_dim_names=("data", "layer"))


Step = Callable[..., "torch.Tensor"]


def spread(
    sharding: Sharding, mesh: DeviceMesh, model: torch.nn.Module, train_step: Step
) -> tuple[torch.nn.Module, Step]:
    """Changes a model, in place, to that of one rank. Returns it and the rank's training step. Make
    the optimizer afterwards.

    Raises:
        ShardingError: there is no plan of how to spread this model's layers, or its sizes are not
            divisible by the number of ranks.
    """
    if sharding.way == "ddp":
        return model, reducing(train_step)
    if "tp" in sharding.way:
        _spread_layers(model, mesh["layer"])
    if "fsdp" in sharding.way:
        from torch.distributed.fsdp import fully_shard

        from roam.torch_compat.patches import replaced
        from roam.torch_compat.private import shard_parts
        from roam.tracing.compiled.repeated_blocks import repeated_blocks

        with replaced([(*shard_parts(), Parts)]):
            for block in repeated_blocks([model]):
                fully_shard(block, mesh=mesh["data"])
            fully_shard(model, mesh=mesh["data"])
    return model, train_step


class Parts(Sequence["torch.Tensor"]):
    """The parts of a tensor for all ranks: those that `torch.chunk` makes, and empty ones after
    these. Each is made when it is asked for, since a rank needs two of perhaps hundreds.
    """

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        rows = self._tensor.size(self._dim)
        most = -(-rows // self._count)
        begin = min(index * most, rows)
        if begin == rows > 0:
            return self[0].new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(most, rows - begin))


def capture_rank(
    name: str,
    sharding: Sharding,
    *,
    step: Literal["first", "steady"] = "steady",
    device: str = "cpu",
    **settings: Any,
) -> Variant:
    """One rank's step of a model of the zoo, built on fake tensors and captured.

    Args:
        name: one of :func:`roam.zoo.names`.
        sharding: how the model is spread, and which rank it is.
        step, device, settings: as for :func:`roam.zoo.capture`.

    Raises:
        ZooError: as from :func:`roam.zoo.build` and :func:`spread`, or the ranks are not on the
            CPU: the mesh is, and without a CUDA device collectives cannot be called for it.
        CaptureError: the step cannot be captured.
    """
    import torch

    import roam
    from roam.tracing.step import capture_variant

    if device != "cpu" and not (sharding.way == "ddp" and torch.cuda.is_available()):
        raise ShardingError(
            f"one rank of many is planned for the CPU, and not for {device} (with 'ddp' for cuda "
            "too, on a machine that has it); leave the device out"
        )
    with one_process(sharding) as mesh:
        with roam.fake(device):
            made = build(name, device=device, spread=partial(spread, sharding, mesh), **settings)
        objects = made.model, made.optimizer, *made.batch
        return capture_variant(made.train_step, objects, {}, step)


# -- tensor parallelism


def _spread_layers(model: Any, mesh: DeviceMesh) -> None:
    """Spreads a model's layers by the plan of transformers. A word table that is tied to the last
    layer is spread like that layer.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    ways: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    config = getattr(model, "config", None)
    prefix = getattr(model, "base_model_prefix", "")
    shipped = {f"{prefix}.{name}": way for name, way in _plan_of(config).items()}
    shipped |= dict(getattr(type(model), "_tp_plan", None) or {})
    names = dict(model.named_modules())
    unknown = sorted(set(shipped.values()) - set(ways))
    if not shipped or unknown:
        raise ShardingError(
            "tensor parallelism needs the plan that transformers ships with an architecture, and "
            + (
                f"this one has styles that PyTorch does not have: {', '.join(unknown)}"
                if shipped
                else "this model has none"
            )
        )
    heads = {
        name: getattr(config, name, None)
        for name in (
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
        )
    }
    for name, size in heads.items():
        if size is not None and size % mesh.size():
            raise ShardingError(f"{name}, which is {size}, is not divisible by {mesh.size()} ranks")
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and table.weight is head.weight
    if is_tied:
        (path,) = (name for name, module in names.items() if module is table)
        shipped[path] = "embedding_rowwise"
    for pattern, way in shipped.items():
        found = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        for name in names:
            if found.fullmatch(name):
                parallelize_module(model, mesh, {name: ways[way]()})
    if is_tied:
        head.weight = table.weight


def _plan_of(config: Any) -> dict[str, str]:
    return dict(getattr(config, "base_model_tp_plan", None) or {})


# -- data parallelism


def reducing(train_step: Step) -> Step:
    """A step on the plain module that reduces gradients as `DistributedDataParallel` does: in
    buckets of 25 MiB, the first of 1 MiB, in the order in which gradients come. Buffers are taken
    from rank 0. `DistributedDataParallel` itself cannot be used: its constructor reads values of
    other ranks, which do not exist in a "fake" group.
    """

    @functools.wraps(train_step)
    def reducing_step(model: torch.nn.Module, optimizer: Any, *batch: Any) -> torch.Tensor:
        _broadcast(model.buffers())
        reductions = _Reductions(model)
        hooks = [
            parameter.register_post_accumulate_grad_hook(reductions.add)
            for parameter in reductions.parameters
        ]
        loss = train_step(model, optimizer, *batch)
        for hook in hooks:
            hook.remove()
        return loss

    return reducing_step


def _broadcast(buffers: Iterable[torch.Tensor]) -> None:
    import torch

    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in buffers:
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for alike in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in alike])
        torch.distributed.broadcast(flat, 0)
        parts = flat.split([buffer.numel() for buffer in alike])
        for buffer, part in zip(alike, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))


class _Reductions:
    """The gradients of one backward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self._missing = len(self.parameters)
        self._full: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        self._open: list[torch.Tensor] = []

    def add(self, parameter: torch.Tensor) -> None:
        """A gradient has come; with the last one all are replaced by the sums."""
        self._open.append(parameter)
        self._missing -= 1
        limit = _BUCKET_BYTES if self._full else _FIRST_BUCKET_BYTES
        if sum(one.nbytes for one in self._open) >= limit or not self._missing:
            self._launch()
        if not self._missing:
            self._finish()

    def _launch(self) -> None:
        import torch

        bucket, self._open = self._open, []
        scale = 1 / torch.distributed.get_world_size()
        like = bucket[0]
        flat = torch.empty(sum(one.numel() for one in bucket), dtype=like.dtype, device=like.device)
        parts = flat.split([one.numel() for one in bucket])
        with torch.no_grad():
            for one, part in zip(bucket, parts, strict=True):
                assert one.grad is not None, "it has just come"
                torch.mul(one.grad, scale, out=part.view(one.shape))
        torch.distributed.all_reduce(flat)
        self._full.append((bucket, flat))

    def _finish(self) -> None:
        for bucket, flat in self._full:
            parts = flat.split([one.numel() for one in bucket])
            for one, part in zip(bucket, parts, strict=True):
                assert one.grad is not None, "it has come before"
                one.grad.copy_(part.view(one.shape))


__all__ = [
    "NODE_RANKS",
    "WAYS",
    "Sharding",
    "ShardingError",
    "capture_rank",
    "one_process",
    "reducing",
    "spread",
]
