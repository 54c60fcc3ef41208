"""The spaces of optimizers and gradient scalers: which of their values stay the same from step to
step, and which of their numbers are live.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from roam.state.equality import MISSING, same
from roam.state.spaces import Items, Space, child

# Entries of a group that are live numbers even if they are integers. Of all other entries only
# floats are.
RATE_KEYS: Final = frozenset({"lr", "initial_lr", "swa_lr"})
# What torch itself writes while an optimizer is used; `_opt_called` is how a scheduler notices that
# a step was taken.
LIVE_OPTIMIZER_KEYS: Final = frozenset(
    {"state", "param_groups", "_opt_called", "_step_count", "_need_device_dtype_check_for_fused"}
)


@functools.lru_cache(maxsize=None, typed=True)
def _place(group: int, key: str) -> tuple[int, str]:
    """The key of a group's entry, one tuple for all calls: guards compare identities first."""
    return group, key


class OptimizerSpace(Space):
    """An optimizer's hyper-parameters as the step sees them: through the optimizer, whichever
    objects hold them now.

    ``load_state_dict`` replaces the list of groups and each group's dictionary; equal contents are
    the same hyperparameters. Keys are attribute names, ``param_groups`` (the number of groups) and
    pairs of a group's number and an entry's name; the key of a tensor inside an entry has its place
    there as a third part.
    """

    __slots__ = ()
    COUNT: Final = "param_groups"

    def items(self) -> Items:
        attributes: dict[str, Any] = self.holder.__dict__
        items: Items = [
            (key, value) for key, value in attributes.items() if key not in LIVE_OPTIMIZER_KEYS
        ]
        groups = attributes["param_groups"]
        items.append((self.COUNT, len(groups)))
        for number, group in enumerate(groups):
            for key in sorted(group, key=str):
                value = group[key]
                items.append((_place(number, key), tuple(value) if type(value) is list else value))
        return items

    def get(self, key: Any) -> Any:
        if type(key) is tuple:
            entry = self.holder.param_groups[key[0]].get(key[1], MISSING)
            return entry if len(key) == 2 else entry[key[2]]
        return (
            len(self.holder.param_groups)
            if key == self.COUNT
            else self.holder.__dict__.get(key, MISSING)
        )

    def set(self, key: Any, value: Any) -> None:
        if type(key) is tuple:
            group = self.holder.param_groups[key[0]]
            if len(key) == 3:
                entry = group[key[1]]
                value = type(entry)([*entry[: key[2]], value, *entry[key[2] + 1 :]])
            group[key[1]] = value
        else:
            self.holder.__dict__[key] = value

    def is_live(self, key: Any, old: Any, value: Any) -> bool:
        if type(key) is not tuple or key[1] == "params":
            return False
        if type(old) is tuple and type(value) is tuple:
            return len(old) == len(value) and all(
                same(one, other) or _are_live(key[1], one, other)
                for one, other in zip(old, value, strict=True)
            )
        return _are_live(key[1], old, value)

    def label(self, key: Any) -> str:
        if type(key) is tuple:
            return f"{self.path}.param_groups[{key[0]}]" + "".join(
                f"[{part!r}]" for part in key[1:]
            )
        return f"{self.path}.{key}"


def is_live_number(key: str, value: object) -> bool:
    """Whether an entry of an optimizer's group, or a part of one, is a number that a schedule may
    change from call to call.

    Integers are counts and switches, except for a learning rate.
    """
    return issubclass(type(value), (float, torch.SymFloat)) or (
        type(value) is int and key in RATE_KEYS
    )


def _are_live(key: str, old: object, value: object) -> bool:
    """Whether both are live numbers, or tensors, whose metadata is compared apart."""
    if issubclass(type(old), torch.Tensor):
        return issubclass(type(value), torch.Tensor)
    return is_live_number(key, old) and is_live_number(key, value)


class ScalerSpace(Space):
    """A gradient scaler's settings, and whether it is as `update` leaves it. Its dictionary is a
    space of its own, so `put` has nothing to do.
    """

    __slots__ = ()
    SETTINGS: Final = ("_enabled", "_growth_factor", "_backoff_factor", "_growth_interval")
    INITIAL: Final = ("_init_scale", "_init_growth_tracker")

    def __init__(self, holder: torch.amp.GradScaler, path: str) -> None:
        super().__init__(holder, path, label=child)

    def items(self) -> Items:
        attributes = self.holder.__dict__
        items: Items = [
            (key, attributes.get(key, MISSING)) for key in (*self.SETTINGS, *self.INITIAL)
        ]
        items.append(
            (
                "_per_optimizer_states",
                "as update() leaves it" if is_updated(self.holder) else "in use",
            )
        )
        return items

    def put(self, items: Items) -> None:
        pass

    def is_live(self, key: Any, old: Any, value: Any) -> bool:
        # Once there is a scale, nobody looks at the first one.
        return key in self.INITIAL and self.holder.__dict__.get("_scale") is not None


def is_updated(scaler: torch.amp.GradScaler) -> bool:
    """Whether a gradient scaler has worked on no optimizer since its last `update`."""
    states: Any = scaler.__dict__.get("_per_optimizer_states", {})
    return all(
        state["stage"].name == "READY" and not state["found_inf_per_device"]
        for state in states.values()
    )
