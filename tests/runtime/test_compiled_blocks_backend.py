"""``torch.compile(..., backend="roam", options={"kernels": "inductor"})``: repeated blocks of the
graphs are compiled by Inductor, and planned as compiled regions."""

from __future__ import annotations

import copy
import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import roam
from newer import needs_2_15
from roam.program.operators import is_region
from roam.runtime import backend as subject
from roam.runtime.backend import backend
from roam.runtime.memory_profiler import measure_peak
from roam.runtime.strategy import Choice
from roam.tracing.frontends import compiled_blocks

functional = torch.nn.functional
pytestmark = [
    needs_2_15,
    pytest.mark.filterwarnings("ignore"),  # PyTorch's compilers warn of themselves
]


@pytest.fixture(autouse=True)
def _apart() -> Iterator[None]:
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """What the backend plans."""
    made: list[Choice] = []
    choose: Any = vars(subject)["choose"]

    def spied(*args: Any, **kwargs: Any) -> list[Choice]:
        found: list[Choice] = choose(*args, **kwargs)
        made.extend(found)
        return found

    monkeypatch.setattr(subject, "choose", spied)
    return made


class Block(torch.nn.Module):
    """A residual block, which changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.inner = torch.nn.Linear(8, 32)
        self.outer = torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.outer(functional.gelu(self.inner(self.norm(x))))
        return x + inner


class Dropped(torch.nn.Module):
    """Draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = self.dropout(2 * x)
        return dropped


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(4)), torch.nn.Linear(8, 4))


def trained(model: torch.nn.Module, run: Any, sizes: tuple[int, ...] = (16,) * 4) -> list[Any]:
    """Losses, parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for size in sizes:
        optimizer.zero_grad()
        x, y = torch.randn(size, 8), torch.randint(4, (size,))
        loss = functional.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def compiled(model: torch.nn.Module, **options: Any) -> Any:
    return torch.compile(
        model,
        backend=backend,
        options={"kernels": "inductor", **options},
    )


def regions(choice: Choice) -> list[str]:
    return [call.name for call in choice.program.calls if is_region(call.target)]


def test_repeated_blocks_run_compiled_kernels_and_equal_ones_share_them(
    choices: list[Choice],
) -> None:
    model = network()
    other = copy.deepcopy(model)
    expected = trained(model, model)
    torch.testing.assert_close(trained(other, compiled(other)), expected, rtol=1e-4, atol=1e-5)
    forward, backward = map(regions, choices)
    assert len(forward) == len(backward) == 4
    assert len(set(forward)) == 1
    # Nobody asks for the gradient of what the first block is given.
    assert len(set(backward)) == 2


def test_the_backward_pass_has_the_mask_of_the_forward_pass(choices: list[Choice]) -> None:
    model = torch.nn.Sequential(Dropped(), Dropped())
    x = torch.randn(64, 8, requires_grad=True)
    result = compiled(model)(x)
    result.sum().backward()
    assert x.grad is not None
    assert set(x.grad.unique().tolist()) == {0.0, 16.0}
    torch.testing.assert_close(result.detach(), x.detach() * x.grad)
    assert all(map(regions, choices))


def test_forward_and_backward_keep_within_a_limit_as_measured(choices: list[Choice]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(6)))
    x = torch.randn(2048, 8)
    held = [*model.parameters(), *model.buffers(), x]
    held_bytes = sum(tensor.untyped_storage().nbytes() for tensor in held)
    other = copy.deepcopy(model)
    other(x).square().mean().backward()
    within = compiled(model, memory="85%")
    within(x).square().mean().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5)

    def step() -> None:
        model.zero_grad()
        within(x).square().mean().backward()

    limit_bytes = choices[0].memory_limit_bytes
    assert limit_bytes is not None
    assert all(map(regions, choices))
    assert all(one.total_bytes <= (one.memory_limit_bytes or 0) for one in choices)
    for _ in range(2):
        model.zero_grad()
        assert held_bytes + measure_peak(step).peak_bytes <= limit_bytes


def test_sizes_that_change_are_compiled_for(choices: list[Choice]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Dropped(), Dropped()).eval()
    run = torch.compile(
        model,
        backend=backend,
        dynamic=True,
        options={"kernels": "inductor"},
    )
    for size in (3, 5):
        x = torch.randn(size, 8)
        assert torch.equal(run(x), 4 * x)
    assert len(choices) == 2


def test_a_graph_without_repeated_blocks_runs_eager_kernels_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    other = copy.deepcopy(model)
    x = torch.randn(4, 8)
    expected = torch.compile(other, backend="aot_eager")(x)
    with caplog.at_level(logging.WARNING, logger="roam"):
        assert torch.equal(compiled(model)(x), expected)
    assert "has no repeated blocks, and runs eager kernels" in caplog.text


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no compiler\nis there")

    monkeypatch.setattr(compiled_blocks, "compiled_graph", failing)
    monkeypatch.setattr(compiled_blocks, "_compiled", {})
    with pytest.raises(roam.CaptureError, match=r"\.0.*RuntimeError: no compiler;") as error:
        compiled(network())(torch.randn(4, 8))
    assert error.value.code == "compiled_region"
    with pytest.raises(Exception, match="kernels must be 'eager' or 'inductor', not 'triton'"):
        torch.compile(network(), backend=backend, options={"kernels": "triton"})(torch.randn(4, 8))


@pytest.mark.parametrize("seed", range(20))
def test_nodes_of_a_block_follow_each_other_where_that_is_an_order_of_the_graph(seed: int) -> None:
    draw = random.Random(seed)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(30):
        nodes.append(graph.call_function(max, tuple(draw.choices(nodes, k=2))))
    block_of: dict[Any, Any] = {node: draw.choice("abc") for node in draw.sample(nodes[1:], 20)}
    pieces = list(compiled_blocks._sorted(nodes[1:], block_of))
    order = [node for piece in pieces for node in piece]
    assert sorted(map(nodes.index, order)) == list(range(1, 31))
    place = {node: number for number, node in enumerate([nodes[0], *order])}
    assert all(place[given] < place[node] for node in order for given in node.all_input_nodes)
    for piece, later in itertools.pairwise(pieces):
        block = block_of.get(piece[0])
        assert {block_of.get(node) for node in piece} == {block}
        assert block is None or block_of.get(later[0]) != block
