"""Local TCP connections carried over a link: from a proxy inside a worker to mpiexec's control port in the launcher.

The worker listens on its loopback interface only while an attempt runs. The launcher connects to mpiexec's port on its
own loopback interface. Neither end takes an address from the other.
"""

from __future__ import annotations

import asyncio
import contextlib

from topkube.launch.connection.link import Link
from topkube.launch.connection.messages import Close, Open
from topkube.launch.connection.tasks import run_task

_CHUNK_BYTES = 64 << 10
_STREAMS = 64
"""Connections that a worker may open per attempt: Hydra's proxy opens one, prted a few."""


class Tunnel:
    """One end of a worker's tunnelled connections, which are called streams. At the launcher's end, `port` is the
    loopback port to which opened streams connect; None at the worker's end."""

    def __init__(self, link: Link, port: int | None = None) -> None:
        self._link, self._port = link, port
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._early: dict[int, list[bytes]] = {}
        """Bytes that have arrived for streams whose connection is not open yet."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._next_stream = 0

    async def listen(self) -> int:
        """Listen on loopback at the worker's end, and return the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream, self._next_stream = self._next_stream, self._next_stream + 1
        if stream >= _STREAMS:
            writer.close()
            return
        self._writers[stream] = writer
        self._link.send(Open(stream=stream))
        with contextlib.suppress(asyncio.CancelledError):  # the task of asyncio itself: nothing waits for it
            await self._pump(stream, reader)

    def open_stream(self, stream: int) -> None:
        """Connect a stream to the control port, at the launcher's end."""
        if self._port is None or stream >= _STREAMS or stream in self._writers or stream in self._early:
            self._link.send(Close(stream=stream))
            return
        self._early[stream] = []
        run_task(self._tasks, self._connect(stream, self._port))

    async def _connect(self, stream: int, port: int) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            self._early.pop(stream, None)
            self._link.send(Close(stream=stream))
            return
        self._writers[stream] = writer
        for data in self._early.pop(stream, []):
            writer.write(data)
        await self._pump(stream, reader)

    async def _pump(self, stream: int, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                self._link.send_bytes(stream, data)
                await self._link.wait_for_room()
        if stream in self._writers:
            self._link.send(Close(stream=stream))
            self.close_stream(stream)

    def write_to_stream(self, stream: int, data: bytes) -> None:
        """Write bytes that have arrived to the connection of `stream`."""
        if stream in self._early:
            self._early[stream].append(data)
        elif stream in self._writers:
            self._writers[stream].write(data)

    def close_stream(self, stream: int) -> None:
        """Close the connection of `stream`."""
        self._early.pop(stream, None)
        if writer := self._writers.pop(stream, None):
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    def end(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
        for stream in [*self._writers]:
            self.close_stream(stream)
        for task in self._tasks:
            task.cancel()
