"""What a step leaves: its result, and what the places that it reaches hold afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from roam.errors import MOST_SETTLING, CaptureError
from roam.program.effects import (
    Assemble,
    Drop,
    FillState,
    MarkStepped,
    Overwrite,
    PutLast,
    Rebind,
    SetFlag,
    SetPlain,
)
from roam.program.ir import History, Ref
from roam.state.containers import ArraySpace, memory_of
from roam.state.equality import MISSING, attributes_of, is_numpy_float, is_plain, same, show
from roam.state.metadata import gradient_dtype, gradient_of
from roam.state.nests import (
    as_tuple,
    is_bare_ordered,
    lost_attribute,
    may_be_opened,
    with_made_opened,
)
from roam.state.policies import Policy, Retrace
from roam.state.references import (
    ArgumentReference,
    AttributeReference,
    EntryReference,
    GradientReference,
    OptimizerReference,
    PlaceReference,
    StateReference,
    is_filled,
    optimizer_references,
)
from roam.state.wrappers import Form, Whole, is_wrapper, parts_of
from roam.torch_compat.private import (
    FakeTensor,
    layout_of,
    local_of,
    pytree,
    storage_pointer,
    was_step_called,
)
from roam.tracing.fake_kernels.sized import recorded_number
from roam.tracing.fakes.fake_identity import hooks_on, is_parameter, own_attributes
from roam.tracing.recording.recorder import Recorder
from roam.tracing.stand_ins.fake_state import FakeState
from roam.tracing.stand_ins.grad_scaler import check_skippable, check_updated
from roam.tracing.stand_ins.schedulers import check_schedulers

OUTSIDE: Final = "change that outside of the step, between two calls, and let the step return what of its values that needs"
"""What to do about state that a plan cannot change."""
Received = list[tuple[ArgumentReference, FakeTensor, Any]]
"""Arguments, each with its gradient from before the step."""


class Original:
    """A tensor from before the step, as it is then. Guards make sure that every call, and every
    trace, finds it so.
    """

    __slots__ = (
        "flag", "gradient_dtype", "history", "hooks", "keeps_gradient", "layout", "notes", "part",
        "reference", "tensor",
    )  # fmt: skip

    def __init__(self, tensor: Any, reference: Any) -> None:
        self.tensor = tensor
        self.reference = reference
        self.flag = tensor.requires_grad
        self.history: Any = tensor.grad_fn
        self.part, self.layout = local_of(tensor), _layout(tensor)
        self.keeps_gradient = tensor.retains_grad
        self.hooks = hooks_on(tensor)
        self.notes = own_attributes(tensor)
        self.gradient_dtype = _own_gradient_dtype(tensor)

    def has_other_flag(self) -> bool:
        """Whether the step has left another `requires_grad`; a history is none of the tensor's
        own.
        """
        return (
            self.history is None
            and self.tensor.is_leaf
            and self.tensor.requires_grad is not self.flag
        )

    def restore(self) -> None:
        if self.has_other_flag():
            self.tensor.requires_grad_(self.flag)


def _layout(tensor: Any) -> Any:
    """The layout over devices of a distributed tensor. Of a wrapper its form, and the storage of
    the wrapper itself, which is another one after `tensor.data = x`.
    """
    if not is_wrapper(tensor):
        return layout_of(tensor)
    return Form.of(tensor).kept(), storage_pointer(tensor.untyped_storage())


def _own_gradient_dtype(tensor: FakeTensor) -> tuple[torch.dtype | None, ...]:
    """The `grad_dtype` that the user has set; empty if gradients have the tensor's own dtype."""
    found = gradient_dtype(tensor)
    return () if found == tensor.dtype else (found,)


