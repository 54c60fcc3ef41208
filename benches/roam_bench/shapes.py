"""What sequence lengths in random order cost a compiled step, beside eager PyTorch: `roam bench
shapes`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from roam_bench.results import BenchError, Record, Row, Task, row_of_process
from roam_bench.run import Benchmark, Column, Table

if TYPE_CHECKING:
    from roam.runtime.timings import Timings

LAYERS = (2, 8)
"""Of the small models; GPT-2 small comes last."""
SMALL = 12
_WIDTHS = {SMALL: (768, 12, 50257)}
"""(channels, heads, tokens) by layers; a small model has 64, 4 and 500."""
_STAGES = ("capture", "kernels", "plan", "first_run")
_SHORTEST, _FURTHER = 16, 4
_ASKED = 50


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """One row for each number of layers."""
    if arguments.steps <= arguments.lengths:
        raise BenchError(
            f"shapes: --steps {arguments.steps} is too few: the first step of each of {arguments.lengths} lengths is not timed; pass more steps than lengths"
        )
    layers = tuple(arguments.layers) or (*LAYERS, SMALL)
    tasks = [
        Task({"layers": number}, partial(_measure, number, arguments.lengths, arguments.steps))
        for number in layers
    ]
    settings = {"layers": list(layers), "lengths": arguments.lengths, "steps": arguments.steps}
    return Benchmark("shapes", settings, tasks, _COLUMNS)


def _measure(*numbers: int) -> Row:
    return row_of_process(f"shapes, {numbers[0]} layers", __name__, *numbers)


def rows_table(record: Record) -> Table:
    """Every model."""
    return Table("Many shapes", _COLUMNS, record["rows"])


def _seconds(*names: str) -> Callable[[Row], str]:
    return lambda row: " / ".join(f"{row[name]:.2f}" for name in names)


def _milliseconds(*names: str) -> Callable[[Row], str]:
    return lambda row: " / ".join(f"{row[name] * 1e3:.2f}" for name in names)


_COLUMNS = (
    Column("layers, width", lambda row: f"{row['layers']}, {row['width']}", right=False),
    Column("captures", lambda row: f"{row['captures']} of {row['lengths']} lengths"),
    Column("first, s", _seconds("first_cpu_s")),
    Column("a later one", _seconds("later_cpu_s")),
    *(
        Column(
            stage.replace("_", " ").replace("plan", "planning"), _seconds(f"later_{stage}_cpu_s")
        )
        for stage in _STAGES
    ),
    Column("later : first", _seconds("later_share")),
    Column("a step by plan / eagerly, ms", _milliseconds("planned_cpu_s", "eager_cpu_s")),
    Column(
        "finding the plan: of one / of all, ms", _milliseconds("find_one_cpu_s", "find_all_cpu_s")
    ),
    Column("growth, MiB", lambda row: f"{row['growth_bytes'] / 2**20:.1f}"),
    Column("bits", lambda row: "equal" if row["is_equal"] else "different"),
)


def _made(layers: int) -> tuple[Callable[..., Any], int]:
    """A step of GPT-2 with so many layers, and how many tokens there are."""
    import torch
    import transformers

    width, heads, tokens = _WIDTHS.get(layers, (64, 4, 500))
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=tokens,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(ids: Any) -> Any:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step, tokens


def _resident_bytes() -> int:
    """What the process holds of memory now; 0 if the system does not say."""
    import os

    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _order(lengths: int, steps: int) -> list[int]:
    """The length of each step: every length comes, in random order."""
    import random

    source = random.Random(0)
    known = [_SHORTEST + _FURTHER * number for number in range(lengths)]
    order = known + source.choices(known, k=steps - lengths)
    source.shuffle(order)
    return order


def main() -> None:
    """Measures one model in this process, and prints its row."""
    import gc
    import time
    from statistics import median

    import torch

    import roam
    from roam.state.step_call import StepCall

    layers, lengths, steps = map(int, sys.argv[1:])
    function, tokens = _made(layers)
    step = roam.compile(function)
    order = _order(lengths, steps)
    batches = {length: torch.randint(tokens, (2, length)) for length in sorted(set(order))}

    def taken(run: Callable[[], Any]) -> tuple[float, Any]:
        start = time.process_time()
        result = run()
        return time.process_time() - start, result

    def finding(length: int) -> float:
        def find() -> Any:
            return step._captures.find(StepCall((batches[length],), {}), step._known.taker)

        return median(taken(find)[0] for _ in range(_ASKED))

    torch.manual_seed(1)
    captured: list[tuple[float, Timings | None]] = []
    planned, losses, find_one, settled, known = [], [], 0.0, 0, step.timings
    for place, length in enumerate(order):
        seconds, loss = taken(partial(step, batches[length]))
        losses.append(loss)
        if step.timings is not known:
            known = step.timings
            captured.append((seconds, known))
        else:
            planned.append(seconds)
        if len(captured) == 1 and not find_one:
            find_one = finding(length)
        if not settled and len(set(order[: place + 1])) == lengths:
            gc.collect()
            settled = _resident_bytes()
    gc.collect()
    growth = _resident_bytes() - settled
    find_all = finding(order[-1])
    eager, _ = _made(layers)
    torch.manual_seed(1)
    timed = [taken(partial(eager, batches[length])) for length in order]
    row = {
        "width": _WIDTHS.get(layers, (64,))[0], "lengths": lengths, "steps": steps, "captures": len(captured),
        "first_cpu_s": captured[0][0], "later_cpu_s": median(seconds for seconds, _ in captured[1:]),
        "planned_cpu_s": median(planned), "eager_cpu_s": median(seconds for seconds, _ in timed[lengths:]),
        "find_one_cpu_s": find_one, "find_all_cpu_s": find_all, "growth_bytes": growth,
        "is_equal": all(torch.equal(one, other) for one, (_, other) in zip(losses, timed, strict=True)),
    }  # fmt: skip
    row["later_share"] = row["later_cpu_s"] / row["first_cpu_s"]
    for stage in _STAGES:
        row[f"first_{stage}_cpu_s"] = getattr(captured[0][1], stage).cpu_s
        row[f"later_{stage}_cpu_s"] = median(
            getattr(timings, stage).cpu_s for _, timings in captured[1:]
        )
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
