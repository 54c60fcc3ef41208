"""Looks up what references hold, many at once, in passes in which Python calls functions of C."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from roam.state.containers import MappingSpace
from roam.state.equality import MISSING
from roam.state.references import OptimizerReference, PlaceReference


def getter(reference: Any) -> Callable[[], Any]:
    """What `reference.get` does, without a function of Python where it is one look into a
    dictionary.
    """
    if isinstance(reference, PlaceReference):
        space = reference.space
        if type(space).get is MappingSpace.get:
            return functools.partial(dict.get, space.holder, reference.key, MISSING)
    found: Callable[[], Any] = reference.get
    return found


def picker(places: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """What takes the values at these places, or under these keys, out of many."""
    if len(places) < 2:
        return lambda values: [values[place] for place in places]
    return operator.itemgetter(*places)


class StateLookup:
    """Finds entries of optimizers' state.

    Args:
        references: those of the entries.
        filled: parameters that have state, as (optimizer, place).
    """

    def __init__(
        self, references: Sequence[OptimizerReference], filled: Iterable[tuple[Any, Any]]
    ) -> None:
        named = [*filled, *((one.optimizer, one.parameter) for one in references)]
        parameters: dict[tuple[int, int], tuple[Any, Any]] = {}
        for optimizer, place in named:
            parameters.setdefault((id(optimizer), id(place)), (optimizer, place))
        places = {key: place for place, key in enumerate(parameters)}
        self.places = [place for _, place in parameters.values()]
        """Of the parameters."""
        self._runs: list[tuple[Any, int]] = []
        """Each optimizer with the number of parameters that follow one another."""
        for optimizer, _ in parameters.values():
            before = self._runs.pop()[1] if self._runs and self._runs[-1][0] is optimizer else 0
            self._runs.append((optimizer, before + 1))
        self._groups: list[tuple[int, Callable[[Any], Sequence[Any]]]] = []
        """References of one parameter that follow one another: its place, and what takes their
        entries."""
        by_parameter = itertools.groupby(
            references, lambda one: places[id(one.optimizer), id(one.parameter)]
        )
        for place, group in by_parameter:
            self._groups.append((place, picker([one.key for one in group])))

    def of_parameters(self, held: Sequence[Any]) -> list[Any]:
        """What optimizers keep of each parameter, each once; None where they keep nothing.

        Args:
            held: what `places` hold.

        Raises:
            TypeError: a parameter's place holds what cannot be a key.
        """
        found: list[Any] = []
        waiting = iter(held)
        for optimizer, count in self._runs:
            state, parameters = optimizer.state, list(itertools.islice(waiting, count))
            # A step usually finds the parameters in their order, and hashing tensors takes longer.
            if len(state) == len(parameters) and all(map(operator.is_, state, parameters)):
                found += state.values()
            else:
                found += map(state.get, parameters)
        return found

    def entries(self, of_parameters: list[Any]) -> list[Any]:
        """The entries of the references, in their order.

        Args:
            of_parameters: what the function of this name found.

        Raises:
            LookupError, TypeError: one is not there.
        """
        found: list[Any] = []
        for place, pick in self._groups:
            found += pick(of_parameters[place])
        return found
