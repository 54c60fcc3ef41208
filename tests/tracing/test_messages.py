# ruff: noqa: G004, UP031, UP032
"""What a step prints and logs: by its plan as eagerly, or refused, and then beside the plan."""

from __future__ import annotations

import contextlib
import datetime
import gc
import io
import logging
import sys
import time
from collections.abc import Callable, Iterator
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import roam
from newer import needs_2_15
from roam import CaptureError

LOGGER: Final = logging.getLogger("of the step's own")
FORM: Final = "%(levelname)s %(message)s [%(funcName)s %(lineno)d %(filename)s]"

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
    my = SimpleNamespace(steps=0, total=0.0, lines=[], form="%.3f", net=net or nn.Linear(4, 3))
    my.optimizer = torch.optim.AdamW(my.net.parameters(), lr=0.1)
    my.scheduler = torch.optim.lr_scheduler.StepLR(my.optimizer, 2, 0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        my.optimizer.zero_grad()
        loss = my.net(x).square().mean()
        loss.backward()
        my.optimizer.step()
        show(my, loss, x)
        return loss

    return step


def shown(
    step: Callable[..., Any], *, times: int = 5, rows: int = 2
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


def several(my: Any, loss: Any, x: Any) -> None:
    print(
        f"loss {loss.item():.3f} "
        f"and {loss.item() ** 2:.3f}",
        f"{'x' * 3}",
        len("abc"),
    )  # fmt: skip


def counted(my: Any, loss: Any, x: Any) -> None:
    my.steps += 1
    my.total += loss.item()
    if my.steps % 2 == 0:
        print(f"[{my.steps:5d}] loss: {my.total / 2:.3f}")
        my.total = 0.0


def scheduled(my: Any, loss: Any, x: Any) -> None:
    my.scheduler.step()
    print(f"rate {my.scheduler.get_last_lr()[0]:.2e}", my.scheduler.get_last_lr())


def one_way(my: Any, loss: Any, x: Any) -> None:
    if loss.item() > 0.3:
        print("large", loss.item())
    else:
        print("small")


def all_gradients(my: Any, loss: Any, x: Any) -> None:
    for name, parameter in my.net.named_parameters():
        print(f"{name}: {parameter.grad.norm():.4f} {parameter.grad.norm().item():.2f}")


def before_and_after(my: Any, loss: Any, x: Any) -> None:
    print(my.net.bias.data)
    with torch.no_grad():
        my.net.bias.mul_(2)
    print(my.net.bias)


def by_way_of_a_function(my: Any, loss: Any, x: Any) -> None:
    def log(value: float) -> None:
        print(f"value {value:.3f}")

    log(loss.item())


def in_a_variable(my: Any, loss: Any, x: Any) -> None:
    text = f"loss {loss.item():.3f}"
    print(text)


def counts(my: Any, loss: Any, x: Any) -> None:
    right = (my.net(x).argmax(1) == 0).sum().item()
    print(f"right {100 * right / len(x):.2f}% ({right}/{len(x)})")


def growing_too(my: Any, loss: Any, x: Any) -> None:
    my.lines.append(loss.item())
    print("a", loss.item())
    LOGGER.info("b %s", loss.item())


def hooks(my: Any, loss: Any, x: Any) -> None:
    hidden = my.net(x)
    hidden.register_hook(lambda gradient: print("gradient", gradient.abs().max().item()))
    hidden.sum().backward()


def again_in_backward(my: Any, loss: Any, x: Any) -> None:
    def part(hidden: torch.Tensor) -> torch.Tensor:
        print("part", hidden.sum())
        return hidden.sin()

    checkpoint(part, my.net(x), use_reentrant=False).sum().backward()


def many_nodes(my: Any, loss: Any, x: Any) -> None:
    x = my.net(x)
    print(x, x.view(-1), x[0], x.T, x @ x.T, functional.gelu(x), x.max(), x.max(1), x.softmax(-1))
    print(x.std(), torch.cdist(x, x), torch.cat([x, x]), x.topk(2), x.requires_grad, x.shape)
    print(functional.cross_entropy(x, torch.tensor([0, 1])), functional.mse_loss(x, x + 1))
    print(x.double() * 10.0**9, torch.stack([x.double()] * 3), torch.arange(3), x > 0, x.bfloat16())
    for width in range(1, 14):
        print(loss.double() * torch.ones(width, dtype=torch.float64) * 10**width)


def caught(my: Any, loss: Any, x: Any) -> None:
    try:
        raise KeyError("x")
    except KeyError:
        LOGGER.exception("bad")
        LOGGER.warning("worse", exc_info=True)


def from_within(my: Any, loss: Any, x: Any) -> None:
    def inner() -> None:
        LOGGER.info("above", stacklevel=2)
        LOGGER.info("here %s", loss.item())

    inner()


def to_a_buffer(my: Any, loss: Any, x: Any) -> None:
    buffer = io.StringIO()
    print("x", file=buffer)
    with contextlib.redirect_stdout(buffer):
        print("y")
    print(buffer.getvalue())


SHOWN: Final[dict[str, Show]] = {
    "text": lambda my, loss, x: print("a step"),
    "nothing": lambda my, loss, x: print(),
    "separator and end": lambda my, loss, x: print("a", loss.item(), sep="-", end="!\n", flush=True),
    "f-string": lambda my, loss, x: print(f"loss {loss.item():.4f}, {loss.item() * 2:>12.3e}|"),
    "number": lambda my, loss, x: print("loss", loss.item(), f"{loss.item()}", loss.item() / 3),
    "rounded": lambda my, loss, x: print(round(loss.item(), 3), f"{round(loss.item(), 2)}"),
    "several lines": several,
    "several values": lambda my, loss, x: print(*[loss.item(), 2]),
    "walrus": lambda my, loss, x: print(number := loss.item(), number),
    "counter": counted,
    "rate": lambda my, loss, x: print(f"rate {my.optimizer.param_groups[0]['lr']:.2e}"),
    "gradients": all_gradients,
    "function": by_way_of_a_function,
    "counts": counts,
    "errors": lambda my, loss, x: print("x", loss.item(), file=sys.stderr),
    "list": growing_too,
    "hook": hooks,
    "vmap": lambda my, loss, x: torch.vmap(lambda row: print(row.shape) or row)(x),
    "buffer": to_a_buffer,
    "logger, f-string": lambda my, loss, x: LOGGER.warning(f"loss {loss.item():.3f}"),
    "logger, off": lambda my, loss, x: LOGGER.debug(f"loss {loss.item():.3f} {loss}", loss),
}  # fmt: skip


@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
def test_as_eagerly(show: Show) -> None:
    assert shown(roam.compile(made(show), python="idle")) == shown(made(show))


def test_of_the_cases_most_print_something() -> None:
    silent = {name for name, show in SHOWN.items() if not "".join(shown(made(show))[:2])}
    assert silent == {"logger, off"}


def deep() -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Linear(4, 32), *(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))]
    return nn.Sequential(*parts, nn.Linear(32, 3))


