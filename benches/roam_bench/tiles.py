"""What it costs language models never to have their logits whole: `roam bench tiles`.

Small models with large vocabularies train eagerly, with `torch.utils.checkpoint`, with PyTorch's
chunked `linear_cross_entropy`, and by plans within budgets that only tiles can keep.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from roam_bench.results import Record, Row, Task, bytes_of, row_of_failure, row_of_process
from roam_bench.run import Benchmark, Column, Table, check_named, number

_TOKENS, _MICRO_BATCHES, _STEPS, _WIDTH = 1024, 2, 5, 32
_SHARES = (0.5, 0.25, 0.1)
_TOO_LITTLE = 0.03
"""A budget that no plan is expected to keep within."""
WAYS = (
    "eager",
    "checkpoint",
    "linear_cross_entropy",
    "roam",
    *(f"roam, {share:.0%}" for share in _SHARES),
    "roam, least",
)
DTYPES = ("float32", "bfloat16")
_MIB = 2**20
_FEW = 8


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """A row for each family, dtype and way to train it."""
    check_named(arguments.only, FAMILIES)
    check_named(arguments.ways, WAYS, "--ways")
    tasks = [
        Task({"family": name, "dtype": dtype, "way": way}, partial(_measure, name, dtype, way))
        for dtype in arguments.dtypes or DTYPES
        for name in FAMILIES
        if name in (arguments.only or FAMILIES)
        for way in WAYS
        if way in (arguments.ways or WAYS)
    ]
    settings = {"only": arguments.only, "dtypes": arguments.dtypes, "ways": arguments.ways}
    return Benchmark("tiles", settings, tasks, _COLUMNS, lambda record: [rows_table(record)])


def _measure(name: str, dtype: str, way: str) -> Row:
    """Nothing that one row leaves in its process is there for the next."""
    return row_of_process(f"{name}, {dtype}, {way}", __name__, name, dtype, way)


def rows_table(record: Record) -> Table:
    """Every family, each way beside eager PyTorch and the plan without a budget."""
    by_key = {(row["family"], row["dtype"], row["way"]): row for row in record["rows"]}
    rows = [
        {
            **row,
            "eager": by_key.get((row["family"], row["dtype"], "eager"), {}),
            "plain": by_key.get((row["family"], row["dtype"], "roam"), {}),
        }
        for row in record["rows"]
    ]
    return Table("Tiles", _COLUMNS, rows)


def _beside(other: str, name: str) -> Callable[[Row], str]:
    def told(row: Row) -> str:
        before = row.get(other, {}).get(name)
        return "" if before is None or row.get(name) is None else f"{row[name] / before:.2f}"

    return told


def _bits(row: Row) -> str:
    expected = row.get("eager", {}).get("digest")
    if row.get("digest") is None or expected is None:
        return ""
    return "equal" if row["digest"] == expected else "different"


def _tiles(row: Row) -> str:
    """Into how many tiles each call is cut, or of how many calls if these are many."""
    numbers = [int(number) for number in (row.get("tiles") or "").split(" + ") if number]
    if len(numbers) <= _FEW:
        return " + ".join(map(str, numbers))
    return f"{min(numbers)} to {max(numbers)} for each of {len(numbers)} calls"


_COLUMNS = (
    Column("family", lambda row: row["family"], right=False),
    Column("dtype", lambda row: row["dtype"], right=False),
    Column("way", lambda row: row["way"], right=False),
    Column("in a step, MiB", number("inside_bytes", "{:.1f}", _MIB)),
    Column(": plan's", _beside("plain", "inside_bytes")),
    Column("floor", number("floor_bytes", "{:.1f}", _MIB)),
    Column("with tiles", number("tiles_floor_bytes", "{:.1f}", _MIB)),
    Column("a step, ms", number("step_s", "{:.0f}", 1e-3)),
    Column(": eager's", _beside("eager", "step_s")),
    Column("first call, s", number("first_s", "{:.1f}")),
    Column("tiles", _tiles),
    Column("bits", _bits, right=False),
    Column("note", lambda row: row.get("note", ""), right=False),
)


def _of_transformers(name: str, vocabulary: int, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        config = {
            "vocab_size": vocabulary, "hidden_size": _WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 4 * _WIDTH, "max_position_embeddings": _TOKENS, "use_cache": False,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **more,
        }  # fmt: skip
        kind = getattr(transformers, f"{name}Config")
        return getattr(transformers, f"{name}ForCausalLM")(kind(**config))

    return make


def _gpt2() -> Any:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50257, n_embd=_WIDTH, n_layer=2, n_head=4, n_positions=_TOKENS, use_cache=False,
            bos_token_id=1, eos_token_id=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
        )
    )  # fmt: skip


def _t5() -> Any:
    import transformers

    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=32128, d_model=_WIDTH, d_kv=_WIDTH // 4, d_ff=4 * _WIDTH, num_layers=2, num_heads=4,
            dropout_rate=0, use_cache=False, decoder_start_token_id=0,
        )
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": _of_transformers("Llama", 32000, num_key_value_heads=2),
    "Mixtral": _of_transformers(
        "Mixtral", 32000, num_key_value_heads=2, num_local_experts=4, intermediate_size=2 * _WIDTH,
        experts_implementation="batched_mm",
    ),
    "T5": _t5,
    "GPT-2": _gpt2,
    "OPT": _of_transformers(
        "OPT", 50272, ffn_dim=4 * _WIDTH, word_embed_proj_dim=_WIDTH, dropout=0
    ),
    "GPT-NeoX": _of_transformers("GPTNeoX", 50432),
    "Gemma 2": _of_transformers(
        "Gemma2", 64000, num_key_value_heads=2, head_dim=_WIDTH // 4, tie_word_embeddings=True
    ),
    "Qwen3": _of_transformers("Qwen3", 151936, num_key_value_heads=2, head_dim=_WIDTH // 4),
}  # fmt: skip
"""In order of their vocabularies. GPT-2, Gemma 2, T5 and OPT have tied embeddings; Gemma 2 caps its
logits."""


def _loss_of(model: Any, way: str, tokens: Any) -> Any:
    import torch
    from torch.nn import functional

    if way != "linear_cross_entropy":
        return model(input_ids=tokens, labels=tokens).loss
    hidden = model.base_model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
    weight = model.get_output_embeddings().weight
    options = torch.nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(hidden, weight, tokens[:, 1:].flatten(), options=options)


def _step_of(model: Any, way: str) -> Callable[..., Any]:
    """AdamW, clipping, and gradients of two batches."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(*batches: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for tokens in batches:
            loss = _loss_of(model, way, tokens) / len(batches)
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def _inside(name: str, dtype: Any, batches: list[list[Any]]) -> tuple[int, int]:
    """What is there before a step by a plan without a limit, and what it takes inside."""
    import roam

    plain = roam.compile(_step_of(FAMILIES[name]().to(dtype), "roam"))
    for batch in batches[:2]:  # the first step makes the optimizer's state
        plain(*batch)
    memory = plain.memory()
    return memory.persistent_bytes, memory.total_bytes - memory.persistent_bytes


