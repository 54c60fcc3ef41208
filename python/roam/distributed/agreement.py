"""What ranks tell each other, besides their collectives, through the store of a process group.

Before a plan runs for the first time, its rank writes to the store which collectives it launches,
and waits until every other rank of the group has a plan with the same collectives. A plan for a
range of sizes may exchange other numbers of elements in each run, and ranks need not have the same
range; then what they exchange is compared without these numbers. A rank whose own Python runs
beside its plan says so, and nobody waits for it. Only new sequences of collectives are compared, so
a rank that plans anew alone, for another shape, continues at once. A rank whose step fails writes
the reason to the store; a rank that waits for others reads it from time to time.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from roam._core import __version__
from roam.distributed.waiting import Waiting
from roam.errors import ExecutionError
from roam.state.autograd_hooks import in_group
from roam.torch_compat.private import forget_layouts, resolve_group, store_of

if TYPE_CHECKING:
    from roam.distributed.collectives import Group

T = TypeVar("T")
LOOK_S = 1.0
"""How often a rank that waits for others looks for what they have written."""
_ASK_S = 0.02
AGAIN = "start all processes again from the last checkpoint"
"""What to do after a step with collectives has failed."""

_runs: dict[str, int] = {}
"""By the name of a group, how many runs of plans have used it."""
_current: dict[str, tuple[int, list[list[str]]]] = {}
"""By the name of a group, the number and the collectives of the run that uses it now."""
_left: dict[str, str] = {}
"""By the name of a group in which a step of this rank has failed, why."""
_groups: dict[str, Any] = {}
"""By the name of a group, the process group that the other dictionaries here are about."""

ANY_SIZE = "any number"
"""Stands for a number of elements that changes from run to run."""
Sequences = dict["Group", list[list[str]]]
"""The collectives that a plan launches in each group, in order: (what it is, the user's line)."""


def begin(sequences: Sequences, *, is_new: bool) -> None:
    """To be called before a run that launches these collectives. `is_new`: whether the plan has not
    run before.

    Raises:
        ExecutionError: another rank launches others (code ``collectives_differ``), or a rank has
            left (code ``rank_left``).
    """
    for group, sequence in sequences.items():
        _enter(group)
        known = _left.get(group.name)
        if known is not None:
            raise ExecutionError(
                f"an earlier step with collectives failed on this rank ({known}), so other "
                f"ranks may wait for another collective; {AGAIN}",
                code="rank_left",
            )
        _runs[group.name] = _runs.get(group.name, 0) + 1
        _current[group.name] = _runs[group.name], sequence
    if is_new:
        _agree({group: one for group, one in sequences.items() if len(group.ranks) > 1})


def _enter(group: Group) -> None:
    """Forgets what this rank knew and wrote of an earlier group of the same name: its store may be
    the same.
    """
    now = resolve_group(group.name)
    if _groups.get(group.name) is now:
        return
    _groups[group.name] = now
    for known in (_runs, _current, _left):
        known.pop(group.name, None)
    store = _store(group)
    for key in (f"left/{group.rank}", f"pending/{group.rank}"):
        if store.check([key]):
            store.set(key, "")


def note_rank() -> None:
    """Has `DTensor` find local shapes anew if the process plans for another rank than before, as
    under "fake" groups: its caches do not tell ranks from each other.
    """
    if not in_group():
        return
    now = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if _announced.get("rank", now) != now:
        forget_layouts()
    _announced["rank"] = now


def announce() -> None:
    """Tells other ranks which process this is, so that they notice when it is gone."""
    # A "fake" group has no other ranks, and in PyTorch 2.11 its store cannot be written to.
    if not in_group() or torch.distributed.get_backend() == "fake":
        return
    group: Any = torch.distributed.group.WORLD
    if _announced.get("group") is not group:
        if "group" not in _announced:
            atexit.register(_tell_end)
        _announced["group"], _announced["process"] = group, os.getpid()
        store, rank = store_of(group), group.rank()
        store.set(f"process/{rank}", f"{_machine()} {os.getpid()}")
        for key in (f"ended/{rank}", f"beside/{rank}"):
            if store.check([key]):  # an earlier process's, with the same store
                store.set(key, "")


def announce_beside() -> None:
    """Tells other ranks that this one launches what its own Python asks for, so that they do not
    wait for a plan of it.
    """
    announce()
    if "group" in _announced:
        group = _announced["group"]
        store_of(group).set(f"beside/{group.rank()}", "1")


_announced: dict[str, Any] = {}


def _tell_end() -> None:
    """Tells other ranks that this process ends, and by which exception: they may wait for it, and
    run on machines that cannot see its end.
    """
    group, process = _announced["group"], os.getpid()
    if _announced["process"] != process:  # one that the announced process has forked
        return
    error = getattr(sys, "last_value", None)
    after = "" if error is None else f" after {type(error).__name__}: {error}"
    with suppress(RuntimeError, LookupError):  # the group has been destroyed, or its store is gone
        store_of(group).set(f"ended/{group.rank()}", f"its process {process} has ended{after}")


def leave(sequences: Sequences, reason: str) -> None:
    """To be called after a run that failed, or could not begin: tells the other ranks, which may
    wait for collectives that will never come.
    """
    reason = reason.removesuffix(f"; {AGAIN}")
    for group in sequences:
        # The group may be gone, or the process that kept its store.
        with suppress(RuntimeError, LookupError, ValueError):
            _enter(group)
        first = _left.setdefault(group.name, reason)
        with suppress(RuntimeError, LookupError, ValueError):
            _store(group).set(f"left/{group.rank}", first)


def look(group: Group) -> None:
    """While this rank waits for others: raises if they will never come.

    Raises:
        ExecutionError: as `begin`.
    """
    store = _store(group)
    number, sequence = _current.get(group.name, (0, []))
    for other in range(len(group.ranks)):
        if other == group.rank:
            continue
        theirs = _read(store, f"pending/{other}")
        # The other rank waits until this one has a plan with the same collectives, in the same run.
        if theirs and theirs["run"] == number and not _knows(store, group.rank, theirs["names"]):
            _raise_different(group, other, sequence, theirs)
        _raise_if_left(store, group, other)


def finished(group: Group, work: Callable[[], T]) -> T:
    """What a function returns that waits for the other ranks in C++. It runs in a thread of its
    own, while this one looks for ranks that have left.

    Raises:
        ExecutionError: another rank has left (code ``rank_left``).
        RuntimeError: what the function raises.
    """
    try:
        waiting = Waiting(work)
        while not waiting.is_done(LOOK_S):
            _look_for_left(group)
        with suppress(Exception):
            return waiting.result()
        _look_for_left(group)  # that says more than the error of a connection
    except BaseException as error:
        leave({group: []}, str(error) or type(error).__name__)
        raise
    return waiting.result()


def _look_for_left(group: Group) -> None:
    """Raises if another rank of a group has left."""
    for other in range(len(group.ranks)):
        if other != group.rank:
            _raise_if_left(_store(group), group, other)


def _agree(sequences: Sequences) -> None:
    """Waits until all ranks have a plan that launches the same collectives."""
    # All groups are told first: groups that share ranks may each wait for the next in a circle.
    for group, sequence in sequences.items():
        store, names = _store(group), _names(sequence)
        for name in names:
            store.set(f"known/{group.rank}/{name}", "1")
        mine = {
            "run": _runs[group.name], "names": names, "sequence": sequence, "versions": _versions()
        }  # fmt: skip
        store.set(f"pending/{group.rank}", json.dumps(mine))
    start = time.monotonic()
    while sequences := {
        group: one for group, one in sequences.items() if not _has_agreed(group, one, start)
    }:
        time.sleep(_ASK_S)


def _has_agreed(group: Group, sequence: list[list[str]], start: float) -> bool:
    """Whether all ranks of a group have a plan that launches the same collectives. `start`: since
    when this rank waits.
    """
    store, names = _store(group), _names(sequence)
    others = [other for other in range(len(group.ranks)) if other != group.rank]
    missing = [
        one for one in others if not (_knows(store, one, names) or _is_beside(_named(group, one)))
    ]
    for other in missing:  # differences come first: a rank that finds one leaves
        theirs = _read(store, f"pending/{other}")
        if theirs and not _knows(store, group.rank, theirs["names"]):
            _raise_different(group, other, sequence, theirs)
        _raise_if_left(store, group, other)
    limit_s = store.timeout.total_seconds()
    if missing and time.monotonic() > start + limit_s:
        raise ExecutionError(
            f"rank {_named(group, missing[0])} did not start a plan with the same collectives within "
            f"{limit_s:.0f} s, the time limit of the group's store; call the "
            "same compiled step on all ranks, or on none (ROAM_DISABLE=1)",
            code="rank_left",
        )
    if not missing:
        store.set(f"pending/{group.rank}", "")
    return not missing


def _names(sequence: Sequence[Sequence[str]]) -> list[str]:
    """Names of a sequence of collectives, by which ranks know it: one with all numbers of elements;
    one without; and, if some numbers change from run to run, one that says so.
    """
    texts = [what for what, _ in sequence]
    outline = _digest([_outline(text) for text in texts])
    found = [_digest(texts), f"outline/{outline}"]
    return [*found, f"range/{outline}"] if any(ANY_SIZE in text for text in texts) else found


def _knows(store: Any, rank: int, names: Sequence[str]) -> bool:
    """Whether a rank of a group has a plan with the same collectives. Where the numbers of elements
    change in the plan of one of two ranks, the other's numbers may be those of one of its runs.
    """
    exact, outline, *is_range = names
    accepted = [exact, outline.replace("outline/", "range/"), *([outline] if is_range else [])]
    return any(store.check([f"known/{rank}/{name}"]) for name in accepted)


def _outline(text: str) -> str:
    """What a collective is, without numbers of elements."""
    return re.sub(r"\d+ x ", f"{ANY_SIZE} x ", text)


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join((_versions(), *texts)).encode()).hexdigest()[:32]


