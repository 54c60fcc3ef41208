"""``python -m roam``: the command line, as ``roam``."""

import sys

from roam.cli import main

if __name__ == "__main__":
    sys.exit(main())
