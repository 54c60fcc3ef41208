"""Dictionaries with tensors for keys."""

from __future__ import annotations

import pytest
import torch

from newer import needs_2_15
from steps import Block, images, same_by_plan

functional = torch.nn.functional


class TestDictionariesWithTensorsForKeys:
    def test_are_looked_up_and_written_to(self) -> None:
        def script(wrap):
            model = Block()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            averages = {p: p.detach().clone() for p in model.parameters()}
            frozen = {model.first.bias: 0.0}

            @wrap
            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                for parameter in model.parameters():
                    if parameter in frozen:
                        parameter.grad.zero_()
                optimizer.step()
                with torch.no_grad():
                    for parameter, average in averages.items():
                        averages[parameter] = torch.lerp(average, parameter, 0.1)
                return loss

            return [[step(x) for x in images()], model.state_dict(), list(averages.values())]

        same_by_plan(script)

    def test_under_keys_without_a_text(self) -> None:
        def script(wrap):
            model = Block()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            seen = {module: torch.zeros(()) for module in (model.first, model.second)}

            @wrap
            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                seen[model.first] = seen[model.first] + loss.detach()
                return loss

            return [[step(x) for x in images()], list(seen.values())]

        same_by_plan(script)

    @pytest.mark.auto
    @needs_2_15
    def test_a_frozen_set_of_parameters(self) -> None:
        def script(wrap):
            model = Block()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            skipped = frozenset([model.first.bias])

            @wrap
            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                for parameter in model.parameters():
                    if parameter in skipped:
                        parameter.grad = None
                optimizer.step()
                return loss

            return [[step(x) for x in images()], list(model.parameters())]

        same_by_plan(script)
