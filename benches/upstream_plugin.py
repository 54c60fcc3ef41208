"""A pytest plugin that runs the tests of other libraries with their training steps compiled by
roam: `python -m pytest -p upstream_plugin`, as `benches/upstream.py` does.

It puts three things into a test suite, which stays as it is on disk:

- `transformers.Trainer.train` and `lightning.Trainer.fit` compile the trainer or module first, by
  the integrations.
- A loop in a test or in its helpers whose body calls `backward` and an optimizer's `step` becomes
  a loop over a function of that body, which is compiled. So does the call of `step` in a loop that
  sets gradients by hand.
- Each test starts from the same seeds and leaves a *trace*: digests of what the trainings
  in it leave (weights, optimizer state, logs, results of each loop).

The variable ``UPSTREAM_MODE`` is ``plan`` or ``eager``. In eager mode the same places are
instrumented, and nothing is compiled. ``UPSTREAM_RECORD`` names the file to which each test adds a
line, ``UPSTREAM_ONLY`` a file with the tests to run, one id a line, and ``UPSTREAM_EVERY`` a
number: of so many tests one runs.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from _pytest.assertion import rewrite

import roam
from roam.errors import RoamError
from roam.runtime import Step

IS_PLANNED = os.environ.get("UPSTREAM_MODE") == "plan"
RECORD = os.environ.get("UPSTREAM_RECORD")
ONLY = os.environ.get("UPSTREAM_ONLY")
EVERY = int(os.environ.get("UPSTREAM_EVERY", "1"))
_MOST_TRACED = 10
"""How many calls of one loop's body are traced."""
_TIMES = ("runtime", "_per_second", "time", "flos", "memory")
"""What the names of logged values contain that differ between two runs."""


class _Seen:
    """What happens in the test that runs."""

    def __init__(self) -> None:
        self.calls = 0
        self.errors: list[RoamError] = []
        self.trace: list[str] = []


seen = _Seen()


# Traces


def _parts(value: Any, depth: int = 0) -> Iterator[bytes]:
    """What a digest is made of: tensors, numbers and texts in order; nothing of other objects."""
    if depth > 8:
        return
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if value.device.type != "meta" and value.layout == torch.strided:
            whole = value.detach().cpu().contiguous()
            yield whole.flatten().view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    elif isinstance(value, dict):
        for key, item in value.items():
            if not any(name in str(key) for name in _TIMES):
                yield str(key).encode()
                yield from _parts(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item, depth + 1)
    elif isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        yield from _parts(value.state_dict(), depth + 1)
    elif isinstance(value, (int, float, str, bool, type(None))):
        yield repr(value).encode()


def trace(*values: Any) -> None:
    """Adds a digest of values to the trace of the test."""
    digest = hashlib.sha256()
    try:
        for part in _parts(values):
            digest.update(part)
    except Exception as error:  # noqa: BLE001 - a test's own object that cannot be looked at
        digest.update(type(error).__name__.encode())
    seen.trace.append(digest.hexdigest()[:12])


# Trainers


_compiled: weakref.WeakSet[Any] = weakref.WeakSet()


def _once(holder: Any, compile: Callable[[Any], Any]) -> None:
    if IS_PLANNED and holder not in _compiled:
        _compiled.add(holder)
        compile(holder)


def _patch_transformers() -> None:
    import transformers

    train = transformers.Trainer.train

    def planned(self: Any, *args: Any, **kwargs: Any) -> Any:
        from roam.integrations.transformers import compile

        _once(self, compile)
        try:
            return train(self, *args, **kwargs)
        finally:
            trace(self.model, self.optimizer, self.state.log_history)

    transformers.Trainer.train = planned


