"""How long the first call of a compiled step takes, by stages, each step in a process of its own,
and in a second process, which finds on disk what the first one kept: `roam bench first-call`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

from roam_bench.results import Record, Row, Task, row_of_process
from roam_bench.run import Benchmark, Column, Table, check_named

STEPS = {
    "ppo-tiny": None, "gpt2-tiny": (1, 128), "gpt2-4-layers": None, "gpt2-12-layers": None, "gpt2-budget": None,
    "bert-base": (1, 128), "resnet18": (4, None), "resnet50": (4, None), "vit_b_16": (4, None),
}  # fmt: skip
"""Steps by name, with (batch, tokens) of those of the zoo."""
_GPT2 = {"gpt2-4-layers": (4, 128), "gpt2-12-layers": (12, 128), "gpt2-budget": (12, 512)}
"""GPT-2 small with so many layers, for so many tokens."""
_MEMORY = {"gpt2-budget": "80%"}
"""Budgets of those that have one."""
_STAGES = ("capture", "kernels", "plan", "first_run")


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """All steps, or those named."""
    check_named(arguments.only, STEPS)
    names = [name for name in STEPS if name in (arguments.only or STEPS)]
    tasks = [Task({"step": name}, partial(_measure, name)) for name in names]
    return Benchmark("first_call", {"only": arguments.only}, tasks, _COLUMNS)


def _measure(name: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        first, second = (_in_process(name, folder) for _ in range(2))
    return first | {f"second_{key}": value for key, value in second.items()}


def _in_process(name: str, folder: str) -> Row:
    """The row of one process, which keeps its plans in a folder."""
    kept = {"ROAM_CACHE": "1", "ROAM_CACHE_DIR": folder}
    return row_of_process(f"first-call {name}", __name__, name, **kept)


def rows_table(record: Record) -> Table:
    """Every step."""
    return Table("First calls", _COLUMNS, record["rows"])


def _seconds(stage: str) -> Callable[[Row], str]:
    return lambda row: f"{row[f'{stage}_cpu_s']:.2f}"


_COLUMNS = (
    Column("step", lambda row: row["step"], right=False),
    Column("first call, s", lambda row: f"{row['cpu_s']:.2f}"),
    Column("capture", _seconds("capture")),
    Column("traces", lambda row: str(row["capture_count"])),
    Column("kernels", _seconds("kernels")),
    Column("tried", lambda row: str(row["kernels_count"])),
    Column("planning", _seconds("plan")),
    Column("plans", lambda row: str(row["plan_count"])),
    Column("first run", _seconds("first_run")),
    Column("a later run", lambda row: f"{row['later_cpu_s']:.3f}"),
    Column("second process, s", lambda row: f"{row['second_cpu_s']:.2f}"),
    Column("its kernels", _seconds("second_kernels")),
    Column("its planning", _seconds("second_plan")),
    Column("from disk", lambda row: str(row["second_plan_from_disk"])),
)


def _ppo() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An update of two 32-wide networks by proximal policy optimization."""
    import torch
    from torch import nn

    def net(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, width)
        )

    policy, value = net(4), net(1)
    parameters = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4)

    def update(seen: Any, acted: Any, advantage: Any, returned: Any, before: Any) -> Any:
        logits = policy(seen).log_softmax(-1)
        ratio = (logits.gather(1, acted[:, None]).squeeze(1) - before).exp()
        loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss = loss + 0.5 * (value(seen).squeeze(-1) - returned).square().mean()
        loss = loss + 0.01 * (logits.exp() * logits).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        return loss.detach()

    batch = (
        torch.randn(64, 8),
        torch.randint(4, (64,)),
        torch.randn(64),
        torch.randn(64),
        torch.randn(64),
    )
    return update, batch


def _gpt2(layers: int, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """GPT-2 small with some of its 12 layers."""
    import torch
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers))
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        return loss

    return train_step, (torch.randint(50257, (1, tokens)),)


def _made(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from roam import zoo

    if (sizes := STEPS[name]) is None:
        return _ppo() if name == "ppo-tiny" else _gpt2(*_GPT2[name])
    built = zoo.build(name, batch=sizes[0], seq=sizes[1])
    return built.train_step, (built.model, built.optimizer, *built.batch)


def main() -> None:
    """Measures one step in this process, and prints its row."""
    import time

    import roam

    name = sys.argv[1]
    function, call = _made(name)
    step = roam.compile(function, memory=_MEMORY.get(name))
    start = time.process_time()
    step(*call)
    row: dict[str, Any] = {"cpu_s": time.process_time() - start}
    timings = step.timings
    assert timings is not None, "the step has been called"
    for stage_name in _STAGES:
        stage = getattr(timings, stage_name)
        row |= {
            f"{stage_name}_cpu_s": stage.cpu_s,
            f"{stage_name}_wall_s": stage.wall_s,
            f"{stage_name}_count": stage.count,
            f"{stage_name}_from_disk": stage.from_disk,
        }
    for _ in range(2):
        step(*call)
    start = time.process_time()
    step(*call)
    row["later_cpu_s"] = time.process_time() - start
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
