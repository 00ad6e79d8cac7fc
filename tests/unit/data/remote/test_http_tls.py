"""Reads over TLS: certificates that are trusted, and that are not."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
import xxhash
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from scripted_server import DATA, build_head, parse_range, receive, serve_and_open

from topkube.data.remote import transfer_reader
from topkube.data.remote.http import connection as http_connection
from topkube.errors import StoreError

pytestmark = pytest.mark.usefixtures("without_aiohttp")


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A certificate for 127.0.0.1 and its key, in one file that no client trusts yet."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "certificate.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(private + signed.public_bytes(Encoding.PEM))
    http_connection._build_tls_context.cache_clear()
    yield path
    http_connection._build_tls_context.cache_clear()


def build_server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def send_whole(connection: socket.socket, number: int, request: str) -> bool:
    start, stop = parse_range(request)
    connection.sendall(build_head(start, stop, 'ETag: "v1"\r\n') + DATA[start:stop])
    return True


def test_an_object_is_read_over_tls_in_many_ranges(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setattr(transfer_reader, "RANGE_BYTES", 30_000)
    with serve_and_open(send_whole, tls=build_server_context(certificate)) as (server, store):
        assert receive(store, '"v1"', xxhash.xxh3_128_hexdigest(DATA)) == DATA
    assert len(server.requests) == 4


@pytest.mark.parametrize(("is_trusted", "host"), [(False, "127.0.0.1"), (True, "localhost")])
def test_a_server_without_a_trusted_certificate_for_its_name_gets_no_request(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool, host: str
) -> None:
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with (
        serve_and_open(send_whole, tls=build_server_context(certificate), host=host) as (server, store),
        pytest.raises(StoreError, match="certificate"),
    ):
        receive(store)
    assert server.requests == []
