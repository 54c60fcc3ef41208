"""Scripts that users write, at their least tame: a compiled step gives the bits of eager, or says
what it cannot do."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import roam
from newer import needs_2_15
from steps import batches, both
from training import assert_same_bits, plain_step, tensors_and_numbers

functional = torch.nn.functional


def linear() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = torch.nn.Linear(6, 3)
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


class TestGradientsFromOutside:
    """A gradient that was not there when the step was captured counts when it is."""

    def test_accumulated_before_a_step_that_zeroes_at_its_end(self) -> None:
        def script(wrap):
            net, optimizer = linear()

            @wrap
            def step(x, y):
                loss = functional.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            returned = []
            for index, (x, y) in enumerate(batches(6)):
                if index in (2, 4):
                    functional.cross_entropy(net(x * 2), y).backward()
                if index == 4:
                    net.bias.grad = None
                returned.append(step(x, y))
            return [returned, net.state_dict(), optimizer.state_dict()]

        both(script)

    @pytest.mark.parametrize("is_frozen", [True, False])
    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_given_to_a_parameter_that_the_step_does_not_use(
        self, is_frozen: bool, set_to_none: bool
    ) -> None:
        def script(wrap):
            net, other = torch.nn.Linear(6, 3), torch.nn.Linear(2, 2).requires_grad_(not is_frozen)
            optimizer = torch.optim.SGD(
                [*net.parameters(), *other.parameters()], lr=0.1, momentum=0.9
            )

            @wrap
            def step(x, y):
                net.zero_grad(set_to_none=set_to_none)
                loss = functional.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
                return loss

            returned = []
            for index, (x, y) in enumerate(batches(6)):
                if index in (2, 3):
                    other.weight.grad = torch.ones(2, 2)
                returned.append(step(x, y))
            return [returned, net.state_dict(), other.state_dict(), optimizer.state_dict()]

        both(script)

    def test_are_still_there_after_a_step_that_failed_before_it_changed_anything(self) -> None:
        def script(wrap):
            net = torch.nn.Sequential(torch.nn.Embedding(4, 6), torch.nn.Linear(6, 3))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

            def backward(x, y):
                loss = functional.cross_entropy(net(x), y)
                loss.backward()
                return loss

            @wrap
            def step(x, y):
                loss = backward(x, y)
                optimizer.step()
                optimizer.zero_grad()
                return loss

            good, bad, y = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 9]), torch.tensor([0, 1, 2])
            returned = []
            for _ in range(2):
                backward(good, y)
                with pytest.raises((IndexError, roam.ExecutionError)):
                    step(bad, y)
                returned.append(step(good, y))
            return [returned, net.state_dict()]

        both(script)


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        (False, r"has updated args\[0\], as it does in eager"),
        (True, r"perhaps in part: args\[0\]$"),
    ],
)
def test_a_failed_step_that_changed_only_its_arguments_says_so(counts: bool, told: str) -> None:
    table = torch.nn.Embedding(4, 6)
    net, optimizer = linear()
    calls = [0]

    @roam.compile
    def step(x, index, y):
        calls[0] += counts  # a run does so at its end only
        x.mul_(2)
        return plain_step(net, optimizer, x + table(index), y)

    (x, y), index = batches(1)[0], torch.tensor([0, 1, 2, 3, 0])
    step(x, index, y)
    with pytest.raises(roam.ExecutionError, match=told):
        step(x, index + 1, y)
    step(x, index, y)


class TestDataReplaced:
    """Beneath `.data = ...` a tensor gets another storage past every dispatcher."""

    @pytest.mark.parametrize("of", ["parameter", "buffer", "gradient", "result"])
    def test_is_refused(self, of: str) -> None:
        net, optimizer = linear()
        net.register_buffer("count", torch.zeros(3))
        before = tensors_and_numbers(net.state_dict())

        @roam.compile
        def step(x, y):
            optimizer.zero_grad()
            result = net(x) + net.count
            loss = functional.cross_entropy(result, y)
            loss.backward()
            tensor = {
                "parameter": net.weight,
                "buffer": net.count,
                "gradient": net.weight.grad,
                "result": loss,
            }[of]
            if of != "gradient":
                optimizer.step()
            torch._C.TensorBase.data.__set__(tensor, tensor.data * 2)
            if of == "gradient":
                optimizer.step()
            return loss

        with pytest.raises(roam.CaptureError, match=r"given other data"):
            step(*batches(1)[0])
        assert_same_bits(before, tensors_and_numbers(net.state_dict()))


NUMBERS: dict[str, Callable[..., torch.Tensor]] = {
    "isinstance": lambda h, s: h * (s if isinstance(s, float) else 100.0),
    "type": lambda h, s: h * (s if type(s) is float else 100.0),
    "exponent": lambda h, s: h.abs() ** s,
    "shape": lambda h, s: h + torch.arange(0.0, s, 0.3).sum(),
    "divmod": lambda h, s: h * divmod(s, 0.2)[1],
    "numpy": lambda h, s: h * float(np.sqrt(s)),
    "interpolation": lambda h, s: functional.interpolate(h[None], scale_factor=1 + s)[0][:, :3],
}


@pytest.mark.sweep
@pytest.mark.parametrize("use", NUMBERS)
def test_a_float_argument_may_decide_anything(use: str) -> None:
    def script(wrap):
        net, optimizer = linear()

        @wrap
        def step(x, y, scale):
            optimizer.zero_grad()
            loss = functional.cross_entropy(NUMBERS[use](net(x), scale), y)
            loss.backward()
            optimizer.step()
            return loss

        return [
            [step(x, y, s) for (x, y), s in zip(batches(4), [0.5, 0.0, 2.0, 0.5], strict=True)],
            net.state_dict(),
        ]

    both(script)


def test_numbers_of_the_step_are_floats_to_the_code_that_asks() -> None:
    class Optimizer(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(
                        parameter.grad,
                        alpha=-group["lr"] if isinstance(group["lr"], float) else 7.0,
                    )

    def script(wrap):
        net = torch.nn.Linear(6, 3)
        optimizer = Optimizer(net.parameters())

        @wrap
        def step(x, y):
            value = plain_step(net, optimizer, x, y).item()
            assert isinstance(value, float)
            return value

        return [[step(x, y) for x, y in batches(3)], net.state_dict()]

    both(script)


def test_plain_optimizer_state_is_guarded() -> None:
    class Optimizer(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    factor = self.state[parameter].setdefault("factor", 2.0)
                    parameter.add_(parameter.grad, alpha=-group["lr"] * factor)

    def script(wrap):
        net = torch.nn.Linear(6, 3)
        optimizer = Optimizer(net.parameters())
        step = wrap(plain_step)
        returned = []
        for index, (x, y) in enumerate(batches(6)):
            if index in (2, 4):
                optimizer.state[net.weight]["factor"] = float(index)
            returned.append(step(net, optimizer, x, y))
        return [returned, net.state_dict(), optimizer.state_dict()]

    both(script)


def test_rates_from_numpy() -> None:
    def script(wrap):
        net, optimizer = linear()
        step = wrap(plain_step)
        returned = []
        for rate, (x, y) in zip(
            [0.1, np.float64(0.3), np.float64(0.2), 1], batches(4), strict=True
        ):
            optimizer.param_groups[0]["lr"] = rate
            returned.append(step(net, optimizer, x, y))
        return [returned, net.state_dict()]

    both(script)


def test_rates_from_numpy_that_the_step_sets() -> None:
    """Schedules that are kept in an array, with decoupled weight decay."""

    def script(wrap):
        net, _ = linear()
        optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.1)
        rates = np.linspace(0.1, 0.01, 4)

        def scheduled(net, optimizer, x, y, index):
            optimizer.param_groups[0]["lr"] = rates[index]
            return plain_step(net, optimizer, x, y)

        step = wrap(scheduled)
        returned = [
            step(net, optimizer, x, y, min(index, 3)) for index, (x, y) in enumerate(batches(5))
        ]
        return [returned, net.state_dict(), optimizer.state_dict()]

    both(script)


def test_a_cycled_momentum_is_live() -> None:
    plans: list[Any] = []

    def script(wrap, make):
        net = torch.nn.Linear(6, 3)
        optimizer = make(net.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        step = wrap(plain_step)
        returned = []
        for x, y in batches(12):
            returned.append(step(net, optimizer, x, y))
            scheduler.step()
        plans.append(getattr(step, "plans", []))
        return [returned, net.state_dict(), optimizer.state_dict()]

    for make in (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    ):
        both(functools.partial(script, make=make))
        assert [name for name, _ in plans[-1]] == ["plain_step (first step)", "plain_step"]


def test_what_code_asks_of_a_learning_rate_is_guarded() -> None:
    def script(wrap):
        net, optimizer = linear()

        def step(x, y):
            loss = plain_step(net, optimizer, x, y)
            return loss * 2 if optimizer.param_groups[0]["lr"] > 0.05 else loss

        run = wrap(step)
        returned = []
        for (x, y), rate in zip(
            batches(6), [0.1, 0.2, 0.01, np.float64(0.02), 0.3, 0], strict=True
        ):
            optimizer.param_groups[0]["lr"] = rate
            returned.append(run(x, y))
        assert len(getattr(run, "plans", [])) in (0, 5)  # the rate of NumPy's has its own
        return [returned, net.state_dict()]

    both(script)


class TestWhatSurroundsTheCall:
    def alternate(
        self,
        context: Callable[[], Any],
        make: Callable[[], tuple[Any, Any]],
        step: Any = plain_step,
    ) -> None:
        def script(wrap):
            objects = make()
            run = wrap(step)
            returned = []
            for index, (x, y) in enumerate(batches(4)):
                with context() if index % 2 else contextlib.nullcontext():
                    returned.append(run(*objects, x, y))
            return [returned, objects[0].state_dict()]

        both(script)

    def test_choice_of_attention_kernels(self) -> None:
        class Attention(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = torch.nn.Linear(6, 24), torch.nn.Linear(8, 3)

            def forward(self, x):
                q, k, v = (
                    part.reshape(1, 5, 2, 4).transpose(1, 2)
                    for part in self.first(x)[None].chunk(3, -1)
                )
                mixed = functional.scaled_dot_product_attention(q, k, v)
                return self.last(mixed.transpose(1, 2).reshape(5, 8))

        def make():
            net = Attention()
            return net, torch.optim.SGD(net.parameters(), lr=0.1)

        self.alternate(lambda: sdpa_kernel(SDPBackend.MATH), make)

    def test_default_device(self) -> None:
        def step(net, optimizer, x, y):
            return plain_step(net, optimizer, x, y), str(torch.ones(2).device)

        self.alternate(lambda: torch.device("meta"), linear, step)

    def test_inference_mode(self) -> None:
        self.alternate(torch.inference_mode, linear, lambda net, _, x, y: net(x).softmax(1))

    def test_autocast_with_its_cache_is_refused(self) -> None:
        net, optimizer = linear()
        with torch.autocast("cpu"), pytest.raises(roam.CaptureError, match=r"cache_enabled=False"):
            roam.compile(plain_step)(net, optimizer, *batches(1)[0])

    def test_autocast_without_it(self) -> None:
        self.alternate(lambda: torch.autocast("cpu", cache_enabled=False), linear)

    def test_autocast_inside(self) -> None:
        def step(net, optimizer, x, y):
            optimizer.zero_grad()
            with torch.autocast("cpu"):
                loss = functional.cross_entropy(net(x) + net(2 * x), y)
            loss.backward()
            optimizer.step()
            return loss

        def make():
            net = torch.nn.Sequential(
                torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
            )
            return net, torch.optim.SGD(net.parameters(), lr=0.1)

        self.alternate(contextlib.nullcontext, make, step)


@pytest.mark.parametrize("conjugate", [(0, 1, 4), (2, 3, 5)])
def test_lazily_conjugated_arguments(conjugate: tuple[int, ...]) -> None:
    def script(wrap):
        net = torch.nn.Linear(6, 3, dtype=torch.complex64)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        @wrap
        def step(x):
            optimizer.zero_grad()
            loss = (net(x) * x[:, :3]).abs().sum()
            loss.backward()
            optimizer.step()
            return loss, torch.view_as_real(x.resolve_conj()) + 1

        generator = torch.Generator(torch.get_default_device()).manual_seed(1)
        returned = []
        for index in range(6):
            x = torch.randn(5, 6, dtype=torch.complex64, generator=generator)
            returned.append(step(x.conj() if index in conjugate else x))
        return [returned, net.state_dict()]

    both(script)


def test_compiled_steps_inside_of_compiled_steps() -> None:
    def script(wrap):
        net, optimizer = linear()
        inner = wrap(plain_step)

        @wrap
        def step(x, y):
            return inner(net, optimizer, x, y) * 2

        data = batches(6)
        returned = [step(*data[0]), inner(net, optimizer, *data[1]), step(*data[2]), step(*data[3])]
        return [returned, net.state_dict()]

    both(script)


def test_a_compiled_method() -> None:
    def script(wrap):
        class Trainer:
            def __init__(self):
                self.net, self.optimizer = linear()

            @wrap
            def step(self, x, y):
                return plain_step(self.net, self.optimizer, x, y)

        trainer = Trainer()
        return [[trainer.step(x, y) for x, y in batches(3)], trainer.net.state_dict()]

    both(script)


def test_a_refused_capture_leaves_no_fake_tensor_in_a_cache() -> None:
    @functools.lru_cache
    def mask(size: int) -> torch.Tensor:
        return torch.ones(size, size).triu()

    net, optimizer = linear()

    def step(x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(mask(5) @ net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    kept = mask(3)
    with pytest.raises(roam.CaptureError) as refusal:
        roam.compile(step).plan(*batches(1)[0])
    assert refusal.value.code == "moved"
    assert mask(3) is kept
    assert type(mask(5)) is torch.Tensor
    step(*batches(1)[0])


def test_captures_in_several_threads_at_once() -> None:
    originals = [torch.Tensor.item, torch.Tensor.__repr__, torch.manual_seed]
    step = roam.compile(plain_step)
    failures: list[Exception] = []

    def work(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        try:
            for x, y in batches(3):
                step(net, optimizer, x, y)
        except Exception as error:  # noqa: BLE001 - looked at below
            failures.append(error)

    threads = [threading.Thread(target=work, args=linear()) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert repr(torch.ones(1)) == "tensor([1.])"
    assert not failures
    assert [torch.Tensor.item, torch.Tensor.__repr__, torch.manual_seed] == originals
    assert roam.compile(lambda x: x.shape)(torch.ones(2, 3)).numel() == 6


def test_attributes_of_parameters_are_seen_and_guarded() -> None:
    def script(wrap):
        net, optimizer = linear()

        @wrap
        def step(x, y):
            return plain_step(lambda x: net(x) * getattr(net.weight, "scale", 1.0), optimizer, x, y)

        returned = []
        for index, (x, y) in enumerate(batches(6)):
            if index in (2, 4):
                net.weight.scale = float(index)
            returned.append(step(x, y))
        return [returned, net.state_dict()]

    both(script)


def test_hooks_on_all_modules_are_guarded() -> None:
    def script(wrap):
        net, optimizer = linear()
        step = wrap(plain_step)
        returned = []
        for index, (x, y) in enumerate(batches(4)):
            with contextlib.ExitStack() as stack:
                if index % 2:
                    hook = torch.nn.modules.module.register_module_forward_hook(
                        lambda *parts: parts[-1] * 1.5
                    )
                    stack.callback(hook.remove)
                returned.append(step(net, optimizer, x, y))
        return [returned, net.state_dict()]

    both(script)


class Finding(torch.nn.Module):
    """Finds out at its first call of what kind its labels are, as classifiers of transformers
    do."""

    def __init__(self, *, differs: bool = False) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)
        self.settings = {"kind": None, "calls": 0}
        self.differs = differs

    def forward(self, x: Any, labels: Any) -> Any:
        scale = 2.0 if self.differs and self.settings["kind"] is None else 1.0
        if self.settings["kind"] is None:
            self.settings["kind"] = "regression" if labels.is_floating_point() else "classification"
        if self.settings["kind"] == "regression":
            return functional.mse_loss(self.inner(x), labels) * scale
        return functional.cross_entropy(self.inner(x), labels) * scale


def finding_step(model: Any, optimizer: Any, x: Any, labels: Any) -> Any:
    optimizer.zero_grad()
    loss = model(x, labels)
    loss.backward()
    optimizer.step()
    return loss


def test_what_a_model_finds_out_once_is_set_when_the_step_runs() -> None:
    batch = torch.randn(5, 4), torch.randint(0, 3, (5,))
    outcomes = []
    for wrap in (lambda step: step, roam.compile):
        torch.manual_seed(0)
        model = Finding()
        optimizer = torch.optim.AdamW(model.parameters())
        roam.capture(finding_step, model, optimizer, *batch)
        assert model.settings["kind"] is None  # nothing has run
        step = wrap(finding_step)
        losses = [step(model, optimizer, *batch) for _ in range(3)]
        assert model.settings["kind"] == "classification"
        outcomes.append(
            tensors_and_numbers(losses, model.state_dict(), optimizer.state_dict()["state"])
        )
    assert_same_bits(*outcomes)
    # Where it is found out anew, nothing is planned anew; set to something else, it counts.
    captures = len(step._captures)
    model.settings["kind"] = None
    step(model, optimizer, *batch)
    assert (model.settings["kind"], len(step._captures)) == ("classification", captures)
    model.settings["kind"] = "regression"
    step(model, optimizer, torch.randn(5, 4), torch.randn(5, 3))
    assert model.settings["kind"] == "regression"


def test_what_a_model_finds_out_and_what_it_counts() -> None:
    model = Finding()
    model.register_forward_pre_hook(
        lambda net, _: net.settings.update(calls=net.settings["calls"] + 1)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    step = roam.compile(finding_step)
    for _ in range(3):
        step(model, optimizer, torch.randn(5, 4), torch.randint(0, 3, (5,)))
    assert model.settings == {"kind": "classification", "calls": 3}


def test_what_changes_the_next_step_is_refused() -> None:
    model = Finding(differs=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(roam.CaptureError, match="changes Python state") as refusal:
        roam.capture(finding_step, model, optimizer, torch.randn(5, 4), torch.randint(0, 3, (5,)))
    assert refusal.value.code == "moved"
    assert model.settings == {"kind": None, "calls": 0}


class TestTensorsThatAreNoParameters:
    """A plain tensor that requires a gradient may have an optimizer: an image that is optimized, a
    temperature, masters."""

    @pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
    @pytest.mark.parametrize("zeroes", [True, False])
    def test_have_state_and_gradients_from_step_to_step(self, make: Any, zeroes: bool) -> None:
        image = torch.rand(1, 3).requires_grad_(True)
        optimizer = make([image], lr=0.05)

        def step(x):
            if zeroes:
                optimizer.zero_grad()
            loss = (image * x).pow(2).sum()
            loss.backward()
            optimizer.step()
            return loss

        found = roam.compare(step, torch.randn(3), steps=4)
        assert found.equal, found
        step(torch.randn(3))
        found = roam.compare(step, torch.randn(3), steps=4)
        assert found.equal, found


class TestContextsMadeOnce:
    """`ctx = torch.autocast(...)` outside of the step, `with ctx:` in every step."""

    def test_are_entered_in_the_step_and_outside(self) -> None:
        net, optimizer = linear()
        contexts = [torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad()]

        def train(x, y):
            optimizer.zero_grad()
            with contexts[0]:
                loss = functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            with contexts[1]:
                norm = net.weight.norm()
            return loss, norm

        x, y = next(iter(batches(1)))
        found = roam.compare(train, x, y)
        assert found.equal, found
        step = roam.compile(train)
        for _ in range(4):
            step(x, y)
            with contexts[0], contexts[1]:
                net(x)
        plans = len(step.plans)
        contexts[0] = torch.autocast("cpu", dtype=torch.bfloat16, enabled=False)
        step(x, y)
        assert len(step.plans) > plans
        assert roam.compare(step, x, y).equal


def test_shapes_that_hang_on_data_are_refused_with_a_form_that_does_not() -> None:
    net, _ = linear()
    found = roam.compare(lambda x: net(x)[torch.where(x[:, 0] > 0)[0]].sum(), torch.randn(4, 6))
    assert found.outcome == "refused"
    assert "torch.where with three arguments" in str(found)


class TestArgumentsThatTheStepReshapes:
    """The caller's tensor has its new shape after the step, which runs beside its plan."""

    def script(self, change: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> None:
        def script(wrap):
            net, optimizer = linear()

            @wrap
            def step(x, given):
                changed = change(given)
                loss = (net(x) * changed.sum()).square().mean()
                assert not torch.isnan(loss)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                return loss, changed

            returned = []
            for index, (x, _) in enumerate(batches(6)):
                base = torch.arange(12.0).view(2, 6, 1)
                given = {"target": base[1], "other": torch.ones(3)}
                with contextlib.suppress(AssertionError):
                    loss, changed = step(x * (float("nan") if index == 3 else 1), given)
                    assert changed is given["target"]
                    returned.append(loss)
                target = given["target"]
                returned += [base, target, target.shape, target.stride(), target.storage_offset()]
            returned.append(step(x, given))
            return returned, net.state_dict()

        both(script)

    @pytest.mark.auto
    @needs_2_15
    @pytest.mark.parametrize(
        "method",
        [
            lambda x: x.unsqueeze_(-1),
            lambda x: x.squeeze_(),
            lambda x: x.t_(),
            lambda x: x.transpose_(0, 1).unsqueeze_(0).mul_(2),
            lambda x: x.t_().t_(),
            lambda x: x.swapaxes_(0, 1),
        ],
    )
    def test_have_the_shape_that_eager_leaves(
        self, method: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.script(
            lambda given: method(given["target"]) if given["target"].dim() == 2 else given["target"]
        )

    @pytest.mark.auto
    @needs_2_15
    def test_may_be_kept(self) -> None:
        class Holder:
            def step(self, x):
                self.kept = x.unsqueeze_(0)
                return x * 2

        holder, x = Holder(), torch.ones(3)
        step = roam.compile(holder.step)
        assert step(x).shape == (1, 3)
        assert holder.kept is x
        assert x.shape == (1, 3)
        assert step(x).shape == (1, 1, 3)
        assert holder.kept is x

    @pytest.mark.parametrize("of", ["buffer", "argument"])
    def test_are_refused_with_buffers_where_the_plan_runs_alone(self, of: str) -> None:
        net, _ = linear()
        net.register_buffer("mask", torch.ones(3))
        given = torch.ones(3)

        def step(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            return (net(x) * (net.mask if of == "buffer" else given).unsqueeze_(0)).sum()

        with pytest.raises(roam.CaptureError) as refusal:
            roam.compile(step)(torch.ones(5, 6), given)
        assert refusal.value.code == "inplace_view"
        assert net.mask.shape == given.shape == (3,)
