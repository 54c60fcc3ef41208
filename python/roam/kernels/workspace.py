"""Learns what kernels take for themselves while they run: scratchpads, weights in another order,
results in another layout.

No schema says how much this is. So each kernel is run on zeros of the same shapes, strides and
dtypes, while the allocations are recorded. The result holds for every equal call in the process. On
the CPU only kernels that may allocate memory for themselves are run: kernels that cannot write
where a plan says, and of the others those that `_allocates` tells. On CUDA all are run, each at
least twice.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

from roam.kernels.calls import Placed
from roam.kernels.kept import recall, retain
from roam.kernels.samples import set_values, wants_values
from roam.kernels.table import layout
from roam.program.bits import with_bits
from roam.program.ir import Call, Program, Ref, TensorMeta, substitute
from roam.program.operators import ATTENTION, is_foreign, is_region, on_list
from roam.program.releases import Release, released
from roam.program.tiles import TILES, body_of, run_into, run_some_into
from roam.torch_compat.private import (
    OpOverload,
    c_pointer,
    disable_current_modes,
    float32_precisions,
    kernel_library_switches,
    pytree,
    start_allocator_events,
    stop_allocator_events,
)

_KIND = "workspaces"
_PRODUCTS = frozenset(
    f"{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv")
)
_PLAIN = frozenset((torch.float32, torch.float64))
"""What all kernels compute in, without a conversion."""
_MOVES = frozenset(("nothing", "copy_", "fill_", "zero_", "zero_, copy_", "aten::cat.out"))
"""Names of kernels (see `Placement`) that convert element by element what has another dtype."""
_IN_STEPS = (
    "_chunk_cat", "_linalg_", "_safe_softmax", "_upsample_", "bucketize", "embedding_dense_backward", "gelu_backward",
    "geqrf", "hist", "index_reduce", "kthvalue", "ldexp", "linalg_", "logsumexp", "median", "mode", "nanmedian",
    "ormqr", "renorm", "scatter_reduce", "searchsorted", "soft_margin_loss_backward", "upsample_",
)  # fmt: skip
"""How the names of operators begin whose kernels make something in between, whatever they get."""
_LEAST_BYTES = 64
"""Where a kernel writes to a given place, less than this does not count: numbers become tensors."""
_TO_OUT = frozenset(("aten._chunk_cat.out",))
"""Operators that make something in between and write the result to their argument `out`: they first
copy what cannot be cut evenly.
"""
_KNOWN = _TO_OUT | {
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten.native_dropout.default",
}
"""Operators that may be run, whatever their schemas say: they change nothing else, this attention
has no dropout, and what the dropout of compiled graphs draws is taken back.
"""
_AT_PLACES = frozenset(("aten.index_put_.default",))
"""Operators that change some places of an argument."""
_LESS_TO_OUT = frozenset(("aten.im2col.default",))
"""Operators that copy an argument unless they write to a given place, as they do only in a pool."""
_learned: dict[object, int] = {}
_one_at_a_time = threading.Lock()


class Unknown(Exception):
    """What kernels take cannot be found out."""


class NoRoom(Exception):
    """A kernel cannot be tried within the memory that there is for it."""

    def __init__(self, call: Call, size_bytes: int) -> None:
        super().__init__(
            f"{call.name} at {call.source} cannot be tried within the limit: zeros in place of "
            f"what it reads and makes take {size_bytes} bytes in addition to what exists before "
            "the step. Raise the limit, or take a smaller batch"
        )
        self.call, self.trial_bytes = call, size_bytes


def workspaces(
    program: Program,
    placed: Sequence[Placed | None],
    device: torch.device,
    deadline: float | None = None,
    room_bytes: int | None = None,
) -> dict[int, int] | None:
    """Bytes that calls' kernels allocate besides their results while they run, if they allocate
    any.

    Args:
        program: the program, of real tensors: kernels are run.
        placed: per call, what `placed_calls` says of it.
        device: where the program runs. On CUDA the allocator's peak is forgotten, as by
            `torch.cuda.reset_peak_memory_stats`.
        deadline: the value of `time.monotonic` after which no more kernels are run.
        room_bytes: no kernel is run whose largest argument and results take more.

    Returns:
        The bytes of each such call. None if they cannot be found out in time, or with this PyTorch,
            or on this device.

    Raises:
        NoRoom: a kernel has to be tried for which there is no room.
    """
    placed = [
        None if call.name in _LESS_TO_OUT else at
        for call, at in zip(program.calls, placed, strict=True)
    ]
    signatures: dict[int, object] = {
        index: (signature_of(program, call), _is_written(at))
        for index, call in enumerate(program.calls)
        if ((at := placed[index]) is None or at.by_rows or _allocates(program, call, at, device))
        and _is_tried(program, index, device)
    }
    # What others' kernels do nobody knows, so only the step itself runs them: see `learning`.
    others: dict[int, object] = {
        index: signature_of(program, call)
        for index, call in enumerate(program.calls)
        if is_foreign(call.target)
    }
    with _one_at_a_time:
        if device.type == "cpu":
            _learned.update(recall(_KIND, set(others.values()) - _learned.keys(), device))
        unknown = {
            signature: index for index, signature in signatures.items() if signature not in _learned
        }
        # What kernels of CUDA take has not been compared from process to process.
        is_kept = bool(unknown) and device.type == "cpu"
        if is_kept:
            recalled = recall(_KIND, unknown, device)
            _learned.update(recalled)
            unknown = {one: index for one, index in unknown.items() if one not in recalled}
        for index in unknown.values():
            trial_bytes = _trial_bytes(program, index)
            if room_bytes is not None and trial_bytes > room_bytes:
                raise NoRoom(program.calls[index], trial_bytes)
        learned: dict[object, int] = {}
        try:
            if unknown:
                _watched(
                    device,
                    lambda: learned.update(_learn(program, placed, unknown, device, deadline)),
                )
        except Unknown:
            return None
        if is_kept:
            retain(_KIND, learned, device)
    found = {
        index: _learned.get(signature, 0) for index, signature in (signatures | others).items()
    }
    return {index: size for index, size in found.items() if size > 0}


@contextmanager
def learning(program: Program, call: Call, news: list[Call]) -> Iterator[None]:
    """Around a call of a step, on real tensors: learns what a kernel of others takes for itself, if
    that is not known.

    Args:
        program: the call's.
        news: gets the call if its kernel takes something.
    """
    signature = signature_of(program, call) if is_foreign(call.target) else None
    metas = [program.slots[slot] for slot in call.refs()]
    is_on_cpu = all(meta is None or meta.device.type == "cpu" for meta in metas)
    if signature is None or signature in _learned or not is_on_cpu:
        yield
        return
    try:
        start_allocator_events()
    except (AttributeError, TypeError, RuntimeError):  # such as under the user's own profiler
        yield
        return
    try:
        yield
    finally:
        peak, live = _peak_and_live(stop_allocator_events())
    # What it has made, and what it keeps for later calls, is alive now.
    taken = max(peak - max(live, 0), 0)
    with _one_at_a_time:
        _learned[signature] = taken if taken >= _LEAST_BYTES else 0
        retain(_KIND, {signature: _learned[signature]}, torch.device("cpu"))
    if _learned[signature]:
        news.append(call)


def releases(
    program: Program,
    device: torch.device,
    taken: Mapping[int, int],
    deadline: float | None = None,
    room_bytes: int | None = None,
) -> dict[int, tuple[Release, ...]]:
    """What compiled regions free while they run, if that makes a difference.

    Args:
        program, device, deadline, room_bytes: as for `workspaces`; a region that cannot be tried
            holds its arguments, as far as anybody knows.
        taken: what `workspaces` has found.

    Returns:
        For each such region one or two releases: one that holds if everything that dies in the
            region lies outside of the pool, and one that holds if only what other regions have made
            does.
    """
    found: dict[int, tuple[Release, ...]] = {}
    learned: dict[object, int] = {}
    with _one_at_a_time:
        wanted: dict[object, tuple[int, tuple[int, ...]]] = {}
        of_call: dict[int, list[tuple[object, tuple[int, ...]]]] = {}
        for index, storages in released(program).items():
            if not _is_tried(program, index, device):
                continue
            signature = signature_of(program, program.calls[index])
            calls = program.calls
            by_regions = tuple(
                one for one in storages if is_region(calls[program.storages[one].creator].target)
            )
            for some in dict.fromkeys((storages, by_regions)):
                if some:
                    key = signature, "releases", _places(program, index, some)
                    wanted.setdefault(key, (index, some))
                    of_call.setdefault(index, []).append((key, some))
        unknown = {key: one for key, one in wanted.items() if key not in _learned}
        is_kept = bool(unknown) and device.type == "cpu"
        if is_kept:
            recalled = recall(_KIND, unknown, device)
            _learned.update(recalled)
            unknown = {key: one for key, one in unknown.items() if key not in recalled}

        def learn() -> None:
            for key, (index, storages) in unknown.items():
                if deadline is not None and time.monotonic() > deadline:
                    return
                if (
                    room_bytes is not None
                    and _released_bytes(program, index, storages) > room_bytes
                ):
                    continue
                try:
                    peak_bytes = _peak_releasing(program, index, storages, device)
                except Exception:  # noqa: BLE001 - as in `_learn`
                    continue
                held_bytes = _released_bytes(program, index, storages) + taken.get(index, 0)
                learned[key] = max(held_bytes - peak_bytes, 0)

        try:
            if unknown:
                _watched(device, learn)
        except Unknown:
            return {}
        _learned.update(learned)
        if is_kept:
            retain(_KIND, learned, device)
        for index, keys in of_call.items():
            of_this = tuple([Release(storages, _learned.get(key, 0)) for key, storages in keys])
            if any(one.saved_bytes for one in of_this):
                found[index] = of_this
    return found


def _places(program: Program, index: int, storages: Sequence[int]) -> tuple[int, ...]:
    """Where among a call's arguments storages are."""
    slots = program.calls[index].refs()
    return tuple(n for n, slot in enumerate(slots) if program.storage_of(slot) in storages)


