"""Steps that give tensors other data (`p.data = x`): afterwards values, and which tensors share
memory, are as in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from steps import batches
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
functional = torch.nn.functional
nn = torch.nn
Made = tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]
"""A step, and what of it outlives it."""


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def average(mean: nn.Module, now: nn.Module) -> None:
    for old, new in zip(mean.parameters(), now.parameters(), strict=True):
        old.data = old.data * 0.9 + new.data * 0.1


def distilling(*, first: bool) -> Made:
    """MoCo averages before the forward pass, BYOL after the update."""
    student, teacher = network(), network().requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), 0.1, momentum=0.9)

    def step(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        if first:
            average(teacher, student)
        loss = functional.mse_loss(student(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not first:
            average(teacher, student)
        return loss

    return step, lambda: [*student.parameters(), *teacher.parameters()]


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization as its reference implementation has it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.9})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old_p"]  # from here on they share memory
        self.base.step()
        self.zero_grad()


def sharpness() -> Made:
    net = network()
    optimizer = Sharpness(net.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.climb()
        functional.cross_entropy(net(x), y).backward()
        optimizer.descend()
        return loss

    return step, lambda: [
        *net.parameters(),
        *(entry["old_p"] for entry in optimizer.state.values()),
    ]


def read_again() -> Made:
    """What autograd has saved of a parameter is the parameter, whatever its data is by then; a view
    has the old data."""
    weight, other = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))

    def step(x: torch.Tensor, _: torch.Tensor) -> Any:
        view = weight.data[0]
        loss = ((x @ weight).tanh() @ other @ weight.t()).sum()
        weight.data = weight.data * 2
        other.data = other.data / 2
        loss.backward()
        gradients = weight.grad.clone(), other.grad.clone()
        weight.grad = other.grad = None
        return loss, view.clone(), x @ weight, gradients

    return step, lambda: [weight, other]


def exchanged() -> Made:
    one, two = nn.Linear(6, 6), nn.Linear(6, 6)

    def step(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        one.weight.data, two.weight.data = two.weight.data, one.weight.data
        with torch.no_grad():
            one.weight.mul_(1.5)
        return one(x) - two(x)

    return step, lambda: [one.weight, two.weight]


def put_back() -> Made:
    """An average takes the place of the weights for an evaluation."""
    net, mean = network(), network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        weights = [parameter.data for parameter in net.parameters()]
        for parameter, other in zip(net.parameters(), mean.parameters(), strict=True):
            parameter.data = other.data
        evaluated = net(x)
        for parameter, own in zip(net.parameters(), weights, strict=True):
            parameter.data = own
        return evaluated

    return step, lambda: [*net.parameters(), *mean.parameters()]


def tied() -> Made:
    """Two weights that share memory from the first step on."""
    one, two = nn.Linear(6, 6), nn.Linear(6, 6)
    optimizer = torch.optim.SGD(one.parameters(), 0.1)

    def step(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        two.weight.data = one.weight.data
        optimizer.zero_grad()
        (one(x) * two(x).detach()).sum().backward()
        optimizer.step()
        return two(x)

    return step, lambda: [one.weight, two.weight]


def written_through() -> Made:
    """A parameter takes over a buffer's memory and is written to; the buffer is written to in
    turn."""
    weight, held = nn.Parameter(torch.randn(6)), {"buffer": torch.zeros(6)}

    def step(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight.data = held["buffer"]
            weight.add_(x[0])
            held["buffer"].mul_(2)
        return weight * x

    return step, lambda: [weight, held["buffer"]]


def buffers() -> Made:
    net = nn.BatchNorm1d(6)

    def step(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        net.running_mean.data = net.running_mean * 0.5
        return net(x)

    return step, lambda: [net.running_mean, net.running_var]


def gradients() -> Made:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        for parameter in net.parameters():
            parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)
        optimizer.step()
        return loss

    return step, lambda: [*net.parameters()]


def flattened() -> Made:
    """All parameters become views of one vector."""
    net = network()

    def step(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        vector = nn.utils.parameters_to_vector(net.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.9, net.parameters())
        return net(x)

    return step, lambda: [*net.parameters()]


def converted() -> Made:
    """`Module.to` and its like give parameters and gradients other data, or leave them."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        net[2] = net[2].to(torch.float32)
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        net.bfloat16().float()
        optimizer.step()
        net.to("cpu").zero_grad()
        return loss

    return step, lambda: [*net.parameters()]


