"""The launcher's server: TLS, the check of callers, and limits for unknown callers.

From a caller without a valid token, the launcher reads no more than the head of a request, which must arrive within ten
seconds. The number of connections that have not shown a token is limited, in total and for each address, so that a
single host cannot block the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
import resource
import socket
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Awaitable, Callable

from aiohttp import web

from topkube.errors import LaunchError
from topkube.launch.connection.credentials import LauncherCredentials
from topkube.launch.connection.link import FRAME_BYTES
from topkube.launch.connection.messages import Hello, parse_message
from topkube.launch.connection.tasks import run_task
from topkube.launch.contract import (
    DOMAINS_HEADER,
    JOIN_PATH,
    STATUS_PATH,
    LauncherStatus,
    LaunchPlan,
    compute_worker_token,
    parse_domains,
)

HEAD_SECONDS = 10.0
"""Time limit of the TLS handshake, and again of the request's head and the worker's hello."""
UNKNOWN_CALLERS, UNKNOWN_CALLERS_PER_ADDRESS = 1024, 512
"""The most connections without a valid token at the same time: in total, and from the same address."""
_FILES = 2048
"""Descriptors that the launcher needs for unknown callers and itself."""
_FILES_PER_WORKER, _LEAST_FILES = 4, 128
"""Descriptors that the launcher needs for each worker, and the fewest that it needs besides."""
_SIDECARS = ("127.0.0.6", "::6")
"""The addresses from which Istio's sidecar forwards calls."""
_REASON_BYTES = 123
"""The longest reason in the last frame of a WebSocket."""
_TLS_BUFFER_BYTES = 32 << 10
_CHECK_SECONDS = 0.25
_HELLO_BYTES = 32 << 10

JoinHandler = Callable[[int, Hello, web.WebSocketResponse], Awaitable[None]]


