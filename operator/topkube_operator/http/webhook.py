"""The validating webhook: `admission.review` behind TLS.

The certificate authority derives from the operator's own secret, so that all replicas have the same authority and a
restart does not change it. Each replica signs its own serving certificate at start. The API server learns the authority
from the `caBundle` of our ValidatingWebhookConfiguration. The operator writes the `caBundle` and keeps it up to date.

`failurePolicy` is Ignore: while no operator answers, people can still create, suspend and delete jobs. Nothing invalid
starts, because the reconciler refuses what the webhook would have refused, with the same message.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from topkube.errors import ClusterError
from topkube_operator.http.bounded_server import BoundedServer, Bounds, listen, read_body, refuse
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
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # the order of the curve P-256
_BEGIN, _END = datetime.datetime(2025, 1, 1), datetime.datetime(2125, 1, 1)
_SERVING_DAYS = 3650

Publish = Callable[[str], Awaitable[None]]


@dataclass(frozen=True)
class Authority:
    """A certificate authority. `bundle` is its certificate in base64, as the API server expects it."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def derived(cls, secret: bytes) -> Authority:
        """Return the authority of a secret: the same key and the same certificate, byte by byte."""
        seed = hmac.new(secret, b"topkube webhook authority", hashlib.sha512).digest()
        key = ec.derive_private_key(int.from_bytes(seed, "big") % (_ORDER - 1) + 1, ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "topkube webhook")])
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        certificate = (
            _certificate(name, name, key.public_key(), int.from_bytes(seed[:8], "big") >> 1 | 1, _BEGIN, _END)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256(), ecdsa_deterministic=True)
        )
        return cls(key, certificate)

    @property
    def bundle(self) -> str:
        return base64.b64encode(self.certificate.public_bytes(serialization.Encoding.PEM)).decode()

    def serving(self, names: Iterable[str]) -> ssl.SSLContext:
        """Return a TLS context with a new key, for a server with these DNS names or addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
        until = now + datetime.timedelta(days=_SERVING_DAYS)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "topkube-operator")])
        begin = now - datetime.timedelta(hours=1)
        certificate = (
            _certificate(subject, self.certificate.subject, key.public_key(), x509.random_serial_number(), begin, until)
            .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        text = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with _file(text) as path:
            context.load_cert_chain(path)
        return context


def service_names(service: str, namespace: str) -> list[str]:
    """Return the names by which the API server calls a Service."""
    return [f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local"]


@contextlib.asynccontextmanager
async def serve(
    secret: bytes,
    names: Iterable[str],
    publish: Publish,
    *,
    host: str = "",
    port: int = PORT,
    certificate: Path | None = None,
) -> AsyncIterator[int]:
    """Serve until the block ends. Yield the port, which is a free port if `port` is 0.

    `names` are the DNS names or addresses by which the API server calls the webhook. `publish` writes the caBundle into
    the ValidatingWebhookConfiguration if it has another. `publish` is called again every minute, because an upgrade may
    empty the caBundle. Errors of `publish` are logged, because jobs can do without the webhook. `certificate` is a
    folder with tls.crt and tls.key that cert-manager maintains. In this case nothing is published, and the files are
    read again every minute, because cert-manager renews them.
    """
    authority = Authority.derived(secret)
    context = authority.serving(names) if certificate is None else _load_certificate(certificate)
    listener = listen(host, port)
    reviews = Reviews()
    server = BoundedServer(listener, reviews.answer, context, BOUNDS)
    await server.open()
    try:
        updates = _keep_loaded(context, certificate) if certificate else _keep_published(authority.bundle, publish)
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

    def __init__(self) -> None:
        self._small, self._large = ThreadPoolExecutor(1, "review"), ThreadPoolExecutor(1, "large-review")
        self._slots = asyncio.Semaphore(LARGE_BODIES)

    def close(self) -> None:
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    async def answer(self, request: web.BaseRequest) -> web.Response:
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
    """Return HTTP's status and the text of the answer to a request's body, whatever the body contains."""
    try:
        return 200, json.dumps(review(json.loads(body, parse_constant=_refuse_constant)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return 400, f"not an AdmissionReview: {type(error).__name__}: {str(error)[:200]}\n"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


async def _keep_published(bundle: str, publish: Publish) -> None:
    logged = ""
    while True:
        try:
            await publish(bundle)
            logged = ""
        except Exception as error:  # whatever the error is, the reconciler still checks all jobs
            if str(error) != logged:
                logged = str(error)
                logger.warning(
                    "the webhook's caBundle could not be written, so the API server does not call it: %s", error
                )
        await asyncio.sleep(BUNDLE_SECONDS)


def _load_certificate(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    except OSError as error:
        raise ClusterError(
            f"the webhook's certificate in {folder} cannot be used: {error}",
            cause="cert-manager has not issued it yet",
            next_step="kubectl get certificates; without cert-manager remove --webhook-certificate",
        ) from None
    return context


async def _keep_loaded(context: ssl.SSLContext, folder: Path) -> None:
    while True:
        await asyncio.sleep(BUNDLE_SECONDS)
        try:
            context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        except OSError as error:
            logger.warning("the renewed certificate of the webhook cannot be read: %s", error)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    serial: int,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(begin)
        .not_valid_after(end)
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@contextlib.contextmanager
def _file(content: bytes) -> Iterator[str]:
    """Write a temporary file that only this user can read. OpenSSL reads keys from files only."""
    handle, path = tempfile.mkstemp()
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        yield path
    finally:
        os.unlink(path)
