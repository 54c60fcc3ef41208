"""What it costs to train within less than parameters and optimizer state take: `roam bench pages`.

Small networks at small batches, where nearly all memory is persistent, train without a limit and
within half of what persists, with a folder of files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from roam_bench.results import Record, Row, Task, bytes_of, row_of_failure, row_of_process
from roam_bench.run import Benchmark, Column, Table, check_named, number

_WORDS, _TOKENS, _WIDTH, _LAYERS = 512, 32, 128, 4
_STEPS = 8
_SHARE = 0.5
_MIB = 2**20


def benchmark(arguments: argparse.Namespace) -> Benchmark:
    """A row for each network."""
    check_named(arguments.only, NETS)
    tasks = [
        Task({"net": name}, partial(row_of_process, name, __name__, name))
        for name in NETS
        if name in (arguments.only or NETS)
    ]
    settings = {"only": arguments.only}
    return Benchmark("pages", settings, tasks, _COLUMNS, lambda record: [rows_table(record)])


def rows_table(record: Record) -> Table:
    """Every network."""
    return Table("Files", _COLUMNS, record["rows"])


def _over(name: str, other: str) -> Callable[[Row], str]:
    def told(row: Row) -> str:
        return f"{row[name] / row[other]:.2f}" if row.get(name) and row.get(other) else ""

    return told


_COLUMNS = (
    Column("network", lambda row: row["net"], right=False),
    Column("persistent, MiB", number("persistent_bytes", "{:.1f}", _MIB)),
    Column("limit", number("limit_bytes", "{:.1f}", _MIB)),
    Column("moved", number("moved_bytes", "{:.1f}", _MIB)),
    Column(": least", _over("moved_bytes", "least_moved_bytes")),
    Column("run again", lambda row: str(row.get("extra_runs", ""))),
    Column("a step, ms", number("free_s", "{:.1f}", 1e-3)),
    Column("with files: its thread", _over("step_s", "free_s")),
    Column("all threads", _over("all_s", "free_s")),
    Column("planned", _over("planned_s", "model_s")),
    Column("first call, s", number("first_s", "{:.1f}")),
    Column("bits", lambda row: row.get("bits", ""), right=False),
    Column("note", lambda row: row.get("note", ""), right=False),
)


def _of_transformers(kind: str, head: str, **config: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        model = getattr(transformers, f"{kind}{head}")(
            getattr(transformers, f"{kind}Config")(**config)
        )
        return lambda ids: model(input_ids=ids, labels=ids).loss, model

    return make


_TEXT = {
    "vocab_size": _WORDS, "hidden_size": _WIDTH, "num_hidden_layers": _LAYERS, "num_attention_heads": 4,
    "intermediate_size": 4 * _WIDTH, "max_position_embeddings": _TOKENS,
}  # fmt: skip
_GPT2 = {
    "vocab_size": _WORDS, "n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": 4, "n_positions": _TOKENS, "use_cache": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _of_words(body: Callable[[Any], Any]) -> Any:
    """A network of layers over embedded words, which guesses each word."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.body = nn.Embedding(_WORDS, _WIDTH), body(nn)
            self.head = nn.Linear(_WIDTH, _WORDS)

        def forward(self, ids: Any) -> Any:
            found = self.body(self.words(ids))
            found = found if isinstance(found, torch.Tensor) else found[0]
            return nn.functional.cross_entropy(self.head(found).flatten(0, 1), ids.flatten())

    model = Net()
    return model, model


def _mlp(nn: Any) -> Any:
    layers = (
        layer
        for _ in range(2 * _LAYERS)
        for layer in (nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))
    )
    return nn.Sequential(*layers)


def _adapted(nn: Any) -> Any:
    """Frozen layers, each with a trained one of low rank."""

    class Adapted(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)
            self.down, self.up = nn.Linear(_WIDTH, 4), nn.Linear(4, _WIDTH)

        def forward(self, x: Any) -> Any:
            return nn.functional.gelu(self.base(x) + self.up(self.down(x)))

    return nn.Sequential(*(Adapted() for _ in range(4 * _LAYERS)))


def _encoder(nn: Any) -> Any:
    layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)


