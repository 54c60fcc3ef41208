"""Steps whose Python runs beside their plans: they do what eager PyTorch does, whatever they do in
Python.
"""

from __future__ import annotations

import copy
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import roam
from roam.runtime.beside.placeholders import is_possible
from training import assert_same_bits

pytestmark = pytest.mark.skipif(not is_possible(), reason="it needs PyTorch 2.15")

CALLS = 7


class State:
    """What a step holds."""

    def __init__(
        self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any
    ) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
        )  # fmt: skip
        self.optimizer = optimizer(self.model.parameters(), lr=0.05, **options)
        self.log: list[Any] = []
        self.count = 0

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        return F.cross_entropy(self.model(x), y)

    def update(self, loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        self.optimizer.step()
        return loss


Step = Callable[[torch.Tensor, torch.Tensor], Any]
Make = Callable[[], tuple[State, Step]]
STEPS: dict[str, Make] = {}


def kinds(steps: dict[str, Make]) -> Callable[[Make], Make]:
    """A decorator that puts what makes a step into a table, by its name."""

    def kind(make: Make) -> Make:
        steps[make.__name__] = make
        return make

    return kind


kind = kinds(STEPS)


@kind
def printing() -> tuple[State, Step]:
    s = State(torch.optim.AdamW)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = s.loss(x, y)
        print(loss, f"{loss:.3f} {loss.item():.4f}", s.model[0].weight.grad)
        s.update(loss)
        s.log.append(loss.item())
        print(s.log, s.model[4].bias)
        return loss

    return s, step


@kind
def growing_dictionaries() -> tuple[State, Step]:
    s = State(torch.optim.Adam)
    table: dict[Any, list[Any]] = defaultdict(list)
    s.log.append(table)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.count += 1
        loss = s.update(s.loss(x, y))
        table[s.count % 3].append(loss.item())
        table["tensors"].append(loss.detach())
        return {"loss": loss.item(), "mean": sum(table[0]), "count": s.count}

    return s, step


@kind
def rate_of_a_running_mean() -> tuple[State, Step]:
    s = State(torch.optim.SGD, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = s.loss(x, y)
        s.log.append(loss.item())
        for group in s.optimizer.param_groups:
            group["lr"] = 0.01 * sum(s.log[-3:]) / len(s.log[-3:])
        return s.update(loss)

    return s, step


@kind
def clipped_by_a_number() -> tuple[State, Step]:
    s = State(torch.optim.AdamW)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = s.loss(x, y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.1).item()
        s.optimizer.step()
        s.log.append(norm)
        return loss, norm

    return s, step


@kind
def branches() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = s.loss(x, y)
        if loss > 1.3:
            loss = loss * 0.5
            s.count += 1
        return s.update(loss)

    return s, step


@kind
def early_stopping() -> tuple[State, Step]:
    s = State()
    best: dict[str, Any] = {"loss": 1e9}
    s.log.append(best)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        value = s.update(s.loss(x, y)).item()
        if value < best["loss"]:
            best.update(loss=value, state=copy.deepcopy(s.model.state_dict()))
            s.count = 0
        else:
            s.count += 1
        return value, s.count

    return s, step


@kind
def averaged_weights() -> tuple[State, Step]:
    s = State()
    average = copy.deepcopy(s.model)
    s.log.append(average)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.count += 1
        loss = s.update(s.loss(x, y))
        decay = min(0.99, (1 + s.count) / (10 + s.count))
        with torch.no_grad():
            for mine, new in zip(average.parameters(), s.model.parameters(), strict=True):
                mine.mul_(decay).add_(new, alpha=1 - decay)
        return loss.detach()

    return s, step


@kind
def schedulers() -> tuple[State, Step]:
    s = State(torch.optim.AdamW)
    cycle = torch.optim.lr_scheduler.OneCycleLR(s.optimizer, 0.1, total_steps=20)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(s.optimizer, patience=1)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = s.update(s.loss(x, y))
        cycle.step()
        plateau.step(loss.item())
        s.log.append(s.optimizer.param_groups[0]["lr"])
        return loss

    return s, step


@kind
def clocks_and_chance() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        assert time.time() > 0
        factor = random.random()
        return s.update(s.loss(x + factor, y) * factor)

    return s, step


@kind
def accumulation() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.count += 1
        loss = F.cross_entropy(s.model(x), y) / 2
        loss.backward()
        if s.count % 2 == 0:
            s.optimizer.step()
            s.optimizer.zero_grad()
        return loss

    return s, step


@kind
def numpy_and_lists() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.optimizer.zero_grad()
        out = s.model(x)
        s.log.append(out.detach().argmax(-1).numpy().tolist())
        s.log.append((out.argmax(-1) == y).float().mean().tolist())
        loss = s.update(F.cross_entropy(out, y))
        s.log.append(s.model[0].bias.detach().numpy().copy().tolist())
        return loss

    return s, step


@kind
def an_array_that_the_step_writes_to() -> tuple[State, Step]:
    s = State()
    array = torch.ones(8).numpy()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = s.loss(x * torch.from_numpy(array), y)
        array[:] += 0.1  # when the product has been computed
        return s.update(loss)

    return s, step


@kind
def a_gradient_that_is_kept_as_an_array() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = s.loss(x, y)
        loss.backward()
        gradient = s.model[4].bias.grad.numpy()
        gradient *= 0.5
        s.optimizer.step()
        gradient *= 0.5
        return loss

    return s, step


@kind
def shapes_of_values() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.optimizer.zero_grad()
        out, chosen = s.model(x), y > 0
        return s.update(F.cross_entropy(out[chosen], y[chosen]))

    return s, step


@kind
def scaled_losses() -> tuple[State, Step]:
    s = State()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = s.loss(x, y)
        scaler.scale(loss).backward()
        scaler.step(s.optimizer)
        scaler.update()
        s.log.append(scaler.get_scale())
        return loss

    return s, step


@kind
def checkpoints() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.optimizer.zero_grad()
        loss = F.cross_entropy(checkpoint(s.model, x, use_reentrant=False), y)
        s.log.append(loss.item())
        return s.update(loss)

    return s, step


@kind
def seeds() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.count += 1
        torch.manual_seed(s.count)
        loss = s.update(s.loss(x, y))
        s.log.append((torch.get_rng_state(), torch.rand(2)))
        return loss

    return s, step


@kind
def tables_by_identity() -> tuple[State, Step]:
    s = State()
    norms: dict[int, float] = {}

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = s.update(s.loss(x, y))
        for parameter in s.model.parameters():
            norms[id(parameter)] = norms.get(id(parameter), 0.0) + parameter.grad.norm().item()
        s.log.append(list(norms.values()))
        return loss

    return s, step


@kind
def results_that_live_on() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.optimizer.zero_grad()
        hidden = s.model[0](x)
        loss = s.update(F.cross_entropy(s.model[1:](hidden), y))
        s.log.append((hidden, hidden[1:3].t(), loss.data))
        return loss

    return s, step


@kind
def parameters_made_anew() -> tuple[State, Step]:
    s = State()
    held = [torch.randn(8, 4, requires_grad=True)]
    s.log.append(held)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(x @ held[0], y)
        (gradient,) = torch.autograd.grad(loss, held)
        held[0] = (held[0] - 0.1 * gradient).detach().requires_grad_()
        return loss.item()

    return s, step


@kind
def other_data() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = s.loss(x, y)
        loss.backward()
        for parameter in s.model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.01)
        s.log.append(loss.item())
        return loss

    return s, step


@kind
def raising() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.count += 1
        loss = s.loss(x, y)
        loss.backward()
        if s.count == 5:
            raise ZeroDivisionError
        s.optimizer.step()
        return loss

    return s, step


@kind
def catching() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.count += 1
        loss = s.loss(x, y)
        loss.backward()
        try:
            if s.count == 5:
                raise ZeroDivisionError
        except ZeroDivisionError:
            s.log.append(loss.item())
        s.optimizer.step()
        return loss

    return s, step


@kind
def constrained_weights() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.no_grad():  # before autograd keeps them, and a value is asked for afterwards
            s.model[0].weight.clamp_(-0.2, 0.2)
        loss = s.loss(x, y)
        s.log.append(loss.item())
        return s.update(loss)

    return s, step


@kind
def labels_of_two_losses() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = s.loss(x, y) + 0.4 * F.cross_entropy(s.model(x), y)
        s.log.append(str(s.update(loss).item()))
        return loss

    return s, step


@kind
def equal_values_that_autograd_keeps() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.optimizer.zero_grad()
        one, other = (s.model[0](x).tanh() for _ in range(2))
        s.log.append(str(one.sum().item()))
        return s.update((one * other).mean())

    return s, step


@kind
def equal_values_of_which_numpy_changes_one() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        one, other = x * 2, x * 2
        one.numpy()[:] = 0
        s.log.append(str((other * 3).sum().item()))
        return (one * 3).sum()

    return s, step


@kind
def shapes_changed_in_place() -> tuple[State, Step]:
    s = State()
    s.rnn = torch.nn.GRU(8, 4, batch_first=True)  # type: ignore[attr-defined]

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.optimizer.zero_grad()
        y = y.clone().unsqueeze_(-1)
        scores, last = s.rnn(x.unsqueeze(1))  # type: ignore[attr-defined]
        s.log.append(str(scores.sum().item()))
        hidden = s.model(x).t_()
        s.count += 1
        if s.count == 5:  # leaves its plan
            hidden = hidden * 2
        s.update((hidden.squeeze_() * scores.squeeze(1).t()).square().mean() + (y * last[0]).mean())
        return scores, hidden

    return s, step


@kind
def histories_of_earlier_calls() -> tuple[State, Step]:
    s = State()
    s.total = 0.0  # type: ignore[attr-defined]

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.total += s.update(s.loss(x, y))  # type: ignore[attr-defined]
        return s.total.item()  # type: ignore[attr-defined]

    return s, step


@kind
def exchanged_parameters() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = s.update(s.loss(x, y))
        s.model[0].weight = torch.nn.Parameter(s.model[0].weight * 0.9)
        s.log.append([p._version for p in s.model.parameters()])
        return loss, hash(s.model[4].bias) == id(s.model[4].bias)

    return s, step


@kind
def an_argument_that_is_none_once() -> tuple[State, Step]:
    s = State()
    kernel = torch.ones(4, 8, 1)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.count += 1
        bias: torch.Tensor | None = x.sum(0)[:4] * 1
        twice = bias * 2  # type: ignore[operator]
        if s.count == 6:
            bias = None
        s.log.append(s.update(s.loss(x, y)).item())
        return F.conv1d(x[None].transpose(1, 2), kernel, bias), twice

    return s, step


@kind
def line_searches() -> tuple[State, Step]:
    s = State(torch.optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe")

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        def closure() -> torch.Tensor:
            s.count += 1
            loss = s.loss(x, y)
            loss.backward()
            return loss

        s.log.append(s.optimizer.step(closure).item())
        return s.count

    return s, step


@kind
def seeds_asked_for() -> tuple[State, Step]:
    s = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        s.count += 1
        torch.manual_seed(len(s.log) + s.count)
        s.log.append(torch.initial_seed())
        return s.update(s.loss(x, y))

    return s, step


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(12, 8, generator=generator), torch.randint(4, (12,), generator=generator))
        for _ in range(CALLS)
    ]