def _released_bytes(program: Program, index: int, storages: Sequence[int]) -> int:
    """Bytes of what a call releases and of what it makes."""
    made = {program.storage_of(slot) for slot in _made(program, index)}
    return sum(program.storages[number].size_bytes for number in made.union(storages))


def _peak_releasing(
    program: Program, index: int, storages: Sequence[int], device: torch.device
) -> int:
    """The most that is allocated while a region runs, including those of its arguments that lie in
    some storages and that it frees.
    """
    call = program.calls[index]
    run = on_list(call.target)
    assert run is not None, "a compiled region"
    kept = [slot for slot in call.refs() if program.storage_of(slot) not in storages]
    held: dict[int, Any] = dict(
        zip(
            kept, zeros(program, [Ref(slot) for slot in kept], is_one=not call.mutates), strict=True
        )
    )

    def arguments() -> list[Any]:
        gone = [slot for slot in call.refs() if slot not in held]
        fresh = zeros(program, [Ref(slot) for slot in gone])
        values = held | dict(zip(gone, fresh, strict=True))
        return list(substitute(call.args, lambda ref: values[ref.slot]))

    def work() -> list[torch.Tensor]:
        results = pytree.tree_leaves(run(arguments()))
        return [result for result in results if isinstance(result, torch.Tensor)]

    with torch.random.fork_rng(range(torch.cuda.device_count()), enabled=call.random):
        if device.type == "cuda":
            work()
            before_bytes = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            work()
            return torch.cuda.max_memory_allocated() - before_bytes
        peak_bytes, kept_bytes = _most_cpu(work)[:2]
        return _most_cpu(work)[0] if kept_bytes else peak_bytes


