"""Programs in which calls run more than once: the planner's graph of one is that of its sequence,
and whatever outlives the step is what it is without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from replays import all_again, at_random, extra_runs
from roam.kernels.calls import copyable_calls
from roam.program.lower import Lowering
from roam.runtime.runner import Runner
from training import TRAININGS, Training, plain_step

CPU = torch.device("cpu")


def small() -> Training:
    """In-place chains, views, batch norm, dropout."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(4, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Hardtanh(inplace=True),
        torch.nn.Dropout(0.3), torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 6, 3),
    )  # fmt: skip

    def batch(g: torch.Generator) -> tuple[Any, ...]:
        return torch.randn(2, 3, 10, 10, generator=g), torch.randint(0, 3, (2,), generator=g)

    return Training(plain_step, (model.train(), torch.optim.AdamW(model.parameters())), batch)


MAKERS: dict[str, Callable[[], Training]] = {**TRAININGS, "small": small}


@functools.cache
def lowerings(name: str) -> list[Lowering]:
    """Of the first step and of later ones."""
    training = MAKERS[name]()
    step = roam.compile(training.step, pool=False)
    step(*training.objects, *training.batch(torch.Generator().manual_seed(2)))
    runners: list[Runner] = step._captures[0].runners
    return [
        Lowering(
            runner.choice.program,
            runner.choice.placed,
            name=name,
            device="cpu",
            workspaces=dict.fromkeys(range(0, len(runner.choice.program.calls), 3), 512),
        )
        for runner in runners
    ]


SEQUENCES: dict[str, Callable[[Lowering], list[int]]] = {
    "program order": lambda lowering: list(range(len(lowering.operators))),
    "all": all_again,
    "few": functools.partial(at_random, seed=1, share=0.02),
    "many": functools.partial(at_random, seed=2, share=0.2),
}


@pytest.mark.sweep
@pytest.mark.parametrize("how", SEQUENCES)
@pytest.mark.parametrize("name", MAKERS)
def test_the_graph_of_a_program_by_a_sequence_is_the_sequences(name: str, how: str) -> None:
    for lowering in lowerings(name):
        sequence = SEQUENCES[how](lowering)
        assert bool(extra_runs(lowering, sequence)) is (how != "program order")
        expanded = lowering.expanded(sequence)
        copyable = frozenset(copyable_calls(lowering.program, lowering.placed, CPU))  # type: ignore[arg-type]
        ways: list[dict[str, Any]] = [
            {}, {"pool": False}, {"copied_in": copyable}, {"copied_in": frozenset(sorted(copyable)[::2])},
        ]  # fmt: skip
        for way in ways:
            again = dict(way)
            if "copied_in" in way:
                again["copied_in"] = expanded.places(way["copied_in"])
            graph = lowering.graph(**way).expanded(sequence)
            assert expanded.graph(**again).digest == graph.digest


@pytest.mark.parametrize("name", MAKERS)
def test_chains_views_and_norms_are_among_them(name: str) -> None:
    lowering = lowerings(name)[-1]
    runs = extra_runs(lowering, SEQUENCES["all"](lowering))
    names = {call.name for call in runs}
    assert any(call.mutates for call in runs) is (name not in ("bert", "gpt2"))
    assert not names & {"aten.bernoulli_.float"}
    assert ("aten.native_batch_norm.default" in names) is (name not in ("bert", "gpt2"))
    assert names & {"aten.view.default", "aten.detach.default", "aten.t.default"}


def test_what_leaves_and_what_persists_is_the_first_runs() -> None:
    lowering = lowerings("small")[-1]
    program = lowering.program
    expanded = lowering.expanded(SEQUENCES["many"](lowering)).program
    assert expanded.referenced is program.referenced
    assert expanded.outgoing() == program.outgoing()
    assert expanded.leaving() == program.leaving()
    slots = len(program.slots)
    assert [expanded.slots[slot] for slot in expanded.outgoing()] == [
        program.slots[slot] for slot in program.outgoing()
    ]
    assert len(expanded.slots) > slots
    persistent = {number for number, storage in enumerate(program.storages) if storage.creator < 0}
    assert persistent == {
        number for number, storage in enumerate(expanded.storages) if storage.creator < 0
    }
    # Further runs leave what persists alone.
    seen: set[int] = set()
    for index, call in zip(SEQUENCES["many"](lowering), expanded.calls, strict=True):
        if index in seen:
            assert persistent.isdisjoint(map(expanded.storage_of, call.mutates))
        seen.add(index)
