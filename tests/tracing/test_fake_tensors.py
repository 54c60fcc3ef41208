"""Fake tensors that capture makes itself, and what is known of those that are left."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import roam
from roam.state.cached_results import all_caches
from roam.tracing.fake_kernels.tensors import Maker, marked_fakes
from roam.tracing.fakes.fake_mode import new_mode
from roam.tracing.step import Known, capture_step


def seen(fake: Any) -> tuple[Any, ...]:
    """All that tells one fake tensor from another."""
    names = {name: value for name, value in vars(fake).items() if name != "fake_mode"}
    keys = torch._C._dispatch_keys(fake)
    return (
        *(
            type(fake),
            fake.shape,
            fake.stride(),
            fake.storage_offset(),
            fake.dtype,
            fake.device,
            fake.layout,
        ),
        *(
            fake.requires_grad,
            fake.is_leaf,
            fake.is_inference(),
            fake.untyped_storage().nbytes(),
            names,
        ),
        *(str(keys), id(fake.fake_mode)),
    )


DEVICES = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_a_quick_fake_is_an_ordinary_one(device: torch.device, dtype: torch.dtype) -> None:
    maker = Maker()
    modes = new_mode(), new_mode()
    layouts = [
        ((2, 3), (3, 1)),
        ((2, 3), (1, 2)),
        ((), ()),
        ((0, 4), (4, 1)),
        ((2, 3, 4, 4), (48, 1, 12, 3)),
    ]
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


def test_plain_tensors_have_the_fakes_that_pytorch_makes() -> None:
    memory = torch.zeros(8)
    tensors = {
        "parameter": torch.nn.Parameter(torch.zeros(2, 3)), "frozen": torch.nn.Parameter(torch.zeros(4), requires_grad=False),
        "plain": torch.zeros(3, 1, 2), "leaf": torch.zeros(3, requires_grad=True), "number": torch.tensor(1.0),
        "empty": torch.zeros(0, 2), "bytes": torch.zeros(3, dtype=torch.uint8), "complex": torch.zeros(2, dtype=torch.complex64),
    }  # fmt: skip
    for name, tensor in tensors.items():
        mode, maker = new_mode(), Maker()
        for _ in range(2):  # the second is made otherwise
            made = maker.plain(mode, tensor)
            assert seen(made) == (*seen(new_mode().from_tensor(tensor))[:-1], id(mode)), name
            assert isinstance(made, torch.nn.Parameter) is isinstance(tensor, torch.nn.Parameter)
    others = [
        *(
            memory,
            memory.view(2, 4),
            torch.zeros(4, 3).t(),
            torch.zeros(8)[2:],
            torch.nn.Buffer(torch.zeros(2)),
        ),
        *(
            torch.zeros(2, dtype=torch.complex64).conj(),
            torch.tensor(3),
            (torch.zeros(2, requires_grad=True) * 2),
        ),
        *(torch.zeros(1, 3).expand(2, 3), torch.zeros(2).to_sparse()),
    ]
    assert [Maker().plain(new_mode(), tensor) for tensor in others] == [None] * len(others)


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
def test_caches_are_searched_where_a_fake_is_left(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []
    module = importlib.import_module("roam.tracing.step")
    plain = module.clear_fakes
    monkeypatch.setattr(
        module, "clear_fakes", lambda caches: (searched.append(True), plain(caches))
    )
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
        with pytest.raises(roam.CaptureError) if keeps else contextlib.nullcontext():
            compiled(torch.ones(rows, 4))
        assert not isinstance(scale(4), FakeTensor)
        scale.cache_clear()
    assert bool(searched) is keeps


def test_new_caches_are_found_after_a_search() -> None:
    assert scale in all_caches()
    new = functools.lru_cache(lambda: None)
    assert {new, scale} <= set(all_caches())
    left = weakref.ref(new)
    del new
    assert left() is None
    assert scale in all_caches()
    newer = functools.lru_cache(lambda: None)
    assert newer in all_caches()


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.ones(2, 3, 4, 4),
    "channels last": lambda: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.ones(4, 4, 3, 2).permute(3, 2, 1, 0),
    "with an offset": lambda: torch.ones(3, 3, 4, 4)[1:],
    "in a larger storage": lambda: torch.ones(3, 3, 4, 4)[:2],
    "expanded": lambda: torch.ones(1, 3, 4, 4).expand(2, 3, 4, 4),
    "another dtype": lambda: torch.ones(2, 3, 4, 4, dtype=torch.float64),
    "half": lambda: torch.ones(2, 3, 4, 4, dtype=torch.bfloat16),
    "with a gradient": lambda: torch.ones(2, 3, 4, 4, requires_grad=True),
    "integers": lambda: torch.ones(2, 3, 4, 4, dtype=torch.int64),
    "conjugated": lambda: torch.ones(2, 3, 4, 4, dtype=torch.complex64).conj(),
    "complex": lambda: torch.ones(2, 3, 4, 4, dtype=torch.complex64),
    "another size": lambda: torch.ones(2, 3, 4, 5),
}


def made_of(x: torch.Tensor) -> list[torch.Tensor]:
    """Operators that look at layout, dtype, storage and history."""
    weight = torch.ones(3, 1, 1, dtype=x.dtype) * torch.ones(())
    scaled = x * weight
    results = [
        scaled,
        scaled.mul_(2),
        x.clone(),
        x.transpose(1, 2).resolve_conj(),
        x.sum(1),
        x.abs() + 1,
        x.flatten(1),
        x[1:].contiguous(),
    ]
    if x.requires_grad:
        results += torch.autograd.grad(scaled.square().sum(), x)
    return results


def test_results_are_remembered_for_what_kernels_see_and_nothing_else() -> None:
    """One memory serves captures of all of these in turn, each of which gives what it gives with a
    memory of its own."""

    def captured(x: torch.Tensor, known: Known | None) -> Any:
        program = capture_step(made_of, (x,), {}, known=known, asks_kernels=True).steady.program
        calls = [
            (call.name, call.args, call.kwargs, call.outputs, call.mutates)
            for call in program.calls
        ]
        return (
            calls,
            program.slots,
            [(s.size_bytes, s.creator) for s in program.storages],
            repr(program.result.histories),
        )

    known = Known()
    alone = {name: captured(make(), None) for name, make in LAYOUTS.items()}
    for name in (*LAYOUTS, *reversed(LAYOUTS)):
        assert captured(LAYOUTS[name](), known) == alone[name], name
    assert len(known.kernels.results) > 50


def test_nothing_is_remembered_under_other_settings() -> None:
    known, x = Known(), torch.ones(2, 3, 4, 4)
    kept = []
    for flips in (False, False, True):
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, benchmark=flips):
            capture_step(made_of, (x,), {}, known=known, asks_kernels=True)
        kept.append("of the first" in known.kernels.results)
        known.kernels.results["of the first"] = None
    assert kept == [False, True, False]
    dtypes = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            step = capture_step(
                lambda x: torch.div(x, 2),
                (torch.ones(2, dtype=torch.int64),),
                {},
                known=known,
                asks_kernels=True,
            )
        finally:
            torch.set_default_dtype(torch.float32)
        dtypes.append(step.steady.program.slots[-1].dtype)
    assert dtypes == [torch.float32, torch.float64]


def test_fake_kernels_of_others_are_asked_anew() -> None:
    with torch.library._scoped_library("roam_test_fakes", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        operator = torch.ops.roam_test_fakes.twice.default
        library.impl("twice", lambda x: torch.cat([x, x]), "CompositeExplicitAutograd")
        library.impl("twice", lambda x: x.new_empty(len(x)), "Meta", allow_override=True)
        known, x = Known(), torch.ones(3)
        sizes = []
        for rows in (1, 2):
            library.impl(
                "twice",
                lambda x, rows=rows: x.new_empty(rows * len(x)),
                "Meta",
                allow_override=True,
            )
            step = capture_step(lambda x: operator(x), (x,), {}, known=known, asks_kernels=True)
            sizes.append(step.steady.program.slots[-1].shape)
    assert sizes == [(3,), (6,)]
