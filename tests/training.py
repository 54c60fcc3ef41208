"""Small training set-ups that the tests of capture and runtime share: a user's own function, model
and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
import transformers
from torch.utils import _pytree as pytree

functional = torch.nn.functional
transformers.logging.set_verbosity_error()


def plain_step(model: Any, optimizer: Any, inputs: Any, labels: Any) -> Any:
    """The commonest step: a classification, and an update of everything."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss


@dataclass
class Training:
    """What one run needs: `step(*objects, *batch())`."""

    step: Callable[..., Any]
    objects: tuple[Any, ...]
    batch: Callable[[torch.Generator], tuple[Any, ...]]

    @property
    def model(self) -> torch.nn.Module:
        return self.objects[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.objects[1]


def gpt2() -> Training:
    """Dropout, AdamW, a cosine schedule, which `run` steps, and norm clipping."""
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=48,
        n_head=4,
        vocab_size=211,
        n_positions=32,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

    def step(model, optimizer, scheduler, tokens):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Training(
        step,
        (model, optimizer, scheduler),
        lambda g: (torch.randint(0, 211, (2, 24), generator=g),),
    )


def _images(name: str, optimizer: Callable[..., torch.optim.Optimizer]) -> Training:
    model = getattr(torchvision.models, name)(num_classes=7).train()

    return Training(
        plain_step,
        (model, optimizer(model.parameters())),
        lambda g: (torch.randn(4, 3, 40, 40, generator=g), torch.randint(0, 7, (4,), generator=g)),
    )


def resnet18() -> Training:
    """Batch norm and SGD with momentum."""
    return _images(
        "resnet18",
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-4),
    )


def mobilenet_v2() -> Training:
    """Depthwise convolutions, dropout and AdamW."""
    return _images("mobilenet_v2", lambda p: torch.optim.AdamW(p, lr=1e-3))


def bert() -> Training:
    """Tied embeddings, a nested batch and a nested result."""
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=48, num_attention_heads=4, intermediate_size=96, vocab_size=211,
        max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config).train()
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        return {"loss": output.loss, "predictions": output.logits.argmax(-1)}

    def batch(g):
        return (
            {name: torch.randint(0, 211, (2, 24), generator=g) for name in ("input_ids", "labels")},
        )

    return Training(step, (model, torch.optim.AdamW(model.parameters(), lr=1e-3)), batch)


TRAININGS = {"gpt2": gpt2, "resnet18": resnet18, "mobilenet_v2": mobilenet_v2, "bert": bert}


def tensors_and_numbers(*values: Any) -> list[Any]:
    """All leaves, tensors copied so that later steps leave them alone."""
    return [
        leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for leaf in pytree.tree_leaves(values)
    ]


def assert_same_bits(one: list[Any], other: list[Any]) -> None:
    """Leaf by leaf: dtype, shape and every bit of tensors, -0.0 and nan included; numbers
    likewise."""
    assert len(one) == len(other)
    for place, (a, b) in enumerate(zip(one, other, strict=True)):
        assert type(a) is type(b), place
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), place
            bits = [
                torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1)).view(torch.uint8)
                for x in (a, b)
            ]
            assert torch.equal(*bits), place
        else:
            assert repr(a) == repr(b), place


def state_of(training: Training) -> list[Any]:
    """Parameters, buffers, optimizer state, schedule and generator: everything that a run leaves
    behind."""
    states = [part.state_dict() for part in training.objects]
    return tensors_and_numbers(states, torch.get_rng_state())


def run(
    make: Callable[[], Training], steps: int, wrap: Callable[[Any], Any] = lambda step: step
) -> tuple[list[Any], Training]:
    """Trains from a fixed seed; everything that is returned and left behind, and the training
    itself."""
    torch.manual_seed(0)
    training = make()
    step = wrap(training.step)
    torch.manual_seed(1)
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    returned: list[Any] = []
    for _ in range(steps):
        returned += tensors_and_numbers(step(*training.objects, *training.batch(generator)))
        for schedule in training.objects[2:]:
            schedule.step()
    return returned + state_of(training), training
