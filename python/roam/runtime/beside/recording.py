"""Records the operators of one real call of the user's function, which computes as it always does.

No tensor is kept alive, so that what Python holds at each moment is seen as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from roam.errors import CaptureError
from roam.program.ir import Source, TensorMeta, ref_to, refs
from roam.program.operators import is_foreign
from roam.runtime.beside.placeholders import WeakStorage, note_known
from roam.torch_compat.private import (
    HiddenMode,
    OpOverload,
    schema_of,
    storage_of,
    storage_pointer,
)
from roam.tracing.fake_kernels.meta_corrections import is_spread, looks_for_zeros, selects_masked
from roam.tracing.recording.kernel_facts import HIDDEN_ALIAS, REFUSED, facts_of, written_by
from roam.tracing.source_location import Frames

aten = torch.ops.aten
_PASSED = frozenset(
    {torch.ops.prim.device.default, aten.is_same_size.default, aten.is_set_to.default}
)
_VALUES = frozenset(
    {
        aten._local_scalar_dense.default,
        aten.equal.default,
        aten.allclose.default,
        aten.is_pinned.default,
    }
)
_SPECTRA = frozenset({
    aten._linalg_svd.default, aten._linalg_eigh.default, aten._linalg_eigvals.default, aten.linalg_eig.default,
})  # fmt: skip
"""What composite operators are made of that PyTorch takes apart in another way then."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

Kind = Literal["kernel", "view", "now", "settle"]
"""What an entry does. `kernel`: computes. `view`: makes tensors in memory that is there. `now`:
gives Python a value. `settle`: Python looks at a tensor, or at random generators, without an
operator."""


class Made(NamedTuple):
    """A result of an operator that is a new tensor."""

    slot: int


class Given(NamedTuple):
    """A result of an operator that is one of its arguments: at `path` of the arguments."""

    path: tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Entry:
    """One operator of a recording, or one moment at which Python looked at values."""

    kind: Kind
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """The arguments, with a `Ref` for each tensor."""
    results: tuple[Any, ...] = ()
    """`Made`, `Given`, or a value that is no tensor."""
    sequence: type[Any] | None = None
    """The class of the list or tuple that the operator returns; None if it returns one thing."""
    writes: tuple[int, ...] = ()
    """Slots of the arguments that it changes."""
    phase: str = "forward"
    source: Source = Source()  # noqa: RUF009 - it cannot change
    dtype: torch.dtype | None = None
    """The default dtype, where the operator takes it."""
    alive: frozenset[int] = frozenset()
    """Where Python looks at values: the storages of the call that it holds."""


@dataclass(slots=True)
class Seen:
    """A storage of a recording."""

    size_bytes: int
    creator: int
    """The entry that makes it; -1 if it was there."""
    name: str


@dataclass(slots=True, eq=False)
class Recording:
    """What one call did."""

    entries: list[Entry] = field(default_factory=list)
    slots: list[TensorMeta] = field(default_factory=list)
    storages: list[Seen] = field(default_factory=list)
    met: dict[int, int] = field(default_factory=dict)
    """For each slot that no operator has made: the entry that met it first."""
    alive: frozenset[int] = frozenset()
    """The storages that the call has made and that Python holds at its end."""
    parameters: frozenset[int] = frozenset()
    """Slots of parameters."""
    failed: CaptureError | None = None
    """Why no plan can be made of it."""


