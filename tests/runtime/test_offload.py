"""Steps that offload tensors to a file have eager's bits, keep within the limit that they were
planned for, and leave nothing behind."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_expand import MAKERS

import roam
from replays import all_again, at_random, planning
from roam.kernels import transfers
from roam.kernels.transfers import Link
from roam.program import offload
from roam.program.chunks import Folder, aligned
from roam.program.ir import Program
from roam.program.lower import Lowering
from roam.program.tier import Load, Store, Tier
from roam.report.table import format_bytes
from roam.runtime import offloading, strategy
from training import Training, assert_same_bits, plain_step, run, state_of

eager = functools.cache(lambda name: run(MAKERS[name], 4)[0])


@pytest.fixture(autouse=True)
def free_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes next to no time and everything is large enough, whatever the machine is."""
    monkeypatch.setattr(offloading, "block_ns", lambda tier, room_bytes: 1)
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)


def only_offering(monkeypatch: pytest.MonkeyPatch) -> list[Lowering]:
    """No plan is found without offloading; the programs that offer tensors are in the list."""
    within, seen = strategy._Chooser._within_by, list[Lowering]()

    def refusing(self: Any, limit_bytes: int, lowering: Lowering, *how: Any) -> Any:
        if not lowering.loads:
            raise roam.PlanError("without offloading", code="memory_limit_not_found")
        seen.append(lowering)
        return within(self, limit_bytes, lowering, *how)

    monkeypatch.setattr(strategy._Chooser, "_within_by", refusing)
    return seen


SEQUENCES: dict[str, Callable[[Lowering], list[int]]] = {
    "all": all_again,
    "many": functools.partial(at_random, seed=2, share=0.2),
}
CASES = [
    ("small", True, "all"), ("small", False, "many"), ("small", None, "all"), ("gpt2", True, "many"),
    ("gpt2", False, "all"), ("bert", True, "all"), ("resnet18", False, "many"),
    ("mobilenet_v2", True, "many"),
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "pool", "how"), CASES)
def test_steps_that_load_tensors_at_any_place_have_eagers_bits(
    name: str, pool: bool | None, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning(monkeypatch, SEQUENCES[how])
    only_offering(monkeypatch)
    steps: list[roam.Step] = []

    def wrap(step: Any) -> Any:
        poison = pool is True
        steps.append(roam.compile(step, pool=pool, poison=poison, memory=1, offload=tmp_path))
        return steps[-1]

    planned, training = run(MAKERS[name], 4, wrap)
    assert_same_bits(eager(name), planned)
    memory = steps[0].memory()
    assert memory.offloaded_tensors > 3
    assert memory.offloaded_bytes > 0
    assert memory.loaded_bytes > 0
    steps[0].measured(*training.objects, *training.batch(torch.Generator().manual_seed(2)))
    measured_bytes = steps[0].memory().measured_bytes
    assert measured_bytes is not None
    # Handles take a byte, for which plans count 64.
    least_bytes = 0.99 * memory.total_bytes - 64 * memory.offloaded_tensors
    assert least_bytes <= measured_bytes <= 1.01 * memory.total_bytes
    assert steps[0].memory().transfers_measured_s is not None
    assert list(tmp_path.iterdir()) == []


def perceptron(blocks: int = 6) -> Training:
    """Linear layers, which take long to run again, and dropout."""
    layers = [
        layer
        for _ in range(blocks)
        for layer in (torch.nn.Linear(48, 48), torch.nn.GELU(), torch.nn.Dropout(0.2))
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(48, 3)).train()

    def batch(g: torch.Generator) -> tuple[Any, ...]:
        return torch.randn(512, 48, generator=g), torch.randint(0, 3, (512,), generator=g)

    return Training(plain_step, (model, torch.optim.AdamW(model.parameters())), batch)


def trained(**options: Any) -> tuple[list[Any], roam.Step, Training]:
    steps: list[roam.Step] = []

    def wrap(step: Any) -> Any:
        steps.append(roam.compile(step, **options))
        return steps[-1]

    bits, training = run(perceptron, 3, wrap)
    return bits, steps[0], training


def test_a_limit_is_kept_in_less_time_and_with_eagers_bits(tmp_path: Path) -> None:
    recomputing = trained(memory="50%")[1].memory()
    bits, step, training = trained(memory="50%", offload=tmp_path)
    assert_same_bits(run(perceptron, 3)[0], bits)
    memory = step.memory()
    assert recomputing.offloaded_tensors == 0
    assert memory.offloaded_tensors > 0
    assert memory.extra_s < recomputing.extra_s
    assert memory.extra_runs < recomputing.extra_runs
    assert memory.step_s == pytest.approx(recomputing.step_s)
    assert memory.floor_bytes is None
    assert memory.least_extra_s is None
    step.measured(*training.objects, *training.batch(torch.Generator().manual_seed(2)))
    memory = step.memory()
    assert memory.limit_bytes is not None
    assert memory.measured_bytes is not None
    assert memory.measured_bytes <= memory.limit_bytes
    assert f"{memory.offloaded_tensors} tensors (" in str(memory)
    assert "are offloaded" in str(memory)


def test_reports_tell_what_is_offloaded(tmp_path: Path) -> None:
    _, step, _ = trained(memory="50%", offload=tmp_path)
    offloaded = format_bytes(step.memory().offloaded_bytes)
    step.report(tmp_path / "step.html")
    page = (tmp_path / "step.html").read_text()
    assert f"{offloaded} that are offloaded" in page
    assert "no plan of whole operators takes less" not in page
    step.export(tmp_path / "step.json")
    assert "roam.load" in (tmp_path / "step.json").read_text()


def test_no_plan_takes_longer_than_without_offloading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "block_ns", lambda tier, room_bytes: 10**13)
    recomputing = trained(memory="50%")[1].memory()
    memory = trained(memory="50%", offload=tmp_path)[1].memory()
    assert memory.offloaded_tensors == 0
    assert (memory.extra_s, memory.extra_runs) == (recomputing.extra_s, recomputing.extra_runs)
    assert memory.floor_bytes == recomputing.floor_bytes


