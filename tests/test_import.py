"""``import roam`` is cheap: no framework, no solver, and next to no time on top of NumPy's own
import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BUDGET_S = 0.1


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_roam_loads_no_framework_and_no_solver() -> None:
    assert (
        run("import sys, roam; print(sorted({'torch', 'mip', 'transformers'} & set(sys.modules)))")
        == "[]"
    )


def test_importing_roam_is_fast() -> None:
    code = "import time, numpy; start = time.perf_counter(); import roam; print(time.perf_counter() - start)"
    # The least of a few: a busy machine can only add to it.
    assert min(float(run(code)) for _ in range(5)) < BUDGET_S


def test_public_names_resolve_in_any_order() -> None:
    for first in ("capture", "compile", "fake"):
        code = f"import roam; roam.{first}; print(all(callable(getattr(roam, n)) for n in ('capture', 'compile', 'fake')))"
        assert run(code) == "True", first
    # Loading the subpackage on its own must not hide the function of the same name.
    assert run("import roam, roam.capture.step; print(callable(roam.capture))") == "True"


def test_every_public_name_exists() -> None:
    assert run("import roam; print([n for n in roam.__all__ if not hasattr(roam, n)])") == "[]"
    assert run("import roam; print(hasattr(roam, 'no_such_name'))") == "False"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="every module gets a fork")
def test_every_module_can_be_the_first_to_be_imported() -> None:
    """No module of the package needs another one to have been imported before."""
    code = """
import contextlib, importlib, os, pkgutil, sys, roam
names = [module.name for module in pkgutil.walk_packages(roam.__path__, "roam.") if module.name != "roam._core"]
# What they import of other packages is imported here, once.
reads, writes = os.pipe()
if not os.fork():
    list(map(importlib.import_module, names))
    with os.fdopen(writes, "w") as pipe:
        pipe.write(" ".join(name for name in sys.modules if name.partition(".")[0] != "roam"))
    os._exit(0)
os.close(writes)
for name in os.fdopen(reads).read().split():
    with contextlib.suppress(Exception):
        importlib.import_module(name)
wrong = []
for name in names:
    child = os.fork()
    if not child:
        importlib.import_module(name)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        wrong.append(name)
print(len(names) > 40, "torch" in sys.modules, wrong)
"""
    assert run(code) == "True True []"
