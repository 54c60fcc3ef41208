"""Every private name of PyTorch's that roam uses, one function or alias each.

PyTorch promises none of these. `tests/torch_compat/test_torch_compat.py` has a canary for each,
which fails by name on a PyTorch that changed, and a test that no other file uses a private name.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import importlib
import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._dispatch.python import enable_python_dispatcher
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims_common import compute_elementwise_output_strides as strides_together
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    disable_fake_tensor_cache,
    in_kernel_invocation_manager,
)
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, _MakefxTracer
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

# -- modes

disable_current_modes = _disable_current_modes
"""Block without any dispatch mode."""
function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
"""The `TorchFunctionMode`s that are entered, the innermost last."""
dispatch_modes = _get_current_dispatch_mode_stack
"""The `TorchDispatchMode`s that are entered, the innermost last."""
count_function_modes = torch._C._len_torch_function_stack
"""How many function modes are entered: quicker than to ask for them."""
count_dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are entered."""
function_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""The innermost transform of `torch.func` that runs now; None outside of any."""
DisableTorchFunction: Any = torch._C.DisableTorchFunction
"""Block in which no `__torch_function__` is called."""
DisableTorchDispatch: Any = torch._C._DisableTorchDispatch
"""Block in which no `__torch_dispatch__` is called."""
DisableAutocast: Any = torch._C._DisableAutocast
"""Block in which autocast changes nothing."""
BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd
"""Block in which operators skip autograd's kernels."""
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device."""

left_by_dynamo = _disable_dynamo
"""Decorator of functions that `torch.compile` must not trace. PyTorch's public one imports the
compiler at once, which takes a second."""

# -- tensors and storages

TENSOR_DATA: Any = torch._C.TensorBase.__dict__["data"]
"""The descriptor of `x.data`, of all tensors, whatever a subclass has."""
version_of: Callable[[Any], int] = operator.attrgetter("_version")
"""How often a tensor's memory was written to: grows by one with each write that PyTorch knows of.
"""
c_pointer: Callable[[Any], int] = operator.attrgetter("_cdata")
"""The address of the C++ object of a storage or a generator: two Python objects of one storage have
the same."""
storage_pointer: Callable[[Any], int] = torch._C.StorageBase.__dict__["_cdata"].__get__
"""As `c_pointer`, of a storage, while attributes of storages are patched."""
storage_of: Callable[[Any], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage
"""A tensor's storage, also while that method is patched."""
storage_at: Callable[[int, torch.device, int], Any] = torch._C._construct_storage_from_data_pointer
"""A storage at an address, of a size in bytes, which does not own the memory."""
forbid_access: Callable[[int, str], None] = torch._C._set_storage_data_ptr_access_error_msg
"""From now on an error with this text is raised where the memory of a storage is asked for, by its
`c_pointer`."""
allow_access: Callable[[int], None] = torch._C._clear_storage_data_ptr_access_error_msg
"""Takes that back."""
STORAGES_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether two storages can swap their memory, since PyTorch 2.15."""
swap_memory: Callable[[Any, Any], None] = getattr(torch.UntypedStorage, "_swap_data_ptr_", print)
"""Gives each of two storages the memory of the other."""
weak_storage: Any = torch.UntypedStorage._weak_ref
"""A pointer to a storage that does not keep its memory."""
is_expired: Any = torch.UntypedStorage._expired
"""Whether that memory is gone, by the pointer."""
storage_by: Any = torch.UntypedStorage._new_with_weak_ptr
"""The storage, by the pointer."""
free_weak_storage: Any = torch.UntypedStorage._free_weak_ref
"""Lets go of the pointer."""
with_conj: Callable[[Any], Any] = torch._conj
"""A view that stands for the conjugate."""
with_neg: Callable[[Any], Any] = torch._neg_view
"""A view that stands for the negative."""
is_wrapped: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is that of a function transform, which has no storage of its own."""
storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors and Python objects hold a storage, by its `c_pointer`."""
tensor_uses: Callable[[Any], int] = torch.Tensor._use_count
"""How many holders the C++ object of a tensor has; Python counts as one of them."""
hooks_of: Callable[[Any], Any] = operator.attrgetter("_backward_hooks")
"""A tensor's hooks on its gradient; None if there are none."""
gradient_hooks_of: Callable[[Any], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
"""A leaf's hooks after its gradient is accumulated; None if there are none."""
ASKS_FOR_FAKES: Sequence[tuple[Any, str]] = (
    (torch._guards, "detect_fake_mode"),
    (torch._subclasses.fake_tensor, "is_fake"),
    (torch.utils._python_dispatch, "_get_current_dispatch_mode"),
    (torch.utils._python_dispatch, "_get_current_dispatch_mode_stack"),
    (torch.utils._python_dispatch, "is_in_torch_dispatch_mode"),
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_dispatch_keys"),
)
"""Functions, each with its module, whose answers are others while fake tensors are in place."""
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Both attributes by name."""


class HiddenMode(TorchDispatchMode):
    """A dispatch mode that `is_in_torch_dispatch_mode` does not tell of, and Dynamo looks into."""

    def __enter__(self) -> Any:
        torch._C._push_on_torch_dispatch_stack(self)
        return self

    def __exit__(self, *_: object) -> None:
        torch._C._pop_torch_dispatch_stack(None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to say so at every operator takes longer than all else here


def on_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory, whose storage is its own and keeps the other one alive."""
    # A fifth of the time of `torch.from_dlpack(tensor)`.
    return torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(tensor.detach()))


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A function that takes as many tensors, and says in one pass of C++ whether each has the
    class, dtype, device, sizes, strides, `requires_grad`, and conjugate, negative and inference
    bits of the one in its place. It says no of tensors among which one comes twice. It does not
    keep the tensors.

    None where the answers would miss differences: while gradients are off or in inference mode,
    which hide what they change.
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return None
    from torch._C._dynamo.guards import TensorGuards

    made = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    found: Callable[..., bool] = made.check
    return found


def dict_versions(dictionaries: Iterable[dict[Any, Any]]) -> list[int]:
    """A number for each dictionary that every change of its keys or values changes, and that no two
    states of dictionaries share. An `OrderedDict` has an order beside it, which may change alone.
    """
    from torch._C._dynamo.guards import dict_version

    return list(map(dict_version, dictionaries))


def behind_proxy(holder: Mapping[str, Any]) -> dict[str, Any]:
    """The dictionary that a class's read-only `__dict__` shows; a dictionary as it is."""
    held = [holder] if isinstance(holder, dict) else gc.get_referents(holder)
    (found,) = (one for one in held if isinstance(one, dict))
    return found


is_view: Callable[[Any], bool] = torch.Tensor._is_view
"""Whether autograd sees a tensor as a view of another."""


def is_zero_derivative(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of zeros that autograd has not made, such as a zero tangent."""
    return tensor._is_zerotensor()


def seen_from(view: torch.Tensor) -> torch.Tensor | None:
    """The tensor that autograd sees a tensor as a view of; None if it sees none."""
    return view._base


def subclass_of(kind: type, tensor: torch.Tensor, device: torch.device) -> Any:
    """A tensor subclass's object over a tensor's memory, with the dispatch keys of another
    device.
    """
    return torch.Tensor._make_subclass(
        kind, tensor, False, dispatch_device=True, device_for_backend_keys=device
    )


def without_data(kind: type, like: torch.Tensor, dtype: torch.dtype) -> Any:
    """A tensor subclass's object that has no memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=dtype, device=like.device
    )


