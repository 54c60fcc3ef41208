"""The site's generator: Sphinx with MyST, so that pages stay plain Markdown. `make docs` builds it
into target/site.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from pygments.lexers.special import TextLexer

import roam

project = "roam"
author = "the roam contributors"
version = release = roam.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["conf.py"]

# Every unresolved name is a warning, and `make docs` makes warnings errors.
nitpicky = True
nitpick_ignore_regex = [
    # Annotations of private aliases (`_Numbers`, `_Path`) and of packages without an inventory
    # here.
    ("py:.*", r"(.*\.)?_\w+"),
    ("py:.*", r"(torch|numpy|np|collections|typing|types|fractions|os)\b.*"),
    # Types of attributes of `Sharding`, of which its docstring says what is of use.
    ("py:class", r"roam\.sharding\.(styles\.Style|search\.Choice|result\.Seconds)"),
]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]

html_theme = "furo"
html_title = f"roam {release}"
html_static_path: list[str] = []
html_theme_options = {
    "source_repository": "https://github.com/roam-torch/roam/",
    "source_branch": "main",
    "source_directory": "docs/",
}
html_copy_source = False
html_show_copyright = False

copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_rtype = False


# The compiled module's docstrings are short; those of its stub say all.
_STUB = Path(roam.__file__).with_name("_core.pyi")
_RENAMED = {"roam.layout.verify": "verify_packing"}
_COLON = "\ue000"


def _stub_docstrings() -> dict[str, str]:
    """Every docstring of the stub, by qualified name."""
    found: dict[str, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                if text := ast.get_docstring(child):
                    found[prefix + child.name] = text
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(_STUB.read_text(encoding="utf-8")), "")
    return found


_DOCSTRINGS = _stub_docstrings()


def _before_napoleon(
    app: Any, what: str, name: str, object_: object, options: Any, lines: list[str]
) -> None:
    """The stub's text. A property's is prose, where napoleon takes what stands before a colon for a
    type; stars are no markup.
    """
    if (getattr(object_, "__module__", None) or "roam._core") in (
        "roam",
        "roam._core",
        "roam.layout",
    ):
        stub = _DOCSTRINGS.get(
            _RENAMED.get(name, name.removeprefix("roam.layout.").removeprefix("roam."))
        )
        if stub is not None:
            lines[:] = stub.splitlines()
    if what in ("property", "attribute") and lines:
        lines[0] = lines[0].replace(": ", f"{_COLON} ")
    lines[:] = [re.sub(r"\*args, \*\*kwargs:", r"\\*args, \\*\\*kwargs:", line) for line in lines]


def _after_napoleon(
    app: Any, what: str, name: str, object_: object, options: Any, lines: list[str]
) -> None:
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_lexer("csv", TextLexer)
    app.connect("autodoc-process-docstring", _before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", _after_napoleon, priority=600)
