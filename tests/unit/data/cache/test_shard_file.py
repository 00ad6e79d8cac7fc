"""The writer of a shard: the file has the bytes that came, in large aligned pieces, and the checksum is theirs."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from openers import Opener
from remotes import RemoteServer, write_files, write_tars

from topkube.data.cache.disk import shard_file
from topkube.data.cache.disk.shard_file import ShardWriter
from topkube.errors import StoreError

PIECE = 100


class Writes:
    """The calls of os.pwrite: descriptor, offset and length of each."""

    def __init__(self, patch: pytest.MonkeyPatch, piece: int = PIECE) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._pwrite = os.pwrite
        patch.setattr(shard_file, "PIECE_BYTES", piece)
        patch.setattr(os, "pwrite", self._write)

    def _write(self, file: int, data: Any, offset: int) -> int:
        self.calls.append((file, offset, len(data)))
        return self._pwrite(file, data, offset)


@given(st.lists(st.integers(0, 3 * PIECE), max_size=12))
def test_bytes_in_order_are_written_once_in_aligned_pieces(sizes: list[int]) -> None:
    data = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8).tobytes()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile() as file:
        writes, at = Writes(patch), 0
        with ShardWriter(file.fileno()) as writer:
            for size in sizes:
                writer.write(at, data[at : at + size])
                at += size
                assert at - PIECE < writer.written_bytes <= at, "other threads read what was written"
            assert writer.compute_digest(at) == xxhash.xxh3_128_hexdigest(data)
            assert writer.written_bytes == at
        assert file.read() == data
        assert [offset for _, offset, _ in writes.calls] == list(range(0, at, PIECE))


@given(st.lists(st.integers(1, 2 * PIECE), min_size=1, max_size=8), st.randoms())
def test_bytes_in_any_order_are_written_where_they_belong(sizes: list[int], random: Any) -> None:
    data = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8).tobytes()
    ends = np.cumsum(sizes).tolist()
    parts = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    order = random.sample(parts, len(parts))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile() as file:
        patch.setattr(shard_file, "PIECE_BYTES", PIECE)
        with ShardWriter(file.fileno()) as writer:
            for start, end in order:
                writer.write(start, data[start:end])
            assert writer.compute_digest(len(data)) == ("" if order != parts else xxhash.xxh3_128_hexdigest(data))
        assert file.read() == data


def test_the_rest_is_written_at_the_end_and_not_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "PIECE_BYTES", PIECE)
    with tempfile.TemporaryFile() as file:
        with ShardWriter(file.fileno()) as writer:
            writer.write(0, b"ab")
        assert file.read() == b"ab"
    with tempfile.TemporaryFile() as file:
        writer = ShardWriter(file.fileno())
        with pytest.raises(StoreError, match="down"):
            write_and_fail(writer)
        assert file.read() == b""
        assert writer.compute_digest(2) == "", "the descriptor may belong to another file by now"
        assert file.read() == b""


def write_and_fail(writer: ShardWriter) -> None:
    with writer:
        writer.write(0, b"ab")
        raise StoreError("the remote is down")


def test_a_full_volume_is_an_error_of_the_last_write_too() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        writer = ShardWriter(full.fileno())
        writer.write(0, b"ab")
        with pytest.raises(OSError, match="No space left"):
            writer.compute_digest(2)


@pytest.mark.parametrize("form", ["files", "tar"])
def test_shards_are_written_in_aligned_pieces(
    form: str, remote: RemoteServer, open_dataset: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files come in any order and in small parts; a small page of the page cache for each would be slow to
    read."""
    data = write_files(remote.folder, 40) if form == "files" else write_tars(remote.folder, [40])
    writes = Writes(monkeypatch, 10_000)
    dataset = open_dataset(remote.uri, prefetch=False)
    whole = dataset.cache.open_samples(0)
    offsets = [offset for _, offset, length in writes.calls if length > 100]
    assert offsets == list(range(0, whole.shard.size, 10_000))
    samples = [sample if form == "files" else sample["bin"] for sample in dataset.__getitems__(range(40))]
    assert samples == [row.tobytes() for row in data]


def test_a_group_that_is_too_large_for_memory_is_written_file_by_file(
    remote: RemoteServer, open_dataset: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topkube.data.cache.shard_fetcher._ASSEMBLED_BYTES", 100)
    data = write_files(remote.folder, 40)
    dataset = open_dataset(remote.uri, prefetch=False)
    assert dataset.__getitems__(range(40)) == [row.tobytes() for row in data]
