"""The disk tier: shards on a volume of the node, shared by ranks and by jobs.

    DIRECTORY/topkube-cache.json            marks the directory as a cache, and names its format
    DIRECTORY/space.lock reservations/      which process is about to write how much
    DIRECTORY/datasets/ID/dataset.json      the URI of the dataset; its modification time is the time of last use
    DIRECTORY/datasets/ID/summary.json      bytes and shards of the newest listing
    DIRECTORY/datasets/ID/records           size and xxh3-128 of every shard (record_log.py)
    DIRECTORY/datasets/ID/shards/XX/KEY     a whole shard; XX are the first two digits of the key
    DIRECTORY/datasets/ID/locks/KEY quarantine/ in-use pinned

This module has the directory and the reservation of space; dataset_folder.py has the folder of a dataset, and
publication.py the publication of shards. Files of dead writers are removed: the kernel has released the locks of these
writers.
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

from topkube.data.base.file_lock import FileLock
from topkube.data.base.permissions import set_cache_access
from topkube.data.cache.dataset_folder import DatasetFolder
from topkube.errors import CacheError
from topkube.files import write_json

FORMAT = 1
_MARK = "topkube-cache.json"
_DIGITS = 20


class Full(OSError):
    """A shard does not fit within the limits."""


@dataclass(frozen=True)
class DiskLimits:
    """The space that a disk tier may use.

    `size`: the most bytes of all datasets; None means no limit except the volume. `free`: bytes of the volume that
    stay free. If `free` is None, `free_percent` of the volume stay free; if that is 0, 5% of the volume and at most
    1 GiB.
    """

    size: int | None = None
    free: int | None = None
    free_percent: int = 0


@dataclass
class Reservation:
    """Reserved space for a shard that is being written. Its lock lives as long as the process of the writer."""

    path: Path
    lock: FileLock

    def settle(self) -> None:
        """Set the reserved size to 0, because the shard now has a record. Works on a full volume: written in place."""
        self.write(0)

    def write(self, size: int) -> None:
        """Replace the reserved size in place."""
        file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(file, f"{size:0{_DIGITS}}".encode(), 0)
        finally:
            os.close(file)

    def release(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.lock.release()


class DiskTier:
    """A cache directory. Raises CacheError if the directory is used for something else, OSError if it is unusable."""

    def __init__(self, directory: Path, limits: DiskLimits | None = None, sharing: str = "auto") -> None:
        self.directory, self.limits = directory, limits or DiskLimits()
        self.writable = True
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise CacheError(f"{directory} is not a directory", next_step="use another cache directory") from None
        self._claim(sharing)
        try:
            for name in ("datasets", "reservations"):
                (directory / name).mkdir(exist_ok=True)
            with FileLock(directory / "space.lock"):
                self._remove_leftovers()
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT):
                raise
            self.writable = False

    @property
    def is_gone(self) -> bool:
        """True if the volume no longer exists."""
        return not (self.directory / _MARK).exists()

    def _claim(self, sharing: str) -> None:
        """Mark an empty directory as a cache. Raises CacheError for a directory with other content or a newer format,
        and changes nothing. `sharing`: who may enter the directory (base/permissions.py)."""
        mark = self.directory / _MARK
        try:
            stored = json.loads(mark.read_text())
            stored_format = stored["format"] if stored.get("kind") == "topkube-cache" else None
        except FileNotFoundError:
            others = [path.name for path in self.directory.iterdir() if path.name != "lost+found"]
            others = [name for name in others if not name.startswith(f".{_MARK}")]
            if others and not mark.exists():
                raise CacheError(
                    f"{self.directory} is not a cache: it contains {', '.join(sorted(others)[:3])}",
                    cause="another program uses the directory",
                    next_step="use an empty directory; nothing here was touched",
                ) from None
            set_cache_access(self.directory, sharing)
            write_json(mark, {"kind": "topkube-cache", "format": FORMAT})
            return
        except (ValueError, KeyError, AttributeError, TypeError):
            stored_format = None
        if stored_format != FORMAT:
            is_newer = stored_format is not None
            raise CacheError(
                f"the cache in {self.directory} "
                + (f"has format {stored_format}; this version supports {FORMAT}" if is_newer else "is damaged"),
                cause="a newer TopKube wrote it" if is_newer else f"TopKube did not write its {_MARK}",
                next_step="use that version, or another directory; nothing here was touched",
            )
        try:
            set_cache_access(self.directory, sharing)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EPERM, errno.EACCES):
                raise

    # ---- space

    def used(self) -> int:
        """Return the bytes of all published shards and of their indexes."""
        return sum(folder.log.total() + folder.log.sum_index_bytes() for folder in self.datasets())

    def reserved(self) -> int:
        """Return the bytes of all shards that are being written."""
        return sum(size for size, _ in self._reservations())

    def _reservations(self) -> Iterator[tuple[int, Path]]:
        for path in (self.directory / "reservations").iterdir():
            with contextlib.suppress(OSError, ValueError):
                size, _, part = path.read_text().partition(" ")
                yield int(size), self.directory / part

    def free(self) -> int:
        """Return the bytes that may still be written to the volume."""
        volume = os.statvfs(self.directory)
        total, floor = volume.f_blocks * volume.f_frsize, self.limits.free
        if floor is None:
            percent = self.limits.free_percent
            floor = total * percent // 100 if percent else min(1 << 30, total // 20)
        return volume.f_bavail * volume.f_frsize - floor

    def reserve(self, size: int, part: Path, owner: DatasetFolder) -> Reservation:
        """Reserve `size` bytes for the file `part`. If there is not enough space, remove the least recently used
        datasets that are neither pinned nor in use. Raises Full."""
        with FileLock(self.directory / "space.lock"):
            self._remove_leftovers()
            while (reason := self._reason_against(size)) is not None:
                if not self._evict_oldest(owner):
                    raise Full(errno.ENOSPC, reason)
            path = self.directory / "reservations" / uuid.uuid4().hex
            lock = FileLock(path)
            lock.acquire()
            path.write_text(f"{size:0{_DIGITS}} {part.relative_to(self.directory)}")
            return Reservation(path, lock)

    def grow(self, reservation: Reservation, size: int, owner: DatasetFolder) -> None:
        """Raise a reservation to `size` bytes, like `reserve`. Raises Full."""
        with FileLock(self.directory / "space.lock"):
            more = size - int(reservation.path.read_text().partition(" ")[0])
            while (reason := self._reason_against(more)) is not None:
                if not self._evict_oldest(owner):
                    raise Full(errno.ENOSPC, reason)
            reservation.write(size)

    def _reason_against(self, size: int) -> str | None:
        """Return why `size` more bytes do not fit; None if they do."""
        limit = self.limits.size
        if limit is not None and self.used() + self.reserved() + size > limit:
            return f"the limit of {limit:,} bytes is reached"
        if size > self.free():
            return "the volume has only the space that must stay free"
        return None

    def _evict_oldest(self, owner: DatasetFolder) -> bool:
        for folder in sorted(self.datasets(), key=lambda folder: folder.last_used):
            if folder.path != owner.path and not folder.pinned and folder.remove():
                owner.evictions += 1
                return True
        return False

    def _remove_leftovers(self) -> int:
        """Remove the files of dead writers. Return their number. The caller holds space.lock."""
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
        """Return the folders of all datasets."""
        try:
            names = sorted(path.name for path in (self.directory / "datasets").iterdir())
        except FileNotFoundError:
            return []
        return [folder for name in names if not name.startswith(".") and (folder := DatasetFolder.read(self, name))]

    def dataset(self, uri: str) -> DatasetFolder:
        """Return the dataset's folder. Create it if it does not exist."""
        name = xxhash.xxh3_64_hexdigest(uri.encode())
        folder = DatasetFolder(self, name, uri)
        if not (folder.path / "dataset.json").exists():
            folder.make()
        return folder
