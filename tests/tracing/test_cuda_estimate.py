"""Steps for CUDA, captured on a machine without it: the engine's own backward pass, CUDA's kernels,
and a label."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import roam
from roam import cli, zoo
from roam.tracing.cuda_estimate import absent
from roam.tracing.step import capture_step
from training import plain_step

functional = torch.nn.functional
is_absent = pytest.mark.skipif(
    torch.cuda.is_available() or torch.version.cuda is None,
    reason="captures exactly where there is a device, and not at all where PyTorch was built without CUDA",
)


def made(name: str, **settings: Any) -> roam.Graph:
    with roam.fake("cuda"):
        step = zoo.build(name, **settings, device="cuda")
    return roam.capture(step.train_step, step.model, step.optimizer, *step.batch)


def kernels(graph: roam.Graph) -> Counter[str]:
    return Counter(operator.name.split(".")[1] for operator in graph.operators)


@is_absent
class TestKernels:
    """What CUDA runs where the CPU runs something else."""

    @pytest.mark.parametrize(("dtype", "name"), [("float32", "efficient"), ("bfloat16", "flash")])
    def test_a_transformer(self, dtype: str, name: str) -> None:
        graph = made("gpt2-tiny", seq=32, dtype=dtype)
        found = kernels(graph)
        attention = f"_scaled_dot_product_{name}_attention"
        assert found[attention] == found[f"{attention}_backward"] == 2
        assert found["native_dropout"] == found["native_dropout_backward"] == 5
        assert (
            not {"bernoulli_", "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu"}
            & found.keys()
        )
        assert {operator.phase for operator in graph.operators if "backward" in operator.name} == {
            "backward"
        }
        roam.verify(graph, roam.optimize(graph))

    def test_attention_with_a_mask(self) -> None:
        graph = made("bert-tiny", seq=32)
        assert kernels(graph)["native_dropout"] > 0
        roam.verify(graph, roam.optimize(graph))

    def test_a_convolutional_net(self) -> None:
        graph = made("resnet18")
        found = kernels(graph)
        assert (
            found["cudnn_batch_norm"]
            == found["cudnn_batch_norm_backward"]
            == found["convolution"]
            == 20
        )
        assert "native_batch_norm" not in found
        changed = [
            operator
            for operator in graph.operators
            if operator.name == "aten.cudnn_batch_norm.default"
        ]
        assert all(len(operator.mutates) == 2 for operator in changed)  # running mean and variance
        assert graph.alignment_bytes == 512
        roam.verify(graph, roam.optimize(graph))

    def test_the_form_of_optimizer_that_pytorch_would_choose(self) -> None:
        with roam.fake("cuda"):
            net = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 4)
            )
            optimizer = torch.optim.AdamW(net.parameters())
            batch = torch.randn(3, 8), torch.randint(4, (3,))
        graph = roam.capture(plain_step, net, optimizer, *batch)
        assert kernels(graph)["_foreach_addcdiv_"] == 1  # small parameters share a call
        roam.verify(graph, roam.optimize(graph))

    def test_mixed_precision(self) -> None:
        with roam.fake("cuda"):
            net = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
            )
            optimizer = torch.optim.SGD(net.parameters())
            scaler = torch.amp.GradScaler("cuda")
            batch = torch.randn(3, 8), torch.randint(4, (3,))

        def step(dtype: torch.dtype, inputs: Any, labels: Any) -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype):
                hidden = net(inputs)
                assert hidden.dtype is dtype
                loss = functional.cross_entropy(hidden, labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        for dtype in (torch.float16, torch.bfloat16):
            graph = roam.capture(step, dtype, *batch)
            assert kernels(graph)["_amp_foreach_non_finite_check_and_unscale_"] == 1
            roam.verify(graph, roam.optimize(graph))

    @pytest.mark.parametrize(
        ("settings", "name"),
        [
            ({}, "efficient_attention"),
            ({"dtype": torch.bfloat16}, "flash_attention"),
            ({"dtype": torch.bfloat16, "width": 12}, "flash_attention"),  # padded
            ({"dtype": torch.bfloat16, "width": 264}, "efficient_attention"),
            ({"dtype": torch.bfloat16, "mask": torch.bool}, "efficient_attention"),
            ({"mask": torch.float32, "length": 13}, "efficient_attention"),
            ({"width": 6}, "attention_math"),
            ({"dtype": torch.float64}, "attention_math"),
            ({"dtype": torch.bfloat16, "groups": 2}, "flash_attention"),
            ({"groups": 2}, "attention_math"),
        ],
    )
    def test_the_choice_of_attention(self, settings: dict[str, Any], name: str) -> None:
        assert self.attention(**settings) == name

    def test_attention_under_switches(self) -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert self.attention(dtype=torch.bfloat16) == "attention_math"

    def attention(
        self,
        dtype: Any = torch.float32,
        width: int = 16,
        mask: Any = None,
        length: int = 16,
        groups: int = 1,
    ) -> str:
        with roam.fake("cuda"):
            query = torch.nn.ParameterList([torch.randn(2, 4, length, width, dtype=dtype)])
            other = torch.randn(2, 4 // groups, length, width, dtype=dtype)
            given = None if mask is None else torch.ones(length, length, dtype=mask)

        def step(query: Any, other: Any, given: Any) -> Any:
            query.zero_grad()
            attended = functional.scaled_dot_product_attention(
                query[0], other, other, given, enable_gqa=groups > 1
            )
            assert attended.shape == query[0].shape
            attended.sum().backward()

        found = kernels(roam.capture(step, query, other, given))
        if "_safe_softmax" in found:
            return "attention_math"
        (name,) = (
            name for name in found if name.startswith("_scaled_dot") and name.endswith("attention")
        )
        assert found[f"{name}_backward"] == 1
        return name.removeprefix("_scaled_dot_product_")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 + torch.zeros_like(x)


class Net(torch.nn.Module):
    """What autograd's engine has its own ways for: sums of gradients, tied weights, numbers,
    dtypes, its own nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        hidden = functional.gelu(self.first(x)) + x * self.scale
        hidden = hidden + self.norm(self.second(hidden)) * hidden.mean()
        hidden = hidden.to(torch.float64).cumsum(0).to(torch.float32)
        return Doubled.apply(hidden).gather(1, torch.arange(4, device=x.device).expand(len(x), 4))


