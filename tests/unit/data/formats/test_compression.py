"""Compressed shards are decompressed once per node, within the limits of the cache. Damaged shards are refused."""

from __future__ import annotations

import gzip
import io
import os
import random
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from openers import Opener, check_samples, list_shard_files
from remotes import add_member, write_tars

from topkube.data import ArrayOf
from topkube.data.cache import shard_decompression
from topkube.data.cache.disk.disk_tier import DiskTier
from topkube.data.cache.node_state import FROZEN
from topkube.data.formats import compression as compression_module
from topkube.data.formats.compression import Compression, decompress, find_compression
from topkube.data.formats.shards import Shards
from topkube.data.manifest import generate_manifest
from topkube.data.remote.listing import Listing, RemoteObject
from topkube.errors import DatasetError

RECORD = ArrayOf("uint8", (3072,), field="bin")
DATA = random.Random(1).randbytes(300_000) + bytes(300_000)


def compress_zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


COMPRESSORS: dict[Compression, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": compress_zstd}
ENDINGS = [("gzip", ".tar.gz"), ("gzip", ".tgz"), ("zstd", ".tar.zst")]


def decompress_bytes(data: bytes, kind: Compression) -> bytes:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        out = bytearray()

        def write(offset: int, part: Any) -> None:
            assert offset == len(out)
            out.extend(part)

        assert decompress(file.fileno(), len(data), kind, "a shard", write) == len(out)
        return bytes(out)


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("data", [b"", b"x", DATA], ids=["empty", "byte", "long"])
def test_compressed_data_is_restored(kind: Compression, data: bytes) -> None:
    assert decompress_bytes(COMPRESSORS[kind](data), kind) == data


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_a_file_may_have_several_parts(kind: Compression) -> None:
    compress = COMPRESSORS[kind]
    assert decompress_bytes(compress(DATA) + compress(b"") + compress(DATA[:7]), kind) == DATA + DATA[:7]


def test_zstandard_frames_may_be_skipped_and_gzip_may_be_padded() -> None:
    skipped = bytes.fromhex("502a4d18") + (5).to_bytes(4, "little") + b"hello"
    assert decompress_bytes(skipped + compress_zstd(DATA) + skipped, "zstd") == DATA
    assert decompress_bytes(gzip.compress(DATA) + bytes(600_000), "gzip") == DATA


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_a_truncated_shard_is_refused(kind: Compression) -> None:
    whole = COMPRESSORS[kind](DATA[:2000])
    for size in range(len(whole)):
        with pytest.raises(DatasetError, match="truncated"):
            decompress_bytes(whole[:size], kind)


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_a_changed_byte_is_refused_or_harmless(kind: Compression) -> None:
    whole, random_source = COMPRESSORS[kind](DATA), random.Random(2)
    refused = 0
    for at in [
        *range(20),
        *(random_source.randrange(len(whole)) for _ in range(40)),
        *range(len(whole) - 8, len(whole)),
    ]:
        changed = whole[:at] + bytes([whole[at] ^ (1 << random_source.randrange(8))]) + whole[at + 1 :]
        try:
            assert decompress_bytes(changed, kind) == DATA  # the time or the name in the header of gzip
        except DatasetError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("extra_bytes", [b"more", b"\1" * 5000])
def test_other_bytes_after_the_end_are_refused(kind: Compression, extra_bytes: bytes) -> None:
    with pytest.raises(DatasetError, match=r"cannot be decompressed|truncated"):
        decompress_bytes(COMPRESSORS[kind](DATA) + extra_bytes, kind)


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_a_shard_that_becomes_too_large_is_refused_early(kind: Compression) -> None:
    bomb = COMPRESSORS[kind](bytes(64 << 20))
    written = 0

    def write(offset: int, part: Any) -> None:
        nonlocal written
        written = offset + len(part)

    with tempfile.TemporaryFile() as file:
        file.write(bomb)
        file.flush()
        with pytest.raises(DatasetError, match="200 times"):
            decompress(file.fileno(), len(bomb), kind, "a shard", write)
    assert written <= max(200 * len(bomb), 1 << 20)


def test_the_memory_of_a_zstandard_bomb_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gets few bytes at once, because it returns everything that they become."""
    sizes = []
    monkeypatch.setattr(compression_module, "MOST_TIMES", 1 << 20)

    real = zstandard.ZstdDecompressor

    class Decompressor:
        def __init__(self, **options: Any) -> None:
            self._real = real(**options)

        def decompressobj(self) -> Any:
            inner = self._real.decompressobj()

            class Watched:
                eof = property(lambda _: inner.eof)
                unused_data = property(lambda _: inner.unused_data)

                def decompress(self, data: bytes) -> bytes:
                    result: bytes = inner.decompress(data)
                    sizes.append(len(result))
                    return result

            return Watched()

    monkeypatch.setattr(zstandard, "ZstdDecompressor", Decompressor)
    bomb = compress_zstd(bytes(256 << 20))
    with tempfile.TemporaryFile() as file:
        file.write(bomb)
        file.flush()
        assert decompress(file.fileno(), len(bomb), "zstd", "a shard", lambda *_: None) == 256 << 20
    assert max(sizes) <= 128 << 20


def test_names_show_the_compression() -> None:
    names = ["a.tar", "a.tar.gz", "a.tgz", "a.tar.zst", "a.parquet.zst", "gz"]
    assert [find_compression(name) for name in names] == ["", "gzip", "gzip", "zstd", "zstd", ""]


# ---- through the cache


def pack_all(folder: Path, kind: Compression, ending: str) -> None:
    for path in sorted(folder.glob("*.tar")):
        path.with_name(path.stem + ending).write_bytes(COMPRESSORS[kind](path.read_bytes()))
        path.unlink()


@pytest.mark.parametrize(("kind", "ending"), ENDINGS)
def test_samples_of_compressed_shards_are_read(
    tmp_path: Path, open_dataset: Opener, kind: Compression, ending: str
) -> None:
    data = write_tars(tmp_path / "source", [30, 1, 40])
    pack_all(tmp_path / "source", kind, ending)
    dataset = open_dataset(tmp_path / "source", decode=RECORD)
    assert len(dataset) == 71
    check_samples(dataset, data)
    dataset.warm()
    assert len(list_shard_files(open_dataset.cache)) == 6  # each shard as it is stored, and decompressed
    sizes = sum(path.stat().st_size for path in open_dataset.cache.glob("datasets/*/shards/*/*"))
    assert DiskTier(open_dataset.cache).count_used_bytes() == sizes


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_shard_is_decompressed_once_per_node(
    tmp_path: Path, open_dataset: Opener, monkeypatch: pytest.MonkeyPatch, prefetch: bool
) -> None:
    calls = 0

    def count_and_decompress(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        return decompress(*arguments)

    monkeypatch.setattr(shard_decompression, "decompress", count_and_decompress)
    data = write_tars(tmp_path / "source", [5, 5, 5])
    pack_all(tmp_path / "source", "zstd", ".tar.zst")
    for _ in range(3):
        check_samples(open_dataset(tmp_path / "source", decode=RECORD, prefetch=prefetch), data)
    assert calls == 3


def test_tables_may_be_compressed(tmp_path: Path, open_dataset: Opener) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"number": list(range(100))})
    for ending, kind in ((".parquet.zst", "zstd"), (".parquet.gz", "gzip"), (".arrow.gz", "gzip")):
        folder, buffer = tmp_path / ending, io.BytesIO()
        folder.mkdir()
        if "parquet" in ending:
            parquet.write_table(table, buffer)
        else:
            with arrow.ipc.new_file(buffer, table.schema) as writer:
                writer.write_table(table)
        (folder / f"a{ending}").write_bytes(COMPRESSORS[kind](buffer.getvalue()))  # type: ignore[index]
        dataset = open_dataset(folder)
        assert [row["number"] for row in dataset.__getitems__(range(len(dataset)))] == list(range(100))
        if "parquet" in ending:
            (line,) = generate_manifest(str(folder), samples=True)
            assert '"samples": 100' in line


def test_a_manifest_counts_the_samples_of_compressed_shards(tmp_path: Path) -> None:
    write_tars(tmp_path / "source", [7, 3])
    pack_all(tmp_path / "source", "gzip", ".tar.gz")
    lines = list(generate_manifest(str(tmp_path / "source"), samples=True, checksums=True))
    assert ['"samples": 7' in lines[0], '"samples": 3' in lines[1], '"xxh3"' in lines[0]] == [True] * 3


def test_decompressed_shards_count_against_the_limit(
    tmp_path: Path, open_dataset: Opener, capfd: pytest.CaptureFixture[str]
) -> None:
    """Shards that do not fit are decompressed into memory."""
    folder = tmp_path / "source"
    data = np.zeros((60, 3072), np.uint8)  # zeros become small when they are compressed
    folder.mkdir()
    for shard in range(3):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(20):
                add_member(tar, f"{shard}{number:03}.bin", data[0].tobytes())
    pack_all(folder, "gzip", ".tar.gz")
    limit = 150_000
    dataset = open_dataset(folder, decode=RECORD, size_limit=limit)
    check_samples(dataset, data)
    assert dataset.node_state.disk_state == FROZEN
    assert DiskTier(open_dataset.cache).count_used_bytes() <= limit
    dataset.close()
    assert capfd.readouterr().err.count("takes no more shards") == 1
    assert not list(open_dataset.cache.glob("reservations/*"))


@pytest.mark.parametrize("which", ["decompressed", "stored"])
def test_a_damaged_file_is_found_and_made_again(tmp_path: Path, open_dataset: Opener, which: str) -> None:
    data = write_tars(tmp_path / "source", [20])
    pack_all(tmp_path / "source", "zstd", ".tar.zst")
    check_samples(open_dataset(tmp_path / "source", decode=RECORD), data)
    open_dataset.close()
    small, large = sorted(list_shard_files(open_dataset.cache), key=lambda path: path.stat().st_size)
    path = large if which == "decompressed" else small
    if which == "stored":
        large.unlink()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    dataset = open_dataset(tmp_path / "source", decode=RECORD)
    check_samples(dataset, data)
    assert dataset.statistics()["corruptions"] == 1


def test_a_changed_shard_with_the_same_size_and_time_is_decompressed_again(
    tmp_path: Path, open_dataset: Opener
) -> None:
    """Only the checksum in the manifest differs."""
    folder = tmp_path / "source"
    for seed in range(2):
        data = write_tars(folder, [20], seed=seed)
        (folder / "000.tar.gz").write_bytes(gzip.compress((folder / "000.tar").read_bytes(), 0, mtime=0))
        (folder / "000.tar").unlink()
        os.utime(folder / "000.tar.gz", (0, 0))
        (folder / "manifest.jsonl").write_text("".join(generate_manifest(str(folder), checksums=True)))
        check_samples(open_dataset(folder, decode=RECORD), data)
        open_dataset.close()


def test_a_check_reads_decompressed_shards_and_an_eviction_removes_them(tmp_path: Path, open_dataset: Opener) -> None:
    write_tars(tmp_path / "source", [20])
    pack_all(tmp_path / "source", "gzip", ".tar.gz")
    dataset = open_dataset(tmp_path / "source", decode=RECORD)
    dataset[0]
    open_dataset.close()
    (folder,) = DiskTier(open_dataset.cache).list_folders()
    large = max(list_shard_files(open_dataset.cache), key=lambda path: path.stat().st_size)
    large.chmod(0o600)
    large.write_bytes(bytes(large.stat().st_size))
    assert folder.check() == [large.name]
    assert dataset.cache.shards.list_keys() == [dataset.cache.shards.compute_key(0), large.name]
    assert folder.evict_all_but([]) == 1
    assert not list_shard_files(open_dataset.cache)


def test_a_shard_with_a_wrong_name_is_named(tmp_path: Path, open_dataset: Opener) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "0.tar.gz").write_bytes(os.urandom(1000))
    with pytest.raises(DatasetError, match=r"0.tar.gz cannot be decompressed"):
        open_dataset(tmp_path / "source", decode=RECORD)
    assert not list(open_dataset.cache.glob("reservations/*"))
    assert len(list_shard_files(open_dataset.cache)) == 1


@pytest.mark.parametrize("ending", [".tar.bz2", ".tar.xz"])
def test_other_compressions_are_refused(tmp_path: Path, open_dataset: Opener, ending: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / f"0{ending}").write_bytes(b"x")
    with pytest.raises(DatasetError, match="compression that is not supported"):
        open_dataset(tmp_path / "source")


def test_one_shard_with_another_compression_among_many_is_refused() -> None:
    names = [f"{number:03}.tar" for number in range(200)]
    names[77] = "077.tar.bz2"
    listing = Listing.from_objects([RemoteObject(name, 1, "v") for name in names], "u")
    with pytest.raises(DatasetError, match=r"077\.tar\.bz2' has a compression that is not supported"):
        Shards("u", listing).check_compressions()
    assert Shards("u", listing, "files").format == "files"
