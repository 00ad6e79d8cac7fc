"""The disk tier: shards on a volume of the node, shared by ranks and by jobs.

    DIRECTORY/topkube-cache.json            marks the directory as a cache, and names its format
    DIRECTORY/space.lock reservations/      the bytes that each process is about to write
    DIRECTORY/datasets/ID/dataset.json      the URI of the dataset; its modification time is the time of last use
    DIRECTORY/datasets/ID/summary.json      bytes and shards of the newest listing
    DIRECTORY/datasets/ID/records           size and xxh3-128 of every shard (record_log.py)
    DIRECTORY/datasets/ID/shards/XX/KEY     a whole shard; XX are the first two digits of the key
    DIRECTORY/datasets/ID/locks/KEY quarantine/ in-use pinned

This module manages the directory and reserves space. dataset_folder.py manages the folder of a dataset, and
publication.py publishes shards. If a writer dies, the kernel releases its locks. Therefore other processes recognise
its files and remove them.

Neighbours may be able to write to the directory, and what they write is not trusted: files are removed, replaced and
renamed only in real folders of the directory (base/real_folders.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from topkube.data.base.file_lock import FileLock
from topkube.data.base.permissions import set_cache_access
from topkube.data.base.real_folders import open_real_folder, remove_file
from topkube.data.base.small_file import read_small_text
from topkube.data.cache.disk.dataset_folder import DatasetFolder
from topkube.errors import CacheError
from topkube.files import write_json

FORMAT = 1
_MARK = "topkube-cache.json"
_DIGITS = 20
"""The digits of a reserved size, which is replaced in place."""
_PART = re.compile(r"datasets/([0-9a-f]{16})/shards/([0-9a-f]{2})/(\.[0-9a-f]{32}\.[0-9a-f]{32}\.part)")
"""The path of a shard that is being written."""


class Full(OSError):
    """A shard does not fit within the limits."""


@dataclass(frozen=True)
class DiskLimits:
    """The space that a disk tier may use.

    `size`: the most bytes of all datasets; None means no limit except the volume. `free`: the bytes of the volume that
    stay free. If `free` is None, `free_percent` of the volume stay free. If `free_percent` is 0 too, 5% of the volume
    stay free, but at most 1 GiB.
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
        """Set the reserved size to 0, because the shard now has a record. This also works if the volume is full."""
        self.write(0)

    def write(self, size: int) -> None:
        """Replace the reserved size in place."""
        self._write_text(f"{size:0{_DIGITS}}")

    def begin(self, size: int, part: Path) -> None:
        """Write the reserved size and the path of the shard in the cache directory."""
        self._write_text(f"{size:0{_DIGITS}} {part}")

    def _write_text(self, text: str) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)

    def release(self) -> None:
        """Remove the reservation."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.lock.release()


class DiskTier:
    """A cache directory. Raises CacheError if another program uses the directory, OSError if it cannot be used."""

    def __init__(self, directory: Path, limits: DiskLimits | None = None, sharing: str = "auto") -> None:
        self.directory, self.limits = directory, limits or DiskLimits()
        self.is_writable = True
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise CacheError(f"{directory} is not a directory", next_step="use another cache directory") from None
        self._mark_directory(sharing)
        try:
            for name in ("datasets", "reservations"):
                (directory / name).mkdir(exist_ok=True)
            with FileLock(directory / "space.lock"):
                self._remove_leftovers()
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT):
                raise
            self.is_writable = False

    @property
    def is_gone(self) -> bool:
        """True if the volume no longer exists."""
        return not (self.directory / _MARK).exists()

    def _mark_directory(self, sharing: str) -> None:
        """Mark an empty directory as a cache. Raises CacheError, and changes nothing, if the directory has other
        content or a newer format. `sharing`: the users who may enter the directory (base/permissions.py)."""
        mark = self.directory / _MARK
        try:
            stored = json.loads(read_small_text(mark))
            stored_format = stored["format"] if stored.get("kind") == "topkube-cache" else None
        except FileNotFoundError:
            other_names = [path.name for path in self.directory.iterdir() if path.name != "lost+found"]
            other_names = [name for name in other_names if not name.startswith(f".{_MARK}")]
            if other_names and not mark.exists():
                raise CacheError(
                    f"{self.directory} is not a cache: it contains {', '.join(sorted(other_names)[:3])}",
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

    def count_used_bytes(self) -> int:
        """Return the bytes of all published shards and of their indexes."""
        return sum(folder.log.sum_shard_bytes() + folder.log.sum_index_bytes() for folder in self.list_folders())

    def count_reserved_bytes(self) -> int:
        """Return the bytes of all shards that are being written."""
        return sum(size for size, _ in self._read_reservations())

    def _read_reservations(self) -> Iterator[tuple[int, Path]]:
        """Yield the bytes and the file of each reservation."""
        for path in (self.directory / "reservations").iterdir():
            with contextlib.suppress(OSError, ValueError):
                size, _, part = read_small_text(path).partition(" ")
                yield int(size), self.directory / part

    def count_free_bytes(self) -> int:
        """Return the bytes that may still be written to the volume; negative if too little of it is free."""
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
            while (reason := self._explain_refusal(size)) is not None:
                if not self._evict_oldest(owner):
                    raise Full(errno.ENOSPC, reason)
            path = self.directory / "reservations" / uuid.uuid4().hex
            reservation = Reservation(path, FileLock(path))
            reservation.lock.acquire()
            reservation.begin(size, part.relative_to(self.directory))
            return reservation

    def grow(self, reservation: Reservation, size: int, owner: DatasetFolder) -> None:
        """Increase a reservation to `size` bytes, and remove datasets as `reserve` does. Raises Full."""
        with FileLock(self.directory / "space.lock"):
            more = size - int(read_small_text(reservation.path).partition(" ")[0])
            while (reason := self._explain_refusal(more)) is not None:
                if not self._evict_oldest(owner):
                    raise Full(errno.ENOSPC, reason)
            reservation.write(size)

    def _explain_refusal(self, size: int) -> str | None:
        """Return the reason why `size` more bytes do not fit; None if they fit."""
        limit = self.limits.size
        if limit is not None and self.count_used_bytes() + self.count_reserved_bytes() + size > limit:
            return f"the limit of {limit:,} bytes is reached"
        if size > self.count_free_bytes():
            return "the volume has only the space that must stay free"
        return None

    def _evict_oldest(self, owner: DatasetFolder) -> bool:
        """Remove the least recently used dataset that may be removed, and count the eviction for `owner`. Return False
        if there is no such dataset."""
        for folder in sorted(self.list_folders(), key=lambda folder: folder.last_used):
            if folder.path != owner.path and not folder.is_pinned and folder.remove():
                owner.evictions += 1
                return True
        return False

    def _remove_leftovers(self) -> int:
        """Remove the files of dead writers. Return their number. The caller holds space.lock."""
        count = 0
        with open_real_folder(self.directory, "reservations") as reservations:
            for name in os.listdir(reservations):
                lock = FileLock(self.directory / "reservations" / name)
                if not lock.acquire(wait=False):
                    continue
                with contextlib.suppress(OSError, ValueError):
                    self._remove_part(read_small_text(lock.path).partition(" ")[2])
                remove_file(reservations, name)
                lock.release()
                count += 1
        with open_real_folder(self.directory, "datasets") as datasets:
            for name in os.listdir(datasets):
                if name.startswith(".removed-"):
                    shutil.rmtree(name, ignore_errors=True, dir_fd=datasets)
        return count

    def _remove_part(self, part: str) -> None:
        """Remove a shard that a dead process was writing. A text that is not the path of such a shard is ignored.
        Raises OSError."""
        if (path := _PART.fullmatch(part)) is not None:
            dataset, prefix, name = path.groups()
            with open_real_folder(self.directory, "datasets", dataset, "shards", prefix) as folder:
                remove_file(folder, name)

    # ---- datasets

    def list_folders(self) -> list[DatasetFolder]:
        """Return the folders of all datasets."""
        try:
            names = sorted(path.name for path in (self.directory / "datasets").iterdir())
        except FileNotFoundError:
            return []
        return [folder for name in names if not name.startswith(".") and (folder := DatasetFolder.read(self, name))]

    def open_folder(self, uri: str) -> DatasetFolder:
        """Return the folder of the dataset with this address. Create the folder if it does not exist, and its
        `dataset.json` again if it is damaged: the limits count only datasets whose file can be read."""
        name = xxhash.xxh3_64_hexdigest(uri.encode())
        known = DatasetFolder.read(self, name)
        if known is not None and known.uri == uri:
            return known
        folder = DatasetFolder(self, name, uri)
        folder.create()
        return folder
