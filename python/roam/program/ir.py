"""What capture records: a flat list of calls over numbered values.

A `Program` is to the runtime what the graph is to the planner: call `i` of the program is operator
`i` of the graph. Values live in numbered slots; a slot is a tensor (possibly a view) or a live
number. Nothing here runs anything.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from roam.distributed.collectives import is_collective, is_launch
from roam.errors import UNKNOWN_LINE
from roam.program.checks import DATA_CHECKS, DIVIDING, RAISING, SOUND, check_data
from roam.program.pages import Arrived, Fetch, Keep, Left, Put
from roam.program.replay import Replay, generator_state
from roam.program.tier import Load, Store
from roam.state.nests import leaves_of
from roam.state.wrappers import Form
from roam.torch_compat.private import BelowAutograd, FakeTensor, OpOverload, schema_of

if TYPE_CHECKING:
    from roam.program.effects import Effect

History = Literal["none", "leaf"] | tuple[Any, ...]
"""How autograd sees a tensor. ``"none"``: as a plain tensor, or one from before the step.
``"leaf"``: as a leaf that requires a gradient. A tuple: as made from tensors that require a
gradient; it has the references of those from before the step.
"""


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for the value of a slot inside a call's arguments or a program's results."""

    slot: int


TRANSFERS = Store, Load, Fetch, Put, Keep, Arrived, Left
"""Targets of calls that move tensors between memory and files, or wait for that."""
ref_to = functools.cache(Ref)
"""Returns the same `Ref` for a slot each time, so that equal calls are quick to recognize."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a call comes from: dotted module path, the user's file and line ('' and 0 if
    unknown).
    """

    module: str = ""
    file: str = ""
    line: int = 0
    is_tried: bool = False
    """Whether code of the user's or of a library, around the call, may handle its error."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else UNKNOWN_LINE
        return f"{place} in {self.module}" if self.module else place


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor value: what the first run is checked against."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage: int
    """Number of its storage in `Program.storages`."""
    is_conj: bool = False
    """Whether it stands for the conjugate of what lies there."""
    is_neg: bool = False
    """Whether it stands for the negative of what lies there."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A memory block: the planner's tensor. Size in bytes."""

    size_bytes: int
    creator: int
    """The call that makes it, or -1 if it exists before the step."""
    name: str
    is_begun_anew: bool = False
    """Whether it exists before the step, and the step's code overwrites all of it before it reads
    it and before its first check."""
    is_paged: bool = False
    """Whether it lies in a file, and takes no memory."""


