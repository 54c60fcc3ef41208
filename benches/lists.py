"""Lists that documents take from the code: `python benches/document.py` writes them between
`<!-- list: NAME -->` and `<!-- end -->`, NAME being a function of this file, perhaps with an
argument.
"""

from __future__ import annotations

import textwrap

from roam.error_codes import MEANINGS
from roam.runtime.beside.step import PYTHONS_OWN
from roam.state.global_state import AMBIENT


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def beside_codes() -> str:
    """The codes with which `python="auto"` runs a step's Python beside its plan."""
    return _wrapped(", ".join(f"`{code}`" for code in sorted(PYTHONS_OWN)) + ".")


def surroundings() -> str:
    """What around a call is compared."""
    return _wrapped(", ".join(name for name, _ in AMBIENT) + ".")


def codes(of: str) -> str:
    """The codes of a class of errors, and what they mean."""
    return "\n".join(f"- `{code}`: {meaning}" for code, meaning in MEANINGS[of].items())
