"""What two prototypes of planning within a budget took, for `roam bench memory --part prototypes`.

Both were scripts over files of graphs, written before the search, and used roam's cost model. At
the peak of an order, `greedy` drops the saved tensors with the least time per byte, and makes each
of them again once, before its first use in the backward pass. `eviction` drops tensors that do not
fit, chosen by their next use, and makes them again as often as needed.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 2**20
_GREEDY_MIB = {"gpt2": 10169, "bert-base": 7552, "vit_b_16": 3655, "resnet50": 2636, "unet": 2196}
"""Step-local bytes of program order without reuse, of which `greedy`'s shares are."""
_EVICTION_MIB = _GREEDY_MIB | {"vit_b_16": 3643, "resnet50": 2628}
"""Those of the plan without reuse, of which `eviction`'s are."""
_GREEDY: dict[str, dict[int, float | None]] = {
    "gpt2": {71: 1.6, 52: 4.6, 32: 27.0},
    "bert-base": {73: 1.4, 53: 3.8},
    "vit_b_16": {78: 0.5, 58: 3.4, 38: 12.0},
    "resnet50": {78: 1.9, 59: 4.3},
    "unet": {77: 1.0, 60: 2.5},
}
_EVICTION: dict[str, dict[int, float | None]] = {
    "gpt2": {75: 2.2, 50: 9.1, 35: None, 25: None},
    "bert-base": {75: 2.3, 50: 10.8, 35: None, 25: None},
    "vit_b_16": {75: 0.8, 50: 7.9, 35: 13.6, 25: 17.8},
    "resnet50": {75: 2.4, 50: 6.3, 35: 9.7, 25: 15.6},
    "unet": {75: 1.1, 50: 5.8, 35: 19.0, 25: 53.0},
}


@dataclass(frozen=True, slots=True)
class Entry:
    """What a prototype took for one network.

    Attributes:
        prototype: `greedy` or `eviction`.
        net: which of the networks in large size.
        percent: of the step-local bytes that the prototype counted from.
        local_bytes: the step-local bytes that this is.
        extra_percent: extra time, in percent of the step's; None if it found no plan.
    """

    prototype: str
    net: str
    percent: int
    local_bytes: int
    extra_percent: float | None


ENTRIES = tuple(
    Entry(prototype, net, percent, whole[net] * _MIB * percent // 100, extra_percent)
    for prototype, whole, entries in (
        ("greedy", _GREEDY_MIB, _GREEDY),
        ("eviction", _EVICTION_MIB, _EVICTION),
    )
    for net, figures in entries.items()
    for percent, extra_percent in figures.items()
)


def best_percent(net: str, local_bytes: int) -> float | None:
    """The least extra time, in percent, that either prototype took within that memory."""
    within = [
        entry.extra_percent
        for entry in ENTRIES
        if entry.net == net and entry.local_bytes <= local_bytes and entry.extra_percent is not None
    ]
    return min(within, default=None)
