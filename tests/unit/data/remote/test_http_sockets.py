"""Reads over plain sockets: what a response must look like, and what happens when a connection breaks."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash
from remotes import RemoteServer
from scripted_server import DATA, PATIENCE, build_head, parse_range, receive, serve_and_open

from topkube.data.remote import transfer_reader
from topkube.data.remote.http import connection as http_connection
from topkube.data.remote.http import reading as http_reading
from topkube.data.remote.http.message import parse_head
from topkube.data.remote.http.reading import Unfit
from topkube.data.remote.listing import RemoteObject
from topkube.data.remote.object_store import ObjectStore
from topkube.data.remote.retry import Patience
from topkube.errors import DatasetError, StoreError

pytestmark = pytest.mark.usefixtures("without_aiohttp")


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/2 200 OK",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 200 OK\r\nETag: a\r\n b",  # a folded line
        b"HTTP/1.1 200 OK\r\nContent-Length : 5",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\ncontent-length: 6",
        b"HTTP/1.1 200 OK\r\nETag: a\r\nETag: b",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0x5",
        b"HTTP/1.1 200 OK\r\nContent-Length: ",
        b"HTTP/1.1 200 OK\nContent-Length: 5",
        b"HTTP/1.1 200 OK\r\nETag: \0",
    ],
)
def test_an_ambiguous_head_is_refused(head: bytes) -> None:
    with pytest.raises(Unfit):
        parse_head(head)


def test_a_head_is_read_without_regard_to_case() -> None:
    response = parse_head(b'HTTP/1.1 206 Partial Content\r\nETAG: "a"\r\ncontent-length:7 \r\nX-Other: 1\r\nX-Other: 2')
    assert (response.status, response.headers) == (206, {"ETag": '"a"', "Content-Length": "7"})


@pytest.mark.parametrize("listed", ['"v1"', ""])
def test_a_read_resumes_at_the_byte_that_it_has_reached(listed: str) -> None:
    def handle(connection: socket.socket, number: int, request: str) -> bool:
        start, stop = parse_range(request)
        connection.sendall(build_head(start, stop, 'ETag: "v1"\r\n'))
        connection.sendall(DATA[start : start + 60_000] if number == 1 else DATA[start:stop])
        return number > 1  # the first connection breaks in the middle

    with serve_and_open(handle) as (server, store):
        assert receive(store, listed, xxhash.xxh3_128_hexdigest(DATA)) == DATA
    assert [parse_range(request) for request in server.requests] == [(0, 100_000), (60_000, 100_000)]
    assert ["If-Match" in request for request in server.requests] == [bool(listed), True]


def test_the_rest_of_another_version_is_refused() -> None:
    def handle(connection: socket.socket, number: int, request: str) -> bool:
        start, stop = parse_range(request)
        connection.sendall(build_head(start, stop, f'ETag: "v{number}"\r\n'))
        connection.sendall(DATA[start : start + 60_000] if number == 1 else bytes(stop - start))
        return number > 1

    with serve_and_open(handle) as (_, store), pytest.raises(StoreError, match="no longer the object"):
        receive(store)


def test_a_range_without_a_version_is_read_again_from_its_start() -> None:
    """The bytes of a broken response could be those of another version."""

    def handle(connection: socket.socket, number: int, request: str) -> bool:
        start, stop = parse_range(request)
        connection.sendall(build_head(start, stop, ""))
        connection.sendall(bytes(60_000) if number == 1 else DATA[start:stop])
        return number > 1

    with serve_and_open(handle) as (server, store):
        assert receive(store) == DATA
    assert [parse_range(request) for request in server.requests] == [(0, 100_000)] * 2


def test_a_connection_that_the_server_closed_meanwhile_is_not_a_failed_try() -> None:
    def handle(connection: socket.socket, number: int, request: str) -> bool:
        start, stop = parse_range(request)
        connection.sendall(build_head(start, stop, 'ETag: "v1"\r\n') + DATA[start:stop])
        return False

    with serve_and_open(handle) as (server, store):
        for _ in range(PATIENCE.retries + 3):
            assert receive(store, '"v1"') == DATA
    assert len(server.requests) == PATIENCE.retries + 3


def test_bytes_after_a_response_are_not_read_as_the_next_response() -> None:
    def handle(connection: socket.socket, number: int, request: str) -> bool:
        start, stop = parse_range(request)
        second_response = build_head(start, stop, 'ETag: "v1"\r\n') + bytes(stop - start)
        connection.sendall(
            build_head(start, stop, 'ETag: "v1"\r\n') + DATA[start:stop] + second_response * (number == 1)
        )
        return True

    with serve_and_open(handle) as (server, store):
        assert receive(store, '"v1"') == DATA
        assert receive(store, '"v1"') == DATA
    assert len(server.requests) == 2


def test_a_server_without_ranges_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_reader, "RANGE_BYTES", 40_000)

    def handle(connection: socket.socket, number: int, request: str) -> bool:
        connection.sendall(build_head(0, len(DATA), 'ETag: "v1"\r\n') + DATA)
        return True

    with serve_and_open(handle) as (_, store):
        assert receive(store, '"v1"', xxhash.xxh3_128_hexdigest(DATA)) == DATA


def test_a_server_without_ranges_sends_an_object_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once per range: a shard of 10 GB would take 12 TB. Every range has the time that it has elsewhere."""
    monkeypatch.setattr(transfer_reader, "RANGE_BYTES", 10_000)

    def handle(connection: socket.socket, number: int, request: str) -> bool:
        connection.sendall(build_head(0, len(DATA), 'ETag: "v1"\r\n'))
        for start in range(0, len(DATA), 10_000):
            connection.sendall(DATA[start : start + 10_000])
            time.sleep(0.3)
        return True

    with serve_and_open(handle, Patience(retries=0, stall_seconds=1.0)) as (server, store):
        assert receive(store, '"v1"') == DATA
        assert len(server.requests) == 1


