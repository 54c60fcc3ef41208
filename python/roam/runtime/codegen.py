"""Writes a plan as one flat Python function: a line or two per call, nothing looked up or
interpreted in between.

Values outside the pool are local variables, which are set to None after the call at which their
memory dies. A tensor in the pool is a view that is made once and is a named constant of the text,
so views of it need no call. Sizes are named constants too. So plans for other shapes with the same
order have the same text, which is compiled once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, NoReturn, Protocol
from weakref import WeakValueDictionary

import torch

from roam._core import Plan
from roam.program.barrier import is_barrier
from roam.program.ir import Ref, substitute
from roam.program.operators import on_list
from roam.runtime.bindings import POISON, Bindings, Outgoing
from roam.runtime.first_run import lies
from roam.runtime.streams import Streams
from roam.state.sizes import Size, expressions_in
from roam.torch_compat.private import OpOverload, c_function

Run = Callable[[list[Any]], Outgoing]


class Watcher(Protocol):
    """Is told of every call of a run."""

    def slots(self, index: int) -> list[int]:
        """Which values of a call it wants to see."""

    def note(self, index: int, values: Iterable[torch.Tensor]) -> None:
        """Is called as soon as the call has run, with these values."""


class GeneratedSource:
    """A plan as Python.

    Attributes:
        source: the function's text.
        steps: for each line of the text, counted from 1, the step that it belongs to, or -1.
        run: the function. It takes a list of inputs, which it empties, and returns what
            `Bindings.outgoing` says, with None for what was left out.
        code: the function's code, as tracebacks name it.
    """

    def __init__(
        self,
        bindings: Bindings,
        plan: Plan,
        streams: Streams | None,
        watcher: Watcher | None = None,
        *,
        checks: Callable[[int], NoReturn] | None = None,
    ) -> None:
        """Writes the text.

        Args:
            checks: is called with the number of a call whose result does not lie as the program
                says; of those results alone whose sizes follow from symbols. None: nothing is
                checked.
        """
        self._bindings = bindings
        self._watcher = watcher
        self._checks = checks
        self._streams = streams
        self._stream_of = [int(stream) for stream in plan.streams]
        self._recorded: dict[int, list[int]] = {}
        self._awaited: dict[int, list[int]] = {}
        for event, (before, after) in enumerate(plan.syncs):
            self._recorded.setdefault(before, []).append(event)
            self._awaited.setdefault(after, []).append(event)
        self._steps = {index: step for step, index in enumerate(bindings.order)}
        self._names = _Names()
        numbered = list(self._numbered())
        self.source = "\n".join(line for _, line in numbered)
        self.steps = [-1, *(step for step, _ in numbered)]
        self._module = _compiled.get(self.source) or compile(self.source, "<roam plan>", "exec")
        _compiled[self.source] = self._module
        exec(self._module, self._names.values)
        self.run: Run = self._names.values["run"]
        self.code: CodeType = self._names.values["run"].__code__

    def symbolic(self) -> dict[str, Any]:
        """The constants that hold numbers which follow from symbols, by their names."""
        return {
            name: value for name, value in self._names.values.items() if any(expressions_in(value))
        }

    def name_of(self, value: Any) -> str | None:
        """The name of a constant; None if it is none."""
        return self._names.name_of(id(value))

    def with_constants(self, others: Mapping[str, Any]) -> Run:
        """The function with other constants in the places of those of these names."""
        return FunctionType(self.code, {**self._names.values, **others})

    def _numbered(self) -> Iterator[tuple[int, str]]:
        """All lines, each with its step."""
        bindings, names = self._bindings, self._names
        inputs = "".join(f"v{slot}, " for slot in bindings.input_slots())
        yield -1, "def run(inputs):"
        yield -1, f"    ({inputs}) = inputs" if inputs else "    pass"
        yield -1, "    inputs.clear()"
        if bindings.poison:
            yield -1, f"    {names.constant(bindings.range(None))}.fill_({POISON})"
        if missing := bindings.perhaps_missing():
            yield -1, f"    {' = '.join(f'v{slot}' for slot in missing)} = None"
        for step, index in enumerate(bindings.order):
            for lines in (
                self._before(step, index),
                self._perhaps(index),
                self._after(index),
                self._forget(step, index),
            ):
                for line in lines:
                    yield step, f"    {line}"
        for line in self._keep_results():
            yield -1, f"    {line}"
        outgoing = ", ".join(map(names.show, bindings.outgoing(self._name)))
        yield -1, f"    return ({outgoing})"

    def _keep_results(self) -> Iterator[str]:
        """Tells the allocator that the caller's stream uses what other streams have made for it."""
        program = self._bindings.program
        for slot in sorted(program.outgoing()) if self._streams is not None else ():
            storage = program.storage_of(slot)
            creator = program.storages[storage].creator if storage >= 0 else -1
            if creator >= 0 and self._stream_of[creator] != 0:
                yield f"{self._names.constant(self._streams)}.keep(v{slot}, 0)"

    def _name(self, ref: Ref) -> Any:
        """What stands for a slot's value in the text: the view of the pool itself, or a local
        variable.
        """
        view = self._bindings.views.get(ref.slot)
        return _Name(f"v{ref.slot}") if view is None else view

    def _perhaps(self, index: int) -> Iterator[str]:
        """One call. It is skipped if a number of the step leaves it out."""
        skip_if, lines = (
            self._bindings.program.calls[index].skip_if,
            [*self._call(index), *self._watch(index), *self._check(index)],
        )
        if skip_if is None:
            yield from lines
        elif lines:
            yield f"if not v{skip_if}:"
            yield from (f"    {line}" for line in lines)

    def _watch(self, index: int) -> Iterator[str]:
        """Tells the watcher what a call made."""
        if self._watcher is not None:
            made = self._names.show([self._name(Ref(slot)) for slot in self._watcher.slots(index)])
            yield f"{self._names.constant(self._watcher)}.note({index}, {made})"

    def _check(self, index: int) -> Iterator[str]:
        """Compares how results lie with what the program says."""
        if self._checks is None:
            return
        bindings, way = self._bindings, self._bindings.way(index)
        call, differs = bindings.program.calls[index], self._names.constant(self._checks)
        alike = self._names.constant(lies)
        for slot in call.outputs:
            meta = None if slot is None else bindings.program.slots[slot]
            if meta is None or not any(expressions_in((meta.shape, meta.stride))):
                continue
            view, shape = bindings.views.get(slot), self._names.argument(meta.shape)  # type: ignore[arg-type]
            if way == "view":
                if call.target is torch.ops.aten.as_strided.default or call.returns_sequence:
                    continue  # its arguments say how it lies
                args, kwargs = (substitute(item, self._name) for item in (call.args, call.kwargs))
                place = self._names.constant(view)
                yield f"t = {self._line(call.function, args, kwargs)}"
                yield (
                    f"t.shape == {shape} and (t.stride() == {place}.stride() or {alike}(t, {place}.stride())) and "
                    f"t.data_ptr() == {place}.data_ptr() or t.numel() == 0 or {differs}({index})"
                )
            elif view is not None:
                if way == "write":
                    yield f"{self._names.constant(view)}.shape == {shape} or {differs}({index})"
            else:
                stride = self._names.argument(meta.stride)
                yield (
                    f"v{slot}.shape == {shape} and (v{slot}.stride() == {stride} or {alike}(v{slot}, {stride})) or "
                    f"{differs}({index})"
                )

    def _call(self, index: int) -> Iterator[str]:
        """One call."""
        call, way = self._bindings.program.calls[index], self._bindings.way(index)
        if way == "view":
            return
        if is_barrier(call.target):
            views = self._bindings.views
            gets = [f"v{ref.slot}" if ref.slot not in views else "_" for ref in call.args]
            gets += [f"v{slot}" for slot in call.outputs]
            given = self._names.show([self._name(ref) for ref in call.args])
            yield f"gets = yield {given}"
            if gets:
                yield f"({''.join(f'{name}, ' for name in gets)}) = gets"
            yield "gets.clear()"  # so that what dies in the calls to come is freed
            return
        function: Any = call.function
        args, kwargs = (substitute(item, self._name) for item in (call.args, call.kwargs))
        if way == "write":
            for slot in call.outputs:
                assert slot is not None, "a placed call returns tensors"
                if slot not in self._bindings.views:
                    yield self._line_for_result(index, slot)
            outs = [self._name(Ref(slot)) for slot in call.outputs if slot is not None]
            function, args, kwargs = self._bindings.placement(index).call(args, kwargs, outs)
            yield self._line(function, args, kwargs)
            return
        run = None if self._streams is not None else on_list(call.target)
        if run is None:
            line = self._line(function, args, kwargs)
        else:
            # What dies here is freed inside, as soon as it has been used.
            yield f"args = [{', '.join(map(self._names.argument, args))}]"
            if dying := self._dying_arguments(index):
                yield f"{' = '.join(dying)} = None"
            line = f"{self._names.constant(run)}(args)"
        copied = (
            [slot for slot in call.outputs if slot in self._bindings.views]
            if way == "copy_in"
            else []
        )
        if any(slot is not None for slot in call.outputs):
            is_kept = [
                slot is not None and (slot in copied or slot not in self._bindings.views)
                for slot in call.outputs
            ]
            targets = ", ".join(
                f"v{slot}" if kept else "_"
                for slot, kept in zip(call.outputs, is_kept, strict=True)
            )
            line = f"({targets},) = {line}" if call.returns_sequence else f"{targets} = {line}"
        yield line
        for slot in copied:
            if self._checks is not None:
                place = self._names.constant(self._bindings.views[slot])
                yield f"v{slot}.shape == {place}.shape or {self._names.constant(self._checks)}({index})"
            yield f"{self._names.constant(self._bindings.views[slot])}.copy_(v{slot}); v{slot} = None"

    def _dying_arguments(self, index: int) -> list[str]:
        """Variables of what dies at a call and was there before it."""
        bindings = self._bindings
        made = set(bindings.made(index))
        return [
            f"v{slot}"
            for storage, slots in bindings.dying[self._steps[index]].items()
            if storage not in bindings.offsets and storage not in made
            for slot in slots
            if slot not in bindings.program.calls[index].outputs
        ]

    def _line_for_result(self, index: int, slot: int) -> str:
        """Memory from the allocator for a written result: an argument's that dies, or new."""
        old = self._bindings.donor(index, slot)
        if old is not None:
            return f"v{slot} = v{old}"
        meta = self._bindings.program.slots[slot]
        assert meta is not None, "a tensor"
        kwargs = {"dtype": meta.dtype, "device": meta.device}
        return f"v{slot} = {self._line(torch.empty_strided, (meta.shape, meta.stride), kwargs)}"

    def _before(self, step: int, index: int) -> Iterator[str]:
        """Goes to a call's stream and has it wait for what the plan says."""
        if self._streams is None:
            return
        if self._stream_of[index] != (
            self._stream_of[self._bindings.order[step - 1]] if step else 0
        ):
            yield f"{self._names.constant(self._streams)}.switch({self._stream_of[index]})"
        for event in self._awaited.get(index, ()):
            yield f"{self._names.constant(self._streams)}.wait({event})"

    def _after(self, index: int) -> Iterator[str]:
        """Lets other streams know that a call is done, and the allocator which streams use its
        memory.
        """
        if self._streams is None:
            return
        for event in self._recorded.get(index, ()):
            yield f"{self._names.constant(self._streams)}.record({event})"
        for slot in dict.fromkeys(self._bindings.program.calls[index].refs()):
            storage = self._bindings.program.storage_of(slot)
            if (
                storage < 0
                or storage in self._bindings.offsets
                or self._bindings.program.storages[storage].creator < 0
            ):
                continue
            if (
                self._stream_of[self._bindings.program.storages[storage].creator]
                != self._stream_of[index]
            ):
                yield f"{self._names.constant(self._streams)}.keep(v{slot}, {self._stream_of[index]})"

    def _forget(self, step: int, index: int) -> Iterator[str]:
        """Lets go of what dies at a step."""
        dying = self._bindings.dying[step]
        variables = [
            f"v{slot}"
            for storage, slots in dying.items()
            if storage not in self._bindings.offsets
            for slot in slots
        ]
        if variables:
            yield f"{' = '.join(variables)} = None"
        for storage in dying:
            if storage in self._bindings.offsets and self._bindings.is_poisoned(storage, index):
                yield f"{self._names.constant(self._bindings.range(storage))}.fill_({POISON})"

    def _line(self, function: Any, args: Any, kwargs: Any) -> str:
        if isinstance(function, OpOverload):
            function = c_function(function)
        shown = [self._names.argument(arg) for arg in args] + [
            f"{key}={self._names.argument(arg)}" for key, arg in kwargs.items()
        ]
        return f"{self._names.constant(function)}({', '.join(shown)})"


