"""The operator itself: leadership, speed, errors, its work queue, its webhook, and the agents of the nodes' caches."""

from __future__ import annotations

from monitoring.dashboards.selection import (
    BY_RELEASE,
    OF_RELEASE,
    OPERATOR_NAMESPACE,
    RELEASE,
    build_quantile,
    build_rate,
)
from monitoring.grafana import Dashboard, Panel, Query, Row

_NAME = "{{namespace}}/{{release}}"
_LABELS = "namespace, release"
_FAILED = OF_RELEASE + ',outcome="error"'
_OF_AGENT = 'release=~"$release"'
_BY_NODE = "by (release, node)"
_NODE = "{{release}}: {{node}}"


def _select_processes(expression: str) -> str:
    """Return a value of the processes that are operators of the selected releases, with the release as a label."""
    operators = f"group by (instance, pod, {_LABELS}) (topkube_leader{{{OF_RELEASE}}})"
    return f"{expression} * on (instance) group_left (release) {operators}"


OPERATOR = Dashboard(
    "topkube-operator",
    "TopKube / Operator",
    "The operator: leadership, reconciles, work queue, API calls, admission, memory and processor time; node caches.",
    (
        Row(
            "Now",
            (
                Panel(
                    "Leaders",
                    "Number of replicas that act, for each release. It should be 1. If it is 0, no job is reconciled.",
                    "short",
                    (Query(f"sum {BY_RELEASE} (topkube_leader{{{OF_RELEASE}}})", _NAME),),
                    kind="stat",
                    width=6,
                    height=4,
                ),
                Panel(
                    "Replicas",
                    "Number of operator pods that Prometheus scrapes, for each release.",
                    "short",
                    (Query(f"count {BY_RELEASE} (topkube_operator_build_info{{{OF_RELEASE}}})", _NAME),),
                    kind="stat",
                    width=6,
                    height=4,
                ),
                Panel(
                    "Versions",
                    "Versions of the running operators. There are two during an upgrade.",
                    "string",
                    (
                        Query(
                            f"count by ({_LABELS}, version) (topkube_operator_build_info{{{OF_RELEASE}}})",
                            f"{_NAME}: {{{{version}}}}",
                        ),
                    ),
                    kind="table",
                    width=6,
                    height=4,
                ),
                Panel(
                    "Unfinished jobs",
                    "Number of jobs that have not ended, of all releases.",
                    "short",
                    (Query("count(max by (namespace, training_job) (topkube_job_phase))"),),
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
                    (
                        Query(
                            f"sum by ({_LABELS}, outcome) ({build_rate('topkube_reconciles_total', OF_RELEASE)})",
                            f"{_NAME}: {{{{outcome}}}}",
                        ),
                    ),
                ),
                Panel(
                    "Reconcile time",
                    "Seconds of one reconcile, including calls to the cluster: median, 95th and 99th percentile.",
                    "s",
                    tuple(
                        Query(
                            build_quantile(share, "topkube_reconcile_seconds", OF_RELEASE, _LABELS),
                            f"{_NAME}: {share:.0%}",
                        )
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
                            f"sum {BY_RELEASE} ({build_rate('topkube_reconciles_total', _FAILED)}) "
                            f"/ sum {BY_RELEASE} ({build_rate('topkube_reconciles_total', OF_RELEASE)})",
                            _NAME,
                        ),
                    ),
                    most=1,
                ),
            ),
        ),
        Row(
            "Work queue and API server",
            (
                Panel(
                    "Work queue",
                    "Jobs that are due and wait for a thread, and jobs that a thread reconciles. If jobs wait for "
                    "long, the API server is slow.",
                    "short",
                    (
                        Query(f"sum {BY_RELEASE} (topkube_work_queue_waiting{{{OF_RELEASE}}})", f"{_NAME}: waiting"),
                        Query(f"sum {BY_RELEASE} (topkube_work_queue_working{{{OF_RELEASE}}})", f"{_NAME}: working"),
                    ),
                ),
                Panel(
                    "Time in the queue",
                    "Seconds from the time when a job is due to its reconcile: 95th percentile; and the age of the "
                    "oldest job in the queue.",
                    "s",
                    (
                        Query(build_quantile(0.95, "topkube_work_queue_seconds", OF_RELEASE, _LABELS), f"{_NAME}: 95%"),
                        Query(
                            f"max {BY_RELEASE} (topkube_work_queue_oldest_seconds{{{OF_RELEASE}}})", f"{_NAME}: oldest"
                        ),
                    ),
                ),
                Panel(
                    "Calls to the API server",
                    "Per second, by status code. Codes 404 and 409 are part of normal work. unreachable, 429 and 5xx "
                    "are errors.",
                    "ops",
                    (
                        Query(
                            f"sum by ({_LABELS}, code) ({build_rate('topkube_api_requests_total', OF_RELEASE)})",
                            f"{_NAME}: {{{{code}}}}",
                        ),
                    ),
                ),
                Panel(
                    "Time of a call",
                    "Seconds of a call to the API server, without watches: median and 99th percentile.",
                    "s",
                    tuple(
                        Query(
                            build_quantile(share, "topkube_api_request_seconds", OF_RELEASE, _LABELS),
                            f"{_NAME}: {share:.0%}",
                        )
                        for share in (0.5, 0.99)
                    ),
                ),
                Panel(
                    "Admission",
                    "Reviews of the webhook per second, by outcome. error: the webhook could not answer, and the API "
                    "server accepted the job. refused: the request was not a review.",
                    "ops",
                    (
                        Query(
                            f"sum by ({_LABELS}, outcome) "
                            f"({build_rate('topkube_admission_reviews_total', OF_RELEASE)})",
                            f"{_NAME}: {{{{outcome}}}}",
                        ),
                    ),
                ),
                Panel(
                    "Time of a review",
                    "Seconds of one review: median and 99th percentile.",
                    "s",
                    tuple(
                        Query(
                            build_quantile(share, "topkube_admission_review_seconds", OF_RELEASE, _LABELS),
                            f"{_NAME}: {share:.0%}",
                        )
                        for share in (0.5, 0.99)
                    ),
                ),
            ),
        ),
        Row(
            "Work and cost",
            (
                Panel(
                    "Transitions",
                    "Jobs per second that entered a phase, of all releases.",
                    "ops",
                    (
                        Query(
                            "sum by (phase) (rate(topkube_job_transitions_total[$__rate_interval]))",
                            "{{phase}}",
                        ),
                    ),
                ),
                Panel(
                    "Memory",
                    "Resident memory of each operator pod.",
                    "bytes",
                    (Query(_select_processes("process_resident_memory_bytes"), "{{release}}: {{instance}}"),),
                ),
                Panel(
                    "Processor",
                    "Cores that each operator pod uses.",
                    "short",
                    (
                        Query(
                            _select_processes("rate(process_cpu_seconds_total[$__rate_interval])"),
                            "{{release}}: {{instance}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Caches of nodes",
            (
                Panel(
                    "Cached bytes",
                    "Bytes of datasets on each node with an agent (medium Node), and the free bytes of its disk.",
                    "bytes",
                    (
                        Query(f"sum {_BY_NODE} (topkube_node_cache_bytes{{{_OF_AGENT}}})", f"{_NODE} cached"),
                        Query(f"max {_BY_NODE} (topkube_node_cache_free_bytes{{{_OF_AGENT}}})", f"{_NODE} free"),
                    ),
                ),
                Panel(
                    "Evicted datasets",
                    "Datasets that the agents have removed, to make room or because nobody has opened them for long.",
                    "short",
                    (
                        Query(
                            f"sum {_BY_NODE} "
                            f"(increase(topkube_node_cache_evictions_total{{{_OF_AGENT}}}[$__rate_interval]))",
                            _NODE,
                        ),
                    ),
                ),
                Panel(
                    "Bytes over the limit",
                    "Bytes by which a node's cache exceeds its limits although everything was evicted that may be "
                    "evicted. Above 0, jobs store no more shards there.",
                    "bytes",
                    (Query(f"max {_BY_NODE} (topkube_node_cache_missing_bytes{{{_OF_AGENT}}})", _NODE),),
                ),
            ),
        ),
    ),
    (OPERATOR_NAMESPACE, RELEASE),
)
