"""Spreads a training step over the ranks of a mesh, and certifies the memory of each.

twin (fakes of the user's objects) -> trace -> rules and nodes (what can be chosen) -> search ->
styles -> check and plan (a rank's own step)
"""

from __future__ import annotations

from roam.sharding.costs import Costs, Link
from roam.sharding.planning import parallelize
from roam.sharding.result import Sharding

__all__ = ["Costs", "Link", "Sharding", "parallelize"]
