"""Steps with values that PyTorch refuses: where eager PyTorch raises an error, so does a plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree

import roam

Step = Callable[..., Any]
BAD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "negative": lambda t: (-t.abs() - 1).to(t.dtype),
    "nan": lambda t: torch.full_like(t, float("nan")),
    "inf": lambda t: torch.full_like(t, float("inf")),
    "large": lambda t: torch.full_like(t, 10_000),
}
"""What takes the place of a tensor among the arguments."""
OF_FLOATS = {"nan", "inf"}
OF_NUMBERS = {"negative", "large"}


def _spoiled(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    kept = set(BAD)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        kept -= OF_FLOATS
    if tensor.dtype in (torch.bool, torch.uint8, torch.int8):
        kept -= OF_NUMBERS
    return {name: make(tensor.detach()) for name, make in BAD.items() if name in kept}


def spoiled(tensors: list[torch.Tensor]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The tensors with bad values in one of them, and with bad values in all."""
    made = list(map(_spoiled, tensors))
    places = range(len(tensors))
    for chosen in [*([place] for place in places), *([list(places)] if len(tensors) > 1 else [])]:
        for name in BAD:
            if all(name in made[place] for place in chosen):
                yield (
                    f"{name} in {chosen}",
                    [made[p][name] if p in chosen else tensors[p] for p in places],
                )


class Trained:
    """A step that applies a function to tensors which depend on a parameter, so that no guard can
    know their values, and updates the parameter.
    """

    def __init__(
        self, function: Step, arguments: Any, *, trains: bool = True, drops: bool = False
    ) -> None:
        """`arguments`: (args, kwargs), in which tensors are those that a call brings; `drops`:
        whether nothing reads what the function makes."""
        self._leaves, self._spec = pytree.tree_flatten(arguments)
        self._function, self._trains, self._drops = function, trains, drops
        self.weight = torch.nn.Parameter(torch.ones(()))
        self._optimizer = torch.optim.SGD([self.weight], lr=0.01)

    @property
    def given(self) -> list[torch.Tensor]:
        return [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self._optimizer.zero_grad()
        brought = iter(tensors)
        leaves = [
            self._through(next(brought), leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in self._leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        made = [
            leaf
            for leaf in pytree.tree_leaves(self._function(*args, **kwargs))
            if isinstance(leaf, torch.Tensor)
        ]
        if self._drops:
            made = [self.weight * 2]
        trained = [result for result in made if result.requires_grad]
        if trained:
            torch.autograd.backward(trained, list(map(torch.ones_like, trained)))
        self._optimizer.step()
        return [result.detach() for result in made]

    def _through(self, tensor: torch.Tensor, is_trained: bool) -> torch.Tensor:
        weight = self.weight if is_trained and self._trains else self.weight.detach()
        if tensor.dtype is torch.bool:
            return tensor & (weight > 0)
        return tensor * (weight / weight.detach()).to(tensor.dtype)


def outcome(trained: Trained, step: Step, tensors: list[torch.Tensor]) -> Exception | None:
    """The error that a step raises for such tensors, if any."""
    torch.manual_seed(0)
    with torch.no_grad():
        trained.weight.fill_(1)
    try:
        step([tensor.detach().clone() for tensor in tensors])
    except Exception as error:  # noqa: BLE001 - which one is what is asked
        return error
    return None


def judged(function: Step, arguments: Any, *, drops: bool = False) -> list[str]:
    """What is wrong with a step by plan that is captured with good values and then gets bad ones:
    errors of eager PyTorch's that do not come, and errors after which the parameter has changed
    and that do not say so.
    """
    trained = Trained(function, arguments, drops=drops)
    good = trained.given
    if outcome(trained, trained, good) is not None:
        return []  # eager PyTorch does not take it so
    bad = [
        (name, tensors, error)
        for name, tensors in spoiled(good)
        if (error := outcome(trained, trained, tensors)) is not None
    ]
    if not bad:
        return []
    step = roam.compile(trained)
    for _ in range(2):
        if outcome(trained, step, good) is not None:
            return []  # refused
    wrong = []
    for name, tensors, error in bad:
        planned = outcome(trained, step, tensors)
        if planned is None or not isinstance(planned, (type(error), roam.RoamError)):
            wrong.append(f"{name}: {planned!r} for {error!r}")
        elif trained.weight.item() != 1 and getattr(planned, "code", "") != "torn":
            wrong.append(f"{name}: the parameter has changed before {planned!r}")
    return wrong


def samples(op: Any, dtype: torch.dtype, most: int) -> list[Any]:
    """Arguments with which PyTorch's own tests call an operator, as (args, kwargs)."""
    is_trained = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    found = [
        ((sample.input, *sample.args), sample.kwargs)
        for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=is_trained), 60)
    ]
    dense = [
        arguments
        for arguments in found
        if all(
            leaf.layout is torch.strided
            for leaf in pytree.tree_leaves(arguments)
            if isinstance(leaf, torch.Tensor)
        )
    ]
    return dense[:: max(1, -(-len(dense) // most))]


def error_inputs(op: Any) -> list[Any]:
    """Arguments that PyTorch's own tests expect an operator to refuse, as (args, kwargs)."""
    if op.error_inputs_func is None:
        return []
    return [
        ((error.sample_input.input, *error.sample_input.args), error.sample_input.kwargs)
        for error in op.error_inputs("cpu")
    ]


def without_elements(arguments: Any) -> Iterator[Any]:
    """The arguments with no elements in their tensors: in each alone, and in all, along the first
    dimension and along the last."""
    leaves, spec = pytree.tree_flatten(arguments)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    chosen = [*([place] for place in places), *([places] if len(places) > 1 else [])]
    for some, dim in itertools.product(chosen, (0, -1)):
        if all(leaves[place].dim() for place in some):
            yield pytree.tree_unflatten(
                [
                    leaf.detach().narrow(dim, 0, 0).clone().requires_grad_(leaf.requires_grad)
                    if place in some
                    else leaf
                    for place, leaf in enumerate(leaves)
                ],
                spec,
            )


def judged_at_first(function: Step, arguments: Any) -> str | None:
    """What is wrong with a step by plan at its first call and its second, if eager PyTorch takes
    the arguments or refuses them."""
    trained = Trained(function, arguments)
    results: list[Any] = []

    def step(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return trained(tensors)

    planned = roam.compile(trained)

    def done(step: Step) -> tuple[Any, float]:
        ended = outcome(trained, lambda tensors: results.append(step(tensors)), trained.given)
        return (results.pop() if ended is None else ended), trained.weight.item()

    expected, weight = done(step)
    for _ in range(2):
        found, left = done(planned)
        if isinstance(found, roam.RoamError) and (not isinstance(expected, Exception) or left == 1):
            return None  # refused
        if isinstance(expected, Exception):
            if not isinstance(found, type(expected)) or left != 1:
                return f"{found!r}, which leaves {left}, for {expected!r}"
        elif isinstance(found, Exception):
            return f"{found!r} for {expected!r}"
        elif not same_bits(expected, found) or (left != weight and weight == weight):
            return f"{found!r}, which leaves {left}, for {expected!r}, which leaves {weight}"
    return None


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether tensors are equal in kind, shape and bits."""
    return len(one) == len(other) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and _bytes_of(a) == _bytes_of(b)
        for a, b in zip(one, other, strict=True)
    )


def _bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(
        torch.empty(plain.numel(), dtype=plain.dtype)
        .copy_(plain.view(-1))
        .view(torch.uint8)
        .tolist()
    )
