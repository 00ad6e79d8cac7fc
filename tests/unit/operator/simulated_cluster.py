"""A cluster in memory that carries out plans: the operator and the owner of a job act on a simulated API server.

The test decides who acts next: operator, owner, scheduler, kubelets, ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from simulated_api_server import apply_merge_patch
from simulated_job import build_job
from simulated_kubelets import NODES, SimulatedKubelets

from topkube_operator.model.nodes import NodeFailure
from topkube_operator.model.observed import Observed, Policy
from topkube_operator.model.plan import Plan
from topkube_operator.planning import planner


class Crash(Exception):
    """The operator was killed."""


class SimulatedCluster(SimulatedKubelets):
    """A simulated cluster with its operator. The operator dies after `crash_after` writes."""

    def __init__(self, stored: dict[str, Any], policy: Policy | None = None) -> None:
        super().__init__(stored)
        self.policy = policy or Policy(seed=b"s" * 32)
        self.paused: set[tuple[str, str]] = set()
        self.logs: dict[str, str] = {}
        self.known: dict[tuple[str, str], dict[str, Any]] = {}
        """The objects that the operator has read."""
        self.node_cache = False
        self.hostnames: dict[str, str] = {}
        """The labels of nodes whose label is not their name."""
        self.node_faults: dict[str, str] = {}
        self.node_failures: tuple[NodeFailure, ...] = ()
        self.events: list[str] = []
        self.crash_after: int | None = None
        self.resumes = 0
        """How often a test has resumed the job."""

    # The operator.

    def observe(self) -> Observed:
        return Observed(
            pods=tuple(self.pods.values()),
            children=dict(self.children),
            troubles=dict(self.troubles),
            paused=frozenset(self.paused),
            lost_nodes=frozenset(self.lost),
            report=self.report,
            removed_at=dict(self.removed_at),
            last_seen=dict(self.last_seen),
            logs=dict(self.logs),
            policy=self.policy,
            objects=dict(self.known),
            node_cache=self.node_cache,
            nodes=len(NODES) - len(self.lost),
            hostnames={node: node for node in NODES} | self.hostnames,
            node_faults=dict(self.node_faults),
            node_failures=self.node_failures,
        )

    def plan(self) -> Plan:
        assert self.job is not None
        return planner.plan(self.job, self.observe(), self.now)

    def reconcile(self, rounds: int = 12) -> Plan:
        """Reconcile as the controller does with one key. Return the last plan."""
        for _ in range(rounds):
            if self.job is None:
                return Plan()
            plan = self.plan()
            if plan.logs:
                self.logs |= {request.pod: f"the log of {request.pod}" for request in plan.logs}
                continue
            if plan.reads:
                self.known |= {
                    (read.kind, read.name): self.objects.get((read.kind, read.name), {}) for read in plan.reads
                }
                continue
            if plan.is_empty:
                return plan
            try:
                if not self.carry_out(plan):
                    return plan
            except Crash:
                self.report, self.troubles, self.logs, self.removed_at, self.last_seen = None, {}, {}, {}, {}
                self.crash_after = None
        self.violations.append(f"no rest after {rounds} rounds: {plan}")
        return plan

    def carry_out(self, plan: Plan) -> bool:
        """Carry out a plan. Return True if everything could be made."""
        assert self.job is not None
        if plan.status:
            self._write()
            status = apply_merge_patch(self.job.get("status"), plan.status)
            before = (self.job.get("status") or {}).get("attempt", 0)
            if isinstance(before, int) and status.get("attempt", 0) < before:
                self.violations.append(f"attempt {status.get('attempt')} after {before}")
            self.job["status"] = status
            self.events += [event.reason for event in plan.events]
        for end in plan.end_groups:
            self._write()
            if end.name in self.pods:
                self.change(end.name, is_retriable=False)
        for release in plan.release:
            self._write()
            self.release(release.name, release.uid)
        for deletion in plan.delete:
            self._write()
            self.delete(deletion.kind, deletion.name, deletion.uid)
        for change in plan.patches:
            self._write()
            child = self.children[change.kind, change.name]
            assert (child.uid, child.version) == (change.uid, change.version)
            content = {**child.content, "status": apply_merge_patch(child.content["status"], change.status)}
            self.put_child(dataclasses.replace(child, content=content))
        self.troubles = {key: trouble for key, trouble in self.troubles.items() if trouble.reason == "Contested"}
        for stage in plan.apply:
            for manifest in stage:
                self._write()
                self.apply(manifest)
            if any(trouble.reason != "Contested" for trouble in self.troubles.values()):
                return False
        return True

    def _write(self) -> None:
        if self.crash_after is not None:
            self.crash_after -= 1
            if self.crash_after < 0:
                raise Crash

    # The owner of the job.

    @property
    def status(self) -> dict[str, Any]:
        return (self.job or {}).get("status") or {}

    def find_condition(self, kind: str) -> dict[str, Any]:
        return next((condition for condition in self.status.get("conditions", []) if condition["type"] == kind), {})

    def edit(self, **spec: Any) -> None:
        if self.job is not None:
            self.job["spec"] = {**self.job["spec"], **spec}
            self.job["metadata"]["generation"] += 1

    def edit_policy(self, **policy: Any) -> None:
        if self.job is not None:
            self.edit(runPolicy={**self.job["spec"].get("runPolicy", {}), **policy})

    def start_ranks(self) -> None:
        """Reconcile until ranks run."""
        self.reconcile()
        self.schedule()
        self.run()
        self.reconcile()
        self.report_state("Running")
        self.reconcile()


def start_running_job(**spec: Any) -> SimulatedCluster:
    """Return a cluster with a job whose ranks run."""
    world = SimulatedCluster(build_job(**spec))
    world.start_ranks()
    assert world.status["phase"] == "Running", world.status
    return world
