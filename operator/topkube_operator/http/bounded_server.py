"""An HTTP server that anybody in the cluster may call, with bounds on connections, time and bytes.

A connection costs a file descriptor and a few kilobytes, but no thread. It has a few seconds for its TLS handshake and
its first request, and may be idle for some time between two requests. If too many connections are open, the connection
that has waited longest is closed, preferably one from the same address as the new connection. So callers that only
hold connections open cannot block callers that send requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

_log = logging.getLogger(__name__)
_protocol_log = logging.getLogger(f"{__name__}.protocol")
_protocol_log.setLevel(logging.CRITICAL)
"""aiohttp logs a traceback for each malformed request. Any caller could fill the node's disk with them."""
_CHECK_SECONDS = 0.25
_LINGER_SECONDS = 2.0
"""Time to read what a refused client still sends. Otherwise the client would not read the answer."""
_MAX_HEADERS = 64

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Bounds:
    """The limits of a server: connections, and seconds."""

    connections: int = 512
    """The most connections at a time."""
    connections_per_client: int = 256
    """The most connections from one address. An API server opens one connection for each concurrent review."""
    head_seconds: float = 10.0
    """The longest time from the beginning of a connection to the end of its first request's head."""
    idle_seconds: float = 60.0
    """The longest time from the end of an answer to the end of the next request's head."""
    body_seconds: float = 5.0
    """The longest time for a request's body."""
    work_seconds: float = 30.0
    """The longest time for a whole request, including its body."""


@dataclass(eq=False)
class _Connection:
    host: str
    socket: socket.socket
    handler: web.RequestHandler
    deadline: float
    """When the connection is closed if it still waits for a request."""
    is_working: bool = False
    handshake: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_closed(self) -> bool:
        return self.handler.transport is None and (self.handshake is None or self.handshake.done())

    def close(self) -> None:
        if self.handshake is not None and not self.handshake.done():
            self.handshake.cancel()
        if self.handler.transport is not None:
            self.handler.transport.abort()


class BoundedServer:
    """Serves `answer` on a listening socket (see `listen`) from `open` to `close`, in one event loop."""

    def __init__(
        self, listener: socket.socket, answer: Answer, tls: ssl.SSLContext | None = None, bounds: Bounds | None = None
    ) -> None:
        self._listener, self._answer, self._tls, self._bounds = listener, answer, tls, bounds or Bounds()
        self._connections: dict[web.RequestHandler, _Connection] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._web: web.Server | None = None

    async def open(self) -> None:
        self._web = web.Server(
            self._handle,
            access_log=None,
            logger=_protocol_log,
            keepalive_timeout=self._bounds.idle_seconds,
            lingering_time=_LINGER_SECONDS,
            max_headers=_MAX_HEADERS,
            auto_decompress=False,  # a small body may decompress to a large body
        )
        self._tasks = [asyncio.create_task(self._accept()), asyncio.create_task(self._close_overdue())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()
        if self._web is not None:
            await self._web.shutdown(1.0)
        for connection in list(self._connections.values()):
            connection.close()
        self._connections.clear()

    def __len__(self) -> int:
        """Return the number of open connections."""
        self._forget_closed()
        return len(self._connections)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._listener)
            except OSError:  # no file descriptors are left for now
                await asyncio.sleep(_CHECK_SECONDS)
                continue
            host = str(address[0])
            if not self._make_room(host):
                accepted.close()
                continue
            assert self._web is not None
            handler = self._web()
            connection = _Connection(host, accepted, handler, time.monotonic() + self._bounds.head_seconds)
            self._connections[handler] = connection
            connection.handshake = asyncio.create_task(self._connect(connection))
            connection.handshake.add_done_callback(functools.partial(_close_unless_connected, connection))

    def _make_room(self, host: str) -> bool:
        """Return False if all connections are at work, so that none can be closed for a new one from this address."""
        connections = list(self._connections.values())
        from_host = [connection for connection in connections if connection.host == host]
        candidates = from_host if len(from_host) >= self._bounds.connections_per_client else connections
        if candidates is connections and len(connections) < self._bounds.connections:
            return True
        waiting = [connection for connection in candidates if not connection.is_working]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda connection: connection.deadline)
        oldest.close()
        self._connections.pop(oldest.handler, None)
        return True

    async def _connect(self, connection: _Connection) -> None:
        timeout = self._bounds.head_seconds if self._tls is not None else None
        with contextlib.suppress(OSError):  # includes TLS errors
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection.handler, connection.socket, ssl=self._tls, ssl_handshake_timeout=timeout
            )

    async def _close_overdue(self) -> None:
        """Close connections whose deadline has passed."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            self._forget_closed()
            now = time.monotonic()
            for connection in list(self._connections.values()):
                if not connection.is_working and now > connection.deadline:
                    connection.close()

    def _forget_closed(self) -> None:
        for handler in [handler for handler, connection in self._connections.items() if connection.is_closed]:
            del self._connections[handler]

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = self._connections.get(request.protocol)
        if connection is not None:
            connection.is_working = True
        try:
            async with asyncio.timeout(self._bounds.work_seconds):
                return await self._answer(request)
        except TimeoutError:
            return refuse(503, "this took too long")
        except web.HTTPException as answer:
            return answer
        except Exception:
            _log.exception("a request for %s could not be answered", request.path[:100])
            return refuse(500, "this could not be answered")
        finally:
            if connection is not None:
                connection.is_working, connection.deadline = False, time.monotonic() + self._bounds.idle_seconds


def _close_unless_connected(connection: _Connection, _: asyncio.Task[None]) -> None:
    if connection.handler.transport is None:
        connection.socket.close()


async def read_body(request: web.BaseRequest, largest: int, seconds: float) -> bytes | web.Response:
    """Return the body of a request, or the answer that refuses it: no length, too long, or too slow."""
    if request.content_length is None:
        return refuse(411, "a Content-Length is required")
    if request.content_length > largest:
        return refuse(413, f"the body has more than {largest:,} bytes")
    try:
        async with asyncio.timeout(seconds):
            return await request.content.read()
    except TimeoutError:
        return refuse(408, f"the body did not arrive within {seconds:g} s")


def refuse(status: int, text: str) -> web.Response:
    """Return an answer after which the connection is closed."""
    response = web.Response(status=status, text=text + "\n")
    response.force_close()
    return response


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket on `host`, or on all addresses of both families if it is empty. Raises OSError."""
    listener: socket.socket | None = None
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is disabled
            listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=256, dualstack_ipv6=True)
    if listener is None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=256)
    listener.setblocking(False)
    return listener
