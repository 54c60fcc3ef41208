"""A plan that runs as a CUDA graph, without a GPU: when it is recorded, what it copies, and what is
refused. `test_gpu.py` runs real graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import roam
from roam.program.ir import Call, Program, Source, TensorMeta
from roam.runtime import runner
from roam.runtime.cuda_graph import OnCuda
from steps import batches
from training import assert_same_bits, tensors_and_numbers

functional = torch.nn.functional


class Recorded:
    """Stands for a CUDA graph on the CPU, where a recording happens and has to be undone."""

    recordings = 0
    kept: ClassVar[list[torch.Tensor]] = []
    """What a recording would change."""

    def __init__(self, device: torch.device, generators: list[torch.Generator]) -> None:
        pass

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        before = [tensor.clone() for tensor in self.kept]
        generator = torch.get_rng_state()
        made = run()
        for tensor, value in zip(self.kept, before, strict=True):
            tensor.copy_(value)
        torch.set_rng_state(generator)
        Recorded.recordings += 1

        def replay() -> None:
            leaves = torch.utils._pytree.tree_leaves
            for old, new in zip(leaves(made), leaves(run()), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)

        return made, replay


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "OnCuda", Recorded)
    monkeypatch.setattr(sys.modules["roam.runtime.compile"], "refuse_graph", lambda *_: None)
    monkeypatch.setattr(Recorded, "recordings", 0)


@pytest.mark.parametrize("is_random", [False, True])
def test_devices_own_generators_are_put_back_and_not_given_to_graphs(
    is_random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tuple(SimpleNamespace(device=torch.device("cuda", index)) for index in range(3))
    given = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "default_generators", own)
    devices = [torch.device("cuda", 1), torch.device("cpu")]
    program = Program([
        Call(torch.rand, (), {}, (place,), False, "forward", Source(), random=is_random)
        for place in range(2)
    ], [TensorMeta((4,), (1,), 0, torch.float32, device, 0) for device in devices])  # fmt: skip
    found = list(runner._generators(program))
    assert found == [torch.default_generator, *(own[1:2] if is_random else ())]
    assert OnCuda(devices[0], [*found, given])._generators == [given]  # type: ignore[list-item]


def script(wrap: Callable[[Any], Any], between: Callable[[int, Any, Any], Any]) -> list[Any]:
    """Nine steps with dropout; `between` comes before each."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        out = net(x)
        loss = functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return loss, {"out": out.detach()}

    run, returned = wrap(step), []
    for place, (x, y) in enumerate(batches(9)):
        between(place, optimizer, run)
        Recorded.kept = [
            *net.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())
        ]  # fmt: skip
        returned.append(run(x, y))
    return tensors_and_numbers(returned, net.state_dict(), optimizer.state_dict())


def graphed(step: Any) -> Any:
    return roam.compile(step, pool=True, cuda_graph=True)


def small(result: Callable[..., Any]) -> tuple[torch.nn.Linear, Callable[[], Any]]:
    """A layer, and what runs a graphed step that trains it on new data and returns what `result`
    makes of the layer, of its input and of its output."""
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @graphed
    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        out = net(x)
        out.sum().backward()
        optimizer.step()
        return result(net, x, out)

    def run(x: torch.Tensor | None = None) -> Any:
        Recorded.kept = list(net.parameters())
        return step(torch.randn(2, 3) if x is None else x)

    run.step = step  # type: ignore[attr-defined]
    return net, run


