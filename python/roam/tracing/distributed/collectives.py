"""Records collectives of `torch.distributed` without calling the group: each as launch and wait.

Operators of `torch.ops.c10d` write into tensors that they are given and return a handle. Functional
collectives return a new tensor, to be waited for: this tensor is made here, and then written to in
the same way. A step may use what a collective writes only after it has waited. So the wait is
recorded directly after the launch, and the plan decides how far apart the two are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import torch

from roam.distributed.collectives import KINDS, REDUCTIONS, Group, Launch, launch, wait
from roam.program.ir import Call, Program, Ref, Source
from roam.torch_compat.private import finished_work, resolve_group, schema_of

aten = torch.ops.aten
_COLLECTIVES = frozenset(
    {
        "c10d",
        "c10d_functional",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "fsdp",
        "symm_mem",
        "_dtensor",
    }
)


class Recording(Protocol):
    """The part of a recorder that is needed here."""

    def refuse_collective(self, name: str) -> NoReturn: ...
    def add_collective(
        self, target: Launch, outputs: Sequence[Any], inputs: Sequence[Any]
    ) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...


def is_collective(func: Any) -> bool:
    """Whether an operator brings processes together."""
    return func.namespace in _COLLECTIVES


def record(recorder: Recording, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records a collective, and gives what it returns.

    Raises:
        CaptureError: the collective cannot be recorded.
    """
    name = schema_of(func).name.partition("::")[2]
    given = _named(func, args, kwargs)
    if func.namespace == "c10d" and name in KINDS:
        return _in_place(recorder, func, name, given)
    functional = _FUNCTIONAL.get(name) if func.namespace == "_c10d_functional" else None
    if functional is None:
        recorder.refuse_collective(str(func))
    with recorder:  # what makes the result is recorded like any other operator
        return functional(recorder, func, given)


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = schema_of(func).arguments
    names = [argument.name for argument in arguments]
    found = {
        argument.name: argument.default_value
        for argument in arguments
        if argument.has_default_value()
    }
    return {**found, **dict(zip(names, args, strict=False)), **kwargs}


# -- operators of c10d

_WRITTEN = ("tensors", "output_tensors", "output_tensor", "output")
_READ = ("input_tensors", "input_tensor", "input")


def _in_place(recorder: Recording, func: Any, name: str, given: dict[str, Any]) -> Any:
    group = torch.distributed.ProcessGroup.unbox(given["process_group"])
    written = [given[key] for key in _WRITTEN if key in given]
    outputs, inputs = _flat(written), _flat([given[key] for key in _READ if key in given])
    reduction = _reduction(recorder, func, given)
    if given.get("sparse_indices") is not None or any(
        tensor.is_complex() or tensor.layout is not torch.strided for tensor in (*outputs, *inputs)
    ):
        recorder.refuse_collective(f"{func} of tensors that are not dense and real")
    splits: tuple[tuple[int, ...], tuple[int, ...]] = (
        tuple(given.get("output_split_sizes", ())), tuple(given.get("input_split_sizes", ()))
    )  # fmt: skip
    target = launch(name, Group.of(group), reduction, int(given.get("root_rank", -1)), splits)
    recorder.add_collective(target, outputs, inputs)
    work = finished_work()
    return work if len(schema_of(func).returns) == 1 else (next(iter(written), None), work)


def _flat(nest: Any) -> list[Any]:
    return (
        [nest] if isinstance(nest, torch.Tensor) else [one for item in nest for one in _flat(item)]
    )


def _reduction(recorder: Recording, func: Any, given: dict[str, Any]) -> str:
    """The reduction that an operator is given; empty if it reduces nothing."""
    if "reduce_op" not in given:
        return ""
    reduction = given["reduce_op"]
    if isinstance(reduction, str):
        if reduction.upper() in REDUCTIONS:
            return reduction.upper()
        recorder.refuse_collective(f"{func} with the reduction {reduction}")
    if not isinstance(reduction, torch.distributed.ReduceOp):
        unbox = getattr(torch.distributed.ReduceOp, "unbox", None)
        if unbox is None:  # as in PyTorch 2.11
            recorder.refuse_collective(f"{func}, whose reduction this version of PyTorch hides")
        reduction = unbox(reduction)
    for name in REDUCTIONS:
        if reduction == getattr(torch.distributed.ReduceOp, name):
            return name
    recorder.refuse_collective(f"{func} with the reduction {reduction}")


