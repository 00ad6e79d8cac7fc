"""The manifest of a dataset, generated from what its store lists."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import xxhash

from topkube.data.cache.row_groups import count_parquet_rows, count_rows_of_file
from topkube.data.formats.compression import Compression, decompress, find_compression
from topkube.data.formats.shards import Shards
from topkube.data.formats.tar import index_tar
from topkube.data.opening import resolve_address
from topkube.data.remote.listing import UNKNOWN, RemoteObject, format_manifest
from topkube.data.remote.object_store import ObjectStore
from topkube.settings import Settings


def generate_manifest(uri: str, samples: bool = False, checksums: bool = False) -> Iterator[str]:
    """Yield the lines of a manifest of the objects that the store lists at `uri`.

    `samples`: add the number of samples of each shard; this reads the footers of Parquet files and the whole content
    of tar shards. `checksums`: add the checksum of each object; this reads the whole content. Raises DatasetError,
    StoreError.
    """
    store = ObjectStore(resolve_address(uri, Settings.from_environment()))
    shards = Shards(store.uri, store.listing())
    for remote_object in shards.listing:
        yield from format_manifest([_complete_object(store, shards.format, remote_object, samples, checksums)])


def _complete_object(
    store: ObjectStore, format: str, remote_object: RemoteObject, samples: bool, checksums: bool
) -> RemoteObject:
    """Return the object with its sample count and checksum, if they are wanted."""
    samples = samples and remote_object.samples == UNKNOWN and format in ("tar", "parquet")
    compression = find_compression(remote_object.path) if format != "files" else ""
    if samples and format == "parquet" and not compression:
        remote_object, samples = remote_object._replace(samples=count_parquet_rows(store, remote_object)), False
    if not checksums and not samples:
        return remote_object
    file = os.memfd_create("topkube-manifest", os.MFD_CLOEXEC) if samples else -1
    state = xxhash.xxh3_128()

    def receive(offset: int, data: Any) -> None:
        state.update(data)
        if file >= 0:
            _write_at(file, offset, data)

    try:
        store.fetch(remote_object, receive)
        if file >= 0:
            count = _count_samples(file, remote_object, format, compression)
            remote_object = remote_object._replace(samples=count)
    finally:
        if file >= 0:
            os.close(file)
    return remote_object._replace(checksum=state.hexdigest()) if checksums else remote_object


def _count_samples(file: int, remote_object: RemoteObject, format: str, compression: Compression) -> int:
    """Return the number of samples of the shard in `file`. Raises DatasetError."""
    size, name = remote_object.size, remote_object.path
    if not compression:
        return len(index_tar(file, size, name))
    plain = os.memfd_create("topkube-manifest", os.MFD_CLOEXEC)
    try:
        size = decompress(file, size, compression, name, partial(_write_at, plain))
        return len(index_tar(plain, size, name)) if format == "tar" else count_rows_of_file(plain, name)
    finally:
        os.close(plain)


def _write_at(file: int, offset: int, data: Any) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done
