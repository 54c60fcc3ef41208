"""What `DistributedDataParallel` does to gradients and buffers, by the rules of its reducer in C++.

The reducer multiplies each gradient by one over the number of ranks and writes the product to its
place in a flat bucket. When all gradients of a bucket are there, it sums the bucket over all ranks,
bucket by bucket in their order. When the last gradient is there, it copies the sums back. With more
than two ranks the bits of a sum depend on the place in the bucket. The first backward pass has
other buckets than all later ones: the reducer notes in which order gradients come, and rank 0's
order decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roam.distributed.agreement import AGAIN, finished, leave
from roam.distributed.collectives import Group
from roam.errors import ExecutionError
from roam.torch_compat.private import (
    broadcast_buckets,
    comm_hook_of,
    ddp_parameters,
    disable_current_modes,
    expects_backward,
    is_ddp,
    is_joined,
    mark_begun,
    rebuild_buckets,
    reducer_data,
)

Buckets = list[list[int]]
"""For each bucket, the places of its parameters among the reducer's parameters, in the order of
their offsets.
"""

_PLAIN: dict[str, Any] = {
    "_use_python_reducer": False,
    "mixed_precision": None,
    "static_graph": False,
    "find_unused_parameters": False,
    "batched_grad_copy": False,
    "skip_all_reduce_unused_params": False,
    "_require_manual_backward_finalization": False,
    "is_multi_device_module": False,
    "_delay_all_reduce_params": [],
    "_delay_all_reduce_all_params": False,
    "_accum_grad_hooks": [],
    "_comm_hooks": [],
}
"""The values that attributes of a `DistributedDataParallel` must have, so that its reducer does
what is described above.
"""


def is_before_first_step(module: object) -> bool:
    """Whether a module is a `DistributedDataParallel` that may have yet to see the backward pass
    which decides its buckets.
    """
    return is_ddp(module) and not data_of(module).get("has_rebuilt_buckets")


def leave_first_step(ddp: Any) -> None:
    """After the first backward pass: the module has the buckets of later ones, and says so."""
    mark_begun(ddp, buckets_of(ddp) is not None)


def unsupported(ddp: Any) -> str | None:
    """Which of a module's options no plan can carry out, as text; None if there is none."""
    own = type(ddp).__mro__[: type(ddp).__mro__.index(torch.nn.parallel.DistributedDataParallel)]
    if any("forward" in vars(kind) for kind in own) or "forward" in vars(ddp):
        return f"{type(ddp).__name__} has a forward() of its own"
    for name, expected in _PLAIN.items():
        if (value := getattr(ddp, name, expected)) != expected:
            return f"{name.strip('_')} is {value!r}"
    if is_joined(ddp):
        return "it is called under join()"
    if hasattr(ddp, "buffer_hook"):
        return "it has a hook on its buffers' communication"
    if comm_hook_of(ddp):
        return "it has a communication hook"
    return None


def data_of(ddp: Any) -> dict[str, Any]:
    """What the reducer tells of itself, as it is now."""
    with disable_current_modes():
        return reducer_data(ddp)


def buckets_of(ddp: Any) -> Buckets | None:
    """The buckets of the next backward pass, rebuilt if they are due, as in a forward pass of the
    module's own; all ranks call it at the same time. None if the reducer has not seen its first
    backward pass yet, in which it has other buckets than later.

    Raises:
        ExecutionError: another rank has left, or the ranks' communication failed (code
            ``rank_left``).
    """
    data = data_of(ddp)
    if not data.get("has_rebuilt_buckets"):
        _rebuild(ddp)
        data = data_of(ddp)
    if not data.get("has_rebuilt_buckets"):
        return None
    text = data["rebuilt_per_bucket_param_indices"]
    return [[int(place) for place in part.split()] for part in text.split(",")]


def _rebuild(ddp: Any) -> None:
    """Rebuilds a module's buckets if they are due: rank 0 tells all others of its own."""
    group = Group.of(ddp.process_group)
    with disable_current_modes():
        try:
            if group.must_release():
                finished(group, lambda: rebuild_buckets(ddp.reducer))
            else:
                rebuild_buckets(ddp.reducer)
        except RuntimeError as error:
            if expects_backward(ddp.reducer):  # the user's mistake, as eager PyTorch says it
                raise
            reason = (
                f"the ranks could not agree on the buckets of a DistributedDataParallel: {error}"
            )
            leave({group: []}, reason)
            raise ExecutionError(f"{reason}; {AGAIN}", code="rank_left") from error


def parameters_of(ddp: Any, buckets: Buckets) -> list[torch.Tensor] | None:
    """The parameters that the reducer numbers; None if they do not fit its buckets, for example
    because some have been frozen or replaced since the module was made.
    """
    parameters = ddp_parameters(ddp)
    if sorted(place for bucket in buckets for place in bucket) != list(range(len(parameters))):
        return None
    sizes_bytes = [
        sum(parameters[place].numel() * parameters[place].element_size() for place in bucket)
        for bucket in buckets
    ]
    told = [int(size) for size in data_of(ddp)["rebuilt_bucket_sizes"].split(",")]
    return parameters if sizes_bytes == told else None


def buffers_of(ddp: Any) -> list[list[torch.Tensor]]:
    """The buffers that rank 0's replace before a forward pass, those of one message together."""
    buffers = [
        buffer
        for name, buffer in ddp.module.named_buffers()
        if name not in ddp.parameters_to_ignore
    ]
    return broadcast_buckets(buffers, ddp.broadcast_bucket_size)


def view_of(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A parameter's place in a bucket, with its strides where these leave no gap."""
    if is_dense(like):
        return flat.as_strided(like.shape, like.stride(), offset)
    return flat.narrow(0, offset, like.numel()).view(like.shape)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its memory without gap or overlap, in some order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def offsets_of(parameters: Sequence[torch.Tensor], bucket: Sequence[int]) -> list[int]:
    """Where each parameter of a bucket begins, in elements; the last is the bucket's size."""
    offsets = [0]
    for place in bucket:
        offsets.append(offsets[-1] + parameters[place].numel())
    return offsets


__all__ = [
    "Buckets", "buckets_of", "buffers_of", "is_before_first_step", "is_ddp", "leave_first_step", "offsets_of", "parameters_of", "unsupported", "view_of"
]  # fmt: skip
