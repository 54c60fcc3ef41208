"""Random operators draw the same numbers again from the state that their generator was in, and
leave it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_repeatable import programs
from torch import Tensor, nn

import roam
from roam.program.bits import as_bytes
from roam.program.ir import Call, Program
from roam.program.random_states import EXACT, with_states
from roam.program.repeatable import repeats
from roam.program.replay import Replay, generator_state, with_generator
from roam.torch_compat.private import TorchDispatchMode

aten = torch.ops.aten
CPU = torch.device("cpu")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "permuted": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "odd": lambda x: x.flatten()[1:16],
}
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OPERATORS: list[tuple[Any, Callable[[Tensor], tuple[Any, ...]]]] = [
    (aten.bernoulli_.float, lambda x: (x, 0.3)),
    (aten.bernoulli_.Tensor, lambda x: (x, torch.full(x.shape, 0.3))),
    (aten.bernoulli.default, lambda x: (x.abs().clamp(0, 1),)),
    (aten.bernoulli.p, lambda x: (x, 0.3)),
    (aten.uniform_.default, lambda x: (x, -1.0, 2.0)),
    (aten.normal_.default, lambda x: (x, 1.0, 2.0)),
    (aten.exponential_.default, lambda x: (x,)),
    (aten.cauchy_.default, lambda x: (x,)),
    (aten.log_normal_.default, lambda x: (x,)),
    (aten.geometric_.default, lambda x: (x, 0.4)),
    (aten.random_.default, lambda x: (x,)),
    (getattr(aten.random_, "from"), lambda x: (x, 2, 90)),
    (aten.random_.to, lambda x: (x, 90)),
    (aten.normal.Tensor_Tensor, lambda x: (x, x.abs())),
    (aten.normal.Tensor_float, lambda x: (x, 0.5)),
    (aten.normal.float_Tensor, lambda x: (0.5, x.abs())),
    (aten.rand_like.default, lambda x: (x,)),
    (aten.randn_like.default, lambda x: (x,)),
    (aten.randint_like.default, lambda x: (x, 90)),
    (aten.randint_like.low_dtype, lambda x: (x, -3, 90)),
    (aten.native_dropout.default, lambda x: (x, 0.3, True)),
    (aten.rand.default, lambda x: (list(x.shape),)),
    (aten.randn.default, lambda x: (list(x.shape),)),
    (aten.randint.default, lambda x: (90, list(x.shape))),
    (aten.randint.low, lambda x: (-3, 90, list(x.shape))),
]  # fmt: skip


def same(one: Any, other: Any) -> bool:
    pairs = zip(*((x,) if isinstance(x, Tensor) else x for x in (one, other)), strict=True)
    return all(
        (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        and torch.equal(as_bytes(a), as_bytes(b))
        for a, b in pairs
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("operator", "given"), OPERATORS, ids=[str(op) for op, _ in OPERATORS])
def test_a_state_gives_the_same_bits(
    operator: Any, given: Callable[[Tensor], tuple[Any, ...]], layout: str
) -> None:
    checked = 0
    for dtype in FLOATS:
        for left_over in (0, 1, 3):
            torch.manual_seed(0)
            torch.randn(left_over)  # leaves one of a pair of normal numbers, as a float
            torch.randn(left_over, dtype=torch.float64)
            x = LAYOUTS[layout](torch.rand(24, 20)).to(dtype)
            args = given(x)
            state = generator_state(CPU)
            try:
                first = operator(*(a.clone() if isinstance(a, Tensor) else a for a in args))
            except (RuntimeError, NotImplementedError):
                continue  # there is no such kernel
            after = torch.get_rng_state()
            assert not torch.equal(state, after)
            torch.rand(7)
            torch.randn(3)
            now = torch.get_rng_state()
            copies = (a.clone() if isinstance(a, Tensor) else a for a in args)
            again = Replay(operator, CPU)(*copies, state=state)
            assert same(first, again)
            assert torch.equal(now, torch.get_rng_state())
            checked += 1
    assert checked >= 6


def test_the_number_of_threads_does_not_matter() -> None:
    threads = torch.get_num_threads()
    try:
        for operator, given in OPERATORS:
            state = generator_state(CPU)
            x = torch.rand(600, 200)
            torch.set_num_threads(1)
            first = Replay(operator, CPU)(*given(x.clone()), state=state)
            torch.set_num_threads(3)
            assert same(first, Replay(operator, CPU)(*given(x.clone()), state=state)), operator
    finally:
        torch.set_num_threads(threads)


def test_all_that_is_replayed_is_tried() -> None:
    assert {operator._schema.name for operator, _ in OPERATORS} == EXACT


def test_draws_of_others_meanwhile_change_nothing() -> None:
    class Drawing(TorchDispatchMode):
        """Another thread, so to speak, that draws right before each operator."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            torch.default_generator.manual_seed(9)
            return func(*args, **(kwargs or {}))

    for operator, given in OPERATORS:
        if with_generator(operator) is None:
            continue
        torch.manual_seed(3)
        x = torch.rand(40, 30)
        state = generator_state(CPU)
        first = operator(*given(x.clone()))
        with Drawing():
            again = Replay(operator, CPU)(*given(x.clone()), state=state)
        assert same(first, again), operator


