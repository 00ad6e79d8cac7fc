"""The files of the alerts: the rules for Prometheus, the chart's templates of rules, and docs/alerts.md."""

from __future__ import annotations

from typing import Any

import yaml

from monitoring.alerts import ALERTS, GROUPS


def build_rules() -> str:
    """Return the rules file, which Prometheus loads as it is."""
    groups = [{"name": name, "rules": [alert.build_rule() for alert in group]} for name, group in GROUPS.items()]
    return _format_yaml({"groups": groups})


def build_templates() -> str:
    """Return the file from which the chart makes the rules of a release."""
    groups = [{"name": name, "rules": [alert.build_template() for alert in group]} for name, group in GROUPS.items()]
    return _format_yaml({"groups": groups})


def build_markdown() -> str:
    """Return docs/alerts.md."""
    lines = [_HEAD]
    for alert in ALERTS:
        thresholds = ", ".join(f"`{name}: {value:g}`" for name, value in alert.thresholds.items())
        runbook = f"[{alert.runbook.replace('-', ' ')}](runbooks/{alert.runbook}.md)"
        lines.append(
            f"| {alert.name} | {alert.severity} | {alert.meaning} | {alert.lasting} | {thresholds} | {runbook} |\n"
        )
    return "".join(lines)


_HEAD = """# Alerts

`charts/topkube/files/alerts.yaml` has the rules as Prometheus, vmalert and Mimir load them. They are right for all
releases of a cluster. The chart makes a PrometheusRule from the same rules for its own release, and takes
changes of single alerts:

```yaml
metrics:
  alerts:
    runbookBaseUrl: https://wiki.example.org/topkube
    extraLabels: {team: ml-platform}      # labels of all alerts
    severities: {critical: page}          # other names of severities
    disabled: [TopKubeCacheHitRatioLow]
    rules:
      TopKubeCheckpointTooOld:
        severity: critical
        for: 10m
        labels: {team: research}
        thresholds: {seconds: 3600}
```

The chart refuses names of alerts and thresholds that do not exist.

This page is generated: `python -m monitoring` writes it.

| alert | severity | fires if | for | thresholds | runbook |
|---|---|---|---|---|---|
"""


def _format_yaml(value: Any) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, width=10_000))
