"""A dataset's folder in the disk tier, and how a shard gets into it.

A shard is written under a name of its own, hashed, synced, recorded and only then renamed: what has its final name is
whole. disk_tier.py has the layout.
"""

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

import xxhash

from topkube.data.locks import FileLock
from topkube.data.records import RecordLog, Records, hash_of, key_of
from topkube.errors import DatasetError

if TYPE_CHECKING:
    from topkube.data.disk_tier import DiskTier

_SUMMARY = "summary.json"
_QUARANTINED = 2
"""Damaged shards kept for inspection, per dataset."""
_KEY = re.compile(r"[0-9a-f]{32}")
_HASHED_AT_ONCE = 1 << 20


def _nothing(step: str) -> None:
    pass


step: Callable[[str], None] = _nothing
"""Called after every step of a publication, by name; tests end the process there."""


@dataclass
class DatasetFolder:
    """The shards of one dataset."""

    tier: DiskTier
    name: str
    uri: str
    log: RecordLog = field(init=False)
    evictions: int = 0
    """Datasets that this process removed to make room."""

    def __post_init__(self) -> None:
        self.path = self.tier.directory / "datasets" / self.name
        self.log = RecordLog(self.path / "records")

    @classmethod
    def read(cls, tier: DiskTier, name: str) -> DatasetFolder | None:
        try:
            uri = json.loads((tier.directory / "datasets" / name / "dataset.json").read_text())["uri"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(tier, name, str(uri))

    def make(self) -> None:
        for name in ("shards", "locks", "quarantine", "listings"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        part = self.path / f".dataset.json.{uuid.uuid4().hex}"
        part.write_text(json.dumps({"uri": self.uri}) + "\n")
        os.replace(part, self.path / "dataset.json")

    def note(self, summary: Mapping[str, Any]) -> None:
        """Keeps what the newest listing says, for whoever looks at the cache from outside. A full volume does not."""
        with contextlib.suppress(OSError):
            if self.noted() != summary:
                part = self.path / f".{_SUMMARY}.{uuid.uuid4().hex}"
                part.write_text(json.dumps(summary) + "\n")
                os.replace(part, self.path / _SUMMARY)

    def noted(self) -> dict[str, Any]:
        """What `note` kept; empty where there is nothing."""
        try:
            found = json.loads((self.path / _SUMMARY).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    # ---- use

    def use(self) -> FileLock:
        """Holds the dataset against removal as long as the lock lives, and notes the time."""
        lock = FileLock(self.path / "in-use")
        lock.acquire(shared=True)
        self.touch()
        return lock

    def touch(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.path / "dataset.json")

    @property
    def in_use(self) -> bool:
        lock = FileLock(self.path / "in-use")
        try:
            free = lock.acquire(wait=False)
        except OSError:
            return True
        lock.release()
        return not free

    @property
    def last_used(self) -> float:
        try:
            return (self.path / "dataset.json").stat().st_mtime
        except OSError:
            return 0.0

    @property
    def pinned(self) -> bool:
        return (self.path / "pinned").exists()

    def pin(self, pinned: bool = True) -> None:
        """A pinned dataset is never removed to make room."""
        if pinned:
            (self.path / "pinned").touch()
        else:
            (self.path / "pinned").unlink(missing_ok=True)

    # ---- shards

    def shard_path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise DatasetError(f"{key!r} is not the key of a shard", next_step="give 32 hexadecimal digits")
        return self.path / "shards" / key[:2] / key

    def index_path(self, key: str) -> Path:
        return self.shard_path(key).with_name(f"{key}.index")

    def lock(self, key: str) -> FileLock:
        """What a process holds while it fetches the shard."""
        assert _KEY.fullmatch(key)
        return FileLock(self.path / "locks" / key)

    def open(self, key: str) -> int | None:
        """A descriptor for reading, None where the shard is not there."""
        try:
            return os.open(self.shard_path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if self.tier.gone:
                raise OSError(errno.ENODEV, "the cache's volume is gone", str(self.tier.directory)) from None
            return None

    def whole(self, key: str, file: int) -> bool:
        """Whether the open shard has the size and the hash of its record."""
        record = self.log.find(key)
        size = os.fstat(file).st_size
        return record is not None and int(record["size"]) == size and hash_of(record) == digest(file, size)

    def publish(self, key: str, size: int, fill: Callable[[int], None], samples: int = -1) -> int:
        """Writes the shard: `fill` puts exactly `size` bytes into the descriptor that it gets. Returns a descriptor
        for reading. Raises Full, OSError of the volume, and whatever `fill` raises; nothing is left then."""
        final = self.shard_path(key)
        final.parent.mkdir(exist_ok=True)
        part = final.with_name(f".{key}.{uuid.uuid4().hex}.part")
        reservation = self.tier.reserve(size, part, self)
        file = -1
        try:
            step("reserved")
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            if size:
                os.posix_fallocate(file, 0, size)
            step("created")
            fill(file)
            step("filled")
            if os.fstat(file).st_size != size:
                raise OSError(errno.EIO, f"{os.fstat(file).st_size} bytes were written instead of {size}")
            hashed = digest(file, size)
            step("hashed")
            os.fchmod(file, 0o444)
            os.fsync(file)
            step("synced")
            with FileLock(self.tier.directory / "space.lock"):  # nobody looks for room while both would count
                self.log.append(key, hashed, size, samples)
                reservation.settle()
            step("recorded")
            os.rename(part, final)
            step("renamed")
            _sync_folder(final.parent)
            step("published")
        except BaseException:
            if file >= 0:
                os.close(file)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        finally:
            with contextlib.suppress(OSError):
                reservation.release()
        os.close(file)  # it could be written to
        reading = self.open(key)
        if reading is None:
            raise FileNotFoundError(errno.ENOENT, "another process removed the shard", str(final))
        return reading

    def quarantine(self, key: str) -> None:
        """Takes a damaged shard out of use and keeps the last few of them."""
        path, folder = self.shard_path(key), self.path / "quarantine"
        self.log.remove(key)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, folder / f"{time.time_ns()}-{key}")
        self.index_path(key).unlink(missing_ok=True)
        for old in sorted(folder.iterdir())[:-_QUARANTINED]:
            old.unlink(missing_ok=True)

    def evict(self, key: str) -> int:
        """Removes a shard; returns its bytes. Who has it open reads on."""
        for path in (self.shard_path(key), self.index_path(key)):
            path.unlink(missing_ok=True)
        return self.log.remove(key)

    def evict_all_but(self, keys: Collection[str]) -> int:
        """Removes shards of versions that nobody lists any more; returns their number."""
        kept, count = set(keys), 0
        for record in self.log.live():
            if (key := key_of(record)) not in kept:
                self.evict(key)
                count += 1
        return count

    def evict_outdated(self, keys: Collection[str]) -> int:
        """As `evict_all_but`, where nobody uses the dataset: another job may still read what is outdated for us."""
        lock = FileLock(self.path / "in-use")
        if not lock.acquire(wait=False):
            return 0
        try:
            return self.evict_all_but(keys)
        finally:
            lock.release()

    def remove(self, *, force: bool = False) -> bool:
        """Removes the whole dataset; False where it is in use and not `force`d."""
        lock = FileLock(self.path / "in-use")
        if not lock.acquire(wait=False) and not force:
            return False
        trash = self.path.with_name(f".removed-{self.name}-{uuid.uuid4().hex}")
        os.rename(self.path, trash)
        lock.release()
        shutil.rmtree(trash, ignore_errors=True)
        return True

    def entries(self) -> Records:
        """The records of all shards that are there."""
        return self.log.live()

    def check(self, progress: Callable[[int], None] = lambda bytes_read: None) -> list[str]:
        """Reads every shard and quarantines damaged ones; returns their keys. A recorded shard without a file is
        taken off the record."""
        damaged = []
        for record in self.entries():
            key = key_of(record)
            with self.lock(key):  # nobody publishes or quarantines it meanwhile
                file = self.open(key)
                if file is None:
                    self.log.remove(key)
                    continue
                try:
                    if not self.whole(key, file):
                        damaged.append(key)
                        self.quarantine(key)
                finally:
                    os.close(file)
            progress(int(record["size"]))
        return damaged


def digest(file: int, size: int) -> str:
    """xxh3-128 of the first `size` bytes, 32 hexadecimal digits."""
    state, buffer, at = xxhash.xxh3_128(), bytearray(_HASHED_AT_ONCE), 0
    view = memoryview(buffer)
    while at < size:
        got = os.preadv(file, [view[: min(size - at, _HASHED_AT_ONCE)]], at)
        if got == 0:
            break
        state.update(view[:got])
        at += got
    return state.hexdigest()


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
