"""What signal handlers and other threads do while a step is captured: nothing of it is lost."""

from __future__ import annotations

import functools
import os
import queue
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import pytest
import torch

import roam

pytestmark = pytest.mark.usefixtures("one_thread")


class Trainer:
    """A script's trainer, whose step asks another thread to do something at once."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.ask = ask
        self.should_stop = False

    def train(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        self.ask()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


@contextmanager
def beside(act: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Gives a function that has another thread, which exists already, act, and waits for it."""
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def serve() -> None:
        while asked.get():
            act()
            done.put(None)

    def ask() -> None:
        asked.put(True)
        done.get()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield ask
    finally:
        asked.put(False)
        thread.join()


@contextmanager
def handling(number: int, handler: Callable[[int, Any], None]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        assert signal.signal(number, before) is handler


def test_handlers_of_signals_run_after_the_capture_and_once_for_each_signal() -> None:
    sent, handled = [], []

    def send() -> None:
        sent.append(None)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)

    def stop(number: int, _: Any) -> None:
        handled.append((number, len(sent), torch.is_grad_enabled(), trainer.model.weight))
        trainer.should_stop = True

    x = torch.ones(3, 4)
    with beside(send) as ask, handling(signal.SIGTERM, stop), handling(signal.SIGUSR1, stop):
        trainer = Trainer(ask)
        weight = trainer.model.weight
        roam.compile(trainer.train)(x)
    assert trainer.should_stop
    traces = len(sent)
    assert len(handled) == 2 * traces
    assert all(seen[1:] == (traces, True, weight) for seen in handled)


def test_a_handler_that_raises_ends_the_call_and_the_others_run_all_the_same() -> None:
    handled = []

    def stop(*_: Any) -> None:
        raise SystemExit(3)

    def note(*_: Any) -> None:
        handled.append(None)

    def send() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)

    x = torch.ones(3, 4)
    with handling(signal.SIGTERM, stop), handling(signal.SIGUSR1, note), beside(send) as ask:
        trainer = Trainer(ask)
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        with pytest.raises(SystemExit):
            roam.compile(trainer.train)(x)
    assert handled
    assert all(map(torch.equal, trainer.model.parameters(), before))


