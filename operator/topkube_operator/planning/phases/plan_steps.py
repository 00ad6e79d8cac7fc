"""The plan while it is made: a copy of the job's status that changes, and the steps collected so far. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from topkube.job import TrainingJob
from topkube_operator.children import placement, workloads
from topkube_operator.model.observed import Observed, Pod
from topkube_operator.model.plan import Deletion, LogRequest, ObjectRequest, Plan, StatusPatch
from topkube_operator.model.status import StatusDraft, choose_urgency
from topkube_operator.planning import attempts, cleanup
from topkube_operator.planning.causes.failures import AttemptPods

FINISHED = ("Succeeded", "Failed")


class PlanSteps:
    """The contents of a plan that is being made. The functions of this room change `draft` and add steps."""

    def __init__(self, job: TrainingJob, uid: str, draft: StatusDraft, observed: Observed, now: datetime) -> None:
        job = workloads.keep_queue(job, observed)
        self.job, self.uid, self.draft, self.observed, self.now = job, uid, draft, observed, now
        self.policy = job.spec.run_policy
        self.pods = observed.pods
        """All pods. When an attempt ends, `observed` loses the pods that ended with it."""
        self.delete: list[Deletion] = []
        self.apply: list[list[dict[str, Any]]] = []
        self.wakes: list[datetime] = []
        """Times at which to plan again."""
        self.logs: list[LogRequest] = []
        self.reads: list[ObjectRequest] = []
        self.patches: list[StatusPatch] = []
        self.is_queued = placement.is_admitted_as_a_whole(job, observed.policy)
        self.workload = workloads.find_workload(job, observed) if self.is_queued else None
        self.restart_reason = ""
        self.start_seconds: float | None = None

    def remove_pods(self, pods: Iterable[Pod]) -> None:
        self.delete += [Deletion("Pod", pod.name, pod.uid) for pod in pods if pod.deletion is None]

    def remove_objects(self, *, keep_workload: bool = False) -> None:
        """Delete all children that are not pods. `keep_workload`: all but the Workload."""
        children = [child for child in self.observed.children.values() if not child.is_being_deleted]
        children = [child for child in children if not (keep_workload and child.kind == workloads.WORKLOAD)]
        self.delete += [Deletion(child.kind, child.name, child.uid) for child in children]

    def has_active_pods(self) -> bool:
        """Return True if pods of the job hold resources on nodes that exist."""
        return any(pod.is_active and pod.node not in self.observed.lost_nodes for pod in self.observed.pods)

    def find_current_pods(self) -> AttemptPods:
        """Return the pods of the attempt whose number is in the status."""
        return attempts.find_current_pods(self.job.name, self.uid, self.job.spec.workers, self.draft, self.observed)

    def to_plan(self) -> Plan:
        """Return the finished plan. If the planner needs logs or objects first, it contains only these requests."""
        draft = self.draft
        if self.logs:
            return Plan(logs=tuple(self.logs), phase=draft.phase)
        if self.reads:
            return Plan(reads=tuple(self.reads), phase=draft.phase)
        releases, due = cleanup.find_due_releases(self.pods, draft, self.observed)
        self.wakes += due
        patch = draft.build_patch()
        delay = (min(self.wakes) - self.now).total_seconds() if self.wakes else None
        return Plan(
            status=patch,
            urgency=choose_urgency(patch, draft.stored),
            release=releases,
            end_groups=cleanup.find_group_ends(draft, self.pods),
            delete=tuple(self.delete),
            patches=tuple(self.patches),
            apply=tuple(tuple(stage) for stage in self.apply if stage),
            events=tuple(draft.events),
            requeue=None if delay is None else max(0.05, delay),
            phase=draft.phase,
            restart_reason=self.restart_reason,
            start_seconds=self.start_seconds,
        )
