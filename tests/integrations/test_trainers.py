"""`roam.integrations.transformers`: Trainer and TRL's SFTTrainer leave the same bits everywhere by
plans: losses, norms, parameters, optimizer, schedule, random state, checkpoints."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

import transformers

import roam
from newer import needs_2_15
from roam.integrations import transformers as subject
from trainers import Measured, files, leaves, without_times
from training import assert_same_bits

# Their own code warns of what is to come in later versions.
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.randint(3, 99, (32, 48), generator=torch.Generator().manual_seed(3))
DATA = [{"input_ids": row, "labels": row} for row in TOKENS]


def make(folder: Path, callbacks: Any = (), **options: Any) -> transformers.Trainer:
    config = transformers.GPT2Config(
        vocab_size=99, n_layer=2, n_embd=16, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2, use_cache=False
    )  # fmt: skip
    defaults = {"save_strategy": "no", "max_steps": 20, "per_device_train_batch_size": 4}
    args = transformers.TrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, logging_steps=1, use_cpu=True,
        **{**defaults, **options},
    )  # fmt: skip
    return transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=args,
        train_dataset=DATA,
        eval_dataset=DATA[:4],
        callbacks=list(callbacks),
    )


def outcome(
    make: Callable[[], transformers.Trainer], wrap: Callable[[Any], Any], resume: bool = False
) -> list[Any]:
    torch.manual_seed(0)
    trainer = make()
    wrap(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return leaves(
        without_times(trainer.state.log_history),
        trainer.model.state_dict(),
        trainer.optimizer.state_dict(),
        trainer.lr_scheduler.state_dict(),
    )


def eager(_: Any) -> None:
    """Leaves a trainer as it is."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [
        {"lr_scheduler_type": "cosine", "warmup_steps": 3, "eval_strategy": "steps", "eval_steps": 7},
        {"gradient_accumulation_steps": 3, "num_train_epochs": 3, "max_steps": -1},
        {"max_grad_norm": 0.0, "bf16": True, "optim": "adafactor"},
        {"fp16": True, "gradient_checkpointing": True, "neftune_noise_alpha": 5.0},
    ],
    ids=["evaluation", "accumulation", "unclipped", "scaled"],
)  # fmt: skip
def test_a_run_leaves_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    plain = outcome(lambda: make(tmp_path, **options), eager)
    assert_same_bits(plain, outcome(lambda: make(tmp_path, **options), subject.compile))


@pytest.mark.long
def test_a_compiled_model_whose_graph_breaks_leaves_the_same_bits(tmp_path: Path) -> None:
    """GPT-2 logs a warning as it chooses its loss."""
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 4}
    torch.compiler.reset()
    plain = outcome(lambda: make(tmp_path, **options), eager)
    assert_same_bits(plain, outcome(lambda: make(tmp_path, **options), subject.compile))
    assert torch._dynamo.utils.counters["graph_break"]
    torch.compiler.reset()


def test_few_plans_serve_a_run_and_the_trainer_is_whole_afterwards(tmp_path: Path) -> None:
    trainer = make(tmp_path, gradient_accumulation_steps=2, lr_scheduler_type="constant")
    step = subject.compile(trainer)
    trainer.train()
    assert len(step.plans) <= 8
    assert "clip_grad_norm_" not in vars(trainer.accelerator)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.model(**trainer.data_collator(DATA[:2])).loss.backward()
    trainer.optimizer.step()
    assert not all(map(torch.equal, before, trainer.model.parameters()))


@pytest.mark.long
def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 10, "lr_scheduler_type": "cosine"}

    def both_parts(folder: Path, wrap: Callable[[Any], Any]) -> list[Any]:
        whole = outcome(lambda: make(folder, **options), wrap)
        (folder / "checkpoint-20").rename(folder / "whole")
        rest = outcome(lambda: make(folder, **options), wrap, resume=True)
        held = files(folder)
        assert {path.split("/")[0] for path in held} == {"checkpoint-10", "checkpoint-20", "whole"}
        return leaves(whole, rest, held)

    assert_same_bits(
        both_parts(tmp_path / "eager", eager), both_parts(tmp_path / "plans", subject.compile)
    )


def test_a_budget_holds_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "per_device_train_batch_size": 32,
        "max_steps": 6,
    }  # the first, one that is checked, and others
    plain = outcome(lambda: make(tmp_path, **options), eager)
    measured = Measured(monkeypatch)
    steps: list[Any] = []
    planned = outcome(
        lambda: make(tmp_path, **options),
        lambda trainer: steps.append(subject.compile(trainer, memory="80%")),
    )
    assert_same_bits(plain, planned)
    assert measured.steps == 6
    assert steps[0].memory().extra_runs > 0


def test_a_callback_within_the_step_is_refused(tmp_path: Path) -> None:
    event = "on_pre_optimizer_step"
    of_class = type("Watch", (transformers.TrainerCallback,), {event: lambda *_, **__: None})()
    of_object = transformers.TrainerCallback()
    setattr(of_object, event, lambda *_, **__: None)
    for callback in (of_class, of_object):
        trainer = make(tmp_path, callbacks=[callback])
        subject.compile(trainer)
        with pytest.raises(roam.CaptureError, match=rf"\.{event}.*register_hook") as refusal:
            trainer.train()
        assert refusal.value.code == "trainer_hook"


