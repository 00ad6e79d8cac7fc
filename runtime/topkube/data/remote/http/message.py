"""The heads of HTTP/1.1 messages: a strict parser for the head of a response, and the lines of a request's head.

Source: RFC 9112, sections 2 to 6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from topkube.data.remote.http.reading import Unfit
from topkube.errors import DatasetError

MOST_HEAD_BYTES = 32 << 10
"""The most bytes of the head of a response."""
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n]*)?")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
_NAMES = {
    name.lower().encode(): name
    for name in (
        "ETag",
        "Last-Modified",
        "Content-Length",
        "Content-Range",
        "Content-Type",
        "Content-Encoding",
        "Transfer-Encoding",
        "Connection",
    )
}


@dataclass
class Response:
    """Status and headers of a response. Only the headers of `_NAMES` are kept, with these names."""

    status: int
    headers: Mapping[str, str]


def parse_head(head: bytes) -> Response:
    """Return status and headers of the head of a response, without its empty line. Raises Unfit for anything that two
    readers could understand differently: folded lines, a header twice, signs or lists in a length."""
    first, *lines = head.split(b"\r\n")
    match = _STATUS.fullmatch(first)
    if match is None:
        raise Unfit(f"the response begins with {bytes(first[:40])!r}")
    headers: dict[str, str] = {"Connection": "close"} if match[1] == b"0" else {}
    seen = set()
    for line in lines:
        parts = _HEADER.fullmatch(line)
        if parts is None:
            raise Unfit(f"the response has the line {bytes(line[:40])!r} in its head")
        name = _NAMES.get(parts[1].lower())
        if name is None:
            continue
        if name in seen:
            raise Unfit(f"the response has two headers {name}")
        seen.add(name)
        headers[name] = parts[2].decode("utf-8", "surrogateescape")
    if not re.fullmatch(r"[0-9]{1,18}", headers.get("Content-Length", "0")):
        raise Unfit(f"the response has the length {headers['Content-Length'][:40]!r}")
    return Response(int(match[2]), headers)


def format_header(name: str, value: str) -> str:
    """Return the line of a header, without its line break. Raises DatasetError if the value contains a line break."""
    if re.search(r"[\r\n\0]", name + value):
        raise DatasetError(
            f"the version {value!r} of an object has a line break",
            cause="a damaged or hostile listing",
            next_step="write the manifest again (`topkube cache manifest`)",
        )
    return f"{name}: {value}"
