"""Models built of fake tensors by constructors that read values of tensors that they have just made."""

from __future__ import annotations

import pytest
import torch
import torchvision

import roam


def test_numbers_that_a_constructor_reads_are_those_of_real_tensors() -> None:
    def read() -> list[object]:
        steps = torch.linspace(0, 0.3, 7)
        halves = steps[1::2]
        halves.mul_(0.5)
        table = torch.arange(12).view(3, 4).T.contiguous()
        return [
            steps.tolist(),
            [value.item() for value in steps.split(3)[0]],
            bool((table > 3).any()),
            int(table.sum()),
            torch.unique(table % 5).tolist(),
            torch.tensor([2, 3, 5]).cumsum(0).tolist(),
        ]

    expected = read()
    with roam.fake():
        assert read() == expected


def test_nothing_is_known_of_random_or_overwritten_tensors() -> None:
    with roam.fake():
        table = torch.zeros(4)
        view = table[1:]
        assert table.sum().item() == 0
        view.copy_(torch.rand(3))
        for tensor in (table, view, torch.randn(3), torch.empty(3)):
            with pytest.raises(Exception, match="_local_scalar_dense"):
                tensor.sum().item()


@pytest.mark.parametrize("name", ["swin_t", "convnext_tiny", "regnet_x_400mf", "vit_b_16"])
def test_models_with_values_in_their_constructors(name: str) -> None:
    with roam.fake():
        model = getattr(torchvision.models, name)()
    assert sum(parameter.numel() for parameter in model.parameters()) > 1_000_000
