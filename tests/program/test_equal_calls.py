"""Equal operators run once where the plan takes no more for it, and notes name other waste."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roam
from roam.program.equal_calls import merged
from roam.tracing.step import capture_step
from training import assert_same_bits, tensors_and_numbers

functional = torch.nn.functional
ROWS, CLASSES = 24, 500
Form = Callable[[torch.Tensor, torch.Tensor], Any]


def made() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, CLASSES, bias=False)
    x, labels = torch.randn(2, ROWS, 8), torch.randint(CLASSES, (2, ROWS))
    return model, torch.optim.AdamW(model.parameters()), x, labels


def step_of(form: Form) -> Callable[..., Any]:
    """A step of that calculation from logits and labels, whose first result is the loss."""

    def train_step(model: Any, optimizer: Any, x: torch.Tensor, labels: torch.Tensor) -> Any:
        optimizer.zero_grad()
        results = form(model(x), labels)
        results[0].backward()
        optimizer.step()
        return results

    return train_step


def trained(step: Callable[..., Any]) -> list[Any]:
    model, optimizer, x, labels = made()
    results = [step(model, optimizer, x * scale, labels) for scale in (1, 2, 3)]
    return tensors_and_numbers([results, model.state_dict(), optimizer.state_dict()])


def run(form: Form) -> tuple[roam.Step, Counter[str]]:
    """The step, which has left eager PyTorch's bits, and how often its plan runs each operator."""
    step = roam.compile(step_of(form))
    assert_same_bits(trained(step_of(form)), trained(step))
    program = step._captures[0].runners[-1].choice.program
    return step, Counter(call.name for call in program.calls)


def loss_of(shifted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(shifted.reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def test_copies_that_are_made_again_cost_nothing() -> None:
    def once(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        shifted = logits[:, :-1].contiguous()
        loss = loss_of(shifted, labels)
        with torch.no_grad():
            hit = (shifted.argmax(-1) == labels[:, 1:]).float().mean()
            log = functional.log_softmax(shifted, -1)
            return loss, hit, (log.exp() * log).sum()

    def each_time(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = loss_of(logits[:, :-1].contiguous(), labels)
        with torch.no_grad():
            hit = (logits[:, :-1].contiguous().argmax(-1) == labels[:, 1:]).float().mean()
            log = functional.log_softmax(logits[:, :-1].contiguous(), -1)
            logits.exp().sum()
            return loss, hit, (log.exp() * log).sum()

    least, fewest = run(once)
    step, calls = run(each_time)
    assert calls == fewest
    assert step.memory().total_bytes <= least.memory().total_bytes
    graph = roam.capture(step_of(each_time), *made())
    assert graph.num_operators > calls.total(), "the graph says what eager PyTorch does"


def test_what_would_live_longer_is_made_again() -> None:
    """If the sine were made once, it would lie beside the largest tensors of the step."""

    def form(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        with torch.no_grad():
            first = logits.sin().sum()
            scale = (logits.repeat(16, 1, 1) + first).square().sum()
            second = (logits.sin() * scale).sum()
        return loss_of(logits[:, :-1], labels), first, second

    captured = capture_step(step_of(form), made(), {}).steady
    assert captured is not None
    assert len(merged(captured.program).calls) < len(captured.program.calls)
    _, calls = run(form)
    assert calls["aten.sin.default"] == 2


def written_between(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    work = logits.detach().clone()
    first = work.exp().sum()
    work.add_(1)
    return loss_of(logits[:, :-1], labels), first, work.exp().sum()


def written_after(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    first, second = logits.detach().exp(), logits.detach().exp()
    first.mul_(2)
    return loss_of(logits[:, :-1], labels), first.sum(), second.sum()


def drawn(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    first, second = (functional.dropout(logits, 0.5) for _ in range(2))
    return loss_of(first[:, :-1], labels), second.sum()


def returned(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    first, second = logits.detach().exp(), logits.detach().exp()
    return loss_of(logits[:, :-1], labels), first, second


def other_arguments(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    first, second = logits.detach() * 2.0, logits.detach() * -0.0
    third, fourth = logits.detach() * 0.0, logits.detach() * 2
    sums = [part.sum() for part in (first, second, third, fourth)]
    return loss_of(logits[:, :-1], labels), *sums


def seen_otherwise(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    plain = logits.detach()
    turned = plain.transpose(0, 1)
    return loss_of(logits[:, :-1], labels), plain.exp()[0].sum(), turned.exp()[0].sum()


KEPT: dict[Form, tuple[str, int]] = {
    written_between: ("aten.exp.default", 2),
    written_after: ("aten.exp.default", 2),
    drawn: ("aten.bernoulli_.float", 2),
    returned: ("aten.exp.default", 2),
    seen_otherwise: ("aten.exp.default", 2),
}


@pytest.mark.parametrize("form", [*KEPT, other_arguments], ids=lambda form: form.__name__)
def test_others_run_each_time(form: Form) -> None:
    step, calls = run(form)
    name, count = KEPT.get(form, ("aten.mul.Tensor", 0))
    assert calls[name] >= count
    model, optimizer, x, labels = made()
    results = step(model, optimizer, x, labels)
    places = [result.data_ptr() for result in results]
    assert len(set(places)) == len(places), "each result has its own memory"


def test_a_draw_is_no_equal_of_another() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sort().values + x.sort().values + torch.rand_like(x) + torch.rand_like(x)

    captured = capture_step(step, (torch.randn(8),), {}).steady
    assert captured is not None
    assert merged(captured.program) is captured.program


def test_notes_name_what_no_plan_leaves_out() -> None:
    def form(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        twice = logits[:, :-1].contiguous().double().float()
        return loss_of(twice, labels) + 0.0 * logits.sum() + logits.mean() * 2, labels

    captured = capture_step(step_of(form), made(), {}).steady
    assert captured is not None
    notes = dict(captured.notes)
    assert notes["times zero"].startswith("1 products with 0: ")
    assert notes["copied twice"].startswith("2 copies that only another copy reads: ")
    assert "test_equal_calls.py" in notes["times zero"]


def test_notes_of_a_step_without_waste_name_none() -> None:
    def form(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return loss_of(logits[:, :-1].contiguous(), labels), labels

    captured = capture_step(step_of(form), made(), {}).steady
    assert captured is not None
    assert not dict(captured.notes).keys() & {"times zero", "copied twice"}
