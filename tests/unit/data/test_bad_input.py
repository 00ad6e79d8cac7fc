"""Invalid input is refused before anything is fetched, with the numbers and the next step."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import sys
import tarfile
from pathlib import Path

import pytest
from fsspec.registry import _registry as fsspec_classes
from hypothesis import given, settings
from hypothesis import strategies as st
from openers import Opener
from remotes import RemoteServer, add_member, write_files, write_tars

from topkube.data.cache.disk.disk_tier import DiskTier
from topkube.data.formats.sample_index import ABSENT
from topkube.data.formats.tar import index_tar
from topkube.data.remote.listing import Listing, RemoteObject, read_manifest
from topkube.errors import DatasetError, StoreError


def test_an_unknown_scheme_is_named(open_dataset: Opener) -> None:
    with pytest.raises(DatasetError, match=r"foo://x.*scheme of the address is unknown"):
        open_dataset("foo://x/y")


def test_a_library_that_is_missing_is_named(open_dataset: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(fsspec_classes, "s3", raising=False)  # an earlier test may have loaded s3fs
    with pytest.raises(DatasetError, match=r"pip install .*\[s3\]'"):
        open_dataset("s3://bucket/data")


def test_an_empty_dataset_is_refused(tmp_path: Path, remote: RemoteServer, open_dataset: Opener) -> None:
    (tmp_path / "empty").mkdir()
    for uri in (tmp_path / "empty", remote.uri):
        with pytest.raises(DatasetError, match="is empty"):
            open_dataset(uri)


@pytest.mark.parametrize("path", ["../up", "/etc/passwd", "a/../../b", "a\\..\\b", "a/./b", "", "nul\0"])
def test_a_listing_that_leaves_the_dataset_is_refused(path: str) -> None:
    with pytest.raises(DatasetError, match="outside the dataset"):
        Listing.from_objects([RemoteObject(path, 1, "v")], "file:///x")
    with pytest.raises(DatasetError, match="outside the dataset"):
        read_manifest([json.dumps({"path": path, "size": 1})], "m", "v")


@pytest.mark.parametrize(
    "line",
    [
        '{"path": "a"}',
        '{"path": 3, "size": 1}',
        '{"path": "a", "size": "1"}',
        "[1]",
        "x",
        '{"path": "a", "size": true}',
        b"\xff\xfe",
        "[" * 100_000,
    ],
)
def test_a_bad_line_of_a_manifest_is_named(line: str | bytes) -> None:
    with pytest.raises(DatasetError, match="line 2 of the manifest"):
        read_manifest(['{"path": "ok", "size": 1}', line], "m", "v")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r'{"path": "a\ud800", "size": 1}', "is not UTF-8"),
        (r'{"path": "a", "size": 1, "etag": "\udfff"}', "is not UTF-8"),
        ('{"path": "a", "size": 99999999999999999999}', "damaged or hostile listing"),
        ('{"path": "a", "size": 1, "samples": 99999999999999999999}', "damaged or hostile listing"),
    ],
)
def test_a_manifest_that_no_column_can_hold_is_a_typed_error(line: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        read_manifest([line], "m", "v")


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_table_with_invalid_values_is_a_typed_error(tmp_path: Path, open_dataset: Opener, format: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    invalid = arrow.StringArray.from_buffers(1, arrow.py_buffer(b"\0\0\0\0\2\0\0\0"), arrow.py_buffer(b"\xff\xfe"))
    table = arrow.table({"text": invalid, "when": arrow.array([2**62], arrow.timestamp("s"))})
    (tmp_path / "source").mkdir()
    if format == "parquet":
        pyarrow.parquet.write_table(table.select(["text"]), tmp_path / "source" / "0.parquet")
    else:
        with arrow.ipc.new_file(tmp_path / "source" / "0.arrow", table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DatasetError, match=rf"0\.{format} cannot be read"):
        open_dataset(tmp_path / "source")[0]


@pytest.mark.parametrize("name", ["../out.bin", "/abs.bin", "a/../../out.bin"])
def test_a_tar_that_would_unpack_elsewhere_is_refused(remote: RemoteServer, open_dataset: Opener, name: str) -> None:
    with tarfile.open(remote.folder / "0.tar", "w") as tar:
        add_member(tar, "good.bin", b"x")
        add_member(tar, name, b"y")
    with pytest.raises(DatasetError, match="would leave the folder"):
        open_dataset(remote.uri)
    assert not list(open_dataset.cache.rglob("*.bin"))
    assert DiskTier(open_dataset.cache).count_used_bytes() == 0


def test_links_in_a_tar_are_refused(remote: RemoteServer, open_dataset: Opener) -> None:
    with tarfile.open(remote.folder / "0.tar", "w") as tar:
        link = tarfile.TarInfo("a.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(DatasetError, match="a link or a device"):
        open_dataset(remote.uri)


@pytest.mark.parametrize("key", ["../../etc", "0" * 31, "0" * 33, "G" * 32, "0" * 30 + "/x", ""])
def test_an_invalid_key_touches_no_file(tmp_path: Path, key: str) -> None:
    folder = DiskTier(tmp_path / "cache").open_folder("file:///x")
    for act in (folder.open, folder.evict, folder.quarantine):
        with pytest.raises(DatasetError, match="not the key of a shard"):
            act(key)


def test_a_manifest_with_a_wrong_count_is_named(tmp_path: Path, open_dataset: Opener) -> None:
    write_tars(tmp_path / "source", [5])
    size = (tmp_path / "source" / "000.tar").stat().st_size
    (tmp_path / "source" / "manifest.jsonl").write_text(json.dumps({"path": "000.tar", "size": size, "samples": 6}))
    with pytest.raises(DatasetError, match="has 5 samples, but 6 in the manifest"):
        open_dataset(tmp_path / "source")[0]


def test_a_manifest_with_wrong_sizes_is_an_error_not_a_batch(remote: RemoteServer, open_dataset: Opener) -> None:
    write_files(remote.folder, 2)
    (remote.folder / "manifest.jsonl").write_text('{"path": "a/00000.bin", "size": 4000}\n')
    with pytest.raises(StoreError):
        open_dataset(remote.uri, prefetch=False)[0]


def test_a_decode_without_an_automatic_fingerprint_needs_an_explicit_one(tmp_path: Path, open_dataset: Opener) -> None:
    write_files(tmp_path / "source", 2)
    state = object()
    with pytest.raises(DatasetError, match="fingerprint="):
        open_dataset(tmp_path / "source", decode=lambda raw: (raw, state))
    open_dataset(tmp_path / "source", decode=lambda raw: (raw, state), fingerprint="mine 1")


def test_samples_that_need_pickle_are_refused(tmp_path: Path, open_dataset: Opener) -> None:
    write_files(tmp_path / "source", 2)
    with pytest.raises(DatasetError, match="only arrays, tensors, numbers, bytes and text"):
        open_dataset(tmp_path / "source", decode=lambda raw: {"x": {1, 2}}, memory_limit=1 << 20)[0]


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, 1 << 70])
def test_an_integer_that_does_not_fit_is_refused_and_not_changed(
    tmp_path: Path, open_dataset: Opener, value: int
) -> None:
    write_files(tmp_path / "source", 2)
    with pytest.raises(DatasetError, match=f"the integer {value} in 'id'"):
        open_dataset(tmp_path / "source", decode=lambda raw: {"id": value}, fingerprint="1", memory_limit=1 << 20)[0]


@pytest.mark.parametrize("change", ["a new file", "a replacement of the same size"])
def test_a_spawned_worker_refuses_a_dataset_that_has_changed(tmp_path: Path, open_dataset: Opener, change: str) -> None:
    """An index would name another sample, or the sample of another version."""
    write_files(tmp_path / "source", 4)
    dataset = open_dataset(tmp_path / "source", prefetch=False)
    sent = pickle.dumps(dataset)
    with contextlib.closing(pickle.loads(sent)) as worker:
        assert [worker[index] for index in range(4)] == [dataset[index] for index in range(4)]
    if change == "a new file":
        (tmp_path / "source" / "0000-first.bin").write_bytes(b"a file that arrives while the dataset is in use")
    else:
        write_files(tmp_path / "source", 4, seed=1)
    with pytest.raises(DatasetError, match="has changed since this process's parent opened it"):
        pickle.loads(sent)


NAMES = st.text(st.characters(exclude_characters="/\\\0.", exclude_categories=("Cs", "Cc")), min_size=1, max_size=120)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(NAMES, st.sampled_from(["bin", "cls", "seg.png"]), st.binary(max_size=1500)),
        min_size=1,
        max_size=12,
        unique_by=lambda entry: (entry[0], entry[1]),
    ),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_every_member_of_a_tar_is_found_where_it_is(members: list[tuple[str, str, bytes]], format: int) -> None:
    members.sort(key=lambda entry: entry[0])
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=format) as tar:
        for stem, ending, data in members:
            add_member(tar, f"{stem}.{ending}", data)
    file = os.memfd_create("tar")
    try:
        os.write(file, written.getvalue())
        index = index_tar(file, len(written.getvalue()), "0.tar")
        read_members = [
            (index.names[at], field, os.pread(file, int(length), int(index.offsets[at] + start)))
            for at in range(len(index))
            for field, start, length in zip(index.fields, index.starts[at], index.lengths[at], strict=True)
            if length != ABSENT
        ]
    finally:
        os.close(file)
    assert sorted(read_members) == sorted(members)


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_tar_is_an_error_or_other_samples_never_a_crash(data: st.DataObject) -> None:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for number in range(3):
            add_member(tar, f"{number}.bin", bytes(range(200)))
    damaged = bytearray(written.getvalue()[: data.draw(st.integers(0, 4096))])
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    file = os.memfd_create("tar")
    try:
        os.write(file, damaged)
        index = index_tar(file, len(damaged), "0.tar")
        assert (index.offsets + index.sizes <= len(damaged)).all()
    except DatasetError:
        pass
    finally:
        os.close(file)
