"""What the cache reads of files that anybody with access to its directory may have written is bounded."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from topkube.data.base.small_file import LARGEST_BYTES, read_small_text
from topkube.data.cache.disk.disk_tier import DiskTier


def test_a_small_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("é" * (LARGEST_BYTES // 2))
    assert read_small_text(path) == "é" * (LARGEST_BYTES // 2)


def test_a_large_or_endless_file_is_refused(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, LARGEST_BYTES + 1)
    for path in (large, Path("/dev/zero")):
        with pytest.raises(OSError, match=str(path)) as caught:
            read_small_text(path)
        assert caught.value.errno == errno.EFBIG


def test_a_reservation_that_is_no_text_is_removed(tmp_path: Path) -> None:
    DiskTier(tmp_path)
    (tmp_path / "reservations/0").write_bytes(b"\xff")
    assert DiskTier(tmp_path).count_reserved_bytes() == 0
    assert list((tmp_path / "reservations").iterdir()) == []


def test_the_shards_of_a_dataset_are_counted(tmp_path: Path) -> None:
    folder = DiskTier(tmp_path).open_folder("s3://bucket/x")

    def publish(number: int) -> None:
        os.close(folder.publish(f"{number:032x}", 10, lambda file: os.truncate(file, 10)))
        folder.log.append_index(f"{number:032x}", 3)

    for number in (1, 2, 3, 2):
        publish(number)
    assert (folder.log.count_shards(), folder.list_records().size, folder.log.sum_shard_bytes()) == (3, 3, 30)
    folder.evict(f"{1:032x}")
    folder.evict(f"{1:032x}")
    assert (folder.log.count_shards(), folder.list_records().size, folder.log.sum_shard_bytes()) == (2, 2, 20)
    publish(1)
    assert (folder.log.count_shards(), folder.list_records().size, folder.log.sum_shard_bytes()) == (3, 3, 30)
