"""Branches: conditions on values that a step computes, where both answers let the step go on.

`if norm > limit: ...`, or an optimizer that projects an update by an angle. A plan holds for one
answer to each, which its runs check before they change anything (`tracing/numbers/conditions.py`,
`program/early_checks.py`). Fake tensors have no values, so they cannot give these answers. Instead,
the answers are noted while the user's own function runs (`watching`), at the line that asks, and
given to the next trace. If no such run has been watched, the answers are guessed. A plan with a
guessed answer is as exact as any other, but it is not used if the guess is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

import torch

from roam.torch_compat.patches import replaced
from roam.tracing.numbers.conditions import finite_answer, idle_answer, loop_of
from roam.tracing.numbers.rng import watched
from roam.tracing.source_location import user_place

_ASKING = (
    "item",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "is_nonzero",
    "equal",
    "allclose",
)
"""Methods of tensors, and functions of PyTorch's, by which the value of a tensor reaches Python."""
_MOST_GUESSES = 1024
"""The most guesses in one trace. A loop that no guess ends asks for more."""
_MANY_TURNS = 16
_MANY_OPERATORS = 20_000
"""A loop that values end is refused once it has asked so often at one line, and has run so many
operators meanwhile. A plan would be for this number of turns alone, and take long to make."""

Place = tuple[str, int]


class Seen:
    """The values of tensors that reached Python in one run of the user's function, by the line that
    asked.
    """

    def __init__(self) -> None:
        self.values: dict[Place, list[Any]] = {}

    def note(self, value: Any) -> None:
        """Notes a value that reaches the line that runs now."""
        self.values.setdefault(user_place(), []).append(value)


_watching: list[Seen] = []
_replaced = ExitStack()


@contextmanager
def watching(seen: Seen) -> Iterator[None]:
    """In the block, notes which values reach Python. Operators run as usual, without a dispatch
    mode, which would change what autograd does.

    What other threads ask for meanwhile is noted too: it can make a plan useless, but not wrong.
    """
    # A capture puts stand-ins in the same places. It may come in the block, but not while these are
    # put there or taken away.
    with watched:
        if not _watching:
            functions = [
                (holder, name, getattr(holder, name, None))
                for holder in (torch.Tensor, torch)
                for name in _ASKING
            ]
            _replaced.enter_context(
                replaced(
                    (holder, name, _noting(function))
                    for holder, name, function in functions
                    if function is not None
                )
            )
        _watching.append(seen)
    try:
        yield
    finally:
        with watched:
            _watching.remove(seen)
            if not _watching:
                _replaced.close()


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        if type(value) in (bool, int, float):
            for seen in tuple(_watching):
                seen.note(value)
        return value

    return call


class Answers:
    """The answers that one capture takes for granted.

    Args:
        known: the first answers, in the order in which the step's code asks.
        seen: what was seen in a run that gave these answers; None if none was watched.
        likely: what to guess first, in the same order; the first of them are `known`.
        may_guess: whether answers may be guessed. If not, the first trace that has to guess ends
            there.

    Attributes:
        guessed: whether an answer has had to be guessed.
        passing: by the line and how often it has asked before, the answer with which a check
            passes that PyTorch makes in C++. That is found out where the other answer raises an
            error.
    """

    def __init__(
        self,
        known: tuple[bool, ...] = (),
        seen: Seen | None = None,
        likely: tuple[bool, ...] = (),
        *,
        may_guess: bool = True,
    ) -> None:
        self.known = known
        self.seen = seen
        self.likely = likely
        self.may_guess = may_guess
        self.guessed = False
        self.passing: dict[tuple[Place, int], bool] = {}

    def replay(self, root: CodeType) -> Replay:
        """The answers for one trace, in which code of `root` calls the step."""
        return Replay(self, root)


class Replay:
    """Gives a trace what a watched run saw, in the same order."""

    def __init__(self, answers: Answers, root: CodeType) -> None:
        self._answers = answers
        self._root = root
        self._values = (
            {}
            if answers.seen is None
            else {place: iter(at) for place, at in answers.seen.values.items()}
        )
        self._asked = self._guessed = 0
        self._times: dict[Place, int] = {}
        self._last: tuple[Place, int] = ("", 0), 0
        """The last question: the line, and how often it had asked before."""
        self._doubtful: bool | None = None
        """The answer to it, if another one may be right."""
        self._turns: dict[Place, tuple[int, int]] = {}
        """For each line, how often it has asked, and how many operators came before the first
        time."""

    def value(self) -> Any:
        """The next value that reached the line that runs now; None if none is known."""
        values = self._values.get(user_place()) if self._values else None
        return None if values is None else next(values, None)

    def passing_answer(self) -> bool | None:
        """The answer to the next question, if it is known to be a check of PyTorch's own."""
        place = user_place()
        times = self._times[place] = self._times.get(place, -1) + 1
        self._last, self._doubtful = (place, times), None
        return self._answers.passing.get(self._last)

    def blame(self) -> bool:
        """After an error that has come right after the last answer: has later traces take the other
        one for granted. False if this one was not in doubt.
        """
        if self._doubtful is None:
            return False
        self._answers.passing[self._last] = not self._doubtful
        return True

    def answer(self, seen: bool | None) -> bool | None:
        """The answer to the next question, of which the watched run has `seen` one; None if too
        many have been guessed, or none may be.
        """
        place, self._asked = self._asked, self._asked + 1
        if place < len(self._answers.known):
            return self._answers.known[place]
        if seen is None and place < len(self._answers.likely):
            self._answers.guessed = True
            return self._answers.likely[place]
        answer = finite_answer() if seen is None else seen
        if answer is None:
            self._answers.guessed = True
            self._guessed += 1
            may_guess = self._answers.may_guess and self._guessed <= _MOST_GUESSES
            answer = idle_answer() if may_guess else None
        self._doubtful = answer
        return answer

    def long_loop(self, operators: int) -> str | None:
        """The loop around the line that asks now, if values end it and it has run for too long;
        None if not. `operators` have been recorded so far.
        """
        place = user_place()
        turns, before = self._turns.get(place, (0, operators))
        self._turns[place] = turns + 1, before
        is_long = operators - before > _MANY_OPERATORS or self._guessed > _MOST_GUESSES
        return loop_of(self._root) if is_long and turns >= _MANY_TURNS else None