@dataclass(slots=True)
class Call:
    """One call of one kernel, or of one Python operator on live numbers."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    """Slots of the results in order; None for a result that is one of the arguments, or nothing."""
    returns_sequence: bool
    phase: str
    source: Source
    mutates: tuple[int, ...] = ()
    """Slots of the arguments whose memory it changes."""
    random: bool = False
    skip_if: int | None = None
    """Slot of a live number: if it is not zero, a run leaves the call out."""
    is_check: bool = False
    """Whether all that it can do is to raise an error. Later calls that change what is there before
    the step wait for it.
    """
    state: int | None = None
    """Slot of the state in which its generator is when it draws random numbers; None if nobody
    has read it."""
    _known_refs: tuple[Any, Any, int | None, int | None, tuple[int, ...]] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    """The arguments, the state and the number that `refs` last looked at, and what it found."""
    _known_renamed: Call | None = field(default=None, init=False, repr=False, compare=False)
    """What `renamed` last made of it."""
    _known_adding: Call | None = field(default=None, init=False, repr=False, compare=False)
    """The same call, changed to add into its first argument."""
    _known_equal: Call | None = field(default=None, init=False, repr=False, compare=False)
    """Another call that it has been found to be equal to."""
    _known_placed: tuple[list[Any], Any] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    """What `placed_calls` last looked at, and what it found."""

    @property
    def function(self) -> Callable[..., Any]:
        """What to call. An operator of another library may have a kernel of its own for autograd.
        What that kernel does was recorded call by call, so a run skips it.
        """
        if isinstance(self.target, OpOverload) and self.target.namespace not in ("aten", "roam"):
            return _below_autograd(self.target)
        return self.target  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """`aten.add.Tensor` for a kernel, `torch.random.set_rng_state` for a function of PyTorch's,
        `roam.assign_data` and `roam.load` for those of roam's, `c10d.allreduce_` and `c10d.wait`
        for a collective, `float.truediv` for arithmetic on live numbers.
        """
        if isinstance(self.target, OpOverload):
            return _name_of(self.target)
        if isinstance(self.target, Replay):
            return _name_of(self.target.operator)
        if is_collective(self.target):
            return f"c10d.{self.target.__name__}"
        if isinstance(self.target, TRANSFERS):
            return f"roam.{type(self.target).__name__.lower()}"
        # Methods of built-in classes have no module.
        module = str(getattr(self.target, "__module__", ""))
        is_own = self.is_check or self.target in (assign_data, generator_state)
        package = "roam" if is_own else module if module.startswith("torch.") else "float"
        return f"{package}.{self.target.__name__}"

    @property
    def is_data_check(self) -> bool:
        """Whether it is a check of data that an operator of PyTorch's makes."""
        return self.is_check and (self.target is check_data or self.target in DATA_CHECKS)

    def refs(self) -> tuple[int, ...]:
        """Slots of all that the call needs: its arguments, nested ones included, its generator's
        state, and the number that may leave it out.
        """
        known = self._known_refs
        if (
            known is not None
            and known[0] is self.args
            and known[1] is self.kwargs
            and known[2] == self.state
            and known[3] == self.skip_if
        ):
            return known[4]
        found = refs((self.args, self.kwargs) if self.kwargs else self.args)
        found += [slot for slot in (self.state, self.skip_if) if slot is not None]
        self._known_refs = self.args, self.kwargs, self.state, self.skip_if, tuple(found)
        return self._known_refs[4]

    def made(self) -> list[int]:
        """Slots of its results."""
        return [slot for slot in self.outputs if slot is not None]

    def renamed(self, name: Callable[[int], int]) -> Call:
        """The same call on other slots. For the same slots it returns the same object each time,
        and itself for its own slots. So what is known of the calls of one program holds for the
        calls of another program that was rewritten in the same way.
        """
        used = self.refs()
        refs = tuple([name(slot) for slot in used])
        outputs = tuple([None if slot is None else name(slot) for slot in self.outputs])
        if refs == used and outputs == self.outputs:
            return self
        known = self._known_renamed
        if known is not None and known.refs() == refs and known.outputs == outputs:
            return known
        names = dict(zip(used, refs, strict=True))

        def new(ref: Ref) -> Ref:
            return ref_to(names[ref.slot])

        # `replace` takes several times as long.
        self._known_renamed = Call(
            self.target, substitute(self.args, new) if used else self.args,
            substitute(self.kwargs, new) if self.kwargs and used else self.kwargs, outputs, self.returns_sequence, self.phase,
            self.source, tuple([name(slot) for slot in self.mutates]), self.random,
            None if self.skip_if is None else name(self.skip_if), self.is_check,
            None if self.state is None else name(self.state),
        )  # fmt: skip
        return self._known_renamed

    def run(self, values: dict[int, Any]) -> Any:
        """Runs the call on the values of its slots and puts its results among them."""
        result = self.function(
            *substitute(self.args, lambda ref: values[ref.slot]),
            **substitute(self.kwargs, lambda ref: values[ref.slot]),
        )
        for slot, value in zip(
            self.outputs, result if self.returns_sequence else (result,), strict=True
        ):
            if slot is not None:
                values[slot] = value
        return result