def ran(name: str, **options: Any) -> tuple[list[Any], Any]:
    """What a step has left and returned at each call, and the compiled step."""
    torch.manual_seed(0)
    random.seed(0)
    state, step = STEPS[name]()
    called: Any = roam.compile(step, **options) if options else step
    seen: list[Any] = []
    for batch in batches():
        try:
            seen.append(called(*batch))
        except ZeroDivisionError as error:
            seen.append(repr(error))
        seen.append(values(vars(state)))
    return [values(seen), torch.get_rng_state()], called


def values(value: Any) -> Any:
    """What can be compared of a nest, copied."""
    if isinstance(value, torch.Tensor):
        gradient = value.grad if value.is_leaf else None
        return [value.detach().clone(), value.requires_grad, values(gradient)]
    if isinstance(value, (list, tuple)):
        return [values(one) for one in value]
    if isinstance(value, dict):
        return [[str(key), values(one)] for key, one in value.items()]
    if isinstance(value, torch.nn.Module):
        return values(list(value.parameters()))
    if isinstance(value, torch.optim.Optimizer):
        return values([value.state_dict()["state"], value.param_groups])
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def are_same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_same, one, other))
    assert_same_bits([one], [other])
    return True


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert_same_bits([one.detach()], [other.detach()])
    return True


