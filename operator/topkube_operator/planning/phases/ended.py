"""The end of a job: its result in the status, and what is removed afterwards. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from topkube_operator.model import names
from topkube_operator.model.observed import Container
from topkube_operator.model.plan import Deletion, LogRequest
from topkube_operator.model.status import StatusDraft
from topkube_operator.planning import cleanup
from topkube_operator.planning.attempt_status import mark_created
from topkube_operator.planning.causes.failures import AttemptPods, Verdict
from topkube_operator.planning.causes.pod_failures import Failure, read_ending
from topkube_operator.planning.phases.plan_steps import PlanSteps


def fail_job(steps: PlanSteps, attempt: AttemptPods, failure: Failure, reason: str, message: str) -> None:
    """End the job with a failure. If the log of the failed pod is needed, request only the log."""
    draft = steps.draft
    failure = add_log(steps, attempt, failure)
    if steps.logs:
        return
    draft.first_failure = failure.to_status()
    _end_job(draft, "Failed", reason, message, "Warning")


def complete_if_succeeded(draft: StatusDraft, attempt: AttemptPods) -> bool:
    """Complete the job if its launcher has ended with 0, even if the job was suspended, or its spec became invalid,
    before the operator saw that. Return True if the job is complete."""
    if not draft.attempt or attempt.launcher_container.exit_code != 0:
        return False
    if not draft.holds("Created"):
        mark_created(draft, attempt)
    complete_job(draft, attempt, Verdict("succeeded", ending=read_ending(attempt.launcher_container)))
    return True


def complete_job(draft: StatusDraft, attempt: AttemptPods, verdict: Verdict) -> None:
    """End the job: all its ranks have succeeded. The launcher's last report becomes its progress."""
    draft.clear_condition("Failed", "Succeeded", "all ranks ended with 0")
    draft.set_replica_counts(attempt.launcher, [pod for pod in attempt.workers if pod], len(attempt.workers), None)
    if verdict.ending is not None and verdict.ending.progress is not None:
        draft.progress = verdict.ending.progress.model_dump(by_alias=True, exclude_none=True, mode="json")
    if verdict.ending is not None and verdict.ending.cache is not None:
        draft.cache = verdict.ending.cache.model_dump(by_alias=True, exclude_none=True, mode="json")
    draft.workers_ready = f"{len(attempt.workers)}/{len(attempt.workers)}"
    _end_job(draft, "Succeeded", "Succeeded", f"all ranks ended with 0, attempt {attempt.number}", "Normal")


def _end_job(draft: StatusDraft, phase: str, reason: str, message: str, event: Any) -> None:
    """End the job now, by the operator's clock: a node's clock may be wrong by hours, and ttlSecondsAfterFinished
    counts from this time."""
    draft.phase, draft.completion = phase, draft.now
    draft.avoided_nodes, draft.lost_workers = [], []
    draft.set_condition(phase, True, reason, message, event)
    draft.set_condition("Running", False, phase, message)
    draft.clear_condition("Restarting", phase, message)
    draft.clear_condition("Suspended", phase, message)


def clean_up_job(steps: PlanSteps) -> None:
    """Remove what a finished job leaves, and delete the job after ttlSecondsAfterFinished."""
    draft, completion = steps.draft, steps.draft.completion or steps.now
    ttl = steps.policy.ttl_seconds_after_finished
    if ttl is not None:
        due = min(completion, steps.now) + timedelta(seconds=ttl)  # a status may hold any time
        if steps.now >= due:
            steps.delete.append(Deletion("TrainingJob", steps.job.name, steps.uid))
            return
        steps.wakes.append(due)
    attempt = steps.find_current_pods()
    cleanup.update_final_counts(draft, attempt)
    pods, clean = steps.observed.pods, steps.policy.clean_pod_policy
    active = [pod for pod in pods if pod.is_active]
    if clean == "All":
        steps.remove_pods(pods)
    elif clean == "Running":
        until = {pod.name: cleanup.compute_natural_end(pod, attempt, draft) for pod in active}
        steps.wakes += [time for time in until.values() if time > steps.now]
        steps.remove_pods(pod for pod in active if until[pod.name] <= steps.now)
    elif draft.phase == "Failed" and attempt.launcher in active and attempt.launcher_container.exit_code is None:
        steps.remove_pods([attempt.launcher])  # otherwise the run would continue after its deadline
    if not active or clean == "All":
        steps.remove_objects(keep_workload=True)


def add_log(steps: PlanSteps, attempt: AttemptPods, failure: Failure) -> Failure:
    """Return the failure with the tail of its pod's log. Request the log if it has not been read."""
    pod = next((pod for pod in (attempt.launcher, *attempt.workers) if pod and pod.name == failure.pod), None)
    if failure.log_tail or pod is None or pod.node in steps.observed.lost_nodes:
        return failure
    name = names.LAUNCHER if pod is attempt.launcher else pod.main_container
    if pod.failed_container and (pod.containers.get(name) or Container()).started is None:
        name = pod.failed_container  # an init container: the wrapped container has not written a log
    if (pod.containers.get(name) or Container()).started is None:
        return failure
    if pod.name not in steps.observed.logs:
        steps.logs.append(LogRequest(pod.name, name))
        return failure
    return replace(failure, log_tail=steps.observed.logs[pod.name])
