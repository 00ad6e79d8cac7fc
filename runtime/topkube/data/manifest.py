"""The manifest of a dataset, generated from what its store lists."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import xxhash

from topkube.data.cache.row_groups import parquet_rows
from topkube.data.formats.shards import Shards
from topkube.data.formats.tar import tar_index
from topkube.data.opening import resolve_address
from topkube.data.remote.listing import UNKNOWN, RemoteObject, manifest_lines
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
        yield from manifest_lines([_complete_object(store, shards.format, remote_object, samples, checksums)])


def _complete_object(
    store: ObjectStore, format: str, remote_object: RemoteObject, samples: bool, checksums: bool
) -> RemoteObject:
    """Return the object with its sample count and checksum, if they are wanted."""
    samples = samples and remote_object.samples == UNKNOWN
    if samples and format == "parquet":
        remote_object = remote_object._replace(samples=parquet_rows(store, remote_object))
    if not checksums and not (samples and format == "tar"):
        return remote_object
    file = os.memfd_create("topkube-manifest", os.MFD_CLOEXEC) if samples and format == "tar" else -1
    state = xxhash.xxh3_128()

    def receive(offset: int, data: Any) -> None:
        state.update(data)
        if file >= 0:
            os.pwrite(file, data, offset)

    try:
        store.fetch(remote_object, receive)
        if file >= 0:
            remote_object = remote_object._replace(samples=len(tar_index(file, remote_object.size, remote_object.path)))
    finally:
        if file >= 0:
            os.close(file)
    return remote_object._replace(checksum=state.hexdigest()) if checksums else remote_object
