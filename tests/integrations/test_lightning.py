"""`roam.integrations.lightning`: a Trainer leaves the same bits everywhere by plans: logs,
parameters, optimizers, schedule, random state, checkpoints."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")

import lightning
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

import roam
from roam.integrations import lightning as subject
from trainers import Measured, files, leaves
from training import assert_same_bits

# It warns of loaders without workers, and its own code of what is to come in later versions.
pytestmark = pytest.mark.filterwarnings("ignore")
functional = nn.functional


class Automatic(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [part for _ in range(4) for part in (nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1))]
        self.net = nn.Sequential(*layers, nn.BatchNorm1d(8), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"twice": 2 * loss, "one": 1}, on_step=True, on_epoch=True)
        return {"loss": loss, "more": loss * 3}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("seen", outputs["more"])

    def validation_step(self, batch, batch_idx):
        self.log("val", functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Manual(Automatic):
    """Two optimizers that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        maker, judge = self.optimizers()
        maker.zero_grad()
        loss = self.critic(self.net(batch[0])).square().mean()
        self.manual_backward(loss)
        self.clip_gradients(maker, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        maker.step()
        self.toggle_optimizer(judge)
        judge.zero_grad()
        judged = (self.critic(self.net(batch[0])) - 1).square().mean()
        self.manual_backward(judged)
        judge.step()
        self.untoggle_optimizer(judge)
        self.log_dict({"loss": loss, "judged": judged})
        return {"more": judged}

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.net.parameters(), lr=1e-2),
            torch.optim.SGD(self.critic.parameters(), lr=1e-2),
        ]