NOT_BY_PLAN = {
    "shapes_of_values", "early_stopping", "a_gradient_that_is_kept_as_an_array", "line_searches",
}  # fmt: skip
"""Steps that go another way in most calls."""


@pytest.mark.parametrize("name", STEPS)
def test_a_step_does_what_eager_pytorch_does(name: str, capsys: Any) -> None:
    expected, _ = ran(name)
    printed = capsys.readouterr().out
    found, compiled = ran(name, python="beside")
    assert are_same(expected, found)
    assert capsys.readouterr().out == printed
    assert compiled.plans
    if name not in NOT_BY_PLAN:
        assert compiled.memory().total_bytes > 0  # a call has run by a plan


@pytest.mark.parametrize(
    "name", ["printing", "branches", "results_that_live_on", "raising", "scaled_losses"]
)
def test_the_same_out_of_a_poisoned_pool(name: str) -> None:
    expected, _ = ran(name)
    found, _ = ran(name, python="beside", pool=True, poison=True)
    assert are_same(expected, found)


# -- budgets


def deep(
    asks: bool, leaves_at: int | None = None
) -> tuple[torch.nn.Module, Callable[[torch.Tensor], Any]]:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    log: list[float] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if asks:
            log.append(loss.item())
        if asks and len(log) == leaves_at:
            loss = loss * 2
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


