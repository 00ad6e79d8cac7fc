"""A view of a dataset as read-only files with their own names, for scripts that read plain files.

The view grows while shards arrive. If an object is a shard, its file in the view is a hard link into the cache and
takes no space. Small files, which the cache stores together in a shard, are copied. A file gets its name when it is
whole.

In a node cache, neighbours may write to the folder of the view. Therefore no link in it is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from topkube.data.base.real_folders import open_real_folder, remove_file
from topkube.data.cache.shard_cache import ShardCache
from topkube.data.formats.shards import DataShard
from topkube.data.remote.listing import check_path
from topkube.files import replace_file_in, write_bytes_in

COMPLETE = ".topkube-complete"
"""A file in the view that exists when all files of the dataset are there. It contains the digest of the listing."""
_BEING_WRITTEN_SECONDS = 600.0
"""A hidden file that is younger than this may belong to another pod that is still writing it."""


class FileView:
    """The files of a dataset in `directory`. The constructor removes files of an older listing. Raises OSError.

    cache_directory: the directory of the cache, to which neighbours may write. If the view is in it, no link below it
    is followed; else no link in the view is followed.
    """

    def __init__(self, cache: ShardCache, directory: Path, cache_directory: Path | None = None) -> None:
        self._cache, self.directory = cache, directory
        is_in_cache = cache_directory is not None and directory.is_relative_to(cache_directory)
        self._root = cache_directory if cache_directory is not None and is_in_cache else directory
        """The folder below which no link is followed."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._version = cache.shards.listing.compute_digest()
        with self._open_folder() as folder:
            if (directory / COMPLETE).exists() and (directory / COMPLETE).read_text() != self._version:
                remove_file(folder, COMPLETE)
        self.is_complete = (directory / COMPLETE).exists()
        """True if the view has all files of this listing. An earlier job on this node may have created them."""
        if not self.is_complete:
            self._prune()

    def _open_folder(self, *names: str) -> contextlib.AbstractContextManager[int]:
        """Open a folder of the view (see `open_real_folder`), and create it if it does not exist."""
        all_names = (*self.directory.relative_to(self._root).parts, *names)
        return open_real_folder(self._root, *all_names, created=len(all_names))

    def _prune(self) -> None:
        """Remove the files that are not in the listing."""
        recent = time.time() - _BEING_WRITTEN_SECONDS
        with self._open_folder() as view:
            if not os.listdir(view):
                return
            listing = self._cache.shards.listing
            listed = {listing.paths[index] for index in range(len(listing))}
            for place, _, names, folder in os.fwalk(".", dir_fd=view):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        may_be_written = name.startswith(".") and status.st_ctime > recent
                        if Path(place, name).as_posix() not in listed and not may_be_written:
                            os.unlink(name, dir_fd=folder)

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
            *folders, name = Path(remote_object.path).parts
            with self._open_folder(*folders) as folder, replace_file_in(folder, name) as part:
                if not (is_one_object and opened.is_cached and self._link(shard.key, folder, part)):
                    _copy(opened.file, offset, remote_object.size, folder, part)
            offset += remote_object.size

    def mark_complete(self) -> None:
        """Mark the view as complete: all files of the dataset are there."""
        with self._open_folder() as folder:
            write_bytes_in(folder, COMPLETE, self._version.encode())
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

    def _link(self, key: str, folder: int, part: str) -> bool:
        """Link the shard to `part` in the open folder. Return False if the file systems do not allow that, or if the
        shard was evicted meanwhile."""
        assert self._cache.folder is not None
        try:
            source = self._cache.folder.get_shard_path(key)
            os.link(source, part, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT):
                return False
            raise
        return True


def _copy(file: int, start: int, size: int, folder: int, part: str) -> None:
    """Copy `size` bytes of an open file, from `start` on, to the new file `part` in the open folder."""
    out = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444, dir_fd=folder)
    try:
        end = start + size
        while start < end:
            count = os.sendfile(out, file, start, end - start)
            if count == 0:
                raise OSError(errno.EIO, "the shard is shorter than its listing", part)
            start += count
    finally:
        os.close(out)