_compiled: WeakValueDictionary[str, CodeType] = WeakValueDictionary()
"""By its text, the code of plans that are kept."""
_SMALL = 5
"""A whole number below it counts dimensions, as a rule, and is no size."""
_WHOLE = (int, Size)


class _Name(str):
    """A variable's name among the arguments to show."""

    __slots__ = ()


class _Names:
    """Globals of the compiled text: kernels and constants that have no exact literal."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._known: dict[Any, str] = {}
        self._sizes = 0

    def constant(self, value: Any) -> str:
        key = value if type(value) is torch.device else id(value)
        name = self._known.get(key)
        if name is None:
            name = self._known[key] = f"c{len(self._known)}"
            self.values[name] = value
        return name

    def name_of(self, key: int) -> str | None:
        """The name of the constant with this identity; None if there is none."""
        return self._known.get(key)

    def argument(self, value: Any) -> str:
        """What stands for an argument of a kernel: sizes by a name of their own, whatever they
        are.
        """
        is_size = (type(value) is int and abs(value) >= _SMALL) or (
            type(value) in (list, tuple) and value and all(type(item) in _WHOLE for item in value)
        )
        if not is_size:
            return self.show(value)
        self._sizes += 1
        self.values[f"s{self._sizes}"] = value
        return f"s{self._sizes}"

    def show(self, value: Any) -> str:
        if type(value) is _Name:
            return value
        if (
            value is None
            or type(value) in (bool, int, str)
            or (type(value) is float and math.isfinite(value))
        ):
            return repr(value)
        if type(value) is list:
            return f"[{', '.join(map(self.show, value))}]"
        if type(value) is tuple:
            return f"({''.join(f'{self.show(item)}, ' for item in value)})"
        if type(value) is dict:
            return f"{{{', '.join(f'{key!r}: {self.show(item)}' for key, item in value.items())}}}"
        return self.constant(value)
