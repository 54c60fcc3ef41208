"""Prints what roam depends on, with that of the extras that are named, as requirements of pip."""

import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"], *(one for extra in sys.argv[1:] for one in extras[extra])]
sys.stdout.writelines(f"{one}\n" for one in dict.fromkeys(wanted))
