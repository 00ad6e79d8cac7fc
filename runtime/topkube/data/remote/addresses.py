"""Checks that the addresses of datasets contain no secrets: addresses appear in the cache, messages and process
lists."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from topkube.errors import DatasetError

_LOCAL = ("", "file", "local", "memory")
_SECRET = re.compile(r"(^|[&;?_-])(sig|signature|token|key|secret|password|credential)[^=&;]*=", re.IGNORECASE)
_HIDDEN = "***"


def check_address(uri: str) -> None:
    """Raise DatasetError for an address that contains credentials. The message does not show the credentials."""
    if redact(uri) != uri:
        raise DatasetError(
            f"the address {redact(uri)} contains credentials",
            cause="it has a user and password, or a signature, which would appear in the cache, in logs and in process "
            "lists",
            next_step="move the credentials to storage_options, or to the environment variables of the store's library "
            "(spec.dataset.secretName)",
        )


def redact(uri: str) -> str:
    """Return the address without credentials."""
    return "::".join(map(_redact_part, uri.split("::")))


def _redact_part(uri: str) -> str:
    try:
        parts = urlsplit(uri)
    except ValueError:
        return uri
    if parts.scheme in _LOCAL:
        return uri
    user, at, host = parts.netloc.rpartition("@")
    if at and (":" in user or parts.scheme in ("http", "https", "s3", "s3a")):
        uri = uri.replace(f"{user}@{host}", f"{_HIDDEN}@{host}", 1)
    if parts.query and (parts.scheme in ("http", "https") or _SECRET.search(parts.query)):
        uri = uri.replace(f"?{parts.query}", f"?{_HIDDEN}", 1)
    return uri
