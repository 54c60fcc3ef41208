"""The log of compiled steps, `logging.getLogger("roam")`."""

from __future__ import annotations

import logging


class _TextAndNumbers(logging.Filter):
    """Makes text of what a record names, so that a record that is kept keeps no plan or model."""

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        record.args = tuple(arg if isinstance(arg, (int, float)) else str(arg) for arg in args)
        return True


logger = logging.getLogger("roam")
logger.addFilter(_TextAndNumbers())
