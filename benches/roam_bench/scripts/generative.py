"""Generative models: adversarial, variational, diffusion."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional


@script("PyTorch examples: variational autoencoder")
def vae(wrap: Wrap) -> Any:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 8), nn.Linear(32, 8)
            self.fc3, self.fc4 = nn.Linear(8, 32), nn.Linear(32, 64)

        def reparameterize(self, mu: Any, logvar: Any) -> Any:
            std = torch.exp(0.5 * logvar)
            return mu + torch.randn_like(std) * std

        def forward(self, x: Any) -> Any:
            h = functional.relu(self.fc1(x.view(-1, 64)))
            mu, logvar = self.fc21(h), self.fc22(h)
            z = self.reparameterize(mu, logvar)
            return torch.sigmoid(self.fc4(functional.relu(self.fc3(z)))), mu, logvar

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_function(recon_x: Any, x: Any, mu: Any, logvar: Any) -> Any:
        bce = functional.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())

    @wrap
    def train(data: Any) -> Any:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    return [train(torch.rand(4, 1, 8, 8)) for _ in range(4)], model, optimizer


@script("VQ-VAE: nearest codes, straight-through, codebook by moving averages, perplexity")
def vq_vae(wrap: Wrap) -> Any:
    codes, size = 12, 6

    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("embedding", torch.randn(codes, size))
            self.register_buffer("cluster_size", torch.zeros(codes))
            self.register_buffer("embed_avg", self.embedding.clone())

        def forward(self, z: Any) -> Any:
            flat = z.reshape(-1, size)
            distances = (
                flat.pow(2).sum(1, keepdim=True)
                + self.embedding.pow(2).sum(1)
                - 2 * flat @ self.embedding.t()
            )
            onehot = functional.one_hot(distances.argmin(1), codes).type_as(flat)
            quantized = (onehot @ self.embedding).view_as(z)
            if self.training:
                with torch.no_grad():
                    self.cluster_size.mul_(0.99).add_(onehot.sum(0), alpha=0.01)
                    self.embed_avg.mul_(0.99).add_(onehot.t() @ flat, alpha=0.01)
                    total = self.cluster_size.sum()
                    sizes = (self.cluster_size + 1e-5) / (total + codes * 1e-5) * total
                    self.embedding.copy_(self.embed_avg / sizes.unsqueeze(1))
            loss = 0.25 * functional.mse_loss(quantized.detach(), z)
            probs = onehot.mean(0)
            perplexity = torch.exp(-torch.sum(probs * torch.log(probs + 1e-10)))
            return z + (quantized - z).detach(), loss, perplexity

    encoder, decoder, quantizer = (
        nn.Conv2d(1, size, 4, 2, 1),
        nn.ConvTranspose2d(size, 1, 4, 2, 1),
        Quantizer(),
    )
    model = nn.ModuleList([encoder, quantizer, decoder])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=False)

    @wrap
    def train(data: Any) -> Any:
        optimizer.zero_grad()
        quantized, vq_loss, perplexity = quantizer(encoder(data).permute(0, 2, 3, 1).contiguous())
        recon = decoder(quantized.permute(0, 3, 1, 2).contiguous())
        loss = functional.mse_loss(recon, data) / 0.06 + vq_loss
        loss.backward()
        optimizer.step()
        return loss.item(), perplexity.item()

    return [train(torch.rand(3, 1, 8, 8)) for _ in range(4)], model, optimizer


def _generator(latent: int) -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(latent, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def _discriminator(norm: bool = True, last: nn.Module | None = None) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 8, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 16, 4, 2, 1),
    ]
    layers += [nn.BatchNorm2d(16)] if norm else []
    layers += [nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(16, 1, 4, 1, 0, bias=False)]
    return nn.Sequential(*layers, *([last] if last is not None else []))


@script("PyTorch tutorials: DCGAN")
def dcgan(wrap: Wrap) -> Any:
    def weights_init(m: Any) -> None:
        if m.__class__.__name__.find("Conv") != -1:
            nn.init.normal_(m.weight.data, 0.0, 0.02)

    net_g, net_d = _generator(8), _discriminator(last=nn.Sigmoid())
    net_g.apply(weights_init)
    net_d.apply(weights_init)
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=0.0002, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=0.0002, betas=(0.5, 0.999))

    @wrap
    def train(real: Any) -> Any:
        net_d.zero_grad()
        size = real.size(0)
        label = torch.full((size,), 1.0, dtype=torch.float)
        output = net_d(real).view(-1)
        err_real = criterion(output, label)
        err_real.backward()
        d_x = output.mean().item()
        fake = net_g(torch.randn(size, 8, 1, 1))
        label.fill_(0.0)
        output = net_d(fake.detach()).view(-1)
        err_fake = criterion(output, label)
        err_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        label.fill_(1.0)
        output = net_d(fake).view(-1)
        err_g = criterion(output, label)
        err_g.backward()
        optimizer_g.step()
        return (err_real + err_fake).item(), err_g.item(), d_x

    return (
        [train(torch.randn(3, 3, 16, 16)) for _ in range(4)],
        net_g,
        net_d,
        optimizer_g,
        optimizer_d,
    )


@script("WGAN: weights clipped after each update, the critic five times as often")
def wgan_clipping(wrap: Wrap) -> Any:
    net_g, net_d = _generator(8), _discriminator(norm=False)
    optimizer_d = torch.optim.RMSprop(net_d.parameters(), lr=5e-5)
    optimizer_g = torch.optim.RMSprop(net_g.parameters(), lr=5e-5)

    @wrap
    def critic(real: Any) -> Any:
        optimizer_d.zero_grad()
        fake = net_g(torch.randn(real.size(0), 8, 1, 1)).detach()
        loss = -torch.mean(net_d(real)) + torch.mean(net_d(fake))
        loss.backward()
        optimizer_d.step()
        for p in net_d.parameters():
            p.data.clamp_(-0.01, 0.01)
        return loss

    @wrap
    def generator(size: int) -> Any:
        optimizer_g.zero_grad()
        loss = -torch.mean(net_d(net_g(torch.randn(size, 8, 1, 1))))
        loss.backward()
        optimizer_g.step()
        return loss

    history = []
    for _ in range(2):
        history += [critic(torch.randn(3, 3, 16, 16)) for _ in range(5)]
        history.append(generator(3))
    return history, net_g, net_d, optimizer_g, optimizer_d


@script("WGAN-GP: gradient penalty by autograd.grad with create_graph")
def wgan_gp(wrap: Wrap) -> Any:
    net_g, net_d = _generator(8), _discriminator(norm=False)
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.0, 0.9))

    def gradient_penalty(real: Any, fake: Any) -> Any:
        alpha = torch.rand(real.size(0), 1, 1, 1)
        interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        scores = net_d(interpolates)
        gradients = torch.autograd.grad(
            outputs=scores,
            inputs=interpolates,
            grad_outputs=torch.ones_like(scores),
            create_graph=True,
            retain_graph=True,
        )[0]
        return ((gradients.view(gradients.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()

    @wrap
    def critic(real: Any) -> Any:
        optimizer_d.zero_grad()
        fake = net_g(torch.randn(real.size(0), 8, 1, 1)).detach()
        loss = -net_d(real).mean() + net_d(fake).mean() + 10 * gradient_penalty(real, fake)
        loss.backward()
        optimizer_d.step()
        return loss

    return [critic(torch.randn(3, 3, 16, 16)) for _ in range(4)], net_g, net_d, optimizer_d


@script(
    "Spectral normalization GAN: torch.nn.utils.spectral_norm as it was, hinge loss, samples judged between the steps"
)
def spectral_norm_gan(wrap: Wrap) -> Any:
    from torch.nn.utils import spectral_norm

    net_g, net_d = _generator(8), _discriminator(norm=False)
    for layer in net_d:
        if isinstance(layer, nn.Conv2d):
            spectral_norm(layer)
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.0, 0.9))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.0, 0.9))

    @wrap
    def discriminator_step(real: Any, z: Any) -> Any:
        optimizer_d.zero_grad()
        optimizer_g.zero_grad()
        loss = (
            functional.relu(1.0 - net_d(real)).mean()
            + functional.relu(1.0 + net_d(net_g(z))).mean()
        )
        loss.backward()
        optimizer_d.step()
        return loss

    @wrap
    def generator_step(z: Any) -> Any:
        optimizer_d.zero_grad()
        optimizer_g.zero_grad()
        loss = -net_d(net_g(z)).mean()
        loss.backward()
        optimizer_g.step()
        return loss

    history = []
    for _ in range(3):
        history += [
            discriminator_step(torch.randn(3, 3, 16, 16), torch.randn(3, 8, 1, 1)) for _ in range(2)
        ]
        history.append(generator_step(torch.randn(3, 8, 1, 1)))
        with torch.no_grad():
            history.append(net_d(net_g(torch.randn(3, 8, 1, 1))))
    return history, net_g, net_d, optimizer_d, optimizer_g


@script("StyleGAN2: R1 penalty every few steps, softplus losses, generator EMA, path length")
def stylegan(wrap: Wrap) -> Any:
    class G(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mapping = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 8))
            self.const, self.affine = nn.Parameter(torch.randn(1, 8, 8, 8)), nn.Linear(8, 8)
            self.weight = nn.Parameter(torch.randn(3, 8, 3, 3))

        def forward(self, z: Any) -> Any:
            w = self.mapping(functional.normalize(z, dim=1))
            style = self.affine(w) + 1
            weight = self.weight[None] * style[:, None, :, None, None]
            weight = weight * (weight.pow(2).sum([2, 3, 4], keepdim=True) + 1e-8).rsqrt()
            x = self.const.expand(len(z), -1, -1, -1).reshape(1, -1, 8, 8)
            x = functional.conv2d(x, weight.reshape(-1, 8, 3, 3), padding=1, groups=len(z))
            return x.view(len(z), 3, 8, 8) + 0.1 * torch.randn(len(z), 1, 8, 8)

    net_g = G()
    net_d = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1)
    )
    ema = copy.deepcopy(net_g).eval().requires_grad_(False)
    g_optim = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.0, 0.99))
    d_optim = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.0, 0.99))

    @wrap
    def discriminate(real: Any) -> Any:
        loss = (
            functional.softplus(-net_d(real)).mean()
            + functional.softplus(net_d(net_g(torch.randn(len(real), 8)).detach())).mean()
        )
        net_d.zero_grad()
        loss.backward()
        d_optim.step()
        return loss

    @wrap
    def regularize(real: Any) -> Any:
        real = real.detach().clone().requires_grad_(True)
        (grad_real,) = torch.autograd.grad(
            outputs=net_d(real).sum(), inputs=real, create_graph=True
        )
        r1 = grad_real.pow(2).reshape(len(real), -1).sum(1).mean()
        net_d.zero_grad()
        (10 / 2 * r1 * 2).backward()
        d_optim.step()
        return r1

    @wrap
    def generate(size: int) -> Any:
        loss = functional.softplus(-net_d(net_g(torch.randn(size, 8)))).mean()
        net_g.zero_grad()
        loss.backward()
        g_optim.step()
        with torch.no_grad():
            for mean, now in zip(ema.parameters(), net_g.parameters(), strict=True):
                mean.lerp_(now, 0.01)
        return loss

    history = []
    for index in range(4):
        real = torch.randn(3, 3, 8, 8)
        history.append(discriminate(real))
        if index % 2 == 0:
            history.append(regularize(real))
        history.append(generate(3))
    return history, net_g, net_d, ema, g_optim, d_optim


@script(
    "pix2pix and CycleGAN: two generators, cycle and identity losses, itertools.chain, a history of images"
)
def cyclegan(wrap: Wrap) -> Any:
    import itertools
    import random

    def gen() -> nn.Module:
        return nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(3, 6, 3),
            nn.InstanceNorm2d(6),
            nn.ReLU(True),
            nn.Conv2d(6, 3, 3, padding=1),
            nn.Tanh(),
        )

    g_ab, g_ba, d_a, d_b = gen(), gen(), _discriminator(), _discriminator()
    optimizer_g = torch.optim.Adam(
        itertools.chain(g_ab.parameters(), g_ba.parameters()), lr=2e-4, betas=(0.5, 0.999)
    )
    optimizer_d = torch.optim.Adam(
        itertools.chain(d_a.parameters(), d_b.parameters()), lr=2e-4, betas=(0.5, 0.999)
    )

    def set_requires_grad(nets: Any, requires_grad: bool) -> None:
        for net in nets:
            for param in net.parameters():
                param.requires_grad = requires_grad

    def gan(prediction: Any, is_real: bool) -> Any:
        return functional.mse_loss(
            prediction, torch.tensor(1.0 if is_real else 0.0).expand_as(prediction)
        )

    @wrap
    def generators(a: Any, b: Any) -> Any:
        set_requires_grad([d_a, d_b], False)
        optimizer_g.zero_grad()
        fake_b, fake_a = g_ab(a), g_ba(b)
        cycle = functional.l1_loss(g_ba(fake_b), a) + functional.l1_loss(g_ab(fake_a), b)
        same = functional.l1_loss(g_ab(b), b) + functional.l1_loss(g_ba(a), a)
        loss = gan(d_b(fake_b), True) + gan(d_a(fake_a), True) + 10 * cycle + 5 * same
        loss.backward()
        optimizer_g.step()
        set_requires_grad([d_a, d_b], True)
        return loss, fake_a.detach(), fake_b.detach()

    @wrap
    def discriminators(a: Any, b: Any, fake_a: Any, fake_b: Any) -> Any:
        optimizer_d.zero_grad()
        for net, real, fake in ((d_a, a, fake_a), (d_b, b, fake_b)):
            ((gan(net(real), True) + gan(net(fake), False)) * 0.5).backward()
        optimizer_d.step()

    pool: list[Any] = []
    history = []
    for _ in range(4):
        a, b = torch.randn(1, 3, 16, 16), torch.randn(1, 3, 16, 16)
        loss, fake_a, fake_b = generators(a, b)
        pool.append((fake_a, fake_b))
        discriminators(a, b, *random.choice(pool))
        history.append(loss)
    return history, g_ab, g_ba, d_a, d_b, optimizer_g, optimizer_d


class _Denoiser(nn.Module):
    """A small network that is told the time."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, size), nn.SiLU(), nn.Linear(size, size))
        self.first, self.middle, self.last = (
            nn.Conv2d(1, size, 3, padding=1),
            nn.Conv2d(size, size, 3, padding=1),
            nn.Conv2d(size, 1, 3, padding=1),
        )
        self.norm = nn.GroupNorm(2, size)

    def forward(self, x: Any, t: Any) -> Any:
        freqs = torch.exp(-math.log(10000) * torch.arange(8) / 7)
        emb = t[:, None].float() * freqs[None]
        emb = self.time(torch.cat((emb.sin(), emb.cos()), dim=-1))
        h = functional.silu(self.first(x)) + emb[:, :, None, None]
        return self.last(h + functional.silu(self.norm(self.middle(h))))


