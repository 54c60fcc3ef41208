"""Meta-learning and few-shot learning."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional


@script("MAML: inner updates with create_graph, outer Adam")
def maml(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    @wrap
    def train_step(tasks: Any) -> Any:
        optimizer.zero_grad()
        outer = 0.0
        for x_support, y_support, x_query, y_query in tasks:
            params = dict(model.named_parameters())
            for _ in range(2):
                loss = functional.mse_loss(functional_call(model, params, (x_support,)), y_support)
                grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
                params = {
                    name: p - 0.01 * g for (name, p), g in zip(params.items(), grads, strict=True)
                }
            outer = outer + functional.mse_loss(functional_call(model, params, (x_query,)), y_query)
        outer = outer / len(tasks)
        outer.backward()
        optimizer.step()
        return outer

    history = [
        train_step([tuple(torch.randn(5, 1) for _ in range(4)) for _ in range(3)]) for _ in range(3)
    ]
    return history, model, optimizer


@script("PyTorch documentation: MAML for a batch of tasks, by vmap and grad")
def maml_vmap(wrap: Wrap) -> Any:
    net = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
    params = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    opt = torch.optim.Adam(params.values(), lr=1e-3)

    def loss_for_task(params: Any, x1: Any, y1: Any, x2: Any, y2: Any) -> Any:
        def inner(params: Any) -> Any:
            return functional.mse_loss(functional_call(net, params, (x1,)), y1)

        grads = torch.func.grad(inner)(params)
        adapted = {name: params[name] - 0.1 * grads[name] for name in params}
        return functional.mse_loss(functional_call(net, adapted, (x2,)), y2)

    @wrap
    def train_step(*batch: Any) -> Any:
        opt.zero_grad()
        losses = torch.func.vmap(loss_for_task, in_dims=(None, 0, 0, 0, 0))(params, *batch)
        loss = losses.mean()
        loss.backward()
        opt.step()
        return loss

    return [train_step(*(torch.randn(4, 5, 1) for _ in range(4))) for _ in range(3)], params, opt


@script("Reptile: an inner optimizer made anew for each task, weights moved towards the result")
def reptile(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    @wrap
    def train_on_batch(x: Any, y: Any) -> Any:
        model.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        for param in model.parameters():
            param.data -= 0.02 * param.grad.data
        return loss

    history = []
    for iteration in range(3):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        history += [train_on_batch(torch.randn(5, 1), torch.randn(5, 1)) for _ in range(3)]
        after = model.state_dict()
        step = 0.1 * (1 - iteration / 3)
        model.load_state_dict(
            {name: before[name] + (after[name] - before[name]) * step for name in before}
        )
    return history, model


@script("Prototypical networks: class means, squared distances, accuracy")
def prototypical_networks(wrap: Wrap) -> Any:
    encoder = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    )
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    @wrap
    def train_step(support: Any, query: Any) -> Any:
        ways, shots = support.shape[:2]
        optimizer.zero_grad()
        z = encoder(torch.cat([support.flatten(0, 1), query.flatten(0, 1)], 0))
        prototypes = z[: ways * shots].view(ways, shots, -1).mean(1)
        distances = torch.pow(z[ways * shots :].unsqueeze(1) - prototypes.unsqueeze(0), 2).sum(2)
        log_p = functional.log_softmax(-distances, dim=1).view(ways, query.size(1), -1)
        target = torch.arange(ways).view(ways, 1, 1).expand(ways, query.size(1), 1).long()
        loss = -log_p.gather(2, target).squeeze().view(-1).mean()
        _, y_hat = log_p.max(2)
        accuracy = torch.eq(y_hat, target.squeeze(2)).float().mean()
        loss.backward()
        optimizer.step()
        return loss.item(), accuracy.item()

    history = []
    for _ in range(4):
        history.append(train_step(torch.randn(3, 2, 1, 8, 8), torch.randn(3, 4, 1, 8, 8)))
        scheduler.step()
    return history, encoder, optimizer, scheduler
