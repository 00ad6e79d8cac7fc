"""The folder of a dataset in the disk tier: its locks, shards and removal. disk_tier.py describes its files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topkube.data.base.file_lock import FileLock
from topkube.data.base.real_folders import open_real_folder, remove_file
from topkube.data.base.small_file import read_small_text
from topkube.data.cache.disk.publication import Fill, ShardPublisher
from topkube.data.cache.disk.record_log import RecordLog, Records, read_hash, read_key
from topkube.data.cache.disk.shard_file import compute_digest
from topkube.data.cache.disk.stored_index import pack_index
from topkube.data.formats.sample_index import SampleIndex
from topkube.errors import DatasetError
from topkube.files import write_bytes_in

if TYPE_CHECKING:
    from topkube.data.cache.disk.disk_tier import DiskTier

_SUMMARY = "summary.json"
_MOST_QUARANTINED = 2
"""The number of damaged shards that are kept for inspection, per dataset."""
_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass
class DatasetFolder:
    """The shards of one dataset."""

    tier: DiskTier
    name: str
    uri: str
    log: RecordLog = field(init=False)
    evictions: int = 0
    """The number of datasets that this process removed to make room."""

    def __post_init__(self) -> None:
        self.path = self.tier.directory / "datasets" / self.name
        self.log = RecordLog(self.path / "records")
        self._publisher = ShardPublisher(self)

    @classmethod
    def read(cls, tier: DiskTier, name: str) -> DatasetFolder | None:
        """Return the folder with this name; None if it is not the folder of a dataset."""
        try:
            with open_real_folder(tier.directory, "datasets", name):
                uri = json.loads(read_small_text(tier.directory / "datasets" / name / "dataset.json"))["uri"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(tier, name, str(uri))

    def create(self) -> None:
        """Create the folder. Raises OSError."""
        for name in ("shards", "locks", "quarantine", "listings"):
            with open_real_folder(self.tier.directory, "datasets", self.name, name, created=3):
                pass
        with self.open_subfolder() as folder:  # without this file, the shards are not found after a power failure
            write_bytes_in(folder, "dataset.json", json.dumps({"uri": self.uri}).encode(), synced=True)

    def open_subfolder(self, *names: str, created: int = 0) -> contextlib.AbstractContextManager[int]:
        """Open a folder inside this folder (see `open_real_folder`); this folder itself if there are no names."""
        return open_real_folder(self.tier.directory, "datasets", self.name, *names, created=created)

    def open_shard_folder(self, key: str, *, created: int = 0) -> contextlib.AbstractContextManager[int]:
        """Open the folder of a shard (see `open_real_folder`). Raises DatasetError if `key` is not a key."""
        return self.open_subfolder("shards", self.get_shard_path(key).parent.name, created=created)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Store a summary of the newest listing for other programs. If the volume is full, nothing is stored."""
        with contextlib.suppress(OSError):
            if self.read_summary() != summary:
                with self.open_subfolder() as folder:
                    write_bytes_in(folder, _SUMMARY, json.dumps(summary).encode())

    def read_summary(self) -> dict[str, Any]:
        """Return the stored summary; empty if there is none."""
        try:
            summary = json.loads(read_small_text(self.path / _SUMMARY))
        except (OSError, ValueError):
            return {}
        return summary if isinstance(summary, dict) else {}

    # ---- use

    def begin_use(self) -> FileLock:
        """Store the time of use, and protect the dataset from removal until the returned lock is released."""
        lock = FileLock(self.path / "in-use")
        lock.acquire(shared=True)
        self.touch()
        return lock

    def touch(self) -> None:
        """Store the current time as the time of last use."""
        with contextlib.suppress(OSError), self.open_subfolder() as folder:
            os.utime("dataset.json", dir_fd=folder, follow_symlinks=False)

    @property
    def is_in_use(self) -> bool:
        """True if a process uses the dataset, or if the lock cannot be opened."""
        lock = FileLock(self.path / "in-use")
        try:
            is_free = lock.acquire(wait=False)
        except OSError:
            return True
        lock.release()
        return not is_free

    @property
    def last_used(self) -> float:
        """The time of last use, in seconds since 1970; 0 if it is unknown."""
        try:
            return (self.path / "dataset.json").stat().st_mtime
        except OSError:
            return 0.0

    @property
    def is_pinned(self) -> bool:
        """True if the dataset is never removed to make room."""
        return (self.path / "pinned").exists()

    def pin(self, pinned: bool = True) -> None:
        """Pin the dataset, or unpin it if `pinned` is false. A pinned dataset is never removed to make room."""
        with self.open_subfolder() as folder:
            if pinned:
                write_bytes_in(folder, "pinned", b"")
            else:
                remove_file(folder, "pinned")

    # ---- shards

    def get_shard_path(self, key: str) -> Path:
        """Return the path of a published shard. Raises DatasetError if `key` is not a key."""
        if not _KEY.fullmatch(key):
            raise DatasetError(f"{key!r} is not the key of a shard", next_step="pass 32 hexadecimal digits")
        return self.path / "shards" / key[:2] / key

    def get_index_path(self, key: str) -> Path:
        """Return the path of the sample index of a shard."""
        return self.get_shard_path(key).with_name(f"{key}.index")

    def store_index(self, key: str, index: SampleIndex) -> None:
        """Store the sample index of a shard. The index counts against the limits like a shard. Raises Full, OSError."""
        path, data = self.get_index_path(key), pack_index(index)
        reservation = self.tier.reserve(len(data), path.with_name(f".{key}.{uuid.uuid4().hex}.part"), self)
        try:
            with self.open_shard_folder(key) as folder:
                write_bytes_in(folder, path.name, data)
            with FileLock(self.tier.directory / "space.lock"):
                self.log.append_index(key, len(data))
                reservation.settle()
        finally:
            reservation.release()

    def get_lock(self, key: str) -> FileLock:
        """Return the lock that a process must hold while it fetches or replaces the shard."""
        assert _KEY.fullmatch(key)
        return FileLock(self.path / "locks" / key)

    def open(self, key: str) -> int | None:
        """Return a descriptor for reading; None if the cache does not have the shard. Raises OSError, also if the whole
        volume is gone."""
        try:
            return os.open(self.get_shard_path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            if self.tier.is_gone:
                raise OSError(errno.ENODEV, "the cache's volume is gone", str(self.tier.directory)) from None
            return None

    def is_whole(self, key: str, file: int) -> bool:
        """Return True if the open shard has the size and the hash of its record."""
        record = self.log.find(key)
        size = os.fstat(file).st_size
        return record is not None and int(record["size"]) == size and read_hash(record) == compute_digest(file, size)

    def publish(
        self,
        key: str,
        size: int,
        fill: Fill,
        samples: int = -1,
        *,
        announce: Callable[[], object] = lambda: None,
    ) -> int:
        """Write and publish a shard, and return a descriptor for reading.

        `fill` writes exactly `size` bytes to the descriptor that it gets, and returns their checksums; None if no
        checksum is known. If `size` is negative, `fill` may write any number of bytes, and calls `reserve_more` before
        each write. The bytes are read again only if no checksum was computed when they were received. `announce` is
        called before other processes can open the shard. Raises Full, OSError of the volume, StoreError if the
        checksums differ, and the errors of `fill`. After an error nothing is left on the volume.
        """
        return self._publisher.publish(key, size, fill, samples, announce)

    def is_being_published(self, file: int) -> bool:
        """Return True while `publish` writes this file."""
        return self._publisher.is_being_published(file)

    def reserve_more(self, file: int, size: int) -> None:
        """Reserve space for `size` bytes in the file that `publish` has passed to `fill`. Raises Full, OSError."""
        self._publisher.reserve_more(file, size)

    def quarantine(self, key: str) -> None:
        """Move a damaged shard to the folder `quarantine`. The last damaged shards are kept there for inspection."""
        index = self.get_index_path(key).name
        self.log.remove(key)
        with self.open_shard_folder(key) as shards, self.open_subfolder("quarantine") as quarantine:
            with contextlib.suppress(FileNotFoundError):
                os.rename(key, f"{time.time_ns()}-{key}", src_dir_fd=shards, dst_dir_fd=quarantine)
            remove_file(shards, index)
            for old in sorted(os.listdir(quarantine))[:-_MOST_QUARANTINED]:
                remove_file(quarantine, old)

    def evict(self, key: str) -> int:
        """Remove a shard. Return its number of bytes. A process that has the shard open can still read it."""
        with contextlib.suppress(FileNotFoundError), self.open_shard_folder(key) as folder:
            for path in (self.get_shard_path(key), self.get_index_path(key)):
                remove_file(folder, path.name)
        return self.log.remove(key)

    def evict_all_but(self, keys: Collection[str]) -> int:
        """Remove all shards except those with these keys; return the number of removed shards."""
        kept, count = set(keys), 0
        for record in self.log.read_live():
            if (key := read_key(record)) not in kept:
                self.evict(key)
                count += 1
        return count

    def evict_if_unused(self, keys: Collection[str]) -> int:
        """Call `evict_all_but` if no job uses the dataset, because another job may still read shards of an older
        listing. Return the number of removed shards."""
        lock = FileLock(self.path / "in-use")
        if not lock.acquire(wait=False):
            return 0
        try:
            return self.evict_all_but(keys)
        finally:
            lock.release()

    def remove(self, *, force: bool = False) -> bool:
        """Remove the whole dataset. Return False if the dataset is in use and `force` is false."""
        lock = FileLock(self.path / "in-use")
        if not lock.acquire(wait=False) and not force:
            return False
        trash = f".removed-{self.name}-{uuid.uuid4().hex}"
        with open_real_folder(self.tier.directory, "datasets") as datasets:
            os.rename(self.name, trash, src_dir_fd=datasets, dst_dir_fd=datasets)
            lock.release()
            shutil.rmtree(trash, ignore_errors=True, dir_fd=datasets)
        return True

    def list_records(self) -> Records:
        """Return the records of all shards in the cache."""
        return self.log.read_live()

    def check(self, progress: Callable[[int], None] = lambda bytes_read: None) -> list[str]:
        """Read every shard and quarantine the damaged shards. Return the keys of the damaged shards. If a shard has no
        file, its record is removed. `progress` gets the bytes of each shard that was read."""
        damaged = []
        for record in self.list_records():
            key = read_key(record)
            with self.get_lock(key):  # no other process publishes or quarantines it meanwhile
                file = self.open(key)
                if file is None:
                    self.log.remove(key)
                    continue
                try:
                    if not self.is_whole(key, file):
                        damaged.append(key)
                        self.quarantine(key)
                finally:
                    os.close(file)
            progress(int(record["size"]))
        return damaged
