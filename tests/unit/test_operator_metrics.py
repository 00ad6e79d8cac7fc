"""The operator's metrics: jobs as they are stored now, events as they were counted."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from topkube_operator.metrics import METRICS, PHASES, OperatorMetrics


def job(name: str, phase: str | None = None, **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ml", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": metadata, "status": {"phase": phase, **status} if phase else {}}


def scrape(metrics: OperatorMetrics) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of their names) and the value."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found[sample.name, *(value for _, value in sorted(sample.labels.items()))] = sample.value
    return found


def test_jobs_are_told_as_they_are_stored_and_vanish_with_them() -> None:
    stored = [
        job("new"),
        job(
            "gpt",
            "Running",
            restarts=1,
            disruptions=2,
            progress={"step": 30, "totalSteps": 120},
            conditions=[{"lastTransitionTime": "2026-01-01T00:01:00Z"}, {"lastTransitionTime": "2026-01-01T00:00:30Z"}],
            firstFailure={"pod": "gpt-worker-1-1", "rank": 3, "reason": "OOMKilled"},
        ),
        job("over", "Failed", firstFailure={"reason": "Deadline"}),
        job("good", "Succeeded", firstFailure={"reason": "NodeLost"}),
    ]
    metrics = OperatorMetrics(lambda: stored)
    found = scrape(metrics)
    assert {phase: found["topkube_jobs", "ml", phase] for phase in PHASES} == {
        "Pending": 1,
        "Starting": 0,
        "Running": 1,
        "Restarting": 0,
        "Suspended": 0,
        "Succeeded": 1,
        "Failed": 1,
    }
    assert found["topkube_job_phase", "ml", "Running", "gpt"] == 1
    assert found["topkube_job_phase_timestamp_seconds", "ml", "gpt"] == 1767225660
    assert found["topkube_job_phase_timestamp_seconds", "ml", "new"] == 1767225600
    assert found["topkube_job_restarts", "ml", "gpt"] == 3
    assert found["topkube_job_progress_ratio", "ml", "gpt"] == 0.25
    assert found["topkube_job_first_failure_info", "ml", "gpt-worker-1-1", "3", "OOMKilled", "gpt"] == 1
    assert found["topkube_job_first_failure_info", "ml", "", "", "Deadline", "over"] == 1
    assert not any("good" in key for key in found)
    stored.clear()
    assert not any(key[0].startswith(("topkube_job_phase", "topkube_jobs")) for key in scrape(metrics))


def test_what_happened_is_counted_from_zero_on() -> None:
    metrics = OperatorMetrics()
    assert scrape(metrics)["topkube_reconciles_total", "error"] == 0
    metrics.entered("Running")
    metrics.restarted("OOMKilled")
    metrics.restarted("a reason nobody has thought of")
    metrics.started(3.0)
    metrics.reconciled(0.02, "changed")
    metrics.leads(True)
    found = scrape(metrics)
    assert found["topkube_job_transitions_total", "Running"] == 1
    assert found["topkube_job_restarts_total", "OOMKilled"] == 1
    assert found["topkube_job_restarts_total", "Other"] == 1
    assert found["topkube_job_start_seconds_bucket", "5.0"] == 1
    assert found["topkube_reconciles_total", "changed"] == 1
    assert found["topkube_reconcile_seconds_sum",] == pytest.approx(0.02)
    assert found["topkube_leader",] == 1


@pytest.mark.parametrize(
    "broken", [{}, {"metadata": None, "status": None}, job("a", "Running", conditions="none", progress=None)]
)
def test_a_stored_object_that_is_odd_does_not_end_the_scrape(broken: dict[str, Any]) -> None:
    assert scrape(OperatorMetrics(lambda: [broken]))["topkube_leader",] == 0


def test_values_that_need_quoting_come_back_as_they_were() -> None:
    reason = 'say "no"\\\nand more'
    found = scrape(
        OperatorMetrics(lambda: [job("a-1", "Failed", firstFailure={"reason": reason, "pod": "a-1-worker"})])
    )
    assert found["topkube_job_first_failure_info", "ml", "a-1-worker", "", reason, "a-1"] == 1


def test_every_metric_is_served_with_its_labels() -> None:
    running = job("a", "Running", progress={"totalSteps": 2}, firstFailure={"reason": "Error"})
    families = text_string_to_metric_families(OperatorMetrics(lambda: [running]).text().decode())
    samples = [sample for family in families for sample in family.samples]
    served = {(one.name, frozenset(one.labels) - {"le"}) for one in samples if one.name.startswith("topkube_")} - {
        ("topkube_build_info", frozenset({"component", "version"}))
    }
    assert served == {(name, frozenset(one.labels)) for one in METRICS for name in one.series}


def test_a_thousand_jobs_are_served_within_100_ms() -> None:
    stored = [job(f"job-{n}", "Running", restarts=n, progress={"step": 1, "totalSteps": 2}) for n in range(1000)]
    metrics = OperatorMetrics(lambda: stored)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        metrics.text()
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1