@dataclass(slots=True)
class Before:
    """What a trace finds in the places that the step reaches, before it runs the step.

    Attributes:
        tensors: of every reference.
        tied: of the places that hold a tensor which another place holds too.
        numbers: live numbers of optimizers' state.
        plain: what else optimizers' state holds.
        kept: numbers that the step keeps elsewhere.
        placed: what each place holds, by the identity of its reference.
        elsewhere: optimizers' state that belongs to no parameter.
        rates: numbers of optimizers' groups, in the order of their references.
        originals: the tensors, as autograd and Python see them.
        received: the arguments that are tensors.
    """

    tensors: list[tuple[StateReference, Any]]
    tied: list[tuple[PlaceReference, torch.Tensor]]
    numbers: list[tuple[OptimizerReference, Any]]
    plain: list[tuple[OptimizerReference, Any]]
    kept: list[tuple[PlaceReference, Any]]
    placed: dict[int, Any]
    elsewhere: tuple[Any, ...]
    rates: list[Any]
    originals: list[Original] = field(default_factory=list)
    received: Received = field(default_factory=list)

    @classmethod
    def of(cls, fake_state: FakeState) -> Before:
        """Reads the places of a fake state."""
        state = [
            (reference, reference.get())
            for reference in optimizer_references(
                fake_state.reach, fake_state.parameters, plain=True
            )
        ]
        changing = set(fake_state.policies.places(Policy.COUNTED))
        return cls(
            tensors=[(reference, reference.get()) for reference in fake_state.references()],
            tied=[(place, place.get()) for place in fake_state.places if place.tied],
            numbers=[one for one in state if one[0].path in changing],
            plain=[one for one in state if one[0].path not in changing],
            kept=[(reference, reference.get()) for reference in fake_state.numbers],
            placed={id(reference): reference.get() for reference in fake_state.places},
            elsewhere=fake_state.state_elsewhere(),
            rates=[reference.get() for reference in fake_state.rates],
        )


def record_endings(
    fake_state: FakeState,
    recorder: Recorder,
    before: Before,
    arguments: Any,
    left: tuple[Any, list[list[Any]]],
) -> None:
    """Records in the program what a step that has been traced leaves.

    Args:
        fake_state: as the step has left it.
        recorder: of the step's operators.
        before: what was there before the step.
        arguments: of the step, with fakes.
        left: what it returns, and what it has added to each of the lists that grow.

    Raises:
        CaptureError: a plan could not leave the same.
        Retrace: numbers in optimizers' state that are not live have changed, or an attribute that
            the step sets has to be followed.
    """
    for reference, _ in before.tensors:
        if isinstance(reference, PlaceReference) and reference.get() is MISSING:
            raise _removed(reference)
    _check_tuples(fake_state, (arguments, left))
    _check_elsewhere(before.elsewhere, fake_state.state_elsewhere())
    recorder.finish()
    fake_state.regions.check()
    check_updated(fake_state)
    with fake_state.classes_told():
        _results(fake_state, recorder, left, arguments)
    _check_literals(fake_state, recorder)
    _endings(fake_state, recorder, before.tensors)
    _argument_endings(recorder, before.received)
    _original_endings(recorder, before.originals)
    _tied_endings(recorder, before.tensors, before.tied)
    _plain_endings(
        fake_state, recorder, before.plain, {reference.path for reference, _ in before.numbers}
    )
    _empty_endings(fake_state, recorder)
    _rate_endings(fake_state, recorder)
    _attribute_endings(fake_state, recorder, arguments, left)
    _number_endings(
        fake_state,
        recorder,
        {reference.path for reference, number in before.kept if number is not None},
    )
    recorder.note_assigned()
    check_skippable(recorder.program)
    check_schedulers(recorder.program)


def _removed(reference: StateReference) -> CaptureError:
    return CaptureError(
        f"the step removes {reference.path}; assign another value instead, or remove it from a copy",
        code="owner_removed",
    )


def _check_elsewhere(before: tuple[Any, ...], now: tuple[Any, ...]) -> None:
    """Refuses changes of optimizers' state that belongs to no parameter."""
    if not same(before, now):
        changed = next((one for one in now if not any(same(old, one) for old in before)), None)
        key = "" if changed is None else f" under {show(changed[0])}"
        raise CaptureError(
            f"the step keeps optimizer state{key}, which belongs to no parameter; keep one entry "
            "for each parameter",
            code="optimizer_state",
        )


def _check_literals(fake_state: FakeState, recorder: Recorder) -> None:
    """Refuses to write to, and to return, a tensor that shares its memory with an array from before
    the step, as `torch.from_numpy` makes it: each run of a plan has a copy.
    """
    arrays = [
        (place.space.path, memory_of(place.space.holder))
        for place in fake_state.reach.places
        if isinstance(place.space, ArraySpace)
    ]
    if not arrays:
        return
    program = recorder.program
    used = program.written()
    used |= {
        program.storage_of(leaf.slot)
        for leaf in program.result.leaves
        if isinstance(leaf, Ref) and program.slots[leaf.slot] is not None
    }
    for real, slot, source in recorder.literals:
        if program.storage_of(slot) not in used:
            continue
        storage = real.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for path, memory in arrays:
            if start < memory.stop and memory.start < end:
                recorder.refuse(
                    f"the step writes to, or returns, a tensor in the memory of {path}, a NumPy "
                    "array from before the step; make the tensor outside of the step and pass it "
                    "to the step, or copy it (torch.tensor(array))",
                    code="moved",
                    source=source,
                )


