"""The metrics of the runtime: the files of the ranks, and the endpoint that serves all of them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from monitoring.generated import ROOT
from topkube import __version__
from topkube.errors import LaunchError
from topkube.heartbeat import Heartbeat
from topkube.telemetry import metrics
from topkube.telemetry.endpoint import MetricsEndpoint
from topkube.telemetry.phases import PHASES, Snapshot
from topkube.telemetry.rank_file import ABSENT, CACHE, RankMetrics, build_metrics_path, read_ranks
from topkube.training.reporting.norms import Norms

GAUGES = {"step": 1, "total_steps": 4, "density": 0.01, "skipped_steps": 0, "differing_ranks": 0, "last_step": 1e9}
SAMPLED = {
    **dict.fromkeys(("loss", "gradient_norm", "residual_norm", "link_rate"), 1),
    **dict.fromkeys(("unsent_ratio", "weight_spread", "period"), 1),
    **dict.fromkeys(("predicted_exchange", "measured_exchange"), 1),
}


def build_snapshot(seconds: float = 0.5, **counts: int) -> Snapshot:
    return Snapshot(dict.fromkeys(PHASES, seconds), **counts)


def scrape(endpoint: MetricsEndpoint) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the values by series (name, sorted labels)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=120) as answer:
        text = answer.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def build_labels(**values: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"training_job": "gpt", **values}.items()))


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[MetricsEndpoint]:
    with MetricsEndpoint(lambda: tmp_path, "gpt", 0, "127.0.0.1") as endpoint:
        yield endpoint


def test_steps_add_up_and_values_stay(tmp_path: Path, endpoint: MetricsEndpoint) -> None:
    rank = RankMetrics(tmp_path, 0)
    rank["link_rate"] = 1e6
    snapshot = build_snapshot(intra_bytes=10, inter_bytes=2_000_000, dense_bytes=900)
    rank.count_step(0.3, snapshot, 8, {**GAUGES, "gradient_norm": 2.0})
    rank.count_step(100.0, snapshot, 8, {**GAUGES, "step": 2, "skipped_steps": 1})
    rank["loss"] = 1.25
    rank.flush()
    samples = scrape(endpoint)
    assert samples["topkube_step_seconds_count", build_labels(rank="0")] == 2
    assert samples["topkube_step_seconds_sum", build_labels(rank="0")] == pytest.approx(100.3)
    by_bound = {
        bound: samples["topkube_step_seconds_bucket", build_labels(rank="0", le=bound)]
        for bound in ("0.25", "0.5", "60.0", "+Inf")
    }
    assert by_bound == {"0.25": 0, "0.5": 1, "60.0": 1, "+Inf": 2}
    assert samples["topkube_step_phase_seconds_total", build_labels(rank="0", phase="inter")] == 1.0
    assert samples["topkube_samples_total", build_labels(rank="0")] == 16
    assert samples["topkube_sent_bytes_total", build_labels(rank="0", level="intra")] == 20
    assert samples["topkube_sent_bytes_total", build_labels(rank="0", level="inter")] == 4_000_000
    assert samples["topkube_dense_equivalent_bytes_total", build_labels(rank="0")] == 1800
    assert samples["topkube_exchange_bound_seconds_total", build_labels(rank="0")] == pytest.approx(4.0)
    assert samples["topkube_last_step_timestamp_seconds", build_labels(rank="0")] == 1e9
    assert samples["topkube_job_progress_ratio", build_labels()] == 0.5
    assert samples["topkube_skipped_steps_total", build_labels()] == 1
    assert samples["topkube_gradient_norm", build_labels()] == 2.0
    assert samples["topkube_loss", build_labels()] == 1.25


def test_a_rank_has_as_many_series_as_the_docs_say(tmp_path: Path, endpoint: MetricsEndpoint) -> None:
    counts = []
    for rank in (0, 1, 2):
        values = RankMetrics(tmp_path, rank)
        values["link_rate"] = 1e6
        values.count_step(0.3, build_snapshot(), 8, {**GAUGES, **SAMPLED})
        values.flush()
        Heartbeat(tmp_path, rank).beat()
        counts.append(len(scrape(endpoint)))
    of_rank = counts[2] - counts[1]
    assert of_rank == counts[1] - counts[0]
    buckets = [labels for name, labels in scrape(endpoint) if name == "topkube_step_seconds_bucket"]
    text = (ROOT / "docs/monitoring.md").read_text()
    assert f"up to {of_rank} series for each rank: 4,096 ranks have {4096 * of_rank // 1000},000" in text
    assert f"adds {4096 * of_rank / 15:,.0f}"[:-2] in text
    assert (len(buckets) // 3 + 2) * 2 == of_rank, "half of them"


def test_unknown_values_have_no_series(tmp_path: Path, endpoint: MetricsEndpoint) -> None:
    assert {name for name, _ in scrape(endpoint)} == {"topkube_runtime_build_info"}
    rank = RankMetrics(tmp_path, 0)
    rank.count_step(0.1, build_snapshot(), 8, {**GAUGES, "total_steps": ABSENT})
    names = {name for name, _ in scrape(endpoint)}
    absent = {"loss", "gradient_norm", "residual_norm", "link_bytes_per_second", "job_progress_ratio"}
    assert not names & {f"topkube_{name}" for name in absent}


def test_the_last_collective_of_a_rank_is_a_sign_of_life(tmp_path: Path, endpoint: MetricsEndpoint) -> None:
    """An evaluation on all ranks finishes no step."""
    for rank in (0, 1):
        RankMetrics(tmp_path, rank).count_step(0.1, build_snapshot(), 8, GAUGES)
    beats = Heartbeat(tmp_path, 1)
    activity = "topkube_last_activity_timestamp_seconds"
    assert (activity, build_labels(rank="1")) not in scrape(endpoint), "no collective yet"
    beats.beat()
    path = next(tmp_path.glob("rank-1.*"))
    assert scrape(endpoint)[activity, build_labels(rank="1")] == pytest.approx(time.time(), abs=60)
    os.utime(path, (1e9, 1e9))
    assert scrape(endpoint)[activity, build_labels(rank="1")] == 1e9
    beats.beat()
    assert scrape(endpoint)[activity, build_labels(rank="1")] == pytest.approx(time.time(), abs=60)
    assert (activity, build_labels(rank="0")) not in scrape(endpoint)


def test_hits_of_the_cache_never_fall(tmp_path: Path, endpoint: MetricsEndpoint) -> None:
    """A worker of a data loader counts the requests of a batch first, and its misses when the shards have arrived. For
    Prometheus, a counter that falls has started again at zero."""
    rank = RankMetrics(tmp_path, 0)
    hits = []
    for requests, misses in [(100, 20), (164, 20), (164, 84), (228, 84), (300, 90)]:
        rank.store_cache_counters({**dict.fromkeys(CACHE, 0.0), "disk_requests": requests, "disk_misses": misses})
        rank.count_step(0.1, build_snapshot(), 8, GAUGES)
        samples = scrape(endpoint)
        assert samples["topkube_cache_requests_total", build_labels(tier="disk")] == requests
        hits.append(samples["topkube_cache_hits_total", build_labels(tier="disk")])
    assert hits == sorted(hits)
    assert hits[-1] == 210


def test_a_scrape_succeeds_beside_more_connections_than_the_endpoint_keeps(
    tmp_path: Path, endpoint: MetricsEndpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    """Anything that reaches the port could otherwise take all threads and files of a worker."""
    RankMetrics(tmp_path, 0).count_step(0.1, build_snapshot(), 8, GAUGES)
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port)))
            silent.sendall(b"GET /metrics HTTP/1.1\r\nX:")
        assert ("topkube_step_seconds_count", build_labels(rank="0")) in scrape(endpoint)
        assert threading.active_count() <= threads + 16
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the end is a reset
    deadline = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads
    assert capfd.readouterr().err == ""


def test_the_endpoint_opens_without_dns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_dns(name: str = "") -> str:
        raise AssertionError("a pod may have no DNS: every question would take 10 s")

    monkeypatch.setattr(socket, "getfqdn", ask_dns)
    with MetricsEndpoint(lambda: tmp_path, "gpt", 0, "127.0.0.1") as endpoint:
        assert ("topkube_runtime_build_info", (("version", __version__),)) in scrape(endpoint)


def test_job_wide_series_come_from_rank_0_alone(tmp_path: Path, endpoint: MetricsEndpoint) -> None:
    for rank in (2, 3):
        RankMetrics(tmp_path, rank).count_step(0.1, build_snapshot(), 8, GAUGES)
    names = {name for name, _ in scrape(endpoint)}
    assert "topkube_step_seconds_count" in names
    assert not names & {metric.name for metric in metrics.METRICS if metric.job_wide}


def test_every_metric_is_served_with_its_labels_and_a_help_that_lists_label_values(
    tmp_path: Path, endpoint: MetricsEndpoint
) -> None:
    everything = {**GAUGES, **SAMPLED}
    rank = RankMetrics(tmp_path, 0)
    rank.store_cache_counters(dict.fromkeys(CACHE, 0.0))
    rank.count_step(0.1, build_snapshot(), 8, everything)
    Heartbeat(tmp_path, 0).beat()
    served = {(name, tuple(sorted(key for key, _ in pairs if key != "le"))) for name, pairs in scrape(endpoint)}
    declared = {
        (name, tuple(sorted(metric.labels))) for metric in (*metrics.METRICS, *metrics.CACHE) for name in metric.series
    }
    assert served == declared
    assert all(level in metrics.SENT_BYTES.help for level in metrics.LEVELS)
    assert all(phase in metrics.PHASE_SECONDS.help for phase in PHASES)


def test_the_caches_of_all_ranks_are_summed(tmp_path: Path, endpoint: MetricsEndpoint) -> None:
    counters = dict.fromkeys(CACHE, 0.0)
    for rank, state in ((0, 0), (1, 1)):
        rank_metrics = RankMetrics(tmp_path, rank)
        rank_metrics.store_cache_counters(
            {**counters, "disk_requests": 10, "disk_misses": 4, "remote_bytes": 7, "disk_state": state}
        )
        rank_metrics.count_step(0.1, build_snapshot(), 8, GAUGES)
    samples = scrape(endpoint)
    assert samples["topkube_cache_requests_total", build_labels(tier="disk")] == 20
    assert samples["topkube_cache_hits_total", build_labels(tier="disk")] == 12
    assert samples["topkube_cache_read_bytes_total", build_labels(source="remote")] == 14
    assert samples["topkube_cache_tier_state", build_labels(tier="disk", state="frozen")] == 1
    assert samples["topkube_cache_tier_state", build_labels(tier="disk", state="open")] == 0
    assert samples["topkube_cache_tier_state", build_labels(tier="memory", state="open")] == 1


def test_restarts_leave_no_old_series(tmp_path: Path, endpoint: MetricsEndpoint) -> None:
    """The ranks of an attempt replace those of the previous attempt, even if there are fewer ranks on this node."""
    for rank in range(4):
        RankMetrics(tmp_path, rank, attempt=1).count_step(0.1, build_snapshot(), 8, GAUGES)
    for attempt in range(2, 30):
        for rank in range(2):
            rank_metrics = RankMetrics(tmp_path, rank, attempt)
            rank_metrics.count_step(0.1, build_snapshot(), 8, GAUGES)
            rank_metrics.close()
    samples = scrape(endpoint)
    assert {value for _, pairs in samples for key, value in pairs if key == "rank"} == {"0", "1"}
    assert samples["topkube_step_seconds_count", build_labels(rank="1")] == 1
    assert samples["topkube_job_attempt", build_labels()] == 29
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"metrics-{rank}.bin" for rank in range(4)]


def test_eight_ranks_are_one_cheap_scrape(tmp_path: Path, endpoint: MetricsEndpoint) -> None:
    everything = {**GAUGES, **SAMPLED}
    for rank in range(8):
        rank_metrics = RankMetrics(tmp_path, rank)
        rank_metrics.store_cache_counters(dict.fromkeys(CACHE, 0.0))
        rank_metrics.count_step(0.1, build_snapshot(), 8, everything)
    assert len(scrape(endpoint)) <= 500
    seconds = []
    for _ in range(5):
        start = time.process_time()  # of client and server; the benchmark measures wall time
        urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=120).read()
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5


def test_damaged_and_foreign_files_are_ignored(tmp_path: Path) -> None:
    for rank in range(4):
        RankMetrics(tmp_path, rank).count_step(0.1, build_snapshot(), 8, GAUGES)
    whole = build_metrics_path(tmp_path, 1).read_bytes()
    build_metrics_path(tmp_path, 1).write_bytes(whole[:-9])
    build_metrics_path(tmp_path, 2).write_bytes(b"x" * len(whole))
    build_metrics_path(tmp_path, 3).write_bytes(whole[:-8] + b"\xff" * 8)  # an incomplete write
    (tmp_path / "metrics-9.bin").mkdir()
    assert [rank_metrics.rank for rank_metrics in read_ranks(tmp_path)] == [0]


def test_a_reader_never_sees_half_a_step(tmp_path: Path) -> None:
    rank, stop = RankMetrics(tmp_path, 0), threading.Event()

    def train() -> None:
        while not stop.is_set():
            rank.count_step(0.1, build_snapshot(), 8, GAUGES)

    training = threading.Thread(target=train)
    training.start()
    try:
        for _ in range(300):
            for rank_metrics in read_ranks(tmp_path):
                assert sum(rank_metrics.buckets) == rank_metrics["steps"]
                assert rank_metrics["samples"] == 8 * rank_metrics["steps"]
    finally:
        stop.set()
        training.join()


def test_training_continues_if_metrics_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    rank = RankMetrics(tmp_path / "file", 3)
    rank.count_step(0.1, build_snapshot(), 8, GAUGES)
    rank.count_step(0.1, build_snapshot(), 8, GAUGES)
    assert capsys.readouterr().err.count("no metrics from rank 3") == 1


def test_a_taken_port_is_an_error_with_a_next_step(tmp_path: Path, endpoint: MetricsEndpoint) -> None:
    with pytest.raises(LaunchError, match=r"cannot be served on 127\.0\.0\.1") as caught:
        MetricsEndpoint(lambda: tmp_path, "gpt", endpoint.port, "127.0.0.1")
    assert caught.value.exit_code == 2
    assert "0 for any free port" in caught.value.next_step


def test_a_closed_endpoint_releases_its_port(tmp_path: Path) -> None:
    with MetricsEndpoint(lambda: tmp_path, "gpt", 0, "127.0.0.1") as first:
        port = first.port
    with MetricsEndpoint(lambda: tmp_path, "gpt", port, "127.0.0.1") as second:
        assert second.port == port


def test_norms_cover_all_tensors_and_are_sampled_rarely() -> None:
    norms = Norms()
    assert norms.is_due
    norms.measure([torch.full((3, 3), 1.0), torch.full((16,), 1.0, dtype=torch.bfloat16)], [torch.full((4,), -2.0)])
    assert norms.gradient == pytest.approx(5.0)
    assert norms.residual == pytest.approx(4.0)
    assert not norms.is_due
    norms.measure([torch.ones(1)], [])
    assert norms.residual is None