def known() -> int:
    """How many kinds of calls have been tried in this process."""
    return len(_learned)


def _is_tried(program: Program, index: int, device: torch.device) -> bool:
    """Whether a call makes memory on the device, and nothing else."""
    call = program.calls[index]
    if not isinstance(call.target, OpOverload) or call.target.namespace not in ("aten", "roam"):
        return False  # who knows what else it does
    # What a compiled region changes and draws comes back; of other calls that change something
    # little is known, unless it is their `out`.
    is_known = (
        is_region(call.target)
        or call.target in ATTENTION
        or call.name in _KNOWN
        or (_changes_alone(program, index) and _converts(program, call))
    )
    if not is_known and (call.mutates or call.random or not _made(program, index)):
        return False
    metas = [program.slots[slot] for slot in (*call.refs(), *_made(program, index))]
    if any(meta is not None and 0 in meta.shape for meta in metas):
        return False  # some kernels end the process: those before them refuse such tensors
    # Live numbers have none. Attention may keep its seed, one number, on the CPU.
    return all(meta is None or meta.device == device or not meta.shape for meta in metas)


def _changes_alone(program: Program, index: int) -> bool:
    """Whether all that a call does is to change arguments element by element, or at some places."""
    call = program.calls[index]
    if not call.mutates or call.random or _made(program, index) or is_region(call.target):
        return False
    return torch.Tag.pointwise in call.target.tags or call.name in _AT_PLACES


