"""The alerts and their runbooks. The thresholds are explained in the runbooks.

An expression contains `<jobs>`, `<operator>` or `<agents>` in the selectors of its series, and `<NAME>` for each of
its thresholds. The chart puts the namespaces and the name of its release there, and the admin's thresholds. Without
them the expression is right for all releases of a cluster, because every aggregation keeps the labels that distinguish
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RUNBOOK_BASE_URL = "https://topkube.dev/docs"
"""The default of the chart's value metrics.alerts.runbookBaseUrl."""
SELECTORS = ("jobs", "operator", "agents")
"""Placeholders of selectors: series about jobs, about the operator, about the agents of nodes."""

_BY_JOB = "by (namespace, training_job)"
_ON_JOB = "on (namespace, training_job)"
_BY_RELEASE = "by (namespace, release)"
_ON_RELEASE = "on (namespace, release)"
_BY_NODE = "by (release, node)"
_JOB = "{{ $labels.namespace }}/{{ $labels.training_job }}"
_RELEASE = "release {{ $labels.release }} in namespace {{ $labels.namespace }}"


def _build_selector(placeholder: str, series: str, selector: str) -> str:
    return f"{series}{{<{placeholder}>{selector}}}"


def _select_jobs(series: str, selector: str = "") -> str:
    """Return a series of jobs, with a place for the chart's namespaces."""
    return _build_selector("jobs", series, selector)


def _select_operator(series: str, selector: str = "") -> str:
    """Return a series of the operator, with a place for the chart's release."""
    return _build_selector("operator", series, selector)


def _select_agents(series: str, selector: str = "") -> str:
    """Return a series of the nodes' agents, with a place for the chart's release."""
    return _build_selector("agents", series, selector)


_SINCE_STEP = f"time() - max {_BY_JOB} ({_select_jobs('topkube_last_step_timestamp_seconds')})"
_SINCE_ACTIVITY = f"time() - max {_BY_JOB} ({_select_jobs('topkube_last_activity_timestamp_seconds')})"
_SINCE_PHASE = f"time() - max {_BY_JOB} ({_select_jobs('topkube_job_phase_timestamp_seconds')})"
_OTHER_PHASE = _select_jobs("topkube_job_phase", 'phase!="Running"')
"""Workers that wait for the next attempt still serve the last step of their last attempt."""
_MEAN_STEP = (
    f"sum {_BY_JOB} ({_select_jobs('topkube_step_seconds_sum')}) "
    f"/ sum {_BY_JOB} ({_select_jobs('topkube_step_seconds_count')})"
)
_RESTARTS = f"max {_BY_JOB} ({_select_jobs('topkube_job_restarts')})"
_RESTARTS_OF_HOUR = f"({_RESTARTS})[1h:1m]"
"""A job has a series for each replica of the operator that led: the subquery makes one series of them. If the number
falls, a new job has the name of a deleted job, and all restarts of the new job are within the hour. `increase` would
extrapolate, and engines differ in how."""
_WEBHOOK = f"group {_BY_RELEASE} ({_select_operator('topkube_admission_reviews_total')})"
_API_FAILED = 'code=~"unreachable|401|429|5.."'
_REVIEW_FAILED = 'outcome="error"'
_REVIEWS = _select_operator("topkube_admission_reviews_total", 'outcome=~"allowed|denied"')
_FIRST_REVIEWS = f"sum {_BY_RELEASE} (last_over_time({_REVIEWS}[30m]) unless {_REVIEWS} offset 30m)"
"""The reviews of replicas that started within half an hour. `increase` misses those before a replica's first scrape."""

_CORRUPTIONS = _select_jobs("topkube_cache_corruptions_total")
"""A worker reads its shards before its first step, so its counter often begins above 0, which `increase` misses."""


def _build_rate(series: str, window: str) -> str:
    return f"rate({series}[{window}])"


def _build_increase(series: str, window: str) -> str:
    return f"increase({series}[{window}])"


@dataclass(frozen=True)
class Alert:
    """An alert. `runbook` names docs/runbooks/RUNBOOK.md; `summary` may use the labels of `expression`."""

    name: str
    expression: str
    lasting: str
    """How long the expression must hold."""
    severity: Literal["critical", "warning", "info"]
    summary: str
    runbook: str
    meaning: str
    """When the alert fires with the default thresholds, for the docs."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """The default of each threshold in the expression, by name."""

    def build_rule(self) -> dict[str, Any]:
        """Return Prometheus's alerting rule, for all releases and with the default thresholds."""
        return {
            "alert": self.name,
            "expr": self.fill_expression(),
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "runbook_url": f"{RUNBOOK_BASE_URL}/runbooks/{self.runbook}/",
            },
        }

    def build_template(self) -> dict[str, Any]:
        """Return the rule with its placeholders, from which the chart makes the rule of a release."""
        rule = {**self.build_rule(), "expr": self.expression}
        rule["annotations"] = {**rule["annotations"], "runbook_url": f"runbooks/{self.runbook}/"}
        return {**rule, "thresholds": dict(self.thresholds)}

    def fill_expression(self) -> str:
        """Return the expression for all releases, with the default thresholds."""
        expression = self.expression
        for placeholder in SELECTORS:
            expression = expression.replace(f"<{placeholder}>", "")
        for name, value in self.thresholds.items():
            expression = expression.replace(f"<{name}>", f"{value:g}")
        return expression.replace("{}", "")


