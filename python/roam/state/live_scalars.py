"""Live numbers: Python numbers that change from step to step and must never be frozen at capture.

A learning rate, an optimizer's step count, a loss scale: during capture each is a `LiveFloat` or
`LiveInt`, whose arithmetic is recorded as calls of Python's own operators, in the order in which
the user's code makes them, so that a run gives the very bits of eager. Any use that would bring the
value itself into Python (an index, a key of a dictionary) raises `CaptureError`, since the plan
would use the value of the capture for ever. A condition (`if x > 1`) becomes a computed guard.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

import torch

from roam.state.equality import is_numpy_float
from roam.state.sizes import Node, calculated, is_size, kind_of
from roam.state.trace_context import TraceContext

aten = torch.ops.aten


LOOK_UP: Final = (
    "if it is an index, index a tensor by a tensor, as in x[torch.tensor([i])] = row, and keep a list of numbers as rates = "
    "torch.tensor(rates, dtype=torch.float64), for rates[torch.tensor([i])].item()"
)
"""What to write for an index that changes from call to call."""


class LiveNode(Node):
    """What C++ carries through a kernel's arguments in place of the number; see
    `torch.SymFloat.node`.

    Attributes:
        is_numpys: whether the number is a `numpy.float64`, whose comparisons give a `numpy.bool_`,
            and of which PyTorch makes tensors of float64.
    """

    __slots__ = ("is_numpys", "kind", "origin", "slot", "trace")

    def __init__(self, trace: TraceContext, slot: int, is_integer: bool, origin: str) -> None:
        self.trace = trace
        self.slot = slot
        self.kind = "i" if is_integer else "f"
        self.is_numpys = False
        self.origin = origin

    def has_hint(self) -> bool:
        return False

    def maybe_as_int(self) -> int | None:
        """Asked before a number becomes an `int` of an operator's."""
        return self.trace.handed_on(self.number()) if self.is_int() else None

    def maybe_as_float(self) -> None:
        return None

    def _value(self, *_: object) -> Any:
        """The number itself, if it depends only on constants in the step's code and on numbers for
        whose values a plan may hold. Otherwise the step is refused.
        """
        known = self.trace.fixed_value(self.slot)
        return self._reached_python() if known is None else known

    def decide(self, function: Callable[..., bool], live: Any, others: tuple[Any, ...]) -> bool:
        """Answers a comparison if guards can check the answer at each call; otherwise the step is
        refused.
        """
        if all(type(other) in (int, float) for other in others):
            answer = self.trace.decided(self.slot, function, others)
            if answer is not None:
                return answer
        if not all(isinstance(other, _NUMBERS) for other in others):
            return bool(function(self._value(), *others))
        answer = self.trace.branch(function, (live, *others))
        return bool(self._reached_python() if answer is None else answer)

    def to_numpy(self) -> NoReturn:
        """NumPy would do arithmetic of its own with the number."""
        self.trace.refuse(
            f"the step gives {self.origin} to NumPy, where capture cannot follow it; use Python's numbers, as in sum(values) / "
            "len(values), or tensors, as in torch.stack(losses).mean(), or return the numbers and give them to NumPy "
            f"outside of the step; {LOOK_UP}",
            code="value_reached_python",
        )

    def _reached_python(self, *_: object) -> NoReturn:
        self.trace.refuse_asked(self.slot, self.origin)

    def wrap_int(self, number: int) -> FixedNode:
        """Code in C++ is about to calculate with the number."""
        self._value()
        return FixedNode(number)

    def _given(self, *_: object) -> Any:
        """Code in C++ takes the number for an argument of an operator that is no live number."""
        handed = self.trace.handed_on(self.number())
        return self._value() if handed is None else handed

    def number(self) -> Any:
        """The live number that has this node."""
        return (LiveInt if self.is_int() else LiveFloat)(self)

    guard_int = guard_float = _given
    int_ = _value
    guard_bool = bool_ = expect_true = guard_size_oblivious = guard_or_false = guard_or_true = (
        statically_known_true
    ) = wrap_float = wrap_bool = _reached_python

    def str(self) -> Any:
        """A profiler shows what it has seen when it ends; nobody else has such a number by then."""
        return "a number of the step" if self.trace.is_over else self._reached_python()

    _graph_repr = str


