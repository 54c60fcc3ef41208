"""A backend of `torch.compile` that shows which graphs were compiled."""

from __future__ import annotations

from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


def _marked(graph: Any, _: Any) -> Any:
    """Runs a graph, and lets every result tell how large the graph is."""
    factor = 1 + len(graph.graph.nodes) / 256

    def run(*args: Any) -> list[Any]:
        return [
            one * factor if isinstance(one, torch.Tensor) and one.is_floating_point() else one
            for one in graph.forward(*args)
        ]

    return make_boxed_func(run)


marking = aot_autograd(fw_compiler=_marked)
"""Its results differ where a function is compiled in other parts, for other sizes, or not at
all."""
