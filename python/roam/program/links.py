"""How long collectives take, by a model of the links between ranks.

It extends the planner's cost model (`rust/roam-core/src/cost.rs`): GPUs of a data centre, eight
in a machine, whose collectives use a ring of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from roam.distributed.collectives import Group, is_launch, wait
from roam.program.ir import Program, Ref

_ROUNDS = {"allreduce_": 2, "barrier": 2}
"""How often a collective goes round the ring, if that is more than once."""


@dataclass(frozen=True, slots=True)
class Links:
    """The links between ranks: fast ones within a machine, slower ones between machines.

    The defaults are four fifths of what the links of eight A100 GPUs can carry: NVLink within a
    machine (300 GB/s in each direction), and 200 Gbit/s of InfiniBand for each GPU.

    Attributes:
        machine_ranks: how many ranks with consecutive numbers share a machine.
        near_bytes_per_ns: the rate at which a rank sends within a machine, in bytes per nanosecond
            (GB/s).
        far_bytes_per_ns: the rate at which it sends to another machine.
        near_hop_ns: the latency of each round of the ring, in nanoseconds.
        far_hop_ns: the same between machines.
    """

    machine_ranks: int = 8
    near_bytes_per_ns: float = 240.0
    far_bytes_per_ns: float = 20.0
    near_hop_ns: int = 1_000
    far_hop_ns: int = 5_000

    def is_near(self, group: Group) -> bool:
        """Whether all members are on one machine."""
        return len({rank // self.machine_ranks for rank in group.ranks}) == 1

    def time_ns(self, kind: str, group: Group, size_bytes: int) -> int:
        """Nanoseconds of a collective that nothing else disturbs.

        Args:
            kind: the operator of `torch.ops.c10d`.
            group: whose it is.
            size_bytes: all of the result, or of what is reduced.
        """
        hops = _ROUNDS.get(kind, 1) * (group.size - 1)
        if hops == 0:
            return 0
        near = self.is_near(group)
        bytes_per_ns = self.near_bytes_per_ns if near else self.far_bytes_per_ns
        hop_ns = self.near_hop_ns if near else self.far_hop_ns
        return math.ceil(size_bytes * hops / group.size / bytes_per_ns) + hops * hop_ns


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective of a program.

    Attributes:
        launch: number of the call that launches it.
        wait: number of the call that waits for it.
        kind: the operator of `torch.ops.c10d`.
        group: whose it is.
        size_bytes: all of the result, or of what is reduced.
    """

    launch: int
    wait: int
    kind: str
    group: Group
    size_bytes: int


def transfers(program: Program) -> Iterator[Transfer]:
    """The collectives of a program, in the order of their waits."""
    launched: dict[int, int] = {}
    for number, call in enumerate(program.calls):
        if is_launch(call.target):
            (pending,) = call.outputs
            assert pending is not None, "a launch gives what is waited for"
            launched[pending] = number
        elif call.target is wait:
            first = launched[call.args[0].slot]
            launch = program.calls[first]
            sizes = [_bytes(program, refs) for refs in launch.args]
            kind, group = launch.target.kind, launch.target.group
            yield Transfer(first, number, kind, group, max(sizes, default=0))


def _bytes(program: Program, refs: list[Ref]) -> int:
    """Bytes of the elements of tensors."""
    metas = [program.slots[ref.slot] for ref in refs]
    return sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in metas if meta is not None)


def links_of(program: Program) -> dict[int, int]:
    """The number of the link that each launch goes over, by the launch's number. Every group has a
    link of its own.
    """
    known: dict[Group, int] = {}
    return {
        number: known.setdefault(call.target.group, len(known))
        for number, call in enumerate(program.calls)
        if is_launch(call.target)
    }


def times_ns(program: Program) -> dict[int, int]:
    """Nanoseconds of launches and waits by the model, by their numbers. A launch has the whole time
    of its collective, and a wait has 1 ns.
    """
    links, found = Links(), dict[int, int]()
    for one in transfers(program):
        found[one.launch] = max(links.time_ns(one.kind, one.group, one.size_bytes), 1)
        found[one.wait] = 1
    return found


__all__ = ["Links", "Transfer", "links_of", "times_ns", "transfers"]
