"""A report as one HTML page that needs no network: charts by Bokeh, tables by :mod:`.tables`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roam.errors import RoamError
from roam.report.anatomy import KINDS, Anatomy, Planned, run_lengths
from roam.report.table import UNITS, format_bytes, of_plans
from roam.report.tables import as_html

if TYPE_CHECKING:
    import os

    from bokeh.plotting import figure

    from roam._core import Operator, Tensor

MOST_RECTANGLES = 20_000
"""The most tensors in the map of the pool. If there are more, the largest are drawn."""
_MOST_POINTS = 20_000
"""The most points of a curve. If there are more, the highest of several neighbours is drawn."""
_ORDER_COLORS = ("#e08e0b", "#23a36f", "#2f86d6")
"""The colors of program order, of the plan without recomputation, and of the plan. They can be told
apart on white and on black, and by people who do not see red or green (after Okabe and Ito).
"""
_KIND_COLORS = {
    "activation": "#2f86d6", "gradient": "#e08e0b", "temporary": "#23a36f", "output": "#c96ba0",
    "input": "#56b4e9", "buffer": "#8d8d2b", "parameter": "#d55e00", "optimizer_state": "#7b6fd0",
}  # fmt: skip
_PHASE_COLORS = {
    "forward": "#2f86d6", "loss": "#c96ba0", "backward": "#e08e0b", "update": "#23a36f",
    "collective": "#7b6fd0",
}  # fmt: skip
_LINE = "#8a8a8a"
"""The color of bounds and limits."""


class ReportUnavailable(RoamError):
    """A library that reports are made with is not installed."""


def write_page(anatomy: Anatomy, path: str | os.PathLike[str]) -> None:
    """Writes the report to a file.

    Raises:
        ReportUnavailable: Bokeh is not installed (code ``report_unavailable``).
        OSError: the file cannot be written.
    """
    Path(path).write_text(page(anatomy), encoding="utf-8")


def page(anatomy: Anatomy) -> str:
    """The report as HTML.

    Raises:
        ReportUnavailable: Bokeh is not installed (code ``report_unavailable``).
    """
    try:
        from bokeh.embed import file_html
        from bokeh.resources import INLINE
        from jinja2 import Environment, PackageLoader
    except ImportError as error:
        raise ReportUnavailable(
            f"reports need Bokeh, which cannot be imported ({error}); "
            "pip install 'roam-torch[report]'",
            code="report_unavailable",
        ) from error
    axis = "operators started" if anatomy.planned.is_parallel else "operators run"
    curves, phases = _curves(anatomy), _phases(anatomy, axis)
    phases.x_range = curves.x_range
    pooled = list(_pooled(anatomy.planned))
    drawn = [curves, phases, *([_pool(anatomy.planned, pooled, axis)] if pooled else [])]
    template = Environment(loader=PackageLoader("roam.report", "."), autoescape=True).get_template(
        "page.html.jinja"
    )
    first, facts, *rest = [as_html(table) for table in anatomy.tables()]
    variables = {
        "headline": _headline(anatomy),
        "orders": dict(zip([c.name for c in anatomy.curves], _colors(anatomy), strict=True)),
        "levels": {name: dash for name, _, dash in _levels(anatomy)},
        "estimate": anatomy.planned.plan.estimate,
        "streams": anatomy.planned.plan.settings["streams"],
        "times": "time steps" if anatomy.planned.plan.time_steps is not None else "the cost model",
        "overview": first + facts,
        "tables": rest,
        "phase_colors": {
            name: color
            for name, color in _PHASE_COLORS.items()
            if any(name in curve.phases for curve in anatomy.curves)
        },
        "kind_colors": {
            kind.replace("_", " "): _KIND_COLORS[kind]
            for kind in KINDS
            if kind in {tensor.kind for tensor, _ in pooled}
        },
        "left_out": max(len(pooled) - MOST_RECTANGLES, 0),
        "most": MOST_RECTANGLES,
    }
    return file_html(  # type: ignore[no-any-return]
        drawn, INLINE, anatomy.title, template=template, template_variables=variables
    )


def _headline(anatomy: Anatomy) -> str:
    """The plan in a sentence."""
    values = anatomy.planned.values
    size, before = values["peak_bytes"], values["program_order_peak_bytes"]
    saved = f", {1 - size / before:.1%} less than in program order" if before else ""
    if anatomy.planned.runs_again:
        floor = values["recomputation"]["floor_bytes"]
        # No floor is known for plans that may also offload tensors.
        proof = (
            ""
            if floor is None
            else f"; no plan {of_plans(values)} takes less than {format_bytes(floor)} in all"
        )
    elif size == values["lower_bound_bytes"]:
        proof = "; no order takes less"
    else:
        proof = f"; no order takes less than {format_bytes(values['lower_bound_bytes'])}"
    return (
        f"The step takes {format_bytes(values['total_bytes'])} in all. Inside the step at most "
        f"{format_bytes(size)} are alive at once{saved}{proof}."
    )


def _unit(size_bytes: int) -> tuple[str, int]:
    """The unit of an axis, and how many bytes it is."""
    power = max(0, (max(size_bytes, 1).bit_length() - 1) // 10)
    return UNITS[power], 1024**power


def _figure(**settings: Any) -> figure:
    """A figure without colours of its own: those of its frame are the page's (see the template)."""
    from bokeh.plotting import figure

    made = figure(
        sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,box_zoom,undo,reset",
        output_backend="webgl",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        lod_threshold=None,
        **settings,
    )
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.toolbar_location = "above"
    made.xaxis.minor_tick_line_color = made.yaxis.minor_tick_line_color = None
    made.grid.grid_line_alpha = 0.6
    made.min_border_left, made.min_border_right = 70, 12
    return made


