"""Reads of objects over HTTP/1.1 with plain sockets: bytes go from the socket into one buffer, and from there to the
writer. This needs less processor time than an HTTP library.

A thread reads one object, or many small objects over several connections, with its own selector. It only handles plain
responses: status 200 or 206 with Content-Length. For redirects, chunked bodies and bodies that end with the connection
it raises NotPlain, and the caller uses the HTTP library. Every response is compared with the listing before one of its
bytes is used (http_reading.py). After an error, a read resumes at the byte that it has reached if the version of the
object is known, else at the start of its range.

Source: RFC 9112 (HTTP/1.1), RFC 9110, sections 13 and 14 (conditions and ranges).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import re
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import xxhash

from topkube.data.remote.http_reading import Reading, Unfit, check_content, check_range
from topkube.data.remote.object_version import build_condition
from topkube.data.remote.retry import Changed, Patience, StatusError, final_error, is_worth_a_retry
from topkube.errors import DatasetError

_HEAD_BYTES = 32 << 10
"""The most bytes of the head of a response."""
_PIECE_BYTES = 256 << 10
"""The bytes that are received and written at once. They stay in the processor's cache between the two."""
_WAKE_BYTES = 128 << 10
"""The kernel wakes the reader of a large body after this many bytes, so that it is not woken for every packet."""
_PORTS = {"http": 80, "https": 443}
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n]*)?")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
_TARGET = re.compile(r"[!-~]+")
_NAMES = {
    name.lower().encode(): name
    for name in (
        "ETag",
        "Last-Modified",
        "Content-Length",
        "Content-Range",
        "Content-Type",
        "Content-Encoding",
        "Transfer-Encoding",
        "Connection",
    )
}
_CONNECTING, _SHAKING, _SENDING, _HEAD, _BODY = range(5)
Write = Callable[[int, Any], None]
"""A function that gets (offset, bytes). The bytes are a view of a buffer that is used again after the call."""


class NotPlain(Exception):
    """The server sends a response that only the HTTP library can read."""


@dataclass
class Transfer:
    """The read of bytes `start` to `stop` of an object. Byte i is written at `base + i`."""

    reading: Reading
    start: int
    stop: int
    base: int = 0
    at: int = field(init=False)
    """The byte that is read next."""
    tries: int = field(default=0, init=False)
    """The failed tries of the current range."""

    def __post_init__(self) -> None:
        self.at = self._range_start = self.start
        whole = self.start == 0 and self.stop == self.reading.listed.size
        self.checksum = xxhash.xxh3_128() if whole and self.reading.listed.checksum else None
        """The state of the checksum, if the listing has one."""
        self._held = bytearray()
        """Bytes of an object without a version: they are written when their range is whole."""

    def range_end(self, most: int) -> int:
        """Return the end of the range in which `at` is. A range has at most `most` bytes."""
        return min(self._range_start + most, self.stop)

    def add(self, data: Any, end: int, write: Write, progress: Callable[[int], None]) -> None:
        """Take the bytes from `at` on, of a range that ends at `end`. They are written at once if another try could
        resume behind them: if the response has a version."""
        self.at += len(data)
        if not self.reading.version:
            self._held += data
            if self.at < end:
                return
            data, self._held = self._held, bytearray()
        if self.checksum is not None:
            self.checksum.update(data)
        write(self.base + self.at - len(data), data)
        progress(len(data))

    def finish_range(self) -> None:
        self._range_start, self.tries = self.at, 0

    def rewind(self) -> None:
        """Prepare another try. Bytes that are not written are read again."""
        self.at -= len(self._held)
        self._held = bytearray()

    @property
    def held(self) -> bool:
        """True if bytes have arrived that are not written."""
        return bool(self._held)

    def check(self) -> None:
        """Raise Changed if a whole object does not have the checksum of the listing."""
        listed = self.reading.listed
        if self.checksum is not None and (checksum := self.checksum.hexdigest()) != listed.checksum:
            raise Changed(
                f"{self.reading.url} has the checksum {checksum}, the manifest has {listed.checksum}",
                cause="the object was written after its manifest, or its bytes were changed in transit",
                next_step="compare the object with its source; if the object is right, write the manifest again "
                "(`topkube cache manifest --checksums`)",
            )

    def headers(self, end: int) -> dict[str, str]:
        """Return the headers of the request for bytes `at` to `end`."""
        headers = build_condition(self.reading.listed.version or self.reading.version)
        if not (self.at == 0 and end == self.reading.listed.size):
            headers["Range"] = f"bytes={self.at}-{end - 1}"
        return headers