def test_what_is_never_loaded_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = only_offering(monkeypatch)
    _, step, _ = trained(memory="80%", offload=tmp_path)
    memory = step.memory()
    assert 0 < memory.offloaded_tensors < len(seen[-1].loads)
    choice = step._captures[0].runners[-1].choice
    again = choice.recomputation
    assert again is not None
    assert again.offloaded is not None
    calls = choice.program.calls
    stores = [call.target.offset_bytes for call in calls if isinstance(call.target, Store)]
    handed = [call for call in calls if isinstance(call.target, Load) and call.args[0] is not None]
    loads = [call for call in calls if isinstance(call.target, Load) and call.args[0] is None]
    assert {call.target.offset_bytes for call in loads} == set(stores)
    assert len(stores) == memory.offloaded_tensors
    assert again.offloaded.tier_bytes == sum(
        aligned(choice.program.storages[choice.program.storage_of(slot)].size_bytes)
        for slot in (call.outputs[0] for call in handed)
    )


def test_without_a_limit_that_needs_it_nothing_is_offloaded(tmp_path: Path) -> None:
    _, step, _ = trained(memory="100%", offload=tmp_path)
    assert step.memory().offloaded_tensors == 0
    assert step._captures[0].runners[-1]._tier is None


def test_a_floor_is_one_for_plans_that_offload_too(tmp_path: Path) -> None:
    with pytest.raises(roam.PlanError) as refused:
        trained(memory="1KiB", offload=tmp_path)
    assert refused.value.code == "memory_floor"
    assert "offloaded" in str(refused.value)


def test_without_a_folder_the_refusal_names_it() -> None:
    with pytest.raises(roam.PlanError, match="offload="):
        trained(memory="1KiB")


def test_without_room_on_the_disk_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    training = perceptron()
    step = roam.compile(training.step, memory="50%", offload=tmp_path)
    batch = training.batch(torch.Generator().manual_seed(2))
    before = state_of(training)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(roam.ExecutionError, match="No space left on device") as refused:
            step(*training.objects, *batch)
    assert refused.value.code == "offload_room"
    assert_same_bits(before, state_of(training))
    step(*training.objects, *batch)
    assert step.memory().offloaded_tensors > 0


