"""Loops of one's own, as accelerate's guide and torchtune's recipes write them: 20 steps by plans
leave eager's bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import roam
from roam.runtime import Step
from trainers import Measured, files, leaves
from training import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of later versions
Wrap = Callable[[Any], Any]


def both(script: Callable[[Wrap], list[Any]], wrap: Wrap = roam.compile) -> None:
    assert_same_bits(script(lambda step: step), script(wrap))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [{}, {"mixed_precision": "bf16"}, {"gradient_accumulation_steps": 3}],
    ids=["plain", "bf16", "accumulation"],
)
def test_the_loop_of_accelerate(options: dict[str, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")

    def script(wrap: Wrap) -> list[Any]:
        accelerate.state.AcceleratorState._reset_state(True)
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, **options)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        data = torch.utils.data.TensorDataset(torch.randn(20, 8), torch.randint(0, 3, (20,)))
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        prepared = accelerator.prepare(model, optimizer, loader, scheduler)
        model, optimizer, loader, scheduler = prepared

        @wrap
        def train_step(x, y):
            with accelerator.autocast():
                loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        returned = []
        for _ in range(4):
            for x, y in loader:
                with accelerator.accumulate(model):
                    returned.append(train_step(x, y))
                    scheduler.step()
        assert not isinstance(train_step, Step) or len(train_step.plans) <= 6
        return leaves(returned, *(part.state_dict() for part in (model, optimizer, scheduler)))

    both(script)


def test_a_run_of_accelerate_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def run(wrap: Wrap, folder: Path, steps: int, resume: str | None = None) -> list[Any]:
        accelerate.state.AcceleratorState._reset_state(True)
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, project_dir=folder)
        layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3)
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        prepared = accelerator.prepare(model, optimizer, scheduler)
        model, optimizer, scheduler = prepared
        if resume is not None:
            accelerator.load_state(folder / resume)

        @wrap
        def train_step(x, y):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        returned = []
        for number in range(steps):
            returned.append(train_step(torch.randn(4, 8), torch.randint(0, 3, (4,))))
            scheduler.step()
            if number % 10 == 9:
                accelerator.save_state(folder / f"{resume or ''}{number + 1}")
        return leaves(returned, *(part.state_dict() for part in prepared))

    def both_parts(wrap: Wrap, folder: Path) -> list[Any]:
        whole, rest = run(wrap, folder, 20), run(wrap, folder, 10, resume="10")
        assert_same_bits(whole[-len(rest) + 10 :], rest[10:])
        return leaves(whole, rest, files(folder))

    assert_same_bits(
        both_parts(lambda step: step, tmp_path / "eager"),
        both_parts(roam.compile, tmp_path / "plans"),
    )


def test_amp_with_a_scaler_that_skips_a_step() -> None:
    def script(wrap: Wrap) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

        @wrap
        def train_step(x, y):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss

        returned = []
        for number in range(20):
            x = torch.randn(64, 32) * (float("inf") if number == 7 else 1)
            returned.append(train_step(x, torch.randint(0, 8, (64,))))
            scheduler.step()
        parts = (model, optimizer, scaler, scheduler)
        return leaves(returned, *(part.state_dict() for part in parts))

    both(script)


class TestRecipesOfTorchtune:
    """Activation checkpointing with accumulation and hooks on gradients, or with optimizers that
    run in the backward pass."""

    def model(self) -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).train()
        model.gradient_checkpointing_enable()
        return model

    def run(self, step: Any, model: Any, optimizers: Any, every: int, steps: int = 20) -> list[Any]:
        returned = []
        for number in range(1, steps + 1):
            tokens = torch.randint(0, 64, (8, 32))
            returned.append(step(tokens, number % every == 0))
        return leaves(returned, model.state_dict(), [each.state_dict() for each in optimizers])

    def accumulating(self, wrap: Wrap) -> list[Any]:
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

        @wrap
        def train_step(tokens, update):
            loss = model(input_ids=tokens, labels=tokens).loss / 2
            loss.backward()
            if update:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return self.run(train_step, model, [optimizer], every=2)

    def in_backward(self, wrap: Wrap, steps: int = 20) -> list[Any]:
        model = self.model()
        optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

        def update(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)

        @wrap
        def train_step(tokens, _):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            return loss.detach()

        return self.run(train_step, model, optimizers.values(), every=1, steps=steps)

    @pytest.mark.long
    def test_accumulation_and_hooks(self) -> None:
        both(self.accumulating)

    def test_optimizers_in_the_backward_pass(self) -> None:
        both(self.in_backward)

    @pytest.mark.long
    def test_optimizers_in_the_backward_pass_within_a_budget(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        eager = self.in_backward(lambda step: step, 6)
        measured = Measured(monkeypatch)
        assert_same_bits(eager, self.in_backward(functools.partial(roam.compile, memory="85%"), 6))
        assert measured.steps == 6
