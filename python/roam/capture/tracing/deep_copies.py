"""Copies that a step makes of tensors by `copy.deepcopy`, alone or in what holds them: state dicts,
modules, optimizers. Copies of random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

import torch

from roam.program.ir import has_no_gaps
from roam.state.snapshot import is_same_state, source_of
from roam.torch_compat.private import HOOKS, c_pointer, is_dtensor

Refuse = Callable[..., NoReturn]

_REMEDY: Final = "do that outside of the step, and use x.clone() within it"


def deep_copier(
    refuse: Refuse,
    own_attributes: Callable[[Any], dict[str, Any]],
    real_of: Callable[[Any], Any],
    identity: Callable[[Any], int],
) -> Callable[[Any, dict[int, Any]], Any]:
    """What stands in for `Tensor.__deepcopy__` of fakes while a step is traced: it makes the copy
    by operators that the trace records.

    Args:
        refuse: raises a refusal, with the code.
        own_attributes: gives the attributes that the user has set on a tensor.
        real_of: gives the tensor that a fake stands for, or None for one that the step made.
        identity: gives the `id` that the user's code sees for a fake, or refuses.
    """

    def copied(fake: Any, memo: dict[int, Any]) -> Any:
        real = real_of(fake)
        if id(fake) in memo:
            return memo[id(fake)]
        if real is not None and id(real) in memo:  # the user's code has put it there, by its `id`
            return memo[identity(fake)]
        if not fake.is_leaf:  # eager PyTorch's own error
            return torch.Tensor.__deepcopy__(fake, memo)  # type: ignore[no-untyped-call]
        if (
            own_attributes(fake)
            or any(getattr(fake, name) for name in HOOKS)
            or isinstance(fake, torch.nn.Buffer)
        ):
            refuse(
                "the step copies a Buffer, or a tensor with attributes or hooks of its own, by "
                f"copy.deepcopy; {_REMEDY}",
                code="pickled",
            )
        if isinstance(fake, torch.nn.Parameter):  # its copy gets memory of its own, and no gradient
            made = torch.nn.Parameter(_cloned(fake), fake.requires_grad)
        else:
            # The memory that tensors share is copied once, and their copies share it.
            storages: dict[int, Any] = memo.setdefault(id(_cloned), {})
            first = storages.get(c_pointer(fake.untyped_storage())) if _is_strided(fake) else None
            if not (_is_whole(fake) if first is None else _lies_alike(fake, first)):
                refuse(
                    "the step copies a tensor that is a part of another one, or has gaps in it, by "
                    f"copy.deepcopy; {_REMEDY}",
                    code="pickled",
                )
            made = _cloned(fake) if first is None else first.detach()
            storages.setdefault(c_pointer(fake.untyped_storage()), made)
            made.requires_grad_(fake.requires_grad)
            if fake.grad is not None:
                # A function that names itself is a circle, which would keep the trace alive.
                made.grad = fake.grad.__deepcopy__(memo)
        memo[id(fake)] = made
        if real is not None:
            memo[id(real)] = made
        return made

    return copied


class CopiedGenerators:
    """Copies that a step makes, by `copy`, of the random generators of Python's and NumPy's that it
    holds. A draw from a copy leaves the generator as it was, so nothing else would tell that chance
    decides what runs.
    """

    def __init__(self, sources: Iterable[Any]) -> None:
        self._held = {id(source) for source in sources}
        self._made: list[tuple[Callable[[], Any], Any]] = []

    def stand_in(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in for the function by which `copy` makes objects."""

        def made(value: Any, *args: Any, **kwargs: Any) -> Any:
            copied = original(value, *args, **kwargs)
            if id(value) in self._held:
                _, read, _ = source_of("a copy", copied)
                self._made.append((read, read()))
            return copied

        return made

    def check(self, refuse: Refuse) -> None:
        """Refuses a step that has drawn from a copy."""
        if not all(is_same_state(read(), state) for read, state in self._made):
            refuse(
                "the step draws from a copy of a random generator, whose state may be another one "
                "at the next call; draw outside of the step, and pass the numbers to it",
                code="generator_state",
            )


def _cloned(fake: Any) -> Any:
    with torch.no_grad():
        return fake.detach().clone(memory_format=torch.preserve_format)


def _is_strided(fake: Any) -> bool:
    is_plain = not is_dtensor(fake) and fake.layout is torch.strided
    return is_plain and not fake.is_conj() and not fake.is_neg()


def _is_whole(fake: Any) -> bool:
    """Whether a tensor fills its storage, each byte once: `copy.deepcopy` copies whole storages."""
    return (
        _is_strided(fake)
        and fake.storage_offset() == 0
        and fake.untyped_storage().nbytes() == fake.numel() * fake.itemsize
        and has_no_gaps(fake.shape, fake.stride())
    )


def _lies_alike(one: Any, other: Any) -> bool:
    """Whether two tensors that fill a storage each lie there in the same way."""
    return (
        _is_whole(one)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


__all__ = ["CopiedGenerators", "deep_copier"]
