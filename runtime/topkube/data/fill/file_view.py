"""A view of a dataset as read-only files with their own names, for scripts that read plain files.

The view grows while shards arrive. If an object is a shard, its file in the view is a hard link into the cache and
takes no space. Small files, which the cache stores together in a shard, are copied. A file gets its name when it is
whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from topkube.data.cache.shard_cache import ShardCache
from topkube.data.formats.shards import DataShard
from topkube.data.remote.listing import check_path
from topkube.files import replace_file, write_text

COMPLETE = ".topkube-complete"
"""A file in the view that exists when all files of the dataset are there. It contains the digest of the listing."""
_BEING_WRITTEN_SECONDS = 600.0
"""A hidden file that is younger than this may belong to another pod that is still writing it."""


class FileView:
    """The files of a dataset in `directory`. The constructor removes files of an older listing."""

    def __init__(self, cache: ShardCache, directory: Path) -> None:
        self._cache, self.directory = cache, directory
        directory.mkdir(parents=True, exist_ok=True)
        self._version = cache.shards.listing.compute_digest()
        if (directory / COMPLETE).exists() and (directory / COMPLETE).read_text() != self._version:
            (directory / COMPLETE).unlink()
        self.is_complete = (directory / COMPLETE).exists()
        """True if the view has all files of this listing. An earlier job on this node may have created them."""
        if not self.is_complete:
            self._prune()

    def _prune(self) -> None:
        """Remove the files that are not in the listing."""
        existing = [Path(folder, name) for folder, _, names in os.walk(self.directory) for name in names]
        if existing:
            listing = self._cache.shards.listing
            listed = {listing.paths[index] for index in range(len(listing))}
            recent = time.time() - _BEING_WRITTEN_SECONDS
            for path in existing:
                with contextlib.suppress(FileNotFoundError):
                    may_be_written = path.name.startswith(".") and path.lstat().st_ctime > recent
                    if path.relative_to(self.directory).as_posix() not in listed and not may_be_written:
                        path.unlink()

    def show(self, number: int) -> None:
        """Add the objects of a shard to the view. Raises OSError if the directory is full, and StoreError if the
        shard cannot be fetched."""
        cache, shard = self._cache, self._cache.shards[number]
        is_one_object = shard.stop - shard.start == 1
        if is_one_object and self._is_shown(shard):
            return
        opened, offset = cache.open(number, cache.fetch_from_store), 0
        for remote_object in cache.shards.list_objects(shard):
            check_path(remote_object.path, cache.shards.uri)
            target = self.directory / remote_object.path
            target.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(target) as part:
                if not (is_one_object and opened.is_cached and self._link(shard.key, part)):
                    _copy(opened.file, offset, remote_object.size, part)
            offset += remote_object.size

    def mark_complete(self) -> None:
        """Mark the view as complete: all files of the dataset are there."""
        write_text(self.directory / COMPLETE, self._version)
        self.is_complete = True

    def _is_shown(self, shard: DataShard) -> bool:
        """Return True if the view already has a link to the shard, which has one object."""
        if self._cache.folder is None:
            return False
        path = self._cache.shards.listing.paths[shard.start]
        try:
            return os.path.samefile(self.directory / path, self._cache.folder.get_shard_path(shard.key))
        except OSError:
            return False

    def _link(self, key: str, part: Path) -> bool:
        """Link the shard to `part`. Return False if the file systems do not allow that, or if the shard was evicted
        meanwhile."""
        assert self._cache.folder is not None
        try:
            source = self._cache.folder.get_shard_path(key)
            os.link(source, part)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT):
                return False
            raise
        return True


def _copy(file: int, start: int, size: int, part: Path) -> None:
    """Copy `size` bytes of an open file, from `start` on, to the new file `part`."""
    out = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    try:
        end = start + size
        while start < end:
            count = os.sendfile(out, file, start, end - start)
            if count == 0:
                raise OSError(errno.EIO, "the shard is shorter than its listing", str(part))
            start += count
    finally:
        os.close(out)
