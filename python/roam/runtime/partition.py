"""Cuts a joint graph of AOTAutograd into forward and backward so that both keep within one memory
limit.

A plan of the whole graph decides what the forward pass leaves to the backward pass
(`roam.tracing.frontends.joint`). When the two graphs run, each is planned again by itself. So the
cut is tried, and made again with a lower limit for the whole until plans of both are found.
"""

from __future__ import annotations

from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch.fx import GraphModule

from roam import _core
from roam._core import Graph, Plan
from roam.errors import CaptureError, PlanError
from roam.kernels.calls import placed_calls
from roam.memory_limit import MemoryLimit
from roam.runtime.available import known_limit
from roam.runtime.first_run import copied_bytes, extra_bytes, generator_bytes
from roam.torch_compat.private import keeping_equal_nodes
from roam.tracing.frontends.compiled_blocks import with_compiled_blocks
from roam.tracing.frontends.fx import Lowered
from roam.tracing.frontends.joint import Joint, held_bytes

_SHARES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4)
"""Shares of the limit. The plan of the whole graph gets one after another, until the plans of its
parts keep within the limit.
"""


class Partition:
    """The limit of one graph of Dynamo's and how it is cut.

    Attributes:
        limits: by phase, the most that a run of its graph may take in all. Before a joint graph is
            cut, and for graphs without a backward pass, what the caller asked for.
    """

    def __init__(self, memory: MemoryLimit, *, pool: bool, compiles_blocks: bool = False) -> None:
        self._memory = memory
        self._pool = pool
        self._compiles_blocks = compiles_blocks
        self.limits: dict[str, MemoryLimit] = {"forward": memory, "backward": memory}

    def __call__(
        self,
        module: GraphModule,
        inputs: Any,
        *,
        num_fwd_outputs: int,
        **settings: Any,
    ) -> tuple[GraphModule, GraphModule]:
        """What a partitioner of AOTAutograd does.

        Raises:
            CaptureError: the graph cannot be planned exactly, so nothing can be promised.
            PlanError: no plans within the limit were found (code ``memory_limit_not_found``), or
                there are none (code ``memory_floor``).
        """
        try:
            joint = Joint(module, num_fwd_outputs, pool=self._pool)
        except CaptureError as error:
            if error.code != "fx_symbolic":
                raise
            raise CaptureError(
                f"{error}; a memory limit needs fixed shapes: call torch.compile with "
                "dynamic=False",
                code=error.code,
            ) from None
        plain = _planned(joint.graph)
        checks_bytes = generator_bytes(torch.device(joint.graph.device))
        limit_bytes = self._limit_bytes(joint.graph, plain.total_bytes + checks_bytes)
        left_bytes = max(limit_bytes - checks_bytes, 1)
        last: tuple[PlanError, int] | None = None
        for share in _SHARES:
            try:
                plan = _planned(joint.graph, int(share * left_bytes))
            except PlanError as error:
                refused = last or (error, checks_bytes)
                raise self._refusal(*refused, limit_bytes, plain) from None
            joint.mark(plan)
            with keeping_equal_nodes():
                forward, backward = min_cut_rematerialization_partition(
                    module, inputs, num_fwd_outputs=num_fwd_outputs, **settings
                )
            held = held_bytes(forward, backward, num_fwd_outputs)
            last = self._fault(self._lowered(forward), 0, limit_bytes) or self._fault(
                self._lowered(backward, forward), held, limit_bytes
            )
            if last is not None:
                continue
            self.limits = {
                "forward": MemoryLimit(size_bytes=limit_bytes),
                "backward": MemoryLimit(size_bytes=limit_bytes - held),
            }
            return forward, backward
        assert last is not None, "each share was tried"
        raise self._refusal(*last, limit_bytes, plain)

    def _limit_bytes(self, graph: Graph, plain_bytes: int) -> int:
        known = known_limit(self._memory, torch.device(graph.device), graph.persistent_bytes)
        return known.in_bytes(plain_bytes)

    def _fault(
        self, part: Lowered, held_bytes: int, limit_bytes: int
    ) -> tuple[PlanError, int] | None:
        """Plans a part within the limit, with what is held beside it and what the checked first
        run of its plan takes besides. That run also keeps what a compiled region would free, and
        copies of what it changes.

        Returns:
            None if there is a plan. Otherwise why not, and how much of the limit is for what the
            plan does not contain.

        Raises:
            PlanError: planning failed for a reason that is not the limit.
        """
        device = torch.device(part.graph.device)
        placed = placed_calls(part.program, device)
        beside_bytes = held_bytes + extra_bytes(part.program, placed, device) + part.saved_bytes
        beside_bytes += copied_bytes(part.program)
        try:
            _planned(part.graph, max(limit_bytes - beside_bytes, 1))
        except PlanError as error:
            if not error.code.startswith("memory_"):
                raise
            return error, beside_bytes
        return None

    def _lowered(self, module: GraphModule, forward: GraphModule | None = None) -> Lowered:
        """A part, with what kernels allocate for themselves; what a backward pass is given by the
        forward pass alone dies in it.
        """
        given = module.graph.find_nodes(op="placeholder")
        dying: set[str] = set()
        if forward is not None:
            held = {node.name for node in forward.graph.find_nodes(op="placeholder")}
            dying = {
                node.name
                for node in given
                if node.name not in held and "tangents" not in str(node.target)
            }
        if self._compiles_blocks:
            module = with_compiled_blocks(module, [node.meta["val"] for node in given])
        return Lowered.of(module, dying=dying, asks_kernels=True, pool=self._pool)

    def _refusal(
        self, error: PlanError, beside_bytes: int, limit_bytes: int, plain: Plan
    ) -> PlanError:
        if not error.code.startswith("memory_"):
            return error
        return PlanError(
            f"forward and backward within {limit_bytes} bytes: the checks of a plan's first run, and "
            f"what is alive beside the plan, take {beside_bytes} of them. For the rest, {error}. "
            f"Without recomputation both passes take {plain.total_bytes} bytes, without the checks. "
            "Pass memory= of at least what is needed plus the bytes of the checks, or take a "
            "smaller batch",
            code=error.code,
            operator=error.operator,
            position=error.position,
            source=error.source,
        )


def _planned(graph: Graph, memory_limit_bytes: int | None = None) -> Plan:
    return _core.optimize(graph, exact="off", memory_limit_bytes=memory_limit_bytes)
