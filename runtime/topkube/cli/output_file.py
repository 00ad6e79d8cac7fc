"""Files that a command writes at its end, named by an option."""

from __future__ import annotations

from pathlib import Path

from topkube.errors import ArgumentError
from topkube.files import explain_unwritable


def check_output_file(option: str, path: Path) -> None:
    """Raise ArgumentError if no file can be written at `path`: before the work whose result the file gets."""
    if problem := explain_unwritable(path, creates_folders=True):
        raise ArgumentError(
            f"{option} {path}: no file can be written there: {problem}", next_step=f"pass another file to {option}"
        )
