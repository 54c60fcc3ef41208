"""Functions of users that schedulers call, as `LambdaLR` does: a run calls them when the step has
ended, so they must not read what the step changes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

import torch

from roam.program.effects import Assemble, Overwrite, Rebind, SetPlain
from roam.program.ir import Program
from roam.state.equality import attributes_of
from roam.state.library_code import nested_code
from roam.state.references import AttributeReference, EntryReference, PlaceReference
from roam.tracing.compiled.frames import contents_of
from roam.tracing.source_location import is_user_code
from roam.tracing.stand_ins.fake_state import FakeState

_ALL: Final = frozenset(
    {"__dict__", "eval", "exec", "getattr", "globals", "locals", "vars", "state_dict"}
)
"""Names by which code may read whatever it reaches."""
_TENSORS: Final = frozenset({"parameters", "named_parameters", "buffers", "named_buffers"})
"""Names by which code may read all tensors of a module."""
_MOST_FUNCTIONS: Final = 1_000


def changed_for(scheduler: Any, fake_state: FakeState, program: Program) -> str | None:
    """The path of something that the step changes, and that functions of a scheduler may read, by
    the names in their code; None if there is nothing.
    """
    names = _names_in(list(_codes_of(scheduler)), fake_state)
    if not names:
        return None

    def may_read(path: str) -> bool:
        named = re.sub(r"\[.*?\]", "", path).partition(" of ")[0].rpartition(".")[2]
        words = re.findall(r"\w+", named) + re.findall(r"\w+", path)[-1:]
        return not _ALL.isdisjoint(names) or not names.isdisjoint(words)

    changed = [
        one.reference.path
        for one in program.effects
        if isinstance(one, (Assemble, Overwrite, Rebind, SetPlain))
        and isinstance(one.reference, (AttributeReference, EntryReference, PlaceReference))
    ]
    changed += [path for path, _ in program.result.growing]
    written = program.written()
    reads_tensors = not _TENSORS.isdisjoint(names)
    for reference, slot in program.referenced:
        if isinstance(reference, PlaceReference) and program.storage_of(slot) in written:
            if reads_tensors:
                return reference.path
            changed.append(reference.path)
    return next(filter(may_read, changed), None)


def _codes_of(scheduler: Any) -> Iterator[CodeType]:
    """The code of the users' functions that a scheduler, or one within it, holds or consists of."""
    waiting, met = [scheduler], dict[int, Any]()
    while waiting and len(met) < _MOST_FUNCTIONS:
        value = waiting.pop()
        if id(value) in met:
            continue
        met[id(value)] = value
        if isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif type(value) is MethodType:
            waiting.append(value.__func__)
        elif type(value) is FunctionType:
            if is_user_code(value.__code__):
                yield value.__code__
                waiting += map(contents_of, value.__closure__ or ())
                waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        elif type(value) in (list, tuple):
            waiting += value
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            waiting += [*attributes_of(value).values(), *_methods_of(type(value))]
        elif callable(value) and not isinstance(value, (type, torch.nn.Module)):
            waiting += _methods_of(type(value))


def _methods_of(kind: type) -> list[Any]:
    found = [value for base in kind.__mro__ for value in vars(base).values()]
    functions = [value.fget if isinstance(value, property) else value for value in found]
    return [value for value in functions if type(value) is FunctionType]


def _names_in(codes: list[CodeType], fake_state: FakeState) -> frozenset[str]:
    """The names in code, and in that of the users' functions that it may call by them."""
    names, waiting, met = set[str](), list(codes), set[CodeType]()
    others = [code for code in fake_state.reach.code if is_user_code(code)]
    while waiting:
        for code in nested_code(waiting.pop()):
            met.add(code)
            texts = (constant for constant in code.co_consts if type(constant) is str)
            names.update(code.co_names, code.co_freevars, texts)
        if not waiting:
            waiting += [
                one for one in others if one not in met and one.co_name in {*names, "<lambda>"}
            ]
    return frozenset(names)
