"""How much of the long sweeps runs."""

import os

EVERY = int(os.environ.get("ROAM_SWEEP_EVERY", "8"))
"""Of many cases of one kind one in so many runs, the first among them; `make sweep` runs all."""
