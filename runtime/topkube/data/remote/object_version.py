"""The version of an object as text, and the comparison of a response with the listed version.

A version is a strong etag (`"abc"`), a weak etag followed by the time of the last change (`W/"abc" Sun, 06 Nov 1994
08:49:37 GMT`), that time alone, or another value of the store (a number of seconds, a date, digits). Source: RFC 9110,
section 8.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from topkube.data.remote.retry import Changed
from topkube.errors import StoreError

_VERSION = re.compile(r'(?P<weak>W/)?(?P<tag>"[^"]*")?\s*(?P<modified>\S.* GMT)?')
_SECONDS = re.compile(r"\d{1,12}\.\d{1,20}")
_DIGITS = re.compile(r"\d{13,14}(\.\d{1,6})?")
"""The digits of a date (FTP), or milliseconds (WebHDFS)."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,6})?([+-]\d\d:\d\d)?")


def read_header_version(headers: Mapping[str, str]) -> str:
    """Return the version in the headers of an HTTP response; empty if there is none."""
    tag, modified = headers.get("ETag", ""), headers.get("Last-Modified", "")
    if tag and '"' not in tag:  # some servers leave the quotes out
        tag = f'"{tag}"'
    return f"{tag} {modified}".strip() if not tag or tag.startswith("W/") else tag


def read_info_version(info: Mapping[str, Any]) -> str:
    """Return the version in the `info` of an fsspec file system about an object; empty if there is none. The mtime 0 is
    a version: reproducible images give it to all files, and each node has other values of `created`."""
    for name in (
        *("ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified"),
        *("modify", "modificationTime", "created"),  # FTP, WebHDFS, and stores without a time of the last change
    ):
        if info.get(name) not in (None, ""):
            return str(info[name])
    return ""


def build_condition(version: str) -> dict[str, str]:
    """Return the HTTP headers of a request that accepts only this version. A weak etag never matches If-Match, so the
    time of the last change is sent instead."""
    weak, tag, modified = _split(version)
    if tag and not weak:
        return {"If-Match": tag}
    return {"If-Unmodified-Since": modified} if modified else {}


def check_version(version: str, headers: Mapping[str, str], name: str) -> None:
    """Raise Changed if the headers have another version than the listing, StoreError if they have no version. Only an
    etag or an HTTP time can be compared; other versions are not checked."""
    if version.startswith('"') and headers.get("ETag") == version:
        return
    _, tag, modified = _split(version)
    for header, listed in (("ETag", tag), ("Last-Modified", modified)):
        if not listed:
            continue
        answered = headers.get(header, "")
        if not answered:
            raise StoreError(
                f"the response for {name} has no {header}; the listing has {listed}",
                cause="a proxy or a server leaves the header out, so these may be the bytes of another version",
                next_step="configure the server to send the header, or write a manifest with checksums "
                "(`topkube cache manifest --checksums`)",
            )
        if _strip_tag(answered) != _strip_tag(listed):
            raise build_changed_error(name, f"{header} is {answered}, the listing has {listed}")


def is_same_version(listed: str, current: str) -> bool:
    """Return False if both versions are of the same kind (etag, number, digits, date) and differ. Versions of different
    kinds cannot be compared and count as equal."""
    if listed == current:
        return True
    if listed.startswith('"') and current.startswith('"'):
        return False
    for kind, read in ((_SECONDS, float), (_DIGITS, float), (_DATE, datetime.fromisoformat)):
        if kind.fullmatch(listed) and kind.fullmatch(current):
            return bool(read(listed) == read(current))
    return True


def is_proven_same(listed: str, current: str) -> bool:
    """Return True if both versions are the same strong etag: the objects then have the same bytes. A time or a weak
    etag proves nothing, because two versions may share it."""
    is_weak, tag, _ = _split(listed)
    return bool(tag) and not is_weak and listed == current


def build_changed_error(name: str, difference: str) -> Changed:
    """Return the error for an object that is no longer the listed object."""
    return Changed(
        f"{name} is no longer the object that was listed ({difference})",
        cause="it was replaced while the job was running",
        next_step="start the job again; it then fetches the new object under a new key",
    )


def _split(version: str) -> tuple[bool, str, str]:
    """Return (True if the etag is weak, the etag, the time of the last change). A text is empty if it is absent."""
    if version.startswith('"') and version.find('"', 1) == len(version) - 1:  # nearly all are strong etags
        return False, version, ""
    match = _VERSION.fullmatch(version)
    if match is None or (match["weak"] and not match["tag"]):
        return False, "", ""
    return bool(match["weak"]), match["tag"] or "", match["modified"] or ""


def _strip_tag(value: str) -> str:
    return value.strip().removeprefix("W/").strip('"')
