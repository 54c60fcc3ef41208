"""`roam.integrations.transformers` on several processes: a Trainer whose model accelerate has put
in a `DistributedDataParallel`, or sharded by FSDP2, leaves the same bits on every rank by plans.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("accelerate")

import transformers
from accelerate import DistributedType, PartialState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from ranks import RankFailed, Ranks, alive
from roam.integrations import transformers as subject
from trainers import leaves, without_times

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from alive(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from alive(4, tmp_path_factory.mktemp("four"))


def outcome(rank: int, is_planned: bool, folder: str, options: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    rows = torch.randint(3, 99, (32, 12))
    config = transformers.GPT2Config(
        vocab_size=99, n_layer=2, n_embd=16, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=2, use_cache=False
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=2,
        ddp_find_unused_parameters=False,
        **{"save_strategy": "no", **copy.deepcopy(options)},  # the Trainer changes them
    )
    if arguments.fsdp and arguments.device:
        # accelerate shards on GPUs and their like only
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=(data := [{"input_ids": row, "labels": row} for row in rows]),
        eval_dataset=data[:8],
    )
    step = subject.compile(trainer) if is_planned else None
    trainer.train()
    assert isinstance(trainer.model_wrapped, FSDPModule if arguments.fsdp else DDP)
    assert step is None or step.plans
    return [
        value.to_local() if isinstance(value, DTensor) else value
        for value in leaves(
            without_times(trainer.state.log_history),
            trainer.model.state_dict(),
            trainer.optimizer.state_dict(),
            trainer.lr_scheduler.state_dict(),
        )
    ]


def both(rank: int, world: int, options: dict[str, Any]) -> list[int]:
    """Places of what differs, eagerly and by plans."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # the group is there already
    environment = {**{name: str(value) for name, value in names.items()}, **address}
    with mock.patch.dict(os.environ, environment), tempfile.TemporaryDirectory() as folder:
        plain, planned = (
            outcome(rank, is_planned, folder, options) for is_planned in (False, True)
        )
    assert len(plain) == len(planned)
    return [
        place
        for place, (one, other) in enumerate(zip(plain, planned, strict=True))
        if not (torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other)
    ]


ACCUMULATED = {
    "gradient_accumulation_steps": 2,
    "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
}
SHARDED = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]}}
OPTIONS: list[dict[str, Any]] = [
    {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    {},
    {**SHARDED, **ACCUMULATED, "max_grad_norm": 0.1},
    {**SHARDED, "eval_strategy": "steps", "eval_steps": 2},
    {**SHARDED, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1},
]


@pytest.mark.sweep
@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_on_two_processes_leaves_the_same_bits(two: Ranks, options: Any) -> None:
    assert two.run(both, options) == [[], []]


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_on_four_processes_leaves_the_same_bits(four: Ranks, options: Any) -> None:
    assert four.run(both, options) == [[], [], [], []]


@pytest.mark.sweep
def test_gradients_that_a_micro_batch_leaves_to_be_reduced_are_refused(two: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"trainer_devices.*sync_each_batch"):
        two.run(both, {**SHARDED, "gradient_accumulation_steps": 2})
