"""Plans that are kept on disk from one process to the next, and verified when they are taken."""

from __future__ import annotations

import json

from roam import _core
from roam._core import Graph, Plan
from roam.disk_cache import build, disk_cache
from roam.errors import RoamError

WORTH_S = 0.02
"""Seconds of planning that are worth a file. To read and to verify one takes a few milliseconds."""
_KIND = "plan"


def kept_plan(graph: Graph, settings: tuple[int | None, ...]) -> Plan | None:
    """The verified plan that this build of the planner made for a graph of this structure with
    these settings. None if there is none, or if the file does not contain a valid plan.
    """
    cache = disk_cache()
    if cache is None:
        return None
    structure = graph.structure_digest
    content = cache.get(_KIND, _key(structure, settings))
    if content is None:
        return None
    try:
        plan = Plan.from_json(content.replace(structure.encode(), graph.digest.encode(), 1))
        _core.verify(graph, plan)
    except RoamError:
        cache.drop(_KIND, _key(structure, settings))
        return None
    return plan


def keep_plan(graph: Graph, settings: tuple[int | None, ...], plan: Plan) -> None:
    """Keeps a plan for later processes. In the file it names its graph by the structure."""
    cache = disk_cache()
    if cache is not None and plan.status != "timed_out":
        structure = graph.structure_digest
        content = plan.to_json().replace(graph.digest.encode(), structure.encode(), 1)
        cache.put(_KIND, _key(structure, settings), content)


def _key(structure: str, settings: tuple[int | None, ...]) -> str:
    return json.dumps([build(), structure, *settings])
