"""Gradient scalers: steps that are left out where a gradient is infinite are left out by plan
too."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import roam
from training import assert_same_bits, tensors_and_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
functional = torch.nn.functional
STEPS = 20
HUGE = float("inf")
"""A batch times this has gradients that are not finite."""


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.25),
        torch.nn.Linear(8, 3),
    )


def make_scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 2, **options})


def batches(
    infinite: tuple[int, ...] = (), count: int = STEPS
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for index in range(count):
        x = torch.randn(5, 6, generator=generator)
        made.append(
            (x * HUGE if index in infinite else x, torch.randint(0, 3, (5,), generator=generator))
        )
    return made


def loss_of(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.cross_entropy(net(x), y)


def scaled_step(net, optimizer, scaler, x, y):
    optimizer.zero_grad()
    loss = loss_of(net, x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


Wrap = Callable[[Any], Any]
planned = functools.partial(roam.compile, poison=True)


def both(script: Callable[[Wrap], list[Any]], wrap: Wrap = roam.compile) -> None:
    """What a script returns has the same bits with eager steps and with compiled ones, after every
    step."""
    outcomes = []
    for chosen in (lambda step: step, wrap):
        torch.manual_seed(0)
        outcomes.append(tensors_and_numbers(script(chosen), torch.get_rng_state()))
    assert_same_bits(*outcomes)


def states(*parts: Any) -> list[Any]:
    return tensors_and_numbers([part.state_dict() for part in parts], torch.get_rng_state())


class Noisy(torch.optim.Optimizer):
    """Draws random numbers in its step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(
                    parameter.grad + 0.01 * torch.randn_like(parameter), alpha=-group["lr"]
                )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "noisy": Noisy,
}


@pytest.mark.sweep
@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("infinite", [(), (0, 1, 2, 9), (4, 5, 12, 19)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_have_the_bits_of_eager(
    name: str, infinite: tuple[int, ...], pool: bool
) -> None:
    scales = []

    def script(wrap):
        net, scaler = network(), make_scaler()
        optimizer = OPTIMIZERS[name](net.parameters())
        step, seen = wrap(scaled_step), []
        for x, y in batches(infinite):
            seen += [step(net, optimizer, scaler, x, y), states(net, optimizer, scaler)]
            scales.append(scaler.get_scale())
        return seen

    both(script, lambda step: roam.compile(step, pool=pool, poison=pool))
    backoffs = sum(
        after < before for before, after in zip([1024.0, *scales], scales[:STEPS], strict=False)
    )
    assert backoffs == len(infinite)
    assert max(scales) > 1024.0


def test_float16() -> None:
    def script(wrap):
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        optimizer, scaler, seen = (
            torch.optim.AdamW(net.parameters()),
            make_scaler(init_scale=2.0**18),
            [],
        )

        @wrap
        def step(x, y):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        for x, y in batches():
            seen += [step(x * 3, y), states(net, optimizer, scaler)]
        assert scaler.get_scale() < 2.0**18  # the scale itself was too large
        return seen

    both(script, planned)


@pytest.mark.parametrize("infinite", [(0,), (3, 4)])
def test_clipping_what_was_unscaled(infinite: tuple[int, ...]) -> None:
    def script(wrap):
        net, scaler = network(), make_scaler()
        optimizer = torch.optim.AdamW(net.parameters())

        @wrap
        def step(x, y):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, x, y)).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            return norm

        return [[step(x, y), states(net, optimizer, scaler)] for x, y in batches(infinite, 8)]

    both(script, planned)


@pytest.mark.parametrize("infinite", [(), (0,), (2, 3)])
def test_several_optimizers_of_which_one_is_left_out(infinite: tuple[int, ...]) -> None:
    def script(wrap):
        nets = network(), torch.nn.Linear(6, 2)
        optimizers = [
            torch.optim.AdamW(nets[0].parameters()),
            torch.optim.SGD(nets[1].parameters(), lr=0.1, momentum=0.9),
        ]
        scaler = make_scaler()

        @wrap
        def step(x, y, z):
            for optimizer in optimizers:
                optimizer.zero_grad()
            first, second = loss_of(nets[0], x, y), nets[1](z).square().mean()
            for loss in scaler.scale([first, second]):
                loss.backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            return first, second

        ordinary = batches((), 8)
        return [
            [step(x, y, z), states(*nets, *optimizers, scaler)]
            for (x, y), (z, _) in zip(batches(infinite, 8), ordinary, strict=True)
        ]

    both(script, planned)


