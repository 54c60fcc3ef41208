"""Effects: what a step leaves behind beside its result, one record each.

Capture records effects in `Program.effects` (`tracing/endings.py`); passes rename their
slots, comparisons of traces look at their keys, and a run applies them, each by a loop over the
list. To add an effect, write its class here and record it there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from roam.program.ir import History, Joined, Program, Ref
from roam.state.equality import MISSING, show
from roam.state.freed_gradients import lacks, note_freed, note_reset
from roam.state.nests import copied
from roam.state.references import ArgumentReference, GradientReference, OptimizerReference
from roam.torch_compat.private import set_step_called


@dataclass(slots=True)
class Ending:
    """The end of a run.

    Attributes:
        leaves: the call's flattened arguments.
        with_history: gives a value of the run the history that autograd sees.
        joined: gives the distributed tensor of which a value is this process's part, or the wrapper
            of which values are the inner tensors.
        skipped: identities of the optimizers of which every step was left out.
    """

    leaves: list[Any]
    with_history: Callable[[Any, History], Any]
    joined: Callable[[Any, Joined], Any]
    skipped: set[int]


class Effect(ABC):
    """One thing that a step leaves behind."""

    __slots__ = ()
    what: ClassVar[str]
    """What messages call effects of the class."""
    stage: ClassVar[int]
    """A run applies those of a lower stage first."""
    is_by_calls: ClassVar[bool] = True
    """Whether a run that fails in the middle leaves no more of it than the calls before have
    left."""

    @abstractmethod
    def key(self) -> Any:
        """Equal for two traces of one step that leave the same, whatever values they give."""

    def unlike(self, other: Any) -> str:
        """How an effect of the same class in another trace differs, for the user to read."""
        return f"the {self.what} differ"

    @property
    def given(self) -> Any:
        """A nest with a `Ref` for each value that comes from the program's calls."""
        return ()

    def giving(self, given: Any) -> Effect:
        """The same effect with other slots in `given`."""
        return self

    def look_up(self, leaves: list[Any]) -> Any:
        """What a run has to find before it begins, for `apply`.

        Raises:
            ExecutionError: it finds what this effect cannot be applied to.
        """
        return None

    @abstractmethod
    def apply(self, ending: Ending, given: Any, found: Any) -> None:
        """Leaves it after a run; `given` has the values that the run made."""


@dataclass(frozen=True, slots=True, eq=False)
class _AtPlace(Effect):
    """An effect on what a reference leads to, of which there is nothing else to compare."""

    reference: Any

    def key(self) -> Any:
        return self.reference.path


