"""A session that survives broken connections: every frame arrives once and in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from topkube.errors import LaunchError
from topkube.launch.connection import link
from topkube.launch.connection.link import FRAME_BYTES, Link
from topkube.launch.connection.messages import AnyMessage, Open
from topkube.launch.connection.tunnel import Tunnel


class ConnectedLinks:
    """Two links over real WebSockets. `connect` connects them, and returns a function that breaks the connection."""

    def __init__(self, near: Link, far: Link) -> None:
        self.near, self.far = near, far
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> ConnectedLinks:
        server = web.Server(self._serve)
        self._listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        self._port = self._listening.sockets[0].getsockname()[1]
        self._client = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()
        self._listening.close()

    async def _serve(self, request: web.BaseRequest) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=FRAME_BYTES)
        await socket.prepare(request)
        received_by_peer = int(await socket.receive_str())
        await socket.send_str(str(self.far.received))
        await self.far.run(socket, received_by_peer)
        return socket

    async def connect(self) -> Callable[[], Awaitable[None]]:
        socket = await self._client.ws_connect(f"http://127.0.0.1:{self._port}/", max_msg_size=FRAME_BYTES)
        await socket.send_str(str(self.near.received))
        received_by_peer = int(await socket.receive_str())
        task = asyncio.create_task(self.near.run(socket, received_by_peer))
        self._tasks.append(task)
        while not (self.near.is_connected and self.far.is_connected):
            await asyncio.sleep(0.001)

        async def break_connection() -> None:
            transport = socket._response.connection.transport if socket._response.connection else None
            if transport is not None:
                transport.abort()  # sends no closing frame, and flushes nothing
            await asyncio.wait([task], timeout=5)
            while self.far.is_connected:
                await asyncio.sleep(0.001)

        return break_connection


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_broken_connections_lose_and_double_nothing(seed: int, breaks: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(link, "HEARTBEAT_SECONDS", 0.05)
        asyncio.run(_exchange(random.Random(seed), breaks))


async def _exchange(chance: random.Random, breaks: int) -> None:
    received: dict[str, list[tuple[int, bytes]]] = {"near": [], "far": []}
    near, far = (
        Link(
            lambda message, name=name: received[name].append((message.stream, b"")),
            lambda stream, data, name=name: received[name].append((stream, data)),
        )
        for name in ("near", "far")
    )
    sent: dict[str, list[tuple[int, bytes]]] = {"near": [], "far": []}
    number = 0
    async with ConnectedLinks(near, far) as links:
        for turn in range(breaks + 1):
            break_connection = await links.connect()
            for _ in range(chance.randint(0, 60)):
                number += 1
                name, end = chance.choice((("near", near), ("far", far)))
                if chance.random() < 0.3:
                    end.send(Open(stream=number))
                    sent[name].append((number, b""))
                else:
                    data = bytes([number % 256]) * chance.choice((1, 100, 70_000))
                    end.send_bytes(number, data)
                    sent[name].append((number, data))
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.random() * 0.003)
            if turn < breaks:
                await break_connection()
        assert await near.wait_for_delivery(60)
        assert await far.wait_for_delivery(60)
    assert received["far"] == sent["near"]
    assert received["near"] == sent["far"]


def test_an_end_that_confirms_frames_that_were_never_sent_is_refused() -> None:
    end = Link(lambda _: None, lambda *_: None)
    end.send(Open(stream=1))
    with pytest.raises(LaunchError, match="confirms 5 frames of 1"):
        end._confirm(5)


def test_a_tunnel_carries_bytes_both_ways_and_survives_a_break() -> None:
    asyncio.run(_send_through_tunnel())


async def _send_through_tunnel() -> None:
    async def answer_doubled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100_000):
            writer.write(data + data)
        writer.close()

    service = await asyncio.start_server(answer_doubled, "127.0.0.1", 0)
    ends: dict[str, Tunnel] = {}

    def build_reader(name: str) -> Callable[[AnyMessage], None]:
        def read(message: AnyMessage) -> None:
            if message.kind == "open":
                ends[name].open_stream(message.stream)
            elif message.kind == "close":
                ends[name].close_stream(message.stream)

        return read

    worker = Link(build_reader("worker"), lambda stream, data: ends["worker"].write_to_stream(stream, data))
    launcher = Link(build_reader("launcher"), lambda stream, data: ends["launcher"].write_to_stream(stream, data))
    ends["worker"] = Tunnel(worker)
    ends["launcher"] = Tunnel(launcher, service.sockets[0].getsockname()[1])
    async with ConnectedLinks(worker, launcher) as links:
        break_connection = await links.connect()
        port = await ends["worker"].listen()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        payload = random.Random(0).randbytes(3 << 20)
        writer.write(payload[: 1 << 20])
        assert len(await reader.readexactly(2 << 20)) == 2 << 20
        await break_connection()
        writer.write(payload[1 << 20 :])
        await asyncio.sleep(0.01)
        await links.connect()
        rest = 0
        while rest < 4 << 20:
            rest += len(await reader.read(1 << 20))
        assert rest == 4 << 20
        writer.close()
        for end in ends.values():
            end.end()
    service.close()


def test_the_launcher_opens_no_other_port() -> None:
    async def open_and_be_refused() -> None:
        messages: list[Any] = []
        end = Link(lambda _: None, lambda *_: None)
        end.send = messages.append  # type: ignore[method-assign]
        Tunnel(end).open_stream(3)  # the end of a worker has no port to open
        launcher = Tunnel(end, 1)  # nothing listens there
        launcher.open_stream(4)
        launcher.open_stream(4)  # twice
        launcher.open_stream(64)  # more than one worker may have
        async with asyncio.timeout(20):
            while len(messages) < 4:
                await asyncio.sleep(0.001)
        assert sorted((message.kind, message.stream) for message in messages) == [
            ("close", 3),
            ("close", 4),
            ("close", 4),
            ("close", 64),
        ]

    asyncio.run(open_and_be_refused())