class Rendezvous:
    """The server for `JOIN_PATH` and `STATUS_PATH`. `serve_worker` serves a worker's connection until it ends, and
    `build_status` returns the answer for the operator."""

    def __init__(
        self,
        plan: LaunchPlan,
        credentials: LauncherCredentials,
        own_address: str,
        serve_worker: JoinHandler,
        build_status: Callable[[], LauncherStatus],
    ) -> None:
        self._plan, self._credentials, self._own_address = plan, credentials, own_address
        self._serve_worker, self._build_status = serve_worker, build_status
        self.refused: dict[int, str] = {}
        """Why workers with the right token were rejected, by index."""
        self.domains: tuple[int, ...] | None = None
        """The domain of each worker, by index; None until the operator has sent them."""
        self._workers = {str(worker.index): worker for worker in plan.workers}
        self._tokens = {
            worker.index: compute_worker_token(credentials.token_key, plan.uid, worker.index, worker.attempt)
            for worker in plan.workers
        }
        self._web: web.Server | None = None
        self._listener: socket.socket | None = None
        self._unknown: Counter[str] = Counter()
        """The number of connections without a valid token, by address."""
        self._waiting: dict[web.RequestHandler, str] = {}
        """The address of each connection whose request has not arrived yet."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen, and return the port. Raises LaunchError if the port is in use."""
        _raise_file_limit(len(self._plan.workers))
        # asyncio keeps a buffer per session, 256 KiB by default: 1 GiB for 4,096 workers. A record has 16 KiB.
        SSLProtocol.max_size = _TLS_BUFFER_BYTES
        self._web = web.Server(self._handle, keepalive_timeout=HEAD_SECONDS, lingering_time=0, max_headers=32)
        try:
            self._listener = _listen(self._plan.address, self._plan.port)
        except OSError as error:
            raise LaunchError(
                f"port {self._plan.port} cannot be listened on: {error.strerror}",
                cause="another process of this pod uses the port",
                next_step="change the port of that process",
            ) from None
        run_task(self._tasks, self._accept(self._listener))
        port: int = self._listener.getsockname()[1]
        return port

    async def stop(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        if self._web is not None:
            await self._web.shutdown(1.0)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # If the network rewrites addresses, all workers may have the same address.
        most = UNKNOWN_CALLERS_PER_ADDRESS if self._plan.check_address else UNKNOWN_CALLERS
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError:  # no file descriptors left, for now
                await asyncio.sleep(_CHECK_SECONDS)
                continue
            host = str(address[0])
            if self._unknown.total() >= UNKNOWN_CALLERS or self._unknown[host] >= most:
                connection.close()
                continue
            assert self._web is not None
            handler = self._web()
            self._waiting[handler] = host
            self._unknown[host] += 1
            run_task(self._tasks, self._await_request(connection, handler))

    def _note_request(self, handler: web.RequestHandler) -> None:
        """Stop counting a connection as unknown: its request has arrived, or it is gone."""
        if host := self._waiting.pop(handler, ""):
            self._unknown[host] -= 1
            if not self._unknown[host]:
                del self._unknown[host]

    async def _await_request(self, connection: socket.socket, handler: web.RequestHandler) -> None:
        """Serve a new connection until its request arrives or it breaks. Close it if neither happens in time."""
        loop = asyncio.get_running_loop()
        try:
            try:
                await loop.connect_accepted_socket(
                    lambda: handler, connection, ssl=self._credentials.tls, ssl_handshake_timeout=HEAD_SECONDS
                )
            except OSError:  # errors of TLS are OSErrors
                connection.close()
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEAD_SECONDS):
                    while handler in self._waiting and handler.transport is not None:
                        await asyncio.sleep(_CHECK_SECONDS)
            if handler in self._waiting and handler.transport is not None:
                handler.transport.abort()
        finally:
            self._note_request(handler)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._note_request(request.protocol)  # from here on the caller gets an answer
        if request.path == STATUS_PATH:
            return self._answer_status(request)
        if request.path == JOIN_PATH:
            return await self._answer_join(request)
        return _build_refusal(404, "there is nothing here")

    def _answer_status(self, request: web.BaseRequest) -> web.StreamResponse:
        if not _are_same(_read_bearer(request), self._credentials.operator_token):
            return _build_refusal(401, "this needs the operator's token")
        if request.method != "GET":
            return _build_refusal(405, "GET")
        if text := request.headers.get(DOMAINS_HEADER):
            self.domains = parse_domains(text, len(self._workers)) or self.domains
        return web.Response(text=self._build_status().to_json(), content_type="application/json")

    async def _answer_join(self, request: web.BaseRequest) -> web.StreamResponse:
        index, attempt = request.query.get("index", ""), request.query.get("attempt", "")
        expected = self._workers.get(index)
        token = self._tokens[expected.index] if expected is not None else self._credentials.operator_token[::-1]
        if not _are_same(_read_bearer(request), token) or expected is None:
            # As text: nothing that an unknown caller sends is parsed.
            if expected is not None and re.fullmatch("[0-9]{1,10}", attempt) and attempt != str(expected.attempt):
                attempts = f"attempt {expected.attempt} instead of {attempt}"
                return _build_refusal(401, f"worker {index} of this run was created in {attempts}")
            return _build_refusal(401, "the token does not belong to an expected worker")
        if request.method != "GET":
            return _build_refusal(405, "GET")
        session = web.WebSocketResponse(max_msg_size=FRAME_BYTES, compress=False, timeout=1.0)
        if not session.can_prepare(request):
            return _build_refusal(426, "this path needs a WebSocket")
        await session.prepare(request)
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                text = await session.receive_str()
            hello = parse_message(text) if len(text) <= _HELLO_BYTES else None
        except (TimeoutError, TypeError, LaunchError):
            hello = None
        if not isinstance(hello, Hello):
            await session.close(code=1002)
            return session
        problem = self._find_address_problem(request.remote, hello.ip)
        if problem:
            self.refused[expected.index] = problem
            await session.close(code=1008, message=_shorten(problem))
            return session
        self.refused.pop(expected.index, None)
        await self._serve_worker(expected.index, hello, session)
        return session

    def _find_address_problem(self, peer: str | None, announced: str) -> str:
        """Return why a worker that calls from `peer` may not have the pod address `announced`; empty if it may."""
        try:
            caller, pod_address = ipaddress.ip_address(peer or ""), ipaddress.ip_address(announced)
        except ValueError:
            return f"{announced[:40]!r} is not an address"
        if isinstance(caller, ipaddress.IPv6Address) and caller.ipv4_mapped is not None:
            caller = caller.ipv4_mapped
        if not self._plan.check_address or caller == pod_address:
            return ""
        # All calls through a sidecar come from the sidecar's address, which proves nothing.
        is_sidecar = str(caller) in _SIDECARS
        if (
            caller.is_loopback and announced == self._own_address and not is_sidecar
        ):  # the launcher runs inside this worker's pod
            return ""
        if is_sidecar:
            return (
                f"the call comes from {caller}, a service mesh's sidecar, not from {announced}. Next: exclude port "
                f"{self._plan.port} from the mesh (Istio: traffic.sidecar.istio.io/excludeInboundPorts on the "
                "launcher, excludeOutboundPorts on the workers), or turn off the check (the job's annotation "
                'topkube.dev/check-address: "false", or the chart value operator.checkAddress: false)'
            )
        return f"the call comes from {caller}, not from the pod's address {announced}"


def _raise_file_limit(workers: int) -> None:
    """Raise the limit of open files as far as `workers` need it, and no further: MPI's programs close every descriptor
    up to the limit. Raises LaunchError if the container's limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_PER_WORKER * workers
    least = _FILES_PER_WORKER * workers + _LEAST_FILES
    if hard != resource.RLIM_INFINITY and hard < least:
        raise LaunchError(
            f"{workers} workers need {least} open files in the launcher, and its container may open {hard}",
            cause="the node's container runtime sets a low limit (LimitNOFILE)",
            next_step="raise the limit on the node, or use more slots per worker and fewer workers",
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        needed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _shorten(reason: str) -> bytes:
    """Return the reason, cut to the size of a WebSocket's last frame."""
    return reason.partition(". Next: ")[0].encode()[:_REASON_BYTES].decode(errors="ignore").encode()


def _listen(address: str, port: int) -> socket.socket:
    """Return a listening socket on `address`, or on all addresses of IPv4 and, if the kernel has it, IPv6."""
    if address or not socket.has_dualstack_ipv6():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=1024)
    else:
        try:
            listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError:  # IPv6 is disabled, or the port is in use; then the next line raises an error
            listener = socket.create_server(("", port), backlog=1024)
    listener.setblocking(False)
    return listener


def _read_bearer(request: web.BaseRequest) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


def _are_same(sent: str, expected: str) -> bool:
    return hmac.compare_digest(sent.encode(errors="replace"), expected.encode())


def _build_refusal(status: int, reason: str) -> web.Response:
    response = web.Response(status=status, text=reason + "\n", headers={"X-Topkube-Reason": reason})
    response.force_close()
    return response
