"""How near plans are to their bounds, on models that the planner was not developed with: `roam
bench families`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, cast

import torch

import roam
from roam.errors import RoamError
from roam.report.table import format_bytes
from roam_bench.architectures import Sample
from roam_bench.outcomes import outcomes_table
from roam_bench.results import Record, Row, Task
from roam_bench.run import Benchmark, Column, Table, check_named
from roam_bench.zoo import train_step

_BATCH = 2
"""Samples: some heads normalize over the batch, which one sample does not allow."""
_TOKENS = 128
_EVERY = 6
"""Of transformers' some hundreds of architectures, every `_EVERY`-th by name is taken."""
_SMALL_GAP = 0.01
_OUTCOMES = ("planned", "refused", "failed")


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """Every family, or those named: its first and its later steps."""
    offered = [one for one in families() if not arguments.library or one[0] in arguments.library]
    check_named(arguments.only, (name for _, name, _ in offered))
    tasks = [
        Task({"library": library, "model": name, "step": step}, partial(measure, make, step))
        for library, name, make in offered
        if not arguments.only or name in arguments.only
        for step in ("first", "steady")
    ]
    settings = {"libraries": arguments.library, "only": arguments.only}
    return Benchmark("families", settings, tasks, _COLUMNS, summary=summary)


def families() -> Iterator[tuple[str, str, Callable[[], Sample]]]:
    """Library, name and maker of each model: by a rule, so that nobody has chosen them.

    Of timm the first model, by name, of every module; of transformers every sixth architecture, by
    name, that trains with a language model's or an image classifier's loss, with its
    configuration's defaults.
    """
    for library, made in (("timm", _timm), ("transformers", _transformers)):
        if importlib.util.find_spec(library) is not None:
            for name, make in made():
                yield library, name, make


def _timm() -> Iterator[tuple[str, Callable[[], Sample]]]:
    timm: Any = importlib.import_module("timm")

    def make(name: str) -> Sample:
        model = timm.create_model(name, pretrained=False, num_classes=1000)
        size = model.default_cfg["input_size"]
        return model, {"x": torch.randn(_BATCH, *size)}

    for module in timm.list_modules():
        name = timm.list_models(module=module)[0]
        yield name, partial(make, name)


def _transformers() -> Iterator[tuple[str, Callable[[], Sample]]]:
    transformers: Any = importlib.import_module("transformers")
    known: Any = importlib.import_module("transformers.models.auto.modeling_auto")

    def make(kind: str, head: str, pictures: bool) -> Sample:
        config = transformers.AutoConfig.for_model(kind)
        config.use_cache = False
        model = getattr(transformers, head).from_config(config)
        if pictures:
            size = config.image_size
            height, width = (size, size) if isinstance(size, int) else size
            channels = getattr(config, "num_channels", 3)
            return model, {
                "pixel_values": torch.randn(_BATCH, channels, height, width),
                "labels": torch.randint(config.num_labels, (_BATCH,)),
            }
        text = config.get_text_config()
        tokens = torch.randint(3, text.vocab_size, (_BATCH, _TOKENS))
        return model, {"input_ids": tokens, "labels": tokens}

    for mapping, head, pictures in (
        (known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "AutoModelForCausalLM", False),
        (known.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "AutoModelForMaskedLM", False),
        (known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "AutoModelForSeq2SeqLM", False),
        (
            known.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
            "AutoModelForImageClassification",
            True,
        ),
    ):
        for kind in sorted(mapping)[::_EVERY]:
            yield f"{kind}/{head.removeprefix('AutoModelFor')}", partial(make, kind, head, pictures)


@functools.lru_cache(maxsize=1)
def _made(
    make: Callable[[], Sample],
) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    with roam.fake():
        model, inputs = make()
        model.train()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False), inputs


