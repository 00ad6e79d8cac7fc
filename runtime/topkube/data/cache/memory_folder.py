"""The folder in memory that all processes of a user share on a node: memory tiers, and states of datasets in use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from topkube.data.base.permissions import make_private_folder
from topkube.data.cache.memory.memory_tier import remove_unused_tiers
from topkube.data.cache.node_state import remove_unused_states
from topkube.settings import Settings


def choose_memory_folder(directory: str | os.PathLike[str] | None, settings: Settings) -> Path:
    """Return the folder in memory. Every user has a separate folder."""
    return Path(directory or settings.cache_memory_directory) / f"topkube-{os.geteuid()}"


def remove_unused_memory(settings: Settings) -> None:
    """Remove what killed processes have left in the folder: tiers and states that no process uses. A folder that
    another user may have prepared is left alone."""
    folder = choose_memory_folder(None, settings)
    with contextlib.suppress(OSError):
        if folder.exists():
            make_private_folder(folder)
            remove_unused_tiers(folder)
            remove_unused_states(folder)
