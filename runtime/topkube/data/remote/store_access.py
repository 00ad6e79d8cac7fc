"""Access to a store through fsspec: its file system, calls with retries, and descriptions of objects."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import fsspec
from fsspec.asyn import sync

from topkube.data.remote.http.reading import ObjectDescription, describe_object
from topkube.data.remote.object_version import read_info_version
from topkube.data.remote.retry import FailedTries, Patience
from topkube.errors import DatasetError
from topkube.installation import build_install_command

HTTP, S3, LOCAL = ("http", "https"), ("s3", "s3a"), ("file", "local")
CONCURRENT_OBJECTS = 16
"""The number of small objects that are fetched at the same time."""


class StoreAccess:
    """The file system of the store at `uri`, and calls of it that are retried."""

    def __init__(self, uri: str, options: Mapping[str, Any], patience: Patience) -> None:
        self.uri, self.options, self.patience = uri, options, patience
        self.protocol = fsspec.utils.get_protocol(uri)
        self._local = threading.local()

    @property
    def filesystem(self) -> Any:
        """The fsspec file system of this thread. A fork gets another, because no event loop runs in it."""
        stored = getattr(self._local, "filesystem", None)
        if stored is not None and stored[0] == os.getpid():
            return stored[1]
        try:
            options = dict(self.options)
            if self.protocol in S3:
                stall = self.patience.stall_seconds
                options.setdefault("config_kwargs", {"read_timeout": stall, "connect_timeout": stall})
            if self.protocol in HTTP:
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
                next_step=f"{build_install_command(extra)}, or install the library named above",
            ) from None
        self._local.filesystem = (os.getpid(), filesystem)
        return filesystem

    @property
    def is_asynchronous(self) -> bool:
        """True if the file system has an event loop and reads ranges on it."""
        return bool(self.filesystem.async_impl) and hasattr(self.filesystem, "_cat_file")

    def call_with_retries(self, call: Callable[[], Any] | None, async_call: Callable[[], Any] | None, what: str) -> Any:
        """Await `async_call` on the loop of an asynchronous file system, or call `call` in this thread. Both are
        retried. Only `async_call` has a deadline."""
        if async_call is not None and (call is None or self.is_asynchronous):
            return sync(self.filesystem.loop, self.await_with_retries, async_call, what)
        assert call is not None
        failed = FailedTries(self.patience)
        while True:
            try:
                return call()
            except Exception as error:
                time.sleep(failed.add(error, what))

    async def await_with_retries(self, async_call: Callable[[], Any], what: str) -> Any:
        """Await `async_call` with retries, on the loop of fsspec. A try ends after twice `stall_seconds`, even if bytes
        arrive."""
        failed = FailedTries(self.patience)
        while True:
            try:
                return await asyncio.wait_for(async_call(), self.patience.stall_seconds * 2)
            except Exception as error:
                await asyncio.sleep(failed.add(error, what))

    def describe(self, url: str) -> ObjectDescription:
        """Return the description of an object. fsspec does not report if the store sent an HTML page. Raises the errors
        of fsspec."""
        self.filesystem.invalidate_cache()
        info = self.filesystem.info(url)
        return ObjectDescription(read_info_version(info), info.get("size"))

    async def async_describe(self, url: str) -> ObjectDescription:
        """Return what `describe` returns, on the loop of an asynchronous file system."""
        if self.protocol in HTTP:
            return await describe_object(self.filesystem, url)
        self.filesystem.invalidate_cache()
        info = await self.filesystem._info(url)
        return ObjectDescription(read_info_version(info), info.get("size"))

    async def async_describe_all(self, urls: list[str]) -> list[ObjectDescription]:
        """Describe many objects, `CONCURRENT_OBJECTS` of them at the same time, with retries."""
        described = [ObjectDescription("", None)] * len(urls)
        waiting = iter(enumerate(urls))

        async def describe_objects() -> None:
            for position, url in waiting:
                described[position] = await self.await_with_retries(partial(self.async_describe, url), url)

        await run_until_failure([describe_objects() for _ in range(CONCURRENT_OBJECTS)])
        return described


def _build_timeout(stall_seconds: float) -> Any:
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=stall_seconds, sock_read=stall_seconds)


async def run_until_failure(coroutines: list[Any]) -> None:
    """Await all coroutines. The first error cancels the others, and is raised when they have ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # no task writes after this