def measure(make: Callable[[], Sample], step: Literal["first", "steady"]) -> Row:
    """Plan one step of one model on fake tensors; nothing of its size is allocated.

    Returns:
        ``outcome``: ``planned``, ``refused``, or ``failed``, where the library does not build or
            train the model without weights, with the ``reason``; of a plan ``operators``,
            ``total_bytes``, ``bound_bytes``, ``gap``, ``fragmentation``, ``program_order_bytes``,
            ``capture_s`` and ``plan_s``, else ``None``.
    """
    row: Row = dict.fromkeys(
        (
            "operators",
            "total_bytes",
            "bound_bytes",
            "gap",
            "fragmentation",
            "program_order_bytes",
            "capture_s",
            "plan_s",
        )
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries' own, about models without weights
            start = time.perf_counter()
            graph = roam.capture(train_step, *_made(make), step=step)
            captured = time.perf_counter()
            plan = roam.optimize(graph)
            planned = time.perf_counter()
    except RoamError as error:
        return {"outcome": "refused", "reason": f"{type(error).__name__}: {error}", **row}
    except Exception as error:  # noqa: BLE001 - one model's failure is a row, and the others go on
        return {"outcome": "failed", "reason": f"{type(error).__name__}: {error}", **row}
    return {
        "outcome": "planned",
        "reason": "",
        "operators": graph.num_operators,
        "total_bytes": plan.total_bytes,
        "bound_bytes": plan.total_lower_bound_bytes,
        "gap": plan.gap,
        "fragmentation": plan.fragmentation,
        "program_order_bytes": plan.persistent_bytes + plan.program_order_peak_bytes,
        "capture_s": captured - start,
        "plan_s": planned - captured,
    }


def _of_a_plan(text: Callable[[Row], str]) -> Callable[[Row], str]:
    return lambda row: text(row) if row["outcome"] == "planned" else ""


def _saved(row: Row) -> str:
    """Only of later steps: a first step makes the state that the later ones find, whatever its
    order.
    """
    return (
        f"{1 - row['total_bytes'] / row['program_order_bytes']:.1%}"
        if row["step"] == "steady"
        else ""
    )


_COLUMNS = (
    Column("library", lambda row: row["library"], right=False),
    Column("model", lambda row: row["model"], right=False),
    Column("step", lambda row: row["step"], right=False),
    Column("outcome", lambda row: row["outcome"], right=False),
    Column("operators", _of_a_plan(lambda row: f"{row['operators']:,}")),
    Column("total", _of_a_plan(lambda row: format_bytes(row["total_bytes"]))),
    Column("saved", _of_a_plan(_saved)),
    Column("gap", _of_a_plan(lambda row: f"{row['gap']:.2%}")),
    Column("seconds", _of_a_plan(lambda row: f"{row['plan_s']:.2f}")),
    Column("reason", lambda row: cast("str", row["reason"]), right=False),
)


def summary(record: Record) -> Iterator[Table | str]:
    """What came of the models, and how near to the least the plans are."""
    yield libraries_table(record)
    yield steps_table(record)
    yield gaps_table(record)


def libraries_table(record: Record) -> Table:
    """How many steps of each library came to what."""
    return outcomes_table(record, "Steps", "library", "steps", _OUTCOMES)


def steps_table(record: Record) -> Table:
    """How near to the least the plans of first and of later steps are."""
    planned = [row for row in record["rows"] if row["outcome"] == "planned"]
    rows: list[Row] = []
    for step in ("first", "steady"):
        gaps = sorted(row["gap"] for row in planned if row["step"] == step)
        if gaps:
            rows.append({"step": step, "gaps": gaps})
    columns = (
        Column("step", lambda row: row["step"], right=False),
        Column("plans", lambda row: str(len(row["gaps"]))),
        Column("gap 0", lambda row: str(sum(gap == 0 for gap in row["gaps"]))),
        Column(
            f"within {_SMALL_GAP:.0%}",
            lambda row: str(sum(gap <= _SMALL_GAP for gap in row["gaps"])),
        ),
        Column("median", lambda row: f"{row['gaps'][len(row['gaps']) // 2]:.2%}"),
        Column("largest", lambda row: f"{row['gaps'][-1]:.2%}"),
    )
    return Table("Gaps", columns, rows)


def gaps_table(record: Record) -> Table:
    """The plans that are not proved to be within a hundredth of the least, the largest gap
    first.
    """
    seen = [
        row for row in record["rows"] if row["outcome"] == "planned" and row["gap"] > _SMALL_GAP
    ]
    columns = [column for column in _COLUMNS if column.title not in ("outcome", "reason")]
    return Table(f"Gaps above {_SMALL_GAP:.0%}", columns, sorted(seen, key=lambda row: -row["gap"]))
