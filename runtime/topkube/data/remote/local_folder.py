"""The listing of a folder of this machine. Links count as the files and folders to which they lead."""

from __future__ import annotations

import errno
import os
import stat

from topkube.data.remote.listing import RemoteObject
from topkube.errors import DatasetError

_LINKED_FOLDERS = 100_000
"""The most folders that are read through links. Links to folders with such links could make a listing endless."""
_Place = tuple[int, int]
"""A folder on its volume: the numbers of the volume and of the folder."""


def list_folder(root: str) -> list[RemoteObject]:
    """Return the files in `root` and in the folders below it. Their versions are the times of their last change. Pipes,
    sockets and devices are left out. Raises OSError if a folder cannot be read, DatasetError for a link that leads
    nowhere or back to a folder above it, and if `root` is a file."""
    if os.path.isfile(root):
        raise build_file_error(root)
    objects: list[RemoteObject] = []
    folders: list[tuple[str, frozenset[_Place], bool]] = [("", frozenset(), False)]
    linked_count = 0
    while folders:
        folder, above, is_linked = folders.pop()
        linked_count += is_linked
        if linked_count > _LINKED_FOLDERS:
            raise DatasetError(
                f"{root} has more than {_LINKED_FOLDERS:,} folders behind links",
                cause="links to folders that contain links, each of which is read again",
                next_step="replace the links by the folders, or write a manifest for the dataset",
            )
        status = os.stat(os.path.join(root, folder))
        place = (status.st_dev, status.st_ino)
        if place in above:
            raise DatasetError(
                f"{os.path.join(root, folder)} is a link to a folder that contains it",
                cause="every file below it would have an endless number of names",
                next_step="remove the link",
            )
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                path, entry_status = folder + entry.name, _read_status(entry)
                if entry_status is None:
                    continue
                if stat.S_ISDIR(entry_status.st_mode):
                    folders.append((f"{path}/", above | {place}, is_linked or entry.is_symlink()))
                elif stat.S_ISREG(entry_status.st_mode):
                    objects.append(RemoteObject(path, entry_status.st_size, str(entry_status.st_mtime)))
    return objects


def _read_status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of a file or folder, or of the target of a link. Return None for a file that was removed after
    its folder was read. Raises OSError, and DatasetError for a link that leads nowhere."""
    try:
        return entry.stat()
    except OSError as error:
        if not entry.is_symlink():
            if isinstance(error, FileNotFoundError):
                return None
            raise
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        raise DatasetError(
            f"{entry.path} is a link that leads nowhere",
            cause="its target was moved or removed, or is not mounted here",
            next_step="remove the link, or restore its target",
        ) from None


def build_file_error(address: str) -> DatasetError:
    """Return the error for a file in the place of a folder."""
    return DatasetError(f"{address} is a file", next_step="pass the folder that contains it, or a manifest (.jsonl)")
