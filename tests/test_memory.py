"""What a plan promises is what the allocator sees, and never more than eager needs."""

from __future__ import annotations

import pytest

from measured import build
from roam.runtime.measure import measure_in_child
from training import TRAININGS


@pytest.mark.parametrize("name", TRAININGS)
def test_the_promise_is_kept_and_eager_needs_no_less(name: str) -> None:
    eager = measure_in_child(build, {"name": name, "how": "eager"}, warmup=2)
    planned = measure_in_child(build, {"name": name, "how": "planned"}, warmup=2)
    assert eager.unseen_freed_bytes == planned.unseen_freed_bytes == 0
    promised = planned.value["persistent"] + planned.value["peak"]
    assert planned.peak_without_workspace_bytes is not None
    seen = planned.start_bytes + planned.peak_without_workspace_bytes
    assert seen == pytest.approx(promised, rel=0.01)
    assert planned.peak_total_bytes <= eager.peak_total_bytes
    # Program order in the plan is what eager does: it cannot be much more than what eager is seen to take.
    assert planned.value["persistent"] + planned.value["program_order_peak"] <= eager.peak_total_bytes * 1.01
