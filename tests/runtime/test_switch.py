"""`roam.disabled` lets the user's own functions run, here and nowhere else."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import roam
from roam.switch import is_disabled


def test_in_the_block_steps_run_eagerly_and_are_not_planned() -> None:
    step = roam.compile(lambda x: (x * 2).sum())
    x = torch.ones(3)
    with roam.disabled():
        assert step(x) == 6
        with roam.disabled():
            assert step(x) == 6
        assert step(x) == 6
    assert step.plans == []
    assert step(x) == 6
    assert len(step.plans) > 0


def test_an_exception_ends_the_block() -> None:
    with pytest.raises(KeyError), roam.disabled():
        raise KeyError
    assert not is_disabled()


def test_other_threads_and_tasks_go_on_by_plan() -> None:
    inside, outside = threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        inside.wait()
        seen.append(is_disabled())
        with roam.disabled():
            outside.set()
            seen.append(is_disabled())

    thread = threading.Thread(target=other)
    thread.start()
    with roam.disabled():
        inside.set()
        outside.wait()
        assert is_disabled()
    assert not is_disabled()
    thread.join()
    assert seen == [False, True]

    async def task(turn: list[bool]) -> None:
        with roam.disabled():
            await asyncio.sleep(0)
            turn.append(is_disabled())

    async def both() -> list[bool]:
        turn: list[bool] = []
        one = asyncio.ensure_future(task(turn))
        await asyncio.sleep(0)
        turn.append(is_disabled())
        await one
        return turn

    assert sorted(asyncio.run(both())) == [False, True]


def test_graphs_of_torch_compile_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from roam.runtime import backend

    torch._dynamo.reset()
    model = torch.compile(torch.nn.Linear(3, 3), backend="roam")
    x = torch.ones(2, 3)
    with monkeypatch.context() as patch, roam.disabled():
        patch.setattr(backend, "choose", lambda *_, **__: pytest.fail("it is planned"))
        eager = model(x)
        eager.sum().backward()
    assert torch.equal(eager, model(x))


def test_nothing_can_be_compared_in_the_block() -> None:
    with roam.disabled(), pytest.raises(roam.ExecutionError, match=r"roam\.disabled") as caught:
        roam.compare(lambda x: x.sum(), torch.ones(3))
    assert caught.value.code == "disabled"


def test_the_environment_disables_a_whole_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("ROAM_DISABLE", value)
        assert is_disabled() is expected