@dataclass(frozen=True, slots=True, eq=False)
class Skip(Effect):
    """An optimizer whose calls have a number as `Call.skip_if`: where it is not zero they are left
    out, and the optimizer's state stays as it was.
    """

    what = "steps that may be left out"
    stage = 0
    optimizer: Any
    slot: int

    def key(self) -> Any:
        return id(self.optimizer)

    @property
    def given(self) -> Any:
        return Ref(self.slot)

    def giving(self, given: Any) -> Skip:
        return replace(self, slot=given.slot)

    def apply(self, ending: Ending, given: Any, found: Any) -> None:
        """Nothing: what other effects leave depends on it (`Ending.skipped`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Drop(_AtPlace):
    """A gradient from before the step that is gone after it. Where the plan `frees` it, eager
    PyTorch has one there.
    """

    what = "gradients that are dropped"
    stage = 1
    frees: bool = False

    def apply(self, ending: Ending, given: Any, found: Any) -> None:
        _set(self.reference, None, ending)
        if isinstance(self.reference, GradientReference):
            self.note()

    def note(self) -> None:
        """Notes, once it is gone, whether eager PyTorch has one."""
        (note_freed if self.frees else note_reset)(self.reference.parameter.get())


@dataclass(frozen=True, slots=True, eq=False)
class SetPlain(Effect):
    """What an optimizer's state, rates and overwritten attributes are after the step, where that is
    neither tensor nor live number; or a nest with None in the places of tensors and live numbers,
    which are rebound.
    """

    what = "plain values left behind"
    stage = 2
    is_by_calls = False
    reference: Any
    value: Any

    def key(self) -> Any:
        return self.reference.path, self.value

    def unlike(self, other: SetPlain) -> str:
        path = self.reference.path
        if path != other.reference.path:
            return "they left plain values in different places"
        return f"they left {show(self.value)} and {show(other.value)} at {path}"

    def apply(self, ending: Ending, given: Any, found: Any) -> None:
        self.reference.set(copied(self.value))


@dataclass(frozen=True, slots=True, eq=False)
class Rebind(Effect):
    """A place that holds another tensor or live number after the step than before.

    Attributes:
        history: how autograd sees the tensor.
        joined: the distributed tensor of which the value is this process's part.
    """

    what = "state left behind"
    stage = 3
    reference: Any
    slot: int
    history: History = "none"
    joined: Joined | None = None

    def key(self) -> Any:
        history = self.history
        if not isinstance(history, str):
            history = tuple(reference.path for reference in history)
        return self.reference.path, history

    @property
    def given(self) -> Any:
        return Ref(self.slot)

    def giving(self, given: Any) -> Rebind:
        return replace(self, slot=given.slot)

    def apply(self, ending: Ending, given: Any, found: Any) -> None:
        reference = self.reference
        if isinstance(reference, OptimizerReference) and id(reference.optimizer) in ending.skipped:
            return
        if self.joined is not None:
            given = ending.joined(given, self.joined)
        if self.history != "none":
            given = ending.with_history(given, self.history)
        lacking = isinstance(reference, GradientReference) and lacks(reference.parameter.get())
        _set(reference, given, ending)
        if lacking:  # it was added to what has been freed
            note_freed(reference.parameter.get())


@dataclass(frozen=True, slots=True, eq=False)
class Assemble(Effect):
    """A place that holds another wrapper after the step than before, made of inner tensors."""

    what = "wrappers left behind"
    stage = 3
    reference: Any
    slots: tuple[int, ...]
    joined: Joined | None

    def key(self) -> Any:
        return self.reference.path, len(self.slots)

    @property
    def given(self) -> Any:
        return tuple(map(Ref, self.slots))

    def giving(self, given: Any) -> Assemble:
        return replace(self, slots=tuple(ref.slot for ref in given))

    def apply(self, ending: Ending, given: Any, found: Any) -> None:
        assert self.joined is not None, "a trace has found its form"
        if id(getattr(self.reference, "optimizer", None)) not in ending.skipped:
            _set(self.reference, ending.joined(given, self.joined), ending)


@dataclass(frozen=True, slots=True, eq=False)
class PutLast(_AtPlace):
    """A place of optimizers' state, in the state's own order after the step."""

    what = "orders of optimizers' state"
    stage = 4

    def apply(self, ending: Ending, given: Any, found: Any) -> None:
        self.reference.put_last()


@dataclass(frozen=True, slots=True, eq=False)
class Overwrite(_AtPlace):
    """An attribute that the step sets before it looks at it. One that is new is its object's last,
    after those before it in the list.
    """

    what = "attributes that are set"
    stage = 4

    def look_up(self, leaves: list[Any]) -> Any:
        return self.reference.get() is MISSING

    def apply(self, ending: Ending, given: Any, found: Any) -> None:
        if found:
            self.reference.put_last()


@dataclass(frozen=True, slots=True, eq=False)
class FillState(Effect):
    """Which parameters have state in an optimizer after the step, in its own order, if that of some
    is empty: they have been asked for it.
    """

    what = "empty state of optimizers"
    stage = 5
    optimizer: Any
    parameters: list[Any]

    def key(self) -> Any:
        return id(self.optimizer), [place.path for place in self.parameters]

    def apply(self, ending: Ending, given: Any, found: Any) -> None:
        if id(self.optimizer) in ending.skipped:
            return
        state, parameters = self.optimizer.state, [place.get() for place in self.parameters]
        if not all(parameter in state for parameter in parameters):
            for parameter in parameters:
                state[parameter] = state.pop(parameter, {})


@dataclass(frozen=True, slots=True, eq=False)
class MarkStepped(Effect):
    """An optimizer whose `step` the user's step calls, which is what a scheduler looks for."""

    what = "optimizers' steps"
    stage = 6
    optimizer: Any

    def key(self) -> Any:
        return id(self.optimizer)

    def apply(self, ending: Ending, given: Any, found: Any) -> None:
        if id(self.optimizer) not in ending.skipped:
            set_step_called(self.optimizer, True)


@dataclass(frozen=True, slots=True, eq=False)
class SetFlag(Effect):
    """A tensor from before the step whose `requires_grad` it changes, and the new value."""

    what = "changes of requires_grad"
    stage = 8
    is_by_calls = False
    reference: Any
    flag: bool

    def key(self) -> Any:
        return self.reference.path, self.flag

    def look_up(self, leaves: list[Any]) -> Any:
        return held(self.reference, leaves)

    def apply(self, ending: Ending, given: Any, found: Any) -> None:
        found.requires_grad_(self.flag)


@dataclass(frozen=True, slots=True, eq=False)
class SetSync(Effect):
    """Whether the last forward pass of a `DistributedDataParallel` in the step synchronizes: the
    module has to know it afterwards.
    """

    what = "synchronizing modules"
    stage = 10
    is_by_calls = False
    module: Any
    is_synced: bool

    def key(self) -> Any:
        return id(self.module), self.is_synced

    def apply(self, ending: Ending, given: Any, found: Any) -> None:
        self.module.require_forward_param_sync = self.is_synced


@dataclass(frozen=True, slots=True, eq=False)
class StepScheduler(Effect):
    """A scheduler's `step`, which is called once all else is left; `number`: how many before."""

    what = "schedulers' steps"
    stage = 11
    scheduler: Any
    number: int

    def key(self) -> Any:
        return id(self.scheduler), self.number

    def apply(self, ending: Ending, given: Any, found: Any) -> None:
        self.scheduler.step()


def rebound(program: Program) -> list[tuple[Any, int]]:
    """(reference, slot) for each place that holds another tensor or live number after the step."""
    return [(one.reference, one.slot) for one in program.of(Rebind)]


def held(reference: Any, leaves: list[Any]) -> Any:
    """What a reference holds at a call with these flattened arguments."""
    return reference.find(leaves) if isinstance(reference, ArgumentReference) else reference.get()


def _set(reference: Any, value: Any, ending: Ending) -> None:
    if isinstance(reference, ArgumentReference):
        reference.put(ending.leaves, value)
    else:
        reference.set(value)
