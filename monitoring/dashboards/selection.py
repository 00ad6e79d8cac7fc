"""The variables of all dashboards: the namespace and the job that the user selects."""

from __future__ import annotations

from monitoring.grafana import Variable

NAMESPACE = Variable("namespace", "namespace", "topkube_job_progress_ratio")
TRAINING_JOB = Variable("training_job", "training_job", 'topkube_job_progress_ratio{namespace=~"$namespace"}')
ONE_JOB = Variable("training_job", "training_job", 'topkube_job_progress_ratio{namespace=~"$namespace"}', several=False)

IN_NAMESPACE = 'namespace=~"$namespace"'
OF_JOB = 'namespace=~"$namespace",training_job=~"$training_job"'
BY_JOB = "by (namespace, training_job)"


def rate(series: str, selector: str = OF_JOB) -> str:
    """Return the rate per second, over an interval that fits the resolution of the panel and of the scrape."""
    return f"rate({series}{{{selector}}}[$__rate_interval])"


def quantile(share: float, histogram: str, selector: str) -> str:
    """Return the quantile `share` (0 to 1) of a histogram."""
    return f"histogram_quantile({share}, sum by (le) ({rate(f'{histogram}_bucket', selector)}))"
