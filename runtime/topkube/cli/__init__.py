"""The command line, `topkube`."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    print("topkube")
