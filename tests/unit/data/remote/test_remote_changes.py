"""A response is used only if it matches the listing: over HTTP, over S3, and from a local path. Shards of an older
listing are removed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from openers import HASTY, Opener, check_samples, list_shard_files
from remotes import Answer, RemoteServer, write_files, write_tars

from topkube.data import ArrayOf
from topkube.data.manifest import generate_manifest
from topkube.data.remote.listing import read_manifest
from topkube.data.remote.object_store import ObjectStore
from topkube.data.remote.object_version import is_same_version, read_info_version
from topkube.errors import DatasetError, StoreError
from topkube.settings import Settings

RECORD = ArrayOf("uint8", (3072,))
PATH = "a/00000.bin"


def change_bytes(answer: Answer) -> None:
    answer.data = bytes(len(answer.data))


def change_etag(answer: Answer) -> None:
    change_bytes(answer)
    answer.headers["ETag"] = '"another"'


def change_weak_etag(answer: Answer) -> None:
    change_bytes(answer)
    answer.headers["ETag"] = 'W/"another"'


def change_time(answer: Answer) -> None:
    change_bytes(answer)
    answer.headers["Last-Modified"] = "Sun, 06 Nov 1994 08:49:37 GMT"


def remove_version(answer: Answer) -> None:
    change_bytes(answer)
    answer.headers.pop("ETag", None)
    answer.headers.pop("Last-Modified")


def send_login_page(answer: Answer) -> None:
    answer.data = b"<html>log in".ljust(len(answer.data))
    answer.headers["Content-Type"] = "text/html; charset=utf-8"


def mark_compressed(answer: Answer) -> None:
    answer.headers["Content-Encoding"] = "gzip"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("strong", change_etag, "no longer the object that was listed"),
        ("strong", remove_version, "has no ETag"),
        ("weak", change_weak_etag, "no longer the object that was listed"),
        ("weak", change_time, "no longer the object that was listed"),
        ("weak", remove_version, "has no ETag"),
        ("none", change_time, "no longer the object that was listed"),
        ("none", remove_version, "has no Last-Modified"),
        ("strong", send_login_page, "the server sent an HTML page in place of the object"),
        ("strong", mark_compressed, "with Content-Encoding: gzip.*nginx"),
    ],
)
def test_a_response_that_is_not_the_listed_version_is_refused(
    remote: RemoteServer, open_dataset: Opener, kind: str, change: Callable[[Answer], None], message: str
) -> None:
    """The server ignores If-Match, and its response has the right length."""
    write_files(remote.folder, 2)
    remote.etags = kind
    dataset = open_dataset(remote.uri, decode=RECORD, prefetch=False)
    remote.conditions = False
    remote.alter = lambda path, answer: change(answer) if path == PATH else None
    with pytest.raises(StoreError, match=message):
        dataset[0]
    remote.alter = None
    assert dataset[0].shape == (3072,)


def change_range(answer: Answer) -> None:
    answer.headers["Content-Range"] = f"bytes 0-{len(answer.data) - 1}/{answer.size}"


def remove_range(answer: Answer) -> None:
    answer.headers.pop("Content-Range", None)


def change_size(answer: Answer) -> None:
    if "Content-Range" in answer.headers:
        answer.headers["Content-Range"] = answer.headers["Content-Range"].rpartition("/")[0] + "/99"


@pytest.mark.parametrize("change", [change_range, remove_range, change_size])
def test_a_response_with_another_range_is_refused(
    remote: RemoteServer, monkeypatch: pytest.MonkeyPatch, change: Callable[[Answer], None]
) -> None:
    monkeypatch.setattr("topkube.data.remote.transfer_reader.RANGE_BYTES", 1000)
    data = write_files(remote.folder, 2)
    store = ObjectStore(remote.uri, patience=HASTY)
    (entry, *_) = store.read_listing()
    remote.alter = lambda path, answer: change(answer) if answer.start == 1000 else None
    with pytest.raises(StoreError, match=r"requested|no longer the object"):
        store.read(entry)
    remote.alter = None
    assert store.read(entry) == data[0].tobytes()


def test_a_server_without_range_support_can_be_read(remote: RemoteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topkube.data.remote.transfer_reader.RANGE_BYTES", 1000)
    data = write_files(remote.folder, 2)
    remote.ranges = False
    store = ObjectStore(remote.uri, patience=HASTY)
    assert store.read(store.read_listing()[0]) == data[0].tobytes()


def test_ranges_of_an_object_come_from_one_version_even_if_the_listing_has_none(
    remote: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topkube.data.remote.transfer_reader.RANGE_BYTES", 1000)
    write_files(remote.folder, 1)
    name = "b/00000.bin"
    (remote.folder / "manifest.jsonl").write_text(json.dumps({"path": name, "size": 3072}) + "\n")
    store = ObjectStore(remote.uri, patience=HASTY)
    (entry,) = store.read_listing()

    def replace(path: str, answer: Answer) -> None:
        if answer.start == 1000:
            (remote.folder / name).write_bytes(bytes(3072))
            os.utime(remote.folder / name, (later := time.time() + 2, later))

    remote.alter = replace
    with pytest.raises(StoreError, match="no longer the object that was listed"):
        store.read(entry)


def test_a_local_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, open_dataset: Opener) -> None:
    write_files(tmp_path / "source", 2)
    dataset = open_dataset(tmp_path / "source", decode=RECORD, prefetch=False)
    path = tmp_path / "source" / PATH
    path.write_bytes(bytes(3072))
    os.utime(path, (later := time.time() + 2, later))
    with pytest.raises(StoreError, match="no longer the object that was listed"):
        dataset[0]


@pytest.mark.parametrize("shards", ["files", "tars"])
def test_checksums_of_the_manifest_detect_wrong_bytes_of_the_remote(
    remote: RemoteServer, open_dataset: Opener, shards: str
) -> None:
    """The headers are right, but the bytes are wrong."""
    decode: Any = RECORD
    if shards == "files":
        data = write_files(remote.folder, 6)
    else:
        data, decode = write_tars(remote.folder, [3, 3]), ArrayOf("uint8", (3072,), field="bin")
    lines = list(generate_manifest(remote.uri, samples=True, checksums=True))
    assert all(len(json.loads(line)["xxh3"]) == 32 for line in lines)
    first = json.loads(lines[0])
    assert first["xxh3"] == xxhash.xxh3_128_hexdigest((remote.folder / first["path"]).read_bytes())
    (remote.folder / "manifest.jsonl").write_text("".join(lines))

    def flip(path: str, answer: Answer) -> None:
        if path == first["path"]:
            answer.data = answer.data[:700] + bytes([answer.data[700] ^ 1]) + answer.data[701:]

    remote.alter = flip
    dataset = open_dataset(remote.uri, decode=decode, prefetch=False)
    with pytest.raises(StoreError, match=r"the manifest has [0-9a-f]{32}"):
        dataset[0]
    remote.alter = None
    np.testing.assert_array_equal(dataset[0], data[0])


def test_a_cached_shard_that_differs_from_the_manifest_is_fetched_again(
    remote: RemoteServer, open_dataset: Opener
) -> None:
    """The bytes were already wrong when they arrived, before the manifest had checksums."""
    data = write_files(remote.folder, 6)
    plain, with_checksums = list(generate_manifest(remote.uri)), list(generate_manifest(remote.uri, checksums=True))
    (remote.folder / "manifest.jsonl").write_text("".join(plain))

    def flip(path: str, answer: Answer) -> None:
        if path == PATH:
            answer.data = bytes(3072)

    remote.alter = flip
    assert not open_dataset(remote.uri, decode=RECORD)[0].any()
    open_dataset.close()
    remote.alter = None
    (remote.folder / "manifest.jsonl").write_text("".join(with_checksums))
    dataset = open_dataset(remote.uri, decode=RECORD)
    np.testing.assert_array_equal(dataset[0], data[0])
    assert dataset.statistics()["corruptions"] == 1


def test_outdated_shards_are_removed_when_the_dataset_is_opened_again(
    remote: RemoteServer, open_dataset: Opener
) -> None:
    data = write_files(remote.folder, 20)
    check_samples(open_dataset(remote.uri, decode=RECORD), data)
    open_dataset.close()
    (outdated,) = list_shard_files(open_dataset.cache)
    data = write_files(remote.folder, 20, seed=1)
    dataset = open_dataset(remote.uri, decode=RECORD)
    check_samples(dataset, data)
    dataset.warm()
    (shard,) = list_shard_files(open_dataset.cache)
    assert shard.name != outdated.name
    assert dataset.cache.has(0)


@pytest.mark.parametrize("address", ["folder", "manifest", "local folder"])
def test_a_manifest_that_is_written_again_describes_the_objects_as_they_are_now(
    remote: RemoteServer, address: str
) -> None:
    """One object was replaced by another of equal length, one removed, one added. Only a strong etag proves that an
    object is still the same, and only then its checksum is copied."""
    write_files(remote.folder, 4)
    manifest = remote.folder / "manifest.jsonl"
    uri = str(remote.folder) if address == "local folder" else remote.uri
    manifest.write_text("".join(generate_manifest(uri, checksums=True)))
    time_before = (remote.folder / PATH).stat().st_mtime_ns
    (remote.folder / PATH).write_bytes(b"n" * 3072)
    os.utime(remote.folder / PATH, ns=(time_before + 10**9, time_before + 10**9))
    (remote.folder / "b/00009.bin").write_bytes(b"new")
    if address != "manifest":
        (remote.folder / "b/00003.bin").unlink()

    written_again = list(generate_manifest(f"{uri}/manifest.jsonl" if address == "manifest" else uri))
    manifest.unlink()
    now = {entry["path"]: entry for entry in map(json.loads, generate_manifest(uri, checksums=True))}
    entries = {entry["path"]: entry for entry in map(json.loads, written_again)}
    last = "b/00003.bin" if address == "manifest" else "b/00009.bin"
    assert list(entries) == [PATH, "a/00001.bin", "b/00002.bin", last]
    assert {path: entry["etag"] for path, entry in entries.items()} == {path: now[path]["etag"] for path in entries}
    unchanged = set() if address == "local folder" else set(entries) - {PATH, "b/00009.bin"}
    assert {path for path, entry in entries.items() if "xxh3" in entry} == unchanged
    assert all(entries[path]["xxh3"] == now[path]["xxh3"] for path in unchanged)


def test_a_manifest_that_is_damaged_or_cannot_be_compared_with_a_list_is_written_again(remote: RemoteServer) -> None:
    """A shell empties the file before the command runs. A store that lists nothing needs the manifest's name."""
    write_files(remote.folder, 4)
    lines = list(generate_manifest(remote.uri))
    manifest = remote.folder / "manifest.jsonl"
    for damaged in ("", "{"):
        manifest.write_text(damaged)
        assert list(generate_manifest(remote.uri)) == lines
    manifest.write_text("".join(lines))
    remote.page = lambda path: b"<html>hello" if (remote.folder / path).is_dir() else None
    with pytest.raises(DatasetError, match=r"name the manifest .*manifest\.jsonl"):
        list(generate_manifest(remote.uri))
    assert list(generate_manifest(f"{remote.uri}/manifest.jsonl")) == lines


