"""``python -m roam``: the command line, as ``roam``."""

import sys

from roam.cli import main

sys.exit(main())