class Feeding(Trainer):
    """A trainer to whom another thread brings batches, and tells how things go."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__(ask)
        self.batches: queue.Queue[Any] = queue.Queue()
        self.batches.put((0, torch.zeros(3, 4)))
        self.seen: list[Any] = [torch.zeros(2)]
        self.pairs = {"first": (1, torch.ones(1)), "second": torch.ones(2)}
        self.steps = 0
        self.scale = 1.0

    def train(self, x: torch.Tensor) -> torch.Tensor:
        return super().train(x * self.scale)


def test_what_another_thread_writes_where_the_step_does_not_look_stays() -> None:
    count = 0

    def feed() -> None:
        nonlocal count
        count += 1
        trainer.batches.put((count, torch.full((3, 4), float(count))))
        trainer.seen.append(count)
        trainer.pairs[str(count)] = (count, torch.full((2,), float(count)))
        trainer.should_stop = True
        trainer.steps = count

    with beside(feed) as ask:
        trainer = Feeding(ask)
        seen, pair = trainer.seen[0], trainer.pairs["first"]
        step = roam.compile(trainer.train)
        for _ in range(2):
            step(torch.ones(3, 4))
    assert count > 1
    assert trainer.should_stop
    assert trainer.steps == count
    assert trainer.seen == [seen, *range(1, count + 1)]
    assert trainer.pairs["first"] is pair
    assert list(trainer.pairs) == ["first", "second", *map(str, range(1, count + 1))]
    batches = [trainer.batches.get_nowait() for _ in range(count + 1)]
    assert [number for number, _ in batches] == list(range(count + 1))
    assert all(type(batch) is torch.Tensor for _, batch in batches)
    assert all(torch.equal(batch, torch.full((3, 4), float(n))) for n, batch in batches)


def test_a_generator_from_which_another_thread_draws_goes_on_where_the_step_does_not_look() -> None:
    drawn = []

    def draw() -> None:
        drawn.append((trainer.source.random(), float(trainer.array_source.random())))

    with beside(draw) as ask:
        trainer: Any = Feeding(ask)
        trainer.source, trainer.array_source = random.Random(3), numpy.random.default_rng(3)
        roam.compile(trainer.train)(torch.ones(3, 4))
    one, other = random.Random(3), numpy.random.default_rng(3)
    assert drawn == [(one.random(), float(other.random())) for _ in drawn]
    assert len(drawn) > 1


def test_batches_that_another_thread_takes_meanwhile_do_not_come_back() -> None:
    taken = []

    def take() -> None:
        if trainer.batches.qsize() > 1:
            taken.append(trainer.batches.get()[0])

    with beside(take) as ask:
        trainer = Feeding(ask)
        put = [(n, torch.full((3, 4), float(n))) for n in range(1, 30)]
        for batch in put:
            trainer.batches.put(batch)
        roam.compile(trainer.train)(torch.ones(3, 4))
    assert taken == list(range(len(taken))) != []
    left = [trainer.batches.get_nowait() for _ in range(30 - len(taken))]
    assert all(one is other for one, other in zip(left, put[len(taken) - 1 :], strict=True))


def test_an_attribute_that_the_step_has_read_and_another_thread_changes_is_read_anew() -> None:
    changes = [2.0, 3.0]

    def change() -> None:
        if changes:
            trainer.scale = changes.pop(0)

    x = torch.ones(3, 4)
    with beside(change) as ask:
        trainer = Feeding(ask)
        copy = Feeding(lambda: None)
        copy.model.load_state_dict(trainer.model.state_dict())
        copy.scale = 3.0
        loss = roam.compile(trainer.train)(x)
        expected = copy.train(x)
    assert trainer.scale == 3.0
    assert not changes
    assert torch.equal(loss, expected)
    assert all(map(torch.equal, trainer.model.parameters(), copy.model.parameters()))


def test_an_attribute_that_another_thread_changes_all_the_time_is_refused() -> None:
    count = 0

    def change() -> None:
        nonlocal count
        count += 1
        trainer.scale = float(count)

    with beside(change) as ask:
        trainer = Feeding(ask)
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        with pytest.raises(
            roam.CaptureError, match=r"another thread changes self\.scale"
        ) as caught:
            roam.compile(trainer.train)(torch.ones(3, 4))
    assert caught.value.code == "moved"
    assert trainer.scale == count
    assert all(map(torch.equal, trainer.model.parameters(), before))


class Changing(Feeding):
    """A trainer whose step changes what it looks at itself."""

    @functools.cached_property
    def factor(self) -> list[Any]:
        return [2.0]

    def train(self, x: torch.Tensor) -> torch.Tensor:
        self.change()
        return super().train(x)

    def change(self) -> None:
        raise NotImplementedError


class Appends(Changing):
    def change(self) -> None:
        self.seen.append(1)


class Puts(Changing):
    def change(self) -> None:
        self.batches.put(None)


class Sets(Changing):
    def change(self) -> None:
        self.note = [self.steps]


class Deletes(Changing):
    def change(self) -> None:
        del self.pairs


class Renews(Changing):
    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__(ask)
        self.alias = self.seen
        self.one = (self.seen[0],)

    def change(self) -> None:
        self.seen = [self.alias[0] + self.one[0]]


class Caches(Changing):
    def change(self) -> None:
        self.seen.append(self.factor)


class Draws(Changing):
    source: Any = None

    def change(self) -> None:
        self.seen.append(self.source.random())


class SetsBehind(Changing):
    def change(self) -> None:
        vars(self)["steps"] = [5]


@pytest.mark.parametrize("kind", [Appends, Puts, Sets, Deletes, Renews, Caches, Draws, SetsBehind])
def test_what_the_step_itself_changes_is_put_back_while_other_threads_run(
    kind: type[Changing],
) -> None:
    with beside(lambda: None) as ask:
        trainer = kind(ask)
        trainer.source = source = random.Random(3)  # type: ignore[attr-defined]
        state = source.getstate()
        before = dict(vars(trainer))
        held = list(trainer.seen), list(trainer.batches.queue), dict(trainer.pairs)
        with suppress(roam.CaptureError):
            roam.capture(trainer.train, torch.ones(3, 4))
        assert source.getstate() == state
        assert list(vars(trainer)) == list(before)
        assert all(value is before[name] for name, value in vars(trainer).items())
        now = list(trainer.seen), list(trainer.batches.queue), dict(trainer.pairs)
        assert list(now[2]) == list(held[2])
        assert all(
            one is other
            for found, expected in zip(now[:2], held[:2], strict=True)
            for one, other in zip(found, expected, strict=True)
        )
        assert all(now[2][name] is value for name, value in held[2].items())
