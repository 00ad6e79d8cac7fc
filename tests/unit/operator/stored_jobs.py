"""A stored TrainingJob, and changes of it, for the tests of admission and of the webhook."""

from __future__ import annotations

import copy
from typing import Any

JOB: dict[str, Any] = {
    "apiVersion": "topkube.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {
        "name": "tiny",
        "namespace": "team",
        "uid": "u",
        "selfLink": "/a",
        "managedFields": [{"manager": "k"}],
    },
    "spec": {
        "workers": 2,
        "slotsPerWorker": 1,
        "template": {
            "metadata": {"labels": {"team": "a"}},
            "spec": {
                "containers": [{"name": "worker", "image": "i:1", "command": ["python", "t.py"]}],
                "nodeSelector": {"disk": "fast"},
            },
        },
        "checkpoint": {"claimName": "c"},
    },
}


def change_field(path: str, value: Any, job: dict[str, Any] = JOB) -> dict[str, Any]:
    """Return `job` with `value` at spec.`path`. None removes the field."""
    changed = copy.deepcopy(job)
    *parents, last = path.split(".")
    part = changed["spec"]
    for key in parents:
        part = part[int(key)] if isinstance(part, list) else part.setdefault(key, {})
    if value is None:
        part.pop(last, None)
    else:
        part[last] = value
    return changed
