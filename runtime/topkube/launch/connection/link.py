"""The link between launcher and worker, which survives broken connections.

Messages and the bytes of tunnelled connections are frames in one order. Each end counts the frames that it has received
and keeps the frames that the other end has not confirmed. On the next connection both ends send their counts, and the
missing frames are sent again. Nothing is lost or duplicated, and a proxy inside the worker does not notice the
interruption.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from aiohttp import ClientWebSocketResponse, WSMsgType, web

from topkube.errors import LaunchError
from topkube.launch.connection.messages import AnyMessage, parse_message
from topkube.launch.contract import Message

Socket = ClientWebSocketResponse | web.WebSocketResponse
HEARTBEAT_SECONDS = 1.0
FRAME_BYTES = 1 << 20
"""The longest frame that an end accepts."""
_ROOM_BYTES = 1 << 20
"""The most unconfirmed bytes of a link. With more, its tunnel waits. The launcher may have thousands of links."""
_CONFIRM_FRAMES = 32
_CONFIRM_BYTES = 256 << 10
"""After this many frames or bytes of a tunnel, an end confirms what it has received."""


class Link:
    """One end of the link. `on_message` and `on_bytes` are called in order, once for each frame."""

    def __init__(self, on_message: Callable[[AnyMessage], None], on_bytes: Callable[[int, bytes], None]) -> None:
        self._on_message, self._on_bytes = on_message, on_bytes
        self._unconfirmed: deque[str | bytes] = deque()
        self._confirmed = 0  # frames that the other end has received; the first frame in _unconfirmed has this number
        self._unconfirmed_bytes = 0
        self.received = 0
        self.last_heard = time.monotonic()
        """When the last frame or confirmation arrived (monotonic)."""
        self.is_connected = False
        self._wake = asyncio.Event()
        """Set when there is something to send."""
        self._room = asyncio.Event()
        """Set while at most `_ROOM_BYTES` are unconfirmed."""
        self._room.set()
        self._socket: Socket | None = None

    def send(self, message: Message) -> None:
        """Send a message as soon as there is a connection, without waiting."""
        self._keep(message.to_json())

    def send_bytes(self, stream: int, data: bytes) -> None:
        """Send bytes of the tunnelled connection `stream`, like a message."""
        self._keep(stream.to_bytes(2, "big") + data)

    def _keep(self, frame: str | bytes) -> None:
        self._unconfirmed.append(frame)
        self._unconfirmed_bytes += len(frame)
        if self._unconfirmed_bytes > _ROOM_BYTES:
            self._room.clear()
        self._wake.set()

    async def wait_for_room(self) -> None:
        """Wait until at most `_ROOM_BYTES` are unconfirmed."""
        await self._room.wait()

    async def wait_for_delivery(self, seconds: float) -> bool:
        """Wait until the other end has confirmed everything, for up to `seconds` or until the connection breaks. Return
        True if everything is confirmed."""
        end = time.monotonic() + seconds
        while self._unconfirmed and self.is_connected and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return not self._unconfirmed

    async def run(self, socket: Socket, received: int) -> None:
        """Use `socket` until it breaks. The other end has received `received` frames. An earlier connection is closed.

        Raises LaunchError if the other end violates the protocol.
        """
        if self._socket is not None:
            await self._socket.close()
        self._confirm(received)
        self._socket, self.is_connected, self.last_heard = socket, True, time.monotonic()
        sender = asyncio.create_task(self._send(socket))
        try:
            await self._receive(socket)
        finally:
            sender.cancel()
            try:
                # not `await sender`: suppressing its cancellation would also suppress that of this task
                await asyncio.gather(sender, return_exceptions=True)
            finally:
                if self._socket is socket:
                    self._socket, self.is_connected = None, False

    async def drop(self) -> None:
        """Close the connection, if there is one."""
        if self._socket is not None:
            await self._socket.close()

    def _confirm(self, received: int) -> None:
        if not self._confirmed <= received <= self._confirmed + len(self._unconfirmed):
            raise LaunchError(f"the other end confirms {received} frames of {self._confirmed + len(self._unconfirmed)}")
        while self._confirmed < received:
            self._unconfirmed_bytes -= len(self._unconfirmed.popleft())
            self._confirmed += 1
        if self._unconfirmed_bytes <= _ROOM_BYTES:
            self._room.set()

    async def _send(self, socket: Socket) -> None:
        next_number = self._confirmed  # of the next frame on this connection
        confirmed, confirmed_at = -1, 0.0
        while not socket.closed:
            self._wake.clear()
            if self.received != confirmed or time.monotonic() - confirmed_at > HEARTBEAT_SECONDS:
                confirmed, confirmed_at = self.received, time.monotonic()
                await socket.send_str(f'{{"has":{confirmed}}}')
            while (position := next_number - self._confirmed) < len(self._unconfirmed):
                frame = self._unconfirmed[position]
                next_number += 1
                if isinstance(frame, str):
                    await socket.send_str(frame)
                else:
                    await socket.send_bytes(frame)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), HEARTBEAT_SECONDS)

    async def _receive(self, socket: Socket) -> None:
        frames_to_confirm = bytes_to_confirm = 0
        async for incoming in socket:
            self.last_heard = time.monotonic()
            if incoming.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                return
            data: Any = incoming.data
            if incoming.type == WSMsgType.TEXT and data.startswith('{"has":'):
                self._confirm(_parse_number(data))
                continue
            self.received += 1
            frames_to_confirm, bytes_to_confirm = frames_to_confirm + 1, bytes_to_confirm + len(data)
            if frames_to_confirm >= _CONFIRM_FRAMES or bytes_to_confirm >= _CONFIRM_BYTES:
                frames_to_confirm = bytes_to_confirm = 0
                self._wake.set()
            if incoming.type == WSMsgType.TEXT:
                self._wake.set()  # messages are few, so each is confirmed at once
                self._on_message(parse_message(data))
            elif len(data) < 2:
                raise LaunchError("the other end sent a frame without a stream")
            else:
                self._on_bytes(int.from_bytes(data[:2], "big"), data[2:])


def _parse_number(text: str) -> int:
    try:
        return int(json.loads(text)["has"])
    except (ValueError, TypeError, KeyError):
        raise LaunchError(f"the other end sent an invalid confirmation: {text[:40]}") from None
