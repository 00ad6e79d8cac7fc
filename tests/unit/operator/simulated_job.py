"""The stored TrainingJob of the simulated cluster."""

from __future__ import annotations

from typing import Any

UID = "uid-1"
"""The UID of the job. The names of its pods end in it."""


def read_attempt(name: str) -> int:
    """Return the attempt for which a pod of this name was made."""
    return int(name.removesuffix(f"-{UID}").rpartition("-")[2])


def build_job(**spec: Any) -> dict[str, Any]:
    """Return a stored TrainingJob."""
    container = {"name": "worker", "image": "image:1", "command": ["python", "train.py"]}
    return {
        "apiVersion": "topkube.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "train", "namespace": "team", "uid": UID, "generation": 1},
        "spec": {"workers": 2, "slotsPerWorker": 2, "template": {"spec": {"containers": [container]}}, **spec},
    }
