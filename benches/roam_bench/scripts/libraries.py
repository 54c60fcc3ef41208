"""Lightning, torchaudio-like speech and other libraries' loops."""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import torch
from torch import nn

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional


def _data() -> Any:
    dataset = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(0, 3, (16,)))
    return torch.utils.data.DataLoader(dataset, batch_size=4)


def _fit(module: Any) -> None:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, _data())


@script("Lightning: manual optimization (a GAN-like module, its step wrapped)", "lightning")
def lightning_manual(wrap: Wrap) -> Any:
    import lightning

    losses: list[Any] = []

    class Manual(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net.parameters(), lr=1e-2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses.append(step(self.net, self.optimizers().optimizer, *batch))

    @wrap
    def step(net: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    module = Manual()
    _fit(module)
    return losses, module


@script("Lightning Fabric: setup, backward, clipping", "lightning")
def lightning_fabric(wrap: Wrap) -> Any:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(_data())

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        return loss

    return [train_step(x, y) for x, y in loader], net


@script("Lightning: a LightningModule's training_step in a loop of one's own", "lightning")
def lightning_module_by_hand(wrap: Wrap) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
            return {
                "optimizer": optimizer,
                "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
            }

    module = Module()
    found = module.configure_optimizers()
    optimizer, scheduler = found["optimizer"], found["lr_scheduler"]

    @wrap
    def step(batch: Any, index: int) -> Any:
        loss = module.training_step(batch, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    history = [step(batch, 0) for batch in _data()]
    scheduler.step()
    return history, module, optimizer, scheduler


@script(
    "einops and functional style: rearrange written as reshape, parameters in a dict, update by torch.func.grad"
)
def functional_style(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    params = {name: value.detach().clone() for name, value in model.named_parameters()}

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        return functional.mse_loss(torch.func.functional_call(model, params, (x,)), y)

    @wrap
    def update(params: Any, x: Any, y: Any) -> Any:
        grads, loss = torch.func.grad_and_value(loss_fn)(params, x, y)
        return {name: value - 0.1 * grads[name] for name, value in params.items()}, loss

    history = []
    for _ in range(4):
        params, loss = update(params, torch.randn(6, 8), torch.randn(6, 1))
        history.append(loss)
    return history, params