def scaled() -> Any:
    """A Trainer on the CPU makes bf16-mixed of 16-mixed, unless it is given what scales. The scale
    starts too large, and grows: of 20 updates several are left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)
    return MixedPrecision("16-mixed", "cpu", scaler)


class Plain(Automatic):
    """Nothing but a loss, and no batch index."""

    def training_step(self, batch):
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("seen", outputs["loss"])


def trainer(folder: Path, plugins: Any = None, **options: Any) -> lightning.Trainer:
    options["plugins"] = None if plugins is None else plugins()
    return lightning.Trainer(
        accelerator="cpu", logger=CSVLogger(folder), log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **{"max_steps": 20, "enable_checkpointing": False, **options},
    )  # fmt: skip


def loader(batch: int = 4) -> Any:
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(4 * batch, 8, generator=generator), torch.arange(4 * batch) % 3
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch, shuffle=True)


def outcome(
    folder: Path,
    kind: Callable[[], Any] = Automatic,
    wrap: Callable[[Any], Any] = lambda module: None,
    batch: int = 4,
    resume: str | None = None,
    **options: Any,
) -> list[Any]:
    torch.manual_seed(0)
    module = kind()
    wrap(module)
    run = trainer(folder, **options)
    run.fit(module, loader(batch), loader(batch), ckpt_path=resume, weights_only=False)
    return leaves(
        module.state_dict(),
        [optimizer.state_dict() for optimizer in run.optimizers],
        [config.scheduler.state_dict() for config in run.lr_scheduler_configs],
        run.precision_plugin.state_dict(),
        run.callback_metrics,
        run.global_step,
        (Path(run.logger.log_dir) / "metrics.csv").read_text(),
    )


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Automatic, {}),
        (Automatic, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}),
        (Automatic, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        (Automatic, {"precision": "bf16-mixed"}),
        (Plain, {"accumulate_grad_batches": 2}),
        (Manual, {}),
        (Manual, {"precision": "bf16-mixed"}),
        (Automatic, {"plugins": scaled, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
        (Manual, {"plugins": scaled}),
    ],
)
def test_a_run_leaves_the_same_bits(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    plain = outcome(tmp_path / "eager", kind, **options)
    steps: list[Any] = []
    planned = outcome(
        tmp_path / "plans", kind, lambda module: steps.append(subject.compile(module)), **options
    )
    assert_same_bits(plain, planned)
    # Batches that begin, go on and end an update, before and after the optimizer has state, and one
    # that begins and ends an update, the last of an epoch.
    assert len(steps[0].plans) <= 7


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_a_run_goes_on_from_a_checkpoint(kind: Any, tmp_path: Path) -> None:
    found = []
    for name, wrap in (("eager", lambda module: None), ("plans", subject.compile)):

        def saves(part: str, name: str = name) -> dict[str, Any]:
            folder = tmp_path / name / part
            saving = ModelCheckpoint(folder / "saved", every_n_train_steps=10, save_top_k=-1)
            return {"folder": folder, "callbacks": [saving], "enable_checkpointing": True}

        whole = outcome(kind=kind, wrap=wrap, **saves("whole"))
        checkpoints = sorted((tmp_path / name / "whole" / "saved").iterdir())
        assert len(checkpoints) == 2
        rest = outcome(kind=kind, wrap=wrap, resume=str(checkpoints[0]), **saves("rest"))
        states = [
            {key: held[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "loops")}
            for held in files(tmp_path / name).values()
        ]  # fmt: skip
        found.append(leaves(whole, rest, states))
    assert_same_bits(*found)


@pytest.mark.long
def test_a_budget_holds_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"batch": 2048, "max_steps": 6}  # more than an epoch
    plain = outcome(tmp_path / "eager", **options)
    measured = Measured(monkeypatch)
    planned = outcome(
        tmp_path / "plans", wrap=lambda module: subject.compile(module, memory="60%"), **options
    )
    assert_same_bits(plain, planned)
    assert measured.steps == 6


@pytest.mark.long
def test_a_step_that_reads_the_batch_index_has_a_plan_for_each(tmp_path: Path) -> None:
    class Reads(Automatic):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, 0)["loss"] * (1 + batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("seen", outputs["loss"])

    plain = outcome(tmp_path / "eager", Reads)
    assert_same_bits(plain, outcome(tmp_path / "plans", Reads, subject.compile))


class Averaged(Plain):
    """Batch norm: after the last epoch one more only updates it, and leaves gradients alone."""


def averaging(**options: Any) -> dict[str, Any]:
    average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    return {"max_steps": -1, "max_epochs": 3, "callbacks": [average], **options}


@pytest.mark.auto
@pytest.mark.parametrize("more", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
def test_an_epoch_without_backward_passes_leaves_the_same_bits(more: Any, tmp_path: Path) -> None:
    plain = outcome(tmp_path / "eager", Averaged, **averaging(**more))
    planned = outcome(tmp_path / "plans", Averaged, subject.compile, **averaging(**more))
    assert_same_bits(plain, planned)


def norms(module: Any) -> list[Any]:
    return [None if item.grad is None else item.grad.norm() for item in module.parameters()]


class Sees(Plain):
    """A hook after the update reads gradients."""

    seen: Any

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen = [*getattr(self, "seen", []), norms(self)]


class SeesByHand(Sees, Manual):
    training_step = Manual.training_step


class Watch(lightning.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen.append(norms(module))


class Scheduled(Plain):
    """A schedule reads gradients."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

        def largest(_: int) -> float:
            return max(0 if norm is None else float(norm) for norm in norms(self))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, largest)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("kind", [Sees, SeesByHand, Scheduled])
def test_what_reads_gradients_after_the_update_sees_them(kind: Any, tmp_path: Path) -> None:
    found: list[Any] = []
    for name, wrap in (("eager", lambda module: None), ("plans", subject.compile)):
        module, watch = None, Watch()

        def make(wrap: Any = wrap) -> Any:
            nonlocal module
            module = kind()
            wrap(module)
            return module

        left = outcome(tmp_path / name, make, callbacks=[watch], max_steps=6)
        found.append(leaves(left, watch.seen, getattr(module, "seen", None)))
    assert_same_bits(*found)


