"""Collectives of `torch.distributed` as calls of a program: a launch and a wait.

A launch gives its tensors to the process group and returns at once. From then on until the wait,
the group reads the inputs and writes the outputs whenever it likes. The wait therefore uses all of
them, and changes the outputs: lifetimes, constraints and the verifier then follow from the ordinary
rules. Launches keep their program order, so that all ranks of a group call it in one order.
"""

from __future__ import annotations

import datetime
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roam.distributed.agreement import LOOK_S, look
from roam.distributed.waiting import Waiting
from roam.interrupts import interrupts_allowed
from roam.state.equality import Misfit
from roam.torch_compat.private import (
    all_gather_single,
    c_pointer,
    on_own_storage,
    reduce_scatter_single,
    resolve_group,
    storage_uses,
    tensor_uses,
)

_SETTLES_S = 5.0
"""How long a rank whose step failed waits for what it has launched: other ranks launch the same,
unless they fail too."""
_RELEASES_S = 5.0
"""How long a rank waits at most for gloo's thread to release a collective's tensors. It takes
microseconds where a core is free, and longer than 0.1 s where other processes keep all cores busy.
"""
_SPINS = 64
"""How often a rank looks whether the tensors are released before it sleeps between two looks."""
_NAP_S = 2e-5
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
"""Reductions that need no operand of their own."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as a program knows it.

    Attributes:
        name: the name by which `torch.distributed` finds the group.
        ranks: global ranks of its members, in its order.
        rank: this process's place among them.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, group: Any) -> Group:
        """What a program keeps of a process group."""
        return cls(
            group.group_name,
            tuple(torch.distributed.get_process_group_ranks(group)),
            group.rank(),
        )

    def is_fake(self) -> bool:
        """Whether its collectives return at once and do nothing: for plans without processes."""
        return torch.distributed.get_backend(resolve_group(self.name)) == "fake"

    @property
    def size(self) -> int:
        """How many members it has."""
        return len(self.ranks)

    def must_release(self) -> bool:
        """Whether a thread of the group may hold tensors after their collective is done."""
        return self.size > 1 and self.can_be_polled()

    def can_be_polled(self) -> bool:
        """Whether one can wait for its collectives with a time limit, and then wait again."""
        config = torch.distributed.get_backend_config(resolve_group(self.name))
        return {part.rpartition(":")[2] for part in config.split(",")} == {"gloo"}

    def failure(self) -> Misfit | None:
        """None while the name stands for the same group, else what has changed."""
        if not torch.distributed.is_initialized():
            return Misfit("torch.distributed is not initialized any more")
        try:
            group = resolve_group(self.name)
        except (RuntimeError, KeyError, ValueError):
            return Misfit(f"the process group {self.name!r} is gone")
        if Group.of(group) != self:
            return Misfit(f"the process group {self.name!r} has other ranks")
        return None


@dataclass(frozen=True, slots=True)
class Launch:
    """Starts a collective; called with its outputs and its inputs, returns what `wait` takes.

    Make one by `launch`: equal launches are one object.

    Attributes:
        kind: the operator of `torch.ops.c10d`.
        group: whose collective it is.
        reduction: one of `REDUCTIONS`; empty if nothing is reduced.
        root: rank in the group that sends or receives; -1 if there is none.
        splits: sizes of the outputs' and inputs' parts, if ranks exchange parts of different sizes.
    """

    kind: str
    group: Group
    reduction: str = ""
    root: int = -1
    splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @property
    def __name__(self) -> str:
        return self.kind

    def __call__(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Pending:
        """Launches it on real tensors, all of which stay busy until `wait`."""
        tensors = [*outputs, *inputs]
        if self.group.must_release():
            # The group gets storages of its own on the same memory: whatever the step does with its
            # tensors in between, it is known when the group has released them.
            tensors = list(map(on_own_storage, tensors))
            held, before = tensors, _holders(tensors)
        else:
            held, before = [], []
        work = self.start(tensors[: len(outputs)], tensors[len(outputs) :])
        return Pending(self, work, held, before)

    def start(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        """Launches it by an operator, and gives PyTorch's handle."""
        group = resolve_group(self.group.name)
        return _STARTS[self.kind](self, group, list(outputs), list(inputs))


