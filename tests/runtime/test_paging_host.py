"""Steps whose parameters, state and gradients lie in the host's memory: planned for a CUDA device
that is not there, and run on the CPU, where copies are made by a thread, or by streams of which
nothing is known but their order."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_paging import accumulating, adapted, many_samples
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import roam
from paged_training import (
    STEPS,
    WIDTH,
    batch,
    bits,
    clipped,
    limit,
    paged,
    perceptron,
    persistent_bytes,
    trained,
)  # fmt: skip
from roam.program import chunks, copies, offload
from roam.program.chunks import Host
from roam.program.pages import Arrived, Left, Pages, is_paged
from roam.runtime import offloading, strategy
from roam.runtime.memory_report import StepMemory
from roam.runtime.runner import Runner
from training import assert_same_bits

HABITS = {**STEPS, "accumulating": (accumulating, {"foreach": False})}
TIMINGS = ("early", "late", "random")


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users' steps on the CPU may not do this, since it gains nothing there."""
    monkeypatch.setattr(strategy, "_place", lambda offload, variant: Host(variant.device))


class _Deferring(TorchDispatchMode):
    """Enqueues copies, as a device does."""

    def __init__(self, queue: deque[Callable[[], Any]]) -> None:
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.queue.append(partial(func, *args, **(kwargs or {})))
        return args[0]


class Streams:
    """Has what the copies use of `torch.cuda`: the current stream, which is the host and so is done
    with all that it was given, and one beside it, which makes its copies at any time until somebody
    waits for them.
    """

    def __init__(self, timing: str) -> None:
        self.timing, self.random = timing, random.Random(timing)
        self.queue: deque[Callable[[], Any]] = deque()
        self.made = self.most = self.forced = 0
        self.is_behind = False
        """Whether the stream beside waits for all that the current one was given."""

    def let(self) -> None:
        """Some time passes."""
        self.most = max(self.most, len(self.queue))
        counts = {"early": len(self.queue), "late": 0}
        self._make(counts.get(self.timing, self.random.randint(0, len(self.queue))))

    def _make(self, count: int) -> None:
        for _ in range(count):
            self.queue.popleft()()
            self.made += 1

    def current_stream(self, device: torch.device) -> Streams:
        return self

    def Stream(self, device: torch.device) -> Streams:
        return self

    def wait_stream(self, other: Streams) -> None:
        self.is_behind = True
        self.let()

    @contextmanager
    def stream(self, stream: Streams) -> Iterator[None]:
        assert self.is_behind, "a copy begins when what was enqueued before it is done"
        with _Deferring(self.queue):
            yield
        self.is_behind = False

    def record_event(self) -> int:
        return self.made + len(self.queue)

    def wait_event(self, event: int) -> None:
        self.let()
        missing = max(event - self.made, 0)
        self.forced += missing
        self._make(missing)

    def slots(self, index: int) -> list[int]:
        """As a watcher of runs, which lets time pass after each call."""
        return []

    def note(self, index: int, values: Any) -> None:
        self.is_behind = False
        self.let()


