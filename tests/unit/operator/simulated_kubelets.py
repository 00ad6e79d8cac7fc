"""The scheduler and the kubelets of the simulated cluster, and what ranks and launcher do in the pods."""

from __future__ import annotations

import dataclasses
from typing import Any

from simulated_api_server import SimulatedApiServer
from simulated_job import UID

from topkube.launch import contract
from topkube_operator.model.observed import Container, LauncherReport, Pod

NODES = ("node-a", "node-b", "node-c", "node-d")
RANK_FAILED = {"pod": "train-worker-1-1-uid-1", "rank": 3, "reason": "Error", "exitCode": 3, "message": "rank 3 failed"}


class SimulatedKubelets(SimulatedApiServer):
    """Scheduler and kubelets act when `schedule` and `run` are called."""

    def __init__(self, stored: dict[str, Any]) -> None:
        super().__init__(stored)
        self.report: LauncherReport | None = None
        """The last answer of the launcher to the operator."""

    def schedule(self) -> None:
        """Assign every pod a node that is not lost, and that the pod may use."""
        for name, pod in self.pods.items():
            free = [node for node in NODES if node not in self.lost | self.avoided.get(name, set())]
            if not pod.node and free:
                # Any free node will do: the length of the name chooses the same node in every run.
                self.change(
                    name,
                    node=free[len(name.removesuffix(f"-{UID}")) % len(free)],
                    scheduled=self.now,
                    scheduling_message="",
                )

    def run(self) -> None:
        """Act as the kubelets: start scheduled pods and remove deleted pods."""
        for name, pod in list(self.pods.items()):
            if pod.node in self.lost or not pod.node:
                continue
            if pod.deletion is not None:
                for container in pod.containers if pod.phase == "Running" and pod.finalizers else ():
                    self.end(name, 143, container)
                self._finish_deletion(name)
            elif pod.phase == "Pending":
                started = {container_name: Container(started=self.now) for container_name in self.list_containers(pod)}
                self.change(name, phase="Running", ready=True, address="10.0.0.1", containers=started)

    def list_containers(self, pod: Pod) -> list[str]:
        """Return the names of a pod's containers. The pod of rank 0 may hold the launcher too."""
        is_colocated = pod.role == "worker" and pod.workers > 0
        return [pod.main_container, "launcher"] if is_colocated else [pod.main_container]

    def end(self, name: str, code: int, container: str = "", **more: Any) -> None:
        """End a container of a running pod."""
        pod = self.pods[name]
        container = container or pod.main_container
        if pod.phase != "Running" or pod.node in self.lost:
            return
        before = pod.containers[container]
        if before.exit_code is not None:
            return
        ended = dataclasses.replace(before, exit_code=code, ended=self.now, **more)
        containers = {**pod.containers, container: ended}
        codes = [item.exit_code for item in containers.values()]
        phase = "Running" if None in codes else ("Succeeded" if not any(codes) else "Failed")
        self.change(name, containers=containers, phase=phase, ready=phase == "Running")

    @property
    def launcher(self) -> Pod | None:
        stored = (self.job or {}).get("status") or {}
        return next((pod for pod in self.pods.values() if pod.is_launcher_of(stored.get("attempt", 0))), None)

    def end_launcher(self, code: int, failure: dict[str, Any] | None = None) -> None:
        pod = self.launcher
        if pod is not None and pod.phase == "Running":
            ending = contract.Ending.model_validate(
                {
                    "attempt": pod.attempt,
                    "state": "Failed" if code else "Succeeded",
                    "exitCode": code,
                    "firstFailure": failure,
                }
            )
            self.end(pod.name, code, "launcher", ended_message=ending.to_message())

    def report_state(self, state: str, missing: tuple[int, ...] = ()) -> None:
        """Let the launcher of the current attempt answer the operator."""
        pod = self.launcher
        if (
            pod is not None
            and pod.phase == "Running"
            and pod.launcher_container.exit_code is None
            and pod.node not in self.lost
        ):
            self.report = LauncherReport(pod.attempt, state, pod.workers - len(missing), missing, self.now)
