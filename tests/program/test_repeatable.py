"""Calls that may run again make the same bits again and leave alone what the step did not make."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import library
from torch.nn import functional

import roam
from roam import zoo
from roam.program.bits import as_bytes
from roam.program.ir import Call, Program, Ref, Source, Storage, TensorMeta, substitute
from roam.program.operators import UNINITIALIZED
from roam.program.repeatable import Repeat, repeats
from roam.runtime.bindings import Bindings
from roam.runtime.executor import Executor
from training import TRAININGS, Training, plain_step

aten = torch.ops.aten


def vit() -> Training:
    """Attention, which is tagged as random even where it drops nothing."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(6 * 16, 3)).train()

    def batch(g: torch.Generator) -> tuple[Any, ...]:
        return torch.randn(4, 6, 16, generator=g), torch.randint(0, 3, (4,), generator=g)

    return Training(plain_step, (model, torch.optim.AdamW(model.parameters())), batch)


def of_zoo(name: str) -> Training:
    step = zoo.build(name, batch=2, seq=16, dtype="float32", optimizer="adamw")
    return Training(step.train_step, (step.model.train(), step.optimizer), lambda g: step.batch)


STEPS: dict[str, Callable[[], Training]] = {
    **TRAININGS,
    "vit": vit,
    **{name: functools.partial(of_zoo, name) for name in ("llama-tiny", "moe-tiny", "lstm-tiny")},
}


