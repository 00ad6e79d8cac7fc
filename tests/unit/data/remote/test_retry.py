"""How long a read waits for a store that fails."""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from remotes import RemoteServer, write_files

from topkube.data.remote.object_store import ObjectStore
from topkube.data.remote.retry import FailedTries, Patience, is_worth_a_retry
from topkube.errors import StoreError


def count_seconds(patience: Patience) -> float:
    return sum(patience.choose_pause(failed_tries) for failed_tries in range(patience.retries))


def test_a_store_may_be_away_for_20_seconds() -> None:
    assert all(20 < count_seconds(Patience()) < 70 for _ in range(50))
    assert Patience().choose_pause(10_000) <= 15


def test_pauses_grow_and_differ_between_ranks_that_have_seeded_equally() -> None:
    pauses = []
    for _ in range(2):
        random.seed(7)
        pauses.append([Patience().choose_pause(failed_tries) for failed_tries in range(9)])
    assert pauses[0] != pauses[1]
    assert sum(pauses[0][:3]) < pauses[0][-1]
    random.seed(7)
    expected = random.random()
    random.seed(7)
    Patience().choose_pause(1)
    assert random.random() == expected, "the random numbers of the script have changed"


@pytest.mark.parametrize("read", ["file", "list"])
def test_a_store_that_is_started_again_ends_no_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str) -> None:
    """The server begins to listen again after 8 failed tries."""
    data = write_files(tmp_path, 2)
    server = RemoteServer(tmp_path)
    port = int(server.uri.rpartition(":")[2])
    store = ObjectStore(server.uri, patience=Patience(pause_seconds=0.0))
    entry = store.read_listing()[0]
    server.close()
    pauses: list[int] = []

    def wait(patience: Patience, failed_tries: int) -> float:
        pauses.append(failed_tries)
        if len(pauses) == 8:
            running.append(RemoteServer(tmp_path, port))
        return 0.001

    running: list[RemoteServer] = []
    monkeypatch.setattr(Patience, "choose_pause", wait)
    try:
        if read == "file":
            assert store.read(entry) == data[0].tobytes()
        else:
            assert len(store.read_listing()) == 2
    finally:
        for started in running:
            started.close()
    assert pauses == list(range(8))


def test_a_store_that_never_answers_is_an_error_after_three_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try ends after 30 seconds."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    failed = FailedTries(Patience())

    def read() -> None:
        nonlocal now
        while True:
            now += 30
            now += failed.add(TimeoutError(), "http://host/x")

    with pytest.raises(StoreError, match=r"http://host/x could not be read in \d tries \(TimeoutError\)"):
        read()
    assert 120 < now - 1000 < 200


FINAL: list[Callable[[], Exception]] = [
    partial(ssl.SSLCertVerificationError, "certificate verify failed"),
    partial(ValueError, "an invalid name of a bucket"),
    FileNotFoundError,
]
TRANSIENT: list[Callable[[], Exception]] = [
    ConnectionRefusedError,
    TimeoutError,
    partial(socket.gaierror, socket.EAI_AGAIN, "Temporary failure in name resolution"),
    partial(ssl.SSLError, "the connection was closed"),
]


@pytest.mark.parametrize("build", FINAL)
def test_an_error_that_stays_is_raised_at_once(build: Callable[[], Exception]) -> None:
    assert not is_worth_a_retry(build())


@pytest.mark.parametrize("build", TRANSIENT)
def test_an_error_that_may_go_away_is_tried_again(build: Callable[[], Exception]) -> None:
    assert is_worth_a_retry(build())
