"""What could tell a fake tensor from the real one in a step: the answer is eager's, or the step is
refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.weak import WeakIdKeyDictionary

import roam
from training import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
nn = torch.nn
Ask = Callable[[Any, torch.Tensor, torch.Tensor], Any]
"""Asks something about the user's things, a tensor of the batch and the loss."""


@dataclass(frozen=True)
class Named:
    """A key that has a tensor."""

    tensor: torch.Tensor
    name: str


def make(batch: torch.Tensor) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    weight = net[0].weight
    return SimpleNamespace(
        net=net,
        weight=weight,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        ids={id(weight), id(net[1].weight)},
        hashes=(hash(weight), hash((weight, 1))),
        factors={id(net[0].bias): 0.5},
        keyed={weight: 1},
        named={Named(weight, "first"): 1},
        referred=weakref.ref(weight),
    )


def run(ask: Ask, wrap: Callable[[Any], Any], prepare: Callable[[Any], None]) -> list[Any]:
    batch = torch.arange(12.0).reshape(3, 4)
    my = make(batch)
    prepare(my)

    def step(x: torch.Tensor) -> torch.Tensor:
        my.optimizer.zero_grad()
        loss = my.net(x).square().mean()
        loss.backward()
        answer = ask(my, x, loss)
        my.optimizer.step()
        return loss.detach() * (answer if isinstance(answer, torch.Tensor) else float(answer))

    step = wrap(step)
    return [*(step(batch) for _ in range(3)), *my.net.parameters()]


def nothing(my: Any) -> None:
    pass


def zero_where(is_meant: Callable[[Any, Any], bool]) -> Ask:
    def ask(my: Any, x: torch.Tensor, loss: torch.Tensor) -> int:
        meant = [p for p in my.net.parameters() if is_meant(my, p)]
        for parameter in meant:
            parameter.grad.zero_()
        return len(meant)

    return ask


def by_class(my: Any, x: Any, loss: Any) -> int:
    return sum(
        {torch.Tensor: 1, nn.Parameter: 10}[type(t)]
        for t in (x, loss, my.weight, x.new_ones(2), my.weight.grad)
    )


EQUAL: dict[str, Ask] = {
    "id in a set": zero_where(lambda my, p: id(p) in my.ids),
    "id as a key": zero_where(lambda my, p: my.factors.get(id(p), 0) > 0),
    "map of ids": lambda my, x, loss: sum(i in my.ids for i in map(id, my.net.parameters())),
    "ids of the step's own": lambda my, x, loss: len({id(t) for t in (loss, loss, my.weight, my.weight.grad.clone())}),
    "hash": zero_where(lambda my, p: hash(p) in my.hashes),
    "hash of a tuple": zero_where(lambda my, p: hash((p, 1)) in my.hashes),
    "called hash": zero_where(lambda my, p: p.__hash__() in my.hashes),
    "key": zero_where(lambda my, p: p in my.keyed),
    "key that has a tensor": zero_where(lambda my, p: Named(p, "first") in my.named),
    "keys that have tensors": zero_where(lambda my, p: any(key.tensor is p for key in my.named)),
    "set in the step": lambda my, x, loss: len({*my.net.parameters(), *my.net.parameters(), x, loss}),
    "state by parameter": lambda my, x, loss: len(my.optimizer.state[my.weight]) + 1,
    "is": zero_where(lambda my, p: p is my.weight),
    "in a list": zero_where(lambda my, p: any(p is other for other in [my.weight])),
    "weak reference": zero_where(lambda my, p: p is my.referred()),
    "type is Parameter": zero_where(lambda my, p: type(p) is nn.Parameter),
    "type is Tensor": lambda my, x, loss: type(x) is torch.Tensor and type(loss) is torch.Tensor,
    "type as a key": by_class,
    "type's name": lambda my, x, loss: len(type(x).__name__),
    "type of a class": lambda my, x, loss: type(nn.Linear) is type and isinstance(nn.Linear, type) and type([]) is list,
    "new class": lambda my, x, loss: type("Own", (list,), {"two": 2})().two,
    "called class": lambda my, x, loss: type(my.weight)(torch.ones(2)).sum() * 0 + 1,
    "__class__": lambda my, x, loss: (x.__class__ is torch.Tensor) + 2 * (my.weight.__class__ is nn.Parameter),
    "isinstance": lambda my, x, loss: isinstance(x, torch.Tensor) + 2 * isinstance(my.weight, nn.Parameter)
    + 4 * isinstance(loss, nn.Parameter) + 8 * isinstance(x, (int, list)) + 16 * isinstance(x, torch.FloatTensor),
    "typename": lambda my, x, loss: len(torch.typename(x)) + len(x.type()),
    "leaves": lambda my, x, loss: x.is_leaf + 2 * loss.is_leaf + 4 * my.weight.is_leaf + 8 * my.weight.grad.is_leaf,
    "views": lambda my, x, loss: (x._base is None) + 2 * x._is_view() + 4 * (x.view(-1)._base is x),
    "storage": lambda my, x, loss: x.untyped_storage().nbytes() + (type(x.untyped_storage()) is torch.UntypedStorage),
    "device": lambda my, x, loss: x.is_cpu + 2 * x.is_meta + 4 * (x.device.type == "cpu") + 8 * x.is_pinned(),
    "attribute": lambda my, x, loss: getattr(my.weight, "noted", 1) + hasattr(my.weight, "other"),
    "grad_fn": lambda my, x, loss: len(loss.grad_fn.name()),
    "same memory": lambda my, x, loss: x.is_set_to(x.view_as(x)) + 2 * x.is_set_to(x[1:]) + 4 * x.is_set_to(x.clone()),
}  # fmt: skip

