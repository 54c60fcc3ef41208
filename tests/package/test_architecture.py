"""Which part of the package may import which: one direction, no circles. Read off the import
statements.

Function-level imports count, and so do the modules that `roam` loads when a name is first looked up
and those that the bindings import by name. Imports for types alone (`if TYPE_CHECKING`) make no
circle, but follow the direction too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "roam"
BINDINGS = ROOT / "rust" / "roam-py" / "src"

LAYERS = (
    (
        "roam._core",
        "roam.own_code",
        "roam.errors",
        "roam.error_codes",
        "roam.interrupts",
        "roam.garbage",
        "roam.memory_limit",
        "roam.arguments",
        "roam.disk_cache",
        "roam.switch",
        "roam.processor",
    ),
    ("roam.torch_compat",),
    ("roam.state",),
    ("roam.distributed",),
    ("roam.program",),
    ("roam.kernels",),
    ("roam.tracing.source_location", "roam.tracing.cuda_estimate"),
    ("roam.tracing.fake_kernels",),
    ("roam.tracing.compiled", "roam.tracing.distributed"),
    ("roam.tracing.fakes",),
    ("roam.tracing.numbers",),
    ("roam.tracing.recording",),
    ("roam.tracing.stand_ins",),
    ("roam.tracing.endings",),
    ("roam.tracing.tracer",),
    ("roam.tracing.step",),
    ("roam.tracing.frontends",),
    ("roam.tracing", "roam.report", "roam.layout", "roam.exact"),
    ("roam.planner",),
    ("roam.runtime",),
    ("roam.sharding",),
    ("roam",),
    ("roam.zoo",),
    ("roam.commands",),
    ("roam.integrations",),
    ("roam.cli",),
    ("roam.__main__",),
)
"""From the lowest to the highest; a module may import those of its own layer's room and of lower
layers."""

EXCEPTIONS = {
    (
        "roam._core",
        "roam.exact",
    ): "a solve starts CBC's process, which python-mip can only be reached from",
}
"""(from, to): why."""


@dataclass(frozen=True, slots=True)
class Import:
    """One import of a module of roam's."""

    source: str
    target: str
    line: int
    for_types: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def module_files(package: Path) -> dict[str, Path]:
    """Each module's name and file."""
    files = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def imports_of(
    name: str, text: str, is_package: bool, modules: Mapping[str, object]
) -> Iterator[Import]:
    """All imports of a module's source of modules that there are."""

    def known(module: str) -> str | None:
        while module and module not in modules:
            module = module.rpartition(".")[0]
        return module or None

    def visit(node: ast.AST, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, True)
            for child in node.orelse:
                yield from visit(child, for_types)
            return
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, node.module] if node.module else parts)
            targets = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            targets = [str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant)]
        for target in targets:
            found = known(target)
            if found is not None and found != name:
                yield Import(name, found, getattr(node, "lineno", 0), for_types)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, for_types)

    yield from visit(ast.parse(text), False)


