"""Code that PyTorch runs around a step, before its capture and later: hooks, modes, switches,
replaced functions.

Whatever it is, a compiled step gives eager's bits, is planned anew, or is refused by name.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.utils.prune
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import roam
from newer import needs_2_15
from roam.state.global_flags import KernelSwitches, Switches
from roam.torch_compat.private import float32_precisions, set_float32_precisions
from roam.tracing.stand_ins.function_stand_ins import is_tracing
from training import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
nn = torch.nn

Change = Callable[[Any], Any]
"""What happens around the steps of `my`: may return what makes a block around each call, and push
clean-up onto `my.stack`."""


def make() -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    return SimpleNamespace(net=net, optimizer=torch.optim.AdamW(net.parameters(), 1e-2), scale=0.5)


def train(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def run(
    wrap: Callable[[Any], Any], change: Change, late: bool, step: Callable[..., Any] = train
) -> list[Any]:
    """Six steps with the change from the first or the fourth call on; what they return and
    leave."""
    my = make()
    compiled = wrap(step)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    outcome: list[Any] = []
    generator = torch.Generator().manual_seed(1)
    with ExitStack() as stack:
        my.stack = stack
        for index in range(6):
            if index == (3 if late else 0):
                around = change(my) or nullcontext
            if index == 4:
                my.scale = 0.75
            with around():
                outcome.append(
                    compiled(my.net, my.optimizer, torch.randn(4, 16, generator=generator))
                )
    return [*outcome, *(p.detach().clone() for p in my.net.parameters())]


def compiled(step: Callable[..., Any]) -> Any:
    return roam.compile(step, poison=True)


def check(change: Change, late: bool, step: Callable[..., Any] = train) -> None:
    """As eager, and the change itself is no idle one."""
    eager = run(lambda step: step, change, late, step)
    assert_same_bits(eager, run(compiled, change, late, step))


def check_refused(
    change: Change, late: bool, code: str, step: Callable[..., Any] = train
) -> roam.CaptureError:
    with pytest.raises(roam.CaptureError) as refusal:
        run(compiled, change, late, step)
    assert refusal.value.code == code
    return refusal.value


late_or_not = pytest.mark.parametrize("late", [False, True], ids=["before", "later"])


# -- hooks on several gradients and on autograd's nodes


def scales_all(my: Any) -> None:
    def scale(gradients: Any) -> None:
        norm = torch.sqrt(sum(g.square().sum() for g in gradients if g is not None))
        for gradient in gradients:
            if gradient is not None:
                gradient.div_(norm + my.scale)

    my.stack.enter_context(
        torch.autograd.graph.register_multi_grad_hook(list(my.net.parameters()), scale)
    )


def scales_all_that_are_stored(my: Any) -> None:
    parameters = list(my.net.parameters())

    def scale(_: Any) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(my.scale)

    my.stack.enter_context(torch.autograd.graph.register_multi_grad_hook(parameters, scale))


def scales_the_first(my: Any) -> None:
    my.stack.enter_context(
        torch.autograd.graph.register_multi_grad_hook(
            list(my.net.parameters()), lambda gradient: gradient.mul_(my.scale), mode="any"
        )
    )


@late_or_not
@pytest.mark.parametrize("change", [scales_all, scales_all_that_are_stored, scales_the_first])
def test_hooks_on_several_gradients_are_called(change: Change, late: bool) -> None:
    check(change, late)


@late_or_not
@pytest.mark.parametrize("name", ["register_hook", "register_prehook"])
def test_hooks_on_the_nodes_of_parameters_are_refused(name: str, late: bool) -> None:
    def change(my: Any) -> None:
        weight = my.net[0].weight
        my.node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        getattr(my.node, name)(lambda *_: None)

    error = check_refused(change, late, "autograd_node")
    assert "; register hooks with Tensor.register_hook" in str(error)
    assert "net[0].weight" in str(error)


def test_a_living_graph_of_an_earlier_loss_is_no_hook() -> None:
    my = make()
    kept = my.net(torch.ones(4, 16)).square().mean()
    step = compiled(train)
    step(my.net, my.optimizer, torch.ones(4, 16))
    assert kept.grad_fn is not None
    handle = my.net[0].weight.register_hook(lambda gradient: gradient)
    handle.remove()
    step(my.net, my.optimizer, torch.ones(4, 16))
    assert len(step._captures) == 1


# -- other processes


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    """This process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_any_module_that_holds_a_reducer_is_refused() -> None:
    class Own(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net
            self.reducer = nn.parallel.DistributedDataParallel(net).reducer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    my = make()
    with pytest.raises(roam.CaptureError, match="Own with a reducer") as refusal:
        compiled(train)(Own(my.net), my.optimizer, torch.ones(4, 16))
    assert refusal.value.code == "reducing_module"


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # one rank
@pytest.mark.parametrize("are_original", [True, False])
def test_fully_sharded_data_parallel_is_refused(are_original: bool) -> None:
    my = make()
    net = FullyShardedDataParallel(
        my.net, device_id=torch.device("cpu"), use_orig_params=are_original
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(
        roam.CaptureError, match=r"FullyShardedDataParallel.*fully_shard"
    ) as refusal:
        compiled(train)(net, optimizer, torch.ones(4, 16))
    assert refusal.value.code == "reducing_module"


def _sends_objects(gradient: torch.Tensor) -> None:
    torch.distributed.broadcast_object_list([1], 0)


def _sends(gradient: torch.Tensor) -> None:
    torch.distributed.group.WORLD.send([gradient], 0, 0)


def _reduces_together(gradient: torch.Tensor) -> None:
    torch.distributed.group.WORLD.allreduce_coalesced([gradient, gradient]).wait()


def _reduces_functionally_together(gradient: torch.Tensor) -> None:
    import torch.distributed._functional_collectives as functional

    functional.all_reduce_coalesced([gradient], "sum", torch.distributed.group.WORLD)


def _reduces_complex_numbers(gradient: torch.Tensor) -> None:
    torch.distributed.group.WORLD.allreduce([gradient.to(torch.complex64)]).wait()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "collective",
    [
        _sends_objects,
        _sends,
        _reduces_together,
        _reduces_functionally_together,
        _reduces_complex_numbers,
    ],
)
def test_collectives_are_refused_as_what_they_are(
    collective: Callable[[torch.Tensor], None],
) -> None:
    def step(net: Any, optimizer: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        collective(net[0].weight.grad)
        optimizer.step()

    error = check_refused(lambda my: None, False, "collective", step)
    assert "a plan cannot launch this operation" in str(error)
    assert "between two compiled functions" in str(error)
    assert "test_around.py" in str(error.source)


@pytest.mark.usefixtures("process_group")
def test_collectives_go_between_two_compiled_functions() -> None:
    def backward(net: Any, x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss

    def update(optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def trained(wrap: Callable[[Any], Any]) -> list[Any]:
        my, found = make(), []
        halves = wrap(backward), wrap(update)
        for index in range(4):
            found.append(halves[0](my.net, torch.full((4, 16), index / 4)).detach())
            for parameter in my.net.parameters():
                torch.distributed.all_reduce(parameter.grad)
            halves[1](my.optimizer)
        return [*found, *my.net.parameters()]

    assert_same_bits(trained(lambda step: step), trained(compiled))


# -- what surrounds the call


class _Halving(TorchFunctionMode):
    def __init__(self, my: Any) -> None:
        super().__init__()
        self.my = my

    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        # Any function's: of those, too, that a plan calls.
        return (
            result * self.my.scale
            if function in (torch.tanh, torch.ops.aten.tanh.default)
            else result
        )


class _Scaling(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 0.9 if function is torch.ops.aten.tanh.default else result


def function_mode(my: Any) -> Any:
    mode = _Halving(my)
    return lambda: mode


def new_function_modes(my: Any) -> Any:
    return lambda: _Halving(my)


def hooks_on_saved_tensors(my: Any) -> Any:
    return lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t * 1.0, lambda t: t * my.scale
    )


def saved_on_cpu(my: Any) -> Any:
    return torch.autograd.graph.save_on_cpu


def default_device(my: Any) -> Any:
    return lambda: torch.device("cpu")


def no_flags_of_libraries(my: Any) -> Any:
    return lambda: torch.backends.mkldnn.flags(enabled=False)


def deterministic(my: Any) -> None:
    my.stack.callback(torch.use_deterministic_algorithms, False)
    torch.use_deterministic_algorithms(True)


def threads(my: Any) -> None:
    my.stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(2)


def flushed_denormals(my: Any) -> None:
    my.stack.callback(torch.set_flush_denormal, False)
    torch.set_flush_denormal(True)


def traced_python(my: Any) -> None:
    my.stack.callback(sys.settrace, sys.gettrace())
    sys.settrace(lambda *_: None)


def profiled(my: Any) -> Any:
    return lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


# -- hooks


def _halves(my: Any) -> Callable[..., None]:
    @torch.no_grad()
    def hook(*_: Any) -> None:
        for parameter in my.net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(my.scale)

    return hook


def before_every_optimizer(my: Any) -> None:
    my.stack.callback(register_optimizer_step_pre_hook(_halves(my)).remove)


def after_every_optimizer(my: Any) -> None:
    @torch.no_grad()
    def hook(*_: Any) -> None:
        for parameter in my.net.parameters():
            parameter.mul_(my.scale)

    my.stack.callback(register_optimizer_step_post_hook(hook).remove)


def before_the_optimizer(my: Any) -> None:
    my.optimizer.register_step_pre_hook(_halves(my))


def after_the_optimizer(my: Any) -> None:
    my.optimizer.register_step_post_hook(_halves(my))


def on_every_forward(my: Any) -> None:
    hook = lambda module, inputs, output: output * my.scale if isinstance(module, nn.Tanh) else None  # noqa: E731
    my.stack.callback(nn.modules.module.register_module_forward_hook(hook).remove)


def on_every_backward(my: Any) -> None:
    def hook(module: Any, inner: Any, outer: Any) -> Any:
        return tuple(g * my.scale for g in inner) if isinstance(module, nn.Tanh) else None

    my.stack.callback(nn.modules.module.register_module_full_backward_hook(hook).remove)


def on_forward(my: Any) -> None:
    my.net[1].register_forward_hook(lambda module, inputs, output: output * my.scale)


def before_forward(my: Any) -> None:
    my.net[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * my.scale,))


def on_backward(my: Any) -> None:
    my.net[1].register_full_backward_hook(lambda module, inner, outer: (inner[0] * my.scale,))


def before_backward(my: Any) -> None:
    my.net[1].register_full_backward_pre_hook(lambda module, outer: (outer[0] * my.scale,))


def on_a_gradient(my: Any) -> None:
    my.net[0].weight.register_hook(lambda gradient: gradient * my.scale)


def on_a_stored_gradient(my: Any) -> None:
    def hook(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(my.scale)

    my.net[0].weight.register_post_accumulate_grad_hook(hook)


# -- replaced code


def _replace(my: Any, holder: Any, name: str, value: Any) -> None:
    my.stack.enter_context(mock.patch.object(holder, name, value))


def forward_of_a_module(my: Any) -> None:
    old = my.net[1].forward
    my.net[1].forward = lambda x: old(x) * my.scale


def forward_of_a_class(my: Any) -> None:
    old = nn.Tanh.forward
    _replace(my, nn.Tanh, "forward", lambda self, x: old(self, x) * my.scale)


def function_of_torch(my: Any) -> None:
    old = torch.tanh
    _replace(my, torch, "tanh", lambda x: old(x) * my.scale)


def function_of_a_module(my: Any) -> None:
    old = nn.functional.linear
    _replace(my, nn.functional, "linear", lambda *args: old(*args) * my.scale)


def method_of_tensors(my: Any) -> None:
    old = torch.Tensor.square
    _replace(my, torch.Tensor, "square", lambda x: old(x) * my.scale)


def method_of_the_optimizer(my: Any) -> None:
    old = torch.optim.AdamW.step

    def step(self: Any) -> None:
        _halves(my)()
        old(self)

    _replace(my, torch.optim.AdamW, "step", step)


def function_of_the_optimizer(my: Any) -> None:
    adam = sys.modules["torch.optim.adam"]
    old = adam.adam

    def update(params: Any, gradients: Any, *args: Any, **kwargs: Any) -> None:
        old(params, [gradient * my.scale for gradient in gradients], *args, **kwargs)

    _replace(my, adam, "adam", update)


def class_of_a_module(my: Any) -> None:
    class Own(nn.Tanh):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 0.5

    my.net[1].__class__ = Own


def backward_of_tensors(my: Any) -> None:
    old = torch.Tensor.backward
    _replace(my, torch.Tensor, "backward", lambda loss: old(loss * my.scale))


def call_of_modules(my: Any) -> None:
    old = nn.Module.__call__
    _replace(my, nn.Module, "__call__", lambda self, x: old(self, x) * 1.5)


# -- wrappers around parameters


def parametrized(my: Any) -> None:
    class Halved(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 0.5

    nn.utils.parametrize.register_parametrization(my.net[0], "weight", Halved())
    my.optimizer = torch.optim.AdamW(my.net.parameters(), 1e-2)


def spectral_norm(my: Any) -> None:
    nn.utils.parametrizations.spectral_norm(my.net[0])
    my.optimizer = torch.optim.AdamW(my.net.parameters(), 1e-2)


def old_spectral_norm(my: Any) -> None:
    nn.utils.spectral_norm(my.net[0])
    my.optimizer = torch.optim.AdamW(my.net.parameters(), 1e-2)


def weight_norm(my: Any) -> None:
    nn.utils.parametrizations.weight_norm(my.net[0])
    my.optimizer = torch.optim.AdamW(my.net.parameters(), 1e-2)


def old_weight_norm(my: Any) -> None:
    nn.utils.weight_norm(my.net[0])
    my.optimizer = torch.optim.AdamW(my.net.parameters(), 1e-2)


def pruned(my: Any) -> None:
    nn.utils.prune.l1_unstructured(my.net[0], "weight", 0.5)
    my.optimizer = torch.optim.AdamW(my.net.parameters(), 1e-2)


def frozen(my: Any) -> None:
    my.net[0].weight.requires_grad_(False)


def averaged(my: Any) -> None:
    average = torch.optim.swa_utils.AveragedModel(my.net)
    my.optimizer.register_step_post_hook(lambda *_: average.update_parameters(my.net))


def other_data(my: Any) -> None:
    my.net[0].weight.data = my.net[0].weight.data * 0.5


AS_EAGER: list[Change] = [
    function_mode, new_function_modes, hooks_on_saved_tensors, saved_on_cpu, default_device, no_flags_of_libraries, deterministic,
    threads, flushed_denormals, traced_python, profiled,
    before_every_optimizer, after_every_optimizer, before_the_optimizer, after_the_optimizer, on_every_forward, on_every_backward,
    on_forward, before_forward, on_backward, before_backward, on_a_gradient, on_a_stored_gradient,
    forward_of_a_module, forward_of_a_class, function_of_torch, function_of_a_module, method_of_tensors, method_of_the_optimizer,
    function_of_the_optimizer, class_of_a_module, backward_of_tensors, call_of_modules,
    parametrized, spectral_norm, old_spectral_norm, weight_norm, old_weight_norm, pruned, frozen, averaged, other_data,
]  # fmt: skip


@late_or_not
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sweep
@pytest.mark.parametrize("change", AS_EAGER)
def test_as_eager(change: Change, late: bool) -> None:
    check(change, late)


def dispatch_mode(my: Any) -> Any:
    return _Scaling


def flop_counter(my: Any) -> Any:
    return lambda: FlopCounterMode(display=False)


def anomaly(my: Any) -> Any:
    return torch.autograd.detect_anomaly


@late_or_not
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "code", "start"),
    [
        (dispatch_mode, "dispatch_mode", "_Scaling is active around the call"),
        (flop_counter, "dispatch_mode", "_FlopCounterMode is active around the call"),
        (
            anomaly,
            "anomaly_detection",
            "torch.autograd.detect_anomaly checks gradients for nan",
        ),
    ],
)
def test_refused(change: Change, code: str, start: str, late: bool) -> None:
    assert str(check_refused(change, late, code)).startswith(start)


@pytest.mark.filterwarnings("ignore")
def test_anomaly_detection_in_the_step_is_refused_and_without_looking_at_values_it_is_not() -> None:
    def detecting(check_nan: bool) -> Any:
        def step(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.detect_anomaly(check_nan=check_nan):
                return train(net, optimizer, x)

        return step

    check_refused(lambda my: None, False, "anomaly_detection", detecting(True))
    check(lambda my: None, False, detecting(False))


def test_a_mode_inside_of_the_step_is_captured() -> None:
    def step(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        with _Scaling():
            return train(net, optimizer, x)

    check(lambda my: None, False, step)


@contextmanager
def _set(write: Callable[[Any], Any], value: Any, back: Any) -> Iterator[None]:
    write(value)
    yield
    write(back)


def _mkldnn(value: bool) -> None:
    # A module of PyTorch's tests, once imported, lets nobody set the attribute.
    torch.backends.mkldnn.set_flags(value)


SWITCHED_INSIDE: list[Callable[[], AbstractContextManager[Any]]] = [
    lambda: torch.backends.mkldnn.flags(enabled=False),
    lambda: _set(_mkldnn, False, True),
    lambda: _set(torch.set_num_threads, 2, 1),
    lambda: _set(torch.set_float32_matmul_precision, "medium", "highest"),
    lambda: _set(torch.use_deterministic_algorithms, True, False),
]


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("switched", SWITCHED_INSIDE)
def test_operators_under_a_switch_that_the_step_sets_for_them_are_refused(
    switched: Callable[[], AbstractContextManager[Any]],
) -> None:
    my = make()

    def step(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        with switched():
            y = x @ x.t()
        return train(net, optimizer, x) + y.sum()

    switches = Switches()
    with pytest.raises(roam.CaptureError, match="around the call of the step") as refusal:
        roam.compile(step)(my.net, my.optimizer, torch.randn(4, 16))
    assert refusal.value.code == "moved"
    assert refusal.value.operator == "aten.mm.default"
    assert switches.moved() is None


def test_a_switch_in_the_backward_pass_is_noticed() -> None:
    my = make()
    handle = my.net[1].register_full_backward_hook(lambda *_: torch.set_num_threads(2))

    def step(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss = train(net, optimizer, x)
        torch.set_num_threads(1)
        return loss

    with pytest.raises(roam.CaptureError, match="number of threads changed from 1 to 2"):
        roam.compile(step)(my.net, my.optimizer, torch.randn(4, 16))
    assert torch.get_num_threads() == 1
    handle.remove()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_switches_inside_of_the_step_that_change_no_kernel_of_it_are_captured() -> None:
    def step(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        torch.set_num_threads(1)  # as it is
        with torch.backends.mkldnn.flags(enabled=False):
            y = x.view(4, 2, 1, 8).transpose(0, 1)  # nothing is computed
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            y = nn.functional.scaled_dot_product_attention(y, y, y)
        with torch.backends.cudnn.flags(enabled=False):  # asked on CUDA only
            return train(net, optimizer, x + y.mean())

    check(lambda my: None, False, step)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("name", ["aten::convolution", "aten::_ctc_loss"])
def test_cudnn_is_asked_by_convolutions_on_cuda(name: str) -> None:
    switches = KernelSwitches()
    with roam.fake("cuda"):
        on_cuda = [torch.empty(2)]
    with torch.backends.cudnn.flags(enabled=False):
        assert (switches.moved(name, on_cuda) is None) is (name == "aten::_ctc_loss")
        assert switches.moved(name, [torch.empty(2)]) is None


@late_or_not
def test_transforms_around_the_step_are_refused(late: bool) -> None:
    my = make()

    def step(x: torch.Tensor) -> torch.Tensor:
        my.optimizer.zero_grad()
        my.net(torch.ones(4, 16)).square().mean().backward()
        my.optimizer.step()
        return x * 2

    planned = compiled(step)
    if late:
        planned(torch.ones(3))
    with pytest.raises(roam.CaptureError, match=r"transform of torch\.func") as refusal:
        torch.vmap(planned)(torch.ones(2, 3))
    assert refusal.value.code == "function_transform"


# -- the environment


SCALE = "ROAM_TEST_SCALE"


@pytest.mark.parametrize(
    "read",
    [
        lambda: os.environ[SCALE],
        lambda: os.environ.get(SCALE, "1"),
        lambda: os.getenv(SCALE),
        lambda: os.environb[SCALE.encode()],
        lambda: dict(os.environ)[SCALE],
        lambda: "0.5" if SCALE in os.environ and os.environ.copy()[SCALE] == "0.5" else "2",
    ],
    ids=["item", "get", "getenv", "bytes", "all", "copy"],
)
def test_environment_variables_that_the_step_reads_are_guarded(
    read: Callable[[], Any], monkeypatch: Any
) -> None:
    def step(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        return train(net, optimizer, x * float(read()))

    def change(my: Any) -> Any:
        value = iter(["0.5", "0.5", "0.5", "0.25", "0.25", "0.5"])

        def block() -> Any:
            monkeypatch.setenv(SCALE, next(value))
            return nullcontext()

        return block

    check(change, False, step)


def test_an_environment_variable_that_the_step_does_not_read_changes_nothing(
    monkeypatch: Any,
) -> None:
    my, planned = make(), compiled(train)
    planned(my.net, my.optimizer, torch.ones(4, 16))
    monkeypatch.setenv(SCALE, "1")
    planned(my.net, my.optimizer, torch.ones(4, 16))
    assert len(planned._captures) == 1


def test_setting_an_environment_variable_in_the_step_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setenv(SCALE, "1")

    def step(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        os.environ[SCALE] = "2"
        return train(net, optimizer, x)

    check_refused(lambda my: None, False, "moved", step)
    assert os.environ[SCALE] == "1"


@pytest.mark.auto
@needs_2_15
@pytest.mark.parametrize("before", [None, "1"])
def test_an_environment_variable_that_the_step_puts_back(
    before: str | None, monkeypatch: Any
) -> None:
    """The plan runs beside the step, and without that it is refused like any other change."""
    if before is None:
        monkeypatch.delenv(SCALE, raising=False)
    else:
        monkeypatch.setenv(SCALE, before)

    def step(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        old = os.environ.get(SCALE)
        os.environ[SCALE] = "2"
        try:
            return train(net, optimizer, x * float(os.environ[SCALE]))
        finally:
            if old is None:
                del os.environ[SCALE]
            else:
                os.environ[SCALE] = old

    def trained(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run = wrap(step)
        return [run(net, optimizer, torch.ones(4, 3) * n) for n in range(4)]

    assert all(map(torch.equal, trained(lambda step: step), trained(roam.compile)))
    with pytest.raises(roam.CaptureError) as caught:
        trained(functools.partial(roam.compile, python="idle"))
    assert caught.value.code == "moved"
    assert os.environ.get(SCALE) == before


def test_a_variable_by_which_libraries_choose_kernels_is_not_set_in_a_step() -> None:
    def step(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        os.environ["OMP_TEST"] = "2"
        loss = train(net, optimizer, x)
        del os.environ["OMP_TEST"]
        return loss

    check_refused(lambda my: None, False, "moved", step)
    assert "OMP_TEST" not in os.environ


@pytest.mark.parametrize("seed", [random.seed, numpy.random.seed])
def test_a_step_that_seeds_a_generator_of_pythons_is_refused_at_the_first_call(seed: Any) -> None:
    net = torch.nn.Linear(3, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        assert is_tracing(), "the plain function does not run"
        seed(0)
        return net(x).sum()

    with pytest.raises(roam.CaptureError, match="seed the generator outside") as caught:
        roam.compile(step)(torch.ones(2, 3))
    assert caught.value.code == "moved"


# -- what modules of libraries keep


def _is_doubled() -> bool:
    return "--double" in sys.argv


@pytest.mark.parametrize("asks", [False, True], ids=["itself", "by a function"])
def test_values_of_a_librarys_module_that_the_step_names_are_guarded(
    asks: bool, monkeypatch: Any
) -> None:
    def by_a_function(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        return train(net, optimizer, x * (2 if _is_doubled() else 1))

    def itself(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        return train(net, optimizer, x * (2 if "--double" in sys.argv else 1))

    step = by_a_function if asks else itself

    def change(my: Any) -> Any:
        value = iter([["x"], ["x"], ["x"], ["x", "--double"], ["x", "--double"], ["x"]])

        def block() -> Any:
            monkeypatch.setattr(sys, "argv", next(value))
            return nullcontext()

        return block

    check(change, False, step)


# -- code that no name leads to

FACTORS = {"now": 0.5}


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * FACTORS["now"]


@pytest.fixture(params=[False, True], ids=["", "frozen"])
def all_hidden(request: pytest.FixtureRequest) -> Iterator[None]:
    """With and without all objects hidden from Python's collector."""
    if request.param:
        gc.collect()
        gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("all_hidden")
def test_what_functions_read_that_are_found_by_a_computed_name_is_guarded(monkeypatch: Any) -> None:
    def step(net: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        return train(net, optimizer, globals()["_{}".format("scaled")](x))

    def change(my: Any) -> Any:
        value = iter([0.5, 0.5, 0.5, 0.25, 0.25, 0.5])

        def block() -> Any:
            monkeypatch.setitem(FACTORS, "now", next(value))
            return nullcontext()

        return block

    check(change, False, step)
    # What is garbage from now on does not stay for ever, such as the plan.
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(("library", "precisions"), [
    ("cuda", ("tf32", "none", "none")), ("cuda", ("none", "ieee", "tf32")),
    ("mkldnn", ("bf16", "none", "none")),
])  # fmt: skip
def test_the_newer_switches_of_precision_may_be_set(
    library: str, precisions: tuple[str, ...]
) -> None:
    before = float32_precisions(library)
    # As torch.backends.cuda.matmul.fp32_precision = "tf32" does, which cannot be undone wholly.
    set_float32_precisions(library, precisions)
    try:
        found = []
        for wrap in (lambda step: step, roam.compile):
            my = make()
            step = wrap(train)
            torch.manual_seed(1)
            found.append([step(my.net, my.optimizer, torch.randn(8, 16)) for _ in range(3)])
        assert_same_bits(*found)
    finally:
        set_float32_precisions(library, before)
