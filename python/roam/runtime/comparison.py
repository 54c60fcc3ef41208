"""`roam.compare`: whether a training step gives the same bits by its plan as in eager PyTorch, and
if not, what differs first.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Literal

import torch

from roam._core import __version__
from roam.distributed.ddp import is_before_first_step, leave_first_step
from roam.errors import CaptureError, ExecutionError, RoamError
from roam.interrupts import interrupts_wait
from roam.runtime.compile import Step
from roam.runtime.divergence import DifferentOperator, digest, eager_values, first_different
from roam.state.arguments import argument_path, flatten_with_paths
from roam.state.containers import MappingSpace
from roam.state.discovery import reach_of
from roam.state.equality import MISSING, is_numpy_array, is_plain, same, show
from roam.state.freed_gradients import noted
from roam.state.global_flags import Switches
from roam.state.nests import flattened
from roam.state.optimizer_spaces import LIVE_OPTIMIZER_KEYS
from roam.state.reach import Reach
from roam.state.snapshot import Snapshot, random_sources
from roam.state.wrappers import Form, is_faked, is_wrapper, parts_of
from roam.switch import is_disabled
from roam.torch_compat.private import c_pointer, local_of, pytree
from roam.tracing.step import refuse_shapeless

Outcome = Literal["equal", "different", "refused", "failed", "undecided"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first value that differs.

    Attributes:
        step: the step after which it differs, counted from 1.
        path: where the value is, for example ``model.weight``, ``model.weight.grad``,
            ``optimizer.state[model.weight]['exp_avg']``, or the name of a random generator. A path
            in what the step returned begins with ``result``.
        eager, planned: the value after the eager step and after the one by plan, in words.
        max_abs_difference: the largest difference of two elements; None if the values are not
            tensors of one shape.
        elements: how many elements have other bits; None likewise.
    """

    step: int
    path: str
    eager: str
    planned: str
    max_abs_difference: float | None = None
    elements: int | None = None

    def __str__(self) -> str:
        text = f"after step {self.step}, {self.path} differs: {self.eager} eagerly, {self.planned} by plan"
        if self.elements is not None:
            text += f"; {self.elements} elements have other bits, by {self.max_abs_difference:g} at most"
        return text


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found. Printed, it is what a bug report should hold.

    Attributes:
        outcome: ``"equal"``; ``"different"``; ``"refused"``, if the step cannot be captured
            exactly; ``"failed"``, if running by plan raised an error; ``"undecided"``, if the step
            raises eagerly too, or if eager PyTorch gives other bits when it is run again.
        steps: how many steps were asked for.
        compared: by kind of value, how many were compared after each step that was compared.
        difference: the first value that differs; None if none does.
        operator: the first operator of that step that made a value which the eager step did not
            make; None if there is none, or if none can be named.
        error: what was raised.
        versions: of roam, PyTorch and Python, and the platform.
        freed_gradients: how many gradients the last step compared has left in eager PyTorch, and
            the plan has freed.
    """

    outcome: Outcome
    steps: int
    compared: dict[str, int]
    difference: Difference | None
    operator: DifferentOperator | None
    error: Exception | None
    versions: str
    freed_gradients: int = 0

    @property
    def equal(self) -> bool:
        """Whether every value had the same bits after every step."""
        return self.outcome == "equal"

    def __str__(self) -> str:
        lines = [f"roam.compare, {self.steps} steps: {self.outcome}", self.versions]
        if self.compared:
            counts = ", ".join(f"{count:,} {kind}" for kind, count in self.compared.items())
            lines.append(f"compared after each step: {counts}")
        if self.freed_gradients:
            lines.append(
                f"gradients that the plan has freed, which keep_grads=True keeps: {self.freed_gradients:,}"
            )
        if self.difference is not None:
            lines.append(str(self.difference))
        if self.operator is not None:
            lines.append(str(self.operator))
        if self.error is not None:
            code = (
                f" [{self.error.code}]"
                if isinstance(self.error, RoamError) and self.error.code
                else ""
            )
            lines.append(f"{type(self.error).__name__}{code}: {self.error}")
        return "\n".join(lines)


def compare(
    train_step: Callable[..., Any], *args: Any, steps: int = 3, **kwargs: Any
) -> Comparison:
    """Runs a training step eagerly and by its plan from the same start, and says whether everything
    that it returns and changes has the same bits.

    After every step this compares what the step returned and everything that it reaches:
    parameters, buffers, gradients, optimizer and scheduler state, loss scales, plain Python values,
    random generators. Only a gradient that the plan has freed early may be missing: that of a
    tensor which the step has changed, or which an optimizer of the step has among its parameters.
    With ``keep_grads=True`` of `roam.compile` none may. Afterwards everything is as it was before
    the call, however the comparison ends. Effects outside of the step's objects (files, logs)
    happen each time the step runs.

    It needs memory for one more copy of all tensors that the step reaches.

    Args:
        train_step: the user's function, or what `roam.compile` made of it, whose options then hold.
        *args, **kwargs: what it is called with, the same at every step.
        steps: how many steps.

    Returns:
        What was found. Print it, or test its ``equal``.

    Raises:
        ExecutionError: the step cannot run by plan, because the tensors are fakes, or because of
            ``ROAM_DISABLE=1`` or `roam.disabled`.

    Example:
        >>> print(roam.compare(train_step, model, optimizer, tokens))
        >>> assert roam.compare(train_step, model, optimizer, tokens).equal
    """
    if not isinstance(steps, int) or steps < 1:  # type: ignore[redundant-expr]
        raise ValueError(f"steps must be a whole number of at least 1, not {steps!r}")
    if is_disabled():
        raise ExecutionError(
            "ROAM_DISABLE is set, or this is a roam.disabled() block, so nothing would run by plan; "
            "unset it, or leave the block",
            code="disabled",
        )
    function, compiled = _both(train_step)
    return _Trial(function, compiled, args, kwargs, steps).run()


def _without_reruns(number: int, path: str, expected: _Values, found: _Values) -> Difference:
    """What differs in a step that launches collectives. No step is run again to find out more,
    since other ranks may have found no difference, and would not take part.
    """
    eager, planned = expected.get(path), found.get(path)
    return Difference(
        number,
        path,
        "nothing" if eager is None else eager.text,
        "nothing" if planned is None else planned.text,
    )


def _both(train_step: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[], Step]]:
    """The user's function, and what compiles it anew."""
    if isinstance(train_step, MethodType) and isinstance(train_step.__func__, Step):
        step, instance = train_step.__func__, train_step.__self__
        return MethodType(step.function, instance), lambda: step.anew(
            MethodType(step.function, instance)
        )
    if isinstance(train_step, Step):
        return train_step.function, train_step.anew
    return train_step, lambda: Step(train_step)


