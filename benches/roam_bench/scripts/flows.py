"""Models of science and density: flows, differential equations, physics-informed networks, radiance
fields.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional


@script(
    "RealNVP: affine coupling layers, log-determinants, a standard normal prior from torch.distributions"
)
def normalizing_flow(wrap: Wrap) -> Any:
    class Coupling(nn.Module):
        def __init__(self, mask: Any) -> None:
            super().__init__()
            self.register_buffer("mask", mask)
            self.s = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 2), nn.Tanh())
            self.t = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 2))

        def forward(self, x: Any) -> Any:
            kept = self.mask * x
            s, t = self.s(kept) * (1 - self.mask), self.t(kept) * (1 - self.mask)
            return kept + (1 - self.mask) * (x - t) * torch.exp(-s), -s.sum(dim=1)

    flow = nn.ModuleList(
        Coupling(torch.tensor([0.0, 1.0] if index % 2 else [1.0, 0.0])) for index in range(4)
    )
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
    prior = torch.distributions.MultivariateNormal(
        torch.zeros(2), torch.eye(2), validate_args=False
    )

    @wrap
    def train_step(x: Any) -> Any:
        log_det = torch.zeros(len(x))
        for layer in flow:
            x, change = layer(x)
            log_det = log_det + change
        loss = -(prior.log_prob(x) + log_det).mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        return loss

    return [train_step(torch.randn(8, 2)) for _ in range(4)], flow, optimizer


@script("Glow: invertible 1x1 convolutions, activation norm, squeeze, slogdet")
def glow(wrap: Wrap) -> Any:
    class Step(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.scale, self.bias = (
                nn.Parameter(torch.ones(1, channels, 1, 1)),
                nn.Parameter(torch.zeros(1, channels, 1, 1)),
            )
            self.weight = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0])
            self.net = nn.Sequential(
                nn.Conv2d(channels // 2, 8, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(8, channels, 3, padding=1),
            )

        def forward(self, x: Any) -> Any:
            pixels = x.shape[2] * x.shape[3]
            x = self.scale * (x + self.bias)
            log_det = pixels * self.scale.abs().log().sum() + pixels * torch.slogdet(self.weight)[1]
            x = functional.conv2d(x, self.weight[:, :, None, None])
            a, b = x.chunk(2, 1)
            log_s, t = self.net(a).chunk(2, 1)
            s = torch.sigmoid(log_s + 2)
            return torch.cat([a, (b + t) * s], 1), log_det + torch.sum(
                torch.log(s).view(len(x), -1), 1
            )

    flow = nn.ModuleList(Step(4) for _ in range(2))
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)

    @wrap
    def train_step(image: Any) -> Any:
        image = image + torch.rand_like(image) / 32
        x = functional.pixel_unshuffle(image, 2)
        log_det = 0
        for layer in flow:
            x, change = layer(x)
            log_det = log_det + change
        log_p = (-0.5 * math.log(2 * math.pi) - 0.5 * x.pow(2)).flatten(1).sum(1)
        loss = -(log_p + log_det).mean() / (math.log(2) * 64)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return [train_step(torch.rand(3, 1, 8, 8)) for _ in range(4)], flow, optimizer


@script(
    "Neural ordinary differential equations: a solver written out (RK4), backpropagated through"
)
def neural_ode(wrap: Wrap) -> Any:
    class ODEFunc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 2))

        def forward(self, t: Any, y: Any) -> Any:
            return self.net(y**3)

    def odeint(func: Any, y0: Any, t: Any) -> Any:
        solution = [y0]
        for t0, t1 in zip(t[:-1], t[1:], strict=True):  # noqa: RUF007 - as the example has it
            dt, y = t1 - t0, solution[-1]
            k1 = func(t0, y)
            k2 = func(t0 + dt / 2, y + dt * k1 / 2)
            k3 = func(t0 + dt / 2, y + dt * k2 / 2)
            k4 = func(t1, y + dt * k3)
            solution.append(y + dt * (k1 + 2 * k2 + 2 * k3 + k4) / 6)
        return torch.stack(solution)

    func = ODEFunc()
    optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-3)
    t = torch.linspace(0.0, 1.0, 5)

    @wrap
    def train_step(batch_y0: Any, batch_t: Any, batch_y: Any) -> Any:
        optimizer.zero_grad()
        pred_y = odeint(func, batch_y0, batch_t)
        loss = torch.mean(torch.abs(pred_y - batch_y))
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step(torch.randn(4, 1, 2), t, torch.randn(5, 4, 1, 2)) for _ in range(4)],
        func,
        optimizer,
    )


@script("Neural ODE with the adjoint method: a custom autograd.Function that integrates backwards")
def adjoint_ode(wrap: Wrap) -> Any:
    net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2))
    weights = tuple(net.parameters())

    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Any, *params: Any) -> Any:
            for _ in range(4):
                y = y + 0.25 * net(y)
            ctx.save_for_backward(y, *params)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            y, *params = ctx.saved_tensors
            totals = [torch.zeros_like(p) for p in params]
            for _ in range(4):
                with torch.enable_grad():
                    state = y.detach().requires_grad_(True)
                    slope = net(state)
                    change, *found = torch.autograd.grad(slope, (state, *params), grad)
                y = y - 0.25 * slope.detach()
                grad = grad + 0.25 * change
                totals = [total + 0.25 * one for total, one in zip(totals, found, strict=True)]
            return grad, *totals

    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    @wrap
    def train_step(y0: Any, target: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.mse_loss(Adjoint.apply(y0, *weights), target)
        loss.backward()
        optimizer.step()
        return loss

    return [train_step(torch.randn(4, 2), torch.randn(4, 2)) for _ in range(4)], net, optimizer


@script("Physics-informed networks: Burgers' equation by nested autograd.grad")
def physics_informed(wrap: Wrap) -> Any:
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def derivative(y: Any, x: Any) -> Any:
        return torch.autograd.grad(
            y, x, grad_outputs=torch.ones_like(y), create_graph=True, retain_graph=True
        )[0]

    @wrap
    def train_step(points: Any, x_u: Any, u: Any) -> Any:
        t, x = (
            points[:, :1].clone().requires_grad_(True),
            points[:, 1:].clone().requires_grad_(True),
        )
        found = net(torch.cat([t, x], dim=1))
        u_t, u_x = derivative(found, t), derivative(found, x)
        u_xx = derivative(u_x, x)
        residual = u_t + found * u_x - (0.01 / math.pi) * u_xx
        loss = functional.mse_loss(net(x_u), u) + residual.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return (
        [train_step(torch.rand(8, 2), torch.rand(4, 2), torch.randn(4, 1)) for _ in range(4)],
        net,
        optimizer,
    )


@script(
    "NeRF: positional encoding, volume rendering, hierarchical samples, an exponential rate by hand"
)
def radiance_field(wrap: Wrap) -> Any:
    class NeRF(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(27, 24), nn.Linear(24 + 27, 24)])
            self.out = nn.Linear(24, 4)

        def forward(self, x: Any) -> Any:
            encoded = torch.cat(
                [x] + [fn(2.0**i * x) for i in range(4) for fn in (torch.sin, torch.cos)], -1
            )
            h = functional.relu(self.layers[0](encoded))
            return self.out(functional.relu(self.layers[1](torch.cat([encoded, h], -1))))

    coarse, fine = NeRF(), NeRF()
    optimizer = torch.optim.Adam(
        [*coarse.parameters(), *fine.parameters()], lr=5e-4, betas=(0.9, 0.999)
    )

    def render(raw: Any, z: Any) -> Any:
        dists = torch.cat(
            [z[..., 1:] - z[..., :-1], torch.tensor([1e10]).expand(z[..., :1].shape)], -1
        )
        alpha = 1.0 - torch.exp(-functional.relu(raw[..., 3]) * dists)
        through = torch.cumprod(torch.cat([torch.ones((len(z), 1)), 1.0 - alpha + 1e-10], -1), -1)[
            :, :-1
        ]
        weights = alpha * through
        return torch.sum(weights[..., None] * torch.sigmoid(raw[..., :3]), -2), weights

    def sample_pdf(bins: Any, weights: Any, count: int) -> Any:
        weights = weights + 1e-5
        cdf = torch.cumsum(weights / torch.sum(weights, -1, keepdim=True), -1)
        cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
        u = torch.rand([*cdf.shape[:-1], count]).contiguous()
        above = torch.searchsorted(cdf, u, right=True)
        below = torch.max(torch.zeros_like(above - 1), above - 1)
        above = torch.min((cdf.shape[-1] - 1) * torch.ones_like(above), above)
        lower, upper = torch.gather(bins, 1, below), torch.gather(bins, 1, above)
        return lower + (upper - lower) * torch.rand_like(lower)

    @wrap
    def train_step(origins: Any, directions: Any, target: Any) -> Any:
        z = torch.linspace(2.0, 6.0, 8).expand(len(origins), 8)
        mids = 0.5 * (z[..., 1:] + z[..., :-1])
        z = torch.cat([z[..., :1], mids], -1) + (z[..., 1:2] - z[..., :1]) * torch.rand(z.shape)
        rgb, weights = render(coarse(origins[:, None] + directions[:, None] * z[..., None]), z)
        extra = sample_pdf(0.5 * (z[..., 1:] + z[..., :-1]), weights[..., 1:-1], 4).detach()
        z, _ = torch.sort(torch.cat([z, extra], -1), -1)
        rgb_fine, _ = render(fine(origins[:, None] + directions[:, None] * z[..., None]), z)
        optimizer.zero_grad()
        loss = torch.mean((rgb_fine - target) ** 2) + torch.mean((rgb - target) ** 2)
        loss.backward()
        optimizer.step()
        return loss

    history = []
    for step in range(4):
        history.append(train_step(torch.randn(5, 3), torch.randn(5, 3), torch.rand(5, 3)))
        for group in optimizer.param_groups:
            group["lr"] = 5e-4 * (0.1 ** (step / 250))
    return history, coarse, fine, optimizer


@script("SIREN: sine activations, image fitting with gradients of the image")
def siren(wrap: Wrap) -> Any:
    class Sine(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.linear = nn.Linear(before, after)
            with torch.no_grad():
                self.linear.weight.uniform_(-1 / before, 1 / before)

        def forward(self, x: Any) -> Any:
            return torch.sin(30 * self.linear(x))

    net = nn.Sequential(Sine(2, 16), Sine(16, 16), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    grid = torch.stack(torch.meshgrid(*(torch.linspace(-1, 1, 6),) * 2, indexing="ij"), -1).reshape(
        -1, 2
    )
    pixels, slopes = torch.rand(36, 1), torch.rand(36, 2)

    @wrap
    def train_step() -> Any:
        coords = grid.clone().detach().requires_grad_(True)
        output = net(coords)
        (gradient,) = torch.autograd.grad(
            output, [coords], grad_outputs=torch.ones_like(output), create_graph=True
        )
        loss = ((output - pixels) ** 2).mean() + 0.1 * ((gradient - slopes) ** 2).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return [train_step() for _ in range(4)], net, optimizer


@script("Mixture density networks: torch.distributions, log-sum-exp")
def mixture_density(wrap: Wrap) -> Any:
    trunk, pi, mu, sigma = nn.Linear(1, 16), nn.Linear(16, 3), nn.Linear(16, 3), nn.Linear(16, 3)
    model = nn.ModuleList([trunk, pi, mu, sigma])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        h = torch.tanh(trunk(x))
        normal = torch.distributions.Normal(mu(h), torch.exp(sigma(h)), validate_args=False)
        log_mix = functional.log_softmax(pi(h), dim=1)
        loss = -torch.logsumexp(normal.log_prob(y) + log_mix, dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return [train_step(torch.randn(8, 1), torch.randn(8, 1)) for _ in range(4)], model, optimizer


@script("Bayes by backprop: weights drawn in the step, KL of torch.distributions")
def bayes_by_backprop(wrap: Wrap) -> Any:
    class BayesianLinear(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.mu, self.rho = (
                nn.Parameter(torch.randn(after, before) * 0.1),
                nn.Parameter(torch.full((after, before), -3.0)),
            )

        def forward(self, x: Any) -> Any:
            sigma = functional.softplus(self.rho)
            posterior = torch.distributions.Normal(self.mu, sigma)
            prior = torch.distributions.Normal(torch.zeros_like(self.mu), torch.ones_like(sigma))
            return functional.linear(x, posterior.rsample()), torch.distributions.kl_divergence(
                posterior, prior
            ).sum()

    first, last = BayesianLinear(4, 12), BayesianLinear(12, 1)
    optimizer = torch.optim.Adam([*first.parameters(), *last.parameters()], lr=1e-2)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        h, kl_first = first(x)
        found, kl_last = last(torch.relu(h))
        loss = functional.mse_loss(found, y) + (kl_first + kl_last) / 100
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(4)],
        first,
        last,
        optimizer,
    )


@script("Gaussian processes written out: Cholesky, marginal likelihood, LinearOperator-free")
def gaussian_process(wrap: Wrap) -> Any:
    log_scale, log_noise, log_length = (nn.Parameter(torch.zeros(())) for _ in range(3))
    optimizer = torch.optim.Adam([log_scale, log_noise, log_length], lr=0.1)
    x = torch.linspace(0, 1, 10)[:, None]
    y = torch.sin(6 * x[:, 0])

    @wrap
    def train_step() -> Any:
        kernel = log_scale.exp() * torch.exp(-0.5 * torch.cdist(x, x).pow(2) / log_length.exp())
        chol = torch.linalg.cholesky(kernel + log_noise.exp() * torch.eye(len(x)))
        alpha = torch.cholesky_solve(y[:, None], chol)
        loss = (
            0.5 * (y @ alpha[:, 0])
            + chol.diagonal().log().sum()
            + 0.5 * len(x) * math.log(2 * math.pi)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step() for _ in range(4)],
        [log_scale.data, log_noise.data, log_length.data],
        optimizer,
    )


@script(
    "Fourier neural operator: complex weights, a real FFT there and back, relative errors, a decaying rate"
)
def fourier_operator(wrap: Wrap) -> Any:
    class SpectralConv1d(nn.Module):
        def __init__(self, channels: int, modes: int) -> None:
            super().__init__()
            self.modes = modes
            scale = 1 / channels**2
            self.weights = nn.Parameter(
                scale * torch.rand(channels, channels, modes, dtype=torch.cfloat)
            )

        def forward(self, x: Any) -> Any:
            spectrum = torch.fft.rfft(x)
            out = torch.zeros(*x.shape[:2], x.size(-1) // 2 + 1, dtype=torch.cfloat)
            out[:, :, : self.modes] = torch.einsum(
                "bix,iox->box", spectrum[:, :, : self.modes], self.weights
            )
            return torch.fft.irfft(out, n=x.size(-1))

    class Operator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = nn.Linear(2, 8)
            self.spectral = nn.ModuleList(SpectralConv1d(8, 5) for _ in range(2))
            self.local = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(2))
            self.project = nn.Linear(8, 1)

        def forward(self, x: Any) -> Any:
            grid = torch.linspace(0, 1, x.shape[1]).reshape(1, -1, 1).repeat(x.shape[0], 1, 1)
            x = self.lift(torch.cat((x, grid), dim=-1)).permute(0, 2, 1)
            for spectral, local in zip(self.spectral, self.local, strict=True):
                x = functional.gelu(spectral(x) + local(x))
            return self.project(x.permute(0, 2, 1))

    model = Operator()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        out = model(x).view(len(x), -1)
        loss = (torch.norm(out - y, 2, 1) / torch.norm(y, 2, 1)).sum()
        loss.backward()
        optimizer.step()
        return loss.item(), functional.mse_loss(out, y).item()

    losses = []
    for _ in range(5):
        losses.append(train_step(torch.randn(4, 16, 1), torch.randn(4, 16)))
        scheduler.step()
    return losses, model, optimizer
