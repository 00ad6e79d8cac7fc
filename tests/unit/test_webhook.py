"""The webhook's server: its TLS, its answers, and that the API server is told whom to trust."""

from __future__ import annotations

import asyncio
import base64
import datetime
import ipaddress
import json
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from test_admission import JOB, changed

from topkube.errors import ClusterError
from topkube_operator import webhook
from topkube_operator.webhook import PATH, Authority, serve

SECRET = b"the operator's own secret"


def trusting(bundle: str) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=base64.b64decode(bundle).decode())


def asked(job: Any) -> dict[str, Any]:
    return {"kind": "AdmissionReview", "request": {"uid": "1", "operation": "CREATE", "object": job}}


async def forget(_: str) -> None:
    pass


async def post(port: int, body: Any, trust: ssl.SSLContext, host: str = "127.0.0.1") -> tuple[int, str]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session,
        session.post(f"https://{host}:{port}{PATH}", data=body, ssl=trust) as answer,
    ):
        return answer.status, await answer.text()


def test_replicas_and_restarts_have_one_authority() -> None:
    assert Authority.derived(SECRET).bundle == Authority.derived(SECRET).bundle
    assert Authority.derived(SECRET).bundle != Authority.derived(b"another").bundle


def test_it_answers_who_trusts_the_published_bundle() -> None:
    async def scenario() -> None:
        published = asyncio.get_running_loop().create_future()

        async def publish(bundle: str) -> None:
            published.set_result(bundle)

        async with serve(SECRET, ["127.0.0.1"], publish, host="127.0.0.1", port=0) as port:
            trust = trusting(await asyncio.wait_for(published, 10))
            status, text = await post(port, json.dumps(asked(JOB)), trust)
            assert (status, json.loads(text)["response"]["allowed"]) == (200, True)
            status, text = await post(port, json.dumps(asked(changed("workers", 0))), trust)
            assert "spec.workers: 0" in json.loads(text)["response"]["status"]["message"]

    asyncio.run(scenario())


def test_another_name_or_authority_is_not_trusted() -> None:
    async def scenario() -> None:
        async with serve(SECRET, webhook.service_names("hook", "ns"), forget, host="127.0.0.1", port=0) as port:
            trust = trusting(Authority.derived(SECRET).bundle)
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await post(port, "{}", trust)  # we are called hook.ns.svc, not 127.0.0.1
            trust.check_hostname = False
            assert (await post(port, "{}", trust))[0] == 400
            stranger = trusting(Authority.derived(b"another").bundle)
            stranger.check_hostname = False
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await post(port, "{}", stranger)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "null",
        '{"request": 1}',
        '{"request": {}}',
        "[" * 100_000,
        '{"request": {"uid": "1", "object": "x"}}',
    ],
)
def test_nonsense_is_answered(body: str) -> None:
    """Whatever comes, the server lives on."""

    async def scenario() -> None:
        async with serve(SECRET, ["127.0.0.1"], forget, host="127.0.0.1", port=0) as port:
            trust = trusting(Authority.derived(SECRET).bundle)
            assert (await post(port, body, trust))[0] in (200, 400)
            assert (await post(port, json.dumps(asked(JOB)), trust))[0] == 200

    asyncio.run(scenario())


def test_a_body_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "LARGEST_BODY", 1000)

    async def scenario() -> None:
        async with serve(SECRET, ["127.0.0.1"], forget, host="127.0.0.1", port=0) as port:
            status, _ = await post(port, "x" * 2000, trusting(Authority.derived(SECRET).bundle))
            assert status == 413

    asyncio.run(scenario())


def test_the_bundle_is_published_again_and_failures_are_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhook, "BUNDLE_SECONDS", 0.001)
    calls: list[str] = []

    async def scenario() -> None:
        enough = asyncio.Event()

        async def publish(bundle: str) -> None:
            calls.append(bundle)
            if len(calls) in (2, 3):
                raise PermissionError("not yours")
            if len(calls) >= 5:
                enough.set()

        async with serve(SECRET, ["127.0.0.1"], publish, host="127.0.0.1", port=0):
            await asyncio.wait_for(enough.wait(), 10)

    asyncio.run(scenario())
    assert len(set(calls)) == 1
    assert [record.getMessage().endswith("not yours") for record in caplog.records] == [True], "said once"


def test_with_a_certificate_of_cert_managers_nothing_is_published(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "theirs")])
    begin = datetime.datetime(2025, 1, 1)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = webhook._certificate(name, name, key.public_key(), 1, begin, datetime.datetime(2100, 1, 1))
    pem = certificate.add_extension(alternative, False).sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    (tmp_path / "tls.crt").write_bytes(pem)
    (tmp_path / "tls.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    async def publish(_: str) -> None:
        raise AssertionError("somebody else looks after the bundle")

    async def scenario() -> None:
        async with serve(SECRET, [], publish, host="127.0.0.1", port=0, certificate=tmp_path) as port:
            status, _ = await post(port, json.dumps(asked(JOB)), ssl.create_default_context(cadata=pem.decode()))
            assert status == 200

    asyncio.run(scenario())


def test_a_certificate_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(SECRET, [], forget, certificate=tmp_path):
            pass

    with pytest.raises(ClusterError, match="cert-manager"):
        asyncio.run(scenario())
