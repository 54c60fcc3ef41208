"""Solves integer programs by CBC through python-mip, each in a process of its own that can be
killed.

Nothing here imports python-mip: only the child processes do (`child.py`), and there are none until
a plan needs one. The planner's bindings start them through :class:`Child`, as many side by side as
there are cores.
"""

from roam.exact.bridge import Child

__all__ = ["Child"]
