"""A dataset under its own file names, read-only, growing as shards arrive: for scripts that read plain files.

Whole objects are hard links into the cache and cost nothing; small files, which the cache keeps together, are copies.
A file has its name only once it is whole.
"""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

from topkube.data.cache import Cache
from topkube.data.listing import check_path


class View:
    """Files of a dataset below `directory`."""

    def __init__(self, cache: Cache, directory: Path) -> None:
        self._cache, self._directory = cache, directory
        directory.mkdir(parents=True, exist_ok=True)

    def show(self, number: int) -> None:
        """Puts the objects of a shard in their places. Raises OSError where the directory takes no more, StoreError."""
        cache, shard = self._cache, self._cache.shards[number]
        opened, at = cache.open(number, cache.from_store), 0
        single = shard.stop - shard.start == 1
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