# -- fake tensors


def protect_pointer(mode: FakeTensorMode, fake: torch.Tensor) -> None:
    """Makes a fake answer questions for its address as its mode wants: with a warning or an
    error.
    """
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)


def mark_parameter(tensor: Any) -> None:
    """Makes a tensor subclass's object an instance of `torch.nn.Parameter`."""
    tensor._is_param = True


# -- distributed tensors


COMMON_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))
"""Classes of most tensors."""
is_wrapper_subclass: Callable[[Any], bool] = _python_dispatch.is_traceable_wrapper_subclass_type
"""Whether the tensors of a class have inner tensors, and methods that take them apart and put them
together."""


def is_dtensor(value: object) -> bool:
    """Whether a value is a `torch.distributed.tensor.DTensor`; does not import that."""
    return type(value) not in COMMON_TENSORS and is_dtensor_class(type(value))


def has_dtensors(values: Sequence[object]) -> bool:
    """Whether any of many values is one."""
    return any(map(is_dtensor_class, set(map(type, values)) - COMMON_TENSORS))


def is_dtensor_class(kind: type) -> bool:
    """Whether a class is that of distributed tensors."""
    return _is_kind_named(kind, "torch.distributed.tensor", "DTensor")


def dtensor_class() -> Any:
    """The class of distributed tensors; None if nothing has imported it."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_pending(value: object) -> bool:
    """Whether a value is the result of a functional collective that may not have been waited
    for.
    """
    return is_pending_class(type(value))


def is_pending_class(kind: type) -> bool:
    """Whether a class is that of such results."""
    module = "torch.distributed._functional_collectives"
    return _is_kind_named(kind, module, "AsyncCollectiveTensor")


def _is_kind_named(kind: type, module: str, name: str) -> bool:
    return kind.__name__ == name and kind.__module__ == module


def local_of(value: Any) -> Any:
    """This process's part of a distributed tensor, waited for; anything else as it is."""
    if not is_dtensor(value):
        return value
    if is_pending(value._local_tensor):
        value._local_tensor = value._local_tensor.wait()
    return value._local_tensor


def layout_of(value: Any) -> Any:
    """How a distributed tensor lies on its mesh of devices: mesh, placements, shape and strides of
    the whole. None for any other tensor.
    """
    return value._spec if is_dtensor(value) else None


def joined(local: torch.Tensor, layout: Any, *, requires_grad: bool = False) -> Any:
    """A distributed tensor of which this process has a part."""
    kind: Any = sys.modules["torch.distributed.tensor"].DTensor
    return kind(local, layout, requires_grad=requires_grad)


def mesh_class() -> Any:
    """The class of meshes of devices; None if nothing has imported it."""
    module = sys.modules.get("torch.distributed.device_mesh")
    return getattr(module, "DeviceMesh", None)


def has_real_ranks(mesh: Any) -> bool:
    """Whether a mesh keeps its ranks in a tensor with values."""
    return type(mesh._rank_map) is torch.Tensor


def layout_rules() -> tuple[Any, str] | None:
    """The class and the name of the method that finds how the result of an operator is spread, and
    runs it on fakes of whole tensors for that; None if nothing has imported them.
    """
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    return (
        None if module is None else (module.ShardingPropagator, "propagate_op_sharding_non_cached")
    )


def forget_layouts() -> None:
    """Empties the caches in which `DTensor` keeps local shapes, which say nothing of the rank."""
    if "torch.distributed.tensor._sharding_prop" in sys.modules:
        found = importlib.import_module("torch.distributed.tensor.debug")
        found._clear_sharding_prop_cache()


def single_dimension_rules(
    target: Any, arguments: Any, kind: type, meta: Callable[[Any], Any]
) -> list[Any] | None:
    """How the results and the tensor arguments of an operator are placed on one mesh dimension
    where it runs on local parts, by DTensor's rules: rows of placements, or of placeholders with a
    dimension. None if it has rules of another form, or none.

    `meta` gives shape, strides and dtype of what stands for a tensor in the arguments, of `kind`.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_single_dim_strategy_funcs.get(target)
    if info is None:
        return None

    def tensor(stand_in: Any) -> Any:
        shape, stride, dtype = meta(stand_in)
        return TensorMeta(torch.Size(shape), stride, dtype)

    args, kwargs = pytree.tree_map_only(kind, tensor, arguments)
    try:
        return list(info.func(target, args, kwargs))
    except Exception:  # noqa: BLE001 - rules for sharded inputs may fail on whole ones of other ranks
        return []


def spec_rules(
    target: Any,
    arguments: Any,
    kind: type,
    meta: Callable[[Any], Any],
    size: int,
    results: int,
    splits: Sequence[int] = (),
) -> list[Any]:
    """The same of operators whose rules start from how their only tensor is placed: views, mostly.
    Empty where there are none. `splits` are the factors of strided shards to ask about.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
    from torch.distributed.tensor.placement_types import _StridedShard

    propagator = DTensor._op_dispatcher.sharding_propagator
    rule = propagator.op_strategy_funcs.get(target)
    if rule is None:
        return []
    mesh = DeviceMesh("cpu", list(range(size)), _init_backend=False, _rank=0)

    given = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, kind)]
    if len(given) != 1:
        return []
    shape, stride, dtype = meta(given[0])
    whole = TensorMeta(torch.Size(shape), stride, dtype)
    placements = [
        Replicate(),
        *(Shard(dim) for dim, length in enumerate(shape) if length % size == 0),
    ]
    placements += [
        _StridedShard(dim, split_factor=factor)
        for factor in splits
        for dim, length in enumerate(shape)
        if length % (size * factor) == 0
    ]
    rows = []
    for placement in placements:
        asked = OpStrategy([OpSpec(DTensorSpec(mesh, (placement,), whole))])
        args, kwargs = pytree.tree_map_only(kind, functools.partial(_always, asked), arguments)
        try:
            found = rule(OpSchema(target, tuple(args), kwargs))
        except Exception:  # noqa: BLE001 - a placement that the rule does not take
            continue
        for one in getattr(found, "strategies", ()):
            made = one.output_specs
            taken = (made,) if one.input_specs is None else one.input_specs
            outputs = [made] * results if isinstance(made, DTensorSpec) else list(made or ())
            specs = (*outputs, *taken)
            rows.append([None if spec is None else spec.placements[0] for spec in specs])
    return rows


def _always(answer: Any, _: Any) -> Any:
    return answer


def with_numbers(schema: Any, number: Callable[[Any], Any]) -> Any:
    """What an operator on distributed tensors is given, with `number` of each argument."""
    args, kwargs = pytree.tree_map(number, (schema.args_schema, schema.kwargs_schema))
    return type(schema)(schema.op, args, kwargs, schema_info=schema.schema_info)


def gives_arguments(sharding: Any) -> bool:
    """Whether what such a method has found has other arguments than it was given."""
    return bool(getattr(sharding, "use_val_from_redistribute_schema", False))


