"""Solves one integer program with CBC: a script that runs in a process of its own, started by
`bridge.py`.

It reads one line of JSON from standard input and writes one to standard output, then ends. It also
ends as soon as standard input is closed, whatever it is doing: so it never outlives the process
that started it. Time limits are the parent's matter too.

The question: ``lower``, ``upper``, ``cost``, ``integer`` (per column), ``rows`` (each ``[columns,
factors, sense, limit]``), ``start`` (a value per column) and ``nodes``. The answer is one of

- ``{"solved": {"values": [...], "bound": ...}}``: the search ended or its nodes were used up;
- ``{"unavailable": "why"}``: python-mip or CBC cannot be used here;
- ``{"failed": "why"}``.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

# A stop that comes for the whole group of processes is the parent's to act on.
signal.signal(signal.SIGINT, signal.SIG_IGN)

# The same code on every processor, so that the same program has the same answer. CBC looks for this
# when it is loaded.
BUILD = "generic"


# A solver that knows no bound calls it infinite: CBC by the largest float or by this.
_INFINITE = 1e50


class Unavailable(Exception):
    """The solver cannot be used here; says why."""


def cbc_model(question: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A CBC model with the question's columns and start, and these columns; it has no rows yet.

    Raises:
        Unavailable: python-mip or CBC cannot be used here.
    """
    try:
        import mip
        from mip import cbc
    except Exception as error:
        raise Unavailable(
            f"python-mip cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not cbc.has_cbc:
        raise Unavailable("python-mip cannot load CBC")
    model = mip.Model(sense=mip.MINIMIZE, solver_name=mip.CBC)
    model.verbose = 0
    model.max_mip_gap = 0.0
    model.seed = 1
    columns = [
        model.add_var(
            lb=lower, ub=upper, obj=cost, var_type=mip.INTEGER if integer else mip.CONTINUOUS
        )
        for lower, upper, cost, integer in zip(
            question["lower"], question["upper"], question["cost"], question["integer"], strict=True
        )
    ]
    model.start = [
        (column, float(value)) for column, value in zip(columns, question["start"], strict=True)
    ]
    return model, columns


def solve(question: dict[str, Any]) -> dict[str, Any]:
    """Answer one question, see the module."""
    model, columns = cbc_model(question)
    import mip

    for at, factors, sense, limit in question["rows"]:
        model.add_constr(
            mip.LinExpr(
                [columns[i] for i in at], [float(factor) for factor in factors], -limit, sense
            )
        )
    # Whole costs, so nothing between two whole numbers is worth a search; but never stop short of
    # the best.
    model.max_mip_gap_abs = 1e-9
    # Cuts take longer here than the nodes that they save.
    model.cuts = 0
    model.threads = 1

    status = model.optimize(max_nodes=question["nodes"])
    if status not in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE):
        return {"failed": f"CBC ended with {status.name.lower()}"}
    values = [column.x for column in columns]
    if any(value is None or not math.isfinite(value) for value in values):
        return {"failed": "CBC gave no values"}
    return {"solved": {"values": values, "bound": known(model.objective_bound)}}


def known(bound: float | None) -> float | None:
    """A solver's bound; ``None`` where it has none."""
    return bound if bound is not None and abs(bound) < _INFINITE else None


def _end_with_the_parent() -> None:
    """Wait until standard input is closed, then end at once."""
    while sys.stdin.buffer.read(1):
        pass
    os._exit(0)


def main(solve: Callable[[dict[str, Any]], dict[str, Any]] = solve) -> None:
    """Read the question, answer it, end."""
    # CBC prints what it likes to file descriptor 1; the answer goes out through a copy.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.environ["CBCBOX_BUILD"] = BUILD
    question = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        answer = solve(question)
    except Unavailable as error:
        answer = {"unavailable": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
        answer = {"failed": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()
    # Native libraries may hang or crash when they are torn down.
    os._exit(0)


if __name__ == "__main__":
    main()