class _Eagerly(Exception):
    """The user's function raised an error when it ran eagerly."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """One comparison."""

    function: Callable[..., Any]
    compiled: Callable[[], Step]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    steps: int
    start: dict[int, Any] = field(default_factory=dict)
    """By the identity of a tensor, what it held before the first step."""

    def run(self) -> Comparison:
        try:
            reach = self._reach()
            refuse_shapeless(reach)  # there is nothing of them that could be kept
        except CaptureError as error:
            return self._ended("refused", error=error)
        if any(is_faked(slot.tensor) for slot in reach.slots):
            raise ExecutionError(
                "the step's tensors have no values, because they were made in roam.fake; build "
                "model and batch outside of it",
                code="fake",
            )
        found: _Values = {}
        try:
            fresh = [module for _, module in reach.modules if is_before_first_step(module)]
            if fresh:  # its gradients are reduced in other buckets than those of later steps
                with _kept(reach):
                    self._eager_step()
            for module in fresh:
                leave_first_step(module)
            with _kept(reach) as start:
                planned = self.compiled()
                if not planned.keeps_gradients:
                    self.start.update(
                        (id(slot.tensor), _value("tensors", slot.tensor).mark)
                        for slot in reach.slots
                    )
                try:
                    planned.plan(
                        *self.args, **self.kwargs
                    )  # what is refused is refused before anything has run
                except CaptureError as refusal:
                    if planned.may_run_beside(refusal):
                        pass
                    elif not refusal.settles or self.steps == 1:
                        if refusal.code in ("step_raised", "value_reached_python"):
                            self._eager_step()  # which may raise it too
                        raise
                eager = [_without_tensors(values) for values in self._eagerly(self.steps)]
                start.restore()
                differences: list[Difference] = []
                freed = 0
                for number, expected in enumerate(eager, 1):
                    found = self._after(*self._called(planned))
                    path = self._first_different(expected, found)
                    freed = len(expected.keys() - found.keys())
                    if path is not None and not planned.joins_processes:
                        return self._different(start, number, path, expected, found)
                    if path is not None:
                        differences.append(_without_reruns(number, path, expected, found))
                if differences:
                    return self._ended("different", found, difference=differences[0])
                return replace(self._ended("equal", found), freed_gradients=freed)
        except _Eagerly as failure:
            return self._ended("undecided", error=failure.__cause__)
        except CaptureError as error:
            return self._ended("refused", found, error=error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the comparison found
            return self._ended("failed", found, error=error)

    def _eagerly(self, steps: int) -> Iterator[_Values]:
        """What each of so many steps leaves."""
        for _ in range(steps):
            yield self._after(*self._eager_step())

    def _eager_step(self) -> tuple[Any, Any]:
        try:
            return self._called(self.function)
        except Exception as error:
            raise _Eagerly from error

    def _called(self, function: Callable[..., Any]) -> tuple[Any, Any]:
        """What a function returns, and the arguments: each call has lists and dictionaries of its
        own, since it may change them.
        """
        args, kwargs = pytree.tree_unflatten(*flattened((self.args, self.kwargs))[:2])
        return function(*args, **kwargs), (args, kwargs)

    def _different(
        self, start: _Kept, number: int, path: str, expected: _Values, found: _Values
    ) -> Comparison:
        """What differs, and where it comes from: both runs are made again up to the step, and
        watched.
        """
        planned = found.get(path)
        theirs = (
            None if planned is None or planned.tensor is None else planned.tensor.detach().clone()
        )
        start.restore()
        *_, again = self._eagerly(number)
        unsteady = next(
            (name for name in expected if not expected[name].equals(again.get(name))), None
        )
        if unsteady is not None:
            difference = Difference(
                number, unsteady, "not the same bits in two runs", "not to be compared"
            )
            return self._ended("undecided", found, difference=difference)
        eager = expected.get(path)
        difference = Difference(
            number,
            path,
            "nothing" if eager is None else eager.text,
            "nothing" if planned is None else planned.text,
            *_distance(None if eager is None else again[path].tensor, theirs),
        )
        return self._ended(
            "different", found, difference=difference, operator=self._operator(start, number)
        )

    def _operator(self, start: _Kept, number: int) -> DifferentOperator | None:
        start.restore()
        for _ in range(number - 1):
            self._called(self.function)
        expected = eager_values(lambda: self._called(self.function))
        start.restore()
        planned = self.compiled()
        for _ in range(number - 1):
            self._called(planned)
        if planned.runs_beside:
            return None
        try:
            (program, values), _ = self._called(planned.watched)
        except CaptureError:  # from this call on
            return None
        return first_different(number, program, values, expected)

    def _reach(self) -> Reach:
        return reach_of(self.function, self.args, self.kwargs)

    def _first_different(self, expected: _Values, found: _Values) -> str | None:
        """The path of the first value that differs, other than a gradient that the plan has used
        up.
        """
        for path in expected | found:
            value = expected.get(path)
            if value is not None and value.equals(found.get(path)):
                continue
            if value is None or not value.may_be_missing or path in found:
                return path
        return None

    def _after(self, result: Any, arguments: Any) -> _Values:
        """Everything that a step leaves, by path; what it returned comes first, then what it has
        put in lists and dictionaries among its arguments.
        """
        leaves, _ = flatten_with_paths(result)
        values = {"result" + pytree.keystr(keys): _value("results", leaf) for keys, leaf in leaves}
        before, now = (
            {argument_path(keys): leaf for keys, leaf in flatten_with_paths(one)[0]}
            for one in ((self.args, self.kwargs), arguments)
        )
        for path in before | now:
            if before.get(path, MISSING) is not now.get(path, MISSING):
                values[path] = _value("results", now.get(path))
        reach = self._reach()
        optimized = {id(item) for _, optimizer in reach.optimizers for group in optimizer.param_groups for item in group["params"]}  # fmt: skip
        known: dict[int, _Value] = {}
        for slot in reach.slots:
            tensor = slot.tensor
            value = known.get(id(tensor))
            is_new = value is None
            if value is None:
                value = known[id(tensor)] = _value("tensors", tensor)
            _put(values, slot.path, value)
            if is_new and tensor.is_leaf and tensor.grad is not None:
                gradient = _value("gradients", tensor.grad)
                gradient.may_be_missing = id(tensor) in self.start and (
                    id(tensor) in optimized or not same(value.mark, self.start[id(tensor)])
                )
                _put(values, f"{slot.path}.grad", gradient)
        own = {id(optimizer.__dict__) for _, optimizer in reach.optimizers}
        for place in reach.places:
            space = place.space
            is_own = isinstance(space, MappingSpace) and id(space.holder) in own
            for key, item in space.items():
                if is_plain(item) and not (is_own and key in LIVE_OPTIMIZER_KEYS):
                    _put(values, space.label(key), _value("Python values", item))
        for name, read, _ in random_sources(reach):
            _put(values, name, _value("random generators", read()))
        return values

    def _ended(
        self,
        outcome: Outcome,
        values: _Values | None = None,
        *,
        difference: Difference | None = None,
        operator: DifferentOperator | None = None,
        error: Any = None,
    ) -> Comparison:
        compared: dict[str, int] = {}
        for value in (values or {}).values():
            compared[value.kind] = compared.get(value.kind, 0) + 1
        return Comparison(outcome, self.steps, compared, difference, operator, error, _versions())


class _Kept:
    """A copy of the state that a step reaches, values of tensors included."""

    def __init__(self, reach: Reach) -> None:
        self._snapshot, self._switches, self._freed = Snapshot(reach), Switches(), noted()
        tensors = {id(slot.tensor): slot.tensor for slot in reach.slots}
        gradients = [
            tensor.grad for tensor in tensors.values() if tensor.is_leaf and tensor.grad is not None
        ]
        # A step may give a tensor another storage, as an assignment to `.data` does.
        parts = [part for one in (*tensors.values(), *gradients) for part in parts_of(one)]
        self._tensors = [(tensor, tensor.detach()) for tensor in parts]
        storages = {c_pointer(alias.untyped_storage()): _bytes(alias) for _, alias in self._tensors}
        self._values = [(flat, flat.clone()) for flat in storages.values()]

    @interrupts_wait()
    def restore(self) -> None:
        """Puts everything back, in the same objects."""
        self._switches.restore()
        self._snapshot.restore()
        self._freed()
        with torch.no_grad():
            for tensor, alias in self._tensors:
                if _place(tensor) != _place(alias):
                    tensor.data = alias
            for flat, values in self._values:
                flat.copy_(values)


@contextmanager
def _kept(reach: Reach) -> Iterator[_Kept]:
    kept = _Kept(reach)
    try:
        yield kept
    finally:
        kept.restore()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        c_pointer(tensor.untyped_storage()),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclass(slots=True)
class _Value:
    """One value after a step: what two of them are told apart by."""

    kind: str
    mark: Any
    """For a tensor a digest of its type and its elements, a plain value itself, the type of
    anything else."""
    text: str
    tensor: torch.Tensor | None
    """The tensor itself, which later steps change."""
    may_be_missing: bool = False

    def equals(self, other: _Value | None) -> bool:
        return other is not None and same(self.mark, other.mark)


_Values = dict[str, _Value]


def _value(kind: str, value: Any) -> _Value:
    if is_wrapper(value):
        mark = (repr(Form.of(value)), *map(digest, parts_of(value)))
        return _Value(kind, mark, f"{type(value).__name__} {tuple(value.shape)}", None)
    value = local_of(value)
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        text = (
            f"{dtype} {tuple(value.shape)}" if value.numel() != 1 else f"{value.item()!r} ({dtype})"
        )
        return _Value(kind, digest(value), text, value.detach())
    if is_plain(value):
        return _Value(kind, value, show(value), None)
    if kind == "random generators":
        return _Value(kind, _frozen(value), "a state", None)
    return _Value(kind, type(value).__qualname__, show(value), None)


def _without_tensors(values: _Values) -> _Values:
    """The same values without their tensors, so that tensors which the step has let go of are
    freed.
    """
    for value in values.values():
        value.tensor = None
    return values


def _frozen(state: Any) -> Any:
    """The state of a random generator as a plain value."""
    if isinstance(state, dict):
        return tuple((key, _frozen(item)) for key, item in state.items())
    if isinstance(state, (list, tuple)):
        return tuple(map(_frozen, state))
    return state.tobytes() if is_numpy_array(state) else state


def _put(values: _Values, path: str, value: _Value) -> None:
    """Puts a value under a path of its own. Keys without a text of their own would share a path."""
    name, number = path, 1
    while name in values:
        number += 1
        name = f"{path} ({number})"
    values[name] = value


def _distance(
    eager: torch.Tensor | None, planned: torch.Tensor | None
) -> tuple[float | None, int | None]:
    """The largest difference of two elements, and how many have other bits."""
    if (
        eager is None
        or planned is None
        or (eager.shape, eager.dtype) != (planned.shape, planned.dtype)
    ):
        return None, None
    one, other = eager.detach().contiguous(), planned.contiguous()
    rows = (one.reshape(-1, 1).view(torch.uint8) != other.reshape(-1, 1).view(torch.uint8)).any(
        dim=1
    )
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = (one.to(wide) - other.to(wide)).abs().reshape(-1)[rows]
    return float(apart.max()) if apart.numel() else 0.0, int(rows.sum())


def _versions() -> str:
    return f"roam {__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"