def spread_generators() -> list[tuple[Any, str]]:
    """What is asked, each an object and a name, before random operators on distributed tensors move
    the generator's state: whether they do for a mesh first, then that of the tracker that does it.
    """
    dispatch = sys.modules.get("torch.distributed.tensor._dispatch")
    random = sys.modules.get("torch.distributed.tensor._random")
    if dispatch is None or random is None:
        return []
    tracker = random.OffsetBasedRNGTracker
    asked = [(dispatch, "is_rng_supported_mesh")]
    if random._rng_tracker is not None:
        asked += [(tracker, "_distribute_region"), (tracker, "_compute_rng_offsets")]
    return asked


def mask_buffer() -> Any:
    """The class of the masks that lookups in spread tables keep until they are reduced; None if
    nobody has imported it.
    """
    module = sys.modules.get("torch.distributed.tensor._ops._mask_buffer")
    return getattr(module, "MaskBuffer", None)


def holds_mask(layout: Any) -> bool:
    """Whether a layout holds a tensor of its own, as that of a lookup in a table whose rows are
    spread does until it is reduced.
    """
    return any(hasattr(placement, "mask_buffer") for placement in layout.placements)


def distributed_switches() -> Any:
    """What changes how operators on distributed tensors run: `implicit_replication`,
    `loss_parallel`.
    """
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return False, ()
    dispatcher = tensors.DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers.items()
    package = "torch.distributed.tensor._"
    return dispatcher._allow_implicit_replication, tuple(
        (operator, handler)
        for operator, handler in handlers
        if not handler.__module__.startswith(package)
    )


def fake_store() -> Any:
    """The store of a "fake" process group, whose collectives return at once and do nothing."""
    return importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()


# -- fully_shard

_FSDP = "torch.distributed.fsdp._fully_shard."


def replicate(module: torch.nn.Module, *, mesh: Any) -> None:
    """Has the ranks of a mesh average the gradients of a module's parameters, which each has whole,
    by the code of `fully_shard`.
    """
    found = importlib.import_module("torch.distributed._composable.replicate_with_fsdp")
    found.replicate(module, mesh=mesh)


def _groups(state: Any) -> list[Any]:
    """The groups of parameters of a module: one at most before PyTorch 2.12."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def shard_groups(modules: Sequence[torch.nn.Module]) -> list[Any]:
    """The groups of parameters that `fully_shard` gathers together for these modules."""
    module = sys.modules.get(f"{_FSDP}_fsdp_state")
    if module is None:
        return []
    states = [module._get_module_fsdp_state(one) for one in modules]
    groups = [group for state in states if state is not None for group in _groups(state)]
    return list(dict.fromkeys(groups))


def shard_states(modules: Sequence[torch.nn.Module]) -> list[Any]:
    """What `fully_shard` keeps for these modules."""
    module = sys.modules.get(f"{_FSDP}_fsdp_state")
    states = [] if module is None else map(module._get_module_fsdp_state, modules)
    return list(dict.fromkeys(state for state in states if state is not None))


def shard_holders(states: Sequence[Any]) -> list[Any]:
    """Every object whose attributes `fully_shard` changes as a step runs."""
    found: list[Any] = []
    for state in states:
        found += [state, state._state_ctx, state._comm_ctx]
        for group in _groups(state):
            found += [group, group.comm_ctx, *group.fsdp_params]
    return list({id(one): one for one in found}.values())


def set_up_shards(modules: Sequence[torch.nn.Module]) -> bool:
    """Does what `fully_shard` leaves to a model's first forward pass, for all of these modules that
    have had none; whether there were any. The outermost of them count as roots.

    Raises:
        Exception: what PyTorch's own code raises of a model that it cannot set up.
    """
    new = {one: None for one in shard_states(modules) if one._is_root is None}
    inner = {
        state
        for root in new
        for module in root._modules
        for state in shard_states([part for part in module.modules() if part is not module])
        if state is not root
    }
    roots = [one for one in new if one not in inner and len(one._modules) == 1]
    for root in roots:
        root._lazy_init()
    return bool(roots)


_PASSING = frozenset({"_unsharded_param", "post_forward_order", "_post_forward_indices"})
"""What `fully_shard` keeps from a forward pass to the next backward pass, or for the next step."""


def shard_settings(state: Any) -> tuple[Any, ...]:
    """All plain settings of `fully_shard` for a module, on which it hangs what a step does, and
    whether parameters lie where it looks for them.
    """
    told: list[Any] = []
    for holder in shard_holders([state]):
        for name, value in sorted(vars(holder).items()):
            # Some attributes come to an instance with its first run, with what the class says.
            if name not in _PASSING and value is not getattr(type(holder), name, told):
                told.append((name, _told(value)))
        if hasattr(holder, "sharded_param"):
            told.append(("is in place", _is_in_place(holder)))
    return tuple(told)


def _told(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, torch.dtype, torch.device)) or value is None:
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return tuple(map(_told, fields))
    if isinstance(value, (torch.Tensor, torch.Event, dict)):
        return type(value).__name__
    if isinstance(value, (list, tuple)):
        if all(isinstance(item, torch.Tensor) for item in value):
            return "tensors"
        return tuple(_told(item) if isinstance(item, (int, str)) else id(item) for item in value)
    return id(value)


def _is_in_place(parameter: Any) -> bool:
    """Whether the flat data that is gathered is the memory of the parameter's local part."""
    local = parameter.sharded_param._local_tensor
    flat = parameter._sharded_param_data
    return bool(flat.untyped_storage()._cdata == local.untyped_storage()._cdata)


def shard_faults(state: Any) -> Iterator[str]:
    """What of a module's sharding is not captured: each a clause about it, with a remedy."""
    if not hasattr(state, "_fsdp_param_groups"):
        yield "is captured with newer versions of PyTorch; install one"
        return
    if state._is_root is None:
        yield ""
    for group in _groups(state):
        if not group.is_sharded or group._all_gather_result is not None:
            yield (
                "holds gathered parameters, as after an evaluation; call reshard() of each such "
                "module before the step"
            )
        if group._partial_reduce_output is not None or any(
            getattr(getattr(one, "_unsharded_param", None), "grad", None) is not None
            for one in group.fsdp_params
        ):
            yield "holds gradients that have not been reduced; reduce them in the step"
        if type(group.offload_policy).__name__ != "OffloadPolicy":
            yield "offloads to the CPU; leave offload_policy out"
        if group._use_post_forward_mesh:
            yield "is resharded to fewer ranks after forward; pass a bool as reshard_after_forward"
        if group._all_reduce_hook is not None:
            yield "has an all-reduce hook; leave it out"
        comms = type(group._all_gather_comm).__name__, type(group._reduce_scatter_comm).__name__
        if comms != ("DefaultAllGather", "DefaultReduceScatter"):
            yield "communicates in a way of its own; leave set_custom_all_gather and the like out"
        for one in group.fsdp_params:
            local = one.sharded_param._local_tensor
            if one.is_spmd_types:
                yield "shards parameters with types of spmd_types; shard plain ones or DTensors"
                break
            if hasattr(local, "fsdp_pre_all_gather"):
                yield "gathers a tensor subclass of its own; use plain parameters"
                break
            if not _is_in_place(one):
                yield "was given other local parts; run the model once"
                break


def shards(group: Any) -> list[Any]:
    """The parameters of a group, each as `fully_shard` keeps it."""
    return list(group.fsdp_params)


