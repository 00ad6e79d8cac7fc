"""All jobs of the cluster: their phases, their throughput, and jobs that may need attention."""

from __future__ import annotations

from monitoring.dashboards.selection import BY_JOB, IN_NAMESPACE, NAMESPACE, build_quantile, build_rate
from monitoring.grafana import Dashboard, Panel, Query, Row

_PHASES = f"sum by (phase) (max by (namespace, phase) (topkube_jobs{{{IN_NAMESPACE}}}))"
_INTER = IN_NAMESPACE + ',level="inter"'
_AVOIDED = f"max by (namespace, training_job, node, reason) (topkube_job_avoided_node_info{{{IN_NAMESPACE}}})"
_WAITING = f'topkube_job_phase{{{IN_NAMESPACE},phase=~"Pending|Starting|Restarting"}} == 1'

CLUSTER = Dashboard(
    "topkube-cluster",
    "TopKube / Cluster",
    "All TrainingJobs: phases, throughput, progress, and jobs that may need attention.",
    (
        Row(
            "Jobs",
            (
                Panel(
                    "Jobs by phase now",
                    "Number of TrainingJobs in each phase. Finished jobs count until they are deleted.",
                    "short",
                    (Query(_PHASES, "{{phase}}"),),
                    kind="stat",
                    width=24,
                    height=4,
                ),
                Panel(
                    "Jobs by phase",
                    "TrainingJobs over time. If Pending grows, the cluster is full, or pods cannot start.",
                    "short",
                    (Query(_PHASES, "{{phase}}"),),
                    stacked=True,
                ),
                Panel(
                    "Time without a step",
                    "Seconds since each job last finished a step. If a line climbs, the job hangs or "
                    "is starting again.",
                    "s",
                    (
                        Query(
                            f"time() - max {BY_JOB} (topkube_last_step_timestamp_seconds{{{IN_NAMESPACE}}})",
                            "{{namespace}}/{{training_job}}",
                        ),
                    ),
                ),
                Panel(
                    "Waiting jobs",
                    "Seconds since a job that is not running yet entered its phase.",
                    "s",
                    (
                        Query(
                            f"time() - max {BY_JOB} (topkube_job_phase_timestamp_seconds{{{IN_NAMESPACE}}} "
                            f"and on (namespace, training_job) ({_WAITING}))",
                            "{{namespace}}/{{training_job}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Training",
            (
                Panel(
                    "Throughput",
                    "Samples per second of each job, over all its ranks.",
                    "ops",
                    (
                        Query(
                            f"sum {BY_JOB} ({build_rate('topkube_samples_total', IN_NAMESPACE)})",
                            "{{namespace}}/{{training_job}}",
                        ),
                    ),
                ),
                Panel(
                    "Progress",
                    "Finished share of each job's steps.",
                    "percentunit",
                    (
                        Query(
                            f"max {BY_JOB} (topkube_job_progress_ratio{{{IN_NAMESPACE}}})",
                            "{{namespace}}/{{training_job}}",
                        ),
                    ),
                    kind="bargauge",
                    most=1,
                ),
                Panel(
                    "Sent between nodes",
                    "Gradient bytes per second that each job sends over the network.",
                    "Bps",
                    (
                        Query(
                            f"sum {BY_JOB} ({build_rate('topkube_sent_bytes_total', _INTER)})",
                            "{{namespace}}/{{training_job}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Starts and restarts",
            (
                Panel(
                    "Restarts",
                    "Ended attempts that were followed by another, by reason. The job did not cause Evicted, "
                    "Preempted and NodeLost.",
                    "short",
                    (
                        Query(
                            "sum by (reason) "
                            f"(increase(topkube_job_restarts_total{{{IN_NAMESPACE}}}[$__rate_interval]))",
                            "{{reason}}",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    "Time to start",
                    "Seconds from a job's creation (or resumption) to Running: median and 95th percentile. It "
                    "includes the wait for nodes and image pulls.",
                    "s",
                    tuple(
                        Query(build_quantile(share, "topkube_job_start_seconds", IN_NAMESPACE), f"{share:.0%}")
                        for share in (0.5, 0.95)
                    ),
                    width=12,
                ),
                Panel(
                    "Avoided nodes",
                    "Number of unfinished jobs that avoid each node, because the node has a fault or because attempts "
                    "failed there first.",
                    "short",
                    (Query(f"count by (node, reason) ({_AVOIDED})", "{{node}}: {{reason}}"),),
                    width=24,
                ),
            ),
        ),
    ),
    (NAMESPACE,),
)