def _is_beside(rank: int) -> bool:
    """Whether a rank has said that its own Python runs."""
    return bool(_told(store_of(torch.distributed.group.WORLD), f"beside/{rank}"))


def _versions() -> str:
    """The versions, which all ranks must share: others may plan differently and compute other
    bits.
    """
    return f"roam {__version__} with PyTorch {torch.__version__}"


def _store(group: Group) -> Any:
    return store_of(resolve_group(group.name))


def _told(store: Any, key: str) -> str:
    """What a rank has written; empty if it has not, or has taken it back."""
    return store.get(key).decode() if store.check([key]) else ""


def _read(store: Any, key: str) -> Any:
    text = _told(store, key)
    return json.loads(text) if text else None


def _named(group: Group, rank: int) -> int:
    """A member's rank among all processes."""
    return group.ranks[rank]


def _raise_if_left(store: Any, group: Group, other: int) -> None:
    if reason := _told(store, f"left/{other}"):
        raise ExecutionError(
            f"rank {_named(group, other)} has left the step: {reason}; {AGAIN}", code="rank_left"
        )
    rank = _named(group, other)
    if reason := _end_of(rank):
        raise ExecutionError(f"rank {rank} has left: {reason}; {AGAIN}", code="rank_left")


def _end_of(rank: int) -> str:
    """How a rank's process has ended; empty if it has not, as far as this one can know."""
    store = store_of(torch.distributed.group.WORLD)
    if ended := _told(store, f"ended/{rank}"):
        return ended
    process = _told(store, f"process/{rank}").split()
    if process and process[0] == _machine() and _is_gone(int(process[1])):
        return f"its process {process[1]} is gone"
    return ""