@pytest.mark.parametrize("checksum", ["x", "0" * 31, 7, "G" * 32])
def test_an_invalid_checksum_is_refused(checksum: object) -> None:
    with pytest.raises(DatasetError, match="line 1 of the manifest"):
        read_manifest([json.dumps({"path": "a", "size": 1, "xxh3": checksum})], "m", "v")


@pytest.mark.parametrize(
    ("info", "later"),
    [
        ({"size": 1, "modify": "20260102030405"}, {"size": 1, "modify": "20260102030406"}),
        ({"length": 1, "modificationTime": 1767323045000}, {"length": 1, "modificationTime": 1767323045001}),
    ],
    ids=["FTP", "WebHDFS"],
)
def test_times_of_ftp_and_webhdfs_are_versions(info: dict[str, Any], later: dict[str, Any]) -> None:
    version, later_version = read_info_version(info), read_info_version(later)
    assert is_same_version(version, version)
    assert not is_same_version(version, later_version)


def test_objects_without_a_version_are_cached_for_one_job(
    remote: RemoteServer, open_dataset: Opener, capfd: pytest.CaptureFixture[str]
) -> None:
    remote.etags, remote.times = "none", False
    first_data = write_files(remote.folder, 6)
    for seed in range(2):
        data = write_files(remote.folder, 6, seed=seed)
        dataset = open_dataset(remote.uri, decode=RECORD)
        check_samples(dataset, data)
        assert capfd.readouterr().err.count(f"topkube cache manifest {remote.uri} --checksums") == 1
    write_files(remote.folder, 6)
    with contextlib.closing(pickle.loads(pickle.dumps(dataset))) as worker:
        check_samples(worker, data)
    assert not capfd.readouterr().err
    open_dataset.close()
    check_samples(open_dataset(remote.uri, decode=RECORD, settings=Settings(job_uid="a")), first_data)
    write_files(remote.folder, 6, seed=1)
    check_samples(open_dataset(remote.uri, decode=RECORD, settings=Settings(job_uid="a")), first_data)
    check_samples(open_dataset(remote.uri, decode=RECORD, settings=Settings(job_uid="b")), data)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_manifest_without_a_version_is_read_for_every_job(
    remote: RemoteServer, open_dataset: Opener, checksums: bool
) -> None:
    """Its size stays the same."""
    remote.etags, remote.times = "none", False
    for seed in range(2):
        (remote.folder / "manifest.jsonl").unlink(missing_ok=True)
        data = write_files(remote.folder, 6, seed=seed)
        lines = [json.loads(line) for line in generate_manifest(remote.uri, checksums=True)]
        if not checksums:
            lines = [{"path": line["path"], "size": line["size"], "note": seed} for line in lines]
        (remote.folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        check_samples(open_dataset(remote.uri, decode=RECORD), data)
        open_dataset.close()


def test_copies_of_files_with_the_mtime_0_have_one_version(tmp_path: Path) -> None:
    """Files of a reproducible image have the mtime 0, and on each node another time at which they were created."""

    def list_copy(name: str) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_bytes(b"a")
        os.utime(tmp_path / name / "a", (0, 0))
        return "".join(generate_manifest(str(tmp_path / name)))

    assert list_copy("node0") == list_copy("node1")
