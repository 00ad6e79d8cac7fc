"""Files and folders that other processes see complete or not at all.

A new version is written under a hidden name in the same folder, `.NAME.RANDOM.part`, and then renamed. If writing
fails, for example on a full disk, the hidden version is removed and the earlier version stays as it was. A process that
is killed in the middle leaves its hidden version behind; the earlier version stays as well.

Nothing here waits for the disk, except `sync_directory`. A writer whose data must survive a power failure syncs its
file before it leaves the `with` block, and the directory afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MOST_NAME_BYTES = 255
"""The longest name in a folder of Linux's file systems."""


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the hidden name under which the caller writes a file. Rename the file to `path` when the block ends, and
    remove it if the block or the rename raises an error. An earlier file at `path` is replaced."""
    part = _name_hidden(path)
    try:
        yield part
        os.replace(part, path)
    finally:  # also after a rename: the kernel keeps both names if they are links to the same file
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def replace_file_in(folder: int, name: str) -> Iterator[str]:
    """Do the same as `replace_file` for a file in an open folder: yield the hidden name in this folder."""
    part = _name_hidden(Path(name)).name
    try:
        yield part
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=folder)


def write_bytes_in(folder: int, name: str, data: bytes, *, synced: bool = False) -> None:
    """Replace a file in an open folder, or create it. If `synced`, its bytes are then on the disk. Raises OSError; the
    earlier file is unchanged then."""
    with replace_file_in(folder, name) as part:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if synced:
                os.fsync(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file at `path`, or create it. Raises OSError; the earlier file is unchanged then."""
    with replace_file(path) as part:
        part.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` with `text` in UTF-8, or create it. Raises OSError; the earlier file is unchanged
    then."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any, *, indent: int | None = None) -> None:
    """Replace the file at `path` with `value` as JSON and a line break. Raises OSError, and what `json.dumps` raises;
    the earlier file is unchanged then."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


@contextlib.contextmanager
def create_folder(path: Path) -> Iterator[Path]:
    """Yield the hidden name under which the caller creates and fills a folder. Rename the folder to `path` when the
    block ends, and remove it if the block or the rename raises an error. Raises FileExistsError if there is a folder at
    `path` that is not empty, for example because another process was faster."""
    part = _name_hidden(path)
    try:
        yield part
        os.rename(part, path)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError) and error.errno == errno.ENOTEMPTY:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        raise


def explain_unwritable(path: Path, *, creates_folders: bool = False) -> str:
    """Return why no file can be written at `path`, "" if one can: for work whose result the file gets. With
    `creates_folders`, folders that do not exist are created before the file."""
    folder = Path(os.path.abspath(path)).parent
    while creates_folders and not os.path.lexists(folder):
        folder = folder.parent
    if os.path.isdir(path):
        return "it is a directory"
    if not os.path.isdir(folder):
        return f"{folder} is not a directory" if os.path.lexists(folder) else "its folder does not exist"
    is_writable = os.access(path, os.W_OK) if os.path.exists(path) else os.access(folder, os.W_OK | os.X_OK)
    return "" if is_writable else "permission denied"


_UNSUPPORTED = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems that do not sync directories, such as SMB shares on older kernels."""


def sync_directory(directory: Path) -> None:
    """Write the names in `directory` to the disk: names that were created, renamed or removed survive a power failure
    when this returns, if the file system can sync directories. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def _name_hidden(path: Path) -> Path:
    """Return a new hidden name. A long name is shortened, so that every name that the folder can have is possible."""
    ending = f".{os.urandom(8).hex()}.part"
    name = os.fsencode(path.name)[: _MOST_NAME_BYTES - len(ending) - 1].decode(errors="ignore")
    return path.with_name(f".{name}{ending}")
