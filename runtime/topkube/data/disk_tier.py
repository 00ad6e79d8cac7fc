"""The disk tier: shards on a volume of the node, shared by ranks and by jobs.

    DIRECTORY/topkube-cache.json            what this is, and its format
    DIRECTORY/space.lock reservations/      who is about to write how much
    DIRECTORY/datasets/ID/dataset.json      its URI; the time of last use is the file's
    DIRECTORY/datasets/ID/summary.json      bytes and shards of its newest listing
    DIRECTORY/datasets/ID/records           size and xxh3-128 of every shard (records.py)
    DIRECTORY/datasets/ID/shards/XX/KEY     a whole shard; XX are the key's first two digits
    DIRECTORY/datasets/ID/locks/KEY quarantine/ in-use pinned

A shard is written under a name of its own, hashed, synced, recorded and only then renamed: what has its final name is
whole. The rest is left to `reap`, which knows the dead by the locks that the kernel has freed.
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
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from topkube.data.locks import FileLock
from topkube.data.records import RecordLog, Records, hash_of, key_of
from topkube.errors import CacheError, DatasetError

FORMAT = 1
_MARK = "topkube-cache.json"
_SUMMARY = "summary.json"
_QUARANTINED = 2
"""Damaged shards kept for inspection, per dataset."""
_KEY = re.compile(r"[0-9a-f]{32}")
_HASHED_AT_ONCE = 1 << 20
_DIGITS = 20


def _nothing(step: str) -> None:
    pass


step: Callable[[str], None] = _nothing
"""Called after every step of a publication, by name; tests end the process there."""


class Full(OSError):
    """There is no room for a shard within the limits."""


@dataclass(frozen=True)
class Limits:
    """`size`: most bytes of all datasets together, None: what the volume holds. `free`: bytes of the volume that stay
    free; else `free_percent` of it; where that is 0, 5% of it and at most 1 GiB."""

    size: int | None = None
    free: int | None = None
    free_percent: int = 0


@dataclass
class Reservation:
    """Room for one shard that is being written. Its lock lives as long as its process."""

    path: Path
    lock: FileLock

    def settle(self) -> None:
        """From here on the shard's record counts, not the reservation. Written in place: a full volume takes it."""
        file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(file, b"0" * _DIGITS, 0)
        finally:
            os.close(file)

    def release(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.lock.release()


class DiskTier:
    """A cache directory. Raises CacheError where it is not ours, OSError where it cannot be used at all."""

    def __init__(self, directory: Path, limits: Limits | None = None) -> None:
        self.directory, self.limits = directory, limits or Limits()
        self.writable = True
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise CacheError(f"{directory} is not a directory", next_step="name another cache directory") from None
        self._claim()
        try:
            for name in ("datasets", "reservations"):
                (directory / name).mkdir(exist_ok=True)
            with FileLock(directory / "space.lock"):
                self._reap()
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT):
                raise
            self.writable = False

    def _claim(self) -> None:
        """Marks an empty directory as ours; refuses another's, and a newer format, without touching it."""
        mark = self.directory / _MARK
        try:
            stored = json.loads(mark.read_text())
            found = stored["format"] if stored.get("kind") == "topkube-cache" else None
        except FileNotFoundError:
            others = [path.name for path in self.directory.iterdir() if path.name != "lost+found"]
            others = [name for name in others if not name.startswith(f".{_MARK}")]
            if others and not mark.exists():
                raise CacheError(
                    f"{self.directory} is not a cache: it holds {', '.join(sorted(others)[:3])}",
                    cause="the directory of something else",
                    next_step="name an empty directory; nothing here was touched",
                ) from None
            part = self.directory / f".{_MARK}.{uuid.uuid4().hex}"
            part.write_text(json.dumps({"kind": "topkube-cache", "format": FORMAT}) + "\n")
            os.replace(part, mark)
            return
        except (ValueError, KeyError, AttributeError, TypeError):
            found = None
        if found != FORMAT:
            what = f"of format {found}; this version knows {FORMAT}" if found is not None else "damaged or foreign"
            raise CacheError(
                f"the cache in {self.directory} is {what}",
                cause="a newer TopKube wrote it" if found is not None else f"{_MARK} is not what we write",
                next_step="use that version, or name another directory; nothing here was touched",
            )

    # ---- room

    def used(self) -> int:
        """Bytes of all published shards."""
        return sum(folder.log.total() for folder in self.datasets())

    def reserved(self) -> int:
        """Bytes of all shards being written."""
        return sum(size for size, _ in self._reservations())

    def _reservations(self) -> Iterator[tuple[int, Path]]:
        for path in (self.directory / "reservations").iterdir():
            with contextlib.suppress(OSError, ValueError):
                size, _, part = path.read_text().partition(" ")
                yield int(size), self.directory / part

    def free(self) -> int:
        """Bytes that the volume may still take before its floor."""
        volume = os.statvfs(self.directory)
        total, floor = volume.f_blocks * volume.f_frsize, self.limits.free
        if floor is None:
            percent = self.limits.free_percent
            floor = total * percent // 100 if percent else min(1 << 30, total // 20)
        return volume.f_bavail * volume.f_frsize - floor

    def reserve(self, size: int, part: Path, owner: DatasetFolder) -> Reservation:
        """Room for `size` bytes in `part`; makes it, where needed, by removing the datasets used longest ago that are
        neither pinned nor in use. Raises Full."""
        with FileLock(self.directory / "space.lock"):
            self._reap()
            while (lacking := self._lacking(size)) is not None:
                if not self._evict_oldest(owner):
                    raise Full(errno.ENOSPC, lacking)
            path = self.directory / "reservations" / uuid.uuid4().hex
            lock = FileLock(path)
            lock.acquire()
            path.write_text(f"{size:0{_DIGITS}} {part.relative_to(self.directory)}")
            return Reservation(path, lock)

    def _lacking(self, size: int) -> str | None:
        limit = self.limits.size
        if limit is not None and self.used() + self.reserved() + size > limit:
            return f"the limit of {limit:,} bytes is reached"
        if size > self.free():
            return "the volume is full up to what must stay free"
        return None

    def _evict_oldest(self, owner: DatasetFolder) -> bool:
        for folder in sorted(self.datasets(), key=lambda folder: folder.last_used):
            if folder.path != owner.path and not folder.pinned and folder.remove():
                owner.evictions += 1
                return True
        return False

    def _reap(self) -> int:
        """Removes what dead writers left; under space.lock. Returns how many there were."""
        count = 0
        for path in (self.directory / "reservations").iterdir():
            lock = FileLock(path)
            if not lock.acquire(wait=False):
                continue
            with contextlib.suppress(OSError):
                part = path.read_text().partition(" ")[2]
                if part and ".." not in part.split("/"):
                    (self.directory / part).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            lock.release()
            count += 1
        for trash in (self.directory / "datasets").glob(".removed-*"):
            shutil.rmtree(trash, ignore_errors=True)
        return count

    # ---- datasets

    def datasets(self) -> list[DatasetFolder]:
        try:
            names = sorted(path.name for path in (self.directory / "datasets").iterdir())
        except FileNotFoundError:
            return []
        return [folder for name in names if not name.startswith(".") and (folder := DatasetFolder.read(self, name))]

    def dataset(self, uri: str) -> DatasetFolder:
        """The dataset's folder, made where there is none."""
        name = xxhash.xxh3_64_hexdigest(uri.encode())
        folder = DatasetFolder(self, name, uri)
        if not (folder.path / "dataset.json").exists():
            folder.make()
        return folder


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
            if not self.tier.directory.joinpath(_MARK).exists():
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
