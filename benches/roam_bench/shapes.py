"""What batches of another size at nearly every step cost, eagerly, by plan, padded, and with
`torch.compile`: `roam bench shapes`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from roam_bench import shapes_zoo
from roam_bench.results import Record, Row, Task, bytes_of, row_of_failure, row_of_process
from roam_bench.run import Benchmark, Column, Table, across, check_named, number

_SHORTEST, _LONGEST = 40, 300
_WIDTH, _LAYERS, _HEADS, _TOKENS = 128, 4, 4, 1000
_BATCH = 4
WAYS = ("eager", "roam", "roam, padded to 32", "roam, padded to 64", "torch.compile")
_MIB = 2**20


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """A row for each family and way to train it, or one for each architecture."""
    if arguments.architectures:
        return shapes_zoo.benchmark(arguments)
    check_named(arguments.only, FAMILIES)
    tasks = [
        Task({"family": name, "way": way}, partial(_measure, name, way, arguments.steps))
        for name in FAMILIES
        if name in (arguments.only or FAMILIES)
        for way in arguments.ways or WAYS
    ]
    settings = {"only": arguments.only, "steps": arguments.steps}
    return Benchmark("shapes", settings, tasks, _COLUMNS, lambda record: [rows_table(record)])


def _measure(name: str, way: str, steps: int) -> Row:
    """Nothing that one row leaves in its process is there for the next."""
    with tempfile.TemporaryDirectory() as folder:
        # Compiled in the process itself and its children, whose time is known once they end.
        settings = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        return row_of_process(f"{name}, {way}", __name__, name, way, steps, **settings)


def rows_table(record: Record) -> Table:
    """Every family, each way beside eager PyTorch."""
    eager = {row["family"]: row for row in record["rows"] if row["way"] == "eager"}
    rows = [
        {**row, "eager": before}
        for row in record["rows"]
        if (before := eager.get(row["family"])) is not None
    ]
    columns = [
        column
        for column in (*_COLUMNS[:-1], *_BESIDE, _COLUMNS[-1])
        if column.title not in _LATER or any(map(column.text, rows))
    ]
    return Table("Many shapes", tuple(columns), rows)


def ways_table(record: Record) -> Table:
    """Families beside ways: time and step by eager PyTorch's, and growth beyond eager's in MiB."""
    beside = rows_table(record)
    time, step, growth = _share("cpu_s"), _share("later_step_s"), _beyond("growth_bytes")
    return across(
        beside.title,
        beside.rows,
        {"family": lambda row: row["family"]},
        lambda row: None if row["way"] == "eager" else row["way"],
        lambda row: f"{time(row)} ({step(row)}), {growth(row)}",
    )


def growth_table(record: Record) -> Table:
    """How much the process grows by one plan for all sizes, beside eager PyTorch, in MiB."""
    rows = [row for row in rows_table(record).rows if row["way"] == "roam"]
    columns = (
        Column("family", lambda row: row["family"], right=False),
        Column("growth, MiB", number("growth_bytes", "{:.0f}", _MIB)),
        Column("of the pool", number("pool_growth_bytes", "{:.0f}", _MIB)),
        Column("eager's growth", lambda row: f"{row['eager']['growth_bytes'] / _MIB:.0f}"),
    )
    return Table("Growth", columns, rows)


def architectures_table(record: Record) -> Table:
    """Architectures that one plan does not hold for, and why."""
    return shapes_zoo.rows_table(record)


def _count(row: Row, name: str) -> str:
    return "" if row.get(name) is None else str(row[name])


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else f"{row[name] / row['eager'][name]:.2f}"


def _beyond(name: str) -> Callable[[Row], str]:
    return lambda row: (
        "" if row.get(name) is None else f"{(row[name] - row['eager'][name]) / _MIB:.0f}"
    )


def _bits(row: Row) -> str:
    if row.get("digest") is None or "padded" in row["way"]:  # other batches
        return ""
    return "equal" if row["digest"] == row["eager"]["digest"] else "different"


_COLUMNS = (
    Column("family", lambda row: row["family"], right=False),
    Column("way", lambda row: row["way"], right=False),
    Column("captures", lambda row: _count(row, "captures")),
    Column("plans", lambda row: _count(row, "plans")),
    Column("CPU time, s", number("cpu_s", "{:.1f}")),
    Column("a step, ms", number("later_step_s", "{:.1f}", 1e-3)),
    Column("growth, MiB", number("growth_bytes", "{:.0f}", _MIB)),
    Column("later growth", number("later_growth_bytes", "{:.0f}", _MIB)),
    Column("of the pool", number("pool_growth_bytes", "{:.0f}", _MIB)),
    Column("most, MiB", number("most_bytes", "{:.0f}", _MIB)),
    Column("note", lambda row: row.get("note", ""), right=False),
)
_LATER = ("of the pool", "most, MiB")
"""Columns that older results do not have."""
_BESIDE = (
    Column("growth - eager's", _beyond("growth_bytes")),
    Column("time : eager's", _share("cpu_s")),
    Column("step : eager's", _share("later_step_s")),
    Column("bits", _bits, right=False),
)


def _text_model(name: str) -> Any:
    import transformers

    shared = {"vocab_size": _TOKENS, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
    wide = {
        "hidden_size": _WIDTH, "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS,
        "max_position_embeddings": 512, "pad_token_id": 0,
    }  # fmt: skip
    if name == "GPT-2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=_WIDTH, n_layer=_LAYERS, n_head=_HEADS, n_positions=512, **shared
            )
        )
    if name == "Llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_key_value_heads=2, intermediate_size=352, **wide, **shared)
        )
    if name == "BERT":
        return transformers.BertForSequenceClassification(
            transformers.BertConfig(intermediate_size=512, num_labels=4, **wide, **shared)
        )
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=_WIDTH, d_kv=32, d_ff=512, num_layers=_LAYERS, num_heads=_HEADS, decoder_start_token_id=0,
            pad_token_id=0, eos_token_id=2, vocab_size=_TOKENS, use_cache=False,
        )
    )  # fmt: skip


def _vit() -> Any:
    from torchvision.models import VisionTransformer

    return _classifier(VisionTransformer(32, 4, _LAYERS, _HEADS, _WIDTH, 512, 0.1, num_classes=10))


def _convolutional() -> Any:
    from torch import nn

    layers: list[nn.Module] = []
    channels = 3
    for wide in (32, 64, 128, _WIDTH)[:_LAYERS]:
        layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(), nn.MaxPool2d(2)]  # fmt: skip
        channels = wide
    return _classifier(
        nn.Sequential(
            *layers,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(channels, 10),
        )
    )


def _classifier(net: Any) -> Any:
    from torch import nn

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, images: Any, labels: Any) -> Any:
            return nn.functional.cross_entropy(self.net(images), labels)

    return Classifier()


def _texts(name: str, place: int, padding: int) -> dict[str, Any]:
    """A batch padded to its longest text, or to the next multiple of `padding`."""
    import torch

    draw, generator = random.Random(place), torch.Generator().manual_seed(place)
    longest = draw.randint(_SHORTEST, _LONGEST)
    lengths = [longest, *(draw.randint(20, longest) for _ in range(_BATCH - 1))]
    width = _padded(longest, padding)
    ids = torch.randint(3, _TOKENS, (_BATCH, width), generator=generator)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = ids.masked_fill(~mask, 0)
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    if name == "BERT":
        batch["labels"] = torch.randint(0, 4, (_BATCH,), generator=generator)
    elif name == "T5":
        shares = [max(8, int(length * draw.uniform(0.3, 0.9))) for length in lengths]
        width = _padded(max(shares), padding)
        outside = torch.arange(width) >= torch.tensor(shares)[:, None]
        labels = torch.randint(3, _TOKENS, (_BATCH, width), generator=generator)
        batch["labels"] = labels.masked_fill(outside, -100)
    else:
        batch["labels"] = ids.masked_fill(~mask, -100)
    return batch


def _images(name: str, place: int, padding: int) -> dict[str, Any]:
    """Images of one size in batches of another, or the other way round."""
    import torch

    draw, generator = random.Random(place), torch.Generator().manual_seed(place)
    samples = _padded(draw.randint(2, 40), padding) if name == "ViT" else _BATCH
    size = 32 if name == "ViT" else _padded(draw.randint(32, 128), padding)
    images = torch.randn(samples, 3, size, size, generator=generator)
    return {"images": images, "labels": torch.randint(0, 10, (samples,), generator=generator)}


def _padded(size: int, padding: int) -> int:
    return -(-size // padding) * padding


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[..., dict[str, Any]]]] = {
    **{
        name: (partial(_text_model, name), partial(_texts, name))
        for name in ("GPT-2", "Llama", "BERT", "T5")
    },
    "ViT": (_vit, partial(_images, "ViT")),
    "convolutional": (_convolutional, partial(_images, "convolutional")),
}
"""For each family its model and its batches: of texts of another length, T5's with two lengths;
for ViT of another number of samples; for the convolutional network of images of another size."""


def _step_of(model: Any) -> tuple[Callable[[dict[str, Any]], Any], Any]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(batch: dict[str, Any]) -> Any:
        optimizer.zero_grad()
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return train_step, optimizer


def _resident_bytes() -> int:
    """What the process holds of memory now; 0 if the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _most_resident_bytes() -> int:
    """The most that the process has held of memory; 0 if the system does not say."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("VmHWM:")]
    except OSError:
        return 0
    return int(lines[0][1]) * 1024 if lines else 0


def _pool_resident_bytes() -> int:
    """How much of roam's pool lies in memory: its pages that a step has touched."""
    import torch

    from roam.runtime.pool import Pool

    pool = Pool.of(torch.device("cpu"))
    if not pool.nbytes:
        return 0
    page, entry = os.sysconf("SC_PAGE_SIZE"), 8
    first, end = pool.address // page, -(-(pool.address + pool.nbytes) // page)
    try:
        with open("/proc/self/pagemap", "rb") as file:
            file.seek(first * entry)
            entries = file.read((end - first) * entry)
    except OSError:
        return 0
    return page * sum(last >> 7 for last in entries[entry - 1 :: entry])