def norms(model: Any) -> list[Any]:
    return [None if item.grad is None else item.grad.norm() for item in model.parameters()]


class Watch(transformers.TrainerCallback):
    """Sees gradients after the update, and what is left of them at the end of the step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_optimizer_step(self, args, state, control, model, **_):
        self.seen.append(norms(model))

    def on_step_end(self, args, state, control, model, **_):
        self.seen.append(norms(model))


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"fp16": True}])
def test_a_callback_after_the_update_sees_gradients(
    options: dict[str, Any], tmp_path: Path
) -> None:
    found, kinds = [], []
    for wrap in (eager, lambda trainer: kinds.append(subject.compile(trainer))):
        watch = Watch()
        left = outcome(partial(make, tmp_path, [watch], max_steps=6, **options), wrap)
        assert any(norm is not None for norm in watch.seen[0])
        found.append(leaves(left, watch.seen))
    assert_same_bits(*found)
    assert len(kinds[0].plans) <= 8


@pytest.mark.auto
@needs_2_15
def test_a_schedule_that_reads_gradients_sees_them(tmp_path: Path) -> None:
    def made() -> transformers.Trainer:
        trainer = make(tmp_path, max_steps=4)
        adafactor = transformers.Adafactor(
            trainer.model.parameters(), relative_step=True, warmup_init=True, lr=None
        )
        trainer.optimizer = adafactor
        trainer.lr_scheduler = transformers.optimization.AdafactorSchedule(adafactor)
        return trainer

    plain = outcome(made, eager)
    assert_same_bits(plain, outcome(made, subject.compile))


def test_the_schedules_that_are_known_read_no_gradients() -> None:
    module = transformers.optimization
    for kind in vars(module).values():
        is_own = getattr(kind, "__module__", "") == module.__name__
        if is_own and kind not in (transformers.Adafactor, module.AdafactorSchedule):
            assert not re.search(r"\.grad\b|getattr\(.*grad", inspect.getsource(kind)), kind


@pytest.mark.parametrize("options", [{"torch_empty_cache_steps": 2}, {"optim": "lomo"}])
def test_what_runs_within_the_step_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = make(tmp_path, **options)
    subject.compile(trainer)
    with pytest.raises(roam.CaptureError, match=next(iter(options))) as refusal:
        trainer.training_step(trainer.model, {})
    assert refusal.value.code == "trainer_hook"


@pytest.mark.parametrize("name", subject._AROUND_UPDATE)
def test_a_trainer_with_a_loop_or_clipping_of_its_own_is_refused(name: str, tmp_path: Path) -> None:
    trainer = make(tmp_path)
    assert callable(getattr(trainer, name))
    setattr(trainer, name, lambda *_, **__: None)
    subject.compile(trainer)
    with pytest.raises(roam.CaptureError, match=name) as refusal:
        trainer.training_step(trainer.model, {})
    assert refusal.value.code == "trainer_hook"


def test_several_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path)
    subject.compile(trainer)
    monkeypatch.setattr(trainer.args, "_n_gpu", 2)
    with pytest.raises(roam.CaptureError, match="several devices") as refusal:
        trainer.training_step(trainer.model, {})
    assert refusal.value.code == "trainer_devices"


def test_an_unknown_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path)
    monkeypatch.setattr("roam.integrations.versions.version", lambda _: "4.57.1")
    with pytest.raises(roam.CaptureError, match=r"transformers 4\.57\.1.*>=5,<6") as refusal:
        subject.compile(trainer)
    assert refusal.value.code == "library_version"


def sft(folder: Path, **options: Any) -> transformers.Trainer:
    datasets, peft = pytest.importorskip("datasets"), pytest.importorskip("peft")
    trl, tokenizers = pytest.importorskip("trl"), pytest.importorskip("tokenizers")
    datasets.disable_progress_bars()
    marks, words = ["<pad>", "<eos>", "<unk>"], ["the", "a", "cat", "dog", "sees", "hears", "big"]
    words = [*marks, *words]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    plain = tokenizers.Tokenizer(model)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    texts = [f"the {words[5 + i % 2]} {words[7 + i % 3]} a cat" for i in range(32)]
    args = trl.SFTConfig(
        output_dir=str(folder), max_steps=20, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_steps=2, use_cpu=True, bf16=False, max_length=16, **options,
    )  # fmt: skip
    return trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=args,
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(
            r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
    )


@pytest.mark.long
def test_sft_of_a_lora_leaves_the_same_bits_and_metrics(tmp_path: Path) -> None:
    plain = outcome(lambda: sft(tmp_path), eager)
    assert_same_bits(plain, outcome(lambda: sft(tmp_path), subject.compile))
    assert any(isinstance(value, float) for value in plain)


def test_an_unknown_version_of_trl_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = sft(tmp_path)
    monkeypatch.setattr(
        "roam.integrations.versions.version",
        lambda name: "2.0.0" if name == "trl" else metadata.version(name),
    )
    with pytest.raises(roam.CaptureError, match=r"trl 2\.0\.0"):
        subject.compile(trainer)
