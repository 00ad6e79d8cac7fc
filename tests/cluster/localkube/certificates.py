"""The cluster's certificate authority, the certificates that it signs, and kubeconfigs."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=365)


def _write_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    encoding, none = serialization.Encoding.PEM, serialization.NoEncryption()
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.TraditionalOpenSSL, none))
    return key


def _build_name(common: str, organization: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    if organization:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(parts)


def _begin_certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + LIFETIME)


@dataclass(frozen=True)
class ClusterAuthority:
    """The authority whose key and certificate are in `folder`, as ca.key and ca.crt."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> ClusterAuthority:
        """Make an authority, and the key pair that signs service accounts' tokens (sa.key, sa.pub)."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key, name = _write_key(folder / "ca.key"), _build_name("topkube-local-ca")
        builder = _begin_certificate(name, name, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        (folder / "ca.crt").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        public = _write_key(folder / "sa.key").public_key()
        pem, info = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        (folder / "sa.pub").write_bytes(public.public_bytes(pem, info))
        return cls(folder)

    def issue(self, file: str, common: str, *, organization: str = "", names: tuple[str, ...] = ()) -> None:
        """Write `file`.key and `file`.crt for `common`, valid for the DNS names and addresses in `names`."""
        signer = serialization.load_pem_private_key((self.folder / "ca.key").read_bytes(), password=None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        issuer = x509.load_pem_x509_certificate((self.folder / "ca.crt").read_bytes()).subject
        key = _write_key(self.folder / f"{file}.key")
        builder = _begin_certificate(_build_name(common, organization), issuer, key.public_key())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_build_general_name(name) for name in names]), critical=False
            )
        certificate = builder.sign(signer, hashes.SHA256())
        (self.folder / f"{file}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def write_kubeconfig(self, path: Path, server: str, file: str) -> None:
        """Write a kubeconfig for `server` that identifies itself by certificate `file`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(f"""\
apiVersion: v1
kind: Config
clusters:
- name: topkube
  cluster: {{server: "{server}", certificate-authority: "{self.folder / "ca.crt"}"}}
users:
- name: {file}
  user: {{client-certificate: "{self.folder / file}.crt", client-key: "{self.folder / file}.key"}}
contexts:
- name: topkube
  context: {{cluster: topkube, user: {file}}}
current-context: topkube
""")


def _build_general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
