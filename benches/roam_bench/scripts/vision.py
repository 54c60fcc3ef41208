"""Images: detection, segmentation, augmentation in the step, quantization-aware training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional


def _boxes(count: int) -> Any:
    corner, size = torch.rand(count, 2) * 30, torch.rand(count, 2) * 25 + 8
    return torch.cat([corner, corner + size], dim=1)


def _detection(wrap: Wrap, name: str, **options: Any) -> Any:
    import torchvision

    model = getattr(torchvision.models.detection, name)(
        weights=None, weights_backbone=None, num_classes=4, min_size=64, max_size=64, **options
    )
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.001, momentum=0.9, weight_decay=0.0005)

    @wrap
    def train_step(images: Any, targets: Any) -> Any:
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        return losses

    history = []
    for _ in range(2):
        images = [torch.rand(3, 64, 64) for _ in range(2)]
        targets = [{"boxes": _boxes(2), "labels": torch.randint(1, 4, (2,))} for _ in images]
        history.append(train_step(images, targets))
    return history, model, optimizer


@script("torchvision references: detection (Faster R-CNN)", "torchvision")
def faster_rcnn(wrap: Wrap) -> Any:
    return _detection(wrap, "fasterrcnn_mobilenet_v3_large_320_fpn")


@script("torchvision references: detection (RetinaNet)", "torchvision")
def retinanet(wrap: Wrap) -> Any:
    return _detection(wrap, "retinanet_resnet50_fpn")


@script("torchvision references: detection (FCOS)", "torchvision")
def fcos(wrap: Wrap) -> Any:
    return _detection(wrap, "fcos_resnet50_fpn")


@script("DETR: matching outside of the step, set loss inside")
def detr(wrap: Wrap) -> Any:
    queries, classes, size = 6, 3, 16

    class Detr(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(3, size, 7, 4), nn.ReLU(), nn.Conv2d(size, size, 3, 2)
            )
            self.transformer = nn.Transformer(size, 2, 1, 1, 32, dropout=0.1)
            self.query_pos = nn.Parameter(torch.rand(queries, size))
            self.pos = nn.Parameter(torch.rand(100, size))
            self.linear_class, self.linear_bbox = nn.Linear(size, classes + 1), nn.Linear(size, 4)

        def forward(self, x: Any) -> Any:
            h = self.backbone(x).flatten(2).permute(2, 0, 1)
            h = self.transformer(
                self.pos[: h.shape[0]].unsqueeze(1) + 0.1 * h,
                self.query_pos.unsqueeze(1).repeat(1, h.shape[1], 1),
            )
            return self.linear_class(h).transpose(0, 1), self.linear_bbox(h).sigmoid().transpose(
                0, 1
            )

    model = Detr()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.transformer.parameters()},
            {"params": model.backbone.parameters(), "lr": 1e-5},
        ],
        lr=1e-4,
    )
    weight = torch.ones(classes + 1)
    weight[-1] = 0.1

    @wrap
    def train_step(images: Any, labels: Any, boxes: Any, order: Any) -> Any:
        logits, predicted = model(images)
        rows = torch.arange(len(images))[:, None]
        wanted = torch.full(logits.shape[:2], classes)
        wanted[rows, order] = labels
        loss_class = functional.cross_entropy(logits.transpose(1, 2), wanted, weight)
        loss_box = functional.l1_loss(predicted[rows, order], boxes)
        loss = loss_class + 5 * loss_box
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    def match(images: Any, labels: Any, boxes: Any) -> Any:
        """Greedy, in the Hungarian algorithm's place."""
        with torch.no_grad():
            logits, predicted = model(images)
        cost = torch.cdist(predicted, boxes, p=1) - logits.softmax(-1).gather(
            2, labels[:, None].expand(-1, queries, -1)
        )
        order = []
        for one in cost:
            taken: list[int] = []
            for target in range(one.shape[1]):
                ranked = one[:, target].argsort().tolist()
                taken.append(next(index for index in ranked if index not in taken))
            order.append(taken)
        return torch.tensor(order)

    history = []
    for _ in range(3):
        batch = torch.rand(2, 3, 48, 48), torch.randint(0, classes, (2, 2)), torch.rand(2, 2, 4)
        history.append(train_step(*batch, match(*batch)))
    return history, model, optimizer