@pytest.mark.parametrize(("progress", "succeeds"), [(15_000, True), (500, False)])
def test_a_server_without_ranges_may_break_connections_if_a_range_arrives_in_time(
    monkeypatch: pytest.MonkeyPatch, progress: int, succeeds: bool
) -> None:
    monkeypatch.setattr(transfer_reader, "RANGE_BYTES", 10_000)

    def handle(connection: socket.socket, number: int, request: str) -> bool:
        connection.sendall(build_head(0, len(DATA), 'ETag: "v1"\r\n') + DATA[: number * progress])
        return number * progress >= len(DATA)

    with serve_and_open(handle) as (server, store):
        if succeeds:
            assert receive(store, '"v1"') == DATA
        else:
            with pytest.raises(StoreError, match="could not be read in 3 tries"):
                receive(store, '"v1"')
        assert len(server.requests) == (7 if succeeds else 3)


def test_a_manifest_whose_length_is_not_true_takes_no_memory() -> None:
    def handle(connection: socket.socket, number: int, request: str) -> bool:
        body = b"" if request.startswith("HEAD") else b"hello"
        connection.sendall(
            b'HTTP/1.1 200 OK\r\nETag: "v1"\r\nContent-Length: %d\r\n\r\n' % (len(body) or 10**15) + body
        )
        return True

    with serve_and_open(handle) as (_, store), pytest.raises(StoreError, match="no longer the object that was listed"):
        store.read_listing()


def test_a_head_without_end_is_refused() -> None:
    def handle(connection: socket.socket, number: int, request: str) -> bool:
        with contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            while True:
                connection.sendall(b"X-More: " + b"x" * 1000 + b"\r\n")
        return False

    with serve_and_open(handle) as (_, store), pytest.raises(StoreError, match=r"more than 32,768 bytes"):
        receive(store)


@pytest.mark.parametrize(("status", "message"), [(404, "does not exist"), (403, "may not be read"), (412, "listed")])
def test_a_status_other_than_success_is_an_error(status: int, message: str) -> None:
    def handle(connection: socket.socket, number: int, request: str) -> bool:
        connection.sendall(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode())
        return True

    with serve_and_open(handle) as (server, store), pytest.raises(StoreError, match=message):
        receive(store)
    assert len(server.requests) == 1