def test_a_folder_that_is_gone_is_a_typed_error(tmp_path: Path) -> None:
    folder = tmp_path / "offload"
    folder.mkdir()
    torch.manual_seed(0)
    training = perceptron()
    step = roam.compile(training.step, memory="50%", offload=folder)
    batch = training.batch(torch.Generator().manual_seed(2))
    before = state_of(training)
    folder.rmdir()
    with pytest.raises(roam.ExecutionError, match="No such file") as refused:
        step(*training.objects, *batch)
    assert refused.value.code == "offload_room"
    assert_same_bits(before, state_of(training))
    folder.mkdir()
    step(*training.objects, *batch)
    assert step.memory().offloaded_tensors > 0


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_failing_disk_is_a_typed_error(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, step, training = trained(memory="50%", offload=tmp_path)

    def failing(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(
        roam.ExecutionError, match=r"roam\.(store|load) at .*: .*Input/output"
    ) as failed:
        step(*training.objects, *training.batch(torch.Generator().manual_seed(2)))
    assert failed.value.code in ("failed", "torn")
    assert failed.value.operator in ("roam.store", "roam.load")


def test_other_devices_are_refused(tmp_path: Path) -> None:
    with roam.fake("cuda"):
        training = perceptron()
        batch = torch.randn(512, 48), torch.zeros(512, dtype=torch.long)
    step = roam.compile(training.step, memory="50%", offload=tmp_path)
    with pytest.raises(roam.PlanError, match='pass offload="host"') as refused:
        step.plan(*training.objects, *batch)
    assert refused.value.code == "offload_device"


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass memory= too"):
        roam.compile(plain_step, offload=tmp_path)
    with pytest.raises(ValueError, match="a folder that exists"):
        roam.compile(plain_step, memory="50%", offload=tmp_path / "none")


def test_released_room_is_taken_again(tmp_path: Path) -> None:
    _, step, training = trained(memory="50%", offload=tmp_path)
    tier = Tier.of(Folder(tmp_path.resolve()))
    assert tier.nbytes > 0
    step.release()
    assert tier.nbytes == 0
    step(*training.objects, *training.batch(torch.Generator().manual_seed(2)))
    assert tier.nbytes > 0


TENSORS = {
    "float": lambda: torch.randn(5, 7),
    "half": lambda: torch.randn(5, 7).bfloat16(),
    "bool": lambda: torch.rand(3, 5) > 0.5,
    "complex": lambda: torch.randn(4, 3, dtype=torch.complex64),
    "transposed": lambda: torch.randn(5, 7).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "nan": lambda: torch.full((9,), torch.nan),
}


@pytest.mark.parametrize("name", TENSORS)
def test_what_is_loaded_is_what_was_stored(name: str, tmp_path: Path) -> None:
    tensor, tier = TENSORS[name](), Tier(Folder(tmp_path))
    other = torch.empty_like(tensor)
    size_bytes = tensor.numel() * tensor.itemsize
    shape, stride = tuple(tensor.shape), tensor.stride()
    with tier.held(aligned(size_bytes) * 2):
        stored = Store(tier, 0)(tensor)
        Store(tier, aligned(size_bytes))(other)
        load = Load(tier, 0, shape, stride, tensor.dtype)
        copied, loaded = load(tensor, stored), load(None, stored)
        into = torch.empty_like(tensor)
        load.into((into,), None, stored)
        inside = torch.zeros(3 * size_bytes, dtype=torch.uint8)[size_bytes : 2 * size_bytes]
        place = inside.view(tensor.dtype).as_strided(shape, stride, size_bytes // tensor.itemsize)
        load.into((place,), None, stored)
    for one in (copied, loaded, into, place):
        assert one.stride() == tensor.stride()
        assert_same_bits([tensor], [one])


def test_a_file_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    tier = Tier(Folder(tmp_path))
    with tier.held(8), pytest.raises(OSError, match="too short"):
        tier.load(torch.zeros(4), 0)


def test_a_forked_process_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(Folder(tmp_path))
    with tier.held(64):
        inode = os.fstat(tier._chunk.descriptor).st_ino
    with tier.held(64):
        assert os.fstat(tier._chunk.descriptor).st_ino == inode
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    parent = os.dup(tier._chunk.descriptor)
    try:
        with tier.held(64):
            assert os.fstat(tier._chunk.descriptor).st_ino != inode
    finally:
        os.close(parent)


def test_time_is_measured_once_for_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_learned", {})
    runs: list[int] = []
    measured = transfers._measured_ns

    def counted(tier: Tier) -> dict[str, int]:
        runs.append(1)
        return measured(tier)

    monkeypatch.setattr(transfers, "_measured_ns", counted)
    tier = Tier(Folder(tmp_path))
    assert transfers.block_ns(tier, None) == transfers._MODEL_NS["cpu"]
    assert transfers.block_ns(tier, 2**10) == transfers._MODEL_NS["cpu"]
    assert not runs
    block = transfers.block_ns(tier, 2**30)
    assert transfers.block_ns(tier, 2**30) == block
    assert len(runs) == 1
    assert transfers.time_ns(block, 2**22) == block
    assert transfers.time_ns(block, 1) >= 1


def test_what_the_page_cache_does_not_hold_takes_as_long_as_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"block": 30, "read": 10, "write": 20, "read disk": 100, "write disk": 200}
    monkeypatch.setattr(transfers, "_learned", {})
    monkeypatch.setattr(transfers, "recall", lambda *_: {})
    monkeypatch.setattr(transfers, "retain", lambda *_: None)
    monkeypatch.setattr(transfers, "rounded", lambda time_ns: time_ns)
    monkeypatch.setattr(transfers, "_measured_ns", lambda _: told)
    monkeypatch.setattr(transfers, "_waiting_share", lambda: 0.25)
    tier = Tier(Folder(tmp_path))

    def link(files_bytes: int, changed_bytes: int) -> tuple[int, int]:
        found = Link.of(tier, 2**30, 1000, files_bytes, changed_bytes)
        return tuple(found.time_ns(2**22, is_read=is_read) for is_read in (True, False))

    assert link(1000, 250) == (10, 20)
    assert link(1000, 251) == (10, 200)
    assert link(1001, 0) == (100, 20)
    assert link(4000, 4000) == (100, 200)
    unmeasured = Link.of(tier, None, 1000, 4000, 4000)
    assert unmeasured.read_ns == unmeasured.write_ns == transfers._MODEL_NS["cpu"] // 2


def test_what_is_forgotten_is_read_from_the_disk_again(tmp_path: Path) -> None:
    tier, tensor = Tier(Folder(tmp_path)), torch.randn(4096)
    with tier.held(2**14):
        tier.store(tensor, 0)
        tier.forget()
        found = torch.empty(4096)
        tier.load(found, 0)
    assert torch.equal(found, tensor)


def captured(step: Callable[..., Any], *args: Any) -> Lowering:
    """The lowering of a step's program."""
    compiled = roam.compile(step, pool=False)
    compiled(*args)
    choice = compiled._captures[0].runners[-1].choice
    return Lowering(choice.program, choice.placed, name="step", device="cpu")


def names_of(program: Program, slots: list[int]) -> list[str]:
    return [program.calls[program.storages[program.storage_of(one)].creator].name for one in slots]


def offered(step: Callable[..., Any]) -> list[str]:
    """Names of the calls whose results are offered, of a step on a weight and an input."""
    weight = torch.randn(6, 6, requires_grad=True)
    lowering = captured(step, weight, torch.randn(4, 6))
    return names_of(
        lowering.program, [offer.slot for offer in lowering.offers(torch.device("cpu"), ())]
    )


def test_only_finished_activations_in_memory_of_their_own_are_offered() -> None:
    def plain(weight, x):
        loss = (x @ weight).exp().sin().sum()
        loss.backward()
        return loss

    assert offered(plain) == ["aten.exp.default", "aten.cos.default"] or offered(plain) == [
        "aten.exp.default"
    ]

    def in_place(weight, x):
        y = (x @ weight).exp_()
        loss = y.square().sum()
        loss.backward()
        return loss

    assert "aten.mm.default" in offered(in_place)

    def seen_by_a_view(weight, x):
        y = x @ weight
        part = y[1:]
        y.exp_()
        loss = y.square().sum() + part.square().sum()
        loss.backward()
        return loss

    assert "aten.mm.default" not in offered(seen_by_a_view)

    def leaving(weight, x):
        y = (x @ weight).exp()
        y.square().sum().backward()
        return y.detach()

    assert "aten.exp.default" not in offered(leaving)


def test_plans_of_graphs_load_what_is_stored_after_it_is_stored() -> None:
    builder = roam.GraphBuilder("layers", device="cpu")
    layers, size_bytes = 40, 2**20
    given = builder.tensor("x", size_bytes, residency="persistent")
    known, loads = given, []
    for layer in range(layers):
        raw, handle, made = (
            builder.tensor(f"{name}{layer}", size, residency="step_local")
            for name, size in (("raw", size_bytes), ("stored", 1), ("made", size_bytes))
        )
        builder.operator("layer", reads=[known], creates=[raw], phase="forward", time_ns=10**6)
        builder.operator("store", reads=[raw], creates=[handle], phase="forward", time_ns=1)
        builder.operator(
            "load", reads=[raw, handle], creates=[made], reuse=[(raw, made)], phase="forward",
            repeatable=True, first_only=[raw], time_ns=1000,
        )  # fmt: skip
        loads.append(3 * layer + 2)
        known = made
    gradient = builder.tensor("gradient", size_bytes, residency="step_local")
    builder.operator("loss", reads=[known], creates=[gradient], phase="loss")
    for layer in reversed(range(layers)):
        after = builder.tensor(f"gradient{layer}", size_bytes, residency="step_local")
        reads = [gradient, 3 * layer + 3]
        builder.operator("backward", reads=reads, creates=[after], phase="backward")
        gradient = after
    graph = builder.build()
    plain = roam.optimize(graph, exact="off")
    limit_bytes = size_bytes + (plain.total_bytes - size_bytes) // 4
    plan = roam.optimize(graph, exact="off", memory_limit_bytes=limit_bytes)
    assert plan.total_bytes <= limit_bytes
    again = plan.recomputation
    assert again is not None
    extra = len(again["sequence"]) - graph.num_operators
    assert again["extra_s"] == pytest.approx(extra * 1e-6)  # no layer runs again
    assert extra < 1.2 * layers
    expanded, ordered = plan.expanded(graph)
    roam.verify(expanded, ordered)
    stored: set[int] = set()
    for place in ordered.order:
        operator = expanded.operators[int(place)]
        if operator.name == "store":
            stored.update(operator.creates)
        if operator.name == "load":
            assert stored.issuperset(set(operator.reads) & set(range(2, 3 * layers, 3)))