def _curves(anatomy: Anatomy) -> figure:
    """Live bytes over the step, one line for each order, with the bound and the limit."""
    from bokeh.models import HoverTool, NumeralTickFormatter, Span

    tops = [int(curve.live_bytes.max(initial=0)) for curve in anatomy.curves]
    unit, unit_bytes = _unit(max(tops))
    drawn = _figure(height=340, y_axis_label=f"live {unit}", name="curves")
    drawn.y_range.start = 0
    marks = []
    for curve, color in zip(anatomy.curves, _colors(anatomy), strict=True):
        at, live = _points(curve.live_bytes)
        drawn.step(
            at, live / unit_bytes, mode="after", color=color, line_width=1.8,
            name=f"curve: {curve.name}",
        )  # fmt: skip
        if len(curve.live_bytes):
            peak = int(curve.live_bytes.argmax())
            source = {
                "x": [peak], "y": [curve.live_bytes[peak] / unit_bytes], "order": [curve.name],
                "bytes": [f"{int(curve.live_bytes[peak]):,}"], "phase": [curve.phases[peak]],
            }  # fmt: skip
            marks.append(
                drawn.scatter(
                    "x", "y", source=source, size=9, color=color, name=f"peak: {curve.name}"
                )
            )
    for name, size_bytes, dash in _levels(anatomy):
        level = Span(
            location=size_bytes / unit_bytes, dimension="width", line_color=_LINE, line_dash=dash,
            line_width=2, name=f"level: {name}",
        )  # fmt: skip
        drawn.add_layout(level)
    tooltips = [("peak of", "@order"), ("step", "@x{0,0}"), ("bytes", "@bytes"), ("phase", "@phase")]  # fmt: skip
    drawn.add_tools(HoverTool(renderers=marks, tooltips=tooltips))
    drawn.xaxis.formatter = NumeralTickFormatter(format="0,0")
    return drawn


def _phases(anatomy: Anatomy, axis: str) -> figure:
    """One strip for each order: which phase runs when."""
    from bokeh.models import NumeralTickFormatter

    names = [curve.name for curve in anatomy.curves]
    drawn = _figure(
        height=52 + 26 * len(names), y_range=names[::-1], x_axis_label=axis,
        name="phases",
    )  # fmt: skip
    drawn.toolbar_location = None
    runs = [
        (curve.name, phase, start, end)
        for curve in anatomy.curves
        for phase, start, end in run_lengths(curve.phases)
    ]
    columns = zip(*runs, strict=True) if runs else ((), (), (), ())
    order, phase, left, right = (list(column) for column in columns)
    colors = [_PHASE_COLORS[one] for one in phase]
    source = {"y": order, "left": left, "right": right, "color": colors, "phase": phase}
    drawn.hbar(
        "y", left="left", right="right", height=0.6, color="color", line_color=None,
        source=source, name="runs",
    )  # fmt: skip
    drawn.xaxis.formatter = NumeralTickFormatter(format="0,0")
    drawn.ygrid.visible = False
    drawn.yaxis.major_label_text_font_size = "0px"
    drawn.yaxis.major_tick_line_color = None
    return drawn


