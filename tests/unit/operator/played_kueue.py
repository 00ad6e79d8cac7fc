"""A played Kueue: it reserves quota for Workloads, admits, evicts, and frees quota, as its documentation describes.

It acts on one Workload of a simulated cluster. Like the real controller, it frees the quota of a Workload when the
Workload is finished, when it is deleted, or when the job's controller has cleared its admission.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from simulated import Simulated

from topkube.timestamps import format_timestamp
from topkube_operator.model.observed import Child

WORKLOAD = ("Workload", "train-workload")


class PlayedKueue:
    """One cluster queue with room for one job."""

    def __init__(self, world: Simulated, flavors: dict[str, dict[str, Any]] | None = None) -> None:
        self.world = world
        self.flavors = flavors or {"spot": {}}
        for name, spec in self.flavors.items():
            world.objects["ResourceFlavor", name] = {"metadata": {"name": name}, "spec": spec}

    @property
    def workload(self) -> Child | None:
        return self.world.children.get(WORKLOAD)

    @property
    def spec(self) -> dict[str, Any]:
        """The spec of the Workload as the operator made it."""
        spec: dict[str, Any] = self.world.manifests[WORKLOAD[1]]["spec"]
        return spec

    def condition(self, kind: str) -> dict[str, Any]:
        assert self.workload is not None
        conditions = self.workload.content["status"].get("conditions", [])
        return next((entry for entry in conditions if entry["type"] == kind), {})

    def holds_quota(self) -> bool:
        """True if the quota of the job is in use."""
        if self.workload is None or self.condition("Finished").get("status") == "True":
            return False
        return self.condition("QuotaReserved").get("status") == "True"

    def admit(self, checks: list[dict[str, Any]] | None = None) -> None:
        """Reserve quota in all flavors, and admit. An earlier eviction is over."""
        names = [pod_set["name"] for pod_set in self.spec["podSets"]]
        flavors = {f"resource-{number}": name for number, name in enumerate(self.flavors)}
        assignments = [{"name": name, "flavors": flavors, "count": 1} for name in names]
        self._write(
            {"admission": {"clusterQueue": "c", "podSetAssignments": assignments}, "admissionChecks": checks or []},
            QuotaReserved=(True, "QuotaReserved"),
            Admitted=(True, "Admitted"),
            Evicted=(False, "QuotaReserved"),
        )

    def evict(self, reason: str = "Preempted") -> None:
        """Ask for the quota. The job keeps it until its controller gives it back."""
        self._write({}, Evicted=(True, reason))

    def refuse(self, message: str) -> None:
        self._write({}, QuotaReserved=(False, "Pending", message))

    def _write(self, status: dict[str, Any], **changes: tuple[Any, ...]) -> None:
        assert self.workload is not None
        stored = self.workload.content["status"]
        conditions = {entry["type"]: entry for entry in stored.get("conditions", [])}
        for kind, (holds, reason, *message) in changes.items():
            conditions[kind] = {
                "type": kind,
                "status": "True" if holds else "False",
                "reason": reason,
                "message": message[0] if message else f"{kind} because of {reason}",
                "lastTransitionTime": format_timestamp(self.world.now),
            }
        content = {**self.workload.content, "status": {**stored, **status, "conditions": list(conditions.values())}}
        self.world.put_child(dataclasses.replace(self.workload, content=content))
