"""Writing a dataset's manifest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from topkube.data.listing import UNKNOWN, Object, manifest_lines
from topkube.data.opening import address
from topkube.data.row_groups import parquet_rows
from topkube.data.shards import Shards
from topkube.data.store import Store
from topkube.data.tar import tar_index
from topkube.settings import Settings


def written(uri: str, samples: bool = False) -> Iterator[str]:
    """The lines of the manifest of `uri`, by what the store lists. With `samples` the content is counted: of Parquet
    files the footers are read, of tar shards everything. Raises DatasetError, StoreError."""
    store = Store(address(uri, Settings.from_environment()))
    shards = Shards(store.uri, store.listing())
    for one in shards.listing:
        count = _counted(store, shards.format, one) if samples and one.samples == UNKNOWN else one.samples
        yield from manifest_lines([one._replace(samples=count)])


def _counted(store: Store, format: str, one: Object) -> int:
    if format == "parquet":
        return parquet_rows(store, one)
    if format != "tar":
        return one.samples
    file = os.memfd_create("topkube-manifest", os.MFD_CLOEXEC)
    try:
        store.fetch(one, partial(_write, file))
        return len(tar_index(file, one.size, one.path))
    finally:
        os.close(file)


def _write(file: int, offset: int, data: bytes) -> None:
    os.pwrite(file, data, offset)
