"""The validating webhook: `admission.review` behind TLS.

The certificate authority derives from the operator's own secret, so that all replicas have the same authority and a
restart does not change it. Each replica signs its own serving certificate at start. The API server reads the
authority's certificate from the `caBundle` of our ValidatingWebhookConfiguration. The operator writes the `caBundle`
and keeps it up to date.

`failurePolicy` is Ignore: while no operator answers, people can still create, suspend and delete jobs. Nothing invalid
starts, because the reconciler refuses what the webhook would have refused, with the same message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from aiohttp import web

from topkube_operator.http.bounded_server import BoundedServer, Bounds, listen, read_body, refuse
from topkube_operator.http.certificates import SERVING_DAYS, Authority, load_certificate, read_expiry
from topkube_operator.planning.admission import review

logger = logging.getLogger(__name__)

CONFIGURATION = "topkube"
"""Name of the ValidatingWebhookConfiguration."""
PATH = "/validate"
PORT = 9443
LARGEST_BODY = (3 << 20) + (256 << 10)
"""Bytes: an object and its old version, at most 1.5 MiB each in etcd, and the review around them."""
SMALL_BODY = 128 << 10
"""Bytes. Nearly every review is smaller. Larger reviews wait for one another and never delay small reviews."""
LARGE_BODIES = 8
"""Large bodies in memory at a time."""
WAIT_SECONDS = 10.0
"""How long a review may wait for its turn, and how long it may take. The API server usually gives up earlier."""
BOUNDS = Bounds(work_seconds=30.0)
BUNDLE_SECONDS = 60.0

REVIEW_OUTCOMES = ("allowed", "denied", "refused", "error")
"""Outcomes of a request: the job is allowed or denied, the request is no review, the webhook could not answer."""

Publish = Callable[[str], Awaitable[None]]


class ReviewObserver(Protocol):
    """Receives what happens to the webhook."""

    def set_serving(self, expires_at: float, published: bool | None) -> None:
        """Note that the webhook serves. The webhook calls this again after each check of the certificate. `expires_at`
        is the Unix time at which the serving certificate expires. `published` is None if the operator writes no
        caBundle."""

    def observe_review(self, outcome: str, seconds: float) -> None:
        """Note an answer that took `seconds`. `outcome` is one of REVIEW_OUTCOMES."""


class NoObserver:
    """An observer that does nothing with what it receives."""

    def set_serving(self, expires_at: float, published: bool | None) -> None:
        pass

    def observe_review(self, outcome: str, seconds: float) -> None:
        pass


@contextlib.asynccontextmanager
async def serve(
    secret: bytes,
    names: Iterable[str],
    publish: Publish,
    *,
    host: str = "",
    port: int = PORT,
    certificate: Path | None = None,
    observer: ReviewObserver | None = None,
) -> AsyncIterator[int]:
    """Serve until the block ends. Yield the port, which is a free port if `port` is 0.

    `names` are the DNS names or addresses by which the API server calls the webhook. `publish` writes the caBundle into
    the ValidatingWebhookConfiguration if a different caBundle is there. `publish` is called again every minute, because
    an upgrade may empty the caBundle. Errors of `publish` are logged and not raised, because jobs also run without the
    webhook. `certificate` is a folder with tls.crt and tls.key that cert-manager maintains. In this case nothing is
    published, and the files are read again every minute, because cert-manager renews them. `observer` receives every
    answer.
    """
    observer = observer or NoObserver()
    authority = Authority.derive(secret)
    context = authority.build_server_context(names) if certificate is None else load_certificate(certificate)
    expires_at = time.time() + SERVING_DAYS * 86400 if certificate is None else read_expiry(certificate)
    observer.set_serving(expires_at, None if certificate else False)
    listener = listen(host, port)
    reviews = Reviews(observer)
    server = BoundedServer(listener, reviews.answer, context, BOUNDS)
    await server.open()
    try:
        if certificate is None:
            updates = _publish_repeatedly(authority.bundle, publish, observer, expires_at)
        else:
            updates = _reload_repeatedly(context, certificate, observer)
        updating = asyncio.create_task(updates)
        try:
            yield int(listener.getsockname()[1])
        finally:
            updating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await updating
    finally:
        await server.close()
        reviews.close()


class Reviews:
    """Answers AdmissionReviews: small reviews one after the other in a thread, large reviews in another thread.

    Any caller that reaches the port may ask, because the API server does not authenticate itself. Therefore an answer
    depends on the request alone. Nothing is read from the cluster.
    """

    def __init__(self, observer: ReviewObserver) -> None:
        self._observer = observer
        self._small, self._large = ThreadPoolExecutor(1, "review"), ThreadPoolExecutor(1, "large-review")
        self._slots = asyncio.Semaphore(LARGE_BODIES)

    def close(self) -> None:
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Return the answer to a request, and report it to the observer."""
        start, outcome = time.monotonic(), "error"
        try:
            response = await self._answer(request)
            outcome = _find_outcome(response)
            return response
        except (ConnectionError, web.RequestPayloadError, asyncio.CancelledError):  # the caller has gone
            outcome = "refused"
            raise
        finally:
            self._observer.observe_review(outcome, time.monotonic() - start)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        if request.path != PATH:
            return refuse(404, f"try {PATH}")
        if request.method != "POST":
            return refuse(405, "use POST")
        if (request.content_length or 0) <= SMALL_BODY:
            return await self._review(request, SMALL_BODY, self._small)
        if request.content_length is not None and request.content_length > LARGEST_BODY:
            return refuse(413, f"the body has more than {LARGEST_BODY:,} bytes")
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._slots.acquire()
        except TimeoutError:
            return refuse(503, "too many large reviews are waiting")
        try:
            return await self._review(request, LARGEST_BODY, self._large)
        finally:
            self._slots.release()

    async def _review(self, request: web.BaseRequest, largest: int, pool: ThreadPoolExecutor) -> web.Response:
        body = await read_body(request, largest, BOUNDS.body_seconds)
        if isinstance(body, web.Response):
            return body
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                status, text = await asyncio.get_running_loop().run_in_executor(pool, answer_review, body)
        except TimeoutError:
            return refuse(503, "too many reviews are waiting")
        return web.Response(
            status=status, text=text, content_type="application/json" if status == 200 else "text/plain"
        )