@contextmanager
def whole_parameters(groups: Sequence[Any], modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, modules have whole parameters in the place of those that `fully_shard` has split, as
    in a forward pass; nobody looks at their values.

    Args:
        groups: the `shard_groups` of the step's modules.
        modules: those of them that get whole parameters.

    Raises:
        NotImplementedError: `parallelize_module` has split some of them too.
    """
    split = [one for group in groups for one in shards(group) if one._module_info.module in modules]
    if any(one._unsharded_dtensor_spec is not None for one in split):
        raise NotImplementedError("its parameters are split by parallelize_module too")
    places = [(one._module_info.module, one._module_info.param_name) for one in split]
    before = [module._parameters[name] for module, name in places]
    try:
        for one in split:
            whole = torch.empty(
                one._orig_size, dtype=one.param_dtype or one.orig_dtype, device=one.device
            )
            parameter = torch.nn.Parameter(whole, one.sharded_param.requires_grad)
            parameter.grad_dtype = one.unsharded_grad_dtype
            one._setattr_on_modules(parameter)
        yield
    finally:
        for one, parameter in zip(split, before, strict=True):
            one._setattr_on_modules(parameter)


def forget_forward_passes(group: Any) -> None:
    """Forgets the order of earlier forward passes, such as those of an evaluation, which have had
    no backward pass: by it, PyTorch only chooses what to gather ahead.
    """
    group.comm_ctx.post_forward_order.clear()
    group._post_forward_indices.clear()


def flat_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of the flat data of which a parameter's local part is the beginning."""
    return tuple(parameter._sharded_param_data.shape)


def exchange_shard(parameter: Any, sharded: Any, flat: Any) -> None:
    """Has a parameter be gathered from another local part into new memory."""
    parameter.sharded_param, parameter._sharded_param_data = sharded, flat
    parameter.all_gather_outputs = []
    vars(parameter).pop("_unsharded_param", None)


TRACER_ENTRIES: list[tuple[Any, str]] = [
    (ProxyTorchDispatchMode, "__enter__"),
    (_MakefxTracer, "trace"),
    (torch._guards.TracingContext, "__init__"),
    (torch._C, "_create_graph_by_tracing"),
    (torch._C, "_create_function_from_trace"),
    (torch._C, "_create_function_from_trace_with_dict"),
    (torch._C.ScriptModule, "_create_method_from_trace"),
    (torch.cuda.graphs.graph, "__enter__"),
]
"""What all tracers go through that make a graph of the operators they see: `make_fx` and all that
use it, Dynamo and AOTAutograd, TorchScript, CUDA graphs."""


def shard_memory() -> list[tuple[Any, str]]:
    """What `fully_shard` calls to take memory for gathered parameters and to give it back."""
    found = []
    for name in ("_fsdp_param", "_fsdp_param_group"):
        module = sys.modules.get(f"{_FSDP}{name}")
        names = ("alloc_storage", "free_storage")
        found += [(module, one) for one in names if module is not None and hasattr(module, one)]
    return found


def shard_parts() -> tuple[Any, str]:
    """What `fully_shard` calls to cut a parameter into the parts of all ranks."""
    return importlib.import_module(f"{_FSDP}_fsdp_param"), "_chunk_with_empty"


def shard_kernel(name: str) -> Callable[..., Any] | None:
    """What an operator of `torch.ops.fsdp` runs on every device; None for one in C++."""
    module = sys.modules[f"{_FSDP}_fsdp_collectives"]
    names = {"all_gather_copy_in": "all_gather_copy_in_cuda"}
    found: Callable[..., Any] | None = getattr(module, names.get(name, name), None)
    return found


chunk_cat: Callable[..., Any] = torch._chunk_cat
"""Cuts tensors into as many parts, and joins the parts of equal place."""

# -- operators

schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
"""An overload's schema: name, arguments, returns."""
base_name: Callable[[Any], str] = operator.attrgetter("_opname")
"""An overload's name without namespace and overload: `add` of `aten.add.Tensor`."""
packet_of: Callable[[Any], Any] = operator.attrgetter("_overloadpacket")
"""All overloads of an overload's name."""
c_function: Callable[[Any], Any] = operator.attrgetter("_op")
"""What an overload calls in C++, without the checks in Python before it."""
OPERATORS = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)
"""The classes of operators, of their overloads and of operators that call functions."""
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
"""The negative of a tensor in the same memory, which is computed where it is used."""
has_kernel: Callable[[str], bool] = torch._C._dispatch_has_kernel
"""Whether an operator has any kernel."""
has_kernel_for: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether an operator has a kernel of its own for a dispatch key."""


def is_by_custom_op(func: OpOverload) -> bool:
    """Whether `torch.library.custom_op` has made an operator. What it puts around the function
    hands all arguments on as they are, unless a gradient is wanted.
    """
    return func.name() in OPDEFS


def called_overloads(code: Any, local: Any) -> list[OpOverload]:
    """The operators of which a call from Python is one, by the code of the frame that makes it and
    a function that tells the frame's local variables; empty if it calls none.
    """
    if code is OpOverload.__call__.__code__:
        return [local("self")]
    if code is OpOverloadPacket.__call__.__code__:
        return [getattr(local("self"), name) for name in local("self").overloads()]
    return []


@contextmanager
def implemented(
    namespace: str, name: str, kernel: Callable[..., Any], keys: Sequence[str]
) -> Iterator[None]:
    """Inside, an operator has this kernel for these dispatch keys, for which it had none."""
    library = torch.library.Library(namespace, "IMPL")
    try:
        for key in keys:
            library.impl(name, kernel, key)
        yield
    finally:
        library._destroy()


def run_composite(func: Any, *args: Any, is_implicit: bool, **kwargs: Any) -> Any:
    """Runs an overload's composite kernel: the implicit one, under which autograd sees its parts,
    or the explicit one.
    """
    keys = torch._C.DispatchKey
    key = keys.CompositeImplicitAutograd if is_implicit else keys.CompositeExplicitAutograd
    return func._op_dk(key, *args, **kwargs)


# -- autograd

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node that autograd's engine runs now; None between the nodes."""
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that autograd's next node in this thread will have."""
ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__
"""The Python code that runs autograd's engine."""


def sequence_number(node: Any) -> int:
    """The number that a node of autograd's was given when its operator ran."""
    return int(node._sequence_nr())


graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that runs now, -1 outside of any."""


def engine() -> Callable[..., Any]:
    """What runs autograd's engine."""
    return torch.autograd.graph._engine_run_backward


def engine_will_run() -> Callable[[Any], bool]:
    """What tells whether autograd's engine, which is running, will run a node."""
    return torch._C._will_engine_execute_node


def node_class(function: type[torch.autograd.Function]) -> type:
    """The class of the nodes that an `autograd.Function` makes."""
    return function._backward_cls


