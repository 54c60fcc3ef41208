"""Progress lines on standard error for work that takes longer than a second."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

_PATIENCE_S = 1.0
_TICK_S = 0.25


class Progress:
    """While the block runs, say what is being done and for how long, from the second second on.

    On a terminal one line is rewritten and removed at the end; elsewhere it is one plain line,
    printed once.
    """

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roam-progress", daemon=True)

    def _run(self) -> None:
        start = time.monotonic()
        if self._done.wait(_PATIENCE_S):
            return
        try:
            if not self._stream.isatty():
                self._stream.write(f"roam: {self._what} ...\n")
                self._stream.flush()
                return
            while True:
                self._stream.write(f"\rroam: {self._what}, {time.monotonic() - start:.0f} s\x1b[K")
                self._stream.flush()
                if self._done.wait(_TICK_S):
                    break
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        except (OSError, ValueError):
            # Nobody listens any more; the work itself goes on.
            return

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
