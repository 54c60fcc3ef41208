"""What steps of several processes take by plan and eagerly, on gloo: bits, memory and speed of
every rank: `roam bench ranks`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from roam_bench.compiled import image_loss, language_loss
from roam_bench.results import Record, Row, Task, row_of_process
from roam_bench.run import Benchmark, Column, Table, check_named

NETS = ("gpt2", "llama", "bert", "resnet18")
WAYS = ("ddp", "fully-shard")
_MIB = 2**20


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """All networks, or those named, in both ways."""
    check_named(arguments.only, NETS)
    tasks = [
        Task(
            {"net": name, "way": way},
            partial(_measure, name, way, arguments.ranks, arguments.steps),
        )
        for name in NETS
        if name in (arguments.only or NETS)
        for way in WAYS
    ]
    settings = {key: getattr(arguments, key) for key in ("only", "ranks", "steps")}
    return Benchmark("ranks", settings, tasks, _COLUMNS)


def _measure(name: str, way: str, ranks: int, steps: int) -> Row:
    """`torchrun` starts the ranks, and the first one prints the row."""
    launcher = ["--standalone", "--nproc-per-node", ranks, "-m", __name__]
    return row_of_process(
        f"{name} {way}", "torch.distributed.run", *launcher, name, way, steps, OMP_NUM_THREADS="1"
    )


def rows_table(record: Record) -> Table:
    """Every network in every way."""
    return Table("Steps of several processes", _COLUMNS, record["rows"])


def _mib(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key] / _MIB:.1f}"


_COLUMNS = (
    Column("net", lambda row: row["net"], right=False),
    Column("way", lambda row: row["way"], right=False),
    Column("ranks", lambda row: str(row["ranks"])),
    Column("bits", lambda row: "equal" if row["is_equal"] else "different"),
    Column("eager, MiB", _mib("eager_bytes")),
    Column("by plan, measured", _mib("measured_bytes")),
    Column("of this in process groups", _mib("group_bytes")),
    Column("planned", _mib("planned_bytes")),
    Column("eager step, ms", lambda row: f"{row['eager_step_s'] * 1e3:.0f}"),
    Column("by plan", lambda row: f"{row['step_s'] * 1e3:.0f}"),
)


def language_model(name: str) -> Any:
    """A small network of transformers."""
    import transformers

    common: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
    if name == "gpt2":
        config: Any = transformers.GPT2Config(n_layer=4, n_embd=256, n_head=4, use_cache=False)
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        config = transformers.LlamaConfig(
            **common, intermediate_size=688, num_key_value_heads=2, vocab_size=16384,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    return transformers.BertForMaskedLM(transformers.BertConfig(**common, intermediate_size=1024))


def _made(name: str) -> tuple[Any, list[Any], Callable[[], tuple[Any, ...]], Callable[..., Any]]:
    """A network, its blocks, its batches, and its loss."""
    import torch

    if name == "resnet18":
        import torchvision

        model = torchvision.models.resnet18(num_classes=100)
        layers = (model.layer1, model.layer2, model.layer3, model.layer4)
        blocks = [block for layer in layers for block in layer]

        def images() -> tuple[Any, ...]:
            return torch.randn(8, 3, 64, 64), torch.randint(100, (8,))

        return model, blocks, images, image_loss
    model = language_model(name)
    paths = {"gpt2": "transformer.h", "llama": "model.layers", "bert": "bert.encoder.layer"}
    blocks = model.get_submodule(paths[name])
    words = model.config.vocab_size

    def texts() -> tuple[Any, ...]:
        return (torch.randint(words, (8, 128)),)

    return model, list(blocks), texts, language_loss


def clipped_step(model: Any, optimizer: Any, loss_of: Callable[..., Any], *values: Any) -> Any:
    """Forward, backward, clipping, update."""
    import torch

    optimizer.zero_grad()
    loss = loss_of(model, *values)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def main() -> None:
    """Measures this rank, and prints what all ranks have found on the first."""
    import time
    import warnings
    from statistics import median

    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import roam
    from roam.torch_compat.private import local_of

    name, way, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def trained(by_plan: bool) -> tuple[list[Any], list[float], Any, tuple[Any, ...]]:
        torch.manual_seed(0)
        model, blocks, batch, loss_of = _made(name)
        run = model
        if way == "ddp":
            run = DistributedDataParallel(model)
        else:
            for block in blocks:
                fully_shard(block)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())

        def train_step(*values: Any) -> Any:
            return clipped_step(run, optimizer, loss_of, *values)

        step: Any = roam.compile(train_step) if by_plan else train_step
        torch.manual_seed(1 + rank)
        found, taken = [], []
        for _ in range(steps):
            values = batch()
            dist.barrier()
            start = time.perf_counter()
            found.append(step(*values))
            taken.append(time.perf_counter() - start)
        state = [local_of(value).clone() for value in model.state_dict().values()]
        return [*found, *state], taken[3:], step, values

    eager, eager_s, _, _ = trained(by_plan=False)
    planned, planned_s, step, values = trained(by_plan=True)
    is_equal = all(map(torch.equal, eager, planned))
    del eager, planned
    step.measured(*values)
    step.measured_eagerly(*values)
    memory = step.memory()
    mine: Row = {
        "is_equal": is_equal,
        "planned_bytes": memory.total_bytes, "measured_bytes": memory.measured_bytes,
        "group_bytes": memory.group_bytes, "eager_bytes": memory.eager_measured_bytes,
        "eager_group_bytes": memory.eager_group_bytes,
        "step_s": median(planned_s), "eager_step_s": median(eager_s),
    }  # fmt: skip
    rows: list[Row] = [{} for _ in range(ranks)]
    dist.all_gather_object(rows, mine)
    if rank == 0:
        most = max(rows, key=lambda row: row["measured_bytes"])
        row = {"ranks": ranks, **most, "is_equal": all(row["is_equal"] for row in rows)}
        sys.stdout.write("\n" + json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
