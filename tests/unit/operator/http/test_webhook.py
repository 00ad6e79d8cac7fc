"""The webhook's server: its TLS, its answers, and the caBundle for the API server."""

from __future__ import annotations

import asyncio
import base64
import datetime
import gzip
import ipaddress
import json
import ssl
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from stored_jobs import JOB, change_field

from topkube.errors import ClusterError
from topkube_operator.http import webhook
from topkube_operator.http.certificates import Authority, build_certificate
from topkube_operator.http.webhook import PATH, serve

SECRET = b"the operator's own secret"


def build_trust(bundle: str) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=base64.b64decode(bundle).decode())


def build_review(job: Any) -> dict[str, Any]:
    return {"kind": "AdmissionReview", "request": {"uid": "1", "operation": "CREATE", "object": job}}


async def ignore_bundle(_: str) -> None:
    pass


async def post(port: int, body: Any, trust: ssl.SSLContext, host: str = "127.0.0.1") -> tuple[int, str]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session,
        session.post(f"https://{host}:{port}{PATH}", data=body, ssl=trust) as answer,
    ):
        return answer.status, await answer.text()


def test_equal_secrets_result_in_the_same_certificate_authority() -> None:
    assert Authority.derive(SECRET).bundle == Authority.derive(SECRET).bundle
    assert Authority.derive(SECRET).bundle != Authority.derive(b"another").bundle


def test_the_webhook_answers_a_client_that_trusts_the_published_bundle() -> None:
    async def run_scenario() -> None:
        published = asyncio.get_running_loop().create_future()

        async def publish(bundle: str) -> None:
            published.set_result(bundle)

        async with serve(SECRET, ["127.0.0.1"], publish, host="127.0.0.1", port=0) as port:
            trust = build_trust(await asyncio.wait_for(published, 120))
            status, text = await post(port, json.dumps(build_review(JOB)), trust)
            assert (status, json.loads(text)["response"]["allowed"]) == (200, True)
            status, text = await post(port, json.dumps(build_review(change_field("workers", 0))), trust)
            assert "spec.workers: 0" in json.loads(text)["response"]["status"]["message"]

    asyncio.run(run_scenario())


def test_another_name_or_authority_is_not_trusted() -> None:
    async def run_scenario() -> None:
        async with serve(SECRET, ["hook.ns.svc"], ignore_bundle, host="127.0.0.1", port=0) as port:
            trust = build_trust(Authority.derive(SECRET).bundle)
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await post(port, "{}", trust)  # we are called hook.ns.svc, not 127.0.0.1
            trust.check_hostname = False
            assert (await post(port, "{}", trust))[0] == 400
            stranger = build_trust(Authority.derive(b"another").bundle)
            stranger.check_hostname = False
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await post(port, "{}", stranger)

    asyncio.run(run_scenario())


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
def test_an_invalid_body_is_answered(body: str) -> None:
    """The server answers the next request too."""

    async def run_scenario() -> None:
        async with serve(SECRET, ["127.0.0.1"], ignore_bundle, host="127.0.0.1", port=0) as port:
            trust = build_trust(Authority.derive(SECRET).bundle)
            assert (await post(port, body, trust))[0] in (200, 400)
            assert (await post(port, json.dumps(build_review(JOB)), trust))[0] == 200

    asyncio.run(run_scenario())


def test_a_review_contains_nothing_about_claims() -> None:
    """The webhook answers any caller in the cluster. It must not show how claims of another namespace can be
    mounted."""
    job = change_field("checkpoint", {"claimName": "of-somebody"}, change_field("workers", 2))
    job["metadata"]["namespace"] = "of-somebody"
    status, text = webhook.answer_review(json.dumps(build_review(job)).encode())
    response = json.loads(text)["response"]
    assert (status, response["allowed"]) == (200, True)
    assert "of-somebody" not in text
    assert "ReadWrite" not in text


def test_a_body_that_no_object_can_have_is_refused() -> None:
    """An object and its old version, of 1.5 MiB each, are accepted. A larger body is not read."""

    async def run_scenario() -> None:
        async with serve(SECRET, ["127.0.0.1"], ignore_bundle, host="127.0.0.1", port=0) as port:
            trust = build_trust(Authority.derive(SECRET).bundle)
            assert (await post(port, "x" * (webhook.LARGEST_BODY + 1), trust))[0] == 413
            large = change_field("template.spec.containers.0.args", ["x" * (3 << 19)])
            review = {"request": {"uid": "1", "operation": "UPDATE", "object": large, "oldObject": large}}
            status, text = await post(port, json.dumps(review), trust)
            assert (status, json.loads(text)["response"]["allowed"]) == (200, True)

    asyncio.run(run_scenario())


def test_bodies_without_length_and_compressed_bodies_are_refused() -> None:
    async def run_scenario() -> None:
        async with serve(SECRET, ["127.0.0.1"], ignore_bundle, host="127.0.0.1", port=0) as port:
            trust = build_trust(Authority.derive(SECRET).bundle)
            url = f"https://127.0.0.1:{port}"
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
                async with session.post(url + PATH, data=b"{}", ssl=trust, chunked=True) as answer:
                    assert answer.status == 411
                bomb = gzip.compress(b" " * (64 << 20))
                headers = {"Content-Encoding": "gzip"}
                async with session.post(url + PATH, data=bomb, ssl=trust, headers=headers) as answer:
                    assert answer.status == 400
                async with session.post(url + "/other", data=b"{}", ssl=trust) as answer:
                    assert answer.status == 404
                async with session.get(url + PATH, ssl=trust) as answer:
                    assert answer.status == 405

    asyncio.run(run_scenario())