def _results(fake_state: FakeState, recorder: Recorder, result: Any, arguments: Any) -> None:
    """What the step returns, and adds to lists: tensors and live numbers by slot, plain values as
    they are.
    """
    changeable = [one for one in _containers(result) if not isinstance(one, tuple)]
    known = known_objects(fake_state)
    known.update(
        id(one) for one in _containers(arguments, opens=True) if not isinstance(one, tuple)
    )
    lost = lost_attribute(result)
    if lost is not None:
        raise CaptureError(
            f"the step returns a {type(lost.container).__name__}, or adds it to a list, that has {lost.fault}, and a plan would make one with the entries alone; return the value by itself, or in a dictionary "
            "(dict(x) has the entries)",
            code="container_attribute",
        )
    returned = {id(one) for one in _containers(result[0])}
    seen = set(known)
    for one in changeable:
        if id(one) in seen:
            raise _same_again(is_old=id(one) in known, is_returned=id(one) in returned)
        seen.add(id(one))
    known = seen
    wrappers = set[int]()

    def apart(value: Any) -> Any:
        if not is_wrapper(value):
            return value
        if recorder.is_original(value) or id(value) in wrappers:
            raise CaptureError(
                f"the step returns a {type(value).__name__} from before the step, or one in two places, and a plan would "
                "return another one; return a copy of it",
                code="result",
            )  # fmt: skip
        wrappers.add(id(value))
        left = recorder.joined(value, "the step's result")
        assert left is not None
        return Whole(left.layout, parts_of(value))

    parts = with_made_opened(
        result,
        lambda value: id(value) in known,
        lambda value: recorder.slot_of(value) is not None,
        apart,
    )
    made = recorder.program.result
    leaves, made.spec = pytree.tree_flatten(parts, is_leaf=lambda value: type(value) is torch.Size)
    references, histories = made.leaves, made.histories
    for leaf in leaves:
        history: History = "none"
        if issubclass(type(leaf), torch.Tensor):
            references.append(Ref(recorder.leaving(leaf, "the step's result")))
            if (joined := recorder.joined(leaf, "the step's result")) is not None:
                made.joined[len(references) - 1] = joined
            if not recorder.is_original(leaf):
                history = _result_history(recorder, leaf)
        elif (slot := recorder.slot_of(leaf)) is not None:
            references.append(Ref(slot))
        elif (size := recorded_number(leaf)) is not None:
            references.append(size)
        elif is_plain(leaf) or isinstance(leaf, type):
            references.append(leaf)
        else:
            raise CaptureError(
                f"the step returns a {type(leaf).__name__}, or adds it to a list; it may return tensors, numbers, the containers that torch.utils._pytree knows, and objects that it makes of these",
                code="result",
            )
        histories.append(history)


def _same_again(*, is_old: bool, is_returned: bool) -> CaptureError:
    """Why a plan cannot give a list or dictionary: it `is_old`, from before the step, or stands in
    two places of what the step returns, or else adds to lists.
    """
    gives, give = ("returns", "return") if is_returned else ("adds to a list", "add")
    which, instead = (
        ("a list or dictionary from before the step", "another one")
        if is_old
        else ("the same list or dictionary in two places", "two of them")
    )
    return CaptureError(
        f"the step {gives} {which}, and a plan would {give} {instead}; {give} a copy, such as list(x) or dict(x)",
        code="result" if is_returned else "moved",
    )


def _result_history(recorder: Recorder, tensor: torch.Tensor) -> History:
    """How autograd sees a tensor that the step makes and returns."""
    try:
        _ = tensor.grad_fn
    except RuntimeError as error:  # which eager PyTorch raises when the history is asked for
        raise CaptureError(
            "the step returns a view that it made under torch.inference_mode, and changes the "
            "memory outside of that mode; return a copy, such as x.clone()",
            code="result",
        ) from error
    if is_parameter(tensor) or (tensor.is_leaf and tensor.grad is not None):
        raise CaptureError(
            "the step returns a parameter that it makes, or a tensor with a gradient; return "
            "x.detach(), and the gradient as another result",
            code="result",
        )
    if tensor.requires_grad and not tensor.is_leaf:
        return recorder.history_of(tensor)
    return "leaf" if tensor.requires_grad else "none"


