"""What cannot work is refused before anything is fetched, with the numbers and the next step."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openers import Opener
from remotes import Remote, add, write_files, write_tars

from topkube.data.disk_tier import DiskTier
from topkube.data.listing import Listing, Object, read_manifest
from topkube.errors import DatasetError, StoreError


def test_an_unknown_scheme_is_named(open_dataset: Opener) -> None:
    with pytest.raises(DatasetError, match=r"foo://x.*unknown scheme"):
        open_dataset("foo://x/y")


def test_a_library_that_is_missing_is_named(open_dataset: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(DatasetError, match=r"pip install 'topkube\[s3\]'"):
        open_dataset("s3://bucket/data")


def test_an_empty_dataset_is_refused(tmp_path: Path, remote: Remote, open_dataset: Opener) -> None:
    (tmp_path / "empty").mkdir()
    for uri in (tmp_path / "empty", remote.uri):
        with pytest.raises(DatasetError, match="is empty"):
            open_dataset(uri)


@pytest.mark.parametrize("path", ["../up", "/etc/passwd", "a/../../b", "a\\..\\b", "a/./b", "", "nul\0"])
def test_a_listing_that_leaves_the_dataset_is_refused(path: str) -> None:
    with pytest.raises(DatasetError, match="leaves the dataset"):
        Listing.of([Object(path, 1, "v")], "file:///x")
    with pytest.raises(DatasetError, match="leaves the dataset"):
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
    ],
)
def test_a_bad_line_of_a_manifest_is_named(line: str) -> None:
    with pytest.raises(DatasetError, match="line 2 of the manifest"):
        read_manifest(['{"path": "ok", "size": 1}', line], "m", "v")


@pytest.mark.parametrize("name", ["../out.bin", "/abs.bin", "a/../../out.bin"])
def test_a_tar_that_would_unpack_elsewhere_is_refused(remote: Remote, open_dataset: Opener, name: str) -> None:
    with tarfile.open(remote.folder / "0.tar", "w") as tar:
        add(tar, "good.bin", b"x")
        add(tar, name, b"y")
    with pytest.raises(DatasetError, match="leaves the folder"):
        open_dataset(remote.uri)
    assert not list(open_dataset.cache.rglob("*.bin"))
    assert DiskTier(open_dataset.cache).used() == 0


def test_links_in_a_tar_are_refused(remote: Remote, open_dataset: Opener) -> None:
    with tarfile.open(remote.folder / "0.tar", "w") as tar:
        link = tarfile.TarInfo("a.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(DatasetError, match="a link or a device"):
        open_dataset(remote.uri)


@pytest.mark.parametrize("key", ["../../etc", "0" * 31, "0" * 33, "G" * 32, "0" * 30 + "/x", ""])
def test_a_key_that_is_none_touches_no_file(tmp_path: Path, key: str) -> None:
    folder = DiskTier(tmp_path / "cache").dataset("file:///x")
    for act in (folder.open, folder.evict, folder.quarantine):
        with pytest.raises(DatasetError, match="not the key of a shard"):
            act(key)


def test_compressed_tars_are_refused(tmp_path: Path, open_dataset: Opener) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "0.tar.gz").write_bytes(b"x")
    with pytest.raises(DatasetError, match="compressed tar"):
        open_dataset(tmp_path / "source")


def test_a_manifest_that_counts_wrongly_is_named(tmp_path: Path, open_dataset: Opener) -> None:
    write_tars(tmp_path / "source", [5])
    size = (tmp_path / "source" / "000.tar").stat().st_size
    (tmp_path / "source" / "manifest.jsonl").write_text(json.dumps({"path": "000.tar", "size": size, "samples": 6}))
    with pytest.raises(DatasetError, match="holds 5 samples, the manifest says 6"):
        open_dataset(tmp_path / "source")[0]


def test_a_manifest_that_lies_about_sizes_is_an_error_not_a_batch(remote: Remote, open_dataset: Opener) -> None:
    write_files(remote.folder, 2)
    (remote.folder / "manifest.jsonl").write_text('{"path": "a/00000.bin", "size": 4000}\n')
    with pytest.raises(StoreError):
        open_dataset(remote.uri, prefetch=False)[0]


def test_decodes_that_cannot_be_told_apart_need_a_fingerprint(tmp_path: Path, open_dataset: Opener) -> None:
    write_files(tmp_path / "source", 2)
    state = object()
    with pytest.raises(DatasetError, match="fingerprint="):
        open_dataset(tmp_path / "source", decode=lambda raw: (raw, state))
    open_dataset(tmp_path / "source", decode=lambda raw: (raw, state), fingerprint="mine 1")


def test_samples_that_need_pickle_are_refused(tmp_path: Path, open_dataset: Opener) -> None:
    write_files(tmp_path / "source", 2)
    with pytest.raises(DatasetError, match="only arrays, tensors, numbers, bytes and text"):
        open_dataset(tmp_path / "source", decode=lambda raw: {"x": {1, 2}}, memory_limit=1 << 20)[0]


names = st.text(st.characters(exclude_characters="/\\\0.", exclude_categories=("Cs", "Cc")), min_size=1, max_size=120)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(names, st.sampled_from(["bin", "cls", "seg.png"]), st.binary(max_size=1500)),
        min_size=1,
        max_size=12,
        unique_by=lambda entry: (entry[0], entry[1]),
    ),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_every_member_of_a_tar_is_found_where_it_is(members: list[tuple[str, str, bytes]], format: int) -> None:
    import os

    from topkube.data.sample_index import ABSENT
    from topkube.data.tar import tar_index

    members.sort(key=lambda entry: entry[0])
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=format) as tar:
        for stem, ending, data in members:
            add(tar, f"{stem}.{ending}", data)
    file = os.memfd_create("tar")
    try:
        os.write(file, written.getvalue())
        index = tar_index(file, len(written.getvalue()), "0.tar")
        found = [
            (index.names[at], field, os.pread(file, int(length), int(index.offsets[at] + start)))
            for at in range(len(index))
            for field, start, length in zip(index.fields, index.starts[at], index.lengths[at], strict=True)
            if length != ABSENT
        ]
    finally:
        os.close(file)
    assert sorted(found) == sorted(members)


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_tar_is_an_error_or_other_samples_never_a_crash(data: st.DataObject) -> None:
    import os

    from topkube.data.tar import tar_index

    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for number in range(3):
            add(tar, f"{number}.bin", bytes(range(200)))
    bad = bytearray(written.getvalue()[: data.draw(st.integers(0, 4096))])
    for _ in range(data.draw(st.integers(0, 4))):
        if bad:
            bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    file = os.memfd_create("tar")
    try:
        os.write(file, bad)
        index = tar_index(file, len(bad), "0.tar")
        assert (index.offsets + index.sizes <= len(bad)).all()
    except DatasetError:
        pass
    finally:
        os.close(file)
