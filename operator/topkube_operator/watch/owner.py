"""The TrainingJob that controls an object.

A child belongs to a job if its controller reference names the job's API group, kind, name and UID, and if the child is
in the job's own namespace. An owner reference contains no namespace, and anybody who may create pods in another
namespace may write any UID into the reference. Therefore an owner always includes the namespace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from topkube.job import KIND
from topkube.job.training_job import GROUP
from topkube_operator.watch.work_queue import Key


class Owner(NamedTuple):
    """The TrainingJob that controls an object."""

    namespace: str
    name: str
    uid: str

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> Owner:
        """Return a stored job as an owner."""
        metadata = job["metadata"]
        return cls(metadata["namespace"], metadata["name"], metadata["uid"])

    @property
    def key(self) -> Key:
        """The job's key in the work queue."""
        return self.namespace, self.name


def find_owner(manifest: Mapping[str, Any]) -> Owner | None:
    """Return the TrainingJob that controls an object and is in the object's namespace; None if there is none."""
    metadata = manifest["metadata"]
    for reference in metadata.get("ownerReferences") or ():
        if reference.get("controller") is not True:
            continue
        group, _, version = str(reference.get("apiVersion")).partition("/")
        if group != GROUP or not version or reference.get("kind") != KIND:
            return None  # Kubernetes allows only one controller
        return Owner(metadata["namespace"], str(reference.get("name")), str(reference.get("uid")))
    return None
