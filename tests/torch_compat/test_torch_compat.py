"""PyTorch's private side: a canary for each name and each patch, which fails by its name on a
PyTorch that changed."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import itertools
import operator
import re
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence

import roam
from newer import needs_2_15
from roam.torch_compat import patches, private
from roam.torch_compat.patches import PATCHES, Patch, Unlisted, replaced, resolved

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "roam"
aten = torch.ops.aten

# -- names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_paths(text: str) -> Iterator[str]:
    """Every dotted path of PyTorch's with a private part that a source names, through local aliases
    too."""
    aliases: dict[str, str] = {"torch": "torch"}

    def path_of(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return aliases.get(node.id)
        base = path_of(node.value) if isinstance(node, ast.Attribute) else None
        return (
            f"{base}.{node.attr}" if base is not None and isinstance(node, ast.Attribute) else None
        )

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            path = path_of(node.value)
            if path is not None and target.id in ("c", "keys", "profiler"):
                aliases[target.id] = path
    for node in ast.walk(ast.parse(text)):
        paths: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and (path := path_of(node)) is not None:
            paths = [path]
        yield from (path for path in paths if any(map(is_private, path.split("."))))


NAMES = sorted(set(private_paths((PACKAGE / "torch_compat" / "private.py").read_text())))


def test_the_names_are_read_off_the_source() -> None:
    assert {
        "torch._C._nn",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch.Tensor._make_subclass",
    } <= set(NAMES)
    assert "torch._C._get_mkldnn_enabled" in NAMES  # by an alias
    assert len(NAMES) > 60


@pytest.mark.parametrize("path", NAMES)
def test_name_exists(path: str) -> None:
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return
    pytest.fail(f"{path} cannot be imported")


def _written() -> bool:
    tensor = torch.ones(2)
    before = private.version_of(tensor)
    tensor.add_(1)
    return private.version_of(tensor) == before + 1


def _shares() -> bool:
    tensor, other = torch.ones(4), torch.ones(4)
    first, second = tensor.untyped_storage(), tensor[1:].untyped_storage()
    pointers = [private.c_pointer(first), private.c_pointer(second), private.storage_pointer(first)]
    return len(set(pointers)) == 1 and private.c_pointer(other.untyped_storage()) != pointers[0]


def _uses() -> bool:
    tensor = torch.ones(2)
    storage = tensor.untyped_storage()
    before = private.storage_uses(private.c_pointer(storage))
    view = tensor[1:]
    after = private.storage_uses(private.c_pointer(storage))
    return after == before + 1 and view.numel() == 1


def _fills() -> bool:
    """A storage without memory is read by nobody, and gets memory in its place."""
    storage = private.storage_at(0, torch.device("cpu"), 16)
    tensor = torch.empty(0).set_(storage, 0, (4,), (1,))
    private.forbid_access(private.c_pointer(storage), "nobody reads it")
    view = tensor[2:]
    try:
        view.tolist()
    except RuntimeError as error:
        is_forbidden = "nobody reads it" in str(error)
    else:
        is_forbidden = False
    if not private.STORAGES_SWAP:
        return is_forbidden
    private.allow_access(private.c_pointer(storage))
    private.swap_memory(storage, private.storage_of(torch.arange(4.0)))
    return is_forbidden and view.tolist() == [2.0, 3.0]


def _expires() -> bool:
    tensor = torch.ones(2)
    pointer = private.weak_storage(private.storage_of(tensor))
    is_held = not private.is_expired(pointer) and private.storage_by(pointer).nbytes() == 8
    del tensor
    is_gone = private.is_expired(pointer)
    private.free_weak_storage(pointer)
    return is_held and is_gone


def _stands_for() -> bool:
    tensor = torch.ones(2, dtype=torch.complex64)
    return private.with_conj(tensor).is_conj() and private.with_neg(tensor).is_neg()


def _owns() -> bool:
    tensor = torch.arange(6)[2:]
    one, other = private.on_own_storage(tensor), tensor.untyped_storage()
    before = private.storage_uses(private.c_pointer(other))
    is_same = one.data_ptr() == tensor.data_ptr() and one.tolist() == tensor.tolist()
    is_own = private.c_pointer(one.untyped_storage()) != private.c_pointer(other)
    del one
    return is_same and is_own and private.storage_uses(private.c_pointer(other)) < before


def _holds() -> bool:
    tensor = torch.ones(2, requires_grad=True)
    before = private.tensor_uses(tensor)
    product = tensor * tensor  # its node holds both factors
    return private.tensor_uses(tensor) > before and product.numel() == 2


def _marks() -> bool:
    with _fake_mode():
        fake = torch.ones(2)
    private.mark_parameter(fake)
    return isinstance(fake, torch.nn.Parameter)


def _layouts_compared() -> bool:
    """Whether each difference is seen."""
    one = torch.ones(2, 3, dtype=torch.complex64)
    check = private.layout_check([one, one.clone()])
    with torch.no_grad():
        is_blind = private.layout_check([one]) is not None
    with torch.inference_mode():
        is_blind |= private.layout_check([one]) is not None
        inference = torch.ones_like(one)
    others = [
        torch.nn.Parameter(one), one.to(torch.complex128), one.to("meta"), one[:1], one.t().contiguous().t(), one.conj(),
        one._neg_view(), inference, one.clone().requires_grad_(),
    ]  # fmt: skip
    trained = one.clone().requires_grad_()
    trained.retain_grad()
    check_trained = private.layout_check([trained])
    assert check is not None
    assert check_trained is not None
    with torch.no_grad():
        is_blind |= check_trained(one.clone()) or not check_trained(trained)
    return (
        check(one.clone(), one.clone())
        and check_trained(trained)
        and not trained.retains_grad
        and not is_blind
        and not check(one, one)
        and not any(check(one, other) for other in others)
    )


def _versions_move() -> bool:
    """Whether each kind of change is seen, and nothing else is. What a function has done some times
    the interpreter does in a quicker way.
    """

    class Holder:
        def method(self) -> None: ...

    def put() -> None:
        holder.b = object()  # type: ignore[attr-defined]

    def replace_method() -> None:
        Holder.method = lambda self: None  # type: ignore[assignment, method-assign]

    holder = Holder()
    holder.b, holder.c = 1, 2  # type: ignore[attr-defined]
    held: Any = {"a": holder}
    code: Any = {"seen": 0}
    exec("def write():\n    global seen\n    seen += 1", code)
    changes: list[Callable[[], Any]] = [
        lambda: held.update(a=1), lambda: held.setdefault("d", 1), lambda: held.pop("a"), held.popitem, lambda: held.update(f=1),
        held.clear, lambda: held.__ior__({"e": 1}), lambda: held.__delitem__("e"), lambda: delattr(holder, "c"),
        lambda: vars(holder).update(b=4), replace_method, lambda: setattr(Holder, "other", 1), lambda: delattr(Holder, "other"),
        *[code["write"]] * 20, *[put] * 20, *[replace_method] * 20,
    ]  # fmt: skip
    dictionaries: list[Any] = [held, vars(holder), code, private.behind_proxy(vars(Holder))]
    seen = private.dict_versions(dictionaries)
    for change in changes:
        change()
        before, seen = seen, private.dict_versions(dictionaries)
        if sum(map(operator.ne, before, seen)) != 1:
            return False
    holder.b, holder.method, held.get("e"), dict(code)  # type: ignore[attr-defined]
    return seen == private.dict_versions(dictionaries)


def _hooked() -> bool:
    leaf = torch.ones(2, requires_grad=True)
    none = private.hooks_of(leaf) is None and private.gradient_hooks_of(leaf) is None
    leaf.register_hook(lambda _: None)
    leaf.register_post_accumulate_grad_hook(lambda _: None)
    return none and len(private.hooks_of(leaf)) == len(private.gradient_hooks_of(leaf)) == 1


def _numbered() -> bool:
    leaf = torch.ones(2, requires_grad=True)
    number = private.next_sequence_number()
    first = leaf * 2
    return (
        private.sequence_number(first.grad_fn) == number
        and private.next_sequence_number() == number + 1
    )


def _node_runs() -> bool:
    leaf, nodes = torch.ones(2, requires_grad=True), []
    made = leaf * 2
    made.register_hook(lambda _: nodes.append(private.current_node()))
    made.sum().backward()
    return len(nodes) == 1 and private.current_node() is None


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def _node_class() -> bool:
    made: Any = _Twice.apply(torch.ones(2, requires_grad=True))
    return isinstance(made.grad_fn, private.node_class(_Twice))


def _engine_runs() -> bool:
    """The stand-in for the engine reads its inputs at place 3, counted after the roots."""
    leaf, seen = torch.ones(2, requires_grad=True), []
    plain = private.engine()

    def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((len(tuple(roots)), args[3]))
        return plain(roots, *args, **kwargs)

    with replaced([(torch.autograd, "_engine_run_backward", run)]):
        torch.autograd.grad((leaf * 2).sum(), leaf)
    ((count, inputs),) = seen
    return count == 1 and inputs[0] is leaf and plain.__code__ is private.ENGINE_CODE


def _will_run() -> bool:
    leaf, seen = torch.ones(2, requires_grad=True), []
    made = leaf * 2
    made.register_hook(lambda _: seen.append(private.engine_will_run()(made.grad_fn)))
    made.sum().backward()
    return seen == [True]


def _below_autograd() -> bool:
    with private.BelowAutograd():
        return (torch.ones(2, requires_grad=True) * 2).grad_fn is None


def _dispatches_in_python() -> bool:
    with private.enable_python_dispatcher():
        return bool(torch._C._dispatch_tls_is_dispatch_key_included("PythonDispatcher"))


def _saved_hooks() -> bool:
    none = private.saved_tensor_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        some = private.saved_tensor_hooks()
    return not none and len(some) == 2


class _Counting(private.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _dispatch_modes() -> bool:
    mode = _Counting()
    with mode:
        entered = private.dispatch_modes() == [mode] and private.count_dispatch_modes() == 1
        with private.disable_current_modes():
            torch.ones(2)
            entered = entered and private.dispatch_modes() == [] and mode.count == 0
    return entered and private.count_dispatch_modes() == 0


def _function_modes() -> bool:
    with torch.device("meta"):
        (mode,) = private.function_modes()
        entered = type(mode) is private.DeviceContext and mode.device.type == "meta"
        count = private.count_function_modes()
        with private.DisableTorchFunction():
            made = torch.ones(2)
    return entered and count == 1 and made.device.type == "cpu"


def _hidden_mode() -> bool:
    seen: list[Any] = []

    class Mode(private.HiddenMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2)
        is_told = torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    torch.zeros(2)
    return len(seen) == 1 and not is_told


def _wrapped() -> bool:
    seen: list[bool] = []
    torch.func.vmap(lambda x: (seen.append(private.is_wrapped(x)), x)[1])(torch.ones(2))
    return seen == [True] and not private.is_wrapped(torch.ones(2))


def _transforms() -> bool:
    seen: list[Any] = []
    torch.func.vmap(lambda x: (seen.append(private.function_transform()), x)[1])(torch.ones(2))
    return seen[0] is not None and private.function_transform() is None


def _autocasts() -> bool:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        on, product = private.is_any_autocast_enabled(), torch.ones(2, 2) @ torch.ones(2, 2)
        with private.DisableAutocast():
            plain = torch.ones(2, 2) @ torch.ones(2, 2)
    return on and product.dtype is torch.bfloat16 and plain.dtype is torch.float32


def _fake_mode() -> Any:
    return private.FakeTensorMode()


def _fakes() -> bool:
    with _fake_mode() as mode:
        fake = torch.ones(2, 3)
        remade = private.subclass_of(private.FakeTensor, fake, torch.device("cpu"))
        meta = aten.add.Tensor
        with private.in_kernel_invocation_manager(mode):
            is_meta = fake.is_meta
    private.protect_pointer(mode, remade)
    return (
        type(fake) is private.FakeTensor
        and type(remade) is private.FakeTensor
        and is_meta
        and meta is not None
    )


def _data_dependent() -> bool:
    with _fake_mode():
        x = torch.ones(3)
        for error, work in (
            (private.DataDependentOutputException, lambda: x.sum().item()),
            (private.DynamicOutputShapeException, lambda: x.nonzero()),
        ):
            with pytest.raises(error):
                work()
    return True


def _no_dispatch() -> bool:
    with _fake_mode():
        fake = torch.ones(2)
    with private.DisableTorchDispatch():
        return fake.shape == (2,)


def _cache_is_off() -> bool:
    with _fake_mode() as mode, private.disable_fake_tensor_cache(mode):
        return not mode.cache_enabled


def _schema() -> bool:
    schema = private.schema_of(aten.add_.Tensor)
    first = schema.arguments[0]
    return (
        schema.name == "aten::add_"
        and schema.is_mutable
        and first.alias_info.is_write
        and len(schema.returns) == 1
    )


def _overloads() -> bool:
    overload = aten.add.Tensor
    return (
        type(overload) is private.OpOverload
        and private.base_name(overload) == "add"
        and private.packet_of(overload) is aten.add
        and isinstance(overload, private.OPERATORS)
        and isinstance(aten.add, private.OPERATORS)
        and torch.equal(
            private.c_function(overload)(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0)
        )
    )


def _kernels() -> bool:
    return (
        private.has_kernel("aten::add.Tensor")
        and private.has_kernel_for("aten::matmul", "CompositeImplicitAutograd")
        and not private.has_kernel_for("aten::add.Tensor", "CompositeImplicitAutograd")
    )


def _by_custom_op() -> bool:
    library = torch.library.Library("roam_canaries", "FRAGMENT")
    library.define("defined(Tensor x) -> ()")

    @torch.library.custom_op("roam_canaries::made", mutates_args=())
    def made(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    ops = torch.ops.roam_canaries
    return private.is_by_custom_op(ops.made.default) and not private.is_by_custom_op(
        ops.defined.default
    )


def _called_overloads() -> bool:
    """A number of another class is asked for its value in the frame of the call."""
    found = []

    class Node:
        def guard_float(self, *_: object) -> float:
            frame = sys._getframe(1)
            found.append(private.called_overloads(frame.f_code, frame.f_locals.__getitem__))
            return 2.0

        def is_float(self) -> bool:
            return True

        def is_int(self) -> bool:
            return False

    library = torch.library.Library("roam_canaries", "FRAGMENT")
    library.define("scaled(Tensor x, float y) -> Tensor")
    library.impl("scaled", lambda x, y: x * y, "CPU")
    packet = torch.ops.roam_canaries.scaled
    for function in (packet, packet.default):
        function(torch.ones(2), torch.SymFloat(Node()))
    return len(found) >= 2 and all(one == [packet.default] for one in found)


def _composite() -> bool:
    matmul = private.run_composite(
        aten.matmul.default, torch.ones(2, 2), torch.ones(2, 2), is_implicit=True
    )
    values = [torch.ones(2)]
    sums = private.run_composite(aten._foreach_add.Scalar, values, 1, is_implicit=False)
    return torch.equal(matmul, torch.full((2, 2), 2.0)) and torch.equal(
        sums[0], torch.full((2,), 2.0)
    )


def _grad_mode() -> bool:
    private.set_grad_enabled(False)
    off = torch.is_grad_enabled()
    private.set_grad_enabled(True)
    return not off and torch.is_grad_enabled()


def _switches() -> bool:
    before = private.deterministic_switches()
    private.set_fill_uninitialized(not before[2])
    after = private.deterministic_switches()
    private.set_fill_uninitialized(before[2])
    return after == (*before[:2], not before[2])


def _left() -> Any:
    """What compiled code calls in the middle sees real tensors, in each call."""
    seen = []

    @private.left_by_dynamo
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(type(x))
        return x

    compiled = torch.compile(lambda x: look(x * 2) + 1, backend="eager")
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    return seen == [torch.Tensor] * 2


def _kernel_libraries() -> bool:
    before = private.kernel_library_switches()
    assert len(before) == 8
    private.set_kernel_libraries((not before[0], *before[1:4], not before[4], *before[5:]))
    after = private.kernel_library_switches()
    private.set_kernel_libraries(before)
    return after == (not before[0], *before[1:4], not before[4], *before[5:])


def _precisions() -> bool:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    after = [private.float32_precisions(library)[0] for library in ("mkldnn", "cuda")]
    told = private.matmul_precision()
    torch.set_float32_matmul_precision(before)
    return after == ["bf16", "tf32"] and told == "medium"


def _precisions_set() -> bool:
    before = private.float32_precisions("cuda")
    private.set_float32_precisions("cuda", ("tf32", *before[1:]))
    after = private.float32_precisions("cuda"), private.matmul_precision()
    private.set_float32_precisions("cuda", before)
    return after == (("tf32", *before[1:]), None) and private.matmul_precision() is not None


def _hook_tables() -> bool:
    before = [
        sum(map(len, private.hooks_on_all_modules())),
        sum(map(len, private.hooks_on_all_optimizers())),
    ]
    optimizers: Any = importlib.import_module("torch.optim.optimizer")
    handles = [
        torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
        optimizers.register_optimizer_step_post_hook(lambda *_: None),
    ]
    after = [
        sum(map(len, private.hooks_on_all_modules())),
        sum(map(len, private.hooks_on_all_optimizers())),
    ]
    for handle in handles:
        handle.remove()
    return [new - old for old, new in zip(before, after, strict=True)] == [1, 1]


def _flat_weights() -> bool:
    layer = torch.nn.LSTM(2, 2)
    names, weights = private.flat_weights_of(layer)
    zeros = [weight.detach() * 0 for weight in weights]
    private.set_flat_weights(layer, zeros, [weakref.ref(weight) for weight in zeros])
    kept = private.flat_weights_of(layer)[1]
    return (
        list(names) == list(private.parameters_of(layer))
        and kept is zeros
        and layer.all_weights[0][0] is not zeros[0]
    )


def _steps() -> bool:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # schedulers have it noted
    before = private.was_step_called(optimizer)
    optimizer.step()
    after = private.was_step_called(optimizer)
    private.set_step_called(optimizer, False)
    return (before, after, private.was_step_called(optimizer)) == (False, True, False)


def _foreach() -> bool:
    modules = [
        importlib.import_module(name)
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils")
    ]
    return all(torch.Tensor in private.foreach_types(module) for module in modules)


def _events() -> bool:
    private.start_allocator_events()
    torch.ones(1000)
    events = private.stop_allocator_events()
    return max(event.cpu_memory_usage() for thread in events for event in thread) == 4000


def _attention() -> bool:
    return set(private.attention_order()) <= {
        int(b.value) for b in torch.nn.attention.SDPBackend.__members__.values()
    }


def _backend() -> bool:
    hooks, guard = private.backend_classes()
    return (
        isinstance(hooks, type)
        and isinstance(guard, type)
        and isinstance(private.backend_name(), str)
    )


@functools.cache
def _compiles() -> bool:
    seen: list[Any] = []

    def compiler(module: Any, example_inputs: Any) -> Any:
        seen.append(private.tracing_context())
        return private.boxed(private.run_unplanned(module, example_inputs))

    torch.compiler.reset()
    backend = private.aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    result = torch.compile(torch.nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
    result.sum().backward()
    torch.compiler.reset()
    return len(seen) == 2 and all(
        hasattr(context.fw_metadata, "bw_donated_idxs") for context in seen
    )


@functools.cache
def _partitions() -> bool:
    """What is changed afterwards is a result that says so, and equal nodes stay apart."""
    seen: list[bool] = []

    def partition(module: Any, inputs: Any, **settings: Any) -> Any:
        described = module.graph.output_node().meta["desc"]
        seen.extend(map(private.is_input_mutation, described[: settings["num_fwd_outputs"]]))
        before = list(module.graph.nodes)
        with private.keeping_equal_nodes():
            parts = min_cut_rematerialization_partition(module, inputs, **settings)
        seen.append(list(module.graph.nodes) == before)
        return parts

    def change(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return (x * weight).sum() + (x * weight).sum()

    torch.compiler.reset()
    backend = private.aot_autograd(
        fw_compiler=private.run_unplanned, bw_compiler=private.run_unplanned, partition_fn=partition
    )
    torch.compile(change, backend=backend)(torch.ones(3, 2), torch.ones(3, 2, requires_grad=True))
    torch.compiler.reset()
    return seen == [True, False, True]


def _keeps_activations() -> bool:
    """A product of two results is kept, and made again where nothing may be kept."""

    def kept(share: float) -> int:
        seen: list[int] = []

        def partition(module: Any, inputs: Any, **settings: Any) -> Any:
            parts = min_cut_rematerialization_partition(module, inputs, **settings)
            seen.append(len(parts[0].graph.output_node().args[0]))
            return parts

        backend = private.aot_autograd(
            fw_compiler=private.run_unplanned,
            bw_compiler=private.run_unplanned,
            partition_fn=partition,
        )
        torch.compiler.reset()
        with private.keeping_activations(share):
            weight = torch.ones(64, 64, requires_grad=True)
            torch.compile(lambda x: (x @ weight).exp().sin() @ weight, backend=backend)(weight)
        torch.compiler.reset()
        return seen[0]

    return kept(0.0) < kept(1.0)


def _raised_by_dynamo() -> bool:
    error: Any = importlib.import_module("torch._dynamo.exc").Unsupported
    return private.is_of_dynamo(error.__module__) and not private.is_of_dynamo("torch.nn")


def _packed() -> bool:
    packed = pack_padded_sequence(torch.ones(2, 1, 1), torch.tensor([2]))
    padded, lengths = private.VF._pad_packed_sequence(
        packed.data, packed.batch_sizes, False, 0.0, 2
    )
    return padded.shape == (2, 1, 1) and lengths.tolist() == [2]


def _compiled_code() -> bool:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    compiled(torch.ones(2))
    module = private.frame_evaluation()
    (entry,) = private.compiled_entries(compiled.__wrapped__.__code__)
    is_right = (
        module is not None
        and getattr(module, private.IS_NESTED)() is False
        and entry.guard_manager.check({"x": torch.ones(2)})
        and not entry.guard_manager.check({"x": torch.ones(2, dtype=torch.int64)})
        and callable(private.innermost_backend(entry.backend))
        and private.innermost_backend(entry.backend)
        is private.innermost_backend(getattr(module, private.FROM_STANCE)(_callback_of(compiled)))
    )
    torch.compiler.reset()
    return is_right


def _compile_options() -> bool:
    def options(**given: Any) -> Any:
        return private.compile_options(torch.compile(torch.sin, **given))

    return bool(
        options() == options()
        and options() != options(fullgraph=True)
        and options() != options(dynamic=False)
        and options() != options(backend="eager")
        and options() != options(mode="max-autotune-no-cudagraphs")
    )


def _is_seen_or_not() -> bool:
    importlib.import_module("torch._dynamo.eval_frame")
    found, seen = private.unseen_calls(), []
    if private.frame_evaluation() is not None:
        return found is None
    holder, name = found
    plain = getattr(holder, name)

    def noted(callback: Any) -> Any:
        frame = sys._getframe(1)
        seen.append((frame.f_code.co_name, frame.f_locals.get("callback")))
        return plain(callback)

    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    with mock.patch.object(holder, name, noted):
        compiled(torch.ones(2))
    torch.compiler.reset()
    caller, callback = seen[0]
    return caller == "compile_wrapper" and callable(getattr(holder, private.FROM_STANCE)(callback))


def _has_sizes() -> bool:
    def are_variable(dynamic: bool) -> bool:
        torch.compiler.reset()
        compiled = torch.compile(
            lambda given: [one.sin() + 3 for one in given.values()],
            backend="eager",
            dynamic=dynamic,
        )
        compiled({"x": torch.ones(3)})
        (entry,) = private.compiled_entries(compiled.__wrapped__.__code__)
        return private.has_variable_sizes(entry.guard_manager)

    is_right = are_variable(True) and not are_variable(False)
    torch.compiler.reset()
    return is_right


def _sees_marks() -> bool:
    tensor = torch.ones(3, 2)
    is_plain = not private.is_marked(tensor)
    for mark in (
        torch._dynamo.mark_dynamic,
        torch._dynamo.maybe_mark_dynamic,
        torch._dynamo.mark_static,
        torch._dynamo.decorators.mark_unbacked,
    ):
        tensor = torch.ones(3, 2)
        mark(tensor, 0)
        is_plain &= private.is_marked(tensor)
    return is_plain


def _tells_what_is_guarded() -> bool:
    table = {"scale": 2.0, "shift": 1.0}

    def scaled(x: torch.Tensor, by: list[float]) -> torch.Tensor:
        return sum(x * one for one in table.values()) * by[0]  # type: ignore[return-value]

    torch.compile(scaled, backend="eager")(torch.ones(3), [1.0])
    (entry,) = private.compiled_entries(scaled.__code__)
    places = private.guarded_places(entry.guard_manager)
    accepted = [all(check(by) for check in places["L['by'][0]"]) for by in (1.0, 2.0)]
    torch.compiler.reset()
    return (
        "L['x']" in places and any("table" in one for one in places) and accepted == [True, False]
    )


def _reaches_modes() -> bool:
    """An operator that takes functions reaches a dispatch mode whole that asks for such."""
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if isinstance(func, private.HigherOrderOperator):
                seen.append(func)
                return args[-1][0]
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ops.higher_order.cond(True, torch.sin, torch.cos, (torch.ones(2),))
    return seen == [torch.ops.higher_order.cond]


def _has_no_memory() -> bool:
    class Empty(torch.Tensor):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any: ...

    made = private.without_data(Empty, torch.ones(3, 2).T, torch.float64)
    kind = made.shape, made.stride(), made.dtype
    return type(made) is Empty and kind == ((2, 3), (1, 2), torch.float64)


def _negates() -> bool:
    tensor = torch.ones(2)
    negative = private.neg_view(tensor)
    is_right = negative.is_neg() and negative.data_ptr() == tensor.data_ptr()
    return is_right and bool((negative == -1).all()) and not private.neg_view(negative).is_neg()


def _implements() -> bool:
    """A gradient's operator reaches a dispatch mode whole while it has a kernel for autograd."""
    operator, seen = torch.ops.aten.cumprod_backward.default, []

    class Seen(private.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def below(*args: Any) -> Any:
        with private.BelowAutograd():
            return operator(*args)

    def gradient() -> torch.Tensor:
        leaf = torch.ones(3, requires_grad=True)
        with Seen():
            leaf.cumprod(0).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    with private.implemented("aten", "cumprod_backward", below, ["AutogradCPU"]):
        whole = gradient()
        is_whole = operator in seen
    seen.clear()
    return is_whole and torch.equal(whole, gradient()) and operator not in seen


def _forgets() -> bool:
    compiled = torch.compile(lambda x: x.sin() + 2, backend="eager")
    compiled(torch.ones(2))
    (entry,) = private.compiled_entries(compiled.__wrapped__.__code__)
    code = entry.code  # The entry itself is freed by the reset.
    is_known = not private.is_forgotten(code)
    torch.compiler.reset()
    return is_known and private.is_forgotten(code)


def _limits() -> bool:
    """Whether Dynamo's limit of recompilations is the one that is looked at."""
    asked: list[bool] = []

    def number(x: torch.Tensor, n: int) -> torch.Tensor:
        return x.sin() + n

    module: Any = private.frame_evaluation()
    compiled = torch.compile(number, backend="eager", dynamic=False)
    callback = getattr(module, private.FROM_STANCE)(_callback_of(compiled))

    frame = SimpleNamespace(f_locals={})
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        for n in range(4):
            entries = private.compiled_entries(number.__code__)
            asked.append(private.may_compile(frame, entries, callback))
            compiled(torch.ones(2), n)
        count = len(private.compiled_entries(number.__code__))
    torch.compiler.reset()
    return asked == [True, True, False, False] and count == 2


def _says_that_it_compiles() -> bool:
    before = torch.compiler.is_compiling()
    with replaced([(torch.compiler, private.IS_COMPILING, True)]):
        return torch.compiler.is_compiling() and not before


def _callback_of(compiled: Any) -> Any:
    names = compiled.__code__.co_freevars
    return compiled.__closure__[names.index("callback")].cell_contents


def _graph_breaks() -> bool:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    torch.compiler.reset()
    try:
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(2))
    except Exception as error:  # noqa: BLE001
        return private.is_graph_break(error)
    finally:
        torch.compiler.reset()
    return False


