"""The choice between TCP connections of our own and MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from linked_ranks import advance_until

from topkube import links
from topkube.algorithms.cost import list_partners
from topkube.links import LinkChoice, Links, open_links


class ThreadComm:
    """The communicator of a rank that is a thread."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def allgather(self, value: Any) -> list[Any]:
        self._shared["values"][self.rank] = value
        self._shared["barrier"].wait(60)
        values = list(self._shared["values"])
        self._shared["barrier"].wait(60)
        return values


def open_on_threads(size: int, choice: Callable[[int], LinkChoice]) -> list[Links | None]:
    shared = {"values": [None] * size, "barrier": threading.Barrier(size)}
    opened: list[Links | None] = [None] * size

    def run(rank: int) -> None:
        opened[rank] = open_links(
            ThreadComm(rank, size, shared), list(range(size)), choice(rank), list_partners(rank, size)
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return opened


def test_ranks_of_one_machine_and_ranks_with_rdma_use_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "has_rdma", lambda: False)
    assert open_on_threads(2, lambda rank: LinkChoice("auto", (0, 0))) == [None, None]
    assert open_on_threads(2, lambda rank: LinkChoice("mpi", (0, 1))) == [None, None]
    # All ranks decide alike, also if only one of them has another setting.
    assert open_on_threads(3, lambda rank: LinkChoice("mpi" if rank == 1 else "tcp", (0, 1, 2))) == [None] * 3
    assert None not in open_on_threads(2, lambda rank: LinkChoice("auto", (0, 1), "127.0.0.1"))
    monkeypatch.setattr(links, "has_rdma", lambda: True)
    assert open_on_threads(2, lambda rank: LinkChoice("auto", (0, 1), "127.0.0.1")) == [None, None]


def test_ranks_try_other_addresses_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first address leads nowhere."""
    monkeypatch.setattr(links, "_TRIAL_SECONDS", 1.0)
    monkeypatch.setattr(links, "list_addresses", lambda pod_ip: ["240.0.0.1", "127.0.0.1"])
    opened = open_on_threads(4, lambda rank: LinkChoice("tcp", (0, 1, 2, 3)))
    assert None not in opened
    arrays = [np.full(100, rank, np.float32) for rank in range(4)]
    begun = [
        one.begin_reduction(arrays[one.rank], np.empty(75, np.float32), 1.0, 0, True)
        for one in opened
        if one is not None
    ]
    advance_until([one for one in opened if one is not None], lambda: all(each.are_complete for each in begun))
    assert all((array == 6).all() for array in arrays)


def test_ranks_agree_on_the_number_of_connections() -> None:
    """Ranks on smaller machines want fewer."""
    opened = open_on_threads(3, lambda rank: LinkChoice("tcp", (0, 1, 2), "127.0.0.1", lanes=4 - rank))
    assert [one.lanes for one in opened if one is not None] == [2, 2, 2]


@pytest.mark.parametrize(
    ("setting", "threads", "lanes"), [(0, 1, 1), (0, 7, 1), (0, 8, 2), (0, 96, 4), (1, 96, 1), (9, 1, 9)]
)
def test_the_number_of_connections_follows_from_the_processors(setting: int, threads: int, lanes: int) -> None:
    assert links.count_lanes(setting, threads) == lanes


def test_the_limit_of_open_files_limits_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all worlds count. Links that are closed give theirs back."""
    before = links._connections
    (one, other) = (each for each in open_on_threads(2, lambda rank: LinkChoice("tcp", (0, 1), "127.0.0.1", 2)))
    assert one is not None
    assert other is not None
    assert links._connections == before + 8
    for each in (one, one, other):
        each.close()
    assert links._connections == before
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(links, "_connections", 0)
    monkeypatch.setattr(links.resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(links.resource, "setrlimit", lambda kind, limit: limits.append(limit))
    assert links._limit_lanes(4, 500) == 4
    links._reserve_files(2000)
    assert limits == [(3024, 4096)]
    assert links._limit_lanes(4, 500) == 2
    links._reserve_files(1000)
    assert links._limit_lanes(4, 500) == 1  # MPI takes over if even these cannot be opened
    assert limits == [(3024, 4096), (4024, 4096)]


def test_ranks_that_cannot_reach_each_other_use_mpi(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(links, "_TRIAL_SECONDS", 1.0)
    monkeypatch.setattr(links, "list_addresses", lambda pod_ip: ["240.0.0.1", "240.0.0.2"])
    assert open_on_threads(3, lambda rank: LinkChoice("tcp", (0, 1, 2))) == [None] * 3
    printed = capsys.readouterr().err
    assert "messages between nodes use MPI" in printed
    assert "rank 0 cannot reach rank 1 at 240.0.0.1, 240.0.0.2: no answer" in printed
    assert "TOPKUBE_LINKS=mpi" in printed
    assert printed.count("warning") == 1
