"""Every alert, in Prometheus's own rule tests: it fires, it does not fire, and it does not fire if its series are
missing (except the alert for a missing operator)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from alert_cases import CASES, build_test

from monitoring.alerts import ALERTS, SELECTORS, Alert
from monitoring.catalog import find_metric
from monitoring.generated import ROOT

RULES = ROOT / "charts/topkube/files/alerts.yaml"
RUNBOOKS = ROOT / "docs/runbooks"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """Each alert has a file with its own rule only: promtool evaluates all rules of a file in each minute of a test."""
    rules = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    for alert in ALERTS:
        rule = {**rules[alert.name], "annotations": {}}  # the texts of annotations are not tested here
        (tmp_path / f"{alert.name}.rules").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [rule]}]}))
        tests = [build_test(alert, case) for case in CASES[alert.name]]
        file = {"rule_files": [f"{alert.name}.rules"], "tests": tests}
        (tmp_path / f"{alert.name}.yaml").write_text(yaml.safe_dump(file))
    command = ["promtool", "test", "rules", *(f"{alert.name}.yaml" for alert in ALERTS)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_the_rules_are_valid() -> None:
    ended = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.skipif(shutil.which("vmalert") is None, reason="needs vmalert: apt-get install victoria-metrics")
def test_vmalert_accepts_the_rules() -> None:
    ended = subprocess.run(["vmalert", f"-rule={RULES}", "-dryRun"], capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_alert_has_cases_that_fire_that_do_not_and_that_miss_series() -> None:
    assert set(CASES) == {alert.name for alert in ALERTS}
    for name, cases in CASES.items():
        assert {bool(fires) for _, _, fires in cases} == {True, False}, name
        assert len(cases) >= 3, name


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.stem)
def test_runbooks_read_the_logs_of_all_replicas(page: Path) -> None:
    """For a Deployment, kubectl shows the log of one of its pods, which may be the replica that stands by."""
    text = page.read_text()
    assert not re.search(r"kubectl logs [^\n]*deployment/", text)
    for line in re.findall(r"^kubectl logs .* -l .*$", text, re.MULTILINE):
        assert {"--prefix", "--tail"} <= set(line.split()), "without --tail, kubectl shows 10 lines of each pod"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_a_runbook_with_the_next_steps(alert: Alert) -> None:
    text = (RUNBOOKS / f"{alert.runbook}.md").read_text()
    assert alert.name in text
    for heading in ("## What it means", "## What to check", "## What to do"):
        assert heading in text, heading


def test_alerts_ask_for_series_that_exist() -> None:
    for alert in ALERTS:
        names = set(re.findall(r"\btopkube_\w+", alert.expression))
        assert names
        for name in names:
            assert find_metric(name) is not None, f"{alert.name}: {name}"


def test_no_alert_mixes_jobs_or_releases() -> None:
    """Every aggregation keeps the labels that distinguish jobs, releases and nodes."""
    for alert in ALERTS:
        aggregations = re.findall(r"\b(?:sum|max|min|count|group|avg)\b ?(?:by \(([^)]*)\))?", alert.expression)
        assert aggregations, alert.name
        for labels in aggregations:
            kept = set(labels.split(", "))
            assert "namespace" in kept or {"release", "node"} <= kept, f"{alert.name}: by ({labels})"


def test_placeholders_are_filled_and_thresholds_used() -> None:
    for alert in ALERTS:
        assert set(re.findall(r"<(\w+)>", alert.expression)) == {*alert.thresholds} | (
            set(SELECTORS) & set(re.findall(r"<(\w+)>", alert.expression))
        )
        assert "<" not in re.sub(r"<(?= |=)", "", alert.fill_expression()), alert.name
        for match in re.finditer(r"\btopkube_\w+", alert.expression):
            placeholder = re.match(r"\{<(\w+)>", alert.expression[match.end() :])
            assert placeholder is not None, f"{alert.name}: {match[0]} has no selector for the chart's release"
            assert placeholder[1] in SELECTORS
