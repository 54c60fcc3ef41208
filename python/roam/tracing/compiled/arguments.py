"""Describes the arguments of a compiled function's call in a trace, without its fake tensors: a
call with real tensors of the same metadata can be made of it, and two calls can be compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, NoReturn, Protocol

import torch

from roam.state.equality import is_plain
from roam.state.library_code import is_library
from roam.state.live_scalars import is_live
from roam.torch_compat.private import DYNAMIC_INDICES, FakeTensor, c_pointer, is_marked, is_view
from roam.tracing.compiled.frames import contents_of


class CannotBeGiven(Protocol):
    """Refuses a kind of argument."""

    def __call__(self, kind: str, remedy: str) -> NoReturn: ...


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Where a tensor lies that shares its memory with others that a compiled function may use.

    Attributes:
        first: where among the arguments the first one of them is.
        size: how many elements the memory has.
        offset: of the tensor, in elements.
        is_view: whether autograd knows the tensor as a view of another.
        known: the identity of a real tensor from before the step that lies there, if there is one.
    """

    first: int
    size: int
    offset: int
    is_view: bool
    known: int | None


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """A tensor that a compiled function was given."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool
    known: int | None
    """The identity of the real tensor, if it is one from before the step."""
    place: int
    """Where among the arguments it is first."""
    variable: frozenset[int]
    """Its dimensions that vary in the compiled code that made it. They then vary in code that is
    compiled for it too."""
    memory: SharedMemory | None
    """None if it shares its memory with nothing."""

    def made_in(self, base: torch.Tensor) -> torch.Tensor:
        """The same, in the memory of another one."""
        assert self.memory is not None, "it shares its memory"
        with torch.set_grad_enabled(self.requires_grad):
            source = base if self.requires_grad or not base.requires_grad else base.detach()
            tensor = source.as_strided(self.shape, self.stride, self.memory.offset)
        if self.is_leaf != tensor.is_leaf or self.requires_grad != tensor.requires_grad:
            tensor = tensor.detach().requires_grad_(self.requires_grad)
        return self._marked(tensor)

    def made(self) -> torch.Tensor:
        """A real tensor like it, whose values nobody looks at."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        tensor.requires_grad_(self.requires_grad)
        if not self.is_leaf and self.requires_grad:
            with torch.enable_grad():
                other = tensor.clone()
            tensor = other if other.stride() == self.stride else tensor
        return self._marked(tensor)

    def _marked(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.variable:
            setattr(tensor, DYNAMIC_INDICES, set(self.variable))
        return tensor


class Reals:
    """The real tensors from before the step that a trace has fakes of."""

    def __init__(self, fakes: Sequence[tuple[Any, Any]]) -> None:
        """`fakes`: every real tensor with its fake."""
        self._of_fake: dict[int, tuple[Any, torch.Tensor]] = {
            id(fake): (fake, real) for real, fake in fakes
        }
        self._in_memory = {
            c_pointer(fake.untyped_storage()): real
            for real, fake in reversed(fakes)
            if isinstance(fake, FakeTensor)
        }

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (real for _, real in self._of_fake.values())

    def of(self, leaf: Any) -> torch.Tensor | None:
        """The real tensor that a value stands for; None if it stands for none."""
        _, real = self._of_fake.get(id(leaf), (None, None))
        return real

    def lying_in(self, memory: int) -> torch.Tensor | None:
        """The first real tensor that lies in the memory at this address, which is that of a fake's;
        None if there is none.
        """
        return self._in_memory.get(memory)


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a function is given, in a form that needs no trace.

    Attributes:
        leaves: values, with `GivenTensor` for tensors.
        reals: by identity, the real tensors from before the step that they lie in.
    """

    leaves: list[Any]
    reals: dict[int, weakref.ref[torch.Tensor]]

    @classmethod
    def of(cls, leaves: Sequence[Any], reals: Reals, cannot_be_given: CannotBeGiven) -> Arguments:
        """Those of a call in a trace.

        Args:
            leaves: what the function is given, in the trace.
            reals: the trace's.
            cannot_be_given: called with what cannot be told without fakes.
        """
        places = {id(leaf): place for place, leaf in reversed(list(enumerate(leaves)))}
        memories = _memories(leaves, reals, cannot_be_given)
        described = [
            _described(
                leaf,
                places[id(leaf)],
                memories.get(id(leaf), (None, None))[0],
                reals,
                cannot_be_given,
            )
            for leaf in leaves
        ]
        used = [*map(reals.of, leaves), *(real for _, real in memories.values())]
        return cls(described, {id(real): weakref.ref(real) for real in used if real is not None})

    def key(self) -> object:
        """What is equal for calls that the same code is compiled for."""
        return tuple(map(_key, self.leaves))

    def modules(self) -> list[torch.nn.Module]:
        """The modules among them, with all their submodules."""
        given = [leaf for leaf in self.leaves if isinstance(leaf, torch.nn.Module)]
        return [part for module in given for part in module.modules()]

    def made(self) -> list[Any]:
        """The same with real tensors, those from before the step and others of the same metadata.
        Tensors that share their memory in the call share it here.
        """
        made = list[Any]()
        bases = self._bases()
        for leaf in self.leaves:
            real = self._real(leaf.known) if type(leaf) is GivenTensor else None
            if type(leaf) is not GivenTensor:
                made.append(leaf)
            elif real is not None:
                made.append(real)
            elif leaf.place < len(made):
                made.append(made[leaf.place])
            elif leaf.memory is None:
                made.append(leaf.made())
            else:
                given, base = bases[leaf.memory.first]
                made.append(base if given is leaf else leaf.made_in(base))
        return made

    def _real(self, known: int | None) -> torch.Tensor | None:
        return None if known is None else self.reals[known]()

    def _bases(self) -> dict[int, tuple[GivenTensor | None, torch.Tensor]]:
        """For each memory that several tensors share, by `SharedMemory.first`, a tensor that the
        others are views of, and which of the arguments it is.
        """
        bases: dict[int, tuple[GivenTensor | None, torch.Tensor]] = {}
        shared: list[Any] = [one for one in self.leaves if type(one) is GivenTensor and one.memory]
        for leaf in sorted(shared, key=lambda one: one.memory.is_view):
            memory = leaf.memory
            if memory.first in bases:
                continue
            base = self._real(memory.known)
            given = None
            if base is None and not memory.is_view:
                given, base = leaf, leaf.made()
            if base is None or _elements(base) < memory.size:
                needs = any(one.requires_grad for one in shared if one.memory.first == memory.first)
                whole = replace(
                    leaf,
                    shape=(memory.size,),
                    stride=(1,),
                    requires_grad=needs,
                    variable=frozenset(),
                )
                given, base = None, whole.made()
            bases[memory.first] = given, base
        return bases


def _elements(tensor: torch.Tensor) -> int:
    """How many elements the memory of a tensor has."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _memories(
    leaves: Sequence[Any], reals: Reals, cannot_be_given: CannotBeGiven
) -> dict[int, tuple[SharedMemory, torch.Tensor | None]]:
    """By identity, where those arguments lie that share their memory with another one, or with a
    tensor from before the step, and such a tensor: what Dynamo makes of a function that changes one
    of them depends on it.
    """
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, FakeTensor)}
    together: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors.values():
        together.setdefault(c_pointer(tensor.untyped_storage()), []).append(tensor)
    memories: dict[int, tuple[SharedMemory, torch.Tensor | None]] = {}
    for pointer, sharing in together.items():
        real = reals.lying_in(pointer)
        if len(sharing) == 1 and (real is None or reals.of(sharing[0]) is not None):
            continue
        kinds = {one.dtype for one in sharing}
        if real is not None and real.dtype not in kinds:
            real = None
        if len(kinds) > 1:
            cannot_be_given("memory in two dtypes", "give it a copy of one of the tensors")
        first = min(place for place, leaf in enumerate(leaves) if leaf is sharing[0])
        for one in sharing:
            memory = SharedMemory(
                first,
                one.untyped_storage().nbytes() // one.element_size(),
                int(one.storage_offset()),
                is_view(one),
                None if real is None else id(real),
            )
            memories[id(one)] = memory, real
    return memories


