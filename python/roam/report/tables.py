"""Tables of figures, in the one form from which the terminal, notebooks and the page draw them."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from typing import TextIO

from roam.report.table import columns, format_bytes

_BREAKS = re.compile(r"([/._])(?=[A-Za-z_\[])")
"""Where a path may go on in the next line."""
_WIDTH = 160
"""Columns of a table that does not go to a terminal."""


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of bytes, which is shown in a readable unit.

    Attributes:
        size_bytes: the exact number.
        name: which figure it is, for programs that read the page; empty if it needs no name.
    """

    size_bytes: int
    name: str = ""

    def __str__(self) -> str:
        return format_bytes(self.size_bytes)


@dataclass(frozen=True, slots=True)
class Count:
    """A number of things."""

    value: int

    def __str__(self) -> str:
        return f"{self.value:,}"


Cell = str | Amount | Count


@dataclass(frozen=True, slots=True)
class Table:
    """A table of figures.

    Attributes:
        title: what it shows.
        headings: the headings of the columns.
        rows: cells, as many as headings.
        note: what a reader has to know about it; may be empty.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    right: tuple[bool, ...] = field(init=False)
    """For each column, whether it holds numbers, which are aligned to the right."""

    def __post_init__(self) -> None:
        right = tuple(
            any(isinstance(row[index], (Amount, Count)) for row in self.rows)
            for index in range(len(self.headings))
        )
        object.__setattr__(self, "right", right)


def as_text(table: Table) -> str:
    """The table in aligned columns of plain text."""
    right = tuple(index for index, is_number in enumerate(table.right) if is_number)
    rows = [table.headings, *(tuple(map(str, row)) for row in table.rows)]
    parts = [table.title, "", columns(rows, right)]
    return "\n".join([*parts, *(["", table.note] if table.note else [])]) + "\n"


def print_tables(tables: Iterable[Table], stream: TextIO | None = None) -> None:
    """Prints tables: with `rich` if it is installed, and otherwise in plain columns."""
    stream = sys.stdout if stream is None else stream
    if importlib.util.find_spec("rich") is None:
        stream.write("\n".join(map(as_text, tables)) + "\n")
        stream.flush()
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=stream, width=None if stream.isatty() else _WIDTH, highlight=False)
    for table in tables:
        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading, is_number in zip(table.headings, table.right, strict=True):
            drawn.add_column(
                heading,
                justify="right" if is_number else "left",
                overflow="fold",
                no_wrap=is_number,
            )
        for row in table.rows:
            drawn.add_row(*(Text(str(cell)) for cell in row))
        # A table's own title would be broken at the table's width.
        console.print(Text(table.title, style="bold"), drawn)
        if table.note:
            console.print(Text(table.note), end="\n\n")


def as_html(table: Table) -> str:
    """The table as HTML; every number carries its exact value (`<data value=...>`)."""

    def shown(cell: Cell) -> str:
        if isinstance(cell, Amount):
            name = f' data-name="{escape(cell.name)}"' if cell.name else ""
            title = f' title="{cell.size_bytes:,} bytes"'
            return f'<data value="{cell.size_bytes}"{name}{title}>{escape(str(cell))}</data>'
        if isinstance(cell, Count):
            return f'<data value="{cell.value}">{escape(str(cell))}</data>'
        return _BREAKS.sub(r"\1<wbr>", escape(cell))

    def line(cells: Iterable[str], tag: str) -> str:
        made = (
            f"<{tag}{' class=number' if is_number else ''}>{cell}</{tag}>"
            for cell, is_number in zip(cells, table.right, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    head = line(map(escape, table.headings), "th") if any(table.headings) else ""
    body = "\n".join(line(map(shown, row), "td") for row in table.rows)
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>{note}"
