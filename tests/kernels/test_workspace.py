"""What kernels take for themselves while they run is found out before a step is planned, and its
plan contains it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import roam
from roam.kernels import workspace
from roam.kernels.workspace import workspaces
from roam.program.ir import Call, Ref, substitute
from roam.runtime.memory_profiler import measure_peak, observed
from roam.runtime.strategy import choose
from roam.torch_compat.private import chunk_cat
from roam.tracing.step import Variant, capture_step
from training import plain_step

CLOSE = 0.02
"""How far promise and measurement may be apart, as a share: small tensors are rounded up by plan.
"""


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that other tests have learned."""
    monkeypatch.setattr(workspace, "_learned", {})


def images(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """A step of which convolutions take a tenth for themselves."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, stride=2),
        torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3), torch.nn.Flatten(1),
        torch.nn.Linear(64 * 8 * 8, 10),
    )  # fmt: skip
    if dtype is not torch.float32:
        model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.randn(8, 3, 23, 23, dtype=dtype), torch.randint(0, 10, (8,))


def perceptron() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 10))
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.randn(32, 64),
        torch.randint(0, 10, (32,)),
    )


def steady(call: tuple[Any, ...]) -> Variant:
    return capture_step(plain_step, call, {}).steady


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pool", [True, False, None])
def test_the_total_contains_what_kernels_take(pool: bool | None, dtype: torch.dtype) -> None:
    call = images(dtype)
    with observed():  # another profiler that is at work already
        step = roam.compile(plain_step, pool=pool)
        step(*call)
        step(*call)
    step.measured(*call)
    memory = step.memory()
    assert memory.kernel_bytes is not None
    assert memory.workspace_bytes is not None
    assert f"{memory.kernel_bytes:,}" in str(memory)
    assert memory.measured_bytes == pytest.approx(memory.total_bytes, rel=CLOSE)
    # The test would tell nothing if they took nothing.
    assert memory.measured_bytes - memory.workspace_bytes < memory.total_bytes * (1 - 2 * CLOSE)
    step.measured_eagerly(*call)
    step.measured_eagerly(*call)
    assert step.memory().eager_measured_bytes == pytest.approx(
        memory.program_order_bytes, rel=CLOSE
    )


def test_each_kernel_takes_what_another_profiler_sees() -> None:
    variant = steady(images())
    program = variant.program
    found = workspaces(program, variant.placed, variant.device)
    assert found
    convolutions = [
        index
        for index, call in enumerate(program.calls)
        if call.target is torch.ops.aten.convolution.default
    ]
    assert set(convolutions) <= set(found)
    for index in convolutions:
        call = program.calls[index]
        args, kwargs = substitute((call.args, call.kwargs), lambda ref: random(program, ref))
        # Once before: what is made for the first call alone counts for none.
        trace = measure_peak(
            lambda run=call.target, args=args, kwargs=kwargs: run(*args, **kwargs), warmup=1
        )
        assert found[index] == trace.peak_bytes - trace.end_bytes


def random(program: Any, ref: Ref) -> torch.Tensor:
    meta = program.slots[ref.slot]
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype).normal_()


def test_a_plan_is_known_before_anything_runs() -> None:
    call = images()
    before, state = [parameter.clone() for parameter in call[0].parameters()], torch.get_rng_state()
    step = roam.compile(plain_step)
    plan = step.plan(*call)
    assert all(map(torch.equal, before, call[0].parameters()))
    assert torch.equal(torch.get_rng_state(), state)
    step(*call)
    step(*call)
    step.measured(*call)
    assert step.plans[0][1].total_bytes == plan.total_bytes
    assert step.memory().measured_bytes == pytest.approx(step.plan(*call).total_bytes, rel=CLOSE)


@pytest.mark.parametrize("rows", [64, 65])
def test_what_is_cut_unevenly_is_copied_first(rows: int) -> None:
    """As where `fully_shard` reduces the gradient of a parameter of so many rows on two ranks."""

    def cut(whole: torch.Tensor) -> torch.Tensor:
        parts = whole.new_empty(2, 33 * 64)
        chunk_cat([whole + 1], 0, 2, out=parts[:, : (rows + 1) // 2 * 64])
        return parts

    found = []
    for call, size in capture_and_workspaces(cut, torch.randn(rows, 64)):
        if call.name == "aten._chunk_cat.out":
            found.append(size)
    assert found == [0 if rows == 64 else 66 * 64 * 4]


def capture_and_workspaces(step: Any, *args: Any) -> list[tuple[Call, int]]:
    """The calls of a step's program, each with what its kernel takes."""
    variant = capture_step(step, args, {}).steady
    assert variant is not None
    taken = workspaces(variant.program, variant.placed, variant.device)
    assert taken is not None
    return [(call, taken.get(number, 0)) for number, call in enumerate(variant.program.calls)]


def masked() -> tuple[Any, ...]:
    """Attention by softmax over masked rows, in half precision."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.inner(x).chunk(3, -1)
            )
            mask = torch.ones(48, 48, dtype=torch.bool).tril()
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.1)
            return self.out(mixed.transpose(1, 2).flatten(2).mean(1))

    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.randn(4, 48, 64), torch.randint(0, 10, (4,))


def half_step(model: Any, optimizer: Any, inputs: Any, labels: Any) -> Any:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss


def assert_takes_no_more_than_planned(
    step: Any, call: tuple[Any, ...], *, pool: bool | None = None
) -> None:
    compiled = roam.compile(step, pool=pool)
    compiled(*call)
    compiled(*call)
    compiled.measured(*call)
    memory = compiled.memory()
    assert memory.measured_bytes is not None
    assert memory.measured_bytes <= memory.total_bytes


@pytest.mark.parametrize("step", [plain_step, half_step])
@pytest.mark.parametrize("pool", [True, False])
def test_what_kernels_make_in_between_is_in_the_total(pool: bool, step: Any) -> None:
    """Kernels that write where they are told, too: masks of rows, arguments in another order."""
    assert_takes_no_more_than_planned(step, masked(), pool=pool)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls whose kernels are run to find out what they take."""
    names: list[str] = []
    real = workspace._taken

    def counted(program: Any, index: int, *rest: Any) -> int:
        names.append(program.calls[index].name)
        return real(program, index, *rest)

    monkeypatch.setattr(workspace, "_taken", counted)
    return names


def test_what_is_known_is_not_found_out_again(runs: list[str]) -> None:
    first = roam.compile(plain_step)
    first(*images())
    count = len(runs)
    assert count > 0
    # Of the calls of both variants each is run once, however many there are of it.
    calls = sum(call.name in runs for call in steady(images()).program.calls)
    assert len(set(runs)) <= count < 2 * calls
    again = roam.compile(plain_step, sizes=False)  # else the larger batch's plan serves
    again(*images())
    assert len(runs) == count
    assert again.memory() == first.memory()
    model, optimizer, inputs, labels = images()
    again(model, optimizer, inputs[:4], labels[:4])
    assert len(runs) > count


def test_kernels_that_write_where_they_are_told_are_not_run(runs: list[str]) -> None:
    variant = steady(perceptron())
    (choice,) = choose([variant], pool=None, time_limit_s=None)
    assert runs
    written = {
        call.name
        for call, placed in zip(variant.program.calls, variant.placed, strict=True)
        if placed
    }
    assert written
    assert written.isdisjoint(runs)
    assert choice.kernel_bytes == 0
    assert choice.eager_graph is variant.graph


class Masked(torch.nn.Module):
    """Layers whose results are multiplied with a boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.norm = torch.nn.ModuleList(torch.nn.LayerNorm(64) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for linear, norm in zip(self.linear, self.norm, strict=True):
            x = x + linear(norm(x)) * mask
        return x


def test_a_step_with_boolean_masks_keeps_its_budget() -> None:
    torch.manual_seed(0)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x, mask).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = roam.compile(step, memory="60%")
    call = torch.randn(2048, 64), torch.rand(2048, 64) > 0.2
    compiled(*call)
    compiled.measured(*call)
    memory = compiled.memory()
    assert memory.limit_bytes is not None
    assert memory.measured_bytes <= memory.limit_bytes
    assert memory.measured_bytes == pytest.approx(memory.total_bytes, rel=0.01)


X = torch.randn(512, 64)
CASES: dict[str, Any] = {
    "half": lambda y: y * X.bfloat16(),
    "integers": lambda y: y / torch.ones(512, 64, dtype=torch.int64),
    "complex": lambda y: torch.complex(y, y) * X,
    "abs": lambda y: torch.complex(y, X).abs(),
    "where": lambda y: torch.where(X > 0, y, X.double()),
    "sum": lambda y: y.bfloat16().sum(1, dtype=torch.float32),
    "counts": lambda y: y * torch.ones(512, 64, 4, dtype=torch.int64).sum(2, dtype=y.dtype),
    "softmax": lambda y: y.bfloat16().softmax(1, dtype=torch.float32),
    "choices": lambda y: y.masked_fill((X > 0) == 1, 0.0),
    "compared": lambda y: y * (y > X.double()),
    "strided product": lambda y: y[::2, ::2] @ y[::2, ::2].T,
    "strided softmax": lambda y: y[:, ::2].softmax(0),
    "upsampled": lambda y: torch.nn.functional.interpolate(
        torch.nn.functional.conv2d(y.view(2, 16, 32, 32), torch.ones(16, 16, 1, 1)),
        scale_factor=2,
        mode="bilinear",
    ),
    "logsumexp": lambda y: y.logsumexp(0),
    "renorm": lambda y: y.renorm(2, 0, 1.0),
    "scattered": lambda y: torch.zeros(512, 64).scatter_reduce(
        0, torch.zeros(512, 64, dtype=torch.int64), y, "mean"
    ),
    "matrix_exp": lambda y: torch.linalg.matrix_exp(y[:64]),
    "cumprod": lambda y: y.cumprod(1),
}


@pytest.mark.parametrize("pool", [True, pytest.param(False, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", CASES)
def test_what_cleared_kernels_take_is_in_the_total(name: str, pool: bool) -> None:
    """They convert arguments to another dtype, or make something in between."""
    weight = torch.nn.Parameter(torch.eye(64))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = CASES[name](x @ weight).abs().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = roam.compile(step, pool=pool)
    compiled(X)
    compiled.measured(X)
    memory = compiled.memory()
    assert memory.measured_bytes == pytest.approx(memory.total_bytes, rel=0.01)


CHOICES = torch.rand(512, 64) > 0.5
ROWS = torch.rand(512) > 0.3
BAGS = torch.randint(200, (1200,)), torch.arange(0, 1200, 3)
SELECTED, SELECTED_ROWS = X[CHOICES], X[ROWS]
OTHER_VALUES: dict[str, Any] = {
    "conjugate": lambda: torch.bmm(
        torch.complex(X, X).view(8, 64, 64).mH, torch.complex(X, X).view(8, 64, 64)
    ).neg(),
    "mask": lambda: X[CHOICES],
    "mask of rows": lambda: X[ROWS],
    "mask of columns": lambda: X[:, ROWS[:64]],
    "masks of both": lambda: X[:30][CHOICES[0, :30], :][:, None],
    "selection": lambda: X.masked_select(ROWS[:, None]),
    "put": lambda: X.index_put((CHOICES,), SELECTED, accumulate=True),
    "put in place": lambda: X.clone().index_put_((ROWS,), SELECTED_ROWS),
    "added in place": lambda: X.clone().add_(X.bfloat16(), alpha=2),
    "bags": lambda: torch.ops.aten._embedding_bag_backward(
        X[:400], *BAGS, BAGS[0] // 100, torch.full((400,), 3), torch.zeros(400, 64, dtype=torch.int64),
        200, False, 2, False, None,
    ),
    "turned": lambda: X.t().contiguous().neg(),
    "unfolded": lambda: torch.nn.functional.unfold(X.view(1, 8, 64, 64), 3).neg(),
    "attention": lambda: torch.nn.functional.scaled_dot_product_attention(
        *(X.view(1, 2, 256, 64) for _ in range(3))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_what_zeros_would_not_show_is_found(name: str) -> None:
    """Zeros select nothing, are no conjugates, and leave bags empty."""
    trace = measure_peak(OTHER_VALUES[name], warmup=1)
    taken = capture_and_workspaces(lambda x: (OTHER_VALUES[name](), x), X)
    assert trace.peak_workspace_bytes
    assert max(size for _, size in taken) == pytest.approx(trace.peak_workspace_bytes, rel=0.05)


def test_optimizers_that_convert_their_updates_take_what_is_planned() -> None:
    """Muon computes in half precision, and `add_` converts the update first."""
    model = torch.nn.Sequential(*(torch.nn.Linear(96, 96, bias=False) for _ in range(6)))
    optimizer = torch.optim.Muon(model.parameters())
    call = model, optimizer, torch.randn(64, 96), torch.randint(0, 96, (64,))
    assert_takes_no_more_than_planned(plain_step, call)


def test_a_small_step_takes_no_more_than_planned() -> None:
    """The state of the random generator, which is kept for a failed run, is no tensor."""
    model = torch.nn.Linear(1, 1)
    call = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 1), torch.zeros(1, 1)
    assert_takes_no_more_than_planned(plain_step, call)


def test_a_larger_pool_of_the_first_step_is_given_back() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4096), torch.nn.BatchNorm1d(4096), torch.nn.ReLU(), torch.nn.Dropout(0.1),
        torch.nn.Linear(4096, 10),
    )  # fmt: skip
    call = model, torch.optim.AdamW(model.parameters()), torch.randn(16, 4), torch.ones(16).long()
    step = capture_step(plain_step, call, {})
    assert step.first is not None
    assert step.steady is not None
    first, steady = (
        choose([variant], pool=True, time_limit_s=None)[0].plan.pool_bytes
        for variant in (step.first, step.steady)
    )
    assert first > steady
    assert_takes_no_more_than_planned(plain_step, call, pool=True)


def test_a_step_of_fake_tensors_runs_nothing(runs: list[str]) -> None:
    with roam.fake():
        call = images()
    step = roam.compile(plain_step)
    fake = step.plan(*call)
    assert not runs
    assert fake.total_bytes < roam.compile(plain_step).plan(*images()).total_bytes
    assert runs


def refuse(*args: Any) -> None:
    raise RuntimeError


@pytest.mark.parametrize("how", ["no profiler", "no time"])
def test_where_it_cannot_be_found_out_the_plan_does_without(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = steady(images())
    (known,) = choose([variant], pool=False, time_limit_s=None)
    monkeypatch.setattr(workspace, "_learned", {})
    if how == "no profiler":
        monkeypatch.setattr(torch._C._autograd, "_enable_profiler_legacy", refuse)
    step = roam.compile(plain_step, pool=False, time_limit_s=0 if how == "no time" else None)
    call = images()
    losses = [step(*call).item() for _ in range(3)]
    other = images()
    assert losses == [plain_step(*other).item() for _ in range(3)]
    memory = step.memory()
    assert memory.kernel_bytes is None
    assert "one kernel" not in str(memory)
    assert memory.total_bytes < known.total_bytes
    assert memory.program_order_bytes < known.eager_bytes


def test_a_kernel_that_cannot_be_tried_counts_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "zeros", refuse)
    (choice,) = choose([steady(images())], pool=None, time_limit_s=None)
    assert choice.kernel_bytes == 0


def test_products_in_less_precision_take_memory_too() -> None:
    def train_step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.set_float32_matmul_precision("medium")  # float32 is multiplied as bfloat16
    try:
        step = roam.compile(train_step)
        step(model, optimizer, torch.randn(64, 256))
        step.measured(model, optimizer, torch.randn(64, 256))
    finally:
        torch.set_float32_matmul_precision("highest")
    memory = step.memory()
    assert memory.measured_bytes == pytest.approx(memory.total_bytes, rel=CLOSE)


@pytest.mark.parametrize("pool", [True, False])
def test_the_dropout_of_compiled_graphs_takes_what_is_planned(pool: bool) -> None:
    def train_step(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        dropped, _ = torch.native_dropout(x * weight, 0.5, True)
        loss: torch.Tensor = dropped.square().mean()
        loss.backward()
        return loss

    weight = torch.ones(256, requires_grad=True)
    call = weight, torch.randn(64, 256)
    torch.manual_seed(0)
    eager = [train_step(*call).item() for _ in range(2)]
    step = roam.compile(train_step, pool=pool)
    torch.manual_seed(0)
    assert [step(*call).item() for _ in range(2)] == eager  # trying it has drawn nothing
    step.measured(*call)
    assert step.memory().measured_bytes <= step.memory().total_bytes


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: torch.nn.functional.nll_loss(x[0, 0].view(4, 0), torch.zeros(4).long()),
        lambda x: torch.nn.functional.adaptive_avg_pool2d(x, 2).sum(),
    ],
    ids=["nll_loss", "adaptive_avg_pool2d"],
)
def test_no_kernel_is_tried_on_tensors_without_elements(loss: Any) -> None:
    """Those of these derivatives would end the process. The operators before them raise an
    error."""
    x = torch.rand(1, 1, 4, 0, requires_grad=True)
    step = roam.compile(lambda: loss(x).backward())
    with pytest.raises((IndexError, roam.ExecutionError)):
        step()


def test_what_a_registered_kernel_takes_is_learned_in_the_first_run() -> None:
    taken = 1 << 18

    @torch.library.custom_op("tests::scratch_between", mutates_args=())
    def between(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(taken, dtype=torch.uint8)[0]

    between.register_fake(torch.empty_like)
    step = roam.compile(lambda x: between(x * 2) * 3)
    step(torch.ones(8))
    assert step.memory().total_bytes < taken  # nobody could know it
    assert torch.equal(step(torch.ones(8)), torch.full((8,), 9.0))
    step.measured(torch.ones(8))
    memory = step.memory()
    assert memory.kernel_bytes >= taken
    assert memory.measured_bytes <= memory.total_bytes <= 1.01 * memory.measured_bytes
    captures = len(step.plans)
    step(torch.ones(8))
    assert len(step.plans) == captures == 1
