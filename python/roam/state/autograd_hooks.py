"""Refuses what acts on gradients below the dispatcher, where no trace of fake tensors can see it.

Hooks on autograd's own nodes, among them those that accumulate a parameter's gradient, belong to
the real tensors' nodes and never run on fakes. Modules of `torch.distributed` reduce gradients in
such hooks, in C++. Both are refused, before a capture and when they come later; what
`DistributedDataParallel` does is recorded instead.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Final

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from roam.errors import CaptureError
from roam.state.equality import Misfit
from roam.state.metadata import is_cut_off
from roam.state.reach import Reach, Slot
from roam.torch_compat.private import (
    DisableTorchFunction,
    FakeTensor,
    disable_current_modes,
    engine_will_run,
    reducer_class,
)

_SHARDED: Final = ("FullyShardedDataParallel",)
_PLAIN: Final = (
    "pass the plain module, and reduce gradients between two compiled functions, one for the "
    "backward pass and one for the update"
)
_SHARD: Final = "shard its layers by torch.distributed.fsdp.fully_shard (FSDP2) instead"
_MARK: Final = "roam"
_HELD: Final = (
    "something that holds the node which accumulates its gradient (a reducer of torch.distributed, "
    "or the graph of an earlier loss that is still alive: keep loss.detach())"
)


def check_beneath(reach: Reach) -> None:
    """Refuses modules that reduce gradients on their own, and hooks on the nodes that accumulate
    gradients. Nodes that something unknown holds are noted in ``reach.held_elsewhere``: only a
    backward pass would run its hooks.
    """
    for path, module in reach.modules:
        if (name := _reducing(module)) is not None:
            raise CaptureError(
                f"{path} is a {name}, which changes gradients where capture cannot see it; "
                f"{_SHARD if name in _SHARDED else _PLAIN}",
                code="reducing_module",
            )
    held = held_by_reducers(reach)
    for path, parameter in leaves_of(reach.slots):
        if is_cut_off(parameter):
            raise CaptureError(
                f"{path} is a view of a tensor that requires a gradient, and was made under "
                "torch.no_grad(): its requires_grad is True, and yet it gets no gradient; detach "
                "it where it is made, as in weight[1].detach()",
                code="autograd_node",
            )
        if (reason := _hooked(parameter, is_held=id(parameter) in held)) is not None:
            error = CaptureError(
                f"{path} has {reason}, which a captured step would not run; register hooks with "
                "Tensor.register_hook or Tensor.register_post_accumulate_grad_hook",
                code="autograd_node",
            )
            error.path = path
            if reason is not _HELD:
                raise error
            reach.held_elsewhere[id(parameter)] = error


class NodeHooks:
    """Watches that no hook comes to the nodes that accumulate the gradients of some leaves.

    Every hook that Python registers, of whatever kind, takes the next number of one counter. The
    nodes themselves are looked at only if this counter has moved.
    """

    def __init__(
        self, leaves: Iterable[tuple[str, torch.Tensor]], held: Container[int] = ()
    ) -> None:
        """`leaves`: (path, tensor), none of them with such hooks now; `held`: identities of those
        whose nodes may be held, by a known reducer or in a step without a backward pass.
        """
        self._leaves = [(path, leaf, id(leaf) in held) for path, leaf in leaves]
        self._registered = hooks_registered()

    def watches_the_same(self, other: NodeHooks) -> bool:
        """Whether others watch the same leaves."""
        return [(id(leaf), is_held) for _, leaf, is_held in self._leaves] == [
            (id(leaf), is_held) for _, leaf, is_held in other._leaves
        ]

    def failure(self) -> Misfit | None:
        """None while there is no such hook, else which leaf has one."""
        if self._registered != hooks_registered():
            for path, leaf, is_held in self._leaves:
                if (reason := _hooked(leaf, is_held=is_held)) is not None:
                    return Misfit(f"{path} got {reason}")
            self._registered = hooks_registered()
        return None


def leaves_of(slots: Iterable[Slot]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, each once, in which a backward pass accumulates gradients."""
    seen: set[int] = set()
    for slot in slots:
        tensor = slot.tensor
        if (
            tensor.requires_grad
            and tensor.is_leaf
            and tensor.layout is torch.strided  # others are refused
            and not issubclass(type(tensor), FakeTensor)
            and id(tensor) not in seen
        ):
            seen.add(id(tensor))
            yield slot.path, tensor


