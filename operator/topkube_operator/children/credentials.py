"""Keys, tokens and the launcher's certificate. They derive from the operator's seed and the job's UID, and the operator
keeps no copy.

Everything is deterministic (HKDF, HMAC, Ed25519), so a repeated reconcile, another replica or a restarted operator
produces the same bytes, and a deleted Secret is restored as it was.
"""

from __future__ import annotations

import base64
import datetime
import functools
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from topkube.launch import contract

SEED_BYTES = 32
# Fixed dates, because the clocks of nodes differ. Clients trust exactly these bytes.
_VALID_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_VALID_TO = datetime.datetime(2049, 12, 31, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Credentials:
    """All secrets of one job, as text."""

    uid: str
    certificate: str
    key: str
    token_key: str
    operator_token: str

    def build_secret_data(self, workers: Iterable[tuple[int, int]]) -> dict[str, str]:
        """Return the Secret's data (base64): what the launcher needs, and a token for each (index, attempt) of
        `workers`."""
        plain = {
            contract.CERTIFICATE_FILE: self.certificate,
            contract.KEY_FILE: self.key,
            contract.TOKEN_KEY_FILE: self.token_key,
            contract.OPERATOR_TOKEN_FILE: self.operator_token,
        }
        for index, attempt in workers:
            plain[contract.name_token_item(index, attempt)] = contract.compute_worker_token(
                self.token_key, self.uid, index, attempt
            )
        return {name: base64.b64encode(text.encode()).decode() for name, text in plain.items()}


@functools.lru_cache(maxsize=4096)
def derive_credentials(seed: bytes, uid: str) -> Credentials:
    """Return the credentials of the job with this UID. `seed` is the operator's own secret, SEED_BYTES or more."""
    key = Ed25519PrivateKey.from_private_bytes(_derive_key(seed, uid, "tls"))
    return Credentials(
        uid=uid,
        certificate=_make_certificate(key, uid),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode(),
        token_key=_derive_key(seed, uid, "tokens").hex(),
        operator_token=_derive_key(seed, uid, "operator").hex(),
    )


def _derive_key(seed: bytes, uid: str, purpose: str) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt=b"topkube.dev", info=f"{purpose}/{uid}".encode()).derive(seed)


def _make_certificate(key: Ed25519PrivateKey, uid: str) -> str:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, contract.CERTIFICATE_NAME)])
    digest = hashes.Hash(hashes.SHA256())
    digest.update(uid.encode())
    serial = int.from_bytes(digest.finalize()[:16]) >> 1  # 127 bits, because X.509 stores a signed number
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial or 1)
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_TO)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(contract.CERTIFICATE_NAME)]), critical=False)
        # Clients load the certificate as their only authority.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
