"""What a training step can reach, by what it is and where it lies."""

from __future__ import annotations

import types
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import torch

from roam.errors import CaptureError
from roam.state.attribute_reads import Edge, Reads
from roam.state.growing_lists import Growing
from roam.state.spaces import Space, is_under

TensorKind = Literal["parameter", "buffer", "group", "state", "loose", "argument"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A place that holds a tensor.

    Attributes:
        path: how a reader would write it.
        tensor: what was found there.
        space: the holder; ``slot.space.get(slot.key)`` is the tensor of now,
            ``slot.space.set(slot.key, t)`` puts another.
        kind: ``parameter`` and ``buffer`` of a module, ``group`` and ``state`` of an optimizer,
            ``argument`` among the call's arguments, ``loose`` anywhere else.
    """

    path: str
    tensor: torch.Tensor
    space: Space
    key: Any
    kind: TensorKind


@dataclass(frozen=True, slots=True)
class Place:
    """A space and how it is treated: `guarded` ones must stay as they are from step to step, the
    others are live state.

    Attributes:
        value: the identity of the value that it is part of (`Reach.links`); None if the step may
            get at it in ways that are not known.
        owner: the key of the object whose attributes these are, if its reads are noted.
    """

    space: Space
    guarded: bool
    value: int | None = None
    owner: int | None = None


class Reach:
    """What one call of a training step can reach.

    Every list is in the order of the walk: the arguments first, then the function; breadth first;
    the same program gives the same order. Each entry comes with its path.

    Attributes:
        modules: all modules, submodules too.
        optimizers, schedulers, scalers, generators: likewise; schedulers are torch's learning rate
            schedulers, scalers are ``torch.amp.GradScaler``, generators are ``torch.Generator``.
        random_sources: ``random.Random`` and NumPy generators that the step holds.
        iterators: iterators and generators that the step holds; what they have left cannot be put
            back.
        caches: functions with a `functools.lru_cache`.
        slots: every place that holds a tensor.
        places: every space, guarded or live.
        objects: objects of classes written in Python whose attributes are places.
        overwritten: (space, name, key of its object) of attributes that the step sets before it
            looks at them.
        edges: for the path of a tensor, module, optimizer, iterator, ..., the last attribute on the
            way to it, by which it can be left out (`Reads.defer`).
        reads: what is known of the attributes that the step looks at.
        links: for the identity of a value, those of the values that it holds, each with the
            attribute that the step has to look at to get there, or None.
        roots: identities of values that the step gets at whatever it looks at.
        code: that of all functions entered, each with its globals.
        held_elsewhere: for the identity of a leaf whose gradient's node something unknown holds,
            the refusal of a step that runs a backward pass.
        shared: the containers among the arguments that guarded state holds too.
        growing: lists to which the step only adds. What is in them is not entered.
        has_reporters: whether one of the values is from a package that tells people about a run.
    """

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.edges: dict[str, Edge | None] = {}
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.schedulers: list[tuple[str, Any]] = []
        self.scalers: list[tuple[str, Any]] = []
        self.generators: list[tuple[str, torch.Generator]] = []
        self.random_sources: list[tuple[str, Any]] = []
        self.iterators: list[tuple[str, Any]] = []
        self.has_reporters = False
        self.caches: list[tuple[str, Any]] = []
        self.slots: list[Slot] = []
        self.places: list[Place] = []
        self.objects: list[tuple[str, Any]] = []
        self.overwritten: list[tuple[Space, str, int]] = []
        self.links: defaultdict[int, list[tuple[int, Edge | None]]] = defaultdict(list)
        self.roots: set[int] = set()
        self.code: dict[types.CodeType, dict[str, Any]] = {}
        self.cells: dict[types.CodeType, tuple[types.CellType, ...]] = {}
        self.held_elsewhere: dict[int, CaptureError] = {}
        self.shared: list[Any] = []
        self.growing: list[Growing] = []

    def looked_at(self) -> set[int]:
        """Identities of the values that the step can have got at, by what it has looked at."""
        found, new = set(self.roots), list(self.roots)
        while new:
            for value, edge in self.links.get(new.pop(), ()):
                if value not in found and (
                    edge is None or self.reads.has(edge) or self.reads.has((edge[0], "_modules"))
                ):
                    found.add(value)
                    new.append(value)
        return found

    def edge_to(self, path: str) -> Edge | None:
        """By which attribute the value at a path, or what holds it, can be left out."""
        found = max(
            (known for known in self.edges if is_under(path, (known,))), key=len, default=""
        )
        return self.edges.get(found)

    def faked(self) -> list[Any]:
        """Everything that a trace replaces by fakes or live numbers, or runs in another way. It is
        equal for two walks if their traces would not differ.
        """
        entered = (self.modules, self.optimizers, self.scalers, self.generators)
        return [
            *((path, id(value)) for found in entered for path, value in found),
            *((slot.path, id(slot.tensor), slot.kind) for slot in self.slots),
        ]

    def may_be_narrower(self) -> bool:
        """Whether some of what `faked` lists is behind attributes that the step has not looked at,
        as far as is known now.
        """
        if self.reads.is_narrow or self.reads.everything or not self.reads.is_traced:
            return False
        if self.reads.overwrites():
            return True
        edges = (edge for edge in self.edges.values() if edge is not None)
        return not all(
            self.reads.has(edge) or self.reads.has((edge[0], "_modules")) for edge in edges
        )
