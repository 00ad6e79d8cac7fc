"""The operator's HTTP port: /metrics, /healthz (is it working?) and /readyz (has it listed the cluster once?).

The port has a thread and an event loop of its own. So it answers even if the operator's other threads and loops hang,
which is what a liveness probe must detect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from topkube.errors import TopKubeError
from topkube_operator.http.bounded_server import BoundedServer, Bounds, listen, refuse

_log = logging.getLogger(__name__)
Check = Callable[[], str]
"""Returns a problem; an empty text if there is none."""
BOUNDS = Bounds(connections=64, connections_per_client=16, head_seconds=5.0, idle_seconds=75.0, work_seconds=15.0)
_CHECK_SECONDS = 4.0
"""Shorter than the kubelet's timeout."""
_CHECKS = 4
"""The number of checks, and of reviews of tokens, that run at a time."""
_START_SECONDS = 10.0
_SCRAPE_SECONDS = 1.0
"""Scrapes within this time get the same text."""
_RELOAD_SECONDS = 60.0


class Probes:
    """Serves on `port` (0: a free port) from `start` to `stop`. `metrics` returns the answer of /metrics. Raises
    OSError if the port is in use.

    With `tls` the port serves TLS. If the certificate is in the folder `certificate`, it is read again every minute.
    With `allows`, a request for /metrics needs a bearer token for which `allows` returns True. `allows` may raise
    TopKubeError.
    """

    def __init__(
        self,
        port: int,
        metrics: Callable[[], bytes],
        healthy: Check,
        ready: Check,
        host: str = "",
        *,
        tls: ssl.SSLContext | None = None,
        certificate: Path | None = None,
        allows: Callable[[str], bool] | None = None,
    ) -> None:
        self._tls, self._certificate, self._allows = tls, certificate, allows
        self._metrics, self._checks = metrics, {"/healthz": healthy, "/readyz": ready}
        self._listener = listen(host, port)
        self.port = int(self._listener.getsockname()[1])
        self._pool = ThreadPoolExecutor(_CHECKS, "probe")
        self._token_pool = ThreadPoolExecutor(_CHECKS, "token")
        """Apart from the checks: callers whose tokens take long to check must not delay the kubelet's probes."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="probes", daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._scraped: tuple[float, bytes] = (float("-inf"), b"")

    def start(self) -> None:
        self._thread.start()
        self._ready.wait(_START_SECONDS)

    def stop(self) -> None:
        if self._loop is not None and self._stopped is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(timeout=5)
        self._listener.close()
        for pool in (self._pool, self._token_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        self._loop, self._stopped, self._scraping = asyncio.get_running_loop(), asyncio.Event(), asyncio.Lock()
        server = BoundedServer(self._listener, self._answer, self._tls, BOUNDS)
        await server.open()
        self._ready.set()
        reloading = asyncio.create_task(self._reload_certificate())
        try:
            await self._stopped.wait()
        finally:
            reloading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reloading
            await server.close()

    async def _reload_certificate(self) -> None:
        while self._tls is not None and self._certificate is not None:
            await asyncio.sleep(_RELOAD_SECONDS)
            try:
                self._tls.load_cert_chain(self._certificate / "tls.crt", self._certificate / "tls.key")
            except OSError as error:
                _log.warning("the renewed certificate of the metrics cannot be read: %s", error)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            return refuse(405, "use GET")
        if request.path == "/metrics":
            if self._allows is not None and (refusal := await self._refuse_stranger(request, self._allows)) is not None:
                return refusal
            return web.Response(body=await self._scrape(), headers={"Content-Type": CONTENT_TYPE_LATEST})
        if request.path in self._checks:
            problem = await self._run_check(self._checks[request.path])
            return web.Response(status=503 if problem else 200, text=(problem or "ok") + "\n")
        return refuse(404, "try /metrics, /healthz or /readyz")

    async def _refuse_stranger(
        self, request: web.BaseRequest, allows: Callable[[str], bool]
    ) -> web.StreamResponse | None:
        """Return the answer that refuses a caller without a valid token; None for other callers."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            refusal = refuse(401, "send the token of a service account: Authorization: Bearer TOKEN")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                allowed = await asyncio.get_running_loop().run_in_executor(self._token_pool, allows, token.strip())
        except (TimeoutError, TopKubeError) as error:
            _log.warning("the token of a scraper could not be checked: %s", error)
            return refuse(503, "the API server could not check the token")
        return None if allowed else refuse(403, "this account may not get the URL /metrics")

    async def _scrape(self) -> bytes:
        """Return the metrics. One scrape runs at a time, because it takes some time for a thousand jobs."""
        async with self._scraping:
            scraped_at, text = self._scraped
            if time.monotonic() - scraped_at > _SCRAPE_SECONDS:
                text = await asyncio.get_running_loop().run_in_executor(self._pool, self._metrics)
                self._scraped = (time.monotonic(), text)
            return text

    async def _run_check(self, check: Check) -> str:
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                return await asyncio.get_running_loop().run_in_executor(self._pool, check)
        except TimeoutError:
            return f"the check has not ended within {_CHECK_SECONDS:g} s"
