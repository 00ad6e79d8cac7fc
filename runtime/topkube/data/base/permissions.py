"""Permissions of the folders that the cache creates, and checks of folders that already exist."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from pathlib import Path

from topkube.errors import CacheError

_DEFAULT_ACCESS = "system.posix_acl_default"
_OWNER, _GROUP, _OTHERS, _NOBODY = 0x01, 0x04, 0x20, 0xFFFFFFFF
"""The tags of the entries of a POSIX access list, and the ID of an entry that names no user or group (acl(5))."""
_ACCESS_LIST_VERSION = 2
"""The version of the format in which the kernel stores an access list."""
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""The mode bits that let the group or other users write, and the bits that give them any access."""


def make_private_folder(folder: Path) -> None:
    """Create a folder that only this user may enter. Raises OSError for an existing folder that another user may have
    prepared: a link, a folder of another owner, or a folder to which others may write."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(errno.EPERM, f"{folder} is not a folder: another user may have put it there")
    if status.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM, f"{folder} belongs to user {status.st_uid}, who may have put any files there"
        )
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(
            errno.EPERM, f"others may write to {folder}; remove it, or `chmod 700` it while it is empty"
        )
    if status.st_mode & _OPEN_TO_OTHERS:
        os.chmod(folder, 0o700)


def set_cache_access(directory: Path, sharing: str) -> None:
    """Set who may enter the directory of a cache. The directory is empty or is already a cache.

    `sharing` is private (only this user), group (this user and the group of the directory, also for files that are
    created later), or auto: private if the directory belongs to this user and no other user may write to it, else
    unchanged. Raises CacheError for a directory that another user controls, and OSError.
    """
    status = os.stat(directory)
    is_owner = status.st_uid == os.geteuid()
    if sharing == "group":
        if is_owner:
            _open_to_group(directory)
        return
    if not is_owner and os.geteuid() != 0 and (status.st_uid != 0 or sharing == "private"):
        raise CacheError(
            f"the cache in {directory} belongs to user {status.st_uid}",
            cause="the owner of the directory can put any bytes there",
            next_step="use another directory; if you trust that user and your common group, both of you can set "
            "TOPKUBE_CACHE_SHARING=group",
        )
    is_shared = status.st_mode & _WRITABLE_BY_OTHERS or (_has_default(directory) and status.st_mode & _OPEN_TO_OTHERS)
    if is_owner and (sharing == "private" or not is_shared):
        with contextlib.suppress(OSError):  # some volumes have no modes: every user who can mount them can read them
            os.chmod(directory, 0o700)
        if not _has_default(directory):
            with contextlib.suppress(OSError):  # the mode of the folder alone keeps others out
                _set_default(directory, group=0)


def _open_to_group(directory: Path) -> None:
    try:
        os.chmod(directory, 0o2770)
        _set_default(directory, group=7)
    except OSError as error:
        raise CacheError(
            f"the cache in {directory} cannot be opened to its group ({error.strerror})",
            cause="the volume does not support default access lists",
            next_step="put the cache on ext4, XFS, Btrfs or tmpfs, or unset TOPKUBE_CACHE_SHARING",
        ) from None


def _has_default(directory: Path) -> bool:
    try:
        return bool(os.getxattr(directory, _DEFAULT_ACCESS))
    except OSError:
        return False


def _set_default(directory: Path, group: int) -> None:
    """Set the access list of all files that will be created in the directory. The umask does not apply to them."""
    entries = ((_OWNER, 7), (_GROUP, group), (_OTHERS, 0))
    packed = b"".join(struct.pack("<HHI", tag, rights, _NOBODY) for tag, rights in entries)
    os.setxattr(directory, _DEFAULT_ACCESS, struct.pack("<I", _ACCESS_LIST_VERSION) + packed)