@pytest.fixture
def streams(
    request: pytest.FixtureRequest, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> Streams:
    made = Streams(request.param)
    monkeypatch.setattr(copies, "_beside", {})
    monkeypatch.setattr(copies, "streams_of", lambda device: made)
    run = Runner.run

    def watched(self: Runner, *args: Any) -> Any:
        if self._executor.is_checked and self._executor._watcher is None:
            self._executor.watch(made)
        return run(self, *args)

    monkeypatch.setattr(Runner, "run", watched)
    return made


@pytest.mark.sweep
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", HABITS)
def test_a_thread_copies_to_the_host_and_back(name: str) -> None:
    function, options = HABITS[name]
    budget = limit() if function is not accumulating else int(1.2 * limit())
    made, step = perceptron(**options), paged("host", function, memory=budget)
    assert_same_bits(trained(function, perceptron(**options)), trained(step, made))
    step.measured(*made, *batch(torch.Generator()))
    memory = step.memory()
    assert memory.measured_bytes is not None
    assert memory.measured_bytes <= memory.total_bytes <= budget


@pytest.mark.sweep
@pytest.mark.parametrize("streams", TIMINGS, indirect=True)
@pytest.mark.parametrize("name", HABITS)
def test_streams_may_copy_at_any_time(name: str, streams: Streams) -> None:
    function, options = HABITS[name]
    budget = limit() if function is not accumulating else int(1.2 * limit())
    step = paged("host", function, memory=budget, poison=True, pool=True)
    assert_same_bits(trained(function, perceptron(**options)), trained(step, perceptron(**options)))
    assert "moving them beside other operators" in dict(step.memory().totals)
    assert not streams.queue
    assert streams.made > 20
    assert (streams.most > 1) == (streams.forced > 0) == (streams.timing != "early")


@pytest.mark.parametrize("streams", ["late"], indirect=True)
@pytest.mark.parametrize("forgotten", [Arrived, Left])
def test_each_kind_of_wait_is_needed(
    forgotten: type, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = paged("host", poison=True, pool=True)
    monkeypatch.setattr(forgotten, "__call__", lambda self, tensor: None)
    try:
        found = trained(step, perceptron())
    except roam.ExecutionError:
        return  # a check of the first run has seen it
    with pytest.raises(AssertionError):
        assert_same_bits(trained(clipped, perceptron()), found)


@pytest.mark.parametrize("streams", ["late"], indirect=True)
def test_a_copy_begins_after_what_was_enqueued_before(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Streams, "wait_stream", lambda self, other: None)
    with pytest.raises((AssertionError, roam.ExecutionError), match="a copy begins"):
        trained(paged("host"), perceptron())


@pytest.mark.parametrize("streams", ["random"], indirect=True)
def test_a_step_that_fails_leaves_no_copy_behind(streams: Streams) -> None:
    made, eager, step = perceptron(), perceptron(), paged("host")
    trained(step, made, 2)
    trained(clipped, eager, 2)
    before = bits(*made)
    x, _ = batch(torch.Generator())
    with pytest.raises((IndexError, roam.ExecutionError)):
        step(*made, x, torch.full((len(x),), WIDTH))
    assert not streams.queue
    assert_same_bits(before, bits(*made))
    assert_same_bits(trained(clipped, eager, 2), trained(step, made, 2))


@pytest.mark.usefixtures("on_the_cpu")
def test_everyone_sees_current_values_until_a_release_brings_them_back() -> None:
    gc.collect()
    known = chunks._entries()
    made, eager, step = perceptron(), perceptron(), paged("host")
    trained(step, made, 2)
    trained(clipped, eager, 2)
    weight = made[0][0].weight
    assert is_paged(weight)
    assert is_paged(made[1].state[weight]["exp_avg"])
    for model in (made[0], eager[0]):
        with torch.no_grad():
            model[0].weight.mul_(0.9)
    assert_same_bits(trained(clipped, eager, 2), trained(step, made, 2))
    kept = [one.pages._kept for one in choices(step) if one.pages is not None]
    assert any(kept)
    before = bits(*made)
    step.release()
    assert not is_paged(weight)
    assert_same_bits(before, bits(*made))
    del kept
    assert chunks._entries() == known


def choices(step: roam.Step) -> list[strategy.Choice]:
    return [runner.choice for captured in step._captures for runner in captured.runners]


@pytest.mark.usefixtures("on_the_cpu")
def test_gradients_of_each_step_lie_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """To pin memory takes longer than to copy it."""
    made, step = perceptron(foreach=False), paged("host")
    trained(step, made, 3)
    asked: list[int] = []
    chunk = Host.chunk
    monkeypatch.setattr(Host, "chunk", lambda self, size: asked.append(size) or chunk(self, size))
    trained(step, made, 2)
    assert step.memory().written_bytes["gradient"] > 0
    assert not asked


@pytest.mark.usefixtures("on_the_cpu")
def test_frozen_weights_go_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made, step = adapted(), paged("host", memory=persistent_bytes(*adapted()) // 2)
    assert_same_bits(trained(clipped, adapted()), trained(step, made))
    stored: list[int] = []
    monkeypatch.setattr(chunks._Memory, "store", lambda self, tensor, at: stored.append(at))
    step(*made, *batch(torch.Generator()))
    assert step.memory().read_bytes["parameter"] > 0
    assert not step.memory().written_bytes
    assert not stored


@pytest.mark.usefixtures("on_the_cpu")
def test_activations_lie_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "block_ns", lambda tier, room_bytes: 1)
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    step = paged("host", memory=int(1.3 * limit()))
    assert_same_bits(many_samples(clipped), many_samples(step))
    assert step.memory().offloaded_tensors > 0


@pytest.mark.usefixtures("on_the_cpu")
def test_without_memory_of_the_host_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = perceptron()
    before = bits(*made)

    def full(*args: Any, **options: Any) -> Any:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(chunks, "_Memory", full)
    with pytest.raises(roam.ExecutionError, match=r"the host has no memory .* Cannot allocate") as refused:  # fmt: skip
        trained(paged("host"), made, 1)
    assert refused.value.code == "offload_room"
    assert_same_bits(before, bits(*made))


@pytest.mark.usefixtures("on_the_cpu")
def test_a_tensor_of_any_layout_is_copied_as_it_lies() -> None:
    pages = Pages(Host(torch.device("cpu")))
    for tensor in (
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(5, 7).t(),
        torch.rand(9) > 0.5,
        torch.randn(4, dtype=torch.complex64),
        torch.randn(6).bfloat16(),
        torch.tensor(3.0),
    ):
        kept = pages.keep(tensor)
        assert is_paged(kept)
        assert kept.stride() == tensor.stride()
        assert_same_bits([tensor], [kept])


@pytest.mark.parametrize("sees_addresses", [True, False])
def test_memory_is_pinned_until_all_that_is_enqueued_is_done(
    sees_addresses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    class System:
        """What is asked of the driver and of the runtime."""

        def cuDeviceGetAttribute(self, found: Any, attribute: int, device: int) -> None:
            assert (attribute, device) == (91, 1)
            found._obj.value = int(sees_addresses)

        def cudaHostRegister(self, *given: int) -> int:
            calls.append(("pinned", *given))
            return 0

        def cudaHostUnregister(self, *given: int) -> int:
            calls.append(("given back", *given))
            return 0

    device = torch.device("cuda", 1)
    monkeypatch.setattr(chunks.ctypes, "CDLL", lambda name: System())
    monkeypatch.setattr(torch.cuda, "cudart", System)
    monkeypatch.setattr(torch.cuda, "device", lambda one: nullcontext())
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda one: calls.append(("waited", one)))
    chunk = Host(torch.device("cpu")).chunk(10_000)
    address = chunk.address
    if not sees_addresses:
        with pytest.raises(OSError, match="at the host's address"):
            chunks._pin(chunk, device)
        assert not calls
        return
    chunks._pin(chunk, device)
    tensor = chunk.tensor(4096, torch.empty(5))
    del chunk
    assert calls == [("pinned", address, 10_000, 0)]
    del tensor
    assert calls[1:] == [("waited", device), ("given back", address)]


def on_a_device(where: Any) -> StepMemory:
    """What a later step on CUDA takes, within a third of what parameters and state do."""
    with roam.fake("cuda"):
        layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU())]
        model = nn.Sequential(*layers, nn.Linear(512, 3))
        made = model, torch.optim.AdamW(model.parameters())
        x, y = torch.zeros(4, 512), torch.zeros(4, dtype=torch.long)
    limit_bytes = sum(one.nbytes for one in model.parameters())
    step = roam.compile(clipped, memory=limit_bytes, offload=where)
    step.plan(*made, x, y)
    return next(one.memory for one in step._captures[0].runners if not one.is_first)


def test_a_step_of_a_device_is_planned_without_it(tmp_path: Path) -> None:
    memory = on_a_device("host")
    assert memory.limit_bytes is not None
    assert memory.total_bytes <= memory.limit_bytes
    assert memory.read_bytes["optimizer_state"] == memory.written_bytes["optimizer_state"] > 0
    moved_bytes = sum((*memory.read_bytes.values(), *memory.written_bytes.values()))
    assert 0 < memory.extra_s <= 1.01 * moved_bytes / 12e9
    with pytest.raises(roam.PlanError, match='pass offload="host"') as refused:
        on_a_device(tmp_path)
    assert refused.value.code == "offload_device"


def test_a_step_on_the_cpu_has_no_other_memory() -> None:
    made = perceptron()
    before = bits(*made)
    with pytest.raises(roam.PlanError, match="pass a folder on a disk") as refused:
        trained(paged("host"), made, 1)
    assert refused.value.code == "offload_device"
    assert_same_bits(before, bits(*made))
