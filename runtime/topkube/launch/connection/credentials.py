"""The credentials of launcher and workers: certificate, key and tokens, and TLS that trusts a single certificate."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from topkube.errors import LaunchError
from topkube.launch.contract import CERTIFICATE_FILE, KEY_FILE, OPERATOR_TOKEN_FILE, TOKEN_FILE, TOKEN_KEY_FILE


@dataclass(frozen=True)
class LauncherCredentials:
    """The credentials of the launcher."""

    tls: ssl.SSLContext
    token_key: str
    operator_token: str

    @classmethod
    def load(cls, directory: Path) -> LauncherCredentials:
        """Read the files in `directory`. Raises LaunchError, which names the file that is missing or invalid."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        for name in (CERTIFICATE_FILE, KEY_FILE):
            _read_text(directory, name)
        try:
            context.load_cert_chain(directory / CERTIFICATE_FILE, directory / KEY_FILE)
        except ssl.SSLError as error:
            raise _build_error(directory / KEY_FILE, f"{error.reason or error}") from None
        return cls(context, _read_text(directory, TOKEN_KEY_FILE), _read_text(directory, OPERATOR_TOKEN_FILE))


@dataclass(frozen=True)
class WorkerCredentials:
    """The credentials of a worker: the certificate that it trusts, and its own token."""

    tls: ssl.SSLContext
    token: str

    @classmethod
    def load(cls, directory: Path) -> WorkerCredentials:
        """Read the files in `directory`. Raises LaunchError, which names the file that is missing or invalid."""
        return cls(build_pinned_context(directory / CERTIFICATE_FILE), _read_text(directory, TOKEN_FILE))


def build_pinned_context(certificate: Path) -> ssl.SSLContext:
    """Return a client's TLS context that accepts only this certificate, whatever names and addresses it contains."""
    text = _read_text(certificate.parent, certificate.name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=text)
    except ssl.SSLError as error:
        raise _build_error(certificate, f"{error.reason or error}") from None
    return context


def _read_text(directory: Path, name: str) -> str:
    try:
        text = (directory / name).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise _build_error(directory / name, str(reason)) from None
    if not text:
        raise _build_error(directory / name, "it is empty")
    return text


def _build_error(path: Path, reason: str) -> LaunchError:
    return LaunchError(
        f"the credentials file {path} is invalid: {reason}",
        exit_code=2,
        cause="the job's Secret is not mounted, or was changed by hand",
        next_step="delete the job's Secret, NAME-credentials: the operator creates it again",
    )
