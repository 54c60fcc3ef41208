"""Compiled functions whose graph breaks: each part that Dynamo compiles is recorded as a region of
its own, with the bits of the eager loop over the same parts, or the step is refused by line."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import graph_break
from torch.utils.checkpoint import checkpoint

import roam
from marking import marking
from newer import needs_2_15
from roam.program.operators import is_region
from roam.torch_compat.private import is_precompiled
from steps import step_of

functional = torch.nn.functional
pytestmark = [
    needs_2_15,
    pytest.mark.filterwarnings("ignore"),  # PyTorch's compilers warn of themselves
]
log = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def _apart() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.drop = torch.nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(8))


class OneBreak(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x).tanh())
        graph_break()
        return self.drop(self.second(x).relu())


class Several(Base):
    """Computes with a list that lives across all breaks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = []
        for layer in (self.first, self.second):
            x = layer(x).tanh()
            made.append(x)
        graph_break()
        made.append(self.drop(x))
        graph_break()
        made.append(functional.dropout(x.cos(), 0.3, self.training))
        return sum(made) / len(made)  # type: ignore[return-value]


class Inside(Base):
    """Breaks in a method, which the compiled function cannot resume in."""

    def inner(self, x: torch.Tensor, *more: float, scale: float = 1.0) -> torch.Tensor:
        x = self.first(x).tanh() * scale
        graph_break()
        return x.sin() * sum(more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.second(self.inner(x, 1.0, 2.0, scale=0.5).cos()))


def helper(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Dynamo gives it up, and compiles `layer_of` by itself."""
    for number in range(3):
        x = layer_of(module, x, number)
        graph_break()
    return x


def layer_of(module: Any, x: torch.Tensor, number: int) -> torch.Tensor:
    result: torch.Tensor = module.drop(module.first(x).sin()) / (1 + number)
    return result


class InLoop(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(helper(self, x.cos()).tanh())
        return result


class Modes(Base):
    """Breaks in `no_grad` and in autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            kept = self.first(x).sin()
            graph_break()
            kept = self.second(kept).cos()
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x).sin()
            graph_break()
            x = self.second(x)
        return x.float().cos() * kept


class Says(Base):
    """Breaks as it prints and logs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        print("a shape", x.shape)
        x = self.drop(self.second(x))
        log.warning("a warning")
        return x.sin()


@torch._dynamo.disable
def off(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cos() * 2


class Disabled(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(off(self.first(x).tanh()))
        return result


left_alone = torch._dynamo.disable(
    lambda module, x: layer_of(module, x, 1) + x.sin(), recursive=False
)


class Left(Base):
    """Calls a function that Dynamo leaves alone, and compiles what that calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return left_alone(self, x.sin()).tanh()  # type: ignore[no-any-return]


