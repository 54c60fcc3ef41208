"""The log of compiled steps, `logging.getLogger("roam")` and its child `roam.replans`."""

from __future__ import annotations

import logging


class _TextAndNumbers(logging.Filter):
    """Makes text of what a record names, so that a record that is kept keeps no plan or model."""

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        record.args = tuple(arg if isinstance(arg, (int, float)) else str(arg) for arg in args)
        return True


logger = logging.getLogger("roam")
replans = logging.getLogger("roam.replans")
"""One line for each call after the first that no plan fits, with what keeps the plans from it."""
for _one in (logger, replans):  # a logger's filters are not asked for its children's records
    _one.addFilter(_TextAndNumbers())
