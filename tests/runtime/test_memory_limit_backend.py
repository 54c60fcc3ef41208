"""``torch.compile(..., backend="roam", options={"memory": ...})``: forward and backward of a graph
keep within one limit, with the bits of aot_eager."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_backend import rows, train

from roam.memory_limit import MemoryLimit
from roam.runtime import backend as subject
from roam.runtime.backend import backend
from roam.runtime.memory_profiler import measure_peak
from roam.runtime.partition import Partition
from roam.runtime.strategy import Choice
from roam.tracing.frontends.joint import Joint
from training import assert_same_bits


@pytest.fixture(autouse=True)
def _apart() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """What the backend plans, forward before backward."""
    made: list[Choice] = []
    choose = subject.choose

    def spied(*args: Any, **kwargs: Any) -> list[Choice]:
        found = choose(*args, **kwargs)
        made.extend(found)
        return found

    monkeypatch.setattr(subject, "choose", spied)
    return made


class Deep(torch.nn.Module):
    """Mostly activations: dropout, and batch norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [
            layer
            for _ in range(6)
            for layer in (
                torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(),
                torch.nn.Dropout(0.2), torch.nn.GELU(),
            )
        ]  # fmt: skip
        self.layers = torch.nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


TRAININGS: dict[str, tuple[Any, Any, int]] = {
    "deep": (Deep, rows, 512),
}


@functools.cache
def expected(name: str) -> list[Any]:
    make, batch, size = TRAININGS[name]
    return train(make, batch, [size] * 3, "aot_eager")


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("name", "memory"),
    [("deep", "100%"), ("deep", "70%")],
)
def test_training_within_a_limit_has_the_bits_of_aot_eager(
    name: str, memory: str, choices: list[Choice]
) -> None:
    make, batch, size = TRAININGS[name]
    found = train(make, batch, [size] * 3, backend, options={"memory": memory})
    assert_same_bits(found, expected(name))
    forward, backward = choices
    assert forward.memory_limit_bytes is not None
    assert backward.memory_limit_bytes is not None
    assert forward.total_bytes <= forward.memory_limit_bytes
    # What the backward pass is not given is there all the same.
    assert backward.total_bytes <= backward.memory_limit_bytes <= forward.memory_limit_bytes


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("memory", ["100%", "70%"])
def test_forward_and_backward_keep_within_the_limit_as_measured(
    memory: str, choices: list[Choice]
) -> None:
    model, x = Deep().train(), rows(512)
    held = [*model.parameters(), *model.buffers(), x]
    held_bytes = sum(tensor.untyped_storage().nbytes() for tensor in held)
    compiled = torch.compile(model, backend=backend, options={"memory": memory})
    compiled(x).backward()  # what Dynamo does at a first call is none of the step's

    def step() -> None:
        model.zero_grad()
        compiled(x).backward()

    model.zero_grad()
    limit_bytes = choices[0].memory_limit_bytes
    assert limit_bytes is not None
    for _ in range(2):
        assert held_bytes + measure_peak(step).peak_bytes <= limit_bytes


def test_what_the_backward_pass_is_given_is_what_the_plan_left_it() -> None:
    """A lower limit leaves it less, and what is random is always left."""
    left: list[int] = []
    masks: list[int] = []

    class Watched(Partition):
        def __call__(self, module: Any, inputs: Any, **settings: Any) -> Any:
            forward, backward = super().__call__(module, inputs, **settings)
            given = backward.graph.find_nodes(op="placeholder")
            names = {node.name for node in given}
            made = [node for node in forward.graph.nodes if node.op == "call_function"]
            kept = [node.meta["val"] for node in made if node.name in names]
            left.append(sum(value.nbytes for value in kept))
            masks.append(sum(value.dtype is torch.bool for value in kept))
            targets = {node.target for node in backward.graph.nodes}
            assert torch.ops.aten.native_dropout.default not in targets
            return forward, backward

    for memory in ("100%", "70%"):
        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subject, "Partition", Watched)
            compiled = torch.compile(Deep().train(), backend=backend, options={"memory": memory})
            compiled(rows(512)).backward()
    assert left[1] < 0.8 * left[0]
    assert masks == [6, 6]


def test_evaluation_has_the_limit_too(choices: list[Choice]) -> None:
    model = Deep().eval()
    compiled = torch.compile(model, backend=backend, options={"memory": "1GiB"})
    with torch.no_grad():
        x = rows(64)
        assert compiled(x).equal(model(x))
    (choice,) = choices
    assert choice.memory_limit_bytes == 2**30


