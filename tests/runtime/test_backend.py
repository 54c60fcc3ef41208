"""``torch.compile(..., backend="roam")`` gives the bits of the backend aot_eager, and says where it
does not plan."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from roam.runtime import backend as subject
from roam.runtime.backend import backend
from roam.runtime.memory_profiler import measure_peak
from roam.runtime.strategy import Choice
from training import assert_same_bits, tensors_and_numbers

functional = torch.nn.functional
GROUP = "torch_dynamo_backends"
STEPS = 3
POISONED = {"pool": True, "poison": True}


@pytest.fixture(autouse=True)
def _apart() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Seen:
    """What the backend planned and ran."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []
        self.planned_runs = 0
        self.records: list[logging.LogRecord] = []

    @property
    def figures(self) -> list[str]:
        return [record.getMessage() for record in self.records if record.levelno == logging.INFO]

    @property
    def warnings(self) -> list[str]:
        return [record.getMessage() for record in self.records if record.levelno > logging.INFO]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    seen = Seen()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", seen.records.append)
    level = subject.logger.level
    subject.logger.setLevel(logging.INFO)
    choose, run = subject.choose, subject._Planned.run

    def spied_choose(*args: Any, **kwargs: Any) -> list[Choice]:
        found = choose(*args, **kwargs)
        seen.choices.extend(found)
        return found

    def spied_run(planned: Any, args: list[Any]) -> Any:
        seen.planned_runs += 1
        return run(planned, args)

    monkeypatch.setattr(subject, "choose", spied_choose)
    monkeypatch.setattr(subject._Planned, "run", spied_run)
    subject.logger.addHandler(handler)
    yield seen
    subject.logger.removeHandler(handler)
    subject.logger.setLevel(level)


class Mlp(torch.nn.Module):
    """Dropout, and one weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 24)
        self.inner = torch.nn.Linear(24, 24)
        self.out = torch.nn.Linear(24, 50, bias=False)
        self.out.weight = self.embed.weight
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(functional.gelu(self.inner(self.embed(x)))) * torch.tensor([0.5])
        return self.out(self.dropout(hidden)).square().mean()


class Convolutions(torch.nn.Module):
    """Batch norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
            torch.nn.MaxPool2d(2), torch.nn.Conv2d(8, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean((2, 3)).logsumexp(1).sum()


class Broken(torch.nn.Module):
    """A graph break between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x).tanh()
        torch._dynamo.graph_break()
        return self.other(hidden).softmax(-1).square().sum()


class Total(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum()


class Gpt2(torch.nn.Module):
    """Attention, layer norm, dropout and tied embeddings, from a configuration."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            n_layer=1, n_embd=32, n_head=2, vocab_size=101, n_positions=16, use_cache=False, bos_token_id=0, eos_token_id=0
        )  # fmt: skip
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=x).logits
        return functional.cross_entropy(logits.flatten(0, 1), x.flatten())


def tokens(size: int) -> torch.Tensor:
    return torch.randint(50, (2, size))


def images(size: int) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


def rows(size: int) -> torch.Tensor:
    return torch.randn(size, 16)


