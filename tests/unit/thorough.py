"""The effort of properties and explorations: `make test` tries fewer examples, and the option `--thorough` more
(tests/conftest.py)."""

from __future__ import annotations

import os

VARIABLE = "TEST_THOROUGHLY"


def choose(usual: int, thorough: int) -> int:
    """Return the first number, or the second with `--thorough`."""
    return thorough if VARIABLE in os.environ else usual