def _endings(
    fake_state: FakeState,
    recorder: Recorder,
    before: list[tuple[StateReference, Any]],
) -> None:
    """Records what each reference holds after the step, if that is another tensor than before."""
    program = recorder.program
    program.effects += [
        MarkStepped(optimizer) for optimizer in fake_state.optimizers if was_step_called(optimizer)
    ]
    held = {reference.path: tensor for reference, tensor in before}
    now = {reference.path: reference for reference in fake_state.references()}
    for reference, tensor in before:
        for part in _parts(tensor):
            recorder.leaving(part, reference.path)
    for whole, _, parts in recorder.wholes.values():
        for (part_reference, part), other in zip(parts, parts_of(whole), strict=True):
            if other is not part:
                check_no_leaf(other, part_reference.path)
                _rebind(recorder, part_reference, other)
    for path, reference in now.items():
        tensor = reference.get()
        if held.get(path) is tensor:
            continue
        _check_replaceable(recorder, reference, tensor)
        _rebind(recorder, reference, tensor)
    for reference, _ in before:
        if reference.path not in now:
            if isinstance(reference, GradientReference):
                program.effects.append(Drop(reference))
            else:
                raise _removed(reference)
    # A gradient that was not there may well matter when it is.
    program.absent += [
        GradientReference(parameter, path)
        for parameter in fake_state.parameters
        if (path := f"{parameter.path}.grad") not in held and path not in now
    ]


def _rebind(recorder: Recorder, reference: Any, tensor: Any) -> None:
    """Records that a place holds another tensor after the step."""
    recorder.program.effects.append(_rebinding(recorder, reference, tensor))


def _parts(tensor: Any) -> list[Any]:
    """The inner tensors of a wrapper; any other tensor itself."""
    return parts_of(tensor) if is_wrapper(tensor) else [tensor]


def _rebinding(recorder: Recorder, reference: Any, tensor: Any) -> Rebind | Assemble:
    history: History = "none"
    if is_wrapper(tensor):
        if reference.kind == "gradient":
            raise CaptureError(
                f"{reference.path} is a {type(tensor).__name__} after the step, which no plan keeps; reset gradients "
                "at the end of the step",
                code="subclass",
            )  # fmt: skip
        joined = recorder.joined(tensor, reference.path)
        assert joined is not None
        slots = [recorder.leaving(part, reference.path) for part in parts_of(tensor)]
        return Assemble(reference, tuple(slots), joined)
    slot = recorder.leaving(tensor, reference.path)
    if tensor.grad_fn is not None and not recorder.is_original(tensor):
        history = recorder.history_of(tensor)
    return Rebind(reference, slot, history, recorder.joined(tensor, reference.path))


def _check_tuples(fake_state: FakeState, outside: Any) -> None:
    """Refuses steps after which several places, or parts of the step's arguments and result, hold
    one and the same tuple in a way that a run would not reproduce, since it puts tuples together
    anew.
    """
    held = {id(container) for container in _containers(outside, opens=True)}
    for space in fake_state.tuples():
        if not space.is_in_all_places():
            error = CaptureError(
                f"the step puts another {space.kind} in one of several places that hold {space.path}; put the same one in all "
                "of them, or keep it in one place",
                code="moved",
            )
            error.settles = MOST_SETTLING
            raise error
        if id(space.now()) in held and space.places:
            raise CaptureError(
                f"the step puts one {space.kind} at {space.path} and in another place, or returns "
                f"it; give each place a {space.kind} of its own",
                code="moved",
            )
        held.add(id(space.now()))


def _tied_endings(
    recorder: Recorder,
    before: list[tuple[StateReference, Any]],
    tied: list[tuple[PlaceReference, torch.Tensor]],
) -> None:
    """What the step puts in one of several places that hold one tensor. The next step finds two
    tensors.
    """
    first = {id(tensor): reference for reference, tensor in reversed(before)}
    for reference, tensor in tied:
        now = reference.get()
        if now is not tensor:
            if not issubclass(type(now), torch.Tensor):
                raise _removed(reference)
            _check_replaceable(recorder, reference, now)
            _rebind(
                recorder, AttributeReference(reference.space, reference.key, reference.path), now
            )
        if now is first[id(tensor)].get():
            continue
        recorder.program.unsettled = CaptureError(
            f"{reference.path} and another place hold one tensor before the step and two after it, so "
            "the steady step can be captured only when the first has run; roam.compile does so, "
            "and capture(step='first') captures the first",
            code="unsettled",
        )


