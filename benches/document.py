"""Puts the tables of committed results into the documents: `python benches/document.py`, or with
`--check`, which fails where they differ.

A document marks a table's place by two comments, `<!-- table: paper.published_table -->` and `<!--
end -->`: the function of that name in `roam_bench.paper` makes it of `docs/benchmarks/paper.json`.
Where `roam_bench` has no such module, it lies beside this file. Of results with a hyphen in the
name (`suite-first.json`) what stands before it names the module. `<!-- table: scale.largest_table
without build, s; load, s -->` leaves these columns out. `<!-- list: codes PlanError -->` marks the
place of what the function of that name in lists.py makes of the code. What stands between the
comments is replaced.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import lists

from roam_bench.results import read_json
from roam_bench.run import Table, draw

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"
_BLOCK = re.compile(
    r"(?P<begin><!-- (?:table: (?P<bench>[\w-]+)\.|list: )(?P<function>\w+)"
    r"(?: (?P<of>(?!without\b)\w+))?(?:\s+without\s+(?P<without>[^>]+?))? -->\n)"
    r".*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def documents() -> list[Path]:
    """Those that have such places."""
    return [
        path
        for path in sorted(ROOT.glob("docs/**/*.md"))
        if _BLOCK.search(path.read_text(encoding="utf-8"))
    ]


def rendered(text: str) -> str:
    """A document's text with every table made anew."""
    return _BLOCK.sub(
        lambda match: f"{match['begin']}{_made(match)}\n{match['end']}",
        text,
    )


def _made(place: re.Match[str]) -> str:
    if place["bench"] is None:
        return str(getattr(lists, place["function"])(*filter(None, [place["of"]])))
    record = read_json(RESULTS / f"{place['bench']}.json")
    made = getattr(_module(place["bench"]), place["function"])(record)
    if not isinstance(made, Table):
        return str(made)
    left_out = " ".join((place["without"] or "").split()).split("; ") if place["without"] else []
    return made.without(*left_out).markdown()


def _module(bench: str) -> ModuleType:
    name = bench.partition("-")[0]
    is_of_command = importlib.util.find_spec(f"roam_bench.{name}") is not None
    return importlib.import_module(f"roam_bench.{name}" if is_of_command else name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail where a document differs from its results",
    )
    parser.add_argument("--plots", action="store_true", help="draw the plots anew too")
    arguments = parser.parse_args()
    differing = [
        path
        for path in documents()
        if rendered(path.read_text(encoding="utf-8")) != path.read_text(encoding="utf-8")
    ]
    for path in differing:
        if not arguments.check:
            path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{'differs' if arguments.check else 'written'}: {path.relative_to(ROOT)}")
    if arguments.plots:
        for path in sorted(RESULTS.glob("*.json")):
            plot = getattr(_module(path.stem), "plot", None)
            if plot is not None:
                draw(read_json(path), plot, RESULTS)
    return 1 if arguments.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
