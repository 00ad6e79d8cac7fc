"""What to do about one TrainingJob: `plan` reads everything that exists and returns the next steps. Pure.

The planner does no I/O, reads no clock and uses no randomness, so tests can explore all its states in memory. It is
level-triggered: nothing depends on the event that woke the operator, so a lost event, a repeated call or a new operator
changes nothing. The caller writes `status` first. If that write fails, the rest of the plan is void. Therefore the
number of an attempt is stored before a pod of the attempt exists, and the names of pods contain the number. If the
operator is killed between two calls, the next operator continues from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from topkube.errors import JobError
from topkube.job import TrainingJob
from topkube_operator.children import datasets, placement, workloads
from topkube_operator.model import names, stored_job
from topkube_operator.model.observed import Container, Observed, Pod
from topkube_operator.model.plan import Deletion, LogRequest, ObjectRequest, Plan, Release, StatusPatch, releases
from topkube_operator.model.status import Event, StatusDraft, urgency
from topkube_operator.planning import accepted_spec, admission, attempts, cleanup, pacing, pending, queueing
from topkube_operator.planning.attempt_status import describe_attempt, mark_created, mark_pending
from topkube_operator.planning.causes import bad_nodes, failure_policy, failures
from topkube_operator.planning.causes.failures import AttemptPods, Verdict
from topkube_operator.planning.causes.pod_failures import Failure, read_ending

_REFUSED = "ChangeRefused"
_FINISHED = ("Succeeded", "Failed")
_FLAVOR_RETRY = timedelta(seconds=10)


def plan(job: Mapping[str, Any], observed: Observed, now: datetime) -> Plan:
    """Return what to do about `job`, the stored object as plain data, valid or not. `now` has a time zone."""
    metadata = job["metadata"]
    if metadata.get("deletionTimestamp"):
        return Plan(release=releases(observed.pods))
    if not stored_job.is_managed(job):
        return Plan(release=releases(pod for pod in observed.pods if pod.deletion is not None))
    generation = metadata.get("generation")
    draft = StatusDraft.read(job.get("status"), generation, observed.pods, now)
    try:
        accepted = accepted_spec.choose_spec(job, draft)
        return _Planner(accepted.job, metadata["uid"], draft, observed, now).decide(accepted)
    except JobError as error:
        # The message of admission, which did not check this object, or accepted a template that makes no valid pod.
        message = admission.refusal(job) or str(error)
        return _plan_invalid_job(
            job, StatusDraft.read(job.get("status"), generation, observed.pods, now), observed, message
        )


def _plan_invalid_job(job: Mapping[str, Any], draft: StatusDraft, observed: Observed, message: str) -> Plan:
    """Return the plan for an unusable spec: the status explains it, nothing is made, and nothing is removed before
    ttlSecondsAfterFinished has passed."""
    if not accepted_spec.has_ended(draft):
        draft.phase = "Failed"
        draft.set("Failed", True, accepted_spec.INVALID, message, "Warning")
        if any(pod.is_active for pod in observed.pods):  # an edit made the spec invalid while the job trains
            patch = draft.patch()
            return Plan(status=patch, events=tuple(draft.events), phase=draft.phase)
    draft.completion = draft.completion or draft.now
    left = accepted_spec.seconds_to_live(job, draft.completion, draft.now)
    if left is not None and left <= 0:
        return Plan(delete=(Deletion("TrainingJob", job["metadata"]["name"], job["metadata"]["uid"]),))
    return Plan(status=draft.patch(), events=tuple(draft.events), phase=draft.phase, requeue=left)


class _Planner:
    """One decision. Methods change `draft` and collect what to do."""

    def __init__(self, job: TrainingJob, uid: str, draft: StatusDraft, observed: Observed, now: datetime) -> None:
        self.job, self.uid, self.draft, self.observed, self.now = job, uid, draft, observed, now
        self.policy = job.spec.run_policy
        self.pods = observed.pods
        self.delete: list[Deletion] = []
        self.apply: list[list[dict[str, Any]]] = []
        self.wakes: list[datetime] = []
        self.logs: list[LogRequest] = []
        self.reads: list[ObjectRequest] = []
        self.patches: list[StatusPatch] = []
        self.is_queued = placement.is_admitted_as_a_whole(job, observed.policy)
        self.workload = workloads.find_workload(job, observed) if self.is_queued else None
        self.restart_reason = ""
        self.start_seconds: float | None = None

    def decide(self, accepted: accepted_spec.AcceptedJob) -> Plan:
        draft = self.draft
        self.report_spec(accepted.refusal)
        if draft.phase in _FINISHED:
            self.clean_up()
        elif self.has_succeeded():
            pass  # a job that has succeeded stays so, whatever the spec asks for since
        elif self.policy.suspend or accepted.replaced:
            self.suspend()
        elif self.is_queued and not workloads.is_admitted(self.workload):
            self.wait_for_admission()
        else:
            if draft.attempt == 0 or draft.holds("Suspended"):
                self.start()
            self.continue_attempt()
        return self.build_plan()

    def build_plan(self) -> Plan:
        draft = self.draft
        if self.logs:
            return Plan(logs=tuple(self.logs), phase=draft.phase)
        if self.reads:
            return Plan(reads=tuple(self.reads), phase=draft.phase)
        self.report_to_queue()
        release = self.find_releases()
        patch = draft.patch()
        delay = (min(self.wakes) - self.now).total_seconds() if self.wakes else None
        return Plan(
            status=patch,
            urgency=urgency(patch, draft.stored),
            release=release,
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

    def find_releases(self) -> tuple[Release, ...]:
        """Return the launcher pods whose result the status already contains."""
        number, due = self.draft.attempt, list[Pod]()
        for pod in self.pods:
            at = cleanup.release_time(pod, self.draft, self.observed, attempts.is_launcher_pod(pod, number))
            if pod.has_finalizer and at is not None:
                due += [pod] if at <= self.now else []
                self.wakes += [at] if at > self.now else []
        return releases(due)

    def report_spec(self, refusal: str) -> None:
        """Report that an invalid spec was corrected, that a change is refused, or that a refused change was
        reverted."""
        draft = self.draft
        if draft.holds("Failed", accepted_spec.INVALID):
            draft.set("Failed", False, "Corrected", "the spec is valid", "Normal")
            draft.completion = None
            if draft.phase == "Failed":
                draft.phase = "Pending" if draft.attempt else ""
        if draft.phase in _FINISHED:
            return
        before = draft.conditions.get("Failed", {})
        if refusal:
            draft.set("Failed", False, _REFUSED, refusal)
            if draft.conditions["Failed"]["message"] != before.get("message"):
                draft.events.append(Event("Warning", _REFUSED, refusal))
        elif before.get("reason") == _REFUSED:
            draft.set("Failed", False, "Corrected", "the spec is the accepted spec again", "Normal")

    # An attempt that continues.

    def start(self) -> None:
        """Start the job, or resume it after a suspension."""
        draft = self.draft
        if self.is_queued:
            reason, message = "Admitted", "Kueue has admitted the job"
        else:
            reason, message = "Resumed", "spec.runPolicy.suspend is false"
        if draft.holds("Suspended"):
            draft.events.append(Event("Normal", reason, message if self.is_queued else "the job continues"))
        draft.clear("Suspended", reason, message)
        draft.start, draft.completion, draft.phase = self.now, None, "Pending"
        self.begin_next_attempt("Starting", "pods are being made")

    def begin_next_attempt(self, reason: str, message: str) -> None:
        self.draft.attempt += 1
        self.draft.conditions.pop("Created", None)  # its time is the beginning of the attempt
        self.draft.set("Created", False, reason, message)
        self.draft.clear("Scheduled", reason, message)
        self.draft.set("Running", False, reason, message)

    def continue_attempt(self) -> None:
        draft, seconds = self.draft, self.policy.active_deadline_seconds
        attempt = attempts.find_current(self.job, draft, self.observed)
        if attempt.launcher is not None and not draft.holds("Created"):
            mark_created(draft, attempt)
        verdict = Verdict("running")
        if draft.holds("Created"):
            verdict = failures.assess_attempt(attempt, self.observed, self.now)
        if verdict.state == "succeeded":
            self.succeed(attempt, verdict)
            return
        if seconds is not None and draft.start is not None:
            due = draft.start + timedelta(seconds=seconds)
            if self.now >= due:
                failure = failures.deadline_failure(seconds, attempt, self.observed)
                self.fail(attempt, failure, "DeadlineExceeded", failure.sentence())
                return
            self.wakes.append(due)
        if verdict.until is not None:
            self.wakes.append(verdict.until)
        if verdict.state == "running":
            verdict = self.assess_waiting(attempt)
        if verdict.state == "failed":
            assert verdict.failure is not None
            self.end_attempt(attempt, verdict.failure)
            return
        description = describe_attempt(draft, attempt, self.observed, self.job.spec.slots_per_worker)
        self.start_seconds = description.start_seconds
        self.wakes += [description.wake] if description.wake is not None else []
        if draft.holds("Created"):
            self.repair_children(attempt)
        else:
            self.create_children()

    def assess_waiting(self, attempt: AttemptPods) -> Verdict:
        """Return the verdict on an attempt that neither failed nor succeeded: its pods may have waited too long."""
        policy = self.policy.failure_policy
        blocked = failure_policy.find_blocked_failure(policy, attempt) if self.draft.holds("Created") else None
        if blocked is not None:
            return Verdict("failed", blocked)
        verdict = pending.assess_waiting(policy, attempt, self.draft, self.observed)
        expiry = bad_nodes.forget_expired(self.draft)
        self.wakes += [time for time in (verdict.until, expiry) if time is not None]
        return verdict

    # Children.

    def create_children(self) -> None:
        """Make the children that the attempt lacks, as soon as it may begin. Reusable workers are kept."""
        due = pacing.earliest_start(self.draft, self.observed.policy)
        if self.now < due:
            self.wakes.append(due)
            return
        if datasets.uses_node_cache(self.job) and not self.observed.node_cache:
            message = datasets.node_cache_refusal(self.job)
            self.draft.set("Created", False, "NodeCacheNotAllowed", message, "Warning")
            mark_pending(self.draft, "Pending", "NodeCacheNotAllowed", message)
            return
        if not self.knows_assigned_nodes():
            return
        if stranded := attempts.find_stranded_pod(self.job, self.draft, self.observed):
            self.begin_next_attempt("NameInUse", f"{stranded}: {self.observed.troubles['Pod', stranded].message}")
        bad_nodes.choose_avoided_nodes(self.job, self.draft, self.observed)
        creation = attempts.plan_creation(self.job, self.uid, self.draft, self.observed)
        self.remove_pods(creation.outdated)
        if ending := attempts.find_replaced_pods(creation.outdated):
            message = f"Kueue accepts a replacement when the replaced pod has ended: {', '.join(ending)}"
            self.draft.set("Created", False, "WaitingForPods", message)
            mark_pending(self.draft, "Pending", "WaitingForPods", message)
            return
        self.apply += creation.stages
        self.report_troubles(None)

    def knows_assigned_nodes(self) -> bool:
        """Return True if the operator knows on which nodes Kueue wants the pods. Otherwise ask for the flavors, or
        report a flavor that cannot be read."""
        wanted = workloads.assigned_flavors(self.workload) if self.workload is not None else []
        unknown = [name for name in wanted if (workloads.FLAVOR, name) not in self.observed.objects]
        self.reads += [ObjectRequest(workloads.FLAVOR, name) for name in unknown]
        unreadable = [name for name in wanted if self.observed.objects.get((workloads.FLAVOR, name)) == {}]
        if unreadable:
            message = f"the ResourceFlavor {unreadable[0]}, which Kueue has assigned, cannot be read"
            self.draft.set("Created", False, "FlavorNotFound", message, "Warning")
            mark_pending(self.draft, "Pending", "FlavorNotFound", message)
            self.wakes.append(self.now + _FLAVOR_RETRY)
        return not unknown and not unreadable

    def repair_children(self, attempt: AttemptPods) -> None:
        """Restore a Secret, Service, policy or PodGroup that was deleted or changed, and remove pods of older
        attempts that were created late."""
        self.apply += attempts.plan_objects(self.job, self.uid, attempt, self.observed)
        self.remove_pods(cleanup.find_unused_pods(attempt, self.observed.pods))
        self.report_troubles(attempt)

    def report_troubles(self, attempt: AttemptPods | None) -> None:
        """Report children that cannot be made, or that others change. `attempt` is None until its pods are made."""
        draft, observed = self.draft, self.observed
        wanted = {(manifest["kind"], manifest["metadata"]["name"]) for stage in self.apply for manifest in stage}
        troubles = [
            (trouble.reason, key)
            for key, trouble in observed.troubles.items()
            if key in wanted or trouble.reason == "Contested"
        ]
        if troubles:
            reason, (kind, name) = min(troubles)
            message = f"{kind} {name}: {observed.troubles[kind, name].message}"
            if attempt is not None:
                draft.set("Created", True, reason, message, "Warning")
            elif reason != "Contested" or not any(self.apply):
                draft.set("Created", False, reason, message, "Warning")
                mark_pending(draft, "Pending", reason, message)
        elif attempt is not None and not draft.holds("Created", "PodsCreated"):
            mark_created(draft, attempt)
        elif not draft.holds("Created") and placement.asks_for_gang(self.job) and observed.policy.gang is None:
            message = "the cluster has no PodGroup (Volcano or scheduler-plugins): pods are scheduled one by one"
            draft.set("Created", False, "NoGangScheduler", message, "Warning")

    def remove_pods(self, pods: Iterable[Pod]) -> None:
        self.delete += [Deletion("Pod", pod.name, pod.uid) for pod in pods if pod.deletion is None]

    def remove_objects(self, *, keep_workload: bool = False) -> None:
        """Delete all children that are not pods. `keep_workload`: all but the Workload."""
        children = [child for child in self.observed.children.values() if not child.is_being_deleted]
        children = [child for child in children if not (keep_workload and child.kind == workloads.WORKLOAD)]
        self.delete += [Deletion(child.kind, child.name, child.uid) for child in children]

    # The end of an attempt.

    def end_attempt(self, attempt: AttemptPods, failure: Failure) -> None:
        """End a failed attempt: begin the next attempt, now or after a pause, or end the job."""
        draft, limit = self.draft, self.policy.backoff_limit
        failure = self.add_log(attempt, failure)
        if self.logs:
            return
        failure = replace(failure, node=failure_policy.find_node(failure, attempt, self.observed))
        bad_nodes.record_failure(draft, failure)
        container = failure_policy.find_container(failure, attempt, self.observed)
        decision = failure_policy.decide(self.policy.failure_policy, failure, container, draft)
        if decision.action == "Restart" and draft.restarts >= limit:
            why = f"{limit} restarts (backoffLimit) are used up" if limit else ""
            decision = failure_policy.Decision("Fail", "BackoffLimitExceeded", why)
        if decision.action == "Fail":
            draft.count(attempt.launcher, [pod for pod in attempt.workers if pod], len(attempt.workers), None)
            message = "; ".join(part for part in (failure.sentence(), decision.why) if part)
            self.fail(attempt, failure, decision.reason, message)
            return
        draft.first_failure = failure.to_status()
        draft.set("Restarting", True, failure.reason, failure.sentence())
        draft.phase = "Restarting"
        pacing.count_restart(draft, attempt)
        pause = pacing.pause(draft, self.observed.policy)
        message = f"{failure.sentence()}; attempt {draft.attempt + 1} follows" + (f" in {pause:g} s" if pause else "")
        draft.set("Restarting", True, failure.reason, message)
        if decision.action == "Ignore":
            draft.disruptions += 1
        else:
            draft.restarts += 1
        self.restart_reason = failure.reason
        draft.events.append(Event("Warning", "Restarting", message))
        lost = [pod for pod in self.observed.pods if pod.name in failure.lost]
        self.begin_next_attempt(failure.reason, failure.sentence())
        self.remove_pods(lost)
        if (
            attempt.launcher is not None
            and attempt.launcher_container.exit_code is None
            and attempt.launcher not in lost
        ):
            self.remove_pods([attempt.launcher])  # the launcher may not know yet that its run has ended
        self.observed = replace(
            self.observed, pods=tuple(pod for pod in self.observed.pods if pod.name not in failure.lost), report=None
        )
        self.create_children()

    def add_log(self, attempt: AttemptPods, failure: Failure) -> Failure:
        """Return the failure with the tail of its pod's log. Request the log if it has not been read."""
        pod = next((pod for pod in (attempt.launcher, *attempt.workers) if pod and pod.name == failure.pod), None)
        if failure.log_tail or pod is None or pod.node in self.observed.lost_nodes:
            return failure
        name = names.LAUNCHER if pod is attempt.launcher else pod.main_container
        if pod.failed_container and (pod.containers.get(name) or Container()).started is None:
            name = pod.failed_container  # an init container: the wrapped container has not written a log
        if (pod.containers.get(name) or Container()).started is None:
            return failure
        if pod.name not in self.observed.logs:
            self.logs.append(LogRequest(pod.name, name))
            return failure
        return replace(failure, log_tail=self.observed.logs[pod.name])

    def fail(self, attempt: AttemptPods, failure: Failure, reason: str, message: str) -> None:
        draft = self.draft
        failure = self.add_log(attempt, failure)
        if self.logs:
            return
        draft.first_failure = failure.to_status()
        self.finish("Failed", reason, message, "Warning")

    def has_succeeded(self) -> bool:
        """End the job if its launcher has ended with 0, even if the job was suspended before the operator saw that.
        Return True if it has."""
        attempt = attempts.find_current(self.job, self.draft, self.observed)
        if not self.draft.attempt or attempt.launcher_container.exit_code != 0:
            return False
        if not self.draft.holds("Created"):
            mark_created(self.draft, attempt)
        self.succeed(attempt, Verdict("succeeded", ending=read_ending(attempt.launcher_container)))
        return True

    def succeed(self, attempt: AttemptPods, verdict: Verdict) -> None:
        draft = self.draft
        draft.count(attempt.launcher, [pod for pod in attempt.workers if pod], len(attempt.workers), None)
        if verdict.ending is not None and verdict.ending.progress is not None:
            draft.progress = verdict.ending.progress.model_dump(by_alias=True, exclude_none=True, mode="json")
        if verdict.ending is not None and verdict.ending.cache is not None:
            draft.cache = verdict.ending.cache.model_dump(by_alias=True, exclude_none=True, mode="json")
        draft.workers_ready = f"{len(attempt.workers)}/{len(attempt.workers)}"
        self.finish("Succeeded", "Succeeded", f"all ranks ended with 0, attempt {attempt.number}", "Normal")

    def finish(self, phase: str, reason: str, message: str, event: Any) -> None:
        """End the job now, by the operator's clock: a node's clock may be wrong by hours, and ttlSecondsAfterFinished
        counts from this time."""
        draft = self.draft
        draft.phase, draft.completion, draft.avoided_nodes = phase, self.now, []
        draft.set(phase, True, reason, message, event)
        draft.set("Running", False, phase, message)
        draft.clear("Restarting", phase, message)
        draft.clear("Suspended", phase, message)

    # Nothing runs.

    def suspend(self) -> None:
        message = "spec.runPolicy.suspend is true: only the status is kept"
        if not self.policy.suspend:
            message = "the job was suspended, changed and resumed at once: the pods are made again"
        self.stop("Suspended", message, keep_workload=False)  # without its Workload, the job holds no quota

    def has_active_pods(self) -> bool:
        """Return True if pods of the job hold resources on nodes that exist."""
        return any(pod.is_active and pod.node not in self.observed.lost_nodes for pod in self.observed.pods)

    def wait_for_admission(self) -> None:
        """Keep the job without pods until Kueue admits its Workload, for the first time or after an eviction."""
        reason, message = queueing.describe_waiting(self.workload)
        key = (workloads.WORKLOAD, workloads.workload_name(self.job.name))
        trouble = self.observed.troubles.get(key)
        if self.workload is None and trouble is not None:
            reason, message = trouble.reason, f"{' '.join(key)}: {trouble.message}"
        self.stop(reason, message, keep_workload=True)
        if self.has_active_pods():
            return
        queue = self.job.metadata.labels[names.KUEUE_QUEUE]
        patch = queueing.give_quota_back(self.workload, self.now)
        if patch is not None:
            self.patches.append(patch)
        elif self.workload is None or queueing.may_move(self.workload, queue):
            reference = workloads.priority_reference(self.job)
            if reference is not None and reference not in self.observed.objects:
                self.reads.append(ObjectRequest(*reference))
                return
            policy, objects = self.observed.policy, self.observed.objects
            self.apply.append([workloads.build_workload(self.job, self.uid, policy, objects)])

    def report_to_queue(self) -> None:
        """Report to Kueue if the pods of an admitted job run, and the end of a job without pods."""
        if self.workload is None or self.workload.is_being_deleted:
            return
        patch = None
        if self.draft.phase in _FINISHED:
            patch = None if self.has_active_pods() else queueing.report_end(self.workload, self.draft)
        elif self.draft.phase != "Suspended":
            patch = queueing.report_pods(self.workload, self.draft)
        self.patches += [patch] if patch is not None else []

    def stop(self, reason: str, message: str, *, keep_workload: bool) -> None:
        """Remove all pods, and then all other objects."""
        draft = self.draft
        self.remove_pods(self.observed.pods)
        if not self.has_active_pods():
            # Until then, ranks save their state, and the policies must protect them.
            self.remove_objects(keep_workload=keep_workload)
        draft.phase, draft.start, draft.completion, draft.avoided_nodes = "Suspended", None, None, []
        draft.set("Suspended", True, reason, message, "Normal")
        draft.set("Running", False, "Suspended", message)
        for condition in ("Created", "Scheduled", "Restarting"):
            draft.clear(condition, "Suspended", message)
        workers = [pod for pod in self.observed.pods if pod.role == names.WORKER]
        launchers = [pod for pod in self.observed.pods if pod.role == names.LAUNCHER]
        draft.count(launchers[0] if launchers else None, workers, self.job.spec.workers, None)

    def clean_up(self) -> None:
        """Remove what a finished job leaves, and delete the job after ttlSecondsAfterFinished."""
        draft, completion = self.draft, self.draft.completion or self.now
        ttl = self.policy.ttl_seconds_after_finished
        if ttl is not None:
            due = completion + timedelta(seconds=ttl)
            if self.now >= due:
                self.delete.append(Deletion("TrainingJob", self.job.name, self.uid))
                return
            self.wakes.append(due)
        attempt = attempts.find_current(self.job, draft, self.observed)
        cleanup.update_final_counts(draft, attempt)
        pods, clean = self.observed.pods, self.policy.clean_pod_policy
        active = [pod for pod in pods if pod.is_active]
        if clean == "All":
            self.remove_pods(pods)
        elif clean == "Running":
            until = {pod.name: cleanup.natural_end_deadline(pod, attempt, draft) for pod in active}
            self.wakes += [time for time in until.values() if time > self.now]
            self.remove_pods(pod for pod in active if until[pod.name] <= self.now)
        elif draft.phase == "Failed" and attempt.launcher in active and attempt.launcher_container.exit_code is None:
            self.remove_pods([attempt.launcher])  # otherwise the run would continue after its deadline
        if not active or clean == "All":
            self.remove_objects(keep_workload=True)