def _check_replaceable(recorder: Recorder, reference: StateReference, tensor: torch.Tensor) -> None:
    """Refuses another tensor in a parameter's place, and one that requires a gradient itself."""
    if (
        not isinstance(reference, (OptimizerReference, GradientReference))
        and reference.kind == "parameter"
    ):
        raise CaptureError(
            f"the step puts another tensor in the place of the parameter {reference.path}; write into "
            "the parameter under torch.no_grad(), as in p.copy_(...)",
            code="parameter_replaced",
        )
    check_no_leaf(tensor, reference.path, is_new=not recorder.is_original(tensor))


def _original_endings(recorder: Recorder, originals: list[Original]) -> None:
    """What the step leaves on tensors from before it, apart from their values."""
    for one in originals:
        if is_wrapper(one.tensor) and _layout(one.tensor) != one.layout:
            raise CaptureError(
                f"the step makes {one.reference.path} another {type(one.tensor).__name__} in place, with other attributes "
                "or other data (x.data = ...); put another tensor in its place, or write into it, as in x.copy_(...)",
                code="subclass",
            )  # fmt: skip
        if local_of(one.tensor) is not one.part or _layout(one.tensor) != one.layout:
            raise CaptureError(
                f"the step gives the DTensor {one.reference.path} another local part or other "
                "placements; put another DTensor in its place, or write into it",
                code="dtensor",
            )
        if one.tensor.grad_fn is not one.history:
            raise CaptureError(
                f"{one.reference.path} would have another gradient history after the step, of which "
                "a plan keeps none; detach what the step writes into it, or write under "
                "torch.no_grad(); put x.detach() in its place where the step ends its history",
                code="outer_history",
            )
        if one.tensor.retains_grad is not one.keeps_gradient and one.history is not None:
            raise CaptureError(
                f"the step calls retain_grad() on {one.reference.path}, which keeps no gradient "
                "after a plan has run; leave it out, or detach the tensor",
                code="moved",
            )
        if hooks_on(one.tensor) != one.hooks:
            raise CaptureError(
                f"the step leaves hooks on {one.reference.path}; remove them in the step "
                "itself, or add them outside of it",
                code="moved",
            )
        if _own_gradient_dtype(one.tensor) != one.gradient_dtype:
            raise CaptureError(
                f"the step sets grad_dtype of {one.reference.path}, which a plan cannot repeat; "
                "set it once, before the first step",
                code="moved",
            )
        notes = own_attributes(one.tensor)
        for name in one.notes | notes:
            if not same(one.notes.get(name, MISSING), notes.get(name, MISSING)):
                raise CaptureError(
                    f"the step sets the attribute {name!r} of {one.reference.path}, which "
                    "a plan cannot repeat; set it outside of the step, or keep its "
                    "value in a dictionary",
                    code="tensor_attribute",
                )
        if one.has_other_flag():
            if one.reference.kind in ("optimizer_state", "gradient"):
                raise CaptureError(
                    f"the step changes requires_grad of {one.reference.path}, which a captured "
                    "step would not do; leave it as it is",
                    code="moved",
                )
            recorder.program.effects.append(SetFlag(one.reference, not one.flag))


def _argument_endings(recorder: Recorder, received: Received) -> None:
    """What the gradients of arguments are after the step."""
    program = recorder.program
    for reference, tensor, before in received:
        gradient = gradient_of(tensor)
        if gradient is before:
            continue
        if gradient is None:
            program.effects.append(Drop(reference.gradient))
        else:
            check_no_leaf(gradient, reference.gradient.path)
            _rebind(recorder, reference.gradient, gradient)


def check_no_leaf(tensor: Any, path: str, *, is_new: bool = True) -> None:
    """Refuses what a run by a plan would leave a plain tensor without `requires_grad`, and what is
    no tensor in a tensor's place.
    """
    if not issubclass(type(tensor), torch.Tensor):
        raise CaptureError(
            f"the step puts {show(tensor)} at {path}, where a tensor was; keep the two in places of their "
            "own",
            code="moved",
        )
    if (tensor.requires_grad and tensor.is_leaf) or (is_new and is_parameter(tensor)):
        raise CaptureError(
            f"the step puts a parameter, or another leaf that requires a gradient, at {path}; "
            "write into the tensor there under torch.no_grad(), as in x.copy_(...)",
            code="parameter_replaced",
        )


