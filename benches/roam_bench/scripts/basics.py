"""PyTorch's own tutorials and examples."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import nn, optim

from roam_bench.scripts.registry import Wrap, script

functional = torch.nn.functional


@script("PyTorch tutorials: Training a classifier (60-minute blitz)")
def cifar_classifier(wrap: Wrap) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(3, 6, 5)
            self.pool = nn.MaxPool2d(2, 2)
            self.conv2 = nn.Conv2d(6, 16, 5)
            self.fc1 = nn.Linear(16 * 5 * 5, 120)
            self.fc2 = nn.Linear(120, 84)
            self.fc3 = nn.Linear(84, 10)

        def forward(self, x: Any) -> Any:
            x = self.pool(functional.relu(self.conv1(x)))
            x = self.pool(functional.relu(self.conv2(x)))
            x = torch.flatten(x, 1)
            x = functional.relu(self.fc1(x))
            x = functional.relu(self.fc2(x))
            return self.fc3(x)

    net = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(net.parameters(), lr=0.001, momentum=0.9)

    @wrap
    def train_step(inputs: Any, labels: Any) -> Any:
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    running_loss, history = 0.0, []
    for index in range(5):
        running_loss += train_step(torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))
        if index % 2 == 1:
            history.append(running_loss / 2)
            running_loss = 0.0
    return history, net, optimizer


@script("PyTorch tutorials: Quickstart")
def quickstart(wrap: Wrap) -> Any:
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(28 * 28, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    loss_fn = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    dataset = torch.utils.data.TensorDataset(
        torch.randn(22, 1, 28, 28), torch.randint(0, 10, (22,))
    )
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)

    @wrap
    def train_batch(x: Any, y: Any) -> Any:
        pred = model(x)
        loss = loss_fn(pred, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def test() -> tuple[float, float]:
        model.eval()
        test_loss, correct = 0.0, 0.0
        with torch.no_grad():
            for x, y in loader:
                pred = model(x)
                test_loss += loss_fn(pred, y).item()
                correct += (pred.argmax(1) == y).type(torch.float).sum().item()
        return test_loss, correct

    history = []
    for _ in range(2):
        model.train()
        for x, y in loader:
            history.append(train_batch(x, y).item())
        history.append(test())
    return history, model, optimizer


@script("PyTorch tutorials: Learning PyTorch with examples")
def polynomial(wrap: Wrap) -> Any:
    x = torch.linspace(-math.pi, math.pi, 200)
    y = torch.sin(x)
    xx = x.unsqueeze(-1).pow(torch.tensor([1, 2, 3]))
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0, 1))
    loss_fn = nn.MSELoss(reduction="sum")
    optimizer = optim.RMSprop(model.parameters(), lr=1e-3)

    @wrap
    def step() -> Any:
        loss = loss_fn(model(xx), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return [step().item() for _ in range(5)], model, optimizer


@script("PyTorch tutorials: Learning PyTorch with examples (tensors and autograd, update by hand)")
def polynomial_by_hand(wrap: Wrap) -> Any:
    x = torch.linspace(-math.pi, math.pi, 200)
    y = torch.sin(x)
    a, b, c, d = (torch.randn((), requires_grad=True) for _ in range(4))

    @wrap
    def step(learning_rate: float) -> Any:
        y_pred = a + b * x + c * x**2 + d * x**3
        loss = (y_pred - y).pow(2).sum()
        loss.backward()
        with torch.no_grad():
            for weight in (a, b, c, d):
                weight -= learning_rate * weight.grad
                weight.grad = None
        return loss

    return [step(1e-6).item() for _ in range(5)], [a, b, c, d]


@script("PyTorch tutorials: What is torch.nn really?")
def nn_tutorial(wrap: Wrap) -> Any:
    class Lambda(nn.Module):
        def __init__(self, func: Any) -> None:
            super().__init__()
            self.func = func

        def forward(self, x: Any) -> Any:
            return self.func(x)

    model = nn.Sequential(
        Lambda(lambda x: x.view(-1, 1, 28, 28)),
        nn.Conv2d(1, 16, kernel_size=3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 10, kernel_size=3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), Lambda(lambda x: x.view(x.size(0), -1)),
    )  # fmt: skip
    opt = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @wrap
    def loss_batch(model: Any, loss_func: Any, xb: Any, yb: Any, opt: Any) -> Any:
        loss = loss_func(model(xb), yb)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item(), len(xb)

    history = [
        loss_batch(
            model, functional.cross_entropy, torch.randn(n, 784), torch.randint(0, 10, (n,)), opt
        )
        for n in (8, 8, 8, 3)
    ]
    return history, model, opt


@script("PyTorch tutorials: NLP from scratch, classifying names with a character-level RNN")
def char_rnn_classifier(wrap: Wrap) -> Any:
    letters, categories, hidden_size = 26, 5, 16

    class RNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.i2h = nn.Linear(letters + hidden_size, hidden_size)
            self.i2o = nn.Linear(letters + hidden_size, categories)
            self.softmax = nn.LogSoftmax(dim=1)

        def forward(self, input: Any, hidden: Any) -> Any:
            combined = torch.cat((input, hidden), 1)
            return self.softmax(self.i2o(combined)), self.i2h(combined)

        def init_hidden(self) -> Any:
            return torch.zeros(1, hidden_size)

    rnn = RNN()
    criterion = nn.NLLLoss()

    @wrap
    def train(category: Any, line: Any) -> Any:
        hidden = rnn.init_hidden()
        rnn.zero_grad()
        for index in range(line.size()[0]):
            output, hidden = rnn(line[index], hidden)
        loss = criterion(output, category)
        loss.backward()
        for p in rnn.parameters():
            p.data.add_(p.grad.data, alpha=-0.005)
        return output, loss.item()

    history = []
    for length in (4, 6, 4, 5, 6):
        line = functional.one_hot(torch.randint(0, letters, (length, 1)), letters).float()
        history.append(train(torch.randint(0, categories, (1,)), line))
    return history, rnn


@script("PyTorch tutorials: NLP from scratch, generating names with a character-level RNN")
def char_rnn_generator(wrap: Wrap) -> Any:
    letters, hidden_size = 20, 16

    class RNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.i2h = nn.Linear(letters + hidden_size, hidden_size)
            self.i2o = nn.Linear(letters + hidden_size, letters)
            self.o2o = nn.Linear(hidden_size + letters, letters)
            self.dropout = nn.Dropout(0.1)

        def forward(self, input: Any, hidden: Any) -> Any:
            combined = torch.cat((input, hidden), 1)
            hidden = self.i2h(combined)
            output = self.o2o(torch.cat((hidden, self.i2o(combined)), 1))
            return functional.log_softmax(self.dropout(output), dim=1), hidden

    rnn = RNN()
    criterion = nn.NLLLoss()
    learning_rate = 0.0005

    @wrap
    def train(line: Any, target: Any) -> Any:
        target.unsqueeze_(-1)
        hidden = torch.zeros(1, hidden_size)
        rnn.zero_grad()
        loss = torch.tensor([0.0])
        for index in range(line.size(0)):
            output, hidden = rnn(line[index], hidden)
            loss += criterion(output, target[index])
        loss.backward()
        for p in rnn.parameters():
            p.data.add_(p.grad.data, alpha=-learning_rate)
        return output, loss.item() / line.size(0)

    history = []
    for length in (5, 5, 3, 5):
        line = functional.one_hot(torch.randint(0, letters, (length, 1)), letters).float()
        history.append(train(line, torch.randint(0, letters, (length,))))
    return history, rnn


@script(
    "PyTorch tutorials: NLP from scratch, translation with a sequence-to-sequence network and attention"
)
def seq2seq_translation(wrap: Wrap) -> Any:
    hidden_size, vocab, length = 16, 30, 6

    class EncoderRNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocab, hidden_size)
            self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)
            self.dropout = nn.Dropout(0.1)

        def forward(self, input: Any) -> Any:
            return self.gru(self.dropout(self.embedding(input)))

    class BahdanauAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.Wa = nn.Linear(hidden_size, hidden_size)
            self.Ua = nn.Linear(hidden_size, hidden_size)
            self.Va = nn.Linear(hidden_size, 1)

        def forward(self, query: Any, keys: Any) -> Any:
            scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
            scores = scores.squeeze(2).unsqueeze(1)
            weights = functional.softmax(scores, dim=-1)
            return torch.bmm(weights, keys), weights

    class AttnDecoderRNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocab, hidden_size)
            self.attention = BahdanauAttention()
            self.gru = nn.GRU(2 * hidden_size, hidden_size, batch_first=True)
            self.out = nn.Linear(hidden_size, vocab)
            self.dropout = nn.Dropout(0.1)

        def forward(
            self, encoder_outputs: Any, encoder_hidden: Any, target_tensor: Any = None
        ) -> Any:
            decoder_input = torch.empty(encoder_outputs.size(0), 1, dtype=torch.long).fill_(0)
            decoder_hidden = encoder_hidden
            decoder_outputs = []
            for index in range(length):
                output, decoder_hidden = self.forward_step(
                    decoder_input, decoder_hidden, encoder_outputs
                )
                decoder_outputs.append(output)
                if target_tensor is not None:
                    decoder_input = target_tensor[:, index].unsqueeze(1)
                else:
                    _, topi = output.topk(1)
                    decoder_input = topi.squeeze(-1).detach()
            return functional.log_softmax(torch.cat(decoder_outputs, dim=1), dim=-1)

        def forward_step(self, input: Any, hidden: Any, encoder_outputs: Any) -> Any:
            embedded = self.dropout(self.embedding(input))
            context, _ = self.attention(hidden.permute(1, 0, 2), encoder_outputs)
            output, hidden = self.gru(torch.cat((embedded, context), dim=2), hidden)
            return self.out(output), hidden

    encoder, decoder = EncoderRNN(), AttnDecoderRNN()
    encoder_optimizer = optim.Adam(encoder.parameters(), lr=0.001)
    decoder_optimizer = optim.Adam(decoder.parameters(), lr=0.001)
    criterion = nn.NLLLoss()

    @wrap
    def train_batch(input_tensor: Any, target_tensor: Any) -> Any:
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        encoder_outputs, encoder_hidden = encoder(input_tensor)
        decoder_outputs = decoder(encoder_outputs, encoder_hidden, target_tensor)
        loss = criterion(decoder_outputs.view(-1, decoder_outputs.size(-1)), target_tensor.view(-1))
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
        return loss.item()

    history = [
        train_batch(torch.randint(0, vocab, (3, length)), torch.randint(0, vocab, (3, length)))
        for _ in range(4)
    ]
    return history, encoder, decoder, encoder_optimizer, decoder_optimizer


@script("PyTorch tutorials: Chatbot (teacher forcing by chance, clipping, masked loss)")
def chatbot(wrap: Wrap) -> Any:
    hidden, vocab, length = 12, 20, 4
    embedding = nn.Embedding(vocab, hidden)
    encoder = nn.GRU(hidden, hidden, 1, bidirectional=True)
    decoder, out = nn.GRU(hidden, hidden, 1), nn.Linear(2 * hidden, vocab)
    modules = nn.ModuleList([embedding, encoder, decoder, out])
    optimizer = optim.Adam(modules.parameters(), lr=1e-3)

    def mask_nll(decoder_output: Any, target: Any, mask: Any) -> Any:
        cross_entropy = -torch.log(torch.gather(decoder_output, 1, target.view(-1, 1)).squeeze(1))
        return cross_entropy.masked_fill(~mask, 0.0).sum() / mask.sum()

    @wrap
    def train(source: Any, target: Any, mask: Any, use_teacher_forcing: bool) -> Any:
        optimizer.zero_grad()
        outputs, state = encoder(embedding(source))
        outputs = outputs[:, :, :hidden] + outputs[:, :, hidden:]
        state = state[:1].contiguous()
        word, loss = torch.zeros(1, source.size(1), dtype=torch.long), torch.zeros(())
        for index in range(length):
            rnn_output, state = decoder(embedding(word), state)
            energies = torch.sum(rnn_output * outputs, dim=2).t()
            weights = functional.softmax(energies, dim=1).unsqueeze(1)
            context = weights.bmm(outputs.transpose(0, 1)).squeeze(1)
            output = functional.softmax(out(torch.cat((rnn_output.squeeze(0), context), 1)), dim=1)
            if use_teacher_forcing:
                word = target[index].view(1, -1)
            else:
                _, topi = output.topk(1)
                word = topi.view(1, -1).detach()
            loss = loss + mask_nll(output, target[index], mask[index])
        loss.backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 50.0)
        optimizer.step()
        return loss

    history = []
    for _ in range(5):
        batch = (
            torch.randint(0, vocab, (5, 3)),
            torch.randint(0, vocab, (length, 3)),
            torch.rand(length, 3) > 0.2,
        )
        history.append(train(*batch, random.random() < 0.5).item())
    return history, modules, optimizer


@script("PyTorch examples: MNIST (StepLR, Adadelta, dropout)")
def mnist_example(wrap: Wrap) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(1, 8, 3, 1)
            self.conv2 = nn.Conv2d(8, 16, 3, 1)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
            self.fc1, self.fc2 = nn.Linear(16 * 5 * 5, 32), nn.Linear(32, 10)

        def forward(self, x: Any) -> Any:
            x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
            x = self.dropout1(functional.max_pool2d(x, 2))
            x = self.dropout2(functional.relu(self.fc1(torch.flatten(x, 1))))
            return functional.log_softmax(self.fc2(x), dim=1)

    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    @wrap
    def train_step(model: Any, data: Any, target: Any, optimizer: Any) -> Any:
        optimizer.zero_grad()
        output = model(data)
        loss = functional.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        return loss

    history = []
    for _ in range(2):
        model.train()
        for _ in range(3):
            history.append(
                train_step(
                    model, torch.randn(4, 1, 14, 14), torch.randint(0, 10, (4,)), optimizer
                ).item()
            )
        model.eval()
        with torch.no_grad():
            history.append(model(torch.randn(2, 1, 14, 14)).sum().item())
        scheduler.step()
    return history, model, optimizer, scheduler


@script("PyTorch examples: word language model (hidden state carried from batch to batch)")
def word_language_model(wrap: Wrap) -> Any:
    vocab, size = 30, 16

    class RNNModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.2)
            self.encoder = nn.Embedding(vocab, size)
            self.rnn = nn.LSTM(size, size, 2, dropout=0.2)
            self.decoder = nn.Linear(size, vocab)
            self.decoder.weight = self.encoder.weight

        def forward(self, input: Any, hidden: Any) -> Any:
            output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
            return functional.log_softmax(
                self.decoder(self.drop(output)).view(-1, vocab), dim=1
            ), hidden

    def repackage_hidden(h: Any) -> Any:
        return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)

    model = RNNModel()
    criterion = nn.NLLLoss()

    @wrap
    def train_step(data: Any, targets: Any, hidden: Any, lr: float) -> Any:
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        return loss.item(), hidden

    hidden, lr, history = (torch.zeros(2, 3, size), torch.zeros(2, 3, size)), 20.0, []
    for index in range(5):
        loss, hidden = train_step(
            torch.randint(0, vocab, (7, 3)), torch.randint(0, vocab, (21,)), hidden, lr
        )
        history.append(loss)
        if index == 3:
            lr /= 4.0
    return history, [h.detach() for h in hidden], model


@script("PyTorch tutorials: Language modeling with nn.Transformer")
def transformer_language_model(wrap: Wrap) -> Any:
    vocab, size, length = 40, 16, 9

    class PositionalEncoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.2)
            position = torch.arange(50).unsqueeze(1)
            div_term = torch.exp(torch.arange(0, size, 2) * (-math.log(10000.0) / size))
            pe = torch.zeros(50, 1, size)
            pe[:, 0, 0::2] = torch.sin(position * div_term)
            pe[:, 0, 1::2] = torch.cos(position * div_term)
            self.register_buffer("pe", pe)

        def forward(self, x: Any) -> Any:
            return self.dropout(x + self.pe[: x.size(0)])

    class TransformerModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_encoder = PositionalEncoding()
            self.transformer_encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(size, 2, 32, 0.2), 2
            )
            self.embedding = nn.Embedding(vocab, size)
            self.linear = nn.Linear(size, vocab)
            self.embedding.weight.data.uniform_(-0.1, 0.1)

        def forward(self, src: Any) -> Any:
            src = self.pos_encoder(self.embedding(src) * math.sqrt(size))
            mask = nn.Transformer.generate_square_subsequent_mask(len(src))
            return self.linear(self.transformer_encoder(src, mask))

    model = TransformerModel()
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=5.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1.0, gamma=0.95)

    @wrap
    def train_step(data: Any, targets: Any) -> Any:
        output = model(data)
        loss = criterion(output.view(-1, vocab), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.item()

    history = []
    for _ in range(2):
        for seq in (length, length, length - 3):
            history.append(
                train_step(torch.randint(0, vocab, (seq, 2)), torch.randint(0, vocab, (2 * seq,)))
            )
        scheduler.step()
    return history, model, optimizer, scheduler


@script("PyTorch examples: time sequence prediction (LSTM cells, sine waves)")
def time_sequence_prediction(wrap: Wrap) -> Any:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm1, self.lstm2, self.linear = (
                nn.LSTMCell(1, 9),
                nn.LSTMCell(9, 9),
                nn.Linear(9, 1),
            )

        def forward(self, input: Any, future: int = 0) -> Any:
            outputs = []
            h_t, c_t, h_t2, c_t2 = (
                torch.zeros(input.size(0), 9, dtype=torch.double) for _ in range(4)
            )
            for input_t in input.split(1, dim=1):
                h_t, c_t = self.lstm1(input_t, (h_t, c_t))
                h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
                output = self.linear(h_t2)
                outputs += [output]
            for _ in range(future):
                h_t, c_t = self.lstm1(output, (h_t, c_t))
                h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
                output = self.linear(h_t2)
                outputs += [output]
            return torch.cat(outputs, dim=1)

    seq = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = optim.Adam(seq.parameters(), lr=0.01)
    data = torch.sin(
        torch.arange(12, dtype=torch.double)[None] / 3 + torch.randn(4, 1, dtype=torch.double)
    )

    @wrap
    def step(input: Any, target: Any) -> Any:
        optimizer.zero_grad()
        loss = criterion(seq(input), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return [step(data[:, :-1], data[:, 1:]) for _ in range(4)], seq, optimizer


@script("PyTorch examples: super resolution (ESPCN)")
def super_resolution(wrap: Wrap) -> Any:
    class Net(nn.Module):
        def __init__(self, upscale_factor: int) -> None:
            super().__init__()
            self.relu = nn.ReLU()
            self.conv1 = nn.Conv2d(1, 16, (5, 5), (1, 1), (2, 2))
            self.conv2 = nn.Conv2d(16, 16, (3, 3), (1, 1), (1, 1))
            self.conv3 = nn.Conv2d(16, upscale_factor**2, (3, 3), (1, 1), (1, 1))
            self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
            for conv in (self.conv1, self.conv2):
                nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))

        def forward(self, x: Any) -> Any:
            return self.pixel_shuffle(self.conv3(self.relu(self.conv2(self.relu(self.conv1(x))))))

    model = Net(3)
    criterion = nn.MSELoss()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    epoch_loss = 0.0

    @wrap
    def train(batch: Any) -> Any:
        input, target = batch[0], batch[1]
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(4):
        epoch_loss += train([torch.rand(2, 1, 8, 8), torch.rand(2, 1, 24, 24)]).item()
    return epoch_loss, model, optimizer


@script("PyTorch tutorials: Spatial transformer networks")
def spatial_transformer(wrap: Wrap) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
            self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
            self.conv2_drop = nn.Dropout2d()
            self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)
            self.localization = nn.Sequential(
                nn.Conv2d(1, 8, kernel_size=7), nn.MaxPool2d(2, stride=2), nn.ReLU(True),
                nn.Conv2d(8, 10, kernel_size=5), nn.MaxPool2d(2, stride=2), nn.ReLU(True),
            )  # fmt: skip
            self.fc_loc = nn.Sequential(
                nn.Linear(10 * 3 * 3, 32), nn.ReLU(True), nn.Linear(32, 3 * 2)
            )
            self.fc_loc[2].weight.data.zero_()
            self.fc_loc[2].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))

        def forward(self, x: Any) -> Any:
            theta = self.fc_loc(self.localization(x).view(-1, 10 * 3 * 3)).view(-1, 2, 3)
            grid = functional.affine_grid(theta, x.size(), align_corners=False)
            x = functional.grid_sample(x, grid, align_corners=False)
            x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
            x = functional.relu(functional.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
            x = functional.relu(self.fc1(x.view(-1, 320)))
            x = functional.dropout(x, training=self.training)
            return functional.log_softmax(self.fc2(x), dim=1)

    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.01)

    @wrap
    def train(data: Any, target: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        return loss

    return (
        [train(torch.randn(3, 1, 28, 28), torch.randint(0, 10, (3,))) for _ in range(4)],
        model,
        optimizer,
    )


@script("PyTorch examples: siamese network on MNIST")
def siamese_example(wrap: Wrap) -> Any:
    class SiameseNetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
            )
            self.fc = nn.Sequential(nn.Linear(64, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))
            self.sigmoid = nn.Sigmoid()

        def forward_once(self, x: Any) -> Any:
            output = self.trunk(x)
            return output.view(output.size()[0], -1)

        def forward(self, input1: Any, input2: Any) -> Any:
            return self.sigmoid(
                self.fc(torch.cat((self.forward_once(input1), self.forward_once(input2)), 1))
            )

    model = SiameseNetwork()
    criterion = nn.BCELoss()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)

    @wrap
    def train(images_1: Any, images_2: Any, targets: Any) -> Any:
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    batches = [
        (torch.randn(4, 1, 12, 12), torch.randn(4, 1, 12, 12), torch.randint(0, 2, (4,)).float())
        for _ in range(4)
    ]
    return [train(*batch) for batch in batches], model, optimizer


@script("PyTorch examples: the forward-forward algorithm")
def forward_forward(wrap: Wrap) -> Any:
    class Layer(nn.Linear):
        def __init__(self, in_features: int, out_features: int) -> None:
            super().__init__(in_features, out_features)
            self.relu = nn.ReLU()
            self.opt = optim.Adam(self.parameters(), lr=0.03)
            self.threshold = 2.0

        def forward(self, x: Any) -> Any:
            x_direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
            return self.relu(torch.mm(x_direction, self.weight.T) + self.bias.unsqueeze(0))

        def train_once(self, x_pos: Any, x_neg: Any) -> Any:
            g_pos = self.forward(x_pos).pow(2).mean(1)
            g_neg = self.forward(x_neg).pow(2).mean(1)
            loss = torch.log(
                1 + torch.exp(torch.cat([-g_pos + self.threshold, g_neg - self.threshold]))
            ).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            return self.forward(x_pos).detach(), self.forward(x_neg).detach(), loss

    layers = nn.ModuleList([Layer(20, 16), Layer(16, 12)])

    @wrap
    def train(x_pos: Any, x_neg: Any) -> Any:
        losses = []
        for layer in layers:
            x_pos, x_neg, loss = layer.train_once(x_pos, x_neg)
            losses.append(loss)
        return losses

    return (
        [train(torch.rand(6, 20), torch.rand(6, 20)) for _ in range(4)],
        layers,
        [layer.opt for layer in layers],
    )


@script(
    "PyTorch examples: ImageNet (a step of the loop with AMP, meters and accuracy)", "torchvision"
)
def imagenet_example(wrap: Wrap) -> Any:
    import torchvision

    model = torchvision.models.resnet18(num_classes=7)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)

    def accuracy(output: Any, target: Any, topk: Any = (1,)) -> Any:
        with torch.no_grad():
            _, pred = output.topk(max(topk), 1, True, True)
            correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
            return [
                correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0))
                for k in topk
            ]

    @wrap
    def train(images: Any, target: Any) -> Any:
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item(), acc1[0].item(), acc5[0].item()

    history = []
    for _ in range(2):
        history += [train(torch.randn(2, 3, 40, 40), torch.randint(0, 7, (2,))) for _ in range(2)]
        scheduler.step()
    return history, model, optimizer, scheduler


@script("PyTorch tutorials: Transfer learning for computer vision (frozen trunk)", "torchvision")
def transfer_learning(wrap: Wrap) -> Any:
    import torchvision

    model = torchvision.models.resnet18(weights=None)
    for param in model.parameters():
        param.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, 2)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.fc.parameters(), lr=0.001, momentum=0.9)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)

    @wrap
    def run(inputs: Any, labels: Any, phase: str) -> Any:
        optimizer.zero_grad()
        with torch.set_grad_enabled(phase == "train"):
            outputs = model(inputs)
            _, preds = torch.max(outputs, 1)
            loss = criterion(outputs, labels)
            if phase == "train":
                loss.backward()
                optimizer.step()
        return loss.item() * inputs.size(0), torch.sum(preds == labels.data)

    history = []
    for _ in range(2):
        for phase in ("train", "val"):
            model.train(phase == "train")
            history.append(run(torch.randn(2, 3, 40, 40), torch.randint(0, 2, (2,)), phase))
            if phase == "train":
                scheduler.step()
    return history, model, optimizer, scheduler


@script("PyTorch recipes: automatic mixed precision (autocast and GradScaler)")
def amp_recipe(wrap: Wrap) -> Any:
    net = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    opt = optim.SGD(net.parameters(), lr=0.001)
    scaler = torch.amp.GradScaler("cpu")
    loss_fn = nn.MSELoss()

    @wrap
    def step(input: Any, target: Any) -> Any:
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=True):
            output = net(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss

    return [step(torch.randn(4, 16), torch.randn(4, 4)) for _ in range(4)], net, opt, scaler


@script("PyTorch documentation: torch.utils.checkpoint")
def gradient_checkpointing(wrap: Wrap) -> Any:
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    trunk = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    )
    head = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    params = [*trunk.parameters(), *head.parameters()]
    optimizer = optim.AdamW(params, lr=1e-3)

    @wrap
    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        hidden = checkpoint_sequential(trunk, 2, x, use_reentrant=False)
        loss = functional.cross_entropy(checkpoint(head, hidden, use_reentrant=False), y)
        loss.backward()
        optimizer.step()
        return loss

    return (
        [step(torch.randn(4, 16), torch.randint(0, 3, (4,))) for _ in range(4)],
        trunk,
        head,
        optimizer,
    )


@script("PyTorch tutorials: Saving memory by fusing the optimizer step into the backward pass")
def optimizer_in_backward(wrap: Wrap) -> Any:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )
    optimizer_dict = {p: optim.Adam([p], foreach=False) for p in model.parameters()}

    def optimizer_hook(parameter: Any) -> None:
        optimizer_dict[parameter].step()
        optimizer_dict[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(optimizer_hook)

    @wrap
    def train(x: Any) -> Any:
        loss = model(x).sum()
        loss.backward()
        return loss

    return [train(torch.rand(4, 8)) for _ in range(4)], model, list(optimizer_dict.values())


@script("PyTorch tutorials: Parametrizations")
def parametrizations(wrap: Wrap) -> Any:
    from torch.nn.utils import parametrize
    from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

    class Symmetric(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.triu() + x.triu(1).transpose(-1, -2)

    model = nn.Sequential(
        nn.Linear(6, 6),
        nn.Tanh(),
        orthogonal(nn.Linear(6, 6)),
        spectral_norm(nn.Linear(6, 6)),
        weight_norm(nn.Linear(6, 3)),
    )
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    optimizer = optim.Adam(model.parameters(), lr=0.01)

    @wrap
    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return [step(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(4)], model, optimizer


@script(
    "PyTorch tutorials: Pruning (one layer after the other, globally, a method of one's own, made permanent), fine-tuned between"
)
def pruning(wrap: Wrap) -> Any:
    from torch.nn.utils import prune

    class LeNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
            self.fc1, self.fc2, self.fc3 = (
                nn.Linear(16 * 5 * 5, 32),
                nn.Linear(32, 24),
                nn.Linear(24, 10),
            )

        def forward(self, x: Any) -> Any:
            x = functional.max_pool2d(functional.relu(self.conv1(x)), (2, 2))
            x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
            x = functional.relu(self.fc1(x.view(-1, int(x.nelement() / x.shape[0]))))
            return self.fc3(functional.relu(self.fc2(x)))

    class FooBarPruningMethod(prune.BasePruningMethod):  # type: ignore[misc]
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t: Any, default_mask: Any) -> Any:
            mask = default_mask.clone()
            mask.view(-1)[::2] = 0
            return mask

    model = LeNet()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    @wrap
    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def fine_tune() -> list[Any]:
        return [step(torch.randn(4, 1, 32, 32), torch.randint(0, 10, (4,))) for _ in range(2)]

    history = fine_tune()
    prune.random_unstructured(model.conv1, name="weight", amount=0.3)
    prune.l1_unstructured(model.conv1, name="bias", amount=3)
    history += fine_tune()
    prune.ln_structured(model.conv1, name="weight", amount=0.5, n=2, dim=0)
    history += fine_tune()
    prune.remove(model.conv1, "weight")
    parameters = [(module, "weight") for module in (model.conv2, model.fc1, model.fc2)]
    prune.global_unstructured(parameters, pruning_method=prune.L1Unstructured, amount=0.2)
    FooBarPruningMethod.apply(model.fc3, "bias")
    history += fine_tune()
    with torch.no_grad():
        history.append(model.eval()(torch.randn(4, 1, 32, 32)))
    model.train()
    history += fine_tune()
    for module, name in parameters:
        prune.remove(module, name)
    return history, model, optimizer


@script("PyTorch tutorials: Per-sample gradients (torch.func, differential privacy)")
def per_sample_gradients(wrap: Wrap) -> Any:
    from torch.func import functional_call, grad, vmap

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def compute_loss(params: Any, sample: Any, target: Any) -> Any:
        predictions = functional_call(model, params, (sample.unsqueeze(0),))
        return functional.cross_entropy(predictions, target.unsqueeze(0))

    @wrap
    def step(x: Any, y: Any) -> Any:
        params = {name: value.detach() for name, value in model.named_parameters()}
        grads = vmap(grad(compute_loss), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in grads.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, parameter in model.named_parameters():
            clipped = torch.einsum("n,n...->...", factor, grads[name])
            parameter.grad = (clipped + 0.1 * torch.randn_like(parameter)) / len(x)
        optimizer.step()
        optimizer.zero_grad()
        return norms

    return [step(torch.randn(5, 8), torch.randint(0, 3, (5,))) for _ in range(4)], model, optimizer


@script(
    "PyTorch tutorials: Hyperparameter tuning (validation split), here with early stopping and ReduceLROnPlateau"
)
def early_stopping(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = optim.Adam(model.parameters(), lr=0.05)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    x, y = torch.randn(16, 5), torch.randn(16, 1)

    @wrap
    def train(x: Any, y: Any) -> Any:
        model.train()
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    best, history, saved = math.inf, [], None
    for _ in range(6):
        history.append(train(x[:12], y[:12]))
        model.eval()
        with torch.no_grad():
            validation = functional.mse_loss(model(x[12:]), y[12:]).item()
        scheduler.step(validation)
        if validation < best:
            best, saved = (
                validation,
                {name: value.clone() for name, value in model.state_dict().items()},
            )
    assert saved is not None
    model.load_state_dict(saved)
    history.append(train(x[:12], y[:12]))
    return history, model, optimizer, scheduler.state_dict()