def _frames() -> bool:
    """Whether what is said of a function's calls decides how they run, and nothing stays."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def called(x: torch.Tensor) -> str:
        return "as written"

    def other(x: torch.Tensor) -> str:
        return "other"

    def calls(x: torch.Tensor) -> str:
        return called(x)

    def quiet(x: torch.Tensor) -> str:
        return called(x)

    def ask(frame: Any, *_: Any) -> Any:
        asked.append((frame.f_code.co_name, dict(frame.f_locals)))
        return private.as_written(inside=frame.f_code is not outer.__code__)

    def outer(x: torch.Tensor) -> str:
        return calls(x)

    def result_of(function: Any) -> tuple[str, list[str]]:
        asked.clear()
        private.look_at_frames(ask)
        try:
            result = function(x)
        finally:
            private.look_at_frames(None)
        return result, [name for name, _ in asked if name != "look_at_frames"]

    torch.compiler.reset()
    x = torch.ones(2)
    code = called.__code__
    found = [result_of(outer), result_of(calls)]
    is_seen = any(name == "called" and held.get("x") is x for name, held in asked)
    private.put_in_place(code, other.__code__, lambda held: held.keys() == {"x"})
    is_in_place = private.is_precompiled(code)
    found += [result_of(calls), (called(x), [])]
    private.take_from_place(code)
    found.append(result_of(calls))
    skipped = SimpleNamespace(
        apply_to_code=True,
        frame_exec_strategy=torch._dynamo.types.FrameExecStrategy(
            torch._dynamo.types.FrameAction.SKIP, torch._dynamo.types.FrameAction.DEFAULT
        ),
    )  # type: ignore[attr-defined]
    private.keep_as_written(quiet.__code__, skipped)
    found.append(result_of(quiet))
    return is_seen and is_in_place and not private.is_precompiled(code) and found == [
        ("as written", ["outer"]),
        ("as written", ["calls", "called"]),
        ("other", ["calls"]),
        ("as written", []),
        ("as written", ["calls", "called"]),
        ("as written", ["called"]),
    ]  # fmt: skip


def _leaves() -> bool:
    callers: list[Any] = []

    def called() -> None:
        frame: Any = inspect.currentframe()
        callers.append(frame.f_back.f_code)

    torch._dynamo.disable(called, recursive=False)()
    called()
    return list(map(private.leaves_callee, callers)) == [True, False]


def _which_frames() -> bool:
    """Whether those functions are known that Dynamo compiles by themselves."""

    def frame(function: Any, **held: Any) -> Any:
        return SimpleNamespace(
            f_code=function.__code__, f_locals=held, f_globals=function.__globals__
        )

    def users(x: Any) -> Any:
        return x.sin()

    def others(x: Any) -> Any:
        return x.cos()

    def yields(x: object) -> Any:
        yield x

    torch.compiler.reset()
    none_yet = private.compiled_codes()
    torch.compile(users, backend="eager")(torch.ones(2))
    compiled = private.compiled_codes()
    torch.compiler.reset()
    return (
        private.is_looked_at(frame(users))
        and not private.is_looked_at(frame(yields))
        and not private.is_looked_at(frame(torch.compiler.reset))  # not one that Lightning wraps
        and private.has_tensors(frame(others, x=[torch.ones(2)]))
        and not private.has_tensors(frame(others, x=2))
        and not none_yet
        and compiled == [users.__code__]
    )


def _functions_are_known() -> bool:
    """Whether Dynamo knows PyTorch's functions that were others when it first asked for them."""
    from torch._dynamo import trace_rules

    own, found = torch.tensor, []
    for asks_before in (True, False):
        trace_rules.clear_lru_cache()
        if asks_before:
            private.know_functions()
        with mock.patch.object(torch, "tensor", lambda *args: own(*args)):
            trace_rules.get_torch_obj_rule_map()
        found.append(own in trace_rules.get_torch_obj_rule_map())
    trace_rules.clear_lru_cache()
    return found == [True, False]


