"""Every optimizer of PyTorch in every form: eager's bits, or a refusal that gives the reason."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm.optim
import timm.scheduler
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

import roam
from newer import needs_2_15
from steps import both
from training import assert_same_bits, tensors_and_numbers

functional = torch.nn.functional
STEPS = 20
INFOS: dict[str, OptimizerInfo] = {info.name: info for info in optim_db}
REFUSED = ("LBFGS", "SparseAdam")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The nets are small; threads that wait for each other take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(torch.nn.Module):
    """Dropout, batch norm and tied weights."""

    def __init__(self, *, of_matrices: bool = False) -> None:
        """`of_matrices`: whether all parameters are matrices, which is all that Muon takes."""
        super().__init__()
        self.first = torch.nn.Linear(6, 8, bias=not of_matrices)
        self.middle = torch.nn.Linear(8, 8, bias=False)
        self.norm = torch.nn.BatchNorm1d(8, affine=not of_matrices)
        self.drop = torch.nn.Dropout(0.25)
        self.last = torch.nn.Linear(8, 8, bias=False)
        self.last.weight = self.middle.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.middle(torch.relu(self.first(x)))))))


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


def outcome(
    make: Make,
    wrap: Callable[[Any], Any],
    steps: int,
    between: Callable[[Any, int], None],
    *,
    of_matrices: bool = False,
) -> tuple[Any, list[Any]]:
    """The step, and all that some training returns and leaves behind."""
    torch.manual_seed(0)
    model = Net(of_matrices=of_matrices)
    optimizer = make(model)
    step = wrap(train_step)
    generator = torch.Generator().manual_seed(7)
    losses = []
    for place in range(steps):
        x, y = (
            torch.randn(5, 6, generator=generator),
            torch.randint(0, 8, (5,), generator=generator),
        )
        losses.append(step(model, optimizer, x, y))
        between(optimizer, place)
    return step, tensors_and_numbers(
        losses, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()
    )


def check(
    make: Make,
    *,
    steps: int = STEPS,
    between: Callable[[Any, int], None] = lambda *_: None,
    of_matrices: bool = False,
) -> roam.runtime.compile.Step:
    """Trains by eager steps and by compiled ones, which must be the same; the compiled step."""
    _, eager = outcome(make, lambda step: step, steps, between, of_matrices=of_matrices)
    step, planned = outcome(make, roam.compile, steps, between, of_matrices=of_matrices)
    assert_same_bits(eager, planned)
    return step


def forms(info: OptimizerInfo) -> list[str]:
    """The forms that an optimizer has on the CPU."""
    found = ["foreach"] if "foreach" in info.supported_impls else []
    return ["single", *found, *(["fused"] if "cpu" in info.supports_fused_on else [])]


def options(info: OptimizerInfo, form: str) -> list[dict[str, Any]]:
    """PyTorch's own list of options to test."""
    chosen = (
        {form: True}
        if form != "single"
        else {"foreach": False}
        if "foreach" in info.supported_impls
        else {}
    )
    every = [given.kwargs for given in info.optim_inputs_func("cpu")]
    return [{**given, **chosen} for given in every]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in INFOS if name not in REFUSED for form in forms(INFOS[name])],
)
def test_every_optimizer_with_every_option(name: str, form: str) -> None:
    info = INFOS[name]
    for given in options(info, form):
        step = check(
            lambda model, given=given: info.optim_cls(model.parameters(), **copy.deepcopy(given)),
            between=lower_the_rate, of_matrices=name == "Muon",
        )  # fmt: skip
        # The step that makes the state and the steady one; RAdam's rectification begins at its
        # sixth step.
        assert len(step.plans) <= (3 if name == "RAdam" else 2)


def lower_the_rate(optimizer: Any, _: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "form"),
    [
        (name, form)
        for name in INFOS
        if name not in REFUSED
        for form in forms(INFOS[name])
        if form != "foreach"
    ],
)
def test_no_hyper_parameter_is_frozen(name: str, form: str) -> None:
    info = INFOS[name]
    given = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    keys: list[str] = []

    def change(optimizer: Any, place: int) -> None:
        (group,) = optimizer.param_groups
        keys[:] = sorted(key for key, value in group.items() if is_changeable(key, value))
        if place < len(keys):
            group[keys[place]] = changed(group[keys[place]])

    chosen = options(info, form)[0]
    make = lambda model: info.optim_cls(model.parameters(), **copy.deepcopy({**chosen, **given}))  # noqa: E731
    check(make, steps=12, between=change, of_matrices=name == "Muon")
    assert 0 < len(keys) <= 11, keys  # each is changed, and a step follows


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "form"),
    [
        (name, form)
        for name in INFOS
        if name not in REFUSED
        for form in forms(INFOS[name])
        if form != "foreach"
    ],
)
def test_every_number_of_a_group_may_change_at_every_call(name: str, form: str) -> None:
    info = INFOS[name]
    given = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}

    def between(optimizer: Any, _: int) -> None:
        for group in optimizer.param_groups:
            for key, value in group.items():
                if is_changeable(key, value):
                    group[key] = scaled(value)

    chosen = options(info, form)[0]
    make = lambda model: info.optim_cls(model.parameters(), **copy.deepcopy({**chosen, **given}))  # noqa: E731
    assert len(check(make, steps=8, between=between, of_matrices=name == "Muon").plans) <= (
        3 if name == "RAdam" else 2
    )


def scaled(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(scaled, value))
    return value * 0.99 if isinstance(value, float) else value


