"""Cases of every alert for promtool: series, a minute, and True if the alert fires then."""

from __future__ import annotations

from typing import Any

from monitoring.alerts import Alert

JOB_LABELS = 'namespace="ml",training_job="gpt"'
Case = tuple[dict[str, str], int, bool | str]
"""The series and their values (in promtool's notation, one value per minute), the minute of the evaluation, and True if
the alert fires then. WITHOUT_RELEASE: the alert fires, and its labels name no release."""
WITHOUT_RELEASE = "without a release"


def name_job_series(name: str, **labels: str) -> str:
    other_labels = "".join(f',{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{JOB_LABELS}{other_labels}}}"


PROGRESS = {name_job_series("topkube_job_progress_ratio"): "0.5x60"}
STEPS = {
    name_job_series("topkube_step_seconds_sum", rank="0"): "600x60",
    name_job_series("topkube_step_seconds_count", rank="0"): "100x60",
}
LAST_STEP = name_job_series("topkube_last_step_timestamp_seconds", rank="0")
LAST_ACTIVITY = name_job_series("topkube_last_activity_timestamp_seconds", rank="1")
PHASE_TIMESTAMP = name_job_series("topkube_job_phase_timestamp_seconds")
RESTARTS = name_job_series("topkube_job_restarts")


def build_exchange(bound: str, seconds: str, step: str = "0+60x60") -> dict[str, str]:
    return {
        name_job_series("topkube_exchange_bound_seconds_total", rank="0"): bound,
        name_job_series("topkube_step_phase_seconds_total", rank="0", phase="inter"): seconds,
        name_job_series("topkube_step_seconds_sum", rank="0"): step,
    }


def build_restarts(first: str, second: str) -> dict[str, str]:
    """Return the restarts of a job as two replicas of the operator serve them, one after the other."""
    return {
        name_job_series("topkube_job_restarts", pod="operator-1"): first,
        name_job_series("topkube_job_restarts", pod="operator-2"): second,
    }


def build_skipped_steps(skips: str) -> dict[str, str]:
    return {
        name_job_series("topkube_skipped_steps_total"): skips,
        name_job_series("topkube_step_seconds_count", rank="0"): "0+60x60",
        name_job_series("topkube_step_seconds_count", rank="1"): "0+60x60",
    }


def build_disk_cache(hits: str, requests: str = "0+100x200") -> dict[str, str]:
    return {
        name_job_series("topkube_cache_hits_total", tier="disk"): hits,
        name_job_series("topkube_cache_requests_total", tier="disk"): requests,
    }


def build_phase(name: str) -> dict[str, str]:
    return {name_job_series("topkube_job_phase", phase=name): "1x60"}


OPERATOR_LABELS = 'namespace="home",release="r"'
AGENT_LABELS = 'release="r",node="n"'


def name_operator_series(name: str, other_labels: str = "") -> str:
    return f"{name}{{{OPERATOR_LABELS}{other_labels}}}"


def build_reconciles(errors: str) -> dict[str, str]:
    return {
        name_operator_series("topkube_reconciles_total", ',outcome="error"'): errors,
        name_operator_series("topkube_reconciles_total", ',outcome="unchanged"'): "0+60x60",
    }


def build_calls(code: str, errors: str) -> dict[str, str]:
    return {
        name_operator_series("topkube_api_requests_total", f',method="GET",code="{code}"'): errors,
        name_operator_series("topkube_api_requests_total", ',method="GET",code="200"'): "0+60x60",
    }


def build_reviews(**outcomes: str) -> dict[str, str]:
    return {
        name_operator_series("topkube_admission_reviews_total", f',outcome="{outcome}"'): values
        for outcome, values in outcomes.items()
    }


CREATED = name_operator_series("topkube_jobs_created_total")
REVIEWS_OF_NEW_REPLICA = name_operator_series("topkube_admission_reviews_total", ',outcome="allowed",pod="new"')
BUILD_INFO = name_operator_series("topkube_operator_build_info", ',version="1"')


CASES: dict[str, list[Case]] = {
    "TopKubeJobStalled": [
        ({LAST_STEP: "60x60", **STEPS, **PROGRESS}, 15, True),
        ({LAST_STEP: "60x60", **STEPS, **PROGRESS}, 9, False),
        ({LAST_STEP: "0+60x60", **STEPS, **PROGRESS}, 30, False),
        ({LAST_STEP: "60x60", **STEPS, name_job_series("topkube_job_progress_ratio"): "1x60"}, 30, False),
        (
            {
                LAST_STEP: "60x60",
                name_job_series("topkube_step_seconds_sum"): "3600x60",
                name_job_series("topkube_step_seconds_count"): "2x60",
            },
            30,
            False,
        ),
        ({LAST_STEP: "60x60 _x60"}, 100, False),
        ({LAST_STEP: "60x60", **STEPS, **PROGRESS, **build_phase("Running")}, 15, True),
        # A worker that waits for the next attempt serves the last step of the attempt before.
        ({LAST_STEP: "60x60", **STEPS, **PROGRESS, **build_phase("Restarting")}, 30, False),
        # An evaluation on all ranks: no step, and collectives. Then a rank hangs.
        ({LAST_STEP: "60x60", **STEPS, **PROGRESS, LAST_ACTIVITY: "0+60x30 1800x60"}, 30, False),
        ({LAST_STEP: "60x60", **STEPS, **PROGRESS, LAST_ACTIVITY: "0+60x30 1800x60"}, 39, False),
        ({LAST_STEP: "60x60", **STEPS, **PROGRESS, LAST_ACTIVITY: "0+60x30 1800x60"}, 45, True),
        ({LAST_STEP: "60x60", **STEPS, **PROGRESS, LAST_ACTIVITY.replace("gpt", "bert"): "0+60x60"}, 30, True),
    ],
    "TopKubeJobReportsNoSteps": [
        ({PHASE_TIMESTAMP: "0x60", **build_phase("Running")}, 40, True),
        ({PHASE_TIMESTAMP: "0x60", **build_phase("Running")}, 20, False),
        ({PHASE_TIMESTAMP: "0x60", **build_phase("Running"), LAST_STEP: "60x60"}, 40, False),
        ({PHASE_TIMESTAMP: "0x60", **build_phase("Suspended")}, 40, False),
        ({}, 40, False),
    ],
    "TopKubeJobFailed": [
        ({name_job_series("topkube_job_failed_timestamp_seconds"): "600x90"}, 11, True),
        ({name_job_series("topkube_job_failed_timestamp_seconds"): "600x90"}, 71, False),
        ({}, 11, False),
    ],
    "TopKubeCheckpointFailed": [
        ({name_job_series("topkube_job_checkpoint_failed"): "0x10 1x50"}, 40, True),
        ({name_job_series("topkube_job_checkpoint_failed"): "1x10 0x50"}, 40, False),
        ({}, 40, False),
    ],
    "TopKubeCheckpointTooOld": [
        ({name_job_series("topkube_job_last_checkpoint_timestamp_seconds"): "0x200"}, 130, True),
        ({name_job_series("topkube_job_last_checkpoint_timestamp_seconds"): "0x200"}, 100, False),
        ({name_job_series("topkube_job_last_checkpoint_timestamp_seconds"): "0+60x200"}, 130, False),
        ({}, 130, False),
    ],
    "TopKubeRestartStorm": [
        ({RESTARTS: "2x10 3x10 4x10 5x30"}, 40, True),
        ({RESTARTS: "5x60"}, 40, False),
        ({RESTARTS: "0x10 1x10 2x40"}, 40, False),
        ({RESTARTS: "0x9 1x10 2x10 3x90"}, 60, True),
        ({RESTARTS: "0x9 1x10 2x10 3x90"}, 95, False),
        ({RESTARTS: "5x30 _x2 0x40"}, 45, False),  # the job was deleted and created again
        ({RESTARTS: "5x30 0x40"}, 45, False),
        ({RESTARTS: "5x20 0x10 1x5 2x5 3x40"}, 50, True),  # and the new job restarts too
        ({RESTARTS: "5x20 0x10 1x5 2x40"}, 50, False),
        (build_restarts(first="0x9 1x10 2x5 stale", second="_x27 2 3x30"), 45, True),  # another replica leads
        (build_restarts(first="0x9 1x15 stale", second="_x25 1x5 2x30"), 45, False),
        (build_restarts(first="5x20 stale", second="_x27 5x40"), 45, False),  # the operator starts again
        ({RESTARTS: "5x60", RESTARTS.replace("gpt", "bert"): "2x60"}, 40, False),  # two jobs
        ({RESTARTS: "2x10 3x10 4x10 5x30", RESTARTS.replace("gpt", "bert"): "0x10 1x50"}, 40, True),
        ({}, 40, False),
    ],
    "TopKubeNodeAvoided": [
        ({name_job_series("topkube_job_avoided_node_info", node="a", reason="HardwareFault"): "_x9 1x60"}, 30, True),
        ({name_job_series("topkube_job_avoided_node_info", node="a", reason="HardwareFault"): "_x9 1x60"}, 11, False),
        ({name_job_series("topkube_job_avoided_node_info", node="a", reason="HardwareFault"): "1x20 _x40"}, 40, False),
        ({}, 40, False),
    ],
    "TopKubeJobPendingTooLong": [
        ({PHASE_TIMESTAMP: "0x60", **build_phase("Pending")}, 40, True),
        ({PHASE_TIMESTAMP: "0x60", **build_phase("Pending")}, 20, False),
        ({PHASE_TIMESTAMP: "0x60", **build_phase("Restarting")}, 40, True),  # the phase until ranks run again
        ({PHASE_TIMESTAMP: "0x60", **build_phase("Suspended")}, 40, False),
        ({PHASE_TIMESTAMP: "0x60", **build_phase("Running")}, 40, False),
        ({PHASE_TIMESTAMP: "0x60"}, 40, False),
    ],
    "TopKubeGradientSkipped": [
        (build_skipped_steps("0+6x60"), 40, True),
        (build_skipped_steps("0+1x60"), 40, False),
        ({name_job_series("topkube_skipped_steps_total"): "0+6x60"}, 40, False),
    ],
    "TopKubeWeightsDiffer": [
        ({name_job_series("topkube_differing_ranks"): "0x10 1x50"}, 40, True),
        ({name_job_series("topkube_differing_ranks"): "0x60"}, 40, False),
        ({}, 40, False),
    ],
    "TopKubeCommunicationSlow": [
        (build_exchange("0+5x60", "0+40x60"), 40, True),
        (build_exchange("0+20x60", "0+40x60"), 40, False),
        (build_exchange("0+1x60", "0+5x60"), 40, False),
        (build_exchange("_x60", "0+40x60"), 40, False),
    ],
    "TopKubeCacheCorruption": [
        ({name_job_series("topkube_cache_corruptions_total"): "0x10 1x50"}, 40, True),
        ({name_job_series("topkube_cache_corruptions_total"): "3x100"}, 90, False),
        # The first scrape comes after the first shard; a worker that ended does not hide it.
        ({name_job_series("topkube_cache_corruptions_total"): "_x10 1x100"}, 40, True),
        ({name_job_series("topkube_cache_corruptions_total"): "_x10 1x100"}, 80, False),
        ({name_job_series("topkube_cache_corruptions_total"): "_x10 1x5 stale"}, 40, True),
        ({name_job_series("topkube_cache_corruptions_total"): "_x10 1x5 0x100"}, 40, True),  # the next attempt
        ({name_job_series("topkube_cache_corruptions_total"): "_x10 0x100"}, 40, False),
        ({}, 40, False),
    ],
    "TopKubeCacheHitRatioLow": [
        (build_disk_cache("0+10x200"), 120, True),
        (build_disk_cache("0+10x200"), 50, False),
        (build_disk_cache("0+90x200"), 120, False),
        (build_disk_cache("0+1x200", "0+10x200"), 120, False),
        ({name_job_series("topkube_cache_hits_total", tier="disk"): "0+10x200"}, 120, False),
    ],
    "TopKubeCacheDiskFull": [
        ({name_job_series("topkube_cache_tier_state", tier="disk", state="frozen", pod="a"): "0x5 1x60"}, 30, True),
        ({name_job_series("topkube_cache_tier_state", tier="disk", state="dropped", pod="a"): "0x5 1x60"}, 10, False),
        ({name_job_series("topkube_cache_tier_state", tier="disk", state="frozen", pod="a"): "0x60"}, 30, False),
        ({name_job_series("topkube_cache_tier_state", tier="memory", state="frozen", pod="a"): "1x60"}, 30, False),
        ({name_job_series("topkube_cache_tier_state", tier="disk", state="open", pod="a"): "1x60"}, 30, False),
        ({}, 30, False),
    ],
    "TopKubeNodeCacheFull": [
        ({f"topkube_node_cache_missing_bytes{{{AGENT_LABELS}}}": "5000x60"}, 30, True),
        ({f"topkube_node_cache_missing_bytes{{{AGENT_LABELS}}}": "5000x15 0x60"}, 30, False),
        ({}, 30, False),
    ],
    "TopKubeNodeCacheStuck": [
        ({f"topkube_node_cache_last_pass_timestamp_seconds{{{AGENT_LABELS}}}": "0x60"}, 30, True),
        ({f"topkube_node_cache_last_pass_timestamp_seconds{{{AGENT_LABELS}}}": "0+60x60"}, 30, False),
        ({}, 30, False),
    ],
    "TopKubeOperatorDown": [
        ({'topkube_runtime_build_info{version="1"}': "1x60"}, 10, WITHOUT_RELEASE),
        ({BUILD_INFO: "1x20 _x60"}, 40, True),
        ({BUILD_INFO: "1x20 _x60", BUILD_INFO.replace('"r"', '"other"'): "1x90"}, 40, True),
        ({BUILD_INFO: "1x60"}, 10, False),
        ({BUILD_INFO: "1x20 _x5 1x60"}, 40, False),
        ({}, 10, WITHOUT_RELEASE),
        ({}, 3, False),
    ],
    "TopKubeNoLeader": [
        (
            {
                name_operator_series("topkube_leader", ',pod="a"'): "0x60",
                name_operator_series("topkube_leader", ',pod="b"'): "0x60",
            },
            5,
            True,
        ),
        (
            {
                name_operator_series("topkube_leader", ',pod="a"'): "0x60",
                name_operator_series("topkube_leader", ',pod="b"'): "1x60",
            },
            5,
            False,
        ),
        (
            {
                name_operator_series("topkube_leader"): "0x60",
                name_operator_series("topkube_leader").replace('"r"', '"other"'): "1x60",
            },
            5,
            True,
        ),
        ({}, 5, False),
    ],
    "TopKubeWorkQueueSlow": [
        ({name_operator_series("topkube_work_queue_oldest_seconds"): "0x5 90x60"}, 30, True),
        ({name_operator_series("topkube_work_queue_oldest_seconds"): "0x25 90x60"}, 27, False),
        ({name_operator_series("topkube_work_queue_oldest_seconds"): "2x60"}, 30, False),
        ({}, 30, False),
    ],
    "TopKubeApiErrors": [
        (build_calls("500", "0+30x60"), 30, True),
        (build_calls("unreachable", "0+30x60"), 30, True),
        (build_calls("404", "0+30x60"), 30, False),
        (build_calls("409", "0+30x60"), 30, False),
        (build_calls("503", "0+1x60"), 30, False),
        ({}, 30, False),
    ],
    "TopKubeAdmissionFailing": [
        (build_reviews(allowed="0+5x60", error="0+1x60"), 30, True),
        (build_reviews(allowed="0+5x60", error="0x60"), 30, False),
        ({name_operator_series("topkube_admission_published"): "0x60"}, 30, True),
        ({name_operator_series("topkube_admission_published"): "1x60"}, 30, False),
        ({**build_reviews(allowed="0x60", refused="0+5x60"), CREATED: "0x5 1x60"}, 20, True),
        ({**build_reviews(allowed="0x5 1x60"), CREATED: "0x5 1x60"}, 20, False),
        ({**build_reviews(allowed="0x60"), CREATED: "0x60"}, 20, False),
        ({CREATED: "0x5 1x60"}, 20, False),
        # A new replica reviews a job before its first scrape, so its counter begins at 1.
        ({**build_reviews(allowed="0x90"), REVIEWS_OF_NEW_REPLICA: "_x5 1x90", CREATED: "0x5 1x90"}, 20, False),
        ({**build_reviews(allowed="0x90"), REVIEWS_OF_NEW_REPLICA: "_x5 1 stale", CREATED: "0x5 1x90"}, 20, False),
        ({**build_reviews(allowed="0x90"), REVIEWS_OF_NEW_REPLICA: "_x5 0x90", CREATED: "0x5 1x90"}, 20, True),
        ({**build_reviews(allowed="0x90"), REVIEWS_OF_NEW_REPLICA: "_x5 1x90", CREATED: "0x45 1x90"}, 60, True),
        ({}, 30, False),
    ],
    "TopKubeAdmissionCertificateExpires": [
        ({name_operator_series("topkube_admission_certificate_expiry_timestamp_seconds"): "500000x60"}, 30, True),
        ({name_operator_series("topkube_admission_certificate_expiry_timestamp_seconds"): "800000x60"}, 30, False),
        ({}, 30, False),
    ],
    "TopKubeReconcileErrors": [
        (build_reconciles("0+30x60"), 30, True),
        (build_reconciles("0+3x60"), 30, False),
        ({name_operator_series("topkube_reconciles_total", ',outcome="unchanged"'): "0+60x60"}, 30, False),
        ({}, 30, False),
    ],
}


def build_alert_labels(alert: Alert, fires: bool | str = True) -> dict[str, str]:
    """Return the labels of the alert that fires."""
    labels = {"severity": alert.severity}
    if alert.name == "TopKubeNodeAvoided":
        labels |= {"namespace": "ml", "node": "a"}
    elif "by (namespace, training_job)" in alert.expression:
        labels |= {"namespace": "ml", "training_job": "gpt"}
    elif "by (release, node)" in alert.expression:
        labels |= {"release": "r", "node": "n"}
    elif fires is True:
        labels |= {"namespace": "home", "release": "r"}
    return labels


def build_test(alert: Alert, case: Case) -> dict[str, Any]:
    series, minute, fires = case
    expected = [{"exp_labels": build_alert_labels(alert, fires), "exp_annotations": {}}] if fires else []
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": alert.name, "exp_alerts": expected}],
    }