def test_large_reviews_do_not_delay_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small review is answered while a large review is under way and others wait."""
    released, entered = threading.Event(), threading.Event()
    answer_review = webhook.answer_review

    def answer_when_released(body: bytes) -> tuple[int, str]:
        if len(body) > webhook.SMALL_BODY:
            entered.set()
            assert released.wait(120)
        return answer_review(body)

    monkeypatch.setattr(webhook, "answer_review", answer_when_released)

    async def run_scenario() -> None:
        async with serve(SECRET, ["127.0.0.1"], ignore_bundle, host="127.0.0.1", port=0) as port:
            trust = build_trust(Authority.derive(SECRET).bundle)
            large = json.dumps(build_review(JOB)) + " " * webhook.SMALL_BODY
            waiting = [asyncio.create_task(post(port, large, trust)) for _ in range(webhook.LARGE_BODIES + 2)]
            try:
                assert await asyncio.to_thread(entered.wait, 120)
                assert (await post(port, json.dumps(build_review(JOB)), trust))[0] == 200
            finally:
                released.set()
            assert {status for status, _ in await asyncio.gather(*waiting)} == {200}

    asyncio.run(run_scenario())


def test_a_review_that_waits_too_long_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "WAIT_SECONDS", 0.1)
    released = threading.Event()

    def answer_when_released(body: bytes) -> tuple[int, str]:
        released.wait(120)
        return 200, "{}"

    monkeypatch.setattr(webhook, "answer_review", answer_when_released)

    async def run_scenario() -> None:
        async with serve(SECRET, ["127.0.0.1"], ignore_bundle, host="127.0.0.1", port=0) as port:
            try:
                assert (await post(port, "{}", build_trust(Authority.derive(SECRET).bundle)))[0] == 503
            finally:
                released.set()

    asyncio.run(run_scenario())


def test_the_bundle_is_published_again_also_after_failures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhook, "BUNDLE_SECONDS", 0.001)
    calls: list[str] = []

    async def run_scenario() -> None:
        was_published_again = asyncio.Event()

        async def publish(bundle: str) -> None:
            calls.append(bundle)
            if len(calls) in (2, 3):
                raise PermissionError("not yours")
            if len(calls) >= 5:
                was_published_again.set()

        async with serve(SECRET, ["127.0.0.1"], publish, host="127.0.0.1", port=0):
            await asyncio.wait_for(was_published_again.wait(), 120)

    asyncio.run(run_scenario())
    assert len(set(calls)) == 1
    assert [record.getMessage().endswith("not yours") for record in caplog.records] == [True], (
        "a failure is logged once"
    )


def test_with_a_certificate_of_cert_manager_no_bundle_is_published(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "theirs")])
    begin = datetime.datetime(2025, 1, 1)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = build_certificate(name, name, key.public_key(), 1, begin, datetime.datetime(2100, 1, 1))
    pem = certificate.add_extension(alternative, False).sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    (tmp_path / "tls.crt").write_bytes(pem)
    (tmp_path / "tls.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    reports = WebhookReports()

    async def publish(_: str) -> None:
        raise AssertionError("cert-manager writes the bundle")

    async def run_scenario() -> None:
        options: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "certificate": tmp_path, "observer": reports}
        async with serve(SECRET, [], publish, **options) as port:
            status, _ = await post(port, json.dumps(build_review(JOB)), ssl.create_default_context(cadata=pem.decode()))
            assert status == 200

    asyncio.run(run_scenario())
    assert reports.states == [(datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC).timestamp(), None)]


def test_a_missing_certificate_is_reported(tmp_path: Path) -> None:
    async def run_scenario() -> None:
        async with serve(SECRET, [], ignore_bundle, certificate=tmp_path):
            pass

    with pytest.raises(ClusterError, match="cert-manager"):
        asyncio.run(run_scenario())


class WebhookReports:
    """Records the outcomes and states that the webhook reports."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.states: list[tuple[float, bool | None]] = []

    def set_serving(self, expires_at: float, published: bool | None) -> None:
        self.states.append((expires_at, published))

    def observe_review(self, outcome: str, seconds: float) -> None:
        assert outcome in webhook.REVIEW_OUTCOMES
        self.outcomes.append(outcome)


def test_every_answer_is_counted_by_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, published = WebhookReports(), asyncio.Event()

    async def publish(_: str) -> None:
        published.set()

    async def run_scenario() -> None:
        async with serve(SECRET, ["127.0.0.1"], publish, host="127.0.0.1", port=0, observer=reports) as port:
            trust = build_trust(Authority.derive(SECRET).bundle)
            invalid_job = change_field("template.spec.containers.0.command", None)
            for body in (build_review(JOB), build_review(invalid_job), {"no": "review"}):
                await post(port, json.dumps(body), trust)
            monkeypatch.setattr(webhook, "answer_review", lambda body: 1 / 0)  # a fault of the webhook
            assert (await post(port, json.dumps(build_review(JOB)), trust))[0] == 500
            await asyncio.wait_for(published.wait(), 120)

    asyncio.run(run_scenario())
    assert reports.outcomes == ["allowed", "denied", "refused", "error"]
    assert reports.states[0][1] is False
    assert reports.states[-1][1] is True
    assert reports.states[0][0] > datetime.datetime.now(datetime.UTC).timestamp() + 86400


def test_a_bundle_that_cannot_be_written_is_reported() -> None:
    reports, tried = WebhookReports(), asyncio.Event()

    async def publish(_: str) -> None:
        tried.set()
        raise PermissionError("not yours")

    async def run_scenario() -> None:
        async with serve(SECRET, ["127.0.0.1"], publish, host="127.0.0.1", port=0, observer=reports):
            await asyncio.wait_for(tried.wait(), 120)

    asyncio.run(run_scenario())
    assert {published for _, published in reports.states} == {False}