def assign_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Gives a tensor other data, as in `p.data = x`: from then on it shares the memory of `data`.
    Its old memory stays alive if anything else holds it.
    """
    tensor.data = data


@dataclass(frozen=True, slots=True)
class ComputedGuard:
    """A computed guard: its outcome decides what the step does, and depends on values from before
    the step.

    Its slots are numbered as in the recording; it is run apart from the program, before it.
    """

    calls: list[Call]
    inputs: list[int]
    """Slots of the values that the guard looks at."""
    changed: frozenset[int]
    """Those of the inputs that its calls write to; only numbers are. A call gets a copy of each."""
    constants: list[tuple[torch.Tensor, int]]
    slot: int
    source: Source
    uses: list[tuple[Any, ...]]
    """For each use of the guard, the references of its inputs: updates of many parameters may have
    the same condition, each on a number of its own."""
    made_bytes: int = 0
    """The most that asking it allocates."""

    def ask(self, values: list[Any]) -> Any:
        """The answer for values of the inputs; None if one is fake or not there and nobody can
        say. Where this raises an error that the step's code catches, the answer that a program
        keeps is the error's class.
        """
        value = self.value(values)
        return value.item() if isinstance(value, torch.Tensor) else value

    def value(self, values: list[Any]) -> Any:
        """As `ask`, but an answer that is a tensor stays one."""
        if any(
            isinstance(value, FakeTensor) or not isinstance(value, (torch.Tensor, float, int))
            for value in values
        ):
            return None
        given = zip(self.inputs, values, strict=True)
        known = {slot: value.clone() if slot in self.changed else value for slot, value in given}
        known.update((slot, tensor.clone()) for tensor, slot in self.constants)
        with torch.no_grad():
            for call in self.calls:
                call.run(known)
        return known[self.slot]

    def has_other_answer(self, answer: Any, lookup: Callable[[Any], Any]) -> bool:
        """Whether any use gets another answer now; `lookup` gives a reference's value. Equal
        numbers are asked about once.
        """
        asked = set()
        for references in self.uses:
            values = [lookup(reference) for reference in references]
            key = tuple(_number(value) for value in values)
            if key not in asked and not self._is_answered(values, answer):
                return True
            asked.add(key)
        return False

    def _is_answered(self, values: list[Any], answer: Any) -> bool:
        try:
            now = self.ask(values)
        except Exception as error:  # noqa: BLE001 - values that the step's kernels do not take
            now = type(error)
        return is_same_answer(now, answer)


def is_same_answer(one: Any, other: Any) -> bool:
    """Whether two answers have the same type and the same bits."""
    return type(one) is type(other) and repr(one) == repr(other)


def _number(value: Any) -> object:
    """A key that is equal for values that no computed guard tells apart."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return (value.dtype, value.shape, repr(value.item())) if value.numel() == 1 else id(value)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A distributed tensor, or a wrapper, that a step leaves. It is the same object in all places
    where the step leaves the same tensor.

    Attributes:
        layout: its layout over devices, or its `Form`.
        reference: where it comes from, if it is from before the step.
    """

    layout: Any
    reference: Any = None


@dataclass(slots=True)
class Result:
    """What a step returns, and adds to lists of its state.

    Attributes:
        leaves: each a Ref or a plain constant.
        spec: the structure in which they are: of the pair of the step's result, and of what it has
            added to each list.
        histories: per leaf, how autograd sees it.
        joined: by the place of a leaf, the distributed tensor that it becomes.
        growing: (path, list) of lists of the step's state to which it adds.
    """

    leaves: list[Any] = field(default_factory=list)
    spec: Any = None
    histories: list[History] = field(default_factory=list)
    joined: dict[int, Joined] = field(default_factory=dict)
    growing: list[tuple[str, Any]] = field(default_factory=list)


E = TypeVar("E", bound="Effect")


@dataclass(slots=True)
class Program:
    """A captured step."""

    calls: list[Call] = field(default_factory=list)
    slots: list[TensorMeta | None] = field(default_factory=list)
    """Per slot: the tensor's meta, or None for a live number."""
    storages: list[Storage] = field(default_factory=list)
    referenced: list[tuple[Any, int]] = field(default_factory=list)
    """(reference, slot): values that are looked up at every call."""
    constants: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """(real tensor, slot): literal tensors of the user's code."""
    entering: set[int] = field(default_factory=set)
    """Storages from before the step that nothing else holds: they die at their last use."""
    result: Result = field(default_factory=Result)
    effects: list[Effect] = field(default_factory=list)
    """What the step leaves beside its result."""
    given_layouts: dict[str, Any] = field(default_factory=dict)
    """By the path of a reference, the layouts over devices of the distributed tensors of which the
    program has this process's parts, and the forms of the wrappers whose inner tensors it has."""
    wholes: list[tuple[Any, Form]] = field(default_factory=list)
    """(reference, form) of each of these wrappers."""
    absent: list[Any] = field(default_factory=list)
    """References that must hold nothing before the step, since this program makes what they hold.
    Another variant of the step is for calls that find something there.
    """
    lacking: set[str] = field(default_factory=set)
    """Paths of gradients to which the program only adds, so that it does not matter whether an
    earlier plan has freed them."""
    plain_before: list[tuple[Any, Any]] = field(default_factory=list)
    """(reference, value): what an optimizer's state must hold before the step, apart from
    tensors.
    """
    state_keys: list[Any] = field(default_factory=list)
    """For each optimizer, the `StateKeys` of its state before the step."""
    decisions: list[tuple[Any, Callable[..., bool], tuple[float, ...], bool]] = field(
        default_factory=list
    )
    """(reference, comparison, constants, answer): what the step's code asked of live numbers."""
    computed_guards: list[tuple[ComputedGuard, Any]] = field(default_factory=list)
    """(guard, its answer at capture)."""
    reduced: list[Any] = field(default_factory=list)
    """`DistributedDataParallel` modules whose gradients the program reduces in buckets of its
    own."""
    split: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each multi-tensor or fused kernel: how many calls of it the step makes, and how many
    calls these became.
    """
    guessed: list[str] = field(default_factory=list)
    """Kernels whose results' layout in memory is known only from fake kernels. Real kernels may lay
    them out otherwise.
    """
    unsettled: Exception | None = None
    """Why the step after this one can be captured only when this one has run: it finds what only a
    run can tell."""

    def of(self, kind: type[E]) -> list[E]:
        """The effects of a class, in their order."""
        return [effect for effect in self.effects if type(effect) is kind]

    def may_raise(self, call: Call) -> bool:
        """Whether a call is one of a kernel that raises an error for some data."""
        if not isinstance(call.target, OpOverload):
            return False
        name = _schema_name(call.target)
        if name in DIVIDING:
            return self._divides_integers(call)
        return name in RAISING and not _is_sound(call, name)

    def _divides_integers(self, call: Call) -> bool:
        """Whether a division is one of integers, by what is in a tensor."""
        (made,) = call.outputs
        meta = self.slots[call.args[0].slot if made is None else made]
        is_exact = meta is not None and not (meta.dtype.is_floating_point or meta.dtype.is_complex)
        return is_exact and isinstance(call.args[1], Ref)

    def launches(self) -> list[Call]:
        """The calls that launch collectives."""
        return [call for call in self.calls if is_launch(call.target)]

    def persists(self, storage: int) -> bool:
        """Whether a storage exists before the step and after it."""
        return self.storages[storage].creator < 0 and storage not in self.entering

    def users(self) -> dict[int, list[int]]:
        """For each storage, the numbers of the calls that use or make it."""
        users: dict[int, list[int]] = {}
        for index, call in enumerate(self.calls):
            for number in {self.storage_of(slot) for slot in (*call.refs(), *call.made())}:
                users.setdefault(number, []).append(index)
        return users

    def storage_of(self, slot: int) -> int:
        """Number of the storage that a slot's tensor is in; -1 for a live number."""
        meta = self.slots[slot]
        return -1 if meta is None else meta.storage

    def written(self, calls: Iterable[Call] | None = None) -> set[int]:
        """The storages that these calls write to; by default, all calls."""
        return {
            self.storage_of(slot)
            for call in (self.calls if calls is None else calls)
            for slot in call.mutates
        }

    def outgoing(self) -> set[int]:
        """Slots whose values outlive the step: those of results and effects, and data that is
        assigned to tensors.
        """
        outgoing = set(refs(self.result.leaves))
        for effect in self.effects:
            outgoing.update(refs(effect.given))
        outgoing.update(data for _, data in self.assigned())
        return outgoing

    def assigned(self) -> list[tuple[int, int]]:
        """(slot of a tensor from before the step, slot of its data afterwards), if that is other
        memory or another view.
        """
        return [
            (call.args[0].slot, call.args[1].slot)
            for call in self.calls
            if call.target is assign_data
        ]

    def leaving(self) -> set[int]:
        """Storages that the step makes and that outlive it."""
        made = {self.storage_of(slot) for slot in self.outgoing()}
        return {number for number in made if number >= 0 and self.storages[number].creator >= 0}

    def covers(self, slot: int) -> bool:
        """Whether a tensor fills its whole storage, each byte once, in some order of its
        dimensions.
        """
        meta = self.slots[slot]
        if meta is None:
            return False
        size_bytes = math.prod(meta.shape) * meta.dtype.itemsize
        is_whole = meta.offset == 0 and size_bytes == self.storages[meta.storage].size_bytes
        return is_whole and has_no_gaps(meta.shape, meta.stride)


