"""Schedulers of learning rates: a plan steps those that a step steps after its run, and a step that
asks for what they set runs beside its plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import roam
from roam.runtime.beside.placeholders import is_possible
from steps import both

MAKE: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, 2, cycle_momentum=False
    ),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [3],
    ),
    "doubled": lambda optimizer: Doubled(optimizer),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}


class Doubled(lr_scheduler.LRScheduler):
    def get_lr(self) -> Any:
        return [rate / (1 + self.last_epoch) for rate in self.base_lrs]

    def get_last_lr(self) -> Any:
        return [2 * rate for rate in super().get_last_lr()]


class Task:
    def __init__(self, make: Callable[[Any], Any], leave: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)], nn.Tanh())
        groups = [
            {"params": list(self.net[:2].parameters())},
            {"params": list(self.net[2:].parameters()), "lr": 0.01},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.scheduler = make(self.optimizer)
        self.leave = leave

    def step(self, x: torch.Tensor, log: dict[str, Any]) -> Any:
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return self.leave(self, loss.detach(), log)


def rates_after(task: Task, loss: Any, log: Any) -> Any:
    task.scheduler.step()
    return {"loss": loss.item(), "rates": task.scheduler.get_last_lr()}


def epochs(task: Task, loss: Any, log: Any) -> Any:
    before = task.scheduler.last_epoch
    task.scheduler.step()
    return before, task.scheduler.last_epoch, task.optimizer.param_groups[1]["lr"]


def twice(task: Task, loss: Any, log: Any) -> Any:
    task.scheduler.step()
    first = task.scheduler.get_last_lr()[0], task.scheduler.last_epoch
    task.scheduler.step()
    return first, task.scheduler.get_last_lr(), task.scheduler.last_epoch


def logged(task: Task, loss: Any, log: Any) -> None:
    task.scheduler.step()
    log["rate"] = task.scheduler.get_last_lr()[0]
    log["epoch"] = task.scheduler.last_epoch


def before(task: Task, loss: Any, log: Any) -> Any:
    rates = task.scheduler.get_last_lr()
    product = loss * rates[0]
    task.scheduler.step()
    return rates, product


def of_parts(task: Task, loss: Any, log: Any) -> Any:
    parts = task.scheduler._schedulers
    task.scheduler.step()
    return [(part.last_epoch, part.get_last_lr()) for part in parts]


def by_loss(task: Task, loss: Any, log: Any) -> Any:
    task.scheduler.step(loss)
    return task.scheduler.get_last_lr(), task.optimizer.param_groups[0]["lr"]


def stepped(task: Task, loss: Any, log: Any) -> Any:
    task.scheduler.step()
    return loss.item()


def stepped_twice(task: Task, loss: Any, log: Any) -> Any:
    rate, epoch = task.scheduler.get_last_lr()[0], task.scheduler.last_epoch
    product = loss * rate * (epoch + 1)
    task.scheduler.step()
    task.scheduler.step()
    return rate, epoch, product


def stepped_by_loss(task: Task, loss: Any, log: Any) -> None:
    task.scheduler.step(loss)


def returned(task: Task, loss: Any, log: Any) -> Any:
    task.scheduler.step()
    return loss, task.optimizer.param_groups[0]["lr"]


def stored(task: Task, loss: Any, log: Any) -> None:
    task.scheduler.step()
    log["second"] = task.scheduler._last_lr[1]


def kept(task: Task, loss: Any, log: Any) -> None:
    task.scheduler.step()
    task.rate = task.optimizer.param_groups[0]["lr"]


def set_again(task: Task, loss: Any, log: Any) -> None:
    task.scheduler.step()
    task.optimizer.param_groups[0]["lr"] = 0.03


def swallowed(task: Task, loss: Any, log: Any) -> Any:
    task.scheduler.step()
    try:
        return task.optimizer.param_groups[0]["lr"] * 2
    except Exception:  # noqa: BLE001 - as users do
        return 0.0


def followed(task: Task, loss: Any, log: Any) -> None:
    task.scheduler.step()
    task.optimizer.step()


def followed_by_a_check(task: Task, loss: Any, log: Any) -> Any:
    task.scheduler.step()
    return torch.gather(loss.expand(3), 0, torch.tensor([2]))


def asked(task: Task, loss: Any, log: Any) -> Any:
    task.scheduler.step()
    return task.scheduler.T_cur


def copied(task: Task, loss: Any, log: Any) -> Any:
    task.scheduler.step()
    return copy.deepcopy(task.scheduler.state_dict())


def changed(task: Task, loss: Any, log: Any) -> None:
    task.scheduler.step()
    task.scheduler.base_lrs[0] = 0.2


STEPS = [
    ("doubled", stepped),
    ("restarts", asked),
    *(
        ("cosine", leave)
        for leave in (
            returned,
            stored,
            kept,
            set_again,
            swallowed,
            followed,
            followed_by_a_check,
        )
    ),
    ("plateau", stepped_by_loss),
    ("doubled", before),  # a list of its own
    *((name, rates_after) for name in MAKE if name not in ("doubled", "plateau")),
    ("cosine", epochs),
    ("sequential", epochs),
    ("exponential", twice),
    ("lambda", logged),
    ("exponential", before),
    ("sequential", of_parts),
    ("plateau", by_loss),
]


def trained(name: str, leave: Callable[..., Any], memory: str | None, step: Any = None) -> Any:
    task = Task(MAKE[name], leave)
    step = task.step if step is None else step(task.step, memory=memory)
    found, log = list[Any](), dict[str, Any]()
    for number in range(6):
        if number == 3:
            task.optimizer.param_groups[0]["lr"] = 0.05  # which no `get_last_lr` says
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(number))
        found += [repr(step(x, log)), repr(log), task.scheduler.get_last_lr()]
    return found, [parameter.tolist() for parameter in task.net.parameters()]


def same_as_eager(name: str, leave: Callable[..., Any], memory: str | None) -> Any:
    compiled: list[Any] = []

    def wrap(*args: Any, **options: Any) -> Any:
        compiled.append(roam.compile(*args, **options))
        return compiled[0]

    assert trained(name, leave, memory, wrap) == trained(name, leave, None)
    return compiled[0]


@pytest.mark.auto
@pytest.mark.parametrize("memory", [None, "95%"])
@pytest.mark.parametrize("name", [name for name in MAKE if name not in ("doubled", "plateau")])
def test_a_scheduler_is_stepped_after_the_run_of_a_plan(name: str, memory: str | None) -> None:
    step = same_as_eager(name, stepped, memory)
    assert not step.runs_beside
    assert len(step.plans) == 2


@pytest.mark.auto
@pytest.mark.parametrize("name", ["cosine", "sequential", "lambda"])
def test_a_scheduler_may_be_stepped_twice(name: str) -> None:
    same_as_eager(name, stepped_twice, None)


@pytest.mark.auto
@pytest.mark.parametrize("is_set_before", [True, False])
def test_a_function_of_a_scheduler_sees_what_it_would_see(is_set_before: bool) -> None:
    """A plan would call it when the step has set all that it sets."""

    def found(wrap: Callable[[Any], Any]) -> list[float]:
        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        seen = {"calls": 0}
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + seen["calls"] + epoch))

        def step() -> torch.Tensor:
            if is_set_before:
                seen["calls"] += 1
            loss = weight.square().sum()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if not is_set_before:
                seen["calls"] += 1
            return loss.detach()

        compiled = wrap(step)
        return [compiled().item() for _ in range(5)]

    assert found(roam.compile) == found(lambda step: step)


SEEN = {"calls": 0}


def by_calls(epoch: int) -> float:
    return 1 / (1 + SEEN["calls"] + epoch)


@pytest.mark.auto
@pytest.mark.parametrize("reads", ["a helper's table", "gradients"])
def test_a_function_of_a_scheduler_is_called_before_what_follows_it(reads: str) -> None:
    def found(wrap: Callable[[Any], Any]) -> list[float]:
        SEEN["calls"] = 0
        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def rate(epoch: int) -> float:
            return 1.0 if weight.grad is None else 1 / (1 + weight.grad.norm().item())

        scheduler = lr_scheduler.LambdaLR(
            optimizer, rate if reads == "gradients" else lambda epoch: by_calls(epoch)
        )

        def step() -> torch.Tensor:
            loss = weight.square().sum()
            loss.backward()
            optimizer.step()
            scheduler.step()
            SEEN["calls"] += 1
            optimizer.zero_grad()
            return loss.detach()

        compiled = wrap(step)
        return [compiled().item() for _ in range(5)]

    assert found(roam.compile) == found(lambda step: step)


@pytest.mark.auto
@pytest.mark.skipif(not is_possible(), reason="it needs PyTorch 2.15")
@pytest.mark.parametrize("memory", [None, "95%"])
@pytest.mark.parametrize(("name", "leave"), STEPS)
def test_a_step_that_steps_a_scheduler_runs_beside(
    name: str, leave: Callable[..., Any], memory: str | None
) -> None:
    step = same_as_eager(name, leave, memory)
    assert step.runs_beside
    assert step.plans


@pytest.mark.parametrize(("name", "leave"), STEPS)
def test_a_plan_alone_is_refused(name: str, leave: Callable[..., Any]) -> None:
    task = Task(MAKE[name], leave)
    rate = task.optimizer.param_groups[0]["lr"]
    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(task.step)(torch.ones(2, 4), {})
    if leave is asked:
        assert "returns a rate or counter that a scheduler's step() sets" in str(caught.value)
    else:
        assert "test_schedulers.py" in str(caught.value) or leave is before
    assert task.scheduler.last_epoch == 0
    assert task.optimizer.param_groups[0]["lr"] == rate
    assert "step" not in vars(task.scheduler)


@pytest.mark.parametrize("name", [*MAKE])
def test_between_calls_each_of_them_sets_the_rates_of_one_plan(name: str) -> None:
    def rates(wrap: Any) -> Any:
        task, found = Task(MAKE[name], lambda task, loss, log: loss.item()), []
        steps.append(wrap(task.step))
        for number in range(6):
            found.append(steps[-1](torch.full((64, 4), 0.1 * number), {}))
            task.scheduler.step(*([found[-1]] if name == "plateau" else []))
        return found, task.scheduler.state_dict()["last_epoch"], task.scheduler.get_last_lr()

    steps: list[Any] = []
    assert rates(lambda step: step) == rates(roam.compile)
    assert len(steps[1].plans) == 2


def of_a_bound_method(task: Any, loss: Any, log: Any) -> Any:
    task.update()
    return loss.item()


@pytest.mark.auto
def test_a_step_of_theirs_that_is_bound_before_is_not_missed() -> None:
    def rates(compiles: bool) -> Any:
        task: Any = Task(MAKE["exponential"], of_a_bound_method)
        task.update = task.scheduler.step
        step = roam.compile(task.step) if compiles else task.step
        found = [step(torch.full((64, 4), 0.1 * number), {}) for number in range(6)]
        return found, task.scheduler.last_epoch, task.scheduler.get_last_lr()

    assert rates(True) == rates(False)


@pytest.mark.auto
@pytest.mark.parametrize("reads", ["get_last_lr", "last_epoch"])
def test_what_is_read_of_one_that_is_stepped_outside_is_that_of_now(reads: str) -> None:
    def read(task: Task, loss: Any, log: Any) -> Any:
        rates = task.scheduler.get_last_lr()
        return rates[0] if reads == "get_last_lr" else loss * task.scheduler.last_epoch

    def values(wrap: Any) -> Any:
        task, found = Task(MAKE["exponential"], read), []
        steps.append(wrap(task.step))
        for number in range(7):
            found.append(float(steps[-1](torch.full((64, 4), 0.1 * number), {})))
            task.scheduler.step()
        return found

    steps: list[Any] = []
    assert values(lambda step: step) == values(roam.compile)
    assert steps[1].runs_beside or not is_possible()


def kinds_and_lists(task: Task, loss: Any, log: Any) -> Any:
    first = task.scheduler.get_last_lr()
    task.scheduler.step()
    rates, epoch = task.scheduler.get_last_lr(), task.scheduler.last_epoch
    log["held"] = [rates]
    kinds = type(epoch), isinstance(epoch, int), isinstance(rates[0], float)
    return kinds, first, rates, {"again": Held(rates)}, rates is task.scheduler.get_last_lr()


class Held:
    def __init__(self, rates: Any) -> None:
        self.rates = rates


@pytest.mark.auto
@pytest.mark.skipif(not is_possible(), reason="it needs PyTorch 2.15")
@pytest.mark.parametrize("name", ["exponential", "sequential", "plateau"])
def test_lists_of_rates_are_the_schedulers_own(name: str) -> None:
    task = Task(MAKE[name], kinds_and_lists)
    if name == "plateau":
        plain_step = task.scheduler.step
        task.scheduler.step = lambda: plain_step(1.0)
    step, log = roam.compile(task.step), dict[str, Any]()
    for _ in range(4):
        before = task.scheduler.get_last_lr()
        kinds, first, rates, others, is_same = step(torch.ones(64, 4), log)
        after = task.scheduler.get_last_lr()
        assert kinds == (int, True, True)
        assert is_same
        assert first is before
        assert after is rates
        assert after is others["again"].rates
        assert after is log["held"][0]
    assert step.runs_beside


@pytest.mark.auto
def test_a_group_that_is_new_has_a_rate_after_the_step() -> None:
    def rates(compiles: bool) -> Any:
        task, found = Task(MAKE["exponential"], rates_after), []
        step = roam.compile(task.step) if compiles else task.step
        for number in range(4):
            if number == 2:
                added = torch.nn.Parameter(torch.ones(3))
                task.optimizer.add_param_group({"params": [added], "lr": 0.3, "initial_lr": 0.3})
                task.scheduler.base_lrs.append(0.3)
            found.append(step(torch.ones(64, 4), {})["rates"])
        return found

    assert rates(True) == rates(False)


def changes_it_before(task: Any, loss: Any, log: Any) -> Any:
    task.factor = task.factor * 0.5
    task.scale.mul_(0.5)
    task.scheduler.step()
    task.other = task.other + 1


def task_with_function(leave: Callable[..., Any]) -> Task:
    def factor(epoch: int) -> float:
        return task.factor * float(task.scale)  # type: ignore[no-any-return]

    task: Any = Task(MAKE["exponential"], leave)
    task.factor, task.scale, task.other = 1.0, torch.ones(()), 0
    task.scheduler = lr_scheduler.LambdaLR(task.optimizer, factor)
    return task  # type: ignore[no-any-return]


@pytest.mark.auto
def test_beside_a_plan_a_step_may_change_what_its_scheduler_reads() -> None:
    def rates(compiles: bool) -> Any:
        task = task_with_function(changes_it_before)
        step = roam.compile(task.step) if compiles else task.step
        return [(step(torch.ones(64, 4), {}), task.scheduler.get_last_lr()) for _ in range(6)]

    assert rates(True) == rates(False)


def test_a_function_of_a_scheduler_may_read_numbers_that_no_step_sets() -> None:
    """The first step makes the optimizer's state, which is no variable."""

    def script(wrap: Any) -> Any:
        task, warm = Task(MAKE["exponential"], stepped), 3
        task.scheduler = lr_scheduler.LambdaLR(task.optimizer, lambda epoch: min(1, epoch / warm))
        step = wrap(task.step)
        return [step(torch.ones(64, 4), {}) for _ in range(5)]

    both(script)


@pytest.mark.auto
def test_counters_may_be_asked_before_the_scheduler_is_stepped() -> None:
    """As accelerate's AcceleratedScheduler asks OneCycleLR's, which raises after its last step."""

    def script(wrap: Any) -> Any:
        optimizer = torch.optim.SGD([weight := nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (weight * x).square().sum() * (scheduler.last_epoch + 1)
            loss.backward()
            optimizer.step()
            if scheduler._step_count <= scheduler.total_steps:
                scheduler.step()
            return loss.detach()

        compiled.append(wrap(step))
        losses = [compiled[-1](torch.full((3,), 0.1 * i)) for i in range(7)]
        return losses, weight.detach(), scheduler.last_epoch, optimizer.param_groups[0]["lr"]

    compiled: list[Any] = []
    both(script)
    assert compiled[1].runs_beside or not is_possible()
