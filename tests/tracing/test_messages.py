"""What a step prints and logs: beside its plan as eagerly; a plan alone is refused."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import pprint
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import roam
from newer import needs_2_15
from roam import CaptureError

LOGGER: Final = logging.getLogger("of the step's own")
FORM: Final = "%(levelname)s %(message)s [%(funcName)s %(lineno)d %(filename)s]"
FLUSHING: Final = functools.partial(print, flush=True)

Show = Callable[[Any, torch.Tensor, torch.Tensor], object]


@pytest.fixture(autouse=True)
def of_its_own() -> Iterator[None]:
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    yield
    LOGGER.handlers.clear()


class Doubled(torch.autograd.Function):
    """Prints in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        print("forward", x.mean())
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        print(f"backward {gradient.mean():.4f}")
        return gradient * 2


def made(show: Show, net: Any = None) -> Any:
    torch.manual_seed(0)
    my = SimpleNamespace(steps=0, total=0.0, lines=[], net=net or nn.Linear(4, 3))
    my.optimizer = torch.optim.AdamW(my.net.parameters(), lr=0.1)
    my.scheduler = torch.optim.lr_scheduler.StepLR(my.optimizer, 2, 0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        my.steps += 1
        my.optimizer.zero_grad()
        loss = my.net(x).square().mean()
        loss.backward()
        my.optimizer.step()
        show(my, loss, x)
        return loss

    return step


def shown(
    step: Callable[..., Any], *, times: int = 6, rows: int = 2
) -> tuple[str, str, list[float]]:
    """What a step gives out, to standard output, with what its logger does, and to standard errors;
    and what it returns.
    """
    out, errors = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter(FORM))
    LOGGER.handlers = [handler]
    batches = torch.Generator().manual_seed(1)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        losses = [step(torch.randn(rows, 4, generator=batches)).item() for _ in range(times)]
    return out.getvalue(), errors.getvalue(), losses


def texts(my: Any, loss: Any, x: Any) -> None:
    print(f"loss {loss.item():.4f}, {loss.item()!r:>30}|", f"{loss} {my.net.weight}", sep="-")
    print("{:.4f} {}".format(loss, loss.item()), "%5.1f%%" % loss.item(), len(f"{loss.item()}"))  # noqa: UP031, UP032


def values(my: Any, loss: Any, x: Any) -> None:
    print([loss.item(), 2], {"loss": (1, loss)}, loss > 0.3, my.net, x.max(1), loss.item() / 3)
    print("state", my.optimizer.state[my.net.weight]["exp_avg"], file=sys.stderr)


def in_the_end(my: Any, loss: Any, x: Any) -> None:
    my.total += loss.item()
    if my.steps % 3 == 0:
        print(f"[{my.steps:5d}] loss: {my.total / 3:.3f}")
        my.total = 0.0


def at_a_rate(my: Any, loss: Any, x: Any) -> None:
    if my.steps % 3 == 0:
        print("three more")


def scheduled(my: Any, loss: Any, x: Any) -> None:
    my.scheduler.step()
    print(f"rate {my.scheduler.get_last_lr()[0]:.2e}", time.time() > 0)


def one_way(my: Any, loss: Any, x: Any) -> None:
    if loss.item() > 0.3:
        print("large", loss.item())


def all_gradients(my: Any, loss: Any, x: Any) -> None:
    for name, parameter in my.net.named_parameters():
        print(f"{name}: {parameter.grad.norm():.4f} {parameter.grad.norm().item():.2f}")


def before_and_after(my: Any, loss: Any, x: Any) -> None:
    print(my.net.bias.data)
    with torch.no_grad():
        my.net.bias.mul_(2)
    print(my.net.bias)


def kept_too(my: Any, loss: Any, x: Any) -> None:
    my.lines.append(f"{loss.item():.2f}")
    print(my.lines)


def in_the_backward_pass(my: Any, loss: Any, x: Any) -> None:
    hidden = my.net(x)
    hidden.register_hook(lambda gradient: print("gradient", gradient.abs().max().item()))
    Doubled.apply(hidden).sum().backward()


def again_in_backward(my: Any, loss: Any, x: Any) -> None:
    def part(hidden: torch.Tensor) -> torch.Tensor:
        print("part", hidden.sum())
        return hidden.sin()

    checkpoint(part, my.net(x), use_reentrant=False).sum().backward()


def to_a_buffer(my: Any, loss: Any, x: Any) -> None:
    buffer = io.StringIO()
    print("x", file=buffer)
    with contextlib.redirect_stdout(buffer):
        print("y")
    print(buffer.getvalue())


def written(my: Any, loss: Any, x: Any) -> None:
    sys.stdout.write("a\n")
    sys.stderr.writelines(["b\n"])


def by_other_names(my: Any, loss: Any, x: Any, show: Any = print) -> None:
    show("a", 1, sep="-")
    FLUSHING("b")


