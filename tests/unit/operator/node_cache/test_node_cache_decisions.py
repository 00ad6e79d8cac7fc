"""The decisions of the node cache without a disk or a cluster: the datasets that it evicts, pins and reports."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from topkube.job.cached_dataset import CachedDatasetStatus, name_cached_dataset
from topkube_operator.node_cache.decisions import (
    CacheLimits,
    CacheState,
    Decisions,
    LocalDataset,
    build_status,
    decide,
)

NOW = 1_800_000_000.0
TIME = datetime.fromtimestamp(NOW, UTC)
local_datasets = st.builds(
    LocalDataset,
    namespace=st.sampled_from(["a", "b", "c"]),
    id=st.uuids().map(lambda identifier: identifier.hex[:16]),
    uri=st.just("s3://bucket/x"),
    cached_bytes=st.integers(0, 100),
    last_used=st.floats(0, NOW),
    in_use=st.booleans(),
    pinned=st.booleans(),
)
limits = st.builds(
    CacheLimits,
    size=st.none() | st.integers(0, 500),
    free=st.integers(0, 300),
    idle_seconds=st.sampled_from([0.0, 3600.0]),
)


@st.composite
def draw_states(draw: st.DrawFn) -> CacheState:
    datasets = tuple(draw(st.lists(local_datasets, max_size=8)))
    names = [dataset.name for dataset in datasets]
    subsets = st.sets(st.sampled_from(names)) if names else st.just(set())
    return CacheState(
        allowed=frozenset(draw(st.sets(st.sampled_from(["a", "b", "d"])))),
        present=frozenset(dataset.namespace for dataset in datasets),
        datasets=datasets,
        free=draw(st.integers(0, 400)),
        pin_requests={name: draw(st.booleans()) for name in draw(subsets)},
        deleted=frozenset(draw(subsets)),
    )


def apply_decisions(state: CacheState, decisions: Decisions) -> CacheState:
    kept = tuple(dataset for dataset in state.datasets if dataset.name not in decisions.evict)
    evicted_bytes = sum(dataset.cached_bytes for dataset in state.datasets) - sum(
        dataset.cached_bytes for dataset in kept
    )
    kept = tuple(
        replace(
            dataset, pinned=(dataset.pinned or dataset.name in decisions.pin) and dataset.name not in decisions.unpin
        )
        for dataset in kept
    )
    return replace(
        state,
        datasets=kept,
        free=state.free + evicted_bytes,
        present=state.present | set(decisions.create),
        deleted=frozenset(),
    )


@given(draw_states(), limits)
def test_datasets_in_use_or_pinned_stay_and_the_others_are_evicted_oldest_first(
    state: CacheState, cache_limits: CacheLimits
) -> None:
    decisions = decide(state, cache_limits, NOW)
    by_name = {dataset.name: dataset for dataset in state.datasets}
    evicted = [by_name[name] for name in decisions.evict]
    pinned = {name: state.pin_requests.get(name, dataset.pinned) for name, dataset in by_name.items()}
    assert len(set(decisions.evict)) == len(decisions.evict)
    assert not any(dataset.in_use for dataset in evicted)
    assert not any(pinned[dataset.name] and dataset.name not in state.deleted for dataset in evicted)
    for_room = [dataset for dataset in evicted if dataset.name not in state.deleted]
    spared = [
        dataset
        for dataset in state.datasets
        if dataset.name not in decisions.evict
        and not dataset.in_use
        and not pinned[dataset.name]
        and dataset.cached_bytes
    ]
    assert all(dataset.last_used <= other.last_used for dataset in for_room for other in spared), (
        "least recently used first"
    )
    after = apply_decisions(state, decisions)
    used = sum(dataset.cached_bytes for dataset in after.datasets)
    if spared:  # no more had to be evicted
        assert after.free >= cache_limits.free
        assert cache_limits.size is None or used <= cache_limits.size
        assert decisions.excess_bytes == 0
    assert (decisions.excess_bytes > 0) == (
        after.free < cache_limits.free or (cache_limits.size is not None and used > cache_limits.size)
    )
    assert set(decisions.create) == state.allowed - state.present


@given(draw_states(), limits)
def test_a_second_decision_changes_nothing(state: CacheState, cache_limits: CacheLimits) -> None:
    again = decide(apply_decisions(state, decide(state, cache_limits, NOW)), cache_limits, NOW)
    assert (again.create, again.evict, again.pin, again.unpin) == ((), (), (), ())


def test_nothing_is_evicted_without_need() -> None:
    dataset = LocalDataset("a", "1", "s3://x/y", cached_bytes=10, last_used=NOW - 1)
    assert decide(CacheState(datasets=(dataset,), free=100), CacheLimits(free=50), NOW) == Decisions()
    assert decide(CacheState(datasets=(dataset,), free=100), CacheLimits(idle_seconds=10), NOW) == Decisions()
    assert decide(CacheState(datasets=(dataset,), free=100), CacheLimits(idle_seconds=0.5), NOW).evict == (("a", "1"),)


# The status of CachedDatasets.

entries = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["n1", "n2", "n3"]),
        "cachedBytes": st.integers(0, 10),
        "percent": st.integers(0, 100),
        "updatedAt": st.integers(0, 7200).map(lambda ago: (TIME - timedelta(seconds=ago)).isoformat()),
    }
)


@given(
    st.none()
    | st.text(max_size=3)
    | st.fixed_dictionaries({"nodes": st.lists(entries, unique_by=lambda node: node["name"])}),
    st.none() | local_datasets,
    st.none() | st.integers(0, 200),
)
def test_the_status_has_this_node_as_it_is_and_the_others_as_they_were(
    stored: Any, dataset: LocalDataset | None, total: int | None
) -> None:
    dataset = replace(dataset, total_bytes=total) if dataset is not None else None
    status = build_status(stored, "n1", dataset, TIME)
    before = {node["name"]: node for node in stored["nodes"]} if isinstance(stored, dict) else {}
    result = status if status is not None else stored
    nodes = {node["name"]: node for node in (result or {}).get("nodes") or ()}
    assert ("n1" in nodes) == (dataset is not None)
    for name in ("n2", "n3"):
        fresh = name in before and datetime.fromisoformat(before[name]["updatedAt"]) >= TIME - timedelta(hours=1)
        assert nodes.get(name) == (before[name] if fresh else None)
    if dataset is not None:
        assert nodes["n1"]["cachedBytes"] == dataset.cached_bytes
        if total is not None:
            assert (nodes["n1"]["percent"] == 100) == (dataset.cached_bytes >= total)
    if status is not None:
        CachedDatasetStatus.model_validate({key: value for key, value in status.items() if value is not None})
        again = build_status({key: value for key, value in status.items() if value is not None}, "n1", dataset, TIME)
        assert again is None or (not status["nodes"] and again == status)


def test_the_shown_percentage_is_that_of_the_emptiest_node() -> None:
    first = build_status(
        None, "n1", LocalDataset("a", "1", "s3://x/y", cached_bytes=50, total_bytes=100, last_used=NOW - 60), TIME
    )
    assert first is not None
    second = build_status(
        first, "n2", LocalDataset("a", "1", "s3://x/y", cached_bytes=100, total_bytes=100, last_used=NOW), TIME
    )
    assert second is not None
    assert (second["where"], second["cachedPercent"]) == ("n1,n2", 50)
    assert second["lastUsed"] == second["nodes"][1]["lastUsed"] > second["nodes"][0]["lastUsed"]


@given(st.from_regex(r"[a-z][a-z0-9+.-]{0,5}://\S{1,80}", fullmatch=True))
def test_every_address_has_a_name_that_kubernetes_takes(uri: str) -> None:
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name_cached_dataset(uri))
    assert len(name_cached_dataset(uri)) <= 63