class Recomputed(Net):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Any) -> Any:
        wanted = x.clone().requires_grad_()
        return checkpoint(super().forward, wanted, use_reentrant=self.use_reentrant)


def penalized(model: Any, optimizer: Any, inputs: Any, labels: Any) -> Any:
    """A gradient of a gradient."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(inputs), labels)
    (gradient,) = torch.autograd.grad(loss, [model.first.weight], create_graph=True)
    (loss + gradient.square().sum()).backward()
    optimizer.step()
    return loss


def hooked(model: Any, optimizer: Any, inputs: Any, labels: Any) -> Any:
    handle = model.first.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    loss = plain_step(model, optimizer, inputs, labels)
    handle.remove()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    return loss


@is_absent
class TestEngine:
    """A step of kernels that do not differ between devices is the same step on both."""

    @pytest.mark.parametrize("step", [plain_step, penalized, hooked])
    def test_the_same_calls(self, step: Any) -> None:
        assert self.calls("cuda", Net, step) == self.calls("cpu", Net, step)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_the_same_recomputation(self, use_reentrant: bool) -> None:
        make, step = functools.partial(Recomputed, use_reentrant=use_reentrant), hooked
        assert self.calls("cuda", make, step) == self.calls("cpu", make, step)

    def calls(self, device: str, make: Callable[[], Net], step: Any) -> list[Any]:
        with roam.fake(device):
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)
            batch = torch.randn(3, 8), torch.randint(4, (3,))
        program = capture_step(step, (model, optimizer, *batch), {}).steady.program

        def meta(slot: int | None) -> Any:
            found = None if slot is None else program.slots[slot]
            return (
                None if found is None else (found.shape, found.stride, found.dtype, found.storage)
            )

        devices = {found.device.type for found in program.slots if found is not None}
        assert devices == {device}
        return [
            (call.name, call.phase, call.source, call.refs(), list(map(meta, call.outputs)))
            for call in program.calls
        ]


@pytest.fixture(scope="module")
def graph() -> roam.Graph:
    return made("gpt2-tiny", seq=16)


@is_absent
class TestLabel:
    def test_it_stays_with_the_graph_and_the_plan(self, graph: roam.Graph, tmp_path: Path) -> None:
        plan = roam.optimize(graph)
        assert graph.estimate == plan.estimate == absent.ESTIMATE
        for thing in (graph, plan):
            thing.save(tmp_path / "file.json.gz")
            again = type(thing).load(tmp_path / "file.json.gz")
            assert again == thing
            assert again.estimate == absent.ESTIMATE
            assert "estimate=" in repr(again)

    def test_people_see_it(self, graph: roam.Graph, capsys: pytest.CaptureFixture[str]) -> None:
        assert "estimate" in graph.summary()
        assert cli.main(["plan", "gpt2-tiny", "--seq", "16", "--device", "cuda"]) == 0
        shown = capsys.readouterr().out
        assert absent.ESTIMATE.split(":")[0] in shown
        assert cli.main(["plan", "gpt2-tiny", "--seq", "16", "--device", "cuda", "--json"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert values["estimate"] == absent.ESTIMATE
        assert values["device"] == "cuda"
        assert values["verified"]

    def test_a_plan_that_hides_it_is_refused(self, graph: roam.Graph) -> None:
        values = json.loads(roam.optimize(graph).to_json())
        del values["estimate"]
        with pytest.raises(roam.PlanError) as refusal:
            roam.verify(graph, roam.Plan.from_json(json.dumps(values).encode()))
        assert refusal.value.code == "estimate"

    def test_a_compiled_step_can_be_planned_and_not_run(self) -> None:
        with roam.fake("cuda"):
            net = torch.nn.Linear(8, 4)
            optimizer = torch.optim.SGD(net.parameters())
            batch = torch.randn(3, 8), torch.randint(4, (3,))
        step = roam.compile(plain_step)
        assert step.plan(net, optimizer, *batch).estimate == absent.ESTIMATE
        with pytest.raises(roam.ExecutionError) as refusal:
            step(net, optimizer, *batch)
        assert refusal.value.code == "estimate"

    @pytest.mark.parametrize("streams", [1, 2])
    def test_a_compiled_step_is_reported_by_a_plan_in_a_pool(
        self, streams: int, tmp_path: Path
    ) -> None:
        with roam.fake("cuda"):
            model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
            optimizer = torch.optim.AdamW(model.parameters())
            x = torch.randn(256, 64)

        def train_step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step = roam.compile(train_step, streams=streams, pool=True)
        assert step.plan(x).pool_bytes > 0
        _, plan = step.plans[-1]
        step.report(tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        assert f'<data value="{plan.total_bytes}" data-name="total_bytes"' in page
        assert ("The plan has 2 streams" in page) == (streams == 2)
        if streams == 2:
            with pytest.raises(roam.PlanError) as caught:
                step.report(tmp_path / "report.html", limits=["80%"])
            assert caught.value.code == "invalid_memory_limit"
        with pytest.raises(roam.ExecutionError) as refused:
            step(x)
        assert refused.value.code == "estimate"


@is_absent
def test_questions_are_asked_on_the_cpu() -> None:
    with roam.fake("cuda"):
        net = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(net.parameters())
        batch = torch.randn(3, 8), torch.randint(4, (3,))

    def step(model: Any, optimizer: Any, inputs: Any, labels: Any) -> Any:
        if (torch.arange(3, device=inputs.device) > 1).any():
            inputs = inputs.sin()
        return plain_step(model, optimizer, inputs, labels)

    assert kernels(roam.capture(step, net, optimizer, *batch))["sin"] == 1


@is_absent
def test_the_rest_of_the_process_goes_on_as_before() -> None:
    made("gpt2-tiny", seq=16)
    assert torch.accelerator.current_accelerator(check_available=True) is None
    assert not torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 0
    with torch.random.fork_rng():
        torch.manual_seed(1)

    def script(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 4)
        )
        optimizer = torch.optim.AdamW(net.parameters())
        step = wrap(plain_step)
        losses = [step(net, optimizer, torch.randn(3, 8), torch.randint(4, (3,))) for _ in range(3)]
        return [loss.detach() for loss in losses], list(net.parameters())

    eager, planned = script(lambda step: step), script(roam.compile)
    for one, other in zip(eager[0] + eager[1], planned[0] + planned[1], strict=True):
        assert torch.equal(one, other)


def test_the_cpu_is_no_estimate() -> None:
    with roam.fake("cpu"):
        net = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(net.parameters())
        batch = torch.randn(3, 8), torch.randint(4, (3,))
    graph = roam.capture(plain_step, net, optimizer, *batch)
    assert graph.estimate == roam.optimize(graph).estimate == ""
    assert "estimate" not in graph.summary()
    assert b'"estimate"' not in graph.to_json()


def test_a_pytorch_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(absent, "_kept", [])
    with pytest.raises(roam.CaptureError) as refusal, roam.fake("cuda"):
        pass
    assert refusal.value.code == "no_device"
