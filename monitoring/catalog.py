"""Every metric that TopKube has, by the part that serves it."""

from __future__ import annotations

from dataclasses import dataclass

from topkube.telemetry import metrics as runtime
from topkube.telemetry.metrics import Metric
from topkube_operator.control import metrics as operator
from topkube_operator.node_cache import metrics as node_cache


@dataclass(frozen=True)
class MetricSource:
    """A part of TopKube with an endpoint: its address, and the metrics that it serves."""

    title: str
    address: str
    metrics: tuple[Metric, ...]


SOURCES = (
    MetricSource(
        "Training",
        "Each worker pod on port 9477, for all its ranks; on a laptop `topkube run --metrics-port PORT`. Counters "
        "begin again at zero with every attempt, and series end with their pod.",
        runtime.METRICS,
    ),
    MetricSource(
        "Data cache",
        "In the same scrape: one set per worker pod, summed over its ranks and their data loaders, if the job uses "
        "`topkube.data.CachedDataset`.",
        runtime.CACHE,
    ),
    MetricSource(
        "Operator",
        "Each operator pod on port 8080. Series about jobs carry the job's own `namespace` (scrape with "
        "`honor_labels`); the replica that acts serves them, and they end with the job; finished jobs are counted "
        "only. Other series carry the operator's own `namespace` and the `release`.",
        operator.METRICS,
    ),
    MetricSource(
        "Caches of nodes",
        "Each node's agent on port 8080, if `cache.node.enabled` is set. Series about datasets carry the `namespace` "
        "of their jobs (scrape with `honor_labels`).",
        node_cache.METRICS,
    ),
)


def find_metric(series: str) -> Metric | None:
    """Return the metric that stores values under the name `series`; None if there is none."""
    return next((metric for source in SOURCES for metric in source.metrics if series in metric.series), None)