def _described(
    leaf: Any, place: int, memory: SharedMemory | None, reals: Reals, cannot_be_given: CannotBeGiven
) -> Any:
    """An argument without fakes."""
    if isinstance(leaf, torch.Tensor):
        known = reals.of(leaf)
        if type(leaf) is not FakeTensor and not isinstance(leaf, torch.nn.Parameter):
            cannot_be_given("tensor subclass", "give it plain tensors")
        if leaf.is_conj() or leaf.is_neg():
            cannot_be_given(
                "conjugate or a negative that is not computed yet",
                "give it x.resolve_conj() or x.resolve_neg()",
            )
        if known is None and is_marked(leaf):
            cannot_be_given(
                "tensor whose sizes the step has marked for torch.compile",
                "pass dynamic=True to torch.compile instead",
            )
        fake: Any = leaf
        return GivenTensor(
            tuple(leaf.shape),
            leaf.stride(),
            leaf.dtype,
            fake.fake_device,
            leaf.requires_grad,
            leaf.is_leaf,
            None if known is None else id(known),
            place,
            frozenset(getattr(leaf, DYNAMIC_INDICES, ())),
            memory,
        )
    if isinstance(leaf, (FunctionType, MethodType)):
        if _holds_tensors(leaf, lambda one: reals.of(one) is not None):
            cannot_be_given(
                "function that holds tensors of the step", "pass the tensors by themselves"
            )
        return leaf
    if isinstance(leaf, (torch.nn.Module, type)) or is_plain(leaf):
        return leaf
    cannot_be_given(
        "number that the step computes" if is_live(leaf) else type(leaf).__name__,
        "give it tensors, plain numbers, the containers that torch.utils._pytree knows, and objects that the step makes of these",
    )  # fmt: skip


def _holds_tensors(
    value: Any, is_known: Callable[[Any], bool], seen: set[int] | None = None
) -> bool:
    """Whether a function closes over a tensor that is not known, or is a method of what holds
    one.
    """
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (torch.nn.Module, type)):
        return False
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return not is_known(value)
    held: list[Any] = []
    if type(value) is MethodType:
        held = [value.__self__, value.__func__]
    elif type(value) is FunctionType:
        defaults = value.__defaults__, value.__kwdefaults__
        held = [*map(contents_of, value.__closure__ or ()), *defaults]
    elif type(value) in (list, tuple, dict):
        held = list(value.values() if type(value) is dict else value)
    elif type(getattr(value, "__dict__", None)) is dict and not is_library(type(value).__module__):
        held = list(vars(value).values())
    return any(_holds_tensors(one, is_known, seen) for one in held)


def _key(described: Any) -> object:
    if type(described) is GivenTensor:
        return described
    if type(described) is MethodType:  # made anew whenever it is asked for
        return MethodType, id(described.__self__), id(described.__func__)
    return type(described), repr(described) if is_plain(described) else id(described)
