"""Every alert in a cluster with two releases: one alert for the release that fails, and none for the other release.

The tests run with the rules in the repository, which are for all releases, and with the rules that the chart makes for
each release.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from alert_cases import CASES, Case, build_alert_labels
from rendered import find_only, render

from monitoring.alerts import ALERTS, Alert
from monitoring.generated import ROOT

RELEASES = {"first-topkube": "team-a", "second-topkube": "team-b"}
"""The name of a release, and the namespace of its jobs. Both operators are in the same namespace."""
HOME = "topkube-system"
HEALTHY = {"TopKubeJobStalled": 2, "TopKubeNodeAvoided": 2, "TopKubeJobFailed": 2}
"""For alerts whose first two cases differ only in the minute: the index of a case in which the alert never fires."""
Rules = dict[str, dict[str, Any]]


def rename_series(series: str, release: str) -> str:
    """Return the series of a case as those of a release, its jobs and its nodes."""
    changes = {'namespace="ml"': f'namespace="{RELEASES[release]}"', 'namespace="home"': f'namespace="{HOME}"'}
    changes |= {'release="r"': f'release="{release}"', 'node="n"': 'node="shared"'}
    for old, new in changes.items():
        series = series.replace(old, new)
    return series


def rename_labels(alert: Alert, release: str) -> dict[str, str]:
    labels = build_alert_labels(alert)
    changes = {"namespace": {"ml": RELEASES[release], "home": HOME}, "release": {"r": release}, "node": {"n": "shared"}}
    return {name: changes.get(name, {}).get(value, value) for name, value in labels.items()}


def choose_cases(alert: Alert) -> tuple[Case, Case]:
    """Return the first case that fires, and the most similar case that does not fire at that minute."""
    firing = next(case for case in CASES[alert.name] if case[2] is True)
    if alert.name in HEALTHY:
        return firing, CASES[alert.name][HEALTHY[alert.name]]
    quiet = [case for case in CASES[alert.name] if case[2] is False and case[0]]
    return firing, max(quiet, key=lambda case: (case[1] == firing[1], len(case[0].keys() & firing[0].keys())))


def build_tests(alert: Alert) -> list[dict[str, Any]]:
    """Return a test with one failing release, for each release, and a test with two."""
    firing, quiet = choose_cases(alert)
    tests = []
    for failing in ({"first-topkube"}, {"second-topkube"}, set(RELEASES)):
        series = {
            rename_series(name, release): values
            for release in RELEASES
            for name, values in (firing if release in failing else quiet)[0].items()
        }
        expected = [{"exp_labels": rename_labels(alert, release), "exp_annotations": {}} for release in sorted(failing)]
        test = {"eval_time": f"{firing[1]}m", "alertname": alert.name, "exp_alerts": expected}
        inputs = [{"series": name, "values": values} for name, values in series.items()]
        tests.append({"interval": "1m", "input_series": inputs, "alert_rule_test": [test]})
    return tests


def read_rules_for_all() -> list[Rules]:
    groups = yaml.safe_load((ROOT / "charts/topkube/files/alerts.yaml").read_text())["groups"]
    return [{rule["alert"]: rule for group in groups for rule in group["rules"]}]


def render_rules_of_each() -> list[Rules]:
    """Return the rules of each release. One Prometheus loads them together."""
    rules = []
    for release, jobs in RELEASES.items():
        objects = render({"namespaces": [jobs], "metrics": {"alerts": {"enabled": True}}}, name=release)
        groups = find_only("PrometheusRule", objects)["spec"]["groups"]
        rules.append({rule["alert"]: rule for group in groups for rule in group["rules"]})
    return rules


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
@pytest.mark.parametrize("read_rules", [read_rules_for_all, render_rules_of_each])
def test_each_alert_fires_once_for_each_release_that_fails(read_rules: Any, tmp_path: Path) -> None:
    rules_of_files = read_rules()
    for alert in ALERTS:
        groups = [
            {"name": f"g{number}", "rules": [{**rules[alert.name], "annotations": {}}]}
            for number, rules in enumerate(rules_of_files)
        ]
        (tmp_path / f"{alert.name}.rules").write_text(yaml.safe_dump({"groups": groups}))
        file = {"rule_files": [f"{alert.name}.rules"], "tests": build_tests(alert)}
        (tmp_path / f"{alert.name}.yaml").write_text(yaml.safe_dump(file))
    command = ["promtool", "test", "rules", *(f"{alert.name}.yaml" for alert in ALERTS)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_cases_cover_jobs_operators_and_agents() -> None:
    label_sets = {
        tuple(sorted(re.sub("training_job", "job", name) for name in build_alert_labels(alert))) for alert in ALERTS
    }
    assert label_sets >= {
        ("job", "namespace", "severity"),
        ("namespace", "release", "severity"),
        ("node", "release", "severity"),
    }
