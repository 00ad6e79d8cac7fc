"""The alerts and their runbooks. The thresholds are explained in the runbooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import yaml

_BY_JOB = "by (namespace, training_job)"
_ON_JOB = "on (namespace, training_job)"
_SINCE_STEP = f"time() - max {_BY_JOB} (topkube_last_step_timestamp_seconds)"
_SINCE_PHASE = f"time() - max {_BY_JOB} (topkube_job_phase_timestamp_seconds)"
_MEAN_STEP = f"sum {_BY_JOB} (topkube_step_seconds_sum) / sum {_BY_JOB} (topkube_step_seconds_count)"
_JOB = "{{ $labels.namespace }}/{{ $labels.training_job }}"


@dataclass(frozen=True)
class Alert:
    """One alert. `runbook` names docs/runbooks/RUNBOOK.md; `summary` may use the labels of `expression`."""

    name: str
    expression: str
    lasting: str
    """How long the expression must hold."""
    severity: Literal["critical", "warning", "info"]
    summary: str
    runbook: str

    def rule(self) -> dict[str, Any]:
        """Return Prometheus's alerting rule."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook_url": f"runbooks/{self.runbook}"},
        }


JOBS = (
    Alert(
        "TopKubeJobStalled",
        f"({_SINCE_STEP} > 600 and {_ON_JOB} {_SINCE_STEP} > 10 * {_MEAN_STEP}) "
        f"unless {_ON_JOB} max {_BY_JOB} (topkube_job_progress_ratio) >= 1",
        "1m",
        "critical",
        f"{_JOB} has finished no step for {{{{ $value | humanizeDuration }}}}",
        "job-stalled",
    ),
    Alert(
        "TopKubeJobReportsNoSteps",
        f'({_SINCE_PHASE} > 1800 and {_ON_JOB} topkube_job_phase{{phase="Running"}} == 1) '
        f"unless {_ON_JOB} max {_BY_JOB} (topkube_last_step_timestamp_seconds)",
        "1m",
        "info",
        f"{_JOB} has been running for {{{{ $value | humanizeDuration }}}} and has reported no step",
        "job-stalled",
    ),
    Alert(
        "TopKubeJobFailed",
        f"time() - max {_BY_JOB} (topkube_job_failed_timestamp_seconds) < 3600",
        "0m",
        "warning",
        f"{_JOB} failed {{{{ $value | humanizeDuration }}}} ago",
        "job-failed",
    ),
    Alert(
        "TopKubeCheckpointFailed",
        f"max {_BY_JOB} (topkube_job_checkpoint_failed) == 1",
        "0m",
        "warning",
        f"{_JOB} could not write a checkpoint, and has written none since",
        "checkpoint-failed",
    ),
    Alert(
        "TopKubeCheckpointTooOld",
        f"time() - max {_BY_JOB} (topkube_job_last_checkpoint_timestamp_seconds) > 7200",
        "5m",
        "warning",
        f"{_JOB} has written no checkpoint for {{{{ $value | humanizeDuration }}}}",
        "checkpoint-failed",
    ),
    Alert(
        "TopKubeRestartStorm",
        f"max {_BY_JOB} (max_over_time(topkube_job_restarts[1h]) - min_over_time(topkube_job_restarts[1h])) >= 3",
        "0m",
        "warning",
        f"{_JOB} has restarted {{{{ $value }}}} times within an hour",
        "restart-storm",
    ),
    Alert(
        "TopKubeJobPendingTooLong",
        f'({_SINCE_PHASE} > 1800) and {_ON_JOB} topkube_job_phase{{phase=~"Pending|Starting"}} == 1',
        "1m",
        "warning",
        f"{_JOB} has been waiting to run for {{{{ $value | humanizeDuration }}}}",
        "pending-too-long",
    ),
    Alert(
        "TopKubeGradientSkipped",
        f"sum {_BY_JOB} (increase(topkube_skipped_steps_total[15m])) "
        f"/ max {_BY_JOB} (increase(topkube_step_seconds_count[15m])) > 0.05",
        "5m",
        "warning",
        f"{_JOB} skips {{{{ $value | humanizePercentage }}}} of its steps because of NaN or infinite gradients",
        "gradient-skipped",
    ),
    Alert(
        "TopKubeWeightsDiffer",
        f"max {_BY_JOB} (topkube_differing_ranks) > 0",
        "0m",
        "critical",
        f"{{{{ $value }}}} rank(s) of {_JOB} have other weights than most ranks",
        "weights-differ",
    ),
    Alert(
        "TopKubeCommunicationSlow",
        f"(sum {_BY_JOB} (rate(topkube_exchange_bound_seconds_total[10m])) "
        f'/ sum {_BY_JOB} (rate(topkube_step_phase_seconds_total{{phase="inter"}}[10m])) < 0.25) '
        f'and {_ON_JOB} sum {_BY_JOB} (rate(topkube_step_phase_seconds_total{{phase="inter"}}[10m])) '
        f"/ sum {_BY_JOB} (rate(topkube_step_seconds_sum[10m])) > 0.3",
        "15m",
        "warning",
        f"{_JOB} reaches {{{{ $value | humanizePercentage }}}} of the bandwidth that its link had at the start",
        "communication-slow",
    ),
)
CACHE = (
    Alert(
        "TopKubeCacheCorruption",
        f"sum {_BY_JOB} (increase(topkube_cache_corruptions_total[1h])) > 0",
        "0m",
        "warning",
        f"{_JOB} has found shards with a wrong checksum and has fetched them again",
        "cache-corruption",
    ),
    Alert(
        "TopKubeCacheHitRatioLow",
        f'(sum {_BY_JOB} (rate(topkube_cache_hits_total{{tier="disk"}}[30m])) '
        f'/ sum {_BY_JOB} (rate(topkube_cache_requests_total{{tier="disk"}}[30m])) < 0.5) '
        f'and {_ON_JOB} sum {_BY_JOB} (increase(topkube_cache_requests_total{{tier="disk"}}[30m])) > 1000',
        "1h",
        "info",
        f"{_JOB} finds only {{{{ $value | humanizePercentage }}}} of its samples in the nodes' disk tier",
        "cache-hit-ratio-low",
    ),
)
NODES = (
    Alert(
        "TopKubeNodeAvoided",
        "count by (node) (max by (namespace, training_job, node) (topkube_job_avoided_node_info))",
        "5m",
        "warning",
        "{{ $value }} job(s) avoid the node {{ $labels.node }}: it has a fault, or attempts failed there first",
        "node-avoided",
    ),
)
OPERATOR = (
    Alert(
        "TopKubeOperatorDown",
        'absent(topkube_build_info{component="operator"})',
        "5m",
        "critical",
        "Prometheus scrapes no operator: jobs continue, but nothing starts, restarts or ends them",
        "operator-down",
    ),
    Alert(
        "TopKubeNoLeader",
        "sum(topkube_leader) == 0",
        "2m",
        "critical",
        "No operator replica leads: jobs continue, but nothing starts, restarts or ends them",
        "no-leader",
    ),
    Alert(
        "TopKubeReconcileErrors",
        'sum(rate(topkube_reconciles_total{outcome="error"}[10m])) / sum(rate(topkube_reconciles_total[10m])) > 0.1',
        "10m",
        "warning",
        "{{ $value | humanizePercentage }} of the operator's reconciles fail",
        "reconcile-errors",
    ),
)
GROUPS = {"topkube-jobs": JOBS, "topkube-cache": CACHE, "topkube-nodes": NODES, "topkube-operator": OPERATOR}
ALERTS = tuple(alert for group in GROUPS.values() for alert in group)


def rules() -> str:
    """Return the rules file, which Prometheus loads and the chart puts into a PrometheusRule."""
    groups = [{"name": name, "rules": [alert.rule() for alert in group]} for name, group in GROUPS.items()]
    return yaml.safe_dump({"groups": groups}, sort_keys=False, width=10_000)