def loaded_later(text: str) -> list[str]:
    """The modules that `roam/__init__.py` names in `_LAZY`."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_LAZY":
            return sorted(set(ast.literal_eval(node.value).values()))
    raise AssertionError("roam/__init__.py has no _LAZY")


def imports_of_package(package: Path, bindings: Path) -> list[Import]:
    """All imports of the package, and those that the bindings make by name."""
    files = module_files(package)
    modules = {**files, "roam._core": None}
    found = []
    for name, file in files.items():
        found += imports_of(name, file.read_text(), file.name == "__init__.py", modules)
    found += [
        Import("roam", target, 0) for target in loaded_later((package / "__init__.py").read_text())
    ]
    for source in sorted(bindings.rglob("*.rs")):
        for number, line in enumerate(source.read_text().splitlines(), 1):
            found += [
                Import("roam._core", target, number)
                for target in re.findall(r'import\("(roam[\w.]*)"\)', line)
            ]
    return found


def layer_of(module: str) -> tuple[int, str]:
    """The layer that a module is in, and its room: the longest name in `LAYERS` that begins its
    own."""
    rooms = [(room, rank) for rank, layer in enumerate(LAYERS) for room in layer]
    room, rank = max(
        ((room, rank) for room, rank in rooms if module == room or module.startswith(room + ".")),
        key=lambda found: len(found[0]),
    )
    # What lies in `roam` itself and has no layer of its own would be the package's front, which
    # imports all others.
    assert room != "roam" or module == "roam", f"{module} is in no layer"
    return rank, room


def against_direction(imports: list[Import]) -> list[str]:
    """Imports of higher layers, or of another room of the same layer."""
    wrong = []
    for one in imports:
        if (one.source, one.target) in EXCEPTIONS:
            continue
        (own, room), (other, other_room) = layer_of(one.source), layer_of(one.target)
        if other > own or (other == own and room != other_room and own > 0):
            wrong.append(str(one))
    return wrong


def circles(imports: list[Import]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others. Tarjan's strongly
    connected components."""
    edges: dict[str, set[str]] = {}
    for one in imports:
        if not one.for_types and (one.source, one.target) not in EXCEPTIONS:
            edges.setdefault(one.source, set()).add(one.target)
            edges.setdefault(one.target, set())
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return imports_of_package(PACKAGE, BINDINGS)


def test_dependencies_go_one_way(imports: list[Import]) -> None:
    assert against_direction(imports) == []


def test_nothing_but_the_command_imports_the_benchmarks() -> None:
    named = [
        name for name, file in module_files(PACKAGE).items() if "roam_bench" in file.read_text()
    ]
    assert named == ["roam.cli"]


def test_no_modules_import_each_other(imports: list[Import]) -> None:
    assert circles(imports) == []


def test_every_exception_is_used(imports: list[Import]) -> None:
    assert {(one.source, one.target) for one in imports} >= EXCEPTIONS.keys()


def test_the_page_has_the_same_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (`roam[^|]*) \|", page, re.MULTILINE)
    assert tuple(tuple(re.findall(r"`([\w.]+)`", row)) for row in rows) == LAYERS


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("roam.state.discovery", "from roam.tracing.recording import recorder"),
        ("roam.program.ir", "def f():\n    import roam.runtime.compile"),
        ("roam.state.guards", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from roam.runtime.pool import Pool"),
        ("roam.report.table", "from roam import Graph"),
        ("roam.kernels.trial", "from importlib import import_module\nimport_module('roam.tracing.step')"),
        ("roam.report.table", "from ..runtime import pool"),
        ("roam.report.anatomy", "from roam.runtime.planned import planned_by"),
        ("roam.runtime.compile", "from roam.integrations import transformers"),
        ("roam.commands.fit", "from roam.cli import main"),
    ],
)  # fmt: skip
def test_a_planted_import_against_the_direction_is_found(
    imports: list[Import], source: str, text: str
) -> None:
    modules = {**module_files(PACKAGE), "roam._core": None}
    (planted,) = imports_of(source, text, False, modules)
    assert against_direction([*imports, planted]) == [str(planted)]


@pytest.mark.parametrize("is_in_function", [False, True])
def test_a_planted_circle_is_found(imports: list[Import], is_in_function: bool) -> None:
    text = "from roam.state.guards import Guards"
    text = f"def f():\n    {text}" if is_in_function else text
    modules = {**module_files(PACKAGE), "roam._core": None}
    (planted,) = imports_of("roam.state.reach", text, False, modules)
    assert against_direction([planted]) == []
    (circle,) = circles([*imports, planted])
    assert {"roam.state.reach", "roam.state.guards"} <= set(circle)


def test_a_planted_import_of_the_bindings_is_found(tmp_path: Path) -> None:
    (tmp_path / "planted.rs").write_text('    py.import("roam.runtime.compile")?;\n')
    found = imports_of_package(PACKAGE, tmp_path)
    assert against_direction(found) == ["roam._core:1 imports roam.runtime.compile"]
    assert circles(found)


def test_imports_for_types_make_no_circle() -> None:
    types = Import("roam.state.reach", "roam.state.guards", 1, for_types=True)
    back = Import("roam.state.guards", "roam.state.reach", 1)
    assert circles([types, back]) == []
