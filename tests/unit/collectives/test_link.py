"""The measurement of links. On simulated links, the measurement takes under a second and finds their rates."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkube.collectives import link


class SimulatedLink:
    """The world of a rank, if all ranks behave alike. The clock of the world advances in waits. `messages` and
    `sent_bytes` count what this rank sends, without barriers and maxima, which pass through all nodes."""

    def __init__(self, nodes: int, shards: int, rate: float, latency: float) -> None:
        self.nodes, self.shards, self.rate, self.latency = nodes, shards, rate, latency
        self.rank, self.size, self.cross_comm, self.cross_links = 0, nodes, self, self
        self.now, self.messages, self.sent_bytes, self.largest = 0.0, 0, 0, 0

    def enter(self) -> None:
        pass

    def perf_counter(self) -> float:
        return self.now

    def wait(self, requests: list[float], what: str) -> None:
        self.now += max(requests)

    def Ibarrier(self) -> float:
        return math.ceil(math.log2(self.nodes)) * self.latency

    def Iallreduce(self, own: Any, result: Any, operation: object) -> float:
        result[:] = own
        return 2 * self.Ibarrier()

    def Irecv(self, space: Any, source: int) -> float:
        assert source == self.nodes - 1
        return 0.0

    def Isend(self, data: Any, to: int) -> float:
        assert to == 1
        self.messages += 1
        self.sent_bytes += data.nbytes
        self.largest = max(self.largest, data.nbytes)
        seconds: float = self.latency + data.nbytes * self.shards / self.rate
        return seconds


def measure(world: SimulatedLink) -> link.MeasuredMachine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("topkube.collectives.link.time", SimpleNamespace(perf_counter=world.perf_counter))
        patch.setattr(link, "_measure_memory", lambda world: 1e10)
        return link.measure_machines(world)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(2, 4096), st.integers(1, 128), st.floats(125e3, 50e9), st.floats(1e-6, 1e-3))
def test_a_measurement_takes_under_a_second_on_every_link_from_1_mbit_with_up_to_4096_nodes(
    nodes: int, shards: int, rate: float, latency: float
) -> None:
    world = SimulatedLink(nodes, shards, rate, latency)
    measured = measure(world)
    assert world.now < 1.0
    assert world.messages <= 2 * len(link._SIZES) + 5
    assert world.sent_bytes * shards <= 11.2e6 + 5 * 8 * shards
    assert measured.rate is not None
    assert measured.rate * shards <= rate * (1 + 1e-9)
    if rate * latency < 0.05 * max(link._SIZES):
        assert measured.rate * shards > 0.9 * rate
    assert measured.latency == pytest.approx(latency, rel=0.1, abs=9 * shards / rate)


@pytest.mark.parametrize(("rate", "megabytes"), [(125e3, 0.032), (12.5e6, 1.0), (1.25e9, 4.2)])
def test_a_slow_link_gets_smaller_messages(rate: float, megabytes: float) -> None:
    world = SimulatedLink(16, 8, rate, 5e-5)
    measure(world)
    assert world.largest * world.shards == pytest.approx(megabytes * 1e6, rel=0.06)