def _processor_s() -> float:
    """Of this process and its children."""
    return time.process_time() + sum(os.times()[2:4])


def measured(name: str, way: str, steps: int) -> Row:
    """Trains one family in one way.

    Returns:
        ``digest`` of every loss and of the final parameters and states; ``cpu_s`` of all steps;
        ``later_step_s``, the mean of those after the last plan; ``captures``, and ``plans``, of
        which some are for larger sizes of an earlier capture; ``growth_bytes``
        of the process since the second capture (eagerly: since the second step), of which
        ``pool_growth_bytes`` are pages of the pool that longer batches have touched,
        ``later_growth_bytes`` since the last plan, and ``most_bytes`` that it has held in all.
    """
    import torch

    import roam

    torch.set_num_threads(1)
    make, batch_of = FAMILIES[name]
    torch.manual_seed(0)
    model = make()
    model.train()
    function, optimizer = _step_of(model)
    step: Any = function
    if way.startswith("roam"):
        step = roam.compile(function, sizes=way == "roam")
    elif way == "torch.compile":
        model.compile(dynamic=True)
    padding = int(way.rpartition(" ")[2]) if "padded" in way else 1
    digest, seconds, planned_at, known = hashlib.sha256(), [], list[int](), None
    settled = settled_last = settled_pool = captures = 0
    torch.manual_seed(1)
    for place in range(steps):
        batch = batch_of(place, padding)
        start = _processor_s()
        loss = step(batch)
        seconds.append(_processor_s() - start)
        digest.update(bytes_of(loss))
        timings = getattr(step, "timings", None)
        if timings is not known:
            known = timings
            planned_at.append(place)
            captures += step.timings.capture.count > 0
        if len(planned_at) <= 2 and place == (planned_at or [1])[-1]:
            settled, settled_pool = _resident_bytes(), _pool_resident_bytes()
        if place == (planned_at or [1])[-1]:
            settled_last = _resident_bytes()
    resident, pool = _resident_bytes(), _pool_resident_bytes()
    state = [*model.state_dict().values(), *(
        value for values in optimizer.state_dict()["state"].values() for value in values.values()
    )]  # fmt: skip
    for value in state:
        digest.update(bytes_of(value))
    later = seconds[(planned_at or [1])[-1] + 1 :]
    return {
        "captures": captures if way.startswith("roam") else None,
        "plans": len(planned_at) if way.startswith("roam") else None, "cpu_s": sum(seconds),
        "later_step_s": sum(later) / len(later) if later else None, "growth_bytes": resident - settled,
        "later_growth_bytes": resident - settled_last,
        "pool_growth_bytes": pool - settled_pool if way.startswith("roam") else None,
        "most_bytes": _most_resident_bytes(),
        "digest": digest.hexdigest(), "note": "",
    }  # fmt: skip


def main() -> None:
    """Measures one row in this process, and prints it."""
    name, way, steps = sys.argv[1:]
    try:
        row = measured(name, way, int(steps))
    except Exception as error:
        if way != "torch.compile":
            raise
        row = row_of_failure(error)
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
