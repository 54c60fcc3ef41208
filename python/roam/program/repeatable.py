"""Which calls of a program may run again: from the same inputs they make the same bits, and they
change nothing but what they make, or what the step has made and is made again with them.

Schemas and tags say what a kernel does; what they do not say is listed here. That the bits are
equal is shown by `tests/program/test_repeatable.py`, which runs every such call of real steps
twice. Random calls may run again where the state of their generator has been read
(`random_states.py`). Of collectives, all-gathers may run again: they only move what every rank
still has. Kernels of others may run again on the CPU unless tags say otherwise, if they make all
that they change: the first run of a plan compares the bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from roam.distributed.collectives import is_collective, is_launch
from roam.program.ir import Call, Program, Ref, TensorMeta
from roam.program.operators import is_foreign, is_ours, is_region
from roam.program.pages import Fetch
from roam.program.replay import Replay
from roam.program.tier import Load
from roam.torch_compat.private import OpOverload, schema_of

aten = torch.ops.aten

_NEVER = frozenset(
    f"aten::{name}"
    for name in (
        # Among equal elements, or elements that go to one place, they may take another one each
        # time.
        "topk", "sort", "argsort", "msort", "kthvalue", "median", "nanmedian", "mode",
        "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_", "put", "put_",
        "index_copy", "index_copy_",
    )
)  # fmt: skip
"""Operators that may choose another route when they run again."""
_NEVER_ON_CUDA = frozenset(
    f"aten::{name}"
    for name in (
        # Sums of what goes to one place, in the order in which threads come.
        "index_add", "index_add_", "index_reduce", "index_reduce_", "scatter", "scatter_",
        "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_select_backward",
        "gather_backward", "take_backward", "embedding_dense_backward", "embedding_backward",
        "_embedding_bag", "_embedding_bag_forward_only", "embedding_bag", "bincount", "histc",
        "cumsum", "cumsum_", "cumprod", "cumprod_", "logcumsumexp", "segment_reduce", "_cdist_backward",
        "nll_loss2d_forward", "_ctc_loss", "_ctc_loss_backward", "max_unpool2d", "max_unpool3d",
        "grid_sampler_2d_backward", "grid_sampler_3d_backward",
        # Algorithms that are chosen by how much memory is free, or by trial.
        "convolution_backward", "cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn",
        "_cudnn_rnn_backward",
    )
)  # fmt: skip
"""Operators that are sums by atomic operations on CUDA, or choose an algorithm there."""
_CUDA_FAMILIES = (
    "adaptive_avg_pool", "adaptive_max_pool", "avg_pool3d", "fractional_max_pool", "max_pool",
    "reflection_pad", "replication_pad", "upsample", "_upsample", "_scaled_dot_product",
    "_flash_attention", "_efficient_attention",
)  # fmt: skip
"""How operators begin whose backward passes are such sums on CUDA."""

_GATHERS = frozenset({"_allgather_base_", "allgather_"})
"""Collectives whose results are parts of the ranks' inputs, bit for bit."""
_NORMS: dict[Any, Any] = {
    aten.native_batch_norm.default: aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default: aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default: aten.miopen_batch_norm.default,
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit.no_stats,
}
"""Batch norms, each with the operator of its further runs. All have their running statistics, and
whether they are in training, at the same places."""
_STATISTICS = slice(3, 5)
_TRAINING = 5


@dataclass(frozen=True, slots=True)
class Repeat:
    """How a call runs again.

    Attributes:
        call: what is called then.
        first_only: storages that only the first run of the call touches.
    """

    call: Call
    first_only: tuple[int, ...] = ()


def repeats(
    program: Program, known: tuple[Program, Sequence[Repeat | None]] | None = None
) -> list[Repeat | None]:
    """For each call, how it may run again; None if it may not, so that its results are kept.

    Args:
        program: the calls.
        known: a program of the same structure, with what was found for it: the same holds for the
            very same calls.
    """
    views = {
        slot
        for index, call in enumerate(program.calls)
        for slot in call.outputs
        if slot is not None and not _is_made(program, slot, index)
    }
    launches = {
        slot: call for call in program.launches() for slot in call.outputs if slot is not None
    }
    updates = _updates_of_copies(program)

    def repeat_of(index: int, call: Call) -> Repeat | None:
        if index in updates:
            return None
        if known is not None and call is known[0].calls[index]:
            return known[1][index]
        return _repeat(program, call, views, launches)

    return [repeat_of(index, call) for index, call in enumerate(program.calls)]


def _updates_of_copies(program: Program) -> set[int]:
    """Calls of an optimizer that change what the step has made and what a forward pass has read,
    such as the weights of a model's copy. They run once. To make earlier weights again, all updates
    since the copy and their gradients would have to run again. If the search tried that, it found
    no plan for budgets that can be kept.
    """
    has_read: set[int] = set()
    updates: set[int] = set()
    for index, call in enumerate(program.calls):
        if call.phase in ("forward", "loss"):
            has_read.update(map(program.storage_of, call.refs()))
        elif call.phase == "update" and any(
            (storage := program.storage_of(slot)) in has_read
            and program.storages[storage].creator >= 0
            for slot in call.mutates
        ):
            updates.add(index)
    return updates


def gathers_again(repeats: Sequence[Repeat | None]) -> bool:
    """Whether collectives are among what may run again. Then all ranks have to choose the same."""
    return any(repeat is not None and is_launch(repeat.call.target) for repeat in repeats)