def _rate_endings(fake_state: FakeState, recorder: Recorder) -> None:
    """Records the values by which the step replaces learning rates."""
    program = recorder.program
    for reference in fake_state.rates:
        rate = reference.get()
        if recorder.is_as_given(reference):
            continue
        if (slot := recorder.slot_of(rate)) is not None and not isinstance(rate, torch.Tensor):
            program.effects.append(Rebind(reference, slot))
        elif issubclass(type(rate), (float, int)) and type(rate) is not bool:
            program.effects.append(SetPlain(reference, rate))
        else:
            raise CaptureError(
                f"the step makes {reference.path} a {type(rate).__name__}; set a float", code="rate"
            )


def _empty_endings(fake_state: FakeState, recorder: Recorder) -> None:
    """Which parameters have state, if that of some is empty."""
    places = {id(place.get()): place for place in fake_state.parameters}
    for _, optimizer in fake_state.reach.optimizers:
        entries = [(places.get(id(key)), entry) for key, entry in optimizer.state.items()]
        if any(place is not None and not is_filled(entry) for place, entry in entries):
            known = [place for place, _ in entries if place is not None]
            recorder.program.effects.append(FillState(optimizer, known))


def _number_endings(fake_state: FakeState, recorder: Recorder, given: set[str]) -> None:
    """Records the values by which the step replaces the numbers that it keeps. Those at `given`
    were there before.
    """
    for reference in fake_state.numbers:
        number = reference.get()
        if (slot := recorder.slot_of(number)) is not None and not isinstance(number, torch.Tensor):
            if not recorder.is_as_given(reference):
                recorder.program.effects.append(Rebind(reference, slot))
        elif (
            type(number) in (int, float)
            or is_numpy_float(number)
            or (number is None and reference.path in given)
        ):
            recorder.program.effects.append(SetPlain(reference, number))
        elif (size := recorded_number(number)) is not None:
            recorder.program.effects.append(SetPlain(reference, size))
        elif number is not None:
            raise CaptureError(
                f"the step puts {show(number)} at {reference.path}, where a number was before; keep "
                "a number there, or a tensor from the beginning",
                code="moved",
            )


def _attribute_endings(
    fake_state: FakeState, recorder: Recorder, arguments: Any, result: Any
) -> None:
    """Records the attributes that the step sets before it looks at them.

    Raises:
        Retrace: an attribute holds something that is not made of tensors, numbers and plain
            values, or only other traces have set it. From then on it counts as looked at.
    """
    program = recorder.program
    shared = _known(fake_state) | {
        id(container) for container in _containers((arguments, result), opens=True)
    }
    for space, name, key in fake_state.reach.overwritten:
        reference = AttributeReference(space, name, space.label(name))
        value = reference.get()
        if value is MISSING:
            continue  # a property, which has set something else
        skeleton, entries = _nest(recorder, reference, value, shared)
        if skeleton is MISSING or not fake_state.reach.reads.was_set(key, name):
            fake_state.reach.reads.keep(key, name)
            raise Retrace
        program.effects.append(Overwrite(reference))
        if not entries or entries[0].reference is not reference:
            program.effects.append(SetPlain(reference, skeleton))
        program.effects += entries


def known_objects(fake_state: FakeState) -> set[int]:
    """Identities of the objects and containers that the step reaches."""
    return {id(value) for _, value in fake_state.reach.objects} | _known(fake_state)


def _known(fake_state: FakeState) -> set[int]:
    """Identities of the containers that the step reaches."""
    return {id(place.space.holder) for place in fake_state.reach.places}


def _containers(value: Any, *, opens: bool = False) -> Iterator[Any]:
    """All lists, tuples, dictionaries and deques in a nest; if it `opens` them, also objects that
    derive from `collections.UserDict`, and what is in them.
    """
    if opens and may_be_opened(value):
        attributes = attributes_of(value)
        yield value
        yield attributes
        for part in attributes.values():
            yield from _containers(part, opens=opens)
    elif issubclass(type(value), (list, tuple, dict, deque)):
        yield value
        for part in dict.values(value) if issubclass(type(value), dict) else value:
            yield from _containers(part, opens=opens)