class TestNumbersOfGroups:
    """All floats of a group are read anew at every call; what one decides in Python is asked
    again."""

    def test_a_decision_that_flips_is_planned_once(self) -> None:
        def between(optimizer: Any, place: int) -> None:
            optimizer.param_groups[0]["weight_decay"] = 0.01 * place if place // 3 % 2 else 0.0

        step = check(
            lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1),
            between=between,
        )
        assert len(step.plans) == 3  # the first step, then with weight decay and without

    def test_numbers_of_numpy(self) -> None:
        numpy = pytest.importorskip("numpy")
        rates, decays = (
            numpy.linspace(0.1, 0.01, STEPS),
            0.4 - 0.3 * numpy.cos(numpy.linspace(0, 3, STEPS)),
        )

        def between(optimizer: Any, place: int) -> None:
            for group in optimizer.param_groups:
                group.update(lr=rates[place], weight_decay=decays[place])

        step = check(lambda model: torch.optim.AdamW(model.parameters(), lr=0.1), between=between)
        assert (
            len(step.plans) == 3
        )  # the first step, the second with floats, and those with NumPy's

    @pytest.mark.parametrize("use", [float, round, str, "{:.3f}".format, lambda value: {value: 1}])
    def test_a_number_that_python_looks_at(self, use: Callable[[Any], Any]) -> None:
        class Rounding(torch.optim.SGD):
            @torch.no_grad()
            def step(self) -> None:  # type: ignore[override]
                for group in self.param_groups:
                    for parameter in group["params"]:
                        seen = use(group["weight_decay"] * 4)
                        factor = float(next(iter(seen)) if type(seen) is dict else seen)
                        parameter.mul_(1 - factor).sub_(parameter.grad, alpha=group["lr"])

        def between(optimizer: Any, place: int) -> None:
            optimizer.param_groups[0]["weight_decay"] += 0.25 * (place == 5)
            lower_the_rate(optimizer, place)

        step = check(
            lambda model: Rounding(model.parameters(), lr=0.1, weight_decay=0.125), between=between
        )
        assert len(step.plans) == 2

    def test_a_rate_that_python_looks_at_is_refused(self) -> None:
        class Hashing(torch.optim.SGD):
            def step(self) -> None:  # type: ignore[override]
                hash(self.param_groups[0]["lr"])

        model = Net()
        with pytest.raises(roam.CaptureError, match="Python needs the number"):
            roam.capture(
                train_step,
                model,
                Hashing(model.parameters(), lr=0.1),
                torch.randn(5, 6),
                torch.randint(0, 8, (5,)),
            )

    class Choosy(torch.optim.SGD):
        def is_exact(self, number: float) -> bool:
            return type(number) is float

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    exact = self.is_exact(group["weight_decay"])
                    parameter.sub_(parameter.grad, alpha=0.1 if exact else 0.2)

    def test_a_type_that_decides_is_refused_where_it_is_not_the_plain_one(self) -> None:
        kind_of = type  # not found by its name

        class Choosy(TestNumbersOfGroups.Choosy):
            def is_exact(self, number: float) -> bool:
                return kind_of(number) is float

        model = Net()
        optimizer = Choosy(model.parameters(), lr=0.1, weight_decay=0.1)
        with pytest.raises(roam.CaptureError, match="isinstance"):
            roam.capture(train_step, model, optimizer, torch.randn(5, 6), torch.randint(0, 8, (5,)))

    def test_a_type_that_decides_is_the_plain_one(self) -> None:
        check(lambda model: self.Choosy(model.parameters(), lr=0.1, weight_decay=0.1))

    def test_a_step_that_sets_its_own_weight_decay(self) -> None:
        class Decaying(torch.optim.AdamW):
            def step(self) -> None:  # type: ignore[override]
                super().step()
                for group in self.param_groups:
                    group["weight_decay"] *= 0.9
                    group["betas"] = (group["betas"][0] * 0.99, group["betas"][1])

        step = check(lambda model: Decaying(model.parameters(), lr=0.1, weight_decay=0.5))
        assert len(step.plans) == 2

    def test_equal_arithmetic_is_done_once(self) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        graph = roam.capture(
            train_step, model, optimizer, torch.randn(5, 6), torch.randint(0, 8, (5,))
        )
        names = [operator.name for operator in graph.operators]
        assert names.count("aten.lerp_.Scalar") == len(list(model.parameters())) > 1
        assert names.count("float.mul") == 1  # lr * weight_decay


def is_changeable(key: str, value: Any) -> bool:
    if isinstance(value, (tuple, list)) and key != "params":
        return any(isinstance(part, float) for part in value)
    return isinstance(value, float) or (
        key in ("weight_decay", "dampening", "momentum") and value is not None
    )