@pytest.mark.parametrize("leaves_at", [None, 6])
@pytest.mark.parametrize("asks", [True, False])
def test_a_budget_holds_where_a_value_is_asked_for(asks: bool, leaves_at: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(256, 64, generator=generator) for _ in range(7)]
    model, step = deep(asks, leaves_at)
    expected = [step(x) for x in inputs]
    planned, step = deep(asks, leaves_at)
    compiled = roam.compile(step, python="beside", memory="60%")
    found = [*map(compiled, inputs[:-1]), compiled.measured(inputs[-1])]
    assert all(map(same_bits, expected, found))
    assert all(map(same_bits, model.parameters(), planned.parameters()))
    memory = compiled.memory()
    assert memory.extra_runs > 0
    assert memory.total_bytes <= memory.limit_bytes
    if leaves_at is None or not asks:
        assert memory.measured_bytes <= memory.limit_bytes


def test_a_budget_that_no_plan_keeps_to_is_refused_before_the_call() -> None:
    _, step = deep(asks=True)
    compiled = roam.compile(step, python="beside", memory=1000)
    with pytest.raises(roam.PlanError) as caught:
        compiled(torch.randn(16, 64))
    assert caught.value.code == "memory_floor"


# -- options


@pytest.mark.auto
def test_auto_runs_beside_what_idle_refuses(caplog: Any) -> None:
    expected, _ = ran("clocks_and_chance")
    with pytest.raises(roam.CaptureError):
        ran("clocks_and_chance", python="idle")
    with caplog.at_level(logging.WARNING, "roam"):
        found, compiled = ran("clocks_and_chance", keep_grads=True)
    assert are_same(expected, found)
    assert compiled.memory().total_bytes > 0
    (told,) = [
        one.getMessage() for one in caplog.records if "runs its own Python" in one.getMessage()
    ]
    assert "random generator was drawn from" in told


@pytest.mark.parametrize(
    "name",
    ["histories_of_earlier_calls", "exchanged_parameters", "line_searches", "seeds_asked_for"],
)
def test_auto_runs_beside_what_only_python_does(name: str) -> None:
    expected, _ = ran(name)
    found, compiled = ran(name, python="auto")
    assert are_same(expected, found)
    assert compiled.runs_beside


@pytest.mark.auto
def test_what_cannot_run_beside_a_plan_is_refused_as_before_with_nothing_changed() -> None:
    weight, calls = torch.ones(4, requires_grad=True), []

    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(str(x.sum().item()))
        noise = torch.rand(4)
        try:
            noise = noise.to_sparse().to_dense()
        except Exception:  # noqa: BLE001 - as careless code does
            noise = x[0]
        with torch.no_grad():
            return weight.mul_(noise)

    compiled, state = roam.compile(step), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(roam.CaptureError, match="Nor can its Python run beside") as caught:
            compiled(torch.ones(3, 4))
        assert caught.value.code == "value_reached_python"
        assert same_bits(weight, torch.ones(4))
        assert same_bits(torch.get_rng_state(), state)


def test_a_call_that_can_have_no_plan_runs_as_it_is_once_there_are_plans() -> None:
    calls: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.to_sparse().to_dense() * 2 if len(calls) > 4 else x * 2

    compiled = roam.compile(step, python="beside")
    assert all(same_bits(compiled(x), x * 2) for x in map(torch.clone, torch.randn(14, 3, 4)))


