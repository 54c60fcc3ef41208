"""Speech, time series and knowledge tracing."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional


@script(
    "Speech recognition with CTC: spectrogram, residual convolutions, bidirectional GRU, OneCycle"
)
def speech_ctc(wrap: Wrap) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cnn, self.norm = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.LayerNorm(17)
            self.fc, self.gru = (
                nn.Linear(4 * 17, 16),
                nn.GRU(16, 16, batch_first=True, bidirectional=True),
            )
            self.classifier = nn.Linear(32, 12)

        def forward(self, wave: Any) -> Any:
            spec = (
                torch.stft(wave, 64, 32, window=torch.hann_window(64), return_complex=True)
                .abs()
                .pow(2)
            )
            x = torch.log1p(spec).unsqueeze(1)
            x = functional.gelu(self.norm(self.cnn(x).transpose(2, 3)).transpose(2, 3))
            x = x.flatten(1, 2).transpose(1, 2)
            x, _ = self.gru(self.fc(x))
            return self.classifier(functional.dropout(x, 0.1, self.training))

    model = Model()
    criterion = nn.CTCLoss(blank=0)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=5e-4, steps_per_epoch=4, epochs=1
    )

    @wrap
    def train_step(wave: Any, labels: Any, input_lengths: Any, label_lengths: Any) -> Any:
        optimizer.zero_grad()
        output = functional.log_softmax(model(wave), dim=2).transpose(0, 1)
        loss = criterion(output, labels, input_lengths, label_lengths)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    history = [
        train_step(
            torch.randn(3, 640),
            torch.randint(1, 12, (3, 4)),
            torch.tensor([11, 11, 10]),
            torch.tensor([4, 3, 2]),
        )
        for _ in range(3)
    ]
    return history, model, optimizer, scheduler


@script("RNN-T: a joint network and the transducer loss written out on tensors")
def rnn_transducer(wrap: Wrap) -> Any:
    encoder, predictor = nn.LSTM(6, 12, batch_first=True), nn.GRU(8, 12, batch_first=True)
    embed, joint = nn.Embedding(10, 8), nn.Linear(12, 10)
    modules = nn.ModuleList([encoder, predictor, embed, joint])
    optimizer = torch.optim.Adam(modules.parameters(), lr=1e-3)

    def transducer_loss(log_probs: Any, labels: Any) -> Any:
        frames, count = log_probs.shape[1], labels.shape[1]
        blank = log_probs[..., 0]
        emit = (
            log_probs[:, :, :count]
            .gather(3, labels[:, None, :, None].expand(-1, frames, -1, 1))
            .squeeze(3)
        )
        rows = []
        for t in range(frames):
            row = [rows[t - 1][0] + blank[:, t - 1, 0] if t else torch.zeros(len(labels))]
            for u in range(1, count + 1):
                stay = row[u - 1] + emit[:, t, u - 1]
                row.append(
                    torch.logaddexp(rows[t - 1][u] + blank[:, t - 1, u], stay) if t else stay
                )
            rows.append(row)
        return -(rows[-1][-1] + blank[:, -1, -1]).mean()

    @wrap
    def train_step(x: Any, labels: Any) -> Any:
        optimizer.zero_grad()
        encoded, _ = encoder(x)
        predicted, _ = predictor(embed(functional.pad(labels, (1, 0))))
        log_probs = joint(torch.tanh(encoded[:, :, None] + predicted[:, None])).log_softmax(-1)
        loss = transducer_loss(log_probs, labels)
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step(torch.randn(2, 5, 6), torch.randint(1, 10, (2, 3))) for _ in range(3)],
        modules,
        optimizer,
    )


@script("Deep knowledge tracing: an LSTM, the loss at answered questions by a boolean mask")
def knowledge_tracing(wrap: Wrap) -> Any:
    rnn, out = nn.LSTM(20, 16, batch_first=True), nn.Linear(16, 10)
    optimizer = torch.optim.Adam([*rnn.parameters(), *out.parameters()], lr=1e-3)

    @wrap
    def train_step(inputs: Any, questions: Any, answers: Any, mask: Any) -> Any:
        hidden, _ = rnn(inputs)
        prediction = torch.sigmoid(out(hidden))
        found = (prediction * functional.one_hot(questions, 10)).sum(-1)
        losses = functional.binary_cross_entropy(found, answers, reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def batch() -> Any:
        return (
            torch.randn(3, 7, 20),
            torch.randint(0, 10, (3, 7)),
            torch.randint(0, 2, (3, 7)).float(),
            (torch.rand(3, 7) > 0.2).float(),
        )

    return [train_step(*batch()) for _ in range(4)], rnn, out, optimizer


@script("Sequence classification with packed sequences (pack_padded_sequence)")
def packed_sequences(wrap: Wrap) -> Any:
    from torch.nn.utils.rnn import pack_padded_sequence

    embed, rnn, out = nn.Embedding(20, 8), nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 2)
    modules = nn.ModuleList([embed, rnn, out])
    optimizer = torch.optim.Adam(modules.parameters(), lr=1e-3)

    @wrap
    def train_step(text: Any, lengths: Any, labels: Any) -> Any:
        optimizer.zero_grad()
        packed = pack_padded_sequence(embed(text), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = rnn(packed)
        loss = functional.cross_entropy(out(hidden[-1]), labels)
        loss.backward()
        optimizer.step()
        return loss

    history = [
        train_step(torch.randint(0, 20, (3, 6)), torch.tensor([6, 4, 3]), torch.randint(0, 2, (3,)))
        for _ in range(3)
    ]
    return history, modules, optimizer


@script("DeepAR: an LSTM fed step by step, negative log-likelihood of torch.distributions")
def deepar(wrap: Wrap) -> Any:
    cell, mu, sigma = nn.LSTM(3, 12, 2, dropout=0.1), nn.Linear(24, 1), nn.Linear(24, 1)
    modules = nn.ModuleList([cell, mu, sigma])
    optimizer = torch.optim.Adam(modules.parameters(), lr=1e-3)

    @wrap
    def train_step(inputs: Any, labels: Any) -> Any:
        optimizer.zero_grad()
        batch = inputs.shape[1]
        loss = torch.zeros(1)
        hidden, state = torch.zeros(2, batch, 12), torch.zeros(2, batch, 12)
        for t in range(len(inputs)):
            _, (hidden, state) = cell(inputs[t].unsqueeze(0), (hidden, state))
            joined = hidden.permute(1, 2, 0).contiguous().view(batch, -1)
            scale = functional.softplus(sigma(joined)).squeeze(1)
            likelihood = torch.distributions.normal.Normal(
                mu(joined).squeeze(1), scale, validate_args=False
            ).log_prob(labels[t])
            loss += -torch.mean(likelihood)
        loss.backward()
        optimizer.step()
        return loss.item() / len(inputs)

    return (
        [train_step(torch.randn(5, 4, 3), torch.randn(5, 4)) for _ in range(3)],
        modules,
        optimizer,
    )


@script("N-BEATS: residual blocks with a basis, symmetric percentage error")
def n_beats(wrap: Wrap) -> Any:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
            self.theta_b, self.theta_f = nn.Linear(16, 3, bias=False), nn.Linear(16, 3, bias=False)
            self.register_buffer(
                "back", torch.stack([(torch.arange(12) / 12) ** i for i in range(3)])
            )
            self.register_buffer(
                "fore", torch.stack([(torch.arange(4) / 4) ** i for i in range(3)])
            )

        def forward(self, x: Any) -> Any:
            h = self.net(x)
            return self.theta_b(h) @ self.back, self.theta_f(h) @ self.fore

    blocks = nn.ModuleList(Block() for _ in range(3))
    optimizer = torch.optim.Adam(blocks.parameters(), lr=1e-3)

    @wrap
    def train_step(x: Any, target: Any) -> Any:
        optimizer.zero_grad()
        forecast = torch.zeros_like(target)
        for block in blocks:
            back, fore = block(x)
            x = x - back
            forecast = forecast + fore
        loss = (200 * (forecast - target).abs() / (forecast.abs() + target.abs() + 1e-6)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(blocks.parameters(), 1.0)
        optimizer.step()
        return loss

    return [train_step(torch.randn(5, 12), torch.randn(5, 4)) for _ in range(4)], blocks, optimizer


@script("Temporal convolutions with weight norm, reversible instance normalization, quantile loss")
def temporal_convolutions(wrap: Wrap) -> Any:
    from torch.nn.utils.parametrizations import weight_norm

    convs = nn.ModuleList(
        weight_norm(nn.Conv1d(2 if i == 0 else 8, 8, 3, dilation=2**i)) for i in range(3)
    )
    out = nn.Linear(8, 3)
    optimizer = torch.optim.AdamW([*convs.parameters(), *out.parameters()], lr=1e-3)
    quantiles = torch.tensor([0.1, 0.5, 0.9])

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        mean, std = (
            x.mean(-1, keepdim=True),
            torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5),
        )
        h = (x - mean) / std
        for index, conv in enumerate(convs):
            h = functional.dropout(functional.relu(conv(functional.pad(h, (2 * 2**index, 0)))), 0.1)
        found = out(h[..., -1]) * std[:, 0] + mean[:, 0]
        error = y[:, None] - found
        loss = torch.max((quantiles - 1) * error, quantiles * error).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step(torch.randn(4, 2, 16), torch.randn(4)) for _ in range(4)],
        convs,
        out,
        optimizer,
    )


@script(
    "TCN, the reference implementation: torch.nn.utils.weight_norm as it was, residual blocks, clipping, an evaluation"
)
def temporal_blocks(wrap: Wrap) -> Any:
    from torch.nn.utils import weight_norm  # type: ignore[attr-defined]

    class TemporalBlock(nn.Module):
        def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
            super().__init__()
            self.padding = 2 * dilation
            self.conv1 = weight_norm(
                nn.Conv1d(inputs, outputs, 3, padding=self.padding, dilation=dilation)
            )
            self.conv2 = weight_norm(
                nn.Conv1d(outputs, outputs, 3, padding=self.padding, dilation=dilation)
            )
            self.downsample = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else None
            for conv in (self.conv1, self.conv2):
                conv.weight.data.normal_(0, 0.01)

        def forward(self, x: Any) -> Any:
            out = x
            for conv in (self.conv1, self.conv2):
                out = functional.dropout(
                    functional.relu(conv(out)[:, :, : -self.padding]), 0.2, self.training
                )
            return functional.relu(out + (x if self.downsample is None else self.downsample(x)))

    model = nn.Sequential(TemporalBlock(2, 8, 1), TemporalBlock(8, 8, 2), TemporalBlock(8, 8, 4))
    linear = nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *linear.parameters()], lr=4e-3)

    def evaluate(x: Any, y: Any) -> Any:
        model.eval()
        with torch.no_grad():
            loss = functional.mse_loss(linear(model(x)[:, :, -1]), y)
        model.train()
        return loss

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.mse_loss(linear(model(x)[:, :, -1]), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    history = []
    for _ in range(2):
        history += [train_step(torch.randn(4, 2, 16), torch.randn(4, 1)) for _ in range(3)]
        history.append(evaluate(torch.randn(4, 2, 16), torch.randn(4, 1)))
    return history, model, linear, optimizer


@script("State spaces: a selective scan written as a loop, a convolution by FFT")
def state_spaces(wrap: Wrap) -> Any:
    size = 8
    log_a, b, c, step = (nn.Parameter(torch.randn(size) * 0.1) for _ in range(4))
    mix, head = nn.Linear(size, size), nn.Linear(size, 3)
    params = [log_a, b, c, step, *mix.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        length = x.shape[1]
        time = torch.arange(length)[:, None]
        kernel = c * torch.exp(-time * torch.exp(log_a) * functional.softplus(step)) * b
        spectrum = torch.fft.rfft(x, n=2 * length, dim=1) * torch.fft.rfft(
            kernel, n=2 * length, dim=0
        )
        h = torch.fft.irfft(spectrum, n=2 * length, dim=1)[:, :length]
        state, states = torch.zeros(len(x), size), []
        for t in range(length):
            gate = torch.sigmoid(mix(h[:, t]))
            state = gate * state + (1 - gate) * h[:, t]
            states.append(state)
        loss = functional.cross_entropy(head(torch.stack(states, 1).mean(1)) / math.sqrt(size), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train_step(torch.randn(4, 6, size), torch.randint(0, 3, (4,))) for _ in range(3)],
        mix,
        head,
        [p.data for p in params],
        optimizer,
    )


@script(
    "Truncated backpropagation through time: states of LSTM cells in a list, detached at the next step"
)
def truncated_backpropagation(wrap: Wrap) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 8)
            self.cells = nn.ModuleList(nn.LSTMCell(8, 8) for _ in range(2))
            self.out = nn.Linear(8, 20)
            self.hidden = [(torch.zeros(3, 8), torch.zeros(3, 8)) for _ in self.cells]

        def detach(self) -> None:
            self.hidden = [(h.detach(), c.detach()) for h, c in self.hidden]

        def forward(self, x: Any) -> Any:
            outputs = []
            for t in range(x.size(1)):
                value = self.embedding(x[:, t])
                for i, cell in enumerate(self.cells):
                    self.hidden[i] = cell(value, self.hidden[i])
                    value = self.hidden[i][0]
                outputs.append(self.out(value))
            return torch.stack(outputs, 1)

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())

    @wrap
    def train_step(x: Any, y: Any) -> Any:
        model.detach()
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    losses = [train_step(torch.randint(20, (3, 5)), torch.randint(20, (3, 5))) for _ in range(10)]
    return losses, model, model.hidden, optimizer