def _holders(tensors: list[torch.Tensor]) -> list[tuple[int, int, int]]:
    """How many holders each tensor has in C++, in Python, and of its storage. A thread of C++ that
    releases a tensor lowers the first count at once and the second when it gets the interpreter's
    lock; the group's views of a tensor hold its storage alone.
    """
    return [
        (tensor_uses(one), sys.getrefcount(one), storage_uses(c_pointer(one.untyped_storage())))
        for one in tensors
    ]


launch: Callable[..., Launch] = functools.cache(Launch)
"""Makes a `Launch`. For equal arguments it returns the same object."""


class Pending:
    """A collective between its launch and its wait."""

    __slots__ = ("_before", "_held", "_waiting", "_work", "launch")

    def __init__(
        self,
        launch: Launch,
        work: Any,
        held: list[torch.Tensor],
        before: list[tuple[int, int, int]],
    ) -> None:
        """`held`: tensors that only the group holds too, where its threads keep tensors for a
        while. `before`: their holders before the launch.
        """
        self.launch = launch
        self._work = work
        self._held, self._before = held, before
        self._waiting: Waiting[Any] | None = None
        if work is not None:
            _in_flight[id(self)] = self

    def wait(self) -> None:
        """Returns when the outputs are written and the inputs read.

        Raises:
            RuntimeError: what the group says, if the collective failed.
        """
        if self._work is None:
            return
        group = self.launch.group
        if group.must_release():
            while not self._is_done(LOOK_S):
                with interrupts_allowed():
                    look(group)
            self._wait_for_release()
        elif not self._is_done():
            raise RuntimeError("the process group does not wait for its collective")

    def _is_done(self, timeout_s: float | None = None) -> bool:
        """Waits for at most this long. Returns whether the collective is done.

        Raises:
            RuntimeError: the collective is done, and failed.
        """
        work = self._work
        launch = self.launch
        if timeout_s is not None and launch.kind in _WITHOUT_LIMIT and launch.group.must_release():
            return self._is_done_elsewhere(timeout_s)
        try:
            if timeout_s is None:
                work.wait()
            else:
                work.wait(datetime.timedelta(seconds=timeout_s))
        except RuntimeError:
            if timeout_s is not None and not work.is_completed():
                return False
            self._forget()
            raise
        self._forget()
        return True

    def _is_done_elsewhere(self, timeout_s: float) -> bool:
        """The same, where the group's own wait ignores time limits."""
        if self._waiting is None:
            self._waiting = Waiting(self._work.wait)
        if not self._waiting.is_done(timeout_s):
            return False
        waiting, self._waiting = self._waiting, None
        self._forget()
        waiting.result()
        return True

    def _wait_for_release(self) -> None:
        """Returns when gloo's thread has released the tensors, which is a little after it has said
        that the collective is done. Otherwise memory would be freed later than planned, by chance,
        and a process that ends in between would be aborted: that thread cannot release objects of
        an interpreter that is gone.
        """
        tensors, self._held = self._held, []
        if self.launch in _held_elsewhere:
            return
        deadline, looks = time.monotonic() + _RELEASES_S, 0
        while _holders(tensors) != self._before:
            looks += 1
            if looks > _SPINS and time.monotonic() > deadline:
                _held_elsewhere.add(self.launch)
                return
            # Asleep, a rank leaves its core to the thread that it waits for.
            time.sleep(0 if looks <= _SPINS else _NAP_S)

    def _forget(self) -> None:
        """Lets go of the group's own object when the collective is done, since it holds the
        tensors.
        """
        self._work = None
        _in_flight.pop(id(self), None)


_WITHOUT_LIMIT = frozenset({"reduce_scatter_", "_reduce_scatter_base_"})
"""Kinds whose handles wait without a time limit under gloo, which sums the whole input by another
collective and copies a part of it when it is waited for.
"""
_in_flight: dict[int, Pending] = {}
_held_elsewhere: set[Launch] = set()
"""Launches after which something other than gloo kept a tensor. Their tensors are not waited for
again.
"""


