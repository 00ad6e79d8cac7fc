"""What to do about one TrainingJob: `plan` looks at all there is and says what should be next. Pure.

No I/O, no clock and no randomness: the whole state space is tested in memory. Level-triggered: nothing depends on which
event woke the operator, so a lost event, a repeated call or a new operator changes nothing. The caller writes `status`
first; when that fails, the rest of the plan is void. The number of an attempt is therefore stored before a pod of it
exists, and names of pods carry it: killed between any two calls, the operator goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube_operator import admission, attempts, datasets, failures, following, names, placement
from topkube_operator.failures import Failure, Verdict
from topkube_operator.observed import Container, Observed, Pod, Report
from topkube_operator.plans import Deletion, LogRequest, Plan
from topkube_operator.status import Event, Record, urgency

_REFUSED = "ChangeRefused"
_TERMINAL = ("Succeeded", "Failed")
_QUICK = timedelta(seconds=60)
_LONGEST_BACKOFF = 300.0
_OWN_ENDING = timedelta(seconds=10)
"""How long workers may take to end by themselves after a success, before cleanPodPolicy ends them."""


def plan(job: Mapping[str, Any], observed: Observed, now: datetime) -> Plan:
    """`job`: the stored object as plain data, valid or not. `now`: with a time zone."""
    metadata = job["metadata"]
    if metadata.get("deletionTimestamp") or not managed(job):
        return Plan()
    generation = metadata.get("generation")
    record = Record.read(job.get("status"), generation, observed.pods, now)
    try:
        followed, refused = following.followed(job, record)
        return _Planner(followed, metadata["uid"], record, observed, now).decide(refused)
    except JobError as error:
        # The words of admission, which did not see this object, or saw it with a template that no pod comes from.
        words = admission.refusal(job) or str(error)
        return _invalid(job, Record.read(job.get("status"), generation, observed.pods, now), observed, words)


def managed(job: Mapping[str, Any]) -> bool:
    """Whether the job is ours to reconcile."""
    spec = job.get("spec")
    policy = spec.get("runPolicy") if isinstance(spec, dict) else None
    manager = policy.get("managedBy") if isinstance(policy, dict) else None
    return manager is None or not isinstance(manager, str) or manager == names.MANAGER


def _invalid(job: Mapping[str, Any], record: Record, observed: Observed, words: str) -> Plan:
    """A spec that cannot be used: said in the status, nothing made, nothing taken away before its time is over."""
    if not following.over(record):
        record.phase = "Failed"
        record.set("Failed", True, following.INVALID, words, "Warning")
        if any(pod.active for pod in observed.pods):  # it was edited to nonsense and trains on
            patch = record.patch()
            return Plan(status=patch, events=tuple(record.events), phase=record.phase)
    record.completion = record.completion or record.now
    left = following.time_left(job, record.completion, record.now)
    if left is not None and left <= 0:
        return Plan(delete=(Deletion("TrainingJob", job["metadata"]["name"], job["metadata"]["uid"]),))
    return Plan(status=record.patch(), events=tuple(record.events), phase=record.phase, requeue=left)


class _Planner:
    """One decision. Methods change `record` and collect what is to be done."""

    def __init__(self, job: TrainingJob, uid: str, record: Record, observed: Observed, now: datetime) -> None:
        self.job, self.uid, self.record, self.observed, self.now = job, uid, record, observed, now
        self.policy = job.spec.run_policy
        self.delete: list[Deletion] = []
        self.apply: list[list[dict[str, Any]]] = []
        self.wakes: list[datetime] = []
        self.logs: list[LogRequest] = []
        self.restarted = ""
        self.started: float | None = None

    def decide(self, refused: str = "") -> Plan:
        """`refused`: why the last change of the spec is not followed."""
        record = self.record
        self.note_spec(refused)
        if record.phase in _TERMINAL:
            self.finished()
        elif self.policy.suspend:
            self.suspended()
        else:
            if record.attempt == 0 or record.holds("Suspended"):
                self.begin()
            self.active()
        return self.result()

    def result(self) -> Plan:
        record = self.record
        if self.logs:
            return Plan(logs=tuple(self.logs), phase=record.phase)
        patch = record.patch()
        delay = (min(self.wakes) - self.now).total_seconds() if self.wakes else None
        return Plan(
            status=patch,
            urgency=urgency(patch, record.stored),
            delete=tuple(self.delete),
            apply=tuple(tuple(stage) for stage in self.apply if stage),
            events=tuple(record.events),
            requeue=None if delay is None else max(0.05, delay),
            phase=record.phase,
            restarted=self.restarted,
            started=self.started,
        )

    def note_spec(self, refused: str) -> None:
        """Says that an invalid spec has been corrected, that a change is refused, or that it was taken back."""
        record = self.record
        if record.holds("Failed", following.INVALID):
            record.set("Failed", False, "Corrected", "the spec is valid", "Normal")
            record.completion = None
            if record.phase == "Failed":
                record.phase = "Pending" if record.attempt else ""
        if record.phase in _TERMINAL:
            return
        before = record.conditions.get("Failed", {})
        if refused:
            record.set("Failed", False, _REFUSED, refused)
            if record.conditions["Failed"]["message"] != before.get("message"):
                record.events.append(Event("Warning", _REFUSED, refused))
        elif before.get("reason") == _REFUSED:
            record.set("Failed", False, "Corrected", "the spec is the accepted one again", "Normal")

    # An attempt that goes on.

    def begin(self) -> None:
        """Starts the job, or starts it again after a suspension."""
        record = self.record
        resumed = record.holds("Suspended")
        record.clear("Suspended", "Resumed", "spec.runPolicy.suspend is false")
        if resumed:
            record.events.append(Event("Normal", "Resumed", "the job goes on"))
        record.start, record.completion, record.phase = self.now, None, "Pending"
        self.next_attempt("Starting", "pods are being made")

    def next_attempt(self, reason: str, message: str) -> None:
        self.record.attempt += 1
        self.record.set("Created", False, reason, message)
        self.record.clear("Scheduled", reason, message)
        self.record.set("Running", False, reason, message)

    def active(self) -> None:
        record, seconds = self.record, self.policy.active_deadline_seconds
        attempt = attempts.current(self.job, record, self.observed)
        if attempt.launcher is not None and not record.holds("Created"):
            count = len(attempt.workers) + (attempt.launcher.role == names.LAUNCHER)
            record.set("Created", True, "PodsCreated", f"{count} pods of attempt {attempt.number}", "Normal")
        verdict = Verdict("running")
        if record.holds("Created"):
            verdict = failures.judge(attempt, self.observed, self.now)
        if verdict.state == "succeeded":
            self.succeed(attempt, verdict)
            return
        if seconds is not None and record.start is not None:
            due = record.start + timedelta(seconds=seconds)
            if self.now >= due:
                failure = failures.deadline(seconds, attempt, self.observed)
                self.fail(attempt, failure, "DeadlineExceeded", failure.sentence())
                return
            self.wakes.append(due)
        if verdict.until is not None:
            self.wakes.append(verdict.until)
        if verdict.state == "over":
            assert verdict.failure is not None
            self.over(attempt, verdict.failure)
            return
        self.describe(attempt)
        if record.holds("Created"):
            self.repair(attempt)
        else:
            self.create()

    def describe(self, attempt: failures.Attempt) -> None:
        """Phase, conditions, counts and progress of an attempt that goes on."""
        record, report = self.record, self.report(attempt)
        pods = [pod for pod in (attempt.launcher, *attempt.workers) if pod is not None]
        record.count(attempt.launcher, [pod for pod in attempt.workers if pod], len(attempt.workers), report)
        waiting = [pod for pod in pods if pod.unschedulable and not pod.node]
        blocked = failures.blocked(pods)
        if waiting:
            more = f" ({len(waiting)} of {len(pods)} pods wait)" if len(waiting) > 1 else ""
            reason, words = waiting[0].unscheduled, f"{waiting[0].name}: {waiting[0].unschedulable}"
            record.set("Scheduled", False, reason, words + more, "Normal" if reason == "SchedulingGated" else "Warning")
        elif record.holds("Created") and all(pod.node for pod in pods):
            record.set("Scheduled", True, "PodsScheduled", "all pods have a node")
        runs = report is not None and report.state in ("Running", "Succeeded")
        if runs or (report is None and record.phase == "Running"):
            self.runs(attempt)
        elif blocked:
            self.pending("Pending", *blocked, "Warning")
        elif waiting:
            self.pending("Pending", waiting[0].unscheduled, f"{waiting[0].name}: {waiting[0].unschedulable}")
        elif record.holds("Created") and all(pod.container.started for pod in pods):
            words = "all pods run; ranks are starting"
            if report is not None and report.state == "Waiting" and report.missing:
                words = failures.missing_words(attempt, report.missing)
            self.pending("Starting", "Starting", words)
        elif record.holds("Created"):
            self.pending("Pending", "PodsPending", "pods are being started")
        if report is not None:
            record.progress = dict(report.progress) if report.progress else record.progress
            record.cache = dict(report.cache) if report.cache else record.cache

    def runs(self, attempt: failures.Attempt) -> None:
        record = self.record
        if record.phase == "Pending":  # who watches sees every phase, however fast the ranks are up
            self.pending("Starting", "Starting", "all pods run; ranks are starting")
            return
        if record.phase != "Running" and record.attempt == 1 and record.start is not None:
            self.started = (self.now - record.start).total_seconds()
        record.phase = "Running"
        ranks = len(attempt.workers) * self.job.spec.slots_per_worker
        words = f"{ranks} ranks on {len(attempt.workers)} workers, attempt {attempt.number}"
        record.set("Running", True, "Running", words, "Normal")
        record.clear("Restarting", "Running", words)

    def pending(self, phase: str, reason: str, message: str, event: Any = None) -> None:
        record = self.record
        record.phase = "Restarting" if record.holds("Restarting") else phase
        before = record.conditions.get("Running", {})
        if before.get("reason") == reason and str(before.get("message")).startswith(message):
            message = str(before["message"])  # the kubelet alternates between two wordings of one trouble
        record.set("Running", False, reason, message, event)

    def report(self, attempt: failures.Attempt) -> Report | None:
        report = self.observed.report
        return report if report is not None and report.attempt == attempt.number else None

    # Children.

    def create(self) -> None:
        """Makes what the attempt lacks: workers that live on are kept."""
        if datasets.uses_node_cache(self.job) and not self.observed.node_cache:
            words = datasets.refusal(self.job)
            self.record.set("Created", False, "NodeCacheNotAllowed", words, "Warning")
            self.pending("Pending", "NodeCacheNotAllowed", words)
            return
        made = attempts.create(self.job, self.uid, self.record, self.observed)
        self.remove(made.outdated)
        self.apply += made.stages
        self.troubles()

    def repair(self, attempt: failures.Attempt) -> None:
        """Puts back a Secret, Service, policy or PodGroup that was deleted or changed."""
        self.apply += attempts.surroundings(self.job, self.uid, attempt, self.observed)
        self.troubles()

    def troubles(self) -> None:
        """Reports children that cannot be made."""
        wanted = {(one["kind"], one["metadata"]["name"]) for stage in self.apply for one in stage}
        found = [(key, one) for key, one in self.observed.troubles.items() if key in wanted]
        if found:
            (kind, name), trouble = min(found, key=lambda one: (one[1].reason, one[0]))
            reason, words = trouble.reason, f"{kind} {name}: {trouble.message}"
            if not self.record.holds("Created"):
                self.record.set("Created", False, reason, words, "Warning")
                self.pending("Pending", reason, words)
        elif not self.record.holds("Created") and placement.wants_gang(self.job) and self.observed.policy.gang is None:
            words = "the cluster has no PodGroup (Volcano or scheduler-plugins): pods are scheduled one by one"
            self.record.set("Created", False, "NoGangScheduler", words, "Warning")

    def remove(self, pods: Iterable[Pod]) -> None:
        self.delete += [Deletion("Pod", pod.name, pod.uid) for pod in pods if pod.deletion is None]

    def remove_surroundings(self) -> None:
        self.delete += [Deletion(child.kind, child.name, child.uid) for child in self.observed.children.values()]

    # The end of an attempt.

    def over(self, attempt: failures.Attempt, failure: Failure) -> None:
        """After a failed attempt: the next one, now or after a while, or the end of the job."""
        record, limit = self.record, self.policy.backoff_limit
        failure = self.with_log(attempt, failure)
        if self.logs:
            return
        if not failure.disruption and record.restarts >= limit:
            record.count(attempt.launcher, [pod for pod in attempt.workers if pod], len(attempt.workers), None)
            words = (
                f"{failure.sentence()}; {limit} restarts (backoffLimit) are used up" if limit else failure.sentence()
            )
            self.fail(attempt, failure, "BackoffLimitExceeded", words)
            return
        record.first_failure = failure.to_status()
        words = f"{failure.sentence()}; attempt {record.attempt + 1} follows"
        record.set("Restarting", True, failure.reason, words)
        record.phase = "Restarting"
        due = self.pause(attempt, failure)
        if self.now < due:
            record.set("Running", False, failure.reason, failure.sentence())
            self.wakes.append(due)
            return
        if failure.disruption:
            record.disruptions += 1
        else:
            record.restarts += 1
        self.restarted = failure.reason
        record.events.append(Event("Warning", "Restarting", words))
        lost = [pod for pod in self.observed.pods if pod.name in failure.lost]
        self.next_attempt(failure.reason, failure.sentence())
        self.remove(lost)
        self.observed = replace(
            self.observed, pods=tuple(pod for pod in self.observed.pods if pod.name not in failure.lost), report=None
        )
        self.create()

    def pause(self, attempt: failures.Attempt, failure: Failure) -> datetime:
        """When the next attempt may begin: at once after the first failure, or where the attempt lasted. The same at
        every look: it counts from the time of the failure, or where that is unknown (a pod that its kubelet refused)
        from the attempt's beginning."""
        before = self.record.restarts + self.record.disruptions
        if before == 0 or attempt.launcher is None:
            return self.now
        began = attempt.launcher.created
        ended = failure.at or began
        if ended - began >= _QUICK:
            return self.now
        seconds = self.observed.policy.backoff_seconds * 2.0 ** min(before - 1, 16)
        return ended + timedelta(seconds=min(seconds, _LONGEST_BACKOFF))

    def with_log(self, attempt: failures.Attempt, failure: Failure) -> Failure:
        """The failure with the tail of its pod's log; asks for it where it has not been read."""
        pod = next((pod for pod in (attempt.launcher, *attempt.workers) if pod and pod.name == failure.pod), None)
        if failure.log_tail or pod is None or pod.node in self.observed.lost_nodes:
            return failure
        name = names.LAUNCHER if pod is attempt.launcher else pod.main
        if pod.failed_container and (pod.containers.get(name) or Container()).started is None:
            name = pod.failed_container  # an init container: the wrapped one has said nothing
        if (pod.containers.get(name) or Container()).started is None:
            return failure
        if pod.name not in self.observed.logs:
            self.logs.append(LogRequest(pod.name, name))
            return failure
        return replace(failure, log_tail=self.observed.logs[pod.name])

    def fail(self, attempt: failures.Attempt, failure: Failure, reason: str, words: str) -> None:
        record = self.record
        failure = self.with_log(attempt, failure)
        if self.logs:
            return
        record.first_failure = failure.to_status()
        self.end("Failed", reason, words, "Warning", self.now)

    def succeed(self, attempt: failures.Attempt, verdict: Verdict) -> None:
        record = self.record
        record.count(attempt.launcher, [pod for pod in attempt.workers if pod], len(attempt.workers), None)
        if verdict.ending is not None and verdict.ending.progress is not None:
            record.progress = verdict.ending.progress.model_dump(by_alias=True, exclude_none=True, mode="json")
        if verdict.ending is not None and verdict.ending.cache is not None:
            record.cache = verdict.ending.cache.model_dump(by_alias=True, exclude_none=True, mode="json")
        ended = attempt.launching.ended or self.now
        words = f"all ranks ended with 0, attempt {attempt.number}"
        self.end("Succeeded", "Succeeded", words, "Normal", min(ended, self.now))

    def end(self, phase: str, reason: str, words: str, event: Any, at: datetime) -> None:
        record = self.record
        record.phase, record.completion = phase, at
        record.set(phase, True, reason, words, event)
        record.set("Running", False, phase, words)
        record.clear("Restarting", phase, words)

    # Nothing runs.

    def suspended(self) -> None:
        record = self.record
        words = "spec.runPolicy.suspend is true: nothing is kept but the status"
        self.remove(self.observed.pods)
        if not any(pod.active and pod.node not in self.observed.lost_nodes for pod in self.observed.pods):
            self.remove_surroundings()  # until then ranks save their state, and nobody else may reach them
        record.phase, record.start, record.completion = "Suspended", None, None
        record.set("Suspended", True, "Suspended", words, "Normal")
        record.set("Running", False, "Suspended", words)
        for condition in ("Created", "Scheduled", "Restarting"):
            record.clear(condition, "Suspended", words)
        left = [pod for pod in self.observed.pods if pod.role == names.WORKER]
        launchers = [pod for pod in self.observed.pods if pod.role == names.LAUNCHER]
        record.count(launchers[0] if launchers else None, left, self.job.spec.workers, None)

    def finished(self) -> None:
        """Cleans up after the end, and deletes the job when its time is over."""
        record, completion = self.record, self.record.completion or self.now
        ttl = self.policy.ttl_seconds_after_finished
        if ttl is not None:
            due = completion + timedelta(seconds=ttl)
            if self.now >= due:
                self.delete.append(Deletion("TrainingJob", self.job.name, self.uid))
                return
            self.wakes.append(due)
        attempt = attempts.current(self.job, record, self.observed)
        self.settle_counts(attempt)
        pods, clean = self.observed.pods, self.policy.clean_pod_policy
        active = [pod for pod in pods if pod.active]
        if clean == "All":
            self.remove(pods)
        elif clean == "Running" and active:
            due = completion + _OWN_ENDING
            if record.phase == "Succeeded" and self.now < due:
                self.wakes.append(due)
                return
            self.remove(active)
        elif clean == "None" and record.phase == "Failed" and attempt.launcher in active:
            self.remove([attempt.launcher])  # or the run would go on beyond its deadline
        if not active or clean == "All":
            self.remove_surroundings()

    def settle_counts(self, attempt: failures.Attempt) -> None:
        """Counts pods that still end; those that were cleaned up stay counted as they ended."""
        record, before = self.record, self.record.replicas
        if not any(pod is not None for pod in (attempt.launcher, *attempt.workers)):
            if before:
                record.replicas = {role: {**counts, "active": 0, "ready": 0} for role, counts in before.items()}
            return
        record.count(attempt.launcher, [pod for pod in attempt.workers if pod], len(attempt.workers), None)
        assert record.replicas is not None
        for role, counts in (before or {}).items():
            for end in ("succeeded", "failed"):
                now = record.replicas.setdefault(role, {"active": 0, "ready": 0, "succeeded": 0, "failed": 0})
                now[end] = max(now[end], counts.get(end, 0) if isinstance(counts, dict) else 0)
