"""The fake state of one capture: the user's own objects with fake tensors instead of real
ones.

The step's function runs unmodified on unmodified modules and optimizers, so what it touches must
hold fakes while it is traced. `FakeState` finds every state reference (see
`roam.state.references`), puts fakes there, and says after a trace what the step left in each.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn, cast

import torch

from roam.errors import CaptureError
from roam.program.effects import rebound
from roam.program.ir import Source, TensorMeta
from roam.state.arguments import Taker, argument_path
from roam.state.cached_results import keeps_objects
from roam.state.code_guards import Reliance
from roam.state.containers import FrozenSpace, TensorKeyedSpace
from roam.state.equality import MISSING, is_plain, pattern
from roam.state.freed_gradients import lacks
from roam.state.metadata import gradient_dtype, gradient_of, storage_of
from roam.state.nests import containers_in, pattern_of
from roam.state.policies import Policies, Policy
from roam.state.reach import Reach
from roam.state.references import (
    ArgumentReference,
    OptimizerReference,
    PlaceReference,
    StateReference,
    gradient_references,
    number_references,
    optimizer_references,
    rate_references,
    scaler_references,
)
from roam.state.spaces import Space
from roam.state.value_stand_ins import is_left_by_tokenizer, stand_in_for
from roam.state.wrappers import checked_form, inner, is_faked, is_wrapper, parts_of, with_parts
from roam.torch_compat.private import (
    DYNAMIC_INDICES,
    HOOKS,
    FakeTensor,
    FakeTensorMode,
    flat_weights_of,
    frame_evaluation,
    holds_mask,
    is_dtensor,
    is_of_dynamo,
    joined,
    layout_of,
    local_of,
    neg_view,
    parameters_of,
    set_flat_weights,
)
from roam.tracing.compiled.regions import Regions
from roam.tracing.cuda_estimate.absent import is_absent, prepare
from roam.tracing.distributed.fully_shard import check_sharded
from roam.tracing.fake_kernels.cache import FakeKernels, Remembered
from roam.tracing.fake_kernels.sized import SizedKernels
from roam.tracing.fake_kernels.sized import layout_of as sized_layout_of
from roam.tracing.fake_kernels.tensors import Maker
from roam.tracing.fakes.fake_identity import Identities
from roam.tracing.fakes.fake_mode import mode_of
from roam.tracing.fakes.gradient_history import Refuse, is_ended, with_history
from roam.tracing.fakes.own_classes import is_own_class
from roam.tracing.recording.recorder import Recorder

_UNCAPTURED = {
    torch.optim.LBFGS: (
        "it runs the model as often as the loss demands, and a plan has a fixed number of runs; "
        "compile the closure that you give to its step instead, with keep_grads=True, and let it "
        "zero gradients by model.zero_grad(), since it must not name the optimizer"
    ),
    torch.optim.SparseAdam: "it is for sparse gradients, whose sizes depend on data",
}
_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


class FakeState:
    """References to everything that the step can reach, and the fakes in them."""

    def __init__(
        self,
        reach: Reach,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        policies: Policies,
        *,
        taker: Taker,
        asks_kernels: bool,
        remembered: Remembered,
        reliance: Reliance,
        regions: Regions,
        layouts: dict[Any, Any],
        integers: Collection[int],
        lacking: Collection[str],
        sized: SizedKernels | None,
    ) -> None:
        """The fake state of a call.

        Args:
            reach, args, kwargs: what the step can get at, and its arguments.
            policies: of the places that the step changes; they may climb.
            taker: takes the arguments apart.
            asks_kernels: whether real kernels may be run for what fake ones do not know, if the
                step is of real tensors.
            remembered: what kernels made of fake tensors before.
            reliance: gets what the step relies on without holding it.
            regions: what is known of the compiled functions that the step calls.
            layouts: how results of operators on distributed tensors are placed; see
                `roam.tracing.distributed.dtensors.stand_ins`.
            integers: places of the integers among the flattened arguments that may be live.
            lacking: paths of the gradients that are not there if an earlier plan has freed them;
                all others are.
            sized: makes the fakes of arguments whose sizes follow from symbols; None if there are
                none.
        """
        self.reach, self.lacking = reach, lacking
        self.integers = integers
        self.layouts, self.regions, self.reliance = layouts, regions, reliance
        self.policies, self.taker = policies, taker
        self.optimizers: list[torch.optim.Optimizer] = [
            optimizer for _, optimizer in reach.optimizers
        ]
        self.taken = self.taker.take(args, kwargs)
        self.leaves = self.taken.leaves
        containers = containers_in((args, kwargs), self.taker.closed)
        if pattern_of(containers):
            raise CaptureError(
                "a list, dictionary or object is in two places of the step's arguments, and the "
                "trace would get two of them; pass a copy in one of the places, as in dict(batch)",
                code="wrapped_place",
            )
        parts = {id(one) for parts in self.taken.objects.values() for one in parts.objects}
        self.shares_parts = not parts.isdisjoint(map(id, containers))
        """Whether one of them is also in an object that is taken apart, where it stays the same."""
        paths = self.taken.paths(argument_path, args, kwargs)
        self.arguments = [ArgumentReference(index, path) for index, path in enumerate(paths)]
        self.places = list(_places(reach))
        """References whose tensors exist before any step: parameters, buffers, the user's own."""
        updated = {  # by optimizers, also by gradients that the step itself puts at `.grad`
            id(tensor)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for tensor in group["params"]
        }
        self._untied = [reference for reference in self.places if not reference.tied]
        self.parameters = [
            reference
            for reference in self._untied
            if _is_trained(tensor := reference.get()) or id(tensor) in updated
        ]
        """References to what may have a gradient and an optimizer's state from step to step."""
        rates = [
            reference
            for path, optimizer in reach.optimizers
            for reference in rate_references(optimizer, path)
        ]
        # An optimizer around another, such as SAM, has its groups.
        self.rates = list({reference.place(): reference for reference in reversed(rates)}.values())[
            ::-1
        ]
        self.numbers = list(number_references(reach, self.policies.places(Policy.COUNTED)))
        """References to the numbers that the step keeps and changes outside of optimizers' state;
        some may hold none yet.
        """
        self._check()
        tensors = [leaf for leaf in self.leaves if issubclass(type(leaf), torch.Tensor)]
        tensors += [reference.get() for reference in self.references()]
        self._historic = {
            id(tensor): reference.path
            for reference, tensor in (
                *zip(self.arguments, self.leaves, strict=True),
                *((reference, reference.get()) for reference in self.references()),
            )
            if issubclass(type(tensor), torch.Tensor) and tensor.grad_fn is not None
        }
        """By identity, the paths of the tensors that have a gradient history from before the step.
        """
        tensors = [part for tensor in tensors for part in parts_of(tensor)]
        self.lacks_device = any(is_absent(tensor.device) for tensor in tensors)
        """Whether the step is of fakes on a device that the machine does not have."""
        if self.lacks_device:
            prepare()
        self.refuse: Callable[..., NoReturn] = _refuse_nowhere
        """Refuses what the step does now, in the trace that runs."""
        self.mode: FakeTensorMode = mode_of(tensors)
        self.is_real = not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        """Whether the step is of real tensors."""
        self.kernels = FakeKernels(asks=asks_kernels and self.is_real, remembered=remembered)
        self.sized = sized
        if sized is not None:
            sized.enter(self.kernels, self.mode)
        self.maker = Maker()
        self.identities = Identities()
        self._caches = [
            (path, cache, cache.cache_info(), keeps_objects(cache)) for path, cache in reach.caches
        ]
        """(path, function, what its cache said, whether it kept objects) of functions with a cache.
        Fakes cannot be put in the places of tensors among these."""
        self._fakes: dict[int, tuple[Any, Any]] = {}
        self._numbers: dict[str, Any] = {
            reference.path: tensor
            for reference in self.references()
            if reference.kind != "parameter"
            and (
                (tensor := local_of(reference.get())).numel() == 1
                or isinstance(reference, PlaceReference)
            )
        }

    def number_of(self, reference: Any) -> Any:
        """What a reference holds when a plan begins, a tensor of one number or what is at a place:
        as it was found, or as the first step makes it.
        """
        number = self._numbers.get(reference.path, MISSING)
        return number() if callable(number) else number

    def note_numbers(self, recorder: Recorder) -> None:
        """Notes the numbers that a traced step makes for the next."""
        program = recorder.program
        for reference, slot in rebound(program):
            meta = program.slots[slot]
            if (
                meta is None
                or meta.shape
                or not isinstance(reference, OptimizerReference)
                or reference.path in self._numbers
            ):
                continue
            if (number := recorder.made_number(slot)) is not None:
                self._numbers[reference.path] = functools.cache(
                    functools.partial(_tensor, number, meta)
                )

    def references(self) -> Iterator[StateReference]:
        """Every reference that holds a tensor now, each tensor once, with state and gradients."""
        yield from self._untied
        yield from optimizer_references(self.reach, self.parameters)
        yield from scaler_references(self.reach)
        yield from gradient_references(self._untied)

    def enter(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Puts fakes in place of all real tensors, and returns the step's arguments with fakes. A
        `Snapshot` undoes it.
        """
        self.identities.enter()
        states = [(optimizer, list(optimizer.state.items())) for optimizer in self.optimizers]
        without = [
            tensor
            for reference in self._untied
            if lacks(tensor := reference.get()) and f"{reference.path}.grad" not in self.lacking
        ]
        # All places are read before any is written.
        references: list[StateReference] = [*self.places, *scaler_references(self.reach)]
        for reference, tensor in [(reference, reference.get()) for reference in references]:
            reference.set(self.fake_of(tensor))
        for parameter in without:
            self._add_gradient(parameter)
        for _, module in self.reach.modules:
            if isinstance(module, torch.nn.RNNBase):
                self._renew_weights(module)
        for place in self.reach.places:
            if isinstance(place.space, TensorKeyedSpace):
                place.space.exchange(self.fake_of)
            self._exchange_references(place.space)
        for tensor, fake in self._fakes.values():
            # What the user noted on a tensor was copied before the exchange.
            noted = tensor.__dict__.items()
            fake.__dict__.update({key: value for key, value in noted if _refers_to_tensor(value)})
        for optimizer, entries in states:
            others = {key: value for key, value in optimizer.state.items() if not _is_tensor(key)}
            optimizer.state.clear()
            for parameter, entry in entries:
                optimizer.state[self.fake_of(parameter)] = (
                    {key: self.fake_of(value) for key, value in entry.items()}
                    if _is_tensor(parameter)
                    else others[parameter]
                )
        encodings = {
            id(leaf): stand_in_for(leaf, self._refuse_encoding)
            for leaf in self.leaves
            if is_left_by_tokenizer(leaf)
        }
        leaves = [
            encodings[id(leaf)] if id(leaf) in encodings else self.fake_of(leaf)
            for leaf in self.leaves
        ]
        self.forget_values()
        return self.taken.put(leaves)

    def _refuse_encoding(self) -> None:
        self.refuse(
            "the step looks at what a tokenizer has left in a batch for each text, which is another object in each batch; "
            "look at it outside of the step",
            code="value_reached_python",
        )

    def classes_told(self) -> AbstractContextManager[None]:
        """A block in which the user's code sees the classes of the tensors that fakes stand for."""
        return self.identities.classes_told(self.globals_of_users())

    def globals_of_users(self) -> list[dict[str, Any]]:
        """The globals of the user's functions, and of the modules in which the classes of the
        step's modules are, and those of tensors of others' classes.
        """
        modules = {type(module).__module__ for _, module in self.reach.modules}
        modules |= {kind.__module__ for kind in self.identities.own_classes()}
        found = [
            vars(sys.modules[name])
            for name in modules
            if name in sys.modules and not name.startswith("torch.")
        ]
        return [*found, *self.reach.code.values()]

    def fakes(self) -> list[tuple[Any, Any]]:
        """Every tensor that has a fake, with its fake."""
        return list(self._fakes.values())

    def check_caches(self) -> None:
        """After the step: refuses it if it has asked a function with a cache that keeps objects,
        whether from before it or from now on.
        """
        for path, cache, before, kept_objects in self._caches:
            now = cache.cache_info()
            is_asked = (now.hits, now.misses) != (before.hits, before.misses)
            if is_asked and (kept_objects or keeps_objects(cache)):
                refuse(
                    path,
                    "keeps tensors or objects in its functools.lru_cache, which a plan would keep as "
                    "they are now; keep them as buffers or attributes, or leave out the cache",
                    code="moved",
                )

    def leave(self) -> None:
        """Drops the fakes. A fake and its gradient, which holds the recorder, hold each other in a
        way that Python's garbage collector cannot see.
        """
        for _, fake in self._fakes.values():
            if isinstance(fake, torch.Tensor):
                fake.grad = None
        self._fakes.clear()
        self.kernels.forget_fakes()
        self.maker.forget()
        if self.sized is not None:
            self.sized.forget_fakes()
        self.identities.leave()
        # This function holds the recorder of the last trace, which holds this fake state. Without
        # it both are freed at once, and with them everything of the trace.
        self.refuse = _refuse_nowhere

    def _renew_weights(self, layer: Any) -> None:
        """Renews what a recurrent layer keeps of its weights, with their fakes
        (`RecurrentSpace`).
        """
        held = {**layer.__dict__, **parameters_of(layer)}
        weights = [
            held.get(name, self.fake_of(old))
            for name, old in zip(*flat_weights_of(layer), strict=True)
        ]
        references = [None if weight is None else weakref.ref(weight) for weight in weights]
        set_flat_weights(layer, weights, references)

    def _exchange_references(self, space: Space) -> None:
        """Exchanges weak references to tensors, such as recurrent layers keep to their weights."""
        for key, value in space.items():
            if _refers_to_tensor(key) or (
                _refers_to_tensor(value) and not _is_exchanged(space, value)
            ):
                refuse(
                    space.label(key),
                    "refers weakly to a tensor; keep the tensor itself, in a list or as a key of an ordinary dictionary",
                    code="identity",
                )
            if _refers_to_tensor(value):
                space.set(key, weakref.ref(self.fake_of(weakref.ref.__call__(value))))

    def forget_values(self) -> None:
        """A fake made from a literal remembers its value, and `.item()` would answer with it for
        ever.
        """
        for reference in self.references():
            if issubclass(type(tensor := reference.get()), torch.Tensor):  # still
                for part in parts_of(tensor):
                    part.constant = None

    def state_elsewhere(self) -> tuple[Any, ...]:
        """What the optimizers' state holds for others than parameters."""
        return tuple(
            (key, tuple(entry.items()) if issubclass(type(entry), dict) else entry)
            for optimizer in self.optimizers
            for key, entry in optimizer.state.items()
            if not _is_tensor(key)
        )

    def tuples(self) -> list[FrozenSpace]:
        """The tuples and frozen sets that the step can reach."""
        return [place.space for place in self.reach.places if isinstance(place.space, FrozenSpace)]

    def fake_of(self, tensor: Any) -> Any:
        """The one fake for a tensor; views that share a storage get fakes that share one."""
        if not issubclass(type(tensor), torch.Tensor):
            return tensor
        if id(tensor) in self._fakes:
            return self._fakes[id(tensor)][1]
        path = self._historic.get(id(tensor))
        if path is None and is_faked(tensor):
            if self.sized is None or not isinstance(tensor, FakeTensor):
                return tensor
            resized = self.sized.argument(tensor, tensor)
            if resized is not tensor:
                self._fakes[id(tensor)] = tensor, resized
                self.identities.add(resized, tensor)
            return resized
        if not is_dtensor(tensor) and tensor.layout is not torch.strided:
            _refuse_layout(tensor, self._path_of(tensor))
        gradient = gradient_of(tensor)
        if path is not None:
            found = tensor.detach()
            found = with_history(
                found if isinstance(found, FakeTensor) else self.mode.from_tensor(found),
                self._refuse_history(path),
            )
        elif is_wrapper(tensor):
            found = with_parts(tensor, map(self.fake_of, parts_of(tensor)))
        elif is_dtensor(tensor):
            found = joined(
                self.fake_of(local_of(tensor)),
                layout_of(tensor),
                requires_grad=tensor.requires_grad,
            )
        else:
            tensor.grad = None  # faked apart, so that it too has one fake
            try:
                plain = self.maker.plain(self.mode, tensor)
                found = self.mode.from_tensor(tensor) if plain is None else plain
                if self.sized is not None:
                    found = self.sized.argument(tensor, found)
            finally:
                tensor.grad = gradient
        if tensor.is_leaf and found.is_leaf and tensor.grad_dtype != found.grad_dtype:
            found.grad_dtype = tensor.grad_dtype  # PyTorch 2.11 leaves it out of fakes
        if not is_wrapper(tensor):  # which has them already
            found.__dict__.update(
                tensor.__dict__
            )  # what the user noted on it, such as a scale of its own
        for name in HOOKS:
            if hooks := getattr(tensor, name):
                setattr(found, name, hooks)
        self._fakes[id(tensor)] = tensor, found
        self.identities.add(found, tensor)
        if gradient is not None:
            found.grad = self.fake_of(gradient)
        return found

    def _add_gradient(self, parameter: Any) -> None:
        """Gives the fake of a parameter a gradient, as eager PyTorch has, where there is none."""
        fake = self.fake_of(parameter)
        if fake.grad is not None:
            return
        local = local_of(fake)
        with self.mode:
            gradient = torch.empty_strided(
                local.shape,
                local.stride(),
                dtype=fake.grad_dtype or fake.dtype,
                device=local.device,
            )
        fake.grad = joined(gradient, layout_of(fake)) if is_dtensor(fake) else gradient

    def _path_of(self, tensor: torch.Tensor) -> str:
        """Where the step reaches a tensor, or the tensor whose gradient it is."""
        for slot in self.reach.slots:
            if slot.tensor is tensor:
                return slot.path
            if slot.tensor.is_leaf and slot.tensor.grad is tensor:
                return f"{slot.path}.grad"
        return "a tensor that the step reaches"

    def _refuse_history(self, path: str) -> Refuse:
        """Refuses that a backward pass of the step's goes on into the history of the tensor at a
        path.
        """

        def refuse(source: Source | None = None) -> NoReturn:
            self.refuse(
                f"{path} has a gradient history from before the step, and a backward pass of the "
                f"step would go on into it; detach {path} here, as in x.detach(), or calculate it "
                "in the step",
                code="outer_history",
                source=source,
            )

        return refuse

    def sharing(self) -> list[int]:
        """Which of the places and arguments hold one and the same tensor, or memory, as numbers
        that are the same for two states that share alike.
        """
        held = [*(reference.get() for reference in self.places), *map(self.fake_of, self.leaves)]
        tensors = [value for value in held if issubclass(type(value), torch.Tensor)]
        found = [*map(id, tensors), *map(storage_of, tensors)]
        return pattern(found)

    def has_histories(self) -> bool:
        """Whether any tensor has a gradient history from before the step."""
        return bool(self._historic) or any(
            reference.get().grad_fn is not None for reference in self.references()
        )

    def end_histories(self, before: dict[int, Any]) -> None:
        """To be called after a trace: ends the histories of what the step keeps, except for those
        that are there in the state that guards expect, with which the next trace begins.

        Args:
            before: for each place, what it held before the trace.
        """
        ended: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # places that hold one tensor still do afterwards
        for reference in self.places:
            tensor = reference.get()
            if (
                issubclass(type(tensor), torch.Tensor)
                and tensor.grad_fn is not None
                and tensor is not before[id(reference)]
            ):
                if self.sized is not None and sized_layout_of(tensor) is not None:
                    self.sized.symbols.refuse(
                        f"the step leaves a tensor at {reference.path} whose shape follows from sizes"
                    )
                if id(tensor) not in ended:
                    other = tensor.detach()
                    if before[id(reference)].grad_fn is not None:
                        other = with_history(other, self._refuse_history(reference.path))
                    ended[id(tensor)] = tensor, other
                reference.set(ended[id(tensor)][1])
                continue
            gradient = gradient_of(tensor)
            if gradient is not None and gradient.grad_fn is not None and not is_ended(gradient):
                # of backward(create_graph=True)
                tensor.grad = with_history(
                    gradient.detach(), self._refuse_history(f"{reference.path}.grad")
                )

    def part_from(self, arguments: Iterable[Any], before: Iterable[Any]) -> None:
        """To be called after a trace: gives what the step has kept of its arguments memory of its
        own, since the next call has other arguments.

        Args:
            arguments: the leaves of the traced call's arguments.
            before: the tensors that the state held before the trace. Memory that an argument shared
                with one of them is left alone.
        """
        storages = {_storage_of(tensor) for tensor in arguments}
        storages -= {_storage_of(tensor) for tensor in before}
        if not storages - {None}:
            return
        memory: dict[int, torch.Tensor] = {}
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        tied = [reference for reference in self.places if reference.tied]
        for reference in [*self.references(), *tied]:
            tensor = reference.get()
            if is_wrapper(tensor):
                if not storages.isdisjoint(map(_storage_of, parts_of(tensor))):
                    refuse(
                        reference.path,
                        "has memory of the step's arguments as an inner tensor after the step; copy what it keeps (.clone())",
                        code="subclass",
                    )
                continue
            storage = _storage_of(tensor)
            if storage is None or storage not in storages:
                continue
            if id(tensor) not in made:
                other = self._elsewhere(tensor, storage, memory, reference.path)
                made[id(tensor)] = tensor, other
            reference.set(made[id(tensor)][1])

    def _elsewhere(
        self, tensor: Any, storage: int, memory: dict[int, torch.Tensor], path: str
    ) -> Any:
        """A fake like another one, in other memory: for each storage in the same."""
        local = local_of(tensor)
        with self.mode, torch.no_grad():
            if storage not in memory:
                memory[storage] = torch.empty(
                    local.untyped_storage().nbytes(), dtype=torch.uint8, device=local.device
                )
            whole = memory[storage]
            whole = whole[: len(whole) // local.itemsize * local.itemsize].view(local.dtype)
            made = whole.as_strided(local.shape, local.stride(), local.storage_offset())
            if local.is_conj():
                made = made.conj()
            if local.is_neg():
                made = neg_view(made)
            if not local._is_view():
                made = made.data
        if is_dtensor(tensor):
            made = joined(made, layout_of(tensor), requires_grad=False)
        if tensor.grad_fn is not None:
            return with_history(made, self._refuse_history(path))
        made.requires_grad_(tensor.requires_grad)
        made.grad = tensor.grad
        return made

    def _check(self) -> None:
        """Refuses what the fakes could not stand for."""
        check_sharded(self.reach.modules)
        for path, module in self.reach.modules:
            if is_of_dynamo(type(module).__module__) and frame_evaluation() is None:
                refuse(
                    path,
                    "is wrapped by torch.compile, which cannot be captured with this version of PyTorch; pass the module itself",
                    code="compiled_module",
                )
            if isinstance(module, torch.nn.RNNBase) and any(
                p.device.type != "cpu" for p in module.parameters()
            ):
                refuse(
                    path,
                    f"is a {type(module).__name__} that is not on the CPU, and recurrent layers are "
                    "captured on the CPU only; run the model there, or use torch.compile(model, "
                    "backend='roam')",
                    code="recurrent_layer",
                )
            if isinstance(module, torch.jit.ScriptModule):
                refuse(
                    path, "is a TorchScript module; pass the Python module", code="script_module"
                )
        for place in self.places:
            if not place.space.takes_others:
                refuse(
                    place.path,
                    "is held where capture cannot put a fake tensor in its place; keep it in a list or as an attribute",
                    code="wrapped_place",
                )
        for reference in self.references():
            _check_tensor(reference.get(), reference.path)
        for leaf, argument in zip(self.leaves, self.arguments, strict=True):
            if issubclass(type(leaf), torch.Tensor) and not isinstance(leaf, torch.nn.Parameter):
                _check_tensor(leaf, argument.path)
                names = (
                    set()
                    if isinstance(leaf, FakeTensor) or is_wrapper(leaf)
                    else set(vars(leaf)) - {DYNAMIC_INDICES}
                )
                if names:
                    refuse(
                        argument.path,
                        "is marked for torch.compile (as by mark_dynamic), which is not captured; pass dynamic=True to "
                        "torch.compile instead" if any(name.startswith("_dynamo_") for name in names)
                        else ("has attributes of its own, which are not captured; keep their "
                             "values in a dictionary"),
                        code="tensor_attribute",
                    )  # fmt: skip
                if any(getattr(leaf, name) for name in HOOKS):
                    refuse(
                        argument.path,
                        "has hooks on its gradient; register them in the step, and remove them there",
                        code="argument_gradient",
                    )
        for path, optimizer in self.reach.optimizers:
            for kind, reason in _UNCAPTURED.items():
                if isinstance(optimizer, kind):
                    refuse(
                        path,
                        f"is {kind.__name__}, which is not captured: {reason}",
                        code="optimizer",
                    )
            for group in optimizer.param_groups:
                if group.get("differentiable"):
                    refuse(
                        path,
                        f"is {type(optimizer).__name__}(differentiable=True), whose update is part "
                        "of autograd's graph, which is not captured; leave differentiable out",
                        code="optimizer_form",
                    )
            for parameter, entry in optimizer.state.items():
                if not _is_tensor(parameter):
                    continue
                if not issubclass(type(entry), dict):
                    refuse(
                        path,
                        "keeps something else than a dictionary as a parameter's state; keep it in "
                        "a dictionary, as in self.state[p]['momentum']",
                        code="optimizer_state",
                    )
                if not all(
                    type(value) in (list, dict) or is_plain(value)
                    for value in entry.values()
                    if issubclass(type(value), (list, tuple, dict))
                ):
                    refuse(
                        path,
                        "keeps tensors in tuples in its state; keep them in lists",
                        code="nested_state",
                    )


def _is_tensor(value: object) -> bool:
    return issubclass(type(value), torch.Tensor)


def _storage_of(value: Any) -> int | None:
    """The storage of a strided tensor; None for anything else."""
    tensor = local_of(value)
    is_strided = issubclass(type(tensor), torch.Tensor) and tensor.layout is torch.strided
    return storage_of(tensor) if is_strided else None


def _refuse_nowhere(message: str, *, code: str) -> NoReturn:
    raise CaptureError(message, code=code)


def _tensor(number: Callable[[], Any], meta: TensorMeta) -> Any:
    value = number()
    device = "cpu" if is_absent(meta.device) else meta.device
    return MISSING if value is None else torch.tensor(value, dtype=meta.dtype, device=device)


def _refers_to_tensor(value: Any) -> bool:
    return issubclass(type(value), weakref.ref) and _is_tensor(weakref.ref.__call__(value))


def _is_exchanged(space: Space, reference: Any) -> bool:
    """Whether another weak reference can take the place of this one."""
    return (
        type(reference) is weakref.ref and space.takes_others and not isinstance(space, FrozenSpace)
    )


def _places(reach: Reach) -> Iterator[PlaceReference]:
    seen: set[int] = set()
    times: dict[str, int] = {}
    for slot in reach.slots:
        if slot.kind in ("argument", "state"):
            continue
        # Keys of dictionaries that have no text share a path.
        times[slot.path] = number = times.get(slot.path, 0) + 1
        path = slot.path if number == 1 else f"{slot.path} ({number})"
        kind = "parameter" if isinstance(slot.tensor, torch.nn.Parameter) else "buffer"
        yield PlaceReference(slot.space, slot.key, path, kind, id(slot.tensor) in seen)
        seen.add(id(slot.tensor))


def _is_trained(tensor: torch.Tensor) -> bool:
    """Whether a gradient may be computed for a tensor from before the step; it need not be called a
    parameter.
    """
    return isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


def _check_tensor(tensor: Any, path: str) -> None:
    if is_dtensor(tensor):
        _check_dtensor(tensor, path)
    elif is_wrapper(tensor):
        _check_wrapper(tensor, path)
    elif (kind := cast("Any", type(tensor))) not in _CLASSES and not is_own_class(kind):
        refuse(
            path,
            f"is a {type(tensor).__name__}; of tensor subclasses only those are captured that PyTorch "
            "can take apart (__tensor_flatten__, __tensor_unflatten__): use one, or plain tensors",
            code="subclass",
        )
    if tensor.layout is not torch.strided:
        _refuse_layout(tensor, path)
    if not is_faked(tensor) and any(
        issubclass(type(value), torch.Tensor)
        for name, value in vars(tensor).items()
        if not (is_wrapper(tensor) and name in dict(inner(tensor)))
    ):
        refuse(
            path,
            "has attributes that hold tensors; keep those elsewhere, for example as buffers, or, if "
            "its class moves them when the tensor is first used, use it once before the step",
            code="tensor_attribute",
            settles=1,
        )
    gradient = gradient_of(tensor)
    if gradient is not None and not (
        gradient.shape == tensor.shape and gradient_dtype(tensor) in (gradient.dtype, None)
    ):
        refuse(
            path,
            f"has a gradient of shape {tuple(gradient.shape)} and {gradient.dtype} from before it "
            "was given other data (p.data = x); set p.grad = None where that is done",
            code="gradient_form",
        )
    if tensor.grad_fn is not None and tensor.retains_grad:
        refuse(
            path,
            "has a gradient history from before the step and keeps its gradient, by retain_grad(); "
            "detach it",
            code="outer_history",
        )


def _refuse_layout(tensor: torch.Tensor, path: str) -> NoReturn:
    refuse(
        path,
        f"has layout {tensor.layout}; only strided tensors are captured: use dense tensors",
        code="layout",
    )


def _check_wrapper(tensor: Any, path: str) -> None:
    checked_form(tensor, path)
    if tensor.grad_fn is not None:
        refuse(
            path,
            f"is a {type(tensor).__name__} with a gradient history from before the step; detach it",
            code="outer_history",
        )
    if is_wrapper(gradient_of(tensor)):
        refuse(
            path,
            f"has a {type(tensor.grad).__name__} as its gradient from before the step; reset gradients at "
            "the end of the step",
            code="subclass",
        )


def _check_dtensor(tensor: Any, path: str) -> None:
    local = local_of(tensor)
    if type(local) not in (torch.Tensor, FakeTensor) or local.layout is not torch.strided:
        refuse(
            path,
            f"is a DTensor whose local part is a {type(local).__name__} of layout {local.layout}; make "
            "it of dense plain tensors",
            code="subclass",
        )
    if local.requires_grad:
        refuse(
            path,
            "is a DTensor whose local part requires a gradient itself; make it by DTensor.from_local "
            "or distribute_tensor",
            code="subclass",
        )
    if tensor.grad_fn is not None:
        refuse(
            path,
            "is a DTensor with a gradient history from before the step; detach it",
            code="outer_history",
        )
    if holds_mask(layout_of(tensor)):
        refuse(
            path,
            "is a DTensor whose placement holds a mask, like the result of an embedding whose rows "
            "are split; redistribute it before the step",
            code="subclass",
        )


def refuse(path: str, fault: str, *, code: str, settles: int = 0) -> NoReturn:
    """Refuses what the step reaches at `path`."""
    error = CaptureError(f"{path} {fault}", code=code)
    error.settles = settles
    error.path = path
    raise error
