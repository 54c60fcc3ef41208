"""Changes of a tensor's state at the boundary of a module, and the collectives that DTensor runs
for each in the forward and in the backward pass.
"""

from __future__ import annotations

from roam.sharding.costs import Collective
from roam.sharding.rules import SPREAD, WHOLE, State

PARTIAL = -3
"""Each rank has an addend of the value, as a row-wise style makes it before it is reduced."""


def transition(
    before: State, after: State, size_bytes: int, is_differentiable: bool
) -> tuple[Collective, ...] | None:
    """Collectives of a change of state, forward and backward; None if no style makes it.

    Args:
        before: the state before the change: outside of the module for its input, inside of it for
            its output.
        after: the state on the other side of the boundary.
        size_bytes: bytes of the whole tensor.
        is_differentiable: whether a gradient comes back, whose state has to change in the other
            direction. The gradient of a `SPREAD` tensor may be a sum over ranks.
    """
    if before == after and before != PARTIAL:
        return ()
    found = _FORWARD.get((_kind(before), _kind(after)))
    if found is None:
        return None
    forward, backward = found
    kinds = forward if not is_differentiable else (*forward, *backward)
    return tuple(Collective(kind, size_bytes) for kind in kinds)  # type: ignore[arg-type]


def _kind(state: State) -> str:
    return {WHOLE: "whole", SPREAD: "spread", PARTIAL: "partial"}.get(state, "part")


_FORWARD: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("whole", "spread"): ((), ("all_reduce",)),
    ("whole", "part"): ((), ("all_gather",)),
    ("part", "whole"): (("all_gather",), ()),
    ("part", "spread"): (("all_gather",), ("reduce_scatter",)),
    ("part", "part"): (("all_to_all",), ("all_to_all",)),
    ("spread", "part"): ((), ("all_gather",)),
    ("partial", "whole"): (("all_reduce",), ()),
    ("partial", "part"): (("reduce_scatter",), ("all_gather",)),
}
"""The collectives of the forward and of the backward pass, by the states before and after."""
