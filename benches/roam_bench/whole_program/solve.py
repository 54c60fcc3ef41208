"""Solves one large program by CBC or HiGHS under a time limit: a script that runs in a process of
its own, as `roam/exact/child.py` does.

The question has the fields of `linear.Program`, ``solver``, ``seconds`` and ``threads``; the answer
is ``{"solved": {...}}`` with the fields of `linear.Answer`, or as in `child.py`.
"""

from __future__ import annotations

from typing import Any

from roam.exact.child import Unavailable, cbc_model, known, main

#: Costs are whole, so nothing between two whole numbers is worth a search.
GAP = 0.999


def solve(question: dict[str, Any]) -> dict[str, Any]:
    """Answer one question, see the module."""
    return _highs(question) if question["solver"] == "highs" else _cbc(question)


def _cbc(question: dict[str, Any]) -> dict[str, Any]:
    model, columns = cbc_model(question)
    import mip

    begin = 0
    for end, sense, limit in zip(
        question["ends"], question["senses"], question["limits"], strict=True
    ):
        entries = range(begin, end)
        terms = (
            [columns[question["at"][i]] for i in entries],
            [float(question["factors"][i]) for i in entries],
        )
        model.add_constr(mip.LinExpr(*terms, -limit, sense))
        begin = end
    model.max_mip_gap_abs = GAP
    model.threads = question["threads"]
    status = model.optimize(max_seconds=question["seconds"])
    finished = status == mip.OptimizationStatus.OPTIMAL
    if not finished and status not in (
        mip.OptimizationStatus.FEASIBLE,
        mip.OptimizationStatus.NO_SOLUTION_FOUND,
    ):
        return {"failed": f"CBC ended with {status.name.lower()}"}
    values = [column.x for column in columns] if model.num_solutions else None
    return {
        "solved": {"values": values, "bound": known(model.objective_bound), "finished": finished}
    }


def _highs(question: dict[str, Any]) -> dict[str, Any]:
    try:
        import highspy
        import numpy as np
    except Exception as error:
        raise Unavailable(f"highspy cannot be imported: {type(error).__name__}: {error}") from error
    limits = np.array(question["limits"], dtype=np.float64)
    senses = np.array(question["senses"])
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(question["lower"]), len(limits)
    program.col_lower_, program.col_upper_, program.col_cost_ = (
        np.array(question[name], dtype=np.float64) for name in ("lower", "upper", "cost")
    )
    program.row_lower_ = np.where(senses == "<", -np.inf, limits)
    program.row_upper_ = np.where(senses == ">", np.inf, limits)
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.array([0, *question["ends"]], dtype=np.int32)
    program.a_matrix_.index_ = np.array(question["at"], dtype=np.int32)
    program.a_matrix_.value_ = np.array(question["factors"], dtype=np.float64)
    kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
    program.integrality_ = [kinds[integer] for integer in question["integer"]]
    highs = highspy.Highs()
    options = {
        "output_flag": False, "threads": question["threads"], "random_seed": 1, "time_limit": float(question["seconds"]),
        "mip_rel_gap": 0.0, "mip_abs_gap": GAP,
    }  # fmt: skip
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(program)
    start = highspy.HighsSolution()
    start.col_value = [float(value) for value in question["start"]]
    highs.setSolution(start)
    highs.run()
    status = highs.getModelStatus()
    finished = status == highspy.HighsModelStatus.kOptimal
    if not finished and status != highspy.HighsModelStatus.kTimeLimit:
        return {"failed": f"HiGHS ended with {highs.modelStatusToString(status)}"}
    found = highs.getInfo()
    has_values = found.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = list(highs.getSolution().col_value) if has_values else None
    return {
        "solved": {"values": values, "bound": known(found.mip_dual_bound), "finished": finished}
    }


if __name__ == "__main__":
    main(solve)
