"""What signal handlers and other threads do while a step is captured: nothing of it is lost."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
