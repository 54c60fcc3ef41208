"""Everything that roam raises on purpose.

All errors derive from :class:`RoamError`, except :class:`PlanningInterrupted` and
:class:`PackingInterrupted`. Besides its message, an error says where it happened, if that is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from roam._core import Packing, Plan

__all__ = [
    "CaptureError",
    "ExecutionError",
    "FormatError",
    "GraphError",
    "LayoutError",
    "PackingInterrupted",
    "PlanError",
    "PlanningInterrupted",
    "RoamError",
    "SolverUnavailable",
]


UNKNOWN_LINE: Final = "unknown line"
"""What messages say where the user's line is not known."""


class RoamError(Exception):
    """Something that roam could not do, or refused to do.

    Attributes:
        code: the kind of fault, in snake case and stable between versions, for example ``"cycle"``;
            empty if there is none.
        operator: name of the operator at fault, or None.
        position: that operator's place in program order, or None.
        source: ``"file:line"`` of the user's code that the operator comes from, followed by
            ``" in MODULE"`` if a module of the model was running; None if the line is not known.
    """

    code: str
    operator: str | None
    position: int | None
    source: str | None

    def __init__(
        self,
        message: str = "",
        *,
        code: str = "",
        operator: str | None = None,
        position: int | None = None,
        source: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.operator = operator or None
        self.position = position
        self.source = None if source is None or source.startswith(UNKNOWN_LINE) else source


class GraphError(RoamError, ValueError):
    """A graph is not a valid training step."""


class FormatError(RoamError, ValueError):
    """A file or text is not a graph, a plan or buffers in the documented form."""


MOST_SETTLING: Final = 8
"""How many calls in a row may set something up, each for another mode or shape."""


class CaptureError(RoamError):
    """A training step cannot be captured as it is.

    Attributes:
        path: where the step reaches the value at fault, such as ``"self.history[0]"``, or None.
        settles: how many calls in a row the user's own function may run until the step can be
            captured, like a step that sets something up at its first calls; 0 if it never can.
    """

    path: str | None = None
    settles: int = 0


class PlanError(RoamError):
    """A graph cannot be planned as asked, or a plan does not fit its graph.

    Attributes:
        least_bytes: where a memory limit is refused, the least limit that may be enough: the floor,
            or what the smallest plan takes that was found. None if neither is known.
        floor_bytes: where a memory limit is refused, what no plan of whole operators takes less
            than, if that is proved.
        tiles_floor_bytes: what no plan takes less than with the tiles that were tried.
    """

    least_bytes: int | None = None
    floor_bytes: int | None = None
    tiles_floor_bytes: int | None = None


def continued(error: PlanError, more: str) -> PlanError:
    """An error with one more sentence."""
    result = PlanError(
        f"{error}. {more}",
        code=error.code,
        operator=error.operator,
        position=error.position,
        source=error.source,
    )
    result.least_bytes, result.floor_bytes = error.least_bytes, error.floor_bytes
    result.tiles_floor_bytes = error.tiles_floor_bytes
    return result


class LayoutError(RoamError, ValueError):
    """Buffers cannot be packed as asked, or a packing does not fit its buffers."""


class PackingInterrupted(KeyboardInterrupt):
    """Ctrl-C ended the search for a packing.

    Attributes:
        packing: the best packing so far, verified.
    """

    packing: Packing

    def __init__(self, packing: Packing) -> None:
        super().__init__("packing was interrupted")
        self.packing = packing


class PlanningInterrupted(KeyboardInterrupt):
    """Ctrl-C ended the search for a plan.

    Attributes:
        plan: the best plan so far, verified and no worse than program order.
    """

    plan: Plan

    def __init__(self, plan: Plan) -> None:
        super().__init__("planning was interrupted")
        self.plan = plan


class ExecutionError(RoamError):
    """A planned step could not run, or failed while it ran."""


class SolverUnavailable(RoamError):
    """Integer programs were required, and their solver is missing, does not work here or has
    failed.
    """
