"""Times as Kubernetes writes them (RFC 3339, UTC)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def parse_timestamp(text: Any) -> datetime | None:
    """Return the time that RFC 3339 text names, with a time zone; None for anything else."""
    if not text:
        return None
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def format_timestamp(time: datetime) -> str:
    """Return `time` in whole seconds, for example `2026-01-31T12:00:00Z`."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_microtime(time: datetime) -> str:
    """Return `time` in microseconds, as the fields of a Lease require."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