def _module_calls() -> bool:
    module = torch.nn.Linear(1, 1)
    is_bare = not private.has_module_hooks(module)
    module.register_forward_hook(lambda *_: None)
    return (
        is_bare and private.has_module_hooks(module) and module.__call__.__func__ in private.CALLS
    )


def _dynamic_sizes() -> bool:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x.sin(), backend="aot_eager", dynamic=True)
    result = compiled(torch.ones(4, requires_grad=True))
    torch.compiler.reset()
    return private.DYNAMIC_INDICES in vars(result)


def _graphs_of_inductor() -> bool:
    importlib.import_module("torch._inductor.output_code")
    return {"source_code", "mutated_input_idxs", "constants", "torchbind_constants"} <= set(
        private.inductor_graph().__annotations__
    )


def _compiled_graph() -> bool:
    """Asked without a compiler: the graph that is given to it has what is kept of its strides."""
    from torch._inductor import compile_fx

    given: list[Any] = []
    graph = torch.fx.Graph()
    dropped = graph.call_function(
        torch.ops.aten.native_dropout.default, (graph.placeholder("x"), 0.5, True)
    )
    graph.output([graph.call_function(operator.getitem, (dropped, place)) for place in (0, 1)])

    def inner(module: Any, inputs: Any, **settings: Any) -> None:
        given.append((module.graph.output_node().meta, settings["is_inference"]))

    with (
        FakeTensorMode(),
        mock.patch.object(compile_fx.compile_fx_forward, "__defaults__", (inner, False)),
    ):
        private.compiled_graph(torch.fx.GraphModule({}, graph), [torch.ones(4)])
    ((meta, is_inference),) = given
    return is_inference and list(meta["user_visible_output_idxs"]) == [0, 1]