class FixedNode(Node):
    """A number for whose value a plan holds, in the form with which code in C++ calculates."""

    __slots__ = ("kind", "value")

    def __init__(self, value: Any) -> None:
        self.kind = kind_of(value)
        self.value = value

    def is_constant(self) -> bool:
        return True

    def _value(self, *_: object) -> Any:
        return self.value

    def wrap_int(self, number: int) -> FixedNode:
        return FixedNode(number)

    guard_int = guard_float = guard_bool = guard_size_oblivious = guard_or_false = guard_or_true = (
        _value
    )
    int_ = bool_ = expect_true = expect_size = statically_known_true = maybe_as_int = _value
    wrap_float = wrap_bool = wrap_int

    def clone(self) -> FixedNode:
        return self


def _calculated(function: Callable[..., Any]) -> Callable[..., FixedNode]:
    """A method by which code in C++ calculates with a number for whose value a plan may hold."""

    def method(self: Any, *others: Any) -> FixedNode:
        return FixedNode(function(*(one._value() for one in (self, *others))))

    return method


for _name, _function in {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge")},
    "floordiv": operator.floordiv, "int_floordiv": operator.floordiv, "sym_min": min, "sym_max": max,
    "sym_not": operator.not_, "sym_and": lambda one, other: one and other, "sym_or": lambda one, other: one or other,
}.items():  # fmt: skip
    for _kind in (LiveNode, FixedNode):
        setattr(_kind, _name, _calculated(_function))


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_INTEGERS = (int, torch.SymInt)
_SYMBOLIC = (torch.SymFloat, torch.SymInt)
_OTHERS = (torch.Tensor, type(None), str, bytes, tuple, list, dict)
"""Python's numbers leave a comparison with these to the other side."""
MATH: dict[str, Callable[..., float]] = {
    name: getattr(math, name)
    for name in (
        "sqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "pow", "hypot", "fabs", "fmod", "copysign", "remainder",
        "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
        "degrees", "radians", "erf", "erfc", "gamma", "lgamma",
    )
}  # fmt: skip
"""Functions of Python's own that always give floats."""
_QUESTIONS: dict[str, Callable[[Any], bool]] = {
    name: getattr(math, name) for name in ("isfinite", "isnan", "isinf")
}


def _binary(
    side: str, function: Callable[[Any, Any], Any], numbers: tuple[type, ...] = _NUMBERS
) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, numbers):
            return NotImplemented
        operands = (other, self) if side == "r" else (self, other)
        return self.node.trace.scalar_call(function, operands)

    return method


def _both(*functions: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A method that gives the results of several others, as `divmod` does."""

    def method(self: Any, other: Any) -> Any:
        results = tuple(function(self, other) for function in functions)
        return NotImplemented if any(one is NotImplemented for one in results) else results

    return method


def _unary(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return self.node.trace.scalar_call(function, (self,))

    return method


def _of_value(function: Any) -> Callable[..., Any]:
    """A method whose result needs the number itself."""

    def method(self: Any, *others: Any) -> Any:
        return function(self.node._value(), *others)

    return method


def nearest(number: float) -> int:
    """As `round` does with one argument."""
    return round(number)


ROUNDING: Final = (math.trunc, math.floor, math.ceil)
"""Functions of Python's own that give integers, besides `nearest`."""


def _integer(function: Callable[[Any], int]) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        known = self.node.trace.fixed_value(self.node.slot)
        return self.node.trace.scalar_call(function, (self,)) if known is None else function(known)

    return method


def _rounded(self: Any, digits: Any = None) -> Any:
    if digits is None:
        return _integer(nearest)(self)
    if type(digits) is not int:
        return round(self.node._value(), digits)
    return self.node.trace.scalar_call(round, (self, digits))


def _comparison(function: Any) -> Callable[..., bool]:
    def method(self: Any, *others: Any) -> bool:
        if any(isinstance(other, _OTHERS) for other in others):
            return NotImplemented  # type: ignore[no-any-return]
        answer = bool(self.node.decide(function, self, others))
        numpys = any(map(is_of_numpy, (self, *others)))
        return sys.modules["numpy"].bool_(answer) if numpys else answer

    return method


_OF_NUMPY: Final = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv", "floor_divide": "floordiv",
    "remainder": "mod", "power": "pow",
}  # fmt: skip
"""NumPy's names of operators, and Python's."""