def test_what_pytorch_computes_otherwise_is_refused_in_a_call_that_has_left_its_plan() -> None:
    weight, calls = torch.rand(3, requires_grad=True), []

    def step(x: torch.Tensor) -> torch.Tensor | None:
        calls.append(1)
        weight.grad = None
        product = x * weight
        if len(calls) == 5:
            product.prod().backward()
        return weight.grad

    compiled = roam.compile(step, python="beside")
    for _ in range(4):
        compiled(torch.rand(3))
    with pytest.raises(roam.CaptureError) as caught:
        compiled(torch.rand(3))
    assert caught.value.code == "hidden_branch"


@pytest.mark.auto
@pytest.mark.parametrize("options", [{}, {"python": "beside"}])
def test_a_step_beside_its_plan_is_compared(options: dict[str, Any]) -> None:
    _, step = STEPS["clocks_and_chance"]()
    compiled = roam.compile(step, keep_grads=True, **options)
    compared = roam.compare(compiled, *batches()[0], steps=6)
    assert compared.equal, compared


def test_the_plan_of_a_step_beside_it_is_shown(tmp_path: Any) -> None:
    _, compiled = ran("clocks_and_chance", python="beside")
    plan = compiled.plan(*batches()[0])
    assert plan.total_bytes == compiled.memory().total_bytes
    assert plan is compiled.plans[0][1]
    compiled.report(tmp_path / "page.html", limits=["90%"])
    compiled.export(tmp_path / "plan.json")
    assert compiled.communication().time_s == 0
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "plan.json"}


def test_plain_values_and_objects_among_arguments_ask_for_no_plans_of_their_own() -> None:
    def step(x: torch.Tensor, number: int, name: str, about: Any) -> str:
        return f"{number} {name} {about.batch} {(x * 2).sum().item():.3f}"

    compiled, x = roam.compile(step, python="beside"), torch.ones(4)
    for number in range(6):
        about = SimpleNamespace(batch=number)
        assert compiled(x, number, f"{number}.png", about) == step(
            x, number, f"{number}.png", about
        )
    assert len(compiled.plans) == 1
    assert compiled.memory().total_bytes > 0  # a call has run by it


def test_no_more_kinds_of_calls_have_plans_than_are_asked_for() -> None:
    compiled = roam.compile(lambda x: str(x.sum().item()), python="beside", max_plans=2)
    for length in (2, 3, 4):
        for _ in range(3):
            compiled(torch.ones(length))
    assert len(compiled.plans) == 2


def test_auto_keeps_plans_of_their_own_for_idle_python() -> None:
    _, step = deep(asks=False)
    compiled = roam.compile(step, python="auto")
    compiled(torch.randn(16, 64))
    assert compiled.plans  # at once: nothing had to be recorded


def test_on_change_raise_never_leaves_a_plan() -> None:
    model, step = deep(asks=True, leaves_at=5)
    compiled = roam.compile(step, python="beside", on_change="raise")
    x = torch.randn(16, 64)
    for _ in range(4):
        compiled(x)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(roam.ExecutionError) as caught:
        compiled(x)
    assert caught.value.code == "no_plan_fits"
    assert all(map(same_bits, before, model.parameters()))


def test_calls_that_leave_a_plan_count_for_the_way_that_they_go() -> None:
    weight = torch.randn(8, 8)
    other = iter([False, False, False, True, False, True, True])

    def step(x: torch.Tensor) -> float:
        y = x @ weight
        if next(other):
            y = y.exp()
        return y.sum().item()

    compiled, x = roam.compile(step, python="beside"), torch.ones(4, 8)
    for _ in range(6):
        compiled(x)
    assert len(compiled.plans) == 1
    assert compiled(x) == (x @ weight).exp().sum().item()
    assert len(compiled.plans) == 2


@pytest.mark.parametrize("memory", [None, "1GiB"])
def test_a_call_that_leaves_has_what_small_operators_have_made(memory: str | None) -> None:
    weight, scale, count = torch.randn(8, 8), torch.tensor(2.0), [0]

    def step(x: torch.Tensor) -> float:
        count[0] += 1
        y = (x @ weight) * (scale + 1)  # of which nothing is left when the call leaves
        if count[0] == 6:
            y = y.exp()
        return y.sum().item()

    compiled, x = roam.compile(step, python="beside", memory=memory), torch.ones(4, 8)
    found = [compiled(x) for _ in range(7)]
    count[0] = 0
    assert found == [step(x) for _ in range(7)]


