"""Fake tensors that capture makes itself, and what is known of those that are left."""

from __future__ import annotations

import functools
import importlib
import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import roam
from roam.capture.fake import new_mode
from roam.capture.fakes import Maker, marked_fakes


def seen(fake: Any) -> tuple[Any, ...]:
    """All that tells one fake tensor from another."""
    names = {name: value for name, value in vars(fake).items() if name != "fake_mode"}
    keys = torch._C._dispatch_keys(fake)
    return (
        *(type(fake), fake.shape, fake.stride(), fake.storage_offset(), fake.dtype, fake.device, fake.layout),
        *(fake.requires_grad, fake.is_leaf, fake.is_inference(), fake.untyped_storage().nbytes(), names),
        *(str(keys), id(fake.fake_mode)),
    )


DEVICES = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_quick_fake_is_an_ordinary_one(device: torch.device, dtype: torch.dtype) -> None:
    maker = Maker()
    modes = new_mode(), new_mode()
    layouts = [((2, 3), (3, 1)), ((2, 3), (1, 2)), ((), ()), ((0, 4), (4, 1)), ((2, 3, 4, 4), (48, 1, 12, 3))]
    for mode, (shape, stride) in itertools.product((*modes, *modes), layouts):
        metas = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for _ in range(3)]
        ordinary = FakeTensor(mode, metas[0], device)
        for meta in metas[1:]:
            made = maker.make(mode, meta, device)
            assert seen(made) == seen(ordinary)
            assert made.untyped_storage()._cdata == meta.untyped_storage()._cdata
            with pytest.raises(RuntimeError), mode:
                made.numpy()
    fakes = [maker.make(modes[0], torch.empty(2, device="meta"), device) for _ in range(2)]
    fakes[0].note = 1
    assert not hasattr(fakes[1], "note")


def test_marks_tell_which_fakes_are_left() -> None:
    mode, maker = new_mode(), Maker()
    before = FakeTensor(mode, torch.empty(2, device="meta"), torch.device("cpu"))
    with marked_fakes() as are_left:
        gone = FakeTensor(mode, torch.empty(2, device="meta"), torch.device("cpu"))
        maker.make(mode, torch.empty(2, device="meta"), torch.device("cpu"))
        left = maker.make(mode, torch.empty(2, device="meta"), torch.device("cpu"))
    after = FakeTensor(mode, torch.empty(2, device="meta"), torch.device("cpu"))
    del gone
    maker.forget()
    assert are_left()
    del left
    assert not are_left()
    assert not any(hasattr(fake, "_roam_mark") for fake in (before, after))


@functools.lru_cache
def scale(size: int) -> torch.Tensor:
    return torch.full((size,), 0.5)


@pytest.mark.parametrize("keeps", [False, True])
def test_caches_are_searched_where_a_fake_is_left(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    module = importlib.import_module("roam.capture.step")
    plain = module.clear_fakes
    monkeypatch.setattr(module, "clear_fakes", lambda caches: (searched.append(True), plain(caches)))
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = scale if keeps else scale.__wrapped__
    scale.cache_clear()

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) * kept(4)).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = roam.compile(step)
    for rows in (2, 3):
        compiled(torch.ones(rows, 4))
        assert not isinstance(scale(4), FakeTensor)
        scale.cache_clear()
    assert bool(searched) is keeps