def _on_numpys_right(self: Any, function: Any, kind: str, *inputs: Any, **options: Any) -> Any:
    """What stands right of a `numpy.float64`, which is a float of Python's too, records the
    operator. Functions of NumPy, and its other numbers and arrays, calculate on their own.
    """
    name = _OF_NUMPY.get(function.__name__)
    is_operator = name and kind == "__call__" and len(inputs) == 2 and not options
    if is_operator and inputs[1] is self and isinstance(inputs[0], float):
        return getattr(self, f"__r{name}__")(inputs[0])
    return self.node.to_numpy()


def _both_sides(names: str, *others: Any) -> dict[str, Callable[..., Any]]:
    """The methods of operators with the number on the left, and with it on the right."""
    functions = {name: getattr(operator, f"__{name}__") for name in names.split()}
    return {
        f"__{side}{name}__": _binary(side, function, *others)
        for side in ("", "r")
        for name, function in functions.items()
    }


_ARITHMETIC: dict[str, Any] = {
    **_both_sides("add sub mul truediv floordiv mod pow"),
    "__array__": lambda self, *_, **__: self.node.to_numpy(),
    "__array_ufunc__": _on_numpys_right,
    "__divmod__": _both(_binary("", operator.floordiv), _binary("", operator.mod)),
    "__rdivmod__": _both(_binary("r", operator.floordiv), _binary("r", operator.mod)),
    "__copy__": lambda self: self,
    "real": property(lambda self: self),
    "conjugate": lambda self: self,
    "__deepcopy__": lambda self, _: self,
    "__neg__": _unary(operator.neg),
    "__pos__": _unary(operator.pos),
    "__abs__": _unary(operator.abs),
    "__sym_float__": _unary(float),
    "__sym_sqrt__": _unary(math.sqrt),
    **{
        f"__{name}__": _of_value(function)
        for name, function in {
            "index": operator.index, "hash": hash, "float": float, "int": int, "repr": repr, "str": str, "format": format,
        }.items()
    },
    **{f"__{function.__name__}__": _integer(function) for function in ROUNDING},
    "__round__": _rounded,
    **{
        f"__{name}__": _comparison(function)
        for name, function in {
            "bool": bool, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
            "gt": operator.gt, "ge": operator.ge,
        }.items()
    },
}  # fmt: skip

_OF_INTEGERS: dict[str, Any] = {
    **_both_sides("and or xor lshift rshift", _INTEGERS),
    "__invert__": _unary(operator.invert),
    "__float__": lambda self: self.node._reached_python(),  # a count differs at each call
    "__index__": lambda self: self.node._given(),
    "bit_length": _of_value(int.bit_length),
    "bit_count": _of_value(lambda number: number.bit_count()),
    "is_integer": lambda self: True,
    "numerator": property(lambda self: self),
    "denominator": property(lambda self: 1),
    "imag": property(lambda self: 0),
    "as_integer_ratio": lambda self: (self, 1),
    "to_bytes": lambda self, *args, **kwargs: int.to_bytes(self.node._value(), *args, **kwargs),
    "from_bytes": int.from_bytes,
}
_OF_FLOATS: dict[str, Any] = {
    "is_integer": _comparison(float.is_integer),
    "hex": _of_value(float.hex),
    "as_integer_ratio": _of_value(float.as_integer_ratio),
    "imag": property(lambda self: 0.0),
    "fromhex": float.fromhex,
}

# `isinstance(lr, float)` must say what it says of the number itself.
LiveFloat: Any = type(
    "LiveFloat",
    (torch.SymFloat,),
    _ARITHMETIC | _OF_FLOATS | {"__class__": property(lambda self: float)},
)
LiveInt: Any = type(
    "LiveInt",
    (torch.SymInt,),
    _ARITHMETIC | _OF_INTEGERS | {"__class__": property(lambda self: int)},
)


