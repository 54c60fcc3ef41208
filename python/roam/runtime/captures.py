"""The captures that a compiled step keeps, each with its plans: they are found by the arguments of
a call, and the least recently used is dropped.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from roam.state.argument_sizes import Larger
from roam.state.arguments import Taker
from roam.state.equality import Misfit
from roam.state.step_call import StepCall
from roam.tracing.step import CapturedStep


class _Runs(Protocol):
    @property
    def is_first(self) -> bool: ...

    def failure(self, call: StepCall) -> Misfit | None: ...


_FEW = 4
"""If there are more plans than this for each kind of arguments on average, something else than the
arguments is the reason for their number."""
MANY = 8
"""How many plans made for one reason, each of which has run once, bring a warning."""
_BUCKETS = (
    "Where values of tensors decide shapes, pad to a few shapes (bucketing); read numbers that are "
    "only counted or shown by x.item(), not by int(x); where a tensor holds a position, such as a "
    "queue's pointer, calculate the indices with tensors: "
    "queue.index_copy_(1, (pointer + torch.arange(n)) % size, keys)"
)
R = TypeVar("R", bound=_Runs)


@dataclass(frozen=True, slots=True, eq=False)
class Captured(Generic[R]):
    """One capture."""

    step: CapturedStep
    runners: list[R]
    """Of its variants: the first step, if there is one, and the steady one."""
    key: tuple[Hashable, ...]
    """`StepCall.key` of the call that it was captured from."""
    reason: Misfit
    """Why it was captured."""
    seconds: float
    """What capture and planning took."""


class Captures(Sequence[Captured[R]]):
    """The captures of one step that are kept, the most recently used first.

    A call looks only at those whose arguments were like its own, whatever the number of others, and
    asks guards that several of them share once.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.dropped = 0
        """How many have been dropped."""
        self._once: dict[Captured[R], str] = {}
        """Those that no later call has used, each with the place that it was made for."""
        self._made_once: Counter[str] = Counter()
        """For each place, how many such captures there have been, dropped ones too."""
        self._told: set[str] = set()
        """Places of which the user has been warned."""
        self._captures: OrderedDict[Captured[R], None] = OrderedDict()
        self._by_key: dict[tuple[Hashable, ...], list[Captured[R]]] = {}
        self.larger: tuple[Captured[R], tuple[int, ...]] | None = None
        """What the last call that was looked for needs: a capture that holds for it, planned for
        these sizes."""

    def __len__(self) -> int:
        return len(self._captures)

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]

    def __iter__(self) -> Iterator[Captured[R]]:
        return reversed(self._captures)

    def find(self, call: StepCall, taker: Taker) -> tuple[Captured[R], R] | Misfit:
        """The capture that fits a call, or why the most similar capture does not fit."""
        first, self.larger = None, None
        alike = self._by_key.get(call.key(taker), ())
        ranges = (one for one in self if one.step.arguments.sizes is not None and one not in alike)
        for captured in (*alike, *ranges):
            misfit = captured.step.failure(call)
            if isinstance(misfit, Larger):
                self.larger = captured, misfit.values
            for runner in () if misfit else captured.runners:
                misfit = runner.failure(call) or captured.step.state_failure(
                    call, is_first=runner.is_first
                )
                if misfit is None:
                    self._use(captured)
                    return captured, runner
            first = first or misfit
        if first is None and self._captures:
            first = next(iter(self)).step.failure(call)
        return first or Misfit("it is the first call")

    def replace(self, captured: Captured[R], other: Captured[R]) -> None:
        """Keeps one in another's place."""
        del self._captures[captured]
        self._captures[other] = None
        self._once.pop(captured, None)
        alike = self._by_key[captured.key]
        alike[alike.index(captured)] = other

    def add(self, captured: Captured[R]) -> Captured[R] | None:
        """Keeps one more. Returns the capture that was dropped for it; None if none was."""
        dropped = None
        if len(self._captures) >= self.most:
            dropped, _ = self._captures.popitem(last=False)
            self._by_key[dropped.key].remove(dropped)
            if not self._by_key[dropped.key]:
                del self._by_key[dropped.key]
            self.dropped += 1
            self._once.pop(dropped, None)
        self._captures[captured] = None
        place = captured.reason.place
        self._once[captured] = place
        self._made_once[place] += 1
        self._by_key.setdefault(captured.key, []).insert(0, captured)
        return dropped

    def repeats(self, captured: Captured[R]) -> bool:
        """Whether, with this capture, so many have been made because of one thing, none of which a
        later call has used, that a warning is due.
        """
        return self._made_once[captured.reason.place] >= MANY and self.is_news(captured)

    def has_run_again(self) -> bool:
        """Whether a later call has used one of the captures."""
        return any(captured not in self._once for captured in self._captures)

    def has_made(self, place: str) -> bool:
        """Whether a capture was made because of one place, which no later call has used."""
        return self._made_once[place] > 0

    def is_news(self, captured: Captured[R]) -> bool:
        """Whether the user has had no warning yet of what this capture was made for; now there is
        to be one.
        """
        place = captured.reason.place
        is_told = place in self._told
        self._told.add(place)
        return not is_told

    def advice(self, dropped: Captured[R] | None) -> str:
        """What the user can do about many captures, judged by what differs between them and the one
        that was dropped for the newest.
        """
        newest = next(iter(self))
        known = [*self] if dropped is None else [*self, dropped]
        keys = [captured.key for captured in known if len(captured.key) == len(newest.key)]
        counts = [len(set(values)) for values in zip(*keys, strict=True)]
        place = max(range(len(counts)), key=counts.__getitem__, default=-1)
        if place < 0 or counts[place] == 1 or counts[place] * _FEW < len(keys):
            return (
                "What changes from call to call belongs in tensors, or in numbers among the arguments that the step only calculates with. "
                f"Objects that the step reads are best made once, before the first call. {_BUCKETS}"
            )
        path, kind = newest.step.arguments.described()[place]
        if kind == "tensor":
            return (
                f"{path} has come in {counts[place]} kinds lately: pad it to a few lengths, or keep more plans by "
                f"roam.compile(max_plans=...)"
            )
        if kind == "object":
            return (
                f"{path} has been {counts[place]} different objects lately, and a plan is for one object, which it keeps alive: pass "
                "the same one to all calls, or, to train one model after another, call roam.compile anew for each"
            )
        return (
            f"{path} has come with {counts[place]} values lately: if the step only shows or counts them, "
            "leave them out of the arguments; otherwise make a tensor of them, or numbers that the step only calculates "
            "with, or keep more plans by roam.compile(max_plans=...)"
        )

    def _use(self, captured: Captured[R]) -> None:
        place = self._once.pop(captured, None)
        if place is not None:
            self._made_once[place] -= 1
        with suppress(LookupError, ValueError):  # another thread has just dropped it
            self._captures.move_to_end(captured)
            alike = self._by_key[captured.key]
            if alike[0] is not captured:
                alike.remove(captured)
                alike.insert(0, captured)