def test_a_call_may_end_with_values_that_were_given_in_its_middle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(3)]
    kept: list[torch.Tensor] = []
    count = [0]

    def step(x: torch.Tensor) -> float:
        hidden = x @ weights[0]
        y = hidden.tanh() @ weights[1]
        found = y.sum().item()
        count[0] += 1
        if count[0] > 4:
            kept.append(hidden)
        (y @ weights[2]).square().mean().backward()
        return found

    compiled = roam.compile(step, python="beside", pool=True, poison=True)
    caplog.set_level(logging.INFO, logger="roam")
    xs = [torch.randn(16, 16) for _ in range(7)]
    for x in xs:
        compiled(x)
    assert len(kept) == 3
    assert all(
        same_bits(one, (x @ weights[0]).detach()) for one, x in zip(kept, xs[4:], strict=True)
    )
    assert "another way" not in caplog.text


def test_an_older_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roam.runtime.beside.step.is_possible", lambda: False)
    with pytest.raises(roam.ExecutionError) as caught:
        roam.compile(lambda x: x, python="beside")(torch.ones(2))
    assert caught.value.code == "beside"


def test_what_a_dispatch_mode_makes_pytorch_compute_otherwise_is_refused() -> None:
    compiled = roam.compile(lambda x: x.prod().backward(), python="beside")
    with pytest.raises(roam.CaptureError) as caught:
        compiled(torch.ones(4, requires_grad=True))
    assert caught.value.code == "hidden_branch"


def test_a_step_that_changes_how_kernels_compute_leaves_its_plan() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        torch.use_deterministic_algorithms(True)
        try:
            return y @ y
        finally:
            torch.use_deterministic_algorithms(False)

    compiled, x = roam.compile(step, python="beside"), torch.ones(4, 4)
    results = [compiled(x) for _ in range(4)]
    assert same_bits(results[-1], step(x))
    with pytest.raises(roam.ExecutionError):
        compiled.memory()  # no call has run by a plan to its end


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="'auto', 'idle' or 'beside'"):
        roam.compile(lambda: None, python="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="beside"):
        roam.compile(lambda: None, python="beside", streams=2)


def test_a_kernel_that_fails_says_so_and_what_has_changed() -> None:
    table = torch.nn.Embedding(4, 4)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    log: list[int] = []

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = table(ids + 0).square().sum()  # of indices that the plan computes
        loss.backward()
        optimizer.step()
        log.append(1)
        return loss

    compiled = roam.compile(step, python="beside")
    for _ in range(4):
        compiled(torch.tensor([1, 2]))
    before = table.weight.detach().clone()
    with pytest.raises(roam.ExecutionError) as caught:
        compiled(torch.tensor([1, 9]))
    assert caught.value.code == "failed"
    assert "embedding" in caught.value.operator
    assert same_bits(before, table.weight)
    compiled(torch.tensor([1, 2]))


def test_a_generator_that_is_seeded_behind_roams_back_is_noticed() -> None:
    drop = torch.nn.Dropout()
    seeded = [False]

    def step(x: torch.Tensor) -> torch.Tensor:
        first = drop(x)
        if seeded[0]:
            torch.default_generator.manual_seed(3)
        return first + drop(x)

    compiled = roam.compile(step, python="beside")
    for _ in range(4):
        compiled(torch.ones(8))
    seeded[0] = True
    with pytest.raises(roam.ExecutionError) as caught:
        compiled(torch.ones(8))
    assert caught.value.code == "generator_state"


def test_a_barrier_that_brings_what_no_kernel_uses_stays() -> None:
    weight, other = torch.randn(8, 8), torch.randn(16)

    def step(x: torch.Tensor) -> float:
        once, twice = (x @ weight).square(), (x @ weight).square()  # of which one is left out
        loss = (once.mean() + twice.mean()).item()
        return loss + other.detach().tolist()[0]  # type: ignore[no-any-return]

    compiled = roam.compile(step, python="beside")
    x = torch.ones(4, 8)
    assert [compiled(x) for _ in range(5)] == [step(x)] * 5


def test_a_barrier_stays_that_brings_what_python_alone_looks_at() -> None:
    weight = torch.randn(8, 4, requires_grad=True)
    y = torch.arange(64) % 4

    def step(x: torch.Tensor) -> list[int]:
        logits = x @ weight
        torch.autograd.grad(F.cross_entropy(logits, y), weight)  # of which two kernels become one
        return logits.argmax(1).ne(y).nonzero().flatten().tolist()  # type: ignore[no-any-return]

    compiled = roam.compile(step, python="beside")
    x = torch.randn(64, 8)
    assert [compiled(x) for _ in range(5)] == [step(x)] * 5
    assert compiled.memory().total_bytes > 0