@pytest.mark.parametrize("infinite", [(), (1,), (6, 9)])
def test_accumulation_in_a_step_and_across_calls(infinite: tuple[int, ...]) -> None:
    def script(wrap):
        net, scaler = network(), make_scaler()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        @wrap
        def step(pairs, update):
            for x, y in pairs:
                scaler.scale(loss_of(net, x, y) / 4).backward()
            if update:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

        data, seen = batches(infinite, 24), []
        for start in range(0, 24, 2):
            step(data[start : start + 2], start % 4 == 2)
            seen.append(
                [states(net, optimizer, scaler), [parameter.grad for parameter in net.parameters()]]
            )
        return seen

    both(script, planned)


def test_two_updates_in_one_step() -> None:
    def script(wrap):
        net, scaler = network(), make_scaler()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        @wrap
        def step(first, second):
            return [scaled_step(net, optimizer, scaler, *batch) for batch in (first, second)]

        data = batches((0, 3, 6, 7), 12)
        return [[step(*data[i : i + 2]), states(net, optimizer, scaler)] for i in range(0, 12, 2)]

    both(script, planned)


def test_gradients_that_are_kept() -> None:
    def script(wrap):
        net, scaler = network(), make_scaler()
        optimizer, seen = torch.optim.AdamW(net.parameters()), []
        step = wrap(scaled_step)
        for x, y in batches((0, 3), 6):
            seen += [step(net, optimizer, scaler, x, y), states(net, optimizer, scaler)]
            seen += [parameter.grad for parameter in net.parameters()]
        return tensors_and_numbers(seen)

    both(script, lambda step: roam.compile(step, keep_grads=True, poison=True))


def test_the_scale_is_live() -> None:
    captures = []

    def script(wrap):
        net, scaler = network(), make_scaler()
        optimizer, seen = torch.optim.AdamW(net.parameters()), []

        @wrap
        def step(x, y):
            before = scaler.get_scale()
            loss = scaled_step(net, optimizer, scaler, x, y)
            return loss, before, scaler.get_scale()

        for index, (x, y) in enumerate(batches((7,), 14)):
            if index == 5:
                scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0, "_growth_tracker": 1})
            if index == 9:
                scaler.update(128.0)
            seen += [step(x, y), states(net, optimizer, scaler)]
        captures.append(len(getattr(step, "_captures", [])))
        return seen

    both(script)
    assert captures == [0, 1]  # a loaded or given scale costs no capture


def test_settings_are_guarded() -> None:
    def script(wrap):
        net, scaler = network(), make_scaler()
        optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
        step = wrap(scaled_step)
        for index, (x, y) in enumerate(batches((8,), 14)):
            if index == 3:
                scaler.set_growth_factor(3.0)
            if index == 6:
                scaler.set_backoff_factor(0.25)
            if index == 10:
                scaler.set_growth_interval(1)
            if index == 12:
                scaler = torch.amp.GradScaler("cpu", enabled=False)
            seen += [step(net, optimizer, scaler, x, y), states(net, optimizer, scaler)]
        return seen

    both(script)


@pytest.mark.parametrize("state", ["loaded before the first step", "given before the first step"])
def test_a_scaler_that_has_made_nothing_yet(state: str) -> None:
    def script(wrap):
        net, scaler = network(), make_scaler()
        optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
        step = wrap(scaled_step)
        if state.startswith("loaded"):
            scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 1})
        else:
            scaler.scale(torch.ones(()))
        for x, y in batches((0,), 5):
            seen += [step(net, optimizer, scaler, x, y), states(net, optimizer, scaler)]
        return seen

    both(script)


@pytest.mark.parametrize("infinite", [(), (0,), (2,)])
def test_a_scheduler_after_the_step(infinite: tuple[int, ...]) -> None:
    warned: list[list[str]] = []

    def script(wrap):
        net, scaler = network(), make_scaler()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        @wrap
        def step(x, y):
            return scaled_step(net, optimizer, scaler, x, y)

        def both_steps(x, y):
            loss = step(x, y)
            scheduler.step()
            return loss

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen = [
                [both_steps(x, y), states(net, optimizer, scaler, scheduler)]
                for x, y in batches(infinite, 6)
            ]
        warned.append(
            [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]
        )
        return seen

    both(script)
    assert warned[0] == warned[1]
    assert len(warned[0]) == (
        0 in infinite
    )  # a scheduler that is stepped before its optimizer ever was


