"""The listing of a store: its manifest, or the objects that the store lists."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import xxhash
from fsspec.asyn import sync

from topkube.data.remote.http.index_pages import walk_index_pages
from topkube.data.remote.http.reading import ObjectDescription, Reading, read_page
from topkube.data.remote.listing import Listing, RemoteObject, read_manifest
from topkube.data.remote.local_folder import build_file_error, list_folder
from topkube.data.remote.object_version import read_info_version
from topkube.data.remote.retry import Absent
from topkube.data.remote.store_access import HTTP, LOCAL, StoreAccess
from topkube.data.remote.transfer import Transfer, Write
from topkube.errors import DatasetError, StoreError

MANIFEST = "manifest.jsonl"
INDEX_ENDING = ".index"
"""The index file of a manifest has the name of the manifest with this ending."""
_HIDDEN = (MANIFEST, f"manifest{INDEX_ENDING}")
Fetch = Callable[[Sequence[Transfer], Write, Callable[[int], None] | None], None]


class StoreListing:
    """Lists the objects below `root`. `fetch` is the function that reads the manifest, as it reads other objects."""

    def __init__(self, access: StoreAccess, root: str, fetch: Fetch) -> None:
        self._access, self._root, self._fetch = access, root, fetch
        self._is_explicit = has_manifest(access.uri)
        """True if the address names the manifest, so the manifest must exist."""
        self.manifest_uri = access.uri if self._is_explicit else f"{find_base(access.uri)}/{MANIFEST}"
        self.index_uri = self.manifest_uri.rpartition(".")[0] + INDEX_ENDING

    def read(self) -> Listing:
        """Return all objects: those in the manifest if there is a manifest, else those that the store lists. Raises
        DatasetError, StoreError."""
        listing = self._read_manifest()
        return listing if listing is not None else Listing.from_objects(self._list_objects(), self._access.uri)

    def read_current(self) -> tuple[Listing, Listing | None]:
        """Return the objects as the store describes them now, and the listing of the manifest, None if there is no
        valid manifest. If the address names a manifest, the objects are those that the manifest names, else all that
        the store lists. Raises DatasetError, StoreError."""
        if self._is_explicit:
            manifest = self.read()
            paths = [remote_object.path for remote_object in manifest]
            return Listing.from_objects(self._describe_objects(paths), self._access.uri), manifest
        earlier = None
        with contextlib.suppress(DatasetError):  # a manifest that is damaged or empty is about to be written again
            earlier = self._read_manifest()
        try:
            return Listing.from_objects(self._list_objects(), self._access.uri), earlier
        except (DatasetError, StoreError) as error:
            if earlier is None:
                raise
            raise type(error)(
                error.what,
                cause=error.cause,
                next_step=f"if the store does not list its folders, name the manifest ({self.manifest_uri}): then only"
                " the objects that it names are described",
            ) from error

    def read_version(self) -> str | None:
        """Return the version of the manifest; None if there is no manifest, or if the store states no version of it.
        Raises StoreError if the store does not answer, because a listing without the manifest would lack its
        checksums."""
        described = self._describe_manifest()
        return None if described is None else described.version or None

    def _describe_manifest(self) -> ObjectDescription | None:
        """Return the description of the manifest; None if there is no manifest."""
        url = self.manifest_uri
        try:
            described: ObjectDescription = self._access.call_with_retries(
                partial(self._access.describe, url), partial(self._access.async_describe, url), url
            )
        except Absent:
            if self._is_explicit:
                raise
            return None
        if described.is_page and not self._is_explicit:  # some servers have a page for every address
            return None
        return described

    def _read_manifest(self) -> Listing | None:
        described = self._describe_manifest()
        if described is None:
            return None
        version, size, _ = described
        if size is None:
            raise DatasetError(
                f"the size of {self.manifest_uri} is unknown",
                cause="the server does not send Content-Length for it",
                next_step="serve the manifest as a plain file",
            )
        data = bytearray()

        def receive(offset: int, part: Any) -> None:
            nonlocal data
            assert offset == len(data)  # the bytes of one object arrive in order
            data += part  # no memory is taken for bytes that a server only announces

        manifest = RemoteObject(self.manifest_uri.rpartition("/")[2], size, version)
        self._fetch([Transfer(Reading(manifest, self.manifest_uri), 0, size)], receive, None)
        return read_manifest(io.BytesIO(data), self.manifest_uri, version or xxhash.xxh3_128_hexdigest(data))

    def _list_objects(self) -> list[RemoteObject]:
        if self._access.protocol in HTTP:
            return self._list_by_http()
        if self._access.protocol in LOCAL:
            found: list[RemoteObject] = self._access.call_with_retries(
                partial(list_folder, self._root), None, self._access.uri
            )
        else:
            self._access.filesystem.invalidate_cache()
            found = self._access.call_with_retries(self._find, None, self._access.uri)
        return [remote_object for remote_object in found if remote_object.path not in _HIDDEN]

    def _find(self) -> list[RemoteObject]:
        details: dict[str, Any] = self._access.filesystem.find(self._root, detail=True)
        if (details.get(self._root) or {}).get("type") == "file" and len(details) == 1:
            raise build_file_error(self._access.uri)
        return [
            RemoteObject(name[len(self._root) :].lstrip("/"), int(info.get("size") or 0), read_info_version(info))
            for name, info in details.items()
            if info.get("type") == "file"
        ]

    def _list_by_http(self) -> list[RemoteObject]:
        """List objects by index pages: JSON pages of nginx (autoindex_format json), or the links of HTML pages."""
        base = self._root.rstrip("/") + "/"

        def read(address: str) -> bytes:
            page: bytes = self._access.call_with_retries(
                None, partial(read_page, self._access.filesystem, address), address
            )
            return page

        objects, unsized = walk_index_pages(read, base, self._access.uri, _HIDDEN)
        return objects + self._describe_objects(unsized)

    def _describe_objects(self, paths: Sequence[str]) -> list[RemoteObject]:
        """Return the objects of these paths, with the sizes and versions that the store states for each of them."""
        base, access = self._root.rstrip("/") + "/", self._access
        urls = [base + (quote(path) if access.protocol in HTTP else path) for path in paths]
        described: Iterable[ObjectDescription]
        if access.is_asynchronous:
            described = sync(access.filesystem.loop, access.async_describe_all, urls)
        else:
            described = (access.call_with_retries(partial(access.describe, url), None, url) for url in urls)
        return [
            RemoteObject(path, -1 if size is None else size, version)
            for path, (version, size, _) in zip(paths, described, strict=True)
        ]


def has_manifest(uri: str) -> bool:
    """Return True if the address names a manifest."""
    return uri.endswith((".jsonl", ".ndjson"))


def find_base(uri: str) -> str:
    """Return the address without the name of a manifest."""
    return uri.rpartition("/")[0] if has_manifest(uri) else uri.rstrip("/")
