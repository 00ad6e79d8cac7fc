"""The reports of another library's training loop, in one process: what Prometheus and people see of its steps."""

from __future__ import annotations

import dataclasses
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from topkube import heartbeat
from topkube.integrations.step_reports import StepReports
from topkube.settings import Settings
from topkube.telemetry import phases
from topkube.telemetry.endpoint import MetricsEndpoint
from topkube.telemetry.progress import PROGRESS_FILE, read_records


def scrape(directory: Path) -> dict[str, float]:
    """Return the values of the series by name, and by name and phase for seconds of phases."""
    with (
        MetricsEndpoint(lambda: directory, "gpt", 0, "127.0.0.1") as endpoint,
        urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=120) as answer,
    ):
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        f"{sample.name} {sample.labels.get('phase', '')}".strip(): sample.value
        for family in families
        for sample in family.samples
    }


def build_settings(directory: Path) -> Settings:
    return dataclasses.replace(Settings(), run_directory=str(directory), attempt=2)


def test_every_step_is_counted_in_the_metrics_and_written_as_a_record(tmp_path: Path) -> None:
    reports = StepReports(build_settings(tmp_path))
    phases.current.add("inter", 0.5)
    phases.current.sent(inter=1000, dense=9000)
    reports.add(1, 4, 0, 8, 2.0)
    reports.add(2, 4, 0, 8, None)
    reports.set_loss(2, 1.5)
    during = scrape(tmp_path)
    reports.close()
    series = scrape(tmp_path)
    assert during["topkube_loss"] == 2.0, "the loss of a step is known when the next step ends"
    assert series["topkube_loss"] == 1.5
    assert series["topkube_step_seconds_count"] == 2
    assert series["topkube_samples_total"] == 16
    assert series["topkube_step_phase_seconds_total inter"] == 0.5
    assert series["topkube_dense_equivalent_bytes_total"] == 9000
    assert series["topkube_job_step"] == 2
    assert series["topkube_job_progress_ratio"] == 0.5
    assert series["topkube_job_attempt"] == 2
    records = [record for record, _ in read_records(tmp_path / PROGRESS_FILE)]
    assert [(record.step, record.loss, record.dense_bytes) for record in records] == [(1, 2.0, 9000), (2, 1.5, 0)]
    assert series["topkube_last_step_timestamp_seconds"] == records[-1].time
    forward = sum(record.seconds["forward"] for record in records)
    assert series["topkube_step_seconds_sum"] == series["topkube_step_phase_seconds_total forward"] == forward


def test_a_link_that_was_not_measured_has_no_bound(tmp_path: Path) -> None:
    """A bound of 0 seconds would be an exchange that reaches 0% of its link: an alert would fire."""
    reports = StepReports(build_settings(tmp_path))
    phases.current.sent(inter=1000)
    reports.add(1, None, 0, 8, 2.0)
    series = scrape(tmp_path)
    assert "topkube_step_seconds_count" in series
    assert not {"topkube_exchange_bound_seconds_total", "topkube_link_bytes_per_second"} & series.keys()
    reports.close()


def test_an_evaluation_is_a_sign_of_life(tmp_path: Path) -> None:
    """The launcher ends a job without signs of life, and an alert fires for it. Each training begins new reports."""
    activity = "topkube_last_activity_timestamp_seconds"
    for count in (1, 2):
        reports = StepReports(build_settings(tmp_path))
        reports.add(1, 4, 0, 8, 2.0)
        reports.note_activity()
        assert heartbeat.read(tmp_path, 0) == count, "the launcher expects a number that grows"
        assert scrape(tmp_path)[activity] == pytest.approx(time.time(), abs=60)
        reports.close()


def test_without_a_run_directory_nothing_is_reported(tmp_path: Path) -> None:
    reports = StepReports(Settings())
    reports.add(1, 4, 0, 8, 2.0)
    reports.note_activity()
    reports.close()
    assert not list(tmp_path.iterdir())