@script(
    "torchvision references: segmentation (FCN, auxiliary loss, polynomial rate)", "torchvision"
)
def fcn_segmentation(wrap: Wrap) -> Any:
    import torchvision

    model = torchvision.models.segmentation.fcn_resnet50(
        weights=None, weights_backbone=None, num_classes=4, aux_loss=True
    )
    optimizer = torch.optim.SGD(
        [
            {"params": [*model.backbone.parameters(), *model.classifier.parameters()]},
            {"params": model.aux_classifier.parameters(), "lr": 0.1},
        ],
        lr=0.01, momentum=0.9, weight_decay=1e-4,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=10, power=0.9)

    def criterion(inputs: Any, target: Any) -> Any:
        losses = {
            name: functional.cross_entropy(x, target, ignore_index=255)
            for name, x in inputs.items()
        }
        return losses["out"] + 0.5 * losses["aux"] if len(losses) > 1 else losses["out"]

    @wrap
    def train_step(image: Any, target: Any) -> Any:
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    history = [
        train_step(torch.randn(2, 3, 32, 32), torch.randint(0, 4, (2, 32, 32))) for _ in range(2)
    ]
    return history, model, optimizer, scheduler


@script("U-Net (biomedical segmentation): skip connections, Dice and cross-entropy")
def unet_dice(wrap: Wrap) -> Any:
    def double(before: int, after: int) -> nn.Module:
        layers = [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        ]
        return nn.Sequential(*layers, nn.Conv2d(after, after, 3, padding=1), nn.ReLU(inplace=True))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inc, self.down, self.bottom = double(3, 8), double(8, 16), double(16, 16)
            self.up1, self.conv1 = nn.ConvTranspose2d(16, 16, 2, stride=2), double(32, 8)
            self.up2, self.conv2 = (
                nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
                double(16, 8),
            )
            self.outc = nn.Conv2d(8, 3, 1)

        def forward(self, x: Any) -> Any:
            one = self.inc(x)
            two = self.down(functional.max_pool2d(one, 2))
            x = self.up1(self.bottom(functional.max_pool2d(two, 2)))
            x = self.conv1(torch.cat([two, x], dim=1))
            return self.outc(self.conv2(torch.cat([one, self.up2(x)], dim=1)))

    def dice_loss(logits: Any, masks: Any) -> Any:
        probs = functional.softmax(logits, dim=1).float()
        onehot = functional.one_hot(masks, 3).permute(0, 3, 1, 2).float()
        inter = 2 * (probs * onehot).sum(dim=(-1, -2))
        sets = probs.sum(dim=(-1, -2)) + onehot.sum(dim=(-1, -2))
        sets = torch.where(sets == 0, inter, sets)
        return 1 - ((inter + 1e-6) / (sets + 1e-6)).mean()

    model = UNet().to(memory_format=torch.channels_last)
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=1e-4, weight_decay=1e-8, momentum=0.9, foreach=True
    )
    grad_scaler = torch.amp.GradScaler("cpu", enabled=False)

    @wrap
    def train_step(images: Any, true_masks: Any) -> Any:
        images = images.to(dtype=torch.float32, memory_format=torch.channels_last)
        with torch.autocast("cpu", enabled=False):
            masks_pred = model(images)
            loss = functional.cross_entropy(masks_pred, true_masks) + dice_loss(
                masks_pred, true_masks
            )
        optimizer.zero_grad(set_to_none=True)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        return loss.item()

    return (
        [train_step(torch.rand(2, 3, 16, 16), torch.randint(0, 3, (2, 16, 16))) for _ in range(3)],
        model,
        optimizer,
    )


@script("timm: train.py (mixup, model EMA, adaptive clipping, cosine schedule by updates)", "timm")
def timm_train(wrap: Wrap) -> Any:
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        depth=2,
        num_classes=5,
        drop_path_rate=0.1,
    )
    model_ema = ModelEmaV3(model, decay=0.99)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=5)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    scheduler = CosineLRScheduler(
        optimizer, t_initial=10, warmup_t=2, warmup_lr_init=1e-5, t_in_epochs=False
    )
    loss_fn = SoftTargetCrossEntropy()

    @wrap
    def train_step(input: Any, target: Any) -> Any:
        output = model(input)
        loss = loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        dispatch_clip_grad(model.parameters(), value=0.02, mode="agc")
        optimizer.step()
        return loss

    history = []
    for update in range(4):
        input, target = mixup(torch.randn(4, 3, 32, 32), torch.randint(0, 5, (4,)))
        history.append(train_step(input, target))
        model_ema.update(model, step=update)
        scheduler.step_update(num_updates=update + 1)
    return history, model, model_ema, optimizer


