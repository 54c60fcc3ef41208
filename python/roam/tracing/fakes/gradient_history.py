"""Gradient histories that a plan does not have: those of tensors from before the step, and those of
the results of a planned step.

A plan contains the step's own backward pass, and keeps nothing for another one. Results and
attributes that require a gradient after the eager step require one after a planned step too, so
that they are not taken for constants; a backward pass through them raises an error. Likewise a step
may read and replace tensors with a history from before the step, as long as its own backward pass
does not go on into that history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, Protocol
from weakref import WeakValueDictionary

import torch

from roam.errors import ExecutionError
from roam.program.ir import History, Source
from roam.state.autograd_hooks import in_group
from roam.torch_compat.private import engine, hooks_of, node_class


class Refuse(Protocol):
    """Refuses that a backward pass goes on into a history; `source` is the line that leads there,
    if known.
    """

    def __call__(self, source: Source | None = None) -> NoReturn: ...


class PlannedStep(torch.autograd.Function):
    """The node that stands for a whole history."""

    @staticmethod
    def forward(ctx: Any, refuse: Refuse, value: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """The value, with this node as its history; `refuse` is called if a backward pass comes to
        it.
        """
        ctx.refuse = refuse
        return value.data  # no view: in-place operators may change it

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Refuses to go on: the step is over."""
        return ctx.refuse()


_END = node_class(PlannedStep)


def is_ended(tensor: torch.Tensor) -> bool:
    """Whether the history of a tensor is such a node."""
    return isinstance(tensor.grad_fn, _END)


def with_history(
    value: torch.Tensor, refuse: Refuse, sources: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """A tensor on the same memory with `PlannedStep` as its history. The history leads to the
    sources: a backward pass to one of them goes through it.
    """
    # Of a view of a parameter that the step has updated, PyTorch would refuse to find the history.
    value = value.data
    with torch.enable_grad(), _requiring(sources):
        return PlannedStep.apply(refuse, value, *(sources or _nothing()))  # type: ignore[no-any-return]


def _nothing() -> tuple[torch.Tensor]:
    return (torch.zeros((), requires_grad=True),)


@contextmanager
def _requiring(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """In the block all tensors require gradients, as they may at some point in a step that turns
    this on and off.
    """
    turned = [tensor for tensor in tensors if not tensor.requires_grad]
    for tensor in turned:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in turned:
            tensor.requires_grad_(False)


def watched_engine(
    is_original: Callable[[Any], bool], made_by: Callable[[Any], Source | None]
) -> Callable[..., Any]:
    """Replaces the function that runs autograd's engine: a backward pass that reaches a history
    from before the step is refused at the line that leads there.

    Args:
        is_original: whether a tensor is one from before the step.
        made_by: where the step ran the operator of a node.
    """
    plain = engine()

    def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = args[3]
        # The engine goes where it finds inputs, and histories from before the step lead to nothing
        # that the step has made.
        wanted = [one for one in inputs if not isinstance(one, torch.Tensor) or is_original(one)]
        if wanted or not inputs:
            for node, user in _ends(roots):
                alone = all(isinstance(one, torch.Tensor) and one.grad_fn is node for one in wanted)
                if not inputs or not alone or any(hooks_of(one) for one in wanted):
                    node.refuse(None if user is None else made_by(user))
        return plain(roots, *args, **kwargs)

    return run


def nodes_behind(tensor: torch.Tensor) -> Iterator[tuple[Any, bool]]:
    """The nodes of autograd's that a backward pass from a tensor would run, and of each whether it
    is the last.
    """
    waiting: list[Any] = [tensor.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            behind = [below for below, _ in node.next_functions]
            yield node, not behind
            waiting += behind


def _ends(roots: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """(node, user): the ends of histories that a backward pass reaches, each with the node that
    leads to it, or None.
    """
    waiting: list[tuple[Any, Any]] = [
        (root.grad_fn if isinstance(root, torch.Tensor) else root.node, None) for root in roots
    ]
    seen = set()
    while waiting:
        node, user = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, _END):
            yield node, user
        else:
            waiting += [(below, node) for below, _ in node.next_functions]


class _End:
    """A history that others go on to: to connect each of them with all sources takes long."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self.sources = sources  # so that nothing else has their identities
        self.value = with_history(torch.empty(0), _step_is_over, sources)


_shared_ends: Final[WeakValueDictionary[tuple[int, ...], _End]] = WeakValueDictionary()
"""By the identities of the sources, all of them leaves; for as long as one of the others lives."""


class Histories:
    """Gives what one run leaves its histories, each value once."""

    def __init__(self, sources: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """`sources`: by a history's identity, the tensors from before the step that it leads to."""
        self._sources = sources
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, value: Any, history: History) -> Any:
        """A value as autograd sees it after the step."""
        if history == "leaf":
            value.requires_grad_()
        elif history != "none":
            if id(value) not in self._known:
                sources = () if in_group() else self._sources[id(history)]
                key = tuple(map(id, sources))
                if (end := _shared_ends.get(key)) is None:
                    end = _End(sources)
                    if all(source.is_leaf for source in sources):
                        _shared_ends[key] = end
                found = with_history(value, _step_is_over, (end.value,))
                found.grad_fn.end = end  # type: ignore[union-attr]
                self._known[id(value)] = value, found
            return self._known[id(value)][1]
        return value

    def all(self, values: Iterable[Any], histories: Iterable[History]) -> list[Any]:
        """Several of them."""
        return [self.of(value, history) for value, history in zip(values, histories, strict=True)]


def _step_is_over(source: Source | None = None) -> NoReturn:
    raise ExecutionError(
        "a backward pass that starts outside of the step reaches one of its results, and a plan "
        "keeps nothing for that; call backward in the compiled step, or detach what it leaves",
        code="step_is_over",
    )
