"""Guards of what a traced step used but does not hold: the libraries' code that it ran, settings in
their modules, environment variables, and whether loggers were enabled.

A function of a module, a method of a class, or an environment variable may be replaced between two
calls, and the level of a logger set. The trace notes which of them it used, and a guard compares
these, and no others, at every call.
"""

from __future__ import annotations

import logging
import operator
import os
import types
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, compress
from typing import Any, Final

import torch

from roam.garbage import referrers
from roam.state.classes import dictionary_of, module_of, qualname_of
from roam.state.equality import MISSING, Misfit, attributes_of, changed, show
from roam.state.library_code import is_library, is_library_code, nested_code
from roam.state.reach import Reach
from roam.torch_compat.private import FakeTensor, behind_proxy, dict_versions

_FUNCTIONS: Final = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType, types.WrapperDescriptorType,
    staticmethod, classmethod, property,
)  # fmt: skip
_CODE: Final = (*_FUNCTIONS, type, types.ModuleType)
_SETTINGS: Final = (bool, int, float, str, bytes, tuple, list, dict, type(None))
"""What a module of a library may keep for those who use it, such as `sys.argv`."""
_SEARCHED: Final = 4
"""How many names deep a function is looked for in modules: `torch.nn.functional.relu`."""
Names = dict[str, Any]


