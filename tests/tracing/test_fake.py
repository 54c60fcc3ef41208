"""Models built of fake tensors by constructors that read values of tensors that they have just
made."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch._subclasses.fake_tensor import FakeTensor

import roam
from training import plain_step


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


@pytest.mark.filterwarnings("error")
def test_modules_that_are_copied() -> None:
    """As by `nn.TransformerEncoder`, and for a teacher."""

    def graph() -> Any:
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
        layer.linear1.weight.scale = 2.0  # type: ignore[assignment]
        encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        assert not hasattr(encoder.layers[1].linear1.weight, "scale")
        buffer = torch.ones(2)
        buffer.scale = 2.0  # type: ignore[attr-defined]
        assert copy.deepcopy(buffer).scale == 2.0  # type: ignore[attr-defined]
        tied = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
        )
        tied[2].weight = tied[0].weight  # type: ignore[union-attr]
        student = torch.nn.Sequential(encoder, tied)
        model = torch.nn.Sequential(student, copy.deepcopy(student).requires_grad_(False))
        model.append(copy.deepcopy(model[0][1]))  # type: ignore[index]
        x, y = torch.ones(3, 8), torch.zeros(3, dtype=torch.long)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False), x, y

    with roam.fake():
        made = graph()
    expected = roam.capture(plain_step, *graph()).structure_digest
    assert roam.capture(plain_step, *made).structure_digest == expected


LIBRARY = """
import torch
from functools import lru_cache
from torch.nn.init import _no_grad_trunc_normal_ as truncate

TABLE = torch.arange(4)
DEVICE, ABSENT = torch.get_default_device(), torch.cuda.amp.common.amp_definitely_not_available()

class Layer(torch.nn.Module):
    ROTATION = torch.ones(2)

    def forward(self, x, scale=torch.full((), 2.0)):
        return x * self.ROTATION * scale

@lru_cache
def table(size):
    return torch.arange(size)

if __name__ != "library_inside":
    import library_inside

    FIRST = table(3)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Imports a library of two modules for the first time."""
    for name in ("library_outside", "library_inside"):
        (tmp_path / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: import_module("library_outside")
    for name in ("library_outside", "library_inside"):
        sys.modules.pop(name, None)


def check_library(library: Any) -> None:
    """What a module holds is real, and what it found PyTorch to be is true."""
    for module in (library, library.library_inside):
        kept = [module.TABLE, module.Layer.ROTATION, module.Layer.forward.__defaults__[0]]
        assert not any(isinstance(tensor, FakeTensor) for tensor in kept)
        assert module.TABLE.tolist() == [0, 1, 2, 3]
        assert module.truncate is torch.nn.init._no_grad_trunc_normal_
        assert torch.get_default_device() == module.DEVICE
        assert torch.cuda.amp.common.amp_definitely_not_available() == module.ABSENT
    assert library.FIRST.tolist() == [0, 1, 2]
    assert library.Layer()(torch.ones(2)).tolist() == [2, 2]
    assert library.table(5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.sweep
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("how", ["to", "bfloat16", "to_both", "twice"])
def test_models_that_are_moved_and_cast(device: str, how: str) -> None:
    if device == "cuda" and torch.version.cuda is None:
        pytest.skip("this PyTorch was not built for CUDA")
    dtype = torch.float32 if how == "to" else torch.bfloat16
    convert = {
        "to": lambda model: model.to(device),
        "bfloat16": lambda model: model.bfloat16(),
        "to_both": lambda model: model.to(device, torch.bfloat16),
        "twice": lambda model: model.double().to(device).to(torch.bfloat16),
    }[how]

    def graph(make: Callable[[], Any]) -> Any:
        with roam.fake(device):
            model = make()
            model.head.weight = model.body.weight
            x, y = torch.ones(2, 4, dtype=dtype), torch.zeros(2, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return roam.capture(plain_step, model, optimizer, x, y)

    class Net(torch.nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.body = torch.nn.Linear(4, 4, **options)
            self.norm = torch.nn.BatchNorm1d(4, **options)
            self.head = torch.nn.Linear(4, 4, **options)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.body(x)))

    made = graph(lambda: Net(dtype=dtype))
    assert graph(lambda: convert(Net())).digest == made.digest


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_modules_imported_inside_are_real(device: str, library: Callable[[], Any]) -> None:
    if device == "cuda" and torch.version.cuda is None:
        pytest.skip("this PyTorch was not built for CUDA")
    with roam.fake(device):
        imported = library()
        imported.table(5)
        layer = torch.nn.Linear(3, 3)
        assert torch.nn.init._no_grad_trunc_normal_ is not imported.truncate
    assert isinstance(layer.weight, FakeTensor)
    check_library(imported)


def test_modules_that_a_step_imports_are_real(library: Callable[[], Any]) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        library()
        return plain_step(model, optimizer, x, torch.tensor([0, 1]))

    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    roam.capture(step, model, optimizer, torch.ones(2, 4))
    check_library(library())
