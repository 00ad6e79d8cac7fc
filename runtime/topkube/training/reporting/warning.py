"""Warnings of the training loop, for people who read the output of the ranks."""

from __future__ import annotations

import sys


def warn(text: str) -> None:
    """Print a warning on this rank."""
    print(f"topkube: warning: {text}", file=sys.stderr, flush=True)
