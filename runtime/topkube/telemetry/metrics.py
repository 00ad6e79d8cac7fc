"""Every metric of the runtime: its name, kind, labels and what it says. The endpoint, the reference page and the tests
of dashboards and alerts all take them from here.

Seconds and bytes, ratios from 0 to 1. `training_job` is the TrainingJob's name; Prometheus adds the namespace and the
pod where it finds its targets through Kubernetes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from topkube.telemetry.phases import PHASES

Kind = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True)
class Metric:
    """A metric family. `name` is what a query says, `_total` and `_info` included; a histogram's is without `_bucket`,
    `_sum` and `_count`. `job_wide` ones are the same on all ranks and come from rank 0 alone."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    job_wide: bool = False

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus stores it."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


RANK = ("training_job", "rank")
JOB = ("training_job",)
LEVELS = ("intra", "inter")
"""Inside a node, between nodes."""
STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the step histogram, seconds."""

STEP_SECONDS = Metric("topkube_step_seconds", "histogram", "Seconds from one finished step to the next.", RANK)
PHASE_SECONDS = Metric(
    "topkube_step_phase_seconds_total",
    "counter",
    f"Seconds of steps by phase: {', '.join(PHASES)}. select, intra and inter are the exchange; they overlap with "
    "backward.",
    (*RANK, "phase"),
)
SAMPLES = Metric("topkube_samples_total", "counter", "Samples that this rank has trained on.", RANK)
SENT_BYTES = Metric(
    "topkube_sent_bytes_total",
    "counter",
    "Gradient bytes that this rank has sent, by level: intra (inside the node), inter (between nodes).",
    (*RANK, "level"),
)
DENSE_BYTES = Metric(
    "topkube_dense_equivalent_bytes_total",
    "counter",
    "Bytes that a dense ring all-reduce of the same gradients would have sent from this rank.",
    RANK,
)
BOUND_SECONDS = Metric(
    "topkube_exchange_bound_seconds_total",
    "counter",
    "Seconds that the bytes sent between nodes need at least, by the link's rate measured at the start. Against "
    "phase inter it tells how much of the link the exchange reaches.",
    RANK,
)
LINK_RATE = Metric(
    "topkube_link_bytes_per_second",
    "gauge",
    "Bytes per second from this rank to another node while all ranks of its node send, measured at the start. "
    "Absent with one node.",
    RANK,
)
RESIDUAL_NORM = Metric(
    "topkube_residual_norm",
    "gauge",
    "Euclidean norm of what error feedback holds back on this rank, in units of the mean gradient; sampled. Absent "
    "where nothing is held back.",
    RANK,
)
LAST_STEP = Metric("topkube_last_step_timestamp_seconds", "gauge", "When this rank finished its last step.", RANK)
STEP = Metric("topkube_job_step", "gauge", "Steps of the job that are finished.", JOB, job_wide=True)
PROGRESS = Metric(
    "topkube_job_progress_ratio", "gauge", "Share of the job's steps that is finished, 0 to 1.", JOB, job_wide=True
)
LOSS = Metric("topkube_loss", "gauge", "Mean loss over all samples of the last step.", JOB, job_wide=True)
GRADIENT_NORM = Metric(
    "topkube_gradient_norm",
    "gauge",
    "Euclidean norm of the aggregated gradient, before clipping; sampled.",
    JOB,
    job_wide=True,
)
DENSITY = Metric(
    "topkube_density_ratio",
    "gauge",
    "Share of the gradient's entries that is sent between nodes, 0 to 1; falls during warm-up, 1 where dense.",
    JOB,
    job_wide=True,
)
SKIPPED = Metric(
    "topkube_skipped_steps_total",
    "counter",
    "Steps that all ranks skipped because a gradient was NaN or infinite.",
    JOB,
    job_wide=True,
)
ATTEMPT = Metric("topkube_job_attempt", "gauge", "Number of the attempt that trains now, from 1.", JOB, job_wide=True)
BUILD = Metric(
    "topkube_build_info",
    "info",
    "Always 1; the version of what is asked, by component: runtime, operator.",
    ("component", "version"),
)

TIERS = ("memory", "disk")
SOURCES = ("memory", "disk", "peer", "remote")
"""Where bytes come from: the node's memory and disk tiers, other nodes of the job, the remote store."""
TIER_STATES = ("open", "frozen", "dropped")
TIER = ("training_job", "tier")
CACHE_REQUESTS = Metric(
    "topkube_cache_requests_total", "counter", "Samples asked of a tier of the data cache: memory, disk.", TIER
)
CACHE_HITS = Metric("topkube_cache_hits_total", "counter", "Samples that a tier had: memory, disk.", TIER)
CACHE_READ_BYTES = Metric(
    "topkube_cache_read_bytes_total",
    "counter",
    "Bytes of the dataset by where they came from: memory, disk (this node), peer (other nodes), remote (the store).",
    ("training_job", "source"),
)
CACHE_FETCHES = Metric("topkube_cache_fetches_total", "counter", "Shards fetched from the remote store.", JOB)
CACHE_FETCH_SECONDS = Metric(
    "topkube_cache_fetch_seconds_total", "counter", "Seconds of fetching shards, summed over all that fetch.", JOB
)
CACHE_WAIT_SECONDS = Metric(
    "topkube_cache_wait_seconds_total", "counter", "Seconds of waiting for a shard that somebody else fetches.", JOB
)
CACHE_TAKEOVERS = Metric(
    "topkube_cache_takeovers_total", "counter", "Shards fetched because their first fetcher stood still.", JOB
)
CACHE_EVICTIONS = Metric("topkube_cache_evictions_total", "counter", "Datasets removed to make room.", JOB)
CACHE_CORRUPTIONS = Metric(
    "topkube_cache_corruptions_total", "counter", "Shards whose checksum was wrong: quarantined, fetched again.", JOB
)
CACHE_MEMORY_USED = Metric("topkube_cache_memory_used_bytes", "gauge", "Bytes in this node's memory tier.", JOB)
CACHE_TIER_STATE = Metric(
    "topkube_cache_tier_state",
    "gauge",
    "1 for the state of a tier (memory, disk): open (takes shards), frozen (takes no more), dropped (not used any "
    "more).",
    (*TIER, "state"),
)
CACHE = (
    *(CACHE_REQUESTS, CACHE_HITS, CACHE_READ_BYTES, CACHE_FETCHES, CACHE_FETCH_SECONDS, CACHE_WAIT_SECONDS),
    *(CACHE_TAKEOVERS, CACHE_EVICTIONS, CACHE_CORRUPTIONS, CACHE_MEMORY_USED, CACHE_TIER_STATE),
)
"""Summed over the pod's ranks; absent where a job uses no CachedDataset."""

METRICS = (
    *(STEP_SECONDS, PHASE_SECONDS, SAMPLES, LAST_STEP, STEP, PROGRESS, ATTEMPT, LOSS, GRADIENT_NORM, RESIDUAL_NORM),
    *(SKIPPED, DENSITY, SENT_BYTES, DENSE_BYTES, BOUND_SECONDS, LINK_RATE, BUILD),
)
