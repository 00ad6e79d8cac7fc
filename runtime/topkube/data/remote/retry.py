"""Retries of reads from a store: how long a read may take, which errors are retried, and the error after all
retries."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from topkube.errors import StoreError, TopKubeError

_jitter = random.SystemRandom()
"""Not the generator of the module `random`: ranks that have seeded it equally, and forks, would repeat their requests
at the same time, and the random numbers of a script would depend on failures of the store."""
_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    TopKubeError,
    ValueError,  # also an error of a certificate
    TypeError,
)


@dataclass(frozen=True)
class Patience:
    """The limits of the wait for a store. `stall_seconds`: the longest time without a byte. `retries`: the number of
    retries of a range. `pause_seconds`: the pause before the first retry; it is doubled every time, up to
    `longest_pause_seconds`, with jitter. No retry begins more than `retry_seconds` after the first failure. With the
    defaults, a store that is started again within 20 seconds ends no read, because the pauses together take about 40
    seconds, and a store that never answers is an error after three minutes."""

    retries: int = 9
    pause_seconds: float = 0.2
    stall_seconds: float = 30.0
    longest_pause_seconds: float = 10.0
    retry_seconds: float = 120.0

    def choose_pause(self, failed_tries: int) -> float:
        """Return the seconds to wait after `failed_tries` retries have failed: 0 after the first try."""
        pause = min(self.pause_seconds * 2.0 ** min(failed_tries, 60), self.longest_pause_seconds)
        return pause * _jitter.uniform(0.5, 1.5)


@dataclass
class FailedTries:
    """The failed tries of one request."""

    patience: Patience
    count: int = 0
    _first_failure: float = 0.0

    def add(self, error: Exception, what: str) -> float:
        """Count a failed try of `what`. Return the seconds to wait before the next try. Raises the final error if no
        try is left, or if a retry cannot help."""
        now = time.monotonic()
        if self.count == 0:
            self._first_failure = now
        is_over = self.count >= self.patience.retries or now - self._first_failure > self.patience.retry_seconds
        if is_over or not is_worth_a_retry(error):
            raise build_final_error(error, what, self.count) from error
        self.count += 1
        return self.patience.choose_pause(self.count - 1)


class Changed(StoreError):
    """An object is no longer the listed object."""


class Absent(StoreError):
    """An object does not exist or may not be read. Some stores do not distinguish these cases."""


class StatusError(OSError):
    """The server answered with an HTTP status of 400 or more."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def is_worth_a_retry(error: Exception) -> bool:
    """Return False for an error that another try cannot avoid: no such object, no permission, another version, a
    certificate that is not trusted, an invalid address."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec raises this for every failure of a request for the size
    if isinstance(error, _FINAL):
        return False
    status = _read_http_status(error)
    return "Credentials" not in type(error).__name__ and not (400 <= status < 500 and status not in (408, 425, 429))


def _read_http_status(error: BaseException) -> int:
    """Return the HTTP status of the response; 0 if there is none. The status is in `status` (aiohttp), in `response`
    (botocore), or in the cause of the error (s3fs)."""
    while True:
        status = getattr(error, "status", None)
        response = getattr(error, "response", None)
        if status is None and isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status, int):
            return status
        if error.__cause__ is None:
            return 0
        error = error.__cause__


def build_final_error(error: Exception, what: str, retries: int) -> TopKubeError:
    """Return the error for the reader of `what` after this number of retries."""
    if isinstance(error, TopKubeError):
        return error
    status = _read_http_status(error)
    description = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if status in (412, 416):
        return Changed(
            f"{what} is no longer the object that was listed",
            cause="it was replaced while the job was running",
            next_step="start the job again; it then fetches the new object under a new key",
        )
    name = type(error).__name__
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in name:
        return Absent(
            f"{what} may not be read ({description})",
            cause="the credentials are missing or wrong",
            next_step="set spec.dataset.secretName, or the environment variables that the store's library reads",
        )
    if isinstance(error, (FileNotFoundError, NotADirectoryError)) or status == 404:
        return Absent(
            f"{what} does not exist", cause="the address is wrong, or it was deleted", next_step="check the address"
        )
    return StoreError(
        f"{what} could not be read in {retries + 1} tries ({description})",
        cause="the store or the network is down or too slow",
        next_step="try the address with another client from the same node",
    )