def _pool(planned: Planned, pooled: list[tuple[Tensor, Operator]], axis: str) -> figure:
    """Which tensor has which addresses of the pool, and when."""
    from bokeh.models import HoverTool, NumeralTickFormatter

    unit, unit_bytes = _unit(planned.plan.pool_bytes)
    drawn = _figure(
        height=420, x_axis_label=axis, y_axis_label=f"address in the pool, {unit}",
        name="pool",
    )  # fmt: skip
    drawn.toolbar.tools = []
    drawn.add_tools("pan", "wheel_zoom", "box_zoom", "undo", "reset")
    pooled = sorted(pooled, key=lambda item: (-item[0].counted_bytes, item[0].id))
    tensors = [tensor for tensor, _ in pooled[:MOST_RECTANGLES]]
    makers = [maker for _, maker in pooled[:MOST_RECTANGLES]]
    numbers = np.array([tensor.id for tensor in tensors], dtype=np.int64)
    bottom = planned.plan.offsets[numbers] / unit_bytes
    top = bottom + planned.graph.tensor_counted_bytes[numbers] / unit_bytes
    sources = [f"{maker.file}:{maker.line}" if maker.file else "" for maker in makers]
    source = {
        "left": planned.lives.starts[numbers].astype(np.int32),
        "right": planned.lives.ends[numbers].astype(np.int32),
        "bottom": bottom,
        "top": top,
        "tensor": numbers.astype(np.int32),
        "color": [_KIND_COLORS[tensor.kind] for tensor in tensors],
        "kind": [tensor.kind.replace("_", " ") for tensor in tensors],
        "size": [f"{tensor.counted_bytes:,}" for tensor in tensors],
        "operator": [maker.name for maker in makers],
        "module": [maker.module for maker in makers],
        "line": sources,
    }
    quads = drawn.quad(
        "left", "right", "top", "bottom", source=source, fill_color="color", fill_alpha=0.85,
        line_color="#10151c", line_alpha=0.15, line_width=0.5, name="tensors",
    )  # fmt: skip
    tooltips = [
        ("bytes", "@size"), ("kind", "@kind"), ("made by", "@operator"), ("module", "@module"),
        ("line", "@line"), ("steps", "@left{0,0} to @right{0,0}"),
    ]  # fmt: skip
    drawn.add_tools(HoverTool(renderers=[quads], tooltips=tooltips, point_policy="follow_mouse"))
    drawn.xaxis.formatter = NumeralTickFormatter(format="0,0")
    return drawn


def _pooled(planned: Planned) -> Iterator[tuple[Tensor, Operator]]:
    """Each tensor of the pool that has bytes, with the operator that makes it."""
    graph = planned.graph
    for number in np.flatnonzero(planned.plan.offsets >= 0).tolist():
        creator = graph.creator(number)
        if creator is not None and graph.tensor(number).counted_bytes:
            yield graph.tensor(number), graph.operator(creator)


def _colors(anatomy: Anatomy) -> list[str]:
    program, plain, plan = _ORDER_COLORS
    return [program, plan] if anatomy.plain is None else [program, plain, plan]


def _levels(anatomy: Anatomy) -> list[tuple[str, int, str]]:
    """Horizontal lines: name, live bytes, and how the line is drawn."""
    values = anatomy.planned.values
    levels = [("lower bound", values["lower_bound_bytes"], "dashed")]
    if values["memory_limit_bytes"] is not None:
        live_bytes = values["memory_limit_bytes"] - values["persistent_bytes"]
        levels.append(("limit", live_bytes, "dotted"))
    return levels


def _points(live: Any) -> tuple[Any, Any]:
    """The steps at which a curve changes, and its values there and at its end."""
    if len(live) > _MOST_POINTS:
        width = -(-len(live) // _MOST_POINTS)
        padded = np.pad(live, (0, -len(live) % width), constant_values=0)
        highest = padded.reshape(-1, width).max(axis=1)
        at = np.arange(len(highest), dtype=np.int32) * width
    else:
        highest, at = live, np.arange(len(live), dtype=np.int32)
    if not len(live):
        return at, highest
    changes = np.concatenate([[True], highest[1:] != highest[:-1]])
    at, highest = at[changes], highest[changes]
    return np.append(at, np.int32(len(live))), np.append(highest, highest[-1])