TOLD_BY: Final = (
    "ATEN_", "CUBLAS", "CUDA_", "CUDNN_", "DNNL_", "GOMP_", "KMP_", "LD_PRELOAD", "MKL_", "NVIDIA_", "OMP_", "ONEDNN_",
    "OPENBLAS_", "PYTORCH_", "TORCH_",
)  # fmt: skip
"""How environment variables begin by which libraries choose kernels."""
_OF_A_QUESTION: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""How `torch.cuda.is_available` finds devices: accelerate sets it for each such question."""


class Reliance:
    """The libraries' code, the environment variables, and the levels of loggers that traces used.
    When the traces are over and everything is in place again, `settled` notes what these are; from
    then on `failure` compares.
    """

    def __init__(self) -> None:
        self.code: dict[types.CodeType, Names] = {}
        """Code that ran around operators, each with its globals."""
        self.levels: set[tuple[logging.Logger, int]] = set()
        """(logger, level) of those of which the step asks whether they are on."""
        self._enabled: dict[tuple[logging.Logger, int], bool] = {}
        self._looked_at = 0
        self._variables: dict[Any, Any] = {}
        self._environment: dict[Any, Any] | None = None
        self._holders: list[tuple[str, Mapping[str, Any], tuple[str, ...]]] = []
        self._classes: list[type] = []
        self._objects: list[tuple[str, Any]] = []

    # -- while tracing

    def stand_ins(
        self, refuse: Callable[[str], Any]
    ) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """(holder, name, function) for each function that reads or changes the environment;
        `refuse` is for changes, which a run would not make.
        """
        kind = type(os.environ)
        read, iterate, count = kind.__getitem__, kind.__iter__, kind.__len__
        write, delete = kind.__setitem__, kind.__delitem__

        def reading(environment: Any, key: Any) -> Any:
            if issubclass(type(key), (str, bytes)) and key != _OF_A_QUESTION:
                name = environment.encodekey(key)
                self._variables[name] = environment._data.get(name, MISSING)
            return read(environment, key)

        def all_of(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def reading_all(environment: Any) -> Any:
                self._environment = dict(environment._data)
                return function(environment)

            return reading_all

        def changing(change: Callable[..., None]) -> Callable[..., None]:
            def changed(environment: Any, key: Any, *value: Any) -> None:
                if (
                    issubclass(type(key), str)
                    and key != _OF_A_QUESTION
                    and all(issubclass(type(one), str) for one in value)
                ):
                    name = environment.encodekey(key)
                    now = environment._data.get(name, MISSING)
                    # PyTorch itself sets one whenever a function is given to torch.compile.
                    if value and now == environment.encodevalue(value[0]):
                        self._variables[name] = now
                        return
                    refuse(
                        f"the step sets the environment variable {key}, which a run would not do again; set it outside of the step"
                    )
                change(environment, key, *value)

            return changed

        yield kind, "__getitem__", reading
        yield kind, "__iter__", all_of(iterate)
        yield kind, "__len__", all_of(count)
        yield kind, "__setitem__", changing(write)
        yield kind, "__delitem__", changing(delete)

    def unreached(self, reach: Reach) -> list[tuple[str, types.FunctionType]]:
        """The user's functions that ran, or that a library's code names, and that were not found by
        the walk over what the step reaches.

        They were put into a library in place of its own, or found by a computed name.
        """
        if len(self.code) == self._looked_at:
            return []
        self._looked_at = len(self.code)
        known = set(chain.from_iterable(map(nested_code, reach.code)))
        ran = [
            code
            for code, names in self.code.items()
            if code not in known and not is_library_code(code, names)
        ]
        found: dict[int, tuple[str, types.FunctionType]] = {}
        if ran:
            for function in referrers(*ran):
                if type(function) is types.FunctionType:
                    found[id(function)] = function.__qualname__, function
        for path, holder, name in self._library_places():
            function = holder.get(name)
            if type(function) is not types.FunctionType or function.__code__ in known:
                continue
            if not is_library_code(function.__code__, function.__globals__):
                found[id(function)] = f"{path}.{name}", function
        return list(found.values())

    def _library_places(self) -> Iterator[tuple[str, Mapping[str, Any], str]]:
        for code, names in self.code.items():
            for path, holder, name in _named(code, names):
                if is_library(holder.get("__name__")):
                    yield path, holder, name
        for kind in (*_classes_around(self.code), torch.Tensor):
            if is_library(module_of(kind)):
                yield from (
                    (qualname_of(kind), dictionary_of(kind), name) for name in _function_names(kind)
                )

    # -- between calls

    def settled(self, reach: Reach) -> Reliance:
        """Notes what everything that the traces used is now. Returns self."""
        holders: dict[int, tuple[str, Mapping[str, Any], dict[str, None]]] = {}

        def note(path: str, holder: Mapping[str, Any], identity: int, name: str) -> None:
            holders.setdefault(identity, (path, holder, {}))[2][name] = None

        # Functions that only answer a question (`"--debug" in sys.argv`) run around no operator.
        asked = {
            code: names for code, names in reach.code.items() if not is_library_code(code, names)
        }
        for code, names in (asked | self.code).items():
            for path, holder, name in _named(code, names, _kinds_read(code, names)):
                note(path, holder, id(holder), name)
        self._classes = list(
            dict.fromkeys(chain(_classes_of(reach), _classes_around(self.code), (torch.Tensor,)))
        )
        for kind in self._classes:
            for name in _function_names(kind):
                note(qualname_of(kind), dictionary_of(kind), id(kind), name)
        self._holders = [(path, holder, tuple(names)) for path, holder, names in holders.values()]
        self._places = [(identity, tuple(names)) for identity, (_, _, names) in holders.items()]
        self._getters = [(_getter(names), holder) for _, holder, names in self._holders]
        self._expected = [get(holder) for get, holder in self._getters]
        self._dictionaries = [behind_proxy(holder) for _, holder, _ in self._holders]
        self._versions = [-1] * len(self._dictionaries)
        self._tables = [dictionary_of(kind) for kind in self._classes]
        self._sizes = list(map(len, self._tables))
        self._names = list(map(_function_names, self._classes))
        self._objects = [*reach.modules, *reach.optimizers]
        self._kinds = [type(value) for _, value in self._objects]
        self._just_objects = [value for _, value in self._objects]
        self._enabled = {asked: asked[0].isEnabledFor(asked[1]) for asked in self.levels}
        self.code = {}
        return self

    def covers(self, other: Reliance) -> bool:
        """Whether this one compares everything that another one compares, with the same values. It
        may compare more: a first step runs more code.
        """
        values = self._values()
        return (
            all(values.get(place, MISSING) is value for place, value in other._values().items())
            and set(other._classes) <= set(self._classes)
            and list(map(id, self._just_objects)) == list(map(id, other._just_objects))
            and self._kinds == other._kinds
            and self._variables.items() >= other._variables.items()
            and self._enabled.items() >= other._enabled.items()
            and other._environment in (None, self._environment)
        )

    def _values(self) -> dict[tuple[int, str], Any]:
        """What was found under each name of each holder."""
        places = ((identity, name) for identity, names in self._places for name in names)
        return dict(zip(places, chain.from_iterable(self._expected), strict=True))

    def failure(self) -> Misfit | None:
        """None while all of it is the same, else what is not."""
        # What no change has moved since the last comparison holds the same under each name.
        versions = dict_versions(self._dictionaries)
        if versions != self._versions:
            moved = list(map(operator.ne, versions, self._versions))
            places = zip(self._getters, self._expected, strict=True)
            try:
                are_same = all(
                    all(map(operator.is_, get(holder), expected))
                    for (get, holder), expected in compress(places, moved)
                )
            except KeyError:
                are_same = False
            if not are_same:
                return self._replaced()
            self._versions = versions
        if list(map(len, self._tables)) != self._sizes:
            for kind, names in zip(self._classes, self._names, strict=True):
                if added := [name for name in _function_names(kind) if name not in names]:
                    return changed(f"{kind.__qualname__}.{added[0]}", "nothing", "a function")
            self._sizes = list(map(len, self._tables))
        if list(map(type, self._just_objects)) != self._kinds:
            for (path, value), kind in zip(self._objects, self._kinds, strict=True):
                if type(value) is not kind:
                    return changed(f"the class of {path}", show(kind), show(type(value)))
        for (logger, level), expected in self._enabled.items():
            if (now := logger.isEnabledFor(level)) is not expected:
                asked = f"whether the logger {logger.name} is enabled for level {level}"
                return changed(asked, show(expected), show(now))
        return self._environment_failure()

    def _replaced(self) -> Misfit:
        expected = chain.from_iterable(self._expected)
        for path, holder, names in self._holders:
            for name in names:
                before, now = next(expected), holder.get(name, MISSING)
                if now is not before:
                    return changed(f"{path}.{name}", show(before), show(now))
        return Misfit("functions of a library were replaced while they were compared")

    def _environment_failure(self) -> Misfit | None:
        data = os.environ._data  # type: ignore[attr-defined]
        if self._environment is not None and data != self._environment:
            return Misfit("the environment variables changed, and the step reads all of them")
        for name, expected in self._variables.items():
            if (now := data.get(name, MISSING)) != expected:
                return changed(
                    f"the environment variable {os.fsdecode(name)}", show(expected), show(now)
                )
        return None


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) == 1:
        (name,) = names
        return lambda holder: (holder[name],)
    return operator.itemgetter(*names)


def _kinds_read(code: types.CodeType, names: Names) -> tuple[type, ...]:
    """Of what code could take from its globals, and from modules among them, what is compared."""
    return _CODE if is_library_code(code, names) else (*_CODE, *_SETTINGS)


def _named(
    code: types.CodeType, names: Names, kinds: tuple[type, ...] = _CODE
) -> Iterator[tuple[str, Names, str]]:
    """(path, holder, name) of each function, class and module that code could take from its
    globals, and from modules among them; of modules of libraries, everything of these kinds.
    """
    found = [name for part in nested_code(code) for name in part.co_names]
    waiting, seen = [(str(names.get("__name__")), names, 0)], {id(names)}
    while waiting:
        path, holder, depth = waiting.pop()
        for name in found:
            value = holder.get(name, MISSING)
            of_library = depth > 0 and is_library(holder.get("__name__"))
            if not issubclass(type(value), kinds if of_library else _CODE):  # no proxy is asked
                continue
            yield path, holder, name
            if (
                issubclass(type(value), types.ModuleType)
                and depth < _SEARCHED
                and id(held := attributes_of(value)) not in seen
            ):
                seen.add(id(held))
                waiting.append((str(held.get("__name__")), held, depth + 1))


def _classes_of(reach: Reach) -> Iterator[type]:
    for _, value in chain(reach.modules, reach.optimizers):
        yield from type(value).__mro__[:-1]


def _classes_around(code: dict[types.CodeType, Names]) -> Iterator[type]:
    """The classes whose methods ran, where the code says (from Python 3.11 on)."""
    for one, names in code.items():
        value: Any = names
        for name in getattr(one, "co_qualname", "").split(".")[:-1]:
            value = (value if issubclass(type(value), dict) else vars(value)).get(name)
            if not issubclass(type(value), type) or issubclass(value, FakeTensor):
                break  # capture itself replaces methods of fake tensors
            yield value


def _function_names(kind: type) -> list[str]:
    return [
        name for name, value in dictionary_of(kind).items() if issubclass(type(value), _FUNCTIONS)
    ]
