"""What has to be decided: a node for each operator between modules, each call of a module that a
style can change, each input at the boundary of a module, and each parameter; with its options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from roam.sharding.costs import Collective, Costs, total_ns
from roam.sharding.division import Division, unit_of
from roam.sharding.rules import SPREAD, STRIDED, WHOLE, Rules, State, fraction
from roam.sharding.trace import ModuleCall, Operator, Trace, Value
from roam.sharding.transitions import PARTIAL, transition

aten = torch.ops.aten
Kind = Literal["plain", "column", "row", "sequence"]
PLAIN, REPLICATED = -1, -2
"""Placements of a parameter: `PLAIN` if it is a plain tensor, `REPLICATED` if it is a DTensor that
every rank has whole. Any other placement is the dimension along which it is split.
"""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to do what a node stands for.

    Attributes:
        inputs: states of what the node is given. For a call of a module with parameters, their
            placements follow.
        outputs: states of what the node makes.
        ns: nanoseconds by the cost model, collectives included.
        size_bytes: bytes that the node's results take on a rank.
        collectives: the collectives that the node needs in one step.
        kind: the kind of style, for a call of a module with parameters.
    """

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    ns: int
    size_bytes: int
    collectives: tuple[Collective, ...] = ()
    kind: Kind = "plain"
    split: State = WHOLE
    """The dimension of the input along which a sequence style splits."""


@dataclass(slots=True)
class Node:
    """Something to be decided.

    Attributes:
        key: equal for nodes at the same place in equal layers.
        path: the path of the module.
        what: what the node stands for.
        sources: for each input, the node that makes it and which of that node's outputs it is; None
            if every rank has it whole.
        lifetime: lifetime of what the node makes, counted in operators of the step, half-open.
        subject: the operator, the call, or the parameter's name.
    """

    key: tuple[Any, ...]
    path: str
    what: Literal["operator", "style", "entry", "parameter"]
    options: tuple[Option, ...]
    sources: list[tuple[int, int] | None]
    lifetime: tuple[int, int]
    subject: Any = None
    value: int = -1
    """The value that an entry changes; -1 for other nodes."""


@dataclass(frozen=True, slots=True)
class Bans:
    """What has been found not to work: splitting values in certain modules, which are named by
    their folded paths.

    Attributes:
        values: (path, place, dimension): among the values whose shape the code of the module at
            `path` reads, the one at `place` may not be split along the dimension.
        modules: paths of modules between whose operators nothing may be split.
    """

    values: frozenset[tuple[str, int, State]] = frozenset()
    modules: frozenset[str] = frozenset()

    def forbid(self, readers: Iterable[tuple[str, int]], state: State) -> bool:
        """Whether a value may not have this state because of those who read its shape."""
        return any((*reader, state) in self.values for reader in readers)


@dataclass(slots=True)
class Nodes:
    """All nodes of a step on one mesh dimension."""

    trace: Trace
    rules: Rules
    nodes: list[Node] = field(default_factory=list)
    producers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """For each value that a rank may not have whole, the node that makes it and which of that
    node's outputs it is.
    """


def nodes_of(
    trace: Trace,
    rules: Rules,
    costs: Costs,
    division: Division,
    folded: Any,
    *,
    state_bytes: float,
    units: Sequence[str] = (),
    bans: Bans = Bans(),
) -> Nodes:
    """The nodes of a step.

    Args:
        trace: the step of one process.
        rules: the rules for the ranks of a replica.
        costs: the constants of the cost model.
        division: how the ranks are divided.
        folded: a function that makes one path of the paths of equal layers.
        state_bytes: bytes of optimizer state for each byte of a parameter.
        units: paths of modules whose parameters replicas gather and reduce together.
        bans: what has been found not to work.
    """
    return _Builder(trace, rules, costs, division, folded, state_bytes, units, bans).build()


def placements_of(
    trace: Trace, nodes: Iterable[Node], options: Iterable[Option]
) -> Iterator[tuple[str, Value, State]]:
    """Names and values of parameters, and how the ranks of a replica hold each."""
    values = {value.parameter: value for value in trace.values if value.parameter is not None}
    for node, option in zip(nodes, options, strict=True):
        if node.what == "parameter":
            yield node.subject, values[node.subject], option.outputs[0]


