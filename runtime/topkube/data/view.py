"""A dataset under its own file names, read-only, growing as shards arrive: for scripts that read plain files.

Whole objects are hard links into the cache and cost nothing; small files, which the cache keeps together, are copies.
A file has its name only once it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from pathlib import Path

from topkube.data.cache import Cache
from topkube.data.listing import check_path
from topkube.data.shards import Shard

COMPLETE = ".topkube-complete"
"""In the view: all files of the dataset are there. Holds the listing's digest."""
_BEING_WRITTEN_SECONDS = 600.0
"""A hidden file so young may be another pod's, on its way."""


class View:
    """Files of a dataset below `directory`. Files of an older listing are removed at once."""

    def __init__(self, cache: Cache, directory: Path) -> None:
        self._cache, self._directory = cache, directory
        directory.mkdir(parents=True, exist_ok=True)
        self._version = cache.shards.listing.digest()
        if (directory / COMPLETE).exists() and (directory / COMPLETE).read_text() != self._version:
            (directory / COMPLETE).unlink()
        self.is_complete = (directory / COMPLETE).exists()
        """Whether all of this listing is shown, by us or by an earlier job on this node."""
        if not self.is_complete:
            self._prune()

    def _prune(self) -> None:
        """Removes what is not in the listing."""
        there = [Path(folder, name) for folder, _, names in os.walk(self._directory) for name in names]
        if there:
            listing = self._cache.shards.listing
            listed = {listing.paths[index] for index in range(len(listing))}
            recent = time.time() - _BEING_WRITTEN_SECONDS
            for path in there:
                with contextlib.suppress(FileNotFoundError):
                    being_written = path.name.startswith(".") and path.lstat().st_ctime > recent
                    if path.relative_to(self._directory).as_posix() not in listed and not being_written:
                        path.unlink()

    def show(self, number: int) -> None:
        """Puts the objects of a shard in their places. Raises OSError where the directory takes no more, StoreError."""
        cache, shard = self._cache, self._cache.shards[number]
        single = shard.stop - shard.start == 1
        if single and self._is_shown(shard):
            return
        opened, at = cache.open(number, cache.from_store), 0
        for one in cache.shards.objects(shard):
            check_path(one.path, cache.shards.uri)
            target = self._directory / one.path
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
            try:
                if not (single and opened.cached and self._linked(shard.key, part)):
                    _copy(opened.file, at, one.size, part)
                os.replace(part, target)
            finally:
                part.unlink(missing_ok=True)
            at += one.size

    def complete(self) -> None:
        """Says by a file of its own that all of this listing is shown."""
        part = self._directory / f"{COMPLETE}.{uuid.uuid4().hex}"
        part.write_text(self._version)
        os.replace(part, self._directory / COMPLETE)
        self.is_complete = True

    def _is_shown(self, shard: Shard) -> bool:
        """Whether the shard's one file is a link to it already."""
        if self._cache.folder is None:
            return False
        path = self._cache.shards.listing.paths[shard.start]
        try:
            return os.path.samefile(self._directory / path, self._cache.folder.shard_path(shard.key))
        except OSError:
            return False

    def _linked(self, key: str, part: Path) -> bool:
        assert self._cache.folder is not None
        try:
            source = self._cache.folder.shard_path(key)
            os.link(source, part)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT):
                return False
            raise
        return True


def _copy(file: int, start: int, size: int, part: Path) -> None:
    out = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    try:
        end = start + size
        while start < end:
            done = os.sendfile(out, file, start, end - start)
            if done == 0:
                raise OSError(errno.EIO, "the shard is shorter than its listing", str(part))
            start += done
    finally:
        os.close(out)