def _compiler_of_backward_graphs() -> bool:
    importlib.import_module("torch._functorch._aot_autograd.runtime_wrappers")
    return callable(private.backward_compiler().get_or_compile)


def _finishes() -> bool:
    return torch.distributed.Work.unbox(private.finished_work()).is_completed()


def _unboxes(group: Any) -> bool:
    reduction = torch.distributed.ReduceOp(torch.distributed.ReduceOp.SUM)
    return (
        private.unboxed(group.boxed()) is group
        and private.unboxed(reduction.boxed()) == torch.distributed.ReduceOp.SUM
    )


def _in_group(of: Callable[[Any], bool]) -> Callable[[], bool]:
    def check() -> bool:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        try:
            return of(torch.distributed.group.WORLD)
        finally:
            torch.distributed.destroy_process_group()

    return check


def _copies(start: Callable[..., Any], options: Any) -> Callable[[Any], bool]:
    def check(group: Any) -> bool:
        given, output = torch.ones(3), torch.zeros(3)
        start(group, output, given, options).wait()
        return torch.equal(given, output)

    return check


def _takes_wrappers_apart() -> bool:
    class Plain(torch.Tensor):
        pass

    class Wrapper(Plain):
        def __tensor_flatten__(self) -> Any: ...

        @staticmethod
        def __tensor_unflatten__(*_: Any) -> Any: ...

    kinds = (Plain, torch.Tensor, torch.nn.Parameter, private.FakeTensor)
    return private.is_wrapper_subclass(Wrapper) and not any(map(private.is_wrapper_subclass, kinds))


