"""The remote store: lists a dataset and reads ranges of its objects, with any protocol of fsspec.

A read is retried range by range, with growing pauses, and ends with the bytes or with StoreError. If an object has
changed since the listing, its bytes are never mixed with older bytes.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import fsspec
from fsspec.asyn import sync

from topkube.data.remote.addresses import check_address
from topkube.data.remote.http_connection import NotPlain
from topkube.data.remote.http_index import walk_index_pages
from topkube.data.remote.http_reading import Reading, Unfit, describe, read_page, read_range
from topkube.data.remote.http_sockets import SocketClient
from topkube.data.remote.listing import Listing, RemoteObject, read_manifest
from topkube.data.remote.object_version import build_condition, changed_error, is_same_version, read_info_version
from topkube.data.remote.retry import Absent, Patience, build_final_error, is_worth_a_retry
from topkube.data.remote.s3_reading import check_object
from topkube.data.remote.transfer import Transfer, Write
from topkube.errors import DatasetError
from topkube.installation import install_command

RANGE_BYTES = 4 << 20
"""The most bytes of one request."""
MANIFEST = "manifest.jsonl"
_HTTP, _S3, _LOCAL = ("http", "https"), ("s3", "s3a"), ("file", "local")
_CONCURRENT = 16
"""The number of small objects that are fetched at the same time."""


class ObjectStore:
    """The store of the dataset at `uri`. It works in the process that created it and in forks of that process."""

    def __init__(self, uri: str, options: Mapping[str, Any] | None = None, patience: Patience | None = None) -> None:
        check_address(uri)
        self.uri, self.patience = uri, patience or Patience()
        self.options = dict(options or {})
        self._local = threading.local()
        self._is_plain = True
        """False if the server or the options need the HTTP library."""
        self.protocol = fsspec.utils.get_protocol(uri)
        manifest = uri.endswith((".jsonl", ".ndjson"))
        base = uri.rpartition("/")[0] if manifest else uri.rstrip("/")
        self.manifest_uri = uri if manifest else f"{base}/{MANIFEST}"
        self.explicit_manifest = manifest
        self.root: str = self.filesystem._strip_protocol(base)

    @property
    def filesystem(self) -> Any:
        """The fsspec file system of this thread. A fork gets a new one, because its event loop does not survive."""
        held = getattr(self._local, "filesystem", None)
        if held is not None and held[0] == os.getpid():
            return held[1]
        try:
            options = dict(self.options)
            if self.protocol in _S3:
                stall = self.patience.stall_seconds
                options.setdefault("config_kwargs", {"read_timeout": stall, "connect_timeout": stall})
            if self.protocol in _HTTP:
                options.setdefault("client_kwargs", {"timeout": _build_timeout(self.patience.stall_seconds)})
                options.setdefault("encoded", True)
            filesystem = fsspec.filesystem(self.protocol, **options)
        except ValueError as error:
            raise DatasetError(
                f"{self.uri}: {error}",
                cause="the scheme of the address is unknown",
                next_step="use file://, http(s)://, s3://, memory:// or another scheme of fsspec",
            ) from None
        except ImportError as error:
            extra = "s3" if self.protocol.startswith("s3") else self.protocol
            raise DatasetError(
                f"{self.uri}: {error}",
                cause="the library for this scheme is not installed",
                next_step=f"{install_command(extra)}, or install the library named above",
            ) from None
        self._local.filesystem = (os.getpid(), filesystem)
        return filesystem

    # ---- listing

    def listing(self) -> Listing:
        """Return all objects: those of the manifest if there is one, else those that the store lists. Raises
        DatasetError, StoreError."""
        listing = self._read_manifest()
        return listing if listing is not None else Listing.of(self._list_objects(), self.uri)

    def read_manifest_version(self) -> str | None:
        """Return the version of the manifest, None if there is no manifest. Raises StoreError if the store does not
        answer, because a listing without the manifest would lack its checksums."""
        described = self._describe_manifest()
        return None if described is None else described[0] or str(described[1])

    def _describe_manifest(self) -> tuple[str, int | None] | None:
        """Return version and size of the manifest; None if there is no manifest."""
        url = self.manifest_uri
        try:
            version, size, is_page = self._call_patiently(
                partial(self._describe, url), partial(self._async_describe, url), url
            )
        except Absent:
            if self.explicit_manifest:
                raise
            return None
        if is_page and not self.explicit_manifest:  # some servers have a page for every address
            return None
        return version, size

    def _read_manifest(self) -> Listing | None:
        described = self._describe_manifest()
        if described is None:
            return None
        version, size = described
        if size is None:
            raise DatasetError(
                f"the size of {self.manifest_uri} is unknown",
                cause="the server does not send Content-Length for it",
                next_step="serve the manifest as a plain file",
            )
        data = bytearray(size)

        def receive(offset: int, part: Any) -> None:
            data[offset : offset + len(part)] = part

        manifest = RemoteObject(self.manifest_uri.rpartition("/")[2], size, version)
        self._fetch([Transfer(Reading(manifest, self.manifest_uri), 0, size)], receive, None)
        return read_manifest(io.BytesIO(data), self.manifest_uri, version or str(size))

    def _list_objects(self) -> list[RemoteObject]:
        if self.protocol in _HTTP:
            return self._list_by_http()
        self.filesystem.invalidate_cache()
        details = self._call_patiently(self._find_local if self.protocol in _LOCAL else self._find, None, self.uri)
        return [
            RemoteObject(name[len(self.root) :].lstrip("/"), int(info.get("size") or 0), read_info_version(info))
            for name, info in details.items()
            if info.get("type") == "file"
        ]

    def _find(self) -> dict[str, Any]:
        details: dict[str, Any] = self.filesystem.find(self.root, detail=True)
        return details

    def _find_local(self) -> dict[str, Any]:
        """List files like `_find`, but raise an error for a folder that cannot be read. `_find` skips such a folder."""
        details, folders = {}, [self.root]
        while folders:
            folder = folders.pop()
            for info in self.filesystem.ls(folder, detail=True):
                if info["type"] == "directory" and info["name"] != folder:
                    folders.append(info["name"])
                else:
                    details[info["name"]] = info
        return details

    def _list_by_http(self) -> list[RemoteObject]:
        """List objects by index pages: JSON pages of nginx (autoindex_format json), or the links of HTML pages."""
        base = self.root.rstrip("/") + "/"

        def read(address: str) -> bytes:
            page: bytes = self._call_patiently(None, partial(read_page, self.filesystem, address), address)
            return page

        objects, unsized = walk_index_pages(read, base, self.uri, MANIFEST)
        described = sync(self.filesystem.loop, self._async_describe_all, [base + _quote(name) for name in unsized])
        return objects + [
            RemoteObject(name, -1 if size is None else size, version)
            for name, (version, size, _) in zip(unsized, described, strict=True)
        ]

    def _describe(self, url: str) -> tuple[str, int | None, bool]:
        """Return version, size (None if unknown), and True for an HTML page."""
        self.filesystem.invalidate_cache()
        info = self.filesystem.info(url)
        return read_info_version(info), info.get("size"), False

    async def _async_describe(self, url: str) -> tuple[str, int | None, bool]:
        if self.protocol in _HTTP:
            description = await describe(self.filesystem, url)
            return description["version"], description["size"], description["page"]
        self.filesystem.invalidate_cache()
        info = await self.filesystem._info(url)
        return read_info_version(info), info.get("size"), False

    async def _async_describe_all(self, urls: list[str]) -> list[tuple[str, int | None, bool]]:
        described: list[tuple[str, int | None, bool]] = [("", None, False)] * len(urls)
        waiting = iter(enumerate(urls))

        async def take_objects() -> None:
            for at, url in waiting:
                described[at] = await self._ask_patiently(partial(self._async_describe, url), url)

        await _run_until_failure([take_objects() for _ in range(_CONCURRENT)])
        return described

    # ---- reading

    def url(self, path: str) -> str:
        """Return the object's address in the form that fsspec takes."""
        name = _quote(path) if self.protocol in _HTTP else path
        return f"{self.root.rstrip('/')}/{name}"

    def read(self, remote_object: RemoteObject, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes start to stop of an object."""
        parts: list[bytes] = []
        self.fetch(remote_object, lambda _, data: parts.append(bytes(data)), start, stop)
        return b"".join(parts)

    def fetch(
        self,
        remote_object: RemoteObject,
        write: Write,
        start: int = 0,
        stop: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Read bytes start to stop of an object in ranges, and pass the bytes in order to `write(offset, bytes)`, each
        byte once. `progress` gets the number of bytes. Raises StoreError, Changed."""
        reading = Reading(remote_object, self.url(remote_object.path))
        self._fetch([Transfer(reading, start, remote_object.size if stop is None else stop)], write, progress)

    def fetch_many(
        self, objects: Sequence[RemoteObject], offsets: Sequence[int], write: Write, progress: Callable[[int], None]
    ) -> None:
        """Read many small objects at the same time. objects[i] is written at offsets[i], each byte once. Raises
        StoreError, Changed."""
        self._fetch(
            [
                Transfer(Reading(remote_object, self.url(remote_object.path)), 0, remote_object.size, offset)
                for remote_object, offset in zip(objects, offsets, strict=True)
            ],
            write,
            progress,
        )

    def can_check(self, remote_object: RemoteObject) -> bool:
        """Return True if the object is checked when it is read alone: the listing has its checksum, or the store sends
        only its listed version."""
        return bool(remote_object.checksum) or self.can_check_range(remote_object)

    def can_check_range(self, remote_object: RemoteObject) -> bool:
        """Return True if a range of the object is checked: the store sends only the listed version."""
        return self._conditional and bool(build_condition(remote_object.version))

    def _fetch(self, transfers: Sequence[Transfer], write: Write, progress: Callable[[int], None] | None) -> None:
        progress = progress or _ignore
        remaining = transfers
        if (client := self._socket_client()) is not None:
            try:
                client.read(iter(transfers), _CONCURRENT, write, progress)
                remaining = []
            except NotPlain:  # from now on the HTTP library reads everything
                self._is_plain = False
                remaining = [transfer for transfer in transfers if transfer.at < transfer.stop or transfer.held]
        for transfer in remaining:
            transfer.rewind()
        if len(remaining) > 1 and self._asynchronous:
            sync(self.filesystem.loop, self._fetch_at_the_same_time, remaining, write, progress)
        else:
            for transfer in remaining:
                self._fetch_ranges(transfer, write, progress)
        for transfer in transfers:
            transfer.check()

    def _socket_client(self) -> SocketClient | None:
        """Return this thread's client for a plain HTTP server; None for other stores, and if the options change more
        than the headers."""
        if self.protocol not in _HTTP or not self._is_plain:
            return None
        held: tuple[int, SocketClient] | None = getattr(self._local, "client", None)
        if held is None or held[0] != os.getpid():  # a fork must not use the connections of its parent
            if not set(self.options) <= {"headers"} or fsspec.config.conf.get(self.protocol):
                self._is_plain = False
                return None
            try:
                client = SocketClient(self.root, self.options.get("headers", {}), self.patience)
            except NotPlain:
                self._is_plain = False
                return None
            held = self._local.client = (os.getpid(), client)
        held[1].range_bytes = RANGE_BYTES
        return held[1]

    def _fetch_ranges(self, transfer: Transfer, write: Write, progress: Callable[[int], None]) -> None:
        reading = transfer.reading
        while transfer.at < transfer.stop:
            start, end = transfer.at, transfer.choose_range_end(RANGE_BYTES)
            data = self._call_patiently(
                partial(self._range, reading, start, end), partial(self._async_range, reading, start, end), reading.url
            )
            transfer.add(data, end, write, progress)
            transfer.finish_range()
        if not self._conditional:
            self._call_patiently(partial(self._confirm, reading), partial(self._async_confirm, reading), reading.url)

    async def _fetch_at_the_same_time(
        self, transfers: Sequence[Transfer], write: Write, progress: Callable[[int], None]
    ) -> None:
        waiting = iter(transfers)

        async def take_transfers() -> None:
            for transfer in waiting:
                reading = transfer.reading
                while transfer.at < transfer.stop:
                    end = transfer.choose_range_end(RANGE_BYTES)
                    data = await self._ask_patiently(partial(self._async_range, reading, transfer.at, end), reading.url)
                    transfer.add(data, end, write, progress)
                    transfer.finish_range()
                if not self._conditional:
                    await self._ask_patiently(partial(self._async_confirm, reading), reading.url)

        await _run_until_failure([take_transfers() for _ in range(min(_CONCURRENT, len(transfers)))])

    async def _async_range(self, reading: Reading, start: int, end: int) -> bytes:
        """Read a range once, with an asynchronous file system. For HTTP and S3 the request has a condition on the
        version, and the response is compared with the listing, so two versions are never mixed."""
        filesystem, remote_object, url = self.filesystem, reading.listed, reading.url
        if self.protocol in _HTTP:
            return await read_range(filesystem, reading, start, end)
        if self.protocol in _S3:
            bucket, key, version = filesystem.split_path(url)
            arguments = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
            arguments |= {"VersionId": version} if version else {}
            arguments |= {"IfMatch": remote_object.version} if remote_object.version.startswith('"') else {}
            response = await filesystem._call_s3("get_object", **arguments)
            async with response["Body"] as body:
                check_object(response, reading, start, end)
                return _check_length(await body.read(), start, end)
        whole = start == 0 and end == remote_object.size
        byte_range: dict[str, Any] = {"start": None if whole else start, "end": None if whole else end}
        return _check_length(await filesystem._cat_file(url, **byte_range), start, end)

    def _range(self, reading: Reading, start: int, end: int) -> bytes:
        return _check_length(self.filesystem.cat_file(reading.url, start=start, end=end), start, end)

    @property
    def _conditional(self) -> bool:
        """True if every response is compared with the listing. Otherwise the object is described again after a read."""
        return self.protocol in (*_HTTP, *_S3)

    def _confirm(self, reading: Reading) -> None:
        _check_description(reading, *self._describe(reading.url))

    async def _async_confirm(self, reading: Reading) -> None:
        _check_description(reading, *await self._async_describe(reading.url))

    async def _ask_patiently(self, ask: Callable[[], Any], what: str) -> Any:
        """Await `ask` with retries, on the loop of fsspec. A try ends after twice `stall_seconds`, even if bytes
        arrive."""
        pause = self.patience.pause_seconds
        for attempt in range(self.patience.retries + 1):
            try:
                return await asyncio.wait_for(ask(), self.patience.stall_seconds * 2)
            except Exception as error:
                if attempt == self.patience.retries or not is_worth_a_retry(error):
                    raise build_final_error(error, what, attempt) from error
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause *= 2
        raise AssertionError

    @property
    def _asynchronous(self) -> bool:
        return bool(self.filesystem.async_impl) and hasattr(self.filesystem, "_cat_file")

    def _call_patiently(self, read: Callable[[], Any] | None, ask: Callable[[], Any] | None, what: str) -> Any:
        """Call `ask` on the loop of an asynchronous file system, else `read` in this thread, with retries. Only `ask`
        has a deadline."""
        if ask is not None and (read is None or self._asynchronous):
            return sync(self.filesystem.loop, self._ask_patiently, ask, what)
        assert read is not None
        pause = self.patience.pause_seconds
        for attempt in range(self.patience.retries + 1):
            try:
                return read()
            except Exception as error:
                if attempt == self.patience.retries or not is_worth_a_retry(error):
                    raise build_final_error(error, what, attempt) from error
                time.sleep(pause * random.uniform(0.5, 1.5))
                pause *= 2
        raise AssertionError

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.uri, self.options, self.patience)


def _ignore(count: int) -> None:
    pass


def _build_timeout(stall_seconds: float) -> Any:
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=stall_seconds, sock_read=stall_seconds)


def _check_length(data: bytes, start: int, end: int) -> bytes:
    if len(data) != end - start:
        raise Unfit(f"{len(data):,} bytes came; {end - start:,} were requested")
    return data


def _check_description(reading: Reading, version: str, size: int | None, is_page: bool) -> None:
    remote_object = reading.listed
    if size is not None and size != remote_object.size:
        raise changed_error(reading.url, f"it has {size:,} bytes, the listing has {remote_object.size:,}")
    if not is_same_version(remote_object.version, version):
        raise changed_error(reading.url, f"its version is {version}, the listing has {remote_object.version}")


async def _run_until_failure(coroutines: list[Any]) -> None:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # no task writes after this


def _quote(path: str) -> str:
    return quote(path)