# -- functional operators, which make their results


def _group(given: dict[str, Any]) -> Group:
    name = given["group_name"]
    return Group.of(
        resolve_group(name) if isinstance(name, str) else torch.distributed.ProcessGroup.unbox(name)
    )


def _in_its_place(kind: str, recorder: Recording, func: Any, given: dict[str, Any]) -> Any:
    """Changes its input."""
    reduction = _reduction(recorder, func, given)
    target = launch(kind, _group(given), reduction, int(given.get("src", -1)))
    recorder.add_collective(target, [given["input"]], [])
    return given["input"]


def _on_copy(kind: str, recorder: Recording, func: Any, given: dict[str, Any]) -> Any:
    """The same of a copy of its input."""
    made = aten.clone.default(given["input"], memory_format=torch.contiguous_format)
    return _in_its_place(kind, recorder, func, {**given, "input": made})


def _empty(like: Any, rows: int) -> Any:
    sizes = [rows, *like.shape[1:]]
    return aten.empty.memory_format(sizes, dtype=like.dtype, device=like.device)


def _resized(
    kind: str,
    rows: Callable[[int, int], int],
    recorder: Recording,
    func: Any,
    given: dict[str, Any],
) -> Any:
    """Gives as many rows as `rows` says for those of its input and the size of the group."""
    value = given["input"]
    target = launch(kind, _group(given), _reduction(recorder, func, given))
    made = given.get("out")
    if made is None:
        made = _empty(value, rows(value.shape[0], given["group_size"]))
    recorder.add_collective(target, [made], [value])
    return made


def _all_to_all(recorder: Recording, func: Any, given: dict[str, Any]) -> Any:
    value = given["input"]
    splits = tuple(given["output_split_sizes"]), tuple(given["input_split_sizes"])
    target = launch("alltoall_base_", _group(given), "", -1, splits)
    made = _empty(value, sum(splits[0]) if splits[0] else value.shape[0])
    recorder.add_collective(target, [made], [value])
    return made


def _waited(recorder: Recording, func: Any, given: dict[str, Any]) -> Any:
    """The tensor itself: its collective, if there was one, has been waited for already."""
    return given["tensor"] if "tensor" in given else list(given["tensors"])


_all_gather = partial(_resized, "_allgather_base_", operator.mul)
_reduce_scatter = partial(_resized, "_reduce_scatter_base_", operator.floordiv)
_FUNCTIONAL: dict[str, Callable[[Recording, Any, dict[str, Any]], Any]] = {
    "all_reduce": partial(_on_copy, "allreduce_"),
    "all_reduce_": partial(_in_its_place, "allreduce_"),
    "broadcast": partial(_on_copy, "broadcast_"),
    "broadcast_": partial(_in_its_place, "broadcast_"),
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_out": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_out": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "wait_tensor": _waited,
    "wait_tensors": _waited,
}


def calls_of(
    program: Program,
    target: Launch,
    outputs: Sequence[int],
    inputs: Sequence[int],
    pending: int,
    source: Source,
) -> list[Call]:
    """The launch and the wait on slots; `pending` stands for what is under way between them.

    Inputs that the step itself makes count as changed by both. Otherwise a plan within a memory
    limit could drop an input between launch and wait and make it again in other memory.
    """
    tensors = ([Ref(slot) for slot in outputs], [Ref(slot) for slot in inputs])
    made = [slot for slot in inputs if program.storages[program.storage_of(slot)].creator >= 0]
    mutates = tuple(dict.fromkeys([*outputs, *made]))
    phase = "collective"
    return [
        Call(target, tensors, {}, (pending,), False, phase, source, mutates=mutates),
        Call(wait, (Ref(pending), *tensors), {}, (None,), False, phase, source, mutates=mutates),
    ]
