"""Budgets of steps whose Python runs beside their plans: they hold at every call, also at those
that have no plan yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_python_beside import are_same, ran, same_bits

import roam
from roam.runtime.beside.lazy import Lazy
from roam.runtime.beside.placeholders import is_possible
from roam.runtime.memory_profiler import measure_peak
from roam.runtime.pool import Pool

pytestmark = pytest.mark.skipif(not is_possible(), reason="it needs PyTorch 2.15")

Step = Callable[[torch.Tensor, torch.Tensor], Any]
CALLS = 5


class Block(torch.nn.Module):
    """A part of a transformer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.project = torch.nn.Linear(width, 3 * width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.drop = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(seen.transpose(1, 2).flatten(2))
        return x + self.drop(self.down(F.gelu(self.up(self.between(x)))))


class State:
    """A small GPT with AdamW."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(64, 32), *(Block(32, dropout) for _ in range(2)),
            torch.nn.LayerNorm(32), torch.nn.Linear(32, 64, bias=False),
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.log: list[Any] = []

    def loss(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        return F.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten())

    def update(self, loss: torch.Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def persistent_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [one for state in self.optimizer.state.values() for one in state.values()]
        storages = {one.untyped_storage()._cdata: one for one in (*parameters, *gradients, *states)}
        return sum(one.untyped_storage().nbytes() for one in storages.values())


def at_the_end(s: State) -> Step:
    def step(ids: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = s.loss(ids, labels)
        s.update(loss)
        s.log.append(loss.item())
        return loss.detach()

    return step


def in_the_middle(s: State) -> Step:
    def step(ids: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = s.loss(ids, labels)
        if torch.isfinite(loss):
            s.update(loss)
        s.log.append(loss.item())
        return loss.detach()

    return step


def after_each_micro_batch(s: State) -> Step:
    def step(ids: torch.Tensor, labels: torch.Tensor) -> Any:
        s.optimizer.zero_grad()
        total = 0.0
        for part, goal in zip(ids.split(4), labels.split(4), strict=True):
            loss = F.cross_entropy(s.model(part).flatten(0, 1), goal.flatten()) / 2
            loss.backward()
            total += loss.item()
        s.optimizer.step()
        s.log.append(total)
        return total

    return step


def in_a_hook(s: State) -> Step:
    def step(ids: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = s.loss(ids, labels)
        handle = s.model[1].up.weight.register_hook(lambda g: s.log.append(g.norm().item()))  # type: ignore[union-attr]
        s.update(loss)
        handle.remove()
        return loss.detach()

    return step


def never_alike(s: State) -> Step:
    def step(ids: torch.Tensor, labels: torch.Tensor) -> Any:
        s.log.append(1)
        loss = s.loss(ids, labels)
        for _ in range(len(s.log)):
            loss = loss * 1.5
        s.update(loss)
        return loss.detach()

    return step


def leaving(make: Callable[[State], Step], at: int) -> Callable[[State], Step]:
    """The step, which does something else in one call."""

    def made(s: State) -> Step:
        step, calls = make(s), [0]

        def called(ids: torch.Tensor, labels: torch.Tensor) -> Any:
            calls[0] += 1
            if calls[0] == at:
                with torch.no_grad():
                    s.model[1].up.weight.mul_(0.5)  # type: ignore[union-attr]
            result = step(ids, labels)
            return result * 2 if calls[0] == at else result

        return called

    return made


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randint(64, (8, 32), generator=generator),
            torch.randint(64, (8, 32), generator=generator),
        )
        for _ in range(CALLS)
    ]


def run(state: State, step: Step, calls: int = CALLS) -> tuple[list[Any], list[int]]:
    """What a step returns, and the most memory that was allocated at each call."""
    pool = Pool.of(torch.device("cpu"))
    results, peaks = [], []
    for ids, labels in batches()[:calls]:
        before_bytes = state.persistent_bytes() + pool.nbytes + ids.nbytes + labels.nbytes
        trace = measure_peak(lambda ids=ids, labels=labels: step(ids, labels))  # type: ignore[misc]
        results.append(trace.value)
        peaks.append(before_bytes + trace.peak_bytes)
    return results, peaks


def same(one: State, other: State) -> bool:
    return (
        one.log == other.log
        and all(map(same_bits, one.model.parameters(), other.model.parameters()))
        and all(
            same_bits(mine, others)
            for (mine, others) in zip(
                (p.grad for p in one.model.parameters()),
                (p.grad for p in other.model.parameters()),
                strict=True,
            )
            if mine is not None
        )
    )


STEPS: dict[str, tuple[Callable[[State], Step], float, float]] = {
    "at_the_end": (at_the_end, 0.1, 0.6),
    "in_the_middle": (in_the_middle, 0.0, 0.6),
    "in_the_middle_with_dropout": (in_the_middle, 0.1, 0.7),
    "after_each_micro_batch": (after_each_micro_batch, 0.1, 0.75),
    "in_a_hook": (in_a_hook, 0.0, 0.7),
    "never_alike": (never_alike, 0.0, 0.7),
    "leaving": (leaving(at_the_end, 4), 0.1, 0.6),
    "leaving_with_a_value_in_the_middle": (leaving(in_the_middle, 4), 0.1, 0.7),
}
"""Steps, with their dropout, and a budget as a share of what eager PyTorch takes."""


@pytest.mark.parametrize("name", STEPS)
def test_a_budget_holds_at_every_call(name: str) -> None:
    make, dropout, share = STEPS[name]
    eager = State(dropout)
    expected, eager_bytes = run(eager, make(eager))
    after = torch.get_rng_state()
    limit_bytes = int(max(eager_bytes) * share)
    planned = State(dropout)
    compiled = roam.compile(make(planned), python="beside", memory=limit_bytes)
    found, peaks = run(planned, compiled)
    assert same(eager, planned)
    assert same_bits(after, torch.get_rng_state())
    for one, other in zip(expected, found, strict=True):
        assert one == other if isinstance(one, float) else same_bits(one, other)
    assert max(peaks) <= limit_bytes


def test_a_call_that_leaves_a_pool_with_all_activations_keeps_within_its_budget() -> None:
    """They are not copied: within a budget Python holds nothing that lies in a pool."""
    pool, outcomes = Pool.of(torch.device("cpu")), []
    limit_bytes = 0
    for compiled in (False, True):
        torch.manual_seed(0)
        weights = [torch.randn(32, 32, requires_grad=True) for _ in range(6)]
        count, found, peaks = [0], [], []

        def step(x: torch.Tensor) -> float:
            count[0] += 1  # noqa: B023
            for weight in weights:  # noqa: B023
                weight.grad = None
                x = F.dropout(torch.tanh(x @ weight), 0.1) * 1.5
            loss = x.square().mean()
            value = loss.item()
            if count[0] != 5:  # noqa: B023
                loss.backward()
            return value

        run = step
        if compiled:
            run = roam.compile(step, python="beside", memory=limit_bytes, pool=True)
        for _ in range(6):
            x = torch.randn(512, 32)
            gradients = sum(one.nbytes for one in weights if one.grad is not None)
            held_bytes = sum(one.nbytes for one in weights) + gradients + x.nbytes + pool.nbytes
            trace = measure_peak(lambda x=x, run=run: run(x))  # type: ignore[misc]
            found.append(trace.value)
            peaks.append(held_bytes + trace.peak_bytes)
        outcomes.append([torch.tensor(found), *(weight.grad for weight in weights)])
        limit_bytes = limit_bytes or int(max(peaks) * 1.05)
    assert all(map(same_bits, *outcomes))
    assert max(peaks) <= limit_bytes


def test_what_is_made_again_has_what_small_parameters_were() -> None:
    """Kernels of a few numbers run where they stand, also those that update parameters."""
    states = []
    for memory in (None, "90%"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(
            x: torch.Tensor, y: torch.Tensor, net: Any = net, optimizer: Any = optimizer
        ) -> Any:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            if all(torch.isfinite(one.grad).all() for one in net.parameters()):
                optimizer.step()
            return loss.detach()

        call: Any = step if memory is None else roam.compile(step, python="beside", memory=memory)
        found = [call(torch.randn(64, 8), torch.randint(0, 4, (64,))).clone() for _ in range(3)]
        states.append([*found, *net.state_dict().values()])
    for one, other in zip(*states, strict=True):
        assert same_bits(one, other)


AGAIN = (
    "printing", "branches", "numpy_and_lists", "checkpoints", "constrained_weights", "equal_values_of_which_numpy_changes_one",
)  # fmt: skip


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has segments keep as little as they can, as if the limit had no room for more; how often."""
    plain, times = Lazy._planned, []

    def least(self: Any, index: Any, kept: Any, freed: Any, *, is_end: bool, is_last: bool) -> Any:
        if not is_last:
            times.append(1)
            raise roam.PlanError("no room", code="memory_limit_not_found")
        return plain(self, index, kept, freed, is_end=is_end, is_last=is_last)

    monkeypatch.setattr(Lazy, "_planned", least)
    return times


@pytest.mark.parametrize("name", AGAIN)
def test_what_no_segment_keeps_is_made_again_with_the_same_bits(
    name: str, tight: list[int]
) -> None:
    expected, _ = ran(name)
    found, _ = ran(name, python="beside", memory="1GiB")
    assert are_same(expected, found)
    assert tight


@pytest.mark.parametrize(
    "loss", [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy]
)
def test_a_kernel_that_takes_more_than_it_fills_waits_with_as_much(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    left = []
    for compiled in (False, True):
        torch.manual_seed(0)
        fixed = torch.nn.Linear(8, 8).requires_grad_(False)
        norm, last = torch.nn.LayerNorm(8).requires_grad_(False), torch.nn.Linear(8, 8)
        norm.bias.requires_grad_(True)  # the gradient of it alone, where the network begins
        log: list[float] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            found = loss(last(norm(fixed(x))).sigmoid(), y)  # noqa: B023
            log.append(found.item())  # noqa: B023
            found.backward()
            with torch.no_grad():
                for parameter in (norm.bias, last.weight):  # noqa: B023
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            return found.detach()

        run = roam.compile(step, python="beside", memory="1MiB") if compiled else step
        for size in (16, 16, 32, 16):
            run(torch.rand(size, 8), torch.rand(size, 8))
        left.append((log, norm.bias.detach(), last.weight.detach()))
    assert left[0][0] == left[1][0]
    assert all(map(same_bits, left[0][1:], left[1][1:]))


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("changes", ["dtype", "kernels"])
def test_what_is_computed_by_other_kernels_is_kept(changes: str) -> None:
    def set_to(is_on: bool) -> None:
        if changes == "dtype":
            torch.set_default_dtype(torch.float64 if is_on else torch.float32)
        else:
            torch.set_flush_denormal(is_on)

    def step(x: torch.Tensor) -> Any:
        one = (x > 0).long() / 3 if changes == "dtype" else x * 1e-39 * 0.5
        try:
            set_to(True)
            other = (x > 0).long() / 3 if changes == "dtype" else x * 1e-39 * 0.5
        finally:
            set_to(False)
        assert x.sum().item() > 0
        return one, other, one * 2, other * 2

    x = torch.rand(8, 8)
    expected = step(x)
    compiled = roam.compile(step, python="beside", memory="1GiB")
    for _ in range(3):
        found = compiled(x)
        assert [one.dtype for one in expected] == [one.dtype for one in found]
        assert all(map(same_bits, expected, found))


def test_the_plan_of_the_first_call_is_that_of_later_ones_where_they_are_alike() -> None:
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(3)]
    log: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        log.append(1)
        for weight in weights:
            weight.grad = None
            x = torch.tanh(x @ weight)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    optimizer = torch.optim.SGD(weights, lr=0.1)
    compiled = roam.compile(step, python="beside", memory="100%")
    for number in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        compiled(torch.ones(32, 16))
        assert len(compiled.plans) == 1
        assert compiled.memory().total_bytes <= compiled.memory().limit_bytes


def test_a_share_is_one_of_all_that_the_call_has_done() -> None:
    eager = State(0.1)
    expected, _ = run(eager, in_the_middle(eager), 2)
    planned = State(0.1)
    compiled = roam.compile(in_the_middle(planned), python="beside", memory="60%")
    found, _ = run(planned, compiled, 2)
    assert same(eager, planned)
    assert all(map(same_bits, expected, found))


def test_what_fits_in_no_way_is_refused_before_anything_is_computed() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    before = model.weight.detach().clone()

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    compiled = roam.compile(step, python="beside", memory=1000)
    with pytest.raises(roam.PlanError) as caught:
        compiled(torch.ones(4, 8))
    assert caught.value.code == "memory_floor"
    assert same_bits(before, model.weight)
    with pytest.raises(roam.ExecutionError) as torn:  # the optimizer's state was to be computed
        compiled(torch.ones(4, 8))
    assert torn.value.code == "torn"


def test_an_error_of_the_steps_own_comes_after_what_it_has_issued() -> None:
    weight = torch.ones(64, 64)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight.mul_(2).add_(x)
        raise KeyError("its own")

    compiled = roam.compile(step, python="beside", memory="200%")
    with pytest.raises(KeyError):
        compiled(torch.ones(64, 64))
    assert same_bits(weight, torch.full((64, 64), 3.0))


def test_a_kernel_that_fails_at_the_first_call_says_so_and_what_has_changed() -> None:
    table = torch.nn.Embedding(4, 64)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = table(ids + 0).square().sum()  # of indices that the plan computes
        loss.backward()
        optimizer.step()
        return loss

    compiled = roam.compile(step, python="beside", memory="200%")
    before = table.weight.detach().clone()
    with pytest.raises(roam.ExecutionError) as caught:
        compiled(torch.tensor([1, 9, 2]))
    assert caught.value.code == "failed"
    assert "embedding" in caught.value.operator
    assert same_bits(before, table.weight)
    with pytest.raises(IndexError):  # indices that are there fail where they are used
        roam.compile(lambda ids: table(ids), python="beside", memory="200%")(torch.tensor([9]))