def _parts(group: Any) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    whole = torch.arange(4.0)
    spread = distribute_tensor(whole, mesh, [Shard(0)])
    local, layout = private.local_of(spread), private.layout_of(spread)
    again = private.joined(local, layout)
    return (
        private.is_dtensor(spread)
        and private.is_dtensor_class(type(spread))
        and not private.is_dtensor(whole)
        and private.dtensor_class() is type(spread)
        and private.local_of(whole) is whole
        and torch.equal(local, whole)
        and private.layout_of(whole) is None
        and layout == private.layout_of(again)
        and layout != private.layout_of(distribute_tensor(whole, mesh, [Replicate()]))
        and again.to_local().data_ptr() == local.data_ptr()
        and not private.holds_mask(layout)
    )


def _rules(group: Any) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    found: list[Any] = []
    holder, name = private.layout_rules()
    rules = getattr(holder, name)

    def watched(propagator: Any, schema: Any) -> Any:
        schema = private.with_numbers(schema, lambda value: 3.0 if value == 2.5 else value)
        found.append((schema.args_schema[1], private.gives_arguments(rules(propagator, schema))))
        return rules(propagator, schema)

    spread = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with replaced([(holder, name, watched)]), FakeTensorMode(allow_non_fake_inputs=True):
        result = torch.mul(spread, 2.5)
    return isinstance(result, DTensor) and found == [(3.0, False)]


# PyTorch remembers the layouts it has found, so it asks for them once in a process.
_finds_layouts = functools.cache(_in_group(_rules))


def _shards(group: Any) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    (state,) = private.shard_states([model])
    if list(private.shard_faults(state)) != [""]:
        return False
    if not private.set_up_shards([model]) or private.set_up_shards([model]):
        return False
    model(torch.ones(1, 4)).sum().backward()
    (of_group,) = private.shard_groups([model])
    one, other = private.shards(of_group)
    settings = private.shard_settings(state)
    is_plain = not list(private.shard_faults(state)) and settings == private.shard_settings(state)
    model.set_requires_gradient_sync(False)
    is_other = settings != private.shard_settings(state)
    private.forget_forward_passes(of_group)
    whole, flat = one.sharded_param, private.local_of(one.sharded_param).view(-1)
    is_flat = private.flat_shape(one) == (16,)
    private.exchange_shard(one, whole, flat)
    names = {name for _, name in private.shard_memory()}
    held = private.shard_holders([state])
    return (
        is_plain
        and is_other
        and is_flat
        and not hasattr(one, "_unsharded_param")
        and hasattr(other, "_unsharded_param")
        and names == {"alloc_storage", "free_storage"}
        and all(any(item is known for known in held) for item in (state, of_group, one, other))
    )


def _whole_for_a_while(group: Any) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = torch.nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    private.set_up_shards([model])
    before = list(model.parameters())
    with private.whole_parameters(private.shard_groups([model]), [model]):
        inside = list(model.parameters())
        with private.whole_parameters(private.shard_groups([model]), [model]):
            pass
        is_left = list(map(id, model.parameters())) == list(map(id, inside))
    told = [(tuple(one.shape), one.dtype, one.requires_grad, type(one)) for one in inside]
    kind = torch.nn.Parameter
    return (
        is_left
        and list(map(id, model.parameters())) == list(map(id, before))
        and told == [((3, 4), torch.bfloat16, True, kind), ((3,), torch.bfloat16, False, kind)]
    )


def _parts_of_shards() -> bool:
    holder, name = private.shard_parts()
    rows = torch.arange(10.0).view(5, 2)
    parts = getattr(holder, name)(rows, 4, dim=0)
    return [len(part) for part in parts] == [2, 2, 1, 0] and torch.equal(parts[2], rows[4:])


def _meshes(group: Any) -> bool:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    fake = init_device_mesh("cpu", (1,))
    with FakeTensorMode():
        fake._rank_map = torch.arange(1)
    return (
        private.mesh_class() is DeviceMesh
        and isinstance(vars(DeviceMesh)["mesh"], property)
        and private.has_real_ranks(mesh)
        and not private.has_real_ranks(fake)
    )


def _stands_for_ranks() -> bool:
    dist = torch.distributed
    dist.init_process_group("fake", store=private.fake_store(), rank=5, world_size=64)
    try:
        dist.all_reduce(torch.ones(2))
        return dist.get_rank() == 5
    finally:
        dist.destroy_process_group()


def _replicates(group: Any) -> bool:
    from torch.distributed.device_mesh import init_device_mesh

    model = torch.nn.Linear(4, 4)
    weight = model.weight.clone()
    private.replicate(model, mesh=init_device_mesh("cpu", (1,)))
    (of_group,) = private.shard_groups([model])
    return len(private.shards(of_group)) == 2 and torch.equal(
        private.local_of(model.weight.detach()), weight
    )


def _kernels_of_shards() -> bool:
    importlib.import_module("torch.distributed.fsdp")
    joined = torch.empty(2, 2)
    torch.ops.fsdp.chunk_cat_mixed_dtype([torch.ones(2), torch.zeros(2)], 0, 2, out=joined)
    known = torch.empty(2, 2)
    private.chunk_cat([torch.ones(2), torch.zeros(2)], 0, 2, out=known)
    return (
        private.shard_kernel("chunk_cat_mixed_dtype") is None
        and callable(private.shard_kernel("all_gather_copy_in"))
        and callable(private.shard_kernel("split_with_sizes_copy"))
        and torch.equal(joined, known)
    )


def _pending(group: Any) -> bool:
    import torch.distributed._functional_collectives as functional

    result = functional.all_reduce(torch.ones(2), "sum", group)
    return private.is_pending(result) and not private.is_pending(result.wait())


def _rules_of_placements() -> bool:
    """A row per strategy: placements of the results, then of the tensor arguments."""

    def meta(_: str) -> Any:
        return (4, 4), (4, 1), torch.float32

    product = private.single_dimension_rules(aten.mm.default, (("a", "b"), {}), str, meta)
    names = {
        tuple((type(one).__name__, getattr(one, "dim", None)) for one in row) for row in product
    }
    kind = "_ShardingPlaceholder"
    views = private.spec_rules(aten.transpose.int, (("a", 0, 1), {}), str, meta, 2, 1)
    joined = private.spec_rules(aten.view.default, (("a", [16]), {}), str, meta, 2, 1)
    blocks = {getattr(one, "split_factor", None) for row in joined for one in row}
    shards = [[(one.is_replicate(), getattr(one, "dim", None)) for one in row] for row in views]
    return (
        ((kind, 0), (kind, 0), ("Replicate", None)) in names
        and (("Partial", None), (kind, 1), (kind, 0)) in names
        and [(False, 1), (False, 0)] in shards
        and 4 in blocks
        and private.single_dimension_rules(aten.transpose.int, (("a", 0, 1), {}), str, meta) is None
    )