def _converts(program: Program, call: Call) -> bool:
    """Whether a kernel that changes arguments first makes other tensors from what it reads."""
    metas = [meta for slot in call.refs() if (meta := program.slots[slot]) is not None]
    return call.name in _AT_PLACES or len({meta.dtype for meta in metas if meta.shape}) > 1


def touched_bytes(program: Program, call: Call) -> int:
    """Bytes of all that a call reads, changes and makes."""
    slots = [slot for slot in (*call.refs(), *call.outputs) if slot is not None]
    storages = {program.storage_of(slot) for slot in slots if program.storage_of(slot) >= 0}
    return sum(program.storages[storage].size_bytes for storage in storages)


def _trial_bytes(program: Program, index: int) -> int:
    """Bytes that trying a call takes, except for what its kernel takes: see `_taken`. The scratch
    memory of tiles is a part of that: if there is too little room, the total of their plan tells.
    """
    call = program.calls[index]
    scratch_bytes = body_of(call.args[1]).scratch_bytes if call.target is TILES else 0
    if call.mutates or wants_values(call):
        return touched_bytes(program, call) - scratch_bytes
    made = {program.storage_of(slot) for slot in _made(program, index)}
    read = {program.storage_of(slot) for slot in call.refs() if program.slots[slot] is not None}
    sizes = [program.storages[number].size_bytes for number in read - made]
    made_bytes = sum(program.storages[number].size_bytes for number in made)
    return max(sizes, default=0) + made_bytes - scratch_bytes


def _is_written(at: Placed | None) -> bool:
    """Whether a call's kernel writes its results where a plan says."""
    return at is not None and not at.by_rows


def _allocates(program: Program, call: Call, at: Placed, device: torch.device) -> bool:
    """Whether a kernel that writes where a plan says may have memory of its own all the same.

    The tests that cleared it refused only what allocates more than the ordinary call does, besides
    the result. Kernels convert arguments to the dtype that they compute in, and put arguments into
    an order that they can go through, or that a library takes. On CUDA, what a library takes
    depends on shapes that no test had.
    """
    name = call.name.partition(".")[2]
    if device.type == "cuda" or name.startswith(_IN_STEPS):
        return True
    inputs = [meta for slot in call.refs() if (meta := program.slots[slot]) is not None]
    if any(meta.is_conj or meta.is_neg for meta in inputs):
        return True
    if at.placement.name in _MOVES or at.workspace_bytes:
        # Otherwise it takes nothing, or it is known what.
        return any(_is_turned(meta) for meta in inputs)
    dtypes = {meta.dtype for meta in inputs}
    if name in _PRODUCTS:
        small_float32 = float32_precisions("mkldnn")[0] not in ("none", "ieee")
        return (
            not dtypes <= _PLAIN
            or (torch.float32 in dtypes and small_float32)  # it is computed in one that is smaller
            or not all(_is_matrix(meta) for meta in inputs)
        )
    results = [None if slot is None else program.slots[slot] for slot in call.outputs]
    made = {meta.dtype for meta in results if meta is not None}
    if torch.Tag.pointwise in call.target.tags:
        # Comparisons of whole numbers and choices may be with live numbers of another kind.
        is_exact = not any(dtype.is_floating_point for dtype in dtypes)
        is_compared = torch.bool in made and not is_exact
        return len(dtypes) > 1 or not (is_compared or made <= dtypes - {torch.bool})
    numbers = (dtypes | made) - {torch.int64}  # which are indices mostly
    is_plain = len(numbers) <= 1 and numbers <= _PLAIN and made <= {*dtypes, torch.int64}
    return bool(inputs) and (not is_plain or any(layout(meta) != "C" for meta in inputs))


def _is_turned(meta: TensorMeta) -> bool:
    """Whether a copy turns a matrix, which it does block by block, each by way of a buffer."""
    return len(meta.shape) == 2 and meta.stride == (1, meta.shape[0]) and min(meta.shape) > 1


