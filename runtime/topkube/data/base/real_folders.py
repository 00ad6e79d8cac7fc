"""Folders inside a directory to which others may write. At any time, a neighbour can replace such a folder with a link
to files of this process. Therefore a folder is opened without following links, and its files are changed through its
descriptor."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def open_real_folder(root: Path, *names: str, created: int = 0) -> Iterator[int]:
    """Yield a descriptor of the folder `root/NAME/NAME/…`. Only `root` may contain links. The last `created` folders
    are created if they do not exist. Raises OSError, also if a name is a link or a file."""
    folder = os.open(root, _FLAGS)
    try:
        for position, name in enumerate(names):
            assert name not in ("", ".", "..")
            assert "/" not in name
            if position >= len(names) - created:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder)
            below = _open_below(folder, root.joinpath(*names[: position + 1]))
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def _open_below(folder: int, path: Path) -> int:
    try:
        return os.open(path.name, _FLAGS | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise NotADirectoryError(errno.ENOTDIR, f"{path} is a link or a file, not a folder") from error
        raise


def remove_file(folder: int, name: str) -> None:
    """Remove a file in an open folder if it exists. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
