"""Random generators during a trace: what a step does to their states becomes calls, or is refused.

Checkpointing reads PyTorch's generator state in the forward pass and sets it again for the
recomputation; `fork_rng` and `manual_seed` do the like. No operator shows this, so functions that
stand in for PyTorch's record it as calls of the plain Python functions, in the sequence of the
random operators. So the recomputed mask is the same mask. What they do not see shows in the
generators themselves: each random operator advances the state of its generator, as it would on real
tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from roam.program.ir import Program, Ref
from roam.state.trace_context import TraceContext
from roam.torch_compat.private import FakeTensorMode, c_pointer, disable_current_modes

_READ = (torch.random.get_rng_state, torch.cuda.random.get_rng_state)
_SET = (torch.random.set_rng_state, torch.cuda.random.set_rng_state)
_SEED = (torch.random.manual_seed, torch.cuda.random.manual_seed, torch.cuda.random.manual_seed_all)
_TOLD = (
    *(torch.random.seed, torch.random.initial_seed),
    *(torch.cuda.random.seed, torch.cuda.random.seed_all, torch.cuda.random.initial_seed),
)
"""What tells Python a seed."""


watched = threading.RLock()
"""Held while random generators are watched, and while a plan draws from them: other threads' draws
would be taken for the watched ones'."""


class Watch:
    """The states of the generators that a step may draw from, during one trace.

    A random operator on fake tensors draws nothing, so the watch draws in its place. If a generator
    is then in another state, it was seeded or set where the dispatcher does not see it.
    """

    def __init__(self, held: Iterable[torch.Generator]) -> None:
        """`held`: the generators that the step holds, in addition to PyTorch's own."""
        generators = [torch.default_generator, *held]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            generators += torch.cuda.default_generators
        self._now: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        with disable_current_modes():
            self._before = [(generator, generator.get_state()) for generator in generators]
        for generator in generators:
            # One that is new may be in the very state that the step seeds it to.
            self._draw(generator)

    def known(self, generator: torch.Generator) -> torch.Generator | None:
        """The user's own object for a generator, since every call of an operator wraps its
        generator anew. None if there is none.
        """
        entry = self._now.get(_identity(generator))
        return None if entry is None else entry[0]

    def draw(self, arguments: Iterable[Any]) -> None:
        """Moves on the generator that a random operator with these arguments draws from."""
        given = (value for value in arguments if isinstance(value, torch.Generator))
        self._draw(self._now[_identity(next(given, torch.default_generator))][0])

    def _draw(self, generator: torch.Generator) -> None:
        with disable_current_modes():
            torch.empty(1, device=generator.device).uniform_(generator=generator)
            self._now[_identity(generator)] = generator, generator.get_state()

    def is_intact(self) -> bool:
        """Whether nobody but `draw` has changed a state."""
        with disable_current_modes():
            return all(
                generator.get_state().equal(state) for generator, state in self._now.values()
            )

    def restore(self) -> None:
        """Puts all states back."""
        with disable_current_modes():
            for generator, state in self._before:
                generator.set_state(state)


def _identity(generator: torch.Generator) -> int:
    return int(c_pointer(generator))


def stand_ins(
    trace: TraceContext, mode: FakeTensorMode
) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(holder, name, function) for each function that acts on PyTorch's generators."""
    for function in (*_READ, *_SET, *_SEED, *_TOLD):
        module = torch.random if function.__module__ == torch.random.__name__ else torch.cuda.random
        if function in _READ:
            stand_in = _reading(trace, mode, function)
        elif function in _TOLD:
            stand_in = _refusing(trace)
        else:
            stand_in = _changing(trace, function)
        for holder in (module, torch if module is torch.random else torch.cuda):
            yield holder, function.__name__, stand_in


def _reading(
    trace: TraceContext, mode: FakeTensorMode, function: Callable[..., Any]
) -> Callable[..., Any]:
    def read(device: Any = "cuda") -> Any:
        arguments = _device(function, device)
        with disable_current_modes():
            state = mode.from_tensor(function(*arguments))
        trace.generator_call(function, arguments, state)
        return state

    return read


def _changing(trace: TraceContext, function: Callable[..., Any]) -> Callable[..., Any]:
    def change(value: Any, device: Any = "cuda") -> Any:
        if function in _SEED and type(value) is not int:
            trace.refuse(
                "the step seeds a random generator with something else than a constant integer; "
                "seed it outside of the step",
                code="generator_state",
            )
        trace.generator_call(function, (value, *_device(function, device)))
        return torch.default_generator if function is _SEED[0] else None

    return change


def _refusing(trace: TraceContext) -> Callable[..., Any]:
    def refuse(*_: object) -> None:
        trace.refuse(
            "the step asks for the seed of a random generator, which may be different at the "
            "next call; ask for it outside of the step",
            code="generator_state",
        )

    return refuse


def _device(function: Callable[..., Any], device: Any) -> tuple[Any, ...]:
    """The index of the device whose generator a function of CUDA's acts on now."""
    if function not in (*_READ, *_SET) or function.__module__ == torch.random.__name__:
        return ()
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return (torch.cuda.current_device() if device.index is None else device.index,)


def forget_idle_states(program: Program) -> None:
    """Lets go of states that are read and set again while nothing is drawn, as checkpoints without
    dropout do.
    """
    states = [call for call in program.calls if call.target in (*_READ, *_SET)]
    if any(call.random and call.target not in (*_READ, *_SET) for call in program.calls):
        return
    read = {slot for call in states for slot in call.outputs}
    if all(
        isinstance(call.args[0], Ref) and call.args[0].slot in read
        for call in states
        if call.target in _SET
    ):
        for call in states:
            call.random = False