@pytest.mark.parametrize("options", [{"memory": "80%"}, {"pool": True}], ids=str)
@pytest.mark.parametrize("show", [counted, all_gradients])
def test_with_a_budget_and_a_pool(show: Show, options: Any) -> None:
    planned = shown(roam.compile(made(show, deep()), **options), rows=2048)
    assert planned == shown(made(show, deep()), rows=2048)


def as_a_length(my: Any, loss: Any, x: Any) -> None:
    print(len(f"loss {loss.item()}"))


def looked_at(my: Any, loss: Any, x: Any) -> None:
    text = f"loss {loss.item():.3f}"
    if "0.1" in text:
        print("yes")


def printed_twice(my: Any, loss: Any, x: Any) -> None:
    text = f"loss {loss.item():.3f}"
    print(text)
    print(text)


def found_by_name(my: Any, loss: Any, x: Any) -> None:
    text = f"loss {loss.item():.3f}"
    print(text, "0.1" in locals()["text"])


def closed_over(my: Any, loss: Any, x: Any) -> None:
    text = f"loss {loss.item():.3f}"

    def other() -> bool:
        return "0.1" in text

    print(text, other())


def given_to_a_function(my: Any, loss: Any, x: Any) -> None:
    def log(text: str) -> None:
        print(text if "0.1" in text else "")

    log(f"loss {loss.item():.3f}")


