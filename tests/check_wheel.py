"""Run by ``make wheel-test`` in an environment that holds numpy and the wheel alone.

Shows that a graph file is planned, saved and verified without torch, without mip and without a Rust
toolchain.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

INSTANCES = Path(__file__).parent.parent / "benches"


def main() -> None:
    """Raise if anything is not as it should be; print one line otherwise."""
    import roam

    for absent in ("torch", "mip"):
        assert importlib.util.find_spec(absent) is None, (
            f"{absent} is installed: this environment shows nothing"
        )
    assert Path(roam.__file__).is_relative_to(sys.prefix), (
        f"roam comes from {roam.__file__}, not from the wheel"
    )

    table = Path(roam.__file__).parent / "kernels/kernels.json"
    assert table.exists(), f"the wheel has no {table.name}"
    assert importlib.util.find_spec("roam_bench") is None, "the wheel has the benchmarks"

    command = Path(sys.executable).with_name("roam")
    bare = {"PATH": os.defpath}
    for asked, code in (("--help", 0), ("scripts", 2)):
        told = subprocess.run(
            [command, "bench", asked], env=bare, check=False, capture_output=True, text=True
        )
        assert told.returncode == code, told
        assert "pip install ./benches" in " ".join((told.stdout + told.stderr).split()), told
    instances = sorted(INSTANCES.glob("*.json.gz"))
    assert instances, f"no graph files in {INSTANCES}"
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for instance in instances:
            plan = str(Path(folder) / instance.name)
            arguments = [command, "plan", instance, "--json", "--save-plan", plan]
            planned = subprocess.run(
                arguments, env=bare, check=True, capture_output=True, text=True
            )
            values = json.loads(planned.stdout)
            assert values["verified"] is True
            assert (
                values["lower_bound_bytes"]
                <= values["peak_bytes"]
                <= values["program_order_peak_bytes"]
            )
            subprocess.run(
                [command, "verify", instance, plan], env=bare, check=True, capture_output=True
            )

    seconds = time.perf_counter() - start
    print(
        f"the wheel planned and verified {len(instances)} graph files without torch and mip in {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