@script(
    "timm: ResNet with its own optimizer (LAMB), EMA inside of the step, label smoothing", "timm"
)
def timm_lamb_ema(wrap: Wrap) -> Any:
    import timm
    from timm.optim import Lamb
    from timm.utils import ModelEmaV2

    model = timm.create_model("resnet18", num_classes=5)
    ema = ModelEmaV2(model, decay=0.9)
    optimizer = Lamb(model.parameters(), lr=5e-3, weight_decay=0.02)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)

    @wrap
    def train_step(input: Any, target: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_fn(model(input), target)
        loss.backward()
        optimizer.step()
        ema.update(model)
        return loss

    return (
        [train_step(torch.randn(2, 3, 32, 32), torch.randint(0, 5, (2,))) for _ in range(3)],
        model,
        ema,
        optimizer,
    )


@script("Mixup and CutMix in the step, with a random permutation and a drawn share")
def mixup_in_step(wrap: Wrap) -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    beta = torch.distributions.Beta(torch.tensor(1.0), torch.tensor(1.0), validate_args=False)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        share = beta.sample()
        index = torch.randperm(x.size(0))
        mixed = share * x + (1 - share) * x[index]
        output = model(mixed)
        loss = share * functional.cross_entropy(output, y) + (1 - share) * functional.cross_entropy(
            output, y[index]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step(torch.randn(6, 3, 12, 12), torch.randint(0, 5, (6,))) for _ in range(4)],
        model,
        optimizer,
    )


@script(
    "Quantization-aware training: fake quantization with a straight-through estimator and a moving range"
)
def quantization_aware(wrap: Wrap) -> Any:
    class FakeQuantize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("low", torch.zeros(()))
            self.register_buffer("high", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            if self.training:
                self.low.mul_(0.9).add_(0.1 * x.detach().min())
                self.high.mul_(0.9).add_(0.1 * x.detach().max())
            scale = (self.high - self.low).clamp(min=1e-6) / 255
            quantized = ((x - self.low) / scale).round().clamp(0, 255) * scale + self.low
            return x + (quantized - x).detach()

    model = nn.Sequential(
        nn.Linear(8, 16), FakeQuantize(), nn.ReLU(), FakeQuantize(), nn.Linear(16, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step(torch.randn(6, 8), torch.randint(0, 3, (6,))) for _ in range(4)],
        model,
        optimizer,
    )


@script("PyTorch: eager quantization-aware training (prepare_qat, observers)")
def prepare_qat(wrap: Wrap) -> Any:
    from torch.ao import quantization

    model = nn.Sequential(
        quantization.QuantStub(),
        nn.Linear(8, 16),
        nn.ReLU(),
        nn.Linear(16, 3),
        quantization.DeQuantStub(),
    )
    model.train()
    model.qconfig = quantization.get_default_qat_qconfig("x86")  # type: ignore[assignment]
    quantization.prepare_qat(model, inplace=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step(torch.randn(6, 8), torch.randint(0, 3, (6,))) for _ in range(4)],
        model,
        optimizer,
    )


@script("PyTorch documentation: stochastic weight averaging (AveragedModel, SWALR, update_bn)")
def weight_averaging(wrap: Wrap) -> Any:
    from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    swa_model = AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    swa_scheduler = SWALR(optimizer, swa_lr=0.05)
    data = [torch.randn(6, 8) for _ in range(3)]

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    history = []
    for epoch in range(4):
        for x in data:
            history.append(train_step(x, torch.randint(0, 3, (6,))))
        if epoch > 1:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
    update_bn(data, swa_model)
    return history, model, swa_model, optimizer


@script("PyTorch tutorials: Adversarial training by the fast gradient sign method")
def adversarial_training(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @wrap
    def train_step(data: Any, target: Any) -> Any:
        data = data.clone().requires_grad_()
        loss = functional.cross_entropy(model(data), target)
        (gradient,) = torch.autograd.grad(loss, data)
        perturbed = torch.clamp(data + 0.1 * gradient.sign(), 0, 1).detach()
        optimizer.zero_grad()
        adversarial = functional.cross_entropy(model(perturbed), target)
        adversarial.backward()
        optimizer.step()
        return loss, adversarial

    return (
        [train_step(torch.rand(4, 1, 12, 12), torch.randint(0, 10, (4,))) for _ in range(4)],
        model,
        optimizer,
    )


@script("PyTorch tutorials: Neural style transfer (LBFGS replaced by Adam on the image)")
def style_transfer(wrap: Wrap) -> Any:
    features = (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        .eval()
        .requires_grad_(False)
    )
    image = torch.rand(1, 3, 16, 16).requires_grad_(True)
    optimizer = torch.optim.Adam([image], lr=0.05)

    def gram(x: Any) -> Any:
        batch, maps, height, width = x.size()
        flat = x.view(batch * maps, height * width)
        return torch.mm(flat, flat.t()).div(flat.numel())

    style, content = gram(features(torch.rand(1, 3, 16, 16))), features(torch.rand(1, 3, 16, 16))

    @wrap
    def step() -> Any:
        with torch.no_grad():
            image.clamp_(0, 1)
        optimizer.zero_grad()
        found = features(image)
        loss = 1e3 * functional.mse_loss(gram(found), style) + functional.mse_loss(found, content)
        loss.backward()
        optimizer.step()
        return loss

    return [step() for _ in range(4)], image, optimizer
