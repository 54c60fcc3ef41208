"""Compiles the repeated blocks of the models that a step uses, for `roam.compile(kernels=
"inductor")`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from roam.torch_compat.private import has_module_hooks, is_compiled, shard_states

_HOLDERS = (torch.nn.ModuleList, torch.nn.Sequential)
_UNCALLED = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)  # fmt: skip


def repeated_blocks(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The outermost modules with children that are at least two of one class in one `ModuleList` or
    `Sequential`, in the modules or inside of them. Those with hooks that `fully_shard` does not
    shard, and those that are compiled, have compiled parts or are such a part, are left out.
    """
    inside = list(dict.fromkeys(one for module in modules for one in module.modules()))
    blocks: dict[torch.nn.Module, None] = {}
    for holder in inside:
        if isinstance(holder, _HOLDERS):
            counts = Counter(map(type, holder.children()))
            blocks |= {one: None for one in holder.children() if counts[type(one)] > 1}
    for block in list(blocks):
        if not _is_usable(block):
            del blocks[block]
    within = {part for block in blocks for part in block.modules() if part is not block}
    of_compiled = {part for one in inside if is_compiled(one) for part in one.modules()}
    return [block for block in blocks if block not in within and block not in of_compiled]


def compile_blocks(modules: Iterable[torch.nn.Module]) -> bool:
    """Compiles the repeated blocks in place, as by `block.compile()`. Returns whether there were
    any.
    """
    blocks = repeated_blocks(modules)
    for block in blocks:
        block.compile()
    return bool(blocks)


def _is_usable(block: torch.nn.Module) -> bool:
    parts = list(block.modules())
    return (
        len(parts) > 1
        and not isinstance(block, (*_UNCALLED, torch.jit.ScriptModule))
        and (not has_module_hooks(block) or bool(shard_states([block])))
        and not any(map(is_compiled, parts))
    )