class _Builder:
    def __init__(
        self,
        trace: Trace,
        rules: Rules,
        costs: Costs,
        division: Division,
        folded: Any,
        state_bytes: float,
        units: Sequence[str],
        bans: Bans,
    ) -> None:
        self._trace, self._rules, self._costs = trace, rules, costs
        self._division, self._link, self._units = division, division.tensor_link, units
        self._folded, self._state_bytes, self._bans = folded, state_bytes, bans
        self._found = Nodes(trace, rules)
        self._overlays: list[tuple[int, dict[int, tuple[int, int]]]] = []
        self._parameters: dict[str, int] = {}
        self._counts: dict[tuple[Any, ...], int] = {}
        self._options: dict[Any, list[Option]] = {}
        self._shared: dict[tuple[Option, ...], tuple[int, tuple[Option, ...]]] = {}
        """Options of nodes, each with its number: equal layers share them."""
        self._leaves = _leaves(trace)
        self._styled: dict[str, int] = {}
        self._reads: dict[int, list[tuple[int, int]]] = {}
        for call, values in trace.reads.items():
            for place, value in enumerate(values):
                self._reads.setdefault(value, []).append((call, place))
        self._calls = Counter(call.path for call in trace.calls)
        self._of_parameter = {
            value.parameter: value for value in trace.values if value.parameter is not None
        }

    # -- the walk

    def build(self) -> Nodes:
        self._add_parameters()
        begins: dict[int, list[int]] = {}
        for number, call in enumerate(self._trace.calls):
            begins.setdefault(call.first_operator, []).append(number)
        for place in range(len(self._trace.operators) + 1):
            self._end_calls(place)
            for number in begins.get(place, ()):
                if self._is_within_leaf(number):
                    continue
                if number in self._leaves:
                    self._add_style(number)
                else:
                    self._add_entry(number)
            if place < len(self._trace.operators):
                operator = self._trace.operators[place]
                if not (operator.call >= 0 and self._is_within_leaf(operator.call, or_is=True)):
                    self._add_operator(operator)
        return self._found

    def _end_calls(self, place: int) -> None:
        while self._overlays and self._trace.calls[self._overlays[-1][0]].last_operator <= place:
            self._overlays.pop()

    def _is_within_leaf(self, number: int, *, or_is: bool = False) -> bool:
        if not or_is:
            number = self._trace.calls[number].parent
        while number >= 0:
            if number in self._leaves:
                return True
            number = self._trace.calls[number].parent
        return False

    def _source(self, value: int) -> tuple[int, int] | None:
        for _, overlay in reversed(self._overlays):
            if value in overlay:
                return overlay[value]
        return self._found.producers.get(value)

    def _add(
        self,
        what: Literal["operator", "style", "entry", "parameter"],
        path: str,
        options: Iterable[Option],
        sources: Sequence[tuple[int, int] | None],
        lifetime: tuple[int, int],
        subject: Any,
        made: Sequence[int] = (),
        within: int = -1,
    ) -> int:
        readers = [self._readers(value, within) for value in made]
        kept = tuple(
            option
            for option in options
            if all(
                source is not None or state == WHOLE
                for source, state in zip(sources, option.inputs, strict=True)
            )
            and not any(map(self._bans.forbid, readers, option.outputs))
        )
        number, kept = self._shared.setdefault(kept, (len(self._shared), kept))
        place = (path, what)
        self._counts[place] = self._counts.get(place, -1) + 1
        key = what, self._folded(path), self._counts[place], len(sources), number
        self._found.nodes.append(Node(key, path, what, kept, list(sources), lifetime, subject))
        return len(self._found.nodes) - 1

    def _readers(self, value: int, within: int) -> list[tuple[str, int]]:
        """Who reads a value's shape within a call; anywhere, if `within` is negative."""
        if not self._bans.values:
            return []
        return [
            (self._path_of(call), place)
            for call, place in self._reads.get(value, ())
            if within < 0 or self._is_below(call, within)
        ]

    def _path_of(self, call: int) -> str:
        """The folded path of a call's module."""
        return "" if call < 0 else self._folded(self._trace.calls[call].path)

    # -- parameters

    def _add_parameters(self) -> None:
        free = _free_parameters(self._trace, self._leaves)
        for name, value in self._of_parameter.items():
            placements: list[State] = [PLAIN]
            if name not in free:
                dims = range(len(value.shape))
                placements += [
                    REPLICATED,
                    *(dim for dim in dims if self._rules.divides(value, dim)),
                ]
            options = []
            for placement in placements:
                options.append(self._held(name, value, placement))
            path = name.rpartition(".")[0]
            self._parameters[name] = self._add(
                "parameter", path, options, (), (0, self._trace.end), name
            )

    def _held(self, name: str, value: Value, placement: State) -> Option:
        """A parameter with a placement: its update, its bytes, and the time of its share of what
        replicas gather and reduce, without the time that a collective takes if it carries nothing.
        """
        division, costs = self._division, self._costs
        local = fraction(value, placement, self._rules.size)
        held = local // division.data if division.is_sharded else local
        trained = held if value.is_differentiable else 0
        ns = costs.run_ns(0, trained * (3 + 2 * self._state_bytes)) if trained else 0
        size = held + round(trained * (1 + self._state_bytes))
        is_root = not unit_of(name, self._units)
        padded = division.padded_bytes(value, placement)
        link = replace(division.data_link, latency_ns=0)
        for kind in division.collective_kinds(is_trained=value.is_differentiable, is_root=is_root):
            # The parameter is copied into the collective's input, or out of its result.
            ns += Collective(kind, padded).ns(link, division.data)
            ns += round(2 * padded / costs.bytes_per_ns)
        if division.is_sharded and is_root:
            size += padded
        return Option((), (placement,), ns, size)

    # -- operators between modules

    def _add_operator(self, operator: Operator) -> None:
        sources = [self._source(number) for number in operator.inputs]
        values = self._trace.values
        if all(source is None for source in sources):
            return  # made of nothing but what every rank has whole
        call = self._trace.calls[operator.call] if operator.call >= 0 else None
        path = "" if call is None else call.path
        strategies = self._rules.strategies(operator, factors=self._factors(sources))
        if self._folded(path) in self._bans.modules or self._has_alias(operator):
            strategies = strategies[:1]
        outputs = [slot for slot in operator.outputs if slot is not None]
        made = [values[slot] for slot in outputs]
        new = [value for value in made if self._is_new(value, operator)]
        given = [values[slot] for slot in operator.inputs]
        size = self._rules.size
        options = []
        for strategy in strategies:
            moved = 0
            if new or operator.mutates:
                moved = sum(
                    fraction(value, state, size)
                    for value, state in zip(
                        (*given, *made), (*strategy.inputs, *strategy.outputs), strict=True
                    )
                )
            flops = operator.flops / size if strategy.is_split else operator.flops
            ns = self._ns(flops, moved, made) if moved else 0
            taken = sum(
                fraction(value, state, size)
                for value, state in zip(made, strategy.outputs, strict=True)
                if value in new
            )
            options.append(Option(strategy.inputs, strategy.outputs, ns, taken))
        node = self._add(
            "operator", path, options, sources, self._lifetime(operator, new), operator, outputs
        )
        self._produce(outputs, node)

    def _factors(self, sources: Sequence[tuple[int, int] | None]) -> frozenset[int]:
        """The numbers of blocks (see `STRIDED`) in which inputs may be split."""
        return frozenset(
            option.outputs[output] // STRIDED
            for node, output in filter(None, sources)
            for option in self._found.nodes[node].options
            if option.outputs[output] >= STRIDED
        )

    def _has_alias(self, operator: Operator) -> bool:
        """Whether an operator changes memory that other values are in, too."""
        if not operator.mutates:
            return False
        own = {*operator.inputs, *(slot for slot in operator.outputs if slot is not None)}
        storages = {
            self._trace.values[slot].storage for slot in operator.outputs if slot is not None
        }
        return any(
            value.storage in storages and number not in own
            for number, value in enumerate(self._trace.values)
        )

    def _is_new(self, value: Value, operator: Operator) -> bool:
        return all(self._trace.values[given].storage != value.storage for given in operator.inputs)

    def _produce(self, outputs: Sequence[int], node: int) -> None:
        for place, slot in enumerate(outputs):
            self._found.producers[slot] = node, place

    def _ns(self, flops: float, moved: float, made: Sequence[Value]) -> int:
        forward = self._costs.run_ns(flops, moved)
        return 3 * forward if any(value.is_differentiable for value in made) else forward

    def _lifetime(self, operator: Operator, new: Sequence[Value]) -> tuple[int, int]:
        ends = [self._trace.last_use.get(value.storage, operator.time) + 1 for value in new]
        return operator.time, max(ends, default=operator.time)

    # -- inputs at the boundary of a module

    def _add_entry(self, number: int) -> None:
        call = self._trace.calls[number]
        value_number = self._entry_value(number)
        if value_number is None:
            return
        source = self._source(value_number)
        value = self._trace.values[value_number]
        states = [state for state in range(len(value.shape)) if self._rules.divides(value, state)]
        options = []
        for before in (WHOLE, SPREAD, *states):
            for after in (WHOLE, SPREAD, *states):
                if (before == SPREAD) != (after == SPREAD) and not value.is_differentiable:
                    continue
                if before == SPREAD != after:
                    continue  # what a style has made a DTensor stays one inside the module
                crossed = self._transition(before, after, value)
                if crossed is not None:
                    extra = 0
                    if before != after and (before, after) != (WHOLE, SPREAD):
                        extra = fraction(value, after, self._rules.size)
                    ns = self._crossing(crossed)
                    options.append(Option((before,), (after,), ns, extra, crossed))
        if source is None:
            # What every rank has whole.
            options = [option for option in options if option.inputs == (WHOLE,)]
        first = self._time(call.first_operator)
        lifetime = first, max(first, self._trace.last_use.get(value.storage, first) + 1)
        node = self._add(
            "entry", call.path, options, [source], lifetime, number, [value_number], number
        )
        self._found.nodes[node].value = value_number
        self._overlays.append((number, {value_number: (node, 0)}))

    def _entry_value(self, number: int) -> int | None:
        """The value whose state a style may change where it enters a module: the first value
        through which a gradient flows back, or else the first one. None if no style can.
        """
        call = self._trace.calls[number]
        is_hookable = (
            call.parent >= 0
            and call.given
            and self._calls[call.path] == 1
            and any(self._is_below(leaf, number) for leaf in self._leaves)
        )
        if not is_hookable:
            return None
        given = [slot for _, slot in call.given]
        flowing = [slot for slot in given if self._trace.values[slot].is_differentiable]
        slot = (flowing or given)[0]
        is_ambiguous = given.count(slot) > 1 or slot in call.returned
        return None if is_ambiguous or self._trace.values[slot].parameter is not None else slot

    def _is_below(self, number: int, other: int) -> bool:
        while number >= 0 and number != other:
            number = self._trace.calls[number].parent
        return number == other

    def _transition(
        self, before: State, after: State, value: Value
    ) -> tuple[Collective, ...] | None:
        found = transition(before, after, value.size_bytes, value.is_differentiable)
        is_possible = self._link.exchanges or all(one.kind != "all_to_all" for one in found or ())
        return found if is_possible else None

    def _crossing(self, collectives: Iterable[Collective]) -> int:
        return total_ns(collectives, self._link, self._rules.size)

    def _time(self, place: int) -> int:
        operators = self._trace.operators
        return operators[place].time if place < len(operators) else self._trace.end

    # -- calls of modules with parameters

    def _add_style(self, number: int) -> None:
        call = self._trace.calls[number]
        given = self._trace.values[call.given[0][1]]
        made = self._trace.values[call.returned[0]]
        source = self._source(call.given[0][1])
        names = self._leaves[number]
        key = (
            type(call.module),
            given.shape,
            given.is_differentiable,
            tuple(self._shape_of(name) for name in names),
            names.index(_weight_of(call.module, self._of_parameter, names)),
            tuple(_code(self._trace, call)),
        )
        if key not in self._options:
            self._options[key] = list(self._styles(call, given, made, names))
        sources = [source, *((self._parameters[name], 0) for name in names)]
        first = self._time(call.first_operator)
        lifetime = first, max(first, self._trace.last_use.get(made.storage, first) + 1)
        options = self._options[key]
        earlier = self._styled.get(call.path)
        if self._calls[call.path] > 1:
            # One style serves all calls of a module. Each option is numbered, and edges from the
            # first call to the others make all calls choose the same number.
            codes: dict[Any, int] = {}
            marks = [
                codes.setdefault((one.kind, one.split, one.inputs, one.outputs), len(codes))
                for one in options
            ]
            options = [
                replace(
                    one,
                    inputs=one.inputs if earlier is None else (*one.inputs, mark),
                    outputs=(*one.outputs, mark),
                )
                for one, mark in zip(options, marks, strict=True)
            ]
            if earlier is not None:
                sources.append((earlier, 1))
        node = self._add("style", call.path, options, sources, lifetime, number, call.returned[:1])
        self._styled.setdefault(call.path, node)
        self._produce([call.returned[0]], node)

    def _shape_of(self, name: str) -> tuple[Any, ...]:
        value = self._of_parameter[name]
        return value.shape, value.is_differentiable

    def _styles(
        self, call: ModuleCall, given: Value, made: Value, names: Sequence[str]
    ) -> Iterable[Option]:
        size, divides = self._rules.size, self._rules.divides
        values = self._of_parameter
        parameters = [values[name] for name in names]
        operators = self._trace.operators[call.first_operator : call.last_operator]
        flops = sum(operator.flops for operator in operators)
        weights = sum(value.size_bytes for value in parameters)
        kernels = max(1, sum(not _is_view(self._trace, operator) for operator in operators))

        def ns(share: int, given_bytes: float, made_bytes: float, weight_bytes: float) -> int:
            moved = given_bytes + made_bytes + weight_bytes
            whole = self._ns(flops / share, moved, [made])
            return whole + (kernels - 1) * self._costs.launch_ns * (
                3 if made.is_differentiable else 1
            )

        kept = given.size_bytes if any(value.is_differentiable for value in parameters) else 0
        yield Option(
            (WHOLE, *[PLAIN] * len(names)), (WHOLE,),
            ns(1, given.size_bytes, made.size_bytes, weights), made.size_bytes,
        )  # fmt: skip
        parts = [dim for dim in range(len(given.shape)) if divides(given, dim)]
        ends = [dim for dim in range(len(made.shape)) if divides(made, dim)]
        last = len(made.shape) - 1
        kind: Kind
        is_linear, is_table = _is_linear(call.module), _is_table(self._trace, call)
        if is_linear or is_table:
            weight = values[_weight_of(call.module, values, names)]
            for kind in ("column", "row"):
                split = (
                    (0 if kind == "column" else 1) if is_linear else (1 if kind == "column" else 0)
                )
                if not divides(weight, split):
                    continue
                rest = REPLICATED if kind == "row" else 0
                placed = [split if value is weight else rest for value in parameters]
                if any(
                    place >= 0 and not divides(value, place)
                    for value, place in zip(parameters, placed, strict=True)
                ):
                    continue
                within = SPREAD if is_table or kind == "column" else len(given.shape) - 1
                if within >= 0 and not divides(given, within):
                    continue
                natural = last if kind == "column" else PARTIAL
                if natural >= 0 and not divides(made, natural):
                    continue
                for before in (WHOLE,) if is_table else (WHOLE, SPREAD, *parts):
                    enters = () if is_table else self._transition(before, within, given)
                    if enters is None:
                        continue
                    for after in (WHOLE, *ends):
                        leaves = self._transition(natural, after, made)
                        if leaves is None:
                            continue
                        crossed = (*enters, *leaves)
                        local = made.size_bytes // size if natural >= 0 else made.size_bytes
                        time = ns(
                            size,
                            given.size_bytes if within == SPREAD else given.size_bytes // size,
                            local,
                            weights // size,
                        )
                        taken = fraction(made, after, size)
                        if before >= 0 and within == SPREAD:
                            taken += kept
                        elif before in (WHOLE, SPREAD) and within >= 0:
                            taken += kept // size
                        yield Option(
                            (before, *placed), (after,), time + self._crossing(crossed), taken,
                            crossed, kind,
                        )  # fmt: skip
        # `SequenceParallel` makes all parameters trainable, so it is used only if they are.
        for dim in parts if all(value.is_differentiable for value in parameters) else ():
            result = self._sequence(call, dim)
            if result is None:
                continue
            reduced = tuple(
                Collective("all_reduce", value.size_bytes)
                for value in parameters
                if value.is_differentiable
            )
            time = ns(size, given.size_bytes // size, made.size_bytes // size, weights)
            for before in (dim, SPREAD):
                enters = self._transition(before, dim, given)
                crossed = (*(enters or ()), *reduced)
                yield Option(
                    (before, *[REPLICATED] * len(names)), (result,), time + self._crossing(crossed),
                    made.size_bytes // size, crossed, "sequence", dim,
                )  # fmt: skip

    def _sequence(self, call: ModuleCall, dim: State) -> State | None:
        """The state of what a module makes of a part, with whole parameters, by DTensor's rules;
        None if DTensor would need a collective.
        """
        trace, rules = self._trace, self._rules
        states: dict[int, State] = {call.given[0][1]: dim}
        for operator in trace.operators[call.first_operator : call.last_operator]:
            wanted = []
            for slot in operator.inputs:
                if slot in states:
                    wanted.append(states[slot])
                elif trace.values[slot].parameter is not None:
                    wanted.append(WHOLE)
                else:
                    return None  # a plain tensor beside DTensors
            found = [
                strategy
                for strategy in rules.strategies(operator, is_distributed=True)
                if list(strategy.inputs) == wanted
            ]
            if not found:
                return None
            made = [slot for slot in operator.outputs if slot is not None]
            states.update(zip(made, found[0].outputs, strict=True))
        after = states.get(call.returned[0])
        return None if after is None or after < 0 else after


def _code(trace: Trace, call: ModuleCall) -> Iterable[str]:
    for operator in trace.operators[call.first_operator : call.last_operator]:
        yield str(operator.target)


def _is_view(trace: Trace, operator: Operator) -> bool:
    storages = {trace.values[slot].storage for slot in operator.inputs}
    return not operator.mutates and all(
        slot is None or trace.values[slot].storage in storages for slot in operator.outputs
    )


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward


def _is_table(trace: Trace, call: ModuleCall) -> bool:
    """Whether a call looks up rows of a table, and perhaps multiplies them by numbers. A product
    with a number can be computed from parts or from addends of the rows.
    """
    module = call.module
    if not isinstance(module, torch.nn.Embedding):
        return False
    first, *rest = trace.operators[call.first_operator : call.last_operator]
    for operator in rest:
        values = [trace.values[slot] for slot in operator.inputs]
        is_of_number = all(not value.shape for value in values)
        is_product = operator.target in (aten.mul.Tensor, aten.mul.Scalar)
        if not is_of_number and not (is_product and all(not one.shape for one in values[1:])):
            return False
    return (
        first.target is aten.embedding.default
        and module.max_norm is None
        and not module.sparse
        and not module.scale_grad_by_freq
    )


def _weight_of(module: torch.nn.Module, values: dict[str, Value], names: Sequence[str]) -> str:
    """The name of the parameter that is the module's `weight`, or else of the first."""
    if len(names) == 1 or not hasattr(module, "weight"):
        return names[0]
    shape = tuple(module.weight.shape)  # type: ignore[arg-type]
    return next((name for name in names if values[name].shape == shape), names[0])


def _leaves(trace: Trace) -> dict[int, tuple[str, ...]]:
    """Calls of modules that a style of parameters can be applied to, with the parameters that each
    reads: they have parameters of their own and none below, take a tensor first, and return one.
    """
    used: dict[int, list[str]] = {}
    for operator in trace.operators:
        number = operator.call
        while number >= 0:
            names = used.setdefault(number, [])
            for slot in operator.inputs:
                name = trace.values[slot].parameter
                if name is not None and name not in names:
                    names.append(name)
            number = trace.calls[number].parent
    found = {}
    for number, call in enumerate(trace.calls):
        own = list(call.module.parameters(recurse=False))
        below = [parameter for child in call.module.children() for parameter in child.parameters()]
        is_first = bool(call.given) and call.given[0][0] == 0 and len(call.given) == 1
        if not own or below or not is_first or not call.is_single or len(call.returned) != 1:
            continue
        made = trace.values[call.returned[0]]
        is_made = call.first_operator <= made.creator < call.last_operator
        if is_made and len(used.get(number, ())) == len(own):
            found[number] = tuple(used[number])
    return found


def _free_parameters(trace: Trace, leaves: dict[int, tuple[str, ...]]) -> set[str]:
    """Names of parameters that operators outside of the calls in `leaves` read."""
    within: set[int] = set()
    for number in leaves:
        call = trace.calls[number]
        within.update(range(call.first_operator, call.last_operator))
    return {
        name
        for place, operator in enumerate(trace.operators)
        if place not in within
        for slot in operator.inputs
        if (name := trace.values[slot].parameter) is not None
    }
