"""Calls of packages that tell people about a run: no plan repeats them."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam


def steps_with(report: Callable[[Any], Any], python: Any, calls: int = 5) -> Any:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()
        report(loss)
        return loss.detach()

    step = roam.compile(train_step, python=python)
    for _ in range(calls):
        step(torch.rand(4))
    return step


def _rows() -> tuple[Callable[[Any], Any], Callable[[], int]]:
    text = io.StringIO()
    writer = csv.writer(text)
    return lambda _: writer.writerow([1]), lambda: len(text.getvalue().split())


def _bar() -> tuple[Callable[[Any], Any], Callable[[], int]]:
    tqdm = pytest.importorskip("tqdm").tqdm
    bar = tqdm(total=9, file=io.StringIO())
    return lambda _: bar.update(), lambda: bar.n


@pytest.mark.parametrize("make", [_rows, _bar])
def test_each_call_reports_once(make: Any) -> None:
    report, count = make()
    step = steps_with(report, "auto")
    assert count() == 5
    assert step.plans


@pytest.mark.parametrize("make", [_rows, _bar])
def test_a_plan_alone_is_refused_before_anything_is_reported(make: Any) -> None:
    report, count = make()
    with pytest.raises(roam.CaptureError, match=r"test_reporters.py:\d+.*calls \w") as refusal:
        steps_with(report, "idle")
    assert refusal.value.code == "moved"
    assert count() == 0


def test_a_method_of_a_class_reports_at_each_call(capsys: Any) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    steps_with(lambda _: tqdm.write("line"), "auto")
    assert capsys.readouterr().out == "line\n" * 5


def test_a_bar_that_is_there_and_not_used_costs_nothing() -> None:
    _, count = _bar()
    bar = pytest.importorskip("tqdm").tqdm(total=9, file=io.StringIO())
    step = steps_with(lambda _: bool(bar), "idle")
    assert len(step.plans) == 1
    assert (bar.n, count()) == (0, 0)