def changed(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(changed(part) for part in value)
    return value if value is None else value * 0.75 if value else 0.125


class TestBranches:
    """Where a step asks about its own count, the answer is asked for at every call."""

    def plans(self, make: Make, **given: Any) -> list[int]:
        """How many plans there were after each step."""
        counts: list[int] = []

        def script(wrap: Callable[[Any], Any]) -> list[Any]:
            counts.clear()
            step: Any = None

            def remember(train_step: Any) -> Any:
                nonlocal step
                step = wrap(train_step)
                return step

            return outcome(
                make,
                remember,
                12,
                lambda *_: counts.append(len(getattr(step, "plans", ()))),
                **given,
            )[1]

        assert_same_bits(script(lambda step: step), script(roam.compile))
        return counts

    @pytest.mark.parametrize("foreach", [False, True])
    def test_a_rectification_that_begins_is_planned_once(self, foreach: bool) -> None:
        counts = self.plans(
            lambda model: torch.optim.RAdam(model.parameters(), lr=0.1, foreach=foreach)
        )
        assert counts == [2] * 5 + [3] * 7

    def test_averaging_that_begins(self) -> None:
        counts = self.plans(lambda model: torch.optim.ASGD(model.parameters(), lr=0.1, t0=4))
        assert counts == [2] * 6 + [3] * 6

    def test_a_step_that_begins_where_the_answer_changes(self) -> None:
        def make(model: torch.nn.Module) -> torch.optim.Optimizer:
            optimizer = torch.optim.RAdam(model.parameters(), lr=0.1)
            for _ in range(5):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 0.5)
                optimizer.step()
            return optimizer

        assert self.plans(make) == [1] * 12

    def test_parameters_with_counts_of_their_own(self) -> None:
        def make(model: torch.nn.Module) -> torch.optim.Optimizer:
            optimizer = torch.optim.RAdam(model.parameters(), lr=0.1)
            for place, parameter in enumerate(model.parameters()):
                if place % 2:
                    parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
            optimizer.step()
            return optimizer

        counts = self.plans(make)
        assert counts[-1] > counts[3] > 0
        assert sorted(set(counts)) == [2, 3, 4]

    def test_equal_guards_are_one(self) -> None:
        model = Net()
        optimizer = torch.optim.RAdam(model.parameters(), lr=0.1)
        step = roam.compile(train_step)
        for _ in range(2):
            step(model, optimizer, torch.randn(5, 6), torch.randint(0, 8, (5,)))
        ((guard, answer),) = step._last._program.computed_guards
        assert answer is False
        assert len(guard.uses) == len(list(model.parameters()))

    def test_a_rate_that_decides_together_with_a_count(self) -> None:
        class Warm(torch.optim.Optimizer):
            def __init__(self, parameters: Any) -> None:
                super().__init__(parameters, {"lr": 0.1})

            @torch.no_grad()
            def step(self) -> None:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        state = self.state[parameter]
                        if not state:
                            state["step"] = torch.zeros(())
                        state["step"] += 1
                        rate = group["lr"] * state["step"].item()
                        if rate < 0.35 <= 10 * rate:
                            parameter.sub_(parameter.grad, alpha=rate)
                        else:
                            parameter.sub_(parameter.grad.sign(), alpha=0.01)

        # Three steps go one way and the others the other: the first step, the steady one, and one
        # plan more.
        assert self.plans(lambda model: Warm(model.parameters()))[-1] >= 3

    @pytest.mark.auto
    @needs_2_15
    def test_a_weight_that_decides(self) -> None:
        class Trusting(torch.optim.SGD):
            @torch.no_grad()
            def step(self) -> None:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.norm().item() > 1:
                            parameter.sub_(parameter.grad, alpha=group["lr"])

        assert self.plans(lambda model: Trusting(model.parameters(), lr=0.1))[-1] >= 1


class ByHand(torch.optim.Optimizer):
    """Adam as many write it by hand, with its step count as a Python number."""

    def __init__(self, parameters: Any, lr: float = 0.1, every: int = 4) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if len(state) == 0:
                    state["step"] = 0
                    state["scale"] = 1.0
                    state["average"] = torch.zeros_like(parameter)
                    state["square"] = torch.zeros_like(parameter)
                state["step"] += 1
                state["average"].mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
                state["square"].mul_(beta2).addcmul_(
                    parameter.grad, parameter.grad, value=1 - beta2
                )
                correction = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                if state["step"] % group["every"] == 0:
                    state["scale"] *= 0.5
                rate = group["lr"] * state["scale"] * correction
                parameter.addcdiv_(state["average"], state["square"].sqrt().add_(1e-8), value=-rate)


class Lion(torch.optim.Optimizer):
    """The sign of a momentum."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["momentum"].lerp(parameter.grad, 0.1).sign_()
                parameter.add_(update, alpha=-group["lr"])
                state["momentum"].lerp_(parameter.grad, 0.01)


class Lists(torch.optim.Optimizer):
    """Momentum by multi-tensor calls, with rates that are made into tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            gradients = [parameter.grad for parameter in group["params"]]
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = {
                        "momentum": torch.zeros_like(parameter),
                        "step": torch.zeros(()),
                    }
            moments = [self.state[parameter]["momentum"] for parameter in group["params"]]
            steps = [self.state[parameter]["step"] for parameter in group["params"]]
            torch._foreach_add_(steps, 1)
            torch._foreach_mul_(moments, [1 - 1 / (1 + step.item()) for step in steps])
            torch._foreach_add_(moments, gradients)
            torch._foreach_addcmul_(
                group["params"], moments, [torch.tensor(-group["lr"]).expand_as(m) for m in moments]
            )


