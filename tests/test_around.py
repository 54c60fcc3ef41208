"""Code that PyTorch runs around a step, before its capture and later: hooks, modes, switches, replaced functions.

Whatever it is, a compiled step gives eager's bits, is planned anew, or is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import roam
from training import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
nn = torch.nn

Change = Callable[[Any], Any]
"""What happens around the steps of `my`: may return what makes a block around each call, and push clean-up onto `my.stack`."""


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


def run(wrap: Callable[[Any], Any], change: Change, late: bool, step: Callable[..., Any] = train) -> list[Any]:
    """Six steps with the change from the first or the fourth call on; what they return and leave."""
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
                outcome.append(compiled(my.net, my.optimizer, torch.randn(4, 16, generator=generator)))
    return [*outcome, *(p.detach().clone() for p in my.net.parameters())]


def compiled(step: Callable[..., Any]) -> Any:
    return roam.compile(step, poison=True)


def check(change: Change, late: bool, step: Callable[..., Any] = train) -> None:
    """As eager, and the change itself is no idle one."""
    eager = run(lambda step: step, change, late, step)
    assert_same_bits(eager, run(compiled, change, late, step))


def check_refused(change: Change, late: bool, code: str, step: Callable[..., Any] = train) -> roam.CaptureError:
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

    my.stack.enter_context(torch.autograd.graph.register_multi_grad_hook(list(my.net.parameters()), scale))


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
    assert str(error).startswith("Register hooks with Tensor.register_hook")
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
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_modules_that_reduce_gradients_are_refused_by_name() -> None:
    my = make()
    optimizer = my.optimizer
    for net in (
        nn.parallel.DistributedDataParallel(copy.deepcopy(my.net)),
        nn.Sequential(nn.parallel.DistributedDataParallel(my.net)),
    ):
        with pytest.raises(roam.CaptureError, match="DistributedDataParallel") as refusal:
            compiled(train)(net, optimizer, torch.ones(4, 16))
        assert refusal.value.code == "reducing_module"


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


def _reduces(gradient: torch.Tensor) -> None:
    torch.distributed.all_reduce(gradient)


def _waits(gradient: torch.Tensor) -> None:
    torch.distributed.all_reduce(gradient, async_op=True).wait()


def _reduces_functionally(gradient: torch.Tensor) -> None:
    import torch.distributed._functional_collectives as functional

    functional.all_reduce(gradient, "sum", torch.distributed.group.WORLD)


def _gathers(gradient: torch.Tensor) -> None:
    torch.distributed.all_gather([torch.empty_like(gradient)], gradient)


def _sends_objects(gradient: torch.Tensor) -> None:
    torch.distributed.broadcast_object_list([1], 0)


def _meets(gradient: torch.Tensor) -> None:
    torch.distributed.barrier()


def _asks_the_group(gradient: torch.Tensor) -> None:
    torch.distributed.group.WORLD.allreduce([gradient]).wait()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "collective", [_reduces, _waits, _reduces_functionally, _gathers, _sends_objects, _meets, _asks_the_group]
)
def test_collectives_are_refused_as_what_they_are(collective: Callable[[torch.Tensor], None]) -> None:
    def step(net: Any, optimizer: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        collective(net[0].weight.grad)
        optimizer.step()

    error = check_refused(lambda my: None, False, "collective", step)
    assert "call collectives outside of the step" in str(error)
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
