"""Prints what roam depends on, with that of the extras that are named, as requirements of pip. What
its benchmarks need beside roam counts as an extra, `bench`.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

root = Path(__file__).parents[1]
project, benches = (
    tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    for folder in (root, root / "benches")
)
bench = [one for one in benches["dependencies"] if not one.startswith(project["name"])]
extras = {**project["optional-dependencies"], "bench": bench}
wanted = [*project["dependencies"], *(one for extra in sys.argv[1:] for one in extras[extra])]
sys.stdout.writelines(f"{one}\n" for one in dict.fromkeys(wanted))
