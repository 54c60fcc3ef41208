"""Tables for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from roam.report.figures import Place

_SAVED = (("ordering", "order"), ("reuse", "reuse"))
_WIDTH = 110
"""Characters in a line of running text."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_bytes(size_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1, with two decimals: ``1536`` is
    ``1.50 KiB``.
    """
    value, unit = float(size_bytes), 0
    while abs(value) >= 1024 and unit + 1 < len(UNITS):
        value, unit = value / 1024, unit + 1
    return f"{size_bytes} B" if unit == 0 else f"{value:.2f} {UNITS[unit]}"


def columns(rows: Iterable[tuple[str, ...]], right: tuple[int, ...] = ()) -> str:
    """Rows of text as aligned columns; those numbered in ``right`` are aligned to the right."""
    cells = list(rows)
    if not cells:
        return ""
    widths = [
        max(len(row[index]) for row in cells if index < len(row))
        for index in range(max(map(len, cells)))
    ]
    lines = []
    for row in cells:
        padded = (
            text.rjust(widths[index]) if index in right else text.ljust(widths[index])
            for index, text in enumerate(row)
        )
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def estimate_rows(estimate: str) -> Iterator[tuple[str, str]]:
    """What the figures may be wrong about, a row for each line; none where they are exact."""
    for number, line in enumerate(textwrap.wrap(estimate, _WIDTH)):
        yield "" if number else "estimate", line


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%} of that peak" if whole else ""


def _streams(values: Mapping[str, Any]) -> str:
    makespan_s, serial_s = values["makespan_s"], values["serial_s"]
    speed = serial_s / makespan_s if makespan_s else 1.0
    how = (
        f"{values['syncs']:,} waits"
        if values["stream_model"] == "happens_before"
        else "in time steps, not to be run"
    )
    return (
        f"{values['streams']}, {how}; {speed:.2f} times as fast as one stream, by the cost model "
        f"({makespan_s * 1e3:.3f} ms; at least {values['critical_path_s'] * 1e3:.3f} ms on any number)"
    )


def of_plans(values: Mapping[str, Any]) -> str:
    """Which plans within a limit the bounds of a plan are of."""
    return "of whole operators" if values["cuts"] is None else "with the same tiles"


def _recomputation(again: Mapping[str, Any], of: str) -> str:
    step_s = again["step_s"]
    extra = again["extra_s"] / step_s if step_s else 0.0
    if again["least_extra_s"] is None:
        return (
            f"{again['runs']:,} extra runs, and {format_bytes(again['offloaded_bytes'])} that are "
            f"offloaded, take {extra:.1%} of the step's time"
        )
    least = again["least_extra_s"] / step_s if step_s else 0.0
    return (
        f"{again['runs']:,} extra runs take {extra:.1%} of the step's time; no plan {of} "
        f"within the limit takes less than {least:.1%}"
    )


def curve_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """What recomputation costs at each of several memory limits, a line each."""
    cells = [("share", "limit", "total", "extra time", "at least", "extra runs", "")]
    for row in rows:
        again = row["recomputation"]
        share, limit = f"{row['share']:.0%}", format_bytes(row["memory_limit_bytes"])
        if row["error"] is not None:
            cells.append((share, limit, "", "", "", "", row["error"]))
            continue
        step_s = again["step_s"] if again else 0.0
        extra, least = (
            again[name] / step_s if step_s else 0.0 for name in ("extra_s", "least_extra_s")
        )
        runs = again["runs"] if again else 0
        total = format_bytes(row["total_bytes"])
        cells.append((share, limit, total, f"{extra:.1%}", f"{least:.1%}", f"{runs:,}", ""))
    return columns(cells, right=(0, 1, 2, 3, 4, 5))


def figure_rows(values: Mapping[str, Any]) -> list[tuple[str, str, int, str]]:
    """What a plan costs, a line each: label, name of the figure, bytes, and what they mean.

    Args:
        values: what :func:`roam.report.figures` returns.
    """
    program = values["program_order_peak_bytes"]

    def row(label: str, name: str, note: str) -> tuple[str, str, int, str]:
        return label, name, values[name], note

    again = values["recomputation"]
    saved = [(f"saved by {way}", f"saved_by_{key}_bytes") for way, key in _SAVED]
    proof = values["bound_route"].replace("_", " ")
    rows = [
        row(
            "peak in program order",
            "program_order_peak_bytes",
            "the most alive at once inside the step, in eager PyTorch's order",
        ),
        *(
            row(label, name, _share(values[name], program))
            for label, name in saved
            if values[name] is not None
        ),
        row("peak", "peak_bytes", "the same by the plan"),
        row("lower bound of the peak", "lower_bound_bytes", f"no order has a lower peak ({proof})"),
        row(
            "pool",
            "pool_bytes",
            f"one static block; {values['fragmentation']:.2%} fragmentation",
        ),
        row(
            "unpooled",
            "outside_bytes",
            "the most alive at once inside the step and not in the pool",
        ),
        row("persistent", "persistent_bytes", "parameters, buffers, optimizer state, the batch"),
        row("total", "total_bytes", "persistent + pool + unpooled"),
        row(
            "lower bound of the total",
            "total_lower_bound_bytes",
            "no plan has a smaller total"
            if again is None
            else "no plan with the same extra runs has a smaller total",
        ),
    ]
    if again is not None:
        plain, floor = again["plain_total_bytes"], again["floor_bytes"]
        rows += [
            row("limit", "memory_limit_bytes", "the most that the plan may take"),
            ("without limit", "plain_total_bytes", plain, "total if every operator runs once"),
        ]
        if floor is not None:
            note = f"no plan {of_plans(values)} takes less, however often operators run"
            rows.append(("floor", "floor_bytes", floor, note))
    return rows


def fact_rows(values: Mapping[str, Any], place: Place | None) -> list[tuple[str, str]]:
    """What there is to say of a plan apart from bytes: topic and text."""
    again = values["recomputation"]
    facts = [*estimate_rows(values["estimate"])]
    # Within a limit, the search ends as soon as a plan keeps to it.
    if again is None:
        status = values["status"].replace("_", " ")
        gap = f"{values['gap']:.2%} above the lower bound of pool + unpooled ({status})"
        facts.append(("gap", gap))
    facts.append(("verified", "yes" if values.get("verified") else "no"))
    if again is not None:
        facts.append(("recomputation", _recomputation(again, of_plans(values))))
    if values["streams"] > 1:
        facts.append(("streams", _streams(values)))
    exact = values["exact"]
    if exact["status"] in ("used", "no_answer", "unavailable", "too_large"):
        lost = exact["failed"] + exact["timed_out"]
        used = f"{exact['programs']} solved, {exact['gains']} of use" + (
            f", {lost} lost" if lost else ""
        )
        said = {
            "used": used,
            "no_answer": f"{exact['programs']} begun, all lost: {exact['reason'] or 'out of time'}",
            "unavailable": f"none: {exact['reason']}",
            "too_large": "none: they would be too large",
        }
        facts.append(("integer programs", said[exact["status"]]))
    if place is not None:
        facts.append(("at the peak", f"step {place.step:,}: {place}"))
    times = [(name, values.get(f"{name}_s")) for name in ("capture", "plan", "verify")]
    spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times if seconds is not None)
    if spent:
        facts.append(("time", spent))
    return facts


def plan_table(title: str, values: Mapping[str, Any], place: Place | None) -> str:
    """The figures of one plan, a line each: bytes exactly, in a readable unit, and what they mean.

    ``values`` is what :func:`roam.report.figures` returns; ``capture_s``, ``plan_s`` and
    ``verify_s`` are shown if given.
    """

    def row(label: str, size_bytes: int, note: str) -> tuple[str, ...]:
        return label, f"{size_bytes:,}", format_bytes(size_bytes), note

    rows = [row(label, size_bytes, note) for label, _, size_bytes, note in figure_rows(values)]
    for other in values.get("baselines", ()):
        total = values["persistent_bytes"] + other["pool_bytes"] + other["outside_bytes"]
        above = (
            f"total, {total / values['total_bytes'] - 1:+.1%} compared with the plan's"
            if values["total_bytes"]
            else "total"
        )
        rows.append(row(f"{other['order']}, {other['layout']}", total, above))
    facts = fact_rows(values, place)
    heading = f"{title}: {values['operators']:,} operators, {values['tensors']:,} tensors"
    return "\n".join([heading, "", columns(rows, right=(1, 2)), "", columns(facts), ""])
