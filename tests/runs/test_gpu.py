"""Training steps on a CUDA device: eager PyTorch's bits, and the memory that the plan says."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import roam
from newer import needs_2_15
from roam.program import chunks
from roam.program.pages import is_paged
from roam.runtime.memory_profiler import measure_peak
from training import assert_same_bits, tensors_and_numbers

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device; run `make gpu-test` where there is one",
)
functional = torch.nn.functional
MIB = 1 << 20
CALLS = 5


class Block(torch.nn.Module):
    """A transformer's block with dropout and PyTorch's attention."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.drop = torch.nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.project(self.norms[0](x)).chunk(3, -1)
        )
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norms[1](x)))))


class Language(torch.nn.Module):
    """A small language model; it returns its loss."""

    def __init__(self, width: int = 256, depth: int = 3, drop: float = 0.1) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(512, width)
        self.blocks = torch.nn.ModuleList(Block(width, drop) for _ in range(depth))
        self.norm = torch.nn.LayerNorm(width)
        self.checkpointed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = functional.linear(self.norm(x), self.embed.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Images(torch.nn.Module):
    """A small convolutional network; it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3, padding=1, bias=False), torch.nn.BatchNorm2d(32), torch.nn.ReLU(inplace=True),
            torch.nn.MaxPool2d(2), torch.nn.Conv2d(32, 64, 3, padding=1, bias=False), torch.nn.BatchNorm2d(64),
            torch.nn.SiLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(len(images), device=images.device) % 10
        return functional.cross_entropy(self.layers(images), labels)


class Recurrent(torch.nn.Module):
    """cuDNN's recurrent kernels; it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(32, 64, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(x)
        return out.square().mean()


def tokens(size: int = 8, length: int = 129) -> torch.Tensor:
    return torch.randint(512, (size, length), device=DEVICE)


def images(size: int = 8) -> torch.Tensor:
    return torch.randn(size, 3, 32, 32, device=DEVICE)


def sequences() -> torch.Tensor:
    return torch.randn(8, 16, 32, device=DEVICE)


def plain(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = model(x)
    loss.backward()
    optimizer.step()
    return loss


def clipped(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = model(x)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss, norm


def autocast(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(x)
    loss.backward()
    optimizer.step()
    return loss


def moved(model: Any, optimizer: Any, x: Any) -> Any:
    """The batch comes from the CPU, and the loss goes there."""
    x = x.to(DEVICE, non_blocking=True)
    optimizer.zero_grad()
    loss = model(x)
    loss.backward()
    optimizer.step()
    return loss.item()


def adamw(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return functools.partial(torch.optim.AdamW, lr=1e-3, **options)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


CASES: dict[str, tuple[Any, ...]] = {
    "language": (Language, adamw(), plain, tokens),
    "foreach=False": (Language, adamw(foreach=False), plain, tokens),
    "fused": (Language, adamw(fused=True), plain, tokens),
    "capturable": (Language, adamw(capturable=True), plain, tokens),
    "clipped": (Language, adamw(), clipped, tokens),
    "autocast": (Language, adamw(), autocast, tokens),
    "bfloat16": (lambda: Language().bfloat16(), adamw(), plain, tokens),
    "moved": (Language, adamw(), moved, lambda: tokens().cpu()),
    "moved from pinned memory": (Language, adamw(), moved, lambda: tokens().cpu().pin_memory()),
    "images": (Images, sgd, plain, images),
    "images, channels last": (
        lambda: Images().to(memory_format=torch.channels_last), sgd, plain,
        lambda: images().to(memory_format=torch.channels_last),
    ),
    "images, autocast": (Images, sgd, autocast, images),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "pool": {"pool": True},
    "poison": {"pool": True, "poison": True},
    "no pool": {"pool": False},
}


def outcome(
    wrap: Callable[[Any], Any],
    make: Any,
    optimizer_of: Any,
    step: Any,
    batch: Any,
    calls: int = CALLS,
) -> tuple[list[Any], Any]:
    """What some steps return and leave behind, and the step."""
    torch.manual_seed(0)
    model = make().to(DEVICE)
    optimizer = optimizer_of(model.parameters())
    run = wrap(step)
    returned = [run(model, optimizer, batch()) for _ in range(calls)]
    state = [returned, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]
    return tensors_and_numbers(*state, torch.cuda.get_rng_state()), run


def eager(*case: Any, calls: int = CALLS) -> list[Any]:
    """What eager PyTorch gives. Skips the test if it does not give its own bits again, as kernels
    that add up in any order do not.
    """
    once, again = (outcome(lambda step: step, *case, calls=calls)[0] for _ in range(2))
    try:
        assert_same_bits(once, again)
    except AssertionError:
        pytest.skip("eager PyTorch does not give its own bits again")
    return once


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    """Kernels of cuDNN that give the same bits again."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_bits_of_eager(case: str, options: str) -> None:
    expected = eager(*CASES[case])
    found, _ = outcome(functools.partial(roam.compile, **OPTIONS[options]), *CASES[case])
    assert_same_bits(found, expected)


def test_counters_of_a_case_counted_by_hand() -> None:
    def work() -> None:
        one = torch.empty(3 * MIB, dtype=torch.uint8, device=DEVICE)
        two = torch.empty(5 * MIB, dtype=torch.uint8, device=DEVICE)
        del one
        three = torch.empty(2 * MIB, dtype=torch.uint8, device=DEVICE)
        del two, three

    gc.collect()
    kept = torch.empty(7 * MIB, dtype=torch.uint8, device=DEVICE)
    before = torch.cuda.memory_allocated()
    trace = measure_peak(work, device=DEVICE)
    assert (trace.peak_bytes, trace.end_bytes, trace.start_bytes) == (8 * MIB, 0, before)
    assert trace.events == 6
    del kept


@pytest.mark.parametrize("options", ["pool", "no pool"])
@pytest.mark.parametrize("case", ["language", "fused", "images", "autocast", "bfloat16"])
def test_a_step_takes_what_its_plan_says(case: str, options: str) -> None:
    make, optimizer_of, step, batch = CASES[case]
    torch.manual_seed(0)
    model = make().to(DEVICE)
    optimizer = optimizer_of(model.parameters())
    run = roam.compile(step, **OPTIONS[options])
    x = batch()
    for _ in range(3):
        run(model, optimizer, x)
    run.measured(model, optimizer, x)
    # Of blocks of a MiB and more, the allocator does not split off a rest of up to a MiB.
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    run(model, optimizer, x)
    after = torch.cuda.memory_stats()
    allocated, requested = (
        after[f"{name}_bytes.all.peak"] - before[f"{name}_bytes.all.current"]
        for name in ("allocated", "requested")
    )
    memory = run.memory()
    assert memory.measured_bytes is not None
    used = memory.measured_bytes - (allocated - requested)
    print(case, options, memory.total_bytes, memory.measured_bytes, used)
    assert used == pytest.approx(memory.total_bytes, rel=0.02, abs=2 * MIB)


def test_two_streams() -> None:
    expected = eager(*CASES["language"])
    found, _ = outcome(functools.partial(roam.compile, streams=2), *CASES["language"])
    assert_same_bits(found, expected)


GRAPHS: dict[str, tuple[Any, ...]] = {
    "fused": CASES["fused"],
    "capturable": CASES["capturable"],
    "without dropout": (functools.partial(Language, drop=0.0), adamw(fused=True), plain, tokens),
    "bfloat16": (lambda: Language().bfloat16(), adamw(fused=True), plain, tokens),
    "autocast": (Language, adamw(fused=True), autocast, tokens),
    "clipped": (Language, adamw(fused=True), clipped, tokens),
    "images": CASES["images"],
}


@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("case", GRAPHS)
def test_a_cuda_graph(case: str, pool: bool) -> None:
    expected = eager(*GRAPHS[case], calls=8)
    wrap = functools.partial(roam.compile, cuda_graph=True, pool=pool)
    found, step = outcome(wrap, *GRAPHS[case], calls=8)
    assert_same_bits(found, expected)
    assert step._last._executor._graph._recorded is not None


def test_a_cuda_graph_with_a_rate_that_changes() -> None:
    def script(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        model = Language().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        step = wrap(plain)
        returned = []
        for place in range(9):
            if place % 3 == 2:
                optimizer.param_groups[0]["lr"] *= 0.5
            returned.append(step(model, optimizer, tokens(8, 65 + place // 8)))
        return tensors_and_numbers(returned, model.state_dict(), optimizer.state_dict())

    found = script(functools.partial(roam.compile, cuda_graph=True))
    assert_same_bits(found, script(lambda step: step))


@pytest.mark.parametrize("share", ["85%", "70%"])
@pytest.mark.parametrize("case", ["language", "bfloat16"])
def test_within_a_memory_limit(case: str, share: str) -> None:
    make, optimizer_of, step, _ = CASES[case]
    batch = functools.partial(tokens, 32, 257)
    expected = eager(make, optimizer_of, step, batch)
    limited = functools.partial(roam.compile, memory=share)
    found, run = outcome(limited, make, optimizer_of, step, batch)
    assert_same_bits(found, expected)
    print(case, share, run.memory())


def test_within_what_the_device_has_free() -> None:
    expected = eager(*CASES["language"])
    found, _ = outcome(functools.partial(roam.compile, memory="auto"), *CASES["language"])
    assert_same_bits(found, expected)


def test_checkpoints_of_the_user() -> None:
    def make() -> Any:
        model = Language()
        model.checkpointed = True
        return model

    rest = CASES["language"][1:]
    expected = eager(make, *rest)
    found, _ = outcome(roam.compile, make, *rest)
    assert_same_bits(found, expected)


def test_a_gradient_scaler() -> None:
    def script(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        model = Language().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**20, growth_interval=2)

        @wrap
        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.float16):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss

        returned = [step(tokens()) for _ in range(8)]
        return tensors_and_numbers(
            returned, model.state_dict(), optimizer.state_dict(), scaler.state_dict()
        )

    assert_same_bits(script(roam.compile), script(lambda step: step))


def test_a_rate_that_changes() -> None:
    def script(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        model = Language().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

        @wrap
        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss

        returned = [step(tokens()) for _ in range(6)]
        return tensors_and_numbers(returned, model.state_dict(), optimizer.state_dict())

    assert_same_bits(script(roam.compile), script(lambda step: step))


@needs_2_15
@pytest.mark.filterwarnings("ignore")  # of PyTorch about its own code
def test_compiled_kernels() -> None:
    def blocks(step: Any) -> Any:
        def run(model: Any, optimizer: Any, x: Any) -> Any:
            if not hasattr(model, "is_compiled"):
                for block in model.blocks:
                    block.compile()
                model.is_compiled = True
            return step(model, optimizer, x)

        return run

    no_drop = functools.partial(Language, drop=0.0)
    rest = CASES["language"][1:]
    expected, _ = outcome(blocks, no_drop, *rest)
    torch._dynamo.reset()
    found, _ = outcome(functools.partial(roam.compile, kernels="inductor"), no_drop, *rest)
    assert_same_bits(found, expected)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_step_runs_on_the_stream_that_is_current() -> None:
    def script(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        model = Language().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = wrap(plain)
        returned = []
        streams = [torch.cuda.Stream(), torch.cuda.current_stream()]
        for place in range(6):
            x = tokens()
            stream = streams[place % 2]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                returned.append(step(model, optimizer, x))
            torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        return tensors_and_numbers(returned, model.state_dict(), optimizer.state_dict())

    assert_same_bits(script(functools.partial(roam.compile, pool=True)), script(lambda step: step))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1,
        device_id=torch.device("cuda", 0),
    )  # fmt: skip
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_data_parallel_over_nccl() -> None:
    def make() -> Any:
        return DistributedDataParallel(Language().to(DEVICE))

    rest = CASES["language"][1:]
    expected = eager(make, *rest)
    found, _ = outcome(roam.compile, make, *rest)
    assert_same_bits(found, expected)


@needs_2_15
@pytest.mark.usefixtures("alone")
def test_fully_sharded_over_nccl() -> None:
    from torch.distributed.fsdp import fully_shard

    def script(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        model = Language().to(DEVICE)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = wrap(plain)
        returned = [step(model, optimizer, tokens()) for _ in range(CALLS)]
        state = [value.full_tensor() for value in model.state_dict().values()]
        return tensors_and_numbers(returned, state)

    assert_same_bits(script(roam.compile), script(lambda step: step))


def test_recurrent_layers_are_refused() -> None:
    with pytest.raises(roam.CaptureError, match="recurrent layers are captured on the CPU only"):
        outcome(roam.compile, Recurrent, adamw(), plain, sequences)


@pytest.mark.parametrize(
    "kernel",
    [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ],
)
def test_kernels_of_attention_with_dropout(kernel: SDPBackend) -> None:
    def attend(query: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(kernel):
            return functional.scaled_dot_product_attention(query, query, query, dropout_p=0.2)

    class Attending(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attend(self.project(x)).square().mean()

    def batch() -> torch.Tensor:
        return torch.randn(2, 4, 96, 64, device=DEVICE, dtype=torch.bfloat16)

    case = (lambda: Attending().bfloat16(), adamw(), plain, batch)
    expected = eager(*case)
    for options in ({"pool": True}, {"pool": False}):
        found, _ = outcome(functools.partial(roam.compile, **options), *case)
        assert_same_bits(found, expected)


def test_what_a_fake_device_says_is_what_the_device_does() -> None:
    def graph_of(model: Any, x: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return roam.capture(plain, model, optimizer, x)

    real = graph_of(Language().to(DEVICE), tokens())
    with roam.fake(DEVICE):
        model, x = Language(), tokens()
    assert graph_of(model, x).digest == real.digest


def test_a_copy_of_a_trained_model_trains_on() -> None:
    def script(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        model = Language().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = wrap(plain)
        for _ in range(3):
            step(model, optimizer, tokens())
        other = copy.deepcopy(model)
        second = torch.optim.AdamW(other.parameters(), lr=1e-3)
        second.load_state_dict(optimizer.state_dict())
        again = wrap(plain)
        returned = [again(other, second, tokens()) for _ in range(3)]
        return tensors_and_numbers(returned, other.state_dict(), second.state_dict())

    assert_same_bits(script(roam.compile), script(lambda step: step))


def test_memory_of_the_pool_is_given_back() -> None:
    model = Language().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = roam.compile(plain, pool=True)
    for _ in range(3):
        step(model, optimizer, tokens())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    step.release()
    assert before - torch.cuda.memory_allocated() >= step.memory().pool_bytes > MIB
    step(model, optimizer, tokens())


class Repeating(Language):
    """Larger, with attention whose backward pass gives the same bits again."""

    def __init__(self) -> None:
        super().__init__(width=512, depth=3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(tokens)


class Adapted(torch.nn.Module):
    """Frozen layers with trained ones of low rank beside them; it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        wide, thin = (512, 512), (512, 8)
        self.frozen = torch.nn.ModuleList(torch.nn.Linear(*wide) for _ in range(8))
        self.frozen.requires_grad_(False)
        self.down = torch.nn.ModuleList(torch.nn.Linear(*thin, bias=False) for _ in range(8))
        self.up = torch.nn.ModuleList(torch.nn.Linear(*thin[::-1], bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = functional.gelu(frozen(x) + up(down(x)))
        return x.square().mean()


def accumulated(model: Any, optimizer: Any, x: Any) -> Any:
    """Two batches a step, and clipping."""
    optimizer.zero_grad()
    total = torch.zeros((), device=x.device)
    for part in x.chunk(2):
        loss = model(part) / 2
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total, norm


def few_tokens() -> torch.Tensor:
    return tokens(4, 65)


def parameter_bytes(make: Any = Repeating) -> int:
    return sum(one.nbytes for one in make().parameters())


def with_the_host(budget: int | None = None, **options: Any) -> Callable[[Any], Any]:
    """Within a third of what parameters and AdamW's state take."""
    return functools.partial(
        roam.compile, memory=budget or parameter_bytes(), offload="host", **options
    )


HOSTED = {
    "chosen": (adamw(), {}),
    "poison": (adamw(), {"pool": True, "poison": True}),
    "no pool, fused": (adamw(fused=True), {"pool": False}),
    "foreach=False": (adamw(foreach=False), {"pool": True}),
}


@pytest.mark.parametrize("name", HOSTED)
def test_parameters_and_state_lie_with_the_host(name: str) -> None:
    optimizer_of, options = HOSTED[name]
    expected = eager(Repeating, optimizer_of, accumulated, few_tokens)
    found, run = outcome(with_the_host(**options), Repeating, optimizer_of, accumulated, few_tokens)
    assert_same_bits(found, expected)
    memory = run.memory()
    print(name, memory)
    assert memory.total_bytes <= parameter_bytes()
    assert memory.read_bytes["optimizer_state"] > parameter_bytes()
    assert "moving them beside other operators" in dict(memory.totals)


def test_a_step_with_the_host_takes_and_moves_what_its_plan_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome(lambda step: step, Repeating, adamw(), accumulated, few_tokens)  # cuBLAS has its memory
    gc.collect()
    before = torch.cuda.memory_allocated()
    requested_before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.manual_seed(0)
    model = Repeating().to(DEVICE)
    optimizer = adamw()(model.parameters())
    run, x = with_the_host()(accumulated), few_tokens()
    for _ in range(3):
        run(model, optimizer, x)
    gc.collect()
    copied: list[int] = []
    for name in ("store", "load"):
        known = getattr(chunks._Memory, name)

        def counted(chunk: Any, tensor: Any, place: int, known: Any = known) -> None:
            copied.append(tensor.numel() * tensor.itemsize)
            known(chunk, tensor, place)

        monkeypatch.setattr(chunks._Memory, name, counted)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")  # nothing in a step waits for the device
    try:
        run(model, optimizer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    memory = run.memory()
    peak = torch.cuda.max_memory_allocated() - before
    requested = torch.cuda.memory_stats()["requested_bytes.all.peak"] - requested_before
    print(memory.total_bytes, requested, peak)
    assert requested <= memory.total_bytes <= parameter_bytes()
    assert peak <= memory.total_bytes + 2 * MIB  # blocks of a MiB and more may be larger
    planned = sum((*memory.read_bytes.values(), *memory.written_bytes.values()))
    assert sum(copied) == planned + memory.offloaded_bytes + memory.loaded_bytes


def test_everyone_sees_what_lies_with_the_host() -> None:
    def script(step: Any) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = Repeating().to(DEVICE)
        optimizer = adamw()(model.parameters())
        found = []
        streams = [torch.cuda.Stream(), torch.cuda.current_stream()]
        for place in range(6):
            x, stream = few_tokens(), streams[place % 2]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(step(model, optimizer, x))
                found.append({name: one.cpu() for name, one in model.state_dict().items()})
                with torch.no_grad():
                    found.append(model.eval()(x))
                    model.train().embed.weight.mul_(0.9)
            torch.cuda.current_stream().wait_stream(stream)
        return tensors_and_numbers(found, model.state_dict(), optimizer.state_dict()), model

    step = with_the_host()(accumulated)
    found, model = script(step)
    assert_same_bits(found, script(accumulated)[0])
    weight = model.blocks[0].up.weight
    assert is_paged(weight)
    kept = weight.detach().cpu()
    before = torch.cuda.memory_allocated()
    step.release()
    assert not is_paged(weight)
    assert torch.cuda.memory_allocated() > before
    assert torch.equal(weight.detach().cpu(), kept)


def test_frozen_weights_go_one_way_from_the_host() -> None:
    def batch() -> torch.Tensor:
        return torch.randn(4, 512, device=DEVICE)

    def trained(parameters: Any) -> torch.optim.Optimizer:
        return adamw()([one for one in parameters if one.requires_grad])

    case = (Adapted, trained, clipped, batch)
    expected = eager(*case)
    found, run = outcome(with_the_host(parameter_bytes(Adapted) // 2), *case)
    assert_same_bits(found, expected)
    memory = run.memory()
    assert memory.read_bytes["parameter"] > 0
    assert not memory.written_bytes
