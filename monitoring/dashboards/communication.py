"""The exchange of gradients: bytes compared with a dense all-reduce, speed, and use of the link."""

from __future__ import annotations

from monitoring.dashboards.selection import BY_JOB, NAMESPACE, OF_JOB, TRAINING_JOB, build_rate
from monitoring.grafana import Dashboard, Panel, Query, Row

_INTER = OF_JOB + ',level="inter"'
_INTER_SECONDS = OF_JOB + ',phase="inter"'
_EXCHANGE = OF_JOB + ',phase=~"select|intra|inter"'
_NAME = "{{namespace}}/{{training_job}}"

COMMUNICATION = Dashboard(
    "topkube-communication",
    "TopKube / Communication",
    "The gradient exchange: bytes compared with a dense all-reduce, density, bandwidth, and use of the link.",
    (
        Row(
            "Bytes",
            (
                Panel(
                    "Sent against dense",
                    "Bytes per second between nodes and inside nodes, and the bytes that a dense ring all-reduce of "
                    "the same gradients would send at the same step rate.",
                    "Bps",
                    (
                        Query(f"sum by (level) ({build_rate('topkube_sent_bytes_total')})", "{{level}}"),
                        Query(f"sum({build_rate('topkube_dense_equivalent_bytes_total')})", "dense equivalent"),
                    ),
                    logarithmic=True,
                    least=None,
                ),
                Panel(
                    "Sent share of dense",
                    "Bytes between nodes as a share of all bytes that a dense ring would send.",
                    "percentunit",
                    (
                        Query(
                            f"sum {BY_JOB} ({build_rate('topkube_sent_bytes_total', _INTER)}) "
                            f"/ sum {BY_JOB} ({build_rate('topkube_dense_equivalent_bytes_total')})",
                            _NAME,
                        ),
                    ),
                ),
                Panel(
                    "Density",
                    "Share of the gradient's entries that is sent between nodes. It falls during warm-up; 1 is dense.",
                    "percentunit",
                    (Query(f"max {BY_JOB} (topkube_density_ratio{{{OF_JOB}}})", _NAME),),
                    most=1,
                ),
            ),
        ),
        Row(
            "Speed",
            (
                Panel(
                    "Bandwidth between nodes",
                    "Bytes per second that a rank sends during the exchange, mean of all ranks, and the bandwidth "
                    "that the link had when the job started. The time of waiting for slower ranks counts as exchange.",
                    "Bps",
                    (
                        Query(
                            f"sum {BY_JOB} ({build_rate('topkube_sent_bytes_total', _INTER)}) "
                            f"/ sum {BY_JOB} ({build_rate('topkube_step_phase_seconds_total', _INTER_SECONDS)})",
                            f"reached {_NAME}",
                        ),
                        Query(f"avg {BY_JOB} (topkube_link_bytes_per_second{{{OF_JOB}}})", f"link {_NAME}"),
                    ),
                    logarithmic=True,
                    least=None,
                ),
                Panel(
                    "Share of the bound",
                    "The minimum time that the bytes between nodes need on the link as it was measured at the start, "
                    "compared with the time they took. Latency keeps small exchanges far below 100%. A fall "
                    "means that the network became slower or that ranks wait for each other.",
                    "percentunit",
                    (
                        Query(
                            f"sum {BY_JOB} ({build_rate('topkube_exchange_bound_seconds_total')}) "
                            f"/ sum {BY_JOB} ({build_rate('topkube_step_phase_seconds_total', _INTER_SECONDS)})",
                            _NAME,
                        ),
                    ),
                ),
                Panel(
                    "Dense-equivalent bandwidth",
                    "Bytes per second that a dense all-reduce would need to be as fast as this exchange, mean of all "
                    "ranks. It includes selection and the stages inside the node.",
                    "Bps",
                    (
                        Query(
                            f"sum {BY_JOB} ({build_rate('topkube_dense_equivalent_bytes_total')}) "
                            f"/ sum {BY_JOB} ({build_rate('topkube_step_phase_seconds_total', _EXCHANGE)})",
                            _NAME,
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Time",
            (
                Panel(
                    "Exchange by stage",
                    "Seconds per second that a rank spends on selection, inside the node and between nodes, mean of "
                    "all ranks. It overlaps with backward.",
                    "percentunit",
                    (
                        Query(
                            f"avg by (phase) ({build_rate('topkube_step_phase_seconds_total', _EXCHANGE)})", "{{phase}}"
                        ),
                    ),
                    stacked=True,
                    width=12,
                ),
                Panel(
                    "Exchange share of a step",
                    "Seconds of the exchange divided by seconds of the step. Overlap with backward costs nothing. If "
                    "the share is above half of backward, try a lower density or larger batches.",
                    "percentunit",
                    (
                        Query(
                            f"sum {BY_JOB} ({build_rate('topkube_step_phase_seconds_total', _EXCHANGE)}) "
                            f"/ sum {BY_JOB} ({build_rate('topkube_step_seconds_sum')})",
                            _NAME,
                        ),
                    ),
                    width=12,
                ),
            ),
        ),
    ),
    (NAMESPACE, TRAINING_JOB),
)
