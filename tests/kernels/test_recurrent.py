"""Recurrent layers train bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steps import images, same_by_plan, train
from training import tensors_and_numbers

functional = torch.nn.functional


def sequences(count: int = 3) -> list[torch.Tensor]:
    return images(count, 3, 2, 4)


class Recurrent(torch.nn.Module):
    """A recurrent layer of any kind between two linear ones."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(4, 4)
        self.layer = getattr(torch.nn, kind)(4, 6, **options)
        width = options.get("proj_size", 0) or 6
        self.leave = torch.nn.Linear(width * (2 if options.get("bidirectional") else 1), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result, state = self.layer(self.enter(x))
        last = state[0] if isinstance(state, tuple) else state
        return self.leave(result).square() + last.mean()


RECURRENT_FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layers_with_dropout": {"num_layers": 3, "dropout": 0.3},
    "bidirectional": {"bidirectional": True, "num_layers": 2},
    "batch_first": {"batch_first": True},
    "without_bias": {"bias": False},
    "double": {"dtype": torch.float64},
}


class TestRecurrentLayers:
    @pytest.mark.sweep
    @pytest.mark.parametrize("form", RECURRENT_FORMS)
    @pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
    def test_train(self, kind: str, form: str) -> None:
        options = RECURRENT_FORMS[form]
        dtype = options.get("dtype", torch.float32)
        batches = [x.to(dtype) for x in sequences()]
        same_by_plan(lambda wrap: train(Recurrent(kind, **options).to(dtype), wrap, batches))

    @pytest.mark.filterwarnings("ignore:LSTM with projections")
    def test_with_projections(self) -> None:
        same_by_plan(lambda wrap: train(Recurrent("LSTM", proj_size=3), wrap, sequences()))

    def test_with_rectifiers(self) -> None:
        same_by_plan(lambda wrap: train(Recurrent("RNN", nonlinearity="relu"), wrap, sequences()))

    @pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
    @pytest.mark.parametrize("is_packed_before", [True, False])
    def test_on_packed_sequences(self, kind: str, is_packed_before: bool) -> None:
        """How many rows a packed batch has at each step is data."""

        def script(wrap):
            torch.manual_seed(0)
            model = getattr(torch.nn, kind)(4, 6)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            pack = torch.nn.utils.rnn.pack_padded_sequence

            @wrap
            def step(x, lengths):
                optimizer.zero_grad()
                result, _ = model(x if is_packed_before else pack(x, lengths))
                loss = result.data.square().mean()
                loss.backward()
                optimizer.step()
                return loss

            losses = []
            for lengths in ([5, 4, 2], [5, 5, 1], [5, 4, 2]):
                x = torch.randn(5, 3, 4)
                losses.append(
                    step(pack(x, lengths) if is_packed_before else x, torch.tensor(lengths))
                )
            return tensors_and_numbers(losses, model.state_dict())

        same_by_plan(script)

    @pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
    def test_with_a_state_that_is_carried_from_batch_to_batch(self, kind: str) -> None:
        def script(wrap):
            model = Recurrent(kind)
            optimizer = torch.optim.AdamW(model.parameters())
            state = torch.zeros(1, 2, 6)
            state = (state, state.clone()) if kind == "LSTM" else state

            @wrap
            def step(model, optimizer, x, state):
                optimizer.zero_grad()
                result, state = model.layer(model.enter(x), state)
                loss = model.leave(result).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                return loss, tuple(s.detach() for s in state) if kind == "LSTM" else state.detach()

            losses = []
            for x in sequences(4):
                loss, state = step(model, optimizer, x, state)
                losses.append(loss)
            return [losses, state, model.state_dict(), optimizer.state_dict()]

        same_by_plan(script)

    def test_that_teach_without_gradients(self) -> None:
        """oneDNN runs another kernel then, in training mode too."""

        def script(wrap):
            teacher = Recurrent("LSTM")

            def loss_of(model, x):
                with torch.no_grad():
                    target = teacher(x)
                return (model(x) - target).square().mean()

            return train(Recurrent("LSTM"), wrap, sequences(), loss_of)

        same_by_plan(script)

    def test_that_are_frozen(self) -> None:
        def script(wrap):
            model = Recurrent("LSTM")
            model.layer.requires_grad_(False)
            return train(model, wrap, sequences())

        same_by_plan(script)

    def test_in_evaluation_mode(self) -> None:
        same_by_plan(
            lambda wrap: train(
                Recurrent("LSTM", num_layers=2, dropout=0.5).eval(), wrap, sequences()
            )
        )

    def test_under_autocast(self) -> None:
        def loss_of(model, x):
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float().square().mean()

        same_by_plan(lambda wrap: train(Recurrent("LSTM"), wrap, sequences(), loss_of))

    @pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
    def test_cells(self, kind: str) -> None:
        def loss_of(cell, x):
            state, losses = None, []
            for item in x:
                state = cell(item, state)
                losses.append((state[0] if kind == "LSTMCell" else state).square().mean())
            return torch.stack(losses).sum()

        same_by_plan(lambda wrap: train(getattr(torch.nn, kind)(4, 6), wrap, sequences(), loss_of))

    def test_of_the_size_that_people_train(self) -> None:
        def script(wrap):
            model = torch.nn.LSTM(32, 64, num_layers=2, dropout=0.2, batch_first=True)
            return train(
                model, wrap, images(2, 8, 35, 32), lambda model, x: model(x)[0].square().mean()
            )

        same_by_plan(script)
