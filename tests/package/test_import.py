"""``import roam`` is cheap: no framework, no solver, and next to no time on top of NumPy's own
import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sweeps import EVERY

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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="every order gets a fork")
def test_public_names_resolve_in_any_order() -> None:
    code = """
import os, torch
def ask(code):
    child = os.fork()
    if not child:
        import roam
        exec(code)
        os._exit(not all(callable(getattr(roam, n)) for n in ("capture", "compile", "fake")))
    return os.waitpid(child, 0)[1]
print([
    code
    for code in (
        "roam.capture", "roam.compile", "roam.fake",
        # Loading the subpackage on its own must not hide the function of the same name.
        "import roam.tracing.step",
    )
    if ask(code)
])
"""
    assert run(code) == "[]"


def test_every_public_name_exists() -> None:
    assert run("import roam; print([n for n in roam.__all__ if not hasattr(roam, n)])") == "[]"
    assert run("import roam; print(hasattr(roam, 'no_such_name'))") == "False"


@pytest.mark.sweep
@pytest.mark.skipif(not hasattr(os, "fork"), reason="every module gets a fork")
def test_every_module_can_be_the_first_to_be_imported() -> None:
    """No module of the package needs another one to have been imported before."""
    code = f"""
import ast, contextlib, gc, importlib, os, pkgutil, sys, roam
modules = [module for module in pkgutil.walk_packages(roam.__path__, "roam.") if module.name != "roam._core"]
names = [module.name for module in modules]
# What they import of other packages is imported here, once.
for module in modules:
    source = module.module_finder.find_spec(module.name).loader.get_source(module.name)
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            others = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            others = [node.module, *(node.module + "." + alias.name for alias in node.names)]
        else:
            continue
        for other in others:
            if other.partition(".")[0] != "roam":
                with contextlib.suppress(Exception):
                    importlib.import_module(other)
gc.disable()  # a collection would write to all that a fork shares with this process
wrong = []
for name in names[::{EVERY}]:
    child = os.fork()
    if not child:
        importlib.import_module(name)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        wrong.append(name)
print(len(names) > 40, "torch" in sys.modules, wrong)
"""
    assert run(code) == "True True []"
