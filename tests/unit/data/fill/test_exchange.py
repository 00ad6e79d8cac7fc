"""The exchange of shards over a communicator that is late, wrong or broken (for real ranks see tests/mpi)."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from mpi4py import MPI
from openers import wait_until

from topkube.data.base.rank_place import RankPlace
from topkube.data.cache.disk import shard_file
from topkube.data.cache.disk.shard_file import ArrivingShard, ReceivedChecksums, ShardWriter
from topkube.data.fill import shard_exchange, shard_messages
from topkube.data.fill.shard_exchange import ShardExchange
from topkube.data.formats.shards import DataShard
from topkube.errors import StoreError

SHARD = DataShard(cache_number=5, key="0" * 32, start=5, stop=6, size=40)
BYTES = bytes(range(40))


class Request:
    """A receive that completes when the communicator lets it."""

    def __init__(self, comm: SimulatedComm, buffer: Any, data: bytes) -> None:
        self.comm, self.buffer, self.data = comm, buffer, data
        self.done = self.cancelled = False

    def Test(self, status: Any = None) -> bool:
        if not self.done and self.comm.allow():
            if self.buffer is not None:
                self.buffer.view(np.uint8)[: len(self.data)] = np.frombuffer(self.data, np.uint8)
            self.done = True
        if status is not None:
            status.Set_elements(MPI.BYTE, len(self.data))
        return self.done

    def Cancel(self) -> None:
        """A matched receive cannot be cancelled: it completes later."""
        self.cancelled = True

    Free = Cancel

    def Wait(self) -> None:
        pass


class SimulatedComm:
    """Rank 1 has BYTES as every shard, and sends `words` with it."""

    def __init__(self) -> None:
        digest = xxhash.xxh3_128_hexdigest(BYTES)
        self.words: list[int] = [SHARD.cache_number, SHARD.size, int(digest[:16], 16), int(digest[16:], 16)]
        """The words that rank 1 sends before and after the bytes: the header and the digest."""
        self.words_sent = 0
        self.ends_after = len(BYTES) + 1
        """An empty message follows after this many bytes: the sender cannot continue."""
        self.messages: list[npt.NDArray[Any]] = []
        """The messages of rank 0."""
        self.open = True
        """True if every receive completes at once."""
        self.slots = threading.Semaphore(0)
        """If `open` is False, each slot lets one receive complete."""
        self.sent = 0
        """The number of bytes of the shard that rank 1 has sent."""
        self.failure: Exception | None = None
        self.requests: list[tuple[int, int]] = []
        """(shard, tag) of requests of rank 1 that have not been received."""
        self.farewells: list[int] = []
        """The ranks to which rank 0 has announced its end."""

    def Dup(self) -> SimulatedComm:
        return self

    def allow(self) -> bool:
        return self.open or self.slots.acquire(blocking=False)

    def Iprobe(self, source: int, tag: int, status: Any) -> bool:
        if self.failure is not None:
            raise self.failure
        status.source = 1
        return tag == shard_messages.REQUEST and bool(self.requests)

    def Recv(self, buffer: Any, source: int, tag: int) -> None:
        buffer[:] = self.requests.pop(0)

    def Isend(self, buffer: npt.NDArray[Any], rank: int, tag: int) -> Request:
        if tag == shard_messages.GOODBYE:
            self.farewells.append(rank)
        if tag >= shard_messages.FIRST_REPLY:
            self.messages.append(buffer.copy())
        return Request(self, None, b"")

    def Irecv(self, buffer: Any, rank: int, tag: int) -> Request:
        if self.sent >= self.ends_after:
            return Request(self, buffer, b"")
        if buffer.dtype != np.uint8:
            # The words of the next shard follow those of this shard.
            words = (self.words * 2)[self.words_sent : self.words_sent + buffer.size]
            self.words_sent = (self.words_sent + buffer.size) % len(self.words)
            return Request(self, buffer, np.array(words, np.uint64).tobytes())
        data = BYTES[self.sent : self.sent + buffer.size]
        self.sent += buffer.size
        return Request(self, buffer, data)


class Bench:
    """An exchange over `SimulatedComm`, and the remote behind it."""

    def __init__(self) -> None:
        self.comm = SimulatedComm()
        self.from_remote = 0
        self.arriving: ArrivingShard | None = None
        self.cache: Any = SimpleNamespace(
            stall_seconds=5.0,
            node_state=SimpleNamespace(advance=lambda count: None),
            counters=SimpleNamespace(add=lambda name, amount: None),
            shards=range(10),
            fetcher=SimpleNamespace(find_arriving=lambda number: self.arriving),
            fetch_from_store=self._from_store,
        )
        place = RankPlace(0, 2, node_ranks=((0,), (1,)), world=SimpleNamespace(comm=self.comm))
        self.exchange = ShardExchange(self.cache, place)

    def _from_store(self, shard: DataShard, file: int) -> ReceivedChecksums:
        self.from_remote += 1
        os.pwrite(file, b"remote".ljust(shard.size), 0)
        return ReceivedChecksums("the manifest's")

    def receive_shard(self, file: int) -> ReceivedChecksums:
        return self.exchange.build_source(1)(SHARD, file)


LAYOUTS = [
    ((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    ((0, 1), (2, 3, 4), (5,)),  # nodes of different size
    ((0, 2), (1, 3)),  # ranks in turn
    ((0, 1),),
]


@pytest.mark.parametrize("node_ranks", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 2, 7, 100])
def test_a_rank_announces_its_end_to_the_ranks_that_could_request_its_shards(
    node_ranks: tuple[tuple[int, ...], ...], shards: int
) -> None:
    size = sum(map(len, node_ranks))
    places = {
        rank: RankPlace(rank, size, node=node, node_ranks=node_ranks)
        for node, ranks in enumerate(node_ranks)
        for rank in ranks
    }
    requests: dict[int, set[int]] = {rank: set() for rank in places}
    for place in places.values():
        for shard in range(shards):
            home = place.find_home_rank(shard)
            if place.find_filling_rank(shard) == place.rank and home != place.rank:
                requests[home].add(place.rank)
    assert {rank: set(place.list_requesters(shards)) for rank, place in places.items()} == requests


def test_at_4096_ranks_a_rank_announces_its_end_to_one_rank_per_node() -> None:
    nodes = tuple(tuple(range(8 * node, 8 * node + 8)) for node in range(512))
    place = RankPlace(3, 4096, node=0, node_ranks=nodes)
    assert place.list_requesters(100_000) == list(range(3 + 8, 4096, 8))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.comm.open = True
    bench.exchange.close()


def test_the_end_is_announced_once(bench: Bench) -> None:
    bench.exchange.close()
    bench.exchange.close()
    assert bench.comm.farewells == [1]


def test_a_shard_arrives_with_the_digest_of_its_sender(bench: Bench) -> None:
    with tempfile.TemporaryFile() as file:
        digest = xxhash.xxh3_128_hexdigest(BYTES)
        assert bench.receive_shard(file.fileno()) == (digest, digest)
        assert file.read() == BYTES
    assert not bench.from_remote


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_shard_that_differs_from_its_senders_copy_comes_from_the_remote(bench: Bench, at: int) -> None:
    bench.comm.words[at] ^= 1
    with tempfile.TemporaryFile() as file:
        assert bench.receive_shard(file.fileno()).expected == "the manifest's"
        assert file.read() == b"remote".ljust(40)


@pytest.mark.parametrize("ends_after", [0, 20, 40])
def test_a_shard_that_its_home_rank_cannot_finish_comes_from_the_remote(
    bench: Bench, ends_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_messages, "CHUNK_BYTES", 10)
    bench.comm.ends_after = ends_after
    with tempfile.TemporaryFile() as file:
        assert bench.receive_shard(file.fileno()).expected == "the manifest's"
        assert file.read() == b"remote".ljust(40)
    assert len(bench.exchange._receiver.retired) == 1


class Arrival:
    """A shard that this rank fetches, part by part, and that rank 1 has requested."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shard_messages, "CHUNK_BYTES", 10)
        monkeypatch.setattr(shard_file, "PIECE_BYTES", 5)
        self.comm, self.fetched = bench.comm, threading.Event()
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.writer = ShardWriter(self.file.fileno())
        self.shard = bench.arriving = ArrivingShard(self.file.fileno(), self.writer, SHARD.size)
        bench.cache.open = lambda *_: self.fetched.wait()
        bench.comm.requests.append((SHARD.cache_number, shard_messages.FIRST_REPLY))

    def write(self, start: int, stop: int) -> None:
        self.writer.write(start, BYTES[start:stop])

    def wait_for_messages(self, count: int) -> list[bytes]:
        wait_until(lambda: len(self.comm.messages) >= count)
        return [message.tobytes() for message in self.comm.messages]

    def close(self) -> None:
        self.fetched.set()
        self.file.close()


