"""The weights of a model alone, in a safetensors file for other programs."""

from __future__ import annotations

from pathlib import Path

import torch

from topkube.errors import CheckpointError, StorageError
from topkube.files import replace_file
from topkube.installation import build_install_command


def write_weights(model: torch.nn.Module, path: Path, step: int) -> None:
    """Write the weights of `model` to a safetensors file, which replaces an earlier file at `path` as a whole.

    `step` is stored in the file's metadata. Raises StorageError if the file cannot be written, and CheckpointError if
    safetensors is not installed."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_model
    except ImportError:
        raise CheckpointError(
            "weights cannot be saved: safetensors is not installed",
            next_step=f"{build_install_command('safetensors')}, in the image of the job too",
        ) from None
    try:
        with replace_file(path) as part:
            save_model(model, str(part), metadata={"format": "pt", "step": str(step)})
    except SafetensorError as error:
        raise StorageError(
            f"the weights cannot be written to {path}: {error}",
            cause="the folder does not exist, or the disk is full",
            next_step="pass another path, or free space",
        ) from None
