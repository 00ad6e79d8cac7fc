"""The remote store: lists a dataset and reads ranges of its objects, by any protocol of fsspec.

Every read ends: with the bytes, after retries with growing pauses that go on where the last try ended, or with
StoreError. An object whose version is no longer the listed one is never mixed with older bytes.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

import fsspec
from fsspec.asyn import sync

from topkube.data.index_pages import json_index, links
from topkube.data.listing import Listing, Object, read_manifest
from topkube.data.patience import Patience, failure, worth_a_retry
from topkube.errors import DatasetError, StoreError

RANGE_BYTES = 4 << 20
"""Bytes of one request."""
MANIFEST = "manifest.jsonl"
_HTTP, _S3 = ("http", "https"), ("s3", "s3a")
_CONCURRENT = 16
"""Small objects under way at once."""
Write = Callable[[int, bytes], None]
"""Takes (offset, bytes)."""


class Store:
    """A dataset's address. Good in the process that made it and in its forks."""

    def __init__(self, uri: str, options: Mapping[str, Any] | None = None, patience: Patience | None = None) -> None:
        self.uri, self.patience = uri, patience or Patience()
        self.options = dict(options or {})
        self._local = threading.local()
        self.protocol = fsspec.utils.get_protocol(uri)
        self._fetched = _Count()
        manifest = uri.endswith((".jsonl", ".ndjson"))
        base = uri.rpartition("/")[0] if manifest else uri.rstrip("/")
        self.manifest_uri = uri if manifest else f"{base}/{MANIFEST}"
        self.explicit_manifest = manifest
        self.root: str = self.filesystem._strip_protocol(base)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of objects that this process has fetched."""
        return self._fetched.value

    @property
    def filesystem(self) -> Any:
        """fsspec's object for this thread's process; its loop does not survive a fork."""
        held = getattr(self._local, "filesystem", None)
        if held is not None and held[0] == os.getpid():
            return held[1]
        try:
            options = dict(self.options)
            if self.protocol in _S3:
                stall = self.patience.stall_seconds
                options.setdefault("config_kwargs", {"read_timeout": stall, "connect_timeout": stall})
            if self.protocol in _HTTP:
                options.setdefault("client_kwargs", {"timeout": _http_timeout(self.patience.stall_seconds)})
                options.setdefault("encoded", True)
            filesystem = fsspec.filesystem(self.protocol, **options)
        except ValueError as error:
            raise DatasetError(
                f"{self.uri}: {error}",
                cause="an unknown scheme",
                next_step="use file://, http(s)://, s3://, memory:// or another that fsspec has",
            ) from None
        except ImportError as error:
            extra = "s3" if self.protocol.startswith("s3") else self.protocol
            raise DatasetError(
                f"{self.uri}: {error}",
                cause="the library for this scheme is not installed",
                next_step=f"pip install 'topkube[{extra}]', or the library named above",
            ) from None
        self._local.filesystem = (os.getpid(), filesystem)
        return filesystem

    # ---- listing

    def listing(self) -> Listing:
        """All objects: from the manifest where there is one, else as the store lists them. Raises DatasetError,
        StoreError."""
        found = self._manifest()
        return found if found is not None else Listing.of(self._listed(), self.uri)

    def manifest_version(self) -> str | None:
        """The version of the manifest, None where there is none."""
        try:
            info = self._patiently(lambda: self._info(self.manifest_uri), self.manifest_uri)
        except StoreError:
            if self.explicit_manifest:
                raise
            return None
        return _version(info) or str(info.get("size"))

    def _manifest(self) -> Listing | None:
        version = self.manifest_version()
        if version is None:
            return None
        data = self._patiently(lambda: self.filesystem.cat_file(self.manifest_uri), self.manifest_uri)
        return read_manifest(io.BytesIO(data), self.manifest_uri, version)

    def _listed(self) -> list[Object]:
        if self.protocol in _HTTP:
            return self._listed_by_http()
        self.filesystem.invalidate_cache()
        details = self._patiently(lambda: self.filesystem.find(self.root, detail=True), self.uri)
        return [
            Object(name[len(self.root) :].lstrip("/"), int(info.get("size") or 0), _version(info))
            for name, info in details.items()
            if info.get("type") == "file"
        ]

    def _listed_by_http(self) -> list[Object]:
        """Index pages: JSON as nginx writes it (autoindex_format json), else the links of HTML pages."""
        base, folders = self.root.rstrip("/") + "/", [""]
        found: list[Object] = []
        unsized: list[str] = []
        while folders:
            folder = folders.pop()
            page = self._patiently(partial(self.filesystem.cat_file, base + folder), base + folder)
            entries = json_index(page)
            if entries is not None:
                for entry in entries:
                    path = folder + entry["name"]
                    if entry["type"] == "directory":
                        folders.append(path + "/")
                    elif entry["name"] != MANIFEST:
                        found.append(Object(path, int(entry["size"]), str(entry["mtime"])))
                continue
            for link in links(page, urlsplit(base + folder).path):
                path = folder + link
                if path.endswith("/"):
                    folders.append(path)
                elif link != MANIFEST:
                    unsized.append(path)
        infos = sync(self.filesystem.loop, self._infos, [base + _quoted(name) for name in unsized])
        found += [
            Object(name, -1 if info.get("size") is None else int(info["size"]), _version(info))
            for name, info in zip(unsized, infos, strict=True)
        ]
        return found

    def _info(self, path: str) -> dict[str, Any]:
        self.filesystem.invalidate_cache()
        info: dict[str, Any] = self.filesystem.info(path)
        return info

    # ---- reading

    def url(self, path: str) -> str:
        """The object's address as fsspec takes it."""
        name = _quoted(path) if self.protocol in _HTTP else path
        return f"{self.root.rstrip('/')}/{name}"

    def read(self, one: Object, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes start to stop of an object."""
        stop = one.size if stop is None else stop
        parts: dict[int, bytes] = {}
        self.fetch(one, lambda offset, data: parts.__setitem__(offset, data), start, stop)
        return b"".join(parts[offset] for offset in sorted(parts))

    def fetch(
        self,
        one: Object,
        write: Write,
        start: int = 0,
        stop: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Hands bytes start to stop of an object to `write(offset, bytes)` in order, in ranges. Raises StoreError,
        Changed."""
        url, stop = self.url(one.path), one.size if stop is None else stop
        while start < stop:
            end = min(start + RANGE_BYTES, stop)
            data = self._patiently(partial(self._range, one, url, start, end), url)
            self._fetched.add(len(data))
            write(start, data)
            start += len(data)
            if progress is not None:
                progress(len(data))

    def fetch_many(
        self, objects: Sequence[Object], offsets: Sequence[int], write: Write, progress: Callable[[int], None]
    ) -> None:
        """Whole small objects at once; objects[i] is written at offsets[i]."""
        if not self._asynchronous:
            for one, offset in zip(objects, offsets, strict=True):
                self.fetch(one, partial(_write_at, write, offset), progress=progress)
            return
        sync(self.filesystem.loop, self._all, objects, offsets, write, progress)

    async def _all(
        self, objects: Sequence[Object], offsets: Sequence[int], write: Write, progress: Callable[[int], None]
    ) -> None:
        waiting = iter(zip(objects, offsets, strict=True))

        async def one_after_the_other() -> None:
            for one, offset in waiting:
                url, at = self.url(one.path), 0
                while at < one.size:
                    end = min(at + RANGE_BYTES, one.size)
                    data = await self._async_range(one, url, at, end)
                    self._fetched.add(len(data))
                    write(offset + at, data)
                    at += len(data)
                    progress(len(data))

        await _until_one_fails([one_after_the_other() for _ in range(min(_CONCURRENT, len(objects)))])

    async def _async_range(self, one: Object, url: str, start: int, end: int) -> bytes:
        data: bytes = await self._asked(partial(self._ask, one, url, start, end), url)
        return data

    async def _ask(self, one: Object, url: str, start: int, end: int) -> bytes:
        """One try of an asynchronous file system. Where the protocol knows conditions, one that bytes of another
        version do not meet goes along: two versions never mix."""
        filesystem = self.filesystem
        if self.protocol in _S3:
            bucket, key, version = filesystem.split_path(url)
            asked = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
            asked |= {"VersionId": version} if version else {}
            asked |= {"IfMatch": one.version} if one.version.startswith('"') else {}
            answer = await filesystem._call_s3("get_object", **asked)
            async with answer["Body"] as body:
                return _cut(await body.read(), one, start, end)
        whole = start == 0 and end == one.size
        given: dict[str, Any] = {"start": None if whole else start, "end": None if whole else end}
        if self.protocol in _HTTP:
            given["headers"] = _condition(one.version)
        return _cut(await filesystem._cat_file(url, **given), one, start, end)

    async def _asked(self, ask: Callable[[], Any], url: str) -> Any:
        """As `_patiently`, on fsspec's loop."""
        pause = self.patience.pause_seconds
        for turn in range(self.patience.retries + 1):
            try:
                return await asyncio.wait_for(ask(), self.patience.stall_seconds * 2)
            except Exception as error:
                if turn == self.patience.retries or not worth_a_retry(error):
                    raise failure(error, url, turn) from error
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause *= 2
        raise AssertionError

    def _range(self, one: Object, url: str, start: int, end: int) -> bytes:
        if self._asynchronous:
            data: bytes = sync(self.filesystem.loop, self._ask, one, url, start, end)
            return data
        return _cut(self.filesystem.cat_file(url, start=start, end=end), one, start, end)

    @property
    def _asynchronous(self) -> bool:
        return bool(self.filesystem.async_impl) and hasattr(self.filesystem, "_cat_file")

    def _patiently(self, read: Callable[[], Any], what: str) -> Any:
        pause = self.patience.pause_seconds
        for turn in range(self.patience.retries + 1):
            try:
                return read()
            except Exception as error:
                if turn == self.patience.retries or not worth_a_retry(error):
                    raise failure(error, what, turn) from error
                time.sleep(pause * random.uniform(0.5, 1.5))
                pause *= 2
        raise AssertionError

    async def _infos(self, urls: list[str]) -> list[dict[str, Any]]:
        """Size and version of many objects."""
        infos: list[dict[str, Any]] = [{}] * len(urls)
        waiting = iter(enumerate(urls))

        async def one_after_the_other() -> None:
            for at, url in waiting:
                infos[at] = await self._asked(partial(self.filesystem._info, url), url)

        await _until_one_fails([one_after_the_other() for _ in range(_CONCURRENT)])
        return infos

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self.uri, "options": self.options, "patience": self.patience}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


@dataclass
class _Count:
    value: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, more: int) -> None:
        self.value += more


def _write_at(write: Write, start: int, offset: int, data: bytes) -> None:
    write(start + offset, data)


def _http_timeout(stall_seconds: float) -> Any:
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=stall_seconds, sock_read=stall_seconds)


def _condition(version: str) -> dict[str, str]:
    """The HTTP header that lets only this version pass: by its etag, or by the time that an index page gave."""
    if version.startswith('"'):
        return {"If-Match": version}
    return {"If-Unmodified-Since": version} if version.endswith(" GMT") else {}


def _cut(data: bytes, one: Object, start: int, end: int) -> bytes:
    """The range, also from a server that knows no ranges and sends the whole object."""
    if len(data) == end - start:
        return data
    if len(data) == one.size:
        return data[start:end]
    raise OSError(f"{one.path}: {len(data)} bytes came where {end - start} were asked for")


async def _until_one_fails(coroutines: list[Any]) -> None:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _version(info: Mapping[str, Any]) -> str:
    for name in ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "created"):
        if info.get(name):
            return str(info[name])
    return ""


def _quoted(path: str) -> str:
    return quote(path)
