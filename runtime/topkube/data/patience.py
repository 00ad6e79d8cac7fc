"""How long a store may take, which of its failures are worth another try, and what the last one is called."""

from __future__ import annotations

from dataclasses import dataclass

from topkube.errors import StoreError


@dataclass(frozen=True)
class Patience:
    """How long a store may take. `stall_seconds`: without a byte; `retries`: further tries of one range;
    `pause_seconds`: before the first of them, doubled every time, with jitter."""

    retries: int = 5
    pause_seconds: float = 0.2
    stall_seconds: float = 30.0


class Changed(StoreError):
    """An object is not the one that was listed."""


def worth_a_retry(error: Exception) -> bool:
    """Not what will be the same the next time: no such object, no right to it, another version."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec says this of whatever fails when it asks for a size
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, StoreError)):
        return False
    status = _status(error)
    return "Credentials" not in type(error).__name__ and not (400 <= status < 500 and status not in (408, 425, 429))


def _status(error: BaseException) -> int:
    """The HTTP status that the server answered with: aiohttp has it in `status`, botocore in `response`, s3fs in what
    caused its own error. 0 where there is none."""
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


def failure(error: Exception, what: str, retries: int) -> StoreError:
    """The error that the reader of `what` gets after so many retries."""
    if isinstance(error, StoreError):
        return error
    status = _status(error)
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if status == 412:
        return Changed(
            f"{what} is no longer the object that was listed",
            cause="it was replaced while the job runs",
            next_step="start the job again; it will fetch the new object under a new key",
        )
    name = type(error).__name__
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in name:
        return StoreError(
            f"{what} may not be read ({said})",
            cause="missing or wrong credentials",
            next_step="set spec.dataset.secretName, or the environment variables that the store's library reads",
        )
    if isinstance(error, FileNotFoundError) or status == 404:
        return StoreError(f"{what} does not exist", cause="a wrong address, or it was deleted", next_step="check it")
    return StoreError(
        f"{what} could not be read, {retries + 1} tries ({said})",
        cause="the store or the network is down, or too slow",
        next_step="try the address with another client from the same node",
    )
