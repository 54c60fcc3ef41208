"""How long each test takes: `make durations` runs all tests, writes tests/durations.json and prints
the slowest.

`make quick` leaves out what took longer than a limit there (tests/conftest.py). A test that is not
listed counts as quick.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

DURATIONS = Path(__file__).resolve().parent.parent / "tests" / "durations.json"


def read(report: Path) -> Counter[str]:
    """Seconds of each test function, its parameters together, of a report that `pytest --junit-xml`
    wrote.
    """
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.attrib["classname"].split(".")
        # Classes follow the first part that names a file of tests; folders precede it.
        end = next(place for place, part in enumerate(parts, 1) if part.startswith("test_"))
        name = case.attrib["name"].partition("[")[0]
        file = f"{'/'.join(parts[:end])}.py"
        seconds["::".join([file, *parts[end:], name])] += float(case.attrib["time"])
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="what `pytest --junit-xml=REPORT` wrote")
    parser.add_argument(
        "--slowest", type=int, default=20, metavar="N", help="print so many (default %(default)s)"
    )
    arguments = parser.parse_args()
    seconds = read(arguments.report)
    listed = {name: round(taken, 1) for name, taken in sorted(seconds.items()) if taken >= 0.1}
    DURATIONS.write_text(json.dumps(listed, indent=1) + "\n")
    for name, taken in seconds.most_common(arguments.slowest):
        print(f"{taken:7.1f} s  {name}")
    print(f"{seconds.total():7.1f} s  all {len(seconds)} test functions, one after another")
    return 0


if __name__ == "__main__":
    sys.exit(main())
