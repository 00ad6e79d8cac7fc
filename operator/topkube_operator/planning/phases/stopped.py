"""The plan for a job that is suspended or that Kueue has not admitted, and the reports to Kueue. Pure."""

from __future__ import annotations

from topkube_operator.children import workloads
from topkube_operator.model import names
from topkube_operator.model.plan import ObjectRequest
from topkube_operator.planning import queueing
from topkube_operator.planning.phases.plan_steps import FINISHED, PlanSteps


def suspend_job(steps: PlanSteps) -> None:
    """Remove all objects of the job. The status stays."""
    message = "spec.runPolicy.suspend is true: only the status is kept"
    if not steps.policy.suspend:
        message = "the job was suspended, changed and resumed at once: the pods are made again"
    _stop_job(steps, "Suspended", message, keep_workload=False)  # without its Workload, the job holds no quota


def wait_for_admission(steps: PlanSteps) -> None:
    """Keep the job without pods until Kueue admits its Workload, for the first time or after an eviction."""
    reason, message = queueing.describe_waiting(steps.workload)
    key = (workloads.WORKLOAD, workloads.name_workload(steps.job.name))
    trouble = steps.observed.troubles.get(key)
    if steps.workload is None and trouble is not None:
        reason, message = trouble.reason, f"{' '.join(key)}: {trouble.message}"
    _stop_job(steps, reason, message, keep_workload=True)
    if steps.has_active_pods():
        return
    queue = steps.job.metadata.labels[names.KUEUE_QUEUE]
    patch = queueing.build_quota_return(steps.workload, steps.now)
    if patch is not None:
        steps.patches.append(patch)
    elif steps.workload is None or queueing.may_change_queue(steps.workload, queue):
        reference = workloads.find_priority_reference(steps.job)
        if reference is not None and reference not in steps.observed.objects:
            steps.reads.append(ObjectRequest(*reference))
            return
        policy, objects = steps.observed.policy, steps.observed.objects
        steps.apply.append([workloads.build_workload(steps.job, steps.uid, policy, objects)])


def report_to_queue(steps: PlanSteps) -> None:
    """Report to Kueue if the pods of an admitted job run, and the end of a job without pods."""
    if steps.workload is None or steps.workload.is_being_deleted:
        return
    patch = None
    if steps.draft.phase in FINISHED:
        patch = None if steps.has_active_pods() else queueing.build_end_report(steps.workload, steps.draft)
    elif steps.draft.phase != "Suspended":
        patch = queueing.build_pods_report(steps.workload, steps.draft)
    steps.patches += [patch] if patch is not None else []


def _stop_job(steps: PlanSteps, reason: str, message: str, *, keep_workload: bool) -> None:
    """Remove all pods, and then all other objects."""
    draft = steps.draft
    steps.remove_pods(steps.observed.pods)
    if not steps.has_active_pods():
        # Until then, ranks save their state, and the policies must protect them.
        steps.remove_objects(keep_workload=keep_workload)
    draft.phase, draft.start, draft.completion, draft.avoided_nodes = "Suspended", None, None, []
    draft.set_condition("Suspended", True, reason, message, "Normal")
    draft.set_condition("Running", False, "Suspended", message)
    for condition in ("Created", "Scheduled", "Restarting"):
        draft.clear_condition(condition, "Suspended", message)
    workers = [pod for pod in steps.observed.pods if pod.role == names.WORKER]
    launchers = [pod for pod in steps.observed.pods if pod.role == names.LAUNCHER]
    draft.set_replica_counts(launchers[0] if launchers else None, workers, steps.job.spec.workers, None)