def caught(my: Any, loss: Any, x: Any) -> None:
    try:
        raise KeyError("x")
    except KeyError:
        LOGGER.exception("bad")
        LOGGER.warning("worse", exc_info=True)


def logged(my: Any, loss: Any, x: Any) -> None:
    LOGGER.warning(f"loss {loss.item():.3f}")  # noqa: G004
    LOGGER.info("%(a).3f %(b)s", {"a": loss.item(), "b": loss.detach()}, stacklevel=2)
    logging.LoggerAdapter(LOGGER, {}).log(logging.ERROR, "%s", loss.item())


SHOWN: Final[dict[str, Show]] = {
    "nothing": lambda my, loss, x: print(),
    "pretty": lambda my, loss, x: pprint.pprint({"c": list(range(50))}),
    "traceback": lambda my, loss, x: traceback.print_stack(limit=1),
    "vmap": lambda my, loss, x: torch.vmap(lambda row: print(row.shape) or row)(x),
    "record": lambda my, loss, x: LOGGER.handle(logging.makeLogRecord({"msg": "x", "levelno": logging.WARNING})),
    **{
        show.__name__: show
        for show in (
            texts, values, in_the_end, at_a_rate, scheduled, one_way, all_gradients, before_and_after, kept_too,
            in_the_backward_pass, again_in_backward, to_a_buffer, written, by_other_names, caught, logged,
        )
    },
}  # fmt: skip


@needs_2_15
@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
def test_as_eagerly(show: Show, caplog: pytest.LogCaptureFixture) -> None:
    expected = shown(made(show))
    assert "".join(expected[:2])
    with caplog.at_level(logging.ERROR, "roam"):
        step = roam.compile(made(show), python="auto")
        assert shown(step) == expected
    assert step.runs_beside


@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
def test_a_plan_alone_is_refused_before_anything_is_shown(show: Show) -> None:
    step = roam.compile(made(show), python="idle")
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        pytest.raises(CaptureError) as refusal,
    ):
        deque(map(step, [torch.ones(2, 4)] * 6))
    assert refusal.value.code in ("moved", "value_reached_python")
    assert "test_messages.py:" in str(refusal.value)
    assert out.getvalue() == ""
    assert "write" not in vars(out)


@needs_2_15
@pytest.mark.parametrize("options", [{"memory": "80%"}, {"pool": True}], ids=str)
def test_with_a_budget_and_a_pool(options: Any) -> None:
    def deep() -> nn.Module:
        torch.manual_seed(0)
        parts = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))
        return nn.Sequential(nn.Linear(4, 32), *parts, nn.Linear(32, 3))

    step = roam.compile(made(all_gradients, deep()), python="auto", **options)
    assert shown(step, rows=2048) == shown(made(all_gradients, deep()), rows=2048)


@pytest.mark.parametrize("python", ["idle", "auto"])
def test_loggers_that_are_off_cost_nothing(python: Any) -> None:
    def show(my: Any, loss: Any, x: Any) -> None:
        LOGGER.debug("loss %s", loss)

    step = roam.compile(made(show), python=python)
    assert shown(step) == shown(made(show))
    assert not step.runs_beside


@needs_2_15
def test_a_level_that_changes_is_seen() -> None:
    def run(wrap: Callable[..., Any]) -> str:
        name = f"{LOGGER.name}.child"
        step = wrap(made(lambda my, loss, x: logging.getLogger(name).info("loss")))
        found = ""
        for level in (logging.ERROR, logging.INFO, logging.ERROR):
            logging.getLogger(name).setLevel(level)
            found += shown(step, times=3)[0] + "|"
        return found

    expected = run(lambda step: step)
    assert expected.count("loss") == 3
    assert run(functools.partial(roam.compile, python="auto")) == expected


def test_what_libraries_print_at_capture_is_no_refusal() -> None:
    names: Any = {"__name__": "torch.of_a_test"}
    code = compile("def report():\n    print('from a library')", torch.__file__, "exec")
    exec(code, names)
    step = roam.compile(made(lambda my, loss, x: names["report"]()), python="idle")
    assert "from a library" in shown(step)[0]


def test_other_threads_print_meanwhile() -> None:
    out = io.StringIO()

    def show(my: Any, loss: Any, x: Any) -> None:
        thread = threading.Thread(target=print, args=("beside",), kwargs={"file": out})
        thread.start()
        thread.join()

    with pytest.raises(CaptureError):
        roam.capture(made(show), torch.ones(2, 4))
    assert set(out.getvalue().split()) <= {"beside"}


@needs_2_15
def test_an_error_of_a_stream_is_the_users() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    step = roam.compile(made(lambda my, loss, x: print("x")), python="auto")
    with contextlib.redirect_stdout(Broken()), pytest.raises(BrokenPipeError):
        step(torch.ones(2, 4))
