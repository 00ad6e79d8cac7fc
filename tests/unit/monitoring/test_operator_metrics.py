"""The operator's metrics: series of the stored jobs, and counts of events."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from topkube_operator.control.job_series import PHASES
from topkube_operator.control.metrics import METRICS, OperatorMetrics
from topkube_operator.control.operator import Operator, OperatorOptions
from topkube_operator.watch.api_connection import ApiError
from topkube_operator.watch.work_queue import WorkQueue


def build_job(name: str, phase: str | None = None, **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ml", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": metadata, "status": {"phase": phase, **status} if phase else {}}


def scrape(metrics: OperatorMetrics) -> dict[tuple[str, ...], float]:
    """Return the samples: (name, label values in the order of the labels' names) and the value."""
    samples_by_name = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            samples_by_name[sample.name, *(value for _, value in sorted(sample.labels.items()))] = sample.value
    return samples_by_name


def test_series_of_jobs_follow_the_stored_jobs_and_end_with_them() -> None:
    stored = [
        build_job("new"),
        build_job(
            "gpt",
            "Running",
            restarts=1,
            disruptions=2,
            progress={"step": 30, "totalSteps": 120},
            conditions=[{"lastTransitionTime": "2026-01-01T00:01:00Z"}, {"lastTransitionTime": "2026-01-01T00:00:30Z"}],
            firstFailure={"pod": "gpt-worker-1-1", "rank": 3, "reason": "OOMKilled"},
            avoidedNodes=[{"name": "node-a", "reason": "HardwareFault"}],
        ),
        build_job("over", "Failed", firstFailure={"reason": "Deadline"}),
        build_job("good", "Succeeded", firstFailure={"reason": "NodeLost"}),
    ]
    metrics = OperatorMetrics(lambda: stored)
    samples = scrape(metrics)
    assert {phase: samples["topkube_jobs", "ml", phase] for phase in PHASES} == {
        "Pending": 1,
        "Starting": 0,
        "Running": 1,
        "Restarting": 0,
        "Suspended": 0,
        "Succeeded": 1,
        "Failed": 1,
    }
    assert samples["topkube_job_phase", "ml", "Running", "gpt"] == 1
    assert samples["topkube_job_phase_timestamp_seconds", "ml", "gpt"] == 1767225660
    assert samples["topkube_job_phase_timestamp_seconds", "ml", "new"] == 1767225600
    assert samples["topkube_job_restarts", "ml", "gpt"] == 3
    assert samples["topkube_job_first_failure_info", "ml", "gpt-worker-1-1", "3", "OOMKilled", "gpt"] == 1
    assert samples["topkube_job_first_failure_info", "ml", "", "", "Deadline", "over"] == 1
    assert samples["topkube_job_avoided_node_info", "ml", "node-a", "HardwareFault", "gpt"] == 1
    assert not any("good" in key for key in samples)
    stored.clear()
    assert not any(key[0] == "topkube_jobs" or key[0].startswith("topkube_job_phase") for key in scrape(metrics))


def test_events_are_counted_from_zero_on() -> None:
    metrics = OperatorMetrics(lambda: [build_job("a")], namespace="home", release="r")
    assert scrape(metrics)["topkube_reconciles_total", "home", "error", "r"] == 0
    assert scrape(metrics)["topkube_job_restarts_total", "ml", "OOMKilled"] == 0
    metrics.count_transition("ml", "Running")
    metrics.count_restart("ml", "OOMKilled")
    metrics.count_restart("ml", "an unknown reason")
    metrics.observe_start("ml", 3.0)
    metrics.observe_reconcile(0.02, "changed")
    metrics.observe_queued(0.2)
    metrics.observe_call("GET", 200, 0.01)
    metrics.observe_call("GET", 0, None)
    metrics.count_created()
    metrics.set_leader(True)
    samples = scrape(metrics)
    assert samples["topkube_job_transitions_total", "ml", "Running"] == 1
    assert samples["topkube_job_restarts_total", "ml", "OOMKilled"] == 1
    assert samples["topkube_job_restarts_total", "ml", "Other"] == 1
    assert samples["topkube_job_start_seconds_bucket", "5.0", "ml"] == 1
    assert samples["topkube_reconciles_total", "home", "changed", "r"] == 1
    assert samples["topkube_reconcile_seconds_sum", "home", "r"] == pytest.approx(0.02)
    assert samples["topkube_work_queue_seconds_count", "home", "r"] == 1
    assert samples["topkube_api_requests_total", "200", "GET", "home", "r"] == 1
    assert samples["topkube_api_requests_total", "unreachable", "GET", "home", "r"] == 1
    assert samples["topkube_api_request_seconds_count", "home", "r"] == 1
    assert samples["topkube_jobs_created_total", "home", "r"] == 1
    assert samples["topkube_leader", "home", "r"] == 1


def test_the_state_of_the_work_queue_is_served() -> None:
    metrics, queue = OperatorMetrics(namespace="home", release="r"), WorkQueue()
    metrics.watch_queue(queue)
    for name in ("a", "b", "c"):
        queue.add(("ml", name))
    assert queue.get() == ("ml", "a")
    samples = scrape(metrics)
    assert samples["topkube_work_queue_waiting", "home", "r"] == 2
    assert samples["topkube_work_queue_working", "home", "r"] == 1
    assert samples["topkube_work_queue_oldest_seconds", "home", "r"] > 0


def test_the_webhook_has_series_only_if_it_is_served() -> None:
    metrics = OperatorMetrics(namespace="home", release="r")
    assert not any(key[0].startswith("topkube_admission") for key in scrape(metrics))
    metrics.set_serving(1e9, None)
    samples = scrape(metrics)
    assert samples["topkube_admission_reviews_total", "home", "error", "r"] == 0
    assert samples["topkube_admission_certificate_expiry_timestamp_seconds", "home", "r"] == 1e9
    assert ("topkube_admission_published", "home", "r") not in samples
    metrics.set_serving(1e9, False)
    metrics.observe_review("denied", 0.1)
    samples = scrape(metrics)
    assert samples["topkube_admission_published", "home", "r"] == 0
    assert samples["topkube_admission_reviews_total", "home", "denied", "r"] == 1


def test_the_counters_of_a_namespace_end_some_time_after_its_last_job(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = [build_job("a")]
    metrics = OperatorMetrics(lambda: stored)
    assert ("topkube_job_transitions_total", "ml", "Running") in scrape(metrics)
    stored.clear()
    assert ("topkube_job_transitions_total", "ml", "Running") in scrape(metrics)
    monkeypatch.setattr("topkube_operator.control.metrics._FORGET_SECONDS", -1.0)
    assert not any("ml" in key for key in scrape(metrics))


@pytest.mark.parametrize(
    "broken", [{}, {"metadata": None, "status": None}, build_job("a", "Running", conditions="none", progress=None)]
)
def test_a_malformed_stored_object_does_not_end_the_scrape(broken: dict[str, Any]) -> None:
    assert scrape(OperatorMetrics(lambda: [broken]))["topkube_leader", "topkube-system", "topkube"] == 0


def test_values_that_need_quoting_come_back_as_they_were() -> None:
    reason = 'say "no"\\\nand more'
    samples = scrape(
        OperatorMetrics(lambda: [build_job("a-1", "Failed", firstFailure={"reason": reason, "pod": "a-1-worker"})])
    )
    assert samples["topkube_job_first_failure_info", "ml", "a-1-worker", "", reason, "a-1"] == 1


def test_every_metric_is_served_with_its_labels() -> None:
    status: dict[str, Any] = {"startTime": "2026-01-01T00:00:00Z", "avoidedNodes": [{"name": "n", "reason": "Error"}]}
    running = build_job("a", "Running", progress={"totalSteps": 2}, firstFailure={"reason": "Error"}, **status)
    running["spec"] = {"checkpoint": {"claimName": "c"}}
    failed = build_job("b", "Failed", completionTime="2026-01-01T00:00:00Z")
    metrics = OperatorMetrics(lambda: [running, failed])
    metrics.set_serving(1e9, True)
    metrics.observe_review("allowed", 0.1)
    metrics.observe_call("GET", 200, 0.1)
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families for sample in family.samples]
    served = {
        (metric.name, frozenset(metric.labels) - {"le"}) for metric in samples if metric.name.startswith("topkube_")
    }
    assert served == {(name, frozenset(metric.labels)) for metric in METRICS for name in metric.series}


def test_a_thousand_jobs_are_served_within_a_second() -> None:
    stored = [
        build_job(f"job-{number}", "Running", restarts=number, progress={"step": 1, "totalSteps": 2})
        for number in range(1000)
    ]
    metrics = OperatorMetrics(lambda: stored)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        metrics.render()
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1


def test_checkpoints_and_failures_have_series_of_their_own() -> None:
    spec = {"checkpoint": {"claimName": "c"}}
    failed = {"type": "CheckpointFailed", "status": "True", "lastTransitionTime": "2026-01-01T00:05:00Z"}
    running = {"type": "Running", "status": "True", "lastTransitionTime": "2026-01-01T00:01:00Z"}
    progress = {"step": 9, "checkpointStep": 5, "checkpointAt": "2026-01-01T00:02:00Z"}
    start = "2026-01-01T00:00:30Z"
    stored = [
        {**build_job("old", "Running", progress=progress, startTime=start, conditions=[failed, running]), "spec": spec},
        {**build_job("none", "Running", startTime=start), "spec": spec},
        {**build_job("resumed", "Running", progress=progress, startTime="2026-01-01T12:00:00Z"), "spec": spec},
        build_job("plain", "Running", startTime=start),
        {**build_job("over", "Failed", completionTime="2026-01-01T00:03:00Z"), "spec": spec},
    ]
    samples = scrape(OperatorMetrics(lambda: stored))
    assert samples["topkube_job_checkpoint_failed", "ml", "old"] == 1
    assert samples["topkube_job_checkpoint_failed", "ml", "none"] == 0
    assert samples["topkube_job_last_checkpoint_timestamp_seconds", "ml", "old"] == 1767225720
    assert samples["topkube_job_last_checkpoint_timestamp_seconds", "ml", "none"] == 1767225630
    resumed_at = samples["topkube_job_last_checkpoint_timestamp_seconds", "ml", "resumed"]
    assert resumed_at == 1767268800, "a suspended job writes no checkpoints"
    assert samples["topkube_job_failed_timestamp_seconds", "ml", "over"] == 1767225780
    names = {key[0] for key in samples if key[-1] == "plain"}
    assert not any("checkpoint" in name for name in names)
    assert samples["topkube_job_phase_timestamp_seconds", "ml", "old"] == 1767225660, "a checkpoint changes no phase"


def test_only_the_replica_that_acts_serves_the_series_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each job would be counted once for each replica."""
    cluster = {
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [],
        "current-context": "c",
    }
    config = {**cluster, "contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}]}
    (tmp_path / "config").write_text(json.dumps(config))
    operator = Operator(OperatorOptions(namespace="home", release="r", kubeconfig=str(tmp_path / "config")))
    stored = build_job("a", "Running")
    stored["metadata"] |= {"uid": "1", "resourceVersion": "1"}
    operator.receive_job("None", stored)
    samples = scrape(operator.metrics)
    assert not any("ml" in key for key in samples)
    assert samples["topkube_jobs_created_total", "home", "r"] == 0, "the job existed before this replica"
    monkeypatch.setattr(operator, "is_acting", lambda: True)
    assert scrape(operator.metrics)["topkube_jobs", "ml", "Running"] == 1
    new = {**stored, "metadata": {**stored["metadata"], "name": "b", "uid": "2"}}
    operator.receive_job("ADDED", new)
    operator.receive_job("ADDED", new)
    assert scrape(operator.metrics)["topkube_jobs_created_total", "home", "r"] == 1
    with pytest.raises(ApiError):
        operator.cluster.get("Pod", "ml", "a")
    assert scrape(operator.metrics)["topkube_api_requests_total", "unreachable", "GET", "home", "r"] == 1
