"""``import roam`` is cheap: no framework, no solver, and next to no time on top of NumPy's own import."""

from __future__ import annotations

import subprocess
import sys

BUDGET_S = 0.1


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_roam_loads_no_framework_and_no_solver() -> None:
    assert run("import sys, roam; print(sorted({'torch', 'mip', 'transformers'} & set(sys.modules)))") == "[]"


def test_importing_roam_is_fast() -> None:
    code = "import time, numpy; start = time.perf_counter(); import roam; print(time.perf_counter() - start)"
    # The least of a few: a busy machine can only add to it.
    assert min(float(run(code)) for _ in range(5)) < BUDGET_S


def test_public_names_resolve_in_any_order() -> None:
    for first in ("capture", "compile", "fake"):
        code = (
            f"import roam; roam.{first}; print(all(callable(getattr(roam, n)) for n in ('capture', 'compile', 'fake')))"
        )
        assert run(code) == "True", first
    # Loading the subpackage on its own must not hide the function of the same name.
    assert run("import roam, roam.capture.guards; print(callable(roam.capture))") == "True"


def test_every_public_name_exists() -> None:
    assert run("import roam; print([n for n in roam.__all__ if not hasattr(roam, n)])") == "[]"
    assert run("import roam; print(hasattr(roam, 'no_such_name'))") == "False"
