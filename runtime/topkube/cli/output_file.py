"""Files that a command writes at its end, named by an option."""

from __future__ import annotations

import os
from pathlib import Path

from topkube.errors import ArgumentError


def check_output_file(option: str, path: Path) -> None:
    """Raise ArgumentError if no file can be written at `path`: before the work whose result the file gets. Folders that
    do not exist yet are created with the file."""
    folder = Path(os.path.abspath(path)).parent
    while not os.path.lexists(folder):
        folder = folder.parent
    if os.path.isdir(path):
        problem = "it is a folder"
    elif not os.path.isdir(folder):
        problem = f"{folder} is not a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"the folder {folder} is not writable"
    else:
        return
    raise ArgumentError(
        f"{option} {path}: no file can be written there: {problem}", next_step=f"pass another file to {option}"
    )