def test_a_stall_ends_the_try() -> None:
    stalled = threading.Event()

    def handle(connection: socket.socket, number: int, request: str) -> bool:
        start, stop = parse_range(request)
        connection.sendall(build_head(start, stop, 'ETag: "v1"\r\n'))
        if number > 1:
            connection.sendall(DATA[start:stop])
            return True
        connection.sendall(DATA[:1000])
        stalled.wait(30)
        return False

    patience = Patience(retries=20, pause_seconds=0.001, stall_seconds=0.5)
    with serve_and_open(handle, patience) as (server, store):
        try:
            assert receive(store, '"v1"') == DATA
        finally:
            stalled.set()
    assert parse_range(server.requests[-1])[0] in (0, 1000)


def test_a_line_break_in_a_version_does_not_reach_the_request() -> None:
    with serve_and_open(lambda *_: False) as (server, store), pytest.raises(DatasetError, match="line break"):
        receive(store, '"a\r\nX: b"')
    assert not server.requests


def test_an_error_of_the_writer_is_not_retried() -> None:
    def handle(connection: socket.socket, number: int, request: str) -> bool:
        connection.sendall(build_head(0, len(DATA), 'ETag: "v1"\r\n') + DATA)
        return True

    def write(offset: int, data: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with serve_and_open(handle) as (server, store), pytest.raises(OSError, match="full"):
        store.fetch(RemoteObject("o", len(DATA), '"v1"'), write)
    assert len(server.requests) == 1


def test_another_address_of_the_host_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(connection: socket.socket, number: int, request: str) -> bool:
        connection.sendall(build_head(0, len(DATA), 'ETag: "v1"\r\n') + DATA)
        return True

    with serve_and_open(handle, Patience(retries=0)) as (_, store), socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
        closed.close()
        real = socket.getaddrinfo("127.0.0.1", store.root.rpartition(":")[2], type=socket.SOCK_STREAM)
        refusing = [(*real[0][:4], ("127.0.0.1", port))]
        monkeypatch.setattr(http_connection.socket, "getaddrinfo", lambda *_, **__: [*refusing, *real])
        assert receive(store, '"v1"') == DATA


@pytest.mark.parametrize("how", ["chunked", "redirect"])
def test_the_http_library_reads_requests_that_the_socket_client_does_not(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def count_and_read(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return http_reading.read_range(*arguments)

    monkeypatch.setattr(transfer_reader, "read_range", count_and_read)

    def handle(connection: socket.socket, number: int, request: str) -> bool:
        start, stop = parse_range(request)
        if how == "redirect" and request.startswith("GET /o "):
            connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: /p\r\nContent-Length: 0\r\n\r\n")
        elif how == "redirect":
            connection.sendall(build_head(start, stop, 'ETag: "v1"\r\n') + DATA[start:stop])
        else:
            connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "v1"\r\nTransfer-Encoding: chunked\r\n\r\n')
            connection.sendall(f"{len(DATA):x}\r\n".encode() + DATA + b"\r\n0\r\n\r\n")
        return True

    with serve_and_open(handle) as (server, store):
        assert receive(store, '"v1"', xxhash.xxh3_128_hexdigest(DATA)) == DATA
        assert receive(store, '"v1"') == DATA
        close_library_connections(store)
    assert calls == 2
    assert len(server.requests) == {"chunked": 3, "redirect": 5}[how]


def close_library_connections(store: ObjectStore) -> None:
    """Close the connections of aiohttp."""
    from fsspec.asyn import sync

    session = sync(store.filesystem.loop, store.filesystem.set_session)
    sync(store.filesystem.loop, session.close)
    store.filesystem._session = None


def test_many_objects_share_connections(tmp_path: Path) -> None:
    remote = RemoteServer(tmp_path)
    try:
        parts = [os.urandom(3000) for _ in range(100)]
        for number, part in enumerate(parts):
            (tmp_path / f"{number:03}").write_bytes(part)
        store = ObjectStore(remote.uri, patience=PATIENCE)
        objects = list(store.read_listing())
        whole = bytearray(300_000)

        def write(offset: int, data: Any) -> None:
            whole[offset : offset + len(data)] = data

        store.fetch_many(objects, range(0, 300_000, 3000), write, lambda count: None)
        assert bytes(whole) == b"".join(parts)
        assert set(remote.requests.values()) == {1}
        store._reader._local.__dict__.clear()  # closes the connections of this thread
    finally:
        remote.close()
