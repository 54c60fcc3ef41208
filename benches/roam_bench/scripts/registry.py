"""Training scripts, each as the documentation of its library or the tutorial has it, in a size that
trains in seconds.

A script is a function that builds its own data, model and optimizer, and takes one argument:
`wrap`, which is put around its step functions. It is `roam.compile`, or the identity for the eager
run; nothing else differs. It returns everything that a user could look at afterwards: what the
steps returned, modules, optimizers, schedulers, scalers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Body = Callable[[Wrap], Any]

FAMILIES = (
    "basics", "language", "vision", "generative", "flows", "contrastive", "reinforcement", "meta", "sequences", "tabular", "tricks",
    "huggingface", "libraries", "graphs",
)  # fmt: skip
"""Modules of this package that hold scripts."""


@dataclass(frozen=True, slots=True)
class Script:
    """One script.

    Attributes:
        family: the module that it is in.
        name: tells it from all others.
        after: the tutorial, example or documentation that it follows.
        needs: libraries beside torch, without which it is left out.
        body: what runs it.
    """

    family: str
    name: str
    after: str
    needs: tuple[str, ...]
    body: Body


_scripts: dict[str, Script] = {}


def script(after: str, *needs: str) -> Callable[[Body], Body]:
    """Registers a function as a script, under its own name."""

    def register(body: Body) -> Body:
        name = body.__name__.strip("_")
        assert name not in _scripts, name
        _scripts[name] = Script(body.__module__.rpartition(".")[2], name, after, needs, body)
        return body

    return register


def scripts() -> Iterator[Script]:
    """All of them, family by family; their libraries are imported when they run."""
    for family in FAMILIES:
        importlib.import_module(f"roam_bench.scripts.{family}")
    yield from sorted(_scripts.values(), key=lambda one: FAMILIES.index(one.family))
