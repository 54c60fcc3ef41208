"""`transformers.Trainer` and its subclasses, such as TRL's: every step by a plan."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from accelerate import DistributedType
from transformers import Trainer, TrainerCallback
from transformers.optimization import AdafactorSchedule
from transformers.training_args import OptimizerNames

import roam
from roam.errors import CaptureError
from roam.integrations.gradient_readers import is_overridden, may_read
from roam.integrations.versions import require
from roam.runtime import Step
from roam.torch_compat.private import is_dtensor

_METRICS = "_metrics"
"""TRL's name for what its trainers collect for their logs, by mode; there is no public one."""
_BEFORE_UPDATE = "on_pre_optimizer_step"
"""The event between the backward pass and the update, which are one step here."""
_AFTER_UPDATE = "on_optimizer_step"
"""The event between the update and the zeroing of gradients."""
_AROUND_UPDATE = (
    *("_inner_training_loop", "_run_epoch", "_clip_grad_norm", "_get_grad_norm"),
    *("_has_mixed_mesh_grads", "_mixed_mesh_grad_norm"),
)
"""Methods of the Trainer whose part around the update is in the step here, as transformers has
them; there are no public names.
"""


_REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Where every process has the whole model, in a `DistributedDataParallel` if there are several."""


def compile(trainer: Trainer, *, keep_grads: bool | None = None, **options: Any) -> Step:
    """Makes a trainer run its steps by plans: forward, backward, clipping and update as one.

    `Trainer.train` works as before, with its schedule, logs, evaluation, checkpoints and resuming.
    With gradient accumulation each micro-batch is a call of the step, and the last call updates.

    Args:
        trainer: a `transformers.Trainer`, or an object of any subclass.
        keep_grads: as in `roam.compile`, up to where the Trainer zeroes gradients. None keeps them
            if code that may read them runs before: a callback's ``on_optimizer_step``, or a
            schedule that is not PyTorch's or transformers' own, or that reads them, as
            `AdafactorSchedule` does.
        options: the others of `roam.compile`.

    Returns:
        The compiled step, for `Step.memory` and the like.

    Raises:
        CaptureError: roam does not know this major version of transformers or TRL
            (``library_version``). Raised in `train`: the step cannot be captured; a callback or a
            method of the trainer's class runs between the backward pass and the update
            (``trainer_hook``); or training is on several devices in another way than by
            `DistributedDataParallel` or FSDP2, or FSDP2 leaves gradients of a micro-batch to be
            reduced later (``trainer_devices``).
    """
    require("transformers", 5)
    if hasattr(trainer, _METRICS):
        require("trl", 1)
    training_step = trainer.training_step
    keeps = bool(keep_grads)
    put_back: Callable[[], None] = _nothing

    def whole_step(
        model: Any, inputs: Any, num_items_in_batch: Any, is_first: bool, keeps: bool
    ) -> tuple[Any, Any, Any]:
        if is_first:
            model.zero_grad()  # the trainer did so after the last update
        with _NewMetrics(trainer) as metrics:
            loss = training_step(model, inputs, num_items_in_batch)
        if not trainer.accelerator.sync_gradients:
            return loss, None, metrics.found
        limit = trainer.args.max_grad_norm
        norm = trainer.accelerator.clip_grad_norm_(
            model.parameters(), limit if limit > 0 else math.inf
        )
        trainer.optimizer.step()
        if not keeps:
            model.zero_grad()
        return loss, norm, metrics.found

    step = roam.compile(whole_step, keep_grads=True, **options)

    def planned_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        nonlocal keeps, put_back
        put_back()  # if the last run was interrupted within its update
        _check(trainer)
        if trainer.accelerator.is_fsdp2:
            _reshard(model)
        keeps = keeps or (keep_grads is None and _may_read_gradients(trainer))
        is_first = keeps and all(item.grad is None for item in model.parameters())
        loss, norm, metrics = step(model, inputs, num_items_in_batch, is_first, keeps)
        for name, (is_added, values) in metrics.items():
            kept = getattr(trainer, _METRICS)["train"]
            kept[name] = kept[name] + values if is_added else values
        if trainer.accelerator.sync_gradients:
            put_back = _is_updated(trainer, norm)
        return loss

    trainer.training_step = planned_step
    return step


class _Added(list[Any]):
    """What a step adds to a list of metrics; a list of another class replaces it."""


class _NewMetrics:
    """TRL's trainers append to lists of metrics as they calculate the loss: lists of the step's
    own while it runs.

    Attributes:
        found: by name, whether the step has added to the metric, and the values.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.found: dict[str, tuple[bool, list[Any]]] = {}

    def __enter__(self) -> _NewMetrics:
        self.kept = getattr(self.trainer, _METRICS, None)
        if self.kept is not None:
            new: dict[str, Any] = {mode: defaultdict(_Added) for mode in self.kept}
            setattr(self.trainer, _METRICS, new)
        return self

    def __exit__(self, *_: object) -> None:
        if self.kept is not None:
            self.found = {
                name: (isinstance(values, _Added), list(values))
                for name, values in getattr(self.trainer, _METRICS)["train"].items()
            }
            setattr(self.trainer, _METRICS, self.kept)


