"""Draws the same random numbers again, from a generator's state that was read before they were
drawn first.

On the CPU a state is that of the Mersenne Twister, with the normal sample that is left over from
the last pair, and kernels draw from it one number after another, on any number of threads. On CUDA
it is the seed and the offset of Philox, which, together with how a kernel is launched, decide every
number (`torch.cuda.get_rng_state`). Reading or setting one is refused while a CUDA graph is
recorded.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from roam.torch_compat.private import OpOverload, schema_of

GENERATOR = "generator"
"""The argument by which operators are given a generator."""


def generator_state(source: torch.Generator | torch.device) -> torch.Tensor:
    """The state of a generator, or of a device's own, as a new tensor of bytes on the CPU."""
    return generator_of(source).get_state()


def cpu_state() -> bytes:
    """The state of the CPU's own generator. It is no tensor, which would count as memory of the
    step for as long as it is kept.
    """
    return torch.default_generator.get_state().numpy().tobytes()


def state_bytes(source: torch.Generator | torch.device) -> int | None:
    """How large `generator_state` is; None if that is not known. No device is asked."""
    device = source.device if isinstance(source, torch.Generator) else source
    if device.type == "cuda":
        return 16  # seed and offset, 8 bytes each
    return torch.default_generator.get_state().numel() if device.type == "cpu" else None


def generator_of(source: torch.Generator | torch.device) -> torch.Generator:
    """A generator, or a device's own."""
    if isinstance(source, torch.Generator):
        return source
    if source.type == "cuda":
        return torch.cuda.default_generators[source.index]
    return torch.default_generator


@dataclass(frozen=True, slots=True)
class Replay:
    """A random operator that draws what it drew from a state, and leaves its generator alone.

    If the operator, or another overload of it, takes a generator, it is given a new one, so that
    what other threads draw meanwhile changes nothing. Otherwise the device's generator is set to
    the state during the call, and put back in any case.

    Attributes:
        operator: an operator of PyTorch's.
        device: where it draws.
    """

    operator: OpOverload
    device: torch.device

    def __call__(self, *args: Any, state: torch.Tensor, **kwargs: Any) -> Any:
        """The operator's result.

        Args:
            args, kwargs: the operator's arguments. A generator among them only says where the
                operator drew the first time, and is not used.
            state: what `generator_state` gave before that.
        """
        overload = with_generator(self.operator)
        if overload is not None:
            generator = torch.Generator(self.device)
            generator.set_state(state)
            return overload(*args, **{**kwargs, GENERATOR: generator})
        generator = generator_of(self.device)
        before = generator.get_state()
        generator.set_state(state)
        try:
            return self.operator(*args, **kwargs)
        finally:
            generator.set_state(before)


def replayed(
    operator: OpOverload, device: torch.device, *args: Any, state: torch.Tensor, **kwargs: Any
) -> Any:
    """`Replay` as one function, for nodes of FX graphs."""
    return Replay(operator, device)(*args, state=state, **kwargs)


@functools.cache
def with_generator(operator: OpOverload) -> OpOverload | None:
    """The operator, or the overload with the same arguments and a generator by its name; None if
    there is none.
    """
    wanted = _arguments(operator) | {(GENERATOR, "Optional[Generator]", True)}
    packet = operator.overloadpacket
    overloads = (operator, *(getattr(packet, name) for name in packet.overloads()))
    return next((one for one in overloads if _arguments(one) == wanted), None)


def _arguments(operator: OpOverload) -> set[tuple[str, str, bool]]:
    """(name, type, whether it is given by its name alone) of each argument."""
    return {(item.name, str(item.type), item.kwarg_only) for item in schema_of(operator).arguments}
