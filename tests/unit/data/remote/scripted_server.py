"""A server whose answers a test writes, and a store that reads from it."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

from topkube.data.remote.listing import RemoteObject
from topkube.data.remote.object_store import ObjectStore
from topkube.data.remote.retry import Patience

PATIENCE = Patience(retries=2, pause_seconds=0.001, stall_seconds=20.0)


DATA = os.urandom(100_000)


class ScriptedServer:
    """A server whose connections are handled by `handle(connection, number, request)`, a function of the test. Request
    is the head as text, number the count of requests so far."""

    def __init__(
        self,
        handle: Callable[[socket.socket, int, str], bool],
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.requests: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._tls = tls
        self.uri = f"{'https' if tls else 'http'}://{host}:{self._listener.getsockname()[1]}"
        self._handle = handle
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            stack.enter_context(connection)
            if self._tls is not None:
                connection = stack.enter_context(self._tls.wrap_socket(connection, server_side=True))
                self._connections.append(connection)
            while True:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    part = connection.recv(4096)
                    if not part:
                        return
                    head += part
                self.requests.append(head.decode())
                if not self._handle(connection, len(self.requests), head.decode()):
                    return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(20)
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it is closed, or a TLS socket has its descriptor
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)


def parse_range(request: str) -> tuple[int, int]:
    for line in request.split("\r\n"):
        if line.startswith("Range: bytes="):
            first, _, last = line.removeprefix("Range: bytes=").partition("-")
            return int(first), int(last) + 1
    return 0, len(DATA)


def build_head(start: int, stop: int, validator: str) -> bytes:
    status = "200 OK" if (start, stop) == (0, len(DATA)) else "206 Partial Content"
    ranged = "" if status.startswith("200") else f"Content-Range: bytes {start}-{stop - 1}/{len(DATA)}\r\n"
    return f"HTTP/1.1 {status}\r\n{ranged}{validator}Content-Length: {stop - start}\r\n\r\n".encode()


@contextlib.contextmanager
def serve_and_open(
    handle: Callable[[socket.socket, int, str], bool], patience: Patience = PATIENCE, **server_options: Any
) -> Iterator[tuple[ScriptedServer, ObjectStore]]:
    server = ScriptedServer(handle, **server_options)
    store = ObjectStore(server.uri, patience=patience)
    try:
        yield server, store
    finally:
        server.close()


def receive(store: ObjectStore, version: str = "", checksum: str = "") -> bytes:
    """Read the object. Every byte must be written once and in order."""
    whole = bytearray()

    def write(offset: int, data: Any) -> None:
        assert offset == len(whole)
        whole.extend(data)

    store.fetch(RemoteObject("o", len(DATA), version, checksum=checksum), write)
    return bytes(whole)