def inputs() -> Made:
    def step(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        x.data = x.data.clamp(0, 1)
        return x * 2

    return step, list


def returned() -> Made:
    weight = nn.Parameter(torch.randn(6))

    def step(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        weight.data = weight.data + x[0]
        return weight

    return step, lambda: [weight]


def made_in_the_step() -> Made:
    """An attack by projected gradients, as it is often written."""
    net = network()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        image = x.clone().detach().requires_grad_(True)
        for _ in range(2):
            (gradient,) = torch.autograd.grad(functional.cross_entropy(net(image), y), image)
            image.data = torch.clamp(image.data + 0.1 * gradient.sign(), 0, 1)
        return image.detach()

    return step, lambda: [*net.parameters()]


STEPS: dict[str, Callable[[], Made]] = {
    "average before": lambda: distilling(first=True),
    "average after": lambda: distilling(first=False),
    "sharpness-aware": sharpness,
    "read again": read_again,
    "exchanged": exchanged,
    "put back": put_back,
    "tied": tied,
    "written through": written_through,
    "buffers": buffers,
    "gradients": gradients,
    "flattened": flattened,
    "converted": converted,
    "inputs": inputs,
    "returned": returned,
    "made in the step": made_in_the_step,
}


def shared(tensors: list[torch.Tensor]) -> list[int]:
    """For each tensor the first that has its memory."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [storages.index(storage) for storage in storages]


def after_steps(make: Callable[[], Made], wrap: Callable[..., Any]) -> list[Any]:
    torch.manual_seed(0)
    step, kept = make()
    step = wrap(step)
    found: list[Any] = []
    for x, y in batches(4):
        # Whoever holds a tensor's memory goes on to hold that, as a state dictionary does.
        aliases = [tensor.detach() for tensor in kept()]
        result = step(x, y)
        tensors = kept()
        found += tensors_and_numbers(result, x, tensors, aliases)
        found += shared([*tensors, *aliases])
        found += [(type(tensor), tensor.requires_grad, tensor.is_leaf) for tensor in tensors]
    return found


@pytest.mark.parametrize("name", STEPS)
def test_values_and_sharing_are_as_eagerly(name: str) -> None:
    eager = after_steps(STEPS[name], lambda step: step)
    for options in ({"poison": True, "pool": True}, {"pool": False}):
        assert_same_bits(
            eager, after_steps(STEPS[name], lambda step, o=options: roam.compile(step, **o))
        )


@pytest.mark.parametrize("first", [True, False])
def test_a_plan_takes_no_more_than_eager(first: bool) -> None:
    student = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    teacher = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), 0.1, momentum=0.9)

    @roam.compile
    def step(x: torch.Tensor) -> None:
        if first:
            average(teacher, student)
        functional.mse_loss(student(x), teacher(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not first:
            average(teacher, student)

    x = torch.randn(4, 64)
    for _ in range(2):
        step(x)
    size_bytes = sum(parameter.nbytes for parameter in teacher.parameters())
    memory = step.memory()
    # Old and new data of one layer are there at once, not of all.
    assert (
        memory.total_bytes
        <= memory.program_order_bytes
        < memory.persistent_bytes + 2.5 * size_bytes
    )
    (_, plan) = step.plans[0]
    assert (
        plan.persistent_bytes < 3.1 * size_bytes
    )  # student, its momentum and the batch; the teacher's memory comes and goes


def test_a_check_comes_before() -> None:
    """Nothing has changed where a check in the step's code fails."""
    net, mean = network(), network()

    @roam.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        average(mean, net)
        loss = mean(x).sum()
        assert not torch.isnan(loss)
        return loss

    x = torch.randn(4, 6)
    for _ in range(3):
        step(x)
    twin = [parameter.detach().clone() for parameter in mean.parameters()]
    with pytest.raises(AssertionError):
        step(torch.full((4, 6), torch.nan))
    averaged = [old * 0.9 + new * 0.1 for old, new in zip(twin, net.parameters(), strict=True)]
    assert_same_bits(tensors_and_numbers(averaged), tensors_and_numbers(list(mean.parameters())))


def test_capture_leaves_fakes_as_they_were() -> None:
    with roam.fake("cpu"):
        one, two, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(2, 4)

    def step() -> torch.Tensor:
        one.weight.data = two.weight.data
        return one(x)

    before = shared([one.weight, two.weight])
    roam.capture(step)
    assert shared([one.weight, two.weight]) == before == [0, 1]


def test_other_shapes_at_every_call_are_refused() -> None:
    weight = nn.Parameter(torch.randn(3, 4))

    def step() -> torch.Tensor:
        weight.data = weight.data.t().contiguous()
        return weight.sum()

    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(step)()
    assert caught.value.code == "unstable"
    assert weight.shape == (3, 4)


def test_data_on_another_device_is_refused() -> None:
    weight = nn.Parameter(torch.randn(3))

    def step() -> torch.Tensor:
        weight.data = weight.data.to("meta")
        return weight.sum()

    with pytest.raises(roam.CaptureError, match=r"outside of the step") as caught:
        roam.compile(step)()
    assert caught.value.code == "storage_replaced"


def test_data_under_inference_mode_is_refused() -> None:
    net = network()

    def step(context: Any) -> torch.Tensor:
        with context:
            net[0].weight.data = net[0].weight.data * 0.5
        return net(torch.ones(2, 6))

    with pytest.raises(roam.CaptureError, match=r"torch\.no_grad") as caught:
        roam.compile(step)(torch.inference_mode())
    assert caught.value.code == "storage_replaced"
    expected = net[0].weight * 0.5
    roam.compile(step)(torch.no_grad())
    assert torch.equal(net[0].weight, expected)


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_gradient_of_older_data_is_refused(change: str) -> None:
    net = network()
    functional.mse_loss(net(torch.randn(4, 6)), torch.randn(4, 3)).backward()
    weight = net[0].weight if change == "dtype" else net[0].bias
    gradient = weight.grad
    weight.data = weight.data.double() if change == "dtype" else weight.data[:1]

    def step() -> None:
        net.zero_grad()
        weight.square().sum().backward()

    with pytest.raises(roam.CaptureError, match=r"set p\.grad = None") as caught:
        roam.compile(step)()
    assert caught.value.code == "gradient_form"
    assert weight.grad is gradient
    weight.grad = None
    roam.compile(step)()


def test_an_update_that_a_scaler_may_leave_out_assigns_nothing() -> None:
    net = network()
    optimizer, scaler = Sharpness(net.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0)

    def update(closure: Any = None) -> None:
        optimizer.climb()
        optimizer.descend()

    optimizer.step = update  # type: ignore[method-assign]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(step)(*batches(1)[0])
    assert caught.value.code == "scaler"
