"""A simulated Kueue in a simulated cluster: it admits, evicts and frees the quota of the simulated job.

Like the real controller, it frees the quota of a Workload when the Workload is finished, when it is deleted, or when
the job's controller has cleared its admission.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import kueue_protocol
from simulated_cluster import SimulatedCluster

from topkube_operator.model.observed import Child

WORKLOAD = ("Workload", "train-workload")


class SimulatedKueue:
    """One cluster queue with room for one job."""

    def __init__(self, world: SimulatedCluster, flavors: dict[str, dict[str, Any]] | None = None) -> None:
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

    def find_condition(self, kind: str) -> dict[str, Any]:
        return kueue_protocol.find_condition(self._build_stored_workload(), kind)

    def holds_quota(self) -> bool:
        """Return True if the quota of the job is in use."""
        return self.workload is not None and kueue_protocol.holds_quota(self._build_stored_workload())

    def may_be_admitted(self) -> bool:
        """Return True if the Workload waits in its queue."""
        return self.workload is not None and kueue_protocol.may_be_admitted(self._build_stored_workload())

    def admit(self, checks: list[dict[str, Any]] | None = None) -> None:
        """Reserve quota in all flavors, and admit. An earlier eviction is over."""
        flavors = {f"resource-{number}": name for number, name in enumerate(self.flavors)}
        self._write_status(
            kueue_protocol.build_admitted_status(self._build_stored_workload(), flavors, self.world.now, checks or ())
        )

    def evict(self, reason: str = "Preempted") -> None:
        """Ask for the quota. The job keeps it until its controller returns it."""
        self._write_status(kueue_protocol.build_evicted_status(self._build_stored_workload(), reason, self.world.now))

    def refuse(self, message: str) -> None:
        self._write_status(kueue_protocol.build_refused_status(self._build_stored_workload(), message, self.world.now))

    def end_pause(self) -> None:
        """Queue the Workload again after an eviction that Kueue follows with a pause."""
        self._write_status(kueue_protocol.build_requeued_status(self._build_stored_workload(), self.world.now))

    def _build_stored_workload(self) -> dict[str, Any]:
        assert self.workload is not None
        return {"metadata": {}, "spec": self.spec, "status": self.workload.content["status"]}

    def _write_status(self, status: dict[str, Any]) -> None:
        assert self.workload is not None
        self.world.put_child(dataclasses.replace(self.workload, content={**self.workload.content, "status": status}))