class TestUserWritten:
    @pytest.mark.parametrize("kind", [ByHand, Lion, Lists])
    def test_an_optimizer_of_the_users(self, kind: Any) -> None:
        step = check(lambda model: kind(model.parameters()), between=lower_the_rate)
        # The first step and the steady one. The fourth of `ByHand` takes the other branch, and
        # shows that `scale` changes.
        assert len(step.plans) == (4 if kind is ByHand else 2)

    def test_the_state_has_eagers_order(self) -> None:
        class Mixed(torch.optim.Optimizer):
            """Tensors alone for matrices, and a count beside them for all else, as Muon has it."""

            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                for parameter in self.param_groups[0]["params"]:
                    state = self.state[parameter]
                    if parameter.ndim < 2:
                        state["step"] = state.get("step", 0) + 1
                    state["average"] = state.get("average", 0.0) + parameter.grad
                    parameter.sub_(state["average"], alpha=0.1)

        def order(wrap: Any) -> list[Any]:
            net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
            optimizer = Mixed(net.parameters(), {})

            @wrap
            def step(x: torch.Tensor) -> None:
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()

            step(torch.ones(2, 3))
            return [(key, list(entry)) for key, entry in optimizer.state_dict()["state"].items()]

        assert order(roam.compile) == order(lambda step: step)

    def test_python_numbers_in_state_are_loaded_and_go_on(self) -> None:
        def between(optimizer: Any, place: int) -> None:
            if place == 5:
                state = copy.deepcopy(optimizer.state_dict())
                for entry in state["state"].values():
                    entry["step"] += 7
                optimizer.load_state_dict(state)

        check(lambda model: ByHand(model.parameters()), between=between)

    def test_a_rate_that_is_kept_in_state(self) -> None:
        class Remembering(torch.optim.SGD):
            @torch.no_grad()
            def step(self) -> None:  # type: ignore[override]
                for group in self.param_groups:
                    for parameter in group["params"]:
                        state = self.state[parameter]
                        parameter.sub_(parameter.grad, alpha=group["lr"] + state.get("last", 0.0))
                        state["last"] = group["lr"]

        step = check(lambda model: Remembering(model.parameters(), lr=0.1), between=lower_the_rate)
        assert len(step.plans) == 2

    def test_a_number_in_state_that_hangs_on_weights(self) -> None:
        class Measuring(torch.optim.SGD):
            def step(self) -> None:  # type: ignore[override]
                super().step()
                for parameter in self.param_groups[0]["params"]:
                    self.state[parameter]["size"] = parameter.detach().norm().item()

        model = Net()
        optimizer = Measuring(model.parameters(), lr=0.1)
        arguments = train_step, model, optimizer, torch.randn(5, 6), torch.randint(0, 8, (5,))
        with pytest.raises(roam.CaptureError, match="keep it a tensor"):
            roam.capture(*arguments)
        assert (
            len(
                check(
                    lambda model: Measuring(model.parameters(), lr=0.1), between=lower_the_rate
                ).plans
            )
            == 2
        )

    def test_state_of_which_nobody_knows_how_it_changes(self) -> None:
        class Alternating(torch.optim.SGD):
            def step(self) -> None:  # type: ignore[override]
                super().step()
                for group in self.param_groups:
                    for parameter in group["params"]:
                        state = self.state[parameter]
                        state["name"] = "b" if state.get("name") == "a" else "a"

        model = Net()
        optimizer = Alternating(model.parameters(), lr=0.1)
        with pytest.raises(roam.CaptureError, match="another value after each step"):
            roam.capture(train_step, model, optimizer, torch.randn(5, 6), torch.randint(0, 8, (5,)))


class TestGradientsByHand:
    """Optimizers of plain tensors, whose `.grad` the user sets."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda ws: torch.optim.Adam(ws, lr=0.1),
            lambda ws: torch.optim.SGD(ws, lr=0.1, momentum=0.9),
            lambda ws: torch.optim.RAdam([{"params": ws[:1]}, {"params": ws[1:], "lr": 0.5}]),
        ],
        ids=["adam", "momentum", "groups"],
    )
    @pytest.mark.parametrize("form", ["assigned", "copied", "added"])
    def test_state_is_made_and_kept(self, make: Any, form: str) -> None:
        def script(wrap: Any) -> list[Any]:
            weights = [torch.randn(4, 3), torch.zeros(3)]
            optimizer = make(weights)

            @wrap
            def step(x: torch.Tensor) -> torch.Tensor:
                y = x @ weights[0] + weights[1]
                for weight, gradient in zip(weights, (x.T @ y, y.sum(0)), strict=True):
                    if form == "assigned" or weight.grad is None:
                        weight.grad = gradient
                    elif form == "copied":
                        weight.grad.copy_(gradient)
                    else:
                        weight.grad = weight.grad + gradient
                optimizer.step()
                return y.square().mean()

            losses = [step(torch.randn(5, 4)) for _ in range(4)]
            saved = copy.deepcopy(optimizer.state_dict())
            losses += [step(torch.randn(5, 4)) for _ in range(2)]
            optimizer.load_state_dict(saved)
            optimizer.state.pop(weights[0])
            weights[0] = optimizer.param_groups[0]["params"][0] = torch.ones(4, 3)
            losses += [step(torch.randn(5, 4)) for _ in range(3)]
            return [losses, weights, optimizer.state_dict()]

        both(script)

    def test_gradients_of_the_caller(self) -> None:
        def script(wrap: Any) -> list[Any]:
            weight = torch.randn(4, 3)
            optimizer = torch.optim.AdamW([weight], lr=0.1)
            step = wrap(lambda: optimizer.step())
            for place in range(6):
                weight.grad = None if place == 3 else torch.randn(4, 3)
                step()
            return [weight, optimizer.state_dict()]

        both(script)


class Counting(torch.optim.Optimizer):
    """Keeps its step count in its groups, from the first step on, and the size of the weights
    then."""

    def __init__(self, parameters: Any, count: Callable[[], Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._count = count

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", self._count()) + 1
            if "size" not in group:
                group["size"] = sum(parameter.norm() for parameter in group["params"]).item()
            for parameter in group["params"]:
                parameter.sub_(
                    parameter.grad / group["step"], alpha=group["lr"] / (1 + group["size"])
                )


class Estimating(torch.optim.Optimizer):
    """Estimates the distance to a solution as D-Adaptation does, in Python numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0, "distance": 1e-3, "calls": 0})

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        distance, above, below = group["distance"], 0.0, 0.0
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state.update(
                    start=parameter.clone(),
                    sum=torch.zeros_like(parameter),
                    norm=parameter.grad.norm().item(),
                )
            above += (
                distance
                * torch.dot(parameter.grad.flatten(), (state["start"] - parameter).flatten()).item()
            )
            state["sum"].add_(parameter.grad, alpha=distance)
            below += state["sum"].abs().sum().item()
            state["norm"] = 0.9 * state["norm"] + 0.1 * parameter.grad.norm().item()
            parameter.sub_(parameter.grad, alpha=group["lr"] * distance / (1 + state["norm"]))
        group["distance"] = distance + 1e-3 * abs(above) / below
        group["calls"] += 1