def saved_tensor_hooks() -> Any:
    """The hooks on saved tensors that are entered now; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


# -- switches


def kernel_library_switches() -> tuple[Any, ...]:
    """Which of mkldnn, NNPACK and cuDNN may be used, and how."""
    c = torch._C
    return (
        c._get_mkldnn_enabled(), c._get_mkldnn_deterministic(), _known(c._get_onednn_allow_tf32), c._get_nnpack_enabled(),
        c._get_cudnn_enabled(), c._get_cudnn_benchmark(), c._get_cudnn_deterministic(), _known(c._get_cudnn_allow_tf32),
    )  # fmt: skip


def _known(read: Callable[[], Any]) -> Any:
    """What a switch is; None if it is a combination of newer ones (`fp32_precision`) that it cannot
    tell. `float32_precisions` can.
    """
    try:
        return read()
    except RuntimeError:
        return None


def set_kernel_libraries(found: tuple[Any, ...]) -> None:
    """Sets what `kernel_library_switches` has found."""
    now = kernel_library_switches()
    # To set some of them warns, even if they are so already.
    new = [None if old == value else value for old, value in zip(now, found, strict=True)]
    backends = torch.backends
    backends.mkldnn.set_flags(*new[:3], None)  # type: ignore[call-arg]
    backends.nnpack.set_flags(found[3])
    backends.cudnn.set_flags(*new[4:6], None, *new[6:], None)  # type: ignore[call-arg]


def matmul_precision() -> str | None:
    """What `torch.set_float32_matmul_precision` has set; None if newer switches differ from it."""
    return _known(torch.get_float32_matmul_precision)  # type: ignore[no-any-return]


_OPERATIONS = ("matmul", "conv", "rnn")


def float32_precisions(library: str) -> tuple[str, ...]:
    """How precisely a library, "mkldnn" or "cuda", multiplies, convolves, and runs recurrent
    layers.
    """
    read = torch._C._get_fp32_precision_getter
    return tuple([read(library, operation) for operation in _OPERATIONS])


def set_float32_precisions(library: str, found: tuple[str, ...]) -> None:
    """Sets what `float32_precisions` has found."""
    for operation, precision in zip(_OPERATIONS, found, strict=True):
        torch._C._set_fp32_precision_setter(library, operation, precision)


def deterministic_switches() -> tuple[bool, ...]:
    """Deterministic mode, whether it only warns, whether memory is filled."""
    c = torch._C
    return (
        c._get_deterministic_algorithms(), c._get_deterministic_algorithms_warn_only(),
        c._get_deterministic_fill_uninitialized_memory(),
    )  # fmt: skip


set_fill_uninitialized: Callable[[bool], None] = (
    torch._C._set_deterministic_fill_uninitialized_memory
)
"""Whether deterministic mode fills uninitialized memory."""
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Gradient mode, without a context manager."""


def hooks_on_all_modules() -> tuple[dict[Any, Any], ...]:
    """The tables of hooks on every module."""
    found = vars(torch.nn.modules.module).items()
    return tuple(
        hooks for name, hooks in found if name.startswith("_global_") and isinstance(hooks, dict)
    )


def hooks_on_all_optimizers() -> tuple[dict[Any, Any], ...]:
    """The tables of hooks on every optimizer."""
    module: Any = sys.modules["torch.optim.optimizer"]
    return module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks


# -- modules, optimizers, scalers


def parameters_of(module: torch.nn.Module) -> dict[str, Any]:
    """A module's own table of parameters."""
    return module._parameters


def flat_weights_of(layer: Any) -> tuple[Sequence[str], Sequence[Any]]:
    """Names and values of the weights as a recurrent layer keeps them for its kernel."""
    return layer._flat_weights_names, layer._flat_weights


def set_flat_weights(layer: Any, weights: list[Any], references: list[Any]) -> None:
    """Gives a recurrent layer other weights for its kernel, and weak references to them."""
    layer.__dict__.update(_flat_weights=weights, _flat_weight_refs=references)


def set_step_called(optimizer: Any, was_called: bool) -> None:
    """Whether an optimizer's `step` was called: schedulers warn where it was not."""
    optimizer._opt_called = was_called


def was_step_called(optimizer: Any) -> bool:
    """Whether an optimizer's `step` was called."""
    return bool(optimizer.__dict__.get("_opt_called"))


def foreach_types(module: ModuleType) -> list[type]:
    """The classes of tensors for which PyTorch chooses multi-tensor kernels, as one of its modules
    has them.
    """
    types: list[type] = module._foreach_supported_types
    return types


def scaler_start() -> Callable[..., Any]:
    """The method by which a `GradScaler` makes its scale at its first use."""
    return torch.amp.GradScaler._lazy_init_scale_growth_tracker


def reducer_class() -> type | None:
    """The class that reduces gradients of `torch.distributed` in C++; None if it was not
    built.
    """
    return torch._C._distributed_c10d.Reducer if torch.distributed.is_available() else None


# -- processes


def resolve_group(name: str) -> Any:
    """The process group of a name.

    Raises:
        RuntimeError: there is none.
    """
    module: Any = torch.distributed.distributed_c10d
    return module._resolve_process_group(name)


def store_of(group: Any) -> Any:
    """The store by which the ranks of a process group have found each other."""
    module: Any = torch.distributed.distributed_c10d
    return module.PrefixStore("roam", module._get_process_group_store(group))


def finished_work() -> Any:
    """The handle of a collective that has nothing left to do, as operators return it."""
    return torch._C._distributed_c10d.FakeWork().boxed()


def unboxed(argument: torch.ScriptObject) -> Any:
    """The process group or the reduction that an operator is given as an object of C++; the object
    itself if it is another one.
    """
    kind = getattr(torch.distributed, argument._type().name(), None)  # type: ignore[attr-defined]
    unbox = getattr(kind, "unbox", None)
    return argument if unbox is None else unbox(argument)


def rebuild_buckets(reducer: Any) -> bool:
    """Has a reducer lay out its buckets by the order in which the first backward pass has made
    gradients, if that is due. Whether it was.
    """
    return bool(reducer._rebuild_buckets())


def reducer_data(ddp: Any) -> dict[str, Any]:
    """What the reducer of a `DistributedDataParallel` tells of its buckets, as they are now."""
    ddp.logger.set_runtime_stats_and_log()
    found: dict[str, Any] = ddp._get_ddp_logging_data()
    return found


def comm_hook_of(ddp: Any) -> str:
    """The name of the communication hook of a `DistributedDataParallel`, in Python or in C++, as it
    is now; empty if it has none.
    """
    return str(ddp._get_ddp_logging_data().get("comm_hook", ""))


