"""One job: its progress, its speed, the time of a step by phase, and the first failure."""

from __future__ import annotations

from monitoring.dashboards.selection import OF_JOB, ONE_JOB, ONE_NAMESPACE, build_quantile, build_rate
from monitoring.grafana import Dashboard, Panel, Query, Row

_STEPS = f"avg({build_rate('topkube_step_seconds_count')})"
_PER_STEP = f"avg by (phase) ({build_rate('topkube_step_phase_seconds_total')}) / on () group_left () {_STEPS}"
_COMPUTE = OF_JOB + ',phase=~"data|forward"'

JOB = Dashboard(
    "topkube-job",
    "TopKube / Job",
    "One TrainingJob: loss, throughput, the time of a step by phase, and the first failure.",
    (
        Row(
            "Now",
            (
                Panel(
                    "Progress",
                    "Finished share of the job's steps.",
                    "percentunit",
                    (Query(f"max(topkube_job_progress_ratio{{{OF_JOB}}})"),),
                    kind="stat",
                    width=4,
                    height=4,
                    most=1,
                ),
                Panel(
                    "Step",
                    "Number of finished steps, across restarts.",
                    "none",
                    (Query(f"max(topkube_job_step{{{OF_JOB}}})"),),
                    kind="stat",
                    width=4,
                    height=4,
                ),
                Panel(
                    "Loss",
                    "Mean loss over all samples of the last step.",
                    "none",
                    (Query(f"max(topkube_loss{{{OF_JOB}}})"),),
                    kind="stat",
                    width=4,
                    height=4,
                    least=None,
                ),
                Panel(
                    "Since the last step",
                    "Seconds since any rank finished a step.",
                    "s",
                    (Query(f"time() - max(topkube_last_step_timestamp_seconds{{{OF_JOB}}})"),),
                    kind="stat",
                    width=4,
                    height=4,
                ),
                Panel(
                    "Attempt",
                    "Number of the current attempt, starting at 1.",
                    "none",
                    (Query(f"max(topkube_job_attempt{{{OF_JOB}}})"),),
                    kind="stat",
                    width=4,
                    height=4,
                ),
                Panel(
                    "Skipped steps",
                    "Steps per second that all ranks skipped because a gradient was NaN or infinite.",
                    "ops",
                    (Query(f"max({build_rate('topkube_skipped_steps_total')})"),),
                    kind="stat",
                    width=4,
                    height=4,
                ),
            ),
        ),
        Row(
            "Learning",
            (
                Panel(
                    "Loss",
                    "Mean loss over all samples of a step.",
                    "none",
                    (Query(f"max by (training_job) (topkube_loss{{{OF_JOB}}})", "{{training_job}}"),),
                    least=None,
                ),
                Panel(
                    "Throughput",
                    "Samples per second over all ranks.",
                    "ops",
                    (Query(f"sum by (training_job) ({build_rate('topkube_samples_total')})", "{{training_job}}"),),
                ),
                Panel(
                    "Norms",
                    "The aggregated gradient before clipping, and the residuals of all ranks (error feedback). A "
                    "residual that keeps growing relative to the gradient means that the density is too low.",
                    "none",
                    (
                        Query(f"max by (training_job) (topkube_gradient_norm{{{OF_JOB}}})", "gradient"),
                        Query(f"sqrt(sum by (training_job) (topkube_residual_norm{{{OF_JOB}}} ^ 2))", "residual"),
                    ),
                ),
                Panel(
                    "Weights of nodes",
                    "onebit only. Unsent: the norm of the weight changes that nodes have not sent yet, divided by the "
                    "norm of what they send. Spread: the distance of the nodes' weights from the weights that they "
                    "agree on, divided by the norm of those. Above 100 (unsent) or 1 (spread) the run shortens its "
                    "period.",
                    "percentunit",
                    (
                        Query(f"max by (training_job) (topkube_unsent_ratio{{{OF_JOB}}})", "unsent"),
                        Query(f"max by (training_job) (topkube_weight_spread_ratio{{{OF_JOB}}})", "spread"),
                    ),
                ),
            ),
        ),
        Row(
            "Time",
            (
                Panel(
                    "Step time by phase",
                    "Seconds per step by phase, mean of all ranks. select, intra and inter are the exchange. They run "
                    "during backward, which waits for them at its end, so backward includes the time without overlap. "
                    "If nodes exchange weights, they run during update.",
                    "s",
                    (Query(_PER_STEP, "{{phase}}"),),
                    stacked=True,
                ),
                Panel(
                    "Step time",
                    "Seconds from one finished step to the next, over all ranks: median and 95th percentile.",
                    "s",
                    tuple(
                        Query(build_quantile(share, "topkube_step_seconds", OF_JOB), f"{share:.0%}")
                        for share in (0.5, 0.95)
                    ),
                ),
                Panel(
                    "Slowest ranks",
                    "Seconds per step that the three slowest ranks spend on data and forward. Others wait for them in "
                    "backward.",
                    "s",
                    (
                        Query(
                            f"topk(3, sum by (rank) ({build_rate('topkube_step_phase_seconds_total', _COMPUTE)})) "
                            f"/ on () group_left () {_STEPS}",
                            "rank {{rank}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Failures",
            (
                Panel(
                    "First failure",
                    "The pod and rank that failed first in the last failed attempt, and the reason. `kubectl describe` "
                    "shows the message and the end of its log.",
                    "string",
                    (
                        Query(
                            "max by (namespace, training_job, pod, rank, reason) "
                            f"(topkube_job_first_failure_info{{{OF_JOB}}})"
                        ),
                    ),
                    kind="table",
                    width=12,
                    height=6,
                ),
                Panel(
                    "Restarts",
                    "Restarts of the job so far, disruptions included.",
                    "short",
                    (Query(f"max by (training_job) (topkube_job_restarts{{{OF_JOB}}})", "{{training_job}}"),),
                    width=12,
                    height=6,
                ),
            ),
        ),
    ),
    (ONE_NAMESPACE, ONE_JOB),
)
