"""Dashboards, alerts and the metrics reference: generated files are fresh, and keep the rules."""

from __future__ import annotations

from monitoring.catalog import SOURCES, find
from monitoring.generated import stale


def test_generated_files_are_fresh() -> None:
    assert stale() == [], "python -m monitoring writes them"


def test_metrics_have_base_units_and_no_two_say_the_same() -> None:
    names = [name for source in SOURCES for one in source.metrics for name in one.series]
    shared = {"topkube_build_info", "topkube_job_progress_ratio"}  # both parts serve them
    assert len([name for name in names if name not in shared]) == len(set(names) - shared)
    for source in SOURCES:
        for one in source.metrics:
            assert one.name.startswith("topkube_")
            assert one.name.endswith("_total") == (one.kind == "counter"), one.name
            assert not one.name.endswith(("_ms", "_milliseconds", "_percent", "_megabytes")), one.name
            assert one.help.endswith("."), one.name
            assert one.kind != "histogram" or find(f"{one.name}_bucket") is one