def _patch_lightning() -> None:
    import lightning

    fit = lightning.Trainer.fit

    def planned(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from roam.integrations.lightning import compile

        if isinstance(model, lightning.LightningModule):
            _once(model, compile)
        try:
            return fit(self, model, *args, **kwargs)
        finally:
            trace(model, getattr(self, "optimizers", []), getattr(self, "logged_metrics", {}))

    lightning.Trainer.fit = planned


# Loops


class _Body:
    """The compiled body of one loop.

    Gradients are kept where the body has no backward pass: they are the test's own.
    """

    def __init__(self, body: Callable[..., Any], keep_grads: bool) -> None:
        self.body = body
        self.step = roam.compile(body, keep_grads=keep_grads) if IS_PLANNED else body
        self.traced = 0

    def __call__(self, *args: Any) -> Any:
        result = self.step(*args)
        if self.traced < _MOST_TRACED:
            self.traced += 1
            cells = self.body.__closure__ or ()
            trace(result, [cell.cell_contents for cell in cells if _is_set(cell)])
        return result


def _is_set(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


_ENDS = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Global,
         ast.Nonlocal, ast.Delete)  # fmt: skip
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def _own(nodes: list[Any]) -> Iterator[ast.AST]:
    """All nodes of statements except for those in functions and classes that they define."""
    for node in nodes:
        yield node
        if not isinstance(node, _SCOPES):
            yield from _own(list(ast.iter_child_nodes(node)))


def _step_of(body: list[ast.stmt]) -> slice:
    """Which of these statements train: those that call `backward` and `step`, or `step` with a
    closure, and what lies between them and before them; empty if none does. Where the loop sets
    gradients by hand, these are the calls of `step` and what lies between them.

    Statements without a call that come first stay outside, and all that come last, such as a
    test's assertions.
    """
    backward = [index for index, part in enumerate(body) if _calls([part], "backward")]
    steps = [index for index, part in enumerate(body) if _calls([part], "step")]
    if steps and not backward and _sets_gradients(body):
        return slice(min(steps), max(steps) + 1)
    if not steps or not (backward or any(call.args for call in _calls(body, "step"))):
        return slice(0, 0)
    first = next(index for index, part in enumerate(body) if _has_call(part))
    return slice(first, max(steps + backward) + 1)


def _calls(body: list[ast.stmt], method: str) -> list[ast.Call]:
    """The calls of such a method, of schedulers excepted."""
    return [
        node
        for node in _own(body)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
        and "sched" not in ast.dump(node.func)
    ]


def _sets_gradients(body: list[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Store)
        for node in _own(body)
    )


def _has_call(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Call) for node in _own([statement]))


class _Loops(ast.NodeTransformer):
    """Makes a function of the body of each loop that trains."""

    def __init__(self) -> None:
        self.functions: list[ast.AST] = []
        self.count = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self.functions.append(node)
        self.generic_visit(node)
        self.functions.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        outer, self.functions = self.functions, []
        self.generic_visit(node)
        self.functions = outer
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return node

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        return self._compiled(node, [name.id for name in _names([node.target], ast.Store)])

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        return self._compiled(node, [])

    def _compiled(self, loop: ast.For | ast.While, targets: list[str]) -> Any:
        part = _step_of(loop.body)
        body = loop.body[part]
        if not self.functions or not body:
            return loop
        own = list(_own(body))
        if any(isinstance(node, _ENDS) for node in own):
            return loop
        if any(isinstance(node, ast.Name) and node.id == "super" for node in own):
            return loop
        function = self.functions[-1]
        stored = dict.fromkeys(name.id for name in _names(body, ast.Store))
        if any(
            isinstance(node, (ast.Global, ast.Nonlocal))
            and not stored.keys().isdisjoint(node.names)
            for node in ast.walk(function)
        ):
            return loop
        inside = {id(name) for statement in body for name in ast.walk(statement)}
        read_outside = {
            name.id for name in _names([function], ast.Load, deep=True) if id(name) not in inside
        }
        first = _first_uses(body)
        read = {name.id for name in _names(body, ast.Load, deep=True)}
        set_before = [name.id for name in _names(loop.body[: part.start], ast.Store)]
        given = dict.fromkeys(name for name in (*targets, *set_before) if name in read)
        given.update((name, None) for name in stored if isinstance(first[name], ast.Load))
        kept = [name for name in stored if name in read_outside or name in given]
        self.count += 1
        made, step = f"__upstream_body_{self.count}", f"__upstream_step_{self.count}"
        arguments = ast.arguments([], [ast.arg(name) for name in given], None, [], [], None, [])
        leaves = ast.Tuple([ast.Name(name, ast.Load()) for name in kept], ast.Load())
        definition = ast.FunctionDef(
            made, arguments, [*body, ast.Return(leaves)], [], type_params=[]
        )
        keeps = _sets_gradients(loop.body) and not _calls(body, "backward")
        wrapped = ast.parse(f"{step} = __import__('upstream_plugin')._Body({made}, {keeps})").body
        call = ast.Call(
            ast.Name(step, ast.Load()), [ast.Name(name, ast.Load()) for name in given], []
        )
        results = ast.Tuple([ast.Name(name, ast.Store()) for name in kept], ast.Store())
        loop.body[part] = [ast.Assign([results], call) if kept else ast.Expr(call)]
        return [ast.copy_location(part, loop) for part in (definition, *wrapped, loop)]


