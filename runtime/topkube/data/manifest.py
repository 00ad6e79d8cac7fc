"""The manifest of a dataset, generated from what its store lists."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from topkube.data.cache.row_groups import count_parquet_rows, count_rows_of_file
from topkube.data.formats.checked_index import compute_checked_index
from topkube.data.formats.compression import Compression, decompress, find_compression
from topkube.data.formats.shards import Shards
from topkube.data.formats.tar import index_tar
from topkube.data.opening import resolve_address
from topkube.data.remote.listing import UNKNOWN, IndexPart, Listing, RemoteObject, format_manifest
from topkube.data.remote.object_store import ObjectStore
from topkube.data.remote.object_version import is_proven_same
from topkube.errors import DatasetError
from topkube.files import replace_file
from topkube.settings import Settings


def generate_manifest(
    uri: str, samples: bool = False, checksums: bool = False, index: Path | None = None
) -> Iterator[str]:
    """Yield the lines of a manifest of the objects that the store lists at `uri`, also if there is a manifest already.
    If `uri` names a manifest, the objects are those that it names. Sizes and versions are those that the store states
    now. The samples, the checksum and the index of an object are copied from the present manifest if a strong etag
    proves that the object is the same.

    `samples`: add the number of samples of each shard; this reads the footers of Parquet files and the whole content
    of tar shards. `checksums`: add the checksum of each object; this reads the whole content. `index`: write the sample
    indexes of tar shards that are not compressed to this file, with the checksum of every sample, and add the places of
    the indexes and the numbers of samples to the manifest; this reads the whole content. The file is complete after the
    last line. Raises DatasetError, StoreError.
    """
    store = ObjectStore(resolve_address(uri, Settings.from_environment()))
    listing, earlier = store.read_current_listing()
    shards = Shards(store.uri, listing)
    if index is not None and shards.format != "tar":
        raise DatasetError(
            f"the dataset {store.uri} has no tar shards, so there is nothing to index",
            cause=f"its format is {shards.format}; a listing or a footer is the index of other formats",
            next_step="write the manifest without --index",
        )
    with _open_index_file(index) as index_file:
        added = _AddedParts(samples or index is not None, checksums, index_file)
        for number, remote_object in enumerate(_copy_facts(shards.listing, earlier)):
            has_samples = shards.format != "files" and shards.has_samples(number)
            format = shards.format if has_samples else "files"
            yield from format_manifest([_complete_object(store, format, remote_object, added)])


def _copy_facts(listing: Listing, earlier: Listing | None) -> Iterator[RemoteObject]:
    """Yield the objects of `listing`. An object that is proven to be the same in `earlier` has the samples, the
    checksum and the index that are listed there."""
    position, count = 0, len(earlier) if earlier is not None else 0
    for remote_object in listing:
        while earlier is not None and position < count and earlier.paths[position] < remote_object.path:
            position += 1
        if earlier is not None and position < count and earlier.paths[position] == remote_object.path:
            previous = earlier[position]
            if previous.size == remote_object.size and is_proven_same(previous.version, remote_object.version):
                yield previous
                continue
        yield remote_object


@contextlib.contextmanager
def _open_index_file(path: Path | None) -> Iterator[BinaryIO | None]:
    """Yield the index file for writing; None if `path` is None. At the end, the file replaces an older file."""
    if path is None:
        yield None
        return
    try:
        with replace_file(path) as part, part.open("wb") as file:
            yield file
    except OSError as error:
        raise DatasetError(
            f"the index file {path} cannot be written ({error.strerror or error})",
            cause="its folder does not exist, is read-only or is full",
            next_step="write it to another folder, and store it beside the manifest",
        ) from None


class _AddedParts(NamedTuple):
    """The parts that are added to each object of a manifest. `index_file`: None if no indexes are added."""

    samples: bool
    checksums: bool
    index_file: BinaryIO | None


def _complete_object(store: ObjectStore, format: str, remote_object: RemoteObject, added: _AddedParts) -> RemoteObject:
    """Return the object with the added parts: its number of samples, its checksum and its index."""
    compression = find_compression(remote_object.path) if format != "files" else ""
    index_file = added.index_file if format == "tar" and not compression else None
    must_count = added.samples and remote_object.samples == UNKNOWN and format in ("tar", "parquet")
    if must_count and format == "parquet" and not compression:
        remote_object, must_count = remote_object._replace(samples=count_parquet_rows(store, remote_object)), False
    needs_content = must_count or index_file is not None
    if not added.checksums and not needs_content:
        return remote_object
    state = xxhash.xxh3_128()
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(_Scratch(remote_object)) if needs_content else None

        def receive(offset: int, data: Any) -> None:
            state.update(data)
            if scratch is not None:
                scratch.write(offset, data)

        store.fetch(remote_object, receive)
        if scratch is not None and index_file is not None:
            remote_object = _index_object(scratch.file, remote_object, index_file)
        elif scratch is not None:
            count = _count_samples(scratch.file, remote_object, format, compression)
            remote_object = remote_object._replace(samples=count)
    return remote_object._replace(checksum=state.hexdigest()) if added.checksums else remote_object


class _Scratch:
    """A temporary copy of a shard on the disk: a shard may be larger than the memory. Raises DatasetError if the disk
    has no room for it."""

    def __init__(self, remote_object: RemoteObject) -> None:
        self._object = remote_object
        try:
            self._stream = tempfile.TemporaryFile(prefix="topkube-manifest-", buffering=0)  # noqa: SIM115  (__exit__ closes it)
        except OSError as error:
            raise self._build_error(error) from None
        self.file = self._stream.fileno()

    def write(self, offset: int, data: Any) -> None:
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self.file, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise self._build_error(error) from None

    def _build_error(self, error: OSError) -> DatasetError:
        return DatasetError(
            f"{self._object.path} ({self._object.size:,} bytes) cannot be stored in {tempfile.gettempdir()} "
            f"({error.strerror or error})",
            cause="its samples are counted in a temporary copy, for which the disk has no room",
            next_step="set TMPDIR to a folder on a larger disk",
        )

    def __enter__(self) -> _Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def _index_object(file: int, remote_object: RemoteObject, index_file: BinaryIO) -> RemoteObject:
    """Add the index of the tar shard in `file` to the index file. Return the object with the place of its index and its
    number of samples."""
    index = index_tar(file, remote_object.size, remote_object.path)
    packed = compute_checked_index(file, index).pack()
    part = IndexPart(index_file.tell(), len(packed), xxhash.xxh3_128_hexdigest(packed))
    index_file.write(packed)
    return remote_object._replace(samples=len(index), sample_index=part)


def _count_samples(file: int, remote_object: RemoteObject, format: str, compression: Compression) -> int:
    """Return the number of samples of the shard in `file`. Raises DatasetError."""
    size, name = remote_object.size, remote_object.path
    if not compression:
        return len(index_tar(file, size, name))
    with _Scratch(remote_object) as plain:
        size = decompress(file, size, compression, name, plain.write)
        return len(index_tar(plain.file, size, name)) if format == "tar" else count_rows_of_file(plain.file, name)
