"""The outcome of a sweep: the shares of its steps that were equal to eager PyTorch, refused,
different or broken.

Rows of such a sweep have an ``outcome``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from roam_bench.results import Record
from roam_bench.run import Column, Table

EXIT_DIFFERENT = 5
"""Exit code where some step left other bits than eager PyTorch."""


def outcomes_table(
    record: Record, title: str, group: str, items: str, outcomes: Sequence[str]
) -> Table:
    """Count the rows of each group by outcome.

    Args:
        record: The sweep's results.
        title: Of the table.
        group: The field of a row by which rows are grouped; also the heading of the first column.
        items: Heading of the column that counts a group's rows.
        outcomes: Those that have a column, from left to right.
    """
    counts: dict[str, Counter[str]] = {}
    for row in record["rows"]:
        counts.setdefault(row[group], Counter())[row["outcome"]] += 1

    def count(outcome: str) -> Column:
        return Column(outcome, lambda row: str(row["counts"][outcome]))

    columns = (
        Column(group, lambda row: row[group], right=False),
        Column(items, lambda row: str(row["counts"].total())),
        *map(count, outcomes),
    )
    return Table(title, columns, [{group: name, "counts": found} for name, found in counts.items()])


def outcomes_line(record: Record, items: str) -> str:
    """Count all rows by outcome, in a line of text."""
    counts = Counter(row["outcome"] for row in record["rows"])
    found = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return f"{len(record['rows'])} {items}: {found}"


def exit_code(record: Record) -> int:
    """:data:`EXIT_DIFFERENT` where some row is ``different``, else 0."""
    return EXIT_DIFFERENT if any(row["outcome"] == "different" for row in record["rows"]) else 0
