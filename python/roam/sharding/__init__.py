"""Spreads a training step over the ranks of a mesh, and certifies the memory of each.

twin (fakes of the user's objects) -> trace -> for each division of the ranks into replicas: rules
and nodes (what can be chosen) -> search -> of the cheapest: styles -> check and plan (a rank's own
step)
"""

from __future__ import annotations

from roam.sharding.costs import Costs, Link
from roam.sharding.division import Division
from roam.sharding.planning import parallelize
from roam.sharding.result import Sharding

__all__ = ["Costs", "Division", "Link", "Sharding", "parallelize"]
