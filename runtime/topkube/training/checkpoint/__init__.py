"""Checkpoints: how they are written, published, loaded and removed.

`store.py` is the directory of checkpoints; `resumption.py` loads a checkpoint into model and optimizer;
`format` defines what the files contain.
"""

from __future__ import annotations

from topkube.training.checkpoint.reader import LoadedCheckpoint
from topkube.training.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "LoadedCheckpoint"]
