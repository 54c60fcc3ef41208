"""What capture sees, what it keeps live, what it refuses, and that it leaves no mark."""

from __future__ import annotations

import dataclasses
import inspect
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import roam
from newer import needs_2_15
from roam.program import effects, passes
from roam.program.diff import difference
from roam.program.ir import Program, Ref, Result
from roam.tracing.recording.kernel_facts import HIDDEN_MUTATION, facts_of
from training import TRAININGS, assert_same_bits, plain_step, state_of, tensors_and_numbers

functional = torch.nn.functional


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.2)
        self.second = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.norm(self.first(x)))))


def parts() -> tuple[Net, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.randn(5, 6),
        torch.tensor([0, 1, 2, 0, 1]),
    )


class TestTheGraph:
    def test_holds_the_whole_step_in_eager_order(self) -> None:
        graph = roam.capture(plain_step, *parts())
        phases = [operator.phase for operator in graph.operators]
        assert set(phases) == {"forward", "loss", "backward", "update"}
        assert phases.index("loss") < phases.index("backward") < phases.index("update")
        assert list(graph.program_order) == list(range(graph.num_operators))

    def test_names_module_and_user_line(self) -> None:
        graph = roam.capture(plain_step, *parts())
        products = [
            operator for operator in graph.operators if operator.name == "aten.addmm.default"
        ]
        assert [operator.module for operator in products] == ["model.first", "model.second"]
        assert all(operator.file == __file__ for operator in products)
        backward = next(
            operator
            for operator in graph.operators
            if operator.name == "aten.native_batch_norm_backward.default"
        )
        assert backward.module == "model.norm"

    def test_counts_the_products_flops(self) -> None:
        graph = roam.capture(plain_step, *parts())
        flops = [
            operator.flops for operator in graph.operators if operator.name == "aten.addmm.default"
        ]
        assert flops == [2 * 5 * 6 * 8, 2 * 5 * 8 * 3]
        backward = [
            operator.flops for operator in graph.operators if operator.name == "aten.mm.default"
        ]
        # By the second weight and its input, and by the first weight; nobody asks for the gradient
        # of x.
        assert sorted(backward) == [2 * 5 * 8 * 3, 2 * 5 * 8 * 3, 2 * 5 * 6 * 8]
        assert not any(operator.flops for operator in graph.operators if "relu" in operator.name)

    def test_counts_convolutions(self) -> None:
        convolution = torch.nn.Conv2d(3, 4, 3, bias=False)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = convolution(x).sum()
            loss.backward()
            return loss

        graph = roam.capture(step, torch.randn(2, 3, 8, 8))
        flops = {operator.name: operator.flops for operator in graph.operators}
        assert flops["aten.convolution.default"] == 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
        assert flops["aten.convolution_backward.default"] == flops["aten.convolution.default"]

    @needs_2_15  # whose formulas have the CPU's kernel
    def test_counts_attention(self) -> None:
        def step(q: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, q, q).sum()

        graph = roam.capture(step, torch.randn(2, 4, 16, 8))
        flops = {operator.name: operator.flops for operator in graph.operators}
        attention = next(name for name in flops if "attention" in name)
        assert flops[attention] == 2 * 2 * (2 * 4) * 16 * 16 * 8

    def test_counts_every_persistent_byte(self) -> None:
        model, optimizer, x, y = parts()
        graph = roam.capture(plain_step, model, optimizer, x, y)
        tensors = [*model.parameters(), *model.buffers(), x, y]
        assert graph.persistent_bytes == sum(
            -(-t.untyped_storage().nbytes() // 64) * 64 for t in tensors
        )

    def test_says_that_batch_norm_changes_its_statistics(self) -> None:
        graph = roam.capture(plain_step, *parts())
        norm = next(
            operator
            for operator in graph.operators
            if operator.name == "aten.native_batch_norm.default"
        )
        names = {graph.tensor(tensor).name for tensor in norm.mutates}
        assert names == {"model.norm.running_mean", "model.norm.running_var"}

    def test_knows_which_statistics_kernels_change_without_saying_so(self) -> None:
        for kernel, (positions, flag) in HIDDEN_MUTATION.items():
            names = [argument.name for argument in kernel._schema.arguments]
            assert [names[place] for place in positions] == ["running_mean", "running_var"], kernel
            assert flag is None or names[flag] == "training"
            assert flag is not None or "training" not in names
            assert facts_of(kernel).mutates

    def test_keeps_random_operators_in_sequence(self) -> None:
        graph = roam.capture(plain_step, *parts())
        drawn = [operator for operator in graph.operators if operator.sequence == "random"]
        assert [operator.name for operator in drawn] == ["aten.bernoulli_.float"]

    def test_is_the_same_every_time(self) -> None:
        assert (
            roam.capture(plain_step, *parts()).to_json()
            == roam.capture(plain_step, *parts()).to_json()
        )

    def test_of_a_fake_model_is_that_of_a_real_one(self) -> None:
        real = roam.capture(plain_step, *parts())
        with roam.fake():
            model = Net()
            x, y = torch.empty(5, 6), torch.empty(5, dtype=torch.int64)
        fake = roam.capture(plain_step, model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
        assert real.to_json() == fake.to_json()

    def test_of_a_first_step_makes_the_state(self) -> None:
        model, _, x, y = parts()
        optimizer = torch.optim.AdamW(model.parameters())
        first = roam.capture(plain_step, model, optimizer, x, y, step="first")
        steady = roam.capture(plain_step, model, optimizer, x, y)
        made = sum(
            t.size_bytes
            for t in first.tensors
            if t.kind == "optimizer_state" and t.residency == "leaves"
        )
        kept = sum(
            t.size_bytes
            for t in steady.tensors
            if t.kind == "optimizer_state" and t.residency == "persistent"
        )
        assert made == kept == sum(8 * p.numel() + 4 for p in model.parameters())

    def test_of_a_first_step_needs_one(self) -> None:
        with pytest.raises(roam.CaptureError, match="no first step"):
            roam.capture(plain_step, *parts(), step="first")

    def test_adds_tied_gradients_in_place_as_the_engine_does(self) -> None:
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
        )
        model[1].weight = model[0].weight

        def step(model, optimizer, x):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

        graph = roam.capture(
            step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 4)
        )
        sums = [
            operator.name for operator in graph.operators if operator.name.startswith("aten.add")
        ]
        assert "aten.add_.Tensor" in sums
        assert "aten.add.Tensor" not in sums

    def test_memory_that_is_passed_twice_is_given_once(self) -> None:
        """A tensor and an alias of it are one argument whose memory the result may take."""
        model = torch.nn.Linear(8, 8)

        def step(model, optimizer, x):
            with torch.no_grad():
                y = model(x).tanh()
                scale = (y * y.detach()).mean()
            optimizer.zero_grad()
            (model(x).square().mean() * scale).backward()
            optimizer.step()

        graph = roam.capture(
            step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(64, 8)
        )
        product = next(
            operator for operator in graph.operators if operator.name == "aten.mul.Tensor"
        )
        assert len(product.reuse) == 1