@functools.cache
def _name_of(operator: OpOverload) -> str:
    return str(operator)


def _is_sound(call: Call, name: str) -> bool:
    """Whether a constant of a call that draws numbers says that it raises no error."""
    argument, least, most = SOUND.get(name.removeprefix("aten::").removesuffix("_"), ("", 0, 0))
    for place, declared in enumerate(schema_of(call.target).arguments):
        if declared.name == argument:
            known = call.args[place] if place < len(call.args) else declared.default_value
            value = call.kwargs.get(argument, known)
            return isinstance(value, float | int) and least <= value <= most
    return False


@functools.cache
def _schema_name(operator: OpOverload) -> str:
    return str(schema_of(operator).name)


@functools.cache
def _below_autograd(operator: OpOverload) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with BelowAutograd():
            return operator(*args, **kwargs)

    return run


def extents(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions that have more or less than one element."""
    return [(stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1]


def is_dense(extents: Iterable[tuple[int, int]]) -> bool:
    """Whether (stride, size), innermost first, leave no gap."""
    expected = 1
    for stride, size in extents:
        if stride != expected:
            return False
        expected *= size
    return True


def has_no_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie without gap or overlap, in some order of the dimensions."""
    return is_dense(sorted(extents(shape, strides)))


def refs(value: Any) -> list[int]:
    """Slots of every `Ref` in a nest of tuples, lists and dicts."""
    return [leaf.slot for leaf in leaves_of(value) if type(leaf) is Ref]


_HOLDERS = frozenset({Ref, dict, tuple, list})


def substitute(value: Any, function: Callable[[Ref], Any]) -> Any:
    """The nest with every `Ref` replaced."""
    kind = type(value)
    if kind is Ref:
        return function(value)
    if kind is tuple or kind is list:
        return kind(
            [substitute(item, function) if type(item) in _HOLDERS else item for item in value]
        )
    if kind is dict:
        return {key: substitute(item, function) for key, item in value.items()}
    return value
