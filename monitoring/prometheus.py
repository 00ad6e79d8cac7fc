"""Questions to a Prometheus, as Grafana asks them."""

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
    """Prometheus refused a query: the message is its own."""


@dataclass(frozen=True)
class Series:
    """Labels, and (time, value) by time."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """The server at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def query(self, expression: str) -> list[Series]:
        """What it answers now. Raises QueryError."""
        return [_series(one, [one["value"]]) for one in self.ask("query", query=expression)["result"]]

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        """The values from `start` to `end` (Unix seconds), one every `step`. Raises QueryError."""
        found = self.ask("query_range", query=expression, start=start, end=end, step=step)
        return [_series(one, one["values"]) for one in found["result"]]

    def ask(self, what: str, **parameters: Any) -> Any:
        """`data` of /api/v1/WHAT."""
        address = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters, doseq=True)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code not in (400, 422):
                raise
            raise QueryError(f"{parameters.get('query', what)}: {json.load(error)['error']}") from None


def _series(one: Mapping[str, Any], values: list[list[Any]]) -> Series:
    return Series(one["metric"], tuple((float(time), float(value)) for time, value in values))


def chosen(expression: str, interval: str, **choices: str) -> str:
    """The expression as Grafana sends it: `interval` for $__rate_interval, and a value for each variable; all values
    where none is given."""

    def value(match: re.Match[str]) -> str:
        return interval if match[1] == "__rate_interval" else choices.get(match[1], ".*")

    return re.sub(r"\$(\w+)", value, expression)


def named(legend: str, labels: Mapping[str, str]) -> str:
    """How Grafana names a series."""
    if not legend:
        return ", ".join(f"{name}={value}" for name, value in labels.items() if name != "__name__")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)
