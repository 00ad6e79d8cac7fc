"""The election: one acts at a time, and another takes over in time. Four times as fast as in a cluster, on a Lease in
memory that refuses writes to an older version, as the API server does. tests/cluster kills a real leader."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from topkube_operator import leadership
from topkube_operator.cluster import ApiError
from topkube_operator.leadership import Leadership

FASTER = 4.0
HAND_OVER = 20.0
"""Seconds that the issue of it may take, in a cluster."""


class Leases:
    """An API server that knows one Lease."""

    def __init__(self) -> None:
        self.lock, self.lease, self.version = threading.Lock(), dict[str, Any](), 0


class Link:
    """One replica's way to it, which can be cut."""

    def __init__(self, leases: Leases) -> None:
        self.leases, self.cut = leases, False

    def _reach(self) -> None:
        if self.cut:
            raise ApiError(0, "the API server cannot be reached")

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        self._reach()
        with self.leases.lock:
            if not self.leases.lease:
                raise ApiError(404, "there is none")
            return copy.deepcopy(self.leases.lease)

    def call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._reach()
        with self.leases.lock:
            if self.leases.lease:
                raise ApiError(409, "exists", "AlreadyExists")
            return self._keep(body)

    def replace(self, body: dict[str, Any]) -> dict[str, Any]:
        self._reach()
        with self.leases.lock:
            if body["metadata"]["resourceVersion"] != self.leases.lease["metadata"]["resourceVersion"]:
                raise ApiError(409, "is older", "Conflict")
            return self._keep(body)

    def _keep(self, body: dict[str, Any]) -> dict[str, Any]:
        self.leases.version += 1
        self.leases.lease = copy.deepcopy(body)
        self.leases.lease["metadata"]["resourceVersion"] = str(self.leases.version)
        return self.leases.lease


class Replica:
    def __init__(self, leases: Leases, name: str) -> None:
        self.link, self.told = Link(leases), list[bool]()
        self.part = Leadership(self.link, "topkube-system", "lease", name, self.told.append)  # type: ignore[arg-type]
        self.part.start()


class Election:
    """Three replicas, and somebody who counts those that act."""

    def __init__(self) -> None:
        self.leases = Leases()
        self.replicas = [Replica(self.leases, f"replica-{index}") for index in range(3)]
        self.most = 0
        self._over = threading.Event()
        self._counter = threading.Thread(target=self._count, daemon=True)
        self._counter.start()

    def _count(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, sum(replica.part.acting() for replica in self.replicas))

    def leader(self, but: Replica | None = None, seconds: float = HAND_OVER / FASTER) -> Replica:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for replica in self.replicas:
                if replica is not but and replica.part.acting():
                    return replica
            time.sleep(0.002)
        raise AssertionError(f"nobody leads after {seconds:g} s: {self.leases.lease}")

    def stop(self) -> None:
        for replica in self.replicas:
            replica.part.stop()
        self._over.set()
        self._counter.join(5)


@pytest.fixture
def election(monkeypatch: pytest.MonkeyPatch) -> Iterator[Election]:
    for name in ("_LEASE", "_RENEW_WITHIN", "_RENEW_EVERY", "_LOOK_EVERY"):
        monkeypatch.setattr(leadership, name, getattr(leadership, name) / FASTER)
    found = Election()
    yield found
    found.stop()
    assert found.most <= 1


def test_who_is_cut_off_stops_before_another_begins_within_the_time_of_a_hand_over(election: Election) -> None:
    first = election.leader()
    first.link.cut = True
    second = election.leader(but=first)
    assert not first.part.acting()
    first.link.cut = False
    third = next(replica for replica in election.replicas if replica not in (first, second))
    second.link.cut = third.link.cut = True
    assert election.leader(but=second) is first
    assert election.leases.lease["spec"]["leaseTransitions"] == 3
    assert first.told == [True, False, True]


def test_who_stops_hands_over_at_once(election: Election) -> None:
    first = election.leader()
    first.part.stop()
    assert not first.part.acting()
    election.leader(but=first, seconds=4 * leadership._LOOK_EVERY)


def test_the_times_fit_each_other() -> None:
    slow_call = 3.0
    assert leadership._RENEW_WITHIN + slow_call < leadership._LEASE
    assert leadership._RENEW_EVERY + slow_call < leadership._RENEW_WITHIN
    assert leadership._LEASE + 2 * leadership._LOOK_EVERY + slow_call < HAND_OVER