def under_its_own_name(my: Any, loss: Any, x: Any) -> None:
    def print(text: str) -> None:
        my.is_small = "0.1" in text

    print(f"loss {loss.item():.3f}")


def to_another_stream(my: Any, loss: Any, x: Any) -> None:
    buffer = io.StringIO()
    with contextlib.redirect_stdout(buffer):
        print(f"{loss.item():.2f}")
    print("0.1" in buffer.getvalue())


def by_an_own_logger(my: Any, loss: Any, x: Any) -> None:
    found = SimpleNamespace(info=lambda text: my.lines.append(len(text)))
    found.info(f"loss {loss.item():.3f}")


BESIDE: Final[dict[str, Show]] = {
    "length": as_a_length,
    "variable that is looked at": looked_at,
    "variable that is read twice": printed_twice,
    "variable found by its name": found_by_name,
    "variable of a closure": closed_over,
    "function": given_to_a_function,
    "other print": under_its_own_name,
    "other stream": to_another_stream,
    "other logger": by_an_own_logger,
    "method": lambda my, loss, x: print(f"loss {loss.item():.3f}".ljust(30) + "|"),
    "padding": lambda my, loss, x: print(f"{loss.item()!r:>30}|"),
    "str.format": lambda my, loss, x: print("loss {:.4f} {}".format(loss, loss.item())),
    "%.3f": lambda my, loss, x: print("loss %.3f" % loss.item()),
    "%.3f beside plain numbers": lambda my, loss, x: print(
        "%d items, %5.1f%% done, loss=%.4f" % (3, 50.0, loss.item()),
        "%.1f %.1fms %.1f." % (loss.item(), 0.5, loss.item()),
        "%(a).3f %(b)s" % {"a": loss.item(), "b": "x"},
    ),
    "%.3f in a longer text": lambda my, loss, x: print(
        "%.3f" % loss.item() + f" {loss.item():.1f} " + "%.3f" % (loss.item() * 2,) + "|%150.1f" % loss.item()
    ),
    "padding by str.format": lambda my, loss, x: print("{!s:>30}|".format(loss.item())),
    "padding by the operator %, with a key": lambda my, loss, x: print(
        "%(a(b))30s|" % {"a(b)": loss.item()}
    ),
    "padding by the operator %": lambda my, loss, x: print("%30s|" % loss.item()),
    "%.3f, form of a variable": lambda my, loss, x: print(my.form % loss.item()),
    "%.*f": lambda my, loss, x: print("%.*f" % (3, loss.item())),
    "%x": lambda my, loss, x: print("%x" % (x > 0).sum().item()),
    "%.3f that a method changes": lambda my, loss, x: print(("%.3f" % loss.item()).ljust(9)),
    "%.1f of two widths": lambda my, loss, x: print("%5.1f %.1f" % (loss.item(), 0.5)),
    "%.3f beside digits": lambda my, loss, x: print("%.3f0 %.3f" % (loss.item(), 0.5)),
    "%.3f beside another": lambda my, loss, x: print("%.3f%.3f" % (loss.item(), loss.item())),
    "%g of two precisions": lambda my, loss, x: print("%g %.3g" % (loss.item(), 0.5)),
    "f-string in an f-string": lambda my, loss, x: print(f"{f'{loss.item():.3f}'[0]}"),
    "str in an f-string": lambda my, loss, x: print(f"{str(loss.item())[0]}"),
    "map": lambda my, loss, x: print("{:>30}".format(*map(str, [loss.item()]))),
    "ascii": lambda my, loss, x: print(f"{loss.item()!a}"),
    "list": lambda my, loss, x: print(*[f"{loss.item():.2f}", 2]),
    "condition": lambda my, loss, x: print(f"{loss.item()}" if my.net.training else "evaluated"),
    "separator": lambda my, loss, x: print("a", "b", sep=f"{loss.item():.2f}"),
    "key": lambda my, loss, x: print({f"{loss.item():.2f}": 1}),
    "kept": lambda my, loss, x: my.lines.append(f"{loss.item():.2f}"),
    "equality": lambda my, loss, x: print(f"{loss.item():.1f}" == "0.1"),
    "times": lambda my, loss, x: print(f"{loss.item():.1f}" * 2),
    "part": lambda my, loss, x: print(f"{loss.item():.1f}"[-1]),
    "conversions": lambda my, loss, x: print(f"{loss.item()!r} {loss.item()!s} {loss!r} {loss!s}"),
    "computed form": lambda my, loss, x: print(f"{loss.item():{3 * 4}.3f}|"),
    "tensor": lambda my, loss, x: print("loss", loss, loss.detach(), loss.detach() * 2),
    "tensor in f-string": lambda my, loss, x: print(f"loss {loss} {loss:.4f} {my.net.weight}"),
    "parameters": lambda my, loss, x: print(my.net.weight, my.net.weight.grad, my.net.bias.data),
    "containers": lambda my, loss, x: print([loss.item(), 2], {"loss": (1, loss), "none": None}),
    "objects in containers": lambda my, loss, x: print({"net": my.net, "loss": loss.item()}, my.net),
    "str": lambda my, loss, x: print("loss " + str(loss.item()) + "!" + repr(loss) + str([loss.item()])),
    "operator %": lambda my, loss, x: print("loss %s and %s" % (loss.item(), 5)),
    "%.3f of a tensor": lambda my, loss, x: print("%.4f %d" % (loss.detach(), loss.detach() * 9)),
    "%.3f and others": lambda my, loss, x: print(
        "[%d/%d] %.4f, %.3e %g|%5.2f%%|%-9.1f|%+i"
        % (my.steps, 9, loss.item(), loss.item(), 0.5, loss.item(), loss.item(), loss.item() * 99),
        "%(a).3f %(b)s %(a)d %(c(d)).1f" % {"a": loss.item(), "b": "x", "c(d)": loss.item()},
    ),
    "%.3f beside plain values": lambda my, loss, x: print(
        "%.4f%.3f0" % (0.5, loss.item()), "%.3f0%.4f" % (loss.item(), 0.5), "%5s %.1f" % ("a", loss.item()), "%.1f%.1f" % (0.5, loss.item())
    ),
    "branch": one_way,
    "schedule": scheduled,
    "changed in place": before_and_after,
    "variable that is read once": in_a_variable,
    "bools": lambda my, loss, x: print(loss > 0.3, (loss > 0.3).item(), f"{(loss > 0).sum()}"),
    "batch": lambda my, loss, x: print(x.shape, x[0, 0].item(), {"x": x}),
    "state": lambda my, loss, x: print(my.optimizer.state[my.net.weight]["exp_avg"]),
    "checkpoint": again_in_backward,
    "autograd function": lambda my, loss, x: Doubled.apply(my.net(x)).sum().backward(),
    "nodes": many_nodes,
    "logger, tensor": lambda my, loss, x: LOGGER.info("loss %.3f %s", loss.item(), loss.detach()),
    "logger, level": lambda my, loss, x: LOGGER.log(logging.ERROR, "%.3f %d", loss.detach(), 3),
    "logger, names": lambda my, loss, x: LOGGER.info("%(a).3f %(b)s", {"a": loss.item(), "b": 2}),
    "logger, adapter": lambda my, loss, x: logging.LoggerAdapter(LOGGER, {}).info("%s", loss.item()),
    "logger, objects": lambda my, loss, x: LOGGER.info("%s %r %s", my.net, float, loss.item()),
    "logger, error": caught,
    "logger, place": from_within,
}  # fmt: skip
"""Refused, and equal beside the plan."""