class Tries(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = layer_of(self, x, 1)
            graph_break()
            x = layer_of(self, x, 2)
        finally:
            x = x + 1
        return self.second(x).sin()


class Checkpointed(Base):
    """Computes its inner part again in the backward pass, where nothing is compiled."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x).tanh())
        graph_break()
        return self.second(x).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result.cos()


class Twice(Base):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        graph_break()
        return self.second(x).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x))


class Buffers(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        self.mean.add_(x.detach().mean(0))
        graph_break()
        self.mean.mul_(0.5)
        return self.second(x + self.mean).sin()


class Decides(Base):
    """Branches on a value, which breaks the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        x = x * 2 if x.sum() > 0 else x * 3
        return self.second(x).sin()


class Hooked(Base):
    """Has a hook, which Dynamo compiles by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda _, __, result: result.sin() * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        graph_break()
        return self.second(x).sin()


KINDS = [
    OneBreak, Several, Inside, InLoop, Modes, Says, Disabled, Left, Tries, Checkpointed,
    Twice, Buffers, Decides, Hooked,
]  # fmt: skip


def network(kind: Callable[[], torch.nn.Module], **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    block = kind()
    block.compile(**{"backend": marking, **options})
    return torch.nn.Sequential(torch.nn.Linear(8, 8), block, torch.nn.Linear(8, 4))


def trained(model: torch.nn.Module, step: Any, sizes: list[int]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    losses = [step(torch.randn(size, 8), torch.randint(4, (size,))).detach() for size in sizes]
    return [*losses, *map(torch.clone, model.state_dict().values()), torch.get_rng_state()]


def assert_same(kind: Any, sizes: list[int], **options: Any) -> Any:
    """Trains by plan and eagerly, and again with what the eager loop has compiled."""
    model = network(kind, **options)
    found = trained(model, roam.compile(step_of(model)), sizes)
    torch._dynamo.reset()
    model = network(kind, **options)
    expected = trained(model, step_of(model), sizes)
    assert all(map(torch.equal, expected, found))
    model = network(kind, **options)
    expected = trained(model, step_of(model), sizes)
    graphs = torch._dynamo.utils.counters["stats"]
    compiled = graphs["unique_graphs"]
    model = network(kind, **options)
    step = roam.compile(step_of(model))
    assert all(map(torch.equal, expected, trained(model, step, sizes)))
    assert graphs["unique_graphs"] == compiled > 0
    return step


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_the_bits_of_the_eager_loop_over_them(kind: Any) -> None:
    assert_same(kind, [16] * 20)


def test_each_part_is_a_region() -> None:
    step = assert_same(OneBreak, [16] * 3, backend="inductor")
    names = [call.name for call in step._last._program.calls if is_region(call.target)]
    assert len(names) == 4  # two forward, two backward
    assert step.memory().total_bytes > 0


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [OneBreak, InLoop])
def test_parts_that_are_compiled_for_all_sizes(kind: Any) -> None:
    assert_same(kind, [16, 16, 24, 16, 32])


def test_that_a_function_is_compiled_in_other_parts_shows() -> None:
    losses = []
    for backend in (marking, "eager"):
        model = network(OneBreak, backend=backend)
        losses.append(trained(model, step_of(model), [16])[0])
    assert not torch.equal(*losses)


class Closes(Base):
    """A function that it makes changes a variable before and after the break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, count = self.first(x), 0

        def mixed(y: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return y * key + count

        x = mixed(x)
        graph_break()
        result: torch.Tensor = self.second(mixed(x)) / count
        return result


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        y = x.sin()
        graph_break()
        return y.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = gradient * x.cos() * 2
        return result


class Custom(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(Sine.apply(self.first(x)).tanh())  # type: ignore[no-untyped-call]
        return result


class Counts(Base):
    """Changes an attribute between its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        graph_break()
        self.count += 1
        return self.second(x).sin() * self.count


kept: list[int] = []


@torch._dynamo.disable
def note() -> None:
    kept.append(1)


class Appends(Base):
    """Changes a list from before the step between its parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        graph_break()
        note()
        return self.second(x).sin()


class Draws(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        graph_break()
        return self.second(x).sin() * random.random()


class Reads(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.second(x).sin() * x.sum().item()


class Lists(Base):
    """An iterator lives across the break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = iter([x, x.sin()])
        x = self.first(next(parts))
        graph_break()
        result: torch.Tensor = self.second(x) + next(parts)
        return result


class Backward(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.second(x.detach()).sum().backward()
        return x


class Settings:
    scale = 2.0


class Holds(Base):
    """An object from before the step lives across the break."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        settings = self.settings
        x = self.first(x)
        graph_break()
        result: torch.Tensor = self.second(x) * settings.scale
        return result


class CountsWhole(Base):
    """Changes an attribute in a graph without breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.second(x).sin() * self.count


def fails(kind: Any, **options: Any) -> roam.CaptureError:
    model = network(kind, **options)
    with pytest.raises(roam.CaptureError) as caught:
        trained(model, roam.compile(step_of(model)), [16] * 3)
    assert "test_graph_breaks.py:" in str(caught.value)
    return caught.value


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        (Counts, "compiled_call", "uses a Python number that the step changes"),
        (CountsWhole, "compiled_call", "uses a Python number that the step changes"),
        (Closes, "compiled_graph_break", "a function that holds tensors of the step"),
        (Custom, "compiled_graph_break", "is given a SineBackward"),
        (Reads, "compiled_graph_break", "is given a number that the step computes"),
        (Lists, "compiled_graph_break", "what follows the break in forward at"),
        (Backward, "compiled_graph_break", "breaks at a backward pass"),
        (Holds, "compiled_graph_break", "is given a Settings"),
    ],
)
def test_what_no_part_can_be_given_is_refused(kind: Any, code: str, said: str) -> None:
    error = fails(kind)
    assert error.code == code
    assert said in str(error)


@pytest.mark.parametrize("kind", [Appends, Draws])
def test_what_happens_between_the_parts_is_watched_as_in_the_step(kind: Any) -> None:
    model = network(kind)
    with pytest.raises(roam.CaptureError) as caught:
        trained(model, roam.compile(step_of(model)), [16])
    assert caught.value.code == "moved"
    kept.clear()


def test_a_break_where_the_user_wants_none_is_refused_with_its_line() -> None:
    error = fails(OneBreak, fullgraph=True)
    assert error.code == "compiled_graph_break"
    line = str(error).partition("its graph breaks at ")[2]
    assert "test_graph_breaks.py:" in line
    assert "graph_break" in line


def test_a_part_that_the_eager_loop_runs_without_compiling_is_refused() -> None:
    class Numbered(Base):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            graph_break()
            return x * self.number

    def make() -> Any:
        blocks = [Numbered(number) for number in range(3)]
        for block in blocks:
            block.compile(backend=marking)
        return torch.nn.Sequential(*blocks, torch.nn.Linear(8, 4))

    with torch._dynamo.config.patch(recompile_limit=2):
        model = make()
        trained(model, step_of(model), [16])
        with pytest.raises(roam.CaptureError) as caught:
            trained(model, roam.compile(step_of(model)), [16])
    assert caught.value.code == "compiled_too_often"


def test_a_failed_capture_leaves_nothing_in_the_place_of_functions() -> None:
    fails(Reads)
    assert not is_precompiled(Reads.forward.__code__)
    torch._dynamo.reset()
    losses = []
    for _ in range(2):
        torch._dynamo.reset()
        model = network(Reads)
        losses.append(trained(model, step_of(model), [16] * 2))
    assert all(map(torch.equal, *losses))


def test_a_function_that_one_step_calls_with_several_numbers() -> None:
    """Compiled for the second number, it fits the first one too, from the next step on."""

    def losses(wrap: Callable[[Any], Any]) -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        @torch.compile(backend=marking)
        def divided(x: torch.Tensor, number: int) -> torch.Tensor:
            result: torch.Tensor = layer(x).sin() / (1 + number)
            return result

        @wrap
        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            for number in (1, 2, 3):
                x = divided(x, number)
            loss = x.square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return [step(torch.randn(16, 8, requires_grad=True)).item() for _ in range(4)]

    assert losses(lambda step: step) == losses(roam.compile)


def test_an_object_that_the_step_changes_between_two_calls_is_refused() -> None:
    settings = Settings()

    class Scaled(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) * settings.scale  # type: ignore[no-any-return]

    first, second = network(Scaled), network(Scaled)

    def step(x: torch.Tensor) -> Any:
        settings.scale = 1.0
        x = first(x)
        settings.scale = 2.0
        return second(torch.cat([x, x], 1)).sum()

    settings.scale = 2.0
    with pytest.raises(roam.CaptureError, match=r"settings.scale") as caught:
        roam.compile(step)(torch.randn(16, 8))
    assert caught.value.code == "compiled_call"
