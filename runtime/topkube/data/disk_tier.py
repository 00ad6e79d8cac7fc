"""The disk tier: shards on a volume of the node, shared by ranks and by jobs.

    DIRECTORY/topkube-cache.json            what this is, and its format
    DIRECTORY/space.lock reservations/      who is about to write how much
    DIRECTORY/datasets/ID/dataset.json      its URI; the time of last use is the file's
    DIRECTORY/datasets/ID/summary.json      bytes and shards of its newest listing
    DIRECTORY/datasets/ID/records           size and xxh3-128 of every shard (records.py)
    DIRECTORY/datasets/ID/shards/XX/KEY     a whole shard; XX are the key's first two digits
    DIRECTORY/datasets/ID/locks/KEY quarantine/ in-use pinned

Here is the directory and who may write how much; the folder of a dataset, and how a shard gets into it, is in
dataset_folder.py. What dead writers left is reaped: the kernel has freed their locks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from topkube.data.dataset_folder import DatasetFolder
from topkube.data.locks import FileLock
from topkube.errors import CacheError

FORMAT = 1
_MARK = "topkube-cache.json"
_DIGITS = 20


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

    @property
    def gone(self) -> bool:
        """Whether the volume is no longer there."""
        return not (self.directory / _MARK).exists()

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
