"""Queries to a Prometheus, as Grafana sends them."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class QueryError(ValueError):
    """Prometheus refused a query. The message comes from Prometheus."""


@dataclass(frozen=True)
class Series:
    """The labels of a series, and its points (Unix seconds, value) in the order of time."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """The server at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def query(self, expression: str) -> list[Series]:
        """Return the current values. Raises QueryError."""
        return [
            _parse_series(result, [result["value"]]) for result in self.call_api("query", query=expression)["result"]
        ]

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        """Return the values from `start` to `end` (Unix seconds), one per `step`. Raises QueryError."""
        answer = self.call_api("query_range", query=expression, start=start, end=end, step=step)
        return [_parse_series(result, result["values"]) for result in answer["result"]]

    def call_api(self, endpoint: str, **parameters: Any) -> Any:
        """Return the `data` of the answer to /api/v1/ENDPOINT. Raises QueryError."""
        address = f"{self._url}/api/v1/{endpoint}?{urllib.parse.urlencode(parameters, doseq=True)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code not in (400, 422):
                raise
            raise QueryError(f"{parameters.get('query', endpoint)}: {json.load(error)['error']}") from None


def _parse_series(result: Mapping[str, Any], values: list[list[Any]]) -> Series:
    return Series(result["metric"], tuple((float(time), float(value)) for time, value in values))


def fill_variables(expression: str, interval: str, **choices: str) -> str:
    """Return the expression as Grafana sends it, with `interval` for $__rate_interval and a value for each variable. A
    variable without a value matches everything."""

    def choose_value(match: re.Match[str]) -> str:
        return interval if match[1] == "__rate_interval" else choices.get(match[1], ".*")

    return re.sub(r"\$(\w+)", choose_value, expression)


def format_legend(legend: str, labels: Mapping[str, str]) -> str:
    """Return Grafana's name of a series."""
    if not legend:
        return ", ".join(f"{name}={value}" for name, value in labels.items() if name != "__name__")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)
