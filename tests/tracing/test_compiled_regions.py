"""Functions and modules inside of a step that `torch.compile` has compiled: recorded as operators,
with the bits of the eager loop over the same compiled code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import roam
from marking import marking
from newer import needs_2_15
from roam.kernels import workspace
from roam.program.ir import refs
from roam.program.operators import is_region
from roam.torch_compat.private import pytree
from roam.tracing.compiled.repeated_blocks import repeated_blocks
from steps import squares_step, step_of

functional = torch.nn.functional
pytestmark = [
    needs_2_15,
    pytest.mark.filterwarnings("ignore"),
]  # PyTorch's compilers warn of what they do themselves


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


class Block(torch.nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 8, chance: float = 0.1) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.inner = torch.nn.Linear(width, 4 * width)
        self.outer = torch.nn.Linear(4 * width, width)
        self.chance = chance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.inner(self.norm(x)))
        return x + functional.dropout(self.outer(hidden), self.chance, self.training)


class Normed(torch.nn.Module):
    """Changes buffers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(x)))


Compiles = Callable[[torch.nn.Module], torch.nn.Module]


def by_method(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
    module.compile(**options)
    return module


def whole_graph(module: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(module, fullgraph=True)  # type: ignore[return-value]


def aot_eager(module: torch.nn.Module) -> torch.nn.Module:
    return by_method(module, backend="aot_eager")


def network(kind: Callable[[], torch.nn.Module], compiles: Compiles) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(compiles(kind()) for _ in range(3)), torch.nn.Linear(8, 4))


def trained(model: torch.nn.Module, step: Any, steps: int = 20) -> list[torch.Tensor]:
    torch.manual_seed(1)
    losses = [step(torch.randn(16, 8), torch.randint(4, (16,))).detach() for _ in range(steps)]
    return [
        *losses,
        *(value.clone() for value in model.state_dict().values()),
        torch.get_rng_state(),
    ]


def assert_same(make: Callable[[], torch.nn.Module], steps: int = 20) -> Any:
    """Trains with the compiled model, eagerly and by plan; the step by plan."""
    eager, planned = make(), make()
    expected = trained(eager, step_of(eager), steps)
    step = roam.compile(step_of(planned))
    for one, other in zip(expected, trained(planned, step, steps), strict=True):
        assert torch.equal(one, other)
    return step


def regions(step: Any) -> list[str]:
    """The names of the regions in the plan of the last call, in order."""
    program = step._last._program
    return [call.name for call in program.calls if is_region(call.target)]


@pytest.mark.parametrize("compiles", [by_method, whole_graph])
def test_blocks_have_the_bits_of_the_eager_loop_over_them(compiles: Compiles) -> None:
    step = assert_same(lambda: network(Block, compiles))
    names = regions(step)
    assert len(names) == 6  # three forward, three backward
    # The first one's input needs no gradient, and the two others are alike.
    assert len(set(names)) == 4
    assert names[1] == names[2]
    assert names[3] == names[4]


def test_buffers_that_a_region_changes() -> None:
    step = assert_same(lambda: network(Normed, by_method))
    assert len(regions(step)) == 6


def test_a_backend_without_kernels_of_its_own_gives_ordinary_operators() -> None:
    step = assert_same(lambda: network(Block, aot_eager), steps=4)
    assert regions(step) == []


def test_a_function() -> None:
    @torch.compile
    def mixed(x: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.tanh(x * scale) + x.sin()

    class Calls(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(mixed(mixed(x, 2.0), 2.0).requires_grad_())

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return Calls()

    step = assert_same(make, steps=4)
    assert len(regions(step)) == 2


def test_what_a_region_reads_is_guarded() -> None:
    def make() -> torch.nn.Module:
        return network(lambda: Block(chance=0.0), by_method)

    eager, planned = make(), make()
    plain, step = step_of(eager), roam.compile(step_of(planned))
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    for model in (eager, planned):
        assert torch.equal(plain(x, y), step(x, y)) if model is planned else True
    for one, other in ((eager[1], planned[1]),):
        one.chance = other.chance = 0.5
    for _ in range(2):
        states = []
        for function in (plain, step):
            torch.manual_seed(3)
            states.append(function(x, y))
        assert torch.equal(*states)
    eager.eval()
    planned.eval()
    assert torch.equal(plain(x, y), step(x, y))


def refused(forward: Callable[..., Any], **options: Any) -> roam.CaptureError:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x)

    model = network(Odd, lambda module: by_method(module, **options))
    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(step_of(model))(torch.randn(16, 8), torch.randint(4, (16,)))
    return caught.value


@pytest.mark.parametrize("part", ["the optimizer's step", "the whole step"])
def test_a_compiled_optimizers_step_and_a_compiled_step_are_refused_with_their_line(
    part: str,
) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_whole = part == "the whole step"
    update = optimizer.step if is_whole else torch.compile(optimizer.step, backend="aot_eager")

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        update()
        return loss

    run: Any = torch.compile(step, backend="aot_eager") if is_whole else step
    with pytest.raises(roam.CaptureError, match="Do not give an optimizer") as caught:
        roam.compile(run)(torch.randn(2, 8))
    assert caught.value.code == "compiled_graph_break"
    assert "test_compiled_regions.py:" in str(caught.value).partition(": the step calls")[0]


def test_what_max_autotune_has_compiled_is_used() -> None:
    graphs = torch._dynamo.utils.counters["stats"]
    eager, planned = (
        network(Block, lambda module: by_method(module, mode="max-autotune")) for _ in range(2)
    )
    expected = trained(eager, step_of(eager), 3)
    compiled = graphs["unique_graphs"]
    step = roam.compile(step_of(planned))
    assert all(map(torch.equal, expected, trained(planned, step, 3)))
    assert graphs["unique_graphs"] == compiled > 0
    assert len(regions(step)) == 6


def test_compiled_functions_inside_of_others_are_part_of_their_regions() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = by_method(Block())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).tanh()

    step = assert_same(lambda: network(Outer, by_method), steps=4)
    assert len(regions(step)) == 6


def test_a_block_that_is_called_several_times() -> None:
    class Repeats(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = by_method(Block())
            self.head = torch.nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.block(self.block(self.block(x)))
            return self.head(x)

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return Repeats()

    step = assert_same(make, steps=4)
    assert len(regions(step)) == 6
    assert step.timings.compile.count <= 2


def test_the_message_says_why_a_backend_has_failed() -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no kernels today")

    error = refused(lambda self, x: self.linear(x), backend=failing)
    assert error.code == "compiled_region"
    assert "raised: RuntimeError: no kernels today; call the plain function" in str(error)


def test_graphs_that_own_their_memory_are_refused() -> None:
    error = refused(lambda self, x: self.linear(x), mode="reduce-overhead")
    assert error.code == "compiled_cudagraphs"


def tower(batch: int, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """What four compiled blocks leave after three steps with a batch, and the step by plan; by
    eager PyTorch without options.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(by_method(Block()) for _ in range(4)), torch.nn.Linear(8, 4))
    step = roam.compile(step_of(model), **options) if options else step_of(model)
    torch.manual_seed(1)
    losses = [step(torch.randn(batch, 8), torch.randint(4, (batch,))).detach() for _ in range(3)]
    return [*losses, *model.state_dict().values(), torch.get_rng_state()], step


def test_regions_with_dropout_run_again_within_a_memory_budget() -> None:
    expected, _ = tower(512)
    torch._dynamo.reset()
    left, step = tower(512, memory="80%")
    for one, other in zip(expected, left, strict=True):
        assert torch.equal(one, other)
    assert step.timings.compile.count == 2  # the first block's input needs no gradient
    memory = step.memory()
    assert memory.extra_runs > 0
    assert memory.total_bytes <= memory.limit_bytes < memory.program_order_bytes


def test_a_bound_on_plans_in_which_regions_hold_their_arguments_is_no_bound_on_others() -> None:
    """A region frees what it is the last to use, but not in plans in which operators run again."""
    _, plain = tower(512, memory="100%")
    takes_bytes = plain.memory().total_bytes
    with pytest.raises(roam.PlanError, match="holds its arguments until its end") as least:
        tower(512, memory=takes_bytes // 4)
    assert least.value.code == "memory_floor"
    assert f"Without recomputation it takes {takes_bytes} bytes" in str(least.value)


class Chain(torch.nn.Module):
    """Its backward graph takes the memory of what was saved for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return x + hidden


def test_regions_run_again_whose_results_the_backward_graph_takes_the_memory_of() -> None:
    left = []
    for options in ({}, {"memory": "70%"}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        blocks = (by_method(Chain()) for _ in range(4))
        model = torch.nn.Sequential(*blocks, torch.nn.Linear(8, 4))
        plain = step_of(model)
        step: Any = roam.compile(plain, **options) if options else plain
        torch.manual_seed(1)
        batches = [(torch.randn(512, 8), torch.randint(4, (512,))) for _ in range(3)]
        left.append([*(step(*batch).detach() for batch in batches), *model.state_dict().values()])
    assert all(map(torch.equal, *left))
    calls = step._last._program.calls
    assert any(is_region(call.target) and call.mutates for call in calls)
    memory = step.memory()
    assert memory.extra_runs > 0
    assert memory.total_bytes <= memory.limit_bytes < memory.program_order_bytes


def test_the_planned_peak_is_the_measured_one() -> None:
    _, step = tower(512, on_change="replan", pool=False)
    step.measured(torch.randn(512, 8), torch.randint(4, (512,)))
    memory = step.memory()
    assert abs(memory.total_bytes - memory.measured_bytes) <= 0.01 * memory.measured_bytes
    step.measured_eagerly(torch.randn(512, 8), torch.randint(4, (512,)))
    memory = step.memory()
    assert memory.measured_bytes <= memory.eager_measured_bytes


def spread(a: torch.Tensor) -> torch.Tensor:
    """Has no use for its argument when it makes its result."""
    row = a[:1] @ a
    return row.sin() * row.t().cos()


@pytest.mark.sweep
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("pool", [None, True])
def test_arguments_that_die_in_a_region_are_freed_inside(
    leaves: bool, pool: bool | None, in_place: bool
) -> None:
    compiled = torch.compile(spread)

    def step_by(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(x: torch.Tensor) -> Any:
            with torch.no_grad():
                # The sine may take the memory of the cosine.
                result = function(x.cos().sin() if in_place else x.cos())
                return result if leaves else result.sum()

        return step

    x = torch.randn(1024, 1024)
    step = roam.compile(step_by(compiled), pool=pool)
    for _ in range(2):
        assert torch.equal(step(x), step_by(compiled)(x))
    step.measured(x)
    memory = step.memory()
    assert memory.measured_bytes <= memory.total_bytes
    if pool is None:
        assert memory.total_bytes <= 1.01 * memory.measured_bytes
        # Its result comes after its argument is gone.
        assert memory.total_bytes < (3.5 if in_place else 2.5) * x.nbytes


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [Block, Normed])
def test_what_nobody_has_compiled_before(kind: Any, tmp_path: Any) -> None:
    torch._dynamo.reset()
    caches = {"fx_graph_cache": False, "autotune_local_cache": False}
    with (
        torch._inductor.config.patch(caches),
        torch._functorch.config.patch(enable_autograd_cache=False),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        planned, eager = network(kind, by_method), network(kind, by_method)
        found = trained(planned, roam.compile(step_of(planned)), 3)
        expected = trained(eager, step_of(eager), 3)
    assert all(map(torch.equal, found, expected))


def test_a_trial_of_what_changes_an_argument_changes_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[bool, int, int]] = []
    plain = workspace._taken

    def taken(program: Any, index: int, *others: Any) -> int:
        def zeros(*args: Any, **kwargs: Any) -> Any:
            made = plain_zeros(*args, **kwargs)
            tensors = [one for one in pytree.tree_leaves(made) if isinstance(one, torch.Tensor)]
            memories = {one.untyped_storage().data_ptr() for one in tensors}
            storages = {program.storage_of(slot) for slot in refs(args[1])} - {-1}
            tried.append((bool(program.calls[index].mutates), len(memories), len(storages)))
            return made

        plain_zeros = workspace.zeros
        with monkeypatch.context() as patch:
            patch.setattr(workspace, "zeros", zeros)
            return plain(program, index, *others)

    monkeypatch.setattr(workspace, "_taken", taken)
    roam.compile(step_of(network(Normed, by_method)))(torch.randn(12, 8), torch.randint(4, (12,)))
    assert any(mutates and storages > 1 for mutates, _, storages in tried)
    assert all(memories == storages for mutates, memories, storages in tried if mutates)


def test_sizes_that_change() -> None:
    def losses(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch._dynamo.reset()
        step = wrap(step_of(network(Block, by_method)))
        torch.manual_seed(1)
        return [
            step(torch.randn(size, 8), torch.randint(4, (size,))).detach()
            for size in (16, 16, 24, 16, 32, 24)
        ]

    for one, other in zip(losses(lambda step: step), losses(roam.compile), strict=True):
        assert torch.equal(one, other)


class Many(torch.nn.Module):
    """Has more parameters than an operator may have arguments, and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.nn.ParameterList(torch.randn(8) for _ in range(70))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x * sum(self.scales) - self.mean


def test_a_region_with_more_inputs_than_an_operator_has_arguments() -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(by_method(Many()), torch.nn.Linear(8, 4))

    step = assert_same(make, steps=4)
    assert len(regions(step)) == 2


class OverRows(torch.nn.Module):
    """Adds in another order when the number of rows is a variable of its kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return functional.layer_norm(x.t(), (x.shape[0],)).t() * x


@pytest.mark.parametrize("by_eval", [False, True])
def test_code_that_was_compiled_for_all_sizes_since(by_eval: bool) -> None:
    def losses(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = by_method(OverRows())
        step = wrap(squares_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        found = [step(torch.randn(37, 8)).detach()]
        other = torch.randn(50, 8)
        found.append((model(other).sum() if by_eval else step(other)).detach())
        return [*found, *(step(torch.randn(37, 8)).detach() for _ in range(2))]

    for one, other in zip(losses(lambda step: step), losses(roam.compile), strict=True):
        assert torch.equal(one, other)


@pytest.mark.long
def test_sizes_that_vary_in_the_code_of_an_earlier_block() -> None:
    class Other(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sin()

    def compiled(wrap: Callable[[Any], Any]) -> list[int]:
        """How many sizes of each graph that is compiled are variables."""
        torch._dynamo.reset()
        counts: list[int] = []

        def note(graph: Any, inputs: list[Any]) -> Any:
            counts.append(sum(not isinstance(value, torch.Tensor) for value in inputs))
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=note)

        def compiles(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
            return by_method(module, backend=backend, **options)

        model = torch.nn.Sequential(
            compiles(Block(), dynamic=True), compiles(Other()), compiles(Other()), torch.nn.Linear(8, 4)
        )  # fmt: skip
        trained(model, wrap(step_of(model)), 2)
        return counts

    expected = compiled(lambda step: step)
    assert sum(count > 0 for count in expected) == len(expected) == 4
    assert sorted(compiled(roam.compile)) == sorted(expected)


def test_what_only_compiled_code_reads_is_guarded() -> None:
    class Scales(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 4)
            self.scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return x * self.scale if torch.compiler.is_compiling() else x

    def losses(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = aot_eager(Scales())
        step = wrap(step_of(model))
        found = trained(model, step, 2)
        model.scale = 0.5  # type: ignore[assignment]
        return [*found, *trained(model, step, 2)]

    for one, other in zip(losses(lambda step: step), losses(roam.compile), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [list, dict])
def test_what_the_step_has_changed_before_a_region_is_refused(kind: Any) -> None:
    kept: Any = kind()

    class Notes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kind is list:
                kept.append(x.mean())
            else:
                kept[len(kept)] = x.mean()
            return x * len(kept)

    model = torch.nn.Sequential(aot_eager(Notes()), aot_eager(Notes()), torch.nn.Linear(8, 4))
    plain = step_of(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        kept.clear()
        return plain(x, y)

    with pytest.raises(roam.CaptureError, match="has changed kept") as caught:
        trained(model, roam.compile(step), 2)
    assert caught.value.code == "compiled_call"


class Scale:
    of_class = 1.0
    __slots__ = ("held",)


def _helped(x: torch.Tensor, by: Any = [1.0]) -> torch.Tensor:  # noqa: B006 - changed below
    return x * by[0] * Scale.of_class * slotted.held * deep.inner.scale * chosen["act"](x)


slotted, deep = Scale(), SimpleNamespace(inner=SimpleNamespace(scale=1.0))
slotted.held = 1.0
chosen: dict[str, Any] = {"act": lambda x: x.sin()}


@pytest.mark.parametrize(
    ("holder", "name", "value", "shown"),
    [
        (Scale, "of_class", 2.0, "Scale.of_class"),
        (slotted, "held", 2.0, "slotted.held"),
        (deep.inner, "scale", 2.0, "deep.inner.scale"),
        (chosen, "act", lambda x: x.cos(), "chosen['act'].__code__"),
        (_helped.__defaults__[0], 0, 2.0, "_helped.__defaults__[0][0]"),  # type: ignore[index]
    ],
)
def test_what_the_step_has_changed_for_a_function_that_a_region_calls_is_refused(
    holder: Any, name: Any, value: Any, shown: str
) -> None:
    is_item = isinstance(holder, (dict, list))
    put = holder.__setitem__ if is_item else functools.partial(setattr, holder)
    before = holder[name] if is_item else getattr(holder, name)

    class Helped(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _helped(x)

    blocks = [aot_eager(Helped()), aot_eager(Helped())]

    def step(x: torch.Tensor) -> Any:
        put(name, before)
        x = blocks[0](x)
        put(name, value)
        x = blocks[1](x).sum()
        put(name, before)
        return x

    with pytest.raises(roam.CaptureError) as caught:
        roam.compile(step)(torch.randn(4, 8))
    assert caught.value.code == "compiled_call"
    assert f"the step has changed {shown}, but torch.compile compiles" in str(caught.value)
    assert (holder[name] if is_item else getattr(holder, name)) is before


def test_a_switch_that_the_step_has_changed_before_a_region_is_refused() -> None:
    compiled = torch.compile(functional.scaled_dot_product_attention, backend="aot_eager")

    def step(x: torch.Tensor) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return compiled(x, x, x)

    with pytest.raises(roam.CaptureError, match="choice of attention kernels") as caught:
        roam.compile(step)(torch.randn(1, 2, 4, 8))
    assert caught.value.code == "compiled_call"


def test_a_tensor_that_the_step_has_marked_is_refused() -> None:
    compiled = torch.compile(lambda x: x.sin() * x.shape[0], backend="aot_eager")

    def step(x: torch.Tensor) -> Any:
        x = x.cos()
        torch._dynamo.mark_dynamic(x, 0)
        return compiled(x)

    with pytest.raises(roam.CaptureError, match="sizes the step has marked") as caught:
        roam.compile(step)(torch.randn(4, 8))
    assert caught.value.code == "compiled_call"


@pytest.mark.parametrize("kind", ["a base and a view", "views", "a view of a buffer"])
def test_arguments_that_share_memory(kind: str) -> None:
    def changes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sin() + y.add_(1)

    def left(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiled = torch.compile(changes, backend="aot_eager")
        buffer = torch.randn(8)

        @wrap
        def step(x: torch.Tensor) -> Any:
            x = x.clone()
            if kind == "a view of a buffer":
                return compiled(buffer, buffer[1:7].view(6)[:1])
            return compiled(
                *((x, x.view(8)[:2]) if kind == "a base and a view" else (x[:3], x[1:4]))
            )

        return [*(step(torch.randn(4, 2)) for _ in range(3)), buffer]

    assert all(map(torch.equal, left(lambda step: step), left(roam.compile)))


def test_code_that_torch_compile_has_been_told_to_forget_is_made_anew() -> None:
    def losses(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = by_method(Block(), backend=marking)
        step, found = wrap(step_of(model)), []
        for number, size in enumerate((6, 9, 9, 6)):
            found.append(step(torch.randn(size, 8), torch.randint(8, (size,))).detach())
            if number == 1:
                torch._dynamo.reset()
        return found

    assert all(map(torch.equal, losses(lambda step: step), losses(roam.compile)))


class Rotated(torch.nn.Module):
    """Rotates pairs of numbers, as positions of Llama are encoded; gives conjugates back too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = torch.view_as_complex(self.inner(x).unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * turns).flatten(-2)
        return turned, (pairs.detach() - turns).conj(), turns.conj()


def test_conjugates_that_regions_keep_for_the_backward_pass_or_give_back() -> None:
    found = []
    for wrap in (lambda step: step, roam.compile):
        torch.manual_seed(0)
        block = Rotated()
        rotate = torch.compile(block)
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)

        def step(
            x: torch.Tensor, turns: torch.Tensor, rotate: Any = rotate, by: Any = optimizer
        ) -> Any:
            by.zero_grad()
            turned, apart, back = rotate(x, turns)
            loss = turned.cos().mean()
            loss.backward()
            by.step()
            return loss.detach(), (apart * back).resolve_conj()

        run = wrap(step)
        turns = torch.polar(torch.ones(3, 4), torch.arange(12.0).view(3, 4))
        found.append([run(torch.randn(3, 8), turns) for _ in range(3)])
        found[-1].append(tuple(block.parameters()))
    for eager, planned in zip(*found, strict=True):
        assert all(map(torch.equal, eager, planned))


def test_more_kinds_of_calls_than_torch_compiles_are_refused() -> None:
    class Numbered(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.number

    def step() -> Any:
        blocks = [
            torch.compile(Numbered(number), backend="aot_eager", dynamic=False)
            for number in range(3)
        ]
        model = torch.nn.Sequential(*blocks, torch.nn.Linear(8, 4))
        return trained(model, roam.compile(step_of(model)), 1)

    settings = torch._dynamo.config.get_config_copy()
    limit = torch._dynamo.config.patch(recompile_limit=2)
    with limit, pytest.raises(roam.CaptureError) as caught:
        step()
    assert torch._dynamo.config.get_config_copy() == settings
    assert caught.value.code == "compiled_too_often"
    assert "recompile_limit" in str(caught.value)
    step()


class Kept:
    """What a block has made, for a later one, as a cache of keys and values has it."""

    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []
        self.sizes = {"calls": 0}


@pytest.mark.parametrize("compiles", [by_method, aot_eager])
def test_an_object_that_the_step_makes_and_gives_to_blocks(compiles: Compiles) -> None:
    class Keeping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, kept: Kept) -> torch.Tensor:
            kept.layers.append(torch.cat([torch.tensor([]), self.linear(x)], dim=-1))
            kept.sizes["calls"] += 1
            return torch.stack(kept.layers).sum(0).tanh() / kept.sizes["calls"]

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(compiles(Keeping()) for _ in range(2))
            self.head = torch.nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = Kept()
            for block in self.blocks:
                x = block(x, kept)
            return self.head(x) + torch.stack(kept.layers).mean() * kept.sizes["calls"]

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return Network()

    step = assert_same(make, steps=3)
    assert len(regions(step)) == (4 if compiles is by_method else 0)


def test_an_object_from_before_the_step_is_refused_for_a_block() -> None:
    kept = Kept()

    class Keeping(torch.nn.Module):
        def forward(self, x: torch.Tensor, kept: Kept) -> torch.Tensor:
            return x * len(kept.layers)

    block, head = aot_eager(Keeping()), torch.nn.Linear(8, 4)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = block, head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(self.block(x, kept))
            return result

    with pytest.raises(roam.CaptureError, match="it is given a Kept") as caught:
        trained(Network(), roam.compile(step_of(Network())), 1)
    assert caught.value.code == "compiled_call"


def test_autocast_and_checkpoints_around_regions() -> None:
    def step_with(model: torch.nn.Module) -> Callable[..., Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                for layer in model:  # type: ignore[attr-defined]
                    x = checkpoint(layer, x, use_reentrant=False)
                loss = functional.cross_entropy(x, y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    eager, planned = network(Block, by_method), network(Block, by_method)
    expected = trained(eager, step_with(eager), 3)
    for one, other in zip(
        expected, trained(planned, roam.compile(step_with(planned)), 3), strict=True
    ):
        assert torch.equal(one, other)


class Checkpointed(Block):
    """Computes itself again in the backward pass, with the same dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


def test_checkpoints_inside_of_regions() -> None:
    step = assert_same(lambda: network(Checkpointed, by_method), steps=4)
    assert len(regions(step)) == 6


class Filter(torch.nn.Module):
    """A convolution with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(channels, 2 * channels, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm1d(2 * channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.convolution(x)))


def test_what_the_eager_loop_has_compiled_is_used() -> None:
    # Compiled again, all would be of variable sizes: the second and third differ from the first.
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        filters = (by_method(Filter(channels)) for channels in (1, 2, 4))
        head = torch.nn.Linear(64, 4)
        return torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, 8)), *filters, torch.nn.Flatten(), head
        )

    graphs = torch._dynamo.utils.counters["stats"]
    eager = make()
    expected = trained(eager, step_of(eager), 4)
    compiled = graphs["unique_graphs"]
    planned = make()
    for one, other in zip(
        expected, trained(planned, roam.compile(step_of(planned)), 4), strict=True
    ):
        assert torch.equal(one, other)
    assert graphs["unique_graphs"] == compiled > 0


def test_roam_compiles_repeated_blocks() -> None:
    def make(compiles: Compiles) -> torch.nn.Module:
        return network(lambda: Block(chance=0.0), compiles)

    eager, planned, again = (
        make(lambda module: module),
        make(lambda module: module),
        make(by_method),
    )
    step = roam.compile(step_of(planned), kernels="inductor")
    expected, found = trained(eager, step_of(eager), 4), trained(planned, step, 4)
    assert len(regions(step)) == 6
    assert step.timings.compile.count == 2  # the first block's input needs no gradient
    for one, other in zip(expected[:4], found[:4], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, trained(again, step_of(again), 4), found))


def test_which_blocks_are_repeated() -> None:
    hooked, compiled, outer = Block(), by_method(Block()), torch.nn.Sequential(Block(), Block())
    hooked.register_forward_hook(lambda *_: None)
    plain = [Block(), Block()]
    model = torch.nn.Sequential(
        *plain, hooked, compiled, Normed(), torch.nn.ReLU(), torch.nn.ReLU(),
        torch.nn.ModuleList([torch.nn.ModuleList([outer]), torch.nn.ModuleList([outer])]),
    )  # fmt: skip
    assert repeated_blocks([model]) == [*plain, *outer]
    inside = torch.nn.Sequential(Block(), Block())
    by_method(inside)
    assert repeated_blocks([inside]) == []


def test_a_step_without_repeated_blocks_is_refused() -> None:
    model = torch.nn.Sequential(Block(), torch.nn.Linear(8, 4))
    with pytest.raises(roam.CaptureError) as caught:
        trained(model, roam.compile(step_of(model), kernels="inductor"), 1)
    assert caught.value.code == "no_repeated_blocks"
    with pytest.raises(ValueError, match="kernels"):
        roam.compile(step_of(model), kernels="triton")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["eager", "roam"])
def test_compiled_code_may_call_a_step(backend: str) -> None:
    """It runs by its own plan."""

    def script(wrap: Callable[[Any], Any], compiles: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @wrap
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        around = compiles(lambda x: step(x + 1) * 2)
        found = [around(torch.randn(2, 4)).detach() for _ in range(3)]
        if wrap is roam.compile:
            assert len(step.plans) == 1
        return [*found, *model.parameters()]

    planned = script(roam.compile, lambda around: torch.compile(around, backend=backend))
    assert all(map(torch.equal, planned, script(lambda step: step, lambda around: around)))


def test_later_compilations_know_the_functions_that_a_trace_replaces() -> None:
    from torch._dynamo import trace_rules

    doubled = torch.compile(lambda x: x * 2, backend="eager")
    step = roam.compile(lambda x: doubled(x).sum(), python="idle")
    trace_rules.clear_lru_cache()  # as init_process_group does
    step(torch.ones(3))
    whole = torch.compile(lambda x: x * torch.tensor([0.5]), backend="eager", fullgraph=True)
    assert whole(torch.ones(2)).tolist() == [0.5, 0.5]
