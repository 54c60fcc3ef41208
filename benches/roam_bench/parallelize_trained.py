"""Whether ranks train as one process does, and in the memory that was certified, on gloo: `roam
bench parallelize --trained`.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import roam
from roam.sharding import Costs, Link, Sharding
from roam.sharding.planning import Planning
from roam_bench.compiled import language_loss
from roam_bench.ranks import language_model
from roam_bench.results import Record, Row, Task, row_of_process
from roam_bench.run import Column, Table

NETS = ("llama", "mlp")
DIVISIONS = ((1, 2), (2, 1), (1, 4), (2, 2))
"""Replicas, and ranks of each."""
_STEPS = 10
_MIB = 2**20


def tasks(only: list[str]) -> list[Task]:
    """All networks, or those named, for all divisions of ranks."""
    return [
        Task(
            {"net": net, "data": data, "tensor": tensor, "parameters": kept},
            partial(_measure, net, data, tensor, kept),
        )
        for net in NETS
        if net in (only or NETS)
        for data, tensor in DIVISIONS
        for kept in (("whole", "sharded") if data > 1 else ("whole",))
    ]


def _measure(net: str, data: int, tensor: int, kept: str) -> Row:
    """Finds a sharding in this process; `torchrun` starts ranks that train by it, and the first one
    prints the row.
    """
    torch.set_num_threads(1)  # as on ranks: what kernels take may depend on it
    model, optimizer, batch, train_step = made(net)
    costs = Costs(  # of slow cores, so that all of the net is spread
        flops_per_ns=10, bytes_per_ns=1, launch_ns=0, link=Link(latency_ns=0, bytes_per_ns=100)
    )
    planning = Planning(
        train_step, model, optimizer, batch,
        mesh=(data, tensor), data=data, is_sharded=kept == "sharded", costs=costs,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharding = planning.within(None)
    # What ranks need of it.
    sent = dataclasses.replace(sharding, plan=None, trace=None, nodes=())  # type: ignore[arg-type]
    with tempfile.NamedTemporaryFile() as file:
        file.write(pickle.dumps(sent))
        file.flush()
        launcher = ["--standalone", "--nproc-per-node", data * tensor, "-m", __name__]
        row = row_of_process(
            f"{net} {data}x{tensor} {kept}", "torch.distributed.run", *launcher, net, file.name,
            OMP_NUM_THREADS="1",
        )  # fmt: skip
    return {"certified_bytes": sharding.total_bytes, "styles": len(sharding.styles), **row}


def rows_table(record: Record) -> Table:
    """Every network in every division of ranks."""
    return Table("Steps as they were parallelized", COLUMNS, record["rows"])


def line(record: Record) -> str:
    """What the rows say in all."""
    rows = record["rows"]
    certified = [row["measured_bytes"] / row["certified_bytes"] for row in rows]
    eager = [row["eager_bytes"] / row["measured_bytes"] for row in rows]
    return (
        f"{sum(row['is_equal'] for row in rows)} of {len(rows)} rows have equal bits, losses differ from one process's by at most "
        f"{max(row['loss_difference'] for row in rows):.1e}, memory is {min(certified):.4f} to {max(certified):.4f} times the "
        f"certified, and an eager step takes {min(eager):.2f} to {max(eager):.2f} times as much."
    )


def _mib(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key] / _MIB:.2f}"


COLUMNS = (
    Column("net", lambda row: row["net"], right=False),
    Column("replicas", lambda row: str(row["data"])),
    Column("ranks of each", lambda row: str(row["tensor"])),
    Column("parameters in replicas", lambda row: row["parameters"], right=False),
    Column("modules with a style", lambda row: str(row["styles"])),
    Column("losses differ from one process's by", lambda row: f"{row['loss_difference']:.1e}"),
    Column("bits", lambda row: "equal" if row["is_equal"] else "different"),
    Column("certified, MiB", _mib("certified_bytes")),
    Column("measured", _mib("measured_bytes")),
    Column(
        "measured / certified", lambda row: f"{row['measured_bytes'] / row['certified_bytes']:.4f}"
    ),
    Column("eager, measured", _mib("eager_bytes")),
)


def made(name: str) -> tuple[Any, Any, tuple[Any, ...], Callable[..., Any]]:
    """A network, its optimizer, a batch, and the step."""
    torch.manual_seed(0)
    if name == "llama":
        model = language_model("llama")
        batch: tuple[Any, ...] = (torch.randint(model.config.vocab_size, (8, 128)),)
        loss_of: Callable[..., Any] = language_loss
    else:
        layers = [
            torch.nn.Sequential(
                torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
            )
            for _ in range(4)
        ]
        model = torch.nn.Sequential(*layers)
        batch = torch.randn(1024, 512), torch.randn(1024, 512)

        def loss_of(model: Any, x: Any, y: Any) -> Any:
            return F.mse_loss(model(x), y)

    def train_step(model: Any, optimizer: Any, *batch: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return model, optimizer, batch, train_step


def main() -> None:
    """Trains on this rank, and prints what all ranks have found on the first."""
    import torch.distributed as dist

    name, path = sys.argv[1], Path(sys.argv[2])
    sharding: Sharding = pickle.loads(path.read_bytes())
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    model, optimizer, batch, train_step = made(name)
    alone = torch.zeros(_STEPS)
    if dist.get_rank() == 0:
        alone = torch.stack([train_step(model, optimizer, *batch).clone() for _ in range(_STEPS)])
    dist.broadcast(alone, 0)
    found: list[list[Any]] = []
    step: Any = train_step
    for run in (train_step, roam.compile(train_step)):
        step = run
        model, optimizer, batch, _ = made(name)
        sharding.apply(model, optimizer)
        part = sharding.part(*batch)
        found.append([step(model, optimizer, *part).clone() for _ in range(_STEPS)])
    step.measured(model, optimizer, *part)
    step.measured_eagerly(model, optimizer, *part)
    memory = step.memory()
    losses = torch.stack(found[1])
    dist.all_reduce(losses)
    difference = (losses / dist.get_world_size() - alone).abs() / alone
    mine: Row = {
        "is_equal": all(map(torch.equal, *found)),
        "measured_bytes": memory.measured_bytes - memory.group_bytes,
        "eager_bytes": memory.eager_measured_bytes - memory.eager_group_bytes,
        "loss_difference": float(difference.max()),
    }  # fmt: skip
    rows: list[Row] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows, mine)
    if dist.get_rank() == 0:
        most = max(rows, key=lambda row: row["measured_bytes"])
        row = {**most, "is_equal": all(row["is_equal"] for row in rows)}
        sys.stdout.write("\n" + json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