def _tells_tasks() -> bool:
    leaf, seen = torch.ones(2, requires_grad=True), []
    made = leaf * 2
    made.register_hook(lambda _: seen.append(private.graph_task()))
    made.sum().backward()
    return private.graph_task() == -1 and seen[0] != -1


def _switches_of_dtensors() -> bool:
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import loss_parallel

    found = [private.distributed_switches()]
    for block in (implicit_replication, loss_parallel):
        with block():
            found.append(private.distributed_switches())
    return found[0] == (False, ()) and found[1] == (True, ()) and len(found[2][1]) > 0


def _beside_operators_on_dtensors() -> bool:

    holder, name = private.layout_rules()
    ((dispatch, question),) = private.spread_generators()
    buffer = private.mask_buffer()()
    return (
        callable(getattr(holder, name))
        and callable(getattr(dispatch, question))
        and (buffer.data, buffer.refcount) == (None, 0)
    )


def _forgets_layouts(_: Any) -> bool:
    from torch.distributed.tensor import debug, distribute_tensor

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    spread = distribute_tensor(torch.ones(4), mesh)
    _ = spread + spread
    private.forget_layouts()
    return debug._get_python_sharding_prop_cache_info().currsize == 0


def _keeps(group: Any) -> bool:
    private.store_of(group).set("key", "value")
    return private.store_of(group).get("key") == b"value"


def _ddp(of: Callable[[Any], bool]) -> Callable[[], bool]:
    def check(group: Any) -> bool:
        net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        return of(torch.nn.parallel.DistributedDataParallel(net))

    return _in_group(check)


def _trained(ddp: Any) -> Any:
    ddp(torch.ones(4, 2)).sum().backward()
    return ddp


def _tells_buckets(ddp: Any) -> bool:
    before = private.reducer_data(ddp).get("has_rebuilt_buckets")
    is_rebuilt = private.rebuild_buckets(_trained(ddp).reducer)
    data = private.reducer_data(ddp)
    return (
        not before and is_rebuilt and data["has_rebuilt_buckets"] == 1
        and sorted(map(int, data["rebuilt_per_bucket_param_indices"].split())) == [0, 1, 2, 3]
        and data["rebuilt_bucket_sizes"] == str(4 * (6 + 3 + 3 + 3))
    )  # fmt: skip


def _names_hook(ddp: Any) -> bool:
    before = private.comm_hook_of(ddp)
    ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
    return not before and bool(private.comm_hook_of(ddp))


def _keeps_buckets(ddp: Any) -> bool:
    (bucket,) = private.kept_buckets(_trained(ddp).reducer)
    bucket.fill_(7.0)
    (again,) = private.kept_buckets(ddp.reducer)
    lazy = torch.nn.parallel.DistributedDataParallel(ddp.module, lazy_bucket_allocation=True)
    return (
        again.data_ptr() == bucket.data_ptr()
        and torch.equal(again, bucket)
        and private.kept_buckets(_trained(lazy).reducer) == []
    )


def _expects(ddp: Any) -> bool:
    reducer = _trained(ddp).reducer
    before = private.expects_backward(reducer)
    loss = ddp(torch.ones(4, 2)).sum()
    during = private.expects_backward(reducer)
    loss.backward()
    return not before and during and not private.expects_backward(reducer)


def _prepares(ddp: Any) -> bool:
    kind, seen = private.reducer_class(), []
    plain = kind.prepare_for_backward
    try:
        private.prepares_after(seen.append)
        private.prepares_after(seen.append)  # once is enough
        _trained(ddp)
    finally:
        kind.prepare_for_backward = plain
    return seen == [ddp.reducer]


def _keeps_version(tensor: torch.Tensor) -> bool:
    with private.version_kept(tensor):
        tensor.add_(1)
    return tensor._version == 0


def _marks_begun(ddp: Any) -> bool:
    private.mark_begun(ddp, True)
    return ddp._lazy_init_ran and ddp._has_rebuilt_buckets


def _moves(ddp: Any) -> bool:
    value = torch.ones(2)
    ddp.device_ids = [0]  # the CPU's only one
    args, kwargs = private.to_device(ddp, (value,), {"other": value})
    return torch.equal(args[0], value) and torch.equal(kwargs["other"], value)


def _tracers() -> bool:
    """What every tracer goes through."""
    seen: set[str] = set()

    def noted(holder: Any, name: str) -> Any:
        plain = getattr(holder, name)
        return mock.patch.object(
            holder, name, lambda *args, **kwargs: (seen.add(name), plain(*args, **kwargs))[1]
        )

    x = torch.ones(2)
    with contextlib.ExitStack() as stack:
        for holder, name in private.TRACER_ENTRIES:
            stack.enter_context(noted(holder, name))
        found = []
        for traces in (
            lambda: torch.fx.experimental.proxy_tensor.make_fx(torch.sin)(x),
            lambda: torch.compile(lambda x: x.sin(), backend="eager")(x),
            lambda: torch.jit.trace(torch.sin, x),
            lambda: torch.jit.trace(torch.nn.Tanh(), x),
            lambda: torch.jit._get_trace_graph(torch.nn.Tanh(), x),
        ):
            seen.clear()
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", FutureWarning
                )  # of TorchScript, which is going away
                traces()
            found.append(bool(seen))
    return all(found)


def _is_compiled() -> bool:
    plain, one = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    one.compile()
    compiled = torch.compile(torch.nn.Linear(2, 2))
    return [private.is_compiled(module) for module in (plain, one, compiled)] == [False, True, True]