REFUSED: dict[str, tuple[Ask, str]] = {
    "id of a buffer": (lambda my, x, loss: id(my.net[1].running_mean) in my.ids, "identity"),
    "id of an argument": (lambda my, x, loss: id(x) in my.ids, "identity"),
    "hash of an argument": (lambda my, x, loss: hash(x) in my.hashes, "identity"),
    "_version": (lambda my, x, loss: my.weight._version, "identity"),
    "_cdata": (lambda my, x, loss: x._cdata % 7, "identity"),
    "_cdata of a storage": (lambda my, x, loss: x.untyped_storage()._cdata % 7, "identity"),
    "device of a storage": (lambda my, x, loss: len(str(x.untyped_storage().device)), "identity"),
    "data_ptr": (lambda my, x, loss: x.data_ptr() % 7, "address"),
    "data_ptr of a storage": (lambda my, x, loss: x.untyped_storage().data_ptr() % 7, "address"),
    "deep copy": (lambda my, x, loss: copy.deepcopy(x).sum(), "pickled"),
    "deep copy of a parameter": (
        lambda my, x, loss: copy.deepcopy(my.weight).requires_grad,
        "pickled",
    ),
    "deep copy of a module": (lambda my, x, loss: copy.deepcopy(my.net)[0].weight.sum(), "pickled"),
    "__dict__": (lambda my, x, loss: len(x.__dict__), "identity"),
    "vars": (lambda my, x, loss: len(vars(x)), "identity"),
    "dir": (lambda my, x, loss: len(dir(x)), "identity"),
    "references": (lambda my, x, loss: sys.getrefcount(x), "identity"),
    "size": (lambda my, x, loss: sys.getsizeof(x), "identity"),
    "referrers": (lambda my, x, loss: len(gc.get_referrers(x)), "identity"),
    "referents": (lambda my, x, loss: len(gc.get_referents(x)), "identity"),
    "typed storage": (lambda my, x, loss: isinstance(x.storage(), torch.FloatStorage), "identity"),
    "fake mode": (lambda my, x, loss: torch._guards.detect_fake_mode([x]) is None, "identity"),
    "fake": (lambda my, x, loss: torch._subclasses.fake_tensor.is_fake(x), "identity"),
    "dispatch mode": (
        lambda my, x, loss: torch.utils._python_dispatch.is_in_torch_dispatch_mode(),
        "identity",
    ),
    "dispatch modes": (lambda my, x, loss: torch._C._len_torch_dispatch_stack(), "identity"),
    "dispatch keys": (lambda my, x, loss: len(str(torch._C._dispatch_keys(x))), "identity"),
    "pickle": (lambda my, x, loss: len(pickle.dumps(x)), "pickled"),
    "save": (lambda my, x, loss: torch.save(my.net.state_dict(), io.BytesIO()) or 1, "pickled"),
    "copy": (lambda my, x, loss: copy.copy(x).sum(), "pickled"),
    "deepcopy of a part": (lambda my, x, loss: copy.deepcopy(x[1:]).sum(), "pickled"),
    "deepcopy of other views": (lambda my, x, loss: len(copy.deepcopy([x, x.t()])), "pickled"),
    "deepcopy of no leaf": (lambda my, x, loss: copy.deepcopy(loss), "pickled"),
    "dlpack": (lambda my, x, loss: float(np.from_dlpack(x).sum()), "pickled"),
    "to_dlpack": (lambda my, x, loss: torch.utils.dlpack.to_dlpack(x) is not None, "pickled"),
    "numpy": (lambda my, x, loss: float(x.numpy().sum()), "value_reached_python"),
    "asarray": (lambda my, x, loss: float(np.asarray(x).sum()), "value_reached_python"),
    "values of a storage": (lambda my, x, loss: sum(x.untyped_storage().tolist()), "step_raised"),
    "tolist": (lambda my, x, loss: hash(sum(map(sum, x.tolist()))), "value_reached_python"),
    "item": (lambda my, x, loss: hash(loss.item()), "value_reached_python"),
    "repr": (lambda my, x, loss: len(repr(x)), "value_reached_python"),
    "text": (lambda my, x, loss: len(f"{loss}"), "value_reached_python"),
    "comparison": (lambda my, x, loss: int(loss.item() > 0), "value_reached_python"),
    "equal": (lambda my, x, loss: 2 * torch.equal(x, my.weight), "value_reached_python"),
    "allclose": (lambda my, x, loss: 4 * torch.allclose(loss, loss), "value_reached_python"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_eagers_answer(name: str) -> None:
    eager = run(EQUAL[name], lambda step: step, nothing)
    assert_same_bits(eager, run(EQUAL[name], roam.compile, nothing))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    ask, code = REFUSED[name]
    with pytest.raises(roam.CaptureError) as refusal:
        run(ask, roam.compile, nothing)
    assert refusal.value.code == code
    assert "test_fake_identity.py" in str(refusal.value)


def test_dictionaries_by_identity_are_refused() -> None:
    def prepare(my: Any) -> None:
        my.known = WeakIdKeyDictionary({my.weight: 1})

    with pytest.raises(roam.CaptureError, match="in an ordinary dictionary") as refusal:
        run(zero_where(lambda my, p: p in my.known), roam.compile, prepare)
    assert refusal.value.code == "identity"


HIDDEN: dict[str, tuple[Callable[[torch.Tensor], Any], Ask, str]] = {
    "tuple for a key": (
        lambda p: {(p, 1): 1},
        zero_where(lambda my, p: any(key[0] is p for key in my.hidden)),
        "wrapped_place",
    ),
    "reference for a key": (
        lambda p: {weakref.ref(p): 1},
        zero_where(lambda my, p: any(key() is p for key in my.hidden)),
        "identity",
    ),
    "reference in a tuple": (
        lambda p: (weakref.ref(p),),
        zero_where(lambda my, p: my.hidden[0]() is p),
        "identity",
    ),
    "WeakSet": (
        lambda p: weakref.WeakSet([p]),
        zero_where(lambda my, p: any(q is p for q in my.hidden)),
        "identity",
    ),
    "WeakKeyDictionary": (
        lambda p: weakref.WeakKeyDictionary({p: 1}),
        zero_where(lambda my, p: any(q is p for q in my.hidden)),
        "identity",
    ),
    "WeakValueDictionary": (
        lambda p: weakref.WeakValueDictionary({"first": p}),
        zero_where(lambda my, p: my.hidden["first"] is p),
        "identity",
    ),
}
"""What a fake cannot be put into, and a question that it would answer with no."""


@pytest.mark.parametrize("name", HIDDEN)
def test_what_no_fake_can_be_put_into_is_refused(name: str) -> None:
    hide, ask, code = HIDDEN[name]

    def prepare(my: Any) -> None:
        my.hidden = hide(my.weight)

    assert run(ask, lambda step: step, prepare)[0] != 0
    with pytest.raises(roam.CaptureError, match="hidden") as refusal:
        run(ask, roam.compile, prepare)
    assert refusal.value.code == code


def test_nothing_is_left_of_it() -> None:
    before = id, hash, vars, dir, torch.Tensor.__hash__, sys.getrefcount
    run(EQUAL["type as a key"], roam.compile, nothing)
    with pytest.raises(roam.CaptureError):
        run(REFUSED["vars"][0], roam.compile, nothing)
    assert (id, hash, vars, dir, torch.Tensor.__hash__, sys.getrefcount) == before
    assert "type" not in globals()
    fake = torch._subclasses.FakeTensor
    assert not {"__class__", "__dict__", "_version", "_cdata", "__reduce_ex__"} & set(vars(fake))
    with roam.fake("cpu"):
        made = torch.ones(2)
    assert made.__class__ is fake
    assert made.__dict__["fake_mode"] is not None
    assert hash(made) == id(made)


def test_another_tensor_in_a_parameters_place_is_asked_again() -> None:
    """The identity that an answer hung on is guarded."""

    def outcome(wrap: Callable[[Any], Any]) -> list[Any]:
        my = make(torch.ones(3, 4))

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = my.net(x).square().mean() * (2.0 if id(my.net[0].weight) in my.ids else 1.0)
            loss.backward()
            return loss.detach()

        step = wrap(step)
        found = [step(torch.ones(3, 4))]
        my.net[0].weight = nn.Parameter(my.weight.detach().clone())
        return [*found, step(torch.ones(3, 4)), my.net[0].weight.grad]

    assert_same_bits(
        outcome(lambda step: step), outcome(lambda step: roam.compile(step, keep_grads=True))
    )