def _least(name: str, dtype: Any, batch: list[Any], held_bytes: int, asked_bytes: int) -> Row:
    """The least limit beyond what is there before that is found to be enough for a step that is
    refused within `asked_bytes`; and what plans of whole operators, and plans with tiles, need at
    least.
    """
    import roam

    step = _step_of(FAMILIES[name]().to(dtype), "roam")
    step(*batch)
    try:
        roam.compile(step, memory=held_bytes + asked_bytes)(*batch)
    except roam.PlanError as error:
        told = {
            "limit_bytes": error.least_bytes,
            "floor_bytes": error.floor_bytes,
            "tiles_floor_bytes": error.tiles_floor_bytes,
        }
        return {key: size - held_bytes for key, size in told.items() if size is not None}
    return {"limit_bytes": asked_bytes}


def measured(name: str, dtype: str, way: str) -> Row:
    """Trains one family in one way.

    Returns:
        ``digest`` of all losses and parameters; ``inside_bytes``, the most that a step has beside
        what is there before it, as measured; ``step_s``, the median of the processor's time of
        later steps; ``first_s``, that of the first call; by plan with tiles also ``tiles``.
    """
    import torch

    import roam
    from roam.runtime.memory_profiler import measure_peak, observed

    torch.set_num_threads(1)
    if way == "linear_cross_entropy" and name in {"Gemma 2", "T5"}:
        return {"note": "its logits are capped or scaled, which the function does not do"}
    torch.manual_seed(0)
    model = FAMILIES[name]().to(getattr(torch, dtype))
    model.train()
    if way == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    batches = [
        [torch.randint(3, vocabulary, (1, _TOKENS), generator=generator) for _ in range(_MICRO_BATCHES)]
        for _ in range(_STEPS)
    ]  # fmt: skip
    step: Any = _step_of(model, way)
    row: Row = {"note": ""}
    if way == "roam":
        step = roam.compile(step)
    elif way.startswith("roam"):
        held_bytes, inside = _inside(name, model.dtype, batches)
        told = way.rpartition(" ")[2].removesuffix("%")
        if told == "least":
            row |= _least(name, model.dtype, batches[0], held_bytes, int(inside * _TOO_LITTLE))
        else:
            row["limit_bytes"] = int(inside * float(told) / 100)
        step = roam.compile(step, memory=held_bytes + row["limit_bytes"])
    digest, seconds = hashlib.sha256(), []
    for batch in batches:
        start = time.process_time()
        try:
            loss = step(*batch)
        except roam.PlanError as error:
            return row | {
                "first_s": time.process_time() - start,
                "note": f"refused: {error.code}",
                "reason": str(error),
            }
        seconds.append(time.process_time() - start)
        digest.update(bytes_of(loss))
    for parameter in model.parameters():
        digest.update(bytes_of(parameter))
    if way.startswith("roam"):
        step.measured(*batches[0])
        memory = step.memory()
        row["inside_bytes"] = memory.measured_bytes - memory.persistent_bytes
        row["planned_bytes"] = memory.total_bytes - memory.persistent_bytes
        if memory.cuts is not None:
            row["tiles"] = " + ".join(str(tiles) for *_, tiles in memory.cuts.rows)
        row["extra_runs"] = memory.extra_runs
    else:
        with observed():
            step(*batches[0])
        model.zero_grad(set_to_none=True)
        row["inside_bytes"] = measure_peak(partial(step, *batches[0])).peak_bytes
    return row | {
        "digest": digest.hexdigest(),
        "first_s": seconds[0],
        "step_s": statistics.median(seconds[2:]),
    }


def main() -> None:
    """Measures one row in this process, and prints it."""
    try:
        row = measured(*sys.argv[1:])
    except Exception as error:  # noqa: BLE001 - others may not do what is asked
        row = row_of_failure(error)
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
