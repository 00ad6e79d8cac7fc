"""The profile of a step that `topkube plan` reads from a trace: the latency, and the parts of an accumulated step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from topkube.planning.traced_profile import add_host_costs, read_traced_profile
from topkube.telemetry.trace_files import TraceError

Event = dict[str, Any]
LATENCY, RATE = 100e-6, 125e6
"""The link of the traces: seconds of a short message, and bytes per second (1 Gbit/s)."""


def build_span(rank: int, category: str, name: str, start: float, seconds: float, **args: Any) -> Event:
    times = {"ts": start * 1e6, "dur": seconds * 1e6, "tdur": seconds * 1e6}
    return {"ph": "X", "cat": category, "name": name, "pid": rank, "tid": 1, **times, "args": args}


def build_mark(rank: int, name: str, elements: int, at: float) -> Event:
    args = {"parameter": name, "elements": elements, "itemsize": 4, "small": False}
    place = {"name": "gradient ready", "pid": rank, "tid": 1, "ts": at * 1e6}
    return {"ph": "i", "cat": "gradient", **place, "args": args}


def build_exchange(rank: int, bucket: int, number: str, start: float, seconds: float) -> list[Event]:
    name, place = "exchange between nodes", {"pid": rank, "tid": 2, "id": number, "args": {"bucket": bucket}}
    return [
        {"ph": kind, "cat": "exchange", "name": name, "ts": at * 1e6, **place}
        for kind, at in (("b", start), ("e", start + seconds))
    ]


def build_trace(bucket_elements: Mapping[int, int], algorithm: str = "hierarchical", **facts: Any) -> dict[str, Any]:
    """Return the trace of a step of 1 second on 2 nodes, which exchange buckets of these elements. Rank 1 waits 5 ms
    for rank 0 in each exchange. With DeAR, rank 0 finds all messages of the first half."""
    events = []
    for rank in range(2):
        events += [
            build_span(rank, "step", "step 3", 0, 1, step=3, compute_cpu_ms=1000.0, communication_cpu_ms=1.0),
            build_span(rank, "forward", "forward", 0, 0.1),
            build_span(rank, "backward", "backward", 0.1, 0.9),
            build_mark(rank, "layer.weight", sum(bucket_elements.values()), 0.3),
        ]
        for bucket, elements in bucket_elements.items():
            args = {"bucket": bucket, "elements": elements, "itemsize": 4, "algorithm": algorithm}
            events.append(build_span(rank, "bucket", f"bucket {bucket}", 0.3 + 0.01 * bucket, 0.001, **args))
            seconds = 2 * LATENCY + 4 * elements / RATE + 0.005 * rank
            halves = (seconds * rank, seconds * (1 - rank)) if facts.get("overlap") == "dear" else (seconds,)
            for half, half_seconds in enumerate(halves):
                events += build_exchange(rank, bucket, f"{rank}.{bucket}.{half}", 0.3 + 0.1 * half, half_seconds)
    return {"otherData": {"nodes": 2, "ranksPerNode": [1, 1], "threads": 1, **facts}, "traceEvents": events}


def build_accumulated_trace() -> dict[str, Any]:
    """Return the trace of a step of 50 ms with three micro-batches. Each has a forward of 4 ms (layer `first` 1 ms,
    layer `last` 3 ms) and a backward of 10 ms (`last` 6 ms, `first` 4 ms). The parameter `only` has a gradient in the
    first backward only."""
    events = [build_span(0, "step", "step 3", 0, 0.05, step=3, compute_cpu_ms=50.0, communication_cpu_ms=1.0)]
    for start in (0.001, 0.016, 0.031):
        events += [
            build_span(0, "forward", "forward", start, 0.004),
            build_span(0, "forward", "first", start, 0.001),
            build_span(0, "forward", "last", start + 0.001, 0.003),
            build_span(0, "backward", "backward", start + 0.004, 0.0105),
            build_span(0, "backward", "last", start + 0.004, 0.006),
            build_mark(0, "last.weight", 200, start + 0.010),
            build_span(0, "backward", "first", start + 0.010, 0.004),
            build_mark(0, "first.weight", 100, start + 0.014),
            build_span(0, "backward", "wait for exchanges", start + 0.014, 0.0005),
        ]
    events += [build_mark(0, "only.weight", 10, 0.012), build_span(0, "optimizer", "optimizer", 0.047, 0.002)]
    return {"otherData": {"nodes": 1, "ranksPerNode": [1], "threads": 1}, "traceEvents": events}


def test_only_the_last_backward_of_an_accumulated_step_overlaps_with_exchanges() -> None:
    profile = read_traced_profile(build_accumulated_trace())
    gradients = [(gradient.name, gradient.elements) for gradient in profile.gradients]
    assert gradients == [("last.weight", 200), ("first.weight", 100), ("only.weight", 10)]
    assert [gradient.seconds for gradient in profile.gradients] == pytest.approx([0.006, 0.004, 0])
    assert profile.forward == pytest.approx(3 * 0.004 + 2 * 0.010)
    assert (profile.update, profile.other) == pytest.approx((0.002, 0.05 - 3 * 0.014 - 0.002))


def test_forward_uses_all_parameters_in_the_first_micro_batch() -> None:
    """DeAR updates a parameter before its first use."""
    profile = read_traced_profile(build_accumulated_trace())
    assert profile.forward_seconds == pytest.approx((0.003 + 2 * 0.014, 0.001, 0))


def test_the_head_of_a_tied_embedding_is_at_the_end_of_forward() -> None:
    """The head multiplies by the matrix of the first layer, so both have one name. Its forward waits for nothing."""
    trace = build_trace({0: 1 << 20})
    for rank in range(2):
        for name, start, seconds in (("layer", 0.0, 0.02), ("last", 0.02, 0.03), ("layer", 0.05, 0.05)):
            trace["traceEvents"].append(build_span(rank, "forward", name, start, seconds))
        trace["traceEvents"].append(build_mark(rank, "last.weight", 4, 0.2))
    profile = read_traced_profile(trace)
    assert [gradient.name for gradient in profile.gradients] == ["last.weight", "layer.weight"]
    assert profile.forward_seconds == pytest.approx((0.08, 0.02))


@pytest.mark.parametrize("overlap", ["backward", "dear"])
def test_the_latency_has_neither_the_bytes_of_buckets_nor_waits_for_late_ranks(overlap: str) -> None:
    content = build_trace({0: 1 << 20, 1: 1 << 12, 2: 1 << 22}, overlap=overlap)
    assert read_traced_profile(content).latency == pytest.approx(LATENCY)


def test_the_latency_that_the_ranks_measured_counts() -> None:
    content = build_trace({0: 1 << 20, 1: 1 << 12}, latencySeconds=30e-6)
    assert read_traced_profile(content).latency == 30e-6


@pytest.mark.parametrize(
    ("bucket_elements", "algorithm"),
    [({0: 1 << 18, 1: 1 << 20}, "hierarchical"), ({0: 1 << 12, 1: 1 << 20}, "hitopk"), ({}, "hierarchical")],
)
def test_no_latency_is_known_without_a_short_dense_exchange(bucket_elements: dict[int, int], algorithm: str) -> None:
    """The bytes of a bucket of 1 MiB take 8 ms here; those of a compressed bucket are unknown."""
    assert read_traced_profile(build_trace(bucket_elements, algorithm)).latency is None


def test_traces_of_one_model_add_their_costs() -> None:
    profiles = [
        read_traced_profile(build_trace({0: elements}, algorithm), name)
        for name, elements, algorithm in [
            ("a.json", 1 << 20, "hierarchical"),
            ("b.json", 1 << 20, "int8"),
            ("c.json", 1 << 21, "int8"),
        ]
    ]
    assert set(add_host_costs(profiles[0], profiles[1:2]).host) == {"hierarchical", "int8"}
    with pytest.raises(TraceError, match=r"a\.json has 1,048,576 parameters, and c\.json has 2,097,152"):
        add_host_costs(profiles[0], profiles[1:])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("latencySeconds", "0.001"),
        ("latencySeconds", -1.0),
        ("latencySeconds", math.nan),
        ("cores", "2"),
        ("bucketBytes", -4),
        ("bucketBytes", 1e300),
    ],
)
def test_facts_that_are_not_numbers_of_a_cluster_are_refused(name: str, value: object) -> None:
    with pytest.raises(TraceError, match="cannot be used"):
        read_traced_profile(build_trace({0: 1 << 20}, **{name: value}))


@pytest.mark.parametrize(
    ("category", "name", "value"),
    [
        ("step", "dur", math.nan),
        ("step", "ts", math.inf),
        ("forward", "tdur", math.nan),
        ("gradient", "elements", 2.5),
        ("gradient", "elements", -1),
        ("gradient", "itemsize", 3),
    ],
)
def test_events_without_a_meaning_are_refused(category: str, name: str, value: float) -> None:
    trace = build_trace({0: 1 << 20})
    for event in trace["traceEvents"]:
        if event["cat"] == category:
            place = event if name in event else event["args"]
            place[name] = value
    with pytest.raises(TraceError, match="cannot be used"):
        read_traced_profile(trace)
