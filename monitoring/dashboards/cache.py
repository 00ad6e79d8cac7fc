"""The node-local data cache: hits, sources of bytes, waiting time, and the state of the tiers."""

from __future__ import annotations

from monitoring.dashboards.selection import BY_JOB, NAMESPACE, OF_JOB, TRAINING_JOB, build_rate
from monitoring.grafana import Dashboard, Panel, Query, Row

_NAME = "{{namespace}}/{{training_job}}"
_REMOTE = OF_JOB + ',source="remote"'
_DATA = OF_JOB + ',phase="data"'


def _build_increase(series: str) -> str:
    return f"sum(increase({series}{{{OF_JOB}}}[$__rate_interval]))"


CACHE = Dashboard(
    "topkube-cache",
    "TopKube / Data cache",
    "The node-local data cache: hit ratio, sources of bytes, fetches and waits, and the state of the tiers.",
    (
        Row(
            "Hits",
            (
                Panel(
                    "Hit ratio by tier",
                    "Share of the requested samples that a tier contained. The first epoch fills the cache. From the "
                    "second epoch on, both tiers should be near 100%, unless a limit has frozen a tier.",
                    "percentunit",
                    (
                        Query(
                            f"sum by (tier) ({build_rate('topkube_cache_hits_total')}) "
                            f"/ sum by (tier) ({build_rate('topkube_cache_requests_total')})",
                            "{{tier}}",
                        ),
                    ),
                    most=1,
                ),
                Panel(
                    "Bytes by source",
                    "Bytes per second from this node's memory and disk tiers, from other nodes of the job (peer) and "
                    "from the remote store.",
                    "Bps",
                    (Query(f"sum by (source) ({build_rate('topkube_cache_read_bytes_total')})", "{{source}}"),),
                    stacked=True,
                ),
                Panel(
                    "From the remote store",
                    "Bytes per second that each job reads from the store. It should be zero after the first epoch.",
                    "Bps",
                    (Query(f"sum {BY_JOB} ({build_rate('topkube_cache_read_bytes_total', _REMOTE)})", _NAME),),
                ),
            ),
        ),
        Row(
            "Time",
            (
                Panel(
                    "Time on data",
                    "Seconds per second that a rank waits for its next batch, mean of all ranks. Batches that "
                    "the loader prepares during a step cost no such time.",
                    "percentunit",
                    (Query(f"avg {BY_JOB} ({build_rate('topkube_step_phase_seconds_total', _DATA)})", _NAME),),
                ),
                Panel(
                    "Fetches",
                    "Shards per second that each job fetches from the store.",
                    "ops",
                    (Query(f"sum {BY_JOB} ({build_rate('topkube_cache_fetches_total')})", _NAME),),
                ),
                Panel(
                    "Fetching and waiting",
                    "Seconds per second spent on fetching shards, and on waiting for a shard that another rank "
                    "fetches, over all ranks.",
                    "short",
                    (
                        Query(f"sum({build_rate('topkube_cache_fetch_seconds_total')})", "fetching"),
                        Query(f"sum({build_rate('topkube_cache_wait_seconds_total')})", "waiting"),
                    ),
                ),
            ),
        ),
        Row(
            "Health",
            (
                Panel(
                    "Troubles",
                    "Shards with a wrong checksum (quarantined and fetched again), datasets removed to make room, "
                    "shards taken over from a fetcher that made no progress.",
                    "short",
                    (
                        Query(_build_increase("topkube_cache_corruptions_total"), "corrupt"),
                        Query(_build_increase("topkube_cache_evictions_total"), "evicted"),
                        Query(_build_increase("topkube_cache_takeovers_total"), "taken over"),
                    ),
                ),
                Panel(
                    "Tiers by state",
                    "Worker pods whose tier is open (stores shards), frozen (full or failing: stores no more) or "
                    "dropped (not used any more).",
                    "short",
                    (Query(f"sum by (tier, state) (topkube_cache_tier_state{{{OF_JOB}}})", "{{tier}}: {{state}}"),),
                ),
                Panel(
                    "Memory tier",
                    "Bytes that the memory tiers of all nodes hold.",
                    "bytes",
                    (Query(f"sum {BY_JOB} (topkube_cache_memory_used_bytes{{{OF_JOB}}})", _NAME),),
                ),
            ),
        ),
    ),
    (NAMESPACE, TRAINING_JOB),
)
