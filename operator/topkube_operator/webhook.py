"""The validating webhook: `admission.review` behind TLS.

The certificate authority derives from the operator's own secret, so that all replicas have the same one and a restart
does not change it; each replica signs a serving certificate of its own at start. The API server learns the authority by
the `caBundle` of our ValidatingWebhookConfiguration, which the operator fills in and keeps filled in.

`failurePolicy` is Ignore: while no operator answers, people can still create, suspend and delete jobs, and nothing bad
starts, because the reconciler refuses what the webhook would have refused, in the same words.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import functools
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from topkube.errors import ClusterError
from topkube_operator.admission import Claim, review

logger = logging.getLogger(__name__)

CONFIGURATION = "topkube"
"""Name of the ValidatingWebhookConfiguration."""
PATH = "/validate"
PORT = 9443
LARGEST_BODY = 8 << 20  # an object and its old self, at most 1.5 MiB each in etcd, and the review around them
BUNDLE_SECONDS = 60.0
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
_BEGIN, _END = datetime.datetime(2025, 1, 1), datetime.datetime(2125, 1, 1)
_SERVING_DAYS = 3650

Publish = Callable[[str], Awaitable[None]]


@dataclass(frozen=True)
class Authority:
    """A certificate authority; `bundle` is its certificate as the API server wants it, in base64."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def derived(cls, secret: bytes) -> Authority:
        """The same key and the same certificate, byte by byte, for the same secret."""
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
        """TLS for a server that is called by these DNS names or addresses, with a new key."""
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
    """What the API server calls a Service by."""
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
    claim: Claim = lambda namespace, name: None,
) -> AsyncIterator[int]:
    """Serves until the block ends; gives the port, which is a free one for port 0.

    `names` are the DNS names or addresses that the API server calls us by; `publish` writes the caBundle into the
    ValidatingWebhookConfiguration where it is not that already, and is called again every minute, because whoever
    installs a newer one empties it. What `publish` raises is logged: people may do without the webhook.
    `certificate`: a folder with tls.crt and tls.key that somebody else (cert-manager) keeps; then nothing is published,
    and the files are read again every minute, because they are renewed. `claim` looks up claims, for a warning.
    """
    authority = Authority.derived(secret)
    context = authority.serving(names) if certificate is None else _kept_elsewhere(certificate)
    application = web.Application(client_max_size=LARGEST_BODY)
    application.router.add_post(PATH, functools.partial(_answer, claim))
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host or None, port, ssl_context=context)
        await site.start()
        keeping = _keep_read(context, certificate) if certificate else _keep_published(authority.bundle, publish)
        publishing = asyncio.create_task(keeping)
        try:
            yield int(runner.addresses[0][1])
        finally:
            publishing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await publishing
    finally:
        await runner.cleanup()


async def _answer(claim: Claim, request: web.Request) -> web.Response:
    try:
        asked = json.loads(await request.read())
        answer = await asyncio.to_thread(review, asked, claim)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return web.Response(status=400, text=f"not an AdmissionReview: {type(error).__name__}: {error}\n")
    return web.json_response(answer)


async def _keep_published(bundle: str, publish: Publish) -> None:
    said = ""
    while True:
        try:
            await publish(bundle)
            said = ""
        except Exception as error:  # whatever it is, jobs are still checked by the reconciler
            if str(error) != said:
                said = str(error)
                logger.warning("the webhook's caBundle could not be written, so it is not called: %s", error)
        await asyncio.sleep(BUNDLE_SECONDS)


def _kept_elsewhere(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    except OSError as error:
        raise ClusterError(
            f"the webhook's certificate in {folder} cannot be used: {error}",
            cause="cert-manager has not issued it yet",
            next_step="kubectl get certificates; without cert-manager leave --webhook-certificate away",
        ) from None
    return context


async def _keep_read(context: ssl.SSLContext, folder: Path) -> None:
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
    """A file only for us, gone afterwards: OpenSSL takes keys from files alone."""
    handle, path = tempfile.mkstemp()
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        yield path
    finally:
        os.unlink(path)