@pytest.fixture
def arrival(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arrival]:
    arrival = Arrival(bench, monkeypatch)
    yield arrival
    arrival.close()


def test_a_shard_is_sent_while_it_arrives(arrival: Arrival) -> None:
    """The digest follows when all bytes have been compared with the listing."""
    arrival.write(0, 25)
    header, *parts = arrival.wait_for_messages(3)
    assert np.frombuffer(header, np.uint64).tolist() == [SHARD.cache_number, SHARD.size]
    assert b"".join(parts) == BYTES[:20]
    arrival.write(25, 40)
    assert b"".join(arrival.wait_for_messages(5)[1:]) == BYTES
    arrival.shard.digest = xxhash.xxh3_128_hexdigest(BYTES)
    arrival.shard.is_over = True
    digest = np.frombuffer(arrival.wait_for_messages(6)[-1], np.uint64).tolist()
    assert "".join(f"{half:016x}" for half in digest) == arrival.shard.digest


@pytest.mark.parametrize("written", [25, 40])
def test_a_shard_that_does_not_arrive_whole_gets_no_digest(arrival: Arrival, written: int) -> None:
    """If `written` is 40, all bytes came, but they do not have the checksum of the manifest."""
    arrival.write(0, written)
    count = 1 + written // 10
    arrival.wait_for_messages(count)
    arrival.shard.is_over = True
    messages = arrival.wait_for_messages(count + 1)
    assert messages[-1] == b""
    assert b"".join(messages[1:]) == BYTES[: written // 10 * 10]


def test_bytes_that_do_not_arrive_in_order_are_not_sent(arrival: Arrival) -> None:
    arrival.write(0, 10)
    arrival.wait_for_messages(2)
    arrival.write(20, 40)
    assert arrival.wait_for_messages(3)[-1] == b""


def test_nothing_is_written_to_a_descriptor_after_a_timeout(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may belong to another shard by then. The chunks come one by one, so that the pull is alive."""
    monkeypatch.setattr(shard_messages, "CHUNK_BYTES", 2)
    bench.comm.open = False
    bench.cache.stall_seconds = 0.1
    with tempfile.TemporaryFile() as first, tempfile.TemporaryFile() as second:
        number = first.fileno()
        ended = threading.Event()

        def release_slowly() -> None:
            while not ended.wait(0.04):
                bench.comm.slots.release()

        dripping = threading.Thread(target=release_slowly)
        dripping.start()
        try:
            bench.receive_shard(number)
        finally:
            ended.set()
            dripping.join()
        assert bench.from_remote == 1
        os.dup2(second.fileno(), number)
        bench.comm.open = True  # the rest arrives
        wait_until(lambda: not bench.exchange._receiver.pulls and not bench.exchange._buffers.abandoned)
        assert second.read() == b""


def test_a_broken_exchange_is_reported_once_and_the_remote_is_read(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.comm.failure = RuntimeError("MPI is gone")
    with tempfile.TemporaryFile() as file:
        for _ in range(2):
            assert bench.receive_shard(file.fileno()).expected == "the manifest's"
    assert capfd.readouterr().err.count("nodes no longer exchange shards (RuntimeError: MPI is gone)") == 1


def test_a_tag_is_not_used_again_after_a_timeout(bench: Bench) -> None:
    bench.comm.open = False
    bench.cache.stall_seconds = 0.1
    with tempfile.TemporaryFile() as file:
        bench.receive_shard(file.fileno())
        (retired,) = bench.exchange._receiver.retired
        bench.exchange._receiver.reply_count += shard_messages.REPLY_TAGS - 1
        bench.comm.open = True
        bench.receive_shard(file.fileno())
    assert (bench.exchange._receiver.reply_count - 1) % shard_messages.REPLY_TAGS == (
        retired[1] - shard_messages.FIRST_REPLY
    ) + 1


def test_nothing_is_written_after_the_end_of_a_writer() -> None:
    with tempfile.TemporaryFile() as file:
        with ShardWriter(file.fileno()) as writer:
            writer.write(0, b"ab")
        with pytest.raises(StoreError, match="no longer being written"):
            writer.write(2, b"cd")
        assert file.read() == b"ab"


def test_a_writer_has_a_checksum_only_of_bytes_in_order() -> None:
    with tempfile.TemporaryFile() as file, ShardWriter(file.fileno()) as writer:
        writer.write(0, b"ab")
        writer.write(2, b"cd")
        assert writer.compute_digest(4) == xxhash.xxh3_128_hexdigest(b"abcd")
        assert writer.compute_digest(3) == writer.compute_digest(5) == ""
        writer.write(2, b"xy")
        assert writer.compute_digest(4) == ""


def test_a_request_or_the_end_wakes_an_exchange_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_exchange, "_IDLE_SECONDS", (600.0, 600.0, 600.0))
    bench = Bench()
    bench.comm.open = False  # nothing arrives
    with tempfile.TemporaryFile() as file:
        receiving = threading.Thread(target=bench.receive_shard, args=(file.fileno(),))
        receiving.start()
        wait_until(lambda: bench.comm.words_sent)  # the receive of the header is posted
        bench.exchange.close()
        assert not bench.exchange._thread.is_alive()
        receiving.join(60)
        assert bench.from_remote == 1


def test_an_exchange_rests_only_after_a_while_without_progress() -> None:
    assert shard_exchange._lengthen(0.009, 1.0) == 0.01
    assert 0.01 < shard_exchange._lengthen(0.01, 3.0) < 0.1
    assert shard_exchange._lengthen(0.1, 3.0) == 0.1


@pytest.mark.parametrize("request_of_rank", [(10, 16), (-1, 16), (5, 15), (5, 1 << 20), (1 << 40, 16)])
def test_an_invalid_request_is_reported_and_not_answered(
    bench: Bench, request_of_rank: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    bench.cache.open = lambda *_: pytest.fail("an invalid request was answered")
    bench.comm.requests.append(request_of_rank)
    wait_until(lambda: not bench.comm.requests)
    bench.exchange.close()
    assert not bench.exchange._sender.pushes
    assert "one of these numbers is invalid" in capfd.readouterr().err
