"""The dashboards' JSON against the types that Grafana generates from its own schemas (grafana-foundation-sdk)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from monitoring.dashboards import DASHBOARDS
from monitoring.grafana import Dashboard

plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
plugins.register_default_plugins()  # the types of panels and queries, such as timeseries and prometheus
models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
NOT_IN_THE_SCHEMA = {"templating.list[].definition"}
"""Grafana itself writes this field: the text of a query variable in its settings."""


def find_lost_values(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of values that are not the same after the types have read and written them."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            path_of_value = f"{path}.{name}".lstrip(".")
            if name in after:
                yield from find_lost_values(value, after[name], path_of_value)
            else:
                yield path_of_value
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for first, second in zip(before, after, strict=True):
            yield from find_lost_values(first, second, f"{path}[]")
    elif before != after:
        yield path


def read_and_write(page: dict[str, Any]) -> Any:
    return json.loads(json.dumps(models.Dashboard.from_json(page), cls=encoder.JSONEncoder))


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_grafana_has_every_field_of_a_dashboard(dashboard: Dashboard) -> None:
    page = json.loads(dashboard.to_json())
    assert set(find_lost_values(page, read_and_write(page))) <= NOT_IN_THE_SCHEMA


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("timeseries", "options.legend.placment"),
        ("timeseries", "fieldConfig.defaults.custom.drawStile"),
        ("stat", "options.colourMode"),
        ("timeseries", "unitt"),
    ],
)
def test_a_misspelt_field_of_a_panel_is_noticed(kind: str, path: str) -> None:
    page = json.loads(DASHBOARDS[0].to_json())
    panel = next(panel for panel in page["panels"] if panel["type"] == kind)
    *parents, name = path.split(".")
    for parent in parents:
        panel = panel[parent]
    panel[name] = "bottom"
    lost = {place.replace("[]", "") for place in find_lost_values(page, read_and_write(page))}
    assert f"panels.{path}" in lost