def held_by_reducers(reach: Reach) -> set[int]:
    """Identities of the parameters whose nodes the reducers of `DistributedDataParallel` hold."""
    return {
        id(parameter)
        for _, module in reach.modules
        if issubclass(type(module), torch.nn.parallel.DistributedDataParallel)
        for parameter in module.parameters()
    }


def _reducing(module: torch.nn.Module) -> str | None:
    """The name of the kind of a module that reduces gradients on its own; None for any other
    module.
    """
    if issubclass(type(module), torch.nn.DataParallel):
        return "DataParallel" if module.device_ids else None
    if issubclass(type(module), torch.nn.parallel.DistributedDataParallel):
        return None  # what it does is known, and recorded
    sharded = sys.modules.get("torch.distributed.fsdp")
    if sharded is not None:
        for name in _SHARDED:
            if issubclass(type(module), getattr(sharded, name, ())):
                return name
    reducer = reducer_class()
    if reducer is not None and any(
        issubclass(type(value), reducer) for value in vars(module).values()
    ):
        return f"{type(module).__name__} with a reducer of torch.distributed"
    return None


def node_stand_in(fakes: Iterable[tuple[Any, Any]]) -> Callable[[Any], bool]:
    """Returns a function that tells whether the engine will run a node. Hooks on several gradients
    ask this for the node of a real leaf; the answer is that for the node of the leaf's fake.

    Args:
        fakes: (real tensor, its fake), for all that capture knows.
    """
    plain = engine_will_run()

    @functools.cache
    def stand_ins() -> list[tuple[Any, Any]]:
        leaves = [
            (real, fake)
            for real, fake in fakes
            if isinstance(real, torch.Tensor) and real.requires_grad and real.is_leaf
        ]
        return [(get_gradient_edge(real).node, fake) for real, fake in leaves]

    def will_execute(node: Any) -> bool:
        with disable_current_modes():
            for own, fake in stand_ins():
                if own is node:
                    return plain(get_gradient_edge(fake).node)
        return plain(node)

    return will_execute


_own_registrations = 0


def hooks_registered() -> int:
    """How many hooks of any kind have been registered in this process so far."""
    return RemovableHandle.next_id - _own_registrations


def _hooked(leaf: torch.Tensor, *, is_held: bool = False) -> str | None:
    """What hooks the node has that accumulates a leaf's gradient, or None; `is_held`: whether a
    known reducer holds it.
    """
    if not leaf.requires_grad:
        return None
    with disable_current_modes(), DisableTorchFunction(), torch.inference_mode(False):
        # A node that nothing holds is gone at once, and its hooks with it: the next is another one,
        # without the mark.
        node: Any = get_gradient_edge(leaf).node
        node.metadata[_MARK] = True
        del node
        node = get_gradient_edge(leaf).node
        if node.metadata.pop(_MARK, None) is None:
            return None
    if any(map(_hooks_of, (node.register_prehook, node.register_hook))):
        return "hooks on the node that accumulates its gradient"
    if in_group() and not is_held:
        return _HELD
    return None


def in_group() -> bool:
    """Whether several processes train together, so that nothing may hold a node that accumulates a
    gradient.
    """
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _hooks_of(register: Any) -> int:
    """How many hooks a node has of the kind that `register` registers. Python keeps them in one
    dictionary, to which the handle of a new hook leads.
    """
    global _own_registrations
    handle = register(_nothing)
    _own_registrations += 1
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return 0 if hooks is None else len(hooks)


def _nothing(*_: object) -> None:
    """A hook that does nothing."""
