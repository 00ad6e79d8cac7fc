"""The launcher's door: TLS, who may come in, and limits for those who may not.

Nothing is read from a stranger beyond a request's head; a head has ten seconds to arrive, and the number of connections
that have not shown a token is bounded.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable

from aiohttp import web

from topkube.errors import LaunchError
from topkube.launch.contract import JOIN_PATH, STATUS_PATH, LauncherStatus, LaunchPlan, worker_token
from topkube.launch.credentials import LauncherCredentials
from topkube.launch.link import FRAME_BYTES
from topkube.launch.messages import Hello, read

HEAD_SECONDS = 10.0
"""For the TLS handshake, and again for the request's head and the worker's first words."""
STRANGERS = 512
"""Connections without a valid token at any one time."""
_HELLO_BYTES = 32 << 10

Joined = Callable[[int, Hello, web.WebSocketResponse], Awaitable[None]]


class Rendezvous:
    """Serves `JOIN_PATH` and `STATUS_PATH`. `joined` owns a worker's connection until it returns."""

    def __init__(
        self,
        plan: LaunchPlan,
        credentials: LauncherCredentials,
        own_address: str,
        joined: Joined,
        status: Callable[[], LauncherStatus],
    ) -> None:
        self._plan, self._credentials, self._own = plan, credentials, own_address
        self._joined, self._status = joined, status
        self._tokens = {
            worker.index: worker_token(credentials.token_key, plan.uid, worker.index, worker.attempt)
            for worker in plan.workers
        }
        self._web: web.Server | None = None
        self._server: asyncio.Server | None = None
        self._strangers: set[web.RequestHandler] = set()

    async def start(self) -> int:
        """Listens; returns the port. Raises LaunchError where it is taken."""
        self._web = web.Server(self._handle, keepalive_timeout=HEAD_SECONDS, lingering_time=0, max_headers=32)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._accept,
                self._plan.address or None,
                self._plan.port,
                ssl=self._credentials.tls,
                ssl_handshake_timeout=HEAD_SECONDS,
                backlog=1024,
            )
        except OSError as error:
            raise LaunchError(
                f"port {self._plan.port} cannot be listened on: {error.strerror}",
                cause="another process of this pod uses it",
                next_step="change that process's port",
            ) from None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._web is not None:
            await self._web.shutdown(1.0)

    def _accept(self) -> asyncio.BaseProtocol:
        assert self._web is not None
        if len(self._strangers) >= STRANGERS:
            return _Refusal()
        protocol = self._web()
        self._strangers.add(protocol)
        asyncio.get_running_loop().call_later(2 * HEAD_SECONDS, self._too_slow, protocol)
        return protocol

    def _too_slow(self, protocol: web.RequestHandler) -> None:
        """A stranger has had time enough to say who it is."""
        if protocol in self._strangers:
            self._strangers.discard(protocol)
            if protocol.transport is not None:
                protocol.transport.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._strangers.discard(request.protocol)  # from here on it is answered, and closed if it may not come in
        if request.path == STATUS_PATH:
            return self._answer_status(request)
        if request.path == JOIN_PATH:
            return await self._answer_join(request)
        return _refuse(404, "there is nothing here")

    def _answer_status(self, request: web.BaseRequest) -> web.StreamResponse:
        if not _same(_bearer(request), self._credentials.operator_token):
            return _refuse(401, "this is for the operator's token")
        if request.method != "GET":
            return _refuse(405, "GET")
        return web.Response(text=self._status().text(), content_type="application/json")

    async def _answer_join(self, request: web.BaseRequest) -> web.StreamResponse:
        index, attempt = request.query.get("index", ""), request.query.get("attempt", "")
        expected = {str(worker.index): worker for worker in self._plan.workers}.get(index)
        token = self._tokens[expected.index] if expected is not None else self._credentials.operator_token[::-1]
        if not _same(_bearer(request), token) or expected is None:
            if expected is not None and attempt.isdigit() and int(attempt) != expected.attempt:
                made = f"made in attempt {expected.attempt}, not {attempt}"
                return _refuse(401, f"this run has another worker {index}, {made}")
            return _refuse(401, "the token is not that of an expected worker")
        if request.method != "GET":
            return _refuse(405, "GET")
        socket = web.WebSocketResponse(max_msg_size=FRAME_BYTES, compress=False, timeout=1.0)
        if not socket.can_prepare(request):
            return _refuse(426, "a WebSocket is wanted")
        await socket.prepare(request)
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                text = await socket.receive_str()
            hello = read(text) if len(text) <= _HELLO_BYTES else None
        except (TimeoutError, TypeError, LaunchError):
            hello = None
        if not isinstance(hello, Hello):
            await socket.close(code=1002)
            return socket
        problem = self._address_problem(request.remote, hello.ip)
        if problem:
            await socket.close(code=1008, message=problem.encode()[:120])
            return socket
        await self._joined(expected.index, hello, socket)
        return socket

    def _address_problem(self, peer: str | None, claimed: str) -> str:
        """Why a worker that calls from `peer` may not claim the pod address `claimed`; empty where it may."""
        try:
            caller, claim = ipaddress.ip_address(peer or ""), ipaddress.ip_address(claimed)
        except ValueError:
            return f"{claimed[:40]!r} is not an address"
        if isinstance(caller, ipaddress.IPv6Address) and caller.ipv4_mapped is not None:
            caller = caller.ipv4_mapped
        if not self._plan.check_address or caller == claim:
            return ""
        if caller.is_loopback and claimed == self._own:  # the launcher sits inside this worker's pod
            return ""
        return f"the call comes from {caller}, not from the pod's address {claimed}"


class _Refusal(asyncio.Protocol):
    """Too many strangers: closed as soon as it is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _bearer(request: web.BaseRequest) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


def _refuse(status: int, reason: str) -> web.Response:
    response = web.Response(status=status, text=reason + "\n", headers={"X-Topkube-Reason": reason})
    response.force_close()
    return response