def test_an_operator_without_a_generator_puts_it_back_where_it_fails() -> None:
    operator = aten.native_dropout.default
    assert with_generator(operator) is None
    state = generator_state(CPU)
    x = torch.rand(5)
    now = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="expects p"):
        Replay(operator, CPU)(x, 2.0, True, state=state)
    assert torch.equal(now, torch.get_rng_state())


def test_a_generator_of_the_users_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(4)
    state = generator_state(generator)
    x = torch.empty(400)
    first = aten.uniform_.default(x.clone(), generator=generator)
    now, default = generator.get_state(), torch.get_rng_state()
    again = Replay(aten.uniform_.default, CPU)(x.clone(), generator=generator, state=state)
    assert same(first, again)
    assert torch.equal(now, generator.get_state())
    assert torch.equal(default, torch.get_rng_state())


def reading(program: Program) -> dict[str, int]:
    """Per random call before which the state is read, how many bytes it makes or fills."""
    found = with_states(program)
    calls: list[Call] = [] if found is None else found.program.calls
    storages = program.storages
    return {
        call.name: sum(storages[program.storage_of(slot)].size_bytes for slot in (*call.mutates, *call.outputs) if slot is not None)
        for call in calls
        if call.state is not None
    }  # fmt: skip


def test_states_are_read_where_random_tensors_are_larger_and_stay_in_the_step() -> None:
    weight = torch.ones(60, 60)

    def step(x: Tensor) -> Tensor:
        large = torch.randn_like(x) * 2
        small = torch.rand(9, 9)
        kept = torch.bernoulli(x * 0 + 0.5)
        weight.normal_()
        chosen = torch.multinomial(x.abs() + 1, 40)
        return (large.sum() + small.sum() + chosen.sum() + weight.sum(), kept)

    program = programs(step, torch.rand(60, 60))
    assert reading(program) == {"aten.randn_like.default": 60 * 60 * 4}
    found = with_states(program)
    assert found is not None
    names = [call.name for call in found.program.calls]
    place = names.index("aten.randn_like.default")
    assert names[place - 1] == "roam.generator_state"
    assert names.count("roam.generator_state") == 1
    assert [number for number in found.calls if number >= 0] == list(range(len(program.calls)))
    again = repeats(found.program)[place]
    assert again is not None
    assert again.call.refs()[-1] == found.program.calls[place].state
    assert again.call.name == "aten.randn_like.default"
    assert not again.call.random


def test_a_program_without_random_tensors_stays_as_it_is() -> None:
    program = programs(lambda x: (x * 2).sum(), torch.rand(60, 60))
    assert with_states(program) is None


def dropping() -> tuple[Any, ...]:
    model = nn.Sequential(
        *[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Dropout(0.2))]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer, torch.rand(512, 32)


def test_a_graph_has_states_only_where_they_are_asked_for() -> None:
    plain, reading = (roam.capture(*dropping(), random_states=states) for states in (False, True))
    assert plain.num_operators + 4 == reading.num_operators
    assert not any("generator_state" in operator.name for operator in plain.operators)
    masks = [operator for operator in reading.operators if operator.name == "aten.bernoulli_.float"]
    assert all(mask.repeatable and mask.sequence == "random" for mask in masks)
    assert len(masks) == 4
