"""Download one archive from an object store or a web server, within limits, and check it against its checksum."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from topkube.data.remote.object_store import ObjectStore
from topkube.data.remote.retry import Absent, Patience, build_final_error, is_worth_a_retry
from topkube.errors import SourceError, TopKubeError
from topkube.job import ArchiveSource
from topkube.job.fields.failure_policy import SOURCE_UNAVAILABLE
from topkube.source.archive import MOST_BYTES, check_digest

LONGEST_SECONDS = 3600.0
"""The limit of a download with all its retries, even if bytes arrive."""
_READ_BYTES = 1 << 20


def download_archive(source: ArchiveSource, path: Path, patience: Patience | None = None) -> None:
    """Write the archive to `path`.

    Raises SourceError if the store does not return it, if it exceeds the limits, or if it has another checksum.
    Redirects are followed up to the limit of the store's library (10 for HTTP): the checksum decides what is accepted.
    """
    patience = patience or Patience()
    deadline = time.monotonic() + LONGEST_SECONDS
    for attempt in range(patience.retries + 1):
        try:
            digest = _download_once(source.uri, path, patience, deadline)
            break
        except Exception as error:
            if attempt == patience.retries or not is_worth_a_retry(error) or time.monotonic() > deadline:
                raise _translate_error(build_final_error(_find_cause(error), source.uri, attempt)) from error
            time.sleep(patience.choose_pause(attempt))
    check_digest(digest, source.sha256, source.uri, "spec.source.archive.sha256")


def _download_once(uri: str, path: Path, patience: Patience, deadline: float) -> str:
    """Download the archive, without retries. Return its checksum."""
    store = ObjectStore(uri, patience=patience)
    digest, total = hashlib.sha256(), 0
    options: dict[str, Any] = {"block_size": 0} if store.protocol in ("http", "https") else {}
    with store.filesystem.open(store.root, "rb", **options) as stream, path.open("wb") as target:
        while data := stream.read(_READ_BYTES):
            total += len(data)
            if total > MOST_BYTES:
                raise SourceError(
                    f"{uri} has more than {MOST_BYTES >> 20:,} MiB",
                    cause="it contains data besides the code, or the address is that of something else",
                    next_step="pack the code only; put data into spec.dataset",
                )
            if time.monotonic() > deadline:
                raise SourceError(
                    f"{uri} did not arrive within {LONGEST_SECONDS:g} s",
                    reason=SOURCE_UNAVAILABLE,
                    cause="the store or the network is too slow",
                    next_step="put the archive on a store near the cluster",
                )
            digest.update(data)
            target.write(data)
    return digest.hexdigest()


def _find_cause(error: Exception) -> Exception:
    """Return the error that caused `error`. fsspec raises FileNotFoundError also if the server does not answer."""
    while isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _translate_error(error: TopKubeError) -> SourceError:
    """Return the error of the data layer in the terms of the source."""
    if isinstance(error, SourceError):
        return error
    next_step = "try the address with another client from the same node"
    if isinstance(error, Absent):
        next_step = "check spec.source.archive.uri, and set spec.source.archive.secretName to a Secret with credentials"
    elif error.next_step and "spec.dataset" not in error.next_step:
        next_step = error.next_step
    return SourceError(error.what, reason=SOURCE_UNAVAILABLE, cause=error.cause, next_step=next_step)