def reload(optimizer: Any, place: int) -> None:
    if place == 3:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


class TestEntriesOfGroups:
    """A call in which a step adds to its groups runs as it is, and the next is captured."""

    @pytest.mark.parametrize("count", [lambda: 0, lambda: 0.0, lambda: torch.zeros(())])
    def test_a_count_of_the_group(self, count: Callable[[], Any]) -> None:
        step = check(lambda model: Counting(model.parameters(), count), steps=8, between=reload)
        assert len(step.plans) <= 2

    def test_numbers_from_weights_and_data(self) -> None:
        step = check(lambda model: Estimating(model.parameters()), steps=8, between=reload)
        assert len(step.plans) <= 2

    def test_the_steady_step_needs_the_first(self) -> None:
        model = Net()
        arguments = (
            model,
            Counting(model.parameters(), lambda: 0),
            torch.randn(5, 6),
            torch.randint(0, 8, (5,)),
        )
        groups = copy.deepcopy(arguments[1].param_groups)
        with pytest.raises(roam.CaptureError, match="call it once first") as caught:
            roam.capture(train_step, *arguments)
        assert caught.value.code == "moved"
        assert groups[0].keys() == arguments[1].param_groups[0].keys()
        train_step(*arguments)
        assert roam.capture(train_step, *arguments).num_operators > 10

    def test_gradients_that_the_second_step_adds_to(self) -> None:
        def script(wrap: Callable[[Any], Any]) -> list[Any]:
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 2)
            optimizer = Counting(model.parameters(), lambda: 0)

            def step(x: torch.Tensor) -> torch.Tensor:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss

            compiled = wrap(step)
            return tensors_and_numbers(
                [compiled(torch.randn(4, 3)) for _ in range(5)], model.state_dict()
            )

        assert_same_bits(script(lambda step: step), script(roam.compile))


class TestNoneInState:
    """`load_state_dict` takes checkpoints in which there is no buffer yet."""

    @pytest.mark.parametrize("options", [{}, {"foreach": True}, {"nesterov": True}])
    def test_a_buffer_that_the_step_makes(self, options: dict[str, Any]) -> None:
        def without_buffers(optimizer: Any, place: int) -> None:
            state = optimizer.state_dict()
            if place in (2, 6):
                state["state"] = {index: {"momentum_buffer": None} for index in state["state"]}
            if place == 4:  # one of them is there
                state["state"][1] = {"momentum_buffer": None}
            if place in (2, 4, 6):
                optimizer.load_state_dict(state)

        make = lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, **options)  # noqa: E731
        step = check(make, steps=9, between=without_buffers)
        assert [len(captured.runners) for captured in step._captures] == [2, 2, 2]

    def test_a_buffer_that_nobody_needs(self) -> None:
        def make(model: torch.nn.Module) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for parameter in model.parameters():
                optimizer.state[parameter]["momentum_buffer"] = None
            return optimizer

        assert len(check(make, steps=4).plans) == 1


class TestTensorRates:
    """Learning rates and betas that are tensors are read at every call, wherever they are then."""

    @pytest.mark.parametrize("given", [{"foreach": False}, {"fused": True}])
    @pytest.mark.parametrize(
        "kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
    )
    def test_schedulers_that_fill_them(self, kind: Any, given: dict[str, Any]) -> None:
        schedulers: dict[int, Any] = {}

        def make(model: torch.nn.Module) -> torch.optim.Optimizer:
            betas = (
                {"betas": (torch.tensor(0.9), torch.tensor(0.99))}
                if issubclass(kind, torch.optim.Adam)
                else {}
            )
            optimizer = kind(model.parameters(), lr=torch.tensor(0.05), **given, **betas)
            schedulers[id(optimizer)] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            return optimizer

        def between(optimizer: Any, place: int) -> None:
            schedulers[id(optimizer)].step()
            reload(optimizer, place)
            if place == 5:
                optimizer.param_groups[0]["lr"] = torch.tensor(0.02)

        step = check(make, steps=8, between=between)
        assert len(step.plans) <= 2

    def test_another_dtype_is_another_plan(self) -> None:
        def between(optimizer: Any, place: int) -> None:
            if place == 3:
                optimizer.param_groups[0]["lr"] = torch.tensor(0.02, dtype=torch.float64)

        step = check(
            lambda model: torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)),
            steps=6,
            between=between,
        )
        assert len(step.plans) == 2

    def test_a_scheduler_in_the_step_is_refused(self) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            train_step(model, optimizer, x, y)
            scheduler.step()

        with pytest.raises(roam.CaptureError, match="outside of the step"):
            roam.capture(step, torch.randn(5, 6), torch.randint(0, 8, (5,)))


