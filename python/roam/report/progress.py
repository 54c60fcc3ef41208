"""Progress lines on standard error for work that takes longer than a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TextIO

_PATIENCE_S = 1.0
_TICK_S = 0.25


class Progress:
    """While the block runs, say what is being done and for how long, from the second second on.

    On a terminal and in a notebook one line is rewritten and removed at the end; elsewhere it is
    one plain line, printed once.

    Args:
        what: what is being done, or a function that tells it, which may be called at any time and
            on another thread.
        stream: where to say it; standard error if None.
        only_live: whether to say nothing except on a terminal or in a notebook.
    """

    def __init__(
        self,
        what: str | Callable[[], str],
        stream: TextIO | None = None,
        *,
        only_live: bool = False,
    ) -> None:
        self._what = what if callable(what) else partial(str, what)
        found: TextIO | None = sys.stderr if stream is None else stream
        self._is_live = _is_live(found)
        self._done = threading.Event()
        self._thread = None
        if found is not None and (self._is_live or not only_live):
            self._thread = threading.Thread(
                target=self._run, args=(found,), name="roam-progress", daemon=True
            )

    def _run(self, stream: TextIO) -> None:
        start = time.monotonic()
        if self._done.wait(_PATIENCE_S):
            return
        try:
            if not self._is_live:
                stream.write(f"roam: {self._what()} ...\n")
                stream.flush()
                return
            width = 0
            while True:
                line = f"roam: {self._what()}, {time.monotonic() - start:.0f} s"
                # Blanks, not an escape sequence, which notebooks show.
                stream.write(f"\r{line:{width}}")
                stream.flush()
                width = len(line)
                if self._done.wait(_TICK_S):
                    break
            stream.write(f"\r{'':{width}}\r")
            stream.flush()
        except (OSError, ValueError):
            # Nobody listens any more; the work itself goes on.
            return

    def __enter__(self) -> Progress:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()


def _is_live(stream: TextIO | None) -> bool:
    """Whether a line on it can be rewritten: on a terminal, and in a notebook's cell."""
    try:
        if stream is None:  # a process without a console
            return False
        return stream.isatty() or type(stream).__module__.partition(".")[0] == "ipykernel"
    except (AttributeError, OSError, ValueError):  # not quite a stream, or a closed one
        return False
