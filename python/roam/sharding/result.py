"""What `roam.parallelize` gives back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from roam._core import Plan
from roam.report.folding import folded
from roam.report.table import columns, format_bytes
from roam.sharding.costs import Collective, Costs
from roam.sharding.division import (
    DATA,
    TENSOR,
    Division,
    part_of,
    replica_collectives,
    spread_replicas,
)
from roam.sharding.nodes import Node, placements_of
from roam.sharding.search import Choice
from roam.sharding.styles import Style, apply_styles
from roam.sharding.trace import Trace


@dataclass(slots=True)
class Seconds:
    """How long each stage took, in seconds.

    Attributes:
        trace: to trace one process's step on fakes.
        rules: to ask DTensor for its rules and to write down all options.
        search: to search for the choices and their bounds.
        check: to apply the choices, and to trace a rank's step.
        certify: to capture and plan a rank's step.
    """

    trace: float = 0.0
    rules: float = 0.0
    search: float = 0.0
    check: float = 0.0
    certify: float = 0.0


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is split over the ranks of a mesh; `print` shows it.

    Attributes:
        mesh_shape: ranks along each dimension.
        division: how the ranks are divided into replicas, and into ranks that share a replica.
        styles: by the path of a module, what `parallelize_module` is given for it.
        units: paths of the modules that `fully_shard` is called on before the model, where there
            are replicas.
        plan: the verified plan of one rank's step: of this process's rank if there is a process
            group, otherwise of the first one.
        total_bytes: the most memory that a step takes on a rank, parameters and state included.
            Rows that are sharded over replicas may not divide evenly; the first rank has the most.
        choice: what the search found. `ns` is the time of a step by the cost model, and
            `bound_ns` a lower bound of it for all divisions that were looked at.
        seconds: how long each stage took.
        left_out: divisions that are not possible, and why.
        knows_kernels: whether `plan` knows what kernels take for themselves while they run. It does
            not know this if the model or the batch consisted of fakes.
    """

    mesh_shape: tuple[int, ...]
    division: Division
    styles: dict[str, Style]
    units: tuple[str, ...]
    trace: Trace
    nodes: tuple[Node, ...]
    choice: Choice
    plan: Plan
    total_bytes: int
    costs: Costs
    seconds: Seconds
    left_out: dict[str, str]
    knows_kernels: bool
    _applied: tuple[int, int] | None = field(default=None, init=False, repr=False, compare=False)
    """The rank that `apply` was called on last, and the number of its replica."""

    @property
    def is_optimal(self) -> bool:
        """Whether no choice takes less time, by the cost model."""
        return self.choice.ns == self.choice.bound_ns

    @property
    def collectives(self) -> list[tuple[str, Collective]]:
        """The collectives of a replica's ranks in a step, each with the path of its module."""
        return [
            (node.path, one)
            for node, option in zip(self.nodes, self.choice.options, strict=True)
            for one in option.collectives
        ]

    @property
    def replica_collectives(self) -> list[tuple[str, Collective]]:
        """The collectives among replicas in a step, each with the path of its unit."""
        placed = placements_of(self.trace, self.nodes, self.choice.options)
        return replica_collectives(self.division, self.units, placed)

    @property
    def parallelize_plan(self) -> dict[str, Any]:
        """Styles for `torch.distributed.tensor.parallel.parallelize_module`, by path."""
        return {path: style.make() for path, style in self.styles.items()}

    def part(self, *batch: Any, replica: int | None = None) -> tuple[Any, ...]:
        """The part of a batch that a rank trains on: with replicas, an equal part of every tensor
        that is as long as the first one, along the first dimension; otherwise all of it.

        Args:
            batch: all samples of a step, the same on every rank.
            replica: the number of the replica; if None, that of this process's rank: in the mesh
                that `apply` was given, or before `apply`, in a mesh of all processes.

        Raises:
            ValueError: the samples have no equal parts, or there is no such replica.
        """
        if replica is None:
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            replica = rank // self.division.tensor
            if self._applied is not None and self._applied[0] == rank:
                replica = self._applied[1]
        return part_of(batch, self.division.data, replica)

    def apply(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        mesh: Any = None,
    ) -> torch.nn.Module:
        """Splits a model like the planned one, on every rank: by `parallelize_module` and, with
        several replicas, by `fully_shard` or PyTorch's `replicate`.

        All ranks must have the same values of all parameters, as after the same seed or from one
        checkpoint.

        Args:
            model: changed, and returned.
            optimizer: over the model's parameters, without state yet; it gets the new parameters.
                If you do not pass it, make the optimizer afterwards.
            mesh: a mesh of the shape ``division.shape``. One dimension is enough if there is only
                one replica, or if each replica is one rank. If None, a mesh of all processes is
                made.

        Raises:
            ValueError: the mesh has another shape, or several dimensions without names, or the
                optimizer has state.
        """
        if optimizer is not None and optimizer.state:
            raise ValueError("the optimizer has state already; apply before the first step")
        device = next((one.device.type for one in model.parameters()), "cpu")
        data_mesh, tensor_mesh = self._meshes(mesh, device)
        before = dict(model.named_parameters(remove_duplicate=False))
        apply_styles(model, tensor_mesh, self.styles)
        if self.division.data > 1:
            placed = torch.distributed.get_rank(), data_mesh.get_local_rank()
            object.__setattr__(self, "_applied", placed)
            is_sharded = self.division.is_sharded
            spread_replicas(model, data_mesh, self.units, is_sharded=is_sharded)
        if optimizer is not None:
            after = dict(model.named_parameters(remove_duplicate=False))
            new = {id(parameter): after[name] for name, parameter in before.items()}
            for group in optimizer.param_groups:
                group["params"] = [new.get(id(one), one) for one in group["params"]]
        return model

    def _meshes(self, mesh: Any, device: str) -> tuple[Any, Any]:
        """The mesh of the replicas, and the mesh of the ranks of one replica."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = self.division.shape
        if mesh is None:
            mesh = init_device_mesh(device, shape, mesh_dim_names=(DATA, TENSOR))
        if tuple(mesh.shape) == shape:
            if mesh.mesh_dim_names is None:
                raise ValueError(
                    "the mesh's dimensions have no names, by which they could be taken apart; make "
                    f'it with mesh_dim_names=("{DATA}", "{TENSOR}")'
                )
            first, second = mesh.mesh_dim_names
            return mesh[first], mesh[second]
        if 1 in shape and tuple(mesh.shape) == (max(shape),):
            return mesh, mesh
        raise ValueError(f"the mesh has the shape {tuple(mesh.shape)}, not {shape}")

    def figures(self) -> dict[str, Any]:
        """Everything that is printed, as plain values: bytes, seconds, and text."""
        return {
            "mesh": list(self.mesh_shape),
            "data": self.division.data,
            "tensor": self.division.tensor,
            "is_sharded": self.division.is_sharded,
            "styles": {path: str(style) for path, style in self.styles.items()},
            "step_ns": self.choice.ns,
            "bound_ns": self.choice.bound_ns,
            "gap": self.choice.gap,
            "is_optimal": self.is_optimal,
            "is_folded": self.choice.is_folded,
            "nodes": self.choice.nodes,
            "folded_nodes": self.choice.folded_nodes,
            "collectives": _rows(self.collectives, self.division.tensor),
            "replica_collectives": _rows(self.replica_collectives, self.division.data),
            "left_out": dict(self.left_out),
            "total_bytes": self.total_bytes,
            "knows_kernels": self.knows_kernels,
            "bound_bytes": self.plan.total_lower_bound_bytes,
            "seconds": asdict(self.seconds),
        }

    def __str__(self) -> str:
        rows: dict[tuple[str, str], int] = {}
        for path, style in self.styles.items():
            key = folded(path), str(style)
            rows[key] = rows.get(key, 0) + 1
        lines = [f"Sharding over {self.division}"]
        if rows:
            table = [("  module", "style", "times")]
            table += [(f"  {path}", style, str(count)) for (path, style), count in rows.items()]
            lines += [columns(table, right=(2,)), ""]
        elif self.division.data == 1:
            lines.append(
                "  nothing is split: by the cost model it is fastest if every rank does everything"
            )
        for between, found, ranks in (
            ("", self.collectives, self.division.tensor),
            (" between replicas", self.replica_collectives, self.division.data),
        ):
            lines += [
                f"  {row['kind']}{between}: {row['count']} a step, "
                f"{format_bytes(row['sent_bytes'])} sent by each rank"
                for row in _rows(found, ranks)
            ]
        gap = "optimal" if self.is_optimal else f"at most {self.choice.gap:.2%} above the best"
        lines.append(f"  time of a step by the cost model: {self.choice.ns / 1e6:.3f} ms, {gap}")
        beside = "" if self.knows_kernels else " without what kernels allocate for themselves"
        lines.append(f"  memory of each rank, certified: {format_bytes(self.total_bytes)}{beside}")
        lines += [f"  no option: {what}, since {reason}" for what, reason in self.left_out.items()]
        return "\n".join(lines)


def _rows(collectives: Iterable[tuple[str, Collective]], ranks: int) -> list[dict[str, Any]]:
    """For each kind of collective: how many there are, and how many bytes each rank sends."""
    rows: dict[str, dict[str, Any]] = {}
    for _, one in collectives:
        row = rows.setdefault(one.kind, {"kind": one.kind, "count": 0, "sent_bytes": 0})
        row["count"] += 1
        row["sent_bytes"] += one.sent_bytes(ranks)
    return [rows[kind] for kind in sorted(rows)]
