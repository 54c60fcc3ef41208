"""Measures how long kernels take: each once per machine, shapes and settings, on zeros.

Times decide what runs again under a memory budget, so they are rounded coarsely, and kept on disk:
the same kernel has the same time in the next process, and the same step the same plan.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from roam.kernels.calls import Placed
from roam.kernels.kept import recall, retain
from roam.kernels.samples import set_values
from roam.kernels.workspace import (
    in_parts,
    kernels_alone,
    signature_of,
    touched_bytes,
    zeros,
)
from roam.program.ir import Call, Program
from roam.program.operators import is_ours
from roam.program.replay import generator_state
from roam.torch_compat.private import pytree

_PER_DOUBLING = 2
"""Times are powers of 2^(1 / this): rounding changes a time by 19 percent at most."""
_MOST_RUNS = 5
_ENOUGH_NS = 20_000_000
"""A kernel is run no further once its runs took this long."""
_LONG_NS = 500_000_000
"""A kernel of the CPU runs once if it takes this long: what is done at the first time is little."""

_KIND = "times"
_learned: dict[object, int | None] = {}
_one_at_a_time = threading.Lock()


def times(
    program: Program,
    placed: Sequence[Placed | None],
    calls: Iterable[int],
    device: torch.device,
    *,
    workspaces: Mapping[int, int],
    room_bytes: int,
    deadline: float | None = None,
) -> dict[int, int]:
    """Nanoseconds that calls' kernels take, rounded by `rounded`; for those that could be measured.

    A kernel runs once to warm up, and unless that takes long up to five times more; its time is the
    least of these. If its results can be placed, it writes into memory that exists already;
    otherwise it allocates them.
    The states of random generators are restored.

    Args:
        program: the program, of real tensors: kernels are run.
        placed: per call, what `placed_calls` says of it.
        calls: those to time.
        device: where the program runs.
        workspaces: per call, what its kernel takes for itself.
        room_bytes: no kernel is run whose arguments, results and workspace take more.
        deadline: the value of `time.monotonic` after which no more kernels are run.
    """
    signatures = {
        index: (signature_of(program, program.calls[index]), placed[index] is None)
        for index in calls
        if _is_timed(program, program.calls[index], device)
    }
    unknown = {one for one in signatures.values() if one not in _learned}
    _learned.update(recall(_KIND, unknown, device))
    learned: dict[object, int] = {}
    devices = range(torch.cuda.device_count()) if device.type == "cuda" else ()
    with _one_at_a_time, torch.random.fork_rng(devices), kernels_alone(device.type):
        for index, signature in signatures.items():
            if signature in _learned:
                continue
            if deadline is not None and time.monotonic() > deadline:
                break
            if (
                touched_bytes(program, program.calls[index]) + workspaces.get(index, 0)
                <= room_bytes
            ):
                time_ns = _measured(program, program.calls[index], placed[index], device)
                _learned[signature] = time_ns
                if time_ns is not None:
                    learned[signature] = time_ns
    retain(_KIND, learned, device)
    found = {index: _learned.get(signature) for index, signature in signatures.items()}
    return {index: time_ns for index, time_ns in found.items() if time_ns is not None}


def known() -> int:
    """How many kinds of calls have been timed in this process."""
    return len(_learned)


def rounded(time_ns: float) -> int:
    """The nearest power of the square root of two, at least 1."""
    return round(2 ** (round(math.log2(max(time_ns, 1)) * _PER_DOUBLING) / _PER_DOUBLING))


def completed(measured: Mapping[int, int], model: Sequence[int]) -> dict[int, int]:
    """A time for every call: the measured one, or the model's, multiplied by the quotient of all
    measured times and the model's times for the same calls; rounded in the same way.

    Args:
        measured: what `times` gives; not empty.
        model: per call nanoseconds by the cost model.
    """
    modelled = sum(int(model[index]) for index in measured)
    scale = sum(measured.values()) / max(modelled, 1)
    return {
        index: measured[index] if index in measured else rounded(int(time_ns) * scale)
        for index, time_ns in enumerate(model)
        if time_ns > 0
    }


def _is_timed(program: Program, call: Call, device: torch.device) -> bool:
    """Whether a call runs a kernel of PyTorch's or roam's, or reads a generator's state, on the
    device alone, and does so in every step.
    """
    if call.is_check or call.skip_if is not None:
        return False
    if not is_ours(call.target) and call.target is not generator_state:
        return False
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    if any(isinstance(leaf, (torch.Generator, torch.Tensor)) for leaf in leaves):
        return False
    used = [program.slots[slot] for slot in (*call.refs(), *call.outputs) if slot is not None]
    return all(meta is None or meta.device == device or not meta.shape for meta in used)


def _measured(program: Program, call: Call, at: Placed | None, device: torch.device) -> int | None:
    """The time of a call's kernel; None if the kernel fails on zeros, or if there is no memory for
    it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return rounded(_least_ns(_run_of(program, call, at), device))
    except Exception:  # noqa: BLE001 - the model tells its time; what is wrong with it the step will tell
        return None


def _run_of(program: Program, call: Call, at: Placed | None) -> Callable[[], object]:
    args, kwargs = zeros(program, (call.args, call.kwargs))
    set_values(program, call, args)
    target = call.target
    if at is not None and not at.by_rows:
        metas = (program.slots[slot] for slot in call.outputs if slot is not None)
        outs = [
            torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
            for meta in metas
            if meta is not None
        ]
        target, args, kwargs = at.placement.call(args, kwargs, outs)
        target = in_parts(target)
    return lambda: target(*args, **kwargs)


def _least_ns(run: Callable[[], object], device: torch.device) -> float:
    """Nanoseconds of the quickest of some runs after a first one, or of that if it takes long."""
    elapsed = _elapsed_cuda if device.type == "cuda" else _elapsed_cpu
    first, told = elapsed(run)
    taken: list[float] = []
    if first > _LONG_NS and device.type == "cpu":
        taken.append(first)
    else:
        while len(taken) < _MOST_RUNS and sum(taken) < _ENOUGH_NS:
            taken.append(elapsed(run)[0])
    return min(taken) * (told if isinstance(told, float) else 1)


def _elapsed_cpu(run: Callable[[], object]) -> tuple[float, object]:
    """Nanoseconds of a run, and what it returned."""
    start = time.perf_counter_ns()
    told = run()
    return time.perf_counter_ns() - start, told


def _elapsed_cuda(run: Callable[[], object]) -> tuple[float, object]:
    """The same by the device's own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    told = run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e6, told