def test_copies_of_changed_arguments_in_the_first_run_count(choices: list[Choice]) -> None:
    def update(weight: torch.Tensor, gradient: torch.Tensor) -> None:
        weight.sub_(gradient, alpha=0.1)

    def first_run(memory: int) -> int:
        torch._dynamo.reset()
        weight, gradient = torch.ones(2**18), torch.ones(2**18)
        compiled = torch.compile(update, backend=backend, options={"memory": memory})
        with torch.no_grad():
            peak_bytes: int = measure_peak(lambda: compiled(weight, gradient)).peak_bytes
        assert weight.eq(0.9).all()
        return peak_bytes

    taken_bytes = first_run(2**30)
    (choice,) = choices
    assert choice.checks_bytes >= 2**20
    assert 2**20 <= taken_bytes <= choice.total_bytes - 2**21 + choice.checks_bytes + 2**16
    with pytest.raises(Exception, match="checks of a plan's first run take"):
        first_run(choice.total_bytes + 2**20 - 1)
    first_run(choice.total_bytes + choice.checks_bytes)


@pytest.mark.parametrize("memory", ["12 GiBs", 0, True, "0%", "", 1.5])
def test_nonsense_is_refused(memory: Any) -> None:
    with pytest.raises(Exception, match="memory must be"):
        torch.compile(torch.sin, backend=backend, options={"memory": memory})(torch.ones(2))


@pytest.mark.parametrize("memory", [1, "20%"])
def test_a_limit_that_cannot_be_kept_is_refused_before_anything_runs(memory: Any) -> None:
    model = Deep().train()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    compiled = torch.compile(model, backend=backend, options={"memory": memory})
    with pytest.raises(Exception, match="no plan takes as little as"):
        compiled(rows(512))
    assert_same_bits(before, list(model.state_dict().values()))


def test_a_refusal_names_the_bytes_that_are_not_the_plans() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    compiled = torch.compile(model, backend=backend, options={"memory": 2**16})
    with pytest.raises(Exception, match="forward and backward within 65536") as caught:
        compiled(torch.randn(512, 64))
    checks = re.search(r"take (\d+) of them", str(caught.value))
    left = re.search(r"no plan takes as little as (\d+) bytes", str(caught.value))
    assert checks is not None
    assert left is not None
    assert int(checks[1]) + int(left[1]) == 2**16


def test_a_share_counts_what_kernels_take_for_themselves(choices: list[Choice]) -> None:
    """For a batch of one the kernels of convolutions take more than activations do."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(channels, 16, 3, padding=1) for channels in (3, 16, 16)]
    model = torch.nn.Sequential(*layers)
    compiled = torch.compile(model, backend=backend, options={"memory": "100%"})
    compiled(torch.randn(1, 3, 32, 32)).sum().backward()
    assert len(choices) == 2


def test_shapes_that_are_no_numbers_are_refused() -> None:
    compiled = torch.compile(
        Deep().train(), backend=backend, dynamic=True, options={"memory": "90%"}
    )
    with pytest.raises(Exception, match="dynamic=False"):
        compiled(rows(64))


def test_a_call_that_has_no_plan_is_refused() -> None:
    """Without a limit it would run as it is."""
    graph = subject.PlannedGraph(
        torch.fx.symbolic_trace(torch.nn.Identity()),
        "identity",
        phase="forward",
        dying=(),
        options=subject.Options(pool=False, memory=MemoryLimit(size_bytes=2**20)),
    )
    for around in (contextlib.nullcontext(), torch.autocast("cpu")):
        with around, pytest.raises(subject.CaptureError) as caught:
            graph.run([object()])
        assert caught.value.code == "memory_unplanned"


def test_an_argument_that_changes_after_the_forward_pass_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backward pass that runs operators again would read it."""
    from roam.tracing.frontends import joint

    monkeypatch.setattr(joint, "is_input_mutation", lambda _: True)
    x = torch.ones(3)
    module = torch.fx.experimental.proxy_tensor.make_fx(torch.sin, tracing_mode="fake")(x)
    module.graph.output_node().meta["desc"] = (object(),)
    with pytest.raises(subject.CaptureError) as caught:
        Joint(module, 1)
    assert caught.value.code == "memory_changed_argument"
