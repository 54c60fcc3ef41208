"""What `roam.parallelize` gives back."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from roam._core import Plan
from roam.report.folding import folded
from roam.report.table import columns, format_bytes
from roam.sharding.costs import Collective, Costs
from roam.sharding.nodes import Node
from roam.sharding.search import Choice
from roam.sharding.styles import Style, apply_styles
from roam.sharding.trace import Trace


@dataclass(slots=True)
class Seconds:
    """How long each stage took, in seconds.

    Attributes:
        trace: of one process's step on fakes.
        rules: to ask DTensor for its rules and to write down all options.
        search: for the choices, and their bounds.
        check: to apply them, and to trace a rank's step.
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
        mesh_dim_names: of the dimensions.
        styles: by the path of a module, what `parallelize_module` is given for it.
        plan: of one rank's step, verified; its `total_bytes` is what the step takes on each rank.
        choice: what the search found; `ns` is the time of a step by the model, `bound_ns` a lower
            bound of that time for all choices.
        seconds: that each stage took.
    """

    mesh_shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...]
    styles: dict[str, Style]
    trace: Trace
    nodes: tuple[Node, ...]
    choice: Choice
    plan: Plan
    costs: Costs
    seconds: Seconds

    @property
    def total_bytes(self) -> int:
        """The memory that a step takes on each rank, parameters and state included."""
        return self.plan.total_bytes

    @property
    def is_optimal(self) -> bool:
        """Whether no choice takes less time by the model."""
        return self.choice.ns == self.choice.bound_ns

    @property
    def collectives(self) -> list[tuple[str, Collective]]:
        """What ranks do together in a step: the path of the module, and the collective."""
        return [
            (node.path, one)
            for node, option in zip(self.nodes, self.choice.options, strict=True)
            for one in option.collectives
        ]

    @property
    def parallelize_plan(self) -> dict[str, Any]:
        """Styles for `torch.distributed.tensor.parallel.parallelize_module`, by path."""
        return {path: style.make() for path, style in self.styles.items()}

    def apply(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        mesh: Any = None,
    ) -> torch.nn.Module:
        """Splits a model like the one that was planned, by `parallelize_module`, on every rank.

        Each parameter that is split gets rank 0's values. All ranks must have the same values of
        the others, as after the same seed or from one checkpoint.

        Args:
            model: changed, and returned.
            optimizer: over its parameters, without state yet: gets the new ones in their place.
                Without it, make the optimizer afterwards.
            mesh: of as many ranks as were planned for; of all processes if None.

        Raises:
            ValueError: the mesh has another shape, or the optimizer has state.
        """
        from torch.distributed.device_mesh import init_device_mesh

        if optimizer is not None and optimizer.state:
            raise ValueError("the optimizer has state already; apply before the first step")
        if mesh is None:
            device = next((one.device.type for one in model.parameters()), "cpu")
            mesh = init_device_mesh(device, self.mesh_shape, mesh_dim_names=self.mesh_dim_names)
        if tuple(mesh.shape) != self.mesh_shape:
            raise ValueError(f"the mesh has the shape {tuple(mesh.shape)}, not {self.mesh_shape}")
        before = dict(model.named_parameters(remove_duplicate=False))
        apply_styles(model, mesh, self.styles)
        if optimizer is not None:
            after = dict(model.named_parameters(remove_duplicate=False))
            new = {id(parameter): after[name] for name, parameter in before.items()}
            for group in optimizer.param_groups:
                group["params"] = [new.get(id(one), one) for one in group["params"]]
        return model

    def figures(self) -> dict[str, Any]:
        """Everything that is printed, as plain values: bytes, seconds, and text."""
        ranks = self.mesh_shape[0]
        return {
            "mesh": list(self.mesh_shape),
            "styles": {path: str(style) for path, style in self.styles.items()},
            "step_ns": self.choice.ns,
            "bound_ns": self.choice.bound_ns,
            "gap": self.choice.gap,
            "is_optimal": self.is_optimal,
            "is_folded": self.choice.is_folded,
            "nodes": self.choice.nodes,
            "folded_nodes": self.choice.folded_nodes,
            "collectives": [
                {"kind": kind, "count": count, "sent_bytes": sent}
                for kind, (count, sent) in sorted(self._sums(ranks).items())
            ],
            "total_bytes": self.plan.total_bytes,
            "bound_bytes": self.plan.total_lower_bound_bytes,
            "seconds": asdict(self.seconds),
        }

    def _sums(self, ranks: int) -> dict[str, tuple[int, int]]:
        counts: Counter[str] = Counter()
        sent: Counter[str] = Counter()
        for _, one in self.collectives:
            counts[one.kind] += 1
            sent[one.kind] += one.sent_bytes(ranks)
        return {kind: (counts[kind], sent[kind]) for kind in counts}

    def __str__(self) -> str:
        (ranks,) = self.mesh_shape
        rows: dict[tuple[str, str], int] = {}
        for path, style in self.styles.items():
            key = folded(path), str(style)
            rows[key] = rows.get(key, 0) + 1
        lines = [f"Sharding over {ranks} ranks"]
        if rows:
            table = [("  module", "style", "times")]
            table += [(f"  {path}", style, str(count)) for (path, style), count in rows.items()]
            lines += [columns(table, right=(2,)), ""]
        else:
            lines.append(
                "  nothing is split: by the model of time, a step is fastest if every rank has the whole model"
            )
        for kind, (count, sent) in sorted(self._sums(ranks).items()):
            lines.append(f"  {kind}: {count} a step, {format_bytes(sent)} sent by each rank")
        gap = "optimal" if self.is_optimal else f"at most {self.choice.gap:.2%} above the best"
        lines.append(f"  time of a step by the model: {self.choice.ns / 1e6:.3f} ms, {gap}")
        lines.append(f"  memory of each rank, certified: {format_bytes(self.plan.total_bytes)}")
        return "\n".join(lines)