@script("Diffusion from scratch: DDPM with a linear schedule, buffers by gather, EMA")
def ddpm_from_scratch(wrap: Wrap) -> Any:
    betas = torch.linspace(1e-4, 0.02, 50)
    alphas_cumprod = torch.cumprod(1.0 - betas, 0)
    model = _Denoiser()
    ema = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)

    def extract(values: Any, t: Any, shape: Any) -> Any:
        return values.gather(-1, t).reshape(t.shape[0], *((1,) * (len(shape) - 1)))

    @wrap
    def train_step(x0: Any) -> Any:
        t = torch.randint(0, 50, (x0.shape[0],)).long()
        noise = torch.randn_like(x0)
        x = (
            extract(alphas_cumprod.sqrt(), t, x0.shape) * x0
            + extract((1 - alphas_cumprod).sqrt(), t, x0.shape) * noise
        )
        loss = functional.smooth_l1_loss(model(x, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for mean, now in zip(ema.parameters(), model.parameters(), strict=True):
            mean.data.mul_(0.99).add_(now.data, alpha=0.01)
        return loss

    return [train_step(torch.rand(4, 1, 8, 8)) for _ in range(4)], model, ema, optimizer


@script(
    "Improved DDPM and min-SNR: a cosine schedule, v-prediction, weighted loss, classifier-free guidance dropout"
)
def ddpm_weighted(wrap: Wrap) -> Any:
    model, labels = _Denoiser(), nn.Embedding(6, 8)
    optimizer = torch.optim.Adam([*model.parameters(), *labels.parameters()], lr=1e-3)
    steps = torch.arange(51) / 50
    bars = torch.cos((steps + 0.008) / 1.008 * math.pi / 2) ** 2
    bars = (bars / bars[0])[1:].clamp(min=1e-4)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        y = torch.where(torch.rand(y.shape) < 0.1, torch.full_like(y, 5), y)
        t = torch.randint(0, 50, (len(x),))
        bar = bars[t][:, None, None, None]
        noise = torch.randn_like(x)
        noisy = bar.sqrt() * x + (1 - bar).sqrt() * noise
        velocity = bar.sqrt() * noise - (1 - bar).sqrt() * x
        prediction = model(noisy + labels(y).mean(-1)[:, None, None, None], t)
        snr = bar / (1 - bar)
        weight = torch.minimum(snr, torch.full_like(snr, 5.0)) / (snr + 1)
        loss = (weight * (prediction - velocity).pow(2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step(torch.rand(4, 1, 8, 8), torch.randint(0, 5, (4,))) for _ in range(4)],
        model,
        labels,
        optimizer,
    )


@script("Score matching and flow matching (rectified flow)")
def flow_matching(wrap: Wrap) -> Any:
    net = nn.Sequential(nn.Linear(3, 32), nn.ELU(), nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)

    @wrap
    def train_step(x_1: Any) -> Any:
        x_0, t = torch.randn_like(x_1), torch.rand(len(x_1), 1)
        x_t = (1 - t) * x_0 + t * x_1
        optimizer.zero_grad()
        loss = nn.MSELoss()(net(torch.cat((t, x_t), -1)), x_1 - x_0)
        loss.backward()
        optimizer.step()
        return loss

    return [train_step(torch.randn(16, 2)) for _ in range(4)], net, optimizer


@script("Masked autoencoder: random masking by sorting noise, loss on the masked patches")
def masked_autoencoder(wrap: Wrap) -> Any:
    size, patches = 16, 9
    embed, unembed = nn.Linear(16, size), nn.Linear(size, 16)
    encoder = nn.TransformerEncoderLayer(size, 2, 32, 0.0, batch_first=True, norm_first=True)
    mask_token = nn.Parameter(torch.zeros(1, 1, size))
    modules = nn.ModuleList([embed, unembed, encoder])
    optimizer = torch.optim.AdamW([*modules.parameters(), mask_token], lr=1e-3, betas=(0.9, 0.95))

    @wrap
    def train_step(x: Any) -> Any:
        noise = torch.rand(len(x), patches)
        shuffle = torch.argsort(noise, dim=1)
        restore = torch.argsort(shuffle, dim=1)
        keep = shuffle[:, :3]
        h = embed(x)
        h = encoder(torch.gather(h, 1, keep.unsqueeze(-1).repeat(1, 1, size)))
        full = torch.cat([h, mask_token.repeat(len(x), patches - 3, 1)], dim=1)
        full = torch.gather(full, 1, restore.unsqueeze(-1).repeat(1, 1, size))
        mask = torch.ones(len(x), patches)
        mask[:, :3] = 0
        mask = torch.gather(mask, 1, restore)
        loss = (((unembed(full) - x) ** 2).mean(dim=-1) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step(torch.rand(4, patches, 16)) for _ in range(4)],
        modules,
        mask_token,
        optimizer,
    )