NETS: dict[str, Callable[[], Any]] = {
    "gpt2": _of_transformers("GPT2", "LMHeadModel", **_GPT2),
    "llama": _of_transformers("Llama", "ForCausalLM", **_TEXT, num_key_value_heads=2, use_cache=False),
    "bert": _of_transformers("Bert", "ForMaskedLM", **_TEXT),
    "opt": _of_transformers(
        "OPT", "ForCausalLM", vocab_size=_WORDS, hidden_size=_WIDTH, ffn_dim=4 * _WIDTH, num_hidden_layers=_LAYERS,
        num_attention_heads=4, max_position_embeddings=_TOKENS, word_embed_proj_dim=_WIDTH, use_cache=False,
    ),
    "mlp": partial(_of_words, _mlp),
    "lora": partial(_of_words, _adapted),
    "gru": partial(_of_words, lambda nn: nn.GRU(_WIDTH, _WIDTH, _LAYERS, batch_first=True)),
    "encoder": partial(_of_words, _encoder),
}  # fmt: skip


def _made(name: str) -> tuple[Callable[[Any], Any], Any, Any]:
    """(step, model, optimizer): AdamW and clipping."""
    import torch

    torch.manual_seed(0)
    loss_of, model = NETS[name]()
    model.train()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def step(ids: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss.detach()

    return step, model, optimizer


def _trained(step: Callable[[Any], Any], model: Any) -> Row:
    """Losses and parameters as a digest; seconds of the first call, and of later ones by the
    step's own thread and by all.
    """
    import torch

    generator, digest = torch.Generator().manual_seed(1), hashlib.sha256()
    own, everyone = [], []
    for _ in range(_STEPS):
        ids = torch.randint(3, _WORDS, (1, _TOKENS), generator=generator)
        thread, process = time.thread_time(), time.process_time()
        loss = step(ids)
        own.append(time.thread_time() - thread)
        everyone.append(time.process_time() - process)
        digest.update(bytes_of(loss))
    for parameter in model.parameters():
        digest.update(bytes_of(parameter))
    return {
        "digest": digest.hexdigest(),
        "first_s": everyone[0],
        "step_s": statistics.median(own[2:]),
        "all_s": statistics.median(everyone[2:]),
    }


def measured(name: str) -> Row:
    """Trains one network without a limit and within one.

    Returns:
        ``free_s``, the processor's time of a step without a limit; ``step_s`` and ``all_s``, that
        of the step's own thread and of all threads within the limit; ``planned_s`` and
        ``model_s``, what the plan says of the step with files, its waiting included, and without.
    """
    import torch

    import roam

    torch.set_num_threads(1)
    step, model, optimizer = _made(name)
    plain = _trained(roam.compile(step), model)
    state = [one for some in optimizer.state.values() for one in some.values()]
    persistent_bytes = sum(one.nbytes for one in (*model.parameters(), *state))
    row: Row = {
        "persistent_bytes": persistent_bytes,
        "limit_bytes": int(_SHARE * persistent_bytes),
        "free_s": plain["step_s"],
        "note": "",
    }
    del step, model, optimizer, state
    with tempfile.TemporaryDirectory() as folder:
        step, model, _ = _made(name)
        compiled = roam.compile(step, memory=row["limit_bytes"], offload=folder)
        try:
            row |= _trained(compiled, model)
        except roam.PlanError as error:
            return row | {"note": f"refused: {error.code}", "reason": str(error)}
        memory = compiled.memory()
    row["bits"] = "equal" if row.pop("digest") == plain["digest"] else "different"
    return row | {
        "moved_bytes": sum((*memory.read_bytes.values(), *memory.written_bytes.values())),
        "least_moved_bytes": memory.least_moved_bytes,
        "extra_runs": memory.extra_runs,
        "total_bytes": memory.total_bytes,
        "planned_s": memory.step_s + memory.extra_s,
        "model_s": memory.step_s,
    }


def main() -> None:
    """Measures one row in this process, and prints it."""
    try:
        row = measured(*sys.argv[1:])
    except Exception as error:  # noqa: BLE001 - a row says what has failed
        row = row_of_failure(error)
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
