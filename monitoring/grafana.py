"""Dashboards as values, and the JSON that Grafana reads. A row is a heading with panels; a panel is a title with
queries. This module computes layout, ids and data sources, so that a dashboard defines only its content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["timeseries", "stat", "bargauge", "table"]
Unit = Literal["short", "s", "Bps", "bytes", "percentunit", "ops", "none", "bool_yes_no", "string"]
WIDTH = 24
"""Columns of Grafana's grid."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """A PromQL expression and the names of its series."""

    expression: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """A panel. `unit` is Grafana's name of a unit: s, bytes, Bps, percentunit (0 to 1), short (a count). `least` and
    `most` are the limits of the axis; None: Grafana chooses."""

    title: str
    description: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    least: float | None = 0
    most: float | None = None
    logarithmic: bool = False

    def to_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Return Grafana's panel at column x, line y."""
        instant = self.kind != "timeseries"
        targets = [
            {
                "datasource": DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend or "__auto",
                "refId": chr(ord("A") + index),
                "instant": instant,
                "range": not instant,
                "format": "table" if self.kind == "table" else "time_series",
            }
            for index, query in enumerate(self.queries)
        ]
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": self._build_field_defaults(), "overrides": []},
            "options": _OPTIONS[self.kind],
            "targets": targets,
            **({"transformations": _AS_TABLE} if self.kind == "table" else {}),
        }

    def _build_field_defaults(self) -> dict[str, Any]:
        defaults: dict[str, Any] = {"unit": self.unit}
        if self.least is not None:
            defaults["min"] = self.least
        if self.most is not None:
            defaults["max"] = self.most
        if self.kind == "timeseries":
            scale = {"type": "log", "log": 10} if self.logarithmic else {"type": "linear"}
            defaults["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 40 if self.stacked else 0,
                "showPoints": "never",
                "scaleDistribution": scale,
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
            }
        return defaults


_REDUCE = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[Kind, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": _REDUCE, "colorMode": "none", "graphMode": "none", "textMode": "auto"},
    "bargauge": {"reduceOptions": _REDUCE, "orientation": "horizontal", "displayMode": "basic"},
    "table": {"showHeader": True},
}
_AS_TABLE = [{"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True}}}]


@dataclass(frozen=True)
class Row:
    """A heading and the panels below it, left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A variable that the user selects: one of the values of `label` in `series`, or several of them."""

    name: str
    label: str
    series: str
    several: bool = True

    def to_json(self) -> dict[str, Any]:
        query = f"label_values({self.series}, {self.label})"
        everything = {"text": "All", "value": "$__all"}
        return {
            "name": self.name,
            "label": self.label.replace("_", " "),
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": "variable"},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": self.several,
            "includeAll": self.several,
            **({"allValue": ".*", "current": everything} if self.several else {"current": {}}),
        }


@dataclass(frozen=True)
class Dashboard:
    """A page. `uid` is also the name of its file."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = field(default=())

    @property
    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels

    def to_json(self) -> str:
        """Return the file that Grafana imports."""
        source = {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"}
        page = {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["topkube"],
            "editable": False,
            "graphTooltip": 1,
            "refresh": "30s",
            "schemaVersion": 39,
            "time": {"from": "now-1h", "to": "now"},
            "links": [{"type": "dashboards", "title": "TopKube", "tags": ["topkube"], "keepTime": True}],
            "templating": {"list": [source, *(variable.to_json() for variable in self.variables)]},
            "panels": list(self._lay_out_panels()),
        }
        return json.dumps(page, indent=1) + "\n"

    def _lay_out_panels(self) -> Iterator[dict[str, Any]]:
        number, y = 1, 0
        for row in self.rows:
            yield {
                "id": number,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            }
            number, y, x, tallest = number + 1, y + 1, 0, 0
            for panel in row.panels:
                if x + panel.width > WIDTH:
                    x, y, tallest = 0, y + tallest, 0
                yield panel.to_json(number, x, y)
                number, x, tallest = number + 1, x + panel.width, max(tallest, panel.height)
            y += tallest
