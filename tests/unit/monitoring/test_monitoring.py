"""Dashboards, alerts and the metrics reference: generated files are fresh, and keep the rules."""

from __future__ import annotations

import json
import re

import pytest

from monitoring.catalog import SOURCES, find_metric
from monitoring.dashboards import DASHBOARDS
from monitoring.generated import list_stale_files
from monitoring.grafana import Dashboard, Panel


def test_generated_files_are_fresh() -> None:
    assert list_stale_files() == [], "python -m monitoring writes them"


def test_metrics_have_base_units_and_one_producer_each() -> None:
    names = [name for source in SOURCES for metric in source.metrics for name in metric.series]
    assert len(names) == len(set(names)), "each metric has one producer"
    for source in SOURCES:
        for metric in source.metrics:
            assert metric.name.startswith("topkube_")
            assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
            assert not metric.name.endswith(("_ms", "_milliseconds", "_percent", "_megabytes")), metric.name
            assert metric.help.endswith("."), metric.name
            assert metric.kind != "histogram" or find_metric(f"{metric.name}_bucket") is metric


PANELS = [(dashboard, panel) for dashboard in DASHBOARDS for panel in dashboard.panels]
each_panel = pytest.mark.parametrize(
    ("dashboard", "panel"), PANELS, ids=[f"{dashboard.uid}: {panel.title}" for dashboard, panel in PANELS]
)
TARGET_LABELS = {"namespace", "pod", "instance", "job"}
"""Labels that Prometheus adds to a series, from the target that served it."""
PROCESS = {"process_resident_memory_bytes": "gauge", "process_cpu_seconds_total": "counter"}
"""The kinds of the metrics of every process, which Prometheus's client library serves."""


def find_series(expression: str) -> list[re.Match[str]]:
    """Return the series that an expression asks for, each with its selector (group 2) and range (group 3)."""
    return list(re.finditer(r"\b((?:topkube|process)_\w+)(\{[^}]*\})?(\[[^\]]*\])?", expression))


def find_kind(series: str) -> str:
    metric = find_metric(series)
    if metric is None:
        return PROCESS[series]
    return "counter" if metric.kind == "histogram" else metric.kind


def find_labels(series: str) -> set[str]:
    metric = find_metric(series)
    return TARGET_LABELS | set(metric.labels if metric else ()) | ({"le"} if series.endswith("_bucket") else set())


@each_panel
def test_a_panel_has_a_description_and_a_unit(dashboard: Dashboard, panel: Panel) -> None:
    assert panel.title[0].isupper()
    assert len(panel.title) < 40
    assert panel.description.endswith(".")
    assert len(panel.description) > len(panel.title)
    assert panel.unit
    for query in panel.queries:
        names = [match[1] for match in find_series(query.expression)]
        if panel.unit == "Bps":
            assert all("bytes" in name or "seconds" in name for name in names), names
        if panel.unit == "s":
            assert any("seconds" in name for name in names), names
        if len(panel.queries) > 1:
            assert query.legend, "several queries in one panel need names"


@each_panel
def test_counters_are_in_rates_over_the_rate_interval_and_gauges_are_not(dashboard: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        for match in find_series(query.expression):
            before = query.expression[: match.start()]
            rated = before.endswith(("rate(", "increase("))
            assert rated == (find_kind(match[1]) == "counter"), match[0]
            assert (match[3] == "[$__rate_interval]") == rated, match[0]
            if match[1].endswith("_bucket"):
                assert "histogram_quantile(" in before
                assert re.search(r"by \((?:\w+, )*le\)", before)


@each_panel
def test_panels_ask_for_series_and_labels_that_exist(dashboard: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        matches = find_series(query.expression)
        assert matches
        known_labels = set.union(*(find_labels(match[1]) for match in matches))
        for match in matches:
            assert set(re.findall(r"(\w+)(?:=|!)~?\"", match[2] or "")) <= find_labels(match[1]), match[0]
        grouped = re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", query.expression)
        assert {label.strip() for group in grouped for label in group.split(",") if label.strip()} <= known_labels
        assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= known_labels


@each_panel
def test_series_of_operators_and_agents_are_not_mixed(dashboard: Dashboard, panel: Panel) -> None:
    """Two releases in a cluster have series of their own."""
    for query in panel.queries:
        for match in find_series(query.expression):
            if "release" not in find_labels(match[1]):
                continue
            assert 'release=~"$release"' in (match[2] or ""), match[0]
            groups = re.findall(r"\b(?:sum|max|count|avg|group)\b ?(?:by \(([^)]*)\))?", query.expression)
            assert groups
            assert all("release" in group for group in groups), query.expression
            assert "release" in query.legend


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_a_dashboard_is_complete_and_its_choices_reach_every_panel(dashboard: Dashboard) -> None:
    page = json.loads(dashboard.to_json())
    variables = [variable["name"] for variable in page["templating"]["list"]]
    assert variables[0] == "datasource"
    ids = [panel["id"] for panel in page["panels"]]
    assert len(ids) == len(set(ids))
    used_cells = set()
    for panel in page["panels"]:
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert not used_cells & cells, panel["title"]
        assert position["x"] + position["w"] <= 24
        used_cells |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            used = set(re.findall(r"\$(?!__)(\w+)", target["expr"]))
            assert used <= set(variables)
            if "training_job" in variables and "topkube_job_start" not in target["expr"]:
                assert "training_job" in used, panel["title"]
            assert target["datasource"]["uid"] == "${datasource}"


def test_every_dashboard_has_its_own_name() -> None:
    assert (
        len({dashboard.uid for dashboard in DASHBOARDS})
        == len({dashboard.title for dashboard in DASHBOARDS})
        == len(DASHBOARDS)
    )
    assert all(len(dashboard.uid) <= 40 for dashboard in DASHBOARDS)  # Grafana's limit