def _is_matrix(meta: TensorMeta) -> bool:
    """Whether libraries for matrix products take a tensor as it is: rows or columns lie one after
    the other, each without gaps.
    """
    if len(meta.shape) < 2:
        return True
    (rows, columns), (row, column) = meta.shape[-2:], meta.stride[-2:]
    return (column == 1 and row >= columns) or (row == 1 and column >= rows)


def _made(program: Program, index: int) -> list[int]:
    """Slots of the results that have memory of their own."""
    slots = [
        slot
        for slot in program.calls[index].outputs
        if slot is not None and program.storage_of(slot) >= 0
    ]
    return [slot for slot in slots if program.storages[program.storage_of(slot)].creator == index]


def signature_of(program: Program, call: Call) -> object:
    """All that may decide what a kernel takes, of memory and of time."""
    storages: dict[int, int] = {}

    def told(meta: TensorMeta | None) -> tuple[object, ...]:
        if meta is None:
            return ("number",)
        shared = storages.setdefault(meta.storage, len(storages))
        bits = (meta.is_conj, meta.is_neg) if meta.is_conj or meta.is_neg else ()
        return meta.shape, meta.stride, meta.offset, meta.dtype, meta.device, shared, *bits

    arguments = substitute((call.args, call.kwargs), lambda ref: told(program.slots[ref.slot]))
    if wants_values(call):
        slots = [program.slots[slot] for slot in call.outputs if slot is not None]
        arguments = *arguments, [meta and meta.shape for meta in slots]
    return call.name, repr(arguments), settings()


def settings() -> tuple[object, ...]:
    """What decides which kernels run, apart from their arguments."""
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        *map(float32_precisions, ("mkldnn", "cuda")),
        *kernel_library_switches(),
    )


def _learn(
    program: Program,
    placed: Sequence[Placed | None],
    unknown: dict[object, int],
    device: torch.device,
    deadline: float | None,
) -> dict[object, int]:
    learned: dict[object, int] = {}
    for signature, index in unknown.items():
        if deadline is not None and time.monotonic() > deadline:
            raise Unknown
        try:
            _learned[signature] = learned[signature] = _taken(program, index, placed[index], device)
        except Unknown:
            raise
        except Exception:  # noqa: BLE001 - it does not like zeros, or there is no memory for them; the step is run all the same
            _learned[signature] = 0
    return learned


def _taken(program: Program, index: int, at: Placed | None, device: torch.device) -> int:
    """Bytes that a call takes at most beyond its results, by the kernel that runs it."""
    call = program.calls[index]
    slots = _made(program, index) if _is_written(at) else []
    # Arguments that the call only reads can share one memory of zeros. If it writes to one of them,
    # what it writes could be a wrong index in another.
    is_one = not call.mutates and not wants_values(call)
    args, kwargs = zeros(program, (call.args, call.kwargs), is_one=is_one)
    set_values(program, call, args)
    outs = zeros(program, [Ref(slot) for slot in slots])
    peak = _peak_cuda if device.type == "cuda" else _peak_cpu

    def run() -> list[torch.Tensor]:
        if at is not None and not at.by_rows:
            kernel, given, named = at.placement.call(args, kwargs, outs)
            in_parts(kernel)(*given, **named)
            return []
        results = pytree.tree_leaves(call.target(*args, **kwargs))
        if call.name in _TO_OUT or _changes_alone(program, index):
            return []
        return [result for result in results if isinstance(result, torch.Tensor)]

    with torch.random.fork_rng(range(torch.cuda.device_count()), enabled=call.random):
        taken, kept = peak(run)
        # What the kernel keeps allocated it made for the first call alone.
        taken = peak(run)[0] if kept else taken
    is_little = device.type == "cpu" and _is_written(at) and taken < _LEAST_BYTES
    return 0 if is_little and call.target is not TILES else taken


def in_parts(kernel: Callable[..., object]) -> Callable[..., object]:
    """A kernel that takes as much memory, and less time where the kernel does the same over and
    over again: it then returns how much longer all takes.
    """
    return run_some_into if kernel is run_into else kernel


