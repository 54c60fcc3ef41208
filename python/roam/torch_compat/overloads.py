"""Overloads of PyTorch's operators that write where they are told, by their schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from roam.torch_compat.private import OpOverload, has_kernel_for, schema_of

_COMPOSED = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_FACTORY_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})
"""Arguments of functional overloads that an `out=` overload takes from the tensor it is given."""


def out_overload(
    target: OpOverload, device: str
) -> tuple[tuple[OpOverload, tuple[str, ...], frozenset[str]] | None, str]:
    """The overload of the same arguments that takes one tensor more for each result, if it has a
    kernel of its own: itself, what it calls these, and the arguments that it does not take. If
    there is none, why.
    """
    reason = "it has no out= overload"
    wanted = signature(target)
    kept = [argument for argument in wanted if argument[0] not in _FACTORY_OPTIONS]
    is_factory = len(wanted) - len(kept) == len(_FACTORY_OPTIONS)
    for overload, names, taken in out_overloads(target):
        if taken == wanted or (is_factory and taken == kept):
            if is_native(overload, device):
                dropped = frozenset() if taken == wanted else _FACTORY_OPTIONS
                return (overload, names, dropped), ""
            reason = "its out= overload computes elsewhere and copies"
    return None, reason


def out_overloads(
    target: OpOverload,
) -> Iterator[tuple[OpOverload, tuple[str, ...], list[tuple[str, str]]]]:
    """Overloads with an `out=` argument for each result, the names of these, and the other
    arguments.
    """
    for overload in overloads(target.overloadpacket):
        names = tuple(
            argument.name for argument in schema_of(overload).arguments if argument.is_out
        )
        if len(names) == len(schema_of(target).returns):
            yield (
                overload,
                names,
                [argument for argument in signature(overload) if argument[0] not in names],
            )


def in_place_overload(target: OpOverload, device: str) -> OpOverload | None:
    """The overload of the same arguments that changes the first of them."""
    packet = getattr(torch.ops.aten, f"{schema_of(target).name.removeprefix('aten::')}_", None)
    if packet is None or len(schema_of(target).returns) != 1:
        return None
    for overload in overloads(packet):
        changed = [
            argument.name
            for argument in schema_of(overload).arguments
            if argument.alias_info is not None
        ]
        is_partner = signature(overload) == signature(target) and changed == [
            schema_of(target).arguments[0].name
        ]
        if is_partner and is_native(overload, device):
            return overload
    return None


def overloads(packet: Any) -> list[OpOverload]:
    """All overloads of an operator."""
    return [getattr(packet, name) for name in packet.overloads()]


def signature(overload: OpOverload) -> list[tuple[str, str]]:
    """The names and types of its arguments."""
    return [(argument.name, str(argument.type)) for argument in schema_of(overload).arguments]


def is_native(overload: OpOverload, device: str) -> bool:
    """Whether it has a written kernel, not one generated from the functional overload and a
    copy.
    """
    return torch.Tag.generated not in overload.tags and any(
        has_kernel_for(overload.name(), key) for key in (device.upper(), *_COMPOSED)
    )