class SharpnessAware(torch.optim.Optimizer):
    """Two backward passes a step, around an optimizer whose groups it shares."""

    def __init__(self, parameters: Any, rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho, "lr": 0.1, "momentum": 0.9})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            norm = torch.stack([parameter.grad.norm() for parameter in group["params"]]).norm()
            for parameter in group["params"]:
                self.state[parameter]["before"] = parameter.detach().clone()
                parameter.add_(parameter.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter, state in self.state.items():
            parameter.copy_(state["before"])
        self.base.step()
        self.zero_grad()


class TestSharedGroups:
    """Optimizers around others."""

    def script(self, wrap: Callable[[Any], Any], between: Callable[[Any, int], None]) -> list[Any]:
        torch.manual_seed(0)
        model = Net()
        optimizer = SharpnessAware(model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.first_step()
            functional.cross_entropy(model(x), y).backward()
            optimizer.second_step()
            return loss

        compiled, losses = wrap(step), []
        for place in range(8):
            losses.append(compiled(torch.randn(5, 6), torch.randint(0, 8, (5,))))
            between(optimizer, place)
        self.plans = len(getattr(compiled, "plans", ()))
        return tensors_and_numbers(
            losses, model.state_dict(), optimizer.state_dict(), optimizer.base.state_dict()
        )

    def test_groups_that_two_optimizers_share(self) -> None:
        assert_same_bits(
            *(self.script(wrap, lower_the_rate) for wrap in (lambda step: step, roam.compile))
        )
        assert self.plans == 2

    def test_groups_that_are_no_longer_shared(self) -> None:
        def between(optimizer: Any, place: int) -> None:
            if place == 3:
                optimizer.base.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
            optimizer.base.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[0]["rho"] *= 2

        assert_same_bits(
            *(self.script(wrap, between) for wrap in (lambda step: step, roam.compile))
        )


# Those of timm that CUDA's libraries make, and one whose backward pass needs a graph.
_TIMM = [
    name
    for name in timm.optim.list_optimizers()
    if not name.startswith(("bnb", "fused")) and name != "adahessian"
]
_TIMM_REFUSED = dict.fromkeys(("kron", "kronc", "kronw"), r"number from \.item\(\)")


class Images(torch.nn.Module):
    """A convolution, a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.last = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")
@pytest.mark.parametrize("name", _TIMM)
def test_optimizers_of_timm(name: str) -> None:
    def script(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        model = Images()
        optimizer = timm.optim.create_optimizer_v2(model, opt=name, lr=0.01, weight_decay=0.05)
        scheduler = timm.scheduler.CosineLRScheduler(optimizer, t_initial=6)
        step, generator, losses = wrap(train_step), torch.Generator().manual_seed(1), []
        for place in range(6):
            x, y = (
                torch.randn(3, 2, 5, 5, generator=generator),
                torch.randint(0, 3, (3,), generator=generator),
            )
            losses.append(step(model, optimizer, x, y))
            scheduler.step(place + 1)
        assert len(getattr(step, "plans", ())) <= 3
        return tensors_and_numbers(
            losses, model.state_dict(), optimizer.state_dict(), optimizer.param_groups[0]["lr"]
        )

    if name in _TIMM_REFUSED:
        with pytest.raises(roam.CaptureError, match=_TIMM_REFUSED[name]):
            script(roam.compile)
    else:
        assert_same_bits(script(lambda step: step), script(roam.compile))


class TestSchedulers:
    @pytest.mark.parametrize("form", ["foreach", "fused", "single"])
    @pytest.mark.parametrize(
        "kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop]
    )
    def test_momentum_and_betas_that_cycle(self, kind: Any, form: str) -> None:
        if form == "fused" and "cpu" not in INFOS[kind.__name__].supports_fused_on:
            return
        given = {"momentum": 0.9} if kind in (torch.optim.SGD, torch.optim.RMSprop) else {}
        chosen = {"foreach": False} if form == "single" else {form: True}
        schedulers: dict[int, Any] = {}

        def make(model: torch.nn.Module) -> torch.optim.Optimizer:
            optimizer = kind(model.parameters(), lr=0.01, **given, **chosen)
            schedulers[id(optimizer)] = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=25
            )
            return optimizer

        step = check(make, between=lambda optimizer, _: schedulers[id(optimizer)].step())
        assert len(step.plans) == 2


class TestGroups:
    @pytest.mark.parametrize("form", ["foreach", "fused", "single"])
    def test_groups_with_rates_of_their_own(self, form: str) -> None:
        def make(model: torch.nn.Module) -> torch.optim.Optimizer:
            first, *others = model.parameters()
            groups = [
                {"params": [first], "lr": 0.1, "amsgrad": True},
                {"params": others, "weight_decay": 0.0},
            ]
            return torch.optim.AdamW(
                groups, lr=0.02, **({form: True} if form != "single" else {"foreach": False})
            )

        def between(optimizer: Any, place: int) -> None:
            optimizer.param_groups[place % 2]["lr"] *= 0.5

        assert len(check(make, between=between).plans) == 2


class TestSplitUpdates:
    """Multi-tensor and fused updates cost no more than updates one by one."""

    def wide(self) -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(12)))

    def peak(self, kind: Any, **given: Any) -> tuple[int, roam.Graph]:
        model = self.wide()
        optimizer = kind(model.parameters(), lr=0.1, **given)
        x, y = torch.randn(2, 64), torch.randint(0, 64, (2,))
        graph = roam.capture(train_step, model, optimizer, x, y)
        plan = roam.optimize(graph)
        roam.verify(graph, plan)
        return plan.peak_bytes, graph

    @pytest.mark.parametrize("form", ["foreach", "fused"])
    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
    def test_each_gradient_dies_with_its_own_update(self, kind: Any, form: str) -> None:
        peak, _ = self.peak(kind, **{form: True})
        assert peak <= self.peak(kind, foreach=False)[0]
        assert peak < 12 * 64 * 64 * 4  # less than all gradients

    def test_a_list_is_as_many_calls_as_tensors(self) -> None:
        names = [
            operator.name for operator in self.peak(torch.optim.AdamW, fused=True)[1].operators
        ]
        assert names.count("aten._fused_adamw_.default") == 12
        names = [
            operator.name for operator in self.peak(torch.optim.AdamW, foreach=True)[1].operators
        ]
        assert names.count("aten.addcdiv_.default") == 12
        assert not any("_foreach_" in name for name in names)

    def test_lists_that_autograd_goes_through(self) -> None:
        def script(wrap: Callable[[Any], Any]) -> list[Any]:
            torch.manual_seed(0)
            weights = [torch.nn.Parameter(torch.randn(3, 4)) for _ in range(3)]
            optimizer = torch.optim.SGD(weights, lr=0.1)

            def step(x: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                doubled = torch._foreach_mul(weights, [2.0, 3.0, 0.5])
                torch._foreach_add_(doubled, torch._foreach_norm(weights))
                loss = sum((x @ weight).square().mean() for weight in doubled)
                loss.backward()
                optimizer.step()
                return loss

            compiled = wrap(step)
            return tensors_and_numbers([compiled(torch.randn(2, 3)) for _ in range(4)], weights)

        assert_same_bits(script(lambda step: step), script(roam.compile))


class TestAccelerators:
    """What is recorded for CUDA, from the fakes of gradients that a backward pass would have left
    there."""

    def names(
        self, make: Any, *, size: tuple[int, int] = (128, 128), is_turned: bool = False
    ) -> list[str]:
        with FakeTensorMode():
            weights = [torch.nn.Parameter(torch.empty(size, device="cuda")) for _ in range(5)]
            last = torch.empty(size, device="cuda")
            weights.append(torch.nn.Parameter(last.t() if is_turned else last))
            for weight in weights:
                weight.grad = torch.empty(size, device="cuda")
        optimizer = make(weights)

        def step() -> None:
            optimizer.step()

        return [operator.name for operator in roam.capture(step).operators]

    def test_the_form_that_pytorch_would_choose(self) -> None:
        names = self.names(torch.optim.AdamW)
        assert names.count("aten._foreach_addcdiv_.ScalarList") == 6
        assert names.count("aten.add_.Tensor") == 6  # step counts are on the CPU

    def test_a_list_that_goes_the_slow_way_as_a_whole(self) -> None:
        names = self.names(torch.optim.AdamW, is_turned=True)
        assert (
            names.count("aten._foreach_lerp_.Scalar") == 1
        )  # state as the weight lies, its gradient otherwise
        assert names.count("aten._foreach_addcdiv_.ScalarList") == 6

    def test_fused(self) -> None:
        assert (
            self.names(lambda p: torch.optim.AdamW(p, fused=True)).count(
                "aten._fused_adamw_.default"
            )
            == 6
        )

    def test_small_tensors_share_a_call(self) -> None:
        names = self.names(torch.optim.AdamW, size=(64, 64))  # four of them are large enough
        assert names.count("aten._foreach_addcdiv_.ScalarList") == 2
        assert (
            self.names(torch.optim.AdamW, size=(3, 4)).count("aten._foreach_addcdiv_.ScalarList")
            == 1
        )

    def test_capturable(self) -> None:
        names = self.names(lambda p: torch.optim.AdamW(p, capturable=True))
        assert names.count("aten._foreach_addcdiv_.Scalar") == 6


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda parameters: torch.optim.LBFGS(parameters), "as often as the loss demands"),
            (lambda parameters: torch.optim.SparseAdam(list(parameters)), "sparse gradients"),
            (lambda parameters: torch.optim.Adam(parameters, differentiable=True), "autograd"),
            (lambda parameters: torch.optim.Adam(parameters, capturable=True), "supported devices"),
        ],
    )
    def test_what_is_not_captured(self, make: Any, reason: str) -> None:
        model = Net()
        optimizer = make(model.parameters())
        with pytest.raises(roam.CaptureError, match=reason):
            roam.capture(train_step, model, optimizer, torch.randn(5, 6), torch.randint(0, 8, (5,)))

    def test_a_closure_for_lbfgs_is_compiled_by_itself(self) -> None:
        """What the refusal of the optimizer advises."""

        def script(wrap: Any) -> list[Any]:
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.LBFGS(
                model.parameters(), max_iter=3, line_search_fn="strong_wolfe"
            )

            def evaluate(x, y):
                model.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            closure = wrap(evaluate)
            losses = []
            for _ in range(3):
                x, y = torch.randn(5, 6), torch.randint(0, 8, (5,))
                losses.append(optimizer.step(lambda x=x, y=y: closure(x, y)))
            return tensors_and_numbers(losses, model.state_dict())

        assert_same_bits(
            script(lambda step: step), script(lambda step: roam.compile(step, keep_grads=True))
        )

    def test_a_loss_scale_inside_of_a_fused_update(self) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(model, optimizer, x, y):
            optimizer.grad_scale = torch.ones(())
            train_step(model, optimizer, x, y)
            del optimizer.grad_scale

        with pytest.raises(roam.CaptureError, match="loss scale"):
            roam.capture(step, model, optimizer, torch.randn(5, 6), torch.randint(0, 8, (5,)))


class Forwarding(torch.optim.Optimizer):
    """Wraps an optimizer as accelerate does: an optimizer by its class alone, whose groups and
    state are another's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.is_due = True

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.is_due:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        if self.is_due:
            self.optimizer.step(closure)


class TestWrappers:
    def test_that_forward(self) -> None:
        outcomes = []
        for wrap in (lambda step: step, roam.compile):
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 3)
            inner = torch.optim.AdamW(model.parameters(), lr=0.1)
            optimizer = Forwarding(inner)

            def step(x, model=model, optimizer=optimizer):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            planned, losses = wrap(step), []
            for number in range(6):
                optimizer.is_due = number != 2
                if number == 4:
                    inner.param_groups[0]["lr"] = 0.03
                losses.append(planned(torch.randn(2, 4)))
            outcomes.append(tensors_and_numbers(losses, model.state_dict(), inner.state_dict()))
        assert_same_bits(*outcomes)

    @pytest.mark.auto
    def test_of_accelerate(self) -> None:
        accelerate = pytest.importorskip("accelerate")
        outcomes = []
        for wrap in (lambda step: step, roam.compile):
            torch.manual_seed(0)
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
            model = torch.nn.Linear(4, 3)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            model, optimizer, scheduler = accelerator.prepare(
                model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            )

            @wrap
            def step(
                x, accelerator=accelerator, model=model, optimizer=optimizer, scheduler=scheduler
            ):
                with accelerator.accumulate(model):
                    loss = model(x).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                return loss.detach()

            losses = [step(torch.randn(2, 4)) for _ in range(6)]
            outcomes.append(
                tensors_and_numbers(
                    losses, model.state_dict(), optimizer.state_dict(), scheduler.state_dict()
                )
            )
        assert_same_bits(*outcomes)


class Preconditioned(torch.optim.Optimizer):
    """Keeps lists and dictionaries in its state, as Shampoo and SOAP do; its first step only
    prepares."""

    def __init__(self, parameters: Any, every: int) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.every = every

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if "factors" not in state:
                    state["factors"], state["bases"] = (
                        [torch.zeros(size, size) for size in parameter.shape],
                        None,
                    )
                    state["steps"], state["kept"] = 0, {"weight": 0.0, "scale": torch.ones(())}
                for number, factor in enumerate(state["factors"]):
                    rows = gradient.movedim(number, 0).reshape(len(factor), -1)
                    factor.lerp_(rows @ rows.T, 0.1)
                if state["bases"] is None:
                    state["bases"] = [torch.linalg.eigh(factor)[1] for factor in state["factors"]]
                    continue
                for basis in state["bases"]:
                    gradient = torch.tensordot(gradient, basis, dims=[[0], [0]])
                state["steps"] += 1
                state["kept"]["weight"] += 0.5
                state["kept"]["scale"].mul_(0.9)
                parameter.sub_(
                    gradient.sign() * state["kept"]["scale"] * state["kept"]["weight"],
                    alpha=group["lr"],
                )
                if state["steps"] % self.every == 0:
                    pairs = zip(state["factors"], state["bases"], strict=True)
                    state["bases"] = [torch.linalg.qr(factor @ basis)[0] for factor, basis in pairs]


class Asking(torch.optim.Optimizer):
    """Asks for each parameter's state, and may put something into that of one."""

    def __init__(self, params: Any, fills: int | None) -> None:
        super().__init__(params, {"lr": 0.1})
        self.fills = fills

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            state = self.state[parameter]
            if number == self.fills:
                state["last"] = parameter.grad.clone()
            parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])


