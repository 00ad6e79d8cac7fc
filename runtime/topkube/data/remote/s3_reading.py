"""Checks of the responses of S3 against the request and the listing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

from topkube.data.remote.http.reading import Reading, Unfit
from topkube.data.remote.object_version import build_changed_error


def check_object(response: Mapping[str, Any], reading: Reading, start: int, end: int) -> None:
    """Compare the response of GetObject for bytes start to end with the listing. Raises Changed, StoreError, Unfit."""
    content_range, size = str(response.get("ContentRange") or ""), reading.listed.size
    if content_range:
        if content_range.partition("/")[0] != f"bytes {start}-{end - 1}":
            raise Unfit(f"the store sent the range {content_range}; bytes {start}-{end - 1} were requested")
        if content_range.partition("/")[2] not in ("*", str(size)):
            raise build_changed_error(
                reading.url, f"it has {content_range.partition('/')[2]} bytes, the listing has {size:,}"
            )
    elif response.get("ContentLength", end - start) != end - start:
        raise Unfit(f"the store sent {response['ContentLength']:,} bytes; {end - start:,} were requested")
    headers = {"ETag": str(response.get("ETag") or "")}
    if isinstance(last_modified := response.get("LastModified"), datetime):
        headers["Last-Modified"] = format_datetime(last_modified.astimezone(UTC), usegmt=True)
    reading.confirm(headers)