def wait(pending: Pending, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Waits for a collective that was launched with these tensors."""
    pending.wait()


def settle(most_s: float = _SETTLES_S) -> None:
    """To be called after a run that failed. Returns when none of its collectives uses memory any
    more, or after `most_s` seconds, when the rest cannot be expected to end.
    """
    deadline = time.monotonic() + most_s
    for pending in list(_in_flight.values()):
        try:
            pending._is_done(max(deadline - time.monotonic(), 0.001))
        except RuntimeError:  # it failed too, and uses nothing any more
            continue


def unsettled() -> str | None:
    """What still uses memory of a run that failed; None if nothing does."""
    for pending in list(_in_flight.values()):
        try:
            if not pending._is_done(0.001):
                return f"{pending.launch.kind} in the group {pending.launch.group.name!r}"
        except RuntimeError:
            continue
    return None


def is_collective(target: object) -> bool:
    """Whether a call's target launches a collective or waits for one."""
    return type(target) is Launch or target is wait


def is_launch(target: object) -> bool:
    """Whether a call's target launches a collective."""
    return type(target) is Launch


# -- how each is started: (launch, group, outputs, inputs)


def _options(kind: str, launch: Launch, **values: Any) -> Any:
    options = getattr(torch.distributed.distributed_c10d, f"{kind}Options")()
    if launch.reduction:
        options.reduceOp = getattr(torch.distributed.ReduceOp, launch.reduction)
    for name, value in values.items():
        setattr(options, name, value)
    options.asyncOp = True
    return options


def _all_reduce(launch: Launch, group: Any, outputs: list[Any], inputs: list[Any]) -> Any:
    return group.allreduce(outputs, _options("Allreduce", launch))


def _broadcast(launch: Launch, group: Any, outputs: list[Any], inputs: list[Any]) -> Any:
    options = _options("Broadcast", launch, rootRank=launch.root, rootTensor=0)
    return group.broadcast(outputs, options)


def _reduce(launch: Launch, group: Any, outputs: list[Any], inputs: list[Any]) -> Any:
    options = _options("Reduce", launch, rootRank=launch.root, rootTensor=0)
    return group.reduce(outputs, options)


def _all_gather(launch: Launch, group: Any, outputs: list[Any], inputs: list[Any]) -> Any:
    return group.allgather([outputs], inputs, _options("Allgather", launch))


def _all_gather_single(launch: Launch, group: Any, outputs: list[Any], inputs: list[Any]) -> Any:
    return all_gather_single(group, outputs[0], inputs[0], _options("Allgather", launch))


def _reduce_scatter(launch: Launch, group: Any, outputs: list[Any], inputs: list[Any]) -> Any:
    return group.reduce_scatter(outputs, [inputs], _options("ReduceScatter", launch))


def _reduce_scatter_single(
    launch: Launch, group: Any, outputs: list[Any], inputs: list[Any]
) -> Any:
    return reduce_scatter_single(group, outputs[0], inputs[0], _options("ReduceScatter", launch))


def _all_to_all_single(launch: Launch, group: Any, outputs: list[Any], inputs: list[Any]) -> Any:
    made, given = map(list, launch.splits)
    return group.alltoall_base(*outputs, *inputs, made, given, _options("AllToAll", launch))


def _barrier(launch: Launch, group: Any, outputs: list[Any], inputs: list[Any]) -> Any:
    return group.barrier(_options("Barrier", launch))


_STARTS: dict[str, Callable[[Launch, Any, list[Any], list[Any]], Any]] = {
    "allreduce_": _all_reduce,
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather_single,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_single,
    "alltoall_base_": _all_to_all_single,
    "barrier": _barrier,
}
KINDS = frozenset(_STARTS)
"""The operators of `torch.ops.c10d` that can be launched."""

__all__ = [
    "KINDS", "REDUCTIONS", "Group", "Launch", "Pending", "is_collective", "is_launch", "launch", "settle", "unsettled", "wait"
]  # fmt: skip
