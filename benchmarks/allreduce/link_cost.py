"""The processor time that shaped links cost: the work of the system for their token buckets.

It happens at any time and on any core, so it slows ranks that compute down. A network card does this work itself.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from allreduce.network import Network, Node
from allreduce.probes import finish_stream, start_stream
from allreduce.stream import REPEATS

_STREAM_SECONDS = 1.0
"""How long the streams take on a shaped link."""
_CALM_SECONDS = 0.5
_ROUNDS = 5


def measure_link_cost(network: Network, bandwidth: float) -> float:
    """Return the processor seconds per byte that the links cost beyond links that are not shaped, 0 if they are not
    shaped. `bandwidth` is what a stream reaches, in bytes per second.

    Nodes send in pairs, in both directions at the same time. A program on each core counts how much time the streams
    and the system leave to it, so nothing else of this priority should run. The median of several turns counts.
    """
    rate = network.rate
    if rate is None:
        return 0.0
    size = max(100_000, int(bandwidth * _STREAM_SECONDS / REPEATS))
    pairs = list(zip(network.nodes[::2], network.nodes[1::2], strict=False))
    differences = []
    try:
        with _count_time_left() as read_count:
            for _ in range(_ROUNDS):
                seconds = {}
                for turn in (None, rate):
                    network.shape(turn)
                    # Two short streams show what the start of the programs costs.
                    seconds[turn] = _time_streams(read_count, pairs, size) - _time_streams(read_count, pairs, 1)
                differences.append((seconds[rate] - seconds[None]) / (2 * len(pairs) * size * REPEATS))
    finally:
        network.shape(rate)
    return max(0.0, median(differences))


def _time_streams(read_count: Callable[[], int], pairs: list[tuple[Node, Node]], size: int) -> float:
    """Return the processor seconds, over all cores, that streams of messages of `size` bytes take."""

    def stream() -> None:
        for programs in [start_stream(first, second, [size]) for first, second in pairs]:
            finish_stream(*programs)

    calm_count, calm_seconds = _count_during(read_count, lambda: time.sleep(_CALM_SECONDS))
    count, seconds = _count_during(read_count, stream)
    return len(os.sched_getaffinity(0)) * (seconds - calm_seconds * count / calm_count)


def _count_during(read_count: Callable[[], int], work: Callable[[], object]) -> tuple[int, float]:
    """Return by how much the count grows during `work`, and the seconds of `work`."""
    start, before = time.monotonic(), read_count()
    work()
    return read_count() - before, time.monotonic() - start


@contextmanager
def _count_time_left() -> Iterator[Callable[[], int]]:
    """Count on every core. The value returns the sum of the counts."""
    context = multiprocessing.get_context("fork")
    cores = sorted(os.sched_getaffinity(0))
    counts = context.RawArray("q", len(cores))
    counters = [
        context.Process(target=_count, args=(core, counts, number), daemon=True) for number, core in enumerate(cores)
    ]
    for counter in counters:
        counter.start()
    try:
        yield lambda: sum(counts)
    finally:
        for counter in counters:
            counter.kill()
            counter.join()


def _count(core: int, counts: Any, number: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        for _ in range(1000):
            pass
        counts[number] += 1
