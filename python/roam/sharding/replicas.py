"""Finds out whether replicas that train on parts of a batch, and average their gradients, compute
what one process computes on the whole batch. This holds if the loss is a mean over samples, and the
samples do not depend on each other anywhere else. Whether it does is found by comparing the
operators of one process's step with those of a replica's step, by DTensor's rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from roam.sharding.check import GIVEN_SIZES, plain_arguments, target_of
from roam.sharding.rules import STRIDED, WHOLE, Rules, State, dimension
from roam.sharding.trace import Operator, Reference, Trace
from roam.torch_compat.private import schema_of

MEAN = -4
"""The state of a value whose mean over the replicas is the value of one process."""
NUMBERS = -5
"""The state of the samples' numbers: one process has those of all samples, and a replica those of
its part.
"""
OTHER = -6
"""No such relation is known. It is allowed where no gradient flows."""

aten = torch.ops.aten
_CONSTANT = {
    aten.full.default, aten.zeros.default, aten.ones.default,
    aten.new_full.default, aten.new_zeros.default, aten.new_ones.default,
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
}  # fmt: skip
_LINEAR = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default,
    aten.detach.default, aten.alias.default, aten._to_copy.default,
    aten.view.default, aten.reshape.default, aten.squeeze.default, aten.unsqueeze.default,
}  # fmt: skip
"""Linear operators: the mean of the results is the result for the mean, if only the first input
differs between replicas.
"""
_VIEWS = {
    aten.detach.default, aten.alias.default, aten.view.default, aten.reshape.default,
    aten.unsqueeze.default,
}  # fmt: skip
_SUMS = {aten.add.Tensor, aten.sub.Tensor}
_MEANS = {aten.mean.default, aten.mean.dim}
_REDUCED_BY_MEAN = 1


def why_not(whole: Trace, part: Trace, rules: Rules) -> str:
    """Why replicas are not known to do what one process does; empty if they are.

    Args:
        whole: the step of one process on the whole batch.
        part: the step of a replica on its part.
        rules: the rules for the whole step, for as many ranks as there are replicas.
    """
    if whole.loss < 0:
        return "backward() is not called on a tensor of the step"
    if whole.late_change:
        return (
            f"{whole.late_change} changes state after backward() by what the step computes from "
            "the batch; let it run before backward()"
        )
    return _Comparison(whole, part, rules).run()


class _Comparison:
    def __init__(self, whole: Trace, part: Trace, rules: Rules) -> None:
        self._whole, self._part, self._rules = whole, part, rules
        self._states: dict[int, State] = {}
        self._mixing: dict[int, str] = {}
        """For each value with the state `OTHER`, the operator that it comes from."""

    def run(self) -> str:
        whole, part = self._whole, self._part
        # `reshape` is a view, or a copy and a view, depending on the strides of a part.
        others = (one for one in part.operators if one.target is not aten.clone.default)
        other = next(others, None)
        for one in whole.operators:
            if one.target is aten.clone.default:
                self._pass_on(one, self._states.get(one.inputs[0], OTHER))
                continue
            if self._is_left_out(one, other):
                self._pass_on(one, 0)
                continue
            if other is None:
                return "a replica runs other operators"
            if target_of(one) is not target_of(other) or len(one.inputs) != len(other.inputs):
                return f"{_where(whole, one)}a replica runs {other.target} for {one.target}"
            given = [
                self._given(slot, of_part)
                for slot, of_part in zip(one.inputs, other.inputs, strict=True)
            ]
            made = self._made(one, other, given)
            slots = [slot for slot in one.outputs if slot is not None]
            if made is None:
                mixing = [self._mixing[slot] for slot in one.inputs if slot in self._mixing]
                reason = mixing[0] if mixing else f"{_where(whole, one)}{one.target}"
                flows = any(whole.values[slot].is_differentiable for slot in slots)
                if flows or one.mutates:
                    return (
                        f"{reason} does not treat samples independently of each other, and is "
                        "not their mean"
                    )
                made = (OTHER,) * len(slots)
                self._mixing |= dict.fromkeys(slots, reason)
            self._states.update(zip(slots, made, strict=True))
            other = next(others, None)
        if other is not None:
            return "a replica runs other operators"
        state = self._states.get(whole.loss, WHOLE)
        return "" if state in (WHOLE, MEAN) else "the loss is not a mean over samples"

    def _pass_on(self, one: Operator, state: State) -> None:
        (slot,) = one.outputs
        assert slot is not None
        self._states[slot] = state

    def _is_left_out(self, one: Operator, other: Operator | None) -> bool:
        """Whether an operator repeats something for every sample and a replica, with one sample,
        does not need it.
        """
        if one.target is not aten.expand.default or (other and other.target is one.target):
            return False
        (slot,), (source,) = one.outputs, one.inputs
        assert slot is not None
        shape = self._whole.values[slot].shape
        return self._states.get(source, WHOLE) == WHOLE and (
            _local(shape, 0, self._rules.size) == self._whole.values[source].shape
        )

    def _given(self, slot: int, of_part: int) -> State:
        """The state of an input. If the input was there before the step, its shape on a replica
        tells its state.
        """
        if slot not in self._states:
            shape, other = self._whole.values[slot].shape, self._part.values[of_part].shape
            state = WHOLE if shape == other else OTHER
            if state == OTHER and shape and _local(shape, 0, self._rules.size) == other:
                state = 0
            self._states[slot] = state
        return self._states[slot]

    def _made(
        self, one: Operator, other: Operator, given: Sequence[State]
    ) -> tuple[State, ...] | None:
        """The states of what an operator makes; None if they cannot be told."""
        size = self._rules.size
        shapes = [self._whole.values[slot].shape for slot in one.outputs if slot is not None]
        local = [self._part.values[slot].shape for slot in other.outputs if slot is not None]
        if one.target is aten.arange.default and shapes != local:
            return (NUMBERS,) if _local(shapes[0], 0, size) == local[0] else None
        is_sized = one.target in GIVEN_SIZES or one.target in _CONSTANT
        if not is_sized and plain_arguments(one) != plain_arguments(other):
            return None
        if one.target in _CONSTANT or one.target is aten.expand.default:
            constant = self._constant(one, given, shapes, local)
            if constant is not None:
                return constant
        if OTHER in given:
            return None
        if NUMBERS in given:
            return self._by_number(one, given, shapes[0])
        if MEAN in given:
            is_linear = one.target in _LINEAR and (
                all(state in (WHOLE, MEAN) for state in given)
                if one.target in _SUMS
                else given[0] == MEAN and all(state == WHOLE for state in given[1:])
            )
            return (MEAN,) * len(shapes) if is_linear and shapes == local else None
        is_whole = all(state == WHOLE for state in given)
        if is_whole and shapes == local and not one.is_random:
            return (WHOLE,) * len(shapes)
        factors = frozenset(state // STRIDED for state in given if state >= STRIDED)
        for strategy in self._rules.strategies(one, is_distributed=True, factors=factors):
            found = [
                _local(shape, state, size)
                for shape, state in zip(shapes, strategy.outputs, strict=True)
            ]
            if strategy.is_split and list(strategy.inputs) == list(given) and found == local:
                return strategy.outputs
        if self._is_mean(one, given, shapes):
            return (MEAN, *[OTHER] * (len(shapes) - 1))
        return None

    def _by_number(
        self, one: Operator, given: Sequence[State], shape: Sequence[int]
    ) -> tuple[State, ...] | None:
        """The state of what is made of numbers of samples: other views of them, or the samples that
        they are of.
        """
        if one.target in _VIEWS:
            return (NUMBERS,) if len(shape) > 0 and math.prod(shape) == shape[0] else None
        if one.target is not aten.index.Tensor or list(given[:2]) != [0, NUMBERS]:
            return None
        _, numbers, *rest = (self._whole.values[slot].shape for slot in one.inputs)
        is_first = isinstance(one.args[1][0], Reference) and one.args[1][0].value == one.inputs[1]
        is_alone = all(state == WHOLE for state in given[2:]) and all(
            len(other) < len(numbers) or (len(other) == len(numbers) and other[0] == 1)
            for other in rest
        )
        return (0,) if is_first and is_alone and len(rest) == len(one.args[1]) - 1 else None

    def _constant(
        self,
        one: Operator,
        given: Sequence[State],
        shapes: Sequence[tuple[int, ...]],
        local: Sequence[tuple[int, ...]],
    ) -> tuple[State, ...] | None:
        """The states of the results of an operator whose result is constant along the only
        dimension in which a replica's is shorter; None for any other operator.
        """
        shape, size = shapes[0], self._rules.size
        dims = [dim for dim, length in enumerate(shape) if length != local[0][dim]]
        if len(dims) != 1 or _local(shape, dims[0], size) != local[0]:
            return None
        if one.target in _CONSTANT:
            return (dims[0],)
        source = self._whole.values[one.inputs[0]].shape
        place = dims[0] - (len(shape) - len(source))
        is_same = given[0] == WHOLE and (place < 0 or source[place] == 1)
        return (dims[0],) if is_same else None

    def _is_mean(
        self, one: Operator, given: Sequence[State], shapes: Sequence[tuple[int, ...]]
    ) -> bool:
        """Whether an operator makes the mean over all elements of its inputs, of which each rank
        has a part.
        """
        if shapes[0] or any(state < 0 for state in given):
            return False
        return one.target in _MEANS or _argument(one, "reduction") == _REDUCED_BY_MEAN


def _argument(operator: Operator, name: str) -> Any:
    for place, argument in enumerate(schema_of(operator.target).arguments):
        if argument.name == name:
            if place < len(operator.args):
                return operator.args[place]
            return operator.kwargs.get(name, argument.default_value)
    return None


def _local(shape: Sequence[int], state: State, size: int) -> tuple[int, ...]:
    return tuple(
        length // size if state >= 0 and dim == dimension(state) else length
        for dim, length in enumerate(shape)
    )


def _where(trace: Trace, operator: Operator) -> str:
    path = trace.calls[operator.call].path if operator.call >= 0 else ""
    return f"in {path}, " if path else ""
