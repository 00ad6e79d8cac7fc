"""The publication of shards in a dataset's folder.

A shard is written under a temporary name, hashed, synced, recorded and then renamed. Therefore a file with its final
name is whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from topkube.data.base.file_lock import FileLock
from topkube.data.base.real_folders import remove_file
from topkube.data.cache.disk.shard_file import ReceivedChecksums, compute_digest
from topkube.errors import StoreError
from topkube.files import sync_directory

if TYPE_CHECKING:
    from topkube.data.cache.disk.dataset_folder import DatasetFolder
    from topkube.data.cache.disk.disk_tier import Reservation

Fill = Callable[[int], ReceivedChecksums | None]
"""A function that writes a shard to a descriptor, and returns its checksums (see `DatasetFolder.publish`)."""


def _ignore_step(step: str) -> None:
    pass


notify_step: Callable[[str], None] = _ignore_step
"""Called after each step of a publication, with the name of the step. Tests kill the process at a step."""


class ShardPublisher:
    """Publishes shards in `folder`."""

    def __init__(self, folder: DatasetFolder) -> None:
        self._folder, self._tier = folder, folder.tier
        self._growing: dict[int, Reservation] = {}
        """The reservations of files that are being written."""

    def publish(self, key: str, size: int, fill: Fill, samples: int, announce: Callable[[], object]) -> int:
        """Write and publish a shard (see `DatasetFolder.publish`)."""
        with self._folder.open_shard_folder(key, created=1) as folder:
            self._publish_in(folder, key, size, fill, samples, announce)
        read_only_file = self._folder.open(key)
        if read_only_file is None:
            raise FileNotFoundError(
                errno.ENOENT, "another process removed the shard", str(self._folder.get_shard_path(key))
            )
        return read_only_file

    def _publish_in(
        self, folder: int, key: str, size: int, fill: Fill, samples: int, announce: Callable[[], object]
    ) -> None:
        """Write and publish a shard in the open folder `folder`."""
        final = self._folder.get_shard_path(key)
        part = f".{key}.{uuid.uuid4().hex}.part"
        reservation = self._tier.reserve(max(size, 0), final.with_name(part), self._folder)
        file = -1
        try:
            notify_step("reserved")
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
            if size > 0:
                os.posix_fallocate(file, 0, size)
            notify_step("created")
            self._growing[file] = reservation
            received = fill(file) or ReceivedChecksums()
            notify_step("filled")
            if size < 0:
                size = os.fstat(file).st_size
            if os.fstat(file).st_size != size:
                raise OSError(errno.EIO, f"{os.fstat(file).st_size} bytes were written instead of {size}")
            hashed = received.digest or compute_digest(file, size)
            if received.expected and hashed != received.expected:
                raise StoreError(
                    f"the shard {key} has the digest {hashed}, its source has {received.expected}",
                    cause="faulty memory or a faulty disk changed bytes",
                    next_step="check the kernel's log for errors; run a memory test on this node",
                )
            notify_step("hashed")
            os.fchmod(file, os.fstat(file).st_mode & 0o444)  # read-only, for the users who may read it
            os.fsync(file)
            notify_step("synced")
            with FileLock(self._tier.directory / "space.lock"):  # no process counts both the record and the reservation
                self._folder.log.append(key, hashed, size, samples)
                reservation.settle()
            notify_step("recorded")
            announce()
            os.rename(part, key, src_dir_fd=folder, dst_dir_fd=folder)
            notify_step("renamed")
            sync_directory(final.parent)
            notify_step("published")
        except BaseException:
            self._growing.pop(file, None)  # before another thread can get a file of the same number
            if file >= 0:
                os.close(file)
            with contextlib.suppress(OSError):
                remove_file(folder, part)
            raise
        finally:
            self._growing.pop(file, None)
            with contextlib.suppress(OSError):
                reservation.release()
        os.close(file)  # this descriptor could write

    def is_being_published(self, file: int) -> bool:
        """Return True while `publish` writes this file."""
        return file in self._growing

    def reserve_more(self, file: int, size: int) -> None:
        """Increase the reserved space to `size` bytes in all, in the file that `publish` has passed to `fill`. Raises
        Full, OSError."""
        self._tier.grow(self._growing[file], size, self._folder)
        os.posix_fallocate(file, 0, size)