def zeros(program: Program, arguments: Any, *, is_one: bool = False) -> Any:
    """Arguments of a call that consist of zeros, which are valid as numbers, indices and choices.
    Live numbers are 1.0, and a tensor that may be the state of a generator is a real state.

    Args:
        program: the program.
        arguments: a nest with references to its slots.
        is_one: whether all share the memory of the largest, which must not be written to then.
    """
    sizes: dict[object, int] = {}
    storages: dict[object, torch.UntypedStorage] = {}

    def name(meta: TensorMeta) -> object:
        return meta.device if is_one else meta.storage

    def size(meta: TensorMeta | None) -> None:
        if meta is not None:
            size_bytes = program.storages[meta.storage].size_bytes
            sizes[name(meta)] = max(sizes.get(name(meta), 0), size_bytes)

    def made(meta: TensorMeta | None) -> torch.Tensor | float:
        if meta is None:
            return 1.0
        if is_state(meta.shape, meta.dtype, meta.device):
            return torch.get_rng_state()
        if name(meta) not in storages:
            storages[name(meta)] = torch.zeros(
                sizes[name(meta)], dtype=torch.uint8, device=meta.device
            ).untyped_storage()
        view = torch.empty(0, dtype=meta.dtype, device=meta.device)
        view.set_(storages[name(meta)], meta.offset, meta.shape, meta.stride)
        return with_bits(view, meta.is_conj, meta.is_neg)

    substitute(arguments, lambda ref: size(program.slots[ref.slot]))
    return substitute(arguments, lambda ref: made(program.slots[ref.slot]))


def is_state(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a tensor may be a state of the CPU's generator, which no zeros are: compiled regions
    with checkpoints inside keep one for their backward graph.
    """
    return dtype == torch.uint8 and device.type == "cpu" and tuple(shape) == _state_shape()


@cache
def _state_shape() -> tuple[int, ...]:
    return tuple(torch.get_rng_state().shape)


def _watched(device: torch.device, work: Callable[[], None]) -> None:
    """Runs the work where the device's allocator can be watched, and none of the caller's modes get
    in between.
    """
    if device.type == "cuda":
        with torch.cuda.device(device), kernels_alone(device.type):
            work()
        # What the runs have left with the allocator is in sizes that the step may have no use for.
        torch.cuda.empty_cache()
        return
    if device.type != "cpu":
        raise Unknown
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with kernels_alone(device.type):
                work()
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            failures.append(error)

    # A profiler belongs to its thread. So if one runs in the caller's thread already, this one does
    # not meet it.
    thread = threading.Thread(target=run, name="roam workspaces")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


@contextmanager
def kernels_alone(device: str) -> Iterator[None]:
    """Calls inside run kernels of that type of device, and none of the caller's modes."""
    with ExitStack() as stack:
        stack.enter_context(disable_current_modes())
        stack.enter_context(torch.no_grad())
        if torch.amp.is_autocast_available(device):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _peak_cpu(run: Callable[[], list[torch.Tensor]]) -> tuple[int, int]:
    """The most that a run has allocated beyond its results, and what it keeps allocated."""
    peak, live, result_bytes = _most_cpu(run)
    return max(peak - result_bytes - live, 0), live


def _most_cpu(run: Callable[[], list[torch.Tensor]]) -> tuple[int, int, int]:
    """The most that a run has allocated, what it keeps allocated, and the bytes of its results.

    This profiler is the old one, which starts at once; `torch.profiler` takes seconds at its first
    use.
    """
    try:
        start_allocator_events()
    except (AttributeError, TypeError, RuntimeError) as error:
        raise Unknown from error
    try:
        # The results are freed before the profiler stops, which would otherwise miss their release.
        result_bytes = _storage_bytes(run())
    finally:
        events = stop_allocator_events()
    return *_peak_and_live(events), result_bytes


def _peak_and_live(events: Any) -> tuple[int, int]:
    """The most that was allocated at once, and what is left."""
    live = peak = 0
    for event in itertools.chain.from_iterable(
        events
    ):  # those that are not of the allocator have no bytes
        live += event.cpu_memory_usage()
        peak = max(peak, live)
    return peak, live


def _storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    storages = {c_pointer(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _peak_cuda(run: Callable[[], list[torch.Tensor]]) -> tuple[int, int]:
    """As `_peak_cpu`, by the counters of the device's allocator."""
    run()  # once before: libraries try algorithms, and make handles that stay
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del results
    return taken, torch.cuda.memory_allocated() - before