def answer_review(body: bytes) -> tuple[int, str]:
    """Return the HTTP status and the text of the answer to a request's body, whatever the body contains."""
    try:
        return 200, json.dumps(review(json.loads(body, parse_constant=_refuse_constant)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return 400, f"not an AdmissionReview: {type(error).__name__}: {str(error)[:200]}\n"


def _find_outcome(response: web.Response) -> str:
    if response.status != 200:
        return "error" if response.status >= 500 else "refused"
    answer = json.loads(response.text or "{}").get("response") or {}
    return "allowed" if answer.get("allowed") else "denied"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


async def _publish_repeatedly(bundle: str, publish: Publish, observer: ReviewObserver, expires_at: float) -> None:
    logged = ""
    while True:
        try:
            await publish(bundle)
            observer.set_serving(expires_at, True)
            logged = ""
        except Exception as error:  # whatever the error is, the reconciler still checks all jobs
            observer.set_serving(expires_at, False)
            if str(error) != logged:
                logged = str(error)
                logger.warning(
                    "the webhook's caBundle could not be written, so the API server does not call it: %s", error
                )
        await asyncio.sleep(BUNDLE_SECONDS)


async def _reload_repeatedly(context: ssl.SSLContext, folder: Path, observer: ReviewObserver) -> None:
    while True:
        await asyncio.sleep(BUNDLE_SECONDS)
        try:
            context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
            observer.set_serving(read_expiry(folder), None)
        except (OSError, ValueError) as error:
            logger.warning("the renewed certificate of the webhook cannot be read: %s", error)