def test_the_first_run_that_leaves_nothing_out_is_the_one_that_checks_everything() -> None:
    net, scaler = network(), make_scaler()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step, checked = roam.compile(scaled_step), []
    for x, y in batches((0, 1, 2), 4):
        step(net, optimizer, scaler, x, y)
        checked.append(step._last._executor.generated is not None)
    # The first call makes the scale; the others are one program.
    assert checked == [False, False, False, True]


def test_updates_wait_for_every_gradient() -> None:
    net, scaler = network(), make_scaler()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    graph = roam.capture(scaled_step, net, optimizer, scaler, *batches(count=1)[0])
    plan = roam.optimize(graph)
    names = [operator.name for operator in graph.operators]
    found = names.index("aten._local_scalar_dense.default")
    updates = [
        index
        for index, operator in enumerate(graph.operators)
        if operator.name == "aten.add_.Tensor"
    ]
    assert len(updates) >= len(list(net.parameters()))
    place = {int(index): step for step, index in enumerate(plan.order)}
    assert all(
        place[found] < place[update]
        for update in updates
        if graph.operators[update].phase == "update"
    )


@pytest.mark.long
@pytest.mark.parametrize(("tokens", "barrier_costs"), [(64, True), (512, False)])
def test_price_of_the_barrier(tokens: int, barrier_costs: bool) -> None:
    """What docs/explanation/runtime.md says."""
    with roam.fake():
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)).train()
        batch = torch.zeros(1, tokens, dtype=torch.int64)

    def step(net, optimizer, scaler, batch, clip):
        optimizer.zero_grad()
        loss = net(input_ids=batch, labels=batch).loss
        scaler.scale(loss).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    peaks = {}
    for name, enabled, clip in (
        ("plain", False, False),
        ("clipped", False, True),
        ("with a scaler", True, False),
    ):
        optimizer, scaler = torch.optim.AdamW(net.parameters()), make_scaler(enabled=enabled)
        plan = roam.optimize(roam.capture(step, net, optimizer, scaler, batch, clip))
        before, peaks[name] = plan.program_order_peak_bytes / 2**20, plan.peak_bytes / 2**20
        print(
            f"{tokens} tokens, {name}: program order {before:.1f} MiB, plan {peaks[name]:.1f} MiB"
        )
        assert plan.gap < 0.001
    assert peaks["with a scaler"] == peaks["clipped"]
    assert (peaks["with a scaler"] > peaks["plain"]) is barrier_costs


