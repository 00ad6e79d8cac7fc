"""The remote store: lists a dataset and reads ranges of its objects, with any protocol of fsspec."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from topkube.data.remote.addresses import check_address
from topkube.data.remote.http.reading import Reading
from topkube.data.remote.listing import IndexPart, Listing, RemoteObject
from topkube.data.remote.object_version import build_condition
from topkube.data.remote.retry import Patience
from topkube.data.remote.store_access import HTTP, StoreAccess
from topkube.data.remote.store_listing import StoreListing, find_base
from topkube.data.remote.transfer import Transfer, Write
from topkube.data.remote.transfer_reader import TransferReader


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
        self._access = StoreAccess(uri, self.options, self.patience)
        self.protocol = self._access.protocol
        self.root: str = self.filesystem._strip_protocol(find_base(uri))
        self._reader = TransferReader(self._access, self.root)
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
        """Return the version of the manifest; None if there is no manifest, or if the store states no version of it.
        Raises StoreError if the store does not answer, because a listing without the manifest would lack its
        checksums."""
        return self._build_listing().read_version()

    def _build_listing(self) -> StoreListing:
        return StoreListing(self._access, self.root, self._reader.read_transfers)

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
        transfer = Transfer(reading, start, remote_object.size if stop is None else stop)
        self._reader.read_transfers([transfer], write, progress)

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
        self._reader.read_transfers(
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

        self._reader.read_transfers(transfers, receive, None)
        return [bytes(data[start:stop]) for start, stop in itertools.pairwise(offsets)]

    def can_check(self, remote_object: RemoteObject) -> bool:
        """Return True if the object is checked when it is read alone: the listing has its checksum, or the store sends
        only its listed version."""
        return bool(remote_object.checksum) or self.can_check_range(remote_object)

    def can_check_range(self, remote_object: RemoteObject) -> bool:
        """Return True if a range of the object is checked: the store sends only the listed version."""
        return self._reader.is_conditional and bool(build_condition(remote_object.version))

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.uri, self.options, self.patience)
