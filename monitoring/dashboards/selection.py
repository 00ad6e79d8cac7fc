"""The variables of all dashboards: the namespace, the job and the release that the user selects."""

from __future__ import annotations

from monitoring.grafana import Variable

_WITH_JOB = '__name__=~"topkube_job_phase|topkube_job_step"'
"""Series that every job has: from the operator before its first step, from its ranks on a laptop."""
_OF_NAMESPACE = f'{{{_WITH_JOB},namespace=~"$namespace"}}'
NAMESPACE = Variable("namespace", "namespace", f"{{{_WITH_JOB}}}")
TRAINING_JOB = Variable("training_job", "training_job", _OF_NAMESPACE)
ONE_NAMESPACE = Variable("namespace", "namespace", f"{{{_WITH_JOB}}}", several=False)
ONE_JOB = Variable("training_job", "training_job", _OF_NAMESPACE, several=False)
OPERATOR_NAMESPACE = Variable("operator_namespace", "namespace", "topkube_operator_build_info")
RELEASE = Variable("release", "release", 'topkube_operator_build_info{namespace=~"$operator_namespace"}')

IN_NAMESPACE = 'namespace=~"$namespace"'
OF_JOB = 'namespace=~"$namespace",training_job=~"$training_job"'
OF_RELEASE = 'namespace=~"$operator_namespace",release=~"$release"'
BY_JOB = "by (namespace, training_job)"
BY_RELEASE = "by (namespace, release)"


def build_rate(series: str, selector: str = OF_JOB) -> str:
    """Return the rate per second, over an interval that fits the resolution of the panel and of the scrape."""
    return f"rate({series}{{{selector}}}[$__rate_interval])"


def build_quantile(share: float, histogram: str, selector: str, by: str = "") -> str:
    """Return a quantile of a histogram, over all series or for each value of the labels `by`."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) ({build_rate(f'{histogram}_bucket', selector)}))"