class TestLeavesNoMark:
    @pytest.mark.sweep
    @pytest.mark.parametrize("name", TRAININGS)
    def test_on_models_optimizers_and_generators(self, name: str) -> None:
        torch.manual_seed(0)
        training = TRAININGS[name]()
        arguments = training.batch(torch.Generator().manual_seed(0))
        held = [id(tensor) for tensor in (*training.model.parameters(), *training.model.buffers())]
        before = state_of(training)
        roam.capture(training.step, *training.objects, *arguments)
        assert_same_bits(before, state_of(training))
        assert held == [
            id(tensor) for tensor in (*training.model.parameters(), *training.model.buffers())
        ]
        assert not training.optimizer.state
        assert all(parameter.grad is None for parameter in training.model.parameters())

    def test_even_when_the_step_fails(self) -> None:
        model, optimizer, x, y = parts()
        held = list(model.parameters())

        def step(model, optimizer, x, y):
            plain_step(model, optimizer, x, y)
            raise RuntimeError("deliberate")

        with pytest.raises(roam.CaptureError, match="deliberate") as caught:
            roam.capture(step, model, optimizer, x, y)
        assert caught.value.source == f"{__file__}:{step.__code__.co_firstlineno + 2}"
        assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert optimizer.param_groups[0]["params"][0] is held[0]

    def test_with_gradients_in_place(self) -> None:
        model, optimizer, x, y = parts()
        functional.cross_entropy(model(x), y).backward()
        gradients = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
        roam.capture(plain_step, model, optimizer, x, y)
        for parameter, (gradient, value) in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is gradient
            assert torch.equal(gradient, value)


