"""A choice as styles of `torch.distributed.tensor.parallel`, one for each module that has one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roam.sharding.nodes import Node, Option
from roam.sharding.rules import SPREAD, WHOLE, State
from roam.sharding.trace import Trace
from roam.torch_compat.private import is_dtensor


@dataclass(frozen=True, slots=True)
class Style:
    """What `parallelize_module` is given for one module.

    Attributes:
        name: the name of a class of `torch.distributed.tensor.parallel`.
        before: state of the tensor that the module is given; for `PrepareModuleInput`, before the
            change.
        after: state of what the module returns; for `PrepareModuleInput`, of the module's input
            after the change.
        argument: position or name of the argument that `PrepareModuleInput` changes.
        positional: how many arguments the module is called with by position.
        last: the last dimension of what the module is given.
    """

    name: str
    before: State
    after: State
    argument: str | int = 0
    positional: int = 1
    last: int = -1

    def make(self) -> Any:
        """The style object of PyTorch's."""
        from torch.distributed.tensor import parallel

        style = getattr(parallel, self.name)
        if self.name == "SequenceParallel":
            return style(sequence_dim=self.before, use_local_output=True)
        before, after = _placement(self.before), _placement(self.after)
        if self.name == "RowwiseParallel" and self.before == self.last:
            before = _placement(-1, is_dimension=True)
        if self.name != "PrepareModuleInput":
            return style(input_layouts=before, output_layouts=after)
        is_local = self.after != SPREAD
        if isinstance(self.argument, str):
            return style(
                input_kwarg_layouts={self.argument: before},
                desired_input_kwarg_layouts={self.argument: after},
                use_local_output=is_local,
            )
        places = range(self.positional)
        return style(
            input_layouts=tuple(before if place == self.argument else None for place in places),
            desired_input_layouts=tuple(
                after if place == self.argument else None for place in places
            ),
            use_local_output=is_local,
        )

    def __str__(self) -> str:
        if self.name == "SequenceParallel":
            return f"SequenceParallel(sequence_dim={self.before})"
        where = f"{self.argument}: " if isinstance(self.argument, str) else ""
        after = "Replicate as DTensor" if self.after == SPREAD else _text(self.after)
        return f"{self.name}({where}{_text(self.before)} -> {after})"


def _placement(state: State, *, is_dimension: bool = False) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    return Shard(state) if state >= 0 or is_dimension else Replicate()


def _text(state: State) -> str:
    return "Replicate" if state in (WHOLE, SPREAD) else f"Shard({state})"


_NAMES = {"column": "ColwiseParallel", "row": "RowwiseParallel", "sequence": "SequenceParallel"}


def styles_of(trace: Trace, nodes: Sequence[Node], options: Iterable[Option]) -> dict[str, Style]:
    """The styles that carry out a choice, by the paths of modules."""
    found: dict[str, Style] = {}
    for node, option in zip(nodes, options, strict=True):
        if node.what not in ("style", "entry"):
            continue
        call = trace.calls[node.subject]
        before, after = option.inputs[0], option.outputs[0]
        if node.what == "entry":
            if before == after:
                continue
            argument = next(name for name, slot in call.given if slot == node.value)
            style = Style("PrepareModuleInput", before, after, argument, call.positional)
        elif option.kind == "plain":
            continue
        else:
            last = len(trace.values[call.given[0][1]].shape) - 1
            style = Style(_NAMES[option.kind], before, after, last=last)
            if option.kind == "sequence":
                style = Style("SequenceParallel", option.split, after, last=last)
        if found.setdefault(call.path, style) != style:
            raise AssertionError(f"two calls of {call.path} have two styles")
    return found


def apply_styles(
    model: torch.nn.Module,
    mesh: Any,
    styles: dict[str, Style],
    *,
    source_rank: int | None = 0,
) -> None:
    """Applies styles to a model on a mesh of one dimension. Parameters that several modules shared
    are shared again afterwards.

    Args:
        model: the model, which is changed.
        mesh: a mesh of one dimension.
        styles: the styles, by the paths of modules.
        source_rank: the rank whose parameters all ranks get; None if all ranks have the same ones.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    shared: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            shared.setdefault(id(parameter), []).append((module, name))
    ties = [holders for holders in shared.values() if len(holders) > 1]
    plan = {path: style.make() for path, style in styles.items()}
    if not plan:
        return
    parallelize_module(model, mesh, plan, src_data_rank=source_rank)
    for holders in ties:
        found = [getattr(module, name) for module, name in holders]
        spread = next((parameter for parameter in found if is_dtensor(parameter)), found[0])
        for module, name in holders:
            module.register_parameter(name, spread)
