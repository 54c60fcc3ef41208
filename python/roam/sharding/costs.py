"""The cost model by which shardings are compared.

An operator takes as long as moving its bytes or computing its floating-point operations takes,
whichever is longer, plus the time to launch it; its backward pass takes twice as long. A collective
takes a fixed time, plus the time to send the bytes that each rank sends in a ring algorithm.
Nothing overlaps. The constants decide which plan is called faster, not whether a plan is right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Link:
    """What connects the ranks along one mesh dimension.

    Attributes:
        latency_ns: nanoseconds from the launch of a collective without data to its end.
        bytes_per_ns: the rate at which a rank sends, while it receives at the same rate.
        exchanges: whether its backend has `all_to_all`; gloo has none.
    """

    latency_ns: int = 15_000
    bytes_per_ns: float = 200.0
    exchanges: bool = True


@dataclass(frozen=True, slots=True)
class Costs:
    """Constants of the cost model; by default those of NVIDIA A100s that NVLink connects.

    Attributes:
        flops_per_ns: floating-point operations that a device computes in a nanosecond.
        bytes_per_ns: bytes that it moves from and to its memory.
        launch_ns: nanoseconds for launching a kernel.
        links: per mesh dimension.
        link: for mesh dimensions that `links` does not name.
    """

    flops_per_ns: float = 19_500.0
    bytes_per_ns: float = 1_555.0
    launch_ns: int = 2_000
    links: tuple[Link, ...] = ()
    link: Link = field(default_factory=Link)

    def link_of(self, dimension: int) -> Link:
        """What connects the ranks along a mesh dimension."""
        return self.links[dimension] if dimension < len(self.links) else self.link

    def run_ns(self, flops: float, moved_bytes: float) -> int:
        """Nanoseconds of one kernel."""
        taken_ns = max(flops / self.flops_per_ns, moved_bytes / self.bytes_per_ns)
        return self.launch_ns + round(taken_ns)


@dataclass(frozen=True, slots=True)
class Collective:
    """What the ranks of one mesh dimension do together.

    `size_bytes` is that of the whole tensor: what an all-gather makes, what a reduce-scatter and an
    all-reduce are given, what an all-to-all exchanges the parts of.
    """

    kind: Kind
    size_bytes: int

    def sent_bytes(self, ranks: int) -> int:
        """Bytes that each rank sends."""
        share = self.size_bytes * (ranks - 1) // ranks
        if self.kind == "all_reduce":
            return 2 * share
        return share // ranks if self.kind == "all_to_all" else share

    def ns(self, link: Link, ranks: int) -> int:
        """Nanoseconds that it takes."""
        return link.latency_ns + round(self.sent_bytes(ranks) / link.bytes_per_ns)


def total_ns(collectives: Iterable[Collective], link: Link, ranks: int) -> int:
    """Nanoseconds of collectives, one after another."""
    return sum(one.ns(link, ranks) for one in collectives)
