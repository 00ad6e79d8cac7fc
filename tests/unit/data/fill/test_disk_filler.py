"""The order in which fillers fetch shards, and the shards for which readers do not wait."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from openers import PATIENT, Opener, wait_until
from remotes import Answer, RemoteServer, write_tars

from topkube.data import ArrayOf
from topkube.data.fill.disk_filler import THREADS
from topkube.data.manifest import generate_manifest

RECORD = ArrayOf("uint8", (3072,), field="bin")
SHARDS = 12


class HeldRemote:
    """A remote whose responses are held back until `release` is set, except those for the shards in `open_shards`."""

    def __init__(self, remote: RemoteServer, open_shards: tuple[str, ...] = ()) -> None:
        self.data = write_tars(remote.folder, [2] * SHARDS)
        (remote.folder / "manifest.jsonl").write_text("".join(generate_manifest(remote.uri, samples=True)))
        self.order: list[str] = []
        self.release, self._open_shards = threading.Event(), open_shards
        remote.alter = self._hold

    def _hold(self, name: str, answer: Answer) -> None:
        if name.endswith(".tar"):
            self.order.append(name)
            if name not in self._open_shards:
                self.release.wait(60)


def test_a_shard_that_could_not_be_fetched_is_not_awaited_until_all_others_are(
    remote: RemoteServer, open_dataset: Opener
) -> None:
    held = HeldRemote(remote, ("000.tar",))
    remote.faults["000.tar"] = ["503"] * (PATIENT.retries + 1)
    dataset = open_dataset(remote.uri, decode=RECORD, patience=PATIENT, wait_seconds=10)
    assert dataset.filler is not None
    try:
        np.testing.assert_array_equal(dataset[0], held.data[0])
        assert dataset.filler.is_running
        assert dataset.statistics()["takeovers"] == 0, "the reader waited until nothing arrived for some time"
    finally:
        held.release.set()


def record_choices(filler: Any) -> list[int]:
    """Return a list that gets the shards that the filler chooses from now on, in order."""
    chosen, choose = list[int](), filler._choose_next

    def choose_and_record() -> int:
        chosen.append(choose())
        return chosen[-1]

    filler._choose_next = choose_and_record
    return chosen


def test_a_shard_for_which_a_reader_waits_is_fetched_next(remote: RemoteServer, open_dataset: Opener) -> None:
    held = HeldRemote(remote)
    dataset = open_dataset(remote.uri, decode=RECORD, patience=PATIENT, wait_seconds=60)
    with ThreadPoolExecutor(1) as pool:
        sample = pool.submit(dataset.__getitem__, -1)
        try:
            wait_until(lambda: dataset.node_state.list_requested() == [SHARDS - 1])
            wait_until(lambda: len(held.order) == THREADS)
            chosen = record_choices(dataset.filler)
        finally:
            held.release.set()
        np.testing.assert_array_equal(sample.result(), held.data[-1])
    assert dataset.filler is not None
    dataset.filler.wait()
    assert chosen == [SHARDS - 1, *range(THREADS, SHARDS - 1)]
    assert sorted(held.order) == [f"{number:03}.tar" for number in range(SHARDS)]


def test_progress_counts_every_shard_once(remote: RemoteServer, open_dataset: Opener) -> None:
    HeldRemote(remote).release.set()
    counts: list[int] = []
    open_dataset(remote.uri, decode=RECORD).warm(counts.append)
    assert counts == sorted(counts)
    assert counts[-1:] in ([], [SHARDS])
