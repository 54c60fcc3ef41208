"""What compiled blocks cost by plan and in the user's own loop: bits, memory, speed, the first
call, and a memory budget of half of what the step takes: `roam bench compiled`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

from roam_bench.results import Record, Row, Task, row_of_process
from roam_bench.run import Benchmark, Column, Table, check_named

NETS = ("gpt2", "llama", "vit", "resnet18")
_MIB = 2**20
_LOOP, _PLAN, _BOTH, _HALF = "loop", "plan", "both", "half"
_REFUSALS = {"memory_floor": "refuted", "memory_limit_not_found": "not found"}


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """All networks, or those named."""
    check_named(arguments.only, NETS)
    names = [name for name in NETS if name in (arguments.only or NETS)]
    tasks = [Task({"net": name}, partial(_measure, name, arguments.steps)) for name in names]
    settings = {"only": arguments.only, "steps": arguments.steps}
    return Benchmark("compiled", settings, tasks, _COLUMNS, lambda record: [half_table(record)])


def _measure(name: str, steps: int) -> Row:
    """First calls are those of processes that find nothing compiled."""
    with tempfile.TemporaryDirectory() as loops, tempfile.TemporaryDirectory() as plans:
        loop = _in_process(name, steps, _LOOP, loops)
        plan = _in_process(name, steps, _PLAN, plans)
        both = _in_process(name, steps, _BOTH, loops)
        return {**loop, **plan, **both, **_in_process(name, steps, _HALF, loops)}


def _in_process(name: str, steps: int, what: str, folder: str) -> Row:
    """The row of one process, in which Inductor keeps its kernels in a folder."""
    kernels = {"TORCHINDUCTOR_CACHE_DIR": folder}
    return row_of_process(f"compiled {name}", __name__, name, steps, what, **kernels)


def rows_table(record: Record) -> Table:
    """Every network."""
    return Table("Compiled blocks", _COLUMNS, record["rows"])


def half_table(record: Record) -> Table:
    """Every network, within half of the memory that its step takes."""
    return Table("Compiled blocks within half", _HALF_COLUMNS, record["rows"])


def _bytes(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else f"{row[name] / _MIB:.1f}"


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else f"{row[name]:+.1%}"


_COLUMNS = (
    Column("net", lambda row: row["net"], right=False),
    Column("blocks, compiled", lambda row: f"{row['blocks']}, {row['compiled']}"),
    Column("bits", lambda row: "equal" if row["is_equal"] else "different"),
    Column("planned, MiB", lambda row: f"{row['planned_bytes'] / _MIB:.1f}"),
    Column("measured", lambda row: f"{row['measured_bytes'] / _MIB:.1f}"),
    Column("the loop's", lambda row: f"{row['loop_bytes'] / _MIB:.1f}"),
    Column("a step, ms", lambda row: f"{row['step_s'] * 1e3:.1f}"),
    Column("the loop's step", lambda row: f"{row['loop_step_s'] * 1e3:.1f}"),
    Column("first call, s", lambda row: f"{row['first_s']:.1f}"),
    Column("the loop's first", lambda row: f"{row['loop_first_s']:.1f}"),
)

_HALF_COLUMNS = (
    Column("net", lambda row: row["net"], right=False),
    Column("without a budget, MiB", _bytes("plain_bytes")),
    Column("of this persistent", _bytes("persistent_bytes")),
    Column("budget", _bytes("limit_bytes")),
    Column("planned", _bytes("half_planned_bytes")),
    Column("measured", _bytes("half_measured_bytes")),
    Column("bits", lambda row: row["half"]),
    Column("operators that run again", lambda row: str(row.get("extra_runs", ""))),
    Column("extra time, planned", _share("extra_share")),
    Column("extra time, measured", _share("extra_measured_share")),
)


def _gpt2() -> tuple[Any, Iterable[Any], Callable[[], Any], Callable[..., Any]]:
    import torch
    import transformers

    # A small vocabulary: otherwise the logits alone, of which no plan can be rid, take half.
    config = transformers.GPT2Config(
        n_layer=8, n_embd=192, n_head=6, n_positions=256, vocab_size=2048, bos_token_id=0, eos_token_id=0, use_cache=False
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    ids = partial(torch.randint, config.vocab_size, (4, 256))
    return model, model.transformer.h, lambda: (ids(),), language_loss


def _llama() -> tuple[Any, Iterable[Any], Callable[[], Any], Callable[..., Any]]:
    import torch
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=12, hidden_size=192, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2048, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = partial(torch.randint, config.vocab_size, (16, 128))
    return model, model.model.layers, lambda: (ids(),), language_loss


def _vit() -> tuple[Any, Iterable[Any], Callable[[], Any], Callable[..., Any]]:
    import torchvision

    model = torchvision.models.VisionTransformer(64, 8, 12, 6, 192, 768, num_classes=100)
    return model, model.encoder.layers, partial(_images, 24), image_loss


def _resnet() -> tuple[Any, Iterable[Any], Callable[[], Any], Callable[..., Any]]:
    import torchvision

    model = torchvision.models.resnet18(num_classes=100)
    layers = (model.layer1, model.layer2, model.layer3, model.layer4)
    return model, [block for layer in layers for block in layer], partial(_images, 8), image_loss


_MAKES = dict(zip(NETS, (_gpt2, _llama, _vit, _resnet), strict=True))


def language_loss(model: Any, ids: Any) -> Any:
    """The loss of a language model that predicts the ids that it is given."""
    return model(input_ids=ids, labels=ids).loss


def image_loss(model: Any, images: Any, labels: Any) -> Any:
    """The loss of a classifier of images."""
    import torch

    return torch.nn.functional.cross_entropy(model(images), labels)


def _images(batch: int) -> tuple[Any, Any]:
    import torch

    return torch.randn(batch, 3, 64, 64), torch.randint(100, (batch,))


def _step(name: str) -> tuple[Any, int, Callable[[], Any], Callable[..., Any]]:
    """A network, how many blocks of it are compiled, its batches, and a step over it."""
    import torch

    torch.manual_seed(0)
    model, blocks, batch, loss_of = _MAKES[name]()
    count = 0
    for block in blocks:
        block.compile()
        count += 1
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(*values: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, *values)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, count, batch, train_step


class _Pair:
    """One network twice, in a loop of its own and by plan."""

    def __init__(self, name: str, steps: int) -> None:
        import torch

        self.model, self.blocks, batch, self.loop = _step(name)
        self.other, _, _, self.function = _step(name)
        torch.manual_seed(1)
        self.batches = [batch() for _ in range(steps)]

    def is_equal(self, planned: Callable[..., Any]) -> bool:
        """Trains both, and whether losses, parameters and buffers have the same bits."""
        import torch

        left = []
        for model, run in ((self.model, self.loop), (self.other, planned)):
            torch.manual_seed(2)
            losses = [run(*values) for values in self.batches]
            left.append([*losses, *(value.clone() for value in model.state_dict().values())])
        return all(map(torch.equal, *left))


def _taken(run: Callable[..., Any], values: Any) -> float:
    start = time.perf_counter()
    run(*values)
    return time.perf_counter() - start


def _side_by_side(pair: _Pair) -> Row:
    """Bits, memory and speed by plan and in the loop."""
    import roam

    planned = roam.compile(pair.function)
    is_equal = pair.is_equal(planned)
    pairs = [(_taken(planned, values), _taken(pair.loop, values)) for values in pair.batches]
    planned.measured(*pair.batches[0])
    planned.measured_eagerly(*pair.batches[0])
    memory = planned.memory()
    return {
        "blocks": pair.blocks,
        "is_equal": is_equal,
        "step_s": median(one for one, _ in pairs), "loop_step_s": median(one for _, one in pairs),
        "planned_bytes": memory.total_bytes, "measured_bytes": memory.measured_bytes,
        "loop_bytes": memory.eager_measured_bytes,
    }  # fmt: skip


def _within_half(pair: _Pair) -> Row:
    """Bits, memory and extra time within half of what a step takes without a budget."""
    import roam

    planned = roam.compile(pair.function)
    pair.is_equal(planned)
    plain = planned.memory()
    limit_bytes = plain.total_bytes // 2
    row: Row = {
        "plain_bytes": plain.total_bytes, "persistent_bytes": plain.persistent_bytes, "limit_bytes": limit_bytes,
    }  # fmt: skip
    within = roam.compile(pair.function, memory=limit_bytes)
    try:
        is_equal = pair.is_equal(within)
    except roam.PlanError as error:
        if error.code not in _REFUSALS:
            raise
        return row | {"half": _REFUSALS[error.code], "reason": str(error)}
    within.measured(*pair.batches[0])
    memory = within.memory()
    row |= {
        "half": "equal" if is_equal else "different",
        "half_planned_bytes": memory.total_bytes, "half_measured_bytes": memory.measured_bytes,
        "floor_bytes": memory.floor_bytes, "extra_runs": memory.extra_runs,
    }  # fmt: skip
    if memory.step_s and memory.step_measured_s and memory.extra_measured_s is not None:
        row["extra_share"] = memory.extra_s / memory.step_s
        row["extra_measured_share"] = memory.extra_measured_s / memory.step_measured_s
    return row


def main() -> None:
    """Measures one network in this process, and prints what it has found."""
    import roam

    name, steps, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    pair = _Pair(name, steps)
    if what == _LOOP:
        row: Row = {"loop_first_s": _taken(pair.loop, pair.batches[0])}
    elif what == _PLAN:
        planned = roam.compile(pair.function)
        row = {"first_s": _taken(planned, pair.batches[0])}
        timings = planned.timings
        row["compiled"] = 0 if timings is None else timings.compile.count
    else:
        row = _side_by_side(pair) if what == _BOTH else _within_half(pair)
    sys.stdout.write("\n" + json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
