"""An attempt: it begins, it is watched until it succeeds or fails, and the next attempt follows. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from topkube.job.status import MOST_LOST_WORKERS
from topkube_operator.model import names
from topkube_operator.model.status import Event
from topkube_operator.planning import pacing, pending
from topkube_operator.planning.attempt_status import begin_next_attempt, describe_attempt, mark_created
from topkube_operator.planning.causes import bad_nodes, failure_policy, failures
from topkube_operator.planning.causes.failures import AttemptPods, Verdict
from topkube_operator.planning.causes.pod_failures import Failure
from topkube_operator.planning.phases import attempt_children, ended
from topkube_operator.planning.phases.plan_steps import PlanSteps


def start_job(steps: PlanSteps) -> None:
    """Start the job, or resume it after a suspension."""
    draft = steps.draft
    if steps.is_queued:
        reason, message = "Admitted", "Kueue has admitted the job"
    else:
        reason, message = "Resumed", "spec.runPolicy.suspend is false"
    if draft.holds("Suspended"):
        draft.events.append(Event("Normal", reason, message if steps.is_queued else "the job continues"))
    draft.clear_condition("Suspended", reason, message)
    draft.start, draft.completion, draft.phase = steps.now, None, "Pending"
    begin_next_attempt(draft, "Starting", "pods are being made")


def continue_attempt(steps: PlanSteps) -> None:
    """Describe the current attempt in the status, or end it. Make or restore its pods and other objects."""
    draft, seconds = steps.draft, steps.policy.active_deadline_seconds
    attempt = steps.find_current_pods()
    if attempt.launcher is not None and not draft.holds("Created"):
        mark_created(draft, attempt)
    verdict = Verdict("running")
    if draft.holds("Created"):
        verdict = failures.assess_attempt(attempt, steps.observed, steps.now)
    if verdict.state == "succeeded":
        ended.complete_job(draft, attempt, verdict)
        return
    if seconds is not None and draft.start is not None:
        due = min(draft.start, steps.now) + timedelta(seconds=seconds)  # a status may hold any time
        if steps.now >= due:
            failure = failures.build_deadline_failure(seconds, attempt, steps.observed)
            ended.fail_job(steps, attempt, failure, "DeadlineExceeded", failure.describe())
            return
        steps.wakes.append(due)
    if verdict.until is not None:
        steps.wakes.append(verdict.until)
    if verdict.state == "running":
        verdict = _assess_waiting(steps, attempt)
    if verdict.state == "failed":
        assert verdict.failure is not None
        _end_attempt(steps, attempt, verdict.failure)
        return
    description = describe_attempt(draft, attempt, steps.observed, steps.job.spec.slots_per_worker)
    steps.start_seconds = description.start_seconds
    steps.wakes += [description.wake] if description.wake is not None else []
    if draft.holds("Created"):
        attempt_children.repair_children(steps, attempt)
    else:
        attempt_children.create_children(steps)


def _assess_waiting(steps: PlanSteps, attempt: AttemptPods) -> Verdict:
    """Return the verdict on an attempt that neither failed nor succeeded: its pods may have waited too long."""
    policy = steps.policy.failure_policy
    blocked = failure_policy.find_blocked_failure(policy, attempt) if steps.draft.holds("Created") else None
    if blocked is not None:
        return Verdict("failed", blocked)
    verdict = pending.assess_waiting(policy, attempt, steps.draft, steps.observed)
    expiry = bad_nodes.forget_expired_nodes(steps.draft)
    steps.wakes += [time for time in (verdict.until, expiry) if time is not None]
    return verdict


def _end_attempt(steps: PlanSteps, attempt: AttemptPods, failure: Failure) -> None:
    """End a failed attempt: begin the next attempt, now or after a pause, or end the job."""
    draft, limit = steps.draft, steps.policy.backoff_limit
    failure = ended.add_log(steps, attempt, failure)
    if steps.logs:
        return
    failure = replace(failure, node=failure_policy.find_node(failure, attempt, steps.observed))
    bad_nodes.record_failure(draft, failure, steps.observed)
    container = failure_policy.find_container(failure, attempt, steps.observed)
    decision = failure_policy.choose_consequence(steps.policy.failure_policy, failure, container, draft)
    if decision.action == "Restart" and draft.restarts >= limit:
        why = f"{limit} restarts (backoffLimit) are used up" if limit else ""
        decision = failure_policy.Decision("Fail", "BackoffLimitExceeded", why)
    if decision.action == "Fail":
        draft.set_replica_counts(attempt.launcher, [pod for pod in attempt.workers if pod], len(attempt.workers), None)
        message = "; ".join(part for part in (failure.describe(), decision.why) if part)
        ended.fail_job(steps, attempt, failure, decision.reason, message)
        return
    draft.first_failure = failure.to_status()
    draft.set_condition("Restarting", True, failure.reason, failure.describe())
    draft.phase = "Restarting"
    pacing.count_restart(draft, attempt)
    pause = pacing.compute_pause(draft, steps.observed.policy)
    message = f"{failure.describe()}; attempt {draft.attempt + 1} follows" + (f" in {pause:g} s" if pause else "")
    draft.set_condition("Restarting", True, failure.reason, message)
    if decision.action == "Ignore":
        draft.disruptions += 1
    else:
        draft.restarts += 1
    steps.restart_reason = failure.reason
    draft.events.append(Event("Warning", "Restarting", message))
    lost = [pod for pod in steps.observed.pods if pod.name in failure.lost]
    # Stored, because the operator may be killed before it has deleted all of them.
    draft.lost_workers = sorted({pod.index for pod in lost if pod.role == names.WORKER})[:MOST_LOST_WORKERS]
    begin_next_attempt(draft, failure.reason, failure.describe())
    steps.remove_pods(lost)
    if attempt.launcher is not None and attempt.launcher_container.exit_code is None and attempt.launcher not in lost:
        steps.remove_pods([attempt.launcher])  # the launcher may not know yet that its run has ended
    steps.observed = replace(
        steps.observed, pods=tuple(pod for pod in steps.observed.pods if pod.name not in failure.lost), report=None
    )
    attempt_children.create_children(steps)