class TestRefuses:
    def step_of(self, use: Callable[..., Any], **options: Any) -> Callable[[], Any]:
        net, scaler = network(), make_scaler(**options)
        optimizer = torch.optim.AdamW(net.parameters())
        x, y = batches(count=1)[0]

        def step(x, y):
            loss = scaled_step(net, optimizer, scaler, x, y)
            return use(net, optimizer, scaler, loss)

        return lambda: roam.compile(step)(x, y)

    @pytest.mark.parametrize(
        ("use", "message"),
        [
            (lambda n, o, s, loss: s.unscale_(o), r"does not end with scaler\.update\(\)"),
            (
                lambda n, o, s, loss: o.state[n[0].weight]["exp_avg"] * 1,
                "skips that step",
            ),
            (lambda n, o, s, loss: o.state[n[0].weight]["step"], "skips that step"),
            (lambda n, o, s, loss: loss * hash(s.get_scale()), "Python needs the number"),
            (
                lambda n, o, s, loss: s.set_growth_factor(s.get_growth_factor() + 1),
                "changes Python state",
            ),
        ],
    )
    def test_what_hangs_on_whether_a_step_was_left_out(self, use: Any, message: str) -> None:
        with pytest.raises(roam.CaptureError, match=message.replace("scaler", "closure scaler")):
            self.step_of(use)()

    def test_a_step_in_the_middle_of_the_scalers_work(self) -> None:
        net, scaler = network(), make_scaler()
        optimizer, (x, y) = torch.optim.SGD(net.parameters(), lr=0.1), batches(count=1)[0]
        step = roam.compile(scaled_step)
        step(net, optimizer, scaler, x, y)
        scaler.scale(loss_of(net, x, y)).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(roam.CaptureError, match=r"begin after scaler\.update\(\)"):
            step(net, optimizer, scaler, x, y)
        scaler.step(optimizer)
        scaler.update()
        step(net, optimizer, scaler, x, y)
        assert len(step._captures) == 1

    def test_optimizers_that_take_the_scale_themselves(self) -> None:
        class Own(torch.optim.SGD):
            _step_supports_amp_scaling = True

        net, scaler = network(), make_scaler()
        with pytest.raises(roam.CaptureError, match="applies the scaler's scale itself"):
            roam.capture(
                scaled_step, net, Own(net.parameters(), lr=0.1), scaler, *batches(count=1)[0]
            )

    def test_scalers_of_the_users_own(self) -> None:
        class Own(torch.amp.GradScaler):
            def update(self, new_scale: Any = None) -> None:
                super().update(2.0)

        net = network()
        with pytest.raises(roam.CaptureError, match="PyTorch's own"):
            roam.capture(
                scaled_step,
                net,
                torch.optim.SGD(net.parameters(), lr=0.1),
                Own("cpu"),
                *batches(count=1)[0],
            )

    def test_a_scaler_that_it_cannot_find(self, monkeypatch: pytest.MonkeyPatch) -> None:
        net = network()
        optimizer, hidden = torch.optim.SGD(net.parameters(), lr=0.1), make_scaler()
        monkeypatch.setitem(globals(), "hidden", hidden)
        name = "hidden"

        def step(x, y):
            return scaled_step(net, optimizer, globals()[name], x, y)

        with pytest.raises(roam.CaptureError, match="scaler that capture could not find"):
            roam.capture(step, *batches(count=1)[0])
        assert hidden._scale is None

    def test_optimizers_that_replace_gradients(self) -> None:
        class Dropping(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                super().step()
                self.zero_grad()

        net, scaler = network(), make_scaler()
        with pytest.raises(roam.CaptureError, match="replaces a gradient"):
            roam.capture(
                scaled_step, net, Dropping(net.parameters(), lr=0.1), scaler, *batches(count=1)[0]
            )

    def test_optimizers_that_return_something(self) -> None:
        class Returning(torch.optim.SGD):
            def step(self, closure: Any = None) -> float:  # type: ignore[override]
                super().step()
                return 1.0

        net, scaler = network(), make_scaler()
        with pytest.raises(
            roam.CaptureError, match="optimizer's step that a gradient scaler may skip returns"
        ):
            roam.capture(
                scaled_step, net, Returning(net.parameters(), lr=0.1), scaler, *batches(count=1)[0]
            )

    def test_two_first_updates_in_one_step(self) -> None:
        net, scaler = network(), make_scaler()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def step(first, second):
            return [scaled_step(net, optimizer, scaler, *batch) for batch in (first, second)]

        with pytest.raises(roam.CaptureError, match="skips that step"):
            roam.capture(step, *batches(count=2))


def test_clipping_that_raises_beside_a_scaler() -> None:
    def script(wrap: Wrap) -> list[Any]:
        net, scaler = network(), make_scaler()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        @wrap
        def step(x, y):
            optimizer.zero_grad()
            loss = loss_of(net, x, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
            scaler.step(optimizer)
            scaler.update()
            return loss

        seen: list[Any] = []
        for index, (x, y) in enumerate(batches(count=5)):
            if index == 3:
                with pytest.raises(RuntimeError, match="non-finite"):
                    step(x * torch.inf, y)
                scaler.update()
            else:
                seen += [step(x, y), states(net, optimizer), scaler.state_dict()]
        return seen

    both(script)


def test_capture_leaves_no_mark_on_a_scaler() -> None:
    net, scaler = network(), make_scaler()
    optimizer, (x, y) = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), batches(count=1)[0]
    before = dict(vars(scaler))
    roam.capture(scaled_step, net, optimizer, scaler, x, y)
    assert vars(scaler) == before
    assert scaler._scale is None
    scaled_step(net, optimizer, scaler, x, y)
    held, values = dict(vars(scaler)), tensors_and_numbers(scaler.state_dict())
    roam.capture(scaled_step, net, optimizer, scaler, x, y)
    assert all(vars(scaler)[name] is value for name, value in held.items())
    assert_same_bits(values, tensors_and_numbers(scaler.state_dict()))