CANARIES: dict[str, Callable[[], bool]] = {
    "all_gather_single": _in_group(
        _copies(private.all_gather_single, torch.distributed.distributed_c10d.AllgatherOptions())
    ),
    "C": lambda: (
        callable(private.C.ScriptFunction.__call__) and callable(private.C.ScriptMethod.__call__)
    ),
    "ASKS_FOR_FAKES": lambda: all(
        callable(getattr(holder, name)) for holder, name in private.ASKS_FOR_FAKES
    ),
    "CALLS": _module_calls,
    "COMMON_TENSORS": lambda: torch.Tensor in private.COMMON_TENSORS,
    "is_wrapper_subclass": _takes_wrappers_apart,
    "assert_that": lambda: private.assert_that(True, "what is not so") is None,
    "C_NN": lambda: callable(private.C_NN.cross_entropy_loss),
    "ENGINE_CODE": _engine_runs,
    "HOOKS": lambda: all(hasattr(torch.ones(1), name) for name in private.HOOKS),
    "TENSOR_DATA": lambda: torch.equal(private.TENSOR_DATA.__get__(torch.ones(2)), torch.ones(2)),
    "TRACER_ENTRIES": _tracers,
    "VF": _packed,
    "BelowAutograd": _below_autograd,
    "enable_python_dispatcher": _dispatches_in_python,
    "DataDependentOutputException": _data_dependent,
    "DeviceContext": _function_modes,
    "DisableAutocast": _autocasts,
    "DisableTorchDispatch": _no_dispatch,
    "DisableTorchFunction": _function_modes,
    "DynamicOutputShapeException": _data_dependent,
    "FakeTensor": _fakes,
    "HigherOrderOperator": _reaches_modes,
    "FakeTensorMode": _fakes,
    "OpOverload": _overloads,
    "TorchDispatchMode": _dispatch_modes,
    "UnsupportedOperatorException": lambda: issubclass(
        private.UnsupportedOperatorException, Exception
    ),
    "aot_autograd": _compiles,
    "attention_order": _attention,
    "backend_classes": _backend,
    "backend_name": _backend,
    "base_name": _overloads,
    "boxed": _compiles,
    "c_function": _overloads,
    "c_pointer": _shares,
    "backward_compiler": _compiler_of_backward_graphs,
    "compile_options": _compile_options,
    "compiled_entries": _compiled_code,
    "as_written": _frames,
    "keep_as_written": _frames,
    "leaves_callee": _leaves,
    "look_at_frames": _frames,
    "put_in_place": _frames,
    "take_from_place": _frames,
    "is_precompiled": _frames,
    "compiled_codes": _which_frames,
    "has_tensors": _which_frames,
    "is_looked_at": _which_frames,
    "know_functions": _functions_are_known,
    "compiled_graph": _compiled_graph,
    "DYNAMIC_INDICES": _dynamic_sizes,
    "FROM_STANCE": _compiled_code,
    "IS_COMPILING": _says_that_it_compiles,
    "IS_NESTED": _compiled_code,
    "count_dispatch_modes": _dispatch_modes,
    "count_function_modes": _function_modes,
    "current_node": _node_runs,
    "deterministic_switches": _switches,
    "disable_current_modes": _dispatch_modes,
    "disable_fake_tensor_cache": _cache_is_off,
    "dispatch_modes": _dispatch_modes,
    "engine": _engine_runs,
    "chunk_cat": _kernels_of_shards,
    "shard_kernel": _kernels_of_shards,
    "forget_forward_passes": _in_group(_shards),
    "replicate": _in_group(_replicates),
    "set_up_shards": _in_group(_shards),
    "fake_store": _stands_for_ranks,
    "mesh_class": _in_group(_meshes),
    "has_real_ranks": _in_group(_meshes),
    "shard_memory": _in_group(_shards),
    "shard_parts": _parts_of_shards,
    "exchange_shard": _in_group(_shards),
    "flat_shape": _in_group(_shards),
    "shards": _in_group(_shards),
    "shard_faults": _in_group(_shards),
    "shard_settings": _in_group(_shards),
    "shard_holders": _in_group(_shards),
    "shard_states": _in_group(_shards),
    "shard_groups": _in_group(_shards),
    "layout_rules": _beside_operators_on_dtensors,
    "graph_task": _tells_tasks,
    "single_dimension_rules": _rules_of_placements,
    "spec_rules": _rules_of_placements,
    "whole_parameters": _in_group(_whole_for_a_while),
    "with_numbers": _finds_layouts,
    "gives_arguments": _finds_layouts,
    "spread_generators": _beside_operators_on_dtensors,
    "mask_buffer": _beside_operators_on_dtensors,
    "distributed_switches": _switches_of_dtensors,
    "is_pending": _in_group(_pending),
    "is_pending_class": _in_group(_pending),
    "holds_mask": _in_group(_parts),
    "joined": _in_group(_parts),
    "layout_of": _in_group(_parts),
    "local_of": _in_group(_parts),
    "has_dtensors": _in_group(_parts),
    "is_dtensor": _in_group(_parts),
    "is_dtensor_class": _in_group(_parts),
    "dtensor_class": _in_group(_parts),
    "behind_proxy": _versions_move,
    "dict_versions": _versions_move,
    "engine_will_run": _will_run,
    "OPERATORS": _overloads,
    "finished_work": _finishes,
    "unboxed": _in_group(_unboxes),
    "flat_weights_of": _flat_weights,
    "float32_precisions": _precisions,
    "matmul_precision": _precisions,
    "set_float32_precisions": _precisions_set,
    "foreach_types": _foreach,
    "frame_evaluation": _compiled_code,
    "forget_layouts": _in_group(_forgets_layouts),
    "function_modes": _function_modes,
    "function_transform": _transforms,
    "HiddenMode": _hidden_mode,
    "is_wrapped": _wrapped,
    "gradient_hooks_of": _hooked,
    "guarded_places": _tells_what_is_guarded,
    "called_overloads": _called_overloads,
    "has_kernel": _kernels,
    "is_by_custom_op": _by_custom_op,
    "has_kernel_for": _kernels,
    "has_module_hooks": _module_calls,
    "has_variable_sizes": _has_sizes,
    "hooks_of": _hooked,
    "hooks_on_all_modules": _hook_tables,
    "hooks_on_all_optimizers": _hook_tables,
    "implemented": _implements,
    "in_kernel_invocation_manager": _fakes,
    "inductor_graph": _graphs_of_inductor,
    "innermost_backend": _compiled_code,
    "is_compiled": _is_compiled,
    "is_any_autocast_enabled": _autocasts,
    "is_forgotten": _forgets,
    "is_graph_break": _graph_breaks,
    "is_input_mutation": _partitions,
    "is_marked": _sees_marks,
    "is_of_dynamo": _raised_by_dynamo,
    "seen_from": lambda: (
        (base := torch.ones(2)) is private.seen_from(base[0][None])
        and private.seen_from(base) is None
    ),
    "is_zero_derivative": lambda: (
        private.is_zero_derivative(torch._efficientzerotensor((2,)))
        and not private.is_zero_derivative(torch.zeros(2))
    ),
    "is_view": lambda: private.is_view(torch.ones(2)[0]) and not private.is_view(torch.ones(2)),
    "keeping_activations": _keeps_activations,
    "keeping_equal_nodes": _partitions,
    "kernel_library_switches": _kernel_libraries,
    "layout_check": _layouts_compared,
    "left_by_dynamo": _left,
    "mark_parameter": _marks,
    "may_compile": _limits,
    "neg_view": _negates,
    "next_sequence_number": _numbered,
    "node_class": _node_class,
    "packet_of": _overloads,
    "parameters_of": _flat_weights,
    "private_use_type": lambda: private.private_use_type() is not None,
    "protect_pointer": _fakes,
    "pytree": lambda: private.pytree.tree_leaves(({"a": 1}, [2])) == [1, 2],
    "reduce_scatter_single": _in_group(
        _copies(
            private.reduce_scatter_single, torch.distributed.distributed_c10d.ReduceScatterOptions()
        )
    ),
    "rebuild_buckets": _ddp(lambda ddp: private.rebuild_buckets(_trained(ddp).reducer)),
    "reducer_data": _ddp(_tells_buckets),
    "comm_hook_of": _ddp(_names_hook),
    "kept_buckets": _ddp(_keeps_buckets),
    "expects_backward": _ddp(_expects),
    "prepares_after": _ddp(_prepares),
    "is_joined": _ddp(lambda ddp: not private.is_joined(ddp)),
    "ddp_parameters": _ddp(lambda ddp: private.ddp_parameters(ddp) == list(ddp.parameters())),
    "broadcast_buckets": lambda: (
        [
            len(b)
            for b in private.broadcast_buckets(
                [torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2)], 1000
            )
        ]
        == [2, 1]
    ),
    "to_device": _ddp(_moves),
    "mark_begun": _ddp(_marks_begun),
    "is_ddp": _ddp(lambda ddp: private.is_ddp(ddp) and not private.is_ddp(ddp.module)),
    "version_kept": lambda: _keeps_version(torch.ones(2)),
    "remade_attributes": _ddp(lambda ddp: private.remade_attributes(ddp) <= vars(ddp).keys()),
    "store_of": _in_group(_keeps),
    "reducer_class": lambda: isinstance(private.reducer_class(), (type, type(None))),
    "register_backend": _backend,
    "resolve_group": _in_group(lambda group: private.resolve_group(group.group_name) is group),
    "run_composite": _composite,
    "run_unplanned": _compiles,
    "saved_tensor_hooks": _saved_hooks,
    "scaler_start": lambda: callable(private.scaler_start()),
    "on_own_storage": _owns,
    "schema_of": _schema,
    "sequence_number": _numbered,
    "set_fill_uninitialized": _switches,
    "set_flat_weights": _flat_weights,
    "set_grad_enabled": _grad_mode,
    "set_kernel_libraries": _kernel_libraries,
    "set_step_called": _steps,
    "start_allocator_events": _events,
    "stop_allocator_events": _events,
    "storage_pointer": _shares,
    "STORAGES_SWAP": _fills,
    "allow_access": _fills,
    "forbid_access": _fills,
    "free_weak_storage": _expires,
    "is_expired": _expires,
    "storage_at": _fills,
    "storage_by": _expires,
    "storage_of": _fills,
    "storage_uses": _uses,
    "swap_memory": _fills,
    "weak_storage": _expires,
    "with_conj": _stands_for,
    "with_neg": _stands_for,
    "strides_together": lambda: (
        private.strides_together(torch.ones(2, 3).t(), torch.ones(3, 2).expand(3, 2)) == (1, 3)
    ),
    "subclass_of": _fakes,
    "without_data": _has_no_memory,
    "tensor_uses": _holds,
    "suggest_memory_format": lambda: (
        private.suggest_memory_format(torch.ones(2)) is torch.contiguous_format
    ),
    "tracing_context": _compiles,
    "unseen_calls": _is_seen_or_not,
    "version_of": _written,
    "was_step_called": _steps,
}