@pytest.mark.parametrize("kind", [Plain, Manual])
@pytest.mark.parametrize("keep_grads", [None, True, False])
def test_gradients_are_kept_only_for_what_may_read_them(
    kind: Any, keep_grads: Any, tmp_path: Path
) -> None:
    class Quiet(kind):
        on_train_batch_end = lightning.LightningModule.on_train_batch_end

    module = Quiet()
    subject.compile(module, keep_grads=keep_grads)
    trainer(tmp_path, max_steps=6).fit(module, loader())
    assert any(item.grad is not None for item in module.net.parameters()) is bool(keep_grads)


def test_the_callbacks_that_are_known_read_no_gradients() -> None:
    names = [name for name in callbacks.__all__ if "Weight" not in name and name != "Callback"]
    sources = {inspect.getmodule(getattr(callbacks, name)) for name in names}
    assert len(sources) > 15
    for source in [*sources, torch.optim.lr_scheduler, torch.optim.swa_utils]:
        assert not re.search(r"\.grad\b|getattr\(.*grad", inspect.getsource(source)), source


class Measures(Plain):
    """Logs metrics in the documented forms, and clips by a hook that logs."""

    def __init__(self) -> None:
        super().__init__()
        torchmetrics = pytest.importorskip("torchmetrics")
        kinds = torchmetrics.classification
        self.accuracy = kinds.MulticlassAccuracy(3)
        self.several = torchmetrics.MetricCollection(
            [kinds.MulticlassPrecision(3), kinds.MulticlassRecall(3)]
        )

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.accuracy(out, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.several(out, batch[1])
        self.log_dict(self.several, on_step=False, on_epoch=True)
        return functional.cross_entropy(out, batch[1])

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.log("norm", norm, on_step=True)


def test_metrics_are_logged(tmp_path: Path) -> None:
    plain = outcome(tmp_path / "eager", Measures)
    assert_same_bits(plain, outcome(tmp_path / "plans", Measures, subject.compile))


@pytest.mark.parametrize(
    ("kind", "named"),
    [("calls it afterwards", "accuracy"), ("is no part of the module", "MulticlassAccuracy")],
)
def test_a_metric_that_a_log_after_the_step_would_change_is_refused(
    kind: str, named: str, tmp_path: Path
) -> None:
    class Early(Measures):
        def training_step(self, batch, batch_idx):
            metric = self.accuracy if named == "accuracy" else self.hidden[0]
            metric(self.net(batch[0]), batch[1])
            self.log("accuracy", metric, metric_attribute="hidden")
            metric(self.net(batch[0]), batch[1])
            return functional.cross_entropy(self.net(batch[0]), batch[1])

    module = Early()
    module.hidden = [type(module.accuracy)(3)]
    error = refusal(tmp_path, module)
    assert error.code == "trainer_log"
    assert kind in str(error)
    assert named in str(error)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"profiler": "simple"},
        lambda: {"limit_train_batches": 3, "accumulate_grad_batches": 2, "val_check_interval": 1},
        lambda: {"callbacks": [callbacks.GradientAccumulationScheduler({1: 3})]},
        lambda: {"callbacks": [callbacks.EMAWeightAveraging()]},
        lambda: {"callbacks": [callbacks.ModelPruning("l1_unstructured", amount=0.3)]},
        lambda: {"callbacks": [callbacks.EarlyStopping("val", patience=1, min_delta=10.0)]},
        lambda: averaging(precision="bf16-mixed"),
    ],
)
def test_what_changes_steps_from_outside_is_followed(options: Any, tmp_path: Path) -> None:
    plain = outcome(tmp_path / "eager", **options())
    assert_same_bits(plain, outcome(tmp_path / "plans", wrap=subject.compile, **options()))


