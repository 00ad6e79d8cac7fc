"""A server that is read over plain sockets, and one connection to it.

A connection handles plain responses only: status 200 or 206 with Content-Length. For redirects, chunked bodies and
bodies that end with the connection it raises NotPlain. Source: RFC 9112 (HTTP/1.1), RFC 9110, sections 13 and 14
(conditions and ranges).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from topkube.data.remote.http.message import MOST_HEAD_BYTES, Response, format_header, parse_head
from topkube.data.remote.http.reading import Unfit, check_content, check_range
from topkube.data.remote.retry import Patience, StatusError
from topkube.data.remote.transfer import Transfer, Write

_PIECE_BYTES = 256 << 10
"""The bytes that are received and written at once. They are still in the processor's cache when they are written."""
_WAKE_BYTES = 128 << 10
"""The kernel wakes the reader of a large body after this many bytes, so that it is not woken for every packet."""
_PORTS = {"http": 80, "https": 443}
_TARGET = re.compile(r"[!-~]+")
_CONNECTING, _SHAKING_HANDS, _SENDING, _HEAD, _BODY = range(5)
"""The stages of a connection. In the last two, it receives the head and the body of a response."""


class NotPlain(Exception):
    """The server sends a response that only the HTTP library can read."""


class HttpServer:
    """The address of a server, the head of the requests to it, its limits, and the buffer into which its connections
    receive. Raises NotPlain if only the HTTP library can read from this address, or with these headers.

    headers: sent with every request.
    """

    def __init__(self, uri: str, headers: Mapping[str, str], patience: Patience) -> None:
        self.patience = patience
        parts = urlsplit(uri)
        self.host = parts.hostname or ""
        self._origin = (parts.scheme, parts.netloc)
        try:
            self._port = parts.port or _PORTS[parts.scheme]
        except ValueError:
            raise NotPlain(f"the address {uri}") from None
        if not _TARGET.fullmatch(parts.netloc) or "@" in parts.netloc or not self.host:
            raise NotPlain(f"the host {parts.netloc!r}")
        self.tls = _build_tls_context() if parts.scheme == "https" else None
        own_headers = {"Host": parts.netloc, "Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "topkube"}
        more_headers = {name.title(): value for name, value in headers.items()}
        if more_headers.keys() & {"Host", "Range", "Connection", "Content-Length", "Transfer-Encoding"}:
            raise NotPlain("headers that change the request")
        all_headers = {**own_headers, **more_headers}
        self._headers = "".join(f"{format_header(name, value)}\r\n" for name, value in all_headers.items())
        self.buffer = memoryview(bytearray(_PIECE_BYTES))
        self.preferred_address: tuple[Any, ...] | None = None
        """The address of the last connection that was made; None before the first connection."""

    def build_request(self, transfer: Transfer, end: int) -> bytes:
        """Return the request for bytes `transfer.at` to `end`."""
        parts = urlsplit(transfer.reading.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if (parts.scheme, parts.netloc) != self._origin or not _TARGET.fullmatch(target):
            raise NotPlain(f"the address {transfer.reading.url}")
        own_lines = "".join(f"{format_header(name, value)}\r\n" for name, value in transfer.build_headers(end).items())
        return f"GET {target} HTTP/1.1\r\n{self._headers}{own_lines}\r\n".encode("utf-8", "surrogateescape")

    def connect(self) -> Connection:
        """Begin a connection to the address of the last connection, or to the first address that accepts it."""
        return (
            Connection(self, self.preferred_address) if self.preferred_address is not None else self.connect_next(None)
        )

    def connect_next(self, failed: tuple[Any, ...] | None) -> Connection:
        """Begin a connection to the address after `failed`, or to the first address. Raises OSError if there is no
        other address."""
        self.preferred_address = None
        addresses: list[tuple[Any, ...]] = list(socket.getaddrinfo(self.host, self._port, type=socket.SOCK_STREAM))
        if failed in addresses:
            addresses = addresses[addresses.index(failed) + 1 :]
        last_error: OSError = ConnectionError(f"no address of {self.host} can be reached")
        for address in addresses:
            try:
                return Connection(self, address)
            except OSError as error:
                last_error = error
        raise last_error


class Connection:
    """A connection to a server. `advance` is called when its socket is ready."""

    def __init__(self, server: HttpServer, address: tuple[Any, ...]) -> None:
        self._server = server
        self.address = address
        self.is_reused = False
        self.stays_open = True
        """False if the connection cannot be used after the current response."""
        family, kind, protocol, _, socket_address = address
        self.socket: Any = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stage = _CONNECTING
        self._wants_write = False
        self._wake = 1
        code = self.socket.connect_ex(socket_address)
        if code not in (0, errno.EINPROGRESS):
            self.socket.close()
            raise OSError(code, os.strerror(code))

    @property
    def is_connected(self) -> bool:
        return self._stage > _CONNECTING

    @property
    def next_deadline(self) -> float:
        """The time (monotonic) at which this try counts as too slow, unless more bytes arrive before."""
        return min(self.stall_deadline, self.deadline)

    def begin(self, transfer: Transfer, end: int, now: float) -> None:
        """Start the request for bytes `transfer.at` to `end`."""
        self.transfer, self.end = transfer, end
        self._request = self._server.build_request(transfer, end)
        self.has_received = False
        self._head = b""
        self._requested_bytes = end - transfer.at
        self._requested_end = end
        self.stall_deadline = now + self._server.patience.stall_seconds
        self._set_deadline(now)
        if self._stage > _SHAKING_HANDS:
            self._stage = _SENDING
            self._send()

    def _set_deadline(self, now: float) -> None:
        """Begin the time in which as many bytes as were requested must arrive."""
        self.deadline = now + 2 * self._server.patience.stall_seconds
        self._bytes_before_deadline = self._requested_bytes

    @property
    def events(self) -> int:
        """The events of the socket for which this connection waits."""
        if self._stage in (_CONNECTING, _SENDING) or (self._stage == _SHAKING_HANDS and self._wants_write):
            return selectors.EVENT_WRITE
        return selectors.EVENT_READ

    def advance(self, write: Write, progress: Callable[[int], None]) -> bool:
        """Continue the request. Return True if its range has arrived."""
        if self._stage == _CONNECTING:
            code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self._server.preferred_address = self.address
            self._stage = _SENDING
            if self._server.tls is not None:
                self.socket = self._server.tls.wrap_socket(
                    self.socket, server_hostname=self._server.host, do_handshake_on_connect=False
                )
                self._stage = _SHAKING_HANDS
        if self._stage == _SHAKING_HANDS:
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
            view = self._server.buffer
            if self._stage == _BODY:
                view = view[: min(self._body_bytes_left, len(view))]
            else:
                view = view[: MOST_HEAD_BYTES - len(self._head)]
            try:
                count = self.socket.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError):
                return False
            if not count:
                raise Unfit("the server closed the connection before the end of its response")
            self.stall_deadline = time.monotonic() + self._server.patience.stall_seconds
            self.has_received = True
            if self._receive(view[:count], write, progress):
                return True
            if self._server.tls is None and count < len(view):  # the socket has no more bytes now
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
        """Take the next bytes of the response. Return True if the range has arrived."""
        if self._stage == _HEAD:
            searched = max(0, len(self._head) - 3)
            head = self._head + bytes(data)
            length = head.find(b"\r\n\r\n", searched) + 4
            if length < 4:
                if len(head) >= MOST_HEAD_BYTES:
                    raise Unfit(f"the head of the response has more than {MOST_HEAD_BYTES:,} bytes")
                self._head = head
                return False
            data = data[length - len(self._head) :]
            self._check(parse_head(head[: length - 4]))
            self._stage = _BODY
            if len(data) > self._body_bytes_left:
                raise Unfit("the server sent more bytes than its response has")
            if not data:
                self._set_wake()
                return False
        self._body_bytes_left -= len(data)
        self._bytes_before_deadline -= len(data)
        if self._bytes_before_deadline <= 0:  # the server sends more than was requested
            self._set_deadline(time.monotonic())
        skipped = min(self._skipped, len(data))
        if skipped:
            self._skipped -= skipped
            data = data[skipped:]
        transfer = self.transfer
        data = data[: self.end - transfer.at]
        if data:
            transfer.add(data, self.end, write, progress)
        if transfer.at < self.end:
            if transfer.at >= self._requested_end:
                transfer.finish_range()
                self._requested_end = transfer.at + self._requested_bytes
            return False
        if self._body_bytes_left:  # the rest of a whole object
            self.stays_open = False
        self._wake_after(1)
        self._stage = _SENDING
        return True

    def _check(self, response: Response) -> None:
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
        if response.status == 200 and transfer.reading.version:
            self.end = transfer.stop  # this response has the later ranges too, and a read of it can be resumed
        self._body_bytes_left = int(headers["Content-Length"])
        self.stays_open = headers.get("Connection", "").lower() != "close"

    def _set_wake(self) -> None:
        self._wake_after(min(self._body_bytes_left, _WAKE_BYTES) if self._stage == _BODY else 1)

    def _wake_after(self, count: int) -> None:
        """Let the kernel wake this thread when `count` bytes have arrived; after every packet if `count` is small."""
        count = count if count >= _WAKE_BYTES // 8 and self._server.tls is None else 1
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


@functools.cache
def _build_tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
