"""Certificates of the operator's servers: our own authority, and certificates in a folder that cert-manager
maintains."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import hmac
import ipaddress
import os
import ssl
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from topkube.errors import ClusterError

SERVING_DAYS = 3650
"""How long a serving certificate of our own authority is valid."""
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # the order of the curve P-256
_BEGIN, _END = datetime.datetime(2025, 1, 1), datetime.datetime(2125, 1, 1)


@dataclass(frozen=True)
class Authority:
    """A certificate authority. `bundle` is its certificate in base64, as the API server expects it."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def derive(cls, secret: bytes) -> Authority:
        """Return the authority of a secret: the same key and the same certificate, byte by byte."""
        seed = hmac.new(secret, b"topkube webhook authority", hashlib.sha512).digest()
        key = ec.derive_private_key(int.from_bytes(seed, "big") % (_ORDER - 1) + 1, ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "topkube webhook")])
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            build_certificate(name, name, key.public_key(), int.from_bytes(seed[:8], "big") >> 1 | 1, _BEGIN, _END)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256(), ecdsa_deterministic=True)
        )
        return cls(key, certificate)

    @property
    def bundle(self) -> str:
        return base64.b64encode(self.certificate.public_bytes(serialization.Encoding.PEM)).decode()

    @classmethod
    def create_random(cls) -> Authority:
        """Return a new authority that nobody else has."""
        return cls.derive(os.urandom(32))

    def build_server_context(self, names: Iterable[str]) -> ssl.SSLContext:
        """Return a TLS context with a new key, for a server with these DNS names or addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
        until = now + datetime.timedelta(days=SERVING_DAYS)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "topkube-operator")])
        begin = now - datetime.timedelta(hours=1)
        certificate = (
            build_certificate(
                subject, self.certificate.subject, key.public_key(), x509.random_serial_number(), begin, until
            )
            .add_extension(x509.SubjectAlternativeName([_build_general_name(name) for name in names]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        text = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with _write_private_file(text) as path:
            context.load_cert_chain(path)
        return context


def load_certificate(folder: Path) -> ssl.SSLContext:
    """Return a TLS context with tls.crt and tls.key of `folder`. Raises ClusterError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    except OSError as error:
        raise ClusterError(
            f"the certificate in {folder} cannot be used: {error}",
            cause="cert-manager has not issued it yet, or the Secret has no tls.crt and tls.key",
            next_step="kubectl get certificates; without cert-manager remove the option that names the folder",
        ) from None
    return context


def read_expiry(folder: Path) -> float:
    """Return the Unix time at which the certificate tls.crt in `folder` expires. Raises OSError or ValueError."""
    return x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes()).not_valid_after_utc.timestamp()


def build_certificate(
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


def _build_general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@contextlib.contextmanager
def _write_private_file(content: bytes) -> Iterator[str]:
    """Write a temporary file that only this user can read. OpenSSL reads keys from files only."""
    handle, path = tempfile.mkstemp()
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        yield path
    finally:
        os.unlink(path)