NEEDED_WITH_2_15 = {
    "DYNAMIC_INDICES", "FROM_STANCE", "IS_NESTED", "backward_compiler", "compiled_codes",
    "compiled_entries", "compiled_graph", "frame_evaluation", "has_tensors", "innermost_backend",
    "is_looked_at", "may_compile",
    "chunk_cat", "exchange_shard", "flat_shape", "forget_forward_passes", "set_up_shards", "shard_faults",
    "shard_groups", "shard_holders", "shard_kernel", "shard_memory", "shard_settings", "shard_states",
    "shards", "single_dimension_rules", "spec_rules", "whole_parameters",
    "expects_backward", "finished_work", "kept_buckets", "unboxed",
}  # fmt: skip
"""What roam uses to record compiled regions, `fully_shard`, layouts of distributed tensors, and the
newer arguments of `DistributedDataParallel`: it does these only with PyTorch 2.15, or does less
with an older one.
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_2_15) if name in NEEDED_WITH_2_15 else name
        for name in private.__all__
    ],
)
def test_name_means_what_roam_takes_it_for(name: str) -> None:
    assert CANARIES[name]()


def test_every_canary_is_of_a_name() -> None:
    assert CANARIES.keys() == set(private.__all__)


# -- patches


def patch_id(patch: Patch) -> str:
    return patch.holder


PARTS = [
    (patch, name) for patch in PATCHES for name in patch.names if not patch.holder.startswith("<")
]


@pytest.mark.parametrize(
    ("patch", "name"), PARTS, ids=lambda part: part if isinstance(part, str) else part.holder
)
def test_patch_can_be_made_and_taken_away(patch: Patch, name: str) -> None:
    for end in range(patch.holder.count(".") + 1):
        module = patch.holder.rsplit(".", end)[0]
        try:
            importlib.import_module(module)
        except ImportError:
            continue
        break
    holder = resolved(patch.holder)
    if holder is None:
        assert patch.optional, f"{patch.holder} is not there"
        return
    is_builtin = name in ("float", "max", "min")
    if not (hasattr(holder, name) or is_builtin):
        assert patch.optional or holder is torch, f"{patch.holder}.{name} is not there"
        return
    table, missing = vars(holder), object()
    before = table.get(name, missing)
    value: Any = (
        property(lambda _: None)
        if name in ("__class__", "__dict__")
        else staticmethod(lambda *_: None)
    )
    with replaced([(holder, name, value)]):
        assert table[name] is value
    assert table.get(name, missing) is before


def test_every_patch_has_a_reason_and_says_what_breaks() -> None:
    assert all(patch.reason and patch.without and patch.names for patch in PATCHES)
    listed = [(patch.holder, name) for patch in PATCHES for name in patch.names]
    assert len(listed) == len(set(listed))


def test_what_is_not_listed_is_not_patched() -> None:
    with pytest.raises(Unlisted, match="no_grad"), replaced([(torch, "no_grad", None)]):
        pass
    with (
        pytest.raises(Unlisted),
        patches.methods_added([(type("Mine", (), {}), "__eq__", lambda *_: True)]),
    ):
        pass


def test_a_list_that_ends_in_an_error_leaves_nothing() -> None:
    before = torch.Tensor.item
    with (
        pytest.raises(Unlisted),
        replaced([(torch.Tensor, "item", None), (torch, "no_grad", None)]),
    ):
        pass
    assert torch.Tensor.item is before


@pytest.mark.parametrize("name", ["item", "__format__"])
@pytest.mark.parametrize("ends", list(itertools.permutations(range(3))))
def test_blocks_of_several_threads_may_end_in_any_order(ends: tuple[int, ...], name: str) -> None:
    before, values = getattr(torch.Tensor, name), [object() for _ in range(3)]
    blocks = [replaced([(torch.Tensor, name, value)]) for value in values]
    for block in blocks:
        block.__enter__()
    inside = {0, 1, 2}
    for end in ends:
        blocks[end].__exit__(None, None, None)
        inside.remove(end)
        assert getattr(torch.Tensor, name) is (values[max(inside)] if inside else before)
    assert not patches._standing


def everything() -> dict[str, Any]:
    """All attributes that patches may replace, as they are now."""
    found = {}
    for patch, name in PARTS:
        holder = resolved(patch.holder)
        if holder is not None:
            found[f"{patch.holder}.{name}"] = vars(holder).get(name)
    return found


OBSERVER: dict[str, Any] = {
    "__name__": "roam.observer",
    "everything": everything,
    "before": {},
    "seen": [],
}
exec(
    compile(
        "def observe():\n    now = everything()\n    seen.append({name for name in now if now[name] is not before[name]})\n",
        str(PACKAGE / "observer.py"),
        "exec",
    ),
    OBSERVER,
)
"""Its function counts as roam's own, so that what it notes is none of the step's state."""


class Model(torch.nn.Module):
    """A class of the user's, in which reads are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.action: Callable[[], object] = lambda: None
        self.observe: Callable[[], None] = OBSERVER["observe"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.observe()
        self.action()
        return self.linear(x)


@pytest.fixture
def during() -> list[set[str]]:
    """What was replaced whenever the step looked."""
    OBSERVER["before"].clear()
    OBSERVER["before"].update(everything())
    OBSERVER["seen"].clear()
    return OBSERVER["seen"]


def _fail() -> None:
    raise ValueError("no")


def _press() -> None:
    signal.raise_signal(signal.SIGINT)
    torch.ones(1)


def _exit() -> None:
    raise SystemExit


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (lambda: None, None),
        (_fail, roam.CaptureError),
        (_press, KeyboardInterrupt),
        (_exit, SystemExit),
    ],
    ids=["returns", "raises", "is interrupted", "exits"],
)
def test_nothing_is_left_of_a_trace(
    action: Callable[[], object], error: type[BaseException] | None, during: list[set[str]]
) -> None:
    model = Model()
    model.action = action
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum() * scheduler.gamma
        loss.backward()
        optimizer.step()
        return loss

    before = everything()
    classes, instances = dict(vars(Model)), dict(vars(scheduler))
    names = dict(globals())
    if error is None:
        roam.capture(step, torch.ones(2, 3))
    else:
        with pytest.raises(error):
            roam.capture(step, torch.ones(2, 3))
    assert "torch.Tensor.item" in during[0]
    assert "torch._subclasses.fake_tensor.FakeTensor.__class__" in during[0]
    assert len(during[0]) > 50
    assert everything() == before
    assert dict(vars(Model)) == classes
    assert vars(scheduler).keys() == instances.keys()
    assert globals().keys() == names.keys()


# -- nobody else

PYTHON_PRIVATE = frozenset(
    {
        "_getframe",
        "_current_frames",
        "_exit",
        "_lru_cache_wrapper",
        "_name_",
        "_replace",
        "_data",
        "_check_instance",
        "_reconstruct",
    }
)
"""Of Python's own modules: `sys`, `os`, `functools`, `enum`, named tuples, `os.environ`, `inspect`,
`copy`.
"""
EXCEPTIONS = {
    "_bit_generator": "NumPy's",
    "_pad_packed_sequence": "an attribute of `private.VF`, whose canary runs it",
}
OPERATORS = ("aten", "torch.ops", "private.VF")
"""Operators are known by their schemas; the table of kernels is pinned to a version of PyTorch."""


@functools.cache
def own_names() -> set[str]:
    """Private names that roam's own code defines."""
    names: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    names.add(node.attr)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
                names |= set(ast.literal_eval(node.value))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


KNOWN = frozenset(
    re.findall(r'attrgetter\("(\w+)"\)', (PACKAGE / "torch_compat" / "private.py").read_text())
)


def private_uses(text: str, own: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of what a source uses of PyTorch's private side."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (
                (node.lineno, f"{node.module}: {part}") for part in parts if is_private(part)
            )
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.") and any(map(is_private, alias.name.split("."))):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            text_of = ast.unparse(node)
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            if (
                (node.attr in KNOWN and not of_self)
                or text_of.startswith("torch._")
                or (
                    not text_of.startswith(OPERATORS)
                    and node.attr not in own
                    and not node.attr.startswith("_roam")
                    and node.attr not in PYTHON_PRIVATE
                    and node.attr not in EXCEPTIONS
                )
            ):
                yield node.lineno, text_of


FILES = [
    file
    for file in sorted(PACKAGE.rglob("*.py"))
    if not {"torch_compat", "scripts"} & set(file.parts)
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_other_file_uses_private_names(file: Path) -> None:
    own = own_names()
    assert list(private_uses(file.read_text(), own)) == []


@pytest.mark.parametrize(
    "text",
    [
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.utils import _pytree",
        "import torch.utils._pytree as pytree",
        "def f(x):\n    return x._version",
        "torch._C._functorch.peek_interpreter_stack()",
        "y = operator._schema.arguments",
    ],
)
def test_a_planted_private_name_is_found(text: str) -> None:
    assert list(private_uses(text, own_names()))