JOBS = (
    Alert(
        "TopKubeJobStalled",
        f"({_SINCE_STEP} > <seconds> and {_ON_JOB} {_SINCE_STEP} > <factor> * {_MEAN_STEP}) "
        f"unless {_ON_JOB} max {_BY_JOB} ({_select_jobs('topkube_job_progress_ratio')}) >= 1 "
        f"unless {_ON_JOB} {_SINCE_ACTIVITY} < <seconds> "
        f"unless {_ON_JOB} {_OTHER_PHASE} == 1",
        "1m",
        "critical",
        f"{_JOB} has finished no step for {{{{ $value | humanizeDuration }}}} and shows no other sign of life",
        "job-stalled",
        "a running job has no step and no other collective for ten minutes, and no step for ten times its usual time",
        {"seconds": 600, "factor": 10},
    ),
    Alert(
        "TopKubeJobReportsNoSteps",
        f"({_SINCE_PHASE} > <seconds> and {_ON_JOB} "
        + _select_jobs("topkube_job_phase", 'phase="Running"')
        + f" == 1) unless {_ON_JOB} max {_BY_JOB} ({_select_jobs('topkube_last_step_timestamp_seconds')})",
        "1m",
        "info",
        f"{_JOB} has been running for {{{{ $value | humanizeDuration }}}} and has reported no step",
        "job-stalled",
        "a job is Running for half an hour without a step",
        {"seconds": 1800},
    ),
    Alert(
        "TopKubeJobFailed",
        f"time() - max {_BY_JOB} ({_select_jobs('topkube_job_failed_timestamp_seconds')}) < <seconds>",
        "0m",
        "warning",
        f"{_JOB} failed {{{{ $value | humanizeDuration }}}} ago",
        "job-failed",
        "a job failed within the last hour",
        {"seconds": 3600},
    ),
    Alert(
        "TopKubeCheckpointFailed",
        f"max {_BY_JOB} ({_select_jobs('topkube_job_checkpoint_failed')}) == 1",
        "0m",
        "warning",
        f"{_JOB} could not write a checkpoint, and has written none since",
        "checkpoint-failed",
        "a checkpoint could not be written, and there is no newer checkpoint",
    ),
    Alert(
        "TopKubeCheckpointTooOld",
        f"time() - max {_BY_JOB} ({_select_jobs('topkube_job_last_checkpoint_timestamp_seconds')}) > <seconds>",
        "5m",
        "warning",
        f"{_JOB} has written no checkpoint for {{{{ $value | humanizeDuration }}}}",
        "checkpoint-failed",
        "a running job has written no checkpoint for two hours",
        {"seconds": 7200},
    ),
    Alert(
        "TopKubeRestartStorm",
        f"((max_over_time({_RESTARTS_OF_HOUR}) - min_over_time({_RESTARTS_OF_HOUR}) "
        f"unless resets({_RESTARTS_OF_HOUR}) > 0) or ({_RESTARTS} and resets({_RESTARTS_OF_HOUR}) > 0)) >= <restarts>",
        "0m",
        "warning",
        f"{_JOB} has restarted {{{{ $value }}}} times within an hour",
        "restart-storm",
        "three restarts within an hour",
        {"restarts": 3},
    ),
    Alert(
        "TopKubeJobPendingTooLong",
        f"({_SINCE_PHASE} > <seconds>) and {_ON_JOB} "
        + _select_jobs("topkube_job_phase", 'phase=~"Pending|Starting|Restarting"')
        + " == 1",
        "1m",
        "warning",
        f"{_JOB} has been waiting to run for {{{{ $value | humanizeDuration }}}}",
        "pending-too-long",
        "a job is in Pending, Starting or Restarting for half an hour",
        {"seconds": 1800},
    ),
    Alert(
        "TopKubeGradientSkipped",
        f"sum {_BY_JOB} ({_build_increase(_select_jobs('topkube_skipped_steps_total'), '15m')}) "
        f"/ max {_BY_JOB} ({_build_increase(_select_jobs('topkube_step_seconds_count'), '15m')}) > <ratio>",
        "5m",
        "warning",
        f"{_JOB} skips {{{{ $value | humanizePercentage }}}} of its steps because of NaN or infinite gradients",
        "gradient-skipped",
        "one step in twenty is skipped",
        {"ratio": 0.05},
    ),
    Alert(
        "TopKubeWeightsDiffer",
        f"max {_BY_JOB} ({_select_jobs('topkube_differing_ranks')}) > 0",
        "0m",
        "critical",
        f"{{{{ $value }}}} rank(s) of {_JOB} have other weights than most ranks",
        "weights-differ",
        "ranks train with different weights",
    ),
    Alert(
        "TopKubeCommunicationSlow",
        f"(sum {_BY_JOB} ({_build_rate(_select_jobs('topkube_exchange_bound_seconds_total'), '10m')}) / sum {_BY_JOB} ("
        + _build_rate(_select_jobs("topkube_step_phase_seconds_total", 'phase="inter"'), "10m")
        + f") < <ratio>) and {_ON_JOB} sum {_BY_JOB} ("
        + _build_rate(_select_jobs("topkube_step_phase_seconds_total", 'phase="inter"'), "10m")
        + f") / sum {_BY_JOB} ({_build_rate(_select_jobs('topkube_step_seconds_sum'), '10m')}) > <share>",
        "15m",
        "warning",
        f"{_JOB} reaches {{{{ $value | humanizePercentage }}}} of the bandwidth that its link had at the start",
        "communication-slow",
        "the exchange reaches less than a quarter of the link's rate and takes over 30% of the step",
        {"ratio": 0.25, "share": 0.3},
    ),
)
CACHE = (
    Alert(
        "TopKubeCacheCorruption",
        f"(sum {_BY_JOB} ({_build_increase(_CORRUPTIONS, '1h')}) > 0) "
        f"or (sum {_BY_JOB} (max_over_time({_CORRUPTIONS}[1h]) unless {_CORRUPTIONS} offset 1h) > 0)",
        "0m",
        "warning",
        f"{_JOB} has found shards with a wrong checksum and has fetched them again",
        "cache-corruption",
        "a checksum was wrong",
    ),
    Alert(
        "TopKubeCacheHitRatioLow",
        f"(sum {_BY_JOB} ("
        + _build_rate(_select_jobs("topkube_cache_hits_total", 'tier="disk"'), "30m")
        + f") / sum {_BY_JOB} ("
        + _build_rate(_select_jobs("topkube_cache_requests_total", 'tier="disk"'), "30m")
        + f") < <ratio>) and {_ON_JOB} sum {_BY_JOB} ("
        + _build_increase(_select_jobs("topkube_cache_requests_total", 'tier="disk"'), "30m")
        + ") > <requests>",
        "1h",
        "info",
        f"{_JOB} finds only {{{{ $value | humanizePercentage }}}} of its samples in the nodes' disk tier",
        "cache-hit-ratio-low",
        "less than half of the samples are on disk, for an hour",
        {"ratio": 0.5, "requests": 1000},
    ),
    Alert(
        "TopKubeCacheDiskFull",
        f"sum {_BY_JOB} ("
        + _select_jobs("topkube_cache_tier_state", 'tier="disk",state=~"frozen|dropped"')
        + ") > <pods>",
        "10m",
        "warning",
        f"{{{{ $value }}}} worker(s) of {_JOB} store no more shards: the disk of their cache is full or fails",
        "cache-disk-full",
        "the cache of a worker stores no more shards for ten minutes",
        {"pods": 0},
    ),
    Alert(
        "TopKubeNodeCacheFull",
        f"max {_BY_NODE} ({_select_agents('topkube_node_cache_missing_bytes')}) > <bytes>",
        "10m",
        "warning",
        "the cache of node {{ $labels.node }} exceeds its limits by {{ $value | humanize1024 }}B, and no dataset may "
        "be evicted",
        "cache-disk-full",
        "a node's cache exceeds its limits for ten minutes, and no dataset may be evicted",
        {"bytes": 0},
    ),
    Alert(
        "TopKubeNodeCacheStuck",
        f"time() - max {_BY_NODE} ({_select_agents('topkube_node_cache_last_pass_timestamp_seconds')}) > <seconds>",
        "5m",
        "warning",
        "the cache agent of node {{ $labels.node }} has finished no pass for {{ $value | humanizeDuration }}",
        "node-cache-stuck",
        "the agent of a node's cache has finished no pass for ten minutes",
        {"seconds": 600},
    ),
)
NODES = (
    Alert(
        "TopKubeNodeAvoided",
        "count by (namespace, node) (max by (namespace, training_job, node) "
        f"({_select_jobs('topkube_job_avoided_node_info')})) > <jobs_of_node>",
        "5m",
        "warning",
        "{{ $value }} job(s) in {{ $labels.namespace }} avoid the node {{ $labels.node }}: it has a fault, or attempts "
        "failed there first",
        "node-avoided",
        "unfinished jobs avoid a node for five minutes",
        {"jobs_of_node": 0},
    ),
)
OPERATOR = (
    Alert(
        "TopKubeOperatorDown",
        f"(group {_BY_RELEASE} (last_over_time({_select_operator('topkube_operator_build_info')}[1d])) "
        f"unless group {_BY_RELEASE} ({_select_operator('topkube_operator_build_info')})) "
        f"or absent_over_time({_select_operator('topkube_operator_build_info')}[1d])",
        "5m",
        "critical",
        "Prometheus scrapes no operator{{ with $labels.release }} of release {{ . }}{{ end }}: jobs continue, but "
        "nothing starts, restarts or ends them",
        "operator-down",
        "no operator was scraped for five minutes",
    ),
    Alert(
        "TopKubeNoLeader",
        f"sum {_BY_RELEASE} ({_select_operator('topkube_leader')}) == 0",
        "2m",
        "critical",
        f"No operator replica of {_RELEASE} leads: jobs continue, but nothing starts, restarts or ends them",
        "no-leader",
        "no replica leads for two minutes",
    ),
    Alert(
        "TopKubeReconcileErrors",
        f"sum {_BY_RELEASE} ("
        + _build_rate(_select_operator("topkube_reconciles_total", 'outcome="error"'), "10m")
        + f") / sum {_BY_RELEASE} ({_build_rate(_select_operator('topkube_reconciles_total'), '10m')}) > <ratio>",
        "10m",
        "warning",
        f"{{{{ $value | humanizePercentage }}}} of the reconciles of {_RELEASE} fail",
        "reconcile-errors",
        "one reconcile in ten fails",
        {"ratio": 0.1},
    ),
    Alert(
        "TopKubeWorkQueueSlow",
        f"max {_BY_RELEASE} ({_select_operator('topkube_work_queue_oldest_seconds')}) > <seconds>",
        "5m",
        "warning",
        f"a job has been in the work queue of {_RELEASE} for {{{{ $value | humanizeDuration }}}}",
        "work-queue-slow",
        "a job is in the operator's work queue for a minute, for five minutes in a row",
        {"seconds": 60},
    ),
    Alert(
        "TopKubeApiErrors",
        f"sum {_BY_RELEASE} ({_build_rate(_select_operator('topkube_api_requests_total', _API_FAILED), '10m')}) "
        f"/ sum {_BY_RELEASE} ({_build_rate(_select_operator('topkube_api_requests_total'), '10m')}) > <ratio>",
        "10m",
        "warning",
        f"the API server fails {{{{ $value | humanizePercentage }}}} of the calls of {_RELEASE}",
        "api-errors",
        "the API server does not answer, limits or fails one call in twenty",
        {"ratio": 0.05},
    ),
    Alert(
        "TopKubeAdmissionFailing",
        f"(sum {_BY_RELEASE} "
        f"({_build_increase(_select_operator('topkube_admission_reviews_total', _REVIEW_FAILED), '10m')}) "
        f"> <failures>) or (max {_BY_RELEASE} ({_select_operator('topkube_admission_published')}) == 0) "
        f"or (max {_BY_RELEASE} ({_build_increase(_select_operator('topkube_jobs_created_total'), '30m')}) > 0 "
        f"and {_ON_RELEASE} {_WEBHOOK} unless {_ON_RELEASE} "
        f"sum {_BY_RELEASE} ({_build_increase(_REVIEWS, '30m')}) > 0 unless {_ON_RELEASE} {_FIRST_REVIEWS} > 0)",
        "5m",
        "warning",
        f"the webhook of {_RELEASE} does not review jobs: invalid jobs are accepted and fail later",
        "admission-failing",
        "the webhook fails, its caBundle could not be written, or jobs appear that it has not reviewed",
        {"failures": 0},
    ),
    Alert(
        "TopKubeAdmissionCertificateExpires",
        f"min {_BY_RELEASE} ({_select_operator('topkube_admission_certificate_expiry_timestamp_seconds')}) - time() "
        "< <seconds>",
        "10m",
        "warning",
        f"the certificate of the webhook of {_RELEASE} expires in {{{{ $value | humanizeDuration }}}}",
        "admission-failing",
        "the webhook's certificate expires within a week",
        {"seconds": 604800},
    ),
)
GROUPS = {"topkube-jobs": JOBS, "topkube-cache": CACHE, "topkube-nodes": NODES, "topkube-operator": OPERATOR}
ALERTS = tuple(alert for group in GROUPS.values() for alert in group)
