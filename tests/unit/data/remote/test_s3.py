"""The cache with a real S3 server on loopback (moto's), through s3fs, with the credentials of a pod."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from openers import Opener
from remotes import write_files, write_tars

from topkube.data import ArrayOf
from topkube.errors import DatasetError, StoreError

server = pytest.importorskip("moto.server", reason="moto is not installed: pip install -e '.[dev]'")
s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: pip install -e '.[s3]'")
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3fs.S3FileSystem]:
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    system.mkdir("bucket")
    yield system
    system.rm("bucket", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def test_files_and_shards_are_read_and_cached(bucket: s3fs.S3FileSystem, tmp_path: Path, open_dataset: Opener) -> None:
    for name, data, options in (
        ("files", write_files(tmp_path / "files", 30), {"decode": ArrayOf("uint8", (3072,)), "group_bytes": 40_000}),
        ("tars", write_tars(tmp_path / "tars", [20, 7]), {"decode": ArrayOf("uint8", (3072,), field="bin")}),
    ):
        bucket.put(str(tmp_path / name), f"bucket/{name}", recursive=True)
        first = open_dataset(f"s3://bucket/{name}", **options)
        np.testing.assert_array_equal(np.stack(list(first.__getitems__(range(len(data))))), data)
        assert first.statistics()["remote_bytes"] == sum(first.cache.shards.sizes)
        second = open_dataset(f"s3://bucket/{name}", **options)
        np.testing.assert_array_equal(second[len(data) - 1], data[-1])
        assert second.statistics()["remote_bytes"] == 0


def test_a_changed_object_has_a_new_key_and_never_mixes_with_the_old_one(
    bucket: s3fs.S3FileSystem, open_dataset: Opener
) -> None:
    old, new = b"a" * 3072, b"b" * 3072
    bucket.pipe("bucket/data/x.bin", old)
    first = open_dataset("s3://bucket/data", prefetch=False)
    bucket.pipe("bucket/data/x.bin", new)
    with pytest.raises(StoreError, match="no longer the object that was listed"):
        first[0]
    second = open_dataset("s3://bucket/data")
    assert second[0] == new
    assert second.cache.shards.compute_key(0) != first.cache.shards.compute_key(0)


def test_an_object_in_place_of_a_folder_is_named(bucket: s3fs.S3FileSystem, open_dataset: Opener) -> None:
    bucket.pipe("bucket/data/a.tar", b"x")
    with pytest.raises(DatasetError, match=r"s3://bucket/data/a\.tar is a file"):
        open_dataset("s3://bucket/data/a.tar")


def test_missing_credentials_are_named_at_once(
    bucket: s3fs.S3FileSystem, open_dataset: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.pipe("bucket/data/x.bin", b"x")
    for name in KEYS:
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StoreError, match=r"credentials are missing or wrong.*secretName"):
        open_dataset("s3://bucket/data")


def test_a_missing_bucket_is_an_error(bucket: s3fs.S3FileSystem, open_dataset: Opener) -> None:
    with pytest.raises((StoreError, DatasetError), match="s3://nowhere"):
        open_dataset("s3://nowhere/data")