def _gather(program: Program, call: Call, launches: Mapping[int, Call]) -> Repeat | None:
    """A launch of an all-gather, or the wait for one. Both run again, or neither: both change what
    is gathered, so the two make it together.
    """
    launch = call if is_launch(call.target) else launches[call.args[0].slot]
    is_local = all(program.storages[program.storage_of(slot)].creator >= 0 for slot in call.mutates)
    if launch.target.kind not in _GATHERS or not call.mutates or not is_local:
        return None
    return Repeat(call)


def _repeat(
    program: Program, call: Call, views: set[int], launches: Mapping[int, Call]
) -> Repeat | None:
    if is_collective(call.target):
        return None if call.skip_if is not None else _gather(program, call, launches)
    if isinstance(call.target, Load):
        tensor, stored = call.args
        if tensor is None:  # it is such a run itself
            return Repeat(call)
        return Repeat(replace(call, args=(None, stored)), (program.storage_of(tensor.slot),))
    if isinstance(call.target, Fetch):
        return Repeat(call)
    if call.skip_if is not None or call.is_check:
        return None
    if not is_ours(call.target) and (not is_foreign(call.target) or call.mutates):
        return None
    if any(slot is not None and program.slots[slot] is None for slot in call.outputs):
        return None  # numbers stay available
    tensors = [
        meta
        for slot in (*call.refs(), *call.outputs)
        if slot is not None and slot != call.state and (meta := program.slots[slot]) is not None
    ]
    if not is_exact(call, tensors):
        return None
    if call.target in _NORMS and call.mutates:
        return _norm(program, call, views)
    if is_region(call.target) and call.mutates:
        return None  # it may take the memory of what it has used
    is_local = all(program.storages[program.storage_of(slot)].creator >= 0 for slot in call.mutates)
    if not is_local or not (call.mutates or any_of(call.outputs)):
        return None
    return Repeat(call if call.state is None else _replayed(call, call.state, tensors))


def any_of(slots: Sequence[int | None]) -> bool:
    """Whether there is a result."""
    return any(slot is not None for slot in slots)


def _is_made(program: Program, slot: int, index: int) -> bool:
    """Whether a call makes the memory that a result is in, or a number."""
    storage = program.storage_of(slot)
    return storage < 0 or program.storages[storage].creator == index


def is_exact(call: Call, tensors: Sequence[TensorMeta]) -> bool:
    """Whether the kernel gives the same bits for the same arguments."""
    facts = _facts(call.target)
    is_drawing = facts.is_random and call.state is None and _dropout(call) != 0
    if not facts.is_exact or is_drawing:
        return False
    # A number in a tensor may be on the CPU.
    devices = {meta.device.type for meta in tensors if meta.shape}
    return len(devices) <= 1 and ("cuda" not in devices or facts.is_exact_on_cuda)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known of an operator."""

    is_exact: bool
    is_exact_on_cuda: bool
    is_random: bool
    dropout: int | None
    """Where the probability of its dropout stands."""


@functools.cache
def _facts(target: OpOverload) -> _Facts:
    schema, tags = schema_of(target), set(target.tags)
    name = schema.name
    is_named = name in _NEVER or any(
        tag in tags
        for tag in (
            torch.Tag.nondeterministic_bitwise, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape,
            torch.Tag.inplace_view,
        )
    )  # fmt: skip
    base = name.partition("::")[2]
    is_sum = base.startswith(_CUDA_FAMILIES) and base.endswith("_backward")
    places = [
        place for place, argument in enumerate(schema.arguments) if argument.name == "dropout_p"
    ]
    return _Facts(
        is_exact=not is_named,
        is_exact_on_cuda=name not in _NEVER_ON_CUDA
        and not is_sum
        and is_ours(target)
        and not is_region(target),
        is_random=torch.Tag.nondeterministic_seeded in tags,
        dropout=places[0] if places else None,
    )


def _dropout(call: Call) -> Any:
    """The probability of a call's dropout; None if it has none, and is random otherwise."""
    place = _facts(call.target).dropout
    if place is None:
        return None
    argument = schema_of(call.target).arguments[place]
    given = call.args[place : place + 1]
    return given[0] if given else call.kwargs.get(argument.name, argument.default_value)


def _replayed(call: Call, state: int, tensors: Sequence[TensorMeta]) -> Call:
    """A random call that draws from a state. The state is its last argument, so that its `refs`
    have the order of the original call's.
    """
    target = Replay(call.target, tensors[0].device)
    kwargs = {**call.kwargs, "state": Ref(state)}
    return replace(call, target=target, kwargs=kwargs, random=False, state=None)


def _norm(program: Program, call: Call, views: set[int]) -> Repeat | None:
    """A batch norm in training, which leaves its running statistics alone when it runs again.

    What it makes of a batch does not depend on them, as long as they do not decide in which dtype
    it makes it.
    """
    statistics = [value.slot for value in call.args[_STATISTICS] if isinstance(value, Ref)]
    others = [value for value in call.args[: _STATISTICS.start] if isinstance(value, Ref)]
    storages = dict.fromkeys(map(program.storage_of, statistics))
    dtype, *dtypes = [meta.dtype for ref in others if (meta := program.slots[ref.slot])]
    of_statistics = {meta.dtype for slot in statistics if (meta := program.slots[slot])}
    if (
        set(call.mutates) != set(statistics)
        or call.args[_TRAINING] is not True
        or not views.isdisjoint(statistics)
        or not storages.keys().isdisjoint(program.storage_of(ref.slot) for ref in others)
        or of_statistics != set(dtypes or [dtype])
    ):
        return None
    args = list(call.args)
    target = _NORMS[call.target]
    args[_STATISTICS] = [None, None] if target is call.target else []
    return Repeat(replace(call, target=target, args=tuple(args), mutates=()), tuple(storages))