def _check(trainer: Trainer) -> None:
    if (other := _other_way(trainer)) is not None:
        raise CaptureError(
            f"this Trainer trains by {other}; roam plans its steps on one device, or on several processes by "
            "DistributedDataParallel or FSDP2. Run one process that sees one device (CUDA_VISIBLE_DEVICES=0), or torchrun with "
            'fsdp_config={"version": 2} or without fsdp=, and without deepspeed= and parallelism_config=; or train without roam',
            code="trainer_devices",
        )
    if (
        trainer.accelerator.is_fsdp2
        and trainer.args.gradient_accumulation_steps > 1
        and not trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    ):
        raise CaptureError(
            "with FSDP2 this Trainer reduces gradients after the last micro-batch only, and each micro-batch is a step of its own "
            "here, which has to reduce its gradients. Pass accelerator_config="
            '{"gradient_accumulation_kwargs": {"sync_each_batch": True}}, or train without roam',
            code="trainer_devices",
        )
    if trainer.args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
        raise CaptureError(
            f"optim={trainer.args.optim.value!r} updates parameters in the backward pass, and a plan does not. Use another "
            "optimizer, or train without roam",
            code="trainer_hook",
        )
    if trainer.args.torch_empty_cache_steps is not None:
        raise CaptureError(
            "torch_empty_cache_steps frees PyTorch's cache in the middle of the step, which a plan runs as one. Leave it out: "
            'memory="auto" of roam.compile keeps the step within what the device has',
            code="trainer_hook",
        )
    held = [(one, TrainerCallback, _BEFORE_UPDATE) for one in trainer.callback_handler.callbacks]
    held += [(trainer, Trainer, name) for name in _AROUND_UPDATE]
    for holder, base, name in held:
        if is_overridden(holder, base, name):
            kind = type(holder).__name__
            raise CaptureError(
                f"{kind}.{name} runs between the backward pass and the end of the update, which a "
                "plan runs as one. Use on_optimizer_step or on_step_end, or hooks of the parameters (Tensor.register_hook) for "
                "what it does to gradients; or train without roam",
                code="trainer_hook",
            )


def _other_way(trainer: Trainer) -> str | None:
    """What a trainer uses several devices by, if plans do not follow it; None if they do."""
    kind = trainer.accelerator.distributed_type
    is_fsdp2 = trainer.accelerator.is_fsdp2
    if trainer.args.n_gpu > 1:
        return "several devices of one process"
    if kind not in _REPLICATED and not is_fsdp2:
        return str(kind.value)
    if trainer.is_distributed_loading_by_transformers or (
        not is_fsdp2 and any(is_dtensor(item) for item in trainer.model.parameters())
    ):
        return "tensors that transformers has sharded"
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and (
        parallel.non_data_parallel_size > 1 or (parallel.dp_shard_enabled and not is_fsdp2)
    ):
        return type(parallel).__name__
    return None


def _reshard(model: Any) -> None:
    """Frees what an evaluation has left gathered, which no step may begin with."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _may_read_gradients(trainer: Trainer) -> bool:
    """Whether code that may read gradients runs between the update and their zeroing."""
    return (
        isinstance(trainer.lr_scheduler, AdafactorSchedule)
        or may_read(
            trainer.lr_scheduler, ("transformers.optimization", "transformers.trainer_pt_utils")
        )
        or is_overridden(trainer, Trainer, "_get_learning_rate")
        or any(
            is_overridden(one, TrainerCallback, _AFTER_UPDATE)
            for one in trainer.callback_handler.callbacks
        )
    )


def _nothing() -> None:
    pass


def _is_updated(trainer: Trainer, norm: Any) -> Callable[[], None]:
    """Has the trainer's own clipping give the norm and its own update do nothing, once: the step
    has done both. Returns a function that ends this, if it has not ended.
    """
    put_back = [_set(trainer.accelerator, "clip_grad_norm_", lambda *_: norm)]

    def restore() -> None:
        while put_back:
            put_back.pop()()

    put_back.append(_set(trainer.optimizer, "step", restore))
    return restore


def _set(holder: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of an object; what puts back how it was."""
    had, before = name in vars(holder), vars(holder).get(name)
    setattr(holder, name, value)
    return lambda: setattr(holder, name, before) if had else delattr(holder, name)
