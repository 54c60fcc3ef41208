"""Sizes that follow from symbols: the length of a batch, the number of its samples.

A `Size` is an integer of one call, with the expression that it follows from. So programs, graphs
and plans that are made for one length are read as those of every length. An `Expression` is a
polynomial of symbols and of quotients; equal ones are one object. It is also what PyTorch carries
as a `torch.SymInt`'s node: what a step's code and PyTorch's own ask about sizes is answered for the
call at hand, and every answer that is not the same in the whole range is kept as a condition.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partialmethod
from itertools import combinations_with_replacement
from typing import Any, Final, NoReturn, cast

import torch

from roam.state.shown_texts import is_unread

_COMPARISONS: Final[dict[str, tuple[str, Callable[[Any, Any], bool]]]] = {
    "eq": ("==", operator.eq), "ne": ("!=", operator.ne), "lt": ("<", operator.lt),
    "le": ("<=", operator.le), "gt": (">", operator.gt), "ge": (">=", operator.ge),
}  # fmt: skip
_TEXTS: Final[dict[str, str]] = {
    "floordiv": "({} // {})", "mod": "({} % {})",
    "truediv": "({} / {})", "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})",
    "pow": "({} ** {})", "neg": "(-{})", "float": "float({})", "sqrt": "math.sqrt({})",
    "round": "round({})", "ceil": "math.ceil({})", "floor": "math.floor({})", "trunc": "math.trunc({})",
    "not": "(not {})", "and": "({} and {})", "or": "({} or {})",
    **{name: f"({{}} {sign} {{}})" for name, (sign, _) in _COMPARISONS.items()},
}  # fmt: skip
"""How operators are written in Python; functions of `math` are so, too."""
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    **{name: function for name, (_, function) in _COMPARISONS.items()},
    **{name: getattr(operator, name) for name in ("floordiv", "mod", "truediv", "add", "sub", "mul", "pow", "neg")},
    "float": float, "sqrt": math.sqrt, "round": round, "ceil": math.ceil, "floor": math.floor, "trunc": math.trunc, "not": operator.not_,
    "and": lambda one, other: one and other, "or": lambda one, other: one or other,
}  # fmt: skip
_CARRIERS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
_TRIED: Final = 32
"""At how many points expressions with the same values are compared, for each end of the range."""
_MANY: Final = 8
"""If a number is the same for as many sizes in a row, a capture for these alone is worth it."""
Monomial = tuple["Expression", ...]
Text = str
"""`Expression` has a method of the name `str`, for which PyTorch asks."""


class OneLength(Exception):
    """A step needs the value of a size itself, so what is recorded holds for this one alone."""


class Narrowed(Exception):
    """The range has become smaller, for what is to be recorded next. All that is recorded holds
    there, too.
    """


class Unclear(Exception):
    """Expressions that differ have the same values at all points.

    Attributes:
        point: values of the symbols at which they differ.
    """

    def __init__(self, point: dict[str, int]) -> None:
        super().__init__(str(point))
        self.point = point


class Symbols:
    """The symbols of one capture, and what has been asked about them.

    Args:
        values: of each symbol, in the call that is captured.
        most: the largest value of each symbol for which the capture may hold.
        floors: the smallest value of some of them, which stays what it is. That of the others is 2
            or more, since PyTorch treats 0 and 1 in ways of their own.

    Attributes:
        least, most: between which values of the symbols the recording holds. A kernel that does
            something else for small sizes, or for large ones, makes the range smaller.
        points: values of the symbols, first those of the call, at which kernels are asked for the
            sizes of their results. Both ends of the range are among them, where what has a limit
            shows it.
        conditions: what the recording relies on, each with its answer.
    """

    LEAST = 2

    def __init__(
        self,
        values: Mapping[str, int],
        most: Mapping[str, int],
        floors: Mapping[str, int] | None = None,
    ) -> None:
        self.most = dict(most)
        self.names = list(values)
        self._floors = floors or {}
        self.least = {name: self._floors.get(name, self.LEAST) for name in values}
        self.points = _points(values, self.most, self.least)
        self.conditions: dict[Expression, bool] = {}
        self.refused: OneLength | None = None
        """Why what is recorded holds for one length only, if it does."""
        self._asked: Evaluator | None = None
        """Of the conditions, as many as there were when they were last asked about."""
        self._order: dict[Expression, int] = {}
        self._known: dict[Any, Expression] = {}
        self._by_ratio: dict[tuple[int, ...], dict[Expression, int]] = {}
        """Integers by their values, divided by what these have in common, which stands beside
        them."""
        self._equal: set[tuple[Expression, ...]] = set()
        """Integers of the same values that are equal everywhere."""
        self.symbols = {name: self._symbol(name) for name in values}

    def _symbol(self, name: str) -> Expression:
        values = tuple(point[name] for point in self.points)
        made = Expression(self, "i", "symbol", (name,), values, (self.least[name], self.most[name]))
        made.terms = {(made,): 1}
        self._order[made] = len(self._order)
        self._register(made)
        return made

    def refuse(self, reason: str) -> NoReturn:
        """Says that what is recorded holds for one length only. The step's code may catch it."""
        refusal = OneLength(reason)
        self.refused = self.refused or refusal
        raise refusal

    def hold(self, values: Sequence[int]) -> bool:
        """Whether all conditions have at these values of the symbols the answers that they have in
        the call.
        """
        if self._asked is None or len(self._asked.places) != len(self.conditions):
            self._asked = Evaluator(self.conditions, self.names)
        try:
            found = self._asked.values(*values)
        except (ArithmeticError, ValueError):
            return False
        return list(map(bool, found)) == list(self.conditions.values())

    def of(self, value: Any) -> Expression:
        """The expression of a number, of a `torch.SymInt`, or of its node."""
        node = getattr(value, "node", value)
        return node if isinstance(node, Expression) else self.constant(value)

    def strides(self, shape: Iterable[Any]) -> tuple[list[Expression], Expression]:
        """The strides of a contiguous tensor of a shape, and how many elements it has."""
        elements, strides = self.constant(1), list[Expression]()
        for size in reversed(tuple(shape)):
            strides.append(elements)
            elements = elements.mul(self.of(size))
        return strides[::-1], elements

    def note_extent(
        self,
        shape: Iterable[Any],
        stride: Iterable[Any],
        start: Any,
        itemsize: int,
        size_bytes: Any,
    ) -> None:
        """Notes that a tensor with this layout lies within its storage, whatever the values."""
        last, one = self.of(start), self.constant(1)
        for size, step in zip(shape, stride, strict=True):
            last = last.add(self.of(size).sub(one).mul(self.of(step)))
        extent = last.add(one).mul(self.constant(itemsize))
        self._known["gt", extent, self.of(size_bytes)] = self.constant(False)

    def constant(self, value: Any) -> Expression:
        """A number that is the same everywhere."""
        key = "constant", type(value), value or repr(value)  # 0.0 is no -0.0
        found = self._known.get(key)
        if found is None:
            kind = kind_of(value)
            bounds = None if kind == "f" else (value, value)
            found = Expression(
                self, kind, "constant", (value,), (value,) * len(self.points), bounds
            )
            found.terms = {(): value} if kind == "i" and value else {}
            self._known[key] = found
        return found

    def polynomial(self, terms: Mapping[Monomial, int]) -> Expression:
        """The sum of monomials, each with a factor."""
        terms = {atoms: factor for atoms, factor in terms.items() if factor}
        if not terms:
            return self.constant(0)
        if len(terms) == 1:
            ((atoms, factor),) = terms.items()
            if not atoms:
                return self.constant(factor)
            if factor == 1 and len(atoms) == 1:
                return atoms[0]
        key = frozenset(terms.items())
        found = self._known.get(key)
        if found is None:
            values = tuple(_sum(terms, place) for place in range(len(self.points)))
            found = Expression(self, "i", "polynomial", (), values, _bounds(terms))
            found.terms = dict(terms)
            self._note(key, found)
        return found

    def atom(self, op: str, args: tuple[Expression, ...], kind: str) -> Expression:
        """An operator's result that is no polynomial."""
        key = (op, *args)
        found = self._known.get(key)
        if found is None:
            function = _function(op)
            values = tuple(
                _applied(function, [arg.values[place] for arg in args])
                for place in range(len(self.points))
            )
            bounds = _atom_bounds(op, args)
            found = Expression(self, kind, op, args, values, bounds)
            if all(arg.op == "constant" for arg in args):
                found = self.constant(values[0])
            elif kind == "i":
                found.terms = {(found,): 1}
            self._note(key, found)
        return found

    def _note(self, key: Any, found: Expression) -> None:
        self._known[key] = found
        self._order.setdefault(found, len(self._order))
        if found.kind == "i":
            self._register(found)

    def _register(self, found: Expression) -> None:
        by = math.gcd(*found.terms.values())
        if by > 1:
            found = self.polynomial({atoms: factor // by for atoms, factor in found.terms.items()})
        shared = math.gcd(*found.values)
        if shared:
            ratio = tuple(value // shared for value in found.values)
            self._by_ratio.setdefault(ratio, {})[found] = shared

    def add_point(self, point: dict[str, int]) -> None:
        """From now on expressions have values here, too."""
        self._set_points([*self.points, point])

    def _set_points(self, points: list[dict[str, int]]) -> None:
        known = list(dict.fromkeys((*self.symbols.values(), *self._known.values())))
        for found in known:
            found.values = ()
        self._by_ratio.clear()
        self.points = points
        for point in points:
            for found in known:
                found.values = (*found.values, self._value_at(found, point))
        for found in known:
            if found.kind == "i" and found.op != "constant":
                self._register(found)

    def _value_at(self, found: Expression, point: dict[str, int]) -> Any:
        """At the last of the points, where what it is made of has its value already."""
        if found.op in ("symbol", "constant"):
            return point.get(found.args[0], found.args[0])
        if found.op == "polynomial":
            return _sum(found.terms, -1)
        return _applied(_function(found.op), [arg.values[-1] for arg in found.args])

    def product(self, one: Monomial, other: Monomial) -> Monomial:
        return tuple(sorted((*one, *other), key=self._order.__getitem__))

    def with_values(self, values: tuple[int, ...]) -> Expression | None:
        """The expression of an integer that kernels were asked for at `points`; None if none is
        found.

        Raises:
            Unclear: several expressions have these values, and differ elsewhere.
        """
        is_constant = all(value == values[0] for value in values)
        candidates = [self.constant(values[0])] if is_constant else []
        shared = math.gcd(*values)
        ratio = tuple(value // (shared or 1) for value in values)
        alike = self._by_ratio.get(ratio, {})
        candidates += [
            found.mul(self.constant(shared // by))
            for found, by in alike.items()
            if shared % by == 0
        ]
        if len(candidates) > 1 and tuple(candidates) not in self._equal:
            point = self._difference(candidates)
            if point is not None:
                raise Unclear(point)
            self._equal.add(tuple(candidates))
        return candidates[0] if candidates else self._fitted(values)

    def _difference(self, candidates: Sequence[Expression]) -> dict[str, int] | None:
        """A point within the range at which expressions differ, one of small sizes; None if none is
        found.
        """
        at, draw = Evaluator(candidates, self.names).values, random.Random(0)
        bounds = [(self.least[name], self.most[name]) for name in self.names]
        tried = [tuple(low for low, _ in bounds)]
        for end in (*(4 * low for low, _ in bounds), *(high for _, high in bounds)):
            tried += [
                tuple(draw.randint(low, max(low, min(end, high))) for low, high in bounds)
                for _ in range(_TRIED)
            ]
        for values in tried:
            if self.hold(values):
                try:
                    found = at(*values)
                except (ArithmeticError, ValueError):
                    continue
                if len(set(found)) > 1:
                    return dict(zip(self.names, values, strict=True))
        return None

    def _narrow(self, values: tuple[int, ...]) -> None:
        """Narrows the range if these are the values of an expression up to a limit, such as the
        length of a table that is cut.

        Raises:
            Narrowed: they are.
        """
        cut = max(values)
        inner = [place for place, value in enumerate(values) if value < cut]
        for found in [found for alike in self._by_ratio.values() for found in alike]:
            names = [name for name, symbol in self.symbols.items() if symbol in found.atoms()]
            if (
                inner
                and len(names) == 1
                and found.value <= cut
                and all(found.values[place] == values[place] for place in inner)
                and all(
                    min(value, cut) == other
                    for value, other in zip(found.values, values, strict=True)
                )
            ):
                (name,) = names
                low, high = self.symbols[name].value, self.most[name]
                at = Evaluator([found], [name]).values
                while low < high:
                    middle = (low + high + 1) // 2
                    low, high = (middle, high) if at(middle)[0] <= cut else (low, middle - 1)
                if low < self.most[name]:
                    self._take(self.least, {**self.most, name: low})

    def is_flat(self, found: Expression) -> bool:
        """Whether an integer is what it is in the call for many values of each symbol that it
        follows from.
        """
        if found.kind != "i":
            return False
        at, call = Evaluator([found], self.names).values, self.points[0]

        def reaches(name: str, step: int) -> int:
            """For how many values beyond the call's it is the same, `_MANY` at most."""
            for count in range(1, _MANY + 1):
                value = call[name] + step * count
                if not self.least[name] <= value <= self.most[name]:
                    return count - 1
                try:
                    if at(*{**call, name: value}.values()) != [found.value]:
                        return count - 1
                except (ArithmeticError, ValueError):
                    return count - 1
            return _MANY

        return all(
            1 + reaches(symbol.args[0], -1) + reaches(symbol.args[0], 1) >= _MANY
            for symbol in found.atoms()
        )

    def narrow_to_conditions(self) -> None:
        """Narrows the range to where conditions that the recording relies on hold.

        Raises:
            Narrowed: they do not hold everywhere.
        """
        values, least, most = self.points[0], dict(self.least), dict(self.most)

        def hold(name: str, size: int) -> bool:
            return self.hold([*{**values, name: size}.values()])

        for name, value in values.items():
            if name in self._floors:
                continue
            low = value
            while low > least[name] and hold(name, low - 1):
                low -= 1
            least[name] = low
            inside, outside = value, most[name] + 1
            while outside - inside > 1:
                middle = (inside + outside) // 2
                inside, outside = (middle, outside) if hold(name, middle) else (inside, middle)
            most[name] = inside
        if (least, most) != (self.least, self.most) and any(
            least[name] < value or most[name] > value for name, value in values.items()
        ):
            self._take(least, most)

    def raise_least(
        self,
        reason: str,
        values: tuple[int, ...] | None = None,
        fails: Callable[[int], bool] | None = None,
    ) -> NoReturn:
        """Narrows the range: to larger sizes, or up to a limit that `values` show.

        Args:
            reason: why it has to be smaller.
            values: a size of a result at `points`, of which no expression is known.
            fails: whether a kernel does not run at one of `points`; asked where there are no
                `values`.

        Raises:
            Narrowed: the range is smaller now.
            OneLength: it would have no sizes but those of the call.
        """
        self.narrow_to_conditions()
        if values is not None:
            self._narrow(values)
        call = self.points[0]
        names = [
            name
            for name, value in call.items()
            if name not in self._floors and self.least[name] < value
        ]
        if not names:
            self.refuse(reason)
        at_fault = names
        if len(names) > 1:
            if values is not None:
                found = [name for name in names if self._explains(name, values)]
            else:
                assert fails is not None, "a kernel fails"
                self._set_points(
                    [*self.points, *({**call, name: self.least[name]} for name in names)]
                )
                first = len(self.points) - len(names)
                found = [name for place, name in enumerate(names, first) if fails(place)]
            at_fault = found or names
        self._take(
            {
                name: min(2 * size, call[name]) if name in at_fault else size
                for name, size in self.least.items()
            },
            self.most,
        )

    def _explains(self, name: str, values: tuple[int, ...]) -> bool:
        """Whether something that is known has these values where one symbol is not small."""
        places = [
            place
            for place, point in enumerate(self.points)
            if point[name] >= min(2 * self.least[name], self.points[0][name])
        ]
        known = [(1,) * len(self.points)]
        known += [found.values for alike in self._by_ratio.values() for found in alike]
        return any(
            found[0] and all(values[0] * found[at] == values[at] * found[0] for at in places)
            for found in known
        )

    def _take(self, least: dict[str, int], most: dict[str, int]) -> NoReturn:
        self.least, self.most = dict(least), dict(most)
        for name, symbol in self.symbols.items():
            symbol.bounds = self.least[name], self.most[name]
        self._set_points(_points(self.points[0], self.most, self.least))
        raise Narrowed

    def _fitted(self, values: tuple[int, ...]) -> Expression | None:
        """The polynomial of degree 2 at most that has these values; None if there is none."""
        monomials: list[Monomial] = [()]
        for degree in (1, 2):
            monomials += combinations_with_replacement(self.symbols.values(), degree)
        rows = [
            [Fraction(math.prod(atom.values[place] for atom in atoms)) for atoms in monomials]
            for place in range(len(self.points))
        ]
        factors = _solved(rows, [Fraction(value) for value in values])
        if factors is None:
            return None
        whole = math.lcm(*(factor.denominator for factor in factors))
        terms = {
            self.product(atoms, ()): int(factor * whole)
            for atoms, factor in zip(monomials, factors, strict=True)
        }
        made = self.polynomial(terms)
        return made if whole == 1 else made.floordiv(self.constant(whole))


def kind_of(value: Any) -> Text:
    """The kind of a plain number, as `Node` has it."""
    return "b" if type(value) is bool else "f" if type(value) is float else "i"


class Node:
    """What PyTorch asks first of the node of a `torch.SymInt`, `torch.SymFloat`, or
    `torch.SymBool`.

    Attributes:
        kind: "i" for an integer, "f" for a float, "b" for a condition.
    """

    __slots__ = ()
    kind: Text

    def _is_of_kind(self, kind: Text) -> bool:
        return self.kind == kind

    is_int = partialmethod(_is_of_kind, "i")
    is_float = partialmethod(_is_of_kind, "f")
    is_bool = partialmethod(_is_of_kind, "b")

    def is_nested_int(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return not self.is_constant()

    def has_hint(self) -> bool:
        return True


class Expression(Node):
    """A number that follows from symbols.

    Attributes:
        op: what it is made by.
        args: what of.
        values: at the points of its `Symbols`; the first is that of the call.
        bounds: between which it is in the whole range; None if that is not known.
        terms: an integer as a sum of monomials.
    """

    __slots__ = ("args", "bounds", "kind", "op", "symbols", "terms", "values")

    def __init__(
        self, symbols: Symbols, kind: Text, op: Text, args: tuple[Any, ...], values: tuple[Any, ...], bounds: Any
    ) -> None:  # fmt: skip
        self.symbols = symbols
        self.kind = kind
        self.op = op
        self.args = args
        self.values = values
        self.bounds = bounds
        self.terms: dict[Monomial, int] = {}

    @property
    def value(self) -> Any:
        """In the call that is captured."""
        return self.values[0]

    def text(self) -> Text:
        """As Python, over the names of symbols."""
        if self.op == "symbol":
            return cast("Text", self.args[0])
        if self.op == "constant":
            value = self.args[0]
            if self.kind == "f" and not math.isfinite(value):  # it has no literal
                return f"float('{value}')"
            text = repr(value)
            return f"({text})" if text.startswith("-") else text  # it may be a power's base
        if self.op == "polynomial":
            return f"({' + '.join(map(_monomial_text, self.terms.items()))})"
        args = [arg.text() for arg in self.args]
        return (
            _TEXTS[self.op].format(*args) if self.op in _TEXTS else f"{self.op}({', '.join(args)})"
        )

    def atoms(self) -> set[Expression]:
        """The symbols that it follows from."""
        if self.op == "symbol":
            return {self}
        if self.op == "polynomial":
            parts: Iterable[Any] = (atom for atoms in self.terms for atom in atoms)
        else:
            parts = (arg for arg in self.args if isinstance(arg, Expression))
        return {symbol for part in parts for symbol in part.atoms()}

    # -- what it is, as PyTorch asks a `torch.SymInt`'s node

    def nested_int(self) -> None:
        return None

    def is_constant(self) -> bool:
        return self.op == "constant"

    @property
    def hint(self) -> Any:
        return self.value

    _hint = hint

    @property
    def expr(self) -> Expression:
        return self

    @property
    def pytype(self) -> type:
        return {"i": int, "f": float, "b": bool}[self.kind]

    def require_hint(self, fallback: Any = None) -> Any:
        return self.value

    def constant_int(self) -> Any:
        return self.args[0] if self.op == "constant" else None

    maybe_as_int = maybe_as_float = maybe_as_bool = constant_bool = constant_int

    def clone(self) -> Expression:
        return self

    def wrap_int(self, number: Any) -> Expression:
        return self.symbols.constant(number)

    wrap_float = wrap_bool = wrap_int

    # -- questions

    def guard_int(self, *_: object) -> Any:
        """Code needs the number itself. If many sizes have it, as a number of chunks, the recording
        relies on it from now on.
        """
        if self.op == "constant":
            return self.args[0]
        if not self.symbols.is_flat(self):
            self.symbols.refuse(f"the step needs the value of the size {self.text()} itself")
        self.eq(self.wrap_int(self.value)).guard_bool()
        return self.value

    guard_float = int_ = guard_int

    def known(self) -> bool | None:
        """A condition's answer in the whole range; None if it differs, or that is not known."""
        if self.op == "constant":
            return bool(self.args[0])
        return None if self.bounds is None else bool(self.bounds[0])

    def guard_bool(self, *_: object) -> bool:
        """A condition's answer in this call, on which the recording relies from now on."""
        known = self.known()
        if known is not None:
            return known
        self.symbols.conditions[self] = bool(self.value)
        return bool(self.value)

    bool_ = expect_true = guard_size_oblivious = guard_or_false = guard_or_true = guard_bool

    def expect_size(self, *_: object) -> bool:
        return True

    def statically_known_true(self, *_: object) -> bool:
        return self.known() is True

    def str(self) -> Any:
        """C++ asks for messages of errors, which it makes before it knows whether there is one."""
        return repr(self.value)

    def _graph_repr(self) -> Any:
        return repr(self.value) if is_unread() else self.guard_int()

    # -- arithmetic

    def add(self, other: Expression) -> Expression:
        return self._linear("add", other, 1)

    def sub(self, other: Expression) -> Expression:
        return self._linear("sub", other, -1)

    def _linear(self, op: Text, other: Expression, sign: int) -> Expression:
        if self.kind != "i" or other.kind != "i":
            return self._float(op, other)
        known = self.symbols._known
        key = op, self, other
        found = known.get(key)
        if found is None:
            terms = dict(self.terms)
            for atoms, factor in other.terms.items():
                terms[atoms] = terms.get(atoms, 0) + sign * factor
            found = known[key] = self.symbols.polynomial(terms)
        return found

    def mul(self, other: Expression) -> Expression:
        if self.kind != "i" or other.kind != "i":
            return self._float("mul", other)
        known = self.symbols._known
        key = "mul", self, other
        found = known.get(key)
        if found is None:
            terms: dict[Monomial, int] = {}
            for atoms, factor in self.terms.items():
                for others, times in other.terms.items():
                    product = self.symbols.product(atoms, others)
                    terms[product] = terms.get(product, 0) + factor * times
            found = known[key] = self.symbols.polynomial(terms)
        return found

    def neg(self) -> Expression:
        return self.wrap_int(0).sub(self) if self.kind == "i" else self._float("neg")

    def floordiv(self, other: Expression) -> Expression:
        quotient = self._quotient(other)
        return self._atom("floordiv", other) if quotient is None else quotient

    int_floordiv = floordiv

    def mod(self, other: Expression) -> Expression:
        return self._atom("mod", other) if self._quotient(other) is None else self.wrap_int(0)

    def _quotient(self, other: Expression) -> Expression | None:
        """The exact quotient by a monomial; None if it is none."""
        if self.kind != "i" or len(other.terms) != 1:
            return self.wrap_int(1) if self is other else None
        ((divisor, by),) = other.terms.items()
        terms: dict[Monomial, int] = {}
        for atoms, factor in self.terms.items():
            left = list(atoms)
            for atom in divisor:
                if atom not in left:
                    return None
                left.remove(atom)
            if factor % by:
                return None
            terms[tuple(left)] = factor // by
        return self.symbols.polynomial(terms)

    def sym_max(self, other: Expression) -> Expression:
        return self if self.ge(other).guard_bool() else other

    def sym_min(self, other: Expression) -> Expression:
        return other if self.ge(other).guard_bool() else self

    def sym_sum(self, args: Iterable[Expression]) -> Expression:
        total = self.wrap_int(0)
        for arg in args:
            total = total.add(arg)
        return total

    def _float(self, op: Text, *others: Expression) -> Expression:
        return self.symbols.atom(op, (self, *others), "f")

    truediv = int_truediv = float_truediv = partialmethod(_float, "truediv")
    sym_sqrt = _sym_sqrt = partialmethod(_float, "sqrt")

    def pow(self, other: Expression) -> Expression:
        if self.kind == "i" and other.op == "constant" and type(other.args[0]) is int:
            exponent = other.args[0]
            if 0 <= exponent <= 4:
                result = self.wrap_int(1)
                for _ in range(exponent):
                    result = result.mul(self)
                return result
        return self._float("pow", other)

    pow_by_natural = float_pow = pow

    def sym_float(self) -> Expression:
        return self if self.kind == "f" else self._float("float")

    def ceil(self) -> Expression:
        return self if self.kind == "i" else self._atom("ceil")

    def floor(self) -> Expression:
        if self.kind == "i":
            return self
        floored = self._atom("floor")
        if self.op == "truediv" and self.args[1].kind == "f":
            # PyTorch makes `a // b` the floor of `a / b`, which is larger if that was rounded up.
            floored.eq(self.symbols.atom("floordiv", self.args, "f")).guard_bool()
        return floored

    def round(self, digits: int | None = None) -> Expression:
        if digits is not None:
            self.guard_int()
        return self if self.kind == "i" else self._atom("round")

    def trunc(self) -> Expression:
        return self if self.kind == "i" else self._atom("trunc")

    def _atom(self, op: Text, *others: Expression) -> Expression:
        kind = (
            "f"
            if op in ("floordiv", "mod") and any(o.kind == "f" for o in (self, *others))
            else "i"
        )
        return self.symbols.atom(op, (self, *others), kind)

    def _compared(self, op: Text, other: Expression) -> Expression:
        key = op, self, other
        found = self.symbols._known.get(key)
        if found is None:
            answer = _static(op, self, other)
            if answer is None:
                found = self.symbols.atom(op, (self, other), "b")
            else:
                found = self.symbols._known[key] = self.symbols.constant(answer)
        return found

    eq, ne = partialmethod(_compared, "eq"), partialmethod(_compared, "ne")
    lt, le = partialmethod(_compared, "lt"), partialmethod(_compared, "le")
    gt, ge = partialmethod(_compared, "gt"), partialmethod(_compared, "ge")

    def _logical(self, op: Text, *others: Expression) -> Expression:
        return self.symbols.atom(op, (self, *others), "b")

    sym_not = partialmethod(_logical, "not")
    sym_and = and_ = partialmethod(_logical, "and")
    sym_or = or_ = partialmethod(_logical, "or")

    def sym_ite(self, one: Expression, other: Expression) -> Expression:
        return one if self.guard_bool() else other

    # -- how sizes and strides lie

    def is_contiguous(self, sizes: list[Any], strides: list[Any]) -> Expression:
        return self._lies_in(range(len(sizes))[::-1], sizes, strides)

    def is_non_overlapping_and_dense_indicator(
        self, sizes: list[Any], strides: list[Any]
    ) -> Expression:
        order = sorted(range(len(sizes)), key=lambda place: self.symbols.of(strides[place]).value)
        return self._lies_in(order, sizes, strides)

    is_non_overlapping_and_dense = is_non_overlapping_and_dense_indicator

    def _lies_in(self, order: Sequence[int], sizes: list[Any], strides: list[Any]) -> Expression:
        """Whether elements follow one another without gaps in this order of the dimensions."""
        if len(sizes) != len(order):
            return self.wrap_bool(False)
        one = expected = self.wrap_int(1)
        for place in order:
            size = self.symbols.of(sizes[place])
            if size.eq(one).guard_bool():
                continue
            if not self.symbols.of(strides[place]).eq(expected).guard_bool():
                return self.wrap_bool(False)
            expected = expected.mul(size)
        return self.wrap_bool(True)

    def _descends(self, order: Sequence[int], sizes: list[Any], strides: list[Any]) -> Expression:
        """Whether strides grow in this order of the dimensions, as PyTorch tells channels last."""
        if len(sizes) != len(order):
            return self.wrap_bool(False)
        least, channels = self.wrap_int(0), self.symbols.of(strides[1])
        if channels.eq(least).guard_bool():
            return self.wrap_bool(False)
        one = self.wrap_int(1)
        for place in order:
            size, step = self.symbols.of(sizes[place]), self.symbols.of(strides[place])
            if size.eq(self.wrap_int(0)).guard_bool() or step.lt(least).guard_bool():
                return self.wrap_bool(False)
            if place == 0 and least.eq(channels).guard_bool():
                return self.wrap_bool(False)
            least = step if size.eq(one).guard_bool() else step.mul(size)
        return self.wrap_bool(True)

    is_channels_last_contiguous_2d = partialmethod(_lies_in, (1, 3, 2, 0))
    is_channels_last_contiguous_3d = partialmethod(_lies_in, (1, 4, 3, 2, 0))
    is_channels_last_strides_2d = partialmethod(_descends, (1, 3, 2, 0))
    is_channels_last_strides_3d = partialmethod(_descends, (1, 4, 3, 2, 0))


def _static(op: str, one: Expression, other: Expression) -> bool | None:
    """A comparison's answer in the whole range; None if there is no one answer."""
    if one.kind != "i" or other.kind != "i":
        return None
    difference = one.sub(other)
    if difference.op == "constant":
        return _COMPARISONS[op][1](difference.args[0], 0)
    if difference.bounds is None:
        return None
    low, high = difference.bounds
    function = _COMPARISONS[op][1]
    if op in ("eq", "ne"):
        return op == "ne" if low > 0 or high < 0 else None
    answers = function(low, 0), function(high, 0)
    return answers[0] if answers[0] == answers[1] else None


def _bounds(terms: Mapping[Monomial, int]) -> tuple[int, int] | None:
    """Between what a polynomial is, if its atoms are not negative."""
    low = high = 0
    for atoms, factor in terms.items():
        least = most = 1
        for atom in atoms:
            if atom.bounds is None or atom.bounds[0] < 0:
                return None
            least, most = least * atom.bounds[0], most * atom.bounds[1]
        ends = sorted((factor * least, factor * most))
        low, high = low + ends[0], high + ends[1]
    return low, high


def _atom_bounds(op: str, args: tuple[Expression, ...]) -> tuple[Any, Any] | None:
    if op == "floordiv" and args[1].op == "constant" and args[1].args[0] > 0:
        bounds, by = args[0].bounds, args[1].args[0]
        return None if bounds is None else (bounds[0] // by, bounds[1] // by)
    if op == "mod" and args[1].op == "constant" and args[1].args[0] > 0:
        return 0, args[1].args[0] - 1
    if op in ("not", "and", "or"):
        answers = [arg.known() for arg in args]
        if op == "not":
            return None if answers[0] is None else (not answers[0], not answers[0])
        decides = op == "or"
        if decides in answers:
            return decides, decides
        return None if None in answers else (not decides, not decides)
    return None


def _function(op: str) -> Callable[..., Any]:
    return _FUNCTIONS.get(op) or getattr(math, op.removeprefix("math."))


def _sum(terms: Mapping[Monomial, int], place: int) -> int:
    """What a polynomial is at one of the points."""
    return sum(
        factor * math.prod(atom.values[place] for atom in atoms) for atoms, factor in terms.items()
    )


def _applied(function: Callable[..., Any], args: list[Any]) -> Any:
    """A function's result; None if it has none for these arguments, or one of them is None."""
    if None in args:
        return None
    try:
        return function(*args)
    except (ArithmeticError, ValueError):
        return None


def _monomial_text(term: tuple[Monomial, int]) -> str:
    atoms, factor = term
    shown = [atom.text() for atom in atoms]
    return " * ".join([repr(factor), *shown] if factor != 1 or not atoms else shown)


def _points(
    values: Mapping[str, int], most: Mapping[str, int], least: Mapping[str, int]
) -> list[dict[str, int]]:
    """The call's values, both ends of the range, and as many between as a polynomial of degree 2
    needs, with two to spare. They have no common divisors, so no two sizes are equal by chance.
    """
    count = len(values)
    wanted = (count + 1) * (count + 2) // 2 + 3
    points = [dict(values), dict(least), dict(most)]
    for turn in range(wanted - len(points)):
        point = {}
        for place, (name, value) in enumerate(values.items()):
            # Small enough to be made of zeros, and of both parities.
            low = max(5, least[name] + 1)
            start = low + (7 * turn * (place + 1) + 11 * place) % max(value - low, 11)
            point[name] = min(prime_from(start + turn), most[name])
        points.append(point)
    for one, name in enumerate(values):  # ends apart from one another
        points.append({**values, name: most[name]} if one % 2 else {**most, name: values[name]})
    return points if count > 1 else points[:-1]  # the last is the call's values again


def prime_from(number: int) -> int:
    """The first prime that is no less."""
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number


def _solved(rows: list[list[Fraction]], values: list[Fraction]) -> list[Fraction] | None:
    """The solution of a system of more equations than unknowns; None if it has none, or several."""
    table = [[*row, value] for row, value in zip(rows, values, strict=True)]
    unknowns = len(rows[0])
    for column in range(unknowns):
        pivot = next((at for at in range(column, len(table)) if table[at][column]), None)
        if pivot is None:
            return None
        table[column], table[pivot] = table[pivot], table[column]
        lead = table[column]
        for at, row in enumerate(table):
            if at != column and row[column]:
                by = row[column] / lead[column]
                table[at] = [one - by * other for one, other in zip(row, lead, strict=True)]
    if any(row[-1] for row in table[unknowns:]):
        return None
    return [table[at][-1] / table[at][at] for at in range(unknowns)]


class Size(int):
    """An integer of a program that follows from symbols. Arithmetic on it gives plain integers."""

    expression: Expression

    def __new__(cls, value: int, expression: Expression) -> Size:
        made = int.__new__(cls, value)
        made.expression = expression
        return made


class SizedFloat(float):
    """A float of a program that follows from symbols."""

    expression: Expression

    def __new__(cls, value: float, expression: Expression) -> SizedFloat:
        made = float.__new__(cls, value)
        made.expression = expression
        return made


def is_size(value: Any) -> bool:
    """Whether a value that the step's code has follows from symbols."""
    return type(value) in _CARRIERS and isinstance(value.node, Expression)


def calculated(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a function of `math` gives for numbers of which some follow from symbols."""
    symbols = next(arg.node.symbols for arg in args if is_size(arg))
    operands = [symbols.of(arg) for arg in args]
    function(*(operand.value for operand in operands))  # raises what it does for these
    return torch.SymFloat(symbols.atom(f"math.{function.__name__}", tuple(operands), "f"))


def number(expression: Expression) -> Any:
    """What stands in a program for an expression."""
    if expression.op == "constant":
        return expression.args[0]
    if expression.kind == "b":
        return expression.guard_bool()
    kind = SizedFloat if expression.kind == "f" else Size
    return kind(expression.value, expression)


def plain_number(number: Size | SizedFloat) -> int | float:
    """A number of a program without its expression."""
    return float(number) if type(number) is SizedFloat else int(number)


class Evaluator:
    """Gives the values of expressions for values of the symbols, by one compiled function.

    Args:
        symbols: the names of the symbols, in the order in which values are given.
    """

    def __init__(self, expressions: Iterable[Expression], symbols: Iterable[str]) -> None:
        self.places = {found: place for place, found in enumerate(dict.fromkeys(expressions))}
        text = ", ".join(found.text() for found in self.places)
        known: dict[str, Any] = {"math": math}
        exec(f"def values({', '.join(symbols)}):\n    return [{text}]", known)
        self.values: Callable[..., list[Any]] = known["values"]

    def nests(self, nests: Iterable[Any]) -> Callable[[list[Any]], list[Any]]:
        """One compiled function that makes nests at `values`: those given, with other numbers."""
        constants: list[Any] = []

        def text(value: Any) -> str:
            kind = type(value)
            if kind is Size or kind is SizedFloat:
                return f"v[{self.places[value.expression]}]"
            if kind is tuple:
                return f"({''.join(f'{text(item)}, ' for item in value)})"
            if kind is list:
                return f"[{', '.join(map(text, value))}]"
            if kind is int:
                return repr(value)
            if kind is dict:
                return (
                    f"{{{', '.join(f'{text(key)}: {text(item)}' for key, item in value.items())}}}"
                )
            constants.append(value)
            return f"c[{len(constants) - 1}]"

        known: dict[str, Any] = {"c": constants}
        exec(f"def made(v):\n    return [{', '.join(map(text, nests))}]", known)
        made: Callable[[list[Any]], list[Any]] = known["made"]
        return made


def expressions_in(value: Any) -> Iterator[Expression]:
    """The expressions in a nest of tuples, lists and dictionaries."""
    kind = type(value)
    if kind is Size or kind is SizedFloat:
        yield value.expression
    elif kind is tuple or kind is list:
        for item in value:
            yield from expressions_in(item)
    elif kind is dict:
        for item in value.values():
            yield from expressions_in(item)


def follows(value: Any) -> bool:
    """Whether a nest has a number that follows from symbols."""
    return next(expressions_in(value), None) is not None


def replaced(value: Any, new: Callable[[Any], Any]) -> Any:
    """A nest with `new` of each number that follows from symbols; the nest itself if there is
    none.
    """
    kind = type(value)
    if kind is Size or kind is SizedFloat:
        return new(value)
    if kind is tuple or kind is list:
        items = [replaced(item, new) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return items if kind is list else tuple(items)
    if kind is dict:
        found = {key: replaced(item, new) for key, item in value.items()}
        return value if all(found[key] is value[key] for key in value) else found
    return value
