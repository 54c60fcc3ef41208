"""A process that solves one integer program, see `child.py`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

_SCRIPT = Path(__file__).with_name("child.py")


class Child:
    """Starts a process for one question. It never blocks, and raises no error if the process fails.

    Args:
        question: the question's JSON, without a line break.
        script: what the process runs, CBC as `child.py` has it where None.
    """

    def __init__(self, question: bytes, *, script: Path | None = None) -> None:
        self._answer: bytes | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if not sys.executable:
            self._answer = _say("unavailable", "this process does not know its Python interpreter")
            return
        # It finds python-mip where this process would.
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        try:
            self._process = subprocess.Popen(
                [sys.executable, str(script or _SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            self._answer = _say("unavailable", f"no process can be started: {error}")
            return
        # Pipes hold little, and a process that hangs does not empty them: so this happens apart.
        self._exchange = threading.Thread(
            target=self._talk, args=(self._process, question), name="roam-exact", daemon=True
        )
        self._exchange.start()

    @property
    def pid(self) -> int | None:
        """The process's number; None if none was started."""
        return None if self._process is None else self._process.pid

    def poll(self) -> bytes | None:
        """The answer's JSON, None while there is none."""
        return self._answer

    def close(self) -> None:
        """Kill the process if it still runs, and wait until nothing of it is left."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._exchange.join()
        for pipe in (self._process.stdin, self._process.stdout):
            # What could not be written to a dead process is lost.
            with contextlib.suppress(OSError):
                pipe and pipe.close()
        self._process = None

    def _talk(self, process: subprocess.Popen[bytes], question: bytes) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(question + b"\n")
            process.stdin.flush()
        # Standard input stays open: its end tells the process to end.
        answer = process.stdout.readline()
        if not answer.endswith(b"\n"):
            code = process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            answer = _say("failed", f"the solver's process {how}")
        self._answer = answer


def _say(kind: str, reason: str) -> bytes:
    return json.dumps({kind: reason}).encode()
