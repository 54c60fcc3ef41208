"""Stands in for `DistributedDataParallel` while a step is traced: its hooks are in C++, on the real
parameters, and its messages would go to other processes.

What it does is recorded instead: the broadcast of buffers before a forward pass, and during the
backward pass the reduction of gradients, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch

from roam.distributed.collectives import Group, Launch, launch
from roam.distributed.ddp import (
    Buckets,
    buckets_of,
    buffers_of,
    offsets_of,
    parameters_of,
    unsupported,
    view_of,
)
from roam.errors import CaptureError
from roam.torch_compat.private import to_device, version_kept


class Recording(Protocol):
    """The part of a recorder that is needed here."""

    def refuse(self, message: str, *, code: str) -> NoReturn: ...
    def add_collective(
        self, target: Launch, outputs: Sequence[Any], inputs: Sequence[Any]
    ) -> None: ...


class Reductions:
    """The reducers of the modules that one trace calls."""

    def __init__(self, recorder: Recording, given_gradients: Callable[[Any], bool]) -> None:
        """`given_gradients`: whether a tensor is from before the step."""
        self._recorder = recorder
        self._is_given = given_gradients
        self._known: dict[int, _Reducer] = {}
        self._synced: dict[int, tuple[Any, bool]] = {}
        """Modules, and whether they synchronized in the last forward pass before the step."""
        self._depth = 0

    def forward(self, ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
        """What `DistributedDataParallel.forward` does."""
        if (reason := unsupported(ddp)) is not None:
            self._recorder.refuse(
                f"a DistributedDataParallel has an option that plans do not support: {reason}; "
                "leave it out, or pass the plain module and reduce the gradients in the step by "
                "torch.distributed.all_reduce",
                code="ddp_option",
            )
        is_synced = torch.is_grad_enabled() and ddp.require_backward_grad_sync
        buckets = buckets_of(ddp) if torch.is_grad_enabled() else None
        if is_synced:
            reducer = self._reducer(ddp, buckets)
        if ddp.will_sync_module_buffers():
            self._broadcast(ddp)
        if ddp.device_ids:
            inputs, kwargs = to_device(ddp, inputs, kwargs)
        output = ddp.module(*inputs, **kwargs)
        self._synced.setdefault(id(ddp), (ddp, ddp.require_forward_param_sync))
        ddp.require_forward_param_sync = is_synced
        if is_synced:
            reducer.expect()
        return output

    def _reducer(self, ddp: Any, buckets: Buckets | None) -> _Reducer:
        """The reducer of a module. If the module's first backward pass is still to come, the call
        is refused, and a later one can be captured.
        """
        if buckets is None:
            try:
                self._recorder.refuse(
                    "a DistributedDataParallel has not run a backward pass yet; only in the first "
                    "one does it find out in which buckets all later ones reduce gradients; run "
                    "the step once, which runs it eagerly",
                    code="ddp_first_step",
                )
            except CaptureError as refusal:
                refusal.settles = True
                raise
        parameters = parameters_of(ddp, buckets)
        if parameters is None:
            self._recorder.refuse(
                "the parameters of a DistributedDataParallel are not those that it was made with; "
                "freeze or replace parameters before it is made",
                code="ddp_option",
            )
        known = self._known.get(id(ddp))
        if known is None:
            known = self._known[id(ddp)] = _Reducer(self._recorder, ddp, parameters, buckets)
        return known

    def _broadcast(self, ddp: Any) -> None:
        """Replaces this rank's buffers by rank 0's."""
        target = launch("broadcast_", Group.of(ddp.process_group), "", 0)
        with torch.no_grad():
            for buffers in buffers_of(ddp):
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                self._recorder.add_collective(target, [flat], [])
                place = 0
                for buffer in buffers:
                    size = buffer.numel()
                    # As PyTorch's own broadcast, this is not a write that autograd knows of.
                    with version_kept(buffer):
                        buffer.copy_(flat.narrow(0, place, size).view(buffer.shape))
                    place += size

    def engine(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs autograd's engine with the reducers' hooks on the nodes that
        accumulate gradients. These hooks run after all hooks of the user.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            expecting = [one for one in self._known.values() if one.is_expecting]
            if self._depth or not expecting:
                return plain(*args, **kwargs)
            handles = [handle for one in expecting for handle in one.hooked(self._is_given)]
            self._depth += 1
            try:
                result = plain(*args, **kwargs)
            finally:
                self._depth -= 1
                for handle in handles:
                    handle.remove()
            for one in expecting:
                one.finish()
            return result

        return run

    @property
    def modules(self) -> list[Any]:
        """The modules whose gradients the step reduces."""
        return [one.module for one in self._known.values()]

    def taken_back(self) -> list[tuple[Any, bool]]:
        """For each module that the step ran, whether its last forward pass synchronized; the module
        itself says again what it said before the step.
        """
        found = [(ddp, ddp.require_forward_param_sync) for ddp, _ in self._synced.values()]
        for ddp, before in self._synced.values():
            ddp.require_forward_param_sync = before
        self._synced.clear()
        return found

    def check(self) -> None:
        """Refuses a step that leaves gradients of a module half reduced."""
        for one in self._known.values():
            one.check()


class _Reducer:
    """The reducer of one module."""

    def __init__(
        self, recorder: Recording, ddp: Any, parameters: list[Any], buckets: Buckets
    ) -> None:
        self._recorder, self.module = recorder, ddp
        self._target = launch("allreduce_", Group.of(ddp.process_group), "SUM")
        self._scale = 1.0 / self._target.group.size
        self._as_views = bool(ddp.gradient_as_bucket_view)
        self._parameters, self._buckets = parameters, buckets
        self._places = {
            place: (number, intra)
            for number, bucket in enumerate(buckets)
            for intra, place in enumerate(bucket)
        }
        self._offsets = [offsets_of(parameters, bucket) for bucket in buckets]
        self.is_expecting = False
        """Whether a forward pass has come since the last reduction."""
        self._begin()

    def _begin(self) -> None:
        self._ready: set[int] = set()
        self._flat: dict[int, Any] = {}
        self._next = 0

    def expect(self) -> None:
        """A forward pass has come whose gradients are to be reduced."""
        self.check()
        self.is_expecting = True
        self._begin()

    def check(self) -> None:
        """Refuses if some gradients have come and others have not."""
        if self._ready:
            missing = len(self._parameters) - len(self._ready)
            self._recorder.refuse(
                f"{missing} of {len(self._parameters)} parameters of a DistributedDataParallel get no "
                "gradient in a backward pass, so that their buckets would never be reduced; let the "
                "loss depend on all of them, or freeze the others before the module is made",
                code="ddp_unused",
            )

    def hooked(self, is_given: Callable[[Any], bool]) -> Iterator[Any]:
        """Hooks on all parameters, which see their gradients when these are complete."""
        for place, parameter in enumerate(self._parameters):
            if self._as_views and parameter.grad is not None and is_given(parameter.grad):
                # In eager PyTorch it may be a view of the bucket, and is then divided in place.
                self._recorder.refuse(
                    "a parameter has a gradient from before the step, which "
                    "gradient_as_bucket_view=True reduces in another way than plans do; set "
                    "gradients to None first, as optimizer.zero_grad() does",
                    code="ddp_option",
                )

            def ready(tensor: Any, place: int = place) -> None:
                self._mark(place)

            yield parameter.register_post_accumulate_grad_hook(ready)

    @torch.no_grad()
    def _mark(self, place: int) -> None:
        """Puts a gradient into its bucket, and launches the buckets whose turn it is."""
        if not self.is_expecting:
            return
        parameter = self._parameters[place]
        gradient = parameter.grad
        if gradient is None:
            self._recorder.refuse(
                "a hook takes away the gradient of a parameter of a DistributedDataParallel before "
                "the module reduces it, as one that steps an optimizer and sets gradients to None "
                "does; step the optimizer after the backward pass",
                code="ddp_unused",
            )
        if place in self._ready or gradient.requires_grad:
            what = (
                "comes twice in one backward pass"
                if place in self._ready
                else "has a history of its own (create_graph=True)"
            )
            self._recorder.refuse(
                f"the gradient of a parameter of a DistributedDataParallel {what}, and no plan "
                "reduces such a gradient as the module does; use checkpoints with "
                "use_reentrant=False, and backward passes without create_graph",
                code="ddp_unused",
            )
        self._ready.add(place)
        number, intra = self._places[place]
        if number not in self._flat:
            size = self._offsets[number][-1]
            self._flat[number] = torch.empty(size, dtype=gradient.dtype, device=gradient.device)
        view = self._view(place)
        torch.mul(gradient, self._scale, out=view)
        if self._as_views:
            parameter.grad = view
        while self._next < len(self._buckets) and self._ready.issuperset(self._buckets[self._next]):
            self._recorder.add_collective(self._target, [self._flat[self._next]], [])
            self._next += 1

    def _view(self, place: int) -> Any:
        number, intra = self._places[place]
        return view_of(self._flat[number], self._offsets[number][intra], self._parameters[place])

    @torch.no_grad()
    def finish(self) -> None:
        """To be called when the backward pass has ended: from now on the sums are the gradients."""
        if self._next < len(self._buckets):
            return
        if not self._as_views:
            for bucket in self._buckets:
                for place in bucket:
                    self._parameters[place].grad.copy_(self._view(place))
        self.is_expecting = False
        self._begin()