def _machine() -> str:
    """A name of what processes with one numbering share: containers may have the same host name,
    and number their processes separately.
    """
    try:
        return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # a system without that folder
        return socket.gethostname()


def _is_gone(process: int) -> bool:
    """Whether a process of this machine has ended. A zombie, which only waits for its parent to
    ask, counts as ended.
    """
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except ProcessLookupError:
        return True
    except OSError:  # another user's, or a system without that folder
        return False


def _raise_different(
    group: Group, other: int, mine: Sequence[Sequence[str]], other_rank: dict[str, Any]
) -> None:
    """Says which collective is the first that differs, or which versions do."""
    theirs = other_rank["sequence"]
    if other_rank["versions"] != _versions():
        raise ExecutionError(
            f"ranks run different versions: {_versions()} on rank {_named(group, group.rank)}, and "
            f"{other_rank['versions']} on rank {_named(group, other)}; install the same on all",
            code="collectives_differ",
        )
    place = next(
        (
            place
            for place, (one, two) in enumerate(zip(mine, theirs, strict=False))
            if one[0] != two[0]
            and not (ANY_SIZE in one[0] + two[0] and _outline(one[0]) == _outline(two[0]))
        ),
        min(len(mine), len(theirs)),
    )
    own, what = (
        "{} at {}".format(*sequence[place]) if place < len(sequence) else "none"
        for sequence in (mine, theirs)
    )
    raise ExecutionError(
        f"ranks launch different collectives: number {place + 1} of the step in this process group is {own} on rank "
        f"{_named(group, group.rank)}, and {what} on rank {_named(group, other)}; let all ranks run the same code on "
        "models of the same shape",
        code="collectives_differ",
    )


__all__ = ["LOOK_S", "Sequences", "begin", "finished", "leave", "look"]