class Windows(torch.nn.Module):
    """Attention over windows as Longformer cuts them: divisions of sizes on tensors, which may
    decide shapes in Python and in C++."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = torch.div(x.size(0), 2, rounding_mode="trunc")
        cut = x.view(windows, 2, 6).transpose(0, 1).reshape(2, windows - 1 + 1, 6)
        assert windows == int(windows) == x.size(0) // 2
        overlapping = cut.contiguous().as_strided((2, windows, 6), (windows * 6, 6, 1))
        return self.inner(overlapping.transpose(0, 1).reshape(-1, 6))


def test_numbers_made_of_sizes_decide_shapes() -> None:
    def outcome(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        model = Windows()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = wrap(plain_step)
        losses = [
            step(model, optimizer, torch.randn(size, 6), torch.arange(size) % 3)
            for size in (4, 6, 4)
        ]
        return tensors_and_numbers(losses, model.state_dict())

    assert_same_bits(outcome(lambda step: step), outcome(roam.compile))


HISTORY: list[Any] = []


def keeping_a_text(loss: torch.Tensor) -> Any:
    HISTORY.append(str(loss.item()))  # value
    return loss


def formatting(loss: torch.Tensor) -> Any:
    f"{loss.item():.3f}"  # value
    return loss


def changing_a_text(loss: torch.Tensor) -> Any:
    print(repr(loss).strip())  # value
    return loss


def hashing(loss: torch.Tensor) -> Any:
    return loss * hash(loss.item())  # value


def appending(loss: torch.Tensor) -> Any:
    HISTORY.insert(0, 1)
    return loss


def python_random(loss: torch.Tensor) -> Any:
    return loss * random.random()


def numpy_random(loss: torch.Tensor) -> Any:
    return loss * float(np.random.rand())


def data_shape(loss: torch.Tensor) -> Any:
    return loss + torch.nonzero(loss).sum()  # value


def mask_shape(loss: torch.Tensor) -> Any:
    return loss + loss[None][loss[None] > 0].sum()  # value


def other_storage(loss: torch.Tensor) -> Any:
    kept = loss.detach()
    torch._C.TensorBase.data.__set__(kept, torch.zeros(()))  # type: ignore[attr-defined]
    return loss + kept  # value


def converting(loss: torch.Tensor) -> Any:
    return torch.tensor(hash(loss.item()))  # value


def stopping(loss: torch.Tensor) -> Any:
    raise StopIteration


class TestRefuses:
    @pytest.mark.parametrize(
        "hostile",
        [
            keeping_a_text,
            formatting,
            changing_a_text,
            hashing,
            data_shape,
            mask_shape,
            other_storage,
            converting,
        ],
    )
    def test_what_brings_values_to_python_and_names_the_line(
        self, hostile: Any, capsys: Any
    ) -> None:
        model, optimizer, x, y = parts()

        def step(model, optimizer, x, y):
            return hostile(plain_step(model, optimizer, x, y))

        with pytest.raises(roam.CaptureError) as caught:
            roam.capture(step, model, optimizer, x, y)
        lines, first = inspect.getsourcelines(hostile)
        line = first + next(
            place for place, text in enumerate(lines) if text.rstrip().endswith("# value")
        )
        assert f"{__file__}:{line}" in str(caught.value)
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize("hostile", [appending, python_random, numpy_random, stopping])
    def test_what_moves_python_state_and_puts_it_back(self, hostile: Any) -> None:
        model, optimizer, x, y = parts()
        before = (len(HISTORY), random.getstate(), np.random.get_state()[1].tolist())

        def step(model, optimizer, x, y):
            return hostile(plain_step(model, optimizer, x, y))

        with pytest.raises(roam.CaptureError):
            roam.capture(step, model, optimizer, x, y)
        assert before == (len(HISTORY), random.getstate(), np.random.get_state()[1].tolist())

    def test_a_tensor_that_it_cannot_find(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, optimizer, x, y = parts()
        monkeypatch.setitem(globals(), "hidden", torch.ones(3))
        name = "hidden"

        def step(model, optimizer, x, y):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x) * globals()[name], y)
            loss.backward()
            optimizer.step()
            return loss

        with pytest.raises(
            roam.CaptureError,
            match=r"aten.mul.Tensor at .*shape \(3,\) that capture could not find",
        ):
            roam.capture(step, model, optimizer, x, y)

    def test_a_batch_taken_inside_the_step(self) -> None:
        model, optimizer, x, y = parts()
        batches = iter([(x, y)] * 3)

        def step(model, optimizer):
            return plain_step(model, optimizer, *next(batches))

        with pytest.raises(roam.CaptureError, match="iterator"):
            roam.capture(step, model, optimizer)

    @pytest.mark.parametrize(
        ("options", "code"),
        [({"shuffle": True}, "value_reached_python"), ({"num_workers": 1}, "iterator")],
    )
    def test_a_loader_in_the_step(self, options: dict[str, Any], code: str) -> None:
        model, optimizer, x, y = parts()
        data = torch.utils.data.TensorDataset(x, y)
        loader = torch.utils.data.DataLoader(data, batch_size=2, **options)

        def step(model, optimizer):
            for batch in loader:
                loss = plain_step(model, optimizer, *batch)
            return loss

        with pytest.raises(roam.CaptureError) as caught:
            roam.capture(step, model, optimizer)
        assert caught.value.code == code
        if code == "iterator":
            assert "for batch in loader: step(batch)" in str(caught.value)
            assert Path(__file__).name in str(caught.value.source)

    def test_numpy_on_numbers_of_the_step(self) -> None:
        model, optimizer, x, y = parts()

        def step(model, optimizer, x, y):
            losses = [plain_step(model, optimizer, x, y).item() for _ in range(2)]
            return np.mean(losses)

        with pytest.raises(roam.CaptureError, match="NumPy") as caught:
            roam.capture(step, model, optimizer, x, y)
        assert Path(__file__).name in str(caught.value.source)
        assert "sum(values) / len(values)" in str(caught.value)


def test_a_pass_keeps_every_field_of_a_program() -> None:
    """Those that name slots have their own tests; each of the others is what it was."""
    program = Program()
    renamed = {"calls", "slots", "storages", "referenced", "constants", "entering"}
    kinds = {"list": list, "dict": dict, "set": set}
    kept = {}
    for part in dataclasses.fields(Program):
        if part.name in {*renamed, "result", "effects"}:
            continue
        kind = kinds.get(str(part.type).partition("[")[0])
        mark = {"kept": part.name}
        value = mark if kind in (dict, None) else kind([part.name])
        setattr(program, part.name, value)
        kept[part.name] = value
    result = {part.name: [part.name] for part in dataclasses.fields(Result)}
    program.result = Result(**result)
    assert len(kept) > 8
    after = passes.reordered(program, range(len(program.calls)))
    assert {name: getattr(after, name) for name in kept} == kept
    assert {name: getattr(after.result, name) for name in result} == result


EFFECTS = [
    kind
    for kind in vars(effects).values()
    if isinstance(kind, type) and issubclass(kind, effects.Effect) and not inspect.isabstract(kind)
]


@pytest.mark.parametrize("kind", EFFECTS, ids=lambda kind: kind.__name__)
def test_a_pass_keeps_every_effect(kind: Any) -> None:
    """With its slots renamed and everything else as it was; and it is one of those compared."""
    program = Program()
    program.slots = [None, None]
    names = [part.name for part in dataclasses.fields(kind)]
    special = {"parameters": [SimpleNamespace(path="p")], "history": "leaf", "joined": None}
    parts = {name: special.get(name, SimpleNamespace(path=name)) for name in names}

    def naming(slot: int) -> dict[str, Any]:
        named = {"slot": slot, "slots": (slot,), "arguments": ([Ref(slot)], {}), "position": 0}
        return parts | {name: value for name, value in named.items() if name in parts}

    program.effects = [kind(**naming(1))]
    (after,) = passes.reordered(program, range(len(program.calls))).effects
    parts = naming(0)
    assert {name: getattr(after, name) for name in parts} == parts
    assert isinstance(after.what, str)
    assert (
        difference(program, dataclasses.replace(program, effects=[])) == f"the {after.what} differ"
    )


def test_a_tensor_may_be_set_to_itself() -> None:
    net, delta = torch.nn.Linear(3, 3), torch.nn.Parameter(torch.ones(3, 3))
    weight = torch.ones(3, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight.set_(weight)
        return (net(x) @ (weight * delta)).sum()

    for x in (torch.ones(2, 3), torch.zeros(2, 3)):
        assert torch.equal(roam.compile(step)(x), step(x))