def check_refused(show: Show, file: str) -> None:
    """Checks that a step is refused, and that the refusal names a line of a file."""
    with pytest.raises(CaptureError) as caught:
        roam.capture(made(show), torch.ones(2, 4))
    assert caught.value.code in ("value_reached_python", "unknown_number")
    assert f"{file}:" in str(caught.value.source)


def check_beside(show: Show, caplog: pytest.LogCaptureFixture) -> None:
    """Checks that a step whose Python runs beside its plan gives out what it does eagerly."""
    with caplog.at_level(logging.ERROR, "roam"):
        assert shown(roam.compile(made(show), python="auto")) == shown(made(show))


@pytest.mark.parametrize("show", BESIDE.values(), ids=BESIDE)
def test_what_no_plan_repeats_is_refused(show: Show) -> None:
    check_refused(show, "test_messages.py")


@needs_2_15
@pytest.mark.sweep
@pytest.mark.parametrize("show", BESIDE.values(), ids=BESIDE)
def test_beside_the_plan(show: Show, caplog: pytest.LogCaptureFixture) -> None:
    check_beside(show, caplog)


def test_in_a_transform() -> None:
    check_refused(
        lambda my, loss, x: torch.vmap(lambda row: print(row) or row)(x), "test_messages.py"
    )


