"""A plan for several streams as it is run: every operator on its stream, behind the events that the
plan asks for.

That such a plan is safe under every timing is the verifier's to prove; that the text is the plan is
shown here, without a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import roam
from roam.program.ir import Program
from roam.runtime.executor import Executor
from roam.runtime.pool import Pool
from roam.runtime.strategy import choose
from roam.state.references import ArgumentReference
from roam.tracing.step import capture_step
from training import TRAININGS, assert_same_bits

STREAMS = 2


class Recorded:
    """Streams that only keep a record."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.log.append(("enter",))
        yield
        self.log.append(("leave",))

    def switch(self, stream: int) -> None:
        self.log.append(("switch", stream))

    def record(self, event: int) -> None:
        self.log.append(("record", event))

    def wait(self, event: int) -> None:
        self.log.append(("wait", event))

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        assert isinstance(tensor, torch.Tensor)
        self.log.append(("keep", stream))


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_text_is_the_plan(name: str) -> None:
    torch.manual_seed(0)
    training = TRAININGS[name]()
    batch = training.batch(torch.Generator().manual_seed(0))
    arguments = (*training.objects, *batch)
    training.step(*arguments)
    variant = capture_step(training.step, arguments, {}).steady
    (choice,) = choose([variant], pool=True, time_limit_s=None, streams=STREAMS)
    plan, program = choice.plan, choice.program
    assert len(set(plan.streams.tolist())) == STREAMS
    assert plan.syncs
    streams = Recorded()
    executor = Executor(program, choice.placed, plan, pool=Pool.of(variant.device), streams=streams)
    with torch.no_grad(), Pool.of(variant.device).held(plan.pool_bytes):
        executor.run_checked(inputs(program, arguments))
        assert not streams.log
        executor.run(inputs(program, arguments))
    assert (streams.log[0], streams.log[-1]) == (("enter",), ("leave",))
    assert {entry[1] for entry in streams.log if entry[0] == "wait"} == set(range(len(plan.syncs)))

    stream, recorded, waited = 0, {}, {}
    ran_on: dict[int, set[int]] = {}
    for number, line in enumerate(executor.generated.source.splitlines(), 1):
        step = executor.generated.steps[number]
        index = executor.bindings.order[step] if step >= 0 else -1
        told = re.fullmatch(r"    c\d+\.(switch|record|wait|keep)\((?:v\d+, )?(\d+)\)", line)
        if told is None:
            if step >= 0 and not line.endswith("None"):
                ran_on.setdefault(index, set()).add(stream)
                assert plan.streams[index] == stream
                # No operator is enqueued before its waits are.
                assert all(
                    event in waited for event, (_, after) in enumerate(plan.syncs) if after == index
                )
                assert not any(
                    event in recorded
                    for event, (before, _) in enumerate(plan.syncs)
                    if before == index
                )
        elif told[1] == "switch":
            stream = int(told[2])
        elif told[1] == "record":
            recorded[int(told[2])] = stream, index
        elif told[1] == "wait":
            assert int(told[2]) in recorded
            waited[int(told[2])] = stream, index
    assert recorded == {
        event: (plan.streams[before], before) for event, (before, _) in enumerate(plan.syncs)
    }
    assert waited == {
        event: (plan.streams[after], after) for event, (_, after) in enumerate(plan.syncs)
    }
    assert any(1 in streams for streams in ran_on.values())


def test_in_launch_order_the_bits_are_those_of_eager() -> None:
    torch.manual_seed(0)
    training, other = TRAININGS["gpt2"](), TRAININGS["gpt2"]()
    other.model.load_state_dict(training.model.state_dict())
    batch = training.batch(torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    training.step(*training.objects, *batch)
    torch.manual_seed(1)
    other.step(*other.objects, *batch)
    arguments = (*training.objects, *batch)
    variant = capture_step(training.step, arguments, {}).steady
    (choice,) = choose([variant], pool=True, time_limit_s=None, streams=STREAMS)
    executor = Executor(
        choice.program, choice.placed, choice.plan, pool=Pool.of(variant.device), streams=Recorded()
    )
    generator = torch.get_rng_state()
    for run in (executor.run_checked, executor.run):
        with torch.no_grad(), Pool.of(variant.device).held(choice.plan.pool_bytes):
            result, _ = run(inputs(choice.program, arguments))
        planned = torch.get_rng_state()
        torch.set_rng_state(generator)
        eager = other.step(*other.objects, *batch)
        generator = torch.get_rng_state()
        assert torch.equal(generator, planned)
        assert_same_bits(
            [eager.detach()], [next(item for item in result if isinstance(item, torch.Tensor))]
        )
    assert_same_bits(list(other.model.parameters()), list(training.model.parameters()))


def test_streams_are_refused_where_there_are_none() -> None:
    training = TRAININGS["gpt2"]()
    batch = training.batch(torch.Generator().manual_seed(0))
    with pytest.raises(roam.ExecutionError, match="several streams need CUDA") as caught:
        roam.compile(training.step, streams=2)(*training.objects, *batch)
    assert caught.value.code == "streams"
    with pytest.raises(ValueError, match="supports neither pool=False"):
        roam.compile(training.step, streams=2, pool=False)


def inputs(program: Program, arguments: tuple[Any, ...]) -> list[Any]:
    """What a run takes, from where it is found."""
    leaves = pytree.tree_leaves((arguments, {}))
    referenced = [
        leaves[reference.index] if isinstance(reference, ArgumentReference) else reference.get()
        for reference, _ in program.referenced
    ]
    return [*referenced, *(tensor for tensor, _ in program.constants)]
