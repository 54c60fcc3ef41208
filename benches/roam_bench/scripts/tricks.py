"""What training recipes add to a loop: averages, sharpness, several losses, groups,
regularizers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional


def _net(after: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, after))


def _batch() -> tuple[Any, Any]:
    return torch.randn(6, 8), torch.randint(0, 3, (6,))


@script("Sharpness-aware minimization: the optimizer of the reference implementation, two passes")
def sharpness_aware(wrap: Wrap) -> Any:
    class SAM(torch.optim.Optimizer):
        def __init__(
            self, params: Any, base_optimizer: Any, rho: float = 0.05, **kwargs: Any
        ) -> None:
            super().__init__(params, dict(rho=rho, **kwargs))
            self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
            self.param_groups = self.base_optimizer.param_groups
            self.defaults.update(self.base_optimizer.defaults)

        @torch.no_grad()
        def first_step(self, zero_grad: bool = False) -> None:
            grad_norm = self._grad_norm()
            for group in self.param_groups:
                scale = group["rho"] / (grad_norm + 1e-12)
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * scale.to(p))
            if zero_grad:
                self.zero_grad()

        @torch.no_grad()
        def second_step(self, zero_grad: bool = False) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    p.data = self.state[p]["old_p"]
            self.base_optimizer.step()
            if zero_grad:
                self.zero_grad()

        def _grad_norm(self) -> Any:
            return torch.norm(
                torch.stack(
                    [
                        p.grad.norm(p=2)
                        for group in self.param_groups
                        for p in group["params"]
                        if p.grad is not None
                    ]
                ),
                p=2,
            )

    model = _net()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        functional.cross_entropy(model(x), y).backward()
        optimizer.second_step(zero_grad=True)
        return loss

    return [train_step(*_batch()) for _ in range(4)], model, optimizer.base_optimizer


@script("Sharpness-aware minimization written into the loop")
def sharpness_aware_by_hand(wrap: Wrap) -> Any:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        params = list(model.parameters())
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in params]).norm()
            moves = [p.grad * (0.05 / (norm + 1e-12)) for p in params]
            for p, move in zip(params, moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(params, moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return [train_step(*_batch()) for _ in range(4)], model, optimizer


@script("GradNorm: weights of tasks learned from the norms of their gradients")
def gradnorm(wrap: Wrap) -> Any:
    trunk, heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])
    weights = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([*trunk.parameters(), *heads.parameters()], lr=1e-3)
    weight_optimizer = torch.optim.Adam([weights], lr=1e-2)
    initial = torch.ones(2)

    @wrap
    def train_step(x: Any, ys: Any) -> Any:
        h = torch.relu(trunk(x))
        losses = torch.stack(
            [functional.mse_loss(head(h), y) for head, y in zip(heads, ys, strict=True)]
        )
        optimizer.zero_grad()
        weighted = weights * losses
        weighted.sum().backward(retain_graph=True)
        weights.grad = None
        norms = torch.stack(
            [
                torch.norm(
                    torch.autograd.grad(one, trunk.weight, retain_graph=True, create_graph=True)[0],
                    2,
                )
                for one in weighted
            ]
        )
        ratio = (losses / initial).detach()
        wanted = (norms.mean() * (ratio / ratio.mean()) ** 0.12).detach()
        weights.grad = torch.autograd.grad((norms - wanted).abs().sum(), weights)[0]
        optimizer.step()
        weight_optimizer.step()
        with torch.no_grad():
            weights.mul_(2 / weights.sum())
        return losses

    return (
        [train_step(torch.randn(6, 8), torch.randn(2, 6, 1)) for _ in range(4)],
        trunk,
        heads,
        weights.data,
        optimizer,
    )


@script("PCGrad: gradients of tasks projected where they conflict")
def pcgrad(wrap: Wrap) -> Any:
    trunk, heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])
    params = [*trunk.parameters(), *heads.parameters()]
    optimizer = torch.optim.Adam(params, lr=1e-3)

    @wrap
    def train_step(x: Any, ys: Any) -> Any:
        h = torch.relu(trunk(x))
        losses = [functional.mse_loss(head(h), y) for head, y in zip(heads, ys, strict=True)]
        flat = []
        for loss in losses:
            grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
            flat.append(
                torch.cat(
                    [
                        torch.zeros_like(p).flatten() if g is None else g.flatten()
                        for g, p in zip(grads, params, strict=True)
                    ]
                )
            )
        mended = []
        for index, g in enumerate(flat):
            other = flat[1 - index]
            inner = torch.dot(g, other)
            mended.append(torch.where(inner < 0, g - inner / other.norm().pow(2) * other, g))
        total, start = torch.stack(mended).mean(0), 0
        optimizer.zero_grad()
        for p in params:
            p.grad = total[start : start + p.numel()].view_as(p).clone()
            start += p.numel()
        optimizer.step()
        return torch.stack(losses)

    return (
        [train_step(torch.randn(6, 8), torch.randn(2, 6, 1)) for _ in range(4)],
        trunk,
        heads,
        optimizer,
    )


@script("Multi-task learning with learned uncertainties (Kendall and Gal)")
def uncertainty_weighting(wrap: Wrap) -> Any:
    trunk, regress, classify = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 3)
    log_vars = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.NAdam(
        [*trunk.parameters(), *regress.parameters(), *classify.parameters(), log_vars], lr=1e-2
    )

    @wrap
    def train_step(x: Any, value: Any, label: Any) -> Any:
        h = torch.relu(trunk(x))
        losses = (
            functional.mse_loss(regress(h), value),
            functional.cross_entropy(classify(h), label),
        )
        loss = sum(
            torch.exp(-log_var) * one + log_var
            for log_var, one in zip(log_vars, losses, strict=True)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    history = [
        train_step(torch.randn(6, 8), torch.randn(6, 1), torch.randint(0, 3, (6,)))
        for _ in range(4)
    ]
    return history, trunk, log_vars.data, optimizer


@script("An EMA class with shadow weights, applied and restored for evaluation")
def ema_shadow(wrap: Wrap) -> Any:
    class EMA:
        def __init__(self, model: Any, decay: float) -> None:
            self.model, self.decay = model, decay
            self.shadow = {
                name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad
            }
            self.backup: dict[str, Any] = {}

        def update(self) -> None:
            for name, p in self.model.named_parameters():
                if p.requires_grad:
                    assert name in self.shadow
                    self.shadow[name] = (
                        (1.0 - self.decay) * p.data + self.decay * self.shadow[name]
                    ).clone()

        def apply_shadow(self) -> None:
            for name, p in self.model.named_parameters():
                self.backup[name] = p.data
                p.data = self.shadow[name]

        def restore(self) -> None:
            for name, p in self.model.named_parameters():
                p.data = self.backup[name]
            self.backup = {}

    model = _net()
    ema = EMA(model, 0.9)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update()
        return loss

    history = []
    for _ in range(2):
        model.train()
        history += [train_step(*_batch()) for _ in range(3)]
        ema.apply_shadow()
        model.eval()
        with torch.no_grad():
            history.append(model(_batch()[0]).sum())
        ema.restore()
    return history, model, ema.shadow, optimizer


@script(
    "Mean teacher and FixMatch: pseudo-labels over a threshold as a mask, consistency ramp-up by a float"
)
def fixmatch(wrap: Wrap) -> Any:
    model = _net()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)

    @wrap
    def train_step(x: Any, y: Any, weak: Any, strong: Any, weight: float) -> Any:
        logits = model(torch.cat((x, weak, strong)))
        logits_x = logits[:6]
        logits_weak, logits_strong = logits[6:].chunk(2)
        loss_x = functional.cross_entropy(logits_x, y)
        pseudo = torch.softmax(logits_weak.detach(), dim=-1)
        max_probs, targets = torch.max(pseudo, dim=-1)
        mask = max_probs.ge(0.4).float()
        loss_u = (functional.cross_entropy(logits_strong, targets, reduction="none") * mask).mean()
        consistency = functional.mse_loss(
            torch.softmax(logits_weak, -1), torch.softmax(teacher(weak), -1)
        )
        loss = loss_x + loss_u + weight * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(teacher.parameters(), model.parameters(), strict=True):
                mean.mul_(0.99).add_(now, alpha=0.01)
        return loss, mask.mean()

    history = [
        train_step(*_batch(), torch.randn(6, 8), torch.randn(6, 8), 0.1 * step) for step in range(4)
    ]
    return history, model, teacher, optimizer


@script("Hard-example mining and focal loss: topk of the losses, class weights")
def hard_examples(wrap: Wrap) -> Any:
    model = _net()
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8)
    weight = torch.tensor([1.0, 2.0, 0.5])

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        losses = functional.cross_entropy(model(x), y, weight=weight, reduction="none")
        focal = (1 - torch.exp(-losses)) ** 2 * losses
        loss = focal.topk(4).values.mean()
        l1 = sum(p.abs().sum() for p in model.parameters())
        optimizer.zero_grad()
        (loss + 1e-4 * l1).backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    return [train_step(*_batch()) for _ in range(5)], model, optimizer, scheduler


@script("A loop that skips updates where the loss is not finite, and looks at it in Python")
def skip_nonfinite(wrap: Wrap) -> Any:
    model = _net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            return loss
        loss.backward()
        optimizer.step()
        return loss

    return [train_step(*_batch()) for _ in range(4)], model, optimizer


@script("fastai: layer-wise rates, gradual unfreezing, one-cycle, gradient clipping by value")
def gradual_unfreezing(wrap: Wrap) -> Any:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )
    groups = [
        {"params": layer.parameters(), "lr": 1e-3 * 2.6**index}
        for index, layer in enumerate(model[::2])
    ]
    optimizer = torch.optim.AdamW(groups)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    history = []
    for frozen in (4, 2, 0):
        for index, layer in enumerate(model):
            layer.requires_grad_(index >= frozen)
        history += [train_step(*_batch()) for _ in range(2)]
    return history, model, optimizer


@script(
    "Deep equilibrium models: a fixed point without gradients, one step with, a hook that solves backwards"
)
def deep_equilibrium(wrap: Wrap) -> Any:
    cell, head = nn.Linear(16, 8), nn.Linear(8, 3)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-2)

    def f(z: Any, x: Any) -> Any:
        return torch.tanh(cell(torch.cat([z, x], dim=1)))

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(5):
                z = f(z, x)
        z = f(z, x)
        z0 = z.clone().detach().requires_grad_()
        f0 = f(z0, x)

        def backward_hook(grad: Any) -> Any:
            g = grad
            for _ in range(4):
                g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
            return g

        z.register_hook(backward_hook)
        loss = functional.cross_entropy(head(z), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return [train_step(*_batch()) for _ in range(3)], cell, head, optimizer


@script(
    "Muon: momentum orthogonalized by Newton-Schulz in bfloat16 for matrices, Adam with a count for the rest"
)
def muon(wrap: Wrap) -> Any:
    def zeropower(gradient: Any, steps: int = 5) -> Any:
        a, b, c = (3.4445, -4.7750, 2.0315)
        x = gradient.bfloat16()
        if gradient.size(-2) > gradient.size(-1):
            x = x.mT
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(steps):
            products = x @ x.mT
            x = a * x + (b * products + c * products @ products) @ x
        return x.mT if gradient.size(-2) > gradient.size(-1) else x

    class Muon(torch.optim.Optimizer):
        def __init__(self, groups: Any) -> None:
            for group in groups:
                group["lr"] = group.get("lr", 0.02 if group["use_muon"] else 3e-4)
                group["momentum"] = group.get("momentum", 0.95)
                group["betas"] = group.get("betas", (0.9, 0.95))
                group["weight_decay"] = group.get("weight_decay", 0.0)
            super().__init__(groups, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                    state = self.state[p]
                    if group["use_muon"]:
                        if len(state) == 0:
                            state["momentum_buffer"] = torch.zeros_like(p)
                        state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                        update = zeropower(
                            p.grad.lerp_(state["momentum_buffer"], group["momentum"])
                        )
                        update *= max(1, p.size(-2) / p.size(-1)) ** 0.5
                    else:
                        if len(state) == 0:
                            state["exp_avg"] = torch.zeros_like(p)
                            state["exp_avg_sq"] = torch.zeros_like(p)
                            state["step"] = 0
                        state["step"] += 1
                        beta1, beta2 = group["betas"]
                        state["exp_avg"].lerp_(p.grad, 1 - beta1)
                        state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
                        mean = state["exp_avg"] / (1 - beta1 ** state["step"])
                        square = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
                        update = mean / (square.sqrt() + 1e-10)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update.reshape(p.shape), alpha=-group["lr"])

    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3, bias=False))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = Muon(
        [
            {"params": matrices, "use_muon": True, "weight_decay": 0.01},
            {"params": others, "use_muon": False},
        ]
    )

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    history = []
    for step in range(6):
        share = min(step / 4, 1)
        optimizer.param_groups[0]["momentum"] = (1 - share) * 0.85 + share * 0.95
        history.append(train_step(*_batch()))
    return history, model, optimizer


@script(
    "A loop that skips bad batches: the step raises an exception of its own, which the loop catches"
)
def skipped_batches(wrap: Wrap) -> Any:
    class BadBatch(Exception):
        pass

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters())

    @wrap
    def train_step(x: Any, y: Any, is_whole: bool) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        if not is_whole:
            raise BadBatch("a batch that is cut off")
        if torch.isnan(loss):
            raise BadBatch("the loss is not a number")
        optimizer.step()
        return loss

    history: list[Any] = []
    for step in range(8):
        x, y = _batch()
        try:
            history.append(train_step(x * (float("nan") if step == 4 else 1.0), y, step % 3 != 2))
        except BadBatch as error:
            history.append(str(error))
    return history, model, optimizer