@pytest.mark.usefixtures("on_cpu")
class TestRecording:
    def same(self, between: Callable[[int, Any, Any], Any]) -> int:
        """How many graphs are recorded in steps with the bits of eager PyTorch."""
        expected = script(lambda step: step, between)
        assert_same_bits(script(graphed, between), expected)
        return Recorded.recordings

    def test_once(self) -> None:
        # What steps return is compared when all have run, so no replay may overwrite it.
        assert self.same(lambda *_: None) == 1

    def test_again_if_a_rate_has_changed(self) -> None:
        def change(place: int, optimizer: Any, _: Any) -> None:
            optimizer.param_groups[0]["lr"] = 0.1 if place < 5 else 0.05

        assert self.same(change) == 2

    def test_again_if_a_rate_has_another_sign_or_type(self) -> None:
        def change(place: int, optimizer: Any, _: Any) -> None:
            optimizer.param_groups[0]["lr"] = (0.0, 0.0, 0.0, 0.0, -0.0, -0.0, 0, 0, 0)[place]

        assert self.same(change) == 3

    @pytest.mark.parametrize(("last_change", "recordings"), [(9, 2), (5, 3)])
    def test_not_while_a_rate_changes_at_every_step(
        self,
        last_change: int,
        recordings: int,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr("roam.runtime.cuda_graph._MOST_CHANGES", 2)

        def change(place: int, optimizer: Any, _: Any) -> None:
            optimizer.param_groups[0]["lr"] = 0.1 / (min(place, last_change) + 1)

        assert self.same(change) == recordings
        assert caplog.text.count("runs without a CUDA graph until they stay the same") == 1

    def test_again_if_a_tensor_has_moved(self) -> None:
        def move(place: int, optimizer: Any, _: Any) -> None:
            if place == 6:
                weight = optimizer.param_groups[0]["params"][0]
                weight.data = weight.data.clone()

        assert self.same(move) == 2

    def test_again_after_the_memory_was_released(self) -> None:
        def release(place: int, _: Any, run: Any) -> None:
            if place == 6 and hasattr(run, "release"):
                run.release()

        assert self.same(release) == 2

    def test_what_a_step_returns_shares_memory_as_ever(self) -> None:
        class Rows(NamedTuple):
            whole: torch.Tensor
            row: torch.Tensor
            again: torch.Tensor

        _, run = small(
            lambda _, __, out: Rows(out.detach(), out.detach()[1], again=out.detach()[1])
        )
        kept = [run() for _ in range(5)]
        assert Recorded.recordings == 1
        for found in kept:
            assert type(found) is Rows
            found.whole[1] = 7.0
            assert found.row.tolist() == found.again.tolist() == [7.0] * 3
        starts = {found.whole.untyped_storage().data_ptr() for found in kept}
        assert len(starts) == len(kept)

    def test_a_conjugate_that_leaves(self) -> None:
        weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            out = x * weight
            out.abs().sum().backward()
            optimizer.step()
            found = out.detach()
            return found.conj(), found.conj().imag

        run = graphed(step)
        for _ in range(5):
            Recorded.kept = [weight]
            x = torch.randn(2, dtype=torch.complex64)
            product = x * weight.detach()
            conjugate, negative = run(x)
            assert torch.equal(conjugate, product.conj())
            assert torch.equal(negative, -product.imag)
        assert Recorded.recordings == 1

    def test_the_callers_own_tensors_leave_as_they_are(self) -> None:
        net, run = small(lambda net, x, _: (x, net.weight))
        for _ in range(5):
            x = torch.randn(2, 3)
            same, weight = run(x)
            assert same is x
            assert weight is net.weight
        assert Recorded.recordings == 1

    def test_autograd_notices_what_a_replay_changes(self) -> None:
        net, run = small(lambda *_: None)
        for _ in range(4):
            run()
        x = torch.randn(2, 3, requires_grad=True)
        loss = net(x).square().sum()
        run()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_what_cannot_be_recorded_says_where(self, monkeypatch: pytest.MonkeyPatch) -> None:
        net, run = small(lambda *_: None)
        run()
        run()
        before = net.weight.detach().clone()
        generated = run.step._last._executor.generated  # type: ignore[attr-defined]

        def record(_: Any, run: Any) -> Any:
            names = generated.run.__globals__
            for name, value in list(names.items()):
                if getattr(value, "__name__", "") == torch.ops.aten.mm.default._op.__name__:
                    monkeypatch.setitem(names, name, _fail)
            return run()

        monkeypatch.setattr(Recorded, "record", record)
        with pytest.raises(
            roam.ExecutionError, match="cannot be recorded as a CUDA graph"
        ) as caught:
            run()
        assert caught.value.code == "cuda_graph"
        assert torch.equal(net.weight, before)


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.skipif(
    torch.version.cuda is None and not torch.cuda.is_available(),
    reason="needs a PyTorch that was built for CUDA",
)
class TestRefusals:
    def refusal(
        self, step: Any, optimizer_of: Any, device: str = "cuda", *, is_allowed: bool = False
    ) -> str:
        """Why a step is not recorded."""
        with roam.fake("cuda"):
            net = torch.nn.Linear(8, 8)
            x = torch.empty(1024, 8, device=device)
        optimizer = optimizer_of(net.parameters())
        compiled = roam.compile(step, cuda_graph=True)
        if is_allowed:
            compiled.plan(net, optimizer, x)
            return ""
        with pytest.raises(roam.ExecutionError) as caught:
            compiled.plan(net, optimizer, x)
        assert caught.value.code == "cuda_graph"
        return str(caught.value)

    @staticmethod
    def plain(net: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    @pytest.mark.parametrize(
        "options", [{"capturable": True}, {"fused": True}, {"capturable": True, "foreach": False}]
    )
    def test_optimizers_that_keep_their_state_on_the_device(self, options: dict[str, Any]) -> None:
        self.refusal(self.plain, lambda p: torch.optim.AdamW(p, **options), is_allowed=True)

    def test_an_optimizer_that_counts_on_the_cpu(self) -> None:
        said = self.refusal(self.plain, torch.optim.AdamW)
        assert "it runs on the CPU" in said
        assert "capturable=True" in said

    def test_a_value_that_is_read(self) -> None:
        def step(net: Any, optimizer: Any, x: Any) -> Any:
            return self.plain(net, optimizer, x).item()

        said = self.refusal(step, torch.optim.SGD)
        assert "aten._local_scalar_dense.default" in said
        assert "it reads a value of a tensor" in said

    def test_a_batch_from_the_cpu(self) -> None:
        def step(net: Any, optimizer: Any, x: Any) -> Any:
            return self.plain(net, optimizer, x.to("cuda"))

        assert "make or move the tensor there before the step" in self.refusal(
            step, torch.optim.SGD, "cpu"
        )

    def test_results_that_go_to_the_cpu(self) -> None:
        def step(net: Any, optimizer: Any, x: Any) -> Any:
            return self.plain(net, optimizer, x).cpu()

        assert "move results there after the step" in self.refusal(step, torch.optim.SGD)

    def test_a_tensor_made_on_the_cpu(self) -> None:
        def step(net: Any, optimizer: Any, x: Any) -> Any:
            return self.plain(net, optimizer, x * torch.tensor([2.0], device=x.device))

        assert "make" in self.refusal(step, torch.optim.SGD)

    def test_several_devices(self) -> None:
        def step(net: Any, optimizer: Any, x: Any) -> Any:
            return self.plain(net, optimizer, x.to("cuda:0"))

        assert "of one device" in self.refusal(step, torch.optim.SGD, "cuda:1")

    def test_checkpoints_that_keep_states(self) -> None:
        def step(net: Any, optimizer: Any, x: Any) -> Any:
            def drop(x: Any) -> Any:
                return functional.dropout(net(x), 0.5)

            checkpointed = functools.partial(checkpoint, drop, use_reentrant=False)
            return self.plain(checkpointed, optimizer, x)

        assert "preserve_rng_state=False" in self.refusal(step, torch.optim.SGD)

    def test_an_argument_that_changes(self) -> None:
        def step(net: Any, optimizer: Any, x: Any) -> Any:
            x.mul_(2)
            return self.plain(net, optimizer, x)

        assert "the step changes its argument" in self.refusal(step, torch.optim.SGD)

    def test_a_view_of_what_was_there_before(self) -> None:
        def step(net: Any, optimizer: Any, x: Any) -> Any:
            return self.plain(net, optimizer, x), x[0]

        assert "return a copy" in self.refusal(step, torch.optim.SGD)


def test_a_step_on_the_cpu_is_refused() -> None:
    step = roam.compile(lambda x: x * 2, cuda_graph=True)
    with pytest.raises(roam.ExecutionError, match="a CUDA graph needs CUDA") as caught:
        step(torch.ones(3))
    assert caught.value.code == "cuda_graph"


@pytest.mark.parametrize("options", [{"streams": 2}, {"poison": True}, {"memory": "80%"}])
def test_options_that_exclude_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a CUDA graph is of one stream"):
        roam.compile(lambda: None, cuda_graph=True, **options)
