"""The launcher's door: TLS, who may come in, and limits for those who may not.

Nothing is read from a stranger beyond a request's head; a head has ten seconds to arrive, and the number of connections
that have not shown a token is bounded: in all, and for one address, so that one thief cannot keep everybody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import resource
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine

from aiohttp import web

from topkube.errors import LaunchError
from topkube.launch.contract import JOIN_PATH, STATUS_PATH, LauncherStatus, LaunchPlan, worker_token
from topkube.launch.credentials import LauncherCredentials
from topkube.launch.link import FRAME_BYTES
from topkube.launch.messages import Hello, read

HEAD_SECONDS = 10.0
"""For the TLS handshake, and again for the request's head and the worker's first words."""
STRANGERS, STRANGERS_OF_ONE = 1024, 512
"""Connections without a valid token at any one time, and of these from one address."""
_FILES = 4096
"""Descriptors that the launcher wants: for strangers, and a few for each worker."""
_LOOK_SECONDS = 0.25
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
        self._listener: socket.socket | None = None
        self._strangers: Counter[str] = Counter()
        """By address."""
        self._greeted: dict[web.RequestHandler, str] = {}
        """The address of each whose request has not come yet."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listens; returns the port. Raises LaunchError where it is taken."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < _FILES:  # not more than needed: MPI's programs close every descriptor that there may be
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(_FILES, hard), hard))
        self._web = web.Server(self._handle, keepalive_timeout=HEAD_SECONDS, lingering_time=0, max_headers=32)
        try:
            self._listener = _listen(self._plan.address, self._plan.port)
        except OSError as error:
            raise LaunchError(
                f"port {self._plan.port} cannot be listened on: {error.strerror}",
                cause="another process of this pod uses it",
                next_step="change that process's port",
            ) from None
        self._hold(self._accept(self._listener))
        port: int = self._listener.getsockname()[1]
        return port

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        if self._web is not None:
            await self._web.shutdown(1.0)

    def _hold(self, doing: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # Where addresses are rewritten on the way, all workers may have one.
        most = STRANGERS_OF_ONE if self._plan.check_address else STRANGERS
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError:  # no file descriptors left, for now
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            host = str(address[0])
            if self._strangers.total() >= STRANGERS or self._strangers[host] >= most:
                connection.close()
                continue
            assert self._web is not None
            handler = self._web()
            self._greeted[handler] = host
            self._strangers[host] += 1
            self._hold(self._greet(connection, handler))

    def _met(self, handler: web.RequestHandler) -> None:
        """No stranger any more: its request has come, or it is gone."""
        if host := self._greeted.pop(handler, ""):
            self._strangers[host] -= 1
            if not self._strangers[host]:
                del self._strangers[host]

    async def _greet(self, connection: socket.socket, handler: web.RequestHandler) -> None:
        """A stranger's time to say who it is: it ends with its request, with the connection, or after a while."""
        loop = asyncio.get_running_loop()
        try:
            try:
                await loop.connect_accepted_socket(
                    lambda: handler, connection, ssl=self._credentials.tls, ssl_handshake_timeout=HEAD_SECONDS
                )
            except OSError:  # TLS's errors are of them
                connection.close()
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEAD_SECONDS):
                    while handler in self._greeted and handler.transport is not None:
                        await asyncio.sleep(_LOOK_SECONDS)
            if handler in self._greeted and handler.transport is not None:
                handler.transport.abort()
        finally:
            self._met(handler)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._met(request.protocol)  # from here on it is answered, and closed if it may not come in
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
        session = web.WebSocketResponse(max_msg_size=FRAME_BYTES, compress=False, timeout=1.0)
        if not session.can_prepare(request):
            return _refuse(426, "a WebSocket is wanted")
        await session.prepare(request)
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                text = await session.receive_str()
            hello = read(text) if len(text) <= _HELLO_BYTES else None
        except (TimeoutError, TypeError, LaunchError):
            hello = None
        if not isinstance(hello, Hello):
            await session.close(code=1002)
            return session
        problem = self._address_problem(request.remote, hello.ip)
        if problem:
            await session.close(code=1008, message=problem.encode()[:120])
            return session
        await self._joined(expected.index, hello, session)
        return session

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


def _listen(address: str, port: int) -> socket.socket:
    """A listening socket on `address`, or on all there are, of both families where the kernel has both."""
    if address or not socket.has_dualstack_ipv6():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=1024)
    else:
        try:
            listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError:  # IPv6 is switched off; or the port is taken, which the next line says
            listener = socket.create_server(("", port), backlog=1024)
    listener.setblocking(False)
    return listener


def _bearer(request: web.BaseRequest) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


def _refuse(status: int, reason: str) -> web.Response:
    response = web.Response(status=status, text=reason + "\n", headers={"X-Topkube-Reason": reason})
    response.force_close()
    return response