def _nest(
    recorder: Recorder,
    reference: AttributeReference,
    value: Any,
    shared: set[int],
    keys: tuple[Any, ...] = (),
    path: str = "",
) -> tuple[Any, list[Rebind | Assemble]]:
    """What the step has put in a place, without tensors and live numbers, and what puts these
    there; `MISSING` if a run could not put the like there: other objects, or containers that
    somebody else holds too.
    """
    path = path or reference.path
    place = EntryReference(reference, keys, path) if keys else reference
    if issubclass(type(value), torch.Tensor):
        if not recorder.is_original(value) and (
            is_parameter(value) or (value.is_leaf and value.requires_grad)
        ):
            return MISSING, []
        return None, [_rebinding(recorder, place, value)]
    if (slot := recorder.slot_of(value)) is not None:
        return None, [Rebind(place, slot)]
    if is_plain(value):
        return value, []
    is_tuple = type(value) is tuple or (
        hasattr(type(value), "_make") and not hasattr(value, "__dict__")
    )
    is_dictionary = type(value) is dict or is_bare_ordered(value)
    if not (is_dictionary or type(value) is list or is_tuple) or (
        id(value) in shared and value != ()
    ):
        return MISSING, []
    shared.add(id(value))
    found: list[Rebind | Assemble] = []
    parts: dict[Any, Any] = type(value)() if is_dictionary else {}
    for key, part in value.items() if is_dictionary else enumerate(value):
        if not is_plain(key):
            return MISSING, []
        parts[key], entries = _nest(
            recorder, reference, part, shared, (*keys, key), f"{path}[{key!r}]"
        )
        if parts[key] is MISSING:
            return MISSING, []
        found += entries
    if is_dictionary:
        return parts, found
    return (as_tuple(type(value), parts.values()) if is_tuple else list(parts.values())), found


def _plain_endings(
    fake_state: FakeState, recorder: Recorder, before: list[tuple[Any, Any]], live: set[str]
) -> None:
    """What the step leaves in optimizer state, apart from tensors.

    Args:
        before: (reference, value) of what was there and is no live number.
        live: paths of the live numbers.

    Raises:
        Retrace: numbers other than the live ones differ from those before.
    """
    recorder.program.plain_before = before
    known = {reference.path: value for reference, value in before}
    changed, made = set(), list[tuple[OptimizerReference, Callable[[], Any] | None]]()
    for reference in optimizer_references(fake_state.reach, fake_state.parameters, plain=True):
        value = reference.get()
        if (slot := recorder.slot_of(value)) is not None and reference.path in known:
            changed.add(reference.path)
        elif slot is not None:
            recorder.program.effects.append(Rebind(reference, slot))
            if reference.path not in live:
                made.append((reference, recorder.made_number(slot)))
        elif reference.path in known and value is known[reference.path]:
            continue
        elif not is_plain(value):
            error = CaptureError(
                f"{reference.path} is a {type(value).__name__}, which no plan can hold; keep each "
                "tensor or number under a key of its own",
                code="optimizer_state",
            )
            is_new = reference.path not in known
            error.settles = MOST_SETTLING if is_new and type(value) in (list, dict) else 0
            raise error
        elif reference.path not in known and reference.path not in live:
            recorder.program.effects.append(SetPlain(reference, value))
            recorder.program.absent.append(reference)
        elif reference.path in known and same(known[reference.path], value):
            continue
        elif type(value) in (int, float) and type(value) is type(known.get(reference.path)):
            changed.add(reference.path)
        else:
            raise CaptureError(
                f"{reference.path} has another value after each step, which the step does not "
                "calculate from the value before; keep tensors and numbers there",
                code="optimizer_state",
            )
    if changed:
        raise Retrace({Policy.COUNTED: changed})
    for reference, calculate in made:
        number = None if calculate is None else calculate()
        if number is None:
            recorder.program.unsettled = CaptureError(
                f"the first step makes {reference.path}, a Python number, from weights or data, and "
                "the next step uses it; roam.compile captures that step when the first has run. "
                "To capture both at once, keep it a tensor",
                code="unsettled",
            )
        else:
            reference.set(number)
            fake_state.policies.climb(Policy.COUNTED, [reference.path])
        recorder.program.absent.append(reference)
    if recorder.program.of(SetPlain) or made:
        recorder.program.effects += map(
            PutLast, optimizer_references(fake_state.reach, fake_state.parameters, plain=None)
        )