@pytest.mark.parametrize("name", ["LBFGS", "SAM"])
def test_an_optimizer_that_runs_the_closure_itself_is_followed_or_refused(
    name: str, tmp_path: Path
) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            super().step()
            return super().step(closure)

    class Searches(Plain):
        def configure_optimizers(self):
            kind = torch.optim.LBFGS if name == "LBFGS" else Twice
            return kind(self.parameters(), lr=0.1)

    if name == "LBFGS":
        assert refusal(tmp_path, Searches()).code == "optimizer"
    else:
        plain = outcome(tmp_path / "eager", Searches)
        assert_same_bits(plain, outcome(tmp_path / "plans", Searches, subject.compile))


def test_steps_that_return_nothing_are_left_out(tmp_path: Path) -> None:
    class Sometimes(Plain):
        def training_step(self, batch):
            loss = super().training_step(batch)
            return loss if batch[1][0] == 0 else None

        def on_train_batch_end(self, outputs, batch, batch_idx):
            """Logs nothing."""

    plain = outcome(tmp_path / "eager", Sometimes)
    assert_same_bits(plain, outcome(tmp_path / "plans", Sometimes, subject.compile))


def refusal(tmp_path: Path, module: Any, **options: Any) -> roam.CaptureError:
    subject.compile(module)
    with pytest.raises(roam.CaptureError) as caught:
        trainer(tmp_path, **options).fit(module, loader())
    return caught.value


@pytest.mark.parametrize(
    "hook",
    ["on_after_backward", "on_before_optimizer_step", "optimizer_step", "optimizer_zero_grad"],
)
def test_a_hook_within_the_step_is_refused(hook: str, tmp_path: Path) -> None:
    def override(*_: Any, **__: Any) -> None:
        """Does nothing."""

    error = refusal(tmp_path, type("Hooked", (Automatic,), {hook: override})())
    assert error.code == "trainer_hook"
    assert f"Hooked.{hook}" in str(error)


def test_a_callback_within_the_step_is_refused(tmp_path: Path) -> None:
    class Watch(lightning.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            """Does nothing."""

    assert refusal(tmp_path, Automatic(), callbacks=[Watch()]).code == "trainer_hook"


@pytest.mark.parametrize("hook", subject._BETWEEN)
def test_a_hook_of_an_object_is_refused(hook: str, tmp_path: Path) -> None:
    watch = callbacks.LambdaCallback(**{hook: lambda *_: None})
    assert refusal(tmp_path, Automatic(), callbacks=[watch]).code == "trainer_hook"
    module = Automatic()
    setattr(module, hook, lambda *_: None)
    assert refusal(tmp_path, module).code == "trainer_hook"


@pytest.mark.parametrize("name", subject._REPLACED)
def test_a_module_with_a_method_of_its_own_in_place_is_refused(name: str) -> None:
    module = Automatic()
    setattr(module, name, getattr(module, name))
    with pytest.raises(roam.CaptureError, match=name) as caught:
        subject.compile(module)
    assert caught.value.code == "trainer_hook"


def test_loops_of_another_class_are_refused(tmp_path: Path) -> None:
    module, run = Plain(), trainer(tmp_path)
    loop = run.fit_loop.epoch_loop
    loop.automatic_optimization = type("Loop", (type(loop.automatic_optimization),), {})(run)
    subject.compile(module)
    with pytest.raises(roam.CaptureError, match="Loop, which is none") as caught:
        run.fit(module, loader())
    assert caught.value.code == "trainer_hook"


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, Automatic(), precision="64-true").code == "trainer_precision"
    own = type("Own", (MixedPrecision,), {})("bf16-mixed", "cpu")
    error = refusal(tmp_path, Automatic(), plugins=lambda: own)
    assert error.code == "trainer_precision"
    assert "Own" in str(error)


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    own = type("Own", (SingleDeviceStrategy,), {})
    error = refusal(tmp_path, Automatic(), strategy=own())
    assert error.code == "trainer_devices"
    assert "Own" in str(error)


def test_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roam.integrations.versions.version", lambda _: "1.9.5")
    with pytest.raises(roam.CaptureError, match=r"lightning 1\.9\.5") as caught:
        subject.compile(Automatic())
    assert caught.value.code == "library_version"
