"""Recommendation and tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional


@script("Matrix factorization and neural collaborative filtering: biases, BPR loss")
def matrix_factorization(wrap: Wrap) -> Any:
    class MF(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(15, 8), nn.Embedding(25, 8)
            self.user_bias, self.item_bias = nn.Embedding(15, 1), nn.Embedding(25, 1)
            self.mlp = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

        def forward(self, users: Any, items: Any) -> Any:
            u, i = self.user(users), self.item(items)
            bias = self.user_bias(users).squeeze(-1) + self.item_bias(items).squeeze(-1)
            return (u * i).sum(-1) + bias + self.mlp(torch.cat([u, i], -1)).squeeze(-1)

    model = MF()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)

    @wrap
    def train_step(users: Any, positive: Any, ratings: Any) -> Any:
        negative = torch.randint(0, 25, positive.shape)
        scores = model(users, positive)
        bpr = -functional.logsigmoid(scores - model(users, negative)).mean()
        loss = functional.mse_loss(scores, ratings) + bpr
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    batches = [
        (torch.randint(0, 15, (8,)), torch.randint(0, 25, (8,)), torch.rand(8) * 5)
        for _ in range(4)
    ]
    return [train_step(*batch) for batch in batches], model, optimizer


@script("TabTransformer: embeddings of columns, a transformer, batch norm of numbers")
def tab_transformer(wrap: Wrap) -> Any:
    sizes = (5, 7, 4)
    offsets = torch.tensor([0, 5, 12])
    embed = nn.Embedding(sum(sizes), 16)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu"), 2
    )
    norm, head = nn.BatchNorm1d(3), nn.Sequential(nn.Linear(51, 16), nn.SELU(), nn.Linear(16, 1))
    modules = nn.ModuleList([embed, encoder, norm, head])
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-3)

    @wrap
    def train_step(categories: Any, numbers: Any, y: Any) -> Any:
        h = encoder(embed(categories + offsets)).flatten(1)
        logits = head(torch.cat([h, norm(numbers)], dim=1)).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(logits, y, pos_weight=torch.tensor(2.0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def batch() -> Any:
        return (
            torch.stack([torch.randint(0, n, (6,)) for n in sizes], 1),
            torch.randn(6, 3),
            torch.randint(0, 2, (6,)).float(),
        )

    return [train_step(*batch()) for _ in range(4)], modules, optimizer


@script("DLRM and DeepFM: embedding bags with offsets, interactions of pairs, Adagrad")
def dlrm(wrap: Wrap) -> Any:
    bags = nn.ModuleList(nn.EmbeddingBag(12, 8, mode="sum") for _ in range(3))
    bottom, top = (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU()),
        nn.Sequential(nn.Linear(8 + 6, 8), nn.ReLU(), nn.Linear(8, 1)),
    )
    modules = nn.ModuleList([bags, bottom, top])
    optimizer = torch.optim.Adagrad(modules.parameters(), lr=0.05)

    @wrap
    def train_step(dense: Any, indices: Any, offsets: Any, y: Any) -> Any:
        x = bottom(dense)
        features = torch.stack(
            [x, *(bag(one, offsets) for bag, one in zip(bags, indices, strict=True))], dim=1
        )
        pairs = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        loss = functional.binary_cross_entropy_with_logits(
            top(torch.cat([x, pairs[:, rows, columns]], 1)).squeeze(1), y
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def batch() -> Any:
        return (
            torch.randn(5, 4),
            torch.randint(0, 12, (3, 10)),
            torch.arange(0, 10, 2),
            torch.randint(0, 2, (5,)).float(),
        )

    return [train_step(*batch()) for _ in range(4)], modules, optimizer


@script(
    "Denoising and sparse autoencoders: noise in the step, a penalty on mean activations, k sparse by topk"
)
def sparse_autoencoder(wrap: Wrap) -> Any:
    encoder, decoder = nn.Linear(16, 32), nn.Linear(32, 16)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)

    @wrap
    def train_step(x: Any) -> Any:
        hidden = torch.sigmoid(encoder(x + 0.1 * torch.randn_like(x)))
        kept = torch.zeros_like(hidden).scatter(1, hidden.topk(8, dim=1).indices, 1.0)
        rho = hidden.mean(0)
        penalty = (0.1 * torch.log(0.1 / rho) + 0.9 * torch.log(0.9 / (1 - rho))).sum()
        loss = functional.mse_loss(decoder(hidden * kept), x) + 1e-3 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            decoder.weight.div_(decoder.weight.norm(dim=0, keepdim=True))
        return loss

    return [train_step(torch.randn(6, 16)) for _ in range(4)], encoder, decoder, optimizer


@script("Cox and survival models: cumulative risk by sorting, Breslow's likelihood")
def survival(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Linear(5, 16), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.Rprop(model.parameters(), lr=1e-2)

    @wrap
    def train_step(x: Any, time: Any, event: Any) -> Any:
        order = torch.argsort(time, descending=True)
        risk = model(x[order]).squeeze(1)
        likelihood = risk - torch.logcumsumexp(risk, dim=0)
        loss = -(likelihood * event[order]).sum() / event.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return (
        [
            train_step(torch.randn(8, 5), torch.rand(8), (torch.rand(8) > 0.3).float())
            for _ in range(4)
        ],
        model,
        optimizer,
    )