class _Zeroed(TorchDispatchMode):
    """Takes note of tensors of which zeros in their shape are asked for, and answers with the
    tensors themselves.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not torch.ops.aten.zeros_like.default:
            return function(*args, **(kwargs or {}))
        self.tensors.append(args[0])
        return args[0]


def kept_buckets(reducer: Any) -> list[torch.Tensor]:
    """The flat gradients of all buckets that a reducer keeps from one backward pass to the next;
    none if it makes them anew in each. They are the reducer's own, not copies.
    """
    zeroed = _Zeroed()
    with zeroed:
        reducer._get_zeros_like_grad_buckets()
    return zeroed.tensors


def expects_backward(reducer: Any) -> bool | None:
    """Whether a backward pass for a reducer is under way, or is to come after a forward pass; None
    where a PyTorch cannot tell.

    The reducer has to be one whose backward passes are not finalized by hand.
    """
    if not hasattr(reducer, "_set_manual_finalization_required"):
        return None
    try:
        reducer._set_manual_finalization_required(True)
    except RuntimeError:
        return True
    reducer._set_manual_finalization_required(False)
    return False


def prepares_after(call: Callable[[Any], None]) -> None:
    """From now on, every reducer is given to `call` before it prepares for a backward pass."""
    kind: Any = reducer_class()
    plain = kind.prepare_for_backward
    if getattr(plain, "comes_after", None) == call:
        return

    @functools.wraps(plain)
    def prepare_for_backward(reducer: Any, outputs: Any) -> None:
        call(reducer)
        plain(reducer, outputs)

    prepare_for_backward.comes_after = call  # type: ignore[attr-defined]
    kind.prepare_for_backward = prepare_for_backward


def mark_begun(ddp: Any, is_rebuilt: bool) -> None:
    """Has a `DistributedDataParallel` know that its first step is done."""
    ddp._lazy_init_ran, ddp._has_rebuilt_buckets = True, is_rebuilt


def is_joined(ddp: Any) -> bool:
    """Whether a `DistributedDataParallel` is called under its `join`."""
    return bool(ddp._join_config.enable)


def ddp_parameters(ddp: Any) -> list[torch.Tensor]:
    """The parameters of a `DistributedDataParallel`, as its reducer numbers them."""
    before = ddp.modules_buffers, ddp.named_module_buffers
    try:
        parameters: list[torch.Tensor] = ddp._build_params_for_reducer()[0]
    finally:
        ddp.modules_buffers, ddp.named_module_buffers = before
    return parameters


def version_kept(tensor: torch.Tensor) -> Any:
    """A context in which autograd does not count writes to a tensor."""
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor)


def is_ddp(module: object) -> bool:
    """Whether a module is a `DistributedDataParallel`."""
    return torch.distributed.is_available() and isinstance(
        module, torch.nn.parallel.DistributedDataParallel
    )


def remade_attributes(module: object) -> frozenset[str]:
    """The attributes that a `DistributedDataParallel` makes anew in each forward pass, from the
    buffers of its module; none of another module.
    """
    return frozenset({"modules_buffers", "named_module_buffers"} if is_ddp(module) else ())


def broadcast_buckets(buffers: list[torch.Tensor], size_bytes: int) -> list[list[torch.Tensor]]:
    """Which tensors `DistributedDataParallel` broadcasts together."""
    if not buffers:
        return []
    module: Any = torch.distributed
    indices, _ = module._compute_bucket_assignment_by_size(buffers, [size_bytes])
    return [[buffers[place] for place in bucket] for bucket in indices]


def to_device(ddp: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a `DistributedDataParallel` where its `device_ids` say."""
    module: Any = torch.nn.parallel.distributed
    device = torch.device(ddp.device_type, ddp.device_ids[0])
    moved_args, moved_kwargs = module._to_kwargs(
        args, kwargs, device, ddp.use_side_stream_for_tensor_copies
    )
    return moved_args[0], moved_kwargs[0]


def all_gather_single(group: Any, output: Any, given: Any, options: Any) -> Any:
    """Starts a group's all-gather of one tensor into one."""
    return group._allgather_base(output, given, options)


def reduce_scatter_single(group: Any, output: Any, given: Any, options: Any) -> Any:
    """Starts a group's reduce-scatter of one tensor into one."""
    return group._reduce_scatter_base(output, given, options)


# -- attention, absent devices

attention_order: Callable[[], Sequence[int]] = torch._C._get_sdp_priority_order
"""The order in which PyTorch tries its attention kernels."""
backend_name: Callable[[], str] = torch._C._get_privateuse1_backend_name
"""The name of the backend from outside PyTorch; `privateuseone` where there is none."""


def backend_classes() -> tuple[Any, Any]:
    """Base classes of a backend from outside PyTorch: what it says of itself, and how it switches
    devices.

    Raises:
        AttributeError: a PyTorch that lets no backend be written in Python.
    """
    return torch._C._acc.PrivateUse1Hooks, torch._C._acc.DeviceGuard


def private_use_type() -> Any:
    """The device type of the backend from outside PyTorch."""
    return torch._C._autograd.DeviceType.PrivateUse1


def register_backend(name: str, module: ModuleType, hooks: Any, guard: Any) -> None:
    """Makes a backend from outside PyTorch known, for as long as the process lives."""
    torch._register_device_module(name, module)
    torch._C._acc.register_python_privateuseone_hook(hooks)
    torch._C._acc.register_python_privateuseone_device_guard(guard)


# -- the allocator's events


def start_allocator_events() -> None:
    """Starts the old profiler, which starts at once and sees every allocation on the CPU.

    Raises:
        AttributeError, TypeError, RuntimeError: a PyTorch that has another or none.
    """
    profiler = torch._C._profiler
    config = profiler.ProfilerConfig(
        profiler.ProfilerState.CPU, False, True, False, False, False, profiler._ExperimentalConfig()
    )
    torch._C._autograd._enable_profiler_legacy(config)


def stop_allocator_events() -> Any:
    """Stops it, and gives its events, per thread."""
    return torch._C._autograd._disable_profiler_legacy()


# -- torch.compile, which is loaded when it is first asked for


def aot_autograd(**options: Any) -> Callable[..., Any]:
    """A backend of `torch.compile` that hands forward and backward graphs of aten calls to
    compilers.
    """
    from torch._dynamo.backends.common import aot_autograd as of_dynamo

    backend: Callable[..., Any] = of_dynamo(**options)
    return backend


def is_input_mutation(description: Any) -> bool:
    """Whether AOTAutograd says of a result that it is what an argument is changed to afterwards."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    return isinstance(description, InputMutationAOTOutput)


def keeping_equal_nodes() -> Any:
    """In the block, partitioners of AOTAutograd leave the nodes of a joint graph as they are."""
    return torch._functorch.config.patch(cse=False)


def keeping_activations(share: float) -> Any:
    """In the block, `torch.compile` has this `activation_memory_budget`."""
    return torch._functorch.config.patch(activation_memory_budget=share)


def run_unplanned(module: Any, example_inputs: Any) -> Callable[..., Any]:
    """The compiler that runs a graph as it is."""
    from torch._dynamo.backends.debugging import boxed_nop

    compiled: Callable[..., Any] = boxed_nop(module, example_inputs)
    return compiled


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Marks a compiled graph as one that takes its arguments in a list, which it may empty."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def tracing_context() -> Any:
    """What AOTAutograd knows of the graph that it compiles now; None if it compiles none."""
    return torch._guards.TracingContext.try_get()


def is_of_dynamo(module: str) -> bool:
    """Whether a module's name is one of Dynamo's."""
    return module.startswith("torch._dynamo")


DYNAMIC_INDICES = "_dynamo_propagated_dynamic_indices"
"""The attribute of tensors where compiled graphs note for later compilations which sizes vary."""
IS_COMPILING = "_is_compiling_flag"
"""The variable of `torch.compiler` that says whether something is being compiled."""
IS_NESTED = "_is_eager_on_nested_compile"
"""The function that a compiled function asks first: whether to run as it is written."""
FROM_STANCE = "_callback_from_stance"
"""The function that says what compiles the frames of a compiled function."""


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether a tensor tells `torch.compile` which of its sizes vary, as `mark_dynamic` has it."""
    return any(name.startswith("_dynamo_") and name != DYNAMIC_INDICES for name in vars(tensor))


