"""The reader of a store's objects: over plain sockets where the server allows it, else with the store's library.

A read is retried range by range, with growing pauses. It returns the bytes or raises StoreError. If an object has
changed since the listing, its bytes are never mixed with older bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import fsspec
from fsspec.asyn import sync

from topkube.data.remote.http.connection import NotPlain
from topkube.data.remote.http.reading import ObjectDescription, Reading, Unfit, read_range
from topkube.data.remote.http.sockets import SocketClient
from topkube.data.remote.object_version import build_changed_error, is_same_version
from topkube.data.remote.s3_reading import check_object
from topkube.data.remote.store_access import CONCURRENT_OBJECTS, HTTP, S3, StoreAccess, run_until_failure
from topkube.data.remote.transfer import Transfer, Write

RANGE_BYTES = 4 << 20
"""The most bytes of one request."""


class TransferReader:
    """The reader of the objects below `root` in the store of `access`. It works in the process that created it and in
    forks of that process."""

    def __init__(self, access: StoreAccess, root: str) -> None:
        self._access, self._root = access, root
        self._protocol, self._options = access.protocol, access.options
        self._local = threading.local()
        self._is_plain = True
        """False if the server or the options need the HTTP library."""

    def read_transfers(
        self, transfers: Sequence[Transfer], write: Write, progress: Callable[[int], None] | None
    ) -> None:
        """Carry out `transfers`, many of them at the same time. Pass every byte once to `write(offset, bytes)`.
        `progress` gets the number of bytes. Raises StoreError, Changed."""
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
            sync(self._access.filesystem.loop, self._read_concurrently, remaining, write, progress)
        else:
            for transfer in remaining:
                self._read_transfer(transfer, write, progress)
        for transfer in transfers:
            transfer.check()

    def _open_socket_client(self) -> SocketClient | None:
        """Return this thread's client for a plain HTTP server; None for other stores, and if the options change more
        than the headers."""
        if self._protocol not in HTTP or not self._is_plain:
            return None
        stored: tuple[int, SocketClient] | None = getattr(self._local, "client", None)
        if stored is None or stored[0] != os.getpid():  # a fork must not use the connections of its parent
            if not set(self._options) <= {"headers"} or fsspec.config.conf.get(self._protocol):
                self._is_plain = False
                return None
            try:
                client = SocketClient(self._root, self._options.get("headers", {}), self._access.patience)
            except NotPlain:
                self._is_plain = False
                return None
            stored = self._local.client = (os.getpid(), client)
        stored[1].range_bytes = RANGE_BYTES
        return stored[1]

    def _read_transfer(self, transfer: Transfer, write: Write, progress: Callable[[int], None]) -> None:
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
        if not self.is_conditional:
            self._access.call_with_retries(
                partial(self._confirm, reading), partial(self._async_confirm, reading), reading.url
            )

    async def _read_concurrently(
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
                if not self.is_conditional:
                    await self._access.await_with_retries(partial(self._async_confirm, reading), reading.url)

        await run_until_failure([take_transfers() for _ in range(min(CONCURRENT_OBJECTS, len(transfers)))])

    async def _async_read_range(self, reading: Reading, start: int, end: int) -> bytes:
        """Read a range once, with an asynchronous file system. For HTTP and S3 the request has a condition on the
        version, and the response is compared with the listing, so two versions are never mixed."""
        filesystem, remote_object, url = self._access.filesystem, reading.listed, reading.url
        if self._protocol in HTTP:
            return await read_range(filesystem, reading, start, end)
        if self._protocol in S3:
            bucket, key, version = filesystem.split_path(url)
            arguments = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
            arguments |= {"VersionId": version} if version else {}
            arguments |= {"IfMatch": remote_object.version} if remote_object.version.startswith('"') else {}
            response = await filesystem._call_s3("get_object", **arguments)
            async with response["Body"] as body:
                check_object(response, reading, start, end)
                return _check_length(await body.read(), start, end)
        is_whole = start == 0 and end == remote_object.size
        byte_range: dict[str, Any] = {"start": None if is_whole else start, "end": None if is_whole else end}
        return _check_length(await filesystem._cat_file(url, **byte_range), start, end)

    def _read_range(self, reading: Reading, start: int, end: int) -> bytes:
        return _check_length(self._access.filesystem.cat_file(reading.url, start=start, end=end), start, end)

    @property
    def is_conditional(self) -> bool:
        """True if every response is compared with the listing. Otherwise the object is described again after a read."""
        return self._protocol in (*HTTP, *S3)

    def _confirm(self, reading: Reading) -> None:
        _check_description(reading, self._access.describe(reading.url))

    async def _async_confirm(self, reading: Reading) -> None:
        _check_description(reading, await self._access.async_describe(reading.url))


def _ignore(count: int) -> None:
    pass


def _check_length(data: bytes, start: int, end: int) -> bytes:
    if len(data) != end - start:
        raise Unfit(f"the store sent {len(data):,} bytes; {end - start:,} were requested")
    return data


def _check_description(reading: Reading, current: ObjectDescription) -> None:
    remote_object, size = reading.listed, current.size
    if size is not None and size != remote_object.size:
        raise build_changed_error(reading.url, f"it has {size:,} bytes, the listing has {remote_object.size:,}")
    if not is_same_version(remote_object.version, current.version):
        raise build_changed_error(
            reading.url, f"its version is {current.version}, the listing has {remote_object.version}"
        )