class Again:
    """Runs a program call by call, and each that may run again a second time, on copies of what it
    changes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.repeats = repeats(program)
        self.ran: Counter[str] = Counter()
        self.other: dict[str, int] = {}

    def run(self, values: dict[int, Any]) -> None:
        for index, call in enumerate(self.program.calls):
            repeat = self.repeats[index]
            again = {} if repeat is None else self._copied(call, repeat, values)
            before = torch.get_rng_state()
            call.run(values)
            if repeat is None:
                continue
            assert torch.equal(before, torch.get_rng_state()), call.name
            kept = {slot: values[slot] for slot in call.outputs if slot is not None}
            seen = self._touched(call, values)
            repeat.call.run(again)
            self.ran[call.name] += 1
            if call.target.name() not in UNINITIALIZED and not all(
                _same(kept[slot], again[slot]) for slot in kept
            ):
                self.other[call.name] = index
            for slot in repeat.call.mutates:
                assert _same(values[slot], again[slot]), call.name
            # What is not made again is as the first run has left it.
            for slot, content in seen.items():
                assert torch.equal(as_bytes(values[slot]), as_bytes(content)), call.name

    def _copied(self, call: Call, repeat: Repeat, values: dict[int, Any]) -> dict[int, Any]:
        """The values for a further run."""
        storages: dict[int, torch.UntypedStorage] = {}
        changed = {self.program.storage_of(slot) for slot in repeat.call.mutates}
        copies = dict(values)
        for slot in call.refs():
            if self.program.storage_of(slot) in changed:
                storage = values[slot].untyped_storage()
                copy = storages.setdefault(self.program.storage_of(slot), storage.clone())
                copies[slot] = (
                    values[slot]
                    .detach()
                    .clone()
                    .set_(
                        copy,
                        values[slot].storage_offset(),
                        values[slot].shape,
                        values[slot].stride(),
                    )
                )
        return copies

    def _touched(self, call: Call, values: dict[int, Any]) -> dict[int, torch.Tensor]:
        return {
            slot: values[slot].clone()
            for slot in call.refs()
            if self.program.slots[slot] is not None
        }


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (
        other.shape,
        other.stride(),
        other.dtype,
    ) and torch.equal(as_bytes(one), as_bytes(other))


@pytest.mark.sweep
@pytest.mark.parametrize("name", STEPS)
def test_what_may_run_again_makes_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[Again] = []

    def run(executor: Executor, inputs: list[Any]) -> Any:
        bindings: Bindings = executor.bindings
        values = dict(zip(bindings.input_slots(), inputs, strict=True))
        sweeps.append(Again(executor.program))
        sweeps[-1].run(values)
        return bindings.outgoing(lambda ref: values[ref.slot])

    monkeypatch.setattr(Executor, "run_checked", run)
    torch.manual_seed(0)
    training = STEPS[name]()
    step = roam.compile(training.step, pool=False)
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        step(*training.objects, *training.batch(generator))
    for sweep in sweeps:
        assert not sweep.other
        calls = sweep.program.calls
        forward = [index for index, call in enumerate(calls) if call.phase == "forward"]
        kept = {calls[index].name for index in forward if sweep.repeats[index] is None}
        assert kept <= {"aten.bernoulli_.float", "aten.add_.Tensor", "aten.topk.default"}, kept
        assert sum(sweep.ran.values()) > len(forward)


def programs(step: Callable[..., Any], *arguments: Any) -> Program:
    """The program of a step, as it runs from its second call on."""
    compiled = roam.compile(step, pool=False)
    for _ in range(2):
        compiled(*arguments)
    program: Program = compiled._captures[0].runners[-1]._program
    return program


def kept(program: Program) -> set[str]:
    return {
        call.name
        for call, repeat in zip(program.calls, repeats(program), strict=True)
        if repeat is None
    }


def training_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> Any:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def test_random_numbers_are_drawn_once_and_changes_of_what_persists_made_once() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(inplace=True),
        torch.nn.Dropout(0.5), torch.nn.Linear(8, 6),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = programs(training_step, model, optimizer, torch.randn(5, 6))
    assert kept(program) == {"aten.bernoulli_.float", "aten.add_.Tensor", "float.neg"}
    changing = [call for call in program.calls if call.name == "aten.relu_.default"]
    assert changing
    (norm,) = [repeat for repeat in repeats(program) if repeat and repeat.first_only]
    names = {program.storages[number].name for number in norm.first_only}
    assert names == {"model[1].running_mean", "model[1].running_var"}
    assert norm.call.mutates == ()
    assert not {slot for slot in norm.call.refs() if program.storage_of(slot) in norm.first_only}


def test_attention_without_dropout_may_run_again_and_with_it_not() -> None:
    def step(query: torch.Tensor, rate: float) -> torch.Tensor:
        query = query.detach().requires_grad_()
        loss = functional.scaled_dot_product_attention(query, query, query, None, rate).sum()
        loss.backward()
        return query.grad

    query = torch.randn(2, 2, 64, 16)
    assert not kept(programs(lambda q: step(q, 0.0), query))
    assert kept(programs(lambda q: step(q, 0.5), query))


def test_what_chooses_among_equals_is_kept() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        values, places = x.topk(2)
        x = x.clone()
        x[places[0]] = x[places[1]]
        return x.sum() + values.sum() + x.sort().values.sum()

    assert kept(programs(step, torch.randn(4, 4))) >= {
        "aten.topk.default", "aten.sort.default", "aten.index_put_.default",
    }  # fmt: skip


@library.custom_op("repeatable::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@library.custom_op("repeatable::drawn", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


drawn.register_fake(torch.empty_like)


@library.custom_op("repeatable::noted", mutates_args=("seen",))
def noted(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    seen.add_(1)
    return x + 1


noted.register_fake(lambda x, seen: torch.empty_like(x))


def test_of_others_operators_pure_ones_alone_may_run_again_and_numbers_are_kept() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        return doubled(x) + drawn(x) + noted(x, x.clone()), x.sum().item()

    names = kept(programs(step, torch.randn(4)))
    assert names >= {
        "repeatable.drawn.default", "repeatable.noted.default", "aten._local_scalar_dense.default",
    }  # fmt: skip
    assert "repeatable.doubled.default" not in names


SHAPES = [(4, 8), (4, 8, 5), (4, 8, 7, 7), (2, 3, 4, 5, 6), (1, 8, 33, 35), (64, 130, 3, 3)]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "permuted": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize(
    "operator", [aten.native_batch_norm.default, aten._native_batch_norm_legit.default]
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batch_norm_without_its_statistics_makes_the_same_bits(
    shape: tuple[int, ...], layout: str, operator: Any
) -> None:
    checked = 0
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    for dtype, of_statistics, affine in product(dtypes, dtypes, [True, False]):
        torch.manual_seed(0)
        channels = shape[1]
        x = LAYOUTS[layout](torch.randn(shape)).to(dtype)
        weight, bias = [torch.randn(channels).to(of_statistics) if affine else None] * 2
        mean, variance = (
            torch.randn(channels).to(of_statistics),
            torch.rand(channels).to(of_statistics),
        )
        given = [x, weight, bias, mean, variance]
        try:
            first = operator(*given, True, 0.1, 1e-5)
        except RuntimeError:
            continue  # no such mixture
        repeat = repeats(_one_norm(operator, given))[0]
        if repeat is None:
            assert (dtype == of_statistics, affine) == (False, False)
            continue
        tensors = [tensor for tensor in given if tensor is not None]
        args = substitute(repeat.call.args, lambda ref: tensors[ref.slot])  # noqa: B023
        kept_mean = mean.clone()
        again = repeat.call.function(*args)
        assert all(_same(one, other) for one, other in zip(first, again, strict=True))
        assert torch.equal(mean, kept_mean)
        checked += 1
    assert checked >= 4


def _one_norm(operator: Any, given: list[torch.Tensor | None]) -> Program:
    """A program of one batch norm of tensors from before the step."""
    program = Program()
    args: list[Any] = []
    for tensor in given:
        args.append(None if tensor is None else Ref(len(program.slots)))
        if tensor is not None:
            program.slots.append(
                TensorMeta(
                    tuple(tensor.shape),
                    tensor.stride(),
                    0,
                    tensor.dtype,
                    tensor.device,
                    len(program.slots),
                )
            )
            program.storages.append(Storage(tensor.untyped_storage().nbytes(), -1, "tensor"))
    changed = tuple(ref.slot for ref in args[3:5])
    call = Call(
        operator, (*args, True, 0.1, 1e-5), {}, (None,) * 3, True, "forward", Source(), changed
    )
    program.calls.append(call)
    return program