@pytest.mark.parametrize("fills", [None, 0, 2])
def test_state_that_stays_empty_is_there(fills: int | None) -> None:
    def left(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
        optimizer = Asking(net.parameters(), fills)
        step = wrap(lambda x, y: train_step(net, optimizer, x, y))
        for _ in range(3):
            step(torch.randn(5, 6), torch.randint(3, (5,)))
        state = optimizer.state_dict()["state"]
        return [list(state), *map(list, state.values()), state, net.state_dict()]

    assert_same_bits(
        tensors_and_numbers(left(roam.compile)), tensors_and_numbers(left(lambda step: step))
    )
    names = [repr(left(wrap)[:5]) for wrap in (roam.compile, lambda step: step)]
    assert names[0] == names[1]


class TestNestedState:
    def test_lists_that_others_replace_are_refused(self) -> None:
        model = torch.nn.Linear(6, 3)
        optimizer = Preconditioned(model.parameters(), 1)

        def step(x):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        step(torch.randn(5, 6))
        with pytest.raises(roam.CaptureError, match="is a list") as caught:
            roam.capture(step, torch.randn(5, 6))
        assert caught.value.code == "optimizer_state"

    @pytest.mark.auto
    @needs_2_15
    @pytest.mark.parametrize("every", [1, 3])
    def test_in_lists_and_dictionaries(self, every: int) -> None:
        outcomes, steps = [], []
        for wrap in (lambda step: step, roam.compile):
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)
            )
            optimizer = Preconditioned(model.parameters(), every)

            @wrap
            def step(x, model=model, optimizer=optimizer):
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                return loss

            losses = []
            for index in range(7):
                losses.append(step(torch.randn(5, 6)))
                if index == 4:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            outcomes.append(tensors_and_numbers(losses, model.state_dict(), optimizer.state_dict()))
            steps.append(step)
        assert_same_bits(*outcomes)
        assert steps[1].plans

    def test_a_window_of_gradients(self) -> None:
        class Window(torch.optim.SGD):
            def step(self):
                super().step()
                for parameter in self.param_groups[0]["params"]:
                    window = self.state[parameter].setdefault(
                        "w", [torch.zeros_like(parameter) for _ in range(3)]
                    )
                    window.pop(0)
                    window.append(parameter.grad.clone())
                    with torch.no_grad():
                        parameter.sub_(sum(window), alpha=0.01)

        outcomes = []
        for wrap in (lambda step: step, roam.compile):
            torch.manual_seed(0)
            model = torch.nn.Linear(6, 3)
            optimizer = Window(model.parameters(), lr=0.1)

            def step(x, model=model, optimizer=optimizer):
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                return loss

            run = wrap(step)
            losses = [run(torch.randn(5, 6)) for _ in range(6)]
            outcomes.append(
                tensors_and_numbers(losses, model.state_dict(), optimizer.state_dict()["state"])
            )
        assert_same_bits(*outcomes)
        assert len(run.plans) == 1
