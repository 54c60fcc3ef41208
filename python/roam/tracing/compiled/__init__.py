"""Regions of a step that `torch.compile` compiles, each of its graphs recorded as one operator."""
