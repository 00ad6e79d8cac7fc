"""Leader election: one replica acts at a time, and another replica takes over in time. The tests run four times as fast
as a cluster, with a Lease in memory that refuses writes to an older version, as the API server does. tests/cluster
kills a real leader."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from topkube_operator.control import leader_election
from topkube_operator.control.leader_election import LeaderElection
from topkube_operator.watch.api_connection import ApiError

FASTER = 4.0
HAND_OVER = 20.0
"""Seconds within which another replica must act after a leader has failed, at a cluster's speed."""


class Leases:
    """An API server with one Lease."""

    def __init__(self) -> None:
        self.lock, self.lease, self.version = threading.Lock(), dict[str, Any](), 0


class Connection:
    """The connection of one replica to the API server. Set `cut` to break it."""

    def __init__(self, leases: Leases) -> None:
        self.leases, self.cut = leases, False

    def _check_connection(self) -> None:
        if self.cut:
            raise ApiError(0, "the API server cannot be reached")

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        self._check_connection()
        with self.leases.lock:
            if not self.leases.lease:
                raise ApiError(404, "there is no Lease")
            return copy.deepcopy(self.leases.lease)

    def call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._check_connection()
        with self.leases.lock:
            if self.leases.lease:
                raise ApiError(409, "exists", "AlreadyExists")
            return self._store(body)

    def replace_lease(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check_connection()
        with self.leases.lock:
            if body["metadata"]["resourceVersion"] != self.leases.lease["metadata"]["resourceVersion"]:
                raise ApiError(409, "is older", "Conflict")
            return self._store(body)

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        self.leases.version += 1
        self.leases.lease = copy.deepcopy(body)
        self.leases.lease["metadata"]["resourceVersion"] = str(self.leases.version)
        return self.leases.lease


class Candidate:
    """A replica that takes part in the election. `notifications` holds True for each notification that the replica
    leads, and False for each notification that it does not lead any more."""

    def __init__(self, leases: Leases, name: str) -> None:
        self.connection, self.notifications = Connection(leases), list[bool]()
        self.election = LeaderElection(self.connection, "topkube-system", "lease", name, self.notifications.append)  # type: ignore[arg-type]
        self.election.start()


class Election:
    """Three replicas, and a count of the replicas that act."""

    def __init__(self) -> None:
        self.leases = Leases()
        self.replicas = [Candidate(self.leases, f"replica-{index}") for index in range(3)]
        self.most_acting = 0
        self._stopped = threading.Event()
        self._counter = threading.Thread(target=self._count, daemon=True)
        self._counter.start()

    def _count(self) -> None:
        """Count the replicas that act at the same time. Each replica is asked twice: while this thread does not run,
        the first answers may become old."""
        while not self._stopped.wait(0.002):
            before = [replica.election.is_acting() for replica in self.replicas]
            after = [replica.election.is_acting() for replica in self.replicas]
            self.most_acting = max(
                self.most_acting, sum(first and second for first, second in zip(before, after, strict=True))
            )

    def name_replica(self, replica: Candidate) -> str:
        return f"replica-{self.replicas.index(replica)}"

    def wait_for_leader(self, other_than: Candidate | None = None) -> Candidate:
        seconds = 3 * HAND_OVER / FASTER
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for replica in self.replicas:
                if replica is not other_than and replica.election.is_acting():
                    return replica
            time.sleep(0.002)
        raise AssertionError(f"nobody leads after {seconds:g} s: {self.leases.lease}")

    def stop(self) -> None:
        for replica in self.replicas:
            replica.election.stop()
        self._stopped.set()
        self._counter.join(5)


@pytest.fixture
def election(monkeypatch: pytest.MonkeyPatch) -> Iterator[Election]:
    for name in ("_LEASE", "_RENEW_WITHIN", "_RENEW_EVERY", "_CHECK_EVERY"):
        monkeypatch.setattr(leader_election, name, getattr(leader_election, name) / FASTER)
    election = Election()
    yield election
    election.stop()
    assert election.most_acting <= 1


def test_a_replica_that_is_cut_off_stops_before_another_leads(election: Election) -> None:
    first = election.wait_for_leader()
    first.connection.cut = True
    second = election.wait_for_leader(other_than=first)
    assert not first.election.is_acting()
    first.connection.cut = False
    third = next(replica for replica in election.replicas if replica not in (first, second))
    second.connection.cut = third.connection.cut = True
    assert election.wait_for_leader(other_than=second) is first
    assert election.leases.lease["spec"]["leaseTransitions"] == 3
    assert first.notifications == [True, False, True]


def test_a_replica_that_stops_hands_over_at_once(election: Election) -> None:
    first = election.wait_for_leader()
    first.election.stop()
    assert not first.election.is_acting()
    assert election.leases.lease["spec"]["holderIdentity"] != election.name_replica(first), (
        "no other replica waits until the lease expires"
    )
    election.wait_for_leader(other_than=first)


def test_the_times_of_the_election_fit_each_other() -> None:
    slow_call = 3.0
    assert leader_election._RENEW_WITHIN + slow_call < leader_election._LEASE
    assert leader_election._RENEW_EVERY + slow_call < leader_election._RENEW_WITHIN
    assert leader_election._LEASE + 2 * leader_election._CHECK_EVERY + slow_call < HAND_OVER
