"""Reads over HTTP. Status, version, range, length, content type and encoding of every response are compared with the
listing before a byte of the response is used."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from topkube.data.remote.listing import RemoteObject
from topkube.data.remote.object_version import build_changed_error, build_condition, check_version, read_header_version
from topkube.errors import DatasetError, StoreError

PAGE_BYTES = 64 << 20
"""The most bytes of an index page."""
_CHUNK_BYTES = 1 << 20
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_PAGES = ("text/html", "application/xhtml+xml")
_PAGE_NAMES = (".html", ".htm", ".xhtml", "/")


class Unfit(OSError):
    """A response does not match its request. Another try may succeed."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.EIO, what)

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass
class Reading:
    """An object that is read in several ranges. All ranges must come from the same version, even if the listing has no
    version."""

    listed: RemoteObject
    url: str
    version: str = field(default="", init=False)

    def confirm(self, headers: Mapping[str, str]) -> None:
        """Store the version of the first response. Raise Changed or StoreError if a later response has another version,
        or if the listing names another."""
        check_version(self.listed.version, headers, self.url)
        version = read_header_version(headers)
        if self.version and version != self.version:
            raise build_changed_error(
                self.url, f"its ranges come from {self.version} and {version or 'an unknown version'}"
            )
        self.version = version


async def read_range(filesystem: Any, reading: Reading, start: int, end: int) -> bytes:
    """Return bytes `start` to `end` - 1 of the object. Raises Changed, StoreError, Unfit, and the errors of aiohttp."""
    remote_object, url = reading.listed, reading.url
    headers = build_condition(remote_object.version)
    if not (start == 0 and end == remote_object.size):
        headers["Range"] = f"bytes={start}-{end - 1}"
    async with _open_response(filesystem, "GET", url, headers) as response:
        check_content(response.headers, url)
        skipped = check_range(response, reading, start, end)
        reading.confirm(response.headers)
        while skipped:
            count = min(skipped, _CHUNK_BYTES)
            await response.content.readexactly(count)
            skipped -= count
        data: bytes = await response.content.readexactly(end - start)
        if (response.status == 206 or end == remote_object.size) and await response.content.read(1):
            raise Unfit(f"the server sent more than the {end - start:,} requested bytes")
        return data


def check_range(response: Any, reading: Reading, start: int, end: int) -> int:
    """Check status, range and length of a response for bytes `start` to `end` - 1. Return how many bytes of the body
    come before `start`: 0, or `start` if the server sends the whole object. Raises Changed, Unfit."""
    size, length = reading.listed.size, response.headers.get("Content-Length")
    if response.status == 206:
        content_range = response.headers.get("Content-Range", "")
        match = _RANGE.fullmatch(content_range)
        if match is None or (int(match[1]), int(match[2]) + 1) != (start, end):
            sent = content_range or "a response without Content-Range"
            raise Unfit(f"the server sent {sent}; bytes {start}-{end - 1} were requested")
        if match[3] != "*" and int(match[3]) != size:
            raise build_changed_error(reading.url, f"it has {int(match[3]):,} bytes, the listing has {size:,}")
        if length is not None and length != str(end - start):
            raise Unfit(f"the server sent {length} bytes for a range of {end - start}")
        return 0
    if response.status != 200:
        raise Unfit(f"the server sent the status {response.status}")
    if length is not None and length != str(size):  # the whole object
        raise build_changed_error(reading.url, f"it has {length} bytes, the listing has {size:,}")
    return start


def check_content(headers: Mapping[str, str], url: str) -> None:
    """Raise StoreError for a body that was compressed in transit, Unfit for an HTML page in place of an object."""
    encoding = headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise StoreError(
            f"the server sent {url} with Content-Encoding: {encoding}",
            cause="the server or a proxy compresses files although the request does not allow it; lengths and ranges "
            "then refer to the compressed bytes",
            next_step="switch compression off for these files (nginx: `gzip off;`; object stores: remove the object's "
            "Content-Encoding metadata)",
        )
    if is_page(headers) and not url.endswith(_PAGE_NAMES):
        raise Unfit("the server sent an HTML page in place of the object: an error, or the login page of a network")


def is_page(headers: Mapping[str, str]) -> bool:
    """Return True if the headers belong to an HTML page."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower() in _PAGES


async def read_page(filesystem: Any, url: str) -> bytes:
    """Return an index page. Raises DatasetError if it has more than PAGE_BYTES."""
    async with _open_response(filesystem, "GET", url, {}) as response:
        check_content(response.headers, url if url.endswith("/") else f"{url}/")  # a name that ends with / may be HTML
        page = bytearray()
        while part := await response.content.read(_CHUNK_BYTES):
            page += part
            if len(page) > PAGE_BYTES:
                raise DatasetError(
                    f"the index page {url} has more than {PAGE_BYTES:,} bytes",
                    cause="a folder with millions of files, or not an index page",
                    next_step="write a manifest for the dataset (`topkube cache manifest`)",
                )
        return bytes(page)


class ObjectDescription(NamedTuple):
    """What a store reports about an object. `size` is None if the store does not send it. `is_page`: the server sends
    an HTML page; always False for stores that do not report this."""

    version: str
    size: int | None
    is_page: bool = False


async def describe_object(filesystem: Any, url: str) -> ObjectDescription:
    """Return the description of an object. Its size is unknown if the server sends the object compressed."""
    for method in ("HEAD", "GET"):
        try:
            async with _open_response(filesystem, method, url, {}) as response:
                is_encoded = response.headers.get("Content-Encoding", "identity") not in ("", "identity")
                length = response.headers.get("Content-Length", "")
                size = int(length) if length.isdigit() and not is_encoded else None
                if size is None and method == "HEAD":
                    continue
                return ObjectDescription(read_header_version(response.headers), size, is_page(response.headers))
        except Exception as error:
            if method == "HEAD" and getattr(error, "status", 0) in (400, 403, 405, 501):  # some servers refuse HEAD
                continue
            raise
    raise AssertionError


@contextlib.asynccontextmanager
async def _open_response(filesystem: Any, method: str, url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    options = dict(filesystem.kwargs)
    options["headers"] = {**options.get("headers", {}), "Accept-Encoding": "identity", **headers}
    session = await filesystem.set_session()
    async with session.request(method, filesystem.encode_url(url), **options) as response:
        filesystem._raise_not_found_for_status(response, url)
        yield response