@dataclass
class _Response:
    status: int
    headers: Mapping[str, str]


class _Connection:
    """A connection to a server. `advance` is called when its socket is ready."""

    def __init__(self, client: SocketClient, address: tuple[Any, ...]) -> None:
        self._client = client
        self.address = address
        self.is_reused = False
        self.keep = True
        family, kind, protocol, _, where = address
        self.socket: Any = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stage = _CONNECTING
        self._wants_write = False
        self._wake = 1
        code = self.socket.connect_ex(where)
        if code not in (0, errno.EINPROGRESS):
            self.socket.close()
            raise OSError(code, os.strerror(code))

    @property
    def is_connected(self) -> bool:
        return self._stage > _CONNECTING

    def begin(self, transfer: Transfer, now: float) -> None:
        """Start the next request of the transfer."""
        client = self._client
        self.transfer, self.end = transfer, transfer.range_end(client.range_bytes)
        self._request = client.request(transfer, self.end)
        self.received_any = False
        self._head = b""
        self.stalls, self.ends = now + client.patience.stall_seconds, now + 2 * client.patience.stall_seconds
        if self._stage > _SHAKING:
            self._stage = _SENDING
            self._send()

    @property
    def events(self) -> int:
        if self._stage in (_CONNECTING, _SENDING) or (self._stage == _SHAKING and self._wants_write):
            return selectors.EVENT_WRITE
        return selectors.EVENT_READ

    def advance(self, write: Write, progress: Callable[[int], None]) -> bool:
        """Continue the request. Return True if its range has arrived."""
        if self._stage == _CONNECTING:
            code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self._client.preferred = self.address
            self._stage = _SENDING
            if self._client.tls is not None:
                self.socket = self._client.tls.wrap_socket(
                    self.socket, server_hostname=self._client.host, do_handshake_on_connect=False
                )
                self._stage = _SHAKING
        if self._stage == _SHAKING:
            self._wants_write = False
            try:
                self.socket.do_handshake()
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLWantWriteError:
                self._wants_write = True
                return False
            self._stage = _SENDING
        if self._stage == _SENDING and not self._send():
            return False
        while True:
            view = self._client.buffer
            if self._stage == _BODY:
                view = view[: min(self._left, len(view))]
            else:
                view = view[: _HEAD_BYTES - len(self._head)]
            try:
                count = self.socket.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError):
                return False
            if not count:
                raise Unfit("the server closed the connection before the end of its response")
            self.stalls = time.monotonic() + self._client.patience.stall_seconds
            self.received_any = True
            if self._receive(view[:count], write, progress):
                return True
            if self._client.tls is None and count < len(view):  # more would have come with the same call
                self._set_wake()
                return False

    def _send(self) -> bool:
        """Send the rest of the request. Return True if all of it has been sent."""
        try:
            while self._request:
                self._request = self._request[self.socket.send(self._request) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        self._stage = _HEAD
        return True

    def _receive(self, data: memoryview, write: Write, progress: Callable[[int], None]) -> bool:
        if self._stage == _HEAD:
            searched = max(0, len(self._head) - 3)
            head = self._head + bytes(data)
            length = head.find(b"\r\n\r\n", searched) + 4
            if length < 4:
                if len(head) >= _HEAD_BYTES:
                    raise Unfit(f"the head of the response has more than {_HEAD_BYTES:,} bytes")
                self._head = head
                return False
            data = data[length - len(self._head) :]
            self._check(parse_head(head[: length - 4]))
            self._stage = _BODY
            if len(data) > self._left:
                raise Unfit("more bytes came than the response has")
            if not data:
                self._set_wake()
                return False
        self._left -= len(data)
        skipped = min(self._skipped, len(data))
        if skipped:
            self._skipped -= skipped
            data = data[skipped:]
        transfer = self.transfer
        data = data[: self.end - transfer.at]
        if data:
            transfer.add(data, self.end, write, progress)
        if transfer.at < self.end:
            return False
        if self._left:  # the rest of a whole object
            self.keep = False
        self._wake_after(1)
        self._stage = _SENDING
        return True

    def _check(self, response: _Response) -> None:
        """Compare the head of the response with the request and the listing. Raises Changed, StoreError, Unfit,
        StatusError, NotPlain."""
        transfer, headers = self.transfer, response.headers
        url = transfer.reading.url
        if response.status >= 400:
            raise StatusError(response.status)
        if response.status in (301, 302, 303, 307, 308):
            raise NotPlain(f"the status {response.status}")
        if response.status in (200, 206):
            check_content(headers, url)
            if "Transfer-Encoding" in headers or "Content-Length" not in headers:
                raise NotPlain("a body without a length")
        self._skipped = check_range(response, transfer.reading, transfer.at, self.end)
        transfer.reading.confirm(headers)
        self._left = int(headers["Content-Length"])
        self.keep = headers.get("Connection", "").lower() != "close"

    def _set_wake(self) -> None:
        self._wake_after(min(self._left, _WAKE_BYTES) if self._stage == _BODY else 1)

    def _wake_after(self, count: int) -> None:
        count = count if count >= _WAKE_BYTES // 8 and self._client.tls is None else 1
        if count != self._wake:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wake = count

    def is_idle(self) -> bool:
        """Return True if the server has neither sent anything nor closed the connection since the last response."""
        try:
            self.socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


class SocketClient:
    """Reads objects of one server in the thread and the process that created it.

    headers: sent with every request. `range_bytes`: the most bytes of a request.
    """

    def __init__(self, uri: str, headers: Mapping[str, str], patience: Patience) -> None:
        self.patience, self.range_bytes = patience, 4 << 20
        parts = urlsplit(uri)
        self._scheme, self.host = parts.scheme, parts.hostname or ""
        self._origin = (parts.scheme, parts.netloc)
        try:
            self._port = parts.port or _PORTS[parts.scheme]
        except ValueError:
            raise NotPlain(f"the address {uri}") from None
        if not _TARGET.fullmatch(parts.netloc) or "@" in parts.netloc or not self.host:
            raise NotPlain(f"the host {parts.netloc!r}")
        self.tls = _tls_context() if parts.scheme == "https" else None
        own = {"Host": parts.netloc, "Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "topkube"}
        given = {name.title(): value for name, value in headers.items()}
        if given.keys() & {"Host", "Range", "Connection", "Content-Length", "Transfer-Encoding"}:
            raise NotPlain("headers that change the request")
        self._headers = "".join(f"{_header(name, value)}\r\n" for name, value in {**own, **given}.items())
        self.buffer = memoryview(bytearray(_PIECE_BYTES))
        self.preferred: tuple[Any, ...] | None = None
        """The address of the last connection that was made."""
        self._idle: list[_Connection] = []

    def request(self, transfer: Transfer, end: int) -> bytes:
        """Return the request for bytes `transfer.at` to `end`."""
        parts = urlsplit(transfer.reading.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if (parts.scheme, parts.netloc) != self._origin or not _TARGET.fullmatch(target):
            raise NotPlain(f"the address {transfer.reading.url}")
        more = "".join(f"{_header(name, value)}\r\n" for name, value in transfer.headers(end).items())
        return f"GET {target} HTTP/1.1\r\n{self._headers}{more}\r\n".encode("utf-8", "surrogateescape")

    def read(
        self, transfers: Iterator[Transfer], connections: int, write: Write, progress: Callable[[int], None]
    ) -> None:
        """Read all transfers over at most this number of connections. `write` gets every byte once, and those of an
        object in order. Raises StoreError, Changed, NotPlain, and the errors of `write`."""
        _Read(self, transfers, connections, write, progress).run()

    def take_connection(self) -> _Connection:
        """Return an idle connection, or begin a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle():
                connection.is_reused = True
                return connection
            connection.close()
        if self.preferred is not None:
            return _Connection(self, self.preferred)
        return self.connect_next(None)

    def connect_next(self, failed: tuple[Any, ...] | None) -> _Connection:
        """Begin a connection to the address after `failed`, or to the first address. Raises OSError if there is no
        other address."""
        self.preferred = None
        addresses: list[tuple[Any, ...]] = list(socket.getaddrinfo(self.host, self._port, type=socket.SOCK_STREAM))
        if failed in addresses:
            addresses = addresses[addresses.index(failed) + 1 :]
        error: OSError = ConnectionError(f"no address of {self.host} can be reached")
        for address in addresses:
            try:
                return _Connection(self, address)
            except OSError as other:
                error = other
        raise error

    def give_back(self, connection: _Connection) -> None:
        if connection.keep:
            self._idle.append(connection)
        else:
            connection.close()


class _Read:
    """The state of one call of SocketClient.read."""

    def __init__(
        self,
        client: SocketClient,
        transfers: Iterator[Transfer],
        connections: int,
        write: Write,
        progress: Callable[[int], None],
    ) -> None:
        self._client, self._transfers, self._connections = client, transfers, connections
        self._write, self._progress = write, progress
        self._selector = selectors.DefaultSelector()
        self._active: dict[_Connection, int] = {}
        """The connections with a request, and the events that are selected for them."""
        self._again: deque[tuple[float, Transfer]] = deque()
        """Transfers that are tried again, and the earliest time of that."""

    def run(self) -> None:
        try:
            while True:
                self._start_transfers()
                if not self._active:
                    if not self._again:
                        return
                    time.sleep(max(0.0, min(when for when, _ in self._again) - time.monotonic()))
                    continue
                now = time.monotonic()
                until = min(min(c.stalls, c.ends) for c in self._active)
                if self._again and len(self._active) < self._connections:
                    until = min(until, *(when for when, _ in self._again))
                for key, _ in self._selector.select(max(0.0, until - now)):
                    self._advance(key.data)
                now = time.monotonic()
                for connection in [c for c in self._active if now >= min(c.stalls, c.ends)]:
                    if now < connection.ends:
                        self._advance(connection)  # a few bytes may have come without waking this thread
                    if connection in self._active and now >= min(connection.stalls, connection.ends):
                        self._fail(connection, TimeoutError("the server is too slow"))
        finally:
            for connection in self._active:
                connection.close()
            self._selector.close()

    def _start_transfers(self) -> None:
        now = time.monotonic()
        while len(self._active) < self._connections:
            ready = next((at for at, (when, _) in enumerate(self._again) if when <= now), None)
            if ready is not None:
                transfer = self._again[ready][1]
                del self._again[ready]
            else:
                following = next(self._transfers, None)
                if following is None:
                    return
                transfer = following
                if transfer.at >= transfer.stop:  # an empty object
                    continue
            try:
                connection = self._client.take_connection()
            except OSError as error:
                self._retry(transfer, error)
                continue
            self._begin(connection, transfer)

    def _begin(self, connection: _Connection, transfer: Transfer) -> None:
        try:
            connection.begin(transfer, time.monotonic())
        except OSError as error:
            connection.close()
            self._retry_unless_stale(connection, transfer, error)
            return
        except BaseException:
            connection.close()
            raise
        self._active[connection] = connection.events
        self._selector.register(connection.socket, connection.events, connection)

    def _advance(self, connection: _Connection) -> None:
        before = connection.socket
        try:
            done = connection.advance(self._guarded_write, self._progress)
        except _WriteError as error:
            raise error.error from None
        except NotPlain:
            raise
        except Exception as error:
            self._fail(connection, error)
            return
        if connection.socket is not before:  # the TLS socket has taken over the descriptor
            self._selector.unregister(before)
            self._selector.register(connection.socket, connection.events, connection)
        if done and self._finish_range(connection):
            return
        if connection.events != self._active[connection]:
            self._active[connection] = connection.events
            self._selector.modify(connection.socket, connection.events, connection)

    def _guarded_write(self, offset: int, data: Any) -> None:
        try:
            self._write(offset, data)
        except Exception as error:  # an error of the writer is not an error of the connection
            raise _WriteError(error) from None

    def _finish_range(self, connection: _Connection) -> bool:
        """Start the next range of the transfer. Return True if the connection has no transfer any more."""
        transfer = connection.transfer
        transfer.finish_range()
        if transfer.at < transfer.stop and connection.keep:
            connection.is_reused = True
            try:
                connection.begin(transfer, time.monotonic())
            except OSError as error:
                self._fail(connection, error)
                return True
            return False
        self._selector.unregister(connection.socket)
        del self._active[connection]
        self._client.give_back(connection)
        if transfer.at < transfer.stop:
            self._again.append((0.0, transfer))
        return True

    def _fail(self, connection: _Connection, error: Exception) -> None:
        self._selector.unregister(connection.socket)
        del self._active[connection]
        connection.close()
        if not connection.is_connected and isinstance(error, OSError):
            with contextlib.suppress(OSError):
                self._begin(self._client.connect_next(connection.address), connection.transfer)
                return
        self._retry_unless_stale(connection, connection.transfer, error)

    def _retry_unless_stale(self, connection: _Connection, transfer: Transfer, error: Exception) -> None:
        """Try again. It is not counted as a try if the server closed a connection that it had kept open before."""
        if connection.is_reused and not connection.received_any and not isinstance(error, TimeoutError):
            self._again.append((0.0, transfer))
            return
        self._retry(transfer, error)

    def _retry(self, transfer: Transfer, error: Exception) -> None:
        patience = self._client.patience
        if transfer.tries == patience.retries or not is_worth_a_retry(error):
            raise final_error(error, transfer.reading.url, transfer.tries) from error
        pause = patience.pause_seconds * 2**transfer.tries * random.uniform(0.5, 1.5)
        transfer.tries += 1
        transfer.rewind()
        self._again.append((time.monotonic() + pause, transfer))


class _WriteError(Exception):
    def __init__(self, error: Exception) -> None:
        self.error = error


@functools.cache
def _tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def parse_head(head: bytes) -> _Response:
    """Return status and headers of the head of a response, without its empty line. Raises Unfit for anything that two
    readers could understand differently: folded lines, a header twice, signs or lists in a length."""
    first, *lines = head.split(b"\r\n")
    match = _STATUS.fullmatch(first)
    if match is None:
        raise Unfit(f"the response begins with {bytes(first[:40])!r}")
    headers: dict[str, str] = {"Connection": "close"} if match[1] == b"0" else {}
    seen = set()
    for line in lines:
        parts = _HEADER.fullmatch(line)
        if parts is None:
            raise Unfit(f"the response has the line {bytes(line[:40])!r} in its head")
        name = _NAMES.get(parts[1].lower())
        if name is None:
            continue
        if name in seen:
            raise Unfit(f"the response has two headers {name}")
        seen.add(name)
        headers[name] = parts[2].decode("utf-8", "surrogateescape")
    if not re.fullmatch(r"[0-9]{1,18}", headers.get("Content-Length", "0")):
        raise Unfit(f"the response has the length {headers['Content-Length'][:40]!r}")
    return _Response(int(match[2]), headers)


def _header(name: str, value: str) -> str:
    if re.search(r"[\r\n\0]", name + value):
        raise DatasetError(
            f"the version {value!r} of an object has a line break",
            cause="a damaged or hostile listing",
            next_step="write the manifest again (`topkube cache manifest`)",
        )
    return f"{name}: {value}"