class Recorder(HiddenMode):
    """Records what runs in the block.

    Args:
        stops: whether a call of which no plan can be made ends there, as long as it has changed no
            tensor.
    """

    def __init__(self, frames: Frames, *, stops: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.is_busy = False
        self.stopped: CaptureError | None = None
        """Why nothing more of the call runs."""
        self.failure: Exception | None = None
        """Why a kernel, or a plan, has failed."""
        self.planned: Any = None
        """The `Planned` by which all of the call has run, if its script is one that later calls can
        be compared with."""
        self.torn: list[tuple[torch.Tensor, int]] = []
        """What was changed before a kernel failed, with the versions."""
        self.has_assigned = False
        """Whether a tensor has got the data of another one."""
        self._stops = stops
        self._has_written = False
        """Whether the call has changed a tensor that it has not made, or given one other data."""
        self._frames = frames
        self._ids: dict[int, int] = {}
        self._weak: list[weakref.ref[torch.Tensor]] = []
        self._numbers: dict[int, int] = {}
        self._storages: list[WeakStorage] = []
        self._living: set[int] = set()
        """Those that the call has made and that had not expired when this was last asked."""
        self._parameters: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.stopped is not None:
            raise self.stopped
        if hidden := hidden_branch(func, args, self._frames):
            self.stopped = self.recording.failed = hidden
            raise hidden
        if is_passed(func) or self.recording.failed is not None:
            return func(*args, **kwargs)
        return self._record(func, args, kwargs)

    def fail(self, message: str, code: str, func: Any = None, *, is_unseen: bool = False) -> None:
        """Notes that no plan can be made of the call. It goes on if it has changed something.

        Raises:
            CaptureError: it has not, or what comes now would not be as in eager PyTorch, so nothing
                more of it runs.
        """
        if self.recording.failed is not None and not is_unseen:
            return
        source = str(self._frames.here()[1])
        where = f"{func} at {source}" if func is not None else source
        self.recording.failed = CaptureError(
            f"{where}: {message}", code=code, operator=str(func or ""), source=source
        )
        if is_unseen or (self._stops and not self._has_written):
            self.stopped = self.recording.failed
            raise self.stopped

    def settle(self, tensor: torch.Tensor | None) -> None:
        """Python looks at a tensor's memory, or at random generators (None)."""
        args: tuple[int, ...] = ()
        if tensor is not None:
            number = self._numbers.get(storage_pointer(storage_of(tensor)))
            if number is None:
                return
            args = (number,)
        phase, source = self._frames.here()
        self.recording.entries.append(
            Entry("settle", None, args, {}, phase=phase, source=source, alive=self._alive())
        )

    def assigned(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """A tensor gets the data of another one. From here on it is a tensor not met before, and
        what has its old memory stays as it is.
        """
        if self.stopped is not None:
            raise self.stopped
        if not (is_plain(tensor) and is_plain(data)):
            self.fail(
                "it gives a tensor other data (x.data = y), and one of the two is no plain tensor; write into the "
                "tensor, as in x.copy_(y)",
                "storage_replaced",
            )
        self._has_written = self.has_assigned = True
        self._ids.pop(id(tensor), None)

    def unseen(self, what: str, code: str) -> None:
        """Python is about to do what cannot be followed."""
        self.fail(what, code, is_unseen=code != "refused_operator")

    def unsettled(self, failed: CaptureError) -> None:
        """Nothing of this call is to be repeated; a later one may be."""
        self.recording.failed = self.recording.failed or failed

    def switching(self) -> None:
        """How kernels compute is about to be changed."""

    def drawn(self) -> None:
        """Python has looked at random generators, or set them."""

    def threaded(self) -> None:
        """Python is about to give another thread something to do."""

    def exposed(self, tensor: torch.Tensor, by: Any) -> None:
        """Python has got a tensor's memory."""

    def aliased(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """A tensor with the memory of another one has been made without an operator."""

    def finish(self) -> None:
        """The function has returned."""

    def raised(self, error: BaseException) -> None:
        """The step's own code has raised."""

    def release(self) -> None:
        """The call is over."""

    def end(self) -> Recording:
        """The recording; to be asked for when the block has ended."""
        self.recording.alive = self._alive()
        self.recording.parameters = frozenset(self._parameters)
        return self.recording

    def _alive(self) -> frozenset[int]:
        self._living = {one for one in self._living if not self._storages[one].expired()}
        return frozenset(self._living)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, OpOverload):
            self.fail("it takes functions, which cannot be recorded", "refused_operator", func)
            return func(*args, **kwargs)
        facts = facts_of(func)
        tensors = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        odd = next((one for one in tensors if not is_plain(one)), None)
        if odd is not None:
            self.fail(
                f"it is given a {type(odd).__name__} that is no plain tensor", "subclass", func
            )
        elif facts.is_composite:
            self.fail(
                "PyTorch runs it as a whole here, as in torch.inference_mode and in function transforms; use torch.no_grad for "
                "the former",
                "refused_operator", func,
            )  # fmt: skip
        elif schema_of(func).name in REFUSED:
            self.fail("it changes what a tensor is, not its values", "refused_operator", func)
        if self.recording.failed is not None:
            return func(*args, **kwargs)
        index = len(self.recording.entries)
        entry = Entry("kernel", func, self._encoded(args), self._encoded(kwargs))
        entry.phase, entry.source = self._frames.here()
        if is_now(func) or _own_generator(kwargs):
            entry.kind, entry.alive = "now", self._alive()
        if facts.mutates:
            written = written_by(func, args, kwargs)
            entry.writes = tuple(self._slot(one) for one in tensors_in(tuple(written)))
            if facts.reshapes_in_place:
                entry.writes = ()
        if facts.takes_dtype and kwargs.get("dtype") is None and not tensors:
            entry.dtype = torch.get_default_dtype()
        self.recording.entries.append(entry)
        try:
            result = self._run(entry, args, kwargs)
        except BaseException:
            if entry.kind != "now":  # it has done nothing
                self.recording.entries.remove(entry)
            raise
        if entry.dtype is not None and entry.dtype is not result.dtype:
            entry.dtype = None  # its numbers say what it makes
        is_sequence = isinstance(result, (tuple, list))
        flat = tuple(result) if is_sequence else (result,)
        if entry.kind == "now":
            return result
        entry.sequence = type(result) if is_sequence else None
        given = {
            self.recording.slots[slot].storage for slot in refs(entry.args) + refs(entry.kwargs)
        }
        results = []
        is_view = is_kernel = False
        for item in flat:
            if isinstance(item, (tuple, list)):
                self.fail("it returns lists of lists", "refused_operator", func)
                return result
            if not isinstance(item, torch.Tensor):
                results.append(item)
                continue
            path = path_to(item, args, kwargs)
            if facts.reshapes_in_place:  # the tensor is another one from here on
                results.append(
                    Made(self._add(item, self._numbers[storage_pointer(storage_of(item))]))
                )
                continue
            if path is not None:
                results.append(Given(path))
                continue
            if item.layout is not torch.strided:
                self.fail("it returns a tensor that is not strided", "refused_operator", func)
                return result
            pointer = storage_pointer(storage_of(item))
            known = self._numbers.get(pointer)
            if known is None:
                is_kernel = True
                known = self._new_storage(item, index, f"{func.__name__.split('.')[0]}_{index}")
            elif known in given:
                is_view = True
            elif self.recording.storages[known].creator != index:
                self.fail(
                    "its result lies in memory that it was not given", "differs_from_capture", func
                )
                return result
            results.append(Made(self._add(item, known)))
        entry.results = tuple(results)
        if is_view:
            entry.kind = "view"
            if is_kernel or entry.writes or (facts.computes and func not in HIDDEN_ALIAS):
                self.fail("it makes a view and computes", "refused_operator", func)
        elif not is_kernel and not entry.writes and not facts.is_check:
            entry.kind = "view"
        self._returned(entry)
        return result

    def _run(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator returns that has just been noted."""
        self._has_written = self._has_written or any(
            self.recording.storages[self.recording.slots[slot].storage].creator < 0
            for slot in entry.writes
        )
        return entry.func(*args, **kwargs)

    def _returned(self, entry: Entry) -> None:
        """What the last operator has returned is noted too."""

    # -- tensors

    def _encoded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return ref_to(self._slot(value))
        kind = type(value)
        if kind in (tuple, list):
            return kind([self._encoded(item) for item in value])
        if kind is dict:
            return {key: self._encoded(item) for key, item in value.items()}
        return value

    def _slot(self, tensor: torch.Tensor) -> int:
        known = self._ids.get(id(tensor))
        pointer = storage_pointer(storage_of(tensor))
        if (
            known is not None
            and self._weak[known]() is tensor
            and self._numbers.get(pointer) == self.recording.slots[known].storage
        ):
            return known
        number = self._numbers.get(pointer)
        if number is None:
            number = self._new_storage(tensor, -1, f"outside_{len(self.recording.storages)}")
        slot = self._add(tensor, number)
        self.recording.met[slot] = len(self.recording.entries)
        if isinstance(tensor, torch.nn.Parameter):
            self._parameters.add(slot)
        return slot

    def _new_storage(self, tensor: torch.Tensor, creator: int, name: str) -> int:
        storage = storage_of(tensor)
        number = self._numbers[storage_pointer(storage)] = len(self._storages)
        if creator < 0 and storage.resizable():  # whatever NumPy gets later
            note_known(storage)
        self._storages.append(WeakStorage(storage))
        if creator >= 0:
            self._living.add(number)
        self.recording.storages.append(Seen(storage.nbytes(), creator, name))
        return number

    def _add(self, tensor: torch.Tensor, storage: int) -> int:
        slot = len(self.recording.slots)
        self.recording.slots.append(meta_of(tensor, storage))
        self._ids[id(tensor)] = slot
        self._weak.append(weakref.ref(tensor))
        return slot


def hidden_branch(func: Any, args: tuple[Any, ...], frames: Frames) -> CaptureError | None:
    """Why an operator cannot run where a dispatch mode looks on: PyTorch computes it by other
    kernels there, with other bits.
    """
    if not (
        looks_for_zeros(func) or selects_masked(func) or is_spread(func, args) or func in _SPECTRA
    ):
        return None
    source = str(frames.here()[1])
    return CaptureError(
        f"{func} at {source}: PyTorch computes it by other kernels where a dispatch mode looks on, as beside a plan, than in "
        'eager PyTorch; pass python="idle" to roam.compile, and see what the step is refused for then',
        code="hidden_branch", operator=str(func), source=source,
    )  # fmt: skip


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of none but PyTorch's own classes, and strided."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def is_passed(func: Any) -> bool:
    """Whether an operator asks about metadata alone, or marks a place for profilers."""
    return func in _PASSED or getattr(func, "namespace", "") == "profiler"


def is_now(func: Any) -> bool:
    """Whether an operator gives Python a value, or an error that values decide on, or makes tensors
    whose shapes follow from values.
    """
    facts = facts_of(func)
    if func in _VALUES or is_foreign(func) or facts.may_be_decided or facts.is_check:
        return True
    return any(
        tag in func.tags
        for tag in (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    )


def _own_generator(kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws from a generator of the user's. Its state may be asked for, or set,
    where nothing shows it.
    """
    generator = kwargs.get("generator")
    return generator is not None and generator is not torch.default_generator


def meta_of(tensor: torch.Tensor, storage: int) -> TensorMeta:
    """How a tensor lies in a storage."""
    return TensorMeta(
        tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.device, storage,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from tensors_in(value)


def path_to(tensor: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Where a tensor is among arguments; None if it is not."""
    for key, value in (*enumerate(args), *kwargs.items()):
        if value is tensor:
            return (key,)
        if type(value) in (list, tuple):
            for place, item in enumerate(value):
                if item is tensor:
                    return (key, place)
    return None


def at_path(path: tuple[Any, ...], args: Any, kwargs: dict[str, Any]) -> Any:
    """What `path_to` has found."""
    first = path[0]
    value = kwargs[first] if type(first) is str else args[first]
    return value if len(path) == 1 else value[path[1]]
