"""Self-supervised and metric learning."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional


def _encoder(size: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, size),
    )  # fmt: skip


def _views() -> tuple[Any, Any]:
    return torch.randn(6, 3, 12, 12), torch.randn(6, 3, 12, 12)


@script("SimCLR: NT-Xent over two views, masks of booleans, LARS-like warm-up and cosine")
def simclr(wrap: Wrap) -> Any:
    model = _encoder()
    optimizer = torch.optim.Adam(model.parameters(), 3e-4, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0)

    def info_nce_loss(features: Any) -> Any:
        labels = torch.cat([torch.arange(6) for _ in range(2)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        features = functional.normalize(features, dim=1)
        similarity = torch.matmul(features, features.T)
        mask = torch.eye(labels.shape[0], dtype=torch.bool)
        labels = labels.masked_fill(mask, 0.0)
        similarity = similarity.masked_fill(mask, -1e9) / 0.07
        log_prob = similarity - similarity.logsumexp(dim=1, keepdim=True)
        return -(labels * log_prob).sum() / labels.sum()

    @wrap
    def train_step(images: Any) -> Any:
        loss = info_nce_loss(model(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    history = []
    for _ in range(4):
        history.append(train_step(torch.cat(_views(), dim=0)))
        scheduler.step()
    return history, model, optimizer, scheduler


@script(
    "SimCLR as first published for PyTorch: negatives picked out of the matrix by boolean indexing"
)
def simclr_boolean_index(wrap: Wrap) -> Any:
    model = _encoder()
    optimizer = torch.optim.Adam(model.parameters(), 3e-4)

    @wrap
    def train_step(images: Any) -> Any:
        features = functional.normalize(model(images), dim=1)
        labels = torch.cat([torch.arange(6) for _ in range(2)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        similarity = torch.matmul(features, features.T)
        mask = torch.eye(12, dtype=torch.bool)
        labels = labels[~mask].view(12, -1)
        similarity = similarity[~mask].view(12, -1)
        positives = similarity[labels.bool()].view(12, -1)
        negatives = similarity[~labels.bool()].view(12, -1)
        logits = torch.cat([positives, negatives], dim=1) / 0.07
        loss = functional.cross_entropy(logits, torch.zeros(12, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return [train_step(torch.cat(_views(), dim=0)) for _ in range(4)], model, optimizer


@script("MoCo: momentum encoder and a queue with a pointer, in buffers")
def moco(wrap: Wrap) -> Any:
    class MoCo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder_q, self.encoder_k = _encoder(), _encoder()
            for param_q, param_k in zip(
                self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
            ):
                param_k.data.copy_(param_q.data)
                param_k.requires_grad = False
            self.register_buffer("queue", functional.normalize(torch.randn(8, 18), dim=0))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def _momentum_update_key_encoder(self) -> None:
            for param_q, param_k in zip(
                self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
            ):
                param_k.data = param_k.data * 0.99 + param_q.data * (1.0 - 0.99)

        @torch.no_grad()
        def _dequeue_and_enqueue(self, keys: Any) -> None:
            ptr = int(self.queue_ptr)
            self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
            self.queue_ptr[0] = (ptr + keys.shape[0]) % 18

        def forward(self, im_q: Any, im_k: Any) -> Any:
            q = functional.normalize(self.encoder_q(im_q), dim=1)
            with torch.no_grad():
                self._momentum_update_key_encoder()
                k = functional.normalize(self.encoder_k(im_k[torch.randperm(6)]), dim=1)
            l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
            l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
            self._dequeue_and_enqueue(k)
            return torch.cat([l_pos, l_neg], dim=1) / 0.07, torch.zeros(len(q), dtype=torch.long)

    model = MoCo()
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)

    @wrap
    def train_step(im_q: Any, im_k: Any) -> Any:
        output, target = model(im_q, im_k)
        loss = functional.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return [train_step(*_views()) for _ in range(4)], model, optimizer


@script("BYOL: a target network by moving average with a cosine momentum, symmetric loss")
def byol(wrap: Wrap) -> Any:
    online, predictor = (
        _encoder(),
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)),
    )
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.SGD(
        [*online.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9
    )

    def loss_fn(x: Any, y: Any) -> Any:
        return 2 - 2 * (
            functional.normalize(x, dim=-1, p=2) * functional.normalize(y, dim=-1, p=2)
        ).sum(dim=-1)

    @wrap
    def train_step(one: Any, two: Any, tau: float) -> Any:
        p_one, p_two = predictor(online(one)), predictor(online(two))
        with torch.no_grad():
            t_one, t_two = target(one), target(two)
        loss = (loss_fn(p_one, t_two.detach()) + loss_fn(p_two, t_one.detach())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for now, mean in zip(online.parameters(), target.parameters(), strict=True):
            mean.data = mean.data * tau + now.data * (1 - tau)
        return loss

    history = []
    for step in range(4):
        history.append(train_step(*_views(), 1 - 0.01 * (math.cos(math.pi * step / 4) + 1) / 2))
    return history, online, predictor, target, optimizer


@script(
    "DINO: centring and sharpening, multi-crop, last layer frozen at first, weight decay by schedule"
)
def dino(wrap: Wrap) -> Any:
    student, teacher = (
        nn.Sequential(_encoder(), nn.Linear(8, 12)),
        nn.Sequential(_encoder(), nn.Linear(8, 12)),
    )
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)

    class DINOLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(1, 12))

        def forward(self, student_output: Any, teacher_output: Any, temp: float) -> Any:
            student_out = (student_output / 0.1).chunk(3)
            teacher_out = (
                functional.softmax((teacher_output - self.center) / temp, dim=-1).detach().chunk(2)
            )
            total, terms = 0, 0
            for index, q in enumerate(teacher_out):
                for view, s in enumerate(student_out):
                    if view == index:
                        continue
                    total += torch.sum(-q * functional.log_softmax(s, dim=-1), dim=-1).mean()
                    terms += 1
            self.update_center(teacher_output)
            return total / terms

        @torch.no_grad()
        def update_center(self, teacher_output: Any) -> None:
            batch_center = torch.sum(teacher_output, dim=0, keepdim=True) / len(teacher_output)
            self.center = self.center * 0.9 + batch_center * (1 - 0.9)

    criterion = DINOLoss()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)

    @wrap
    def train_step(images: Any, momentum: float, temp: float) -> Any:
        loss = criterion(student(torch.cat(images)), teacher(torch.cat(images[:2])), temp)
        optimizer.zero_grad()
        loss.backward()
        for p in student.parameters():
            clip = 3.0 / (p.grad.norm(2) + 1e-6)
            p.grad.mul_(torch.clamp(clip, max=1.0))
        optimizer.step()
        with torch.no_grad():
            for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
                k.data.mul_(momentum).add_((1 - momentum) * q.detach().data)
        return loss

    history = []
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 4
            group["weight_decay"] = 0.04 + 0.01 * step
        history.append(
            train_step([*_views(), torch.randn(6, 3, 12, 12)], 0.99 + 0.001 * step, 0.04)
        )
    return history, student, teacher, criterion, optimizer


@script("Barlow Twins and VICReg: cross-correlation, off-diagonal by view, variance hinge")
def barlow_twins(wrap: Wrap) -> Any:
    model, bn = _encoder(), nn.BatchNorm1d(8, affine=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def off_diagonal(x: Any) -> Any:
        n, m = x.shape
        assert n == m
        return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()

    @wrap
    def train_step(y1: Any, y2: Any) -> Any:
        optimizer.zero_grad()
        z1, z2 = model(y1), model(y2)
        c = (bn(z1).T @ bn(z2)) / 6
        loss = torch.diagonal(c).add_(-1).pow_(2).sum() + 0.005 * off_diagonal(c).pow_(2).sum()
        std = torch.sqrt(z1.var(dim=0) + 1e-4)
        loss = loss + torch.mean(functional.relu(1 - std))
        loss.backward()
        optimizer.step()
        return loss

    return [train_step(*_views()) for _ in range(4)], model, bn, optimizer


@script("CLIP from scratch: two towers, a learned temperature that is clamped after the step")
def clip_from_scratch(wrap: Wrap) -> Any:
    image, text = _encoder(), nn.Sequential(nn.EmbeddingBag(20, 8), nn.Linear(8, 8))
    logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))
    optimizer = torch.optim.AdamW(
        [*image.parameters(), *text.parameters(), logit_scale], lr=1e-3, betas=(0.9, 0.98), eps=1e-6
    )

    @wrap
    def train_step(pictures: Any, words: Any) -> Any:
        optimizer.zero_grad()
        image_features = functional.normalize(image(pictures), dim=-1)
        text_features = functional.normalize(text(words), dim=-1)
        logits = logit_scale.exp() * image_features @ text_features.t()
        labels = torch.arange(len(logits))
        loss = (
            functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.t(), labels)
        ) / 2
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            logit_scale.clamp_(0, math.log(100))
        return loss

    return (
        [train_step(torch.randn(5, 3, 12, 12), torch.randint(0, 20, (5, 4))) for _ in range(4)],
        image,
        text,
        logit_scale,
        optimizer,
    )


@script("FaceNet and ArcFace: triplet loss with hard mining, angular margin")
def metric_learning(wrap: Wrap) -> Any:
    model = _encoder()
    weight = nn.Parameter(torch.randn(4, 8))
    optimizer = torch.optim.SGD(
        [{"params": model.parameters()}, {"params": [weight], "lr": 0.1}], lr=0.01
    )

    @wrap
    def train_step(images: Any, labels: Any) -> Any:
        embedding = functional.normalize(model(images))
        distance = torch.cdist(embedding, embedding)
        same = labels[:, None] == labels[None]
        hardest_positive = (distance * same).max(dim=1).values
        hardest_negative = distance.masked_fill(same, 10.0).min(dim=1).values
        triplet = functional.relu(hardest_positive - hardest_negative + 0.2).mean()
        cosine = functional.linear(embedding, functional.normalize(weight))
        phi = cosine * math.cos(0.5) - torch.sqrt((1.0 - cosine.pow(2)).clamp(1e-6, 1)) * math.sin(
            0.5
        )
        phi = torch.where(
            cosine > math.cos(math.pi - 0.5), phi, cosine - math.sin(math.pi - 0.5) * 0.5
        )
        onehot = torch.zeros_like(cosine).scatter_(1, labels.view(-1, 1), 1)
        loss = triplet + functional.cross_entropy(
            16 * (onehot * phi + (1.0 - onehot) * cosine), labels
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step(torch.randn(6, 3, 12, 12), torch.tensor([0, 0, 1, 1, 2, 3])) for _ in range(4)],
        model,
        weight,
        optimizer,
    )


@script("Deep InfoMax and SupCon: supervised contrastive loss, two views as one batch")
def supervised_contrastive(wrap: Wrap) -> Any:
    model = _encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    @wrap
    def train_step(images: Any, labels: Any) -> Any:
        bsz = labels.shape[0]
        features = functional.normalize(model(torch.cat([images[0], images[1]], dim=0)), dim=1)
        f1, f2 = torch.split(features, [bsz, bsz], dim=0)
        features = torch.cat([f1.unsqueeze(1), f2.unsqueeze(1)], dim=1)
        mask = torch.eq(labels.contiguous().view(-1, 1), labels.contiguous().view(-1, 1).T).float()
        contrast = torch.cat(torch.unbind(features, dim=1), dim=0)
        logits = torch.div(torch.matmul(contrast, contrast.T), 0.07)
        logits_max, _ = torch.max(logits, dim=1, keepdim=True)
        logits = logits - logits_max.detach()
        mask = mask.repeat(2, 2)
        logits_mask = torch.scatter(torch.ones_like(mask), 1, torch.arange(2 * bsz).view(-1, 1), 0)
        mask = mask * logits_mask
        log_prob = logits - torch.log((torch.exp(logits) * logits_mask).sum(1, keepdim=True))
        pairs = mask.sum(1)
        pairs = torch.where(pairs < 1e-6, 1, pairs)
        loss = -((mask * log_prob).sum(1) / pairs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return [train_step(_views(), torch.randint(0, 3, (6,))) for _ in range(4)], model, optimizer