def timed(my: Any, loss: Any, x: Any) -> None:
    print(f"{time.time() - my.steps:.0f}")


def timed_by_name(my: Any, loss: Any, x: Any) -> None:
    print(f"{perf_counter():.0f}")


def dated(my: Any, loss: Any, x: Any) -> None:
    LOGGER.info(f"{datetime.datetime.now():%H} {loss.item()}")


def stamp() -> str:
    return time.strftime("%Y")


def stamped(my: Any, loss: Any, x: Any) -> None:
    print(stamp(), loss.item())


@pytest.mark.parametrize("show", [timed, timed_by_name, dated, stamped])
def test_the_time_is_refused(show: Show) -> None:
    with pytest.raises(CaptureError, match="clock") as caught:
        shown(roam.compile(made(show), python="idle"))
    assert caught.value.code == "unstable"


def waiting(my: Any, loss: Any, x: Any) -> None:
    time.sleep(0.001)
    print(loss.item())


def timed_in_silence(my: Any, loss: Any, x: Any) -> None:
    time.time()


@pytest.mark.parametrize("show", [waiting, timed_in_silence])
def test_steps_that_show_no_time(show: Show) -> None:
    assert shown(roam.compile(made(show))) == shown(made(show))


def test_what_differs_between_two_traces_is_named() -> None:
    def counted_in_secret(my: Any, loss: Any, x: Any) -> None:
        print(f"object {object()}")

    with pytest.raises(CaptureError, match=r"prints 'object <object object at") as caught:
        shown(roam.compile(made(counted_in_secret), python="idle"))
    assert caught.value.code == "unstable"


def test_the_class_of_a_number_is_not_that_of_its_stand_in() -> None:
    def show(my: Any, loss: Any, x: Any) -> None:
        my.steps += 1
        print(type(my.steps), isinstance(my.steps, int))

    assert shown(roam.compile(made(show))) == shown(made(show))


def test_a_level_that_changes_is_seen() -> None:
    def run(wrap: Callable[..., Any]) -> str:
        step = wrap(made(lambda my, loss, x: LOGGER.info("loss %s", loss.item())))
        found = ""
        for level in (logging.INFO, logging.ERROR, logging.INFO):
            LOGGER.setLevel(level)
            found += shown(step, times=2)[0] + "|"
        return found

    assert run(roam.compile) == run(lambda step: step)


def test_nothing_is_printed_at_capture() -> None:
    step = made(lambda my, loss, x: print(f"loss {loss.item()}"))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        roam.capture(step, torch.ones(2, 4))
    assert out.getvalue() == ""


def test_other_threads_print_meanwhile() -> None:
    import threading

    out = io.StringIO()

    def show(my: Any, loss: Any, x: Any) -> None:
        thread = threading.Thread(target=print, args=("beside",), kwargs={"file": out})
        thread.start()
        thread.join()

    with pytest.raises(CaptureError):
        roam.capture(made(show), torch.ones(2, 4))
    assert set(out.getvalue().split()) <= {"beside"}


def test_an_error_of_a_stream_is_the_users() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    step = roam.compile(made(lambda my, loss, x: print("x")))
    with contextlib.redirect_stdout(Broken()), pytest.raises(BrokenPipeError):
        step(torch.ones(2, 4))


def test_a_capture_of_messages_leaves_nothing_for_the_collector() -> None:
    net = nn.Linear(4, 3)

    @roam.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        print(f"loss {loss.item():.3f} {loss}", loss.item())
        loss.backward()
        net.zero_grad()
        return loss

    shown(step, times=2)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        shown(step, times=2, rows=3)
        gc.collect()
        kinds = {type(value).__name__ for value in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not kinds & {"Recorder", "Messages", "FakeTensor", "Call"}