def know_functions() -> None:
    """Lets Dynamo, if it is loaded, find PyTorch's functions now. It looks for them once, when it
    first asks, or asks again after `init_process_group`, and then knows only what was there.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    for name in ("get_torch_obj_rule_map", "get_tensor_method"):
        getattr(rules, name, lambda: None)()


def frame_evaluation() -> Any:
    """The module by which `torch.compile` runs what it has compiled; None if nothing has been
    compiled in this process, or where this PyTorch has no way to look at it.
    """
    module = sys.modules.get("torch._dynamo.eval_frame")
    has_all = all(hasattr(module, name) for name in (IS_NESTED, FROM_STANCE))
    return module if has_all else None


def unseen_calls() -> tuple[Any, str] | None:
    """A module, and the name of the function in it that a compiled function calls first of all,
    where this PyTorch has no way to look at what it has compiled, as before 2.15. None where it has
    one, or if nothing has been compiled in this process.
    """
    module = sys.modules.get("torch._dynamo.eval_frame")
    return None if module is None or frame_evaluation() is not None else (module, "set_eval_frame")


def inductor_graph() -> Any:
    """The class of the graphs that Inductor has compiled; None if it has compiled none."""
    return getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None)


def compiled_graph(module: Any, fakes: Sequence[Any]) -> Any:
    """What Inductor makes of a functional graph of aten calls, for inputs like these; it is called
    with a list of inputs, which it empties.
    """
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    # The graph is none of one that is compiled around it.
    with torch._guards.tracing(None), V.set_fake_mode(fakes[0].fake_mode):
        alone = make_fx(module, select_decomp_table(), tracing_mode="fake")(*fakes)
        results: Any = alone.graph.output_node().args[0]
        return compile_fx.compile_fx_forward(
            alone,
            fakes,
            num_orig_model_outputs=len(results),
            num_example_inputs=len(fakes),
            compiler_config_extra=compile_fx.create_compiler_config_extra(alone),
            is_inference=True,
        )


def backward_compiler() -> Any:
    """The class that compiles a region's backward graph when it first runs; None if there is
    none.
    """
    wrappers = sys.modules.get("torch._functorch._aot_autograd.runtime_wrappers")
    return getattr(wrappers, "_AutogradBackwardCompiler", None)


def compiled_entries(code: Any) -> list[Any]:
    """What `torch.compile` has made of a code object so far, each with `code`, `guard_manager` and
    `backend`.

    An entry is a bare pointer into its cache: to read one after `torch.compiler.reset` is to read
    freed memory. So take what you need of it at once, and keep that.
    """
    entries: list[Any] = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)
    return entries


def has_variable_sizes(guards: Any) -> bool:
    """Whether what `torch.compile` has made of a function is for several sizes of an argument.

    Args:
        guards: the `guard_manager` of one of `compiled_entries`.
    """
    for manager in _guard_managers(guards):
        parts = (part for leaf in manager.get_leaf_guards() for part in leaf.verbose_code_parts())
        if any(_VARIABLE_SIZE.search(part) for part in parts):
            return True
    return False


def guarded_places(guards: Any) -> dict[str, list[Callable[[Any], bool]]]:
    """Where what `torch.compile` has made of a function looks before it runs, and by what checks of
    the value there it decides whether to run.

    The places are expressions of Python in which `L` are the local variables of the call and `G`
    the globals.

    Args:
        guards: the `guard_manager` of one of `compiled_entries`.
    """
    places: dict[str, list[Callable[[Any], bool]]] = {}
    for manager in _guard_managers(guards):
        if manager.get_source() and (checks := manager.get_leaf_guards()):
            places.setdefault(manager.get_source(), []).extend(checks)
    return places


def _guard_managers(guards: Any) -> Iterator[Any]:
    """The parts of a `guard_manager`, those for the keys and values of dictionaries included."""
    managers = [guards.root]
    while managers:
        manager = managers.pop()
        yield manager
        managers += manager.get_child_managers()
        if isinstance(manager, torch._C._dynamo.guards.DictGuardManager):
            for pair in manager.get_key_value_managers().values():
                managers += filter(None, pair)


_VARIABLE_SIZE = re.compile(r"\bsize=\[[^\]]*\bNone\b")


def is_forgotten(code: CodeType) -> bool:
    """Whether `torch.compiler.reset` has been called since `torch.compile` made this code."""
    return code not in torch._dynamo.utils.orig_code_map


def may_compile(frame: Any, entries: list[Any], callback: Any) -> bool:
    """Whether `torch.compile` compiles a function another time, and does not run it as it is
    written.

    Args:
        frame: of the call.
        entries: what it has made of the function so far; see `compiled_entries`.
        callback: what compiles the frame.
    """
    limit = torch._dynamo.config.recompile_limit
    while callback is not None:
        limit = getattr(callback, "_recompile_limit", None) or limit
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    sizes = torch._dynamo.cache_size.compute_cache_size(frame, entries)
    return not sizes.will_compilation_exceed(limit)


def innermost_backend(callback: Any) -> Any:
    """The compiler that is behind a callback of `torch.compile`'s."""
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    return callback


def compile_options(wrapper: Any) -> tuple[Any, ...]:
    """What a function of `torch.compile`'s was made with: the compiler, and the arguments that say
    how Dynamo looks at the function.
    """
    context = wrapper.__closure__[wrapper.__code__.co_freevars.index("self")].cell_contents
    names = ("fullgraph", "error_on_graph_break", "_dynamic", "_dynamic_shapes", "compiler_config",
             "_isolate_recompiles_id")  # fmt: skip
    options = [getattr(context, name, None) for name in names]
    return type(context), innermost_backend(context.callback), options, context._hooks


def is_graph_break(error: BaseException) -> bool:
    """Whether `torch.compile` has raised an error since it cannot compile a function whole, where
    its user has asked for that.
    """
    return isinstance(error, torch._dynamo.exc.Unsupported)


def look_at_frames(callback: Any) -> None:
    """Has this thread ask before it runs a Python function.

    Args:
        callback: gets a frame that is about to run, with `f_code`, `f_locals`, `f_globals` and
            `closure`, and two more arguments, and returns what `as_written` gives; None to ask
            nobody any more.
    """
    torch._C._dynamo.eval_frame.set_eval_frame(callback)


def as_written(*, inside: bool) -> Any:
    """The answer that a frame runs as it is written.

    Args:
        inside: whether to ask about the functions that it calls, too.
    """
    kinds: Any = torch._dynamo.types
    recursive = kinds.FrameAction.DEFAULT if inside else kinds.FrameAction.SKIP
    strategy = kinds.FrameExecStrategy(kinds.FrameAction.SKIP, recursive)
    return kinds.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


def keep_as_written(code: CodeType, answer: Any) -> None:
    """Does what is done in C++ when `torch.compile` has not compiled a frame: its answer may be
    meant for all frames of that code.
    """
    if answer.apply_to_code:
        torch._C._dynamo.eval_frame.set_code_exec_strategy(code, answer.frame_exec_strategy)


def is_looked_at(frame: Any) -> bool:
    """Whether `torch.compile` tries to compile a function that is called by one which it does not
    compile, or compiles in parts.

    Args:
        frame: of the call, with `f_code`, `f_locals` and `f_globals`.
    """
    code = frame.f_code
    return not (
        code.co_flags & inspect.CO_GENERATOR
        or code in torch._dynamo.convert_frame.output_codes
        or torch._dynamo.trace_rules.check(code, frame=frame)
    )


def leaves_callee(code: CodeType) -> bool:
    """Whether code calls a function that `torch.compile` leaves alone, and compiles what that
    calls.
    """
    found: bool = code is torch._dynamo.decorators._nonrecursive_disable_wrapper_code
    return found