def _names(nodes: list[Any], context: type[Any], *, deep: bool = False) -> list[ast.Name]:
    every = (child for node in nodes for child in ast.walk(node)) if deep else _own(nodes)
    return [n for n in every if isinstance(n, ast.Name) and isinstance(n.ctx, context)]


def _first_uses(body: list[ast.stmt]) -> dict[str, Any]:
    """For each name, whether the first use in order of evaluation reads or sets it."""
    first: dict[str, Any] = {}

    def look(node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            first.setdefault(node.id, node.ctx)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            look(node.value)
            first.setdefault(node.target.id, ast.Load())
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            if node.value is not None:
                look(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                look(target)
        elif isinstance(node, ast.For):
            for part in (node.iter, node.target, *node.body, *node.orelse):
                look(part)
        else:
            for child in ast.iter_child_nodes(node):
                look(child)

    for statement in body:
        look(statement)
    return first


def _patch_loops(root: Path) -> None:
    """Has pytest rewrite loops where it rewrites assertions: in tests, and in all that lies beside
    them.
    """
    asserts = rewrite.rewrite_asserts
    should = rewrite.AssertionRewritingHook._should_rewrite

    def rewritten(module: ast.Module, *args: Any, **kwargs: Any) -> None:
        ast.fix_missing_locations(_Loops().visit(module))
        asserts(module, *args, **kwargs)

    def beside(self: Any, name: str, fn: str, state: Any) -> bool:
        return should(self, name, fn, state) or root in Path(fn).resolve().parents

    rewrite.rewrite_asserts = rewritten
    rewrite.AssertionRewritingHook._should_rewrite = beside  # type: ignore[method-assign]


# Hooks of pytest


def pytest_configure(config: pytest.Config) -> None:
    sys.dont_write_bytecode = True  # pytest would keep rewritten loops beside the tests
    _patch_loops(Path(config.rootpath).resolve())
    if importlib.util.find_spec("transformers"):
        _patch_transformers()
    if importlib.util.find_spec("lightning"):
        _patch_lightning()
    call = Step.__call__

    def counted(self: Step, *args: Any, **kwargs: Any) -> Any:
        try:
            result = call(self, *args, **kwargs)
        except RoamError as error:
            seen.errors.append(error)
            raise
        seen.calls += 1
        return result

    Step.__call__ = counted  # type: ignore[method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = items[::EVERY]
    if ONLY:
        wanted = set(Path(ONLY).read_text(encoding="utf-8").splitlines())
        others = [item for item in items if item.nodeid not in wanted]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.nodeid in wanted]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global seen
    seen = _Seen()
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    report = yield
    is_end = call.when == "call" or (call.when == "setup" and report.outcome != "passed")
    if RECORD and is_end:
        error = call.excinfo.value if call.excinfo else None
        found = [*_refusals(error), *seen.errors[-1:]]
        line = {
            "test": item.nodeid,
            "outcome": report.outcome,
            "calls": seen.calls,
            "code": found[0].code if found else "",
            "error": f"{type(error).__name__}: {error}"[:400] if error is not None else "",
            "refusal": str(found[0])[:400] if found else "",
            "trace": seen.trace,
        }
        with Path(RECORD).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return report


def _refusals(error: BaseException | None) -> Iterator[RoamError]:
    """Roam's errors among an exception and those from which it comes."""
    while error is not None:
        if isinstance(error, RoamError):
            yield error
        error = error.__cause__ or error.__context__
