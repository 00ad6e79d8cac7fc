"""The consequence of a failed attempt: the job fails, the restart counts, or the restart does not count. Pure.

`spec.runPolicy.failurePolicy` decides. If no rule matches, disruptions do not count, failures count against
backoffLimit, and errors of the script that another attempt does not repair end the job.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from topkube.job import FailurePolicy, FailureRule
from topkube.job.fields.failure_policy import AVOIDED_NODE_NEEDED, SCRIPT_ERRORS, Action
from topkube.timestamps import format_timestamp, parse_timestamp
from topkube_operator.model import names
from topkube_operator.model.observed import Observed, Pod
from topkube_operator.model.status import StatusDraft
from topkube_operator.planning.causes.failures import AttemptPods
from topkube_operator.planning.causes.pod_failures import Failure, find_blocked_container

FAILED_BY_RULE = "FailurePolicy"
TOO_MANY_DISRUPTIONS = "MaxDisruptionsExceeded"
"""Reasons of the Failed condition."""


@dataclass(frozen=True)
class Decision:
    """The consequence of a failure. `reason` and `why` describe the end of the job if the action is Fail."""

    action: Action
    reason: str = ""
    why: str = ""


def choose_consequence(policy: FailurePolicy, failure: Failure, container: str, draft: StatusDraft) -> Decision:
    """Return what follows `failure`, whose container is named `container`. If the restart counts as a disruption, it is
    stored in `draft.recent_disruptions`."""
    decision = _apply_rules(policy, failure, container, draft)
    if decision.action != "Ignore" or failure.reason == AVOIDED_NODE_NEEDED:
        return decision
    return _limit_disruptions(policy, draft) or decision


def find_rule(policy: FailurePolicy, failure: Failure, container: str) -> int | None:
    """Return the index of the first rule that matches a failure; None if no rule matches."""
    return next((index for index, rule in enumerate(policy.rules) if _matches_failure(rule, failure, container)), None)


def find_container(failure: Failure, attempt: AttemptPods, observed: Observed) -> str:
    """Return the name of the container that failed. Ranks run in the wrapped container of a worker."""
    pod = _find_pod(failure.pod, attempt, observed)
    if failure.rank is not None:
        workers = [worker for worker in (pod, *attempt.workers) if worker is not None and worker.role == names.WORKER]
        return workers[0].main_container if workers else ""
    return names.LAUNCHER if pod is None else pod.failed_container or pod.main_container


def find_node(failure: Failure, attempt: AttemptPods, observed: Observed) -> str:
    """Return the node of the pod that failed; empty if it is not known."""
    pod = _find_pod(failure.pod, attempt, observed)
    return pod.node if pod is not None else ""


def find_blocked_failure(policy: FailurePolicy, attempt: AttemptPods) -> Failure | None:
    """Return the failure of an attempt with a container that cannot start, if a rule matches it. Without a rule, the
    attempt waits: somebody may push the image, or create the Secret."""
    for pod in (attempt.launcher, *attempt.workers):
        blocked = find_blocked_container([pod]) if pod is not None else None
        if pod is None or blocked is None:
            continue
        reason, message = blocked
        failure = Failure(reason, message.removeprefix(f"{pod.name}, "), pod.name)
        if find_rule(policy, failure, "") is not None:
            pods = [other for other in (attempt.launcher, *attempt.workers) if other is not None]
            blocked_pods = [other.name for other in pods if (find_blocked_container([other]) or ("",))[0] == reason]
            return Failure(reason, failure.message, pod.name, lost=frozenset(blocked_pods))
    return None


def _apply_rules(policy: FailurePolicy, failure: Failure, container: str, draft: StatusDraft) -> Decision:
    index = find_rule(policy, failure, container)
    if index is not None:
        why = f"spec.runPolicy.failurePolicy.rules[{index}] fails the job"
        return Decision(policy.rules[index].action, FAILED_BY_RULE, why)
    if failure.disruption:
        return Decision("Ignore")
    if failure.reason in SCRIPT_ERRORS and not (draft.progress or {}).get("step"):
        why = (
            "another attempt would end in the same way, so the job is not restarted. "
            f"Next: correct the script, or add a rule for {failure.reason} to spec.runPolicy.failurePolicy"
        )
        return Decision("Fail", FAILED_BY_RULE, why)
    return Decision("Restart")


def _limit_disruptions(policy: FailurePolicy, draft: StatusDraft) -> Decision | None:
    """Count a disruption. Return the end of the job if that is one too many within the window."""
    if policy.max_disruptions is None:
        draft.recent_disruptions = []
        return None
    oldest = draft.now - timedelta(seconds=policy.disruption_window_seconds)
    times = [(text, parse_timestamp(text)) for text in draft.recent_disruptions]
    recent = [text for text, time in times if time is not None and time > oldest]
    draft.recent_disruptions = [*recent, format_timestamp(draft.now)][-policy.max_disruptions - 1 :]
    count = len(draft.recent_disruptions)
    if count <= policy.max_disruptions:
        return None
    why = (
        f"{count} disruptions in {policy.disruption_window_seconds} s are more than maxDisruptions "
        f"({policy.max_disruptions})"
    )
    return Decision("Fail", TOO_MANY_DISRUPTIONS, why)


def _matches_failure(rule: FailureRule, failure: Failure, container: str) -> bool:
    if rule.on_reasons is not None and failure.reason not in rule.on_reasons:
        return False
    codes = rule.on_exit_codes
    if codes is None:
        return True
    if failure.exit_code is None or failure.disruption:  # a drained rank ends with 143, whatever it did
        return False
    if codes.container_name is not None and codes.container_name != container:
        return False
    return (failure.exit_code in codes.values) == (codes.operator == "In")


def _find_pod(name: str, attempt: AttemptPods, observed: Observed) -> Pod | None:
    pods = [pod for pod in (attempt.launcher, *attempt.workers) if pod is not None]
    return next((pod for pod in pods if pod.name == name), None) or observed.last_seen.get(name)