def has_tensors(frame: Any) -> bool:
    """Whether `torch.compile` sees that a function has to do with tensors. If not, it runs all
    later calls of it as they are written.
    """
    found: bool = torch._dynamo.convert_frame.has_tensor_in_frame(frame)
    return found


def compiled_codes() -> list[CodeType]:
    """The code objects of which `torch.compile` has made something."""
    seen = [reference() for reference in torch._dynamo.convert_frame.input_codes.seen]
    return [code for code in seen if code is not None and compiled_entries(code)]


def put_in_place(code: CodeType, other: CodeType, is_wanted: Callable[[Any], bool]) -> None:
    """Has frames of a code object run other code, where frames are looked at, until
    `take_from_place`.

    Args:
        code: its frames are meant, and it must be of no precompiled function.
        other: with the same arguments, cells and free variables.
        is_wanted: of the values of a frame's arguments, by name.
    """
    guards: Any = SimpleNamespace(root=torch._C._dynamo.guards.RootGuardManager())
    guards.root.add_lambda_guard(is_wanted, ["roam"], None)
    torch._C._dynamo.eval_frame._load_precompile_entry(code, guards, other)


def take_from_place(code: CodeType) -> None:
    """Undoes `put_in_place`."""
    torch._C._dynamo.eval_frame._reset_precompile_entries(code)


def is_precompiled(code: CodeType) -> bool:
    """Whether something is in the place of a code object."""
    return bool(torch._C._dynamo.eval_frame._debug_get_precompile_entries(code))


CALLS = (torch.nn.Module._call_impl, torch.nn.Module._wrapped_call_impl)
"""The functions of a module that call its `forward`."""


def has_module_hooks(module: Any) -> bool:
    """Whether calling a module calls hooks."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in tables) or bool(
        torch.nn.modules.module._has_any_global_hook()
    )


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` has compiled a module by itself, by either spelling."""
    return is_of_dynamo(type(module).__module__) or module._compiled_call_impl is not None


# -- what patches replace

C: Any = torch._C
"""PyTorch's functions in C++."""
C_NN: Any = torch._C._nn
assert_that: Any = torch._assert
"""Those of `torch.nn.functional`."""
VF: Any = torch._VF
"""Functions of variables: recurrent layers and packed sequences."""

__all__ = [
    "ASKS_FOR_FAKES",
    "CALLS",
    "COMMON_TENSORS",
    "C_NN",
    "DYNAMIC_INDICES",
    "ENGINE_CODE",
    "FROM_STANCE",
    "HOOKS",
    "IS_COMPILING",
    "IS_NESTED",
    "OPERATORS",
    "STORAGES_SWAP",
    "TENSOR_DATA",
    "TRACER_ENTRIES",
    "VF",
    "BelowAutograd",
    "C",
    "DataDependentOutputException",
    "DeviceContext",
    "DisableAutocast",
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "HiddenMode",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "all_gather_single",
    "allow_access",
    "aot_autograd",
    "as_written",
    "assert_that",
    "attention_order",
    "backend_classes",
    "backend_name",
    "backward_compiler",
    "base_name",
    "behind_proxy",
    "boxed",
    "broadcast_buckets",
    "c_function",
    "c_pointer",
    "called_overloads",
    "chunk_cat",
    "comm_hook_of",
    "compile_options",
    "compiled_codes",
    "compiled_entries",
    "compiled_graph",
    "count_dispatch_modes",
    "count_function_modes",
    "current_node",
    "ddp_parameters",
    "deterministic_switches",
    "dict_versions",
    "disable_current_modes",
    "disable_fake_tensor_cache",
    "dispatch_modes",
    "distributed_switches",
    "dtensor_class",
    "enable_python_dispatcher",
    "engine",
    "engine_will_run",
    "exchange_shard",
    "expects_backward",
    "fake_store",
    "finished_work",
    "flat_shape",
    "flat_weights_of",
    "float32_precisions",
    "forbid_access",
    "foreach_types",
    "forget_forward_passes",
    "forget_layouts",
    "frame_evaluation",
    "free_weak_storage",
    "function_modes",
    "function_transform",
    "gives_arguments",
    "gradient_hooks_of",
    "graph_task",
    "guarded_places",
    "has_dtensors",
    "has_kernel",
    "has_kernel_for",
    "has_module_hooks",
    "has_real_ranks",
    "has_tensors",
    "has_variable_sizes",
    "holds_mask",
    "hooks_of",
    "hooks_on_all_modules",
    "hooks_on_all_optimizers",
    "implemented",
    "in_kernel_invocation_manager",
    "inductor_graph",
    "innermost_backend",
    "is_any_autocast_enabled",
    "is_by_custom_op",
    "is_compiled",
    "is_ddp",
    "is_dtensor",
    "is_dtensor_class",
    "is_expired",
    "is_forgotten",
    "is_graph_break",
    "is_input_mutation",
    "is_joined",
    "is_looked_at",
    "is_marked",
    "is_of_dynamo",
    "is_pending",
    "is_pending_class",
    "is_precompiled",
    "is_view",
    "is_wrapped",
    "is_wrapper_subclass",
    "is_zero_derivative",
    "joined",
    "keep_as_written",
    "keeping_activations",
    "keeping_equal_nodes",
    "kept_buckets",
    "kernel_library_switches",
    "know_functions",
    "layout_check",
    "layout_of",
    "layout_rules",
    "leaves_callee",
    "left_by_dynamo",
    "local_of",
    "look_at_frames",
    "mark_begun",
    "mark_parameter",
    "mask_buffer",
    "matmul_precision",
    "may_compile",
    "mesh_class",
    "neg_view",
    "next_sequence_number",
    "node_class",
    "on_own_storage",
    "packet_of",
    "parameters_of",
    "prepares_after",
    "private_use_type",
    "protect_pointer",
    "put_in_place",
    "pytree",
    "rebuild_buckets",
    "reduce_scatter_single",
    "reducer_class",
    "reducer_data",
    "register_backend",
    "remade_attributes",
    "replicate",
    "resolve_group",
    "run_composite",
    "run_unplanned",
    "saved_tensor_hooks",
    "scaler_start",
    "schema_of",
    "seen_from",
    "sequence_number",
    "set_fill_uninitialized",
    "set_flat_weights",
    "set_float32_precisions",
    "set_grad_enabled",
    "set_kernel_libraries",
    "set_step_called",
    "set_up_shards",
    "shard_faults",
    "shard_groups",
    "shard_holders",
    "shard_kernel",
    "shard_memory",
    "shard_parts",
    "shard_settings",
    "shard_states",
    "shards",
    "single_dimension_rules",
    "spec_rules",
    "spread_generators",
    "start_allocator_events",
    "stop_allocator_events",
    "storage_at",
    "storage_by",
    "storage_of",
    "storage_pointer",
    "storage_uses",
    "store_of",
    "strides_together",
    "subclass_of",
    "suggest_memory_format",
    "swap_memory",
    "take_from_place",
    "tensor_uses",
    "to_device",
    "tracing_context",
    "unboxed",
    "unseen_calls",
    "version_kept",
    "version_of",
    "was_step_called",
    "weak_storage",
    "whole_parameters",
    "with_conj",
    "with_neg",
    "with_numbers",
    "without_data",
]
