"""A worker's session with its launcher: the call, the launcher's welcome, and the link and tunnel that follow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp

from topkube.launch.connection.calls import build_rejection_error
from topkube.launch.connection.credentials import WorkerCredentials
from topkube.launch.connection.link import FRAME_BYTES, Link
from topkube.launch.connection.messages import AnyMessage, Close, Hello, Welcome, parse_message
from topkube.launch.connection.tunnel import Tunnel
from topkube.launch.contract import JOIN_PATH, Message, WorkerPlan

_CLOSE = aiohttp.ClientWSTimeout(ws_close=1.0)


class Session:
    """The session of one worker. `link`, `tunnel` and `welcome` are None between two sessions."""

    def __init__(
        self, plan: WorkerPlan, credentials: WorkerCredentials, on_message: Callable[[AnyMessage], None]
    ) -> None:
        self.link: Link | None = None
        self.tunnel: Tunnel | None = None
        self.welcome: Welcome | None = None
        self._plan, self._credentials, self._on_message = plan, credentials, on_message

    def create_client(self, own_address: str | None) -> aiohttp.ClientSession:
        """Return a client for calls, from `own_address` if it is set."""
        source = (own_address, 0) if own_address is not None else None
        connector = aiohttp.TCPConnector(ssl=self._credentials.tls, limit=0, force_close=True, local_addr=source)
        timeout = aiohttp.ClientTimeout(total=None)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)

    async def call(
        self, client: aiohttp.ClientSession, hello: Callable[[], Hello], seconds: float
    ) -> tuple[aiohttp.ClientWebSocketResponse, Welcome]:
        """Call the launcher. Return the connection and the welcome. Raises TimeoutError if that takes longer than
        `seconds`, and LaunchError if the launcher rejects this worker."""
        headers = {"Authorization": f"Bearer {self._credentials.token}"}
        query = {"index": str(self._plan.index), "attempt": str(self._plan.attempt)}
        url = f"https://{self._plan.launcher}{JOIN_PATH}"
        async with asyncio.timeout(seconds):
            socket = await client.ws_connect(
                url, headers=headers, params=query, max_msg_size=FRAME_BYTES, autoping=True, timeout=_CLOSE
            )
            await socket.send_str(hello().to_json())
            incoming = await socket.receive()
        answer = parse_message(incoming.data) if incoming.type == aiohttp.WSMsgType.TEXT else None
        if isinstance(answer, Welcome):
            return socket, answer
        await socket.close()
        reason = incoming.extra if incoming.type == aiohttp.WSMsgType.CLOSE else ""
        raise build_rejection_error(self._plan, str(reason or ""))

    def begin(self, welcome: Welcome) -> None:
        """Begin a new session."""
        self.welcome = welcome
        self.link = Link(self._receive, self._receive_bytes)
        self.tunnel = Tunnel(self.link)

    def end(self) -> None:
        """End the session: what the launcher has not confirmed is dropped."""
        if self.tunnel is not None:
            self.tunnel.end()
        self.link = self.tunnel = self.welcome = None

    def send(self, message: Message) -> None:
        """Send a message, if there is a session."""
        if self.link is not None:
            self.link.send(message)

    @property
    def is_connected(self) -> bool:
        return self.link is not None and self.link.is_connected

    @property
    def is_broken(self) -> bool:
        """True if there is a session whose connection is gone."""
        return self.link is not None and not self.link.is_connected

    @property
    def lost_seconds(self) -> float:
        """The seconds for which the launcher has been silent, if it counts as lost; else 0."""
        if self.link is None or self.welcome is None:
            return 0.0
        silent = time.monotonic() - self.link.last_heard
        return silent if silent > self.welcome.lost_seconds else 0.0

    async def drop_connection(self) -> None:
        """Close the connection, if there is one. The session continues with the next call."""
        if self.link is not None:
            await self.link.drop()

    def _receive(self, message: AnyMessage) -> None:
        if isinstance(message, Close):
            if self.tunnel is not None:
                self.tunnel.close_stream(message.stream)
        else:
            self._on_message(message)

    def _receive_bytes(self, stream: int, data: bytes) -> None:
        if self.tunnel is not None:
            self.tunnel.write_to_stream(stream, data)