def train(
    make: Callable[[], torch.nn.Module],
    batch: Callable[[int], torch.Tensor],
    sizes: list[int],
    how: Any,
    **kwargs: Any,
) -> list[Any]:
    """Losses, gradients, parameters, buffers and the generator, over some steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().train()
    forward = model if how == "eager" else torch.compile(model, backend=how, **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left: list[Any] = []
    for size in sizes:
        optimizer.zero_grad()
        loss = forward(batch(size))
        loss.backward()
        left += tensors_and_numbers(loss, [parameter.grad for parameter in model.parameters()])
        optimizer.step()
    return left + tensors_and_numbers(model.state_dict(), torch.get_rng_state())


TRAININGS = {
    "mlp": (Mlp, tokens, [6]),
    "convolutions": (Convolutions, images, [12]),
    "broken": (Broken, rows, [5]),
    "gpt2": (Gpt2, tokens, [16]),
}


@functools.cache
def expected_training(name: str) -> list[Any]:
    """What aot_eager leaves, after a look that it is what eager leaves."""
    make, batch, sizes = TRAININGS[name]
    found = train(make, batch, sizes * STEPS, "aot_eager")
    assert_same_bits(found, train(make, batch, sizes * STEPS, "eager"))
    return found


# Dynamo looks for the gradient of a tensor that has none.
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("options", [{}, POISONED], ids=["default", "pool"])
@pytest.mark.parametrize("name", TRAININGS)
def test_training_has_the_bits_of_aot_eager(name: str, options: dict[str, Any], seen: Seen) -> None:
    make, batch, sizes = TRAININGS[name]
    assert_same_bits(
        train(make, batch, sizes * STEPS, backend, options=options), expected_training(name)
    )
    assert not seen.warnings
    assert len(seen.figures) == len(seen.choices)
    assert all("in program order" in line for line in seen.figures)
    assert len(seen.choices) == (4 if name == "broken" else 2)
    assert seen.planned_runs == (STEPS - 1) * len(
        seen.choices
    )  # the first run of each is the checked one
    for choice in seen.choices:
        assert choice.uses_pool == bool(options)
        assert choice.plan.peak_bytes <= choice.plan.program_order_peak_bytes


OTHERWISE: dict[str, Callable[[Any, Any], Any]] = {
    "svdvals": lambda net, x: torch.linalg.svdvals(x.detach()).sum() * net(x).sum(),
    "eigvalsh": lambda net, x: torch.linalg.eigvalsh((x @ x.T).detach()).sum() * net(x).sum(),
    "matrix_norm": lambda net, x: torch.linalg.matrix_norm(net.weight.detach(), 2) * net(x).sum(),
    "masked_fill": lambda net, x: net(x).masked_fill(x > 0.2, net.bias[0]).sin().sum(),
    "bicubic": lambda net, x: functional.interpolate(
        net(x)[None, None], scale_factor=1.7, mode="bicubic"
    ).sin().sum(),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"memory": "1MiB"}], ids=["default", "memory"])
@pytest.mark.parametrize("name", OTHERWISE)
def test_operators_that_graphs_have_others_for(
    name: str, options: dict[str, Any], seen: Seen
) -> None:
    """PyTorch makes graphs of other operators than it runs eagerly."""

    def left(how: Any, **options: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net, x = torch.nn.Linear(16, 16), torch.randn(16, 16)
        function = torch.compile(OTHERWISE[name], backend=how, dynamic=False, **options)
        found = []
        for _ in range(STEPS):
            net.zero_grad()
            loss = function(net, x)
            loss.backward()
            found += [loss.detach(), *(parameter.grad for parameter in net.parameters())]
        return found

    assert_same_bits(left(backend, options=options), left("aot_eager"))
    assert not seen.warnings


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_plan_holds_for_all_sizes_that_dynamo_takes_for_symbols(
    dynamic: bool | None, seen: Seen
) -> None:
    def make() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(16, 8), torch.nn.Dropout(0.2), torch.nn.Softmax(0), Total()
        )

    sizes = [4, 6, 4, 6, 9, 4, 7, 5]
    expected = train(make, rows, sizes, "aot_eager", dynamic=dynamic)
    assert_same_bits(train(make, rows, sizes, backend, dynamic=dynamic, options=POISONED), expected)
    assert not seen.warnings
    # Without being told, Dynamo first makes a graph for one shape, then one for all.
    assert len(seen.choices) == 2 * (2 if dynamic is None else 1)
    assert seen.planned_runs == 2 * len(sizes) - len(seen.choices)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("options", [{}, POISONED], ids=["default", "pool"])
@pytest.mark.parametrize(
    ("make", "batch", "sizes"),
    [
        (Gpt2, tokens, [7, 12, 3, 16, 9, 5, 14]),
        (Convolutions, images, [12, 15, 9, 20, 11]),
        (Broken, rows, [5, 9, 3, 12, 30]),
    ],
    ids=["gpt2", "convolutions", "broken"],
)
def test_other_sizes_have_the_bits_of_aot_eager_by_the_plan_of_their_range(
    make: Callable[[], torch.nn.Module],
    batch: Callable[[int], torch.Tensor],
    sizes: list[int],
    options: dict[str, Any],
    seen: Seen,
) -> None:
    expected = train(make, batch, sizes, "aot_eager", dynamic=True)
    assert_same_bits(train(make, batch, sizes, backend, dynamic=True, options=options), expected)
    assert not seen.warnings
    graphs = 4 if make is Broken else 2
    assert len(seen.choices) <= 2 * graphs  # once more for sizes beyond twice the first
    assert seen.planned_runs == graphs * len(sizes) - len(seen.choices)


def test_a_length_beyond_the_range_is_planned_with_room_for_others(seen: Seen) -> None:
    compiled = torch.compile(lambda x: (x.sin() * 2).cos().sum(), backend=backend, dynamic=True)
    for size in (10, 15, 12, 19, 25, 30, 50, 40, 3):
        x = torch.randn(size)
        assert compiled(x).equal((x.sin() * 2).cos().sum())
    assert (len(seen.choices), seen.planned_runs) == (2, 7)
    assert not seen.warnings


def test_parts_of_longer_texts_have_one_plan(seen: Seen) -> None:
    """Arguments that are parts of tensors, and share memory with one another."""

    class Shifted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(50, 24)

        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            x, y = pair
            logits = self.embed(x) @ self.embed.weight.T
            return functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    def pairs(size: int) -> Any:
        x = tokens(size)
        return x[:, :-1], x[:, 1:]

    sizes = [9, 12, 7, 15, 11]
    expected = train(Shifted, pairs, sizes, "aot_eager", dynamic=True)
    assert_same_bits(train(Shifted, pairs, sizes, backend, dynamic=True), expected)
    assert len(seen.choices) == 4  # once more for the longest
    assert not seen.warnings


def test_sizes_are_results_of_graphs_too(seen: Seen) -> None:
    def halves(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x[: x.shape[0] // 2].sin() * 2, x.shape[0] // 2

    compiled = torch.compile(halves, backend=backend, dynamic=True)
    for size in (10, 15, 12, 19):
        x = torch.randn(size)
        (found, count), (expected, known) = compiled(x), halves(x)
        assert found.equal(expected)
        assert count == known
    assert len(seen.choices) == 1


def test_nobody_hears_of_sizes_that_a_kernel_does_not_take(seen: Seen) -> None:
    """Kernels are tried at sizes for which PyTorch logs errors."""
    told = logging.getLogger("torch._subclasses.fake_tensor")
    told.addHandler(handler := logging.Handler())
    handler.emit = seen.records.append  # type: ignore[method-assign]
    try:
        compiled = torch.compile(
            lambda x: x.unfold(0, 5, 1).sin().sum(), backend=backend, dynamic=True
        )
        for size in (9, 14, 12, 18, 10):
            x = torch.randn(size)
            assert compiled(x).equal(x.unfold(0, 5, 1).sin().sum())
    finally:
        told.removeHandler(handler)
    assert len(seen.choices) == 1
    assert not seen.warnings


def test_sizes_that_lead_another_way_have_plans_of_their_own(seen: Seen) -> None:
    compiled = torch.compile(
        lambda x: torch.stack([part.sum() for part in x.split(8)]), backend=backend, dynamic=True
    )
    for size in (20, 23, 21, 30, 32, 20):
        x = torch.randn(size)
        assert compiled(x).equal(torch.stack([part.sum() for part in x.split(8)]))
    assert not seen.warnings


def test_a_kernel_that_is_another_for_one_size_runs_that_size_unplanned(seen: Seen) -> None:
    """A first run at a size compares what kernels give, and is undone."""
    buffer = torch.zeros(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        buffer.add_(1)
        return odd(x).sum() + buffer.sum()

    @torch.library.custom_op("roam_test_backend::odd", mutates_args=())
    def odd(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * 2, x], 1)[:, 0] if x.shape[0] == 17 else x * 2

    @odd.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    compiled = torch.compile(step, backend=backend, dynamic=True)
    for size in (10, 15, 17, 12, 17):
        before, x = buffer.clone(), torch.ones(size)
        compiled(x)
        assert buffer.equal(before + 1)
    assert any("without a plan" in warning for warning in seen.warnings)


def test_shapes_that_never_come_back_are_not_planned_for_ever(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_TRIES", 0)  # as where no plan holds for a range
    compiled = torch.compile(
        lambda x: (x.sin() * 2).cos().sum(), backend=backend, dynamic=True, options={"max_plans": 8}
    )
    for size in (*range(3, 14), 3):
        x = torch.randn(size)
        assert compiled(x).equal((x.sin() * 2).cos().sum())
    assert len(seen.choices) == 8
    assert seen.planned_runs == 1
    (warning,) = seen.warnings
    assert "others run without a plan" in warning
    assert "max_plans" in warning


def test_twelve_lengths_by_turns_are_planned_once_each(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_TRIES", 0)
    compiled = torch.compile(lambda x: (x.sin() * 2).cos().sum(), backend=backend, dynamic=True)
    for _ in range(2):
        for size in range(3, 15):
            x = torch.randn(size)
            assert compiled(x).equal((x.sin() * 2).cos().sum())
    assert (len(seen.choices), seen.planned_runs) == (12, 12)
    assert not seen.warnings
    assert sum(choice.is_searched for choice in seen.choices) < 12


@pytest.mark.parametrize("max_plans", [0, True, "many"])
def test_a_limit_that_is_none_is_refused(max_plans: object) -> None:
    with pytest.raises(Exception, match="max_plans must be a whole number"):
        torch.compile(torch.sin, backend=backend, options={"max_plans": max_plans})(torch.ones(2))


def views_and_changes(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    y.mul_(2)
    part = y[1:].t()
    x.view(-1)[::2].add_(1)
    total = torch.cat([part, z @ part.relu()])
    total[0] += 3
    z.copy_(z.t().contiguous())
    return total, x.view(-1), y, part, (z, total.sum(0, keepdim=True).expand(3, -1)), 7


def test_views_and_changed_arguments() -> None:
    def arguments() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        shared = torch.randn(64)
        return shared[:24].view(4, 6), shared[32:56].view(6, 4), torch.randn(4, 4)

    results = []
    for how in ("eager", "aot_eager", backend, lambda *given: backend(*given, options=POISONED)):
        torch._dynamo.reset()
        compiled = (
            views_and_changes if how == "eager" else torch.compile(views_and_changes, backend=how)
        )
        given = arguments()
        left: list[Any] = []
        for _ in range(3):
            outputs = compiled(*given)
            assert outputs[1].data_ptr() == given[0].data_ptr()
            assert outputs[2] is given[1]
            assert outputs[3].untyped_storage().data_ptr() == given[1].untyped_storage().data_ptr()
            left += tensors_and_numbers(outputs, given)
        results.append(left)
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize(
    "modes", [(torch.no_grad,), (torch.inference_mode,), (torch.inference_mode, torch.no_grad)]
)
def test_without_gradients(modes: tuple[Any, ...], seen: Seen) -> None:
    torch.manual_seed(0)
    model = Convolutions().train()
    reference = Convolutions().train()
    reference.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend=backend, options=POISONED)
    for mode in modes * 2:
        with mode():
            x = images(8)
            one, other = compiled(x), reference(x)
            assert one.equal(other)
            assert one.is_inference() == other.is_inference()
    assert_same_bits(list(model.state_dict().values()), list(reference.state_dict().values()))
    assert not seen.warnings
    assert len(seen.choices) == len(modes)
    assert seen.planned_runs == len(modes)


def test_saved_activations_die_in_the_backward_pass(seen: Seen) -> None:
    size, layers = 128, 8
    model = torch.nn.Sequential(*(torch.nn.Linear(size, size, bias=False) for _ in range(layers)))
    x = torch.randn(size, size, requires_grad=True)

    def peak(how: Any) -> int:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: model(x.sin()).square().sum(), backend=how)

        def step() -> None:
            model.zero_grad()
            x.grad = None
            compiled(x).backward()

        return measure_peak(step, warmup=2).peak_without_workspace_bytes or 0

    # As many bytes of gradients come as of activations go.
    assert peak(backend) <= peak("aot_eager") < 4 * size * size * (2 * layers - 2)
    forward, backward = seen.choices
    entering = sum(t.size_bytes for t in backward.graph.tensors if t.residency == "enters")
    assert entering >= 4 * size * size * (layers - 1)
    assert backward.plan.program_order_peak_bytes < entering + 4 * size * size * (layers - 1)


def test_threads_share_plans_and_pool(seen: Seen) -> None:
    compiled = torch.compile(
        lambda x: (x.sin() + x).cos().mul(3).exp(), backend=backend, options=POISONED
    )
    x = torch.randn(4096)
    expected = compiled(x)
    wrong: list[int] = []

    def work() -> None:
        for turn in range(50):
            if not compiled(x).equal(expected):
                wrong.append(turn)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert seen.planned_runs == 150


def test_unknown_options_are_refused() -> None:
    with pytest.raises(Exception, match="the backend has no option 'streams'"):
        torch.compile(torch.sin, backend=backend, options={"streams": 2})(torch.ones(2))


@torch.library.custom_op("roam_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_operators_of_others_are_planned(seen: Seen) -> None:
    compiled = torch.compile(lambda x: twice(x.sin()).cos(), backend=backend)
    x = torch.randn(5)
    for _ in range(3):
        assert compiled(x).equal((x.sin() * 2).cos())
    assert seen.planned_runs == 2  # after the checked one
    assert not seen.warnings


# -- what runs without a plan


def test_shapes_that_depend_on_data_run_unplanned(seen: Seen) -> None:
    compiled = torch.compile(lambda x: x[x > 0].exp().sum(), backend=backend)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for seed in range(3):
            x = torch.randn(20, generator=torch.Generator().manual_seed(seed))
            assert compiled(x).equal(x[x > 0].exp().sum())
    assert not seen.choices
    (warning,) = seen.warnings
    assert "runs without a plan" in warning


def test_control_flow_runs_unplanned(seen: Seen) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) * 2

    compiled = torch.compile(function, backend=backend)
    for sign in (1, -1, 1):
        x = torch.ones(4) * sign
        assert compiled(x).equal((x.sin() if sign > 0 else x.cos()) * 2)
    assert not seen.choices
    assert "runs without a plan" in seen.warnings[0]


def test_a_mode_sees_the_ordinary_operators(seen: Seen) -> None:
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: set[str] = set()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.add(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(64, requires_grad=True)
    compiled = torch.compile(lambda x: (x.sin().exp() * 2).sum(), backend=backend)
    compiled(x).backward()
    expected, x.grad = x.grad, None
    loss = compiled(x)
    planned_runs = seen.planned_runs
    with Names() as mode:
        loss.backward()
    assert x.grad is not None
    assert x.grad.equal(expected)
    assert "aten.mul.Tensor" in mode.names
    assert not [name for name in mode.names if "out" in name]
    assert seen.planned_runs == planned_runs


def test_an_error_is_eagers_own_and_leaves_no_trace(seen: Seen) -> None:
    bias, table = torch.zeros(3), torch.randn(4, 3)

    def function(rows: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        bias.add_(1)
        return functional.embedding(rows, table) + torch.rand(3) + bias

    compiled = torch.compile(function, backend=backend)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.raises(IndexError):
        compiled(torch.tensor([1, 9]), bias)
    assert torch.get_rng_state().equal(before)
    assert bias.equal(torch.zeros(3))
    for turn in (1.0, 2.0):
        torch.manual_seed(0)
        found = compiled(torch.tensor([1, 3]), bias)
        torch.manual_seed(0)
        assert found.equal(functional.embedding(torch.tensor([1, 3]), table) + torch.rand(3) + turn)
    assert seen.planned_runs == 1
    assert not seen.warnings


def test_a_kernel_that_is_not_what_was_recorded_runs_unplanned(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-way through its first run a plan is found to be wrong: what it had changed is put
    back."""
    run_one = subject.Executor._run_one

    def failing(executor: Any, index: int, call: Any, values: Any, check: Any) -> None:
        run_one(executor, index, call, values, check)
        if call.name == "aten.copy_.default":
            check.differs(call, "it is not")

    monkeypatch.setattr(subject.Executor, "_run_one", failing)

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(torch.rand(3))
        return x * 2

    results = []
    for compiled in (function, torch.compile(function, backend=backend)):
        torch.manual_seed(0)
        x = torch.zeros(3)
        results.append([compiled(x), compiled(x), x])
    assert_same_bits(results[0], results[1])
    assert seen.choices
    assert not seen.planned_runs
    (warning,) = seen.warnings
    assert "the plan cannot be trusted" in warning


def test_it_can_be_switched_off(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROAM_DISABLE", "1")
    compiled = torch.compile(lambda x: x.sin().cos(), backend=backend)
    assert compiled(torch.ones(3)).equal(torch.ones(3).sin().cos())
    assert not seen.choices


# -- the entry point


def test_the_entry_point_is_the_backend() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    section = text.split(f"[project.entry-points.{GROUP}]\n")[1]
    name, value = re.match(r'(\w+) = "(.+)"\n', section).groups()  # type: ignore[union-attr]
    assert name == "roam"
    assert EntryPoint(name, value, GROUP).load() is backend


@pytest.mark.skipif(
    not entry_points(group=GROUP, name="roam"),
    reason="roam was installed before it had the entry point, or not at all",
)
def test_it_is_found_by_name() -> None:
    assert "roam" in torch._dynamo.list_backends()
    x = torch.randn(8)
    assert torch.compile(lambda x: x.sin() + 1, backend="roam")(x).equal(x.sin() + 1)
