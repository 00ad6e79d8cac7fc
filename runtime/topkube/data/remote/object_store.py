"""The remote store: lists a dataset and reads ranges of its objects, with any protocol of fsspec.

A read is retried range by range, with growing pauses. It returns the bytes or raises StoreError. If an object has
changed since the listing, its bytes are never mixed with older bytes.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import fsspec
from fsspec.asyn import sync

from topkube.data.remote.addresses import check_address
from topkube.data.remote.http_connection import NotPlain
from topkube.data.remote.http_reading import Reading, Unfit, read_range
from topkube.data.remote.http_sockets import SocketClient
from topkube.data.remote.listing import IndexPart, Listing, RemoteObject
from topkube.data.remote.object_version import build_changed_error, build_condition, is_same_version
from topkube.data.remote.retry import Patience
from topkube.data.remote.s3_reading import check_object
from topkube.data.remote.store_access import CONCURRENT_OBJECTS, HTTP, S3, StoreAccess, run_until_failure
from topkube.data.remote.store_listing import StoreListing, find_base
from topkube.data.remote.transfer import Transfer, Write

RANGE_BYTES = 4 << 20
"""The most bytes of one request."""


class ByteRange(NamedTuple):
    """Bytes `start` to `stop` - 1 of an object."""

    remote_object: RemoteObject
    start: int
    stop: int


class ObjectStore:
    """The store of the dataset at `uri`. It works in the process that created it and in forks of that process."""

    def __init__(self, uri: str, options: Mapping[str, Any] | None = None, patience: Patience | None = None) -> None:
        check_address(uri)
        self.uri, self.patience = uri, patience or Patience()
        self.options = dict(options or {})
        self._local = threading.local()
        self._is_plain = True
        """False if the server or the options need the HTTP library."""
        self._access = StoreAccess(uri, self.options, self.patience)
        self.protocol = self._access.protocol
        self.root: str = self.filesystem._strip_protocol(find_base(uri))
        listing = self._build_listing()
        self.manifest_uri, self.index_uri = listing.manifest_uri, listing.index_uri

    @property
    def filesystem(self) -> Any:
        """The fsspec file system of this thread."""
        return self._access.filesystem

    def read_listing(self) -> Listing:
        """Return all objects: those of the manifest if there is one, else those that the store lists. Raises
        DatasetError, StoreError."""
        return self._build_listing().read()

    def read_current_listing(self) -> tuple[Listing, Listing | None]:
        """Return the objects as the store describes them now, and the listing of the manifest, None if there is no
        valid manifest. Raises DatasetError, StoreError."""
        return self._build_listing().read_current()

    def read_manifest_version(self) -> str | None:
        """Return the version of the manifest, None if there is no manifest. Raises StoreError if the store does not
        answer, because a listing without the manifest would lack its checksums."""
        return self._build_listing().read_version()

    def _build_listing(self) -> StoreListing:
        return StoreListing(self._access, self.root, self._fetch)

    def build_url(self, path: str) -> str:
        """Return the object's address in the form that fsspec takes."""
        name = quote(path) if self.protocol in HTTP else path
        return f"{self.root.rstrip('/')}/{name}"

    def read(self, remote_object: RemoteObject, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` - 1 of an object; to its end if `stop` is None."""
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
        """Read bytes `start` to `stop` - 1 of an object in ranges. Pass every byte once, and in order, to
        `write(offset, bytes)`. `progress` gets the number of bytes. Raises StoreError, Changed."""
        reading = Reading(remote_object, self.build_url(remote_object.path))
        self._fetch([Transfer(reading, start, remote_object.size if stop is None else stop)], write, progress)

    def fetch_many(
        self, objects: Sequence[RemoteObject], offsets: Sequence[int], write: Write, progress: Callable[[int], None]
    ) -> None:
        """Read many small objects at the same time. objects[i] is written at offsets[i], each byte once. Raises
        StoreError, Changed."""
        ranges = [ByteRange(remote_object, 0, remote_object.size) for remote_object in objects]
        self.fetch_ranges(ranges, offsets, write, progress)

    def fetch_ranges(
        self, ranges: Sequence[ByteRange], offsets: Sequence[int], write: Write, progress: Callable[[int], None]
    ) -> None:
        """Read many small ranges at the same time. ranges[i] is written at offsets[i], each byte once. Raises
        StoreError, Changed."""
        self._fetch(
            [
                Transfer(Reading(remote_object, self.build_url(remote_object.path)), start, stop, offset - start)
                for (remote_object, start, stop), offset in zip(ranges, offsets, strict=True)
            ],
            write,
            progress,
        )

    def read_index_parts(self, parts: Sequence[IndexPart], size: int) -> list[bytes]:
        """Return parts of the index file, which has `size` bytes. The caller compares their checksums. Raises
        StoreError, Absent, Changed."""
        index_file = RemoteObject(self.index_uri.rpartition("/")[2], size, "")
        data, offsets, transfers = bytearray(sum(part.size for part in parts)), [0], list[Transfer]()
        for part in parts:
            reading = Reading(index_file, self.index_uri)
            transfers.append(Transfer(reading, part.start, part.start + part.size, offsets[-1] - part.start))
            offsets.append(offsets[-1] + part.size)

        def receive(offset: int, piece: Any) -> None:
            data[offset : offset + len(piece)] = piece

        self._fetch(transfers, receive, None)
        return [bytes(data[start:stop]) for start, stop in itertools.pairwise(offsets)]

    def can_check(self, remote_object: RemoteObject) -> bool:
        """Return True if the object is checked when it is read alone: the listing has its checksum, or the store sends
        only its listed version."""
        return bool(remote_object.checksum) or self.can_check_range(remote_object)

    def can_check_range(self, remote_object: RemoteObject) -> bool:
        """Return True if a range of the object is checked: the store sends only the listed version."""
        return self._is_conditional and bool(build_condition(remote_object.version))

    def _fetch(self, transfers: Sequence[Transfer], write: Write, progress: Callable[[int], None] | None) -> None:
        progress = progress or _ignore
        remaining = transfers
        if (client := self._open_socket_client()) is not None:
            try:
                client.read(iter(transfers), CONCURRENT_OBJECTS, write, progress)
                remaining = []
            except NotPlain:  # from now on the HTTP library reads everything
                self._is_plain = False
                remaining = [
                    transfer for transfer in transfers if transfer.at < transfer.stop or transfer.has_held_bytes
                ]
        for transfer in remaining:
            transfer.rewind()
        if len(remaining) > 1 and self._access.is_asynchronous:
            sync(self.filesystem.loop, self._fetch_concurrently, remaining, write, progress)
        else:
            for transfer in remaining:
                self._fetch_ranges(transfer, write, progress)
        for transfer in transfers:
            transfer.check()

    def _open_socket_client(self) -> SocketClient | None:
        """Return this thread's client for a plain HTTP server; None for other stores, and if the options change more
        than the headers."""
        if self.protocol not in HTTP or not self._is_plain:
            return None
        stored: tuple[int, SocketClient] | None = getattr(self._local, "client", None)
        if stored is None or stored[0] != os.getpid():  # a fork must not use the connections of its parent
            if not set(self.options) <= {"headers"} or fsspec.config.conf.get(self.protocol):
                self._is_plain = False
                return None
            try:
                client = SocketClient(self.root, self.options.get("headers", {}), self.patience)
            except NotPlain:
                self._is_plain = False
                return None
            stored = self._local.client = (os.getpid(), client)
        stored[1].range_bytes = RANGE_BYTES
        return stored[1]

    def _fetch_ranges(self, transfer: Transfer, write: Write, progress: Callable[[int], None]) -> None:
        reading = transfer.reading
        while transfer.at < transfer.stop:
            start, end = transfer.at, transfer.choose_range_end(RANGE_BYTES)
            data = self._access.call_with_retries(
                partial(self._read_range, reading, start, end),
                partial(self._async_read_range, reading, start, end),
                reading.url,
            )
            transfer.add(data, end, write, progress)
            transfer.finish_range()
        if not self._is_conditional:
            self._access.call_with_retries(
                partial(self._confirm, reading), partial(self._async_confirm, reading), reading.url
            )

    async def _fetch_concurrently(
        self, transfers: Sequence[Transfer], write: Write, progress: Callable[[int], None]
    ) -> None:
        waiting = iter(transfers)

        async def take_transfers() -> None:
            for transfer in waiting:
                reading = transfer.reading
                while transfer.at < transfer.stop:
                    end = transfer.choose_range_end(RANGE_BYTES)
                    data = await self._access.await_with_retries(
                        partial(self._async_read_range, reading, transfer.at, end), reading.url
                    )
                    transfer.add(data, end, write, progress)
                    transfer.finish_range()
                if not self._is_conditional:
                    await self._access.await_with_retries(partial(self._async_confirm, reading), reading.url)

        await run_until_failure([take_transfers() for _ in range(min(CONCURRENT_OBJECTS, len(transfers)))])

    async def _async_read_range(self, reading: Reading, start: int, end: int) -> bytes:
        """Read a range once, with an asynchronous file system. For HTTP and S3 the request has a condition on the
        version, and the response is compared with the listing, so two versions are never mixed."""
        filesystem, remote_object, url = self.filesystem, reading.listed, reading.url
        if self.protocol in HTTP:
            return await read_range(filesystem, reading, start, end)
        if self.protocol in S3:
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

    def _read_range(self, reading: Reading, start: int, end: int) -> bytes:
        return _check_length(self.filesystem.cat_file(reading.url, start=start, end=end), start, end)

    @property
    def _is_conditional(self) -> bool:
        """True if every response is compared with the listing. Otherwise the object is described again after a read."""
        return self.protocol in (*HTTP, *S3)

    def _confirm(self, reading: Reading) -> None:
        _check_description(reading, *self._access.describe(reading.url))

    async def _async_confirm(self, reading: Reading) -> None:
        _check_description(reading, *await self._access.async_describe(reading.url))

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.uri, self.options, self.patience)


def _ignore(count: int) -> None:
    pass


def _check_length(data: bytes, start: int, end: int) -> bytes:
    if len(data) != end - start:
        raise Unfit(f"the store sent {len(data):,} bytes; {end - start:,} were requested")
    return data


def _check_description(reading: Reading, version: str, size: int | None, is_page: bool) -> None:
    remote_object = reading.listed
    if size is not None and size != remote_object.size:
        raise build_changed_error(reading.url, f"it has {size:,} bytes, the listing has {remote_object.size:,}")
    if not is_same_version(remote_object.version, version):
        raise build_changed_error(reading.url, f"its version is {version}, the listing has {remote_object.version}")