def number_stand_ins(trace: TraceContext) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(holder, name, stand-in) of the functions that would bring a live number to Python: they are
    recorded like arithmetic.
    """

    def of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            has_live = (
                len(args) > int(function in (max, min)) and not kwargs and any(map(is_live, args))
            )
            if has_live:
                return trace.scalar_call(function, args)
            if function in MATH.values() and any(map(is_size, args)):
                return calculated(function, args)
            return function(*args, **kwargs)

        return call

    def to_tensor(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(data: Any, *args: Any, **kwargs: Any) -> Any:
            made = None
            if not args and not kwargs.keys() - {"dtype", "device"}:
                made = _made_tensor(trace, data, **kwargs)
            return function(data, *args, **kwargs) if made is None else made

        return call

    def new_tensor(like: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        made = None
        if not args and not kwargs.keys() - {"dtype", "device"}:
            made = _made_tensor(
                trace, data, **{"dtype": like.dtype, "device": like.device, **kwargs}
            )
        return plain_new_tensor(like, data, *args, **kwargs) if made is None else made

    plain_new_tensor = torch.Tensor.new_tensor

    def asking(function: Callable[..., bool], original: Callable[..., Any]) -> Callable[..., Any]:
        numpy = sys.modules.get("numpy")
        is_numpys = numpy is not None and isinstance(original, numpy.ufunc)

        def as_answer(value: Any, answer: bool) -> Any:
            if not is_numpys:
                return answer
            return torch.tensor(answer) if isinstance(value, torch.Tensor) else numpy.bool_(answer)  # type: ignore[union-attr]

        def call(value: Any, *args: Any, **kwargs: Any) -> Any:
            number: Any = (
                value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
            )
            return (
                as_answer(value, number.node.decide(function, number, ()))
                if is_live(number)
                else original(value, *args, **kwargs)
            )

        return call

    for name, function in MATH.items():
        yield math, name, of_numbers(function)
    for holder in filter(None, (math, sys.modules.get("numpy"))):
        for name, question in _QUESTIONS.items():
            yield holder, name, asking(question, getattr(holder, name))
    yield sys.modules["torch.nn.utils.clip_grad"], "float", of_numbers(float)
    for module in ("torch.optim._adafactor", "torch.optim.asgd"):
        yield sys.modules[module], "max", of_numbers(max)
        yield sys.modules[module], "min", of_numbers(min)
    for name in ("tensor", "as_tensor"):
        yield torch, name, to_tensor(getattr(torch, name))
    yield torch.Tensor, "new_tensor", new_tensor


def _made_tensor(
    trace: TraceContext, data: Any, *, dtype: torch.dtype | None = None, device: Any = None
) -> torch.Tensor | None:
    """A new tensor of numbers of which some are live, or tensors without dimensions, in lists of
    equal lengths; None for other data.
    """
    if isinstance(data, torch.Tensor):
        return None
    numbers, shape = [data], list[int]()
    while numbers and any(isinstance(item, (list, tuple)) for item in numbers):
        lengths = {len(item) if isinstance(item, (list, tuple)) else -1 for item in numbers}
        if len(lengths) != 1:
            return None
        shape += lengths
        numbers = [number for item in numbers for number in item]
    if not any(is_live(number) or isinstance(number, torch.Tensor) for number in numbers):
        return None
    kinds = list(map(_kind_of, numbers))
    if None in kinds:
        return None
    made_of = functools.reduce(torch.promote_types, kinds)
    dtype = dtype or made_of
    if made_of.is_floating_point and not dtype.is_floating_point:
        return None
    numbers = [n.item() if isinstance(n, torch.Tensor) else n for n in numbers]
    if dtype.is_floating_point:  # PyTorch makes integers floats of Python's first
        numbers = [trace.scalar_call(float, (n,)) if is_live(n) else float(n) for n in numbers]
    made = [torch.full((), number, dtype=dtype, device=device) for number in numbers]
    return made[0] if not shape else torch.stack(made).view(shape)


def _kind_of(number: Any) -> Any:
    """The dtype that PyTorch takes a number for, or a tensor without dimensions; None for any other
    value.
    """
    if isinstance(number, torch.Tensor):
        is_number = number.dim() == 0 and not number.is_complex() and number.dtype is not torch.bool
        return number.dtype if is_number else None
    if is_of_numpy(number):
        return torch.float64
    if isinstance(number, (float, torch.SymFloat)):
        return torch.get_default_dtype()
    if isinstance(number, bool):
        return torch.bool
    return torch.int64 if isinstance(number, _NUMBERS) else None


def is_live(value: Any) -> bool:
    """Whether a value is a live number."""
    return node_of(value) is not None


def node_of(value: object) -> LiveNode | None:
    """The node of a number that changes from call to call; None for any other value, of which
    nothing is asked.
    """
    if not issubclass(type(value), _SYMBOLIC):
        return None
    node: Any = getattr(value, "node", None)
    return node if isinstance(node, LiveNode) else None


def is_of_numpy(number: Any) -> bool:
    """Whether a number, or the one that it stands for, is a `numpy.float64`."""
    return number.node.is_numpys if is_live(number) else is_numpy_float(number)


def as_live(number: Any) -> Any:
    """A live number that came back from C++ as torch's plain class gets its arithmetic back."""
    node = node_of(number)
    return number if node is None else node.number()
