"""Reads of objects over HTTP/1.1 with plain sockets: bytes go from the socket into one buffer, and from there to the
writer. This needs less processor time than an HTTP library.

A thread reads one object, or many small objects over several connections, with its own selector. If a response is not
plain (`connection.NotPlain`), the caller uses the HTTP library. Every response is compared with the listing before
one of its bytes is used (reading.py). After an error, a read resumes at the byte that it has reached if the
version of the object is known, else at the start of its range.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from topkube.data.remote.http.connection import Connection, HttpServer, NotPlain
from topkube.data.remote.retry import FailedTries, Patience
from topkube.data.remote.transfer import Transfer, Write


class SocketClient:
    """Reads objects of one server in the thread and the process that created it.

    headers: sent with every request. Raises NotPlain as `HttpServer` does.
    """

    def __init__(self, uri: str, headers: Mapping[str, str], patience: Patience) -> None:
        self.server = HttpServer(uri, headers, patience)
        self.range_bytes = 4 << 20
        """The most bytes of a request."""
        self._idle: list[Connection] = []

    def read(
        self, transfers: Iterator[Transfer], connections: int, write: Write, progress: Callable[[int], None]
    ) -> None:
        """Read all transfers over at most `connections` connections. `write` gets every byte once, and the bytes of an
        object in order. Raises StoreError, Changed, NotPlain, and the errors of `write`."""
        _ReadLoop(self, transfers, connections, write, progress).run()

    def take_connection(self) -> Connection:
        """Return an idle connection, or begin a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle():
                connection.is_reused = True
                return connection
            connection.close()
        return self.server.connect()

    def give_back(self, connection: Connection) -> None:
        if connection.stays_open:
            self._idle.append(connection)
        else:
            connection.close()


class _ReadLoop:
    """The loop that one call of SocketClient.read runs, and its state."""

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
        self._active: dict[Connection, int] = {}
        """The connections with a request, and the events of their sockets for which the selector waits."""
        self._retries: deque[tuple[float, Transfer]] = deque()
        """Transfers that are tried again, and the earliest time of the next try."""

    def run(self) -> None:
        try:
            while True:
                self._start_transfers()
                if not self._active:
                    if not self._retries:
                        return
                    time.sleep(max(0.0, min(earliest for earliest, _ in self._retries) - time.monotonic()))
                    continue
                now = time.monotonic()
                until = min(connection.next_deadline for connection in self._active)
                if self._retries and len(self._active) < self._connections:
                    until = min(until, *(earliest for earliest, _ in self._retries))
                for key, _ in self._selector.select(max(0.0, until - now)):
                    self._advance_connection(key.data)
                now = time.monotonic()
                for connection in [connection for connection in self._active if now >= connection.next_deadline]:
                    if now < connection.deadline:
                        self._advance_connection(connection)  # a few bytes may have arrived without waking this thread
                    if connection in self._active and now >= connection.next_deadline:
                        self._fail_connection(connection, TimeoutError("the server is too slow"))
        finally:
            for connection in self._active:
                connection.close()
            self._selector.close()

    def _start_transfers(self) -> None:
        now = time.monotonic()
        while len(self._active) < self._connections:
            ready = next((position for position, (earliest, _) in enumerate(self._retries) if earliest <= now), None)
            if ready is not None:
                transfer = self._retries[ready][1]
                del self._retries[ready]
            else:
                next_transfer = next(self._transfers, None)
                if next_transfer is None:
                    return
                transfer = next_transfer
                if transfer.at >= transfer.stop:  # an empty object
                    continue
            try:
                connection = self._client.take_connection()
            except OSError as error:
                self._count_and_retry(transfer, error)
                continue
            self._begin_transfer(connection, transfer)

    def _begin_transfer(self, connection: Connection, transfer: Transfer) -> None:
        try:
            connection.begin(transfer, transfer.choose_range_end(self._client.range_bytes), time.monotonic())
        except OSError as error:
            connection.close()
            self._retry_transfer(connection, transfer, error)
            return
        except BaseException:
            connection.close()
            raise
        self._active[connection] = connection.events
        self._selector.register(connection.socket, connection.events, connection)

    def _advance_connection(self, connection: Connection) -> None:
        old_socket = connection.socket
        try:
            has_range = connection.advance(self._wrap_write_errors, self._progress)
        except _WriteError as error:
            raise error.error from None
        except NotPlain:
            raise
        except Exception as error:
            self._fail_connection(connection, error)
            return
        if connection.socket is not old_socket:  # the TLS socket has taken over the descriptor
            self._selector.unregister(old_socket)
            self._selector.register(connection.socket, connection.events, connection)
        if has_range and self._finish_range(connection):
            return
        if connection.events != self._active[connection]:
            self._active[connection] = connection.events
            self._selector.modify(connection.socket, connection.events, connection)

    def _wrap_write_errors(self, offset: int, data: Any) -> None:
        """Write the bytes. Raises _WriteError for an error of the writer."""
        try:
            self._write(offset, data)
        except Exception as error:
            raise _WriteError(error) from None

    def _finish_range(self, connection: Connection) -> bool:
        """Start the next range of the transfer. Return True if the connection has no transfer after this call."""
        transfer = connection.transfer
        transfer.finish_range()
        if transfer.at < transfer.stop and connection.stays_open:
            connection.is_reused = True
            try:
                connection.begin(transfer, transfer.choose_range_end(self._client.range_bytes), time.monotonic())
            except OSError as error:
                self._fail_connection(connection, error)
                return True
            return False
        self._selector.unregister(connection.socket)
        del self._active[connection]
        self._client.give_back(connection)
        if transfer.at < transfer.stop:
            self._retries.append((0.0, transfer))
        return True

    def _fail_connection(self, connection: Connection, error: Exception) -> None:
        self._selector.unregister(connection.socket)
        del self._active[connection]
        connection.close()
        if not connection.is_connected and isinstance(error, OSError):
            with contextlib.suppress(OSError):
                self._begin_transfer(self._client.server.connect_next(connection.address), connection.transfer)
                return
        self._retry_transfer(connection, connection.transfer, error)

    def _retry_transfer(self, connection: Connection, transfer: Transfer, error: Exception) -> None:
        """Schedule another try of the transfer. If the server closed a reused connection before it sent a byte, the
        failed try is not counted."""
        if connection.is_reused and not connection.has_received and not isinstance(error, TimeoutError):
            self._retries.append((0.0, transfer))
            return
        self._count_and_retry(transfer, error)

    def _count_and_retry(self, transfer: Transfer, error: Exception) -> None:
        """Count a failed try, and schedule the next try after a pause. Raises the final error if no try is left, or if
        a retry cannot help."""
        if transfer.failed is None:
            transfer.failed = FailedTries(self._client.server.patience)
        pause = transfer.failed.add(error, transfer.reading.url)
        transfer.rewind()
        self._retries.append((time.monotonic() + pause, transfer))


class _WriteError(Exception):
    def __init__(self, error: Exception) -> None:
        self.error = error
