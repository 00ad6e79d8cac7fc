"""The operator itself: leadership, speed, and errors."""

from __future__ import annotations

from monitoring.dashboards.selection import quantile, rate
from monitoring.grafana import Dashboard, Panel, Query, Row

_FAILED = 'outcome="error"'

OPERATOR = Dashboard(
    "topkube-operator",
    "TopKube / Operator",
    "The operator: leadership, reconciles, errors, its own memory and processor time.",
    (
        Row(
            "Now",
            (
                Panel(
                    "Leaders",
                    "Number of replicas that act. It should be 1. If it is 0, no job is reconciled.",
                    "short",
                    (Query("sum(topkube_leader)"),),
                    kind="stat",
                    width=6,
                    height=4,
                ),
                Panel(
                    "Replicas",
                    "Number of operator pods that Prometheus scrapes.",
                    "short",
                    (Query('count(topkube_build_info{component="operator"})'),),
                    kind="stat",
                    width=6,
                    height=4,
                ),
                Panel(
                    "Versions",
                    "Versions of the running operators. There are two during an upgrade.",
                    "string",
                    (Query('count by (version) (topkube_build_info{component="operator"})', "{{version}}"),),
                    kind="table",
                    width=6,
                    height=4,
                ),
                Panel(
                    "Unfinished jobs",
                    "Number of jobs that have not ended.",
                    "short",
                    (Query("sum(max by (namespace, training_job) (topkube_job_phase))"),),
                    kind="stat",
                    width=6,
                    height=4,
                ),
            ),
        ),
        Row(
            "Reconciles",
            (
                Panel(
                    "Reconciles",
                    "Per second, by outcome: changed (something was written), unchanged, error.",
                    "ops",
                    (Query(f"sum by (outcome) ({rate('topkube_reconciles_total', '')})", "{{outcome}}"),),
                ),
                Panel(
                    "Reconcile time",
                    "Seconds of one reconcile, including calls to the cluster: median, 95th and 99th percentile.",
                    "s",
                    tuple(
                        Query(quantile(share, "topkube_reconcile_seconds", ""), f"{share:.0%}")
                        for share in (0.5, 0.95, 0.99)
                    ),
                ),
                Panel(
                    "Errors",
                    "Share of reconciles that failed. They are tried again. If the share stays high, check the "
                    "operator's log.",
                    "percentunit",
                    (
                        Query(
                            f"sum({rate('topkube_reconciles_total', _FAILED)}) "
                            f"/ sum({rate('topkube_reconciles_total', '')})",
                            "errors",
                        ),
                    ),
                    most=1,
                ),
            ),
        ),
        Row(
            "Work and cost",
            (
                Panel(
                    "Transitions",
                    "Jobs per second that entered a phase.",
                    "ops",
                    (Query(f"sum by (phase) ({rate('topkube_job_transitions_total', '')})", "{{phase}}"),),
                ),
                Panel(
                    "Memory",
                    "Resident memory of each operator pod.",
                    "bytes",
                    (Query("process_resident_memory_bytes and on (instance) topkube_leader", "{{instance}}"),),
                ),
                Panel(
                    "Processor",
                    "Cores that each operator pod uses.",
                    "short",
                    (
                        Query(
                            f"{rate('process_cpu_seconds_total', '')} and on (instance) topkube_leader", "{{instance}}"
                        ),
                    ),
                ),
            ),
        ),
    ),
)
