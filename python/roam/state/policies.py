"""Policies: how a plan treats each place of the state that a step reaches.

A trace begins with the lowest policy that is not known to be wrong, and compares the state before
and after the step. What it finds against a policy raises one `Retrace`, with the next policy of
each place at fault, and the step is traced again. Policies only climb, so this ends.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from enum import IntEnum
from typing import Any


class Policy(IntEnum):
    """How a plan treats a place, by how much of what the step does there it follows."""

    IGNORED = 0
    """The step has not looked there: nothing is compared, and nothing is faked."""
    WRITTEN = 1
    """The step sets it before it looks: each run sets it, and nothing is compared."""
    READ = 2
    """The step looks there. Tensors, learning rates and float arguments are read anew by each run;
    anything else has to be as it was."""
    COUNTED = 3
    """A number that the step changes: each run reads it anew, and leaves another one."""
    APPENDED = 4
    """A list to which the step only adds: each run adds to it, and nobody looks into it."""
    FIXED = 5
    """It has to be as it was, since a policy below has turned out to be wrong."""


class Policies:
    """The policy of each place: of attributes by the key of the object and their name
    (`attribute_reads.Edge`), of other state by path, of arguments by path and class.
    """

    def __init__(self) -> None:
        self._all: dict[Hashable, Policy] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all)

    def of(self, place: Hashable) -> Policy:
        """The policy of a place; `IGNORED` if nothing is known of it."""
        return self._all.get(place, Policy.IGNORED)

    def places(self, policy: Policy) -> list[Any]:
        """The places that have a policy, in the order in which they were first met."""
        return [place for place, own in self._all.items() if own is policy]

    def below(self, policy: Policy, places: Iterable[Hashable]) -> set[Any]:
        """Those places whose policy is a lower one."""
        return {place for place in places if self.of(place) < policy}

    def climb(self, policy: Policy, places: Collection[Hashable]) -> None:
        """Gives places a policy, where theirs is a lower one."""
        for place in self.below(policy, places):
            self._all[place] = policy

    def copy(self) -> Policies:
        """The same policies, which climb by themselves from now on."""
        made = Policies()
        made._all = dict(self._all)
        return made


class Retrace(Exception):
    """The step has to be traced again.

    Attributes:
        climbs: the places whose policies have to climb first, by the policies that they get. None
            are there if what a trace relies on has been noted already: what the step looks at
            (`Reads`), or which compiled functions it calls.
        settled: what a trace supposes to be set before it, for the next one to check.
        first: what to do before the next trace; what is supposed to be set stays so.
    """

    def __init__(
        self,
        climbs: dict[Policy, Collection[Hashable]] | None = None,
        *,
        settled: Any = None,
        first: Any = None,
    ) -> None:
        super().__init__()
        self.climbs = climbs or {}
        self.settled = settled
        self.first = first
